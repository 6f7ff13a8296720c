# SPDX-License-Identifier: Apache-2.0
"""Which modules of a transformers model are packed, and how tensors get from a checkpoint into them and back.

`plan_modules` decides once, on the empty model. `QuantizeOnLoad` packs full-precision weights as they are read;
`weight_conversions` describes, to transformers' loader and saver, where stored packed tensors belong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_mxfp4.checkpoints import SIBLINGS, WRITTEN, key_pattern
from hf_mxfp4.config import FP4Config
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packing import Plan, empty_experts, is_packed, matrix_name, packed_linears, place
from hf_mxfp4.recipe import Recipe

_ROUTER_NAMES = ("router", "gate", "shared_expert_gate")
_SUFFIXES = ("packed", "scale", "global_scale", "macro_scale")


def plan_modules(model: PreTrainedModel, config: FP4Config) -> Plan:
    """Decide for every linear and experts module of a model (on any device) whether and how it is packed.

    Raises:
        ValueError: for modules that cannot be packed, unless `on_unsupported="keep"`; if nothing is left to pack.
    """
    default_skips = HfQuantizer.get_modules_to_not_convert(model)
    default_skips.append(list(model.named_parameters())[-1][0].rpartition(".")[0])  # the last module, with bias or not
    user_skips = list(config.modules_to_not_convert or ())
    ignored = set((config.stored or {}).get("ignore", ()))
    tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    plan, unsupported = Plan({}, {}, {}, {}), {}
    inside_experts: tuple[str, ...] = ()
    for name, module in model.named_modules():
        is_experts = looks_like_experts(name, module)
        if not (isinstance(module, nn.Linear) or is_experts) or name.startswith(inside_experts):
            continue
        names = aliases(model, name)
        override = config.override(*names)
        reason = None
        if override == "skip" or not all(should_convert_module(alias, user_skips) for alias in names):
            reason = "modules_to_not_convert or overrides"
        elif ignored & names:
            reason = "left in full precision by the checkpoint"
        elif name in tied:
            reason = "tied to another weight"
        elif keeps_float32(model, name):
            reason = "kept in float32 by the model"
        elif type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
            reason = "torch reads its weight directly"
        elif override is None and not should_convert_module(name, default_skips):
            reason = "output head"
        elif override is None and name.rpartition(".")[2] in _ROUTER_NAMES:
            reason = "router"
        if reason is not None:
            plan.kept[name] = reason
            continue
        recipe = config.recipe(*names)
        problem = _problem(name, module, recipe, is_experts)
        if problem is not None:
            unsupported[name] = problem
        else:
            (plan.experts if is_experts else plan.linears)[name] = recipe
            inside_experts += (f"{name}.",) if is_experts else ()
    _settle_unsupported(config, plan, unsupported)
    plan.groups.update(_sibling_groups(model, plan))
    return plan


def aliases(model: PreTrainedModel, name: str) -> set[str]:
    """A module's names: as this model has it, as the base model has it, and as a model with a head does."""
    prefix = f"{model.base_model_prefix}."
    return {name, prefix + name, name.removeprefix(prefix)}


def keeps_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether a module or parameter lies in a part of the model that the model keeps in float32."""
    parts = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    return any(f".{part}." in f".{name}." for part in parts)


def looks_like_experts(name: str, module: nn.Module) -> bool:
    """Whether a module owns stacked matrices and calls itself experts."""
    if isinstance(module, FP4Experts):
        return True
    stacked = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    return stacked and (name.endswith("experts") or "Experts" in type(module).__name__)


def _problem(name: str, module: nn.Module, recipe: Recipe, is_experts: bool) -> str | None:
    """Why a module cannot be packed, or `None`."""
    if isinstance(module, (FP4Linear, FP4Experts)):
        return None
    if is_experts:
        reason = FP4Experts.unsupported_reason(module)
        if reason is not None:
            return f"{name}: {reason}"
        first = module.gate_up_proj if module.has_gate else module.up_proj
        widths = [weight.shape[1 if module.is_transposed else 2] for weight in (first, module.down_proj)]
    elif type(module) is not nn.Linear:
        return f"{name}: {type(module).__name__} is a subclass of nn.Linear with behaviour of its own"
    else:
        widths = [module.in_features]
    try:
        for width in widths:
            recipe.format.check_in_features(width, name)
    except ValueError as error:
        return str(error)
    return None


def _settle_unsupported(config: FP4Config, plan: Plan, unsupported: dict[str, str]) -> None:
    if unsupported and config.on_unsupported == "error":
        shown = "\n  ".join(list(unsupported.values())[:10])
        raise ValueError(
            f"{len(unsupported)} modules cannot be packed:\n  {shown}\nList them in modules_to_not_convert, or set "
            'on_unsupported="keep" to leave them in full precision.'
        )
    plan.kept.update(unsupported)
    if not plan.linears and not plan.experts:
        raise ValueError(
            "no module of this model can be packed: it has no nn.Linear or fused experts outside "
            f"modules_to_not_convert (kept: {dict(list(plan.kept.items())[:5])})."
        )


def _sibling_groups(model: nn.Module, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Linears that engines fuse and that therefore need one tensor scale, by each member's name."""
    groups = {}
    parents = {name.rpartition(".")[0] for name in plan.linears}
    for parent in parents:
        for leaves in SIBLINGS:
            members = [f"{parent}.{leaf}" if parent else leaf for leaf in leaves]
            recipes = [plan.linears.get(member) for member in members]
            if None in recipes or len(set(recipes)) > 1 or not recipes[0].format.has_global_scale:
                continue
            if len({model.get_submodule(member).in_features for member in members}) == 1:
                groups.update(dict.fromkeys(members, tuple(members)))
    return groups


class QuantizeOnLoad(ConversionOps):
    """Packs full-precision weights as transformers reads them, and swaps the module they belong to.

    Weights of a sibling group wait until the group is complete and are quantized as one matrix, so that they share one
    tensor scale under every rule. Errors are kept and raised after loading (`finish`): the loader would otherwise
    turn them into a report.
    """

    def __init__(self, plan: Plan, config: FP4Config):
        self.plan, self.config = plan, config
        self.waiting: dict[str, torch.Tensor] = {}
        self.experts: dict[str, FP4Experts] = {}
        self.errors: list[Exception] = []
        self.missing_keys: set[str] = set()

    def convert(self, input_dict, model=None, missing_keys=None, **kwargs) -> dict:
        """Take `{full parameter name: tensor}`; everything is put into the model, so nothing is returned."""
        for name, tensor in input_dict.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if missing_keys is not None:
                missing_keys.discard(name)
                self.missing_keys = missing_keys  # the loader's own set: after loading, what was not there
            if self.errors:
                continue
            try:
                self._take(model, name, tensor)
            except (ValueError, TypeError) as error:
                self.errors.append(error)
        return {}

    def finish(self, model: nn.Module) -> None:
        """Raise what went wrong; then make sure that every planned module is packed, new heads excepted."""
        if self.errors:
            raise self.errors[0]
        for name in [name for name in self.plan.linears if not is_packed(model.get_submodule(name))]:
            keep_new_head(model, self.plan, name)
        planned = [*self.plan.linears, *self.plan.experts]
        missing = [name for name in planned if not is_packed(model.get_submodule(name))]
        for name in planned:
            missing += [f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()]
        missing = [name for name in missing if name in planned or name in self.missing_keys]
        check_complete(missing)

    def _take(self, model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        if path in self.plan.experts:
            self._pack_experts(model, path, leaf, tensor)
            return
        expected = model.get_submodule(path).weight.shape
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(expected)} in the model; the "
                "checkpoint is of another architecture or size."
            )
        group = self.plan.groups.get(path, (path,))
        self.waiting[path] = tensor
        if not all(member in self.waiting for member in group):
            return
        weights = [self.waiting.pop(member) for member in group]
        recipe = self.plan.linears[path]
        joined = recipe.quantize(weights[0] if len(group) == 1 else torch.cat(weights), matrix_name(group))
        for member, module in packed_linears(model, group, joined, recipe, self.config).items():
            place(model, member, module)

    def _pack_experts(self, model: nn.Module, path: str, leaf: str, tensor: torch.Tensor) -> None:
        dense, recipe = model.get_submodule(path), self.plan.experts[path]
        if path not in self.experts:
            self.experts[path] = empty_experts(dense, recipe, self.config)
        experts = self.experts[path]
        if tensor.ndim != 3 or tensor.shape != getattr(dense, leaf).shape:
            raise ValueError(
                f"{path}.{leaf}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(getattr(dense, leaf).shape)} "
                "in the model; the checkpoint is of another architecture or size."
            )
        weight = tensor.transpose(1, 2) if experts.is_transposed else tensor
        experts.load_projection(leaf, recipe.quantize(weight, f"{path}.{leaf}"))
        if is_packed(experts):
            for name in experts.shapes if experts.has_bias else ():  # they may have been loaded since
                setattr(experts, f"{name}_bias", getattr(dense, f"{name}_bias"))
            place(model, path, self.experts.pop(path))


def check_complete(missing: list[str]) -> None:
    """Raise `ValueError` if a checkpoint lacks modules or parameters that were to be packed."""
    if missing:
        raise ValueError(
            f"the checkpoint holds no weights for {len(missing)} modules or parameters that belong to packed "
            f"modules: {', '.join(missing[:5])}. It is incomplete or of another architecture."
        )


def keep_new_head(model: PreTrainedModel, plan: Plan, name: str) -> None:
    """Take a linear that the checkpoint lacks out of the plan if it is a head (lies outside the base model): it starts
    as a new layer, in full precision."""
    if model.base_model is not model and not name.startswith(f"{model.base_model_prefix}."):
        del plan.linears[name]
        plan.kept[name] = "new, not in the checkpoint"


class FuseExperts(ConversionOps):
    """Stored per-expert tensors -> one stacked buffer `[E, ...]`, projections concatenated along dim 1."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs) -> dict:
        stacks = [torch.stack(input_dict[pattern]) for pattern in source_patterns if pattern in input_dict]
        return {target_patterns[0]: torch.cat(stacks, dim=1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return UnfuseExperts()


class UnfuseExperts(ConversionOps):
    """The reverse of `FuseExperts`: one tensor for each expert and projection."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs) -> dict:
        stack = next(iter(input_dict.values()))
        stack = stack[0] if isinstance(stack, list) else stack
        parts = zip(target_patterns, stack.chunk(len(target_patterns), dim=1), strict=True)
        return {p.replace("*", str(e)): expert.contiguous() for p, part in parts for e, expert in enumerate(part)}

    @property
    def reverse_op(self) -> ConversionOps:
        return FuseExperts()


def weight_conversions(conversions: Iterable, model: nn.Module, plan: Plan, layout: str) -> list:
    """The model's own conversions and those for packed tensors: converters first, renamings of final names last.

    Experts that the model's mapping merges from one tensor per expert are stored one by one, with their scales;
    experts stored fused stay fused. In layout `own` codes are stored under the dense weight's name.
    """
    packed_name = WRITTEN[layout].packed_name
    ours, theirs, merged = [], [], set()
    for converter in conversions:
        target = converter.target_patterns[0]
        is_merge = isinstance(converter, WeightConverter) and len(converter.target_patterns) == 1
        if not is_merge or not _fills_experts(model, plan, target):
            theirs.append(_for_dense(converter, plan) if isinstance(converter, WeightConverter) else converter)
            continue
        theirs.append(_whole_names(converter, converter.source_patterns, target, converter.operations))
        if not any(isinstance(operation, MergeModulelist) for operation in converter.operations):
            continue  # it turns or joins whole stacks of full-precision experts; packed ones are stored as they are
        merged.add(target.rpartition(".")[2])
        for suffix in _SUFFIXES:
            stored = packed_name if suffix == "packed" else f"weight_{suffix}"
            sources = [re.sub(r"weight\$?$", stored, source) for source in converter.source_patterns]
            for prefix in _places(model, plan, converter):
                placed = [prefix + source for source in sources]
                ours.append(_whole_names(converter, placed, f"{prefix}{target}_{suffix}", [FuseExperts()]))
    if layout == "own":
        stored = [f"{path}.weight" for path in _shortest_paths(model, plan, plan.linears)]
        projections = {p for name in plan.experts for p in model.get_submodule(name).shapes} - merged
        stored += [f"{path}.{p}" for path in _shortest_paths(model, plan, plan.experts) for p in sorted(projections)]
        theirs += [WeightRenaming(key_pattern(name), f"{name}_packed") for name in stored]
    return ours + theirs


def _shortest_paths(model: PreTrainedModel, plan: Plan, packed: Iterable[str]) -> list[str]:
    """Last names of packed modules, or paths (less the base model's prefix) where another module ends alike."""
    others = {name for name, _ in model.named_modules()} - set(plan.linears) - set(plan.experts)
    kept_leaves = {name.rpartition(".")[2] for name in others}
    paths = set()
    for name in packed:
        leaf = name.rpartition(".")[2]
        paths.add(name.removeprefix(f"{model.base_model_prefix}.") if leaf in kept_leaves else leaf)
    return sorted(paths)


def _places(model: PreTrainedModel, plan: Plan, converter: WeightConverter) -> list[str]:
    """What to put before a converter's patterns: nothing if all experts are packed, else the path of each that is."""
    if not any(looks_like_experts(name, model.get_submodule(name)) for name in plan.kept):
        return [""]
    inside = converter.target_patterns[0].rpartition(".")[0]  # "mlp.experts" or ".experts"
    scope = ".".join(part for part in (model.base_model_prefix, getattr(converter, "scope_prefix", None)) if part)
    return [name.removesuffix(inside).removeprefix(f"{scope}.") for name in plan.experts]


def _whole_names(like: WeightConverter, sources: list[str], target: str, operations: list) -> WeightConverter:
    """A converter in the scope of another whose patterns match whole names only, in both directions.

    transformers 5.17 would take `gate_up_proj_scale` for `gate_up_proj`; delete with 5.17 (later ones do this).
    """
    whole = "(?!\\w)"
    sources = [source.removesuffix("$") + whole for source in sources]
    return _in_scope_of(like, WeightConverter(sources, target + whole, operations))


def _for_dense(converter: WeightConverter, plan: Plan) -> WeightConverter:
    """A converter that splits or turns linear layers (one matrix into q, k and v), for those in full precision only.

    Packed ones, and all biases, are stored as the model has them: each tensor would be joined in its own wrong way.
    """
    targets = converter._original_target_patterns
    if not any(re.search(target, f"{path}.weight") for target in targets for path in plan.linears):
        return converter
    targets = [target.removesuffix("$") + r"(?!_|\.?weight_|\.?bias)" for target in targets]
    return _in_scope_of(converter, WeightConverter(converter._original_source_patterns, targets, converter.operations))


def _in_scope_of(like: WeightConverter, converter: WeightConverter) -> WeightConverter:
    for attribute in ("scope_prefix", "base_model_prefix", "force_cpu"):
        setattr(converter, attribute, getattr(like, attribute, None))
    return converter


def _fills_experts(model: nn.Module, plan: Plan, target: str) -> bool:
    leaf = target.rpartition(".")[2]
    return any(leaf in getattr(model.get_submodule(name), "shapes", {}) for name in plan.experts)
