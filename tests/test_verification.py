# SPDX-License-Identifier: Apache-2.0
"""verify_checkpoint: silent on sound checkpoints, and every kind of damage found and named."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_bad_input import edited, poke, put
from tiny_models import assert_same_tensors, auto_class, case, source

from hf_mxfp4 import FP4Config, verification
from hf_mxfp4.export import CannotExport, export_checkpoint
from hf_mxfp4.formats import NVFP4, QuantizedTensor
from hf_mxfp4.output_files import CHECKSUMS, write_checksums
from hf_mxfp4.reference import dequantize
from hf_mxfp4.verification import LARGEST_ERROR, verify_checkpoint

GOLDEN = Path(__file__).parent / "golden"
SOUND = {
    "llama": ("llama", "nvfp4", {}),
    "qwen3": ("qwen3", "mxfp4", {}),
    "bert": ("bert", "nvfp4", {}),
    "qwen3_moe": ("qwen3_moe", "nvfp4", {}),
    "gpt_oss": ("gpt_oss", "mxfp4", {}),
    "gpt_oss-corrected": ("gpt_oss", "mxfp4", {"macro_block": "static", "outlier_fallback": 0.01}),
    "mixtral-corrected": ("mixtral", "mxfp4", {"macro_block": "static", "outlier_fallback": 0.01}),
    "qwen3_moe-corrected": ("qwen3_moe", "nvfp4", {"outlier_fallback": 0.02}),
    "corrected": ("llama", "mxfp4", {"macro_block": "search", "outlier_fallback": 0.01}),
    "amax": ("llama", "nvfp4", {"scale_rule": "amax"}),
}
KEY = "model.layers.1.mlp.down_proj.weight"


def saved(tmp_path, name="llama", format="nvfp4", **fields) -> Path:
    folder = tmp_path / "packed"
    case(name, format).quantize(**fields).save_pretrained(folder)
    return folder


# --- sound checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", SOUND)
def test_sound(label, tmp_path, monkeypatch):
    """No finding; every matrix is compared with the source, and its error is what the model's weights have."""
    monkeypatch.setattr(verification, "_PIECE", 1000)  # so that matrices come in many pieces
    name, format, fields = SOUND[label]
    folder = saved(tmp_path, name, format, **fields)
    write_checksums(folder)
    seen = []
    found = verify_checkpoint(folder, source(name), lambda *args: seen.append(args))
    assert found.ok and found.findings == [] and found.checksums == len(list(folder.iterdir())) - 1
    model = auto_class(name).from_pretrained(folder)
    model.dequantize(torch.float32)
    model.save_pretrained(tmp_path / "dense")
    dense, original = (load_file(f / "model.safetensors") for f in (tmp_path / "dense", source(name)))
    assert found.packed == len(found.errors) > 0 and found.packed + found.plain == len(original)
    for key, error in found.errors.items():
        wanted = original[key].double()
        expected = (dense[key].double() - wanted).square().sum() / wanted.square().sum()
        assert error == pytest.approx(float(expected), rel=1e-6), key
    assert found.errors[found.worst] == max(found.errors.values()) < 0.03
    assert seen[-1][0] == seen[-1][1] and all(a[0] <= b[0] for a, b in zip(seen, seen[1:], strict=False))
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_other_tools(name):
    found = verify_checkpoint(GOLDEN / name)
    assert found.ok and found.packed > 0 and found.errors == {} and found.worst is None
    assert any(CHECKSUMS in note for note in found.notes)


def test_full_precision():
    found = verify_checkpoint(source("llama"), source("llama"))
    assert found.ok and found.layout == "full precision" and found.packed == 0 and found.plain == 35


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt", "bf16"])
def test_exports(target, tmp_path):
    """Against the original model, in any layout."""
    export_checkpoint(case("qwen3_moe").folder, tmp_path / "out", target)
    found = verify_checkpoint(tmp_path / "out", source("qwen3_moe"))
    assert found.ok and found.packed == (0 if target == "bf16" else 32)
    assert found.errors == verify_checkpoint(case("qwen3_moe").folder, source("qwen3_moe")).errors


def test_another_model_in_full_precision(tmp_path):
    change = {"model.layers.0.mlp.up_proj.weight": torch.full((128, 64), 0.05, dtype=torch.bfloat16)}
    folder = edited(source("llama"), tmp_path / "other", lambda tensors: tensors.update(change))
    found = verify_checkpoint(folder, source("llama"))
    assert len(found.findings) == 1 and "up_proj.weight: relative squared error" in found.findings[0]


def test_tied_head_of_the_source(tmp_path):
    """A source may store the tied head twice; a checkpoint of ours does not."""
    extra = load_file(source("qwen3") / "model.safetensors")
    extra["lm_head.weight"] = extra["model.embed_tokens.weight"].clone()
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    shutil.copytree(source("qwen3"), tmp_path / "source")
    save_file(extra, tmp_path / "source/model.safetensors")
    found = verify_checkpoint(case("qwen3", "mxfp4").folder, tmp_path / "source")
    assert found.ok and sum("the model has it from elsewhere" in note for note in found.notes) == 2


# --- checksums -------------------------------------------------------------------------------------------------------


@pytest.fixture
def summed(tmp_path) -> Path:
    folder = tmp_path / "packed"
    shutil.copytree(case("llama").folder, folder)
    (folder / "README.md").write_text("card")
    write_checksums(folder)
    assert verify_checkpoint(folder).ok
    return folder


def append(line: str):
    def change(folder: Path):
        path = folder / CHECKSUMS
        path.write_text(path.read_text() + line + "\n")

    return change


def flip(folder: Path):
    """One bit of a plain tensor, which decodes to another finite number."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    data[start + header["model.norm.weight"]["data_offsets"][0]] ^= 1
    path.write_bytes(bytes(data))


NONE = hashlib.sha256(b"").hexdigest()
CHANGED = {
    "a bit of a weight": (flip, f"model.safetensors is not the file that {CHECKSUMS} was made of."),
    "config.json": (
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + "\n"),
        f"config.json is not the file that {CHECKSUMS} was made of.",
    ),
    "a file gone": (
        lambda folder: (folder / "generation_config.json").unlink(),
        f"generation_config.json is missing, and {CHECKSUMS} names it.",
    ),
    "weights added": (
        lambda folder: save_file({"x": torch.ones(1)}, folder / "more.safetensors"),
        f"more.safetensors is not named in {CHECKSUMS}.",
    ),
    "no checksum": (append("abc  model.safetensors"), f"{CHECKSUMS}, line 5: not a SHA-256 checksum and a file name."),
    "a path": (append(f"{NONE}  ../x"), f"{CHECKSUMS}, line 5: '../x' lies outside of the folder."),
    "a name too long": (append(f"{NONE}  {'x' * 300}"), f"{'x' * 300} is missing, and {CHECKSUMS} names it."),
    "no name at all": (append(f"{NONE}  \0"), f"\0 is missing, and {CHECKSUMS} names it."),
    "an absolute path": (append(f"{NONE}  /etc/passwd"), f"{CHECKSUMS}, line 5: '/etc/passwd' lies outside of the"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_checksums(change, summed):
    fault, message = CHANGED[change]
    fault(summed)
    findings = verify_checkpoint(summed).findings
    assert sum(finding.startswith(message) for finding in findings) == 1, findings
    assert len(findings) == 1


def test_reports_may_be_written_later(summed):
    (summed / "README.md").write_text("another card")
    (summed / "evaluation.json").write_text("{}")
    found = verify_checkpoint(summed)
    assert found.ok and found.notes == [f"README.md was written after {CHECKSUMS}."]


# --- tensors ---------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
DAMAGED = {
    "plain NaN": (poke("model.norm.weight", 5, value=NAN), r"model.norm.weight: 1 of 64 values are NaN or Inf."),
    "plain Inf": (
        poke("model.embed_tokens.weight", slice(0, 2), value=-INF),
        r"model.embed_tokens.weight: 128 of 8192 values are NaN or Inf.",
    ),
    "a bias": (poke("model.layers.0.mlp.up_proj.bias", 0, value=INF), r"up_proj.bias: 1 of 128 values are NaN or Inf"),
    "block scale": (
        poke(f"{KEY}_scale", 0, 0, value=0x7F, dtype=torch.uint8),
        r"model.layers.1.mlp.down_proj.*1 block scales are negative, NaN",
    ),
    "tensor scale": (put(f"{KEY}_global_scale", torch.tensor([-1.0])), r"down_proj.*the tensor scale is \[-1.0\]"),
    "tiny tensor scale": (
        put(f"{KEY}_global_scale", torch.tensor([2.0**-126])),
        rf"{KEY}: \d+ of 8192 weights decode to NaN or Inf",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_numbers(damage, tmp_path):
    change, message = DAMAGED[damage]
    folder = edited(case("llama").folder, tmp_path / "packed", change)
    found = verify_checkpoint(folder)
    assert len(found.findings) == 1, found.findings
    assert re.search(message, found.findings[0]), found.findings


def test_outliers(tmp_path):
    folder = saved(tmp_path, outlier_fallback=0.02)
    key = f"{KEY}_outlier_columns"
    changed = edited(folder, tmp_path / "changed", put(key, lambda old: torch.full_like(old.int(), 128).to(old.dtype)))
    found = verify_checkpoint(changed)
    assert len(found.findings) == 1 and "columns" in found.findings[0] and "down_proj" in found.findings[0]


def test_outliers_of_no_weight(tmp_path):
    """Those of a stack of experts stand beside codes that are stored one by one; without codes they are an error."""

    def move(tensors):
        for key in [key for key in tensors if "layers.1." in key and "down_proj_outlier" in key]:
            tensors[key.replace("down_proj", "out_proj")] = tensors.pop(key)

    folder = edited(saved(tmp_path, "mixtral", "mxfp4", outlier_fallback=0.01), tmp_path / "changed", move)
    findings = verify_checkpoint(folder).findings
    assert len(findings) == 1 and "experts.out_proj_outlier_offsets: outliers of no packed weight" in findings[0]


def test_all_damage_is_told(tmp_path):
    """One finding does not hide another."""

    def change(tensors):
        for damage in DAMAGED.values():
            damage[0](tensors)

    del_key = "model.layers.0.mlp.up_proj.weight_packed"
    folder = edited(case("llama").folder, tmp_path / "packed", change)
    assert len(verify_checkpoint(folder).findings) == 4  # three plain tensors and one matrix
    (folder / "other").mkdir()
    folder = edited(case("llama").folder, tmp_path / "second", lambda t: (change(t), t.pop(del_key)))
    findings = verify_checkpoint(folder).findings  # what is packed cannot be told: plain tensors still are looked at
    assert "up_proj" in findings[0] and sum("NaN or Inf" in finding for finding in findings) == 3


def test_two_damaged_files(tmp_path):
    case("llama").model.save_pretrained(tmp_path, max_shard_size=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files[:2]:
        path.write_bytes(path.read_bytes()[:-1])
    findings = verify_checkpoint(tmp_path).findings
    assert [path.name in finding for path, finding in zip(files, findings, strict=False)] == [True, True]


# --- against the source ----------------------------------------------------------------------------------------------


def swap(one: str, other: str):
    def change(tensors):
        for ending in ("packed", "scale", "global_scale"):
            a, b = f"{one}.weight_{ending}", f"{other}.weight_{ending}"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


LAYERS = "model.layers.{}.mlp.{}"
AGAINST = {
    "layers exchanged": (swap(LAYERS.format(0, "up_proj"), LAYERS.format(1, "up_proj")), 2, "relative squared error"),
    "a scale off by 2": (put(f"{KEY}_global_scale", lambda old: old * 2), 1, rf"{KEY}: relative squared error 0.25"),
    "nibbles exchanged": (
        put(f"{KEY}_packed", lambda old: (old << 4) | (old >> 4)),
        1,
        f"above {LARGEST_ERROR}, which no sound quantization",
    ),
    "a plain value": (poke("model.norm.weight", 1, value=2.0), 1, "model.norm.weight: 1 of 64 values are not the sou"),
    "a tensor more": (lambda tensors: tensors.update(x=torch.ones(1)), 1, "x is not in the source."),
    "a tensor less": (put("model.norm.weight", None), 1, "model.norm.weight of the source is missing."),
    "another shape": (put("model.norm.weight", torch.ones(63, dtype=torch.bfloat16)), 1, r"shape \[63\], and \[64\]"),
}


@pytest.mark.parametrize("difference", AGAINST)
def test_against_the_source(difference, tmp_path):
    change, count, message = AGAINST[difference]
    folder = edited(case("llama").folder, tmp_path / "packed", change)
    found = verify_checkpoint(folder, source("llama"))
    assert len(found.findings) == count, found.findings
    assert all(re.search(message, finding) for finding in found.findings)
    assert not any("source" in finding for finding in verify_checkpoint(folder).findings)


def test_plain_tensors_in_another_dtype(tmp_path):
    """A float32 source rounded to bfloat16 is the same model."""
    tensors = load_file(source("llama") / "model.safetensors")
    wide = {name: tensor.float() * (1 + 2.0**-12) for name, tensor in tensors.items()}
    shutil.copytree(source("llama"), tmp_path / "source")
    save_file(wide, tmp_path / "source/model.safetensors")
    assert verify_checkpoint(case("llama").folder, tmp_path / "source").ok
    save_file(wide | {"model.norm.weight": torch.full((64,), 1.1)}, tmp_path / "source/model.safetensors")
    findings = verify_checkpoint(case("llama").folder, tmp_path / "source").findings
    assert findings == ["model.norm.weight: 64 of 64 values are not the source's."]


def test_sources_refused(tmp_path):
    with pytest.raises(ValueError, match="is quantized itself; the source is the full-precision checkpoint"):
        verify_checkpoint(case("llama").folder, case("llama").folder)
    with pytest.raises(ValueError, match="is not a folder"):
        verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a folder"):
        verify_checkpoint(case("llama").folder, tmp_path / "nowhere")


def experts(**stored) -> dict[str, torch.Tensor]:
    return {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in stored.items()}


@pytest.mark.parametrize("width", [48, 32], ids=["", "square"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("direction", ["stack of the source", "stack of the checkpoint"])
def test_stacks_of_experts(direction, transposed, width, tmp_path):
    """Experts may be one stack in the source and one by one in the checkpoint, or the reverse (Llama 4, Qwen3.5)."""
    torch.manual_seed(0)
    stacks, one_by_one, codes = {}, {}, {}
    for name, leaves, n, k in (
        ("gate_up_proj", ("gate_proj", "up_proj"), 2 * width, 32),
        ("down_proj", ("down_proj",), 32, width),
    ):
        packed = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8)
        scale = torch.randint(40, 60, (3, n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        whole = QuantizedTensor(packed.view(-1, k // 2), scale.view(-1, k // 16), torch.tensor([1.0]), NVFP4)
        dense = dequantize(whole, torch.float32).view(3, n, k).bfloat16()
        stacks[name] = dense.mT.contiguous() if transposed else dense
        turn = (lambda t: t.view(torch.uint8).mT.contiguous().view(t.dtype)) if transposed else torch.clone
        codes |= {name: turn(packed), f"{name}_weight_scale": turn(scale), f"{name}_weight_scale_2": torch.tensor(1.0)}
        for expert in range(3):
            for leaf, rows in zip(leaves, dense[expert].chunk(len(leaves)), strict=True):
                one_by_one[f"{expert}.{leaf}.weight"] = rows.clone()
    folder, original = tmp_path / "packed", tmp_path / "source"
    folder.mkdir(), original.mkdir()
    save_file(experts(**codes), folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}
    (folder / "config.json").write_text(json.dumps(config))
    if direction == "stack of the source":
        export_checkpoint(folder, tmp_path / "out", "compressed-tensors")
        folder, count, source_tensors = tmp_path / "out", 9, experts(**stacks)
    else:
        count, source_tensors = 2, experts(**one_by_one)
    save_file(source_tensors, original / "model.safetensors")
    found = verify_checkpoint(folder, original)
    assert found.findings == [] and len(found.errors) == count and found.errors[found.worst] == 0
    save_file({key: tensor * 2 for key, tensor in source_tensors.items()}, original / "model.safetensors")
    findings = verify_checkpoint(folder, original).findings
    assert len(findings) == count and all("relative squared error 0.25" in finding for finding in findings)


def test_an_expert_less(tmp_path):
    """A stack of the source counts as stored only if all of it is."""
    save = {"experts.down_proj": torch.ones(3, 32, 48)}
    (tmp_path / "source").mkdir(), (tmp_path / "packed").mkdir()
    save_file(save, tmp_path / "source/model.safetensors")
    tensors = {}
    for expert in range(2):
        tensors[f"experts.{expert}.down_proj.weight"] = torch.full((32, 24), 0x22, dtype=torch.uint8)
        tensors[f"experts.{expert}.down_proj.weight_scale"] = torch.ones(32, 3).to(torch.float8_e4m3fn)
        tensors[f"experts.{expert}.down_proj.weight_scale_2"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "packed/model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    found = verify_checkpoint(tmp_path / "packed", tmp_path / "source")
    assert found.findings == ["experts.down_proj of the source is missing."] and set(found.errors.values()) == {0.0}


@pytest.mark.parametrize("fields", [{}, {"outlier_fallback": 0.01}], ids=["", "outliers"])
def test_experts_under_another_name(fields, tmp_path):
    """GraniteMoE's own checkpoints call the stacks of experts `input_linear.weight`; only codes are stored so."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GraniteMoeConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=FP4Config(format="nvfp4", **fields), dtype=torch.bfloat16
    )
    packed.save_pretrained(tmp_path / "packed")
    found = verify_checkpoint(tmp_path / "packed", tmp_path / "source")
    assert found.findings == [] and found.packed == 6 and 0 < found.errors[found.worst] < 0.03
    with pytest.raises(CannotExport, match="neither a linear's weight nor a stack of experts|outliers"):
        export_checkpoint(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    export_checkpoint(tmp_path / "packed", tmp_path / "out", "bf16")
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed.dequantize()
    assert_same_tensors(dense.state_dict(), packed.state_dict())
