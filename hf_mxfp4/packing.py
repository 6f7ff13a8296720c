# SPDX-License-Identifier: Apache-2.0
"""From a plan to packed modules and back: which weights are quantized together, and where the results go."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate.hooks import add_hook_to_module
from torch import nn

from hf_mxfp4.config import FP4Config
from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packed import PackedModule
from hf_mxfp4.recipe import Recipe


class Plan(NamedTuple):
    """What is to be packed.

    Attributes:
        linears: recipe by name of an `nn.Linear`.
        experts: recipe by name of a fused-experts module.
        kept: name of each linear left in full precision, and why.
        groups: names of linears that are quantized together under one tensor scale, by each member's name.
    """

    linears: dict[str, Recipe]
    experts: dict[str, Recipe]
    kept: dict[str, str]
    groups: dict[str, tuple[str, ...]]

    def weight_names(self, model: nn.Module) -> set[str]:
        """Names of the full-precision parameters that become packed."""
        names = {f"{name}.weight" for name in self.linears}
        for name in self.experts:
            experts = model.get_submodule(name)
            names |= {f"{name}.{'gate_up_proj' if experts.has_gate else 'up_proj'}", f"{name}.down_proj"}
        return names

    def units(self) -> Iterator[tuple[str, ...]]:
        """Names of linears by the matrices they are quantized as: a group of siblings, or one alone."""
        seen: set[str] = set()
        for name in self.linears:
            group = self.groups.get(name, (name,))
            if name not in seen:
                seen.update(group)
                yield group


def matrix_name(members: tuple[str, ...]) -> str:
    """How errors and reports call the matrix of some linears."""
    return " + ".join(f"{member}.weight" for member in members)


def empty_linear(dense: nn.Linear, recipe: Recipe, config: FP4Config) -> FP4Linear:
    """An `FP4Linear` with empty buffers, as the recipe wants them, that takes over the bias of a dense one."""
    module = FP4Linear(
        dense.in_features,
        dense.out_features,
        bias=False,
        format=recipe.format,
        device="meta",
        dtype=dense.weight.dtype,
        macro_block=recipe.macro_block is not None,
        outliers=config.outlier_fallback > 0,
        **config.module_options,
    )
    module.bias, module.recipe = dense.bias, _known(recipe, config)
    return module


def _known(recipe: Recipe, config: FP4Config) -> Recipe | None:
    """The recipe, unless another tool quantized by one of its own."""
    return recipe if config.origin is None else None


def packed_linears(
    model: nn.Module, members: tuple[str, ...], joined: QuantizedTensor, recipe: Recipe, config: FP4Config
) -> dict[str, FP4Linear]:
    """Packed linears by name; `joined` `[sum of N, K]` holds their weights one below the other."""
    linears = [model.get_submodule(member) for member in members]
    parts = [joined] if len(linears) == 1 else joined.split([linear.out_features for linear in linears])
    options = config.module_options
    packed = {
        member: FP4Linear.from_quantized(part, linear.bias, dtype=linear.weight.dtype, **options)
        for member, part, linear in zip(members, parts, linears, strict=True)
    }
    for module in packed.values():
        module.recipe = _known(recipe, config)
    return packed


def empty_experts(dense: nn.Module, recipe: Recipe, config: FP4Config) -> FP4Experts:
    """An `FP4Experts` with empty buffers, as the recipe wants them, that takes over the biases of dense ones."""
    parts = {"macro_block": recipe.macro_block is not None, "outliers": config.outlier_fallback > 0}
    module = FP4Experts.from_experts(dense, recipe.format, **parts, **config.module_options)
    module.recipe = _known(recipe, config)
    return module


def replace_with_empty(model: nn.Module, plan: Plan, config: FP4Config) -> None:
    """Put empty packed modules in the places of the plan (for a checkpoint that is packed already)."""
    for name, recipe in plan.linears.items():
        place(model, name, empty_linear(model.get_submodule(name), recipe, config))
    for name, recipe in plan.experts.items():
        place(model, name, empty_experts(model.get_submodule(name), recipe, config))


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a packed or dense module in the place of the other."""
    module._is_hf_initialized = True  # transformers must not initialize it
    old = model.get_submodule(name)
    module.train(old.training)
    if isinstance(module, PackedModule):
        module.path = name
    if hasattr(old, "_hf_hook"):  # several devices: activations must still be moved to this one's
        add_hook_to_module(module, old._hf_hook)
    model.set_submodule(name, module)


def is_packed(module: nn.Module) -> bool:
    """Whether a module is one of ours and holds real packed tensors."""
    return isinstance(module, (FP4Linear, FP4Experts)) and all(b.device.type != "meta" for b in module.buffers())


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Put plain modules back in the places of packed ones, in `dtype` (the model's own if not given).

    Raises:
        ValueError: for offloaded tensors.
    """
    offloaded = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if offloaded:
        raise ValueError(
            f"{len(offloaded)} tensors are offloaded (such as {offloaded[0]}), so the model cannot be dequantized "
            "in place. Load it without offloading first, or with FP4Config(dequantize=True)."
        )
    dtype = dtype or model.dtype
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config))
    for path, module in list(model.named_modules()):
        if isinstance(module, FP4Linear):
            # Parameters stay on the packed module's device; the bias is the same parameter.
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(module.dense("weight", dtype))
            dense.bias = None if module.bias is None else nn.Parameter(module.bias.data.to(dtype))
        elif isinstance(module, FP4Experts):
            dense = skeleton.get_submodule(path)
            for name in module.shapes:
                setattr(dense, name, nn.Parameter(module.dequantized(name, dtype)))
                if module.has_bias:
                    setattr(dense, f"{name}_bias", nn.Parameter(getattr(module, f"{name}_bias").data.to(dtype)))
        else:
            continue
        place(model, path, dense)
    for attribute in ("_weight_conversions", "num_parameters", "_ddp_params_and_buffers_to_ignore"):
        model.__dict__.pop(attribute, None)
    return model


class ParameterCounter:
    """`model.num_parameters` of a packed model: counts packed weights as the weights they stand for."""

    def __init__(self, model):
        self.model = model

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As `PreTrainedModel.num_parameters`; packed weights count as not trainable."""
        total = type(self.model).num_parameters(self.model, only_trainable, exclude_embeddings)
        if only_trainable:
            return total
        packed = [
            buffer.numel() * 2
            for module in self.model.modules()
            if isinstance(module, (FP4Linear, FP4Experts))
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("_packed")
        ]
        return total + sum(packed)


class PackedBufferNames:
    """Names of a model's packed tensors as they are when asked for: what DistributedDataParallel is not to broadcast.

    It would send the whole base in each forward, and gloo cannot send float8. DDP reads
    `_ddp_params_and_buffers_to_ignore` of what it wraps: the model, or a PeftModel that passes the question on.
    """

    def __init__(self, model):
        self.model = model

    def __iter__(self) -> Iterator[str]:
        for path, module in self.model.named_modules():
            if isinstance(module, (FP4Linear, FP4Experts)):
                for name, _ in module.named_buffers(path, recurse=False):
                    yield from (name, f"base_model.model.{name}")
