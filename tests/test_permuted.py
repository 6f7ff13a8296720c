# SPDX-License-Identifier: Apache-2.0
"""The loop of the forward products: its bits and orders by a model in torch, its sums in Triton's interpreter.

The interpreter knows neither PTX nor bfloat16 (kernels/decode.py). So the constants of both are proven here, on every
code and every scale, by doing what the instructions do; what a GPU makes of them is checked by scripts/gpu_check.py.
"""

import re

import pytest
import torch

from exactness import differing, error_ratio, random_weight
from hf_mxfp4 import reference
from hf_mxfp4.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4

pytest.importorskip("triton")

import triton
import triton.language as tl

from hf_mxfp4.kernels import decode, permuted
from hf_mxfp4.kernels.decode import dense_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODES = torch.tensor(E2M1_VALUES, dtype=torch.float64)
WORD = 0xFFFFFFFF
# The interpreter's numpy warns of what is meant to happen: a scale that does not fold overflows.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


# --- a model of the few PTX instructions in use ----------------------------------------------------------------------


def prmt(a: int, b: int, select: int) -> int:
    """`prmt.b32`: each hexadecimal digit of `select` names a byte of `b:a`, the lowest first."""
    sources = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(sources[select >> 4 * i & 7] for i in range(4)), "little")


INSTRUCTIONS = {
    "shl.b32": lambda a, by: a << by & WORD,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b & WORD,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
    "prmt.b32": prmt,
}


def run_ptx(asm: str, outputs: int, word: int) -> list[int]:
    """The output registers `$0 ..` of inline assembly whose one input register, the next after them, holds `word`."""
    registers = {f"${outputs}": word}
    for instruction in re.findall(r"[^;{}]+", asm.strip()):
        name, *operands = instruction.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            values = [registers[x] if x in registers else int(x, 0) for x in operands[1:]]
            registers[operands[0]] = INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def halves(registers: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The 16-bit floats that registers hold, low halves first, as float64."""
    bits = torch.tensor([r >> shift & 0xFFFF for r in registers for shift in (0, 16)], dtype=torch.int32)
    return bits.to(torch.uint16).view(dtype).to(torch.float64)


PLACES = {
    torch.bfloat16: (decode.BFLOAT16_ASM, permuted.BFLOAT16_SCALE_ASM, 2.0**-126),
    torch.float16: (decode.FLOAT16_ASM, permuted.FLOAT16_SCALE_ASM, 2.0**-14),
}
both_dtypes = pytest.mark.parametrize("dtype", PLACES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@both_dtypes
def test_placed_bits(dtype):
    """Every code in each of a word's 8 places: register p holds the values of nibbles p and p + 4."""
    asm, _, factor = PLACES[dtype]
    words = [sum((code + place) % 16 << 4 * place for place in range(8)) for code in range(16)]
    for word in words:
        expected = CODES[[word >> 4 * place & 15 for p in range(4) for place in (p, p + 4)]]
        got = halves(run_ptx(asm.value, 4, word), dtype)
        assert torch.equal(got, expected * factor) and torch.equal(got.signbit(), expected.signbit())


@triton.jit
def place_kernel(words, out, DOT: tl.constexpr):
    word = tl.arange(0, 16)
    packed = tl.load(words + word)
    for p in tl.static_range(4):
        for half in tl.static_range(2):
            value = permuted.place(packed, p, half, DOT)
            if value.dtype == tl.float16:
                bits = value.to(tl.uint16, bitcast=True).to(tl.int32)
            else:
                bits = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
                tl.device_assert(bits.to(tl.uint32) << 16 == value.to(tl.uint32, bitcast=True))
            tl.store(out + word * 8 + (2 * p + half), bits)


@both_dtypes
def test_placed_bits_without_asm(dtype):
    """The same bits by Triton's own operations; bfloat16's as the upper half of a float32."""
    words = [sum((code + place) % 16 << 4 * place for place in range(8)) for code in range(16)]
    out = torch.empty(16, 8, dtype=torch.int32, device=DEVICE)
    signed = torch.tensor(words, dtype=torch.int64).to(torch.int32).to(DEVICE)
    place_kernel[1,](signed.view(torch.uint32), out, DOT=getattr(tl, str(dtype).removeprefix("torch.")))
    expected = [[r >> s & 0xFFFF for r in run_ptx(PLACES[dtype][0].value, 4, word) for s in (0, 16)] for word in words]
    assert out.tolist() == expected


def exact(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` (float64), rounded to `dtype` and none the worse; beyond its range, infinity (NaN stays)."""
    rounded = values.to(dtype).to(torch.float64)
    assert bool((~rounded.isfinite() | (rounded == values)).all())
    return rounded


@both_dtypes
def test_folded_e4m3(dtype):
    """All 16 codes times all 256 E4M3 bytes: each intermediate is exact, or infinite for what cannot be folded."""
    asm, scale_asm, factor = PLACES[dtype]
    words = torch.arange(256).view(64, 4).tolist()
    scales = torch.cat([halves(run_ptx(scale_asm.value, 2, int.from_bytes(bytes(w), "little")), dtype) for w in words])
    for multiplier in (2.0**120, 2.0**119) if dtype == torch.bfloat16 else (2.0**15,):
        scales = exact(scales * torch.tensor(multiplier, dtype=dtype).to(torch.float64), dtype)
    folded = scales.isfinite()
    assert folded.tolist() == [byte < 0x7F for byte in range(256)]
    true = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    product = exact((CODES[:, None] * factor) * scales[folded], dtype)
    assert torch.equal(product * 2.0**7, CODES[:, None] * true[folded])


def test_folded_e8m0():
    """All 16 codes times all 256 E8M0 bytes, in bfloat16."""
    bits = (torch.arange(256).clamp(max=134) + 121) << 7
    scales = bits.to(torch.uint16).view(torch.bfloat16).to(torch.float64)
    folded = scales.isfinite()
    assert folded.tolist() == [byte <= 133 for byte in range(256)]
    product = exact((CODES[:, None] * 2.0**-126) * scales[folded], torch.bfloat16)
    assert torch.equal(product * 2.0**5, CODES[:, None] * 2.0 ** (torch.arange(134) - 127.0).to(torch.float64))


# --- orders ----------------------------------------------------------------------------------------------------------


def permuted_k(order: int, x: bool) -> torch.Tensor:
    """Which k of 128 stands where: as x is turned, or as weights come out of their registers."""
    k = torch.arange(128).view(1, 4, 4, 2, 2, 2)  # chunk, lane, word, half, phi, plo
    if not x:
        k = k.permute(0, 1, 2, 3, 5, 4)  # decoded: half, plo, phi
    half, phi, plo = (3, 4, 5) if x else (3, 5, 4)
    dims = {3: (0, 2, phi, plo, 1, half), 2: (0, 2, 1, phi, plo, half), 0: (0, 1, 2, half, phi, plo)}[order]
    return k.permute(dims).flatten()


@pytest.mark.parametrize("order", [0, 2, 3])
def test_weights_and_x_in_one_order(order):
    assert torch.equal(permuted_k(order, False), permuted_k(order, True))
    assert permuted_k(order, True).sort().values.tolist() == list(range(128))


@pytest.mark.parametrize("order", [2, 3])
def test_order_keeps_a_lane_to_its_bytes(order):
    """What the tensor cores ask of lane t in a step of 16 (Hopper) or 32 (others) are whole registers of one word.

    PTX ISA, fragments of `wgmma.m64nNk16` and `mma.m16n8k16`: lane t of a row owns k 2t, 2t + 1, 2t + 8, 2t + 9.
    Without Hopper, Triton gives it 8 values in a row of 32, for two such steps.
    """
    k = permuted_k(order, True)
    steps = k.view(4, 2, 2, 4, 2).permute(0, 3, 1, 2, 4) if order == 3 else k.view(4, 4, 2, 2, 2)
    for word, lanes in enumerate(steps):
        for lane, slots in enumerate(lanes):
            assert slots.reshape(4, 2).tolist() == [
                [32 * lane + 8 * word + p + 4 * h for h in (0, 1)] for p in range(4)
            ]


# --- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def sum_kernel(
    x,
    x_rows,
    packed,
    scale,
    macro,
    weight_rows,
    out,
    workspace,
    counters,
    tokens,
    N,
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
    MASKED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """`out [N, tokens]` from rows `weight_rows` and `x_rows`; programs of a tile are apart by one, parts by two."""
    column, split = tl.program_id(0) * TILE_N, tl.program_id(1)
    n, m = column + tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    w_rows = tl.load(weight_rows + tl.minimum(n, N - 1)).to(tl.int64)
    rows = tl.load(x_rows + tl.minimum(m, tokens - 1)).to(tl.int64)
    begin, end = permuted.split_range(split, SPLITS, K, TILE_K)
    total = permuted.accumulate(
        x,
        rows,
        m < tokens if MASKED else None,
        packed,
        scale,
        macro,
        w_rows,
        n < N if MASKED else None,
        begin,
        end,
        K,
        stride_x,
        stride_packed,
        stride_scale,
        E8M0,
        BLOCK,
        ASM,
        ORDER,
        DOT,
        EVEN_K,
        TILE_M,
        TILE_N,
        TILE_K,
    )
    total, last = permuted.reduce_splits(total, workspace, counters, tl.program_id(0), split, SPLITS, True)
    if last:
        tl.store(out + n[:, None] * tokens + m[None, :], total, mask=(n < N)[:, None] & (m < tokens)[None, :])


def sums(x, x_rows, weight, weight_rows, splits=1, masked=True, dot=None, tile_k=128, **changed) -> torch.Tensor:
    """`x[x_rows] @ W[weight_rows].T`, without W's global scale, by a kernel around `accumulate`."""
    packed, scale, _, macro = dense_rows(weight)
    k, n, tokens = weight.shape[-1], len(weight_rows), len(x_rows)
    options = permuted.constants(x.dtype, weight.format.block_size, weight.format is MXFP4, k, tile_k)
    options |= {"TILE_M": 16, "TILE_N": 16, "TILE_K": tile_k, "SPLITS": splits, "MASKED": masked}
    options |= {**permuted.target(DEVICE), **changed} | ({} if dot is None else {"DOT": dot})
    tiles = triton.cdiv(n, 16)
    workspace = torch.empty(tiles * splits * 256, device=DEVICE)
    counters = torch.zeros(tiles, dtype=torch.int32, device=DEVICE)
    out = torch.empty(n, tokens, device=DEVICE)
    strides = x.stride(0), packed.stride(0), scale.stride(0)
    rows = [torch.tensor(rows, device=DEVICE) for rows in (x_rows, weight_rows)]
    sum_kernel[tiles, splits](
        x, rows[0], packed, scale, macro, rows[1], out, workspace, counters, tokens, n, k, *strides, **options
    )
    assert not counters.any()
    return out.T


def expected_sums(x, x_rows, weight, weight_rows) -> torch.Tensor:
    dense = reference.dequantize(weight._replace(global_scale=None), torch.float64)
    return x[x_rows].to(torch.float64) @ dense[weight_rows].T


def ratio(got, x, weight) -> float:
    """The error of `sums(x, X_ROWS, weight, WEIGHT_ROWS)`, as a fraction of what float32 sums can make."""
    dense = reference.dequantize(weight._replace(global_scale=None), torch.float64)
    return error_ratio(got, x[X_ROWS].to(got.dtype), dense[WEIGHT_ROWS].T)


X_ROWS, WEIGHT_ROWS = [3, 0, 3], [7, 1, *range(20), 0]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("order", [0, 2, 3])
@pytest.mark.parametrize("k, tile_k, splits", [(128, 128, 1), (288, 128, 1), (512, 256, 2), (672, 128, 4)])
def test_gathered_rows(fmt, order, k, tile_k, splits):
    """Any rows of x and of the weight, K not a multiple of the step, a sum in parts."""
    weight, x = random_weight(20, k, fmt=fmt, device=DEVICE), torch.randn(5, k, device=DEVICE)
    for masked in (True, False):
        got = sums(x, X_ROWS, weight, WEIGHT_ROWS, splits, masked, tile_k=tile_k, ORDER=order)
        assert ratio(got, x, weight) <= 1


@pytest.mark.parametrize("k, splits", [(160, 1), (672, 3)])
def test_macro_factors(k, splits):
    weight = random_weight(20, k, fmt=MXFP4, device=DEVICE, macro=True)
    x = torch.randn(5, k, device=DEVICE)
    got = sums(x, X_ROWS, weight, WEIGHT_ROWS, splits)
    assert ratio(got, x, weight) <= 1


# Scales that fold into float16, one after another, and one that does not and takes the slow loop.
FOLDING = [(NVFP4, 0, 0x7F, bad) for bad in (None, 0x7F, 0x81, 0xC0, 0xFF)]
FOLDING += [(MXFP4, 96, 134, bad) for bad in (None, 60, 95, 135, 140, 142, 255)]


@pytest.mark.parametrize("fmt, first, end, bad", FOLDING, ids=str)
def test_float16_folding(fmt, first, end, bad):
    """In float16, which the interpreter knows: each weight comes out in bits, whatever its scale."""
    weight = random_weight(20, 256, fmt=fmt, device=DEVICE)
    scale = weight.scale.view(torch.uint8)
    scale.copy_(torch.arange(scale.numel()).view_as(scale) % (end - first) + first)
    if bad is not None:
        scale[3, 5] = bad
    x = torch.zeros(8, 256, dtype=torch.float16, device=DEVICE)
    x[range(8), [0, 17, 80, 95, 160, 161, 175, 255]] = 1  # a sum of one weight
    x_rows, weight_rows = list(range(8)), list(range(20))
    got = sums(x, x_rows, weight, weight_rows, dot=tl.float16)
    expected = expected_sums(x, x_rows, weight, weight_rows).to(torch.float32)
    assert differing(got + 0, expected + 0) == 0
    nan = (0x7F, 0xFF) if fmt is NVFP4 else (255,)
    assert expected.isnan().any(0).tolist() == [row == 3 and bad in nan for row in range(20)]


def test_float16_leaves_out_what_it_cannot_see():
    """E8M0 scales below 2^-79 (blocks of zeros have them) count as zero: the slow loop is not for them."""
    weight = random_weight(20, 256, fmt=MXFP4, device=DEVICE)
    weight.scale[:, 3] = 47
    x = torch.full((5, 256), 65504.0, dtype=torch.float16, device=DEVICE)
    got = sums(x, X_ROWS, weight, WEIGHT_ROWS, dot=tl.float16)
    weight.scale[:, 3] = 0
    assert torch.equal(got, sums(x, X_ROWS, weight, WEIGHT_ROWS, dot=tl.float16)) and got.isfinite().all()
    assert ratio(got, x, weight) <= 1


def test_splits_add_up_in_order():
    """The same sum each time, and the parts' ranges neither overlap nor leave anything out."""
    weight, x = random_weight(20, 1024, fmt=MXFP4, device=DEVICE), torch.randn(5, 1024, device=DEVICE)
    first = sums(x, X_ROWS, weight, WEIGHT_ROWS, 5)
    assert all(torch.equal(sums(x, X_ROWS, weight, WEIGHT_ROWS, 5), first) for _ in range(3))
