# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_mxfp4.cli.common import MODEL_FILES, Json, Source, byte_bar, check_choice, local_folder, print_json, say
from hf_mxfp4.export import TARGETS, export_checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export(
    source: Source,
    output: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}.", show_default=False)],
    dtype: Annotated[str, typer.Option(help=f"With --to bf16: one of {', '.join(DTYPES)}.")] = "bfloat16",
    requantize: Annotated[
        bool, typer.Option(help="Round again what the target cannot hold without loss, and report the error.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Rewrite a quantized checkpoint for other tools, or in full precision.

    Tensor by tensor; lossless, or refused with the reason. Examples:

    hf-mxfp4 export ./qwen3-moe-nvfp4 ./for-vllm --to compressed-tensors
    hf-mxfp4 export ./qwen3-nvfp4 --to bf16 ./qwen3-bf16 --dtype float16
    """
    check_choice("--to", to, TARGETS)
    check_choice("--dtype", dtype, DTYPES)
    if dtype != "bfloat16" and to != "bf16":
        raise typer.BadParameter(f"{to} stores no dense weights; leave it out.", param_hint="--dtype")
    folder = local_folder(source, *MODEL_FILES)
    with byte_bar("exporting") as tell:
        summary = export_checkpoint(
            folder,
            output,
            to,
            dtype=DTYPES[dtype],
            max_shard_size=max_shard_size,
            requantize=requantize,
            progress=tell,
        )
    if as_json:
        print_json(summary.to_dict())
        return
    for note in summary.notes:
        say(f"note: {note}")
    for name, why in summary.skipped.items():
        say(f"left out: {name}: {why}")
    for name, row in summary.requantized.items():
        say(f"rounded again: {name}: {row['weights']:,} weights, relative squared error {row['error']:.2e}")
    shifted = f", of {len(summary.shifted)} the scales shifted without loss" if summary.shifted else ""
    written = f"{summary.nbytes:,} bytes in {len(summary.files)} files"
    print(f"{output}: {summary.matrices} matrices as {to}{shifted}; {written}")
