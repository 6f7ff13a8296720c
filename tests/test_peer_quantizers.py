# SPDX-License-Identifier: Apache-2.0
"""scripts/peers.py: the quantizers of other projects against our rules of the same definition, differences by name."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import peers
from hf_mxfp4.formats import FORMATS
from hf_mxfp4.reference import dequantize, quantize

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between two E2M1 values
every_peer = pytest.mark.parametrize("name", [peer.name for peer in peers.KNOWN])


def installed(name: str) -> peers.Peer:
    if name not in peers.PEERS:
        pytest.skip(f"the package of {name} is not installed")
    return peers.PEERS[name]


@pytest.fixture(scope="module")
def weights(minilm) -> list[torch.Tensor]:
    """A float32 layer of MiniLM: six matrices."""
    return [weight for name, weight in minilm.items() if ".layer.3." in name]


def blocks(weight: torch.Tensor, format: str) -> torch.Tensor:
    return weight.unflatten(-1, (-1, FORMATS[format].block_size))


def ours(weight: torch.Tensor, format: str, rule: str, dtype=torch.float32) -> torch.Tensor:
    return dequantize(quantize(weight, format, rule), dtype).float()


def error(weights, decode) -> float:
    """Squared error of all weights together."""
    return sum(float((decode(weight) - weight.float()).double().square().sum()) for weight in weights)


# --- every peer ------------------------------------------------------------------------------------------------------


def stored_bytes(stored) -> int:
    """Bytes of what a peer keeps, less a single value for a whole matrix."""
    if isinstance(stored, dict):  # compressed-tensors
        parts = [*stored.values()]
    elif isinstance(stored, tuple):  # bitsandbytes: codes, and maxima or the codes and maxima of maxima
        codes, state, _ = stored
        parts = [codes, state.absmax, *([state.state2.absmax] if state.nested else [])]
    elif hasattr(stored, "qdata"):  # torchao
        parts = [stored.qdata, stored.scale]
    elif hasattr(stored, "scale_factors"):  # fouroversix
        parts = [stored.values, stored.scale_factors]
    else:  # gguf
        parts = [stored]
    return sum(part.nbytes for part in parts if part.nbytes > 4)


@every_peer
def test_bits_are_what_is_stored(name):
    peer = installed(name)
    weight = torch.randn(128, 1024)
    assert 8 * stored_bytes(peer.quantize(weight)) / weight.numel() == peer.bits_per_weight


@every_peer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_matrix(name, dtype):
    """Rows and K that are no multiples of 64 or 128, other strides, every dtype."""
    peer = installed(name)
    weight = torch.randn(96, 50).to(dtype).T
    decoded = peer.dequantized(weight)
    assert decoded.shape == (50, 96) and decoded.dtype == torch.float32
    assert 0.003 < error([weight], peer.dequantized) / float(weight.double().square().sum()) < 0.03
    assert peer.version


def test_names_are_unique():
    names = {peer.name for peer in peers.KNOWN}
    assert len(names) == len(peers.KNOWN) and set(peers.PEERS) <= names


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def test_compressed_tensors_nvfp4_is_amax(weights):
    """Difference: the tensor scale may be one ulp off, which shows in scales near a tie (2 blocks in MiniLM)."""
    peer = installed("compressed-tensors nvfp4")
    different = sum(int((peer.dequantized(w) != ours(w, "nvfp4", "amax", torch.bfloat16)).sum()) for w in weights)
    assert different <= 16


def test_compressed_tensors_nvfp4_in_bfloat16(weights):
    """Difference: of bfloat16 weights they form tensor scale and block scales in bfloat16, which costs 0.08 %."""
    peer = installed("compressed-tensors nvfp4")
    weights = [weight.bfloat16() for weight in weights]
    ratio = error(weights, peer.dequantized) / error(weights, lambda w: ours(w, "nvfp4", "amax"))
    assert 1 < ratio < 1.002


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_mxfp4_is_overflow_aware(weights, dtype):
    """Difference: a block maximum of exactly 1.75 times a power of two, where two scales are equally near to it: they
    take the larger."""
    peer, on_the_edge = installed("compressed-tensors mxfp4"), 0
    for weight in weights:
        weight = weight.to(dtype)
        edge = blocks(weight.float(), "mxfp4").abs().amax(-1).frexp().mantissa == 1.75 / 2
        same = blocks(peer.dequantized(weight) == ours(weight, "mxfp4", "overflow_aware"), "mxfp4").all(-1)
        assert bool(same[~edge].all())
        on_the_edge += int((~same).sum())
    assert (on_the_edge > 0) == (dtype == torch.bfloat16)


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_mxfp4_is_amax(weights, dtype):
    """Difference: halfway between two values they take the smaller, we the even one."""
    peer = installed("gguf mxfp4")
    for weight in weights:
        weight = weight.to(dtype)
        theirs, expected = peer.dequantized(weight), ours(weight, "mxfp4", "amax")
        differ = theirs != expected
        scale = torch.exp2(blocks(weight.float(), "mxfp4").abs().amax(-1, keepdim=True).log2().floor() - 2)
        ratio = (blocks(weight.float(), "mxfp4") / scale).flatten(1).abs()[differ]
        assert bool(torch.isin(ratio, TIES).all())
        assert bool((theirs[differ].abs() < expected[differ].abs()).all())


@pytest.mark.parametrize(
    ("name", "rule", "dtype", "other_codes"),
    [
        ("torchao nvfp4", "amax", torch.float32, 1e-6),
        ("torchao nvfp4", "amax", torch.bfloat16, 1e-3),
        ("fouroversix nvfp4", "four_over_six", torch.float32, 1e-5),
        ("fouroversix nvfp4", "four_over_six", torch.bfloat16, 2e-3),
    ],
)
def test_nvfp4_in_other_orders_of_rounding(weights, name, rule, dtype, other_codes):
    """Difference: they multiply by reciprocals, so codes near a tie are one off. In bfloat16 weights ties are frequent
    (all of MiniLM: torchao 1 code in float32 and 3,119 in bfloat16, fouroversix 31 and 6,635, of 10,616,832)."""
    peer, count = installed(name), 0
    weights = [weight.to(dtype) for weight in weights]
    for weight in weights:
        theirs, expected = peer.dequantized(weight), ours(weight, "nvfp4", rule)
        count += int(((theirs - expected).abs() > 2**-20 * expected.abs()).sum())
    assert count <= other_codes * sum(weight.numel() for weight in weights)
    ratio = error(weights, peer.dequantized) / error(weights, lambda w: ours(w, "nvfp4", rule))
    assert ratio == pytest.approx(1, abs=1e-4)


def test_bitsandbytes_order(weights):
    """NF4 fits bell-shaped weights better than E2M1 on the same blocks; maxima in 8 bits cost a little."""
    names = ("bitsandbytes nf4", "bitsandbytes nf4 double", "bitsandbytes fp4")
    single, double, fp4 = (error(weights, installed(name).dequantized) for name in names)
    assert single < double < 1.01 * single < fp4


# --- speed -----------------------------------------------------------------------------------------------------------


def test_measurements_are_interleaved():
    calls = []
    quantizers = {name: lambda weight, name=name: calls.append((name, len(weight))) for name in "ab"}
    seconds = peers.cpu_seconds(quantizers, torch.zeros(128, 32), rounds=3)
    assert calls == [("a", 64), ("b", 64), *[("a", 128), ("b", 128)] * 3]
    assert list(seconds) == ["a", "b"] and min(seconds.values()) >= 0


def test_speed_report(tmp_path):
    installed(peers.BASELINE)
    app = typer.Typer()
    app.command()(peers.main)
    threads = torch.get_num_threads()
    try:
        arguments = ["--rows", "256", "--columns", "512", "--rounds", "1", "--output", str(tmp_path / "speed.json")]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "speed.json").read_text())
    rows = {row["name"]: row for row in report["results"]}
    assert set(rows) == {*peers.OURS, *peers.PEERS} and report["weight"]["bytes"] == 2 * 256 * 512
    assert rows[peers.BASELINE]["ratio"] == 1
    for name, row in rows.items():
        assert row["ratio"] == pytest.approx(rows[peers.BASELINE]["cpu_seconds"] / row["cpu_seconds"])
        assert name.split()[0] in result.output
    assert CliRunner().invoke(app, ["--columns", "100"]).exit_code == 2
