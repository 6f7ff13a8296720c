# SPDX-License-Identifier: Apache-2.0
"""scales.py against a search that tries every scale byte, against the definitions, and on real weights."""

import json
import math

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmark_accuracy import BASELINE, VARIANTS, Variant, load_matrices, measure
from benchmark_accuracy import main as benchmark
from hf_mxfp4 import reference
from hf_mxfp4.blocks import block_amax, floor_log2, power_of_two, round_magnitude, row_chunks
from hf_mxfp4.formats import E4M3_MAX, FORMATS, MXFP4, NVFP4
from hf_mxfp4.scales import (
    SCALE_RULES,
    ScaleOptions,
    amax_rule,
    reciprocal_stable,
    soar_rounds,
    soar_rule,
)

ROWS, COLUMNS = 24, 256
RULES = [(fmt, rule) for rule, row in SCALE_RULES.items() for fmt in row.formats]
both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_rule = pytest.mark.parametrize(("format", "rule"), RULES, ids=["-".join(pair) for pair in RULES])
few = settings(max_examples=30)  # for properties that quantize twice
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])

# --- weights of many shapes of distribution --------------------------------------------------------------------------


def heavy_tail() -> torch.Tensor:
    """Student's t with 2 degrees of freedom: infinite variance."""
    return torch.randn(ROWS, COLUMNS) / torch.randn(2, ROWS, COLUMNS).square().mean(0).sqrt()


def one_hot() -> torch.Tensor:
    """One nonzero weight in each block of 32 (so every second block of 16 is zero)."""
    weight = torch.zeros(ROWS, COLUMNS // 32, 32)
    return weight.scatter(-1, torch.randint(32, (ROWS, COLUMNS // 32, 1)), torch.randn(weight.shape)).flatten(1)


def tiny_beside_large() -> torch.Tensor:
    """Rows fall from 1 to 2^-23, so under one tensor scale the lower ones need E4M3's subnormals, or are all zero."""
    return torch.randn(ROWS, COLUMNS) * 2.0 ** -torch.arange(ROWS)[:, None]


def equal_in_block() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS // 32, 1).expand(-1, -1, 32).flatten(1)


def on_the_grid() -> torch.Tensor:
    """E2M1 values times powers of two: exact, with many ties between scales."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, (ROWS, COLUMNS))]
    return magnitudes * 2.0 ** torch.randint(-3, 4, (ROWS, COLUMNS // 32)).repeat_interleave(32, 1)


DISTRIBUTIONS = {
    "normal": lambda: torch.randn(ROWS, COLUMNS) * 0.02,
    "heavy_tail": heavy_tail,
    "uniform": lambda: torch.rand(ROWS, COLUMNS) - 0.5,
    "one_hot": one_hot,
    "tiny_beside_large": tiny_beside_large,
    "equal_in_block": equal_in_block,
    "on_the_grid": on_the_grid,
    "outlier": lambda: torch.randn(ROWS, COLUMNS).index_put_((torch.tensor(3), torch.tensor(7)), torch.tensor(3e4)),
    "zero": lambda: torch.zeros(ROWS, COLUMNS),
}
distributions = pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def channel_weights() -> torch.Tensor:
    """Like mean squared activations: over five orders of magnitude, some zero, one whole MXFP4 block unseen."""
    weights = torch.randn(COLUMNS).exp().square() * (torch.rand(COLUMNS) > 0.1)
    return weights.index_fill(0, torch.arange(32, 64), 0.0)


weightings = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


# --- the search of everything ----------------------------------------------------------------------------------------


def nearest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 by comparing with the midpoints; a midpoint goes to the even code."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = sum((x > mid).int() for mid in (0.25, 1.25, 2.5, 5.0)) + sum((x >= mid).int() for mid in (0.75, 1.75, 3.5))
    return grid[code]


def brute_force(weight, fmt, global_scale, weights=None, dtype=torch.float32):
    """Try every scale byte for every block; the least error wins, on a tie the smaller scale.

    Returns:
        bytes int32 `[N, K/B]`; errors `[N, K/B, bytes]` in `dtype`, squared units of `global_scale`.
    """
    magnitude = weight.float().abs().unflatten(-1, (-1, fmt.block_size))
    magnitude = magnitude if global_scale is None else magnitude / global_scale
    if weights is not None:
        weights = weights.view(-1, fmt.block_size)
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, 1.0)
    errors = []
    first = 1 if fmt.has_global_scale else 0  # E4M3's byte 0 is the scale zero
    for byte in range(first, fmt.top_byte + 1):
        scale = fmt.decode_scale(torch.tensor([byte], dtype=torch.uint8))
        decoded = nearest_magnitude(magnitude / scale) * scale
        terms = (decoded.to(dtype) - magnitude).square()
        errors.append((terms if weights is None else terms * weights).sum(-1))
    errors = torch.stack(errors, -1)
    best = (errors == errors.amin(-1, keepdim=True)).int().argmax(-1) + first  # argmax: the first of equal ones
    return torch.where(magnitude.amax(-1) == 0, fmt.zero_byte, best).int(), errors


@both_formats
@weightings
@dtypes
@distributions
def test_full_search_is_exhaustive(fmt, weighted, dtype, make):
    """Scale bytes and codes equal those of trying all 126 E4M3 codes (all 255 E8M0 bytes), bit for bit."""
    weight = make().to(dtype)
    weights = channel_weights() if weighted else None
    scales = soar_rule(weight, fmt, ScaleOptions(), weights)
    found = scales.scale.view(torch.uint8).int()
    best, _ = brute_force(weight, fmt, scales.global_scale, weights)
    if weighted:  # where only channels of weight 0 hold anything, every scale is as good
        free = (weight.float().abs() * weights).unflatten(-1, (-1, fmt.block_size)).sum(-1) == 0
        free &= weights.view(-1, fmt.block_size).sum(-1) > 0
        best = torch.where(free, found, best)
    assert torch.equal(found, best)

    packed = reference.encode(weight, scales, fmt)
    magnitude = weight.float().abs().unflatten(-1, (-1, fmt.block_size))
    if scales.global_scale is not None:
        magnitude = magnitude / scales.global_scale
    values = nearest_magnitude(magnitude / fmt.decode_scale(best.byte())[..., None]).flatten(1).copysign(weight)
    assert torch.equal(torch.tensor(reference.E2M1_VALUES)[reference.unpack(packed).int()], values)

    # And in float64, where sums are not rounded to 24 bits, no byte is better by more than float32 can see.
    _, errors = brute_force(weight, fmt, scales.global_scale, weights, torch.float64)
    first = 1 if fmt.has_global_scale else 0
    chosen = errors.gather(-1, (found - first).long()[..., None]).squeeze(-1)
    assert bool((chosen <= errors.amin(-1) * (1 + 1e-6)).all())


@distributions
def test_full_search_for_the_tensor_scale_at_hand(make):
    """`global_scale="free"`: whatever tensor scale a round has, its block scales are the best for that one."""
    weight = make()
    options = ScaleOptions(global_scale="free", iterations=3)
    for scales, _ in soar_rounds(weight, NVFP4, options):
        best, _ = brute_force(weight, NVFP4, scales.global_scale)
        assert torch.equal(scales.scale.view(torch.uint8).int(), best)


# --- rounds, and rules beside each other -----------------------------------------------------------------------------


def squared_error(weight, fmt, scales, weights=None) -> float:
    packed = reference.encode(weight, scales, fmt)
    decoded = reference.decode_rows(packed, scales.scale, scales.global_scale, fmt)
    terms = (decoded.double() - weight.double()).square()
    return float((terms if weights is None else terms * weights).sum())


ROUNDS = [
    (fmt, options)
    for fmt in FORMATS.values()
    for options in (
        ScaleOptions(search=2),
        ScaleOptions(search=0),
        ScaleOptions(search=2, global_scale="free"),
        ScaleOptions(global_scale="free"),
        ScaleOptions(),
    )
    if fmt.has_global_scale or options.global_scale != "free"
]


@pytest.mark.parametrize(("fmt", "options"), ROUNDS, ids=[f"{f.name}-{o.search}-{o.global_scale}" for f, o in ROUNDS])
@weightings
@distributions
def test_error_never_rises(fmt, options, weighted, make):
    """Round for round, and what a round says it reached is what encoding with its scales gives."""
    weight = make()
    weights = channel_weights() if weighted else None
    rounds = list(soar_rounds(weight, fmt, options, weights))
    last = soar_rule(weight, fmt, options, weights)
    assert 1 <= len(rounds) <= options.iterations
    assert torch.equal(last.scale.view(torch.uint8), rounds[-1][0].scale.view(torch.uint8))
    errors = [error for _, error in rounds]
    assert errors == sorted(errors, reverse=True)
    if weighted:  # blocks with nothing on a channel that has a weight count with weight 1
        weights = weights.view(-1, fmt.block_size).repeat(len(weight), 1)
        seen = (weights * weight.float().view(-1, fmt.block_size)).abs().sum(-1, keepdim=True) > 0
        weights = torch.where(seen, weights, 1.0).view(weight.shape)
    measured = [squared_error(weight, fmt, scales, weights) for scales, _ in rounds]
    # 1e-5: float32 sums over a block. 1e-12: the energy float32 cannot see in blocks far below the tensor scale.
    floor = 1e-12 * float(weight.double().square().sum())
    assert errors == pytest.approx(measured, rel=1e-5, abs=floor)

    if options.global_scale == "free" or not fmt.has_global_scale:
        start = amax_rule(weight, fmt)  # among the candidates of the first round
        assert measured[-1] <= squared_error(weight, fmt, start, weights) * (1 + 1e-6)


@both_formats
@distributions
def test_full_is_no_worse_than_local(fmt, make):
    """Under the same tensor scale, no search can beat the full one."""
    weight = make()
    full = squared_error(weight, fmt, soar_rule(weight, fmt))
    for search in (0, 1, 2, 8):
        local = squared_error(weight, fmt, soar_rule(weight, fmt, ScaleOptions(search=search)))
        assert full <= local * (1 + 1e-6)


@both_formats
@pytest.mark.parametrize("name", ["normal", "heavy_tail", "uniform"])
def test_full_local_amax(fmt, name):
    """On spread-out weights the order is strict: full < local < amax."""
    weight = DISTRIBUTIONS[name]()
    by = {
        "full": squared_error(weight, fmt, soar_rule(weight, fmt)),
        "local": squared_error(weight, fmt, soar_rule(weight, fmt, ScaleOptions(search=2))),
        "amax": squared_error(weight, fmt, amax_rule(weight, fmt)),
    }
    assert by["full"] <= by["local"] < by["amax"]


@weightings
def test_channel_weights_are_what_is_minimised(weighted):
    """Weighted scales are better where it is weighted, and no better in plain error."""
    weight, weights = heavy_tail(), channel_weights() + 1e-3
    for fmt in FORMATS.values():
        plain, weighed = soar_rule(weight, fmt), soar_rule(weight, fmt, ScaleOptions(), weights)
        measure_by = weights if weighted else None
        better, worse = (weighed, plain) if weighted else (plain, weighed)
        assert squared_error(weight, fmt, better, measure_by) < squared_error(weight, fmt, worse, measure_by)


@both_formats
def test_equal_channel_weights_change_nothing(fmt):
    weight = heavy_tail()
    plain = soar_rule(weight, fmt).scale.view(torch.uint8)
    for value in (0.0, 1.0, 0.25):
        weighed = soar_rule(weight, fmt, ScaleOptions(), torch.full((COLUMNS,), value)).scale.view(torch.uint8)
        assert torch.equal(plain, weighed)


# --- definitions of the plain rules ----------------------------------------------------------------------------------


def one_block(maximum: float, fmt) -> torch.Tensor:
    return torch.tensor([[maximum] + [0.0] * (fmt.block_size - 1)])


def mx_scale(rule: str, maximum: float) -> float:
    byte = SCALE_RULES[rule].function(one_block(maximum, MXFP4), MXFP4).scale
    return math.log2(float(MXFP4.decode_scale(byte)))


@pytest.mark.parametrize(
    ("maximum", "amax", "ceil", "overflow_aware"),
    [
        (4.0, 0, 0, 0),  # code 4
        (5.9, 0, 0, 0),
        (6.0, 0, 0, 0),  # the grid's top
        (6.000001, 0, 1, 0),  # clipping begins
        (7.0, 0, 1, 0),  # lands on 3.5 under `ceil`: still halved
        (7.000001, 0, 1, 1),
        (7.999999, 0, 1, 1),
        (8.0, 1, 1, 1),
        (12.0, 1, 1, 1),
        (14.0, 1, 2, 1),
        (0.0625, -6, -6, -6),
        (3.0, -1, -1, -1),
    ],
)
def test_power_of_two_rules_by_hand(maximum, amax, ceil, overflow_aware):
    """Exponent of the scale of a block with this maximum."""
    for sign in (1, -1):
        assert mx_scale("amax", sign * maximum) == amax
        assert mx_scale("ceil", sign * maximum) == ceil
        assert mx_scale("overflow_aware", sign * maximum) == overflow_aware


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_power_of_two_rules_are_their_formulas(maximum):
    mantissa, exponent = math.frexp(maximum)  # maximum = mantissa * 2^exponent, mantissa in [0.5, 1)
    assert mx_scale("amax", maximum) == exponent - 1 - 2
    ceil = exponent - 3 + (mantissa > 0.75)  # ceil(log2(maximum / 6)), without rounding
    assert mx_scale("ceil", maximum) == ceil
    landed = maximum / 2.0**ceil
    assert mx_scale("overflow_aware", maximum) == ceil - (3 < landed <= 3.5)


@dtypes
def test_nvfp4_amax_is_its_formula(dtype):
    weight = heavy_tail().to(dtype)
    scales = amax_rule(weight, NVFP4)
    amax = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    assert float(scales.global_scale) == pytest.approx(float(amax.max()) / (6 * 448), rel=2.0**-22)  # 2 roundings
    assert float(NVFP4.decode_scale(scales.scale).max()) == E4M3_MAX
    expected = (amax / 6 / scales.global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    assert torch.equal(scales.scale.view(torch.uint8), expected.view(torch.uint8).clamp(min=1))


def test_four_over_six_takes_the_better_of_two():
    weight = heavy_tail()
    scales = SCALE_RULES["four_over_six"].function(weight, NVFP4)
    amax = block_amax(weight, 16)
    assert float(scales.global_scale) == pytest.approx(float(amax.max()) / (6 * 256), rel=2.0**-22)
    _, errors = brute_force(weight, NVFP4, scales.global_scale)
    six, four = (
        (amax / top / scales.global_scale).to(torch.float8_e4m3fn).view(torch.uint8).clamp(min=1).long()
        for top in (6.0, 4.0)
    )
    error = [errors.gather(-1, byte[..., None] - 1).squeeze(-1) for byte in (six, four)]
    chosen = scales.scale.view(torch.uint8).long()
    assert torch.equal(chosen, torch.where(error[1] < error[0], four, six))
    assert set(torch.unique(chosen == six).tolist()) == {True, False}  # both are used


# --- tensor scales ---------------------------------------------------------------------------------------------------


@distributions
def test_power_of_two_tensor_scale(make):
    weight = make()
    scale = float(soar_rule(weight, NVFP4).global_scale)
    assert math.frexp(scale)[0] == 0.5
    peak = float(weight.abs().max())
    if peak:
        assert 4 * E4M3_MAX * scale / 2 < peak <= 4 * E4M3_MAX * scale  # the smallest that puts the maximum on code 4


@pytest.mark.parametrize("exponent", [-100, -1, 0, 37])
def test_power_of_two_tensor_scale_at_its_boundary(exponent):
    """A maximum of exactly 4 * 448 * 2^e takes 2^e, the next float above takes 2^(e+1)."""
    edge = torch.tensor(4 * E4M3_MAX * 2.0**exponent)
    for maximum, expected in ((edge, 2.0**exponent), (edge.nextafter(torch.tensor(math.inf)), 2.0 ** (exponent + 1))):
        assert float(soar_rule(one_block(float(maximum), NVFP4), NVFP4).global_scale) == expected


def test_reciprocal_stable():
    """Every mantissa at three exponents, every exponent with random mantissas."""
    every = torch.arange(1 << 23, dtype=torch.int32)
    exponents = torch.arange(2, 252, dtype=torch.int32)[:, None] << 23  # [2^-125, 2^125)
    for bits in (
        every | 127 << 23,
        every | 2 << 23,
        every | 251 << 23,
        exponents | every[torch.randint(1 << 23, (2000,))],
    ):
        scale = bits.view(torch.float32)
        stable = reciprocal_stable(scale)
        assert torch.equal(stable.reciprocal().reciprocal(), stable)
        assert int((stable.view(torch.int32) - scale.view(torch.int32)).abs().max()) <= 1  # "next to"
        already = scale.reciprocal().reciprocal() == scale
        assert torch.equal(stable[already], scale[already])


@pytest.mark.parametrize(("format", "rule"), [pair for pair in RULES if pair[0] == "nvfp4"])
@pytest.mark.parametrize("global_scale", ["power_of_two", "free"])
def test_tensor_scales_survive_two_reciprocals(format, rule, global_scale):
    """What a portable checkpoint does to them."""
    for make in DISTRIBUTIONS.values():
        scales = SCALE_RULES[rule].function(make(), NVFP4, ScaleOptions(global_scale=global_scale))
        scale = scales.global_scale
        assert scale.dtype == torch.float32 and scale.shape == ()
        assert torch.equal(scale.reciprocal().reciprocal(), scale)


# --- properties ------------------------------------------------------------------------------------------------------


def random_weight(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, 128, generator=generator)
    return normal * torch.randn(4, 128, generator=generator).exp()


def quantized(weight, format, rule, **options):
    return reference.quantize(weight, format, rule, ScaleOptions(**options))


@every_rule
@few
@given(seed=st.integers(0, 2**16), shift=st.integers(-40, 40))
def test_scaling_by_a_power_of_two(format, rule, seed, shift):
    """Codes stay; scales (or the tensor scale) and decoded values are multiplied exactly."""
    weight = random_weight(seed)
    one, other = quantized(weight, format, rule), quantized(weight * 2.0**shift, format, rule)
    assert torch.equal(one.packed, other.packed)
    if format == "nvfp4":
        assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))
        assert torch.equal(one.global_scale * 2.0**shift, other.global_scale)
    else:
        assert torch.equal(one.scale.int() + shift, other.scale.int())
    decoded = [reference.dequantize(q, torch.float32) for q in (one, other)]
    assert torch.equal(decoded[0] * 2.0**shift, decoded[1])


@every_rule
@few
@given(seed=st.integers(0, 2**16))
def test_negation(format, rule, seed):
    """Scales stay, every sign bit flips."""
    weight = random_weight(seed)
    one, other = quantized(weight, format, rule), quantized(-weight, format, rule)
    assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))
    assert torch.equal(one.packed ^ 0x88, other.packed)


@every_rule
@few
@given(seed=st.integers(0, 2**16))
def test_blocks_are_independent(format, rule, seed):
    """Permuting blocks permutes codes and scales; permuting weights inside a block permutes its codes."""
    weight, block = random_weight(seed), FORMATS[format].block_size
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(weight.numel() // block, generator=generator)
    shuffled = weight.view(-1, block)[order].view(weight.shape)
    one, other = quantized(weight, format, rule), quantized(shuffled, format, rule)
    assert torch.equal(one.scale.view(torch.uint8).flatten()[order], other.scale.view(torch.uint8).flatten())
    assert torch.equal(one.packed.view(-1, block // 2)[order], other.packed.view(-1, block // 2))


@given(st.lists(st.floats(0, 2.0**30, width=32), min_size=1, max_size=20))
def test_round_magnitude_is_nearest(values):
    """By distance in float64, for values no table was made for."""
    x = torch.tensor(values)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    distance = (x.double()[:, None] - grid).abs()
    chosen = (round_magnitude(x).double() - x.double()).abs()
    assert torch.equal(chosen, distance.amin(-1))
    assert torch.equal(round_magnitude(x), nearest_magnitude(x))


@given(st.integers(-126, 127))
def test_exponents(exponent):
    value = power_of_two(torch.tensor([exponent]))
    assert float(value) == 2.0**exponent
    assert int(floor_log2(value)) == exponent
    assert int(floor_log2(value.nextafter(torch.tensor([math.inf])))) == exponent


def test_row_chunks_cover_every_row_once():
    for shape in ((1, 32), (1000, 4096), (3, 1 << 19), (0, 64), (5, 0)):
        rows = torch.zeros(shape[0])
        for part in row_chunks(torch.empty(shape, device="meta")):
            rows[part] += 1
        assert bool((rows == 1).all())


# --- real weights ----------------------------------------------------------------------------------------------------


def test_minilm_table(minilm):
    """The figures of scripts/results/accuracy_minilm.md, for 36 encoder matrices together, a little rounded up."""
    assert len(minilm) == 36 and sum(w.numel() for w in minilm.values()) == 10_616_832
    base = measure(minilm.values(), BASELINE)
    assert base["weight_error"] == pytest.approx(0.008906, abs=5e-7)
    assert base["bits_per_weight"] == pytest.approx(4.5, abs=2e-4)  # 32 bits of tensor scale a matrix

    def ratio(format, rule, **more):
        variant = Variant({"format": format, "scale_rule": rule, **more})
        return measure(minilm.values(), variant)["weight_error"] / base["weight_error"]

    assert ratio("nvfp4", "four_over_six") <= 0.850
    assert ratio("nvfp4", "soar", search=2) <= 0.83
    assert ratio("nvfp4", "soar") <= 0.742
    assert ratio("mxfp4", "amax") == pytest.approx(1.55, abs=0.01)
    assert ratio("mxfp4", "overflow_aware") <= 1.465
    assert ratio("mxfp4", "soar") <= 1.445
    assert ratio("mxfp4", "overflow_aware", macro_block="static") <= 1.34


def test_benchmark_of_any_folder(tmp_path):
    """`scripts/benchmark_accuracy.py --model DIR`: matrices of all files, less what is skipped or fits no format."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(
        {
            "layers.0.up.weight": torch.randn(16, 64, dtype=torch.bfloat16),
            "layers.0.norm.weight": torch.randn(64),
            "layers.0.odd.weight": torch.randn(16, 48),
            "layers.0.ids": torch.zeros(16, 64, dtype=torch.int64),
            "embed_tokens.weight": torch.randn(16, 64),
        },
        folder / "model-00001-of-00002.safetensors",
    )
    save_file({"layers.1.up.weight": torch.randn(8, 96)}, folder / "model-00002-of-00002.safetensors")
    assert {name: w.shape for name, w in load_matrices(folder).items()} == {
        "layers.0.up.weight": (16, 64),
        "layers.1.up.weight": (8, 96),
    }
    assert "embed_tokens.weight" in load_matrices(folder, skip="norm")

    app = typer.Typer()
    app.command()(benchmark)
    result = CliRunner().invoke(app, ["--model", str(folder), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "accuracy_model.json").read_text())
    assert (written["matrices"], written["weights"]) == (2, 16 * 64 + 8 * 96)
    assert written["command"] == "python scripts/benchmark_accuracy.py --model model"
    rows = written["results"]
    ours = {variant.name for variant in VARIANTS if not variant.is_calibrated}
    assert ours == {name for name, row in rows.items() if not row.get("peer")}
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert {(name.split()[0], name.split()[1]) for name in ours} == set(RULES)
    assert rows["mxfp4 soar"]["bits_per_weight"] == 4.25
    factors = 16 + 8  # one short macro-block a row
    assert rows["mxfp4 soar macro search"]["bits_per_weight"] == pytest.approx(4.25 + 8 * factors / (16 * 64 + 8 * 96))
    markdown = (tmp_path / "out" / "accuracy_model.md").read_text()
    assert all(f"| {name} |" in markdown for name in rows)
    assert str(tmp_path) not in markdown + json.dumps(written)

    for empty in (tmp_path, tmp_path / "missing"):
        assert CliRunner().invoke(app, ["--model", str(empty)]).exit_code == 2
