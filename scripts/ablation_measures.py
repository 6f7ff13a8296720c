# SPDX-License-Identifier: Apache-2.0
"""What `rl_ablation.py` measures of a policy: gradients, divergence and entropy on one batch, and its weights' error.

A policy is a PEFT model, packed or not. Its twin is the bf16 model with the same adapter.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional as F

from hf_mxfp4.analysis import Decomposition, decompose, error_parts
from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.integrations.peft.requantization import requantize
from hf_mxfp4.macro_block import block_factors
from hf_mxfp4.modules import FP4Linear
from hf_mxfp4.reference import dequantize, outlier_mask

TOLERANCE = 1e-9  # between the error and the sum of its parts, relative to the largest weight: both are float64


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Measure without a trace in the training: the mode and torch's random numbers are those from before."""
    devices = [model.device] if model.device.type == "cuda" else []
    was = model.training
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            model.train(was)


# --- one batch -------------------------------------------------------------------------------------------------------


class Batch:
    """Completions of one policy with their advantages, on which others are compared.

    Attributes:
        input_ids, attention_mask: int64 `[B, P + C]`, prompts padded on the left.
        mask: float32 `[B, C]`: tokens of completions up to and with the one that ends them.
        advantages: float32 `[B, 1]`: rewards less their group's mean, over its deviation, as GRPO has them.
    """

    def __init__(self, model, tokenizer, prompts: list[str], reward, group: int, new_tokens: int, seed: int):
        """Sample `group` completions of each prompt; `reward(index of a prompt, text)` is a number."""
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        sizes = {"num_return_sequences": group, "max_new_tokens": new_tokens}
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with aside(model):
            torch.manual_seed(seed)
            asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            self.input_ids = model.generate(**asked, **sizes, **sampling)
        start = inputs["input_ids"].shape[1]
        completions = self.input_ids[:, start:]
        ends = torch.isin(completions, torch.tensor(model.generation_config.eos_token_id, device=model.device))
        self.mask = (ends.cumsum(1) - ends.int() == 0).to(torch.float32)
        attention = inputs["attention_mask"].repeat_interleave(group, 0)
        self.attention_mask = torch.cat([attention, self.mask.to(attention.dtype)], 1)
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = [float(reward(i // group, text)) for i, text in enumerate(texts)]
        rewards = torch.tensor(rewards, device=model.device).view(-1, group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        self.advantages = advantages.view(-1, 1)

    def log_probabilities(self, model) -> torch.Tensor:
        """float32 `[B, C, V]`: of each token of the completions, given those before it."""
        logits = model(input_ids=self.input_ids, attention_mask=self.attention_mask, use_cache=False).logits
        width = self.mask.shape[1]
        return F.log_softmax(logits[:, -width - 1 : -1].float(), -1)

    def gradients(self, model) -> dict[str, torch.Tensor]:
        """GRPO's gradient of each adapter weight at a ratio of 1, tokens weighed alike; `.grad` is left alone."""
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        with aside(model), torch.enable_grad():
            tokens = self.input_ids[:, -self.mask.shape[1] :, None]
            taken = self.log_probabilities(model).gather(-1, tokens)[..., 0]
            loss = -(taken * self.advantages * self.mask).sum() / self.mask.sum()
            found = torch.autograd.grad(loss, list(weights.values()))
        return {name: gradient.double() for name, gradient in zip(weights, found, strict=True)}

    @torch.no_grad()
    def divergence(self, model, reference: torch.Tensor) -> dict[str, float]:
        """Means over the batch's tokens, in nats: KL(reference || policy) and the policy's entropy.

        Args:
            reference: float32 `[B, C, V]`, another policy's `log_probabilities`.
        """
        with aside(model):
            own = self.log_probabilities(model)
        kl, entropy = (reference.exp() * (reference - own)).sum(-1), -(own.exp() * own).sum(-1)
        return {name: float((x * self.mask).sum() / self.mask.sum()) for name, x in (("kl", kl), ("entropy", entropy))}


def compare_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative error and cosine of gradients, all weights taken as one vector."""
    error = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    product = sum(float((found[name] * expected[name]).sum()) for name in expected)
    own, other = (sum(float(g.square().sum()) for g in grads.values()) for grads in (found, expected))
    scale = (own * other) ** 0.5
    return {"relative_error": (error / other) ** 0.5 if other else 0.0, "cosine": product / scale if scale else 1.0}


@torch.no_grad()
def copy_adapter(source: nn.Module, target: nn.Module) -> None:
    """Give one model the adapter weights of another of the same shapes."""
    weights = {name: weight for name, weight in target.named_parameters() if weight.requires_grad}
    own = {name: weight for name, weight in source.named_parameters() if weight.requires_grad}
    if weights.keys() != own.keys():
        raise ValueError(f"the adapters differ in {sorted(weights.keys() ^ own.keys())[:4]}.")
    for name, weight in weights.items():
        weight.copy_(own[name])


@torch.no_grad()
def accuracy(model, tokenizer, prompts: list[str], answers: list[str], new_tokens: int) -> float:
    """Share of prompts whose greedy completion is the answer."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with aside(model):
        output = model.generate(**asked, max_new_tokens=new_tokens, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(is_right, texts, answers)) / len(answers)


def is_right(completion: str, answer: str) -> bool:
    """Whether the first line of a completion is the answer, with nothing around it."""
    return completion.split("\n")[0] == answer


# --- weights ---------------------------------------------------------------------------------------------------------


def packed_layers(policy: nn.Module) -> Iterator[tuple[str, BaseTunerLayer, FP4Linear]]:
    """Adapted layers of a policy around packed ones: name, PEFT's layer, ours."""
    for name, layer in policy.named_modules():
        if isinstance(layer, BaseTunerLayer) and isinstance(layer.get_base_layer(), FP4Linear):
            yield name, layer, layer.get_base_layer()


@torch.no_grad()
def weight_errors(policy: nn.Module, twin: nn.Module) -> dict[str, dict[str, float]] | None:
    """What quantizing the adapted weights does to them; `None` for a policy that is not packed.

    Returns:
        `dict`: `policy`, of the bf16 weight with the adapter merged: the decomposition (relative to the energy of the
        weights), with `total`, that of the parts' sum, `error`, that of the quantized weights, and `kept`, the share
        of it at outliers. `merge`, of the packed weight with the adapter merged: the same, and `change`,
        `relative_error`, `cosine`: how large the change is (against the weight), and what became of it.

    Raises:
        ArithmeticError: if the parts do not sum to the error, element by element.
    """
    layers = list(packed_layers(policy))
    if not layers:
        return None
    whole, merged = _Errors(), _Errors()
    asked = made = missed = product = 0.0
    for name, layer, base in layers:
        delta = layer.get_delta_weight(layer.active_adapters[0]).float()
        weight = twin.get_submodule(name).get_base_layer().weight.float() + delta
        whole.add(name, by_rule(base, weight, name), weight)
        before = dequantize(base.quantized, torch.float32)
        wanted = before + delta
        # As a merge does: what does not change keeps its bytes.
        after = merged.add(name, requantize(base, "weight", wanted), wanted) if bool(delta.any()) else before
        ask, make = (wanted - before).double(), (after - before).double()
        asked, made = asked + float(ask.square().sum()), made + float(make.square().sum())
        missed, product = missed + float((make - ask).square().sum()), product + float((make * ask).sum())
    change = {
        "change": (asked / whole.sums.energy) ** 0.5,
        "relative_error": (missed / asked) ** 0.5 if asked else 0.0,
        "cosine": product / (asked * made) ** 0.5 if asked and made else float(not asked),
    }
    return {"policy": whole.summary(), "merge": merged.summary() | change}


class _Errors:
    """Sums over layers of the decomposition and of the error itself."""

    def __init__(self):
        self.sums, self.error, self.kept, self.energy = Decomposition(), 0.0, 0.0, 0.0

    def add(self, name: str, quantized: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
        """Count the error of a quantized float32 `[N, K]`; returns it dequantized."""
        after = dequantize(quantized, torch.float32)
        kept = torch.zeros_like(weight, dtype=torch.bool)
        if quantized.outliers is not None:
            kept = outlier_mask(quantized.outliers, weight.shape[1])
        free = weight.masked_fill(kept, 0)  # as the encoder sees it
        scale = real_scales(quantized)
        error = after.double() - weight.double()
        parts = sum(error_parts(free, scale, quantized.format.block_size)).flatten(-2)
        gap = float((parts - error.masked_fill(kept, 0)).abs().max())
        if gap > TOLERANCE * float(weight.abs().max()):
            raise ArithmeticError(f"{name}: the parts of the error and the error differ by {gap:.1e}.")
        self.sums += decompose(free, scale, quantized.format.block_size)
        self.error += float(error.square().sum())
        self.kept += float(error[kept].square().sum())
        self.energy += float(weight.double().square().sum())
        return after

    def summary(self) -> dict[str, float]:
        """The decomposition's, relative to the energy of whole weights, outliers included."""
        free = self.sums.energy / self.energy if self.energy else 0.0
        found = self.sums.summary()
        parts = {name: free * found[name] for name in ("scale", "dead", "grid", "total")}
        rest = {name: found[name] for name in ("cos_scale_grid", "overshoot", "zeroed")}
        energy = self.energy or 1.0
        return parts | rest | {"error": self.error / energy, "kept": self.kept / energy}


def by_rule(base: FP4Linear, weight: torch.Tensor, name: str) -> QuantizedTensor:
    """Another weight float32 `[N, K]` quantized as a layer's own was, with outliers in the same places."""
    outliers = base.quantized.outliers
    kept = None if outliers is None else outlier_mask(outliers, weight.shape[1])
    quantized = base.recipe.quantize(weight, name, keep=kept)
    if kept is None:
        return quantized
    values = quantized.outliers.values.to(base.dtype)
    return quantized._replace(outliers=quantized.outliers._replace(values=values))


def real_scales(quantized: QuantizedTensor) -> torch.Tensor:
    """What multiplies the codes of each block, all scales together: float32 `[N, K/B]`."""
    scale = quantized.format.decode_scale(quantized.scale)
    if quantized.global_scale is not None:
        scale = scale * quantized.global_scale
    if quantized.macro is not None:
        scale = scale * block_factors(quantized.macro, scale.shape[-1], quantized.format.block_size)
    return scale
