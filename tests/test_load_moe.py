# SPDX-License-Identifier: Apache-2.0
"""`hf_mxfp4.load` of mixtures of experts, stored expert by expert or fused, and of files made by other tools."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from foreign_checkpoints import E2M1, KINDS, made, made_gpt_oss
from safetensors.torch import load_file
from test_bad_input import edited, put
from test_load import assert_near, ignore_passed_config, move, put_new
from tiny_models import (
    assert_same_tensors,
    auto_class,
    case,
    file_bytes,
    outputs,
    packed_modules,
    saved_bytes,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4, NVFP4, FP4Config, FP4Experts, experts_ops, load
from hf_mxfp4.quantization import fake_quantize

GOLDEN = Path(__file__).parent / "golden"
PER_EXPERT = [kind for kind in KINDS if kind != "modelopt-awq"]
TABLE = [(name, kind) for name in ("qwen3_moe", "mixtral") for kind in PER_EXPERT]
TABLE += [
    ("gpt_oss", "gpt-oss"),
    ("olmoe", "ct-nvfp4"),
    ("deepseek_v3", "ct-nvfp4"),
    ("deepseek_v3", "modelopt-mxfp4"),
    ("qwen3_vl_moe", "ct-nvfp4"),  # stored expert by expert, though the model itself never is
    ("qwen3_vl_moe", "modelopt-mxfp4"),
]
EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.2.up_proj",
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3",
}


def checkpoint(name: str, kind: str):
    return made_gpt_oss() if kind == "gpt-oss" else made(name, kind)


def experts_of(model) -> list[FP4Experts]:
    return [module for module in packed_modules(model).values() if isinstance(module, FP4Experts)]


# --- loaded, dequantized, saved, loaded again ------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind", TABLE)
def test_table(name, kind, tmp_path):
    """Every layout: experts stay packed, decode to what their own tool decodes, and are ours afterwards.

    The NVFP4 of compressed-tensors has tensor scales of its own for every expert and projection: the case in which
    transformers (#48371) drops them.
    """
    this = checkpoint(name, kind)
    dense = auto_class(name).from_pretrained(this.dense)
    model = load(this.folder)
    assert len(experts_of(model)) == (1 if name == "deepseek_v3" else 2)
    assert all(module.is_uneven(module.first) == (kind == "ct-nvfp4") for module in experts_of(model))
    assert model.num_parameters() == dense.num_parameters()
    logits = outputs(model)
    assert_near(logits, outputs(dense))

    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "hf_mxfp4" and stored["origin"] == model.config.quantization_config.origin
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert stored.get("transposed") == (experts if name == "gpt_oss" else None)
    for again in (auto_class(name).from_pretrained(tmp_path / "saved"), load(tmp_path / "saved")):
        assert_same_tensors(again.state_dict(), model.state_dict())
        assert torch.equal(outputs(again), logits)
    assert saved_bytes(again, tmp_path / "twice") == file_bytes(tmp_path / "saved")

    assert_same_tensors(model.dequantize().state_dict(), dense.state_dict())
    assert torch.equal(outputs(model), outputs(dense))


@pytest.mark.parametrize("name, kind", TABLE)
def test_float32(name, kind):
    """In float32 nothing but the order of sums differs from the dense model: no scale is wrong by a step."""
    model = load(checkpoint(name, kind).folder, dtype=torch.float32)
    torch.testing.assert_close(outputs(model), outputs(model.dequantize()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_tensor_scales_are_the_stored_ones(name):
    """Each expert's, of gate and of up and of down, bit for bit in its place."""
    this = made(name, "ct-nvfp4")
    stored = load_file(this.folder / "model.safetensors")
    start = EXPERT[name].partition(".experts")[0]
    leaves = ("gate_proj", "up_proj", "down_proj") if name == "qwen3_moe" else ("w1", "w3", "w2")
    experts = load(this.folder).model.layers[1].mlp.experts
    for number in range(4):
        scales = [stored[f"{start}.experts.{number}.{leaf}.weight_global_scale"] for leaf in leaves]
        assert len(set(map(float, scales))) == 3
        assert torch.equal(experts.gate_up_proj_global_scale[number], torch.cat(scales[:2]))
        assert torch.equal(experts.down_proj_global_scale[number], scales[2])


def test_stacks_that_the_model_turns_round(tmp_path):
    """Fused experts, packed as `[E, K/2, N]` as ModelOpt does, in a model that turns dense ones round on load."""

    def fuse(tensors):
        for key in [key for key in tensors if ".experts.0." in key and "up_proj" not in key]:
            path, _, end = key.partition(".experts.0.")
            leaf, _, what = end.partition(".")
            leaves = ("gate_proj", "up_proj") if leaf == "gate_proj" else (leaf,)
            experts = [[tensors.pop(f"{path}.experts.{e}.{name}.{what}") for name in leaves] for e in range(4)]
            name = f"{path}.experts.{'gate_up_proj' if leaf == 'gate_proj' else leaf}"
            stack = torch.stack([torch.cat(parts) for parts in experts]).mT.contiguous()
            tensors[name if what == "weight" else f"{name}_{what}"] = stack

    this = made("qwen3_vl_moe", "modelopt-mxfp4").folder
    model = load(edited(this, tmp_path / "fused", fuse))
    assert len(experts_of(model)) == 2
    assert_same_tensors(model.state_dict(), load(this).state_dict())
    start = "model.language_model.layers.1.mlp.experts.3.down_proj"
    refuse("qwen3_vl_moe", "modelopt-mxfp4", tmp_path, r"3 packed matrices of 4 \(no matrix 0 of .* 3", without(start))


@ignore_passed_config
@pytest.mark.parametrize("name, kind", [("qwen3_moe", "ct-nvfp4"), ("gpt_oss", "gpt-oss")])
def test_arguments(name, kind):
    this = checkpoint(name, kind)
    config = FP4Config(activation_format="same", backend="torch", compute_dtype="float32")
    model = load(this.folder, quantization_config=config)
    for module in packed_modules(model).values():
        assert (module.activation_format, module.backend, module.compute_dtype) == ("same", "torch", torch.float32)
    assert outputs(model).isfinite().all() and not torch.equal(outputs(model), outputs(load(this.folder)))
    plain = load(this.folder, quantization_config=FP4Config(dequantize=True))
    assert_same_tensors(plain.state_dict(), auto_class(name).from_pretrained(this.dense).state_dict())


def test_modelopt_by_from_pretrained_alone():
    this = made("mixtral", "modelopt-nvfp4")
    model, report = AutoModelForCausalLM.from_pretrained(this.folder, output_loading_info=True)
    assert not any(report.values()) and len(experts_of(model)) == 2
    assert_same_tensors(model.state_dict(), load(this.folder).state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("name, kind", [("qwen3_moe", "ct-nvfp4"), ("gpt_oss", "gpt-oss")])
def test_cuda(name, kind):
    """Straight onto a GPU, uneven experts by kernels, too."""
    this = checkpoint(name, kind)
    model = load(this.folder, device_map="cuda", dtype=torch.float32)
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    with torch.no_grad():
        found = model(tokens().cuda())[0].cpu()
    expected = outputs(load(this.folder, dtype=torch.float32))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 * expected.abs().max().item())  # TF32 products


def test_experts_in_full_precision(tmp_path):
    """Attention is packed, experts are not: they stay as they are, and so after saving."""
    this = made("qwen3_moe", "ct-nvfp4")
    dense = load_file(this.dense / "model.safetensors")

    def change(old):
        for key in [key for key in old if ".experts." in key]:
            del old[key]
        old |= {key: value for key, value in dense.items() if ".experts." in key}

    def config(old):
        old["quantization_config"]["ignore"].append("re:.*experts.*")

    model = load(edited(this.folder, tmp_path / "m", change, config))
    assert not experts_of(model) and len(packed_modules(model)) == 8
    assert_near(outputs(model), outputs(auto_class("qwen3_moe").from_pretrained(this.dense)))
    model.save_pretrained(tmp_path / "saved")
    again = auto_class("qwen3_moe").from_pretrained(tmp_path / "saved")
    assert_same_tensors(again.state_dict(), model.state_dict())
    assert torch.equal(outputs(again), outputs(model))


# --- files made by the tools themselves ------------------------------------------------------------------------------

MODELS = [
    folder.name for folder in sorted(GOLDEN.glob("*/")) if "architectures" in (folder / "config.json").read_text()
]


@pytest.mark.parametrize("golden", MODELS)
def test_golden(golden, tmp_path):
    """Models that ModelOpt, fp_quant, torchao and fouroversix wrote: weights as they decode them, saved, reloaded."""
    model = load(GOLDEN / golden)
    assert packed_modules(model)
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        logits = model(tokens)[0]
        assert logits.isfinite().all()
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(tokens)[0], logits)
    model.dequantize().save_pretrained(tmp_path / "dense")
    found, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "dense", GOLDEN / golden))
    if (GOLDEN / golden / "decoded.json").exists():
        expected = json.loads((GOLDEN / golden / "decoded.json").read_text())
        if golden != "modelopt_awq":
            assert {key: digest(key, found[key]) for key in expected} == expected
            return
        for key in expected:  # of the weight for the scaled input
            scale = stored.get(key.replace("weight", "pre_quant_scale"), torch.ones(())).float()
            weight = modelopt_decoded(stored[key], stored[f"{key}_scale"], stored[f"{key}_scale_2"])
            # Rounded after another order of products: a step of bfloat16 at most.
            torch.testing.assert_close(found[key].float(), weight * scale, rtol=2**-8, atol=0)
        return
    for key, weight in load_file(GOLDEN / f"{golden}.expected.safetensors").items():
        matrix = stored.get(key.replace("weight", "forward_hadamard_matrix"))
        if matrix is None:
            assert torch.equal(found.get(key, weight), weight) and (key in found or key.startswith("original."))
        else:  # fp_quant's own is in the basis of the transform
            rotated = (found[key].double().unflatten(1, (-1, len(matrix))) @ matrix.double()).flatten(1)
            close_to(rotated, weight.double())


def modelopt_decoded(packed, scale, scale_2) -> torch.Tensor:
    """float32, by ModelOpt's formula."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    factor = (scale.float() * scale_2).repeat_interleave(16, -1)
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3)) * factor


def close_to(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both rounded to bfloat16, one in another basis: half a step of 2^-8 for each of two values, of the largest."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-7 * expected.abs().max().item())


def digest(key: str, weight: torch.Tensor) -> str:
    """As make_modelopt.py: packed dimension last, no negative zeros."""
    weight = (weight if key.endswith(".weight") else weight.mT).contiguous() + 0.0
    return hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()


# --- experts whose gate and up have different tensor scales ----------------------------------------------------------


def uneven(name: str = "qwen3_moe", **options) -> tuple[nn.Module, FP4Experts]:
    """Experts of a tiny float32 model that hold what their packed stand-in decodes to."""
    model = tiny_model(name, torch.float32)
    experts = next(module for path, module in model.named_modules() if path.endswith(".experts"))
    experts.config._experts_implementation = "eager"
    packed = FP4Experts.from_experts(experts, NVFP4, device="cpu", **options)
    for leaf, buffer in packed.named_buffers(recurse=False):
        random = torch.randint(0, 256, buffer.shape, dtype=torch.uint8)
        if leaf.endswith("_packed"):
            buffer.copy_(random)
        elif leaf.endswith("_global_scale"):
            buffer.copy_(torch.rand(buffer.shape) + 2)
        else:
            buffer.view(torch.uint8).copy_(random % 16 + 48)
    packed.prepare()
    with torch.no_grad():
        for leaf in packed.shapes:
            getattr(experts, leaf).copy_(packed.dequantized(leaf))
    return experts, packed.eval()


def routing(rows: int = 9):
    generator = torch.Generator().manual_seed(3)
    weights, index = torch.rand(rows, 4, generator=generator).softmax(-1).topk(2, -1)
    return torch.randn(rows, 64, generator=generator), index, weights


def close(found, expected):
    """float32 sums in another order: 1e-5 of the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_dense_copy_by_formula():
    """Every half of every expert by its own divisor."""
    _, packed = uneven()
    codes = torch.stack([packed.gate_up_proj_packed & 15, packed.gate_up_proj_packed >> 4], -1).flatten(-2).long()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    divisor = packed.gate_up_proj_global_scale.repeat_interleave(values.shape[1] // 2, 1)[..., None]
    scale = (packed.gate_up_proj_scale.float() / divisor).repeat_interleave(16, -1)
    assert torch.equal(packed.dequantized("gate_up_proj"), values * scale)


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_forward_and_gradient(rows, backend):
    experts, packed = uneven(backend=backend)
    assert packed.is_uneven("gate_up_proj") and not packed.is_uneven("down_proj")
    x, index, weights = routing(rows)
    found, expected = ([t.clone().requires_grad_() for t in (x, weights)] for _ in range(2))
    out, dense = packed(found[0], index, found[1]), experts(expected[0], index, expected[1])
    close(out, dense)
    grad = torch.randn_like(dense)
    out.backward(grad)
    dense.backward(grad)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine.grad, theirs.grad)


def test_sentinels_and_unused_experts():
    """Ids that belong to no expert contribute nothing, wherever they are sorted to."""
    experts, packed = uneven()
    x, index, weights = routing()
    index = torch.where(index == 1, 0, index)
    kept = index.clone()
    kept[::2, 1] = 4
    expected = experts(x, index, torch.where(kept < 4, weights, 0))
    close(packed(x, kept, weights), expected)
    assert packed(x[:0], index[:0], weights[:0]).shape == (0, 64)


def test_biases():
    """Biases of both halves, which no concatenated model has by itself."""
    experts, packed = uneven()
    x, index, weights = routing()
    packed.has_bias = True
    for name, (number, rows, _) in packed.shapes.items():
        packed.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(number, rows)))
    order, offsets = experts_ops.route(index, 4)
    found = packed._project("gate_up_proj", x[order // 2], offsets)
    expert = index.flatten()[order]
    dense = packed.dequantized("gate_up_proj")[expert]
    close(found, (dense @ x[order // 2][..., None])[..., 0] + packed.gate_up_proj_bias[expert])


def test_rounded_activations():
    """W4A4 rounds the input of each projection, as with even scales."""
    experts, packed = uneven(activation_format="same")
    x, index, weights = routing()
    order, offsets = experts_ops.route(index, 4)
    rounded = fake_quantize(x, "nvfp4")[order // 2]
    dense = packed.dequantized("gate_up_proj")[index.flatten()[order]]
    close(packed._project("gate_up_proj", x[order // 2], offsets), (dense @ rounded[..., None])[..., 0])


def test_halves():
    """Every row meets both halves of its expert; rows of no expert come first and last."""
    offsets = torch.tensor([1, 4, 4, 6], dtype=torch.int32)
    token, gate, up, cuts = experts_ops.halves(8, offsets)
    assert cuts.dtype == torch.int32 and cuts.tolist() == [2, 5, 8, 8, 8, 10, 12]
    assert sorted([*gate.tolist(), *up.tolist()]) == list(range(16))
    assert torch.equal(token[gate], torch.arange(8)) and torch.equal(token[up], torch.arange(8))
    for expert, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        for half, place in enumerate((gate, up)):
            start = cuts[2 * expert + half]
            assert place[first:last].tolist() == list(range(start, start + last - first))


def test_evenness_follows_the_scales():
    """What was read once is read again when scales are written, replaced, moved or loaded."""
    _, packed = uneven()
    x, index, weights = routing()
    state = {key: value.clone() for key, value in packed.state_dict().items()}
    packed.gate_up_proj_global_scale[:, 1] = packed.gate_up_proj_global_scale[:, 0]
    assert not packed.is_uneven("gate_up_proj")
    assert packed.quantized("gate_up_proj").shape == (4, 64, 64)
    packed.load_state_dict(state)
    assert packed.is_uneven("gate_up_proj") and packed.quantized("gate_up_proj").shape == (8, 32, 64)
    expected = packed(x, index, weights)
    for copy in (pickle.loads(pickle.dumps(packed)), packed.to(torch.float32)):
        assert torch.equal(copy(x, index, weights), expected)
    with torch.inference_mode():
        assert torch.equal(packed(x, index, weights), expected)
    assert not FP4Experts(4, 64, 32, format=MXFP4).is_uneven("gate_up_proj")


def test_compiled():
    _, packed = uneven()
    x, index, weights = routing()
    compiled = torch.compile(packed, fullgraph=True, backend="eager")
    close(compiled(x, index, weights), packed(x, index, weights))


def test_merged_scales_in_our_own_checkpoint(tmp_path):
    """A checkpoint of ours in which one expert's up has twice the divisor: half the weights, and no error."""
    expert = EXPERT["qwen3_moe"]
    change = put(f"{expert}.weight_global_scale", lambda old: old * 2)
    folder = edited(case("qwen3_moe").folder, tmp_path / "checkpoint", change)
    experts = auto_class("qwen3_moe").from_pretrained(folder).model.layers[1].mlp.experts
    before = case("qwen3_moe").model.model.layers[1].mlp.experts.dequantized("gate_up_proj")
    before[2, 32:] /= 2
    assert experts.is_uneven("gate_up_proj") and torch.equal(experts.dequantized("gate_up_proj"), before)


def test_interleaved_projections_have_one_scale(tmp_path):
    key = "model.layers.0.mlp.experts.gate_up_proj_global_scale"

    def change(tensors):
        tensors[key][1, 1] *= 2

    folder = edited(case("gpt_oss").folder, tmp_path / "checkpoint", change)
    with pytest.raises(ValueError, match="its interleaved projections have different tensor scales"):
        auto_class("gpt_oss").from_pretrained(folder)


# --- what is refused -------------------------------------------------------------------------------------------------


def refuse(name, kind, tmp_path, match, change=None, config=None):
    folder = edited(checkpoint(name, kind).folder, tmp_path / "checkpoint", change, config)
    with pytest.raises(ValueError, match=match):
        load(folder)


def without(start: str):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{start}.")]:
            del tensors[key]

    return change


@pytest.mark.parametrize("kind", ["ct-nvfp4", "modelopt-nvfp4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_missing_expert(name, kind, tmp_path):
    match = r"mlp.experts.gate_up_proj: the checkpoint holds 7 packed matrices of 8 \(no matrix 1 of expert 2\)"
    refuse(name, kind, tmp_path, match, without(EXPERT[name]))


@pytest.mark.parametrize("kind", ["ct-mxfp4", "modelopt-mxfp4"])
def test_partly_packed_experts(kind, tmp_path):
    """One projection of one expert in full precision, or all of one projection."""
    name = "qwen3_moe"

    def one(tensors):
        without(EXPERT[name])(tensors)
        tensors[f"{EXPERT[name]}.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)

    def config(old):
        fields = old["quantization_config"]
        fields["ignore"] += [EXPERT[name]]

    refuse(name, kind, tmp_path / "one", r"experts.gate_up_proj.*(7 packed matrices of 8|packed)", one, config)

    def down(tensors):
        for number in range(4):
            start = f"model.layers.0.mlp.experts.{number}.down_proj"
            without(start)(tensors)
            tensors[f"{start}.weight"] = torch.zeros(64, 32, dtype=torch.bfloat16)

    def config_down(old):
        old["quantization_config"]["ignore"] += [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(4)]

    refuse(name, kind, tmp_path / "down", r"experts.down_proj.*0 packed matrices", down, config_down)


def test_more_experts_than_the_model_has(tmp_path):
    change = move("model.layers.1.mlp.experts.2", "model.layers.1.mlp.experts.4", copy=True)
    refuse("qwen3_moe", "modelopt-mxfp4", tmp_path, r"an unexpected matrix \d of expert 4", change)


def test_experts_packed_and_plain(tmp_path):
    change = put_new(f"{EXPERT['qwen3_moe']}.weight", torch.zeros(32, 64, dtype=torch.bfloat16))
    refuse("qwen3_moe", "ct-nvfp4", tmp_path, rf"{EXPERT['qwen3_moe']}.weight", change)


def test_router_that_is_packed(tmp_path):
    """Routers of these models are no linears: they cannot be computed from packed weights."""
    router = "model.layers.0.mlp.gate"
    stored = KINDS["ct-nvfp4"].store("router", torch.randn(4, 64).bfloat16())[0]

    def change(tensors):
        del tensors[f"{router}.weight"]
        tensors |= {f"{router}.{key}": value for key, value in stored.items()}

    def config(old):
        old["quantization_config"]["ignore"] = ["lm_head", "model.layers.1.mlp.gate"]

    refuse("qwen3_moe", "ct-nvfp4", tmp_path, rf"{router}.weight is packed .*TopKRouter is not", change, config)


def test_awq_of_experts(tmp_path):
    """Input transforms of experts would be left out: refused."""
    change = put_new("model.layers.0.mlp.experts.1.down_proj.pre_quant_scale", torch.ones(32).bfloat16())
    refuse("qwen3_moe", "modelopt-nvfp4", tmp_path, r"layers.0.mlp.experts: .*transforms the inputs of its", change)


@pytest.mark.parametrize("end", ["_blocks", "_scales"])
def test_gpt_oss_incomplete(end, tmp_path):
    change = put(f"model.layers.1.mlp.experts.down_proj{end}", None)
    refuse("gpt_oss", "gpt-oss", tmp_path, rf"down_proj_({end[1:]}|blocks|scales)", change)


def test_gpt_oss_of_another_size(tmp_path):
    refuse(
        "gpt_oss", "gpt-oss", tmp_path, "of another architecture", config=lambda old: old.update(num_local_experts=3)
    )
