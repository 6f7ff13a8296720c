# SPDX-License-Identifier: Apache-2.0
"""Memory for sums in parts (`permuted.reduce_splits`): a workspace for each launch, and counters at zero."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

COUNTERS = 1 << 16  # in a slab: a few hundred layers in a CUDA graph
_eager: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_slabs: dict[int, torch.Tensor] = {}  # by device: what graphs have not taken yet
_used_up: list[torch.Tensor] = []  # slabs that graphs point into, which hold no reference to them
_lock = threading.Lock()


def split_scratch(device: torch.device, tiles: int, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`elements` float32 with anything in them and `tiles` int32 zeros, for a launch on the current stream.

    A kernel leaves its counters at zero, so the launches on a stream, one after another, share them. Those captured
    in a CUDA graph get counters of their own, cut off a slab that was zeroed before: a graph may run on any stream,
    beside anything. With the slab used up, zeroing becomes part of the graph; the next launch outside a capture makes
    a new one.
    """
    workspace = torch.empty(elements, dtype=torch.float32, device=device)
    if device.type != "cuda":
        return workspace, torch.zeros(tiles, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            slab = _slabs.get(device.index)
            if slab is not None and slab.numel() >= tiles:
                _slabs[device.index] = slab[tiles:]
                return workspace, slab[:tiles]
        return workspace, torch.zeros(tiles, dtype=torch.int32, device=device)
    slab = _slabs.get(device.index)
    if slab is None or slab.numel() < COUNTERS // 2:
        new = lasting_zeros(device, COUNTERS)
        with _lock:
            if device.index in _slabs:
                _used_up.append(_slabs[device.index])
            _slabs[device.index] = new
    stream = device.index, torch.cuda.current_stream(device).cuda_stream
    counters = _eager.get(stream)
    if counters is None or counters.numel() < tiles:
        counters = _eager[stream] = lasting_zeros(device, max(tiles, 4096))
    return workspace, counters


def lasting_zeros(device: torch.device, size: int) -> torch.Tensor:
    """int32 zeros for later launches too, zeroed on the current stream.

    Made by another thread, since a pool of memory is for what one thread allocates: what `torch.compile` warms up for
    its CUDA graphs allocates from theirs, and anything left there is an error.
    """
    stream = torch.cuda.current_stream(device)

    def make() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(size, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
