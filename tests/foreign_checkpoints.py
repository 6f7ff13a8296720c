# SPDX-License-Identifier: Apache-2.0
"""Tiny models as other tools store them, and what those tools' own decoding makes of them.

compressed-tensors' files are made and decoded by its own compressors, gpt-oss's decoded by transformers; ModelOpt's by
the formulas of its documentation, written here again.
"""

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from tiny_models import source
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FILE = "model.safetensors"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ROUTERS = ["re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]
_NVFP4_ARGUMENTS = {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4_ARGUMENTS = {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}


class Made(NamedTuple):
    """A checkpoint of another tool, and the same decoded by it. Shared: not to be written to."""

    folder: Path
    dense: Path


class Kind(NamedTuple):
    """How a tool stores one weight `[N, K]`: tensors by the ending of their names, and the weight it decodes."""

    store: Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
    config: dict
    layout: str
    format: str


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def tensor_scale(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A divisor `[1]` of its own for every weight; no power of two."""
    spread = 1 + (sum(name.encode()) % 7) / 9
    return (448 * 6 / (weight.abs().amax().float() * spread)).reshape(1)


def ct_nvfp4(name: str, weight: torch.Tensor):
    scheme, divisor = preset_name_to_scheme("NVFP4A16", ["Linear"]), tensor_scale(name, weight)
    blocks = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
    stored = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    stored = NVFP4PackedCompressor.compress(stored, scheme)
    return stored, NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]


def ct_mxfp4(name: str, weight: torch.Tensor):
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    blocks = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    stored = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return stored, MXFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]


def ct_config(format: str, arguments: dict, activations: dict | None = None) -> dict:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **arguments}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
    return {
        "config_groups": {"group_0": group | {"output_activations": None}},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head", *ROUTERS],
    }


# --- ModelOpt --------------------------------------------------------------------------------------------------------


def values_of(packed: torch.Tensor) -> torch.Tensor:
    """float32 values of codes, even k in the low nibble."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def packed_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Nearest codes of `weight / scale`, two to a byte."""
    scaled = weight.float() / scale
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) | (scaled < 0).long() << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def modelopt_nvfp4(name: str, weight: torch.Tensor):
    shared = "experts" in name and not re.search("down_proj|w2", name)  # by gate and up
    amax = torch.tensor(0.3) if shared else weight.abs().amax().float() * 1.3
    scale_2 = amax / (6 * 448)
    scale = (weight.unflatten(-1, (-1, 16)).abs().amax(-1).float() / 6 / scale_2).clamp(2**-9, 448)
    scale = scale.to(torch.float8_e4m3fn)
    factor = (scale.float() * scale_2).repeat_interleave(16, -1)
    packed = packed_of(weight, factor)
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(0.01)}
    return stored, (values_of(packed) * factor).to(weight.dtype)


def modelopt_awq(name: str, weight: torch.Tensor):
    smooth = torch.exp2(torch.arange(weight.shape[1]) % 5 - 2.0)  # multiplies the input, so the weight is divided
    stored, dense = modelopt_nvfp4(name, weight / smooth.to(weight.dtype))
    return stored | {"pre_quant_scale": smooth.to(weight.dtype)}, (dense.float() * smooth).to(weight.dtype)


def modelopt_mxfp4(name: str, weight: torch.Tensor):
    amax = weight.unflatten(-1, (-1, 32)).abs().amax(-1).float()
    exponent = torch.ceil(torch.log2(amax / 6)).clamp(-127, 127)
    factor = torch.exp2(exponent).repeat_interleave(32, -1)
    packed = packed_of(weight, factor)
    stored = {"weight": packed, "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, (values_of(packed) * factor).to(weight.dtype)


def modelopt_config(algorithm: str, group_size: int) -> dict:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group_size}
    return {
        "config_groups": {"group_0": {"input_activations": None, "weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "*.mlp.gate", "*.block_sparse_moe.gate"],
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quant_method": "modelopt",
    }


KINDS = {
    "ct-nvfp4": Kind(ct_nvfp4, ct_config("nvfp4-pack-quantized", _NVFP4_ARGUMENTS), "compressed-tensors", "nvfp4"),
    "ct-mxfp4": Kind(ct_mxfp4, ct_config("mxfp4-pack-quantized", _MXFP4_ARGUMENTS), "compressed-tensors", "mxfp4"),
    "modelopt-nvfp4": Kind(modelopt_nvfp4, modelopt_config("W4A16_NVFP4", 16), "modelopt 0.33.0", "nvfp4"),
    "modelopt-mxfp4": Kind(modelopt_mxfp4, modelopt_config("MXFP4", 32), "modelopt 0.33.0", "mxfp4"),
    "modelopt-awq": Kind(modelopt_awq, modelopt_config("W4A16_NVFP4", 16), "modelopt 0.33.0", "nvfp4"),
}


# --- checkpoints -----------------------------------------------------------------------------------------------------


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="hf_mxfp4-foreign-")


def is_packed(key: str, weight: torch.Tensor) -> bool:
    """Whether tools pack a weight: not embeddings, heads, routers and towers for images."""
    return weight.ndim == 2 and key.endswith(".weight") and not re.search(r"embed|lm_head|\.gate\.|visual", key)


def taken_apart(key: str, stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """One matrix per expert and projection of a stack `[E, N, K]`, in its order."""
    path, leaves = key.rpartition(".")[0], ("gate", "up") if key.endswith("gate_up_proj") else ("down",)
    halves = [zip(leaves, expert.chunk(len(leaves)), strict=True) for expert in stack]
    return {f"{path}.{e}.{leaf}_proj.weight": half for e, pairs in enumerate(halves) for leaf, half in pairs}


@functools.cache
def made(name: str, kind: str) -> Made:
    """A tiny model of `tiny_models` as a tool stores it."""
    folders = Made(*(Path(_scratch().name) / f"{name}-{kind}{end}" for end in ("", "-dense")))
    for folder in folders:
        shutil.copytree(source(name), folder)
    packed, dense = {}, {}
    for key, weight in load_file(folders.folder / FILE).items():
        packed[key] = dense[key] = weight
        matrices = {key: weight} if is_packed(key, weight) else {}
        if weight.ndim == 3 and "experts" in key:
            matrices = taken_apart(key, weight)
        decoded = []
        for path, matrix in matrices.items():
            stored, its = KINDS[kind].store(path, matrix)
            decoded.append(its)
            packed.pop(key, None)
            packed |= {path.removesuffix("weight") + ending: value.contiguous() for ending, value in stored.items()}
        if matrices:
            dense[key] = torch.cat(decoded).view(weight.shape)
    write(folders.folder, packed, KINDS[kind].config)
    write(folders.dense, dense)
    return folders


@functools.cache
def made_gpt_oss() -> Made:
    """A tiny gpt-oss in its own MXFP4."""
    folders = Made(*(Path(_scratch().name) / f"gpt_oss{end}" for end in ("", "-dense")))
    for folder in folders:
        shutil.copytree(source("gpt_oss"), folder)
    packed, dense = {}, {}
    for key, weight in load_file(folders.folder / FILE).items():
        packed[key] = dense[key] = weight
        if weight.ndim == 3:
            rows = weight.mT.contiguous()  # [E, N, K]
            stored, _ = modelopt_mxfp4(key, rows)
            blocks = stored["weight"].unflatten(-1, (-1, 16)).contiguous()
            del packed[key]
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": stored["weight_scale"]}
            dense[key] = convert_moe_packed_tensors(blocks, stored["weight_scale"], dtype=weight.dtype).contiguous()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(folders.folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    write(folders.dense, dense)
    return folders


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict | None = None) -> None:
    """Put other tensors, and a quantization_config, into a checkpoint."""
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
