# SPDX-License-Identifier: Apache-2.0
"""W4A16 matrix product with the weight decoded tile by tile: the gradient of a linear layer with respect to its input.

One matrix or a stack of experts, as in kernels/gemm.py. Twin: `reference.dequantize` and a product. Dtypes as there;
the sum runs across macro-blocks here, so a weight with its macro factor is the exact sum of two bfloat16 numbers.
What outliers add is summed up first (kernels/outliers.py).
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.kernels import outliers
from hf_mxfp4.kernels.decode import (
    INTERPRET,
    add_product,
    dense_rows,
    find_rows,
    load_addend,
    load_weights,
    slots_of,
    two_terms,
)


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
    """A tile `[TILE_M, TILE_K]` of `out = x @ W + addend.T`; x `[tokens, N]` is the gradient that came in, out
    `[tokens, K]`, addend float32 `[K, tokens]` or `None`."""
    expert, row, end = find_rows(tl.program_id(0), offsets, tokens, experts, TILE_M, EXPERTS)
    if row >= end:
        return
    rows = row + tl.arange(0, TILE_M).to(tl.int64)
    first = tl.program_id(1) * TILE_K
    inner = tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_K), tl.float32)
    low_total = total  # of its own: two products in a row into one cost a change of its layout on Hopper
    for n in range(0, N, TILE_N):
        mask = (rows < end)[:, None] & (n + inner < N)[None, :]
        part = tl.load(x + rows[:, None] * stride_x + (n + inner)[None, :], mask=mask, other=0.0)
        weight_rows = n + inner + tl.cast(expert, tl.int64) * N
        weights = load_weights(
            packed,
            scale,
            macro,
            weight_rows,
            n + inner < N,
            first,
            K,
            stride_packed,
            stride_scale,
            E8M0,
            BLOCK,
            TILE_K,
            EVEN_K,
        )
        if macro is not None and DOT != tl.float32:
            weights, low = two_terms(weights)
            low_total = add_product(part, low.to(DOT), low_total, SPLIT)
        total = add_product(part, weights.to(DOT), total, SPLIT)
    if macro is not None:
        total += low_total
    if global_scale is not None:
        total = total * tl.load(global_scale + expert)
    columns = first + tl.arange(0, TILE_K)
    if addend is not None:
        total = total + load_addend(addend, row, end, first, K, tokens, TILE_M, TILE_K)
    mask = (rows < end)[:, None] & (columns < K)[None, :]
    tl.store(out + rows[:, None] * K + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


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
    k, n, warps, stages = tiles[rows]
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


def linear_grad(x, weight: QuantizedTensor, offsets=None) -> torch.Tensor:
    """`x [tokens, N] @ W` in `x.dtype`: the gradient of `gemm.linear` with respect to its x.

    Arguments as there; x is the gradient that came in.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    packed, scale, global_scale, macro = dense_rows(weight)
    tokens, (n, k) = x.shape[0], weight.shape[-2:]
    if weight.outliers is not None and offsets is None and tokens > outliers.TOKENS:
        return torch.cat([linear_grad(part, weight) for part in x.split(outliers.TOKENS)])
    experts = weight.shape[0] if offsets is not None else 1
    # Rows of no expert are not visited.
    allocate = torch.empty if offsets is None else torch.zeros
    out = allocate((tokens, k), dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    if out.numel():
        options = tile(x.dtype, tokens, experts, macro is not None)
        slots = slots_of(tokens, offsets, options["TILE_M"])
        with torch.cuda.device_of(x):
            addend = weight.outliers and outliers.outlier_product(x, weight, offsets, True, options["TILE_M"])
            linear_grad_kernel[slots, triton.cdiv(k, options["TILE_K"])](
                x,
                packed,
                scale,
                global_scale,
                macro,
                addend,
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
