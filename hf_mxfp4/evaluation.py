# SPDX-License-Identifier: Apache-2.0
"""How far a quantized causal LM is from the full-precision one it was made of: divergence, perplexity, weight error.

Models are called as `model(input_ids=[b, S], use_cache=False).logits`, and say where they are (`model.device`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.ops import dequantize


class Estimate(NamedTuple):
    """A mean over windows and its standard error (NaN for a single window), in the unit of what was averaged."""

    mean: float
    error: float


class Scores(NamedTuple):
    """Per-window means of one model on float64 `[W]` windows, nats per token.

    Attributes:
        loss: negative log-likelihood of the text.
        divergence: KL(reference || model) of the next-token distribution.
    """

    loss: torch.Tensor
    divergence: torch.Tensor

    @property
    def kl(self) -> Estimate:
        """KL divergence to the reference, nats per token."""
        return estimate(self.divergence)

    @property
    def perplexity(self) -> Estimate:
        """Per-token perplexity; the error is that of the choice of text (delta method)."""
        loss = estimate(self.loss)
        mean = _exp(loss.mean)
        return Estimate(mean, mean * loss.error)

    def perplexity_increase(self, reference: Scores) -> Estimate:
        """Perplexity over the reference's, minus 1. Paired by window: the difficulty of the text cancels."""
        change = estimate(self.loss - reference.loss)
        ratio = _exp(change.mean)
        return Estimate(ratio - 1, ratio * change.error)


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)  # beyond, math.exp raises


def estimate(values: torch.Tensor) -> Estimate:
    """Mean of `[W]` values and its standard error. Windows, not tokens, are the sample: tokens of one depend."""
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(values.mean().item(), error)


def spread_windows(stream: torch.Tensor, tokens: int, seq: int = 256) -> torch.Tensor:
    """Windows that lie evenly over a whole text.

    Args:
        stream (`torch.Tensor`): token ids, int64 `[T]`.
        tokens (`int`): predicted tokens wanted; rounded down to whole windows (at least one), at most all of the text.
        seq (`int`, defaults to 256): predicted tokens of a window.

    Returns:
        `torch.Tensor` int64 `[W, seq + 1]`.

    Raises:
        ValueError: for a text shorter than one window.
    """
    if len(stream) <= seq:
        raise ValueError(f"the text has {len(stream)} tokens; at least {seq + 1} are needed for one window.")
    rows = stream.unfold(0, seq + 1, seq)  # each overlaps the next by one token
    count = min(max(1, tokens // seq), len(rows))
    return rows[torch.arange(count) * len(rows) // count]


@torch.no_grad()
def score(
    models: Mapping[str, nn.Module],
    reference: str,
    rows: torch.Tensor,
    batch: int = 8,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Scores]:
    """Score models against their full-precision reference on the same windows.

    The reference's distribution is computed once for a batch and dropped after it, so memory does not grow with the
    text. Distributions are compared in float32.

    Args:
        models (`Mapping[str, nn.Module]`): what to score, by name; the reference is one of them.
        reference (`str`): name of the full-precision model that the others are compared to.
        rows (`torch.Tensor`): token ids, int64 `[W, S + 1]`.
        batch (`int`, defaults to 8): windows in a forward pass.
        advance (`Callable`, *optional*): told after each forward pass how many windows it was.

    Returns:
        `dict[str, Scores]`: scores by name, in the order of `models`; the reference's divergence is zero.

    Raises:
        ValueError: for models with vocabularies of different sizes.
    """
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in models}
    for chunk in rows.split(batch):
        expected = _log_probabilities(models[reference], chunk)
        for name, model in models.items():
            if name == reference:
                found, divergence = expected, torch.zeros(chunk.shape[0], 1)
            else:
                found = _log_probabilities(model, chunk).to(expected.device)
                if found.shape != expected.shape:
                    sizes = f"{name} knows {found.shape[-1]} tokens, {reference} {expected.shape[-1]}"
                    raise ValueError(f"{sizes}: name the model that it was quantized from as its reference.")
                divergence = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
            parts[name].append((_loss(found, chunk), divergence.double().mean(-1).cpu()))
            advance(len(chunk))
    return {name: Scores(*map(torch.cat, zip(*found, strict=True))) for name, found in parts.items()}


def _log_probabilities(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Float32 next-token log-probabilities `[b, S, V]` after each token of `rows` `[b, S + 1]` but the last."""
    return model(input_ids=rows[:, :-1].to(model.device), use_cache=False).logits.float().log_softmax(-1)


def _loss(log_probabilities: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of each row's tokens but the first, float64 `[b]`, nats per token."""
    targets = rows[:, 1:, None].to(log_probabilities.device)
    return -log_probabilities.gather(-1, targets)[..., 0].double().mean(-1).cpu()


def summary(scores: Scores, reference: Scores | None = None) -> dict[str, dict[str, float]]:
    """Scores as evaluation.json and model cards hold them: `{"perplexity": {"mean": ..., "error": ...}, ...}`.

    Args:
        scores: of the model.
        reference: of the model that `scores.divergence` is to; adds `kl` and `perplexity_increase` (ratio - 1).

    Returns:
        `dict`; `error` is left out for a single window.

    Raises:
        ValueError: if the model's outputs are not finite.
    """
    found = {"perplexity": scores.perplexity}
    if reference is not None:
        found |= {"kl": scores.kl, "perplexity_increase": scores.perplexity_increase(reference)}
    for name, value in found.items():
        if not math.isfinite(value.mean):
            raise ValueError(f"{name} is {value.mean}: the model's logits hold NaN or Inf, or are far too large.")
    return {
        name: {"mean": value.mean} | ({} if math.isnan(value.error) else {"error": value.error})
        for name, value in found.items()
    }


def packed_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the full-precision model and float32 decoded values of every packed weight."""
    for path, module in model.named_modules():
        if isinstance(module, FP4Linear):
            yield f"{path}.weight", dequantize(module.quantized, torch.float32)
        elif isinstance(module, FP4Experts):
            for name in module.shapes:
                yield f"{path}.{name}", module.dequantized(name, torch.float32)


def bits_per_weight(model: nn.Module) -> float:
    """Bits stored for each packed weight: codes, block scales and tensor scales."""
    stored = codes = 0
    for module in model.modules():
        if isinstance(module, (FP4Linear, FP4Experts)):
            for name, buffer in module.named_buffers(recurse=False):
                stored += buffer.nbytes
                codes += 2 * buffer.numel() if name.endswith("_packed") else 0
    return 8 * stored / codes


def weight_error(model: nn.Module, reference: nn.Module) -> float:
    """Squared error of all packed weights over their squared norm, relative to the reference's weights."""
    error = norm = 0.0
    for name, found in packed_weights(model):
        expected = reference.get_parameter(name).to(found)
        error += (found - expected).square().sum(dtype=torch.float64).item()
        norm += expected.square().sum(dtype=torch.float64).item()
    return error / norm
