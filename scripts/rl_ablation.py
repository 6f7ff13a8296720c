# SPDX-License-Identifier: Apache-2.0
"""Does quantizing the base change what LoRA and GRPO learn on it? Seven arms, several seeds, one table, one figure.

    python scripts/rl_ablation.py                          # 7 arms, 3 seeds, 2 processes on 2 cores: under an hour
    python scripts/rl_ablation.py --preset full            # on a GPU: 5 seeds, 300 steps
    python scripts/rl_ablation.py --arms bf16,nvfp4 --seeds 0 --steps 20 --out /tmp/short

All arms start from the same adapter and see the same problems in the same order; an arm differs from bf16 in the base
alone, and with AQN in its rollouts. Each run is a process of its own (scripts/ablation_run.py, which says what the
task is) and leaves one file in OUT/runs. Stopped anywhere, the same command goes on: finished runs are not run again,
one that was cut off starts over, a failed one is tried again. OUT/rl_ablation.{json,md,png} are made of what there is.
"""

import concurrent.futures
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import Progress

import ablation_report
import ablation_run
from ablation_run import ARMS, Settings

DEFAULT_ARMS = tuple(name for name in ARMS if name != "searched")
PRESETS = {
    "reduced": {"seeds": "0,1,2", "jobs": 2, "steps": 60, "problems": 512, "device": "cpu"},
    "full": {"seeds": "0,1,2,3,4", "jobs": 1, "steps": 300, "problems": 2000, "device": "cuda"},
}


@dataclass
class Options:
    preset: str = field(default="reduced", metadata={"help": f"{' or '.join(PRESETS)}: what is not given below"})
    arms: str = field(default=",".join(DEFAULT_ARMS), metadata={"help": f"any of {', '.join(ARMS)}"})
    seeds: str | None = field(default=None, metadata={"help": "numbers, separated by commas"})
    jobs: int | None = field(default=None, metadata={"help": "runs at a time; 0: one by one in this process"})
    steps: int | None = field(default=None, metadata={"help": "optimizer steps of a run"})
    prompts: int = field(default=Settings.prompts, metadata={"help": "problems in a step"})
    generations: int = field(default=Settings.generations, metadata={"help": "completions of a problem"})
    learning_rate: float = field(default=Settings.learning_rate, metadata={"help": "constant"})
    rank: int = field(default=Settings.rank, metadata={"help": "of the adapters"})
    problems: int | None = field(default=None, metadata={"help": "held-out problems for the accuracy"})
    every: int = field(default=Settings.every, metadata={"help": "steps between accuracies"})
    model: str = field(default=Settings.model, metadata={"help": "folder or id of a causal LM"})
    device: str | None = field(default=None, metadata={"help": "cpu or cuda"})
    out: str = field(default="rl_ablation", metadata={"help": "folder for all files"})
    report_only: bool = field(default=False, metadata={"help": "only the table and the figure, of what there is"})

    def __post_init__(self):
        _check_choice("preset", [self.preset], PRESETS)
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.arm_names = self.arms.split(",")
        _check_choice("arms", self.arm_names, ARMS)
        _check_choice("device", [self.device], ("cpu", "cuda"))
        try:
            self.seed_numbers = [int(seed) for seed in self.seeds.split(",")]
        except ValueError as error:
            raise ValueError(f"seeds={self.seeds!r}; allowed: whole numbers separated by commas.") from error
        least = {"jobs": 0, "steps": 1, "prompts": 1, "generations": 2, "rank": 1, "problems": 1, "every": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least {lowest}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}; it must be above 0.")

    @property
    def settings(self) -> Settings:
        names = [f.name for f in dataclasses.fields(Settings) if hasattr(self, f.name)]
        return Settings(**{name: getattr(self, name) for name in names})


def _check_choice(option: str, names: list[str], allowed: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(allowed)):
        raise ValueError(f"{option}: {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}.")


def finished(path: Path, settings: Settings) -> bool:
    """Whether a run's file is there.

    Raises:
        ValueError: if it is of other settings, which must not be mixed.
    """
    if not path.exists():
        return False
    found, wanted = json.loads(path.read_text(encoding="utf-8"))["settings"], dataclasses.asdict(settings)
    wanted["model"], found["model"] = Path(wanted["model"]).name, Path(found["model"]).name  # where it lies may differ
    differ = [name for name in wanted if found.get(name) != wanted[name]]
    if differ:
        words = ", ".join(f"{name}={found.get(name)} and not {wanted[name]}" for name in differ)
        raise ValueError(f"{path} was run with {words}. Give another --out, or the same options.")
    return True


def execute(arm: str, seed: int, settings: Settings, path: Path, jobs: int) -> bool:
    """One run, in a process of its own unless `jobs` is 0. Whether it went well."""
    if jobs == 0:
        return ablation_run.write(arm, seed, settings, path)
    task = {"arm": arm, "seed": seed, "settings": dataclasses.asdict(settings), "path": str(path)}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    command = [sys.executable, ablation_run.__file__, json.dumps(task)]
    failure = path.with_suffix(".error.txt")
    failure.unlink(missing_ok=True)  # of an earlier try
    run = subprocess.run(
        command, env={"OMP_NUM_THREADS": str(threads), **os.environ}, capture_output=True, text=True, errors="replace"
    )
    if run.returncode and not failure.exists():  # killed, or it could not even start
        failure.write_text(f"exit status {run.returncode}\n{run.stderr[-4000:]}", encoding="utf-8")
    return run.returncode == 0


def main(options: Options) -> int:
    """Run what is missing, then write the report. The number of runs that failed."""
    console = Console()
    out = Path(options.out)
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(arm, seed, folder / f"{arm}-{seed}.json") for seed in options.seed_numbers for arm in options.arm_names]
    missing = [task for task in tasks if not finished(task[-1], options.settings)]
    failed = []
    if missing and not options.report_only:
        console.print(f"{len(tasks) - len(missing)} of {len(tasks)} runs are there; running {len(missing)}.")
        pool = concurrent.futures.ThreadPoolExecutor(max(1, options.jobs))
        with Progress(console=console) as progress:
            bar = progress.add_task("runs", total=len(missing))
            futures = {pool.submit(execute, a, s, options.settings, p, options.jobs): p for a, s, p in missing}
            try:
                for future in concurrent.futures.as_completed(futures):
                    path, good = futures[future], future.result()
                    failed += [] if good else [path.stem]
                    console.print(_line(path, good))
                    progress.advance(bar)
            finally:
                pool.shutdown(cancel_futures=True)
    runs = [json.loads(path.read_text(encoding="utf-8")) for _, _, path in tasks if path.exists()]
    if not runs:
        console.print("No run is finished: there is nothing to report.")
        return max(1, len(failed))
    command = "python scripts/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    lost = [path.stem for _, _, path in tasks if not path.exists()]
    ablation_report.write(runs, {name: ARMS[name].title for name in options.arm_names}, lost, command, out)
    console.print(f"{out / 'rl_ablation.md'}")
    return len(failed)


def _line(path: Path, good: bool) -> str:
    if not good:
        return f"{path.stem}: failed, see {path.with_suffix('.error.txt')}"
    run = json.loads(path.read_text(encoding="utf-8"))
    first, last = (run["evaluations"][i]["accuracy"] for i in (0, -1))
    return f"{path.stem}: held-out accuracy {first:.3f} -> {last:.3f}, {run['seconds']:.0f} s"


if __name__ == "__main__":
    try:
        (given,) = transformers.HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
        sys.exit(main(given) > 0)
    except ValueError as error:
        sys.exit(f"error: {error}")
