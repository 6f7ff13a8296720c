# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 inspect | export | verify | card | push`, on folders and on a Hub on loopback."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_server import hub  # noqa: F401  a fixture
from safetensors.torch import load_file, save_file
from tiny_models import case, file_bytes, source
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4.cli import app

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
run = CliRunner().invoke


def call(*arguments, code: int = 0):
    result = run(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    return result


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo model, quantized by the command."""
    folder = tmp_path_factory.mktemp("demo") / "nvfp4"
    call("quantize", DEMO, folder, "--rule", "amax")
    return folder


@pytest.fixture
def copy(demo, tmp_path):
    return Path(shutil.copytree(demo, tmp_path / "copy"))


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect(demo):
    text = call("inspect", demo).stdout
    assert "28 modules in nvfp4" in text and "format=nvfp4, scale_rule=amax" in text and "exponents" not in text
    assert "min" in call("inspect", demo, "--scales").stdout
    found = json.loads(call("inspect", demo, "--scales", "--json").stdout)
    assert found["modules"] == {"nvfp4": 28} and found["bits_per_weight"] == pytest.approx(4.5, abs=0.001)
    assert found["scales"]["nvfp4"]["zero_blocks"] == 0


def test_inspect_mixture_and_full_precision():
    assert json.loads(call("inspect", case("qwen3_moe").folder, "--json").stdout)["layout"] == "own"
    assert "full precision" in call("inspect", source("qwen3")).stdout


def test_inspect_on_the_hub(hub, demo):  # noqa: F811
    call("push", demo, "alice/demo")
    local, remote = (json.loads(call("inspect", where, "--json").stdout) for where in (demo, "alice/demo"))
    assert remote == local
    assert "/demo" in call("inspect", "alice/demo", "--revision", "main").stdout
    assert "no-such" in call("inspect", "alice/no-such", code=1).stderr


def test_inspect_is_no_markup_and_breaks_no_lines(demo, tmp_path):
    """Names with brackets are not taken for colours, and a line is a row however narrow the terminal."""
    folder = shutil.copytree(demo, tmp_path / "a[b]" / "c[" / "d]")
    result = run(app, ["inspect", str(folder)], env={"COLUMNS": "20"})
    assert result.exit_code == 0 and result.stdout.splitlines()[0] == str(folder)
    assert any(line.split() == "packed 28 modules in nvfp4".split() for line in result.stdout.splitlines())


def test_what_cannot_be_inspected(demo, tmp_path):
    assert "is not a folder" in call("inspect", "/no/such/folder", code=2).stderr
    assert "has no revisions" in call("inspect", demo, "--revision", "main", code=2).stderr
    assert "is not a folder; download it first" in call("inspect", "a/b", "--scales", code=2).stderr
    assert "no safetensors" in call("inspect", tmp_path, code=1).stderr
    (tmp_path / "model.safetensors").write_bytes(b"short")
    found = json.loads(call("inspect", tmp_path, "--json", code=1).stdout)
    assert "is not a safetensors file" in found["error"]


# --- export ----------------------------------------------------------------------------------------------------------


def test_export_to_full_precision(demo, tmp_path):
    """Both orders of arguments, as the help has them."""
    text = call("export", demo, tmp_path / "a", "--to", "bf16")
    call("export", demo, "--to", "bf16", tmp_path / "b")
    assert "28 matrices as bf16" in text.stdout and file_bytes(tmp_path / "a") == file_bytes(tmp_path / "b")
    packed = AutoModelForCausalLM.from_pretrained(demo).state_dict()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").state_dict()
    assert dense["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(dense["model.norm.weight"], packed["model.norm.weight"])


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt"])
def test_export_for_other_tools(demo, tmp_path, target):
    found = json.loads(call("export", demo, tmp_path / "out", "--to", target, "--json").stdout)
    assert (found["target"], found["matrices"], found["source_layout"]) == (target, 28, "portable")
    assert json.loads(call("inspect", tmp_path / "out", "--json").stdout)["modules"] == {"nvfp4": 28}
    assert call("verify", tmp_path / "out", "--source", DEMO).exit_code == 0


def test_export_half(demo, tmp_path):
    call("export", demo, tmp_path / "out", "--to", "bf16", "--dtype", "float16", "--max-shard-size", "2MB")
    files = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert len(files) > 2 and {tensor.dtype for file in files for tensor in file.values()} == {torch.float16}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing option '--to'"),
        (["--to", "gguf"], 2, "allowed: compressed-tensors, modelopt, bf16"),
        (["--to", "bf16", "--dtype", "int8"], 2, "allowed: bfloat16, float16, float32"),
        (["--to", "modelopt", "--dtype", "float16"], 2, "stores no dense weights"),
        (["--to", "bf16", "--max-shard-size", "x"], 1, "max_shard_size='x'"),
    ],
)
def test_wrong_exports(demo, tmp_path, arguments, code, message):
    assert message in call("export", demo, tmp_path / "out", *arguments, code=code).stderr
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported(demo, tmp_path):
    assert "full precision" in call("export", DEMO, tmp_path / "out", "--to", "modelopt", code=1).stderr
    assert call("export", demo, demo, "--to", "bf16", code=1).stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify(demo):
    assert "sound; 28 packed matrices" in call("verify", demo).stdout
    text = call("verify", demo, "--source", DEMO)
    assert "largest error 0.00" in text.stdout
    found = json.loads(call("verify", demo, "--source", DEMO, "--json").stdout)
    assert found["ok"] is True and len(found["errors"]) == 28


def test_verify_finds_damage(copy):
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(data)
    text = call("verify", copy, code=1)
    assert "wrong: " in text.stdout and "model.safetensors" in text.stdout and "findings" in text.stdout
    found = json.loads(call("verify", copy, "--json", code=1).stdout)
    assert found["ok"] is False and "error" not in found
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    assert "model.norm.weight" in call("verify", copy, code=1).stdout
    file.write_bytes(data[:1000])
    assert "model.safetensors" in call("verify", copy, code=1).stdout


def test_verify_against_another_model(demo):
    assert call("verify", demo, "--source", source("qwen3"), code=1).stdout.startswith("wrong: ")
    assert "is not a folder" in call("verify", demo, "--source", "/no/such", code=2).stderr


# --- card and push ---------------------------------------------------------------------------------------------------


def test_card(copy, tmp_path):
    output = tmp_path / "card.md"
    assert f"wrote {output}" in call("card", copy, "--base-model", "user/base", "--output", output).stdout
    assert "base_model: user/base" in output.read_text() and not (copy / "README.md").exists()
    found = json.loads(call("card", copy, "--source", DEMO, "--json").stdout)
    assert found == {"card": str(copy / "README.md")} and (copy / "error.png").stat().st_size > 10_000
    (copy / "README.md").write_text("# Mine\n")
    assert "README.md" in call("card", copy, code=1).stderr and (copy / "README.md").read_text() == "# Mine\n"
    assert "does not exist" in call("card", tmp_path / "nowhere", code=2).stderr


def test_push_and_what_arrives(hub, demo, tmp_path):  # noqa: F811
    text = call("push", demo, "alice/demo", "--message", "First")
    assert "model.safetensors  (LFS)" in text.stdout and "nothing was uploaded" not in text.stdout
    assert hub.repos["alice/demo"].private
    found = json.loads(call("verify", "alice/demo", "--source", DEMO, "--json").stdout)
    assert found["ok"] is True and found["checksums"] > 3
    output = json.loads(call("export", "alice/demo", tmp_path / "out", "--to", "bf16", "--json").stdout)
    assert output["matrices"] == 28
    call("push", demo, "alice/open", "--public")
    assert not hub.repos["alice/open"].private


def test_push_dry_run_needs_no_network(demo):
    text = call("push", demo, "alice/demo", "--dry-run").stdout
    assert "nothing was uploaded" in text and "model.safetensors" in text and "library_name: transformers" in text
    found = json.loads(call("push", demo, "alice/demo", "--dry-run", "--json").stdout)
    assert found["url"] is None and found["nbytes"] > 2_000_000


def test_push_says_what_is_wrong_and_no_token(hub, copy, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "hf_wrongWrongWrongWrongWrongWrong00")
    result = call("push", copy, "alice/demo", code=1)
    assert result.stderr.startswith("error: ") and "hf_wrong" not in result.output
    (copy / "model.safetensors").write_bytes(b"short")
    assert call("push", copy, "alice/demo", code=1).stderr.startswith("error: ")
    assert "alice/demo" not in hub.repos
    assert "does not exist" in call("push", copy.parent / "nowhere", "alice/demo", code=2).stderr


def test_quantize_from_the_hub(hub, tmp_path):  # noqa: F811
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo("alice/full", private=True)
    api.upload_folder(repo_id="alice/full", folder_path=source("qwen3"))
    found = json.loads(call("quantize", "alice/full", tmp_path / "out", "--json").stdout)
    assert found["modules"] == {"nvfp4": 14}
    assert file_bytes(case("qwen3").folder).items() <= file_bytes(tmp_path / "out").items()
