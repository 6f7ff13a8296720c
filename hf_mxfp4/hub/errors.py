# SPDX-License-Identifier: Apache-2.0
"""The error of each packed matrix, measured against the full-precision model: error.json and its figure."""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

from hf_mxfp4.checkpoint_files import read_json, weight_files
from hf_mxfp4.output_files import write_file

ERRORS = "error.json"
FIGURE = "error.png"
EVALUATION = "evaluation.json"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_MARKS = "osD^vPX*<>"
_SAMPLES, _SAMPLE = 256, 4096  # pieces of a file, bytes of each


def fingerprint(folder: str | Path) -> str:
    """A digest of a checkpoint's weights that is quick to make: of each file its size and pieces from all over it.

    Kept beside what was measured, so that it is not shown of weights that came into the folder later.
    """
    digest = hashlib.sha256()
    for name in weight_files(Path(folder)):
        path = Path(folder, name)
        size = path.stat().st_size
        digest.update(f"{name} {size}\n".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def stale_reports(folder: Path, quantization: dict[str, Any] | None) -> list[str]:
    """Names of a folder's reports that were measured on other weights than it holds now."""
    stale = [ERRORS, FIGURE] if (folder / ERRORS).is_file() and read(folder, quantization) is None else []
    if (folder / EVALUATION).is_file() and not is_of(read_json(folder / EVALUATION), folder):
        stale.append(EVALUATION)
    return stale


def is_of(measured: dict[str, Any], folder: Path) -> bool:
    """Whether something was measured on the weights that a folder holds now, as far as it says on which."""
    weights = measured.get("weights")
    return weights is None or weights == fingerprint(folder)


def made(
    errors: dict[str, float], source: str, quantization: dict[str, Any] | None, weights: str | None
) -> dict[str, Any]:
    """The content of error.json.

    Args:
        errors: squared error of each matrix relative to its energy, by name.
        source: name of the model that was compared with.
        quantization: of the checkpoint, so that figures of another one are not taken for its own.
        weights: its `fingerprint`, for the same reason.
    """
    values = list(errors.values())
    worst = sorted(errors, key=lambda name: -errors[name])[:5]
    return {
        "source": source,
        "quantization_config": quantization,
        "weights": weights,
        "matrices": len(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "worst": {name: errors[name] for name in worst},
        "errors": errors,
    }


def read(folder: Path, quantization: dict[str, Any] | None) -> dict[str, Any] | None:
    """A checkpoint's error.json; `None` if there is none, or it was measured on another one's weights or config."""
    path = folder / ERRORS
    if not path.is_file():
        return None
    content = read_json(path)
    errors = content.get("errors")
    if not isinstance(errors, dict) or not errors or not all(isinstance(e, float | int) for e in errors.values()):
        raise ValueError(f"{path} holds no errors by name. Remove it, or make it again with the source model at hand.")
    if content.get("quantization_config") != json.loads(json.dumps(quantization)) or not is_of(content, folder):
        return None
    return made(errors, str(content.get("source", "")), quantization, content.get("weights"))


def check_matplotlib() -> None:
    """Raise `ImportError` without matplotlib, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install hf-mxfp4[plot]") from error


def plot(measured: dict[str, Any], path: Path) -> None:
    """Draw the errors by layer, one line a kind of projection (experts of a layer: their mean)."""
    from matplotlib.figure import Figure

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
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    write_file(path, content.getvalue())
