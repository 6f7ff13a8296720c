# SPDX-License-Identifier: Apache-2.0
"""Packed weights to real values. Twin: `reference.dequantize`, equal to it bit for bit."""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.kernels import permuted
from hf_mxfp4.kernels.decode import (
    INTERPRET,
    decode_e4m3,
    decode_e8m0,
    dense_rows,
    load_factors,
    load_weights,
    nibbles,
)
from hf_mxfp4.kernels.launch import launch
from hf_mxfp4.kernels.outliers import scatter

TILE = {"TILE_R": 32, "TILE_K": 256, "num_warps": 4}


@triton.jit(do_not_specialize=["R"])
def dequantize_kernel(
    packed,
    scale,
    global_scale,
    macro,
    out,
    R,
    K,
    rows_per_matrix,
    stride_packed,
    stride_scale,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Program (i, j) writes rows `i * TILE_R ..` and columns `j * TILE_K ..` of `out` `[R, K]`, rounding once.

    `global_scale` has a number for each `rows_per_matrix` rows, or (`None`) one for all. With ASM as bfloat16 pairs.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_R
    inner = tl.arange(0, TILE_R)
    rows, row_mask = row + inner, inner < tl.minimum(R - row, TILE_R).to(tl.int32)
    first = tl.program_id(1) * TILE_K
    if global_scale is not None:
        if rows_per_matrix is None:
            factor = tl.load(global_scale)
        else:
            factor = tl.load(global_scale + rows // rows_per_matrix, mask=row_mask, other=0.0)[:, None]
    if ASM:
        # 4 bytes for a thread become the 16 that it stores; with more it would store apart from its neighbours.
        columns = tl.program_id(1) * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
        columns = tl.max_contiguous(columns, 2)
        blocks = tl.program_id(1) * (TILE_K // BLOCK) + tl.arange(0, TILE_K // BLOCK)
        mask, block_mask = row_mask[:, None], row_mask[:, None]
        if not EVEN_K:
            mask = mask & (columns < K // 4)[None, :]
            block_mask = block_mask & (blocks < K // BLOCK)[None, :]
        code = (packed + row * stride_packed).to(tl.pointer_type(tl.uint16))
        code = tl.load(code + (inner[:, None] * (stride_packed // 2) + columns[None, :]), mask=mask, other=0)
        scales = scale + row * stride_scale + (inner[:, None] * stride_scale + blocks[None, :])
        scales = tl.load(scales, mask=block_mask, other=0).to(tl.uint32)
        scales = decode_e8m0(scales) if E8M0 else decode_e4m3(scales)
        if macro is not None:
            scales = scales * load_factors(macro, rows[:, None], blocks[None, :] * BLOCK, K, block_mask)
        else:
            scales = scales.to(tl.bfloat16)  # exact, and so is their product with a code
        scales = tl.broadcast_to(scales[:, :, None], (TILE_R, TILE_K // BLOCK, BLOCK // 4))
        scales = scales.reshape(TILE_R, TILE_K // 4)
        n0, n1, n2, n3 = nibbles(code, True, tl.bfloat16)
        values = tl.join(tl.join(n0, n2), tl.join(n1, n3))
        values = values * tl.full((), 2.0**126, tl.bfloat16) * scales[:, :, None, None]
        if global_scale is not None:
            values = values.to(tl.float32) * (factor if rows_per_matrix is None else factor[:, :, None, None])
        values = values.to(tl.float32).to(out.dtype.element_ty).reshape(TILE_R, TILE_K)
    else:
        values = load_weights(
            packed, scale, macro, rows, row_mask, first, K, stride_packed, stride_scale, E8M0, BLOCK, TILE_K, EVEN_K
        )
        if global_scale is not None:
            values = values * factor
    columns = first + tl.arange(0, TILE_K)
    mask = row_mask[:, None] & (columns < K)[None, :]
    out += row * K
    tl.store(out + (inner[:, None] * K + columns[None, :]), values.to(out.dtype.element_ty), mask=mask)


def dequantize(
    weight: QuantizedTensor, dtype: torch.dtype, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode `weight` `[..., N, K]` to `dtype`: float32, bfloat16 or float16; into `out`, dense, if given.

    For columns of a matrix from `first` on, in whole (macro-)blocks, `weight.outliers` may be those of all columns.
    """
    packed, scale, global_scale, macro = dense_rows(weight)
    packed = permuted.words_aligned(packed)
    if out is not None and (out.shape != weight.shape or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(
            f"out: {out.dtype} {list(out.shape)} with strides {out.stride()} is not a dense {dtype} tensor "
            f"{list(weight.shape)}; pass one, or none."
        )
    result = out
    if INTERPRET or out is None:
        result = torch.empty(weight.shape, dtype=torch.float32 if INTERPRET else dtype, device=packed.device)
    rows, k = packed.shape[0], weight.shape[-1]
    if rows:
        matrix = weight.packed.shape[-2] if weight.packed.ndim > 1 else 1
        with torch.cuda.device_of(packed):
            grid = -(-rows // TILE["TILE_R"]), -(-k // TILE["TILE_K"]), 1
            per_matrix = None if matrix == rows else matrix
            strides = packed.stride(0), scale.stride(0)
            constants = {
                "E8M0": weight.format.scale_dtype == torch.uint8,
                "BLOCK": weight.format.block_size,
                "ASM": dtype != torch.float32 and permuted.target(packed.device)["ASM"],
                "EVEN_K": k % TILE["TILE_K"] == 0,
            }
            arguments = (packed, scale, global_scale, macro, result, rows, k, per_matrix, *strides)
            launch(dequantize_kernel, grid, arguments, constants | TILE)
            if weight.outliers is not None:
                scatter(result.view(rows, k), weight.outliers, first)
    if out is None:
        return result.to(dtype)
    return out if result is out else out.copy_(result)
