# SPDX-License-Identifier: Apache-2.0
"""reference.py: rounding and packing, properties of quantize and dequantize, and values one would not wish for."""

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mxfp4.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4, QuantizedTensor
from hf_mxfp4.reference import decode_rows, dequantize, encode, linear, pack, quantize, round_to_e2m1, unpack
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions, Scales

RULES = [(fmt, rule) for rule, row in SCALE_RULES.items() for fmt in row.formats]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
both_formats = pytest.mark.parametrize("format", FORMATS)
every_rule = pytest.mark.parametrize(("format", "rule"), RULES, ids=["-".join(pair) for pair in RULES])
float_dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=["bf16", "f16", "f32"])


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Equal in every stored bit."""
    return (
        torch.equal(one.packed, other.packed)
        and torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))
        and (one.global_scale is None or torch.equal(one.global_scale, other.global_scale))
        and one.format is other.format
    )


# --- rounding and packing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_round_every_16_bit_value(dtype):
    """All finite values in [-8, 8], -0 and subnormals among them, against ml_dtypes."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.isfinite() & (values.abs() <= 8)]
    assert len(values) == {torch.bfloat16: 33_282, torch.float16: 36_866}[dtype]
    theirs = values.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert torch.equal(round_to_e2m1(values), torch.from_numpy(theirs))


# Ties, and what IEEE's "to even" makes of them: the code whose mantissa bit is 0.
TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


@pytest.mark.parametrize(("tie", "even"), TIES.items())
def test_ties_by_hand(tie, even):
    grid = sorted(E2M1_VALUES[:8])
    below, above = max(v for v in grid if v < tie), min(v for v in grid if v > tie)
    assert even in (below, above)
    x = torch.tensor(tie)
    neighbours = torch.stack([x.nextafter(torch.tensor(0.0)), x, x.nextafter(torch.tensor(9.0))])
    for sign in (1, -1):
        rounded = torch.tensor(E2M1_VALUES)[round_to_e2m1(sign * neighbours).int()]
        assert rounded.tolist() == [sign * below, sign * even, sign * above]


def test_rounding_saturates_and_keeps_signs():
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 6.0, -6.0, 6.5, 7.0, -7.5, 1e30, -3e38])
    assert round_to_e2m1(x).tolist() == [0, 8, 0, 8, 7, 15, 7, 7, 15, 7, 15]


def test_pack_puts_even_k_in_the_low_nibble():
    assert pack(torch.tensor([1, 2, 15, 0, 0, 15], dtype=torch.uint8)).tolist() == [0x21, 0x0F, 0xF0]


def test_unpack_every_byte():
    every = torch.arange(256, dtype=torch.uint8)
    assert unpack(every).view(256, 2).tolist() == [[byte & 15, byte >> 4] for byte in range(256)]
    assert torch.equal(pack(unpack(every)), every)


@given(st.lists(st.integers(0, 15), min_size=2, max_size=12).filter(lambda codes: len(codes) % 2 == 0))
def test_pack_unpack_round_trip(codes):
    codes = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    strided = torch.stack([codes, codes], -1)[:, 0]
    assert torch.equal(pack(strided), pack(codes))


# --- quantize and dequantize -----------------------------------------------------------------------------------------


@both_formats
@float_dtypes
def test_encode_is_nearest(format, dtype):
    """With given power-of-two tensor scales: no other code is nearer, in float64, and ties go to the even code."""
    fmt = FORMATS[format]
    weight = (torch.randn(16, 256) * 3).to(dtype)
    one = int((fmt.decode_scale(torch.arange(127, dtype=torch.uint8)) < 1).sum())
    byte = torch.randint(one - 6, one + 6, (16, 256 // fmt.block_size)).byte()  # both clip and vanish
    scales = Scales(fmt.scale_from_bytes(byte), torch.tensor(0.25) if fmt.has_global_scale else None)
    codes = unpack(encode(weight, scales, fmt))
    unit = fmt.decode_scale(byte).double().repeat_interleave(fmt.block_size, 1)
    unit = unit * (0.25 if fmt.has_global_scale else 1)
    candidates = torch.tensor(E2M1_VALUES, dtype=torch.float64) * unit[..., None]
    distance = (candidates - weight.double()[..., None]).abs()
    chosen = distance.gather(-1, codes[..., None].long())
    assert torch.equal(chosen.squeeze(-1), distance.amin(-1))
    tied = (distance == chosen).int()[..., :8].sum(-1) > 1
    assert bool((codes[tied] % 2 == 0).all())


@every_rule
@float_dtypes
def test_decode_is_table_times_scales(format, rule, dtype):
    """The definition in one line, in every output dtype: formed in float32, rounded once."""
    fmt = FORMATS[format]
    weight = (torch.randn(8, 256) * 0.02).to(dtype)
    q = quantize(weight, format, rule)
    exact = torch.tensor(E2M1_VALUES)[unpack(q.packed).int()]
    exact = exact * fmt.decode_scale(q.scale).repeat_interleave(fmt.block_size, 1)
    exact = exact if q.global_scale is None else exact * q.global_scale
    for out in (*FLOATS, torch.float64):
        assert same_bits(dequantize(q, out), exact.to(out))
    assert dequantize(q).dtype == torch.bfloat16
    assert same_bits(decode_rows(q.packed, q.scale, q.global_scale, fmt), exact)


@every_rule
@float_dtypes
def test_error_is_that_of_four_bits(format, rule, dtype):
    """A plausibility bound: relative error of normal weights under each rule, 20 % above what was measured."""
    weight = (torch.randn(64, 1024) * 0.02).to(dtype)
    error = (dequantize(quantize(weight, format, rule), torch.float64) - weight).norm() / weight.double().norm()
    assert float(error) < {"nvfp4": 0.114, "mxfp4": 0.144}[format]


@both_formats
@settings(max_examples=30)
@given(seed=st.integers(0, 2**16))
def test_decoded_weights_are_a_fixed_point(format, seed):
    """What 4 bits can hold, SOAR finds without error: quantizing twice changes no value."""
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))
    once = dequantize(quantize(weight, format), torch.float32)
    assert torch.equal(dequantize(quantize(once, format), torch.float32), once)


@both_formats
def test_shapes_of_what_comes_back(format):
    fmt = FORMATS[format]
    for shape in ((64,), (1, 64), (31, 96), (33, 2880), (3, 5, 64), (2, 3, 5, 64)):
        weight = torch.randn(shape)
        q = quantize(weight, format)
        assert (q.packed.dtype, q.scale.dtype, q.format) == (torch.uint8, fmt.scale_dtype, fmt)
        assert q.packed.shape == (*shape[:-1], shape[-1] // 2)
        assert q.scale.shape == (*shape[:-1], shape[-1] // fmt.block_size)
        assert q.shape == weight.shape
        decoded = dequantize(q)
        assert decoded.shape == weight.shape and decoded.is_contiguous()
        if fmt.has_global_scale:
            assert (q.global_scale.shape, q.global_scale.dtype) == (shape[:-2], torch.float32)
        else:
            assert q.global_scale is None


@every_rule
def test_a_stack_is_its_matrices(format, rule):
    """[E, N, K] and [A, E, N, K]: each matrix has its own tensor scale and is quantized as if alone."""
    stack = torch.randn(2, 3, 5, 128) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    q = quantize(stack, format, rule)
    decoded = dequantize(q, torch.float32)
    for a in range(2):
        for e in range(3):
            alone = quantize(stack[a, e], format, rule)
            part = None if q.global_scale is None else q.global_scale[a, e]
            assert same(alone, QuantizedTensor(q.packed[a, e], q.scale[a, e], part, q.format))
            assert torch.equal(decoded[a, e], dequantize(alone, torch.float32))


@every_rule
def test_one_row_is_a_vector(format, rule):
    weight = torch.randn(128)
    vector, matrix = quantize(weight, format, rule), quantize(weight[None], format, rule)
    assert torch.equal(vector.packed, matrix.packed[0])
    assert torch.equal(dequantize(vector), dequantize(matrix)[0])


@every_rule
@float_dtypes
def test_non_contiguous(format, rule, dtype):
    weight = torch.randn(128, 12).to(dtype)
    for view in (weight.T, torch.randn(12, 256).to(dtype)[:, ::2], torch.randn(3, 12, 128).to(dtype).transpose(0, 1)):
        before = view.clone()
        assert not view.is_contiguous()
        assert same(quantize(view, format, rule), quantize(view.contiguous(), format, rule))
        assert torch.equal(view, before)


@every_rule
def test_dtypes_agree(format, rule):
    """A bfloat16 or float16 weight is quantized as its float32 value."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(8, 128).to(dtype)
        assert same(quantize(weight, format, rule), quantize(weight.float(), format, rule))


@both_formats
@pytest.mark.parametrize("chunk", [1, 128, 5 * 128])
def test_chunks_change_nothing(format, chunk, monkeypatch):
    """Rows are handled in pieces; where they are cut does not show."""
    weight = torch.randn(17, 128)
    free = ScaleOptions(global_scale="free") if format == "nvfp4" else ScaleOptions(search=2)
    whole = quantize(weight, format), dequantize(quantize(weight, format)), quantize(weight, format, options=free)
    monkeypatch.setattr("hf_mxfp4.blocks.CHUNK_WEIGHTS", chunk)
    assert same(quantize(weight, format), whole[0])
    assert torch.equal(dequantize(whole[0]), whole[1])
    assert same(quantize(weight, format, options=free), whole[2])


@both_formats
def test_linear_is_float64_rounded_once(format):
    weight, bias = quantize(torch.randn(24, 128), format), torch.randn(24)
    exact = dequantize(weight, torch.float64)
    for dtype in FLOATS:
        x = torch.randn(2, 3, 128).to(dtype)
        assert torch.equal(
            linear(x, weight, bias), torch.nn.functional.linear(x.double(), exact, bias.double()).to(dtype)
        )
        assert torch.equal(linear(x, weight), (x.double() @ exact.T).to(dtype))
    assert linear(torch.randn(0, 128), weight).shape == (0, 24)


def test_channel_weights_reach_the_rule():
    weight, weights = torch.randn(16, 128), torch.rand(128).pow(4)
    q = quantize(weight, "nvfp4", channel_weights=weights)
    scales = SCALE_RULES["soar"].function(weight, NVFP4, ScaleOptions(), weights)
    assert torch.equal(q.scale.view(torch.uint8), scales.scale.view(torch.uint8))
    assert not torch.equal(q.scale.view(torch.uint8), quantize(weight, "nvfp4").scale.view(torch.uint8))


def test_format_and_rule_names():
    assert same(quantize(torch.ones(2, 32), MXFP4), quantize(torch.ones(2, 32), "mxfp4"))
    with pytest.raises(ValueError, match="scale_rule='ceil'; allowed for nvfp4: amax, four_over_six, soar"):
        quantize(torch.ones(2, 32), "nvfp4", "ceil")
    for arguments, allowed in ((("fp8",), ("mxfp4", "nvfp4")), (("nvfp4", "best"), ("amax", "four_over_six", "soar"))):
        with pytest.raises(ValueError) as error:
            quantize(torch.ones(2, 32), *arguments)
        assert all(name in str(error.value) for name in allowed)


# --- bad and awkward values ------------------------------------------------------------------------------------------


@both_formats
@float_dtypes
def test_nan_and_inf_are_refused(format, dtype):
    """With the tensor's name and how many there are, before anything is written."""
    weight = torch.randn(4, 64).to(dtype)
    weight[0, 3], weight[2, 5], weight[3, 63] = float("nan"), float("inf"), -float("inf")
    before = weight.clone()
    with pytest.raises(ValueError, match=r"layers\.3\.up_proj: 3 of 256 values are NaN or Inf"):
        quantize(weight, format, name="layers.3.up_proj")
    assert same_bits(weight, before)
    stack = torch.zeros(3, 4, 64, dtype=dtype)
    stack[2, 3, 63] = float("nan")
    with pytest.raises(ValueError, match=r"experts: 1 of 768 values"):
        quantize(stack, format, name="experts")


@both_formats
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    + [torch.float64, torch.complex64],
    ids=str,
)
def test_other_dtypes_are_refused(format, dtype):
    with pytest.raises(TypeError) as error:
        quantize(torch.zeros(4, 64, dtype=dtype), format, name="layers.3.up_proj")
    message = str(error.value)
    assert "layers.3.up_proj" in message and str(dtype) in message
    assert all(name in message for name in ("bfloat16", "float16", "float32"))


@both_formats
def test_shapes_that_are_refused(format):
    block = FORMATS[format].block_size
    for shape in ((4, block - 1), (4, block + 8), (1,), (4, 0), (0,)):
        with pytest.raises(ValueError, match=rf"up_proj: in_features={shape[-1]} .*{format}.*{block}"):
            quantize(torch.zeros(shape), format, name="up_proj")
    with pytest.raises(ValueError, match="up_proj: a 0-d tensor"):
        quantize(torch.tensor(1.0), format, name="up_proj")


@every_rule
@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (2, 0, 64), (2, 0, 3, 64)], ids=str)
def test_empty(format, rule, shape):
    """No rows, or no matrices, are a legal weight with nothing in it."""
    q = quantize(torch.zeros(shape), format, rule)
    assert q.shape == shape
    assert q.scale.shape == (*shape[:-1], 64 // FORMATS[format].block_size)
    assert q.scale.dtype == FORMATS[format].scale_dtype
    if q.global_scale is not None:
        assert q.global_scale.shape == shape[:-2]
        assert bool((q.global_scale > 0).all())
    assert dequantize(q).shape == shape


@every_rule
@float_dtypes
def test_zeros(format, rule, dtype):
    """A block of zeros has codes 0 and the smallest normal scale; so has a tensor of zeros. -0 keeps its sign."""
    fmt = FORMATS[format]
    weight = torch.randn(4, 128).to(dtype)
    weight[1, 32:64] = 0
    q = quantize(weight, format, rule)
    zero = slice(32 // fmt.block_size, 64 // fmt.block_size)
    assert bool((q.packed[1, 16:32] == 0).all())
    assert bool((q.scale[1, zero].view(torch.uint8) == fmt.zero_byte).all())
    q = quantize(torch.zeros(4, 128, dtype=dtype), format, rule)
    assert bool((q.packed == 0).all()) and bool((q.scale.view(torch.uint8) == fmt.zero_byte).all())
    assert q.global_scale is None or float(q.global_scale) == 1.0
    assert same_bits(dequantize(q, dtype), torch.zeros(4, 128, dtype=dtype))
    q = quantize(torch.full((4, 128), -0.0, dtype=dtype), format, rule)
    assert bool((q.packed == 0x88).all())


@every_rule
@float_dtypes
@pytest.mark.parametrize("only", [True, False], ids=["one_hot", "uniform"])
def test_largest_finite_values(format, rule, dtype, only):
    """The dtype's own maximum is legal and comes back finite, clipped where the format ends below it. (In float16 a
    decoded 65536 would be Inf: it is read back in float32.)"""
    largest = torch.finfo(dtype).max
    weight = torch.zeros(2, 64) if only else torch.rand(2, 64) * 0.9 * largest
    weight = weight.to(dtype)
    weight[0, 3], weight[1, 40] = largest, -largest
    q = quantize(weight, format, rule)
    for out in (torch.float32, torch.bfloat16):
        if dtype == torch.float32 and out == torch.bfloat16:
            continue  # float32's maximum is Inf in bfloat16
        decoded = dequantize(q, out)
        assert bool(decoded.isfinite().all())
        assert 0.65 * largest <= float(decoded[0, 3]) and float(decoded[1, 40]) <= -0.65 * largest


@every_rule
def test_float16_subnormals(format, rule):
    """Ordinary numbers in float32: the error is that of the same weights scaled up."""
    weight = torch.randint(-1023, 1024, (8, 128)).to(torch.int16)
    weight = torch.where(weight < 0, -weight | -(2**15), weight).view(torch.float16)  # sign and magnitude
    assert float(weight.abs().max()) < torch.finfo(torch.float16).smallest_normal
    q, large = quantize(weight, format, rule), quantize(weight.float() * 2.0**20, format, rule)
    assert torch.equal(q.packed, large.packed)
    assert torch.equal(dequantize(q, torch.float32) * 2.0**20, dequantize(large, torch.float32))


@every_rule
@pytest.mark.parametrize("exponent", [-110, -100, 100])
def test_very_small_and_very_large(format, rule, exponent):
    """Weights near 1e-33 or 1e30 quantize as those near 1."""
    weight = torch.randn(8, 128)
    q, scaled = quantize(weight, format, rule), quantize(weight * 2.0**exponent, format, rule)
    assert torch.equal(q.packed, scaled.packed)
    assert torch.equal(dequantize(q, torch.float32) * 2.0**exponent, dequantize(scaled, torch.float32))


@every_rule
def test_smallest(format, rule):
    """Below float32's normal range weights count as zero; just above it they are still legal."""
    subnormal = torch.full((2, 64), 2.0**-130)
    subnormal[0, 0] *= -1
    q = quantize(subnormal, format, rule)
    assert bool((q.packed[0, 1:] == 0).all()) and q.packed[0, 0] == 0x08
    tiny = torch.full((2, 64), 2.0**-126)
    decoded = dequantize(quantize(tiny, format, rule), torch.float32)
    assert bool(decoded.isfinite().all()) and float(decoded.max()) <= 2.0**-125


@every_rule
def test_one_huge_outlier(format, rule):
    """It costs its own block, and (NVFP4) what falls below the tensor scale's range; nothing becomes NaN."""
    weight = torch.randn(8, 128) * 0.02
    plain = dequantize(quantize(weight, format, rule), torch.float32)
    weight[3, 5] = 1e4
    decoded = dequantize(quantize(weight, format, rule), torch.float32)
    assert bool(decoded.isfinite().all())
    assert float(decoded[3, 5]) == pytest.approx(1e4, rel=0.25)
    error = (decoded - weight).norm() / 1e4
    assert float(error) < 0.25
    if format == "mxfp4":  # no tensor scale: every other block is as before
        others = torch.ones(8, 128, dtype=torch.bool)
        others[3, :32] = False
        assert torch.equal(decoded[others], plain[others])


@every_rule
@pytest.mark.parametrize("exponent", [0, -100, -123, -125, -126, 126])
def test_flush_to_zero_changes_nothing(format, rule, exponent):
    """Codes and scales do not depend on the FPU's mode, whatever the weights."""
    weight = torch.randn(8, 128).clamp(-1.9, 1.9) * 2.0**exponent
    weight[0, :32] *= 2.0**-100 if exponent < 126 else 2.0**-140  # a block far below the others
    weight[1, :32] = 0
    plain = quantize(weight, format, rule)
    decoded = dequantize(plain, torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        flushed = quantize(weight, format, rule)
        decoded_flushed = dequantize(flushed, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert same(plain, flushed)
    normal = decoded.abs() >= 2.0**-126  # a subnormal result is what the mode is there to flush
    assert torch.equal(decoded[normal], decoded_flushed[normal])


@both_formats
def test_a_parameter_is_quantized_without_its_graph(format):
    """`quantize(linear.weight)` is the first thing one tries."""
    weight = torch.nn.Parameter(torch.randn(8, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = quantize(weight, format)
    assert same(q, quantize(weight.detach(), format))
    assert not any(t.requires_grad for t in q[:3] if t is not None)


# --- cost ------------------------------------------------------------------------------------------------------------

PEAK = """
import torch
from hf_mxfp4.reference import dequantize, quantize
torch.set_num_threads(1)
def peak():  # not getrusage: its maximum includes the process this one was forked from
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
dequantize(quantize(torch.randn(64, 4096).bfloat16(), "nvfp4"))  # what torch loads on first use
weight = torch.nn.Parameter(torch.empty(4096, 4096, dtype=torch.bfloat16))
for row in weight.data:
    row.copy_(torch.randn(4096))
before = peak()
quantized = quantize(weight, "nvfp4")
after = peak()
dequantize(quantized)
print((after - before) / weight.numel(), (peak() - after) / weight.numel())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory():
    """A [4096, 4096] bfloat16 parameter: at most 8 bytes a weight beyond the input to quantize it, results included;
    at most 4 to decode it, 2 of which are the result."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    quantizing, decoding = map(float, done.stdout.split())
    assert quantizing <= 8
    assert decoding <= 4


class Count(TorchDispatchMode):
    """Counts torch operations."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@every_rule
def test_no_loop_over_blocks(format, rule):
    """Four times as many blocks take about as many torch calls, and far fewer calls than blocks."""
    calls = []
    for rows in (128, 512):  # 512 x 512 weights are one chunk
        with Count() as count:
            quantize(torch.randn(rows, 512), format, rule)
        calls.append(count.calls)
    assert calls[1] < 1.5 * calls[0] + 50
    assert calls[1] < 512 * 512 / FORMATS[format].block_size / 4
