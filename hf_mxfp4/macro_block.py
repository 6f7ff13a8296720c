# SPDX-License-Identifier: Apache-2.0
"""Macro-block scaling: one factor 1 + m/256 for each 128 weights, which repairs the bias of power-of-two scales.

Sources: arXiv 2603.08713 and 2605.20402 (MBS-S is `static`, MBS-D is `search`).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from hf_mxfp4.blocks import Units, block_amax, divide, power_of_two, round_magnitude, row_chunks
from hf_mxfp4.formats import E2M1_MAX, MACRO_BLOCK, MXFP4, BlockFormat
from hf_mxfp4.scales import Scales

MODES = ("static", "search")

_EACH = MACRO_BLOCK // MXFP4.block_size  # blocks under one factor

# The filter of `search`, see `_octave`.
_REST = 16  # bits of a float32 beside sign, exponent and the first 7 of the mantissa: bfloat16 has none of them
_FIRST = 124 << (23 - _REST)  # 2^-3
_ROWS = (6 << (23 - _REST)) + 1  # from 2^-3 to 2^3
_TOLERANCE = 2.0**-17  # more than sums of at most 36 terms, in two places, are off: relative to the energy
_BLOCKS = 1024  # filtered at once: 1 MB of errors
_PAIRS = 4096  # macro-blocks with a factor evaluated at once


def factors(macro: torch.Tensor) -> torch.Tensor:
    """Bytes m (uint8, any shape) -> float32 factors 1 + m/256."""
    return 1 + macro.to(torch.float32) / 256


def block_factors(macro: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """Bytes m uint8 `[..., ceil(K/128)]` -> the factor of each block, float32 `[..., blocks]`, blocks = K/B."""
    return factors(macro).repeat_interleave(MACRO_BLOCK // block_size, -1)[..., :blocks]


def static_factors(weight: torch.Tensor) -> torch.Tensor:
    """The factors that put each macro-block's maximum at the top of the grid: amax / (6 f) is a power of two, nearly.

    m is the mantissa of amax / 6, rounded to 8 bits; from 255.5 on that is m = 0, an exponent higher. The block
    scales then follow from any rule, for weight / f.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[N, K]`, finite.

    Returns:
        uint8 `[N, ceil(K/128)]`; 0 where all weights are zero.
    """
    amax = block_amax(weight, MXFP4.block_size)
    amax = F.pad(amax, (0, -amax.shape[1] % _EACH)).unflatten(1, (-1, _EACH)).amax(-1)
    return ((divide(amax, E2M1_MAX).view(torch.int32) + (1 << 14)) >> 15).bitwise_and_(0xFF).to(torch.uint8)


# --- search ----------------------------------------------------------------------------------------------------------


def search(
    weight: torch.Tensor, fmt: BlockFormat, channel_weights: torch.Tensor | None = None
) -> tuple[Scales, torch.Tensor]:
    """The best of all 256 factors for each macro-block, with the best exponents of its blocks for that factor.

    The result is a function of each macro-block alone, and there is no schedule to follow:

    1. u = |w| / 2^o, where o is the exponent of the block's maximum, at most 126. A scale is s = 2^e f with e <= 124.
       Codes are u / s rounded to nearest; the error of a block is the sum of h (code s - u)^2, halves first, in
       float32 (`Units.error`). h is 1 without `channel_weights`, and in blocks of which they see nothing.
    2. With each factor a block takes the exponent of least error, on a tie the smaller. Without weights that is the
       largest with max u >= 3.5 s or the next below: to clip at 6 of 14 costs more than finer steps save elsewhere.
    3. A factor is judged by (e_0 + e_2) + (e_1 + e_3), the errors of the blocks, each times 4^(o - the largest o);
       differences below -63 count as -63. Blocks of which the weights see nothing are left out, unless all four are.
    4. The factor with the least sum wins, on a tie the smaller.

    Only speed comes from `_candidates`: proven bounds on the errors of all factors, which leave 2 or 3 to be tried.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[N, K]`, finite, K a multiple of the block size.
        fmt (`BlockFormat`): the format with power-of-two scales, MXFP4.
        channel_weights (`torch.Tensor`, *optional*): `[K]`, >= 0; errors are then `sum h_k (w - w_hat)^2`.

    Returns:
        `Scales` with `scale` `[N, K/B]` in `fmt.scale_dtype`, and the bytes m, uint8 `[N, ceil(K/128)]`. All-zero
        blocks have `fmt.zero_byte`, all-zero macro-blocks m = 0.
    """
    n, k = weight.shape
    pad = (0, -k % MACRO_BLOCK)
    blocks = (k + pad[1]) // fmt.block_size
    byte = torch.empty((n, blocks), dtype=torch.uint8, device=weight.device)
    macro = torch.empty((n, (k + pad[1]) // MACRO_BLOCK), dtype=torch.uint8, device=weight.device)
    if channel_weights is not None:
        channel_weights = F.pad(channel_weights, pad)
    for rows in row_chunks(weight):
        unit = Units(F.pad(weight[rows], pad), fmt, None, channel_weights)
        best_byte, best = _search(unit)
        byte[rows] = torch.where(unit.amax == 0, fmt.zero_byte, best_byte).view(-1, blocks)
        macro[rows] = best.view(-1, macro.shape[1])
    return Scales(fmt.scale_from_bytes(byte[:, : k // fmt.block_size].contiguous()), None), macro


def _search(unit: Units) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes int32 `[n]` and factors int64 `[n/4]` of the blocks of whole macro-blocks."""
    offset = unit.offset.view(-1, _EACH)
    counts = torch.ones_like(offset, dtype=torch.bool)
    if unit.unseen is not None:
        counts = ~unit.unseen.view(-1, _EACH)
        counts |= ~counts.any(-1, keepdim=True)
    largest = offset.where(counts, -126).amax(-1, keepdim=True)
    share = power_of_two(2 * (offset - largest).clamp(-63, 0)) * counts

    macro_block, m = _candidates(unit, share).nonzero(as_tuple=True)  # in this order
    found = []
    for part in range(0, len(m), _PAIRS):
        index = macro_block[part : part + _PAIRS]
        pairs = unit[(index[:, None] * _EACH + torch.arange(_EACH, device=index.device)).flatten()]
        pairs.factor = factors(m[part : part + _PAIRS]).repeat_interleave(_EACH)
        byte, error = pairs.search_full()
        error = error.view(-1, _EACH) * share[index]
        found.append((byte.view(-1, _EACH), (error[:, 0] + error[:, 2]) + (error[:, 1] + error[:, 3])))
    byte, error = (torch.cat(parts) for parts in zip(*found, strict=True))
    least = torch.full_like(share[:, 0], torch.inf).scatter_reduce_(0, macro_block, error, "amin")
    best = (error == least[macro_block]).nonzero().flatten()
    first = F.pad(macro_block[best].diff() != 0, (1, 0), value=True)
    best = best[first]
    return byte[best].flatten(), m[best]


def _candidates(unit: Units, share: torch.Tensor) -> torch.Tensor:
    """Bool `[n/4, 256]`: the factors that have the least error of each macro-block, or may have it."""
    # In these units the largest scale that matters is in [0.5, 1), whatever the factor.
    stretch = torch.where((unit.amax < 1.75) | (unit.offset == 126), 2.0, 1.0)
    share = (share / stretch.square().view(-1, _EACH))[:, None]
    below = (unit.offset + 127 - stretch.to(torch.int32)).clamp(max=100)  # errors of smaller weights vanish
    found = []
    for start in range(0, len(stretch), _BLOCKS):
        part = slice(start, start + _BLOCKS)
        magnitude, weights = (unit.magnitude[part] * stretch[part, None]).contiguous(), None
        if unit.weights is not None:
            weights = unit.weights[part].contiguous()
            magnitude.mul_(weights > 0)
        energy = (magnitude.square() if weights is None else magnitude.square() * weights).sum(-1)
        energy += 2.0**-100  # what is smaller may be subnormal, and not as precise
        bounds = [*_bounds(magnitude, weights, below[part], energy), energy[:, None]]
        area = share[start // _EACH : (start + _BLOCKS) // _EACH]
        *bounds, energy = (torch.bmm(area, bound.unflatten(0, (-1, _EACH)))[:, 0] for bound in bounds)
        found.append(bounds[0] <= bounds[-1].amin(-1, keepdim=True) + _TOLERANCE * energy)
    found = torch.cat(found)
    found[unit.amax.view(-1, _EACH).amax(-1) == 0, 1:] = False
    return found


def _bounds(magnitude, weights, below, energy) -> list[torch.Tensor]:
    """Bounds `[n, 256]` on the error of each block for each factor, with the best exponent, less its `energy` `[n]`:
    from below and from above, or a single one if they are equal. `magnitude`, `weights` `[n, B]`. Scales are in
    [0.5, 1) or in one of the `below` int32 `[n]` octaves below it.
    """
    exact = not (magnitude.view(torch.int32) & ((1 << _REST) - 1)).any()
    octaves = (_octave(magnitude, weights, exact, octave) for octave in (1.0, 2.0))
    bounds = [torch.minimum(one, two, out=one) for one, two in zip(*octaves, strict=True)]
    worst, index, octave = bounds[-1].amax(-1), torch.arange(len(below), device=below.device), 4.0
    while True:
        # What the clipped weights alone cost with any smaller scale:
        clipped = (magnitude - E2M1_MAX / octave).clamp_(min=0).square_()
        clipped = (clipped if weights is None else clipped.mul_(weights)).sum(-1)
        below = below - 1
        alive = ((clipped <= worst + (1 + _TOLERANCE) * energy) & (below > 0)).nonzero().flatten()
        if not len(alive):
            return bounds
        index, magnitude, below, energy = index[alive], magnitude[alive], below[alive], energy[alive]
        weights = None if weights is None else weights[alive]
        for bound, error in zip(bounds, _octave(magnitude, weights, exact, octave), strict=True):
            least = torch.minimum(bound[index], error)
            bound[index] = least
        worst = least.amax(-1)
        octave *= 2


def _octave(magnitude: torch.Tensor, weights: torch.Tensor | None, exact: bool, octave: float) -> list[torch.Tensor]:
    """`_bounds` for the scales s = (1 + m/256) / 2 / octave alone.

    What a magnitude u adds for each of the 256 scales is a row of a table, and `embedding_bag` sums the rows of a
    block. A row stands for a number of 8 bits, which is what a bfloat16 weight has: that is `exact`. Others go to the
    nearest row, at a distance d, and with its codes they add (code s)^2 - 2 row code s - 2 d code s, too much by at
    most `excess` if another code is nearer. Left of the rows all codes are 0; right of the last they are 6.
    """
    terms, slopes, excess = _tables(magnitude.device)
    magnitude = octave * magnitude
    bits = magnitude.view(torch.int32) + (1 << _REST - 1)
    row = ((bits >> _REST) - (_FIRST - 1)).clamp_(0, _ROWS)
    upper = F.embedding_bag(row, terms, mode="sum", per_sample_weights=weights)
    if not exact or row.max() == _ROWS:
        distance = magnitude - (bits >> _REST << _REST).view(torch.float32).clamp_(max=8.0)
        distance = distance if weights is None else distance * weights
        upper += F.embedding_bag(row, slopes, mode="sum", per_sample_weights=distance)
    upper.div_(octave).div_(octave)  # the square may overflow
    if exact:
        return [upper]
    excess = F.embedding_bag(row, excess, mode="sum", per_sample_weights=weights)
    return [torch.sub(upper, excess, alpha=octave**-2, out=excess), upper]


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tables of `_octave`, float32 `[1 + _ROWS, 256]`: terms, slopes in d, and excess. Row 0 is zero."""
    scales = factors(torch.arange(256, device=device)) / 2
    bits = torch.arange(_FIRST, _FIRST + _ROWS, dtype=torch.int32, device=device)[:, None] << _REST
    row, *ends = ((bits + half).view(torch.float32) for half in (0, -(1 << _REST - 1), 1 << _REST - 1))
    value = round_magnitude(row / scales) * scales
    excess = [(end - value).square() - (end - round_magnitude(end / scales) * scales).square() for end in ends]
    tables = value * (value - 2 * row), -2 * value, torch.maximum(*excess)
    return tuple(F.pad(table, (0, 0, 1, 0)) for table in tables)
