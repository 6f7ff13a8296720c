# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mxfp4.checkpoint_files import TensorReader, read_checkpoint
from hf_mxfp4.cli.common import Json, Source, check_hub_id, print_json
from hf_mxfp4.config import FP4Config


def inspect(
    source: Source,
    scales: Annotated[bool, typer.Option(help="Read block scales, too: their range. Folders only.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Json = False,
) -> None:
    """What a checkpoint holds: layout, packed layers, bits a weight, bytes.

    Any layout that can be loaded, and full precision. Only headers are
    read, on the Hub too; --scales reads the packed tensors. Examples:

    hf-mxfp4 inspect ./qwen3-nvfp4 --scales
    hf-mxfp4 inspect nvidia/Qwen3-8B-NVFP4 --json
    """
    from hf_mxfp4.inspection import inspect_checkpoint

    if source and Path(source).is_dir():
        if revision is not None:
            raise typer.BadParameter(f"{source} is a folder, which has no revisions.", param_hint="--revision")
        checkpoint = read_checkpoint(source)
        if scales:
            with TensorReader(checkpoint.folder, checkpoint.tensors) as read:
                found = inspect_checkpoint(checkpoint, read)
        else:
            found = inspect_checkpoint(checkpoint)
    else:
        check_hub_id(source)
        if scales:
            raise typer.BadParameter(f"{source} is not a folder; download it first.", param_hint="--scales")
        from hf_mxfp4.hub import read_remote

        found = inspect_checkpoint(read_remote(source, revision=revision))
    if as_json:
        print_json(found.to_dict())
    else:
        rows = _rows(found.to_dict())
        width = max(len(name) for name, _ in rows) + 2
        print(source, *(f"{name:<{width}}{text}" for name, text in rows), sep="\n")


def _rows(found: dict) -> list[tuple[str, str]]:
    """What `Inspection.to_dict` says, in two columns."""
    rows = [("layout", found["layout"])]
    rows += [("made by", found["origin"])] if found.get("origin") else []
    if found.get("recipe"):
        rows.append(("recipe", ", ".join(f"{key}={value}" for key, value in _told(found["recipe"]).items())))
    rows += [("packed", f"{count} modules in {format}") for format, count in found["modules"].items()]
    if found["weights_packed"]:
        rows.append(("weights packed", f"{found['weights_packed']:,}, {found['bits_per_weight']:.3f} bits each"))
    if found.get("activation_format"):
        rows.append(("activations", f"in the format of each layer's weight ({found['activation_format']})"))
    sizes = {part: found[f"bytes_{part}"] for part in ("packed", "plain", "skipped")}
    parts = ", ".join(f"{part} {size:,}" for part, size in sizes.items() if size)
    rows.append(("bytes", f"{found['nbytes']:,} in {found['tensors']} tensors ({parts})"))
    plain = found["plain"].items()
    rows += [(f"plain {dtype}", f"{row['tensors']} tensors, {row['bytes']:,} bytes") for dtype, row in plain]
    for row in (row for row in found["largest_plain"] if row["bytes"] > found["nbytes"] / 100):
        rows.append(("", f"{row['name']} {row['dtype']} {row['shape']} {row['bytes']:,}"))
    for format, row in (found.get("scales") or {}).items():
        rows += [(f"{format} {key.replace('_', ' ')}", _range(value)) for key, value in row.items()]
    rows += [("not used", f"{name}: {why}") for name, why in found["skipped"].items()]
    return rows + [("note", text) for text in found["notes"]]


def _told(recipe: dict) -> dict:
    """Format and rule, and what else is not at its default."""
    default = FP4Config().to_dict()
    named = ("format", "scale_rule")
    return {key: recipe[key] for key in (*named, *recipe) if key in named or recipe[key] != default.get(key)}


def _range(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:.6g}" for key, number in value.items())
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
