# SPDX-License-Identifier: Apache-2.0
"""Model cards, from what a checkpoint's files say and what was measured; what was not measured is left out.

The template is model_cards/template.md of the source tree. A card carries the facts that no file holds (base model,
licence, command) in a comment, from which the next card takes them, and by which it is known as ours.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_mxfp4.checkpoint_files import INDEX, Checkpoint, read_checkpoint, read_json
from hf_mxfp4.hub import errors
from hf_mxfp4.hub.card_rows import config_code, evaluation_part, limits, model_part, recipe_rows, size_rows
from hf_mxfp4.hub.card_use import task_of, usage
from hf_mxfp4.hub.markdown import code, comment, fenced, one_line, plain
from hf_mxfp4.inspection import inspect_checkpoint
from hf_mxfp4.verification import verify_checkpoint

README = "README.md"
_MARK = re.compile(r"^<!-- hf-mxfp4 card (\{.*\})$", re.MULTILINE)
_ID = r"[\w.-]{1,96}/[\w.-]{1,96}"
_LICENSE = r"[a-z0-9][a-z0-9.-]{0,60}"
_INHERITED = ("license", "license_name", "license_link")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")


def is_ours(text: str) -> bool:
    """Whether a README.md was made here, and may be made anew."""
    return _MARK.search(text) is not None


def render_card(
    folder: str | Path,
    *,
    base_model: str | None = None,
    measured: dict[str, Any] | None = None,
    command: str | None = None,
    repo_id: str | None = None,
) -> ModelCard:
    """The model card of a checkpoint folder, of which headers and JSON files are read.

    Args:
        folder: with `error.json` and `evaluation.json` if these were measured.
        base_model: the full-precision model's name on the Hub; that of an earlier card of ours if not given.
        measured: in place of evaluation.json, with the same keys (`hf-mxfp4 evaluate --output`).
        command: that made the checkpoint; that of an earlier card of ours if not given.
        repo_id: the name that examples load; the folder's if not given.

    Raises:
        ValueError: for a folder that is no quantized checkpoint, and a `base_model` that is no name on the Hub.
    """
    folder = Path(folder)
    return _render(folder, _facts(folder, base_model, command), measured, None, errors.FIGURE, repo_id)


def write_card(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    base_model: str | None = None,
    source: str | Path | None = None,
    measured: dict[str, Any] | None = None,
    command: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write a checkpoint's model card; with the model it was made from, measure the error of each matrix first.

    Args:
        folder: of the checkpoint.
        output: the file; README.md in the folder if not given. The figure goes beside it.
        source: folder of the full-precision model. Its licence is taken over.
        base_model, measured, command, repo_id: see `render_card`.

    Returns:
        The file.

    Raises:
        ValueError: see `render_card`; for a file that was not made here; for a `source` that is another model.
        ImportError: with `source`, without matplotlib.
    """
    folder = Path(folder)
    output = folder / README if output is None else Path(output)
    if output.exists() and not is_ours(output.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{output} was not made by hf-mxfp4. Name another file, or move it away.")
    facts = _facts(folder, base_model, command)
    found, figure = None, errors.FIGURE if output.name == README else f"{output.stem}.png"
    if source is not None:
        facts |= licence_of(Path(source))
        found = _measure(folder, Path(source))
        errors.plot(found, output.parent / figure)
        if output.parent.resolve() == folder.resolve():
            text = json.dumps(found, indent=2) + "\n"
            (folder / errors.ERRORS).write_text(text, encoding="utf-8")
    elif output.parent.resolve() != folder.resolve() and (folder / errors.ERRORS).exists():
        found = errors.read(folder, read_checkpoint(folder).quantization)
        if found is not None:
            errors.plot(found, output.parent / figure)
    card = _render(folder, facts, measured, found, figure, repo_id, output.parent)
    output.write_text(str(card), encoding="utf-8", newline="\n")
    return output


def _measure(folder: Path, source: Path) -> dict[str, Any]:
    found = verify_checkpoint(folder, source)
    if not found.ok or not found.errors:
        why = "; ".join(map(str, found.findings[:3])) or "no matrix of it could be compared"
        raise ValueError(f"{folder} and {source} do not belong together, or one is damaged: {why}.")
    return errors.made(found.errors, source.resolve().name, read_checkpoint(folder).quantization)


def _facts(folder: Path, base_model: str | None, command: str | None) -> dict[str, Any]:
    """What no file of the checkpoint says, from the arguments or an earlier card of ours."""
    earlier: dict[str, Any] = {}
    readme = folder / README
    if readme.is_file() and (found := _MARK.search(readme.read_text(encoding="utf-8", errors="replace"))):
        try:
            earlier = json.loads(found[1])
        except ValueError as error:
            raise ValueError(f"{readme}: its first comment was edited. Remove the file, or the comment.") from error
    if base_model is not None and not re.fullmatch(_ID, base_model):
        raise ValueError(f"base_model={base_model!r} is not the name of a model on the Hub (user/name).")
    facts = {key: one_line(value) for key, value in earlier.items() if isinstance(value, str)}
    facts |= {} if base_model is None else {"base_model": base_model}
    return facts | ({} if command is None else {"command": _TOKEN.sub("<token>", one_line(command))})


def licence_of(source: Path) -> dict[str, str]:
    """Licence metadata of the source's own card."""
    if not (source / README).is_file():
        return {}
    try:
        data = ModelCard.load(source / README, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # a card is free text by anybody: what cannot be read says nothing of a licence
        return {}
    return {key: one_line(data[key]) for key in _INHERITED if isinstance(data.get(key), str)}


def _render(
    folder: Path,
    facts: dict[str, Any],
    measured: dict[str, Any] | None,
    found: dict[str, Any] | None,
    figure: str,
    repo_id: str | None,
    where: Path | None = None,
) -> ModelCard:
    from jinja2 import Environment, StrictUndefined

    checkpoint = read_checkpoint(folder)
    inspection = inspect_checkpoint(checkpoint)
    if not inspection.modules:
        raise ValueError(f"{folder} holds no quantized weights; a card is made of a quantized checkpoint.")
    found = found or errors.read(folder, checkpoint.quantization)
    if measured is None and (folder / "evaluation.json").is_file():
        measured = read_json(folder / "evaluation.json")
    name = repo_id or folder.resolve().name
    body = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False).from_string(
        _template().read_text(encoding="utf-8")
    )
    text = body.render(
        facts=comment({key: facts[key] for key in sorted(facts)}),
        title=plain(name.rsplit("/", 1)[-1]),
        **model_part(inspection, facts.get("base_model") or (found or {}).get("source")),
        table=[*recipe_rows(inspection), *size_rows(inspection, _nbytes(folder, inspection))],
        config=config_code(inspection),
        command=fenced(facts["command"], "sh") if facts.get("command") else "",
        error=_error_part(found),
        figure=figure if found and ((where or folder) / figure).is_file() else "",
        evaluation=evaluation_part(measured) if measured else None,
        use=usage(checkpoint, inspection, name),
        limits=limits(checkpoint, inspection, measured is not None),
        versions=_versions(checkpoint),
    )
    return ModelCard(f"---\n{_metadata(checkpoint, inspection, facts).to_yaml()}\n---\n\n{text.strip()}\n")


def _template() -> Path:
    """model_cards/ lies beside hf_mxfp4/ in the source tree, and inside it in an installed wheel."""
    package = Path(__file__).parents[1]
    return next(path for top in (package, package.parent) if (path := top / "model_cards" / "template.md").is_file())


def _metadata(checkpoint: Checkpoint, inspection, facts: dict[str, Any]) -> ModelCardData:
    given = {}
    if re.fullmatch(_ID, facts.get("base_model", "")):
        given = {"base_model": facts["base_model"], "base_model_relation": "quantized"}
    if re.fullmatch(_LICENSE, facts.get("license", "")):
        given |= {key: facts[key] for key in _INHERITED if facts.get(key)}
    method = (checkpoint.quantization or {}).get("quant_method")
    tags = ["fp4", *sorted(inspection.modules), "hf_mxfp4"]
    tags += ["compressed-tensors"] if method == "compressed-tensors" else []
    quantization = {"format": "+".join(sorted(inspection.modules)), "layout": inspection.layout}
    quantization["bits_per_weight"] = round(inspection.bits_per_weight, 3)
    task = task_of(checkpoint.config)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task.pipeline if task else None,
        tags=tags,
        quantization=quantization,
        **given,
    )


def _nbytes(folder: Path, inspection) -> int:
    """Of the weights and their index."""
    index = folder / INDEX
    return inspection.nbytes + (index.stat().st_size if index.exists() else 0)


def _error_part(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "source": code(found["source"]) if found["source"] else "the full-precision model",
        "matrices": f"{found['matrices']:,} matrices",
        "mean": f"{found['mean']:.5f}",
        "median": f"{found['median']:.5f}",
        "worst": [(code(name), f"{value:.5f}") for name, value in found["worst"].items()],
    }


def _versions(checkpoint: Checkpoint) -> str:
    import torch
    import transformers

    from hf_mxfp4 import __version__

    stored = checkpoint.config.get("transformers_version")
    stored = f"config.json was written by transformers {plain(stored)}; " if isinstance(stored, str) else ""
    made = f"hf_mxfp4 {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{stored}this card was made with {plain(made)}."
