# SPDX-License-Identifier: Apache-2.0
"""Zero-shot accuracy of FP4 methods on one model: the table of the SOAR paper (arXiv 2605.12245), through lm-eval.

    python scripts/reproduce_soar_table.py meta-llama/Llama-3.1-8B --output llama-8b

The tasks are those of the paper's zero-shot table: ARC-easy, ARC-challenge, HellaSwag, PIQA, WinoGrande. Activations
are quantized too (`--activations a4`), as there. Which of lm-eval's two accuracies the paper averages we do not know:
`acc_norm` is taken where a task has it (all but WinoGrande), `--metric acc` takes the other without a new run.

Methods can differ by less than the standard error of an accuracy. All answer the same questions, so the change against
bf16 comes with an error paired by question, which is smaller.

A finished method is a file in the output folder and is not run again.
"""

import datetime
import gc
import importlib.metadata
import importlib.util
import json
import logging
import math
import platform
import re
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import transformers
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_mxfp4
from hf_mxfp4 import FP4Config
from hf_mxfp4.evaluation import Estimate, bits_per_weight
from hf_mxfp4.integrations import lm_eval

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande")
BASE = "bf16"
METHODS = (
    "nvfp4 amax",
    "nvfp4 four_over_six",
    "nvfp4 soar search=2 global_scale=free",  # the paper's local search
    "nvfp4 soar",
    "mxfp4 amax",
    "mxfp4 soar",
)
METRICS = ("acc_norm", "acc")


class Activations(str, Enum):
    """`a4`: quantized as the weights are; `a16`: as they come."""

    a4 = "a4"
    a16 = "a16"


def config_of(method: str, activations: Activations) -> FP4Config:
    """The config of `"FORMAT SCALE_RULE name=value ..."`, the names being further arguments of `FP4Config`."""
    format, _, rest = method.partition(" ")
    scale_rule, *options = rest.split() or ["soar"]
    values = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{option!r} is not name=value.")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    if activations is Activations.a4:
        values["activation_format"] = "same"
    return FP4Config(format=format, scale_rule=scale_rule, **values)


def find_tasks(names: list[str]):
    """lm-eval's task manager and the tasks behind `names`: tasks, groups, or folders of task YAMLs.

    Raises:
        ValueError: for unknown names, and tasks without an accuracy.
    """
    manager, tasks = lm_eval.find_tasks(names)  # reads the data: what cannot be had shows before a model is loaded
    wrong = [name for name, task in tasks.items() if not set(METRICS) & set(task.aggregation())]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: no {' or '.join(METRICS)} there; multiple-choice tasks are needed.")
    return manager, sorted(tasks)


def evaluate(model: str, config: FP4Config | None, manager, tasks: list[str], limit, batch_size, device) -> dict:
    """Load a model, quantized by `config` (`None`: bf16), and let it answer.

    Returns:
        `dict`: `bits_per_weight`, and `scores`: for each task and metric a string with a 0 or 1 for each question.
    """
    from lm_eval import simple_evaluate

    quantization = {} if config is None else {"quantization_config": config}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map=device, **quantization)
    # In bfloat16, lm-eval's default, sums of log-probabilities are so coarse that choices tie.
    lm = lm_eval.as_lm(loaded, AutoTokenizer.from_pretrained(model), batch_size, softmax_dtype="float32")
    options = {"num_fewshot": 0, "limit": limit, "bootstrap_iters": 0}
    samples = simple_evaluate(lm, tasks=tasks, task_manager=manager, **options)["samples"]
    scores = {}
    for task in tasks:
        answers = sorted(samples[task], key=lambda sample: sample["doc_id"])
        metrics = [metric for metric in METRICS if metric in answers[0]]
        scores[task] = {metric: "".join(str(int(answer[metric])) for answer in answers) for metric in metrics}
    return {"bits_per_weight": 16.0 if config is None else bits_per_weight(loaded), "scores": scores}


def mean(tasks: list[torch.Tensor]) -> Estimate:
    """Mean over tasks of the mean over questions, with its standard error (NaN if a task has one question)."""
    variance = sum(float(scores.var()) / len(scores) for scores in tasks)
    return Estimate(sum(float(scores.mean()) for scores in tasks) / len(tasks), math.sqrt(variance) / len(tasks))


def summarize(records: dict[str, dict], metric: str) -> list[dict]:
    """Rows of the table, accuracies in percent, from the records of `evaluate` by method; one is `BASE`.

    `gap_recovered` is how much of what the same format loses with `amax` a method wins back, averaged over tasks;
    `None` where `amax` was not run or loses nothing.
    """
    scores, used = {}, {}
    for method, record in records.items():
        scores[method] = {}
        for task, found in record["scores"].items():
            used[task] = metric if metric in found else next(iter(found))
            scores[method][task] = 100 * torch.tensor([*map(float, found[used[task]])], dtype=torch.float64)
    average = {method: mean([*tasks.values()]) for method, tasks in scores.items()}
    rows = []
    for method, tasks in scores.items():
        amax = average.get(f"{method.split()[0]} amax")
        gap = average[BASE].mean - amax.mean if amax and method != BASE else 0
        change = mean([tasks[task] - scores[BASE][task] for task in tasks])
        rows.append(
            {
                "method": method,
                "bits_per_weight": records[method]["bits_per_weight"],
                "tasks": {
                    task: {"metric": used[task], "questions": len(values), **mean([values])._asdict()}
                    for task, values in tasks.items()
                },
                "average": average[method]._asdict(),
                "change": change._asdict(),
                "gap_recovered": (average[method].mean - amax.mean) / gap if gap > 0 else None,
            }
        )
    return rows


def as_markdown(rows: list[dict], about: dict) -> str:
    """The table, with what it was made from and by."""

    def cell(estimate: dict, sign: str = "") -> str:
        return f"{estimate['mean']:{sign}.2f} ± {estimate['error']:.2f}"

    tasks = rows[0]["tasks"]
    header = ["method", "bits/weight", *(f"{task} ({found['metric']})" for task, found in tasks.items())]
    header += ["average", "change", "gap recovered"]
    cells = [
        [
            row["method"],
            f"{row['bits_per_weight']:.2f}",
            *(cell(found) for found in row["tasks"].values()),
            cell(row["average"]),
            "" if row["method"] == BASE else cell(row["change"], "+"),
            "" if row["gap_recovered"] is None else f"{100 * row['gap_recovered']:.0f} %",
        ]
        for row in rows
    ]
    limit = f" First {about['limit']} questions of each task only." if about["limit"] else ""
    lines = [
        f"# Zero-shot accuracy, {about['model']}, W4{about['activations'].upper()}",
        "",
        "Accuracy in percent ± standard error. Change: of the average against bf16, error paired by question. Gap "
        f"recovered: the part of what amax loses in the same format that a method wins back.{limit}",
        "",
        "| " + " | ".join(header) + " |",
        "|---" + "|---:" * (len(header) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in cells),
        "",
        f"{sum(found['questions'] for found in tasks.values()):,} questions. Made on {about['date']} with "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f" on {about['device']}.",
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Job(NamedTuple):
    """A method to measure, what is asked (kept with the answers), and the file for the answers."""

    method: str
    config: FP4Config | None
    request: dict
    path: Path

    def stored(self) -> dict | None:
        """The record an earlier run left, or `None`; `ValueError` if that run was asked something else."""
        if not self.path.is_file():
            return None
        record = json.loads(self.path.read_text(encoding="utf-8"))
        other = [f"{name}={value!r}" for name, value in record["request"].items() if value != self.request.get(name)]
        if other:
            raise ValueError(
                f"{self.path} was made with {', '.join(other)}. Give another --output, or --force to replace it."
            )
        return record


def plan(configs: dict[str, FP4Config | None], activations: Activations, asked: dict, output: Path) -> list[Job]:
    """A job for each method. What bf16 is asked does not depend on `activations`."""
    jobs = []
    for method, config in configs.items():
        kind = None if config is None else activations.value
        slug = re.sub(r"[^\w.]+", "-", f"{method} {kind}" if kind else method)
        request = {**asked, "method": method, "activations": kind}
        jobs.append(Job(method, config, request, output / "methods" / f"{slug}.json"))
    return jobs


def main(
    model: Annotated[str, typer.Argument(help="Full-precision causal LM: a Hub id or a folder.")],
    output: Annotated[Path, typer.Option(help="Folder for the table and the methods' results.")] = Path("soar_table"),
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help='"FORMAT SCALE_RULE name=value ...", as in FP4Config; may be repeated.'),
    ] = None,
    activations: Annotated[
        Activations, typer.Option(help="a4: in the weights' format; a16: as they come.")
    ] = Activations.a4,
    tasks: Annotated[
        list[str] | None, typer.Option(help="Task, group, or folder of task YAMLs; may be repeated.")
    ] = None,
    metric: Annotated[str, typer.Option(help=f"Where a task has both: {' or '.join(METRICS)}.")] = METRICS[0],
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first questions of each task.")] = None,
    batch_size: Annotated[str, typer.Option(help="Rows of a forward pass, or auto.")] = "16",
    device: Annotated[str, typer.Option(help="As for torch.", show_default="cuda where there is one")] = "",
    force: Annotated[bool, typer.Option("--force", help="Run finished methods again.")] = False,
) -> None:
    """Measure the methods and bf16 on zero-shot tasks; print and write the table."""
    if importlib.util.find_spec("lm_eval") is None:
        raise typer.BadParameter("lm-eval, which asks the questions, is missing: pip install hf-mxfp4[eval]")
    if metric not in METRICS:
        raise typer.BadParameter(f"--metric {metric}; allowed: {', '.join(METRICS)}.")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default it takes
    name = Path(model).resolve().name if Path(model).is_dir() else model
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(highlight=False, soft_wrap=True)
    try:
        if getattr(AutoConfig.from_pretrained(model), "quantization_config", None):
            raise ValueError(f"{model} is quantized already; the full-precision model is needed.")
        names = [" ".join(method.split()) for method in methods or METHODS]
        configs = {BASE: None} | {method: config_of(method, activations) for method in names if method != BASE}
        manager, task_names = find_tasks(tasks or [*TASKS])
        jobs = plan(configs, activations, {"model": name, "tasks": task_names, "limit": limit}, output)
        records = {job.method: None if force else job.stored() for job in jobs}
    except (OSError, TypeError, ValueError) as error:  # OSError: a model or data that cannot be fetched
        raise typer.BadParameter(str(error)) from error

    versions = {package.__name__: package.__version__ for package in (hf_mxfp4, torch, transformers)}
    versions |= {"lm_eval": importlib.metadata.version("lm_eval"), "python": platform.python_version()}
    for number, job in enumerate(jobs, 1):
        step = f"[{number}/{len(jobs)}] {job.method}"
        if records[job.method]:
            console.print(f"{step}: finished earlier", markup=False)
            continue
        console.print(f"{step}: running", markup=False)
        start = time.perf_counter()
        found = evaluate(model, job.config, manager, task_names, limit, batch_size, device)
        seconds = round(time.perf_counter() - start, 1)
        records[job.method] = {"request": job.request, **found, "versions": versions, "seconds": seconds}
        write(job.path, json.dumps(records[job.method], indent=2) + "\n")
        gc.collect()  # the model and lm-eval's view of it refer to each other
        torch.cuda.empty_cache()

    about = {"model": name, "activations": activations.value, "limit": limit, "device": device}
    about |= {"date": datetime.date.today().isoformat(), "versions": versions}
    rows = summarize(records, metric)
    table = as_markdown(rows, about)
    write(output / f"accuracy_{activations.value}.json", json.dumps({**about, "methods": rows}, indent=2) + "\n")
    write(output / f"accuracy_{activations.value}.md", table)
    console.print(f"\n{table}\nwrote {output / f'accuracy_{activations.value}'}.md and .json", markup=False)


if __name__ == "__main__":
    typer.run(main)
