# SPDX-License-Identifier: Apache-2.0
"""Before and after the projections of fused experts (kernels/experts.py): slots by expert, and their sum by token.

A slot is one choice of a token, `m * top_k + j`; ids outside `0 .. experts - 1` are no expert's. No atomics: the same
order and the same bits each time. Twin: `experts_ops`.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.kernels.launch import launch

ROUTE = {"CHUNK": 128, "num_warps": 4}, {"CHUNK": 1024, "num_warps": 4}  # for few slots, for many
COMBINE = {"TILE": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["slots"])
def route_kernel(index, order, offsets, slots, CHUNK: tl.constexpr):
    """Slots of expert `program_id` in rising order, and where they start; the last program, of no expert, tells where
    all end. index `[slots]`, order int32 `[slots]`, offsets int32 `[experts + 1]`."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        ids = tl.load(index + slot, mask=slot < slots, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    place = tl.sum(before)
    tl.store(offsets + expert, place)
    if expert == tl.num_programs(0) - 1:
        return
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        mine = tl.load(index + slot, mask=slot < slots, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, slot, mask=mine)
        place += tl.max(rank)


def route(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order int32 `[slots]` and offsets int32 `[experts + 1]` for expert ids `[M, k]`, contiguous."""
    slots = index.numel()
    order = torch.empty(slots, dtype=torch.int32, device=index.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=index.device)
    launch(route_kernel, (experts + 1, 1, 1), (index, order, offsets, slots), ROUTE[slots > ROUTE[0]["CHUNK"]])
    return order, offsets


@triton.jit
def combine_kernel(index, rows, out, N, experts, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """`out[m]`: the sum of the rows `[slots, N]` (float32) of token m's slots in their order, but of no expert's."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(index + slot)
        mask = (columns < N) & (expert >= 0) & (expert < experts)
        total += tl.load(rows + slot * N + columns, mask=mask, other=0.0)
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=columns < N)


def combine(index: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, experts: int) -> None:
    """Sum float32 `rows` `[M*k, N]` over each token's choices into `out` `[M, N]`; `index` `[M, k]`, contiguous."""
    (tokens, top_k), n = index.shape, out.shape[1]
    grid = tokens, -(-n // COMBINE["TILE"]), 1
    launch(combine_kernel, grid, (index, rows, out, n, experts), {"TOP_K": top_k, **COMBINE})
