# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints that were damaged, edited or mixed up: each a ValueError before a wrong number is computed."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_bad_input import DOWN, EXPERT, edited, poke, put
from tiny_models import auto_class, case, file_bytes, outputs

NAMES = {"portable": "llama", "own": "qwen3_moe"}
LAYER = {"portable": DOWN, "own": EXPERT}
CODES = {"portable": "weight_packed", "own": "weight"}
layouts = pytest.mark.parametrize("layout", ["portable", "own"])
BELONG = (
    r"the checkpoint does not hold what its quantization_config promises: .*do not belong together, or were edited"
)


def refuse(layout, tmp_path, match, change=None, config=None, format="nvfp4", **kwargs):
    """A changed checkpoint does not load; the message tells what was found."""
    name = NAMES[layout]
    folder = edited(case(name, format).folder, tmp_path / "checkpoint", change, config)
    before = file_bytes(folder)
    with pytest.raises(ValueError, match=match):
        auto_class(name).from_pretrained(folder, **kwargs)
    assert file_bytes(folder) == before


@layouts
@pytest.mark.parametrize("part", ["codes", "weight_scale", "weight_global_scale"])
@pytest.mark.parametrize("mismatches", [False, True])
def test_missing_tensor(layout, part, mismatches, tmp_path):
    key = f"{LAYER[layout]}.{CODES[layout] if part == 'codes' else part}"
    found = "0 of 1" if layout == "portable" else "7 of 8"
    refuse(
        layout, tmp_path, rf"{found} tensors found.*{BELONG[-30:]}", put(key, None), ignore_mismatched_sizes=mismatches
    )


@layouts
@pytest.mark.parametrize(
    "part, value, found",
    [
        ("codes", lambda old: old[:-1], r"U8 \[\d+, \d+\] in model.safetensors, expected U8 \["),
        ("codes", lambda old: old.view(torch.int8), r"I8 \[.*expected U8"),
        ("codes", lambda old: torch.cat([old, old], 1).to(torch.bfloat16), r"BF16 \[.*expected U8"),
        ("weight_scale", lambda old: old.float(), r"F32 \[.*expected F8_E4M3"),
        ("weight_scale", lambda old: old.view(torch.uint8), r"U8 \[.*expected F8_E4M3"),
        (
            "weight_scale",
            lambda old: old.view(torch.uint8).t().contiguous().view(old.dtype),
            r"F8_E4M3 \[.*expected F8",
        ),
        ("weight_global_scale", lambda old: old.to(torch.bfloat16), r"BF16 \[1\] in .*expected F32 \[1\]"),
        ("weight_global_scale", lambda old: old[0].clone(), r"F32 \[\] in model.safetensors, expected F32 \[1\]"),
        ("weight_global_scale", lambda old: old.repeat(2), r"F32 \[2\] in model.safetensors, expected F32 \[1\]"),
    ],
)
def test_wrong_dtype_or_shape(layout, part, value, found, tmp_path):
    key = f"{LAYER[layout]}.{CODES[layout] if part == 'codes' else part}"
    refuse(layout, tmp_path, rf"{key}: {found}", put(key, value))


@layouts
@pytest.mark.parametrize("formats", [("nvfp4", "mxfp4"), ("mxfp4", "nvfp4")])
def test_tensors_of_the_other_format(layout, formats, tmp_path):
    """An MXFP4 checkpoint under an NVFP4 config, and the other way round."""
    tensors = load_file(case(NAMES[layout], formats[1]).folder / "model.safetensors")

    def change(old):
        old.clear()
        old.update(tensors)

    refuse(layout, tmp_path, BELONG, change, format=formats[0])


@layouts
@pytest.mark.parametrize("byte, format", [(0x7F, "nvfp4"), (0xFF, "nvfp4"), (0xB0, "nvfp4"), (255, "mxfp4")])
def test_bad_block_scale(layout, byte, format, tmp_path):
    """NaN and negative block scales."""
    key = f"{LAYER[layout]}.weight_scale"
    change = poke(key, 3, 1, value=byte, dtype=torch.uint8)
    match = (
        rf"{'up' if layout == 'own' else 'down'}_proj.*: 1 block scales are negative, NaN or out of {format}'s range"
    )
    refuse(layout, tmp_path, match, change, format=format)


@layouts
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_tensor_scale(layout, value, tmp_path):
    change = put(f"{LAYER[layout]}.weight_global_scale", torch.tensor([value]))
    refuse(layout, tmp_path, r"proj.*: the tensor scale is \[.*not a positive number", change)


@layouts
@pytest.mark.parametrize("damage", ["short", "header only", "8 bytes", "empty", "text", "no end", "longer"])
def test_damaged_file(layout, damage, tmp_path):
    folder = edited(case(NAMES[layout]).folder, tmp_path / "checkpoint")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(
        {
            "short": content[:-1],
            "header only": content[:header],
            "8 bytes": content[:8],
            "empty": b"",
            "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "no end": content[: header - 3],
            "longer": content + b"\0" * 64,
        }[damage]
    )
    expected = r"model.safetensors (is damaged|is not a safetensors file).*Download it again"
    with pytest.raises(ValueError, match=expected):
        auto_class(NAMES[layout]).from_pretrained(folder)


def test_missing_shard(tmp_path):
    case("llama").model.save_pretrained(tmp_path, max_shard_size="20KB")
    shard = next(tmp_path.glob("model-00002*.safetensors"))
    shard.unlink()
    with pytest.raises((OSError, ValueError), match=shard.name):
        auto_class("llama").from_pretrained(tmp_path)


@layouts
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"hidden_size": 128}, BELONG),
        ({"intermediate_size": 256, "moe_intermediate_size": 64}, BELONG),
        ({"num_hidden_layers": 3}, r"model.layers.2.*: 0 of \d tensors found"),
        ({"num_experts": 3, "attention_bias": True, "num_key_value_heads": 1}, BELONG),
        ({"num_experts": 5, "num_key_value_heads": 4}, BELONG),
    ],
)
def test_config_of_another_size(layout, changes, match, tmp_path):
    refuse(layout, tmp_path, match, config=lambda config: config.update(changes))


def change_recipe(**fields):
    def change(config):
        stored = config["quantization_config"]
        stored.get("hf_mxfp4", stored).update(fields)

    return change


@layouts
def test_recipe_of_another_format(layout, tmp_path):
    refuse(layout, tmp_path, BELONG, config=change_recipe(format="mxfp4"))


@layouts
@pytest.mark.parametrize(
    "fields",
    [
        {"overrides": {r"self_attn\.q_proj": "skip"}},
        {"overrides": {r"experts|down_proj": "skip"}},
        {"modules_to_not_convert": ["q_proj"]},
        {"modules_to_not_convert": ["experts", "down_proj"]},
    ],
    ids=str,
)
def test_recipe_that_leaves_out_what_is_packed(layout, fields, tmp_path):
    """Tensors are packed, the config says they are not: an error, or the right numbers."""
    name = NAMES[layout]
    folder = edited(case(name).folder, tmp_path / "checkpoint", config=change_recipe(**fields))
    try:
        model = auto_class(name).from_pretrained(folder)
    except (ValueError, RuntimeError) as error:
        assert any(word in str(error) for word in ("proj", "experts", "mismatched"))
    else:
        assert torch.equal(outputs(model), outputs(case(name).model))


@layouts
def test_recipe_that_packs_what_is_not(layout, tmp_path):
    """A dense head, the config says it is packed: an error, or the right numbers."""
    name = NAMES[layout]
    folder = edited(case(name).folder, tmp_path / "checkpoint", config=change_recipe(overrides={"lm_head": {}}))
    try:
        model = auto_class(name).from_pretrained(folder)
    except ValueError as error:
        assert "lm_head" in str(error)
    else:
        assert torch.equal(outputs(model), outputs(case(name).model))


@layouts
def test_pickle_file(layout, tmp_path):
    """A quantized checkpoint in a .bin file is not unpickled."""
    name = NAMES[layout]
    folder = edited(case(name).folder, tmp_path / "checkpoint")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin: FP4 checkpoints are read from safetensors only"):
        auto_class(name).from_pretrained(folder)


@layouts
def test_state_dict_argument(layout):
    """Tensors handed over in memory: the right numbers if they are all there, an error if one is not."""
    name = NAMES[layout]
    cls, config = type(case(name).model), transformers.AutoConfig.from_pretrained(case(name).folder)
    tensors = load_file(case(name).folder / "model.safetensors")
    model = cls.from_pretrained(None, config=config, state_dict=dict(tensors))
    assert torch.equal(outputs(model), outputs(case(name).model))
    tensors.pop(f"{LAYER[layout]}.{CODES[layout]}")
    config = transformers.AutoConfig.from_pretrained(case(name).folder)
    with pytest.raises((ValueError, RuntimeError), match="proj|issues during automatic conversion"):
        cls.from_pretrained(None, config=config, state_dict=tensors)


def test_dense_weights_under_a_packed_config(tmp_path):
    """The full-precision file put beside a packed model's config.json."""
    for layout, name in NAMES.items():
        folder = tmp_path / layout
        shutil.copytree(case(name).folder, folder)
        case(name).dense.save_pretrained(tmp_path / f"{layout}-dense")
        shutil.copy(tmp_path / f"{layout}-dense" / "model.safetensors", folder / "model.safetensors")
        with pytest.raises(ValueError, match=BELONG):
            auto_class(name).from_pretrained(folder)


def test_extra_tensors_are_reported(tmp_path):
    """Tensors nothing asks for are in transformers' report, as for any checkpoint."""
    change = lambda tensors: tensors.update({"extra.weight": torch.zeros(1)})  # noqa: E731
    folder = edited(case("llama").folder, tmp_path / "checkpoint", change)
    model, report = auto_class("llama").from_pretrained(folder, output_loading_info=True)
    assert list(report["unexpected_keys"]) == ["extra.weight"]
    assert torch.equal(outputs(model), outputs(case("llama").model))
