# SPDX-License-Identifier: Apache-2.0
"""The experts regime of scripts/benchmark_kernels.py: packed experts against transformers' own in bf16."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F

from exactness import random_weight
from hf_mxfp4 import FP4Experts, reference
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from kernel_peers import OURS
from kernel_regimes import Bench, Case, check_all, new_row, rms_error

BLOCK = (128, 768, 2048, 8)  # experts, intermediate, hidden, experts of a token: Qwen3-30B-A3B
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
BATCHED_TOKENS = 16  # batched_mm copies the weights of every token: 9 MB each
CALLS = 16  # routings in turn
# Between the two products everybody rounds to bfloat16, so two results that are equally good have different errors.
# The ratio of their root mean squares to plain torch's was seen from 0.84 to 1.00 in blocks of (16, 128, 1024, 4). A
# single wrong output adds 1 / sqrt(outputs): at M=1 several times as much as all roundings.
ALLOWED = 1.5

Routing = tuple[torch.Tensor, torch.Tensor]


def experts_cases(bench: Bench) -> list[Case]:
    tokens = (1, 16) if bench.quick else (1, 16, 64, 2, 4, 8, 32, 128, 256)
    return [Case("experts", "30B-A3B", BLOCK, m) for m in tokens]


def routings(case: Case, device: torch.device) -> Iterator[Routing]:
    """Expert ids int64 `[M, k]` and weights `[M, k]` of a call. Experts are dealt like cards, so that those of a call
    come again only when all others have been read."""
    experts, _, _, k = case.shape
    deck: list[int] = []
    for _ in range(CALLS):
        while len(deck) < case.tokens * k:
            deck += torch.randperm(experts).view(-1, k).flatten().tolist()
        ids = torch.tensor(deck[: case.tokens * k], device=device).view(case.tokens, k)
        deck = deck[case.tokens * k :]
        yield ids, torch.rand(ids.shape, device=device).softmax(-1).to(torch.bfloat16)


def dense_experts(weights: dict[str, QuantizedTensor], case: Case, implementation: str):
    """transformers' module with the dequantized weights in bfloat16."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, intermediate, hidden, k = case.shape
    config = Qwen3MoeConfig(
        num_experts=experts, moe_intermediate_size=intermediate, hidden_size=hidden, num_experts_per_tok=k
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    for name, weight in weights.items():
        dense = reference.dequantize(weight, torch.bfloat16)
        setattr(module, name, torch.nn.Parameter(dense, requires_grad=False))
    return module.eval()


def packed_experts(weights: dict[str, QuantizedTensor], dense) -> FP4Experts:
    """Our module in its place."""
    packed = FP4Experts.from_experts(dense, weights["down_proj"].format)
    for name, weight in weights.items():
        packed.load_projection(name, weight)
    return packed.eval()


def by_expert(x, routing: Routing, weights: dict[str, QuantizedTensor], dtype: torch.dtype) -> torch.Tensor:
    """The block in plain torch, in `dtype`; in float64 the exact result."""
    ids, scores = routing
    out = torch.zeros(*ids.shape, x.shape[-1], dtype=dtype, device=x.device)
    for expert in ids.unique().tolist():
        gate_up, down = (reference.dequantize(weights[n].matrix(expert), dtype) for n in ("gate_up_proj", "down_proj"))
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].to(dtype), gate_up).chunk(2, -1)
        out[token, slot] = F.linear(F.silu(gate) * up, down)
    return (out * scores[..., None].to(dtype)).sum(1)


@torch.no_grad()
def measure_experts(case: Case, bench: Bench) -> dict:
    """The block of experts for M tokens, without its router."""
    experts, intermediate, hidden, k = case.shape
    shapes = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}

    def stacks(fmt) -> dict[str, QuantizedTensor]:
        return {name: random_weight(*shape, fmt=fmt, device=bench.device) for name, shape in shapes.items()}

    weights = bench.keep("experts", case.shape, lambda: {name: stacks(fmt) for name, fmt in FORMATS.items()})
    x = torch.randn(case.tokens, hidden, dtype=torch.bfloat16, device=bench.device) * 2.0**-5
    turns = list(routings(case, bench.device))
    row = new_row(case, 6.0 * case.tokens * k * intermediate * hidden)

    def modules():
        found = {}
        for implementation in IMPLEMENTATIONS:
            found[implementation] = dense_experts(weights["mxfp4"], case, implementation)
            for name in shapes if len(found) > 1 else ():  # one copy for both
                setattr(found[implementation], name, getattr(found[IMPLEMENTATIONS[0]], name))
        dense = found[IMPLEMENTATIONS[0]]
        return found | {name: packed_experts(weights[name], dense) for name in OURS}

    modules = bench.keep("experts modules", case.shape, modules)

    def gate(name: str) -> dict:
        own = weights[name if name in OURS else "mxfp4"]
        exact = by_expert(x, turns[0], own, torch.float64)
        found = rms_error(modules[name](x, *turns[0]), exact)
        allowed = ALLOWED * rms_error(by_expert(x, turns[0], own, torch.bfloat16), exact)
        return {"error": found, "allowed": allowed, "passed": found <= allowed}

    names = [name for name in modules if name != "batched_mm" or case.tokens <= BATCHED_TOKENS]
    names = check_all(row, {name: partial(gate, name) for name in names})
    calls = {name: [partial(modules[name], x, *turn) for turn in turns] for name in names}
    read = sum(len(ids.unique()) for ids, _ in turns) / CALLS
    each = {name: sum(w.nbytes for w in weights[name].values()) / experts for name in OURS}
    dense = 2 * 3 * intermediate * hidden
    row["bytes"] = {name: read * each.get(name, dense) for name in names}
    return bench.compare(calls, row, IMPLEMENTATIONS[0])
