# SPDX-License-Identifier: Apache-2.0
"""The error of each packed matrix, measured against the full-precision model: error.json and its figure."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from hf_mxfp4.checkpoint_files import read_json

ERRORS = "error.json"
FIGURE = "error.png"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_MARKS = "osD^vPX*<>"


def made(errors: dict[str, float], source: str, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """The content of error.json.

    Args:
        errors: squared error of each matrix relative to its energy, by name.
        source: name of the model that was compared with.
        quantization: of the checkpoint, so that figures of another one are not taken for its own.
    """
    values = list(errors.values())
    worst = sorted(errors, key=lambda name: -errors[name])[:5]
    return {
        "source": source,
        "quantization_config": quantization,
        "matrices": len(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "worst": {name: errors[name] for name in worst},
        "errors": errors,
    }


def read(folder: Path, quantization: dict[str, Any] | None) -> dict[str, Any] | None:
    """A checkpoint's error.json; `None` if there is none, or it was measured on one that was quantized otherwise."""
    path = folder / ERRORS
    if not path.is_file():
        return None
    content = read_json(path)
    errors = content.get("errors")
    if not isinstance(errors, dict) or not errors or not all(isinstance(e, float | int) for e in errors.values()):
        raise ValueError(f"{path} holds no errors by name. Remove it, or make it again with the source model at hand.")
    if content.get("quantization_config") != json.loads(json.dumps(quantization)):
        return None
    return made(errors, str(content.get("source", "")), quantization)


def plot(measured: dict[str, Any], path: Path) -> None:
    """Draw the errors by layer, one line a kind of projection (experts of a layer: their mean).

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install hf-mxfp4[plot]") from error
    lines: dict[str, dict[int, list[float]]] = {}
    towers = {name[: layer.start()] for name in measured["errors"] if (layer := _LAYER.search(name))}
    for position, (name, value) in enumerate(measured["errors"].items()):
        layer = _LAYER.search(name)
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1] if layer else "others"
        if layer and len(towers) > 1:  # a vision model and a language model, say
            kind = f"{name[: layer.start()]} {kind}"
        lines.setdefault(kind, {}).setdefault(int(layer[1]) if layer else position, []).append(value)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, kind in enumerate(sorted(lines)):
        layers = sorted(lines[kind])
        values = [statistics.fmean(lines[kind][layer]) for layer in layers]
        style = {"marker": _MARKS[number % len(_MARKS)], "markersize": 5, "linewidth": 1}
        axes.plot(layers, values, color=f"C{number % 10}", label=kind.replace("$", r"\$"), **style)
    axes.axhline(measured["mean"], color="grey", linewidth=0.8, linestyle="--", label="mean of all")
    axes.set(xlabel="layer", ylabel="squared error / energy of the weight")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Error of the packed weights")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110, metadata={"Software": None})
