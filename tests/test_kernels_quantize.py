# SPDX-License-Identifier: Apache-2.0
"""The kernels that quantize weights and activations against the reference, bit for bit.

On the GPU if there is one, else in Triton's interpreter. Cases share launches: the interpreter's time goes by
operations, hardly by how many blocks they work on.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from bits import same_bits
from packaging.version import Version
from torch.nn import functional as F

from hf_mxfp4 import macro_block, reference
from hf_mxfp4.blocks import Units, power_of_two
from hf_mxfp4.formats import E2M1_MAGNITUDES, FORMATS, MXFP4, NVFP4, decode_e4m3
from hf_mxfp4.quantization import quantize

pytest.importorskip("triton")

import triton
import triton.language as tl

from hf_mxfp4.kernels import quantize as kernels
from hf_mxfp4.kernels.fake_quantize import fake_quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT32_MAX = torch.finfo(torch.float32).max
BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between E2M1 magnitudes

both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
every_dtype = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype).removeprefix("torch.")
)
# The interpreter's numpy warns of what blocks compute that have ended, and of bits that are meant to be dropped.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")


def steps(value: torch.Tensor, count: int) -> torch.Tensor:
    """Positive float32 values `count` steps further from zero."""
    return (value.view(torch.int32) + count).view(torch.float32)


def assert_equal_to_reference(weight, fmt, channel_weights=None, macro_block=None):
    options = {"channel_weights": channel_weights, "macro_block": macro_block}
    got = quantize(weight.to(DEVICE), fmt, **options, backend="triton")
    expected = reference.quantize(weight, fmt, **options)
    for name in ("global_scale", "macro", "scale", "packed"):
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype
            different = one.cpu().to(torch.float32) != other.to(torch.float32)
            different = different.view(*one.shape[: weight.ndim - 2], -1).any(-1)
            assert not different.any(), f"{name} of matrices {different.nonzero().flatten().tolist()}"


# --- weights ---------------------------------------------------------------------------------------------------------


def odd_weights() -> dict[str, torch.Tensor]:
    """Matrices `[4, 96]` by what is odd about them, float32."""
    normal, uniform = torch.randn(4, 96), torch.rand(4, 96)
    sign = torch.randint(0, 2, (4, 96)) * 2.0 - 1
    holes = normal.clone()
    holes[1], holes[2, :32], holes[3, 5::7] = 0, 0, -0.0
    lonely = torch.zeros(4, 96)
    lonely[[0, 1, 2, 3], [0, 40, 63, 95]] = torch.tensor([1.0, -2.0, 1e-3, 1e-6])
    grid = torch.tensor(E2M1_MAGNITUDES + BOUNDARIES)[torch.randint(0, 15, (4, 96))] * sign
    return {
        "normal": normal * 0.02,
        "heavy tails": normal**5,
        "tiny": normal * 2.0**-117,  # some below 2^-120, where weights count as zero
        "huge": normal * 2.0**122,
        "the largest there are": torch.where(uniform > 0.9, FLOAT32_MAX, uniform * FLOAT32_MAX) * sign,
        "every size": sign * 2.0 ** (uniform * 250 - 125),
        "zeros": torch.zeros(4, 96) * sign,
        "zero blocks": holes,
        "one weight in a block": lonely,
        "constant": sign * 0.37,
        "grid points and ties": grid,
        "ties in small scales": grid * 2.0**-20,
    }


def stacked(dtype: torch.dtype, *without: str) -> torch.Tensor:
    """All odd weights, or all but some, `[<= 12, 4, 96]`, in a dtype's range."""
    weights = torch.stack([weight for name, weight in odd_weights().items() if name not in without])
    return weights.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@both_formats
@every_dtype
def test_odd_weights(fmt, dtype):
    assert_equal_to_reference(stacked(dtype), fmt)


@both_formats
def test_channel_weights(fmt):
    """Some blocks without a weight that counts, some with one, seldom the largest: there the others all clip."""
    channel_weights = torch.randn(96, dtype=torch.float64).exp()
    channel_weights[:32] = 0
    assert_equal_to_reference(stacked(torch.float32), fmt, channel_weights)
    channel_weights[[*range(33, 48), *range(65, 96)]] = 0
    assert_equal_to_reference(torch.rand(20, 96) + 0.2, fmt, channel_weights)


def test_first_candidate_e4m3():
    """Block maxima at 3.5 times every E4M3 scale, and next to it, in units of a tensor scale of 1."""
    edges = 3.5 * decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    amax = torch.cat([steps(edges, count) for count in (-1, 0, 1)])
    weight = torch.rand(len(amax) + 6, 16) * 0.9
    weight[:-6] *= amax[:, None]
    weight[:-6, 7], weight[-6:, 0] = -amax, 4 * 448
    weight = weight.view(-1, 64)
    assert float(reference.quantize(weight, NVFP4).global_scale) == 1
    assert_equal_to_reference(weight, NVFP4)


def test_first_candidate_e8m0():
    """Block maxima next to 1.75 * 2^e and 2^e, for every exponent e."""
    exponents = power_of_two(torch.arange(-120, 128))
    amax = torch.cat([steps(exponents * factor, count) for factor in (1.0, 1.75) for count in (-1, 0, 1)])
    weight = torch.rand(len(amax), 32) * amax[:, None]
    weight[:, 9] = amax
    assert_equal_to_reference(weight, MXFP4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("step", [51, pytest.param(1, marks=pytest.mark.slow)])
def test_macro_block(weighted, step, monkeypatch):
    """Short macro-blocks, zeros, channel weights that see only some blocks. The slow interpreter tries few factors."""
    monkeypatch.setattr(kernels, "FACTOR_STEP", step)
    candidates = (torch.arange(256) % step == 0)[None]
    if step > 1:
        monkeypatch.setattr(macro_block, "_candidates", lambda unit, share: candidates.expand(len(share), -1))
    weight = stacked(torch.bfloat16, "the largest there are", "constant")  # both take it through all exponents
    weight = torch.cat([weight, torch.randn(len(weight), 4, 192) ** 3], 2)
    weight[3, :, 100:260], weight[4, 1], weight[5, 2, 200] = 0, -0.0, torch.finfo(torch.bfloat16).max
    channel_weights = None
    if weighted:
        channel_weights = torch.randn(288).exp()
        channel_weights[:64], channel_weights[128:256] = 0, 0
    assert_equal_to_reference(weight, MXFP4, channel_weights, "search")
    assert_equal_to_reference(weight[:, 0].bfloat16(), MXFP4, channel_weights, "search")


@pytest.mark.parametrize("divide", [True, False])
def test_boundaries(divide, monkeypatch):
    """Float32 weights on a tie and a last bit off it, for all mantissas of E4M3, by either form of the division."""
    if not divide:
        if kernels.INTERPRET and Version(triton.__version__) < Version("3.9"):
            pytest.skip("this interpreter's fma rounds twice")
        monkeypatch.setattr(kernels, "INTERPRET", False)  # as on a GPU: tiles of 32 blocks too
    scale = (1 + torch.arange(8) / 8)[:, None, None, None]
    boundary = scale * torch.tensor(BOUNDARIES)[:, None, None]
    boundary = torch.cat([steps(boundary, count) for count in (-1, 0, 1)], 2)
    grid = scale * torch.tensor(E2M1_MAGNITUDES[1:] * 3)[:15].expand(7, 3, 15)
    blocks = torch.cat([boundary, grid], 3).view(-1, 16)
    weight = F.pad(blocks, (0, 0, 0, 8), value=4 * 448).view(-1, 64)  # tensor scale 1
    chosen = decode_e4m3(reference.quantize(weight, NVFP4).scale).flatten()[:-8]
    assert (chosen == scale.flatten().repeat_interleave(21)).sum() > 160  # of 168: these scales encode
    assert_equal_to_reference(weight, NVFP4)


def test_quotient():
    """Its three operations, in exact arithmetic: on the right side of every boundary, for scales of 8 mantissa bits.

    More than E4M3 has, and more steps off the boundary than two roundings can be wrong by.
    """

    def fma(a, b, c):  # float64 holds the product, and no sum here is halfway between two float32 numbers
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        rounded = np.float32(float(exact))
        assert (
            Fraction(float(rounded)) == exact or abs(Fraction(float(rounded)) - exact) < np.spacing(abs(rounded)) / 2
        )
        return rounded

    for scale in np.float32(1) + np.arange(256, dtype=np.float32) / np.float32(256):
        reciprocal = np.float32(1) / scale
        for boundary in np.float32(BOUNDARIES):
            at = boundary * scale
            for count in range(-3, 4):
                value = (at.view(np.int32) + np.int32(count)).view(np.float32)
                first = value * reciprocal
                result = fma(fma(-first, scale, value), reciprocal, first)
                assert np.sign(result - boundary) == np.sign(count)


@triton.jit
def sum_kernel(terms, sums, BLOCK: tl.constexpr):
    tile = tl.load(terms + tl.arange(0, 64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    tl.store(sums + tl.arange(0, 64), kernels.halving_sum(kernels.places(tile, BLOCK), BLOCK))


@both_formats
def test_sums(fmt):
    """Terms of very different size, whose sum shows the order of adding."""
    terms, sums = torch.randn(64, fmt.block_size, device=DEVICE) ** 5, torch.empty(64, device=DEVICE)
    sum_kernel[(1,)](terms, sums, fmt.block_size, num_warps=1)
    units = Units(torch.zeros(1, fmt.block_size), fmt, torch.tensor(1.0))
    assert torch.equal(sums.cpu(), units._sum(terms.cpu().clone()))
    assert (sums != terms.sum(1)).any()


@both_formats
@pytest.mark.parametrize("shape", [(33, 32), (3, 2880), (2, 3, 5, 64), (64,)])
def test_shapes(fmt, shape):
    """Blocks that do not fill a tile; stacks, where each matrix has its own tensor scale; a single row."""
    size = torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    assert_equal_to_reference(torch.randn(shape) * (size if len(shape) > 2 else 1), fmt)


@both_formats
def test_strides(fmt):
    """Rows apart, columns apart, a turned stack: no view of a weight is read wrongly."""
    base = torch.randn(70, 200)
    for view in (base[::7, 3:67], base[:10, :128:2], base[:64, :12].view(64, 3, 4).permute(1, 2, 0)):
        assert_equal_to_reference(view, fmt)


# --- activations -----------------------------------------------------------------------------------------------------


def assert_fake_quantized(x, fmt):
    got, expected = fake_quantize(x.to(DEVICE), fmt).cpu(), reference.fake_quantize(x, fmt)
    assert got.shape == expected.shape and same_bits(got, expected)


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_finite_value(fmt, dtype):
    """Blocks of values up to the largest of a block, which is any of them; both signs."""
    values = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    values = values[: len(values) // 4096 * 4096].view(-1, 32, 128).mT.reshape(-1, 2, 2048)
    values = torch.stack([values[:, 0], -values[:, 1]], -1).flatten(1)
    assert len(values) >= 7
    assert_fake_quantized(values, fmt)


@both_formats
@every_dtype
def test_odd_activations(fmt, dtype):
    x = stacked(dtype).flatten(1).repeat(2, 1)
    x[:4, [0, 100, 383, 31]] = torch.diag(torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan], dtype=dtype))
    assert_fake_quantized(x, fmt)


@both_formats
@every_dtype
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (32,), (3, 96), (2, 2, 2880), (1, 8224)])
def test_activation_shapes(fmt, dtype, shape):
    """Tokens that do not fill a tile, or take more than one; each has its own tensor scale."""
    assert_fake_quantized((torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()).to(dtype), fmt)


@both_formats
def test_activation_strides(fmt):
    base = torch.randn(70, 200)
    for view in (base[::20, 3:67], base[:4, :128:2], base[0, :64].expand(4, 64), base[:64].T[:4]):
        assert_fake_quantized(view, fmt)


def test_scales_of_activations():
    """Largest values of a block at and next to all rounding boundaries of E4M3, subnormals too."""
    scale = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    between = (scale[1:] + scale[:-1]) / 2
    amax = torch.cat([steps(6 * points, count) for points in (between, scale[1:]) for count in (-1, 0, 1)])
    x = torch.rand(len(amax), 16) * amax[:, None]
    x[:, 3] = amax
    x = F.pad(x.view(-1, 252 * 16), (0, 16), value=6 * 448)  # tensor scale 1
    assert_fake_quantized(x, NVFP4)
