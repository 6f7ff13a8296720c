# SPDX-License-Identifier: Apache-2.0
"""The command line, as a user types it: what all commands share, `analyze` and `doctor`."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from typer.testing import CliRunner

from hf_mxfp4 import analysis
from hf_mxfp4.cli import app, common, errors

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
COMMANDS = "quantize inspect analyze export verify evaluate card push tune doctor".split()
run = CliRunner().invoke


def test_help_lists_every_command_and_the_exit_codes():
    result = run(app, ["--help"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    for word in (*COMMANDS, "130 interrupted", "HF_MXFP4_DEBUG=1", '{"error": "..."}'):
        assert word in result.stdout
    assert sorted(COMMANDS) == sorted(command.callback.__name__ for command in app.registered_commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command):
    """Every example line names options that the command has."""
    result = run(app, [command, "--help"], env={"COLUMNS": "300"})
    assert result.exit_code == 0 and "--json" in result.stdout
    examples = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("hf-mxfp4 ")]
    assert examples or command == "doctor"
    for example in examples:
        assert example.startswith(f"hf-mxfp4 {command} ")
        assert all(f"{word} " in result.stdout for word in example.split() if word.startswith("--"))


def test_no_option_takes_a_token():
    for command in COMMANDS:
        assert "--token " not in run(app, [command, "--help"], env={"COLUMNS": "300"}).stdout


# --- errors ----------------------------------------------------------------------------------------------------------


def caught(error, *arguments, environment=None):
    """The result of a command that ends in an error: an exception to raise, or a function that does it."""
    group = typer.Typer(cls=errors.Commands, pretty_exceptions_enable=False)
    group.callback()(lambda: None)

    @group.command()
    def fail(as_json: common.Json = False):
        if isinstance(error, BaseException):
            raise error
        error()

    return run(group, ["fail", *arguments], env=environment)


EXPECTED = {
    "value": ValueError("bad [eval] value"),
    "type": TypeError("bad [eval] type"),
    "os": OSError(errno.ENOSPC, "bad [eval] disk"),
    "not implemented": NotImplementedError("bad [eval] layer"),
    "hub": HFValidationError("bad [eval] name"),
    "safetensors": SafetensorError("bad [eval] file"),
    "out of memory": torch.OutOfMemoryError("bad [eval] size"),
    "import": ImportError("bad [eval] import"),
}


@pytest.mark.parametrize("error", EXPECTED.values(), ids=EXPECTED)
def test_expected_errors_are_one_message(error):
    """Brackets are not taken for markup, and long lines are not broken."""
    result = caught(error)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and "bad [eval]" in result.stderr and "Traceback" not in result.stderr
    result = caught(error, "--json")
    assert result.exit_code == 1 and "bad [eval]" in json.loads(result.stdout)["error"]
    assert "error: " in result.stderr
    long = caught(ValueError("word " * 60))
    assert len(long.stderr.strip().splitlines()) == 1


def test_a_runtime_error_of_ours_is_a_message(monkeypatch):
    def fail():
        raise RuntimeError("all workers were killed")

    assert isinstance(caught(fail).exception, RuntimeError)
    monkeypatch.setattr(errors, "_PACKAGE", Path(__file__).parent)
    assert "error: all workers were killed" in caught(fail).stderr


def test_a_missing_package_is_named():
    def use():
        import no_such_package.part  # noqa: F401

    result = caught(use)
    assert (
        result.exit_code == 1
        and "no-such-package is not installed. Run `pip install no-such-package`" in result.stderr
    )


def test_frames_without_code_are_no_raise_statements():
    """Such as those that extensions add to tracebacks."""
    frame = SimpleNamespace(f_code=SimpleNamespace(co_code=b"", co_filename="x.pyx"))
    assert errors._raised_in(SimpleNamespace(tb_frame=frame, tb_lasti=0, tb_next=None)) is None


BUGS = {
    "none": lambda: [None][0][0],
    "call": lambda: len(1, 2),
    "conversion": lambda: int("x"),
    "attribute": lambda: None.name,
    "key": lambda: {}["x"],
    "own import": lambda: __import__("hf_mxfp4.no_such_file"),
    "shapes": lambda: torch.ones(2) + torch.ones(3),
    "runtime error of another library": lambda: contextlib.contextmanager(lambda: iter(()))().__enter__(),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_bugs_keep_their_traceback(bug):
    result = caught(bug)
    assert result.exit_code == 1 and not isinstance(result.exception, SystemExit) and "error:" not in result.stderr


def test_debug_shows_the_traceback():
    result = caught(ValueError("told"), environment={"HF_MXFP4_DEBUG": "1"})
    assert isinstance(result.exception, ValueError)


def test_an_interrupt():
    result = caught(KeyboardInterrupt())
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert json.loads(caught(KeyboardInterrupt(), "--json").stdout) == {"error": "interrupted."}


def test_wrong_arguments_as_json():
    for arguments in (
        ["analyze", "--json"],
        ["analyze", str(DEMO), "--format", "fp8", "--json"],
        ["inspect", "--jsn"],
    ):
        result = run(app, arguments)
        assert result.exit_code == 2 and "Error" in result.stderr
        assert ("error" in json.loads(result.stdout)) if "--json" in arguments else result.stdout == ""


def test_a_reader_that_has_gone_is_no_error():
    """`hf-mxfp4 inspect ... | head -c 1` in a process of its own."""
    code = "import sys; from hf_mxfp4.cli import app; sys.argv[0] = 'hf-mxfp4'; app()"
    command = [sys.executable, "-c", code, "inspect", str(DEMO), "--json"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert "Traceback" not in done.stderr


# --- output ----------------------------------------------------------------------------------------------------------


def test_json_has_no_nan(capsys):
    common.print_json({"a": [float("nan"), 1.5], "b": (float("inf"), "x", True)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, "x", True]}


def test_without_a_terminal_progress_is_lines(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 31.0, 40.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(common.Call, "json", False)
    with common.byte_bar("copying") as tell:
        for done in (10**9, 2 * 10**9, 3 * 10**9):
            tell(done, 4 * 10**9, "x")
    out, err = capsys.readouterr()
    assert out == "" and err == "copying: 2.00 of 4.00 GB, 32 MB/s\n"


def test_bars_of_libraries_are_silent_and_come_back(capsys, monkeypatch):
    from tqdm.auto import tqdm

    monkeypatch.setattr(common.Call, "json", False)
    with common.quiet_libraries():
        list(tqdm(range(3), disable=False))
    assert capsys.readouterr().err == ""
    list(tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err


def test_recorded_commands_name_no_folders(monkeypatch):
    words = ("hf-mxfp4", "evaluate", "/home/me/model", "--text=~/my text.txt", "--tasks=a,b/c")
    monkeypatch.setattr(common.Call, "words", words)
    assert common.command_line() == "hf-mxfp4 evaluate model '--text=my text.txt' --tasks=a,b/c"


@pytest.mark.parametrize(("given", "kind"), [("cpu", "cpu"), ("auto", "auto"), (None, "cuda|cpu")])
def test_devices(given, kind):
    assert common.device_of(given, auto=True) in kind.split("|")


@pytest.mark.parametrize("given", ["tpu9", "cuda:99x", "cuda:99", "meta", "auto", ""])
def test_unknown_devices(given):
    with pytest.raises(typer.BadParameter, match="allowed: cpu, cuda"):
        common.device_of(given)


# --- analyze and doctor ----------------------------------------------------------------------------------------------


def test_analyze(tmp_path):
    result = run(app, ["analyze", str(DEMO), "--output", str(tmp_path)])
    assert result.exit_code == 0 and "worst of 28" in result.output
    saved = json.loads((tmp_path / "analysis.json").read_text())
    assert len(saved["tensors"]) == 28 and 0.38 < saved["overall"]["overshoot"] < 0.5
    assert (tmp_path / "analysis.png").stat().st_size > 20_000
    assert list(saved["overall"]["corrections"]) == ["soar", "+ macro-blocks", "+ 0.5 % outliers"]
    assert "error: ceil 0.01" in result.output


def test_analyze_json(tmp_path):
    skip = "embed|norm|layers.[1-9]"
    arguments = ["analyze", str(DEMO), "--format", "nvfp4", "--rule", "soar", "--json", "--skip", skip]
    result = run(app, [*arguments, "--output", str(tmp_path)])
    assert json.loads(result.stdout) == json.loads((tmp_path / "analysis.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "fp8"], "mxfp4, nvfp4"),
        (["--format", "nvfp4", "--rule", "ceil"], "amax, four_over_six, soar"),
        (["--skip", "."], "no safetensors file with matrices"),
        (["--skip", "(["], "'([' is not a regular expression"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    result = run(app, ["analyze", str(DEMO), "--output", str(tmp_path / "out"), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and message in result.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model", "code"), [("no/such-model", 1), ("/no/such/folder", 2), ("", 2), (__file__, 2)])
@pytest.mark.parametrize("command", ["analyze --output", "export --to bf16"])
def test_no_such_model(command, model, code, tmp_path):
    """2 for what cannot be a model's name; 1 if the Hub does not give it."""
    words = [*command.split(), str(tmp_path / "out")]
    words.insert(1, model)
    result = run(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == code and f"{model} is not a folder" in result.output and not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_shows_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "out").write_text("mine")
    monkeypatch.setattr(analysis, "analyze", lambda *_: pytest.fail("worked"))
    result = run(app, ["analyze", str(DEMO), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and "File exists" in result.stderr


def test_damaged_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    result = run(app, ["analyze", str(tmp_path), "--output", str(tmp_path / "out")], env={"COLUMNS": "300"})
    assert result.exit_code == 1 and "not a safetensors file" in result.output and not (tmp_path / "out").exists()


def test_doctor():
    text, found = run(app, ["doctor"]), json.loads(run(app, ["doctor", "--json"]).stdout)
    assert text.exit_code == 0 and found["packages"]["torch"] == str(torch.__version__)
    assert found["python"] in text.stdout and "CPU runs" in text.stdout
