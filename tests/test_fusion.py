# SPDX-License-Identifier: Apache-2.0
"""Fused projections: fewer products, and in every other respect the model that is not fused."""

import contextlib
import copy
import gc
import io
import logging
import pickle
import threading
import weakref

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from tiny_models import (
    DENSE,
    MIXTURES,
    assert_same_tensors,
    case,
    outputs,
    packed_modules,
    saved_bytes,
    tokens,
)
from torch import nn

import hf_mxfp4
from hf_mxfp4 import FP4Config, FP4Linear, ops
from hf_mxfp4.formats import MXFP4, NVFP4
from hf_mxfp4.fusion import FusedLinear, Siblings, fuse_projections, unfuse_projections

K = 96
SIZES = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
every_format = pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda fmt: fmt.name)


class Attention(nn.Module):
    """Three linears; `calls` says which read what, in which order."""

    def __init__(self, bias=False, format=NVFP4, outliers=0.0, **options):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(sum(SIZES.values()), K, generator=generator)
        joined = hf_mxfp4.quantize(weights, FP4Config(format=format.name, macro_block=options.pop("macro", None)))
        if outliers:
            recipe = FP4Config(format=format.name).recipe()
            joined = recipe.quantize(weights, keep=torch.rand(weights.shape, generator=generator) < outliers)
        for (name, size), part in zip(SIZES.items(), joined.split([*SIZES.values()]), strict=True):
            b = torch.randn(size, generator=generator) if bias else None
            self.add_module(name, FP4Linear.from_quantized(part, b, **options))
        self.calls = lambda x: [self.q_proj(x), self.k_proj(x), self.v_proj(x)]

    def forward(self, x):
        return self.calls(x)


class Plain(Attention):
    """The same with nothing but modules in it, so that it can be copied and compiled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        del self.calls

    def calls(self, x):
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


def pair(**options) -> tuple[Plain, Plain]:
    """The same attention apart and fused."""
    apart, fused = Plain(**options), Plain(**options)
    fuse_projections(fused)
    assert is_fused(fused) and not is_fused(apart)
    return apart, fused


def is_fused(module: nn.Module) -> bool:
    found = [m for m in module.modules() if isinstance(m, FusedLinear)]
    return bool(found) and all(m.siblings.weight is not None and not m.siblings.off for m in found)


def assert_nothing_held(module: nn.Module):
    for m in module.modules():
        assert not isinstance(m, FusedLinear) or m.siblings.held is None


@contextlib.contextmanager
def counted():
    """A list that gets the number of rows of every product."""
    rows, real = [], ops.linear

    def linear(x, weight, *args, **kwargs):
        rows.append(weight.shape[0])
        return real(x, weight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "linear", linear)
        yield rows


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the order of the sums, which may depend on how many rows are computed together."""
    bound = (1e-5 if a.dtype == torch.float32 else 2e-2) * b.abs().max().item() if b.numel() else 0
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=bound)


def same(found: list, expected: list) -> bool:
    return all(near(a, b) for a, b in zip(found, expected, strict=True))


# --- models ----------------------------------------------------------------------------------------------------------

PRODUCTS = {  # apart and fused, for two layers; experts not counted
    **{"qwen3": (14, 8), "llama": (14, 8), "bert": (12, 8), "qwen3_moe": (8, 4), "mixtral": (8, 4)},
    **{"olmoe": (8, 4), "deepseek_v3": (16, 12), "gpt_oss": (8, 4)},
}


@every_format
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_models(name, format, tmp_path):
    """Equal logits from fewer products; the same tensors, sizes and files; and all of it undone."""
    this = case(name, format.name)
    model = this.load(quantization_config=FP4Config(fuse_projections=True))
    assert is_fused(model)
    for wanted, products in zip((this.model, model), PRODUCTS[name], strict=True):
        with counted() as rows:
            logits = outputs(wanted)
        assert len(rows) == products
    assert near(logits, outputs(this.model)) and is_fused(model)
    assert_nothing_held(model)
    assert_same_tensors(model.state_dict(), this.model.state_dict())
    assert model.get_memory_footprint() == this.model.get_memory_footprint()
    assert model.num_parameters() == this.model.num_parameters()
    assert saved_bytes(model, tmp_path) == saved_bytes(this.model, tmp_path / "apart")
    unfuse_projections(model)
    assert not is_fused(model) and torch.equal(outputs(model), outputs(this.model))
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert_same_tensors(model.state_dict(), this.model.state_dict())


@pytest.mark.parametrize("fields", [{}, {"outlier_fallback": 0.02}, {"macro_block": "search"}], ids=str)
def test_quantized_on_load(fields, tmp_path):
    this = case("qwen3", "mxfp4")
    apart, fused = this.quantize(**fields), this.quantize(fuse_projections=True, **fields)
    assert is_fused(fused) and near(outputs(fused), outputs(apart))
    assert saved_bytes(fused, tmp_path) == saved_bytes(apart, tmp_path / "apart")
    assert not is_fused(this.load())  # the option is not stored


def test_memory_is_not_doubled():
    """Members' packed tensors are rows of the joined ones; those of before are gone."""
    attention = Plain(outliers=0.1)
    before = weakref.ref(attention.q_proj.weight_packed.untyped_storage())
    size = sum(buffer.nbytes for buffer in attention.buffers())
    fuse_projections(attention)
    gc.collect()
    assert before() is None
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in attention.buffers()}
    assert sum(storages.values()) == size
    packed = attention.q_proj.siblings.weight.packed
    assert packed.untyped_storage().data_ptr() == attention.v_proj.weight_packed.untyped_storage().data_ptr()
    unfuse_projections(attention)
    assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in attention.buffers())


def test_generate_and_dequantize():
    this = case("llama")
    model = this.load(quantization_config=FP4Config(fuse_projections=True), dtype=torch.float32)
    kwargs = dict(max_new_tokens=6, do_sample=False)
    expected = this.load(dtype=torch.float32).generate(tokens(), **kwargs)
    assert torch.equal(model.generate(tokens(), **kwargs), expected)
    model.dequantize()
    assert not packed_modules(model)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    dense = this.load(quantization_config=FP4Config(fuse_projections=True, dequantize=True), dtype=torch.float32)
    assert torch.equal(outputs(dense), outputs(model))


def test_the_config():
    assert FP4Config().fuse_projections is False
    assert "fuse_projections" not in FP4Config(fuse_projections=True).to_dict()
    with pytest.raises(ValueError, match="fuse_projections='yes' is not a bool"):
        FP4Config(fuse_projections="yes")


# --- one group -------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"outliers": 0.05},
        {"compute_dtype": torch.float32, "bias": True},
        {"activation_format": "same"},
        {"backend": "triton"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1,), (2, 5), (0, 3), ()], ids=str)
def test_one_product(format, options, shape):
    apart, fused = pair(format=format, **options)
    x = torch.randn(*shape, K)
    with torch.no_grad(), counted() as rows:
        found = fused(x)
        assert rows == [sum(SIZES.values())]
        assert same(found, apart(x)) and [out.shape for out in found] == [(*shape, n) for n in SIZES.values()]
    assert_nothing_held(fused)
    assert is_fused(fused)


def test_macro_factors():
    apart, fused = pair(format=MXFP4, macro="search")
    x = torch.randn(3, K)
    assert same(fused(x), apart(x)) and fused.q_proj.siblings.weight.macro is not None


@pytest.mark.parametrize("order", ["qkv", "vqk", "kvq"])
def test_any_order(order):
    apart, fused = Attention(), Attention()
    fuse_projections(fused)
    for one in (apart, fused):
        one.calls = lambda x, one=one: [getattr(one, f"{letter}_proj")(x) for letter in order]
    x = torch.randn(2, K)
    with counted() as rows:
        assert same(fused(x), apart(x))
    assert len(rows) == 4 and is_fused(fused)


def _twice(m, x):
    return [m.q_proj(x), m.q_proj(x), m.k_proj(x), m.v_proj(x)]


def _changed(m, x):
    x = x.clone()
    q = m.q_proj(x)
    return [q, m.k_proj(x.mul_(2)), m.v_proj(x)]


def _equal_but_another(m, x):
    return [m.q_proj(x), m.k_proj(x.clone()), m.v_proj(x.clone() + 1)]


def _cross(m, x):
    y = x.flip(0)
    return [m.q_proj(x), m.k_proj(y), m.v_proj(y)]


def _autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        q = m.q_proj(x)
    return [q, m.k_proj(x), m.v_proj(x)]


def _outputs_changed(m, x):
    q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
    q.zero_()
    return [q, k.mul_(2), v]


def _inference(m, x):
    with torch.inference_mode():
        q = m.q_proj(x)
    k = m.k_proj(x)
    assert not k.is_inference()
    return [q, k, m.v_proj(x)]


def _chunks(m, x):
    return [out for part in x.chunk(2) for out in (m.q_proj(part), m.k_proj(part), m.v_proj(part))]


ODD = [_twice, _changed, _equal_but_another, _cross, _autocast, _outputs_changed, _inference, _chunks]


@pytest.mark.parametrize("calls", ODD, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_odd_parents(calls, mode):
    """Whatever a parent does with its members, it gets what it would get from them apart."""
    apart, fused = Attention(bias=True), Attention(bias=True)
    fuse_projections(fused)
    for one in (apart, fused):
        one.calls = lambda x, one=one: calls(one, x)
        one.requires_grad_(False)
    x = torch.randn(4, K)
    with mode():
        for _ in range(2):
            assert same(fused(x), apart(x))
    assert_nothing_held(fused)


def test_chunks_stay_fused():
    fused = Attention()
    fuse_projections(fused)
    fused.calls = lambda x: _chunks(fused, x)
    with counted() as rows:
        fused(torch.randn(4, K))
    assert rows == [128, 128]


@pytest.mark.parametrize("calls", [lambda m, x: [m.q_proj(x)], _cross], ids=["q only", "cross-attention"])
def test_a_parent_that_does_not_call_all(calls, caplog):
    """Its members' rows are computed in vain once; then it is said, and they go apart."""
    fused = Attention()
    fuse_projections(fused)
    fused.calls = lambda x: calls(fused, x)
    with caplog.at_level(logging.INFO, "hf_mxfp4"), counted() as rows:
        fused(torch.randn(2, K))
        assert rows.count(128) == 1 and "(q_proj, k_proj, v_proj): not fused any more" in caplog.text
        rows.clear()
        fused(torch.randn(2, K))
        assert 128 not in rows


def test_outside_of_the_parent():
    apart, fused = pair()
    x = torch.randn(2, K)
    with counted() as rows:
        assert torch.equal(fused.k_proj(x), apart.k_proj(x))
    assert rows == [32, 32]


def test_nothing_stays_alive():
    """Neither the input nor outputs nobody took outlive the forward, even one that fails."""
    fused = Attention()
    fuse_projections(fused)
    fused.calls = lambda x: [fused.q_proj(x)]
    x = torch.randn(2, K)
    seen = weakref.ref(x)
    kept = fused(x)
    del x
    assert seen() is None and len(kept) == 1
    fused = Attention()
    fuse_projections(fused)

    def fail(x):
        fused.q_proj(x)
        raise RuntimeError("on purpose")

    fused.calls = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        fused(torch.randn(2, K))
    assert_nothing_held(fused)
    assert is_fused(fused)


def test_hooks_on_members():
    apart, fused = pair()
    for one in (apart, fused):
        one.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        one.v_proj.register_forward_hook(lambda module, args, out: out.neg_())
    x = torch.randn(2, K)
    assert same(fused(x), apart(x)) and same(fused(x), apart(x))


def test_threads():
    apart, fused = pair()
    xs = [torch.randn(2, K) for _ in range(4)]
    expected, wrong = [apart(x) for x in xs], []

    def work(number):
        for _ in range(50):
            if not same(fused(xs[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert_nothing_held(fused)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["x", "bias", "both"])
def test_gradients(of):
    apart, fused = pair(bias=True)
    x = torch.randn(3, K)
    grads = []
    for one in (apart, fused):
        one.requires_grad_(of != "x")
        y = x.clone().requires_grad_(of != "bias")
        sum((out * out).sum() for out in one(y)).backward()
        grads.append([y.grad, *(parameter.grad for parameter in one.parameters())])
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert_nothing_held(fused)


def test_outputs_are_independent():
    """One may be written to while another is kept for a gradient."""
    q, k, _ = pair()[1](torch.randn(2, K))
    factor = torch.ones(32, requires_grad=True)
    loss = (k * factor).sum()
    q.zero_()
    loss.backward()
    assert torch.equal(factor.grad, k.sum(0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    this = case("llama")
    grads = []
    for model in (this.load(), this.load(quantization_config=FP4Config(fuse_projections=True))):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens(), labels=tokens()).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert_nothing_held(model)
    assert_same_tensors(*grads)


# --- moved, loaded, copied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@every_format
def test_casts_and_moves(format, outliers):
    apart, fused = pair(format=format, bias=True, outliers=outliers)
    x = torch.randn(2, K)
    for cast in (nn.Module.half, nn.Module.float, lambda m: m.to(torch.bfloat16), nn.Module.share_memory):
        pointer = fused.v_proj.weight_packed.data_ptr()
        for one in (apart, fused):
            cast(one)
        assert is_fused(fused) and same(fused(x.to(fused.q_proj.dtype)), apart(x.to(apart.q_proj.dtype)))
        assert cast is nn.Module.share_memory or fused.v_proj.weight_packed.data_ptr() == pointer
    state = {name: value.clone() for name, value in fused.state_dict().items()}
    fused.to("meta")
    assert not is_fused(fused)
    fused.to_empty(device="cpu").load_state_dict(state)
    with torch.no_grad(), counted() as rows:
        assert same(fused(x.bfloat16()), apart(x.bfloat16())) and rows[0] == 128


@pytest.mark.parametrize("assign", [False, True])
@every_format
def test_load_state_dict(format, assign):
    apart, fused = pair(format=format)
    other = Plain(format=format)
    for module in other.children():
        module.load_state_dict(
            FP4Linear.from_quantized(
                hf_mxfp4.quantize(7 * torch.randn(module.out_features, K), FP4Config(format=format.name))
            ).state_dict()
        )
    if format.has_global_scale:
        for module in other.children():
            module.weight_global_scale.fill_(0.25)
    fused.load_state_dict(other.state_dict(), assign=assign)
    x = torch.randn(2, K)
    with counted() as rows:
        assert same(fused(x), other(x)) and rows[0] == 128
    if format.has_global_scale:  # one scale for all is no longer true
        other.v_proj.weight_global_scale.mul_(3)
        fused.load_state_dict(other.state_dict(), assign=assign)
        assert same(fused(x), other(x)) and not is_fused(fused)


def test_buffers_put_in_place_by_hand():
    """Another buffer, one written to, a dense copy swapped in for one call: never the rows of before."""
    for change in (
        lambda m: setattr(m.k_proj, "weight_packed", m.k_proj.weight_packed.flip(0).contiguous()),
        lambda m: m.k_proj.weight_packed.copy_(m.k_proj.weight_packed.flip(0)),
        lambda m: m.k_proj.weight_global_scale.mul_(2),
        lambda m: m.q_proj.weight_global_scale.mul_(2),
        lambda m: setattr(m, "v_proj", copy.deepcopy(m.q_proj)),
        lambda m: (setattr(m, "k_proj", copy.copy(m.k_proj)), m.k_proj.weight_packed.zero_()),
        lambda m: setattr(m.q_proj, "bias", None),
        lambda m: setattr(m.q_proj.bias, "data", m.q_proj.bias.data + 1),
    ):
        apart, fused = pair(bias=True)
        x = torch.randn(2, K)
        with torch.no_grad():
            before = fused(x)
            for one in (apart, fused):
                change(one)
            assert same(fused(x), apart(x)) and not same(fused(x), before)


@pytest.mark.parametrize("change", [{"compute_dtype": torch.float64}, {"activation_format": "same"}], ids=str)
def test_settings_changed_by_hand(change):
    """A member that is set to compute otherwise does, and joins in again once it is set back."""
    apart, fused = pair()
    x, ((name, value),) = torch.randn(3, K), change.items()
    with torch.no_grad():
        for module in (apart, fused):
            setattr(module.k_proj, name, value)
        assert not is_fused(fused) and same(fused(x), apart(x))
        for module in (apart, fused):
            setattr(module.k_proj, name, None)
        assert is_fused(fused) and same(fused(x), apart(x))


def test_vmap():
    apart, fused = pair()
    x = torch.randn(3, K)
    with torch.no_grad():
        assert same([*torch.func.vmap(fused)(x)], apart(x)) and is_fused(fused)


def test_functional_call():
    apart, fused = pair()
    state = {name: value.clone() for name, value in apart.state_dict().items()}
    state["k_proj.weight_packed"] = state["k_proj.weight_packed"].flip(0)
    x = torch.randn(2, K)
    found, expected = (torch.func.functional_call(one, state, (x,)) for one in (fused, apart))
    assert same(found, expected) and not same(found, apart(x))
    assert same(fused(x), apart(x)) and is_fused(fused)


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
@every_format
def test_copies(format, outliers, how):
    apart, fused = pair(format=format, outliers=outliers)
    other = how(fused)
    x = torch.randn(2, K)
    with counted() as rows:
        assert same(other(x), apart(x)) and rows[0] == 128
    assert other.q_proj.siblings.members == tuple(other.children())
    assert_same_tensors(other.state_dict(), apart.state_dict())
    other.k_proj.weight_packed.zero_()
    assert same(fused(x), apart(x)) and not same(other(x), apart(x))
    unfuse_projections(other)
    assert is_fused(fused) and not other._forward_hooks and fused._forward_hooks


def test_a_pickle_is_no_larger():
    apart, fused = pair()
    assert len(pickle.dumps(fused)) < len(pickle.dumps(apart)) + 3000


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_of_one_member(how):
    apart, fused = pair()
    one = how(fused.k_proj)
    x = torch.randn(2, K)
    assert torch.equal(one(x), apart.k_proj(x)) and same(fused(x), apart(x)) and is_fused(fused)
    one.weight_packed.zero_()
    assert not one(x).any() and same(fused(x), apart(x))


def test_a_model_copied_and_moved():
    this = case("llama")
    model = copy.deepcopy(this.load(quantization_config=FP4Config(fuse_projections=True)))
    with counted() as rows:
        assert near(outputs(model), outputs(this.model))
    assert len(rows) == 8 + 14


# --- accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate_hooks():
    """Hooks that only send inputs to a device leave siblings fused; offloaded ones go apart."""
    this = case("llama")
    model = this.load(device_map={"": "cpu"}, quantization_config=FP4Config())
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0].mlp.up_proj, "_hf_hook")
    fuse_projections(model)
    with counted() as rows:
        assert near(outputs(model), outputs(this.model))
    assert len(rows) == 8 + 14
    unfuse_projections(model)
    with counted() as rows:
        outputs(model)
    assert len(rows) == 14
    remove_hook_from_submodules(model)
    fuse_projections(model)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    with counted() as rows:
        assert near(outputs(model), outputs(this.model))
    assert len(rows) == 14 + 14


def test_offloaded_models_stay_apart(tmp_path, caplog):
    this = case("llama")
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        model = this.load(
            device_map={"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
            | {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"},
            offload_folder=tmp_path,
            offload_buffers=True,
            quantization_config=FP4Config(fuse_projections=True),
        )
    assert not any(isinstance(m, FusedLinear) for m in model.model.layers[1].modules())
    assert "model.layers.1.self_attn.(q_proj, k_proj, v_proj): offloaded" in caplog.text
    assert torch.equal(outputs(model), outputs(this.model))


# --- what is left apart ----------------------------------------------------------------------------------------------


def _linear(n, k=K, format=NVFP4, scale=1.0, **options):
    weight = hf_mxfp4.quantize(scale * torch.randn(n, k), FP4Config(format=format.name))
    return FP4Linear.from_quantized(weight, **options)


def test_left_apart(caplog):
    gate = _linear(48)
    cases = {
        "they differ in format": (gate, _linear(48, format=MXFP4)),
        "they differ in in_features": (gate, _linear(48, K + 96)),
        "they differ in compute_dtype": (gate, _linear(48, compute_dtype=torch.float32)),
        "they differ in activation_format": (gate, _linear(48, activation_format="same")),
        "they differ in backend": (gate, _linear(48, backend="torch")),
        "they differ in dtype": (gate, _linear(48, dtype=torch.bfloat16)),
        "their tensors differ": (gate, _linear(48, bias=torch.zeros(48))),
        "their tensor scales differ": (gate, _linear(48, scale=100.0)),
        "offloaded": (gate, _linear(48).to("meta")),
    }
    for reason, (one, other) in cases.items():
        mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj = one, other
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_mxfp4"):
            fuse_projections(mlp)
        assert type(one) is FP4Linear and type(other) is FP4Linear
        assert f"0 groups of projections fused; left apart: (gate_proj, up_proj): {reason}" in caplog.text


def test_incomplete_groups_and_shared_members():
    attention = Plain()
    attention.k_proj = attention.v_proj
    fuse_projections(attention)
    assert not is_fused(attention)
    attention = Plain()
    attention.v_proj = nn.Linear(K, 32)
    fuse_projections(attention)
    assert not is_fused(attention)
    fuse_projections(nn.Linear(2, 2))


def test_fusing_twice():
    apart, fused = pair()
    fuse_projections(fused)
    assert len(fused._forward_hooks) == 1
    unfuse_projections(fused)
    unfuse_projections(fused)
    fuse_projections(fused)
    x = torch.randn(2, K)
    assert same(fused(x), apart(x)) and is_fused(fused)


# --- torch.compile ---------------------------------------------------------------------------------------------------


class Graphs:
    """A backend that keeps what it is given and runs it as it is."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def products(self) -> list[int]:
        return [sum("hf_mxfp4.linear" in str(node.target) for node in g.graph.nodes) for g in self.graphs]


class Block(nn.Module):
    """An attention inside something else, as in a model."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x * 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"outliers": 0.05}, {"format": MXFP4}], ids=str)
def test_compile(mode, options):
    """One graph, one product in it, and no new graph for another call, another length, or another layer."""
    apart, fused = pair(**options)
    apart.requires_grad_(False)
    fused.requires_grad_(False)
    backend = Graphs()
    blocks = [torch.compile(Block(a), fullgraph=True, backend=backend) for a in (fused, copy.deepcopy(fused))]
    with mode():
        for block in blocks:
            for length in (2, 3, 5, 2):
                x = torch.randn(length, K)
                assert same(block(x), apart(x))
    assert set(backend.products()) == {1} and len(backend.graphs) <= 3
    assert_nothing_held(fused)
    assert is_fused(fused)


@pytest.mark.parametrize("calls", [c for c in ODD if c not in (_autocast, _inference)], ids=lambda f: f.__name__[1:])
def test_compile_odd_parents(calls):
    class Odd(Plain):
        def calls(self, x):
            return calls(self, x)

    apart, fused = Odd(), Odd()
    fuse_projections(fused)
    compiled = torch.compile(Block(fused), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K)
    with torch.no_grad():
        for _ in range(3):
            assert same(compiled(x), apart(x))
            assert_nothing_held(fused)


def test_compile_then_change():
    """What changes after compiling is seen: buffers, moves, undoing."""
    apart, fused = pair()
    compiled = torch.compile(Block(fused), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, K)
    with torch.no_grad():
        assert same(compiled(x), apart(x))
        for one in (apart, fused):
            one.k_proj.weight_packed = one.k_proj.weight_packed.flip(0).contiguous()
        assert same(compiled(x), apart(x))
        for one in (apart, fused):
            one.half()
        assert same(compiled(x.half()), apart(x.half()))
        unfuse_projections(fused)
        assert same(compiled(x.half()), apart(x.half()))


def test_compile_with_gradients():
    apart, fused = pair(bias=True)
    compiled = torch.compile(Block(fused), fullgraph=True, backend="aot_eager")
    grads = []
    x = torch.randn(2, K)
    for one in (apart, compiled):
        y = x.clone().requires_grad_()
        sum((out * out).sum() for out in one(y)).backward()
        grads.append(y.grad)
    assert torch.equal(*grads)


def test_compile_a_model():
    this = case("qwen3")
    model = this.load(quantization_config=FP4Config(fuse_projections=True))
    backend = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            assert near(compiled(tokens(), use_cache=False)[0], outputs(this.model))
    assert backend.products() == [8]


def test_compiled_graphs_read_joined_weights_in_place():
    """CUDA graphs copy every input of a graph in each replay, but for those torch knows to stay where they are."""
    fused = pair()[1]
    with torch.no_grad():
        torch.compile(Block(fused), fullgraph=True, backend="eager")(torch.randn(2, K))
    weight = fused.q_proj.siblings.weight
    for tensor in (weight.packed, weight.scale, weight.global_scale):
        assert torch._dynamo.utils.get_static_address_type(tensor) is not None


# --- adapters --------------------------------------------------------------------------------------------------------


def test_an_adapted_group_is_unfused(caplog):
    """As PEFT wraps a layer, of whatever method: it becomes `base_layer`. All of its group are then plain again."""

    class Adapter(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

    caplog.set_level(logging.INFO, "hf_mxfp4.fusion")
    plain, fused = pair()
    x = torch.randn(3, K)
    nn.Sequential(fused.k_proj)
    assert is_fused(fused) and "not fused any more" not in caplog.text
    fused.k_proj = Adapter(fused.k_proj)
    assert not is_fused(fused) and "(q_proj, k_proj, v_proj): not fused any more" in caplog.text
    fused.k_proj = fused.k_proj.base_layer
    assert all(near(one, two) for one, two in zip(fused(x), plain(x), strict=True))
    for member in (fused.q_proj, fused.k_proj, fused.v_proj):
        assert member.weight_packed.untyped_storage().nbytes() == member.weight_packed.nbytes
    Adapter(nn.Linear(2, 2)), Adapter(Plain().q_proj)


def test_peft_unfuses_what_it_adapts():
    peft = pytest.importorskip("peft")
    this = case("llama")
    for targets, left in (
        ("all-linear", 0),
        (["q_proj"], 2),
        (["up_proj", "o_proj"], 2),
        (["o_proj", "down_proj"], 4),
    ):
        config = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(this.load(quantization_config=FP4Config(fuse_projections=True)), config)
        groups = {id(module.siblings) for module in adapted.modules() if isinstance(module, FusedLinear)}
        assert len(groups) == left and near(outputs(adapted), outputs(this.model))
        adapted(tokens(), labels=tokens()).loss.backward()
        assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)


def test_the_group_knows_its_name():
    model = case("qwen3").load(quantization_config=FP4Config(fuse_projections=True))
    names = {module.siblings.name for module in model.modules() if isinstance(module, FusedLinear)}
    assert "model.layers.1.mlp.(gate_proj, up_proj)" in names and len(names) == 4
    assert isinstance(model.model.layers[0].mlp.up_proj.siblings, Siblings)
