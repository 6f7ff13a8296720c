# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: how they are written, found, read and followed. No timing here is real."""

import json
import os
import re
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from exactness import error_ratio, random_weight
from hf_mxfp4 import cli, dispatch, reference, tuner
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4
from hf_mxfp4.tuner import Job, Unfit, Way

tuning = pytest.importorskip("hf_mxfp4.kernels.tuning")

GPU, NAME = torch.device("cuda", 0), "NVIDIA H200"
DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
OPTIONS = {"TILE_M": 16, "TILE_N": 64, "TILE_K": 128, "num_warps": 4, "num_stages": 3, "SPLITS": 1}
JOB = Job("linear", "nvfp4", "bf16", False, 1, 4096, 4096)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache, a GPU by name, and nothing remembered."""
    monkeypatch.setenv("HF_MXFP4_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "device_name", lambda device: NAME)
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "tables")
    tuning.forget()
    yield
    tuning.forget()


def head(**changes) -> dict:
    import triton

    return {
        "version": tuning.VERSION,
        "device": NAME,
        "triton": triton.__version__,
        "sources": tuning.source_hash(),
    } | changes


def row(job: Job = JOB, **changes) -> dict:
    return {**job._asdict(), "options": OPTIONS, "us": 10.0, "chunk": None, "chunk_us": None} | changes


def write(rows: list[dict], path: Path | None = None, **changes) -> Path:
    path = path or tuning.user_table(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    tuner.write_table(path, head(**changes), {tuner.job_of(each): each for each in rows})
    return path


def choose(job: Job = JOB, **changes):
    kernel, format, dtype, macro, tokens, n, k = job._replace(**changes)
    return tuning.choose(kernel, GPU, tuning.DTYPES[dtype], format, tokens, n, k, macro)


# --- look-up ---------------------------------------------------------------------------------------------------------


def test_without_a_table_heuristics_decide():
    assert choose() is None


def test_the_nearest_row_is_taken():
    far = {"TILE_M": 64}
    write([row(), row(JOB._replace(tokens=64), options=far), row(JOB._replace(n=12288), options={"TILE_M": 32})])
    assert choose().options == OPTIONS
    assert choose(n=5120, k=4096).options == OPTIONS
    assert choose(n=11008).options == {"TILE_M": 32}
    assert choose(tokens=90).options == choose(tokens=48).options == far


def test_what_is_far_away_says_nothing():
    """A table about small layers and one token leaves all else to the heuristics."""
    write([row()])
    others = [dict(tokens=2), dict(tokens=4096), dict(n=512), dict(k=65536), dict(dtype="fp16"), dict(format="mxfp4")]
    for changes in (*others, dict(kernel="linear_grad"), dict(macro=True)):
        assert choose(**changes) is None, changes
    assert tuning.choose("linear", GPU, torch.float64, "nvfp4", 1, 4096, 4096) is None
    assert tuning.choose("linear", GPU, torch.bfloat16, "nvfp4", 0, 4096, 4096) is None
    assert tuning.choose("linear", torch.device("cpu"), torch.bfloat16, "nvfp4", 1, 4096, 4096) is None


def test_beyond_the_last_tokens_nothing_changes():
    write([row(JOB._replace(tokens=4096), chunk=1 << 20, chunk_us=5.0)])
    assert choose(tokens=100_000).chunk == 1 << 20 and choose(tokens=1000) is None


@pytest.mark.parametrize(
    ("times", "chunk"), [(dict(us=10.0), 512), (dict(us=2.0), None), (dict(us=None, options=None), 512)]
)
def test_the_faster_way_is_taken(times, chunk):
    write([row(chunk=512, chunk_us=5.0, **times)])
    assert choose() == tuning.Choice(times.get("options", OPTIONS), chunk)


def test_files_are_read_once(monkeypatch):
    path, reads = write([row()]), []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: reads.append(self) or read_text(self, *a, **k))
    for tokens in (1, 1, 64, 1):
        choose(tokens=tokens)
    assert reads == [path]


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_users_table_comes_first():
    packaged = write([row(options={"TILE_M": 128})], tuning.TABLES / "nvidia-h200.json")
    assert choose().options == {"TILE_M": 128} and tuning.load_table(NAME).path == packaged
    write([row()])
    tuning.forget()
    assert choose().options == OPTIONS


BROKEN = {
    "no JSON": (lambda text: text[:-5], "it cannot be read as JSON"),
    "something else": (lambda text: "[1, 2]", "it is no table of version 1"),
    "another layout": (lambda text: text.replace('"version": 1', '"version": 2'), "it is no table of version 1"),
    "another device": (lambda text: text.replace(NAME, "Tesla T4"), "measured on Tesla T4, not on NVIDIA H200"),
    "no device": (lambda text: text.replace(f'"{NAME}"', "null"), "its device is None"),
    "other kernels": (lambda text: text.replace(tuning.source_hash(), "0" * 12), "measured with other kernels"),
    "a field less": (lambda text: text.replace('"macro": false, ', ""), "row 0: expected the fields kernel, "),
    "a time below zero": (lambda text: text.replace('"us": 10.0', '"us": -1'), "row 0: us is -1"),
    "time not a number": (lambda text: text.replace('"us": 10.0', '"us": NaN'), "row 0: us is nan"),
    "a time too few": (lambda text: text.replace('"us": 10.0', '"us": null'), "row 0: us is None"),
    "no options": (lambda text: text.replace("16,", '"x",'), "row 0: options is "),
    "zero tokens": (lambda text: text.replace('"tokens": 1', '"tokens": 0'), "row 0: tokens is 0"),
    "an unknown dtype": (lambda text: text.replace('"bf16"', '"int8"'), "row 0: dtype is 'int8'"),
    "a chunk that is true": (lambda text: text.replace('"chunk": null', '"chunk": true'), "row 0: chunk is True"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_table_is_named_and_not_used(case):
    change, why = BROKEN[case]
    path = write([row()])
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    expected = rf"tuning table {re.escape(str(path))} is not used: .*{re.escape(why)}.*hf-mxfp4 tune"
    with pytest.warns(UserWarning, match=expected):
        assert choose() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose() is None  # said once


def test_where_tables_are(monkeypatch, tmp_path):
    import triton

    found = tuning.user_table(NAME)
    assert found.parent == tmp_path / "cache"
    assert found.name == f"nvidia-h200-triton{triton.__version__}-{tuning.source_hash()}.json"
    monkeypatch.delenv("HF_MXFP4_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_folder() == tmp_path / "hf_mxfp4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.cache_folder() == Path.home() / ".cache" / "hf_mxfp4"


def test_stale_tables_are_named_and_not_used():
    old = tuning.cache_folder() / tuning.file_name(NAME, "3.1.0", "0" * 12)
    write([row()], old)
    write([row()], tuning.cache_folder() / tuning.file_name("Tesla T4", "3.1.0", "0" * 12))
    assert tuning.stale_tables(NAME) == [old] and choose() is None
    write([row()])
    tuning.forget()
    assert tuning.stale_tables(NAME) == [old] and choose().options == OPTIONS


def test_where_there_is_no_folder_there_is_no_table(monkeypatch):
    """A container's user may have no home folder, or one that it may not read: products go on, `tune` says it."""

    stat = os.stat

    def refused(path, *arguments, **options):
        if Path(path).is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    folder = tuning.cache_folder()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        with pytest.raises(PermissionError):
            os.stat(folder)
        assert choose() is None
    monkeypatch.delenv("HF_MXFP4_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    tuning.forget()
    assert choose() is None and tuning.stale_tables(NAME) == []


def test_the_hash_is_of_the_kernels(monkeypatch, tmp_path):
    before = tuning.source_hash()
    for name in tuning.SOURCES:
        (tmp_path / f"{name}.py").write_bytes((tuning.FOLDER / f"{name}.py").read_bytes())
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.source_hash.cache_clear()
    assert tuning.source_hash() == before
    (tmp_path / "gemm.py").write_text("")
    tuning.source_hash.cache_clear()
    assert tuning.source_hash() != before


def test_packaged_tables_are_sound():
    """Each was measured with the kernels as they are."""
    for path in (tuning.FOLDER / "tables").glob("*.json"):
        table = tuning.read_table(path)
        assert table.head["sources"] == tuning.source_hash(), f"{path.name} is stale: measure that device again"
        assert path.stem == tuning._slug(table.head["device"])


def test_a_head_says_what_was_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = tuning.head_of(GPU)
    assert found.items() >= head().items() and found["capability"] == "9.0" and found["torch"] == torch.__version__


# --- dispatch follows ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels on the CPU, in the interpreter")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("choice", "tokens", "way"),
    [
        (None, 1, "fused"),
        (None, 40, "chunks"),
        (tuning.Choice(OPTIONS, None), 40, "fused"),
        (tuning.Choice(OPTIONS, 32 * 8), 1, "chunks"),
    ],
)
def test_dispatch_follows_the_table(choice, tokens, way, grad, monkeypatch):
    """Either way gives the same product; which one it is, and in chunks of what size, the table says."""
    from hf_mxfp4.kernels import dequantize, gemm, gemm_grad

    calls, asked = [], []
    weight = random_weight(24, 64, fmt=NVFP4, device="cpu")
    x, dense = torch.randn(tokens, 24 if grad else 64), reference.dequantize(weight, torch.float32)
    with monkeypatch.context() as patch:

        def spy(module, name, label):
            function = getattr(module, name)
            patch.setattr(module, name, lambda *a, **k: calls.append((label, a[-1])) or function(*a, **k))

        spy(gemm, "linear", "fused")
        spy(gemm_grad, "linear_grad", "fused")
        spy(dequantize, "dequantize", "chunks")
        patch.setattr(tuning, "choose", lambda *product: asked.append(product) or choice)
        patch.setattr(dispatch, "use_kernels", lambda *_: True)
        patch.setattr(dispatch, "FUSED_TOKENS", 32)
        patch.setattr(dispatch, "FUSED_TOKENS_GRAD", 32)
        patch.setitem(dispatch.CHUNK_WEIGHTS, "cpu", 32 * 16)
        out = dispatch.product(x, None, weight, None, "auto", grad)
    assert error_ratio(out, x, dense if grad else dense.T) <= 1
    assert asked == [("linear_grad" if grad else "linear", x.device, x.dtype, "nvfp4", tokens, 24, 64, False)]
    assert {label for label, _ in calls} == {way}
    if way == "fused":
        assert calls == [("fused", None if choice is None else OPTIONS)]
    else:
        assert len(calls) == (4 if grad else 6 if choice else 3)


def test_chunks_share_their_room(monkeypatch):
    """All chunks are decoded into the memory of the first; each is a part of the output, none is copied there."""
    weight, x, rooms = random_weight(50, 96, fmt=MXFP4, device="cpu"), torch.randn(3, 96), []

    def decode(weight, dtype, kernels, first=0, out=None):
        dense = reference.dequantize(weight, dtype)
        rooms.append(dense if out is None else out.copy_(dense))
        return rooms[-1]

    monkeypatch.setattr(dispatch, "decode", decode)
    for grad, given in ((False, x), (True, torch.randn(3, 50))):
        rooms.clear()
        out = dispatch.product_in_chunks(given, weight, None, True, grad, 20 * 96)
        dense = reference.dequantize(weight, torch.float32)
        assert error_ratio(out, given, dense if grad else dense.T) <= 1
        assert len(rooms) >= 3 and len({room.data_ptr() for room in rooms}) == 1


@pytest.mark.parametrize("length", [1, 31, 2048, 12288])
@pytest.mark.parametrize("most", [1, 4096, 12 << 20, 1 << 30])
@pytest.mark.parametrize("step", [1, 32])
def test_chunks_cover_a_dimension(length, most, step):
    chunks = dispatch._chunks(length, 4096, step, torch.empty(0), most)
    assert chunks[0].start == 0 and chunks[-1].stop == length
    assert all(a.stop == b.start and a.stop % step == 0 for a, b in zip(chunks, chunks[1:], strict=False))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) <= max(step, -(-most // 4096) + 256) and max(sizes) == sizes[0]


def test_an_h200_decodes_12_m_weights_at_once(monkeypatch):
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    dispatch._cached_weights.cache_clear()
    assert dispatch._cached_weights(GPU, 2) == 12 << 20
    dispatch._cached_weights.cache_clear()


# --- measuring -------------------------------------------------------------------------------------------------------


class Made:
    """A bench with made-up times, by tile size and chunk; `None` for a way that does not fit."""

    def __init__(self, tiles: dict, chunks: dict = {}, again: dict = {}):  # noqa: B006
        self.times = {("tile", m): t for m, t in tiles.items()} | {("chunk", c): t for c, t in chunks.items()}
        self.again, self.calls = again, []

    def ways(self, job):
        for kind, size in self.times:
            yield Way({"TILE_M": size}) if kind == "tile" else Way(chunk=size)

    def time(self, job, way, thorough):
        key = ("tile", way.options["TILE_M"]) if way.options else ("chunk", way.chunk)
        self.calls.append((key, thorough))
        found = self.again.get(key[1], self.times[key]) if thorough else self.times[key]
        if found is None:
            raise Unfit("does not fit")
        return found


def test_best():
    """All are timed, the best again; the second time counts. Either way has its own best."""
    bench = Made({16: 3.0, 32: 2.0, 64: None, 128: 2.5, 256: 9.0}, {512: 4.0, 1024: 3.5}, again={32: 2.7})
    unfit = []
    found = tuner.best(JOB, bench, lambda job, way, why: unfit.append((way.options, why)))
    assert found == row(options={"TILE_M": 128}, us=2.5, chunk=1024, chunk_us=3.5)
    assert unfit == [({"TILE_M": 64}, "does not fit")]
    assert [key for key, thorough in bench.calls if thorough] == [("tile", m) for m in (32, 128, 16)] + [
        ("chunk", c) for c in (1024, 512)
    ]
    assert tuner.best(JOB, Made({16: None})) is None
    assert tuner.best(JOB, Made({16: None}, {512: 1.0})) == row(options=None, us=None, chunk=512, chunk_us=1.0)


WORK = [JOB._replace(tokens=tokens) for tokens in (1, 2, 4)]


def test_tune_writes_a_table(tmp_path):
    path, seen = tuning.user_table(NAME), []
    assert tuner.tune(WORK, Made({16: 3.0}), path, head(), lambda *done: seen.append(done[:2])) == 3
    assert seen == [(1, WORK[0]), (2, WORK[1]), (3, WORK[2])]
    assert choose(tokens=4).options == {"TILE_M": 16}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # neither journal nor scratch file


def test_tune_keeps_other_rows():
    path = write([row(options={"TILE_M": 64}), row(JOB._replace(n=256), options={"TILE_M": 128})])
    assert tuner.tune(WORK, Made({16: 3.0}), path, head()) == 3
    rows = {tuner.job_of(each._asdict()): each.options["TILE_M"] for each in tuning.read_table(path).rows}
    assert rows == {job: 16 for job in WORK} | {JOB._replace(n=256): 128}
    tuner.tune(WORK[:1], Made({32: 3.0}), path, head(sources="other kernels"))
    assert len(tuning.read_table(path).rows) == 1  # what other kernels did says nothing


class Stopped(Made):
    def ways(self, job):
        if job.tokens == 4:
            raise KeyboardInterrupt
        return super().ways(job)


@pytest.mark.parametrize("damage", [False, True])
def test_a_stopped_run_goes_on(damage):
    path, before = write([row(JOB._replace(n=256))]), None
    before = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(WORK, Stopped({16: 3.0}), path, head())
    assert path.read_text() == before  # untouched until all is measured
    journal = path.with_name(path.name + ".journal")
    if damage:  # stopped in the middle of a line
        journal.write_text(journal.read_text()[:-20])
    bench = Made({32: 3.0})
    assert tuner.tune(WORK, bench, path, head()) == (2 if damage else 1)
    measured = {each.tokens: each.options["TILE_M"] for each in tuning.read_table(path).rows if each.n == 4096}
    assert measured == {1: 16, 2: 32 if damage else 16, 4: 32} and not journal.exists()


def test_a_journal_of_other_kernels_does_not_count():
    path = tuning.user_table(NAME)
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(WORK, Stopped({16: 3.0}), path, head(sources="other kernels"))
    assert tuner.tune(WORK, Made({32: 3.0}), path, head()) == 3


def test_jobs():
    found = tuner.jobs([(8, 32), (8, 32), (16, 64)], ["nvfp4", "mxfp4+macro"], ["bf16"], [1, 64])
    assert len(found) == 2 * 2 * 3 and len(set(found)) == len(found)
    assert Job("linear", "mxfp4", "bf16", True, 64, 16, 64) in found
    assert {job.tokens for job in found if job.kernel == "linear_grad"} == {64}


def test_layer_shapes():
    headers = {
        "model.embed_tokens.weight": ("BF16", (128, 64)),
        "lm_head.weight": ("BF16", (128, 64)),
        "model.layers.0.mlp.up_proj.weight": ("BF16", (96, 64)),
        "model.layers.1.mlp.up_proj.weight": ("F32", (96, 64)),
        "model.layers.0.mlp.down_proj.weight_packed": ("U8", (64, 48)),
        "model.layers.0.mlp.down_proj.weight_scale": ("U8", (64, 3)),
        "model.layers.0.mlp.down_proj.weight_macro_scale": ("U8", (64, 1)),
        "model.layers.0.input_layernorm.weight": ("BF16", (64,)),
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", (4, 64, 64)),
        "model.layers.0.conv.weight": ("BF16", (96, 3)),
    }
    assert tuner.layer_shapes(headers) == [(96, 64), (64, 96)]


# --- the bench itself, interpreted -----------------------------------------------------------------------------------

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels on the CPU, in the interpreter")


def bench_of(times: list) -> tuner.Bench:
    def timer(calls, thorough):
        times.append((len(calls), thorough))
        calls[0]()
        return 1.0

    return tuner.Bench(torch.device("cpu"), timer)


@interpreted
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kernel", ["linear", "linear_grad"])
def test_candidates_are_checked_and_timed(fmt, kernel):
    """Fused and in chunks, with real kernels: each is right, each is timed over several weights."""
    times, job = [], Job(kernel, fmt, "fp32", False, 64, 32, 128)
    bench = bench_of(times)
    ways = list(bench.ways(job))
    assert {way.chunk for way in ways} == {None, 32 * 128} and all(way.options for way in ways if not way.chunk)
    for way in (ways[0], ways[-1]):
        assert bench.time(job, way, False) == bench.time(job, way, True) == 1.0
    assert [thorough for _, thorough in times] == [False, True] * 2 and all(count >= 2 for count, _ in times)


@interpreted
def test_macro_factors_are_never_decoded_to_16_bits():
    job = Job("linear", "mxfp4", "fp32", True, 64, 32, 128)
    bench = bench_of([])
    ways = list(bench.ways(job))
    assert ways and all(way.chunk is None for way in ways) and bench.time(job, ways[0], False) == 1.0


@interpreted
@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_candidate_is_not_timed(wrong, monkeypatch):
    from hf_mxfp4.kernels import gemm

    linear, times = gemm.linear, []
    monkeypatch.setattr(gemm, "linear", lambda *a, **k: linear(*a, **k) * wrong)
    bench, job = bench_of(times), JOB._replace(dtype="fp32", n=32, k=128)
    with pytest.raises(Unfit, match="wrong"):
        bench.time(job, Way(bench.candidates(job)[0]), False)
    assert times == []


@interpreted
def test_what_needs_too_much_is_left_out(monkeypatch):
    """By its tiles where they tell, else by triton's own word; other errors are not hidden."""
    from triton.runtime.errors import OutOfResources

    from hf_mxfp4.kernels import gemm

    bench, job = bench_of([]), JOB._replace(n=32, k=128)
    large = OPTIONS | {"TILE_M": 128, "TILE_N": 256, "num_stages": 4}
    monkeypatch.setattr(gemm, "candidates", lambda *_, **__: [OPTIONS, large])
    assert bench._shared_bytes(job, OPTIONS) == 3 * (16 * 128 * 2 + 64 * 128 * 4.5 / 8)
    monkeypatch.setattr(tuner.Bench, "_most_shared", lambda self: 99 << 10)
    assert list(bench.ways(job)) == [Way(OPTIONS)]

    def fail(error):
        def linear(*_, **__):
            raise error

        monkeypatch.setattr(gemm, "linear", linear)

    fail(OutOfResources(300_000, 232_448, "shared memory"))
    with pytest.raises(Unfit, match="shared memory"):
        bench.time(job, Way(OPTIONS), False)
    fail(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        bench.time(job, Way(OPTIONS), False)


class Clock:
    """Stands in for torch.cuda: a call takes 15 us, or 10 in a graph; `now` is in microseconds."""

    def __init__(self):
        self.now, self.capturing, self.captured = 0.0, None, []

    def call(self):
        if self.capturing is None:
            self.now += 15
        else:
            self.capturing.calls += 1

    def Event(self, enable_timing):
        event = SimpleNamespace(
            record=lambda: setattr(event, "now", self.now),
            synchronize=lambda: None,
            elapsed_time=lambda end: (end.now - event.now) / 1000,
        )
        return event

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream):
        return nullcontext()

    def CUDAGraph(self):
        def replay():
            self.now += 10 * made.calls

        made = SimpleNamespace(calls=0, replay=replay)
        self.captured.append(made)
        return made

    @contextmanager
    def graph(self, made, stream):
        self.capturing = made
        yield
        self.capturing = None


@pytest.mark.parametrize("weights", [1, 2, 6, 64])
@pytest.mark.parametrize("thorough", [False, True])
def test_time_in_a_graph_is_that_of_a_call(weights, thorough, monkeypatch):
    """However many weights, rounds and replays there are; each weight has its turn as often as the others."""
    clock = Clock()
    monkeypatch.setattr(tuner, "torch", SimpleNamespace(cuda=clock))
    assert tuner.graph_time([clock.call] * weights, thorough) == 10
    (made,) = clock.captured
    assert made.calls % weights == 0 and made.calls <= tuner.CAPTURED


# --- the command -----------------------------------------------------------------------------------------------------

run = CliRunner().invoke


@pytest.fixture
def made_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "head_of", lambda device: head())
    monkeypatch.setattr(tuner, "Bench", lambda device: Made({16: 3.0}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_needs_a_gpu():
    result = run(cli.app, ["tune"], env={"COLUMNS": "300"})
    assert result.exit_code == 1 and "tune measures a GPU, and torch sees none" in result.output


def test_tune_command(made_gpu):
    result = run(cli.app, ["tune", "--shapes", "64x32,32x64", "--tokens", "1,64", "--json"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    saved = json.loads(result.stdout)
    assert len(saved["rows"]) == 2 * 2 * 3 and saved == json.loads(tuning.user_table(NAME).read_text())
    assert "12 products measured" in result.stderr
    assert choose(n=64, k=32).options == {"TILE_M": 16}


def test_tune_for_a_model(made_gpu, tmp_path):
    arguments = [
        "tune",
        "--model",
        str(DEMO),
        "--tokens",
        "1",
        "--formats",
        "mxfp4",
        "--output",
        str(tmp_path / "t.json"),
    ]
    result = run(cli.app, arguments)
    assert result.exit_code == 0, result.output
    rows = tuning.read_table(tmp_path / "t.json").rows
    assert {(each.n, each.k) for each in rows} == {(256, 768), (768, 256), (128, 256), (256, 256)}


def test_a_stopped_command_says_how_to_go_on(made_gpu, monkeypatch):
    monkeypatch.setattr(tuner, "Bench", lambda device: Stopped({16: 3.0}))
    result = run(cli.app, ["tune", "--shapes", "64x32", "--tokens", "1,4"], env={"COLUMNS": "300"})
    assert result.exit_code == 130 and "the same command goes on from" in result.output


def test_a_table_that_cannot_be_written_is_named(made_gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    where = ["--output", str(tmp_path / "file" / "t.json")]
    result = run(cli.app, ["tune", "--shapes", "64x32", "--tokens", "1", *where])
    assert result.exit_code == 1 and "t.json cannot be written" in result.output.replace("\n", "")
    monkeypatch.delenv("HF_MXFP4_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    result = run(cli.app, ["tune", "--shapes", "64x32"])
    assert result.exit_code == 1 and "Set HF_MXFP4_CACHE" in result.output.replace("\n", "")


def test_a_wrong_candidate_is_named(made_gpu, monkeypatch):
    class Wrong(Made):
        def time(self, job, way, thorough):
            if way.options["TILE_M"] == 32:
                raise Unfit("wrong: 7 times the error that rounding allows")
            return super().time(job, way, thorough)

    monkeypatch.setattr(tuner, "Bench", lambda device: Wrong({16: 3.0, 32: 1.0, 64: None}))
    result = run(cli.app, ["tune", "--shapes", "64x32", "--tokens", "1"], env={"COLUMNS": "300"})
    assert result.exit_code == 0 and "wrong: 7 times the error that rounding allows, left out" in result.stderr
    assert "does not fit" not in result.stderr and choose(n=64, k=32).options == {"TILE_M": 16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "expected NxK,NxK,... with K in 32s"),
        (["--shapes", "64x48"], "with K in 32s"),
        (["--shapes", "ax32"], "expected positive numbers"),
        (["--shapes", "64x32", "--model", "x"], "give --shapes or --model, not both"),
        (["--model", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["--tokens", "1,0"], "expected positive numbers"),
        (["--formats", "fp8"], "allowed: mxfp4, nvfp4, mxfp4+macro"),
        (["--dtype", "int8"], "allowed: bf16, fp16, fp32"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(cli.app, ["tune", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and message in result.output


def test_a_folder_without_layers(tmp_path):
    result = run(cli.app, ["tune", "--model", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "has no matrices that would be packed" in result.output
