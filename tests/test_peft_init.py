# SPDX-License-Identifier: Apache-2.0
"""LoRA that starts at the best low-rank correction of the quantization error."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import auto_class, case, outputs, packed_modules, source, tiny_model

from hf_mxfp4 import FP4Config, FP4Linear

peft = pytest.importorskip("peft")
from hf_mxfp4.integrations.peft import FP4LoraLinear, fp4_residual, initialization  # noqa: E402

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"


def lora(**fields):
    return peft.LoraConfig(
        **{"target_modules": "all-linear", "r": 4, "lora_alpha": 6, "init_lora_weights": "fp4_residual", **fields}
    )


@torch.no_grad()
def effective(layer, name="default"):
    """The weight a layer stands for, with its adapter."""
    a, b = (getattr(layer, which)[name].weight.float() for which in ("lora_A", "lora_B"))
    return layer.base_layer.dense("weight", torch.float32) + layer.scaling[name] * b @ a


def layers_of(model):
    return {n: m for n, m in model.get_base_model().named_modules() if isinstance(m, FP4LoraLinear)}


@pytest.mark.parametrize(
    "name, format, fields",
    [("qwen3", "nvfp4", {}), ("llama", "mxfp4", {"use_rslora": True}), ("qwen3_moe", "nvfp4", {"r": 200})],
)
def test_the_best_correction_of_its_rank(name, format, fields):
    """By Eckart and Young: the error left is that of the singular values beyond the rank, here by numpy in float64."""
    model = case(name, format).quantize()
    linears = {path: module for path, module in packed_modules(model).items() if isinstance(module, FP4Linear)}
    bits = {path: module.weight_packed.clone() for path, module in linears.items()}
    config = lora(**fields)
    adapted = peft.get_peft_model(model, config)
    assert config.init_lora_weights == "fp4_residual"  # the user's own; the model's is for what is saved
    assert adapted.peft_config["default"].init_lora_weights is True
    dense, layers = dict(case(name, format).dense.named_modules()), layers_of(adapted)
    assert len(layers) == len(bits)
    for path, layer in layers.items():
        weight = dense[path].weight.detach().float()
        error = (weight - layer.base_layer.dense("weight", torch.float32)).double().numpy()
        values = np.linalg.svd(error, compute_uv=False)
        rest, total = np.linalg.norm(values[config.r :]), np.linalg.norm(values)
        left = float((weight - effective(layer)).double().norm())
        assert abs(left - rest) <= 4e-3 * total, path  # factors rounded to bfloat16 with the base's dtype
        assert left < 0.95 * total and torch.equal(layer.base_layer.weight_packed, bits[path])


def test_by_call_it_is_exact_and_reports():
    this = case("qwen3")
    adapted = peft.get_peft_model(this.load(), lora(init_lora_weights=True))
    results = fp4_residual(adapted, this.dense)
    layers = layers_of(adapted)
    assert [result.name for result in results] == list(layers)
    for result in results:
        weight = this.dense.get_submodule(result.name).weight.detach().float()
        values = torch.linalg.svdvals(weight - layers[result.name].base_layer.dense("weight", torch.float32))
        assert np.isclose(result.before, values.norm() / weight.norm(), rtol=1e-4)
        assert np.isclose(result.after, values[4:].norm() / weight.norm(), rtol=1e-4)
        left = (weight - effective(layers[result.name])).norm() / weight.norm()
        assert np.isclose(left, result.after, rtol=1e-3)
    by_folder = peft.get_peft_model(this.load(), lora(init_lora_weights=True))
    assert fp4_residual(by_folder, source("qwen3")) == results
    by_model = this.load()
    by_model.add_adapter(lora(init_lora_weights=True), "other")
    assert fp4_residual(by_model, str(source("qwen3")), "other") == results
    difference = (outputs(by_model) - outputs(adapted)).norm() / outputs(adapted).norm()
    assert difference < 0.02  # transformers adds adapters in the base's bfloat16


def test_without_an_error_it_can_be_trained():
    """The reference may lie on the grid itself (a checkpoint that was dequantized): A keeps its values then."""
    model = case("qwen3").load(dtype=torch.float32)
    reference = copy.deepcopy(model).dequantize()
    adapted = peft.get_peft_model(model, lora(init_lora_weights=True))
    assert {result[1:] for result in fp4_residual(adapted, reference)} == {(0, 0)}
    for layer in layers_of(adapted).values():
        assert layer.lora_A["default"].weight.all() and not layer.lora_B["default"].weight.any()


def test_dora_starts_there_too():
    adapted = peft.get_peft_model(case("qwen3").quantize(), lora(use_dora=True))
    plain = peft.get_peft_model(case("qwen3").quantize(), lora())
    for layer in layers_of(adapted).values():
        norms = torch.linalg.norm(effective(layer), dim=1)
        magnitude = layer.lora_magnitude_vector["default"].weight
        assert magnitude.requires_grad and torch.allclose(magnitude.float(), norms, rtol=0.01)
    assert (outputs(adapted) - outputs(plain)).norm() < 0.02 * outputs(plain).norm()


def test_a_saved_adapter_is_loaded_and_not_computed_again(tmp_path):
    adapted = peft.get_peft_model(case("qwen3").quantize(), lora()).eval()
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(case("qwen3").load(), tmp_path)
    assert torch.equal(outputs(loaded), outputs(adapted))


def test_what_training_changed_goes_to_the_original_model(tmp_path):
    adapted = peft.get_peft_model(case("qwen3").quantize(), lora(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "first")
    before = {name: effective(layer) for name, layer in layers_of(adapted).items()}
    for layer in layers_of(adapted).values():
        layer.lora_B["default"].weight.data.normal_(0, 0.1)
    adapted.save_pretrained(tmp_path / "last", path_initial_model_for_weight_conversion=tmp_path / "first")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(case("qwen3").dense), tmp_path / "last").get_base_model()
    for name, layer in layers_of(adapted).items():
        added = loaded.get_submodule(name).get_delta_weight("default").float()
        assert (added - (effective(layer) - before[name])).norm() < 0.01 * added.norm()


def test_it_brings_the_demo_model_nearer():
    """Of the model in scripts/: less error of the logits, by rank."""
    load = auto_class("demo").from_pretrained
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = load(DEMO, dtype=torch.float32)(ids).logits.log_softmax(-1)

        def divergence(model):
            got = model.eval()(ids).logits.log_softmax(-1)
            return float((expected.exp() * (expected - got)).sum(-1).mean())

        packed = load(DEMO, quantization_config=FP4Config(format="mxfp4", scale_rule="amax"), dtype=torch.float32)
        found = [divergence(packed)]
        for rank in (16, 64):
            found.append(divergence(peft.get_peft_model(copy.deepcopy(packed), lora(r=rank, lora_alpha=rank))))
    assert found[1] < 0.95 * found[0] and found[2] < 0.8 * found[0], found


# --- bad input -------------------------------------------------------------------------------------------------------


def test_without_a_reference(tmp_path):
    with pytest.raises(ValueError, match="is for packed linears, and this model has none"):
        peft.get_peft_model(copy.deepcopy(case("qwen3").dense), lora())
    model = case("qwen3").load()
    before = outputs(model)
    with pytest.raises(ValueError, match=r"needs the original weights.*peft.fp4_residual\(model, reference"):
        peft.get_peft_model(model, lora())
    assert torch.equal(outputs(model), before) and not [m for m in model.modules() if isinstance(m, FP4LoraLinear)]
    adapted = peft.get_peft_model(model, lora(init_lora_weights=True))
    with pytest.raises(ValueError, match="is quantized already"):
        fp4_residual(adapted, case("qwen3").folder)
    with pytest.raises(ValueError, match="no folder here"):
        fp4_residual(adapted, tmp_path / "nowhere")
    folder = shutil.copytree(source("qwen3"), tmp_path / "gone")
    moved = case("qwen3").quantize(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="no folder here"):
        peft.get_peft_model(moved, lora())
    assert not [m for m in moved.modules() if isinstance(m, FP4LoraLinear)]


def test_merged_weights_are_not_taken_back():
    """Against the original weights, what was merged before would count as error."""
    adapted = peft.get_peft_model(case("qwen3").quantize(), lora(init_lora_weights=False))
    adapted.merge_adapter()
    adapted.unmerge_adapter()
    fp4_residual(adapted)
    model = adapted.merge_and_unload()
    before = outputs(model)
    with pytest.raises(ValueError, match=r"merged into model.layers.0.self_attn.q_proj.*merge_to_bf16"):
        peft.get_peft_model(model, lora())
    assert torch.equal(outputs(model), before)


def test_an_interruption_leaves_the_model(monkeypatch):
    model = case("qwen3").quantize()
    before, trainable = outputs(model), [p.requires_grad for p in model.parameters()]

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(initialization, "low_rank_factors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            peft.get_peft_model(model, lora())
        assert not [m for m in model.modules() if isinstance(m, FP4LoraLinear)]
        assert [p.requires_grad for p in model.parameters()] == trainable
        adapted = peft.get_peft_model(model, lora(init_lora_weights=True))
        with pytest.raises(KeyboardInterrupt):
            adapted.add_adapter("two", lora())
    assert list(adapted.peft_config) == ["default"] and torch.equal(outputs(adapted), before)
    adapted.add_adapter("two", lora())  # is free again


def test_of_the_commit_that_was_loaded(monkeypatch):
    model, asked = case("qwen3").quantize(), []

    def download(name, subfolder, hub):
        asked.append((name, hub))
        return source("qwen3")

    monkeypatch.setattr(initialization, "local_folder", download)
    model.name_or_path, model.config._commit_hash = "some/model", "0123abc"
    peft.get_peft_model(model, lora())
    assert asked == [("some/model", {"revision": "0123abc"})]


def test_what_does_not_fit_changes_nothing():
    adapted = peft.get_peft_model(case("qwen3").load(), lora(init_lora_weights=True))
    state = copy.deepcopy(peft.get_peft_model_state_dict(adapted))
    broken = copy.deepcopy(case("qwen3").dense)
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    short = copy.deepcopy(case("qwen3").dense)
    short.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(64, 64))
    cases = [
        (short, "default", r"shape \(64, 64\) in the reference, \(128, 64\)"),
        (tiny_model("qwen3", seed=7), "default", r"self_attn.q_proj: the reference differs .* by 1\.\d+ of its norm"),
        (case("bert").dense, "default", "the reference has no model.layers.0"),
        (case("qwen3").model, "default", "no full-precision parameter"),
        (broken, "default", "layers.1.mlp.down_proj: the reference holds NaN or Inf"),
        (case("qwen3").dense, "other", "no packed linear has a LoRA adapter 'other'"),
    ]
    for reference, name, message in cases:
        with pytest.raises(ValueError, match=message):
            fp4_residual(adapted, reference, name)
    for alpha in (0, -4):
        other = peft.get_peft_model(case("qwen3").load(), lora(init_lora_weights=True, lora_alpha=alpha))
        with pytest.raises(ValueError, match=f"lora_alpha={alpha}; fp4_residual needs one above 0"):
            fp4_residual(other, case("qwen3").dense)
    adapted.merge_adapter()
    with pytest.raises(ValueError, match=r"is merged; call unmerge_adapter"):
        fp4_residual(adapted, case("qwen3").dense)
    adapted.unmerge_adapter()
    other = peft.get_peft_model(case("qwen3").load(), lora(init_lora_weights=True, alora_invocation_tokens=[5]))
    with pytest.raises(ValueError, match="ALoraLinearVariant does not add"):
        fp4_residual(other, case("qwen3").dense)
    assert all(torch.equal(value, state[key]) for key, value in peft.get_peft_model_state_dict(adapted).items())


def test_dequantized_layers_are_dense_ones():
    model = peft.get_peft_model(case("qwen3").load(), lora(init_lora_weights=True))
    model.base_model.model.dequantize()
    with pytest.raises(ValueError, match="no packed linear has a LoRA adapter"):
        fp4_residual(model, case("qwen3").dense)
    before = outputs(model)
    model.add_adapter("two", lora(init_lora_weights="pissa"))
    model.set_adapter("two")
    assert (outputs(model) - before).norm() < 0.02 * before.norm()


def test_other_methods_are_refused():
    model = case("qwen3").quantize()
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_lora_weights="fp4_residual")
    with pytest.raises(ValueError, match="no packed linear has a LoRA adapter"):
        peft.get_peft_model(model, config)
    assert not [m for m in model.modules() if hasattr(m, "base_layer")]


def test_experts_are_refused_by_name():
    model = case("qwen3_moe").quantize()
    with pytest.raises(ValueError, match="is for linears, not for target_parameters"):
        peft.get_peft_model(model, lora(target_parameters=["experts.gate_up_proj"]))
    assert not [m for m in model.modules() if isinstance(m, FP4LoraLinear)]
