# SPDX-License-Identifier: Apache-2.0
"""TRL on packed models: noise on norms during rollouts (AQN), and which generation backends can be used.

trainer = GRPOTrainer(model, ..., callbacks=[AdaptiveQuantizationNoise()])
"""

import copy
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite

import torch
from torch import nn
from transformers import TrainerCallback

from hf_mxfp4.packed import PackedModule

logger = logging.getLogger(__name__)

_GENERATING = ("generate", "generate_batch")  # what TRL's trainers call for completions


def noise_schedule(sigma_start: float = 1e-2, sigma_end: float = 1e-4, stages: int = 10) -> list[float]:
    """Standard deviation of the noise in each stage of training, all stages being equally long.

    Stage 0 has none; then it falls geometrically from `sigma_start` to `sigma_end`.

    Args:
        sigma_start (`float`): of stage 1.
        sigma_end (`float`): of the last stage; at most `sigma_start`. Both may be 0: no noise at all.
        stages (`int`): K, at least 3.

    Returns:
        `list[float]`: K values, `[0, start, ..., end]`.

    Raises:
        ValueError: for values out of these ranges.

    Source: the code of arXiv 2510.11696 (QeRL): `start * (end / start) ** (j / (K - 2))`, j = 0..K-2, after the 0.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 3:
        raise ValueError(f"stages={stages!r}; allowed: an int, at least 3 (one without noise, a first, a last).")
    for name, sigma in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
        number = isinstance(sigma, (int, float)) and not isinstance(sigma, bool)
        if not number or not isfinite(sigma) or sigma < 0:
            raise ValueError(f"{name}={sigma!r}; allowed: a finite number, at least 0.")
    if sigma_start == sigma_end == 0:
        return [0.0] * stages
    if not 0 < sigma_end <= sigma_start:
        raise ValueError(
            f"sigma_start={sigma_start!r}, sigma_end={sigma_end!r}: the noise falls geometrically, so sigma_end must "
            "be above 0 and at most sigma_start. For no noise, set both to 0."
        )
    ratio = sigma_end / sigma_start
    return [0.0] + [sigma_start * ratio ** (j / (stages - 2)) for j in range(stages - 1)]


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm with a gain: one vector `weight`, and it computes `x / rms(x) * (weight [+ 1])`.

    A class that is called an RMSNorm is taken for one. Of any other, a copy with a random gain is tried on inputs with
    a mean, which tells it from a LayerNorm.
    """
    own = {name: value for name, value in module._parameters.items() if value is not None}
    if set(own) != {"weight"} or own["weight"].ndim != 1 or module._modules:
        return False
    weight = own["weight"]
    if not weight.is_floating_point() or weight.numel() < 2:
        return False
    if "rmsnorm" in type(module).__name__.lower():
        return True
    gain, one, two = _normal((3, weight.numel()), torch.Generator("cpu").manual_seed(0))
    x, gain = torch.stack([one + 3, 5 * two - 2]), gain + 1
    device = torch.device("cpu") if weight.is_meta else weight.device
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(gain.to(device), requires_grad=False)}
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            y = type(module).forward(probe, x[None].to(device))[0].float().cpu()
    except Exception:  # whatever a module that is something else raises for this input
        return False
    normed = x * x.square().mean(-1, keepdim=True).rsqrt()
    return y.shape == x.shape and any(torch.allclose(y, normed * (gain + of), 1e-2, 1e-2) for of in (0, 1))


def rms_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The RMSNorms of a model that have a gain, by name: those of blocks, heads (q_norm, k_norm) and the last one."""
    return {name: module for name, module in model.named_modules() if is_rms_norm(module)}


class AdaptiveQuantizationNoise(TrainerCallback):
    """Adaptive quantization noise (AQN): noise on all RMSNorm weights while completions are sampled, and only then.

    As a callback of `GRPOTrainer` (or `RLOOTrainer`), the model's `generate` runs with noise while the model is in
    training mode; evaluation has none. `rollout` is the same for loops of one's own. Each batch of rollouts has fresh
    noise N(0, sigma^2), drawn in float32 on the CPU from `seed`, the step and the number of the batch in it: the same
    on all ranks, and no random number of the training is used up. Weights are restored bit for bit, also when
    generation raises, so neither training nor a checkpoint sees noise. Log-probabilities (old, current, reference) are
    those of the model without noise, as in QeRL.

    In bfloat16 the noisy weight is rounded: noise below half a step (0.002 just below 1, 0.004 above) often changes
    nothing. `aqn/changed` tells which share of the weights a batch really moved. Logged with it: `aqn/sigma`. TRL logs
    the policy's `entropy`. Trackers named in `report_to` run before other callbacks and miss these two; `sigma` and
    `changed` have the last values.

    Args:
        sigma_start, sigma_end (`float`), stages (`int`): see `noise_schedule`; a stage is 1/stages of `max_steps`.
        seed (`int`): of the noise.

    Raises:
        ValueError: for a bad schedule; with vLLM, which holds weights of its own; for a model without an RMSNorm, or
            with norm weights that are elsewhere (offloaded, FSDP, ZeRO-3).

    Source: arXiv 2510.11696 and 2605.20402.
    """

    def __init__(self, sigma_start: float = 1e-2, sigma_end: float = 1e-4, stages: int = 10, seed: int = 0):
        self.schedule = noise_schedule(sigma_start, sigma_end, stages)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r} is not an int.")
        self.seed = seed
        self.sigma, self.changed = 0.0, 0.0
        self.rollouts = 0
        self._step, self._batch = -1, 0
        self._model, self._state, self._active = None, None, False

    def sigma_at(self, step: int, max_steps: int) -> float:
        """Sigma at `step` of `max_steps`."""
        stages = len(self.schedule)
        return self.schedule[min(max(step, 0) * stages // max(max_steps, 1), stages - 1)]

    @contextmanager
    def rollout(self, model: nn.Module, step: int, max_steps: int) -> Iterator[float]:
        """Noise on a model's RMSNorms inside the block; the block of one call is one batch of rollouts.

        Inside itself it does nothing more.

        Args:
            model (`nn.Module`): with its weights at hand.
            step, max_steps (`int`): progress of the training.

        Yields:
            `float`: sigma.
        """
        if self._active:
            yield self.sigma
            return
        self._batch = self._batch + 1 if step == self._step else 0
        self._step, sigma = step, self.sigma_at(step, max_steps)
        weights = _norm_weights(model)
        key = hashlib.sha256(f"{self.seed} {step} {self._batch}".encode()).digest()
        self.sigma, self.changed, self.rollouts, self._active = sigma, 0.0, self.rollouts + 1, True
        try:
            with _noise(weights, sigma, int.from_bytes(key[:7], "big")) if sigma else nullcontext(0.0) as self.changed:
                yield sigma
        finally:
            self._active = False

    def attach(self, model: nn.Module, state) -> None:
        """Put the noise into `model.generate`; `state` is the `TrainerState` that tells the progress."""
        self.detach()
        _norm_weights(model)
        self._model, self._state = model, state
        for name in _GENERATING:
            if hasattr(model, name):
                setattr(model, name, _Generate(self, model, name))

    def detach(self) -> None:
        """Take the noise out of `generate`. Done when training ends; after one that failed, call it."""
        if self._model is not None:
            for name in _GENERATING:
                _unwrap(self._model, name)
        self._model, self._state = None, None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if getattr(args, "use_vllm", False):
            raise ValueError(
                "AdaptiveQuantizationNoise changes the norms of the model that trains; vLLM generates with weights of "
                "its own (use_vllm=True). Set use_vllm=False, or leave the callback out."
            )
        check_grpo_config(args, model)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.rollouts, self._step = 0, -1
        self.attach(model, state)

    def on_train_end(self, args, state, control, **kwargs):
        self.detach()
        if not self.rollouts and state.global_step:
            logger.warning("AdaptiveQuantizationNoise: training never called model.generate, so there was no noise.")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "loss" not in logs or not self.rollouts:
            return
        for name, value in (("aqn/sigma", self.sigma), ("aqn/changed", self.changed)):
            logs.setdefault(name, value)
            if state.log_history:
                state.log_history[-1].setdefault(name, value)


class _Generate:
    """A model's `generate`, or another of `_GENERATING`, with noise; follows the model when that is copied."""

    def __init__(self, noise: AdaptiveQuantizationNoise, model: nn.Module, name: str):
        _unwrap(model, name)
        self.noise, self.model, self.name = noise, model, name
        self.before = model.__dict__.get(name)

    def __call__(self, *args, **kwargs):
        function = getattr(type(self.model), self.name, None)
        call = self.before or (partial(function, self.model) if function else self.model.__getattr__(self.name))
        state = self.noise._state
        if not self.model.training or state is None:
            return call(*args, **kwargs)
        with self.noise.rollout(self.model, state.global_step, state.max_steps):
            return call(*args, **kwargs)


def _unwrap(model: nn.Module, name: str) -> None:
    wrapper = model.__dict__.get(name)
    if isinstance(wrapper, _Generate):
        delattr(model, name)
        if wrapper.before is not None:
            setattr(model, name, wrapper.before)


def _norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of all RMSNorms, each once; an error where they cannot be changed in place."""
    norms = rms_norms(model)
    if not norms:
        raise ValueError(
            f"AdaptiveQuantizationNoise found no RMSNorm with a weight in {type(model).__name__}: it has nothing to "
            "put noise on. Leave it out for this model."
        )
    for name, norm in norms.items():
        weight = norm.weight
        where = "offloaded (on the meta device)" if weight.is_meta else None
        where = "sharded by ZeRO-3" if hasattr(weight, "ds_id") else where
        where = f"sharded ({type(weight.data).__name__})" if type(weight.data) is not torch.Tensor else where
        if where:
            raise ValueError(
                f"{name}.weight is {where}: AdaptiveQuantizationNoise needs norm weights whole and in place. Train "
                "with DDP or on one device, or leave norms out of sharding and offloading."
            )
    return list({id(norm.weight): norm.weight for norm in norms.values()}.values())


@contextmanager
def _noise(weights: list[nn.Parameter], sigma: float, seed: int) -> Iterator[float]:
    """Add N(0, sigma^2) to weights inside the block; yields the share of elements that changed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    # Through `.data`: the version counters stay, as the values will be the same again for a graph that saved them.
    kept = [(weight, weight.data.clone()) for weight in weights]
    try:
        changed = 0
        for weight, original in kept:
            noise = _normal(weight.shape, generator) * sigma
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight.data.copy_(original.to(wide) + noise.to(weight.device, wide))
            changed += int((weight.data != original).sum())
        yield changed / sum(weight.numel() for weight in weights)
    finally:
        try:
            _put_back(kept)
        except BaseException:  # a second Ctrl-C: no noise may stay in the weights
            _put_back(kept)
            raise


def _put_back(kept: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for weight, original in kept:
        weight.data.copy_(original)


def _normal(shape, generator: torch.Generator) -> torch.Tensor:
    """Whatever torch's default device and dtype are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def check_grpo_config(config, model: nn.Module | None = None) -> None:
    """Refuse settings of `GRPOConfig` (or RLOO's) with which a packed model would train on something else in silence.

    Args:
        config (`trl.GRPOConfig`): or another `TrainingArguments`.
        model (`nn.Module`, *optional*): without packed modules everything is allowed; taken to be packed if not given.

    Raises:
        ValueError: for vLLM, and for continuous batching with bf16 or fp16.
    """
    if model is not None and not any(isinstance(module, PackedModule) for module in model.modules()):
        return
    if getattr(config, "use_vllm", False):
        raise ValueError(
            "use_vllm=True with a packed model: TRL would send vLLM the model's parameters only, of which a packed "
            "model has no matrices, so completions would come from the weights before training. Set use_vllm=False "
            "(generation by transformers, from the packed weights)."
        )
    if getattr(config, "use_transformers_continuous_batching", False) and (config.bf16 or config.fp16):
        raise ValueError(
            "use_transformers_continuous_batching=True with bf16 or fp16: TRL casts the whole model before its first "
            "rollout, and adapters in float32 would go on in 16 bits. Leave it out, or set bf16=False."
        )
