# SPDX-License-Identifier: Apache-2.0
"""The operators `torch.ops.hf_mxfp4.*` and the functions around them: dequantize, linear, grouped_linear.

Each operator is declared once below: schema, checks, shape, gradient. Its implementation picks, by device and
`backend`, a Triton kernel or plain torch:

    "auto"    kernels on CUDA and ROCm; plain torch on other devices and for float64
    "triton"  the fused kernel or an error (CPU tensors only under TRITON_INTERPRET=1, for tests)
    "torch"   plain torch on any device: the weight is decoded chunk by chunk into a scratch buffer

With "auto", many tokens at once (`FUSED_TOKENS`) also go through chunks, decoded by a kernel. Products of chunks are
`F.linear` of the dequantized weight in x's dtype, up to the order of its sums. Weights with macro factors are never
rounded to 16 bits: they take the fused kernel for any number of tokens, or are multiplied in float32. Nothing is kept
between calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F

from hf_mxfp4 import reference
from hf_mxfp4.formats import MACRO_BLOCK, QuantizedTensor
from hf_mxfp4.operands import COUNT, DTYPES, SCHEMA, check_dtype, check_input, check_weight, operands

FUSED_TOKENS = 1024  # from here on decoding once and a dense product are faster than the fused kernel
CHUNK_WEIGHTS = {"cpu": 1 << 20}  # weights decoded at once: 4 MB in float32 stay in a core's caches
CHUNK_WEIGHTS_ELSEWHERE = 1 << 26


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> torch.Tensor:
    """Decode a packed weight, `E2M1[code] * scale * macro * global_scale`, formed in float32 and rounded once, and put
    its outliers in place.

    Args:
        weight (`QuantizedTensor`): `[..., N, K]`; `global_scale` float32 `[...]` or `None`.
        dtype (`torch.dtype`): float32, bfloat16, float16 or float64 (which holds the float32 values).
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `torch.Tensor` `[..., N, K]`, equal bit for bit on every backend.
    """
    return torch.ops.hf_mxfp4.dequantize(*operands(weight), weight.format.name, dtype, backend)


def linear(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """`x @ W.T + bias`, differentiable with respect to x and bias. Casts them as `F.linear` does under autocast.

    Args:
        x (`torch.Tensor`): `[..., K]`, float32, bfloat16, float16 or float64, with any strides; no tokens are fine.
        weight (`QuantizedTensor`): `[N, K]`; `global_scale` float32 `[]`, `[1]` or `None`.
        bias (`torch.Tensor`, *optional*): `[N]`.
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `torch.Tensor` `[..., N]` in x's dtype (the autocast dtype under autocast).
    """
    x, bias = autocast_inputs(x, bias)
    return torch.ops.hf_mxfp4.linear(x, None, *operands(weight), bias, weight.format.name, backend)


def grouped_linear(
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer per expert over tokens sorted by expert: row t of expert e becomes `x[t] @ W[e].T + bias[e]`.

    Args:
        x (`torch.Tensor`): `[T, K]`; float32, bfloat16, float16 or float64.
        offsets (`torch.Tensor`): int32 `[E+1]`, on x's device, not decreasing; rows `offsets[e] .. offsets[e+1]` are
            expert e's. Rows before the first and after the last offset belong to none and come out as zeros. On CUDA
            with kernels the host does not wait for these values (nor check them).
        weight (`QuantizedTensor`): `[E, N, K]`; `global_scale` float32 `[E]` or `None`.
        bias (`torch.Tensor`, *optional*): `[E, N]`.
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `torch.Tensor` `[T, N]` in x's dtype (the autocast dtype under autocast). Differentiable as `linear` is.
    """
    x, bias = autocast_inputs(x, bias)
    return torch.ops.hf_mxfp4.linear(x, offsets, *operands(weight), bias, weight.format.name, backend)


def autocast_inputs(x, bias):
    """Cast as autocast does for `F.linear`: every float dtype but float64. Scales stay as they are."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        bias = bias.to(dtype) if bias is not None and bias.dtype != torch.float64 else bias
    return x, bias


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


def _decode(weight: QuantizedTensor, dtype: torch.dtype, kernels: bool, first: int = 0) -> torch.Tensor:
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
        return F.linear(wide, _decode(weight, dtype, kernels), bias).to(x.dtype)
    out = x.new_empty(x.shape[0], n)
    for rows in chunks:
        dense = _decode(weight.rows(rows), dtype, kernels)
        out[:, rows] = F.linear(wide, dense, None if bias is None else bias[rows])
    return out


def _product_grad(grad: torch.Tensor, weight: QuantizedTensor, kernels: bool) -> torch.Tensor:
    """`grad [T, N] @ W` by chunks of W's columns: each sum over N is one product, never added up in low precision."""
    (n, k), dtype = weight.shape, _product_dtype(grad, weight)
    wide, step = grad.to(dtype), weight.format.block_size if weight.macro is None else MACRO_BLOCK
    chunks = _chunks(k, n, step, grad.device) if grad.shape[0] else []
    if len(chunks) == 1:
        return (wide @ _decode(weight, dtype, kernels)).to(grad.dtype)
    out = grad.new_empty(grad.shape[0], k)
    for columns in chunks:
        part = _columns(weight, columns)
        out[:, columns] = wide @ _decode(part, dtype, kernels, columns.start)
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


def _run(x, offsets, weight: QuantizedTensor, bias, backend: str, grad: bool) -> torch.Tensor:
    """x through the weight, or with `grad` through its transpose; by the fused kernel or by chunks."""
    kernels = use_kernels(x.device, x.dtype, backend)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    features = weight.shape[-1 if grad else -2]

    def product(rows, weight, bias):
        return _product_grad(rows, weight, kernels) if grad else _product(rows, weight, bias, kernels)

    fused = offsets is not None or weight.macro is not None or backend == "triton" or rows.shape[0] < FUSED_TOKENS
    if kernels and fused:
        from hf_mxfp4.kernels import gemm

        out = gemm.linear_grad(rows, weight, offsets) if grad else gemm.linear(rows, weight, bias, offsets)
    elif offsets is None:
        out = product(rows, weight, bias)
    else:
        out = _by_expert(rows, offsets, weight, bias, product, features)
    return out.view(*x.shape[:-1], features)


# --- operators -------------------------------------------------------------------------------------------------------


def _check_dequantize(*arguments) -> QuantizedTensor:
    *weight, format, dtype, backend = arguments
    check_dtype("output", dtype, *DTYPES)
    return check_weight(weight, format, None, backend)


def _dequantize(*arguments):
    weight, (dtype, backend) = _check_dequantize(*arguments), arguments[-2:]
    return _decode(weight, dtype, use_kernels(weight.packed.device, dtype, backend))


def _dequantize_fake(*arguments):
    weight, dtype = _check_dequantize(*arguments), arguments[-2]
    return weight.packed.new_empty(weight.shape, dtype=dtype)


def _check_linear(x, offsets, *arguments, grad) -> QuantizedTensor:
    *weight, bias, format, backend = arguments
    weight = check_weight(weight, format, 2 if offsets is None else 3, backend)
    check_input(x, "grad" if grad else "x", weight.shape[-2 if grad else -1], weight, bias, offsets)
    return weight


def _linear(x, offsets, *arguments, grad=False):
    weight, (bias, _, backend) = _check_linear(x, offsets, *arguments, grad=grad), arguments[-3:]
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)  # whose casts would only undo the caller's choice of dtypes
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        return _run(x, offsets, weight, bias, backend, grad)


def _linear_fake(x, offsets, *arguments, grad=False):
    weight = _check_linear(x, offsets, *arguments, grad=grad)
    return x.new_empty(*x.shape[:-1], weight.shape[-1 if grad else -2])


def _linear_grad(grad, offsets, *arguments):
    *weight, format, backend = arguments
    return _linear(grad, offsets, *weight, None, format, backend, grad=True)


def _linear_grad_fake(grad, offsets, *arguments):
    *weight, format, backend = arguments
    return _linear_fake(grad, offsets, *weight, None, format, backend, grad=True)


_BIAS = 2 + COUNT  # its place among `linear`'s arguments


def _save(ctx, inputs, output) -> None:
    """For either operator: offsets, the packed weight and the options are kept, and of a bias its dtype."""
    ctx.save_for_backward(*inputs[1:_BIAS])
    ctx.bias_dtype, ctx.options = getattr(inputs[_BIAS], "dtype", None), inputs[-2:]


def _backward_linear(ctx, grad):
    offsets, *weight = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_mxfp4.linear_grad(grad, offsets, *weight, *ctx.options)
    if ctx.needs_input_grad[_BIAS]:
        rows = grad.reshape(-1, grad.shape[-1])
        grad_bias = (rows.sum(0) if offsets is None else _sum_by_expert(rows, offsets)).to(ctx.bias_dtype)
    return grad_x, *[None] * (1 + COUNT), grad_bias, None, None


def _sum_by_expert(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums `[E, N]` over the rows `[T, N]` of each expert, without reading `offsets` on the host."""
    index = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    index = torch.searchsorted(offsets, index, right=True)  # 0 before the first expert, E + 1 after the last
    total = rows.new_zeros((offsets.shape[0] + 1, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add(0, index, rows.to(total.dtype))[1:-1]


def _backward_linear_grad(ctx, grad):
    offsets, *weight = ctx.saved_tensors
    return torch.ops.hf_mxfp4.linear(grad, offsets, *weight, None, *ctx.options), *[None] * (3 + COUNT)


def define_operator(name: str, schema: str, implementation: Callable, fake: Callable, *autograd: Callable) -> None:
    """Declare an operator: one implementation for all devices, its shape and checks, and (save, backward)."""
    name = f"hf_mxfp4::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(name, fake)
    if autograd:
        save, backward = autograd
        torch.library.register_autograd(name, backward, setup_context=save)


define_operator(
    "dequantize", f"({SCHEMA}, str format, ScalarType dtype, str backend) -> Tensor", _dequantize, _dequantize_fake
)
# With offsets a stack of matrices, one for each expert; without, one matrix.
define_operator(
    "linear",
    f"(Tensor x, Tensor? offsets, {SCHEMA}, Tensor? bias, str format, str backend) -> Tensor",
    *(_linear, _linear_fake, _save, _backward_linear),
)
define_operator(
    "linear_grad",
    f"(Tensor grad, Tensor? offsets, {SCHEMA}, str format, str backend) -> Tensor",
    *(_linear_grad, _linear_grad_fake, _save, _backward_linear_grad),
)
