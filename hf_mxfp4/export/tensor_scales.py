# SPDX-License-Identifier: Apache-2.0
"""One tensor scale for matrices that serving engines fuse, without changing a weight; and scales that multiply.

Two scales count as the same if every weight decodes to the same bfloat16. With tensor scales that are powers of two
(ours are, by default) a common one is a shift of exponents, which is exact as long as every block scale stays within
E4M3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_mxfp4.blocks import Units
from hf_mxfp4.formats import E2M1_MAGNITUDES, E4M3_MAX, NVFP4, QuantizedTensor, decode_e4m3
from hf_mxfp4.reference import dequantize, encode
from hf_mxfp4.scales import Scales

_SMALLEST = 2.0**-9  # E4M3's smallest subnormal
_LAST_BYTE = NVFP4.top_byte


class Scaled(NamedTuple):
    """A matrix `[N, K]` in NVFP4: `packed` uint8 `[N, K/2]`, `scale` E4M3 `[N, K/16]`, `divisor` float32 `[]`."""

    packed: torch.Tensor
    scale: torch.Tensor
    divisor: torch.Tensor


def used_bytes(matrix: Scaled) -> torch.Tensor:
    """bool `[127]`: the scale bytes of blocks that hold anything but zeros; other scales decode to nothing."""
    alive = _alive(matrix)
    used = torch.zeros(256, dtype=torch.bool)
    used[matrix.scale.view(torch.uint8)[alive].to(torch.int64)] = True
    return used[: _LAST_BYTE + 1]


def _alive(matrix: Scaled) -> torch.Tensor:
    """bool `[N, K/16]`: blocks with a code that is not 0 (or -0)."""
    return (matrix.packed & 0x77).bool().unflatten(-1, (-1, NVFP4.block_size // 2)).any(-1)


def common_divisor(matrices: list[Scaled]) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """A divisor that can stand for those of all matrices.

    Returns:
        The divisor float32 `[]`, and for each matrix a table uint8 `[256]` of its new scale bytes; `None` if there is
        none with which every weight stays as it is. The smallest divisor (largest scale) that will do is taken.
    """
    used = [used_bytes(matrix) for matrix in matrices]
    divisors = [matrix.divisor for matrix in matrices]
    for divisor in _candidates(divisors):
        tables = [_shifted(own, divisor) for own in divisors]
        if all(_same(*pair) for pair in zip(used, tables, divisors, [divisor] * len(used), strict=True)):
            return divisor, tables
    return None


def _candidates(divisors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The divisors, and doublings of the smallest up to the largest, rising."""
    values = {float(divisor) for divisor in divisors}
    smallest, largest = min(values), max(values)
    octaves = math.ceil(math.log2(largest / smallest))
    values |= {smallest * 2.0**octave for octave in range(octaves)}
    return [torch.tensor(value, dtype=torch.float32) for value in sorted(values)]


def _shifted(own: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """New scale bytes uint8 `[256]` for the old ones, when the divisor `own` becomes `common`: by powers of two."""
    factor = 2.0 ** round(math.log2(float(common) / float(own)))
    scales = decode_e4m3(torch.arange(256, dtype=torch.uint8)) * factor
    return scales.clamp(_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _same(used: torch.Tensor, table: torch.Tensor, own: torch.Tensor, common: torch.Tensor) -> bool:
    """Whether the scale bytes in use decode alike before and after."""
    old = used.nonzero().flatten().to(torch.uint8)
    return bool(_alike(decode_e4m3(old) / own, decode_e4m3(table[old.to(torch.int64)]) / common).all())


def _alike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """bool `[n]`: whether two factors float32 `[n]` of a block give every code the same bfloat16."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    one, other = ((scale[:, None] * magnitudes).to(torch.bfloat16) for scale in (one, other))
    return (one == other).all(-1)


def multiplier(divisor: torch.Tensor, matrices: list[Scaled]) -> torch.Tensor | None:
    """The float32 `[]` that multiplies where `divisor` divides, with every weight the same in bfloat16; or `None`.

    Of the reciprocal and its neighbours, the first with which all block scales in use decode to the same float32;
    failing that, the first with which all weights are the same bfloat16.
    """
    scales = decode_e4m3(torch.arange(_LAST_BYTE + 1, dtype=torch.uint8))
    scales = scales[torch.stack([used_bytes(matrix) for matrix in matrices]).any(0)]
    wanted, nearest = scales / divisor, divisor.reciprocal()
    below, above = (torch.nextafter(nearest, nearest.new_tensor(to)) for to in (0.0, math.inf))
    candidates = [c for c in (nearest, below, above) if math.isfinite(c) and c > 0]
    exact = [c for c in candidates if torch.equal(scales * c, wanted)]
    alike = [c for c in candidates if _alike(scales * c, wanted).all()]
    return next(iter(exact + alike), None)


def with_divisor(matrix: Scaled, divisor: torch.Tensor) -> tuple[Scaled, int, float]:
    """A matrix under another divisor: scales are shifted where that is exact, other blocks are quantized anew.

    Returns:
        The matrix, the number of weights quantized anew, and the relative squared error that brings to the matrix.
    """
    table, byte = _shifted(matrix.divisor, divisor), matrix.scale.view(torch.uint8)
    old = torch.arange(256, dtype=torch.uint8)
    exact = _alike(decode_e4m3(table) / divisor, decode_e4m3(old) / matrix.divisor)
    packed = matrix.packed.clone()
    scale = table[byte.to(torch.int64)]
    again = (_alive(matrix) & ~exact[byte.to(torch.int64)]).nonzero(as_tuple=True)
    if not len(again[0]):
        return Scaled(packed, scale.view(torch.float8_e4m3fn), divisor), 0, 0.0
    dense = dequantize(QuantizedTensor(matrix.packed, matrix.scale, matrix.divisor.reciprocal(), NVFP4), torch.float32)
    blocks = dense.unflatten(-1, (-1, NVFP4.block_size))[again]
    found, _ = Units(blocks, NVFP4, divisor.reciprocal()).search_full()
    scale[again] = found.to(torch.uint8)
    new = Scales(found.to(torch.uint8).view(torch.float8_e4m3fn)[:, None], divisor.reciprocal())
    packed.unflatten(-1, (-1, NVFP4.block_size // 2))[again] = encode(blocks, new, NVFP4)
    result = Scaled(packed, scale.view(torch.float8_e4m3fn), divisor)
    decoded = dequantize(QuantizedTensor(packed, result.scale, divisor.reciprocal(), NVFP4), torch.float32)
    error = float((decoded - dense).square().sum() / dense.square().sum())
    return result, blocks.numel(), error
