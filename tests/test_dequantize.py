# SPDX-License-Identifier: Apache-2.0
"""Packed models back to plain ones: `model.dequantize()` and `FP4Config(dequantize=True)`."""

import pytest
import torch
from tiny_models import (
    DENSE,
    MIXTURES,
    assert_same_tensors,
    auto_class,
    case,
    file_bytes,
    outputs,
    packed_modules,
    saved_bytes,
    source,
)

from hf_mxfp4 import FP4Config, FP4Experts

every_case = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
every_model = pytest.mark.parametrize("name", DENSE + MIXTURES)


@every_model
@every_case
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_dequantize(name, format, tmp_path):
    """`model.dequantize()` gives a plain model with the decoded weights, which saves and loads as any other."""
    this = case(name, format)
    packed = this.load()
    expected = {path: dense_weights(module) for path, module in packed_modules(packed).items()}
    model = packed.dequantize()
    assert not packed_modules(model) and not hasattr(model, "hf_quantizer") and not model.is_quantized
    assert not hasattr(model.config, "quantization_config")
    assert model.num_parameters() == this.dense.num_parameters()
    assert_same_shapes(model.state_dict(), this.dense.state_dict())
    for path, weights in expected.items():
        module = model.get_submodule(path)
        assert type(module) is type(this.dense.get_submodule(path)) and not module.training
        for key, weight in weights.items():
            assert torch.equal(getattr(module, key), weight)
    model.save_pretrained(tmp_path / "a")
    assert "quantization_config" not in (tmp_path / "a" / "config.json").read_text()
    reloaded, report = auto_class(name).from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(outputs(reloaded), outputs(model))
    assert_same_tensors(reloaded.state_dict(), model.state_dict())

    plain = this.load(quantization_config=FP4Config(dequantize=True))
    assert not packed_modules(plain) and not hasattr(plain, "hf_quantizer")
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert saved_bytes(plain, tmp_path / "b") == file_bytes(tmp_path / "a")


def dense_weights(module) -> dict[str, torch.Tensor]:
    if isinstance(module, FP4Experts):
        return {name: module.dequantized(name) for name in ("gate_up_proj", "down_proj")}
    return {"weight": module.weight}


def assert_same_shapes(state: dict, other: dict):
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in other.items()}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_dequantize_to_another_dtype(name):
    model = case(name).load().dequantize(torch.float32)
    assert {module.weight.dtype for path, module in model.named_modules() if path.endswith("q_proj")} == {
        torch.float32
    }
    expected = case(name).load(dtype=torch.float32).dequantize()
    path = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(model.state_dict()[path], expected.state_dict()[path])


def test_dequantize_while_quantizing(tmp_path):
    """Quantized and decoded in one go: a plain model with the error of four bits, as loading the packed one gives."""
    config = FP4Config(dequantize=True)
    model = auto_class("llama").from_pretrained(source("llama"), quantization_config=config)
    assert not packed_modules(model) and not hasattr(model, "hf_quantizer")
    assert_same_tensors(model.state_dict(), case("llama").load().dequantize().state_dict())
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(outputs(auto_class("llama").from_pretrained(tmp_path)), outputs(model))
