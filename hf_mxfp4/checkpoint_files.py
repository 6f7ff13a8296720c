# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files: which there are, what their headers say, and tensors one at a time. Nothing is trusted.

Safetensors only; a pickle file can run code when it is read, and is refused.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # of a model in one file
SAFETENSORS_DTYPES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int32: "I32",
}
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors itself
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class StoredTensor(NamedTuple):
    """What a safetensors header says of a tensor: its dtype there (`"U8"`, ...), shape, file and bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    nbytes: int = 0

    def empty(self) -> torch.Tensor:
        """A tensor of this dtype and shape on the meta device."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.file}: dtype {self.dtype}; allowed: {', '.join(_DTYPES)}.")
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device="meta")


class Checkpoint(NamedTuple):
    """What is known of a checkpoint before a tensor is read.

    Attributes:
        config: config.json; empty if there is none.
        quantization: what it says of its quantization: `quantization_config` (or `compression_config`) of config.json,
            else hf_quant_config.json as it is; `None` for a model in full precision.
        tensors: what the headers say of each tensor, by name.
        metadata: `__metadata__` of each file's header, by file name.
        folder: where the files are; `None` on the Hub.
    """

    config: dict[str, Any]
    quantization: dict[str, Any] | None
    tensors: dict[str, StoredTensor]
    metadata: dict[str, dict[str, str]]
    folder: Path | None = None


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """A checkpoint folder's configs and headers.

    Raises:
        ValueError: naming the file and the way out, for a folder without safetensors files, damaged or missing files,
            and an index that names other files or tensors than there are.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    tensors, metadata = read_headers(folder / name for name in weight_files(folder))
    if (folder / INDEX).exists():
        _check_index(folder / INDEX, tensors)
    return Checkpoint(config, quantization_of(config, folder), tensors, metadata, folder)


def quantization_of(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What a config.json, or hf_quant_config.json beside it, says of quantization; `None` if nothing does."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or config.get("compression_config") or inner  # in transformers' order
    old = folder / "hf_quant_config.json"
    if found is None and old.exists():
        found = read_json(old)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{folder}: its quantization_config is not a JSON object. Download it again.")
    return found


def weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files: those of its index, else model.safetensors, else all safetensors files.

    As in transformers, what else lies beside (`consolidated.safetensors`, an adapter) is no part of the model.

    Raises:
        ValueError: for a folder with none, an index that cannot be read, and files it names that are not there or lie
            outside the folder.
    """
    index = folder / INDEX
    if index.exists():
        names = sorted(set(weight_map(index).values()))
        for name in names:
            if Path(name).name != name or name in ("", ".", "..") or "\\" in name:
                raise ValueError(f"{index}: names the file {name!r}, which is not a plain name in this folder.")
            if not name.endswith(".safetensors"):
                raise ValueError(f"{index}: names {name!r}; only safetensors files are read, never pickle files.")
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name} is missing, and {INDEX} names it. Download the checkpoint again.")
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} holds {pickles[0]} and no safetensors file. Pickle files can run code and are never read: "
                "load the model with transformers and save_pretrained it, which writes safetensors."
            )
        raise ValueError(f"{folder} holds no safetensors file.")
    return names


def weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, as an index says."""
    content = read_json(index)
    found = content.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{index} has no weight_map of tensor to file. Download it again.")
    return found


def _check_index(index: Path, tensors: dict[str, StoredTensor]) -> None:
    named = weight_map(index)
    absent = [name for name, file in named.items() if name not in tensors or tensors[name].file != file]
    unnamed = [name for name in tensors if name not in named]
    if absent or unnamed:
        what = (
            f"names {len(absent)} tensors that its files do not hold (such as {absent[0]})"
            if absent
            else f"does not name {len(unnamed)} tensors that its files hold (such as {unnamed[0]})"
        )
        raise ValueError(f"{index} {what}. Index and files do not belong together; download the checkpoint again.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: if it is no JSON object, or not UTF-8.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is not JSON in UTF-8: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object. Download it again.")
    return content


def read_headers(files: Iterable[Path]) -> tuple[dict[str, StoredTensor], dict[str, dict[str, str]]]:
    """Tensors of several files by name, and each file's metadata.

    Raises:
        ValueError: for damaged files, and a tensor that stands in two of them.
    """
    tensors: dict[str, StoredTensor] = {}
    metadata = {}
    for path in files:
        found, metadata[path.name] = _read_header(path)
        for name, tensor in found.items():
            if name in tensors:
                raise ValueError(
                    f"{name} stands in {tensors[name].file} and in {path.name}: one of the files belongs to another "
                    "checkpoint. Remove it, or download the checkpoint again."
                )
            tensors[name] = tensor
    return tensors, metadata


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Names, dtypes and shapes in a safetensors file, read from its header alone.

    Raises:
        ValueError: if the file is not safetensors, or is shorter than its header says.
    """
    return _read_header(Path(path))[0]


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is not a safetensors file, or is truncated: {size} bytes. Download it again.")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            metadata = header.pop("__metadata__", None) or {}
            if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
                raise ValueError("its metadata is not a map of texts")
            tensors, places = {}, []
            for name, entry in header.items():
                first, last = map(int, entry["data_offsets"])
                tensor = StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), path.name, last - first)
                if min((0, *tensor.shape)) < 0 or 8 * tensor.nbytes != math.prod(tensor.shape) * _bits(tensor.dtype):
                    raise ValueError(f"{name}: {tensor.nbytes} bytes are not {tensor.dtype} {list(tensor.shape)}")
                tensors[name] = tensor
                places.append((first, last))
            end = 0
            for first, last in sorted(places):
                if first != end:
                    raise ValueError("tensors overlap, or leave gaps")
                end = last
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a safetensors file: its header is unreadable ({error}). Download it again."
            ) from error
    if 8 + length + end != size:
        raise ValueError(
            f"{path} is damaged: {size} bytes, its header describes {8 + length + end}. Download it again."
        )
    return tensors, metadata


def _bits(dtype: str) -> int:
    """Size of a value, which the names of stored dtypes tell: `"F8_E4M3"`, `"BF16"`; `"BOOL"` is a byte."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return found


class TensorReader:
    """Tensors of a checkpoint's files by name, on the CPU, one at a time. A context manager; not for several threads.

    Args:
        folder: where the files are.
        tensors: what their headers say, from `read_checkpoint`.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]):
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files, whose pages count as this process's memory. They are opened again when needed."""
        self._files.clear()  # safetensors unmaps a file with its last reference

    def __call__(self, name: str) -> torch.Tensor:
        return self._open(name).get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor, along its first dimension."""
        return self._open(name).get_slice(name)[start:stop]

    def _open(self, name: str):
        file = self.tensors[name].file
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file} is damaged: {error}. Download it again.") from error
        return self._files[file]
