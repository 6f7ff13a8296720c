# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints as the target's own readers decode them: the packed model's weights, bit for bit."""

import hashlib
import json
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from test_bad_input import edited
from test_without_us import READER
from tiny_models import assert_same_tensors, auto_class, case, file_bytes, outputs, source, tokens
from torch import nn

from hf_mxfp4 import FP4Config, export, inspection, verification
from hf_mxfp4.checkpoint_files import INDEX, TensorReader, read_checkpoint
from hf_mxfp4.export import TARGETS, CannotExport, export_checkpoint
from hf_mxfp4.verification import verify_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SOURCES = {
    "llama": ("llama", "nvfp4", {"layout": "own"}),
    "llama-portable": ("llama", "nvfp4", {}),
    "llama-free": ("llama", "nvfp4", {"global_scale": "free"}),
    "llama-amax": ("llama", "nvfp4", {"scale_rule": "amax"}),
    "qwen3": ("qwen3", "mxfp4", {"layout": "own"}),
    "bert": ("bert", "nvfp4", {"layout": "own"}),
    "mixed": (
        "llama",
        "nvfp4",
        {"layout": "own", "overrides": {r"layers\.0\.mlp": {"format": "mxfp4"}, "k_proj": "skip"}},
    ),
    "qwen3_moe": ("qwen3_moe", "nvfp4", {}),
    "qwen3_moe-mxfp4": ("qwen3_moe", "mxfp4", {}),
    "mixtral": ("mixtral", "nvfp4", {}),
    "deepseek_v3": ("deepseek_v3", "nvfp4", {}),
    "gpt_oss": ("gpt_oss", "nvfp4", {}),
    "gpt_oss-mxfp4": ("gpt_oss", "mxfp4", {}),
    "outliers": ("llama", "nvfp4", {"outlier_fallback": 0.01}),
    "outliers-moe": ("mixtral", "nvfp4", {"outlier_fallback": 0.01}),
    "macro": ("qwen3", "mxfp4", {"macro_block": "static"}),
}
DENSE = ("llama", "llama-portable", "llama-free", "llama-amax", "qwen3", "bert", "mixed")
MOE = ("qwen3_moe", "qwen3_moe-mxfp4", "mixtral", "deepseek_v3")
MODELOPT = ("llama", "llama-free", "llama-amax", "bert", "qwen3_moe", "mixtral", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A packed model and its folder, by label; made once each."""
    root, made = tmp_path_factory.mktemp("sources"), {}

    def get(label: str):
        if label not in made:
            name, format, fields = SOURCES[label]
            model = case(name, format).quantize(**fields)
            model.save_pretrained(root / label)
            made[label] = model, root / label
        return made[label]

    return get


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """Folder of a source in a target, and the export's summary; made once each."""
    root, made = tmp_path_factory.mktemp("exports"), {}

    def get(label: str, target: str):
        if (label, target) not in made:
            output = root / f"{label}-{target}"
            made[label, target] = output, export_checkpoint(models(label)[1], output, target)
        return made[label, target]

    return get


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


# --- full precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", SOURCES)
def test_bf16_is_what_dequantize_saves(label, models, exported, tmp_path):
    folder, summary = exported(label, "bf16")
    model = auto_class(SOURCES[label][0]).from_pretrained(models(label)[1])
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert_same_tensors(stored(folder), stored(tmp_path))
    assert config_of(folder) == config_of(tmp_path)
    assert summary.matrices > 0 and summary.nbytes == sum(t.nbytes for t in stored(folder).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype, models, tmp_path):
    """Weights are decoded to the dtype, not cast from bfloat16; tensors in a dtype of their own stay."""
    change = {"model.norm.weight": torch.ones(64, dtype=torch.float32) / 3}
    folder = edited(models("llama")[1], tmp_path / "source", lambda tensors: tensors.update(change))
    export_checkpoint(folder, tmp_path / "out", "bf16", dtype=dtype)
    model = models("llama")[0]
    tensors = stored(tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")
    assert torch.equal(tensors.pop("model.norm.weight"), change["model.norm.weight"])
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    down = model.model.layers[0].mlp.down_proj
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], down.dense("weight", dtype))
    assert torch.equal(tensors["model.embed_tokens.weight"], model.model.embed_tokens.weight.to(dtype))


def test_values_that_do_not_fit_float16(models, tmp_path):
    large = {"model.norm.weight": torch.full((64,), 1e5, dtype=torch.bfloat16)}
    folder = edited(models("llama")[1], tmp_path / "source", lambda tensors: tensors.update(large))
    with pytest.raises(ValueError, match=r"model.norm.weight: values do not fit torch.float16"):
        export_checkpoint(folder, tmp_path / "out", "bf16", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def test_transformers_reads_the_same_weights(models, exported):
    """Dense exports, read with compressed-tensors in a process that never imports hf_mxfp4."""
    folders = {label: exported(label, "compressed-tensors")[0] for label in DENSE}
    command = [sys.executable, "-c", READER, json.dumps(tokens().tolist()), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir(), timeout=300)
    assert "REPORT" in done.stdout, done.stderr[-3000:]
    assert set(json.loads(done.stdout.partition("REPORT")[2]).values()) == {"loaded"}
    for label, folder in folders.items():
        theirs = load_file(folder / "plain.safetensors")
        (folder / "plain.safetensors").unlink()
        dense = stored(exported(label, "bf16")[0])
        linears = {name for name, module in models(label)[0].named_modules() if isinstance(module, nn.Linear)}
        assert theirs.keys() - {"output"} == linears
        for name in linears - {"lm_head"}:
            assert torch.equal(theirs[name], dense[f"{name}.weight"]), (label, name)


@pytest.mark.parametrize("label", MOE)
def test_experts_through_compressed_tensors(label, exported):
    """Tensor by tensor through its decompressors: transformers' reader drops tensor scales of experts (#48371)."""
    folder, summary = exported(label, "compressed-tensors")
    tensors, dense = stored(folder), stored(exported(label, "bf16")[0])
    is_mx = label.endswith("mxfp4")
    compressor = MXFP4PackedCompressor if is_mx else NVFP4PackedCompressor
    scheme = preset_name_to_scheme("MXFP4A16" if is_mx else "NVFP4A16", ["Linear"])
    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    assert len(names) == summary.matrices and any(".experts.3." in name for name in names)
    for name in names:
        parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        assert parts.keys() == {"weight_packed", "weight_scale"} | (
            {"weight_global_scale"} - ({"weight_global_scale"} if is_mx else set())
        )
        weight = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(weight.to(torch.bfloat16), dense[f"{name}.weight"]), name
    assert any("48371" in note for note in summary.notes)


@pytest.mark.parametrize("label", [*DENSE, *MOE])
def test_compressed_tensors_config(label, models, exported):
    """Its own parser reads it; each packed module, and no other, falls under a group of its format."""
    folder, _ = exported(label, "compressed-tensors")
    config = config_of(folder)
    written = config.pop("quantization_config")
    before = config_of(models(label)[1])
    del before["quantization_config"]
    assert config == before
    ours = FP4Config.from_dict(config_of(models(label)[1])["quantization_config"]).to_dict()
    fields = written.pop("hf_mxfp4")
    assert fields == ours.get("hf_mxfp4", {k: v for k, v in ours.items() if k in fields}) and fields["version"] == 1
    QuantizationConfig.model_validate(written)
    tensors = stored(folder)
    packed = {name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")}
    plain = {name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim == 2}
    assert not {f"{name}.weight" for name in written["ignore"]} & packed
    assert plain - {f"{name}.weight" for name in written["ignore"]} <= {
        name for name in plain if "embed" in name.rpartition(".")[0].rpartition(".")[2]
    }
    by_name = {name for group in written["config_groups"].values() for name in group["targets"]} - {"Linear"}
    for name in packed:
        is_mx = f"{name}_global_scale" not in tensors
        module = name.removesuffix(".weight")
        groups = [g for g in written["config_groups"].values() if module in g["targets"] or module not in by_name]
        assert ("mxfp4" if is_mx else "nvfp4") in groups[0 if module in by_name else -1]["format"]


@pytest.mark.parametrize("label", MOE)
def test_loads_with_us(label, models, exported):
    """Packed experts in the other layout give the same output on our kernels."""
    model = auto_class(SOURCES[label][0]).from_pretrained(exported(label, "compressed-tensors")[0])
    assert torch.equal(outputs(model), outputs(models(label)[0]))


# --- ModelOpt --------------------------------------------------------------------------------------------------------


def modelopt_weight(codes, scale, scale_2) -> torch.Tensor:
    """Its formula, `NVFP4QTensor.dequantize`: E2M1 values times (block scale times tensor scale), as bfloat16."""
    values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(-2)
    factors = scale.to(torch.float32) * scale_2
    return (values.unflatten(-1, (-1, 16)) * factors[..., None]).flatten(-2).to(torch.bfloat16)


@pytest.mark.parametrize("label", MODELOPT)
def test_modelopt_formula(label, exported):
    folder, summary = exported(label, "modelopt")
    tensors, dense = stored(folder), stored(exported(label, "bf16")[0])
    names = [name.removesuffix("_scale_2") for name in tensors if name.endswith("weight_scale_2")]
    assert len(names) == summary.matrices
    for name in names:
        scale_2 = tensors[f"{name}_scale_2"]
        assert scale_2.shape == () and scale_2.dtype == torch.float32
        assert torch.equal(modelopt_weight(tensors[name], tensors[f"{name}_scale"], scale_2), dense[name]), name
    assert not any("input_scale" in name for name in tensors)
    assert tensors.keys() == dense.keys() | {f"{name}_scale" for name in names} | {f"{name}_scale_2" for name in names}


def test_modelopt_stacks_of_experts(exported):
    """gpt-oss: one transposed tensor for all experts, under one tensor scale."""
    folder, summary = exported("gpt_oss", "modelopt")
    tensors, dense = stored(folder), stored(exported("gpt_oss", "bf16")[0])
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, scale = tensors[name], tensors[f"{name}_weight_scale"]
        experts, k, n = dense[name].shape
        assert codes.shape == (experts, k // 2, n) and scale.shape == (experts, k // 16, n)
        turned = scale.view(torch.uint8).transpose(1, 2).contiguous().view(scale.dtype)
        weight = modelopt_weight(codes.transpose(1, 2), turned, tensors[f"{name}_weight_scale_2"])
        assert torch.equal(weight.transpose(1, 2), dense[name])
    assert any("experts" in name for name in summary.shifted)


def test_modelopt_configs(exported):
    """As ModelOpt 0.47 writes them for W4A16_NVFP4 (`export/convert_hf_config.py`, `quant_utils.get_quant_config`)."""
    folder, _ = exported("qwen3_moe", "modelopt")
    expected = json.loads(
        '{"config_groups": {"group_0": {"weights": {"dynamic": false, "num_bits": 4, "type": "float", '
        '"group_size": 16}, "targets": ["Linear"]}}, "ignore": ["lm_head", "model.layers.0.mlp.gate", '
        '"model.layers.1.mlp.gate"], "quant_algo": "W4A16_NVFP4", "quant_method": "modelopt"}'
    )
    written = config_of(folder)["quantization_config"]
    old = json.loads((folder / "hf_quant_config.json").read_text())
    assert written.pop("producer") == old["producer"] and old["producer"]["name"] == "modelopt"
    assert written == expected
    assert old["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": expected["ignore"],
    }


@pytest.mark.parametrize("label", MODELOPT)
def test_there_and_back(label, exported, tmp_path):
    """compressed-tensors -> ModelOpt -> compressed-tensors: with scales that are powers of two, byte for byte."""
    first, _ = exported(label, "compressed-tensors")
    export_checkpoint(first, tmp_path / "modelopt", "modelopt")
    export_checkpoint(tmp_path / "modelopt", tmp_path / "back", "compressed-tensors")
    before, after = stored(first), stored(tmp_path / "back")
    if label in ("llama-free", "llama-amax"):  # the divisor may come back a float32 step away: no weight changes
        export_checkpoint(tmp_path / "back", tmp_path / "dense", "bf16")
        assert_same_tensors(stored(tmp_path / "dense"), stored(exported(label, "bf16")[0]))
        for name in [name for name in before if name.endswith("global_scale")]:
            torch.testing.assert_close(after.pop(name), before.pop(name), rtol=2**-22, atol=0)
    assert_same_tensors(before, after)
    config, back = config_of(first), config_of(tmp_path / "back")
    assert "hf_mxfp4" not in back["quantization_config"]
    del config["quantization_config"]["hf_mxfp4"]
    assert config == back


def test_stacks_are_taken_apart(tmp_path):
    """Fused experts without biases (Llama 4 as ModelOpt stores it) become one linear per expert and projection."""
    torch.manual_seed(0)
    path, tensors = "model.layers.0.feed_forward.experts", {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}
    for name, k, n in (("gate_up_proj", 32, 96), ("down_proj", 48, 32)):
        tensors[f"{path}.{name}"] = torch.randint(0, 256, (3, k // 2, n), dtype=torch.uint8)
        scale = torch.randint(1, 127, (3, k // 16, n), dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors[f"{path}.{name}_weight_scale"] = scale
        tensors[f"{path}.{name}_weight_scale_2"] = torch.tensor(2.0**-9)
    config = {"model_type": "llama4", "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors")
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    export_checkpoint(tmp_path / "source", tmp_path / "out", "compressed-tensors")
    export_checkpoint(tmp_path / "source", tmp_path / "dense", "bf16")
    found, dense = stored(tmp_path / "out"), stored(tmp_path / "dense")
    gate_up = dense[f"{path}.gate_up_proj"]
    assert gate_up.shape == (3, 32, 96) and len(found) == 1 + 3 * 3 * 3
    for expert in range(3):
        parts = {"gate_proj": gate_up[expert, :, :48], "up_proj": gate_up[expert, :, 48:]}
        for part, weight in {**parts, "down_proj": dense[f"{path}.down_proj"][expert]}.items():
            module = f"{path}.{expert}.{part}"
            names = (f"{module}.weight_packed", f"{module}.weight_scale", f"{module}.weight_global_scale")
            codes, scale, divisor = (found[name] for name in names)
            assert torch.equal(modelopt_weight(codes, scale, 1 / divisor), weight.t()), module


# --- checkpoints that other tools made -------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"
# Those whose decoded weights the tools gave beside them, in the model's own basis.
DECODED = ("fouroversix_mxfp4", "fouroversix_nvfp4", "fp_quant_mxfp4_identity", "torchao_nvfp4")
PORTED = (
    *("fouroversix_experts", "fouroversix_mxfp4", "fouroversix_nvfp4", "modelopt_mixed", "modelopt_moe"),
    *("modelopt_mxfp4", "torchao_nvfp4"),
)


@pytest.mark.parametrize("name", DECODED)
def test_other_tools_in_full_precision(name, tmp_path):
    export_checkpoint(GOLDEN / name, tmp_path / "out", "bf16")
    found, expected = stored(tmp_path / "out"), load_file(GOLDEN / f"{name}.expected.safetensors")
    for key, weight in expected.items():
        assert torch.equal(found[key], weight.to(torch.bfloat16)), key


@pytest.mark.parametrize("name", PORTED)
def test_other_tools_to_compressed_tensors(name, tmp_path):
    """The weights are those of the bf16 export; scales of activations are left out, which is said."""
    apart = (
        name == "torchao_nvfp4"
    )  # whose siblings have tensor scales of their own, which no common one can stand for
    if apart:
        with pytest.raises(CannotExport, match=r"gate_proj.* and no common one leaves every weight as it is"):
            export_checkpoint(GOLDEN / name, tmp_path / "out", "compressed-tensors")
    summary = export_checkpoint(GOLDEN / name, tmp_path / "out", "compressed-tensors", requantize=apart)
    export_checkpoint(GOLDEN / name, tmp_path / "dense", "bf16")
    tensors, dense = stored(tmp_path / "out"), stored(tmp_path / "dense")
    for key in [key for key in tensors if key.endswith(".weight_packed")]:
        module = key.removesuffix(".weight_packed")
        is_mx = f"{module}.weight_global_scale" not in tensors
        parts = {k.removeprefix(f"{module}."): v for k, v in tensors.items() if k.startswith(f"{module}.")}
        scheme = preset_name_to_scheme("MXFP4A16" if is_mx else "NVFP4A16", ["Linear"])
        compressor = MXFP4PackedCompressor if is_mx else NVFP4PackedCompressor
        weight = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)
        expected = of_stack(dense, module) if f"{module}.weight" not in dense else dense[f"{module}.weight"]
        if module in summary.requantized:
            error = (weight.double() - expected.double()).square().sum() / expected.double().square().sum()
            assert (
                float(error) == pytest.approx(summary.requantized[module]["error"], rel=0.2) and error < 0.02
            )  # told before bfloat16
        else:
            assert torch.equal(weight, expected), module
    assert "hf_mxfp4" not in config_of(tmp_path / "out")["quantization_config"]
    assert bool(summary.requantized) == apart
    assert bool(summary.skipped) == any("are left out: " in note for note in summary.notes)
    assert verify_checkpoint(tmp_path / "out").ok


def of_stack(dense: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """An expert's projection `[N, K]` in a stack of transposed ones, gate and up side by side."""
    path, expert, leaf = module.rsplit(".", 2)
    if leaf == "down_proj":
        return dense[f"{path}.down_proj"][int(expert)].t()
    return dense[f"{path}.gate_up_proj"][int(expert)].chunk(2, -1)[leaf == "up_proj"].t()


def linear(module: str, n: int = 32, k: int = 32) -> dict[str, torch.Tensor]:
    """A linear as compressed-tensors stores it."""
    scale = torch.randint(20, 100, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts = {"packed": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), "scale": scale}
    return {
        f"{module}.weight_{name}": part for name, part in {**parts, "global_scale": torch.tensor([2.0**7])}.items()
    }


@pytest.fixture
def partly_packed(tmp_path) -> Path:
    """v_proj and a stack of experts in full precision, W4A4, and a tied head of which the config says nothing."""
    layer, folder = "model.layers.0", tmp_path / "source"
    tensors = linear(f"{layer}.self_attn.q_proj") | linear(f"{layer}.self_attn.k_proj")
    plain = {"self_attn.v_proj.weight": (32, 32), "mlp.gate.weight": (2, 32)}
    plain |= {"mlp.experts.gate_up_proj": (2, 64, 32), "mlp.experts.down_proj": (2, 32, 32)}
    tensors |= {f"{layer}.{name}": torch.ones(shape, dtype=torch.bfloat16) for name, shape in plain.items()}
    scheme = {"num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": scheme}},
        "ignore": ["re:.*v_proj", "re:.*experts.*"],
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_that_is_not_packed_is_ignored(partly_packed, tmp_path):
    """Stacks too: engines ask for an expert's projections by name (compressed-tensors) or by its path (ModelOpt)."""
    one_by_one = [f"mlp.experts.{e}.{part}_proj" for e in range(2) for part in ("down", "gate", "up")]
    export_checkpoint(partly_packed, tmp_path / "ct", "compressed-tensors")
    found = config_of(tmp_path / "ct")["quantization_config"]["ignore"]
    assert found == ["lm_head", *(f"model.layers.0.{n}" for n in (*one_by_one, "mlp.gate", "self_attn.v_proj"))]
    export_checkpoint(partly_packed, tmp_path / "modelopt", "modelopt")
    found = config_of(tmp_path / "modelopt")["quantization_config"]["ignore"]
    assert found == ["lm_head", *(f"model.layers.0.{n}" for n in ("mlp.experts*", "mlp.gate", "self_attn.v_proj"))]
    export_checkpoint(tmp_path / "modelopt", tmp_path / "back", "compressed-tensors")
    assert config_of(tmp_path / "back") == config_of(tmp_path / "ct")


@pytest.mark.parametrize("target", TARGETS)
def test_notes(target, partly_packed, tmp_path):
    notes = " ".join(export_checkpoint(partly_packed, tmp_path / "out", target).notes)
    assert ("(W4A4); the export is weight-only." in notes) == (target != "bf16")
    apart = "such as model.layers.0.self_attn.(q_proj, k_proj, v_proj)) are not all packed in one format"
    assert (apart in notes) == (target != "bf16")


# --- what a target cannot hold ---------------------------------------------------------------------------------------

REFUSED = {
    ("outliers", "compressed-tensors"): r"it has outliers in full precision.*Export to bf16, or quantize again",
    ("outliers", "modelopt"): r"and 9 more: it has outliers in full precision",
    ("outliers-moe", "compressed-tensors"): r"it has outliers in full precision.*Export to bf16",
    ("macro", "compressed-tensors"): r"and 9 more: it has macro-blocks.*Export to bf16",
    ("macro", "modelopt"): r"MXFP4 weights with activations in full precision have no name.*compressed-tensors",
    ("qwen3", "modelopt"): r"MXFP4 weights with activations in full precision have no name",
    ("mixed", "modelopt"): r"layers.0.mlp.down_proj.weight, .*MXFP4 weights with activations in full precision",
    ("gpt_oss", "compressed-tensors"): r"layers.1.mlp.experts.gate_up_proj: stacks of experts with biases \(gpt-oss\)",
    ("gpt_oss-mxfp4", "compressed-tensors"): r"stacks of experts with biases.*Export to bf16",
}


@pytest.mark.parametrize("label, target", REFUSED)
def test_refused_by_name(label, target, models, tmp_path):
    with pytest.raises(CannotExport, match=REFUSED[label, target]):
        export_checkpoint(models(label)[1], tmp_path / "out", target)
    assert not any(tmp_path.iterdir())


def test_full_precision_sources_and_unknown_methods(models, tmp_path):
    with pytest.raises(ValueError, match="it is in full precision"):
        export_checkpoint(source("llama"), tmp_path / "out", "bf16")
    with pytest.raises(ValueError, match=r"target='gguf'; allowed: compressed-tensors, modelopt, bf16"):
        export_checkpoint(models("llama")[1], tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match=r"dtype=torch.float64; allowed: torch.bfloat16"):
        export_checkpoint(models("llama")[1], tmp_path / "out", "bf16", dtype=torch.float64)
    assert not any(tmp_path.iterdir())


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_files(target, models, tmp_path):
    """Shards and index as asked for, the other files copied, checksums of all; a source is never written to."""
    folder = tmp_path / "source"
    folder.mkdir()
    others = {"tokenizer.json": b"{}", "generation_config.json": b'{"a": 1}', "chat_template.jinja": b"{{ x }}"}
    others |= {"LICENSE": b"text", "modeling_x.py": b"pass"}
    others_inside = {"additional_chat_templates/tools.jinja": b"{{ y }}"}
    reports = {
        "README.md": b"card",
        "pytorch_model.bin": b"\x80",
        "tf_model.h5": b"\x80",
        "recipe.yaml": b"",
        "checksums.sha256": b"",
        "evaluation.json": b"{}",
    }
    for name, content in {**file_bytes(models("llama")[1]), **others, **reports}.items():
        (folder / name).write_bytes(content)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ y }}")
    (folder / ".cache").mkdir()
    before = tree(folder)
    seen = []
    summary = export_checkpoint(
        folder, tmp_path / "out", target, max_shard_size=20_000, progress=lambda *args: seen.append(args)
    )
    assert tree(folder) == before
    written = tree(tmp_path / "out")
    own = {"config.json", INDEX, "checksums.sha256", *summary.files} | (
        {"hf_quant_config.json"} if target == "modelopt" else set()
    )
    others |= others_inside
    assert written.keys() == own | others.keys()
    assert {name: written[name] for name in others} == others
    assert len(summary.files) > 3
    listed = dict(reversed(line.split("  ")) for line in written["checksums.sha256"].decode().splitlines())
    assert listed == {n: hashlib.sha256(c).hexdigest() for n, c in written.items() if n != "checksums.sha256"}
    index = json.loads(written[INDEX])
    headers = read_checkpoint(tmp_path / "out")  # which compares the index
    assert index["weight_map"] == {name: tensor.file for name, tensor in headers.tensors.items()}
    assert index["metadata"]["total_size"] == summary.nbytes == sum(t.nbytes for t in headers.tensors.values())
    assert seen[-1][0] == seen[-1][1] > 0 and [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert (tmp_path / "out").stat().st_mode & 0o777 == folder.stat().st_mode & 0o777
    export_checkpoint(folder, tmp_path / "whole", target)
    assert_same_tensors(stored(tmp_path / "out"), stored(tmp_path / "whole"))
    assert verify_checkpoint(tmp_path / "out").ok


@pytest.mark.parametrize("target", TARGETS)
def test_configs_of_composed_models(target, models, tmp_path):
    """What `text_config` says of quantization and dtype does not outlive the export."""

    def compose(config):
        config["text_config"] = {"quantization_config": config.pop("quantization_config"), "dtype": "bfloat16", "a": 1}

    folder = edited(models("llama")[1], tmp_path / "source", config=compose)
    export_checkpoint(folder, tmp_path / "out", target, dtype=torch.float32)
    config = config_of(tmp_path / "out")
    dtype = "float32" if target == "bf16" else "bfloat16"
    assert config["text_config"] == {"dtype": dtype, "a": 1} and config["dtype"] == dtype
    assert ("quantization_config" in config) == (target != "bf16")


def test_empty_output_folder_is_taken(models, tmp_path):
    (tmp_path / "out").mkdir()
    export_checkpoint(models("llama")[1], tmp_path / "out", "bf16")
    assert (tmp_path / "out/config.json").is_file()


def test_files_are_unmapped_on_the_way(models, exported, tmp_path, monkeypatch):
    """Pages of mapped files count as memory; a file that was let go is opened again."""
    closed, close = [], TensorReader.close
    monkeypatch.setattr(TensorReader, "close", lambda self: (closed.append(1), close(self)))
    monkeypatch.setattr(export, "_UNMAP_EVERY", 5_000)
    monkeypatch.setattr(verification, "_UNMAP_EVERY", 5_000)
    export_checkpoint(models("llama")[1], tmp_path / "out", "bf16")
    assert len(closed) > 5
    assert_same_tensors(stored(tmp_path / "out"), stored(exported("llama", "bf16")[0]))
    closed.clear()
    assert verify_checkpoint(models("llama")[1], source("llama")).ok and len(closed) > 5
    checkpoint = read_checkpoint(models("llama")[1])
    with TensorReader(checkpoint.folder, checkpoint.tensors) as read:
        scales = inspection.inspect_checkpoint(checkpoint, read).scales
        monkeypatch.setattr(inspection, "_UNMAP_EVERY", 5_000)
        closed.clear()
        assert inspection.inspect_checkpoint(checkpoint, read).scales == scales and len(closed) > 5


def test_memory(models, tmp_path, monkeypatch):
    """Of the source, never more than one unit's tensors are alive: no more than the largest stack or group."""
    alive, peak = weakref.WeakValueDictionary(), []
    plain = TensorReader.__call__

    def call(self, name):
        tensor = plain(self, name)
        alive[name, len(peak)] = tensor
        peak.append(sum(t.nbytes for t in alive.values()))
        return tensor

    monkeypatch.setattr(TensorReader, "__call__", call)
    for target in TARGETS:
        alive.clear(), peak.clear()
        export_checkpoint(models("qwen3_moe")[1], tmp_path / target, target)
        tensors = read_checkpoint(models("qwen3_moe")[1]).tensors.values()
        assert 0 < max(peak) <= max(t.nbytes for t in tensors) < sum(t.nbytes for t in tensors) / 4
