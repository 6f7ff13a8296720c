# SPDX-License-Identifier: Apache-2.0
"""One table of runs of scripts/sft_lora.py on different bases, the first of them the one to compare with.

for base in bf16 nvfp4 mxfp4; do
  python scripts/sft_lora.py --config scripts/configs/sft_demo.yaml --format $base --output_dir runs/sft/$base
done
python scripts/sft_table.py runs/sft/bf16 runs/sft/nvfp4 runs/sft/mxfp4 --out scripts/results/sft
"""

import argparse
import json
import sys
from pathlib import Path

SAME = ("model", "data", "steps", "seed", "trainable_parameters", "device", "processes", "versions")


def read_runs(folders: list[Path]) -> list[dict]:
    """The records of finished runs that differ in their base alone."""
    runs = []
    for folder in folders:
        file = folder / "sft.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no sft.json: it is no run of scripts/sft_lora.py, or one just begun.")
        run = json.loads(file.read_text())
        if "held_out_loss_after" not in run:
            raise ValueError(f"{folder}: the run is not finished; go on with scripts/sft_lora.py --resume.")
        runs.append(run)
    for run, folder in zip(runs, folders, strict=True):
        different = [key for key in SAME if run[key] != runs[0][key]]
        if different:
            raise ValueError(f"{folder} and {folders[0]} differ in {', '.join(different)}: they cannot be compared.")
    return runs


def base_name(run: dict) -> str:
    fields = ", ".join(f"{name}={value}" for name, value in run["fp4"].items())
    return run["format"] + (f" ({fields})" if fields else " (soar)" if run["format"] != "bf16" else "")


def render(runs: list[dict]) -> str:
    """The table in markdown, with what it was made by."""
    first = runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        "# LoRA fine-tuning on packed bases",
        "",
        f"{first['model']}, {first['data']} data, {first['steps']} steps, seed {first['seed']}, "
        f"{first['trainable_parameters']:,} trained parameters; {first['device']}, {first['threads']} thread(s); "
        f"Python {first['python']}, {versions}; {first['date']}.",
        "",
        f"| base | held-out loss before | after | after, against {base_name(first)} |",
        "|---|---|---|---|",
    ]
    for run in runs:
        before, after = run["held_out_loss_before"], run["held_out_loss_after"]
        against = 100 * (after / first["held_out_loss_after"] - 1)
        lines.append(f"| {base_name(run)} | {before:.4f} | {after:.4f} | {against:+.2f} % |")
    return "\n".join([*lines, "", *(f"    {run['command']}" for run in runs), ""])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output folders; the others are compared with the first")
    parser.add_argument("--out", type=Path, required=True, help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.with_suffix(".json").write_text(json.dumps(runs, indent=2) + "\n")
    options.out.with_suffix(".md").write_text(render(runs))
    print(render(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
