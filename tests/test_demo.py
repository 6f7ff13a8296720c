# SPDX-License-Identifier: Apache-2.0
"""`make demo` on the bundled model, shortened: its figures, its files, its errors; and the measures it shares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import demo  # noqa: E402  (a script, found through the line above)


def test_demo(tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, SCRIPTS / "demo.py", "--quick", "--output", output]
    # A process of its own: the demo silences transformers. UTF-8, whatever the locale: it prints ±.
    run = subprocess.run(
        command, capture_output=True, encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"}
    )
    assert run.returncode == 0, run.stderr
    assert "LOAD REPORT" not in run.stderr and "Warning" not in run.stderr
    table = run.stdout.partition("saved and loaded again")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "NVFP4 soar, saved and loaded again: logits are equal bit for bit." in run.stdout
    assert all(problem.prompt in run.stdout for problem in demo.PROBLEMS)

    report = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in report["methods"]}
    assert report["tokens"] == 2048 and report["reloaded"] == {"method": "NVFP4 soar", "logits_equal": True}
    assert list(rows) == [method.label for method in demo.METHODS]
    for name, row in rows.items():
        assert any(line.startswith(name) for line in table.splitlines())
        files = list((output / row["checkpoint"]).iterdir())
        assert row["bytes"] == sum(file.stat().st_size for file in files) and f"{row['bytes']:,}" in table
        assert {"model.safetensors", "tokenizer.json", "config.json"} <= {file.name for file in files}
        assert row["perplexity"] > 1 and row["perplexity_error"] > 0
    check_quantized(rows)

    pixels = image.imread(output / "demo.png")[..., :3]
    assert pixels.shape[1] >= 1000 and pixels.shape[0] >= 400
    for colour in demo.PALETTE.values():  # a bar of each family
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels - rgb).max(-1) < 1e-3).sum() > 1000


def test_problems_are_held_out():
    assert [problem.held_out for problem in demo.PROBLEMS] == [False, True, True]


def check_quantized(rows: dict[str, dict]) -> None:
    bf16 = rows.pop("bf16")
    assert (bf16["kl_nats_per_token"], bf16["weight_error"], bf16["bits_per_weight"]) == (0, 0, 16)
    for name, row in rows.items():
        bits = 4.5 if "NVFP4" in name else 4.25
        if name == "MXFP4 corrected":  # macro factors, 32 bits an outlier, 32 bits of offset a row
            bits += 1 / 16 + 0.005 * 32 + 0.1
        assert row["bits_per_weight"] == pytest.approx(bits, abs=0.05 if bits > 4.5 else 0.001)
        assert row["bytes"] < bf16["bytes"] / 2  # even with the embeddings in bf16
        assert 0 < row["kl_error"] < row["kl_nats_per_token"] < 0.5
        assert 0.003 < row["weight_error"] < 0.03
        increase = row["perplexity"] / bf16["perplexity"] - 1
        assert row["perplexity_increase_percent"] == pytest.approx(100 * increase, abs=1e-6)
    error = {name: row["weight_error"] for name, row in rows.items()}
    assert error["NVFP4 soar"] < error["NVFP4 four_over_six"] < error["NVFP4 amax"] < error["MXFP4 soar"]
    assert error["MXFP4 soar"] < error["MXFP4 amax"]
    divergence = {name: row["kl_nats_per_token"] for name, row in rows.items()}
    assert divergence["NVFP4 + feedback"] < 0.8 * divergence["NVFP4 soar"]
    assert divergence["MXFP4 corrected"] < 0.7 * divergence["MXFP4 soar"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no config.json"),
        (["--tokens", "256"], "at least 512"),
        (["--model", "quantized"], "quantized already"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized/config.json").write_text('{"quantization_config": {}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit):
        demo.parse_arguments()
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_explained(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises(SystemExit):
        demo.parse_arguments()
    assert "pip install hf-mxfp4[plot]" in capsys.readouterr().err
