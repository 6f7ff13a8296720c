# SPDX-License-Identifier: Apache-2.0
"""The forward product's launch options, whatever they are: sums in parts, every tile, orders, what is chosen when."""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from exactness import corrections, differing, error_ratio, random_weight
from hf_mxfp4 import ops, reference
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4

pytest.importorskip("triton")

from hf_mxfp4.kernels import gemm, permuted, scratch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AMPERE, CDNA, RDNA = (permuted.Target(*t) for t in (("cuda", 80, 108), ("hip", "gfx942", 304), ("hip", "gfx1100", 96)))

# The interpreter's numpy warns of what is meant to happen: NaN and infinity in a product.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
both_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())


def options(tile_m=16, tile_n=64, tile_k=128, splits=1) -> dict[str, int]:
    shape = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "SPLITS": splits}
    return shape | {"num_warps": 4, "num_stages": 3}


def bf16(*shape) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


@both_formats
@pytest.mark.parametrize("tokens, tile_m", [(1, 16), (20, 16), (40, 32), (70, 64), (70, 128)])
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_and_parts(fmt, tokens, tile_m, splits):
    """More than one tile each way, parts of unequal length, the last step not full; a bias counts once."""
    weight, bias = random_weight(100, 544, fmt=fmt, device=DEVICE), torch.randn(100, device=DEVICE)
    x, dense = bf16(tokens, 544), reference.dequantize(weight, torch.float64)
    y = gemm.linear(x, weight, bias, options=options(tile_m, splits=splits))
    assert error_ratio(y, x, dense.T, bias) <= 1


def test_the_same_bits_each_time():
    weight, x = random_weight(100, 1088, fmt=MXFP4, device=DEVICE), bf16(3, 1088)
    first = gemm.linear(x, weight, options=options(splits=4))
    assert all(torch.equal(gemm.linear(x, weight, options=options(splits=4)), first) for _ in range(3))


@pytest.mark.parametrize("fmt, name", [(fmt, name) for fmt in FORMATS.values() for name in corrections(fmt)])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_corrections_in_parts(fmt, name, splits):
    """Macro factors within a part, outliers once."""
    weight = random_weight(40, 672, fmt=fmt, device=DEVICE, **corrections(fmt)[name])
    x, dense = bf16(18, 672), reference.dequantize(weight, torch.float64)
    assert error_ratio(gemm.linear(x, weight, options=options(splits=splits)), x, dense.T) <= 1


@both_formats
@pytest.mark.parametrize("order", [0, 2, 3])
def test_orders(fmt, order, monkeypatch):
    """Those of other GPUs than this one: slower at worst."""
    monkeypatch.setattr(permuted, "target", lambda device, f=permuted.target: f(device) | {"ORDER": order})
    weight, x = random_weight(70, 416, fmt=fmt, device=DEVICE), bf16(3, 416)
    y = gemm.linear(x, weight, options=options(tile_k=256))
    assert error_ratio(y, x, reference.dequantize(weight, torch.float64).T) <= 1


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_that_fold(fmt, dtype):
    """x the identity: all codes under all the scales of the fast loop, in bits; tests/test_kernels.py takes the rest.

    A tile with any other scale in it goes through the slow loop as a whole.
    """
    low, high = (96, 133) if fmt is MXFP4 else (0, 0x7F)
    low = 0 if fmt is MXFP4 and dtype != torch.float16 else low
    weight = random_weight(high - low, 128, fmt=fmt, device=DEVICE)
    weight.scale.view(torch.uint8).copy_(torch.arange(low, high)[:, None])
    weight.packed.copy_(torch.arange(64) * 41 % 256)  # codes of every kind in each block of 32
    weight = weight._replace(global_scale=None)
    y = gemm.linear(torch.eye(128, dtype=dtype, device=DEVICE), weight)
    assert differing(y.T, (reference.dequantize(weight, torch.float32) + 0).to(dtype)) == 0


@pytest.mark.parametrize("byte", [134, 252, 255])
def test_scales_that_do_not_fold(byte):
    """A tile with a scale beyond the fast loop is right too, and leaves NaN and infinity to the rows they are in."""
    weight = random_weight(70, 160, fmt=MXFP4, device=DEVICE)
    weight.scale[67, 2] = byte
    x = bf16(5, 160) * 2.0**-30
    y = gemm.linear(x, weight, options=options(splits=2))
    dense = reference.dequantize(weight, torch.float64)
    finite = dense.isfinite().all(1)
    assert finite.tolist() == [row != 67 or byte != 255 for row in range(70)]
    assert error_ratio(y[:, finite], x, dense[finite].T) <= 1
    assert y[:, ~finite].isnan().all()


@both_formats
def test_what_x_brings(fmt):
    """NaN and infinity of a token come out as in float32, next to tokens that are none the wiser."""
    weight, x = random_weight(70, 160, fmt=fmt, device=DEVICE), bf16(5, 160)
    clean = gemm.linear(x, weight)
    x[1, 7], x[3, 100] = float("nan"), float("inf")
    y, expected = gemm.linear(x, weight), reference.linear(x.to(torch.float32), weight)
    assert y[1].isnan().all() and torch.equal(y[3].isnan(), expected[3].isnan()) and not y[3].isfinite().any()
    assert error_ratio(y[[0, 2, 4]], x[[0, 2, 4]], reference.dequantize(weight, torch.float64).T) <= 1
    torch.testing.assert_close(y[[0, 2, 4]], clean[[0, 2, 4]])


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [permuted.HOPPER, AMPERE, CDNA, RDNA], ids=lambda device: str(device.arch))
@pytest.mark.parametrize("macro", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_fit(device, macro, dtype):
    """A step of 128 at least (with macro factors exactly), no empty parts, the heuristic's choice first."""
    for tokens, n, k, experts in ((1, 4096, 4096, 1), (17, 256, 2048, 1), (700, 11008, 64, 1), (64, 1536, 2048, 128)):
        found = gemm.candidates(dtype, tokens, n, k, experts, macro, device)
        assert found[0] == gemm.tile(dtype, tokens, n, k, experts, macro, device)
        for choice in found:
            steps = -(-k // choice["TILE_K"])
            assert choice["TILE_K"] == 128 or (choice["TILE_K"] % 128 == 0 and not macro)
            assert 1 <= choice["SPLITS"] <= (1 if experts > 1 else max(1, steps // 2))
            assert found.count(choice) == 1


def test_parts_fill_the_device():
    """Two programs for each of 132 processors where the sum is long enough, no parts where tiles are many."""
    for n, k, splits in ((12288, 4096, 3), (4096, 4096, 8), (2048, 2048, 8), (1024, 4096, 16), (65536, 4096, 1)):
        assert gemm.tile(torch.bfloat16, 1, n, k)["SPLITS"] == splits
    assert gemm.tile(torch.bfloat16, 512, 4096, 4096)["SPLITS"] == 1


# --- counters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch):
    """`scratch` on a device that is no device: a capture that is on or off, and a stream."""
    state = SimpleNamespace(capturing=False, stream=1, makers=[])

    def zeros(size, dtype, device):
        state.makers.append(threading.get_ident())
        return torch.zeros(size, dtype=dtype)

    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: state.capturing,
        current_stream=lambda device: SimpleNamespace(cuda_stream=state.stream),
        stream=lambda stream: contextlib.nullcontext(),
    )
    made = SimpleNamespace(cuda=cuda, float32=torch.float32, int32=torch.int32, Tensor=torch.Tensor, zeros=zeros)
    made.empty = lambda size, dtype, device: torch.empty(size, dtype=dtype)
    monkeypatch.setattr(scratch, "torch", made)
    for name, empty in (("_eager", {}), ("_slabs", {}), ("_used_up", [])):
        monkeypatch.setattr(scratch, name, empty)
    return state


def counters(tiles: int) -> torch.Tensor:
    workspace, found = scratch.split_scratch(SimpleNamespace(type="cuda", index=0), tiles, 4)
    assert workspace.numel() == 4 and found.numel() >= tiles and not found.any()
    return found


def test_counters_of_a_stream(fake_cuda):
    """One after another on a stream share them, streams do not, and more tiles get more."""
    first = counters(10)
    assert counters(20).data_ptr() == first.data_ptr()
    fake_cuda.stream = 2
    assert counters(10).data_ptr() != first.data_ptr()
    assert counters(10_000).numel() >= 10_000
    assert len(fake_cuda.makers) == 4 and threading.get_ident() not in fake_cuda.makers  # see `lasting_zeros`


def test_counters_of_graphs(fake_cuda):
    """Each launch in a capture has its own for good, and none of those that launches outside use."""
    eager = counters(10)
    fake_cuda.capturing = True
    taken = [counters(1000) for _ in range(3)]
    places = sorted(c.data_ptr() for c in taken)
    assert all(b - a >= 4000 for a, b in zip(places, places[1:], strict=False))
    slab = scratch._slabs[0]
    assert slab.numel() == scratch.COUNTERS - 3000
    assert eager.data_ptr() not in range(places[0], places[-1] + 4000)
    assert counters(scratch.COUNTERS).numel() == scratch.COUNTERS  # zeroed in the graph itself
    assert scratch._slabs[0] is slab
    assert fake_cuda.makers[-1] == threading.get_ident()  # from the graph's memory, freed with it
    scratch._slabs[0] = slab[:5]
    fake_cuda.capturing = False
    counters(10)
    assert scratch._slabs[0].numel() == scratch.COUNTERS
    kept = weakref.ref(slab.untyped_storage())
    del slab, taken
    assert kept() is not None  # graphs still count in it


@pytest.mark.gpu
def test_graphs_and_streams():
    """Two graphs and two streams at once, sums in parts: the same bits as one after another."""
    weight, x = random_weight(1024, 4096, fmt=NVFP4, device=DEVICE), bf16(4, 4096)
    expected = gemm.linear(x, weight)
    assert gemm.tile(x.dtype, 4, 1024, 4096)["SPLITS"] > 1
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(gemm.linear(x, weight))
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                outs.append(gemm.linear(x, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
def test_graphs_of_inductor(monkeypatch):
    """The warm-up of its CUDA graphs is the first launch there is: nothing of it may stay in their memory."""
    weight, x = random_weight(1024, 4096, fmt=NVFP4, device=DEVICE), bf16(4, 4096)
    expected = gemm.linear(x, weight)
    for name in ("_eager", "_slabs"):
        monkeypatch.setattr(scratch, name, {})
    compiled = torch.compile(lambda x: ops.linear(x, weight, backend="triton"), mode="reduce-overhead")
    with torch.no_grad():
        assert all(torch.equal(compiled(x), expected) for _ in range(4))
    assert scratch._slabs[DEVICE.index or 0].numel() < scratch.COUNTERS  # captured
