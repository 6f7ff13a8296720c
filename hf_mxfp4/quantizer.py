# SPDX-License-Identifier: Apache-2.0
"""FP4HfQuantizer: the hooks transformers calls while it loads, saves and dequantizes a model. Hooks only."""

from __future__ import annotations

import copy
import functools
import logging

import torch
import transformers
from packaging import version
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from hf_mxfp4 import conversion, foreign, fusion, packing, stored, whole_model
from hf_mxfp4.checkpoint_files import StoredTensor
from hf_mxfp4.checkpoints import HF_MXFP4_KEY, WRITTEN, check_scales, compressed_tensors_config
from hf_mxfp4.config import FOREIGN_KEY, QUANT_METHOD, FP4Config
from hf_mxfp4.modules import FP4Linear
from hf_mxfp4.outliers import check as check_outliers
from hf_mxfp4.packed import TRANSFORMS

logger = logging.getLogger(__name__)

SUPPORTED_TRANSFORMERS = ("5.17", "5.24")  # from, below
_LARGE = 1_000_000  # elements; unpacked tensors of this size are named after loading


class FP4HfQuantizer(HfQuantizer):
    """Quantizes a model to FP4 while it loads, or loads one that is quantized already."""

    def __init__(self, quantization_config: FP4Config, **kwargs):
        # A copy: what this model stores about itself must not leak into the next model loaded with the same config.
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.plan: packing.Plan | None = None
        self.layout = "own"
        self.dense = not self.pre_quantized  # until the planned modules are packed
        self.loader: conversion.QuantizeOnLoad | None = None
        self.adoption: foreign.Adoption | None = None  # of a checkpoint by another tool, until its tensors are in
        self.weight_names: set[str] = set()
        self.headers: dict[str, StoredTensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    # --- before loading ----------------------------------------------------------------------------------------------

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        """Refuse what could only fail later: an untested transformers, disk offload of weights not yet packed."""
        lowest, below = SUPPORTED_TRANSFORMERS
        if not version.parse(lowest) <= version.parse(transformers.__version__) < version.parse(below):
            raise ImportError(
                f"transformers {transformers.__version__} is not supported: hf_mxfp4 works with {lowest} up to, not "
                f'including, {below}. Run `pip install "transformers>={lowest},<{below}"`.'
            )
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "DeepSpeed ZeRO-3 splits parameters over processes, and packed weights are buffers, which each "
                "process holds whole. Use ZeRO stage 1 or 2, or DDP."
            )
        if is_fsdp_enabled():
            raise ValueError(
                "FSDP with cpu_ram_efficient_loading reads weights in one process and cannot hand packed ones to the "
                "others. Set fsdp_cpu_ram_efficient_loading to false (FSDP_CPU_RAM_EFFICIENT_LOADING=0), and "
                "fsdp_version to 2."
            )
        if not self.pre_quantized and self.quantization_config.origin is not None:
            raise ValueError(
                f"origin={self.quantization_config.origin!r} is said of a model that another tool quantized; leave it "
                "out to quantize this one."
            )
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map sends modules to disk, which works for a saved FP4 model only: load once without disk, "
                "save_pretrained, and load the saved model with this device_map."
            )
        if self.quantization_config.foreign is None:
            self._check_request()
        else:
            foreign.check_device_map(device_map)

    def _check_request(self) -> None:
        """Refuse a config beside a quantized checkpoint that says otherwise."""
        requested = self.quantization_config.requested
        conflicts = self.quantization_config.contradictions(requested) if requested is not None else []
        if conflicts:
            raise ValueError(
                f"this checkpoint is quantized already and cannot be loaded with {', '.join(conflicts)}. Load it "
                "without a quantization_config, or quantize the original full-precision checkpoint."
            )
        self.quantization_config.requested = None

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        config = self.quantization_config
        if config.foreign is not None:
            self._adopt(model, checkpoint_files)
            return model
        self.plan = conversion.plan_modules(model, config)
        self.layout = self._choose_layout(model)
        if not self.pre_quantized:
            self.headers = stored.read_headers(f for f in checkpoint_files or () if str(f).endswith(".safetensors"))
            self.weight_names = self.plan.weight_names(model)
            stored.check_sources(model, self.weight_names, self.headers)
            if not config.needs_whole_model:
                self.loader = conversion.QuantizeOnLoad(self.plan, config)
            return model
        self.headers = stored.read_headers(checkpoint_files)
        if config.outlier_fallback and not self.headers:
            raise ValueError("a model with outliers is loaded from safetensors files, not from a state dict.")
        stored.adapt_plan(model, self.plan, config, self.headers)
        packing.replace_with_empty(model, self.plan, config)
        stored.add_transforms(model, self.plan, config, self.headers)
        if self.headers:
            stored.check_headers(model, self.plan, self.headers, self)
        return model

    def _adopt(self, model, checkpoint_files) -> None:
        """Find places for what another tool packed, and put empty packed modules there."""
        config = self.quantization_config
        checkpoint = foreign.checkpoint_of(checkpoint_files, model, config.foreign)
        self.adoption, self.headers = foreign.Adoption(model, checkpoint), checkpoint.tensors
        self.plan = self.adoption.plan(model, config)
        if config.requested is not None and "layout" in config.requested.given:
            config.layout = config.requested.layout
        self._check_request()
        packing.replace_with_empty(model, self.plan, config)
        self.adoption.hide_buffers(model)
        config.foreign = None
        text = model.config.get_text_config(decoder=True)
        if text is not model.config and hasattr(text, "quantization_config"):
            del text.quantization_config  # would be saved, and believed of weights that are no longer packed so

    def _choose_layout(self, model) -> str:
        """A checkpoint of ours says which layout it is in; a new one is portable where every reader gets it right."""
        config = self.quantization_config
        if self.pre_quantized and (config.stored is not None or config.origin is None):
            return "portable" if config.is_portable else "own"
        reason = None
        if any(conversion.looks_like_experts(name, module) for name, module in model.named_modules()):
            reason = (
                "fused experts: transformers with compressed-tensors drops the tensor scales of packed ones and "
                "cannot load others beside packed linears"
            )
        elif config.outlier_fallback or any(recipe.macro_block for recipe in self.plan.linears.values()):
            reason = "macro-blocks or outliers, which no other reader knows"
        elif any(name.rpartition(".")[2] in TRANSFORMS for name, _ in model.named_buffers()):
            reason = "layers whose inputs are transformed"
        if config.layout == "portable" and reason:
            raise ValueError(f'layout="portable" cannot hold {reason}. Use layout="auto" or "own".')
        return config.layout if config.layout != "auto" else "own" if reason else "portable"

    # --- while loading -----------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Whether a full-precision parameter is to be packed on load."""
        return self.loader is not None and param_name in self.weight_names

    def get_quantize_ops(self):
        return self.loader

    def param_element_size(self, model, param_name: str, param: torch.Tensor) -> float:
        """Bytes an element takes on its device once loaded; device maps are planned with it."""
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        path = param_name.rpartition(".")[0]
        recipe = self.plan.linears.get(path) or self.plan.experts[path]
        return recipe.bits_per_weight / 8

    def update_weight_conversions(self, weight_conversions, model=None):
        """Put the conversions of packed tensors before the model's own."""
        if self.adoption is not None:
            return [self.adoption.set_aside, *weight_conversions]
        if self.dense:
            return weight_conversions
        return conversion.weight_conversions(weight_conversions, model or self._model, self.plan, self.layout)

    # --- after loading -----------------------------------------------------------------------------------------------

    def preprocess_model(self, model, dtype=None, **kwargs):
        self._model = model  # 5.17 does not pass the model to update_weight_conversions
        super().preprocess_model(model, dtype=dtype, **kwargs)
        float32 = model._get_dtype_plan(dtype)
        self.dtypes = {
            name: next((float32[part] for part in float32 if part in name), parameter.dtype)
            for name, parameter in model.named_parameters()
        }

    def _process_model_after_weight_loading(self, model, **kwargs):
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise ValueError("packed FP4 layers cannot be split by a tensor-parallel plan; load without tp_plan.")
        if self.dense:
            if self.loader is not None:
                self.loader.finish(model)
            else:
                self._quantize_loaded(model)
            self.dense, self.loader = False, None
            self._renew_conversions(model)
        if self.adoption is not None:
            self.adoption.fill(model)
            self.adoption.report(self.quantization_config)
            self.adoption = None
            self.layout = self._choose_layout(model)
            self._renew_conversions(model)
        self._check_packed(model)
        self._cast_renamed(model)
        del self._model
        self.headers, self.dtypes = {}, {}  # the model keeps its quantizer, and is copied and pickled with it
        config = self.quantization_config
        config.stored = self._stored_config(model)
        model.num_parameters = packing.ParameterCounter(model)
        model._ddp_params_and_buffers_to_ignore = packing.PackedBufferNames(model)
        self._report(model)
        if config.dequantize:
            self._dequantize(model, model.dtype)
            self.remove_quantization_config(model)
        elif config.fuse_projections:
            fusion.fuse_projections(model)
        return model

    def _renew_conversions(self, model) -> None:
        """Describe how the model is saved, now that its modules are packed."""
        used = [c for c in model._weight_conversions or () if isinstance(c, PrefixChange)]
        own = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
        model._weight_conversions = self.update_weight_conversions(own + used, model)

    def _quantize_loaded(self, model) -> None:
        """Quantize a dense model in place, which needs all of its weights at once."""
        config = self.quantization_config
        if self.headers:
            found = {name for name, _ in stored.names_in_model(model, self.headers).values()}
            for name in [name for name in self.plan.linears if f"{name}.weight" not in found]:
                conversion.keep_new_head(model, self.plan, name)
            conversion.check_complete(sorted(self.plan.weight_names(model) - found))
        offloaded = [name for name in self.plan.weight_names(model) if model.get_parameter(name).is_meta]
        if offloaded:
            raise ValueError(
                f"{len(offloaded)} weights are offloaded (such as {offloaded[0]}), and outlier_fallback, "
                "error_feedback and channel_weights need the whole model in memory. Load it without offloading."
            )
        whole_model.quantize_model(model, self.plan, config, functools.partial(_tokenizer, model))

    def _cast_renamed(self, model) -> None:
        """transformers 5.17 leaves parameters that it renames in the checkpoint's dtype. Delete with 5.17."""
        for name, parameter in model.named_parameters():
            dtype = self.dtypes.get(name, parameter.dtype)
            if parameter.dtype != dtype and not parameter.is_meta:
                parameter.data = parameter.data.to(dtype)

    def _stored_config(self, model) -> dict:
        """What stands in config.json beside our own fields."""
        linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        kept = (linears - set(self.plan.linears)) | set(self.plan.kept)
        if self.layout == "own":
            found = {"quant_method": QUANT_METHOD, "ignore": sorted(kept)}
            experts = [name for name in self.plan.experts if model.get_submodule(name).is_transposed]
            modules = {name: [t for t in TRANSFORMS if t in m._buffers] for name, m in model.named_modules()}
            found |= {"transposed": experts} if experts else {}
            transforms = {name: leaves for name, leaves in modules.items() if leaves}
            return found | ({"transforms": transforms} if transforms else {})
        return compressed_tensors_config({name: recipe.format for name, recipe in self.plan.linears.items()}, kept)

    def _check_packed(self, model) -> None:
        for path in (*self.plan.linears, *self.plan.experts):
            module = model.get_submodule(path)
            if self.pre_quantized and not self.headers:  # a state dict: there was no header to check
                tensors = dict(module.named_buffers(recurse=False)) | dict(module.named_parameters(recurse=False))
                absent = [name for name, tensor in tensors.items() if not hasattr(tensor, "_is_hf_initialized")]
                if absent:
                    raise ValueError(f"the state dict holds no {path}.{absent[0]}, which a packed module needs.")
            module.prepare()
            prefixes = ["weight"] if isinstance(module, FP4Linear) else list(module.shapes)
            for prefix in prefixes:
                outliers = module.packed_weight(prefix).outliers
                scale, divisor = getattr(module, f"{prefix}_scale"), getattr(module, f"{prefix}_global_scale", None)
                if scale.device.type == "meta":
                    continue  # offloaded to disk by accelerate
                check_scales(f"{path}.{prefix}", module.format, scale, divisor)
                if outliers is not None:
                    check_outliers(outliers, getattr(module, f"{prefix}_packed"), f"{path}.{prefix}")
                if divisor is not None and bool((divisor != divisor[..., :1]).any()) and not module.is_concatenated:
                    raise ValueError(f"{path}.{prefix}: its interleaved projections have different tensor scales.")

    def _report(self, model) -> None:
        packed = [model.get_submodule(path) for path in (*self.plan.linears, *self.plan.experts)]
        size = sum(buffer.nbytes for module in packed for buffer in module.buffers())
        large = [f"{n} {tuple(p.shape)}" for n, p in model.named_parameters() if p.numel() >= _LARGE and p.ndim > 1]
        logger.info(
            "hf_mxfp4: %d modules packed in %d bytes (%d linear layers, %d experts); large tensors not packed: %s",
            len(packed),
            size,
            len(self.plan.linears),
            len(self.plan.experts),
            ", ".join(large) or "none",
        )
        unsupported = {name: why for name, why in self.plan.kept.items() if ": " in why}
        if unsupported:
            listed = "\n  ".join(unsupported.values())
            logger.warning(
                'hf_mxfp4: %d modules left in full precision (on_unsupported="keep"):\n  %s', len(unsupported), listed
            )

    # --- saving, training, dequantizing ------------------------------------------------------------------------------

    def is_serializable(self, **kwargs) -> bool:
        """FP4 models are saved packed."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of packed weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model, dtype=None):
        fusion.unfuse_projections(model)
        return packing.dequantize_model(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _tokenizer(model):
    """The tokenizer that belongs to a loaded model."""
    return transformers.AutoTokenizer.from_pretrained(model.name_or_path)


class PortableConfig(auto.CompressedTensorsConfig):
    """Stands at transformers' `compressed-tensors` entry: dicts that carry our key become `FP4Config`, all others go
    to transformers' own class untouched."""

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        target = FP4Config if HF_MXFP4_KEY in config_dict else auto.CompressedTensorsConfig
        return target.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)


class ForeignConfig(FP4Config):
    """Stands at a quant_method that transformers does not know and `layouts` does; its dicts become `FP4Config`."""

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        return FP4Config.from_dict({FOREIGN_KEY: config_dict}, return_unused_kwargs=return_unused_kwargs, **kwargs)


def register() -> None:
    """Make transformers know `quant_method: hf_mxfp4`, our portable checkpoints and ModelOpt's. Safe to call twice."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = FP4Config
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = FP4HfQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[WRITTEN["portable"].quant_method] = PortableConfig
    for method in ("modelopt", "modelopt_fp4"):
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, ForeignConfig)
    if FP4Config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, FP4Config)
