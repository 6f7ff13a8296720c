# SPDX-License-Identifier: Apache-2.0
"""Activations rounded to a block format and back (W4A4). Twin: `reference.fake_quantize`, equal to it bit for bit.

All products that meet a sum are exact, so it makes no difference whether the compiler fuses them.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import BlockFormat
from hf_mxfp4.kernels.decode import INTERPRET, decode_e4m3
from hf_mxfp4.kernels.quantize import nearest, power_of_two

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    """Bits of `|x|` as int32, in the order of magnitude, NaN on top; below 2^-120 they are 0."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < (7 << 23), 0, bits)


@triton.jit
def encode_e4m3(value):
    """Nearest E4M3 byte (uint32), in 1..126, of float32 values >= 0. Twin: `blocks.e4m3_bytes`."""
    value = tl.minimum(value, 448.0)
    bits = value.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (value + 2.0**14).to(tl.uint32, bitcast=True) - (141 << 23)  # multiples of 2^-9
    return tl.maximum(tl.where(value < 2.0**-6, subnormal, normal), 1)


@triton.jit
def fake_quantize_kernel(x, out, K, stride_x, E8M0: tl.constexpr, BLOCK: tl.constexpr, TILE_K: tl.constexpr):
    """Program (i, j) writes columns `j * TILE_K ..` of row i of `out` `[T, K]`; x has rows of `stride_x` elements."""
    row = tl.program_id(0).to(tl.int64)
    x, out = x + row * stride_x, out + row * K
    inner = tl.arange(0, TILE_K // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    columns = tl.program_id(1) * TILE_K + inner
    values = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
    bits = magnitude_bits(values)
    magnitude = bits.to(tl.float32, bitcast=True)
    amax = tl.max(bits, 1)[:, None]
    if E8M0:
        exponent = tl.maximum((amax >> 23) - 127, -120) - 2
        result = nearest((magnitude,), None, power_of_two(-exponent), 1, True)[0] * power_of_two(exponent)
        bad = amax >= INFINITY
    else:
        # Every program of a row reads all of it: no second kernel, and many programs even for one token.
        peaks = amax
        for k in range(0, K, TILE_K):
            part = tl.load(x + k + inner, mask=k + inner < K, other=0.0).to(tl.float32)
            peaks = tl.maximum(peaks, tl.max(magnitude_bits(part), 1)[:, None])
        peak = tl.max(peaks)
        global_scale = tl.math.div_rn(peak.to(tl.float32, bitcast=True), 6.0 * 448.0)
        global_scale = tl.minimum(tl.maximum(global_scale, 2.0**-125), 2.0**125)
        scale = tl.math.div_rn(tl.math.div_rn(amax.to(tl.float32, bitcast=True), 6.0), global_scale)
        scale = decode_e4m3(encode_e4m3(scale))
        ratio = tl.math.div_rn(magnitude, global_scale)
        result = nearest((ratio,), scale, None, 1, True)[0] * scale * global_scale
        bad = peak >= INFINITY
    result = tl.where(bad, float("nan"), result)
    sign = (values.to(tl.uint32, bitcast=True) >> 31) << 31  # as a bit: triton 3.7 negates 0 to 0
    result = (result.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=columns < K)


def options(fmt: BlockFormat, k: int) -> dict:
    """Tile and warps; without a tensor scale small tiles, since programs share no work."""
    tile = min(triton.next_power_of_2(k), 4096 if fmt.has_global_scale else 1024)
    return {"TILE_K": tile, "num_warps": max(1, tile // 512)}


def fake_quantize(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """x `[..., K]`, float32, bfloat16 or float16, K a multiple of the block size."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    if rows.shape[0]:
        launch = options(fmt, k)
        with torch.cuda.device_of(x):
            fake_quantize_kernel[rows.shape[0], triton.cdiv(k, launch["TILE_K"])](
                rows, out, k, rows.stride(0), E8M0=not fmt.has_global_scale, BLOCK=fmt.block_size, **launch
            )
    return out.to(x.dtype)
