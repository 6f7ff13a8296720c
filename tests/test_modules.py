# SPDX-License-Identifier: Apache-2.0
"""FP4Linear as a module: inputs of every kind, gradients, casts, copies, compilation."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import hf_mxfp4
from hf_mxfp4 import MXFP4, NVFP4, FP4Config, FP4Linear

N, K = 48, 96
every_format = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
# Sums of K=96 products in another order: K/2 roundings at most, relative to the sum of magnitudes. float16 and
# bfloat16 results are rounded once more, and may be computed with products rounded to their own precision.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def layer(format: str = "nvfp4", bias: bool = True, dtype=torch.float32, **options) -> FP4Linear:
    weight = hf_mxfp4.quantize(torch.randn(N, K) * 0.1, FP4Config(format=format))
    return FP4Linear.from_quantized(weight, torch.randn(N, dtype=dtype) if bias else None, dtype=dtype, **options)


def dense(packed: FP4Linear) -> nn.Linear:
    """The plain layer that a packed one stands for."""
    plain = nn.Linear(packed.in_features, packed.out_features, packed.bias is not None)
    plain.weight = nn.Parameter(packed.weight.detach().clone())
    if packed.bias is not None:
        plain.bias = nn.Parameter(packed.bias.detach().clone())
    return plain.train(packed.training)


def close(found: torch.Tensor, expected: torch.Tensor, dtype=None):
    dtype = dtype or found.dtype
    bound = TOLERANCE[dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0, atol=bound)


def bits(module: nn.Module) -> dict[str, tuple]:
    """Dtypes and bytes of everything a module stores in packed form."""
    return {name: (b.dtype, tuple(b.shape), b.view(torch.uint8).tolist()) for name, b in module.named_buffers()}


@every_format
@dtypes
@pytest.mark.parametrize("shape", [(1,), (31,), (2, 5), (0,), (3, 0, 2), (2, 1, 3), ()], ids=str)
def test_forward(format, dtype, shape):
    """Any leading shape, any activation dtype: what the dense layer gives, in the activations' dtype."""
    packed = layer(format, dtype=dtype if dtype != torch.float64 else torch.float32)
    x = torch.randn(*shape, K, dtype=dtype)
    out = packed(x)
    assert out.dtype == dtype and out.shape == (*shape, N)
    weight = hf_mxfp4.dequantize(packed.quantized, torch.float32).to(dtype)
    if out.numel():
        close(out, F.linear(x.double(), weight.double(), packed.bias.double()), dtype)


@every_format
def test_strides(format):
    packed = layer(format)
    x = torch.randn(4, 6, K)
    expected = packed(x)
    others = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "last stride 2": torch.randn(4, 6, 2 * K)[..., ::2].copy_(x),
        "offset": F.pad(x, (3, 0))[..., 3:],
        "last first": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }
    for name, other in others.items():
        assert not other.is_contiguous() and torch.equal(other, x), name
        assert torch.equal(packed(other), expected), name
    row = torch.randn(1, 1, K).expand(4, 6, K)
    close(packed(row), packed(row.contiguous()))


@every_format
def test_wrong_inputs(format):
    packed = layer(format)
    for wrong in (K - 1, K + 32, 1, 0):
        with pytest.raises(ValueError, match=rf"shape \(2, {wrong}\), expected \[\.\.\., {K}\]"):
            packed(torch.randn(2, wrong))
    with pytest.raises(TypeError, match=r"dtype torch.int64, expected .*float32"):
        packed(torch.ones(2, K, dtype=torch.int64))
    with pytest.raises(ValueError, match="shape"):
        packed(torch.tensor(1.0))


@every_format
@pytest.mark.parametrize("grad_of", ["x", "bias", "both"])
def test_gradients(format, grad_of):
    """Gradients are those of the dequantized dense layer."""
    packed = layer(format)
    plain = dense(packed)
    packed.bias.requires_grad_(grad_of != "x")
    plain.bias.requires_grad_(grad_of != "x")
    x, other = (torch.randn(3, 5, K, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    x.requires_grad_(grad_of != "bias")
    other.requires_grad_(grad_of != "bias")
    up = torch.randn(3, 5, N)
    packed(x).backward(up)
    plain(other).backward(up)
    for found, expected in ((x.grad, other.grad), (packed.bias.grad, plain.bias.grad)):
        assert (found is None) == (expected is None)
        if found is not None:
            close(found, expected)
    assert not any(buffer.requires_grad for buffer in packed.buffers())
    assert [name for name, _ in packed.named_parameters()] == ["bias"]


@every_format
def test_gradients_are_right_to_second_order(format):
    packed = layer(format, dtype=torch.float64)
    x = torch.randn(2, K, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(packed, (x,), fast_mode=True)


@every_format
def test_autocast(format):
    packed = layer(format)
    x = torch.randn(5, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = packed(x)
        expected = F.linear(x, packed.weight, packed.bias)
    assert out.dtype == expected.dtype == torch.bfloat16
    close(out.float(), expected.float(), torch.bfloat16)
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and packed.bias.grad.dtype == torch.float32


def test_inference_mode_then_gradients():
    """Nothing made in inference mode is kept, where a later backward pass would meet it."""
    packed = layer()
    x = torch.randn(2, K)
    with torch.inference_mode():
        first = packed(x)
    other = x.clone().requires_grad_()
    second = packed(other)
    second.sum().backward()
    assert torch.equal(first, second) and other.grad is not None


def test_what_is_kept_outlives_no_mode():
    """Neither a fake tensor scale nor a transform's may be met by a later forward; `prepare` sees hidden writes."""
    packed, x = layer(), torch.randn(2, K)
    expected = packed(x)
    packed._tensor_scales.clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert packed(mode.from_tensor(x)).shape == expected.shape
    assert torch.equal(packed(x), expected)
    packed._tensor_scales.clear()
    torch.func.vmap(packed)(x)
    assert not packed._tensor_scales and torch.equal(packed(x), expected)
    packed.weight_global_scale.data.mul_(2)
    packed.prepare()
    torch.testing.assert_close(packed(x) - packed.bias, (expected - packed.bias) / 2)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compute_dtype(compute_dtype, dtype):
    packed = layer(compute_dtype=compute_dtype, dtype=dtype)
    x = torch.randn(4, K, dtype=dtype, requires_grad=True)
    out = packed(x)
    weight = hf_mxfp4.dequantize(packed.quantized, compute_dtype)
    expected = F.linear(x.to(compute_dtype), weight, packed.bias.to(compute_dtype)).to(dtype)
    assert out.dtype == dtype
    close(out.float(), expected.float(), compute_dtype if dtype == torch.float32 else torch.bfloat16)
    out.sum().backward()
    assert x.grad.dtype == dtype and packed.bias.grad.dtype == dtype


def test_it_is_a_linear():
    packed = layer(dtype=torch.bfloat16)
    assert isinstance(packed, nn.Linear)
    assert (packed.in_features, packed.out_features) == (K, N)
    assert packed.weight.dtype == torch.bfloat16 and packed.weight.shape == (N, K)
    assert torch.equal(packed.weight, hf_mxfp4.dequantize(packed.quantized, torch.bfloat16))
    assert not packed.weight.requires_grad
    packed.reset_parameters()
    before = bits(packed)
    with pytest.raises((KeyError, AttributeError)):
        packed.weight = nn.Parameter(torch.zeros(N, K))  # would be ignored by forward
    assert bits(packed) == before
    assert repr(packed) == "FP4Linear(in_features=96, out_features=48, bias=True, format=nvfp4)"
    assert "bias=False" in repr(layer(bias=False))


def test_training_flags():
    packed = layer()
    assert packed.training
    assert not packed.eval().training and packed.train().training
    packed.requires_grad_(False)
    assert not packed.bias.requires_grad
    packed.requires_grad_(True)
    assert packed.bias.requires_grad and not packed.weight_packed.requires_grad


@every_format
@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.double,
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.type(torch.float16),
        lambda m: nn.Sequential(m).half()[0],
    ],
)
def test_casts_leave_codes_and_scales_alone(format, cast):
    packed = layer(format)
    before, weight = bits(packed), hf_mxfp4.dequantize(packed.quantized, torch.float32)
    same = cast(packed)
    assert same is packed and bits(packed) == before
    assert packed.dtype == packed.bias.dtype == packed.weight.dtype != torch.float32
    assert torch.equal(hf_mxfp4.dequantize(packed.quantized, torch.float32), weight)
    packed(torch.randn(2, K, dtype=packed.dtype))
    packed.float()
    assert bits(packed) == before and packed.dtype == torch.float32


@every_format
def test_copies(format):
    packed = layer(format, dtype=torch.bfloat16, compute_dtype=torch.float32, backend="torch").eval()
    x = torch.randn(2, K, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for other in (copy.deepcopy(packed), torch.load(file, weights_only=False), copy.copy(packed)):
        assert bits(other) == bits(packed) and torch.equal(other(x), packed(x))
        assert other.format is packed.format and other.dtype == packed.dtype and not other.training
        assert (other.compute_dtype, other.backend) == (torch.float32, "torch")
    deep = copy.deepcopy(packed)
    deep.weight_packed.zero_()
    assert packed.weight_packed.any()


@every_format
def test_pickle(format):
    packed = layer(format)
    other = pickle.loads(pickle.dumps(packed))
    assert bits(other) == bits(packed) and other.format is packed.format


@every_format
def test_meta_and_back(format):
    packed = layer(format)
    before = bits(packed)
    state = {name: value.clone() for name, value in packed.state_dict().items()}
    packed.to("meta")
    assert all(tensor.is_meta for tensor in (*packed.buffers(), *packed.parameters()))
    assert packed.weight.is_meta and packed(torch.randn(2, K, device="meta")).shape == (2, N)
    assert {name: buffer.dtype for name, buffer in packed.named_buffers()} == {n: b[0] for n, b in before.items()}
    packed.to_empty(device="cpu")
    packed.load_state_dict(state)
    assert bits(packed) == before


def test_share_memory():
    packed = layer().share_memory()
    assert packed.weight_packed.is_shared() and packed.weight_scale.is_shared()


@every_format
@pytest.mark.parametrize("bias", [True, False])
def test_compile(format, bias):
    packed = layer(format, bias=bias)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for rows in (1, 3):
        x = torch.randn(rows, K, requires_grad=True)
        out = compiled(x)
        assert torch.equal(out, packed(x))
        out.sum().backward()
        expected = x.grad.clone()
        x.grad = None
        packed(x).sum().backward()
        close(x.grad, expected)


def test_a_parameter_is_quantized_without_a_graph():
    """A module's own weight: nothing packed may hang on its gradient graph (deepcopy would refuse)."""
    parameter = nn.Parameter(torch.randn(N, K))
    for config in (FP4Config(), FP4Config(global_scale="free"), FP4Config(scale_rule="amax"), FP4Config("mxfp4")):
        weight = hf_mxfp4.quantize(parameter, config)
        assert not any(tensor.requires_grad for tensor in weight[:3] if tensor is not None)
        copy.deepcopy(FP4Linear.from_quantized(weight))


def test_wrong_tensors_are_refused():
    weight = hf_mxfp4.quantize(torch.randn(N, K))
    other = FP4Linear(K, N, format=MXFP4)
    with pytest.raises(ValueError, match="a weight in nvfp4 cannot go into a mxfp4 module"):
        other._load_packed("weight", weight)
    narrow = FP4Linear(K - 16, N, format=NVFP4)
    with pytest.raises(ValueError, match=r"weight_packed: shape \(48, 48\) does not fit the module's \(48, 40\)"):
        narrow._load_packed("weight", weight)
    for width in (0, 8, 40, 95):
        with pytest.raises(ValueError, match=f"in_features={width} is not a positive multiple of"):
            FP4Linear(width, N, format=NVFP4 if width != 40 else MXFP4)
