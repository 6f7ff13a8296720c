# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint larger than memory, read in pieces, from files that must not change meanwhile."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import Checkpoint, StoredTensor
from hf_mxfp4.checkpoint_writer import DTYPES

PIECE = 1 << 25  # bytes read at once
STORED_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}


class Stamp(NamedTuple):
    """By what a changed file is known: its size and its time of change in nanoseconds."""

    size: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns)


class Source:
    """A checkpoint's tensors by name. Nothing stays mapped or cached, so memory holds what was asked for only.

    Args:
        checkpoint: from `read_checkpoint`.

    Raises:
        ValueError: on reading, for a file that is shorter, or another, than when this was made.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.folder: Path = checkpoint.folder
        self.tensors: dict[str, StoredTensor] = checkpoint.tensors
        files = sorted({tensor.file for tensor in self.tensors.values()})
        self.stamps = {file: Stamp.of((self.folder / file).stat()) for file in files}
        self._starts = {name: start for file in files for name, start in _starts(self.folder / file).items()}
        unknown = [name for name, tensor in self.tensors.items() if tensor.dtype not in STORED_DTYPES]
        if unknown:
            raise ValueError(
                f"{unknown[0]}: dtype {self.tensors[unknown[0]].dtype} in {self.tensors[unknown[0]].file} cannot be "
                f"read; allowed: {', '.join(STORED_DTYPES)}. Load the original full-precision checkpoint."
            )
        self._file, self._name = None, ""

    def dtype(self, name: str) -> torch.dtype:
        return STORED_DTYPES[self.tensors[name].dtype]

    def empty(self, name: str) -> torch.Tensor:
        """A tensor of the same dtype and shape on the meta device."""
        return torch.empty(self.tensors[name].shape, dtype=self.dtype(name), device="meta")

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` along the first dimension."""
        stored = self.tensors[name]
        out = torch.empty((stop - start, *stored.shape[1:]), dtype=self.dtype(name))
        row = stored.nbytes // stored.shape[0] if stored.shape[0] else 0
        self._read(name, self._starts[name] + start * row, out)
        return out

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        out = torch.empty(self.tensors[name].shape, dtype=self.dtype(name))
        self._read(name, self._starts[name], out)
        return out

    def pieces(self, name: str):
        """(first row, rows) of a tensor, piece by piece; a 0-d tensor comes whole as `(0, tensor)`."""
        stored = self.tensors[name]
        if not stored.shape or not stored.nbytes:
            yield 0, self.whole(name)
            return
        step = max(1, PIECE * stored.shape[0] // stored.nbytes)
        for start in range(0, stored.shape[0], step):
            yield start, self.rows(name, start, min(start + step, stored.shape[0]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._name = None, ""

    def _read(self, name: str, position: int, out: torch.Tensor) -> None:
        stored = self.tensors[name]
        if stored.file != self._name:
            self.close()
            self._file, self._name = (self.folder / stored.file).open("rb", buffering=0), stored.file
        now, then = Stamp.of(os.fstat(self._file.fileno())), self.stamps[stored.file]
        buffer = memoryview(out.reshape(-1).view(torch.uint8).numpy()) if out.numel() else memoryview(b"")
        self._file.seek(position)
        while now == then and buffer:
            count = self._file.readinto(buffer)
            if not count:
                break
            buffer = buffer[count:]
        if now != then or buffer:
            raise ValueError(
                f"{self.folder / stored.file} was changed or cut off while it was read ({name}): {then.size} bytes "
                f"then, {now.size} now. Restore it and start again with a new output folder."
            )


def _starts(path: Path) -> dict[str, int]:
    """Where in a file each tensor begins. The file's header was checked by `read_checkpoint`."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        entries = json.loads(file.read(length))
    return {name: 8 + length + e["data_offsets"][0] for name, e in entries.items() if name != "__metadata__"}
