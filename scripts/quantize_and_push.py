# SPDX-License-Identifier: Apache-2.0
"""Quantize a model, check the result against it, write its card, and upload it: one command from source to Hub.

    python scripts/quantize_and_push.py Qwen/Qwen3-0.6B user/Qwen3-0.6B-NVFP4
    python scripts/quantize_and_push.py ./Qwen3-8B user/Qwen3-8B-MXFP4 --config '{"format": "mxfp4"}' --workers 8
    python scripts/quantize_and_push.py ./Qwen3-8B user/Qwen3-8B-NVFP4 --dry-run

Stopped anywhere, the same command goes on where it was. The repository is private without --public, and nothing of it
is seen before everything is there. The token is huggingface_hub's (HF_TOKEN, or `hf auth login`).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

from hf_mxfp4 import FP4Config
from hf_mxfp4.checkpoint_files import read_checkpoint
from hf_mxfp4.checkpoints import HF_MXFP4_KEY
from hf_mxfp4.cli.common import MODEL_FILES, for_records, local_folder
from hf_mxfp4.hub import Pushed, push, write_card
from hf_mxfp4.hub.errors import check_matplotlib
from hf_mxfp4.streaming import Progress, quantize_checkpoint


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", help="folder of a model in full precision, or its name on the Hub")
    made.add_argument("repo", help="where to: user/name")
    made.add_argument("--format", default="nvfp4", help="nvfp4 or mxfp4")
    made.add_argument("--rule", default="soar", help="scale rule")
    made.add_argument("--config", type=fields, default={}, help="further fields of FP4Config, as JSON")
    made.add_argument("--output", type=Path, help="folder of the result; the repository's name if not given")
    made.add_argument("--base-model", help="name on the Hub, for the card; SOURCE if that is one")
    made.add_argument("--workers", type=int, default=1, help="processes")
    made.add_argument("--device", default="cpu", help="cpu, or cuda")
    made.add_argument("--max-shard-size", default="5GB")
    made.add_argument("--revision", help="branch; main if not given")
    made.add_argument("--public", action="store_true", help="a new repository is seen by everybody")
    made.add_argument("--dry-run", action="store_true", help="quantize and check, and only show what would be pushed")
    return made


def fields(text: str) -> dict[str, Any]:
    """A JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text} is not a JSON object")
    return found


def is_finished(output: Path, config: FP4Config) -> bool:
    """Whether an earlier run has made all of it with the same config."""
    if not (output / "config.json").is_file() or (output / ".hf_mxfp4").exists():
        return False
    stored = read_checkpoint(output).quantization or {}
    fields = stored.get(HF_MXFP4_KEY, stored)
    wanted = json.loads(json.dumps(config.to_dict()))
    return all(fields.get(name) == value for name, value in wanted.items() if name != "quant_method")


def quantize(source: Path, output: Path, config: FP4Config, options: argparse.Namespace) -> None:
    with tqdm(unit="B", unit_scale=True, desc="quantizing", disable=not sys.stderr.isatty()) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total_bytes
            bar.update(progress.done_bytes - bar.n)

        given = {"workers": options.workers, "device": options.device, "max_shard_size": options.max_shard_size}
        quantize_checkpoint(source, output, config, **given, progress=show)


def run(arguments: list[str]) -> Pushed:
    options = parser().parse_args(arguments)
    config = FP4Config(**{"format": options.format, "scale_rule": options.rule} | options.config)
    check_matplotlib()
    source = local_folder(options.source, *MODEL_FILES, "README.md")
    output = options.output or Path(options.repo.rsplit("/", 1)[-1])
    if is_finished(output, config):
        print(f"{output} is there from an earlier run")
    else:
        quantize(source, output, config, options)
    command = for_records(["python", "scripts/quantize_and_push.py", *arguments])
    card = write_card(output, source=source, base_model=options.base_model, command=command, repo_id=options.repo)
    print(f"checked against {options.source}; wrote {card}")
    return push(output, options.repo, private=not options.public, revision=options.revision, dry_run=options.dry_run)


def main(arguments: list[str]) -> int:
    try:
        pushed = run(arguments)
    except (ValueError, TypeError, OSError, ImportError, typer.BadParameter) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for file in pushed.files:
        print(f"{file.nbytes:>15,}  {file.path}{'  (LFS)' if file.large else ''}")
    for path, why in pushed.left_out.items():
        print(f"left out: {path}: {why}")
    print(f"{pushed.nbytes:,} bytes: {pushed.url or 'not pushed (--dry-run)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
