# SPDX-License-Identifier: Apache-2.0
"""quantize_checkpoint writes what from_pretrained and save_pretrained write, byte for byte."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import MIXTURES, assert_same_tensors, auto_class, outputs, source, tiny_model, tokens
from transformers import AutoModelForCausalLM

from hf_mxfp4 import FP4Config
from hf_mxfp4.checkpoint_files import INDEX, read_checkpoint
from hf_mxfp4.streaming import Progress, plan, quantize_checkpoint, skeleton
from hf_mxfp4.streaming import source as streaming_source
from hf_mxfp4.streaming.journal import JOURNAL
from hf_mxfp4.streaming.plan import Copy, Experts, Group, make_plan

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
ADDED = {"checksums.sha256"}  # beside what save_pretrained writes


@functools.cache
def _reference(folder: Path, name: str, size: str, fields: tuple) -> dict[str, bytes]:
    model = auto_class(name).from_pretrained(folder, quantization_config=FP4Config(**dict(fields)))
    target = folder.with_name(f"{folder.name}-{hashlib.sha256(repr((size, fields)).encode()).hexdigest()[:8]}")
    model.save_pretrained(target, max_shard_size=size)
    made = files(target)
    shutil.rmtree(target)
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same(folder: Path, expected: dict[str, bytes], more: set[str] = ADDED) -> None:
    """The same files, byte for byte; safetensors are compared by tensor first, for what a failure says."""
    found = files(folder)
    assert found.keys() == expected.keys() | more
    for name, content in expected.items():
        if name.endswith(".json"):
            assert found[name].decode() == content.decode()
        assert found[name] == content, name


def check(name: str, output: Path, size: str = "5GB", folder: Path | None = None, **fields):
    """Quantize a tiny model both ways."""
    folder = folder or source(name)
    summary = quantize_checkpoint(folder, output, FP4Config(**fields), max_shard_size=size)
    assert_same(output, _reference(folder, name, size, tuple(fields.items())))
    return summary


SIZES = dict.fromkeys(["qwen3", "llama", "bert", "qwen2_moe", *MIXTURES], "30KB")
CASES = [
    *SIZES.items(),
    ("llama", "3KB"),
    ("mixtral", "3KB"),
    ("gpt_oss", "3KB"),
    ("qwen3", "5GB"),
    ("mixtral", "5GB"),
]


@pytest.mark.parametrize("name, size", CASES)
def test_same_bytes(name, size, tmp_path):
    """Tied (qwen3) and untied, biases (llama), no head (bert), experts one by one, fused and transposed; few files,
    and so many that siblings and experts are torn apart."""
    summary = check(name, tmp_path / "out", size)
    headers = read_checkpoint(tmp_path / "out")
    assert summary.shards == tuple(sorted(headers.metadata)) and summary.packed > 1 and summary.resumed == 0
    assert summary.output_bytes == sum(tensor.nbytes for tensor in headers.tensors.values())
    assert summary.source_bytes == sum(tensor.nbytes for tensor in read_checkpoint(source(name)).tensors.values())
    assert (len(summary.shards) > 1) == (size != "5GB")


@pytest.mark.parametrize(
    "name, fields",
    [
        ("llama", dict(format="mxfp4", scale_rule="ceil")),
        ("llama", dict(scale_rule="four_over_six", layout="own")),
        ("llama", dict(global_scale="free", search=2)),
        ("qwen3", dict(format="mxfp4", macro_block="search")),
        ("qwen3_moe", dict(format="mxfp4", macro_block="static")),
        ("gpt_oss", dict(format="mxfp4", macro_block="search")),
        ("mixtral", dict(global_scale="free")),
        ("llama", dict(overrides={r"layers\.0\.": dict(format="mxfp4"), r"up_proj": "skip", r"lm_head": {}})),
        ("qwen3_moe", dict(overrides={r"layers\.1\.mlp\.experts": dict(format="mxfp4")})),
        ("qwen3_moe", dict(overrides={r"layers\.0\.mlp\.experts": "skip"}, modules_to_not_convert=["q_proj"])),
        ("bert", dict(compute_dtype="float32", activation_format="same", fuse_projections=True)),
    ],
    ids=str,
)
def test_recipes(name, fields, tmp_path):
    summary = quantize_checkpoint(source(name), tmp_path / "out", FP4Config(**fields), max_shard_size="30KB")
    model = auto_class(name).from_pretrained(source(name), quantization_config=FP4Config(**fields))
    model.save_pretrained(tmp_path / "expected", max_shard_size="30KB")
    assert_same(tmp_path / "out", files(tmp_path / "expected"))
    assert summary.kept.keys() == model.hf_quantizer.plan.kept.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_other_dtypes(name, dtype, tmp_path):
    check(name, tmp_path / "out", "60KB", source(name, dtype))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_stored_in_another_dtype_than_the_config_says(name, tmp_path):
    """Weights are cast to the model's dtype before they are quantized, as from_pretrained does."""
    shutil.copytree(source(name, torch.float32), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    check(name, tmp_path / "out", "30KB", tmp_path / "in")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("bytes_at_once", [1, 20_000])
def test_experts_one_by_one(name, bytes_at_once, tmp_path, monkeypatch):
    """Whatever is held at once, the bytes are the same: one expert; some; and in pieces of plain tensors."""
    monkeypatch.setattr(plan, "SLICE", bytes_at_once)
    monkeypatch.setattr(streaming_source, "PIECE", 100)
    check(name, tmp_path / "out", "30KB")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_as_a_whole(name, tmp_path, monkeypatch):
    """The way for conversions that are not known to work expert by expert."""
    monkeypatch.setattr(plan._Units, "_can_be_sliced", lambda *args: False)
    check(name, tmp_path / "out", "30KB")


def units(folder: Path, **fields) -> list:
    origin = streaming_source.Source(read_checkpoint(folder))
    made = make_plan(skeleton.build(origin, FP4Config(**fields)), origin, "5GB")
    return [unit for found in made.units.values() for unit in found]


def test_units_are_small():
    """What a unit holds bounds the memory: a linear, siblings, some experts; plain tensors go in pieces."""
    found = units(source("mixtral"))
    groups = [unit for unit in found if isinstance(unit, Group)]
    assert {len(unit.params) for unit in groups} == {1, 3} and not any("experts" in unit.params[0] for unit in groups)
    experts = [unit for unit in found if isinstance(unit, Experts)]
    assert {(unit.leaf, unit.first, unit.last) for unit in experts} == {("gate_up_proj", 0, 4), ("down_proj", 0, 4)}
    copies = {unit.key for unit in found if isinstance(unit, Copy)}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= copies
    assert all(len(unit.params) == 1 for unit in units(source("llama"), format="mxfp4") if isinstance(unit, Group))


@pytest.mark.parametrize("name, workers", [("demo_lm", 1), ("demo_lm_moe", 2)])
def test_trained_models(name, workers, tmp_path):
    """With their tokenizers; the result loads and generates. Several processes make the same."""
    origin, told = SCRIPTS / name, []
    summary = quantize_checkpoint(
        origin, tmp_path / "out", FP4Config(), workers=workers, max_shard_size="300KB", progress=told.append
    )
    model = AutoModelForCausalLM.from_pretrained(origin, quantization_config=FP4Config())
    model.save_pretrained(tmp_path / "expected", max_shard_size="300KB")
    others = {path.name for path in origin.iterdir()} - {"model.safetensors", "config.json", "generation_config.json"}
    others -= {"README.md"}
    assert_same(tmp_path / "out", files(tmp_path / "expected"), ADDED | others)
    assert all((tmp_path / "out" / other).read_bytes() == (origin / other).read_bytes() for other in others)
    check = ["sha256sum", "--check", "--quiet", "checksums.sha256"]
    assert subprocess.run(check, cwd=tmp_path / "out").returncode == 0
    assert len((tmp_path / "out" / "checksums.sha256").read_text().splitlines()) == len(files(tmp_path / "out")) - 1
    assert told[-1][:4] == (told[-1].total_bytes, told[-1].total_bytes, len(summary.shards), len(summary.shards))
    assert all(isinstance(one, Progress) for one in told) and told[-1].total_bytes >= summary.source_bytes
    done = [one.done_bytes for one in told]
    assert workers > 1 or done == sorted(done)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(outputs(loaded), outputs(model))
    assert loaded.generate(tokens(1), max_new_tokens=2).shape[1] == 9


UNUSED = ("model.layers.0.self_attn.rotary_emb.inv_freq", "own")
# --- names -----------------------------------------------------------------------------------------------------------


def rewritten(folder: Path, target: Path, change) -> Path:
    """A checkpoint with other tensors: `change` takes and returns them."""
    shutil.copytree(folder, target)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    "name, change",
    [
        ("bert", lambda t: {f"bert.{k}": v for k, v in t.items()}),
        ("bert", lambda t: {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in t.items()}),
        ("llama", lambda t: {k.removeprefix("model."): v for k, v in t.items()}),
        ("qwen3", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        ("qwen3", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        ("qwen3", lambda t: {k.replace("model.embed_tokens", "lm_head"): v for k, v in t.items()}),
        ("llama", lambda t: t | {UNUSED[0]: torch.ones(8), UNUSED[1]: torch.ones(())}),
        ("qwen3_moe", lambda t: dict(reversed(t.items()))),
    ],
    ids=["prefix", "gamma", "no prefix", "tied twice", "tied but not equal", "tied, head only", "unused", "order"],
)
def test_other_names(name, change, tmp_path):
    """Names that transformers changes on loading: what is saved has the names it saves."""
    folder = rewritten(source(name), tmp_path / "in", change)
    summary = check(name, tmp_path / "out", "30KB", folder)
    assert set(summary.ignored) == set(UNUSED) & set(load_file(folder / "model.safetensors"))


def test_experts_stored_fused(tmp_path):
    """A Qwen3-MoE whose experts stand fused in the file, as some tools save them: saved one by one."""

    def fuse(tensors):
        out = dict(tensors)
        for layer in range(2):
            path = f"model.layers.{layer}.mlp.experts"
            parts = {leaf: [out.pop(f"{path}.{e}.{leaf}.weight") for e in range(4)] for leaf in LEAVES}
            gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
            out |= {f"{path}.gate_up_proj": torch.stack(gate_up), f"{path}.down_proj": torch.stack(parts["down_proj"])}
        return out

    folder = rewritten(source("qwen3_moe"), tmp_path / "in", fuse)
    check("qwen3_moe", tmp_path / "out", "30KB", folder)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_are_turned_round(turned, tmp_path):
    """Qwen3-VL-MoE's stacks are published as `[E, K, N]`, and saved as the model has them."""

    def turn(tensors):
        return {key: t.mT.contiguous() if turned and "experts." in key else t for key, t in tensors.items()}

    name = "qwen3_vl_moe"
    check(name, tmp_path / "out", "30KB", rewritten(source(name), tmp_path / "in", turn))


LEAVES = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", ["qwen2_vl", "gpt_neox", "opt", "gemma3", "phi3", "t5", "whisper"])
def test_other_architectures(name, tmp_path):
    """Models with fused projections, encoders and decoders, vision towers, and names of their own."""
    model = tiny_other(name)
    model.save_pretrained(tmp_path / "in")
    del model
    fields = dict(on_unsupported="keep")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", FP4Config(**fields), max_shard_size="30KB")
    cls = getattr(transformers, json.loads((tmp_path / "in" / "config.json").read_text())["architectures"][0])
    expected = cls.from_pretrained(tmp_path / "in", quantization_config=FP4Config(**fields))
    expected.save_pretrained(tmp_path / "expected", max_shard_size="30KB")
    assert_same(tmp_path / "out", files(tmp_path / "expected"))


def tiny_other(name: str):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    decoder = dict(num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if name == "qwen2_vl":
        text = sizes | decoder | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
        vision = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2)
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        return transformers.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    if name in ("gpt_neox", "phi3", "gemma3"):
        make = {"gpt_neox": "GPTNeoX", "phi3": "Phi3", "gemma3": "Gemma3Text"}[name]
        extra = {"head_dim": 16} if name == "gemma3" else {}
        config = getattr(transformers, f"{make}Config")(**sizes, **(decoder if name != "gpt_neox" else {}), **extra)
        cls = {"gemma3": "Gemma3ForCausalLM"}.get(name, f"{make}ForCausalLM")
        return getattr(transformers, cls)(config).to(torch.bfloat16)
    if name == "opt":
        config = transformers.OPTConfig(
            vocab_size=128,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
        return transformers.OPTForCausalLM(config).to(torch.bfloat16)
    if name == "t5":
        config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
        return transformers.T5ForConditionalGeneration(config).to(torch.bfloat16)
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_source_positions=32, max_target_positions=32,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16)


# --- files -----------------------------------------------------------------------------------------------------------


def test_many_source_files_and_links(tmp_path):
    """A sharded source whose files are links, as in the Hub's cache."""
    blobs = tmp_path / "blobs"
    tiny_model("qwen3_moe").save_pretrained(blobs, max_shard_size="20KB")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert (snapshot / INDEX).exists()
    quantize_checkpoint(snapshot, tmp_path / "out", FP4Config())
    assert_same(tmp_path / "out", _reference(source("qwen3_moe"), "qwen3_moe", "5GB", ()))


def test_other_files_are_copied(tmp_path):
    shutil.copytree(source("llama"), tmp_path / "in")
    odd = os.fsdecode(b"caf\xe9.txt")  # not UTF-8
    wanted = {"tokenizer.json", "chat_template.jinja", "LICENSE", "vocab.txt", odd}
    unwanted = {"README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", "rust_model.ot", ".gitattributes"}
    for name in wanted | unwanted:
        (tmp_path / "in" / name).write_text(name.encode("utf-8", "replace").decode())
    (tmp_path / "in" / "additional_chat_templates").mkdir()
    (tmp_path / "in" / "additional_chat_templates" / "tools.jinja").write_text("x")
    (tmp_path / "in" / "original").mkdir()
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", FP4Config())
    found = {path.name for path in (tmp_path / "out").iterdir()}
    made = {"model.safetensors", "config.json", "generation_config.json", "checksums.sha256"}
    assert found == wanted | made | {"additional_chat_templates"}
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "x"
    run = subprocess.run(["sha256sum", "--check", "--quiet", "checksums.sha256"], cwd=tmp_path / "out")
    assert run.returncode == 0


def test_metadata_says_pt(tmp_path):
    quantize_checkpoint(source("llama"), tmp_path / "out", FP4Config())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert not (tmp_path / "out" / JOURNAL).exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_folder(tmp_path):
    """A model whose code comes with it: run only if that is asked for, and copied as save_pretrained copies it."""
    folder = tmp_path / "in"
    shutil.copytree(source("llama"), folder)
    (folder / "own_code.py").write_text(CODE)
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "own_llama", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["OwnForCausalLM"]}))
    with pytest.raises(ValueError):
        quantize_checkpoint(folder, tmp_path / "out", FP4Config())
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(folder, tmp_path / "out", FP4Config(), trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, quantization_config=FP4Config())
    model.save_pretrained(tmp_path / "expected")
    assert "own_code.py" in files(tmp_path / "expected")
    assert_same(tmp_path / "out", files(tmp_path / "expected"))


def test_source_reads_what_safetensors_reads(tmp_path):
    """Every dtype, 0-d and empty tensors, whole, by rows and in pieces."""
    made = {f"{name}-{dtype}": torch.randint(2, shape).to(dtype) for name, shape in STORED for dtype in DTYPES}
    save_file(made, tmp_path / "model.safetensors")
    origin = streaming_source.Source(read_checkpoint(tmp_path))
    for name, tensor in made.items():
        assert_same_tensors({name: origin.whole(name)}, {name: tensor})
        pieces = list(origin.pieces(name))
        whole = torch.cat([rows for _, rows in pieces]) if tensor.ndim else pieces[0][1]
        assert_same_tensors({name: whole}, {name: tensor})
        assert origin.empty(name).is_meta and origin.empty(name).dtype == tensor.dtype
        if tensor.ndim and len(tensor) > 2:
            assert_same_tensors({name: origin.rows(name, 1, 3)}, {name: tensor[1:3]})
    origin.close()


STORED = [("scalar", ()), ("empty", (0, 3)), ("none", (3, 0)), ("matrix", (5, 3)), ("vector", (4,))]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
