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

from hf_mxfp4.checkpoint_files import Checkpoint, read_checkpoint, read_json
from hf_mxfp4.hub import errors
from hf_mxfp4.hub.card_rows import config_code, evaluation_part, limits, model_part, recipe_rows, size_rows
from hf_mxfp4.hub.card_use import task_of, usage
from hf_mxfp4.hub.markdown import code, command_line, comment, fenced, one_line, plain
from hf_mxfp4.inspection import inspect_checkpoint
from hf_mxfp4.output_files import write_file
from hf_mxfp4.verification import verify_checkpoint

README = "README.md"
_MARK = re.compile(r"^<!-- hf-mxfp4 card (\{.*\})$", re.MULTILINE)
_ID = r"[\w.-]{1,96}/[\w.-]{1,96}"
_LICENSE = r"[a-z0-9][a-z0-9.-]{0,60}"
_INHERITED = ("license", "license_name", "license_link")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a model's folder in huggingface_hub's cache


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
        source: folder of the full-precision model. Its licence is taken over, and from huggingface_hub's cache its
            name.
        base_model, measured, command, repo_id: see `render_card`.

    Returns:
        The file.

    Raises:
        ValueError: see `render_card`; for a file or figure that was not made here; for a `source` that is another
            model.
        ImportError: without matplotlib, if there is a figure to be drawn.
    """
    folder = Path(folder)
    output = folder / README if output is None else Path(output)
    figure = errors.FIGURE if output.name == README else f"{output.stem}.png"
    inside = output.parent.resolve() == folder.resolve()
    checkpoint = read_checkpoint(folder)
    found = None if source is not None or inside else errors.read(folder, checkpoint.quantization)
    draws = source is not None or found is not None
    _check_place(output, output.parent / figure if draws else None)
    if draws:
        errors.check_matplotlib()
    if source is not None:
        cached = _name_in_cache(Path(source))
        facts = _facts(folder, base_model or cached, command) | licence_of(Path(source))
        facts = _with_reachable_licence(facts, folder)
        found = _measure(checkpoint, Path(source), base_model or cached)
    else:
        facts = _facts(folder, base_model, command)
    card = _render(folder, facts, measured, found, figure, repo_id, shows=draws)
    if found is not None:
        errors.plot(found, output.parent / figure)
    if found is not None and inside:
        write_file(folder / errors.ERRORS, (json.dumps(found, indent=2) + "\n").encode())
    write_file(output, str(card).encode())
    return output


def _check_place(output: Path, figure: Path | None) -> None:
    """Refuse to write a card where that would replace something else, before anything is measured."""
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is not a folder. Make it first.")
    if output.is_dir():
        raise ValueError(f"{output} is a folder. Name a file.")
    if output.exists() and not is_ours(output.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{output} was not made by hf-mxfp4. Name another file, or move it away.")
    if figure is not None and figure.name != errors.FIGURE and figure.exists() and not output.exists():
        raise ValueError(f"{figure} is there already, and the card's figure would replace it. Name another file.")


def _name_in_cache(source: Path) -> str | None:
    """`user/name` of a model in huggingface_hub's cache, whose own folder is named by a commit."""
    parts = source.resolve().parts
    found = _CACHED.fullmatch(parts[-3]) if len(parts) > 2 and parts[-2] == "snapshots" else None
    return f"{found[1]}/{found[2]}" if found else None


def _measure(checkpoint: Checkpoint, source: Path, name: str | None) -> dict[str, Any]:
    folder = checkpoint.folder
    found = verify_checkpoint(folder, source)
    if not found.ok or not found.errors:
        why = "; ".join(map(str, found.findings[:3])) or "no matrix of it could be compared"
        raise ValueError(f"{folder} and {source} do not belong together, or one is damaged: {why}.")
    name = name or source.resolve().name
    return errors.made(found.errors, name, checkpoint.quantization, errors.fingerprint(folder))


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
    facts = {key: command_line(value) for key, value in earlier.items() if isinstance(value, str)}
    facts |= {} if base_model is None else {"base_model": base_model}
    return facts | ({} if command is None else {"command": command_line(command)})


def licence_of(source: Path) -> dict[str, str]:
    """Licence metadata of the source's own card."""
    if not (source / README).is_file():
        return {}
    try:
        data = ModelCard.load(source / README, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # a card is free text by anybody: what cannot be read says nothing of a licence
        return {}
    return {key: one_line(data[key]) for key in _INHERITED if isinstance(data.get(key), str)}


def _with_reachable_licence(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A link to a file of the source leads there, unless the file was copied."""
    link, origin = facts.get("license_link", ""), facts.get("base_model")
    if not link or not origin or "://" in link or (folder / link).is_file():
        return facts
    return facts | {"license_link": f"https://huggingface.co/{origin}/blob/main/{link}"}


def _render(
    folder: Path,
    facts: dict[str, Any],
    measured: dict[str, Any] | None,
    found: dict[str, Any] | None,
    figure: str,
    repo_id: str | None,
    shows: bool = False,
) -> ModelCard:
    from jinja2 import Environment, StrictUndefined

    checkpoint = read_checkpoint(folder)
    inspection = inspect_checkpoint(checkpoint)
    if not inspection.modules:
        raise ValueError(f"{folder} holds no quantized weights; a card is made of a quantized checkpoint.")
    found = found or errors.read(folder, checkpoint.quantization)
    if measured is None and (folder / errors.EVALUATION).is_file():
        measured = read_json(folder / errors.EVALUATION)
        measured = measured if errors.is_of(measured, folder) else None
    evaluation = evaluation_part(measured) if measured else None
    name = repo_id or folder.resolve().name
    body = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False).from_string(
        _template().read_text(encoding="utf-8")
    )
    text = body.render(
        facts=comment({key: facts[key] for key in sorted(facts)}),
        title=plain(name.rsplit("/", 1)[-1]),
        **model_part(inspection, facts.get("base_model") or (found or {}).get("source")),
        table=[*recipe_rows(inspection), *size_rows(inspection)],
        config=config_code(inspection),
        command=fenced(facts["command"], "sh") if facts.get("command") else "",
        error=_error_part(found),
        figure=figure if found and (shows or (folder / figure).is_file()) else "",
        evaluation=evaluation,
        use=usage(checkpoint, inspection, name),
        limits=limits(checkpoint, inspection, evaluation is not None),
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
