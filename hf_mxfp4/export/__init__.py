# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints written in another layout: compressed-tensors, ModelOpt, or full precision.

Files to files: no model is built, and only one unit (`units`) of a checkpoint is in memory at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4.checkpoint_files import Checkpoint, TensorReader, read_checkpoint
from hf_mxfp4.checkpoint_writer import (
    DTYPES,
    Shard,
    ShardWriter,
    TensorSpec,
    plan_shards,
    size_in_bytes,
    total_size,
    write_index,
)
from hf_mxfp4.checkpoints import FULL_PRECISION, HF_MXFP4_KEY, compressed_tensors_config
from hf_mxfp4.export import configs
from hf_mxfp4.export.output import HF_QUANT_CONFIG, beside, remove_leftovers
from hf_mxfp4.export.units import (
    MANY,
    CannotExport,
    Changes,
    Packing,
    Unit,
    dense_units,
    modules_of,
    packed_units,
    plain_units,
    raise_together,
)
from hf_mxfp4.formats import MXFP4, NVFP4
from hf_mxfp4.layouts import Contents, read
from hf_mxfp4.output_files import check_output, copy_others, write_checksums, write_file

__all__ = ["TARGETS", "CannotExport", "Summary", "export_checkpoint"]

PACKINGS = {
    "compressed-tensors": Packing(
        ("weight_packed", "weight_scale", "weight_global_scale"),
        multiplies=False,
        formats=(NVFP4, MXFP4),
        transposed_stacks=False,
    ),
    "modelopt": Packing(
        ("weight", "weight_scale", "weight_scale_2"), multiplies=True, formats=(NVFP4,), transposed_stacks=True
    ),
}
TARGETS = (*PACKINGS, "bf16")
_UNMAP_EVERY = 1 << 29  # bytes read: pages of mapped files count as memory of this process
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Progress = Callable[[int, int, str], None]  # bytes read, bytes to read, the tensor last read


@dataclass
class Summary:
    """What was exported.

    Attributes:
        source_layout, origin: of the source, as `layouts.Contents` has them.
        target: one of `TARGETS`.
        matrices: number of packed matrices read.
        tensors, files, nbytes: number of tensors, names of safetensors files, and bytes of tensors written.
        shifted: matrices whose scales were changed so that siblings share one, every weight the same.
        requantized: matrices of which weights were quantized anew: `{"weights": ..., "error": ...}`, the number and
            the relative squared error it brings to the matrix.
        skipped: tensors of the source that were not used, and why.
        notes: what else a user should know.
    """

    source_layout: str
    origin: str
    target: str
    matrices: int
    tensors: int = 0
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    shifted: list[str] = field(default_factory=list)
    requantized: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def export_checkpoint(
    source: str | Path,
    output: str | Path,
    target: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "5GB",
    requantize: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write a packed checkpoint in another layout.

    The output appears complete or not at all: it is written to a temporary folder beside it and renamed.

    Args:
        source (`str` or `Path`): a checkpoint folder in any layout of `layouts.LAYOUTS`.
        output (`str` or `Path`): a new or empty folder, outside of the source.
        target (`str`): `"compressed-tensors"` (weight-only NVFP4 and MXFP4, what vLLM, SGLang and transformers read),
            `"modelopt"` (weight-only NVFP4), or `"bf16"`, a plain checkpoint of the dequantized weights.
        dtype (`torch.dtype`): of the weights for target `"bf16"`: bfloat16, float16 or float32. Tensors stored in
            another dtype than the checkpoint's own (float32 on purpose) stay as they are.
        max_shard_size (`int` or `str`): most bytes of a file, as in `save_pretrained`.
        requantize (`bool`): quantize blocks anew where matrices that engines fuse have tensor scales that no common
            one can stand for; otherwise such a checkpoint is refused.
        progress: called with bytes read, bytes to read, and the name of the tensor last read.

    Returns:
        `Summary`.

    Raises:
        ValueError: for a source that is damaged, in full precision or in no known layout, for what the target cannot
            hold (`CannotExport`), and for an output that must not be written to.
        OSError: if the disk is full, or the file system fails otherwise. Nothing is left behind.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r}; allowed: {', '.join(TARGETS)}.")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype}; allowed: {', '.join(map(str, _DTYPES))}.")
    source, output = Path(source), Path(output)
    checkpoint = read_checkpoint(source)
    contents = read(checkpoint)
    changes = Changes(requantize)
    units = _units(checkpoint, contents, target, dtype, changes)
    shards = _shards(units, max_shard_size)
    left = remove_leftovers(check_output(source, output))
    folder = check_output(source, output, sum(shard.nbytes for shard in shards))
    summary = Summary(contents.layout, contents.origin, target, len(contents.matrices))
    summary.skipped, summary.notes = dict(contents.skipped), _notes(checkpoint, contents, target)
    summary.notes += [f"{place} is of another export to this output. If none is running, remove it." for place in left]
    with beside(folder) as place:
        with TensorReader(source, checkpoint.tensors) as reader:
            _write(place, units, shards, reader, progress)
        specs = {name: spec for shard in shards for name, spec in shard.tensors.items()}
        parameters = sum(torch.Size(spec.shape).numel() for spec in specs.values())
        write_index(place, shards, parameters, total_size(specs))
        copy_others(source, place)
        _write_configs(place, checkpoint, contents, target, dtype)
        write_checksums(place)
    summary.tensors, summary.files, summary.nbytes = len(specs), [shard.name for shard in shards], total_size(specs)
    summary.shifted = sorted(changes.shifted)
    summary.requantized = {
        name: {"weights": weights, "error": error} for name, (weights, error) in sorted(changes.requantized.items())
    }
    return summary


def _units(checkpoint: Checkpoint, contents: Contents, target: str, dtype, changes: Changes) -> list[Unit]:
    if target != "bf16":
        units = packed_units(checkpoint, contents, PACKINGS[target], changes)
        units += plain_units(checkpoint, contents, {})
    else:
        units = dense_units(checkpoint, contents, dtype)
        units += plain_units(checkpoint, contents, _casts(checkpoint, contents, dtype))
    names = [name for unit in units for name in unit.outputs]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
    if twice:
        raise ValueError(f"{min(twice)} would be written twice: the checkpoint has it packed and in full precision.")
    return units


def _casts(checkpoint: Checkpoint, contents: Contents, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The plain tensors in the checkpoint's own dtype, which follow the weights into another."""
    plain = contents.plain(checkpoint.tensors)
    own = next((DTYPES[d] for d in DTYPES if str(d) == f"torch.{configs.own_dtype(checkpoint.config)}"), None)
    if own is None:
        sizes = {kind: sum(t.nbytes for t in plain.values() if t.dtype == kind) for kind in FULL_PRECISION}
        own = max(sizes, key=lambda kind: sizes[kind])
    return {name: dtype for name, tensor in plain.items() if tensor.dtype == own}


def _shards(units: list[Unit], max_shard_size: int | str) -> list[Shard]:
    size_in_bytes(max_shard_size)
    specs: dict[str, TensorSpec] = {}
    for unit in sorted(units, key=lambda unit: _natural(min(unit.outputs))):
        specs |= unit.outputs
    if not specs:
        raise ValueError("the checkpoint holds no tensors; there is nothing to export.")
    return plan_shards(specs, max_shard_size)


def _natural(name: str) -> list:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _write(place: Path, units: list[Unit], shards: list[Shard], read: TensorReader, progress: Progress | None) -> None:
    unit_of = {name: index for index, unit in enumerate(units) for name in unit.outputs}
    done, total, mapped = 0, sum(unit.nbytes for unit in units), 0
    read_units: set[int] = set()
    for shard in shards:
        with ShardWriter(place, shard) as writer:
            for index in dict.fromkeys(unit_of[name] for name in shard.tensors):  # a unit may reach into two files
                try:
                    made = units[index].make(read)
                except CannotExport as error:
                    raise_together([error, *_problems(units, read)])
                for name in made.keys() & shard.tensors.keys():
                    writer.put(name, made[name])
                del made  # before the next unit is read
                mapped += units[index].nbytes
                if mapped > _UNMAP_EVERY:
                    read.close()
                    mapped = 0
                done += 0 if index in read_units else units[index].nbytes
                read_units.add(index)
                if progress is not None:
                    progress(done, total, next(iter(units[index].outputs)))


def _problems(units: list[Unit], read: TensorReader) -> list[CannotExport]:
    """What else cannot be exported, until there is enough of it to tell what is wrong: files may be large."""
    found, mapped = [], 0
    for unit in units:
        try:
            unit.make(read)
        except CannotExport as error:
            found.append(error)
            if sum(len(error.modules) for error in found) >= MANY:
                break
        mapped += unit.nbytes
        if mapped > _UNMAP_EVERY:
            read.close()
            mapped = 0
    return found


def _write_configs(place: Path, checkpoint: Checkpoint, contents: Contents, target: str, dtype: torch.dtype) -> None:
    config = configs.without_quantization(checkpoint.config)
    if target == "bf16":
        config = configs.with_dtype(config, dtype)
        if configs.own_dtype(config) is None:
            config["dtype"] = str(dtype).removeprefix("torch.")
    else:
        ignore = configs.modules_in_full_precision(checkpoint, contents)
        stacks = configs.stacks_in_full_precision(checkpoint, contents)
        if target == "modelopt":
            config["quantization_config"], old = configs.modelopt_configs(sorted([*ignore, *stacks]))
            write_file(place / HF_QUANT_CONFIG, json.dumps(old, indent=4).encode())
        else:
            ignore += [name for names in stacks.values() for name in names]
            config["quantization_config"] = compressed_tensors_config(modules_of(contents), ignore)
            recipe = configs.recipe_of(checkpoint)
            if recipe is not None:
                config["quantization_config"][HF_MXFP4_KEY] = recipe
    write_file(place / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _notes(checkpoint: Checkpoint, contents: Contents, target: str) -> list[str]:
    notes = []
    if contents.activation_format is not None and target != "bf16":
        kept = target == "compressed-tensors" and configs.recipe_of(checkpoint) is not None
        whom = " for all readers but this package" if kept else ""
        notes.append(f"The source asks for activations in FP4 (W4A4); the export is weight-only{whom}.")
    apart = [] if target == "bf16" else configs.siblings_apart(checkpoint, contents)
    if apart:
        notes.append(
            f"{len(apart)} groups of projections (such as {apart[0]}) are not all packed in one format. Engines that "
            "fuse them will not load the export."
        )
    if contents.skipped:
        reasons = "; ".join(dict.fromkeys(contents.skipped.values()))
        notes.append(f"{len(contents.skipped)} tensors of the source are left out: {reasons}.")
    if target == "compressed-tensors" and any(".experts." in module for module in modules_of(contents)):
        notes.append(
            "For vLLM and hf_mxfp4. transformers' own reader (5.23) drops the tensor scales of packed experts and "
            "computes wrong numbers from them: https://github.com/huggingface/transformers/issues/48371."
        )
    return notes
