# SPDX-License-Identifier: Apache-2.0
"""scripts/benchmark_training.py and training_arms.py on tiny models: what an arm measures, the run, its table. No test
looks at how fast anything was."""

import json

import pytest
import torch
import transformers

pytest.importorskip("peft")

import benchmark_training as benchmark
import training_arms
from hf_mxfp4 import FP4Config, FP4Linear
from hf_mxfp4.streaming import quantize_checkpoint

CPU = torch.device("cpu")
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model and the same packed, by arm."""
    scratch = tmp_path_factory.mktemp("training")
    found = {"bf16": scratch / "model", "full": scratch / "model"}
    torch.manual_seed(0)
    training_arms.random_model(found["bf16"], **TINY, **HEADS)
    for arm in ("nvfp4", "macro"):
        found[arm] = scratch / arm
        config = FP4Config(scale_rule="amax", **training_arms.ARMS[arm].config)
        quantize_checkpoint(found["bf16"], found[arm], config)
    return found


def measured(folders, arm: str, checkpointing: bool = False):
    return training_arms.measure(training_arms.ARMS[arm], str(folders[arm]), CPU, checkpointing, 2, 32)


def test_arms(folders):
    """Packed bases take less and are never given gradients; what waits for the backward is that of a dense base."""
    rows, packed = {}, 0
    for arm in folders:
        training, rows[arm] = measured(folders, arm)
        packed += sum(isinstance(module, FP4Linear) for module in training.model.modules())
        assert rows[arm]["gradients_of_frozen"] == 0 and rows[arm]["kept"] <= rows[arm]["peak"]
        everything = (*training.model.parameters(), *training.model.buffers())
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in everything}
        assert rows[arm]["frozen"] + rows[arm]["learning"] == sum(sizes.values())
    assert packed == 2 * 2 * 7
    linear = 2 * (128 * (128 + 128 + 64 + 64) + 3 * 128 * 256)  # weights of both layers
    for arm, bits in (("nvfp4", 4.5), ("macro", 4.25 + 8 / 128)):
        assert rows[arm]["frozen"] == rows["bf16"]["frozen"] - linear * (16 - bits) / 8 + (arm == "nvfp4") * 14 * 4
        assert rows[arm]["kept"] == rows["bf16"]["kept"] and rows[arm]["learning"] == rows["bf16"]["learning"]
    # AdamW: two states of each weight, and a step count of each tensor
    assert rows["bf16"]["optimizer"] == 2 * rows["bf16"]["learning"] + 4 * 2 * 14
    assert rows["full"]["frozen"] < 1000 < rows["full"]["learning"]


def test_checkpointing_keeps_less(folders):
    (_, without), (training, row) = (measured(folders, "nvfp4", each) for each in (False, True))
    assert row["kept"] < without["kept"] and row["frozen"] == without["frozen"]
    assert training.model.is_gradient_checkpointing and training.seconds() > 0


def test_random_model_is_tied(folders):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["bf16"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16 and 0.01 < model.model.layers[1].mlp.up_proj.weight.std() < 0.03


# --- the run ---------------------------------------------------------------------------------------------------------


class MadeUp:
    """A child whose numbers are known; it counts how many were made."""

    made = []
    broken = ()

    def __init__(self, arm, folder, checkpointing, options):
        self.arm, self.steps = arm, 0
        self.made.append((arm, checkpointing))

    def read(self):
        if self.arm in self.broken:
            raise RuntimeError("ended with 1: OSError: no such folder")
        frozen = {"bf16": 8_000_000}.get(self.arm, 2_000_000)
        row = {"frozen": frozen, "learning": 1_000_000, "optimizer": 2_000_000, "peak": 5_000_000, "kept": 4_000_000}
        return row | {"resident": 123_456_789, "loss": 1.0}

    def step(self):
        self.steps += 1
        if self.arm == "full" and self.steps == 2:
            raise RuntimeError("ended with -9: ")
        return {"bf16": 0.5}.get(self.arm, 0.625)

    def end(self):
        self.ended = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "Child", MadeUp)
    monkeypatch.setattr(benchmark, "folder_of", lambda model, arm, scratch: scratch / arm)
    monkeypatch.setattr(training_arms, "why_absent", lambda arm: arm.library and f"{arm.library} is not installed")
    monkeypatch.setattr(MadeUp, "made", [])
    monkeypatch.setattr(MadeUp, "broken", ())

    def call(*arguments):
        benchmark.main(["--out", str(tmp_path / "training"), "--rounds", "1", *arguments])
        return json.loads((tmp_path / "training.json").read_text()), (tmp_path / "training.md").read_text()

    return call


def test_run_and_table(run, monkeypatch):
    """A row for every arm: numbers, or why there are none."""
    monkeypatch.setattr(MadeUp, "broken", ("mxfp4",))
    found, text = run("--models", "demo")
    assert len(found["runs"]) == 14 and text.count("|---:") > 2
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 8.0 | 3.0 | 4.0 | 5.0 | 16.0 (1.00x) | 123 | 1,024 | 1.00 (1.00-1.00) |" in lines["bf16, LoRA"]
    assert "| 2.0 | 3.0 | 4.0 | 5.0 | 10.0 (0.62x) | 123 | 819 | 0.80 (0.80-0.80) |" in lines["NVFP4, LoRA"]
    assert "no such folder" in lines["MXFP4, LoRA"] and "-9" in lines["bf16, all weights"]
    assert "bitsandbytes is not installed" in lines["NF4, LoRA"]
    assert len({line.count("|") for line in lines.values()}) == 1
    assert {len(row["seconds"]) for row in found["runs"] if "seconds" in row} == {5}


def test_resumes(run, monkeypatch, capsys):
    """What is measured is not measured again; what failed is; other settings are refused."""
    monkeypatch.setattr(MadeUp, "broken", ("nvfp4",))
    given = ("--models", "demo", "--arms", "bf16,nvfp4,nf4")
    run(*given)
    monkeypatch.setattr(MadeUp, "broken", ())
    before = len(MadeUp.made)
    found, text = run(*given)
    assert len(MadeUp.made) == before + 4 and "no such folder" not in text
    assert run(*given) == (found, text) and len(MadeUp.made) == before + 4
    with pytest.raises(ValueError, match="measured with another batch; give --fresh"):
        run(*given, "--batch", "7")
    assert run(*given)[0] == found
    assert run(*given, "--batch", "7", "--fresh")[0]["settings"]["batch"] == 7


def test_arms_one_after_another(run):
    """Arms that were measured in other rounds are not compared; what bf16 already has counts on."""
    run("--models", "demo", "--arms", "bf16,nvfp4")
    found, text = run("--models", "demo", "--arms", "bf16,mxfp4")
    steps = {(row["arm"], len(row["seconds"])) for row in found["runs"]}
    assert len(found["runs"]) == 6 and steps == {("bf16", 10), ("nvfp4", 5), ("mxfp4", 5)}
    assert text.count("| 819 | 0.80 (0.80-0.80) |") == 4
    found, text = run("--models", "demo", "--arms", "nvfp4,mxfp4", "--rounds", "2")
    assert {len(row["seconds"]) for row in found["runs"]} == {10}
    assert [line[2:7] for line in text.splitlines() if ", LoRA |" in line] == ["bf16,", "NVFP4", "MXFP4"] * 2
    assert text.count("| 819 | 0.80 (0.80-0.80) |") == 4


def test_a_library_that_is_gone(run, monkeypatch):
    """What was measured with it stays."""
    monkeypatch.setattr(training_arms, "why_absent", lambda arm: None)
    monkeypatch.setattr(benchmark.metadata, "version", lambda name: "1.0")
    found, _ = run("--models", "demo", "--arms", "bf16,qlora")
    monkeypatch.setattr(training_arms, "why_absent", lambda arm: arm.library and f"{arm.library} is not installed")
    assert run("--models", "demo", "--arms", "bf16,qlora")[0] == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "demo,7b"], "models: '7b'; allowed: demo, 0.5b"),
        (["--arms", "bf16,int4"], "arms: 'int4'; allowed: bf16, nvfp4"),
        (["--rounds", "0"], "rounds=0; it must be at least 1"),
        (["--length", "1"], "length=1; a sequence needs at least 2"),
        (["--device", "tpu"], "device='tpu'; allowed: cpu, cuda"),
        pytest.param(
            ["--device", "cuda"],
            "finds no GPU here. Use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_options(run, arguments, said):
    with pytest.raises(ValueError, match=said):
        benchmark.main(arguments)
    assert not MadeUp.made


def test_arm_on_command(folders, monkeypatch, capfd):
    """An arm's process measures, then takes a step for each line it reads."""
    given = {"arm": "nvfp4", "folder": str(folders["nvfp4"]), "device": "cpu", "checkpointing": False}
    given |= {"batch": 1, "length": 4, "threads": torch.get_num_threads()}
    monkeypatch.setattr("sys.stdin", ["step\n", "step\n"])
    training_arms.main(json.dumps(given))
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert said[0]["gradients_of_frozen"] == 0 and [set(line) for line in said[1:]] == 2 * [{"seconds"}]


def test_child(tmp_path, monkeypatch):
    """What a process says beside its numbers is passed over, unless it ends: then the last of it is the reason."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nprint('a warning')\nprint(json.dumps({'peak': json.loads(sys.argv[1])['batch']}))\n"
        "sys.stdout.flush()\nprint(json.dumps({'seconds': len(sys.stdin.readline())}))\nsys.exit('no more')\n"
    )
    monkeypatch.setattr(training_arms, "__file__", str(script))
    child = benchmark.Child("nvfp4", tmp_path, False, benchmark.Options(batch=3))
    try:
        assert child.read() == {"peak": 3} and child.step() == len("step\n")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with 1: no more|ended with 1: $"):
                child.step()
    finally:
        child.end()
