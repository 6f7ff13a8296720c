# SPDX-License-Identifier: Apache-2.0
"""W4A16 matrix product with the weight decoded tile by tile: the gradient of a linear layer with respect to its input.

One matrix or a stack of experts, as in kernels/gemm.py. Twin: `reference.dequantize` and a product. What outliers add
is summed up first (kernels/outliers.py).

As in kernels/permuted.py the weight is the left operand, decoded in registers from the bytes as they are stored, times
a power of two that is undone in the sum. Here the sum runs over the weight's rows, so a register holds the same nibble
of two rows next to each other, and it is the outputs whose order follows from where the nibbles are. It is undone
once, when they are stored.

Macro factors change along the sum too. `1 + m/256` is `1 + h/16` plus `l/256`, h and l the halves of m's byte, and a
weight times either is exact in bfloat16: two products of the same decoded values. (A weight in float32 needs none.)
"""

import functools
import itertools

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import BlockFormat, QuantizedTensor
from hf_mxfp4.kernels import outliers, permuted
from hf_mxfp4.kernels.decode import (
    INTERPRET,
    MACRO,
    dense_rows,
    find_rows,
    fold_words,
    load_addend,
    load_factors,
    load_weights,
    macro_scales,
    nibbles,
    slots_of,
    two_terms,
)
from hf_mxfp4.kernels.launch import launch
from hf_mxfp4.kernels.permuted import (
    add_product,
    fold_scales,
    narrow,
    reduce_splits,
    split_range,
)
from hf_mxfp4.kernels.scratch import split_scratch

COLUMNS = tl.constexpr(64)  # of a tile for each warp: 8 rows of a tensor core's operand, 2 bytes twice for each
# Rows of the weight at once where a sum was not finite. Triton gives each of 4 lanes 8 in a row where nibbles of bytes
# become mma.sync's operand: with fewer than 32 it takes wrong ones, without a word (3.7.1; tests/test_ptx.py).
SLOW = tl.constexpr(32)


@triton.jit
def turned(weights, ROWS: tl.constexpr, TILE_K: tl.constexpr):
    """Weights `[ROWS, TILE_K]`, whatever the shape, as `[TILE_K, ROWS]` in the order that `straight` undoes."""
    weights = weights.reshape(ROWS, TILE_K // COLUMNS, 8, 2, 2, 2)  # row, warp, lane, half, phi, plo
    return weights.trans(3, 4, 1, 5, 2, 0).reshape(TILE_K, ROWS)


@triton.jit
def straight(total, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """`[TILE_K, TILE_M]` in the order of `turned` as `[TILE_M, TILE_K]` in that of memory."""
    total = total.reshape(2, 2, TILE_K // COLUMNS, 2, 8, TILE_M)
    return total.trans(5, 2, 4, 0, 1, 3).reshape(TILE_M, TILE_K)


@triton.jit
def scaled(values, scales, DOT: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr):
    """4 tensors `[TILE_N, TILE_K/4]` of values times scales `[TILE_N, TILE_K/BLOCK]`, `turned`; of DOT."""
    scales = tl.broadcast_to(scales[:, :, None], (TILE_N, TILE_K // BLOCK, BLOCK // 4)).reshape(TILE_N, TILE_K // 4)
    phi0 = tl.join(narrow(values[0] * scales, DOT), narrow(values[2] * scales, DOT))
    phi1 = tl.join(narrow(values[1] * scales, DOT), narrow(values[3] * scales, DOT))
    return turned(tl.join(phi0, phi1), TILE_N, TILE_K)


@triton.jit
def multiply(weights, x, total, SPLIT: tl.constexpr):
    """`total + weights @ x.T`, accumulated in float32; with SPLIT, float16 x as two exact bfloat16 terms."""
    if SPLIT:
        high, low = two_terms(x.to(tl.float32))
        total = add_product(weights, low.to(tl.bfloat16), total)
        return add_product(weights, high.to(tl.bfloat16), total)
    return add_product(weights, x, total)


@triton.jit(do_not_specialize=["tokens"])
def linear_grad_kernel(
    x,
    packed,
    scale,
    global_scale,
    macro,
    addend,
    offsets,
    out,
    workspace,
    counters,
    tokens,
    N,
    K,
    experts,
    stride_x,
    stride_packed,
    stride_scale,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A tile `[TILE_M, TILE_K]` of `out = x @ W + addend.T`; x `[tokens, N]` is the gradient that came in, out
    `[tokens, K]`, addend float32 `[K, tokens]` or `None`."""
    PLACED: tl.constexpr = ASM and DOT != tl.float32 and macro is None
    expert, row, end = find_rows(tl.program_id(0), offsets, tokens, experts, TILE_M, EXPERTS)
    if row >= end:
        return
    rows = row + tl.arange(0, TILE_M).to(tl.int64)
    tile_k, split = tl.program_id(1), tl.program_id(2)
    begin, stop = split_range(split, SPLITS, N, TILE_N)
    inner, code_columns = tl.arange(0, TILE_N), tile_k * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
    blocks = tile_k * (TILE_K // BLOCK) + tl.arange(0, TILE_K // BLOCK)
    # Scalars of 64 bits go along the sum, and offsets of 32 bits stay in their places: fewer registers.
    first_row = tl.cast(expert, tl.int64) * N + begin
    codes = (packed + first_row * stride_packed).to(tl.pointer_type(tl.uint16))
    code_offsets = inner[:, None] * (stride_packed // 2) + code_columns[None, :]
    scales_at = scale + first_row * stride_scale
    if WIDE:
        # Bytes are not loaded ahead, words are. Which byte of a word: `other` and no constant, since the compiler
        # takes a decoded operand to registers only where everything it is made of was loaded.
        byte = tl.arange(0, 4) + (0x4440 if PLACED else 0)
        byte = tl.load(scale.to(tl.pointer_type(tl.int32)) + byte, mask=byte + N < 0, other=byte)[None, None, :]
        words = tile_k * (TILE_K // BLOCK // 4) + tl.arange(0, TILE_K // BLOCK // 4)
        scale_offsets = inner[:, None] * (stride_scale // 4) + words[None, :]
        word_mask = (words * 4 * BLOCK < K)[None, :]
    else:
        scale_offsets = inner[:, None] * stride_scale + blocks[None, :]
    x_at = x + rows[:, None] * stride_x + inner[None, :]
    total = tl.zeros((TILE_K, TILE_M), tl.float32)
    for n in range(begin, stop, TILE_N):
        mask = (n + inner < N)[:, None]
        part = tl.load(x_at + n, mask=(rows < end)[:, None] & (n + inner < N)[None, :], other=0.0)
        code_mask = mask if EVEN_K else mask & (code_columns * 4 < K)[None, :]
        code = tl.load(codes + code_offsets, mask=code_mask, other=0)
        block_mask = mask if EVEN_K else mask & (blocks * BLOCK < K)[None, :]
        if WIDE:
            wide_mask = mask if EVEN_K else mask & word_mask
            word = tl.load(scales_at.to(tl.pointer_type(tl.uint32)) + scale_offsets, mask=wide_mask, other=0)
            word = word[:, :, None]
            if PLACED:
                scales = fold_words(word, byte, E8M0, DOT).reshape(TILE_N, TILE_K // BLOCK)
            else:
                scales = ((word >> (8 * byte)) & 0xFF).to(tl.uint8).reshape(TILE_N, TILE_K // BLOCK)
        else:
            scales = tl.load(scales_at + scale_offsets, mask=block_mask, other=0)
        values = nibbles(code, ASM, DOT)
        if macro is None:
            if not (WIDE and PLACED):
                scales = fold_scales(scales, E8M0, ASM, DOT)
            total = multiply(scaled(values, scales, DOT, TILE_N, TILE_K, BLOCK), part, total, SPLIT)
        else:
            weight_rows = tl.cast(expert, tl.int64) * N + n + inner
            if DOT == tl.float32:
                factors = load_factors(macro, weight_rows[:, None], blocks[None, :] * BLOCK, K, block_mask)
                high = fold_scales(scales, E8M0, ASM, DOT) * factors
            else:
                at = weight_rows[:, None] * tl.cdiv(K, MACRO) + (blocks * BLOCK // MACRO)[None, :]
                high, low = macro_scales(scales, tl.load(macro + at, mask=block_mask, other=0))
                if ASM:
                    high, low = high.to(DOT), low.to(DOT)
            if DOT != tl.float32:
                total = multiply(scaled(values, low, DOT, TILE_N, TILE_K, BLOCK), part, total, SPLIT)
            total = multiply(scaled(values, high, DOT, TILE_N, TILE_K, BLOCK), part, total, SPLIT)
        codes += tl.cast(stride_packed // 2, tl.int64) * TILE_N
        scales_at += tl.cast(stride_scale, tl.int64) * TILE_N
    if DOT != tl.float32:
        UNDO: tl.constexpr = 2.0**7 if not E8M0 else 2.0**5 if macro is None else 1.0
        total *= UNDO
        if tl.max((total - total != 0).to(tl.int32)) > 0:  # infinite or NaN
            total = tl.zeros((TILE_K, TILE_M), tl.float32)
            few = tl.arange(0, SLOW)
            for n in tl.range(begin, stop, SLOW, num_stages=1):
                mask = n + few < N
                part = tl.load(
                    x + rows[:, None] * stride_x + (n + few)[None, :],
                    mask=(rows < end)[:, None] & mask[None, :],
                    other=0.0,
                )
                weights = load_weights(
                    packed,
                    scale,
                    macro,
                    tl.cast(expert, tl.int64) * N + n + few,
                    mask,
                    tile_k * TILE_K,
                    K,
                    stride_packed,
                    stride_scale,
                    E8M0,
                    BLOCK,
                    TILE_K,
                    EVEN_K,
                )
                weights = turned(weights, SLOW, TILE_K)
                if macro is not None:
                    weights, low = two_terms(weights)
                    total = multiply(low.to(DOT), part, total, SPLIT)
                total = multiply(weights.to(DOT), part, total, SPLIT)
    tile = tile_k * tl.num_programs(0) + tl.program_id(0)
    total, last = reduce_splits(total, workspace, counters, tile, split, SPLITS, ASM, rows < end)
    if last:
        first = tile_k * TILE_K
        result = straight(total, TILE_M, TILE_K)
        if global_scale is not None:
            result *= tl.load(global_scale + expert)
        if addend is not None:
            result += load_addend(addend, row, end, first, K, tokens, TILE_M, TILE_K)
        columns = first + tl.arange(0, TILE_K)
        mask = (rows < end)[:, None] & (columns < K)[None, :]
        tl.store(out + rows[:, None] * K + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


# Rows of x in a tile: outputs in a tile (64 for each warp), length of a step along the sum, warps, stages. The first
# row with enough room is taken. Chosen without a GPU, by registers and shared memory on all targets
# (tests/test_kernel_compile.py). float32 has no tensor cores: accumulator and both operands are in registers there.
TILES = {16: (256, 64, 4, 3), 32: (256, 32, 4, 3), 64: (256, 32, 4, 3)}
# With macro factors a weight has two terms, and the compiler needs more room to decode them.
TILES_MACRO = {16: (256, 32, 4, 3), 64: (128, 32, 4, 3)}
TILES_FLOAT32 = {16: (64, 32, 4, 1), 64: (64, 32, 4, 1)}
MOST_SPLITS = {16: 16, 32: 8, 64: 2}  # by rows of x in a tile: more, and its registers spill on sm_90


@functools.lru_cache(maxsize=1 << 12)
def tile(
    dtype: torch.dtype,
    tokens: int,
    n: int,
    k: int,
    experts: int = 1,
    macro: bool = False,
    target: permuted.Target = permuted.HOPPER,
) -> dict[str, int]:
    """Tile sizes, parts of the sum and launch options for `tokens` and weights `[n, k]`. A heuristic, not tuned.

    Experts get their mean of the tokens each. The sum of one matrix is cut into parts until each processor has two
    programs, of 8 steps at least.
    """
    tiles = TILES_FLOAT32 if dtype == torch.float32 else TILES_MACRO if macro else TILES
    rows = next((rows for rows in tiles if rows * experts >= tokens), max(tiles))

    def programs(rows: int) -> int:
        return triton.cdiv(tokens, rows) * triton.cdiv(k, tiles[rows][0])

    if 32 in tiles and rows == 64 and experts == 1 and programs(64) * MOST_SPLITS[64] < target.processors:
        rows = 32
    tile_k, tile_n, warps, stages = tiles[rows]
    parts = min(MOST_SPLITS[rows], 2 * target.processors // max(1, programs(rows)), n // (8 * tile_n))
    parts = 1 << max(0, parts.bit_length() - 1) if experts == 1 else 1
    options = {"TILE_M": rows, "TILE_N": tile_n, "TILE_K": tile_k, "SPLITS": parts}
    return options | {"num_warps": warps, "num_stages": stages}


def candidates(dtype, tokens: int, n: int, k: int, experts: int = 1, macro: bool = False) -> list[dict[str, int]]:
    """Options for a tuner to choose from, those of `tile` first. Not every one fits every device."""
    best = tile(dtype, tokens, n, k, experts, macro)
    found = [best]
    if dtype != torch.float32:
        for rows in sorted({best["TILE_M"], max(16, best["TILE_M"] // 2), 64 if tokens > 16 else 16}):
            shapes = ((128, 32, 4), (256, 32, 4), (256, 64, 4), (256, 128, 4), (512, 32, 8), (512, 64, 8))
            for (tile_k, tile_n, warps), stages in itertools.product(shapes, (3, 4)):
                if not macro or tile_k * rows <= 8192:
                    option = {"TILE_M": rows, "TILE_N": tile_n, "TILE_K": tile_k}
                    found.append(option | {"num_warps": warps, "num_stages": stages, "SPLITS": best["SPLITS"]})
    if experts == 1:
        parts = {max(1, best["SPLITS"] // 2), min(MOST_SPLITS[best["TILE_M"]], 2 * best["SPLITS"])}
        found += [option | {"SPLITS": s} for option in found[:6] for s in sorted(parts)]
    return [option for i, option in enumerate(found) if option not in found[:i]]


def constants(
    x_dtype: torch.dtype, fmt: BlockFormat, scale: torch.Tensor, tile_k: int, experts: int, asm: bool
) -> dict:
    """The compile-time arguments but for the tile sizes; `scale` `[R, blocks]`, `asm` whether it takes PTX."""
    blocks, e8m0 = scale.shape[-1], fmt.scale_dtype == torch.uint8
    split = x_dtype == torch.float16 and e8m0 and not INTERPRET
    dtype = torch.bfloat16 if split else x_dtype
    common = permuted.constants(dtype, fmt.block_size, e8m0, blocks * fmt.block_size, tile_k)
    wide = blocks % 4 == 0 and tile_k // fmt.block_size >= 4 and aligned(scale, 4)
    own = {"ASM": asm, "SPLIT": split, "EXPERTS": 1 << (experts - 1).bit_length(), "WIDE": wide}
    return common | own


def aligned(rows: torch.Tensor, unit: int) -> bool:
    """Whether each row (the last dimension) begins at a multiple of `unit` bytes."""
    return (rows.storage_offset() | functools.reduce(int.__or__, rows.stride()[:-1], 0)) % unit == 0


def linear_grad(x, weight: QuantizedTensor, offsets=None, options: dict[str, int] | None = None) -> torch.Tensor:
    """`x [tokens, N] @ W` in `x.dtype`: the gradient of `gemm.linear` with respect to its x.

    Arguments as there; x is the gradient that came in.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    packed, scale, global_scale, macro = dense_rows(weight)
    tokens, (*_, n, byte) = x.shape[0], weight.packed.shape
    k = 2 * byte
    if weight.outliers is not None and offsets is None and tokens > outliers.TOKENS:
        return torch.cat([linear_grad(part, weight, None, options) for part in x.split(outliers.TOKENS)])
    experts = weight.packed.shape[0] if offsets is not None else 1
    # Rows of no expert are not visited.
    allocate = torch.empty if offsets is None else torch.zeros
    out = allocate((tokens, k), dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    if out.numel() and n:
        if options is None:
            options = tile(x.dtype, tokens, n, k, experts, macro is not None, permuted.target_of(x.device))
        slots, columns = slots_of(tokens, offsets, options["TILE_M"]), -(-k // options["TILE_K"])
        packed = packed if aligned(packed, 2) else packed.clone()
        asm = permuted.target(x.device)["ASM"]
        with torch.cuda.device_of(x):
            workspace = counters = None
            if options["SPLITS"] > 1:
                size = slots * columns * options["SPLITS"] * options["TILE_M"] * options["TILE_K"]
                workspace, counters = split_scratch(x.device, slots * columns, size)
            addend = weight.outliers and outliers.outlier_product(x, weight, offsets, True, options["TILE_M"])
            arguments = (
                x,
                packed,
                scale,
                global_scale,
                macro,
                addend,
                None if offsets is None else offsets.contiguous(),
                out,
                workspace,
                counters,
                tokens,
                n,
                k,
                experts,
                x.stride(0),
                packed.stride(0),
                scale.stride(0),
            )
            compiled_in = constants(x.dtype, weight.format, scale, options["TILE_K"], experts, asm) | options
            launch(linear_grad_kernel, (slots, columns, options["SPLITS"]), arguments, compiled_in)
    return out.to(x.dtype)
