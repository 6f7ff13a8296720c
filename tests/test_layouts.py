# SPDX-License-Identifier: Apache-2.0
"""layouts/: what compressed-tensors, transformers (gpt-oss) and we store, read from headers; faults of files."""

import copy
import json
import math
import pickle

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from tiny_models import case, packed_modules
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_mxfp4 import layouts
from hf_mxfp4.checkpoint_files import SAFETENSORS_DTYPES, Checkpoint, StoredTensor, TensorReader, read_checkpoint
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, decode_e4m3
from hf_mxfp4.layouts.base import divisor_of
from hf_mxfp4.layouts.targets import Patterns
from hf_mxfp4.packed import dense_copy
from hf_mxfp4.reference import quantize, unpack

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
both_formats = pytest.mark.parametrize("format", FORMATS)


def headers(tensors: dict[str, torch.Tensor], quantization: dict | None, **config) -> Checkpoint:
    """A checkpoint of these tensors in one file, as its header describes them."""
    dtypes = SAFETENSORS_DTYPES | {torch.float8_e5m2: "F8_E5M2", torch.int8: "I8"}
    stored = {
        name: StoredTensor(dtypes[tensor.dtype], tuple(tensor.shape), "model.safetensors")
        for name, tensor in tensors.items()
    }
    return Checkpoint(config, quantization, stored, {"model.safetensors": {}})


def decoded(matrix: layouts.PackedMatrix, tensors, dtype=torch.bfloat16) -> torch.Tensor:
    """A matrix's dense weight, packed dimension last."""
    read = tensors if callable(tensors) else tensors.__getitem__
    return dense_copy(matrix.format, dtype, **matrix.decode(read)._asdict())


def same_bits(found: torch.Tensor, expected: torch.Tensor):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


# --- compressed-tensors ----------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(64, 64, bias=name == "o") for name in "qkvo"})
        self.mlp = nn.ModuleDict({"experts": nn.ModuleList(Expert() for _ in range(2)), "gate": nn.Linear(64, 2)})


class Model(nn.Module):
    """Named as transformers names a mixture of experts whose experts are stored one by one."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 64), "layers": nn.ModuleList([Block(), Block()])})
        self.lm_head = nn.Linear(64, 8)


IGNORE = ["lm_head", "re:.*mlp.gate$"]


def by_compressed_tensors(folder, groups: dict, ignore=IGNORE, change=lambda config: None):
    """A folder that compressed-tensors writes, and the weights it decompresses from there, by module."""
    torch.manual_seed(0)
    model = Model().bfloat16()
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for number, (_, module) in enumerate(model.named_modules()):
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        module.weight.data = torch.randn(module.weight.shape).mul_(0.02 * (number + 1)).bfloat16()
        low, high = module.weight.unflatten(-1, (-1, scheme.weights.group_size)).float().aminmax(dim=-1)
        divisor = None
        if hasattr(module, "weight_global_scale"):
            divisor = module.weight_global_scale.data = generate_gparam(low.amin(), high.amax())
        module.weight_scale.data, _ = calculate_qparams(low, high, scheme.weights, global_scale=divisor)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data = torch.full_like(module.input_global_scale, 1000.0 + number)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    compressor.update_config(str(folder))
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    compressor.decompress_model(model)
    return {
        name: module.weight.data
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }


def assert_decodes(folder, expected: dict[str, torch.Tensor]) -> layouts.Contents:
    """Every weight, and no other, has the peer's bits."""
    checkpoint = read_checkpoint(folder)
    contents = layouts.read(checkpoint)
    assert contents.matrices.keys() == {f"{name}.weight" for name in expected}
    with TensorReader(folder, checkpoint.tensors) as read:
        for name, weight in expected.items():
            matrix = pickle.loads(pickle.dumps(contents.matrices[f"{name}.weight"]))
            assert matrix.shape == weight.shape and not matrix.transposed
            assert set(matrix.keys) <= checkpoint.tensors.keys()
            same_bits(decoded(matrix, read), weight)
    return contents


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "NVFP4", "MXFP4"])
def test_compressed_tensors_files(preset, tmp_path):
    """Weights equal its own decompression bit for bit; each expert keeps its own tensor scale."""
    expected = by_compressed_tensors(tmp_path, {"group_0": preset_name_to_scheme(preset, ["Linear"])})
    contents = assert_decodes(tmp_path, expected)
    assert contents.layout == "compressed-tensors" and contents.origin.startswith("compressed-tensors ")
    four_bit_activations = not preset.endswith("A16")
    assert contents.activation_format == ("same" if four_bit_activations else None)
    assert bool(contents.notes) == four_bit_activations
    inputs = {f"{name}.input_global_scale" for name in expected} if preset == "NVFP4" else set()
    assert contents.skipped.keys() == inputs
    plain = contents.plain(read_checkpoint(tmp_path).tensors)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} <= plain.keys()
    assert not any("packed" in name or "scale" in name for name in plain)
    if preset == "NVFP4A16":
        tensors = read_checkpoint(tmp_path).tensors
        with TensorReader(tmp_path, tensors) as read:
            scales = [contents.matrices[f"{name}.weight"].decode(read).global_scale for name in expected]
            stored = [read(f"{name}.weight_global_scale") for name in expected]
        assert len({float(scale) for scale in scales}) == len(expected)
        assert all(
            torch.equal(scale, found) and scale.shape == (1,) for scale, found in zip(scales, stored, strict=True)
        )


def test_mixed_groups(tmp_path):
    """A full name before a pattern before a class, as compressed-tensors chooses."""
    groups = {
        "group_0": preset_name_to_scheme("MXFP4A16", ["re:.*experts.*", "model.layers.1.self_attn.q_proj"]),
        "group_1": preset_name_to_scheme(
            "NVFP4A16", ["re:.*q_proj", "Linear", "model.layers.0.mlp.experts.1.up_proj"]
        ),
    }
    contents = assert_decodes(tmp_path, by_compressed_tensors(tmp_path, groups))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == "mixed-precision"
    formats = {name.removesuffix(".weight"): matrix.format for name, matrix in contents.matrices.items()}
    assert (
        formats["model.layers.0.mlp.experts.1.up_proj"] is NVFP4
        and formats["model.layers.0.self_attn.o_proj"] is NVFP4
    )
    assert formats["model.layers.0.mlp.experts.0.up_proj"] is MXFP4
    assert formats["model.layers.1.self_attn.q_proj"] is MXFP4 and formats["model.layers.0.self_attn.q_proj"] is NVFP4


def test_only_some_groups_with_activations(tmp_path):
    groups = {
        "group_0": preset_name_to_scheme("NVFP4", ["re:.*self_attn.*"]),
        "group_1": preset_name_to_scheme("NVFP4A16", ["re:.*experts.*"]),
    }
    contents = assert_decodes(tmp_path, by_compressed_tensors(tmp_path, groups))
    assert contents.activation_format is None and "Only some" in " ".join(contents.notes)


def test_what_groups_ask_beside_weights():
    """Activations in 8 bits, and groups of activations alone: not followed, and said."""
    tensors, config = stored_linear("nvfp4")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float"}
    config["config_groups"]["group_1"] = {"targets": ["Attention"], "weights": None, "input_activations": {}}
    contents = layouts.read(headers(tensors, config))
    assert contents.activation_format is None
    assert any("group_0 asks for 8-bit float activations" in note for note in contents.notes)
    assert any("group_1 of its config quantizes no weights" in note for note in contents.notes)


def shorten(config: dict):
    """As older versions wrote it: one format for all groups, no scale dtype, keys that are gone since."""
    for group in config["config_groups"].values():
        del group["format"], group["weights"]["scale_dtype"]
        group["weights"] |= {"observer": "minmax", "block_structure": None, "actorder": None, "zp_dtype": None}
    config |= {"sparsity_config": {}, "transform_config": {}, "unknown": 1}
    del config["ignore"][config["ignore"].index("lm_head")]  # its last name is no packed module's
    config.pop("version", None)


def without_format(config: dict):
    shorten(config)
    del config["format"]


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16"])
@pytest.mark.parametrize("change", [shorten, without_format])
def test_older_configs(preset, change, tmp_path):
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    contents = assert_decodes(tmp_path, by_compressed_tensors(tmp_path, groups, change=change))
    assert contents.origin == "compressed-tensors"


def test_config_of_the_text_model(tmp_path):
    """Where transformers finds it too."""

    tensors, config = stored_linear("nvfp4")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": config}}))
    assert layouts.read(read_checkpoint(tmp_path)).matrices.keys() == {f"{LINEAR}.weight"}


def test_kv_cache_is_skipped_by_name():
    tensors, config = stored_linear("nvfp4")
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    scales = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale", "q_scale")]
    tensors |= {name: torch.ones(1) for name in scales}
    contents = layouts.read(headers(tensors, config))
    assert sorted(contents.skipped) == sorted(scales)
    assert all("KV cache" in why for why in contents.skipped.values()) and "KV cache" in " ".join(contents.notes)


LINEAR = "model.layers.0.self_attn.q_proj"


def stored_linear(format: str, name: str = LINEAR, n: int = 4, k: int = 64) -> tuple[dict, dict]:
    """Tensors and `quantization_config` of compressed-tensors for one linear."""
    weight = quantize(torch.randn(n, k), format, "amax")
    tensors = {f"{name}.weight_packed": weight.packed, f"{name}.weight_scale": weight.scale}
    if weight.global_scale is not None:
        tensors[f"{name}.weight_global_scale"] = weight.global_scale.reciprocal().reshape(1)
    arguments = {"num_bits": 4, "type": "float", "group_size": FORMATS[format].block_size}
    group = {"targets": ["Linear"], "weights": arguments, "format": f"{format}-pack-quantized"}
    return tensors, {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def edit(config: dict, **weights) -> dict:
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


REFUSED_CONFIGS = {
    "fp8": (
        lambda c: c["config_groups"]["group_0"].update(format="float-quantized"),
        "float-quantized .*group_size=16",
    ),
    "int4": (
        lambda c: c["config_groups"]["group_0"].update(format="pack-quantized"),
        "pack-quantized .* not supported",
    ),
    "eight bits": (lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=8), "num_bits=8"),
    "other group": (
        lambda c: c["config_groups"].update(
            group_1={"targets": ["re:.*experts.*"], "weights": {"num_bits": 8}, "format": "mxfp8-quantized"}
        ),
        "config_groups.group_1: mxfp8-quantized .*experts",
    ),
    "block size": (lambda c: c["config_groups"]["group_0"]["weights"].update(group_size=32), "contradicts"),
    "zero points": (lambda c: c["config_groups"]["group_0"]["weights"].update(symmetric=False), "zero points"),
    "sparse": (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    "transform": (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "transforms .R1."),
    "no groups": (lambda c: c.pop("config_groups"), "no config_groups"),
    "no weights": (lambda c: c["config_groups"]["group_0"].update(weights=None), "no group that quantizes weights"),
    "regex": (lambda c: c["ignore"].append("re:("), "'re:\\(' is not a regular expression"),
    "ignore": (lambda c: c.update(ignore="lm_head"), "ignore of the config is not a list"),
    "targets": (lambda c: c["config_groups"]["group_0"].update(targets="Linear"), "targets 'Linear' is not a list"),
    "mxfp4 said": (
        lambda c: c["config_groups"]["group_0"].update(format="mxfp4-pack-quantized", weights={}),
        "stored as nvfp4's, and quantization_config says mxfp4",
    ),
    "ignored": (lambda c: c["ignore"].append("re:.*q_proj"), "lists 're:.\\*q_proj' in ignore"),
    "not targeted": (
        lambda c: c["config_groups"]["group_0"].update(targets=["re:.*k_proj"]),
        "nothing of this module",
    ),
    "promised": (
        lambda c: c["config_groups"]["group_0"]["targets"].append("model.layers.7.mlp.up_proj"),
        "promises model.layers.7.mlp.up_proj in nvfp4 .group_0., and no file",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_configs_that_are_refused(case):
    change, message = REFUSED_CONFIGS[case]
    tensors, config = stored_linear("nvfp4")
    layouts.read(headers(tensors, config))
    change(config)
    with pytest.raises(ValueError, match=message):
        layouts.read(headers(tensors, config))


def test_linear_in_full_precision_that_the_config_packs():
    """Only what a packed module shows to be a linear, in the same part of the model, among its layers."""
    tensors, config = stored_linear("nvfp4")
    other = LINEAR.replace("layers.0", "layers.1")
    dense = torch.zeros(4, 64, dtype=torch.bfloat16)
    named = {f"{other}.weight": dense, "lm_head.weight": dense, "model.embed_tokens.weight": dense}
    with pytest.raises(ValueError, match=rf"in full precision: {other}.weight \(BF16\)"):
        layouts.read(headers(tensors | named, config))
    for entry in (other, "re:.*layers.1.*", other.removeprefix("model."), f"model.language_model.{other[6:]}"):
        ignoring = config | {"ignore": [entry]}
        assert len(layouts.read(headers(tensors | named, ignoring)).matrices) == 1
    layouts.read(headers(tensors | named, config, num_hidden_layers=1))  # of multi-token prediction
    layouts.read(headers(tensors | {f"mtp.{other}.weight": dense}, config))
    named[f"{other}.weight"] = dense.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"quantized in another way: .*q_proj.weight \(F8_E4M3\)"):
        layouts.read(headers(tensors | named, config))


PACKED, SCALE, GLOBAL = (f"{LINEAR}.weight_{name}" for name in ("packed", "scale", "global_scale"))
FAULTS = {  # by what is wrong: the tensor, what is there instead, and what the error says
    "no scale": (SCALE, None, f"no {SCALE}"),
    "no tensor scale": (GLOBAL, None, f"no {GLOBAL}"),
    "no codes": (PACKED, None, r"no file holds a tensor \*.weight_packed"),
    "codes of int8": (PACKED, torch.zeros(4, 32, dtype=torch.int8), "I8 .* expected U8"),
    "wide scale": (SCALE, torch.zeros(4, 4), "F32 .4, 4. in model.safetensors, expected F8_E4M3 or U8"),
    "scale of MXFP4": (SCALE, torch.zeros(4, 4, dtype=torch.uint8), "stored as mxfp4's, .* says nvfp4"),
    "few scales": (SCALE, torch.ones(4, 3).to(torch.float8_e4m3fn), r"\[4, 3\].*expected F8_E4M3 \[4, 4\]"),
    "two tensor scales": (GLOBAL, torch.ones(2), r"F32 \[2\].*expected F32 \[1\]"),
    "tensor scale of bfloat16": (GLOBAL, torch.ones(1, dtype=torch.bfloat16), "BF16 .* expected F32"),
    "K": (PACKED, torch.zeros(4, 30, dtype=torch.uint8), "K a multiple of nvfp4's 16"),
    "empty": (PACKED, torch.zeros(0, 32, dtype=torch.uint8), r"\[0, 32\].*not empty"),
    "0-d": (PACKED, torch.zeros((), dtype=torch.uint8), "codes of shape"),
    "three dimensions": (PACKED, torch.zeros(1, 4, 32, dtype=torch.uint8), r"expected \[N, K/2\]"),
    "zero points": (f"{LINEAR}.weight_zero_point", torch.zeros(4, 4, dtype=torch.uint8), "weight_zero_point"),
    "a scale alone": ("lm_head.weight_scale", torch.ones(4), "quantized in another way: lm_head.weight_scale"),
    "int8": ("lm_head.weight", torch.zeros(4, 64, dtype=torch.int8), r"lm_head.weight \(I8\)"),
    "float8": ("model.x", torch.zeros(4).to(torch.float8_e5m2), r"model.x \(F8_E5M2\)"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_tensors_that_are_refused(case):
    name, value, message = FAULTS[case]
    tensors, config = stored_linear("nvfp4")
    changed = {key: tensor for key, tensor in tensors.items() if key != name} | (
        {} if value is None else {name: value}
    )
    with pytest.raises(ValueError, match=message):
        layouts.read(headers(changed, config))


@both_formats
def test_values_that_are_refused(format):
    """Seen when a matrix is decoded: NaN in scales, a tensor scale that is no positive number."""
    tensors, config = stored_linear(format)
    matrix = layouts.read(headers(tensors, config)).matrices[f"{LINEAR}.weight"]
    nan = {"nvfp4": 0x7F, "mxfp4": 0xFF}[format]
    damaged = tensors[SCALE].clone()
    damaged.view(torch.uint8)[1, 1] = nan
    with pytest.raises(ValueError, match=f"{PACKED}: 1 block scales are negative, NaN"):
        matrix.decode((tensors | {SCALE: damaged}).__getitem__)
    for value in (0.0, -1.0, torch.nan, torch.inf) if format == "nvfp4" else ():
        with pytest.raises(ValueError, match="not a positive number"):
            matrix.decode((tensors | {GLOBAL: torch.tensor([value])}).__getitem__)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_shapes_of_a_tensor_scale(shape):
    tensors, config = stored_linear("nvfp4")
    expected = decoded(layouts.read(headers(tensors, config)).matrices[f"{LINEAR}.weight"], tensors)
    tensors[GLOBAL] = tensors[GLOBAL].reshape(shape)
    matrix = layouts.read(headers(tensors, config)).matrices[f"{LINEAR}.weight"]
    assert matrix.decode(tensors.__getitem__).global_scale.shape == (1,)
    same_bits(decoded(matrix, tensors), expected)


def test_block_scales_of_zero():
    """They make a block zero, whatever its codes; signs of zero stay."""
    tensors, config = stored_linear("nvfp4")
    tensors[SCALE].view(torch.uint8)[2, 1] = 0
    tensors[SCALE].view(torch.uint8)[0, 3] = 0x80
    stored = layouts.read(headers(tensors, config)).matrices[f"{LINEAR}.weight"].decode(tensors.__getitem__)
    values = E2M1[unpack(tensors[PACKED]).long()].unflatten(-1, (-1, 16))
    expected = (values * (decode_e4m3(tensors[SCALE]).abs() / tensors[GLOBAL])[..., None]).flatten(-2)
    same_bits(dense_copy(NVFP4, torch.float32, **stored._asdict()), expected)
    assert int((stored.scale.view(torch.uint8) == NVFP4.zero_byte).sum()) == 2


def test_recognise():
    tensors, config = stored_linear("nvfp4")
    assert layouts.recognise(headers(tensors, config)).name == "compressed-tensors"
    with pytest.raises(ValueError, match="full precision. Known: own, portable"):
        layouts.recognise(headers(tensors, None))
    with pytest.raises(ValueError, match="quant_method 'gptq' is not an FP4 layout known here"):
        layouts.recognise(headers(tensors, {"quant_method": "gptq"}))
    assert len({row.name for row in layouts.LAYOUTS}) == len(layouts.LAYOUTS)


def test_patterns():
    patterns = Patterns(["model.layers.0.up", "re:.*down$", "model.visual.*"], "ignore")
    found = {
        "model.layers.0.up": "model.layers.0.up",
        "model.language_model.layers.0.up": "model.layers.0.up",
        "model.layers.0.up_proj": None,
        "layers.3.down": "re:.*down$",
        "model.layers.3.down_proj": None,
        "visual.merger": "model.visual.*",
    }
    assert {name: patterns.find(name) for name in found} == found
    assert patterns.says("model.language_model.layers.0.up") is None and patterns.says("model.layers.0.up")
    assert patterns.covering("layers.3.down.lora") == "re:.*down$"


# --- ours ------------------------------------------------------------------------------------------------------------


def check_ours(model, folder) -> layouts.Contents:
    """Every packed tensor a model has, and no other, is read from its checkpoint with the same bits."""
    checkpoint = read_checkpoint(folder)
    contents = layouts.read(checkpoint)
    seen = set()
    with TensorReader(folder, checkpoint.tensors) as read:
        for name, matrix in contents.matrices.items():
            stored = matrix.decode(read)
            path, _, leaf = name.rpartition(".")
            if ".experts." in name and leaf == "weight":
                continue  # stored one by one; the next test looks at them
            module = model.get_submodule(path)
            for field, value in stored._asdict().items():
                if value is not None:
                    same_bits(value, getattr(module, f"{leaf}_{field}"))
                    seen.add(f"{path}.{leaf}_{field}")
            same_bits(dense_copy(matrix.format, torch.float32, **stored._asdict()), module.dense(leaf, torch.float32))
    names = {f"{path}.{name}" for path, module in packed_modules(model).items() for name, _ in module.named_buffers()}
    assert seen == names or any(".experts." in name for name in contents.matrices)
    assert not any(name.endswith(("_packed", "_scale", "_values")) for name in contents.plain(checkpoint.tensors))
    return contents


@both_formats
@pytest.mark.parametrize("name", ["qwen3", "llama", "bert"])
def test_portable(name, format):
    tiny = case(name, format)
    contents = check_ours(tiny.model, tiny.folder)
    assert (contents.layout, contents.origin, contents.notes) == ("portable", "hf_mxfp4", ())
    assert {matrix.format.name for matrix in contents.matrices.values()} == {format}


VARIANTS = {
    "macro": ("qwen3", "mxfp4", {"macro_block": "static"}, "own"),
    "outliers": ("qwen3", "nvfp4", {"outlier_fallback": 0.01}, "own"),
    "mixed": ("llama", "nvfp4", {"overrides": {r"layers\.0\.mlp": {"format": "mxfp4"}, "k_proj": "skip"}}, "portable"),
    "mixed own": ("llama", "nvfp4", {"overrides": {r"layers\.0\.mlp": {"format": "mxfp4"}}, "layout": "own"}, "own"),
    "head": ("llama", "nvfp4", {"overrides": {"lm_head": {}}}, "portable"),
    "skipped": ("qwen3", "nvfp4", {"modules_to_not_convert": ["model.layers.1", "o_proj"]}, "portable"),
    "skipped own": ("qwen3", "nvfp4", {"modules_to_not_convert": ["model.layers.1"], "layout": "own"}, "own"),
    "free": ("qwen3", "nvfp4", {"global_scale": "free"}, "portable"),
    "W4A4": ("qwen3", "nvfp4", {"activation_format": "same"}, "portable"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_configs_ask_for(variant, tmp_path):
    name, format, fields, layout = VARIANTS[variant]
    model = case(name, format).quantize(**fields)
    model.save_pretrained(tmp_path)
    contents = check_ours(model, tmp_path)
    assert contents.layout == layout and contents.activation_format == fields.get("activation_format")


@both_formats
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_one_by_one(name, format):
    """Each stored matrix is its part of the model's fused buffer."""
    tiny = case(name, format)
    contents = check_ours(tiny.model, tiny.folder)
    assert contents.layout == "own"
    with TensorReader(tiny.folder, read_checkpoint(tiny.folder).tensors) as read:
        experts = {key: matrix.decode(read) for key, matrix in contents.matrices.items() if ".experts." in key}
    modules = [module for path, module in packed_modules(tiny.model).items() if path.endswith(".experts")]
    found = [stored.packed for stored in experts.values()]
    for module in modules:
        for expert in (*module.gate_up_proj_packed.chunk(2, 1), module.down_proj_packed):
            for packed in expert:
                assert any(packed.shape == other.shape and torch.equal(packed, other) for other in found)
    assert len(experts) == 3 * sum(module.gate_up_proj_packed.shape[0] for module in modules)


@pytest.mark.parametrize("skip", ["model.layers.0.mlp.experts", "model.layers.1"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_left_in_full_precision(name, skip, tmp_path):
    """The config names them as the model does, fused; the files hold them one by one, Mixtral's under another name."""
    case(name).quantize(modules_to_not_convert=[skip]).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    layer = skip.removesuffix(".mlp.experts")
    packed = layouts.read(checkpoint).matrices
    assert len(packed) == (20 if layer != skip else 16) and not any(
        f"{layer}." in key and "experts" in key for key in packed
    )
    other = {"ignore": ["lm_head"]}
    with pytest.raises(ValueError, match="full precision: model.layers"):
        layouts.read(checkpoint._replace(quantization=checkpoint.quantization | other))


@both_formats
def test_fused_experts_of_ours(format):
    """gpt-oss, whose dense weights are transposed: named in the config, or known from its model type."""
    tiny = case("gpt_oss", format)
    contents = check_ours(tiny.model, tiny.folder)
    fused = {name: matrix for name, matrix in contents.matrices.items() if "experts" in name}
    assert len(fused) == 4 and all(matrix.transposed and len(matrix.shape) == 3 for matrix in fused.values())
    checkpoint = read_checkpoint(tiny.folder)
    said = checkpoint.quantization | {"transposed": ["model.layers.1.mlp.experts"]}
    matrices = layouts.read(checkpoint._replace(quantization=said)).matrices
    assert {name for name, matrix in matrices.items() if matrix.transposed} == {n for n in fused if "layers.1" in n}


def stored_own(format: str = "nvfp4", **extra) -> tuple[dict, dict]:
    tensors, _ = stored_linear(format)
    tensors = {name.replace("weight_packed", "weight"): tensor for name, tensor in tensors.items()}
    return tensors | {f"{LINEAR}.{name}": value for name, value in extra.items()}, {
        "quant_method": "hf_mxfp4",
        "format": format,
        "ignore": ["lm_head"],
    }


def test_input_transforms_and_origin():
    transforms = {"pre_quant_scale": torch.rand(64) + 0.5, "hadamard": torch.eye(32)}
    tensors, config = stored_own(**transforms)
    named = {LINEAR.removeprefix("model."): ["pre_quant_scale", "hadamard"]}
    contents = layouts.read(headers(tensors, config | {"origin": "modelopt 0.33.0", "transforms": named}))
    assert contents.origin == "modelopt 0.33.0, stored by hf_mxfp4"
    stored = contents.matrices[f"{LINEAR}.weight"].decode(tensors.__getitem__)
    assert all(torch.equal(getattr(stored, name), value) for name, value in transforms.items())
    assert not contents.plain(headers(tensors, config).tensors)


OWN_FAULTS = {
    "no scale": ({"weight_scale": None}, {}, "no .*weight_scale"),
    "format": ({}, {"format": "mxfp4"}, "stored as nvfp4's, and quantization_config says mxfp4"),
    "unknown format": ({}, {"format": "int4"}, "formats .'int4'."),
    "macro": ({"weight_macro_scale": torch.zeros(4, 2, dtype=torch.uint8)}, {}, r"\[4, 2\].*expected U8 \[4, 1\]"),
    "outliers": ({"weight_outlier_values": torch.zeros(2)}, {}, "no .*weight_outlier_columns"),
    "offsets": (
        {
            "weight_outlier_values": torch.zeros(2),
            "weight_outlier_columns": torch.zeros(2, dtype=torch.uint16),
            "weight_outlier_offsets": torch.zeros(4, dtype=torch.int32),
        },
        {},
        r"I32 \[4\].*expected I32 \[5\]",
    ),
    "pre_quant_scale": ({"pre_quant_scale": torch.ones(32)}, {}, r"F32 \[32\].*\[64\]"),
    "hadamard": ({"hadamard": torch.ones(3, 3)}, {}, r"F32 \[3, 3\]"),
    "transform": ({}, {"transforms": {LINEAR: ["hadamard"]}}, f"names {LINEAR}.hadamard, and no file holds it"),
    "transforms": ({}, {"transforms": {LINEAR: 1}}, "no map of module to names"),
    "nothing packed": ({"weight": torch.zeros(4, 64), "weight_scale": None}, {}, "no file holds a packed weight"),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_own_that_is_refused(fault):
    changes, config_changes, message = OWN_FAULTS[fault]
    tensors, config = stored_own()
    layouts.read(headers(tensors, config))
    tensors = {
        name: value for name, value in tensors.items() if changes.get(name.removeprefix(f"{LINEAR}."), 1) is not None
    }
    tensors |= {f"{LINEAR}.{name}": value for name, value in changes.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        layouts.read(headers(tensors, config | config_changes))


def test_own_linear_in_full_precision():
    tensors, config = stored_own()
    other = LINEAR.replace("layers.0", "layers.1")
    tensors[f"{other}.weight"] = torch.zeros(4, 64)
    with pytest.raises(ValueError, match=rf"full precision: {other}.weight \(F32\)"):
        layouts.read(headers(tensors, config))
    assert len(layouts.read(headers(tensors, config | {"ignore": [other]})).matrices) == 1


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (2,), (3, 1), (2, 3)], ids=str)
def test_tensor_scales_of_fused_experts(shape):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = quantize(torch.randn(2, 8, 64), "nvfp4", "amax")
    tensors = {name: weight.packed, f"{name}_scale": weight.scale, f"{name}_global_scale": torch.ones(shape)}
    checkpoint = headers(tensors, {"quant_method": "hf_mxfp4", "format": "nvfp4"})
    if shape in [(2, 1), (2, 2)]:
        matrix = layouts.read(checkpoint).matrices[name]
        assert not matrix.transposed and matrix.decode(tensors.__getitem__).global_scale.shape == shape
    else:
        with pytest.raises(ValueError, match=r"F32 .*expected F32 \[2, 1\]"):
            layouts.read(checkpoint)


# --- gpt-oss ---------------------------------------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts"


def gpt_oss() -> dict[str, torch.Tensor]:
    """Experts as in OpenAI's checkpoints: random codes, scales of any exponent that bfloat16 holds."""
    tensors = {}
    for name, n, k in (("gate_up_proj", 48, 64), ("down_proj", 64, 96)):
        tensors[f"{EXPERTS}.{name}_blocks"] = torch.randint(0, 256, (3, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{EXPERTS}.{name}_scales"] = torch.randint(1, 251, (3, n, k // 32), dtype=torch.uint8)
        tensors[f"{EXPERTS}.{name}_bias"] = torch.randn(3, n).bfloat16()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.randn(8, 64).bfloat16()
    return tensors


GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def test_gpt_oss():
    """Weights equal transformers' own decoding, which gives them as the model has them, `[E, K, N]`."""
    tensors = gpt_oss()
    contents = layouts.read(headers(tensors, GPT_OSS))
    assert contents.layout == "gpt-oss" and contents.matrices.keys() == {
        f"{EXPERTS}.{name}" for name in ("gate_up_proj", "down_proj")
    }
    for name, matrix in contents.matrices.items():
        expected = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert matrix.transposed and matrix.format is MXFP4
        assert matrix.shape == (expected.shape[0], expected.shape[2], expected.shape[1])
        same_bits(decoded(matrix, tensors).mT, expected)
    plain = contents.plain(headers(tensors, GPT_OSS).tensors)
    assert len(plain) == 3 and not contents.skipped


GPT_OSS_FAULTS = {
    "no scales": ("gate_up_proj_scales", None, "no .*gate_up_proj_scales"),
    "no blocks": ("gate_up_proj_blocks", None, "no .*gate_up_proj_blocks"),
    "block of 8": ("down_proj_blocks", torch.zeros(3, 64, 6, 8, dtype=torch.uint8), r"expected \[E, N, K/32, 16\]"),
    "no experts": ("down_proj_blocks", torch.zeros(0, 64, 3, 16, dtype=torch.uint8), "not empty"),
    "scales": (
        "down_proj_scales",
        torch.zeros(3, 64, 2, dtype=torch.uint8),
        r"\[3, 64, 2\].*expected U8 \[3, 64, 3\]",
    ),
    "dtype": ("down_proj_scales", torch.zeros(3, 64, 3), "F32 .*expected U8"),
    "dense": ("gate_up_proj", torch.zeros(3, 64, 48, dtype=torch.bfloat16), "gate_up_proj is stored in BF16"),
}


@pytest.mark.parametrize("fault", GPT_OSS_FAULTS)
def test_gpt_oss_that_is_refused(fault):
    name, value, message = GPT_OSS_FAULTS[fault]
    tensors = gpt_oss()
    tensors.pop(f"{EXPERTS}.{name}", None)
    tensors |= {} if value is None else {f"{EXPERTS}.{name}": value}
    with pytest.raises(ValueError, match=message):
        layouts.read(headers(tensors, GPT_OSS))


def test_gpt_oss_without_experts():
    with pytest.raises(ValueError, match="no file holds experts"):
        layouts.read(headers({"lm_head.weight": torch.zeros(2, 2)}, GPT_OSS))


def test_gpt_oss_scale_of_nan():
    tensors = gpt_oss()
    tensors[f"{EXPERTS}.down_proj_scales"][0, 0, 0] = 255
    matrix = layouts.read(headers(tensors, GPT_OSS)).matrices[f"{EXPERTS}.down_proj"]
    with pytest.raises(ValueError, match="down_proj_blocks: 1 block scales are negative, NaN"):
        matrix.decode(tensors.__getitem__)


# --- tensor scales that multiply -------------------------------------------------------------------------------------


def halfway(value: float) -> bool:
    """Whether a number lies halfway between two bfloat16 values (of 8 bits), to the precision of float32."""
    mantissa = math.frexp(value)[0] * 2**9  # 256 .. 512: odd numbers are halfway
    return abs(mantissa - (2 * math.floor(mantissa / 2) + 1)) <= 2**9 * 2**-23


SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]


def mismatches(multiplier: torch.Tensor, divisor: torch.Tensor) -> list[tuple[float, float]]:
    """Block scales and codes of which bfloat16 weights differ."""
    scale, codes = decode_e4m3(SCALES), E2M1[1:8]
    wanted, found = (codes * (scale * multiplier)).bfloat16(), (codes * (scale / divisor)).bfloat16()
    return [(float(scale[i, 0]), float(codes[j])) for i, j in (wanted != found).nonzero().tolist()]


def blocks(found: list[tuple[float, float]]) -> int:
    return len({scale for scale, _ in found})


@pytest.mark.parametrize("top", [448, 256])
def test_divisors_of_bfloat16_maxima(top):
    """For every mantissa that the maximum of a bfloat16 weight has: never worse than the reciprocal, and wrong only
    for weights halfway between two values."""
    better, wrong = 0, 0
    for mantissa in range(128, 256):
        multiplier = torch.tensor(mantissa / 1024) / (6 * top)
        divisor = divisor_of(multiplier, SCALES)
        assert divisor.shape == () and divisor.dtype == torch.float32
        off, simple = mismatches(multiplier, divisor), mismatches(multiplier, multiplier.reciprocal())
        assert all(halfway(scale * code * float(multiplier)) for scale, code in off) and blocks(off) <= blocks(simple)
        wrong, better = wrong + bool(off), better + (blocks(off) < blocks(simple))
    assert (wrong, better) == {448: (1, 1), 256: (9, 15)}[top]


def test_divisors_of_other_maxima():
    multiplier = (torch.rand(200) * 4 + 1e-3) / 2688
    divisor = divisor_of(multiplier, SCALES.expand(200, -1, -1))
    assert divisor.shape == (200,)
    assert not any(mismatches(m, d) for m, d in zip(multiplier, divisor, strict=True))
    exact = torch.tensor([2.0**-12, 0.5, 4.0])
    assert torch.equal(divisor_of(exact, SCALES.expand(3, -1, -1)), exact.reciprocal())
