# SPDX-License-Identifier: Apache-2.0
"""Device maps, offloading to CPU and disk, and the sizes device maps are planned with."""

import copy

import accelerate
import pytest
import torch
from tiny_models import (
    DENSE,
    MIXTURES,
    auto_class,
    case,
    file_bytes,
    outputs,
    packed_modules,
    saved_bytes,
    source,
    tokens,
)
from transformers import AutoConfig
from transformers.integrations.accelerate import compute_module_sizes

from hf_mxfp4 import FP4Config, FP4HfQuantizer

SOME = ("llama", "qwen3_moe", "gpt_oss")
CPU = torch.device("cpu")
ignore_offloaded_save = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded:UserWarning")
# One layer on disk, the rest on the CPU.
DISK_MAP = {
    **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu"),
    "model.layers.1": "disk",
}


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"": CPU}, "auto"], ids=str)
@pytest.mark.parametrize("name", SOME)
@ignore_offloaded_save
def test_device_map(name, device_map, tmp_path):
    this = case(name)
    kwargs = {"max_memory": {"cpu": "1GB"}} if device_map == "auto" else {}
    model = this.load(device_map=device_map, **kwargs)
    assert torch.equal(outputs(model), outputs(this.model))
    assert saved_bytes(model, tmp_path / "loaded") == file_bytes(this.folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert torch.equal(outputs(auto_class(name).from_pretrained(tmp_path / "shards")), outputs(this.model))

    config = FP4Config()
    quantized = auto_class(name).from_pretrained(
        source(name), quantization_config=config, device_map=device_map, **kwargs
    )
    assert torch.equal(outputs(quantized), outputs(this.model))
    assert saved_bytes(quantized, tmp_path / "quantized") == file_bytes(this.folder)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@ignore_offloaded_save
def test_layer_on_disk(name, format, offload_buffers, tmp_path):
    """A saved model whose second layer is read from disk; with `offload_buffers` its packed weights are too."""
    this = case(name, format)
    model = this.load(device_map=DISK_MAP, offload_folder=tmp_path / "offload", offload_buffers=offload_buffers)
    second = [buffer for module in packed_modules(model.model.layers[1]).values() for buffer in module.buffers()]
    assert second and all(buffer.is_meta == offload_buffers for buffer in second)
    assert not any(buffer.is_meta for buffer in model.model.layers[0].buffers())
    for _ in range(2):
        assert torch.equal(outputs(model), outputs(this.model))
    assert model.num_parameters() == this.dense.num_parameters()
    assert saved_bytes(model, tmp_path / "saved") == file_bytes(this.folder)
    assert torch.equal(outputs(model), outputs(this.model))


@pytest.mark.parametrize("name", SOME)
def test_auto_device_map_spills_to_disk(name, tmp_path):
    this = case(name)
    size = this.model.get_memory_footprint()
    model = this.load(
        device_map="auto", max_memory={"cpu": size * 3 // 4}, offload_folder=tmp_path, offload_buffers=True
    )
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(outputs(model), outputs(this.model))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_accelerate_offload(name, offload_buffers, tmp_path):
    """`accelerate.cpu_offload` and `disk_offload` of a loaded model."""
    this = case(name)
    kwargs = {"execution_device": CPU, "offload_buffers": offload_buffers}
    on_cpu = accelerate.cpu_offload(this.load(), **kwargs)
    on_disk = accelerate.disk_offload(this.load(), tmp_path, **kwargs)
    for model in (on_cpu, on_disk):
        packed = [buffer for module in packed_modules(model).values() for buffer in module.buffers()]
        assert all(buffer.is_meta == offload_buffers for buffer in packed)
        assert torch.equal(outputs(model), outputs(this.model))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_dequantize_offloaded(name, offload_buffers, tmp_path):
    """A model that is partly on disk cannot be dequantized: it says so, and stays as it was."""
    this = case(name)
    model = this.load(device_map=DISK_MAP, offload_folder=tmp_path, offload_buffers=offload_buffers)
    with pytest.raises(ValueError, match=r"offload"):
        model.dequantize()
    assert torch.equal(outputs(model), outputs(this.model))


def planned(name: str, format: str):
    """An empty model and its quantizer, as transformers has them when it plans a device map."""
    config = AutoConfig.from_pretrained(source(name))
    with torch.device("meta"):
        model = auto_class(name).from_config(config, dtype=torch.bfloat16)
    quantizer = FP4HfQuantizer(FP4Config(format=format), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map="auto", checkpoint_files=None)
    return model, quantizer


@pytest.mark.parametrize("name", DENSE + MIXTURES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_planned_sizes_are_true(name, format):
    """Device maps are planned with the bytes every module takes once it is packed."""
    model, quantizer = planned(name, format)
    sizes, _ = compute_module_sizes(model, quantizer)
    real, _ = compute_module_sizes(case(name, format).model)
    assert sizes[""] == pytest.approx(real[""], rel=5e-3)
    for path, module in packed_modules(case(name, format).model).items():
        # Only tensor scales are not foreseen: 4 bytes for each packed linear, 4 or 8 for each expert's projection.
        scales = sum(b.nbytes for key, b in module.named_buffers() if key.endswith("_global_scale"))
        assert sizes[path] == real[path] - scales, path
    again = case(name, format).load()
    assert compute_module_sizes(again, again.hf_quantizer)[0] == compute_module_sizes(again)[0]


def test_disk_while_quantizing_is_refused(tmp_path):
    for device_map in (DISK_MAP, {"": "disk"}):
        with pytest.raises(ValueError, match=r"device_map sends modules to disk, .* save_pretrained, and load"):
            auto_class("llama").from_pretrained(
                source("llama"), quantization_config=FP4Config(), device_map=device_map, offload_folder=tmp_path
            )
    with pytest.raises(ValueError, match=r"device_map sends modules to disk"):
        auto_class("llama").from_pretrained(
            source("llama"),
            quantization_config=FP4Config(),
            device_map="auto",
            max_memory={"cpu": 40_000},
            offload_folder=tmp_path,
        )
    assert not list(tmp_path.iterdir())


def test_meta_device_is_an_empty_model():
    """A loaded model moved to meta keeps every shape and dtype, so that its state dict can be planned with."""
    model = copy.deepcopy(case("qwen3_moe").model).to("meta")
    state, real = model.state_dict(), case("qwen3_moe").model.state_dict()
    assert all(value.is_meta for value in state.values())
    assert {k: (v.dtype, v.shape) for k, v in state.items()} == {k: (v.dtype, v.shape) for k, v in real.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_cuda(name, tmp_path):
    """Load on a GPU, quantize on a GPU, move there and back: the same files."""
    this = case(name)
    moved = this.load().to("cuda")
    models = [this.load(device_map="cuda"), this.load(device_map={"": 0}), moved]
    models.append(auto_class(name).from_pretrained(source(name), quantization_config=FP4Config(), device_map="cuda"))
    for number, model in enumerate(models):
        assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
        assert saved_bytes(model, tmp_path / str(number)) == file_bytes(this.folder)
        # bfloat16 products in another order, through two layers.
        found, expected = outputs_on(model, "cuda"), outputs(this.model)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=5e-2 * expected.abs().max().item())
    assert saved_bytes(moved.to("cpu"), tmp_path / "back") == file_bytes(this.folder)
    assert torch.equal(outputs(moved), outputs(this.model))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_layer_off_the_gpu(name, tmp_path):
    """A layer kept on the CPU or on disk takes no GPU memory between its uses."""
    this = case(name)
    for place in ("cpu", "disk"):
        device_map = {key: place if key == "model.layers.1" else 0 for key in DISK_MAP}
        model = this.load(device_map=device_map, offload_folder=tmp_path, offload_buffers=True)
        for _ in range(2):
            assert not any(buffer.is_cuda for buffer in model.model.layers[1].buffers())
            found, expected = outputs_on(model, "cuda"), outputs(this.model)
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=5e-2 * expected.abs().max().item())


def outputs_on(model, device: str) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens().to(device))[0]
