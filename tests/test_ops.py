# SPDX-License-Identifier: Apache-2.0
"""The operators: checks, gradients, autocast, compilation, and the plain torch implementation."""

import re
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad
from torch.nn import functional as F

from exactness import differing, error_ratio, random_weight
from hf_mxfp4 import dispatch, ops, reference
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, QuantizedTensor

both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
BOUNDS = [1, 4, 4, 9]  # rows 0 and 9 belong to no expert, the second expert has none


def weight_of(*shape, fmt=NVFP4) -> QuantizedTensor:
    return random_weight(*shape, fmt=fmt, device="cpu")


def offsets_of(bounds=BOUNDS) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def dense_grouped(x, offsets, dense, bias):
    """The same from dense weights `[E, N, K]`, with torch's own operations."""
    out = x.new_zeros(x.shape[0], dense.shape[1])
    for e, (start, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        out[start:end] = F.linear(x[start:end], dense[e], None if bias is None else bias[e])
    return out


# --- values ----------------------------------------------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_linear_is_f_linear(fmt, dtype, monkeypatch):
    """Equal to `F.linear` of the dequantized weight, in chunks of any size; the last one is not full."""
    weight, bias = weight_of(50, 96, fmt=fmt), torch.randn(50, dtype=dtype)
    dense = reference.dequantize(weight, dtype)
    for shape in ((7, 96), (2, 3, 96), (96,), (0, 96), (2, 0, 96)):
        x = torch.randn(shape, dtype=dtype)
        for chunk in (1, 96 * 7, 1 << 20):
            monkeypatch.setitem(dispatch.CHUNK_WEIGHTS, "cpu", chunk)
            y = ops.linear(x, weight, bias, "torch")
            assert y.shape == (*shape[:-1], 50)
            assert error_ratio(y.view(-1, 50), x.view(-1, 96), dense.T, bias) <= 1
            gradient = torch.ops.hf_mxfp4.linear_grad(y, None, *ops.operands(weight), fmt.name, "torch")
            assert error_ratio(gradient.view(-1, 96), y.view(-1, 50), dense) <= 1
    assert torch.equal(ops.linear(x, weight), ops.linear(x, weight, torch.zeros(50, dtype=dtype)))


@both_formats
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_dequantize_is_the_reference(fmt, dtype):
    weight = weight_of(2, 5, 64, fmt=fmt)
    assert differing(ops.dequantize(weight, dtype), reference.dequantize(weight, dtype)) == 0


def test_global_scale_shapes():
    """A matrix's tensor scale may be `[]` or, as checkpoints store it, `[1]`."""
    weight, x = weight_of(8, 32), torch.randn(3, 32)
    as_stored = weight._replace(global_scale=weight.global_scale.view(1))
    assert torch.equal(ops.linear(x, weight), ops.linear(x, as_stored))
    assert torch.equal(ops.dequantize(weight), ops.dequantize(as_stored))


@both_formats
def test_every_scale_multiplies(fmt):
    """Also a tensor scale on a format that has none of its own."""
    weight, x = weight_of(8, 64, fmt=fmt)._replace(global_scale=torch.tensor(0.25)), torch.randn(3, 64)
    assert torch.equal(ops.linear(x, weight), ops.linear(x, weight._replace(global_scale=None)) * 0.25)


def test_strides():
    weight, base = weight_of(20, 64), torch.randn(80, 130)
    for x in (base[:9, :64], base[::7, 3:67], base.T[:9, :64], base[:9, :128:2], base[0, :64].expand(9, 64)):
        torch.testing.assert_close(ops.linear(x, weight), ops.linear(x.contiguous(), weight))


@both_formats
def test_rows_do_not_see_each_other(fmt):
    """A row's result depends on the row alone, whatever its batch mates hold."""
    weight, x = weight_of(24, 96, fmt=fmt), torch.randn(6, 96)
    other = x.clone()
    other[[0, 1, 2, 4, 5]] = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 0.0])[:, None]
    assert torch.equal(ops.linear(x, weight)[3], ops.linear(other, weight)[3])


@both_formats
@pytest.mark.parametrize("bounds", [BOUNDS, [0, 0, 0, 0], [3, 3, 3, 3], [0, 2, 7, 10]])
def test_grouped(fmt, bounds):
    weight, bias, x = weight_of(3, 17, 64, fmt=fmt), torch.randn(3, 17), torch.randn(10, 64)
    offsets = offsets_of(bounds)
    dense = reference.dequantize(weight, torch.float32)
    for b in (bias, None):
        torch.testing.assert_close(ops.grouped_linear(x, offsets, weight, b), dense_grouped(x, offsets, dense, b))
    assert ops.grouped_linear(x[:0], offsets_of([0] * 4), weight, bias).shape == (0, 17)


def test_flushed_subnormals_change_nothing():
    """Under `set_flush_denormal`, which servers use, results stay the same; float16 keeps its subnormals."""
    x = torch.randn(5, 96)
    results = []
    for flush in (False, True):
        torch.manual_seed(1)
        try:
            if not torch.set_flush_denormal(flush):
                pytest.skip("this CPU cannot flush subnormals")
            for fmt in FORMATS.values():
                weight = weight_of(40, 96, fmt=fmt)
                small = (40, 107) if fmt is MXFP4 else (1, 3)  # 2^-87 and 2^-20; E4M3's own subnormals
                for row, byte in enumerate(small):
                    weight.scale.view(torch.uint8)[row::3] = byte
                y = [ops.linear(x.to(dtype), weight) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
                results.append([*y, ops.dequantize(weight), ops.dequantize(weight, torch.float16)])
        finally:
            torch.set_flush_denormal(False)
    for plain, flushed in zip(sum(results[:2], []), sum(results[2:], []), strict=True):
        assert torch.equal(plain, flushed)


# --- gradients -------------------------------------------------------------------------------------------------------


@both_formats
def test_gradients(fmt):
    """Those of `F.linear` with the dequantized weight; nothing flows to the packed tensors."""
    weight = weight_of(50, 96, fmt=fmt)
    dense = reference.dequantize(weight, torch.float32)
    x, bias = torch.randn(2, 5, 96), torch.randn(50)
    gradients = []
    for function, w, rest in ((ops.linear, weight, ["torch"]), (F.linear, dense, [])):  # the same sums
        own_x, own_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
        function(own_x, w, own_bias, *rest).sin().sum().backward()
        gradients.append((own_x.grad, own_bias.grad))
    torch.testing.assert_close(*gradients)
    assert not any(t.requires_grad for t in weight[:3] if t is not None)


@both_formats
def test_grouped_gradients(fmt):
    weight = weight_of(3, 17, 64, fmt=fmt)
    dense = reference.dequantize(weight, torch.float32)
    x, bias = torch.randn(10, 64), torch.randn(3, 17)
    gradients = []
    for function, w, rest in ((ops.grouped_linear, weight, ["torch"]), (dense_grouped, dense, [])):
        own_x, own_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
        function(own_x, offsets_of(), w, own_bias, *rest).sin().sum().backward()
        gradients.append((own_x.grad, own_bias.grad))
    torch.testing.assert_close(*gradients)


@both_formats
def test_gradcheck(fmt):
    weight, stack = weight_of(5, 32, fmt=fmt), weight_of(3, 5, 32, fmt=fmt)
    x, bias = torch.randn(10, 32, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    x.requires_grad_(), bias.requires_grad_()
    fast = {"fast_mode": True}
    assert torch.autograd.gradcheck(lambda x, b: ops.linear(x, weight, b), (x, bias[0]), **fast)
    assert torch.autograd.gradcheck(lambda x, b: ops.grouped_linear(x, offsets_of(), stack, b), (x, bias), **fast)
    assert torch.autograd.gradgradcheck(lambda x: ops.linear(x, weight).sin(), (x,), **fast)


def test_forward_mode_is_refused():
    """It is not there, and a tangent must not be lost in silence, with or without gradients."""
    weight, stack, x = weight_of(5, 32), weight_of(3, 5, 32), torch.randn(10, 32)
    for call in (lambda x: ops.linear(x, weight), lambda x: ops.grouped_linear(x, offsets_of(), stack)):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="linear has no forward-mode"):
            call(forward_ad.make_dual(x, x))
        with pytest.raises(RuntimeError):  # torch's own message, about functorch
            torch.func.jvp(call, (x,), (x,))


def test_bfloat16_gradients_are_not_summed_in_bfloat16():
    """Chunked or not, each sum of the gradient is one product; the bias's is formed in float32."""
    weight, x = weight_of(512, 64), torch.randn(300, 64, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(512, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.rand(300, 512).to(torch.bfloat16)
    ops.linear(x, weight, bias).backward(gradient)
    assert error_ratio(x.grad, gradient, reference.dequantize(weight, torch.bfloat16)) <= 1
    assert error_ratio(bias.grad[None], gradient.new_ones(1, 300), gradient) <= 1
    stacked = torch.zeros(1, 512, dtype=torch.bfloat16, requires_grad=True)
    one = QuantizedTensor(*(t[None] for t in weight[:3]), weight.format)
    ops.grouped_linear(x, offsets_of([0, 300]), one, stacked).backward(gradient)
    assert error_ratio(stacked.grad, gradient.new_ones(1, 300), gradient) <= 1


def test_inference_mode_leaves_nothing_behind():
    weight, x = weight_of(20, 64), torch.randn(3, 64)
    with torch.inference_mode():
        first = ops.linear(x, weight)
    x.requires_grad_()
    y = ops.linear(x, weight)
    y.sum().backward()
    assert torch.equal(first, y) and x.grad.isfinite().all()


def test_saved_for_backward():
    """The packed weight itself is kept, not a copy, and neither x nor a decoded weight."""
    weight, x = weight_of(64, 64), torch.randn(7, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.linear(x, weight, torch.randn(64))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in weight[:3]}


# --- autocast, compilation, opcheck ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """x and bias are cast as `F.linear` casts them, scales are not; float64 is left alone."""
    weight, x, bias = weight_of(20, 64), torch.randn(3, 64, requires_grad=True), torch.randn(20, requires_grad=True)
    stack, rows = weight_of(2, 20, 64), torch.randn(3, 64)
    with torch.autocast("cpu", dtype):
        y = ops.linear(x, weight, bias)
        grouped = ops.grouped_linear(rows, offsets_of([0, 1, 3]), stack)
        double = ops.linear(x.double(), weight)
        direct = torch.ops.hf_mxfp4.linear(x, None, *ops.operands(weight), None, "nvfp4", "auto")
    assert y.dtype == grouped.dtype == dtype and double.dtype == torch.float64
    assert torch.equal(y, ops.linear(x.to(dtype), weight, bias.to(dtype)))
    assert torch.equal(direct, ops.linear(x, weight))  # the operator itself takes dtypes as they come
    y.float().sum().backward()
    assert x.grad.dtype == bias.grad.dtype == torch.float32


def compile_cases(fmt):
    weight, stack = weight_of(33, 96, fmt=fmt), weight_of(3, 17, 96, fmt=fmt)
    bias = torch.randn(33, requires_grad=True)

    def dense(x):
        return ops.linear(x.sin(), weight, bias).sin()

    def grouped(x, offsets):
        return ops.grouped_linear(x.sin(), offsets, stack).sin()

    return dense, grouped


@both_formats
def test_compile(fmt):
    """One graph, no break, no new graph for another number of tokens or other offsets; gradients too."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for function in compile_cases(fmt):
        torch._dynamo.reset()
        counter.frame_count = 0
        compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
        for tokens in (12, 10, 31):
            rest = (offsets_of([0, 1, 3, tokens - 2]),) if function.__name__ == "grouped" else ()
            results = []
            x = torch.randn(tokens, 96)
            for run in (compiled, function):
                own = x.clone().requires_grad_()
                y = run(own, *rest)
                y.sum().backward()
                results.append((y.detach(), own.grad))
            torch.testing.assert_close(*results)
        assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor():
    dense, _ = compile_cases(NVFP4)
    torch._dynamo.reset()
    x = torch.randn(5, 96, requires_grad=True)
    y = torch.compile(dense, fullgraph=True)(x)
    torch.testing.assert_close(y, dense(x))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_compile_under_autocast():
    weight, x = weight_of(20, 64), torch.randn(3, 64)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.linear(x, weight)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), function(x)) and compiled(x).dtype == torch.bfloat16


@both_formats
def test_opcheck(fmt):
    """torch's own tests of an operator: schema, autograd registration, fake tensors, AOT dispatch."""
    op, one, three = torch.ops.hf_mxfp4, weight_of(33, 96, fmt=fmt), weight_of(3, 17, 64, fmt=fmt)
    x, bias = torch.randn(2, 3, 96, requires_grad=True), torch.randn(33, requires_grad=True)
    rows, stacked = torch.randn(10, 64, requires_grad=True), torch.randn(3, 17, requires_grad=True)
    rest = fmt.name, "auto"
    for args in (
        (x, None, *ops.operands(one), bias, *rest),
        (x.detach(), None, *ops.operands(one), None, *rest),
        (rows, offsets_of(), *ops.operands(three), stacked, *rest),
    ):
        torch.library.opcheck(op.linear.default, args)
    for args in (
        (torch.randn(2, 3, 33, requires_grad=True), None, *ops.operands(one), *rest),
        (torch.randn(10, 17), offsets_of(), *ops.operands(three), *rest),
    ):
        torch.library.opcheck(op.linear_grad.default, args)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(op.dequantize.default, (*ops.operands(three), fmt.name, dtype, "auto"))


def test_meta_device():
    """Shapes without values, as model loading uses them."""
    weight = weight_of(3, 20, 64)
    meta = QuantizedTensor(*(t.to("meta") for t in weight[:3]), weight.format)
    x, offsets = torch.empty(5, 64, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    assert ops.linear(x, meta.matrix(0)).shape == (5, 20)
    assert ops.grouped_linear(x, offsets, meta).shape == (5, 20)
    assert ops.dequantize(meta).shape == (3, 20, 64) and ops.dequantize(meta).dtype == torch.bfloat16


# --- errors ----------------------------------------------------------------------------------------------------------

WEIGHT, STACK, X = weight_of(20, 64), weight_of(2, 20, 64), torch.ones(3, 64)
MX, BYTES = weight_of(20, 64, fmt=MXFP4), WEIGHT.scale.view(torch.uint8)

WRONG = {
    "in_features": (lambda: ops.linear(X[:, :32], WEIGHT), ValueError, "x: shape (3, 32), expected [..., 64]"),
    "0-d x": (lambda: ops.linear(torch.ones(()), WEIGHT), ValueError, "x: shape ()"),
    "integer x": (lambda: ops.linear(X.long(), WEIGHT), TypeError, "x: dtype torch.int64, expected torch.float32 or"),
    "bias shape": (lambda: ops.linear(X, WEIGHT, torch.ones(64)), ValueError, "bias: shape (64,), expected (20,)"),
    "bias dtype": (lambda: ops.linear(X, WEIGHT, torch.ones(20).int()), TypeError, "bias: dtype torch.int32"),
    "a stack": (lambda: ops.linear(X, STACK), ValueError, "packed: shape (2, 20, 32), expected 2 dimensions"),
    "no stack": (lambda: ops.grouped_linear(X, offsets_of([0, 3]), WEIGHT), ValueError, "expected 3 dimensions"),
    "packed dtype": (
        lambda: ops.linear(X, WEIGHT._replace(packed=WEIGHT.packed.int())),
        TypeError,
        "packed: dtype torch.int32, expected torch.uint8",
    ),
    "scale dtype": (
        lambda: ops.linear(X, WEIGHT._replace(scale=BYTES)),
        TypeError,
        "scale: dtype torch.uint8, expected torch.float8_e4m3fn for nvfp4",
    ),
    "scale shape": (
        lambda: ops.linear(X, WEIGHT._replace(scale=WEIGHT.scale[:, :2])),
        ValueError,
        "scale: shape (20, 2), expected (20, 4): one for 16 weights",
    ),
    "half a block": (
        lambda: ops.linear(X, MX._replace(packed=MX.packed[:, :24])),
        ValueError,
        "48 weights a row are not a multiple of mxfp4's block size 32",
    ),
    "global_scale dtype": (
        lambda: ops.linear(X, WEIGHT._replace(global_scale=torch.ones((), dtype=torch.bfloat16))),
        TypeError,
        "global_scale: dtype torch.bfloat16, expected torch.float32",
    ),
    "global_scale shape": (
        lambda: ops.dequantize(STACK._replace(global_scale=torch.ones(1))),
        ValueError,
        "global_scale: shape (1,), expected (2,): one for each matrix",
    ),
    "device": (
        lambda: ops.linear(X.to("meta"), WEIGHT),
        RuntimeError,
        "x is on meta, packed is on cpu",
    ),
    "format": (
        lambda: torch.ops.hf_mxfp4.linear(X, None, *ops.operands(WEIGHT), None, "fp4", "auto"),
        ValueError,
        "format='fp4': expected one of mxfp4, nvfp4",
    ),
    "backend": (lambda: ops.linear(X, WEIGHT, backend="cuda"), ValueError, "expected one of auto, triton, torch"),
    "output dtype": (lambda: ops.dequantize(WEIGHT, torch.int8), TypeError, "output: dtype torch.int8"),
    "offsets dtype": (
        lambda: ops.grouped_linear(X, offsets_of([0, 1, 3]).long(), STACK),
        TypeError,
        "offsets: dtype torch.int64, expected torch.int32",
    ),
    "offsets shape": (lambda: ops.grouped_linear(X, offsets_of([0, 3]), STACK), ValueError, "one more than experts"),
    "grouped x": (lambda: ops.grouped_linear(X[None], offsets_of([0, 1, 3]), STACK), ValueError, "expected [T, 64]"),
    "falling offsets": (
        lambda: ops.grouped_linear(X, offsets_of([0, 2, 1]), STACK),
        ValueError,
        "[0, 2, 1] must rise",
    ),
    "offsets too large": (
        lambda: ops.grouped_linear(X, offsets_of([0, 2, 4]), STACK),
        ValueError,
        "number of rows, 3",
    ),
    "float64 kernel": (
        lambda: ops.linear(X.double(), WEIGHT, backend="triton"),
        RuntimeError,
        'float64 has no kernel. backend="torch" works on every device',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(case):
    call, error, text = WRONG[case]
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_wrong_inputs_while_tracing():
    """The same errors from fake tensors, before anything runs."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="expected"):
        ops.linear(torch.empty(3, 32), WEIGHT)


# --- where kernels cannot run ----------------------------------------------------------------------------------------


@pytest.fixture
def fresh_answers():
    """What was found out about devices, and which warnings were given, is forgotten before and after."""
    caches = dispatch._why_no_kernels, dispatch._warn_slow
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_without_triton():
    """CPU works and never asks for triton; who demands kernels is told what is missing."""
    code = """
        import sys
        sys.modules["triton"] = None  # any import of it fails
        import torch
        from hf_mxfp4 import FP4Experts, ops, quantization, reference
        weight, stack = (reference.quantize(torch.randn(shape), "nvfp4", "amax") for shape in ((16, 64), (1, 16, 64)))
        x = torch.randn(3, 64, requires_grad=True)
        ops.linear(x, weight).sum().backward()
        ops.grouped_linear(x, torch.tensor([0, 3], dtype=torch.int32), stack).sum().backward()
        layer = FP4Experts(1, 64, 16, has_gate=False, act_fn=torch.relu)
        layer.load_projection("up_proj", stack)
        layer.load_projection("down_proj", reference.quantize(torch.randn(1, 64, 16), "nvfp4", "amax"))
        layer(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).sum().backward()
        quantization.fake_quantize(x, "mxfp4").sum().backward()
        quantization.quantize(x.detach(), "mxfp4")
        try:
            ops.linear(x, weight, backend="triton")
        except RuntimeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "triton cannot be imported" in done.stdout and 'backend="torch" works on every device' in done.stdout


def test_kernels_on_cpu_need_the_interpreter(monkeypatch, fresh_answers):
    decode = pytest.importorskip("hf_mxfp4.kernels.decode")
    monkeypatch.setattr(decode, "INTERPRET", False)
    with pytest.raises(RuntimeError, match="CPU tensors need TRITON_INTERPRET=1 set before triton is imported"):
        ops.linear(X, WEIGHT, backend="triton")


@pytest.mark.parametrize(
    "capability, hip, usable", [((7, 5), None, False), ((8, 0), None, True), ((9, 4), "6.4", True)]
)
def test_old_gpus(monkeypatch, fresh_answers, capability, hip, usable):
    """Turing has no bfloat16: "auto" says once why it takes the slow way, "triton" refuses."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [dispatch.use_kernels(device, torch.bfloat16, "auto") for _ in range(3)] == [usable] * 3
        assert not dispatch.use_kernels(device, torch.float64, "auto")
        assert not dispatch.use_kernels(device, torch.bfloat16, "torch")
    assert len(caught) == (not usable)
    if not usable:
        assert "Tesla T4 has compute capability 7.5, the kernels need 8.0" in str(caught[0].message)
        with pytest.raises(RuntimeError, match=r"7\.5"):
            dispatch.use_kernels(device, torch.bfloat16, "triton")
