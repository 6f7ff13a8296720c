# SPDX-License-Identifier: Apache-2.0
"""checkpoints.py: the config compressed-tensors itself writes, safetensors headers, and what damaged files say."""

import json
import re
import struct

import compressed_tensors
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from safetensors.torch import save_file

from hf_mxfp4.checkpoint_files import SAFETENSORS_DTYPES, StoredTensor, read_header
from hf_mxfp4.checkpoints import (
    HF_MXFP4_KEY,
    WRITTEN,
    Expected,
    check_scales,
    check_stored,
    compressed_tensors_config,
    key_pattern,
)
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4

PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


class Tower(torch.nn.Module):
    """Two layers of two linears, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(64, 32), "down": torch.nn.Linear(32, 64)}) for _ in range(2)
        )
        self.lm_head = torch.nn.Linear(64, 8)


LAYERS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


# --- the portable config ---------------------------------------------------------------------------------------------


def written_by_compressed_tensors(preset: str, folder) -> dict:
    """`quantization_config` as its own compressor writes it into config.json."""
    model = Tower()
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.update_config(str(folder))
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@both_formats
def test_config_is_what_compressed_tensors_writes(fmt, tmp_path):
    """Key for key, value for value.

    Divergence: its `version` and three keys without content, which its readers do not need. `moe_sparsity_config` is
    unknown to releases before 0.20.
    """
    theirs = written_by_compressed_tensors(PRESETS[fmt.name], tmp_path)
    ours = json.loads(json.dumps(compressed_tensors_config(dict.fromkeys(LAYERS, fmt), ["lm_head"])))
    assert theirs.pop("version") == compressed_tensors.__version__
    assert not any(theirs.pop(key, None) for key in ("moe_sparsity_config", "sparsity_config", "transform_config"))
    assert ours == theirs


@both_formats
def test_config_is_the_documented_dump(fmt):
    """As text, so that a change of either side shows here."""
    group = {
        "nvfp4": '"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"',
        "mxfp4": '"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"',
    }[fmt.name]
    expected = json.loads(
        '{"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", '
        f'"symmetric": true, "dynamic": false, {group}}}, "input_activations": null, "output_activations": null, '
        f'"format": "{fmt.name}-pack-quantized"}}}}, "quant_method": "compressed-tensors", "kv_cache_scheme": null, '
        f'"format": "{fmt.name}-pack-quantized", "quantization_status": "compressed", '
        '"global_compression_ratio": null, "ignore": ["a.b", "lm_head"]}'
    )
    assert compressed_tensors_config({"x": fmt}, ["lm_head", "a.b"]) == expected


@both_formats
def test_compressed_tensors_parses_it(fmt):
    """And dumps the same again; our extra key does not disturb it."""
    ours = compressed_tensors_config(dict.fromkeys(LAYERS, fmt), ["lm_head"])
    for stored in (ours, {**ours, HF_MXFP4_KEY: {"format": fmt.name, "version": 1}}):
        parsed = QuantizationConfig.model_validate({k: v for k, v in stored.items() if k != HF_MXFP4_KEY})
        dumped = parsed.model_dump()
        assert not dumped.pop("moe_sparsity_config", None)
        assert dumped == ours


def test_mixed_formats():
    """Every linear gets its own scheme when compressed-tensors applies the config."""
    modules = {"layers.0.up": MXFP4, "layers.0.down": NVFP4, "layers.1.up": NVFP4, "layers.1.down": MXFP4}
    modules["layers.2.up"] = NVFP4  # the majority
    config = compressed_tensors_config(modules, ["lm_head"])
    assert config["format"] == "mixed-precision"
    groups = config["config_groups"]
    assert [(g["targets"], g["format"]) for g in groups.values()] == [
        (["layers.0.up", "layers.1.down"], "mxfp4-pack-quantized"),
        (["Linear"], "nvfp4-pack-quantized"),
    ]
    model = Tower()
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for name in LAYERS:
        weights = model.get_submodule(name).quantization_scheme.weights
        assert (weights.group_size, weights.num_bits) == (modules[name].block_size, 4)
    assert not hasattr(model.lm_head, "quantization_scheme")


def test_layouts():
    assert WRITTEN["portable"] == ("compressed-tensors", "weight_packed")
    assert WRITTEN["own"] == ("hf_mxfp4", "weight")


# --- safetensors headers ---------------------------------------------------------------------------------------------


def test_header(tmp_path):
    tensors = {
        "a.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "a.weight_global_scale": torch.ones(1),
        "a.bias": torch.zeros(4, dtype=torch.bfloat16),
        "b.weight": torch.zeros(0, 8, dtype=torch.float16),
        "scalar": torch.tensor(1.0),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    for given_as in (path, str(path)):
        header = read_header(given_as)
        assert header == {
            name: StoredTensor(
                SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), "model.safetensors", tensor.nbytes
            )
            for name, tensor in tensors.items()
        }


def test_header_of_an_empty_file_of_tensors(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    assert read_header(tmp_path / "none.safetensors") == {}


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(start: int, end: int) -> dict:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


GOOD = with_header(json.dumps({"a": entry(0, 4), "b": entry(4, 10)}).encode(), bytes(10))
DAMAGED = {
    "no bytes": b"",
    "seven bytes": b"\0" * 7,
    "length alone": struct.pack("<Q", 100),
    "length beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "length beyond any file": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header cut short": GOOD[:30],
    "data cut short": GOOD[:-1],
    "no data": GOOD[:-10],
    "a byte too long": GOOD + b"\0",
    "two files": GOOD + GOOD,
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n",
    "html": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "zip": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(64),
    "not JSON": with_header(b"{'a': 1}"),
    "not UTF-8": with_header(b"\xff\xfe{}"),
    "JSON, but a list": with_header(b"[1, 2]"),
    "JSON, but a number": with_header(b"12345678"),
    "entries without offsets": with_header(b'{"a": {"dtype": "U8", "shape": [1]}}'),
    "entries that are no dicts": with_header(b'{"a": 7}'),
    "offsets that are no numbers": with_header(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": ["x", "y"]}}'),
    "entries without a shape": with_header(b'{"a": {"dtype": "U8", "data_offsets": [0, 1]}}', b"\0"),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(content, tmp_path):
    """A ValueError with the file's name and what to do, never another exception."""
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_header(path)
    assert "model-00001-of-00002.safetensors" in str(error.value)
    assert "Download it again" in str(error.value)


def test_a_good_file_cut_anywhere(tmp_path):
    path = tmp_path / "model.safetensors"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(ValueError, match="Download it again"):
            read_header(path)
    path.write_bytes(GOOD)
    assert read_header(path) == {"a": ("U8", (4,), path.name, 4), "b": ("U8", (6,), path.name, 6)}


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "model.safetensors")


# --- what modules need, and what there is ----------------------------------------------------------------------------

NEEDED = {
    "l.weight_packed": Expected(torch.uint8, (4, 32)),
    "l.weight_scale": Expected(torch.float8_e4m3fn, (4, 4)),
    "l.weight_global_scale": Expected(torch.float32, (1,)),
    "experts.gate_up_proj": Expected(torch.uint8, (8, 32), count=4),
}


def all_found() -> dict[str, list[tuple[str, StoredTensor]]]:
    return {
        name: [
            (f"{name}.{i}", StoredTensor(SAFETENSORS_DTYPES[need.dtype], need.shape, "f.safetensors"))
            for i in range(need.count)
        ]
        for name, need in NEEDED.items()
    }


def refusal(expected, found) -> str:
    with pytest.raises(ValueError) as error:
        check_stored(expected, found)
    message = str(error.value)
    assert "quantization_config" in message and "download or quantize it again" in message
    return message


def test_all_there():
    check_stored(NEEDED, all_found())
    check_stored(NEEDED, {**all_found(), "something.else": []})
    check_stored({}, {})


def test_missing_tensors():
    found = all_found()
    del found["l.weight_scale"]
    found["experts.gate_up_proj"].pop()
    message = refusal(NEEDED, found)
    assert "l.weight_scale: 0 of 1 tensors found" in message
    assert "experts.gate_up_proj: 3 of 4 tensors found" in message


def test_too_many_tensors():
    found = all_found()
    found["l.weight_scale"] *= 2
    assert "l.weight_scale: 2 of 1 tensors found" in refusal(NEEDED, found)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (StoredTensor("U8", (4, 4), "f.safetensors"), "k: U8 [4, 4] in f.safetensors, expected F8_E4M3 [4, 4]"),
        (
            StoredTensor("F8_E4M3", (4, 5), "g.safetensors"),
            "k: F8_E4M3 [4, 5] in g.safetensors, expected F8_E4M3 [4, 4]",
        ),
        (StoredTensor("F8_E4M3", (16,), "f.safetensors"), "k: F8_E4M3 [16] in f.safetensors, expected F8_E4M3 [4, 4]"),
        (StoredTensor("BF16", (), "f.safetensors"), "k: BF16 [] in f.safetensors, expected F8_E4M3 [4, 4]"),
    ],
)
def test_other_dtype_or_shape(stored, said):
    assert said in refusal(NEEDED, {**all_found(), "l.weight_scale": [("k", stored)]})


def test_five_are_named_and_the_rest_counted():
    needed = {f"l.{i}": Expected(torch.uint8, (1,)) for i in range(9)}
    message = refusal(needed, {})
    assert [i for i in range(9) if f"l.{i}:" in message] == [0, 1, 2, 3, 4]
    assert "(and 4 more)" in message
    assert "more)" not in refusal(dict(list(needed.items())[:5]), {})


# --- damaged scales --------------------------------------------------------------------------------------------------


@both_formats
def test_every_scale_byte_is_judged(fmt):
    """Legal: what decodes to a positive number, or to zero where only zero can be meant by the encoder."""
    for byte in range(256):
        scale = fmt.scale_from_bytes(torch.tensor([[fmt.zero_byte, byte]], dtype=torch.uint8))
        value = float(fmt.decode_scale(scale)[0, 1])
        if value > 0:
            check_scales("l.weight_scale", fmt, scale, None)
        else:  # NaN, zero, or negative, as its docstring says
            with pytest.raises(ValueError, match="l.weight_scale: 1 block scales"):
                check_scales("l.weight_scale", fmt, scale, None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), -float("inf"), -0.0])
def test_bad_tensor_scales(value):
    scale = torch.ones(2, 2).to(torch.float8_e4m3fn)
    check_scales("l", NVFP4, scale, torch.tensor([1.0, 2.0**-100]))
    for bad in (torch.tensor(value), torch.tensor([1.0, value])):
        with pytest.raises(ValueError, match=r"l: the tensor scale is \[.*\], not a positive number"):
            check_scales("l", NVFP4, scale, bad)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("layers.12.q_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.weight_scale", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.xq_proj.weight", False),
        ("model.layers.0.self_attn.qxproj.weight", False),
        ("model.layers.0.mlp.experts.0.q_proj.weight", False),
        ("model.layers.0.mlp.experts.63.q_proj.weight", False),
        ("model.layers.0.mlp.experts.255.q_proj.weight", False),
        ("model.layers.0.mlp.shared_experts.q_proj.weight", True),
        ("q_proj.weight", True),
    ],
)
def test_key_pattern(key, matches):
    assert bool(re.search(key_pattern("q_proj.weight"), key)) == matches
