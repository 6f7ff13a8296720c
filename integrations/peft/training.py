# SPDX-License-Identifier: Apache-2.0
"""Training adapters on packed weights: preparing a model, and callbacks that stop what could only go wrong."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator

import torch
import transformers
from accelerate.state import AcceleratorState
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState, TrainerCallback

from hf_mxfp4.packed import PackedModule

_SAMPLE = 1 << 20  # bytes of a module's codes that count for a fingerprint
_WRAPPERS = ("base_model.model.", "_orig_mod.", "_fsdp_wrapped_module.", ".base_layer")


def prepare_fp4_for_training(
    model: transformers.PreTrainedModel | PeftModel,
    gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict | None = None,
) -> transformers.PreTrainedModel | PeftModel:
    """Make a packed model ready for adapters: frozen, with gradient checkpointing, every dtype as it was.

    Call it before `get_peft_model` or after; a second call changes nothing. PEFT's `prepare_model_for_kbit_training`
    works too, but casts embeddings and norms, and with them all activations, to float32, and turns no checkpointing
    on. Trainer and TRL need neither: `gradient_checkpointing=True` in their arguments does the rest.

    Args:
        model (`transformers.PreTrainedModel` or `peft.PeftModel`):
            With packed layers. Adapters that are there keep what is trainable of them.
        gradient_checkpointing (`bool`, defaults to `True`):
            Recompute activations in the backward pass. `False` turns it off where it was on.
        gradient_checkpointing_kwargs (`dict`, *optional*):
            For `torch.utils.checkpoint.checkpoint`; `{"use_reentrant": False}` if not given.

    Returns:
        The same model, changed in place. `config.use_cache` is off: a cache is of no use in training.

    Raises:
        TypeError: for another object than a transformers or PEFT model.
        ValueError: for a model without packed layers, with merged adapters, compiled, offloaded, loaded under
            `torch.inference_mode`, without gradient checkpointing, or under DeepSpeed ZeRO-3. Nothing is changed then.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled; prepare it first, then compile (or torch_compile=True in Trainer).")
    if not isinstance(base, transformers.PreTrainedModel):
        raise TypeError(f"expected a transformers or PEFT model, got {type(base).__name__}.")
    _check_trainable(model)
    if gradient_checkpointing and not base.supports_gradient_checkpointing:
        raise ValueError(f"{type(base).__name__} has no gradient checkpointing; set gradient_checkpointing=False.")
    if not any(isinstance(module, BaseTunerLayer) for module in model.modules()) and base is model:
        model.requires_grad_(False)
    base.config.get_text_config().use_cache = base.config.use_cache = False
    base.disable_input_require_grads()  # or a second call adds a hook
    if gradient_checkpointing:
        _call(base, "enable", {"use_reentrant": False} | (gradient_checkpointing_kwargs or {}))
        # The reentrant form has gradients only where an input asks for one, and embeddings are frozen.
        if not getattr(base, "_require_grads_hooks", None):
            base.enable_input_require_grads()
    else:
        _call(base, "disable")
    return model


def _call(base: transformers.PreTrainedModel, what: str, *args) -> None:
    """Enable or disable checkpointing by the name of transformers 5.23, or 5.17's."""
    new, old = f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}"
    getattr(base, new if hasattr(base, new) else old)(*args)


def _packed(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Packed modules by their names in the bare model, in order."""
    found = {}
    model = next((m.get_base_model() for m in model.modules() if isinstance(m, PeftModel)), model)
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            found[name] = module
    yield from sorted(found.items())


def _check_trainable(model: nn.Module) -> None:
    packed = dict(_packed(model))
    if not packed:
        raise ValueError(
            f"{type(model).__name__} has no packed layer: it was loaded without a quantization_config or "
            "dequantized. Load it with quantization_config=FP4Config(), or train it without this function."
        )
    _check_unmerged(model)
    _check_zero3()
    for name, module in packed.items():
        if any(buffer.is_meta for buffer in module.buffers()):
            raise ValueError(f"{name} is offloaded (or not loaded); load the model without offloading to train on it.")
        if any(buffer.is_inference() for buffer in module.buffers()):
            raise ValueError(
                f"{name} was loaded under torch.inference_mode, where nothing can be trained; load it anew."
            )


def _check_zero3() -> None:
    if is_deepspeed_zero3_enabled():
        raise ValueError("packed weights cannot be trained on under DeepSpeed ZeRO-3; use ZeRO stage 1 or 2, or DDP.")


def _check_unmerged(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"{name}: adapters {module.merged_adapters} are merged into the weights, and would get no gradient. "
                "Call model.unmerge_adapter() first."
            )


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> dict:
    """What tells a packed base from another: a digest of its packed tensors, whatever adapters stand around them.

    All scales count, and of the codes of each projection evenly spread rows of about a mebibyte, so that a model of 30
    billion weights takes seconds.

    Args:
        model (`torch.nn.Module`): with or without packed modules, adapters, wrappers.

    Returns:
        `dict`: `digest` (SHA-256; `None` without packed modules), `modules` (their number by kind).
    """
    digest, kinds = hashlib.sha256(), Counter()
    for name, module in _packed(model):
        digest.update(f"{name} {module.extra_repr()}".encode())
        rule = f", scale_rule={module.recipe.scale_rule}" if module.recipe is not None else ""
        kinds[f"{type(module).__name__}, {module._kind()}{rule}"] += 1
        for key, buffer in sorted(module.named_buffers(recurse=False)):
            rows = buffer.flatten(0, -2) if buffer.ndim > 1 else buffer[:, None]
            step = max(1, buffer.nbytes // _SAMPLE) if key.endswith("_packed") else 1
            digest.update(f"{key} {tuple(buffer.shape)}".encode())
            digest.update(rows[::step].contiguous().view(torch.uint8).cpu().numpy())
    return {"digest": digest.hexdigest() if kinds else None, "modules": dict(sorted(kinds.items()))}


class PackedBaseCheck(TrainerCallback, ExportableState):
    """Adapters are trained on from the packed base they were trained on, or an error says what is different.

    Give one to a Trainer: `callbacks=[PackedBaseCheck()]`. The base's fingerprint goes into each checkpoint's
    trainer_state.json. Refused with a `ValueError`: a resumed run on another base, merged adapters, processes whose
    bases differ, and, when the Trainer is made, what cannot train on packed weights (nn.DataParallel, FSDP 1,
    DeepSpeed ZeRO-3). A model without packed modules may be trained, and not be exchanged for a packed one.
    """

    def __init__(self):
        self.base: dict | None = None

    def state(self) -> dict:
        """What the Trainer stores of this callback."""
        return {"args": {}, "attributes": {"base": self.base}}

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if next(_packed(model), None) is not None:
            _check_distribution(args)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        base = base_fingerprint(model)
        if base["digest"] is not None:
            _check_unmerged(model)
        _check_ranks(base)
        name = type(self).__name__
        stored = state.stateful_callbacks.get(name) or {}
        stored = stored[-1] if isinstance(stored, list) else stored
        recorded = stored.get("attributes", {}).get("base")
        if state.global_step and recorded is not None and recorded["digest"] != base["digest"]:
            raise ValueError(
                f"the checkpoint was trained on another base and cannot be resumed on this one.\n  the checkpoint's: "
                f"{_describe(recorded)}\n  this model: {_describe(base)}\nLoad the base that it was trained on, with "
                "the same quantization_config (FP4Config fields, calibration included), or start anew."
            )
        self.base = base
        state.stateful_callbacks[name] = self.state()


def _describe(base: dict) -> str:
    modules = "; ".join(f"{count} x {kind}" for kind, count in base["modules"].items())
    return f"{modules}, digest {base['digest'][:16]}" if modules else "no packed modules"


def _check_distribution(args) -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would use nn.DataParallel, which packed weights do "
            "not support. Start it by `accelerate launch` or `torchrun --nproc-per-node N`, or set "
            "CUDA_VISIBLE_DEVICES to one GPU."
        )
    _check_zero3()
    plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version < 2:
        raise ValueError("packed weights cannot be trained on under FSDP 1; set fsdp_version to 2, or use DDP.")
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ValueError("FSDP cannot hand packed weights on to others: set fsdp_cpu_ram_efficient_loading to false.")


def _check_ranks(base: dict) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    bases = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(bases, base)
    for rank, other in enumerate(bases):
        if other["digest"] != bases[0]["digest"]:
            raise ValueError(
                f"process {rank} has another base than process 0: {_describe(other)}, not {_describe(bases[0])}. "
                "Quantize once, save, and load the saved model in every process."
            )


@functools.cache  # a second call adds nothing
def register() -> None:
    """Have PEFT refuse what TRL does with vLLM: send it the merged parameters, of which packed matrices are none.

    TRL calls `merge_adapter` for that alone. Merging by anyone else is as before. Safe to call twice.
    """
    BaseTuner.merge_adapter = _not_for_vllm(BaseTuner.merge_adapter)


def _not_for_vllm(method):
    @functools.wraps(method)
    def merge_adapter(self, *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        layers = (m for m in self.model.modules() if isinstance(m, BaseTunerLayer))
        if caller.startswith("trl.") and any(isinstance(m.get_base_layer(), PackedModule) for m in layers):
            raise ValueError(
                f"{caller} is about to send vLLM the model's parameters, and packed matrices are none: vLLM would "
                "sample from the weights before training. Set use_vllm=False, for generation by transformers."
            )
        return method(self, *args, **kwargs)

    return merge_adapter


class StopOnNaN(TrainerCallback):
    """Stop before an adapter that is no number is written: `callbacks=[StopOnNaN()]`.

    The Trainer hides a NaN loss from its log (`logging_nan_inf_filter`), goes on, and overwrites checkpoints. Here a
    NaN or Inf among the gradients stops it before the optimizer's step (with a loss scaler, fp16=True, such steps are
    skipped, not stopped), one among the trainable parameters before the step's checkpoint.
    """

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not args.fp16:
            gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
            _check_finite("gradients", gradients, state.global_step + 1, "Adapters are as they were before it.")

    def on_step_end(self, args, state, control, model=None, **kwargs):
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        _check_finite("trained tensors", trained, state.global_step, "Nothing was saved of this step.")


@torch.no_grad()
def _check_finite(what: str, tensors: dict[str, torch.Tensor], step: int, then: str) -> None:
    if not tensors:
        return
    norm = torch.nn.utils.get_total_norm(tensors.values(), torch.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not norm.isfinite():
        bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        raise FloatingPointError(
            f"step {step}: NaN or Inf in {len(bad)} of {len(tensors)} {what}, such as {bad[0]}. {then} Resume from "
            "the last checkpoint with a lower learning rate, a warm-up or max_grad_norm; look for rows without labels."
        )
