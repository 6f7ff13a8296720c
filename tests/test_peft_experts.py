# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed experts: as PEFT's own on a model that holds the dequantized weights."""

import copy
import io
import warnings

import pytest
import torch
from test_experts import close, pair, routing
from tiny_models import MIXTURES, auto_class, case, outputs, source, tokens
from torch import nn

import hf_mxfp4
from hf_mxfp4 import NVFP4, FP4Config, FP4Experts, FP4Linear

peft = pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.tuners_utils import BaseTuner  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from hf_mxfp4.integrations.peft import experts as integration  # noqa: E402
from hf_mxfp4.integrations.peft.experts import ParamWrapper, low_rank  # noqa: E402
from hf_mxfp4.integrations.peft.merging import merge_report  # noqa: E402

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
LAYOUTS = ("qwen3_moe", "gpt_oss")  # the second is transposed, interleaved, and has biases


def config(**changes) -> LoraConfig:
    """Both projections, with an adapter that changes something from the start."""
    fields = {"target_modules": [], "target_parameters": TARGETS, "r": 3, "lora_alpha": 7, "init_lora_weights": False}
    return LoraConfig(**fields | changes)


def packed_model(name: str, format: str = "nvfp4", dtype=torch.float32, **fields):
    return auto_class(name).from_pretrained(
        source(name, dtype), dtype=dtype, quantization_config=FP4Config(format=format, **fields)
    )


def dequantized_model(packed, name: str):
    """transformers' own model with the weights that a packed one stands for."""
    dense = auto_class(name).from_pretrained(source(name, packed.dtype), dtype=packed.dtype)
    with torch.no_grad():
        for path, module in packed.named_modules():
            if isinstance(module, FP4Linear):
                dense.get_submodule(path).weight.copy_(module.weight)
            elif isinstance(module, FP4Experts):
                for projection in module.shapes:
                    getattr(dense.get_submodule(path), projection).copy_(module.dequantized(projection))
    return dense


def adapt(model, seed: int = 0, adapter_name: str = "default", **changes):
    torch.manual_seed(seed)
    return get_peft_model(model, config(**changes), adapter_name)


def alone(packed: FP4Experts, **changes):
    """A PEFT model around nothing but an experts module, and the outer wrapper."""
    model = adapt(nn.ModuleDict({"experts": packed}), **changes)
    return model, model.base_model.model["experts"]


def adapter_of(model) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


def same(state: dict, other: dict) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


def packed_bytes(model) -> dict[str, torch.Tensor]:
    return {name: buffer.view(torch.uint8).clone() for name, buffer in model.named_buffers() if "experts" in name}


# --- the same as PEFT's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, format", [*((name, "nvfp4") for name in MIXTURES), ("gpt_oss", "mxfp4")])
def test_equal_to_peft_on_the_dequantized_model(name, format):
    """Outputs, factors and their names, and gradients of factors, routers and what lies before the experts."""
    packed = packed_model(name, format)
    models = [adapt(model) for model in [dequantized_model(packed, name), packed]]
    assert same(*map(adapter_of, models))
    found = []
    for model in models:
        for key, parameter in model.named_parameters():
            if key.endswith((".gate.weight", "router.weight", "embed_tokens.weight")):
                parameter.requires_grad_()
        out = model(tokens(), labels=tokens())
        out.loss.backward()
        found.append((out.logits, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    (expected, expected_grads), (logits, grads) = found
    close(logits, expected)
    assert grads.keys() == expected_grads.keys()
    assert {key.split(".")[-3] for key in grads if "lora" in key} == {"lora_A", "lora_B"}
    for key, grad in expected_grads.items():
        assert grad.any()
        close(grads[key], grad)


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_travel_between_packed_and_dense(name, tmp_path):
    packed = packed_model(name)
    dense = dequantized_model(packed, name)
    own = adapt(packed, rank_pattern={r".*\.gate_up_proj": 5}, use_rslora=True)
    assert own.base_model.model.model.layers[0].mlp.experts.base_layer.factors("default")[0].shape[1] == 5
    own.save_pretrained(tmp_path / "packed")
    expected = outputs(own)
    there = PeftModel.from_pretrained(dense, tmp_path / "packed")
    close(outputs(there), expected)
    there.save_pretrained(tmp_path / "dense")
    assert same(*(load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("packed", "dense")))
    back = PeftModel.from_pretrained(packed_model(name), tmp_path / "dense", low_cpu_mem_usage=True)
    assert torch.equal(outputs(back), expected)
    plain = packed_model(name)
    plain.load_adapter(str(tmp_path / "dense"))  # transformers' own way
    assert torch.equal(outputs(plain), expected)


def test_all_linear_adapts_what_it_adapts_on_the_dense_model():
    """PEFT's table for Qwen3-MoE turns "all-linear", and the names that experts had in transformers 4, into
    `target_parameters`."""
    for targets in ("all-linear", ["gate_proj", "up_proj", "down_proj"], r".*experts\.(gate|up|down)_proj"):
        adapted = []
        for model in (packed_model("qwen3_moe"), auto_class("qwen3_moe").from_pretrained(source("qwen3_moe"))):
            model = adapt(model, target_modules=targets, target_parameters=None)
            adapted.append({key: value.shape for key, value in adapter_of(model).items()})
        assert adapted[0] == adapted[1] and any("experts.base_layer" in key for key in adapted[0])


def test_adapters_of_single_experts(tmp_path):
    """An adapter from the time when each expert was a module of its own (transformers 4)."""
    packed, rank = packed_model("qwen3_moe"), 2
    state, generator = {}, torch.Generator().manual_seed(0)
    for layer, block in enumerate(packed.model.layers):
        experts, first = block.mlp.experts, block.mlp.experts.shapes["gate_up_proj"]
        for expert in range(experts.num_experts):
            for name, rows, columns in (
                ("gate_proj", first[1] // 2, first[2]),
                ("up_proj", first[1] // 2, first[2]),
                ("down_proj", first[2], first[1] // 2),
            ):
                path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                state[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
                state[f"{path}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 10
    save_file(state, tmp_path / "adapter_model.safetensors")
    old = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], r=rank, lora_alpha=6, task_type="CAUSAL_LM")
    old.save_pretrained(tmp_path)
    expected = dequantized_model(packed, "qwen3_moe")
    with torch.no_grad():
        for key, a in state.items():
            if "lora_A" not in key:
                continue
            path, expert, name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight").rsplit(".", 2)
            experts = expected.get_submodule(path)
            weight = getattr(experts, "down_proj" if name == "down_proj" else "gate_up_proj")[int(expert)]
            weight = weight if name == "down_proj" else weight.chunk(2)[name == "up_proj"]
            weight += 3 * state[key.replace("lora_A", "lora_B")] @ a
    found = PeftModel.from_pretrained(packed, tmp_path)
    close(outputs(found), outputs(expected))


# --- the product -----------------------------------------------------------------------------------------------------


def twin(a, b, scaling, x, offsets) -> torch.Tensor:
    """`low_rank` by whole matrices."""
    rows = torch.arange(len(x))
    delta = scaling * b @ a
    out = [
        torch.where(((rows >= offsets[e]) & (rows < offsets[e + 1]))[:, None], x @ delta[e].T, 0)
        for e in range(len(a))
    ]
    return sum(out)


@pytest.mark.parametrize("function", [integration._one_by_one, integration._grouped], ids=["one_by_one", "grouped"])
@pytest.mark.parametrize("offsets", [[0, 3, 3, 9], [2, 4, 7, 7], [9, 9, 9, 9], [0, 0, 0, 0], [0, 0, 9, 9]], ids=str)
@pytest.mark.parametrize("rank", [3, 8])
def test_product(function, offsets, rank):
    """With experts without rows, and rows before the first and after the last expert, which are of none."""
    x, a, b = torch.randn(9, 16), torch.randn(3, rank, 16), torch.randn(24, rank, 3).permute(2, 0, 1)
    offsets, up = torch.tensor(offsets, dtype=torch.int32), torch.randn(9, 24)
    results = []
    for product in (function, twin):
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        out = product(*leaves[1:], 0.7, leaves[0], offsets)
        out.backward(up)
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # sums of 16 products of the size of 5
    none = (torch.arange(9) < offsets[0]) | (torch.arange(9) >= offsets[-1])
    assert not results[0][0][none].any() and not results[0][1][none].any()


def test_product_without_rows():
    a, b = torch.randn(3, 2, 16, requires_grad=True), torch.randn(3, 24, 2, requires_grad=True)
    out = low_rank(a, b, 1.0, torch.randn(0, 16), torch.zeros(4, dtype=torch.int32))
    out.sum().backward()  # DDP waits for the gradient of every parameter
    assert out.shape == (0, 24) and not a.grad.any() and not b.grad.any()


def uneven(packed: FP4Experts) -> FP4Experts:
    packed.gate_up_proj_global_scale[:, 1] *= 2
    assert packed.is_uneven("gate_up_proj")
    return packed


SETTINGS = {
    "plain": {},
    "compute_dtype": {"compute_dtype": torch.bfloat16},
    "W4A4": {"activation_format": "same"},
    "uneven": {},
}


@pytest.mark.parametrize(
    "name, setting",  # interleaved halves share a tensor scale
    [(name, setting) for name in LAYOUTS for setting in SETTINGS if (name, setting) != ("gpt_oss", "uneven")],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_settings(name, setting, autocast):
    """As with a dense stack of low-rank products; some ids are sentinels, and an expert has no token."""
    experts, packed = pair(name, NVFP4, **SETTINGS[setting])
    if setting == "uneven":
        uneven(packed)
    x, index, weights = routing(experts, 9, used=3)
    index[0], index[1, 0] = packed.num_experts, packed.num_experts + 5
    wrapper = alone(packed)[1]

    def dense_delta(layer):
        a, b, scaling = layer.factors("default")
        return lambda x, offsets: twin(a.detach().to(x.dtype), b.detach().to(x.dtype), scaling, x, offsets)

    deltas = {layer.parameter_name: [dense_delta(layer)] for layer in (wrapper, wrapper.base_layer)}
    assert deltas.keys() == packed.shapes.keys()
    grads = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for call in (wrapper, lambda *inputs: packed(*inputs, deltas=deltas)):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = call(leaves[0], index, leaves[1])
            out.float().square().sum().backward()
            grads.append((out, *(leaf.grad for leaf in leaves)))
    exact = not autocast and setting != "compute_dtype"
    for found, expected in zip(*grads, strict=True):
        assert found.dtype == expected.dtype and found.isfinite().all() and expected.any()
        size = expected.abs().max().item()
        # bfloat16 products with 8 bits, summed in another order, through two layers
        torch.testing.assert_close(found, expected, rtol=0, atol=(1e-5 if exact else 4e-2) * size)
    assert not grads[0][0][0].any()  # nothing but sentinels
    assert not torch.allclose(grads[0][0][2], packed(x, index, weights)[2], atol=1e-2)  # the adapter does something


def test_checkpointing_and_compile():
    experts, packed = pair("qwen3_moe", NVFP4)
    model, wrapper = alone(packed)
    inputs = routing(experts, 9)
    grads = []
    compiled = torch.compile(wrapper, backend="eager")
    for call in (
        lambda *leaves: wrapper(*leaves),
        lambda *leaves: torch.utils.checkpoint.checkpoint(wrapper, *leaves, use_reentrant=False),
        lambda *leaves: torch.utils.checkpoint.checkpoint(wrapper, *leaves, use_reentrant=True),
        lambda *leaves: compiled(*leaves),
    ):
        x = inputs[0].clone().requires_grad_()
        call(x, *inputs[1:]).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
        model.zero_grad()
    assert len(grads[0]) == 5 and all(grad.any() for grad in grads[0])
    for other in grads[1:]:
        assert all(torch.equal(*both) for both in zip(grads[0], other, strict=True))


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_several_adapters(name):
    """Switched, both active, disabled, deleted: as on the dense model."""
    packed = packed_model(name)
    models = [adapt(model, adapter_name="one") for model in (packed, dequantized_model(packed, name))]
    base = [outputs(model.get_base_model()) for model in models]

    def both(step) -> torch.Tensor:
        for model in models:
            step(model)
        found, expected = map(outputs, models)
        close(found, expected)
        return found

    def add(model):
        torch.manual_seed(7)
        model.add_adapter("two", config(r=5, use_rslora=True))

    first = both(lambda model: None)
    assert torch.equal(both(add), first)
    second = both(lambda model: model.set_adapter("two"))
    joined = both(lambda model: model.base_model.set_adapter(["one", "two"]))
    assert not torch.allclose(first, second) and not torch.allclose(joined, second)
    with models[0].disable_adapter():
        off = outputs(models[0])
    with models[1].disable_adapter():
        close(off, outputs(models[1]))
    assert base and torch.equal(outputs(models[0]), joined)
    both(lambda model: model.delete_adapter("one"))
    assert torch.equal(outputs(models[0]), second)
    assert not any("one" in key for key in adapter_of(models[0]))


def test_copies_and_pickles():
    model = adapt(copy.deepcopy(case("qwen3_moe").model))
    expected, file = outputs(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(outputs(other), expected)
        wrapper = other.base_model.model.model.layers[0].mlp.experts
        assert type(wrapper) is ParamWrapper and wrapper.get_base_layer() is not model.get_base_model()
        wrapper.lora_B["default"].weight.data.zero_()
        assert not torch.equal(outputs(other), expected) and torch.equal(outputs(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fresh_adapter_starts_at_the_base(name, dtype):
    """Bit for bit: the log-probabilities of a policy and of its reference, the disabled adapter, start equal."""
    model = adapt(packed_model(name, dtype=dtype), init_lora_weights=True)
    with model.disable_adapter():
        base = outputs(model)
    assert torch.equal(outputs(model), base)


def test_training():
    packed = packed_model("qwen3_moe")
    base = outputs(packed)
    model = adapt(packed, init_lora_weights=True)
    before = packed_bytes(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.96 * losses[0]
    assert same(packed_bytes(model), before)
    plain = model.unload()
    assert torch.equal(outputs(plain), base) and not adapter_of(plain)


# --- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fields", [{}, {"format": "mxfp4", "outlier_fallback": 0.01}], ids=str)
def test_merge(name, fields, tmp_path):
    model = adapt(packed_model(name, **fields))
    before, expected = packed_bytes(model), outputs(model)
    model.merge_adapter()
    merged = outputs(model)
    changed = {key for key, value in packed_bytes(model).items() if not torch.equal(value, before[key])}
    assert changed >= {key for key in before if key.endswith("proj_packed")}
    model.unmerge_adapter()
    assert same(packed_bytes(model), before) and torch.equal(outputs(model), expected)
    model.merge_adapter()
    reports = merge_report(model)
    assert len(reports) == 4 and {report.weight for report in reports} == {"gate_up_proj", "down_proj"}
    assert all(report.cosine > 0.9 for report in reports)
    with model.disable_adapter():
        off = outputs(model)  # PEFT unmerges
    assert same(packed_bytes(model), before) and not torch.equal(off, merged)
    plain = model.merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in plain.modules())
    assert torch.equal(outputs(plain), merged) and merge_report(plain)
    plain.save_pretrained(tmp_path)
    again = auto_class(name).from_pretrained(tmp_path)
    assert torch.equal(outputs(again), merged)


def test_merged_is_the_sum():
    """The weight that is quantized is the dequantized one and what PEFT adds to it; one after another as at once."""
    packed = packed_model("gpt_oss")
    dense = dequantized_model(packed, "gpt_oss")
    models = [adapt(model) for model in (packed, dense)]
    for model in models:
        torch.manual_seed(3)
        model.add_adapter("two", config(r=2))
    models[1].merge_adapter(["default", "two"])
    models[0].merge_adapter(["default", "two"])
    at_once = packed_bytes(models[0])
    models[0].unmerge_adapter()
    models[0].merge_adapter(["default"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT: additionally merging
        models[0].merge_adapter(["two"])
    assert same(packed_bytes(models[0]), at_once)
    for layer in range(2):
        found, expected = (model.base_model.model.model.layers[layer].mlp.experts.get_base_layer() for model in models)
        for name in found.shapes:
            weight = getattr(expected, name).detach()
            quantized = hf_mxfp4.quantize(weight.mT, FP4Config())
            error = (found.dequantized(name).float() - weight).norm() / weight.norm()
            best = (hf_mxfp4.dequantize(quantized, torch.float32) - weight.mT).norm() / weight.norm()
            assert error < 1.1 * best


def test_a_broken_adapter_is_not_merged():
    model = adapt(packed_model("qwen3_moe"))
    before = packed_bytes(model)
    inner = model.base_model.model.model.layers[1].mlp.experts.base_layer
    inner.lora_B["default"].weight.data[3, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter()
    model.unmerge_adapter()
    assert same(packed_bytes(model), before)


# --- what does not work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 0}, "positive"),
        (
            {"init_lora_weights": "pissa", "target_modules": []},
            "'pissa' does not work for target_parameters on packed experts",
        ),
        ({"init_lora_weights": "olora", "target_modules": []}, "'olora'.*allowed: True, False, 'gaussian'"),
        ({"init_lora_weights": "eva", "target_modules": []}, "'eva'"),
        ({"target_modules": ["experts"], "target_parameters": None}, r"target_parameters=\['gate_up_proj', 'down_pr"),
        ({"target_modules": ["gate_up_proj"], "target_parameters": None}, "target_parameters="),
        ({"target_modules": r".*\.down_proj", "target_parameters": None}, "target_parameters="),
        ({"target_parameters": ["experts.gate_up_proj_bias"]}, "takes gate_up_proj, down_proj, not gate_up_proj_bias"),
        ({"target_parameters": ["experts.w1"], "target_modules": []}, "target_parameters"),
        ({"modules_to_save": ["experts"]}, "only LoRA can"),
    ],
    ids=str,
)
def test_refused(changes, message):
    model = copy.deepcopy(case("gpt_oss").model)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises((ValueError, TypeError), match=message):
        adapt(model, **({"target_modules": ["q_proj"]} | changes))
    assert [name for name, _ in model.named_modules()] == names  # also where PEFT had begun


def test_other_methods_are_refused():
    model = copy.deepcopy(case("gpt_oss").model)
    with pytest.raises(ValueError, match="target_parameters"):
        get_peft_model(model, peft.IA3Config(target_modules=["experts"], feedforward_modules=[]))
    assert torch.equal(outputs(model), outputs(case("gpt_oss").model))
    with pytest.raises(TypeError, match="only LoRA can"):
        peft.tuners.lora.Linear(model.model.layers[0].mlp.experts, "default", LoraConfig())


def test_a_name_that_no_linear_has_is_told():
    """Adapters of dense models have such lists, so it is no error."""
    with pytest.warns(UserWarning, match=r"down_proj, which is no linear layer .* not adapted"):
        model = adapt(
            copy.deepcopy(case("gpt_oss").model), target_modules=["q_proj", "down_proj"], target_parameters=None
        )
    assert not any("experts" in key for key in adapter_of(model))


def test_a_second_adapter_that_is_refused():
    model = adapt(copy.deepcopy(case("qwen3_moe").model), target_modules=["q_proj"])
    expected, state = outputs(model), adapter_of(model)
    with pytest.raises(ValueError, match="lora_dropout"):
        model.add_adapter("two", config(target_modules=["q_proj"], lora_dropout=0.5))
    assert same(adapter_of(model), state) and torch.equal(outputs(model), expected)
    model.add_adapter("two", config(target_modules=["q_proj"]))
    model.set_adapter("two")
    assert not torch.equal(outputs(model), expected)


def test_nothing_stays_behind():
    """Packed experts list their projections to PEFT alone, also after an error."""
    model = copy.deepcopy(case("qwen3_moe").model)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError):
        adapt(model, lora_dropout=0.5)
    for module in model.modules():
        assert "named_parameters" not in vars(module)
    assert [name for name, _ in model.named_parameters() if "lora" not in name] == names


def test_another_peft(monkeypatch):
    """What is skipped, or cannot be found, is an error."""
    model = copy.deepcopy(case("qwen3_moe").model)
    monkeypatch.setattr(BaseTuner, "_inject_parameters", lambda *args, **kwargs: ["model.layers.0.mlp.experts"])
    with pytest.raises(RuntimeError, match="PEFT adapted 0 of the 4 projections"):
        adapt(model)
    monkeypatch.delattr(BaseTuner, "_inject_parameters")
    with pytest.raises(ImportError, match="no BaseTuner._inject_parameters"):
        integration.register()
