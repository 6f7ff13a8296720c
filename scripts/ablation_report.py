# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of `rl_ablation.py`, of the files of its runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

# 97.5 % quantiles of Student's t by degrees of freedom; the normal one above that.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
NOTES = "## What these runs show\n"
LAST = 10  # steps at the end whose reward is averaged
SMOOTH = 5  # steps of a running mean in the figure

Run = dict
Arms = dict[str, list[Run]]


def write(runs: list[Run], titles: dict[str, str], missing: list[str], command: str, out: Path) -> None:
    """Write `rl_ablation.json`, `.md` and `.png` into `out`; what somebody wrote under `NOTES` of the `.md` stays.

    Args:
        runs: what `ablation_run.run` returned, of one or more arms and seeds.
        titles: of arms, in the order of rows.
        missing: names of runs that are not there, to be named in the report.
    """
    by_arm = {arm: sorted((r for r in runs if r["arm"] == arm), key=lambda r: r["seed"]) for arm in titles}
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    report = {"command": command, "missing": missing, "runs": runs}
    old = out / "rl_ablation.md"
    _, _, notes = old.read_text(encoding="utf-8").partition(NOTES) if old.exists() else ("", "", "")
    text = markdown(by_arm, titles, missing, command) + (f"\n{NOTES}{notes}" if notes else "")
    files = {"json": json.dumps(report, indent=None) + "\n", "md": text}
    for suffix, text in files.items():
        (out / f"rl_ablation.{suffix}").write_text(text, encoding="utf-8")
    plot(by_arm, titles, out / "rl_ablation.png")


# --- numbers of a run ------------------------------------------------------------------------------------------------


def final_accuracy(run: Run) -> float:
    return run["evaluations"][-1]["accuracy"]


def mean_accuracy(run: Run) -> float:
    """Over the training, its start left out: how early a run learns."""
    return fmean(e["accuracy"] for e in run["evaluations"][1:])


def last_reward(run: Run) -> float:
    return fmean(run["curves"]["reward"][-LAST:])


def weight_error(run: Run) -> float:
    weights = run["probes"][0]["weights"]
    return 0.0 if weights is None else weights["policy"]["error"]


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    text = f"{fmean(values):.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text


def difference(runs: list[Run], others: list[Run], value: Callable[[Run], float]) -> str:
    """How much higher `value` is, paired by seed: mean, and the 95 % interval of Student's t."""
    other = {run["seed"]: value(run) for run in others}
    pairs = [value(run) - other[run["seed"]] for run in runs if run["seed"] in other]
    if len(pairs) < 2:
        return f"{fmean(pairs):+.3f}" if pairs else "–"
    half = _T.get(len(pairs) - 1, 1.96) * stdev(pairs) / math.sqrt(len(pairs))
    low, high = fmean(pairs) - half, fmean(pairs) + half
    sure = "**" if low > 0 or high < 0 else ""
    return f"{sure}{fmean(pairs):+.3f} [{low:+.3f}, {high:+.3f}]{sure}"


# --- tables ----------------------------------------------------------------------------------------------------------


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown; all columns but the first are numbers."""
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def markdown(by_arm: Arms, titles: dict[str, str], missing: list[str], command: str) -> str:
    any_run = next(iter(by_arm.values()))[0]
    settings, about = any_run["settings"], any_run["machine"]
    seeds = sorted({run["seed"] for runs in by_arm.values() for run in runs})
    devices = sorted({run["machine"]["device"] for runs in by_arm.values() for run in runs})
    every = [run["machine"]["versions"] for runs in by_arm.values() for run in runs]
    versions = ", ".join(f"{name} {' and '.join(sorted({each[name] for each in every}))}" for name in every[0])
    seconds = [run["seconds"] for runs in by_arm.values() for run in runs]
    lines = [
        "# LoRA and GRPO on quantized bases",
        "",
        f"`{command}`: {'; '.join(devices)}, {about['threads']} thread(s) a run; {versions}. "
        f"{fmean(seconds):.0f} s a run. Seeds: {', '.join(map(str, seeds))}.",
        "",
        f"Task: generated arithmetic, spelled with {settings['prefix']!r} before each problem, which the model never "
        f"saw; reward 1 for the exact answer. {settings['steps']} steps of {settings['prompts']} problems times "
        f"{settings['generations']} completions, AdamW {settings['learning_rate']:g}, LoRA of rank "
        f"{settings['rank']} on all linear layers. Accuracy: greedy, the same {settings['problems']} held-out "
        "problems for all. Arms of a seed start from the same adapter and see the same problems. ± is the standard "
        "deviation over seeds; brackets hold the 95 % interval of the mean difference, paired by seed, and are "
        "**bold** where it leaves out 0. No correction was made for looking at many differences: one "
        "of 20 intervals is bold by chance.",
        *([""] + [f"Runs that are missing: {', '.join(missing)}."] if missing else []),
        "",
        "## What was learned",
        "",
        *_learned(by_arm, titles),
        "",
        "## Configurations, and the gradient's error",
        "",
        "Relative error (and cosine) of the adapters' GRPO gradient against the bf16 base's, at the same adapter on "
        "the same completions, all adapters as one vector; AQN does not act on gradients. Other problems: the bf16 "
        "base's own gradient on as many other problems, before training: how much a gradient varies anyway. Of a "
        f"batch's {settings['prompts']} groups of completions only those with right and wrong answers tell something: "
        "2 to 4 of 16 with the demo model, so a batch is noisy.",
        "",
        *_gradients(by_arm, titles),
        "",
        *_weights(by_arm, titles),
        "",
        *_noise(by_arm),
    ]
    return "\n".join(lines) + "\n"


def _learned(by_arm: Arms, titles: dict[str, str]) -> list[str]:
    heads = ["", "seeds", "accuracy before", "after", "after, less bf16's", "after, less naive's", "after, merged"]
    heads += ["mean while training", f"reward, last {LAST}", "entropy before", "after", "KL after"]
    rows = []
    for arm, runs in by_arm.items():
        first, last = ([run["evaluations"][i] for run in runs] for i in (0, -1))
        others = [difference(runs, by_arm.get(base, []), final_accuracy) if arm != base else "–" for base in _BASES]
        cells = [spread([e["accuracy"] for e in first]), spread([e["accuracy"] for e in last]), *others]
        cells += [spread([r["merged_accuracy"] for r in runs])]
        cells += [spread([mean_accuracy(r) for r in runs]), spread([last_reward(r) for r in runs])]
        cells += [spread([e["entropy"] for e in first]), spread([e["entropy"] for e in last])]
        rows.append([titles[arm], str(len(runs)), *cells, spread([e["kl"] for e in last])])
    note = (
        "Merged: with the adapter merged into the base, which is then quantized again by its own rule. Entropy of the "
        "policy, and KL from the bf16 model before training to it, in nats per token: on completions that the bf16 "
        "model sampled before training."
    )
    return [*table(heads, rows), "", note]


_BASES = ("bf16", "naive")


def _gradients(by_arm: Arms, titles: dict[str, str]) -> list[str]:
    steps = _probe_steps(by_arm)
    heads = ["", "configuration", "bits/weight", "weight error", *(f"step {step}" for step in steps)]
    rows = []
    for arm, runs in by_arm.items():
        cells = [f"`{runs[0]['config']}`", f"{runs[0]['bits_per_weight']:.3f}", f"{weight_error(runs[0]):.5f}"]
        for i in range(len(steps)):
            errors, cosines = ([run["probes"][i]["gradient"][name] for run in runs] for name in _GRADIENT)
            cells.append(f"{spread(errors, 2)} ({fmean(cosines):.3f})")
        rows.append([titles[arm], *cells])
    runs = next(iter(by_arm.values()))
    errors, cosines = ([run["probes"][0]["other_problems"][name] for run in runs] for name in _GRADIENT)
    rows.append(
        ["other problems", "", "", "", f"{spread(errors, 2)} ({fmean(cosines):.3f})", *[""] * (len(steps) - 1)]
    )
    return table(heads, rows)


_GRADIENT = ("relative_error", "cosine")


def _weights(by_arm: Arms, titles: dict[str, str]) -> list[str]:
    heads = ["", "step", "scale", "dead zone", "grid", "cos(scale, grid)", "all parts", "outliers", "error"]
    heads += ["merge: change", "relative error", "cosine"]
    rows = []
    for arm, runs in by_arm.items():
        for i, step in enumerate(_probe_steps(by_arm)):
            found = [run["probes"][i]["weights"] for run in runs]
            if None in found:
                continue
            policy = {name: fmean(each["policy"][name] for each in found) for name in found[0]["policy"]}
            merge = {name: fmean(each["merge"][name] for each in found) for name in found[0]["merge"]}
            names = ("scale", "dead", "grid", "cos_scale_grid", "total", "kept", "error")
            cells = [f"{policy[name]:.5f}" if policy[name] > 1e-5 or not policy[name] else "<1e-5" for name in names]
            cells[3] = f"{policy['cos_scale_grid']:.2f}"
            cells += [f"{merge['change']:.4f}"]
            cells += [f"{merge[name]:.2f}" if merge["change"] else "–" for name in _GRADIENT]
            rows.append([titles[arm], str(step), *cells])
    if not rows:
        return []
    text = (
        "W is the bf16 weight with the adapter merged (W + BA), quantized by the arm's rule; energies are relative to "
        "that of W, means over seeds. The parts sum to the error element by element (checked in each run); their "
        "energies do not, as they are correlated. Outliers: what rounding them to 16 bits adds. Merge: the adapter "
        "merged into the packed weight instead, and quantized again: the size of the change it asks for (norm, "
        "relative to the weight), and the relative error and cosine of the change made."
    )
    return ["## Where the weights' error comes from", "", text, "", *table(heads, rows)]


def _noise(by_arm: Arms) -> list[str]:
    """Stages of AQN; nothing without an arm that has it."""
    noisy = [run for runs in by_arm.values() for run in runs if any(run["curves"]["sigma"])]
    if not noisy:
        return []
    stages: dict[float, list[float]] = {}
    for run in noisy:
        for sigma, changed in zip(run["curves"]["sigma"], run["curves"]["norms_changed"], strict=True):
            stages.setdefault(sigma, []).append(changed)
    rows = [["weights changed", *(f"{100 * fmean(changed):.0f} %" for changed in stages.values())]]
    text = (
        "Noise on the norms during rollouts, stage by stage, and the share of their weights that it changes: they are "
        "bf16, so most of a smaller noise is rounded away."
    )
    return ["## AQN", "", text, "", *table(["sigma", *(f"{sigma:.4f}" for sigma in stages)], rows)]


def _probe_steps(by_arm: Arms) -> list[int]:
    return [probe["step"] for probe in next(iter(by_arm.values()))[0]["probes"]]


# --- figure ----------------------------------------------------------------------------------------------------------


def plot(by_arm: Arms, titles: dict[str, str], path: Path) -> None:
    """Six panels: what was learned above, what quantization does below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (reward, accuracy, entropy), (kl, gradient, weights) = figure.subplots(2, 3)
    palette = ["#222222", "#d62728", "#ff9f1c", "#2a9d8f", "#8e5bd6", "#1f77b4", "#7fb069", "#c77d9b"]
    colors = dict(zip(titles, palette, strict=False))
    for arm, runs in by_arm.items():
        style = {"color": colors[arm], "label": titles[arm], "linestyle": "--" if arm == "bf16" else "-"}
        smooth = [_running_mean(run["curves"]["reward"]) for run in runs]
        steps = range(1, 1 + len(smooth[0]))
        _band(reward, steps, smooth, **style)
        _band(entropy, steps, [_running_mean(run["curves"]["entropy"]) for run in runs], **style)
        at = [evaluation["step"] for evaluation in runs[0]["evaluations"]]
        _band(accuracy, at, [[e["accuracy"] for e in run["evaluations"]] for run in runs], shade=0.1, **style)
        _band(kl, at, [[e["kl"] for e in run["evaluations"]] for run in runs], **style)
    reward.set(title=f"Reward while training (mean of {SMOOTH} steps)", xlabel="step", ylabel="share of right answers")
    accuracy.set(title="Greedy accuracy on held-out problems", xlabel="step", ylabel="share of right answers")
    entropy.set(title=f"Entropy on its own completions (mean of {SMOOTH} steps)", xlabel="step", ylabel="nats")
    kl.set(title="KL from the bf16 model before training", xlabel="step", ylabel="nats per token")
    accuracy.legend(fontsize=8)
    _bars(gradient, weights, by_arm, titles, colors)
    figure.savefig(path, dpi=100)


def _running_mean(values: list[float]) -> list[float]:
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def _band(axes, steps, curves: list[list[float]], color: str, shade: float = 0.0, **style) -> None:
    """The mean over seeds, and one standard deviation around it where there is a `shade`."""
    columns = list(zip(*curves, strict=True))
    middle = [fmean(column) for column in columns]
    axes.plot(steps, middle, color=color, linewidth=1.6, **style)
    if shade and len(curves) > 1:
        wide = [stdev(column) for column in columns]
        low, high = ([m + sign * w for m, w in zip(middle, wide, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=shade, linewidth=0)


def _bars(gradient, weights, by_arm: Arms, titles: dict[str, str], colors: dict[str, str]) -> None:
    packed = [arm for arm, runs in by_arm.items() if runs[0]["probes"][0]["weights"] is not None]
    steps = _probe_steps(by_arm)
    for place, arm in enumerate(packed):
        errors = [[run["probes"][i]["gradient"]["relative_error"] for run in by_arm[arm]] for i in range(len(steps))]
        at = [i + 0.8 * (place + 0.5) / len(packed) - 0.4 for i in range(len(steps))]
        whiskers = [stdev(each) if len(each) > 1 else 0.0 for each in errors]
        heights = [fmean(each) for each in errors]
        gradient.bar(at, heights, 0.8 / len(packed), yerr=whiskers, color=colors[arm], error_kw={"linewidth": 0.7})
        probes = [run["probes"][0]["weights"]["policy"] for run in by_arm[arm]]
        bottom = 0.0
        for (part, label), shade in zip(_PARTS.items(), ("#4c78a8", "#72b7b2", "#eeca3b"), strict=True):
            height = fmean(probe[part] for probe in probes)
            weights.bar(place, height, bottom=bottom, color=shade, label=None if place else label)
            bottom += height
        weights.plot(place, probes[0]["error"], "k_", markersize=22, label=None if place else "error")
    gradient.set_xticks(range(len(steps)), [f"step {step}" for step in steps])
    gradient.set(title="Error of the adapters' gradient against bf16", ylabel="relative error")
    weights.set_xticks(range(len(packed)), [titles[arm] for arm in packed], rotation=20, ha="right", fontsize=8)
    weights.set(
        title="Parts of the weights' error: they cancel in part",
        ylabel="energy, relative to the weights'",
    )
    if packed:
        weights.set_ylim(top=1.3 * weights.get_ylim()[1])
        weights.legend(fontsize=8, ncols=2)


_PARTS = {"scale": "scale", "dead": "dead zone", "grid": "grid"}
