# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/gpu_check.py that need a GPU: torch.compile, CUDA graphs, streams, repeated runs."""

from collections.abc import Callable, Iterator

import torch

import timing
from decode_speed import pack_linears
from exactness import corrections, differing, error_ratio, random_weight
from gpu_checks import Check, expert_layer
from hf_mxfp4 import FP4Experts, ops, reference
from hf_mxfp4.formats import BlockFormat, QuantizedTensor


def check_compile(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    def compiled_linear(weight: QuantizedTensor) -> Callable:
        return torch.compile(lambda x: ops.linear(x.sin(), weight, backend="triton"), fullgraph=True, dynamic=True)

    for name, added in corrections(fmt).items():
        weight = random_weight(64, 128, fmt=fmt, device=device, **added)
        dense, compiled = reference.dequantize(weight, torch.float64), compiled_linear(weight)
        for tokens in (3, 40):
            x = torch.randn(tokens, 128, device=device, requires_grad=True)
            y = compiled(x)
            y.sum().backward()
            expected = (torch.ones_like(y).double() @ dense) * x.detach().double().cos()
            what = f"{fmt.name} {name} {tokens} tokens"
            yield Check(f"compiled linear {what}", error_ratio(y.detach(), x.detach().sin(), dense.T))
            close = torch.allclose(x.grad.double(), expected, rtol=1e-4, atol=1e-4)  # sin and cos are inductor's own
            yield Check(f"compiled gradient {what}", 0 if close else float("inf"))


def check_graph(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """A captured graph must give what a direct call gives, and no call may wait for the GPU."""
    plain, *_, most = corrections(fmt).values()
    weights = [random_weight(256, 512, fmt=fmt, device=device, **added) for added in (plain, most)]
    stacks = [random_weight(4, 64, 512, fmt=fmt, device=device, **added) for added in (plain, most)]
    x = torch.randn(8, 512, device=device, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 1, 1, 5, 8], dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        plain = [ops.linear(x, weight) for weight in weights]
        return torch.cat((*plain, *(ops.grouped_linear(x, offsets, stack) for stack in stacks)), -1)

    step()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    x.normal_()
    offsets.copy_(torch.tensor([1, 2, 4, 4, 7], dtype=torch.int32))
    graph.replay()
    yield Check(f"CUDA graph {fmt.name}", differing(captured, step()), "differing values")
    x.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield Check(f"no wait for the GPU {fmt.name}", 0)


def check_addresses(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """More than 2^31 packed bytes, decoded values and activations: the last rows must be those of a small weight."""
    n, k = 1_100_000, 4096
    needed, free = n * k * 3.5 + 2e9, torch.cuda.mem_get_info()[0]
    if free < needed:
        yield Check(
            f"64-bit addresses {fmt.name}", 0, f"left out: {needed / 1e9:.0f} GB needed, {free / 1e9:.0f} free"
        )
        return
    weight = random_weight(n, k, fmt=fmt, device=device)
    last = QuantizedTensor(weight.packed[-64:], weight.scale[-64:], weight.global_scale, fmt)
    x = torch.randn(2, k, device=device, dtype=torch.bfloat16)
    got, expected = (ops.linear(x, w, backend="triton") for w in (weight, last))
    yield Check(f"64-bit addresses, linear {fmt.name}", differing(got[:, -64:], expected), "differing values")
    got, expected = (ops.dequantize(w, torch.bfloat16, backend="triton") for w in (weight, last))
    yield Check(f"64-bit addresses, dequantize {fmt.name}", differing(got[-64:], expected), "differing values")
    del got
    x = torch.randn(k, dtype=torch.bfloat16, device=device).expand(n, k).contiguous()
    got, expected = (ops.linear(x[i:], last, backend="triton") for i in (0, n - 512))
    yield Check(f"64-bit addresses, tokens {fmt.name}", differing(got[-512:], expected), "differing values")


def check_repeats(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Twenty runs give the same bits: products split along K, gradients, experts."""
    plain, *_, most = corrections(fmt).items()
    for name, added in (plain, most):
        weight = random_weight(1024, 8192, fmt=fmt, device=device, **added)
        for tokens in (1, 16, 48, 200):
            x = torch.randn(tokens, 8192, device=device, dtype=torch.bfloat16, requires_grad=True)
            gradient = torch.randn(tokens, 1024, device=device, dtype=torch.bfloat16)

            def both(x=x, weight=weight, gradient=gradient) -> torch.Tensor:
                y = ops.linear(x, weight, backend="triton")
                return torch.cat((y, *torch.autograd.grad(y, x, gradient)), -1).detach()

            first = both()
            wrong = sum(differing(both(), first) for _ in range(19))
            yield Check(f"20 runs, linear and gradient {fmt.name} {name} {tokens} tokens", wrong, "differing values")
    layer = expert_layer(fmt, device, 16, 192, 512)
    for tokens in (1, 40, 300):
        x = torch.randn(tokens, 512, device=device, dtype=torch.bfloat16) * 2.0**-6
        ids, scores = torch.randint(0, 16, (tokens, 4), device=device), torch.rand(tokens, 4, device=device)
        first = layer(x, ids, scores)
        wrong = sum(differing(layer(x, ids, scores), first) for _ in range(19))
        yield Check(f"20 runs, experts {fmt.name} {tokens} tokens", wrong, "differing values")


def check_streams(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Two streams at once, each with products split along K: they must not meet in a workspace."""
    weights = [random_weight(512, 16384, fmt=fmt, device=device) for _ in range(2)]
    xs = [torch.randn(4, 16384, device=device, dtype=torch.bfloat16) for _ in range(2)]
    expected = [ops.linear(x, weight, backend="triton") for x, weight in zip(xs, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for stream, x, weight, got in zip(streams, xs, weights, found, strict=True):
            with torch.cuda.stream(stream):
                got.append(ops.linear(x, weight, backend="triton"))
    torch.cuda.synchronize()
    wrong = sum(differing(y, right) for got, right in zip(found, expected, strict=True) for y in got)
    yield Check(f"two streams {fmt.name}", wrong, "differing values")


def check_model(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """A tiny mixture-of-experts model, packed: a captured forward gives the logits of a direct one, also for tokens
    that were not there when it was captured."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(vocab_size=512, hidden_size=256, num_hidden_layers=2, **heads, **experts)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    pack_linears(model, fmt)
    for layer in model.model.layers:
        packed = FP4Experts.from_experts(layer.mlp.experts, fmt)
        for name, shape in packed.shapes.items():
            packed.load_projection(name, random_weight(*shape, fmt=fmt, device=device))
        layer.mlp.experts = packed
    for tokens in (1, 2, 24):
        ids = torch.randint(0, 512, (1, tokens), device=device)
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()

        def forward(ids=ids, mask=mask) -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

        captured = []
        with timing.on_capture_stream():
            forward()
        replay = timing.capture(lambda forward=forward, captured=captured: captured.append(forward()))
        ids.random_(0, 512)
        replay()
        got, expected = captured[0].clone(), forward()
        finite = bool(expected.isfinite().all())
        yield Check(
            f"model in a graph {fmt.name} {tokens} tokens",
            differing(got, expected) if finite else float("inf"),
            "differing values",
        )


GPU_CHECKS: tuple[Callable, ...] = (
    check_compile,
    check_graph,
    check_model,
    check_repeats,
    check_streams,
    check_addresses,
)
