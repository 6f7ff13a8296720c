# SPDX-License-Identifier: Apache-2.0
"""FP4Experts against transformers' own experts modules, run with the dequantized weights."""

import copy
import io
import math
import re
from types import SimpleNamespace

import pytest
import torch
from tiny_models import MIXTURES, case, outputs, tiny_model, tokens
from torch import nn
from transformers.integrations.moe import use_experts_implementation

import hf_mxfp4
from hf_mxfp4 import MXFP4, NVFP4, FP4Config, FP4Experts
from hf_mxfp4.activations import Activation
from hf_mxfp4.quantization import fake_quantize

every_format = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
E, H, I = 4, 64, 32  # noqa: E741  (the names in the shapes of every experts module)


def pack(experts: nn.Module, format, **options) -> FP4Experts:
    """A packed stand-in, and in `experts` the weights it holds."""
    packed = FP4Experts.from_experts(experts, format, **options)
    for name in packed.shapes:
        weight = getattr(experts, name).detach()
        weight = weight.transpose(1, 2) if experts.is_transposed else weight
        packed.load_projection(name, hf_mxfp4.quantize(weight, FP4Config(format=format.name)))
        with torch.no_grad():
            getattr(experts, name).copy_(packed.dequantized(name))
    return packed.train(experts.training)


def pair(name: str, format, **options) -> tuple[nn.Module, FP4Experts]:
    """The experts of a tiny float32 model, with dequantized weights, and packed."""
    model = tiny_model(name, torch.float32)
    experts = next(module for path, module in model.named_modules() if path.endswith(".experts"))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.3)  # outputs of the size of 1
    experts.config._experts_implementation = "eager"
    return experts, pack(experts, format, **options)


def routing(experts: nn.Module, rows: int, seed: int = 3, used: int | None = None):
    """Tokens, expert ids (only the first `used` experts) and weights."""
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(rows, width, generator=generator)
    scores = torch.rand(rows, used or experts.num_experts, generator=generator)
    weights, index = scores.softmax(-1).topk(2, -1)
    return x, index, weights


def close(found: torch.Tensor, expected: torch.Tensor):
    """float32 sums in another order (K <= 256 products, twice, then two experts): 1e-5 of the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", MIXTURES)
@every_format
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_equal_to_the_original(name, format, rows):
    experts, packed = pair(name, format)
    inputs = routing(experts, rows)
    expected = experts(*inputs)
    assert expected.abs().max() > 0.1
    out = packed(*inputs)
    assert out.dtype == torch.float32
    close(out, expected)


@pytest.mark.parametrize("name", MIXTURES)
@every_format
def test_gradients(name, format):
    experts, packed = pair(name, format)
    found = [t.clone().requires_grad_(t.is_floating_point()) for t in routing(experts, 9)]
    expected = [t.clone().requires_grad_(t.is_floating_point()) for t in routing(experts, 9)]
    up = torch.randn(9, experts.down_proj.shape[1 if not experts.is_transposed else 2])
    biases = {name: p for name, p in experts.named_parameters() if name.endswith("_bias")}
    own = dict(packed.named_parameters())
    assert own.keys() == biases.keys()
    packed(*found).backward(up)
    bias_grads = {name: p.grad.clone() for name, p in own.items()}
    for parameter in experts.parameters():
        parameter.grad = None  # the biases are the same parameters
    experts(*expected).backward(up)
    close(found[0].grad, expected[0].grad)
    close(found[2].grad, expected[2].grad)
    for key, parameter in biases.items():
        close(bias_grads[key], parameter.grad)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@every_format
def test_routing_corners(name, format):
    experts, packed = pair(name, format)
    x, index, weights = routing(experts, 12, used=2)
    assert set(index.flatten().tolist()) == {0, 1}  # two experts get no token
    close(packed(x, index, weights), experts(x, index, weights))

    assert packed(x[:0], index[:0], weights[:0]).shape == (0, x.shape[1])
    same = torch.zeros_like(index)  # one expert twice for every token
    close(packed(x, same, weights), experts(x, same, weights))
    only_last = torch.full_like(index[:, :1], packed.num_experts - 1)
    close(packed(x, only_last, weights[:, :1]), experts(x, only_last, weights[:, :1]))
    close(packed(x, index.to(torch.int32), weights), packed(x, index, weights))
    wide = torch.stack([x, -x], 1)[:, 0]
    assert not wide.is_contiguous()
    close(packed(wide, index, weights), packed(x, index, weights))
    close(packed(x.view(3, 4, -1), index, weights).view(12, -1), packed(x, index, weights))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@every_format
@pytest.mark.parametrize("sentinel", [0, 1, 100])
def test_sentinels_contribute_nothing(name, format, sentinel):
    """Expert-parallel sentinels: ids >= num_experts, here with weights that must not count."""
    experts, packed = pair(name, format)
    x, index, weights = routing(experts, 8)
    away = torch.rand(index.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    away[0], away[1] = True, False
    marked = torch.where(away, packed.num_experts + sentinel, index)
    expected = experts(x, index, torch.where(away, 0, weights))
    found = packed(x, marked, torch.where(away, 7.0, weights))
    close(found, expected)
    assert not found[0].any()
    none = packed(x, torch.full_like(index, packed.num_experts + sentinel), weights)
    assert none.shape == x.shape and not none.any()
    x.requires_grad_()
    packed(x, marked, weights).sum().backward()
    assert torch.isfinite(x.grad).all() and not x.grad[0].any() and x.grad[1].any()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(name, dtype):
    """Each activation dtype; routing weights may be float32. A few roundings to that dtype, each relative."""
    experts, packed = pair(name, NVFP4)
    x, index, weights = routing(experts, 9)
    expected = experts(x, index, weights)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-5}[dtype] * expected.abs().max().item()
    for routing_dtype in (dtype, torch.float32):
        out = packed(x.to(dtype), index, weights.to(routing_dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_autocast_and_compute_dtype(name):
    experts, packed = pair(name, NVFP4)
    _, other = pair(name, NVFP4, compute_dtype=torch.bfloat16)
    x, index, weights = routing(experts, 9)
    expected = packed(x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        cast = packed(x, index, weights)
    computed = other(x, index, weights)
    for out in (cast, computed):
        assert out.dtype == torch.float32 and not torch.equal(out, expected)
        torch.testing.assert_close(out, expected, rtol=0, atol=3e-2 * expected.abs().max().item())


def test_inference_mode_then_gradients():
    experts, packed = pair("qwen3_moe", NVFP4)
    x, index, weights = routing(experts, 5)
    with torch.inference_mode():
        first = packed(x, index, weights)
    x.requires_grad_()
    second = packed(x, index, weights)
    second.sum().backward()
    assert torch.equal(first, second) and x.grad.any()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@every_format
def test_casts_copies_and_meta(name, format):
    experts, packed = pair(name, format)
    inputs = routing(experts, 5)
    expected = packed(*inputs)
    before = {key: (b.dtype, b.view(torch.uint8).clone()) for key, b in packed.named_buffers()}
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    half = copy.deepcopy(packed).half()
    assert half.dtype == torch.float16 and all(p.dtype == torch.float16 for p in half.parameters())
    for other in (copy.deepcopy(packed), torch.load(file, weights_only=False), half):
        assert other.training == packed.training
        for key, buffer in other.named_buffers():
            assert buffer.dtype == before[key][0] and torch.equal(buffer.view(torch.uint8), before[key][1])
        if other is not half:
            assert torch.equal(other(*inputs), expected)
    empty = copy.deepcopy(packed).to("meta")
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert {key: b.dtype for key, b in empty.named_buffers()} == {key: dtype for key, (dtype, _) in before.items()}


def test_attributes_of_the_original():
    """What model code, transformers and PEFT look for on an experts module."""
    for name in MIXTURES:
        experts, packed = pair(name, NVFP4)
        flags = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
        assert all(getattr(packed, flag) == getattr(experts, flag) for flag in flags)
        assert getattr(packed, "act_fn", None) is getattr(experts, "act_fn", None)
        assert packed._is_expert_parallel == getattr(experts, "_is_expert_parallel", False)  # new in 5.18 or later
        assert packed.config is experts.config
        for setting in ("alpha", "limit", "hidden_dim", "intermediate_dim", "hidden_size", "intermediate_size"):
            assert getattr(packed, setting, None) == getattr(experts, setting, None)
        assert packed.dequantized("down_proj").shape == experts.down_proj.shape
        assert packed.dequantized("gate_up_proj", torch.float64).dtype == torch.float64


def test_known_gates_are_fused():
    """The layers of all these models are one operator, of the activation that the model's config names."""
    for name in MIXTURES:
        experts, packed = pair(name, NVFP4)
        limit, alpha = getattr(experts, "limit", math.inf), getattr(experts, "alpha", 1.0)
        expected = Activation("silu", alpha, limit, float(name == "gpt_oss"), name == "gpt_oss")
        assert packed.activation == expected
        found = [node.target for node in operators(packed, *routing(experts, 3)) if "hf_mxfp4" in str(node.target)]
        assert [str(target) for target in found] == ["hf_mxfp4.experts.default"]


def operators(module: nn.Module, *inputs) -> list:
    """The operators that a forward runs."""
    graph = torch.export.export(module, inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_rounded_activations_take_their_own_path(name):
    """W4A4: the input of each projection is rounded, which the fused layer does not do."""
    experts, packed = pair(name, NVFP4, activation_format="same")
    x, index, weights = routing(experts, 9)
    found = packed(x, index, weights)
    packed.activation_format = None
    assert not torch.equal(packed(x, index, weights), found)
    packed.activation_format, rounded = "same", fake_quantize(x, NVFP4)
    close(packed(rounded, index, weights), found)  # rounding twice changes nothing


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm", "sonicmoe", None])
def test_experts_implementation_does_not_apply(implementation):
    """transformers' functions read dense weights: a packed model is the same under any of their names."""
    model = case("qwen3_moe").load()
    expected = outputs(model)
    if implementation is not None:
        model.config._experts_implementation = implementation
        assert torch.equal(outputs(model), expected)
    loaded = case("qwen3_moe").load(**({"experts_implementation": implementation} if implementation else {}))
    assert torch.equal(outputs(loaded), expected)


def make_experts(parts: dict, **flags) -> nn.Module:
    """An experts module of one's own, as models declare them."""

    class TinyExperts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = E, torch.relu
            for name, shape in parts.items():
                setattr(self, name, nn.Parameter(torch.randn(shape) * 0.1))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError

    return use_experts_implementation(**flags)(TinyExperts)(SimpleNamespace(_experts_implementation="eager"))


LAYOUTS = {
    "no gate": ({"up_proj": (E, I, H), "down_proj": (E, H, I)}, {"has_gate": False}),
    "transposed": ({"gate_up_proj": (E, H, 2 * I), "down_proj": (E, I, H)}, {"is_transposed": True}),
    "biases": (
        {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "gate_up_proj_bias": (E, 2 * I)}
        | {"down_proj_bias": (E, H)},
        {"has_bias": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_format
def test_layouts_no_tiny_model_has(layout, format):
    parts, flags = LAYOUTS[layout]
    experts = make_experts(parts, **flags)
    assert FP4Experts.unsupported_reason(experts) is None
    packed = pack(experts, format)
    x, index, weights = torch.randn(6, H), torch.randint(0, E, (6, 2)), torch.rand(6, 2)
    expected = torch.zeros(6, H)
    for token in range(6):
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            first, down = (getattr(experts, name)[expert] for name in packed.shapes)
            first, down = (first.T, down.T) if experts.is_transposed else (first, down)
            hidden = first @ x[token] + (experts.gate_up_proj_bias[expert] if experts.has_bias else 0)
            hidden = torch.relu(hidden[:I]) * hidden[I:] if experts.has_gate else torch.relu(hidden)
            hidden = down @ hidden + (experts.down_proj_bias[expert] if experts.has_bias else 0)
            expected[token] += weight * hidden
    close(packed(x, index, weights), expected)


def test_what_is_not_understood():
    """Layouts that would be computed wrongly are named, not packed."""
    parts = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
    for changed, flags, reason in (
        ({**parts, "extra": (E, H)}, {}, r"has parameters \['down_proj', 'extra', 'gate_up_proj'\], expected"),
        ({"down_proj": (E, H, I)}, {}, "has parameters"),
        (parts, {"has_bias": True}, "has parameters"),
        ({"gate_up_proj": (2 * I, H), "down_proj": (H, I)}, {}, "not stacks of matrices"),
    ):
        assert re.search(reason, FP4Experts.unsupported_reason(make_experts(changed, **flags)))
    normalized = make_experts(parts)
    normalized.has_post_expert_norm = True  # an argument of `use_experts_implementation` in later versions
    assert "normalizes after each expert" in FP4Experts.unsupported_reason(normalized)
    bare = nn.Module()
    bare.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * I, H))
    assert "does not say how its weights are laid out (no has_gate" in FP4Experts.unsupported_reason(bare)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compile(name):
    experts, packed = pair(name, NVFP4)
    packed.requires_grad_(False)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for rows in (2, 5):
        x, index, weights = routing(experts, rows)
        x.requires_grad_()
        out = compiled(x, index, weights)
        close(out, packed(x, index, weights))
        out.sum().backward()
        assert x.grad.any()


def test_compile_whole_model():
    """A tiny Qwen3, compiled without graph breaks."""
    model = case("qwen3").load()
    expected = outputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * expected.abs().max().item())  # bfloat16
