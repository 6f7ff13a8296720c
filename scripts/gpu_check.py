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
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update({"TRITON_INTERPRET": "1"} if "--interpret" in sys.argv else {})  # read when kernels are imported

from hf_mxfp4 import dispatch, ops, reference
from hf_mxfp4.formats import FORMATS, MACRO_BLOCK, BlockFormat, Outliers, QuantizedTensor
from hf_mxfp4.quantization import fake_quantize, quantize

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_ULP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float16: 2.0**-25}  # half of float16's smallest subnormal; the other dtypes reach down far enough
# How well a float32 sum of n products is known, for any order of adding; twice 2^-24, as tensor cores truncate.
SUM_ULP = {torch.float64: 2.0**-52}


class Check(NamedTuple):
    name: str
    error: float  # must not exceed 1
    note: str = ""


def random_weight(
    *shape: int, fmt: BlockFormat, device, macro: bool = False, outliers: float = 0.0
) -> QuantizedTensor:
    """Random codes `[..., N, K]` with scales around 2^-4; every matrix with a tensor scale of its own.

    On demand with macro factors, and with a fraction of the weights as outliers.
    """
    *lead, k = shape
    low, high = (119, 127) if fmt.scale_dtype == torch.uint8 else (24, 72)
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(low, high, (*lead, k // fmt.block_size), dtype=torch.uint8, device=device)
    global_scale = torch.rand(lead[:-1], device=device) + 0.1 if fmt.has_global_scale else None
    factors = torch.randint(0, 256, (*lead, -(-k // MACRO_BLOCK)), dtype=torch.uint8, device=device) if macro else None
    weight = QuantizedTensor(packed, fmt.scale_from_bytes(scale), global_scale, fmt, factors)
    return with_outliers(weight, torch.rand(shape, device=device) < outliers) if outliers else weight


def with_outliers(weight: QuantizedTensor, mask: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """The same weight with random outliers where `mask` `[..., N, K]` is true."""
    k = mask.shape[-1]
    rows, column = mask.reshape(-1, k).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=mask[..., 0].numel())
    outliers = Outliers(
        torch.randn(len(rows), device=mask.device).to(dtype),
        column.to(torch.uint16 if k <= 65536 else torch.int32),
        F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
    )
    codes = reference.unpack(weight.packed).masked_fill(mask, 0)
    return weight._replace(packed=reference.pack(codes), outliers=outliers)


def corrections(fmt: BlockFormat) -> dict[str, dict]:
    """What `random_weight` can add to a weight of this format, by name; nothing first, everything last."""
    outliers = {"outliers": 0.02}
    if fmt.has_global_scale:
        return {"plain": {}, "outliers": outliers}
    both = {"macro": True, **outliers}
    return {"plain": {}, "macro": {"macro": True}, "outliers": outliers, "macro and outliers": both}


def to_cpu(weight: QuantizedTensor) -> QuantizedTensor:
    outliers = weight.outliers and Outliers(*(t.cpu() for t in weight.outliers))
    tensors = {name: getattr(weight, name) for name in ("packed", "scale", "global_scale", "macro")}
    return weight._replace(**{name: t if t is None else t.cpu() for name, t in tensors.items()}, outliers=outliers)


def every_code_and_scale(fmt: BlockFormat, device, macro: bool = False) -> QuantizedTensor:
    """`[256, B]`: row s has scale byte s and every code at least once; with `macro`, each factor stands in a row."""
    codes = torch.arange(fmt.block_size, dtype=torch.uint8, device=device).remainder(16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    global_scale = torch.tensor(0.37, device=device) if fmt.has_global_scale else None
    return QuantizedTensor(
        reference.pack(codes), fmt.scale_from_bytes(scale), global_scale, fmt, 7 * scale if macro else None
    )


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


CHECKS: tuple[Callable, ...] = (
    check_dequantize,
    check_every_weight,
    check_linear,
    check_grouped,
    check_quantize,
    check_operators,
)
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
