# SPDX-License-Identifier: Apache-2.0
"""Quantize on load, save, load again: every architecture and format, bit for bit."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file
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
    tiny_model,
    tokens,
)
from torch import nn

import hf_mxfp4
from hf_mxfp4 import FP4Config, FP4Linear

every_case = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
every_model = pytest.mark.parametrize("name", DENSE + MIXTURES)
SOME = ("llama", "qwen3_moe", "gpt_oss")  # one of each kind: linears with biases, merged experts, fused experts
# The layers that stay, and those that share a tensor scale, written out here and not taken from the package.
KEPT = {name: {"lm_head"} for name in DENSE + MIXTURES} | {"bert": {"pooler.dense"}}
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def assert_quantized(found, weight: torch.Tensor, rows: slice, format: str):
    """A packed weight equals `rows` of the quantized `weight`, and so does what it decodes to."""
    expected = hf_mxfp4.quantize(weight, FP4Config(format=format))
    part = expected._replace(packed=expected.packed[..., rows, :], scale=expected.scale[..., rows, :])
    assert torch.equal(found.packed, part.packed)
    assert torch.equal(found.scale.view(torch.uint8), part.scale.view(torch.uint8))
    assert (found.global_scale is None) == (part.global_scale is None) == (format == "mxfp4")
    if found.global_scale is not None:
        assert torch.equal(found.global_scale, part.global_scale)
    assert torch.equal(hf_mxfp4.dequantize(found, torch.float32), hf_mxfp4.dequantize(part, torch.float32))


def clone(state: dict) -> dict:
    return {key: value.clone() for key, value in state.items()}


def with_siblings(dense, name: str) -> tuple[torch.Tensor, slice]:
    """The weight of a linear with those that share its tensor scale, and which rows are its own."""
    parent, _, leaf = name.rpartition(".")
    members = next((group for group in TOGETHER if leaf in group), (leaf,))
    modules = dict(dense.get_submodule(parent).named_children())
    weights = {member: modules[member].weight.detach() for member in members if member in modules}
    before = sum(weights[member].shape[0] for member in members[: members.index(leaf)])
    return torch.cat(list(weights.values())), slice(before, before + weights[leaf].shape[0])


@every_model
@every_case
def test_what_is_packed(name, format):
    this = case(name, format)
    plain = {path for path, module in this.model.named_modules() if type(module) is nn.Linear}
    assert plain == KEPT[name]
    linears = {path for path, module in this.dense.named_modules() if isinstance(module, nn.Linear)}
    experts = {path for path, module in this.dense.named_modules() if path.endswith(".experts")}
    assert packed_modules(this.model).keys() == (linears - plain) | experts
    assert bool(experts) == (name in MIXTURES)
    # Whatever else the model holds is there, in the same bits: embeddings, norms, routers, biases, sinks.
    dense, packed = this.dense.state_dict(), this.model.state_dict()
    gone = {f"{path}.weight" for path in linears - plain}
    gone |= {f"{path}.{leaf}" for path in experts for leaf in ("gate_up_proj", "down_proj")}
    suffixes = ("_packed", "_scale") if format == "mxfp4" else ("_packed", "_scale", "_global_scale")
    assert packed.keys() == (dense.keys() - gone) | {key + suffix for key in gone for suffix in suffixes}
    assert_same_tensors({key: dense[key] for key in dense.keys() - gone}, {k: packed[k] for k in dense.keys() - gone})


@every_model
@every_case
def test_weights_equal_quantize(name, format):
    this = case(name, format)
    for path, module in packed_modules(this.model).items():
        dense = this.dense.get_submodule(path)
        if isinstance(module, FP4Linear):
            assert_quantized(module.quantized, *with_siblings(this.dense, path), format)
            assert (module.in_features, module.out_features) == (dense.in_features, dense.out_features)
            continue
        for projection in ("gate_up_proj", "down_proj"):
            weight = getattr(dense, projection).detach()
            weight = weight.transpose(1, 2) if name == "gpt_oss" else weight
            assert_quantized(module.quantized(projection), weight, slice(None), format)


@every_model
@every_case
def test_round_trip(name, format, tmp_path):
    """load -> save -> load -> save: the same bytes in every file, the same logits, whatever happened in between."""
    this = case(name, format)
    reloaded, report = this.load(output_loading_info=True)
    assert not any(report.values()), report
    first = file_bytes(this.folder)
    assert saved_bytes(reloaded, tmp_path / "reloaded") == first
    expected = outputs(this.model)
    assert torch.isfinite(expected).all() and not torch.equal(expected, outputs(this.dense))
    assert torch.equal(outputs(reloaded), expected)
    assert saved_bytes(reloaded, tmp_path / "after-forward") == first
    assert saved_bytes(reloaded.to("cpu"), tmp_path / "moved") == first
    for number, other in enumerate((copy.deepcopy(reloaded), through_file(this.model))):
        assert torch.equal(outputs(other), expected)
        assert saved_bytes(other, tmp_path / str(number)) == first


def through_file(model):
    """A model saved whole and loaded again, as `torch.save(model)` does."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@every_case
def test_pickle(name, format, tmp_path):
    """Plain pickle, as processes use among themselves (torch alone cannot unpickle a float8 tensor)."""
    this = case(name, format)
    model = pickle.loads(pickle.dumps(this.model))
    assert torch.equal(outputs(model), outputs(this.model))
    assert saved_bytes(model, tmp_path) == file_bytes(this.folder)


@pytest.mark.parametrize("name", SOME)
@every_case
def test_forward_changes_nothing(name, format):
    model = case(name, format).load()
    before = clone(model.state_dict())
    model(tokens()).logits.sum().backward()
    model.zero_grad()
    model(tokens(rows=3))
    assert_same_tensors(model.state_dict(), before)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
@every_case
def test_shards(name, format, tmp_path):
    """Checkpoints in many files, on either side."""
    this = case(name, format)
    this.dense.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 3
    model = this.quantize(tmp_path / "dense")
    assert_same_tensors(model.state_dict(), this.model.state_dict())

    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert len(files) > 2
    stored = {key: value for file in files for key, value in load_file(file).items()}
    assert_same_tensors(stored, load_file(this.folder / "model.safetensors"))
    reloaded = auto_class(name).from_pretrained(tmp_path / "packed")
    assert torch.equal(outputs(reloaded), outputs(this.model))
    assert saved_bytes(reloaded, tmp_path / "one") == file_bytes(this.folder)
    # Fewer shards over more: nothing of the old ones stays.
    assert (
        saved_bytes(reloaded, tmp_path / "packed").keys() - {"model.safetensors.index.json"}
        == file_bytes(this.folder).keys()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_source_dtype(name, dtype, tmp_path):
    """float32 and float16 models are quantized from what they hold, and the rest keeps their dtype."""
    folder = source(name, dtype)
    dense = auto_class(name).from_pretrained(folder)
    model = case(name).quantize(folder)
    assert model.dtype == dense.dtype == dtype
    for key, parameter in model.named_parameters():  # gpt_oss keeps its sinks in float32
        assert parameter.dtype == dense.get_parameter(key).dtype
    for path, module in packed_modules(model).items():
        assert module.dtype == dtype
        if isinstance(module, FP4Linear):
            assert module.weight.dtype == dtype
            assert_quantized(module.quantized, *with_siblings(dense, path), "nvfp4")
    model.save_pretrained(tmp_path)
    reloaded = auto_class(name).from_pretrained(tmp_path)
    assert outputs(model).dtype == dtype
    assert torch.equal(outputs(reloaded), outputs(model))


@pytest.mark.parametrize("name", SOME)
def test_dtype_argument_while_quantizing(name):
    """`dtype=` rounds first and quantizes then, as the same model saved in that dtype would be."""
    config = FP4Config()
    folder = source(name, torch.float32)
    model = auto_class(name).from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert_same_tensors(model.state_dict(), case(name).model.state_dict())  # tiny_model seeds both alike
    assert all(module.dtype == torch.bfloat16 for module in packed_modules(model).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "float32"], ids=str)
@pytest.mark.parametrize("name", DENSE + MIXTURES)
def test_dtype_argument_while_loading(name, dtype):
    """Codes and scales are what they were; the rest, and the results, are in the dtype asked for."""
    this = case(name)
    model = this.load(dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert model.dtype == wanted
    dense = auto_class(name).from_pretrained(source(name), dtype=dtype)
    for key, parameter in model.named_parameters():  # gpt_oss keeps its sinks in float32 beside float16
        assert parameter.dtype == dense.get_parameter(key).dtype
    packed = {key: value for key, value in this.model.state_dict().items() if is_packed_name(key)}
    assert_same_tensors({key: value for key, value in model.state_dict().items() if is_packed_name(key)}, packed)
    assert all(module.dtype == wanted for module in packed_modules(model).values())
    assert outputs(model).dtype == wanted


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "fields", [{}, {"overrides": {r"layers\.0\.mlp\.(experts|down)": "skip"}}], ids=["all", "some"]
)
def test_dtype_argument_under_another_head(name, fields, tmp_path):
    """Names that change on the way, and dense experts that are merged, are cast like all others."""
    case(name).quantize(**fields).save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in base.parameters()} == {torch.float32}
    assert outputs(base).dtype == torch.float32
    model = auto_class(name).from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def is_packed_name(key: str) -> bool:
    return key.endswith(("_packed", "_scale"))


def test_tied_weights_stay_tied():
    this = case("qwen3")
    for model in (this.model, this.load(), copy.deepcopy(this.model)):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert type(model.lm_head) is nn.Linear
    assert "lm_head.weight" not in load_file(this.folder / "model.safetensors")


def test_biases_are_kept():
    this = case("llama")
    for model in (this.model, this.load()):
        for path, module in packed_modules(model).items():
            assert isinstance(module.bias, nn.Parameter) and module.bias.requires_grad
            assert torch.equal(module.bias, this.dense.get_submodule(path).bias)


def test_float32_modules_are_kept(monkeypatch, tmp_path):
    """What a model class keeps in float32 is neither packed nor cast."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"o_proj"})
    this = case("llama")
    model = this.quantize()
    kept = [module for path, module in model.named_modules() if path.endswith("o_proj")]
    assert kept and all(type(module) is nn.Linear and module.weight.dtype == torch.float32 for module in kept)
    model.save_pretrained(tmp_path)
    reloaded = auto_class("llama").from_pretrained(tmp_path)
    assert_same_tensors(reloaded.state_dict(), model.state_dict())


@every_model
@every_case
def test_sizes(name, format):
    this = case(name, format)
    for model in (this.model, this.load(), copy.deepcopy(this.model), through_file(this.model)):
        assert model.num_parameters() == this.dense.num_parameters()
        assert model.num_parameters(exclude_embeddings=True) == this.dense.num_parameters(exclude_embeddings=True)
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert model.num_parameters(only_trainable=True) == trainable
        held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
        assert model.get_memory_footprint() == sum(held.values()) < this.dense.get_memory_footprint() / 1.5


@pytest.mark.parametrize("name", SOME)
@every_case
def test_state_dict_round_trip(name, format):
    this = case(name, format)
    state = clone(this.model.state_dict())
    other = this.load()
    for buffer in other.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    other.load_state_dict(state, strict=True)
    assert torch.equal(outputs(other), outputs(this.model))
    other = this.load()
    other.load_state_dict(state, strict=True, assign=True)
    assert torch.equal(outputs(other), outputs(this.model))
    with torch.device("meta"):
        empty = copy.deepcopy(this.model).to("meta")
    assert_same_meta(empty.state_dict(), state)


def assert_same_meta(state: dict, other: dict):
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in other.items()}
    assert all(value.is_meta for value in state.values())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("suffix", ["_packed", "_scale", "_global_scale"])
def test_state_dict_of_another_dtype_is_refused(suffix, assign):
    model = case("qwen3_moe").load()
    key = next(key for key in model.state_dict() if key.endswith(suffix))
    state = clone(model.state_dict())
    before = clone(state)
    state[key] = state[key].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"{key}: dtype torch.bfloat16 in the state dict"):
        model.load_state_dict(state, assign=assign)
    assert_same_tensors({key: model.state_dict()[key]}, {key: before[key]})


def test_one_config_for_two_models(tmp_path):
    """What a model stores about itself does not leak into the config the user holds, nor into the next model."""
    config = FP4Config()
    before = copy.deepcopy(config.to_dict())
    for number, name in enumerate(("qwen3", "qwen3_moe", "qwen3")):
        model = auto_class(name).from_pretrained(source(name), quantization_config=config)
        assert config.to_dict() == before
        assert saved_bytes(model, tmp_path / str(number)) == file_bytes(case(name).folder)


def test_scale_rules_survive(tmp_path):
    """Every rule's tensor scale decodes to the same numbers before and after a checkpoint stores its reciprocal."""
    for number, fields in enumerate(
        ({"global_scale": "free"}, {"scale_rule": "amax"}, {"scale_rule": "four_over_six"}, {"search": 2})
    ):
        model = case("qwen3").quantize(**fields)
        model.save_pretrained(tmp_path / str(number))
        reloaded = auto_class("qwen3").from_pretrained(tmp_path / str(number))
        assert torch.equal(outputs(reloaded), outputs(model))
        assert saved_bytes(reloaded, tmp_path / "again") == file_bytes(tmp_path / str(number))
        recipe = reloaded.config.quantization_config
        assert all(getattr(recipe, field) == value for field, value in fields.items())


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-38, 1e30])
@every_case
def test_extreme_weights(format, factor, tmp_path):
    """Zeros, weights of the size of float32's smallest and of its largest: finite, and the same after saving."""
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(factor)
        model.model.layers[1].self_attn.q_proj.weight.mul_(factor)
    model.save_pretrained(tmp_path / "dense")
    packed = case("llama", format).quantize(tmp_path / "dense")
    layer = packed.model.layers[0].mlp.down_proj
    assert torch.isfinite(layer.weight).all()
    reference = model.model.layers[0].mlp.down_proj.weight
    assert (layer.weight - reference).norm() <= 0.25 * reference.norm() + 1e-37  # 4 bits; below 1e-37: subnormals
    packed.save_pretrained(tmp_path / "packed")
    reloaded = auto_class("llama").from_pretrained(tmp_path / "packed")
    assert_same_tensors(reloaded.state_dict(), packed.state_dict())
    if factor <= 1:
        assert torch.equal(outputs(reloaded), outputs(packed))
