# SPDX-License-Identifier: Apache-2.0
"""Broken and contradictory checkpoints and configs: each a clear error, never wrong numbers."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import auto_class, case, outputs, packed_modules, source, tiny_config, tiny_model
from transformers import CompressedTensorsConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_mxfp4 import FP4Config, FP4Linear

ignore_passed_config = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
Q_PROJ, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def edited(folder: Path, to: Path, change=None, config=None) -> Path:
    """A copy of a checkpoint after `change(tensors)` and `config(config.json as a dict)`."""
    shutil.copytree(folder, to)
    if change is not None:
        tensors = {key: value.clone() for key, value in load_file(to / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        path = to / "config.json"
        fields = json.loads(path.read_text())
        config(fields)
        path.write_text(json.dumps(fields))
    return to


def poke(key: str, *index: int, value, dtype=None):
    """A change that writes one element (of the tensor seen as `dtype`)."""

    def change(tensors):
        tensor = tensors[key] if dtype is None else tensors[key].view(dtype)
        tensor[index] = value

    return change


def put(key: str, value):
    """A change that puts a tensor, or what a function makes of the old one, or (with `None`) takes it away."""

    def change(tensors):
        old = tensors.pop(key)
        new = value(old) if callable(value) else value
        if new is not None:
            tensors[key] = new

    return change


# --- quantizing on load ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name, key, reported",
    [
        ("llama", f"{DOWN}.weight", rf"{DOWN}.weight: 1 of 8192 values are NaN or Inf"),
        ("llama", f"{Q_PROJ}.weight", rf"{Q_PROJ}.weight.*: 1 of \d+ values are NaN or Inf"),
        ("qwen3_moe", f"{EXPERT}.weight", r"model.layers.1.mlp.experts.gate_up_proj: 1 of \d+ values are NaN or Inf"),
        (
            "gpt_oss",
            "model.layers.0.mlp.experts.down_proj",
            r"layers.0.mlp.experts.down_proj: 1 of \d+ values are NaN",
        ),
    ],
)
def test_nonfinite_weights(name, key, reported, value, tmp_path):
    where = (0, 1, 2) if name == "gpt_oss" else (1, 2)
    folder = edited(source(name), tmp_path / "source", poke(key, *where, value=value))
    with pytest.raises(ValueError, match=reported + r".*\. Repair the checkpoint, or add the module to"):
        case(name).quantize(folder)


def test_kept_modules_may_hold_anything(tmp_path):
    """Only what is packed must be finite; and after an error everything still loads."""
    folder = edited(source("llama"), tmp_path / "source", poke(f"{DOWN}.weight", 0, 0, value=float("nan")))
    with pytest.raises(ValueError):
        case("llama").quantize(folder)
    model = case("llama").quantize(folder, modules_to_not_convert=["model.layers.1.mlp.down_proj"])
    assert torch.isnan(model.get_parameter(f"{DOWN}.weight")).any()
    assert torch.equal(outputs(case("llama").quantize()), outputs(case("llama").model))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name, key", [("llama", f"{DOWN}.weight"), ("qwen3_moe", f"{EXPERT}.weight")])
def test_source_is_not_full_precision(name, key, dtype, tmp_path):
    """Codes of some other quantization are not weights."""
    change = put(key, lambda old: (old.float() * 100).to(dtype))
    folder = edited(source(name), tmp_path / "source", change)
    with pytest.raises((ValueError, TypeError), match=rf"{key.rpartition('.')[0]}.*(?i:{DTYPE_NAMES[dtype]})"):
        case(name).quantize(folder)


DTYPE_NAMES = {
    torch.int8: "int8|I8",
    torch.uint8: "uint8|U8",
    torch.int32: "int32|I32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@pytest.mark.parametrize("shape", [(64, 64), (128, 128), (64, 128, 1), (8192,)], ids=str)
def test_source_of_another_shape(shape, tmp_path):
    change = put(f"{DOWN}.weight", torch.ones(shape, dtype=torch.bfloat16))
    folder = edited(source("llama"), tmp_path / "source", change)
    with pytest.raises((ValueError, RuntimeError), match=r"down_proj|mismatch"):
        case("llama").quantize(folder)


@pytest.mark.parametrize(
    "name, key",
    [("llama", f"{DOWN}.weight"), ("llama", f"{Q_PROJ}.weight"), ("qwen3_moe", f"{EXPERT}.weight")]
    + [("gpt_oss", "model.layers.0.mlp.experts.down_proj")],
)
def test_source_is_incomplete(name, key, tmp_path):
    folder = edited(source(name), tmp_path / "source", put(key, None))
    # One expert of many: transformers' own error, its report names the layer.
    with pytest.raises((ValueError, RuntimeError), match=r"experts|proj|issues during automatic conversion"):
        case(name).quantize(folder)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name, key", [("llama", f"{DOWN}.bias"), ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias")]
)
def test_missing_bias(name, key, packed, tmp_path):
    """An error, or zeros as transformers gives a plain model; never whatever memory held."""
    this = case(name)
    folder = edited(this.folder if packed else source(name), tmp_path / "source", put(key, None))
    try:
        model = auto_class(name).from_pretrained(folder) if packed else this.quantize(folder)
    except ValueError as error:
        assert key in str(error)
    else:
        assert not model.get_parameter(key).any()


@pytest.mark.parametrize("name, changes", [("llama", {"intermediate_size": 100}), ("qwen3_moe", {"head_dim": 10})])
def test_width_that_cannot_be_split(name, changes, tmp_path, caplog):
    tiny_model(name, **changes).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError) as error:
        case(name).quantize(tmp_path / "source")
    width = 100 if name == "llama" else 40
    assert "2 modules cannot be packed" in str(error.value)
    for text in (f"in_features={width} is not a positive multiple of nvfp4's block size 16", "layers.1.", "layers.0."):
        assert text in str(error.value)
    assert 'modules_to_not_convert, or set on_unsupported="keep"' in str(error.value)

    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        model = case(name).quantize(tmp_path / "source", on_unsupported="keep")
    kept = [path for path, module in model.named_modules() if getattr(module, "in_features", 0) == width]
    assert len(kept) == 2 and not any(isinstance(model.get_submodule(path), FP4Linear) for path in kept)
    assert "2 modules left in full precision" in caplog.text and all(path in caplog.text for path in kept)
    assert packed_modules(model)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(outputs(auto_class(name).from_pretrained(tmp_path / "packed")), outputs(model))


def test_experts_that_cannot_be_split(tmp_path, caplog):
    tiny_model("qwen3_moe", moe_intermediate_size=24).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: in_features=24 is not a positive multiple of nvfp4"):
        case("qwen3_moe").quantize(tmp_path / "source")
    model = case("qwen3_moe").quantize(tmp_path / "source", on_unsupported="keep")
    assert "model.layers.1.mlp.experts" not in packed_modules(model) and packed_modules(model)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(outputs(auto_class("qwen3_moe").from_pretrained(tmp_path / "packed")), outputs(model))


def test_nothing_to_pack(tmp_path):
    """GPT-2's layers are Conv1D."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no module of this model can be packed.*kept: .*lm_head"):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=FP4Config())
    with pytest.raises(ValueError, match="no module of this model can be packed"):
        case("llama").quantize(modules_to_not_convert=["model"])


def test_portable_experts_are_refused():
    with pytest.raises(ValueError, match=r'layout="portable" cannot hold fused experts.*layout="auto" or "own"'):
        case("qwen3_moe").quantize(layout="portable")


class OddLinear(torch.nn.Linear):
    """A linear that does more than multiply."""

    def forward(self, x):
        return super().forward(x) + 1


def test_subclass_of_linear(monkeypatch, caplog):
    class OddMLP(modeling_llama.LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.down_proj = OddLinear(config.intermediate_size, config.hidden_size)

    monkeypatch.setattr(modeling_llama, "LlamaMLP", OddMLP)
    with pytest.raises(ValueError, match=r"0.mlp.down_proj: OddLinear is a subclass of nn.Linear with behaviour of"):
        case("llama").quantize()
    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        model = case("llama").quantize(on_unsupported="keep")
    assert type(model.model.layers[0].mlp.down_proj) is OddLinear and "OddLinear" in caplog.text
    assert isinstance(model.model.layers[0].mlp.up_proj, FP4Linear)


def unknown_experts(**flags):
    """An experts class like Qwen3-MoE's that says nothing of its layout, or something else."""

    class OddExperts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
            self.gate_up_proj = torch.nn.Parameter(torch.empty(self.num_experts, 2 * width, hidden))
            self.down_proj = torch.nn.Parameter(torch.empty(self.num_experts, hidden, width))
            for flag, value in flags.items():
                setattr(self, flag, value)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    return OddExperts


KNOWN = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


@pytest.mark.parametrize(
    "flags, reason",
    [
        ({}, "OddExperts does not say how its weights are laid out"),
        (KNOWN | {"has_post_expert_norm": True}, "OddExperts normalizes after each expert"),
        (KNOWN | {"has_bias": True}, "OddExperts has parameters"),
    ],
)
def test_unknown_experts(flags, reason, monkeypatch, caplog):
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", unknown_experts(**flags))
    with pytest.raises(ValueError, match=rf"2 modules cannot be packed:\s+model.layers.0.mlp.experts: {reason}"):
        case("qwen3_moe").quantize()
    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        model = case("qwen3_moe").quantize(on_unsupported="keep")
    assert reason in caplog.text and type(model.model.layers[0].mlp.experts).__name__ == "OddExperts"
    assert case("qwen3_moe").quantize(modules_to_not_convert=["experts"]).model.layers[0].mlp.experts.num_experts == 4


# --- the environment and the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["4.57.1", "5.16.3", "5.24.0", "6.0.0"])
def test_transformers_out_of_range(version, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.quantizer.transformers.__version__", version)
    expected = rf'transformers {re.escape(version)} is not supported: .*5.17 .*5.24.*pip install "transformers>='
    with pytest.raises(ImportError, match=expected):
        case("qwen3").quantize()
    with pytest.raises(ImportError, match=expected):
        case("qwen3").load()


@pytest.mark.parametrize(
    "name, config, named",
    [
        ("llama", FP4Config("mxfp4"), r"format='mxfp4' \(the checkpoint: 'nvfp4'\)"),
        ("qwen3_moe", FP4Config(scale_rule="amax"), r"scale_rule='amax' \(the checkpoint: 'soar'\)"),
        ("llama", FP4Config(global_scale="free", search=3), r"search=3 .*global_scale='free'"),
        ("llama", FP4Config(overrides={"q_proj": "skip"}), "overrides="),
        ("llama", FP4Config(modules_to_not_convert=["q_proj"]), "modules_to_not_convert="),
    ],
)
@ignore_passed_config
def test_config_that_contradicts_the_checkpoint(name, config, named):
    expected = rf"quantized already and cannot be loaded with .*{named}.*Load it without a quantization_config"
    with pytest.raises(ValueError, match=expected):
        case(name).load(quantization_config=config)


@ignore_passed_config
def test_spelled_out_default_that_contradicts_the_checkpoint():
    with pytest.raises(ValueError, match=r"format='nvfp4' \(the checkpoint: 'mxfp4'\)"):
        case("llama", "mxfp4").load(quantization_config=FP4Config(format="nvfp4"))
    for config in (FP4Config(), FP4Config("mxfp4"), FP4Config(backend="torch", compute_dtype="float32")):
        model = case("llama", "mxfp4").load(quantization_config=config)
        layer = model.model.layers[0].mlp.up_proj
        assert (layer.backend, layer.compute_dtype) == (config.backend, config.compute_dtype)


def test_config_of_another_method():
    with pytest.raises(ValueError, match="FP4Config but you are passing a CompressedTensorsConfig"):
        case("llama").load(quantization_config=CompressedTensorsConfig())
    with pytest.raises(ValueError, match="but you are passing a FP4Config"):
        config = tiny_config("llama")
        config.quantization_config = {"quant_method": "fp8"}
        auto_class("llama").from_pretrained(source("llama"), config=config, quantization_config=FP4Config())


@pytest.mark.parametrize("layout", ["portable", "own"])
@pytest.mark.parametrize("fields, named", [({"twiddle": 1}, "twiddle"), ({"version": 2}, r"version 2")])
def test_config_from_the_future(layout, fields, named, tmp_path):
    folder = case("llama" if layout == "portable" else "qwen3_moe").folder

    def change(config):
        stored = config["quantization_config"]
        (stored["hf_mxfp4"] if layout == "portable" else stored).update(fields)

    path = edited(folder, tmp_path / "checkpoint", config=change)
    with pytest.raises(ValueError, match=rf"{named}.*needs a newer one"):
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_saving_into_a_file(tmp_path):
    """transformers logs an error and returns; the file is untouched."""
    path = tmp_path / "file"
    path.write_text("mine")
    case("llama").model.save_pretrained(path)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
