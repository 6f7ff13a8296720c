# SPDX-License-Identifier: Apache-2.0
"""Which implementation computes a product with a packed weight, and the implementations in chunks.

    "auto"    kernels on CUDA and ROCm; plain torch on other devices and for float64
    "triton"  the fused kernel or an error (CPU tensors only under TRITON_INTERPRET=1, for tests)
    "torch"   plain torch on any device: the weight is decoded chunk by chunk into a scratch buffer

With "auto", many tokens at once (`FUSED_TOKENS`) also go through chunks, decoded by a kernel. Products of chunks are
`F.linear` of the dequantized weight in x's dtype, up to the order of its sums. Weights with macro factors are never
rounded to 16 bits: they take the fused kernel for any number of tokens, or are multiplied in float32. Nothing is kept
between calls.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F

from hf_mxfp4 import reference
from hf_mxfp4.formats import MACRO_BLOCK, QuantizedTensor

FUSED_TOKENS = 1024  # from here on decoding once and a dense product are faster than the fused kernel
CHUNK_WEIGHTS = {"cpu": 1 << 20}  # weights decoded at once: 4 MB in float32 stay in a core's caches
CHUNK_WEIGHTS_ELSEWHERE = 1 << 26


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


def decode(weight: QuantizedTensor, dtype: torch.dtype, kernels: bool, first: int = 0) -> torch.Tensor:
    """Decoded weight; its columns are those from `first` on, as far as outliers (which are not cut) are concerned."""
    if kernels:
        from hf_mxfp4.kernels.dequantize import dequantize

        return dequantize(weight, dtype, first)
    dense = reference.dequantize(weight._replace(outliers=None), dtype)
    if weight.outliers is not None:
        reference.scatter_outliers(dense.view(-1, dense.shape[-1]), weight.outliers, first)
    return dense


def _chunks(length: int, other: int, step: int, device: torch.device) -> list[slice]:
    """Slices of a dimension of a matrix, in multiples of `step`, of `CHUNK_WEIGHTS` weights or a little less."""
    most = CHUNK_WEIGHTS.get(device.type, CHUNK_WEIGHTS_ELSEWHERE) // max(1, other)
    size = max(step, most // step * step)
    return [slice(start, start + size) for start in range(0, length, size)]


def _product_dtype(x: torch.Tensor, weight: QuantizedTensor) -> torch.dtype:
    """What x is multiplied in: a weight times its macro factor has 11 significant bits, bfloat16 has 8."""
    return x.dtype if weight.macro is None else torch.promote_types(x.dtype, torch.float32)


def _product(x: torch.Tensor, weight: QuantizedTensor, bias, kernels: bool) -> torch.Tensor:
    """`x [T, K] @ W.T + bias` by chunks of W's rows."""
    (n, k), dtype = weight.shape, _product_dtype(x, weight)
    wide, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    chunks = _chunks(n, k, 1, x.device) if x.shape[0] else []
    if len(chunks) == 1:
        return F.linear(wide, decode(weight, dtype, kernels), bias).to(x.dtype)
    out = x.new_empty(x.shape[0], n)
    for rows in chunks:
        dense = decode(weight.rows(rows), dtype, kernels)
        out[:, rows] = F.linear(wide, dense, None if bias is None else bias[rows])
    return out


def _product_grad(grad: torch.Tensor, weight: QuantizedTensor, kernels: bool) -> torch.Tensor:
    """`grad [T, N] @ W` by chunks of W's columns: each sum over N is one product, never added up in low precision."""
    (n, k), dtype = weight.shape, _product_dtype(grad, weight)
    wide, step = grad.to(dtype), weight.format.block_size if weight.macro is None else MACRO_BLOCK
    chunks = _chunks(k, n, step, grad.device) if grad.shape[0] else []
    if len(chunks) == 1:
        return (wide @ decode(weight, dtype, kernels)).to(grad.dtype)
    out = grad.new_empty(grad.shape[0], k)
    for columns in chunks:
        part = _columns(weight, columns)
        out[:, columns] = wide @ decode(part, dtype, kernels, columns.start)
    return out


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
    kernels = use_kernels(x.device, x.dtype, backend)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    features = weight.shape[-1 if grad else -2]

    def matrix_product(rows, weight, bias):
        return _product_grad(rows, weight, kernels) if grad else _product(rows, weight, bias, kernels)

    fused = offsets is not None or weight.macro is not None or backend == "triton" or rows.shape[0] < FUSED_TOKENS
    if kernels and fused:
        from hf_mxfp4.kernels import gemm, gemm_grad

        out = gemm_grad.linear_grad(rows, weight, offsets) if grad else gemm.linear(rows, weight, bias, offsets)
    elif offsets is None:
        out = matrix_product(rows, weight, bias)
    else:
        out = _by_expert(rows, offsets, weight, bias, matrix_product, features)
    return out.view(*x.shape[:-1], features)
