# SPDX-License-Identifier: Apache-2.0
"""Transforms of a layer's input (`pre_quant_scale`, `hadamard`), and dense copies as compressed-tensors forms them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import hf_mxfp4
from hf_mxfp4 import FP4Experts, FP4Linear
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, QuantizedTensor
from hf_mxfp4.fusion import FusedLinear, fuse_projections, unfuse_projections, why_apart
from hf_mxfp4.packed import TRANSFORMS, dense_copy, transform_input
from hf_mxfp4.quantization import quantize

K, N, G = 128, 48, 32
both_formats = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
KINDS = [("pre_quant_scale",), ("hadamard",), TRANSFORMS]
every_kind = pytest.mark.parametrize("kind", KINDS, ids="+".join)


def transforms(kind=TRANSFORMS, dtype=torch.float32) -> dict[str, torch.Tensor]:
    made = {
        "pre_quant_scale": (0.5 + torch.rand(K)).to(dtype),
        "hadamard": torch.linalg.qr(torch.randn(G, G))[0].to(dtype),
    }
    return {name: made[name] for name in kind}


def layer(
    kind=TRANSFORMS, format="nvfp4", transform_dtype=torch.float32, bias=True, weight=None, **kwargs
) -> FP4Linear:
    weight = quantize(torch.randn(N, K), format) if weight is None else weight
    kwargs.setdefault("dtype", torch.float32)
    bias = torch.randn(N, dtype=kwargs["dtype"]) if bias else None
    return FP4Linear.from_quantized(weight, bias, **transforms(kind, transform_dtype), **kwargs)


def effective(packed: FP4Linear) -> torch.Tensor:
    """The weight for the input as it comes, in float64, by the definition: column k of x contributes through e_k."""
    eye = torch.eye(K, dtype=torch.float64)
    if hasattr(packed, "pre_quant_scale"):
        eye = eye * packed.pre_quant_scale.double()
    if hasattr(packed, "hadamard"):
        blocks = torch.block_diag(*[packed.hadamard.double()] * (K // G))
        eye = eye @ blocks
    return (eye @ hf_mxfp4.dequantize(packed.quantized, torch.float32).double().T).T


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: bytes(b.contiguous().view(torch.uint8).numpy()) for name, b in module.named_buffers()}


# --- forward and dense weight ----------------------------------------------------------------------------------------


@every_kind
@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_is_the_product_with_the_weight(kind, format, dtype, transform_dtype):
    packed = layer(kind, format, transform_dtype, dtype=dtype)
    weight = effective(packed)
    assert torch.equal(packed.weight, weight.to(dtype)) or dtype == torch.float32
    torch.testing.assert_close(packed.weight.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)
    x = torch.randn(5, 3, K, dtype=dtype)
    expected = x.double() @ weight.T + packed.bias.double()
    error = (packed(x).double() - expected).norm() / expected.norm()
    # The transformed input, each decoded weight and the output are rounded once; float32 sums up to 128 terms, too.
    assert error < torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
    assert packed(x).dtype == dtype and packed(x).shape == (5, 3, N)


def test_order_and_basis():
    """First the channels' scales, then H from the right: by hand for one channel."""
    packed = layer(bias=False)
    x = torch.zeros(K)
    x[G + 3] = 2.0
    row = torch.zeros(K)
    row[G : 2 * G] = 2.0 * packed.pre_quant_scale[G + 3] * packed.hadamard[3]
    expected = F.linear(row, hf_mxfp4.dequantize(packed.quantized, torch.float32))
    torch.testing.assert_close(packed(x), expected)
    torch.testing.assert_close(packed.weight[:, G + 3] * 2.0, expected)


def test_float32_transforms_are_not_rounded():
    """H / 3 in float32: rounding it to bfloat16 first would make every weight up to 2^-9 too large or small."""
    matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 3
    x = torch.full((1, K), 3.0, dtype=torch.bfloat16)
    assert torch.equal(transform_input(x, hadamard=matrix), torch.tensor([2.0, 0.0]).bfloat16().repeat(1, K // 2))
    assert torch.equal(transform_input(x, torch.full((K,), 1 / 3)), torch.ones(1, K, dtype=torch.bfloat16))
    # Nor is what the one makes of the input rounded for the other.
    near_one = torch.full((K,), 1.0703125, dtype=torch.bfloat16)
    out = transform_input(near_one, near_one, torch.eye(2) * 1.7)
    assert torch.equal(out, (near_one.float() ** 2 * 1.7).bfloat16())
    assert not torch.equal(out, ((near_one * near_one).float() * 1.7).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = transform_input(torch.full((1, K), 3.0), hadamard=matrix)
    assert torch.equal(out, torch.tensor([2.0, 0.0]).bfloat16().repeat(1, K // 2))


@every_kind
def test_gradient(kind):
    packed = layer(kind)
    x = torch.randn(4, K, requires_grad=True)
    gradient = torch.randn(4, N)
    packed(x).backward(gradient)
    torch.testing.assert_close(x.grad.double(), gradient.double() @ effective(packed), rtol=1e-4, atol=1e-5)
    assert packed.bias.grad is not None and not any(b.requires_grad for b in packed.buffers())


def test_gradient_of_the_transform():
    made = {name: value.double() for name, value in transforms().items()}
    x = torch.randn(2, K, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: transform_input(x, made["pre_quant_scale"], made["hadamard"]), (x,))


@every_kind
@both_formats
def test_activations_are_rounded_after_the_transform(kind, format):
    packed = layer(kind, format, activation_format="same", dtype=torch.bfloat16)
    x = torch.randn(6, K, dtype=torch.bfloat16)
    made = {name: getattr(packed, name) for name in kind}
    rounded = hf_mxfp4.quantization.fake_quantize(transform_input(x, **made), format)
    weight = hf_mxfp4.dequantize(packed.quantized, torch.bfloat16)
    torch.testing.assert_close(packed(x), F.linear(rounded, weight, packed.bias), rtol=2**-7, atol=2**-6)
    assert not torch.equal(rounded, hf_mxfp4.quantization.fake_quantize(x, format))


@pytest.mark.parametrize("shape", [(0, K), (K,), (2, 0, K)], ids=str)
def test_few_tokens(shape):
    packed = layer()
    assert packed(torch.randn(shape)).shape == (*shape[:-1], N)


def test_compute_dtype():
    packed = layer(compute_dtype=torch.float32, dtype=torch.bfloat16)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    expected = x.double() @ effective(packed).T + packed.bias.double()
    torch.testing.assert_close(packed(x).double(), expected, rtol=2**-8, atol=1e-4)


def test_autocast():
    packed = layer(bias=False)
    x = torch.randn(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        out = packed(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, packed(x.bfloat16()))


@pytest.mark.parametrize("kind", [(), TRANSFORMS], ids=["plain", "both"])
def test_compile(kind):
    packed = layer(kind, dtype=torch.bfloat16, activation_format="same" if kind else None)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert torch.equal(compiled(x), packed(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x.float()), packed(x.float()))


# --- saved, moved, copied --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("transform_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dict(kind, transform_dtype):
    """Empty layers learn from meta tensors what is to come; a file's values replace it."""
    packed = layer(kind, "mxfp4", transform_dtype)
    described = {name: getattr(packed, name).to("meta") for name in kind}
    other = FP4Linear(K, N, format=MXFP4, dtype=torch.float32, **described)
    assert set(other.state_dict()) == set(packed.state_dict()) >= set(kind)
    assert {name: b.dtype for name, b in other.named_buffers()} == {n: b.dtype for n, b in packed.named_buffers()}
    other.load_state_dict(packed.state_dict())
    x = torch.randn(3, K)
    assert bits(other) == bits(packed) and torch.equal(other(x), packed(x))
    plain = FP4Linear(K, N, format=MXFP4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="Unexpected key.*" + kind[0]):
        plain.load_state_dict(packed.state_dict())
    with pytest.raises(RuntimeError, match="Missing key.*" + kind[0]):
        other.load_state_dict(plain.state_dict())
    wrong = packed.state_dict() | {kind[0]: packed.state_dict()[kind[0]].to(torch.float16)}
    with pytest.raises(RuntimeError, match=f"{kind[0]}: dtype torch.float16"):
        other.load_state_dict(wrong)


@pytest.mark.parametrize("transform_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_casts_and_moves_leave_transforms_alone(transform_dtype):
    packed = layer(transform_dtype=transform_dtype)
    before = bits(packed)
    for cast in (nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda m: m.to("cpu", torch.float32)):
        assert cast(packed) is packed and bits(packed) == before
    packed.to("meta")
    assert packed.hadamard.is_meta and packed.pre_quant_scale.is_meta and packed.hadamard.dtype == transform_dtype
    assert packed(torch.randn(2, K, device="meta")).shape == (2, N) and packed.weight.is_meta


@pytest.mark.parametrize("transform_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copies(transform_dtype):
    packed = layer(transform_dtype=transform_dtype)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), loaded):
        assert bits(other) == bits(packed) and other.hadamard.dtype == transform_dtype
        assert torch.equal(other.weight, packed.weight)
    assert "pre_quant_scale, hadamard" in repr(packed) and "hadamard" not in repr(layer(()))


def test_a_plain_layer_has_no_transforms():
    packed = layer(())
    assert not set(TRANSFORMS) & {name for name, _ in packed.named_buffers()}
    x = torch.randn(2, K)
    assert packed._activations(x) is x


@pytest.mark.parametrize(
    "name, tensor, error, message",
    [
        ("hadamard", torch.ones(3, 3), ValueError, "no whole groups of 3"),
        ("hadamard", torch.ones(2, 4), ValueError, r"shape \(2, 4\), expected \[g, g\]"),
        ("hadamard", torch.ones(0, 0), ValueError, r"expected \[g, g\]"),
        ("hadamard", torch.ones(4), ValueError, r"expected \[g, g\]"),
        ("hadamard", torch.ones(4, 4, dtype=torch.int32), TypeError, "dtype torch.int32; allowed"),
        ("pre_quant_scale", torch.ones(K + 1), ValueError, "one for each input channel"),
        ("pre_quant_scale", torch.ones(1, K), ValueError, "one for each input channel"),
        ("pre_quant_scale", torch.ones(K, dtype=torch.float64), TypeError, "dtype torch.float64; allowed"),
    ],
)
def test_wrong_transforms(name, tensor, error, message):
    with pytest.raises(error, match=f"{name}: .*{message}"):
        FP4Linear(K, N, **{name: tensor})


# --- fused siblings --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, members):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = members

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def siblings(same: bool) -> Attention:
    weights = quantize(torch.randn(3 * N, K), "nvfp4").split([N] * 3)
    made = [transforms() for _ in range(3)]
    return Attention(
        [FP4Linear.from_quantized(w, dtype=torch.float32, **made[0 if same else i]) for i, w in enumerate(weights)]
    )


def test_fused_with_equal_transforms():
    model = siblings(same=True)
    x = torch.randn(3, K)
    before, expected = bits(model), model(x)
    fuse_projections(model)
    assert isinstance(model.q_proj, FusedLinear) and bits(model) == before
    with torch.no_grad():
        for out, other in zip(model(x), expected, strict=True):
            torch.testing.assert_close(out, other)
    unfuse_projections(model)
    assert type(model.q_proj) is FP4Linear and bits(model) == before


def test_unequal_transforms_stay_apart(caplog):
    model = siblings(same=False)
    with caplog.at_level("INFO"):
        fuse_projections(model)
    assert type(model.q_proj) is FP4Linear and "their input transforms differ" in caplog.text
    assert why_apart([layer(("hadamard",)), layer(())]) == "their tensors differ in name, dtype, device or width"


# --- dense copies ----------------------------------------------------------------------------------------------------


def stored(format: str, rows: int = N, divisor: float | None = None, lead=()) -> dict[str, torch.Tensor]:
    """Any codes and scales at all, as a checkpoint may hold them."""
    fmt = FORMATS[format]
    packed = torch.randint(256, (*lead, rows, K // 2), dtype=torch.uint8)
    low, high = (1, 127) if fmt.has_global_scale else (90, 160)
    scale = torch.randint(low, high, (*lead, rows, K // fmt.block_size), dtype=torch.uint8)
    found = {"packed": packed, "scale": fmt.scale_from_bytes(scale)}
    if fmt.has_global_scale:
        found["global_scale"] = torch.full((*lead, 1), divisor or 8192.0)
    return found


def decompressed(format: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """compressed-tensors' own decompression, in bfloat16."""
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    compressor = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}[format]
    scheme = preset_name_to_scheme(f"{format.upper()}A16", ["Linear"])
    return compressor.decompress({f"weight_{name}": value for name, value in tensors.items()}, scheme)["weight"]


@pytest.mark.parametrize("seed", range(20))
def test_dense_copies_are_compressed_tensors(seed):
    """Bit for bit, for divisors that are no power of two: 448 * 6 / amax of a weight in bfloat16, and any float32."""
    torch.manual_seed(seed)
    amax = torch.rand(()).bfloat16().float() if seed % 2 else torch.rand(()) + 1e-3
    tensors = stored("nvfp4", divisor=float(448 * 6 / amax))
    expected = decompressed("nvfp4", tensors)
    assert torch.equal(dense_copy(NVFP4, torch.bfloat16, **tensors), expected)
    module = FP4Linear(K, N, bias=False, dtype=torch.bfloat16)
    module.load_state_dict({f"weight_{name}": value for name, value in tensors.items()})
    assert torch.equal(module.weight, expected)


@both_formats
def test_powers_of_two_take_the_operator(format, monkeypatch):
    tensors = stored(format)
    expected = decompressed(format, tensors)
    called = []
    monkeypatch.setattr("hf_mxfp4.ops.dequantize", lambda *args: called.append(args) or expected)
    assert dense_copy(FORMATS[format], torch.bfloat16, **tensors) is expected and called
    monkeypatch.undo()
    assert torch.equal(dense_copy(FORMATS[format], torch.bfloat16, **tensors), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16], ids=str)
def test_dense_copies_round_once(dtype):
    tensors = stored("nvfp4", divisor=2688 / 0.3)
    weight = QuantizedTensor(tensors["packed"], tensors["scale"], None, NVFP4)
    codes = hf_mxfp4.dequantize(weight._replace(scale=torch.ones_like(weight.scale.float()).to(weight.scale.dtype)))
    exact = codes.float().unflatten(1, (-1, 16)) * (tensors["scale"].float() / tensors["global_scale"])[..., None]
    assert torch.equal(dense_copy(NVFP4, dtype, **tensors), exact.flatten(1).to(dtype))


def test_projections_with_scales_of_their_own():
    """`[E, P]` divisors: each projection's rows by its own, as if it were stored alone."""
    tensors = stored("nvfp4", lead=(3,)) | {"global_scale": 2688 / (0.1 + torch.rand(3, 2))}
    dense = dense_copy(NVFP4, torch.bfloat16, **tensors)
    for expert in range(3):
        for half, rows in enumerate((slice(0, N // 2), slice(N // 2, N))):
            alone = {name: tensors[name][expert, rows] for name in ("packed", "scale")}
            alone["global_scale"] = tensors["global_scale"][expert, half : half + 1]
            assert torch.equal(dense[expert, rows], decompressed("nvfp4", alone))
    two = tensors | {"global_scale": torch.tensor([[8.0, 8.0], [4.0, 2.0], [1.0, 1.0]])}
    assert torch.equal(dense_copy(NVFP4, torch.float32, **two)[1, : N // 2] * 2, _halved(two)[1, : N // 2])


def _halved(tensors) -> torch.Tensor:
    return dense_copy(NVFP4, torch.float32, **tensors | {"global_scale": tensors["global_scale"] / 2})


def test_experts_use_it():
    experts = FP4Experts(3, K, N, dtype=torch.bfloat16)
    tensors = stored("nvfp4", rows=2 * N, lead=(3,)) | {"global_scale": 2688 / (0.1 + torch.rand(3, 2))}
    for name, value in tensors.items():
        setattr(experts, f"gate_up_proj_{name}", value)
    experts.prepare()
    assert torch.equal(experts.dequantized("gate_up_proj"), dense_copy(NVFP4, torch.bfloat16, **tensors))
    experts.is_transposed = True
    assert torch.equal(experts.dequantized("gate_up_proj").mT, dense_copy(NVFP4, torch.bfloat16, **tensors))


@pytest.mark.parametrize("kind", [(), *KINDS], ids=lambda kind: "+".join(kind) or "none")
def test_macro_blocks_and_outliers(kind):
    """What else a packed weight can have is decoded before the transform is taken in."""
    weight = torch.randn(N, K)
    keep = torch.rand(N, K) > 0.97
    packed = layer(kind, weight=quantize(weight, "mxfp4", macro_block="static", keep=keep))
    torch.testing.assert_close(packed.weight.double(), effective(packed), rtol=1e-6, atol=0)
    x = torch.randn(3, K)
    torch.testing.assert_close(packed(x), F.linear(x, packed.weight, packed.bias), rtol=1e-4, atol=1e-4)


def test_many_rows(monkeypatch):
    """Chunks of rows are invisible."""
    packed = layer(weight=quantize(torch.randn(N, K), "mxfp4", keep=torch.rand(N, K) > 0.97))
    whole = packed.weight
    monkeypatch.setattr("hf_mxfp4.blocks.CHUNK_WEIGHTS", 3 * K)
    assert torch.equal(packed.weight, whole)


def test_dense_copies_where_no_value_can_be_read():
    packed = layer((), dtype=torch.bfloat16)
    packed.weight_global_scale.mul_(0.7)
    expected = packed.weight
    assert torch.equal(torch.compile(lambda: packed.weight, fullgraph=True, backend="aot_eager")(), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = packed.weight
    assert isinstance(fake, FakeTensor) and fake.shape == (N, K) and torch.equal(packed.weight, expected)
    with torch.device("meta"):
        empty = dense_copy(NVFP4, torch.bfloat16, **{n: v.to("meta") for n, v in stored("nvfp4", divisor=3.0).items()})
    assert empty.is_meta and empty.shape == (N, K)
