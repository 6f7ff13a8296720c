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

from hf_mxfp4.formats import E2M1_MAX, E4M3_MAX, BlockFormat

CHUNK_WEIGHTS = 1 << 18  # weights handled at once: about 1 MB in float32, so temporaries stay in a core's L2 cache
_RELATIVE_DROP = 1e-6  # SOAR stops once a round lowers the error by less than this fraction
_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_WEIGHT = 2.0**-120  # smaller ones count as zero: their scales would be subnormal, and may be flushed
_TOP_EXPONENT_BYTE = 252  # 2^125: code 7 is then still finite in float32


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
    """A row of `SCALE_RULES`: `function(weight [N, K], format, options, channel_weights [K] | None) -> Scales`."""

    function: Callable[..., Scales]
    formats: tuple[str, ...]
    summary: str
    source: str


def row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows of `weight` `[N, K]`, about `CHUNK_WEIGHTS` weights each."""
    rows = max(1, CHUNK_WEIGHTS // max(1, weight.shape[-1]))
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def blocked_magnitudes(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """`|weight|` `[N, K]` as float32 blocks `[N, K/B, B]`; those below 2^-120 count as zero."""
    magnitude = weight.to(torch.float32).abs().unflatten(-1, (-1, block_size))
    return torch.where(magnitude < _SMALLEST_WEIGHT, 0.0, magnitude)


def block_amax(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """Largest magnitude of each block: `[N, K]` -> float32 `[N, K/B]`."""
    parts = [blocked_magnitudes(weight[rows], block_size).amax(-1) for rows in row_chunks(weight)]
    return torch.cat(parts) if parts else weight.new_zeros((0, weight.shape[-1] // block_size), dtype=torch.float32)


def round_magnitude(magnitude: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude of values >= 0 (ties to even mantissa, saturating at 6), float32, same shape.

    Adding and subtracting 2^22, 2^23 or 2^24 rounds to multiples of 0.5, 1 or 2, the grid's step below 2, 4 and 6.
    """
    value = magnitude.clamp(max=E2M1_MAX)
    binade = (value.clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32)
    return value.add_(binade.mul_(2.0**22)).sub_(binade)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Exact float32 2^exponent for integer exponents in [-126, 127]."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def floor_log2(value: torch.Tensor) -> torch.Tensor:
    """floor(log2(value)) of positive normal float32 values as int32, from the exponent bits (zero gives -127)."""
    return (value.view(torch.int32) >> 23) - 127


# --- tensor scales ---------------------------------------------------------------------------------------------------


def _amax_global_scale(amax: torch.Tensor, top: float) -> torch.Tensor:
    """`max(amax) / (6 * top)` as float32 `[]`, kept where both it and its reciprocal are normal; 1 for zeros."""
    peak = amax.max() if amax.numel() else amax.new_zeros(())
    scale = (peak / (E2M1_MAX * top)).clamp(2.0**-125, 2.0**125)
    return torch.where(peak == 0, torch.ones_like(scale), reciprocal_stable(scale))


def reciprocal_stable(scale: torch.Tensor) -> torch.Tensor:
    """The float32 next to `scale` for which `1 / (1 / scale) == scale`.

    Checkpoints store the reciprocal (compressed-tensors divides by its tensor scale), so a scale that does not survive
    two reciprocals would change when saved. Two round trips always reach such a value.
    """
    for _ in range(2):
        scale = scale.reciprocal().reciprocal()
    return scale


def _power_of_two_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Smallest power of two at which every block maximum may still be put on code 4: `max(amax) <= 4 * 448 * g`."""
    peak = amax.max() if amax.numel() else amax.new_zeros(())
    mantissa, exponent = math.frexp(float(peak) / (4 * E4M3_MAX))
    exponent -= mantissa == 0.5  # exactly a power of two
    return torch.tensor(2.0 ** min(max(exponent, -125), 116) if peak > 0 else 1.0, device=amax.device)


# --- the plain rules -------------------------------------------------------------------------------------------------


def _finish(byte: torch.Tensor, amax: torch.Tensor, fmt: BlockFormat, global_scale=None) -> Scales:
    """Clamp scale bytes to the format's range, set all-zero blocks to `zero_byte`, view as the storage dtype."""
    top = min(fmt.top_byte, _TOP_EXPONENT_BYTE)
    byte = torch.where(amax == 0, fmt.zero_byte, byte.clamp(0, top)).to(torch.uint8)
    return Scales(fmt.scale_from_bytes(byte), global_scale)


def _e4m3_bytes(value: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 byte (int32) of values > 0, between the smallest subnormal (1) and 448 (126)."""
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32).clamp(min=1)


def amax_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """Put each block's maximum at the top of the grid. MXFP4: 2^(floor(log2 amax) - 2). NVFP4: E4M3(amax / 6 / g)."""
    amax = block_amax(weight, fmt.block_size)
    if not fmt.has_global_scale:
        return _finish(floor_log2(amax) + 127 - 2, amax, fmt)
    global_scale = _amax_global_scale(amax, E4M3_MAX)
    return _finish(_e4m3_bytes(amax / E2M1_MAX / global_scale), amax, fmt, global_scale)


def _power_of_two_rule(weight, fmt, round_up_above: float) -> Scales:
    """2^(floor(log2 amax) - 2), one exponent higher where amax's mantissa in [1, 2) exceeds `round_up_above`."""
    amax = block_amax(weight, fmt.block_size)
    exponent = floor_log2(amax)
    mantissa = amax * power_of_two(-exponent.clamp(-126, 126))
    return _finish(exponent + 127 - 2 + (mantissa > round_up_above), amax, fmt)


def ceil_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """2^ceil(log2(amax / 6)): the smallest power of two that never clips."""
    return _power_of_two_rule(weight, fmt, 1.5)


def overflow_aware_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """`ceil`, but where the block maximum would land in (3, 3.5] the scale is halved and that maximum clips to 6."""
    return _power_of_two_rule(weight, fmt, 1.75)


def four_over_six_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """g = amax / (6 * 256); per block the better, by squared error, of putting its maximum on 6 or on 4."""
    amax = block_amax(weight, fmt.block_size)
    global_scale = _amax_global_scale(amax, 256.0)
    six, four = (_e4m3_bytes(amax / top / global_scale) for top in (6.0, 4.0))
    byte = torch.empty_like(six)
    for rows in row_chunks(weight):
        unit = _Units(weight[rows], fmt, global_scale, channel_weights)
        better = unit.error(four[rows].flatten()) < unit.error(six[rows].flatten())
        byte[rows] = torch.where(better.view(four[rows].shape), four[rows], six[rows])
    return _finish(byte, amax, fmt, global_scale)


# --- SOAR ------------------------------------------------------------------------------------------------------------


class _Units:
    """Blocks of a row chunk in units where squares neither overflow nor vanish, with errors per candidate scale byte.

    With a tensor scale the unit is that scale; without one it is each block's own power of two. `magnitude` `[n, B]`
    float32, `weights` `[n, B]` or `None`, `offset` int32 `[n]` (exponent of the unit) or `None`.
    """

    def __init__(self, weight, fmt: BlockFormat, global_scale, channel_weights=None):
        self.fmt = fmt
        self.magnitude = blocked_magnitudes(weight, fmt.block_size).flatten(0, 1)
        self.amax = self.magnitude.amax(-1)
        if fmt.has_global_scale:
            self.offset = None
            self.table = fmt.decode_scale(torch.arange(fmt.top_byte + 1, dtype=torch.uint8, device=weight.device))
            self.magnitude, self.amax = self.magnitude / global_scale, self.amax / global_scale
        else:
            self.offset = floor_log2(self.amax).clamp(-126, 126)
            unit = power_of_two(-self.offset)
            self.magnitude, self.amax = self.magnitude * unit[:, None], self.amax * unit
        self.weights = None
        if channel_weights is not None:
            weights = channel_weights.to(self.magnitude).view(-1, fmt.block_size)
            weights = weights.repeat(weight.shape[0], 1)
            unseen = (weights * self.magnitude).sum(-1, keepdim=True) == 0  # every scale would do: plain error there
            self.weights = torch.where(unseen, 1.0, weights)

    def __getitem__(self, index) -> _Units:
        part = object.__new__(_Units)
        part.__dict__.update(self.__dict__)
        for name in ("magnitude", "amax", "offset", "weights"):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[index])
        return part

    def scale(self, byte: torch.Tensor) -> torch.Tensor:
        """Scale bytes int32 `[n]` -> float32 `[n]` in units."""
        if self.offset is None:
            return self.table[byte]
        return power_of_two(byte - 127 - self.offset)

    def byte(self, scale: torch.Tensor) -> torch.Tensor:
        """Nearest scale byte int32 `[n]` of real scales in units."""
        if self.offset is None:
            return _e4m3_bytes(scale)
        exponent = floor_log2(scale.clamp(min=_SMALLEST_NORMAL))
        return (exponent + (scale > 1.5 * power_of_two(exponent)) + 127 + self.offset).clamp(0, self.fmt.top_byte)

    def top_byte(self) -> torch.Tensor:
        """The largest scale that can be best. Above it the maximum is below 3.5 scales, every code is at most 3, and
        half the scale represents the same values."""
        if self.offset is None:
            top = torch.bucketize(self.amax, 3.5 * self.table, right=True) - 1
        else:
            top = self.offset + 127 - 2 + (self.amax >= 1.75)
        return top.clamp(self.fmt.undominated_byte, self.fmt.top_byte).to(torch.int32)

    def error(self, byte: torch.Tensor) -> torch.Tensor:
        """Squared error `[n]` (units squared) of nearest rounding with these scale bytes."""
        return self._sum(self.decoded(byte).sub_(self.magnitude).square_())

    def decoded(self, byte: torch.Tensor) -> torch.Tensor:
        """Nearest representable magnitudes `[n, B]` in units."""
        scale = self.scale(byte)[:, None]
        return round_magnitude(self.magnitude / scale).mul_(scale)

    def clip_bound(self, byte: torch.Tensor) -> torch.Tensor:
        """A lower bound of `error` for these and all smaller scales: what clipping at 6 scales costs."""
        top = E2M1_MAX * self.scale(byte)
        if self.weights is None:
            return (self.amax - top).clamp_(min=0).square_()
        return self._sum((self.magnitude - top[:, None]).clamp_(min=0).square_())

    def projection(self, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-block sums `[n]` of h*w*v and h*v*v for decoded v: least-squares factor = first / second."""
        decoded = self.decoded(byte)
        return self._sum(self.magnitude * decoded), self._sum(decoded.square())

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        return (terms if self.weights is None else terms * self.weights).sum(-1)

    def search_full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Best scale byte int32 `[n]` over *all* representable scales, and its error `[n]`; on a tie the smaller.

        Descends from `top_byte`; a block stops once clipping alone costs more than its best error.
        """
        best_byte = self.top_byte()
        best_error = self.error(best_byte)
        index, unit, byte = torch.arange(len(best_byte), device=best_byte.device), self, best_byte - 1
        lowest = 1 if self.offset is None else 0
        while True:
            alive = byte >= lowest
            alive &= unit.clip_bound(byte.clamp(min=0)) <= best_error[index]
            count = int(alive.sum())
            if not count:
                return best_byte, best_error
            if count < 0.8 * len(alive):
                index, unit, byte = index[alive], unit[alive], byte[alive]
            candidate = byte.clamp(min=lowest)
            error = unit.error(candidate)
            better = error <= best_error[index]
            best_error[index] = torch.where(better, error, best_error[index])
            best_byte[index] = torch.where(better, candidate, best_byte[index])
            byte = byte - 1

    def search_near(self, byte: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Best byte among `byte` itself and `width` bytes either side of the closed-form scale for its codes."""
        numerator, denominator = self.projection(byte)
        factor = torch.where(denominator > 0, numerator / denominator, 1.0)
        center = self.byte(self.scale(byte) * factor)
        best_byte, best_error = byte, self.error(byte)
        lowest = 1 if self.offset is None else 0
        for shift in range(-width, width + 1):
            candidate = (center + shift).clamp(lowest, self.fmt.top_byte)
            error = self.error(candidate)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_byte = torch.where(better, candidate, best_byte)
        return best_byte, best_error


def soar_rounds(
    weight: torch.Tensor, fmt: BlockFormat, options: ScaleOptions, channel_weights: torch.Tensor | None = None
) -> Iterator[tuple[Scales, float]]:
    """The rounds of SOAR as `(scales, squared error)`; the error never rises.

    A round searches every block's scale for the tensor scale at hand, then (`global_scale="free"`) moves the tensor
    scale to its closed-form optimum for the codes found. With the tensor scale fixed a full search is optimal at once.
    """
    local = options.search != "full"
    free = fmt.has_global_scale and options.global_scale == "free"
    start = amax_rule(weight, fmt) if local or free else None
    amax = block_amax(weight, fmt.block_size)
    if not fmt.has_global_scale:
        global_scale = None
    elif free:
        global_scale = start.global_scale
    else:
        global_scale = _power_of_two_global_scale(amax)
    byte = torch.empty_like(amax, dtype=torch.int32)
    if local:
        byte = start.scale.view(torch.uint8).to(torch.int32)
        if fmt.has_global_scale and not free:
            byte = _e4m3_bytes(amax / E2M1_MAX / global_scale)
    previous = math.inf
    for _ in range(options.iterations if local or free else 1):
        total = numerator = denominator = 0.0
        found = torch.empty_like(byte)
        for rows in row_chunks(weight):
            unit = _Units(weight[rows], fmt, global_scale, channel_weights)
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
        yield _finish(byte, amax, fmt, global_scale), error
        if previous - error <= _RELATIVE_DROP * previous and previous < math.inf or error == 0:
            return
        previous = error
        if free and denominator > 0:
            global_scale = reciprocal_stable(global_scale * (numerator / denominator))


def soar_rule(weight, fmt, options=ScaleOptions(), channel_weights=None) -> Scales:
    """Scales of least (weighted) squared error: joint closed form for the tensor scale, search for the block scales.

    With `search="full"` each block's scale is the global optimum for the tensor scale chosen: for a given decoding
    scale, nearest rounding is the best choice of codes, so searching the representable scales is exhaustive.
    """
    scales = None
    for scales, _ in soar_rounds(weight, fmt, options, channel_weights):  # noqa: B007 - the last round is the best
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
