# SPDX-License-Identifier: Apache-2.0
"""inspect_checkpoint: every figure counted again from the tensors, in another way."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import case, source

from hf_mxfp4.checkpoint_files import TensorReader, read_checkpoint
from hf_mxfp4.inspection import inspect_checkpoint

GOLDEN = Path(__file__).parent / "golden"
CASES = [("llama", "nvfp4"), ("qwen3", "mxfp4"), ("qwen3_moe", "nvfp4"), ("gpt_oss", "mxfp4"), ("mixtral", "nvfp4")]
cases = pytest.mark.parametrize("name, format", CASES)
BLOCK = {"nvfp4": 16, "mxfp4": 32}


def inspect(folder, with_tensors: bool = True):
    checkpoint = read_checkpoint(folder)
    with TensorReader(folder, checkpoint.tensors) as read:
        return inspect_checkpoint(checkpoint, read if with_tensors else None)


@cases
def test_figures(name, format):
    folder = case(name, format).folder
    found = inspect(folder)
    tensors = load_file(folder / "model.safetensors")
    codes = {key: t for key, t in tensors.items() if t.dtype == torch.uint8 and not key.endswith("scale")}
    plain = {key: t for key, t in tensors.items() if t.dtype == torch.bfloat16}
    weights = sum(2 * t.numel() for t in codes.values())
    total = sum(t.nbytes for t in tensors.values())
    packed = total - sum(t.nbytes for t in plain.values())
    assert (found.layout, found.origin) == ("portable" if name in ("llama", "qwen3") else "own", "hf_mxfp4")
    assert found.recipe["format"] == format and found.recipe["scale_rule"] == "soar"
    assert found.modules == {format: len(codes)} and found.weights_packed == weights
    assert (found.bytes_packed, found.bytes_plain, found.bytes_skipped) == (packed, total - packed, 0)
    assert found.nbytes == total and found.tensors == len(tensors) and found.files == 1
    assert found.bits_per_weight == 8 * packed / weights
    extra = 32 * len(codes) / weights if format == "nvfp4" else 0  # a tensor scale each
    assert math.isclose(found.bits_per_weight, 4 + 8 / BLOCK[format] + extra)
    assert found.plain == {"BF16": {"tensors": len(plain), "bytes": total - packed}}
    largest = found.largest_plain[0]
    assert largest["bytes"] == max(t.nbytes for t in plain.values()) == plain[largest["name"]].nbytes
    assert largest["shape"] == list(plain[largest["name"]].shape) and len(found.largest_plain) == 5
    assert found.skipped == {} and found.notes == [] and found.activation_format is None
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


@cases
def test_scales(name, format):
    folder = case(name, format).folder
    found = inspect(folder).scales[format]
    tensors = load_file(folder / "model.safetensors")
    codes = [t for key, t in tensors.items() if t.dtype == torch.uint8 and not key.endswith("scale")]
    zeros = sum(int((t & 7 == 0).sum()) + int((t >> 4 & 7 == 0).sum()) for t in codes)
    assert found["codes"] == sum(2 * t.numel() for t in codes) and found["zero_codes"] == zeros
    scales = [t for key, t in tensors.items() if key.endswith("scale") and not key.endswith("global_scale")]
    assert found["blocks"] == sum(t.numel() for t in scales) == found["codes"] // BLOCK[format]
    assert found["zero_blocks"] == 0 and found["zero_block_share"] == 0
    flat = torch.cat([t.flatten().float() for t in scales]).double()
    exponents = (flat - 127 if format == "mxfp4" else flat.log2().floor()).sort().values
    expected = {"min": exponents[0], "median": exponents[(len(exponents) - 1) // 2], "max": exponents[-1]}
    assert found["block_exponents"] == {key: int(value) for key, value in expected.items()}
    factors = sorted(1 / t.item() for key, t in tensors.items() if key.endswith("global_scale"))
    if format == "mxfp4":
        assert found["tensor_scales"] is None
    else:
        spread = {"min": factors[0], "median": factors[len(factors) // 2], "max": factors[-1]}
        assert found["tensor_scales"] == spread


def test_zero_blocks(tmp_path):
    """Blocks of zeros are counted, -0 too, and their scales are left out of the ranges."""
    tensors = load_file(case("llama").folder / "model.safetensors")
    key = "model.layers.0.mlp.down_proj.weight"
    tensors[f"{key}_packed"][:8] = 0x80
    tensors[f"{key}_scale"].view(torch.uint8)[:8] = 0x01  # 2^-9, where the others stay above
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((case("llama").folder / "config.json").read_bytes())
    before, after = inspect(case("llama").folder).scales["nvfp4"], inspect(tmp_path).scales["nvfp4"]
    assert after["zero_blocks"] == 8 * 8 and after["zero_block_share"] == 64 / after["blocks"]
    assert after["block_exponents"]["min"] >= before["block_exponents"]["min"] > -9
    assert after["zero_codes"] > before["zero_codes"]


def test_all_zero():
    """A model of zeros has no ranges of block scales."""
    checkpoint = read_checkpoint(case("llama").folder)
    with TensorReader(checkpoint.folder, checkpoint.tensors) as read:

        def zeros(name):
            return torch.zeros_like(read(name)) if name.endswith("_packed") else read(name)

        found = inspect_checkpoint(checkpoint, zeros).scales["nvfp4"]
    assert found["block_exponents"] is None and found["zero_block_share"] == 1


def test_headers_alone():
    """From the Hub there is no folder, and no tensor to read."""
    for name, format in CASES:
        local = read_checkpoint(case(name, format).folder)
        found, expected = inspect_checkpoint(local._replace(folder=None)), inspect(local.folder)
        assert found.scales is None
        expected.scales = None
        assert found == expected


def test_full_precision():
    found = inspect(source("llama"))
    total = sum(t.nbytes for t in load_file(source("llama") / "model.safetensors").values())
    assert (found.layout, found.origin, found.recipe, found.scales) == ("full precision", None, None, None)
    assert found.modules == {} and found.bits_per_weight is None and found.weights_packed == 0
    assert found.bytes_plain == found.nbytes == total and found.bytes_packed == 0


def test_mixed_formats(tmp_path):
    model = case("llama").quantize(overrides={r"layers\.0\.mlp": {"format": "mxfp4"}})
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path)
    assert found.modules == {"nvfp4": 11, "mxfp4": 3} and found.scales.keys() == {"nvfp4", "mxfp4"}
    weights = 3 * 64 * 128
    assert found.scales["mxfp4"]["codes"] == weights
    mx, nv = weights * 4.25, (found.weights_packed - weights) * 4.5 + 11 * 32
    assert math.isclose(found.bits_per_weight, (mx + nv) / found.weights_packed)


def test_corrections_are_counted(tmp_path):
    """Outliers and macro factors are bits of the weights they belong to."""
    plain = inspect(case("qwen3", "mxfp4").folder).bits_per_weight
    model = case("qwen3", "mxfp4").quantize(macro_block="static", outlier_fallback=0.01)
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = sum(t.nbytes for key, t in tensors.items() if "_macro_scale" in key or "_outlier_" in key)
    assert more > 0 and math.isclose(found.bits_per_weight, plain + 8 * more / found.weights_packed)
    assert found.recipe["macro_block"] == "static" and found.recipe["outlier_fallback"] == 0.01


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_other_tools(name):
    """Any layout; nothing of ours is claimed, and every byte is accounted for."""
    found = inspect(GOLDEN / name)
    assert found.recipe is None and name.startswith(found.layout) and found.origin.split()[0] == found.layout
    assert found.bytes_packed + found.bytes_plain + found.bytes_skipped == found.nbytes
    assert found.bits_per_weight >= 4.25 and sum(found.modules.values()) > 0  # far more where tiny matrices are padded
    assert found.scales.keys() == found.modules.keys()
    assert (found.bytes_skipped > 0) == bool(found.skipped)
