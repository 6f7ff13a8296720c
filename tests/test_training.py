# SPDX-License-Identifier: Apache-2.0
"""Trainer and SFTTrainer on packed bases: preparation, what they save and resume, what is refused."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from tiny_models import case, packed_modules, source, tokens
from transformers.integrations import deepspeed

from hf_mxfp4 import quantizer

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from hf_mxfp4.integrations.peft import (  # noqa: E402
    PackedBaseCheck,
    StopOnNaN,
    base_fingerprint,
    prepare_fp4_for_training,
    training,
)

LORA = dict(r=4, target_modules="all-linear", lora_dropout=0.1)


def packed(format: str = "nvfp4", **fields):
    """A tiny Qwen3 of its own, packed."""
    return case("qwen3", format).quantize(**{"scale_rule": "amax"} | fields)


def adapted(format: str = "nvfp4", **fields):
    """The same with LoRA, the same factors each time."""
    model = packed(format, **fields)
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def rows(count: int = 16, length: int = 12) -> datasets.Dataset:
    ids = tokens(count, length).tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def arguments(folder, config=transformers.TrainingArguments, **changes):
    given = dict(per_device_train_batch_size=2, max_steps=4, logging_steps=1, save_steps=2, learning_rate=1e-2)
    quiet = dict(report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="steps")
    return config(output_dir=str(folder), **{**given, **quiet, **changes})


def trainer(model, folder, callbacks=(), **changes):
    return transformers.Trainer(model, arguments(folder, **changes), train_dataset=rows(), callbacks=list(callbacks))


def losses(trained) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def adapter(folder) -> bytes:
    return (Path(folder) / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("adapted_first", [False, True])
def test_prepare_freezes_and_checkpoints_and_casts_nothing(adapted_first):
    model = adapted() if adapted_first else packed()
    inner = model.get_base_model() if adapted_first else model
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for _ in range(2):  # a second call changes nothing
        assert prepare_fp4_for_training(model) is model
        hooks = inner.get_input_embeddings()._forward_hooks
        assert inner.model.gradient_checkpointing and not inner.config.use_cache and len(hooks) == 1
        assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert len(trainable) == 28 * adapted_first and all("lora" in name for name in trainable)
    prepare_fp4_for_training(model, gradient_checkpointing=False)
    assert not inner.model.gradient_checkpointing and not inner.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_checkpointing_changes_no_gradient(kwargs):
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = packed()
        for _ in range(2):
            prepare_fp4_for_training(model, checkpointing, kwargs)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA | {"init_lora_weights": False, "lora_dropout": 0}))
        model.train()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) == 28 and all(gradient.abs().max() > 0 for gradient in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def test_kbit_preparation_of_peft_is_right_only_wider():
    """What PEFT's own helper does to a packed model: float32 activations and no checkpointing; the same function."""
    results = []
    for prepare in (prepare_fp4_for_training, peft.prepare_model_for_kbit_training):
        model = prepare(packed())
        torch.manual_seed(3)
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA | {"init_lora_weights": False, "lora_dropout": 0}))
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        results.append((loss.item(), gradient, model.get_base_model().model.gradient_checkpointing, model.dtype))
    (loss, gradient, *ours), (wide_loss, wide_gradient, *peft_own) = results
    assert ours == [True, torch.bfloat16] and peft_own == [False, torch.float32]
    assert abs(loss - wide_loss) < 0.01  # bfloat16 activations have 8 bits
    assert torch.cosine_similarity(gradient, wide_gradient, dim=0) > 0.995


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def offloaded():
    model = packed()
    model.model.layers[1].mlp.up_proj.to("meta")
    return model


def without_checkpointing():
    model = packed()
    model.supports_gradient_checkpointing = False
    return model


def from_inference_mode():
    with torch.inference_mode():
        return packed()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: case("qwen3").dense, ValueError, "Qwen3ForCausalLM has no packed layer.*FP4Config"),
        (merged, ValueError, r"q_proj.*\['default'\] are merged.*unmerge_adapter"),
        (offloaded, ValueError, "model.layers.1.mlp.up_proj is offloaded"),
        (from_inference_mode, ValueError, "inference_mode"),
        (lambda: torch.compile(packed()), ValueError, "compiled"),
        (without_checkpointing, ValueError, "Qwen3ForCausalLM has no gradient checkpointing"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "Linear"),
    ],
)
def test_prepare_refuses(make, error, words):
    model = make()
    asked = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(error, match=words):
        prepare_fp4_for_training(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == asked


class Zero:
    """transformers' HfDeepSpeedConfig, as far as it is asked; DeepSpeed itself is not needed."""

    def __init__(self, stage: int):
        self.stage, self.config = stage, {"zero_optimization": {"stage": stage}}

    def is_zero3(self) -> bool:
        return self.stage == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages(stage, monkeypatch):
    model, load, zero = packed(), case("qwen3").load, Zero(stage)
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: zero)
    if stage < 3:
        assert prepare_fp4_for_training(model) is model
        assert len(packed_modules(packed())) == 14
        return
    for act in (lambda: prepare_fp4_for_training(model), packed, load):
        with pytest.raises(ValueError, match="ZeRO-3.*stage 1 or 2"):
            act()


def test_ddp_is_told_to_broadcast_no_packed_tensor():
    model = packed()
    for wrapped in (model, peft.get_peft_model(model, peft.LoraConfig(**LORA))):
        ignored = set(wrapped._ddp_params_and_buffers_to_ignore)
        assert sum(name in ignored for name, _ in wrapped.named_buffers()) == 14 * 3
        assert not any(name in ignored for name, _ in wrapped.named_parameters())


def test_data_parallel_is_refused_and_says_what_to_start():
    layer = packed_modules(packed())["model.layers.0.mlp.up_proj"]
    with pytest.raises(ValueError, match="accelerate launch.*torchrun"):
        layer._replicate_for_data_parallel()


def test_trainer_refuses_two_gpus_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs.*accelerate launch"):
        trainer(adapted(), tmp_path, [PackedBaseCheck()])


@pytest.mark.parametrize(
    ("version", "reads_once", "words"),
    [(1, False, "FSDP 1.*fsdp_version to 2"), (2, True, "cpu_ram_efficient_loading to false"), (2, False, None)],
)
def test_trainer_takes_fsdp2_alone(tmp_path, monkeypatch, version, reads_once, words):
    """accelerate shards on accelerators only, so its plugin is put there by hand."""
    check, run = PackedBaseCheck(), trainer(adapted(), tmp_path)
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=reads_once)
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check.on_init_end(run.args, run.state, run.control, run.model)


def test_loading_by_one_process_alone_is_refused(monkeypatch):
    monkeypatch.setattr(quantizer, "is_fsdp_enabled", lambda: True)
    with pytest.raises(ValueError, match="FSDP_CPU_RAM_EFFICIENT_LOADING=0"):
        packed()


def test_trainer_refuses_a_base_without_adapters(tmp_path):
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(packed(), tmp_path)


def test_trainer_refuses_merged_adapters(tmp_path):
    run = trainer(merged(), tmp_path, [PackedBaseCheck()])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        run.train()


def test_fingerprint_knows_the_base_alone(tmp_path):
    model = packed()
    bare = base_fingerprint(model)
    assert sum(bare["modules"].values()) == 14
    model.save_pretrained(tmp_path)
    assert base_fingerprint(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))["digest"] == bare["digest"]
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert base_fingerprint(peft.get_peft_model(model, prompts)) == bare
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert base_fingerprint(model) == bare
    for other in (packed("mxfp4"), packed(scale_rule="four_over_six"), packed(activation_format="same")):
        assert base_fingerprint(other)["digest"] != bare["digest"]
    packed_modules(model)["base_model.model.model.layers.1.mlp.down_proj.base_layer"].weight_packed[5, 3] ^= 1
    assert base_fingerprint(model)["digest"] != bare["digest"]
    assert base_fingerprint(case("qwen3").dense) == {"digest": None, "modules": {}}


def test_fingerprint_samples_the_codes_of_every_expert(monkeypatch):
    model = case("qwen3_moe").quantize(scale_rule="amax")
    experts = model.model.layers[1].mlp.experts
    monkeypatch.setattr(training, "_SAMPLE", experts.down_proj_packed.nbytes // 8)
    found = {base_fingerprint(model)["digest"]}
    for expert in experts.down_proj_packed:
        expert ^= 1
        found.add(base_fingerprint(model)["digest"])
    assert len(found) == 1 + len(experts.down_proj_packed)


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "bf16": True}]
)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, changes):
    whole = trainer(adapted(), tmp_path / "whole", [PackedBaseCheck(), StopOnNaN()], **changes)
    whole.train()
    resumed = trainer(adapted(), tmp_path / "resumed", [PackedBaseCheck(), StopOnNaN()], **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert len(losses(whole)) == 4 and losses(resumed) == losses(whole)
    assert adapter(tmp_path / "resumed/checkpoint-4") == adapter(tmp_path / "whole/checkpoint-4")
    assert adapter(tmp_path / "whole/checkpoint-2") != adapter(tmp_path / "whole/checkpoint-4")
    whole.save_model(tmp_path / "final")  # what was trained is what is saved
    assert adapter(tmp_path / "final") == adapter(tmp_path / "whole/checkpoint-4")
    assert "model.safetensors" not in file_names(tmp_path / "whole/checkpoint-4")


def file_names(folder) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_resuming_on_another_base_is_refused(tmp_path):
    trainer(adapted(), tmp_path, [PackedBaseCheck()], max_steps=2).train()
    written = adapter(tmp_path / "checkpoint-2")
    run = trainer(adapted(scale_rule="four_over_six"), tmp_path, [PackedBaseCheck()])
    with pytest.raises(ValueError, match=r"another base(.|\n)*checkpoint's: 14 x.*nvfp4(.|\n)*this model: 14 x.*over"):
        run.train(resume_from_checkpoint=True)
    dense = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(source("qwen3")), peft.LoraConfig(**LORA)
    )
    with pytest.raises(ValueError, match="this model: no packed modules"):
        trainer(dense, tmp_path, [PackedBaseCheck()]).train(resume_from_checkpoint=True)
    assert file_names(tmp_path) == {"checkpoint-2"} and adapter(tmp_path / "checkpoint-2") == written


def test_resuming_a_run_without_record_begins_one(tmp_path):
    trainer(adapted(), tmp_path, max_steps=2).train()
    trainer(adapted(), tmp_path, [PackedBaseCheck()]).train(resume_from_checkpoint=True)
    stored = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())["stateful_callbacks"]
    assert stored["PackedBaseCheck"]["attributes"]["base"] == base_fingerprint(packed())


@pytest.mark.parametrize("where", ["gradient", "update"])
def test_nan_stops_before_a_checkpoint(tmp_path, where):
    class Poison(transformers.TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3 and where == "update":
                next(p for p in model.parameters() if p.requires_grad).data[0, 0] = torch.inf

    class NaNLoss(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * torch.nan if where == "gradient" and self.state.global_step == 3 else loss

    model = adapted()
    run = NaNLoss(
        model, arguments(tmp_path), train_dataset=rows(), callbacks=[Poison(), PackedBaseCheck(), StopOnNaN()]
    )
    with pytest.raises(FloatingPointError, match="step 4: NaN or Inf in .* of 28 .*last checkpoint"):
        run.train()
    assert file_names(tmp_path) == {"checkpoint-2"}
    if where == "gradient":
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    resumed = trainer(adapted(), tmp_path, [PackedBaseCheck(), StopOnNaN()])
    resumed.train(resume_from_checkpoint=True)
    assert file_names(tmp_path) == {"checkpoint-2", "checkpoint-4"}
