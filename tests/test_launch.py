# SPDX-License-Identifier: Apache-2.0
"""What a call costs beside its arithmetic: checks once, tensor scales once, and whole models in one compiled graph."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from tiny_models import case, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import hf_mxfp4
from exactness import random_weight
from hf_mxfp4 import FP4Config, FP4Experts, FP4Linear, dispatch, operands, ops
from hf_mxfp4.formats import FORMATS, MXFP4


def layer(format="nvfp4", n=24, k=64) -> FP4Linear:
    return FP4Linear.from_quantized(hf_mxfp4.quantize(torch.randn(n, k), FP4Config(format=format)), torch.randn(n))


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


# --- checks and dispatch ---------------------------------------------------------------------------------------------


def test_checks_run_once(monkeypatch):
    """Again only for other shapes, dtypes or devices; what is wrong is named each time."""
    packed, x, calls = layer(), torch.randn(3, 64), []
    monkeypatch.setattr(operands, "_SEEN", set())
    check = ops._check_linear
    monkeypatch.setattr(ops, "_check_linear", lambda *arguments: calls.append(1) or check(*arguments))
    with torch.no_grad():
        for _ in range(3):
            packed(x)
        assert len(calls) == 1
        packed(x.bfloat16())
        packed(x[:2])
        assert len(calls) == 3
        for _ in range(2):
            with pytest.raises(ValueError, match=r"x: shape \(3, 32\), expected \[..., 64\]"):
                packed(x[:, :32])
        packed.weight_scale = packed.weight_scale[:, :2]
        with pytest.raises(ValueError, match=r"scale: shape \(24, 2\), expected \(24, 4\)"):
            packed(x)


def test_seen_does_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(operands, "_SEEN", {("made up", i) for i in range(10_001)})
    layer()(torch.randn(3, 64))
    assert len(operands._SEEN) == 1


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_a_forward_is_one_operator(format):
    """Beside views, nothing runs around the product: no tensor scale is formed, nothing copied."""
    packed, x = layer(format), torch.randn(3, 64)
    with torch.no_grad():
        packed(x)
        with Operators() as found:
            packed(x)
    assert set(found.names) <= {"hf_mxfp4.linear.default", "aten.view.dtype", "aten.detach.default"}
    assert found.names.count("hf_mxfp4.linear.default") == 1


def test_gradients_are_never_lost():
    """The short way past the gradient's dispatch key is taken only where no gradient can be asked for."""
    packed, x = layer(), torch.randn(3, 64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not packed(x.clone().requires_grad_()).requires_grad
    assert packed(x).requires_grad  # the bias's
    packed.bias.requires_grad_(False)
    assert not packed(x).requires_grad
    packed(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, packed.weight.sum(0).expand(3, 64))
    with pytest.raises(RuntimeError, match="functorch"):  # which the operator does not support; not zeros
        torch.func.grad(lambda x: packed(x).sum())(x.detach())


# --- the tensor scale ------------------------------------------------------------------------------------------------


def assign(packed):
    packed.weight_global_scale = packed.weight_global_scale * 2


def write(packed):
    packed.weight_global_scale.mul_(2)


def replace(packed):
    packed._buffers["weight_global_scale"] = packed.weight_global_scale * 2


def load(packed, **options):
    state = packed.state_dict()
    packed.load_state_dict(state | {"weight_global_scale": state["weight_global_scale"] * 2}, **options)


CHANGES = {
    "assigned": assign,
    "written to": write,
    "replaced": replace,
    "loaded": load,
    "loaded, assigned": lambda packed: load(packed, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_tensor_scale_follows_its_buffer(change, compiled):
    """It divides, so twice as much of it halves the product."""
    packed, x = layer(), torch.randn(3, 64)
    packed.bias.data.zero_()
    torch._dynamo.reset()
    forward = torch.compile(packed, backend="eager", fullgraph=True) if compiled else packed
    with torch.no_grad():
        before = forward(x)
        CHANGES[change](packed)
        if compiled and change == "written to":
            packed.prepare()  # what the docstring asks for
        assert torch.equal(forward(x), before / 2)
        assert torch.equal(packed(x), before / 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_copies_have_a_tensor_scale_of_their_own(copied):
    packed = layer()
    packed(torch.randn(3, 64))
    other = copied(packed)
    scale = packed.quantized.global_scale.clone()
    other.weight_global_scale = other.weight_global_scale * 2
    assert other.quantized.global_scale == scale / 2 and packed.quantized.global_scale == scale


def test_the_tensor_scale_is_on_its_buffers_device():
    packed = layer()
    packed(torch.randn(3, 64))
    assert packed.to("meta").quantized.global_scale.device.type == "meta"
    empty = packed.to_empty(device="cpu")
    empty.load_state_dict(layer().state_dict())
    assert empty.quantized.global_scale == 1 / empty.weight_global_scale[0]


def test_inference_mode_keeps_nothing_that_training_cannot_use():
    packed, x = layer(), torch.randn(3, 64)
    packed._tensor_scales.clear()
    with torch.inference_mode():
        packed(x)
    packed(x.requires_grad_()).sum().backward()
    assert x.grad.isfinite().all()
    with torch.inference_mode():
        made = layer()
        made.weight_global_scale.mul_(2)
        assert made.quantized.global_scale == 1 / made.weight_global_scale[0]


# --- launches --------------------------------------------------------------------------------------------------------


def test_launches_are_tritons_own(tmp_path):
    """Of compiled kernels that were kept: the same kernel and arguments as triton itself would launch."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    script = Path(__file__).with_name("launch_target.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same 48\n"


READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's graphs are captured by scripts/gpu_check.py")
@pytest.mark.parametrize("name", ["linear", "corrected", "W4A4", "in chunks", "grouped", "experts"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_the_host_reads_no_values(name, format, monkeypatch):
    """Forward and backward only launch: a CUDA graph can hold them. (Kernels are left out, their host code is not.)"""
    triton = pytest.importorskip("triton")
    fmt, extra = FORMATS[format], {}

    def weight(*shape, **options):
        return random_weight(*shape, fmt=fmt, device="cpu", **options)

    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(3, 32, requires_grad=True)
    if name == "grouped":
        extra = {"offsets": torch.tensor([0, 1, 1, 5], dtype=torch.int32), "weight": weight(3, 32, 64), "bias": bias}
        run = partial(ops.grouped_linear, backend="triton")
    elif name == "experts":
        run = FP4Experts(3, 64, 32, format=fmt, act_fn=torch.nn.SiLU(), backend="triton")
        run.load_projection("gate_up_proj", weight(3, 64, 64))
        run.load_projection("down_proj", weight(3, 64, 32))
        extra = {"top_k_index": torch.tensor([[0, 2]] * 5), "top_k_weights": torch.rand(5, 2)}
    else:
        corrections = {"macro": fmt is MXFP4, "outliers": 0.05} if name == "corrected" else {}
        rounded = {"activation_format": "same"} if name == "W4A4" else {}
        run = FP4Linear.from_quantized(weight(24, 64, **corrections), bias[0, :24], backend="triton", **rounded)
    if name == "in chunks":
        run.backend = "auto"
        for setting in ("FUSED_TOKENS", "FUSED_TOKENS_GRAD"):
            monkeypatch.setattr(dispatch, setting, 1)
        monkeypatch.setattr(dispatch, "use_kernels", lambda *_: True)
        monkeypatch.setitem(dispatch.CHUNK_WEIGHTS, "cpu", 8 * 64)
    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)

    def fail(*_, **__):
        raise AssertionError("the host waits for a value")

    for method in READS:
        monkeypatch.setattr(torch.Tensor, method, fail)
    out = run(x, **extra)
    out.backward(torch.ones_like(out))


# --- whole models ----------------------------------------------------------------------------------------------------


def graph_of(model, **options):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(options.pop("backend", "eager"))
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("name, format", [("qwen3", "nvfp4"), ("qwen3_moe", "nvfp4"), ("mixtral", "mxfp4")])
def test_a_model_is_one_graph(name, format):
    """No break, equal logits, and no other graph for other tokens or another number of them."""
    model = case(name, format).model
    compiled, counter = graph_of(model, dynamic=True)
    with torch.no_grad():
        for rows, length in ((2, 7), (3, 11), (2, 5)):
            ids = tokens(rows, length)
            found = compiled(ids, use_cache=False).logits
            assert torch.equal(found, model(ids, use_cache=False).logits)
    assert counter.frame_count == 1


def test_layers_share_a_graph():
    """Compiled layer by layer, layers of one shape have one graph between them."""
    first, others = layer(), [layer() for _ in range(12)]
    compiled, counter = graph_of(FP4Linear.forward)
    x = torch.randn(3, 64)
    with torch.no_grad():
        for packed in (first, *others):
            assert torch.equal(compiled(packed, x), packed(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_training_is_one_graph(name):
    """Through AOT autograd, gradients of the embeddings included."""
    model = copy.deepcopy(case(name).model)
    model.model.layers = model.model.layers[:1]  # tracing takes long
    compiled, counter = graph_of(model, backend="aot_eager", dynamic=True)
    graphs = []
    for length in (7, 9):
        ids, found = tokens(2, length), []
        for forward in (compiled, model):
            model.zero_grad()
            forward(ids, labels=ids, use_cache=False).loss.backward()
            found.append(model.model.embed_tokens.weight.grad.clone())
        graphs.append(counter.frame_count)
        # AOT autograd computes norms and the loss by other formulas, rounded to bfloat16 in other places.
        torch.testing.assert_close(*found, rtol=0, atol=2**-5 * found[1].abs().max().item())
    assert graphs[0] == graphs[1]  # torch (2.13) may begin anew within the first call: 1 or 2


def test_static_cache_generation():
    """transformers' way to compiled decoding: one graph for the prompt, one for all steps after it."""
    model = case("qwen3").model
    ids = tokens(1, 6)
    options = dict(max_new_tokens=6, do_sample=False, cache_implementation="static", disable_compile=True)
    expected = model.generate(ids, **options)
    torch._dynamo.reset()
    plain, counter = model.forward, torch._dynamo.testing.CompileCounterWithBackend("eager")
    try:
        model.forward = torch.compile(plain, backend=counter, fullgraph=True)
        assert torch.equal(model.generate(ids, **options), expected)
    finally:
        del model.forward
    assert counter.frame_count <= 3


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor_takes_a_model():
    """The mode that uses CUDA graphs on a GPU; here what it compiles for a CPU."""
    model, ids = case("qwen3_moe").model, tokens(1, 7)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        found, expected = (forward(ids, use_cache=False).logits for forward in (compiled, model))
    # Norms and activations in other places in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-5 * expected.abs().max().item())
