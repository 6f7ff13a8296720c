# SPDX-License-Identifier: Apache-2.0
"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_mxfp4.cli import app

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
run = CliRunner().invoke


def test_analyze(tmp_path):
    result = run(app, ["analyze", str(DEMO), "--output", str(tmp_path)])
    assert result.exit_code == 0 and "worst of 28" in result.output
    saved = json.loads((tmp_path / "analysis.json").read_text())
    assert len(saved["tensors"]) == 28 and 0.38 < saved["overall"]["overshoot"] < 0.5
    assert (tmp_path / "analysis.png").stat().st_size > 20_000
    assert list(saved["overall"]["corrections"]) == ["soar", "+ macro-blocks", "+ 0.5 % outliers"]
    assert "error: ceil 0.01" in result.output


def test_analyze_json(tmp_path):
    arguments = [
        "analyze",
        str(DEMO),
        "--format",
        "nvfp4",
        "--rule",
        "soar",
        "--json",
        "--skip",
        "embed|norm|layers.[1-9]",
    ]
    result = run(app, [*arguments, "--output", str(tmp_path)])
    assert json.loads(result.stdout) == json.loads((tmp_path / "analysis.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "fp8"], "mxfp4, nvfp4"),
        (["--format", "nvfp4", "--rule", "ceil"], "amax, four_over_six, soar"),
        (["--skip", "."], "no safetensors file with matrices"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    result = run(app, ["analyze", str(DEMO), "--output", str(tmp_path / "out"), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and message in result.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["no/such-model", "/no/such/folder"])
def test_no_such_model(model, tmp_path):
    result = run(app, ["analyze", model, "--output", str(tmp_path / "out")], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and f"{model} is not a folder" in result.output and not (tmp_path / "out").exists()


def test_damaged_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    result = run(app, ["analyze", str(tmp_path), "--output", str(tmp_path / "out")], env={"COLUMNS": "300"})
    assert result.exit_code == 1 and "not a safetensors file" in result.output and not (tmp_path / "out").exists()
