# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `fake_quantize`: meaning, choice of implementation, errors, gradients, compilation."""

import pytest
import torch
import torch._dynamo.testing
from bits import same_bits
from torch.nn import functional as F

from hf_mxfp4 import quantization, reference
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4
from hf_mxfp4.quantization import fake_quantize, quantize
from hf_mxfp4.scales import ScaleOptions, reciprocal_stable

both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning"))]
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def needs_triton(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")


# --- what fake_quantize means ----------------------------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(fmt, backend):
    """A token whose scales are all 1: the grid, its ties to even mantissa, and the clip at 6."""
    needs_triton(backend)
    x = torch.zeros(fmt.block_size * 2)
    x[:12] = torch.tensor([6.0, 0.25, 0.26, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 5.1, -0.2, -0.0])
    expected = torch.zeros_like(x)
    expected[:12] = torch.tensor([6.0, 0.0, 0.5, -1.0, 1.0, 2.0, 2.0, -4.0, 4.0, 6.0, -0.0, -0.0])
    if fmt.has_global_scale:
        x[-1] = expected[-1] = 6 * 448  # tensor scale 1; its own block has scale 448
    else:
        x[-1], expected[-1] = 7.9 * 2.0**40, 6 * 2.0**40  # the rule clips up to a quarter of the maximum
    assert same_bits(fake_quantize(x, fmt, backend), expected)
    assert same_bits(fake_quantize(-x.bfloat16(), fmt.name, backend), -expected.bfloat16())


@both_formats
@every_dtype
def test_is_the_amax_rule(fmt, dtype):
    """The same as weights with the rule `amax`, each token a matrix; but for a last bit of its tensor scale."""
    x = (torch.randn(300, 1, 96) * torch.randn(300, 1, 1).exp()).to(dtype)
    if fmt.has_global_scale:
        g = x.abs().amax((1, 2)).float() / (6 * 448)
        x = x[(g == reciprocal_stable(g)) & (g > 2.0**-125)]
        assert len(x) > 200
    expected = reference.dequantize(reference.quantize(x, fmt, "amax"), dtype)
    assert same_bits(reference.fake_quantize(x, fmt), expected)


@every_dtype
def test_twice_is_once(dtype):
    """Quantized values stay as they are. (Of NVFP4 tokens the tensor scale may differ in the last bit.)"""
    x = (torch.randn(50, 96) ** 3).to(dtype)
    once = reference.fake_quantize(x, MXFP4)
    assert same_bits(reference.fake_quantize(once, MXFP4), once)


@both_formats
def test_tokens_do_not_see_each_other(fmt):
    x = torch.randn(5, 96)
    alone = torch.cat([reference.fake_quantize(token, fmt) for token in x.split(1)])
    assert same_bits(reference.fake_quantize(x.view(1, 5, 96), fmt)[0], alone)


@both_formats
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_spread(fmt, dtype, bad):
    """Over their block; where the tensor scale is of the token, over the token."""
    x = torch.randn(3, 96).to(dtype)
    x[1, 40] = bad
    expected = torch.zeros(3, 96, dtype=torch.bool)
    if fmt.has_global_scale:
        expected[1] = True
    else:
        expected[1, 32:64] = True
    assert torch.equal(reference.fake_quantize(x, fmt).isnan(), expected)


@both_formats
def test_errors_bounded(fmt):
    """Tokens of any size keep their size: no overflow at the largest floats, nothing lost at small ones."""
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        x = torch.rand(400, 64).add(0.5).to(dtype) * torch.logspace(-4, 0, 400)[:, None].to(dtype) * (top / 1.5)
        x[-1, 0] = top
        error = (reference.fake_quantize(x, fmt).double() - x.double()).norm(dim=1) / x.double().norm(dim=1)
        assert error.max() < 0.2
    small = torch.randn(50, 64) * 2.0**-110
    error = (reference.fake_quantize(small, fmt).double() - small.double()).norm()
    assert error < 0.2 * small.double().norm()


# --- the operator ----------------------------------------------------------------------------------------------------


@both_formats
@both_backends
def test_gradient_passes(fmt, backend):
    needs_triton(backend)
    x = (torch.randn(3, 96) * 100).requires_grad_()
    gradient = torch.randn(3, 96)
    y = fake_quantize(x, fmt, backend)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient) and not torch.equal(y, x)


@both_formats
@both_backends
def test_opcheck(fmt, backend):
    needs_triton(backend)
    for x in (torch.randn(2, 3, 96, requires_grad=True), torch.randn(64, 3).T.bfloat16()):
        torch.library.opcheck(torch.ops.hf_mxfp4.fake_quantize.default, (x, fmt.name, backend))


@both_formats
def test_compile(fmt):
    """One graph for any number of tokens; gradients too."""

    def function(x):
        return fake_quantize(x.sin(), fmt).cos()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (12, 10, 31):
        results = []
        x = torch.randn(tokens, 96)
        for run in (compiled, function):
            own = x.clone().requires_grad_()
            y = run(own)
            y.sum().backward()
            results.append((y.detach(), own.grad))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = fake_quantize(x, NVFP4)
    assert y.dtype == dtype and torch.equal(y, fake_quantize(x.to(dtype), NVFP4))
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_layer():
    """Straight-through inside a layer: the weight's gradient is that of the rounded input."""
    x, weight = torch.randn(5, 64, requires_grad=True), torch.randn(7, 64, requires_grad=True)
    F.linear(fake_quantize(x, MXFP4), weight).sum().backward()
    assert torch.equal(x.grad, weight.detach().sum(0).expand(5, 64))
    torch.testing.assert_close(weight.grad, reference.fake_quantize(x.detach(), MXFP4).sum(0).expand(7, 64))


def test_meta_device():
    x = torch.empty(2, 5, 64, device="meta", dtype=torch.float16)
    assert fake_quantize(x, NVFP4).shape == (2, 5, 64) and fake_quantize(x, NVFP4).dtype == torch.float16


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            (torch.zeros(3, 40), MXFP4),
            ValueError,
            r"\(3, 40\).*multiple of mxfp4's block size 32; leave the activations",
        ),
        ((torch.zeros(3, 0), NVFP4), ValueError, "positive multiple of nvfp4's block size 16"),
        ((torch.zeros(()), NVFP4), ValueError, "K a positive multiple"),
        ((torch.zeros(3, 32).double(), NVFP4), TypeError, "float64, expected torch.float32 or"),
        ((torch.zeros(3, 32), "fp4"), ValueError, "format='fp4': expected one of mxfp4, nvfp4"),
        ((torch.zeros(3, 32), NVFP4, "cuda"), ValueError, "backend='cuda': expected one of auto, triton, torch"),
    ],
)
def test_fake_quantize_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        fake_quantize(*arguments)


# --- quantize --------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch):
    """The kernel's calls, as their arguments."""
    pytest.importorskip("triton")
    from hf_mxfp4.kernels import quantize as kernel

    calls, original = [], kernel.quantize
    monkeypatch.setattr(kernel, "quantize", lambda *arguments: calls.append(arguments) or original(*arguments))
    return calls


def assert_same(got, expected):
    assert got.format is expected.format
    for one, other in zip((*got[:3], got.macro), (*expected[:3], expected.macro), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and torch.equal(one.float(), other.float())
    assert (got.outliers is None) == (expected.outliers is None)
    if got.outliers is not None:
        assert all(torch.equal(*pair) for pair in zip(got.outliers, expected.outliers, strict=True))


@both_formats
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_who_searches(fmt, searched):
    """The kernel for `soar`'s full search where it is asked for; all else is the reference's."""
    weight = torch.randn(2, 3, 64)
    weight[0, 1, 2] = 1e4
    keep = weight.abs() > 2
    assert_same(quantize(weight, fmt.name, backend="triton"), reference.quantize(weight, fmt))
    parameter = torch.nn.Parameter(weight)
    got = quantize(parameter, fmt, keep=keep, backend="triton")
    assert not got.packed.requires_grad and got.outliers is not None
    assert_same(got, reference.quantize(weight, fmt, keep=keep))
    assert len(searched) == 2
    for options in (
        {"scale_rule": "amax"},
        {"options": ScaleOptions(search=2)},
        {"options": ScaleOptions(global_scale="free")},
        {"macro_block": "static"} if fmt is MXFP4 else {"scale_rule": "four_over_six"},
    ):
        assert_same(quantize(weight, fmt, backend="triton", **options), reference.quantize(weight, fmt, **options))
    for backend in ("auto", "torch"):
        assert_same(quantize(weight, fmt, backend=backend), reference.quantize(weight, fmt))
    assert_same(quantize(weight[:, :0], fmt, backend="triton"), reference.quantize(weight[:, :0], fmt))
    assert len(searched) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_given_tensor_scales(searched):
    """The kernel takes powers of two, also such that the largest blocks only just fit; others are the reference's."""
    weight = torch.randn(2, 3, 64)
    fits = 2.0 ** torch.ceil(torch.log2(weight.abs().amax((1, 2)) / (6 * 448)))
    for number, scale in enumerate((fits, 64 * fits, 1.1 * fits), start=1):
        expected = reference.quantize(weight, NVFP4, tensor_scale=scale)
        assert torch.equal(expected.global_scale, scale)
        assert_same(quantize(weight, NVFP4, tensor_scale=scale, backend="triton"), expected)
        assert len(searched) == min(number, 2)


def test_tensor_scales():
    """All float32 exponents, and the edges where the power of two changes."""
    peak = torch.tensor([0.0, 2.0**-121, 2.0**-120, 1.0, torch.finfo(torch.float32).max])
    edges = 1792 * 2.0 ** torch.arange(-130, 117)
    peak = torch.cat([peak, edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(torch.inf))])
    weight = torch.zeros(len(peak), 1, 16)
    weight[:, 0, 3] = peak
    expected = reference.quantize(weight, NVFP4).global_scale
    assert torch.equal(quantization._global_scale(peak), expected)


@both_backends
@pytest.mark.parametrize(
    "weight, format, options, error, message",
    [
        (
            torch.tensor([[1.0, float("nan")] * 16]),
            "nvfp4",
            {},
            ValueError,
            "layer.weight: 16 of 32 values are NaN or Inf",
        ),
        (torch.tensor([[1.0, -float("inf")] * 16]), "mxfp4", {}, ValueError, "layer.weight: 16 of 32 values are NaN"),
        (torch.zeros(3, 40), "mxfp4", {}, ValueError, "layer.weight: in_features=40"),
        (torch.zeros(3, 32).double(), "mxfp4", {}, TypeError, "layer.weight: dtype torch.float64"),
        (torch.zeros(()), "mxfp4", {}, ValueError, "layer.weight: a 0-d tensor"),
        (torch.zeros(3, 32), "int4", {}, ValueError, "format='int4'"),
        (torch.zeros(3, 32), "nvfp4", {"scale_rule": "ceil"}, ValueError, "scale_rule='ceil'; allowed for nvfp4"),
        (
            torch.zeros(3, 32),
            "nvfp4",
            {"macro_block": "search"},
            ValueError,
            "macro_block='search' repairs power-of-two",
        ),
        (
            torch.zeros(3, 32),
            "mxfp4",
            {"macro_block": "best"},
            ValueError,
            "macro_block='best'; allowed: None, static",
        ),
    ],
)
def test_quantize_errors(weight, format, options, error, message, backend):
    needs_triton(backend)
    with pytest.raises(error, match=message):
        quantize(weight, format, name="layer.weight", backend=backend, **options)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend='cuda': expected one of auto, triton, torch"):
        quantize(torch.zeros(3, 32), "mxfp4", backend="cuda")
