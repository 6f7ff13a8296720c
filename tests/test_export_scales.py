# SPDX-License-Identifier: Apache-2.0
"""One tensor scale for matrices that engines fuse: exact where it can be, by consent where it cannot, never silent."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_mxfp4.export import CannotExport, export_checkpoint
from hf_mxfp4.export.tensor_scales import Scaled, common_divisor, multiplier, with_divisor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def made(scale_bytes, divisor: float, codes=None, seed: int = 0) -> Scaled:
    """A matrix `[len(scale_bytes), 16]` of one block a row, with these scale bytes."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (len(scale_bytes), 8), dtype=torch.uint8, generator=generator)
    packed[:, 0] = 0x77  # no row is all zeros
    packed = packed if codes is None else torch.full_like(packed, codes)
    scale = torch.tensor(scale_bytes, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    return Scaled(packed, scale, torch.tensor(divisor))


def weights(matrix: Scaled, scale_2=None) -> torch.Tensor:
    """As compressed-tensors decodes (`scale / divisor`), or with a multiplier as ModelOpt does; in bfloat16."""
    codes = torch.stack([matrix.packed & 15, matrix.packed >> 4], -1).flatten(-2).long()
    scale = matrix.scale.float()
    return (E2M1[codes] * (scale / matrix.divisor if scale_2 is None else scale * scale_2)).to(torch.bfloat16)


def moved(matrix: Scaled, divisor, table) -> Scaled:
    return Scaled(matrix.packed, table[matrix.scale.view(torch.uint8).long()].view(torch.float8_e4m3fn), divisor)


exponents = st.integers(-20, 20)
scale_bytes = st.lists(st.integers(1, 126), min_size=1, max_size=8)


@given(st.lists(st.tuples(scale_bytes, exponents), min_size=2, max_size=3))
def test_powers_of_two(members):
    """Whatever is found changes no weight; nothing is found only where no exponent would do."""
    matrices = [made(rows, 2.0**exponent, seed=i) for i, (rows, exponent) in enumerate(members)]
    found = common_divisor(matrices)
    if found is not None:
        for matrix, table in zip(matrices, found[1], strict=True):
            assert torch.equal(weights(moved(matrix, found[0], table)), weights(matrix))
        return
    representable = set(E4M3.float()[1:127].tolist())
    for exponent in range(-40, 41):
        fits = all(
            float(E4M3[byte].float()) * 2.0 ** (exponent - own) in representable
            for rows, own in members
            for byte in rows
        )
        smallest, largest = (pick(own for _, own in members) for pick in (min, max))
        assert not fits or not smallest <= exponent <= largest


def test_the_largest_scale_is_taken_where_it_fits():
    low, high = made([0x38, 0x40], 2.0), made([0x38], 16.0)
    divisor, tables = common_divisor([low, high])
    assert divisor == 2.0
    assert tables[0][0x38] == 0x38 and tables[1][0x38] == 0x20  # 1 becomes 1/8
    divisor, _ = common_divisor([made([0x08], 2.0), made([0x01], 16.0)])  # 2^-9 cannot fall further, 2^-6 can rise
    assert divisor == 16.0
    assert common_divisor([made([0x7E], 2.0), made([0x01], 16.0)]) is None  # 448 cannot rise


def test_blocks_of_zeros_do_not_count():
    """Their scale decodes to nothing, so any positive one will do."""
    zeros = made([0x01, 0x7E], 16.0, codes=0x80)
    divisor, tables = common_divisor([made([0x7E], 2.0), zeros])
    assert divisor == 2.0 and torch.equal(weights(moved(zeros, divisor, tables[1])), weights(zeros))
    assert (moved(zeros, divisor, tables[1]).scale.float() > 0).all()


def test_neighbours_of_one_reciprocal():
    """Divisors a float32 step apart, as different matrices under one ModelOpt scale may have: one serves both."""
    one = torch.tensor(1234.567)
    other = torch.nextafter(one, torch.tensor(math.inf))
    matrices = [made([0x38, 0x41], float(one)), made([0x38], float(other), seed=1)]
    divisor, tables = common_divisor(matrices)
    for matrix, table in zip(matrices, tables, strict=True):
        assert torch.equal(weights(moved(matrix, divisor, table)), weights(matrix))


def test_free_scales_have_no_common_one():
    assert common_divisor([made([0x38, 0x41], 1000.0), made([0x38, 0x43], 1500.0)]) is None


@given(st.floats(2.0**-20, 2.0**30, width=32), st.lists(st.integers(1, 126), min_size=1, max_size=126, unique=True))
def test_multiplier(divisor, rows):
    """The multiplier gives every weight the same bfloat16, over all codes and the scales in use."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(len(rows), 1)
    matrix = made(rows, divisor)._replace(packed=codes)
    scale_2 = multiplier(matrix.divisor, [matrix])
    if scale_2 is not None:
        assert scale_2.shape == () and torch.equal(weights(matrix, scale_2), weights(matrix))
    else:  # then none of the float32 numbers around the reciprocal would have done
        near = matrix.divisor.reciprocal().view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)
        assert not any(torch.equal(weights(matrix, s), weights(matrix)) for s in near.view(torch.float32))


def test_multiplier_of_powers_of_two():
    for exponent in (-100, -1, 0, 10, 100):
        assert multiplier(torch.tensor(2.0**exponent), [made(list(range(1, 127)), 1.0)]) == 2.0**-exponent


def test_quantized_anew():
    """Every block gets the scale and codes with the least error; blocks that need not change do not."""
    matrix = made([0x38, 0x01, 0x7E], 2.0**9)
    result, count, error = with_divisor(matrix, torch.tensor(2.0**6))
    assert count == 16  # 2^-9 cannot fall further; 1 and 448 become 1/8 and 56
    assert torch.equal(weights(result)[[0, 2]], weights(matrix)[[0, 2]])
    # By brute force: all scales, nearest codes.
    wanted = weights(matrix)[1].double()
    scales = E4M3[1:127].double() / 2.0**6
    distance = (wanted[None, :, None] - scales[:, None, None] * E2M1.double()).abs().min(-1).values
    best = distance.square().sum(-1).min()
    assert (weights(result)[1].double() - wanted).square().sum() == best
    assert error == pytest.approx(float(best / weights(matrix).double().square().sum()), rel=1e-5)


# --- checkpoints -----------------------------------------------------------------------------------------------------

CONFIG = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"},
            "format": "nvfp4-pack-quantized",
        }
    },
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": [],
}


def checkpoint(folder, members: dict[str, Scaled]):
    """A compressed-tensors checkpoint of linears of layer 0."""
    tensors = {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    for name, matrix in members.items():
        tensors[f"model.layers.0.{name}.weight_packed"] = matrix.packed
        tensors[f"model.layers.0.{name}.weight_scale"] = matrix.scale
        tensors[f"model.layers.0.{name}.weight_global_scale"] = matrix.divisor.reshape(1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    return folder


GROUPS = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp": ("mlp.gate_proj", "mlp.up_proj"),
    "expert": ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
    "mixtral": ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3"),
    "latent": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "delta": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
}


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("group", GROUPS)
def test_siblings_share_one(group, target, tmp_path):
    """Exponents are shifted, named in the summary, and no weight changes."""
    members = {name: made([0x38, 0x41, 0x50], 2.0 ** (6 + i), seed=i) for i, name in enumerate(GROUPS[group])}
    members["mlp.down_proj"] = made([0x38], 3.0)  # no sibling: left alone
    source = checkpoint(tmp_path / "source", members)
    summary = export_checkpoint(source, tmp_path / "out", target)
    tensors = load_file(tmp_path / "out/model.safetensors")
    codes, factor = ("weight_packed", "global_scale") if target == "compressed-tensors" else ("weight", "scale_2")
    found = {name: tensors[f"model.layers.0.{name}.weight_{factor}"].item() for name in members}
    assert len({found[name] for name in GROUPS[group]}) == 1
    for name, matrix in members.items():
        assert torch.equal(tensors[f"model.layers.0.{name}.{codes}"], matrix.packed)
        scale = tensors[f"model.layers.0.{name}.weight_scale"]
        if target == "modelopt":
            assert torch.equal(weights(matrix._replace(scale=scale), found[name]), weights(matrix))
        else:
            after = Scaled(matrix.packed, scale, torch.tensor(found[name]))
            assert torch.equal(weights(after), weights(matrix))
    assert summary.shifted == sorted(f"model.layers.0.{name}" for name in GROUPS[group][1:])
    assert summary.requantized == {}


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt"])
def test_refused_or_quantized_anew(target, tmp_path):
    members = {"mlp.gate_proj": made([0x38, 0x41], 1000.0), "mlp.up_proj": made([0x38, 0x43], 1500.0, seed=1)}
    members |= {"self_attn.k_proj": made([0x01], 2.0**20), "self_attn.q_proj": made([0x7E], 2.0, seed=1)}
    source = checkpoint(tmp_path / "source", members)
    named = r"mlp.gate_proj, .*mlp.up_proj, .*self_attn.k_proj, .*self_attn.q_proj: .*theirs differ \(divisors 1000, "
    with pytest.raises(CannotExport, match=named + r"1500\).*or export with requantize=True") as caught:
        export_checkpoint(source, tmp_path / "out", target)
    assert [name.removeprefix("model.layers.0.") for name in caught.value.modules] == list(members)
    assert not (tmp_path / "out").exists()
    summary = export_checkpoint(source, tmp_path / "out", target, requantize=True)
    changed = {"model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"}
    assert summary.requantized.keys() == changed
    assert summary.requantized["model.layers.0.mlp.up_proj"]["weights"] == 32
    assert 0 < summary.requantized["model.layers.0.mlp.up_proj"]["error"] < 0.01
    assert summary.requantized["model.layers.0.self_attn.k_proj"]["error"] == 1.0  # all too small: to the report
    assert json.loads(json.dumps(summary.to_dict()))["requantized"] == summary.requantized


def test_no_search_for_all_problems(tmp_path):
    """A large model need not be read to its end to be refused."""
    pair = {"gate_proj": ([0x38, 0x41], 1000.0), "up_proj": ([0x38, 0x43], 1500.0)}
    members = {f"mlp.experts.{e}.{name}": made(*matrix) for e in range(60) for name, matrix in pair.items()}
    with pytest.raises(CannotExport, match="and at least 45 more: engines give these") as caught:
        export_checkpoint(checkpoint(tmp_path / "source", members), tmp_path / "out", "compressed-tensors")
    assert len(caught.value.modules) == 50


def test_full_precision_needs_no_common_scale(tmp_path):
    members = {"mlp.gate_proj": made([0x38, 0x41], 1000.0), "mlp.up_proj": made([0x38, 0x43], 1500.0, seed=1)}
    source = checkpoint(tmp_path / "source", members)
    export_checkpoint(source, tmp_path / "out", "bf16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    for name, matrix in members.items():
        assert torch.equal(tensors[f"model.layers.0.{name}.weight"], weights(matrix))
