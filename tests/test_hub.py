# SPDX-License-Identifier: Apache-2.0
"""Pushing to a Hub on loopback (hub_server.py) and reading from it, with everything going wrong in turn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import READ_TOKEN, TOKEN, Entry, HubServer, Repo, hub
from huggingface_hub import HfApi, constants
from huggingface_hub._commit_api import UploadInfo
from safetensors.torch import load_file, save_file
from tiny_models import case, source

import quantize_and_push
from hf_mxfp4.checkpoint_files import INDEX, read_checkpoint
from hf_mxfp4.hub import push, read_remote
from hf_mxfp4.hub.transport import ATTEMPTS, LONGEST_WAIT
from hf_mxfp4.verification import verify_checkpoint

__all__ = ["hub"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's uploads
DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"
REPO = "alice/tiny"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A tiny quantized checkpoint in several files. Not to be written to."""
    folder = tmp_path_factory.mktemp("sharded") / "tiny-nvfp4"
    case("llama", "nvfp4").model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(sharded, tmp_path) -> Path:
    return shutil.copytree(sharded, tmp_path / sharded.name)


def contents(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    files = hub.repos[REPO].files(revision)
    return {name: entry.content for name, entry in files.items() if name != ".gitattributes"}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != "README.md"}


def run(code: str, *arguments: str, **environment: str) -> str:
    """Output of Python code in another process, which must succeed."""
    names = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout


# Both ways to publish, in one process; arguments: model, way, repository.
PUBLISH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_mxfp4 import FP4Config
from hf_mxfp4.hub import push

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=FP4Config())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model.save_pretrained(sys.argv[2], max_shard_size="1MB")
tokenizer.save_pretrained(sys.argv[2])
push(sys.argv[2], "alice/by-us")
model.push_to_hub("alice/by-transformers", private=True)
tokenizer.push_to_hub("alice/by-transformers")
"""
# Loads from the Hub with nothing in the cache; arguments: repository or folder, file for logits, then again.
LOAD = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_mxfp4

for name, output in zip(sys.argv[1::2], sys.argv[2::2]):
    model = AutoModelForCausalLM.from_pretrained(name)
    assert sum(isinstance(module, hf_mxfp4.FP4Linear) for module in model.modules()) == 28
    tokens = AutoTokenizer.from_pretrained(name)("def main(arguments):", return_tensors="pt")
    with torch.no_grad():
        save_file({"logits": model(**tokens).logits}, output)
"""


def test_what_is_pushed_loads_from_a_clean_cache(tmp_path):
    """Private, sharded, large files in parts; the same logits as from the folder, by push and by push_to_hub."""
    local, outputs = tmp_path / "demo_lm-nvfp4", [str(tmp_path / f"{i}.safetensors") for i in range(3)]
    with HubServer(part=300_000) as server:
        run(PUBLISH, str(DEMO), str(local), **server.environment(tmp_path / "publisher"))
        pushed = server.repos["alice/by-us"]
        assert pushed.private and len(pushed.commits) == 2  # the empty one, and the model
        assert server.count(r"PUT /put/\w+\?part=") > server.count(r"POST /complete/") >= 2
        names = ("alice/by-us", outputs[0], "alice/by-transformers", outputs[1], str(local), outputs[2])
        run(LOAD, *names, **server.environment(tmp_path / "reader"))
    assert len(list(local.glob("*.safetensors"))) >= 2
    ours, theirs, here = (load_file(output)["logits"] for output in outputs)
    assert torch.equal(ours, here) and torch.equal(theirs, here)
    assert ours.std() > 0.5


def test_the_script_goes_from_a_model_to_the_hub(hub, tmp_path, capsys):
    """Stopped by the Hub, the same command goes on with what is there."""
    output = tmp_path / "tiny-mxfp4"
    arguments = [str(source("llama")), REPO, "--format", "mxfp4", "--output", str(output), "--max-shard-size", "20KB"]
    arguments += ["--base-model", "alice/original", "--config", '{"modules_to_not_convert": ["k_proj"]}']
    assert quantize_and_push.main([*arguments, "--dry-run"]) == 0
    assert hub.log == [] and "not pushed (--dry-run)" in capsys.readouterr().out
    fault = hub.fail("POST .*/commit/", 403, message="storage limit reached")
    assert quantize_and_push.main(arguments) == 1 and fault.seen == 1
    printed = capsys.readouterr()
    assert "is there from an earlier run" in printed.out and "storage limit reached" in printed.err
    assert contents(hub) == {}
    written = {path: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    assert quantize_and_push.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == written and len(written) > 2
    assert {*contents(hub)} == {*on_disk(output)} >= {"README.md", "error.json", "error.png", "checksums.sha256"}
    card = contents(hub)["README.md"].decode()
    assert "base_model: alice/original" in card and "](error.png)" in card and "--max-shard-size 20KB" in card
    assert str(tmp_path) not in card and str(source("llama").parent) not in card
    assert verify_checkpoint(output, source("llama")).ok
    expected = on_disk(output)
    assert {n: c for n, c in contents(hub).items() if n != "README.md"} == without_card(expected)
    other = ["--config", '{"search": 2}', *arguments[:-2]]
    assert quantize_and_push.main(other) == 1 and on_disk(output) == expected


def test_the_script_takes_a_model_from_the_hub(hub, tmp_path, monkeypatch):
    """With its licence and name, which the card shows in place of the folder in the cache."""
    readme = b"---\nlicense: other\nlicense_name: mine-1.0\nlicense_link: LICENSE\n---\n"
    publish(hub, on_disk(source("llama")) | {"README.md": readme, "LICENSE": b"text"}, repo="alice/original")
    monkeypatch.chdir(tmp_path)
    assert quantize_and_push.main(["alice/original", REPO, f"--output={tmp_path / 'made'}"]) == 0
    card = contents(hub)["README.md"].decode()
    for line in ("base_model: alice/original", "license: other", "license_name: mine-1.0", "license_link: LICENSE"):
        assert f"\n{line}\n" in card
    assert contents(hub)["LICENSE"] == b"text"
    assert "Error of the packed weights against `alice/original`" in card and "snapshots" not in card
    assert "--output=made" in card and str(tmp_path) not in card


def test_the_script_says_what_is_wrong(tmp_path, capsys):
    model, output = str(source("llama")), str(tmp_path / "out")
    wrong = {
        ("--format", "int4"): "format='int4'",
        ("--config", '{"colour": 1}'): "colour",
        ("--config", '{"outlier_fallback": 0.01}'): "outlier_fallback",
    }
    for arguments, message in wrong.items():
        assert quantize_and_push.main([model, REPO, "--output", output, *arguments]) == 1
        assert message in capsys.readouterr().err
    for config in ("{", "[1]"):
        with pytest.raises(SystemExit):
            quantize_and_push.main([model, REPO, "--config", config])
    assert quantize_and_push.main(["./not/there", REPO]) == 1 and "is not a folder" in capsys.readouterr().err


TRANSIENT = {
    "create 429": ("POST /api/repos/create", 429, {"headers": {"Retry-After": "7"}}),
    "create 429, window": ("POST /api/repos/create", 429, {"headers": {"RateLimit": '"api";r=0;t=11'}}),
    "create 503": ("POST /api/repos/create", 503, {"times": 2}),
    "create dropped": ("POST /api/repos/create", 0, {}),
    "create done, answer lost": ("POST /api/repos/create", -1, {}),
    "info 500": (r"GET /api/models/alice/tiny", 500, {}),
    "preupload 500": ("POST .*/preupload/", 500, {}),
    "batch 503": ("POST .*/objects/batch", 503, {"headers": {"Retry-After": "2"}}),
    "upload 500": ("PUT /put/", 500, {"times": 2}),
    "upload dropped": ("PUT /put/", 0, {"first": 2}),
    "upload dropped often": ("PUT /put/", 0, {"times": 8}),
    "upload done, answer lost": ("PUT /put/", -1, {}),
    "verification 500": (r"POST .*\.git/verify", 500, {}),
    "card 503": ("POST /api/validate-yaml", 503, {}),
    "commit 429": ("POST .*/commit/", 429, {"headers": {"Retry-After": "3"}}),
    "commit 500": ("POST .*/commit/", 500, {"times": 2}),
    "commit dropped": ("POST .*/commit/", 0, {}),
    "commit done, answer lost": ("POST .*/commit/", -1, {}),
    "somebody else's commit": ("POST .*/commit/", 412, {}),
    "listing half sent": ("GET .*/tree/", -2, {}),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_what_fails_in_passing_is_tried_again(hub, folder, name):
    pattern, status, options = TRANSIENT[name]
    fault = hub.fail(pattern, status, **options)
    pushed = push(folder, REPO)
    if name != "commit done, answer lost":  # there is nothing left to commit then
        assert fault.seen > fault.times, "the request that failed was not made again"
    assert without_card(contents(hub)) == on_disk(folder)
    assert hub.repos[REPO].titles == ["initial commit", "Upload tiny-nvfp4 (hf_mxfp4)"]
    assert pushed.url.endswith(hub.repos[REPO].branches["main"])
    asked = options.get("headers", {}).get("Retry-After", 11 if "window" in name else 0)
    assert hub.waits and max(hub.waits) >= int(asked) and sum(hub.waits) < 120


PERMANENT = ("/api/repos/create", "GET /api/models", "/preupload/", "objects/batch", "PUT /put/", "/commit/")


@pytest.mark.parametrize("pattern", PERMANENT)
@pytest.mark.parametrize("status", [503, 0], ids=["503", "dropped"])
def test_a_hub_that_is_down_leaves_nothing_visible(hub, folder, pattern, status):
    hub.fail(pattern, status, times=10**6)
    says = "All of it is visible, or nothing" if pattern == "/commit/" else "Nothing of it is visible"
    with pytest.raises(ConnectionError, match=f"{ATTEMPTS} times.*{says}; the same command") as error:
        push(folder, REPO)
    assert TOKEN not in f"{error.value!r}{error.value.__cause__!r}"
    assert max(hub.waits) <= 16 and len(hub.waits) < 40 * ATTEMPTS  # five files at a time
    if REPO in hub.repos:
        assert contents(hub) == {} and hub.repos[REPO].private
    hub.faults.clear()
    received, is_uploaded = hub.received, bool(hub.large)
    push(folder, REPO)
    assert without_card(contents(hub)) == on_disk(folder)
    assert not is_uploaded or hub.received == received, "large files were sent twice"


def test_a_hub_that_goes_down_after_the_commit(hub, folder):
    """Nobody is told then that nothing is visible; the same command finds that there is nothing left to do."""
    hub.fail("GET .*/tree/", 503, times=10**6)
    with pytest.raises(ConnectionError, match="All of it is visible, or nothing"):
        push(folder, REPO)
    assert without_card(contents(hub)) == on_disk(folder)
    hub.faults.clear()
    push(folder, REPO)
    assert len(hub.repos[REPO].commits) == 2


def test_files_are_hashed_once(hub, folder, monkeypatch):
    original, hashed = UploadInfo.from_path.__func__, []

    def from_path(cls, path):
        hashed.append(Path(path).name)
        return original(cls, path)

    monkeypatch.setattr(UploadInfo, "from_path", classmethod(from_path))
    hub.fail("POST .*/commit/", 500, times=3)
    push(folder, REPO)
    assert sorted(hashed) == sorted(on_disk(folder))


def test_only_what_is_missing_is_sent_after_an_interruption(hub, folder):
    hub.fail("PUT /put/", 403, first=3, times=10**6, message="signature expired")
    with pytest.raises(PermissionError):
        push(folder, REPO)
    kept, received = len(hub.large), hub.received
    assert kept == 2 and contents(hub) == {}
    hub.faults.clear()
    push(folder, REPO)
    sizes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert hub.received - received == sizes - received


@pytest.mark.parametrize("times", [2, 100])
def test_storage_that_fails_without_http(hub, folder, monkeypatch, times):
    """hf_xet, which uploads to the real Hub, raises a RuntimeError that says what it likes."""
    original, seen = HfApi.preupload_lfs_files, []

    def preupload(*args, **kwargs):
        seen.append(1)
        if len(seen) <= times:
            raise RuntimeError(f"CAS service error: {TOKEN}")
        return original(*args, **kwargs)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", preupload)
    if times == 2:
        assert push(folder, REPO).url and len(seen) == 4  # create_commit calls it once more
        return
    with pytest.raises(ConnectionError, match="CAS service error: <token>") as error:
        push(folder, REPO)
    assert error.value.__cause__ is None and len(seen) == ATTEMPTS


def test_waits_are_bounded(hub, folder):
    """A Hub that asks for an hour gets an error that says so."""
    hub.fail("POST /api/repos/create", 429, times=10**6, headers={"Retry-After": "3600"}, message="slow down")
    with pytest.raises(ConnectionError, match="answered 429, 1 times: slow down"):
        push(folder, REPO)
    assert not hub.waits and LONGEST_WAIT < 3600


DENIED = {
    "no token": (None, "wants a token"),
    "rejected": ("hf_wrongWrongWrongWrongWrongWrong", "rejected the token"),
    "read only": (READ_TOKEN, "don't have the rights.*write permission"),
    "strange characters": ("hf_wrong\x01Wrong\x02Wrong", "rejected the token"),
    "not ASCII": ("hf_wröngWröngWröng", "stray characters"),
}


@pytest.mark.parametrize("name", DENIED)
def test_tokens_that_do_not_do(hub, folder, monkeypatch, capfd, caplog, name):
    token, message = DENIED[name]
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(OSError, match=message) as error:
        push(folder, REPO)
    assert type(error.value) in (PermissionError, ConnectionError) and hub.repos == {} and not hub.waits
    if token is not None:
        link, shown = error.value, ""
        while link is not None:  # what a traceback prints
            shown, link = shown + f"{link}{link!r}", link.__cause__
        assert token not in shown + "".join(capfd.readouterr()) + caplog.text


@pytest.mark.parametrize("pattern", ["POST .*/preupload/", "objects/batch", "POST .*/commit/"])
@pytest.mark.parametrize("status, kind", [(401, "rejected the token"), (403, "write permission"), (413, "storage")])
def test_a_token_that_is_rejected_midway(hub, folder, pattern, status, kind):
    hub.fail(pattern, status, times=10**6, message="Invalid credentials in Authorization header")
    with pytest.raises(PermissionError, match=kind):
        push(folder, REPO)
    assert contents(hub) == {} and not hub.waits


def test_repositories_that_do_not_do(hub, folder):
    with pytest.raises(PermissionError, match="bob"):
        push(folder, "bob/tiny")
    with pytest.raises(ValueError, match="a commit goes|no such revision|answered"):
        push(folder, REPO, revision="refs/pr/7")
    hub.fail("POST .*/commit/", 400, message="commit refused")
    with pytest.raises(ValueError, match="answered 400: commit refused"):
        push(folder, REPO)
    assert contents(hub) == {} and not hub.waits


@pytest.mark.parametrize("name", ["tiny", "../tiny", "alice/tiny/too/long", "alice/a b", ""])
def test_names_are_checked_first(hub, folder, name):
    """Without its owner, a repository would get a card whose examples load something else."""
    for dry_run in (False, True):
        with pytest.raises(ValueError, match="is not the name of a repository"):
            push(folder, name, dry_run=dry_run)
    assert hub.log == []


def test_a_token_is_asked_for_first(folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(sys.modules["hf_mxfp4.hub.push"], "verify_checkpoint", None)
    with pytest.raises(PermissionError, match="wants a token"):
        push(folder, REPO)


def test_weights_of_an_earlier_checkpoint_go_with_the_same_commit(hub, folder):
    """A reader would take the old single file for the new model's; other files stay."""
    push(folder, REPO)
    earlier = hub.repos[REPO].branches["main"]
    api = HfApi()
    for name in ("LICENSE", "notes/old.safetensors"):
        api.upload_file(path_or_fileobj=b"text", path_in_repo=name, repo_id=REPO)
    whole = folder.parent / "whole"
    case("llama", "nvfp4").model.save_pretrained(whole)
    pushed = push(whole, REPO)
    shards = {path.name for path in folder.glob("*.safetensors*")}
    assert set(pushed.deleted) == shards and not shards & set(contents(hub))
    assert {*on_disk(whole), "README.md", "LICENSE", "notes/old.safetensors"} == set(contents(hub))
    assert without_card(contents(hub, earlier)) == on_disk(folder)
    assert [file.path for file in pushed.files if file.large] == ["model.safetensors"]


def test_pushing_twice_makes_one_commit(hub, folder):
    first, second = push(folder, REPO), push(folder, REPO)
    assert first.url == second.url and len(hub.repos[REPO].commits) == 2


def test_nothing_is_published_by_accident(hub, folder):
    push(folder, REPO, private=False)
    assert not hub.repos[REPO].private
    before = hub.repos[REPO].branches["main"]
    (folder / "NOTICE").write_text("secret")
    with pytest.raises(ValueError, match="alice/tiny is public, and private=True.*--public"):
        push(folder, REPO)
    assert hub.repos[REPO].branches["main"] == before
    assert push(folder, REPO, private=False).private is False
    assert contents(hub)["NOTICE"] == b"secret"


def test_the_original_is_not_replaced(hub, folder):
    publish(hub, on_disk(source("llama")))
    hub.repos[REPO].branches["earlier"] = hub.repos[REPO].branches["main"]
    with pytest.raises(ValueError, match="alice/tiny holds a model in full precision.*--revision"):
        push(folder, REPO)
    assert contents(hub) == on_disk(source("llama"))
    pushed = push(folder, REPO, revision="nvfp4")
    assert pushed.deleted == ("model.safetensors",) and contents(hub) == on_disk(source("llama"))
    assert without_card(contents(hub, "nvfp4")) == on_disk(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_an_original_of_any_kind_is_not_replaced(hub, folder, name):
    publish(hub, {"config.json": b"{}", name: b"weights"})
    with pytest.raises(ValueError, match="holds a model in full precision"):
        push(folder, REPO)
    publish(hub, {"config.json": b"{", name: b"weights"})
    with pytest.raises(ValueError, match="config.json that is damaged.*--revision"):
        push(folder, REPO)


def test_a_model_in_full_precision_has_no_card(hub):
    hub.fail("POST .*/commit/", -1)
    done = push(source("llama"), REPO)
    assert done.card is None and contents(hub) == on_disk(source("llama"))
    assert push(source("llama"), REPO).url == done.url, "may not be pushed again"


def test_a_branch(hub, folder):
    pushed = push(folder, REPO, revision="nvfp4/first", commit_message="hello")
    assert pushed.revision == "nvfp4/first" and hub.repos[REPO].titles[-1] == "hello"
    assert contents(hub) == {} and without_card(contents(hub, "nvfp4/first")) == on_disk(folder)


def test_a_gitignore_on_the_hub_leaves_out_nothing(hub, folder):
    HfApi().create_repo(REPO, private=True)
    HfApi().upload_file(path_or_fileobj=b"*.safetensors\nconfig.json\n", path_in_repo=".gitignore", repo_id=REPO)
    push(folder, REPO)
    assert on_disk(folder).items() <= contents(hub).items()


def test_cards_of_users_stay(hub, folder):
    card = push(folder, REPO).card
    assert contents(hub)["README.md"].decode() == card
    HfApi().upload_file(path_or_fileobj=b"my own\n", path_in_repo="README.md", repo_id=REPO)
    again = push(folder, REPO)
    assert contents(hub)["README.md"] == b"my own\n" and "has one already" in again.left_out["README.md"]
    (folder / "README.md").write_text("mine too\n")
    assert push(folder, REPO).card is None and contents(hub)["README.md"] == b"mine too\n"
    (folder / "README.md").write_text(card.replace("## Limits", "## Limits that were edited"))
    assert push(folder, REPO).card is None or contents(hub)["README.md"] == b"mine too\n"
    assert "README.md" not in push(folder, "alice/other", card=False).left_out
    assert "README.md" in hub.repos["alice/other"].files()


def test_what_is_left_out(hub, folder):
    kept = on_disk(folder)
    for name in ("pytorch_model.bin", "optimizer.PT", "training_args.bin", "x.pkl", "model.safetensors.tmp", "a.lock"):
        (folder / name).write_bytes(b"x")
    for name in (".secret/journal", ".git/config", ".env", "__pycache__/a.pyc", "sub/.cache/x", "sub/more.txt"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(b"x")
    (folder / "link.json").symlink_to("config.json")
    (folder / "linked").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    pushed = push(folder, REPO)
    expected = kept | {"link.json": kept["config.json"], "sub/more.txt": b"x"}
    assert without_card(contents(hub)) == expected
    assert "pickle" in pushed.left_out["optimizer.PT"] and pushed.left_out["a.lock"] == "temporary"
    assert pushed.left_out["linked"] == "a link to a folder" and pushed.left_out[".secret"] == "hidden"
    assert "neither" in pushed.left_out["pipe"] and "sub/.cache" in pushed.left_out


def _outside(folder):
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to("../secret.txt")


def _not_utf8(folder):
    Path(os.fsdecode(os.fsencode(folder / "notes") + b"\xff.txt")).write_text("x")


def _unfinished(folder):
    (folder / ".hf_mxfp4").mkdir()


def _nan(folder):
    path = next(path for path in sorted(folder.glob("*.safetensors")) if "weight_scale" in str(list(load_file(path))))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, path, {"format": "pt"})


REFUSED = {
    "a link out": (_outside, "notes.txt is a link to .*secret.txt, outside the folder"),
    "a link to nothing": (lambda folder: (folder / "x.json").symlink_to("gone"), "link to nothing"),
    "not UTF-8": (_not_utf8, r"notes\\xff.txt is not UTF-8"),
    "a shard missing": (lambda folder: next(folder.glob("*.safetensors")).unlink(), "damaged and was not pushed"),
    "unfinished": (_unfinished, "is not finished.*the same command"),
    "NaN": (_nan, "damaged and was not pushed"),
    "no folder": (shutil.rmtree, "is not a folder"),
    "no checkpoint": (lambda folder: [path.unlink() for path in folder.iterdir()], "no safetensors file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_sent(hub, folder, name):
    damage, message = REFUSED[name]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        push(folder, REPO)
    assert hub.log == []


def test_a_dry_run_makes_no_request(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    plan = push(folder, REPO, dry_run=True)
    assert hub.log == [] and plan.url is None and plan.private
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    done = push(folder, REPO)
    assert (plan.files, plan.card) == (done.files, done.card)
    assert plan.nbytes == sum(len(content) for content in contents(hub).values())
    readme = {"path": "README.md", "nbytes": len(plan.card.encode()), "large": False}
    assert json.loads(json.dumps(plan.to_dict()))["files"][0] == readme
    assert on_disk(folder) == without_card(contents(hub)), "the folder was written to"


def test_offline(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for function in (lambda: push(folder, REPO), lambda: read_remote(REPO)):
        with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
            function()
    assert hub.log == [] and not hub.waits


def test_what_arrived_is_compared(hub, folder, monkeypatch):
    """A file that changes while it is pushed, here on the other end."""
    original = HfApi.list_repo_tree

    def changed(self, *args, **kwargs):
        files = hub.repos[REPO].files()
        files["config.json"] = Entry(b"{}", False)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, "list_repo_tree", changed)
    with pytest.raises(ValueError, match="config.json arrived otherwise"):
        push(folder, REPO)


def publish(hub: HubServer, files: dict[str, bytes], branch: str = "main", repo: str = REPO) -> None:
    """Put files into the repository, past all checks."""
    repo = hub.repos.setdefault(repo, Repo(True, "alice"))
    repo.commit(branch, {name: Entry(content, name.endswith(".safetensors")) for name, content in files.items()}, "")
    hub.large |= {entry.sha256: entry.content for entry in repo.files(branch).values() if entry.large}


@pytest.fixture
def large(tmp_path) -> Path:
    """A checkpoint in one large file, whose config says nothing of quantization."""
    folder = tmp_path / "large"
    folder.mkdir()
    tensors = {
        "a.weight": torch.zeros(500_000, 2),
        "b.weight": torch.ones(3).bfloat16(),
        "c": torch.ones(()),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "made": "here"})
    (folder / "config.json").write_text("{}")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    return folder


def test_headers_are_read_without_weights(hub, folder, large):
    publish(hub, on_disk(folder))
    publish(hub, on_disk(large), "large")
    assert read_remote(REPO)._replace(folder=folder) == read_checkpoint(folder)
    hub.sent.clear()
    found = read_remote(REPO, revision="large")
    assert found.folder is None and found._replace(folder=large) == read_checkpoint(large)
    assert found.quantization["quantization"]["quant_algo"] == "NVFP4"
    sent = {path: count for path, count in hub.sent.items() if path.startswith("/get/")}
    assert list(sent.values()) == [100_001] and large.joinpath("model.safetensors").stat().st_size > 4_000_000
    assert sum(hub.sent.values()) < 110_000


def test_a_long_header_is_read_whole(hub, tmp_path):
    tensors = {f"model.layers.{i}.some_longer_name.weight": torch.zeros(1) for i in range(2000)}
    save_file(tensors, tmp_path / "model.safetensors")
    publish(hub, {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    assert set(read_remote(REPO).tensors) == set(tensors)
    assert hub.count("GET /get/") == 2


@pytest.mark.parametrize("pattern", ["GET /api/models", r"GET .*/config.json", "HEAD .*/config.json", "GET /get/"])
@pytest.mark.parametrize("status", [429, 503, 0])
def test_reading_is_tried_again(hub, folder, pattern, status):
    publish(hub, on_disk(folder))
    fault = hub.fail(pattern, status, times=2)
    assert read_remote(REPO).tensors == read_checkpoint(folder).tensors
    assert fault.seen > 2 and hub.waits


def _index(change):
    def damage(files):
        index = json.loads(files[INDEX])
        change(index["weight_map"])
        files[INDEX] = json.dumps(index).encode()

    return damage


def _first(files: dict[str, bytes]) -> str:
    return min(name for name in files if name.endswith(".safetensors"))


DAMAGED = {
    "no safetensors": (lambda files: [files.pop(n) for n in list(files) if "safetensors" in n], "no safetensors file"),
    "a shard missing": (lambda files: files.pop(_first(files)), "not a safetensors file beside it"),
    "a path": (
        _index(lambda names: names.update(x="../../x.safetensors")),
        "not a safetensors file beside it",
    ),
    "a pickle": (_index(lambda names: names.update(x="pytorch_model.bin")), "not a safetensors file beside it"),
    "another index": (_index(lambda names: names.update(x=next(iter(names.values())))), "names other tensors"),
    "a broken header": (lambda files: files.update({_first(files): b"\x10" + bytes(40)}), "damaged safetensors file"),
    "too short": (lambda files: files.update({_first(files): files[_first(files)][:-4000]}), "is truncated"),
    "config": (lambda files: files.update({"config.json": b"[1]"}), "is not a JSON object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_on_the_hub(hub, folder, name):
    damage, message = DAMAGED[name]
    files = on_disk(folder)
    damage(files)
    publish(hub, files)
    with pytest.raises(ValueError, match=message):
        read_remote(REPO)


def test_a_gated_model(hub, folder):
    publish(hub, on_disk(folder))
    hub.fail("GET /api/models", 403, headers={"X-Error-Code": "GatedRepo"})
    with pytest.raises(PermissionError, match="is gated: accept its conditions"):
        read_remote(REPO)


def test_what_is_not_there(hub, folder, monkeypatch):
    publish(hub, on_disk(folder))
    with pytest.raises(ValueError, match="alice/none is not on the Hub, or is private"):
        read_remote("alice/none")
    with pytest.raises(ValueError, match="no such revision"):
        read_remote(REPO, revision="none")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "none"))
    with pytest.raises(ValueError, match="or is private, and there is no token. Check the name, or log in"):
        read_remote(REPO)
    assert read_remote(REPO, token=TOKEN).tensors
    with pytest.raises(ConnectionError, match="stray characters") as error:
        read_remote(REPO, token=DENIED["not ASCII"][0])
    assert error.value.__cause__ is None and DENIED["not ASCII"][0] not in repr(error.value)
