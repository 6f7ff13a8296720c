# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as others read them: transformers and compressed-tensors, in a process that never imports hf_mxfp4."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import auto_class, case, outputs, packed_modules, tokens
from torch import nn

from hf_mxfp4 import FP4Linear

# Run on folders; each gets plain.safetensors (the weights of its linears, and the output) or is reported as an error.
READER = """
import json, sys, warnings
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file
from transformers.utils import logging

logging.disable_progress_bar()
report = {}
for folder in map(Path, sys.argv[2:]):
    try:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        model = getattr(transformers, architecture).from_pretrained(folder)
        with torch.no_grad():
            output = model(torch.tensor(json.loads(sys.argv[1])))[0]  # compressed-tensors decompresses on first use
        weights = {name: m.weight.data for name, m in model.named_modules() if type(m) is torch.nn.Linear}
        save_file({**{n: w.clone() for n, w in weights.items()}, "output": output}, folder / "plain.safetensors")
        report[folder.name] = "loaded"
    except Exception as error:
        report[folder.name] = f"{type(error).__name__}: {error}"
assert not any(name.split(".")[0] == "hf_mxfp4" for name in sys.modules)
print("REPORT" + json.dumps(report))
"""

PORTABLE = {
    f"{name}-{format}": (name, format, {}) for name in ("qwen3", "llama", "bert") for format in ("nvfp4", "mxfp4")
} | {
    "mixed": ("llama", "nvfp4", {"overrides": {r"layers\.0\.mlp": {"format": "mxfp4"}, "k_proj": "skip"}}),
    "mixed-other-way": ("llama", "mxfp4", {"overrides": {r"down_proj": {"format": "nvfp4"}}}),
    "head": ("llama", "nvfp4", {"overrides": {"lm_head": {}}}),
    "skipped": ("qwen3", "nvfp4", {"modules_to_not_convert": ["model.layers.1", "o_proj"]}),
    "free": ("qwen3", "nvfp4", {"global_scale": "free"}),
}
EITHER = {"experts-kept": ("qwen3_moe", "nvfp4", {"overrides": {r"experts": "skip"}})}
OWN = {
    f"{name}-{format}-own": (name, format, {}) for name in ("mixtral", "gpt_oss") for format in ("nvfp4", "mxfp4")
} | {
    "qwen3_moe-own": ("qwen3_moe", "nvfp4", {}),
    "deepseek_v3-own": ("deepseek_v3", "mxfp4", {}),
    "dense-own": ("llama", "nvfp4", {"layout": "own"}),
    "bert-own": ("bert", "mxfp4", {"layout": "own"}),
}


ALL = PORTABLE | OWN | EITHER


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Every checkpoint, saved by us and read without us: (models by name, the other process's report, folder)."""
    root = tmp_path_factory.mktemp("checkpoints")
    models = {}
    for label, (name, format, fields) in ALL.items():
        models[label] = case(name, format).quantize(**fields)
        models[label].save_pretrained(root / label)
    command = [sys.executable, "-c", READER, json.dumps(tokens().tolist()), *map(str, (root / m for m in models))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir(), timeout=300)
    assert "REPORT" in done.stdout, done.stderr[-3000:]
    return models, json.loads(done.stdout.partition("REPORT")[2]), root


@pytest.mark.parametrize("label", PORTABLE)
def test_portable(label, read):
    """Plain transformers gets our weights: bit for bit where tensor scales are powers of two."""
    models, report, root = read
    assert report[label] == "loaded"
    ours, theirs = models[label], load_file(root / label / "plain.safetensors")
    assert ours.hf_quantizer.layout == "portable"
    linears = {name: module for name, module in ours.named_modules() if isinstance(module, nn.Linear)}
    assert theirs.keys() - {"output"} == linears.keys()
    assert any(isinstance(module, FP4Linear) for module in linears.values())
    for name, module in linears.items():
        if label == "free":  # they divide where we multiply by the reciprocal: 2 roundings, then bfloat16's
            torch.testing.assert_close(theirs[name].float(), module.weight.float(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(theirs[name], module.weight), name
    if label != "free":
        expected = outputs(ours)
        torch.testing.assert_close(theirs["output"], expected, rtol=0, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("label", OWN)
def test_own_is_loud(label, read):
    """What plain transformers cannot read, it refuses to load; it never runs on wrong numbers."""
    models, report, root = read
    assert models[label].hf_quantizer.layout == "own"
    assert report[label].startswith("RuntimeError") and "mismatch" in report[label]
    config = json.loads((root / label / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "hf_mxfp4"


def test_kept_experts(read):
    """A mixture whose experts stay dense, in whichever layout: read rightly, or refused."""
    models, report, root = read
    model = models["experts-kept"]
    if model.hf_quantizer.layout == "own":
        test_own_is_loud("experts-kept", read)
    else:
        test_portable("experts-kept", read)


@pytest.mark.parametrize("label", ALL)
def test_with_us(label, read):
    """The same folders, with us: packed, and the same output."""
    models, _, root = read
    name = ALL[label][0]
    model, report = auto_class(name).from_pretrained(root / label, output_loading_info=True)
    assert not any(report.values()), report
    assert model.hf_quantizer.layout == models[label].hf_quantizer.layout
    packed, expected = packed_modules(model), packed_modules(models[label])
    assert {key: module.format for key, module in packed.items()} == {k: m.format for k, m in expected.items()}
    assert torch.equal(outputs(model), outputs(models[label]))


def test_portable_config_is_what_compressed_tensors_writes(read):
    """The other reader's keys, and ours beside them."""
    from compressed_tensors.quantization import QuantizationConfig

    _, _, root = read
    for label in PORTABLE:
        stored = json.loads((root / label / "config.json").read_text())["quantization_config"]
        assert stored["quant_method"] == "compressed-tensors" and stored["hf_mxfp4"]["version"] == 1
        theirs = QuantizationConfig.model_validate({k: v for k, v in stored.items() if k != "hf_mxfp4"})
        for group in theirs.config_groups.values():
            assert group.weights.num_bits == 4 and group.weights.type == "float" and group.input_activations is None
        assert ("mixed" in label) == (theirs.format == "mixed-precision")


def test_nothing_else_is_written(read):
    _, _, root = read
    for label in ALL:
        files = {file.name for file in Path(root / label).iterdir()} - {"plain.safetensors", "generation_config.json"}
        assert files == {"config.json", "model.safetensors"}
