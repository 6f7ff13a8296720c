# SPDX-License-Identifier: Apache-2.0
"""layouts/modelopt.py against checkpoints that ModelOpt itself wrote (golden/make_modelopt.py); faults of files."""

import copy
import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from test_layouts import E2M1, GPT_OSS, LINEAR, gpt_oss, headers, same_bits, stored_own
from test_layouts import stored_linear as stored_by_compressed_tensors

from hf_mxfp4 import layouts
from hf_mxfp4.checkpoint_files import TensorReader, read_checkpoint
from hf_mxfp4.formats import MXFP4, NVFP4
from hf_mxfp4.packed import dense_copy
from hf_mxfp4.reference import quantize, unpack

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path for path in GOLDEN.glob("modelopt_*") if path.is_dir())


def documented(tensors, key: str) -> torch.Tensor:
    """A weight as ModelOpt documents it, float32, packed dimension last: `E2M1 * (scale * scale_2)`."""
    prefix = key if key.endswith(".weight") else f"{key}_weight"
    packed, scale = tensors[key], tensors[f"{prefix}_scale"]
    if packed.ndim == 3:
        packed, scale = packed.mT, scale.mT
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    else:
        scale = scale.float() * tensors[f"{prefix}_scale_2"]
    values = E2M1[unpack(packed).long()] + 0.0  # it decodes code 8 to 0, not to -0
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def between(weight: torch.Tensor) -> torch.Tensor:
    """Where a float32 weight lies halfway between two bfloat16 values, or one float32 step from there."""
    return (weight.view(torch.int32) & 0xFFFF).sub(0x8000).abs() <= 1


def check_weights(contents: layouts.Contents, tensors, hashes: dict[str, str] | None = None) -> int:
    """Every weight has the documented bits, except halfway between two values. Returns how many of those there are."""
    different = 0
    for key, matrix in contents.matrices.items():
        expected = documented(tensors, key)
        stored = matrix.decode(tensors.__getitem__)._replace(pre_quant_scale=None)
        found = dense_copy(matrix.format, torch.bfloat16, **stored._asdict()) + 0.0
        assert found.shape == matrix.shape
        if hashes is not None:
            modelopt = hashlib.sha256(expected.bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert hashes[key] == modelopt, key
        other = found != expected.bfloat16()
        assert not bool((other & ~between(expected)).any()), key
        different += int(other.sum())
    return different


def load(folder: Path):
    checkpoint = read_checkpoint(folder)
    with TensorReader(folder, checkpoint.tensors) as read:
        return checkpoint, {name: read(name) for name in checkpoint.tensors}


# Matrices, weights that are rounded the other way, formats, activations, skipped endings.
EXPECTED = {
    "modelopt_moe": (10, 0, {NVFP4}, "same", {"input_scale", "k_scale", "v_scale"}),
    "modelopt_gpt_oss": (6, 0, {NVFP4}, "same", {"input_scale", "gate_up_proj_input_scale", "down_proj_input_scale"}),
    "modelopt_awq": (7, 13, {NVFP4}, "same", {"input_scale"}),
    "modelopt_mxfp4": (7, 0, {MXFP4}, None, set()),
    "modelopt_mixed": (6, 0, {NVFP4, MXFP4}, None, set()),
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden(folder):
    """Bits of ModelOpt's own `dequantize`, in every folder it wrote."""
    checkpoint, tensors = load(folder)
    contents = layouts.read(checkpoint)
    hashes = json.loads((folder / "decoded.json").read_text())
    assert contents.matrices.keys() == hashes.keys()
    different = check_weights(contents, tensors, hashes)
    formats = {matrix.format for matrix in contents.matrices.values()}
    skipped = {name.rpartition(".")[2] for name in contents.skipped}
    found = (len(hashes), different, formats, contents.activation_format, skipped)
    assert found == EXPECTED[folder.name]
    assert (contents.layout, contents.origin) == ("modelopt", "modelopt 0.47.0")
    plain = contents.plain(checkpoint.tensors)
    assert all(tensor.dtype == "BF16" for tensor in plain.values()) and "lm_head.weight" in plain


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_only_hf_quant_config(folder, tmp_path):
    """Older repositories have no quantization_config in config.json."""
    expected = layouts.read(read_checkpoint(folder))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = layouts.read(read_checkpoint(tmp_path))
    assert found._replace(matrices={}) == expected._replace(matrices={})
    described = [{name: m[:3] + m[4:] for name, m in contents.matrices.items()} for contents in (found, expected)]
    assert described[0] == described[1]


def test_fused_experts():
    """`[E, K/2, N]`, packed along K, becomes `[E, N, K/2]`; the dense weight is `[E, K, N]`."""
    checkpoint, tensors = load(GOLDEN / "modelopt_gpt_oss")
    matrices = layouts.read(checkpoint).matrices
    matrix = matrices["model.layers.0.mlp.experts.gate_up_proj"]
    assert matrix.shape == (2, 128, 32) and matrix.transposed
    stored = matrix.decode(tensors.__getitem__)
    assert stored.packed.shape == (2, 128, 16) and stored.global_scale.shape == (2, 1)
    assert [name for name, m in matrices.items() if m.transposed] == [n for n in matrices if "experts" in n]


def test_kv_cache():
    contents = layouts.read(read_checkpoint(GOLDEN / "modelopt_moe"))
    reasons = {name.rpartition(".")[2]: why for name, why in contents.skipped.items()}
    assert "KV cache" in reasons["k_scale"] and "activations" in reasons["input_scale"]
    assert any("KV cache" in note for note in contents.notes) and any("W4A4" in note for note in contents.notes)
    mask = {"model.layers.0.mask_scale": torch.ones(4)}  # its name only ends like a cache's scale
    assert not layouts.read(headers(stored_linear() | mask, config_of())).skipped


def test_awq():
    """What its input is multiplied by, where ModelOpt could not fold it into the layer before."""
    checkpoint, tensors = load(GOLDEN / "modelopt_awq")
    scaled = {}
    for name, matrix in layouts.read(checkpoint).matrices.items():
        stored = matrix.decode(tensors.__getitem__)
        if stored.pre_quant_scale is not None:
            scaled[name] = stored.pre_quant_scale
    assert scaled.keys() == {"model.layers.0.self_attn.o_proj.weight"}
    same_bits(*scaled.values(), tensors["model.layers.0.self_attn.o_proj.pre_quant_scale"])


# --- written here ----------------------------------------------------------------------------------------------------


def stored_linear(format: str = "nvfp4", name: str = LINEAR, n: int = 4, k: int = 64) -> dict[str, torch.Tensor]:
    weight = quantize(torch.randn(n, k) * 0.1, format, "amax")
    tensors = {f"{name}.weight": weight.packed, f"{name}.weight_scale": weight.scale}
    return tensors | ({} if weight.global_scale is None else {f"{name}.weight_scale_2": weight.global_scale})


def config_of(algorithm: str = "NVFP4", **fields) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **fields}


ALGORITHMS = {"NVFP4": "same", "NVFP4_AWQ": "same", "W4A16_NVFP4": None}


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", None])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(algorithm, method):
    tensors = stored_linear() | {f"{LINEAR}.pre_quant_scale": torch.rand(64)}
    config = config_of(algorithm, group_size=16, producer={"name": "modelopt", "version": "0.19.0"})
    config = {key: value for key, value in (config | {"quant_method": method}).items() if value is not None}
    contents = layouts.read(headers(tensors, config))
    assert contents.activation_format == ALGORITHMS[algorithm] and contents.origin == "modelopt 0.19.0"
    assert not contents.plain(headers(tensors, config).tensors)
    assert check_weights(contents, tensors) == 0


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_shapes_of_a_tensor_scale(shape):
    tensors = stored_linear()
    tensors[f"{LINEAR}.weight_scale_2"] = tensors[f"{LINEAR}.weight_scale_2"].reshape(shape)
    matrix = layouts.read(headers(tensors, config_of())).matrices[f"{LINEAR}.weight"]
    assert matrix.decode(tensors.__getitem__).global_scale.shape == (1,)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1, 1)], ids=str)
def test_tensor_scales_of_fused_experts(shape, transposed):
    """One for all experts, or one each; with another tensor scale for each expert, each has its own divisor."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = quantize(torch.randn(3, 32, 64), "nvfp4", "amax")
    scale = torch.rand(shape) + 0.5
    tensors = {name: weight.packed, f"{name}_weight_scale": weight.scale, f"{name}_weight_scale_2": scale}
    if transposed:
        tensors |= {key: tensors[key].mT.contiguous() for key in (name, f"{name}_weight_scale")}
    matrix = layouts.read(headers(tensors, config_of())).matrices[name]
    assert matrix.shape == (3, 32, 64) and matrix.transposed == transposed
    stored = matrix.decode(tensors.__getitem__)
    assert stored.global_scale.shape == (3, 1) and torch.equal(stored.packed, weight.packed)
    same_bits(stored.scale, weight.scale)
    torch.testing.assert_close(
        stored.global_scale[:, 0], scale.flatten().expand(3).reciprocal(), rtol=2.0**-22, atol=0.0
    )


def test_wildcards_and_parents():
    """What `exclude_modules` names may be in full precision: by wildcard, and by the module it stands in."""
    other = LINEAR.replace("layers.0", "layers.1")
    tensors = stored_linear() | {f"{other}.weight": torch.zeros(4, 64)}
    with pytest.raises(ValueError, match=rf"full precision: {other}.weight \(F32\)"):
        layouts.read(headers(tensors, config_of()))
    for entry in (other, "model.layers.1*", "model.layers.1.*", "*self_attn*", "model.layers.1", "layers.1.self_attn"):
        if entry == "*self_attn*":
            with pytest.raises(ValueError, match="says that it is not quantized"):
                layouts.read(headers(tensors, config_of(ignore=[entry])))
        else:
            assert len(layouts.read(headers(tensors, config_of(ignore=[entry]))).matrices) == 1
    said = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": [other]}, "producer": {"name": "modelopt"}}
    assert layouts.read(headers(tensors, said)).origin == "modelopt"


def test_mixed_precision():
    """Each layer by its name; a container's name stands for the experts in it."""
    experts = "model.layers.0.mlp.experts"
    tensors = stored_linear() | stored_linear("mxfp4", f"{experts}.0.up_proj")
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(2, 64)
    layers = {LINEAR: {"quant_algo": "NVFP4"}, experts: {"quant_algo": "MXFP4", "group_size": 32}}
    config = config_of("MIXED_PRECISION", quantized_layers=layers)
    contents = layouts.read(headers(tensors, config))
    assert {matrix.format for matrix in contents.matrices.values()} == {NVFP4, MXFP4}
    assert contents.activation_format is None and "Only some" in contents.notes[0]
    swapped = copy.deepcopy(config)
    swapped["quantized_layers"][experts]["quant_algo"] = "NVFP4"
    del swapped["quantized_layers"][experts]["group_size"]
    with pytest.raises(ValueError, match="up_proj.weight is stored packed in mxfp4, and the config says nvfp4"):
        layouts.read(headers(tensors, swapped))
    del swapped["quantized_layers"][experts]
    with pytest.raises(ValueError, match="up_proj.weight is stored packed in mxfp4, .* not quantized"):
        layouts.read(headers(tensors, swapped))
    layers["model.layers.1.self_attn.q_proj"] = {"quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match=r"quantized_layers of the config names model.layers.1.* \(nvfp4\), and no"):
        layouts.read(headers(tensors, config))
    layers["model.layers.1.self_attn.q_proj"] = {"quant_algo": "FP8"}
    with pytest.raises(ValueError, match="quant_algo FP8 .1 layers such as model.layers.1.self_attn.q_proj. is not"):
        layouts.read(headers(tensors, config))
    with pytest.raises(ValueError, match="MIXED_PRECISION without quantized_layers"):
        layouts.read(headers(tensors, config_of("MIXED_PRECISION")))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A16_AWQ", None])
def test_algorithms_that_are_refused(algorithm):
    with pytest.raises(ValueError, match=f"quant_algo {str(algorithm).upper()} .the whole model. is not supported"):
        layouts.read(headers(stored_linear(), config_of(algorithm)))


WEIGHT, SCALE, SCALE_2 = (f"{LINEAR}.{name}" for name in ("weight", "weight_scale", "weight_scale_2"))
FAULTS = {
    "no scale": (SCALE, None, f"no {SCALE}"),
    "no tensor scale": (SCALE_2, None, f"no {SCALE_2}"),
    "no weight": (WEIGHT, None, "no file holds a packed weight"),
    "in full precision": (WEIGHT, torch.zeros(4, 64), "no file holds a packed weight"),
    "MXFP4": (SCALE, torch.zeros(4, 2, dtype=torch.uint8), "packed in mxfp4, and the config says nvfp4"),
    "few scales": (SCALE, torch.ones(4, 3).to(torch.float8_e4m3fn), r"\[4, 3\].*expected F8_E4M3 \[4, 4\]"),
    "two tensor scales": (SCALE_2, torch.ones(2), r"F32 \[2\].*expected F32 \[1\]"),
    "tensor scale of bfloat16": (SCALE_2, torch.ones((), dtype=torch.bfloat16), "BF16 .* expected F32"),
    "K": (WEIGHT, torch.zeros(4, 30, dtype=torch.uint8), "K a multiple of nvfp4's 16"),
    "empty": (WEIGHT, torch.zeros(0, 32, dtype=torch.uint8), "not empty"),
    "float8": ("model.x.weight", torch.zeros(4, 4).to(torch.float8_e4m3fn), r"model.x.weight \(F8_E4M3\)"),
    "pre_quant_scale": (f"{LINEAR}.pre_quant_scale", torch.ones(63), r"F32 \[63\].*\[64\]"),
    "pre_quant_scale of another layer": ("model.x.pre_quant_scale", torch.ones(64), "model.x.pre_quant_scale .* no"),
    "svd": (f"{LINEAR}.svdquant_lora_a", torch.ones(2, 64), "svdquant_lora_a: SVDQuant"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_are_refused(fault):
    name, value, message = FAULTS[fault]
    tensors = stored_linear()
    layouts.read(headers(tensors, config_of()))
    tensors.pop(name, None)
    with pytest.raises(ValueError, match=message):
        layouts.read(headers(tensors | ({} if value is None else {name: value}), config_of()))


def test_group_size():
    with pytest.raises(ValueError, match="NVFP4 with group_size 32 .the whole model.: only 16"):
        layouts.read(headers(stored_linear(), config_of(group_size=32)))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_tensor_scales_that_are_refused(value):
    tensors = stored_linear()
    matrix = layouts.read(headers(tensors, config_of())).matrices[WEIGHT]
    with pytest.raises(ValueError, match="not a positive number"):
        matrix.decode((tensors | {SCALE_2: torch.tensor(value)}).__getitem__)


def test_block_scale_of_nan():
    tensors = stored_linear()
    tensors[SCALE].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="1 block scales are negative, NaN"):
        layouts.read(headers(tensors, config_of())).matrices[WEIGHT].decode(tensors.__getitem__)


# --- configs of every layout -----------------------------------------------------------------------------------------


def paths(value, start=()):
    """Every place in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*start, key)
        yield from paths(value[key], (*start, key))


def replaced(value, path: tuple, other):
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = other
    return value


def configs() -> dict[str, tuple[dict, dict]]:
    tensors, config = stored_by_compressed_tensors("nvfp4")
    config |= {
        "kv_cache_scheme": {},
        "sparsity_config": {"format": "dense"},
        "transform_config": {"config_groups": {}},
    }
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float"}
    own, own_config = stored_own()
    own_config |= {"overrides": [["a", {"format": "mxfp4"}]], "transposed": ["x"], "transforms": {}, "origin": "a"}
    layers = {LINEAR: {"quant_algo": "NVFP4", "group_size": 16}}
    old = {"producer": {"name": "modelopt", "version": "1"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    old["quantization"] |= {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    return {
        "compressed-tensors": (tensors, config),
        "portable": (tensors, config | {"hf_mxfp4": {"activation_format": None, "origin": None}}),
        "own": (own, own_config | {"activation_format": None}),
        "modelopt": (stored_linear(), config_of(group_size=16, producer={"name": "modelopt", "version": "1"})),
        "mixed": (stored_linear(), config_of("MIXED_PRECISION", quantized_layers=layers)),
        "old": (stored_linear(), old),
        "gpt-oss": (gpt_oss(), GPT_OSS),
    }


JSON = [None, 1, 0.5, "x", "re:[", "*", True, [], {}, [1], ["x"], [["a", "b"]], {"a": 1}, {"a": {}}, {"a": [None]}]


@pytest.mark.parametrize("name", configs())
def test_configs_of_any_json(name):
    """Whatever stands anywhere in a config: it is read, or refused with a sentence."""
    tensors, config = configs()[name]
    layouts.read(headers(tensors, config))
    refused = 0
    for path in paths(config):
        for value in JSON:
            try:
                layouts.read(headers(tensors, replaced(config, path, value)))
            except ValueError as error:
                refused += 1
                assert str(error).endswith(".")
    assert refused
