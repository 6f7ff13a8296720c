# SPDX-License-Identifier: Apache-2.0
"""The operators for weights with macro factors and outliers: in plain torch, and in kernels (interpreted on CPU).

`error_ratio` is the distance to the float64 product, which is `reference.linear` before it rounds, as a fraction of
what sums in float32 and one rounding to the result's dtype may cost.
"""

import importlib.util
import re
import shutil

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F

from exactness import corrections, differing, error_ratio, random_weight, with_outliers
from hf_mxfp4 import dispatch, ops, reference
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, Outliers, QuantizedTensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {f"{fmt.name} {name}": (fmt, added) for fmt in FORMATS.values() for name, added in corrections(fmt).items()}
CASES = {name: case for name, case in CASES.items() if case[1]}
EVERYTHING = {name: CASES[name] for name in ("mxfp4 macro and outliers", "nvfp4 outliers")}
BOUNDS = [1, 4, 4, 9]  # rows 0 and 9 belong to no expert, the second expert has none

every_case = pytest.mark.parametrize("case", CASES)
everything = pytest.mark.parametrize("case", EVERYTHING)
BACKENDS = ["torch", "triton"] if importlib.util.find_spec("triton") else ["torch"]
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def weight_of(*shape: int, case: str) -> QuantizedTensor:
    """A weight with the parts of `case`; its first row has many outliers, its second none."""
    fmt, added = CASES[case]
    weight = random_weight(*shape, fmt=fmt, device=DEVICE, macro=added.get("macro", False))
    if "outliers" not in added:
        return weight
    mask = torch.rand(shape, device=DEVICE) < 0.02
    mask[..., 0, :] = torch.rand(shape[-1], device=DEVICE) < 0.4
    mask[..., 1:2, :] = False
    return with_outliers(weight, mask)


def offsets_of(bounds=BOUNDS) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=DEVICE)


def linear_grad(grad, weight, backend, offsets=None) -> torch.Tensor:
    return torch.ops.hf_mxfp4.linear_grad(grad, offsets, *ops.operands(weight), weight.format.name, backend)


def multiplied(weight: QuantizedTensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The dense weight that products are made of: rounded to x's dtype only in plain torch without macro factors."""
    exact = backend == "triton" or weight.macro is not None
    return reference.dequantize(weight, torch.float64 if exact else dtype)


# --- decoding --------------------------------------------------------------------------------------------------------


@every_case
@both_backends
@pytest.mark.parametrize("shape", [(4, 32), (5, 288), (2, 3, 160), (1, 2, 2, 96), (0, 64)])
def test_dequantize(case, backend, shape):
    """Bit for bit the reference: rows with none and with many outliers, a short last macro-block, stacks."""
    weight = weight_of(*shape, case=case) if shape[0] else random_weight(*shape, fmt=CASES[case][0], device=DEVICE)
    for dtype in ops.DTYPES[: 3 if backend == "triton" else 4]:
        assert differing(ops.dequantize(weight, dtype, backend), reference.dequantize(weight, dtype)) == 0


@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outlier_dtypes(dtype, backend):
    """Outliers keep their own dtype until the result is rounded; float32 ones may exceed it."""
    weight = random_weight(4, 64, fmt=NVFP4, device=DEVICE)
    weight = with_outliers(weight, torch.rand(4, 64, device=DEVICE) < 0.1, dtype)
    weight.outliers.values[:2] = torch.tensor([65504.0, 1e-7]).to(dtype)
    for out in (torch.bfloat16, torch.float16, torch.float32):
        assert differing(ops.dequantize(weight, out, backend), reference.dequantize(weight, out)) == 0


@both_backends
def test_no_outliers_at_all(backend):
    """Empty lists of outliers are legal and change nothing."""
    plain = random_weight(5, 96, fmt=NVFP4, device=DEVICE)
    weight = with_outliers(plain, torch.zeros(5, 96, dtype=torch.bool, device=DEVICE))
    assert weight.outliers.values.numel() == 0
    x = torch.randn(3, 96, device=DEVICE)
    assert torch.equal(ops.dequantize(weight, backend=backend), ops.dequantize(plain, backend=backend))
    assert torch.equal(ops.linear(x, weight, None, backend), ops.linear(x, plain, None, backend))
    y = ops.linear(x, plain, None, backend)
    assert torch.equal(linear_grad(y, weight, backend), linear_grad(y, plain, backend))


@pytest.mark.parametrize("k", [40_000, 65_568])
def test_large_columns(k):
    """uint16 columns above 32767 are not taken for negative ones, nor int32 columns above 65535 cut."""
    weight = random_weight(2, k, fmt=MXFP4, device=DEVICE, macro=True)
    mask = torch.zeros(2, k, dtype=torch.bool, device=DEVICE)
    mask[0, [0, 32767, 32768, k - 1]] = True
    weight = with_outliers(weight, mask)
    assert weight.outliers.columns.dtype == (torch.uint16 if k < 65536 else torch.int32)
    dense = reference.dequantize(weight, torch.float32)
    assert torch.equal(dense[mask], weight.outliers.values.float())
    assert differing(ops.dequantize(weight, torch.float32), dense) == 0
    x, gradient = torch.randn(1, k, device=DEVICE), torch.randn(1, 2, device=DEVICE)
    assert error_ratio(ops.linear(x, weight), x, dense.T) <= 1
    assert error_ratio(linear_grad(gradient, weight, "auto"), gradient, dense) <= 1


# --- products --------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_chunks(case, dtype, monkeypatch):
    """Plain torch, in chunks of any size: of rows one way, of columns the other; the last one is not full."""
    weight, bias = weight_of(50, 288, case=case), torch.randn(50, dtype=dtype, device=DEVICE)
    dense = multiplied(weight, dtype, "torch")
    for shape in ((7, 288), (2, 3, 288), (288,), (0, 288)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        for chunk in (1, 50 * 100, 1 << 20):  # 100 columns are three blocks and no macro-block
            monkeypatch.setitem(dispatch.CHUNK_WEIGHTS, DEVICE.type, chunk)
            y = ops.linear(x, weight, bias, "torch")
            assert error_ratio(y.view(-1, 50), x.view(-1, 288), dense.T, bias) <= 1
            gradient = linear_grad(y, weight, "torch")
            assert error_ratio(gradient.view(-1, 288), y.view(-1, 50), dense) <= 1


@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_macro_factors_are_not_rounded(dtype, backend):
    """259/256 - 1: in bfloat16 the first weight would be 258/256 or 260/256. float16 meets scales beyond its range."""
    weight = random_weight(2, 256, fmt=MXFP4, device=DEVICE, macro=True)
    weight.packed[:], weight.scale[:], weight.macro[:] = 0x22, 127 + 20, torch.tensor([[3, 0], [0, 3]])  # codes of 1
    x = torch.zeros(3, 256, dtype=dtype, device=DEVICE)
    x[:, 0], x[:, 128] = 2.0**-20, -(2.0**-20)
    expected = torch.tensor([3 / 256, -3 / 256], dtype=dtype, device=DEVICE)
    assert torch.equal(ops.linear(x, weight, None, backend), expected.expand(3, 2))
    gradient = linear_grad(x[:, [0, 128]], weight, backend)
    assert torch.equal(gradient, expected.repeat_interleave(128).expand(3, 256))


@everything
@both_backends
def test_grouped(case, backend):
    """Experts, some without tokens; rows of none are zeros. Results and gradients."""
    weight = weight_of(3, 4, 160, case=case)
    x, bias = torch.randn(10, 160, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    y = ops.grouped_linear(x, offsets_of(), weight, bias, backend)
    gradient = linear_grad(y, weight, backend, offsets_of())
    for e, (start, end) in enumerate(zip(BOUNDS, BOUNDS[1:], strict=False)):
        dense, rows = reference.dequantize(weight.matrix(e), torch.float64), slice(start, end)
        assert error_ratio(y[rows], x[rows], dense.T, bias[e]) <= 1
        assert error_ratio(gradient[rows], y[rows], dense) <= 1
    for result in (y, gradient):
        assert not result[[0, 9]].any()


@everything
@both_backends
def test_parts_of_a_matrix(case, backend):
    """Rows of a matrix and matrices of a stack, whose outliers' offsets are views that do not start at 0."""
    weight = weight_of(2, 6, 160, case=case)
    part, dense = weight.matrix(1).rows(slice(2, 5)), reference.dequantize(weight, torch.float32)[1, 2:5]
    assert part.outliers.offsets[0] > 0
    assert differing(ops.dequantize(part, torch.float32, backend), dense) == 0
    x = torch.randn(2, 160, device=DEVICE)
    y = ops.linear(x, part, None, backend)
    assert error_ratio(y, x, dense.T) <= 1
    assert error_ratio(linear_grad(y, part, backend), y, dense) <= 1


@everything
def test_strides(case):
    """Parts out of larger tensors, not dense, are read as what they are."""
    weight = weight_of(6, 160, case=case)
    values, columns, offsets = weight.outliers
    apart = Outliers(values.repeat_interleave(2)[::2], columns.int().repeat_interleave(2)[::2], offsets[:, None][:, 0])
    macro = None if weight.macro is None else weight.macro.T.contiguous().T
    strided, x = weight._replace(macro=macro, outliers=apart), torch.randn(2, 160, device=DEVICE)
    for backend in ("torch", "triton") if pytest.importorskip("triton") else ():
        y = ops.linear(x, weight, None, backend)
        assert torch.equal(ops.linear(x, strided, None, backend), y)
        assert torch.equal(linear_grad(y, strided, backend), linear_grad(y, weight, backend))
        assert torch.equal(ops.dequantize(strided, backend=backend), ops.dequantize(weight, backend=backend))


@everything
def test_many_tokens_on_a_gpu(case, monkeypatch):
    """With "auto" they go through chunks that a kernel decodes, but not past macro factors."""
    gemm = pytest.importorskip("hf_mxfp4.kernels.gemm")
    monkeypatch.setattr(dispatch, "use_kernels", lambda *_: True)
    monkeypatch.setattr(dispatch, "FUSED_TOKENS", 2)
    monkeypatch.setitem(dispatch.CHUNK_WEIGHTS, DEVICE.type, 6 * 64)
    weight, x = weight_of(6, 160, case=case), torch.randn(3, 160, device=DEVICE)
    fused = []
    monkeypatch.setattr(gemm, "linear", lambda *args, f=gemm.linear: fused.append(args) or f(*args))
    y = ops.linear(x, weight)
    assert len(fused) == (weight.macro is not None)
    dense = reference.dequantize(weight, torch.float32)
    assert error_ratio(y, x, dense.T) <= 1
    assert error_ratio(linear_grad(y, weight, "auto"), y, dense) <= 1


# --- gradients, compilation, opcheck ---------------------------------------------------------------------------------


@every_case
def test_gradients(case):
    """Those of `F.linear` with the dequantized weight; nothing flows to the packed tensors."""
    weight = weight_of(9, 160, case=case)
    dense = reference.dequantize(weight, torch.float32)
    x, bias = torch.randn(2, 5, 160, device=DEVICE), torch.randn(9, device=DEVICE)
    gradients = []
    for function, w, rest in ((ops.linear, weight, ["torch"]), (F.linear, dense, [])):  # the same sums
        own_x, own_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
        function(own_x, w, own_bias, *rest).sin().sum().backward()
        gradients.append((own_x.grad, own_bias.grad))
    torch.testing.assert_close(*gradients)


@everything
def test_gradcheck(case):
    weight, stack = weight_of(5, 32, case=case), weight_of(3, 5, 32, case=case)
    x = torch.randn(10, 32, dtype=torch.float64, device=DEVICE, requires_grad=True)
    bias = torch.randn(3, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    fast = {"fast_mode": True}
    assert torch.autograd.gradcheck(lambda x, b: ops.linear(x, weight, b), (x, bias[0]), **fast)
    assert torch.autograd.gradcheck(lambda x, b: ops.grouped_linear(x, offsets_of(), stack, b), (x, bias), **fast)
    assert torch.autograd.gradgradcheck(lambda x: ops.linear(x, weight).sin(), (x,), **fast)


def test_saved_for_backward():
    """Every part of the weight itself is kept, no copies."""
    weight = weight_of(9, 160, case="mxfp4 macro and outliers")
    x, saved = torch.randn(7, 160, device=DEVICE, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.linear(x, weight)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (*weight[:2], weight.macro, *weight.outliers)}


@everything
def test_opcheck(case):
    """torch's own tests of an operator, with every operand there is."""
    op, one, three = torch.ops.hf_mxfp4, weight_of(3, 32, case=case), weight_of(3, 2, 32, case=case)
    rest = one.format.name, "auto"
    x = torch.randn(2, 3, 32, device=DEVICE, requires_grad=True)
    bias = torch.randn(3, device=DEVICE, requires_grad=True)
    rows = torch.randn(10, 32, device=DEVICE, requires_grad=True)
    torch.library.opcheck(op.linear.default, (x, None, *ops.operands(one), bias, *rest))
    torch.library.opcheck(op.linear.default, (rows, offsets_of(), *ops.operands(three), None, *rest))
    grad = torch.randn(2, 3, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(op.linear_grad.default, (grad, None, *ops.operands(one), *rest))
    torch.library.opcheck(op.dequantize.default, (*ops.operands(three), rest[0], torch.bfloat16, "auto"))


@everything
def test_compile(case):
    """One graph, no break, no new graph for other tokens; gradients too."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = weight_of(9, 160, case=case)
    torch._dynamo.reset()

    def function(x):
        return ops.linear(x.sin(), weight).sin() + ops.dequantize(weight, torch.float32).sum()

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (12, 31):
        results, x = [], torch.randn(tokens, 160, device=DEVICE)
        for run in (compiled, function):
            own = x.clone().requires_grad_()
            y = run(own)
            y.sum().backward()
            results.append((y.detach(), own.grad))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor():
    weight = weight_of(9, 160, case="mxfp4 macro and outliers")
    x = torch.randn(5, 160, device=DEVICE, requires_grad=True)
    torch._dynamo.reset()
    y = torch.compile(lambda x: ops.linear(x.sin(), weight), fullgraph=True)(x)
    torch.testing.assert_close(y, ops.linear(x.sin(), weight))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_autocast():
    """x and bias are cast, macro factors and outliers are not."""
    weight, x = weight_of(9, 160, case="mxfp4 macro and outliers"), torch.randn(3, 160, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = ops.linear(x, weight, torch.ones(9, device=DEVICE))
    assert y.dtype == torch.bfloat16
    x = x.to(torch.bfloat16)
    assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T, torch.ones(9)) <= 1


def test_meta_device():
    weight = weight_of(3, 9, 160, case="mxfp4 macro and outliers")
    meta = QuantizedTensor(
        weight.packed.to("meta"),
        weight.scale.to("meta"),
        None,
        MXFP4,
        weight.macro.to("meta"),
        Outliers(*(t.to("meta") for t in weight.outliers)),
    )
    x, offsets = torch.empty(5, 160, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    assert ops.linear(x, meta.matrix(1)).shape == ops.grouped_linear(x, offsets, meta).shape == (5, 9)
    assert ops.dequantize(meta).shape == (3, 9, 160)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_parts():
    """Each wrong part is named, with what was found and what is needed; while tracing as well."""
    weight = weight_of(20, 160, case="mxfp4 macro and outliers")
    macro, (values, columns, offsets) = weight.macro, weight.outliers
    x = torch.ones(3, 160, device=DEVICE)
    n = len(values)

    def with_parts(**parts):
        return weight._replace(outliers=weight.outliers._replace(**parts))

    wrong = [
        (weight._replace(macro=macro.int()), TypeError, "macro: dtype torch.int32, expected torch.uint8"),
        (
            weight._replace(macro=macro[:, :1]),
            ValueError,
            "macro: shape (20, 1), expected (20, 2): one for 128 weights",
        ),
        (weight._replace(macro=macro[0]), ValueError, "macro: shape (2,), expected (20, 2)"),
        (weight._replace(macro=macro.to("meta")), RuntimeError, "macro is on meta"),
        (
            with_parts(values=values.double()),
            TypeError,
            "outliers.values: dtype torch.float64, expected torch.bfloat16",
        ),
        (with_parts(values=values[:, None]), ValueError, f"outliers.values: shape ({n}, 1), expected one dimension"),
        (
            with_parts(columns=columns.long()),
            TypeError,
            "outliers.columns: dtype torch.int64, expected torch.uint16 or",
        ),
        (with_parts(columns=columns.view(torch.int16)), TypeError, "outliers.columns: dtype torch.int16"),
        (with_parts(columns=columns[1:]), ValueError, f"outliers.columns: shape ({n - 1},), expected ({n},)"),
        (with_parts(offsets=offsets.long()), TypeError, "outliers.offsets: dtype torch.int64, expected torch.int32"),
        (with_parts(offsets=offsets[:-1]), ValueError, "outliers.offsets: shape (20,), expected (21,): one more than"),
        (with_parts(values=values.to("meta")), RuntimeError, "values is on meta"),
        (with_parts(values=None), ValueError, "outliers: values missing; values, columns and offsets come together"),
        (with_parts(columns=None, offsets=None), ValueError, "outliers: columns, offsets missing"),
    ]
    nvfp4 = random_weight(20, 160, fmt=NVFP4, device=DEVICE)._replace(macro=macro)
    wrong.append((nvfp4, ValueError, "macro: only mxfp4 weights have macro factors, not nvfp4"))
    for bad, error, text in wrong:
        for call in (lambda w: ops.linear(x, w), ops.dequantize):
            with pytest.raises(error, match=re.escape(text)):
                call(bad)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake, pytest.raises(ValueError, match="outliers.offsets: shape"):
        ops.linear(torch.empty(3, 160), with_parts(offsets=offsets[:-1]))
