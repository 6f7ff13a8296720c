# SPDX-License-Identifier: Apache-2.0
"""Timing for scripts/benchmark_kernels.py: contenders take turns, medians count and their spread is kept. What the
machine itself can do (bandwidth, launch floor) is measured the same way."""

import contextlib
import itertools
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

Call = Callable[[], object]
Sampler = Callable[[], float]  # runs a batch once -> microseconds a call
BATCH_US = 1500  # a batch this long makes the gap before it, and the resolution of the clock, less than a percent
MIN_ROUNDS = 5
CACHES = 3  # weights in turn are this many times larger than the last cache


class Times(NamedTuple):
    """Microseconds a call: median and quartiles of the rounds, and how many there were."""

    us: float
    low: float
    high: float
    rounds: int


def summarize(samples: Sequence[float]) -> Times:
    """Median and quartiles; of a single sample that sample."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [*samples] * 3
    return Times(median, low, high, len(samples))


def ratios(samples: dict[str, list[float]], base: str) -> dict[str, Times]:
    """How many times faster than `base` each is: quartiles of the ratios within rounds, so that a slow spell of the
    machine, which hits both, does not count."""
    if base not in samples:
        return {}
    return {
        name: summarize([b / own for b, own in zip(samples[base], times, strict=True)])
        for name, times in samples.items()
    }


def take_turns(
    samplers: dict[str, Sampler], rounds: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Samples of each, round by round, until `rounds` are done or `seconds` are over (but `MIN_ROUNDS` at least).

    Every other round runs backwards: whoever comes after a slow one is not the same each time.
    """
    found: dict[str, list[float]] = {name: [] for name in samplers}
    start = clock()
    for number in range(rounds):
        if number >= MIN_ROUNDS and clock() - start >= seconds:
            break
        for name in list(samplers)[:: -1 if number % 2 else 1]:
            found[name].append(samplers[name]())
    return found


def copies_needed(nbytes: int, cache: int) -> int:
    """Copies of a weight of `nbytes` to go through, so that none is in the cache when its turn comes."""
    return max(2, -(-CACHES * cache // nbytes))


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache, 32 MiB where it is not known."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 32 << 20
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    read = [file.read_text().strip() for file in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in read if text[-1] in units), default=32 << 20)


def host_sampler(calls: Sequence[Call], device: torch.device) -> Sampler:
    """Time of a batch of `calls` in turn; on a GPU, of launching them alone.

    On a CPU with one thread its CPU time counts: what else runs on the machine then only disturbs by way of the caches
    and the memory. With more threads, and for launches, it is the wall clock.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time_ns if alone else time.perf_counter_ns
    turn = itertools.cycle(calls)

    def sample(batch: int) -> float:
        start = clock()
        for _ in range(batch):
            next(turn)()
        return (clock() - start) / 1e3 / batch

    return partial(sample, max(1, int(BATCH_US / max(0.1, sample(min(16, len(calls)))))))


def graph_sampler(calls: Sequence[Call]) -> Sampler:
    """GPU time of `calls` in turn, captured in a CUDA graph and replayed."""

    def many() -> None:
        for call in itertools.islice(itertools.cycle(calls), batch):
            call()

    with on_capture_stream():
        calls[0]()
        pilot = _elapsed(lambda: [call() for call in calls]) / len(calls)
    batch = max(len(calls), min(4096, round(BATCH_US / max(pilot, 0.1))))
    return replay_sampler(capture(many), batch)


_streams: dict[int, torch.cuda.Stream] = {}  # one a device: a kernel's workspaces belong to a stream


@contextlib.contextmanager
def on_capture_stream() -> Iterator[torch.cuda.Stream]:
    """The stream that graphs are captured on. What runs there before finds its workspaces and compiles."""
    device = torch.cuda.current_device()
    stream = _streams.setdefault(device, torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def capture(work: Call) -> Call:
    """A CUDA graph of `work`, which has run `on_capture_stream` before; the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with on_capture_stream() as stream, torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def replay_sampler(replay: Call, calls: int = 1) -> Sampler:
    """GPU time of a captured graph of so many calls."""
    replay()
    replays = max(1, round(BATCH_US / _elapsed(replay)))  # a pilot of direct calls may have waited for the host

    def sample() -> float:
        return _elapsed(lambda: [replay() for _ in range(replays)]) / (calls * replays)

    return sample


def _elapsed(work: Call) -> float:
    """Microseconds of GPU time on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def sampler(calls: Sequence[Call], device: torch.device) -> Sampler:
    """The sampler for a device."""
    return graph_sampler(calls) if device.type == "cuda" else host_sampler(calls, device)


def machine(device: torch.device) -> dict:
    """What bounds every kernel here.

    Returns:
        `dict`: `bandwidth` (bytes/s; CUDA: read and written by a copy, CPU: read by a sum), `flops` (FLOP/s of a large
        bf16 product), `launch_us` (an empty kernel in a graph, CUDA only), `issue` (warp instructions/s, CUDA with a
        known clock only).
    """
    on_gpu = device.type == "cuda"
    source = torch.ones(1 << (29 if on_gpu else 26), dtype=torch.float32, device=device)
    if on_gpu:
        us = _best(partial(torch.empty_like(source).copy_, source), device)
    else:
        us = _best(source.sum, device)
    found = {"bandwidth": source.nbytes * (2 if on_gpu else 1) / (1e-6 * us)}
    del source
    side = 8192 if on_gpu else 2048
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    found["flops"] = 2 * side**3 / (1e-6 * _best(partial(torch.matmul, a, b), device))
    if on_gpu:
        tiny = torch.zeros(1, device=device)
        found["launch_us"] = _best(partial(tiny.add_, 1), device)
        properties = torch.cuda.get_device_properties(device)
        clock = getattr(properties, "clock_rate", 0)  # kHz
        if clock and torch.version.hip is None:
            found["issue"] = properties.multi_processor_count * 4 * clock * 1e3
    return found


def processor(device: torch.device) -> str:
    """Name of a GPU, or of this machine's CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    return found[1].strip() if found else platform.machine()


def _best(work: Call, device: torch.device) -> float:
    """Microseconds of a call, the best of some: these are ceilings."""
    return min(take_turns({"": sampler([work], device)}, 15, 1.0)[""])
