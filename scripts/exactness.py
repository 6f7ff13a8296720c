# SPDX-License-Identifier: Apache-2.0
"""Random packed weights, and how wrong a result of theirs is: for scripts/gpu_check.py and the tests."""

import torch
from torch.nn import functional as F

from hf_mxfp4 import reference
from hf_mxfp4.formats import MACRO_BLOCK, BlockFormat, Outliers, QuantizedTensor

HALF_ULP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float16: 2.0**-25}  # half of float16's smallest subnormal; the other dtypes reach down far enough
# How well a float32 sum of n products is known, for any order of adding; twice 2^-24, as tensor cores truncate.
SUM_ULP = {torch.float64: 2.0**-52}


def random_weight(
    *shape: int, fmt: BlockFormat, device, macro: bool = False, outliers: float = 0.0
) -> QuantizedTensor:
    """Random codes `[..., N, K]` with scales around 2^-4; every matrix with a tensor scale of its own.

    On demand with macro factors, and with a fraction of the weights as outliers.
    """
    *lead, k = shape
    low, high = (119, 127) if fmt.scale_dtype == torch.uint8 else (24, 72)
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(low, high, (*lead, k // fmt.block_size), dtype=torch.uint8, device=device)
    global_scale = torch.rand(lead[:-1], device=device) + 0.1 if fmt.has_global_scale else None
    factors = torch.randint(0, 256, (*lead, -(-k // MACRO_BLOCK)), dtype=torch.uint8, device=device) if macro else None
    weight = QuantizedTensor(packed, fmt.scale_from_bytes(scale), global_scale, fmt, factors)
    return with_outliers(weight, torch.rand(shape, device=device) < outliers) if outliers else weight


def with_outliers(weight: QuantizedTensor, mask: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """The same weight with random outliers where `mask` `[..., N, K]` is true."""
    k = mask.shape[-1]
    rows, column = mask.reshape(-1, k).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=mask[..., 0].numel())
    outliers = Outliers(
        torch.randn(len(rows), device=mask.device).to(dtype),
        column.to(torch.uint16 if k <= 65536 else torch.int32),
        F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
    )
    codes = reference.unpack(weight.packed).masked_fill(mask, 0)
    return weight._replace(packed=reference.pack(codes), outliers=outliers)


def corrections(fmt: BlockFormat) -> dict[str, dict]:
    """What `random_weight` can add to a weight of this format, by name; nothing first, everything last."""
    outliers = {"outliers": 0.02}
    if fmt.has_global_scale:
        return {"plain": {}, "outliers": outliers}
    both = {"macro": True, **outliers}
    return {"plain": {}, "macro": {"macro": True}, "outliers": outliers, "macro and outliers": both}


def to_cpu(weight: QuantizedTensor) -> QuantizedTensor:
    outliers = weight.outliers and Outliers(*(t.cpu() for t in weight.outliers))
    tensors = {name: getattr(weight, name) for name in ("packed", "scale", "global_scale", "macro")}
    return weight._replace(**{name: t if t is None else t.cpu() for name, t in tensors.items()}, outliers=outliers)


def every_code_and_scale(fmt: BlockFormat, device, macro: bool = False) -> QuantizedTensor:
    """`[256, B]`: row s has scale byte s and every code at least once; with `macro`, each factor stands in a row."""
    codes = torch.arange(fmt.block_size, dtype=torch.uint8, device=device).remainder(16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    global_scale = torch.tensor(0.37, device=device) if fmt.has_global_scale else None
    return QuantizedTensor(
        reference.pack(codes), fmt.scale_from_bytes(scale), global_scale, fmt, 7 * scale if macro else None
    )


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """How many values are not the same bit for bit; any NaN equals any other."""
    got, expected = got.cpu(), expected.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    same = (got.view(integer) == expected.view(integer)) | (got.isnan() & expected.isnan())
    return int((~same).sum()) + (got.dtype != expected.dtype)


def error_ratio(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Largest error of `y = x [T, n] @ dense [n, m] + bias` as a fraction of what sums and one rounding may cost."""
    if y.shape != (*x.shape[:-1], dense.shape[-1]) or y.dtype != x.dtype:
        return float("inf")
    x, dense = x.to(torch.float64), dense.to(torch.float64)
    bias = torch.zeros((), dtype=torch.float64) if bias is None else bias.to(torch.float64)
    exact, magnitude = x @ dense + bias.to(x.device), x.abs() @ dense.abs() + bias.abs().to(x.device)
    allowed = magnitude * (x.shape[-1] + 4) * SUM_ULP.get(y.dtype, 2.0**-23)
    allowed = allowed + (exact.abs() + allowed) * HALF_ULP[y.dtype] + SMALLEST.get(y.dtype, 2.0**-130)
    error = (y.to(torch.float64) - exact).abs() / allowed
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
