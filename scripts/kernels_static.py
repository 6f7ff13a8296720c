# SPDX-License-Identifier: Apache-2.0
"""What the compiler says of every kernel on every target: scripts/results/kernels_static.{json,md}. No GPU is needed.

    python scripts/kernels_static.py            the variants that CI compiles, about 3 minutes on two cores
    python scripts/kernels_static.py --all      all of them, about ten
    python scripts/kernels_static.py --render   the Markdown from the JSON alone

These are counts, not times: registers, bytes on the stack for want of them, shared memory, and the instructions that
the hot loop spends on a weight. Other versions of triton count otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
JSON = ROOT / "scripts/results/kernels_static.json"
MARKDOWN = JSON.with_suffix(".md")
# Target: shared memory of a program in KiB, as the architecture allows.
TARGETS = {
    "cuda:80": 163,
    "cuda:89": 99,
    "cuda:90": 227,
    "cuda:100": 227,
    "cuda:120": 99,
    "hip:gfx942": 64,
    "hip:gfx950": 160,
    "hip:gfx1100": 64,
    "hip:gfx1201": 64,
}
HEAD = """# Kernels as compiled

`python scripts/kernels_static.py`, triton {triton}, for 4096 x 4096 weights. Static counts, no times. Instructions for
a weight are those of the loop with the tensor cores' products, for all tokens of a tile; a kernel without a loop is
counted as a whole. What limits a product of one token: an H200 issues 4.1 instructions in the time in which its memory
delivers a weight (MXFP4), an A100 5.9, a B200 2.7, an RTX 4090 24. Shared-memory stores in that loop are those of x.
"""


def concerns(name: str, target: str) -> bool:
    """Whether a variant is compiled for a target: on RDNA only the forward product, for its compile times."""
    return not target.startswith("hip:gfx1") or name.startswith("linear ")


def measure(target: str, option: str) -> dict[str, dict]:
    """Variants by name. A process for each target, with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, ROOT / "tests/compile_targets.py", target, option]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{target}: tests/compile_targets.py failed:\n{done.stderr[-2000:]}")
    return {row.pop("variant"): row for row in map(json.loads, done.stdout.splitlines())}


def published() -> dict:
    return json.loads(JSON.read_text())


def render(table: dict) -> str:
    """The Markdown: a table for each target."""
    lines = [HEAD.format(triton=table["triton"])]
    for target, rows in table["targets"].items():
        lines += [f"## {target}\n", "| kernel | registers | stack | shared | SASS/weight | shared stores | products |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, row in rows.items():
            figures = [row["registers"], row["stack"], row["shared"], row.get("sass_per_weight", "")]
            figures += [row.get("shared_stores", ""), row.get("products") or ""]
            lines.append(f"| {name} | " + " | ".join(map(str, figures)) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant, not only those that CI compiles")
    parser.add_argument("--render", action="store_true", help="only render the JSON there is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets compiled at the same time")
    arguments = parser.parse_args()
    if not arguments.render:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = pool.map(lambda target: measure(target, "--all" if arguments.all else "--brief"), TARGETS)
            table = {"triton": version("triton"), "targets": dict(zip(TARGETS, found, strict=True))}
        JSON.write_text(json.dumps(table, indent=1) + "\n")
    MARKDOWN.write_text(render(published()))


if __name__ == "__main__":
    main()
