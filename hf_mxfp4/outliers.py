# SPDX-License-Identifier: Apache-2.0
"""Outlier fallback: which entries of a model stay in full precision under one budget, and their storage as CSR.

A block's largest entry sets its scale; a block without it has finer steps, and fewer of its entries become zero. Two
passes over the model: `Budget.add` counts what each entry would gain, then `select` marks those that reach
`Budget.threshold`. Between them a histogram stands for all gains, so memory does not grow with the model.

Sources: arXiv 2605.20402 (outlier fallback); SqueezeLLM, arXiv 2306.07629 (a dense and a sparse part).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hf_mxfp4.blocks import Units, block_amax, blocked_magnitudes, power_of_two, row_chunks
from hf_mxfp4.formats import BlockFormat, Outliers
from hf_mxfp4.macro_block import block_factors
from hf_mxfp4.scales import power_of_two_global_scale

MOST = 4  # entries a block may give; on trained weights with 1 % to spend, 6 lower the error by another 0.1 %
MAX_FRACTION = 0.1
MAX_ENTRIES = 2**31 - 1  # offsets are int32
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# Gains count to 10 bits of mantissa (0.1 %): the bins of the histogram, for gains from 2^-240 to 2^272. The bits below
# are pseudo-random: bfloat16 weights have many equal gains, which would all be kept or all be left.
_LOW_BITS = 42
_FIRST_BIN = (1023 - 240) << (52 - _LOW_BITS)  # 1023 is the exponent bias of float64
_BINS = 512 << (52 - _LOW_BITS)


# --- gains -----------------------------------------------------------------------------------------------------------


def _least_error(blocks: torch.Tensor, fmt: BlockFormat, weights: torch.Tensor | None) -> torch.Tensor:
    """Squared error, float64 `[n]`, of magnitudes `[n, B]` with their best scales; `weights` `[n, B]` or `None`."""
    unit = Units(blocks, fmt, global_scale=1.0)
    seen = torch.ones((), dtype=torch.bool, device=blocks.device)
    if weights is not None:
        seen = (weights * unit.magnitude).sum(-1) > 0
        unit.weights = torch.where(seen[:, None], weights, 1.0)  # as `Units` does: or the search would try every scale
    error = unit.search_full()[1].double() * seen
    return error if unit.offset is None else error * power_of_two(unit.offset).double().square()


def _bin(gain: torch.Tensor) -> torch.Tensor:
    """Gains float64, >= 0 -> which bin int64 they are in, counted from 0.0."""
    return gain.view(torch.int64) >> _LOW_BITS


def _edge(bin: torch.Tensor) -> torch.Tensor:
    """The least gain of a bin."""
    return (bin << _LOW_BITS).view(torch.float64)


def _gains(
    blocks: torch.Tensor, fmt: BlockFormat, area: torch.Tensor, weights: torch.Tensor | None, start: int, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains that reach `floor`, float64 `[c]`, and the places of these entries in the weight, int64 `[c]`.

    `blocks` `[n, B]` stand in the weight from place `start` on. Their entries go in order of magnitude; E_j is the
    least error, times `area` float64 `[n]`, once j of them are zero. At a price p for each entry it is best to take
    the j that minimises E_j + j p, and entry i is among them up to the price

        gain_i = min over l < i of (max over j >= i of (E_l - E_j) / (j - l)),

    the slope of the concave envelope of -E, which never rises with i.
    """
    first = _least_error(blocks, fmt, weights) * area
    limit = float(_edge(_bin(torch.tensor(floor, dtype=torch.float64))))
    block = ((first >= limit) & (first > 0)).nonzero()[:, 0]
    error = first[block, None].repeat(1, MOST + 1)
    place = (start + block * fmt.block_size)[:, None].repeat(1, MOST)
    blocks, row = blocks[block], torch.arange(len(block), device=blocks.device)
    for j in range(1, MOST + 1):
        # No error is below 0, so entry j can reach the limit only if E_l is at least (j - l) limits for every l < j.
        price = limit * torch.arange(j, 0, -1, dtype=torch.float64, device=blocks.device)
        alive = ((error[row, :j] >= price) & (error[row, :j] > 0)).all(-1)
        row, blocks = row[alive], blocks[alive]
        top = blocks.argmax(-1, keepdim=True)
        blocks = blocks.scatter(-1, top, 0.0)
        index = block[row]
        rest = _least_error(blocks, fmt, None if weights is None else weights[index]) * area[index]
        place[row, j - 1] += top[:, 0]
        error[row, j:] = rest[:, None]
    entry = torch.arange(MOST, device=blocks.device)
    steps = entry - entry[:, None] + 1  # [l, j - 1]
    slope = (error[:, :-1, None] - error[:, None, 1:]) / steps.clamp(min=1)
    best_end = slope.flip(-1).cummax(-1).values.flip(-1)
    gain = best_end.masked_fill(steps < 1, math.inf).amin(1)
    pays = gain > 0
    number = start // fmt.block_size + block  # times the golden ratio, modulo 1: evenly spread over a bin
    low = (number * 0x9E3779B1 & 0xFFFFFFFF) << (_LOW_BITS - 32)
    gain = ((_bin(gain) << _LOW_BITS) | low[:, None]).view(torch.float64)
    keep = pays & (gain >= floor)
    return gain[keep], place[keep]


def _chunks(weight, fmt, macro, channel_weights) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Row chunks of `[..., N, K]` as (place of the first weight, and the `blocks`, `area`, `weights` of `_gains`)."""
    n, k = weight.shape[-2:]
    fmt.check_in_features(k)
    count = math.prod(weight.shape[:-2])
    macro = None if macro is None else macro.reshape(count, n, macro.shape[-1])
    for i, matrix in enumerate(weight.reshape(count, n, k)):
        factor = torch.ones((), device=weight.device)
        if fmt.has_global_scale:
            factor = power_of_two_global_scale(block_amax(matrix, fmt.block_size))
        for rows in row_chunks(matrix):
            blocks = blocked_magnitudes(matrix[rows], fmt.block_size)
            if macro is not None:
                factor = block_factors(macro[i, rows], blocks.shape[1], fmt.block_size)
            blocks = (blocks / factor[..., None]).flatten(0, 1)
            area = factor.double().square().expand(matrix[rows].shape[0], k // fmt.block_size).flatten()
            weights = None
            if channel_weights is not None:
                weights = channel_weights.to(blocks).view(-1, fmt.block_size).repeat(matrix[rows].shape[0], 1)
            yield (i * n + rows.start) * k, blocks, area, weights


# --- which entries ---------------------------------------------------------------------------------------------------


class Budget:
    """How many entries a model may keep in full precision, and the gain from which on an entry is one of them.

    Every quantized matrix is shown to `add` once; only then is `threshold` final. The order of matrices does not
    matter, and the running threshold saves work: blocks that cannot reach it any more are searched once only.

    Args:
        fraction (`float`): entries to keep, as a fraction of all weights; from 0 to 0.1.
        total_weights (`int`): weights of all matrices together.

    Raises:
        ValueError: for another fraction.
    """

    def __init__(self, fraction: float, total_weights: int):
        if not 0 <= fraction <= MAX_FRACTION:
            raise ValueError(
                f"outlier_fallback={fraction}; allowed: the fraction of weights to keep in full precision, from 0 "
                f"(off) to {MAX_FRACTION}; typical is 0.005."
            )
        self.entries = round(fraction * total_weights)
        self._counts = torch.zeros(_BINS, dtype=torch.int64)

    @torch.no_grad()
    def add(
        self,
        weight: torch.Tensor,
        fmt: BlockFormat,
        macro: torch.Tensor | None = None,
        channel_weights: torch.Tensor | None = None,
    ) -> None:
        """Count the gains of a weight's entries, with the arguments that `select` gets later."""
        for start, blocks, area, weights in _chunks(weight, fmt, macro, channel_weights):
            gain, _ = _gains(blocks, fmt, area, weights, start, self.threshold)
            bins = (_bin(gain).cpu() - _FIRST_BIN).clamp_(0, _BINS - 1)
            self._counts.scatter_add_(0, bins, torch.ones_like(bins))

    @property
    def threshold(self) -> float:
        """The gain that `entries` entries reach, or nearly so many; it rises with each `add`."""
        if not self.entries:
            return math.inf
        reached = self._counts.flip(0).cumsum(0)  # from the top bin down
        fit = int((reached <= self.entries).sum())
        if fit == _BINS:
            return 0.0
        bin = _BINS - 1 - fit  # of this one a share is kept
        share = 1 - (int(reached[fit]) - self.entries) / int(self._counts[bin])
        low, high = _edge(torch.tensor([bin, bin + 1]) + _FIRST_BIN).tolist()
        return high - share * (high - low)


@torch.no_grad()
def select(
    weight: torch.Tensor,
    fmt: BlockFormat,
    threshold: float,
    macro: torch.Tensor | None = None,
    channel_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entries that gain at least `threshold`: squared error of their block now, less that without them.

    Both errors are those of the block's best scale. A block gives up to 4 entries, its largest first; an entry that
    pays only together with the next shares the gain of both. Gains are compared to 0.1 %.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[..., N, K]`, finite.
        fmt (`BlockFormat`): the format of the rest.
        threshold (`float`): `Budget.threshold` once every matrix was added.
        macro (`torch.Tensor`, *optional*): uint8 `[..., N, ceil(K/128)]`, macro factors of the whole weight. They are
            held fixed; searched anew for what is left they can only do better.
        channel_weights (`torch.Tensor`, *optional*): `[K]`, >= 0; errors are then `sum h_k (w - w_hat)^2`.

    Returns:
        bool `[..., N, K]`.

    Raises:
        ValueError: if K is not a multiple of the block size.

    With a tensor scale, gains are those for `soar`'s power of two for the whole weight.
    """
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    for start, blocks, area, weights in _chunks(weight, fmt, macro, channel_weights):
        mask[_gains(blocks, fmt, area, weights, start, threshold)[1]] = True
    return mask.view(weight.shape)


# --- storage ---------------------------------------------------------------------------------------------------------


def column_dtype(columns: int) -> torch.dtype:
    """Dtype of the stored column indices of a weight with K = `columns`."""
    return torch.uint16 if columns <= 2**16 else torch.int32


@torch.no_grad()
def collect(weight: torch.Tensor, mask: torch.Tensor) -> Outliers:
    """The entries of `weight` `[..., N, K]` where `mask` (bool, same shape) holds, as CSR over all rows of the stack.

    Raises:
        ValueError: if there are more than int32 offsets can count.
    """
    weight, mask = (t.reshape(-1, t.shape[-1]) for t in (weight, mask))
    offsets = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.sum(-1), 0, out=offsets[1:])
    if offsets[-1] > MAX_ENTRIES:
        raise ValueError(
            f"{int(offsets[-1])} outliers in one weight {tuple(weight.shape)}; at most {MAX_ENTRIES} can be stored. "
            "Lower outlier_fallback."
        )
    columns = mask.nonzero()[:, 1].to(column_dtype(mask.shape[-1]))
    return Outliers(weight[mask], columns, offsets.to(torch.int32))


def check(outliers: Outliers, packed: torch.Tensor, name: str = "weight") -> None:
    """Raise `ValueError` unless stored outliers fit the codes `packed` uint8 `[..., N, K/2]` of the same weight."""
    packed = packed.reshape(-1, packed.shape[-1])
    rows, k = packed.shape[0], 2 * packed.shape[1]
    values, columns, offsets = outliers
    found = None
    if values.dtype not in FLOATS or columns.dtype != column_dtype(k) or offsets.dtype != torch.int32:
        found = f"dtypes {values.dtype}, {columns.dtype}, {offsets.dtype}; 16- or 32-bit floats, "
        found += f"{column_dtype(k)} and torch.int32 are needed"
    elif values.ndim != 1 or columns.shape != values.shape or offsets.shape != (rows + 1,):
        shapes = ", ".join(str(list(t.shape)) for t in outliers)
        found = f"shapes {shapes}; as many columns as values, and offsets [{rows + 1}] are needed"
    elif offsets[0] != 0 or offsets[-1] != values.numel() or (offsets.diff() < 0).any():
        found = f"offsets that do not rise from 0 to {values.numel()}, the number of values"
    elif not values.isfinite().all():
        found = "values that are NaN or Inf"
    else:
        column = columns.to(torch.int64)
        row = torch.arange(rows, device=offsets.device).repeat_interleave(offsets.diff().to(torch.int64))
        place = row * k + column
        if ((column < 0) | (column >= k)).any():
            found = f"columns outside 0..{k - 1}"
        elif (place.diff() <= 0).any():
            found = "columns that do not rise within a row"
        elif ((packed.flatten()[place >> 1] >> (4 * (place & 1))) & 0xF).any():
            found = "codes that are not 0 in the places of outliers"
    if found:
        raise ValueError(f"{name}: outliers have {found}. The checkpoint is damaged; convert the model again.")
