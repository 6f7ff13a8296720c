# SPDX-License-Identifier: Apache-2.0
"""Quantization on any device: weights (`quantize`), and activations on the fly (`fake_quantize`, for W4A4).

Both equal their twins in `reference` bit for bit, whether a kernel runs or plain torch; `backend` as in `ops`.
"""

from __future__ import annotations

import math

import torch

from hf_mxfp4 import dispatch, ops, outliers, reference
from hf_mxfp4.blocks import SMALLEST_WEIGHT, power_of_two
from hf_mxfp4.formats import FORMATS, BlockFormat, QuantizedTensor
from hf_mxfp4.operands import BACKENDS, check_dtype
from hf_mxfp4.scales import ScaleOptions

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- weights ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize(
    weight: torch.Tensor,
    format: str | BlockFormat,
    scale_rule: str = "soar",
    options: ScaleOptions = ScaleOptions(),
    channel_weights: torch.Tensor | None = None,
    name: str = "weight",
    macro_block: str | None = None,
    keep: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """`reference.quantize`, which describes all other arguments, with a kernel for what takes long.

    That is the rule `soar` with its default options, and `macro_block="search"`. All else runs in plain torch on the
    weight's device.

    Args:
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `QuantizedTensor`, equal bit for bit on every backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}.")
    fmt = FORMATS.get(format) if isinstance(format, str) else format
    if (
        (scale_rule, options.search, options.global_scale) == ("soar", "full", "power_of_two")
        and macro_block in (None, "search")
        and _sound(weight, fmt, channel_weights, macro_block, keep)
        and dispatch.use_kernels(weight.device, weight.dtype, backend)
        and torch.linalg.vector_norm(weight, math.inf).isfinite()
        and (tensor_scale is None or _are_powers_of_two(tensor_scale, fmt, weight))
    ):
        return _search(weight, fmt, channel_weights, macro_block, keep, tensor_scale)
    corrections = (macro_block, keep, tensor_scale)
    return reference.quantize(weight, format, scale_rule, options, channel_weights, name, *corrections)


def _sound(weight, fmt: BlockFormat | None, channel_weights, macro_block, keep) -> bool:
    """Whether a kernel can take this; for what it cannot, the reference raises (or returns something empty)."""
    return (
        fmt is not None
        and not (fmt.has_global_scale and macro_block)
        and weight.dtype in _DTYPES
        and weight.numel() > 0 < weight.ndim
        and weight.shape[-1] % fmt.block_size == 0
        and (channel_weights is None or channel_weights.shape == weight.shape[-1:])
        and (keep is None or keep.shape == weight.shape)
    )


def _are_powers_of_two(tensor_scale: torch.Tensor, fmt: BlockFormat, weight: torch.Tensor) -> bool:
    """Whether given tensor scales are what the kernel takes, one for each matrix."""
    sound = tensor_scale.dtype == torch.float32 and tensor_scale.numel() == math.prod(weight.shape[:-2])
    return fmt.has_global_scale and sound and bool((torch.frexp(tensor_scale)[0] == 0.5).all())


def _search(weight, fmt: BlockFormat, channel_weights, macro_block, keep, tensor_scale) -> QuantizedTensor:
    from hf_mxfp4.kernels import quantize as kernel

    lead, n = weight.shape[:-1], weight.shape[-2] if weight.ndim > 1 else 1
    matrices = (weight if keep is None else weight.masked_fill(keep, 0)).reshape(-1, n, weight.shape[-1])
    global_scale = None
    if tensor_scale is not None:
        global_scale = tensor_scale.reshape(-1)
    elif fmt.has_global_scale:
        global_scale = _global_scale(torch.linalg.vector_norm(matrices, math.inf, (1, 2)).to(torch.float32))
    if channel_weights is not None:
        channel_weights = channel_weights.to(weight.device, torch.float32)
    packed, scale, macro = kernel.quantize(matrices, fmt, global_scale, channel_weights, macro_block == "search")
    return QuantizedTensor(
        packed.view(*lead, -1),
        fmt.scale_from_bytes(scale.view(*lead, -1)),
        None if global_scale is None else global_scale.view(lead[:-1]),
        fmt,
        None if macro is None else macro.view(*lead, -1),
        None if keep is None else outliers.collect(weight, keep),
    )


def _global_scale(peak: torch.Tensor) -> torch.Tensor:
    """The smallest power of two with `peak <= 4 * 448 * g`, elementwise, without a wait for the values.

    Twin: `scales.soar_rule`. As 4 * 448 = 0.875 * 2^11, the exponents of peak and g differ by 11 or 10.
    """
    mantissa, exponent = torch.frexp(peak)
    exponent = (exponent - 11 + (mantissa > 0.875)).clamp(-125, 116)
    return torch.where(peak < SMALLEST_WEIGHT, 1.0, power_of_two(exponent))


# --- activations -----------------------------------------------------------------------------------------------------


def fake_quantize(x: torch.Tensor, format: str | BlockFormat, backend: str = "auto") -> torch.Tensor:
    """Activations rounded to a block format and back, token by token; gradients pass straight through.

    Args:
        x (`torch.Tensor`): `[..., K]`, float32, bfloat16 or float16, with any strides. Cast as `F.linear` casts its
            input under autocast.
        format (`str` or `BlockFormat`): `"mxfp4"` or `"nvfp4"`. K must be a multiple of its block size.
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `torch.Tensor` `[..., K]` in x's dtype (the autocast dtype under autocast), equal bit for bit on every backend.
        A block (MXFP4) or token (NVFP4) with NaN or Inf comes out as NaN.
    """
    x, _ = ops.autocast_inputs(x, None)
    return torch.ops.hf_mxfp4.fake_quantize(x, format if isinstance(format, str) else format.name, backend)


def _check(x, format: str, backend: str) -> BlockFormat:
    torch._check_value(format in FORMATS, lambda: f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    torch._check_value(backend in BACKENDS, lambda: f"backend={backend!r}: expected one of {', '.join(BACKENDS)}.")
    check_dtype("x", x.dtype, *_DTYPES)
    fmt = FORMATS[format]
    torch._check_value(
        x.ndim > 0 and x.shape[-1] > 0 and x.shape[-1] % fmt.block_size == 0,
        lambda: (
            f"x: shape {tuple(x.shape)}, expected [..., K] with K a positive multiple of {fmt.name}'s block size "
            f"{fmt.block_size}; leave the activations of this layer in full precision."
        ),
    )
    return fmt


def _fake_quantize(x, format, backend):
    fmt = _check(x, format, backend)
    if dispatch.use_kernels(x.device, x.dtype, backend):
        from hf_mxfp4.kernels.fake_quantize import fake_quantize as kernel

        return kernel(x, fmt)
    return reference.fake_quantize(x, fmt)


def _fake(x, format, backend):
    _check(x, format, backend)
    return x.new_empty(x.shape)


def _save(ctx, inputs, output) -> None:
    """Nothing: the gradient passes unchanged."""


def _backward(ctx, grad):
    return grad, None, None


ops.define_operator(
    "fake_quantize", "(Tensor x, str format, str backend) -> Tensor", _fake_quantize, _fake, _save, _backward
)
