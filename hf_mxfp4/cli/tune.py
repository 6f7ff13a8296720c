# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from hf_mxfp4 import tuner
from hf_mxfp4.cli.common import Json, bars, choices, headers, print_json, say

_TUNED = ("mxfp4", "nvfp4", "mxfp4+macro")


def tune(
    shapes: Annotated[str, typer.Option(help="Layers as NxK,NxK,...; those of Qwen3 if not given.")] = "",
    model: Annotated[str, typer.Option(help="Take the layers of a model: a folder of safetensors, or a Hub id.")] = "",
    formats: Annotated[str, typer.Option(help=f"Of {', '.join(_TUNED)}.")] = "mxfp4,nvfp4",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = ",".join(map(str, tuner.TOKENS)),
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16, fp32.")] = "bf16",
    output: Annotated[Path | None, typer.Option(help="The table; the one that is looked up if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Measure which kernel options are fastest on this GPU, and keep them for the next time packed layers run on it.

    A run that was stopped goes on where it was when it is started again. Example:

    hf-mxfp4 tune --model Qwen/Qwen3-8B --formats nvfp4 --tokens 1,16,64,512
    """
    work = tuner.jobs(
        _layers(shapes, model),
        choices("--formats", formats, _TUNED),
        choices("--dtype", dtype, ("bf16", "fp16", "fp32")),
        _numbers("--tokens", tokens.split(",")),
    )
    if not torch.cuda.is_available():
        raise ValueError("tune measures a GPU, and torch sees none (torch.cuda.is_available()).")
    from hf_mxfp4.kernels import tuning

    device = torch.device("cuda", torch.cuda.current_device())
    head = tuning.head_of(device)
    try:
        path = output or tuning.user_table(head["device"])
    except RuntimeError as error:
        raise ValueError(f"{error} Set HF_MXFP4_CACHE to a folder, or name a file by --output.") from error
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    try:
        with bars(*columns) as progress:
            task = progress.add_task("", total=len(work))

            def show(number: int, job: tuner.Job, row: dict | None) -> None:
                if row is None:
                    say(f"no candidate fits: {job}")
                description = f"{job.kernel} {job.format} {job.tokens} x {job.n}x{job.k}"
                progress.update(task, completed=number, description=description)

            def tell(job: tuner.Job, way: tuner.Way, why: str) -> None:
                if why.startswith("wrong"):  # what does not fit on this GPU is expected
                    say(f"{why}, left out: {way} of {job}")

            measured = tuner.tune(work, tuner.Bench(device), path, head, show, tell)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from {path}.journal")
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}. Name another file by --output.") from error
    tuning.forget()
    if as_json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
    say(f"wrote {path}: {measured} products measured")


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
    found = tuner.layer_shapes(headers(model)) if model else list(tuner.SHAPES)
    if not found:
        raise typer.BadParameter(f"{model} has no matrices that would be packed.", param_hint="--model")
    return found


def _numbers(option: str, words: list[str]) -> list[int]:
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{','.join(words)!r}; expected positive numbers.", param_hint=option)
    return [int(word) for word in words]
