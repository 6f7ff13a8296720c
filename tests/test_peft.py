# SPDX-License-Identifier: Apache-2.0
"""PEFT on packed linears: LoRA and other methods are those of a dense model that holds the dequantized weights."""

import copy
import json
import logging
import pickle
import sys
import types

import pytest
import torch
from tiny_models import case, outputs, packed_modules, tiny_model, tokens
from torch import nn

from hf_mxfp4 import MXFP4, NVFP4, FP4Config, FP4Linear, plugins
from hf_mxfp4.quantization import quantize

peft = pytest.importorskip("peft")
from peft.utils.hotswap import hotswap_adapter  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hf_mxfp4.integrations.peft import FP4LoraLinear, register  # noqa: E402
from hf_mxfp4.integrations.peft.merging import PackedMerge  # noqa: E402

PROJECTIONS = 14  # of the tiny models: two layers of seven


def lora(**fields):
    return peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM", **fields})


def packed(name="llama", format="nvfp4", dtype=torch.float32):
    return case(name, format).load(dtype=dtype)


def stirred(model, seed=3):
    """All adapter weights random, so that none is without effect; the same for the same names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def trained_once(model, checkpointing=None, autocast=None, steps=1):
    """Gradients by name, and the logits."""
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.train()
    for step in range(steps):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(tokens(seed=step + 1), labels=tokens(seed=step + 1), use_cache=False)
        out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return gradients, out.logits.detach()


def close(one, other, tolerance=1e-5):
    return (one - other).norm() <= tolerance * other.norm()


# --- the same as on a dense model ------------------------------------------------------------------------------------


def test_all_linear_needs_nothing_else(monkeypatch):
    read = []
    weight = FP4Linear.weight
    monkeypatch.setattr(FP4Linear, "weight", property(lambda self: (read.append(1), weight.fget(self))[1]))
    register()  # again
    for dtype, cast, expected in ((torch.bfloat16, True, torch.float32), (torch.bfloat16, False, torch.bfloat16)):
        model = peft.get_peft_model(packed(dtype=dtype), lora(), autocast_adapter_dtype=cast)
        layers = [module for module in model.modules() if isinstance(module, FP4LoraLinear)]
        assert len(layers) == PROJECTIONS and all(isinstance(layer.base_layer, FP4Linear) for layer in layers)
        assert {p.dtype for layer in layers for p in layer.lora_A.parameters()} == {expected}
        gradients, _ = trained_once(model)
        assert len(gradients) == 2 * PROJECTIONS and all("lora_" in name for name in gradients)
    assert len(read) <= 2 * PROJECTIONS  # decoding is dear: PEFT alone would do so 19 times a layer


@pytest.mark.parametrize(
    "fields, how, format",
    [
        ({}, {}, "mxfp4"),
        ({"use_dora": True}, {}, "nvfp4"),
        ({"use_rslora": True, "lora_bias": True}, {"steps": 2}, "mxfp4"),
        ({}, {"checkpointing": True}, "nvfp4"),
        ({}, {"checkpointing": False}, "mxfp4"),
        ({"alora_invocation_tokens": [5, 6]}, {}, "nvfp4"),
    ],
)
def test_gradients_are_a_dense_models(fields, how, format):
    model = packed(format=format)
    dense = copy.deepcopy(model).dequantize()
    adapted, reference = (stirred(peft.get_peft_model(each, lora(**fields))) for each in (model, dense))
    assert not any(isinstance(module, FP4LoraLinear) for module in reference.modules())
    gradients, logits = trained_once(adapted, **how)
    expected, logits_expected = trained_once(reference, **how)
    assert gradients.keys() == expected.keys() and close(logits, logits_expected)
    for name, gradient in gradients.items():
        assert close(gradient, expected[name], 1e-4), name


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_autocast_and_bfloat16(adapters):
    model = packed(dtype=torch.bfloat16)
    dense = copy.deepcopy(model).dequantize()
    cast = adapters is torch.float32
    adapted, reference = (
        stirred(peft.get_peft_model(each, lora(), autocast_adapter_dtype=cast)) for each in (model, dense)
    )
    for autocast in (None, torch.bfloat16):
        gradients, logits = trained_once(adapted, autocast=autocast)
        expected, logits_expected = trained_once(reference, autocast=autocast)
        assert {g.dtype for g in gradients.values()} == {adapters}
        assert close(logits, logits_expected, 0.02)  # roundings to bfloat16 of sums in another order
        for name, gradient in gradients.items():
            assert close(gradient, expected[name], 0.1), name


def test_input_transforms():
    """A layer of another tool, that scales and rotates its input first."""
    weight = torch.randn(48, 64)
    hadamard = torch.linalg.qr(torch.randn(16, 16))[0]
    scale = torch.rand(64) + 0.5
    layer = FP4Linear.from_quantized(quantize(weight, MXFP4, "amax"), pre_quant_scale=scale, hadamard=hadamard)
    dense = nn.Linear(64, 48, bias=False)
    dense.weight = nn.Parameter(layer.weight)
    x = torch.randn(5, 64)
    results = []
    for each in (layer, dense):
        adapted = stirred(
            peft.get_peft_model(
                nn.ModuleDict({"q": each, "norm": nn.LayerNorm(4)}), peft.LoraConfig(target_modules=["q"])
            )
        )
        out = adapted.base_model.model["q"](x)
        out.square().sum().backward()
        results.append([out, *(p.grad for n, p in adapted.named_parameters() if "lora_" in n)])
    assert all(close(one, two, 1e-4) for one, two in zip(*results, strict=True))


def test_a_compiled_layer():
    layer = nn.ModuleDict(
        {"q": copy.deepcopy(case("qwen3").model.model.layers[0].mlp.up_proj), "norm": nn.LayerNorm(1)}
    )
    adapted = stirred(peft.get_peft_model(layer, peft.LoraConfig(target_modules=["q"]))).base_model.model["q"]
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    expected = adapted(x)
    out = torch.compile(adapted, backend="eager", fullgraph=True)(x)
    out.sum().backward()
    assert torch.equal(out, expected) and all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


# --- saved and loaded ------------------------------------------------------------------------------------------------


def test_a_saved_adapter_is_an_ordinary_one(tmp_path):
    model = packed()
    dense = copy.deepcopy(model).dequantize()
    adapted = stirred(peft.get_peft_model(model, lora(use_dora=True)))
    expected = outputs(adapted.eval())
    adapted.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    reference = peft.get_peft_model(copy.deepcopy(dense), lora(use_dora=True))
    ordinary = peft.get_peft_model_state_dict(reference)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {k: (v.shape, v.dtype) for k, v in stored.items()} == {k: (v.shape, v.dtype) for k, v in ordinary.items()}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["init_lora_weights"] is True and config["peft_type"] == "LORA"
    for low in (False, True):
        loaded = peft.PeftModel.from_pretrained(packed(), tmp_path, low_cpu_mem_usage=low)
        assert torch.equal(outputs(loaded), expected)
    assert any(isinstance(module, FP4LoraLinear) for module in loaded.modules())
    assert close(outputs(peft.PeftModel.from_pretrained(dense, tmp_path)), expected)


def test_transformers_own_adapters(tmp_path):
    model = packed()
    model.add_adapter(lora(), "one")
    stirred(model)
    expected = outputs(model.eval())
    assert len([m for m in model.modules() if isinstance(m, FP4LoraLinear)]) == PROJECTIONS
    model.save_pretrained(tmp_path)  # transformers: an active adapter alone is saved
    other = packed()
    other.load_adapter(tmp_path, "two")
    assert torch.equal(outputs(other), expected)
    other.disable_adapters()
    assert torch.equal(outputs(other), outputs(packed()))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(case("llama").folder)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(outputs(again), expected) and packed_modules(again)


def test_copies_and_pickles():
    for config in (lora(use_dora=True), peft.LoHaConfig(target_modules=["q_proj", "down_proj"], r=2)):
        adapted = stirred(peft.get_peft_model(packed(), config)).eval()
        expected = outputs(adapted)
        for other in (copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
            assert torch.equal(outputs(other), expected)
            assert [type(m) for m in other.modules()] == [type(m) for m in adapted.modules()]


# --- several adapters ------------------------------------------------------------------------------------------------


def test_several_adapters():
    model = packed()
    plain = outputs(model)
    adapted = stirred(peft.get_peft_model(model, lora(), adapter_name="one"))
    adapted.add_adapter("two", lora(r=2, target_modules=["q_proj", "down_proj"]))
    stirred(adapted).eval()
    one = outputs(adapted)
    adapted.set_adapter("two")
    two = outputs(adapted)
    with adapted.disable_adapter():
        assert torch.equal(outputs(adapted), plain)
    assert not torch.equal(one, two) and torch.equal(outputs(adapted), two)
    names = ["one", "two", "__base__"]
    with torch.no_grad():
        batch = tokens(1).expand(3, -1)
        mixed = adapted(batch, adapter_names=names).logits
        for row, name in enumerate(names):
            if name == "__base__":
                with adapted.disable_adapter():
                    alone = adapted(batch[:1]).logits
            else:
                adapted.set_adapter(name)
                alone = adapted(batch[:1]).logits
            assert close(mixed[row], alone[0]), name
    adapted.set_adapter("one")
    adapted.add_weighted_adapter(["one"], [1.0], "same", combination_type="linear")
    adapted.set_adapter("same")
    assert close(outputs(adapted), one)
    adapted.delete_adapter("same")
    adapted.delete_adapter("two")
    assert torch.equal(outputs(adapted), one)


def test_modules_to_save_and_patterns():
    config = lora(modules_to_save=["lm_head"], rank_pattern={"q_proj": 6}, alpha_pattern={"q_proj": 12})
    adapted = peft.get_peft_model(packed(), config)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (6, 64) and layer.scaling["default"] == 2
    gradients, _ = trained_once(adapted)
    assert any("lm_head.modules_to_save" in name for name in gradients)


def test_hotswap(tmp_path):
    adapted = stirred(peft.get_peft_model(packed(), lora()), seed=5).eval()
    adapted.save_pretrained(tmp_path)
    expected = outputs(adapted)
    stirred(adapted, seed=6)
    hotswap_adapter(adapted, tmp_path, "default")
    assert torch.equal(outputs(adapted), expected)


OTHERS = {
    "ia3": lambda **kw: peft.IA3Config(feedforward_modules=["down_proj"], **kw),
    "loha": lambda **kw: peft.LoHaConfig(r=2, **kw),
    "lokr": lambda **kw: peft.LoKrConfig(r=2, **kw),
    "oft": lambda **kw: peft.OFTConfig(oft_block_size=8, **kw),
    "hra": lambda **kw: peft.HRAConfig(r=2, init_weights=False, **kw),
    "vera": lambda **kw: peft.VeraConfig(r=2, **kw),
    "fourierft": lambda **kw: peft.FourierFTConfig(n_frequency=20, **kw),
    "adalora": lambda **kw: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **kw),
}


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods(method):
    """The same function and gradients as on a dense model; merges go through ours."""
    model = packed()
    dense = copy.deepcopy(model).dequantize()
    results = []
    for each in (model, dense):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(each, OTHERS[method](target_modules=["q_proj", "down_proj"]))
        layers = [m for m in adapted.modules() if hasattr(m, "base_layer")]
        assert len(layers) == 4 and all(isinstance(m, PackedMerge) == (each is model) for m in layers)
        results.append(trained_once(adapted))
    (gradients, logits), (expected, logits_expected) = results
    assert close(logits, logits_expected) and gradients.keys() == expected.keys()
    assert all(close(gradients[name], expected[name], 1e-4) or not expected[name].any() for name in expected)
    plain = outputs(case("llama").load(dtype=torch.float32))
    base = peft.get_peft_model(packed(), OTHERS[method](target_modules=["q_proj", "down_proj"])).unload()
    assert torch.equal(outputs(base), plain) and {type(m) for m in packed_modules(base).values()} == {FP4Linear}


# --- fused projections -----------------------------------------------------------------------------------------------


def test_a_fused_group_is_unfused_for_its_adapter(caplog):
    caplog.set_level(logging.INFO, "hf_mxfp4.fusion")
    model = case("llama").load(quantization_config=FP4Config(fuse_projections=True), dtype=torch.float32)
    adapted = peft.get_peft_model(model, lora(target_modules=["q_proj"]))
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in packed_modules(model.model).items()}
    assert kinds["k_proj"] == kinds["v_proj"] == kinds["base_layer"] == "FP4Linear"  # all of the group, or none
    assert kinds["gate_proj"] == kinds["up_proj"] == "FusedLinear"
    assert (
        caplog.text.count("not fused any more") == 2 and "layers.1.self_attn.(q_proj, k_proj, v_proj)" in caplog.text
    )
    plain = peft.get_peft_model(packed(), lora(target_modules=["q_proj"]))
    assert close(outputs(stirred(adapted)), outputs(stirred(plain)))
    gradients, _ = trained_once(adapted)
    assert len(gradients) == 4


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_2", "olora", "lora_ga", "kasa"])
def test_what_would_change_the_base_is_refused(how):
    """PEFT would write into a copy of the base weight, and lose it in silence."""
    model = packed()
    before = outputs(model)
    fields = {"init_lora_weights": how}
    if how == "lora_ga":
        fields["lora_ga_config"] = peft.LoraGAConfig()
        for module in packed_modules(model).values():
            module._peft_loraga_grad = torch.randn(module.out_features, module.in_features)
    elif how == "kasa":
        fields = {"kasa_config": peft.tuners.lora.config.KasaConfig()}
    with pytest.raises(ValueError, match="writes a changed weight back into the base layer.*fp4_residual"):
        peft.get_peft_model(model, lora(**fields))
    assert torch.equal(outputs(model), before)
    assert all(type(module) is FP4Linear for module in packed_modules(model).values())
    assert how != "lora_ga" or all(hasattr(m, "_peft_loraga_grad") for m in packed_modules(model).values())


def test_a_copy_that_could_not_be_trained_is_refused():
    model = packed()
    before = outputs(model)
    for names in (["down_proj"], ["mlp"]):
        with pytest.raises(ValueError, match=r"modules_to_save: model.layers.0.mlp.*modules_to_not_convert"):
            peft.get_peft_model(model, lora(target_modules=["q_proj"], modules_to_save=names))
    assert torch.equal(outputs(model), before)
    assert all(type(module) is FP4Linear for module in packed_modules(model).values())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_refused_second_adapter_leaves_the_first(tmp_path):
    adapted = stirred(peft.get_peft_model(packed(), lora())).eval()
    before = outputs(adapted)
    with pytest.raises(ValueError, match="pissa"):
        adapted.add_adapter("two", lora(init_lora_weights="pissa"))
    assert torch.equal(outputs(adapted), before) and list(adapted.peft_config) == ["default"]
    model = packed()  # and transformers' own leaves a model without any
    with pytest.raises(ValueError, match="pissa"):
        model.add_adapter(lora(init_lora_weights="pissa"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_an_interruption_leaves_nothing(monkeypatch):
    """Of a second adapter: ranks, scales and variants, which a new one of that name would take over."""
    adapted = stirred(peft.get_peft_model(packed(), lora())).eval()
    before, update, calls = outputs(adapted), FP4LoraLinear.update_layer, []

    def interrupted(self, *args, **kwargs):
        update(self, *args, **kwargs)
        calls.append(self)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FP4LoraLinear, "update_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            adapted.add_adapter("two", lora(use_dora=True))
    assert torch.equal(outputs(adapted), before) and list(adapted.peft_config) == ["default"]
    assert all(layer._all_available_adapter_names() == ["default"] and not layer.lora_variant for layer in calls)
    adapted.add_adapter("two", lora())
    assert not any("two" in layer.lora_variant or "two" in layer.lora_magnitude_vector for layer in calls)


def test_weights_without_values():
    """On the meta device, or damaged: nothing was written to them."""
    model = packed()
    model.model.layers[0].mlp.up_proj.weight_scale.view(torch.uint8)[0, 0] = 0x7F
    for each in (copy.deepcopy(model).to("meta"), model):
        adapted = peft.get_peft_model(each, lora(use_dora=True))
        assert sum(isinstance(module, FP4LoraLinear) for module in adapted.modules()) == PROJECTIONS


def test_adapters_that_do_not_fit(tmp_path):
    peft.get_peft_model(case("llama").load(), lora(r=8)).save_pretrained(tmp_path)
    wide = tiny_model("llama", hidden_size=128)
    wide.save_pretrained(tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=FP4Config())
    with pytest.raises(RuntimeError, match="size mismatch for .*lora_A"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="`r` should be a positive integer"):
        peft.get_peft_model(packed(), lora(r=0))
    with pytest.raises(ValueError, match="Target modules .*nothing.* not found"):
        peft.get_peft_model(packed(), lora(target_modules=["nothing"]))


def test_casting_an_adapted_model():
    adapted = stirred(peft.get_peft_model(packed(), lora())).eval()
    bits = {name: module.weight_packed.clone() for name, module in packed_modules(adapted).items()}
    before = outputs(adapted)
    adapted.to(torch.bfloat16)
    assert {p.dtype for p in adapted.parameters()} == {torch.bfloat16}
    for name, module in packed_modules(adapted).items():
        assert torch.equal(module.weight_packed, bits[name]) and module.dtype is torch.bfloat16
    assert close(outputs(adapted).float(), before, 0.05)
    with pytest.raises(ValueError, match="quantized"):
        packed().half()


def test_peft_that_does_not_know_us_is_refused(monkeypatch):
    """Its own layer would take the packed weight for a dense one, and a merge would be lost in silence."""
    model = packed()
    before = outputs(model)
    monkeypatch.setattr(plugins, "READY", set())
    with pytest.raises(RuntimeError, match=r"cannot adapt a packed FP4Linear.*hf-mxfp4\[peft\]"):
        peft.get_peft_model(model, lora())
    assert torch.equal(outputs(model), before)

    class Own(nn.Module):  # that is not PEFT's
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

    Own(FP4Linear.from_quantized(quantize(torch.randn(16, 32), NVFP4, "amax")))


def test_a_plugin_that_fails_is_named(monkeypatch):
    class Entry:
        name = "peft"

        def load(self):
            raise ImportError("no such thing")

    monkeypatch.setattr(plugins, "READY", set())
    monkeypatch.setattr(plugins, "_failed", {})
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [Entry()])
    with pytest.warns(UserWarning, match="cannot work with the installed peft .*no such thing"):
        plugins.load_plugins()
    with pytest.raises(RuntimeError, match="no such thing"):
        peft.get_peft_model(packed(), lora())
    monkeypatch.setitem(sys.modules, "peft", types.ModuleType("peft"))  # as others' tests put in its place
    with pytest.warns(UserWarning, match="cannot work with the installed peft .*__spec__"):
        plugins.load_plugins()


def test_no_dense_weight_is_taken():
    layer = FP4Linear.from_quantized(quantize(torch.randn(16, 32), NVFP4, "amax"))
    layer.weight = layer.weight  # as PEFT does when it takes an adapter off
    for value in (torch.zeros(16, 32), torch.zeros(2), None):
        with pytest.raises(ValueError, match="holds no dense weight"):
            layer.weight = value


def test_outputs_may_be_changed_in_place():
    """As adapters do, on inputs of any number of dimensions."""
    layer = case("qwen3").model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad((layer(x) * 2).sum(), x)[0]
    out = layer(x)
    out += out.detach() * 0
    out *= 2
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
