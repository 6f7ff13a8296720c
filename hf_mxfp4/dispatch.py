# SPDX-License-Identifier: Apache-2.0
"""Which implementation computes a product with a packed weight, and the implementations in chunks.

    "auto"    kernels on CUDA and ROCm; C on CPUs, where it was compiled; plain torch elsewhere and for float64
    "triton"  the fused kernel or an error (CPU tensors only under TRITON_INTERPRET=1, for tests)
    "torch"   plain torch on any device: the weight is decoded chunk by chunk into a scratch buffer

With "auto", many tokens at once also go through chunks, decoded by a kernel: where the device's table says so
(kernels/tuning.py), or from `FUSED_TOKENS` on. Products of chunks are `F.linear` of the dequantized weight in x's
dtype, up to the order of its sums. Weights with macro factors are never rounded to 16 bits: they take the fused kernel
for any number of tokens, or are multiplied in float32 (or as the sum of two numbers in bfloat16, where that is
faster). Nothing is kept between calls; where kernels run, nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable

import torch

from hf_mxfp4 import reference
from hf_mxfp4.formats import MACRO_BLOCK, QuantizedTensor

# From here on decoding once and a dense product are faster than the fused kernel, where no table knows: estimates for
# an H200, of forward and gradient.
FUSED_TOKENS, FUSED_TOKENS_GRAD = 1024, 512
C = "c"
CHUNK_WEIGHTS = {"cpu": 1 << 21}  # weights decoded at once: 8 MB in float32 stay in the caches
CHUNK_WEIGHTS_AT_LEAST = 1 << 23  # elsewhere: half of the L2 cache, but enough outputs to keep a GPU busy


# --- which implementation --------------------------------------------------------------------------------------------


def use_kernels(device: torch.device, dtype: torch.dtype, backend: str) -> bool:
    """Whether Triton kernels run; raises if they are demanded and cannot, warns once if they would be missed."""
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or dtype == torch.float64)):
        return False
    reason = "float64 has no kernel" if dtype == torch.float64 else _why_no_kernels(device)
    if reason is None:
        return True
    if backend == "triton":
        raise RuntimeError(f'backend="triton": {reason}. backend="torch" works on every device.')
    _warn_slow(reason)
    return False


def product_kernels(device: torch.device, dtype: torch.dtype, backend: str) -> bool | str:
    """Of products and decoding: `use_kernels`, or `C` where C does them. Nothing else is written in C."""
    if use_kernels(device, dtype, backend):
        return True
    return C if backend == "auto" and device.type == "cpu" and dtype != torch.float64 and _has_c() else False


@functools.cache
def _has_c() -> bool:
    from hf_mxfp4.kernels import cpu

    return cpu.path() is not None


@functools.cache
def _why_no_kernels(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or `None` if they can."""
    try:
        from hf_mxfp4.kernels.decode import INTERPRET
    except ImportError as error:
        return f"triton cannot be imported ({error}); install triton >= 3.6"
    if device.type == "cpu":
        return None if INTERPRET else "CPU tensors need TRITON_INTERPRET=1 set before triton is imported"
    if device.type != "cuda":
        return f"there are kernels for CUDA and ROCm, not for {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}, the kernels need 8.0 or newer"
    return None


@functools.cache
def _warn_slow(reason: str) -> None:
    warnings.warn(
        f'hf_mxfp4: {reason}. Weights are decoded in plain torch instead, which is slow; backend="torch" says so '
        "without this warning.",
        stacklevel=2,
    )


# --- implementations -------------------------------------------------------------------------------------------------


def decode(weight: QuantizedTensor, dtype: torch.dtype, kernels: bool | str, first: int = 0, out=None) -> torch.Tensor:
    """Decoded weight; its columns are those from `first` on, as far as outliers (which are not cut) are concerned.

    `out` is room that may be used for it, `[N, K]` in `dtype`, dense: only what is returned counts.
    """
    if kernels == C:
        from hf_mxfp4.kernels import cpu

        return cpu.dequantize(weight, dtype, first, out)
    if kernels:
        from hf_mxfp4.kernels.dequantize import dequantize

        return dequantize(weight, dtype, first, out)
    dense = reference.dequantize(weight._replace(outliers=None), dtype)
    if weight.outliers is not None:
        reference.scatter_outliers(dense.view(-1, dense.shape[-1]), weight.outliers, first)
    return dense


def chunk_weights(like: torch.Tensor) -> int:
    """Weights that are decoded at once where no table knows better, on a tensor's device and in its dtype."""
    return CHUNK_WEIGHTS.get(like.device.type) or _cached_weights(like.device, like.itemsize)


@functools.cache
def _cached_weights(device: torch.device, itemsize: int) -> int:
    """As many as a GPU's L2 cache holds until they are read (H200: 12 M in 16 bits)."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
    return max(CHUNK_WEIGHTS_AT_LEAST, cache * 12 // 25 // itemsize)


def _chunks(length: int, other: int, step: int, like: torch.Tensor, most: int | None = None) -> list[slice]:
    """Equal slices of a dimension of a matrix, in multiples of `step`, of at most `most` weights or thereabouts."""
    most = most or chunk_weights(like)
    size = max(step, most // max(1, other) // step * step)
    step = math.lcm(step, 256) if size > 2048 else step  # whole tiles of the product
    size = -(-length // -(-length // size) // step) * step if length else step
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _product_dtype(x: torch.Tensor, weight: QuantizedTensor) -> torch.dtype:
    """What x is multiplied in: a weight times its macro factor has 11 significant bits, bfloat16 has 8."""
    return x.dtype if weight.macro is None else torch.promote_types(x.dtype, torch.float32)


def _multiply(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out = x @ matrix + bias`, in place: out may be columns of something wider, in another dtype."""
    if out.dtype != x.dtype:
        out.copy_(x @ matrix if bias is None else torch.addmm(bias, x, matrix))
    elif bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)


def _product(
    x: torch.Tensor, weight: QuantizedTensor, bias, kernels: bool | str, most: int | None = None
) -> torch.Tensor:
    """`x [T, K] @ W.T + bias` by chunks of W's rows, all decoded into one scratch buffer; `most` weights at once."""
    if kernels == C:
        from hf_mxfp4.kernels import cpu

        if cpu.few(x.shape[0], x.dtype, weight.macro is not None):
            return cpu.linear(x, weight, bias)
    (n, k), dtype = weight.shape, _product_dtype(x, weight)
    out, scratch = x.new_empty(x.shape[0], n), None
    wide, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    for rows in _chunks(n, k, 1, wide, most) if x.shape[0] else ():
        part = weight.rows(rows)
        scratch = decode(part, dtype, kernels, out=None if scratch is None else scratch[: part.packed.shape[0]])
        _multiply(wide, scratch.T, None if bias is None else bias[rows], out[:, rows])
    return out


def _product_grad(
    grad: torch.Tensor, weight: QuantizedTensor, kernels: bool | str, most: int | None = None
) -> torch.Tensor:
    """`grad [T, N] @ W` by chunks of W's columns: each sum over N is one product, never added up in low precision."""
    (n, k), dtype = weight.shape, _product_dtype(grad, weight)
    halves = kernels == C and dtype != grad.dtype and _are_halves_faster(grad, weight)
    wide = torch.cat([grad, grad], 1) if halves else grad.to(dtype)
    step = weight.format.block_size if weight.macro is None else MACRO_BLOCK
    out, scratch = grad.new_empty(grad.shape[0], k), None
    for columns in _chunks(k, n, step, wide, most) if grad.shape[0] else ():
        part, width = _columns(weight, columns), columns.stop - columns.start
        room = None if scratch is None else scratch.view(-1)[: n * width].view(n, width)
        scratch = decode(part, dtype, kernels, columns.start, room)
        _multiply(wide, _halves(scratch) if halves else scratch, None, out[:, columns])
    return out


def _are_halves_faster(grad: torch.Tensor, weight: QuantizedTensor) -> bool:
    """Whether `_halves` are exact, and faster on this CPU than a product in float32."""
    from hf_mxfp4.kernels import cpu

    exact = weight.outliers is None or weight.outliers.values.dtype != torch.float32
    return exact and cpu.halves(grad.shape[0], grad.dtype)


def _halves(matrix: torch.Tensor) -> torch.Tensor:
    """A float32 matrix `[N, K]` (which is written to) as bfloat16 `[2N, K]`: rounded, and below it what that left out.

    A weight times its macro factor has 11 significant bits: it is the sum of the two. So a product in bfloat16, which
    is summed up in float32, loses nothing.
    """
    halves = matrix.new_empty((2, *matrix.shape), dtype=torch.bfloat16)
    halves[0] = matrix
    halves[1] = matrix.sub_(halves[0])
    halves[1].nan_to_num_(0, 0, 0)  # of infinite weights, which the first half has
    return halves.flatten(0, 1)


def product_in_chunks(x, weight: QuantizedTensor, bias, kernels: bool | str, grad: bool, most: int | None = None):
    """`_product_grad` or `_product`; `most` weights at once."""
    return _product_grad(x, weight, kernels, most) if grad else _product(x, weight, bias, kernels, most)


def _columns(weight: QuantizedTensor, columns: slice) -> QuantizedTensor:
    """Columns of a matrix, from a whole (macro-)block on, as views; the outliers stay those of all columns."""

    def cut(tensor, each):
        return None if tensor is None else tensor[:, columns.start // each : -(-columns.stop // each)]

    packed, scale = cut(weight.packed, 2), cut(weight.scale, weight.format.block_size)
    return weight._replace(packed=packed, scale=scale, macro=cut(weight.macro, MACRO_BLOCK))


def _by_expert(x, offsets, weight: QuantizedTensor, bias, product: Callable, features: int) -> torch.Tensor:
    """`product(rows of x, the expert's weight, its bias)` for each expert; zeros `[T, features]` where none."""
    out = x.new_zeros(x.shape[0], features)
    bounds = offsets.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > x.shape[0]:
        raise ValueError(f"offsets: {bounds} must rise from >= 0 to at most the number of rows, {x.shape[0]}.")
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            out[start:end] = product(x[start:end], weight.matrix(expert), None if bias is None else bias[expert])
    return out


def product(x, offsets, weight: QuantizedTensor, bias, backend: str, grad: bool) -> torch.Tensor:
    """x through the weight, or with `grad` through its transpose; by the fused kernel or by chunks."""
    kernels = product_kernels(x.device, x.dtype, backend)
    rows = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    *_, n, byte = weight.packed.shape
    options, most, fused = None, None, offsets is not None or weight.macro is not None or backend == "triton"
    if kernels is True and offsets is None:
        from hf_mxfp4.kernels import tuning

        kernel, tokens, macro = "linear_grad" if grad else "linear", rows.shape[0], weight.macro is not None
        choice = tuning.choose(kernel, x.device, x.dtype, weight.format.name, tokens, n, 2 * byte, macro)
        if choice is not None:
            options, most = choice.options, choice.chunk
        elif tokens >= (FUSED_TOKENS_GRAD if grad else FUSED_TOKENS):
            most = chunk_weights(x)
        fused = fused or most is None
    if kernels is True and fused:
        from hf_mxfp4.kernels import gemm, gemm_grad

        if grad:
            out = gemm_grad.linear_grad(rows, weight, offsets, options)
        else:
            out = gemm.linear(rows, weight, bias, offsets, options)
    elif offsets is None:
        out = product_in_chunks(rows, weight, bias, kernels, grad, most)
    else:

        def matrix_product(rows, weight, bias):
            return product_in_chunks(rows, weight, bias, kernels, grad)

        out = _by_expert(rows, offsets, weight, bias, matrix_product, 2 * byte if grad else n)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], out.shape[1])
