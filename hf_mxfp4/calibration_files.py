# SPDX-License-Identifier: Apache-2.0
"""What calibration writes: a file of tokens and input statistics, and a folder of finished blocks to resume from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

KIND = "hf_mxfp4.calibration"
VERSION = "1"
_SAMPLED = 64  # weights of each parameter that go into a fingerprint


class Statistics(NamedTuple):
    """Tokens, and what the inputs of each module to pack looked like when a model read them.

    Attributes:
        tokens: int64 `[S, L]`.
        diagonals: mean squared input of each channel, float32: `[K]` by the name of a linear, `[E, K]` by the name of
            an experts module and its projection (`model.layers.0.mlp.experts.down_proj`). All ones where no token
            came by.
        counts: tokens seen, int64 `[]` or `[E]`, by the same names.
        fingerprint: of the full-precision model, see `fingerprint`.
        source: where the tokens came from.
        seed: of the tokens.
    """

    tokens: torch.Tensor
    diagonals: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    fingerprint: dict[str, str]
    source: str
    seed: int


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Hashes that tell one full-precision model from another.

    Returns:
        `structure`: of the names and shapes of all parameters. `weights`: of some weights of each as float32, absent
        while parameters are on the meta device.
    """
    parameters = sorted(model.named_parameters(remove_duplicate=False))
    found = {"structure": _digest(json.dumps([[name, *p.shape] for name, p in parameters]).encode())}
    if not any(p.is_meta for _, p in parameters):
        samples = [p.detach().reshape(-1)[:: max(1, p.numel() // _SAMPLED)].float().cpu() for _, p in parameters]
        found["weights"] = _digest(torch.cat(samples).numpy().tobytes())
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def save_statistics(path: str | Path, statistics: Statistics) -> None:
    """Write a calibration.safetensors, whole or not at all."""
    tensors = {"tokens": statistics.tokens, **_prefixed(statistics)}
    metadata = {"source": statistics.source, "seed": str(statistics.seed), **statistics.fingerprint}
    _write(Path(path), tensors, {"kind": KIND, "version": VERSION} | metadata)


def load_statistics(path: str | Path, model: nn.Module | None = None) -> Statistics:
    """Read a calibration.safetensors.

    Args:
        path: the file.
        model (*optional*): the model it must have been made for: full precision, its weights may be on the meta
            device.

    Raises:
        ValueError: for damaged files, other files, and files of another model.
    """
    tensors, metadata = _read(Path(path), "cpu")
    if metadata.get("kind") != KIND or metadata.get("version") != VERSION:
        raise ValueError(
            f"{path} is not a calibration file of version {VERSION} (kind {metadata.get('kind')!r}, version "
            f"{metadata.get('version')!r}). Name a file made by hf_mxfp4, or calibrate again."
        )
    tokens = tensors.pop("tokens", torch.empty(0))
    diagonals, counts = _unprefixed(tensors)
    stored = {name: metadata[name] for name in ("structure", "weights") if name in metadata}
    whole = tokens.ndim == 2 and tokens.numel() > 0 and tokens.dtype == torch.int64 and stored
    whole = whole and "source" in metadata and metadata.get("seed", "").isdecimal()
    for name, diagonal in diagonals.items():
        count = counts.get(name, torch.empty(0))
        whole = whole and diagonal.dtype == torch.float32 and count.shape == diagonal.shape[:-1]
        whole = whole and bool(((diagonal >= 0) & diagonal.isfinite()).all())
    if not whole:
        raise ValueError(f"{path} is damaged: tokens or statistics are missing or have bad values. Calibrate again.")
    if model is not None:
        own = fingerprint(model)
        other = [name for name in own.keys() & stored.keys() if own[name] != stored[name]]
        if other:
            what = "of other parameters" if "structure" in other else "with the same parameters and other weights"
            raise ValueError(f"{path} was made for a model {what}. Calibrate this model, or load the one of the file.")
    return Statistics(tokens, diagonals, counts, stored, metadata["source"], int(metadata["seed"]))


def _prefixed(statistics) -> dict[str, torch.Tensor]:
    """Diagonals and counts under names that no tensor of a model has."""
    parts = {"diagonal": statistics.diagonals, "count": statistics.counts}
    return {f"{part}:{name}": tensor for part, found in parts.items() for name, tensor in found.items()}


def _unprefixed(tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """The reverse; takes what it finds out of `tensors`."""
    parts: dict[str, dict] = {"diagonal": {}, "count": {}}
    for key in [key for key in tensors if key.partition(":")[0] in parts]:
        part, _, name = key.partition(":")
        parts[part][name] = tensors.pop(key)
    return parts["diagonal"], parts["count"]


class Block(NamedTuple):
    """A finished block.

    Attributes:
        tensors: what the packer made, by full name.
        diagonals, counts: as in `Statistics`, of the block's modules.
        notes: why a module was packed without error feedback, or with other damping, by name.
    """

    tensors: dict[str, torch.Tensor]
    diagonals: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    notes: dict[str, str]


class Job:
    """A folder of finished blocks, from which a run that was stopped goes on.

    Args:
        folder: made if it does not exist.
        parts: everything the packed tensors depend on, by name; anything JSON can hold.

    Raises:
        ValueError: if the folder holds blocks of another job.
    """

    def __init__(self, folder: str | Path, parts: dict):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        file, parts = self.folder / "job.json", json.loads(json.dumps({"version": VERSION} | parts))
        if not file.exists():
            if any(self.folder.glob("block-*.safetensors")):
                raise ValueError(f"{folder} holds blocks but no job.json. Use an empty folder, or delete them.")
            _replace(file, lambda temporary: temporary.write_text(json.dumps(parts, indent=1), encoding="utf-8"))
            return
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}. Use an empty folder, or delete this one.") from error
        differences = _differences(stored, parts)
        if differences:
            raise ValueError(
                f"{folder} holds blocks of another job; other than there: {', '.join(differences)}. Use an empty "
                "folder, delete this one, or go on with what it was started with."
            )

    def load(self, index: int, device: torch.device) -> Block | None:
        """A finished block, or `None`."""
        file = self._file(index)
        if not file.exists():
            return None
        tensors, metadata = _read(file, str(device))
        diagonals, counts = _unprefixed(tensors)
        return Block(tensors, diagonals, counts, json.loads(metadata["notes"]))

    def save(self, index: int, block: Block) -> None:
        """Keep a finished block."""
        _write(self._file(index), block.tensors | _prefixed(block), {"notes": json.dumps(block.notes)})

    def _file(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"


def _differences(stored, wanted, path: str = "") -> list[str]:
    """Paths of the values in which two JSON structures differ, with both values where they are short."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        found = []
        for key in sorted(stored.keys() | wanted.keys()):
            found += _differences(stored.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        return found
    if stored == wanted:
        return []
    shown = f"{path} ({stored!r} there, {wanted!r} here)"
    return [shown if len(shown) < 100 else path]


def _read(file: Path, device: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt", device=device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file ({error}). Delete it and run again.") from error


def _write(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    # Copies: tensors that share memory cannot be written.
    copies = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }
    _replace(file, lambda temporary: save_file(copies, temporary, metadata))


def _replace(file: Path, write) -> None:
    """Write a file under a temporary name, and give it its own once it is on disk."""
    temporary = file.with_name(f"{file.name}.tmp")
    write(temporary)
    with open(temporary, "rb+") as opened:
        os.fsync(opened.fileno())
    os.replace(temporary, file)
