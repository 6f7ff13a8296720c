# SPDX-License-Identifier: Apache-2.0
"""Quantize the bundled language model to FP4 in seven ways and show what each costs and saves.

Prints one table (size, weight error, KL divergence to bf16, perplexity on text the model never saw), reloads the saved
NVFP4 model and lets it write. Everything is left in `demo_output/`: the checkpoints, a chart (`demo.png`) and the
figures (`demo.json`).
"""

import argparse
import importlib.util
import json
import platform
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mxfp4
from demo_data import HELD_OUT_MODULES, Problem, held_out_stream
from hf_mxfp4 import FP4Config
from hf_mxfp4.evaluation import Scores, bits_per_weight, score, spread_windows, weight_error

SEQUENCE = 256  # predicted tokens of a window
CODE_PROMPT = 'class Stack:\n    """A stack of items."""\n\n    def __init__(self'
PROBLEMS = (Problem(37, "+", 58), Problem(64, "+", 29), Problem(37, "-", 18))  # all but the first held out of training
PALETTE = {"bf16": "#8a8a8a", "NVFP4": "#4c9a2a", "MXFP4": "#2b6cb0"}


class Method(NamedTuple):
    """A row of the table: its name, the folder its checkpoint is saved in, and how it is made (`None`: bf16)."""

    label: str
    folder: str
    config: FP4Config | None


BASE = Method("bf16", "bf16", None)
SHOWN = Method("NVFP4 soar", "nvfp4", FP4Config(format="nvfp4", scale_rule="soar"))  # reloaded, writes the sample
CORRECTED = FP4Config(format="mxfp4", macro_block="search", outlier_fallback=0.005, error_feedback=True)
METHODS = (
    BASE,
    Method("NVFP4 amax", "nvfp4-amax", FP4Config(format="nvfp4", scale_rule="amax")),
    Method("NVFP4 four_over_six", "nvfp4-four-over-six", FP4Config(format="nvfp4", scale_rule="four_over_six")),
    SHOWN,
    Method("NVFP4 + feedback", "nvfp4-feedback", FP4Config(error_feedback=True)),
    Method("MXFP4 amax", "mxfp4-amax", FP4Config(format="mxfp4", scale_rule="amax")),
    Method("MXFP4 soar", "mxfp4", FP4Config(format="mxfp4", scale_rule="soar")),
    Method("MXFP4 corrected", "mxfp4-corrected", CORRECTED),
)


def parse_arguments() -> argparse.Namespace:
    """Options of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bundled = Path(__file__).resolve().parent / "demo_lm"
    parser.add_argument("--model", type=Path, default=bundled, metavar="DIR", help="checkpoint (default: bundled)")
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="held-out tokens (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2048 tokens and a short sample")
    options = parser.parse_args()
    if options.quick:
        options.tokens = min(options.tokens, 2048)
    if options.tokens < 2 * SEQUENCE:
        parser.error(f"--tokens {options.tokens}: at least {2 * SEQUENCE} (two windows) are needed for error bars.")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json there. Name the folder of a saved causal LM.")
    if "quantization_config" in json.loads((options.model / "config.json").read_text(encoding="utf-8")):
        parser.error(f"--model {options.model} is quantized already; the original full-precision model is needed.")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib, which draws the chart, is missing. Run `pip install hf-mxfp4[plot]`.")
    return options


def load(folder: Path, config: FP4Config | None = None) -> transformers.PreTrainedModel:
    """A causal LM from a folder: bf16, packed while it loads, or as it was saved."""
    # transformers takes an explicit None as "forget the checkpoint's own quantization_config".
    quantization = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **quantization).eval()


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all files of a checkpoint: weights, config, tokenizer."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def figures(method: Method, models: dict, all_scores: dict[str, Scores], output: Path) -> dict:
    """One row of the table; keys name the units. `*_error` is a standard error over windows."""
    model, scores, packed = models[method.label], all_scores[method.label], method is not BASE
    increase = scores.perplexity_increase(all_scores[BASE.label])
    return {
        "method": method.label,
        "checkpoint": method.folder,
        "bits_per_weight": bits_per_weight(model) if packed else 16.0,
        "bytes": bytes_on_disk(output / method.folder),
        "weight_error": weight_error(model, models[BASE.label]) if packed else 0.0,
        "kl_nats_per_token": scores.kl.mean,
        "kl_error": scores.kl.error,
        "perplexity": scores.perplexity.mean,
        "perplexity_error": scores.perplexity.error,
        "perplexity_increase_percent": 100 * increase.mean,
        "perplexity_increase_error": 100 * increase.error,
    }


def make_models(source: Path, tokenizer, output: Path, progress: Progress) -> dict[str, transformers.PreTrainedModel]:
    """The model of each method by label, quantized while it loads and saved under `output`."""
    models = {}
    for method in progress.track(METHODS, description="quantizing"):
        models[method.label] = load(source, method.config)
        for saved in (models[method.label], tokenizer):
            saved.save_pretrained(output / method.folder)
    return models


def measure(models: dict, rows: torch.Tensor, output: Path, progress: Progress) -> list[dict]:
    """The rows of the table, from token windows int64 `[W, S + 1]`."""
    bar = progress.add_task("scoring windows", total=len(rows) * len(models))
    scores = score(models, BASE.label, rows, advance=lambda count: progress.advance(bar, count))
    return [figures(method, models, scores, output) for method in METHODS]


def render(table: list[dict], name: str, tokens: int) -> Table:
    """The table as printed; it fits 80 columns."""
    shown = Table(
        title=f"FP4 against bf16: {name}, {tokens:,} held-out tokens",
        caption="bytes: all files, embeddings in bf16. weight error: squared, relative, of packed\n"
        "weights. ±: standard error over windows; increase: over bf16, window by window.",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown.add_column("\nmethod")
    headers = ("bits/\nweight", "bytes\non disk", "weight\nerror", "KL to bf16\n(nats/token)", "held-out\nperplex.")
    for header in (*headers, "increase\n(%)"):
        shown.add_column(header, justify="right")
    for row in table:
        measured = (
            f"{row['weight_error']:.4f}",
            f"{row['kl_nats_per_token']:.4f} ±{row['kl_error']:.4f}",
            f"{row['perplexity_increase_percent']:+.2f} ±{row['perplexity_increase_error']:.2f}",
        )
        error, kl, increase = measured if row["bits_per_weight"] < 16 else ("", "", "")
        bits, perplexity = f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.3f}"
        style = "bold" if row["method"] == SHOWN.label else None
        shown.add_row(row["method"], bits, f"{row['bytes']:,}", error, kl, perplexity, increase, style=style)
    return shown


@torch.no_grad()
def same_logits(first, second, rows: torch.Tensor) -> bool:
    """Whether two models give the same logits bit for bit on token ids int64 `[W, S]`."""
    return torch.equal(first(input_ids=rows).logits, second(input_ids=rows).logits)


def write_samples(model, tokenizer, tokens: int, console: Console) -> list[dict]:
    """Print and return what the model writes, greedily, after the prompts."""
    samples = []
    for prompt, answer in [(CODE_PROMPT, None), *((problem.prompt, problem.answer) for problem in PROBLEMS)]:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=8 if answer else tokens, do_sample=False)
        written = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        if answer is None:
            verdict = "\n"
        else:
            written = written.split("\n")[0]
            verdict = "  right" if written == answer else f"  wrong: {answer}"
        console.print(Text.assemble((prompt, "dim"), (written, "bold"), (verdict, "dim")))
        samples.append({"prompt": prompt, "written": written, "expected": answer})
    return samples


def draw(table: list[dict], name: str, path: Path) -> None:
    """Bar chart of KL divergence and checkpoint size for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    labels = [row["method"] for row in table]
    colors = [PALETTE[label.split()[0]] for label in labels]
    divergences, errors = [row["kl_nats_per_token"] for row in table], [row["kl_error"] for row in table]
    sizes = [row["bytes"] / 1e6 for row in table]
    left.barh(labels, divergences, xerr=errors, color=colors, error_kw={"ecolor": "#333333", "capsize": 3})
    right.barh(labels, sizes, color=colors)
    for y, (divergence, error, size) in enumerate(zip(divergences, errors, sizes, strict=True)):
        left.text(divergence + error + 0.015 * max(divergences), y, f"{divergence:.4f}", va="center")
        right.text(size + 0.015 * max(sizes), y, f"{size:.2f}", va="center")
    left.set(title="Divergence from bf16 (lower is better)", xlabel="KL divergence ± standard error (nats per token)")
    right.set(title="Checkpoint on disk", xlabel="size (MB, 10⁶ bytes)")
    left.invert_yaxis()
    for axes in (left, right):
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{name} quantized to FP4 with hf_mxfp4 {hf_mxfp4.__version__}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    """Run the demo; the exit status is 1 if the reloaded model differs from the one that was saved."""
    started = time.perf_counter()
    options = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = spread_windows(held_out_stream(tokenizer), options.tokens, SEQUENCE)
    name, tokens = options.model.resolve().name, rows[:, 1:].numel()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        models = make_models(options.model, tokenizer, options.output, progress)
        table = measure(models, rows, options.output, progress)
    console.print(render(table, name, tokens))

    reloaded = load(options.output / SHOWN.folder)
    equal = same_logits(models[SHOWN.label], reloaded, rows[:2])
    verdict = "equal bit for bit" if equal else "[red]different[/]: please report this as a bug"
    console.print(f"\n{SHOWN.label}, saved and loaded again: logits are {verdict}. It writes:\n")
    samples = write_samples(reloaded, tokenizer, 16 if options.quick else 64, console)

    draw(table, name, options.output / "demo.png")
    versions = {package.__name__: package.__version__ for package in (hf_mxfp4, torch, transformers)}
    report = {
        "model": name,
        "tokens": tokens,
        "text": [f"{module} of Python {platform.python_version()}" for module in HELD_OUT_MODULES],
        "methods": table,
        "reloaded": {"method": SHOWN.label, "logits_equal": equal},
        "samples": samples,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"python": platform.python_version(), **versions},
    }
    (options.output / "demo.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"\n{options.output}: checkpoints, demo.png, demo.json ({report['seconds']:.0f} s)")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
