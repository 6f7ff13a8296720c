# SPDX-License-Identifier: Apache-2.0
"""What scripts/benchmark_kernels.py measures: regimes, their cases, and how a case is checked and timed.

A case becomes a row: `times` and `ratios` (`timing.Times`) by contender, `bytes` and `flops` of one call, `gate`
(errors and what is allowed; who fails is not timed), `failed` (messages of contenders that raised).
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

import timing
from hf_mxfp4 import FP4Linear, ops, reference
from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.quantization import quantize
from kernel_peers import BASELINE, OURS, Contender, Forward, Layer, clone

GATE_ROWS = 256  # tokens compared with float64; spread over all, so that every tile of a kernel is met
NOT_FINITE = 1e9  # instead of an error
PEER_ERROR = 0.25  # relative; 4-bit peers are at 0.09 to 0.13 on random weights, a wrong layout is above 1


class Case(NamedTuple):
    """One row to measure: `shape` is (N, K), of experts (E, I, H, k)."""

    regime: str
    layer: str
    shape: tuple[int, ...]
    tokens: int
    threads: int = 0  # of the CPU

    @property
    def key(self) -> str:
        threads = f", {self.threads} thread{'s'[: self.threads - 1]}" if self.threads else ""
        return f"{self.regime}: {self.layer} {'x'.join(map(str, self.shape))}, M={self.tokens}{threads}"


@dataclass
class Bench:
    """How to measure: the device, whom, most rounds and seconds of a case, and on a CPU with how many threads.

    `until` (of `time.monotonic`) is when a case that can stop in between has to.
    """

    device: torch.device
    contenders: dict[str, Contender]
    rounds: int = 25
    seconds: float = 1.0
    quick: bool = False
    threads: tuple[int, ...] = (1,)
    until: float = float("inf")
    _prepared: dict = field(default_factory=dict)

    def layer(self, n: int, k: int) -> Layer:
        """The layer of this size; the last one asked for is kept, since its cases follow each other."""
        return self.keep("layer", (n, k), lambda: Layer(n, k, self.device))

    def forwards(self, layer: Layer, contender: Contender) -> list[Forward]:
        """As many copies as do not fit into the cache."""
        copies = timing.copies_needed(int(contender.nbytes(layer)), timing.cache_bytes(self.device))
        make = lambda: [contender.make(layer) for _ in range(copies)]  # noqa: E731
        return self.keep(contender.name, (layer.n, layer.k), make)

    def keep(self, name: str, key, make: Callable):
        """What `make` returns, made anew when `key` is not the last one asked for under this name."""
        if self._prepared.get(name, (None,))[0] != key:
            self._prepared[name] = None  # the old one goes before the new one comes
            self._prepared[name] = (key, make())
        return self._prepared[name][1]

    def release(self) -> None:
        """Give the memory of layers back, before a regime with other needs."""
        self._prepared.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def compare(self, calls: dict[str, list[timing.Call]], row: dict, base: str, graph: bool = True) -> dict:
        """Add `times` and `ratios` to a row; whoever raises is put down in `failed`."""
        samplers = {}
        for name, each in calls.items():
            try:
                for call in each:  # kernels compile, peers pack their weights
                    call()
                samplers[name] = timing.sampler(each, self.device) if graph else timing.host_sampler(each, self.device)
            except Exception as error:
                row["failed"][name] = describe(error)
        samples = timing.take_turns(samplers, self.rounds, self.seconds)
        row["baseline"] = base
        row["times"] = {name: timing.summarize(times)._asdict() for name, times in samples.items()}
        row["ratios"] = {name: ratio._asdict() for name, ratio in timing.ratios(samples, base).items()}
        return row


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def new_row(case: Case, flops: float) -> dict:
    return {**case._asdict(), "flops": flops, "bytes": {}, "gate": {}, "failed": {}, "load": os.getloadavg()[0]}


# --- the gate --------------------------------------------------------------------------------------------------------


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error as a fraction of the largest exact value; `NOT_FINITE` for NaN and Inf."""
    return finite((y.double() - exact).abs().max() / exact.abs().max())


def rms_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the error as a fraction of that of the exact values; `NOT_FINITE` for NaN and Inf."""
    return finite((y.double() - exact).norm() / exact.norm())


def finite(value: torch.Tensor) -> float:
    """A number JSON knows."""
    return float(value.nan_to_num(nan=NOT_FINITE, posinf=NOT_FINITE))


def allowance(terms: int) -> float:
    """What the order of float32 sums may add to an error, as a fraction of the largest value.

    Tensor cores and vector units add 16 products at a time to an accumulator and may truncate: 2^-23 of it each time.
    For 4096 terms that is 3e-5, where the rounding to bfloat16 at the end, common to all, makes up to 2e-3.
    """
    return -(-terms // 16) * 2.0**-23


def verdict(y: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, terms: int) -> dict:
    """An error may be that of torch's own bf16 product with the dequantized weight, and `allowance`."""
    found, allowed = error(y, exact), error(torchs, exact) + allowance(terms)
    return {"error": found, "allowed": allowed, "passed": found <= allowed}


def sample_rows(x: torch.Tensor) -> torch.Tensor:
    """Indices of at most `GATE_ROWS` rows, the first and last among them."""
    count = min(GATE_ROWS, x.shape[0])
    return torch.linspace(0, x.shape[0] - 1, count, device=x.device).round().long()


def gate_product(x: torch.Tensor, y: torch.Tensor, weight: QuantizedTensor, grad: bool = False) -> dict:
    """Judge `y = x @ W.T`, or with `grad` `x @ W`."""
    rows = sample_rows(x)
    dense = reference.dequantize(weight, torch.bfloat16)
    exact = reference.dequantize(weight, torch.float64)
    dense, exact = (dense.T, exact.T) if grad else (dense, exact)
    return verdict(y[rows], F.linear(x[rows], dense), x[rows].double() @ exact.T, x.shape[-1])


def gate_peer(y: torch.Tensor, expected: torch.Tensor) -> dict:
    """Judge another project's product by its distance from the bf16 one: only nonsense fails."""
    found = rms_error(y, expected.double())
    return {"error": found, "allowed": PEER_ERROR, "passed": found <= PEER_ERROR}


def check_all(row: dict, gates: dict[str, Callable[[], dict]]) -> list[str]:
    """Run gates into `row["gate"]`; the names that passed."""
    for name, gate in gates.items():
        try:
            row["gate"][name] = gate()
        except Exception as error:
            row["failed"][name] = describe(error)
    return [name for name, found in row["gate"].items() if found["passed"]]


# --- linear layers ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_linear(case: Case, bench: Bench) -> dict:
    """`x [M, K] @ W.T` by everyone."""
    (n, k), layer = case.shape, bench.layer(*case.shape)
    x = torch.randn(case.tokens, k, dtype=torch.bfloat16, device=bench.device)
    row = new_row(case, 2.0 * case.tokens * n * k)
    expected = F.linear(x, layer.dense)

    def gate(name: str) -> dict:
        if name == BASELINE:
            return gate_peer(expected, expected)
        y = bench.forwards(layer, bench.contenders[name])[0](x)
        if name in OURS:
            return gate_product(x, y, layer.packed[name])
        mine = F.linear(x, reference.dequantize(layer.packed["mxfp4"], x.dtype)) if "dequantize" in name else expected
        return gate_peer(y, mine)

    suited = [name for name, contender in bench.contenders.items() if contender.suits(layer, case.tokens)]
    names = check_all(row, {name: partial(gate, name) for name in suited})
    calls = {
        name: [partial(forward, x) for forward in bench.forwards(layer, bench.contenders[name])] for name in names
    }
    activations = 2 * case.tokens * (n + k)
    row["bytes"] = {name: bench.contenders[name].nbytes(layer) + activations for name in names}
    return bench.compare(calls, row, BASELINE)


@torch.no_grad()
def measure_gradient(case: Case, bench: Bench) -> dict:
    """`grad [M, N] @ W`: what a frozen layer hands back."""
    (n, k), layer = case.shape, bench.layer(*case.shape)
    grad = torch.randn(case.tokens, n, dtype=torch.bfloat16, device=bench.device)
    row = new_row(case, 2.0 * case.tokens * n * k)

    def ours(weight: QuantizedTensor) -> timing.Call:
        operands = ops.operands(weight)
        return lambda: torch.ops.hf_mxfp4.linear_grad(grad, None, *operands, weight.format.name, "auto")

    gates = {name: partial(lambda w: gate_product(grad, ours(w)(), w, grad=True), layer.packed[name]) for name in OURS}
    cache, calls = timing.cache_bytes(bench.device), {}
    for name in (BASELINE, *check_all(row, gates)):
        nbytes = bench.contenders[name].nbytes(layer)
        copies = range(timing.copies_needed(int(nbytes), cache))
        row["bytes"][name] = nbytes + 2 * case.tokens * (n + k)
        if name == BASELINE:
            calls[name] = [partial(torch.matmul, grad, layer.dense.clone()) for _ in copies]
        else:
            calls[name] = [ours(clone(layer.packed[name])) for _ in copies]
    return bench.compare(calls, row, BASELINE)


RANK = 16


def measure_lora(case: Case, bench: Bench) -> dict:
    """A frozen layer with a LoRA of rank 16: forward, gradients of x and of both factors."""
    (n, k), layer = case.shape, bench.layer(*case.shape)
    make = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
    x, grad = make(case.tokens, k).requires_grad_(), make(case.tokens, n)
    a, b = (make(RANK, k) * 0.02).requires_grad_(), (make(n, RANK) * 0.02).requires_grad_()
    row = new_row(case, 4.0 * case.tokens * (n * k + 1.5 * RANK * (n + k)))

    def step(forward: Forward) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(x) + F.linear(F.linear(x, a), b), (x, a, b), grad)

    def gate(name: str) -> dict:
        y = bench.forwards(layer, bench.contenders[name])[0](x)
        (back,) = torch.autograd.grad(y, x, grad)
        found = gate_product(x.detach(), y.detach(), layer.packed[name])
        backward = gate_product(grad, back, layer.packed[name], grad=True)
        return backward if found["passed"] else found

    passed = check_all(row, {name: partial(gate, name) for name in OURS})
    names = [BASELINE, *passed, *(["bitsandbytes nf4"] if "bitsandbytes nf4" in bench.contenders else [])]
    calls = {name: [partial(step, f) for f in bench.forwards(layer, bench.contenders[name])] for name in names}
    return bench.compare(calls, row, BASELINE)


def measure_launch(case: Case, bench: Bench) -> dict:
    """Time the host spends on a call of a layer without graphs: on a layer too small for its product to count."""
    n, k = case.shape
    layer, x = Layer(n, k, bench.device), torch.randn(1, k, dtype=torch.bfloat16, device=bench.device)
    modules = {BASELINE: layer.linear(), **{name: FP4Linear.from_quantized(layer.packed[name]) for name in OURS}}
    with torch.no_grad():
        calls = {name: [partial(module, x)] for name, module in modules.items()}
        return bench.compare(calls, new_row(case, 0.0), BASELINE, graph=False)


def measure_quantize(case: Case, bench: Bench) -> dict:
    """Rounding a bf16 weight, with amax scales and with searched ones; bytes are those read and written once."""
    n, k = case.shape
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=bench.device) * 0.02
    row, calls = new_row(case, 0.0), {}
    for name, fmt in FORMATS.items():
        for rule in ("amax", "soar"):
            calls[f"{name} {rule}"] = [partial(_quantize, weight, fmt, rule)]
            row["bytes"][f"{name} {rule}"] = weight.nbytes + n * k // 2 + n * k // fmt.block_size
    return bench.compare(calls, row, "nvfp4 amax", graph=False)


def _quantize(weight: torch.Tensor, fmt, rule: str) -> None:
    quantize(weight, fmt, rule)
    if weight.is_cuda:
        torch.cuda.synchronize()


# --- cases -----------------------------------------------------------------------------------------------------------

# N x K, most important first.
LAYERS = {
    "8B gate": (12288, 4096),
    "8B down": (4096, 12288),
    "8B gate+up": (24576, 4096),
    "8B q": (4096, 4096),
    "3B gate": (11008, 2048),
    "3B down": (2048, 11008),
    "3B gate+up": (22016, 2048),
    "3B q": (2048, 2048),
    "8B qkv": (6144, 4096),
    "8B k": (1024, 4096),
    "30B-A3B q": (4096, 2048),
    "30B-A3B o": (2048, 4096),
    "3B qkv": (2560, 2048),
    "30B-A3B k": (512, 2048),
    "3B k": (256, 2048),
}
CPU_LAYERS = {
    "3B gate": (11008, 2048),
    "8B q": (4096, 4096),
    "3B q": (2048, 2048),
    "0.6B k": (1024, 1024),
    "MiniLM q": (384, 384),
}


def linear_cases(regime: str, tokens: Iterable[int], bench: Bench, quick: Iterable[int]) -> list[Case]:
    """Every layer with every number of tokens; quick: the first of each model with some of them."""
    layers, tokens = LAYERS, [*(quick if bench.quick else tokens)]
    if bench.quick:
        layers = {name: LAYERS[name] for name in ("8B gate", "8B q", "3B gate")}
    return [Case(regime, name, shape, m) for name, shape in layers.items() for m in tokens]


def cpu_cases(bench: Bench) -> list[Case]:
    """Layers of the CPU run: the first number of threads, then the others."""
    tokens = (1, 8) if bench.quick else (1, 8, 32, 128)
    layers = [*CPU_LAYERS.items()][:: -1 if bench.quick else 1][: 2 if bench.quick else None]
    cases = {t: [Case("cpu", name, shape, m, t) for name, shape in layers for m in tokens] for t in bench.threads}
    many = [] if bench.quick else [Case("cpu", name, shape, 1024, bench.threads[0]) for name, shape in layers[:2]]
    return cases.pop(bench.threads[0]) + many + [case for others in cases.values() for case in others]


def layer_cases(regime: str, names: Iterable[str], tokens: Iterable[int], bench: Bench) -> list[Case]:
    return [Case(regime, name, LAYERS[name], m) for name in names for m in tokens][: 1 if bench.quick else None]


def launch_cases(bench: Bench) -> list[Case]:
    return [Case("launch", "tiny", (64, 64), 1, 1 if bench.device.type == "cpu" else 0)]
