# SPDX-License-Identifier: Apache-2.0
"""scripts/grpo.py from its arguments to an adapter, its rewards, and the memory estimate."""

import json
import math
import shutil
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from torch import nn

import demo_data
import rewards

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

import grpo  # noqa: E402
import training_memory  # noqa: E402
from hf_mxfp4 import FP4Config  # noqa: E402

SCRIPTS = Path(demo_data.__file__).parent
CONFIGS = SCRIPTS / "configs"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.tiny_model("qwen3", vocab_size=demo_data.VOCAB_SIZE, num_hidden_layers=1).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(SCRIPTS / "demo_lm").save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(tiny, tmp_path):
    """Of a short run."""
    fields = {
        "model": tiny,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 3,
        "learning_rate": 1e-2,
        "problems": 20,
        "held_out": 3,
        "lora_r": 2,
        "noise_stages": 3,
        "reward": "rewards:short",
        "report_to": "none",
    }
    flags = ["--use_cpu", "True", "--bf16", "False", "--gradient_checkpointing", "False"]
    return lambda **changes: [
        *(str(part) for key, value in (fields | changes).items() if value is not None for part in (f"--{key}", value)),
        *flags,
    ]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A reward by import path that differs between random completions."""
    monkeypatch.setattr(rewards, "short", lambda completions, **_: [-len(set(t)) for t in completions], raising=False)


# --- the script ------------------------------------------------------------------------------------------------------


def test_a_run_and_its_resumption(arguments, tmp_path, capsys):
    whole = grpo.run(arguments())
    assert whole["before"].keys() == whole["after"].keys() == {"rewards:short"}
    assert [row["step"] for row in whole["steps"]] == [1, 2]
    assert [row["aqn/sigma"] for row in whole["steps"]] == [0.0, 0.01]
    assert all(math.isfinite(row[name]) for row in whole["steps"] for name in ("reward", "entropy"))
    printed = capsys.readouterr().out
    assert "packed weights" in printed and "step 2/2: reward" in printed
    out, rest = tmp_path / "out", tmp_path / "rest"
    assert json.loads((out / "grpo.json").read_text()) == whole
    with pytest.raises(ValueError, match="add --resume to go on"):
        grpo.run(arguments())

    shutil.copytree(out / "checkpoint-1", rest / "checkpoint-1")
    (rest / "grpo.json").write_text(json.dumps({"before": whole["before"]}))
    adapter = "adapter_model.safetensors"
    for _ in range(2):  # a run that was stopped after its last step takes no other
        assert grpo.run([*arguments(output_dir=rest), "--resume"]) == whole
        assert (rest / adapter).read_bytes() == (out / adapter).read_bytes()
        (rest / adapter).unlink()

    model = tiny_models.auto_class("qwen3").from_pretrained(arguments()[1])
    loaded = peft.PeftModel.from_pretrained(model, out)  # a normal adapter, also for the dense model
    assert any(value.any() for name, value in loaded.named_parameters() if "lora_B" in name)


def test_data_files_templates_and_chat(arguments, tiny, tmp_path, monkeypatch):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i}+1", "a": str(i + 1), "level": i}) + "\n" for i in range(6)))
    seen = []

    def judge(prompts, completions, completion_ids, answer, level, **_):
        seen.extend(zip(prompts, answer, level, strict=True))
        texts = completions if isinstance(prompts[0], str) else [message["content"] for (message,) in completions]
        assert all(isinstance(text, str) for text in texts) and 0 < max(map(len, completion_ids)) <= 3
        return [0.0] * len(completions)

    monkeypatch.setattr(rewards, "judge", judge, raising=False)
    options = {"data": data, "held_out_data": data, "prompt_column": "q", "answer_column": "a", "max_steps": 1}
    grpo.run(arguments(**options, reward="rewards:judge", template="say {prompt}=", stop="\n"))
    assert len(seen) == 3 + 4 + 3 and all(p == f"say {i}+1=" and a == str(i + 1) for p, a, i in seen)

    data.write_text('{"q": [{"role": "user", "content": "1"}], "a": "1"}\n')
    with pytest.raises(ValueError, match="prompt_column='q' must hold texts; found .*role"):
        grpo.run(arguments(**options, output_dir=tmp_path / "c"))
    data.write_text("".join(json.dumps({"q": f"{i}+1", "a": str(i + 1), "level": i}) + "\n" for i in range(6)))
    chat = tmp_path / "chat"
    shutil.copytree(tiny, chat)
    (chat / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")
    grpo.run(arguments(**options, model=chat, reward="rewards:judge", system_prompt="Add.", output_dir=tmp_path / "c"))
    assert seen[-1][0] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+1"}]


def test_dry_run_writes_nothing(arguments, tmp_path, capsys):
    assert grpo.run([*arguments(format="bf16"), "--dry_run"]) == {}
    printed = capsys.readouterr().out
    assert "other weights" in printed and "packed weights" not in printed
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_packed_model_is_taken_as_it_is(tiny, arguments, tmp_path, capsys):
    folder = tmp_path / "packed"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, quantization_config=FP4Config(format="mxfp4"))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    for changes in ({"format": "nvfp4"}, {"format": "bf16"}, {"fp4": '{"scale_rule": "amax"}'}):
        with pytest.raises(ValueError, match="quantized already"):
            grpo.run(arguments(model=folder, **changes))
    grpo.run([*arguments(model=folder), "--dry_run"])
    assert "packed weights" in capsys.readouterr().out
    assert grpo.main(arguments(model=folder, format="nvfp4")) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_completions_end_where_they_end():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 9]))
    tokens = torch.tensor([[1, 9, 0, 0], [7, 7, 7, 7], [1, 2, 3, 4]])
    assert grpo.ended(tokens, model) == [[1, 9], [7], [1, 2, 3, 4]]


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("grpo_*.yaml")))
def test_shipped_configs_are_read(name, tmp_path):
    parser = trl.TrlParser((grpo.Arguments, trl.GRPOConfig))
    arguments, config = parser.parse_args_and_config(["--config", str(CONFIGS / name), "--bf16", "False"])
    assert all(callable(rewards.load(reward)) for reward in arguments.reward)
    assert arguments.noise and config.output_dir and config.generation_batch_size % config.num_generations == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "nothing"}, "allowed: exact_match, gsm8k, stated"),
        ({"sigma_start": -1}, "sigma_start=-1.0"),
        ({"noise_stages": 2}, "stages=2"),
        ({"stop": "ab cd"}, "it must be one"),
        ({"fp4": "[1]"}, "not a mapping"),
        ({"fp4": "{"}, "is not JSON"),
        ({"format": "int4"}, "int4"),
        ({"format": "bf16", "fp4": '{"scale_rule": "amax"}'}, "packs nothing"),
        ({"dtype": "int8"}, "dtype='int8'; allowed: bfloat16"),
        ({"data": "none.jsonl"}, "there is no file none.jsonl"),
        ({"prompt_column": "question"}, "it has prompt, answer"),
        ({"template": "no"}, "does not contain"),
        ({"problems": 0}, "problems=0"),
        ({"lora_r": 0}, "`r`"),
        ({"use_vllm": True}, "use_vllm=False"),
        ({"resume": True}, "there is no checkpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(arguments, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        grpo.run(arguments(**changes))
    assert not list(tmp_path.glob("out/*"))


def test_a_failing_reward_is_named_and_the_checkpoint_stays(arguments, tmp_path, monkeypatch, capsys):
    calls = []

    def judge(completions, **_):
        calls.append(1)
        return [0.0] * (len(completions) - (len(calls) == 3))

    monkeypatch.setattr(rewards, "judge", judge, raising=False)
    with pytest.raises(ValueError, match="rewards:judge returned 3 rewards for 4 completions"):
        grpo.run(arguments(reward="rewards:judge"))
    assert "checkpoint-1 stays: go on with --resume" in capsys.readouterr().err
    assert [row["step"] for row in grpo.run([*arguments(reward="rewards:judge"), "--resume"])["steps"]] == [1, 2]


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 1,234", "1234"),
        ("#### 12\nand 99 more", "12"),
        (r"\boxed{\frac{1}{2}} is 0.5, so \boxed{-3.50}", "-3.5"),
        ("it costs $18", "18"),
        ("9 - 4 is -5", "-5"),
        ("#### x", None),
        ("no number", None),
        ("", None),
        (r"\boxed{7", "7"),
        (".5", "0.5"),
        ("17-5", "5"),
        ("-$5 or $-6", "-6"),
        ("#### \u22125", "-5"),
        (r"\boxed{-\$1{,}234.5}", "-1234.5"),
        ("1,234,567 of 12,34", "34"),
        ("the sides are 3,4,5", "5"),
        ("1.5e3", "1500"),
        ("12 %", "12"),
        ("#### 3/4 cup", None),
        ("24/2 = 12", "12"),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{\frac12}", None),
    ],
)
def test_final_number(text, number):
    assert rewards.final_number(text) == (None if number is None else Decimal(number))


def test_built_in_rewards():
    completions = [
        "12\n",
        " 12",
        "012",
        "so\n#### 12.0",
        r"\boxed{12} or \boxed{3}",
        [{"role": "assistant", "content": "12"}],
    ]
    answer = ["12"] * 6
    assert rewards.exact_match(completions, answer) == [1, 1, 0, 0, 0, 1]
    assert rewards.gsm8k(completions, ["a b c\n#### 12"] * 6) == [1, 1, 1, 1, 0, 1]
    assert rewards.stated(completions) == [0, 0, 0, 0.1, 0, 0]
    assert rewards.exact_match(["7"], [7]) == rewards.gsm8k(["7"], [7]) == [1]
    with pytest.raises(ValueError, match="answer 'x' has no final number"):
        rewards.gsm8k(["7", "7"], ["7", "x"])


def test_rewards_are_found_by_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def good(completions, **_):\n    return [1] * len(completions)\nOTHER = 3\n")
    assert rewards.load(f"{file}:good")(["a", "b"]) == [1, 1]
    assert rewards.load("math:sqrt") is math.sqrt
    for path, message in (
        ("gsm9k", "allowed: exact_match"),
        (f"{file}:bad", "has no function bad; it has good"),
        (f"{file}:OTHER", "has no function OTHER"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        ("no.such.module:f", "No module named 'no'"),
        ("math:", "allowed: exact_match"),
    ):
        with pytest.raises(ValueError, match=message):
            rewards.load(path)


def raising(completions, **_):
    raise KeyError("level")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (raising, RuntimeError, "reward function judge raised KeyError: 'level'"),
        (lambda **_: [1.0], ValueError, "returned 1 rewards for 2 completions"),
        (lambda **_: 1.0, TypeError, "returned float; it must return a list"),
        (lambda **_: None, TypeError, "returned NoneType"),
        (lambda **_: ["a", 1], TypeError, "returned 'a' for completion 0"),
        (lambda **_: [1, float("nan")], ValueError, "returned nan for completion 1"),
        (lambda **_: [1, float("inf")], ValueError, "rewards are finite"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bad_rewards_are_named(function, error, message, asynchronous):
    async def later(**arguments):
        return function(**arguments)

    with pytest.raises(error, match=message):
        rewards.score(rewards.checked(later if asynchronous else function, "judge"), completions=["a", "b"])


@pytest.mark.parametrize("good", [(1, None), torch.tensor([1.0, 0.5]), np.array([True, False]), [np.float32(1), 0]])
def test_good_rewards_become_floats(good):
    found = rewards.checked(lambda **_: good, "m:f")(completions=["a", "b"])
    assert found[0] == 1.0 and all(value is None or type(value) is float for value in found)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_the_estimate_is_near_what_a_step_keeps(packed):
    case = tiny_models.case("qwen3")
    model = case.load() if packed else tiny_models.auto_class("qwen3").from_pretrained(tiny_models.source("qwen3"))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    parts = training_memory.estimate(model, training_memory.Work(batch=4, sequence=48, generation_rows=8))
    tiny_models.assert_same_tensors(model.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), random) and not any(p.grad is not None for p in model.parameters())

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes = training_memory._saved(model.train(), tiny_models.tokens(4, 48))
    saved = sum(size for pointer, size in sizes.items() if pointer not in own)
    assert parts["activations"] == pytest.approx(saved, rel=0.1)
    model.eval()
    with torch.no_grad():
        cache = model(input_ids=tiny_models.tokens(8, 48), use_cache=True).past_key_values
    assert parts["KV cache"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    packed_bytes = sum(b.nbytes for m in tiny_models.packed_modules(model).values() for b in m.buffers())
    assert parts["packed weights"] == packed_bytes and (packed_bytes > 0) == packed
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert parts["trained weights"] == parts["gradients"] == parts["optimizer"] / 2 == trained
    less = training_memory.estimate(model, training_memory.Work(4, 48, "sgd", gradient_checkpointing=True))
    assert less["activations"] < parts["activations"] and less["optimizer"] == 0 and less["peak"] < parts["peak"]
    assert "KV cache" not in training_memory.describe(less)


def test_an_estimate_needs_something_to_train():
    model = tiny_models.case("qwen3").load().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        training_memory.estimate(model, training_memory.Work(1, 1))
    model.model.norm = nn.RMSNorm(64, device="meta")
    with pytest.raises(ValueError, match=r"norm\.weight is on the meta device"):
        training_memory.estimate(model, training_memory.Work(1, 1))
