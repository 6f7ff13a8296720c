# SPDX-License-Identifier: Apache-2.0
"""The RL ablation in small: a grid of two steps and two arms, what it leaves, and that its measures measure."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

peft = pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("matplotlib")
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import ablation_measures  # noqa: E402  (scripts, found through the line above)
import ablation_report  # noqa: E402
import ablation_run  # noqa: E402
import rl_ablation  # noqa: E402
from hf_mxfp4 import FP4Config  # noqa: E402
from hf_mxfp4.evaluation import weight_error  # noqa: E402

TINY = {"steps": 2, "prompts": 2, "generations": 2, "rank": 2, "problems": 4, "every": 1, "jobs": 0}


def options(out, **changes):
    return rl_ablation.Options(**{"arms": "bf16,all", "seeds": "3", "out": str(out), **TINY, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo model's first layer."""
    demo = ablation_run.Settings.model
    folder = tmp_path_factory.mktemp("model") / Path(demo).name  # by which a run is known again
    short = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    for part in (AutoModelForCausalLM.from_pretrained(demo, **short), AutoTokenizer.from_pretrained(demo)):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def grid(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    assert rl_ablation.main(options(out, model=model)) == 0
    return out


def test_grid(grid):
    report = json.loads((grid / "rl_ablation.json").read_text(encoding="utf-8"))
    bf16, packed = report["runs"]
    assert (bf16["arm"], packed["arm"], report["missing"]) == ("bf16", "all", [])
    for run in (bf16, packed):
        assert [e["step"] for e in run["evaluations"]] == [0, 1, 2] == [p["step"] for p in run["probes"]]
        assert {len(curve) for curve in run["curves"].values()} == {2}
    assert bf16["evaluations"][0]["kl"] == 0 < packed["evaluations"][0]["kl"]
    assert bf16["probes"][2]["gradient"] == {"relative_error": 0.0, "cosine": pytest.approx(1)}
    assert all(0 <= run["merged_accuracy"] <= 1 for run in (bf16, packed))
    assert bf16["curves"]["sigma"] == [0, 0] and packed["curves"]["sigma"][1] > 0
    before, *_, after = (probe["weights"] for probe in packed["probes"])
    assert before["merge"]["change"] == 0 == before["merge"]["error"]
    for part in (before["policy"], after["policy"], after["merge"]):
        assert part["total"] + part["kept"] == pytest.approx(part["error"], rel=1e-6)
    text = (grid / "rl_ablation.md").read_text(encoding="utf-8")
    assert text.count("\n| bf16 |") == 2 and text.count("\n| all three |") == 2 + 3  # 3 probes of its weights
    assert "| sigma | 0.0000 | 0.0010 |" in text  # stages 0 and 5 of 10
    assert (grid / "rl_ablation.png").read_bytes().startswith(b"\x89PNG")


def test_resume(grid, monkeypatch):
    """Finished runs are not run again, others are; the rest outlives a failure, which the report names."""
    ran = []

    def run(arm, seed, settings):
        ran.append((arm, seed))
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ablation_run, "run", run)
    assert rl_ablation.main(options(grid)) == 0 and not ran
    assert rl_ablation.main(options(grid, arms="bf16,nvfp4,all")) == 1 and ran == [("nvfp4", 3)]
    assert "out of luck" in (grid / "runs" / "nvfp4-3.error.txt").read_text(encoding="utf-8")
    text = (grid / "rl_ablation.md").read_text(encoding="utf-8")
    assert "missing: nvfp4-3" in text and "\n| all three |" in text


def test_other_settings_are_not_mixed(grid):
    with pytest.raises(ValueError, match="rank=2 and not 4"):
        rl_ablation.main(options(grid, rank=4))
    with pytest.raises(ValueError, match="model=demo_lm and not Qwen3-0.6B"):
        rl_ablation.main(options(grid, model="Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": "bf16,int4"}, "'int4'; allowed: bf16, naive"),
        ({"seeds": "0,x"}, "whole numbers"),
        ({"generations": 1}, "at least 2"),
        ({"preset": "small"}, "allowed: reduced, full"),
    ],
)
def test_bad_options(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, **change)


@pytest.mark.parametrize("arm", ["naive", "macro", "outliers", "nvfp4", "searched"])
def test_weight_errors(arm, model):
    """The parts sum to the error (it raises if not), which is that of the packed model; merges are measured."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    skipped = ["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    config = FP4Config(**ablation_run.ARMS[arm].config, modules_to_not_convert=skipped)
    packed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=config)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    expected = weight_error(packed, dense)
    policy, twin = peft.get_peft_model(packed, lora), peft.get_peft_model(dense, lora)
    start = ablation_measures.weight_errors(policy, twin)
    assert start["policy"]["error"] == pytest.approx(expected, rel=1e-4) and start["merge"]["change"] == 0
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    merge = ablation_measures.weight_errors(policy, twin)["merge"]
    assert merge["change"] > 0.1 and merge["cosine"] > 0.5 and merge["relative_error"] < 1
    assert ablation_measures.weight_errors(twin, twin) is None


def test_gradients(model):
    """Against bf16: none for the same base, an error for a packed one; `.grad` and random numbers stay as they are."""
    settings, ends = ablation_run.Settings(model=model, rank=2), [1]
    tokenizer = AutoTokenizer.from_pretrained(model)
    policies = [
        ablation_run.make_policy(settings, config, ends, 0) for config in (None, ablation_run.ARMS["nvfp4"].config)
    ]
    ablation_measures.copy_adapter(*policies)
    state = torch.get_rng_state()
    batch = ablation_measures.Batch(policies[0], tokenizer, ["1+", " 20-1"], lambda i, text: len(text), 3, 4, seed=5)
    expected, found = map(batch.gradients, policies)
    assert torch.equal(state, torch.get_rng_state()) and policies[0].training
    assert all(weight.grad is None for policy in policies for weight in policy.parameters())
    same = ablation_measures.compare_gradients(expected, batch.gradients(policies[0]))
    assert same == {"relative_error": 0.0, "cosine": pytest.approx(1)}
    other = ablation_measures.compare_gradients(found, expected)
    assert 0.01 < other["relative_error"] < 1 and 0.5 < other["cosine"] < 1
    reference = batch.log_probabilities(policies[0])
    assert batch.divergence(policies[0], reference)["kl"] == 0 < batch.divergence(policies[1], reference)["kl"]


def test_difference():
    runs = [{"seed": seed, "value": seed + 1.0} for seed in range(3)]
    others = [{"seed": seed, "value": float(seed)} for seed in (2, 1, 0)]
    text = ablation_report.difference(runs, others, lambda run: run["value"])
    assert text == "**+1.000 [+1.000, +1.000]**"
    others[0]["value"] = 9.0
    assert "**" not in ablation_report.difference(runs, others, lambda run: run["value"])
