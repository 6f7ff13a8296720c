# SPDX-License-Identifier: Apache-2.0
"""The command `hf-mxfp4`: one file a command or family of commands."""

from __future__ import annotations

import typer

from hf_mxfp4.cli.analyze import analyze
from hf_mxfp4.cli.common import local_folder
from hf_mxfp4.cli.doctor import doctor
from hf_mxfp4.cli.errors import Commands
from hf_mxfp4.cli.evaluate import evaluate
from hf_mxfp4.cli.export import export
from hf_mxfp4.cli.hub import card, push
from hf_mxfp4.cli.inspect import inspect
from hf_mxfp4.cli.quantize import quantize
from hf_mxfp4.cli.tune import tune
from hf_mxfp4.cli.verify import verify

__all__ = ["app", "local_folder"]

app = typer.Typer(
    name="hf-mxfp4", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def main() -> None:
    """4-bit floating point (MXFP4, NVFP4) for Hugging Face Transformers.

    Results go to stdout, messages and progress to stderr. With --json
    stdout is one JSON document; that of a failure is {"error": "..."}.

    Exit codes: 0 done; 1 failed, or verify found something; 2 wrong
    arguments; 130 interrupted. HF_MXFP4_DEBUG=1 shows tracebacks.

    Start with:

    hf-mxfp4 quantize Qwen/Qwen3-0.6B ./qwen3-nvfp4
    hf-mxfp4 verify ./qwen3-nvfp4 --source Qwen/Qwen3-0.6B
    """


for command in (quantize, inspect, analyze, export, verify, evaluate, card, push, tune, doctor):
    app.command()(command)
