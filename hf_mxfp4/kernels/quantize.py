# SPDX-License-Identifier: Apache-2.0
"""Weights to packed codes under the best scale of every block, and the best macro factors.

Twins: `Units.search_full`, `macro_block.search`, then `reference.encode`; equal to them bit for bit.

A thread owns a block: its weights are a tuple of vectors, one for each place in the block. So sums follow the halving
tree of `Units`, and a candidate scale costs no traffic between threads. On sm_90 it costs 9.6 instructions a weight
for MXFP4, 11.7 with a factor, and 13.9 for NVFP4.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.blocks import TOP_FACTORED_BYTE
from hf_mxfp4.formats import MACRO_BLOCK, BlockFormat
from hf_mxfp4.kernels.decode import INTERPRET, decode_e4m3

# One warp, so that it ends with its own blocks and waits for no other. No fusion of products and sums that stand apart
# in the source, which would change the errors; where fusing is exact, or wanted, `tl.fma` is written.
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
FACTOR_STEP = 1  # all macro factors are tried
_TOP_FACTORED = tl.constexpr(TOP_FACTORED_BYTE)


@triton.jit
def power_of_two(exponent):
    """Exact 2^exponent for exponents (int32) in [-126, 127]. Twin: `blocks.power_of_two`."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest(values, scale, reciprocal, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """Nearest E2M1 magnitudes of `value / scale`, of a tuple of BLOCK vectors >= 0. Twin: `blocks.round_magnitude`.

    The quotient is on the right side of every rounding boundary, or exactly on it: three operations after Markstein,
    given the correctly rounded reciprocal of a scale of up to 9 bits. With DIVIDE a true division, for interpreters
    whose `fma` rounds twice (triton < 3.9). With scale `None` the reciprocal is a power of two.
    """
    found = ()
    for i in tl.static_range(BLOCK):
        if scale is None:
            value = values[i] * reciprocal
        elif DIVIDE:
            value = tl.math.div_rn(values[i], scale)
        else:
            value = values[i] * reciprocal
            value = tl.fma(tl.fma(value, -scale, values[i]), reciprocal, value)
        value = tl.minimum(value, 6.0)
        binade = tl.maximum(value, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
        binade = binade.to(tl.float32, bitcast=True)
        # Rounds to multiples of 0.5, 1 or 2; either product is exact.
        found = found + (tl.fma(binade, -(2.0**22), tl.fma(binade, 2.0**22, value)),)
    return found


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
def first_candidate(amax, offset, factor, E8M0: tl.constexpr):
    """The largest scale byte that can be best, for block maxima in units. Twin: `Units.top_byte`."""
    if not E8M0:
        bits = tl.math.div_rn(amax, 3.5).to(tl.int32, bitcast=True)  # rounded down to E4M3 by dropping bits
        byte = tl.minimum(tl.maximum((bits >> 20) - (120 << 3), 15), 126)
    elif factor is None:
        byte = tl.maximum(offset + 125 + (amax >= 1.75).to(tl.int32), 0)
    else:
        byte = offset + 124 + (amax >= 0.875 * factor).to(tl.int32) + (amax >= 1.75 * factor).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte, 0), _TOP_FACTORED)
    return byte


@triton.jit
def unit_scale(byte, offset, factor, E8M0: tl.constexpr):
    """The scale of a byte, in units, and its reciprocal. Twin: `Units.scale`."""
    if not E8M0:
        scale = decode_e4m3(byte.to(tl.uint32))
        reciprocal = tl.math.div_rn(1.0, scale)
    else:
        scale, reciprocal = power_of_two(byte - 127 - offset), power_of_two(127 + offset - byte)
        if factor is not None:
            scale, reciprocal = scale * factor, reciprocal * tl.math.div_rn(1.0, factor)
    return scale, reciprocal


@triton.jit
def search(
    magnitudes,
    importance,
    amax,
    offset,
    factor,
    alive,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """Best scale byte of blocks in units, on a tie the smaller, and its error. Twin: `Units.search_full`.

    `magnitudes` and `importance` (or `None`) are tuples as of `places`; `factor` float32 in [1, 2) multiplies every
    scale, or `None`; blocks not `alive` are all zero. Descends from `first_candidate`; a block stops once clipping
    alone costs more than its best error.
    """
    lowest = tl.maximum(offset + 1, 0) if E8M0 else 1  # E8M0: 2^-126 units
    byte = first_candidate(amax, offset, factor, E8M0)
    best_byte, best_error = byte, tl.where(alive, float("inf"), 0.0)
    while tl.max(alive.to(tl.int32), 0) > 0:
        scale, reciprocal = unit_scale(byte, offset, factor, E8M0)
        if E8M0 and factor is None:
            found = nearest(magnitudes, None, reciprocal, BLOCK, DIVIDE)
        else:
            found = nearest(magnitudes, scale, reciprocal, BLOCK, DIVIDE)
        terms = ()
        for i in tl.static_range(BLOCK):
            error = tl.fma(found[i], -scale, magnitudes[i])  # the product is exact
            error = error * error
            if importance is not None:
                error = error * importance[i]
            terms = terms + (error,)
        error = halving_sum(terms, BLOCK)
        better = alive & (error <= best_error)
        best_error = tl.where(better, error, best_error)
        best_byte = tl.where(better, byte, best_byte)
        byte -= 1
        top = 6 * unit_scale(byte, offset, factor, E8M0)[0]
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
    return best_byte, best_error


@triton.jit
def search_factor(
    magnitudes,
    importance,
    seen,
    amax,
    offset,
    alive,
    BLOCK: tl.constexpr,
    DIVIDE: tl.constexpr,
    FACTOR_STEP: tl.constexpr,
):
    """The best of the macro factors m = 0, FACTOR_STEP .. for each four blocks, int32 `[n/4]`; on a tie the smallest.

    Twin: `macro_block.search`. Arguments as of `search`, and `seen` bool `[n]`: the blocks that channel weights see.
    """
    quads: tl.constexpr = amax.shape[0] // 4
    counts = (seen.to(tl.int32) | (1 - by_four(tl.max(seen.to(tl.int32).reshape(quads, 4), 1)))) > 0
    largest = by_four(tl.max(tl.where(counts, offset, -126).reshape(quads, 4), 1))
    share = power_of_two(2 * tl.minimum(tl.maximum(offset - largest, -63), 0))
    share = tl.where(counts, share, 0.0)
    best, least = tl.zeros([quads], tl.int32), tl.full([quads], float("inf"), tl.float32)
    for m in range(0, 256, FACTOR_STEP):
        factor = tl.full(amax.shape, 1.0, tl.float32) + m * 2.0**-8
        error = search(magnitudes, importance, amax, offset, factor, alive, True, BLOCK, DIVIDE)[1] * share
        even, odd = error.reshape(quads, 2, 2).split()
        total = halving_sum(even.split() + odd.split(), 4)
        best = tl.where(total < least, m, best)
        least = tl.minimum(total, least)
    return best


@triton.jit
def by_four(values):
    """Each of `[n]` four times, `[4 n]`."""
    return values[:, None].broadcast_to(values.shape[0], 4).reshape(values.shape[0] * 4)


@triton.jit(do_not_specialize=["blocks", "rows_per_matrix"])
def quantize_kernel(
    weight,
    global_scale,
    channel_weights,
    words,
    scale,
    macro,
    blocks,
    blocks_per_row,
    rows_per_matrix,
    stride_weight,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_BYTE: tl.constexpr,
    DIVIDE: tl.constexpr,
    FACTOR_STEP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program i quantizes blocks `i * TILE ..` of all rows `[R, K]`.

    `weight` points at rows of `stride_weight` elements, `global_scale` at a power of two for each matrix; `words`
    int32 `[R, K/8]`, `scale` uint8 `[R, K/B]`, `macro` uint8 `[R, ceil(K/128)]` or `None`. With `macro`, blocks are
    counted as if rows had whole macro-blocks.
    """
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    per_row = blocks_per_row if macro is None else tl.cdiv(blocks_per_row, 4) * 4
    row, place = block // per_row, block % per_row
    mask = (block < blocks) & (place < blocks_per_row)
    inner, column = tl.arange(0, BLOCK)[None, :], place * BLOCK
    start = row.to(tl.int64) * stride_weight + column
    values = places(tl.load(weight + start[:, None] + inner, mask=mask[:, None], other=0.0).to(tl.float32), BLOCK)
    magnitudes = ()
    amax = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(BLOCK):
        magnitude = tl.abs(values[i])
        magnitudes = magnitudes + (tl.where(magnitude < 2.0**-120, 0.0, magnitude),)
        amax = tl.maximum(amax, magnitudes[i])
    alive = amax > 0
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
    seen = alive
    if channel_weights is not None:
        given = tl.load(channel_weights + column[:, None] + inner, mask=mask[:, None], other=0.0)
        given = places(given, BLOCK)
        seen = tl.zeros([TILE], tl.int1)
        for i in tl.static_range(BLOCK):
            seen = seen | (given[i] * in_units[i] != 0)
        importance = ()
        for i in tl.static_range(BLOCK):
            importance = importance + (tl.where(seen, given[i], 1.0),)
    amax *= unit
    factor = macro
    if macro is not None:
        m = search_factor(in_units, importance, seen, amax, offset, alive, BLOCK, DIVIDE, FACTOR_STEP)
        quad = tl.program_id(0) * (TILE // 4) + tl.arange(0, TILE // 4)
        tl.store(macro + quad, m.to(tl.uint8), mask=quad < blocks // 4)
        factor = 1 + by_four(m).to(tl.float32) * 2.0**-8
    byte = search(in_units, importance, amax, offset, factor, alive, E8M0, BLOCK, DIVIDE)[0]
    byte = tl.where(alive, byte, ZERO_BYTE)
    target = row.to(tl.int64) * blocks_per_row + place
    tl.store(scale + target, byte.to(tl.uint8), mask=mask)
    if E8M0:
        scaled = ()
        for i in tl.static_range(BLOCK):
            scaled = scaled + (tl.minimum(magnitudes[i] * power_of_two(127 - byte), 16.0),)  # finite, and still over 6
        if factor is None:
            found = nearest(scaled, None, 1.0, BLOCK, DIVIDE)
        else:
            found = nearest(scaled, factor, tl.math.div_rn(1.0, factor), BLOCK, DIVIDE)
    else:
        divisor, reciprocal = unit_scale(byte, 0, None, E8M0)
        found = nearest(in_units, divisor, reciprocal, BLOCK, DIVIDE)
    for j in tl.static_range(BLOCK // 8):
        word = tl.zeros([TILE], tl.uint32)
        for i in tl.static_range(8):
            code = (found[8 * j + i] * 2.0**-126).to(tl.uint32, bitcast=True) >> 22
            sign = (values[8 * j + i].to(tl.uint32, bitcast=True) >> 28) & 8
            word |= (code | sign) << (4 * i)
        tl.store(words + target * (BLOCK // 8) + j, word.to(tl.int32, bitcast=True), mask=mask)


def quantize(
    weight: torch.Tensor,
    fmt: BlockFormat,
    global_scale: torch.Tensor | None,
    channel_weights: torch.Tensor | None = None,
    macro_block: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Search and encode a stack of matrices `[E, N, K]`, finite float32, bfloat16 or float16.

    `global_scale` float32 `[E]`, powers of two, for formats that have one; `channel_weights` float32 `[K]`, >= 0;
    `macro_block` searches macro factors too, for formats with power-of-two scales.

    Returns:
        packed uint8 `[E, N, K/2]`, scale bytes uint8 `[E, N, K/B]`, and macro uint8 `[E, N, ceil(K/128)]` or `None`.
    """
    *lead, k = weight.shape
    rows = weight.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    packed = torch.empty((*lead, k // 8), dtype=torch.int32, device=weight.device)
    scale = torch.empty((*lead, k // fmt.block_size), dtype=torch.uint8, device=weight.device)
    macro, blocks = None, scale.numel()
    if macro_block:
        macro = torch.empty((*lead, triton.cdiv(k, MACRO_BLOCK)), dtype=torch.uint8, device=weight.device)
        blocks = macro.numel() * 4
    launch = constants(fmt, bool(torch.version.hip)) | OPTIONS
    if blocks:
        with torch.cuda.device_of(weight):
            quantize_kernel[(triton.cdiv(blocks, launch["TILE"]),)](
                rows,
                None if global_scale is None else global_scale.contiguous(),
                None if channel_weights is None else channel_weights.contiguous(),
                packed,
                scale,
                macro,
                blocks,
                k // fmt.block_size,
                weight.shape[-2],
                rows.stride(0),
                **launch,
            )
    return packed.view(torch.uint8), scale, macro


def constants(fmt: BlockFormat, hip: bool) -> dict:
    """The compile-time arguments: a block for each thread of a warp."""
    return {
        "E8M0": not fmt.has_global_scale,
        "BLOCK": fmt.block_size,
        "ZERO_BYTE": fmt.zero_byte,
        "DIVIDE": INTERPRET,
        "FACTOR_STEP": FACTOR_STEP,
        "TILE": 1024 if INTERPRET else 64 if hip else 32,
    }
