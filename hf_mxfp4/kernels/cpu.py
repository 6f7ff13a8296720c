# SPDX-License-Identifier: Apache-2.0
"""Linear layers and decoding on CPU tensors in C (cpu.c), for float32, bfloat16 and float16. Imports no triton.

The C extension is built at install time where there is a compiler; `why_not` says why it does not run. Products of
codes, scales and x are exact, sums are formed in float32; x is never rounded. Twins: `reference.linear` and
`reference.dequantize`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from hf_mxfp4.formats import QuantizedTensor

try:
    from hf_mxfp4.kernels import _cpu
except ImportError as error:
    _cpu, _error = None, error

TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
VARIABLE = "HF_MXFP4_CPU"  # a path's name, or "torch" for none
THREAD_WEIGHTS = 1 << 19  # weights a thread must have to be worth waking up
SLICE = 256  # tokens that are brought in order at a time
# From here on decoding once and a dense product are faster. Measured on Zen 5, 2048 x 4096 to 11008 x 2048.
MANY_BFLOAT16 = 64  # with VDPBF16PS
MANY_FLOAT16 = 128  # torch has no fast product in float16
MANY_FLOAT32 = 12  # and where bfloat16 goes through float32
MANY_HALVES = 96  # as bfloat16 twice, not float32: 1.0 of the time with 64 tokens, 0.8 with 128, 0.6 with 512


@functools.cache
def paths() -> dict[str, bool]:
    """The instruction sets the extension was compiled for, best first, and whether this CPU has them."""
    return dict(_cpu.paths()) if _cpu else {}


@functools.cache
def path() -> str | None:
    """The instruction set in use, `None` where plain torch runs instead (`why_not`)."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return next((name for name, usable in paths().items() if usable), None)
    usable = [name for name, usable in paths().items() if usable]
    if asked not in (*usable, "torch"):
        raise ValueError(f"{VARIABLE}={asked!r}; possible here: {', '.join((*usable, 'torch'))}.")
    return None if asked == "torch" else asked


def why_not() -> str | None:
    """Why plain torch runs on CPU tensors, `None` if it does not."""
    if path() is not None:
        return None
    if _cpu is None:
        return f"the C extension cannot be imported ({_error}); install again with a C compiler and Python's headers"
    return f"{VARIABLE}=torch"


def few(tokens: int, dtype: torch.dtype, macro: bool) -> bool:
    """Whether `linear` is faster for so many tokens than decoding and a dense product."""
    if dtype == torch.float16:
        return tokens < MANY_FLOAT16
    if dtype == torch.bfloat16 and path() == "avx512_bf16":
        return macro or tokens < MANY_BFLOAT16  # dense products with macro factors are float32
    return tokens < MANY_FLOAT32


def halves(tokens: int, dtype: torch.dtype) -> bool:
    """Whether a dense product in bfloat16 of twice the length is faster than one in float32."""
    return dtype == torch.bfloat16 and path() == "avx512_bf16" and tokens >= MANY_HALVES


@functools.cache
def openmp() -> str | None:
    """The OpenMP library torch computes with, told to the extension; `None` leaves it with one thread."""
    own = Path(torch.__file__).parent
    for file in sorted(_loaded_libraries(), key=lambda file: not file.is_relative_to(own)):
        if any(name in file.name for name in ("libgomp", "libomp", "libiomp")):
            try:
                function = ctypes.CDLL(str(file), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW).GOMP_parallel
            except (OSError, AttributeError):
                continue
            _cpu.set_parallel(ctypes.cast(function, ctypes.c_void_p).value)
            if hasattr(os, "register_at_fork"):  # a child has one thread, and GOMP waits for the others forever
                os.register_at_fork(after_in_child=lambda: _cpu.set_parallel(0))
            return str(file)
    return None


def _loaded_libraries() -> list[Path]:
    """Files of libraries in this process; where it cannot be asked, those that come with torch."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return sorted(Path(torch.__file__).parent.glob("lib/lib*omp*.dylib"))
    return [Path(file) for file in dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines) if ".so" in file]


@functools.cache
def _path_number(name: str | None) -> int:
    return 64 * list(paths()).index(name)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same `[R, C]` with dense rows, which may stand apart."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _threads(weights: int) -> int:
    threads = torch.get_num_threads()
    return 1 if threads == 1 or openmp() is None else max(1, min(threads, weights // THREAD_WEIGHTS))


class _Weight:
    """A matrix as the extension takes it; keeps alive what `arguments` points to."""

    def __init__(self, weight: QuantizedTensor, threads: int, name: str | None):
        packed, scale = _rows(weight.packed), _rows(weight.scale)
        macro = None if weight.macro is None else _rows(weight.macro)
        values, columns, offsets, types, count = None, None, None, 0, 0
        if weight.outliers is not None and weight.outliers.values.numel():
            values, columns, offsets = (t.contiguous() for t in weight.outliers)
            types, count = TYPES[values.dtype] + 8 * columns.element_size(), values.numel()
        self.alive = packed, scale, macro, values, columns, offsets
        self.arguments = (
            *(packed.data_ptr(), scale.data_ptr(), _pointer(macro)),
            *(packed.stride(0), scale.stride(0), 0 if macro is None else macro.stride(0)),
            *(packed.shape[0], 2 * packed.shape[1], weight.format.scale_dtype == torch.uint8),
            _pointer(weight.global_scale),
            *(_pointer(values), _pointer(columns), _pointer(offsets)),
            *(types + _path_number(name or path()), count, threads),
        )


def linear(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None, name: str | None = None
) -> torch.Tensor:
    """`x [T, K] @ W.T + bias` in `x.dtype` (float32, bfloat16, float16), for few tokens; weight `[N, K]`.

    `name` chooses an instruction set out of `paths`.
    """
    tokens, n = x.shape[0], weight.packed.shape[0]
    x = _rows(x)
    if bias is not None:
        bias = (bias.float() if bias.dtype == torch.float64 else bias).contiguous()
    out = x.new_empty(tokens, n)
    whole = _Weight(weight, _threads(n * x.shape[1] * (1 + tokens // 4)), name)
    x_type, stride, bias_type = TYPES[x.dtype], x.stride(0), 0 if bias is None else TYPES[bias.dtype]
    for start in range(0, tokens, SLICE) if n else ():
        here, there = (t.data_ptr() + start * t.stride(0) * t.itemsize for t in (x, out))
        now = min(SLICE, tokens - start)
        _cpu.linear(*whole.arguments, here, x_type, stride, now, there, _pointer(bias), bias_type)
    return out


def dequantize(
    weight: QuantizedTensor,
    dtype: torch.dtype,
    first: int = 0,
    out: torch.Tensor | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """Decode a weight `[..., N, K]` to float32, bfloat16 or float16; into `out`, dense, if that is given.

    Its columns are those from `first` on, as far as outliers (which are not cut) are concerned.
    """
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype)
    if out.numel() == 0:
        return out
    *lead, k = out.shape
    n = lead[-1] if lead else 1
    stack = weight._replace(
        packed=weight.packed.reshape(-1, n, k // 2),
        scale=weight.scale.reshape(-1, n, weight.scale.shape[-1]),
        macro=None if weight.macro is None else weight.macro.reshape(-1, n, weight.macro.shape[-1]),
        global_scale=None if weight.global_scale is None else weight.global_scale.reshape(-1),
    )
    threads, bytes_each = _threads(n * k), k * out.itemsize
    for index, matrix in enumerate(out.view(-1, n, k)):
        whole = _Weight(stack.matrix(index), threads, name)
        _cpu.decode(*whole.arguments, matrix.data_ptr(), TYPES[dtype], bytes_each, first)
    return out
