# SPDX-License-Identifier: Apache-2.0
"""From a plan to packed modules: which full-precision weights are quantized together, and where the results go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from accelerate.hooks import add_hook_to_module
from torch import nn

from hf_mxfp4.config import FP4Config
from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.modules import FP4Experts, FP4Linear
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


def pack_linears(model: nn.Module, members: tuple[str, ...], joined: QuantizedTensor, config: FP4Config) -> None:
    """Replace linears by packed ones; `joined` `[sum of N, K]` holds their weights one below the other."""
    sizes = [model.get_submodule(member).out_features for member in members]
    outliers = [None] * len(sizes)
    if joined.outliers is not None:
        from hf_mxfp4.outliers import split_rows

        outliers = split_rows(joined.outliers, sizes)
    start = 0
    for member, size, own in zip(members, sizes, outliers, strict=True):
        part = joined
        if len(members) > 1:
            part = joined.rows(slice(start, start := start + size))
            macro = None if part.macro is None else part.macro.clone()
            part = part._replace(packed=part.packed.clone(), scale=part.scale.clone(), macro=macro, outliers=own)
        linear = model.get_submodule(member)
        options = {"dtype": linear.weight.dtype, **config.module_options}
        place(model, member, FP4Linear.from_quantized(part, linear.bias, **options))


def empty_experts(dense: nn.Module, recipe: Recipe, config: FP4Config) -> FP4Experts:
    """An `FP4Experts` with empty buffers, as the recipe wants them, for a transformers experts module."""
    parts = {"macro_block": recipe.macro_block is not None, "outliers": config.outlier_fallback > 0}
    return FP4Experts.from_experts(dense, recipe.format, **parts, **config.module_options)


def pack_experts(model: nn.Module, path: str, experts: FP4Experts) -> None:
    """Put filled experts in the place of the dense ones, whose biases they take over."""
    dense = model.get_submodule(path)
    for name in experts.shapes if experts.has_bias else ():
        setattr(experts, f"{name}_bias", getattr(dense, f"{name}_bias"))
    place(model, path, experts)


def replace_with_empty(model: nn.Module, plan: Plan, config: FP4Config) -> None:
    """Put empty packed modules in the places of the plan (for a checkpoint that is packed already)."""
    for name, recipe in plan.linears.items():
        linear = model.get_submodule(name)
        packed = FP4Linear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            format=recipe.format,
            device="meta",
            dtype=linear.weight.dtype,
            macro_block=recipe.macro_block is not None,
            outliers=config.outlier_fallback > 0,
            **config.module_options,
        )
        place(model, name, packed)
    for name, recipe in plan.experts.items():
        place(model, name, empty_experts(model.get_submodule(name), recipe, config))


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a packed module in the place of another."""
    module._is_hf_initialized = True  # transformers must not initialize packed weights
    old = model.get_submodule(name)
    module.train(old.training)
    if hasattr(old, "_hf_hook"):  # several devices: activations must still be moved to this one's
        add_hook_to_module(module, old._hf_hook)
    model.set_submodule(name, module)


def is_packed(module: nn.Module) -> bool:
    """Whether a module is one of ours and holds real packed tensors."""
    return isinstance(module, (FP4Linear, FP4Experts)) and all(b.device.type != "meta" for b in module.buffers())
