# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize, pack, unpack and a linear layer in plain torch: the definition of correct.

Every kernel has its twin here and is tested against it bit for bit (codes, scales, decoded values).
"""

from __future__ import annotations

import math

import torch

from hf_mxfp4.blocks import (
    blocked_magnitudes,
    divide,
    e4m3_bytes,
    floor_log2,
    power_of_two,
    round_magnitude,
    row_chunks,
)
from hf_mxfp4.formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    FORMATS,
    MACRO_BLOCK,
    BlockFormat,
    Outliers,
    QuantizedTensor,
)
from hf_mxfp4.macro_block import MODES, block_factors, search, static_factors
from hf_mxfp4.outliers import collect
from hf_mxfp4.scales import SCALE_RULES, ScaleOptions, Scales

_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[..., K]` (one a byte) -> packed uint8 `[..., K/2]`: even k in the low nibble, odd in the high."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Packed uint8 `[..., K/2]` -> codes uint8 `[..., K]`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (uint8, 0..15) nearest to finite `x`: ties to even mantissa, saturating at 6, sign kept, -0 too."""
    doubled = round_magnitude(x.to(torch.float32).abs()).mul_(2)
    code = doubled - (doubled - 4).clamp_(min=0) / 2 - (doubled - 8).clamp_(min=0) / 4  # 6, 8, 12 -> 5, 6, 7
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def check_weight(weight: torch.Tensor, fmt: BlockFormat, name: str = "weight") -> None:
    """Raise on what cannot be quantized: wrong dtype, K not a multiple of the block size, NaN or Inf."""
    if weight.dtype not in _FLOAT_DTYPES:
        raise TypeError(
            f"{name}: dtype {weight.dtype} cannot be quantized; bfloat16, float16 or float32 is needed. Load the "
            "original full-precision checkpoint, or dequantize it first."
        )
    if weight.ndim == 0:
        raise ValueError(f"{name}: a 0-d tensor cannot be quantized; a weight [..., K] is needed.")
    fmt.check_in_features(weight.shape[-1], name)
    rows = weight.reshape(-1, weight.shape[-1])
    bad = sum(int((~torch.isfinite(rows[part])).sum()) for part in row_chunks(rows))
    if bad:
        raise ValueError(
            f"{name}: {bad} of {weight.numel()} values are NaN or Inf; only finite weights can be quantized. Repair "
            "the checkpoint, or add the module to modules_to_not_convert."
        )


def encode(weight: torch.Tensor, scales: Scales, fmt: BlockFormat, macro: torch.Tensor | None = None) -> torch.Tensor:
    """Round a matrix `[N, K]` to nearest with *given* scales and macro factors (uint8 `[N, ceil(K/128)]`).

    Returns:
        packed uint8 `[N, K/2]`.
    """
    packed = torch.empty((weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        magnitude = blocked_magnitudes(weight[rows], fmt.block_size)
        if scales.global_scale is not None:
            magnitude = magnitude / scales.global_scale
        scale = block_scales(scales.scale[rows], fmt, None if macro is None else macro[rows])
        magnitude = magnitude / scale[..., None]
        packed[rows] = pack(round_to_e2m1(magnitude.flatten(1).copysign(weight[rows].to(torch.float32))))
    return packed


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
) -> QuantizedTensor:
    """Quantize a weight, or a stack of them.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[..., K]`. Leading dimensions before the last two are a
            stack of matrices, each with its own tensor scale.
        format (`str` or `BlockFormat`): `"mxfp4"` or `"nvfp4"`.
        scale_rule (`str`): a key of `SCALE_RULES`.
        options (`ScaleOptions`): options of the rule.
        channel_weights (`torch.Tensor`, *optional*): `[K]`, >= 0; the rule then minimises `sum h_k (w - w_hat)^2`.
        name (`str`): named in errors.
        macro_block (`str`, *optional*): for MXFP4, `"static"` or `"search"` (with `scale_rule="soar"`): a further
            factor for each 128 weights.
        keep (`torch.Tensor`, *optional*): bool `[..., K]`; these weights are kept as they are, as outliers.
        tensor_scale (`torch.Tensor`, *optional*): float32, one for each matrix, for formats that have one: taken as it
            is, where the rule would choose. Blocks beyond 6 * 448 times it saturate.

    Returns:
        `QuantizedTensor` with `packed` `[..., K/2]`, `scale` `[..., K/B]`, `global_scale` `[...]` less the last two
        dimensions, or `None`; `macro` and `outliers` if asked for.

    Raises:
        TypeError: for a dtype that is not one of the three.
        ValueError: for NaN or Inf, K that is not a multiple of the block size, or a combination that does not exist.
    """
    fmt = FORMATS.get(format) if isinstance(format, str) else format
    if fmt is None:
        raise ValueError(f"format={format!r}; allowed: {', '.join(FORMATS)}.")
    check_weight(weight, fmt, name)
    usable = {rule: row.function for rule, row in SCALE_RULES.items() if fmt.name in row.formats}
    if scale_rule not in usable:
        raise ValueError(f"scale_rule={scale_rule!r}; allowed for {fmt.name}: {', '.join(usable)}.")
    check_macro_block(macro_block, fmt, scale_rule)
    given = _given_scales(tensor_scale, fmt, weight, name)
    stack = weight.shape[:-2]
    matrices = weight.reshape(math.prod(stack), *weight.shape[-2:]) if weight.ndim >= 2 else weight.reshape(1, 1, -1)
    masks = [None] * len(matrices) if keep is None else keep.reshape(matrices.shape)
    packed, scale, global_scale, macro = [], [], [], []
    for matrix, mask, own in zip(matrices, masks, given, strict=True):
        matrix = matrix if mask is None else matrix.masked_fill(mask, 0)
        scales, factor = _choose_scales(matrix, fmt, usable[scale_rule], options, channel_weights, macro_block, own)
        packed.append(encode(matrix, scales, fmt, factor))
        scale.append(scales.scale.view(torch.uint8))
        global_scale.append(scales.global_scale)
        macro.append(factor)
    lead, k = weight.shape[:-1], weight.shape[-1]
    if not packed:
        packed, scale, macro = ([weight.new_empty(0, dtype=torch.uint8)] for _ in range(3))
        global_scale = [torch.empty(stack, device=weight.device)]
    return QuantizedTensor(
        torch.cat(packed).view(*lead, k // 2),
        fmt.scale_from_bytes(torch.cat(scale).view(*lead, k // fmt.block_size)),
        torch.stack(global_scale).view(stack) if fmt.has_global_scale else None,
        fmt,
        torch.cat(macro).view(*lead, -(-k // MACRO_BLOCK)) if macro_block else None,
        None if keep is None else collect(weight, keep),
    )


def check_macro_block(macro_block: str | None, fmt: BlockFormat, scale_rule: str) -> None:
    """Raise `ValueError` for a macro-block mode that does not exist, or not with this format and rule."""
    if macro_block is None:
        return
    if macro_block not in MODES:
        raise ValueError(f"macro_block={macro_block!r}; allowed: None, {', '.join(MODES)}.")
    if fmt.has_global_scale:
        raise ValueError(
            f"macro_block={macro_block!r} repairs power-of-two scales, which {fmt.name} does not have; it works with "
            'format="mxfp4".'
        )
    if macro_block == "search" and scale_rule != "soar":
        raise ValueError(
            f'macro_block="search" chooses the block scales itself: it needs scale_rule="soar", not {scale_rule!r}. '
            'macro_block="static" works with every rule.'
        )


def _given_scales(tensor_scale, fmt, weight, name) -> list[torch.Tensor | None]:
    """The tensor scale to keep to of each matrix of `weight`, or `None` for each."""
    matrices = math.prod(weight.shape[:-2])
    if tensor_scale is None:
        return [None] * matrices
    if not fmt.has_global_scale or tensor_scale.numel() != matrices or tensor_scale.dtype != torch.float32:
        raise ValueError(
            f"{name}: tensor_scale is {tensor_scale.dtype} {list(tensor_scale.shape)}; allowed for {fmt.name}: "
            + (f"float32, one for each of {matrices} matrices." if fmt.has_global_scale else "none, it has no such.")
        )
    return list(tensor_scale.reshape(-1))


def _choose_scales(matrix, fmt, rule, options, channel_weights, macro_block, tensor_scale=None):
    """`Scales` of a matrix `[N, K]`, and its macro factors uint8 `[N, ceil(K/128)]` or `None`."""
    if tensor_scale is not None:
        return rule(matrix, fmt, options, channel_weights, tensor_scale), None
    if macro_block is None:
        return rule(matrix, fmt, options, channel_weights), None
    if macro_block == "search":
        return search(matrix, fmt, channel_weights)
    factor = static_factors(matrix)
    blocks = block_factors(factor, matrix.shape[1] // fmt.block_size, fmt.block_size)
    return rule(matrix / blocks.repeat_interleave(fmt.block_size, 1), fmt, options, channel_weights), factor


def block_scales(scale: torch.Tensor, fmt: BlockFormat, macro: torch.Tensor | None) -> torch.Tensor:
    """Stored scales `[..., K/B]` times their macro factors (uint8 `[..., ceil(K/128)]`) as float32; exact."""
    decoded = fmt.decode_scale(scale)
    return decoded if macro is None else decoded * block_factors(macro, scale.shape[-1], fmt.block_size)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode packed codes to real values, `E2M1[code] * scale * macro * global_scale`, and put outliers in place.

    Args:
        weight (`QuantizedTensor`): `packed` uint8 `[..., N, K/2]`, low nibble first; `scale` `[..., N, K/B]`, `macro`
            and `global_scale` float32 `[...]` multiply.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): output dtype. The product is formed in float32
            (code times scale is exact there) and rounded once.

    Returns:
        `torch.Tensor` `[..., N, K]`.

    Source: OCP MX v1.0, section 5.4.1 (E8M0) and table 5 (E2M1).
    """
    out = torch.empty(weight.shape, dtype=dtype, device=weight.packed.device)
    flat, rows_out = weight.packed.reshape(-1, weight.packed.shape[-1]), out.view(-1, out.shape[-1])
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    per_row = None
    if weight.global_scale is not None:
        rows_each = weight.packed.shape[-2] if weight.packed.ndim > 1 else 1
        per_row = weight.global_scale.reshape(-1, 1).expand(-1, rows_each).reshape(-1)
    macro = None if weight.macro is None else weight.macro.reshape(-1, weight.macro.shape[-1])
    pairs = byte_pairs(weight.packed.device)
    for rows in row_chunks(rows_out):
        global_scale = None if per_row is None else per_row[rows]
        factor = None if macro is None else macro[rows]
        rows_out[rows] = decode_rows(flat[rows], scale[rows], global_scale, weight.format, pairs, factor)
    if weight.outliers is not None:
        scatter_outliers(rows_out, weight.outliers)
    return out


def scatter_outliers(dense: torch.Tensor, outliers: Outliers, first: int = 0) -> None:
    """Write outliers into `dense` `[R, columns]`, in place; its columns are the weight's from `first` on."""
    row, entries = outlier_rows(outliers)
    column = outliers.columns[entries].to(torch.int64) - first
    inside = (column >= 0) & (column < dense.shape[1])
    dense[row[inside], column[inside]] = outliers.values[entries][inside].to(dense.dtype)


def outlier_rows(outliers: Outliers) -> tuple[torch.Tensor, slice]:
    """The row of each outlier, int64 `[n]`, and which entries `offsets` speaks of."""
    row = torch.arange(outliers.offsets.numel() - 1, device=outliers.offsets.device)
    entries = slice(int(outliers.offsets[0]), int(outliers.offsets[-1]))
    return row.repeat_interleave(outliers.offsets.diff().to(torch.int64)), entries


def outlier_mask(outliers: Outliers, columns: int) -> torch.Tensor:
    """bool `[rows, columns]`: where the outliers are; `outliers.collect` the other way round."""
    row, entries = outlier_rows(outliers)
    mask = torch.zeros((outliers.offsets.numel() - 1, columns), dtype=torch.bool, device=outliers.offsets.device)
    mask[row, outliers.columns[entries].to(torch.int64)] = True
    return mask


def byte_pairs(device: torch.device) -> torch.Tensor:
    """What `decode_rows` looks bytes up in: the two float32 values of each byte as one int64, `[256]`."""
    codes = unpack(torch.arange(256, dtype=torch.uint8, device=device)[:, None])
    return torch.tensor(E2M1_VALUES, device=device)[codes.to(torch.int32)].view(torch.int64).flatten()


def decode_rows(
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    fmt: BlockFormat,
    pairs: torch.Tensor | None = None,
    macro: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode rows: packed `[n, K/2]`, scale `[n, K/B]`, global_scale `[n]`, `[]` or `None` -> float32 `[n, K]`.

    A look-up for every byte in `pairs = byte_pairs(...)`. `index_select` over a flat table is the fastest gather torch
    has on CPU: 5 ms for 4096 x 4096 weights on a core where `table[codes]` takes 45.
    """
    if pairs is None:
        pairs = byte_pairs(packed.device)
    values = pairs.index_select(0, packed.flatten().to(torch.int32)).view(torch.float32)
    values = values.view(packed.shape[0], -1, fmt.block_size)
    values.mul_(block_scales(scale, fmt, macro)[..., None])
    if global_scale is not None:
        values.mul_(global_scale.reshape(-1, 1, 1))
    return values.flatten(-2)


def linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [..., K] @ dequantize(weight [N, K]).T + bias`, formed in float64 and rounded once to `x.dtype`."""
    out = x.to(torch.float64) @ dequantize(weight, torch.float64).T
    return (out if bias is None else out + bias.to(torch.float64)).to(x.dtype)


@torch.no_grad()
def fake_quantize(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Activations `[..., K]` rounded to the format and back: rule `amax`, with a tensor scale for each token.

    K is a multiple of the block size. The result has x's dtype; it is formed in float32 and rounded once. A block with
    NaN or Inf comes out as NaN; so does the whole token where the format has a tensor scale, which is then unknown.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, rows_out = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    for part in row_chunks(rows):
        magnitude = blocked_magnitudes(rows[part], fmt.block_size)
        amax = peak = magnitude.amax(-1, keepdim=True)
        if fmt.has_global_scale:
            peak = amax.amax(-2, keepdim=True)
            global_scale = divide(peak, E2M1_MAX * E4M3_MAX).clamp(2.0**-125, 2.0**125)
            scale = fmt.decode_scale(e4m3_bytes(divide(amax, E2M1_MAX) / global_scale).to(torch.uint8))
        else:
            global_scale = peak.new_ones(())
            scale = power_of_two(floor_log2(amax).clamp(min=-120) - 2)
        value = round_magnitude(magnitude / global_scale / scale) * scale * global_scale
        value = torch.where(peak.isfinite(), value, torch.nan).flatten(1)
        rows_out[part] = value.copysign(rows[part].to(torch.float32)).to(x.dtype)
    return out
