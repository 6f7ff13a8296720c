# SPDX-License-Identifier: Apache-2.0
"""Walking a model block by block: what packers are told, resuming, and models that cannot be walked."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from tiny_models import assert_same_tensors, tiny_model, tokens
from torch import nn

from hf_mxfp4 import FP4Config, calibration, calibration_chain, calibration_inputs, conversion
from hf_mxfp4.calibration import calibrate, walk
from hf_mxfp4.calibration_chain import find_chains
from hf_mxfp4.calibration_files import Statistics, fingerprint, load_statistics
from hf_mxfp4.calibration_inputs import expert_inputs, input_statistics
from hf_mxfp4.error_feedback import Hessian

_SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
OTHERS = {
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **_SMALL,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=64,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**_SMALL, ffn_dim=64, word_embed_proj_dim=64, pad_token_id=0)
    ),
    "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=128,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            intermediate_size=64,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=64,
            window_size=4,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    ),
    "t5_encoder": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    ),
    "albert": lambda: transformers.AlbertModel(
        transformers.AlbertConfig(**_SMALL, embedding_size=32, intermediate_size=64)
    ),
    "xlm": lambda: transformers.XLMModel(transformers.XLMConfig(vocab_size=128, emb_dim=64, n_layers=2, n_heads=4)),
    "xlnet": lambda: transformers.XLNetModel(
        transformers.XLNetConfig(vocab_size=128, d_model=64, n_layer=2, n_head=4, d_inner=64)
    ),
    "zamba2": lambda: transformers.Zamba2ForCausalLM(
        transformers.Zamba2Config(
            **_SMALL | {"num_hidden_layers": 2},
            intermediate_size=64,
            mamba_d_state=8,
            n_mamba_heads=4,
            mamba_headdim=32,
            layers_block_type=["mamba", "hybrid"],
            hybrid_layer_ids=[1],
            num_mem_blocks=1,
        )
    ),
}


def build(name: str) -> nn.Module:
    if name not in OTHERS:
        return tiny_model(name, torch.float32)
    torch.manual_seed(0)
    return OTHERS[name]().eval()


def plan_of(model, **fields):
    return conversion.plan_modules(model, FP4Config(on_unsupported="keep", **fields))


def known_of(model, ids) -> Statistics:
    return Statistics(ids, {}, {}, fingerprint(model), "given", 0)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Batches of two rows and a last one of one row, for the five rows of `IDS`."""
    for module in (calibration_chain, calibration_inputs):
        monkeypatch.setattr(module, "TOKENS_AT_ONCE", 2 * IDS.shape[1])


IDS = tokens(5, 16)


class Watcher:
    """A packer that packs nothing."""

    def __init__(self, model):
        self.model, self.seen = model, {}

    def linears(self, names, hessian):
        self.seen.update(dict.fromkeys(names, hessian))
        return {}

    def experts(self, name, hessians):
        self.seen.update({f"{name}.{leaf}": each for leaf, each in hessians.items()})
        return {}

    def place(self, tensors):
        pass


class Rounder(Watcher):
    """Packs by rounding each weight to a step that depends on the Hessian; is stopped at one module."""

    def __init__(self, model, stop=None):
        super().__init__(model)
        self.stop = stop

    def _round(self, weight, hessian):
        if self.stop in self.seen:
            raise KeyboardInterrupt
        step = 0.05 if hessian is None else 0.02 + 0.01 * (hessian.matrix.abs().mean() % 1)
        return ((weight / step).round() * step).detach()

    def linears(self, names, hessian):
        super().linears(names, hessian)
        weights = {f"{name}.weight": self.model.get_submodule(name).weight for name in names}
        return {name: self._round(weight, hessian) for name, weight in weights.items()}

    def experts(self, name, hessians):
        super().experts(name, hessians)
        found = {}
        for leaf, each in hessians.items():
            stack = self.model.get_parameter(f"{name}.{leaf}")
            found[f"{name}.{leaf}"] = torch.stack([self._round(*pair) for pair in zip(stack, each, strict=True)])
        return found

    def place(self, tensors):
        for name, tensor in tensors.items():
            self.model.get_parameter(name).data = tensor


@torch.no_grad()
def plain_hessians(model, plan, ids) -> dict:
    """Hessians by name from forward passes of the whole model with one hook for each module."""
    found, handles = {}, []

    def linear(name, x):
        found.setdefault(name, Hessian(x.shape[-1], x.device)).add(x, name=name)

    def experts(name, module, args):
        hidden, chosen, weights = args
        hidden = hidden.reshape(-1, hidden.shape[-1])
        for expert in range(module.num_experts):
            pairs = [(t, k) for t in range(len(hidden)) for k in range(chosen.shape[1]) if chosen[t, k] == expert]
            up, down = module.gate_up_proj[expert], module.down_proj[expert]
            if module.is_transposed:
                up, down = up.T, down.T
            for leaf, width in (("gate_up_proj", up.shape[1]), ("down_proj", down.shape[1])):
                found.setdefault(f"{name}.{leaf}", [Hessian(width) for _ in range(module.num_experts)])
            if not pairs:
                continue
            rows = torch.stack([hidden[t] for t, _ in pairs])
            share = torch.stack([weights[t, k] for t, k in pairs])[:, None].float()
            inner = module._apply_gate(
                nn.functional.linear(rows, up, module.gate_up_proj_bias[expert] if module.has_bias else None)
            )
            found[f"{name}.gate_up_proj"][expert].add(rows * share)
            found[f"{name}.down_proj"][expert].add(inner * share)

    for name in plan.linears:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda _, args, name=name: linear(name, args[0])))
    for name in plan.experts:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda m, args, name=name: experts(name, m, args)))
    for batch in ids.split(2):
        model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return found


def assert_same_hessian(one, other, name):
    assert one.tokens == other.tokens and torch.equal(one.matrix, other.matrix), name


WALKED = ("qwen3", "llama", "bert", "qwen3_moe", "gpt_oss", "gemma3", "opt", "gpt_neo", "t5_encoder", "xlnet")


@pytest.mark.parametrize("name", WALKED)
def test_hessians_are_those_of_the_whole_model(name, monkeypatch):
    monkeypatch.setattr(calibration, "_ENOUGH", 0.0)
    model = build(name)
    plan, watcher = plan_of(model), Watcher(model)
    report = walk(model, plan, watcher, known_of(model, IDS))
    expected = plain_hessians(model, plan, IDS)
    assert report.notes == {} and watcher.seen.keys() == expected.keys() == report.statistics.diagonals.keys()
    for key, hessian in expected.items():
        seen = watcher.seen[key]
        counts, diagonal = report.statistics.counts[key], report.statistics.diagonals[key]
        if not isinstance(hessian, list):
            assert_same_hessian(seen, hessian, key)
            assert counts.shape == () and counts == IDS.numel() and torch.equal(diagonal, hessian.diagonal)
            continue
        for expert, (one, other) in enumerate(zip(seen, hessian, strict=True)):
            assert counts[expert] == other.tokens
            if other.tokens:
                assert_same_hessian(one, other, f"{key}[{expert}]")
                assert torch.equal(diagonal[expert], other.diagonal)


def test_block_that_writes_into_its_input(monkeypatch):
    model = build("llama")
    forward = model.model.layers[0].forward
    monkeypatch.setattr(
        model.model.layers[0], "forward", lambda x, *args, **kwargs: forward(x.add_(0.5), *args, **kwargs)
    )
    plan, watcher = plan_of(model), Watcher(model)
    walk(model, plan, watcher, known_of(model, IDS))
    for name, hessian in plain_hessians(model, plan, IDS).items():
        assert_same_hessian(watcher.seen[name], hessian, name)


def test_linears_that_read_the_same_share_a_hessian():
    model = build("qwen3")
    watcher = Watcher(model)
    walk(model, plan_of(model), watcher, known_of(model, IDS))
    block = {name.removeprefix("model.layers.0."): id(h) for name, h in watcher.seen.items() if ".0." in name}
    attention = {block[f"self_attn.{leaf}"] for leaf in ("q_proj", "k_proj", "v_proj")}
    assert len(attention) == 1 and block["mlp.gate_proj"] == block["mlp.up_proj"]
    assert len(set(block.values())) == 4  # beside these two, o_proj and down_proj


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_each_block_reads_what_the_packed_ones_before_it_write(name, monkeypatch):
    monkeypatch.setattr(calibration, "_ENOUGH", 0.0)
    model = build(name)
    plan, packer = plan_of(model, format="mxfp4"), Rounder(model)
    before = plain_hessians(model, plan, IDS)
    walk(model, plan, packer, known_of(model, IDS))
    after = plain_hessians(model, plan, IDS)
    q, o = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"
    assert_same_hessian(packer.seen[q], after[q], q)
    assert not torch.equal(packer.seen[q].matrix, before[q].matrix)
    assert not torch.equal(packer.seen[o].matrix, after[o].matrix)  # q, k and v were not packed yet


def test_sequential_reads_what_all_packed_modules_before_write():
    model = build("llama")
    plan, packer = plan_of(model), Rounder(model)
    walk(model, plan, packer, known_of(model, IDS), sequential=True)
    for name, hessian in plain_hessians(model, plan, IDS).items():
        assert_same_hessian(packer.seen[name], hessian, name)


def hooks_and_modes(model) -> list:
    return [
        (len(m._forward_pre_hooks), len(m._forward_hooks), m.training, getattr(m.config, "use_cache", None))
        if hasattr(m, "config")
        else (len(m._forward_pre_hooks), len(m._forward_hooks), m.training)
        for m in model.modules()
    ]


@pytest.mark.parametrize("stop", [None, "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.down_proj"])
def test_model_is_left_as_it_was(stop):
    model = build("qwen3_moe").train()
    model.model.layers[1].eval()
    before, weights = hooks_and_modes(model), state_of(model)
    packer = Rounder(model, stop) if stop else Watcher(model)
    with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
        walk(model, plan_of(model), packer, known_of(model, IDS))
    assert hooks_and_modes(model) == before
    assert_same_tensors(model.state_dict(), weights)  # no block was finished
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


# --- modules without statistics -------------------------------------------------------------------------------------


def test_modules_outside_the_blocks_are_packed_plainly_and_named():
    model = tiny_model("llama", torch.float32, tie_word_embeddings=False)
    plan, packer = plan_of(model, overrides={"lm_head": {}}), Rounder(model)
    report = walk(model, plan, packer, known_of(model, IDS))
    assert list(report.notes) == ["lm_head"] and "outside" in report.notes["lm_head"]
    assert packer.seen["lm_head"] is None and set(packer.seen) == set(plan.linears)


def test_experts_with_too_few_tokens_are_packed_plainly_and_named():
    model = build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight[:3] *= 50
    watcher = Watcher(model)
    report = walk(model, plan_of(model), watcher, known_of(model, IDS[:1, :6]))
    for leaf, width in (("gate_up_proj", 64), ("down_proj", 32)):
        name = f"model.layers.0.mlp.experts.{leaf}"
        counts = report.statistics.counts[name]
        few = [expert for expert in range(4) if counts[expert] < width / 8]
        assert [h is None for h in watcher.seen[name]] == [expert in few for expert in range(4)]
        assert all(f"{expert} ({int(counts[expert])})" in report.notes[name] for expert in few)
        assert few and (report.statistics.diagonals[name][counts == 0] == 1).all()


def test_too_few_tokens_for_a_linear():
    model = build("bert")
    watcher = Watcher(model)
    report = walk(model, plan_of(model), watcher, known_of(model, IDS[:1, :10]))
    assert set(report.notes) == {f"encoder.layer.{i}.output.dense" for i in range(2)}  # K is 128, of the others 64
    assert {name for name, hessian in watcher.seen.items() if hessian is None} == set(report.notes)
    assert "saw 10 tokens" in next(iter(report.notes.values())) and len(report.summary()) == 1


def test_damping_grows_as_tokens_get_fewer():
    hessian = Hessian(32)
    hessian.add(torch.randn(64, 32))
    assert calibration.damping(hessian) == pytest.approx(0.4)
    hessian.add(torch.randn(10_000, 32))
    assert calibration.damping(hessian) == 0.1


# --- models that cannot be walked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("albert", "albert_layer_groups.0 runs more than once"),
        ("xlm", "attentions.1 does not read what attentions.0 wrote"),
        ("zamba2", r"layers.0 \(Zamba2MambaDecoderLayer\) takes arguments that depend on the tokens \(1\)"),
        ("t5", "encoder-decoder models such as T5ForConditionalGeneration"),
    ],
)
def test_models_that_cannot_be_walked(name, message):
    model = build(name)
    before = hooks_and_modes(model)
    with pytest.raises(ValueError, match=f"{message}.*channel_weights=True"):
        walk(model, plan_of(model), Watcher(model), known_of(model, IDS))
    assert hooks_and_modes(model) == before


def test_no_blocks():
    model = build("llama")
    plan = plan_of(model, overrides={"lm_head": {}, "layers": "skip"})
    with pytest.raises(ValueError, match="LlamaForCausalLM has no repeated blocks"):
        walk(model, plan, Watcher(model), known_of(model, IDS))


def test_only_whole_blocks_are_blocks():
    model = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(4, 4)]), "body": nn.ModuleList([nn.Sequential()])})
    model["body"][0].append(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert find_chains(model, names) == {"body": ["body.0"]}


# --- resuming -------------------------------------------------------------------------------------------------------


def lists(counts) -> dict:
    return {name: count.tolist() for name, count in counts.items()}


def state_of(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_resume_after_a_stop_in_any_block(name, tmp_path):
    model = tiny_model(name, torch.float32, num_hidden_layers=3)
    plan, start = plan_of(model), state_of(model)
    whole = walk(model, plan, Rounder(model), known_of(model, IDS))
    expected = state_of(model)
    for block in range(3):
        model.load_state_dict(start)
        folder = tmp_path / str(block)
        stop = f"model.layers.{block}.mlp.{'down_proj' if name == 'qwen3' else 'experts.down_proj'}"
        with pytest.raises(KeyboardInterrupt):
            walk(model, plan, Rounder(model, stop), known_of(model, IDS), work=folder)
        finished = [f"block-{i:05d}.safetensors" for i in range(block)]
        assert sorted(file.name for file in folder.iterdir()) == [*finished, "job.json"]
        model.load_state_dict(start)
        report = walk(model, plan, packer := Rounder(model), known_of(model, IDS), work=folder)
        assert_same_tensors(model.state_dict(), expected)
        assert {int(key.split(".")[2]) for key in packer.seen} == set(range(block, 3))
        assert report.notes == whole.notes
        assert lists(report.statistics.counts) == lists(whole.statistics.counts)
        assert_same_tensors(report.statistics.diagonals, whole.statistics.diagonals)


def test_resume_with_other_settings(tmp_path):
    model = build("qwen3")
    plan, start = plan_of(model), state_of(model)

    def go(model=model, ids=IDS, **kwargs):
        walk(model, plan, Rounder(model), known_of(model, ids), work=tmp_path, **kwargs)

    go(config={"format": "nvfp4", "iterations": 10})
    model.load_state_dict(start)
    with pytest.raises(ValueError, match=r"config.format \('nvfp4' there, 'mxfp4' here\)\. Use an empty folder"):
        go(config={"format": "mxfp4", "iterations": 10})
    with pytest.raises(ValueError, match="other than there: config.*, tokens"):
        go(ids=IDS + 1)
    with pytest.raises(ValueError, match=r"there: model\.weights"):
        go(model=tiny_model("qwen3", torch.float32, seed=1), config={"format": "nvfp4", "iterations": 10})
    assert_same_tensors(model.state_dict(), start)
    (tmp_path / "block-00000.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="block-00000.safetensors is damaged.*Delete it"):
        go(config={"format": "nvfp4", "iterations": 10})
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(ValueError, match="job.json is damaged"):
        go()
    (tmp_path / "job.json").unlink()
    with pytest.raises(ValueError, match="holds blocks but no job.json"):
        go()


# --- one pass for the diagonals ---------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "t5", "albert"])
def test_input_statistics(name):
    model = build(name).train()
    plan, before = plan_of(model), hooks_and_modes(model)
    found = input_statistics(model, plan, known_of(model, IDS))
    assert hooks_and_modes(model) == before and found.diagonals.keys() == found.counts.keys()
    rows = {}

    def keep(key, x, share=1.0):
        rows.setdefault(key, []).append(x.reshape(-1, x.shape[-1]).double() * share)

    for key in plan.linears:
        model.get_submodule(key).register_forward_pre_hook(lambda _, args, key=key: keep(key, args[0]))
    for key in plan.experts:

        def split(module, args, key=key):
            for expert, share, x, inner in expert_inputs(module, args, {}):
                keep(f"{key}.gate_up_proj[{expert}]", x, share)
                keep(f"{key}.down_proj[{expert}]", inner, share)

        model.get_submodule(key).register_forward_pre_hook(split)
    with torch.no_grad():
        for batch in IDS.split(2):
            model.eval()(input_ids=batch, **({"decoder_input_ids": batch} if name == "t5" else {}))
    for key, diagonal in found.diagonals.items():
        each = [(key, diagonal, found.counts[key])] if diagonal.ndim == 1 else []
        each += [(f"{key}[{e}]", d, found.counts[key][e]) for e, d in enumerate(diagonal) if diagonal.ndim == 2]
        for part, one, count in each:
            expected = torch.cat(rows[part])
            assert len(expected) == count
            torch.testing.assert_close(one.double(), expected.square().mean(0), rtol=1e-5, atol=0)


def test_broken_inputs_are_named():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        input_statistics(model, plan_of(model), known_of(model, IDS))


# --- as the config says ---------------------------------------------------------------------------------------------


def test_calibrate_with_error_feedback(tmp_path, monkeypatch):
    model = build("qwen3")
    config = FP4Config(
        error_feedback=True, calibration_samples=4, calibration_length=16, calibration_dir=str(tmp_path / "job")
    )
    plan, start = plan_of(model), state_of(model)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, plan, config, Rounder(model, "model.layers.1.mlp.down_proj"))
    assert not load_statistics(tmp_path / "job/calibration.safetensors").diagonals  # not finished: the tokens alone
    model.load_state_dict(start)
    monkeypatch.setattr(type(model), "generate", lambda *args, **kwargs: pytest.fail("sampled again"))
    report = calibrate(model, plan, config, Rounder(model))
    stored = load_statistics(tmp_path / "job/calibration.safetensors")
    assert stored.tokens.shape == (4, 16) and stored.source == "self"
    assert stored.diagonals.keys() == report.statistics.diagonals.keys() == plan.linears.keys()
    assert json.loads((tmp_path / "job/job.json").read_text())["config"]["calibration_samples"] == 4
    resumed = state_of(model)
    model.load_state_dict(start)
    monkeypatch.undo()
    config = FP4Config(error_feedback=True, calibration_samples=4, calibration_length=16)
    calibrate(model, plan, config, Rounder(model))
    assert_same_tensors(model.state_dict(), resumed)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_calibrate_with_channel_weights(name, tmp_path, monkeypatch):
    model = build(name)
    plan, watcher = plan_of(model), Watcher(model)
    fields = dict(channel_weights=True, calibration="random", calibration_samples=64, calibration_length=16)
    report = calibrate(model, plan, FP4Config(**fields, calibration_dir=str(tmp_path)), watcher)
    assert report.notes == {} and report.statistics.source == "random"
    for key, seen in watcher.seen.items():
        diagonal = torch.stack([one.diagonal for one in seen]) if isinstance(seen, list) else seen.diagonal
        assert torch.equal(diagonal, report.statistics.diagonals[key])
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("the model was run"))
    monkeypatch.setattr(type(model.model), "forward", lambda *args, **kwargs: pytest.fail("the model was run"))
    again = Watcher(model)
    config = FP4Config(channel_weights=True, calibration=str(tmp_path / "calibration.safetensors"))
    calibrate(model, plan, config, again)
    assert again.seen.keys() == watcher.seen.keys()
    key = "model.layers.1.self_attn.v_proj"
    assert torch.equal(again.seen[key].diagonal, watcher.seen[key].diagonal) and again.seen[key].tokens == 1024


def test_calibrate_on_text_asks_for_the_tokenizer():
    model = build("bert")
    config = FP4Config(channel_weights=True, calibration=["some text"])
    with pytest.raises(ZeroDivisionError):
        calibrate(model, plan_of(model), config, Watcher(model), tokenizer=lambda: 1 / 0)


@pytest.mark.gpu
def test_blocks_on_another_device():
    model = build("qwen3_moe")
    plan, packer = plan_of(model), Rounder(model)
    expected = walk(model, plan, Watcher(model), known_of(model, IDS)).statistics
    found = input_statistics(model, plan, known_of(model, IDS), device="cuda")
    for key, diagonal in expected.diagonals.items():
        torch.testing.assert_close(found.diagonals[key], diagonal, rtol=1e-3, atol=1e-6)
    walk(model, plan, packer, known_of(model, IDS), device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {h.matrix.device.type for h in packer.seen.values() if isinstance(h, Hessian)} == {"cuda"}
