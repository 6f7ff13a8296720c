# SPDX-License-Identifier: Apache-2.0
"""PEFT's own layers around packed ones: how they are taken over.

Whatever the method, PEFT keeps the layer it adapts as `base_layer`. torch tells of each module that is put into
another one; where that is an `FP4Linear`, the class of PEFT's layer is exchanged for a subclass of it before it makes
any weights. So `get_peft_model` works as it is, for linears of every method, and so do adapters that are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from hf_mxfp4.integrations.peft.merging import PackedMerge
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packed import PackedModule

_SPLITS_THE_WEIGHT = ("pissa", "olora", "corda", "loftq")  # each writes the rest of the weight back into the base


class PackedLayer(PackedMerge):
    """Any of PEFT's layers around an `FP4Linear`: merges as `PackedMerge`, and refuses what changes the base."""

    def update_layer(self, adapter_name: str, *args, **kwargs) -> None:
        """As PEFT's, reading the dense weight once at most.

        Raises:
            ValueError: for an initialisation that writes another weight into the base.
        """
        with _lent(self.get_base_layer()) as changed:
            super().update_layer(adapter_name, *args, **kwargs)
            if not changed():
                return
        self.delete_adapter(adapter_name)
        raise ValueError(_refusal(f"an initialisation of {type(self).__bases__[-1].__module__}"))

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        if isinstance(base_layer, FP4Linear):  # PEFT's would decode the weight, and take `compute_dtype`, often None
            return base_layer.weight_packed.device, base_layer.dtype
        return super()._get_base_layer_device_and_dtype(base_layer)

    def __reduce__(self):
        return _rebuild, (type(self).__bases__[-1],), self.__dict__.copy()


class FP4LoraLinear(PackedLayer, lora.Linear):
    """LoRA (DoRA, rsLoRA, aLoRA, ...) around an `FP4Linear`: PEFT's layer, but for what reads or writes the weight."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        how, base = config.init_lora_weights, self.get_base_layer()
        splits = isinstance(how, str) and how.lower().startswith(_SPLITS_THE_WEIGHT)
        splits = splits or (how == "lora_ga" and hasattr(base, "_peft_loraga_grad"))  # PEFT would drop the gradient
        if splits and isinstance(base, FP4Linear):  # it may have been dequantized since
            raise ValueError(_refusal(f"init_lora_weights={how!r}"))
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features


@functools.cache
def packed_class(tuner_class: type[BaseTunerLayer]) -> type[BaseTunerLayer]:
    """The subclass of one of PEFT's layers for packed linears; of the same name, which PEFT may compare."""
    if tuner_class is lora.Linear:
        return FP4LoraLinear
    return type(tuner_class.__name__, (PackedLayer, tuner_class), {"__module__": __name__})


def take_over(module: nn.Module, name: str, member: nn.Module | None) -> None:
    """Exchange the class of one of PEFT's layers that is given a packed linear. A hook of torch's registration.

    Raises:
        ValueError: for `modules_to_save` with packed weights in them, of which a copy has nothing to train.
    """
    if name == "original_module" and isinstance(module, ModulesToSaveWrapper):
        _check_trainable(member)
    if name != "base_layer" or not isinstance(module, BaseTunerLayer) or isinstance(module, PackedLayer):
        return
    base = member.get_base_layer() if isinstance(member, BaseTunerLayer) else member
    if isinstance(base, FP4Linear):
        module.__class__ = packed_class(type(module))


def _check_trainable(module: nn.Module) -> None:
    if isinstance(module.get_base_layer() if isinstance(module, BaseTunerLayer) else module, FP4Experts):
        return  # refused by `experts.take_over`
    packed = {each.path or type(each).__name__: None for each in module.modules() if isinstance(each, PackedModule)}
    if packed:
        raise ValueError(
            f"modules_to_save: {', '.join(packed)}: packed in 4 bits, of which a copy could not be trained. Name it "
            "in target_modules instead, or load the model with it in full precision: "
            "FP4Config(modules_to_not_convert=[...])."
        )


def _rebuild(tuner_class: type[BaseTunerLayer]) -> BaseTunerLayer:
    kind = packed_class(tuner_class)
    return kind.__new__(kind)


def _refusal(what: str) -> str:
    return (
        f"{what} writes a changed weight back into the base layer, which packed weights cannot hold without being "
        'quantized again. Use init_lora_weights=True, or "fp4_residual", which leaves the base as it is; or '
        "start with the full-precision model, save its changed base, and quantize that. An adapter that was trained "
        "so: load it on the model it was trained on, and make it an ordinary one with save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...)."
    )


class _LentLinear(FP4Linear):
    """An `FP4Linear` whose dense copy is kept between two readings."""

    @property
    def weight(self) -> torch.Tensor:
        if "_lent" not in vars(self):
            vars(self)["_lent"] = super().weight
        return vars(self)["_lent"]


_LentLinear.__name__ = FP4Linear.__name__  # PEFT's warnings tell it


@contextmanager
def _lent(base: nn.Module) -> Iterator:
    """Let code read a packed linear's weight as often as it likes; yields whether the copy it got was written to."""

    def changed() -> bool:
        copy = vars(base).get("_lent")
        if copy is None:
            return False
        weight = FP4Linear.weight.fget(base)
        if (copy.shape, copy.dtype, copy.device) != (weight.shape, weight.dtype, weight.device):
            return True
        bits = [tensor.contiguous().view(torch.uint8) for tensor in (copy, weight)]  # a damaged weight may hold NaN
        return not weight.is_meta and not torch.equal(*bits)

    kind = type(base)
    if kind is not FP4Linear:  # lent already
        yield lambda: False
        return
    base.__class__ = _LentLinear
    try:
        yield changed
    finally:
        base.__class__ = kind
        vars(base).pop("_lent", None)
