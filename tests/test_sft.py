# SPDX-License-Identifier: Apache-2.0
"""trl's SFTTrainer on a packed demo model, and scripts/sft_lora.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

import sft_lora  # noqa: E402
import sft_table  # noqa: E402
from hf_mxfp4 import FP4Config, FP4Linear  # noqa: E402
from hf_mxfp4.integrations.peft import PackedBaseCheck, StopOnNaN, base_fingerprint  # noqa: E402

DEMO = Path(sft_lora.__file__).parent / "demo_lm"
CONFIG = Path(sft_lora.__file__).parent / "configs/sft_demo.yaml"
LINES = [f"def add_{n}(x):\n    return x + {n}\n" for n in range(24)]
FAST = {"format": "nvfp4", "fp4": '{"scale_rule": "amax"}', "max_steps": 2, "save_steps": 1, "max_length": 32}
FAST |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "use_cpu": True, "disable_tqdm": True}


def demo(**fields):
    config = FP4Config(**{"scale_rule": "amax"} | fields)
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, quantization_config=config)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": False, "packing": True, "packing_strategy": "wrapped", "bf16": True},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "bf16": False},
    ],
)
def test_sft_trainer_runs_unchanged(tmp_path, changes):
    model = demo()
    before = base_fingerprint(model)
    evaluated = dict(
        eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, save_total_limit=1
    )
    given = dict(max_steps=2, learning_rate=1e-2, logging_steps=1, max_length=32, per_device_train_batch_size=2)
    quiet = dict(report_to=[], disable_tqdm=True, use_cpu=True)
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(output_dir=str(tmp_path), **{**given, **evaluated, **quiet, **changes}),
        train_dataset=Dataset.from_dict({"text": LINES}),
        eval_dataset=Dataset.from_dict({"text": LINES[:4]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(DEMO),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
        callbacks=[PackedBaseCheck(), StopOnNaN()],
    )
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2 and evaluations[1] < evaluations[0]  # these lines are learned at once
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluations))
    assert base_fingerprint(trainer.model) == before  # the base is what it was
    assert [p.dtype for p in trainer.model.parameters() if p.requires_grad] == [torch.float32] * 56
    saved = peft.PeftModel.from_pretrained(demo(), tmp_path / "checkpoint-2")
    for name, value in saved.state_dict().items():
        if "lora" in name:
            assert torch.equal(value, trainer.model.state_dict()[name]), name


def script(output, *words, **changes) -> int:
    """The script with the demo's config file, made fast; its return code."""
    given = {**FAST, "output_dir": output, **changes}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return sft_lora.main(["--config", str(CONFIG), *flags, *words])


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in LINES))
    return file


def test_script_trains_saves_and_resumes(tmp_path, lines, capsys):
    assert script(tmp_path / "whole", data=lines, merge="fp4") == 0
    printed = capsys.readouterr().out
    assert "packed weights" in printed and "held-out loss" in printed  # the estimate, the result
    record = json.loads((tmp_path / "whole/sft.json").read_text())
    assert record["held_out_loss_after"] < record["held_out_loss_before"] and record["steps"] == 2
    assert str(tmp_path) not in record["command"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole/merged")
    assert isinstance(model.model.layers[0].mlp.up_proj, FP4Linear) and model.config.use_cache

    parts = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole/checkpoint-1", parts / "checkpoint-1")
    (parts / "checkpoint-2").mkdir()  # of a run that was killed while it wrote
    (parts / "checkpoint-2/adapter_model.safetensors").write_bytes(b"half")
    (parts / "sft.json").write_text(json.dumps(record | {"held_out_loss_before": 9.0}))
    assert script(parts, data=lines) == 1  # it would overwrite an earlier run
    assert "checkpoint-1 of an earlier run: add --resume" in capsys.readouterr().err
    assert script(parts, "--resume", data=lines, fp4='{"scale_rule": "four_over_six"}') == 1
    assert "another base" in capsys.readouterr().err
    for _ in range(2):  # a run that was stopped after its last step takes no other
        assert script(parts, "--resume", data=lines) == 0
        resumed = json.loads((parts / "sft.json").read_text())
        assert resumed["steps"] == 2 and resumed["held_out_loss_before"] == 9.0
        assert resumed["held_out_loss_after"] == record["held_out_loss_after"]
    for file in ("adapter_model.safetensors", "checkpoint-2/adapter_model.safetensors"):
        assert (parts / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "int4"}, "format='int4'; allowed: nvfp4, mxfp4, bf16"),
        ({"fp4": '{"scale_rul": "amax"}'}, "did you mean scale_rule"),
        ({"fp4": "{"}, "fp4='{' is not JSON"),
        ({"fp4": "[1]"}, "not a mapping"),
        ({"format": "bf16"}, "packs nothing"),
        ({"merge": "int8"}, "merge='int8'; allowed: none, fp4, bf16"),
        ({"held_out": 1.5}, "held_out=1.5"),
        ({"resume": True}, "no checkpoint to resume from"),
        ({"lora": '{"rank": 4}'}, "rank"),
        ({"lora_r": 0}, "r"),
        ({"lora_targets": "nothing_here"}, "nothing_here"),
        ({"model": "nothing/there"}, "couldn't find them"),
    ],
)
def test_script_refuses(tmp_path, lines, capsys, changes, words):
    assert script(tmp_path / "out", **{"data": lines, **changes}) == 1
    message = capsys.readouterr().err
    assert "error: " in message and words in message
    assert not (tmp_path / "out/sft.json").exists()


@pytest.mark.parametrize(("text", "words"), [("", "is empty"), ('{"text": "x"}\n', "1 rows: nothing can be held out")])
def test_script_refuses_too_little_data(tmp_path, capsys, text, words):
    (tmp_path / "data.jsonl").write_text(text)
    assert script(tmp_path / "out", data=tmp_path / "data.jsonl") == 1
    message = capsys.readouterr().err
    assert "error: " in message and words in message and "data.jsonl" in message


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIG.parent.glob("sft_*.yaml")))
def test_shipped_configs_are_read(name):
    parser = trl.TrlParser([sft_lora.ModelArguments, sft_lora.RunArguments, trl.SFTConfig])
    given, _, config = parser.parse_args_and_config(["--config", str(CONFIG.parent / name), "--bf16", "False"])
    assert given.lora_config().r == given.lora_r > 0 and config.packing and config.output_dir.startswith("runs/sft")


def test_unknown_argument_of_a_config_file(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("model: demo\noutput_dir: out\nlearning_rat: 1.0\nuse_cpu: true\n")
    assert sft_lora.main(["--config", str(tmp_path / "bad.yaml")]) == 1
    assert "learning_rat" in capsys.readouterr().err


def test_table_compares_runs_that_differ_in_the_base_alone(tmp_path, capsys):
    same = {"model": "m", "data": "d", "steps": 2, "seed": 0, "trainable_parameters": 9, "device": "cpu", "threads": 1}
    same |= {"processes": 1, "python": "3", "versions": {"torch": "2"}, "date": "x", "fp4": {}, "command": "c"}
    for name, after in (("bf16", 2.0), ("nvfp4", 2.01), ("mxfp4", 2.05)):
        run = same | {"format": name, "held_out_loss_before": 3.0, "held_out_loss_after": after}
        (tmp_path / name).mkdir()
        (tmp_path / name / "sft.json").write_text(json.dumps(run))
    folders = [str(tmp_path / name) for name in ("bf16", "nvfp4", "mxfp4")]
    assert sft_table.main([*folders, "--out", str(tmp_path / "table")]) == 0
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert (
        "| nvfp4 (soar) | 3.0000 | 2.0100 | +0.50 % |" in rows
        and "| mxfp4 (soar) | 3.0000 | 2.0500 | +2.50 % |" in rows
    )
    (tmp_path / "mxfp4/sft.json").write_text(json.dumps(run | {"seed": 1}))
    assert sft_table.main([*folders, "--out", str(tmp_path / "other")]) == 1
    assert "differ in seed" in capsys.readouterr().err and not (tmp_path / "other.md").exists()
