# SPDX-License-Identifier: Apache-2.0
"""What commands share: where text goes, progress bars, common options, and where a model's files are."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
from huggingface_hub.utils import validate_repo_id
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tqdm import tqdm

from hf_mxfp4.checkpoint_files import read_header

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]
Source = Annotated[str, typer.Argument(help="A folder, or a model on the Hub (user/name).", show_default=False)]
Folder = Annotated[
    Path, typer.Argument(help="A checkpoint's folder.", show_default=False, exists=True, file_okay=False)
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code of the checkpoint.")]

MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*")
_AWAY = (HfHubHTTPError, LocalEntryNotFoundError, NotASafetensorsRepoError, OfflineModeIsEnabled)
_SILENCE = 30.0  # seconds between lines where there is no terminal to draw a bar on

console = Console(stderr=True)


class Call:
    """The command line that runs: its words, and whether they ask for JSON. Set by `errors.Commands`."""

    words: tuple[str, ...] = ()
    json = False


def command_line() -> str:
    """The command as it was typed, for records."""
    return for_records(Call.words)


def for_records(words: Iterable[str]) -> str:
    """A command line that others may read: of absolute paths only the last part, which says enough."""
    return shlex.join(re.sub(r"(^|=)[/~].*", lambda path: path[1] + Path(path[0]).name, word) for word in words)


def print_json(document: Any) -> None:
    """The result of a command with --json. NaN and Inf, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(text: str) -> None:
    """A message to the user, on stderr."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def has_bars() -> bool:
    """Whether progress bars are drawn: on a terminal, and for people."""
    return console.is_terminal and not Call.json


def bars(*columns) -> Progress:
    """Progress bars on stderr; see `has_bars`."""
    return Progress(*columns, console=console, disable=not has_bars())


def track(items: Iterable, description: str) -> Iterator:
    """`items`, with a bar."""
    with bars() as progress:
        yield from progress.track(items, description=description)


@contextmanager
def byte_bar(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with bytes, rate and time left; without a terminal, a line every half minute.

    Yields:
        A function that is told bytes done, bytes in all, and what is worked on.
    """
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with bars(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *rate) as progress:
        task = progress.add_task(description, total=None)
        started = told = time.monotonic()
        first: int | None = None

        def tell(done: int, total: int, name: str = "") -> None:
            nonlocal told, first
            first = done if first is None else first  # what an earlier run did is not this one's speed
            progress.update(task, completed=done, total=total, description=f"{description} {name}".strip())
            now = time.monotonic()
            if not has_bars() and not Call.json and now - told >= _SILENCE:
                told = now
                speed = (done - first) / (now - started) / 1e6
                say(f"{description}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {speed:.0f} MB/s")

        yield tell


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the bars that other libraries draw, where there are none of ours."""
    draw = tqdm.__init__

    def silent(bar, *args, **options) -> None:
        draw(bar, *args, **options | {"disable": True})

    if not has_bars():
        tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = draw


def check_choice(option: str, given: str, allowed: Iterable[str]) -> None:
    """Raise for a word that is not allowed."""
    if given not in allowed:
        raise typer.BadParameter(f"{given!r}; allowed: {', '.join(allowed)}.", param_hint=option)


def choices(option: str, given: str, allowed: Iterable[str]) -> list[str]:
    """Words separated by commas, each of them allowed."""
    chosen = given.split(",")
    if unknown := [word for word in chosen if word not in allowed]:
        raise typer.BadParameter(f"{', '.join(unknown)!r}; allowed: {', '.join(allowed)}.", param_hint=option)
    return chosen


def check_regex(option: str, given: Iterable[str]) -> None:
    """Raise for what is no regular expression."""
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"{pattern!r} is not a regular expression: {error}."
            raise typer.BadParameter(message, param_hint=option) from error


def device_of(given: str | None, option: str = "--device", *, auto: bool = False) -> str:
    """The device that an option names: one that torch can use, or `"auto"` (all); a GPU if it is not given."""
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if auto and given == "auto":
        return given
    try:
        if torch.empty(0, device=given).device.type != "meta":
            return given
        why = None
    except (RuntimeError, AssertionError) as error:  # the second of a torch without CUDA
        why = error
    allowed = f"allowed: cpu, cuda, cuda:1{', auto' if auto else ''}. What there is says hf-mxfp4 doctor"
    raise typer.BadParameter(f"torch cannot use {given!r}; {allowed}.", param_hint=option) from why


def check_hub_id(model: str) -> None:
    """Raise for what is not a folder and cannot be a model on the Hub, such as a misspelled path."""
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        message = f"{model} is not a folder, and not the name of a model on the Hub (user/name)."
        raise typer.BadParameter(message) from error


def local_folder(model: str, *patterns: str) -> Path:
    """A folder as it is, or the folder of a model that is downloaded from the Hub (safetensors files if no others are
    asked for)."""
    if model and Path(model).is_dir():
        return Path(model)
    check_hub_id(model)
    try:
        return Path(snapshot_download(model, allow_patterns=patterns or "*.safetensors"))
    except _AWAY as error:
        raise ValueError(f"{model} is not a folder, and not to be had from the Hub: {error}") from error


def headers(model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of a model's tensors; of one on the Hub, only the headers of its files are read."""
    if model and Path(model).is_dir():
        read = [read_header(file) for file in sorted(Path(model).glob("*.safetensors"))]
        return {name: (tensor.dtype, tensor.shape) for header in read for name, tensor in header.items()}
    check_hub_id(model)
    try:
        files = get_safetensors_metadata(model).files_metadata.values()
    except (*_AWAY, OSError) as error:
        raise ValueError(f"{model} is not a folder, and not to be had from the Hub: {error}") from error
    return {name: (info.dtype, tuple(info.shape)) for file in files for name, info in file.tensors.items()}
