# SPDX-License-Identifier: Apache-2.0
"""Make model_cards/demo_lm_nvfp4.md, its figure and its measurements, by the commands that users type.

python scripts/demo_card.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from demo_data import held_out_files

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards"
SOURCE = "scripts/demo_lm"
NAME = "demo_lm_nvfp4"
COMMAND = f"hf-mxfp4 quantize {SOURCE} {NAME}"


def run(*words: str) -> None:
    """One command of hf-mxfp4, from the top of the source tree."""
    print("hf-mxfp4", *words, flush=True)
    subprocess.run([Path(sys.executable).with_name("hf-mxfp4"), *words], cwd=ROOT, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        output, text = Path(scratch, NAME), Path(scratch, "held_out.txt")
        text.write_text("\n".join(path.read_text(encoding="utf-8") for path in held_out_files()), encoding="utf-8")
        run("quantize", SOURCE, str(output))
        windows = "--length 255 --batch-size 8 --device cpu".split()
        run("evaluate", str(output), "--reference", SOURCE, "--text", str(text), *windows)
        run("verify", str(output), "--source", SOURCE)
        run("card", str(output), "--source", SOURCE, "--command", COMMAND, "--output", str(CARDS / f"{NAME}.md"))
        shutil.copy(output / "evaluation.json", CARDS / f"{NAME}.json")


if __name__ == "__main__":
    main()
