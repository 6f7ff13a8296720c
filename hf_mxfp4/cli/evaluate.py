# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 evaluate`."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import __version__
from hf_mxfp4.checkpoint_files import quantization_of, read_checkpoint, read_json
from hf_mxfp4.cli.common import (
    MODEL_FILES,
    Json,
    Source,
    TrustRemoteCode,
    bars,
    check_choice,
    command_line,
    device_of,
    local_folder,
    print_json,
    quiet_libraries,
    say,
)
from hf_mxfp4.config import FP4Config
from hf_mxfp4.evaluation import score, spread_windows, summary
from hf_mxfp4.loading import load
from hf_mxfp4.output_files import write_file

LONGEST = 2048  # tokens of a window, if the model takes as many
DTYPES = ("auto", "bfloat16", "float16", "float32")


def evaluate(
    model: Source,
    reference: Annotated[
        str | None, typer.Option(help="The full-precision model it was made of: adds KL divergence.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text file, or wikitext2, c4, c4-new (through optimum).")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of it to predict, spread evenly.")] = 32_768,
    length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a window; {LONGEST}, or the most the model takes.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, or folders of tasks: a,b,...")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows or questions in a forward pass.")] = 1,
    activation: Annotated[str | None, typer.Option(help="same: activations in FP4, too (W4A4).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, auto; a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of what is not packed: one of {', '.join(DTYPES)}.")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="File; evaluation.json in a quantized checkpoint's folder if not given.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Measure a model: perplexity, KL divergence to the original, tasks.

    Any layout that can be loaded, and full precision. What is measured is
    kept in evaluation.json, which `hf-mxfp4 card` reads. Examples:

    hf-mxfp4 evaluate ./qwen3-nvfp4 --text wikitext2 --reference Qwen/Qwen3-0.6B
    hf-mxfp4 evaluate ./qwen3-nvfp4 --text book.txt --length 512 --batch-size 4
    hf-mxfp4 evaluate ./qwen3-nvfp4 --tasks piqa,arc_easy --batch-size 16
    """
    if text is None and tasks is None:
        raise typer.BadParameter("nothing to measure; give a text or --tasks.", param_hint="--text")
    if reference is not None and text is None:
        raise typer.BadParameter("KL divergence is measured on a text; give --text.", param_hint="--reference")
    if activation is not None:
        check_choice("--activation", activation, ("same",))
    check_choice("--dtype", dtype, DTYPES)
    place = device_of(device, auto=True)
    options = {"device_map": place, "dtype": dtype, "trust_remote_code": trust_remote_code}
    folders = {name: local_folder(name, *MODEL_FILES) for name in (model, reference) if name is not None}
    for folder in folders.values():
        read_checkpoint(folder)  # damaged files show at once, and pickles are refused
    path = _output(output, Path(model))
    tokenizer = _tokenizer(list(folders.values()), trust_remote_code)
    manager, names = _find_tasks(tasks)
    rows = None if text is None else _rows(text, tokenizer, tokens, length, list(folders.values()))
    with quiet_libraries():
        loaded = _load(folders[model], activation, **options)
        found = _about(model, place, activation)
        if rows is not None:
            original = None if reference is None else _load(folders[reference], None, **options)
            found |= {"text": Path(text).name, "tokens": rows[:, 1:].numel()}
            found |= {"windows": rows.shape[0], "length": rows.shape[1] - 1}
            found |= _scores(loaded, original, rows, batch_size, reference)
        if names:
            from hf_mxfp4.integrations.lm_eval import as_lm, scores_of

            lm = as_lm(loaded, tokenizer, batch_size, softmax_dtype="float32")
            found["tasks"] = scores_of(lm, names, manager, limit)
    if path is not None and folders[model] == Path(model):
        from hf_mxfp4.hub.errors import fingerprint

        found["weights"] = fingerprint(model)  # by which a card tells that it is of these
    if path is not None:
        try:
            write_file(path, (json.dumps(found, indent=2) + "\n").encode())
        except OSError:
            say(json.dumps(found))  # what took hours is not lost
            raise
        say(f"wrote {path}")
    if as_json:
        print_json(found)
    else:
        _print(found)


def _output(given: Path | None, folder: Path) -> Path | None:
    """Where the result is kept; what cannot be written to shows before hours of work."""
    if given is None and (not folder.is_dir() or not _is_quantized(folder)):
        return None
    path = given or folder / "evaluation.json"
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written.", param_hint="--output")
    return path


def _is_quantized(folder: Path) -> bool:
    return quantization_of(_config(folder), folder) is not None


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def _find_tasks(tasks: str | None) -> tuple[Any, list[str]]:
    """Before a model is loaded: a wrong name, or data that cannot be had, shows at once."""
    if tasks is None:
        return None, []
    from hf_mxfp4.integrations.lm_eval import find_tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default it takes
    manager, found = find_tasks(tasks.split(","))
    return manager, sorted(found)


def _tokenizer(folders: list[Path], trust_remote_code: bool):
    """That of the first folder that has one: quantized checkpoints are at times saved without."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")
    for folder in folders:
        if any((folder / name).is_file() for name in names):
            try:
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            except Exception as error:  # of whatever kind: it is parsed in Rust, too
                raise ValueError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    raise ValueError(f"{folders[0]} holds no tokenizer. Copy that of the model it was made of, or give --reference.")


def _rows(text: str, tokenizer, tokens: int, length: int | None, folders: list[Path]) -> torch.Tensor:
    """Token windows int64 `[W, length + 1]` of a text file or a data set."""
    most = min((_positions(folder) for folder in folders), default=LONGEST)
    if length is not None and length > most:
        raise typer.BadParameter(f"{length}; the model takes at most {most} tokens.", param_hint="--length")
    length = length or min(LONGEST, most)
    if Path(text).is_file():
        try:
            content = Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"{text} is not a UTF-8 text: {error}", param_hint="--text") from error
        return spread_windows(torch.tensor(tokenizer(content, verbose=False)["input_ids"]), tokens, length)
    from hf_mxfp4.integrations.optimum import DATA_SETS, token_rows

    if text not in DATA_SETS:
        known = ", ".join(DATA_SETS)
        raise typer.BadParameter(f"{text!r} is neither a file nor one of {known}.", param_hint="--text")
    windows = max(1, tokens // length)
    return torch.stack(token_rows(text, tokenizer, windows, length + 1, seed=0, split="validation"))


def _positions(folder: Path) -> int:
    """Most tokens the model takes, as far as its config says."""
    config = _config(folder)
    found = (config.get("text_config") or config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else 1 << 40


def _load(folder: Path, activation: str | None, **options):
    """The causal LM in a folder, packed if it is quantized in a layout of ours."""
    if not _is_quantized(folder):
        if activation is not None:
            raise ValueError(f"{folder} is in full precision: --activation is for packed layers. Quantize it first.")
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if activation is not None:
        options["quantization_config"] = FP4Config(activation_format=activation)
    with warnings.catch_warnings():  # transformers warns of every config beside a quantized checkpoint
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return load(folder, **options).eval()


def _about(model: str, device: str, activation: str | None) -> dict[str, Any]:
    """What was measured, when and by what."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "model": Path(model).resolve().name if Path(model).is_dir() else model,
        **({} if activation is None else {"activation_format": activation}),
        "command": command_line(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else device,
        "versions": {
            "hf_mxfp4": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _scores(model, original, rows: torch.Tensor, batch_size: int, reference: str | None) -> dict[str, Any]:
    """Perplexity, and what is measured against the original if there is one."""
    models = {"model": model} | ({} if original is None else {"reference": original})
    first = next(reversed(models))
    for name, each in models.items():
        known = each.get_input_embeddings().weight.shape[0]
        if rows.max() >= known:
            given = f"the tokenizer gives token {rows.max()}"
            raise ValueError(f"{given}, and the {name} knows {known}: the tokenizer is of another model.")
    with bars() as progress:
        bar = progress.add_task("scoring windows", total=len(rows) * len(models))
        found = score(models, first, rows, batch_size, lambda count: progress.advance(bar, count))
    if reference is None:
        return summary(found["model"])
    name = Path(reference).resolve().name if Path(reference).is_dir() else reference
    mine = {"model": name, **summary(found["reference"])}
    return summary(found["model"], found["reference"]) | {"reference": mine}


_UNITS = {"kl": "KL to the reference, nats per token", "perplexity_increase": "perplexity over the reference's, - 1"}


def _print(found: dict[str, Any]) -> None:
    print(f"{found['model']}{', W4A4' if 'activation_format' in found else ''}")
    if "text" in found:
        print(f"{found['text']}: {found['tokens']:,} tokens in windows of {found['length']}")
    for name in ("perplexity", "kl", "perplexity_increase"):
        if name in found:
            print(f"  {_UNITS.get(name, name)}: {_value(found[name])}")
    if "reference" in found:
        print(f"  perplexity of {found['reference']['model']}: {_value(found['reference']['perplexity'])}")
    for task, row in found.get("tasks", {}).items():
        print(f"{task}: {row['metric']} {_value(row)}, {row['samples']} questions")


def _value(row: dict[str, float]) -> str:
    return f"{row['mean']:.4f}" + (f" ± {row['error']:.4f}" if "error" in row else "")
