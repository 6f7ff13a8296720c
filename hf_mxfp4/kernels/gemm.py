# SPDX-License-Identifier: Apache-2.0
"""W4A16 matrix product with the weight decoded tile by tile: a linear layer.

It works on one matrix or on a stack of experts, whose tokens stand sorted by expert. Twin: `reference.linear`.

A tile of weights enters the product as `E2M1 * scale`, which is exact in float32 and bfloat16, and in float16 for E4M3
scales; the tensor scale multiplies the float32 accumulator. E8M0 scales exceed float16, so float16 activations meet
them as the exact sum of two bfloat16 numbers, in two products. Macro factors need float32: they multiply the
product of each step along K, in the accumulator. What outliers add is summed up first (kernels/outliers.py).
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.kernels import outliers
from hf_mxfp4.kernels.decode import (
    INTERPRET,
    MACRO,
    add_product,
    dense_rows,
    find_rows,
    load_addend,
    load_factors,
    load_weights,
    slots_of,
)


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
    tokens,
    N,
    K,
    experts,
    stride_x,
    stride_packed,
    stride_scale,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A tile `[TILE_M, TILE_N]` of `out = x @ W.T + addend.T + bias`; x `[tokens, K]`, W `[experts, N, K]`, out
    `[tokens, N]`, addend float32 `[N, tokens]` or `None`."""
    tl.static_assert(macro is None or MACRO % TILE_K == 0, "a step along K must not leave its macro-block")
    expert, row, end = find_rows(tl.program_id(0), offsets, tokens, experts, TILE_M, EXPERTS)
    if row >= end:
        return
    rows = row + tl.arange(0, TILE_M).to(tl.int64)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    weight_rows = columns + tl.cast(expert, tl.int64) * N
    if macro is not None:
        macro += tl.cast(expert, tl.int64) * N * tl.cdiv(K, MACRO)  # offsets of 32 bits in the loop: fewer registers
    inner = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        mask = (rows < end)[:, None]
        if not EVEN_K:
            mask = mask & (k + inner < K)[None, :]
        part = tl.load(x + rows[:, None] * stride_x + (k + inner)[None, :], mask=mask, other=0.0)
        weights = load_weights(
            packed,
            scale,
            None,
            weight_rows,
            columns < N,
            k,
            K,
            stride_packed,
            stride_scale,
            E8M0,
            BLOCK,
            TILE_K,
            EVEN_K,
        )
        weights = weights.to(DOT).trans()
        if macro is None:
            total = add_product(part, weights, total, SPLIT)
        else:
            product = add_product(part, weights, tl.zeros((TILE_M, TILE_N), tl.float32), SPLIT)
            total += product * load_factors(macro, columns, k, K, columns < N)[None, :]
    if global_scale is not None:
        total = total * tl.load(global_scale + expert)
    if addend is not None:
        total = total + load_addend(addend, row, end, tl.program_id(1) * TILE_N, N, tokens, TILE_M, TILE_N)
    if bias is not None:
        total = total + tl.load(bias + weight_rows, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


# Rows of x in a tile: outputs in a tile, length of a step along the sum, warps, stages. The first row with enough room
# is taken. Chosen without a GPU, by registers and shared memory on all targets (tests/test_kernel_compile.py); few
# outputs in the smallest tile leave more programs for a single token. float32 has no tensor cores: there the
# accumulator and both operands live in registers.
TILES = {16: (32, 128, 4, 3), 32: (64, 128, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3)}
# With macro factors there is a second accumulator, or a weight has two terms.
TILES_MACRO = {16: (32, 128, 4, 3), 32: (64, 64, 4, 3), 64: (32, 64, 4, 3), 128: (64, 64, 8, 3)}
TILES_FLOAT32 = {16: (64, 32, 4, 1), 64: (64, 32, 4, 1)}


def tile(dtype: torch.dtype, tokens: int, experts: int = 1, macro: bool = False) -> dict[str, int]:
    """Tile sizes and launch options for the tokens a matrix gets, the mean for experts. A heuristic, not tuned."""
    tiles = TILES_FLOAT32 if dtype == torch.float32 else TILES_MACRO if macro else TILES
    rows = next((rows for rows in tiles if rows * experts >= tokens), max(tiles))
    n, k, warps, stages = tiles[rows]
    return {"TILE_M": rows, "TILE_N": n, "TILE_K": k, "num_warps": warps, "num_stages": stages}


def constants(x_dtype: torch.dtype, weight: QuantizedTensor, tile_k: int, experts: int) -> dict:
    """The compile-time arguments but for the tile sizes."""
    e8m0 = weight.format.scale_dtype == torch.uint8
    split = x_dtype == torch.float16 and e8m0 and not INTERPRET
    dot = torch.float32 if INTERPRET else torch.bfloat16 if split else x_dtype
    return {
        "E8M0": e8m0,
        "BLOCK": weight.format.block_size,
        "DOT": getattr(tl, str(dot).removeprefix("torch.")),
        "SPLIT": split,
        "EXPERTS": triton.next_power_of_2(experts),
        "EVEN_K": weight.shape[-1] % tile_k == 0,
    }


def linear(x, weight: QuantizedTensor, bias=None, offsets=None) -> torch.Tensor:
    """`x [tokens, K] @ W.T + bias` in `x.dtype` (float32, bfloat16, float16), accumulated in float32.

    With `offsets` (int32 `[E+1]`), `weight` and `bias` are stacks and rows `offsets[e] .. offsets[e+1]` of x meet
    expert e; rows of no expert come out as zeros. The host does not wait for the values of `offsets`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    packed, scale, global_scale, macro = dense_rows(weight)
    tokens, (n, k) = x.shape[0], weight.shape[-2:]
    if weight.outliers is not None and offsets is None and tokens > outliers.TOKENS:
        return torch.cat([linear(part, weight, bias) for part in x.split(outliers.TOKENS)])
    experts = weight.shape[0] if offsets is not None else 1
    # Rows of no expert are not visited.
    allocate = torch.empty if offsets is None else torch.zeros
    out = allocate((tokens, n), dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    if out.numel():
        options = tile(x.dtype, tokens, experts, macro is not None)
        slots = slots_of(tokens, offsets, options["TILE_M"])
        with torch.cuda.device_of(x):
            addend = weight.outliers and outliers.outlier_product(x, weight, offsets, False, options["TILE_M"])
            linear_kernel[slots, triton.cdiv(n, options["TILE_N"])](
                x,
                packed,
                scale,
                global_scale,
                macro,
                addend,
                None if bias is None else bias.contiguous(),
                None if offsets is None else offsets.contiguous(),
                out,
                tokens,
                n,
                k,
                experts,
                x.stride(0),
                packed.stride(0),
                scale.stride(0),
                **constants(x.dtype, weight, options["TILE_K"], experts),
                **options,
            )
    return out.to(x.dtype)
