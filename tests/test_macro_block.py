# SPDX-License-Identifier: Apache-2.0
"""macro_block.py against its definitions, in float64 and bit for bit, over all factors and exponents."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hf_mxfp4 import blocks, macro_block, reference
from hf_mxfp4.blocks import Units, power_of_two
from hf_mxfp4.formats import MXFP4
from hf_mxfp4.macro_block import block_factors, factors, search, static_factors
from hf_mxfp4.scales import Scales, overflow_aware_rule, soar_rule

COLUMNS = 416  # three macro-blocks and a short one
EXPONENTS = {"near": torch.arange(-6, 1), "all": torch.arange(-12, 3)}  # of a scale, less that of the block's maximum


def on_the_grid() -> torch.Tensor:
    """Rows that some factor and exponents represent exactly."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, (2, COLUMNS))]
    scale = 2.0 ** torch.randint(-3, 4, (2, COLUMNS // 32))
    macro = torch.randint(256, (2, -(-COLUMNS // 128)), dtype=torch.uint8)
    return magnitudes * (scale * block_factors(macro, COLUMNS // 32, 32)).repeat_interleave(32, 1)


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of many distributions, `[16, 416]`, all within the range of float16."""
    normal = torch.randn(16, COLUMNS)
    rows = [
        0.02 * normal[:3],
        (normal[3:5] / torch.randn(2, 2, COLUMNS).square().mean(0).sqrt()).clamp(-1e4, 1e4),  # Student's t
        normal[5:6].abs() + 3,  # all of a size
        normal[6:7].sign() * 0.7,  # binary
        normal[7:8] * (torch.rand(COLUMNS) < 0.03),  # sparse: many zero blocks
        normal[8:9] * 2.0 ** -torch.randint(0, 14, (COLUMNS // 32,)).repeat_interleave(32),  # blocks of all sizes
        normal[9:10] * 2.0 ** -torch.randint(0, 14, (COLUMNS,)),
        0.01 * normal[10:11] + 30 * (torch.rand(COLUMNS) < 0.01),  # outliers
        torch.zeros(1, COLUMNS),
        F.one_hot(torch.tensor([200]), COLUMNS) * 0.3,
        torch.rand(1, COLUMNS),
        on_the_grid(),
    ]
    return torch.cat(rows).to(dtype)


def channel_weights() -> torch.Tensor:
    """Over many orders of magnitude, some zero, one whole block unseen."""
    return (3 * torch.randn(COLUMNS)).exp().mul(torch.rand(COLUMNS) > 0.1).index_fill(0, torch.arange(32, 64), 0.0)


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
weightings = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def padded_blocks(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[macro-blocks, 4, 32]`, zeros after a short last one."""
    return F.pad(weight.to(dtype), (0, -weight.shape[-1] % 128)).view(-1, 4, 32)


def decoded(weight: torch.Tensor, scales: Scales, macro: torch.Tensor) -> torch.Tensor:
    packed = reference.encode(weight, scales, MXFP4, macro)
    return reference.decode_rows(packed, scales.scale, None, MXFP4, macro=macro)


def macro_errors(weight, scales, macro, channel_weights=None) -> torch.Tensor:
    """Squared error of each macro-block, float64."""
    terms = (decoded(weight, scales, macro).double() - weight.double()).square()
    return padded_blocks(terms if channel_weights is None else terms * channel_weights, torch.float64).sum((1, 2))


# --- factors ---------------------------------------------------------------------------------------------------------


def test_factors():
    macro = torch.arange(256, dtype=torch.uint8)
    assert factors(macro).tolist() == [1 + m / 256 for m in range(256)]
    assert block_factors(macro.view(64, 4), 13, 32)[1].tolist() == [
        1 + m / 256 for m in (4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7)
    ]


@pytest.mark.parametrize(
    ("amax", "m"),
    [
        (6.0, 0),
        (6 * (1 + 85 / 256), 85),
        (6 * (1 + 1 / 512), 1),  # half a step
        (6 * (1 + 1 / 513), 0),
        (6 * (1 + 255 / 256), 255),
        (6 * (2 - 1 / 512), 0),  # rounded up to 2
        (12.0, 0),
        (4.0, 85),  # 4 / 6 = (1 + 85.33 / 256) / 2
        (2.0**-120, 85),
        (2.0**-121, 0),  # counts as zero
        (0.0, 0),
        (torch.finfo(torch.float32).max, 85),
    ],
)
def test_static_by_hand(amax, m):
    weight = torch.zeros(1, 160)
    weight[0, 70], weight[0, 130] = -amax, amax / 8
    assert static_factors(weight).tolist() == [[m, m if amax / 8 >= 2.0**-120 else 0]]


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_static_is_its_formula(amax):
    mantissa = 2 * math.frexp(amax / 6)[0]
    m = int(static_factors(torch.full((1, 32), amax)))
    assert m in {math.floor((mantissa - 1) * 256 + 0.5 + nudge) % 256 for nudge in (-1e-4, 1e-4)}
    landed = amax / (1 + m / 256) / 6  # nearly a power of two
    assert abs(math.log2(landed) - round(math.log2(landed))) <= math.log2(1 + 1 / 512) + 1e-6


@dtypes
def test_static_is_finite(dtype):
    """The largest weights a dtype has do not overflow when decoded, and are within a rounding of the grid's top."""
    weight = torch.full((1, 128), torch.finfo(dtype).max, dtype=dtype)
    macro = static_factors(weight)
    scales = overflow_aware_rule(weight / block_factors(macro, 4, 32).repeat_interleave(32, 1), MXFP4)
    assert torch.allclose(decoded(weight, scales, macro), weight.float(), rtol=1 / 512)


# --- search ----------------------------------------------------------------------------------------------------------


def brute_force(weight, exponents, channel_weights=None) -> torch.Tensor:
    """Least error of each macro-block for each factor, float64 `[macro-blocks, 256]`, by nearest grid value."""
    magnitude = padded_blocks(weight, torch.float64).abs()
    h = torch.ones(COLUMNS) if channel_weights is None else channel_weights
    h = padded_blocks(h.expand(len(weight), -1), torch.float64)
    grid = torch.tensor(reference.E2M1_VALUES[:8], dtype=torch.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    step = 2.0 ** (magnitude.amax(-1).clamp(min=1e-30).log2().floor()[..., None] + exponents).unsqueeze(-1)
    least = []
    for m in range(256):
        scale = step * (1 + m / 256)
        value = grid[torch.bucketize(magnitude.unsqueeze(2) / scale, middle)] * scale
        terms = (value - magnitude.unsqueeze(2)).square_() * h.unsqueeze(2)
        least.append(terms.sum(-1).amin(-1).sum(-1))
    return torch.stack(least, -1)


@weightings
@dtypes
def test_search_is_the_best(dtype, weighted):
    """No factor with any exponents is better, in float64, by more than float32 can see."""
    weight = weights(dtype)
    h = channel_weights() + 1e-3 if weighted else None
    least = brute_force(weight, EXPONENTS["all" if weighted else "near"], h)
    scales, macro = search(weight, MXFP4, h)
    found = macro_errors(weight, scales, macro, h)
    best, m = least.min(-1)
    assert bool((found <= best * (1 + 1e-5) + 1e-30).all())
    assert (macro.flatten() == m).double().mean() > 0.95  # the others: ties that rounding breaks


def exhaustive(weight, channel_weights=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in the docstring of `search`, word for word: scale bytes and factors."""
    (n, k), pad = weight.shape, (0, -weight.shape[1] % 128)
    unit = Units(F.pad(weight, pad), MXFP4, None, None if channel_weights is None else F.pad(channel_weights, pad))
    offset = unit.offset.view(-1, 4)
    counts = torch.ones_like(offset, dtype=torch.bool) if channel_weights is None else ~unit.unseen.view(-1, 4)
    counts = counts | ~counts.any(-1, keepdim=True)
    largest = torch.where(counts, offset, -126).amax(-1, keepdim=True)
    share = power_of_two(2 * (offset - largest).clamp(-63, 0)) * counts
    bytes, errors = [], []
    for m in range(256):
        unit.factor = torch.full_like(unit.amax, 1 + m / 256)
        byte, error = unit.search_full()
        e = (error.view(-1, 4) * share).unbind(-1)
        bytes.append(byte.view(-1, 4))
        errors.append((e[0] + e[2]) + (e[1] + e[3]))
    errors = torch.stack(errors, -1)
    best = (errors == errors.amin(-1, keepdim=True)).int().argmax(-1)  # the first of equal ones
    byte = torch.stack(bytes)[best, torch.arange(len(best))]
    byte = torch.where(unit.amax.view(-1, 4) == 0, MXFP4.zero_byte, byte)
    return byte.view(n, -1)[:, : k // 32].to(torch.uint8), best.view(n, -1).to(torch.uint8)


def assert_exhaustive(weight, channel_weights=None):
    scales, macro = search(weight, MXFP4, channel_weights)
    byte, m = exhaustive(weight, channel_weights)
    assert (macro.dtype, scales.scale.dtype, scales.global_scale) == (torch.uint8, torch.uint8, None)
    assert torch.equal(macro, m) and torch.equal(scales.scale, byte)


@weightings
@dtypes
def test_search_is_exhaustive(dtype, weighted):
    """Bit for bit what trying all 256 factors with all exponents gives."""
    assert_exhaustive(weights(dtype), channel_weights() if weighted else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_search_is_exhaustive_at_the_ends(dtype):
    """Weights near the largest and the smallest numbers, subnormal ones, and blocks 2^200 apart; all stays finite."""
    largest = torch.finfo(dtype).max
    rows = [
        (torch.randn(2, 160) * 2.0**126).clamp(-largest, largest),
        torch.randn(1, 160) * 2.0**-119,
        torch.randn(1, 160) * 2.0**-130,
        torch.randn(2, 160) * 2.0 ** torch.randint(-110, 110, (5,)).repeat_interleave(32),
        torch.randn(2, 160) * 2.0 ** -torch.randint(0, 130, (160,)),
    ]
    weight = torch.cat(rows).to(dtype)
    assert_exhaustive(weight)
    assert_exhaustive(weight, torch.rand(160))
    for extreme in (weight, torch.full((1, 160), largest, dtype=dtype)):
        assert decoded(extreme, *search(extreme, MXFP4)).isfinite().all()


def test_two_exponents_are_enough():
    """Without weights: the largest with max >= 3.5 s, or the next below."""
    weight = weights(torch.bfloat16)
    scales, macro = search(weight, MXFP4)
    scale = MXFP4.decode_scale(scales.scale) * block_factors(macro, COLUMNS // 32, 32)
    amax = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    ratio = (amax / scale)[amax > 0]
    assert bool(((ratio >= 3.5) & (ratio < 14)).all())
    assert set(torch.unique(ratio >= 7).tolist()) == {True, False}


@weightings
@dtypes
def test_bounds_hold(dtype, weighted):
    """What spares `search` most of the factors: bounds on the errors of all of them, which are equal for bfloat16."""
    weight = weights(dtype)[:10]
    magnitude = weight.float().abs().view(-1, 32)
    magnitude = magnitude[magnitude.amax(-1) > 0]
    magnitude = magnitude * (1.75 / magnitude.amax(-1, keepdim=True)).log2().ceil().exp2()
    assert bool(((magnitude.amax(-1) >= 1.75) & (magnitude.amax(-1) < 3.5)).all())
    h = torch.rand_like(magnitude).square() if weighted else None
    energy = (magnitude.square() if h is None else magnitude.square() * h).sum(-1)
    bounds = macro_block._bounds(magnitude, h, torch.full((len(energy),), 100), energy)
    assert len(bounds) == 1 if dtype is torch.bfloat16 else 2

    x, grid = magnitude.double(), torch.tensor(reference.E2M1_VALUES[:8], dtype=torch.float64)
    middle, least = (grid[1:] + grid[:-1]) / 2, torch.full((len(energy), 256), torch.inf, dtype=torch.float64)
    scales = factors(torch.arange(256)).double()[:, None]
    for octave in range(1, 9):
        scale = scales * 2.0**-octave
        for i, block in enumerate(x):
            terms = (grid[torch.bucketize(block / scale, middle)] * scale - block).square()
            least[i] = torch.minimum(least[i], (terms if h is None else terms * h[i].double()).sum(-1))
    least -= energy.double()[:, None]
    slack = macro_block._TOLERANCE / 2 * energy.double()[:, None]
    assert bool((bounds[0] <= least + slack).all() and (bounds[-1] >= least - slack).all())
    assert bool((bounds[-1] - bounds[0] <= 0.01 * energy[:, None]).all())


def test_search_beats_the_others():
    weight = weights()
    searched = macro_errors(weight, *search(weight, MXFP4))
    zero = torch.zeros((16, 4), dtype=torch.uint8)
    assert bool((searched <= macro_errors(weight, soar_rule(weight, MXFP4), zero) * (1 + 1e-5)).all())  # m = 0
    macro = static_factors(weight)
    divided = weight / block_factors(macro, COLUMNS // 32, 32).repeat_interleave(32, 1)
    static = macro_errors(weight, overflow_aware_rule(divided, MXFP4), macro)
    assert bool((searched <= static * (1 + 1e-5)).all())
    assert searched.sum() < 0.9 * static.sum()


def test_what_was_decoded_is_found_again():
    """float32 values of a quantized weight are represented exactly once more."""
    weight = weights()
    once = decoded(weight, *search(weight, MXFP4))
    assert torch.equal(decoded(once, *search(once, MXFP4)), once)


def test_zeros():
    weight = weights()
    weight[3, :128], weight[4, 160:192] = 0.0, -0.0
    scales, macro = search(weight, MXFP4)
    zero = weight.unflatten(-1, (-1, 32)).abs().amax(-1) == 0
    assert bool((scales.scale[zero] == MXFP4.zero_byte).all()) and zero.any(0).all()
    assert bool((macro[padded_blocks(weight, torch.float32).abs().amax((1, 2)).view(16, 4) == 0] == 0).all())
    scales, macro = search(torch.zeros(3, 160), MXFP4)
    assert bool((macro == 0).all() and (scales.scale == MXFP4.zero_byte).all())


@pytest.mark.parametrize("columns", [32, 96, 128, 160, 416])
def test_short_last_macro_block(columns):
    """Macro-blocks do not see each other, and zeros that fill a short one change nothing."""
    weight, h = weights(), channel_weights()
    scales, macro = search(weight, MXFP4, h)
    for part in (weight[:, :columns], weight[:, :columns].contiguous()):
        few, m = search(part, MXFP4, h[:columns])
        assert (
            few.scale.shape == (16, columns // 32) and few.scale.is_contiguous() and m.shape[1] == -(-columns // 128)
        )
        full = columns // 128  # a short one is another macro-block if the weight goes on
        assert torch.equal(few.scale[:, : 4 * full], scales.scale[:, : 4 * full])
        assert torch.equal(m[:, :full], macro[:, :full])
        filled, n = search(F.pad(part, (0, -columns % 128)), MXFP4, F.pad(h[:columns], (0, -columns % 128)))
        assert torch.equal(filled.scale[:, : columns // 32], few.scale) and torch.equal(n, m)
    assert static_factors(weight[:, :columns]).shape == (16, -(-columns // 128))


def test_no_rows():
    scales, macro = search(torch.empty(0, 160), MXFP4)
    assert (scales.scale.shape, macro.shape) == ((0, 5), (0, 2))
    assert static_factors(torch.empty(0, 160)).shape == (0, 2)


def test_sign_and_exponent_do_not_matter():
    weight = weights()
    scales, macro = search(weight, MXFP4)
    moved, m = search(-weight * 2.0**40, MXFP4)
    assert torch.equal(m, macro)
    zero = weight.unflatten(-1, (-1, 32)).abs().amax(-1) == 0
    assert torch.equal(moved.scale[~zero].int(), scales.scale[~zero].int() + 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_chunks_and_threads_change_nothing(dtype, monkeypatch):
    weight, h = torch.randn(8, 672).to(dtype), torch.rand(672)
    expected = [search(weight, MXFP4), search(weight, MXFP4, h)]
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for chunk, filtered, pairs in ((1 << 18, 1024, 4096), (2000, 1024, 50), (1 << 18, 96, 4096)):
                monkeypatch.setattr(blocks, "CHUNK_WEIGHTS", chunk)
                monkeypatch.setattr(macro_block, "_BLOCKS", filtered)
                monkeypatch.setattr(macro_block, "_PAIRS", pairs)
                for (scales, macro), weights_of in zip(expected, (None, h), strict=True):
                    again, m = search(weight, MXFP4, weights_of)
                    assert torch.equal(again.scale, scales.scale) and torch.equal(m, macro)
    finally:
        torch.set_num_threads(threads)


# --- channel weights -------------------------------------------------------------------------------------------------


def test_channel_weights_are_what_is_minimised():
    weight, h = weights(), channel_weights() + 1e-3
    plain, weighed = search(weight, MXFP4), search(weight, MXFP4, h)
    assert bool((macro_errors(weight, *weighed, h) <= macro_errors(weight, *plain, h) * (1 + 1e-5)).all())
    assert macro_errors(weight, *weighed, h).sum() < 0.9 * macro_errors(weight, *plain, h).sum()
    assert macro_errors(weight, *weighed).sum() > macro_errors(weight, *plain).sum()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.25])
def test_equal_channel_weights_change_nothing(value):
    weight = weights()
    scales, macro = search(weight, MXFP4)
    weighed, m = search(weight, MXFP4, torch.full((COLUMNS,), value, dtype=torch.float64))
    assert torch.equal(weighed.scale, scales.scale) and torch.equal(m, macro)


def test_unseen_blocks_have_no_say():
    """Their exponents are the best for plain error, but the factor is that of the others."""
    weight, h = torch.randn(8, 128), torch.ones(128).index_fill(0, torch.arange(32, 64), 0.0)
    scales, macro = search(weight, MXFP4, h)
    others = weight.index_fill(1, torch.arange(32, 64), 0.0)
    rest, m = search(others, MXFP4)
    assert torch.equal(macro, m) and torch.equal(scales.scale[:, [0, 2, 3]], rest.scale[:, [0, 2, 3]])
    best = soar_rule(weight[:, 32:64] / factors(macro), MXFP4).scale
    assert torch.equal(scales.scale[:, 1:2], best)
    everywhere = search(
        torch.cat((2.0**20 * weight, weight), 1), MXFP4, torch.cat((torch.zeros(128), torch.ones(128)))
    )
    assert torch.equal(everywhere[1], search(weight, MXFP4)[1].repeat(1, 2))


# --- real weights ----------------------------------------------------------------------------------------------------


def test_minilm(minilm):
    """The 36 encoder matrices together, relative to NVFP4 `amax`. 1.1388 is the best that any factors reach."""
    errors = torch.zeros(3, dtype=torch.float64)
    for weight in minilm.values():
        macro = static_factors(weight)
        divided = weight / block_factors(macro, weight.shape[1] // 32, 32).repeat_interleave(32, 1)
        static = decoded(weight, overflow_aware_rule(divided, MXFP4), macro)
        amax = reference.dequantize(reference.quantize(weight, "nvfp4", "amax"), torch.float32)
        for i, values in enumerate((amax, static, decoded(weight, *search(weight, MXFP4)))):
            errors[i] += (values - weight).double().square().sum()
    assert errors[1] / errors[0] == pytest.approx(1.333, abs=0.002)
    assert 1.13 < errors[2] / errors[0] <= 1.139
