# SPDX-License-Identifier: Apache-2.0
"""Which modules are packed and how; and the same checkpoint under another head."""

import pytest
import torch
import transformers
from tiny_models import auto_class, case, outputs, packed_modules, saved_bytes, source, tiny_config, tokens
from torch import nn

import hf_mxfp4
from hf_mxfp4 import FP4Config, FP4Experts, FP4Linear
from hf_mxfp4.conversion import FuseExperts, UnfuseExperts, plan_modules

LAYER = "model.layers.0"


def plan(name: str, changes: dict | None = None, **fields):
    """The plan for a tiny model, made on the meta device."""
    with torch.device("meta"):
        model = auto_class(name).from_config(tiny_config(name, **changes or {}))
    return plan_modules(model, FP4Config(**fields))


def leaves(names) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def test_plan_names_every_linear_once():
    for name in ("qwen3", "llama", "bert", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_moe"):
        with torch.device("meta"):
            model = auto_class(name).from_config(tiny_config(name))
        found = plan_modules(model, FP4Config())
        linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert linears == found.linears.keys() | found.kept.keys() and not found.linears.keys() & found.kept.keys()
        names = found.weight_names(model)
        assert all(model.get_parameter(weight).ndim in (2, 3) for weight in names)
        assert len(names) == len(found.linears) + 2 * len(found.experts)


def test_routers_and_gates_stay():
    found = plan("qwen2_moe")
    assert found.kept[f"{LAYER}.mlp.shared_expert_gate"] == "router"
    assert f"{LAYER}.mlp.shared_expert.gate_proj" in found.linears and f"{LAYER}.mlp.experts" in found.experts
    forced = plan("qwen2_moe", overrides={"shared_expert_gate$": {}})
    assert f"{LAYER}.mlp.shared_expert_gate" in forced.linears


@pytest.mark.parametrize(
    "entry, kept",
    [
        ("model.layers.0.mlp.down_proj", {f"{LAYER}.mlp.down_proj"}),
        ("down_proj", {f"{LAYER}.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
        ("model.layers.0.mlp", {f"{LAYER}.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}),
        (r".*\.mlp\.(gate|up)_proj", {f"model.layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up")}),
    ],
)
def test_modules_to_not_convert(entry, kept):
    found = plan("llama", modules_to_not_convert=[entry])
    assert {name for name, why in found.kept.items() if "modules_to_not_convert" in why} == kept
    assert found.linears.keys() == plan("llama").linears.keys() - kept


@pytest.mark.parametrize("layout", ["portable", "own"])
def test_kept_modules_through_a_checkpoint(layout, tmp_path):
    model = case("llama").quantize(layout=layout, modules_to_not_convert=["o_proj", "model.layers.1.mlp"])
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert leaves(plain) == {"lm_head", "o_proj", "gate_proj", "up_proj", "down_proj"} and len(plain) == 6
    for name in plain:
        assert torch.equal(model.get_submodule(name).weight, case("llama").dense.get_submodule(name).weight)
    first = saved_bytes(model, tmp_path / "saved")
    reloaded = auto_class("llama").from_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(reloaded), outputs(model)) and saved_bytes(reloaded, tmp_path / "again") == first


def test_overrides():
    found = plan(
        "llama",
        overrides={
            r"layers\.0\.mlp\.down": {"format": "mxfp4", "scale_rule": "ceil"},
            r"layers\.0\.mlp": "skip",  # first match wins
            "v_proj$": {"search": 2},
        },
    )
    down = found.linears[f"{LAYER}.mlp.down_proj"]
    assert (down.format.name, down.scale_rule) == ("mxfp4", "ceil")
    assert {name for name, why in found.kept.items() if "overrides" in why} == {
        f"{LAYER}.mlp.gate_proj",
        f"{LAYER}.mlp.up_proj",
    }
    assert found.linears[f"{LAYER}.self_attn.v_proj"].options.search == 2
    assert found.linears["model.layers.1.mlp.down_proj"] == found.linears[f"{LAYER}.self_attn.q_proj"]


def test_siblings_share_a_tensor_scale_only_when_they_are_alike():
    groups = plan("llama").groups
    assert groups[f"{LAYER}.self_attn.k_proj"] == tuple(f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkv")
    assert leaves(groups) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert not plan("llama", format="mxfp4").groups  # no tensor scale to share
    for override in ("skip", {"format": "mxfp4"}, {"search": 2}):
        assert leaves(plan("llama", overrides={"k_proj": override}).groups) == {"gate_proj", "up_proj"}
    mla = plan("deepseek_v3").groups
    assert mla[f"{LAYER}.self_attn.q_a_proj"] == tuple(
        f"{LAYER}.self_attn.{leaf}" for leaf in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    assert "encoder.layer.0.attention.self.query" in plan("bert").groups


def test_siblings_apart_are_quantized_apart():
    model = case("llama").quantize(overrides={"k_proj": "skip"})
    for leaf in ("q_proj", "v_proj"):
        expected = hf_mxfp4.quantize(case("llama").dense.get_submodule(f"{LAYER}.self_attn.{leaf}").weight.detach())
        found = model.get_submodule(f"{LAYER}.self_attn.{leaf}").quantized
        assert torch.equal(found.packed, expected.packed) and torch.equal(found.global_scale, expected.global_scale)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_siblings_of_different_size(scale, tmp_path):
    """One tensor scale over siblings whose weights differ a hundredfold, in a sharded source read piece by piece."""
    dense = auto_class("llama").from_pretrained(source("llama"))
    with torch.no_grad():
        dense.model.layers[0].self_attn.v_proj.weight.mul_(scale)
    dense.save_pretrained(tmp_path, max_shard_size="5KB")
    attention = case("llama").quantize(tmp_path).model.layers[0].self_attn
    parts = [getattr(attention, f"{leaf}_proj") for leaf in "qkv"]
    assert len({part.weight_global_scale.item() for part in parts}) == 1
    weights = [getattr(dense.model.layers[0].self_attn, f"{leaf}_proj").weight.detach() for leaf in "qkv"]
    expected = hf_mxfp4.quantize(torch.cat(weights))
    assert torch.equal(torch.cat([part.weight_packed for part in parts]), expected.packed)
    for part, weight in zip(parts, weights, strict=True):
        assert (part.weight - weight).norm() < 0.15 * weight.norm()


@pytest.mark.parametrize("layout", ["portable", "own"])
def test_mixed_formats(layout, tmp_path):
    """Both formats in one model, and a forced output head."""
    overrides = {r"layers\.0\.": {"format": "mxfp4"}, "lm_head": {"scale_rule": "amax"}}
    model = case("llama").quantize(layout=layout, overrides=overrides)
    formats = {name: module.format.name for name, module in packed_modules(model).items()}
    assert formats["lm_head"] == formats["model.layers.1.mlp.up_proj"] == "nvfp4"
    assert formats[f"{LAYER}.mlp.up_proj"] == "mxfp4" and len(formats) == 15
    first = saved_bytes(model, tmp_path / "saved")
    reloaded = auto_class("llama").from_pretrained(tmp_path / "saved")
    assert {name: module.format.name for name, module in packed_modules(reloaded).items()} == formats
    assert torch.equal(outputs(reloaded), outputs(model)) and saved_bytes(reloaded, tmp_path / "again") == first
    assert type(reloaded.get_output_embeddings()) is FP4Linear
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")  # whose checkpoint has a packed head too many
    assert torch.equal(outputs(base), hidden(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("first", ["skip", {"format": "mxfp4"}], ids=str)
def test_mixed_experts(name, first, tmp_path):
    """Experts of one layer in another format, or left in full precision."""
    model = case(name).quantize(overrides={r"layers\.0\.mlp\.experts": first})
    formats = {path: module.format.name for path, module in packed_modules(model).items()}
    assert formats["model.layers.1.mlp.experts"] == "nvfp4"
    assert formats.get(f"{LAYER}.mlp.experts") == (None if first == "skip" else "mxfp4")
    files = saved_bytes(model, tmp_path / "saved")
    reloaded, report = auto_class(name).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(outputs(reloaded), outputs(model)) and saved_bytes(reloaded, tmp_path / "again") == files
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(base), hidden(model))
    base.save_pretrained(tmp_path / "base")
    whole, report = auto_class(name).from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"} and torch.equal(hidden(whole), hidden(model))


def test_a_tied_head_is_never_packed():
    found = plan("qwen3", overrides={"lm_head": {}})
    assert found.kept["lm_head"] == "tied to another weight"
    assert "lm_head" in plan("llama", overrides={"lm_head": {}}).linears


def test_fuse_and_unfuse_are_inverse():
    patterns, target = ["experts.*.gate.weight", "experts.*.up.weight"], ["experts.gate_up"]
    stored = {p: [torch.randn(3, 2) for _ in range(4)] for p in patterns}
    fused = FuseExperts().convert(stored, patterns, target)["experts.gate_up"]
    assert fused.shape == (4, 6, 2) and torch.equal(fused[2], torch.cat([stored[p][2] for p in patterns]))
    assert isinstance(FuseExperts().reverse_op, UnfuseExperts) and isinstance(UnfuseExperts().reverse_op, FuseExperts)
    for value in (fused, [fused]):
        parts = UnfuseExperts().convert({"experts.gate_up": value}, target, patterns)
        assert parts.keys() == {p.replace("*", str(e)) for p in patterns for e in range(4)}
        assert all(torch.equal(parts[p.replace("*", "3")], stored[p][3]) for p in patterns)


# --- one checkpoint, other heads -------------------------------------------------------------------------------------

HEADED = ("llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")


def hidden(model) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(tokens())[0]


@pytest.mark.parametrize("name", HEADED)
def test_base_model_of_a_checkpoint(name, tmp_path):
    """A causal LM's checkpoint as a base model; that saved and read by both."""
    this = case(name)
    base, report = transformers.AutoModel.from_pretrained(this.folder, output_loading_info=True)
    assert not report["missing_keys"] and set(report["unexpected_keys"]) <= {"lm_head.weight"}
    assert torch.equal(outputs(base), hidden(this.model))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(outputs(transformers.AutoModel.from_pretrained(tmp_path / "base")), outputs(base))
    whole, report = auto_class(name).from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(report["missing_keys"]) <= {"lm_head.weight"} and not report["unexpected_keys"]
    assert torch.equal(hidden(whole), outputs(base))


@pytest.mark.parametrize("name", HEADED)
def test_base_model_quantized(name, tmp_path):
    base = transformers.AutoModel.from_pretrained(source(name), quantization_config=FP4Config())
    assert torch.equal(outputs(base), hidden(case(name).model))
    first = saved_bytes(base, tmp_path / "base")
    assert saved_bytes(transformers.AutoModel.from_pretrained(tmp_path / "base"), tmp_path / "again") == first
    whole = auto_class(name).from_pretrained(tmp_path / "base")
    assert torch.equal(hidden(whole), outputs(base))


@pytest.mark.parametrize("layout", ["portable", "own"])
@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_not_convert": ["model.layers.1.self_attn"]},
        {"overrides": {r"^model\.layers\.1\.mlp": {"format": "mxfp4"}, r"model\.layers\.0\.mlp": "skip"}},
    ],
    ids=["kept", "overrides"],
)
def test_full_names_under_another_head(layout, fields, tmp_path):
    """Names in a recipe are those of the model it was made for; a base model's lack the prefix."""
    model = case("llama").quantize(layout=layout, **fields)
    model.save_pretrained(tmp_path / "whole")
    base, report = transformers.AutoModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not report["missing_keys"] and set(report["unexpected_keys"]) == {"lm_head.weight"}
    assert torch.equal(outputs(base), hidden(model))
    first = saved_bytes(base, tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(outputs(again), hidden(model)) and saved_bytes(again, tmp_path / "again") == first


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("packed", [False, True])
def test_classifier(name, packed, tmp_path):
    """A new head over packed layers: initialized, in full precision, and kept on saving."""
    cls = getattr(transformers, type(case(name).model).__name__.replace("ForCausalLM", "ForSequenceClassification"))
    kwargs = {} if packed else {"quantization_config": FP4Config()}
    model = cls.from_pretrained(case(name).folder if packed else source(name), num_labels=3, **kwargs)
    assert type(model.score) is nn.Linear and torch.isfinite(model.score.weight).all() and model.score.weight.any()
    assert torch.equal(hidden(model), hidden(case(name).model))
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(cls.from_pretrained(tmp_path)), outputs(model))


BERT_HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "PreTraining", "QuestionAnswering")


@pytest.mark.parametrize("head", BERT_HEADS)
@pytest.mark.parametrize("packed", [False, True])
def test_bert_heads(head, packed, tmp_path):
    """Heads with layers the base checkpoint lacks: those start as new layers in full precision."""
    cls = getattr(transformers, f"BertFor{head}")
    kwargs = {} if packed else {"quantization_config": FP4Config()}
    model = cls.from_pretrained(case("bert").folder if packed else source("bert"), **kwargs)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert all(isinstance(module, FP4Linear) for key, module in model.named_modules() if key.endswith("self.query"))
    assert torch.equal(hidden(model), outputs(case("bert").model))
    first = saved_bytes(model, tmp_path / "head")
    reloaded = cls.from_pretrained(tmp_path / "head")
    assert torch.equal(outputs(reloaded), outputs(model)) and saved_bytes(reloaded, tmp_path / "again") == first
    assert torch.equal(outputs(transformers.BertModel.from_pretrained(tmp_path / "head")), hidden(model))


def test_prefix_survives(tmp_path):
    """A base model's names, loaded under a head and saved: with the head's names, as transformers has it."""
    base = transformers.AutoModel.from_pretrained(source("qwen3_moe"), quantization_config=FP4Config())
    base.save_pretrained(tmp_path / "base")
    whole = auto_class("qwen3_moe").from_pretrained(tmp_path / "base")
    with torch.no_grad():
        whole.lm_head.weight.copy_(case("qwen3_moe").dense.lm_head.weight)
    whole.save_pretrained(tmp_path / "whole")
    again = auto_class("qwen3_moe").from_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(again), outputs(case("qwen3_moe").model))
    assert all(isinstance(layer.mlp.experts, FP4Experts) for layer in again.model.layers)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_saving_the_names_of_the_model(name, tmp_path):
    """`save_original_format=False` stores fused experts as they are in memory; that loads too."""
    this = case(name)
    this.model.save_pretrained(tmp_path, save_original_format=False)
    reloaded, report = auto_class(name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(outputs(reloaded), outputs(this.model))
    first = saved_bytes(reloaded, tmp_path / "again")
    assert saved_bytes(auto_class(name).from_pretrained(tmp_path / "again"), tmp_path / "more") == first
