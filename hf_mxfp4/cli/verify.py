# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mxfp4.cli.common import MODEL_FILES, Json, Source, byte_bar, local_folder, print_json, say


def verify(
    checkpoint: Source,
    source: Annotated[
        str | None, typer.Option(help="The full-precision model it was made of: folder or Hub id.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a checkpoint: checksums, headers, every packed tensor; exit code 1 if something is wrong.

    With --source, every weight is compared with the one it was made of.
    A checkpoint on the Hub is downloaded. Examples:

    hf-mxfp4 verify ./qwen3-nvfp4
    hf-mxfp4 verify user/qwen3-nvfp4 --source Qwen/Qwen3-0.6B --json
    """
    from hf_mxfp4.verification import verify_checkpoint

    folder = local_folder(checkpoint, *MODEL_FILES, "checksums.sha256")
    original = None if source is None else local_folder(source, *MODEL_FILES)
    with byte_bar("verifying") as tell:
        found = verify_checkpoint(folder, original, tell)
    if as_json:
        print_json(found.to_dict())
    else:
        for text in found.findings:
            print(f"wrong: {text}")
        for text in found.notes:
            say(f"note: {text}")
        worst = f", largest error {found.errors[found.worst]:.4f} in {found.worst}" if found.worst else ""
        read = f"{found.packed} packed matrices and {found.plain} other tensors"
        print(f"{checkpoint}: {'sound' if found.ok else f'{len(found.findings)} findings'}; {read}{worst}")
    if not found.ok:
        raise typer.Exit(1)
