# SPDX-License-Identifier: Apache-2.0
"""What scripts/benchmark_kernels.py is held to: targets, which of them hold, and what limits those that do not."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from kernel_peers import BASELINE, OURS

LARGE, MEDIUM, SMALL = (45e6, math.inf), (16e6, 45e6), (0, 9e6)  # weights of a layer: MLP of 8B; MLP of 3B, q; rest
BANDWIDTH, SEARCH, LAUNCH = "the machine's bandwidth", "100 ms for 6.95e9 weights (8B)", "15 us over bf16"
FASTEST = "the fastest bf16 run"


class Target(NamedTuple):
    """At least `minimum` times as fast as `base`, in every row of `regime` that fits.

    Attributes:
        base: another contender of the row; or `BANDWIDTH` (the figure is the achieved fraction of it), `SEARCH` or
            `LAUNCH` (what is allowed over what was measured), `FASTEST` (of all variants, for ours likewise).
        tokens: first and last number of tokens.
        weights: least and most N * K.
        shape: only this (N, K).
        threads: of a CPU row; 0 for any.
    """

    regime: str
    contender: str
    minimum: float
    base: str = BASELINE
    tokens: tuple[int, float] = (0, math.inf)
    weights: tuple[float, float] = (0, math.inf)
    shape: tuple[int, ...] = ()
    threads: int = 0
    layer: str = ""

    @property
    def name(self) -> str:
        low, high = self.tokens
        tokens = f"M={low}..{high:.0f}" if high < math.inf else f"M>={low}"
        tokens = f"M={low}" if low == high else "" if self.tokens == (0, math.inf) else tokens
        sizes = {LARGE: "MLP of 8B", MEDIUM: "16-45M weights", SMALL: "small layers"}
        what = [sizes.get(self.weights, ""), "x".join(map(str, self.shape)), self.layer]
        what += [tokens, f"{self.threads} thread" if self.threads else ""]
        return ", ".join(filter(None, [self.regime, self.contender, *what]))

    def fits(self, row: dict) -> bool:
        shape = tuple(row["shape"])
        return (
            row["regime"] == self.regime
            and self.tokens[0] <= row["tokens"] <= self.tokens[1]
            and self.weights[0] <= math.prod(shape[:2]) <= self.weights[1]
            and self.shape in ((), shape)
            and self.threads in (0, row["threads"])
            and self.layer in row["layer"]
        )

    def value(self, row: dict, machine: dict) -> float | None:
        """The figure of a row, or `None` if it has none."""
        times = row["times"]
        if self.base == FASTEST:
            own, base = ([t["us"] for n, t in times.items() if n.startswith(w)] for w in (self.contender, BASELINE))
            return min(base) / min(own) if own and base else None
        if self.contender not in times:
            return None
        own = times[self.contender]["us"]
        if self.base == BANDWIDTH:
            return row["bytes"][self.contender] / (1e-6 * own) / machine["bandwidth"]
        if self.base == SEARCH:
            return 1e5 / (own * 6.95e9 / math.prod(row["shape"]))
        if self.base == LAUNCH:
            return 15 / max(0.1, own - times[BASELINE]["us"])
        if self.base == row["baseline"]:  # measured within rounds
            found = row["ratios"].get(self.contender)
            return found and found["us"]
        return times[self.base]["us"] / own if self.base in times else None


def _targets() -> Iterator[Target]:
    def both(regime: str, mxfp4: float, nvfp4: float, **more) -> Iterator[Target]:
        yield Target(regime, "mxfp4", mxfp4, **more)
        yield Target(regime, "nvfp4", nvfp4, **more)

    yield from both("decode", 2.7, 2.5, tokens=(1, 16), weights=LARGE)
    yield from both("decode", 1.9, 1.8, tokens=(1, 16), weights=MEDIUM)
    yield from both("decode", 1.2, 1.2, tokens=(1, 16), weights=SMALL)
    for tokens, ratio in ((32, 2.3), (64, 1.6), (128, 1.05), (256, 0.8)):
        yield from both("batch", ratio, ratio, tokens=(tokens, tokens), weights=LARGE)
    for low, high, ratio in ((512, 512, 0.72), (1024, 1024, 0.8), (2048, 2048, 0.88), (4096, math.inf, 0.93)):
        yield from both("prefill", ratio, ratio, tokens=(low, high), weights=LARGE)
    shape = (12288, 4096)
    for base, ratio, last in (
        ("gemlite mxfp4", 1.7, 16),
        ("bitsandbytes nf4", 1.2, 7),
        ("dequantize, matmul", 6.0, 16),
    ):
        yield Target("decode", "mxfp4", ratio, base, tokens=(1, last), shape=shape)
    yield Target("batch", "mxfp4", 3.0, "bitsandbytes nf4", tokens=(33, 128), shape=shape)
    yield from both("backward", 0.7, 0.7, tokens=(1, 512))
    yield from both("backward", 0.88, 0.88, tokens=(2048, math.inf))
    yield from both("LoRA step", 0.9, 0.9, tokens=(4096, math.inf))
    for low, high, base, ratio in (
        (1, 1, "grouped_mm", 1.8),
        (1, 1, "batched_mm", 4.0),
        (16, 256, "grouped_mm", 2.5),
    ):
        yield from both("experts", ratio, ratio, base=base, tokens=(low, high))
    for name in OURS:
        yield Target("quantize", f"{name} amax", 0.6, BANDWIDTH)
        yield Target("quantize", f"{name} soar", 1.0, SEARCH)
        yield Target("launch", name, 1.0, LAUNCH)
    for model, ratio in (("Qwen3-8B", 1.9), ("Qwen2.5-3B", 1.5)):
        for name in OURS:
            yield Target("end to end", name, ratio, FASTEST, layer=model)
    for shape in ((11008, 2048), (4096, 4096)):
        for tokens, ratio in ((1, 3.5), (8, 2.0), (128, 0.78)):
            yield from both("cpu", ratio, ratio, tokens=(tokens, tokens), shape=shape, threads=1)
        yield Target("cpu", "mxfp4", 1.2, "bitsandbytes nf4", tokens=(1, 1), shape=shape, threads=1)


TARGETS = tuple(_targets())


class Outcome(NamedTuple):
    """What became of a target: the worst and the median of its rows' figures, the key of the worst row, and for a miss
    what limits that one."""

    target: Target
    held: bool
    worst: float
    median: float
    key: str
    limit: str


def evaluate(rows: dict[str, dict], machine: dict, static: dict[str, float] | None = None) -> list[Outcome]:
    """Outcomes of the targets that something was measured for; the worst row decides.

    Args:
        rows: by key.
        machine: of `timing.machine`.
        static: instructions per weight by format, of kernels compiled for this GPU; see `limit`.
    """
    found = []
    for target in TARGETS:
        values = {
            key: value for key, row in rows.items() if target.fits(row) and (value := target.value(row, machine))
        }
        if not values:
            continue
        worst = min(values, key=values.get)
        median = sorted(values.values())[len(values) // 2]
        held = values[worst] >= target.minimum
        why = "" if held else limit(rows[worst], target.contender, machine, static or {})
        found.append(Outcome(target, held, values[worst], median, worst, why))
    return found


def limit(row: dict, contender: str, machine: dict, static: dict[str, float]) -> str:
    """What bounds a measured time, as far as a run can tell: the largest of the times that bytes, products, decoding
    instructions and the launch need at least, and how much of the measured time it makes up."""
    own = min(times["us"] for name, times in row["times"].items() if name.startswith(contender))
    floors: dict[str, tuple[float, str]] = {}
    if contender in row["bytes"]:
        bandwidth = row["bytes"][contender] / (1e-6 * own)
        note = f"{bandwidth / 1e9:.0f} of {machine['bandwidth'] / 1e9:.0f} GB/s"
        floors["bytes"] = (1e6 * row["bytes"][contender] / machine["bandwidth"], note)
    if row["flops"]:
        note = f"{row['flops'] / own / 1e6:.3g} of {machine['flops'] / 1e12:.3g} TFLOP/s"
        floors["products"] = (1e6 * row["flops"] / machine["flops"], note)
    if "launch_us" in machine:
        floors["launch"] = (machine["launch_us"], f"{machine['launch_us']:.1f} us in a graph")
    per_weight = static.get(contender) if row["tokens"] <= 16 and len(row["shape"]) == 2 else None
    if per_weight and "issue" in machine:
        us = 1e6 * per_weight * math.prod(row["shape"]) / 32 / machine["issue"]
        floors["instructions"] = (us, f"{per_weight:.2f} a weight as compiled")
    if not floors:
        return "the host: no kernel's time is in it"
    name, (needed, note) = max(floors.items(), key=lambda item: item[1][0])
    others = "; ".join(f"{n} {us:.1f} us" for n, (us, _) in floors.items() if n != name)
    rest = max(0.0, 1 - needed / own)
    return f"{name} need {needed:.1f} of {own:.1f} us ({note}; {others}); {100 * rest:.0f} % is none of these alone"


def static_instructions(table: dict, capability: str) -> dict[str, float]:
    """Instructions per weight of a product of few tokens, by format, from kernels_static.json; `capability` sm_XY."""
    rows = table.get("targets", {}).get(capability.replace("sm_", "cuda:"), {})
    counted = {fmt: rows.get(f"linear {fmt} tokens=1 experts=1 bf16", {}).get("sass_per_weight") for fmt in OURS}
    return {fmt: float(value) for fmt, value in counted.items() if value}
