# SPDX-License-Identifier: Apache-2.0
"""The operators `torch.ops.hf_mxfp4.*` and the functions around them: dequantize, linear, grouped_linear.

Each operator is declared once below: schema, checks, shape, gradient. Its implementation picks, by device and
`backend`, a Triton kernel or plain torch:

    "auto"    kernels on CUDA and ROCm; plain torch on other devices and for float64
    "triton"  the fused kernel or an error (CPU tensors only under TRITON_INTERPRET=1, for tests)
    "torch"   plain torch on any device: the weight is decoded chunk by chunk into a scratch buffer

With "auto", many tokens at once (`FUSED_TOKENS`) also go through chunks, decoded by a kernel. Products of chunks are
`F.linear` of the dequantized weight in x's dtype, up to the order of its sums. Nothing is kept between calls.
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
from hf_mxfp4.formats import FORMATS, QuantizedTensor

BACKENDS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FUSED_TOKENS = 1024  # from here on decoding once and a dense product are faster than the fused kernel
CHUNK_WEIGHTS = {"cpu": 1 << 20}  # weights decoded at once: 4 MB in float32 stay in a core's caches
CHUNK_WEIGHTS_ELSEWHERE = 1 << 26


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> torch.Tensor:
    """Decode a packed weight, `E2M1[code] * scale * global_scale`, formed in float32 and rounded once.

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
    x, bias = _autocast(x, bias)
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
    x, bias = _autocast(x, bias)
    return torch.ops.hf_mxfp4.linear(x, offsets, *operands(weight), bias, weight.format.name, backend)


def operands(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`packed`, `scale` as bytes, `global_scale`: a weight as the operators take it, next to its format's name.

    Bytes, since `torch.library.opcheck` compares inputs before and after, which torch cannot do for float8.
    """
    found, fmt = weight.scale.dtype, weight.format
    if found != fmt.scale_dtype:  # no torch._check_type: torch.compile of 2.11 cannot trace it
        raise TypeError(f"scale: dtype {found}, expected {fmt.scale_dtype} for {fmt.name}.")
    return weight.packed, weight.scale.view(torch.uint8), weight.global_scale


def _autocast(x, bias):
    """Cast as autocast does for `F.linear`: every float dtype but float64. Scales stay as they are."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        bias = bias.to(dtype) if bias is not None and bias.dtype != torch.float64 else bias
    return x, bias


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_dtype(name: str, found: torch.dtype, *allowed: torch.dtype) -> None:
    torch._check_type(found in allowed, lambda: f"{name}: dtype {found}, expected {' or '.join(map(str, allowed))}.")


def _check_shape(name: str, tensor, expected: tuple, why: str) -> None:
    found = tuple(tensor.shape)
    torch._check_value(found == expected, lambda: f"{name}: shape {found}, expected {expected}: {why}.")


def _check_devices(**tensors) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    torch._check(
        len(set(devices.values())) == 1,
        lambda: "All tensors must be on one device: " + ", ".join(f"{n} is on {d}" for n, d in devices.items()) + ".",
    )


def _check_weight(packed, scale, global_scale, format: str, ndim: int | None, backend: str) -> QuantizedTensor:
    """The weight as a `QuantizedTensor`, its dtypes, shapes and devices checked; `ndim` is what it must have."""
    torch._check_value(format in FORMATS, lambda: f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    torch._check_value(backend in BACKENDS, lambda: f"backend={backend!r}: expected one of {', '.join(BACKENDS)}.")
    fmt = FORMATS[format]
    _check_dtype("packed", packed.dtype, torch.uint8)
    _check_dtype("scale", scale.dtype, torch.uint8)
    torch._check_value(
        packed.ndim == ndim if ndim else packed.ndim > 0,
        lambda: f"packed: shape {tuple(packed.shape)}, expected {ndim or 'at least one'} dimensions, the last of K/2.",
    )
    *lead, byte = packed.shape
    torch._check_value(
        2 * byte % fmt.block_size == 0,
        lambda: f"packed: {2 * byte} weights a row are not a multiple of {fmt.name}'s block size {fmt.block_size}.",
    )
    _check_shape("scale", scale, (*lead, 2 * byte // fmt.block_size), f"one for {fmt.block_size} weights along a row")
    if global_scale is not None:
        _check_dtype("global_scale", global_scale.dtype, torch.float32)
        if tuple(global_scale.shape) != (1,) or len(lead) > 1:
            _check_shape("global_scale", global_scale, tuple(lead[:-1]), "one for each matrix")
    _check_devices(packed=packed, scale=scale, global_scale=global_scale)
    return QuantizedTensor(packed, fmt.scale_from_bytes(scale), global_scale, fmt)


def _check_input(x, name: str, features: int, weight: QuantizedTensor, bias=None, offsets=None) -> None:
    """Check the activations (or a gradient) whose last dimension must be `features`, the bias, and the offsets."""
    _check_dtype(name, x.dtype, *DTYPES)
    torch._check_value(
        x.ndim > 0 and x.shape[-1] == features and (offsets is None or x.ndim == 2),
        lambda: (
            f"{name}: shape {tuple(x.shape)}, expected [{'...' if offsets is None else 'T'}, {features}] for a weight "
            f"of shape {tuple(weight.shape)}."
        ),
    )
    if bias is not None:
        _check_dtype("bias", bias.dtype, *DTYPES)
        _check_shape("bias", bias, tuple(weight.shape[:-1]), "one for each output")
    if offsets is not None:
        _check_dtype("offsets", offsets.dtype, torch.int32)
        _check_shape("offsets", offsets, (weight.shape[0] + 1,), "one more than experts")
    _check_devices(**{name: x}, packed=weight.packed, bias=bias, offsets=offsets)


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


def _decode(weight: QuantizedTensor, dtype: torch.dtype, kernels: bool) -> torch.Tensor:
    if not kernels:
        return reference.dequantize(weight, dtype)
    from hf_mxfp4.kernels.dequantize import dequantize

    return dequantize(weight, dtype)


def _chunks(length: int, other: int, step: int, device: torch.device) -> list[slice]:
    """Slices of a dimension of a matrix, in multiples of `step`, of `CHUNK_WEIGHTS` weights or a little less."""
    most = CHUNK_WEIGHTS.get(device.type, CHUNK_WEIGHTS_ELSEWHERE) // max(1, other)
    size = max(step, most // step * step)
    return [slice(start, start + size) for start in range(0, length, size)]


def _product(x: torch.Tensor, weight: QuantizedTensor, bias, kernels: bool) -> torch.Tensor:
    """`x [T, K] @ W.T + bias` by chunks of W's rows."""
    (n, k), fmt = weight.shape, weight.format
    bias = None if bias is None else bias.to(x.dtype)
    chunks = _chunks(n, k, 1, x.device) if x.shape[0] else []
    if len(chunks) == 1:
        return F.linear(x, _decode(weight, x.dtype, kernels), bias)
    out = x.new_empty(x.shape[0], n)
    for rows in chunks:
        part = QuantizedTensor(weight.packed[rows], weight.scale[rows], weight.global_scale, fmt)
        out[:, rows] = F.linear(x, _decode(part, x.dtype, kernels), None if bias is None else bias[rows])
    return out


def _product_grad(grad: torch.Tensor, weight: QuantizedTensor, kernels: bool) -> torch.Tensor:
    """`grad [T, N] @ W` by chunks of W's columns: each sum over N is one product, never added up in low precision."""
    (n, k), fmt = weight.shape, weight.format
    chunks = _chunks(k, n, fmt.block_size, grad.device) if grad.shape[0] else []
    if len(chunks) == 1:
        return grad @ _decode(weight, grad.dtype, kernels)
    out = grad.new_empty(grad.shape[0], k)
    for columns in chunks:
        byte, block = (slice(columns.start // d, columns.stop // d) for d in (2, fmt.block_size))
        part = QuantizedTensor(weight.packed[:, byte], weight.scale[:, block], weight.global_scale, fmt)
        out[:, columns] = grad @ _decode(part, grad.dtype, kernels)
    return out


def _by_expert(x, offsets, weight: QuantizedTensor, bias, product: Callable, features: int) -> torch.Tensor:
    """`product(rows of x, the expert's weight, its bias)` for each expert; zeros `[T, features]` where none."""
    out = x.new_zeros(x.shape[0], features)
    bounds = offsets.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > x.shape[0]:
        raise ValueError(f"offsets: {bounds} must rise from >= 0 to at most the number of rows, {x.shape[0]}.")
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            own = QuantizedTensor(*(None if t is None else t[expert] for t in weight[:3]), weight.format)
            out[start:end] = product(x[start:end], own, None if bias is None else bias[expert])
    return out


def _run(x, offsets, weight: QuantizedTensor, bias, backend: str, grad: bool) -> torch.Tensor:
    """x through the weight, or with `grad` through its transpose; by the fused kernel or by chunks."""
    kernels = use_kernels(x.device, x.dtype, backend)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    features = weight.shape[-1 if grad else -2]

    def product(rows, weight, bias):
        return _product_grad(rows, weight, kernels) if grad else _product(rows, weight, bias, kernels)

    if kernels and (offsets is not None or backend == "triton" or rows.shape[0] < FUSED_TOKENS):
        from hf_mxfp4.kernels import gemm

        out = gemm.linear_grad(rows, weight, offsets) if grad else gemm.linear(rows, weight, bias, offsets)
    elif offsets is None:
        out = product(rows, weight, bias)
    else:
        out = _by_expert(rows, offsets, weight, bias, product, features)
    return out.view(*x.shape[:-1], features)


# --- operators -------------------------------------------------------------------------------------------------------


def _check_dequantize(packed, scale, global_scale, format, dtype, backend) -> QuantizedTensor:
    _check_dtype("output", dtype, *DTYPES)
    return _check_weight(packed, scale, global_scale, format, None, backend)


def _dequantize(packed, scale, global_scale, format, dtype, backend):
    weight = _check_dequantize(packed, scale, global_scale, format, dtype, backend)
    return _decode(weight, dtype, use_kernels(packed.device, dtype, backend))


def _dequantize_fake(packed, scale, global_scale, format, dtype, backend):
    weight = _check_dequantize(packed, scale, global_scale, format, dtype, backend)
    return packed.new_empty(weight.shape, dtype=dtype)


def _check_linear(x, offsets, packed, scale, global_scale, bias, format, backend, grad) -> QuantizedTensor:
    weight = _check_weight(packed, scale, global_scale, format, 2 if offsets is None else 3, backend)
    _check_input(x, "grad" if grad else "x", weight.shape[-2 if grad else -1], weight, bias, offsets)
    return weight


def _linear(x, offsets, packed, scale, global_scale, bias, format, backend, grad=False):
    weight = _check_linear(x, offsets, packed, scale, global_scale, bias, format, backend, grad)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)  # whose casts would only undo the caller's choice of dtypes
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        return _run(x, offsets, weight, bias, backend, grad)


def _linear_fake(x, offsets, packed, scale, global_scale, bias, format, backend, grad=False):
    weight = _check_linear(x, offsets, packed, scale, global_scale, bias, format, backend, grad)
    return x.new_empty(*x.shape[:-1], weight.shape[-1 if grad else -2])


def _linear_grad(grad, offsets, packed, scale, global_scale, format, backend):
    return _linear(grad, offsets, packed, scale, global_scale, None, format, backend, grad=True)


def _linear_grad_fake(grad, offsets, packed, scale, global_scale, format, backend):
    return _linear_fake(grad, offsets, packed, scale, global_scale, None, format, backend, grad=True)


def _save(ctx, inputs, output) -> None:
    """For either operator: offsets, the packed weight and the options are kept, and of a bias its dtype."""
    ctx.save_for_backward(*inputs[1:5])
    ctx.bias_dtype, ctx.options = getattr(inputs[5], "dtype", None), inputs[-2:]


def _backward_linear(ctx, grad):
    offsets, *weight = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_mxfp4.linear_grad(grad, offsets, *weight, *ctx.options)
    if ctx.needs_input_grad[5]:
        rows = grad.reshape(-1, grad.shape[-1])
        grad_bias = (rows.sum(0) if offsets is None else _sum_by_expert(rows, offsets)).to(ctx.bias_dtype)
    return grad_x, None, None, None, None, grad_bias, None, None


def _sum_by_expert(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums `[E, N]` over the rows `[T, N]` of each expert, without reading `offsets` on the host."""
    index = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    index = torch.searchsorted(offsets, index, right=True)  # 0 before the first expert, E + 1 after the last
    total = rows.new_zeros((offsets.shape[0] + 1, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add(0, index, rows.to(total.dtype))[1:-1]


def _backward_linear_grad(ctx, grad):
    offsets, *weight = ctx.saved_tensors
    return torch.ops.hf_mxfp4.linear(grad, offsets, *weight, None, *ctx.options), *[None] * 6


def define_operator(name: str, schema: str, implementation: Callable, fake: Callable, *autograd: Callable) -> None:
    """Declare an operator: one implementation for all devices, its shape and checks, and (save, backward)."""
    name = f"hf_mxfp4::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(name, fake)
    if autograd:
        save, backward = autograd
        torch.library.register_autograd(name, backward, setup_context=save)


_WEIGHT = "Tensor packed, Tensor scale, Tensor? global_scale"
define_operator(
    "dequantize", f"({_WEIGHT}, str format, ScalarType dtype, str backend) -> Tensor", _dequantize, _dequantize_fake
)
# With offsets a stack of matrices, one for each expert; without, one matrix.
define_operator(
    "linear",
    f"(Tensor x, Tensor? offsets, {_WEIGHT}, Tensor? bias, str format, str backend) -> Tensor",
    *(_linear, _linear_fake, _save, _backward_linear),
)
define_operator(
    "linear_grad",
    f"(Tensor grad, Tensor? offsets, {_WEIGHT}, str format, str backend) -> Tensor",
    *(_linear_grad, _linear_grad_fake, _save, _backward_linear_grad),
)
