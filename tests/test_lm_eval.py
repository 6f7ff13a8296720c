# SPDX-License-Identifier: Apache-2.0
"""lm-eval on packed models, and the script that makes the zero-shot table, on tasks that lie in a folder."""

import json
import sys

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import reproduce_soar_table as script
from demo_data import Problem
from hf_mxfp4 import FP4Config
from hf_mxfp4.integrations.lm_eval import as_lm
from reproduce_soar_table import Activations, config_of, summarize

DEMO_LM = script.Path(script.__file__).parent / "demo_lm"
PROBLEMS = [
    Problem(a, "+", b) for a, b in ((37, 58), (64, 29), (45, 17), (81, 12), (23, 49), (70, 26), (12, 34), (55, 38))
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}, cache_dir: "{folder}/cache"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def questions() -> list[dict]:
    """Sums with four answers of two digits each; the right one is at all four places."""
    found = []
    for i, problem in enumerate(PROBLEMS):
        right = int(problem.answer)
        choices = [str(right + step) for step in (1, 10, -7)]
        choices.insert(i % 4, problem.answer)
        found.append({"question": problem.prompt, "choices": choices, "answer": i % 4})
    return found


def write_task(folder):
    folder.mkdir()
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, questions())))
    (folder / "sums.yaml").write_text(TASK.format(folder=folder.as_posix()))
    return folder


def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    """Sum of float32 log-probabilities of the continuation's tokens."""
    prompt, whole = (tokenizer(text)["input_ids"] for text in (context, context + continuation))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole[:-1]])).logits[0].float().log_softmax(-1)
    return sum(logits[i - 1, whole[i]].item() for i in range(len(prompt), len(whole)))


def load(config=None):
    quantization = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(DEMO_LM, dtype=torch.bfloat16, **quantization).eval()


def run(*arguments, model=DEMO_LM):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(script.main)
    return CliRunner().invoke(app, [*map(str, (model, *arguments))], env={"COLUMNS": "400"})


def record(**scores):
    return {"bits_per_weight": 4.5, "scores": {task: {"acc": found} for task, found in scores.items()}}


@pytest.fixture
def lm_eval(monkeypatch):
    """lm-eval, without the seconds it spends on a description of the machine and on the list of its own tasks."""
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)
    return lm_eval


# --- with lm-eval ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, FP4Config(), FP4Config(format="mxfp4")], ids=["bf16", "nvfp4", "mxfp4"])
def test_log_likelihoods_are_the_models(config):
    instance = pytest.importorskip("lm_eval.api.instance")
    model, tokenizer = load(config), AutoTokenizer.from_pretrained(DEMO_LM)
    lm = as_lm(model, tokenizer, softmax_dtype="float32")
    pairs = [("37+58=", "95"), ("37+58=", "96"), ("class Stack:\n    def", " __init__(self):")]
    requests = [instance.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    assert found == pytest.approx([log_likelihood(model, tokenizer, *pair) for pair in pairs], abs=1e-4)
    assert lm.device == model.device


def test_table(tmp_path, lm_eval):
    output = tmp_path / "out"
    arguments = ["--tasks", write_task(tmp_path / "tasks"), "--output", output, "--device", "cpu", "--batch-size", 4]
    result = run(*arguments, "--activations", "a16", "--method", "nvfp4 amax", "--method", "mxfp4 soar")
    assert result.exit_code == 0, result.output
    report = json.loads((output / "accuracy_a16.json").read_text())
    table = (output / "accuracy_a16.md").read_text(encoding="utf-8")
    assert (report["model"], report["activations"]) == ("demo_lm", "a16") and table.strip() in result.output
    assert str(tmp_path) not in table + json.dumps(report)

    # What the models answer, asked without lm-eval.
    configs = {
        "bf16": None,
        "nvfp4 amax": FP4Config(scale_rule="amax"),
        "mxfp4 soar": FP4Config(format="mxfp4"),
    }
    tokenizer = AutoTokenizer.from_pretrained(DEMO_LM)
    for row, (method, config) in zip(report["methods"], configs.items(), strict=True):
        model, right = load(config), []
        for asked in questions():
            values = [log_likelihood(model, tokenizer, asked["question"], choice) for choice in asked["choices"]]
            right.append(values.index(max(values)) == asked["answer"])
        expected = 100 * sum(right) / len(right)
        found = row["tasks"]["sums"]
        assert (row["method"], found["metric"], found["questions"]) == (method, "acc_norm", len(PROBLEMS))
        assert found["mean"] == expected > 40  # of four choices; the model can add
        bits = {"bf16": 16, "nvfp4 amax": 4.5, "mxfp4 soar": 4.25}[method]
        assert row["bits_per_weight"] == pytest.approx(bits, abs=0.001)
        assert f"| {method} | {bits:.2f} | {expected:.2f} ± {found['error']:.2f} |" in table

    # Activations in 4 bits: another row, the same bf16.
    result = run(*arguments, "--method", "mxfp4 soar", "--metric", "acc")
    assert result.exit_code == 0, result.output
    assert "bf16: finished earlier" in result.output and "mxfp4 soar: running" in result.output
    assert "W4A4" in result.output and "sums (acc)" in result.output
    assert json.loads((output / "methods/mxfp4-soar-a4.json").read_text())["request"]["activations"] == "a4"


def test_finished_methods_are_kept(tmp_path, monkeypatch, lm_eval):
    measured = []

    def evaluate(model, config, manager, tasks, limit, *rest):
        measured.append((config and f"{config.format} {config.scale_rule} {config.activation_format}", limit))
        return record(sums="1011"[: limit or 4])

    monkeypatch.setattr(script, "evaluate", evaluate)
    monkeypatch.setattr(script, "find_tasks", lambda names: (None, ["sums"]))

    def added(*arguments) -> list:
        before = len(measured)
        result = run("--output", tmp_path, *arguments)
        assert result.exit_code == 0, result.output
        return measured[before:]

    amax, soar = ["--method", "nvfp4 amax"], ["--method", "nvfp4  soar"]
    assert added(*amax) == [(None, None), ("nvfp4 amax same", None)]
    assert added(*amax, *soar) == [("nvfp4 soar same", None)]
    assert added(*soar, "--method", "bf16") == []
    assert added(*amax, "--activations", "a16") == [("nvfp4 amax None", None)]
    assert added(*soar, "--force") == [(None, None), ("nvfp4 soar same", None)]
    result = run("--output", tmp_path, *amax, "--limit", 3)  # other questions do not go into the same folder
    assert result.exit_code == 2 and "limit=None" in result.output and "--force" in result.output
    assert added(*amax, "--limit", 3, "--force") == [(None, 3), ("nvfp4 amax same", 3)]
    assert "First 3 questions" in (tmp_path / "accuracy_a4.md").read_text(encoding="utf-8")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".md")


def test_tasks_are_checked_first(tmp_path, lm_eval, monkeypatch):
    class OnlyFolders(lm_eval.tasks.TaskManager):
        def __init__(self, include_path=None, include_defaults=True):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OnlyFolders)
    tasks, empty = write_task(tmp_path / "tasks"), tmp_path / "empty"
    empty.mkdir()
    assert script.find_tasks([str(tasks)])[1] == ["sums"]
    with pytest.raises(ValueError, match="no task no_such_task;"):
        script.find_tasks(["no_such_task", str(tasks)])
    with pytest.raises(ValueError, match="no task in .*empty;"):
        script.find_tasks([str(empty)])
    text = (tasks / "sums.yaml").read_text()
    (tasks / "sums.yaml").write_text(text.replace("{metric: acc}, {metric: acc_norm}", "{metric: brier_score}"))
    with pytest.raises(ValueError, match="sums: no acc_norm or acc"):
        script.find_tasks([str(tasks)])


# --- without ---------------------------------------------------------------------------------------------------------


def test_missing_lm_eval_is_explained(monkeypatch):
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install hf-mxfp4\[eval\]"):
        as_lm(None, None)
    result = run()
    assert result.exit_code == 2 and "pip install hf-mxfp4[eval]" in result.output


def test_wrong_models_are_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", sys.modules["json"])  # found; nothing of it is used
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}')
    result = run(model=tmp_path)
    assert result.exit_code == 2 and "is quantized already" in result.output
    result = run(model=tmp_path / "nowhere")
    assert result.exit_code == 2 and "nowhere" in result.output


def test_methods_are_configs():
    config = config_of("mxfp4 soar search=2 compute_dtype=float32", Activations.a16)
    assert config == FP4Config(format="mxfp4", search=2, compute_dtype="float32")
    assert config_of("nvfp4", Activations.a16) == FP4Config()
    assert config_of("nvfp4 soar", Activations.a4) == FP4Config(activation_format="same")
    for method in script.METHODS:
        config_of(method, Activations.a4)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("int4 amax", ValueError, "format='int4'"),
        ("mxfp4 four_over_six", ValueError, "four_over_six"),
        ("nvfp4 soar search", ValueError, "'search' is not name=value"),
        ("nvfp4 soar serch=2", TypeError, "did you mean search"),
    ],
)
def test_wrong_methods_are_explained(method, error, message):
    with pytest.raises(error, match=message):
        config_of(method, Activations.a16)


def test_summary():
    records = {
        "bf16": record(first="1111", second="11111000"),
        "nvfp4 amax": record(first="1100", second="11111000"),
        "nvfp4 soar": record(first="1110", second="11111000"),
        "mxfp4 soar": record(first="1110", second="00011111"),
    }
    rows = {row["method"]: row for row in summarize(records, "acc_norm")}  # only acc is there
    assert rows["bf16"]["average"]["mean"] == (100 + 62.5) / 2 and rows["bf16"]["change"] == {"mean": 0, "error": 0}
    # Standard deviations over n - 1: of 1110 is 50, of five in eight sqrt(8/7 * 5/8 * 3/8) * 100.
    first, second = 50 / 4**0.5, 100 * (15 / 56 / 8) ** 0.5
    assert rows["nvfp4 soar"]["tasks"]["first"] == {"metric": "acc", "questions": 4, "mean": 75, "error": first}
    assert rows["nvfp4 soar"]["tasks"]["second"]["error"] == pytest.approx(second)
    assert rows["nvfp4 soar"]["average"]["error"] == pytest.approx((first**2 + second**2) ** 0.5 / 2)
    # The second task has the same answers as bf16, so it adds nothing to the paired error.
    assert rows["nvfp4 soar"]["change"] == {"mean": -12.5, "error": pytest.approx(first / 2)}
    assert rows["mxfp4 soar"]["change"]["error"] > rows["nvfp4 soar"]["change"]["error"]
    gaps = {method: row["gap_recovered"] for method, row in rows.items()}
    assert gaps == {"bf16": None, "nvfp4 amax": 0, "nvfp4 soar": 0.5, "mxfp4 soar": None}  # mxfp4 amax was not run
