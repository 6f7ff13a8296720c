# SPDX-License-Identifier: Apache-2.0
"""`load`: a packed model from an FP4 checkpoint in any layout that `layouts` knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mxfp4 import layouts
from hf_mxfp4.checkpoint_files import INDEX, SINGLE, read_checkpoint, weight_map
from hf_mxfp4.checkpoints import HF_MXFP4_KEY
from hf_mxfp4.config import FOREIGN_KEY, QUANT_METHOD

# Of a repository, beside weights: configs, tokenizers, and code (which only runs with trust_remote_code).
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only")
_OF_THE_MODEL = ("dtype", "torch_dtype", "quantization_config", "attn_implementation", "experts_implementation")


def load(path_or_repo: str | Path, *, auto_class=None, subfolder: str = "", **kwargs: Any):
    """A model whose FP4 weights stay packed, from a checkpoint of ours or of another tool.

    compressed-tensors (NVFP4, MXFP4), ModelOpt (config.json or only hf_quant_config.json), gpt-oss, and whatever else
    `hf_mxfp4.layouts.LAYOUTS` lists. Codes and scales are taken as they are; no weight is decoded on the way. The
    model is then like one that was quantized here: it saves, dequantizes, trains adapters. Activations are rounded to
    FP4 where the checkpoint asks for it (W4A4), unless `FP4Config(activation_format=None)` is given beside.

    Args:
        path_or_repo (`str` or `Path`): a folder, or a repository on the Hub.
        auto_class (*optional*): class to load with (`AutoModel`, ...); the one the checkpoint names if not given.
        subfolder (`str`, *optional*): of the folder or repository.
        kwargs: as for `from_pretrained`: `dtype`, `device_map`, `revision`, `token`, `cache_dir`,
            `trust_remote_code` ... `quantization_config=FP4Config(...)` may give `dequantize`, `backend`,
            `compute_dtype`, `activation_format`, `fuse_projections` and `layout`.

    Returns:
        `PreTrainedModel`: with `FP4Linear` and `FP4Experts` in the places of packed weights.

    Raises:
        ValueError: for checkpoints in full precision, layouts and methods that are not computed here (by name), and
            damaged or incomplete files.

    Example:
        >>> model = hf_mxfp4.load("openai/gpt-oss-20b", device_map="cuda")
    """
    for name in ("key_mapping", "state_dict", "gguf_file", "config"):
        if kwargs.get(name) is not None:
            raise ValueError(f"load() does not take {name}: it reads names and sizes from the checkpoint itself.")
        kwargs.pop(name, None)
    folder = local_folder(path_or_repo, subfolder, {name: kwargs.pop(name) for name in _HUB if name in kwargs})
    checkpoint = read_checkpoint(folder)
    if checkpoint.quantization is None:
        raise ValueError(
            f"{path_or_repo} is in full precision. To quantize it while it loads, use "
            "AutoModelForCausalLM.from_pretrained(..., quantization_config=hf_mxfp4.FP4Config())."
        )
    layouts.recognise(checkpoint)
    remote = kwargs.get("trust_remote_code")
    of_the_model = {name: kwargs.pop(name) for name in _OF_THE_MODEL if name in kwargs}
    config, kwargs = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
    method = checkpoint.quantization.get("quant_method")
    if method != QUANT_METHOD and HF_MXFP4_KEY not in checkpoint.quantization:
        config.quantization_config = {"quant_method": QUANT_METHOD, FOREIGN_KEY: checkpoint.quantization}
    kwargs |= of_the_model | {"config": config}
    if auto_class is None:
        auto_class = _class_of(config, bool(remote))
    if remote is not None:
        kwargs["trust_remote_code"] = remote
    model = auto_class.from_pretrained(folder, **kwargs)
    loaded = model[0] if isinstance(model, tuple) else model  # with output_loading_info
    loaded.name_or_path = loaded.config.name_or_path = str(path_or_repo)
    return model


def local_folder(path_or_repo: str | Path, subfolder: str, hub: dict[str, Any]) -> Path:
    """The folder of a checkpoint, downloaded if it is none of this machine.

    Of the weights, only files that transformers loads: repositories may hold the same again in other files
    (`original/`, `consolidated.safetensors`).
    """
    folder, subfolder = Path(path_or_repo), subfolder.strip("/")
    if not folder.is_dir():
        if isinstance(path_or_repo, Path) or str(path_or_repo).count("/") > 1 or folder.is_absolute():
            raise ValueError(f"{path_or_repo} is no folder here, and no name of a repository on the Hub.")
        under = f"{subfolder}/" if subfolder else ""
        folder = Path(snapshot_download(str(path_or_repo), allow_patterns=[under + file for file in _FILES], **hub))
        index = folder / subfolder / INDEX
        weights = sorted(set(weight_map(index).values())) if index.exists() else [SINGLE]
        hub = hub | {"revision": folder.name}  # the same commit, whatever is pushed meanwhile
        folder = Path(snapshot_download(str(path_or_repo), allow_patterns=[under + file for file in weights], **hub))
    folder = folder / subfolder
    if not folder.is_dir():
        raise ValueError(f"{path_or_repo} has no folder {subfolder!r}.")
    return folder


def _class_of(config, trust_remote_code: bool):
    """The class that a checkpoint was saved from, or the `Auto` class that finds it in the checkpoint's own code."""
    architecture = (config.architectures or [None])[0]
    for name, reference in (getattr(config, "auto_map", None) or {}).items() if trust_remote_code else ():
        if name != "AutoConfig" and str(reference).endswith(f".{architecture}") and hasattr(transformers, name):
            return getattr(transformers, name)
    known = isinstance(architecture, str) and architecture.isidentifier() and hasattr(transformers, architecture)
    found = getattr(transformers, architecture) if known else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else AutoModelForCausalLM
