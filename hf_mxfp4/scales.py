# SPDX-License-Identifier: Apache-2.0
"""Scale rules: functions from real weights to stored scales. `SCALE_RULES` is the table everything else reads.

A rule only chooses scales; `reference.encode` then rounds to nearest with *given* scales, so no kernel ever learns a
rule's name. Rules work in row chunks (`row_chunks`), so scratch memory does not grow with the matrix.

Sources: OCP MX v1.0 section 6.3 (`amax`); torchao RCEIL (`ceil`); arXiv 2603.08713 section 4.2 (`overflow_aware`);
arXiv 2512.02010 (`four_over_six`); arXiv 2605.12245 (`soar`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hf_mxfp4.blocks import Units, block_amax, divide, e4m3_bytes, floor_log2, power_of_two, row_chunks
from hf_mxfp4.formats import E2M1_MAX, E4M3_MAX, BlockFormat

_RELATIVE_DROP = 1e-6  # SOAR stops once a round lowers the error by less than this fraction
TOP_EXPONENT_BYTE = 252  # 2^125: code 7 is then still finite in float32


class ScaleOptions(NamedTuple):
    """What a rule may be told. Only `soar` reads it.

    Attributes:
        search: `"full"` for the best representable scale of every block, or an int: that many representable scales
            either side of the closed-form one (the paper's local search).
        global_scale: `"power_of_two"` or `"free"` (closed form) for formats with a tensor scale.
        iterations: most rounds of alternation between tensor scale, block scales and codes.
    """

    search: str | int = "full"
    global_scale: str = "power_of_two"
    iterations: int = 10


class Scales(NamedTuple):
    """Stored scales of a matrix: `scale` `[N, K/B]` in the format's dtype, `global_scale` float32 `[]` or `None`."""

    scale: torch.Tensor
    global_scale: torch.Tensor | None


class ScaleRule(NamedTuple):
    """A row of `SCALE_RULES`: `function(weight [N, K], format, options, channel_weights [K] | None) -> Scales`.

    Rules of formats with a tensor scale take one more argument: a tensor scale float32 `[]` to keep to.
    """

    function: Callable[..., Scales]
    formats: tuple[str, ...]
    summary: str
    source: str


# --- tensor scales ---------------------------------------------------------------------------------------------------


def _amax_global_scale(amax: torch.Tensor, top: float) -> torch.Tensor:
    """`max(amax) / (6 * top)` as float32 `[]`, kept where both it and its reciprocal are normal; 1 for zeros."""
    peak = amax.max() if amax.numel() else amax.new_zeros(())
    scale = divide(peak, E2M1_MAX * top).clamp(2.0**-125, 2.0**125)
    return torch.where(peak == 0, torch.ones_like(scale), reciprocal_stable(scale))


def reciprocal_stable(scale: torch.Tensor) -> torch.Tensor:
    """The float32 next to `scale` for which `1 / (1 / scale) == scale`.

    Checkpoints store the reciprocal (compressed-tensors divides by its tensor scale), so a scale that does not survive
    two reciprocals would change when saved. Two round trips always reach such a value.
    """
    for _ in range(2):
        scale = scale.reciprocal().reciprocal()
    return scale


def power_of_two_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Smallest power of two at which every block maximum may still be put on code 4: `max(amax) <= 4 * 448 * g`."""
    peak = amax.max() if amax.numel() else amax.new_zeros(())
    mantissa, exponent = math.frexp(float(peak) / (4 * E4M3_MAX))
    exponent -= mantissa == 0.5  # exactly a power of two
    return torch.tensor(2.0 ** min(max(exponent, -125), 116) if peak > 0 else 1.0, device=amax.device)


# --- the plain rules -------------------------------------------------------------------------------------------------


def finish(byte: torch.Tensor, amax: torch.Tensor, fmt: BlockFormat, global_scale=None) -> Scales:
    """Clamp scale bytes to the format's range, set all-zero blocks to `zero_byte`, view as the storage dtype."""
    top = min(fmt.top_byte, TOP_EXPONENT_BYTE)
    byte = torch.where(amax == 0, fmt.zero_byte, byte.clamp(0, top)).to(torch.uint8)
    return Scales(fmt.scale_from_bytes(byte), global_scale)


def amax_rule(weight, fmt, options=ScaleOptions(), channel_weights=None, tensor_scale=None) -> Scales:
    """Put each block's maximum at the top of the grid. MXFP4: 2^(floor(log2 amax) - 2). NVFP4: E4M3(amax / 6 / g)."""
    amax = block_amax(weight, fmt.block_size)
    if not fmt.has_global_scale:
        return finish(floor_log2(amax) + 127 - 2, amax, fmt)
    global_scale = _amax_global_scale(amax, E4M3_MAX) if tensor_scale is None else tensor_scale
    return finish(e4m3_bytes(divide(amax, E2M1_MAX) / global_scale), amax, fmt, global_scale)


def _power_of_two_rule(weight, fmt, round_up_above: float) -> Scales:
    """2^(floor(log2 amax) - 2), one exponent higher where amax's mantissa in [1, 2) exceeds `round_up_above`."""
    amax = block_amax(weight, fmt.block_size)
    exponent = floor_log2(amax)
    mantissa = amax * power_of_two(-exponent.clamp(-126, 126))
    return finish(exponent + 127 - 2 + (mantissa > round_up_above), amax, fmt)


def ceil_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """2^ceil(log2(amax / 6)): the smallest power of two that never clips."""
    return _power_of_two_rule(weight, fmt, 1.5)


def overflow_aware_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """`ceil`, but where the block maximum would land in (3, 3.5] the scale is halved and that maximum clips to 6."""
    return _power_of_two_rule(weight, fmt, 1.75)


def four_over_six_rule(weight, fmt, options=ScaleOptions(), channel_weights=None, tensor_scale=None) -> Scales:
    """g = amax / (6 * 256); per block the better, by squared error, of putting its maximum on 6 or on 4."""
    amax = block_amax(weight, fmt.block_size)
    global_scale = _amax_global_scale(amax, 256.0) if tensor_scale is None else tensor_scale
    six, four = (e4m3_bytes(divide(amax, top) / global_scale) for top in (6.0, 4.0))
    byte = torch.empty_like(six)
    for rows in row_chunks(weight):
        unit = Units(weight[rows], fmt, global_scale, channel_weights)
        better = unit.error(four[rows].flatten()) < unit.error(six[rows].flatten())
        byte[rows] = torch.where(better.view(four[rows].shape), four[rows], six[rows])
    return finish(byte, amax, fmt, global_scale)


# --- SOAR ------------------------------------------------------------------------------------------------------------


def soar_rounds(
    weight: torch.Tensor,
    fmt: BlockFormat,
    options: ScaleOptions,
    channel_weights: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> Iterator[tuple[Scales, float]]:
    """The rounds of SOAR as `(scales, squared error)`; the error never rises.

    A round searches every block's scale for the tensor scale at hand, then (`global_scale="free"`) moves the tensor
    scale to its closed-form optimum for the codes found. With the tensor scale fixed a full search is optimal at once.
    """
    local = options.search != "full"
    free = fmt.has_global_scale and options.global_scale == "free" and tensor_scale is None
    start = amax_rule(weight, fmt) if local or free else None
    amax = block_amax(weight, fmt.block_size)
    if not fmt.has_global_scale:
        global_scale = None
    elif tensor_scale is not None:
        global_scale = tensor_scale
    elif free:
        global_scale = start.global_scale
    else:
        global_scale = power_of_two_global_scale(amax)
    byte = torch.empty_like(amax, dtype=torch.int32)
    if local:
        byte = start.scale.view(torch.uint8).to(torch.int32)
        if fmt.has_global_scale and not free:
            byte = e4m3_bytes(divide(amax, E2M1_MAX) / global_scale)
    previous = math.inf
    for _ in range(options.iterations if local or free else 1):
        total = numerator = denominator = 0.0
        found = torch.empty_like(byte)
        for rows in row_chunks(weight):
            unit = Units(weight[rows], fmt, global_scale, channel_weights)
            near = unit.search_near(byte[rows].flatten(), options.search) if local else unit.search_full()
            found[rows] = near[0].view(found[rows].shape)
            squared_unit = 1.0 if unit.offset is None else power_of_two(unit.offset).double().square()
            total += float((near[1].double() * squared_unit).sum())
            if free:
                top, bottom = unit.projection(near[0])
                numerator, denominator = (
                    numerator + float(top.double().sum()),
                    denominator + float(bottom.double().sum()),
                )
        error = total * (float(global_scale) ** 2 if fmt.has_global_scale else 1.0)
        if error > previous:
            return
        byte = found
        yield finish(byte, amax, fmt, global_scale), error
        if previous - error <= _RELATIVE_DROP * previous and previous < math.inf or error == 0:
            return
        previous = error
        if free and denominator > 0:
            global_scale = reciprocal_stable(global_scale * (numerator / denominator))


def soar_rule(weight, fmt, options=ScaleOptions(), channel_weights=None, tensor_scale=None) -> Scales:
    """Scales of least (weighted) squared error: joint closed form for the tensor scale, search for the block scales.

    With `search="full"` each block's scale is the global optimum for the tensor scale chosen: for a given decoding
    scale, nearest rounding is the best choice of codes, so searching the representable scales is exhaustive.
    """
    scales = None
    for scales, _ in soar_rounds(weight, fmt, options, channel_weights, tensor_scale):  # noqa: B007 - the last round is the best
        pass
    return scales


SCALE_RULES: dict[str, ScaleRule] = {
    "amax": ScaleRule(amax_rule, ("mxfp4", "nvfp4"), "block maximum at the top of the grid", "OCP MX v1.0; NVIDIA"),
    "ceil": ScaleRule(ceil_rule, ("mxfp4",), "smallest power of two that never clips", "torchao RCEIL"),
    "overflow_aware": ScaleRule(
        overflow_aware_rule, ("mxfp4",), "ceil, halved where clipping costs nothing", "arXiv 2603.08713"
    ),
    "four_over_six": ScaleRule(four_over_six_rule, ("nvfp4",), "block maximum on 6 or on 4", "arXiv 2512.02010"),
    "soar": ScaleRule(soar_rule, ("mxfp4", "nvfp4"), "least squared error over all scales", "arXiv 2605.12245"),
}
