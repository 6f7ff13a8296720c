# SPDX-License-Identifier: Apache-2.0
"""FP4HfQuantizer among transformers' other parts: registration, configs, generation, pipelines, other checkpoints."""

import copy
import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from test_bad_input import edited
from tiny_models import auto_class, case, file_bytes, outputs, packed_modules, saved_bytes, source, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers import auto

from hf_mxfp4 import FP4Config, FP4Experts, FP4HfQuantizer, FP4Linear, register

DEMO = Path(__file__).resolve().parents[1] / "scripts" / "demo_lm"


def test_registration():
    before = dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    register()
    assert (dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), auto.LOADING_ATTRIBUTES_CONFIG_TYPES) == before
    assert auto.AUTO_QUANTIZER_MAPPING["hf_mxfp4"] is FP4HfQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["hf_mxfp4"] is FP4Config
    # Other methods' classes are transformers' own, and its compressed-tensors entry behaves as its own.
    for method, cls in auto.AUTO_QUANTIZER_MAPPING.items():
        assert method == "hf_mxfp4" or cls.__module__.startswith("transformers.")
    assert issubclass(auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"], CompressedTensorsConfig)


def test_flags_of_a_loaded_model():
    for name in ("llama", "qwen3_moe"):
        for model in (case(name).model, case(name).load()):
            quantizer = model.hf_quantizer
            assert isinstance(quantizer, FP4HfQuantizer) and model.is_quantized and not model.training
            assert quantizer.is_serializable() and quantizer.is_trainable and quantizer.is_compileable
            assert isinstance(model.config.quantization_config, FP4Config)
            assert model.quantization_method == "hf_mxfp4"
            assert not any(buffer.requires_grad for buffer in model.buffers())
            assert all(parameter.is_floating_point() for parameter in model.parameters())
            for module in packed_modules(model).values():
                assert not module.training and module._is_hf_initialized
            for cast in (model.half, model.float):
                with pytest.raises(ValueError, match="quantized"):
                    cast()


def test_summary_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        model = case("llama").load()
    size = sum(buffer.nbytes for module in packed_modules(model).values() for buffer in module.buffers())
    assert f"14 modules packed in {size} bytes (14 linear layers, 0 experts)" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_config_files(name, tmp_path):
    """config.json: valid JSON, the same after any number of trips, readable without the weights."""
    this = case(name)
    config = AutoConfig.from_pretrained(this.folder)
    stored = json.loads((this.folder / "config.json").read_text())["quantization_config"]
    assert config.quantization_config == stored
    config.save_pretrained(tmp_path / "config")
    this.model.config.save_pretrained(tmp_path / "model")
    copy.deepcopy(this.model.config).save_pretrained(tmp_path / "copy")
    for place in ("config", "model", "copy"):
        saved = json.loads((tmp_path / place / "config.json").read_text())
        assert saved["quantization_config"] == stored
    assert json.loads(this.model.config.to_json_string())["quantization_config"] == stored
    assert json.loads(this.model.config.to_json_string(use_diff=False))["quantization_config"] == stored
    assert str(this.model.config) and repr(FP4Config())
    recipe = FP4Config.from_dict(stored)
    assert recipe.to_dict() == stored and recipe.format == "nvfp4"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_from_config_of_a_packed_model(name):
    """An empty model from a packed checkpoint's config is an ordinary one."""
    config = AutoConfig.from_pretrained(case(name).folder)
    model = AutoModelForCausalLM.from_config(config)
    assert not packed_modules(model) and model.num_parameters() == case(name).dense.num_parameters()
    assert torch.isfinite(model(tokens()).logits).all()


def test_config_as_a_dict(tmp_path):
    for fields in ({"quant_method": "hf_mxfp4"}, FP4Config().to_dict()):
        model = AutoModelForCausalLM.from_pretrained(source("llama"), quantization_config=fields)
        assert saved_bytes(model, tmp_path / str(len(fields))) == file_bytes(case("llama").folder)


def test_other_loading_arguments(tmp_path):
    """Arguments people pass beside a quantization_config."""
    this = case("llama")
    kwargs = {"attn_implementation": "eager", "use_safetensors": True, "local_files_only": True}
    assert torch.isfinite(outputs(this.load(**kwargs))).all()
    config = AutoConfig.from_pretrained(this.folder)
    assert torch.equal(outputs(this.load(config=config)), outputs(this.model))
    assert torch.equal(outputs(type(this.model).from_pretrained(this.folder)), outputs(this.model))
    assert torch.equal(outputs(this.load(weights_only=True)), outputs(this.model))
    this.model.save_pretrained(tmp_path, variant="fp4")
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp4")), outputs(this.model))
    model = AutoModelForCausalLM.from_pretrained(
        source("llama"), quantization_config=FP4Config(compute_dtype="float32", backend="torch")
    )
    assert all(m.compute_dtype == torch.float32 and m.backend == "torch" for m in packed_modules(model).values())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_implementation_is_ours(name, implementation):
    """Whatever experts implementation is asked for, packed experts run by their own forward."""
    model = case(name).load(experts_implementation=implementation)
    assert torch.equal(outputs(model), outputs(case(name).model))
    assert sum(isinstance(module, FP4Experts) for module in model.modules()) == 2


def test_inference_and_training_modes():
    model = case("llama").load()
    with torch.inference_mode():
        first = model(tokens()).logits
    model.train()
    assert all(module.training for module in packed_modules(model).values())
    with warnings.catch_warnings():  # its new name is missing in the oldest supported transformers
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert torch.equal(outputs(model.eval()), first)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_generate(name):
    """Greedy text is the same before and after saving; sampling and static caches run."""
    this, prompt = case(name), tokens(rows=2, length=5)
    expected = this.model.generate(prompt, max_new_tokens=8, do_sample=False)
    reloaded = this.load()
    assert torch.equal(reloaded.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    assert expected.shape[1] > 5
    reloaded.generate(prompt, max_new_tokens=3, do_sample=True)


def test_generate_with_a_static_cache():
    model = case("qwen3").load()
    prompt = tokens(rows=1, length=5)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    found = model.generate(
        prompt, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(found, expected)


def test_pipeline(tmp_path):
    """`pipeline("text-generation")` on a packed model, from the object and from its folder."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, quantization_config=FP4Config())
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    texts = [
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)("def __init__(self", **kwargs),
        transformers.pipeline("text-generation", model=str(tmp_path))("def __init__(self", **kwargs),
    ]
    assert texts[0] == texts[1] and texts[0][0]["generated_text"]
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 0.5 * (DEMO / "model.safetensors").stat().st_size


def test_resized_embeddings(tmp_path):
    """New tokens on a packed model: embeddings grow, packed layers stay."""
    for name in ("qwen3", "llama"):
        model = case(name).load()
        model.resize_token_embeddings(136)
        assert outputs(model).shape[-1] == 136
        model.save_pretrained(tmp_path / name)
        assert torch.equal(outputs(auto_class(name).from_pretrained(tmp_path / name)), outputs(model))


# --- what is not ours stays as it was --------------------------------------------------------------------------------


def test_ordinary_models_are_untouched(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source("llama"))
    assert not hasattr(model, "hf_quantizer") and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert saved_bytes(model, tmp_path) == file_bytes(source("llama"))
    assert not any(isinstance(module, (FP4Linear, FP4Experts)) for module in model.modules())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_other_compressed_tensors_checkpoints(format, tmp_path, monkeypatch):
    """Without our key it is transformers' own: its quantizer, its numbers, its files."""
    folder = edited(
        case("llama", format).folder, tmp_path / "theirs", config=lambda c: c["quantization_config"].pop("hf_mxfp4")
    )
    results = []
    for registered in (True, False):
        if not registered:
            monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", CompressedTensorsConfig)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
        assert type(model.config.quantization_config) is CompressedTensorsConfig and not packed_modules(model)
        files = saved_bytes(model, tmp_path / str(registered))
        results.append((files, outputs(model)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_compressed_tensors_int8(tmp_path):
    """A checkpoint of another format, written by compressed-tensors itself."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, strategy="channel"))
    model = AutoModelForCausalLM.from_pretrained(source("llama"))
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.weight_scale.data = (module.weight.abs().amax(1, keepdim=True) / 127).to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer" and not packed_modules(loaded)
    dense = outputs(case("llama").dense)
    torch.testing.assert_close(outputs(loaded), dense, rtol=0, atol=5e-2 * dense.abs().max().item())  # 8 bits
    with pytest.raises(ValueError, match="CompressedTensorsConfig but you are passing a FP4Config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config())
