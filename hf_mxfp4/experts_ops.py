# SPDX-License-Identifier: Apache-2.0
"""The operator `torch.ops.hf_mxfp4.experts`, a whole layer of fused experts on packed weights.

Kernels do it in two or three launches (kernels/experts.py); plain torch, their twin, expert by expert. For the
gradient nothing is kept but the inputs: the first projection is computed again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from hf_mxfp4 import dispatch
from hf_mxfp4.activations import ACTIVATIONS, Activation
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.operands import (
    COUNT,
    DTYPES,
    SCHEMA,
    as_weight,
    check_devices,
    check_dtype,
    check_input,
    check_once,
    check_shape,
    check_weight,
    operands,
)
from hf_mxfp4.ops import autocast_inputs, call, define_operator, sum_by_expert


def experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    first: QuantizedTensor,
    first_bias: torch.Tensor | None,
    down: QuantizedTensor,
    down_bias: torch.Tensor | None,
    activation: Activation,
    backend: str = "auto",
) -> torch.Tensor:
    """Tokens through their experts, differentiable with respect to x, the routing weights and the biases.

    Args:
        x (`torch.Tensor`): `[M, H]`, float32, bfloat16, float16 or float64. The product of the first projection goes
            through the activation in float32; its result is rounded to x's dtype. Cast as `F.linear` does under
            autocast.
        top_k_index (`torch.Tensor`): int64 or int32 `[M, k]`, expert ids; ids outside `0 .. E-1` (expert-parallel
            sentinels) contribute nothing and cost nothing. The host does not read them on CUDA with kernels.
        top_k_weights (`torch.Tensor`): `[M, k]`, a float dtype.
        first (`QuantizedTensor`): `[E, 2I, H]` with a gate, or `[E, I, H]` without.
        first_bias (`torch.Tensor`, *optional*): `[E, 2I]` or `[E, I]`.
        down (`QuantizedTensor`): `[E, H, I]`, in the format of `first`.
        down_bias (`torch.Tensor`, *optional*): `[E, H]`.
        activation (`Activation`): what stands between the projections.
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `torch.Tensor` `[M, H]` in x's dtype (the autocast dtype under autocast): the sum over a token's experts in
        float32, rounded once.
    """
    if first.format is not down.format:
        raise ValueError(f"down: format {down.format.name}, expected that of the first, {first.format.name}.")
    x, _ = autocast_inputs(x, None)
    weights = (*operands(first), first_bias, *operands(down), down_bias)
    return call(_EXPERTS, x, top_k_index, top_k_weights, *weights, *activation, first.format.name, backend)


def route(top_k_index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots (a token's choices, `m * k + j`) sorted by expert, int64 `[M*k]`, and int32 offsets `[E+1]` of experts."""
    expert, order = top_k_index.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts + 1, device=expert.device, dtype=expert.dtype)
    return order, torch.searchsorted(expert, bounds).to(torch.int32)


class Halves(NamedTuple):
    """How tokens sorted by expert meet a stack of E matrices `[2I, K]` that is seen as 2E matrices `[I, K]`.

    Attributes:
        token: int64 `[2T]`: the row of each row that is to be multiplied.
        gate: int64 `[T]`: where the products with the first half of a row's expert are.
        up: int64 `[T]`: and those with the second.
        offsets: int32 `[2E+1]` of the halves.
    """

    token: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    offsets: torch.Tensor


def halves(rows: int, offsets: torch.Tensor) -> Halves:
    """The `Halves` for `rows` tokens with int32 `offsets` `[E+1]`, without reading them on the host."""
    token = torch.arange(rows, device=offsets.device)
    bounds = torch.cat([offsets.new_zeros(1), offsets, offsets.new_full((1,), rows)])  # rows of no expert at both ends
    group = torch.searchsorted(offsets, token.to(offsets.dtype), right=True)
    gate, up = token + bounds[group], token + bounds[group + 1]
    doubled = token.new_empty(2 * rows).index_copy(0, gate, token).index_copy(0, up, token)
    starts = torch.stack([2 * offsets[:-1], offsets[:-1] + offsets[1:]], dim=1).flatten()
    return Halves(doubled, gate, up, torch.cat([starts, 2 * offsets[-1:]]))


# --- operator --------------------------------------------------------------------------------------------------------

_DOWN = 3 + COUNT + 1  # places among the arguments
_END = _DOWN + COUNT + 1


def _check(x, index, weights, *arguments) -> None:
    first_bias, down_bias = arguments[COUNT], arguments[2 * COUNT + 1]
    name, *_, format, backend = arguments[2 * COUNT + 2 :]
    first = check_weight(arguments[:COUNT], format, 3, backend)
    down = check_weight(arguments[COUNT + 1 : 2 * COUNT + 1], format, 3, backend)
    torch._check_value(name in ACTIVATIONS, lambda: f"activation={name!r}: expected one of {', '.join(ACTIVATIONS)}.")
    experts, hidden, inner = down.shape
    torch._check_value(
        tuple(first.shape) in ((experts, inner, hidden), (experts, 2 * inner, hidden)),
        lambda: (
            f"first: shape {tuple(first.shape)}, expected {(experts, 2 * inner, hidden)}, or without a gate "
            f"{(experts, inner, hidden)}, for a down projection of shape {tuple(down.shape)}."
        ),
    )
    check_input(x, "x", hidden, first, first_bias)
    torch._check_value(x.ndim == 2, lambda: f"x: shape {tuple(x.shape)}, expected [M, {hidden}].")
    check_dtype("top_k_index", index.dtype, torch.int64, torch.int32)
    torch._check_value(
        index.ndim == 2 and index.shape[0] == x.shape[0],
        lambda: f"top_k_index: shape {tuple(index.shape)}, expected [{x.shape[0]}, k], a row for each of x.",
    )
    check_dtype("top_k_weights", weights.dtype, *DTYPES)
    check_shape("top_k_weights", weights, tuple(index.shape), "one for each expert id")
    if down_bias is not None:
        check_dtype("down_bias", down_bias.dtype, *DTYPES)
        check_shape("down_bias", down_bias, (experts, hidden), "one for each output")
    check_devices(x=x, top_k_index=index, top_k_weights=weights, down=down.packed, down_bias=down_bias)


def _experts(x, index, weights, *arguments):
    check_once(_check, x, index, weights, *arguments)
    *activation, format, backend = arguments[2 * COUNT + 2 :]
    first, first_bias = as_weight(arguments[:COUNT], FORMATS[format]), arguments[COUNT]
    down, down_bias = as_weight(arguments[COUNT + 1 : 2 * COUNT + 1], FORMATS[format]), arguments[2 * COUNT + 1]
    inputs = (x, index, weights, first, first_bias, down, down_bias, Activation(*activation))
    if not index.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if dispatch.use_kernels(x.device, x.dtype, backend):
        from hf_mxfp4.kernels import experts as kernels

        return kernels.experts(*inputs)
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _by_expert(*inputs, backend)
    with torch.autocast(device, enabled=False):  # whose casts would only undo the caller's choice of dtypes
        return _by_expert(*inputs, backend)


def _by_expert(x, index, weights, first, first_bias, down, down_bias, activation, backend):
    """The whole in plain torch."""
    order, offsets = route(index, down.shape[0])
    hidden = dispatch.product(x[order // index.shape[1]], offsets, first, first_bias, backend, False)
    wide = torch.promote_types(x.dtype, torch.float32)
    hidden = activation.forward(hidden.to(wide), first.shape[1] != down.shape[2]).to(x.dtype)
    out = dispatch.product(hidden, offsets, down, down_bias, backend, False)
    out = _by_token(out, order, index.shape).to(wide)
    return (out * _masked(index, weights, down.shape[0]).to(wide)[..., None]).sum(1).to(x.dtype)


def _experts_fake(x, index, weights, *arguments):
    _check(x, index, weights, *arguments)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _masked(index, weights, experts: int) -> torch.Tensor:
    return torch.where((index >= 0) & (index < experts), weights, 0)


def _by_token(rows, order, shape) -> torch.Tensor:
    """Rows `[M*k, ...]` in sorted order as `[M, k, ...]`."""
    return torch.zeros_like(rows).index_copy(0, order, rows).unflatten(0, shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:_END])
    ctx.options = inputs[_END:]


def _backward(ctx, grad):
    x, index, weights, *tensors = ctx.saved_tensors
    *first, first_bias = tensors[: COUNT + 1]
    *down, down_bias = tensors[COUNT + 1 :]
    *activation, format, backend = ctx.options
    activation, options = Activation(*activation), (format, backend)
    experts, inner = down[0].shape[0], 2 * down[0].shape[-1]
    gated = first[0].shape[1] != inner
    wide = torch.promote_types(x.dtype, torch.float32)
    order, offsets = route(index, experts)
    token = order // index.shape[1]
    gate_up = torch.ops.hf_mxfp4.linear(x[token], offsets, *first, first_bias, *options).to(wide)
    # Unweighted: its product with the activation's result is the gradient of the weight, and the down projection need
    # not be computed again.
    rows = grad[token]
    grad_hidden = torch.ops.hf_mxfp4.linear_grad(rows, offsets, *down, *options).to(wide)
    weight = _masked(index, weights, experts).reshape(-1)[order].to(wide)[:, None]
    grad_x = grad_weights = grad_first_bias = grad_down_bias = None
    if ctx.needs_input_grad[2]:
        parts = (grad_hidden * activation.forward(gate_up, gated).to(x.dtype)).sum(-1)
        if down_bias is not None:
            expert = index.reshape(-1)[order].clamp(0, experts - 1)
            parts = parts + (rows.to(wide) * down_bias[expert]).sum(-1)
        grad_weights = _masked(index, _by_token(parts, order, index.shape), experts).to(weights.dtype)
    if ctx.needs_input_grad[_END - 1]:
        grad_down_bias = sum_by_expert(rows.to(wide) * weight, offsets).to(down_bias.dtype)
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[_DOWN - 1]:
        grad_gate_up = activation.backward(grad_hidden * weight, gate_up, gated)
        if ctx.needs_input_grad[_DOWN - 1]:
            grad_first_bias = sum_by_expert(grad_gate_up, offsets).to(first_bias.dtype)
        grad_x = torch.ops.hf_mxfp4.linear_grad(grad_gate_up.to(x.dtype), offsets, *first, *options)
        grad_x = _by_token(grad_x, order, index.shape).sum(1, dtype=wide).to(x.dtype)
    operands = [None] * COUNT
    return grad_x, None, grad_weights, *operands, grad_first_bias, *operands, grad_down_bias, *[None] * 7


_DOWN_SCHEMA = re.sub(r"(\w+)(,|$)", r"down_\1\2", SCHEMA)
define_operator(
    "experts",
    f"(Tensor x, Tensor top_k_index, Tensor top_k_weights, {SCHEMA}, Tensor? bias, {_DOWN_SCHEMA}, Tensor? down_bias, "
    "str activation, float alpha, float limit, float shift, bool interleaved, str format, str backend) -> Tensor",
    *(_experts, _experts_fake, _save, _backward),
)
_EXPERTS = torch.ops.hf_mxfp4.experts.default
