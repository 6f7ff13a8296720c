# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed experts: `LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"])`.

PEFT finds the targets among a module's parameters, makes a `ParamWrapper` for each, and adds the low-rank product to
the whole stack of matrices in each forward. Packed experts have no such parameters and no such stack: they list their
projections while PEFT looks (`list_projections`), and PEFT's wrapper becomes the one below, which keeps its factors
and their layout (an adapter is the same file) and multiplies each token by the factors of its own experts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from torch.nn import functional as F

from hf_mxfp4.integrations.peft.merging import PackedMerge
from hf_mxfp4.modules import FP4Experts
from hf_mxfp4.packed import PackedModule

_INITIALISATIONS = (True, False, "gaussian")


class ParamWrapper(PackedMerge, lora.ParamWrapper):
    """LoRA around one projection of an `FP4Experts`; several are nested. PEFT compares the class by this name."""

    @property
    def packed_prefix(self) -> str:
        return self.parameter_name

    def get_param(self) -> torch.Tensor:
        """What PEFT reads shape, dtype and device from: one zero, seen as the projection of the original module."""
        return _stand_in(self.get_base_layer(), self.parameter_name)

    def update_layer(self, adapter_name, r, lora_alpha, config, **kwargs) -> None:
        """As PEFT's, for initialisations that do not read the base weight."""
        if config.init_lora_weights not in _INITIALISATIONS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} does not work for target_parameters on packed "
                f"experts ({self.parameter_name}); allowed: {', '.join(map(repr, _INITIALISATIONS))}."
            )
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A `[E, r, K]`, B `[E, N, r]` and the scaling of an adapter: `W[e] + scaling * B[e] @ A[e]`."""
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        a = a.view(self.num_experts, -1, a.shape[1])
        return a, b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1), self.scaling[adapter_name]

    def expert_delta(self, expert: int, adapter_names: list[str]) -> torch.Tensor:
        """What adapters add to one expert's matrix: float32 `[N, K]`, K being summed over."""
        factors = [self.factors(name) for name in adapter_names if name in self.lora_A]
        return sum(scaling * (b[expert].float() @ a[expert].float()) for a, b, scaling in factors)

    def forward(self, x: torch.Tensor, *args, deltas: dict | None = None, **kwargs) -> torch.Tensor:
        self._check_forward_args(x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if active:
            own = [functools.partial(low_rank, *self.factors(name)) for name in active]
            deltas = {**(deltas or {}), self.parameter_name: own}
        return self.base_layer(x, *args, deltas=deltas, **kwargs)


def low_rank(a: torch.Tensor, b: torch.Tensor, scaling: float, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The product of sorted rows with their experts' low-rank matrices, `scaling * x[t] @ a[e].T @ b[e].T`.

    Args:
        a (`torch.Tensor`): `[E, r, K]`, and b `[E, N, r]`; cast to the dtype of x.
        x (`torch.Tensor`): `[T, K]`, rows sorted by expert.
        offsets (`torch.Tensor`): int32 `[E+1]`: expert e has rows `offsets[e]` to `offsets[e + 1]`.

    Returns:
        `torch.Tensor` `[T, N]` in x's dtype, zeros for rows of no expert.
    """
    with torch.autocast(x.device.type, enabled=False):
        a, b = a.to(x.dtype), b.to(x.dtype)
        return (_grouped if _can_group(x) else _one_by_one)(a, b, scaling, x, offsets)


def _can_group(x: torch.Tensor) -> bool:
    """Whether torch has a grouped product for x; that for CPUs is a loop too, and takes aligned operands only."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _grouped(a, b, scaling, x, offsets) -> torch.Tensor:
    """By two grouped products, with nothing read on the host."""
    rank, aligned = a.shape[1], 16 // x.element_size()
    if rank % aligned:  # rows of every operand must start at multiples of 16 bytes
        extra = aligned - rank % aligned
        a, b = F.pad(a, (0, 0, 0, extra)), F.pad(b, (0, extra))
    row = torch.arange(x.shape[0], device=x.device)
    some = (row >= offsets[0]) & (row < offsets[-1])
    # The last expert takes the rows after its own too, as the first those before: rows of no group would be left
    # unwritten, and so would their gradients. Between the products they become zero.
    ends = torch.cat([offsets[1:-1], offsets.new_full((1,), x.shape[0])])
    hidden = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
    hidden = torch.where(some[:, None], hidden * scaling, 0)
    return F.grouped_mm(hidden, b.contiguous().transpose(1, 2), offs=ends)


def _one_by_one(a, b, scaling, x, offsets) -> torch.Tensor:
    """Expert by expert, those that have rows."""
    first, *ends = offsets.tolist()
    parts = x.split(
        [first, *(end - start for start, end in zip([first, *ends], ends, strict=False)), len(x) - ends[-1]]
    )
    out = [x.new_zeros(len(parts[0]), b.shape[1])]
    for index, (rows, own_a, own_b) in enumerate(zip(parts[1:-1], a.unbind(), b.unbind(), strict=True)):
        if len(rows) or not index:  # the first one always: factors without a gradient would stop DDP
            out.append((rows @ own_a.T * scaling) @ own_b.T)
    return torch.cat([*out, x.new_zeros(len(parts[-1]), b.shape[1])])


# --- how PEFT finds them ---------------------------------------------------------------------------------------------


def register() -> None:
    """Let PEFT find packed experts; called once, by the package's `register`.

    Raises:
        ImportError: if PEFT is not as expected.
    """
    expected = {BaseTuner: ("inject_adapter", "_inject_parameters"), lora.ParamWrapper: ("get_param", "update_layer")}
    missing = [
        f"{owner.__name__}.{name}" for owner, names in expected.items() for name in names if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(f"this version of PEFT has no {', '.join(missing)}, by which LoRA meets packed experts.")
    nn.modules.module.register_module_module_registration_hook(take_over)
    BaseTuner.inject_adapter = _with_experts(BaseTuner.inject_adapter)


def take_over(module: nn.Module, name: str, member: nn.Module | None) -> None:
    """Exchange the class of PEFT's wrapper that is given packed experts. A hook of torch's registration."""
    if name not in ("base_layer", "original_module") or isinstance(module, ParamWrapper):
        return
    if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return
    base = member.get_base_layer() if isinstance(member, BaseTunerLayer) else member
    if not isinstance(base, FP4Experts):
        return
    if type(module) is not lora.ParamWrapper:
        raise TypeError(
            f"{type(module).__module__}.{type(module).__name__} cannot adapt packed experts: only LoRA can, with "
            f"LoraConfig(target_parameters=[{', '.join(map(repr, base.shapes))}])."
        )
    module.__class__ = ParamWrapper


def _with_experts(inject: Callable) -> Callable:
    """`BaseTuner.inject_adapter` for packed models."""

    @functools.wraps(inject)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        experts = {
            path.replace(".base_layer", ""): module
            for path, module in model.named_modules()
            if isinstance(module, FP4Experts)
        }
        with undone_on_error(self, model, adapter_name), list_projections(model, experts):
            _check_target_modules(self, self.peft_config[adapter_name], model, experts)
            result = inject(self, model, adapter_name, *args, **kwargs)
            _check_adapted(self.peft_config[adapter_name], adapter_name, model, experts)
        return result

    return inject_adapter


@contextlib.contextmanager
def undone_on_error(tuner: BaseTuner, model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Leave nothing of an adapter in a packed model: PEFT meets most of what it refuses layer by layer."""
    modules = list(model.modules())
    if not any(isinstance(module, PackedModule) for module in modules):
        yield
        return
    members = [(module, dict(module._modules)) for module in modules]
    wrappers = [module for module in modules if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    own = {each for wrapper in wrappers for each in wrapper.modules() if not isinstance(each, PackedModule)}
    states = [  # ranks, scales, variants ... of other adapters, which a new one of the old name would meet
        (each, {k: v.copy() if isinstance(v, (dict, list, set)) else v for k, v in vars(each).items()}) for each in own
    ]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, found in members:
            module._modules.clear()
            module._modules.update(found)
        for module, state in states:
            vars(module).clear()
            vars(module).update(state)
        for parameter, flag in trainable:
            parameter.requires_grad = flag
        tuner.peft_config.pop(adapter_name, None)  # PEFT takes it back after an Exception only
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers' add_adapter sets it before
            model._hf_peft_config_loaded = bool(wrappers)
        raise


@contextlib.contextmanager
def list_projections(model: nn.Module, experts: dict[str, FP4Experts]) -> Iterator[None]:
    """Let `named_parameters` of a model and of its packed experts list the projections too, each as one zero that is
    seen in the shape of the original module's parameter."""
    if not experts:
        yield
        return
    listings = {
        model: [(f"{path}.{name}", module, name) for path, module in experts.items() for name in module.shapes]
    }
    listings |= {module: [(name, module, name) for name in module.shapes] for module in experts.values()}

    def listing(owner, projections):
        def named_parameters(prefix="", recurse=True, remove_duplicate=True):
            yield from type(owner).named_parameters(owner, prefix, recurse, remove_duplicate)
            for path, module, name in projections:
                if recurse or path == name:
                    yield f"{prefix}.{path}" if prefix else path, _stand_in(module, name)

        return named_parameters

    try:
        for owner, projections in listings.items():
            owner.__dict__["named_parameters"] = listing(owner, projections)
        yield
    finally:
        for owner in listings:
            owner.__dict__.pop("named_parameters", None)


def _stand_in(experts: FP4Experts, name: str) -> torch.Tensor:
    if name not in experts.shapes:
        raise ValueError(f"target_parameters: LoRA on packed experts takes {', '.join(experts.shapes)}, not {name}.")
    count, rows, columns = experts.shapes[name]
    shape = (count, columns, rows) if experts.is_transposed else (count, rows, columns)
    return torch.zeros((), dtype=experts.dtype, device=experts.get_buffer(f"{name}_packed").device).expand(shape)


def _check_target_modules(tuner: BaseTuner, config, model: nn.Module, experts: dict[str, FP4Experts]) -> None:
    """Refuse `target_modules` that name packed experts, or nothing but their projections: PEFT looks for linears."""
    targets = getattr(config, "target_modules", None)
    if not targets or not experts:
        return
    config = copy.copy(config)  # PEFT's own conversion of targets changes a config
    for pattern in ("rank_pattern", "alpha_pattern"):
        if hasattr(config, pattern):
            setattr(config, pattern, dict(getattr(config, pattern) or {}))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    modules = [path.replace(".base_layer", "") for path, _ in model.named_modules()]
    projections = [f"{path}.{name}" for path, module in experts.items() for name in module.shapes]
    refused = [path for path in experts if _is_target(tuner, config, path)]
    whole = isinstance(config.target_modules, str)
    skipped, matched = [], bool(getattr(config, "target_parameters", None))
    for target in [config.target_modules] if whole else config.target_modules:
        one = copy.copy(config)
        one.target_modules = target if whole else {target}
        if any(_is_target(tuner, one, path) for path in modules):
            matched = True
        else:
            skipped += [path for path in projections if _is_target(tuner, one, path)]
    message = "target_modules={!r} names {}, which is no linear layer but {} packed experts: name {} in "
    message += f"LoraConfig(target_parameters={list(next(iter(experts.values())).shapes)})."
    if refused or (skipped and not matched):
        named, part = (refused[0], "a module of") if refused else (skipped[0], "a projection of")
        raise ValueError(message.format(targets, named, part, "the projections"))
    if skipped:  # as on the dense model, where nothing is said: adapters that were made so must load
        message = message.format(targets, skipped[0], "a projection of", "it")
        warnings.warn(f"{message} It is not adapted.", stacklevel=4)


def _is_target(tuner: BaseTuner, config, path: str) -> bool:
    found = tuner._check_target_module_exists(config, path)
    return found is True or isinstance(found, re.Match)


def _check_adapted(config, adapter_name: str, model: nn.Module, experts: dict[str, FP4Experts]) -> None:
    """That each projection PEFT was asked to adapt has factors now."""
    targets = getattr(config, "target_parameters", None) or ()
    wanted = {
        (module, name)
        for path, module in experts.items()
        for name in module.shapes
        if any(f".{path}.{name}".endswith(f".{target}") for target in targets)
    }
    found = {
        (module.get_base_layer(), module.parameter_name)
        for module in model.modules()
        if isinstance(module, ParamWrapper) and adapter_name in module.lora_A
    }
    if wanted - found:
        raise RuntimeError(
            f"PEFT adapted {len(wanted & found)} of the {len(wanted)} projections of packed experts that "
            f"target_parameters={sorted(targets)} names: install a version that hf-mxfp4[peft] takes."
        )
