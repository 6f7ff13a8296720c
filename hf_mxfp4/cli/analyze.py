# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hf_mxfp4 import analysis
from hf_mxfp4.cli.common import Json, bars, check_regex, local_folder, print_json, say, track
from hf_mxfp4.formats import FORMATS
from hf_mxfp4.scales import SCALE_RULES


def analyze(
    model: Annotated[str, typer.Argument(help="A full-precision model: a folder of safetensors files, or a Hub id.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "mxfp4",
    rule: Annotated[str, typer.Option(help=f"Scale rule, one of {', '.join(SCALE_RULES)}.")] = "ceil",
    skip: Annotated[str, typer.Option(help="Regex of matrices to leave out.")] = analysis.NOT_PACKED,
    corrections: Annotated[bool, typer.Option(help="Measure what each correction would leave of the error.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for analysis.json and analysis.png.")] = Path("analysis"),
    as_json: Json = False,
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
    check_regex("--skip", [skip])
    found = analysis.find_matrices(local_folder(model), FORMATS[format].block_size, skip)
    if not found:
        raise typer.BadParameter(f"{model} holds no safetensors file with matrices to quantize.", param_hint="MODEL")
    output.mkdir(parents=True, exist_ok=True)  # what cannot be written to shows before the work
    report = analysis.analyze(track(found, "analyzing"), FORMATS[format], rule)
    if corrections:
        with bars() as progress:
            task = progress.add_task("correcting", total=2 * len(found))
            analysis.correct(report, _Tracked(found, lambda: progress.advance(task)))
    (output / "analysis.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    analysis.plot(report, output / "analysis.png")
    if as_json:
        print_json(report.to_dict())
    else:
        Console(markup=False).print(_table(report))
        if corrections:
            steps = {rule: report.overall.summary()["total"]} | report.corrected()
            Console().print("error: " + ", ".join(f"{step} {error:.5f}" for step, error in steps.items()))
    say(f"wrote {output / 'analysis.json'} and {output / 'analysis.png'}")


class _Tracked:
    """An iterable that may be gone through more than once and tells of each step."""

    def __init__(self, iterable: Iterable, advance: Callable[[], None]):
        self.iterable, self.advance = iterable, advance

    def __iter__(self) -> Iterator:
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
