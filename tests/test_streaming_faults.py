# SPDX-License-Identifier: Apache-2.0
"""quantize_checkpoint when something goes wrong: what it refuses, what it leaves, and that it goes on where it was."""

import contextlib
import functools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_streaming import assert_same, files, rewritten
from tiny_models import source
from transformers import PreTrainedModel

from hf_mxfp4 import FP4Config
from hf_mxfp4.checkpoint_files import read_checkpoint
from hf_mxfp4.streaming import journal, processes, quantize_checkpoint, run
from hf_mxfp4.streaming.journal import FINISHED, JOURNAL, Journal, Lock
from hf_mxfp4.streaming.source import Source

SIZE = "30KB"  # several files
BAD = "model.layers.1.mlp.experts.2.down_proj.weight"
NORM, Q = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"


@functools.cache
def expected() -> dict[str, bytes]:
    """What an uninterrupted run makes of the model all tests here use."""
    with tempfile.TemporaryDirectory() as folder:
        quantize(Path(folder) / "out")
        return files(Path(folder) / "out")


def expected_shards() -> list[str]:
    return sorted(name for name in expected() if name.endswith(".safetensors"))


def quantize(output: Path, folder: Path | None = None, **kwargs):
    return quantize_checkpoint(folder or source("qwen3_moe"), output, FP4Config(), max_shard_size=SIZE, **kwargs)


def assert_complete(output: Path) -> None:
    assert_same(output, expected(), set())


def assert_not_visible(output: Path) -> None:
    """No reader can take a half for a whole."""
    assert not (output / "config.json").exists() and not list(output.glob("*.tmp"))


# --- a fault at every step -------------------------------------------------------------------------------------------


class Fault(Exception):
    pass


STEPS = [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "link"), (os, "open"), (Path, "unlink"), (Path, "rmdir")]


class Faults:
    """Raises at the n-th call of any function that changes files. `after`: once the call was done, else before."""

    def __init__(self, monkeypatch, number: int, after: bool, error=Fault):
        self.number, self.after, self.error, self.count = number, after, error, 0
        self.kinds: list[tuple] = []  # of each call: by which lines of the package it came about
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, function):
        def call(*args, **kwargs):
            self.count += 1
            stack = [frame for frame in traceback.extract_stack() if "hf_mxfp4" in Path(frame.filename).parts]
            self.kinds.append(tuple((Path(frame.filename).name, frame.lineno) for frame in stack))
            now = self.count == self.number
            if now and not self.after:
                raise self.error
            result = function(*args, **kwargs)
            if now:
                raise self.error
            return result

        return call


def steps() -> list[tuple]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        counter = Faults(monkeypatch, 0, False)
        quantize(Path(folder) / "out")
    return counter.kinds


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fault_at_every_step(every, tmp_path, monkeypatch):
    """Whatever call fails, before or after it has worked, the same command makes the same files. One call of each
    kind; all of them is slow."""
    monkeypatch.setattr(journal, "UNWRITTEN", -1.0)
    kinds = steps()
    assert len(kinds) > 60  # 4 files of weights, 5 others, records, locks
    numbers = range(1, len(kinds) + 1) if every else [kinds.index(kind) + 1 for kind in dict.fromkeys(kinds)]
    assert len(numbers) > 20
    job = run.Job(str(source("qwen3_moe")), str(tmp_path), FP4Config(), "cpu", SIZE, False)
    one = run.Run(job, read_checkpoint(source("qwen3_moe")))
    for place, number in enumerate(numbers):
        output = tmp_path / str(number)
        one.output, one.journal = output, Journal(output)
        one.job = one.job._replace(output=str(output))
        with monkeypatch.context() as patch:
            Faults(patch, number, after=place % 3 == 0)
            with contextlib.suppress(Fault):
                _go(one)
        if (output / FINISHED).exists() and not list((output / FINISHED).iterdir()):
            with pytest.raises(ValueError, match="holds 8 other files"):
                _go(one)
        elif not (output / "config.json").exists() or (output / JOURNAL).exists() or (output / FINISHED).exists():
            _go(one)
        assert_complete(output)
        shutil.rmtree(output)


def _go(one: run.Run) -> None:
    one.begin()
    one.work(run.Report(one.sizes, one.finished, None))
    one.finish()


@pytest.mark.parametrize("units", [0, 1, 7, 20])
def test_a_fault_in_the_middle(units, tmp_path):
    """An error of the caller's own progress function, and Ctrl-C."""
    told = []

    def stop(progress):
        told.append(progress)
        if len(told) > units:
            raise KeyboardInterrupt

    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(output, progress=stop)
    assert_not_visible(output)
    assert not list(output.glob(".*.partial")) and not list((output / JOURNAL).glob("*.lock"))
    before = told[-1].shards_done
    told.clear()
    summary = quantize(output, progress=told.append)
    assert summary.resumed == before and told[0].shards_done >= before
    assert_complete(output)


def test_finished_files_are_not_made_again(tmp_path):
    """And what is in their records is believed only as far as the file's size."""
    output, told = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        quantize(output, progress=lambda p: (_ for _ in ()).throw(KeyboardInterrupt) if p.shards_done == 2 else None)
    first, second = sorted(output.glob("*.safetensors"))
    times = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-1])
    assert quantize(output, progress=told.append).resumed == 1
    assert first.stat().st_mtime_ns == times
    assert_complete(output)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def child(target, *arguments):
    """A process that calls `target(pipe, *arguments)`, and the other end of the pipe. A fork: nothing is imported
    again."""
    source("qwen3_moe")  # is made once, here
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    with writer, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forks of processes with threads
        process = context.Process(target=target, args=(writer, *arguments))
        process.start()
    return process, reader


def quantize_in_child(pipe, output: Path, workers: int = 1) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    pipe.send([])
    children = multiprocessing.active_children
    quantize(output, workers=workers, progress=lambda p: pipe.send([one.pid for one in children()]))


@pytest.mark.parametrize("calls", [2, 15])
def test_kill(calls, tmp_path):
    """Killed while it works; the locks it leaves are its own, and at most one file is half-written."""
    output = tmp_path / "out"
    process, pipe = child(quantize_in_child, output)
    for _ in range(calls):
        pipe.recv()
    process.kill()
    process.join()
    assert_not_visible(output)
    assert len(list(output.glob(".*.partial"))) <= 1 and len(list((output / JOURNAL).glob("*.lock"))) <= 1
    quantize(output)
    assert_complete(output)


def test_two_processes_on_one_output(tmp_path):
    """Each makes some of the files; both end when all are there."""
    output = tmp_path / "out"
    children = [child(quantize_in_child, output) for _ in range(2)]
    assert [pipe.recv() for _, pipe in children] == [[], []]
    for process, pipe in children:
        while True:
            try:
                pipe.recv()
            except EOFError:
                break
        process.join()
    assert [process.exitcode for process, _ in children] in ([0, 0], [1, 0], [0, 1])  # one may come when all is done
    assert_complete(output)


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed alone, it leaves no processes that work on or wait, here for a file that another machine is at."""
    output = tmp_path / "out"
    interrupted(output)
    lock = foreign_lock(output / JOURNAL, expected_shards()[0])
    process, pipe = child(quantize_in_child, output, 2)
    while len(list((output / JOURNAL).glob("*.done"))) < len(expected_shards()) - 1:
        workers = pipe.recv()
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while any(journal._started(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(journal._started(pid) for pid in workers)
    assert_not_visible(output)
    assert not list(output.glob(".*.partial"))
    lock.unlink()
    quantize(output)
    assert_complete(output)


def test_a_killed_worker_is_replaced(tmp_path, monkeypatch):
    """The others take over its file, and the parent says nothing of it."""
    started = []
    original = processes.multiprocessing.process.BaseProcess.start

    def start(self):
        original(self)
        started.append(self)
        if len(started) == 1:
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(processes.multiprocessing.process.BaseProcess, "start", start)
    quantize(tmp_path / "out", workers=2)
    assert started[0].exitcode == -9
    assert_complete(tmp_path / "out")


def test_all_workers_killed(tmp_path, monkeypatch):
    original = processes.multiprocessing.process.BaseProcess.start

    def start(self):
        original(self)
        os.kill(self.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(processes.multiprocessing.process.BaseProcess, "start", start)
        with pytest.raises(RuntimeError, match=r"exit codes -9, -9.*The same command goes on"):
            quantize(tmp_path / "out", workers=2)
    quantize(tmp_path / "out")
    assert_complete(tmp_path / "out")


def test_an_error_in_a_worker(tmp_path):
    """It comes out as in one process, and nothing is half-written."""
    folder = rewritten(source("qwen3_moe"), tmp_path / "in", lambda t: t | {BAD: t[BAD] * float("nan")})
    with pytest.raises(ValueError, match=r"experts\.down_proj.*NaN"):
        quantize(tmp_path / "out", folder, workers=2)
    assert_not_visible(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.partial"))


# --- locks -----------------------------------------------------------------------------------------------------------


def foreign_lock(folder: Path, name: str = "a", host: str = "another machine") -> Path:
    path = folder / f"{name}.lock"
    path.write_text(json.dumps({"host": host, "pid": 1, "started": "7", "token": "x"}))
    return path


def test_a_lock_is_held_once(tmp_path):
    with Lock.take(tmp_path, "a") as lock:
        assert lock.held and Lock.take(tmp_path, "a") is None and Lock.take(tmp_path, "b") is not None
    assert Lock.take(tmp_path, "a") is not None
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_a_lock_of_a_process_that_is_gone(tmp_path):
    """Gone, or its id given to another process; a zombie counts as gone."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
    me = journal._whoami()
    for pid, started in ((process.pid, "7"), (os.getpid(), "7"), (2**22 + 1, "7"), (os.getpid(), me["started"])):
        content = me | {"pid": pid, "started": started, "token": "lost"}
        (tmp_path / "a.lock").write_text(json.dumps(content))
        with Lock.take(tmp_path, "a") as lock:
            assert lock.held, (pid, started)
    process.wait()


@pytest.mark.parametrize("hours", [-5, 0, 5])
def test_clocks_of_other_machines_do_not_matter(hours, tmp_path, monkeypatch):
    """A lock's age is counted in the file system's time: neither this machine's clock nor what the lock says."""
    path, now = foreign_lock(tmp_path), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    assert Lock.take(tmp_path, "a") is None
    stamp = path.stat().st_mtime
    os.utime(path, (stamp, stamp - journal.ABANDONED + 30))
    assert Lock.take(tmp_path, "a") is None
    os.utime(path, (stamp, stamp - journal.ABANDONED - 30))
    with Lock.take(tmp_path, "a") as lock:
        assert lock.held
    os.utime(foreign_lock(tmp_path), (stamp, stamp + 3600))  # from a file system whose clock was set back
    assert Lock.take(tmp_path, "a") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_locks_are_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "TOUCH", 0.01)
    with Lock.take(tmp_path, "a") as lock:
        os.utime(lock.path, (1, 1))
        deadline = time.monotonic() + 20
        while lock.path.stat().st_mtime < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 1000


def test_a_lock_cut_off_by_a_crash(tmp_path):
    path = tmp_path / "a.lock"
    path.write_bytes(b'{"host": "m')
    assert Lock.take(tmp_path, "a") is None
    os.utime(path, (1, 1))
    assert Lock.take(tmp_path, "a") is not None


def test_a_lock_taken_by_another_in_the_meantime(tmp_path):
    """Two processes find one abandoned lock: the one that comes second leaves the first one's new lock in peace."""
    path = foreign_lock(tmp_path)
    seen = path.read_bytes()
    path.unlink()
    first = Lock.take(tmp_path, "a")
    journal._take_away(path, seen)
    assert first.held and [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_a_file_taken_away_from_a_slow_process(tmp_path, monkeypatch):
    """A process that was thought to be gone finds its file made by another, and goes on with the next."""
    write, slow = run.Worker.write, []

    def taken_away(self, folder, shard, temporary, advance):
        if not slow:
            slow.append(shard.name)
            lock = folder / JOURNAL / f"{shard.name}.lock"
            lock.write_bytes(b"{}")

            def clear(*args):
                (folder / temporary).unlink(missing_ok=True)

            write(self, folder, shard, temporary, clear)
        write(self, folder, shard, temporary, advance)

    monkeypatch.setattr(run.Worker, "write", taken_away)
    monkeypatch.setattr(journal, "UNWRITTEN", -1.0)
    quantize(tmp_path / "out")
    assert slow
    assert_complete(tmp_path / "out")


def test_waits_for_another_machine(tmp_path, monkeypatch):
    """A file somebody works on is waited for; here he gives up."""
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(output, progress=lambda p: (_ for _ in ()).throw(KeyboardInterrupt))
    path = foreign_lock(output / JOURNAL, expected_shards()[0])
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            path.unlink()

    monkeypatch.setattr(run.time, "sleep", sleep)
    quantize(output)
    assert len(waits) == 3
    assert_complete(output)


def test_another_process_finishes_first(tmp_path, monkeypatch):
    """It finds all done, and the journal gone, at whatever moment that happens."""
    reference, output = tmp_path / "reference", tmp_path / "out"
    quantize(reference)
    work = run.Run.work

    def finished_meanwhile(self, report):
        shutil.rmtree(output)
        shutil.copytree(reference, output)
        work(self, report)

    monkeypatch.setattr(run.Run, "work", finished_meanwhile)
    quantize(output)
    assert_complete(output)


# --- what is refused -------------------------------------------------------------------------------------------------


def interrupted(output: Path, folder: Path | None = None) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(output, folder, progress=lambda p: (_ for _ in ()).throw(KeyboardInterrupt))


def test_another_config_or_source(tmp_path, monkeypatch):
    """Refused by name; the one that began goes on."""
    output = tmp_path / "out"
    interrupted(output)
    arguments = dict(max_shard_size=SIZE)
    with pytest.raises(ValueError, match="begun with another config: format is 'mxfp4' here, and was 'nvfp4'"):
        quantize_checkpoint(source("qwen3_moe"), output, FP4Config(format="mxfp4"), **arguments)
    with pytest.raises(ValueError, match="begun with another max_shard_size"):
        quantize_checkpoint(source("qwen3_moe"), output, FP4Config())
    with pytest.raises(ValueError, match="begun with another .*Run the command it was begun with"):
        quantize_checkpoint(source("llama"), output, FP4Config(), **arguments)
    copy = tmp_path / "copy"
    shutil.copytree(source("qwen3_moe"), copy)
    (copy / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"begun with another source: files.model.safetensors is"):
        quantize(output, copy)
    one = run.Run(run.Job(str(tmp_path / "copy"), str(output), FP4Config(), "cpu", SIZE, False), read_checkpoint(copy))
    with pytest.raises(ValueError, match="begun with another source"):
        one.resume()  # as each worker does: files may change before it has begun
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="begun with another versions: hf_mxfp4 is"):
        patch.setattr(run, "__version__", "0.0")
        quantize(output)
    quantize(output)
    assert_complete(output)


def test_a_finished_output(tmp_path):
    quantize(tmp_path / "out")
    with pytest.raises(ValueError, match=r"checksums.sha256\); it is a finished checkpoint already"):
        quantize(tmp_path / "out")
    assert_complete(tmp_path / "out")


def test_killed_while_the_journal_is_removed(tmp_path):
    """The same command ends well, makes nothing again, and removes what is left of it."""
    output = tmp_path / "out"
    interrupted(output)
    shutil.copytree(output / JOURNAL, tmp_path / "journal")
    shards = quantize(output).shards
    shutil.copytree(tmp_path / "journal", output / FINISHED)  # its records are gone already
    times = {path: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="begun with another config"):
        quantize_checkpoint(source("qwen3_moe"), output, FP4Config(format="mxfp4"), max_shard_size=SIZE)
    assert quantize(output).resumed == len(shards)
    assert times == {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert_complete(output)


def test_damaged_records(tmp_path):
    """A record that cannot be read is none; without the manifest nothing can be said."""
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(output, progress=lambda p: (_ for _ in ()).throw(KeyboardInterrupt) if p.shards_done == 2 else None)
    first, second = (output / JOURNAL).glob("*.done")
    first.write_bytes(b"")
    second.write_text('{"size": 1}')
    manifest = (output / JOURNAL / "manifest.json").read_bytes()
    (output / JOURNAL / "manifest.json").write_bytes(manifest[:-9])
    with pytest.raises(ValueError, match=r"manifest.json is damaged. Remove .* and start again"):
        quantize(output)
    (output / JOURNAL / "manifest.json").write_bytes(manifest)
    assert quantize(output).resumed == 0
    assert_complete(output)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(format="mxfp4", outlier_fallback=0.01), "outlier_fallback=0.01 needs the whole model.*from_pretrained"),
        (dict(error_feedback=True), "error_feedback=True needs the whole model"),
        (dict(channel_weights=True), "channel_weights=True needs the whole model"),
        (dict(dequantize=True), "dequantize=True"),
        (dict(modules_to_not_convert=[".*"]), "no module of this model can be packed"),
    ],
)
def test_configs_that_are_refused(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(source("qwen3_moe"), tmp_path / "out", FP4Config(**fields))
    assert not (tmp_path / "out").exists()


def test_arguments_that_are_refused(tmp_path):
    output = tmp_path / "out"
    for kwargs, message in [
        (dict(workers=0), "workers=0; allowed: an int, at least 1"),
        (dict(max_shard_size="5"), "max_shard_size=\"?'?5"),
        (dict(device="cuda"), "torch sees no GPU"),
        (dict(device="cuda:99"), "torch sees .* GPU"),
        (dict(device="gpu"), 'device=\'gpu\'; allowed: "cpu", "cuda"'),
        (dict(device="meta"), 'device=\'meta\'; allowed: "cpu", "cuda"'),
    ]:
        if kwargs.get("device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=message):
            quantize_checkpoint(source("llama"), output, FP4Config(), **kwargs)
    with pytest.raises(TypeError, match="config is a dict; pass an FP4Config"):
        quantize_checkpoint(source("llama"), output, {})
    with pytest.raises(ValueError, match="lies inside the source"):
        quantize_checkpoint(source("llama"), source("llama") / "out", FP4Config())
    assert not output.exists()


def changed_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: changed_config(f, architectures=["Nothing"]), "architecture 'Nothing', which transformers"),
        (lambda f: changed_config(f, architectures=None), "architecture None"),
        (lambda f: changed_config(f, quantization_config={"quant_method": "mxfp4"}), "quantized already.*'mxfp4'"),
        (lambda f: changed_config(f, intermediate_size=64), "shape .* in the checkpoint .* in the model"),
        (lambda f: save_file({}, f / "model.safetensors"), "holds no tensors"),
        (lambda f: rewrite(f, lambda t: t.pop(NORM)), f"no values for 1 tensors of LlamaForCausalLM: {NORM}"),
        (lambda f: rewrite(f, lambda t: t.pop(Q)), f"no values for 1 tensors of LlamaForCausalLM: {Q}"),
        (lambda f: rewrite(f, lambda t: t.update({Q: t[Q].to(torch.int8)})), "dtype I8 .* cannot be quantized"),
        (
            lambda f: rewrite(f, lambda t: t.update({Q: t[Q][:-1]})),
            r"q_proj.weight: shape \[63, 64\] in the",
        ),
        (lambda f: cut(f / "model.safetensors"), "is damaged"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "Pickle files can run code"),
    ],
)
def test_sources_that_are_refused(change, message, tmp_path):
    shutil.copytree(source("llama"), tmp_path / "in")
    change(tmp_path / "in")
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", FP4Config())
    assert not (tmp_path / "out").exists()


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_source_with_an_experts_weight_missing(tmp_path):
    folder = rewritten(source("qwen3_moe"), tmp_path / "in", lambda t: {k: v for k, v in t.items() if k != BAD})
    with pytest.raises(ValueError, match=r"experts\.down_proj: shape \[3, 64, 32\] in the checkpoint"):
        quantize(tmp_path / "out", folder)


@pytest.mark.parametrize("change", ["cut", "touched", "replaced"])
def test_a_source_that_changes_meanwhile(change, tmp_path):
    """Found at the next tensor that is read, and named."""
    folder = tmp_path / "in"
    shutil.copytree(source("qwen3_moe"), folder)
    path, told = folder / "model.safetensors", []

    def disturb(progress):
        told.append(progress)
        if len(told) == 3:
            if change == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif change == "touched":
                os.utime(path, ns=(1, 1))
            else:
                shutil.copy(source("llama") / "model.safetensors", path)

    with pytest.raises(ValueError, match="model.safetensors was changed or cut off while it was read"):
        quantize(tmp_path / "out", folder, progress=disturb)
    assert_not_visible(tmp_path / "out")


def test_a_source_cut_off_within_its_time_stamp(tmp_path):
    """The system's clock may not tell; then the bytes are missing."""
    shutil.copytree(source("llama"), tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    reader = Source(read_checkpoint(tmp_path / "in"))
    os.truncate(path, 3000)
    reader.stamps["model.safetensors"] = type(reader.stamps["model.safetensors"]).of(path.stat())
    with pytest.raises(ValueError, match="was changed or cut off"):
        for name in reader.tensors:
            reader.whole(name)


# --- a full disk -----------------------------------------------------------------------------------------------------


def quantize_with_little_space(pipe, output: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        quantize(output)
    except OSError as error:
        pipe.send(f"{type(error).__name__} {error}")


def test_no_space_in_the_middle(tmp_path):
    """A limit on the size of files stands for a full disk. Nothing half-written stays, and all goes on later."""
    output = tmp_path / "out"
    process, pipe = child(quantize_with_little_space, output)
    found = pipe.recv()
    process.join()
    assert "OSError [Errno 27] File too large" in found and "The same command goes on" in found
    assert_not_visible(output)
    assert not list(output.glob(".*.partial")) and not list((output / JOURNAL).glob("*.lock"))
    quantize(output)
    assert_complete(output)


def test_no_space_before(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run, "HEADROOM", usage.free + 1)
    with pytest.raises(OSError, match="GB will be written, and .* are free"):
        quantize(tmp_path / "out")
    monkeypatch.undo()
    shutil.copytree(source("qwen3_moe"), tmp_path / "in")
    with (tmp_path / "in" / "video.mp4").open("wb") as file:
        file.truncate(2 * usage.free)  # a hole; what is copied counts
    with pytest.raises(OSError, match="GB will be written, and .* are free"):
        quantize(tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_another_transformers(tmp_path, monkeypatch):
    """One without the methods that are replaced would load all weights."""
    monkeypatch.delattr(PreTrainedModel, "_finalize_model_loading")
    with pytest.raises(RuntimeError, match="has no _finalize_model_loading; install one of"):
        quantize(tmp_path / "out")


def test_a_file_system_without_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(PermissionError("no links here")))
    quantize(tmp_path / "out")
    assert_complete(tmp_path / "out")


def test_workers_ignore_ctrl_c_from_their_first_moment():
    """While they import, too, which takes seconds; this process hears it again once they are started."""
    seen = []

    class Child:
        def start(self):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    processes._start(Child())
    assert seen == [signal.SIG_IGN] and signal.getsignal(signal.SIGINT) == before
