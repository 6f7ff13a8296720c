# SPDX-License-Identifier: Apache-2.0
"""The operator hf_mxfp4::experts: kernels and their twin against dense weights, gradients, recognition of gates."""

import importlib
import math
import operator
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

import hf_mxfp4
from hf_mxfp4 import MXFP4, NVFP4, FP4Experts, experts_ops
from hf_mxfp4.activations import ACTIVATIONS, GATES, Activation, recognise
from hf_mxfp4.formats import BlockFormat
from hf_mxfp4.kernels import experts as kernels
from hf_mxfp4.kernels import gemm
from hf_mxfp4.operands import operands
from hf_mxfp4.reference import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_format = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
SILU = Activation("silu")
GPT_OSS = Activation("silu", 1.702, 1.5, 1.0, interleaved=True)  # a limit that values of the size of 1 meet


def make(
    format: BlockFormat,
    tokens: int,
    activation: Activation = SILU,
    *,
    shape=(5, 96, 64),
    top_k: int = 2,
    gated: bool = True,
    bias: bool = True,
    away: bool = True,
    dtype: torch.dtype = torch.float32,
    macro: str | None = None,
    outliers: bool = False,
) -> tuple:
    """Arguments of `experts_ops.experts`: `shape` is experts, hidden and intermediate size; with `away`, ids >= E."""
    experts, hidden, inner = shape
    rows = inner * 2 if gated else inner
    weights = []
    for size in ((experts, rows, hidden), (experts, hidden, inner)):
        dense = torch.randn(size) * 0.3
        keep = torch.rand(size) < 0.02 if outliers else None
        weight = quantize(dense, format, "amax", macro_block=macro, keep=keep)
        weights.append(weight._replace(**moved(weight)))
    first, down = weights
    biases = (torch.randn(experts, rows), torch.randn(experts, hidden)) if bias else (None, None)
    index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).view(tokens, top_k)
    if away:
        index[torch.rand(index.shape) < 0.2] = experts
    biases = [None if b is None else b.to(DEVICE, dtype) for b in biases]
    x = torch.randn(tokens, hidden).to(DEVICE, dtype)
    return x, index.to(DEVICE), torch.rand(tokens, top_k).to(DEVICE), first, biases[0], down, biases[1], activation


def moved(weight) -> dict:
    fields = {key: value.to(DEVICE) for key, value in weight._asdict().items() if isinstance(value, torch.Tensor)}
    if weight.outliers is not None:
        fields["outliers"] = type(weight.outliers)(*(tensor.to(DEVICE) for tensor in weight.outliers))
    return fields


def dense(x, index, weights, first, first_bias, down, down_bias, activation) -> torch.Tensor:
    """The definition, token by token in float64 on dequantized weights."""
    first, down = (hf_mxfp4.dequantize(weight, torch.float64) for weight in (first, down))
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, ids in enumerate(index.tolist()):
        for j, expert in enumerate(ids):
            if not 0 <= expert < len(down):
                continue
            hidden = first[expert] @ x[token].double()
            hidden = hidden if first_bias is None else hidden + first_bias[expert].double()
            hidden = activation.forward(hidden, first.shape[1] != down.shape[2])
            out = down[expert] @ hidden + (0 if down_bias is None else down_bias[expert].double())
            total[token] += weights[token, j].double() * out
    return total


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5):
    """float32 sums of up to 400 products, twice, then a few experts: 1e-5 of the largest value."""
    expected = expected.to(found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))


def check(arguments: tuple, tolerance: float = 1e-5):
    expected = dense(*arguments)
    close(experts_ops.experts(*arguments, backend="torch"), expected, tolerance)
    found = experts_ops.experts(*arguments, backend="triton")
    close(found, expected, tolerance)
    return found


@every_format
@pytest.mark.parametrize("tokens", [1, 2, 45])
@pytest.mark.parametrize("gated", [True, False])
def test_kernels_equal_twin(format, tokens, gated):
    """Up to two tokens go without sorting; 45 tokens have experts with more than one tile."""
    check(make(format, tokens, gated=gated))
    if gated:
        check(make(format, tokens, GPT_OSS, shape=(3, 64, 32), top_k=3, bias=False))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activations(name, gated):
    check(make(NVFP4, 1, Activation(name, limit=0.7, shift=1.0, interleaved=True), gated=gated, shape=(2, 32, 32)))


@every_format
@pytest.mark.parametrize("shape", [(2, 160, 32), (2, 32, 288)], ids=str)
def test_odd_sizes(format, shape):
    """Neither dimension a multiple of 128, tiles of rows that are not full."""
    check(make(format, 3, shape=shape, top_k=1))
    check(make(format, 1, GPT_OSS, shape=shape, top_k=1))


@pytest.mark.parametrize("format, options", [(MXFP4, {"macro": "static"}), (NVFP4, {"outliers": True})])
@pytest.mark.parametrize("tokens", [1, 5])
def test_corrections(format, options, tokens):
    arguments = make(format, tokens, shape=(2, 160, 64), **options)
    assert arguments[3].macro is not None or arguments[3].outliers.values.numel() > 100
    check(arguments)


@pytest.mark.parametrize("corrections", [{}, {"macro": "static", "outliers": True}], ids=["plain", "corrected"])
def test_parts_of_sums(corrections, monkeypatch):
    """Sums along K in two parts, of a step each: the same bits each time."""
    monkeypatch.setattr(gemm, "splits", lambda tokens, n, k, experts, options, processors: -(-k // 128))
    monkeypatch.setattr(kernels, "plan", kernels.plan.__wrapped__)
    arguments = make(MXFP4, 1, shape=(2, 160, 160), gated=False, **corrections)
    assert torch.equal(check(arguments), experts_ops.experts(*arguments, backend="triton"))


def test_corners_of_routing():
    x, index, weights, *rest = make(NVFP4, 6, away=False)
    check((x, index.to(torch.int32), weights, *rest))
    check((x, torch.full_like(index, 3), weights, *rest))  # one expert twice for each token
    check((torch.stack([x, -x], 2)[..., 0], index, weights, *rest))
    for away in (5, 6, 1 << 40, -1):  # none of them is an expert's
        for tokens in (1, 6):
            none = experts_ops.experts(
                x[:tokens], torch.full_like(index, away)[:tokens], weights[:tokens], *rest, backend="triton"
            )
            assert none.shape == (tokens, 96) and not none.any()
    for rows, top_k in ((0, 2), (3, 0)):
        out = experts_ops.experts(x[:rows], index[:rows, :top_k], weights[:rows, :top_k], *rest, backend="triton")
        assert out.shape == (rows, 96) and not out.any()


@pytest.mark.parametrize("slots", [1, 100, 2500])
def test_route(slots):
    """The kernel's order is the stable sort's; 2500 slots are three steps."""
    index = torch.randint(-1, 9, (slots, 1), device=DEVICE)  # 7 experts
    order, offsets = kernels.route(index, 7)
    expected, bounds = experts_ops.route(index, 7)
    assert torch.equal(offsets, bounds - bounds[0])
    assert torch.equal(order[: offsets[-1]].long(), expected[bounds[0] : bounds[-1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_error_of_16_bits(dtype, backend):
    """At most the error of projections one by one: the hidden row and the result are rounded once each."""
    module, arguments = packed_module(dtype)
    x, index, weights, *_ = arguments
    expected = dense(*arguments)
    found = experts_ops.experts(*arguments, backend=backend).double() - expected
    module.activation = None
    separate = module(x, index, weights).double() - expected
    assert found.square().mean() <= separate.square().mean()


def packed_module(dtype: torch.dtype = torch.float32, act_fn=F.silu) -> tuple:
    """An `FP4Experts`, and arguments of the operator that are the same."""
    arguments = make(NVFP4, 24, shape=(4, 128, 64), dtype=dtype, bias=False)
    module = FP4Experts(4, 128, 64, act_fn=act_fn, dtype=dtype, backend="torch", device=DEVICE)
    module.load_projection("gate_up_proj", arguments[3])
    module.load_projection("down_proj", arguments[5])
    return module, arguments


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("activation", [Activation("gelu"), GPT_OSS], ids=["gelu", "gpt_oss"])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients(backend, activation, gated):
    arguments = make(NVFP4, 5, activation, gated=gated, shape=(4, 48, 32))
    leaves = [0, 2, 4, 6]  # x, routing weights, biases

    def gradients(function):
        own = [a.clone().requires_grad_() if i in leaves else a for i, a in enumerate(arguments)]
        out = function(*own)
        up = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
        return torch.autograd.grad(out, [own[i] for i in leaves], up.to(out.dtype))

    found = gradients(lambda *a: experts_ops.experts(*a, backend=backend))
    for one, expected in zip(found, gradients(dense), strict=True):
        assert expected.any()
        close(one, expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("limit", [math.inf, 0.8])
def test_derivatives(name, limit):
    x = torch.linspace(-3, 3, 100, dtype=torch.float64).reshape(10, 10).requires_grad_()
    for gated, interleaved in ((True, False), (True, True), (False, False)):
        activation = Activation(name, 1.3, limit, 1.0, interleaved)
        out = activation.forward(x, gated)
        up = torch.rand_like(out)
        (expected,) = torch.autograd.grad(out, x, up)
        torch.testing.assert_close(activation.backward(up, x, gated), expected, rtol=1e-9, atol=1e-9)


def test_nothing_but_inputs_is_kept():
    arguments = make(NVFP4, 3)
    x = arguments[0].requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts_ops.experts(*arguments)
    inputs = [x, *arguments[1:3], *operands(arguments[3]), arguments[4], *operands(arguments[5]), arguments[6]]
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in inputs if t is not None}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck(backend):
    x, index, weights, first, first_bias, down, down_bias, activation = make(
        NVFP4, 1, shape=(2, 32, 32), outliers=True
    )
    x.requires_grad_()
    weights.requires_grad_()
    flat = (*operands(first), first_bias, *operands(down), down_bias, *activation, "nvfp4", backend)
    traced = {} if backend == "torch" else {"test_utils": ("test_schema", "test_faketensor")}  # else the same for both
    torch.library.opcheck(torch.ops.hf_mxfp4.experts.default, (x, index, weights, *flat), **traced)


def test_what_is_refused():
    x, index, weights, first, first_bias, down, down_bias, activation = make(NVFP4, 3)
    other = make(MXFP4, 3)[5]
    for changes, error, message in (
        ({"x": x[0]}, ValueError, r"x: shape \(96,\), expected \[M, 96\]"),
        ({"x": x[:, :64]}, ValueError, "x: shape"),
        ({"x": x.int()}, TypeError, "x: dtype torch.int32"),
        ({"top_k_index": index[:2]}, ValueError, r"top_k_index: shape \(2, 2\), expected \[3, k\]"),
        ({"top_k_index": index.float()}, TypeError, "top_k_index: dtype torch.float32"),
        ({"top_k_weights": weights[:, :1]}, ValueError, r"top_k_weights: shape \(3, 1\), expected \(3, 2\)"),
        ({"top_k_weights": index}, TypeError, "top_k_weights: dtype torch.int64"),
        ({"down": other}, ValueError, "down: format mxfp4, expected that of the first, nvfp4"),
        ({"down": first}, ValueError, "first: shape"),
        ({"down_bias": first_bias}, ValueError, "down_bias: shape"),
        ({"activation": Activation("tanh")}, ValueError, "activation='tanh': expected one of silu, gelu"),
        ({"backend": "cuda"}, ValueError, "backend='cuda'"),
    ):
        arguments = {"x": x, "top_k_index": index, "top_k_weights": weights, "first": first}
        arguments |= {"first_bias": first_bias, "down": down, "down_bias": down_bias, "activation": activation}
        with pytest.raises(error, match=message):
            experts_ops.experts(**arguments | changes)


# --- recognition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GATES)
def test_known_gates_are_what_we_take_them_for(path):
    """Each gate of transformers that has a row computes what the row says."""
    module, name = re.fullmatch(r"(.*?\.[a-z0-9_.]+)\.(\w+\._apply_gate|_default_apply_gate)", path).groups()
    owner = operator.attrgetter(name)(importlib.import_module(module))
    experts = SimpleNamespace(
        gate_function=owner,
        has_gate=True,
        act_fn=nn.SiLU(),
        alpha=1.702,
        limit=1.5,
        swiglu_alpha=1.3,
        swiglu_limit=1.2,
    )
    activation = recognise(experts)
    gate_up = torch.randn(50, 64) * 2
    torch.testing.assert_close(activation.forward(gate_up, True), owner(experts, gate_up))


def test_recognised_by_identity():
    """A gate or function of one's own is never taken for a known one, also if it comes later."""

    class Like(nn.SiLU):
        def forward(self, x):
            return x

    def silu(x):
        return x

    for act_fn in (Like(), silu, lambda x: x, torch.tanh, None, nn.Identity()):
        module, _ = packed_module(act_fn=act_fn)
        assert module.activation is None
    module, (x, index, weights, *_) = packed_module()
    assert module.activation == Activation("silu")
    module.act_fn = torch.relu
    assert module.activation == Activation("relu")
    module.act_fn = silu
    assert module.activation is None
    gate_up = module.dequantized("gate_up_proj")
    module.gate_function = lambda self, gate_up: gate_up[..., :64]
    assert module.activation is None
    expected = torch.stack(
        [
            sum(
                weights[m, j] * (module.dequantized("down_proj")[e] @ (gate_up[e] @ x[m])[:64])
                for j, e in enumerate(ids)
                if e < 4
            )
            + torch.zeros(128, device=DEVICE)
            for m, ids in enumerate(index.tolist())
        ]
    )
    close(module(x, index, weights), expected)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu2"])
def test_functions_of_transformers(name):
    from transformers.activations import ACT2FN

    module, _ = packed_module(act_fn=ACT2FN[name])
    x = torch.randn(40, 128)
    torch.testing.assert_close(module.activation.forward(x, True), module._apply_gate(x))


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_cuda_graph(tokens):
    """Captured once, replayed with other ids: the host reads none of them."""
    x, index, weights, *rest = make(NVFP4, tokens, dtype=torch.bfloat16)
    run = torch.cuda.Stream()
    run.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(run):
        experts_ops.experts(x, index, weights, *rest)
    torch.cuda.current_stream().wait_stream(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_ops.experts(x, index, weights, *rest)
    for _ in range(3):
        index.copy_(torch.randint(0, 6, index.shape))
        graph.replay()
        assert torch.equal(out, experts_ops.experts(x, index, weights, *rest))
