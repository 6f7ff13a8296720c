# SPDX-License-Identifier: Apache-2.0
"""Memory for sums in parts (`permuted.reduce_splits`): a workspace for each launch, and counters at zero."""

import torch

COUNTERS = 1 << 16  # in a slab: a few hundred layers in a CUDA graph
_eager: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_slabs: dict[int, torch.Tensor] = {}  # by device: what graphs have not taken yet


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
    slab = _slabs.get(device.index)
    if torch.cuda.is_current_stream_capturing():
        if slab is None or slab.numel() < tiles:
            return workspace, torch.zeros(tiles, dtype=torch.int32, device=device)
        _slabs[device.index] = slab[tiles:]
        return workspace, slab[:tiles]
    if slab is None or slab.numel() < COUNTERS // 2:
        _slabs[device.index] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    stream = device.index, torch.cuda.current_stream(device).cuda_stream
    counters = _eager.get(stream)
    if counters is None or counters.numel() < tiles:
        counters = _eager[stream] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
    return workspace, counters
