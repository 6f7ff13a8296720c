# SPDX-License-Identifier: Apache-2.0
"""Two processes on CPUs under `accelerate launch`, over gloo, train what one process trains; so does FSDP 2.

Run as a script, this file is one of the two. `accelerate launch --cpu --num_processes 2`, and a config file with
MULTI_CPU, start one process only (accelerate 1.15, without MPI): `--multi_gpu` starts two, `use_cpu=True` in
TrainingArguments keeps them on CPUs. torchrun does the same.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

from hf_mxfp4 import FP4Config  # noqa: E402
from hf_mxfp4.integrations.peft import PackedBaseCheck, StopOnNaN  # noqa: E402

SETTINGS = {
    "ddp": {},
    "ddp, checkpointing": {"gradient_checkpointing": True},
    "different bases": {},
    "fsdp2": None,  # accelerate shards on accelerators only: its `fsdp2_prepare_model` in a loop of our own
}


def adapted(folder: Path):
    """The base of `folder`, packed, with LoRA; and twelve rows of tokens."""
    config = FP4Config(**json.loads(os.environ.get("FP4", '{"scale_rule": "amax"}')))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    return model, torch.randint(3, 128, (12, 12), generator=torch.Generator().manual_seed(1))


def full_state(model) -> dict[str, torch.Tensor]:
    state = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def loop(folder: Path, rank: int, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of four rows, split over ranks by accelerate's FSDP 2 where there is more than one."""
    model, ids = adapted(folder)
    if ranks > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        state = SimpleNamespace(fsdp_plugin=plugin)
        accelerator = SimpleNamespace(state=state, mixed_precision="no", is_main_process=rank == 0)
        model = fsdp2_prepare_model(accelerator, model)
        assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for rows in ids.split(4):
        part = rows.chunk(ranks)[rank]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses, full_state(model)


def train(folder: Path, rows_each: int, changes: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of four rows in all, by the Trainer."""
    model, ids = adapted(folder.parent)
    given = dict(per_device_train_batch_size=rows_each, max_steps=3, logging_steps=1, learning_rate=1e-2, use_cpu=True)
    quiet = dict(report_to=[], disable_tqdm=True, save_strategy="no")
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(output_dir=str(folder), **{**given, **quiet, **changes}),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}),
        callbacks=[PackedBaseCheck(), StopOnNaN()],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], full_state(model)


def process(folder: Path):
    """All settings, one after another, in one of the processes; what stops one goes to `error-RANK.txt`."""
    rank = int(os.environ["RANK"])
    for setting, changes in SETTINGS.items():
        (folder / setting).mkdir(exist_ok=True)
        os.environ["FP4"] = json.dumps(
            {"scale_rule": "amax" if setting != "different bases" or rank else "four_over_six"}
        )
        try:
            result = loop(folder, rank, 2) if changes is None else train(folder / setting, 2, changes)
            torch.save(result, folder / setting / f"result-{rank}.pt")
        except Exception:
            (folder / setting / f"error-{rank}.txt").write_text(traceback.format_exc())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folders of all settings, beside the base."""
    from tiny_models import tiny_model

    folder = tmp_path_factory.mktemp("distributed")
    tiny_model("qwen3").save_pretrained(folder / "base")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*launch, "--main_process_port", "0", __file__, str(folder)], env=environment, timeout=300)
    assert done.returncode == 0
    return folder


def errors(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("error-*.txt"))]


@pytest.mark.parametrize("setting", ["ddp", "ddp, checkpointing", "fsdp2"])
def test_two_processes_train_what_one_does(runs, setting, tmp_path):
    assert errors(runs / setting) == []
    results = [torch.load(runs / setting / f"result-{rank}.pt") for rank in (0, 1)]
    if SETTINGS[setting] is None:
        losses, expected = loop(runs, 0, 1)
    else:
        losses, expected = train(runs / "single", 4, {})
    assert len(losses) == 3 and losses[-1] != losses[0]
    assert losses == pytest.approx(results[0][0], abs=2e-3)  # bfloat16 activations, summed in another order
    states = [state for _, state in results]
    assert [set(state) for state in states] == [set(expected)] * 2 and len(expected) == 28
    for name in expected:
        assert torch.equal(states[0][name], states[1][name]), name
    moved = torch.cat([(states[0][name] - value).flatten() for name, value in expected.items()])
    size = torch.cat([value.flatten() for value in expected.values()])
    assert moved.norm() < 0.05 * size.norm()


def test_processes_with_different_bases_are_refused(runs):
    found = errors(runs / "different bases")
    words = "process 1 has another base than process 0: 14 x FP4Linear.*scale_rule=amax"
    assert len(found) == 2 and all(re.search(words, error) for error in found)


if __name__ == "__main__":
    process(Path(sys.argv[1]))
