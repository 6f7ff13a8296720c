# SPDX-License-Identifier: Apache-2.0
"""Several processes on one output: each plans for itself and takes files through the journal."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_mxfp4.streaming.progress import Progress, Report

if TYPE_CHECKING:
    from hf_mxfp4.streaming.run import Job, Run


class Stopped(Exception):
    """Another worker has failed."""


def work(job: Job, run: Run, workers: int, progress: Callable[[Progress], None] | None) -> None:
    """Make all files of a run in `workers` processes.

    A worker that is killed is replaced by the others, which take over its file.

    Raises:
        ValueError, OSError: what a worker raised; the others stop where they are and leave nothing half-written.
        RuntimeError: for any other failure, with its traceback, and if all were killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    messages, stop = context.Queue(), context.Event()
    threads = max(1, _cores() // workers)
    children = [
        context.Process(target=_main, args=(job, number, threads, messages, stop), daemon=True)
        for number in range(workers)
    ]
    report, failure = Report(run.sizes, run.finished, progress), None
    for child in children:
        child.start()
    try:
        while any([child.exitcode is None for child in children]) or not messages.empty():  # each is to be reaped
            try:
                kind, number, content = messages.get(timeout=0.2)
            except queue.Empty:
                report.look()
                continue
            if kind == "failure":
                failure = failure or content
                stop.set()
            else:
                getattr(report, kind)(*content, worker=number)
    finally:
        stop.set()
        for child in children:
            child.join()
    if failure is not None:
        kind, arguments = failure
        raise kind(*arguments)
    if len(run.finished()) < len(run.sizes) and run.journal.exists:
        codes = ", ".join(str(child.exitcode) for child in children)
        raise RuntimeError(
            f"all worker processes ended before the work was done (exit codes {codes}; -9: killed, perhaps for want "
            "of memory). The same command goes on where this one stopped; try fewer workers."
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _main(job: Job, number: int, threads: int, messages, stop) -> None:
    from hf_mxfp4.streaming.run import Run, read_source

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one tells the others
    torch.set_num_threads(threads)
    try:
        run = Run(job, read_source(job.source))
        run.work(_Messages(run, number, messages, stop))
    except Stopped:
        return
    except (ValueError, OSError) as error:
        kind: Any = OSError if isinstance(error, OSError) else ValueError
        arguments = (error.errno, error.strerror) if kind is OSError and error.errno else (str(error),)
        messages.put(("failure", number, (kind, arguments)))
    except Exception:
        messages.put(("failure", number, (RuntimeError, (traceback.format_exc(),))))


class _Messages(Report):
    """A worker's report, which goes to the process that started it."""

    def __init__(self, run: Run, number: int, messages, stop):
        super().__init__(run.sizes, run.finished, None)
        self.number, self.messages, self.stop = number, messages, stop

    def advance(self, nbytes: int, name: str, worker: int = 0) -> None:
        if self.stop.is_set():
            raise Stopped
        self.messages.put(("advance", self.number, (nbytes, name)))

    def shard(self, name: str, worker: int = 0) -> None:
        self.messages.put(("shard", self.number, (name,)))

    def look(self) -> None:
        if self.stop.is_set():
            raise Stopped
