# SPDX-License-Identifier: Apache-2.0
"""Corrections through from_pretrained and back: macro-blocks, outliers, calibration, quantized activations."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import (
    MIXTURES,
    assert_same_tensors,
    auto_class,
    outputs,
    packed_modules,
    saved_bytes,
    source,
    tiny_model,
    tokens,
)

from demo_data import held_out_stream
from hf_mxfp4 import FP4Config, dequantize
from hf_mxfp4.evaluation import bits_per_weight, score, spread_windows, weight_error

SEARCH = {"format": "mxfp4", "macro_block": "search"}
CORRECTIONS = {
    "nvfp4-outliers": {"outlier_fallback": 0.01},
    "mxfp4-static": {"format": "mxfp4", "macro_block": "static", "scale_rule": "overflow_aware"},
    "mxfp4-search": SEARCH,
    "mxfp4-search-outliers": SEARCH | {"outlier_fallback": 0.01},
    "mxfp4-feedback": SEARCH
    | {"outlier_fallback": 0.01, "error_feedback": True, "calibration": "random", "calibration_samples": 4}
    | {"calibration_length": 32},
}
every_correction = pytest.mark.parametrize("fields", CORRECTIONS.values(), ids=CORRECTIONS)


def load(name: str, folder=None, **fields):
    """A tiny model, quantized while it loads."""
    more = {"quantization_config": FP4Config(**fields)} if fields else {}
    return auto_class(name).from_pretrained(folder or source(name), **more)


def outlier_count(model) -> int:
    return sum(b.numel() for n, b in model.named_buffers() if n.endswith("_outlier_values"))


def packed_weights(model) -> int:
    return sum(2 * b.numel() for n, b in model.named_buffers() if n.endswith("_packed"))


@every_correction
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_saved_and_loaded(name, fields, tmp_path):
    """The same logits bit for bit, the same bytes when saved again, and a layout nobody else takes for theirs."""
    model = load(name, **fields)
    first = saved_bytes(model, tmp_path / "a")
    again = load(name, tmp_path / "a")
    assert_same_tensors(model.state_dict(), again.state_dict())
    assert torch.equal(outputs(model), outputs(again))
    assert saved_bytes(again, tmp_path / "b") == first
    stored = json.loads(first["config.json"])["quantization_config"]
    assert stored["quant_method"] == "hf_mxfp4"
    assert stored["macro_block"] == fields.get("macro_block")
    for _, module in packed_modules(model).items():
        names = {leaf for leaf, _ in module.named_buffers()}
        assert any(leaf.endswith("macro_scale") for leaf in names) == ("macro_block" in fields)
        assert any(leaf.endswith("outlier_columns") for leaf in names) == ("outlier_fallback" in fields)


@pytest.mark.parametrize("name", ["qwen3", *MIXTURES])
def test_corrections_correct(name):
    """Each lowers the weight error; bits per weight count what is stored."""
    dense = load(name)
    errors = {label: weight_error(model := load(name, **fields), dense) for label, fields in CORRECTIONS.items()}
    plain = {fmt: weight_error(load(name, format=fmt), dense) for fmt in ("nvfp4", "mxfp4")}
    assert errors["nvfp4-outliers"] < plain["nvfp4"]
    assert errors["mxfp4-search-outliers"] < errors["mxfp4-search"] < min(plain["mxfp4"], errors["mxfp4-static"])
    outliers = outlier_count(model)
    assert outliers == pytest.approx(0.01 * packed_weights(model), rel=0.01)
    modules = packed_modules(model).values()
    rows = sum(b.numel() for module in modules for n, b in module.named_buffers() if n.endswith("_offsets"))
    macro = sum(b.numel() for module in modules for n, b in module.named_buffers() if n.endswith("macro_scale"))
    expected = 4.25 + (8 * macro + 32 * outliers + 32 * rows) / packed_weights(model)
    assert bits_per_weight(model) == pytest.approx(expected, abs=1e-9)
    assert model.get_memory_footprint() >= bits_per_weight(model) * packed_weights(model) / 8


def test_outliers_are_kept_exactly():
    """Where there is an outlier, the decoded weight is the original one."""
    dense, model = load("qwen3"), load("qwen3", outlier_fallback=0.02)
    for name, module in packed_modules(model).items():
        weight, decoded = dense.get_submodule(name).weight, dequantize(module.quantized)
        rows = torch.arange(len(weight)).repeat_interleave(module.weight_outlier_offsets.diff())
        columns = module.weight_outlier_columns.long()
        assert torch.equal(decoded[rows, columns], weight[rows, columns])
        assert torch.equal(module.weight_outlier_values, weight[rows, columns])


def test_one_budget_for_the_model():
    """Matrices with heavier tails get more of it."""
    folder_model = tiny_model("qwen3")
    with torch.no_grad():
        heavy = folder_model.model.layers[1].mlp.down_proj.weight
        heavy.copy_(heavy * torch.exp(1.5 * torch.randn(heavy.shape)))
    from hf_mxfp4 import whole_model
    from hf_mxfp4.conversion import plan_modules

    config = FP4Config(outlier_fallback=0.01)
    whole_model.quantize_model(folder_model, plan_modules(folder_model, config), config)
    counts = {n: b.numel() for n, b in folder_model.named_buffers() if n.endswith("_outlier_values")}
    assert max(counts, key=counts.get) == "model.layers.1.mlp.down_proj.weight_outlier_values"
    assert sum(counts.values()) == pytest.approx(0.01 * packed_weights(folder_model), rel=0.01)


@every_correction
def test_moved_copied_pickled_cast(fields):
    model = load("qwen3", **fields)
    state, expected = model.state_dict(), outputs(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_tensors(state, twin.state_dict())
        assert torch.equal(outputs(twin), expected)
    packed = {n: b.clone() for n, b in model.model.layers.named_buffers()}
    assert_same_tensors(packed, dict(model.model.layers.float().named_buffers()))
    assert all(buffer.is_meta for buffer in model.model.layers.to("meta").buffers())


@every_correction
def test_dequantized(fields, tmp_path):
    """`dequantize()`, and FP4Config(dequantize=True): plain modules with the decoded weights."""
    model = load("qwen3_moe", **fields)
    model.save_pretrained(tmp_path)
    weights = {name: m.weight for name, m in packed_modules(model).items() if hasattr(m, "weight")}
    for dense in (model.dequantize(), load("qwen3_moe", tmp_path, **fields | {"dequantize": True})):
        assert not packed_modules(dense)
        for name, weight in weights.items():
            assert torch.equal(dense.get_submodule(name).weight, weight)


def test_overrides_mix(tmp_path):
    """Macro-blocks in some layers only."""
    fields = {"overrides": {r"layers\.0\.": SEARCH}}
    model = load("qwen3", **fields)
    kinds = {hasattr(m, "weight_macro_scale") for n, m in packed_modules(model).items() if "layers.0." in n}
    assert kinds == {True}
    assert not any(hasattr(m, "weight_macro_scale") for n, m in packed_modules(model).items() if "layers.1." in n)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(load("qwen3", tmp_path)), outputs(model))


def test_portable_is_refused(tmp_path):
    with pytest.raises(ValueError, match="macro-blocks or outliers"):
        FP4Config(layout="portable", outlier_fallback=0.01)
    with pytest.raises(ValueError, match="macro-blocks or outliers"):
        load("qwen3", layout="portable", overrides={r"layers\.0\.": SEARCH})


@pytest.mark.parametrize("budget", [-0.1, 0.2, True, "0.01", float("nan")])
def test_wrong_budget(budget):
    with pytest.raises(ValueError, match="outlier_fallback=.* from 0 to 0.1"):
        FP4Config(outlier_fallback=budget)


def test_macro_block_with_nvfp4():
    with pytest.raises(ValueError, match='works with format="mxfp4"'):
        FP4Config(macro_block="search")


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


def edited(folder, **changes):
    """Change tensors of the one file in a folder: name -> function of the old tensor, `None` removes it."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name, change in changes.items():
        (key,) = [key for key in tensors if key.endswith("layers.0.mlp.up_proj." + name)]
        tensors[key] = change(tensors[key]) if change else tensors.pop(key)
        if not change:
            del tensors[key]
    save_file(tensors, file, metadata=metadata)


DAMAGE = {
    "a column twice": ({"weight_outlier_columns": lambda t: t.to(torch.int32).fill_(3).to(torch.uint16)}, "outliers"),
    "columns out of range": ({"weight_outlier_columns": lambda t: t.to(torch.int32).add_(64).to(t.dtype)}, "outliers"),
    "one value short": ({"weight_outlier_values": lambda t: t[:-1].clone()}, "outliers"),
    "values of another kind": ({"weight_outlier_values": lambda t: t.view(torch.uint16)}, "outlier_values"),
    "columns of another kind": ({"weight_outlier_columns": lambda t: t.to(torch.int32)}, "outliers|outlier_columns"),
    "NaN": ({"weight_outlier_values": lambda t: t.fill_(torch.nan)}, "NaN"),
    "offsets that fall": ({"weight_outlier_offsets": lambda t: t.flip(0)}, "outliers"),
    "no offsets": ({"weight_outlier_offsets": None}, "outlier_offsets"),
    "no values": ({"weight_outlier_values": None}, "outlier_values"),
    "codes in their places": ({"weight": lambda t: t | 0x11}, "codes that are not 0"),
    "no factors": ({"weight_macro_scale": None}, "macro_scale"),
    "factors of another shape": ({"weight_macro_scale": lambda t: t[:-1].clone()}, "macro_scale"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged(changes, message, tmp_path):
    load("qwen3", **SEARCH, outlier_fallback=0.02).save_pretrained(tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load("qwen3", tmp_path)


def test_a_state_dict_with_outliers_is_refused(tmp_path):
    model = load("qwen3", outlier_fallback=0.02)
    model.save_pretrained(tmp_path)
    state, config = load_file(tmp_path / "model.safetensors"), transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors files"):
        transformers.Qwen3ForCausalLM.from_pretrained(None, config=config, state_dict=state)


def test_weights_that_cannot_be_quantized(tmp_path):
    """The whole-model path says what the loader says."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj.*1 of .* NaN or Inf"):
        load("qwen3", tmp_path, outlier_fallback=0.01)


def test_incomplete_checkpoint(tmp_path):
    load("qwen3").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for 1 modules.*layers\.1\.mlp\.up_proj"):
        load("qwen3", tmp_path, outlier_fallback=0.01)


def test_a_new_head_stays(tmp_path):
    load("qwen3").save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, quantization_config=FP4Config(outlier_fallback=0.01)
    )
    assert type(model.score) is torch.nn.Linear and len(packed_modules(model)) == 14


# --- calibration -----------------------------------------------------------------------------------------------------

SMALL = {"calibration_samples": 4, "calibration_length": 32}


@pytest.mark.parametrize("fields", [{"error_feedback": True}, {"channel_weights": True}], ids=lambda f: next(iter(f)))
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_calibrated_on_itself(name, fields, tmp_path):
    """Deterministic, whatever the global random state, which is left alone."""
    source(name)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = load(name, **fields, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = load(name, **fields, **SMALL)
    assert_same_tensors(model.state_dict(), again.state_dict())
    other = load(name, **fields, **SMALL, calibration_seed=1)
    assert not torch.equal(outputs(model), outputs(other))
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(load(name, tmp_path)), outputs(model))


def test_feedback_serves_the_outputs():
    """On the demo model, next-token distributions come nearer to the full-precision model's than with plain SOAR."""
    demo = Path(__file__).parents[1] / "scripts" / "demo_lm"
    models = {"dense": transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16)}
    small = {"calibration_samples": 8, "calibration_length": 128}
    for label, fields in (("soar", {}), ("feedback", {"error_feedback": True} | small)):
        models[label] = transformers.AutoModelForCausalLM.from_pretrained(
            demo, dtype=torch.bfloat16, quantization_config=FP4Config(**fields)
        )
    rows = spread_windows(held_out_stream(transformers.AutoTokenizer.from_pretrained(demo)), 2048, 128)
    scores = score(models, "dense", rows)
    assert scores["feedback"].kl.mean < 0.9 * scores["soar"].kl.mean  # 0.84 over 8,192 tokens


def test_calibration_dir(tmp_path):
    """Finished blocks are kept; a second run takes them, and its statistics serve another config."""
    fields = {"error_feedback": True, "calibration_dir": tmp_path} | SMALL
    first = load("qwen3", **fields)
    assert {"calibration.safetensors", "job.json"} <= {file.name for file in tmp_path.iterdir()}
    again = load("qwen3", **fields)
    assert_same_tensors(first.state_dict(), again.state_dict())
    anew = load("qwen3", error_feedback=True, calibration_device="cpu", **SMALL)
    assert_same_tensors(first.state_dict(), anew.state_dict())
    with pytest.raises(ValueError, match="another"):
        load("qwen3", format="mxfp4", **fields)
    reused = load("qwen3", channel_weights=True, calibration=str(tmp_path / "calibration.safetensors"), **SMALL)
    assert packed_modules(reused)
    with pytest.raises(ValueError, match="a model of other parameters"):
        load("llama", channel_weights=True, calibration=str(tmp_path / "calibration.safetensors"), **SMALL)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3", {"calibration": "no such thing"}, "no such thing"),
        ("qwen3", {"calibration": [" "]}, "tokenizer|tokens"),
        ("bert", {}, "self"),
    ],
)
def test_bad_calibration(name, fields, message):
    with pytest.raises((ValueError, OSError), match=message):
        load(name, error_feedback=True, **SMALL, **fields)


def test_calibration_without_a_use():
    with pytest.raises(ValueError, match="calibration_samples: only for error_feedback"):
        FP4Config(calibration_samples=8)


# --- quantized activations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_quantized_activations(name, fmt, tmp_path):
    """W4A4 is the same weights with inputs rounded on the fly; a checkpoint may be loaded either way."""
    plain, model = load(name, format=fmt), load(name, format=fmt, activation_format="same")
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert not torch.equal(outputs(plain), outputs(model))
    model.save_pretrained(tmp_path / "a")
    again = load(name, tmp_path / "a")
    assert torch.equal(outputs(again), outputs(model)) and again.config.quantization_config.activation_format == "same"
    plain.save_pretrained(tmp_path / "b")
    assert torch.equal(outputs(load(name, tmp_path / "b", activation_format="same")), outputs(model))
    assert torch.equal(outputs(load(name, tmp_path / "b", backend="auto")), outputs(plain))
    assert torch.equal(outputs(load(name, tmp_path / "a", activation_format=None)), outputs(plain))


def test_gradients_pass_through_quantized_activations():
    model = load("qwen3", activation_format="same")
    x = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    model(inputs_embeds=x).logits.float().square().mean().backward()
    assert torch.isfinite(x.grad).all() and float(x.grad.abs().max()) > 0
