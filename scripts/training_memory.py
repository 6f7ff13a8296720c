# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step will need, part by part, before it starts.

What is there already is counted; activations and the cache are measured on two short forward passes of the model and
extrapolated. scripts/sft_lora.py and scripts/grpo.py print it.
"""

import contextlib
from typing import NamedTuple

import torch

from hf_mxfp4.packed import PackedModule
from training_arms import storage_bytes

PROBES = (32, 64)  # tokens
_TILE_TOKENS, _TILE_COLUMNS = 4096, 8192  # of TRL's fused output head (trl/kernels/chunked_logprob.py)
_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "lion": 1, "rmsprop": 1}  # tensors as large as what is trained


class Work(NamedTuple):
    """What one device does in a step: `batch` rows of `sequence` tokens forward and back.

    `generation_rows` rows are generated to `sequence` tokens first. `fused_head` says that logits are never whole, as
    in GRPO.
    """

    batch: int
    sequence: int
    optimizer: str = "adamw_torch"
    gradient_checkpointing: bool = False
    autocast: torch.dtype | None = None
    fused_head: bool = False
    generation_rows: int = 0


def estimate(model, work: Work) -> dict[str, int]:
    """Bytes of each part on one device.

    Args:
        model (`PreTrainedModel` or `PeftModel`): with its adapters; what requires gradients is trained. Its weights,
            mode and the random state stay as they are.
        work (`Work`): a step.

    Returns:
        `dict[str, int]`: "packed weights", "other weights", "trained weights", "gradients", "optimizer",
        "activations", "logits", "decoded weight" (the largest one, for the time of one product), "KV cache" and
        "peak": of training, or of generation where that is more.

    Raises:
        ValueError: if nothing is trained, or weights are on the meta device.
    """
    parameters = dict(model.named_parameters())
    trained = sum(_bytes(p) for p in parameters.values() if p.requires_grad)
    if not trained:
        raise ValueError("no parameter requires a gradient: put adapters on the model before the estimate.")
    meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if meta:
        raise ValueError(f"{meta[0]} is on the meta device (offloaded): its memory cannot be estimated.")
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    packed_bytes = sum(_bytes(buffer) for module in packed for buffer in module.buffers(recurse=False))
    resident = storage_bytes((*model.parameters(), *model.buffers()))
    parts = {
        "packed weights": packed_bytes,
        "other weights": resident - packed_bytes - trained,
        "trained weights": trained,
        "gradients": trained,
        "optimizer": _optimizer_bytes(work.optimizer, trained),
    }
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
    saved, cached = _probe(model, work.autocast)
    tokens = work.batch * work.sequence
    layers = max(getattr(model.config.get_text_config(), "num_hidden_layers", 1), 1)
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    parts["activations"] = work.batch * _at(saved, work.sequence)
    if work.gradient_checkpointing:  # inputs of the layers, and one layer's activations while its gradients are made
        itemsize = torch.finfo(work.autocast or model.dtype).bits // 8
        parts["activations"] = tokens * width * layers * itemsize + parts["activations"] // layers
    if work.fused_head:
        parts["logits"] = min(tokens, _TILE_TOKENS) * min(vocabulary, _TILE_COLUMNS) * 8
    else:
        parts["logits"] = tokens * vocabulary * (model.dtype.itemsize + 8)  # and in float32, and their gradient
    parts["decoded weight"] = max((_dense_bytes(module) for module in packed), default=0)
    parts["KV cache"] = work.generation_rows * _at(cached, work.sequence)
    held = resident + parts["optimizer"]
    step = parts["gradients"] + parts["activations"] + parts["logits"] + parts["decoded weight"]
    generation = parts["KV cache"] + work.generation_rows * vocabulary * 8
    parts["peak"] = held + max(step, generation)
    return parts


def describe(parts: dict[str, int]) -> str:
    """A table of an estimate."""
    rows = [f"  {name:<16} {size / 2**20:>10,.1f} MiB" for name, size in parts.items() if size]
    return "\n".join(["memory of a step, estimated:", *rows])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _optimizer_bytes(name: str, trained: int) -> int:
    for start, states in _STATES.items():
        if name.startswith((start, f"paged_{start}")):
            return trained * states // (4 if "8bit" in name else 1)
    return 2 * trained  # as Adam: an upper bound for most others


def _dense_bytes(module: PackedModule) -> int:
    weights = [buffer for name, buffer in module._buffers.items() if name.endswith("_packed")]
    # Experts are decoded one at a time.
    return max(weight.shape[-2] * weight.shape[-1] * 2 * module.dtype.itemsize for weight in weights)


def _probe(model, autocast: torch.dtype | None) -> tuple[list[int], list[int]]:
    """Bytes saved for backward, and bytes of the cache, for one row of each length of `PROBES`."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    device = next(model.parameters()).device
    context = torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext()
    saved, cached, training = [], [], model.training
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), context:
        try:
            for module in checkpointed:
                module.gradient_checkpointing = False
            for length in PROBES:
                tokens = torch.zeros((1, length), dtype=torch.long, device=device)
                sizes = _saved(model.train(), tokens)
                saved.append(sum(size for pointer, size in sizes.items() if pointer not in own))
                with torch.no_grad():
                    cache = model.eval()(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
                cached.append(sum(_bytes(tensor) for tensor in _tensors(cache)))
        finally:
            model.train(training)
            for module in checkpointed:
                module.gradient_checkpointing = True
    return saved, cached


def _saved(model, tokens: torch.Tensor) -> dict[int, int]:
    """Bytes of each storage that a forward pass keeps for backward, by address; the logits of one token only."""
    storages: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = model(input_ids=tokens, use_cache=False, logits_to_keep=1)  # alive: no address is used twice
    del kept
    return storages


def _tensors(cache) -> list[torch.Tensor]:
    layers = getattr(cache, "layers", [])
    return [tensor for layer in layers for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor)]


def _at(sizes: list[int], length: int) -> int:
    """Bytes at a length, `a n + b n^2` through those at `PROBES`; attention that keeps its scores has a b."""
    per_token = [size / probe for size, probe in zip(sizes, PROBES, strict=True)]
    square = max((per_token[1] - per_token[0]) / (PROBES[1] - PROBES[0]), 0.0)
    linear = per_token[1] - square * PROBES[1]
    return int(linear * length + square * length * length)
