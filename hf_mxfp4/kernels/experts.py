# SPDX-License-Identifier: Apache-2.0
"""Fused experts: rows of x gathered, both projections from packed weights, activation, routing weights, sum.

Twin: `experts_ops` in plain torch. A slot is one choice of a token, `m * top_k + j`.

    route    order of slots and offsets of experts (kernels/routing.py)
    first    gate rows and the up rows that belong to them in one tile, 8 and 8, as tensor cores hold rows g and g + 8
             in one lane; scale, bias and activation in float32; a slot's hidden row is written at the slot
    down     scale, bias and routing weight; float32 rows at the slots
    combine  sum over a token's slots in their order (kernels/routing.py)

Up to `DIRECT` tokens take two launches: a program has one slot and reads its expert's id itself; down's programs for
the slots of a token, and for parts of the sums along K, are joined by the last of them to arrive.

Ids outside `0 .. experts - 1` cost nothing. Grids depend on shapes alone and nothing is read on the host, so all of it
can be captured in a CUDA graph.
"""

import functools

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import BlockFormat, QuantizedTensor
from hf_mxfp4.kernels import gemm, permuted
from hf_mxfp4.kernels.decode import INTERPRET, MACRO, dense_rows, find_rows
from hf_mxfp4.kernels.launch import launch
from hf_mxfp4.kernels.permuted import accumulate, reduce_splits, split_range
from hf_mxfp4.kernels.routing import combine, route
from hf_mxfp4.kernels.scratch import split_scratch

DIRECT = 2  # tokens that are not sorted
CORRECTED = 32  # slots of a tile with outliers, at most: addresses of a tile of x stand in registers
CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(gate, ALPHA: tl.constexpr, ACTIVATION: tl.constexpr):
    """`activations.ACTIVATIONS[ACTIVATION]` of float32 values."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate * ALPHA)
    elif ACTIVATION == "gelu":
        gate = gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2z)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + CUBIC * gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            gate = gate * gate
    return gate


@triton.jit
def outlier_part(x, x_rows, x_mask, stride_x, values, columns, row_offsets, weight_rows, row_mask):
    """What outliers of the weight's rows add: float32 `[TILE_N, TILE_M]`. `row_offsets` as in `formats.Outliers`."""
    start = tl.load(row_offsets + weight_rows, mask=row_mask, other=0)
    end = tl.load(row_offsets + weight_rows + 1, mask=row_mask, other=0)
    total = tl.zeros((weight_rows.shape[0], x_rows.shape[0]), tl.float32)
    for i in range(0, tl.max(end - start)):
        mask = start + i < end
        value = tl.load(values + start + i, mask=mask, other=0.0).to(tl.float32)
        column = tl.load(columns + start + i, mask=mask, other=0).to(tl.int64)
        inside = mask[:, None] & x_mask[None, :]
        part = tl.load(x + x_rows[None, :] * stride_x + column[:, None], mask=inside, other=0.0)
        total += value[:, None] * part.to(tl.float32)
    return total


@triton.jit
def gated(
    total,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """`activations.Activation.forward` of a tile `[rows, M]`; with GATED 8 gate rows and their 8 up rows by turns."""
    LIMITED: tl.constexpr = LIMIT != float("inf")
    gate, up = total, None
    if GATED:
        M: tl.constexpr = total.shape[1]
        HALF: tl.constexpr = total.shape[0] // 2
        gate, up = total.reshape(HALF // 8, 2, 8, M).trans(0, 2, 3, 1).split()
        gate, up = gate.reshape(HALF, M), up.reshape(HALF, M)
    if LIMITED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    out = activate(gate, ALPHA, ACTIVATION)
    if GATED:
        if LIMITED:
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        out *= up + SHIFT
    return out


@triton.jit(do_not_specialize=["slots"])
def project_kernel(
    x,
    index,
    order,
    offsets,
    router,
    packed,
    scale,
    global_scale,
    macro,
    values,
    columns,
    row_offsets,
    bias,
    out,
    workspace,
    counters,
    slots,
    N,
    K,
    experts,
    stride_x,
    stride_packed,
    stride_scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    ORDER: tl.constexpr,
    DOT: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A tile of a projection, `[TILE_N, TILE_M]` of weight rows and slots of one expert.

    With ACTIVATION the first: x `[tokens, K]`, W `[experts, N or 2N, K]`, out `[slots, N]`. Without, down: x
    `[slots, K]`, W `[experts, N, K]`, `router` `[slots]`, out float32 `[slots, N]`. `order` and `offsets` are
    `route_kernel`'s; without them a program has a single slot, of SPLITS parts of K one, and down's out is
    `[tokens, N]`.
    """
    DIRECT: tl.constexpr = order is None
    FIRST: tl.constexpr = ACTIVATION is not None
    WIDTH: tl.constexpr = TILE_N // 2 if GATED else TILE_N
    place = tl.arange(0, TILE_M)
    split = tl.program_id(2)
    if DIRECT:
        slot = tl.program_id(0)
        expert = tl.load(index + slot)
        live = (expert >= 0) & (expert < experts)
        expert = tl.where(live, expert, 0).to(tl.int32)
        valid = (place == 0) & live
        rows = slot + place * 0
    else:
        expert, row, end = find_rows(tl.program_id(0), offsets, slots, experts, TILE_M, EXPERTS)
        live = row < end
        valid = row + place < end
        rows = tl.load(order + row + place, mask=valid, other=0)
    if FIRST or not DIRECT:
        if not live:
            return
    x_rows = rows.to(tl.int64)
    if FIRST:
        x_rows = x_rows // TOP_K
    tile_row = tl.arange(0, TILE_N)
    if GATED:
        feature = tl.program_id(1) * WIDTH + tile_row // 16 * 8 + tile_row % 8
        row_mask = feature < N
        feature, is_up = tl.minimum(feature, N - 1), tile_row // 8 % 2
        weight_rows = feature * 2 + is_up if INTERLEAVED else feature + is_up * N
    else:
        weight_rows = tl.program_id(1) * WIDTH + tile_row
        row_mask = weight_rows < N
        weight_rows = tl.minimum(weight_rows, N - 1)
    # The expert goes into the pointers: rows of 32 bits take fewer registers in the loop.
    skipped = tl.cast(expert, tl.int64) * (2 * N if GATED else N)
    packed += skipped * stride_packed
    scale += skipped * stride_scale
    if macro is not None:
        macro += skipped * tl.cdiv(K, MACRO)
    if values is not None:
        row_offsets += skipped
    if bias is not None:
        bias += skipped
    k_begin, k_end = 0, K
    if DIRECT:
        k_begin, k_end = split_range(split, SPLITS, K, TILE_K)
        k_end = tl.where(live, k_end, k_begin)
    total = accumulate(
        x,
        x_rows,
        valid,
        packed,
        scale,
        macro,
        weight_rows,
        None,  # rows past the last are copies of it
        k_begin,
        k_end,
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
    if DIRECT:  # a single slot from here on
        total = tl.sum(tl.where((place == 0)[None, :], total, 0.0), 1)[:, None]
        rows = slot + tl.arange(0, 1)
        x_rows = rows.to(tl.int64)
        if FIRST:
            x_rows = x_rows // TOP_K
            tile = slot * tl.num_programs(1) + tl.program_id(1)
            total, last = reduce_splits(total, workspace, counters, tile, split, SPLITS, ASM)
            if not last:
                return
        else:
            row_mask &= live & (split == 0)  # bias and outliers once
        valid = rows < slots
    if global_scale is not None:
        total *= tl.load(global_scale + expert)
    if values is not None:
        total += outlier_part(x, x_rows, valid, stride_x, values, columns, row_offsets, weight_rows, row_mask)
    if bias is not None:
        total += tl.load(bias + weight_rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    if FIRST:
        total = gated(total, ALPHA, LIMIT, SHIFT, ACTIVATION, GATED)
    else:
        total *= tl.load(router + rows, mask=valid & live, other=0.0).to(tl.float32)[None, :]
        if DIRECT:
            rows = rows // TOP_K
            tile = slot // TOP_K * tl.num_programs(1) + tl.program_id(1)
            split += slot % TOP_K * SPLITS
            total, last = reduce_splits(total, workspace, counters, tile, split, TOP_K * SPLITS, ASM)
            if not last:
                return
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = valid[:, None] & (feature < N)[None, :]
    target = out + rows.to(tl.int64)[:, None] * N + feature[None, :]
    tl.store(target, total.trans().to(out.dtype.element_ty), mask=mask)


def options_of(
    slots: int,
    n: int,
    k: int,
    experts: int,
    dtype: torch.dtype,
    direct: bool,
    corrected: bool,
    device: permuted.Target,
) -> dict[str, int]:
    """Tile sizes and launch options of a projection to `n` weight rows: `gemm`'s for so many tokens, not tuned."""
    most = 1 if direct else min(slots, CORRECTED * experts) if corrected else slots
    options = gemm.tile(dtype, most, n, k, experts, device=device)
    tokens = slots * options["TILE_M"]  # of `direct`, a tile for each slot
    return options | {"SPLITS": gemm.splits(tokens, n, k, 1, options, device.processors) if direct else 1}


def constants(
    dtype: torch.dtype, fmt: BlockFormat, k: int, experts: int, activation, gated: bool, top_k: int, tile_k: int
) -> dict:
    """The compile-time arguments of `project_kernel` but for the device's and the tile sizes."""
    name, alpha, limit, shift, interleaved = activation or (None, 1.0, float("inf"), 0.0, False)
    return {
        "ACTIVATION": name,
        "GATED": gated,
        "INTERLEAVED": gated and interleaved,
        "ALPHA": alpha,
        "LIMIT": limit,
        "SHIFT": shift,
        "TOP_K": top_k,
        "EXPERTS": triton.next_power_of_2(experts),
        **permuted.constants(dtype, fmt.block_size, fmt.scale_dtype == torch.uint8, k, tile_k),
    }


@functools.lru_cache(1024)  # most of what a launch costs
def plan(
    dtype: torch.dtype,
    fmt: BlockFormat,
    shape: tuple[int, int, int],
    n: int,
    slots: int,
    top_k: int,
    activation,
    direct: bool,
    corrected: bool,
    device: permuted.Target,
) -> tuple[tuple[int, int, int], int, dict]:
    """Grid, tile width and compile-time arguments of a projection by weights of `shape` to `n` outputs a slot."""
    experts, rows, k = shape
    options = options_of(slots, rows, k, experts, dtype, direct, corrected, device)
    has_gate = activation is not None and rows != n
    width = options["TILE_N"] // 2 if has_gate else options["TILE_N"]
    groups = slots if direct else slots // options["TILE_M"] + experts
    compiled_in = constants(dtype, fmt, k, experts, activation, has_gate, top_k, options["TILE_K"])
    grid = groups, triton.cdiv(n, width), options["SPLITS"]
    return grid, options["TILE_N"], compiled_in | permuted.target(device) | options


def project(x, index, routing, router, weight: QuantizedTensor, bias, activation, out) -> None:
    """Launch `project_kernel`: the first projection with `activation`, or with `None` the down projection."""
    (order, offsets), device = routing, permuted.target_of(x.device)
    packed, scale, global_scale, macro = dense_rows(weight)
    packed = permuted.words_aligned(packed)
    shape, n, (tokens, top_k), direct = tuple(weight.shape), out.shape[1], index.shape, order is None
    slots, corrected = tokens * top_k, weight.outliers is not None
    grid, width, options = plan(x.dtype, weight.format, shape, n, slots, top_k, activation, direct, corrected, device)
    workspace = counters = None
    if direct:
        groups, tiles, splits = grid
        workspace, counters = split_scratch(x.device, groups * tiles, groups * tiles * splits * width)
    arguments = (
        x,
        index,
        order,
        offsets,
        router,
        packed,
        scale,
        global_scale,
        macro,
        *((tensor.contiguous() for tensor in weight.outliers) if corrected else (None, None, None)),
        None if bias is None else bias.contiguous(),
        out,
        workspace,
        counters,
        slots,
        n,
        shape[2],
        shape[0],
        x.stride(0),
        packed.stride(0),
        scale.stride(0),
    )
    launch(project_kernel, grid, arguments, options)


def experts(x, index, weights, first: QuantizedTensor, first_bias, down: QuantizedTensor, down_bias, activation):
    """`experts_ops.experts` by kernels: x `[M, H]` float32, bfloat16 or float16, `index` and `weights` `[M, k]`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    index, weights = index.contiguous(), weights.contiguous()
    tokens, (count, features, inner) = index.shape[0], down.shape
    slots, stored = index.numel(), torch.float32 if INTERPRET else x.dtype
    hidden = torch.empty(slots, inner, dtype=stored, device=x.device)
    out = torch.empty(tokens, features, dtype=stored, device=x.device)
    direct = tokens <= DIRECT
    with torch.cuda.device_of(x):
        routing = (None, None) if direct else route(index, count)
        project(x, index, routing, None, first, first_bias, activation, hidden)
        rows = out if direct else torch.empty(slots, features, dtype=torch.float32, device=x.device)
        project(hidden.to(x.dtype), index, routing, weights, down, down_bias, None, rows)
        if not direct:
            combine(index, rows, out, count)
    return out.to(x.dtype)
