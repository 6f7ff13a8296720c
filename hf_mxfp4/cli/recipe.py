# SPDX-License-Identifier: Apache-2.0
"""Options that say how to quantize, and the `FP4Config` they make."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from hf_mxfp4.cli.common import check_regex
from hf_mxfp4.config import FP4Config
from hf_mxfp4.formats import FORMATS
from hf_mxfp4.scales import SCALE_RULES


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


_SCALES, _CALIBRATION, _LAYERS = "Scales and corrections", "Calibration", "Layers"

Format = Annotated[str | None, _option(f"One of {', '.join(FORMATS)}; nvfp4 if not given.", _SCALES)]
Rule = Annotated[str | None, _option(f"Scale rule: {', '.join(SCALE_RULES)}; soar if not given.", _SCALES)]
Search = Annotated[str | None, _option("For soar: full, or a number of scales either side.", _SCALES)]
GlobalScale = Annotated[str | None, _option("For soar with nvfp4: power_of_two or free.", _SCALES)]
Iterations = Annotated[int | None, _option("For soar: most rounds.", _SCALES)]
MacroBlock = Annotated[str | None, _option("For mxfp4: static or search, a factor for 128 weights.", _SCALES)]
Outliers = Annotated[float | None, _option("Fraction of weights kept in 16 bits, such as 0.005.", _SCALES)]
ErrorFeedback = Annotated[bool, _option("Make up for errors column by column (GPTQ).", _SCALES, "--error-feedback")]
ChannelWeights = Annotated[bool, _option("Weigh errors by input channel.", _SCALES, "--channel-weights")]

Calibration = Annotated[str | None, _option("self, random, a text file, wikitext2, c4.", _CALIBRATION)]
Samples = Annotated[int | None, _option("Sequences; 32 if not given.", _CALIBRATION, "--calibration-samples")]
Length = Annotated[int | None, _option("Tokens of each; 256 if not given.", _CALIBRATION, "--calibration-length")]
Seed = Annotated[int | None, _option("Of the sampling.", _CALIBRATION, "--calibration-seed")]
Dir = Annotated[str | None, _option("Keeps finished layers for the next run.", _CALIBRATION, "--calibration-dir")]
Device = Annotated[str | None, _option("Where one block at a time runs.", _CALIBRATION, "--calibration-device")]

Skip = Annotated[list[str] | None, _option("Module to leave as it is: name, prefix, regex. Repeatable.", _LAYERS)]
Override = Annotated[
    list[str] | None,
    _option("regex=FORMAT, regex=skip, regex=pack or regex={JSON}, first match wins. Repeatable.", _LAYERS),
]
Activation = Annotated[str | None, _option("same: activations in FP4, too (W4A4).", _LAYERS)]
OnUnsupported = Annotated[str | None, _option("error, or keep what cannot be packed as it is.", _LAYERS)]
Layout = Annotated[str | None, _option("auto, portable (other readers, too) or own.", _LAYERS)]

# Fields of FP4Config whose options have other names.
FIELDS = {
    **{"rule": "scale_rule", "outliers": "outlier_fallback", "skip": "modules_to_not_convert"},
    **{"override": "overrides", "activation": "activation_format"},
}

OPTIONS = (
    *("format", "rule", "search", "global_scale", "iterations", "macro_block", "outliers", "error_feedback"),
    *("channel_weights", "calibration", "calibration_samples", "calibration_length", "calibration_seed"),
    *("calibration_dir", "calibration_device", "skip", "override", "activation", "on_unsupported", "layout"),
)


def config_of(options: dict[str, Any]) -> FP4Config:
    """The config of what was given on the command line; the rest keeps `FP4Config`'s defaults.

    Args:
        options: values by option name; `None`, `False` and `[]` were not given.

    Raises:
        typer.BadParameter: for what `FP4Config` refuses.
    """
    values = {
        FIELDS.get(name, name): value
        for name, value in options.items()
        if value is not None and value is not False and value != []
    }
    if str(values.get("search", "")).isdecimal():
        values["search"] = int(values["search"])
    check_regex("--skip", values.get("modules_to_not_convert", ()))
    if "overrides" in values:
        values["overrides"] = dict(_override(text) for text in values["overrides"])
    try:
        return FP4Config(**values)
    except (ValueError, TypeError) as error:
        options_of = {field: f"--{name}" for name, field in FIELDS.items()}
        given = [options_of.get(name, f"--{name.replace('_', '-')}") for name in values]
        raise typer.BadParameter(str(error), param_hint=" ".join(given)) from error


def _override(text: str) -> tuple[str, dict | str]:
    """`regex=FORMAT`, `regex=skip`, `regex=pack` or `regex={...}` -> the regex and what `FP4Config` takes for it."""
    found = re.fullmatch(r"(.+?)=(\{.*\})", text) or re.fullmatch(r"(.+)=(\w+)", text)
    if found:
        pattern, value = found.groups()
        if value in FORMATS:
            return pattern, {"format": value}
        if value in ("skip", "pack"):
            return pattern, "skip" if value == "skip" else {}
        try:
            return pattern, json.loads(value)
        except ValueError:
            pass
    example = "'down_proj$=mxfp4' or 'layers.0={\"scale_rule\": \"amax\"}'"
    allowed = (
        f"regex= and one of {', '.join(FORMATS)}, skip, pack, or JSON of FP4Config's overrides, such as {example}"
    )
    raise typer.BadParameter(f"{text!r}; expected {allowed}.", param_hint="--override")
