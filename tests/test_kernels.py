# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the reference: on the GPU if there is one, else in Triton's interpreter.

The interpreter gets bfloat16 arithmetic wrong, so there the kernels compute in float32 and only the rounding of the
result is to bfloat16 (kernels/decode.py); what the GPU does instead is checked by scripts/gpu_check.py.
"""

import json

import pytest
import torch

import gpu_check
from exactness import corrections, differing, error_ratio, every_code_and_scale, random_weight, with_outliers
from hf_mxfp4 import dispatch, ops, reference
from hf_mxfp4.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4, QuantizedTensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from hf_mxfp4.kernels import decode, gemm, gemm_grad, outliers
from hf_mxfp4.kernels.dequantize import dequantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# The interpreter's numpy warns of what should happen: E8M0's bytes 253 and 254 take the largest codes past float32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def weight_of(*shape, fmt) -> QuantizedTensor:
    return random_weight(*shape, fmt=fmt, device=DEVICE)


@both_formats
@every_dtype
@pytest.mark.parametrize("global_scale", [None, 1.0, 0.37, 2.0**-120])
def test_dequantize_every_code_and_scale(fmt, dtype, global_scale):
    weight = every_code_and_scale(fmt, DEVICE)
    global_scale = None if global_scale is None else torch.tensor(global_scale, device=DEVICE)
    weight = weight._replace(global_scale=global_scale)
    assert differing(dequantize(weight, dtype), reference.dequantize(weight, dtype)) == 0


@both_formats
@every_dtype
@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (31, 288), (2, 17, 160), (2, 3, 5, 32), (0, 64), (3, 0, 64)])
def test_dequantize_shapes(fmt, dtype, shape):
    """Rows and blocks that do not fill a tile; stacks, where each matrix has its own tensor scale."""
    weight = weight_of(*shape, fmt=fmt)
    got = dequantize(weight, dtype)
    assert got.shape == torch.Size(shape)
    assert differing(got, reference.dequantize(weight, dtype)) == 0


@both_formats
def test_dequantize_views(fmt):
    """Rows and columns cut out of a weight, as the gradient does."""
    whole = weight_of(40, 192, fmt=fmt)
    for rows, columns in ((slice(3, 20), slice(64, 160)), (slice(0, 40, 2), slice(0, 192))):
        byte, block = (slice(columns.start // d, columns.stop // d) for d in (2, fmt.block_size))
        part = QuantizedTensor(whole.packed[rows, byte], whole.scale[rows, block], whole.global_scale, fmt)
        expected = reference.dequantize(whole, torch.float32)[rows, columns]
        assert differing(dequantize(part, torch.float32), expected) == 0


@every_dtype
@pytest.mark.parametrize("global_scale", [None, 0.37])
def test_dequantize_every_scale_with_macro_factors(dtype, global_scale):
    weight = every_code_and_scale(MXFP4, DEVICE, macro=True)
    assert len(weight.macro.unique()) == 256
    weight = weight._replace(global_scale=None if global_scale is None else torch.tensor(global_scale, device=DEVICE))
    assert differing(dequantize(weight, dtype), reference.dequantize(weight, dtype)) == 0


@pytest.mark.parametrize("fmt, macro", [(MXFP4, False), (MXFP4, True), (NVFP4, False)])
@every_dtype
def test_products_decode_every_code_and_scale(fmt, macro, dtype):
    """x the identity: out comes the decoded weight, so the kernels' own decoding is right for every scale."""
    weight = every_code_and_scale(fmt, DEVICE, macro)
    finite = reference.dequantize(weight, torch.float32).isfinite().all(-1)  # 0 * inf is NaN in a sum
    assert int(finite.sum()) == (252 if macro else 253 if fmt is MXFP4 else 254)
    weight = weight._replace(packed=weight.packed[finite], scale=weight.scale[finite])
    weight = weight._replace(macro=weight.macro[finite]) if macro else weight
    n, k = weight.shape
    dense = (reference.dequantize(weight, torch.float32) + 0).to(dtype)  # a sum that starts at +0 is never -0
    assert differing(gemm.linear(torch.eye(k, dtype=dtype, device=DEVICE), weight).T, dense) == 0
    assert differing(gemm_grad.linear_grad(torch.eye(n, dtype=dtype, device=DEVICE), weight), dense) == 0


@both_formats
def test_nan_and_infinite_scales(fmt):
    """A block whose scale is NaN (or too large) spoils its own row of the weight and nothing else."""
    weight = weight_of(3, 64, fmt=fmt)
    weight.scale.view(torch.uint8)[1, 0] = 255
    y = gemm.linear(torch.randn(2, 64, device=DEVICE), weight)
    assert y.isnan().all(0).tolist() == [False, True, False] and not y[:, [0, 2]].isnan().any()
    gradient = gemm_grad.linear_grad(torch.ones(2, 3, device=DEVICE), weight)
    assert gradient[:, : fmt.block_size].isnan().all() and not gradient[:, fmt.block_size :].isnan().any()


@both_formats
@pytest.mark.parametrize("k", [32, 96, 288])
@pytest.mark.parametrize("n", [1, 31, 33])
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_linear_sizes(fmt, tokens, n, k):
    weight, bias = weight_of(n, k, fmt=fmt), torch.randn(n, device=DEVICE)
    dense = reference.dequantize(weight, torch.float64)
    x = torch.randn(tokens, k, device=DEVICE)
    assert error_ratio(gemm.linear(x, weight), x, dense.T) <= 1
    y = gemm.linear(x, weight, bias)
    assert error_ratio(y, x, dense.T, bias) <= 1
    assert error_ratio(gemm_grad.linear_grad(y, weight), y, dense) <= 1


@both_formats
@every_dtype
@pytest.mark.parametrize("tokens", [5, 30, 60, 150])
def test_linear_dtypes(fmt, dtype, tokens):
    """Every tile size, more than one of each; a bias of another dtype."""
    weight, bias = weight_of(140, 160, fmt=fmt), torch.randn(140, device=DEVICE)
    dense = reference.dequantize(weight, torch.float64)
    x = torch.randn(tokens, 160, device=DEVICE).to(dtype)
    y = gemm.linear(x, weight, bias)
    assert error_ratio(y, x, dense.T, bias) <= 1
    assert error_ratio(gemm_grad.linear_grad(y, weight), y, dense) <= 1


@both_formats
def test_linear_strides(fmt):
    """Rows apart, columns apart, rows all the same: no view of x is read wrongly."""
    weight = weight_of(20, 64, fmt=fmt)
    base = torch.randn(80, 130, device=DEVICE)
    for x in (base[:9, :64], base[::7, 3:67], base.T[:9, :64], base[:9, :128:2], base[0, :64].expand(9, 64)):
        y = gemm.linear(x, weight)
        assert torch.equal(y, gemm.linear(x.contiguous(), weight))
        assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T) <= 1


@both_formats
def test_weight_strides(fmt):
    """Every other expert of a stack, tensors that are not dense along K, offsets and scales out of a larger tensor."""
    stack = weight_of(6, 20, 128, fmt=fmt)
    global_scale = torch.rand(6, 3, device=DEVICE)[::2, 1]
    apart = [t[::2].view(torch.uint8) for t in stack[:2]]
    turned = [t.mT.contiguous().mT for t in apart]
    offsets = torch.tensor([[0, 0], [3, 0], [3, 0], [8, 0]], dtype=torch.int32, device=DEVICE)[:, 0]
    x = torch.randn(9, 128, device=DEVICE)
    for packed, scale in (apart, turned):
        weight = QuantizedTensor(packed, fmt.scale_from_bytes(scale), global_scale, fmt)
        dense = reference.dequantize(weight, torch.float32)
        assert differing(dequantize(weight, torch.float32), dense) == 0
        y = gemm.linear(x, weight, None, offsets)
        assert error_ratio(y[3:8], x[3:8], dense[2].T) <= 1
        assert error_ratio(gemm.linear(x, weight.matrix(1)), x, dense[1].T) <= 1


@both_formats
def test_float16_within_range(fmt):
    """Products of weights beyond float16 with tiny activations are right where the result fits."""
    weight = weight_of(16, 64, fmt=fmt)
    weight.scale.view(torch.uint8).fill_(127 + 20 if fmt is MXFP4 else 126)
    x = torch.full((3, 64), 2.0**-24, dtype=torch.float16, device=DEVICE)  # its smallest subnormal
    y = gemm.linear(x, weight)
    assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T) <= 1
    assert y.abs().max() > (0 if fmt is NVFP4 else 1)


@triton.jit
def two_terms_kernel(x, high, low, size, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    terms = decode.two_terms(tl.load(x + index, mask=index < size))
    tl.store(high + index, terms[0], mask=index < size)
    tl.store(low + index, terms[1], mask=index < size)


def test_two_terms():
    """Every float16, and every code times every macro factor at any scale, is the sum of two bfloat16 numbers."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)
    factors = 1 + torch.arange(256) / 256
    weights = torch.tensor(E2M1_VALUES)[:, None] * factors
    scales = 2.0 ** torch.tensor([-124.0, -60, 0, 60, 124])
    x = torch.cat((halves[~halves.isnan()], (weights[..., None] * scales).flatten())).to(DEVICE)
    high, low = torch.empty_like(x), torch.empty_like(x)
    two_terms_kernel[triton.cdiv(len(x), 4096),](x, high, low, len(x), SIZE=4096)
    assert torch.equal(high + low, x) and x.isinf().sum() == 2
    for term in (high, low):
        assert torch.equal(term.to(torch.bfloat16).to(torch.float32), term)


GROUPS = {
    "an expert without tokens": ([0, 3, 3, 9], 9),
    "rows of no expert at both ends": ([2, 3, 20, 21], 24),
    "no tokens at all": ([0, 0, 0, 0], 0),
    "only rows of no expert": ([4, 4, 4, 4], 7),
    "more than a tile each, at odd places": ([1, 38, 57, 100], 103),
    "many experts, few tokens": ([0, *range(7), 7, 7], 7),
}


@both_formats
@pytest.mark.parametrize("case", GROUPS)
def test_grouped(fmt, case):
    bounds, tokens = GROUPS[case]
    experts = len(bounds) - 1
    weight, bias = weight_of(experts, 33, 96, fmt=fmt), torch.randn(experts, 33, device=DEVICE)
    x, offsets = torch.randn(tokens, 96, device=DEVICE), torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    y, plain = gemm.linear(x, weight, bias, offsets), gemm.linear(x, weight, None, offsets)
    gradient = gemm_grad.linear_grad(y, weight, offsets)
    owner = torch.full((tokens,), -1)
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        owner[start:end] = e
        dense, rows = reference.dequantize(weight.matrix(e), torch.float64), slice(start, end)
        assert error_ratio(y[rows], x[rows], dense.T, bias[e]) <= 1
        assert error_ratio(plain[rows], x[rows], dense.T) <= 1
        assert error_ratio(gradient[rows], y[rows], dense) <= 1
    for result in (y, plain, gradient):
        assert not result[(owner == -1).to(DEVICE)].any()  # zeros, though conftest poisons memory


@both_formats
@every_dtype
def test_grouped_equals_linear(fmt, dtype):
    """Each expert's rows are those of a linear layer of its own, whatever stands beside them."""
    weight = weight_of(4, 20, 64, fmt=fmt)
    bounds = [0, 5, 5, 16, 20]
    x = torch.randn(20, 64, device=DEVICE).to(dtype)
    y = gemm.linear(x, weight, None, torch.tensor(bounds, dtype=torch.int32, device=DEVICE))
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start < end:
            assert torch.equal(y[start:end], gemm.linear(x[start:end], weight.matrix(e)))


def test_grouped_offsets_past_the_end():
    """Wrong offsets may give wrong rows but never touch memory outside x and the result."""
    weight = weight_of(2, 16, 32, fmt=MXFP4)
    x = torch.randn(5, 32, device=DEVICE)
    for bounds in ([0, 3, 400], [-50, 2, 5], [4, 2, 5]):
        y = gemm.linear(x, weight, None, torch.tensor(bounds, dtype=torch.int32, device=DEVICE))
        assert y.shape == (5, 16) and y.isfinite().all()


@both_formats
def test_rows_do_not_see_each_other(fmt):
    weight = weight_of(24, 96, fmt=fmt)
    x = torch.randn(6, 96, device=DEVICE)
    other = x.clone()
    other[[0, 1, 2, 4, 5]] = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 0.0], device=DEVICE)[:, None]
    assert torch.equal(gemm.linear(x, weight)[3], gemm.linear(other, weight)[3])


# --- macro factors and outliers --------------------------------------------------------------------------------------


def corrected(*shape, fmt, **added) -> QuantizedTensor:
    return random_weight(*shape, fmt=fmt, device=DEVICE, **(added or [*corrections(fmt).values()][-1]))


@pytest.mark.parametrize("fmt, name", [(fmt, name) for fmt in FORMATS.values() for name in corrections(fmt)])
@every_dtype
@pytest.mark.parametrize("tokens, n, k", [(1, 3, 160), (20, 9, 96)])
def test_corrected_products(fmt, name, dtype, tokens, n, k):
    """More than one tile of tokens, K not a multiple of 128; x with any strides."""
    weight = random_weight(n, k, fmt=fmt, device=DEVICE, **corrections(fmt)[name])
    dense, bias = reference.dequantize(weight, torch.float64), torch.randn(n, device=DEVICE)
    x = torch.randn(k, tokens, device=DEVICE).to(dtype).T
    y = gemm.linear(x, weight, bias)
    assert error_ratio(y, x, dense.T, bias) <= 1
    if tokens == 1:
        assert error_ratio(gemm_grad.linear_grad(y, weight), y, dense) <= 1


@both_formats
def test_corrected_parts(fmt):
    """A column chunk of some rows, as the gradient cuts them: outliers and their columns stay those of the matrix."""
    whole = corrected(9, 320, fmt=fmt)
    dense = reference.dequantize(whole, torch.float32)
    for first, last in ((0, 128), (128, 320), (256, 320)):
        part = dispatch._columns(whole.rows(slice(2, 8)), slice(first, last))
        assert differing(dequantize(part, torch.float32, first), dense[2:8, first:last]) == 0


@both_formats
def test_outliers_are_rounded_with_the_rest(fmt):
    """An outlier and a bias that all but cancel the dense sum leave what float32 holds, not what bfloat16 does."""
    weight = random_weight(1, 32, fmt=fmt, device=DEVICE)
    weight.packed.fill_(0x22)
    weight = with_outliers(weight, torch.eye(1, 32, device=DEVICE).bool())
    rest = reference.dequantize(weight, torch.float32)[:, 1:].sum()
    weight.outliers.values[0] = -rest  # in bfloat16
    bias = -rest.view(1) / 8192
    x = torch.ones(1, 32, dtype=torch.bfloat16, device=DEVICE)
    y = gemm.linear(x, weight, bias)
    assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T, bias) <= 1


@both_formats
def test_tokens_in_parts(fmt, monkeypatch):
    """What outliers add is held in float32 for a limited number of tokens at once."""
    weight, x, bias = corrected(4, 32, fmt=fmt), torch.randn(9, 32, device=DEVICE), torch.randn(4, device=DEVICE)
    whole = gemm.linear(x, weight, bias)
    gradient = gemm_grad.linear_grad(whole, weight)
    monkeypatch.setattr(outliers, "TOKENS", 4)
    # Not bit for bit: the interpreter's products are numpy's, whose sums depend on the CPU and on where a row starts.
    torch.testing.assert_close(gemm.linear(x, weight, bias), whole)
    torch.testing.assert_close(gemm_grad.linear_grad(whole, weight), gradient)


@pytest.mark.parametrize("k", [40_000, 65_568])
def test_large_columns(k):
    """uint16 columns above 32767 are not taken for negative ones, nor int32 columns above 65535 cut."""
    mask = torch.zeros(2, k, dtype=torch.bool, device=DEVICE)
    mask[0, [0, 32767, 32768, k - 1]] = True
    weight = with_outliers(random_weight(2, k, fmt=MXFP4, device=DEVICE), mask)
    assert weight.outliers.columns.dtype == (torch.uint16 if k < 65536 else torch.int32)
    dense, got = torch.zeros(2, 2, k, device=DEVICE)
    reference.scatter_outliers(dense, weight.outliers)
    outliers.scatter(got, weight.outliers)
    assert differing(got, dense) == 0 and int((got != 0).sum()) == 4
    x = torch.randn(3, k, device=DEVICE)
    assert error_ratio(outliers.outlier_product(x, weight, None, False, 16).T, x, dense.T) <= 1


@pytest.mark.parametrize("k", [96, 40_000])
def test_transposed(k):
    """The gradient's outliers are those of W.T, rows rising within a column, from a part of the entries as well."""
    mask = torch.rand(3, 7, k, device=DEVICE) < 0.05
    mask[0, 3] = mask[2, 6] = False
    weight = with_outliers(random_weight(3, 7, k, fmt=MXFP4, device=DEVICE), mask)
    dense = torch.zeros(3, 7, k, device=DEVICE)
    reference.scatter_outliers(dense.view(21, k), weight.outliers)
    parts = (weight, dense), (weight.matrix(1), dense[1:2]), (weight.matrix(2).rows(slice(1, 4)), dense[2:, 1:4])
    for part, own in parts:
        experts, n, _ = own.shape
        turned = outliers.transposed(part.outliers, n, k, experts)
        assert turned.offsets.shape == (experts * k + 1,) and turned.offsets[-1] == int((own != 0).sum())
        got = torch.zeros(experts * k, n, device=DEVICE)
        reference.scatter_outliers(got, turned)
        assert torch.equal(got.view(experts, k, n), own.mT)
        row, entries = reference.outlier_rows(turned)
        place = row * n + turned.columns[entries]
        assert bool((place.diff() > 0).all())


def test_operators_reach_the_kernels():
    """`backend="triton"` runs the same code as the launchers, through the operators."""
    weight = weight_of(33, 96, fmt=NVFP4)
    x, bias = torch.randn(2, 3, 96, device=DEVICE), torch.randn(33, device=DEVICE)
    assert torch.equal(
        ops.linear(x, weight, bias, backend="triton"), gemm.linear(x.view(6, 96), weight, bias).view(2, 3, 33)
    )
    assert torch.equal(ops.dequantize(weight, backend="triton"), reference.dequantize(weight))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tries the script without a GPU")
def test_gpu_check(monkeypatch, tmp_path, capsys):
    """scripts/gpu_check.py on tiny sizes; among its checks, `opcheck` of the operators with kernels inside."""
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--interpret", "--json", str(tmp_path / "result.json")])
    assert gpu_check.main() == 0
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["triton"] and len(report["checks"]) > 100 and all(check["passed"] for check in report["checks"])
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tries the script without a GPU")
@pytest.mark.parametrize("error", [float("nan"), float("inf"), 1.01, None])
def test_gpu_check_fails(monkeypatch, capsys, error):
    """A wrong result, NaN or an exception gives exit status 1."""

    def broken(fmt, device, big):
        if error is None:
            raise ZeroDivisionError
        yield gpu_check.Check("broken", error)

    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--interpret"])
    monkeypatch.setattr(gpu_check, "CHECKS", (broken,))
    assert gpu_check.main() == 1
    assert capsys.readouterr().out.count("FAIL") == len(FORMATS)
