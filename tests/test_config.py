# SPDX-License-Identifier: Apache-2.0
"""config.py: what is refused and with which words, what is stored, and how overrides are merged."""

import copy
import inspect
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_mxfp4 import reference
from hf_mxfp4.checkpoints import HF_MXFP4_KEY, compressed_tensors_config
from hf_mxfp4.config import FIELDS, QUANT_METHOD, FP4Config, quantize
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions

# --- validation ------------------------------------------------------------------------------------------------------

NVFP4_RULES = [name for name, rule in SCALE_RULES.items() if "nvfp4" in rule.formats]
INVALID = [
    # arguments, what the message must hold
    ({"format": "fp4"}, ["format='fp4'", *FORMATS]),
    ({"format": None}, ["format=None", *FORMATS]),
    ({"format": NVFP4}, ["format=", *FORMATS]),
    ({"scale_rule": "mse"}, ["scale_rule='mse'", *SCALE_RULES]),
    ({"scale_rule": "ceil"}, ["scale_rule='ceil'", "format='nvfp4'", *NVFP4_RULES]),
    ({"scale_rule": "four_over_six", "format": "mxfp4"}, ["scale_rule='four_over_six'", "amax", "ceil", "soar"]),
    ({"search": "local"}, ["search='local'", '"full"', "0 to 16"]),
    ({"search": -1}, ["search=-1", '"full"', "0 to 16"]),
    ({"search": 17}, ["search=17", "0 to 16"]),
    ({"search": 2.0}, ["search=2.0", "int"]),
    ({"search": True}, ["search=True", "int"]),
    ({"search": None}, ["search=None", '"full"']),
    ({"global_scale": "exact"}, ["global_scale='exact'", "power_of_two", "free"]),
    ({"global_scale": "free", "format": "mxfp4"}, ['global_scale="free"', "mxfp4"]),
    ({"iterations": 0}, ["iterations=0", "1 to 1000"]),
    ({"iterations": 1001}, ["iterations=1001", "1 to 1000"]),
    ({"iterations": 3.0}, ["iterations=3.0", "int"]),
    ({"iterations": True}, ["iterations=True", "int"]),
    ({"scale_rule": "amax", "search": 2}, ["search", '"soar"', "'amax'"]),
    ({"scale_rule": "amax", "global_scale": "free"}, ["global_scale", '"soar"', "'amax'"]),
    ({"scale_rule": "four_over_six", "iterations": 5}, ["iterations", '"soar"', "'four_over_six'"]),
    ({"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert='lm_head'", "list of strings"]),
    ({"modules_to_not_convert": ["(["]}, ["modules_to_not_convert: '(['", "regular expression"]),
    ({"modules_to_not_convert": ["a", 1]}, ["modules_to_not_convert=", "list of strings"]),
    ({"compute_dtype": "int8"}, ["compute_dtype='int8'", "None", "bfloat16", "float16", "float32"]),
    ({"compute_dtype": torch.float64}, ["compute_dtype=torch.float64", "bfloat16", "float16", "float32"]),
    ({"compute_dtype": ["bfloat16"]}, ["compute_dtype=", "bfloat16", "float16", "float32"]),
    ({"compute_dtype": ""}, ["compute_dtype=", "bfloat16", "float16", "float32"]),
    ({"compute_dtype": False}, ["compute_dtype=", "bfloat16", "float16", "float32"]),
    ({"layout": "gguf"}, ["layout='gguf'", "auto", "portable", "own"]),
    ({"on_unsupported": "ignore"}, ["on_unsupported='ignore'", "error", "keep"]),
    ({"dequantize": 1}, ["dequantize=1", "bool"]),
    ({"dequantize": "yes"}, ["dequantize='yes'", "bool"]),
    ({"backend": "cuda"}, ["backend='cuda'", "auto", "triton", "torch"]),
    ({"overrides": ["lm_head"]}, ["overrides=", '"skip"', "dict"]),
    ({"overrides": {"(": "skip"}}, ["overrides", "'('", "regular expression"]),
    ({"overrides": {7: "skip"}}, ["overrides", "7", "regular expression"]),
    ({"overrides": {"a": "keep"}}, ["overrides['a']='keep'", '"skip"', "dict", "format", "iterations"]),
    ({"overrides": {"a": None}}, ["overrides['a']=None", '"skip"']),
    ({"overrides": {"a": {"format": "fp8"}}}, ["format='fp8'", *FORMATS]),
    ({"overrides": {"a": {"scale_rule": "mse"}}}, ["scale_rule='mse'", *SCALE_RULES]),
    ({"overrides": {"a": {"scale_rule": ["soar"]}}}, ["scale_rule=['soar']", *SCALE_RULES]),
    ({"overrides": {"a": {"scale_rule": "ceil"}}}, ["scale_rule='ceil'", "format='nvfp4'"]),
    ({"overrides": {"a": {"search": 99}}}, ["search=99", "0 to 16"]),
    ({"overrides": {"a": {"format": "mxfp4", "global_scale": "free"}}}, ['global_scale="free"', "mxfp4"]),
    ({"overrides": {"a": {"scale_rule": "amax", "search": 2}}}, ["search", '"soar"', "'amax'"]),
    (
        {"overrides": {"a": {"scale_rul": "amax"}}},
        ["overrides['a']", "scale_rul (did you mean scale_rule?)", "format", "scale_rule", "search", "iterations"],
    ),
    ({"overrides": {"a": {"layout": "own"}}}, ["overrides['a']", "layout", "format", "global_scale"]),
]


@pytest.mark.parametrize(("arguments", "parts"), INVALID, ids=[str(arguments) for arguments, _ in INVALID])
def test_invalid_values(arguments, parts):
    """A ValueError that quotes what was given and lists what is allowed."""
    with pytest.raises(ValueError) as error:
        FP4Config(**arguments)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("scale_rules", "scale_rule"), ("modules_to_not_covert", "modules_to_not_convert"), ("dequantise", "dequantize")],
)
def test_unknown_arguments(wrong, right):
    with pytest.raises(TypeError) as error:
        FP4Config(**{wrong: "soar"})
    assert f"{wrong} (did you mean {right}?)" in str(error.value)
    assert all(name in str(error.value) for name in FIELDS)
    with pytest.raises(TypeError, match=r"unknown arguments: xyzzy\. Allowed: format, "):
        FP4Config(xyzzy=1)


def test_signature():
    """What `help` and editors show."""
    parameters = inspect.signature(FP4Config).parameters
    assert tuple(parameters)[: len(FIELDS)] == FIELDS
    assert FIELDS[:3] == ("format", "scale_rule", "search")
    assert parameters["format"].default == "nvfp4"
    assert all(f"        {name} (" in FP4Config.__doc__ for name in FIELDS)


def test_defaults():
    config = FP4Config()
    assert (config.format, config.scale_rule, config.search, config.global_scale) == (
        *("nvfp4", "soar", "full", "power_of_two"),
    )
    assert config.quant_method == QUANT_METHOD == "hf_mxfp4"
    assert config.recipe() == (NVFP4, "soar", ScaleOptions(), None)
    assert config.compute_dtype is None and config.modules_to_not_convert is None and config.overrides is None


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_compute_dtype_by_name_or_dtype(name):
    for given_as in (name, getattr(torch, name)):
        config = FP4Config(compute_dtype=given_as)
        assert config.compute_dtype is getattr(torch, name)
        assert config.to_dict()["compute_dtype"] == name


# --- what is stored --------------------------------------------------------------------------------------------------


@st.composite
def recipes(draw, format=None):
    """Keyword arguments of a valid recipe."""
    fmt = format or draw(st.sampled_from(list(FORMATS)))
    rule = draw(st.sampled_from([name for name, row in SCALE_RULES.items() if fmt in row.formats]))
    values = {"format": fmt, "scale_rule": rule}
    if rule == "soar":
        values["search"] = draw(st.one_of(st.just("full"), st.integers(0, 16)))
        values["iterations"] = draw(st.integers(1, 1000))
        if FORMATS[fmt].has_global_scale:
            values["global_scale"] = draw(st.sampled_from(["power_of_two", "free"]))
    if fmt == "mxfp4":
        full = rule == "soar" and values["search"] == "full"
        values["macro_block"] = draw(st.sampled_from([None, "static", "search"] if full else [None, "static"]))
    return values


NAMES = st.sampled_from(["lm_head", r"layers\.0\.", "q_proj$", "model.layers.*.mlp", "embed", "(gate|up)_proj"])


def possible(values):
    corrected = values.get("outlier_fallback") or values.get("macro_block")
    return values | {"layout": "own"} if corrected else values


arguments = st.builds(
    lambda recipe, others: possible({**recipe, **others}),
    recipes(),
    st.fixed_dictionaries(
        {},
        optional={
            "outlier_fallback": st.just(0.0) | st.floats(0, 0.1),
            "activation_format": st.sampled_from([None, "same"]),
            "modules_to_not_convert": st.none() | st.lists(NAMES, max_size=3),
            "overrides": st.none() | st.dictionaries(NAMES, st.just("skip") | st.just({}) | recipes(), max_size=3),
            "compute_dtype": st.sampled_from([None, "bfloat16", "float16", torch.float32]),
            "layout": st.sampled_from(["auto", "portable", "own"]),
            "on_unsupported": st.sampled_from(["error", "keep"]),
            "dequantize": st.booleans(),
            "backend": st.sampled_from(["auto", "triton", "torch"]),
        },
    ),
)
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head", "model.embed_tokens", "")


def behave_alike(one: FP4Config, other: FP4Config) -> bool:
    """Every field and every module's recipe."""
    return all(getattr(one, name) == getattr(other, name) for name in FIELDS) and all(
        (one.override(name), one.recipe(name)) == (other.override(name), other.recipe(name)) for name in MODULES
    )


@settings(max_examples=50)
@given(arguments)
def test_round_trips(values):
    """dict, JSON text, JSON file's text, copy, deepcopy, pickle: the same config, and a plain JSON dict."""
    config = FP4Config(**values)
    stored = config.to_dict()
    assert stored["quant_method"] == "hf_mxfp4" and stored["version"] == 1
    assert set(stored) == {"quant_method", "version", *FIELDS} - {"fuse_projections"}
    assert json.loads(json.dumps(stored)) == stored
    for again in (
        FP4Config.from_dict(stored),
        FP4Config.from_dict(json.loads(config.to_json_string())),
        FP4Config.from_dict(json.loads(config.to_json_string(use_diff=False))),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert behave_alike(config, again)
        assert again.to_dict() == stored
        assert again == config


@given(arguments)
def test_portable_round_trip(values):
    """Beside compressed-tensors' own keys, which stay as they were."""
    config = FP4Config(**values)
    config.stored = compressed_tensors_config({"a": NVFP4, "b": MXFP4}, ["lm_head"])
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["quant_method"] == "compressed-tensors"
    assert {key: value for key, value in stored.items() if key != HF_MXFP4_KEY} == config.stored
    assert set(stored[HF_MXFP4_KEY]) == {"version", *FIELDS} - {"fuse_projections"}
    again = FP4Config.from_dict(stored)
    assert behave_alike(config, again) and again.stored == config.stored
    assert again.quant_method == "hf_mxfp4"
    assert again.to_dict() == stored


def test_equality():
    assert FP4Config() == FP4Config(format="nvfp4")
    for other in (FP4Config(format="mxfp4"), FP4Config(search=2), FP4Config(overrides={"a": "skip"})):
        assert FP4Config() != other
    assert FP4Config() != {"quant_method": "hf_mxfp4"}


def test_every_value_is_stored():
    """Defaults too: a checkpoint must not change its meaning when a default does."""
    assert json.loads(FP4Config().to_json_string()).keys() == FP4Config().to_dict().keys()
    assert FP4Config().to_diff_dict() == FP4Config().to_dict()


def test_a_stored_dict_is_not_the_config():
    """Changing what `to_dict` returned, or what was passed in, leaves the config as it was validated."""
    overrides, skip = {"a": {"format": "mxfp4"}}, ["lm_head"]
    config = FP4Config(overrides=overrides, modules_to_not_convert=skip)
    before = copy.deepcopy(config.to_dict())
    stored = config.to_dict()
    stored["overrides"].clear()
    stored["modules_to_not_convert"].append("b")
    assert config.to_dict() == before
    overrides["a"]["format"] = "fp8"
    skip.append("b")
    assert config.to_dict() == before


def test_from_dict_leaves_its_argument():
    for config in (FP4Config(), FP4Config(format="mxfp4", overrides={"a": "skip"})):
        stored = config.to_dict()
        before = copy.deepcopy(stored)
        FP4Config.from_dict(stored, backend="torch")
        assert stored == before


def test_the_order_of_overrides_survives():
    """The first match wins, and transformers writes config.json with sorted keys."""
    config = FP4Config(overrides={"q_proj": {"search": 2}, "proj": "skip", "a": {"search": 3}, ".": {"search": 4}})
    model_config = PreTrainedConfig()
    model_config.quantization_config = config
    for text in (
        config.to_json_string(),
        json.dumps(json.loads(model_config.to_json_string())["quantization_config"]),
        json.dumps(json.loads(model_config.to_json_string(use_diff=False))["quantization_config"]),
    ):
        again = FP4Config.from_dict(json.loads(text))
        assert again.recipe("q_proj").options.search == 2
        assert again.recipe("k_proj") is None
        assert again.recipe("gate").options.search == 3
        assert behave_alike(config, again)


def test_tuples_are_stored_as_lists():
    """JSON knows no tuples; what is read back must equal what was written."""
    config = FP4Config(modules_to_not_convert=("lm_head",))
    again = FP4Config.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("portable", [False, True])
def test_fields_of_the_future(portable):
    """Named, with what this version knows and what to do."""
    config = FP4Config()
    if portable:
        config.stored = compressed_tensors_config({"a": NVFP4}, [])
    stored = config.to_dict()
    fields = stored[HF_MXFP4_KEY] if portable else stored
    fields["scale_rulez"], fields["rotation"] = "soar", "hadamard"
    with pytest.raises(ValueError) as error:
        FP4Config.from_dict(stored)
    message = str(error.value)
    assert "rotation" in message and "scale_rulez (did you mean scale_rule?)" in message
    assert all(name in message for name in FIELDS) and "newer" in message

    fields = (stored := config.to_dict())[HF_MXFP4_KEY] if portable else (stored := config.to_dict())
    fields["version"] = 2
    with pytest.raises(ValueError, match=r"version 2.*reads version 1.*newer"):
        FP4Config.from_dict(stored)


def test_missing_fields_take_defaults():
    assert behave_alike(FP4Config.from_dict({"quant_method": "hf_mxfp4", "format": "mxfp4"}), FP4Config("mxfp4"))
    assert behave_alike(FP4Config.from_dict({}), FP4Config())


def test_stored_values_are_validated():
    with pytest.raises(ValueError, match="format='fp8'"):
        FP4Config.from_dict({"format": "fp8"})


# --- transformers' mixin ---------------------------------------------------------------------------------------------


def test_from_dict_with_keywords():
    """Keywords that are fields replace what is stored and are validated; others come back, if asked for."""
    stored = FP4Config(search=2).to_dict()
    config, unused = FP4Config.from_dict(stored, return_unused_kwargs=True, backend="torch", device_map="auto")
    assert (config.search, config.backend, unused) == (2, "torch", {"device_map": "auto"})
    config, unused = FP4Config.from_dict(stored, return_unused_kwargs=True)
    assert isinstance(config, FP4Config) and unused == {}
    assert isinstance(FP4Config.from_dict(stored, device_map="auto"), FP4Config)
    with pytest.raises(ValueError, match="backend='cuda'"):
        FP4Config.from_dict(stored, backend="cuda")


def test_repr_and_json():
    config = FP4Config(format="mxfp4", compute_dtype=torch.bfloat16, overrides={"lm_head": "skip"})
    assert repr(config) == f"FP4Config {config.to_json_string()}"
    assert json.loads(config.to_json_string()) == config.to_dict()


def test_json_file(tmp_path):
    config = FP4Config(format="mxfp4", compute_dtype=torch.bfloat16)
    config.to_json_file(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()


def test_update_returns_what_is_unused():
    config = FP4Config()
    assert config.update(backend="torch", unheard_of=1) == {"unheard_of": 1}
    assert config.backend == "torch"


def test_transformers_finds_the_config():
    """By `quant_method`, from a dict as it stands in config.json."""
    config = FP4Config(format="mxfp4", search=3)
    found = AutoQuantizationConfig.from_dict(config.to_dict())
    assert type(found) is FP4Config and behave_alike(found, config)


def test_loading_attributes():
    """What a config passed beside a checkpoint may change."""
    config = FP4Config(dequantize=True, backend="torch", compute_dtype="float16")
    attributes = config.get_loading_attributes()
    assert attributes.pop("requested") is config
    options = {"dequantize": True, "backend": "torch", "compute_dtype": torch.float16, "fuse_projections": False}
    assert attributes == options


def test_contradictions():
    """Fields a user spelled out, defaults too, with other values than the checkpoint's; what was left out asks for
    nothing."""
    checkpoint = FP4Config(format="mxfp4", scale_rule="ceil")
    assert checkpoint.contradictions(FP4Config()) == []
    assert checkpoint.contradictions(FP4Config(format="mxfp4", backend="torch")) == []
    assert checkpoint.contradictions(FP4Config(scale_rule="amax")) == ["scale_rule='amax' (the checkpoint: 'ceil')"]
    assert checkpoint.contradictions(FP4Config(format="nvfp4")) == ["format='nvfp4' (the checkpoint: 'mxfp4')"]
    for requested in (FP4Config("mxfp4", search=2), copy.deepcopy(FP4Config("mxfp4", search=2))):
        assert FP4Config().contradictions(requested) == [
            "format='mxfp4' (the checkpoint: 'nvfp4')",
            "search=2 (the checkpoint: 'full')",
        ]


# --- overrides -------------------------------------------------------------------------------------------------------


def test_first_override_wins():
    overrides = {r"layers\.0\.": {"format": "mxfp4"}, "q_proj": {"search": 2}, "proj$": "skip", "lm_head": {}}
    config = FP4Config(overrides=overrides)
    assert config.recipe("model.layers.0.q_proj").format is MXFP4
    assert config.recipe("model.layers.1.q_proj") == (NVFP4, "soar", ScaleOptions(search=2), None)
    assert config.recipe("model.layers.1.k_proj") is None and config.override("model.layers.1.k_proj") == "skip"
    assert config.recipe("lm_head") == config.recipe() and config.override("lm_head") == {}
    assert config.override("model.norm") is None and config.recipe("model.norm") == config.recipe()


def test_patterns_are_searched_regexes():
    config = FP4Config(overrides={r"layers\.1\.": "skip", "^embed": "skip"})
    assert config.recipe("model.layers.1.mlp") is None
    assert config.recipe("model.layers.11.mlp") is not None
    assert config.recipe("model.embed_tokens") is not None and config.recipe("embed_tokens") is None


FULL, LOCAL, FREE = ScaleOptions(), ScaleOptions(search=2, iterations=3), ScaleOptions(global_scale="free")


@pytest.mark.parametrize(
    ("base", "override", "recipe"),
    [
        # the override's keys replace the config's
        ({}, {"search": 2, "iterations": 3}, (NVFP4, "soar", LOCAL)),
        ({"search": 2, "iterations": 3}, {"search": "full", "iterations": 10}, (NVFP4, "soar", FULL)),
        ({"search": 2, "iterations": 3}, {}, (NVFP4, "soar", LOCAL)),
        # another format keeps what it can, and takes the default of what it lacks
        ({"search": 2, "iterations": 3}, {"format": "mxfp4"}, (MXFP4, "soar", LOCAL)),
        ({"global_scale": "free"}, {"format": "mxfp4"}, (MXFP4, "soar", FULL)),
        ({"scale_rule": "amax"}, {"format": "mxfp4"}, (MXFP4, "amax", FULL)),
        ({"scale_rule": "four_over_six"}, {"format": "mxfp4"}, (MXFP4, "soar", FULL)),
        ({"format": "mxfp4", "scale_rule": "ceil"}, {"format": "nvfp4"}, (NVFP4, "soar", FULL)),
        ({"scale_rule": "four_over_six"}, {"format": "mxfp4", "scale_rule": "ceil"}, (MXFP4, "ceil", FULL)),
        ({"format": "mxfp4"}, {"format": "nvfp4", "global_scale": "free"}, (NVFP4, "soar", FREE)),
        # another rule drops SOAR's options
        ({"search": 2, "iterations": 3}, {"scale_rule": "amax"}, (NVFP4, "amax", FULL)),
        ({"global_scale": "free"}, {"scale_rule": "four_over_six"}, (NVFP4, "four_over_six", FULL)),
        ({"scale_rule": "amax"}, {"scale_rule": "soar", "search": 2, "iterations": 3}, (NVFP4, "soar", LOCAL)),
        # macro-blocks stay where they can
        ({"format": "mxfp4", "macro_block": "search"}, {}, (MXFP4, "soar", FULL, "search")),
        ({"format": "mxfp4", "macro_block": "search"}, {"format": "nvfp4"}, (NVFP4, "soar", FULL)),
        ({"format": "mxfp4", "macro_block": "search"}, {"scale_rule": "ceil"}, (MXFP4, "ceil", FULL)),
        ({"format": "mxfp4", "macro_block": "static"}, {"scale_rule": "ceil"}, (MXFP4, "ceil", FULL, "static")),
        ({}, {"format": "mxfp4", "macro_block": "search"}, (MXFP4, "soar", FULL, "search")),
    ],
    ids=str,
)
def test_merge_rules(base, override, recipe):
    found = FP4Config(**base, overrides={"mlp": override}).recipe("layers.0.mlp")
    assert found == recipe if len(recipe) == 4 else found == (*recipe, None)


@pytest.mark.parametrize(
    ("base", "override"),
    [
        ({"scale_rule": "amax"}, {"search": 2}),  # amax has no search
        ({"format": "mxfp4"}, {"global_scale": "free"}),
        ({"format": "mxfp4"}, {"scale_rule": "four_over_six"}),
        ({}, {"macro_block": "static"}),  # NVFP4 needs none
        ({"format": "mxfp4", "macro_block": "search"}, {"search": 2}),
        ({"error_feedback": True}, {"scale_rule": "amax"}),
        ({"channel_weights": True}, {"search": 2}),
    ],
    ids=str,
)
def test_overrides_are_checked_with_the_config(base, override):
    FP4Config(**base)
    with pytest.raises(ValueError):
        FP4Config(**base, overrides={"mlp": override})


@given(recipes(), recipes())
def test_a_whole_recipe_as_override_is_that_recipe(base, override):
    """Whatever the config says, an override with every key of a recipe gives that recipe."""
    config = FP4Config(**base, overrides={"mlp": override})
    assert config.recipe("mlp") == FP4Config(**{**{"global_scale": "power_of_two"}, **override}).recipe() or (
        "global_scale" not in override and FORMATS[override["format"]].has_global_scale
    )
    assert config.recipe("attn") == FP4Config(**base).recipe()


# --- quantize --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(recipes())
def test_quantize_follows_the_config(values):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    ours = quantize(weight, FP4Config(**values))
    recipe = FP4Config(**values).recipe()
    macro = {"macro_block": recipe.macro_block}
    expected = reference.quantize(weight, values["format"], values["scale_rule"], recipe.options, **macro)
    assert torch.equal(ours.packed, expected.packed) and ours.format is expected.format
    assert torch.equal(ours.scale.view(torch.uint8), expected.scale.view(torch.uint8))


def test_quantize_default_and_errors():
    weight = torch.randn(4, 64)
    assert torch.equal(quantize(weight).packed, reference.quantize(weight, "nvfp4", "soar").packed)
    with pytest.raises(TypeError, match="torch.int8"):
        quantize(torch.zeros(4, 64, dtype=torch.int8))
    with pytest.raises(ValueError, match="in_features=24"):
        quantize(torch.zeros(4, 24))
    weight[1, 2] = float("inf")
    with pytest.raises(ValueError, match="q_proj: 1 of 256"):
        FP4Config().recipe().quantize(weight, name="q_proj")
