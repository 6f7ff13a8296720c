# SPDX-License-Identifier: Apache-2.0
"""The loop of the forward products: packed weights decoded in registers, straight into the tensor cores' operand.

`accumulate` is the sum over k of `E2M1 * scale (* macro) * x` for a tile of rows of a weight and a tile of rows of x,
both given as tensors of row numbers; `reduce_splits` joins the parts of a sum cut along K. Inside a kernel:

    begin, end = split_range(split, SPLITS, K, TILE_K)
    total = accumulate(x, x_rows, x_mask, packed, scale, macro, weight_rows, row_mask, begin, end, K, stride_x,
                       stride_packed, stride_scale, E8M0, BLOCK, ASM, ORDER, DOT, EVEN_K, TILE_M, TILE_N, TILE_K)
    total, last = reduce_splits(total, workspace, counters, tile, split, SPLITS, ASM)
    if last:
        ...  # the epilogue: global scale, what outliers add, bias, store

`total` is float32 `[TILE_N, TILE_M]`: the weight is the left operand, so that 16 tokens fill a tensor core. Rows are
numbered in int64, `[TILE_M]` and `[TILE_N]`; masked ones count as zeros. A mask may be `None`, and costs instructions
on weights: better clamp their row numbers and throw the copies away. TILE_K is a multiple of 128, exactly 128 with
macro factors. The other compile-time arguments are those of `constants` and `target`.

Decoding. E2M1's bits put where bfloat16 keeps its sign, exponent and first mantissa bit read as `value * 2^-126`
(float16: `2^-14`), two values to a register. One product by the scale, itself put together from bits, gives the weight
times a power of two that is undone in the sum: everything exact. Powers of two are chosen so that any sane scale is
right at no cost and any other one (E8M0 above 2^6 or NaN, in float16 also from 2^-79 to 2^-32; E4M3 negative or NaN)
overflows. So does whatever is not finite anyway; the tile is then summed once more, slowly.

Order. A sum over k has no order, so the weights stay where their bytes put them. In a tile of weights `[TILE_N, chunk,
lane 4, word 4, half 2, phi 2, plo 2]` counts k: each of the 4 lanes that share a row takes 16 bytes in a row, 4 words,
and nibbles p and p + 4 of a word (p = 2 phi + plo) share a register. The tensor cores want k in another order, ORDER 3
that of Hopper's and 2 that of the others', and x is turned into that one too. Twin: tests/test_permuted.py.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_mxfp4.kernels.decode import (
    INTERPRET,
    MACRO,
    decode_e4m3,
    decode_e8m0,
    load_factors,
    load_weights,
    nibbles,
    place,
    two_terms,
)

CHUNK = tl.constexpr(128)  # k that 4 lanes take in 16 bytes each
STEP = tl.constexpr(32)  # along k, in the slow loop
TERM = tl.constexpr(tl.float32 if INTERPRET else tl.bfloat16)
INTERPRETED = tl.constexpr(INTERPRET)
SLOW_FLOAT32 = tl.constexpr(not INTERPRET)  # no tensor cores for float32; interpreted, it stands for bfloat16


def scale_asm(shift: int) -> str:
    """PTX that widens 4 bytes to halves of 2 registers, shifted; the byte 0x7F becomes something beyond 0x7F."""
    widen = [
        f"prmt.b32 b, $2, 0, 0x{select};  shl.b32 b, b, {shift};  add.u32 n, b, 0x{1 << shift:04X}{1 << shift:04X};"
        f"  lop3.b32 ${i}, n, 0x{0x80 << shift:04X}{0x80 << shift:04X}, b, 0xEA;"
        for i, select in enumerate(("4140", "4342"))
    ]
    return "{\n.reg .b32 b, n;\n" + "\n".join(widen) + "\n}"


BFLOAT16_SCALE_ASM, FLOAT16_SCALE_ASM = tl.constexpr(scale_asm(4)), tl.constexpr(scale_asm(7))

# CDNA's barrier waits for no stores, and the one thread that counts waits only for its own. (RDNA's does.)
AMD_WAIT = tl.constexpr(""".if .amdgcn.gfx_generation_number == 9
s_waitcnt vmcnt(0)
.endif
v_mov_b32 $0, $1""")


@triton.jit
def within(rows, columns, end, EVEN: tl.constexpr):
    """A mask `[R, C]` of `rows` (or `None`: all) and, unless EVEN, of columns before `end`; or `None` for all."""
    if EVEN:
        mask = rows if rows is None else rows[:, None]
    else:
        mask = (columns < end)[None, :] if rows is None else rows[:, None] & (columns < end)[None, :]
    return mask


@triton.jit
def load(pointers, mask, policy: tl.constexpr):
    """`tl.load`, zeros where `mask` (or `None`) is false."""
    if mask is None:
        value = tl.load(pointers, eviction_policy=policy)
    else:
        value = tl.load(pointers, mask=mask, other=0, eviction_policy=policy)
    return value


@triton.jit
def load_values(packed, offsets, mask, ASM: tl.constexpr, DOT: tl.constexpr):
    """Values at `offsets` (of halves of words; without ASM, of words) `[R, C]`, times `2^-126` (bfloat16) or `2^-14`.

    `[R, words, half, plo, phi]`, of DOT or (`place`) float32.
    """
    if ASM:
        halves = packed.to(tl.pointer_type(tl.uint16))
        n0, n1, n2, n3 = nibbles(load(halves + offsets, mask, "evict_first"), True, DOT)
        values = tl.join(tl.join(n0, n1), tl.join(n2, n3))  # plo, phi
        values = values.reshape(offsets.shape[0], offsets.shape[1] // 2, 2, 2, 2)
    else:
        words = packed.to(tl.pointer_type(tl.uint32))
        words = load(words + offsets, mask, "evict_first")
        p0 = tl.join(place(words, 0, 0, DOT), place(words, 0, 1, DOT))
        p1 = tl.join(place(words, 1, 0, DOT), place(words, 1, 1, DOT))
        p2 = tl.join(place(words, 2, 0, DOT), place(words, 2, 1, DOT))
        p3 = tl.join(place(words, 3, 0, DOT), place(words, 3, 1, DOT))
        values = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    return values


@triton.jit
def fold_scales(code, E8M0: tl.constexpr, ASM: tl.constexpr, DOT: tl.constexpr):
    """Scale bytes (uint8) as numbers for `load_values` to be multiplied by; infinity for those that cannot be folded.

    With the values' own power of two, a weight comes out times that of `undo`, exact.
    """
    if DOT == tl.float32:
        scales = decode_e8m0(code.to(tl.uint32)) if E8M0 else decode_e4m3(code.to(tl.uint32))
    elif E8M0 and DOT == tl.bfloat16:
        bits = ((tl.minimum(code.to(tl.uint16), 134) + 121) << 7).to(tl.uint16)
        scales = bits.to(tl.bfloat16, bitcast=True) if ASM else (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif E8M0:
        # A weight keeps its two bits down to 2^-32. One below 2^-79 adds nothing to any float16 and is left out.
        code = code.to(tl.uint32)
        bits = tl.where((code >= 48) & (code < 96), 0x7F800000, (tl.minimum(code, 160) + 8) << 23).to(tl.uint32)
        scales = bits.to(tl.float32, bitcast=True).to(tl.float16)
    else:
        # A byte's bits read as the scale times 2^-120 (float16: 2^-8), subnormals too; from 0x80 on they overflow.
        if ASM and DOT == tl.bfloat16:
            scales = tl.inline_asm_elementwise(BFLOAT16_SCALE_ASM, "=r,=r,r", [code], tl.bfloat16, True, 4)
        elif ASM:
            scales = tl.inline_asm_elementwise(FLOAT16_SCALE_ASM, "=r,=r,r", [code], tl.float16, True, 4)
        elif DOT == tl.bfloat16:
            bits = tl.where(code == 0x7F, 0x80, code.to(tl.uint32)) << 20
            scales = bits.to(tl.uint32).to(tl.float32, bitcast=True)
        else:
            bits = tl.where(code == 0x7F, 0x80, code.to(tl.uint16)) << 7
            scales = bits.to(tl.uint16).to(tl.float16, bitcast=True)
        if DOT == tl.bfloat16:
            scales = scales * tl.full((), 2.0**120, scales.dtype) * tl.full((), 2.0**119, scales.dtype)
        else:
            scales = scales * tl.full((), 2.0**15, scales.dtype)
    return scales


@triton.jit
def narrow(weights, DOT: tl.constexpr):
    """Weights that DOT holds exactly, in DOT."""
    if weights.dtype == tl.float32 and DOT == tl.bfloat16:
        weights = (weights.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return weights


@triton.jit
def permute(tile, half: tl.constexpr, phi: tl.constexpr, plo: tl.constexpr, ORDER: tl.constexpr):
    """A tile `[R, chunk, lane, word, ...]` with `half`, `phi`, `plo` at those dimensions, as `[R, K]` in ORDER."""
    if ORDER == 3:
        turned = tile.trans(0, 1, 3, phi, plo, 2, half)
    elif ORDER == 2:
        turned = tile.trans(0, 1, 3, 2, phi, plo, half)
    else:
        turned = tile.trans(0, 1, 2, 3, half, phi, plo)  # as in memory
    return turned


@triton.jit
def add_product(weights, x, total):
    """`total + weights @ x.T`, accumulated in float32."""
    return tl.dot(weights, x.to(weights.dtype).trans(), total, input_precision="ieee")


@triton.jit
def accumulate(
    x,
    x_rows,
    x_mask,
    packed,
    scale,
    macro,
    weight_rows,
    row_mask,
    k_begin,
    k_end,
    K,
    stride_x,
    stride_packed,
    stride_scale,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    ORDER: tl.constexpr,
    DOT: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """The sum over k from `k_begin` to `k_end` of `E2M1 * scale (* macro) * x`: float32 `[TILE_N, TILE_M]`.

    x `[.., K]`, `packed` uint8 `[.., K/2]`, `scale` uint8 `[.., K/BLOCK]`, rows so many elements apart; `macro` uint8
    `[.., ceil(K/128)]`, dense, or `None`. The rows of `packed` begin at multiples of 4 bytes.
    """
    tl.static_assert(macro is None or TILE_K == MACRO, "a step along K must be a macro-block")
    CHUNKS: tl.constexpr = TILE_K // CHUNK
    UNIT: tl.constexpr = 2 if ASM else 4  # bytes loaded as one element
    inner = tl.arange(0, TILE_K)
    units = tl.arange(0, TILE_K // (2 * UNIT))
    blocks = tl.arange(0, TILE_K // BLOCK)
    x_offsets = x_rows[:, None] * stride_x + inner[None, :]
    offsets = weight_rows[:, None] * (stride_packed // UNIT) + units[None, :]
    scale_offsets = weight_rows[:, None] * stride_scale + blocks[None, :]
    rows_inside = weight_rows >= 0 if row_mask is None else row_mask
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    if macro is not None:
        factors = load_factors(macro, weight_rows, k_begin, K, rows_inside)
    for k in range(k_begin, k_end if DOT != tl.float32 or not SLOW_FLOAT32 else k_begin, TILE_K):
        x_inside = within(x_mask, inner, K - k, EVEN_K)
        inside = within(row_mask, units * (2 * UNIT), K - k, EVEN_K)
        scale_inside = within(row_mask, blocks * BLOCK, K - k, EVEN_K)
        part = load(x + k + x_offsets, x_inside, "evict_last")
        values = load_values(packed + k // 2, offsets, inside, ASM, DOT)
        scales = load(scale + k // BLOCK + scale_offsets, scale_inside, "")
        scales = fold_scales(scales, E8M0, ASM, DOT)
        if E8M0 and DOT == tl.float16:
            values = values * tl.full((), 2.0**14, DOT)
        weights = values.reshape(TILE_N, TILE_K // BLOCK, BLOCK // 8, 8) * scales[:, :, None, None]
        weights = narrow(weights, DOT)
        weights = permute(weights.reshape(TILE_N, CHUNKS, 4, 4, 2, 2, 2), 4, 6, 5, ORDER).reshape(TILE_N, TILE_K)
        part = permute(part.reshape(TILE_M, CHUNKS, 4, 4, 2, 2, 2), 4, 5, 6, ORDER).reshape(TILE_M, TILE_K)
        if macro is None:
            total = add_product(weights, part, total)
        else:
            # The next ones now: what does not go into a product is not loaded ahead by the compiler.
            following = load_factors(macro, weight_rows, k + TILE_K, K, rows_inside & (k + TILE_K < k_end))
            total += add_product(weights, part, tl.zeros((TILE_N, TILE_M), tl.float32)) * factors[:, None]
            factors = following
    if DOT != tl.float32:
        UNDO: tl.constexpr = 2.0**7 if not E8M0 else 2.0**5 if DOT == tl.bfloat16 else 2.0**-8
        total *= UNDO
        slow = tl.max((total - total != 0).to(tl.int32)) > 0  # infinite or NaN
    else:
        slow = SLOW_FLOAT32
    if slow:  # all scales, decoded in float32; k in the order of memory, few at a time
        total = tl.zeros((TILE_N, TILE_M), tl.float32)
        step = tl.arange(0, STEP)
        for k in tl.range(k_begin, k_end, STEP, num_stages=1):
            part = load(x + k + x_rows[:, None] * stride_x + step[None, :], within(x_mask, step, K - k, False), "")
            rows = weight_rows
            weights = load_weights(
                packed, scale, None, rows, rows_inside, k, K, stride_packed, stride_scale, E8M0, BLOCK, STEP, False
            )
            product = tl.zeros((TILE_N, TILE_M), tl.float32)
            if E8M0 and DOT == tl.float16:  # scales exceed float16: x as the exact sum of two bfloat16 numbers
                high, low = two_terms(part.to(tl.float32))
                product = add_product(weights.to(TERM), low, product)
                product = add_product(weights.to(TERM), high, product)
            else:
                product = add_product(weights.to(DOT), part, product)
            if macro is not None:
                product *= load_factors(macro, weight_rows, k, K, rows_inside)[:, None]
            total += product
    return total


@triton.jit
def split_range(split, SPLITS: tl.constexpr, K, TILE_K: tl.constexpr):
    """Part `split` of SPLITS of a sum over K, `(begin, end)`: whole steps, as many in each part or one more."""
    steps = tl.cdiv(K, TILE_K)
    return split * steps // SPLITS * TILE_K, (split + 1) * steps // SPLITS * TILE_K


@triton.jit
def reduce_splits(total, workspace, counters, tile, split, SPLITS: tl.constexpr, ASM: tl.constexpr, mask=None):
    """The sum of the parts of a tile that SPLITS programs hold, as `(sum, whether it is this program's to use)`.

    `total` float32 `[TILE_N, TILE_M]`, of which the columns in `mask` (`[TILE_M]`, or `None`) matter; `workspace`
    float32 of `SPLITS * TILE_N * TILE_M` for each tile, with anything in it; `counters` int32, a zero for each tile,
    zero again afterwards. The last program to arrive adds the parts up, always in the same order.
    """
    last = True
    if SPLITS > 1:
        N: tl.constexpr = total.shape[0]
        M: tl.constexpr = total.shape[1]
        inside = tl.arange(0, M)[None, :] * N + tl.arange(0, N)[:, None]
        inside_mask = inside >= 0 if mask is None else (inside >= 0) & mask[None, :]
        workspace += tl.cast(tile, tl.int64) * (SPLITS * N * M)
        tl.store(workspace + split * (N * M) + inside, total, mask=inside_mask)
        if not ASM and not INTERPRETED:
            tl.inline_asm_elementwise(AMD_WAIT, "=v,v", [split], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # every thread's part before the one thread's count
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.zeros((N, M), tl.float32)
            # As many parts under way at once as there is room for in registers.
            for s in tl.range(SPLITS, loop_unroll_factor=max(1, 8192 // (N * M))):
                part = workspace + s * (N * M) + inside
                total += tl.load(part, mask=inside_mask, other=0.0, cache_modifier=".cg")  # not from this SM's cache
            tl.store(counters + tile, 0)
    return total, last


class Target(NamedTuple):
    """What the launch of a kernel depends on."""

    backend: str  # "cuda", "hip"
    arch: int | str  # 90 for 9.0; "gfx942"
    processors: int

    @property
    def order(self) -> int:
        return 3 if self.arch == 90 else 2


HOPPER = Target("cuda", 90, 132)


@functools.cache
def target_of(device: torch.device) -> Target:
    """A device's target; an H200's in Triton's interpreter."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", 10 * properties.major + properties.minor, properties.multi_processor_count)


def target(device: torch.device | Target) -> dict[str, int | bool]:
    """The compile-time arguments of `accumulate` that depend on the device."""
    device = device if isinstance(device, Target) else target_of(device)
    return {"ASM": device.backend == "cuda" and not INTERPRET, "ORDER": device.order}


@functools.lru_cache(maxsize=1 << 12)
def constants(x_dtype: torch.dtype, block_size: int, e8m0: bool, k: int, tile_k: int) -> dict:
    """The compile-time arguments of `accumulate` that do not depend on the device, but for the tile sizes."""
    dot = torch.float32 if INTERPRET else x_dtype
    return {
        "E8M0": e8m0,
        "BLOCK": block_size,
        "DOT": getattr(tl, str(dot).removeprefix("torch.")),
        "EVEN_K": k % tile_k == 0,
    }


def words_aligned(packed: torch.Tensor) -> torch.Tensor:
    """`packed` `[R, K/2]` or a copy, with rows that begin at multiples of 4 bytes, as `accumulate` takes them."""
    return packed if packed.data_ptr() % 4 == 0 and packed.stride(0) % 4 == 0 else packed.contiguous().clone()
