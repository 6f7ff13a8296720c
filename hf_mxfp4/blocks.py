# SPDX-License-Identifier: Apache-2.0
"""Blocks of a matrix: their magnitudes, exact rounding to E2M1, and the search for their best scales.

Everything works in row chunks (`row_chunks`), so scratch memory does not grow with the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_mxfp4.formats import E2M1_MAX, E4M3_MAX, BlockFormat

CHUNK_WEIGHTS = 1 << 18  # weights handled at once: about 1 MB in float32, so temporaries stay in a core's L2 cache
SMALLEST_NORMAL = 2.0**-126
SMALLEST_WEIGHT = 2.0**-120  # smaller ones count as zero: their scales would be subnormal, and may be flushed


def row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows of `weight` `[N, K]`, about `CHUNK_WEIGHTS` weights each."""
    rows = max(1, CHUNK_WEIGHTS // max(1, weight.shape[-1]))
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def blocked_magnitudes(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """`|weight|` `[N, K]` as float32 blocks `[N, K/B, B]`; those below 2^-120 count as zero."""
    magnitude = weight.to(torch.float32).abs().unflatten(-1, (-1, block_size))
    return torch.where(magnitude < SMALLEST_WEIGHT, 0.0, magnitude)


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


def e4m3_bytes(value: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 byte (int32) of values > 0, between the smallest subnormal (1) and 448 (126)."""
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32).clamp(min=1)


class Units:
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

    def __getitem__(self, index) -> Units:
        part = object.__new__(Units)
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
            return e4m3_bytes(scale)
        exponent = floor_log2(scale.clamp(min=SMALLEST_NORMAL))
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
        """Sums `[n]` over each block, halves first: an order that kernels can follow bit for bit."""
        if self.weights is not None:
            terms = terms * self.weights
        while terms.shape[-1] > 1:
            half = terms.shape[-1] // 2
            terms = terms[..., :half] + terms[..., half:]
        return terms[..., 0]

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
