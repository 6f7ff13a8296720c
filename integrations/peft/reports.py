# SPDX-License-Identifier: Apache-2.0
"""What became of the changes that were merged into packed weights."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch import nn

from hf_mxfp4.packed import PackedModule

logger = logging.getLogger(__name__)

_LITTLE = 0.5  # cosine between the change made and the one asked for


class MergeReport(NamedTuple):
    """What a merge into a packed weight kept of the change.

    Attributes:
        name: of the module.
        weight: `"weight"`, or the name of a projection of experts.
        adapters: that are merged.
        change: size of the change asked for, relative to the weight (as norms).
        relative_error: of the change made, against that asked for: 0 is all of it, 1 is as if nothing was merged.
        cosine: between the two.
    """

    name: str
    weight: str
    adapters: tuple[str, ...]
    change: float
    relative_error: float
    cosine: float


def merge_report(model: nn.Module) -> list[MergeReport]:
    """What merges kept of each change: of the adapters merged now, or by `merge_and_unload`.

    Args:
        model (`nn.Module`): a PEFT model, or the model that `merge_and_unload` returned.

    Returns:
        `list[MergeReport]`, in the model's order; empty if nothing is merged.
    """
    reports = []
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            reports += [
                MergeReport(name, weight, *record) for weight, record in vars(module).get("_merges", {}).items()
            ]
    return reports


def merge_table(model: nn.Module) -> str:
    """`merge_report` as text, the least cosine first."""
    rows = [("weight", "adapters", "change", "rel. error", "cosine")]
    for report in sorted(merge_report(model), key=lambda report: report.cosine):
        numbers = (f"{report.change:.2e}", f"{report.relative_error:.3f}", f"{report.cosine:.3f}")
        rows.append((f"{report.name}.{report.weight}", ", ".join(report.adapters), *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = ("<", "<", ">", ">", ">")
    return "\n".join("  ".join(f"{t:{s}{w}}" for t, s, w in zip(row, sides, widths, strict=True)) for row in rows)


def in_words(module: PackedModule, prefix: str) -> str:
    """What the last merge into a packed weight kept, for the log."""
    _, change, error, cosine = vars(module)["_merges"][prefix]
    return f"cosine {cosine:.3f}, relative error {error:.3f} of a change of {change:.2e}"


def warn_of_little(reports: list[MergeReport]) -> bool:
    """One warning for a model of whose changes little is left; whether there was one."""
    little = [report for report in reports if report.cosine < _LITTLE]
    if not little:
        return False
    worst = min(little, key=lambda report: report.cosine)
    logger.warning(
        "hf_mxfp4: of %d merged weights, %d keep little of their adapters (cosine below %g; the least is %.3f, of "
        "%s.%s, a change of %.1e of the weight): 4 bits cannot hold it. Keep the adapter beside the packed model, or "
        "use hf_mxfp4.integrations.peft.merge_to_bf16; merge_table(model) lists all.",
        *(len(reports), len(little), _LITTLE, worst.cosine, worst.name, worst.weight, worst.change),
    )
    return True
