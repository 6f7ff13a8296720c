# SPDX-License-Identifier: Apache-2.0
"""Where the error of a quantized weight comes from: the exact three-way decomposition, reports and a figure.

For a block with real scale s* = amax / 6, stored scale s, and Q the nearest E2M1 value (arXiv 2605.20402):

    e_scale = s Q(w/s) - s* Q(w/s*)         what rounding the scale did
    e_dead  = -w          where Q(w/s*) = 0   what the dead zone did
    e_grid  = s* Q(w/s*) - w  elsewhere       what the grid did

and e_scale + e_dead + e_grid = w_hat - w for every element. The parts are correlated, so their energies do not sum to
the energy of the error; the cosines are reported beside them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from hf_mxfp4.blocks import block_amax, round_magnitude, row_chunks
from hf_mxfp4.checkpoint_files import read_header
from hf_mxfp4.formats import FORMATS, MXFP4, BlockFormat, QuantizedTensor
from hf_mxfp4.outliers import Budget
from hf_mxfp4.recipe import Recipe
from hf_mxfp4.reference import dequantize
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions

PARTS = ("scale", "dead", "grid")
BINS, LOWEST, HIGHEST = 80, -0.6, 1.4  # of the histogram of s/s* - 1, in steps of 1/40
NOT_PACKED = r"embed|lm_head|norm|pooler"  # names of matrices that are not quantized by default


@dataclass
class Decomposition:
    """Sums over the elements of one or more weights; add two with `+`.

    Attributes:
        elements, blocks: how many.
        energy: sum of w^2.
        products: sums of products of parts, `{"scale": {"scale": ..., "dead": ..., "grid": ...}, ...}`.
        total: sum of (w_hat - w)^2.
        zeroed: elements in the dead zone, Q(w/s*) = 0 and w != 0.
        overshoot: sum over blocks of s/s* - 1.
        histogram: counts of s/s* - 1 in `BINS` bins.
    """

    elements: int = 0
    blocks: int = 0
    energy: float = 0.0
    products: dict[str, dict[str, float]] = field(
        default_factory=lambda: {a: dict.fromkeys(PARTS, 0.0) for a in PARTS}
    )
    total: float = 0.0
    zeroed: int = 0
    overshoot: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)

    def __add__(self, other: Decomposition) -> Decomposition:
        return Decomposition(
            self.elements + other.elements,
            self.blocks + other.blocks,
            self.energy + other.energy,
            {a: {b: self.products[a][b] + other.products[a][b] for b in PARTS} for a in PARTS},
            self.total + other.total,
            self.zeroed + other.zeroed,
            self.overshoot + other.overshoot,
            [a + b for a, b in zip(self.histogram, other.histogram, strict=True)],
        )

    def summary(self) -> dict[str, float]:
        """Energies relative to that of the weight, cosines between parts, mean overshoot, fraction zeroed."""
        energy = self.energy or 1.0
        out = {part: self.products[part][part] / energy for part in PARTS} | {"total": self.total / energy}
        for a, b in (("scale", "dead"), ("scale", "grid"), ("dead", "grid")):
            norm = math.sqrt(self.products[a][a] * self.products[b][b])
            out[f"cos_{a}_{b}"] = self.products[a][b] / norm if norm else 0.0
        return out | {"overshoot": self.overshoot / max(1, self.blocks), "zeroed": self.zeroed / max(1, self.elements)}


def error_parts(weight: torch.Tensor, scale: torch.Tensor, block_size: int) -> tuple[torch.Tensor, ...]:
    """The three parts of the error.

    Args:
        weight: `[N, K]`, any float dtype.
        scale: real block scales (tensor scale multiplied in), float32 `[N, K/B]`, > 0.
        block_size: B.

    Returns:
        e_scale, e_dead, e_grid: float64 `[N, K/B, B]`; their sum is `w_hat - w`.
    """
    blocks = weight.to(torch.float32).unflatten(-1, (-1, block_size))
    ideal = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(min=2.0**-126)
    stored = _nearest(blocks, scale[..., None])
    best = _nearest(blocks, ideal)
    blocks = blocks.double()
    dead = torch.where(best == 0, -blocks, 0.0)
    grid = torch.where(best == 0, 0.0, best - blocks)
    return stored - best, dead, grid


def _nearest(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The representable value nearest to each weight, float64."""
    magnitude = round_magnitude(blocks.abs() / scale).double() * scale.double()
    return magnitude.copysign(blocks.double())


def decompose(weight: torch.Tensor, scale: torch.Tensor, block_size: int) -> Decomposition:
    """Decompose the error of rounding `weight` `[N, K]` to nearest with real block scales `[N, K/B]`."""
    out = Decomposition()
    for rows in row_chunks(weight):
        parts = dict(zip(PARTS, error_parts(weight[rows], scale[rows], block_size), strict=True))
        blocks = weight[rows].double().unflatten(-1, (-1, block_size))
        amax = blocks.abs().amax(-1)
        live = amax > 0
        overshoot = (scale[rows].double() / (amax / 6))[live] - 1
        out += Decomposition(
            blocks.numel(),
            int(live.sum()),
            float(blocks.square().sum()),
            {a: {b: float((parts[a] * parts[b]).sum()) for b in PARTS} for a in PARTS},
            float(sum(parts.values()).square().sum()),
            int((parts["dead"] != 0).sum()),
            float(overshoot.sum()),
            torch.histc(overshoot.clamp(LOWEST, HIGHEST), BINS, LOWEST, HIGHEST).int().tolist(),
        )
    return out


def rule_scales(weight, fmt: BlockFormat, rule: str, options: ScaleOptions = ScaleOptions()) -> torch.Tensor:
    """Real block scales `[N, K/B]` (float32) that a scale rule stores for `weight` `[N, K]`."""
    scales = SCALE_RULES[rule].function(weight, fmt, options, None)
    scale = fmt.decode_scale(scales.scale)
    return scale if scales.global_scale is None else scale * scales.global_scale


def rounded_up_scales(weight: torch.Tensor, block_size: int, mantissa_bits: int) -> torch.Tensor:
    """s* rounded up to `mantissa_bits` bits after the leading one: 0 is E8M0 with `ceil`, 23 is float32."""
    ideal = (block_amax(weight, block_size) / 6).clamp(min=2.0**-126)
    drop = 23 - mantissa_bits
    bits = ideal.view(torch.int32)
    return (((bits + (1 << drop) - 1) >> drop) << drop).view(torch.float32)


def find_matrices(folder: str | Path, block_size: int, skip: str = NOT_PACKED) -> Matrices:
    """The floating-point matrices `[N, K]` in a folder's safetensors files, from headers alone.

    Args:
        folder: read without its subfolders.
        block_size: matrices whose K is not a multiple of it are left out.
        skip: regex; matrices whose name it is found in are left out.
    """
    found = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, (dtype, shape, *_) in sorted(read_header(path).items(), key=lambda item: _natural(item[0])):
            matrix = len(shape) == 2 and shape[1] % block_size == 0 and dtype in ("BF16", "F16", "F32")
            if matrix and not re.search(skip, name):
                found.append((path, name))
    return Matrices(found)


def _natural(name: str) -> list:
    """Sorts `layers.2` before `layers.10`."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Matrices:
    """Matrices in files, as `(file, name)`; iterating gives names and matrices, loaded one at a time."""

    def __init__(self, found: list[tuple[Path, str]]):
        self.found = found

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, name in self.found:
            with safe_open(path, "pt") as file:
                yield name, file.get_tensor(name)


@dataclass
class Report:
    """The decomposition of each matrix of a model, and of all together.

    Attributes:
        format, rule: what was analyzed.
        tensors: by name.
        precision: all matrices under s* rounded up to 0, 1, ... mantissa bits, by the number of bits.
        corrections: sum of (w_hat - w)^2 of each matrix under each correction, those before it included.
    """

    format: str
    rule: str
    tensors: dict[str, Decomposition] = field(default_factory=dict)
    precision: dict[int, Decomposition] = field(default_factory=dict)
    corrections: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def overall(self) -> Decomposition:
        return sum(self.tensors.values(), Decomposition())

    def corrected(self, name: str | None = None) -> dict[str, float]:
        """Error under each correction relative to the weight's energy: of one matrix, or of all together."""
        names = list(self.tensors) if name is None else [name]
        energy = sum(self.tensors[n].energy for n in names) or 1.0
        return {step: sum(errors[n] for n in names) / energy for step, errors in self.corrections.items()}

    def to_dict(self) -> dict:
        """For JSON: a summary overall, for each tensor, and for each scale precision."""
        return {
            "format": self.format,
            "rule": self.rule,
            "overall": self.overall.summary() | {"corrections": self.corrected()},
            "tensors": {n: part.summary() | {"corrections": self.corrected(n)} for n, part in self.tensors.items()},
            "scale_precision": {bits: part.summary() for bits, part in self.precision.items()},
        }


def analyze(
    matrices: Iterable, fmt: BlockFormat = MXFP4, rule: str = "ceil", precisions=(0, 1, 2, 3, 4, 6, 8, 23)
) -> Report:
    """Decompose the error of every `(name, weight [N, K])` of `matrices` under a format and a scale rule."""
    report = Report(fmt.name, rule, {}, {bits: Decomposition() for bits in precisions})
    for name, weight in matrices:
        report.tensors[name] = decompose(weight, rule_scales(weight, fmt, rule), fmt.block_size)
        for bits in precisions:
            scale = rounded_up_scales(weight, fmt.block_size, bits)
            report.precision[bits] += decompose(weight, scale, fmt.block_size)
    return report


def correct(report: Report, matrices: Iterable, outliers: float = 0.005) -> None:
    """Add to a report what each correction leaves of the error, in place.

    One after the other: the best block scales (`soar`), searched macro-blocks (MXFP4), and a fraction of all weights
    kept as outliers, under one budget.

    Args:
        matrices: those the report was made of; gone through twice.
    """
    recipe = Recipe(FORMATS[report.format], "soar", ScaleOptions())
    recipes = {"soar": recipe}
    if not recipe.format.has_global_scale:
        recipes["+ macro-blocks"] = recipe = recipe._replace(macro_block="search")
    last = f"+ {100 * outliers:g} % outliers"
    report.corrections = {step: {} for step in (*recipes, last)}
    budget = Budget(outliers, report.overall.elements)
    for name, weight in matrices:
        for step, each in recipes.items():
            report.corrections[step][name] = _squared_error(weight, each.quantize(weight, name))
        recipe.count_gains(budget, weight)
    for name, weight in matrices:
        keep = recipe.outliers(weight, budget.threshold)
        report.corrections[last][name] = _squared_error(weight, recipe.quantize(weight, name, keep=keep))


def _squared_error(weight: torch.Tensor, quantized: QuantizedTensor) -> float:
    return float((dequantize(quantized, torch.float32).double() - weight.double()).square().sum())


def plot(report: Report, path: str | Path) -> None:
    """Draw a report as a PNG of four panels (needs matplotlib: `pip install hf-mxfp4[plot]`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install hf-mxfp4[plot]") from error
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(f"Where the error of {report.format} with {report.rule} scales comes from")
    (by_tensor, cosines), (overshoot, precision) = figure.subplots(2, 2)
    rows = [part.summary() for part in report.tensors.values()]
    bottom = [0.0] * len(rows)
    for part in PARTS:
        heights = [row[part] for row in rows]
        by_tensor.bar(range(len(rows)), heights, bottom=bottom, width=1.0, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    by_tensor.plot(range(len(rows)), [row["total"] for row in rows], "k.", markersize=3, label="total error")
    after = [list(report.corrected(name).values())[-1:] for name in report.tensors]
    if any(after):
        by_tensor.plot(range(len(rows)), after, ".", color="#ffd24d", markersize=5, label="after corrections")
    by_tensor.set(title="Energy of the parts by tensor", xlabel="tensor, in file order", ylabel="energy / energy of w")
    by_tensor.set_ylim(top=1.3 * max([*bottom, 1e-9]))
    by_tensor.legend(loc="upper center", ncols=3)
    pairs = ("cos_scale_grid", "cos_scale_dead", "cos_dead_grid")
    cosines.boxplot([[row[pair] for row in rows] for pair in pairs])
    cosines.set_xticks(range(1, 4), [pair.removeprefix("cos_").replace("_", " and ") for pair in pairs])
    cosines.set(title="Cosines between parts, over tensors", ylabel="cosine", ylim=(-1, 1))
    cosines.axhline(0, color="grey", linewidth=0.5)
    _plot_overshoot(overshoot, report)
    bits = list(report.precision)
    for part in (*PARTS, "total"):
        values = [report.precision[b].summary()[part] for b in bits]
        style = "k.-" if part == "total" else ".-"
        precision.plot(range(len(bits)), values, style, label="total error" if part == "total" else part)
    precision.set_xticks(range(len(bits)), ["E8M0" if b == 0 else "float32" if b == 23 else str(b) for b in bits])
    precision.set(title="Error against scale precision", xlabel="mantissa bits", ylabel="energy / energy of w")
    precision.legend()
    figure.savefig(path, dpi=110)


def _plot_overshoot(axes, report: Report) -> None:
    """Histogram of s/s* - 1 against the law of `ceil` under uniform log-mantissas: 1 / (ln 2 (1 + x))."""
    width = (HIGHEST - LOWEST) / BINS
    histogram = report.overall.histogram
    total = sum(histogram) or 1
    centers = [LOWEST + (i + 0.5) * width for i in range(BINS)]
    axes.bar(centers, [count / total / width for count in histogram], width=width, label="blocks")
    law = [i / 100 for i in range(100)]
    mean = 1 / math.log(2) - 1
    axes.plot(law, [1 / (math.log(2) * (1 + x)) for x in law], "k-", label=f"uniform mantissa, mean {mean:.3f}")
    found = report.overall.summary()["overshoot"]
    axes.set(title=f"Overshoot of block scales, mean {found:.3f}", xlabel="s / s* - 1", ylabel="density")
    axes.legend()
