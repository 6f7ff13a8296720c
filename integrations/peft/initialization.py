# SPDX-License-Identifier: Apache-2.0
"""LoRA that starts at the quantization error: `LoraConfig(init_lora_weights="fp4_residual")`, or `fp4_residual`.

The packed base stays as it is; A and B become the best correction of rank r of what quantizing lost, so that
`W_q + scaling * B @ A` is as near to the original W as that rank allows (Eckart and Young). LoftQ's first step is the
same; PiSSA, whose adapter takes the weight's largest part, would need another base.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraModel
from torch import nn
from tqdm.auto import tqdm

from hf_mxfp4.config import FP4Config
from hf_mxfp4.integrations.peft.experts import undone_on_error
from hf_mxfp4.integrations.peft.layers import FP4LoraLinear
from hf_mxfp4.loading import local_folder
from hf_mxfp4.modules import FP4Linear
from hf_mxfp4.streaming.run import read_source
from hf_mxfp4.streaming.skeleton import build
from hf_mxfp4.streaming.source import Source

FP4_RESIDUAL = "fp4_residual"
_ANOTHER = 0.5  # an error of so much of the weight is no rounding: FP4 makes some 0.1, and 0.33 at the very most


class Residual(NamedTuple):
    """What `fp4_residual` did to one layer: Frobenius norms of the weight's error, over that of the original weight,
    without the adapter and with it."""

    name: str
    before: float
    after: float


def fp4_residual(
    model: nn.Module, reference: nn.Module | str | Path | None = None, adapter_name: str = "default"
) -> list[Residual]:
    """Set an adapter to the best low-rank correction of the quantization error, layer by layer.

    A and B of every `FP4LoraLinear` that has the adapter become `sqrt(S / scaling)` times the leading singular vectors
    of `W - W_q`, in their own dtype; rows of A that would be zero stay as they are. The base is not changed; the saved
    adapter is an ordinary one, and belongs to this packed base: on the original model it would add the error in place
    of removing it. For that model, save it before training too, and after training with PEFT's
    `save_pretrained(..., path_initial_model_for_weight_conversion=...)`: what training changed, of twice the rank.

    Args:
        model (`nn.Module`): with the adapter: a `PeftModel`, or a transformers model after `add_adapter`.
        reference (`nn.Module`, `str` or `Path`, *optional*): the original in full precision: a model, a checkpoint's
            folder or its name on the Hub, which is read tensor by tensor. If not given, what the model was quantized
            from while it was loaded.
        adapter_name (`str`): which adapter.

    Returns:
        `list[Residual]`: one for each layer.

    Raises:
        ValueError: where no reference is known, it is quantized itself or lacks a weight, shapes or values are those
            of another model, the adapter is absent, merged, or of a variant other than DoRA. Nothing is changed then.

    Source: "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models" (2310.08659), section 3.2, one step.
    """
    inner = getattr(getattr(model, "base_model", None), "model", None) if hasattr(model, "peft_type") else None
    inner = model if inner is None else inner
    _adapted(inner, adapter_name)  # what is wrong with the adapter comes before what is wrong with the reference
    with original_weights(inner, reference) as read:
        return _correct(inner, read, adapter_name)


@torch.no_grad()
def _correct(model: nn.Module, read: Callable[[str], torch.Tensor], adapter_name: str) -> list[Residual]:
    found, results = [], []
    for name, layer in tqdm(_adapted(model, adapter_name).items(), desc=FP4_RESIDUAL, disable=None):
        base, weight = layer.get_base_layer(), read(name)
        shape = (base.out_features, base.in_features)
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"{name}: shape {tuple(weight.shape)} in the reference, {shape} in the packed model; give the "
                "checkpoint that this model was quantized from."
            )
        weight = weight.to(base.weight_packed.device, torch.float32)
        if not weight.isfinite().all():
            raise ValueError(f"{name}: the reference holds NaN or Inf; download the checkpoint again.")
        error = weight - base.dense("weight", torch.float32)
        scaling, norm = layer.scaling[adapter_name], weight.norm().clamp_min(torch.finfo(torch.float32).tiny)
        before = float(error.norm() / norm)
        if before > _ANOTHER:
            raise ValueError(
                f"{name}: the reference differs from the packed weight by {before:.2f} of its norm; quantizing makes "
                "some 0.1. Give the checkpoint that this very model was quantized from."
            )
        a, b, rest = low_rank_factors(error, layer.r[adapter_name], scaling)
        found.append((layer, a.to("cpu"), b.to("cpu")))
        results.append(Residual(name, before, float(rest / norm)))
    for layer, a, b in found:
        _assign(layer, adapter_name, a, b)
    return results


def low_rank_factors(
    error: torch.Tensor, rank: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best `scaling * B @ A` of a rank for a matrix, split evenly.

    Args:
        error (`torch.Tensor`): `[..., N, K]`, float32.
        rank (`int`): r; of a larger one than min(N, K), only so many rows are made.
        scaling (`float`): of the adapter.

    Returns:
        A `[..., r, K]`, B `[..., N, r]`, and the Frobenius norms `[...]` of what is left.
    """
    u, s, v = torch.linalg.svd(error, full_matrices=False)
    root = (s[..., :rank] / scaling).sqrt()
    return root[..., None] * v[..., :rank, :], u[..., :rank] * root[..., None, :], s[..., rank:].norm(dim=-1)


def _assign(layer: FP4LoraLinear, adapter_name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    weight_a, weight_b = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    a, b = a.to(weight_a), b.to(weight_b)
    some = a.any(1) & b.any(0)  # where there is no error to correct, A stays: with both zero neither had a gradient
    weight_a[: len(a)] = torch.where(some[:, None], a, weight_a[: len(a)])
    weight_b.zero_()
    weight_b[:, : len(a)] = torch.where(some, b, 0)
    if adapter_name in layer.lora_magnitude_vector:  # DoRA's norms are those of the weight it starts at
        magnitude = layer.lora_magnitude_vector[adapter_name]
        old = magnitude.weight
        scaling = layer.scaling[adapter_name]
        magnitude.update_layer(base_layer=layer.get_base_layer(), lora_A=weight_a, lora_B=weight_b, scaling=scaling)
        old.copy_(magnitude.weight)
        magnitude.weight = old  # the parameter an optimizer may have


def _adapted(model: nn.Module, adapter_name: str) -> dict[str, FP4LoraLinear]:
    """The packed layers that have an adapter, by name in the model without adapters."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FP4LoraLinear)
        and isinstance(module.get_base_layer(), FP4Linear)
        and adapter_name in module.lora_A
    }
    if not layers:
        raise ValueError(
            f"no packed linear has a LoRA adapter {adapter_name!r}; add it first, with get_peft_model or add_adapter, "
            "LoraConfig(target_modules=...) naming packed linears."
        )
    for name, layer in layers.items():
        variant = layer.lora_variant.get(adapter_name)
        if not layer.scaling[adapter_name] > 0:
            raise ValueError(f"{name}: lora_alpha={layer.lora_alpha[adapter_name]}; fp4_residual needs one above 0.")
        if layer.merged:
            raise ValueError(f"{name}: {layer.merged_adapters} is merged; call unmerge_adapter() first.")
        if variant is not None and adapter_name not in layer.lora_magnitude_vector:
            raise ValueError(
                f"{name}: {type(variant).__name__} does not add B @ A to the weight; fp4_residual is for LoRA, rsLoRA "
                "and DoRA."
            )
        if any(p.is_meta for p in (*layer.lora_A[adapter_name].parameters(), *layer.get_base_layer().buffers())):
            raise ValueError(f"{name} is on the meta device (offloaded, or not loaded yet); it has no values to set.")
    return layers


@contextmanager
def original_weights(
    model: nn.Module, reference: nn.Module | str | Path | None = None
) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function from a module's name in `model` to its original weight, from a model or from a checkpoint's files."""
    if isinstance(reference, nn.Module):
        yield functools.partial(_of_module, reference)
        return
    folder = known_reference(model) if reference is None else local_folder(reference, "", {})
    own = getattr(model.config, "quantization_config", None)
    config = copy.deepcopy(own) if isinstance(own, FP4Config) and own.origin is None else FP4Config()
    source = Source(read_source(folder))
    try:
        yield functools.partial(_of_checkpoint, model, build(source, config), source)
    finally:
        source.close()


def known_reference(model: nn.Module) -> Path:
    """The folder of the checkpoint a model was quantized from while it was loaded: on the Hub, of the same commit."""
    packed = [module for module in model.modules() if isinstance(module, FP4Linear)]
    if not packed:
        raise ValueError(
            f'init_lora_weights="{FP4_RESIDUAL}" is for packed linears, and this model has none; use True.'
        )
    merged = next((module for module in packed if vars(module).get("_merges")), None)
    if merged is not None:
        raise ValueError(
            f"an adapter was merged into {merged.path or 'a layer'}: against the original weights, fp4_residual would "
            "take it back. Use LoraConfig(init_lora_weights=True), then hf_mxfp4.integrations.peft.fp4_residual("
            "model, reference) with the merged model in full precision (merge_to_bf16)."
        )
    quantizer = getattr(model, "hf_quantizer", None)
    name = getattr(model, "name_or_path", "")
    if quantizer is None or quantizer.pre_quantized or not name:
        raise ValueError(
            "fp4_residual needs the original weights, and this model was loaded from packed ones, or not by "
            "from_pretrained. Use LoraConfig(init_lora_weights=True), then hf_mxfp4.integrations.peft.fp4_residual("
            "model, reference) with the full-precision model, its folder or its name on the Hub."
        )
    return local_folder(name, "", {"revision": getattr(model.config, "_commit_hash", None)})


def _of_module(reference: nn.Module, name: str) -> torch.Tensor:
    try:
        weight = reference.get_submodule(name).weight
    except AttributeError as error:
        raise ValueError(f"the reference has no {name}.weight; give the model this one was quantized from.") from error
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.is_meta:
        raise ValueError(
            f"{name}.weight of the reference is no full-precision parameter with values ({type(weight).__name__}, "
            f"{weight.dtype}, {weight.device}); give the original model or its checkpoint."
        )
    return weight.detach()


def _of_checkpoint(model: nn.Module, skeleton, source: Source, name: str) -> torch.Tensor:
    prefix = f"{model.base_model_prefix}."
    names = [f"{name}.weight", f"{prefix}{name}.weight", f"{name}.weight".removeprefix(prefix)]
    found = next((each for each in names if each in skeleton.loads), None)
    if found is None:
        raise ValueError(f"{source.folder} has no {name}.weight; give the checkpoint this model was quantized from.")
    load = skeleton.loads[found]
    if load.converter is None:
        return source.whole(load.names[0])
    return load.convert(skeleton.model, {p: [source.whole(key) for key in keys] for p, keys in load.keys.items()})[
        found
    ]


def inject_adapter(self: LoraModel, model: nn.Module, adapter_name: str, *args, **kwargs) -> None:
    """`LoraModel.inject_adapter` that knows `init_lora_weights="fp4_residual"`.

    The model's own copy of the config says `True`: what is saved is an ordinary adapter, whose values are loaded and
    not computed again.
    """
    config = self.peft_config[adapter_name]
    if getattr(config, "init_lora_weights", None) != FP4_RESIDUAL:  # X-LoRA has none
        return super(LoraModel, self).inject_adapter(model, adapter_name, *args, **kwargs)
    if getattr(config, "target_parameters", None):
        raise ValueError(
            f'init_lora_weights="{FP4_RESIDUAL}" is for linears, not for target_parameters='
            f"{config.target_parameters}; give these an adapter of their own."
        )
    with original_weights(model) as read, undone_on_error(self, model, adapter_name):
        self.peft_config[adapter_name] = copy.copy(config)
        self.peft_config[adapter_name].init_lora_weights = True
        super(LoraModel, self).inject_adapter(model, adapter_name, *args, **kwargs)
        _correct(model, read, adapter_name)
