# SPDX-License-Identifier: Apache-2.0
"""Weights to packed codes under the best scale of every block. Twins: `Units.search_full`, then `reference.encode`.

A thread owns a block: its weights are a tuple of vectors, one for each place in the block. So sums follow the halving
tree of `Units`, and a candidate scale costs no traffic between threads. On sm_90 it costs 9.6 instructions a weight
for MXFP4 and 13.9 for NVFP4.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import BlockFormat
from hf_mxfp4.kernels.decode import INTERPRET, decode_e4m3

# One warp, so that it ends with its own blocks and waits for no other. No fusion of products and sums that stand apart
# in the source, which would change the errors; where fusing is exact, or wanted, `tl.fma` is written.
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def round_magnitude(value):
    """Nearest E2M1 magnitude of float32 values >= 0. Twin: `blocks.round_magnitude`."""
    value = tl.minimum(value, 6.0)
    binade = tl.maximum(value, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    binade = binade.to(tl.float32, bitcast=True)
    return tl.fma(binade, -(2.0**22), tl.fma(binade, 2.0**22, value))  # either product is exact


@triton.jit
def power_of_two(exponent):
    """Exact 2^exponent for exponents (int32) in [-126, 127]. Twin: `blocks.power_of_two`."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quotient(value, scale, reciprocal, DIVIDE: tl.constexpr):
    """`value / scale` where it matters: on the right side of every rounding boundary of E2M1, or exactly on it.

    Division after Markstein: three operations, given the correctly rounded reciprocal. With DIVIDE a true division,
    for interpreters whose `fma` rounds twice (triton < 3.9).
    """
    if DIVIDE:
        return tl.math.div_rn(value, scale)
    first = value * reciprocal
    return tl.fma(tl.fma(first, -scale, value), reciprocal, first)


@triton.jit
def places(tile, BLOCK: tl.constexpr):
    """A tile `[n, BLOCK]` as a tuple of BLOCK vectors `[n]`."""
    parts = (tile,)
    for level in tl.static_range(5):
        if BLOCK >> level > 1:
            halves = ()
            for i in tl.static_range(1 << level):
                low, high = parts[i].reshape(tile.shape[0], 2, BLOCK >> (level + 1)).trans(0, 2, 1).split()
                halves = halves + (low, high)
            parts = halves
    vectors = ()
    for i in tl.static_range(BLOCK):
        vectors = vectors + (parts[i].reshape(tile.shape[0]),)
    return vectors


@triton.jit
def halving_sum(terms, BLOCK: tl.constexpr):
    """The sum of a tuple of BLOCK vectors, halves first. Twin: `Units._sum`."""
    for level in tl.static_range(1, 6):
        if BLOCK >> level > 0:
            sums = ()
            for i in tl.static_range(BLOCK >> level):
                sums = sums + (terms[i] + terms[i + (BLOCK >> level)],)
            terms = sums
    return terms[0]


@triton.jit
def first_candidate(amax, offset, E8M0: tl.constexpr):
    """The largest scale byte that can be best, for block maxima in units. Twin: `Units.top_byte`."""
    if E8M0:
        return tl.maximum(offset + 125 + (amax >= 1.75).to(tl.int32), 0)
    bits = tl.math.div_rn(amax, 3.5).to(tl.int32, bitcast=True)  # rounded down to E4M3 by dropping bits
    return tl.minimum(tl.maximum((bits >> 20) - (120 << 3), 15), 126)


@triton.jit
def unit_scale(byte, offset, E8M0: tl.constexpr):
    """The scale of a byte, in units, and its reciprocal. Twin: `Units.scale`."""
    if E8M0:
        return power_of_two(byte - 127 - offset), power_of_two(127 + offset - byte)
    scale = decode_e4m3(byte.to(tl.uint32))
    return scale, tl.math.div_rn(1.0, scale)


@triton.jit
def search(magnitudes, importance, amax, offset, alive, E8M0: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """Best scale byte of blocks in units, on a tie the smaller. Twin: `Units.search_full`.

    `magnitudes` and `importance` (or `None`) are tuples as of `places`. Descends from `first_candidate`; a block stops
    once clipping alone costs more than its best error.
    """
    lowest = tl.maximum(offset + 1, 0) if E8M0 else 1  # E8M0: 2^-126 units
    byte = first_candidate(amax, offset, E8M0)
    best_byte, best_error = byte, tl.full(amax.shape, float("inf"), tl.float32)
    while tl.max(alive.to(tl.int32), 0) > 0:
        scale, reciprocal = unit_scale(byte, offset, E8M0)
        terms = ()
        for i in tl.static_range(BLOCK):
            if E8M0:
                ratio = magnitudes[i] * reciprocal
            else:
                ratio = quotient(magnitudes[i], scale, reciprocal, DIVIDE)
            error = tl.fma(round_magnitude(ratio), -scale, magnitudes[i])  # the product is exact
            error = error * error
            if importance is not None:
                error = error * importance[i]
            terms = terms + (error,)
        error = halving_sum(terms, BLOCK)
        better = alive & (error <= best_error)
        best_error = tl.where(better, error, best_error)
        best_byte = tl.where(better, byte, best_byte)
        byte -= 1
        top = 6 * unit_scale(byte, offset, E8M0)[0]
        if importance is None:
            clipped = tl.maximum(amax - top, 0.0)
            bound = clipped * clipped
        else:
            terms = ()
            for i in tl.static_range(BLOCK):
                clipped = tl.maximum(magnitudes[i] - top, 0.0)
                terms = terms + (clipped * clipped * importance[i],)
            bound = halving_sum(terms, BLOCK)
        alive = alive & (byte >= lowest) & (bound <= best_error)
    return best_byte


@triton.jit(do_not_specialize=["blocks", "rows_per_matrix"])
def quantize_kernel(
    weight,
    global_scale,
    channel_weights,
    words,
    scale,
    blocks,
    blocks_per_row,
    rows_per_matrix,
    stride_weight,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_BYTE: tl.constexpr,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program i quantizes blocks `i * TILE ..` of all rows: `scale` uint8 `[blocks]`, `words` int32 `[blocks, B/8]`.

    `weight` points at rows of `stride_weight` elements, `global_scale` at a power of two for each matrix.
    """
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = block < blocks
    row, column = block // blocks_per_row, (block % blocks_per_row) * BLOCK
    inner = tl.arange(0, BLOCK)[None, :]
    start = row.to(tl.int64) * stride_weight + column
    values = places(tl.load(weight + start[:, None] + inner, mask=mask[:, None], other=0.0).to(tl.float32), BLOCK)
    magnitudes = ()
    amax = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(BLOCK):
        magnitude = tl.abs(values[i])
        magnitudes = magnitudes + (tl.where(magnitude < 2.0**-120, 0.0, magnitude),)
        amax = tl.maximum(amax, magnitudes[i])
    alive = mask & (amax > 0)
    if E8M0:
        offset = tl.minimum(tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 127, -126), 126)
        unit = power_of_two(-offset)
    else:
        offset = 0
        unit = tl.math.div_rn(1.0, tl.load(global_scale + row // rows_per_matrix, mask=mask, other=1.0))
    in_units = ()
    for i in tl.static_range(BLOCK):
        in_units = in_units + (magnitudes[i] * unit,)
    importance = channel_weights
    if channel_weights is not None:
        seen = tl.zeros([TILE], tl.int1)
        given = places(tl.load(channel_weights + column[:, None] + inner, mask=mask[:, None], other=0.0), BLOCK)
        for i in tl.static_range(BLOCK):
            seen = seen | (given[i] * in_units[i] != 0)
        importance = ()
        for i in tl.static_range(BLOCK):
            importance = importance + (tl.where(seen, given[i], 1.0),)
    byte = search(in_units, importance, amax * unit, offset, alive, E8M0, BLOCK, DIVIDE)
    byte = tl.where(amax == 0, ZERO_BYTE, byte)
    tl.store(scale + block, byte.to(tl.uint8), mask=mask)
    divisor, reciprocal = unit_scale(byte, 0, E8M0)
    for j in tl.static_range(BLOCK // 8):
        word = tl.zeros([TILE], tl.uint32)
        for i in tl.static_range(8):
            if E8M0:
                ratio = magnitudes[8 * j + i] * reciprocal
            else:
                ratio = quotient(in_units[8 * j + i], divisor, reciprocal, DIVIDE)
            code = (round_magnitude(ratio) * 2.0**-126).to(tl.uint32, bitcast=True) >> 22
            sign = (values[8 * j + i].to(tl.uint32, bitcast=True) >> 28) & 8
            word |= (code | sign) << (4 * i)
        tl.store(words + block.to(tl.int64) * (BLOCK // 8) + j, word.to(tl.int32, bitcast=True), mask=mask)


def quantize(
    weight: torch.Tensor,
    fmt: BlockFormat,
    global_scale: torch.Tensor | None,
    channel_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search and encode a stack of matrices `[E, N, K]`, finite float32, bfloat16 or float16.

    `global_scale` float32 `[E]`, powers of two, for formats that have one; `channel_weights` float32 `[K]`, >= 0.

    Returns:
        packed uint8 `[E, N, K/2]` and scale bytes uint8 `[E, N, K/B]`.
    """
    *lead, k = weight.shape
    rows = weight.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    packed = torch.empty((*lead, k // 8), dtype=torch.int32, device=weight.device)
    scale = torch.empty((*lead, k // fmt.block_size), dtype=torch.uint8, device=weight.device)
    blocks, launch = scale.numel(), constants(fmt, bool(torch.version.hip)) | OPTIONS
    if blocks:
        with torch.cuda.device_of(weight):
            quantize_kernel[(triton.cdiv(blocks, launch["TILE"]),)](
                rows,
                None if global_scale is None else global_scale.contiguous(),
                None if channel_weights is None else channel_weights.contiguous(),
                packed,
                scale,
                blocks,
                k // fmt.block_size,
                weight.shape[-2],
                rows.stride(0),
                **launch,
            )
    return packed.view(torch.uint8), scale


def constants(fmt: BlockFormat, hip: bool) -> dict:
    """The compile-time arguments: a block for each thread of a warp."""
    return {
        "E8M0": not fmt.has_global_scale,
        "BLOCK": fmt.block_size,
        "ZERO_BYTE": fmt.zero_byte,
        "DIVIDE": INTERPRET,
        "TILE": 1024 if INTERPRET else 64 if hip else 32,
    }
