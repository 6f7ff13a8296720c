# SPDX-License-Identifier: Apache-2.0
"""Products and decoding in C on CPUs: every instruction set that this machine has, against the reference."""

import importlib.machinery
import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exactness import corrections, differing, error_ratio, every_code_and_scale, random_weight, with_outliers
from hf_mxfp4 import dispatch, doctor, ops, reference
from hf_mxfp4.cli import app
from hf_mxfp4.formats import FORMATS, MXFP4, NVFP4, Outliers, QuantizedTensor
from hf_mxfp4.kernels import cpu, tuning

NAMES = [name for name, usable in cpu.paths().items() if usable]
CASES = {f"{fmt.name} {name}": (fmt, added) for fmt in FORMATS.values() for name, added in corrections(fmt).items()}
EVERYTHING = ("mxfp4 macro and outliers", "nvfp4 outliers")
DTYPES = tuple(cpu.TYPES)

needs_c = pytest.mark.skipif(not NAMES, reason=f"the C extension is not built: {cpu.why_not()}")
every_path = pytest.mark.parametrize("name", NAMES)
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weight_of(*shape: int, case: str) -> QuantizedTensor:
    fmt, added = CASES[case]
    return random_weight(*shape, fmt=fmt, device="cpu", **added)


def exact(weight: QuantizedTensor) -> torch.Tensor:
    return reference.dequantize(weight, torch.float64)


# --- decoding --------------------------------------------------------------------------------------------------------


@needs_c
@every_path
@every_dtype
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_every_code_and_scale(fmt, dtype, name):
    """Bit for bit the reference, subnormal numbers, infinities and NaN included, whether threads flush or not."""
    for macro in (False,) if fmt.has_global_scale else (False, True):
        weight = every_code_and_scale(fmt, "cpu", macro)
        for scale in (None, 0.25, 0.37, 2.0**-100, 2.0**-120, 2.0**120):
            weight = weight._replace(global_scale=None if scale is None else torch.tensor(scale))
            expected = reference.dequantize(weight, dtype)
            assert differing(cpu.dequantize(weight, dtype, name=name), expected) == 0
            try:
                torch.set_flush_denormal(True)
                assert differing(cpu.dequantize(weight, dtype, name=name), expected) == 0
            finally:
                torch.set_flush_denormal(False)


@needs_c
@every_path
@every_case
@pytest.mark.parametrize("shape", [(3, 32), (5, 2080), (2, 3, 160), (1, 2, 2, 96), (0, 64), (64,)], ids=str)
def test_dequantize(case, name, shape):
    """Stacks, a single row, rows longer than one part, a half last part."""
    if len(shape) == 1:
        weight = weight_of(1, *shape, case=case)
        parts = {part: getattr(weight, part) for part in ("packed", "scale", "macro")}
        weight = weight._replace(**{part: None if t is None else t[0] for part, t in parts.items()})
    else:
        weight = weight_of(*shape, case=case if shape[0] else case.split()[0] + " plain")
    for dtype in DTYPES:
        assert differing(cpu.dequantize(weight, dtype, name=name), reference.dequantize(weight, dtype)) == 0


@needs_c
@every_path
def test_half_a_part(name):
    """16 columns, and 48: a block of NVFP4 without a mate."""
    for k in (16, 48, 2064):
        weight = random_weight(3, k, fmt=NVFP4, device="cpu")
        x = torch.randn(9, k)
        for dtype in DTYPES:
            assert differing(cpu.dequantize(weight, dtype, name=name), reference.dequantize(weight, dtype)) == 0
            y = cpu.linear(x.to(dtype), weight, name=name)
            assert error_ratio(y, x.to(dtype), exact(weight).T) <= 1


# --- products --------------------------------------------------------------------------------------------------------


@needs_c
@every_path
@every_case
@every_dtype
def test_linear(case, dtype, name):
    """Every number of tokens a tile may have, and more; rows and columns that fill no tile."""
    for n, k in ((1, 32), (17, 96), (35, 1184), (3, 4128)):
        weight, bias = weight_of(n, k, case=case), torch.randn(n)
        for tokens in (1, 2, 3, 7, 21):
            x = torch.randn(tokens, k).to(dtype)
            assert error_ratio(cpu.linear(x, weight, None, name), x, exact(weight).T) <= 1
            for bias_dtype in (*DTYPES, torch.float64):
                b = bias.to(bias_dtype)
                assert error_ratio(cpu.linear(x, weight, b, name), x, exact(weight).T, b) <= 1


@needs_c
@every_path
@every_dtype
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_every_weight_in_a_product(fmt, dtype, name):
    """An identity matrix brings every weight out of the product, in its place."""
    weight = every_code_and_scale(fmt, "cpu", macro=not fmt.has_global_scale)
    dense = reference.dequantize(weight, torch.float32)
    rows = dense.isfinite().all(-1)
    y = cpu.linear(torch.eye(dense.shape[1], dtype=dtype), weight, name=name)
    expected = dense.to(dtype).T + 0  # sums have no -0
    assert torch.equal(y[:, rows], expected[:, rows])
    assert y[:, dense.isnan().any(-1)].isnan().all()


@needs_c
@every_path
@pytest.mark.parametrize("size", [2.0**-133, 2.0**-126, 2.0**-101, 2.0**101, 2.0**124])
def test_extreme_inputs(size, name):
    """bfloat16 from the smallest subnormal number to where unscaled sums overflow; other rows are as they were."""
    weight = random_weight(20, 576, fmt=MXFP4, device="cpu")
    weight.scale[:] = 127 + (90 if size < 1 else -90)
    x = torch.randn(5, 576).to(torch.bfloat16)
    usual = cpu.linear(x, weight, name=name)
    x[1:3] = size * torch.randint(-1, 2, (2, 576))
    y = cpu.linear(x, weight, name=name)
    assert error_ratio(y, x, exact(weight).T) <= 1
    assert torch.equal(y[[0, 3, 4]], usual[[0, 3, 4]]) and y[1:3].any()


@needs_c
@every_path
def test_nan_and_infinity(name):
    weight = random_weight(20, 96, fmt=NVFP4, device="cpu")
    x = torch.randn(6, 96).to(torch.bfloat16)
    usual = cpu.linear(x, weight, name=name)
    x[1, 5], x[4, 7] = float("nan"), float("inf")
    y = cpu.linear(x, weight, name=name)
    assert y[1].isnan().all() and not y[4].isfinite().any()
    assert torch.equal(y[[0, 2, 3, 5]], usual[[0, 2, 3, 5]])


@needs_c
@every_path
@every_dtype
def test_x_is_not_rounded(dtype, name):
    """float32 and float16 keep all their bits: 1 + 2^-10 would be 1 in bfloat16."""
    weight = random_weight(4, 32, fmt=MXFP4, device="cpu")._replace(
        packed=torch.full((4, 16), 0x22, dtype=torch.uint8)
    )
    weight.scale[:] = 127
    x = torch.zeros(2, 32, dtype=dtype)
    x[:, 3], x[:, 9] = 1 + 2.0**-10, -1
    assert torch.equal(cpu.linear(x, weight, name=name), (x[:, 3] - 1)[:, None].expand(2, 4))


@needs_c
@every_path
@pytest.mark.parametrize("case", EVERYTHING)
def test_parts_and_strides(case, name):
    """Rows of a matrix, one of a stack, and tensors that are not dense."""
    stack = weight_of(2, 40, 160, case=case)
    weight = stack.matrix(1).rows(slice(3, 30))
    dense, base = exact(stack)[1, 3:30], torch.randn(330, 340)
    wide = torch.zeros(27, 200, dtype=torch.uint8)
    wide[:, 40:120] = weight.packed
    values, columns, offsets = weight.outliers
    apart = Outliers(values.repeat_interleave(2)[::2], columns.int(), offsets)
    for part in (weight, weight._replace(packed=wide[:, 40:120], outliers=apart)):
        for x in (base[:9, :160], base[::60, 3:163], base.T[:9, :160], base[:9, :320:2], base[0, :160].expand(9, 160)):
            assert error_ratio(cpu.linear(x, part, name=name), x, dense.T) <= 1
        assert differing(cpu.dequantize(part, torch.float32, name=name), dense.float()) == 0


@needs_c
@every_path
def test_many_tokens_in_slices(name, monkeypatch):
    monkeypatch.setattr(cpu, "SLICE", 4)
    weight, x = weight_of(20, 96, case="nvfp4 outliers"), torch.randn(11, 96)
    assert error_ratio(cpu.linear(x, weight, name=name), x, exact(weight).T) <= 1


@needs_c
def test_large_columns():
    """uint16 columns above 32767 are not taken for negative ones, nor int32 columns above 65535 cut."""
    for k in (40_000, 65_568):
        weight, mask = random_weight(2, k, fmt=MXFP4, device="cpu"), torch.zeros(2, k, dtype=torch.bool)
        mask[0, [0, 32767, 32768, k - 1]] = True
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            part, x = with_outliers(weight, mask, dtype), torch.randn(1, k)
            assert differing(cpu.dequantize(part, torch.float32), reference.dequantize(part, torch.float32)) == 0
            assert error_ratio(cpu.linear(x, part), x, exact(part).T) <= 1


@needs_c
def test_damaged_outliers():
    """Columns and offsets that point elsewhere are an error, not a look at foreign memory."""
    weight, x = weight_of(6, 96, case="nvfp4 outliers"), torch.randn(2, 96)
    values, columns, offsets = weight.outliers
    for wrong in (columns.int() + 96, columns.int() - 97):
        with pytest.raises(ValueError, match="outliers: .* damaged"):
            cpu.linear(x, weight._replace(outliers=Outliers(values, wrong, offsets)))
    for wrong in (offsets + 1, offsets - 1):
        part = weight._replace(outliers=Outliers(values, columns, wrong))
        for call in (lambda w: cpu.linear(x, w), lambda w: cpu.dequantize(w, torch.float32)):
            with pytest.raises(ValueError, match="outliers: .* damaged"):
                call(part)


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "THREAD_WEIGHTS", 1)
    yield
    torch.set_num_threads(before)


def product_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    weight, x = weight_of(200, 96, case="nvfp4 outliers"), torch.randn(3, 96).to(torch.bfloat16)
    return torch.cat([ops.linear(x, weight).flatten(), ops.dequantize(weight).flatten()])


@needs_c
def test_threads(two_threads):
    """The same bits from one thread and from two, and from several callers at once."""
    expected = [product_of(seed) for seed in range(4)]
    torch.set_num_threads(1)
    assert all(torch.equal(product_of(seed), one) for seed, one in enumerate(expected))
    with ThreadPoolExecutor(4) as pool:
        weight, x = weight_of(200, 96, case="nvfp4 outliers"), torch.randn(3, 96)
        alone = ops.linear(x, weight)
        results = list(pool.map(lambda _: ops.linear(x, weight), range(100)))
    assert all(torch.equal(result, alone) for result in results)


@needs_c
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_fork(two_threads):
    """A worker forked from a process whose threads have run does not wait for them."""
    expected = product_of(1)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work():
        sender.send(torch.equal(product_of(1), expected))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert receiver.poll(60) and receiver.recv()
    process.join(60)
    assert process.exitcode == 0


# --- which implementation --------------------------------------------------------------------------------------------


@needs_c
@pytest.mark.parametrize("case", EVERYTHING)
def test_operators(case, monkeypatch):
    """With "auto" the operators come here for few tokens and decode here for many; with "torch" never."""
    weight, stack, calls = weight_of(40, 96, case=case), weight_of(2, 40, 96, case=case), []
    for function in (cpu.linear, cpu.dequantize):
        monkeypatch.setattr(cpu, function.__name__, lambda *a, f=function, **k: calls.append(f.__name__) or f(*a, **k))
    offsets, dense = torch.tensor([0, 2, 5], dtype=torch.int32), exact(weight)
    for tokens, expected in ((1, "linear"), (200, "dequantize")):
        x = torch.randn(tokens, 96)
        assert error_ratio(ops.linear(x, weight), x, dense.T) <= 1 and calls.pop() == expected and not calls
    y = ops.grouped_linear(x[:5], offsets, stack)
    assert calls == ["linear"] * 2 and error_ratio(y[2:], x[2:5], exact(stack)[1].T) <= 1
    gradient = torch.ops.hf_mxfp4.linear_grad(y[:3], None, *ops.operands(weight), weight.format.name, "auto")
    assert calls.pop() == "dequantize" and error_ratio(gradient, y[:3], dense) <= 1
    ops.dequantize(weight)
    assert calls.pop() == "dequantize"
    calls.clear()
    ops.linear(x[:1], weight, None, "torch")
    ops.linear(x[:1].double(), weight)
    ops.dequantize(weight, torch.float64)
    ops.dequantize(weight, backend="torch")
    assert not calls


@pytest.fixture
def fresh_choice():
    """Which path runs is found out anew, before and after."""
    caches = cpu.paths, cpu.path, dispatch._has_c
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.filterwarnings("error")
def test_without_the_extension(monkeypatch, fresh_choice):
    """Plain torch, and no warning: a machine without a compiler is a supported one."""
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "_cpu", None)
    monkeypatch.setattr(cpu, "_error", ImportError("no such module"), raising=False)
    weight, x = weight_of(40, 64, case="mxfp4 plain"), torch.randn(2, 64)
    assert torch.equal(ops.linear(x, weight), ops.linear(x, weight, None, "torch"))
    assert differing(ops.dequantize(weight), reference.dequantize(weight)) == 0
    assert cpu.path() is None and cpu.why_not().startswith("the C extension cannot be imported (no such module);")


@needs_c
def test_choosing_a_path(monkeypatch, fresh_choice):
    weight, x = weight_of(40, 96, case="nvfp4 plain"), torch.randn(2, 96)
    for name in (*NAMES, "torch"):
        monkeypatch.setenv(cpu.VARIABLE, name)
        cpu.path.cache_clear(), dispatch._has_c.cache_clear()
        assert cpu.path() == (None if name == "torch" else name)
        assert cpu.why_not() == (f"{cpu.VARIABLE}=torch" if name == "torch" else None)
        assert error_ratio(ops.linear(x, weight), x, exact(weight).T) <= 1
    monkeypatch.setenv(cpu.VARIABLE, "sse9")
    cpu.path.cache_clear()
    with pytest.raises(ValueError, match="HF_MXFP4_CPU='sse9'; possible here: " + ", ".join((*NAMES, "torch"))):
        cpu.path()


def test_few():
    """Bounds are where products in C stop being faster; macro factors leave no faster way."""
    assert cpu.few(1, torch.float32, False) and not cpu.few(4096, torch.float32, False)
    assert cpu.few(4096, torch.bfloat16, True) == (cpu.path() == "avx512_bf16")
    assert cpu.halves(4096, torch.bfloat16) == (cpu.path() == "avx512_bf16")
    assert not cpu.halves(1, torch.bfloat16) and not cpu.halves(4096, torch.float16)


def test_halves_are_exact():
    """Every code, scale and macro factor is the sum of two numbers in bfloat16, but where those underflow."""
    dense = reference.dequantize(every_code_and_scale(MXFP4, "cpu", macro=True), torch.float32)
    upper, lower = dispatch._halves(dense.clone()).double().chunk(2)
    usual = dense.isfinite() & ((dense.abs() > 2.0**-115) | (dense == 0)) & (dense.abs() < 2.0**127)
    assert usual.float().mean() > 0.9 and torch.equal((upper + lower)[usual], dense.double()[usual])
    assert (lower != 0).any() and upper[dense.isnan()].isnan().all() and lower.isfinite().all()


@needs_c
@pytest.mark.parametrize("case", [case for case in CASES if "macro" in case])
def test_gradient_in_halves(case, monkeypatch):
    """It is as near as a product in float32, on any CPU; outliers in float32, which have no halves, are left out."""
    weight, grad = weight_of(70, 800, case=case), torch.randn(99, 70).bfloat16()
    monkeypatch.setattr(cpu, "halves", lambda *arguments: False)
    wide = dispatch._product_grad(grad, weight, dispatch.C)
    asked = []
    monkeypatch.setattr(cpu, "halves", lambda *arguments: asked.append(arguments) is None)
    for chunk in (None, 256 * 70):
        found = dispatch._product_grad(grad, weight, dispatch.C, chunk)
        assert error_ratio(found, grad, exact(weight)) <= 1
        assert (found != wide).float().mean() < 0.01  # elsewhere they are rounded the same way
    assert asked == 2 * [(99, torch.bfloat16)]
    if weight.outliers is not None:
        precise = weight.outliers._replace(values=weight.outliers.values.float() * (1 + 2.0**-20))
        weight = weight._replace(outliers=precise)
        asked.clear()
        assert error_ratio(dispatch._product_grad(grad, weight, dispatch.C), grad, exact(weight)) <= 1
        assert not asked


@needs_c
def test_fallbacks_exist_everywhere():
    assert NAMES[-1] == "portable"
    assert dispatch.product_kernels(torch.device("cpu"), torch.float32, "auto") == dispatch.C
    assert importlib.machinery.EXTENSION_SUFFIXES[0] in cpu._cpu.__file__


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor(monkeypatch, fresh_choice):
    """It names what runs and, where that is plain torch, the reason; JSON says the same."""
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    said = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["packages"]["torch"] == torch.__version__ and f"torch {torch.__version__}" in said
    assert found["cpu"]["path"] == cpu.path() and (f"C, {cpu.path()}" in said) == bool(NAMES)
    assert bool(found["devices"]) != bool(found["no_devices"])
    monkeypatch.setenv(cpu.VARIABLE, "torch")
    cpu.path.cache_clear()
    if NAMES:
        assert f"plain torch, slower: {cpu.VARIABLE}=torch" in " ".join(
            CliRunner().invoke(app, ["doctor"]).output.split()
        )
    monkeypatch.setenv(cpu.VARIABLE, "sse9")
    cpu.path.cache_clear()
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0 and "possible here: " in json.loads(result.stdout)["cpu"]["why_not"]


def test_doctor_with_gpus(monkeypatch):
    """One whose kernels run, one that is too old; the tuning table in use is named."""
    table = tuning.Table(Path("measured.json"), {}, [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - 2 * device.index, 0))
    monkeypatch.setattr(dispatch, "_why_no_kernels", lambda device: "too old" if device.index else None)
    monkeypatch.setattr(tuning, "load_table", lambda name: table if name == "GPU of cuda:0" else None)
    monkeypatch.setattr(tuning, "stale_tables", lambda name: [Path("old.json")])
    found = doctor.report()
    assert found["no_devices"] is None
    assert [device["table"] for device in found["devices"]] == ["measured.json", None]
    assert [device["stale_tables"] for device in found["devices"]] == [["old.json"], []]
    texts = dict(doctor.lines(found))
    assert texts["stale table"] == "old.json: of another triton or other kernels"
    assert texts["GPU 0 runs"] == "triton kernels" and texts["GPU 1 runs"] == "plain torch, slow: too old"
