# SPDX-License-Identifier: Apache-2.0
"""The two 4-bit block formats, MXFP4 and NVFP4, as table rows: elements, scale codecs, and the quantized tensor.

Read this file first. Shapes use `N` out features, `K` in features, `B` block size; blocks run along K.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0); NVIDIA NVFP4 (E4M3 block scales
over 16 elements with one float32 tensor scale); IEEE-like `float8_e4m3fn` as in torch and ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Magnitudes of E2M1 codes 0..7; bit 3 of a code is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MACRO_BLOCK = 128  # weights under one macro factor, along K


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) to float32: 2^(byte - 127); byte 255 is NaN. Built from bits: flush-to-zero is harmless."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x00400000, bits)  # 2^-127 is a float32 subnormal
    return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)


def decode_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """E4M3 (`float8_e4m3fn`, or its bytes as uint8) to float32."""
    return scale.view(torch.float8_e4m3fn).to(torch.float32)


@dataclass(frozen=True, repr=False)
class BlockFormat:
    """One E2M1-based block format. What depends on a format stands in its row, not in branches on its name.

    Attributes:
        name: `"mxfp4"` or `"nvfp4"`.
        block_size: weights under one block scale, along K.
        scale_dtype: storage dtype of block scales.
        top_byte: largest finite scale byte; scale bytes 0..top_byte decode to increasing values.
        zero_byte: the byte stored for an all-zero block (smallest normal scale).
        undominated_byte: up to this byte, halving a scale may leave the set of representable scales.
        has_global_scale: whether a float32 tensor scale multiplies every block scale.
        decode_scale: stored scales -> float32 values, same shape.
    """

    name: str
    block_size: int
    scale_dtype: torch.dtype
    top_byte: int
    zero_byte: int
    undominated_byte: int
    has_global_scale: bool
    decode_scale: Callable[[torch.Tensor], torch.Tensor]

    @property
    def bits_per_weight(self) -> float:
        """Codes and block scales, bits per weight (the one tensor scale is not counted)."""
        return 4 + 8 / self.block_size

    def scale_from_bytes(self, scale: torch.Tensor) -> torch.Tensor:
        """View uint8 scale bytes as the storage dtype of this format (no copy)."""
        return scale.view(self.scale_dtype)

    def check_in_features(self, in_features: int, name: str = "weight") -> None:
        """Raise `ValueError` if `in_features` (K) cannot be split into blocks."""
        if in_features % self.block_size or in_features == 0:
            raise ValueError(
                f"{name}: in_features={in_features} is not a positive multiple of {self.name}'s block size "
                f'{self.block_size}; add it to modules_to_not_convert, or set on_unsupported="keep" to leave such '
                "modules in full precision."
            )

    def __repr__(self) -> str:
        return self.name.upper()

    def __reduce__(self):  # rows are singletons: pickle and deepcopy by name
        return _format_by_name, (self.name,)


MXFP4 = BlockFormat(
    name="mxfp4",
    block_size=32,
    scale_dtype=torch.uint8,
    top_byte=254,
    zero_byte=1,
    undominated_byte=0,
    has_global_scale=False,
    decode_scale=decode_e8m0,
)
NVFP4 = BlockFormat(
    name="nvfp4",
    block_size=16,
    scale_dtype=torch.float8_e4m3fn,
    top_byte=126,
    zero_byte=8,
    undominated_byte=15,
    has_global_scale=True,
    decode_scale=decode_e4m3,
)
FORMATS = {fmt.name: fmt for fmt in (MXFP4, NVFP4)}


def _format_by_name(name: str) -> BlockFormat:
    return FORMATS[name]


class Outliers(NamedTuple):
    """Entries of a matrix kept in full precision, as compressed sparse rows (CSR); the codes hold 0 in their places.

    Attributes:
        values: `[nnz]` in the weight's dtype (bfloat16, float16 or float32).
        columns: uint16 `[nnz]`, or int32 where K > 65536; rising within a row.
        offsets: int32 `[R + 1]`; row r has entries `offsets[r] .. offsets[r + 1]`. R counts the rows of a stack of
            matrices one below the other. A part of the rows is a part of `offsets` (plus one) over the same entries.
    """

    values: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor


class QuantizedTensor(NamedTuple):
    """A weight in a block format. Every scale multiplies: `value = E2M1[code] * scale * macro * global_scale`.

    Attributes:
        packed: uint8 `[..., N, K/2]`; two codes a byte, even k in the low nibble.
        scale: `[..., N, K/B]` in the format's `scale_dtype`.
        global_scale: float32 `[...]` (one per matrix), or `None` where the format has none.
        format: the `BlockFormat` row.
        macro: uint8 `[..., N, ceil(K/128)]`, a further factor `1 + m/256` for 128 weights, or `None`.
        outliers: `Outliers` that replace the decoded values in their places, or `None`.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    format: BlockFormat
    macro: torch.Tensor | None = None
    outliers: Outliers | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight this stands for, `[..., N, K]`."""
        return torch.Size((*self.packed.shape[:-1], 2 * self.packed.shape[-1]))

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored: codes, block scales, tensor scales, macro factors, outliers."""
        stored = (self.packed, self.scale, self.global_scale, self.macro, *(self.outliers or ()))
        return sum(t.nbytes for t in stored if t is not None)

    def rows(self, rows: slice) -> QuantizedTensor:
        """Rows of a matrix `[N, K]`, as views; `outliers` keeps all entries and the offsets of these rows."""
        start, stop, _ = rows.indices(self.packed.shape[0])
        macro = None if self.macro is None else self.macro[rows]
        outliers = self.outliers and self.outliers._replace(offsets=self.outliers.offsets[start : stop + 1])
        return self._replace(packed=self.packed[rows], scale=self.scale[rows], macro=macro, outliers=outliers)

    def split(self, sizes: list[int]) -> list[QuantizedTensor]:
        """A matrix `[sum of sizes, K]` as matrices `[size, K]` with tensors of their own."""
        parts, start = [], 0
        for size in sizes:
            part = self.rows(slice(start, start := start + size))
            outliers = part.outliers
            if outliers is not None:
                values, columns, offsets = outliers
                entries = slice(int(offsets[0]), int(offsets[-1]))
                outliers = Outliers(values[entries].clone(), columns[entries].clone(), offsets - offsets[0])
            macro = None if part.macro is None else part.macro.clone()
            parts.append(
                part._replace(packed=part.packed.clone(), scale=part.scale.clone(), macro=macro, outliers=outliers)
            )
        return parts

    def matrix(self, index: int) -> QuantizedTensor:
        """One matrix `[N, K]` of a stack `[E, N, K]`, as views."""
        n = self.packed.shape[-2]
        parts = {name: getattr(self, name) for name in ("packed", "scale", "global_scale", "macro")}
        parts = {name: None if part is None else part[index] for name, part in parts.items()}
        outliers = self.outliers
        if outliers is not None:
            outliers = outliers._replace(offsets=outliers.offsets[index * n : (index + 1) * n + 1])
        return self._replace(**parts, outliers=outliers)
