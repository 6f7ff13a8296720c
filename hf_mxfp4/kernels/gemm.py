# SPDX-License-Identifier: Apache-2.0
"""W4A16 matrix product with the weight decoded tile by tile: a linear layer.

It works on one matrix or on a stack of experts, whose tokens stand sorted by expert. Twin: `reference.linear`.

The sum over k is `permuted.accumulate`: every weight enters as its exact value, the sums are float32. Macro factors
multiply the product of each step along K, the tensor scale the sum; what outliers add is summed up first
(kernels/outliers.py). For few tokens the sum over k is cut into parts, so that all of the GPU reads weights.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.kernels import outliers, permuted
from hf_mxfp4.kernels.decode import INTERPRET, dense_rows, find_rows, slots_of
from hf_mxfp4.kernels.launch import launch
from hf_mxfp4.kernels.permuted import accumulate, reduce_splits, split_range
from hf_mxfp4.kernels.scratch import split_scratch


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x,
    packed,
    scale,
    global_scale,
    macro,
    addend,
    bias,
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
    ORDER: tl.constexpr,
    DOT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A tile `[TILE_M, TILE_N]` of `out = x @ W.T + addend.T + bias`; x `[tokens, K]`, W `[experts, N, K]`, out
    `[tokens, N]`, addend float32 `[N, tokens]` or `None`. SPLITS programs share a tile."""
    slot, split = tl.program_id(0), tl.program_id(2)
    expert, row, end = find_rows(slot, offsets, tokens, experts, TILE_M, EXPERTS)
    if row >= end:
        return
    rows = row + tl.arange(0, TILE_M).to(tl.int64)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    begin, stop = split_range(split, SPLITS, K, TILE_K)
    total = accumulate(
        x,
        rows,
        rows < end,
        packed,
        scale,
        macro,
        tl.minimum(columns, N - 1) + tl.cast(expert, tl.int64) * N,
        None,
        begin,
        stop,
        K,
        stride_x,
        stride_packed,
        stride_scale,
        E8M0,
        BLOCK,
        ASM,
        ORDER,
        DOT,
        EVEN_K,
        TILE_M,
        TILE_N,
        TILE_K,
    )
    number = slot * tl.num_programs(1) + tl.program_id(1)
    total, last = reduce_splits(total, workspace, counters, number, split, SPLITS, ASM, rows < end)
    if last:
        mask = (columns < N)[:, None] & (rows < end)[None, :]
        if global_scale is not None:
            total *= tl.load(global_scale + expert)
        if addend is not None:
            places = columns.to(tl.int64)[:, None] * tokens + rows[None, :]
            total += tl.load(addend + places, mask=mask, other=0.0)
        if bias is not None:
            bias += tl.cast(expert, tl.int64) * N
            total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + rows[None, :] * N + columns[:, None], total.to(out.dtype.element_ty), mask=mask)


# Rows of x in a tile: outputs in a tile, length of a step along the sum, warps, stages. The first row with enough room
# is taken. Chosen by instructions per weight, registers and shared memory (scripts/results/kernels_static.md), not by
# time; `hf-mxfp4 tune` measures. Hopper's tensor cores take 4 warps and 64 outputs at least.
TILES = {16: (128, 128, 4, 4), 32: (128, 128, 4, 3), 64: (128, 128, 4, 3)}
# Elsewhere warps share out a tile of 64 tokens both ways, and each decodes what its neighbour decodes too.
TILES_ELSEWHERE = {16: (128, 128, 4, 3), 32: (128, 128, 4, 2)}
TILES_CDNA = {16: (64, 128, 4, 2), 64: (64, 128, 4, 2)}
TILES_RDNA = {16: (64, 128, 4, 2)}
# No tensor cores: the accumulator and both operands live in registers.
TILES_FLOAT32, TILES_FLOAT32_RDNA = {16: (32, 128, 4, 1)}, {16: (16, 128, 4, 1)}
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@functools.lru_cache(maxsize=1 << 12)
def tile(
    dtype: torch.dtype,
    tokens: int,
    n: int,
    k: int,
    experts: int = 1,
    macro: bool = False,
    device: permuted.Target = permuted.HOPPER,
) -> dict[str, int]:
    """Tile sizes and launch options; with experts, `tokens` are those of all. A heuristic, not tuned."""
    rdna = device.backend == "hip" and not device.arch.startswith("gfx9")
    if dtype == torch.float32:
        tiles = TILES_FLOAT32_RDNA if rdna else TILES_FLOAT32
    elif device.backend == "hip":
        tiles = TILES_RDNA if rdna else TILES_CDNA
    else:
        tiles = TILES if device.order == 3 else TILES_ELSEWHERE
    rows = next((rows for rows in tiles if rows * experts >= tokens), max(tiles))
    width, step, warps, stages = tiles[rows]
    options = {"TILE_M": rows, "TILE_N": width, "TILE_K": step, "num_warps": warps, "num_stages": stages}
    return options | {"SPLITS": splits(tokens, n, k, experts, options, device.processors)}


def splits(tokens: int, n: int, k: int, experts: int, options: dict[str, int], processors: int) -> int:
    """Parts of the sum over k: two programs for each processor, as long as each has two steps.

    One if tiles are large, whose parts are soon as many bytes as the weight itself.
    """
    if experts > 1:
        return 1
    programs = triton.cdiv(tokens, options["TILE_M"]) * triton.cdiv(n, options["TILE_N"])
    each = 1.9 if options["TILE_M"] <= 32 else 0.95  # 5 % short of two, or one, is near enough
    wanted = each * processors / max(1, programs)
    most = min(next((s for s in SPLITS if s >= wanted), SPLITS[-1]), triton.cdiv(k, options["TILE_K"]) // 2)
    return max((s for s in SPLITS if s <= most), default=1)


def candidates(
    dtype: torch.dtype,
    tokens: int,
    n: int,
    k: int,
    experts: int = 1,
    macro: bool = False,
    device: permuted.Target | None = None,
) -> list[dict[str, int]]:
    """Launch options worth measuring for a product on a device (the current one), the heuristic's first."""
    device = device or permuted.target_of(torch.device("cuda", torch.cuda.current_device()))
    first = tile(dtype, tokens, n, k, experts, macro, device)
    if dtype == torch.float32:
        return [first]
    rows = [m for m in (16, 32, 64, 128) if m < 2 * max(16, triton.cdiv(tokens, experts))]
    shapes = [(m, width, 128, 4) for m in rows[-2:] for width in (64, 128)]
    shapes += [(m, 256, 128, 8) for m in rows[-2:]] + [(m, 64, 256, 4) for m in rows[-2:] if m <= 32 and not macro]
    found = [first]
    for m, width, step, warps in shapes:
        for stages in (3, 4) if device.backend == "cuda" else (2,):
            base = {"TILE_M": m, "TILE_N": width, "TILE_K": step, "num_warps": warps, "num_stages": stages}
            parts = splits(tokens, n, k, experts, base, device.processors)
            for part in {1, parts, max((s for s in SPLITS if s <= parts // 2), default=1)}:
                found.append(base | {"SPLITS": part})
    if device.backend == "cuda" and rows[-1] <= 64:  # 4 (or 3) programs a processor by their registers
        found += [first | {"maxnreg": registers} for registers in (128, 168)]
    return [options for i, options in enumerate(found) if options not in found[:i]]


def constants(x_dtype: torch.dtype, weight: QuantizedTensor, tile_k: int, experts: int) -> dict:
    """The compile-time arguments but for the tile sizes and the target."""
    e8m0 = weight.format.scale_dtype == torch.uint8
    found = permuted.constants(x_dtype, weight.format.block_size, e8m0, 2 * weight.packed.shape[-1], tile_k)
    return found | {"EXPERTS": 1 << (experts - 1).bit_length()}  # triton's next_power_of_2 takes 5 us


def linear(x, weight: QuantizedTensor, bias=None, offsets=None, options: dict[str, int] | None = None) -> torch.Tensor:
    """`x [tokens, K] @ W.T + bias` in `x.dtype` (float32, bfloat16, float16), accumulated in float32.

    With `offsets` (int32 `[E+1]`), `weight` and `bias` are stacks and rows `offsets[e] .. offsets[e+1]` of x meet
    expert e; rows of no expert come out as zeros. The host does not wait for the values of `offsets`. `options`, of
    those of `candidates`, replace the heuristic's.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    packed, scale, global_scale, macro = dense_rows(weight)
    tokens, (*_, n, byte) = x.shape[0], weight.packed.shape
    k = 2 * byte
    if weight.outliers is not None and offsets is None and tokens > outliers.TOKENS:
        return torch.cat([linear(part, weight, bias, None, options) for part in x.split(outliers.TOKENS)])
    experts = weight.packed.shape[0] if offsets is not None else 1
    # Rows of no expert are not visited.
    allocate = torch.empty if offsets is None else torch.zeros
    out = allocate((tokens, n), dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    if out.numel():
        device = permuted.target_of(x.device)
        options = {**(options or tile(x.dtype, tokens, n, k, experts, macro is not None, device))}
        packed = permuted.words_aligned(packed)
        grid = slots_of(tokens, offsets, options["TILE_M"]), -(-n // options["TILE_N"]), options["SPLITS"]
        with torch.cuda.device_of(x):
            workspace = counters = None
            if options["SPLITS"] > 1:
                elements = math.prod(grid) * options["TILE_M"] * options["TILE_N"]
                workspace, counters = split_scratch(x.device, grid[0] * grid[1], elements)
            addend = weight.outliers and outliers.outlier_product(x, weight, offsets, False, options["TILE_M"])
            arguments = (
                x,
                packed,
                scale,
                global_scale,
                macro,
                addend,
                None if bias is None else bias.contiguous(),
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
            compiled_in = constants(x.dtype, weight, options["TILE_K"], experts) | permuted.target(device)
            launch(linear_kernel, grid, arguments, compiled_in | options)
    return out.to(x.dtype)
