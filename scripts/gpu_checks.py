# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/gpu_check.py that run on any device, in the interpreter too."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

from exactness import (
    HALF_ULP,
    corrections,
    differing,
    error_ratio,
    every_code_and_scale,
    random_weight,
    short,
    to_cpu,
)
from hf_mxfp4 import FP4Experts, dispatch, ops, reference
from hf_mxfp4.formats import BlockFormat, QuantizedTensor
from hf_mxfp4.quantization import fake_quantize, quantize

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Check(NamedTuple):
    name: str
    error: float  # must not exceed 1
    note: str = ""


def check_dequantize(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    shapes = [(4096, 4096), (8, 1024, 768), (3, 31, 96)] if big else [(3, 31, 96)]
    weights = {"all codes, all scales": every_code_and_scale(fmt, device)}
    if not fmt.has_global_scale:
        weights["all codes, all scales, macro"] = every_code_and_scale(fmt, device, macro=True)
    for shape in shapes:
        for name, added in corrections(fmt).items():
            weights[f"{'x'.join(map(str, shape))} {name}"] = random_weight(*shape, fmt=fmt, device=device, **added)
    for name, weight in weights.items():
        for dtype in DTYPES:
            got = ops.dequantize(weight, dtype, backend="triton")
            expected = reference.dequantize(to_cpu(weight), dtype)
            yield Check(f"dequantize {fmt.name} {name} {short(dtype)}", differing(got, expected), "differing values")


def check_every_weight(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Identity matrices as x bring every decoded weight out of the fused kernels."""
    for macro in (False,) if fmt.has_global_scale else (False, True):
        weight = every_code_and_scale(fmt, device, macro)
        usable = reference.dequantize(weight, torch.float32).isfinite().all(-1)  # 0 * inf is NaN in a sum
        if macro:
            usable[:3] = False  # their last bits are too small for bfloat16, see `two_terms` in kernels/gemm.py
        weight = weight._replace(packed=weight.packed[usable], scale=weight.scale[usable])
        weight = weight._replace(macro=weight.macro[usable]) if macro else weight
        n, k = weight.shape
        for dtype in DTYPES:
            name = f"{fmt.name} all codes, all scales{', macro' if macro else ''} {short(dtype)}"
            dense = (reference.dequantize(weight, torch.float32) + 0).to(dtype)  # a sum with +0 is never -0
            got = ops.linear(torch.eye(k, dtype=dtype, device=device), weight, backend="triton")
            yield Check(f"linear {name}", differing(got.T, dense), "values")
            eye = torch.eye(n, dtype=dtype, device=device)
            got = torch.ops.hf_mxfp4.linear_grad(eye, None, *ops.operands(weight), fmt.name, "triton")
            yield Check(f"linear_grad {name}", differing(got, dense), "values")


def check_linear(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    shapes = [(0, 33, 96), (1, 1, 32), (3, 31, 96), (17, 33, 160)]
    if big:
        shapes += [(1, 4096, 4096), (16, 12288, 4096), (40, 2880, 2880), (129, 4096, 2080), (2048, 4096, 4096)]
    plain, *corrected = corrections(fmt).items()
    cases = [(*shape, *plain) for shape in shapes]
    cases += [(*shape, *added) for added in corrected for shape in shapes] if big else [(3, 9, 160, *corrected[-1])]
    for tokens, n, k, what, added in cases:
        weight = random_weight(n, k, fmt=fmt, device=device, **added)
        dense = reference.dequantize(weight, torch.float64)
        for dtype in DTYPES:
            x = torch.randn(k, tokens, device=device).to(dtype).T  # columns first: not contiguous
            bias = torch.randn(n, device=device).to(dtype)
            for backend in ("triton", "auto") if tokens >= dispatch.FUSED_TOKENS else ("triton",):
                name = f"{fmt.name} {what} {tokens}x{n}x{k} {short(dtype)} {backend}"
                y = ops.linear(x, weight, bias, backend=backend)
                exact = backend == "triton" or weight.macro is not None
                rounded = dense if exact else reference.dequantize(weight, dtype)
                yield Check(f"linear {name}", error_ratio(y, x, rounded.T, bias))
                got = torch.ops.hf_mxfp4.linear_grad(y, None, *ops.operands(weight), fmt.name, backend)
                yield Check(f"linear_grad {name}", error_ratio(got, y, rounded))


def check_grouped(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    groups = [([0, 0, 5, 5, 40], 45, 33, 96), ([3, 20, 21], 21, 31, 64), ([0, 0], 4, 16, 32)]
    if big:
        many = torch.multinomial(torch.rand(128), 8000, replacement=True).bincount(minlength=128).cumsum(0).tolist()
        groups += [([0, *many], 8192, 1536, 2048), ([0, *range(1, 9), *[8] * 120], 8, 1536, 2048)]
    plain, *corrected = corrections(fmt).items()
    cases = [(*group, *plain) for group in groups]
    most = ([1, 3, 6], 7, 9, 32, *corrected[-1])
    cases += [(*group, *added) for added in corrected for group in groups] if big else [most]
    for bounds, tokens, n, k, what, added in cases:
        experts = len(bounds) - 1
        weight = random_weight(experts, n, k, fmt=fmt, device=device, **added)
        offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
        for dtype in DTYPES:
            x = torch.randn(tokens, k, device=device).to(dtype).requires_grad_()
            bias = torch.randn(experts, n, device=device).to(dtype).requires_grad_()
            y = ops.grouped_linear(x, offsets, weight, bias, backend="triton")
            gradient = torch.randn_like(y)
            y.backward(gradient)
            worst, outside = [0.0] * 3, torch.ones(tokens, dtype=torch.bool, device=device)
            for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
                rows = slice(start, end)
                outside[rows] = False
                dense = reference.dequantize(weight.matrix(e), torch.float64)
                ones = gradient.new_ones(1, end - start)
                errors = (
                    error_ratio(y[rows].detach(), x[rows].detach(), dense.T, bias[e].detach()),
                    error_ratio(x.grad[rows], gradient[rows], dense),
                    error_ratio(bias.grad[e : e + 1], ones, gradient[rows]),
                )
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            if y[outside].any() or x.grad[outside].any() or y.isnan().any():
                worst[0] = float("inf")
            name = f"{fmt.name} {what} {tokens} tokens, {experts}x{n}x{k} {short(dtype)}"
            for result, error in zip(
                ("grouped_linear", "its gradient of x", "its gradient of bias"), worst, strict=True
            ):
                yield Check(f"{result} {name}", error)


def check_quantize(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Scale searches and rounded activations: the bytes of plain torch on the CPU."""
    shape = (2, 96, 2880) if big else (2, 3, 64)
    weight = torch.randn(shape) * torch.randn(shape).exp()
    cases = {"": {}, " weighted": {"channel_weights": torch.rand(shape[-1])}}
    if big and not fmt.has_global_scale:  # in the interpreter 256 factors take minutes
        cases[" macro"] = {"macro_block": "search"}
    for dtype in DTYPES if big else (torch.float32,):
        for label, more in cases.items():
            expected = reference.quantize(weight.to(dtype), fmt, **more)
            more = {name: value.to(device) if torch.is_tensor(value) else value for name, value in more.items()}
            found = quantize(weight.to(dtype).to(device), fmt, backend="triton", **more)
            pairs = [(found.packed, expected.packed), (found.scale, expected.scale)]
            pairs += [(found.macro, expected.macro)] if expected.macro is not None else []
            pairs += [(found.global_scale, expected.global_scale)] if fmt.has_global_scale else []
            yield Check(
                f"quantize{label} {short(dtype)}", sum(differing(*pair) for pair in pairs), "bytes that differ"
            )
        for x in (weight.to(dtype), weight.to(dtype).transpose(0, 1), weight[:0].to(dtype)):
            found = fake_quantize(x.to(device), fmt, "triton")
            wrong = differing(found, reference.fake_quantize(x, fmt)) if x.numel() else 0
            yield Check(f"fake_quantize {fmt.name} {short(dtype)} {list(x.shape)}", wrong, "values that differ")


def check_operators(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """`opcheck` (schema, fake tensors, autograd registration, AOT dispatch), and gradients through autograd."""
    plain, *_, most = corrections(fmt).items()
    for name, added in (plain, most) if big else (plain,):
        weight, stack = (random_weight(*shape, fmt=fmt, device=device, **added) for shape in ((33, 96), (3, 17, 64)))
        yield from check_operators_of(weight, stack, f"{fmt.name} {name}")


def check_operators_of(weight: QuantizedTensor, stack: QuantizedTensor, label: str) -> Iterator[Check]:
    """The same for one matrix `[33, 96]` and one stack `[3, 17, 64]`."""
    device, fmt = weight.packed.device, weight.format
    x = torch.randn(2, 5, 96, device=device, requires_grad=True)
    bias = torch.randn(33, device=device, requires_grad=True)
    rows, offsets = torch.randn(9, 64, device=device), torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    gradient, one, three = torch.randn(2, 5, 33, device=device), ops.operands(weight), ops.operands(stack)
    op = torch.ops.hf_mxfp4
    for name, operator, args in (
        ("dequantize", op.dequantize, (*one, fmt.name, torch.bfloat16, "triton")),
        ("linear", op.linear, (x, None, *one, bias, fmt.name, "triton")),
        ("grouped_linear", op.linear, (rows.requires_grad_(), offsets, *three, None, fmt.name, "triton")),
        ("linear_grad", op.linear_grad, (gradient, None, *one, fmt.name, "triton")),
    ):
        torch.library.opcheck(operator.default, args)  # raises what is wrong
        yield Check(f"opcheck {name} {label}", 0)
    y = ops.linear(x, weight, bias, backend="triton")
    y.backward(gradient)
    dense = reference.dequantize(weight, torch.float64)
    yield Check(f"gradient of x {label}", error_ratio(x.grad, gradient, dense))
    summed = bias.grad[None], gradient.new_ones(1, 10), gradient.reshape(10, 33)
    yield Check(f"gradient of bias {label}", error_ratio(*summed))


def check_tiles(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Numbers of tokens on both sides of every tile's size, and sums long enough to be split along K."""
    n, k = (520, 4096) if big else (40, 512)
    tokens = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 511, 600, 1023, 1024)
    plain, *_, most = corrections(fmt).items()
    for name, added in (plain, most) if big else (plain,):
        weight = random_weight(n, k, fmt=fmt, device=device, **added)
        dense = reference.dequantize(weight, torch.float64)
        for dtype in DTYPES if big else (torch.float32,):
            bias = torch.randn(n, device=device).to(dtype)
            for count in tokens if big else (1, 17, 65):
                x = torch.randn(count, k, device=device).to(dtype)
                y = ops.linear(x, weight, bias, backend="triton")
                what = f"tiles {fmt.name} {name} {count}x{n}x{k} {short(dtype)}"
                yield Check(what, error_ratio(y, x, dense.T, bias))


def check_special(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Scales far from one, NaN scales, and NaN or Inf among the activations: Inf and NaN where float64 has them."""
    n, k = (48, 512) if big else (8, 96)
    bytes_ = (0, 1, 60, 126, 133, 134, 140, 200, 240) if fmt.scale_dtype == torch.uint8 else (1, 7, 8, 119, 126)
    for dtype in (torch.bfloat16, torch.float32):
        for byte in bytes_:
            weight = random_weight(n, k, fmt=fmt, device=device)
            weight.scale.view(torch.uint8)[:: 3 if big else 1].fill_(byte)
            dense = reference.dequantize(weight, torch.float64)
            x = torch.randn(5, k, device=device)
            x = (x * 2.0 ** (127 - byte) if fmt.scale_dtype == torch.uint8 and byte > 127 else x).to(dtype)
            y = ops.linear(x, weight, backend="triton")
            yield Check(f"scale bytes {byte} {fmt.name} {short(dtype)}", error_ratio(y, x, dense.T))
        weight = random_weight(n, k, fmt=fmt, device=device)
        weight.scale.view(torch.uint8)[3, 1] = 255  # NaN in both formats
        x = torch.randn(5, k, device=device).to(dtype)
        x[1, 7], x[2, 9], x[3, 40] = float("nan"), float("inf"), float("-inf")
        got = ops.linear(x, weight, backend="triton").double()
        exact = x.double() @ reference.dequantize(weight, torch.float64).T
        kinds = [torch.where(y.isnan(), 2.0, torch.where(y.isinf(), y.sign(), 0.0)) for y in (got, exact)]
        yield Check(f"NaN and Inf {fmt.name} {short(dtype)}", differing(*kinds), "differing values")


def expert_layer(fmt: BlockFormat, device, experts: int, intermediate: int, hidden: int) -> FP4Experts:
    """Random packed experts with SiLU gates, [gate; up]."""
    options = {"format": fmt, "act_fn": F.silu, "backend": "triton", "device": device}
    layer = FP4Experts(experts, hidden, intermediate, **options)
    for name, shape in layer.shapes.items():
        layer.load_projection(name, random_weight(*shape, fmt=fmt, device=device))
    return layer


def routed(layer: FP4Experts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exact output `[M, H]` of SiLU experts in float64, and what rounding may change it by.

    Between the products gate and up are rounded (relative u each, twice that where they meet), and so is what silu
    makes of a gate g, which passes an error of g on up to 1 + |g| times.
    """
    u, out, allowed = HALF_ULP[x.dtype], 0.0, 0.0
    x, sum_ulp = x.double(), 2.0**-23
    first, down = (reference.dequantize(layer.quantized(n), torch.float64) for n in (layer.first, "down_proj"))
    for slot in range(ids.shape[1]):
        expert = ids[:, slot]
        used = (expert < layer.num_experts)[:, None]
        w, v = first[expert % layer.num_experts], down[expert % layer.num_experts]
        gate, up = torch.einsum("mh,mih->mi", x, w).chunk(2, -1)
        sums = torch.einsum("mh,mih->mi", x.abs(), w.abs()).chunk(2, -1)
        lost_gate, lost_up = (
            (x.shape[-1] + 4) * sum_ulp * part + u * y.abs() for part, y in zip(sums, (gate, up), strict=True)
        )
        h = F.silu(gate) * up
        lost = (1 + gate.abs()) * lost_gate * (up.abs() + lost_up) + F.silu(gate).abs() * lost_up + 4 * u * h.abs()
        y = torch.einsum("mi,mhi->mh", h, v)
        part = torch.einsum("mi,mhi->mh", h.abs() + lost, v.abs())
        lost_y = torch.einsum("mi,mhi->mh", lost, v.abs()) + (h.shape[-1] + 4) * sum_ulp * part + 3 * u * y.abs()
        out = out + torch.where(used, scores[:, slot, None].double() * y, 0)
        allowed = allowed + torch.where(used, scores[:, slot, None].double().abs() * lost_y, 0)
    return out, allowed + 2 * u * out.abs() + 2.0**-100


def check_experts(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """`FP4Experts.forward`: few tokens and many, and ids of experts that live elsewhere."""
    layer = expert_layer(fmt, device, *((16, 192, 512) if big else (4, 32, 64)))
    hidden = layer.shapes["down_proj"][1]
    for dtype in DTYPES if big else (torch.float32,):
        for tokens in (0, 1, 2, 3, 9, 40, 300, 700) if big else (1, 5):
            x = torch.randn(tokens, hidden, device=device).to(dtype) * 2.0**-6
            ids = torch.randint(0, layer.num_experts + 1, (tokens, 2), device=device)  # the last one is a sentinel
            scores = torch.rand(tokens, 2, device=device).to(dtype)
            found = layer(x, ids, scores)
            exact, allowed = routed(layer, x, ids, scores)
            error = ((found.double() - exact).abs() / allowed).nan_to_num(nan=float("inf"))
            yield Check(
                f"experts {fmt.name} {tokens} tokens {short(dtype)}",
                float(error.max()) if tokens and found.dtype == dtype else float(found.shape != x.shape),
            )


CHECKS: tuple[Callable, ...] = (
    check_dequantize,
    check_every_weight,
    check_linear,
    check_grouped,
    check_quantize,
    check_operators,
    check_tiles,
    check_special,
    check_experts,
)
