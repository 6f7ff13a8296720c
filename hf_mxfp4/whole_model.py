# SPDX-License-Identifier: Apache-2.0
"""Quantizing a model that is loaded: what needs all of its weights (one budget of outliers) or what its layers read
(error feedback, channel weights)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_mxfp4 import calibration, packing
from hf_mxfp4.config import FP4Config
from hf_mxfp4.error_feedback import Hessian, quantize_with_feedback
from hf_mxfp4.formats import Outliers, QuantizedTensor
from hf_mxfp4.modules import FP4Experts
from hf_mxfp4.outliers import Budget
from hf_mxfp4.packing import Plan
from hf_mxfp4.recipe import Recipe

logger = logging.getLogger(__name__)


@torch.no_grad()
def quantize_model(model: nn.Module, plan: Plan, config: FP4Config, tokenizer: Callable | None = None) -> None:
    """Pack the modules of a plan in place.

    Args:
        model: a transformers model in full precision, all of its weights in memory.
        plan: from `conversion.plan_modules`.
        config: with `outlier_fallback`, `error_feedback` or `channel_weights`.
        tokenizer: returns the model's tokenizer; called for calibration on text only.

    Raises:
        ValueError: for weights that cannot be quantized, and for calibration that cannot be done. The model is then
            half packed, and not to be used.
    """
    packer = Packer(model, plan, config)
    if config.needs_calibration:
        report = calibration.calibrate(model, plan, config, packer, tokenizer, config.calibration_device)
        for line in report.summary():
            logger.info("hf_mxfp4: %s", line)
        for name, note in report.notes.items():
            logger.warning("hf_mxfp4: %s: %s", name, note)
        return
    for unit in tqdm([*plan.units(), *plan.experts], desc="Quantizing", leave=False):
        packer.place(packer.linears(unit, None) if isinstance(unit, tuple) else packer.experts(unit, {}))


class Packer:
    """Quantizes modules of a model and puts packed ones in their places; see `calibration.Packer`.

    Outliers are found in two passes over the weights: the first, here, counts what every entry would gain; the second
    marks those above the threshold, one matrix at a time. Only so does every matrix get its share of one budget.
    """

    def __init__(self, model: nn.Module, plan: Plan, config: FP4Config):
        self.model, self.plan, self.config = model, plan, config
        self.threshold: float | None = None
        if config.outlier_fallback:
            weights = [model.get_parameter(name).numel() for name in plan.weight_names(model)]
            budget = Budget(config.outlier_fallback, sum(weights))
            with tqdm(total=len(weights), desc="Looking for outliers", leave=False) as bar:
                for recipe, weight in self._matrices():
                    recipe.count_gains(budget, weight)
                    bar.update()
            self.threshold = budget.threshold

    def _matrices(self) -> Iterator[tuple[Recipe, torch.Tensor]]:
        for unit in self.plan.units():
            yield self.plan.linears[unit[0]], self._joined(unit)
        for path, recipe in self.plan.experts.items():
            experts = packing.empty_experts(self.model.get_submodule(path), recipe, self.config)
            for leaf in experts.shapes:
                yield recipe, self._projection(path, leaf, experts)

    def _joined(self, names: tuple[str, ...]) -> torch.Tensor:
        weights = [self.model.get_submodule(name).weight.detach() for name in names]
        return weights[0] if len(names) == 1 else torch.cat(weights)

    def _projection(self, path: str, leaf: str, experts: FP4Experts) -> torch.Tensor:
        weight = getattr(self.model.get_submodule(path), leaf).detach()
        return weight.transpose(1, 2) if experts.is_transposed else weight

    def _keep(self, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor | None:
        return None if self.threshold is None else recipe.outliers(weight, self.threshold)

    def _quantize(
        self, weight: torch.Tensor, recipe: Recipe, name: str, hessian: Hessian | None, keep: torch.Tensor | None
    ) -> QuantizedTensor:
        """A matrix `[N, K]` with what is known of its input; without a Hessian plainly."""
        if hessian is None:
            return recipe.quantize(weight, name, keep=keep)
        if self.config.channel_weights:
            return recipe.quantize(weight, name, hessian.diagonal, keep)
        damping = calibration.damping(hessian)
        how = (recipe.format, recipe.options, recipe.macro_block, keep, damping, name)
        return quantize_with_feedback(weight, hessian.matrix, *how)

    def linears(self, names: tuple[str, ...], hessian: Hessian | None) -> dict[str, torch.Tensor]:
        """The tensors of packed linears that read the same input, by full name."""
        recipe, weight = self.plan.linears[names[0]], self._joined(names)
        name = packing.matrix_name(names)
        joined = self._quantize(weight, recipe, name, hessian, self._keep(weight, recipe))
        modules = packing.packed_linears(self.model, names, joined, recipe, self.config)
        return {
            f"{name}.{leaf}": buffer for name, module in modules.items() for leaf, buffer in module.named_buffers()
        }

    def experts(self, name: str, hessians: dict[str, list[Hessian | None]]) -> dict[str, torch.Tensor]:
        """The tensors of packed experts, by full name; Hessians by projection and expert, if there are any."""
        recipe = self.plan.experts[name]
        experts = packing.empty_experts(self.model.get_submodule(name), recipe, self.config)
        for leaf in experts.shapes:
            weight = self._projection(name, leaf, experts)
            keep, full = self._keep(weight, recipe), f"{name}.{leaf}"
            if leaf not in hessians:
                experts.load_projection(leaf, recipe.quantize(weight, full, keep=keep))
                continue
            parts = [
                self._quantize(matrix, recipe, f"{full}[{e}]", hessian, None if keep is None else keep[e])
                for e, (matrix, hessian) in enumerate(zip(weight, hessians[leaf], strict=True))
            ]
            experts.load_projection(leaf, _stack(parts))
        return {f"{name}.{leaf}": buffer for leaf, buffer in experts.named_buffers()}

    def place(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put packed modules with these tensors in the places of dense ones."""
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            modules.setdefault(path, {})[leaf] = tensor
        for path, buffers in modules.items():
            dense = self.model.get_submodule(path)
            if path in self.plan.experts:
                module = packing.empty_experts(dense, self.plan.experts[path], self.config)
            else:
                module = packing.empty_linear(dense, self.plan.linears[path], self.config)
            for leaf, buffer in buffers.items():
                setattr(module, leaf, buffer)
            packing.place(self.model, path, module)


def _stack(parts: list[QuantizedTensor]) -> QuantizedTensor:
    """Matrices `[N, K]` as a stack `[E, N, K]`."""
    first, outliers = parts[0], None
    if first.outliers is not None:
        starts = torch.tensor([0, *(part.outliers.values.numel() for part in parts)]).cumsum(0)
        offsets = [part.outliers.offsets[:-1] + int(start) for part, start in zip(parts, starts[:-1], strict=True)]
        end = first.outliers.offsets.new_tensor([int(starts[-1])])
        outliers = Outliers(
            torch.cat([part.outliers.values for part in parts]),
            torch.cat([part.outliers.columns for part in parts]),
            torch.cat([*offsets, end]),
        )
    return QuantizedTensor(
        torch.stack([part.packed for part in parts]),
        first.format.scale_from_bytes(torch.stack([part.scale.view(torch.uint8) for part in parts])),
        None if first.global_scale is None else torch.stack([part.global_scale for part in parts]),
        first.format,
        None if first.macro is None else torch.stack([part.macro for part in parts]),
        outliers,
    )
