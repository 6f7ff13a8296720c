# SPDX-License-Identifier: Apache-2.0
"""Launch a kernel on a GPU that is not there, by triton and by `launch`; both must ask the same of the driver.

One process, started by test_launch.py. Prints "same" and how many launches there were.
"""

import torch
import triton
import triton.language as tl
from made_driver import MadeDriver
from triton.runtime import driver

LAUNCHES: list[tuple] = []


class Driver(MadeDriver):
    """Compiles for Hopper; what is launched is written down."""

    arch, shared, processors = 90, 232448, 132

    def launcher_cls(self, source, metadata):
        return lambda *arguments: LAUNCHES.append((metadata.hash, *map(identity, arguments)))


def identity(argument):
    """Tensors by address; the driver's own objects, made anew for each launch, by type."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return type(argument).__name__ if " object at " in str(argument) else str(argument)


driver.set_active(Driver())

from hf_mxfp4.kernels.launch import launch  # noqa: E402 (the driver comes first)


@triton.jit(do_not_specialize=["tokens"])
def kernel(x, bias, out, tokens, n, stride, TILE: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + offsets * stride, mask=offsets < n, other=0.0)
    if bias is not None:
        value += tl.load(bias + offsets, mask=offsets < tokens, other=0.0)
    tl.store(out + offsets, value.to(DTYPE), mask=offsets < n if EVEN else offsets < n - 1)


def main() -> None:
    base = torch.zeros(1 << 12)
    aligned, shifted, half = base[:512], base[1:513], base.to(torch.float16)
    variants = [
        (x, bias, aligned, tokens, n, stride)
        for x in (aligned, shifted, half)
        for bias in (None, shifted)
        for tokens, n, stride in ((1, 64, 16), (16, 63, 1), (7, 1 << 40, 3), (0, 1, 0))
    ]
    options = ({"TILE": 32, "DTYPE": tl.float32, "num_warps": 1}, {"TILE": 64, "DTYPE": tl.float16, "num_warps": 2})
    for arguments in variants:
        for i, option in enumerate(options):
            constants, grid, found = {**option, "EVEN": i == 0}, (2, 3, 1), []
            for way in (0, 1, 1):
                LAUNCHES.clear()
                if way:
                    launch(kernel, grid, arguments, constants)
                else:
                    kernel[grid](*arguments, **constants)
                (launched,) = LAUNCHES
                found.append(launched)
            assert found[0] == found[1] == found[2], (arguments[3:], constants, found)
    print("same", len(variants) * len(options))


main()
