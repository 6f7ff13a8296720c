# SPDX-License-Identifier: Apache-2.0
"""Several processes on one output: each plans for itself and takes files through the journal."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

from hf_mxfp4.streaming.progress import Progress, Report

if TYPE_CHECKING:
    from hf_mxfp4.streaming.run import Job, Run


class Stopped(Exception):
    """The process that started this worker has failed, was interrupted, or is gone."""


def work(job: Job, run: Run, workers: int, progress: Callable[[Progress], None] | None) -> None:
    """Make all files of a run in `workers` processes.

    A worker that is killed is replaced by the others, which take over its file. Each worker has a pipe of its own, so
    that one that is killed holds up nobody, and finds it closed once this process stops or is gone.

    Raises:
        ValueError, OSError: what a worker raised; the others stop where they are and leave nothing half-written.
        RuntimeError: for any other failure, with its traceback, and if all were killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    threads = max(1, _cores() // workers)
    report = Report(run.sizes, run.finished, progress)
    children, pipes = [], {}
    try:
        for number in range(workers):
            reader, writer = context.Pipe(duplex=False)
            pipes[reader] = number
            child = context.Process(target=_main, args=(job, threads, writer), daemon=True)
            with writer:  # the worker's alone: reading ends with the worker
                _start(child)
            children.append(child)
        failure = _listen(pipes, report)
    finally:
        for reader in pipes:
            reader.close()
        for child in children:
            child.join()
    if failure is not None:
        kind, arguments = failure
        raise kind(*arguments)
    if run.journal.exists and len(run.finished()) < len(run.sizes):
        codes = ", ".join(str(child.exitcode) for child in children)
        raise RuntimeError(
            f"all worker processes ended before the work was done (exit codes {codes}; -9: killed, perhaps for want "
            "of memory; 1: see what it wrote). The same command goes on where this one stopped; try fewer workers."
        )


def _listen(pipes: dict[Connection, int], report: Report) -> tuple[type[Exception], tuple] | None:
    """Report what workers tell until all have ended, or one has failed: then with what."""
    waiting = set(pipes)
    while waiting:
        ready = wait(waiting, timeout=0.2)
        if not ready:
            report.look()
        for reader in ready:
            try:
                kind, content = reader.recv()
            except (EOFError, OSError):
                waiting.discard(reader)
                continue
            if kind == "failure":
                return content
            if kind != "alive":
                getattr(report, kind)(*content, worker=pipes[reader])
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(child: BaseProcess) -> None:
    """Start a worker that ignores Ctrl-C, even while it imports: that reaches every process, and the first one tells
    the others."""
    if threading.current_thread() is not threading.main_thread():  # others may not change what is ignored
        child.start()
        return
    known = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child inherits what is ignored
    try:
        child.start()
    finally:
        signal.signal(signal.SIGINT, known)


def _main(job: Job, threads: int, pipe: Connection) -> None:
    from hf_mxfp4.streaming.run import Run, read_source

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where `_start` could not
    torch.set_num_threads(threads)
    try:
        run = Run(job, read_source(job.source))
        run.resume()
        run.work(_Messages(run, pipe))
    except Stopped:
        return
    except (ValueError, OSError) as error:
        kind: Any = OSError if isinstance(error, OSError) else ValueError
        arguments = (error.errno, error.strerror) if kind is OSError and error.errno else (str(error),)
        with contextlib.suppress(Stopped):
            _tell(pipe, "failure", kind, arguments)
    except Exception:
        with contextlib.suppress(Stopped):
            _tell(pipe, "failure", RuntimeError, (traceback.format_exc(),))


def _tell(pipe: Connection, kind: str, *content: Any) -> None:
    try:
        pipe.send((kind, content))
    except BrokenPipeError as error:
        raise Stopped from error


class _Messages(Report):
    """A worker's report, which goes to the process that started it."""

    def __init__(self, run: Run, pipe: Connection):
        super().__init__(run.sizes, run.finished, None)
        self.pipe = pipe

    def advance(self, nbytes: int, name: str, worker: int = 0) -> None:
        _tell(self.pipe, "advance", nbytes, name)

    def shard(self, name: str, worker: int = 0) -> None:
        _tell(self.pipe, "shard", name)

    def look(self) -> None:
        _tell(self.pipe, "alive")
