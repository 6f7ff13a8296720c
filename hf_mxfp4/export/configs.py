# SPDX-License-Identifier: Apache-2.0
"""config.json and its like of an exported checkpoint, as the target's own tools write them.

Sources: compressed-tensors 0.20 (`checkpoints.compressed_tensors_config`); ModelOpt 0.47, `export/quant_utils.py`
(`process_layer_quant_config`) and `export/convert_hf_config.py`, for weight-only NVFP4.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_mxfp4 import __version__
from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import FULL_PRECISION, HF_MXFP4_KEY, SIBLINGS, WRITTEN
from hf_mxfp4.layouts import Contents
from hf_mxfp4.layouts.own import PROJECTIONS

MODELOPT_ALGORITHM = "W4A16_NVFP4"  # NVFP4 itself stands for W4A4, and would ask for scales of activations
_MODELOPT_VERSION = "0.47.0"  # whose layout is written
_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_TIED = "tie_word_embeddings"
_GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NOT_OURS = ("quant_method", "ignore", "transposed", "transforms")  # in layout `own` beside our fields


def recipe_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Our own fields in a checkpoint's config, or `None` if it is not ours."""
    found = checkpoint.quantization or {}
    if HF_MXFP4_KEY in found:
        return dict(found[HF_MXFP4_KEY])
    if found.get("quant_method") == WRITTEN["own"].quant_method:
        return {key: value for key, value in found.items() if key not in _NOT_OURS}
    return None


def modules_in_full_precision(checkpoint: Checkpoint, contents: Contents) -> list[str]:
    """Names of modules that stay in full precision though they may be linears.

    Headers do not tell linears from routers, which engines may also build as linears, so both are named; embeddings
    are left out. Names in the source's own list are kept: a head tied to the embedding is stored nowhere.
    """
    packed = {name.removesuffix(".weight") for name in contents.matrices}
    quantization = checkpoint.quantization or {}
    inner = quantization.get("quantization")
    lists = [quantization.get("ignore"), inner.get("exclude_modules") if isinstance(inner, dict) else None]
    listed = {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}
    found = {name for name in listed if name not in packed and not any(mark in name for mark in ("re:", "*"))}
    for name, tensor in contents.plain(checkpoint.tensors).items():
        module = name.removesuffix(".weight")
        is_matrix = name != module and len(tensor.shape) == 2 and tensor.dtype in FULL_PRECISION
        if is_matrix and not _is_embedding(module):
            found.add(module)
    if "lm_head" not in packed and _has_tied_head(checkpoint):
        found.add("lm_head")
    return sorted(found)


def _has_tied_head(checkpoint: Checkpoint) -> bool:
    """Whether the model's head is the embedding. Many models' configs leave out that it is, which is their default."""
    config = checkpoint.config
    text = config.get("text_config")
    said = [part[_TIED] for part in (config, text) if isinstance(part, dict) and _TIED in part]
    if said:
        return any(said)
    names = config.get("architectures")
    generates = isinstance(names, list) and any(str(name).endswith(_GENERATE) for name in names)
    return generates and not any(name.endswith("lm_head.weight") for name in checkpoint.tensors)


def stacks_in_full_precision(checkpoint: Checkpoint, contents: Contents) -> dict[str, list[str]]:
    """Stacks of experts that are not packed, as ModelOpt names them (`X.experts*`), and the names of their projections
    one by one, by which engines ask for them in compressed-tensors."""
    found: dict[str, list[str]] = {}
    for name, tensor in contents.plain(checkpoint.tensors).items():
        path, _, leaf = name.rpartition(".")
        if leaf in PROJECTIONS and len(tensor.shape) == 3:
            names = [f"{path}.{expert}.{part}" for expert in range(tensor.shape[0]) for part in PROJECTIONS[leaf][0]]
            partly = any(other.startswith(f"{path}.") for other in contents.matrices)
            found.setdefault(name if partly else f"{path}*", []).extend(names)
    return found


def siblings_apart(checkpoint: Checkpoint, contents: Contents) -> list[str]:
    """Groups of projections that engines fuse, of which some are packed and others not, or in another format."""
    kinds: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    stored = {name: "" for name in contents.plain(checkpoint.tensors)}
    for name, kind in (stored | {name: matrix.format.name for name, matrix in contents.matrices.items()}).items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        leaves = next((siblings for siblings in SIBLINGS if leaf in siblings), None)
        if leaves is not None and name.endswith(".weight"):
            kinds.setdefault((parent, leaves), set()).add(kind)
    return [f"{parent}.({', '.join(leaves)})" for (parent, leaves), found in kinds.items() if len(found) > 1]


def _is_embedding(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return "embed" in leaf or leaf in ("wte", "wpe", "shared")


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without what it, or a part of a composed model (`text_config`), says of quantization."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _QUANTIZATION_KEYS
    }


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model in this dtype; the parts of a composed model that had the same dtype follow."""
    name = str(dtype).removeprefix("torch.")
    old = own_dtype(config)
    result = {
        key: with_dtype(value, dtype) if isinstance(value, dict) and own_dtype(value) in (None, old) else value
        for key, value in config.items()
    }
    for key in _DTYPE_KEYS:
        if key in config:
            result[key] = name
    return result


def own_dtype(config: dict[str, Any]) -> str | None:
    """The dtype a config.json names: `"bfloat16"`."""
    return next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), None)


def modelopt_configs(ignore: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`quantization_config` of config.json, and hf_quant_config.json, for weight-only NVFP4.

    The producer's name is what engines recognise the layout by; its version tells who wrote it.
    """
    local = f"hf.mxfp4.{__version__}".replace("+", ".")
    producer = {"name": "modelopt", "version": f"{_MODELOPT_VERSION}+{local}"}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    stored = {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ignore,
        "quant_algo": MODELOPT_ALGORITHM,
        "producer": producer,
        "quant_method": "modelopt",
    }
    details = {
        "quant_algo": MODELOPT_ALGORITHM,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ignore,
    }
    return stored, {"producer": producer, "quantization": details}
