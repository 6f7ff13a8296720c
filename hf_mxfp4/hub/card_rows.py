# SPDX-License-Identifier: Apache-2.0
"""The rows of a model card: recipe, sizes, what was measured, limits."""

from __future__ import annotations

import inspect
import json
from typing import Any

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import WRITTEN
from hf_mxfp4.config import FP4Config
from hf_mxfp4.formats import FORMATS, NVFP4
from hf_mxfp4.hub.card_use import has_experts, is_portable, mixed_siblings
from hf_mxfp4.hub.markdown import code, command, fenced, plain
from hf_mxfp4.inspection import Inspection

Rows = list[tuple[str, str]]

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Fields of a recipe in the order of the card; those that say nothing (None, False, 0) are left out.
_FIELDS = {
    "scale_rule": "scales of blocks",
    "search": "search",
    "global_scale": "scales of tensors",
    "macro_block": "macro-blocks",
    "outlier_fallback": "fraction of outliers",
    "error_feedback": "error feedback",
    "channel_weights": "channel weights",
    "modules_to_not_convert": "left in full precision",
    "overrides": "overrides",
}
_CORRECTIONS = {"macro_block": "macro-blocks", "outlier_fallback": "outliers", "transforms": "transforms of inputs"}
_OF_A_RUN = ("calibration_dir", "calibration_device", "backend", "dequantize", "fuse_projections")
_SOAR_ONLY = ("search", "global_scale")


def model_part(inspection: Inspection, origin: str | None) -> dict[str, str]:
    """What the first lines say."""
    rest = {kind: row for kind, row in inspection.plain.items() if kind in _DTYPES}
    total = sum(row["bytes"] for row in rest.values())
    kinds = " and ".join(_DTYPES[kind] for kind in sorted(rest))
    return {
        "weights": f"{inspection.weights_packed:,} weights",
        "origin": code(origin) if origin else "a model in full precision",
        "bits": f"{inspection.bits_per_weight:.3g}",
        "formats": " and ".join(FORMATS[name].name.upper() for name in sorted(inspection.modules)),
        "kept": f"The rest of the model ({total:,} bytes) is in {kinds}." if rest else "",
    }


def recipe_rows(inspection: Inspection) -> Rows:
    """How it was quantized, as far as its config says."""
    rows: Rows = []
    for name, count in sorted(inspection.modules.items()):
        fmt = FORMATS[name]
        scales = "E4M3 scales and one float32 scale a matrix" if fmt.has_global_scale else "power-of-two scales"
        rows.append((fmt.name.upper(), f"{count:,} packed modules; blocks of {fmt.block_size}, {scales}"))
    rows.append(("tool", code(inspection.origin or "unknown")))
    recipe = inspection.recipe or {}
    if recipe.get("origin"):  # its fields say nothing of what another tool did
        return rows
    for field, name in _FIELDS.items():
        if recipe.get(field) and not (field in _SOAR_ONLY and recipe.get("scale_rule") != "soar"):
            rows.append((name, "yes" if recipe[field] is True else code(recipe[field])))
    if recipe.get("error_feedback") or recipe.get("channel_weights"):
        samples, length = recipe.get("calibration_samples"), recipe.get("calibration_length")
        seed = recipe.get("calibration_seed")
        rows.append(("calibration", code(f"{recipe.get('calibration')}, {samples} x {length} tokens, seed {seed}")))
    if inspection.activation_format:
        rows.append(("activations", f"rounded as they come ({code(inspection.activation_format)}: W4A4)"))
    return rows


def config_code(inspection: Inspection) -> str:
    """The `FP4Config` that quantizes the same way: what differs from its defaults, and its format and rule."""
    recipe = inspection.recipe or {}
    if not recipe or recipe.get("origin"):
        return ""
    defaults = {name: field.default for name, field in inspect.signature(FP4Config).parameters.items()}
    given = {name: recipe[name] for name in defaults if name in recipe}
    if given.get("calibration", "").endswith(" texts"):  # a list that is not stored
        del given["calibration"]
    if isinstance(given.get("overrides"), list):  # stored as pairs, since their order counts
        given["overrides"] = {pattern: override for pattern, override in given["overrides"]}
    kept = {
        name: value
        for name, value in given.items()
        if name in ("format", "scale_rule") or (value != defaults[name] and name not in _OF_A_RUN)
    }
    text = ", ".join(f"{name}={_literal(value)}" for name, value in kept.items())
    return fenced(f"FP4Config({text})", "python")


def _literal(value) -> str:
    """A value as Python source, in the quotes that formatters of code prefer."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def size_rows(inspection: Inspection) -> Rows:
    """Bits and bytes."""
    return [
        ("layout", code(inspection.layout)),
        ("bits per packed weight", f"{inspection.bits_per_weight:.4g}, all tensors of a matrix counted"),
        ("packed", f"{inspection.bytes_packed:,} bytes"),
        ("in full precision", f"{inspection.bytes_plain:,} bytes"),
        ("tensors in all", f"{inspection.nbytes:,} bytes in {inspection.files} file{'s' * (inspection.files != 1)}"),
    ]


def evaluation_part(measured: dict[str, Any]) -> dict[str, Any] | None:
    """What evaluation.json says; only keys that are there make rows. `None` if it has no figure.

    Raises:
        ValueError: for figures that are no numbers.
    """
    rows: Rows = []
    try:
        reference = measured.get("reference") or {}
        for key, name, digits in (
            ("perplexity", "perplexity", 2),
            ("kl", "KL divergence, nats per token", 4),
        ):
            if key in measured:
                rows.append((name, _figure(measured[key], digits)))
        if "perplexity" in reference:
            name = f"perplexity of {code(reference.get('model', 'the reference'))}"
            rows.insert(1, (name, _figure(reference["perplexity"], 2)))
        if "perplexity_increase" in measured:
            increase = {key: 100 * float(value) for key, value in measured["perplexity_increase"].items()}
            rows.append(("increase of perplexity", _figure(increase, 2) + " %"))
        for task, row in (measured.get("tasks") or {}).items():
            samples = f" ({int(row['samples']):,} samples)" if "samples" in row else ""
            rows.append((f"{code(task)}, {code(row.get('metric', 'score'))}", _figure(row, 4) + samples))
        tokens = f"{int(measured['tokens']):,} tokens of " if "tokens" in measured else ""
        versions = measured.get("versions") or {}
        of = f"On {tokens}{code(measured['text'])}" if "text" in measured else "Measured"
        of += f", against {code(reference['model'])}" if "model" in reference else ""
        of += f" (device: {code(measured['device'])})" if "device" in measured else ""
        of += ", with activations rounded to 4 bits" if measured.get("activation_format") else ""
        return (
            {
                "of": f"{of}; ± is one standard error:",
                "rows": rows,
                "command": command(measured["command"]) if measured.get("command") else "",
                "versions": ", ".join(f"{code(name)} {code(version)}" for name, version in versions.items()),
            }
            if rows
            else None
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"what was measured is not as `hf-mxfp4 evaluate` writes it: {error!r}. Evaluate again, or remove it."
        ) from error


def _figure(value: dict[str, Any], digits: int) -> str:
    mean = f"{float(value['mean']):.{digits}f}"
    return f"{mean} ± {float(value['error']):.{digits}f}" if "error" in value else mean


def limits(checkpoint: Checkpoint, inspection: Inspection, measured: bool) -> list[str]:
    """What a reader has to know before using the checkpoint."""
    out = ["Rounding to 4 bits changes what the model says."]
    out[0] += " How much was measured above, on that data only." if measured else " How much was not measured."
    experts, portable = has_experts(checkpoint), is_portable(checkpoint)
    if inspection.layout == "own":
        held = [name for field, name in _CORRECTIONS.items() if (checkpoint.quantization or {}).get(field)]
        why = f" ({' and '.join(held)})" if held else " (fused experts)" if experts else ""
        out.append(
            f"Its layout{why} is read by hf_mxfp4 only: transformers without it stops at a mismatch of shapes, and "
            f"vLLM does not load it. `hf-mxfp4 export` writes {'full precision from it' if held else 'other layouts'}."
        )
    elif portable and experts:
        why = ": transformers alone does not read their tensor scales" if NVFP4.name in inspection.modules else ""
        out.append(f"Its quantized experts are for hf_mxfp4 and vLLM{why}.")
    if portable and (mixed := mixed_siblings(checkpoint)):
        out.append(f"vLLM does not load it: it makes one layer of {mixed}, which are in different formats here.")
    if inspection.activation_format:
        who = "hf_mxfp4 rounds activations" if inspection.layout in WRITTEN else "Activations are rounded"
        others = " vLLM and transformers keep them." if inspection.layout == "portable" else ""
        out.append(f"{who} to 4 bits too, which adds an error of its own.{others}")
    if inspection.skipped:
        out.append(f"{len(inspection.skipped):,} stored tensors are not used when it is loaded with hf_mxfp4.")
    return [*out, *(plain(note) for note in inspection.notes)]
