# SPDX-License-Identifier: Apache-2.0
"""How fast packed layers are: every regime against bf16 and other projects' kernels, and whether targets are held.

    python scripts/benchmark_kernels.py                     the GPU at hand, in 8 minutes; without one the CPU
    python scripts/benchmark_kernels.py --device cpu
    python scripts/benchmark_kernels.py --only decode experts --resume

What fits into the time is measured, most important first; the rest is named. The JSON file is written after every
case, so a run that was stopped goes on with --resume. Peers (gemlite, bitsandbytes, torchao) are timed where they are
installed. Exit status 1 if one of our kernels is wrong or raises; it is not timed then.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import timing
from decode_speed import decode_cases, measure_decode
from hf_mxfp4 import __version__
from kernel_experts import experts_cases, measure_experts
from kernel_peers import BASELINE, OURS, contenders
from kernel_regimes import (
    Bench,
    Case,
    cpu_cases,
    launch_cases,
    layer_cases,
    linear_cases,
    measure_gradient,
    measure_launch,
    measure_linear,
    measure_lora,
    measure_quantize,
)
from kernel_report import as_markdown, cell, draw
from kernel_targets import evaluate, static_instructions

SCRIPTS = Path(__file__).resolve().parent
RESULTS = SCRIPTS / "results"
DEADLINE = 480.0  # seconds


class Regime(NamedTuple):
    """A kind of work: its share of the time, its cases (most important first), how one is measured, and about how many
    seconds the first one takes."""

    share: float
    cases: Callable[[Bench], list[Case]]
    measure: Callable[[Case, Bench], dict]
    first: float = 5.0
    devices: tuple[str, ...] = ("cuda",)


BOTH = ("cuda", "cpu")
MLP = ("8B gate", "8B down", "3B gate")
PREFILL = (4096, 1024, 512, 2048, 8192)
REGIMES = {
    "launch": Regime(0.5, launch_cases, measure_launch, 1, BOTH),
    "cpu": Regime(20, cpu_cases, measure_linear, 15, ("cpu",)),
    "decode": Regime(12, partial(linear_cases, "decode", (1, 16, 4, 8, 2), quick=(1, 16)), measure_linear),
    "batch": Regime(6, partial(linear_cases, "batch", (32, 64, 128, 256), quick=(64,)), measure_linear),
    "end to end": Regime(9, decode_cases, measure_decode, 40, BOTH),
    "experts": Regime(4, experts_cases, measure_experts, 15),
    "prefill": Regime(6, partial(linear_cases, "prefill", PREFILL, quick=(2048,)), measure_linear),
    "backward": Regime(3, partial(layer_cases, "backward", MLP, (2048, 128, 512, 4096, 16)), measure_gradient),
    "LoRA step": Regime(2, partial(layer_cases, "LoRA step", MLP, (4096,)), measure_lora),
    "quantize": Regime(1, partial(layer_cases, "quantize", MLP[:1], (0,)), measure_quantize),
}


# --- what a run is of ------------------------------------------------------------------------------------------------


def source_hash() -> str:
    """Of our sources and these scripts: figures of other code are not taken over."""
    digest = hashlib.sha256()
    files = [*(SCRIPTS.parent / "hf_mxfp4").rglob("*"), *SCRIPTS.glob("*.py")]
    for file in sorted(file for file in files if file.suffix in (".py", ".c", ".h", ".json")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def describe_device(device: torch.device) -> str:
    return timing.processor(device) + ("" if device.type == "cuda" else f", {os.cpu_count()} CPUs")


def environment(device: torch.device) -> dict:
    """What must be the same for rows to go into one table."""
    versions = {"hf_mxfp4": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "transformers"):
        if importlib.util.find_spec(package):
            versions[package] = importlib.metadata.version(package)
    versions |= {c.package: c.version for c in contenders(device).values() if c.package}
    return {
        "device": describe_device(device),
        "device_type": device.type,
        "capability": "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "",
        "versions": versions,
        "path": cpu_path() if device.type == "cpu" else "Triton kernels",
        "sources": source_hash(),
    }


def cpu_path() -> str:
    """What runs on this CPU."""
    from hf_mxfp4.kernels import cpu

    return f"C extension, {cpu.path()}" if cpu.path() else f"plain torch ({cpu.why_not()})"


def earlier(file: Path, about: dict) -> tuple[dict[str, dict], str]:
    """Rows of an earlier run, and why there are none."""
    if not file.is_file():
        return {}, f"{file} does not exist"
    found = json.loads(file.read_text(encoding="utf-8"))
    other = [key for key, value in about.items() if found.get(key) != value]
    return ({}, f"{file} was made with other {', '.join(other)}") if other else (found["rows"], "")


def write(file: Path, text: str) -> None:
    """Replace a file at once: whoever stops the run finds the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, file)


# --- running ---------------------------------------------------------------------------------------------------------


class Plan:
    """Hands out time: a regime gets its share of what is left, what it does not use goes to the later ones."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.end = clock, clock() + seconds

    def until(self, share: float, later: float) -> float:
        """When a regime has to end, given the shares of those after it."""
        now = self.clock()
        return now + max(0.0, self.end - now) * share / (share + later)


def run(report: dict, names: Iterable[str], bench: Bench, seconds: float, save: Callable[[], None], say=print) -> None:
    """Measure what is not in `report["rows"]` yet, as far as the time goes; the rest into `report["left_out"]`.

    A second pass takes up what the first had no time for, if time is left after all.
    """
    plan, names = Plan(seconds), list(names)
    estimates = {name: REGIMES[name].first for name in names}
    for last in (False, True):
        report["left_out"] = []
        for number, name in enumerate(names):
            later = 0 if last else sum(REGIMES[other].share for other in names[number + 1 :])
            bench.until = plan.until(REGIMES[name].share, later)
            bench.release()
            for case in REGIMES[name].cases(bench):
                start = plan.clock()
                if is_complete(report["rows"].get(case.key)):
                    continue
                if start + estimates[name] > bench.until:
                    report["left_out"].append(case.key)
                    continue
                report["rows"][case.key] = row = attempt(REGIMES[name].measure, case, bench)
                estimates[name] = plan.clock() - start
                row["seconds"] = round(estimates[name], 2)
                say(f"{max(0, plan.end - plan.clock()):5.0f} s left  {case.key}: {summary(row)}")
                save()
        bench.release()
    for key, row in report["rows"].items():
        report["left_out"] += [f"{key}, {part}" for part in row.get("left_out", ())]


def is_complete(row: dict | None) -> bool:
    """Whether a row needs no further attempt. What raised would raise again."""
    return row is not None and not row.get("left_out")


def attempt(measure: Callable[[Case, Bench], dict], case: Case, bench: Bench) -> dict:
    """A row, whatever happens; `case.threads` threads while it is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        return measure(case, bench)
    except Exception as error:
        traceback.print_exc()
        empty = {"flops": 0.0, "bytes": {}, "gate": {}, "times": {}, "ratios": {}, "baseline": "", "load": 0.0}
        return {**case._asdict(), **empty, "failed": {"case": f"{type(error).__name__}: {str(error)[:300]}"}}
    finally:
        torch.set_num_threads(threads)


def summary(row: dict) -> str:
    names = dict.fromkeys((*row["times"], *row["failed"], *(n for n, g in row["gate"].items() if not g["passed"])))
    return "  ".join(f"{name} {cell(row, name).replace('*', '')}" for name in names)


def mistakes(rows: dict[str, dict]) -> list[str]:
    """What of ours is wrong or raised, but for want of memory; of peers nothing."""
    found = []
    for key, row in rows.items():
        for name in (n for n, gate in row["gate"].items() if not gate["passed"]):
            if name.startswith((*OURS, BASELINE)):
                gate = row["gate"][name]
                found.append(f"{key}, {name}: error {gate['error']:.3g}, allowed {gate['allowed']:.3g}")
        ours = (n for n in row["failed"] if n.startswith((*OURS, BASELINE, "case")))
        found += [f"{key}, {name}: {row['failed'][name]}" for name in ours if not is_memory(row["failed"][name])]
    return found


def is_memory(message: str) -> bool:
    return message.startswith("OutOfMemoryError")


def finish(report: dict, file: Path) -> list[str]:
    """Write JSON, Markdown and PNG; the lines to print at the end."""
    static = RESULTS / "kernels_static.json"
    static = json.loads(static.read_text(encoding="utf-8")) if static.is_file() else {}
    outcomes = evaluate(report["rows"], report["machine"], static_instructions(static, report["capability"]))
    report["targets"] = [{"name": o.target.name, **o._asdict(), "target": o.target._asdict()} for o in outcomes]
    write(file, json.dumps(report, indent=1) + "\n")
    write(file.with_suffix(".md"), as_markdown(report, outcomes))
    lines = [
        f"{'held  ' if o.held else 'MISSED'} {o.target.name}: {o.worst:.2f} of {o.target.minimum:g}x {o.target.base}"
        for o in outcomes
    ]
    lines += [f"not measured: {key}" for key in report["left_out"]]
    lines += [f"WRONG  {line}" for line in mistakes(report["rows"])]
    written = [".json", ".md"]
    if importlib.util.find_spec("matplotlib"):
        draw(report, file.with_suffix(".png"))
        written.append(".png")
    else:
        lines.append("no roofline: matplotlib is missing (pip install hf-mxfp4[plot])")
    return [*lines, f"wrote {', '.join(file.with_suffix(suffix).name for suffix in written)} in {file.parent}"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=BOTH, default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few cases of each regime")
    parser.add_argument("--only", nargs="+", choices=[*REGIMES], metavar="REGIME", help=f"of {', '.join(REGIMES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: scripts/results/kernels_DEVICE.json")
    parser.add_argument("--resume", action="store_true", help="keep what FILE has already")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE, metavar="SECONDS", help="default: %(default)g; 0: no limit"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), metavar="N", help="of the CPU"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="samples of each contender at most")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no GPU (CUDA or ROCm). --device cpu measures the CPU.")
    wrong = [name for name in options.only or () if options.device not in REGIMES[name].devices]
    if wrong:
        parser.error(f"--only {' '.join(wrong)}: not a regime of --device {options.device}.")
    if min(options.threads) < 1:
        parser.error(f"--threads {min(options.threads)}: at least 1.")
    if options.deadline < 0 or (options.rounds is not None and options.rounds < timing.MIN_ROUNDS):
        parser.error(f"--deadline must not be negative, --rounds at least {timing.MIN_ROUNDS}.")
    return options


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    device = (
        torch.device(options.device, torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )
    started = time.monotonic()
    torch.manual_seed(0)
    about = environment(device)
    slug = "cpu" if device.type == "cpu" else re.sub(r"\W+", "_", about["device"].lower())
    file = options.json or RESULTS / f"kernels_{slug}.json"
    rows, reason = earlier(file, about) if options.resume else ({}, "")
    if reason:
        print(f"--resume: {reason}; measuring everything.")
    rounds = options.rounds or (25 if device.type == "cuda" else 200)
    bench = Bench(device, contenders(device), rounds, 1.0 if device.type == "cuda" else 3.0, options.quick)
    bench.threads = tuple(dict.fromkeys(options.threads))
    if options.quick:
        bench.rounds, bench.seconds = min(rounds, 15), 0.5
    print(f"{about['device']}; " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    if device.type == "cpu":
        torch.set_num_threads(bench.threads[0])  # the machine's ceilings are those of the first rows
    report = {
        **about,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(
            ["python", "scripts/benchmark_kernels.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "machine": timing.machine(device),
        "caches": timing.CACHES,
        "how": how(device),
        "rows": rows,
        "left_out": [],
    }
    names = [name for name, regime in REGIMES.items() if device.type in regime.devices]
    names = [name for name in names if name in (options.only or names)]
    seconds = (options.deadline or float("inf")) - (time.monotonic() - started)
    run(report, names, bench, seconds, lambda: write(file, json.dumps(report, indent=1) + "\n"))
    report["seconds"] = round(time.monotonic() - started, 1)
    print("\n" + "\n".join(finish(report, file)))
    return int(bool(mistakes(report["rows"])))


def how(device: torch.device) -> str:
    """How calls were timed, in a sentence or two."""
    if device.type == "cuda":
        return "Calls are captured in CUDA graphs and timed by events."
    load = f"load before the run {os.getloadavg()[0]:.2f}, before each row in the JSON"
    return f"One thread: its CPU time, more: the wall clock ({load}). Path: {cpu_path()}."


if __name__ == "__main__":
    sys.exit(main())
