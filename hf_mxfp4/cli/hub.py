# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 card` and `hf-mxfp4 push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mxfp4.cli.common import MODEL_FILES, Folder, Json, local_folder, print_json, say


def card(
    folder: Folder,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model it was made of.")] = None,
    source: Annotated[
        str | None, typer.Option(help="The same in full precision: measures each weight's error, takes its licence.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="README.md in the folder if not given.")] = None,
    command: Annotated[str | None, typer.Option(help="The command that made it, to be shown.")] = None,
    as_json: Json = False,
) -> None:
    """Write a model card from what is measured: recipe, sizes, errors, evaluation.json.

    A README.md that was not made by this command is left as it is. Examples:

    hf-mxfp4 card ./qwen3-nvfp4 --base-model Qwen/Qwen3-0.6B
    hf-mxfp4 card ./qwen3-nvfp4 --source ./Qwen3-0.6B --output card.md
    """
    from hf_mxfp4.hub import write_card

    original = None if source is None else local_folder(source, *MODEL_FILES, "README.md")
    path = write_card(folder, output, base_model=base_model, source=original, command=command)
    if as_json:
        print_json({"card": str(path)})
    else:
        print(f"wrote {path}")


def push(
    folder: Folder,
    repo: Annotated[str, typer.Argument(help="Where to: user/name.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a new repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; main if not given.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show files, sizes and the card.")] = False,
    as_json: Json = False,
) -> None:
    """Verify a checkpoint and upload it in one commit, with a model card.

    Private if not told otherwise. The token is huggingface_hub's: HF_TOKEN,
    or `hf auth login`. An interrupted upload goes on where it was. Examples:

    hf-mxfp4 push ./qwen3-nvfp4 user/qwen3-nvfp4 --dry-run
    hf-mxfp4 push ./qwen3-nvfp4 user/qwen3-nvfp4 --public
    """
    from hf_mxfp4.hub import push as upload

    done = upload(folder, repo, private=not public, revision=revision, commit_message=message, dry_run=dry_run)
    if as_json:
        print_json(done.to_dict())
        return
    for file in done.files:
        print(f"{file.nbytes:>15,}  {file.path}{'  (LFS)' if file.large else ''}")
    for path, why in done.left_out.items():
        say(f"left out: {path}: {why}")
    for path in done.deleted:
        say(f"removed, of an earlier checkpoint: {path}")
    if dry_run and done.card:
        print(f"\n{done.card}\n")
    total = f"{len(done.files)} files, {done.nbytes:,} bytes"
    print(f"{total}; nothing was uploaded" if dry_run else f"{total}: {done.url}")
