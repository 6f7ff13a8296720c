# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the reference: on the GPU if there is one, else in Triton's interpreter.

The interpreter gets bfloat16 arithmetic wrong, so there the kernels compute in float32 and only the rounding of the
result is to bfloat16 (kernels/decode.py); what the GPU does instead is checked by scripts/gpu_check.py.
"""

import json

import pytest
import torch

import gpu_check
from gpu_check import differing, error_ratio, every_code_and_scale, random_weight
from hf_mxfp4 import ops, reference
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, QuantizedTensor

pytest.importorskip("triton")

from hf_mxfp4.kernels import gemm
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


def expert(weight: QuantizedTensor, e: int) -> QuantizedTensor:
    return QuantizedTensor(*(None if t is None else t[e] for t in weight[:3]), weight.format)


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


@both_formats
@every_dtype
def test_products_decode_every_code_and_scale(fmt, dtype):
    """x the identity: out comes the decoded weight, so the kernels' own decoding is right for every scale."""
    weight = every_code_and_scale(fmt, DEVICE)
    finite = reference.dequantize(weight, torch.float32).isfinite().all(-1)  # 0 * inf is NaN in a sum
    assert int(finite.sum()) == (253 if fmt is MXFP4 else 254)
    weight = QuantizedTensor(weight.packed[finite], weight.scale[finite], weight.global_scale, fmt)
    n, k = weight.shape
    dense = (reference.dequantize(weight, torch.float32) + 0).to(dtype)  # a sum that starts at +0 is never -0
    assert differing(gemm.linear(torch.eye(k, dtype=dtype, device=DEVICE), weight).T, dense) == 0
    assert differing(gemm.linear_grad(torch.eye(n, dtype=dtype, device=DEVICE), weight), dense) == 0


@both_formats
def test_nan_and_infinite_scales(fmt):
    """A block whose scale is NaN (or too large) spoils its own row of the weight and nothing else."""
    weight = weight_of(3, 64, fmt=fmt)
    weight.scale.view(torch.uint8)[1, 0] = 255
    y = gemm.linear(torch.randn(2, 64, device=DEVICE), weight)
    assert y.isnan().all(0).tolist() == [False, True, False] and not y[:, [0, 2]].isnan().any()
    gradient = gemm.linear_grad(torch.ones(2, 3, device=DEVICE), weight)
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
    assert error_ratio(gemm.linear_grad(y, weight), y, dense) <= 1


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
    assert error_ratio(gemm.linear_grad(y, weight), y, dense) <= 1


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
        assert error_ratio(gemm.linear(x, expert(weight, 1)), x, dense[1].T) <= 1


@both_formats
def test_float16_within_range(fmt):
    """Products of weights beyond float16 with tiny activations are right where the result fits."""
    weight = weight_of(16, 64, fmt=fmt)
    weight.scale.view(torch.uint8).fill_(127 + 20 if fmt is MXFP4 else 126)
    x = torch.full((3, 64), 2.0**-24, dtype=torch.float16, device=DEVICE)  # its smallest subnormal
    y = gemm.linear(x, weight)
    assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T) <= 1
    assert y.abs().max() > (0 if fmt is NVFP4 else 1)


def test_float16_is_two_bfloat16():
    """What `add_product` relies on with E8M0 scales: every float16 is the sum of two bfloat16 numbers."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)
    x = x[x.isfinite()]
    high = x.to(torch.bfloat16).to(torch.float32)
    low = (x - high).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(high + low, x) and x.numel() == 2 * (2**15 - 2**10)


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
    gradient = gemm.linear_grad(y, weight, offsets)
    owner = torch.full((tokens,), -1)
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        owner[start:end] = e
        dense, rows = reference.dequantize(expert(weight, e), torch.float64), slice(start, end)
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
            assert torch.equal(y[start:end], gemm.linear(x[start:end], expert(weight, e)))


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
