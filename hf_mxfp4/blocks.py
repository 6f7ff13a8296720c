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
TOP_FACTORED_BYTE = 251  # 2^124: code 7 times a macro factor below 2 is then still finite in float32
SMALLEST_WEIGHT = 2.0**-120  # smaller ones count as zero: their scales would be subnormal, and may be flushed
_BELOW = SMALLEST_WEIGHT * (1 - 2.0**-24)  # the next smaller float32


def row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows of `weight` `[N, K]`, about `CHUNK_WEIGHTS` weights each."""
    rows = max(1, CHUNK_WEIGHTS // max(1, weight.shape[-1]))
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def blocked_magnitudes(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """`|weight|` `[N, K]` as float32 blocks `[N, K/B, B]`; those below 2^-120 count as zero."""
    magnitude = weight.to(torch.float32).abs().unflatten(-1, (-1, block_size))
    return torch.threshold_(magnitude, _BELOW, 0.0)


def block_columns(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """`blocked_magnitudes` as `[N*K/B, B]` with the blocks side by side in memory (strides 1, N*K/B).

    Work on whole blocks is then done on long runs of memory: maxima are 10 times as fast, sums 3 times.
    """
    rows = weight.detach().reshape(-1, block_size)
    columns = torch.empty((block_size, len(rows)), dtype=torch.float32, device=weight.device).copy_(rows.t()).abs_()
    return torch.threshold_(columns, _BELOW, 0.0).t()


def block_amax(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """Largest magnitude of each block: `[N, K]` -> float32 `[N, K/B]`."""
    amax = torch.empty((len(weight), weight.shape[-1] // block_size), dtype=torch.float32, device=weight.device)
    for rows in row_chunks(weight):
        amax[rows] = block_columns(weight[rows], block_size).amax(-1).view(-1, amax.shape[1])
    return amax


def round_magnitude(magnitude: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude of values >= 0 (ties to even mantissa, saturating at 6), float32, same shape."""
    value = magnitude.clamp(max=E2M1_MAX)
    return _round(value, torch.empty_like(value))


def _round(value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """`round_magnitude` of values in [0, 6], in place; `step` is memory of the same shape and strides.

    Adding and subtracting 2^22, 2^23 or 2^24 rounds to multiples of 0.5, 1 or 2, the grid's step below 2, 4 and 6.
    """
    torch.clamp(value, min=1.0, out=step).view(torch.int32).bitwise_and_(0x7F800000)
    return value.add_(step.mul_(2.0**22)).sub_(step)


def divide(value: torch.Tensor, by: float) -> torch.Tensor:
    """`value / by`, correctly rounded on every device: CUDA would multiply by the reciprocal of a Python number."""
    return value / value.new_full((), by)


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
    float32, `weights` `[n, B]` or `None`, `offset` int32 `[n]` (exponent of the unit) or `None`. `factor` float32
    `[n]`, in [1, 2), multiplies every scale if it is set (with `offset` only). `unseen` bool `[n]`: blocks with
    nothing on a channel that has a weight; every scale would do, so their plain error counts.
    """

    def __init__(self, weight, fmt: BlockFormat, global_scale, channel_weights=None):
        self.fmt = fmt
        self.factor = None
        self.magnitude = block_columns(weight, fmt.block_size)
        self.amax = self.magnitude.amax(-1)
        if fmt.has_global_scale:
            self.offset = None
            self.table = fmt.decode_scale(torch.arange(fmt.top_byte + 1, dtype=torch.uint8, device=weight.device))
            self.magnitude, self.amax = self.magnitude / global_scale, self.amax / global_scale
        else:
            self.offset = floor_log2(self.amax).clamp(-126, 126)
            unit = power_of_two(-self.offset)
            self.magnitude, self.amax = self.magnitude * unit[:, None], self.amax * unit
        self.weights = self.unseen = None
        if channel_weights is not None:
            weights = channel_weights.to(self.magnitude).reshape(-1, fmt.block_size)
            weights = weights.t().repeat(1, weight.shape[0]).t()
            self.unseen = (weights * self.magnitude).sum(-1) == 0
            self.weights = torch.where(self.unseen[:, None], 1.0, weights)
        self._memory = self._scratch()

    def __getitem__(self, index: torch.Tensor) -> Units:
        """The blocks of an index int64 `[m]`."""
        part = object.__new__(Units)
        part.__dict__.update(self.__dict__)
        for name in ("magnitude", "amax", "offset", "factor", "weights", "unseen"):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value.t().index_select(-1, index).t())
        part._memory = part._scratch()
        return part

    def _scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for what is computed of every weight, again and again: to allocate it each time costs as much."""
        return torch.empty_like(self.magnitude), torch.empty_like(self.magnitude)

    def scale(self, byte: torch.Tensor) -> torch.Tensor:
        """Scale bytes int32 `[n]` -> float32 `[n]` in units."""
        if self.offset is None:
            return self.table.index_select(0, byte)
        scale = power_of_two(byte - 127 - self.offset)
        return scale if self.factor is None else scale * self.factor

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
            top = e4m3_bytes(self.amax / 3.5)
            top = top - (3.5 * self.scale(top) > self.amax).to(torch.int32)  # if it was rounded up
        elif self.factor is None:
            top = self.offset + 127 - 2 + (self.amax >= 1.75)
        else:
            top = self.offset + 127 - 3 + (self.amax >= 0.875 * self.factor) + (self.amax >= 1.75 * self.factor)
            top = top.clamp(max=TOP_FACTORED_BYTE)
        return top.clamp(self.fmt.undominated_byte, self.fmt.top_byte).to(torch.int32)

    def error(self, byte: torch.Tensor) -> torch.Tensor:
        """Squared error `[n]` (units squared) of nearest rounding with these scale bytes."""
        return self._sum(self.decoded(byte).sub_(self.magnitude).square_())

    def decoded(self, byte: torch.Tensor) -> torch.Tensor:
        """Nearest representable magnitudes `[n, B]` in units, in memory that the next call uses again."""
        value, step = self._memory
        scale = self.scale(byte)[:, None]
        return _round(torch.div(self.magnitude, scale, out=value).clamp_(max=E2M1_MAX), step).mul_(scale)

    def clip_bound(self, byte: torch.Tensor) -> torch.Tensor:
        """A lower bound of `error` for these and all smaller scales: what clipping at 6 scales costs."""
        top = E2M1_MAX * self.scale(byte)
        if self.weights is None:
            return (self.amax - top).clamp_(min=0).square_()
        return self._sum(torch.sub(self.magnitude, top[:, None], out=self._memory[0]).clamp_(min=0).square_())

    def projection(self, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-block sums `[n]` of h*w*v and h*v*v for decoded v: least-squares factor = first / second."""
        decoded = self.decoded(byte)
        return self._sum(self.magnitude * decoded), self._sum(decoded.square())

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Sums `[n]` over each block, halves first: an order that kernels can follow bit for bit. Spoils `terms`."""
        if self.weights is not None:
            terms.mul_(self.weights)
        half = terms.shape[-1] // 2
        while half > 1:
            terms[..., :half] += terms[..., half : 2 * half]
            half //= 2
        return terms[..., 0] + terms[..., 1]

    def search_full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Best scale byte int32 `[n]` over *all* representable scales, and its error `[n]`; on a tie the smaller.

        Descends from `top_byte`; a block stops once clipping alone costs more than its best error.
        """
        byte = self.top_byte()
        return self._descend(byte, byte, self.error(byte))

    def _descend(self, byte, best_byte, best_error) -> tuple[torch.Tensor, torch.Tensor]:
        # In units a scale stays a normal number; only where channels weigh nothing would a smaller one be looked at.
        lowest = torch.ones_like(byte) if self.offset is None else (self.offset + 1).clamp(min=0)
        while True:
            byte = byte - 1
            candidate = byte.clamp(min=lowest)
            alive = (byte >= lowest).logical_and_(self.clip_bound(candidate) <= best_error)
            if 2 * int(alive.sum()) <= len(alive):
                break
            error = self.error(candidate)
            better = error <= best_error
            best_error = torch.where(better, error, best_error)
            best_byte = torch.where(better, candidate, best_byte)
        index = alive.nonzero().flatten()
        if len(index):
            part = (byte[index] + 1, best_byte[index], best_error[index])
            best_byte, best_error = best_byte.clone(), best_error.clone()
            best_byte[index], best_error[index] = self[index]._descend(*part)
        return best_byte, best_error

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
