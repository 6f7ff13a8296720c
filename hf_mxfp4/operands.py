# SPDX-License-Identifier: Apache-2.0
"""What the operators `torch.ops.hf_mxfp4.*` take: a weight as flat tensors, and the checks of every operand.

The checks run on real and on fake tensors alike, and read no values: nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_mxfp4.formats import FORMATS, MACRO_BLOCK, MXFP4, BlockFormat, Outliers, QuantizedTensor

BACKENDS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A weight in an operator's schema. The last three are its outliers; `offsets` is taken: it cuts tokens into experts.
SCHEMA = (
    "Tensor packed, Tensor scale, Tensor? global_scale, Tensor? macro, "
    "Tensor? values, Tensor? columns, Tensor? row_offsets"
)
COUNT = 7  # tensors in it


def operands(weight: QuantizedTensor) -> tuple[torch.Tensor | None, ...]:
    """A weight as the operators take it (`SCHEMA`), next to its format's name. Views, nothing is copied.

    Scales go as bytes and uint16 columns as int16, since `torch.library.opcheck` compares inputs before and after,
    which torch cannot do for float8, nor for uint16 on every device.
    """
    found, fmt = weight.scale.dtype, weight.format
    if found != fmt.scale_dtype:  # no torch._check_type: torch.compile of 2.11 cannot trace it
        raise TypeError(f"scale: dtype {found}, expected {fmt.scale_dtype} for {fmt.name}.")
    values, columns, row_offsets = weight.outliers or (None, None, None)
    if columns is not None and columns.dtype not in (torch.uint16, torch.int32):
        raise TypeError(f"outliers.columns: dtype {columns.dtype}, expected torch.uint16 or torch.int32.")
    if columns is not None and columns.dtype == torch.uint16:
        columns = columns.view(torch.int16)
    scale = weight.scale if found == torch.uint8 else weight.scale.view(torch.uint8)
    return weight.packed, scale, weight.global_scale, weight.macro, values, columns, row_offsets


_SEEN: set[tuple] = set()


def check_once(check: Callable, *arguments) -> None:
    """`check(*arguments)`, unless it went well before for tensors of the same dtypes, shapes and devices.

    That is all that checks look at, and they take longer than all else in a call.
    """
    kind = (check, *[(a.dtype, a.device, a.shape) if isinstance(a, torch.Tensor) else a for a in arguments])
    if kind not in _SEEN:
        check(*arguments)
        if len(_SEEN) > 10_000:  # another number of tokens in each call
            _SEEN.clear()
        _SEEN.add(kind)


def as_weight(operands: tuple, fmt: BlockFormat) -> QuantizedTensor:
    """Operands that were checked as a `QuantizedTensor`; its columns are uint16 or int32 again."""
    packed, scale, global_scale, macro, values, columns, row_offsets = operands
    outliers = None
    if values is not None:
        columns = columns.view(torch.uint16) if columns.dtype == torch.int16 else columns
        outliers = Outliers(values, columns, row_offsets)
    scale = scale if fmt.scale_dtype == torch.uint8 else scale.view(fmt.scale_dtype)
    return QuantizedTensor(packed, scale, global_scale, fmt, macro, outliers)


def check_dtype(name: str, found: torch.dtype, *allowed: torch.dtype) -> None:
    torch._check_type(found in allowed, lambda: f"{name}: dtype {found}, expected {' or '.join(map(str, allowed))}.")


def check_shape(name: str, tensor, expected: tuple, why: str) -> None:
    found = tuple(tensor.shape)
    torch._check_value(found == expected, lambda: f"{name}: shape {found}, expected {expected}: {why}.")


def check_devices(**tensors) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    torch._check(
        len(set(devices.values())) == 1,
        lambda: "All tensors must be on one device: " + ", ".join(f"{n} is on {d}" for n, d in devices.items()) + ".",
    )


def check_weight(operands: tuple, format: str, ndim: int | None, backend: str) -> QuantizedTensor:
    """`as_weight`, with dtypes, shapes and devices checked; `ndim` is what `packed` must have."""
    packed, scale, global_scale, macro, *outliers = operands
    torch._check_value(format in FORMATS, lambda: f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    torch._check_value(backend in BACKENDS, lambda: f"backend={backend!r}: expected one of {', '.join(BACKENDS)}.")
    fmt = FORMATS[format]
    check_dtype("packed", packed.dtype, torch.uint8)
    check_dtype("scale", scale.dtype, torch.uint8)
    torch._check_value(
        packed.ndim == ndim if ndim else packed.ndim > 0,
        lambda: f"packed: shape {tuple(packed.shape)}, expected {ndim or 'at least one'} dimensions, the last of K/2.",
    )
    *lead, byte = packed.shape
    k = 2 * byte
    torch._check_value(
        k % fmt.block_size == 0,
        lambda: f"packed: {k} weights a row are not a multiple of {fmt.name}'s block size {fmt.block_size}.",
    )
    check_shape("scale", scale, (*lead, k // fmt.block_size), f"one for {fmt.block_size} weights along a row")
    if global_scale is not None:
        check_dtype("global_scale", global_scale.dtype, torch.float32)
        if tuple(global_scale.shape) != (1,) or len(lead) > 1:
            check_shape("global_scale", global_scale, tuple(lead[:-1]), "one for each matrix")
    if macro is not None:
        torch._check_value(fmt is MXFP4, lambda: f"macro: only mxfp4 weights have macro factors, not {fmt.name}.")
        check_dtype("macro", macro.dtype, torch.uint8)
        width = (k + MACRO_BLOCK - 1) // MACRO_BLOCK
        check_shape("macro", macro, (*lead, width), f"one for {MACRO_BLOCK} weights along a row")
    _check_outliers(outliers, math.prod(lead))
    given = dict(zip(Outliers._fields, outliers, strict=True))
    check_devices(packed=packed, scale=scale, global_scale=global_scale, macro=macro, **given)
    return as_weight(operands, fmt)


def _check_outliers(tensors: list, rows: int) -> None:
    """`values`, `columns` (int16 for uint16, or int32) and `offsets` of the outliers of so many rows."""
    missing = [name for name, tensor in zip(Outliers._fields, tensors, strict=True) if tensor is None]
    torch._check_value(
        len(missing) in (0, 3),
        lambda: f"outliers: {', '.join(missing)} missing; values, columns and offsets come together or not at all.",
    )
    if missing:
        return
    values, columns, offsets = tensors
    check_dtype("outliers.values", values.dtype, torch.bfloat16, torch.float16, torch.float32)
    check_dtype("outliers.columns", columns.dtype, torch.int16, torch.int32)
    check_dtype("outliers.offsets", offsets.dtype, torch.int32)
    torch._check_value(
        values.ndim == 1, lambda: f"outliers.values: shape {tuple(values.shape)}, expected one dimension."
    )
    check_shape("outliers.columns", columns, tuple(values.shape), "one for each value")
    check_shape("outliers.offsets", offsets, (rows + 1,), "one more than rows of the weight")


def check_input(x, name: str, features: int, weight: QuantizedTensor, bias=None, offsets=None) -> None:
    """Check the activations (or a gradient) whose last dimension must be `features`, the bias, and the offsets."""
    check_dtype(name, x.dtype, *DTYPES)
    torch._check_value(
        x.ndim > 0 and x.shape[-1] == features and (offsets is None or x.ndim == 2),
        lambda: (
            f"{name}: shape {tuple(x.shape)}, expected [{'...' if offsets is None else 'T'}, {features}] for a weight "
            f"of shape {tuple(weight.shape)}."
        ),
    )
    if bias is not None:
        check_dtype("bias", bias.dtype, *DTYPES)
        check_shape("bias", bias, tuple(weight.shape[:-1]), "one for each output")
    if offsets is not None:
        check_dtype("offsets", offsets.dtype, torch.int32)
        check_shape("offsets", offsets, (weight.shape[0] + 1,), "one more than experts")
    check_devices(**{name: x}, packed=weight.packed, bias=bias, offsets=offsets)
