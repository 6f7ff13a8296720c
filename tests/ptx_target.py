# SPDX-License-Identifier: Apache-2.0
"""The kernels' launchers on an A100 that is not there: what triton compiles for it runs in ptx.py, on CPU tensors.

One process, started by test_ptx.py, without the interpreter. Prints a JSON line for each check: its name, "" or what
was wrong, and which launches there were.
"""

import json
import sys
import tempfile
import traceback

import torch
import triton
from made_driver import MadeDriver
from ptx import Module
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

MODULES: dict[str, Module] = {}
LAUNCHES: list[str] = []
LAST: list[str] = []  # the hash of what was launched last


class Driver(MadeDriver):
    """Compiles for Ampere; what is launched is run here."""

    arch, shared, processors = 80, 166912, 108

    def launcher_cls(self, source, metadata):
        names = [*source.signature]

        def run(*arguments):
            if metadata.hash not in MODULES:
                with open(get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")) as file:
                    MODULES[metadata.hash] = Module(file.read())
            grid, given = arguments[:3], dict(zip(names, arguments[-len(names) :], strict=True))
            LAST[:] = [metadata.hash]
            LAUNCHES.append(f"{metadata.name} {'x'.join(map(str, grid))}")
            passed = [given[name] for name in names if source.signature[name] != "constexpr"]
            MODULES[metadata.hash].launch(grid, passed, metadata.shared)

        return run


driver.set_active(Driver())
# Half of the time would go into machine code that nobody runs. What is left out must not get into anybody's cache.
CUDABackend.make_cubin = lambda *_: b""
FOLDER = tempfile.TemporaryDirectory()
triton.knobs.cache.dir = FOLDER.name

from exactness import differing, with_outliers  # noqa: E402 (the driver comes first)
from hf_mxfp4 import reference  # noqa: E402
from hf_mxfp4.activations import Activation  # noqa: E402
from hf_mxfp4.formats import FORMATS, QuantizedTensor  # noqa: E402
from hf_mxfp4.kernels import dequantize, experts, gemm, gemm_grad, permuted  # noqa: E402

AMPERE = permuted.Target("cuda", 80, 108)
permuted.target_of = lambda device: AMPERE
BF16, FP16 = torch.bfloat16, torch.float16


def weight(fmt, *shape: int, scales: str = "few", macro: bool = False) -> QuantizedTensor:
    """Random codes, with a few powers of two as scales, so that sums are exact, or with all scales that are finite."""
    *lead, k = shape
    blocks = *lead, k // fmt.block_size
    if scales == "all":
        byte = torch.randint(1, 250, blocks) if not fmt.has_global_scale else torch.randint(0, 127, blocks)
        byte = byte + 128 * torch.randint(0, 2, blocks) if fmt.has_global_scale else byte
    else:
        byte = torch.randint(0, 4, blocks) * (8 if fmt.has_global_scale else 1) + (40 if fmt.has_global_scale else 123)
    return QuantizedTensor(
        torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8),
        fmt.scale_from_bytes(byte.to(torch.uint8)),
        torch.randint(1, 8, lead[:-1]) / 8 if fmt.has_global_scale else None,
        fmt,
        torch.randint(0, 256, (*lead, -(-k // 128)), dtype=torch.uint8) if macro else None,
    )


def whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


def unit_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.eye(columns, dtype=dtype)[torch.randperm(columns)[:rows]]


def wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """How many values differ; -0 equals 0."""
    return differing(found + 0, expected + 0)


def exact(weight: QuantizedTensor) -> torch.Tensor:
    return reference.dequantize(weight, torch.float64)


def check_dequantize(fmt, dtype):
    """All codes with all scales; columns that are not full; matrices with a tensor scale each."""
    for w in (weight(fmt, 80, 512, scales="all"), weight(fmt, 3, 40, 96)):
        yield differing(dequantize.dequantize(w, dtype), reference.dequantize(w, dtype))
    w = with_outliers(weight(fmt, 40, 96), torch.rand(40, 96) < 0.1)
    yield differing(dequantize.dequantize(w, dtype), reference.dequantize(w, dtype))


def check_spoilt(fmt, dtype):
    """The proof can fail: with two results of the inline PTX exchanged, values differ."""
    w = weight(fmt, 32, 256)
    dequantize.dequantize(w, dtype)
    code = MODULES[LAST[0]].code
    one, other = [i for i, (_, parts, _) in enumerate(code) if parts[0] == "lop3"][:2]
    code[one][2][0], code[other][2][0] = code[other][2][0], code[one][2][0]
    yield int(differing(dequantize.dequantize(w, dtype), reference.dequantize(w, dtype)) == 0)
    MODULES.clear()


def check_linear(fmt, dtype):
    """One part and two, rows that fill no tile, two tiles of tokens, a bias; then the slow sum."""
    for tokens, n, k in ((1, 144, 256), (16, 144, 256), (16, 256, 512), (20, 144, 320)):
        w, x, bias = weight(fmt, n, k), whole(tokens, k, dtype=dtype), torch.arange(n).float()
        expected = x.double() @ exact(w).T + bias
        yield wrong(gemm.linear(x, w, bias), expected.to(dtype))
    w, x = weight(fmt, 144, 256, scales="all"), unit_rows(16, 256, dtype)
    yield wrong(gemm.linear(x, w), (x.double() @ exact(w).T).to(dtype))


def check_linear_grad(fmt, dtype):
    for tokens, n, k in ((16, 256, 512), (20, 144, 320)):
        w, x = weight(fmt, n, k), whole(tokens, n, dtype=dtype)
        yield wrong(gemm_grad.linear_grad(x, w), (x.double() @ exact(w)).to(dtype))
    w, x = weight(fmt, 600, 256), whole(5, 600, dtype=dtype)  # a sum in parts
    options = gemm_grad.tile(dtype, 5, 4096, 4096, 1, False, AMPERE) | {"SPLITS": 2}
    yield wrong(gemm_grad.linear_grad(x, w, options=options), (x.double() @ exact(w)).to(dtype))
    w, x = weight(fmt, 144, 256, scales="all"), unit_rows(16, 144, dtype)
    yield wrong(gemm_grad.linear_grad(x, w), (x.double() @ exact(w)).to(dtype))


def check_corrections(fmt, dtype):
    """Macro factors; outliers, for rows of the identity, since theirs are no small integers."""
    if not fmt.has_global_scale:
        w, x, y = weight(fmt, 144, 512, macro=True), unit_rows(16, 512, dtype), unit_rows(16, 144, dtype)
        yield differing(dequantize.dequantize(w, dtype), reference.dequantize(w, dtype))
        yield wrong(gemm.linear(x, w), (x.double() @ exact(w).T).to(dtype))
        yield wrong(gemm_grad.linear_grad(y, w), (y.double() @ exact(w)).to(dtype))
    w = with_outliers(weight(fmt, 48, 96), torch.rand(48, 96) < 0.1)
    x, y = unit_rows(16, 96, dtype), unit_rows(16, 48, dtype)
    yield wrong(gemm.linear(x, w), (x.double() @ exact(w).T).to(dtype))
    yield wrong(gemm_grad.linear_grad(y, w), (y.double() @ exact(w)).to(dtype))


def check_grouped(fmt, dtype):
    """Experts' rows one after another; the second expert has none."""
    w, x, y = weight(fmt, 3, 40, 96), whole(20, 96, dtype=dtype), whole(20, 40, dtype=dtype)
    offsets, parts, dense = torch.tensor([0, 3, 3, 20], dtype=torch.int32), ((0, 0, 3), (2, 3, 20)), exact(w)
    expected = torch.cat([x[a:b].double() @ dense[e].T for e, a, b in parts]).to(dtype)
    yield wrong(gemm.linear(x, w, None, offsets), expected)
    expected = torch.cat([y[a:b].double() @ dense[e] for e, a, b in parts]).to(dtype)
    yield wrong(gemm_grad.linear_grad(y, w, offsets), expected)


def check_experts(fmt, dtype):
    """Gate and up rows that belong together, sorted by expert and (one token) not; some ids of no expert."""
    first, down = weight(fmt, 3, 128, 96), weight(fmt, 3, 96, 64)
    first, down = (w._replace(global_scale=torch.ones(3) if fmt.has_global_scale else None) for w in (first, down))
    for tokens in (1, 9):
        x, index = unit_rows(tokens, 96, dtype), torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
        router, total = torch.randint(1, 5, (tokens, 2)) / 4, torch.zeros(tokens, 96, dtype=torch.float64)
        for m, j in ((m, j) for m in range(tokens) for j in range(2) if index[m, j] < 3):
            gate, up = (exact(first)[index[m, j]] @ x[m].double()).chunk(2)
            total[m] += router[m, j] * (exact(down)[index[m, j]] @ (gate.relu() * up).to(dtype).double())
        found = experts.experts(x, index, router, first, None, down, None, Activation("relu"))
        yield wrong(found, total.to(dtype))


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is full of NaN until it is written
    for name, check in [(n.removeprefix("check_"), f) for n, f in globals().items() if n.startswith("check_")]:
        for fmt in FORMATS.values():
            for dtype in (BF16, FP16) if "--all" in sys.argv or name in ("dequantize", "linear") else (BF16,):
                torch.manual_seed(0)
                LAUNCHES.clear()
                try:
                    found = [*check(fmt, dtype)]
                except Exception:
                    found = traceback.format_exc()
                report = {"check": name, "format": fmt.name, "dtype": str(dtype), "wrong": found, "launches": LAUNCHES}
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
