# SPDX-License-Identifier: Apache-2.0
"""The operators `torch.ops.hf_mxfp4.*` and the functions around them: dequantize, linear, grouped_linear.

Each operator is declared once below: schema, checks, shape, gradient. `dispatch` picks its implementation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from hf_mxfp4 import dispatch
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.operands import (
    COUNT,
    DTYPES,
    SCHEMA,
    as_weight,
    check_dtype,
    check_input,
    check_once,
    check_weight,
    operands,
)


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
    return call(_LINEAR, x, None, *operands(weight), bias, weight.format.name, backend)


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
    return call(_LINEAR, x, offsets, *operands(weight), bias, weight.format.name, backend)


def autocast_inputs(x, bias):
    """Cast as autocast does for `F.linear`: every float dtype but float64. Scales stay as they are."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        bias = bias.to(dtype) if bias is not None and bias.dtype != torch.float64 else bias
    return x, bias


# --- operators -------------------------------------------------------------------------------------------------------


def _check_dequantize(*arguments) -> QuantizedTensor:
    *weight, format, dtype, backend = arguments
    check_dtype("output", dtype, *DTYPES)
    return check_weight(weight, format, None, backend)


def _dequantize(*arguments):
    weight, (dtype, backend) = _check_dequantize(*arguments), arguments[-2:]
    return dispatch.decode(weight, dtype, dispatch.product_kernels(weight.packed.device, dtype, backend))


def _dequantize_fake(*arguments):
    weight, dtype = _check_dequantize(*arguments), arguments[-2]
    return weight.packed.new_empty(weight.shape, dtype=dtype)


def _check_linear(x, offsets, *arguments) -> QuantizedTensor:
    *weight, bias, format, backend, grad = arguments
    weight = check_weight(weight, format, 2 if offsets is None else 3, backend)
    check_input(x, "grad" if grad else "x", weight.shape[-2 if grad else -1], weight, bias, offsets)
    return weight


def _linear(x, offsets, *arguments, grad=False):
    check_once(_check_linear, x, offsets, *arguments, grad)
    bias, format, backend = arguments[COUNT:]
    weight, device = as_weight(arguments[:COUNT], FORMATS[format]), x.device.type
    if not torch.is_autocast_enabled(device):
        return dispatch.product(x, offsets, weight, bias, backend, grad)
    with torch.autocast(device, enabled=False):  # whose casts would only undo the caller's choice of dtypes
        return dispatch.product(x, offsets, weight, bias, backend, grad)


def _linear_fake(x, offsets, *arguments, grad=False):
    weight = _check_linear(x, offsets, *arguments, grad)
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
        grad_bias = (rows.sum(0) if offsets is None else sum_by_expert(rows, offsets)).to(ctx.bias_dtype)
    return grad_x, *[None] * (1 + COUNT), grad_bias, None, None


def sum_by_expert(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
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
    qualified = f"hf_mxfp4::{name}"
    torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(qualified, fake)
    if autograd:
        operator = getattr(torch.ops.hf_mxfp4, name).default
        torch.library.impl(qualified, "Autograd", _differentiable(operator, *autograd))


def _differentiable(operator, save: Callable, backward: Callable) -> Callable:
    """What `torch.library.register_autograd` makes of (save, backward), but for 35 us that its reading of the schema
    takes in each call with a gradient (torch 2.13)."""

    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*inputs)
            if output._is_view():  # autograd would refuse changes in place of it, such as adapters make
                output = torch.ops.aten._unsafe_view(output, output.shape)
        save(ctx, inputs, output)
        return output

    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{operator.name()} has no forward-mode derivative; use reverse mode (backward).")

    methods = {"forward": forward, "backward": backward, "jvp": jvp}
    methods = {name: staticmethod(method) for name, method in methods.items()}
    function = type(f"{operator._opname}_backward", (torch.autograd.Function,), methods)

    def with_gradient(*inputs):
        # Outside of the function forward-mode tangents would be lost in silence, as they are with torch's own.
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)) or forward_ad._current_level >= 0:
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return with_gradient


def call(operator, x: torch.Tensor, *arguments) -> torch.Tensor:
    """`operator(x, *arguments)`; where no gradient can be asked for, without a stop at its gradient's dispatch key.

    That stop is Python, and half of what the dispatch of an eager call takes.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(x, *arguments))
    ):
        return operator(x, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(x, *arguments)


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
_LINEAR = torch.ops.hf_mxfp4.linear.default
