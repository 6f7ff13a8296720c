# SPDX-License-Identifier: Apache-2.0
"""The command `hf-mxfp4`. Exit codes: 0 done, 1 the command failed, 2 wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
)
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from hf_mxfp4 import analysis, tuner
from hf_mxfp4 import doctor as diagnosis
from hf_mxfp4.checkpoint_files import read_header
from hf_mxfp4.formats import FORMATS
from hf_mxfp4.scales import SCALE_RULES

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)


@app.callback()
def main() -> None:
    """4-bit floating point (MXFP4, NVFP4) for Hugging Face Transformers."""


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="A full-precision model: a folder of safetensors files, or a Hub id.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "mxfp4",
    rule: Annotated[str, typer.Option(help=f"Scale rule, one of {', '.join(SCALE_RULES)}.")] = "ceil",
    skip: Annotated[str, typer.Option(help="Regex of matrices to leave out.")] = analysis.NOT_PACKED,
    corrections: Annotated[bool, typer.Option(help="Measure what each correction would leave of the error.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for analysis.json and analysis.png.")] = Path("analysis"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON in place of the table.")] = False,
) -> None:
    """Where a model's quantization error comes from: block scales, the dead zone, the grid.

    The model is not built; matrices are read one at a time. Example:

    hf-mxfp4 analyze ./Qwen3-0.6B --format nvfp4 --rule soar
    """
    if format not in FORMATS:
        raise typer.BadParameter(f"{format!r}; allowed: {', '.join(FORMATS)}.", param_hint="--format")
    usable = [name for name, row in SCALE_RULES.items() if format in row.formats]
    if rule not in usable:
        raise typer.BadParameter(f"{rule!r}; allowed for {format}: {', '.join(usable)}.", param_hint="--rule")
    try:
        folder = local_folder(model)
        found = analysis.find_matrices(folder, FORMATS[format].block_size, skip)
    except ValueError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(1) from error
    if not found:
        raise typer.BadParameter(f"{model} holds no safetensors file with matrices to quantize.", param_hint="MODEL")
    report = analysis.analyze(track(found, "analyzing", console=console), FORMATS[format], rule)
    if corrections:
        with Progress(console=console) as progress:
            task = progress.add_task("correcting", total=2 * len(found))
            analysis.correct(report, _Tracked(found, lambda: progress.advance(task)))
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    analysis.plot(report, output / "analysis.png")
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(_table(report))
        if corrections:
            steps = {rule: report.overall.summary()["total"]} | report.corrected()
            Console().print("error: " + ", ".join(f"{step} {error:.5f}" for step, error in steps.items()))
    console.print(f"wrote {output / 'analysis.json'} and {output / 'analysis.png'}")


_TUNED = ("mxfp4", "nvfp4", "mxfp4+macro")


@app.command()
def tune(
    shapes: Annotated[str, typer.Option(help="Layers as NxK,NxK,...; those of Qwen3 if not given.")] = "",
    model: Annotated[str, typer.Option(help="Take the layers of a model: a folder of safetensors, or a Hub id.")] = "",
    formats: Annotated[str, typer.Option(help=f"Of {', '.join(_TUNED)}.")] = "mxfp4,nvfp4",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = ",".join(map(str, tuner.TOKENS)),
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16, fp32.")] = "bf16",
    output: Annotated[Path | None, typer.Option(help="The table; the one that is looked up if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table.")] = False,
) -> None:
    """Measure which kernel options are fastest on this GPU, and keep them for the next time packed layers run on it.

    A run that was stopped goes on where it was when it is started again. Example:

    hf-mxfp4 tune --model Qwen/Qwen3-8B --formats nvfp4 --tokens 1,16,64,512
    """
    work = tuner.jobs(
        _layers(shapes, model),
        _choices("--formats", formats, _TUNED),
        _choices("--dtype", dtype, ("bf16", "fp16", "fp32")),
        _numbers("--tokens", tokens.split(",")),
    )
    if not torch.cuda.is_available():
        console.print("[red]error:[/red] tune measures a GPU, and torch sees none (torch.cuda.is_available()).")
        raise typer.Exit(1)
    from hf_mxfp4.kernels import tuning

    device = torch.device("cuda", torch.cuda.current_device())
    head = tuning.head_of(device)
    try:
        path = output or tuning.user_table(head["device"])
    except RuntimeError as error:
        console.print(f"[red]error:[/red] {error} Set HF_MXFP4_CACHE to a folder, or name a file by --output.")
        raise typer.Exit(1) from error
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(work))

            def show(number: int, job: tuner.Job, row: dict | None) -> None:
                if row is None:
                    progress.console.print(f"no candidate fits: {job}")
                description = f"{job.kernel} {job.format} {job.tokens} x {job.n}x{job.k}"
                progress.update(task, completed=number, description=description)

            def tell(job: tuner.Job, way: tuner.Way, why: str) -> None:
                if why.startswith("wrong"):  # what does not fit on this GPU is expected
                    progress.console.print(f"[red]{why}[/red], left out: {way} of {job}")

            measured = tuner.tune(work, tuner.Bench(device), path, head, show, tell)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from {path}.journal")
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(f"[red]error:[/red] {path} cannot be written: {error}. Name another file by --output.")
        raise typer.Exit(1) from error
    tuning.forget()
    if as_json:
        print(path.read_text(encoding="utf-8"))
    console.print(f"wrote {path}: {measured} products measured")


def _layers(shapes: str, model: str) -> list[tuple[int, int]]:
    """`(N, K)` of layers, from either option."""
    if shapes and model:
        raise typer.BadParameter("give --shapes or --model, not both.", param_hint="--model")
    if shapes:
        pairs = [_numbers("--shapes", shape.split("x")) for shape in shapes.split(",")]
        for pair in pairs:
            if len(pair) != 2 or pair[1] % 32:
                raise typer.BadParameter(f"{shapes!r}; expected NxK,NxK,... with K in 32s.", param_hint="--shapes")
        return [(n, k) for n, k in pairs]
    found = tuner.layer_shapes(_headers(model)) if model else list(tuner.SHAPES)
    if not found:
        raise typer.BadParameter(f"{model} has no matrices that would be packed.", param_hint="--model")
    return found


def _headers(model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of a model's tensors; of one on the Hub, only the headers of its files are read."""
    if Path(model).is_dir():
        try:
            read = [read_header(file) for file in sorted(Path(model).glob("*.safetensors"))]
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
        return {name: (tensor.dtype, tensor.shape) for header in read for name, tensor in header.items()}
    try:
        files = get_safetensors_metadata(model).files_metadata.values()
    except (HFValidationError, HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled, OSError) as error:
        message = f"{model} is not a folder, and not to be had from the Hub: {error}"
        raise typer.BadParameter(message, param_hint="--model") from error
    return {name: (info.dtype, tuple(info.shape)) for file in files for name, info in file.tensors.items()}


def _choices(option: str, given: str, allowed: tuple[str, ...]) -> list[str]:
    chosen = given.split(",")
    if unknown := [word for word in chosen if word not in allowed]:
        raise typer.BadParameter(f"{', '.join(unknown)!r}; allowed: {', '.join(allowed)}.", param_hint=option)
    return chosen


def _numbers(option: str, words: list[str]) -> list[int]:
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{','.join(words)!r}; expected positive numbers.", param_hint=option)
    return [int(word) for word in words]


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False) -> None:
    """Versions, and which implementation runs on this machine's CPU and GPUs, and why: for a report of a problem."""
    found = diagnosis.report()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, text in diagnosis.lines(found):
        print(f"{name:<14}{text}")


def local_folder(model: str, *patterns: str) -> Path:
    """A folder as it is, or the folder of a model that is downloaded from the Hub (safetensors files if no others are
    asked for)."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=patterns or "*.safetensors"))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise typer.BadParameter(f"{model} is not a folder, and not to be had from the Hub: {error}") from error


class _Tracked:
    """An iterable that may be gone through more than once and tells of each step."""

    def __init__(self, iterable, advance):
        self.iterable, self.advance = iterable, advance

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.advance()


COLUMNS = {"total": "total", "scale": "scale", "dead": "dead", "grid": "grid"} | {
    "cos_scale_grid": "cos s,g",
    "overshoot": "s/s*-1",
    "zeroed": "zeroed",
}


def _table(report: analysis.Report) -> Table:
    """The ten tensors with the largest error, and all together, in 80 columns."""
    title = f"{report.format} {report.rule}: energies relative to the weight's, the ten worst of {len(report.tensors)}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("tensor", overflow="fold")
    for head in COLUMNS.values():
        table.add_column(head, justify="right", no_wrap=True)
    rows = {name: part.summary() for name, part in report.tensors.items()}
    worst = {name: rows[name] for name in sorted(rows, key=lambda name: -rows[name]["total"])[:10]}
    for name, row in (worst | {"all": report.overall.summary()}).items():
        short = name.removeprefix("model.").removesuffix(".weight")
        table.add_row(short, *(f"{row[column]:.4f}" for column in COLUMNS))
    return table
