# SPDX-License-Identifier: Apache-2.0
"""The one place where a command's error becomes a message and an exit code."""

from __future__ import annotations

import dis
import errno
import json
import os
from pathlib import Path
from types import TracebackType

import torch
import typer
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from typer.core import TyperCommand, TyperGroup

from hf_mxfp4.cli.common import Call, console, say

DEBUG = "HF_MXFP4_DEBUG"
FAILED, INTERRUPTED = 1, 130
_UsageError = typer.BadParameter.__mro__[1]  # typer brings a click of its own, or uses the one installed
_EXPECTED = (ValueError, TypeError, NotImplementedError, ImportError, HFValidationError)
_PACKAGE = Path(__file__).parents[1]
_ALWAYS = (HfHubHTTPError, SafetensorError, torch.OutOfMemoryError, MemoryError)


class _Handled:
    """Ends in a message and an exit code, or in a traceback: see `is_expected`."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        Call.words, Call.json = (*ctx.command_path.split(), *args), "--json" in args
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            _tell_json(error.format_message())
            raise

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except _UsageError as error:  # typer prints it, and exits with 2
            _tell_json(error.format_message())
            raise
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _tell("interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if os.environ.get(DEBUG) == "1" or not is_expected(error):
                raise
            _tell(message_of(error))
            raise typer.Exit(FAILED) from error


class Commands(_Handled, TyperGroup):
    """A group of commands."""


class Command(_Handled, TyperCommand):
    """A command that stands alone."""


def is_expected(error: Exception) -> bool:
    """Whether an error is something to tell a user, and no mistake in the code.

    The system's errors are. Others are if a `raise` statement made them, which is where messages are written: a call
    with wrong arguments, or arithmetic on None, raises a TypeError, too, but from within the interpreter. Of
    RuntimeErrors those are that a statement of ours made.
    """
    if isinstance(error, OSError):
        return error.errno != errno.EPIPE  # a reader that has gone (`| head`) is typer's to handle
    if isinstance(error, _ALWAYS):
        return True
    if isinstance(error, ModuleNotFoundError) and (error.name or "hf_mxfp4").partition(".")[0] != "hf_mxfp4":
        return True  # a package that is not installed
    file = _raised_in(error.__traceback__)
    if isinstance(error, _EXPECTED):
        return file is not None
    return isinstance(error, RuntimeError) and file is not None and _PACKAGE in Path(file).parents


def _raised_in(traceback: TracebackType | None) -> str | None:
    """The file of the `raise` statement that an error comes from: the instruction at which its innermost frame stands.
    `None` if that is none."""
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    at = traceback.tb_lasti  # a slice, since frames that compiled extensions make up have no code
    return code.co_filename if code.co_code[at : at + 1] == bytes([dis.opmap["RAISE_VARARGS"]]) else None


def message_of(error: BaseException) -> str:
    """An error in words, in one paragraph."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device is out of memory: {error}"
    if isinstance(error, MemoryError):
        return "not enough memory."
    if isinstance(error, ModuleNotFoundError) and error.name is not None and str(error).startswith("No module named"):
        package = error.name.partition(".")[0].replace("_", "-")
        return f"{package} is not installed. Run `pip install {package}`."
    return str(error).strip() or type(error).__name__


def _tell(message: str) -> None:
    _tell_json(message)
    console.print("[red]error:[/red]", end=" ")
    say(message)


def _tell_json(message: str) -> None:
    if Call.json:
        print(json.dumps({"error": message}, indent=2))
