# SPDX-License-Identifier: Apache-2.0
"""Markdown and roofline of what scripts/benchmark_kernels.py measured."""

from collections.abc import Iterator
from pathlib import Path

from kernel_peers import BASELINE
from kernel_targets import Outcome

COLORS = {BASELINE: "#8a8a8a", "mxfp4": "#2b6cb0", "nvfp4": "#4c9a2a", "dequantize, matmul": "#b7791f"}
OTHERS = ("#97266d", "#c05621", "#6b46c1", "#2c7a7b")


def _table(header: list[str], lines: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|---" + "|---:" * (len(header) - 1) + "|"
    yield from ("| " + " | ".join(line) + " |" for line in lines)


def target_lines(outcomes: list[Outcome]) -> list[list[str]]:
    """Rows of the table of targets."""
    return [
        [
            o.target.name,
            "held" if o.held else "**missed**",
            f"{o.target.minimum:g}x {o.target.base}",
            f"{o.worst:.2f} ({o.key.partition(': ')[2]}); median {o.median:.2f}",
            o.limit,
        ]
        for o in outcomes
    ]


def cell(row: dict, name: str) -> str:
    """Time with its quartiles, ratio, and for packed weights the bandwidth; or why there is none."""
    if name in row["failed"]:
        return "failed"
    if not row["gate"].get(name, {"passed": True})["passed"]:
        return "wrong"
    if name not in row["times"]:
        return ""
    times, ratio = row["times"][name], row["ratios"].get(name)
    text = f"{times['us']:.4g} ({times['low']:.4g}-{times['high']:.4g})"
    if ratio and name != row["baseline"]:
        text += f" **{ratio['us']:.2f}x**"
    if name in row["bytes"] and row["flops"] < 4e3 * row["bytes"][name]:  # else bytes say nothing
        text += f" {row['bytes'][name] / times['us'] / 1e3:.0f} GB/s"
    return text


def regime_lines(regime: str, rows: list[dict]) -> Iterator[str]:
    """The section of a regime."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["times"], *row["failed"], *row["gate"])))
    yield from ("", f"## {regime}", "")
    if regime == "end to end":
        yield from _decode_lines(rows)
        return
    lines, layers = [], [row["layer"] for row in rows]
    for row in sorted(rows, key=lambda row: (layers.index(row["layer"]), row["threads"], row["tokens"])):
        threads = f", {row['threads']} thr." if row["threads"] else ""
        label = f"{row['layer']} {'x'.join(map(str, row['shape']))}, M={row['tokens']}{threads}"
        lines.append([label, *(cell(row, name) for name in names)])
    yield from _table(["layer", *names], lines)


def _decode_lines(rows: list[dict]) -> Iterator[str]:
    lines = []
    for row in rows:
        for name, times in row["times"].items():
            ratio = row["ratios"].get(name)
            spread = f"{1e6 / times['us']:.1f} ({1e6 / times['high']:.1f}-{1e6 / times['low']:.1f})"
            gigabytes = f"{row['bytes'][name] / 1e9:.2f}"
            threads = f", {row['threads']} thr." if row["threads"] else ""
            lines.append([row["layer"] + threads, name, spread, f"{ratio['us']:.2f}x" if ratio else "", gigabytes])
    yield from _table(["model", "weights, layers", "tokens/s", "over bf16", "GB read a token"], lines)


def as_markdown(report: dict, outcomes: list[Outcome]) -> str:
    """Everything measured, targets first."""
    machine, rows = report["machine"], report["rows"]
    held = sum(o.held for o in outcomes)
    lines = [
        f"# Kernel speed, {report['device']}",
        "",
        f"Made on {report['date']} by `{report['command']}` with "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + ".",
        "",
        f"Bandwidth {machine['bandwidth'] / 1e9:.1f} GB/s, bf16 product {machine['flops'] / 1e12:.2f} TFLOP/s"
        + (f", launch in a graph {machine['launch_us']:.2f} us" if "launch_us" in machine else "")
        + f". {report['how']}",
        "",
        "Times are microseconds a call: median (quartiles), **ratio to the baseline** (the first column; median of "
        "the ratios within rounds), bytes of weight and activations over time. Contenders take turns; weights are "
        f"read in turn from copies that together are {report['caches']} times the last cache. Who fails the gate "
        "(error against float64 of the dequantized weights at most that of torch's bf16 product) is not timed.",
        "",
        f"## Targets: {held} of {len(outcomes)} held",
        "",
    ]
    if outcomes:
        header = ["target", "", "at least", "worst case", "what limits it"]
        lines += _table(header, target_lines(outcomes))
    else:
        lines.append("None applies to what was measured.")
    for regime in dict.fromkeys(row["regime"] for row in rows.values()):
        lines += regime_lines(regime, [row for row in rows.values() if row["regime"] == regime])
    failures = [(key, name, why) for key, row in rows.items() for name, why in row["failed"].items()]
    if failures:
        lines += ["", "## Failed", "", *(f"- {key}, {name}: {why}" for key, name, why in failures)]
    left_out = report["left_out"]
    lines += ["", "## Left out for lack of time", "", ", ".join(left_out) + "." if left_out else "Nothing."]
    return "\n".join(lines) + "\n"


# --- roofline --------------------------------------------------------------------------------------------------------


def points(rows: dict[str, dict]) -> dict[str, list[tuple[float, float]]]:
    """(FLOP a byte, FLOP/s) by contender, of all linear layers."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows.values():
        if row["regime"] not in ("decode", "batch", "prefill", "cpu"):
            continue
        for name, times in row["times"].items():
            intensity, speed = row["flops"] / row["bytes"][name], row["flops"] / (1e-6 * times["us"])
            found.setdefault(name, []).append((intensity, speed))
    return found


def speedups(rows: dict[str, dict]) -> dict[str, list[tuple[int, float]]]:
    """(M, median ratio over layers to bf16) by contender; on a CPU with one thread."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows.values():
        if row["regime"] in ("decode", "batch", "prefill", "cpu") and row["threads"] in (0, 1):
            for name, ratio in row["ratios"].items():
                found.setdefault(name, {}).setdefault(row["tokens"], []).append(ratio["us"])
    return {
        name: [(m, sorted(values)[len(values) // 2]) for m, values in sorted(by_tokens.items())]
        for name, by_tokens in found.items()
    }


def draw(report: dict, path: Path) -> None:
    """Roofline of the linear layers, and speed over bf16 by number of tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    machine, measured = report["machine"], points(report["rows"])
    spare = iter(OTHERS)
    colors = {name: COLORS.get(name) or next(spare, "#555555") for name in measured}
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    knee = machine["flops"] / machine["bandwidth"]
    ends = [x for values in measured.values() for x, _ in values] + [knee]
    span = [min(ends) / 2, knee, max(max(ends), knee) * 2]
    left.plot(
        span,
        [min(x * machine["bandwidth"], machine["flops"]) / 1e12 for x in span],
        color="black",
        linewidth=1,
        label=f"{machine['bandwidth'] / 1e9:.0f} GB/s, {machine['flops'] / 1e12:.3g} TFLOP/s (measured)",
    )
    for name, values in measured.items():
        xs, ys = zip(*values, strict=True)
        left.plot(xs, [y / 1e12 for y in ys], ".", color=colors[name], label=name, alpha=0.7)
    left.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s", title="Roofline")
    left.legend(fontsize=8)
    for name, values in speedups(report["rows"]).items():
        xs, ys = zip(*values, strict=True)
        right.plot(xs, ys, ".-", color=colors[name], label=name)
    tokens = sorted({row["tokens"] for row in report["rows"].values() if row["regime"] != "end to end"}) or [1]
    right.set(xscale="log", yscale="log", xlabel="tokens M", ylabel="times as fast as bf16 F.linear")
    right.set(title="Median over layers" + (", one thread" if report["device_type"] == "cpu" else ""))
    right.set_xticks(tokens, [str(m) for m in tokens], fontsize=8)
    ratios = [y for values in speedups(report["rows"]).values() for _, y in values] or [1.0]
    shown = [y for y in (0.1, 0.2, 0.5, 1, 2, 3, 4, 6, 10) if min(ratios) / 1.5 <= y <= max(ratios) * 1.5]
    right.set_yticks(shown, [f"{y:g}" for y in shown])
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_locator(NullLocator())
    right.grid(alpha=0.3)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"FP4 linear layers, {report['device']}")
    figure.savefig(path, dpi=130)
