# SPDX-License-Identifier: Apache-2.0
"""Check every kernel against the reference on this machine's GPU: one line per check, exit status 1 if any is wrong.

    python scripts/gpu_check.py                    all checks
    python scripts/gpu_check.py --json result.json
    python scripts/gpu_check.py --interpret        tiny sizes in Triton's interpreter, to try this script without a GPU

Decoded values must equal the reference bit for bit. A product's error is given as a fraction of the largest error that
float32 sums and one rounding can make; up to 1 is right.
"""

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update({"TRITON_INTERPRET": "1"} if "--interpret" in sys.argv else {})  # read when kernels are imported

from hf_mxfp4 import ops, reference
from hf_mxfp4.formats import FORMATS, BlockFormat, QuantizedTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_ULP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float16: 2.0**-25}  # half of float16's smallest subnormal; the other dtypes reach down far enough
# How well a float32 sum of n products is known, for any order of adding; twice 2^-24, as tensor cores truncate.
SUM_ULP = {torch.float64: 2.0**-52}


class Check(NamedTuple):
    name: str
    error: float  # must not exceed 1
    note: str = ""


def random_weight(*shape: int, fmt: BlockFormat, device) -> QuantizedTensor:
    """Random codes `[..., N, K]` with scales around 2^-4; every matrix with a tensor scale of its own."""
    *lead, k = shape
    low, high = (119, 127) if fmt.scale_dtype == torch.uint8 else (24, 72)
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(low, high, (*lead, k // fmt.block_size), dtype=torch.uint8, device=device)
    global_scale = torch.rand(lead[:-1], device=device) + 0.1 if fmt.has_global_scale else None
    return QuantizedTensor(packed, fmt.scale_from_bytes(scale), global_scale, fmt)


def every_code_and_scale(fmt: BlockFormat, device) -> QuantizedTensor:
    """`[256, B]`: row s has scale byte s and every code at least once."""
    codes = torch.arange(fmt.block_size, dtype=torch.uint8, device=device).remainder(16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    global_scale = torch.tensor(0.37, device=device) if fmt.has_global_scale else None
    return QuantizedTensor(reference.pack(codes), fmt.scale_from_bytes(scale), global_scale, fmt)


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """How many values are not the same bit for bit; any NaN equals any other."""
    got, expected = got.cpu(), expected.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    same = (got.view(integer) == expected.view(integer)) | (got.isnan() & expected.isnan())
    return int((~same).sum()) + (got.dtype != expected.dtype)


def error_ratio(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Largest error of `y = x [T, n] @ dense [n, m] + bias` as a fraction of what sums and one rounding may cost."""
    if y.shape != (*x.shape[:-1], dense.shape[-1]) or y.dtype != x.dtype:
        return float("inf")
    x, dense = x.to(torch.float64), dense.to(torch.float64)
    bias = torch.zeros((), dtype=torch.float64) if bias is None else bias.to(torch.float64)
    exact, magnitude = x @ dense + bias.to(x.device), x.abs() @ dense.abs() + bias.abs().to(x.device)
    allowed = magnitude * (x.shape[-1] + 4) * SUM_ULP.get(y.dtype, 2.0**-23)
    allowed = allowed + (exact.abs() + allowed) * HALF_ULP[y.dtype] + SMALLEST.get(y.dtype, 2.0**-130)
    error = (y.to(torch.float64) - exact).abs() / allowed
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dequantize(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    shapes = [(4096, 4096), (8, 1024, 768), (3, 31, 96)] if big else [(3, 31, 96)]
    weights = {"all codes, all scales": every_code_and_scale(fmt, device)}
    weights |= {"x".join(map(str, shape)): random_weight(*shape, fmt=fmt, device=device) for shape in shapes}
    for name, weight in weights.items():
        on_cpu = QuantizedTensor(*(None if t is None else t.cpu() for t in weight[:3]), fmt)
        for dtype in DTYPES:
            got = ops.dequantize(weight, dtype, backend="triton")
            expected = reference.dequantize(on_cpu, dtype)
            yield Check(f"dequantize {fmt.name} {name} {short(dtype)}", differing(got, expected), "differing values")


def check_every_weight(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """Identity matrices as x bring every decoded weight out of the fused kernels."""
    weight = every_code_and_scale(fmt, device)
    finite = reference.dequantize(weight, torch.float32).isfinite().all(-1)  # 0 * inf is NaN in a sum
    weight = QuantizedTensor(weight.packed[finite], weight.scale[finite], weight.global_scale, fmt)
    n, k = weight.shape
    for dtype in DTYPES:
        dense = (reference.dequantize(weight, torch.float32) + 0).to(dtype)  # a sum with +0 is never -0
        got = ops.linear(torch.eye(k, dtype=dtype, device=device), weight, backend="triton")
        yield Check(f"linear {fmt.name} all codes, all scales {short(dtype)}", differing(got.T, dense), "values")
        eye = torch.eye(n, dtype=dtype, device=device)
        got = torch.ops.hf_mxfp4.linear_grad(eye, None, *ops.operands(weight), fmt.name, "triton")
        yield Check(f"linear_grad {fmt.name} all codes, all scales {short(dtype)}", differing(got, dense), "values")


def check_linear(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    shapes = [(0, 33, 96), (1, 1, 32), (3, 31, 96), (17, 33, 160)]
    if big:
        shapes += [(1, 4096, 4096), (16, 12288, 4096), (40, 2880, 2880), (129, 4096, 2080), (2048, 4096, 4096)]
    for tokens, n, k in shapes:
        weight = random_weight(n, k, fmt=fmt, device=device)
        dense = reference.dequantize(weight, torch.float64)
        for dtype in DTYPES:
            x = torch.randn(k, tokens, device=device).to(dtype).T  # columns first: not contiguous
            bias = torch.randn(n, device=device).to(dtype)
            for backend in ("triton", "auto") if tokens >= ops.FUSED_TOKENS else ("triton",):
                name = f"{fmt.name} {tokens}x{n}x{k} {short(dtype)} {backend}"
                y = ops.linear(x, weight, bias, backend=backend)
                rounded = dense if backend == "triton" else reference.dequantize(weight, dtype)
                yield Check(f"linear {name}", error_ratio(y, x, rounded.T, bias))
                got = torch.ops.hf_mxfp4.linear_grad(y, None, *ops.operands(weight), fmt.name, backend)
                yield Check(f"linear_grad {name}", error_ratio(got, y, rounded))


def check_grouped(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    cases = [([0, 0, 5, 5, 40], 45, 33, 96), ([3, 20, 21], 21, 31, 64), ([0, 0], 4, 16, 32)]
    if big:
        many = torch.multinomial(torch.rand(128), 8000, replacement=True).bincount(minlength=128).cumsum(0).tolist()
        cases += [([0, *many], 8192, 1536, 2048), ([0, *range(1, 9), *[8] * 120], 8, 1536, 2048)]
    for bounds, tokens, n, k in cases:
        experts = len(bounds) - 1
        weight = random_weight(experts, n, k, fmt=fmt, device=device)
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
                one = QuantizedTensor(*(None if t is None else t[e] for t in weight[:3]), fmt)
                dense, ones = reference.dequantize(one, torch.float64), gradient.new_ones(1, end - start)
                errors = (
                    error_ratio(y[rows].detach(), x[rows].detach(), dense.T, bias[e].detach()),
                    error_ratio(x.grad[rows], gradient[rows], dense),
                    error_ratio(bias.grad[e : e + 1], ones, gradient[rows]),
                )
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            if y[outside].any() or x.grad[outside].any() or y.isnan().any():
                worst[0] = float("inf")
            name = f"{fmt.name} {tokens} tokens, {experts}x{n}x{k} {short(dtype)}"
            for what, error in zip(
                ("grouped_linear", "its gradient of x", "its gradient of bias"), worst, strict=True
            ):
                yield Check(f"{what} {name}", error)


def check_operators(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """`opcheck` (schema, fake tensors, autograd registration, AOT dispatch), and gradients through autograd."""
    weight, stack = random_weight(33, 96, fmt=fmt, device=device), random_weight(3, 17, 64, fmt=fmt, device=device)
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
        yield Check(f"opcheck {name} {fmt.name}", 0)
    y = ops.linear(x, weight, bias, backend="triton")
    y.backward(gradient)
    dense = reference.dequantize(weight, torch.float64)
    yield Check(f"gradient of x {fmt.name}", error_ratio(x.grad, gradient, dense))
    summed = bias.grad[None], gradient.new_ones(1, 10), gradient.reshape(10, 33)
    yield Check(f"gradient of bias {fmt.name}", error_ratio(*summed))


def check_compile(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    weight = random_weight(64, 128, fmt=fmt, device=device)
    dense = reference.dequantize(weight, torch.float64)
    compiled = torch.compile(lambda x: ops.linear(x.sin(), weight, backend="triton"), fullgraph=True, dynamic=True)
    for tokens in (3, 40):
        x = torch.randn(tokens, 128, device=device, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        expected = (torch.ones_like(y).double() @ dense) * x.detach().double().cos()
        yield Check(f"compiled linear {fmt.name} {tokens} tokens", error_ratio(y.detach(), x.detach().sin(), dense.T))
        close = torch.allclose(x.grad.double(), expected, rtol=1e-4, atol=1e-4)  # sin and cos are inductor's own
        yield Check(f"compiled gradient {fmt.name} {tokens} tokens", 0 if close else float("inf"))


def check_graph(fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    """A captured graph must give what a direct call gives, and no call may wait for the GPU."""
    weight, stack = random_weight(256, 512, fmt=fmt, device=device), random_weight(4, 64, 512, fmt=fmt, device=device)
    x = torch.randn(8, 512, device=device, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 1, 1, 5, 8], dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        return torch.cat((ops.linear(x, weight), ops.grouped_linear(x, offsets, stack)), -1)

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
        ops.grouped_linear(x, offsets, stack).sum().backward()
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


CHECKS: tuple[Callable, ...] = (check_dequantize, check_every_weight, check_linear, check_grouped, check_operators)
GPU_CHECKS: tuple[Callable, ...] = (check_compile, check_graph, check_addresses)


def run(check: Callable, fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    try:
        yield from check(fmt, device, big)
    except Exception as error:
        traceback.print_exc()
        yield Check(f"{check.__name__} {fmt.name}", float("inf"), f"{type(error).__name__}: {str(error)[:200]}")


def environment(device) -> dict[str, str]:
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "interpreter",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_gpu else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write device, versions and results")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, on the CPU")
    options = parser.parse_args()
    if not options.interpret and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU (CUDA or ROCm). --interpret tries the checks on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.interpret else torch.device("cuda", torch.cuda.current_device())
    # cuBLAS may otherwise add up partial sums in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.manual_seed(0)
    report = {**environment(device), "checks": []}
    print("  ".join(f"{key} {value}" for key, value in report.items() if key != "checks"))
    for check in CHECKS if options.interpret else CHECKS + GPU_CHECKS:
        for fmt in FORMATS.values():
            for name, error, note in run(check, fmt, device, big=not options.interpret):
                passed = error <= 1 if not note.endswith("values") else error == 0
                report["checks"].append({"name": name, "passed": passed, "error": str(error), "note": note})
                print(f"{'PASS' if passed else 'FAIL'}  {error:9.3g}  {name}{note and f'  ({note})'}", flush=True)
    failed = sum(not check["passed"] for check in report["checks"])
    print(f"{len(report['checks'])} checks, {failed} failed")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
