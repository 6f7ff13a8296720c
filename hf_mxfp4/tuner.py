# SPDX-License-Identifier: Apache-2.0
"""Measuring a device for `kernels/tuning.py`: which launch options and which way are fastest, product by product.

`tune` is told what to measure (`Job`), and by `Bench` how. Every candidate is checked before it is timed. Each
finished job is a line in a journal beside the table, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hf_mxfp4 import dispatch, ops
from hf_mxfp4.analysis import NOT_PACKED
from hf_mxfp4.formats import FORMATS, MACRO_BLOCK, QuantizedTensor

# Rows and columns of the linear layers of Qwen2.5-3B, Qwen3-8B and Qwen3-30B-A3B.
SHAPES = (
    *((12288, 4096), (4096, 12288), (4096, 4096), (1024, 4096), (11008, 2048), (2048, 11008), (2048, 2048)),
    *((256, 2048), (4096, 2048), (2048, 4096)),
)
TOKENS = tuple(1 << i for i in range(13))
GRAD_TOKENS = 64  # fewer are no training step
CHUNK_TOKENS = 64  # fewer are never faster through a decoded weight
FINALISTS = 3  # candidates that are timed a second time, for longer


class Job(NamedTuple):
    """A product to measure: the fields of a table's row that say what it is."""

    kernel: str
    format: str
    dtype: str
    macro: bool
    tokens: int
    n: int
    k: int


class Way(NamedTuple):
    """A candidate: launch options of the fused kernel, or how many weights are decoded at once."""

    options: dict[str, int] | None = None
    chunk: int | None = None


class Unfit(Exception):
    """A candidate that does not run on this device, or whose result is wrong."""


def jobs(
    shapes: Iterable[tuple[int, int]], formats: Iterable[str], dtypes: Iterable[str], tokens: Iterable[int]
) -> list[Job]:
    """All products of these kinds, without repetition. A format may be `"mxfp4+macro"`."""
    found = {}
    for n, k in shapes:
        for name in formats:
            format, _, macro = name.partition("+")
            for dtype in dtypes:
                for count in tokens:
                    for kernel in ("linear", "linear_grad") if count >= GRAD_TOKENS else ("linear",):
                        found[Job(kernel, format, dtype, bool(macro), count, n, k)] = None
    return list(found)


def layer_shapes(headers: dict[str, tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """`(N, K)` of the matrices that are packed, or would be, by names, dtypes and shapes in safetensors headers."""
    found = {}
    for name, (dtype, shape) in headers.items():
        if len(shape) != 2 or re.search(NOT_PACKED, name):
            continue
        if name.endswith("_packed") and dtype == "U8":
            found[shape[0], 2 * shape[1]] = None
        elif name.endswith("weight") and dtype in ("BF16", "F16", "F32") and shape[1] % 32 == 0:
            found[tuple(shape)] = None
    return list(found)


# --- measuring -------------------------------------------------------------------------------------------------------


class Bench:
    """Products on a device: inputs, candidates, results and times.

    Args:
        device (`torch.device`): a CUDA device.
        timer: `timer(calls, thorough) -> microseconds` of one of the calls, which are the same product with weights
            in different places; CUDA graphs if not given.
    """

    def __init__(self, device: torch.device, timer: Callable[[list[Callable], bool], float] | None = None):
        self.device, self.timer = device, timer or graph_time
        self._made: tuple = (None, None, None, None)

    def ways(self, job: Job) -> Iterator[Way]:
        """Everything worth trying, in the order of trying it."""
        for options in self.candidates(job):
            if self._shared_bytes(job, options) <= self._most_shared():
                yield Way(options)
        if job.tokens >= CHUNK_TOKENS and not job.macro:
            whole = job.n * job.k
            yield from (Way(chunk=size) for size in sorted({min(whole, s << 20) for s in (4, 8, 12, 24, 48)}))

    def time(self, job: Job, way: Way, thorough: bool) -> float:
        """Microseconds, the median of many calls. Raises `Unfit`."""
        try:
            x, weights, exact, allowed = self._inputs(job)
            if not thorough:
                self._check(self._run(job, way, x, weights[0]), exact, allowed)
            return self.timer([lambda w=w: self._run(job, way, x, w) for w in weights], thorough)
        except torch.cuda.OutOfMemoryError as error:
            raise Unfit(f"out of memory: {error}") from error
        except Exception as error:
            if type(error).__name__ in ("OutOfResources", "CompilationError", "PTXASError"):  # triton's
                raise Unfit(str(error)) from error
            raise

    def _kernel(self, job: Job):
        from hf_mxfp4.kernels import gemm, gemm_grad

        return gemm_grad if job.kernel == "linear_grad" else gemm

    def candidates(self, job: Job) -> list[dict[str, int]]:
        """Launch options of the fused kernel, the heuristic's first."""
        from hf_mxfp4.kernels.permuted import target_of
        from hf_mxfp4.kernels.tuning import DTYPES

        device = {"device": target_of(self.device)} if job.kernel == "linear" else {}
        return self._kernel(job).candidates(DTYPES[job.dtype], job.tokens, job.n, job.k, 1, job.macro, **device)

    def _run(self, job: Job, way: Way, x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
        grad = job.kernel == "linear_grad"
        if way.chunk is not None:
            return dispatch.product_in_chunks(x, weight, None, True, grad, way.chunk)
        kernel = self._kernel(job)
        return (kernel.linear_grad if grad else kernel.linear)(x, weight, options=way.options)

    def _inputs(self, job: Job):
        """x, weights that do not fit in the L2 cache together, and what a sample of rows must come out as."""
        if self._made[0] != job:
            from hf_mxfp4.kernels.tuning import DTYPES

            self._made = (None, None, None, None)  # the old inputs go before new ones come
            fmt, generator = FORMATS[job.format], torch.Generator(self.device).manual_seed(0)
            copies = self._copies(job.n * job.k * fmt.bits_per_weight / 8)
            weights = [random_weight(job, self.device, generator) for _ in range(copies)]
            width = job.n if job.kernel == "linear_grad" else job.k
            x = torch.randn(job.tokens, width, device=self.device, generator=generator).to(DTYPES[job.dtype])
            dense = ops.dequantize(weights[0], torch.float64)
            dense = dense if job.kernel == "linear_grad" else dense.T
            sample = torch.linspace(0, job.tokens - 1, min(job.tokens, 64), device=self.device).to(torch.int64)
            rows = x[sample].to(torch.float64)
            # Rounding of a weight, of a product and of the result; sums in float32.
            bound = max(torch.finfo(x.dtype).eps, 4e-6) * (rows.abs() @ dense.abs())
            self._made = job, (x, weights, (sample, rows @ dense), bound), None, None
        return self._made[1]

    def _check(self, result: torch.Tensor, exact: tuple, allowed: torch.Tensor) -> None:
        sample, expected = exact
        error = (result[sample].to(torch.float64) - expected).abs()
        if not bool((error <= allowed).all()):  # NaN is not
            raise Unfit(f"wrong: {(error / allowed).max().item():.3g} times the error that rounding allows")

    def _copies(self, nbytes: float) -> int:
        cache = _property(self.device, "L2_cache_size", 1 << 20)
        return max(2, min(64, math.ceil(3 * cache / nbytes)))

    def _most_shared(self) -> int:
        return _property(self.device, "shared_memory_per_block_optin", 1 << 30)

    @staticmethod
    def _shared_bytes(job: Job, options: dict[str, int]) -> int:
        """Shared memory of a program: the tiles of x and of the weight, once for each stage."""
        m, n, k = (options.get(f"TILE_{name}", 0) for name in "MNK")
        inner = n if job.kernel == "linear_grad" else k
        wide = 4 if job.dtype == "fp32" else 2
        return options.get("num_stages", 1) * (m * inner * wide + int(n * k * FORMATS[job.format].bits_per_weight / 8))


def _property(device: torch.device, name: str, unknown: int) -> int:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, name, 0) or unknown


def random_weight(job: Job, device: torch.device, generator: torch.Generator) -> QuantizedTensor:
    """A weight of a job's kind whose bytes are random, about 1 in size."""
    fmt = FORMATS[job.format]

    def bytes_in(low: int, high: int, width: int) -> torch.Tensor:
        return torch.randint(low, high, (job.n, width), dtype=torch.uint8, device=device, generator=generator)

    low, high = (40, 56) if fmt.has_global_scale else (123, 127)
    return QuantizedTensor(
        bytes_in(0, 256, job.k // 2),
        fmt.scale_from_bytes(bytes_in(low, high, job.k // fmt.block_size)),
        torch.tensor(0.37, device=device) if fmt.has_global_scale else None,
        fmt,
        bytes_in(0, 256, -(-job.k // MACRO_BLOCK)) if job.macro else None,
    )


CAPTURED = 64  # calls in a graph: split sums take counters of their own for each (kernels/scratch.py)


def graph_time(calls: list[Callable], thorough: bool) -> float:
    """Microseconds of a call: the median over replays of a CUDA graph that holds some rounds of the calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
        once = _elapsed(calls[0])
    wanted = math.ceil((5000 if thorough else 1000) / max(once, 1))
    captured = max(1, min(CAPTURED, wanted) // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(captured):
            calls[i % len(calls)]()
    replays = math.ceil(wanted / captured)

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    replay()
    return statistics.median(_elapsed(replay) for _ in range(9 if thorough else 3)) / (replays * captured)


def _elapsed(call: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


# --- the choice ------------------------------------------------------------------------------------------------------


def best(job: Job, bench, on_unfit: Callable[[Job, Way, str], None] = lambda *_: None) -> dict | None:
    """A row of the table for a job, or `None` if no candidate fits. All are timed, the fastest ones again.

    `bench` has `ways(job)` and `time(job, way, thorough)`.
    """

    def timed(ways: Iterable[Way], thorough: bool) -> list[tuple[float, int, Way]]:
        found = []
        for way in ways:
            try:
                found.append((bench.time(job, way, thorough), len(found), way))
            except Unfit as reason:
                on_unfit(job, way, str(reason))
        return sorted(found)

    first = timed(bench.ways(job), False)
    row = {**job._asdict(), "options": None, "us": None, "chunk": None, "chunk_us": None}
    for field, time in (("options", "us"), ("chunk", "chunk_us")):
        finalists = [way for *_, way in first if getattr(way, field) is not None][:FINALISTS]
        for microseconds, _, way in timed(finalists, True)[:1]:
            row |= {field: getattr(way, field), time: round(microseconds, 3)}
    return row if row["us"] or row["chunk_us"] else None


def tune(
    work: list[Job],
    bench,
    path: Path,
    head: dict,
    on_done: Callable[[int, Job, dict | None], None] = lambda *_: None,
    on_unfit: Callable[[Job, Way, str], None] = lambda *_: None,
) -> int:
    """Measure `work` and write the table `path`; rows that it has of other products stay in it.

    Args:
        bench: see `best`.
        head (`dict`): what the table says of the device and the versions (`tuning.head_of`). A journal or a table with
            another device, triton or kernels does not count.
        on_done: `on_done(jobs finished, job, row)` after each, those of an earlier run included.

    Returns:
        How many rows were measured now.
    """
    journal = path.with_name(path.name + ".journal")
    path.parent.mkdir(parents=True, exist_ok=True)
    same = {key: head[key] for key in ("device", "triton", "sources")}
    done = {job_of(row): row for row in _read_journal(journal, same)}
    measured = 0
    with journal.open("a" if done else "w", encoding="utf-8") as file:
        if not done:
            file.write(json.dumps(same) + "\n")
        for number, job in enumerate(work, 1):
            row = done.get(job)
            if row is None:
                row = best(job, bench, on_unfit)
                if row is not None:
                    measured += 1
                    done[job] = row
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            on_done(number, job, row)
    write_table(path, head, _rows_kept(path, same) | done)
    journal.unlink()
    return measured


def job_of(row: dict) -> Job:
    return Job(*(row[field] for field in Job._fields))


def _read_journal(path: Path, same: dict) -> list[dict]:
    """Rows of an earlier run under the same versions; a line that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows[1:] if rows and rows[0] == same else []


def _rows_kept(path: Path, same: dict) -> dict[Job, dict]:
    from hf_mxfp4.kernels.tuning import read_table

    try:
        table = read_table(path)
    except ValueError:
        return {}
    sound = all(table.head.get(key) == value for key, value in same.items())
    return {job_of(row._asdict()): row._asdict() for row in table.rows} if sound else {}


def write_table(path: Path, head: dict, rows: dict[Job, dict]) -> None:
    """Write a table, a row to a line, in order; a reader sees the old file or the new one."""
    lines = ",\n".join("  " + json.dumps(rows[job]) for job in sorted(rows))
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
