# SPDX-License-Identifier: Apache-2.0
"""Damaged, hostile and odd checkpoint folders, exported, inspected and verified: an error or a finding that says what
is wrong; nothing half-written, nothing changed, no traceback of another kind."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import case, file_bytes

from hf_mxfp4.checkpoint_files import INDEX, TensorReader, read_checkpoint
from hf_mxfp4.export import TARGETS, export_checkpoint
from hf_mxfp4.inspection import inspect_checkpoint
from hf_mxfp4.verification import verify_checkpoint

SHARD = "model-00002-of-"
SCALE = "model.layers.1.mlp.down_proj.weight_scale"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A small NVFP4 checkpoint of several files. Shared: not to be written to."""
    folder = tmp_path_factory.mktemp("faults") / "sharded"
    case("llama").model.save_pretrained(folder, max_shard_size=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def shard(folder: Path) -> Path:
    return next(path for path in sorted(folder.glob("*.safetensors")) if path.name.startswith(SHARD))


def change_shard(change):
    """A fault that edits the bytes of one file."""

    def fault(folder: Path):
        path = shard(folder)
        path.write_bytes(change(path.read_bytes()))

    return fault


def change_json(name: str, change):
    def fault(folder: Path):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return fault


def change_tensor(key: str, change):
    """A fault that edits one tensor (`None` takes it away), and the index with it."""

    def fault(folder: Path):
        index = json.loads((folder / INDEX).read_text())
        file = index["weight_map"][key]
        tensors = load_file(folder / file)
        new = change(tensors.pop(key))
        if new is None:
            del index["weight_map"][key]
        else:
            tensors[key] = new
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps(index))

    return fault


def one_file(folder: Path, tensors: dict) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")


def scale_byte(value: int):
    def change(scale):
        scale.view(torch.uint8)[3, 1] = value
        return scale

    return change


def index_to(file: str):
    return change_json(INDEX, lambda content: content["weight_map"].update({SCALE: file}))


def pickles(folder: Path) -> None:
    one_file(folder, {})
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")


def twice(folder: Path) -> None:
    (folder / INDEX).unlink()
    shutil.copy(shard(folder), folder / "copy.safetensors")


def double_name(data: bytes) -> bytes:
    """A header in which a name stands twice."""
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].decode()
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    name = next(iter(entries))
    doubled = (header.rstrip()[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}").encode()
    return struct.pack("<Q", len(doubled)) + doubled + data[8 + length :]


def change_header(change):
    """A fault in what a file's header says, the rest of the file as it was."""

    def edit(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return change_shard(edit)


def two_in_one_place(header: dict) -> None:
    """Another tensor's bytes are read for a weight."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    kind = [(entry["dtype"], entry["shape"]) for entry in entries]
    first = next(index for index in range(len(entries)) if kind[index] in kind[index + 1 :])
    other = kind.index(kind[first], first + 1)
    assert entries[first]["data_offsets"] < entries[other]["data_offsets"]  # so that the length tells nothing
    entries[first]["data_offsets"] = entries[other]["data_offsets"]


QUANTIZATION = "quantization_config"
FAULTS = {
    "truncated": (change_shard(lambda data: data[:-100]), rf"{SHARD}.* is damaged: .*Download it again"),
    "header longer than the file": (
        change_shard(lambda data: struct.pack("<Q", 10**9) + data[8:]),
        rf"{SHARD}.* is not a safetensors file, or is truncated",
    ),
    "header longer than any file": (
        change_shard(lambda data: struct.pack("<Q", 2**63) + data[8:]),
        rf"{SHARD}.* is not a safetensors file, or is truncated",
    ),
    "header unreadable": (change_shard(lambda data: data[:8] + b"\xff" * 9 + data[17:]), "its header is unreadable"),
    "empty file": (change_shard(lambda data: b""), rf"{SHARD}.* is not a safetensors file, or is truncated: 0 bytes"),
    "a name twice in a header": (change_shard(double_name), "its header is unreadable"),
    "two tensors in one place": (change_header(two_in_one_place), r"is unreadable \(tensors overlap, or leave gaps\)"),
    "shape and bytes differ": (
        change_header(lambda header: next(e for n, e in header.items() if n != "__metadata__")["shape"].append(2)),
        r"is unreadable \(.* bytes are not",
    ),
    "metadata is no map of texts": (
        change_header(lambda header: header.update(__metadata__={"format": 1})),
        r"is unreadable \(its metadata",
    ),
    "config.json nested without end": (
        lambda folder: (folder / "config.json").write_text('{"a": ' + "[" * 100_000),
        "is not JSON in UTF-8",
    ),
    "missing file": (lambda folder: shard(folder).unlink(), rf"{SHARD}.* is missing, and {INDEX} names it"),
    "tensor in two files": (twice, r"stands in .* and in .*: one of the files belongs to another checkpoint"),
    "index names a tensor that is not there": (
        change_json(INDEX, lambda content: content["weight_map"].update(x=content["weight_map"][SCALE])),
        r"names 1 tensors that its files do not hold \(such as x\)",
    ),
    "index lacks a tensor": (
        change_json(INDEX, lambda content: content["weight_map"].pop(SCALE)),
        rf"does not name 1 tensors that its files hold \(such as {SCALE}\)",
    ),
    "index leads out of the folder": (index_to("../model.safetensors"), "which is not a plain name in this folder"),
    "index leads anywhere": (index_to("/etc/model.safetensors"), "which is not a plain name in this folder"),
    "index names a pickle": (index_to("pytorch_model.bin"), "only safetensors files are read, never pickle files"),
    "index without map": (change_json(INDEX, lambda content: content.pop("weight_map")), "has no weight_map"),
    "pickles only": (pickles, "Pickle files can run code and are never read"),
    "no weights": (lambda folder: [path.unlink() for path in folder.glob("model*")], "holds no safetensors file"),
    "config.json is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON in UTF-8"),
    "config.json in Latin-1": (
        lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xe9"}'),
        "is not JSON in UTF-8",
    ),
    "unknown quant_method": (
        change_json("config.json", lambda content: content.update({QUANTIZATION: {"quant_method": "gptq"}})),
        "quant_method 'gptq' is not an FP4 layout known here",
    ),
    "scale missing": (change_tensor(SCALE, lambda scale: None), rf"holds no {SCALE}"),
    "scale of another dtype": (change_tensor(SCALE, lambda scale: scale.float()), rf"{SCALE}: F32 .*expected F8_E4M3"),
    "scale of another shape": (
        change_tensor(SCALE, lambda scale: scale.view(torch.uint8)[:-1].clone().view(scale.dtype)),
        rf"{SCALE}: F8_E4M3 \[63, 8\].*expected F8_E4M3.* \[64, 8\]",
    ),
    "scale of NaN": (
        change_tensor(SCALE, scale_byte(0x7F)),
        r"layers.1.mlp.down_proj.*1 block scales are negative",
    ),
    "scale below zero": (change_tensor(SCALE, scale_byte(0xB8)), r"layers.1.mlp.down_proj.*1 block scales are neg"),
    "tensor scale of zero": (
        change_tensor(SCALE.replace("_scale", "_global_scale"), torch.zeros_like),
        r"layers.1.mlp.down_proj.*tensor scale is \[0.0\], not a positive",
    ),
}


@pytest.fixture
def damaged(request, sharded, tmp_path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(sharded, folder)
    FAULTS[request.param][0](folder)
    return folder


def each_fault(test):
    return pytest.mark.parametrize(
        "damaged, message", [(name, FAULTS[name][1]) for name in FAULTS], ids=FAULTS, indirect=["damaged"]
    )(test)


@each_fault
def test_export(damaged, message, tmp_path):
    before = file_bytes(damaged)
    for target in TARGETS:
        with pytest.raises(ValueError, match=message):
            export_checkpoint(damaged, tmp_path / "out", target)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"] and file_bytes(damaged) == before


@each_fault
def test_inspect(damaged, message):
    with pytest.raises(ValueError, match=message):
        checkpoint = read_checkpoint(damaged)
        with TensorReader(damaged, checkpoint.tensors) as read:
            inspect_checkpoint(checkpoint, read)


@each_fault
def test_verify(damaged, message):
    before = file_bytes(damaged)
    found = verify_checkpoint(damaged)
    assert not found.ok
    assert any(re.search(message, finding) for finding in found.findings), found.findings
    assert file_bytes(damaged) == before
    json.dumps(found.to_dict())


# --- odd, and allowed ------------------------------------------------------------------------------------------------

ODD = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "counts": torch.arange(5),
    "model.\u00e9mb.weight": torch.ones(2, dtype=torch.float64),
}


def test_odd_tensors(tmp_path):
    """0-d and empty tensors, other dtypes and names that are not ASCII go through unchanged."""
    folder = tmp_path / "odd"
    shutil.copytree(case("llama").folder, folder)
    tensors = load_file(folder / "model.safetensors")
    one_file(folder, tensors | ODD)
    for target in TARGETS:
        export_checkpoint(folder, tmp_path / target, target)
        found = load_file(tmp_path / target / "model.safetensors")
        for name, tensor in ODD.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert verify_checkpoint(tmp_path / target).ok
    inspection = inspect_checkpoint(read_checkpoint(folder))
    assert inspection.plain["BOOL"] == {"tensors": 1, "bytes": 2} and inspection.plain["I64"]["bytes"] == 40


def test_tied_weights(tmp_path):
    """A head tied to the embedding is stored nowhere, and stays so."""
    folder = case("qwen3", "mxfp4").folder
    assert "lm_head.weight" not in read_checkpoint(folder).tensors
    for target in ("compressed-tensors", "bf16"):
        export_checkpoint(folder, tmp_path / target, target)
        assert "lm_head.weight" not in read_checkpoint(tmp_path / target).tensors
        config = json.loads((tmp_path / target / "config.json").read_text())
        assert config["tie_word_embeddings"] is True
        assert target == "bf16" or "lm_head" in config[QUANTIZATION]["ignore"]


def test_empty_model(tmp_path):
    """A file without tensors is no checkpoint to export, and verify says so."""
    folder = tmp_path / "empty"
    shutil.copytree(case("llama").folder, folder)
    one_file(folder, {})
    for target in TARGETS:
        with pytest.raises(ValueError, match="no packed weight|no file holds a tensor"):
            export_checkpoint(folder, tmp_path / "out", target)
    assert "the checkpoint holds no tensors." in verify_checkpoint(folder).findings
    (folder / "config.json").write_text("{}")
    inspection = inspect_checkpoint(read_checkpoint(folder))
    assert (inspection.tensors, inspection.nbytes, inspection.bits_per_weight) == (0, 0, None)


# --- where an export may not go --------------------------------------------------------------------------------------


def outputs(folder: Path, place: Path) -> dict[str, tuple[Path, str]]:
    (place / "real").mkdir()
    (place / "link").symlink_to(place / "real")
    (place / "foreign").mkdir()
    (place / "foreign/notes.txt").write_text("mine")
    (place / "file").write_text("mine")
    return {
        "the source": (folder, "is the source itself"),
        "inside the source": (folder / "out", "lies inside the source"),
        "around the source": (folder.parent, "lies inside the output"),
        "a link": (place / "link", "is a symbolic link"),
        "others' files": (place / "foreign", r"holds 1 other files \(such as notes.txt\)"),
        "a file": (place / "file", "is a file, and a folder is needed"),
    }


@pytest.mark.parametrize(
    "where", ["the source", "inside the source", "around the source", "a link", "others' files", "a file"]
)
def test_outputs_refused(where, sharded, tmp_path):
    folder = tmp_path / "in" / "source"
    shutil.copytree(sharded, folder)
    (tmp_path / "place").mkdir()
    output, message = outputs(folder, tmp_path / "place")[where]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        export_checkpoint(folder, output, "bf16")
    assert sorted(tmp_path.rglob("*")) == before and file_bytes(folder) == file_bytes(sharded)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of a file's size")
def test_disk_full(sharded, tmp_path):
    """A clean error, and nothing left: neither the output nor the folder it was written to."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export_checkpoint(sharded, tmp_path / "out", "bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_interrupted(sharded, tmp_path):
    """Ctrl-C leaves nothing either."""

    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(sharded, tmp_path / "out", "bf16", progress=stop)
    assert not any(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from hf_mxfp4.export import export_checkpoint
export_checkpoint(sys.argv[1], sys.argv[2], "bf16", progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither SIGKILL nor locks of folders")
def test_killed(sharded, tmp_path):
    """The next export removes what a killed one left, unless it is still being written."""
    (tmp_path / ".out.is.mine.partial").mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(sharded), str(tmp_path / "out")], timeout=300)
    (left,) = (path for path in tmp_path.glob(".out.*.partial") if any(path.iterdir()))
    assert not (tmp_path / "out").exists()
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as the process that writes does
    summary = export_checkpoint(sharded, tmp_path / "out", "bf16")
    assert left.is_dir() and f"{left} is of another export to this output. If none is running" in summary.notes[-1]
    os.close(handle)
    shutil.rmtree(tmp_path / "out")
    assert export_checkpoint(sharded, tmp_path / "out", "bf16").notes == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.is.mine.partial", "out"]


def test_outputs_that_cannot_be_replaced(sharded, tmp_path, monkeypatch):
    """Refused before any work: an empty volume, and a folder beside which none can be made."""
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda self: self == tmp_path / "out")
        with pytest.raises(ValueError, match="is the root of a file system, which cannot be replaced"):
            export_checkpoint(sharded, tmp_path / "out", "bf16")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ValueError, match="no folder can be made in .*, where the export is written first: Permission"):
        export_checkpoint(sharded, tmp_path / "out", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not any((tmp_path / "out").iterdir())
