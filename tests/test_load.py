# SPDX-License-Identifier: Apache-2.0
"""`hf_mxfp4.load` and ModelOpt checkpoints by `from_pretrained` alone: dense models in other tools' layouts."""

import copy
import json
import logging
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from foreign_checkpoints import KINDS, ct_config, made, modelopt_config
from hub_server import TOKEN, Entry, Repo, hub
from safetensors.torch import load_file
from test_bad_input import edited, put
from test_without_us import READER
from tiny_models import (
    assert_same_tensors,
    auto_class,
    case,
    file_bytes,
    outputs,
    packed_modules,
    saved_bytes,
    source,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import auto

import hf_mxfp4
from hf_mxfp4 import FP4Config, FP4Linear, load
from hf_mxfp4.checkpoint_files import read_checkpoint

__all__ = ["hub"]

TABLE = [(name, kind) for name in ("llama", "qwen3") for kind in KINDS]  # with biases; with tied embeddings
TABLE += [("bert", "ct-nvfp4"), ("bert", "modelopt-mxfp4")]
SOME = ("ct-nvfp4", "modelopt-mxfp4", "modelopt-awq")
Q_PROJ = "model.layers.0.self_attn.q_proj"
every_kind = pytest.mark.parametrize("kind", KINDS)
ignore_passed_config = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Two layers of bfloat16 products in another order: a few steps of 2^-8 of the largest logit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


# --- loaded, dequantized, saved, loaded again ------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind", TABLE)
def test_table(name, kind, tmp_path):
    """Every layout: packed, the weights its own tool decodes, and a checkpoint of ours afterwards."""
    this = made(name, kind)
    dense = auto_class(name).from_pretrained(this.dense)
    model = load(this.folder)
    found = packed_modules(model)
    assert len(found) == (13 if name == "bert" else 14) and {type(module) for module in found.values()} == {FP4Linear}
    assert {module.format.name for module in found.values()} == {KINDS[kind].format}
    assert model.num_parameters() == dense.num_parameters()
    logits = outputs(model)
    assert_near(logits, outputs(dense))
    recipe = model.config.quantization_config
    assert recipe.origin == KINDS[kind].layout and recipe.format == KINDS[kind].format

    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == ("hf_mxfp4" if kind == "modelopt-awq" else "compressed-tensors")
    for again in (auto_class(name).from_pretrained(tmp_path / "saved"), load(tmp_path / "saved")):
        assert_same_tensors(again.state_dict(), model.state_dict())
        assert torch.equal(outputs(again), logits)
        assert again.config.quantization_config == recipe
    assert saved_bytes(again, tmp_path / "twice") == file_bytes(tmp_path / "saved")

    assert_same_tensors(model.dequantize().state_dict(), dense.state_dict())
    assert torch.equal(outputs(model), outputs(dense))


def test_saved_without_us(tmp_path):
    """What is saved portably, transformers and compressed-tensors read alone, as the weights of its first tool."""
    kinds = ("ct-nvfp4", "modelopt-nvfp4", "modelopt-mxfp4")
    for kind in kinds:
        load(made("llama", kind).folder).save_pretrained(tmp_path / kind)
    command = [sys.executable, "-c", READER, json.dumps(tokens().tolist()), *(str(tmp_path / kind) for kind in kinds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert "REPORT" in done.stdout, done.stderr[-3000:]
    for kind in kinds:
        found = load_file(tmp_path / kind / "plain.safetensors")
        dense = auto_class("llama").from_pretrained(made("llama", kind).dense)
        assert torch.equal(found.pop("output"), outputs(dense)) and len(found) == 15
        assert all(torch.equal(weight, dense.get_submodule(path).weight) for path, weight in found.items())


@ignore_passed_config
@every_kind
def test_dequantized_while_loading(kind, tmp_path):
    this = made("llama", kind)
    model = load(this.folder, quantization_config=FP4Config(dequantize=True))
    dense = auto_class("llama").from_pretrained(this.dense)
    assert_same_tensors(model.state_dict(), dense.state_dict())
    assert not hasattr(model.config, "quantization_config") and not packed_modules(model)
    model.save_pretrained(tmp_path)
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), load_file(this.dense / "model.safetensors"))


@every_kind
def test_float32(kind):
    """In float32 nothing but the order of sums differs from the dense model."""
    model = load(made("llama", kind).folder, dtype=torch.float32)
    found = outputs(model)
    torch.testing.assert_close(found, outputs(model.dequantize()), rtol=1e-4, atol=1e-5)


def test_stored_bytes_are_taken_as_they_are():
    """A compressed-tensors checkpoint is not requantized: its own codes and scales are in the buffers."""
    this = made("llama", "ct-nvfp4")
    stored = load_file(this.folder / "model.safetensors")
    state = load(this.folder).state_dict()
    assert_same_tensors(state, stored)


def test_the_base_model_alone():
    this = made("qwen3", "ct-nvfp4")
    model = load(this.folder, auto_class=transformers.AutoModel)
    whole = load(this.folder)
    assert type(model) is transformers.Qwen3Model and len(packed_modules(model)) == 14
    assert torch.equal(outputs(model), outputs(whole.model))


@pytest.mark.parametrize("kind", ["ct-nvfp4", "modelopt-awq"])
def test_the_base_model_of_what_was_saved(kind, tmp_path):
    """Input transforms find their layers under either prefix."""
    model = load(made("qwen3", kind).folder)
    model.save_pretrained(tmp_path / "whole")
    base = load(tmp_path / "whole", auto_class=transformers.AutoModel)
    assert torch.equal(outputs(base), outputs(model.model))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(outputs(load(tmp_path / "base")), outputs(base))
    with pytest.raises(ValueError, match="Load it with the class it was saved from"):
        load(packed_head("qwen3", tmp_path / "head", tied=False), auto_class=transformers.AutoModel)


def packed_head(name: str, to: Path, tied: bool) -> Path:
    """A checkpoint whose output head is packed too."""
    stored = KINDS["ct-nvfp4"].store("lm_head", 0.05 * torch.randn(128, 64).bfloat16())[0]

    def change(old):
        old.pop("lm_head.weight", None)
        old |= {f"lm_head.{key}": value for key, value in stored.items()}

    def config(old):
        old["quantization_config"]["ignore"] = []
        old["tie_word_embeddings"] = tied

    return edited(made(name, "ct-nvfp4").folder, to, change, config)


def test_packed_head(tmp_path):
    """Kept by default when quantizing, packed where a checkpoint has it so, also after saving."""
    model = load(packed_head("llama", tmp_path / "head", tied=False))
    assert type(model.lm_head) is FP4Linear
    model.save_pretrained(tmp_path / "saved")
    again = auto_class("llama").from_pretrained(tmp_path / "saved")
    assert type(again.lm_head) is FP4Linear and torch.equal(outputs(again), outputs(model))


def test_copies():
    """A loaded model is copied and pickled whole, and carries nothing of its files."""
    model = load(made("llama", "modelopt-awq").folder)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(other), outputs(model))


def test_code_of_the_checkpoint(tmp_path, monkeypatch):
    """A model class that comes with the checkpoint, with trust_remote_code=True only."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    auto_map = {"AutoConfig": "code.TheirConfig", "AutoModelForCausalLM": "code.TheirModel"}

    def config(old):
        old.update(auto_map=auto_map, architectures=["TheirModel"], model_type="theirs")

    folder = edited(made("llama", "modelopt-nvfp4").folder, tmp_path / "m", config=config)
    (folder / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class TheirConfig(LlamaConfig):\n    model_type = 'theirs'\n\n\n"
        "class TheirModel(LlamaForCausalLM):\n    config_class = TheirConfig\n"
    )
    model = load(folder, trust_remote_code=True)
    assert type(model).__name__ == "TheirModel" and len(packed_modules(model)) == 14
    assert torch.equal(outputs(model), outputs(load(made("llama", "modelopt-nvfp4").folder)))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder, trust_remote_code=False)


def test_layers_that_the_model_leaves_out(tmp_path, monkeypatch):
    """Packed layers that a model ignores on load (those that predict further tokens) are left out in silence, too."""
    change = move("model.layers.1", "model.layers.2", copy=True)
    folder = edited(made("llama", "ct-nvfp4").folder, tmp_path / "more", change)
    with pytest.raises(ValueError, match=r"7 packed weights that have no place"):
        load(folder)
    ignored = [r"model\.layers\.2\."]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    model, report = load(folder, output_loading_info=True)
    assert not any(report.values()) and torch.equal(outputs(model), outputs(load(made("llama", "ct-nvfp4").folder)))


def test_a_new_head_starts_in_full_precision(caplog):
    this = made("llama", "ct-nvfp4")
    model = load(this.folder, auto_class=transformers.AutoModelForSequenceClassification, num_labels=3)
    assert type(model.score) is torch.nn.Linear and model.score.out_features == 3
    assert len(packed_modules(model)) == 14 and "score" not in model.config.quantization_config.stored.get(
        "targets", ()
    )


@ignore_passed_config
def test_arguments():
    """What `from_pretrained` takes, and what an FP4Config beside the checkpoint may change."""
    this = made("llama", "ct-nvfp4")
    plain = load(str(this.folder))
    config = FP4Config(backend="torch", compute_dtype="float32", activation_format="same", layout="own")
    model, report = load(
        this.folder, quantization_config=config, attn_implementation="eager", output_loading_info=True, use_cache=False
    )
    assert not any(report.values())
    assert model.config._attn_implementation == "eager" and model.config.use_cache is False
    for module in packed_modules(model).values():
        options = (module.backend, module.compute_dtype, module.activation_format)
        assert options == ("torch", torch.float32, "same")
    assert config.origin is None and config.stored is None  # the caller's own
    fused = load(this.folder, quantization_config=FP4Config(fuse_projections=True), dtype="bfloat16")
    assert_near(outputs(fused), outputs(plain))
    assert model.name_or_path == str(this.folder)


@ignore_passed_config
def test_layout_of_what_is_saved(tmp_path):
    model = load(made("llama", "modelopt-nvfp4").folder, quantization_config=FP4Config(layout="own"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "hf_mxfp4"
    assert torch.equal(outputs(load(tmp_path)), outputs(model))
    with pytest.raises(ValueError, match=r'layout="portable" cannot hold layers whose inputs are transformed'):
        load(made("llama", "modelopt-awq").folder, quantization_config=FP4Config(layout="portable"))


@ignore_passed_config
def test_rounded_activations_are_followed(tmp_path, caplog):
    """A W4A4 checkpoint rounds activations, unless the caller says otherwise."""
    fields = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}
    arguments = {"group_size": 16, "strategy": "tensor_group"}

    def config(old):
        old["quantization_config"] = ct_config("nvfp4-pack-quantized", arguments, fields)

    folder = edited(made("llama", "ct-nvfp4").folder, tmp_path / "w4a4", config=config)
    model = load(folder)
    assert {module.activation_format for module in packed_modules(model).values()} == {"same"}
    weights = load(made("llama", "ct-nvfp4").folder, quantization_config=FP4Config(activation_format="same"))
    assert torch.equal(outputs(model), outputs(weights))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(load(tmp_path / "saved")), outputs(model))
    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        only = load(folder, quantization_config=FP4Config(activation_format=None))
    assert "activation_format=None was given, and goes before" in caplog.text
    assert torch.equal(outputs(only), outputs(load(made("llama", "ct-nvfp4").folder)))


def test_mixed_formats(tmp_path):
    """Groups of two formats: each module in its own."""
    config = ct_config("mixed-precision", {})
    for number, (kind, targets) in enumerate((("ct-mxfp4", ["re:.*mlp.*"]), ("ct-nvfp4", ["Linear"]))):
        group = KINDS[kind].config["config_groups"]["group_0"]
        config["config_groups"][f"group_{number}"] = group | {"targets": targets}
    other = load_file(made("llama", "ct-mxfp4").folder / "model.safetensors")

    def change(old):
        for key in [key for key in old if ".mlp." in key]:
            del old[key]
        old |= {key: value for key, value in other.items() if ".mlp." in key}

    folder = edited(
        made("llama", "ct-nvfp4").folder,
        tmp_path / "mixed",
        change,
        lambda old: old.update(quantization_config=config),
    )
    model = load(folder)
    for path, module in packed_modules(model).items():
        assert module.format.name == ("mxfp4" if ".mlp." in path else "nvfp4")
    model.save_pretrained(tmp_path / "saved")
    again = auto_class("llama").from_pretrained(tmp_path / "saved")
    assert_same_tensors(again.state_dict(), model.state_dict())
    assert torch.equal(outputs(again), outputs(model))


def test_shards(tmp_path):
    """A checkpoint in many files, of which each module's tensors may be in several."""
    model = load(made("llama", "ct-nvfp4").folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["hf_mxfp4"]  # now it is no longer ours
    path.write_text(json.dumps(config))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = load(tmp_path)
    assert again.config.quantization_config.origin == "compressed-tensors"
    assert_same_tensors(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_map(device_map):
    this = made("llama", "modelopt-nvfp4")
    assert torch.equal(outputs(load(this.folder, device_map=device_map)), outputs(load(this.folder)))


def test_offloading_is_refused(tmp_path):
    this = made("llama", "modelopt-nvfp4")
    layers = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    disk = {**dict.fromkeys(layers, "cpu"), "model.layers.1": "disk"}
    for kwargs in ({"device_map": disk}, {"device_map": "auto", "max_memory": {"cpu": 60_000}}):
        with pytest.raises(ValueError, match=r"offloads modules.*save_pretrained, and load the saved model"):
            load(this.folder, offload_folder=tmp_path, **kwargs)


class FloatTensors(TorchDispatchMode):
    """The sizes of all floating tensors of 16 bits and more that operators return."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            real = isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
            if real and tensor.is_floating_point() and tensor.itemsize > 1:
                self.sizes.append(tensor.numel())
        return out


@pytest.mark.parametrize("name, kind", [("llama", "ct-nvfp4"), ("qwen3_moe", "modelopt-nvfp4")])
def test_no_dense_copy(name, kind, monkeypatch):
    """No weight is decoded on the way, not even one expert's: every float tensor made is one that is stored plainly,
    or smaller than any packed weight."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # operators of other threads would not be seen
    this = made(name, kind)
    stored = load_file(this.folder / "model.safetensors")
    packed = min(2 * value.numel() for key, value in stored.items() if value.dtype == torch.uint8)
    plain = {value.numel() for value in stored.values() if value.dtype == torch.bfloat16}
    with FloatTensors() as seen:
        model = load(this.folder)
    assert seen.sizes and all(size < packed or size in plain for size in seen.sizes)
    with FloatTensors() as seen:  # and what is counted would be seen
        model.dequantize()
    assert not all(size < packed or size in plain for size in seen.sizes)


# --- what the loader says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind", [("llama", kind) for kind in SOME] + [("mixtral", "modelopt-nvfp4")])
def test_packed_tensors_are_no_news(name, kind, caplog):
    """The loader reports neither missing nor unexpected tensors of ours, and leaves no trace of how."""
    model, report = load(made(name, kind).folder, output_loading_info=True)
    assert not any(report.values())
    assert not any("\0" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)
    assert all(not module._non_persistent_buffers_set for module in packed_modules(model).values())
    quantizer = model.hf_quantizer
    assert quantizer.adoption is None and not quantizer.headers and quantizer.quantization_config.foreign is None


def test_other_unexpected_tensors_are(tmp_path):
    change = put_new("model.layers.0.strange.weight", torch.ones(3))
    _, report = load(edited(made("llama", "ct-nvfp4").folder, tmp_path / "more", change), output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"model.layers.0.strange.weight"}
    assert not report["missing_keys"]


def put_new(key: str, value: torch.Tensor):
    def change(tensors):
        tensors[key] = value

    return change


def test_what_is_not_used_is_named(caplog):
    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        load(made("llama", "modelopt-nvfp4").folder)
    assert "not all is done as this checkpoint (modelopt 0.33.0) says" in caplog.text
    assert "14 tensors (such as model.layers.0.mlp.down_proj.input_scale): tensor scale of activations" in caplog.text


# --- ModelOpt and plain from_pretrained ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
@pytest.mark.parametrize("kind", ["modelopt-nvfp4", "modelopt-mxfp4"])
def test_from_pretrained_alone(kind, method, tmp_path):
    this = made("llama", kind)
    folder = edited(
        this.folder, tmp_path / "m", config=lambda old: old["quantization_config"].update(quant_method=method)
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_tensors(model.state_dict(), load(this.folder).state_dict())
    assert model.config.quantization_config.origin == "modelopt 0.33.0"


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4_SVD", "W4A8_NVFP4_FP8", "INT4_AWQ"])
def test_other_modelopt_algorithms_are_refused_by_name(algorithm, tmp_path):
    folder = edited(
        made("llama", "modelopt-nvfp4").folder,
        tmp_path / "m",
        config=lambda old: old.update(quantization_config=modelopt_config(algorithm, 16)),
    )
    for loader in (AutoModelForCausalLM.from_pretrained, load):
        with pytest.raises(ValueError, match=rf"{algorithm}.*not supported"):
            loader(folder)


def test_only_hf_quant_config(tmp_path):
    """Old ModelOpt repositories say nothing in config.json."""
    whole = made("llama", "modelopt-nvfp4").folder
    folder = edited(whole, tmp_path / "m", config=lambda old: old.pop("quantization_config"))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    quantization["exclude_modules"] = ["lm_head"]
    content = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    model = load(folder)
    assert model.config.quantization_config.origin == "modelopt 0.23.0"
    assert {module.activation_format for module in packed_modules(model).values()} == {"same"}  # NVFP4 is W4A4
    assert_same_tensors(model.state_dict(), load(whole).state_dict())


@pytest.mark.parametrize("alone", [True, False])
def test_config_inside_the_text_model(alone, tmp_path):
    """What a text_config says of quantization is followed, and does not outlive the packed weights it speaks of."""
    this, auto_model = made("qwen3_vl_moe", "modelopt-mxfp4"), auto_class("qwen3_vl_moe")

    def config(old):
        old["text_config"]["quantization_config"] = old.pop("quantization_config")

    folder = edited(this.folder, tmp_path / "m", config=config)
    model = (auto_model.from_pretrained if alone else load)(folder)
    model.save_pretrained(tmp_path / "saved")
    model.dequantize().save_pretrained(tmp_path / "dense")
    for saved in ("saved", "dense"):
        config = json.loads((tmp_path / saved / "config.json").read_text())
        assert "quantization_config" not in config["text_config"]
        assert ("quantization_config" in config) == (saved == "saved")
    dense = auto_model.from_pretrained(this.dense)
    assert_same_tensors(auto_model.from_pretrained(tmp_path / "dense").state_dict(), dense.state_dict())
    assert_same_tensors(load(tmp_path / "saved").dequantize().state_dict(), dense.state_dict())


def test_other_methods_stay_with_transformers():
    """Plain `from_pretrained` of what transformers knows is transformers' own business."""
    config = AutoConfig.from_pretrained(made("llama", "ct-nvfp4").folder)
    theirs = auto.AutoQuantizationConfig.from_dict(config.quantization_config)
    assert type(theirs) is transformers.CompressedTensorsConfig
    for method in ("mxfp4", "fp_quant", "fouroversix", "torchao"):
        assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method].__module__.startswith("transformers.")
    for method in ("modelopt", "modelopt_fp4"):
        made_by = auto.AutoQuantizationConfig.from_dict({"quant_method": method, "quant_algo": "NVFP4"})
        assert type(made_by) is FP4Config and made_by.quant_method == "hf_mxfp4"


# --- what is refused -------------------------------------------------------------------------------------------------


def refuse(tmp_path, match, kind="ct-nvfp4", change=None, config=None, name="llama", **kwargs):
    """A changed checkpoint does not load; the message tells what was found, and the files stay as they were."""
    folder = edited(made(name, kind).folder, tmp_path / "checkpoint", change, config)
    before = file_bytes(folder)
    with pytest.raises(ValueError, match=match):
        load(folder, **kwargs)
    assert file_bytes(folder) == before


def test_full_precision():
    with pytest.raises(ValueError, match=r"is in full precision.*quantization_config=hf_mxfp4.FP4Config\(\)"):
        load(source("llama"))


def test_ours_load_as_before():
    assert torch.equal(outputs(load(case("llama").folder)), outputs(case("llama").model))


@pytest.mark.parametrize("method", ["gptq", "awq", None])
def test_unknown_method(method, tmp_path):
    refuse(
        tmp_path,
        rf"quant_method {method!r} is not an FP4 layout known here; known: .*modelopt",
        config=lambda old: old.update(quantization_config={"quant_method": method, "bits": 4}),
    )


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"format": "mxfp4"}, r"format='mxfp4' \(the checkpoint: 'nvfp4'\)"),
        ({"scale_rule": "soar"}, r"scale_rule='soar' \(the checkpoint: made by compressed-tensors\)"),
        ({"modules_to_not_convert": ["q_proj"]}, r"modules_to_not_convert=\['q_proj'\]"),
        ({"error_feedback": True}, r"error_feedback=True"),
    ],
)
@ignore_passed_config
def test_contradicting_config(fields, named, tmp_path):
    refuse(tmp_path, rf"quantized already and cannot be loaded with {named}", quantization_config=FP4Config(**fields))


@pytest.mark.parametrize(
    "kwargs", [{"key_mapping": {"a": "b"}}, {"state_dict": {}}, {"config": {}}, {"gguf_file": "x"}]
)
def test_arguments_it_does_not_take(kwargs):
    with pytest.raises(ValueError, match=rf"load\(\) does not take {next(iter(kwargs))}"):
        load(source("llama"), **kwargs)


@pytest.mark.parametrize(
    "key, match",
    [
        ("model.norm.weight", r"holds no weights for 1 .*: model.norm.weight"),
        (f"{Q_PROJ}.bias", rf"holds no weights for 1 .*: {Q_PROJ}.bias"),
        ("lm_head.weight", r"holds no weights for 1 .*: lm_head.weight"),
        ("model.embed_tokens.weight", r"holds no weights for 1 .*: model.embed_tokens.weight"),
        (f"{Q_PROJ}.weight_scale", rf"{Q_PROJ}.weight_scale"),
        (f"{Q_PROJ}.weight_global_scale", rf"{Q_PROJ}.weight_global_scale"),
    ],
)
def test_missing_tensor(key, match, tmp_path):
    refuse(tmp_path, match, change=put(key, None))


def test_a_linear_that_is_missing_altogether(tmp_path):
    def change(old):
        for key in [key for key in old if key.startswith(f"{Q_PROJ}.weight")]:
            del old[key]

    refuse(tmp_path, rf"{Q_PROJ}.weight", change=change)


def test_packed_and_plain(tmp_path):
    refuse(
        tmp_path,
        rf"{Q_PROJ}.weight",
        change=put_new(f"{Q_PROJ}.weight", torch.zeros(64, 64, dtype=torch.bfloat16)),
    )


def move(old_name: str, new_name: str, copy=False):
    """A change that gives all tensors of a module to another."""

    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{old_name}.")]:
            value = tensors[key].clone() if copy else tensors.pop(key)
            tensors[key.replace(old_name, new_name)] = value

    return change


def test_packed_tensor_without_a_place(tmp_path):
    change = move(Q_PROJ, "model.layers.0.self_attn.other_proj", copy=True)
    refuse(
        tmp_path,
        r"packed weights that have no place in LlamaForCausalLM \(such as .*other_proj.weight\)",
        change=change,
    )


def test_packed_embedding(tmp_path):
    def change(old):
        del old["model.embed_tokens.weight"]
        move(Q_PROJ, "model.embed_tokens", copy=True)(old)
        del old["model.embed_tokens.bias"]

    refuse(tmp_path, r"model.embed_tokens.weight is packed in the checkpoint, and a Embedding is not", change=change)


def test_packed_weight_that_the_model_ties(tmp_path):
    with pytest.raises(ValueError, match=r"lm_head.weight is packed .* and tied to another weight"):
        load(packed_head("qwen3", tmp_path / "head", tied=True))


def test_no_files():
    config = AutoConfig.from_pretrained(made("llama", "modelopt-nvfp4").folder)
    with pytest.raises(ValueError, match="loaded from safetensors files, not from a state dict"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})


def test_origin_is_not_for_users():
    with pytest.raises(ValueError, match="is said of a model that another tool quantized"):
        case("llama").quantize(origin="modelopt")
    with pytest.raises(ValueError, match="origin=3 is not a string"):
        FP4Config(origin=3)
    with pytest.raises(ValueError, match="is not an object"):
        FP4Config.from_dict({"quant_method": "hf_mxfp4", "foreign": 3})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SOME)
def test_cuda(kind):
    """Straight onto a GPU, where it computes what the dense model does."""
    this = made("llama", kind)
    model = load(this.folder, device_map="cuda")
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    assert_same_tensors(model.cpu().state_dict(), load(this.folder).state_dict())


def test_model_of_another_size(tmp_path):
    refuse(
        tmp_path, r"in the model; the checkpoint is of another", config=lambda old: old.update(intermediate_size=64)
    )
    shutil.rmtree(tmp_path / "checkpoint")
    refuse(tmp_path, r"holds no weights for \d+ ", config=lambda old: old.update(num_hidden_layers=3))
    shutil.rmtree(tmp_path / "checkpoint")
    refuse(tmp_path, r"have no place in Llama", config=lambda old: old.update(num_hidden_layers=1))


def test_scales_of_nan(tmp_path):
    def change(old):
        old[f"{Q_PROJ}.weight_scale"].view(torch.uint8)[3, 1] = 0x7F

    refuse(tmp_path, rf"{Q_PROJ}.*(NaN|negative)", change=change)


def test_transform_that_is_missing(tmp_path):
    """Without its input transform a saved model would compute something else."""
    model = load(made("llama", "modelopt-awq").folder)
    model.save_pretrained(tmp_path / "saved")
    folder = edited(tmp_path / "saved", tmp_path / "edited", put(f"{Q_PROJ}.pre_quant_scale", None))
    with pytest.raises(ValueError, match=rf"holds no {Q_PROJ}.pre_quant_scale, an input transform"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_pickle_files(tmp_path):
    shutil.copytree(made("llama", "ct-nvfp4").folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="never read"):
        load(tmp_path / "m")


# --- repositories ----------------------------------------------------------------------------------------------------


def publish(hub, files: dict[str, bytes]) -> None:
    repo = hub.repos.setdefault("alice/tiny", Repo(True, "alice"))
    repo.commit("main", {name: Entry(content, name.endswith(".safetensors")) for name, content in files.items()}, "")
    hub.large |= {entry.sha256: entry.content for entry in repo.files("main").values() if entry.large}


@pytest.mark.parametrize("subfolder", ["", "fp4"])
@pytest.mark.parametrize("shards", [False, True])
def test_repository(shards, subfolder, hub, tmp_path, monkeypatch):
    """A name that is no folder is downloaded: the model's own files, and not the same weights in others."""
    model = load(made("llama", "modelopt-nvfp4").folder)
    folder = made("llama", "modelopt-nvfp4").folder
    if shards:
        folder = tmp_path / "shards"
        model.save_pretrained(folder, max_shard_size="20KB")
    under = f"{subfolder}/" if subfolder else ""
    files = {under + name: content for name, content in file_bytes(folder).items()}
    others = ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin")
    publish(hub, files | {under + name: b"not to be downloaded" for name in others})
    found = load("alice/tiny", subfolder=subfolder, token=TOKEN)
    assert found.name_or_path == "alice/tiny" and torch.equal(outputs(found), outputs(model))
    cache = tmp_path / "hub_cache"
    downloaded = {str(path.relative_to(cache)).split("/", 3)[3] for path in cache.glob("*/snapshots/**/*.*")}
    assert downloaded == files.keys()

    first = hub.repos["alice/tiny"].sha("main")
    publish(hub, {under + "config.json": b"broken"})
    assert torch.equal(outputs(load("alice/tiny", subfolder=subfolder, token=TOKEN, revision=first)), outputs(model))
    with pytest.raises(ValueError, match="is not JSON in UTF-8|not a valid JSON"):
        load("alice/tiny", subfolder=subfolder, token=TOKEN)
    hub.sent.clear()
    offline = {"revision": first, "local_files_only": True}
    assert torch.equal(outputs(load("alice/tiny", subfolder=subfolder, **offline)), outputs(model))
    assert not hub.sent


def test_files_beside_the_model(tmp_path):
    """As in transformers: without an index, model.safetensors is all."""
    folder = edited(made("llama", "ct-nvfp4").folder, tmp_path / "m")
    before = read_checkpoint(folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert read_checkpoint(folder) == before
    assert torch.equal(outputs(load(folder)), outputs(load(made("llama", "ct-nvfp4").folder)))


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", Path("nowhere")])
def test_no_folder(name):
    with pytest.raises(ValueError, match="is no folder here, and no name of a repository"):
        load(name)


def test_subfolder_that_is_not_there():
    with pytest.raises(ValueError, match="has no folder 'fp4'"):
        load(source("llama"), subfolder="fp4")


def test_is_exported():
    assert "load" in hf_mxfp4.__all__ and hf_mxfp4.load is load
    assert outputs(load(made("llama", "ct-nvfp4").folder)).shape == (*tokens().shape, 128)
