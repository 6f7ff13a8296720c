# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel in half the time that triton takes for it.

`kernel[grid](...)` finds out in each call how its arguments are specialized and writes its options out as a string
before it finds the compiled kernel: for 18 arguments 11 us of Python (triton 3.7.1, the driver's part left out), here
6. `launch` keeps what the first call returned, under everything that triton (3.6 to 3.9) specializes a CUDA kernel on.
"""

import torch

from hf_mxfp4.kernels.decode import INTERPRET

# On ROCm triton looks at the size of each tensor's memory too.
_PLAIN = INTERPRET or torch.version.hip is not None
_COMPILED: dict[tuple, tuple] = {}


def launch(kernel, grid: tuple[int, int, int], arguments: tuple, constants: dict) -> None:
    """`kernel[grid](*arguments, **constants)`, on the device of the first argument, which is the current one.

    Args:
        kernel: a `triton.jit` function.
        arguments: the kernel's first ones in order: a tensor, then tensors, integers or `None`.
        constants: the others by name, all compile-time, and launch options.
    """
    if _PLAIN:
        kernel[grid](*arguments, **constants)
        return
    kinds = [
        (a.dtype, a.data_ptr() % 16)
        if isinstance(a, torch.Tensor)
        else a and (a == 1, a % 16 == 0, a.bit_length() > 31)
        for a in arguments
    ]
    key = (id(kernel), arguments[0].get_device(), *kinds, tuple(constants), *constants.values())
    known = _COMPILED.get(key)
    if known is None:
        compiled = kernel[grid](*arguments, **constants)
        _COMPILED[key] = compiled, [constants[name] for name in kernel.arg_names[len(arguments) :]]
    else:
        compiled, rest = known
        compiled[grid](*arguments, *rest)
