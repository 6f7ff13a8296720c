# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is, from its headers; and, where its tensors can be read, the ranges of its scales."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hf_mxfp4 import layouts
from hf_mxfp4.checkpoint_files import Checkpoint, TensorReader
from hf_mxfp4.export.configs import recipe_of
from hf_mxfp4.formats import FORMATS, BlockFormat
from hf_mxfp4.layouts import Contents, PackedMatrix
from hf_mxfp4.layouts.base import Read

FULL_PRECISION = "full precision"
_UNMAP_EVERY = 1 << 29  # bytes read: pages of mapped files count as memory of this process
_LARGEST = 5  # plain tensors that are named


@dataclass
class Inspection:
    """What a checkpoint holds.

    Attributes:
        layout: a row of `layouts.LAYOUTS`, or `"full precision"`.
        origin: the tool that made it, as far as it says; `None` in full precision.
        recipe: our own fields of its config, if we wrote it.
        modules: packed linears and stacks of experts, by format.
        weights_packed: weights that are stored in 4 bits.
        bits_per_weight: of those, every tensor of a matrix counted; `None` if there are none.
        bytes_packed, bytes_plain, bytes_skipped, nbytes: of packed, plain and unused tensors, and of all.
        tensors, files: how many there are.
        plain: by stored dtype: `{"tensors": ..., "bytes": ...}`.
        largest_plain: `{"name", "dtype", "shape", "bytes"}` of the largest.
        skipped: tensors that are not used, and why.
        notes: what the checkpoint asks for that loading does not follow.
        activation_format: `"same"` for W4A4.
        scales: by format, see `ScaleRanges`; `None` unless tensors were read.
    """

    layout: str
    origin: str | None
    recipe: dict[str, Any] | None
    modules: dict[str, int] = field(default_factory=dict)
    weights_packed: int = 0
    bits_per_weight: float | None = None
    bytes_packed: int = 0
    bytes_plain: int = 0
    bytes_skipped: int = 0
    nbytes: int = 0
    tensors: int = 0
    files: int = 0
    plain: dict[str, dict[str, int]] = field(default_factory=dict)
    largest_plain: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    activation_format: str | None = None
    scales: dict[str, dict[str, Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect_checkpoint(checkpoint: Checkpoint, read: Read | None = None) -> Inspection:
    """Describe a checkpoint in any layout, or in full precision.

    Args:
        checkpoint (`Checkpoint`): from `read_checkpoint`, or of a repository on the Hub (headers alone).
        read: a tensor of the checkpoint by its name, such as a `TensorReader`: with it, every packed matrix is
            read for `Inspection.scales`.

    Raises:
        ValueError: for a checkpoint in a layout that is not known, and damaged ones.
    """
    is_packed = checkpoint.quantization is not None
    contents = layouts.read(checkpoint) if is_packed else Contents(FULL_PRECISION, "", {}, {})
    result = Inspection(contents.layout, contents.origin or None, recipe_of(checkpoint))
    result.notes, result.skipped = list(contents.notes), dict(contents.skipped)
    result.activation_format = contents.activation_format
    tensors = checkpoint.tensors
    result.tensors, result.files = len(tensors), len({tensor.file for tensor in tensors.values()})
    result.nbytes = sum(tensor.nbytes for tensor in tensors.values())
    plain = contents.plain(tensors)
    result.bytes_plain = sum(tensor.nbytes for tensor in plain.values())
    result.bytes_skipped = sum(tensors[name].nbytes for name in contents.skipped if name in tensors)
    result.bytes_packed = result.nbytes - result.bytes_plain - result.bytes_skipped
    result.modules = dict(Counter(matrix.format.name for matrix in contents.matrices.values()))
    result.weights_packed = sum(math.prod(matrix.shape) for matrix in contents.matrices.values())
    if result.weights_packed:
        result.bits_per_weight = 8 * result.bytes_packed / result.weights_packed
    for tensor in plain.values():
        kind = result.plain.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["bytes"] += tensor.nbytes
    largest = sorted(plain, key=lambda name: (-plain[name].nbytes, name))[:_LARGEST]
    result.largest_plain = [
        {"name": name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
        for name, t in ((name, plain[name]) for name in largest)
    ]
    if read is not None and contents.matrices:
        result.scales = _scales(contents.matrices, read)
    return result


def _scales(matrices: dict[str, PackedMatrix], read: Read) -> dict[str, dict[str, Any]]:
    ranges: dict[str, ScaleRanges] = {}
    mapped = 0
    for matrix in matrices.values():
        found = ranges.setdefault(matrix.format.name, ScaleRanges(matrix.format))
        tensors = matrix.decode(read)
        found.add(tensors.packed, tensors.scale, tensors.global_scale)
        mapped += tensors.packed.nbytes + tensors.scale.nbytes
        del tensors
        if mapped > _UNMAP_EVERY and isinstance(read, TensorReader):
            read.close()
            mapped = 0
    return {name: ranges[name].to_dict() for name in FORMATS if name in ranges}


class ScaleRanges:
    """Block scales, tensor scales and zeros of the matrices of one format, counted as they are read.

    Of block scales the exponents are told (floor(log2), as stored: without the tensor scale), of all blocks that hold
    anything but zeros.
    """

    def __init__(self, fmt: BlockFormat):
        self.format = fmt
        self.bytes = torch.zeros(256, dtype=torch.int64)  # blocks by scale byte
        self.blocks = self.zero_blocks = self.codes = self.zero_codes = 0
        self.tensor_scales: list[float] = []  # as they multiply

    def add(self, packed: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor | None) -> None:
        """Count a matrix."""
        size = self.format.block_size // 2
        for codes, scales in zip(_pieces(packed), _pieces(scale.view(torch.uint8)), strict=True):
            magnitudes = codes & 0x77
            alive = magnitudes.bool().unflatten(-1, (-1, size)).any(-1)
            self.bytes += torch.bincount(scales[alive].flatten().to(torch.int64), minlength=256)
            self.blocks += alive.numel()
            self.zero_blocks += alive.numel() - int(alive.sum())
            self.codes += 2 * codes.numel()
            self.zero_codes += int(((magnitudes & 0x07) == 0).sum()) + int(((magnitudes & 0x70) == 0).sum())
        if divisor is not None:
            self.tensor_scales += divisor.flatten().double().reciprocal().tolist()

    def to_dict(self) -> dict[str, Any]:
        """`block_exponents` and `tensor_scales`: `{"min", "median", "max"}`, or `None` without any; the rest are
        counts, and the share of blocks of zeros."""
        count = {
            "blocks": self.blocks,
            "zero_blocks": self.zero_blocks,
            "zero_block_share": self.zero_blocks / self.blocks if self.blocks else 0.0,
            "codes": self.codes,
            "zero_codes": self.zero_codes,
        }
        return {"block_exponents": self._exponents(), "tensor_scales": _spread(sorted(self.tensor_scales)), **count}

    def _exponents(self) -> dict[str, int] | None:
        values = self.format.decode_scale(torch.arange(256, dtype=torch.uint8)).double()
        usable = (values > 0) & torch.isfinite(values) & (self.bytes > 0)  # a damaged one is for `verify` to tell
        if not usable.any():
            return None
        counts = self.bytes[usable]
        exponents = torch.frexp(values[usable])[1] - 1
        middle = int((counts.cumsum(0) * 2 >= counts.sum()).nonzero()[0])
        picked = {"min": exponents.min(), "median": exponents[middle], "max": exponents.max()}
        return {name: int(value) for name, value in picked.items()}


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a tensor `[..., N, K]` in up to 64 pieces, so that temporaries stay small."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return list(rows.split(max(1, -(-len(rows) // 64))))


def _spread(values: list[float]) -> dict[str, float] | None:
    return {"min": values[0], "median": values[len(values) // 2], "max": values[-1]} if values else None
