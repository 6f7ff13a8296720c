# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise (which norms, how much, restored exactly), and GRPO on a packed model."""

import contextlib
import copy
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import tiny_models
import torch
import transformers
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import demo_data
from hf_mxfp4 import FP4Config
from hf_mxfp4.integrations import trl as trl_module
from hf_mxfp4.integrations.trl import (
    AdaptiveQuantizationNoise,
    check_grpo_config,
    is_rms_norm,
    noise_schedule,
    rms_norms,
)

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

DEMO_LM = Path(demo_data.__file__).parent / "demo_lm"


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, state: dict):
    tiny_models.assert_same_tensors(model.state_dict(), state)


# --- schedule --------------------------------------------------------------------------------------------------------


def test_schedule_is_the_published_one():
    sigmas = noise_schedule(1e-2, 1e-4, 10)
    assert sigmas[0] == 0 and sigmas[1] == 1e-2 and len(sigmas) == 10
    assert sigmas[1:] == pytest.approx([1e-2 * (1e-4 / 1e-2) ** (k / 8) for k in range(9)], rel=1e-12)
    assert noise_schedule(0, 0, 3) == [0, 0, 0] and noise_schedule(1, 1, 3) == [0, 1, 1]


def test_stages_share_training_equally():
    aqn = AdaptiveQuantizationNoise(stages=4)
    of_steps = [aqn.sigma_at(step, 8) for step in range(8)]
    assert of_steps == [sigma for sigma in aqn.schedule for _ in range(2)]
    assert aqn.sigma_at(8, 8) == aqn.sigma_at(99, 8) == 1e-4 and aqn.sigma_at(0, 0) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"sigma_start": -1e-2},
        {"sigma_end": -1e-4},
        {"sigma_start": float("nan")},
        {"sigma_start": float("inf")},
        {"sigma_end": 0.0},
        {"sigma_start": 1e-4, "sigma_end": 1e-2},
        {"sigma_start": "0.01"},
        {"stages": 2},
        {"stages": 10.0},
        {"stages": True},
        {"seed": 0.5},
    ],
)
def test_bad_schedules_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdaptiveQuantizationNoise(**bad)


# --- norms -----------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """An RMSNorm without the word in its name."""

    def __init__(self, size=8, plus=0.0):
        super().__init__()
        self.weight, self.plus = nn.Parameter(torch.zeros(size)), plus

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (self.weight + self.plus)


class Scaled(Norm):
    def forward(self, x):
        return x * self.weight


class Centered(Norm):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


@pytest.mark.parametrize(
    "module",
    [nn.RMSNorm(8), T5LayerNorm(8), GemmaRMSNorm(8), Qwen3NextRMSNormGated(8), Norm(), Norm(plus=1.0)],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_are_known_by_what_they_do(module, dtype):
    module = copy.deepcopy(module).to(dtype)
    before = bits(module)
    assert is_rms_norm(module)
    assert_same(module, before)
    assert is_rms_norm(module.to("meta"))


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(8),
        nn.LayerNorm(8, bias=False),
        nn.RMSNorm(8, elementwise_affine=False),
        nn.GroupNorm(2, 8),
        nn.PReLU(8),
        nn.PReLU(1),
        nn.Linear(8, 8, bias=False),
        nn.Embedding(8, 8),
        Scaled(),
        Centered(),
        nn.Sequential(nn.RMSNorm(8)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_others_are_not(module):
    assert not is_rms_norm(module)


@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen3", 9), ("llama", 5), ("qwen3_moe", 9), ("mixtral", 5), ("olmoe", 9), ("gpt_oss", 5), ("bert", 0)],
)
def test_all_norms_of_a_model_are_found(name, count):
    with torch.device("meta"):
        model = tiny_models.auto_class(name).from_config(tiny_models.tiny_config(name))
    assert len(rms_norms(model)) == count
    assert len(rms_norms(model)) == sum("norm" in path for path, _ in model.named_parameters()) or name == "bert"


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return tiny_models.case("qwen3").load()


def with_noise(model, aqn, step=5, **kwargs) -> dict:
    with aqn.rollout(model, step, 10, **kwargs):
        return {name: norm.weight.detach().clone() for name, norm in rms_norms(model).items()}


def test_noise_has_its_sigma_and_leaves_no_trace():
    model = nn.Sequential(nn.RMSNorm(20_000), nn.Linear(4, 4), nn.RMSNorm(20_000))
    before, aqn = bits(model), AdaptiveQuantizationNoise(stages=10, sigma_start=0.5, sigma_end=0.1)
    with aqn.rollout(model, 9, 10) as sigma:
        added = torch.stack([model[i].weight - before[f"{i}.weight"] for i in (0, 2)])
        assert torch.equal(model[1].weight, before["1.weight"])
    assert sigma == aqn.sigma == 0.1 and aqn.changed == 1.0
    assert added.std(1).tolist() == pytest.approx([0.1, 0.1], rel=0.03) and added.mean().abs() < 0.003
    assert not torch.equal(*added)
    assert_same(model, before)


def test_ctrl_c_while_weights_are_put_back_leaves_no_noise(model, monkeypatch):
    before, calls, put_back = bits(model), [], trl_module._put_back

    def interrupted(kept):
        calls.append(kept)
        put_back(kept[: 2 if len(calls) == 1 else None])
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(trl_module, "_put_back", interrupted)
    with pytest.raises(KeyboardInterrupt), AdaptiveQuantizationNoise().rollout(model, 5, 10):
        pass
    assert_same(model, before)


def test_noise_does_not_depend_on_default_dtype_and_device(model):
    expected = with_noise(model, AdaptiveQuantizationNoise(0.5, 0.1))
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            found = with_noise(model, AdaptiveQuantizationNoise(0.5, 0.1))
    finally:
        torch.set_default_dtype(torch.float32)
    tiny_models.assert_same_tensors(found, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_weights_come_back_after_an_exception(model, error):
    before, aqn = bits(model), AdaptiveQuantizationNoise()
    with pytest.raises(error), aqn.rollout(model, 5, 10):
        assert not torch.equal(model.model.norm.weight, before["model.norm.weight"])
        raise error
    assert_same(model, before)
    assert with_noise(model, aqn)["model.norm"].ne(before["model.norm.weight"]).any()  # it is not stuck


def test_every_bit_pattern_comes_back():
    norm = nn.RMSNorm(2**16)
    norm.weight.data = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    before = norm.weight.data.view(torch.int16).clone()
    with AdaptiveQuantizationNoise().rollout(norm, 5, 10):
        assert not torch.equal(norm.weight.data.view(torch.int16), before)
    assert torch.equal(norm.weight.data.view(torch.int16), before)


def test_noise_is_fresh_for_each_batch_and_a_function_of_seed_step_and_batch(model):
    aqn = AdaptiveQuantizationNoise(0.5, 0.1)
    torch.manual_seed(1)
    first, second, later = (with_noise(model, aqn, step) for step in (5, 5, 6))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = AdaptiveQuantizationNoise(0.5, 0.1)
    assert all(torch.equal(value, first[name]) for name, value in with_noise(model, again, 5).items())
    other_seed = with_noise(model, AdaptiveQuantizationNoise(0.5, 0.1, seed=1), 5)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (second, later, other_seed):
        assert not any(torch.equal(value, first[name]) for name, value in other.items())


def test_bfloat16_rounds_small_noise_away_and_says_so():
    norm = nn.RMSNorm(10_000, dtype=torch.bfloat16)
    aqn = AdaptiveQuantizationNoise(1e-4, 1e-4)
    with_noise(norm, aqn)
    assert aqn.changed == 0
    with_noise(norm.float(), aqn)
    assert aqn.changed > 0.999


def test_noise_is_added_once_inside_itself_and_to_a_shared_weight():
    model = nn.ModuleList([nn.RMSNorm(1000), nn.RMSNorm(1000)])
    model[1].weight = model[0].weight
    aqn = AdaptiveQuantizationNoise(0.1, 0.1)
    with aqn.rollout(model, 5, 10):
        once = model[0].weight.detach().clone()
        with aqn.rollout(model, 5, 10):
            assert torch.equal(model[0].weight, once)
        assert torch.equal(model[0].weight, once)
    assert torch.equal(model[0].weight, torch.ones(1000)) and aqn.rollouts == 1
    assert (once - 1).std().item() == pytest.approx(0.1, rel=0.1)


def test_a_graph_made_before_the_noise_still_goes_backward():
    norm, x = nn.RMSNorm(8), torch.randn(2, 8)
    (expected,) = torch.autograd.grad(norm(x).square().sum(), norm.weight)
    loss = norm(x).square().sum()
    with_noise(norm, AdaptiveQuantizationNoise())
    assert torch.equal(torch.autograd.grad(loss, norm.weight)[0], expected)


def test_models_it_cannot_work_on_are_refused():
    aqn = AdaptiveQuantizationNoise()
    with pytest.raises(ValueError, match="no RMSNorm"), aqn.rollout(nn.LayerNorm(4), 0, 1):
        pass
    with pytest.raises(ValueError, match="offloaded"), aqn.rollout(nn.RMSNorm(4, device="meta"), 0, 1):
        pass
    sharded = nn.RMSNorm(4)
    sharded.weight.ds_id = 3
    with pytest.raises(ValueError, match="ZeRO-3"), aqn.rollout(sharded, 0, 1):
        pass


def test_sharded_norms_are_refused(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.RMSNorm(8))
        dist.fsdp.fully_shard(model)
        with pytest.raises(ValueError, match=r"0\.weight is sharded \(DTensor\)"):
            AdaptiveQuantizationNoise().attach(model, transformers.TrainerState())
    finally:
        dist.destroy_process_group()


# --- generate --------------------------------------------------------------------------------------------------------


def attached(model, **kwargs):
    aqn, state = AdaptiveQuantizationNoise(**kwargs), transformers.TrainerState(max_steps=10, global_step=5)
    aqn.attach(model, state)
    return aqn


def spy(model):
    """Records the last norm as the forward passes see it."""
    seen, norm = [], model.get_submodule("model.norm")
    norm.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    return seen


@pytest.mark.parametrize("adapted", [False, True])
def test_generate_has_noise_in_training_only(model, adapted):
    seen, whole = spy(model), model
    if adapted:
        whole = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    before, aqn = bits(whole), attached(whole)
    clean = model.model.norm.weight.detach().clone()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 127}
    whole.train().generate(input_ids=tiny_models.tokens(), **options)
    assert seen and all(torch.equal(weight, seen[0]) for weight in seen) and not torch.equal(seen[0], clean)
    assert_same(whole, before)
    first = seen[0]
    seen.clear()
    whole(input_ids=tiny_models.tokens())  # log-probabilities
    whole.eval().generate(input_ids=tiny_models.tokens(), **options)
    assert len(seen) > 1 and all(torch.equal(weight, clean) for weight in seen)
    seen.clear()
    whole.train().generate(input_ids=tiny_models.tokens(), **options)
    assert not torch.equal(seen[0], first)
    aqn.detach()
    assert "generate" not in vars(whole) and aqn.rollouts == 2


def test_attaching_twice_or_by_another_leaves_one_and_the_old_generate(model):
    calls = []
    model.generate = lambda *args, **kwargs: calls.append(model.model.norm.weight.detach().clone())
    mine, clean = model.generate, model.model.norm.weight.detach().clone()
    stale = attached(model.train())
    stale.attach(model, stale._state)
    aqn = attached(model)
    model.generate()
    assert (stale.rollouts, aqn.rollouts, len(calls)) == (0, 1, 1) and not torch.equal(calls[0], clean)
    aqn.detach()
    stale.detach()
    assert model.generate is mine


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_generates_for_itself(model, how):
    attached(model.train())
    twin = how(model)
    assert twin.generate.model is twin and twin.generate.noise._model is twin
    with torch.no_grad():
        twin.model.norm.weight.fill_(3)
    before = bits(twin)
    twin.generate(input_ids=tiny_models.tokens(), max_new_tokens=1, pad_token_id=0)
    assert_same(twin, before)


def test_training_without_a_rollout_is_said(model, caplog):
    aqn, state = AdaptiveQuantizationNoise(), transformers.TrainerState(max_steps=2)
    aqn.on_train_begin(None, state, None, model=model)
    state.global_step = 2
    aqn.on_train_end(None, state, None)
    assert "there was no noise" in caplog.text and "generate" not in vars(model)


# --- GRPO ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.tiny_model("qwen3", vocab_size=demo_data.VOCAB_SIZE, num_hidden_layers=1).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(DEMO_LM).save_pretrained(folder)
    return folder


def shorter(completions, **kwargs):
    return [-float(len(set(text))) for text in completions]


def grpo(tiny, output, callbacks=(), resume=None, reward=shorter, **changes):
    options = dict(
        output_dir=str(output),
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, quantization_config=FP4Config())
    trainer = trl.GRPOTrainer(
        model,
        reward,
        trl.GRPOConfig(**options | changes),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(tiny),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear"),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    adapter = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if "lora_" in name}
    return trainer, adapter


def test_grpo_with_noise_resumes_bit_for_bit(tiny, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "beta": 0.1, "learning_rate": 1e-2}
    make = lambda: AdaptiveQuantizationNoise(0.5, 0.1, stages=3)  # noqa: E731
    aqn = make()
    trainer, whole = grpo(tiny, tmp_path / "whole", [aqn], **changes)
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["aqn/sigma"] for row in logged] == aqn.schedule == [0.0, 0.5, 0.1]
    assert [row["aqn/changed"] > 0.5 for row in logged] == [False, True, True]
    assert all(row["entropy"] > 0 for row in logged) and logged[-1]["kl"] > 0
    assert "generate" not in vars(trainer.model) and aqn.rollouts == 3
    shutil.copytree(tmp_path / "whole/checkpoint-1", tmp_path / "rest/checkpoint-1")
    _, rest = grpo(tiny, tmp_path / "rest", [make()], str(tmp_path / "rest/checkpoint-1"), **changes)
    tiny_models.assert_same_tensors(rest, whole)
    assert any(value.abs().sum() > 0 for name, value in whole.items() if "lora_B" in name)


def test_no_noise_is_no_change_and_noise_is_in_no_checkpoint(tiny, tmp_path):
    _, without = grpo(tiny, tmp_path / "a")
    _, zero = grpo(tiny, tmp_path / "b", [AdaptiveQuantizationNoise(0, 0)], gradient_checkpointing=True)
    tiny_models.assert_same_tensors(zero, without)

    class Watch(transformers.TrainerCallback):
        """Norms have gradients, and no noise when something is saved."""

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.norms = {name: norm.weight.requires_grad_(True) for name, norm in rms_norms(model).items()}
            self.before = {name: weight.detach().clone() for name, weight in self.norms.items()}

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            assert all(weight.grad.any() for weight in self.norms.values())

        def on_save(self, args, state, control, model=None, **kwargs):
            tiny_models.assert_same_tensors({n: w.detach() for n, w in self.norms.items()}, self.before)
            model.base_model.model.save_pretrained(Path(args.output_dir) / "full")

    callbacks = [AdaptiveQuantizationNoise(0.5, 0.5, stages=3), Watch()]
    _, noisy = grpo(tiny, tmp_path / "c", callbacks, save_strategy="steps", save_steps=1)
    assert any(not torch.equal(noisy[name], value) for name, value in without.items())
    saved = safetensors.torch.load_file(tmp_path / "c/full/model.safetensors")
    names = {f"{name}.weight".removeprefix("base_model.model."): value for name, value in callbacks[1].before.items()}
    tiny_models.assert_same_tensors({name: saved[name] for name in names}, names)


def test_a_raising_reward_leaves_the_model_clean_and_the_checkpoint_usable(tiny, tmp_path):
    calls = []

    def raising(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no judge")
        return shorter(completions)

    aqn = AdaptiveQuantizationNoise(0.5, 0.1, stages=3)
    with pytest.raises(OSError, match="no judge"):
        grpo(tiny, tmp_path, [aqn], reward=raising, save_strategy="steps", save_steps=1)
    assert not aqn._active
    aqn.detach()
    state = json.loads((tmp_path / "checkpoint-1/trainer_state.json").read_text())
    assert state["global_step"] == 1
    trainer, _ = grpo(tiny, tmp_path, [aqn], resume=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 3


def test_other_ways_to_generate_are_refused(model):
    config = trl.GRPOConfig(output_dir="unused", use_vllm=True, report_to="none", bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="use_vllm=False"):
        check_grpo_config(config, model)
    with pytest.raises(ValueError, match="use_vllm=False"):
        check_grpo_config(config)
    check_grpo_config(config, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="weights of its own"):
        AdaptiveQuantizationNoise().on_init_end(config, None, None, model=nn.Linear(2, 2))
    config.use_vllm = False
    check_grpo_config(config, model)
    config.use_transformers_continuous_batching = True
    check_grpo_config(config, model)
    config.bf16 = True
    with pytest.raises(ValueError, match="float32 would go on in 16 bits"):
        check_grpo_config(config, model)


def test_sending_merged_weights_to_vllm_is_refused(model):
    """What TRL does before its first rollout with use_vllm, with none of our callbacks and without vLLM."""
    from trl.generation.vllm_generation import VLLMGeneration

    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    sync, before = object.__new__(VLLMGeneration), bits(model)
    sync.model = model
    sync._dist = SimpleNamespace(gather_params=lambda _: contextlib.nullcontext(), is_fsdp=False)
    with pytest.raises(ValueError, match="send vLLM the model's parameters.*use_vllm=False"):
        list(sync._iter_named_params())
    assert_same(model, before)
    model.merge_adapter()  # by anyone else
    assert any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))
    sync.model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
    assert [name for name, _ in sync._iter_named_params()] == ["0.weight", "0.bias"]
