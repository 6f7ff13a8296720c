# SPDX-License-Identifier: Apache-2.0
"""The error decomposition: its parts sum to the error, and its figures on real weights."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_mxfp4 import reference
from hf_mxfp4.analysis import (
    HIGHEST,
    LOWEST,
    PARTS,
    Decomposition,
    analyze,
    correct,
    decompose,
    error_parts,
    find_matrices,
    plot,
    rounded_up_scales,
    rule_scales,
)
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4
from hf_mxfp4.scales import SCALE_RULES

RULES = [(fmt, rule) for rule, row in SCALE_RULES.items() for fmt in row.formats]


@given(seed=st.integers(0, 2**32 - 1), choice=st.sampled_from(RULES), spread=st.floats(0, 3))
def test_parts_sum_to_the_error(seed, choice, spread):
    """Element by element, for every format and rule, against the quantizer's own decoded weights."""
    fmt, rule = FORMATS[choice[0]], choice[1]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 64, generator=generator) * torch.exp(spread * torch.randn(4, 64, generator=generator))
    parts = error_parts(weight, rule_scales(weight, fmt, rule), fmt.block_size)
    decoded = reference.dequantize(reference.quantize(weight, fmt, rule), torch.float32).double()
    found = sum(parts).flatten(1)
    # The tensor scale multiplies the block scale here, and the product there: one float32 rounding apart.
    torch.testing.assert_close(found, decoded - weight.double(), rtol=0, atol=1e-6 * float(weight.abs().max()))


def test_decomposition_of_a_block_by_hand():
    weight = torch.tensor([[6.0, 0.2, 1.1] + [0.0] * 29])
    scale, dead, grid = error_parts(weight, torch.tensor([[2.0]]), 32)
    assert scale.flatten()[:3].tolist() == [0.0, 0.0, 0.0] and dead.flatten()[1].item() == pytest.approx(-0.2)
    assert grid.flatten()[2].item() == pytest.approx(1.0 - 1.1) and not grid.flatten()[:2].any()
    found = decompose(weight, torch.tensor([[2.0]]), 32)
    assert (found.elements, found.blocks, found.zeroed) == (32, 1, 1) and found.overshoot == 1.0
    assert sum(found.histogram) == 1 and found.energy == pytest.approx(36 + 0.04 + 1.21)


def test_sums_add_up():
    weight = torch.randn(8, 128)
    scale = rule_scales(weight, MXFP4, "ceil")
    whole = decompose(weight, scale, 32)
    halves = decompose(weight[:3], scale[:3], 32) + decompose(weight[3:], scale[3:], 32)
    assert whole.summary() == pytest.approx(halves.summary()) and whole.histogram == halves.histogram
    assert not any(Decomposition().summary().values())


def test_precise_scales_leave_grid_and_dead_zone():
    """e_scale vanishes as scale precision rises, and the error falls to the floor of the other two."""
    weight = torch.randn(64, 256)
    errors = []
    for bits in (0, 2, 4, 8, 23):
        found = decompose(weight, rounded_up_scales(weight, 32, bits), 32).summary()
        errors.append(found["total"])
    assert errors == sorted(errors, reverse=True)
    assert found["scale"] < 1e-12 and found["total"] == pytest.approx(found["dead"] + found["grid"])
    coarse = rounded_up_scales(weight, 32, 0)
    assert torch.equal(coarse, rule_scales(weight, MXFP4, "ceil"))


def test_minilm_figures(minilm):
    """MXFP4 with `ceil` scales on 36 trained matrices."""
    report = analyze(minilm.items(), MXFP4, "ceil", precisions=(23,))
    overall = report.overall.summary()
    assert overall["overshoot"] == pytest.approx(1 / math.log(2) - 1, abs=0.005)
    expected = {"scale": 0.0243, "dead": 0.00035, "grid": 0.0098, "total": 0.0143}
    assert {name: overall[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert overall["cos_scale_grid"] == pytest.approx(-0.65, abs=0.01)
    assert overall["zeroed"] == pytest.approx(0.086, abs=0.001)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=repr)
def test_corrections(fmt):
    """Each leaves less of the error than the one before it, in every matrix and over all."""
    matrices = {name: torch.randn(16, 256) ** 3 for name in "ab"}
    report = analyze(matrices.items(), fmt, "amax", precisions=())
    correct(report, matrices.items(), outliers=0.01)
    for name in (None, "a", "b"):
        part = report.overall if name is None else report.tensors[name]
        errors = [part.summary()["total"], *report.corrected(name).values()]
        assert len(errors) == (4 if fmt is MXFP4 else 3) and errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.8 * errors[1]
    assert report.to_dict()["tensors"]["a"]["corrections"] == report.corrected("a")
    soar = reference.dequantize(reference.quantize(matrices["a"], fmt), torch.float32)
    found = float((soar - matrices["a"]).double().square().sum())
    assert report.corrections["soar"]["a"] == pytest.approx(found, rel=1e-9)


def test_folder_and_figure(tmp_path):
    """A folder is read without a model: matrices that would be quantized, and no others."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 64),
        "model.layers.0.mlp.up_proj.weight": torch.randn(16, 64, dtype=torch.bfloat16),
        "model.layers.0.mlp.odd.weight": torch.randn(16, 40),
        "model.layers.0.norm.weight": torch.ones(64),
        "model.layers.1.mlp.up_proj.weight": torch.randn(16, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = find_matrices(tmp_path, 32)
    report = analyze(found, MXFP4, "soar")
    assert len(found) == 2 and report.corrected() == {}
    assert list(report.tensors) == [name for name in tensors if name.endswith("up_proj.weight")]
    saved = json.loads(json.dumps(report.to_dict()))
    assert set(saved["overall"]) >= {*PARTS, "total", "overshoot", "zeroed"} and len(saved["scale_precision"]) == 8
    assert LOWEST < saved["overall"]["overshoot"] < HIGHEST
    plot(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert analyze(find_matrices(tmp_path, 16), NVFP4, "soar").overall.summary()["total"] < 0.02
