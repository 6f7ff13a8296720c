# SPDX-License-Identifier: Apache-2.0
"""The measures of evaluation.py against closed forms, and what `hf-mxfp4 evaluate` makes of them."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import case, source, tiny_model
from torch import nn
from typer.testing import CliRunner

from hf_mxfp4 import evaluation
from hf_mxfp4.cli import app
from hf_mxfp4.hub import render_card
from hf_mxfp4.hub.errors import fingerprint
from hf_mxfp4.integrations import lm_eval, optimum

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
run = CliRunner().invoke


class Constant(nn.Module):
    """A language model that expects the same next token, whatever came before."""

    device = torch.device("cpu")

    def __init__(self, *probabilities: float):
        super().__init__()
        self.logits = torch.tensor(probabilities).log() + 3  # logits are no log-probabilities

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_scores_equal_closed_forms():
    rows = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 1, 1]])
    told = []
    models = {"base": Constant(0.5, 0.5), "same": Constant(0.5, 0.5), "other": Constant(0.8, 0.2)}
    scores = evaluation.score(models, "base", rows, 2, told.append)
    assert told == [2, 2, 2, 1, 1, 1] and list(scores) == list(models)
    reference = scores["base"]
    assert reference.divergence.tolist() == [0, 0, 0]
    assert reference.perplexity.mean == pytest.approx(2) and reference.perplexity.error == pytest.approx(0, abs=1e-6)
    assert scores["same"].kl.mean == pytest.approx(0, abs=1e-7)
    other = scores["other"]
    # Three of six predicted tokens are 0; windows hold 1, 2 and 0 of them.
    assert other.kl.mean == pytest.approx(0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2), rel=1e-6)
    assert other.loss.tolist() == pytest.approx([-math.log(0.4), -math.log(0.8), -math.log(0.2)], rel=1e-6)
    assert other.perplexity.mean == pytest.approx(2.5)
    assert other.perplexity.error == pytest.approx(2.5 * math.log(2) / math.sqrt(3))
    assert other.perplexity_increase(reference).mean == pytest.approx(0.25)


def test_windows_are_spread_over_the_text():
    rows = evaluation.spread_windows(torch.arange(101), tokens=29, seq=10)
    assert rows[:, 0].tolist() == [0, 50] and rows.shape == (2, 11)
    assert evaluation.spread_windows(torch.arange(101), tokens=10**6, seq=10)[:, 0].tolist() == list(range(0, 100, 10))
    with pytest.raises(ValueError, match="at least 11"):
        evaluation.spread_windows(torch.arange(10), tokens=10, seq=10)


def test_summaries():
    rows = torch.tensor([[0, 0, 1], [1, 0, 0]])
    scores = evaluation.score({"base": Constant(0.5, 0.5), "other": Constant(0.8, 0.2)}, "base", rows)
    found = evaluation.summary(scores["other"], scores["base"])
    assert list(found) == ["perplexity", "kl", "perplexity_increase"]
    assert found["kl"]["mean"] == pytest.approx(0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2), rel=1e-6)
    assert found["perplexity_increase"]["mean"] == pytest.approx(found["perplexity"]["mean"] / 2 - 1)
    one = evaluation.score({"base": Constant(0.5, 0.5)}, "base", rows[:1])["base"]
    assert evaluation.summary(one) == {"perplexity": {"mean": pytest.approx(2)}}  # one window has no error


def test_what_cannot_be_compared():
    rows = torch.tensor([[0, 0, 1]])
    with pytest.raises(ValueError, match="other knows 3 tokens, base 2"):
        evaluation.score({"base": Constant(0.5, 0.5), "other": Constant(0.4, 0.4, 0.2)}, "base", rows)
    broken = evaluation.score({"base": Constant(0.5, math.nan)}, "base", rows)["base"]
    with pytest.raises(ValueError, match="hold NaN or Inf"):
        evaluation.summary(broken)
    huge = evaluation.score({"base": Constant(1.0, 0.0)}, "base", rows)["base"]  # a token that it holds impossible
    with pytest.raises(ValueError, match="perplexity is inf"):
        evaluation.summary(huge)
    assert huge._replace(loss=torch.tensor([1000.0])).perplexity.mean == math.inf


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "nvfp4"
    result = run(app, ["quantize", str(DEMO), str(folder), "--rule", "amax"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def function_{i}(self):\n    return {i}\n" for i in range(60)))
    return path


def test_evaluate(packed, text):
    """The same figures as `score` gives for models loaded by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["--text", str(text), "--tokens", "512", "--length", "64", "--batch-size", "3", "--device", "cpu"]
    result = run(app, ["evaluate", str(packed), "--reference", str(DEMO), *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((packed / "evaluation.json").read_text())
    assert found["weights"] == fingerprint(packed)
    models = {name: AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval() for name in (DEMO, packed)}
    ids = AutoTokenizer.from_pretrained(packed)(text.read_text())["input_ids"]
    rows = evaluation.spread_windows(torch.tensor(ids), 512, 64)
    scores = evaluation.score({"base": models[DEMO], "packed": models[packed]}, "base", rows, 3)
    expected = evaluation.summary(scores["packed"], scores["base"])
    assert {name: found[name] for name in expected} == expected and found["kl"]["mean"] > 0
    assert found["reference"] == {"model": "demo_lm", **evaluation.summary(scores["base"])}
    assert (found["tokens"], found["windows"], found["length"]) == (512, 8, 64)
    assert (found["model"], found["text"], found["device"]) == ("nvfp4", "text.txt", "cpu")
    assert found["command"].startswith("hf-mxfp4 evaluate nvfp4 --reference demo_lm --text text.txt --tokens 512")
    assert str(packed.parent) not in json.dumps(found) and str(DEMO.parent) not in json.dumps(found)
    assert f"{found['kl']['mean']:.4f}" in str(render_card(packed))
    (packed / "evaluation.json").unlink()


def test_evaluate_w4a4_and_without_a_reference(packed, text, tmp_path):
    arguments = ["evaluate", str(packed), "--text", str(text), "--tokens", "128", "--length", "64"]
    figures = {}
    for activation in ([], ["--activation", "same"]):
        output = tmp_path / f"e{len(activation)}.json"
        result = run(app, [*arguments, *activation, "--output", str(output)])
        assert result.exit_code == 0, result.output
        found = json.loads(output.read_text())
        assert "kl" not in found and "reference" not in found
        figures[found.get("activation_format")] = found["perplexity"]["mean"]
    assert figures[None] != figures["same"] and "W4A4" in result.stdout
    assert not (packed / "evaluation.json").exists()


def test_a_result_that_cannot_be_kept_is_shown(packed, text, tmp_path, monkeypatch):
    """And stdout is one document, that of the error."""

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["hf_mxfp4.cli.evaluate"], "write_file", full)
    result = run(app, ["evaluate", str(packed), "--text", str(text), "--tokens", "64", "--length", "64", "--json"])
    assert result.exit_code == 1 and "No space left" in json.loads(result.stdout)["error"]
    assert '"perplexity": {"mean": ' in result.stderr


def test_a_full_precision_folder_is_left_alone(text):
    before = sorted(DEMO.iterdir())
    result = run(app, ["evaluate", str(DEMO), "--text", str(text), "--tokens", "64", "--length", "64"])
    assert result.exit_code == 0 and "perplexity" in result.stdout and sorted(DEMO.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "nothing to measure"),
        (["--reference", str(DEMO), "--tasks", "piqa"], 2, "is measured on a text"),
        (["--text", "nowhere.txt"], 2, "neither a file nor one of wikitext2, c4"),
        (["--text", __file__, "--length", "100000"], 2, "takes at most"),
        (["--text", __file__, "--activation", "int8"], 2, "allowed: same"),
        (["--text", __file__, "--dtype", "int8"], 2, "allowed: auto, bfloat16"),
        (["--text", __file__, "--device", "tpu9"], 2, "allowed: cpu, cuda"),
        (["--text", __file__, "--activation", "same"], 1, "is in full precision"),
        (["--text", __file__, "--output", "/no/such/folder/e.json"], 2, "cannot be written"),
        (["--text", __file__, "--tokens", "0"], 2, "greater than or equal to 1"),
    ],
)
def test_wrong_arguments(arguments, code, message):
    result = run(app, ["evaluate", str(DEMO), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == code and message in result.output and "Traceback" not in result.output


def test_models_that_cannot_be_measured(tmp_path, text):
    arguments = ["--text", str(text), "--length", "8", "--tokens", "8"]
    result = run(app, ["evaluate", str(case("qwen3").folder), *arguments])
    assert result.exit_code == 1 and "holds no tokenizer" in result.stderr
    shutil.copytree(DEMO, tmp_path / "damaged")
    (tmp_path / "damaged/tokenizer.json").write_bytes(b"\xff\xfe")
    result = run(app, ["evaluate", str(tmp_path / "damaged"), *arguments])
    assert result.exit_code == 1 and "damaged: its tokenizer cannot be loaded" in result.stderr
    weights = tmp_path / "damaged/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    result = run(app, ["evaluate", str(tmp_path / "damaged"), *arguments])
    assert result.exit_code == 1 and "model.safetensors is damaged" in result.stderr
    weights.rename(tmp_path / "damaged/pytorch_model.bin")
    result = run(app, ["evaluate", str(tmp_path / "damaged"), *arguments])
    assert result.exit_code == 1 and "Pickle files can run code" in result.stderr
    result = run(app, ["evaluate", str(source("qwen3")), "--reference", str(DEMO), *arguments])
    assert result.exit_code == 1 and "and the model knows 128" in result.stderr
    model = tiny_model("qwen3", vocab_size=2048)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((DEMO / "tokenizer_config.json").read_bytes())
    result = run(app, ["evaluate", str(tmp_path), *arguments, "--json"])
    assert result.exit_code == 1 and "hold NaN or Inf" in json.loads(result.stdout)["error"]


def test_data_sets_are_optimums_validation_split(packed, monkeypatch):
    asked = []

    def token_rows(*arguments, **options):
        asked.append((arguments[0], *arguments[2:], options))
        return [torch.arange(3, 3 + arguments[3])] * arguments[2]

    monkeypatch.setattr(optimum, "token_rows", token_rows)
    arguments = ["--text", "wikitext2", "--tokens", "130", "--length", "64", "--json"]
    result = run(app, ["evaluate", str(packed), *arguments])
    assert result.exit_code == 0, result.output
    assert asked == [("wikitext2", 2, 65, {"seed": 0, "split": "validation"})]
    assert json.loads(result.stdout)["text"] == "wikitext2"


def test_tasks(packed, monkeypatch):
    """What `lm_eval.scores_of` returns is kept; it is tested with lm-eval itself below."""
    row = {"metric": "acc", "mean": 0.5, "error": 0.1, "samples": 4}
    monkeypatch.setattr(lm_eval, "find_tasks", lambda names: ("manager", dict.fromkeys(names)))
    monkeypatch.setattr(lm_eval, "as_lm", lambda model, tokenizer, batch_size, **options: (model, batch_size, options))

    def scores_of(lm, names, manager, limit):
        assert lm[1:] == (4, {"softmax_dtype": "float32"}) and (manager, limit) == ("manager", 2)
        return dict.fromkeys(names, row)

    monkeypatch.setattr(lm_eval, "scores_of", scores_of)
    result = run(app, ["evaluate", str(packed), "--tasks", "b,a", "--limit", "2", "--batch-size", "4", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tasks"] == {"a": row, "b": row} and "perplexity" not in found and "text" not in found


def test_missing_packages_are_explained(packed, monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks", "optimum", "optimum.gptq", "optimum.gptq.data"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(app, ["evaluate", str(packed), "--tasks", "piqa"])
    assert result.exit_code == 1 and "pip install hf-mxfp4[eval]" in result.stderr
    result = run(app, ["evaluate", str(packed), "--text", "c4"])
    assert result.exit_code == 1 and "pip install optimum datasets" in result.stderr


def test_tasks_with_lm_eval(packed, tmp_path):
    pytest.importorskip("lm_eval")
    from test_lm_eval import PROBLEMS, write_task

    folder = write_task(tmp_path / "tasks")
    result = run(app, ["evaluate", str(packed), "--tasks", str(folder), "--batch-size", "4", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["tasks"]["sums"]
    assert (found["metric"], found["samples"]) == ("acc_norm", len(PROBLEMS)) and 0 < found["error"] < 0.2
    assert found["mean"] > 0.4  # of four choices; the model can add
    result = run(app, ["evaluate", str(packed), "--tasks", "no_such_task"])
    assert result.exit_code == 1 and "lm-eval has no task no_such_task" in result.stderr
