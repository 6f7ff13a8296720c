# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 quantize`: its options, what it writes, and the same as `optimum-cli export fp4`."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import case, file_bytes, outputs, source
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import FP4Config
from hf_mxfp4.cli import app, recipe
from hf_mxfp4.cli.quantize import as_export

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "scripts" / "demo_lm"
run = CliRunner().invoke


def quantize(*arguments, code: int = 0):
    result = run(app, ["quantize", *map(str, arguments)], env={"COLUMNS": "300"})
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    return result


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"format": "mxfp4", "rule": "amax"}, {"format": "mxfp4", "scale_rule": "amax"}),
        ({"search": "2", "global_scale": "free"}, {"search": 2, "global_scale": "free"}),
        ({"search": "full", "iterations": 3}, {"search": "full", "iterations": 3}),
        (
            {"format": "mxfp4", "macro_block": "search", "outliers": 0.005},
            {"format": "mxfp4", "macro_block": "search", "outlier_fallback": 0.005},
        ),
        (
            {"error_feedback": True, "calibration": "random", "calibration_samples": 4, "calibration_seed": 1},
            {"error_feedback": True, "calibration": "random", "calibration_samples": 4, "calibration_seed": 1},
        ),
        ({"channel_weights": True, "error_feedback": False}, {"channel_weights": True}),
        (
            {"skip": ["lm_head", "layers.0"], "activation": "same", "layout": "own"},
            {"modules_to_not_convert": ["lm_head", "layers.0"], "activation_format": "same", "layout": "own"},
        ),
        (
            {"override": ["down_proj$=mxfp4", "(?=a)b=skip", "x=pack", 'y={"search": 1}']},
            {"overrides": {"down_proj$": {"format": "mxfp4"}, "(?=a)b": "skip", "x": {}, "y": {"search": 1}}},
        ),
    ],
)
def test_options_make_a_config(options, fields):
    given = dict.fromkeys(recipe.OPTIONS) | options
    assert recipe.config_of(given) == FP4Config(**fields)


def test_every_option_of_a_config_can_be_given():
    """What says how to quantize; the rest is for loading."""
    loading = {"compute_dtype", "dequantize", "backend", "fuse_projections", "origin"}
    fields = {recipe.FIELDS.get(name, name) for name in recipe.OPTIONS}
    from hf_mxfp4.config import FIELDS

    assert fields == set(FIELDS) - loading


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "nvfp5"], "allowed: mxfp4, nvfp4"),
        (["--rule", "ceil"], "--rule"),
        (["--search", "x"], "search='x'"),
        (["--macro-block", "search"], "macro_block"),
        (["--outliers", "0.5"], "a fraction of weights from 0 to 0.1"),
        (["--calibration", "c4"], "only for error_feedback=True"),
        (["--error-feedback", "--channel-weights"], "leave channel_weights out"),
        (["--override", "down_proj"], "expected regex= and one of mxfp4, nvfp4, skip, pack"),
        (["--override", "down_proj=int8"], "expected regex="),
        (["--override", "(=skip"], "is not a regular expression"),
        (["--override", 'a={"serch": 1}'], "serch"),
        (["--override", "a={1}"], "expected regex="),
        (["--activation", "fp8"], "allowed: None, same"),
        (["--layout", "x"], "allowed: auto, portable, own"),
        (["--on-unsupported", "x"], "allowed: error, keep"),
        (["--dtype", "int8"], "allowed: auto, bfloat16"),
        (["--device", "tpu9"], "allowed: cpu, cuda"),
        (["--device", "auto"], "allowed: cpu, cuda"),
        (["--error-feedback", "--calibration-device", "tpu9"], "allowed: cpu, cuda"),
        (["--error-feedback", "--calibration-length", "0"], "calibration_length=0"),
        (["--skip", "(["], "is not a regular expression"),
        (["--outliers", "0.01", "--workers", "2"], "--outliers: this is done by one process"),
        (["--workers", "0"], "greater than or equal to 1"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    result = quantize(DEMO, tmp_path / "out", *arguments, code=2)
    assert message in result.stderr and result.stdout == "" and not (tmp_path / "out").exists()


# --- what it writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_quantize_writes_what_save_pretrained_does(name, tmp_path):
    result = quantize(source(name), tmp_path / "out")
    written, expected = file_bytes(tmp_path / "out"), file_bytes(case(name).folder)
    assert written.keys() - expected.keys() == {"checksums.sha256"}
    assert all(written[file] == content for file, content in expected.items())
    assert "modules in nvfp4" in result.stdout and "bits a weight" in result.stdout


def test_quantize_demo(tmp_path):
    """Options, several files, several processes, the tokenizer, and JSON alone on stdout."""
    arguments = [
        "--override",
        "down_proj=mxfp4",
        "--skip",
        "model.layers.0",
        "--max-shard-size",
        "1MB",
        "--workers",
        2,
    ]
    result = quantize(DEMO, tmp_path / "out", *arguments, "--json")
    found = json.loads(result.stdout)
    assert found["modules"] == {"mxfp4": 3, "nvfp4": 18} and found["files"] > 2 and found["layout"] == "portable"
    assert found["recipe"]["overrides"] == [["down_proj", {"format": "mxfp4"}]]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--outliers", "0.01", "--format", "mxfp4"], {"outlier_fallback": 0.01, "format": "mxfp4"}),
        (
            [
                "--error-feedback",
                "--calibration",
                "random",
                "--calibration-samples",
                "2",
                "--calibration-length",
                "16",
            ],
            {"error_feedback": True, "calibration": "random", "calibration_samples": 2, "calibration_length": 16},
        ),
    ],
    ids=["outliers", "feedback"],
)
def test_what_needs_the_whole_model(arguments, fields, tmp_path):
    result = quantize(source("qwen3"), tmp_path / "out", *arguments)
    assert f"{arguments[0]}: this takes the whole model in memory" in result.stderr and "it/s]" not in result.stderr
    model = AutoModelForCausalLM.from_pretrained(
        source("qwen3"), quantization_config=FP4Config(**fields), dtype="auto"
    )
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), outputs(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run(app, ["verify", str(tmp_path / "out"), "--source", str(source("qwen3"))]).exit_code == 0


def test_dtype(tmp_path):
    result = quantize(source("qwen3"), tmp_path / "out", "--dtype", "float16", "--json")
    assert "--dtype: this takes the whole model in memory" in result.stderr
    assert set(json.loads(result.stdout)["plain"]) == {"F16"}


def test_a_whole_model_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command_module(), "write_checksums", full)
    result = quantize(source("qwen3"), tmp_path / "out", "--outliers", "0.01", code=1)
    assert "No space left on device" in result.stderr and list(tmp_path.iterdir()) == []


def command_module() -> ModuleType:
    return sys.modules["hf_mxfp4.cli.quantize"]


def test_dry_run(tmp_path):
    result = quantize(DEMO, tmp_path / "out", "--dry-run")
    assert "28 modules packed" in result.stdout and "stays in full precision: lm_head" in result.stderr
    found = json.loads(quantize(DEMO, tmp_path / "out", "--dry-run", "--outliers", "0.01", "--json").stdout)
    assert found["packed"] == 28 and found["without"] == ["outlier_fallback"]
    assert list(tmp_path.iterdir()) == []
    quantize(DEMO, tmp_path / "out")
    size = json.loads(run(app, ["inspect", str(tmp_path / "out"), "--json"]).stdout)["nbytes"]
    assert found["output_bytes"] == size


def test_what_cannot_be_quantized(tmp_path):
    folder, taken = tmp_path / "quantized", tmp_path / "taken"
    quantize(source("qwen3"), folder)
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle/pytorch_model.bin").write_bytes(b"x")
    for arguments, message in {
        (folder, tmp_path / "out"): "is quantized already",
        (folder, tmp_path / "out", "--outliers", "0.01"): "is quantized already",
        (source("qwen3"), taken): "holds 1 other files (such as notes.txt)",
        (source("qwen3"), taken, "--outliers", "0.01"): "holds 1 other files (such as notes.txt)",
        (source("qwen3"), source("qwen3")): "is the source itself",
        (source("qwen3"), source("qwen3") / "out"): "lies inside the source",
        (tmp_path / "empty", tmp_path / "out"): "no safetensors",
        (tmp_path / "pickle", tmp_path / "out"): "pytorch_model.bin",
        (source("qwen3"), tmp_path / "out", "--max-shard-size", "x"): "max_shard_size='x'",
    }.items():
        found = json.loads(quantize(*arguments, "--json", code=1).stdout)
        assert message in found["error"] and not (tmp_path / "out").exists(), arguments
    for output in (taken, source("qwen3") / "out"):
        assert "Choose an" in quantize(source("qwen3"), output, "--dry-run", code=1).stderr
    quantize("/no/such/folder", tmp_path / "out", code=2)
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]


# --- optimum ---------------------------------------------------------------------------------------------------------


def test_as_export(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        as_export(["-m", str(source("qwen3")), str(tmp_path / "out"), "--format", "mxfp4"])
    assert stop.value.code == 0 and "modules in mxfp4" in capsys.readouterr().out
    assert file_bytes(case("qwen3", "mxfp4").folder).items() <= file_bytes(tmp_path / "out").items()
    for words in (["--help"], [str(tmp_path)], ["-m", str(source("qwen3")), str(tmp_path / "x"), "--format", "fp8"]):
        with pytest.raises(SystemExit) as stop:
            as_export(words)
        assert stop.value.code == (0 if words == ["--help"] else 2)
    out, err = capsys.readouterr()
    assert "optimum-cli export fp4 -m Qwen/Qwen3-0.6B" in out and "Missing option '--model' / '-m'" in err
    assert "allowed: mxfp4, nvfp4" in err.replace("\\n", "")


def load_registered(monkeypatch, with_optimum: bool) -> ModuleType:
    """The file that the wheel puts into optimum's folder."""
    if not with_optimum:  # the two names it takes from optimum 2.3
        stub = {
            "optimum.commands.base": SimpleNamespace(BaseOptimumCLICommand=object, CommandInfo=SimpleNamespace),
            "optimum.commands.export.base": SimpleNamespace(ExportCommand="export"),
        }
        for name in ("optimum", "optimum.commands", "optimum.commands.export", *stub):
            monkeypatch.setitem(sys.modules, name, stub.get(name, ModuleType(name)))
    path = ROOT / "integrations/optimum_commands/register_fp4.py"
    spec = importlib.util.spec_from_file_location("register_fp4", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_registered_command_hands_every_word_on(monkeypatch):
    module = load_registered(monkeypatch, with_optimum=False)
    ((made, parent),) = module.REGISTER_COMMANDS
    assert parent == "export" and made.COMMAND.name == "fp4"
    root = argparse.ArgumentParser()
    parser = root.add_subparsers().add_parser("fp4")
    made.parse_args(parser)
    words = ["-m", "user/name", "out", "--skip", "a", "--help", "--override", "x=skip", "-1"]
    asked = []
    monkeypatch.setattr(command_module(), "as_export", asked.append)
    (instance := made.__new__(made)).args = root.parse_args(["fp4", *words])
    instance.run()
    assert asked == [words]


def test_with_optimum(monkeypatch, tmp_path, capsys):
    pytest.importorskip("optimum.commands.optimum_cli")
    from optimum.commands import optimum_cli

    module = load_registered(monkeypatch, with_optimum=True)
    monkeypatch.setattr(optimum_cli, "load_optimum_namespace_cli_commands", lambda: module.REGISTER_COMMANDS)
    words = ["optimum-cli", "export", "fp4", "-m", str(source("qwen3")), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        optimum_cli.main()
    assert stop.value.code == 0 and "modules in nvfp4" in capsys.readouterr().out
    assert file_bytes(case("qwen3").folder).items() <= file_bytes(tmp_path / "out").items()
