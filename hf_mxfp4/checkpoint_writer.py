# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written tensor by tensor, and their index.

`save_file` of safetensors wants all tensors of a file at once. `ShardWriter` takes them one at a time, in any order,
or in pieces, and writes the same bytes.

Source: the safetensors format, https://github.com/huggingface/safetensors#format; tensors in a file are ordered by
dtype, then by name, as safetensors 0.4 to 0.8 write them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_mxfp4.checkpoint_files import INDEX
from hf_mxfp4.output_files import PARTIAL, sync_folder, write_file

# In the order of tensors in a file.
_NAMES = (
    "uint64 int64 float64 complex64 float32 uint32 int32 bfloat16 float16 uint16 int16 float8_e8m0fnu float8_e4m3fn "
)
_NAMES += "float8_e5m2 int8 uint8 bool"
_STORED = "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 BOOL"
DTYPES = {getattr(torch, name): stored for name, stored in zip(_NAMES.split(), _STORED.split(), strict=True)}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class TensorSpec(NamedTuple):
    """A tensor that is to be written.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: may be `()`, or hold zeros.
        storage: an id shared by tensors that `save_pretrained` would find in one storage (the experts of a layer, cut
            from one stack): they come into the same file. `None`: none shares it.
        storage_nbytes: size of that storage; the tensor's own size if not given.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: Hashable | None = None
    storage_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def counted(self) -> int:
        """Bytes that count for the size of a file when tensors are distributed over files."""
        return self.nbytes if self.storage_nbytes is None else self.storage_nbytes


class Shard(NamedTuple):
    """A safetensors file: its name and its tensors, in any order."""

    name: str
    tensors: dict[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the header comes on top."""
        return sum(spec.nbytes for spec in self.tensors.values())


# --- which tensor goes into which file -------------------------------------------------------------------------------


def size_in_bytes(size: int | str) -> int:
    """`5_000_000_000` or `"5GB"` -> bytes; units are decimal, as in `save_pretrained`.

    Raises:
        ValueError: for anything else.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]B)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    try:
        result = int(float(found[1]) * _UNITS[found[2].upper()]) if found else size
    except ValueError:
        result = 0
    if not isinstance(result, int) or isinstance(result, bool) or result <= 0:
        raise ValueError(f'max_shard_size={size!r}; allowed: a positive number of bytes, or a text such as "5GB".')
    return result


def plan_shards(tensors: Mapping[str, TensorSpec], max_shard_size: int | str = "5GB") -> list[Shard]:
    """Distribute tensors over files as `save_pretrained` does: in their order, a new file when one is full, a file of
    its own for a tensor larger than that. Tensors of one storage follow the first of them.

    Args:
        tensors: by name, in the order of the state dict that is saved.
        max_shard_size: most bytes of a file, as in `save_pretrained`.

    Returns:
        `list[Shard]`: `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on; none for no tensors.
    """
    limit = size_in_bytes(max_shard_size)
    files: list[dict[str, TensorSpec]] = []
    current: dict[str, TensorSpec] = {}
    size, file_of, followers = 0, {}, []
    for name, spec in tensors.items():
        if spec.storage is not None and spec.storage in file_of:
            followers.append((name, spec))
            continue
        if spec.counted > limit:
            files.append({})
            file = files[-1]
        else:
            if size + spec.counted > limit:
                files.append(current)
                current, size = {}, 0
            file, size = current, size + spec.counted
        file[name], file_of[spec.storage] = spec, file
    if current:
        files.append(current)
    for name, spec in followers:
        file_of[spec.storage][name] = spec
    if len(files) == 1:
        return [Shard("model.safetensors", files[0])]
    return [Shard(f"model-{i:05d}-of-{len(files):05d}.safetensors", file) for i, file in enumerate(files, 1)]


def total_size(tensors: Mapping[str, TensorSpec]) -> int:
    """`total_size` of an index: each storage counted once."""
    shared = {spec.storage: spec.counted for spec in tensors.values() if spec.storage is not None}
    return sum(shared.values()) + sum(spec.counted for spec in tensors.values() if spec.storage is None)


# --- files -----------------------------------------------------------------------------------------------------------


def header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The start of a safetensors file, and where in the file each tensor begins.

    Raises:
        ValueError: for dtypes that safetensors does not know.
    """
    unknown = [f"{name} ({spec.dtype})" for name, spec in tensors.items() if spec.dtype not in _RANK]
    if unknown:
        raise ValueError(f"safetensors cannot hold {unknown[0]}; allowed: {', '.join(map(str, DTYPES))}.")
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype], name.encode())):
        spec = tensors[name]
        starts[name], end = end, end + spec.nbytes
        offsets = [starts[name], end]
        entries[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: first + start for name, start in starts.items()}


class ShardWriter:
    """Writes one safetensors file, tensor by tensor or in pieces, in any order. A context manager.

    The file has a temporary name until all is written and on the disk; then it is renamed. After an error nothing is
    left of it.

    Args:
        folder: an existing folder.
        shard: the file and its tensors.
        metadata: `__metadata__` of its header.
        temporary: its name until it is finished; one that nobody else uses if not given.

    Example:
        >>> with ShardWriter(folder, shard) as writer:
        ...     writer.put("a", tensor)
        ...     writer.put("b", rows, start=128)  # rows 128 and on of `b`
    """

    def __init__(
        self,
        folder: str | Path,
        shard: Shard,
        metadata: Mapping[str, str] | None = {"format": "pt"},
        temporary: str | None = None,
    ):
        self.path, self.shard = Path(folder) / shard.name, shard
        self.temporary = Path(folder) / (temporary or f".{shard.name}.{secrets.token_hex(4)}{PARTIAL}")
        self._header, self._starts = header(shard.tensors, metadata)
        self._missing = {name: _rows(spec) for name, spec in shard.tensors.items() if spec.nbytes}
        self._written: dict[str, list[tuple[int, int]]] = {}
        self._file = None

    def __enter__(self) -> ShardWriter:
        self._file = open(self.temporary, "xb", buffering=0)
        try:
            _write(self._file, memoryview(self._header))
        except BaseException:
            self._discard()
            raise
        return self

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write a tensor, or rows `start` and on of it along its first dimension.

        Raises:
            ValueError: for names the file does not have, another dtype or shape, and rows that came before.
            OSError: as the file system has it (no space left).
        """
        spec = self.shard.tensors.get(name)
        if spec is None:
            raise ValueError(f"{self.shard.name} has no tensor {name}; it has {len(self.shard.tensors)} others.")
        rows = tensor.shape[0] if spec.shape and tensor.ndim else 1
        whole = (rows, *spec.shape[1:]) if spec.shape else ()
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != whole or not 0 <= start <= _rows(spec) - rows:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} from row {start} does not fit {spec.dtype} "
                f"{list(spec.shape)} in {self.shard.name}."
            )
        pieces = self._written.setdefault(name, [])
        if any(start < last and first < start + rows for first, last in pieces):
            raise ValueError(f"{name}: rows {start} to {start + rows} were written to {self.shard.name} before.")
        pieces.append((start, start + rows))
        if tensor.numel():
            self._missing[name] -= rows
            self._file.seek(self._starts[name] + start * (spec.nbytes // _rows(spec)))
            _write(self._file, _bytes(tensor))

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            missing = [name for name, rows in self._missing.items() if rows]
            if missing:
                raise ValueError(f"{self.shard.name}: {len(missing)} tensors are not complete (such as {missing[0]}).")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.temporary, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _write(file, data: memoryview) -> None:
    while data:  # the system writes at most 2 GB at once
        data = data[file.write(data) :]


def write_index(folder: str | Path, shards: Iterable[Shard], total_parameters: int, total_size: int) -> None:
    """Write `model.safetensors.index.json` as `save_pretrained` does; nothing for a checkpoint of one file."""
    shards = list(shards)
    if len(shards) < 2:
        return
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
    }
    write_file(Path(folder) / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
