# SPDX-License-Identifier: Apache-2.0
"""reference.py, bit for bit against code we did not write: compressed-tensors and transformers' gpt-oss decoding."""

import pytest
import torch
from bits import same_bits
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, QuantizedTensor, decode_e4m3
from hf_mxfp4.reference import dequantize, encode, quantize, unpack
from hf_mxfp4.scales import SCALE_RULES, Scales

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
float_dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=["bf16", "f16", "f32"])
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between two E2M1 values


# --- decoding, against the libraries that will read our checkpoints --------------------------------------------------


def every_code_under_every_scale(format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """packed `[256, 128]` that holds all 256 bytes in every row; scale bytes `[256, ...]`, a row for each."""
    packed = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in range(256)])
    blocks = 512 // FORMATS[format].block_size
    return packed, torch.arange(256, dtype=torch.uint8)[:, None].expand(256, blocks).contiguous()


def test_mxfp4_decode_is_gpt_oss():
    """transformers' own reader of gpt-oss, for every byte under every scale but 255.

    Divergence: 255 is NaN in E8M0; transformers makes it 2^128.
    """
    packed, scale = every_code_under_every_scale("mxfp4")
    blocks = packed.view(1, 256, -1, 16)  # [E, N, K/32, 16]
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scale[None], dtype=dtype)[0].T.contiguous()  # they transpose
        ours = dequantize(QuantizedTensor(packed, scale, None, MXFP4), dtype)
        assert same_bits(ours[:255], theirs[:255])
        assert bool(ours[255].isnan().all()) and not bool(theirs[255].isnan().any())


def test_mxfp4_decode_is_compressed_tensors():
    """For every byte under every scale but 255, which both read as NaN or Inf.

    Divergence: they make 255 2^128 = Inf in bfloat16, so codes 0 become NaN and the others Inf; ours are all NaN.
    """
    packed, scale = every_code_under_every_scale("mxfp4")
    stored = {"weight_packed": packed, "weight_scale": scale}
    theirs = MXFP4PackedCompressor.decompress(stored, preset_name_to_scheme("MXFP4A16", ["Linear"]))["weight"]
    ours = dequantize(QuantizedTensor(packed, scale, None, MXFP4))
    assert same_bits(ours[:255], theirs[:255])
    assert bool(ours[255].isnan().all()) and not bool(theirs[255].isfinite().any())


def nvfp4_decompressed(packed, scale, global_scale) -> torch.Tensor:
    """compressed-tensors' bfloat16 weight; it stores the tensor scale's reciprocal, `[1]`."""
    stored = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": global_scale.reciprocal().reshape(1),
    }
    return NVFP4PackedCompressor.decompress(stored, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]


@pytest.mark.parametrize("exponent", [-100, -30, -11, 0, 1, 90])
def test_nvfp4_decode_is_compressed_tensors(exponent):
    """Every byte under every E4M3 byte (negative and NaN too), for tensor scales that are powers of two."""
    packed, scale = every_code_under_every_scale("nvfp4")
    scale, global_scale = scale.view(torch.float8_e4m3fn), torch.tensor(2.0**exponent)
    ours = dequantize(QuantizedTensor(packed, scale, global_scale, NVFP4))
    assert same_bits(ours, nvfp4_decompressed(packed, scale, global_scale))
    # Nothing is rounded: the product has six significant bits, bfloat16 eight.
    assert same_bits(ours.float(), dequantize(QuantizedTensor(packed, scale, global_scale, NVFP4), torch.float32))


def test_nvfp4_decode_with_any_tensor_scale():
    """Divergence: they round `scale / (1 / g)` before multiplying by the code, we multiply by g last. The two float32
    products differ by at most 2 ulp, so bfloat16 values by at most one step, where the product is near a tie."""
    packed, scale = every_code_under_every_scale("nvfp4")
    packed, scale = packed[:127], scale[:127].view(torch.float8_e4m3fn)
    for global_scale in torch.rand(8) + 0.5:
        ours = dequantize(QuantizedTensor(packed, scale, global_scale, NVFP4))
        theirs = nvfp4_decompressed(packed, scale, global_scale)
        steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
        assert int(steps.max()) <= 1
        assert float((steps > 0).float().mean()) < 1e-3


# --- encoding, against compressed-tensors ----------------------------------------------------------------------------


def nvfp4_compressed(weight, global_scale, max_dtype=None) -> Scales | torch.Tensor:
    """compressed-tensors' scales (E4M3 `[N, K/16]`) and packed bytes, given our tensor scale."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    inverse = global_scale.reciprocal().reshape(1)
    blocks = weight.unflatten(-1, (-1, 16)).to(max_dtype or weight.dtype)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=inverse)
    stored = {"weight": weight, "weight_scale": scale, "weight_global_scale": inverse}
    stored = NVFP4PackedCompressor.compress(stored, scheme)
    return stored["weight_scale"], stored["weight_packed"]


def random_weights() -> dict[str, torch.Tensor]:
    return {
        "normal": torch.randn(96, 1024) * 0.02,
        "heavy_tail": torch.randn(96, 1024) / torch.randn(2, 96, 1024).square().mean(0).sqrt(),
        "uniform": torch.rand(96, 1024) - 0.5,
    }


@pytest.mark.parametrize("source", ["random", "minilm"])
def test_nvfp4_amax_is_compressed_tensors_float32(source, request):
    """Scales and packed bytes of float32 weights: equal in every bit, whatever the tensor scale."""
    weights = random_weights() if source == "random" else request.getfixturevalue("minilm")
    for name, weight in weights.items():
        if source == "minilm" and ".layer.0." not in name and ".layer.5." not in name:
            continue
        ours = quantize(weight, "nvfp4", "amax")
        scale, packed = nvfp4_compressed(weight, ours.global_scale)
        assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8)), name
        assert torch.equal(ours.packed, packed), name


@pytest.mark.parametrize("source", ["random", "minilm"])
def test_nvfp4_amax_is_compressed_tensors_bfloat16(source, request):
    """bfloat16 weights meet exact ties more often, and there the order of roundings shows. All divergences:

    * scales, their way: they divide the block maximum by 6 in bfloat16. Up to 2 % of scales are one E4M3 step off
      (10,362 of 663,552 on all of MiniLM).
    * scales, given float32 maxima: they multiply by the reciprocal of the tensor scale. At most 0.1 % are one step
      off, each within 2^-22 of a tie (499 of 663,552).
    * codes under equal scales: they divide by the rounded product of both scales, we by one after the other. At most
      0.05 % are one code off, each within 2^-22 of a tie (1,706 of 10,616,832).
    """
    weights = random_weights() if source == "random" else request.getfixturevalue("minilm")
    other_scales = other_scales_f32 = blocks = other_codes = total = 0
    for name, weight in weights.items():
        if source == "minilm" and ".layer.0." not in name and ".layer.5." not in name:
            continue
        weight = weight.bfloat16()
        ours = quantize(weight, "nvfp4", "amax")
        ours_scale = ours.scale.view(torch.uint8).int()
        theirs_scale, _ = nvfp4_compressed(weight, ours.global_scale)
        steps = (ours_scale - theirs_scale.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1
        other_scales += int(steps.sum())

        theirs_scale, packed = nvfp4_compressed(weight, ours.global_scale, torch.float32)
        steps = (ours_scale - theirs_scale.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1
        other_scales_f32 += int(steps.sum())
        blocks += steps.numel()
        maximum = weight.double().unflatten(-1, (-1, 16)).abs().amax(-1)
        exact = maximum / 6 / ours.global_scale.double()
        e4m3 = decode_e4m3(torch.arange(127, dtype=torch.uint8)).double()
        assert near(exact[steps > 0], (e4m3[1:] + e4m3[:-1]) / 2)

        codes, theirs = unpack(ours.packed), unpack(packed)
        differ = (codes != theirs) & (steps == 0).repeat_interleave(16, 1)
        other_codes += int(differ.sum())
        total += differ.numel()
        assert torch.equal(codes[differ] & 8, theirs[differ] & 8)
        assert bool(((codes[differ].int() - theirs[differ].int()).abs() == 1).all())
        unit = decode_e4m3(ours.scale).double().repeat_interleave(16, 1) * ours.global_scale.double()
        assert near((weight.double().abs() / unit)[differ], torch.tensor(TIES, dtype=torch.float64))
    assert other_scales <= 0.02 * blocks
    assert other_scales_f32 <= 0.001 * blocks
    assert other_codes <= 0.0005 * total


def near(values: torch.Tensor, ties: torch.Tensor) -> bool:
    """Each of `values` is within 2^-22 of one of `ties`, relatively."""
    return bool(((values[:, None] / ties - 1).abs().amin(-1) < 2.0**-22).all())


@float_dtypes
def test_nvfp4_power_of_two_scales_are_compressed_tensors(dtype):
    """With a power of two as tensor scale (our default) scales and codes are equal in every dtype, also where they
    divide block maxima by 6 in bfloat16: no such quotient is rounded across a tie of E4M3."""
    for weight in random_weights().values():
        weight = weight.to(dtype)
        amax = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
        global_scale = torch.exp2((amax.max() / (6 * 448)).log2().ceil())
        expected = (amax / 6 / global_scale).to(torch.float8_e4m3fn)
        scale, packed = nvfp4_compressed(weight, global_scale)
        assert torch.equal(scale.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(encode(weight, Scales(scale, global_scale), NVFP4), packed)


@pytest.mark.parametrize("source", ["random", "minilm"])
def test_nvfp4_tensor_scale_is_compressed_tensors(source, request):
    """Divergence: ours is the multiplier amax / 2688, moved at most one ulp so that it survives being stored as its
    reciprocal; theirs is 2688 / amax, rounded once. The stored values differ by at most one ulp."""
    weights = random_weights() if source == "random" else request.getfixturevalue("minilm")
    for weight in weights.values():
        ours = SCALE_RULES["amax"].function(weight, NVFP4).global_scale.reciprocal()
        theirs = generate_gparam(weight.amin(), weight.amax())
        assert int((ours.view(torch.int32) - theirs.view(torch.int32)).abs()) <= 1


def test_named_divergences_from_compressed_tensors():
    """Blocks of zeros, blocks far below the tensor scale, and -0."""
    weight = torch.zeros(1, 48)
    weight[0, 0], weight[0, 16] = 6 * 448, 1e-3  # the second block is 2^-21 of the first
    weight[0, 17] = -0.0
    ours = quantize(weight, "nvfp4", "amax")
    scale, packed = nvfp4_compressed(weight, ours.global_scale)
    # Zero, or rounded to zero: they store 0.125. We store 2^-6 for zeros, the smallest scale for what rounds to zero.
    assert decode_e4m3(scale).tolist() == [[448.0, 0.125, 0.125]]
    assert decode_e4m3(ours.scale).tolist() == [[448.0, 2.0**-9, 2.0**-6]]
    # They lose the sign of -0; a negative weight that rounds to zero keeps it, there as here.
    codes, theirs = unpack(ours.packed)[0], unpack(packed)[0]
    assert (codes[17], theirs[17]) == (8, 0)
    small = torch.tensor([[6.0, -0.1] * 8])
    assert unpack(nvfp4_compressed(small, torch.tensor(1 / 448))[1])[0, :2].tolist() == [7, 8]
    assert unpack(quantize(small, "nvfp4", "amax").packed)[0, :2].tolist() == [7, 8]
