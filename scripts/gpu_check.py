# SPDX-License-Identifier: Apache-2.0
"""Check every kernel against the reference on this machine's GPU: one line per check, exit status 1 if any is wrong.

    python scripts/gpu_check.py                    all checks
    python scripts/gpu_check.py --json result.json
    python scripts/gpu_check.py --interpret        tiny sizes in Triton's interpreter, to try this script without a GPU

Decoded values must equal the reference bit for bit. A product's error is given as a fraction of the largest error that
float32 sums and one rounding can make; up to 1 is right.
"""

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update({"TRITON_INTERPRET": "1"} if "--interpret" in sys.argv else {})  # read when kernels are imported

from gpu_checks import CHECKS, Check
from gpu_only_checks import GPU_CHECKS
from hf_mxfp4.formats import FORMATS, BlockFormat


def run(check: Callable, fmt: BlockFormat, device, big: bool) -> Iterator[Check]:
    try:
        yield from check(fmt, device, big)
    except Exception as error:
        traceback.print_exc()
        yield Check(f"{check.__name__} {fmt.name}", float("inf"), f"{type(error).__name__}: {str(error)[:200]}")


def environment(device) -> dict[str, str]:
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "interpreter",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_gpu else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write device, versions and results")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, on the CPU")
    options = parser.parse_args()
    if not options.interpret and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU (CUDA or ROCm). --interpret tries the checks on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.interpret else torch.device("cuda", torch.cuda.current_device())
    # cuBLAS may otherwise add up partial sums in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.manual_seed(0)
    report = {**environment(device), "checks": []}
    print("  ".join(f"{key} {value}" for key, value in report.items() if key != "checks"))
    for check in CHECKS if options.interpret else CHECKS + GPU_CHECKS:
        for fmt in FORMATS.values():
            for name, error, note in run(check, fmt, device, big=not options.interpret):
                passed = error <= 1 if not note.endswith("values") else error == 0
                report["checks"].append({"name": name, "passed": passed, "error": str(error), "note": note})
                print(f"{'PASS' if passed else 'FAIL'}  {error:9.3g}  {name}{note and f'  ({note})'}", flush=True)
    failed = sum(not check["passed"] for check in report["checks"])
    print(f"{len(report['checks'])} checks, {failed} failed")
    print("next: repair what failed, before any timing" if failed else "next: python scripts/benchmark_kernels.py")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
