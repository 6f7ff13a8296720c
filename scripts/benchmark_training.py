# SPDX-License-Identifier: Apache-2.0
"""Memory and speed of a training step on packed weights, beside bf16 LoRA, bitsandbytes NF4 and full fine-tuning.

    python scripts/benchmark_training.py                       # writes scripts/results/training.{json,md}
    python scripts/benchmark_training.py --models demo --rounds 11
    python scripts/benchmark_training.py --device cuda --batch 8 --length 1024 --out /tmp/training

Each arm (scripts/training_arms.py) is a process of its own. Those of a model take turns step by step, so that a slow
spell of the machine meets all of them. Stopped anywhere, the same command goes on where it was; a failed arm is tried
again, and --fresh forgets what is there.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
import transformers

import timing
import training_arms
from hf_mxfp4 import FP4Config
from hf_mxfp4.streaming import quantize_checkpoint
from training_arms import ARMS, BASE, DEMO

MODELS = {"demo": "the demo model (scripts/demo_lm)", "0.5b": "Qwen2.5-0.5B's shape, random weights"}
SETTINGS = ("device", "threads", "batch", "length")  # results of others are not mixed
LIBRARIES = ("torch", "transformers", "peft")


@dataclass
class Options:
    models: str = field(default="demo,0.5b", metadata={"help": f"any of {', '.join(MODELS)}"})
    arms: str = field(default=",".join(ARMS), metadata={"help": f"any of {', '.join(ARMS)}"})
    rounds: int = field(default=5, metadata={"help": "timed steps of each arm; demo: five times as many"})
    batch: int = field(default=4, metadata={"help": "sequences in a step"})
    length: int = field(default=128, metadata={"help": "tokens of a sequence"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    threads: int = field(default=1, metadata={"help": "of a CPU"})
    scratch: str | None = field(default=None, metadata={"help": "folder for checkpoints (3 GB); else a temporary one"})
    out: str = field(
        default=str(Path(__file__).parent / "results" / "training"), metadata={"help": "less .json and .md"}
    )
    fresh: bool = field(default=False, metadata={"help": "forget results that are there"})

    def __post_init__(self):
        self.model_names = chosen("models", self.models, MODELS)
        self.arm_names = chosen("arms", self.arms, ARMS)
        for name in ("rounds", "batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if self.length < 2:
            raise ValueError(f"length={self.length}; a sequence needs at least 2 tokens to learn from.")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}; allowed: cpu, cuda.")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}: torch {torch.__version__} finds no GPU here. Use --device cpu.")


def chosen(option: str, text: str, known) -> list[str]:
    """Names separated by commas, in the order of `known`."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{option}: {', '.join(map(repr, unknown))}; allowed: {', '.join(known)}.")
    return [name for name in known if name in names]


# --- results ---------------------------------------------------------------------------------------------------------


class Results:
    """What was measured, in a file that is written after each measurement."""

    def __init__(self, options: Options):
        self.json, self.markdown = Path(options.out + ".json"), Path(options.out + ".md")
        settings = {name: getattr(options, name) for name in SETTINGS} | {"machine": machine(options)}
        self.found = {"settings": settings, "loads": [], "runs": []}
        if self.json.exists() and not options.fresh:
            earlier = json.loads(self.json.read_text())
            if earlier["settings"] != settings:
                differ = [name for name in settings if earlier["settings"].get(name) != settings[name]]
                raise ValueError(
                    f"{self.json}: measured with another {', '.join(differ)}; give --fresh to measure all of it "
                    "again, or another --out."
                )
            self.found = earlier

    def run(self, model: str, checkpointing: bool, arm: str) -> dict:
        """The row of an arm; an empty one if there is none."""
        key = {"model": model, "checkpointing": checkpointing, "arm": arm}
        for row in self.found["runs"]:
            if key.items() <= row.items():
                return row
        self.found["runs"].append(key)
        return key

    def write(self) -> None:
        self.json.parent.mkdir(parents=True, exist_ok=True)
        for path, text in ((self.json, json.dumps(self.found, indent=1) + "\n"), (self.markdown, render(self.found))):
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text)
            partial.replace(path)


def machine(options: Options) -> dict:
    versions = {name: metadata.version(name) for name in LIBRARIES}
    found = {"processor": timing.processor(torch.device(options.device)), **versions}
    return found | ({"cores": len(os.sched_getaffinity(0))} if options.device == "cpu" else {})


# --- measuring -------------------------------------------------------------------------------------------------------


def folder_of(model: str, arm: str, scratch: Path) -> Path:
    """The checkpoint of an arm, made on first use: the model, or the same quantized."""
    source = DEMO if model == "demo" else scratch / model
    if not (source / "config.json").exists():
        print(f"{model}: making {source}", flush=True)
        torch.manual_seed(0)
        partial = scratch / f"{model}.partial"  # config.json is written before the weights
        shutil.rmtree(partial, ignore_errors=True)
        training_arms.random_model(partial)
        partial.replace(source)
    config = ARMS[arm].config
    if config is None:
        return source
    packed = scratch / f"{model}-{arm}"
    if not (packed / "config.json").exists() or list(packed.glob(".hf_mxfp4*")):
        print(f"{model}: quantizing for {arm}", flush=True)
        quantize_checkpoint(source, packed, FP4Config(scale_rule="amax", **config))
    return packed


class Child:
    """An arm in its own process, ready for timed steps once `measured` has returned."""

    def __init__(self, arm: str, folder: Path, checkpointing: bool, options: Options):
        given = {name: getattr(options, name) for name in SETTINGS}
        given |= {"arm": arm, "folder": str(folder), "checkpointing": checkpointing}
        self.process = subprocess.Popen(
            [sys.executable, training_arms.__file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
        )

    def read(self) -> dict:
        """The next line of JSON; raises `RuntimeError` with the last other line if there is none."""
        last = ""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            last = line.strip() or last
        raise RuntimeError(f"ended with {self.process.wait()}: {last}")

    def step(self) -> float:
        with contextlib.suppress(BrokenPipeError):  # `read` says why
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return self.read()["seconds"]

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def measure_group(results: Results, model: str, checkpointing: bool, options: Options, scratch: Path) -> None:
    """All arms of a model: bytes of each, then steps in turn."""
    rounds = options.rounds * (5 if model == "demo" else 1)
    rows = {arm: results.run(model, checkpointing, arm) for arm in options.arm_names}
    children: dict[str, Child] = {}
    for arm in list(rows):
        absent = training_arms.why_absent(ARMS[arm])
        if absent is not None:
            row = rows.pop(arm)
            if "seconds" not in row:  # what was measured when it was there stays
                fail(row, absent)
    results.write()
    if all(len(row.get("seconds", ())) >= rounds for row in rows.values()):
        return
    try:
        for arm, row in rows.items():
            row.pop("failed", None)
            children[arm] = child = Child(arm, folder_of(model, arm, scratch), checkpointing, options)
            try:
                row |= child.read()
                if ARMS[arm].library:
                    row["version"] = metadata.version(ARMS[arm].library)
                print(f"{model}, {arm}, checkpointing {checkpointing}: {megabytes(total(row))} MB", flush=True)
            except RuntimeError as error:
                fail(row, str(error))
                children.pop(arm).end()
            results.write()
        time_steps(results, rows, children, rounds)
    finally:
        for child in children.values():
            child.end()


def time_steps(results: Results, rows: dict[str, dict], children: dict[str, Child], rounds: int) -> None:
    """Rounds of a step of each, until all have enough; only steps of the same round are compared."""
    loads = results.found["loads"]
    while any(len(rows[arm].get("seconds", ())) < rounds for arm in children):
        number, taken = len(loads), {}
        for arm in list(children)[:: -1 if number % 2 else 1]:
            try:
                taken[arm] = children[arm].step()
            except RuntimeError as error:
                fail(rows[arm], str(error))
                children.pop(arm).end()
        for arm, seconds in taken.items():
            rows[arm].setdefault("seconds", {})[str(number)] = seconds
        loads.append(os.getloadavg()[0])
        results.write()


def fail(row: dict, why: str) -> None:
    """Let a row say why there are no numbers."""
    for key in set(row) - {"model", "checkpointing", "arm"}:
        del row[key]
    row["failed"] = why
    print(f"{row['model']}, {row['arm']}: {why}", flush=True)


# --- the table -------------------------------------------------------------------------------------------------------


def total(row: dict) -> int:
    """Bytes at the peak of a step."""
    return row["frozen"] + row["learning"] + row["optimizer"] + row["peak"]


def megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}" if value < 1e8 else f"{value / 1e6:,.0f}"


def render(found: dict) -> str:
    """All of it as Markdown."""
    settings, loads = found["settings"], found["loads"]
    here, tokens = settings["machine"], settings["batch"] * settings["length"]
    versions = ", ".join(f"{name} {here[name]}" for name in LIBRARIES)
    cores = f", {here['cores']} cores, {settings['threads']} thread(s) used" if "cores" in here else ""
    load = f"; load average {min(loads):.1f} to {max(loads):.1f}, of which this benchmark is 1" if loads else ""
    on_one_thread = settings["device"] == "cpu" and settings["threads"] == 1
    memory = "*resident* is the most resident memory of the process in a step, less that after its imports. "
    lines = [
        "# A training step: memory and speed",
        "",
        f"{here['processor']}{cores}; {versions}{load}. A step: {settings['batch']} sequences of "
        f"{settings['length']} tokens through forward, backward and AdamW under bf16 autocast; LoRA of rank "
        f"{training_arms.RANK} on all linear layers, adapters in float32. Embeddings, norms and head are bf16, but "
        "float32 where PEFT prepares the model.",
        "",
        "Megabytes (10^6 bytes) by torch's allocator. *frozen*: weights that stay as they are. *learning*: weights "
        "that learn, and AdamW's states. *kept*: what waits after the forward for the backward. *step*: the most that "
        "a step allocates on top of the first two, *kept* included. *peak*: frozen, learning and step together, and "
        f"as a ratio to bf16 LoRA. {memory if settings['device'] == 'cpu' else ''}Tokens per second: median of the "
        f"steps{', of the CPU time they took' if on_one_thread else ''}; *ratio*: to bf16 LoRA in the same round, "
        "median (quartiles).",
    ]
    groups = dict.fromkeys((row["model"], row["checkpointing"]) for row in found["runs"])
    for model, checkpointing in groups:
        rows = [row for row in found["runs"] if (row["model"], row["checkpointing"]) == (model, checkpointing)]
        lines += ["", f"## {MODELS[model]}, gradient checkpointing {'on' if checkpointing else 'off'}", ""]
        lines += table(
            {arm: row for arm in ARMS for row in rows if row["arm"] == arm}, tokens, settings["device"] == "cpu"
        )
    return "\n".join(lines) + "\n"


def table(rows: dict[str, dict], tokens: int, on_cpu: bool) -> list[str]:
    heads = ["", "frozen", "learning", "kept", "step", "peak", *(["resident"] if on_cpu else []), "tokens/s", "ratio"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    base = rows.get(BASE, {})
    for arm, row in rows.items():
        if "failed" in row or "peak" not in row:
            cells = [row.get("failed", "not measured yet"), *[""] * (len(heads) - 2)]
        else:
            learning, seconds = row["learning"] + row["optimizer"], row.get("seconds", {})
            peak = megabytes(total(row)) + (f" ({total(row) / total(base):.2f}x)" if "peak" in base else "")
            cells = [*map(megabytes, (row["frozen"], learning, row["kept"], row["peak"])), peak]
            cells += [megabytes(row["resident"])] if on_cpu else []
            cells += [f"{tokens / statistics.median(seconds.values()):,.0f}" if seconds else ""]
            same = base.get("seconds", {}).keys() & seconds.keys()
            pairs = [base["seconds"][number] / seconds[number] for number in same]
            ratio = timing.summarize(pairs) if pairs else None
            cells += [f"{ratio.us:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else ""]
        label = ARMS[arm].label + (f" ({ARMS[arm].library} {row['version']})" if "version" in row else "")
        lines.append(f"| {' | '.join([label, *cells])} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = transformers.HfArgumentParser(Options, description=__doc__)
    (options,) = parser.parse_args_into_dataclasses(arguments)
    results = Results(options)
    with tempfile.TemporaryDirectory(prefix="training-") as temporary:
        scratch = Path(options.scratch or temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for model in options.model_names:
            for checkpointing in (False, True):
                measure_group(results, model, checkpointing, options, scratch)
    print(results.markdown.read_text())


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
