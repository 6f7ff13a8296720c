# SPDX-License-Identifier: Apache-2.0
"""scripts/benchmark_kernels.py: its statistics, gates, targets, deadline and output, on made-up measurements, and on
tiny layers on the CPU. No test looks at how fast anything was."""

import contextlib
import itertools
import json
import math

import pytest
import torch
from torch.nn import functional as F

import benchmark_kernels as benchmark
import decode_speed
import kernel_experts
import kernel_peers
import kernel_regimes
import kernel_report
import kernel_targets
import timing
from hf_mxfp4 import reference
from hf_mxfp4.formats import FORMATS

CPU = torch.device("cpu")
MACHINE = {"bandwidth": 4e12, "flops": 8e14, "launch_us": 2.0, "issue": 1.045e12}
OWN = {name: kernel_peers.KNOWN[name] for name in ("bf16", "mxfp4", "nvfp4", "dequantize, matmul")}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """A few copies of a tiny weight are enough."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)


def bench(**options) -> kernel_regimes.Bench:
    return kernel_regimes.Bench(CPU, OWN, rounds=5, seconds=0.0, quick=True, **options)


def times(us: float, rounds: int = 9) -> dict:
    return timing.Times(us, 0.9 * us, 1.1 * us, rounds)._asdict()


def made_up(regime="decode", layer="8B gate", shape=(12288, 4096), tokens=1, threads=0, **us) -> dict:
    """A row with these microseconds, under its key."""
    case = kernel_regimes.Case(regime, layer, shape, tokens, threads)
    base = next(iter(us))
    row = kernel_regimes.new_row(case, 2.0 * tokens * math.prod(shape)) | {"baseline": base}
    row["times"] = {name: times(value) for name, value in us.items()}
    row["ratios"] = {name: times(us[base] / value) for name, value in us.items()}
    bits = {"bf16": 16, "mxfp4": 4.25, "nvfp4": 4.5}
    row["bytes"] = {name: math.prod(shape) * bits.get(name, 4.5) / 8 for name in us}
    return {case.key: row}


def report(rows: dict) -> dict:
    versions = {"torch": "2.13.0"}
    return {
        **{"device": "Made-up GPU", "device_type": "cuda", "capability": "sm_90", "versions": versions},
        **{"date": "2026-01-01", "command": "python scripts/benchmark_kernels.py", "how": "Somehow.", "caches": 3},
        **{"machine": MACHINE, "rows": rows, "left_out": []},
    }


# --- timing ----------------------------------------------------------------------------------------------------------


def test_summary_and_ratios():
    assert timing.summarize([4.0, 1.0, 2.0, 3.0, 5.0]) == (3, 2, 4, 5)
    assert timing.summarize([7.0]) == (7, 7, 7, 1)
    # A slow spell hits both in its round: the ratio within rounds does not see it.
    samples = {"bf16": [10.0, 10.0, 90.0, 80.0, 10.0], "ours": [5.0, 5.0, 45.0, 40.0, 5.0]}
    assert timing.ratios(samples, "bf16")["ours"] == (2, 2, 2, 5)
    assert timing.ratios({"ours": [1.0]}, "bf16") == {}


def test_take_turns():
    seen, clock = [], itertools.count()
    samplers = {name: lambda name=name: seen.append(name) or 1.0 for name in "ab"}
    found = timing.take_turns(samplers, 7, 1e9)
    assert "".join(seen) == "abbaabbaabbaab" and [len(v) for v in found.values()] == [7, 7]
    found = timing.take_turns(samplers, 100, 0.5, lambda: float(next(clock)))  # over at once
    assert len(found["a"]) == len(found["b"]) == timing.MIN_ROUNDS


def test_copies_leave_the_cache():
    assert timing.copies_needed(10, 50) * 10 >= timing.CACHES * 50
    assert timing.copies_needed(1 << 40, 50) == 2


def test_cache_of_this_machine(monkeypatch):
    monkeypatch.undo()
    assert 1 << 18 <= timing.cache_bytes(CPU) < 1 << 34


def test_host_sampler_goes_through_all_copies():
    seen = []
    sample = timing.host_sampler([lambda i=i: seen.append(i) for i in range(3)], CPU)
    assert sample() > 0 and len(seen) > 100
    assert seen == list(itertools.islice(itertools.cycle(range(3)), len(seen)))


def test_graph_sampler(monkeypatch):
    """With a stand-in for torch.cuda whose events count calls: 10 us each. Every copy is captured equally often."""
    log, captured = [], []

    class Stream:
        def wait_stream(self, other):
            pass

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = len(log)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) * 0.01  # milliseconds

    class Graph:
        def replay(self):
            log.extend(captured)

    @contextlib.contextmanager
    def capture(graph, stream):
        start = len(log)
        yield
        captured.extend(log[start:])
        del log[start:]

    for name, value in {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": capture}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(timing, "_streams", {})
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    sample = timing.graph_sampler([lambda i=i: log.append(i) for i in range(3)])
    assert len(captured) * 10 >= timing.BATCH_US and set(captured) == {0, 1, 2}
    before = len(log)
    assert sample() == pytest.approx(10)
    assert len(log) - before >= len(captured)


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_gate_knows_right_from_wrong(fmt, grad):
    layer = kernel_peers.Layer(48, 96, CPU)
    weight = layer.packed[fmt]
    x = torch.randn(300, 48 if grad else 96, dtype=torch.bfloat16)  # more than are compared
    dense = reference.dequantize(weight, torch.float64)
    y = (x.double() @ (dense if grad else dense.T)).bfloat16()
    assert kernel_regimes.gate_product(x, y, weight, grad)["passed"]
    worse = y.clone()
    worse[-1, -1] += y.abs().max() / 16
    missing = y.clone()
    missing[0, 3] = float("nan")
    for wrong in (worse, missing, y.roll(1, 0)):
        assert not kernel_regimes.gate_product(x, wrong, weight, grad)["passed"]


def test_wrong_kernels_are_not_timed(monkeypatch):
    """Of ours: reported, exit status 1. A peer that computes nonsense, or raises, is left out."""
    broken = kernel_peers.Contender("mxfp4", "", lambda layer: lambda x: F.linear(x, layer.dense), lambda layer: 1e6)
    peer = kernel_peers.Contender("peer", "", lambda layer: lambda x: F.linear(x, layer.dense) + 1, lambda layer: 1e6)
    raising = kernel_peers.Contender("raising", "", lambda layer: 1 / 0, lambda layer: 1e6)
    found = bench()
    found.contenders = {"bf16": OWN["bf16"], "mxfp4": broken, "nvfp4": OWN["nvfp4"], "peer": peer, "raising": raising}
    found.contenders["unsuited"] = raising._replace(name="unsuited", suits=lambda layer, tokens: tokens > 3)
    row = kernel_regimes.measure_linear(kernel_regimes.Case("cpu", "tiny", (64, 96), 3), found)
    assert set(row["times"]) == {"bf16", "nvfp4"} and row["ratios"]["bf16"]["us"] == 1
    assert not row["gate"]["mxfp4"]["passed"] and not row["gate"]["peer"]["passed"]
    assert "ZeroDivisionError" in row["failed"]["raising"]
    (mistake,) = benchmark.mistakes({"key": row})
    assert mistake.startswith("key, mxfp4: error")


def test_contenders_multiply():
    """All that are installed here."""
    found = kernel_regimes.Bench(CPU, kernel_peers.contenders(CPU), rounds=5, seconds=0.0)
    row = kernel_regimes.measure_linear(kernel_regimes.Case("cpu", "tiny", (128, 256), 3), found)
    assert set(row["times"]) == set(row["bytes"]) == set(found.contenders) >= set(OWN) and row["failed"] == {}
    assert "gemlite mxfp4" not in found.contenders
    half = row["bytes"]["bf16"] / 2
    assert row["bytes"]["mxfp4"] < row["bytes"]["nvfp4"] < half < row["bytes"]["dequantize, matmul"]


def test_case_that_raises_is_a_mistake(capsys):
    threads = torch.get_num_threads()
    row = benchmark.attempt(lambda case, bench: 1 / 0, kernel_regimes.Case("cpu", "tiny", (32, 32), 1, 1), bench())
    assert torch.get_num_threads() == threads
    assert benchmark.mistakes({"key": row}) == ["key, case: ZeroDivisionError: division by zero"]
    assert benchmark.is_complete(row) and not benchmark.is_complete(row | {"left_out": ["mxfp4 compiled"]})
    row["failed"]["case"] = "OutOfMemoryError: 80 GB"
    assert benchmark.mistakes({"key": row}) == []
    assert "failed" in kernel_report.as_markdown(report({"key": row}), [])


# --- targets ---------------------------------------------------------------------------------------------------------


def outcome(rows: dict, name: str, static=None) -> kernel_targets.Outcome:
    (found,) = [o for o in kernel_targets.evaluate(rows, MACHINE, static) if o.target.name == name]
    return found


def test_targets():
    rows = made_up(bf16=30.0, mxfp4=10.0, nvfp4=10.0) | made_up(tokens=16, bf16=30.0, mxfp4=12.0, nvfp4=11.0)
    rows |= made_up(layer="3B q", shape=(2048, 2048), bf16=5.0, mxfp4=4.0, nvfp4=4.1)
    missed = outcome(rows, "decode, mxfp4, MLP of 8B, M=1..16")
    assert not missed.held and missed.worst == pytest.approx(2.5) and "M=16" in missed.key
    assert missed.median == pytest.approx(3.0)
    held = outcome(rows, "decode, nvfp4, MLP of 8B, M=1..16")
    assert held.held and held.limit == ""
    assert outcome(rows, "decode, mxfp4, small layers, M=1..16").worst == pytest.approx(1.25)
    names = [o.target.name for o in kernel_targets.evaluate(rows, MACHINE)]
    assert not any(name.startswith(("prefill", "cpu", "experts")) for name in names)
    assert kernel_targets.evaluate({}, MACHINE) == []


@pytest.mark.parametrize(
    "us, static, expected",
    [
        (12.0, {}, "bytes need 6.7 of 12.0 us (2228 of 4000 GB/s"),
        (12.0, {"mxfp4": 5.5}, "instructions need 8.3 of 12.0 us (5.50"),
    ],
)
def test_limit(us, static, expected):
    rows = made_up(bf16=26.0, mxfp4=us)
    found = outcome(rows, "decode, mxfp4, MLP of 8B, M=1..16", static)
    assert found.limit.startswith(expected) and "launch 2.0 us" in found.limit
    assert found.limit.endswith("% is none of these alone")


def test_limit_of_small_layers_is_the_launch():
    rows = made_up(layer="3B k", shape=(256, 2048), bf16=2.2, mxfp4=2.5)
    assert outcome(rows, "decode, mxfp4, small layers, M=1..16").limit.startswith("launch need 2.0 of 2.5 us")


def test_targets_that_are_no_ratio_to_bf16():
    rows = made_up("quantize", tokens=0, **{"nvfp4 amax": 40.0, "nvfp4 soar": 1000.0})
    rows["quantize: 8B gate 12288x4096, M=0"]["bytes"] = {"nvfp4 amax": 80e6, "nvfp4 soar": 80e6}
    rows |= made_up("launch", "tiny", (64, 64), bf16=5.0, mxfp4=15.0, nvfp4=25.0)
    fastest = {"bf16": 4000.0, "bf16 compiled": 3000.0, "mxfp4": 2500.0, "mxfp4 compiled": 1500.0}
    rows |= made_up("end to end", "Qwen3-8B", (1,) * 7, **fastest)
    assert outcome(rows, "quantize, nvfp4 amax").worst == pytest.approx(0.5)
    assert outcome(rows, "quantize, nvfp4 soar").worst == pytest.approx(1e5 / (1000 * 6.95e9 / (12288 * 4096)))
    assert outcome(rows, "launch, mxfp4").held and not outcome(rows, "launch, nvfp4").held
    assert outcome(rows, "end to end, mxfp4, Qwen3-8B").worst == pytest.approx(2.0)


def test_static_instructions():
    """The table's own names (scripts/kernels_static.py); other targets and larger tiles do not count."""
    rows = {
        "linear mxfp4 tokens=1 experts=1 bf16": {"sass_per_weight": 3.4, "registers": 128},
        "linear mxfp4 tokens=64 experts=1 bf16": {"sass_per_weight": 5.0},
        "linear nvfp4 tokens=1 experts=1 bf16": {"registers": 128},
    }
    assert kernel_targets.static_instructions({"targets": {"cuda:90": rows}}, "sm_90") == {"mxfp4": 3.4}
    assert kernel_targets.static_instructions({"targets": {"cuda:90": rows}}, "sm_80") == {}
    assert kernel_targets.static_instructions({}, "sm_90") == {}


# --- deadline, resuming ----------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def planned(monkeypatch):
    """Two regimes of three cases, each of which takes ten made-up seconds; the log of what was measured."""
    clock, log = Clock(), []

    def measure(case, bench):
        clock.now += 10
        log.append(case.key)
        return made_up(case.regime, case.layer, case.shape, case.tokens, bf16=2.0, mxfp4=1.0)[case.key]

    def cases(name):
        return lambda bench: [kernel_regimes.Case(name, "layer", (32, 32), m) for m in (1, 2, 3)]

    regimes = {name: benchmark.Regime(1, cases(name), measure, 10) for name in ("decode", "prefill")}
    monkeypatch.setattr(benchmark, "REGIMES", regimes)
    monkeypatch.setattr(benchmark, "Plan", lambda seconds, plan=benchmark.Plan: plan(seconds, clock))
    return log


@pytest.mark.parametrize(
    "seconds, measured", [(1000, [3, 3]), (60, [3, 3]), (40, [2, 2]), (50, [2, 3]), (25, [1, 1]), (5, [0, 0])]
)
def test_deadline(planned, seconds, measured):
    found = report({})
    benchmark.run(found, benchmark.REGIMES, bench(), seconds, lambda: None, lambda line: None)
    done = [sum(key.startswith(name) for key in found["rows"]) for name in benchmark.REGIMES]
    assert done == measured and len(found["left_out"]) == 6 - sum(measured)
    assert set(found["left_out"]).isdisjoint(found["rows"])
    for key in found["left_out"]:
        assert key in kernel_report.as_markdown(found, [])


def test_time_that_is_left_goes_to_what_was_left_out(planned):
    found = report({})
    benchmark.run(found, ["prefill"], bench(), 1e9, lambda: None, lambda line: None)
    planned.clear()
    benchmark.run(found, benchmark.REGIMES, bench(), 40, lambda: None, lambda line: None)  # 20 of them for decode
    assert [key[-3:] for key in planned] == ["M=1", "M=2", "M=3"] and found["left_out"] == []


def test_every_case_is_saved_and_resumed(planned, tmp_path):
    file, found = tmp_path / "k.json", report({})

    def save():
        benchmark.write(file, json.dumps(found))
        if len(found["rows"]) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        benchmark.run(found, benchmark.REGIMES, bench(), 1e9, save, lambda line: None)
    about = {key: found[key] for key in ("device", "versions")}
    rows, reason = benchmark.earlier(file, about)
    assert len(rows) == 4 and not reason and [*tmp_path.iterdir()] == [file]
    planned.clear()
    benchmark.run(report(rows), benchmark.REGIMES, bench(), 1e9, lambda: None, lambda line: None)
    assert [key[-3:] for key in planned] == ["M=2", "M=3"] and len(rows) == 6
    assert benchmark.earlier(file, about | {"versions": {}}) == ({}, f"{file} was made with other versions")
    assert benchmark.earlier(tmp_path / "none.json", about)[1].endswith("does not exist")


def test_sources_are_told_apart(monkeypatch, tmp_path):
    first = benchmark.source_hash()
    monkeypatch.setattr(benchmark, "SCRIPTS", tmp_path)
    assert benchmark.source_hash() != first


# --- output ----------------------------------------------------------------------------------------------------------


def many_rows() -> dict:
    rows = {}
    for tokens, ratio in ((1, 3.0), (16, 2.9), (64, 1.7), (4096, 0.95)):
        regime = "decode" if tokens < 32 else "batch" if tokens < 512 else "prefill"
        for shape, us in (((12288, 4096), 30.0), ((4096, 4096), 12.0)):
            base = max(us, 2e6 * tokens * math.prod(shape) / 7e14)
            rows |= made_up(regime, "8B", shape, tokens, bf16=base, mxfp4=base / ratio, nvfp4=base / ratio * 1.1)
    return rows


def test_markdown():
    found = report(many_rows())
    found["left_out"] = ["prefill: 8B, M=8192"]
    row = next(iter(found["rows"].values()))
    row["failed"]["gemlite mxfp4"] = "RuntimeError: no"
    row["gate"]["torchao int4"] = {"error": 2.0, "allowed": 0.25, "passed": False}
    outcomes = kernel_targets.evaluate(found["rows"], MACHINE)
    text = kernel_report.as_markdown(found, outcomes)
    held = sum(o.held for o in outcomes)
    assert f"{held} of {len(outcomes)} held" in text and 0 < held < len(outcomes)
    assert text.count("**missed**") == len(outcomes) - held
    assert "10 (9-11) **3.00x** 2674 GB/s" in text and "| failed | wrong |" in text
    assert "gemlite mxfp4: RuntimeError: no" in text and "prefill: 8B, M=8192." in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for table in (list(lines) for _, lines in itertools.groupby(text.splitlines(), lambda line: line[:1] == "|")):
        if table[0][:1] == "|":
            assert len({line.count("|") for line in table}) == 1
    assert len(tables) > 12


def test_roofline(tmp_path):
    from matplotlib import image

    found = report(many_rows())
    kernel_report.draw(found, tmp_path / "k.png")
    pixels = image.imread(tmp_path / "k.png")[..., :3]
    for name in ("bf16", "mxfp4", "nvfp4"):
        colour = kernel_report.COLORS[name]
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels - rgb).max(-1) < 2e-2).sum() > 100
    below = [
        speed / min(intensity * MACHINE["bandwidth"], MACHINE["flops"])
        for values in kernel_report.points(found["rows"]).values()
        for intensity, speed in values
    ]
    assert len(below) == 3 * len(found["rows"]) and max(below) <= 1
    assert kernel_report.speedups(found["rows"])["mxfp4"] == [(1, 3.0), (16, 2.9), (64, 1.7), (4096, 0.95)]
    kernel_report.draw(report({}), tmp_path / "empty.png")


def test_no_matplotlib(monkeypatch, tmp_path):
    spec = benchmark.importlib.util.find_spec
    monkeypatch.setattr(
        benchmark.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else spec(name)
    )
    lines = benchmark.finish(report(many_rows()), tmp_path / "k.json")
    assert any("matplotlib is missing" in line for line in lines)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["k.json", "k.md"]
    assert json.loads((tmp_path / "k.json").read_text())["targets"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cuda"], "torch sees no GPU"),
        (["--device", "cpu", "--only", "decode"], "not a regime of --device cpu"),
        (["--device", "cpu", "--deadline", "-1"], "--deadline"),
        (["--device", "cpu", "--rounds", "1"], "--rounds"),
        (["--device", "cpu", "--threads", "2", "0"], "--threads 0"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# --- regimes, on the CPU ---------------------------------------------------------------------------------------------


def test_cpu_run(monkeypatch, tmp_path, capsys):
    """All of it, end to end; then again with --resume, which measures nothing, and after a change of sources."""
    monkeypatch.setattr(kernel_regimes, "CPU_LAYERS", {"b": (64, 96), "a": (32, 64)})
    monkeypatch.setattr(timing, "machine", lambda device: {"bandwidth": 1e10, "flops": 1e11})
    monkeypatch.setattr(benchmark, "contenders", lambda device: OWN)
    monkeypatch.setattr(benchmark, "source_hash", lambda: "ours")
    file = tmp_path / "out" / "k.json"
    arguments = [
        "--device",
        "cpu",
        "--quick",
        "--json",
        str(file),
        "--rounds",
        "5",
        "--deadline",
        "0",
        "--threads",
        "1",
    ]
    assert benchmark.main(arguments) == 0
    found = json.loads(file.read_text())
    regimes = {row["regime"] for row in found["rows"].values()}
    assert regimes == {"launch", "cpu", "end to end"} and found["left_out"] == []
    assert len(found["rows"]) == 2 + 2 * 2
    for row in found["rows"].values():
        assert row["failed"] == {} and set(row["times"]) >= {"bf16", "mxfp4", "nvfp4"} and row["load"] >= 0
        assert all(gate["passed"] for gate in row["gate"].values())
        assert all(t["low"] <= t["us"] <= t["high"] for t in row["times"].values())
    assert {path.suffix for path in file.parent.iterdir()} == {".json", ".md", ".png"}
    assert found["path"].startswith(("C extension, ", "plain torch ("))
    capsys.readouterr()
    monkeypatch.setattr(benchmark, "attempt", lambda *a: pytest.fail("measured again"))
    assert benchmark.main([*arguments, "--resume"]) == 0
    assert json.loads(file.read_text())["rows"] == found["rows"]
    monkeypatch.setattr(benchmark, "source_hash", lambda: "other")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        benchmark.main([*arguments, "--resume"])
    assert "was made with other sources; measuring everything" in capsys.readouterr().out


def test_training_regimes():
    shape = (64, 96)
    row = kernel_regimes.measure_gradient(kernel_regimes.Case("backward", "tiny", shape, 5), bench())
    assert set(row["times"]) == set(row["bytes"]) == {"bf16", "mxfp4", "nvfp4"} and row["failed"] == {}
    row = kernel_regimes.measure_lora(kernel_regimes.Case("LoRA step", "tiny", shape, 5), bench())
    assert set(row["times"]) == {"bf16", "mxfp4", "nvfp4"} and benchmark.mistakes({"": row}) == []
    row = kernel_regimes.measure_quantize(kernel_regimes.Case("quantize", "tiny", shape, 0), bench())
    assert set(row["times"]) == {f"{fmt} {rule}" for fmt in FORMATS for rule in ("amax", "soar")}
    row = kernel_regimes.measure_launch(*kernel_regimes.launch_cases(bench()), bench())
    assert set(row["times"]) == {"bf16", "mxfp4", "nvfp4"}


def test_experts():
    case = kernel_regimes.Case("experts", "tiny", (8, 32, 64, 2), 3)
    row = kernel_experts.measure_experts(case, bench())
    assert row["failed"] == {} and set(row["times"]) == {"grouped_mm", "batched_mm", "mxfp4", "nvfp4"}
    assert row["bytes"]["mxfp4"] < row["bytes"]["nvfp4"] < row["bytes"]["grouped_mm"] / 3
    row = kernel_experts.measure_experts(case._replace(tokens=kernel_experts.BATCHED_TOKENS + 1), bench())
    assert set(row["times"]) == {"grouped_mm", "mxfp4", "nvfp4"}


def test_routings_deal_experts_like_cards():
    case = kernel_regimes.Case("experts", "tiny", (16, 32, 64, 4), 1)
    dealt = [ids for ids, _ in kernel_experts.routings(case, CPU)]
    assert len(dealt) == kernel_experts.CALLS
    for four in zip(*[iter(dealt)] * 4, strict=True):
        assert sorted(torch.cat(four).flatten().tolist()) == list(range(16))
    for ids, scores in kernel_experts.routings(case._replace(tokens=9), CPU):
        assert ids.shape == scores.shape == (9, 4) and all(len(set(row)) == 4 for row in ids.tolist())


def test_decoder():
    """The tokens of transformers' own greedy search; every layer through one compiled graph; fused layers alike."""
    from torch._dynamo.testing import CompileCounter

    model = decode_speed.make_model(decode_speed.MODELS["tiny"], CPU)
    first = torch.tensor([[0]])
    expected = model.generate(first, attention_mask=first + 1, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert decode_speed.Decoder(model).tokens(12) == expected[0, 1:].tolist()
    for fmt in FORMATS.values():
        decode_speed.pack_linears(model, fmt)
        tokens = decode_speed.Decoder(model).tokens(12)
        counter = CompileCounter()
        torch.compiler.reset()
        layer = torch.compile(decode_speed.run_layer, backend=counter, dynamic=False)
        assert decode_speed.Decoder(model, layer).tokens(12) == tokens
        assert counter.frame_count == 1 and len(model.model.layers) == 2
        decode_speed.fuse_projections(model)
        assert decode_speed.Decoder(model).tokens(12) == tokens
        decode_speed.unfuse_projections(model)
    assert decode_speed.bytes_read(model) < 2 * sum(p.numel() for p in model.parameters()) + 5e5


def test_gate_of_replayed_steps():
    decoder = decode_speed.Decoder(decode_speed.make_model(decode_speed.MODELS["tiny"], CPU))

    def elsewhere() -> None:
        decoder.step()
        decoder.position.zero_()

    assert decode_speed.gate_replay(decoder, decoder.step) == {"error": 0, "allowed": 0.1, "passed": True}
    for wrong in (elsewhere, lambda: None, lambda: decoder.logits.fill_(float("nan"))):
        assert not decode_speed.gate_replay(decoder, wrong)["passed"]


def test_decoder_starts_again_at_the_end(monkeypatch):
    monkeypatch.setattr(decode_speed, "CACHE", 8)
    decoder = decode_speed.Decoder(decode_speed.make_model(decode_speed.MODELS["tiny"], CPU))
    decoder.tokens(8)
    assert int(decoder.position) == 0


def test_decoding_stops_in_time():
    row = decode_speed.measure_decode(
        kernel_regimes.Case("end to end", "tiny", decode_speed.MODELS["tiny"], 1), bench(until=-math.inf)
    )
    assert row["times"] == {} and row["left_out"] == ["bf16", "mxfp4", "mxfp4 fused", "nvfp4", "nvfp4 fused"]
