# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into packed weights, and taken out again bit for bit.

4 bits cannot hold a small change: what a merge keeps of it is measured (`merge_report`). The adapter beside the packed
weights keeps all of it, and so does `merge_to_bf16`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.mixed import MixedModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import nn

from hf_mxfp4 import packing
from hf_mxfp4.conversion import keeps_float32
from hf_mxfp4.integrations.peft.reports import MergeReport, in_words, merge_report, merge_table, warn_of_little
from hf_mxfp4.integrations.peft.requantization import (
    check_in_memory,
    decode,
    matrix_name,
    own_bias,
    requantize,
    restore,
    reweight,
    stash,
    stored_matrix,
)
from hf_mxfp4.integrations.peft.siblings import share_tensor_scales
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packed import PackedModule

__all__ = [
    "MergeReport",
    "PackedMerge",
    "merge_report",
    "merge_table",
    "merge_to_bf16",
    "register",
    "requantize",
    "restore",
    "reweight",
    "stash",
]

logger = logging.getLogger(__name__)


class PackedMerge:
    """For one of PEFT's layers around a packed module: `merge` and `unmerge`, whatever the method.

    PEFT's own merge runs on a dense stand-in in float32; its result is quantized anew. It always starts from the
    original weight, so adapters merged one after another are the same as merged at once. The original tensors stay in
    memory beside the merged ones until `unmerge` puts them back or the layer is dropped, as `merge_and_unload` does.

    A subclass for experts gives `packed_prefix` and `expert_delta`.
    """

    _stash = None
    packed_prefix = "weight"

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters (the active ones if not given); after an exception all is as it was.

        Raises:
            ValueError: for NaN and Inf, and modules whose weights are not in memory.
        """
        base = self.get_base_layer()
        if not isinstance(base, PackedModule):  # PEFT's own arithmetic, on the stand-in
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = check_adapters_to_merge(self, adapter_names)
        here = set(self._all_available_adapter_names())
        names = [name for name in names if name in here]
        if not names:
            return
        check_in_memory(base, "merging")
        state, names = self.merge_state(), [*self.merged_adapters, *names]
        try:
            if self._stash is not None:
                restore(base, self._stash)
            else:
                self._stash = stash(base, self.packed_prefix)
            self.merged_adapters = []
            with torch.inference_mode(False), torch.no_grad(), _no_autocast(base):
                self._merge_packed(base, names, safe_merge)
        except BaseException:
            self.set_merge_state(state)
            raise
        logger.info(
            "hf_mxfp4: merged into %s: %s", matrix_name(base, self.packed_prefix), in_words(base, self.packed_prefix)
        )

    def unmerge(self) -> None:
        """Put the original tensors back, bit for bit."""
        base = self.get_base_layer()
        if not isinstance(base, PackedModule):
            super().unmerge()
            return
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.set_merge_state((self.base_layer, [], None, self._stash))

    def merge_state(self) -> tuple:
        """All that `merge` changes, by reference, for `set_merge_state`."""
        tensors = stash(self.get_base_layer(), self.packed_prefix)
        return self.base_layer, list(self.merged_adapters), self._stash, tensors

    def set_merge_state(self, state: tuple) -> None:
        """Go back to a `merge_state`."""
        self._modules["base_layer"], adapters, kept, tensors = state
        restore(self.get_base_layer(), tensors)
        self.merged_adapters, self._stash = list(adapters), kept
        getattr(self, "_caches", {}).clear()  # DoRA's norms, which its own unmerge would need

    def _merge_packed(self, base: PackedModule, names: list[str], safe_merge: bool) -> None:
        if isinstance(base, FP4Experts):
            reweight(base, self.packed_prefix, lambda e, dense: dense + self.expert_delta(e, names), names)
            self.merged_adapters = list(names)
            return
        dense = self.merged_linear(base, names, safe_merge)
        reweight(base, "weight", lambda _, before: dense.weight.data, self.merged_adapters)
        own_bias(base, dense.bias)
        getattr(self, "_caches", {}).clear()

    def merged_linear(self, base: FP4Linear, names: list[str], safe_merge: bool = False) -> nn.Linear:
        """A dense float32 layer with adapters merged by PEFT's own method; `merged_adapters` then says which."""
        if self.base_layer is not base:
            raise ValueError(
                f"{matrix_name(base, 'weight')}: adapters of several methods, one around the other, cannot be merged "
                "into a packed weight. Keep them, or merge into the full-precision model."
            )
        dense = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(decode(base, stored_matrix(base, "weight")), requires_grad=False)
        if base.bias is not None:
            dense.bias = nn.Parameter(base.bias.data.to(torch.float32, copy=True), requires_grad=False)
        try:
            self._modules["base_layer"] = dense
            with _in_float32(self):
                super().merge(safe_merge=safe_merge, adapter_names=names)
        finally:
            self._modules["base_layer"] = base
        return dense

    def become_dense(self, names: list[str], dtype: torch.dtype) -> None:
        """Merge adapters into what is, or once PEFT has dropped this layer becomes, a dense weight in `dtype`."""
        base, prefix = self.get_base_layer(), self.packed_prefix
        if isinstance(base, FP4Linear):
            dense = self.merged_linear(base, names)
            for name, parameter in dense.named_parameters():
                parameter.data = _rounded(parameter.data, dtype, matrix_name(base, name))
            self._modules["base_layer"] = dense
            return
        self.merged_adapters, plain = list(names), base.dequantized

        def dequantized(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            if name != prefix:
                return plain(name, dtype)
            out = torch.empty(base.shapes[name], dtype=dtype or base.dtype, device=next(base.buffers()).device)
            for expert, matrix in enumerate(out):
                merged = decode(base, stored_matrix(base, name, expert)) + self.expert_delta(expert, names)
                matrix.copy_(_rounded(merged, out.dtype, matrix_name(base, name, expert)))
            return out.transpose(1, 2).contiguous() if base.is_transposed else out

        vars(base)["dequantized"] = dequantized  # what packing.dequantize_model asks for

    def expert_delta(self, expert: int, adapter_names: list[str]) -> torch.Tensor:
        """What adapters add to one expert's matrix: float32 `[N, K]`, K being summed over. For experts only."""
        raise NotImplementedError

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self._stash is not None:
            self._stash.apply(fn)
        return self


@contextlib.contextmanager
def _in_float32(layer: nn.Module) -> Iterator[None]:
    """A layer's LoRA factors in float32, so that what they add is rounded once only."""
    factors = [p for name in ("lora_A", "lora_B") for p in getattr(layer, name, nn.Module()).parameters()]
    before = [factor.data for factor in factors]
    try:
        for factor in factors:
            factor.data = factor.data.to(torch.float32)
        yield
    finally:
        for factor, data in zip(factors, before, strict=True):
            factor.data = data


def _no_autocast(module: nn.Module):
    return torch.autocast(next(iter((*module.buffers(), *module.parameters()))).device.type, enabled=False)


# --- a model at once -------------------------------------------------------------------------------------------------


@functools.cache  # a second call adds nothing
def register() -> None:
    """Have PEFT merge packed models as a whole: all layers or none, and one warning. Safe to call twice."""
    for owner in (BaseTuner, MixedModel):  # which has methods of its own
        for name in ("merge_adapter", "_unload_and_optionally_merge"):
            if name in vars(owner):
                setattr(owner, name, _as_a_whole(getattr(owner, name)))
        owner._replace_module = _put_back(owner._replace_module)


def _put_back(method):
    """PEFT's way to put a base layer back, less what it does to its weight: a packed one has none to be assigned."""

    @functools.wraps(method)
    def replace(self, parent, child_name, new_module, child) -> None:
        if isinstance(new_module, PackedModule):
            setattr(parent, child_name, new_module)
        else:
            method(self, parent, child_name, new_module, child)

    return replace


def _as_a_whole(method):
    """One of PEFT's methods that merge layer after layer: an exception undoes what it did before.

    So the original weights of adapted layers stay in memory until it has ended: packed ones, and copies of others.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def merge(self, *args, **kwargs):
        states = {layer: layer.merge_state() for layer in _packed_layers(self.model)}
        if not states:
            return method(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        names = given.get("adapter_names") if given.get("merge", True) else []
        if not isinstance(names, str):  # which PEFT refuses
            _check_names(names or (), self.peft_config)
        places = [
            (parent, name, child)
            for parent in list(self.model.modules())
            for name, child in parent._modules.items()
            if hasattr(child, "base_layer") or hasattr(child, "unload_and_optionally_merge_module")
        ]
        layers = [child for _, _, child in places if hasattr(child, "merged_adapters")]
        adapters, dense = [list(layer.merged_adapters) for layer in layers], _written_to(layers, names)
        before = set(merge_report(self.model))
        try:
            result = method(self, *args, **kwargs)
            if not _packed_layers(self.model):  # unloaded: until then it could not be taken back
                share_tensor_scales(self.model)
        except BaseException:
            for parent, name, child in places:
                parent._modules[name] = child
            for layer, state in states.items():
                layer.set_merge_state(state)
            for layer, merged in zip(layers, adapters, strict=True):
                layer.merged_adapters = merged
            for parameter, data in dense.items():
                parameter.data = data
            self.model.peft_config = self.peft_config
            raise
        warned = vars(self).setdefault("_warned_of", set())
        new = [r for r in merge_report(self.model) if r not in before and r.adapters not in warned]
        if warn_of_little(new):
            warned.update(report.adapters for report in new)
        return result

    return merge


def _written_to(layers: list[BaseTunerLayer], names: list[str] | None) -> dict[nn.Parameter, torch.Tensor]:
    """Copies of what a merge changes in place: the parameters of dense layers it merges into."""
    return {
        parameter: parameter.data.clone()
        for layer in layers
        if not isinstance(layer.get_base_layer(), PackedModule)
        and set(layer._all_available_adapter_names())
        & set(layer.active_adapters if names is None else names) - set(layer.merged_adapters)
        for parameter in layer.get_base_layer().parameters()
    }


def _check_names(names, known) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no adapter is called {', '.join(unknown)}; allowed: {', '.join(known)}.")


def _packed_layers(model: nn.Module) -> list[PackedMerge]:
    layers = [module for module in model.modules() if isinstance(module, PackedMerge)]
    return [layer for layer in layers if isinstance(layer.get_base_layer(), PackedModule)]


def merge_to_bf16(
    model: PeftModel, dtype: torch.dtype = torch.bfloat16, adapter_names: list[str] | None = None
) -> nn.Module:
    """A full model in 16 bits: dequantized weights plus adapters, added in float32 and rounded once.

    The packed model given stays as it is, and usable; the result shares no memory with it. It is made layer by layer
    from a copy of it: beside the two models stand what is left of the copy's packed weights and one dense layer.

    Args:
        model (`PeftModel`): packed, with adapters that can be merged.
        dtype (`torch.dtype`): of the result: bfloat16, float16 or float32.
        adapter_names (`list[str]`, *optional*): those merged now, or else the active ones, if not given.

    Returns:
        `PreTrainedModel`: plain, without adapters and quantization_config; `save_pretrained` writes it as such.

    Raises:
        TypeError: for a model that `get_peft_model` or `PeftModel.from_pretrained` did not make.
        ValueError: for another dtype, unknown adapters or such with NaN or Inf, and weights that are not in memory.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype={dtype}; allowed: torch.bfloat16, torch.float16, torch.float32.")
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, BaseTuner):
        raise TypeError(
            f"{type(model).__name__}: merge_to_bf16 takes a PeftModel whose adapters can be merged, as get_peft_model "
            "and PeftModel.from_pretrained make it. Without adapters, model.dequantize() gives the full model."
        )
    for module in model.modules():
        if isinstance(module, PackedModule):
            check_in_memory(module, "merge_to_bf16")
    if not any(isinstance(module, PackedModule) for module in model.modules()):
        raise ValueError(
            "merge_to_bf16 is for packed models, and this one holds no packed weights: merge_and_unload()."
        )
    merged = [name for layer in _packed_layers(model) for name in layer.merged_adapters]
    names = adapter_names or list(dict.fromkeys(merged)) or model.active_adapters
    _check_names(names, model.peft_config)
    with torch.inference_mode(False), torch.no_grad():
        full = copy.deepcopy(model)
        for layer in _packed_layers(full):
            if layer.merged:
                layer.unmerge()
        old, dtypes = full.base_model.model.dtype, _base_dtypes(full.base_model.model)
        for layer in _packed_layers(full):
            with _no_autocast(layer):
                layer.become_dense([name for name in names if name in layer._all_available_adapter_names()], dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All adapters are already merged")
            plain = full.base_model.merge_and_unload(adapter_names=names)
        plain = _without_packed(plain, dtype)
        for name, parameter in plain.named_parameters():
            if dtypes.get(name, parameter.dtype) == old and not keeps_float32(plain, name):
                parameter.data = parameter.data.to(dtype)
        return plain


def _base_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of a PEFT model's own parameters by their plain names: trained copies of modules may have others."""
    return {
        name.replace(".base_layer", "").replace(".original_module", ""): parameter.dtype
        for name, parameter in model.named_parameters()
    }


def _rounded(weight: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = weight.to(dtype)
    if not bool(cast.isfinite().all()):
        raise ValueError(
            f"{name}: with the adapters merged, {int((~cast.isfinite()).sum())} of {cast.numel()} values are NaN or "
            f"Inf in {dtype}; the adapter is broken (its training diverged), or this dtype cannot hold them."
        )
    return cast


def _without_packed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model whose packed layers, if it has any left, are dense; it says no more that it is quantized."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    else:
        packing.dequantize_model(model, dtype)
    model.config.dtype = dtype
    return model
