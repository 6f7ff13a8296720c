# SPDX-License-Identifier: Apache-2.0
"""error_feedback.py against GPTQ as it is written in textbooks, against plain quantization, and on odd input."""

import logging
import math

import pytest
import torch

from hf_mxfp4 import error_feedback, macro_block, outliers
from hf_mxfp4.error_feedback import Hessian, quantize_with_feedback
from hf_mxfp4.formats import E2M1_MAGNITUDES, FORMATS, MXFP4, NVFP4, QuantizedTensor
from hf_mxfp4.reference import dequantize, quantize
from hf_mxfp4.scales import ScaleOptions, power_of_two_global_scale

both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
VARIANTS = [(NVFP4, None), (MXFP4, None), (MXFP4, "static"), (MXFP4, "search")]
every_variant = pytest.mark.parametrize(("fmt", "macro"), VARIANTS, ids=lambda value: str(value))


def correlated(tokens: int, k: int, scale: float = 1.0) -> torch.Tensor:
    """Inputs `[tokens, k]` that a few directions and a common offset explain, on channels of different size."""
    x = torch.randn(tokens, 16) @ torch.randn(16, k) + torch.randn(tokens, k) + torch.randn(k)
    return scale * x * torch.logspace(-1, 1, k)[torch.randperm(k)]


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    hessian = Hessian(x.shape[-1])
    hessian.add(x)
    return hessian.matrix


def output_error(weight: torch.Tensor, quantized: QuantizedTensor, hessian: torch.Tensor) -> float:
    """tr(E H Eᵀ) in float64."""
    error = weight.double() - dequantize(quantized, torch.float32).double()
    return float((error @ hessian.double() * error).sum())


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    parts = [(p, q) for p, q in zip((*one[:3], one.macro), (*other[:3], other.macro), strict=True) if p is not None]
    return all(torch.equal(p.reshape(-1).view(torch.uint8), q.reshape(-1).view(torch.uint8)) for p, q in parts)


# --- the textbook ----------------------------------------------------------------------------------------------------


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value of float64 `x`, any shape; no ties in these tests."""
    grid = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    return grid[(x.abs()[..., None] - grid).abs().argmin(-1)].copysign(x)


def best_scales(target: torch.Tensor, candidates: torch.Tensor, cost: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index of the best candidate `[N]` of scales `[C]` for targets `[N, B]`, and its error: all are tried."""
    scaled = nearest(target[:, None] / candidates[:, None]) * candidates[:, None]
    least = ((scaled - target[:, None]).square() * cost).sum(-1).min(-1)
    return least.indices, least.values


def textbook(weight, hessian, fmt, macro, keep, damping) -> torch.Tensor:
    """GPTQ in float64: the factor of the inverse, and every later column updated after each."""
    w, h = weight.double().clone(), hessian.double()
    n, k = w.shape
    h = h + damping * h.diagonal().mean() * torch.eye(k)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    cost = upper.diagonal() ** -2
    keep = torch.zeros_like(w, dtype=torch.bool) if keep is None else keep
    scales = fmt.decode_scale(torch.arange(fmt.top_byte + 1, dtype=torch.uint8)).double()
    if fmt.has_global_scale:
        scales = scales[1:] * float(power_of_two_global_scale(weight.float().abs()))
    else:
        scales = scales[(scales > 2**-16) & (scales < 2**8)]  # the weights are about 1
    found = torch.zeros_like(w)
    factor = torch.ones(n, dtype=torch.float64)
    for j in range(k):
        if j % 128 == 0 and macro:
            slab = w[:, j : j + 128].masked_fill(keep[:, j : j + 128], 0)
            if macro == "static":
                factor = macro_block.factors(macro_block.static_factors(slab.float()))[:, 0].double()
            else:
                factor = best_factors(slab, scales, cost[j : j + 128], fmt.block_size)
        if j % fmt.block_size == 0:
            block = slice(j, j + fmt.block_size)
            target = w[:, block].masked_fill(keep[:, block], 0)
            index, _ = best_scales(target / factor[:, None], scales, cost[block])
            scale = scales[index] * factor
        value = nearest(w[:, j] / scale) * scale
        value = torch.where(keep[:, j], w[:, j].to(weight.dtype).double(), value)
        found[:, j] = value
        w[:, j:] -= ((w[:, j] - value) / upper[j, j])[:, None] * upper[j, j:]
    return found


def best_factors(slab, scales, cost, block_size) -> torch.Tensor:
    """The best of all 256 macro factors, `[N]`."""
    errors = []
    for factor in 1 + torch.arange(256, dtype=torch.float64) / 256:
        blocks = zip(slab.split(block_size, 1), cost.split(block_size), strict=True)
        errors.append(sum(best_scales(target, scales * factor, c)[1] for target, c in blocks))
    return 1 + torch.stack(errors).argmin(0) / 256


@every_variant
@pytest.mark.parametrize("kept", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_textbook(fmt, macro, kept, dtype):
    """K is 160: a whole slab and a short one. Rows do not depend on each other; one may differ: float32 and float64
    may take different sides of a near tie (on some machine), and its later columns then follow another path."""
    rows, k = 3 if macro == "search" else 16, 160
    weight, hessian = torch.randn(rows, k).to(dtype), hessian_of(correlated(600, k))
    keep = torch.rand(rows, k) < 0.05 if kept else None
    found = quantize_with_feedback(weight, hessian, fmt, macro_block=macro, keep=keep, damping=0.02)
    expected = textbook(weight, hessian, fmt, macro, keep, 0.02)
    decoded = dequantize(found, torch.float32).double()
    precision = torch.finfo(dtype).eps if kept else 0.0  # what is kept may be rounded the other way, too
    near = torch.isclose(decoded, expected, rtol=max(precision, 1e-5), atol=1e-6)
    assert (~near.all(-1)).sum() <= 1
    assert (found.macro is not None) == (macro is not None)


# --- against plain quantization --------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_inputs_without_correlation(fmt, macro, dtype):
    """Nothing to feed back: bit for bit what the plain rule gives with the damped diagonal as channel weights."""
    damped = torch.tensor([4.0, 16.0])[torch.randint(2, (160,))].index_fill_(0, torch.arange(80), 4.0)
    damped[80:] = 16.0  # mean 10; the Hessian's diagonal below has mean 8, so that a quarter of it is 2
    weight = (torch.randn(32, 160) * 0.05).to(dtype)
    found = quantize_with_feedback(weight, torch.diag(damped - 2), fmt, macro_block=macro, damping=0.25)
    assert same(found, quantize(weight, fmt, channel_weights=damped, macro_block=macro))


@every_variant
def test_inputs_never_seen(fmt, macro):
    weight = torch.randn(8, 160)
    hessian = Hessian(160)
    assert hessian.tokens == 0 and not hessian.matrix.any()
    found = quantize_with_feedback(weight, hessian.matrix, fmt, macro_block=macro)
    assert same(found, quantize(weight, fmt, macro_block=macro))


@every_variant
def test_output_error_on_trained_weights(minilm, fmt, macro):
    """Correlated inputs: far below `soar`, which is the point of it all."""
    for weight in list(minilm.values())[:6:2]:
        hessian = hessian_of(correlated(2048, weight.shape[1]))
        plain = quantize(weight, fmt, macro_block=macro)
        found = quantize_with_feedback(weight, hessian, fmt, macro_block=macro)
        assert output_error(weight, found, hessian) < 0.6 * output_error(weight, plain, hessian)
        if fmt.has_global_scale:
            assert torch.equal(found.global_scale, plain.global_scale)


@every_variant
@pytest.mark.parametrize(
    "inputs",
    [
        lambda k: torch.randn(20_000, k),
        lambda k: torch.randn(64, k),
        lambda k: correlated(5, k),
        lambda k: correlated(4096, k),
        lambda k: correlated(1024, k, 1e-6),
        lambda k: correlated(1024, k, 1e6),
        lambda k: torch.randn(1024, k) * (torch.arange(k) % 7 == 0),
    ],
    ids="white few_white five correlated small large mostly_dead".split(),
)
def test_output_error_is_never_above_soar(fmt, macro, inputs):
    weight, hessian = torch.randn(64, 224), hessian_of(inputs(224))
    found = quantize_with_feedback(weight, hessian, fmt, macro_block=macro)
    plain = quantize(weight, fmt, macro_block=macro)
    assert output_error(weight, found, hessian) <= output_error(weight, plain, hessian) * (1 + 1e-6)


@every_variant
def test_dead_inputs(fmt, macro):
    """Weights of dead inputs are rounded as they are, and those of live ones as if these did not exist."""
    x = correlated(512, 128)
    dead = torch.randperm(128)[:40]
    x[:, dead] = 0.0
    weight, hessian = torch.randn(16, 128), hessian_of(x)
    decoded = dequantize(quantize_with_feedback(weight, hessian, fmt, macro_block=macro), torch.float32)
    error = (decoded - weight)[:, dead].square().mean() / weight[:, dead].square().mean()
    assert error < 0.03  # no zeros in their place, and no feedback into them
    feedback, cost = error_feedback._factor(hessian, 0.1, "weight")
    assert not feedback[dead].any() and not feedback[:, dead].any() and (cost > 0).all()


def test_slab_size_is_no_matter(monkeypatch):
    """Other slabs add the same feedback in another order: but for ties, every code stays."""
    weight, hessian = torch.randn(64, 352), hessian_of(correlated(1024, 352))
    found = []
    for slab in (128, 32, 512):
        monkeypatch.setattr(error_feedback, "_SLAB", slab)
        found.append(quantize_with_feedback(weight, hessian, NVFP4))
    for other in found[1:]:
        assert (other.packed != found[0].packed).float().mean() < 1e-3
        assert output_error(weight, other, hessian) == pytest.approx(output_error(weight, found[0], hessian), rel=1e-3)


# --- outliers --------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_outliers(fmt, macro, dtype):
    weight, hessian = torch.randn(24, 160), hessian_of(correlated(512, 160))
    keep = torch.zeros(24, 160, dtype=torch.bool)
    keep[torch.arange(24), torch.randint(160, (24,))] = True
    weight = torch.where(keep, 20.0, weight).to(dtype)
    found = quantize_with_feedback(weight, hessian, fmt, macro_block=macro, keep=keep)
    outliers.check(found.outliers, found.packed)
    assert found.outliers.values.dtype == dtype and found.outliers.values.numel() == 24
    plain = quantize_with_feedback(weight, hessian, fmt, macro_block=macro)
    assert output_error(weight, found, hessian) < 0.5 * output_error(weight, plain, hessian)
    assert plain.outliers is None


@both_formats
def test_all_and_no_outliers(fmt):
    """All kept: the weight itself comes back, since there is no error to feed back. None kept: as without `keep`."""
    weight, hessian = torch.randn(8, 160).bfloat16(), hessian_of(correlated(512, 160))
    found = quantize_with_feedback(weight, hessian, fmt, keep=torch.ones(8, 160, dtype=torch.bool))
    assert torch.equal(dequantize(found), weight) and not found.packed.any()
    assert (found.scale.view(torch.uint8) == fmt.zero_byte).all()
    none = quantize_with_feedback(weight, hessian, fmt, keep=torch.zeros(8, 160, dtype=torch.bool))
    assert same(none, quantize_with_feedback(weight, hessian, fmt)) and none.outliers.values.numel() == 0


def opposed(k: int) -> torch.Tensor:
    """A Hessian by which an error in column 0 is worth a thousand times as much in column 20."""
    hessian = torch.eye(k) * 0.01
    hessian[0, 0], hessian[20, 20] = 1e6, 1.01
    hessian[0, 20] = hessian[20, 0] = 1e3
    return hessian


def test_outliers_beyond_the_dtype():
    """A float16 target above 65504 is stored as 65504."""
    weight = torch.zeros(4, 32, dtype=torch.float16)
    weight[:, (0, 20)] = 40_000.0
    weight[:, 2] = 60_000.0
    keep = torch.zeros(4, 32, dtype=torch.bool)
    keep[:, 20] = True
    found = quantize_with_feedback(weight, opposed(32), MXFP4, keep=keep, damping=1e-6)
    assert found.outliers.values.abs().tolist() == [65504.0] * 4


def test_targets_beyond_the_tensor_scale():
    """They saturate at 6 * 448 * g, are finite, and the output is still better than without feedback."""
    weight, hessian = torch.rand(64, 32), opposed(32)
    found = quantize_with_feedback(weight, hessian, NVFP4, damping=1e-6)
    decoded = dequantize(found, torch.float32)
    largest = 6 * 448 * found.global_scale
    assert (found.scale.float() == 448).any() and decoded.abs().max() == largest > 1.5 * weight.max()
    assert output_error(weight, found, hessian) < output_error(weight, quantize(weight, NVFP4), hessian)


# --- Hessians --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hessian_is_the_mean_over_tokens(dtype):
    x = correlated(60, 48).to(dtype)
    hessian = Hessian(48)
    hessian.add(x[:20].view(4, 5, 48))
    hessian.add(x[20:].t().contiguous().t())  # not contiguous
    hessian.add(x[0, None][:0])  # no tokens
    expected = x.double().t() @ x.double() / 60
    assert hessian.tokens == 60 and hessian.matrix.dtype == torch.float32
    torch.testing.assert_close(hessian.matrix.double(), expected, rtol=1e-4, atol=1e-5 * expected.max().item())
    assert torch.equal(hessian.diagonal, hessian.matrix.diagonal())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_activations(bad):
    hessian = Hessian(32)
    x = torch.randn(4, 32)
    hessian.add(x)
    before = hessian.matrix
    x[2, 5] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.mlp: inputs hold NaN or Inf"):
        hessian.add(x, name="layers.3.mlp")
    assert hessian.tokens == 4 and torch.equal(hessian.matrix, before)
    with pytest.raises(ValueError, match=r"inputs \[4, 31\]; \[\.\.\., 32\] is needed"):
        hessian.add(x[:, 1:])


@every_variant
def test_few_tokens(fmt, macro, caplog):
    """A Hessian of rank 3 is regular once damped: no warning."""
    weight, hessian = torch.randn(16, 160), hessian_of(correlated(3, 160))
    with caplog.at_level(logging.WARNING):
        found = quantize_with_feedback(weight, hessian, fmt, macro_block=macro)
    assert not caplog.records
    assert output_error(weight, found, hessian) < 0.3 * output_error(weight, quantize(weight, fmt), hessian)


def test_damping_is_raised(caplog):
    """An eigenvalue of -3 with a diagonal of mean 1: damping 0.1 and 1 do not do, 10 does. Said once."""
    hessian = torch.eye(32)
    hessian[0, 1] = hessian[1, 0] = 4.0
    weight = torch.randn(8, 32)
    with caplog.at_level(logging.WARNING):
        found = quantize_with_feedback(weight, hessian, NVFP4, name="layers.0.up_proj")
    assert [r.getMessage() for r in caplog.records] == [
        "layers.0.up_proj: the Hessian of its inputs is not positive definite with damping 0.1; "
        "error feedback uses 10."
    ]
    assert same(found, quantize_with_feedback(weight, hessian, NVFP4, damping=10.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e9])
def test_hessians_beyond_repair(value):
    hessian = torch.eye(32)
    hessian[(0, 0) if value < 0 else (3, 2)] = value * 100
    hessian[2, 3] = hessian[3, 2]
    with pytest.raises(ValueError, match="up_proj: the Hessian .* does not repair it. Collect it anew"):
        quantize_with_feedback(torch.randn(8, 32), hessian, NVFP4, name="up_proj")


# --- what may be given -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.randn(2, 8, 64)), "one matrix"),
        (dict(weight=torch.randn(8, 40)), "not a positive multiple"),
        (dict(weight=torch.full((8, 64), math.nan)), "512 of 512 values are NaN"),
        (dict(hessian=torch.eye(32)), r"a Hessian \[32, 32\]; \[64, 64\] is needed"),
        (dict(keep=torch.ones(8, 64)), r"keep is torch.float32 \[8, 64\]; bool"),
        (dict(keep=torch.ones(8, 32, dtype=torch.bool)), r"bool \[8, 64\] is needed"),
        (dict(options=ScaleOptions(search=2)), "search=2.*Leave search and global_scale"),
        (dict(options=ScaleOptions(global_scale="free")), "global_scale='free'.*Leave search and global_scale"),
        (dict(macro_block="search"), "nvfp4 does not have"),
        (dict(macro_block="best"), "allowed: None, static, search"),
        (dict(damping=0.0), "damping=0.0; allowed"),
        (dict(damping=math.nan), "damping=nan; allowed"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(weight=torch.randn(8, 64), hessian=torch.eye(64), fmt=NVFP4) | change
    with pytest.raises(ValueError, match=message):
        quantize_with_feedback(**arguments)


@every_variant
def test_odd_weights(fmt, macro):
    """No rows, views, zeros, and weights near the ends of float32."""
    k, hessian = 96, hessian_of(correlated(256, 96))
    empty = quantize_with_feedback(torch.empty(0, k), hessian, fmt, macro_block=macro)
    assert empty.shape == (0, k) and empty.scale.shape == (0, k // fmt.block_size)

    weight, keep = torch.randn(k, 16), torch.rand(k, 16) < 0.02
    view = quantize_with_feedback(weight.t(), hessian.t(), fmt, macro_block=macro, keep=keep.t())
    dense = quantize_with_feedback(
        weight.t().contiguous(), hessian, fmt, macro_block=macro, keep=keep.t().contiguous()
    )
    assert same(view, dense) and torch.equal(view.outliers.values, dense.outliers.values)

    zero = quantize_with_feedback(torch.zeros(4, k), hessian, fmt, macro_block=macro)
    assert not zero.packed.any() and (zero.scale.view(torch.uint8) == fmt.zero_byte).all()
    for size in (1e-45, 1e-37, 1e-30, 1e30, 5e37):
        scaled = weight.t() * size
        found = dequantize(quantize_with_feedback(scaled, hessian, fmt, macro_block=macro, keep=keep.t()))
        assert found.isfinite().all() and (found.float() - scaled).abs().max() <= 2 * scaled.abs().max() + 1e-36


def test_arguments_are_left_alone():
    weight, hessian, keep = torch.randn(8, 160), hessian_of(correlated(256, 160)), torch.rand(8, 160) < 0.05
    copies = [t.clone() for t in (weight, hessian, keep)]
    quantize_with_feedback(weight, hessian, MXFP4, macro_block="search", keep=keep)
    assert all(torch.equal(t, copy) for t, copy in zip((weight, hessian, keep), copies, strict=True))
