# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into packed weights: what is stored, what is left of the change, and the way back."""

import copy
import logging
import pickle

import pytest
import torch
from tiny_models import case, packed_modules, tokens
from torch import nn

peft = pytest.importorskip("peft")

import hf_mxfp4  # noqa: E402
from hf_mxfp4 import FP4Config, FP4Experts, FP4Linear  # noqa: E402
from hf_mxfp4.integrations.peft import merge_report, merge_table, merge_to_bf16, merging, siblings  # noqa: E402
from hf_mxfp4.integrations.peft.requantization import own_bias  # noqa: E402
from hf_mxfp4.integrations.peft.siblings import share_tensor_scales  # noqa: E402
from hf_mxfp4.reference import unpack  # noqa: E402

RECIPES = {
    "nvfp4 soar": dict(format="nvfp4"),
    "nvfp4 soar, free": dict(format="nvfp4", global_scale="free"),
    "nvfp4 soar, local": dict(format="nvfp4", search=2),
    "nvfp4 amax": dict(format="nvfp4", scale_rule="amax"),
    "nvfp4 four_over_six": dict(format="nvfp4", scale_rule="four_over_six"),
    "mxfp4 soar": dict(format="mxfp4"),
    "mxfp4 amax": dict(format="mxfp4", scale_rule="amax"),
    "mxfp4 macro search": dict(format="mxfp4", macro_block="search"),
    "mxfp4 overflow_aware, macro static": dict(format="mxfp4", scale_rule="overflow_aware", macro_block="static"),
}


def linear(name: str = "nvfp4 soar", bias: bool = False, shape=(48, 128), seed: int = 0, **kwargs) -> FP4Linear:
    """A packed layer of random weights that knows its recipe."""
    recipe = FP4Config(**RECIPES[name]).recipe()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.05
    bias = torch.randn(shape[0], generator=generator).bfloat16() if bias else None
    layer = FP4Linear.from_quantized(recipe.quantize(weight), bias, dtype=torch.bfloat16, **kwargs)
    layer.recipe = recipe
    return layer


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Bytes of all a module holds, less adapters; by the names they have without PEFT."""
    state = {name.replace("base_layer.", ""): tensor for name, tensor in module.state_dict().items()}
    return {name: t.view(torch.uint8).clone() for name, t in state.items() if "lora_" not in name}


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def adapted(base: nn.Module, size: float = 0.05, seed: int = 3, adapter: str = "default", **config):
    """A PEFT model whose adapter is not zero."""
    config = {"target_modules": "all-linear", "r": 4} | config
    model = peft.get_peft_model(base, peft.LoraConfig(**config), adapter_name=adapter)
    return randomized(model, size, seed)


def randomized(model, size: float = 0.05, seed: int = 3, part: str = "lora_B"):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def one_layer(size: float = 0.05, bias: bool = False, name: str = "nvfp4 soar", **config):
    """A PEFT model of one packed layer (and another, as PEFT asks parameters for their device), and that layer."""
    model = adapted(nn.Sequential(linear(name, bias), nn.LayerNorm(48)), size, target_modules=["0"], **config)
    return model, model.base_model.model[0]


def llama(size: float = 0.05, **config):
    return adapted(copy.deepcopy(case("llama").model), size, **config)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


# --- requantize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_requantize_is_the_modules_own_rule(name):
    layer = linear(name)
    dense = layer.dense("weight", torch.float32)
    dense += 0.005 * torch.randn_like(dense)
    dense *= 0.9 * layer.dense("weight", torch.float32).abs().max() / dense.abs().max()  # its tensor scale still fits
    before = tensors(layer)
    found = merging.requantize(layer, "weight", dense)
    assert equal(tensors(layer), before)
    if layer.format.has_global_scale:
        assert torch.equal(found.global_scale.reshape(()), layer.tensor_scale("weight"))
        expected = layer.recipe.quantize(dense, tensor_scale=layer.tensor_scale("weight"))
    else:
        expected = hf_mxfp4.quantize(dense, FP4Config(**RECIPES[name]))
    unit = 128 if found.macro is not None else layer.format.block_size
    errors = [
        (hf_mxfp4.dequantize(q, torch.float32) - dense).square().unflatten(1, (-1, unit)) for q in (found, expected)
    ]
    assert (errors[0].sum(-1) <= errors[1].sum(-1)).all()
    same = (errors[0] == errors[1]).all(-1)
    assert same.all() if "soar" in name or "search" in name else 0.5 < same.float().mean() <= 1
    for part in ("packed", "scale", "macro"):  # blocks as the rule has them
        one, other = getattr(found, part), getattr(expected, part)
        assert (one is None) == (other is None)
        if one is not None:
            one, other = (t.view(torch.uint8).unflatten(1, (same.shape[1], -1)) for t in (one, other))
            assert torch.equal(one[same], other[same])


@pytest.mark.parametrize("name", RECIPES)
def test_a_tiny_change_does_no_harm(name):
    layer = linear(name)
    before = layer.dense("weight", torch.float32)
    merging.reweight(layer, "weight", lambda _, dense: dense * (1 - 2.0**-20))
    assert torch.equal(layer.dense("weight", torch.float32), before)


def test_a_given_tensor_scale_is_kept_by_every_rule():
    weight, scale = 0.05 * torch.randn(32, 64), torch.tensor(0.0001)
    for name, fields in RECIPES.items():
        recipe = FP4Config(**fields).recipe()
        if not recipe.format.has_global_scale:
            with pytest.raises(ValueError, match="tensor_scale .* it has no such"):
                recipe.quantize(weight, tensor_scale=scale)
            continue
        kept = recipe.quantize(weight, tensor_scale=scale)
        assert kept.global_scale == scale, name
        error = (hf_mxfp4.dequantize(kept, torch.float32) - weight).norm() / weight.norm()
        assert error < 0.12, name
    with pytest.raises(ValueError, match="one for each of 1 matrices"):
        recipe = FP4Config().recipe()
        recipe.quantize(weight, tensor_scale=torch.ones(2))


def test_a_given_power_of_two_is_what_soar_takes_itself():
    weight, recipe = torch.randn(3, 32, 64), FP4Config().recipe()
    free = recipe.quantize(weight)
    kept = recipe.quantize(weight, tensor_scale=free.global_scale)
    assert torch.equal(kept.packed, free.packed) and torch.equal(
        kept.scale.view(torch.uint8), free.scale.view(torch.uint8)
    )


@pytest.mark.parametrize("name", ["nvfp4 amax", "nvfp4 soar", "nvfp4 soar, free"])
@pytest.mark.parametrize(("factor", "octaves"), [(0.5, 0), (0.01, 0), (40.0, 5), (2.0**-14, -14)])
def test_tensor_scale_grows_and_shrinks_by_powers_of_two(name, factor, octaves):
    layer = linear(name)
    own = layer.tensor_scale("weight")
    dense = factor * layer.dense("weight", torch.float32)
    found = merging.requantize(layer, "weight", dense)
    steps = torch.log2(found.global_scale / own).item()
    assert steps == round(steps) and abs(steps - octaves) <= 1
    error = (hf_mxfp4.dequantize(found, torch.float32) - dense).norm() / dense.norm()
    assert error < 0.12


@pytest.mark.parametrize("name", [name for name in RECIPES if "nvfp4" in name])
@pytest.mark.parametrize("growth", [2.0**-20, 0.03])
def test_a_little_growth_keeps_the_tensor_scale(name, growth):
    layer = linear(name)
    dense = (1 + growth) * layer.dense("weight", torch.float32)
    found = merging.requantize(layer, "weight", dense)
    assert torch.equal(found.global_scale.reshape(()), layer.tensor_scale("weight"))
    error = (hf_mxfp4.dequantize(found, torch.float32) - dense).norm() / dense.norm()
    assert error < 1.1 * growth  # as far as nothing changed, and the change was to be met by no code


def test_a_layer_of_zeros_can_be_merged_into():
    recipe = FP4Config().recipe()
    layer = FP4Linear.from_quantized(recipe.quantize(torch.zeros(16, 32)))
    dense = 0.001 * torch.randn(16, 32)
    merging.reweight(layer, "weight", lambda _, before: dense, ["a"])
    assert (layer.dense("weight", torch.float32) - dense).norm() / dense.norm() < 0.12
    assert layer._merges["weight"][1] == float("inf")  # relative to nothing


def test_outliers_keep_their_places():
    recipe = FP4Config().recipe()
    weight = 0.05 * torch.randn(32, 64)
    keep = torch.rand(32, 64) < 0.02
    layer = FP4Linear.from_quantized(recipe.quantize(weight.bfloat16(), keep=keep), dtype=torch.bfloat16)
    columns, offsets = layer.weight_outlier_columns.clone(), layer.weight_outlier_offsets.clone()
    wanted = layer.dense("weight", torch.float32) + 0.01 * torch.randn(32, 64)
    wanted[keep.nonzero()[0][0], keep.nonzero()[0][1]] = 3.0  # and does not move the tensor scale
    own = layer.tensor_scale("weight")
    merging.reweight(layer, "weight", lambda _, before: wanted)
    assert torch.equal(layer.weight_outlier_columns.view(torch.int16), columns.view(torch.int16))
    assert torch.equal(layer.weight_outlier_offsets, offsets)
    assert layer.weight_outlier_values.dtype == torch.bfloat16
    assert torch.equal(layer.weight_outlier_values, wanted[keep].bfloat16())
    assert not unpack(layer.weight_packed)[keep].any() and torch.equal(layer.tensor_scale("weight"), own)


def test_outliers_beyond_their_dtype_are_refused():
    keep = torch.zeros(16, 32, dtype=torch.bool)
    keep[0, 0] = True
    layer = FP4Linear.from_quantized(FP4Config().recipe().quantize(torch.randn(16, 32).half(), keep=keep))
    dense = layer.dense("weight", torch.float32)
    dense[0, 0] = 1e6
    with pytest.raises(ValueError, match="outliers are kept in torch.float16"):
        merging.requantize(layer, "weight", dense)


def transformed(**transforms) -> FP4Linear:
    weight = 0.05 * torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    return FP4Linear.from_quantized(FP4Config().recipe().quantize(weight), dtype=torch.float32, **transforms)


def orthogonal(size: int = 16) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(1)))[0]


@pytest.mark.parametrize("which", [("pre_quant_scale",), ("hadamard",), ("pre_quant_scale", "hadamard")])
def test_input_transforms_are_taken_out_and_put_back(which):
    given = {"pre_quant_scale": 0.5 + torch.rand(64), "hadamard": orthogonal()}
    layer = transformed(**{name: given[name] for name in which})
    wanted = layer.dense("weight", torch.float32) + 0.02 * torch.randn(32, 64)
    basis = wanted / given["pre_quant_scale"] if "pre_quant_scale" in which else wanted
    if "hadamard" in which:
        basis = (basis.unflatten(1, (4, 16)) @ given["hadamard"]).flatten(1)
    merging.reweight(layer, "weight", lambda _, before: wanted)
    packed = hf_mxfp4.dequantize(layer.quantized, torch.float32)
    assert (packed - basis).norm() / basis.norm() < 0.1  # the rounding of NVFP4
    x = torch.randn(5, 64)
    assert (layer(x) - x @ wanted.T).norm() / (x @ wanted.T).norm() < 0.13


@pytest.mark.parametrize("transforms", [{"pre_quant_scale": torch.ones(64)}, {"hadamard": orthogonal()}])
def test_singular_transforms_are_refused(transforms):
    layer = transformed(**transforms)
    for transform in transforms:
        layer._buffers[transform][0] = 0
    with pytest.raises(ValueError, match=f"{transform}.*cannot be inverted.*merge_to_bf16"):
        merging.requantize(layer, "weight", torch.randn(32, 64))


@pytest.mark.parametrize("dense", [torch.randn(48, 64), torch.randn(48, 128).bfloat16(), torch.randn(128)])
def test_requantize_refuses_other_shapes_and_dtypes(dense):
    with pytest.raises(ValueError, match=r"float32 or float64 \[48, 128\] is needed"):
        merging.requantize(linear(), "weight", dense)


def test_experts_matrix_by_matrix():
    experts = copy.deepcopy(next(m for m in case("qwen3_moe").model.modules() if isinstance(m, FP4Experts)))
    rows = experts.shapes["gate_up_proj"][1]
    experts.gate_up_proj_global_scale[1, 1] /= 2  # a checkpoint of another tool: halves of their own
    up = experts.gate_up_proj_scale[1, rows // 2 :]
    up.copy_(up.float() / 2)
    experts.prepare()
    before, divisor = tensors(experts), experts.gate_up_proj_global_scale.clone()
    dense = experts.dense("gate_up_proj", torch.float32)
    change = 0.02 * torch.randn_like(dense)
    change[2] = 0
    kept = merging.stash(experts, "gate_up_proj")
    merging.reweight(experts, "gate_up_proj", lambda e, matrix: matrix + change[e], ["a"])
    assert torch.equal(experts.gate_up_proj_global_scale, divisor) and experts.is_uneven("gate_up_proj")
    error = experts.dense("gate_up_proj", torch.float32) - dense - change
    assert (error.norm(dim=(1, 2)) / dense.norm(dim=(1, 2))).max() < 0.12
    assert torch.equal(experts.gate_up_proj_packed[2], before["gate_up_proj_packed"][2])
    assert torch.equal(experts.down_proj_packed, before["down_proj_packed"])
    merging.restore(experts, kept)
    assert equal(tensors(experts), before)


# --- the recipe of a module ------------------------------------------------------------------------------------------


def test_modules_know_their_recipe():
    for name, fmt in (("llama", "nvfp4"), ("qwen3_moe", "mxfp4")):
        made = case(name, fmt).model
        for model in (made, case(name, fmt).load(), pickle.loads(pickle.dumps(made))):
            for path, module in packed_modules(copy.deepcopy(model)).items():
                assert module.recipe == FP4Config(format=fmt).recipe() and module.path == path
    model = case("qwen3", "mxfp4").quantize(macro_block="search", outlier_fallback=0.01)
    assert {module.recipe.macro_block for module in packed_modules(model).values()} == {"search"}


def test_a_rule_that_is_not_known_is_soar():
    layer = linear("mxfp4 macro search")
    layer.recipe = None
    dense = torch.randn(48, 128)
    found = merging.requantize(layer, "weight", dense)
    assert torch.equal(found.macro, hf_mxfp4.quantize(dense, FP4Config("mxfp4", macro_block="search")).macro)


# --- merge and unmerge -----------------------------------------------------------------------------------------------


def test_a_thousand_cycles_leave_every_byte():
    packed = linear("mxfp4 amax", bias=True, shape=(16, 32))
    model = adapted(nn.Sequential(packed), target_modules=["0"], lora_bias=True)
    layer = model.base_model.model[0]
    before = tensors(model)
    merged = None
    for _ in range(1000):
        layer.merge()
        merged = merged or tensors(model)
        assert layer.merged
        layer.unmerge()
    assert not equal(merged, before)
    assert equal(tensors(model), before)
    assert layer._stash is None and merge_report(model) == []
    model.merge_adapter()
    assert equal(tensors(model), merged)


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"use_rslora": True}, {"bias": True, "lora_bias": True}])
@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge_is_pefts_arithmetic_quantized_once(config, safe_merge):
    model, layer = one_layer(**config)
    base = layer.base_layer
    dense = nn.Linear(128, 48, bias=base.bias is not None)
    dense.weight.data = base.dense("weight", torch.float32)
    if base.bias is not None:
        dense.bias.data = base.bias.data.float()
    twin = one_layer(**config)[0]  # for its config only
    twin = peft.get_peft_model(nn.Sequential(dense, nn.LayerNorm(48)), twin.peft_config["default"])
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    expected_bias = base.bias
    model.merge_adapter(safe_merge=safe_merge)
    twin.merge_adapter(safe_merge=safe_merge)
    wanted = twin.base_model.model[0].base_layer
    expected = layer.base_layer.recipe.quantize(wanted.weight.data, tensor_scale=base.tensor_scale("weight"))
    assert torch.equal(base.weight_packed, expected.packed)
    assert torch.equal(base.weight_scale.view(torch.uint8), expected.scale.view(torch.uint8))
    if expected_bias is not None:
        assert torch.equal(base.bias, wanted.bias.to(torch.bfloat16))


def test_bfloat16_factors_are_multiplied_in_float32():
    model, layer = one_layer()
    layer.lora_A.to(torch.bfloat16), layer.lora_B.to(torch.bfloat16)
    base, factors = layer.base_layer, (layer.lora_B["default"].weight, layer.lora_A["default"].weight)
    wanted = base.dense("weight", torch.float32) + factors[0].float() @ factors[1].float() * layer.scaling["default"]
    assert torch.equal(layer.merged_linear(base, ["default"]).weight, wanted)
    assert layer.lora_A["default"].weight.dtype == torch.bfloat16 and layer.base_layer is base


def test_one_after_the_other_is_both_at_once():
    model, layer = one_layer(adapter="a")
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))
    randomized(model, 0.1, seed=5)
    before = tensors(model)
    model.merge_adapter(["a"])
    only_a = tensors(model)
    assert layer.merged_adapters == ["a"]
    with pytest.warns(UserWarning, match="additionally merging b"):
        model.merge_adapter(["b"])
    in_turn = tensors(model)
    assert layer.merged_adapters == ["a", "b"] and not equal(in_turn, only_a)
    with pytest.warns(UserWarning, match="nothing to do"):
        model.merge_adapter(["b"])
    assert equal(tensors(model), in_turn)
    model.unmerge_adapter()
    assert equal(tensors(model), before)
    model.merge_adapter(["a", "b"])
    assert equal(tensors(model), in_turn)
    with pytest.raises(ValueError, match="Cannot delete"):
        model.delete_adapter("a")
    with pytest.warns(UserWarning, match="merged"):
        model.set_adapter("b")
    assert equal(tensors(model), before)


def test_disabled_while_merged_is_the_base():
    model = llama()
    with model.disable_adapter():
        base = logits(model)
    before, adapter = tensors(model), logits(model)
    model.merge_adapter()
    merged = logits(model)
    assert (
        not torch.equal(merged, base) and (merged - adapter).norm() < 0.3 * (adapter - base).norm() + 0.2 * base.norm()
    )
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert equal(tensors(model), before) and torch.equal(logits(model), adapter)


def test_merged_state_is_in_no_file(tmp_path):
    model = llama()
    names = model.state_dict().keys()
    model.save_pretrained(tmp_path / "one")
    model.merge_adapter()
    assert model.state_dict().keys() == names
    model.save_pretrained(tmp_path / "two")
    files = [{f.name: f.read_bytes() for f in (tmp_path / part).iterdir()} for part in ("one", "two")]
    assert files[0] == files[1]


def copies(model):
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield copy.deepcopy(model).to(torch.float32)
    yield copy.deepcopy(model).to("meta").to_empty(device="cpu")


def test_a_merged_model_can_be_copied_cast_and_moved():
    model, layer = one_layer()
    before = tensors(model)
    model.merge_adapter()
    merged = tensors(model)
    for number, other in enumerate(copies(model)):
        if number < 3:
            assert equal(tensors(other), merged)
            other.unmerge_adapter()
            assert equal(tensors(other), before)
        else:  # its values are gone, but they have gone with it
            other.unmerge_adapter()
            assert tensors(other).keys() == before.keys()
    assert layer.merged and equal(tensors(model), merged)
    model.unmerge_adapter()
    assert equal(tensors(model), before)


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_merge_in_any_context(context):
    model, layer = one_layer()
    model.merge_adapter()
    expected = tensors(model)
    model.unmerge_adapter()
    with context():
        model.merge_adapter()
    assert equal(tensors(model), expected)
    assert not any(buffer.is_inference() for buffer in layer.base_layer.buffers())
    model.unmerge_adapter()
    model(torch.randn(2, 128)).sum().backward()
    assert layer.lora_B["default"].weight.grad.abs().sum() > 0


def test_no_change_keeps_every_byte():
    model, layer = one_layer(size=0.0)
    before = tensors(model)
    model.merge_adapter()
    assert layer.merged and equal(tensors(model), before)
    assert merge_report(model)[0][3:] == (0.0, 0.0, 1.0)
    model.unmerge_adapter()
    assert equal(tensors(model), before)


OTHERS = {
    "ia3": (lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[]), "ia3_l"),
    "loha": (lambda: peft.LoHaConfig(r=4, target_modules=["0"]), "hada_"),
    "oft": (lambda: peft.OFTConfig(oft_block_size=16, r=0, target_modules=["0"]), "oft_R"),
    "vera": (lambda: peft.VeraConfig(r=4, target_modules=["0"]), "vera_lambda"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_merge_and_unload(name):
    make, part = OTHERS[name]
    model = peft.get_peft_model(nn.Sequential(linear(), nn.LayerNorm(48)), make())
    randomized(model, 0.3, part=part)
    x = torch.randn(4, 128)
    with torch.no_grad():
        base, expected = nn.LayerNorm(48)(linear()(x)), model(x)
        before = {k: v.view(torch.uint8).clone() for k, v in model.base_model.model[0].base_layer.named_buffers()}
        model.merge_adapter()
        merged = model(x)
        model.unmerge_adapter()
        after = {k: v.view(torch.uint8) for k, v in model.base_model.model[0].base_layer.named_buffers()}
        assert equal(before, after)
        plain = model.merge_and_unload()
        assert type(plain[0]) is FP4Linear and torch.equal(plain(x), merged)
    assert (merged - expected).norm() < 0.5 * (base - expected).norm() + 0.15 * expected.norm()


# --- bad input -------------------------------------------------------------------------------------------------------


def break_layer(model, number: int, value: float = float("nan")):
    layers = [m for m in model.modules() if isinstance(m, merging.PackedMerge)]
    layers[number].lora_B["default"].weight.data[0, 0] = value
    return layers


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_adapter_changes_nothing(safe_merge, value):
    model = llama()
    model.add_adapter("sound", peft.LoraConfig(r=2, target_modules="all-linear"))
    model.merge_adapter(["sound"])
    before, layers = tensors(model), break_layer(model, 3, value)
    with pytest.raises(ValueError, match="broken"), pytest.warns(UserWarning):
        model.merge_adapter(["default"], safe_merge=safe_merge)
    assert equal(tensors(model), before)
    assert all(layer.merged_adapters == ["sound"] for layer in layers)
    assert all(isinstance(layer.base_layer, FP4Linear) for layer in layers)
    model.unmerge_adapter()
    assert not any(layer.merged for layer in layers)


def test_errors_name_the_weight_and_the_adapter():
    model = llama()
    break_layer(model, 3)
    with pytest.raises(ValueError, match=r"self_attn.o_proj.weight: with adapter default merged, \d+ of 4096 values"):
        model.merge_adapter()


def test_a_damaged_base_is_not_the_adapters_fault():
    model, layer = one_layer()
    layer.base_layer.weight_scale.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="NaN or Inf, without any adapter.*checkpoint is damaged"):
        model.merge_adapter()
    assert not layer.merged


@pytest.mark.parametrize("unload", [False, True])
@pytest.mark.parametrize("safe_merge", [False, True])
def test_dense_layers_are_taken_back_too(unload, safe_merge):
    model = llama(target_modules=["embed_tokens", "q_proj"])  # PEFT merges the embedding before it meets the NaN
    randomized(model, part="lora_embedding_B")
    before, embedding = tensors(model), model.get_input_embeddings()
    break_layer(model, 1)
    with pytest.raises(ValueError, match="broken"):
        (model.merge_and_unload if unload else model.merge_adapter)(safe_merge=safe_merge)
    assert model.get_input_embeddings() is embedding and not embedding.merged
    assert equal(tensors(model), before)


def test_unknown_adapters_are_named():
    model = llama()
    before = tensors(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="no adapter is called typo; allowed: default"):
            merge(adapter_names=["typo"])
    assert equal(tensors(model), before) and merge_report(model) == []


def test_a_broken_adapter_is_not_unloaded_halfway():
    model = llama()
    before, expected = tensors(model), logits(model)
    layers = break_layer(model, 3)
    weight = layers[3].lora_B["default"].weight
    with pytest.raises(ValueError, match="broken"):
        model.merge_and_unload()
    weight.data[0, 0] = 0.0
    assert equal(tensors(model), before) and "default" in model.peft_config
    assert [m for m in model.modules() if isinstance(m, merging.PackedMerge)] == layers
    assert logits(model).shape == expected.shape
    assert isinstance(model.merge_and_unload().model.layers[0].mlp.up_proj, FP4Linear)


@pytest.mark.parametrize("unload", [False, True])
def test_interrupted_at_the_third_layer(unload, monkeypatch):
    model = llama()
    before, calls, plain = tensors(model), [], merging.reweight

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plain(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(merging, "reweight", interrupted)
        model.merge_and_unload() if unload else model.merge_adapter()
    assert equal(tensors(model), before) and merge_report(model) == []
    assert not any(module.merged for module in model.modules() if isinstance(module, merging.PackedMerge))
    model.merge_adapter()
    assert len(merge_report(model)) == 14


def test_interrupted_after_the_last_layer(monkeypatch):
    model = llama(2.0, target_modules=["q_proj"])
    before, expected, plain, calls = tensors(model), logits(model), siblings.common_divisor, []

    def interrupted(matrices):
        calls.append(matrices)
        if len(calls) == 2:  # q, k and v of the second layer; the first one's have a scale in common by now
            raise KeyboardInterrupt
        return plain(matrices)

    monkeypatch.setattr(siblings, "common_divisor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.merge_and_unload()
    assert len(calls) == 2 and equal(tensors(model), before) and torch.equal(logits(model), expected)
    assert model.base_model.model.peft_config is model.peft_config and merge_report(model) == []


def test_a_bias_there_is_no_place_for():
    model, layer = one_layer(lora_bias=True)
    before = tensors(model)
    with pytest.raises(RuntimeError, match="the base layer has no bias"):
        model.merge_adapter()
    assert equal(tensors(model), before) and not layer.merged and layer._stash is None


def test_adapters_around_adapters_are_refused():
    model = peft.get_peft_model(
        nn.Sequential(linear(), nn.LayerNorm(48)), peft.LoraConfig(target_modules=["0"]), mixed=True
    )
    model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["0"]))
    model.set_adapter(["default", "other"])
    randomized(model, part="hada_"), randomized(model)
    before = tensors(model)
    with pytest.raises(ValueError, match="several methods"):
        model.merge_adapter()
    assert equal(tensors(model), before)


def test_unload_drops_adapters_only():
    before = tensors(case("llama").model)
    assert equal(tensors(llama().unload()), before)
    config = peft.VeraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(copy.deepcopy(case("llama").model), config)
    assert equal(tensors(model.unload()), before)


def test_a_bias_that_overflows_is_refused():
    layer = linear(bias=True)
    with pytest.raises(ValueError, match="bias: .*NaN or Inf"):
        own_bias(layer, torch.full((48,), float("nan")))


def test_weights_elsewhere_are_refused():
    model, layer = one_layer()
    layer.base_layer.to("meta")
    with pytest.raises(ValueError, match="is offloaded, or on the meta device"):
        model.merge_adapter()
    assert not layer.merged
    with pytest.raises(ValueError, match="is offloaded, or on the meta device: merge_to_bf16"):
        merge_to_bf16(model)


def test_unmerged_twice():
    model, _ = one_layer()
    before = tensors(model)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()
    assert equal(tensors(model), before)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_report_says_what_is_left(caplog):
    model, layer = one_layer(size=0.2)
    base = layer.base_layer
    before = base.dense("weight", torch.float32).double()
    change = layer.get_delta_weight("default").detach().double()
    with caplog.at_level(logging.INFO):
        model.merge_adapter()
    made = base.dense("weight", torch.float32).double() - before
    (report,) = merge_report(model)
    assert report[:3] == ("0", "weight", ("default",))
    assert report.change == pytest.approx(float(change.norm() / before.norm()), rel=1e-3)
    assert report.relative_error == pytest.approx(float((made - change).norm() / change.norm()), rel=1e-3)
    assert report.cosine == pytest.approx(float((made * change).sum() / made.norm() / change.norm()), rel=1e-3)
    assert 0.5 < report.cosine < 1
    lines = [record.message for record in caplog.records if "merged into" in record.message]
    assert len(lines) == 1 and f"cosine {report.cosine:.3f}" in lines[0]
    table = merge_table(model).splitlines()
    assert len(table) == 2 and table[0].split()[-1] == "cosine" and table[1].split()[-1] == f"{report.cosine:.3f}"


def test_one_warning_where_little_is_left(caplog):
    model = llama(size=0.002)
    model.merge_adapter()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "merge_to_bf16" in warnings[0] and "Keep the adapter" in warnings[0]
    assert len(merge_report(model)) == 14 and merge_report(model)[0].name == "model.layers.0.self_attn.q_proj"
    caplog.clear()
    plain = model.merge_and_unload()
    assert len(merge_report(plain)) == 14 and not [r for r in caplog.records if "4 bits cannot" in r.message]
    caplog.clear()
    large = llama(size=0.5)
    large.merge_adapter()
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]


def test_another_adapter_is_warned_of_too(caplog):
    model = llama(size=0.002)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules="all-linear"))
    randomized(model, 0.002)
    for name, count in (("default", 1), ("default", 1), ("other", 2)):
        model.merge_adapter([name])
        model.unmerge_adapter()
        assert len([r for r in caplog.records if "4 bits cannot" in r.message]) == count


def test_what_was_unloaded_before_is_reported_again():
    plain = llama(0.3).merge_and_unload()
    first = merge_report(plain)
    model = adapted(plain, 0.5, seed=4)
    model.merge_adapter()
    assert len(first) == 14 and merge_report(model) != first
    model.unmerge_adapter()
    assert merge_report(model) == first


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "fields"), [(2.0, {}), (0.3, {"scale_rule": "amax"})])
def test_merge_and_unload_saves_a_checkpoint(size, fields, tmp_path):
    base = case("llama").quantize(**fields)
    divisor = base.model.layers[0].self_attn.k_proj.weight_global_scale.clone()
    model = adapted(base, size, target_modules=["q_proj", "v_proj", "up_proj"])
    model.merge_adapter()
    merged = logits(model)
    members = [m for name, m in packed_modules(model).items() if "layers.0.self_attn" in name]
    assert any(m.weight_global_scale != divisor for m in members[:3])  # of q, k, v: what did not fit
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    for layer in plain.model.layers:
        for members in (("q_proj", "k_proj", "v_proj"),):
            own = [getattr(layer.self_attn, member).weight_global_scale for member in members]
            assert all(torch.equal(scale, own[0]) for scale in own)
        assert torch.equal(layer.mlp.gate_proj.weight_global_scale, layer.mlp.up_proj.weight_global_scale)
    assert torch.equal(logits(plain), merged)
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert torch.equal(logits(again), merged)
    assert equal(tensors(again), tensors(plain))
    assert not [m for m in again.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]


def test_mixed_methods_share_a_tensor_scale():
    model = copy.deepcopy(case("llama").model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4), mixed=True)
    plain = randomized(model, 2.0).merge_and_unload()
    attention = plain.model.layers[0].self_attn
    assert type(attention.q_proj) is FP4Linear and len(merge_report(plain)) == 2
    assert len({attention.get_submodule(m).weight_global_scale.item() for m in ("q_proj", "k_proj", "v_proj")}) == 1


def test_siblings_whose_scales_have_no_room():
    """A block of the smallest scale beside one of the largest: no common divisor leaves both as they are."""
    parent = nn.Module()
    for seed, leaf in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(parent, leaf, linear("nvfp4 amax", seed=seed, shape=(16, 32)))
        getattr(parent, leaf).weight_global_scale.fill_(1000.0)
    for leaf, byte, divisor in (("q_proj", 126, 500.0), ("k_proj", 1, 1000.0)):
        module = getattr(parent, leaf)
        module.weight_scale.view(torch.uint8)[0, 0] = byte
        module.weight_packed[0, :8] = 0x27  # codes 7 and 2
        module.weight_global_scale.fill_(divisor)
        module.prepare()
    dense = [module.dense("weight", torch.float32) for module in parent.children()]
    share_tensor_scales(parent)
    assert parent.k_proj.weight_global_scale == 1000.0  # nothing was merged
    parent.q_proj._merges = {"weight": (("default",), 0.1, 0.5, 0.8)}
    share_tensor_scales(parent)
    assert {module.weight_global_scale.item() for module in parent.children()} == {500.0}
    for module, before in zip(parent.children(), dense, strict=True):
        after = module.dense("weight", torch.float32)
        assert (after - before).norm() <= 1e-3 * before.norm()
        if module is not parent.k_proj:
            assert torch.equal(after, before)


@pytest.mark.parametrize("merged_before", [False, True])
def test_merge_to_bf16(merged_before, tmp_path):
    model = llama(target_modules=["q_proj", "down_proj"], lora_bias=True)
    expected = copy.deepcopy(case("llama").model).dequantize(torch.float32).float()
    expected = peft.get_peft_model(expected, model.peft_config["default"])
    adapter = {k: v for k, v in model.state_dict().items() if "lora_" in k}
    expected.load_state_dict(adapter, strict=False)
    expected = expected.merge_and_unload()
    if merged_before:
        model.merge_adapter()
    before = tensors(model)
    plain = merge_to_bf16(model)
    assert (
        equal(tensors(model), before) and model.base_model.model.model.layers[0].mlp.down_proj.merged is merged_before
    )
    state = plain.state_dict()
    for name, value in expected.state_dict().items():
        assert state[name].dtype == torch.bfloat16 and torch.equal(state[name], value.to(torch.bfloat16)), name
    assert not hasattr(plain.config, "quantization_config") and not packed_modules(plain)
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again), logits(plain))
    again = merge_to_bf16(model, torch.float32)
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_merge_to_bf16_casts_trained_modules():
    model = llama(target_modules=["q_proj"], modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data = parameter.data.float() + 1.0
    plain = merge_to_bf16(model)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert plain.lm_head.weight.mean() > 0.9 and logits(plain).isfinite().all()


def test_merge_to_bf16_refuses():
    model, layer = one_layer()
    with pytest.raises(TypeError, match="takes a PeftModel"):
        merge_to_bf16(case("llama").model)
    with pytest.raises(ValueError, match="dtype=torch.float64; allowed"):
        merge_to_bf16(model, torch.float64)
    with pytest.raises(ValueError, match="no adapter is called typo; allowed: default"):
        merge_to_bf16(model, adapter_names=["typo"])
    with pytest.raises(ValueError, match="holds no packed weights"):
        merge_to_bf16(adapted(copy.deepcopy(case("llama").dense)))
    model = llama()
    break_layer(model, 0)
    before = tensors(model)
    with pytest.raises(ValueError, match="q_proj.weight: with the adapters merged"):
        merge_to_bf16(model)
    assert equal(tensors(model), before)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_merge_to_bf16_and_back(name):
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = adapted(copy.deepcopy(case(name).model), target_modules=["q_proj"], target_parameters=targets)
    dense = copy.deepcopy(case(name).model).dequantize(torch.float32).float()
    expected = peft.get_peft_model(dense, model.peft_config["default"])
    expected.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    expected, before = expected.merge_and_unload().state_dict(), tensors(model)
    state = merge_to_bf16(model).state_dict()
    assert equal(tensors(model), before) and state.keys() == expected.keys()
    for key, value in expected.items():  # sums of low-rank products in another order
        assert torch.allclose(state[key].float(), value.float(), rtol=2.0**-7, atol=1e-7), key
    model.merge_adapter()
    assert {report.weight for report in merge_report(model)} == {"weight", "gate_up_proj", "down_proj"}
    merged, found = tensors(model), logits(model)
    model.unmerge_adapter()
    assert equal(tensors(model), before) and not equal(merged, before)
    plain = model.merge_and_unload()
    assert equal(tensors(plain), {k.removeprefix("base_model.model."): v for k, v in merged.items()})
    assert torch.equal(logits(plain), found)
