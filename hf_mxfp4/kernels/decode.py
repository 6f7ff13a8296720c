# SPDX-License-Identifier: Apache-2.0
"""What kernels share: decoding of packed weights (twin: `reference.decode_rows`), and the rows a program works on.

Everything is built from bits in float32, so it is exact and the same on every target: Ampere has no E4M3 conversion,
and `exp2` flushes 2^-127 to zero.
"""

import torch
import triton
import triton.language as tl

from hf_mxfp4.formats import MACRO_BLOCK, QuantizedTensor

# Read here because it also decides, now, whether the `triton.jit` below makes interpreted functions. The interpreter
# (3.6 to 3.9) gets bfloat16 wrong without a word: sums and products of raw bits, truncating conversion, subnormals
# lost. Under it kernels compute and store in float32.
INTERPRET = triton.knobs.runtime.interpret
MACRO = tl.constexpr(MACRO_BLOCK)


@triton.jit
def decode_e2m1(code):
    """Codes 0..15 (uint32) to float32. As the top of a float32's exponent and mantissa they read as value * 2^-126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


@triton.jit
def decode_e8m0(byte):
    """E8M0 bytes (uint32) to float32: 2^(byte - 127), a subnormal for byte 0; 255 is NaN. OCP MX v1.0, 5.4.1."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(byte):
    """`float8_e4m3fn` bytes (uint32) to float32, sign included; 0x7F and 0xFF are NaN, there is no infinity."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True) * (2.0**120))


# LOP3 0xEA is (a & b) | c. In: 4 bytes. Out: nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7.
_PLACE = """{{
.reg .b32 s, m;
shl.b32 s, $4, 12;  {} m, $4, {};  and.b32 s, s, 0x80008000;  lop3.b32 $0, m, {}, s, 0xEA;
shl.b32 s, $4, 8;  {} m, $4, {};  and.b32 s, s, 0x80008000;  lop3.b32 $1, m, {}, s, 0xEA;
shl.b32 s, $4, 4;  {} m, $4, {};  and.b32 s, s, 0x80008000;  lop3.b32 $2, m, {}, s, 0xEA;
and.b32 s, $4, 0x80008000;  {} m, $4, {};  lop3.b32 $3, m, {}, s, 0xEA;
}}"""


def place_asm(top: int) -> str:
    """PTX that moves the magnitude bits of a nibble to `top .. top - 2` of its half register, its sign to bit 15."""
    moves = []
    for p in range(4):
        shift = top - 2 - 4 * p
        moves += ["shl.b32" if shift >= 0 else "shr.u32", abs(shift), f"0x{(7 << top - 2) * 0x00010001:08X}"]
    return _PLACE.format(*moves)


BFLOAT16_ASM, FLOAT16_ASM = tl.constexpr(place_asm(8)), tl.constexpr(place_asm(11))


@triton.jit
def place(words, p: tl.constexpr, HALF: tl.constexpr, DOT: tl.constexpr):
    """Nibble `p + 4 * HALF` of `words` (uint32) from the same bits without PTX.

    float16 as is; bfloat16 as the float32 it is the upper half of, since not every GPU multiplies bfloat16; float32
    without the power of two.
    """
    if DOT == tl.float32:
        value = decode_e2m1((words >> (4 * p + 16 * HALF)) & 0xF)
    else:
        LOW: tl.constexpr = 6 if DOT == tl.bfloat16 else 9
        SHIFT: tl.constexpr = LOW - 4 * p
        magnitude = (words << SHIFT) if SHIFT >= 0 else (words >> -SHIFT)
        both = ((words << (12 - 4 * p)) & 0x80008000) | (magnitude & (0x00070007 << LOW))
        if DOT == tl.float16:
            value = (both >> (16 * HALF)).to(tl.uint16).to(tl.float16, bitcast=True)
        else:
            value = ((both & 0xFFFF0000) if HALF else (both << 16)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def nibbles(code, ASM: tl.constexpr, DOT: tl.constexpr):
    """The 4 nibbles of `code` (uint16) times `2^-126` (bfloat16), `2^-14` (float16); of DOT or (`place`) float32.

    PTX takes the elements of a thread in whatever order they are in, two at once: only what is computed of each for
    itself is right. So halves of words, not bytes.
    """
    if ASM:
        if DOT == tl.bfloat16:
            asm: tl.constexpr = BFLOAT16_ASM
            dtypes: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        else:
            asm: tl.constexpr = FLOAT16_ASM
            dtypes: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        values = tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,r", [code], dtype=dtypes, is_pure=True, pack=2)
    else:
        code = code.to(tl.uint32)
        values = place(code, 0, 0, DOT), place(code, 1, 0, DOT), place(code, 2, 0, DOT), place(code, 3, 0, DOT)
    return values


def scale_asm(e8m0: bool, shift: int) -> str:
    """PTX for `permuted.fold_scales` of a byte each of two words, by PRMT's selectors for that byte and zeros."""
    take = "{\n.reg .b32 a, b;\nprmt.b32 a, $1, 0, $3;  prmt.b32 b, $2, 0, $4;\n"
    if e8m0:
        return take + (
            "min.u32 a, a, 134;  min.u32 b, b, 134;  mad.lo.u32 a, b, 0x10000, a;\n"
            f"mad.lo.u32 $0, a, {1 << shift}, 0x{121 << 7:04X}{121 << 7:04X};\n}}"
        )
    return take + (
        f"shl.b32 a, a, {shift};  mad.lo.u32 a, b, {1 << 16 + shift}, a;\n"
        f"add.u32 b, a, 0x{1 << shift:04X}{1 << shift:04X};  "
        f"lop3.b32 $0, b, 0x{0x80 << shift:04X}{0x80 << shift:04X}, a, 0xEA;\n}}"
    )


E8M0_ASM, E4M3_ASM, E4M3_HALF_ASM = (tl.constexpr(scale_asm(*of)) for of in ((True, 7), (False, 4), (False, 7)))


@triton.jit
def fold_words(words, select, E8M0: tl.constexpr, DOT: tl.constexpr):
    """`permuted.fold_scales` of the byte that PRMT's `select` takes from each of `words`, in DOT; inline PTX."""
    if DOT == tl.float16:
        scales = tl.inline_asm_elementwise(E4M3_HALF_ASM, "=r,r,r,r,r", [words, select], tl.float16, True, 2)
        scales = scales * tl.full((), 2.0**15, DOT)
    elif E8M0:
        scales = tl.inline_asm_elementwise(E8M0_ASM, "=r,r,r,r,r", [words, select], tl.bfloat16, True, 2)
    else:
        scales = tl.inline_asm_elementwise(E4M3_ASM, "=r,r,r,r,r", [words, select], tl.bfloat16, True, 2)
        scales = scales * tl.full((), 2.0**120, DOT) * tl.full((), 2.0**119, DOT)
    return scales


@triton.jit
def macro_scales(code, m):
    """E8M0 bytes `code` and macro bytes `m`, uint8, as float32: `2^126` times the scale, by `1 + h/16` and by `l/256`.

    h and l are the halves of m. Both fit into bfloat16; the first is not finite where that is not so.
    """
    code, m = tl.minimum(code.to(tl.uint32), 129), m.to(tl.uint32)
    high = (((code + 126) << 23) | (m >> 4 << 19)).to(tl.float32, bitcast=True)
    return high, ((code + 118) << 23).to(tl.float32, bitcast=True) * (m & 15).to(tl.float32)


@triton.jit
def load_factors(macro, rows, k, K, mask):
    """Macro factors `1 + m/256` of the weights at `rows` and `k`, float32; `macro` uint8 `[R, ceil(K/128)]`, dense."""
    m = tl.load(macro + rows * tl.cdiv(K, MACRO) + k // MACRO, mask=mask, other=0)
    return 1 + m.to(tl.float32) * (2.0**-8)


@triton.jit
def load_weights(
    packed,
    scale,
    macro,
    rows,
    row_mask,
    k,
    K,
    stride_packed,
    stride_scale,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Load and decode a tile: rows `rows` (int64 `[R]`), columns `k .. k + TILE_K`; zero outside the masks.

    `packed` uint8 and `scale` uint8 (the bytes of either format's scales) point at rows of `stride_packed` and
    `stride_scale` elements; `macro` as `load_factors` takes it, or `None`.

    Returns:
        `E2M1 * scale * macro`, float32 `[R, TILE_K]`; exact. Without macro factors, rounding it to bfloat16 changes
        nothing (nor to float16, for E4M3 scales).
    """
    columns = k // 2 + tl.arange(0, TILE_K // 2)
    blocks = k // BLOCK + tl.arange(0, TILE_K // BLOCK)
    mask, block_mask = row_mask[:, None], row_mask[:, None]
    if not EVEN_K:
        mask = mask & (columns < K // 2)[None, :]
        block_mask = block_mask & (blocks < K // BLOCK)[None, :]
    byte = tl.load(packed + rows[:, None] * stride_packed + columns[None, :], mask=mask, other=0).to(tl.uint32)
    scales = tl.load(scale + rows[:, None] * stride_scale + blocks[None, :], mask=block_mask, other=0).to(tl.uint32)
    values = tl.join(decode_e2m1(byte & 0xF), decode_e2m1(byte >> 4))
    values = values.reshape(rows.shape[0], TILE_K // BLOCK, BLOCK)
    scales = decode_e8m0(scales) if E8M0 else decode_e4m3(scales)
    if macro is not None:
        scales = scales * load_factors(macro, rows[:, None], blocks[None, :] * BLOCK, K, block_mask)
    return (values * scales[:, :, None]).reshape(rows.shape[0], TILE_K)


@triton.jit
def two_terms(values):
    """float32 values of up to 16 significant bits as `(high, low)` of up to 8 each, as bfloat16 holds them.

    The sum is exact, but for bits below 2^-133, bfloat16's smallest number. Truncated, not rounded: `high` of a finite
    value is finite.
    """
    high = (values.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high, tl.where(high == values, 0.0, values - high)  # 0 at infinity


@triton.jit
def load_addend(addend, row, end, column, width, tokens, TILE_M: tl.constexpr, TILE: tl.constexpr):
    """`addend [width, tokens]` at tokens from `row` and outputs from `column` on, turned: `[TILE_M, TILE]`."""
    addend += tl.cast(column, tl.int64) * tokens + row  # offsets of 32 bits in the tile: fewer registers
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE)
    mask = (row + rows < end)[:, None] & (column + columns < width)[None, :]
    return tl.load(addend + (columns[None, :] * tokens + rows[:, None]), mask=mask, other=0.0)


@triton.jit
def find_rows(slot, offsets, tokens, experts, TILE_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Expert and rows `[row, end)` of a program in `slot`; no rows left if `row >= end`.

    Expert e starts at slot `offsets[e] // TILE_M + e`: that leaves it room for all its blocks wherever its tokens
    start, and needs no sum over the experts before it.
    """
    if offsets is None:
        expert, row, end = 0, slot * TILE_M, tokens
    else:
        index = tl.arange(0, EXPERTS)
        slots = tl.load(offsets + index, mask=index < experts, other=0) // TILE_M + index
        expert = tl.maximum(tl.sum(((slots <= slot) & (index < experts)).to(tl.int32)) - 1, 0)
        start = tl.load(offsets + expert)
        row = start + (slot - start // TILE_M - expert) * TILE_M
        end = tl.minimum(tl.load(offsets + expert + 1), tokens)  # never past x, whatever offsets hold
        row = tl.where(row < tl.maximum(start, 0), end, row)
    return expert, row, end


def slots_of(tokens: int, offsets: torch.Tensor | None, tile_m: int) -> int:
    """How many slots `find_rows` needs for all tokens, whatever `offsets` (`[E+1]`, or `None`) hold."""
    return -(-tokens // tile_m) if offsets is None else tokens // tile_m + offsets.shape[0] - 1


def dense_rows(weight: QuantizedTensor) -> tuple[torch.Tensor | None, ...]:
    """`packed` and `scale` bytes as matrices (rows of a stack one below the other), `global_scale` and `macro` flat.

    Views as long as rows are dense; kernels take the distance between rows as an argument, but for `macro`.
    """
    packed, scale, global_scale, macro = weight.packed, weight.scale, weight.global_scale, weight.macro
    scale = scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)
    if packed.ndim != 2:  # in each call of a layer: no view that is not needed
        packed, scale = (rows.reshape(-1, rows.shape[-1]) for rows in (packed, scale))
    return (
        packed if packed.stride(1) == 1 else packed.contiguous(),
        scale if scale.stride(1) == 1 else scale.contiguous(),
        global_scale if global_scale is None or not global_scale.ndim else global_scale.reshape(-1).contiguous(),
        None if macro is None else macro.contiguous(),
    )
