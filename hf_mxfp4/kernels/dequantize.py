# SPDX-License-Identifier: Apache-2.0
"""Packed weights to real values. Twin: `reference.dequantize`, equal to it bit for bit."""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.kernels.decode import INTERPRET, dense_rows, load_weights
from hf_mxfp4.kernels.outliers import scatter

TILE = {"TILE_R": 16, "TILE_K": 256, "num_warps": 4}


@triton.jit(do_not_specialize=["R", "rows_per_matrix"])
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
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Program (i, j) writes rows `i * TILE_R ..` and columns `j * TILE_K ..` of `out` `[R, K]`, rounding once."""
    rows = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    first = tl.program_id(1) * TILE_K
    row_mask = rows < R
    values = load_weights(
        packed, scale, macro, rows, row_mask, first, K, stride_packed, stride_scale, E8M0, BLOCK, TILE_K, EVEN_K
    )
    if global_scale is not None:
        values = values * tl.load(global_scale + rows // rows_per_matrix, mask=row_mask, other=0.0)[:, None]
    columns = first + tl.arange(0, TILE_K)
    mask = row_mask[:, None] & (columns < K)[None, :]
    tl.store(out + rows[:, None] * K + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """Decode `weight` `[..., N, K]` to `dtype`: float32, bfloat16 or float16.

    For columns of a matrix from `first` on, in whole (macro-)blocks, `weight.outliers` may be those of all columns.
    """
    packed, scale, global_scale, macro = dense_rows(weight)
    out = torch.empty(weight.shape, dtype=torch.float32 if INTERPRET else dtype, device=packed.device)
    rows, k = packed.shape[0], weight.shape[-1]
    if rows:
        with torch.cuda.device_of(packed):
            dequantize_kernel[triton.cdiv(rows, TILE["TILE_R"]), triton.cdiv(k, TILE["TILE_K"])](
                packed,
                scale,
                global_scale,
                macro,
                out,
                rows,
                k,
                weight.packed.shape[-2] if weight.packed.ndim > 1 else 1,
                packed.stride(0),
                scale.stride(0),
                E8M0=weight.format.scale_dtype == torch.uint8,
                BLOCK=weight.format.block_size,
                EVEN_K=k % TILE["TILE_K"] == 0,
                **TILE,
            )
            if weight.outliers is not None:
                scatter(out.view(rows, k), weight.outliers, first)
    return out.to(dtype)
