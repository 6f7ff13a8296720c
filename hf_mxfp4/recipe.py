# SPDX-License-Identifier: Apache-2.0
"""How one module is quantized, and the checks of what a user may ask for."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

import torch

from hf_mxfp4 import macro_block, quantization, reference
from hf_mxfp4.formats import FORMATS, MACRO_BLOCK, BlockFormat, QuantizedTensor
from hf_mxfp4.outliers import Budget, select
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions

RECIPE_KEYS = ("format", "scale_rule", "search", "global_scale", "iterations", "macro_block")


class Recipe(NamedTuple):
    """How one module is quantized: a format, a scale rule and the rule's options, a macro-block mode."""

    format: BlockFormat
    scale_rule: str
    options: ScaleOptions
    macro_block: str | None = None

    def quantize(
        self, weight: torch.Tensor, name="weight", channel_weights=None, keep=None, tensor_scale=None
    ) -> QuantizedTensor:
        """Quantize `weight` `[..., K]` by this recipe; see `quantization.quantize`."""
        rule = (self.format, self.scale_rule, self.options)
        corrections = {"macro_block": self.macro_block, "keep": keep, "tensor_scale": tensor_scale}
        return quantization.quantize(weight, *rule, channel_weights, name, **corrections)

    def macro_factors(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Macro factors uint8 `[..., N, ceil(K/128)]` of a whole weight `[..., N, K]`, or `None`."""
        if self.macro_block is None:
            return None
        rows = weight.reshape(-1, weight.shape[-1])
        static = self.macro_block == "static"
        factors = macro_block.static_factors(rows) if static else macro_block.search(rows, self.format)[1]
        return factors.view(*weight.shape[:-1], -1)

    def count_gains(self, budget: Budget, weight: torch.Tensor) -> None:
        """Show a budget of outliers a weight `[..., N, K]`."""
        budget.add(weight, self.format, self.macro_factors(weight))

    def outliers(self, weight: torch.Tensor, threshold: float) -> torch.Tensor:
        """bool `[..., N, K]`: the entries to keep, by the threshold of a budget that has seen all weights."""
        return select(weight, self.format, threshold, self.macro_factors(weight))

    @property
    def bits_per_weight(self) -> float:
        """Codes, block scales and macro factors; outliers and the tensor scale are not counted."""
        return self.format.bits_per_weight + (8 / MACRO_BLOCK if self.macro_block else 0)


def check_recipe(format, scale_rule, search, global_scale, iterations, macro_block) -> None:
    check_choice("scale_rule", scale_rule, SCALE_RULES)
    if format not in SCALE_RULES[scale_rule].formats:
        usable = [name for name, rule in SCALE_RULES.items() if format in rule.formats]
        raise ValueError(
            f"scale_rule={scale_rule!r} does not work for format={format!r}; allowed: {', '.join(usable)}."
        )
    if search != "full" and not (isinstance(search, int) and not isinstance(search, bool) and 0 <= search <= 16):
        raise ValueError(f'search={search!r}; allowed: "full", or an int from 0 to 16.')
    check_choice("global_scale", global_scale, ("power_of_two", "free"))
    if not isinstance(iterations, int) or isinstance(iterations, bool) or not 1 <= iterations <= 1000:
        raise ValueError(f"iterations={iterations!r}; allowed: an int from 1 to 1000.")
    if scale_rule != "soar" and ScaleOptions(search, global_scale, iterations) != ScaleOptions():
        raise ValueError(
            f'search, global_scale and iterations are options of scale_rule="soar", not of {scale_rule!r}.'
        )
    if global_scale == "free" and not FORMATS[format].has_global_scale:
        raise ValueError(f'global_scale="free" needs a format with a tensor scale; {format} has none.')
    reference.check_macro_block(macro_block, FORMATS[format], scale_rule)
    if macro_block == "search" and search != "full":
        raise ValueError(f'macro_block="search" searches block scales in full: search={search!r} does not apply.')


def check_choice(name: str, value, allowed) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(allowed)}.")


def check_regex(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{field}: {pattern!r} is not a regular expression: {error}.") from error


def unknown_names(what: str, unknown, allowed) -> str:
    """A sentence that lists unknown names with the nearest allowed ones, then all that is allowed."""
    hints = []
    for name in sorted(unknown):
        close = difflib.get_close_matches(name, allowed, 1)
        hints.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return f"{what}: {', '.join(hints) or 'none'}. Allowed: {', '.join(allowed)}."
