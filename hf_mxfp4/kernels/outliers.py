# SPDX-License-Identifier: Apache-2.0
"""Outliers: into a decoded weight, and their part of a matrix product. Twin: `reference.scatter_outliers`.

A program works on one row of the weight and reads on the device where its entries begin and end.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import Outliers, QuantizedTensor
from hf_mxfp4.kernels.decode import find_rows, slots_of

TOKENS = 8192  # of a product at once, without experts: what outliers add takes 4 bytes for each output
ENTRIES = 16  # read at once: about as many as a row has, 0.5 % of 4096
SCATTER = {"ENTRIES": ENTRIES, "num_warps": 1}


def product_options(tile_m: int) -> dict[str, int]:
    """Tile sizes and launch options of `outlier_product_kernel` for `tile_m` tokens at once."""
    return {"TILE_M": tile_m, "ENTRIES": ENTRIES, "num_warps": max(1, tile_m // 32)}


@triton.jit(do_not_specialize=["first"])
def scatter_kernel(values, columns, offsets, out, first, K, ENTRIES: tl.constexpr):
    """Write the outliers of a row into `out` `[R, K]`, whose columns are the weight's from `first` on."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets + row + 1)
    for start in range(tl.load(offsets + row), end, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        column = tl.load(columns + entries, mask=entries < end, other=0).to(tl.int32) - first
        value = tl.load(values + entries, mask=entries < end, other=0.0).to(tl.float32)
        mask = (entries < end) & (column >= 0) & (column < K)
        tl.store(out + row * K + column, value.to(out.dtype.element_ty), mask=mask)


def scatter(out: torch.Tensor, outliers: Outliers, first: int = 0) -> None:
    """Write outliers into `out` `[R, columns]`, in place; its columns are the weight's from `first` on."""
    values, columns, offsets = (tensor.contiguous() for tensor in outliers)
    with torch.cuda.device_of(out):
        scatter_kernel[out.shape[0],](values, columns, offsets, out, first, out.shape[1], **SCATTER)


@triton.jit(do_not_specialize=["tokens"])
def outlier_product_kernel(
    x,
    values,
    columns,
    row_offsets,
    offsets,
    out,
    tokens,
    N,
    experts,
    EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Row n of `out` `[N, tokens]`: the sum over n's outliers of value times row `column` of x, `[K, tokens]`.

    Tokens stand last in both, so that they are next to each other in memory wherever the outliers are.
    """
    expert, row, end = find_rows(tl.program_id(1), offsets, tokens, experts, TILE_M, EXPERTS)
    if row >= end:
        return
    n = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, TILE_M).to(tl.int64)
    total = tl.zeros((TILE_M,), tl.float32)
    first = row_offsets + expert * N + n
    last = tl.load(first + 1)
    for start in range(tl.load(first), last, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        value = tl.load(values + entries, mask=entries < last, other=0.0).to(tl.float32)
        column = tl.load(columns + entries, mask=entries < last, other=0).to(tl.int64)
        mask = (rows < end)[:, None] & (entries < last)[None, :]
        part = tl.load(x + column[None, :] * tokens + rows[:, None], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(part * value[None, :], 1)
    tl.store(out + n * tokens + rows, total, mask=rows < end)


def outlier_product(
    x: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor | None, grad: bool, tile_m: int
) -> torch.Tensor:
    """What outliers add to `x @ W.T` (with `grad`, to `x @ W`): float32 `[N, tokens]` (or `[K, tokens]`).

    Rows of x as in `gemm.linear`; tokens that no program of `tile_m` rows visits are left unwritten.
    """
    n, k = weight.shape[-2:]
    experts = 1 if offsets is None else weight.shape[0]
    values, columns, row_offsets = transposed(weight.outliers, n, k, experts) if grad else weight.outliers
    features = k if grad else n
    out = torch.empty(features, x.shape[0], dtype=torch.float32, device=x.device)
    outlier_product_kernel[features, slots_of(x.shape[0], offsets, tile_m)](
        x.T.contiguous(),
        values.contiguous(),
        columns.contiguous(),
        row_offsets.contiguous(),
        None if offsets is None else offsets.contiguous(),
        out,
        x.shape[0],
        features,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        **product_options(tile_m),
    )
    return out


def transposed(outliers: Outliers, n: int, k: int, experts: int) -> Outliers:
    """Outliers of a stack of matrices `[E, N, K]` as those of `[E, K, N]`; the host does not wait for their values.

    Columns are int32 then. Entries that `offsets` does not speak of (those of other rows) come last.
    """
    entry = torch.arange(outliers.values.shape[0], dtype=torch.int32, device=outliers.values.device)
    row = torch.searchsorted(outliers.offsets, entry, right=True) - 1  # -1 before the first offset
    key = row // n * k + outliers.columns.to(torch.int64)
    key = torch.where(row >= 0, key, experts * k)
    key, order = key.sort(stable=True)  # keeps rows in order: the sum over them is the same each time
    offsets = torch.searchsorted(key, torch.arange(experts * k + 1, device=key.device), out_int32=True)
    return Outliers(outliers.values[order], (row[order] % n).to(torch.int32), offsets)
