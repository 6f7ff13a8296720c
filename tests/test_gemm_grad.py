# SPDX-License-Identifier: Apache-2.0
"""The fused gradient: its own decoding of scales by a model of the PTX, its tiles and parts in the interpreter.

Last, the scratch that the gradient of many tokens decodes into.

tests/test_kernels.py has what it shares with the forward product, tests/test_permuted.py the bits of the values.
"""

import re

import pytest
import torch

from exactness import differing, error_ratio, random_weight
from hf_mxfp4 import reference
from hf_mxfp4.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4, QuantizedTensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from test_permuted import INSTRUCTIONS

from hf_mxfp4.kernels import decode, gemm_grad
from hf_mxfp4.kernels.dequantize import dequantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES = torch.arange(256, dtype=torch.uint8)
MORE = INSTRUCTIONS | {"min.u32": min, "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF}
# The interpreter's numpy warns of what should happen where scales do not fold.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def run_ptx(asm: str, inputs: list[int]) -> int:
    """`$0` after inline assembly whose inputs are `$1 ..`."""
    registers = {f"${i + 1}": value for i, value in enumerate(inputs)}
    for instruction in re.findall(r"[^;{}]+", asm.strip()):
        name, *operands = instruction.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            values = [registers[x] if x in registers else int(x, 0) for x in operands[1:]]
            registers[operands[0]] = MORE[name](*values)
    return registers["$0"]


@pytest.mark.parametrize(
    "fmt, asm, dtype, factors, power",
    [
        (MXFP4, decode.E8M0_ASM, torch.bfloat16, (), 121),
        (NVFP4, decode.E4M3_ASM, torch.bfloat16, (120, 119), 119),
        (NVFP4, decode.E4M3_HALF_ASM, torch.float16, (15,), 7),
    ],
)
def test_folded_scales(fmt, asm, dtype, factors, power):
    """Every scale byte, at each place of a word: its value times a power of two, or not finite."""
    exact = fmt.decode_scale(fmt.scale_from_bytes(BYTES)).to(torch.float64) * 2.0**power
    inside = (133 if fmt is MXFP4 else 126) >= BYTES
    for place in range(4):
        words = [int(byte) << 8 * place | 0x5A5A5A5A & ~(0xFF << 8 * place) for byte in BYTES]
        pairs = [
            run_ptx(asm.value, [a, b, 0x4440 + place, 0x4440 + place]) for a, b in zip(words, words[::-1], strict=True)
        ]
        bits = torch.tensor([[pair & 0xFFFF, pair >> 16] for pair in pairs], dtype=torch.int32).to(torch.uint16)
        got = bits.view(dtype)
        for factor in factors:
            got = got * torch.tensor(2.0**factor, dtype=dtype)
        got = torch.stack((got[:, 0], got[:, 1].flip(0)))
        assert torch.equal(got[:, inside].to(torch.float64), exact[inside].expand(2, -1))
        assert not got[:, ~inside].isfinite().any()


@triton.jit
def macro_scales_kernel(code, m, high, low, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    terms = decode.macro_scales(tl.load(code + index), tl.load(m + index))
    tl.store(high + index, terms[0])
    tl.store(low + index, terms[1])


def test_macro_scales():
    """A code times either term is exact in bfloat16, and both add up to the weight, for every scale and factor."""
    code, m = (part.reshape(-1).to(DEVICE) for part in torch.meshgrid(BYTES, BYTES, indexing="ij"))
    high, low = torch.empty(2, code.numel(), device=DEVICE)
    macro_scales_kernel[code.numel() // 4096,](code, m, high, low, SIZE=4096)
    assert not high[code > 128].isfinite().any()
    inside = code <= 128
    high, low, exact = (part[inside].double() for part in (high, low, code))
    exact = 2.0 ** (exact - 127 + 126) * (1 + m[inside] / 256.0)
    assert torch.equal(high + low, exact)
    for value in E2M1_VALUES:
        for term in (high, low):
            product = value * 2.0**-126 * term
            kept = product.to(torch.bfloat16).to(torch.float64)
            assert ((product - kept).abs() <= 2.0**-134).all()  # half of bfloat16's smallest number


@pytest.mark.parametrize("fmt, macro", [(MXFP4, False), (MXFP4, True), (NVFP4, False)])
@pytest.mark.parametrize("options", [{"SPLITS": 4, "TILE_N": 16}, {"TILE_K": 128}, {"TILE_M": 32, "TILE_K": 256}])
def test_options(fmt, macro, options):
    """Other tiles and parts of the sum than the heuristic's; scales by words and by bytes, tiles that reach past K."""
    base = gemm_grad.tile(torch.float32, 20, 90, 384)
    for k in (384, 32 * 9):
        weight = random_weight(90, k, fmt=fmt, device=DEVICE, **({"macro": True} if macro else {}))
        x = torch.randn(20, 90, device=DEVICE)
        got = gemm_grad.linear_grad(x, weight, None, base | options)
        assert error_ratio(got, x, reference.dequantize(weight, torch.float64)) <= 1


@both_formats
def test_rows_that_start_anywhere(fmt):
    """Bytes of the codes and scales at odd places of their storage."""
    whole = random_weight(24, 256, fmt=fmt, device=DEVICE)
    packed, scale = (
        torch.cat((t.new_zeros(1), t.reshape(-1)))[1:].view(t.shape)
        for t in (whole.packed, whole.scale.view(torch.uint8))
    )
    weight = QuantizedTensor(packed, fmt.scale_from_bytes(scale), whole.global_scale, fmt)
    x = torch.randn(3, 24, device=DEVICE)
    assert differing(gemm_grad.linear_grad(x, weight), gemm_grad.linear_grad(x, whole)) == 0


@pytest.mark.parametrize("scales", ["usual", "negative", "NaN"])
def test_float16_and_what_does_not_fold(scales, monkeypatch):
    """In float16, which the interpreter does right: folded scales, and the slow sum where they do not fold."""
    constants = gemm_grad.constants
    monkeypatch.setattr(gemm_grad, "constants", lambda *of: constants(*of) | {"DOT": tl.float16})
    weight = random_weight(48, 128, fmt=NVFP4, device=DEVICE)
    code = weight.scale.view(torch.uint8)
    code[5, 2] = {"usual": code[5, 2], "negative": code[5, 2] | 0x80, "NaN": torch.tensor(0x7F)}[scales]
    x = torch.randn(4, 48, device=DEVICE).to(torch.float16)
    got, dense = gemm_grad.linear_grad(x, weight), reference.dequantize(weight, torch.float64)
    spoilt = dense.isnan().any(0)
    assert torch.equal(got.isnan().all(0), spoilt) and int(spoilt.sum()) == (16 if scales == "NaN" else 0)
    assert error_ratio(got[:, ~spoilt], x, dense[:, ~spoilt]) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 20, 64, 128, 512, 4096])
def test_tiles(dtype, tokens):
    """The heuristic comes first among what a tuner tries, its parts have 8 steps; experts are not cut."""
    for n, k, macro in ((2048, 4096, False), (12288, 4096, True), (64, 64, False)):
        best, *others = gemm_grad.candidates(dtype, tokens, n, k, 1, macro)
        assert best == gemm_grad.tile(dtype, tokens, n, k, 1, macro) and best not in others
        assert best["SPLITS"] == 1 or best["SPLITS"] * best["TILE_N"] * 8 <= n
    assert gemm_grad.tile(dtype, tokens, 2048, 4096, 8)["SPLITS"] == 1


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_into(fmt, dtype):
    """The caller's memory, all of it written; anything but a dense tensor of the right kind is refused."""
    weight = random_weight(5, 96, fmt=fmt, device=DEVICE)
    room = torch.full((2, 5, 96), float("nan"), dtype=dtype, device=DEVICE)
    got = dequantize(weight, dtype, out=room[1])
    assert got.data_ptr() == room[1].data_ptr() and room[0].isnan().all()
    assert differing(got, reference.dequantize(weight, dtype)) == 0
    for wrong in (room[0, :4], room[0].T, room[0].to(torch.float64), room[:, :, 0]):
        with pytest.raises(ValueError, match="out: .* is not a dense"):
            dequantize(weight, dtype, out=wrong)
