# SPDX-License-Identifier: Apache-2.0
"""checkpoint_writer: the bytes of safetensors' own writer, the files of huggingface_hub's own splitting."""

import json
import os
import resource
import subprocess
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_mxfp4 import checkpoint_writer, output_files
from hf_mxfp4.checkpoint_files import INDEX, read_header
from hf_mxfp4.checkpoint_writer import (
    DTYPES,
    Shard,
    ShardWriter,
    TensorSpec,
    plan_shards,
    size_in_bytes,
    total_size,
    write_index,
)
from hf_mxfp4.output_files import check_output, write_checksums

SHAPES = {"a": (3, 5), "é": (), "empty": (0, 4), 'quote"\n\x01\x7f\\': (2,), "z.last": (1, 2, 3)}


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    made = {}
    for dtype in reversed(DTYPES):
        for name, shape in SHAPES.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            top = 2 if dtype == torch.bool else 256
            bits = torch.randint(top, (size,), dtype=torch.uint8)
            made[f"{name}-{dtype}"] = bits.view(dtype).reshape(shape)
    return made


def shard_of(tensors, name="mine.safetensors") -> Shard:
    return Shard(name, {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()})


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_same_bytes_as_safetensors(metadata, tmp_path):
    """Every dtype, 0-d and empty tensors, names that JSON escapes; put in another order, cut in pieces."""
    tensors = tensors_of_all_dtypes()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata)
    with ShardWriter(tmp_path, shard_of(tensors), metadata) as writer:
        for name, tensor in tensors.items():
            if tensor.ndim and len(tensor) > 1:
                writer.put(name, tensor[1:], 1)
                writer.put(name, tensor[:1])
            else:
                writer.put(name, tensor)
    assert (tmp_path / "mine.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert len(os.listdir(tmp_path)) == 2


def test_no_tensors(tmp_path):
    save_file({}, tmp_path / "theirs.safetensors", {"format": "pt"})
    with ShardWriter(tmp_path, Shard("mine.safetensors", {})):
        pass
    assert (tmp_path / "mine.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert plan_shards({}) == []


def test_views_are_written_as_they_look(tmp_path):
    dense = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"transposed": dense.T, "strided": dense[:, ::2], "grad": torch.nn.Parameter(dense)}
    with ShardWriter(tmp_path, shard_of(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, tmp_path / "t", {"format": "pt"})
    assert (tmp_path / "mine.safetensors").read_bytes() == (tmp_path / "t").read_bytes()


@pytest.mark.parametrize(
    "name, tensor, start, message",
    [
        ("other", torch.zeros(4, 2), 0, "no tensor other"),
        ("a", torch.zeros(4, 2, dtype=torch.float64), 0, "does not fit"),
        ("a", torch.zeros(4, 3), 0, "does not fit"),
        ("a", torch.zeros(2, 2), 3, "does not fit"),
        ("a", torch.zeros(2, 2), -1, "does not fit"),
        ("a", torch.zeros(2), 0, "does not fit"),
        ("scalar", torch.zeros(1), 0, "does not fit"),
        ("a", torch.zeros(3, 2), 1, "were written"),
    ],
)
def test_wrong_pieces_are_refused_and_nothing_is_left(name, tensor, start, message, tmp_path):
    shard = Shard("a.safetensors", {"a": TensorSpec(torch.float32, (4, 2)), "scalar": TensorSpec(torch.float32, ())})
    with pytest.raises(ValueError, match=message), ShardWriter(tmp_path, shard) as writer:
        if "written" in message:
            writer.put("a", torch.zeros(2, 2))
        writer.put(name, tensor, start)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rows", [0, 3])
def test_incomplete_files_are_never_there(rows, tmp_path):
    shard = Shard("a.safetensors", {"a": TensorSpec(torch.float32, (4, 2))})
    message = r"1 tensors are not complete \(such as a\)"
    with pytest.raises(ValueError, match=message), ShardWriter(tmp_path, shard) as writer:
        writer.put("a", torch.zeros(rows, 2))
    assert os.listdir(tmp_path) == []


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path):
    shard = Shard("a.safetensors", {"a": TensorSpec(torch.float32, (4,))})
    (tmp_path / "a.safetensors").write_text("old")
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, shard) as writer:
        writer.put("a", torch.zeros(4))
        raise KeyboardInterrupt
    assert (tmp_path / "a.safetensors").read_text() == "old" and len(os.listdir(tmp_path)) == 1


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"cannot hold q \(torch.complex128\); allowed: torch.uint64"):
        checkpoint_writer.header({"q": TensorSpec(torch.complex128, (1,))}, None)


def test_no_space(tmp_path):
    """A limit on the size of files stands for a full disk; the system tells both in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    shard = Shard("a.safetensors", {"a": TensorSpec(torch.float32, (4000,))})
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), ShardWriter(tmp_path, shard) as writer:
            writer.put("a", torch.zeros(4000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


# --- which tensor goes into which file -------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=12), st.integers(1, 40))
def test_files_as_huggingface_hub_splits(made, limit):
    """Sizes and shared storages at random: the same files, in the same order, with the same tensors."""
    storages, state, specs = {}, {}, {}
    for i, (size, group) in enumerate(made):
        if group and size:  # a view of a storage of its group, which others may share
            base = storages.setdefault(group, torch.zeros(13, dtype=torch.uint8))
            state[f"t{i}"] = base[:size]
            specs[f"t{i}"] = TensorSpec(torch.uint8, (size,), group, 13)
        else:
            state[f"t{i}"] = torch.zeros(size + 1, dtype=torch.uint8)
            specs[f"t{i}"] = TensorSpec(torch.uint8, (size + 1,))
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    ours = plan_shards(specs, limit)
    found = {shard.name: set(shard.tensors) for shard in ours}
    assert found == {file: set(names) for file, names in theirs.filename_to_tensors.items()}
    assert [shard.name for shard in ours] == list(theirs.filename_to_tensors)
    assert total_size(specs) == theirs.metadata["total_size"]


@pytest.mark.parametrize("size, expected", [(7, 7), ("7KB", 7000), (" 1.5 gb", 1_500_000_000), ("2TB", 2 * 10**12)])
def test_sizes(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, "5", "5GiB", "GB", "1.2.3GB", None, True, 2.5, ""])
def test_wrong_sizes(size):
    with pytest.raises(
        ValueError, match='max_shard_size=.*allowed: a positive number of bytes, or a text such as "5GB"'
    ):
        size_in_bytes(size)


def test_index(tmp_path):
    """As transformers writes it: sorted, indented, with a new line at the end; none for one file."""
    shards = [Shard("model-1.safetensors", {"b": TensorSpec(torch.uint8, (3,)), "a": TensorSpec(torch.uint8, (1,))})]
    write_index(tmp_path, shards, 4, 4)
    assert os.listdir(tmp_path) == []
    write_index(tmp_path, [*shards, Shard("model-2.safetensors", {"c": TensorSpec(torch.uint8, (2,))})], 6, 7)
    text = (tmp_path / INDEX).read_text()
    expected = {
        "metadata": {"total_parameters": 6, "total_size": 7},
        "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"},
    }
    assert text == json.dumps(expected, indent=2, sort_keys=True) + "\n"


# --- checksums -------------------------------------------------------------------------------------------------------


def test_checksums_are_what_sha256sum_checks(tmp_path):
    folder = tmp_path / "model"
    (folder / "templates").mkdir(parents=True)
    for name in ("b.json", "a b.txt", "templates/x.jinja", ".hidden"):
        (folder / name).write_text(name)
    odd = os.fsdecode(b"caf\xe9.txt")  # not UTF-8
    (folder / odd).write_text("latin")
    write_checksums(folder, {"b.json": output_files.sha256(folder / "b.json")})
    write_checksums(folder)  # its own file is not in it
    assert len((folder / "checksums.sha256").read_bytes().splitlines()) == 4
    check = ["sha256sum", "--check", "--strict", "checksums.sha256"]
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 0
    (folder / "a b.txt").write_text("changed")
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1


# --- where to write --------------------------------------------------------------------------------------------------


def test_folders_that_are_refused(tmp_path):
    source, file, full, link = (tmp_path / name for name in ("source", "file", "full", "link"))
    source.mkdir()
    file.touch()
    full.mkdir()
    (full / os.fsdecode(b"caf\xe9")).touch()
    link.symlink_to(full)
    for output, message in [
        (source, "the source itself"),
        (tmp_path / "full" / ".." / "source", "the source itself"),
        (source / "deep" / "er", "lies inside the source"),
        (tmp_path, "lies inside the output"),
        (file, "is a file"),
        (full, r"holds 1 other files \(such as caf\\xe9\). Choose an empty or new folder"),
        (link, "is a symbolic link to"),
        (file / "below", "cannot be written to"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_output(source, output)
    inside = tmp_path / "inside"
    inside.symlink_to(source)
    with pytest.raises(ValueError, match="lies inside the source"):
        check_output(source, inside / "x")
    assert check_output(source, full, force=True) == full
    assert check_output(source, full, own=[os.fsdecode(b"caf\xe9")]) == full
    assert check_output(None, tmp_path / "new" / "deep") == tmp_path / "new" / "deep"
    assert not (tmp_path / "new").exists() and sorted(os.listdir(tmp_path)) == [
        "file",
        "full",
        "inside",
        "link",
        "source",
    ]


def test_space_is_checked_before(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output_files.shutil, "disk_usage", lambda path: usage(10**12, 0, 3 * 10**9))
    with pytest.raises(OSError, match="4.00 GB will be written, and 3.00 GB are free"):
        check_output(None, tmp_path / "new", 4 * 10**9)
    check_output(None, tmp_path / "new", 3 * 10**9)
    assert os.listdir(tmp_path) == []


def test_read_only_folder():
    place = tempfile.TemporaryDirectory()  # pytest's own are hidden from other users
    folder = Path(place.name)
    folder.chmod(0o555)
    if os.geteuid() == 0:  # root may write anywhere; somebody else may not
        os.seteuid(65534)
    try:
        with pytest.raises(ValueError, match="cannot be written to: Permission denied. Choose another output"):
            check_output(None, folder / "new")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        place.cleanup()


def test_headers_read_back(tmp_path):
    """What this package reads of a written file is what was to be written."""
    shard = Shard("a.safetensors", {"x": TensorSpec(torch.uint8, (2, 3)), "y": TensorSpec(torch.float32, ())})
    with ShardWriter(tmp_path, shard) as writer:
        writer.put("y", torch.ones(()))
        writer.put("x", torch.arange(6, dtype=torch.uint8).view(2, 3))
    found = read_header(tmp_path / "a.safetensors")
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in found.items()} == {
        "x": ("U8", (2, 3), 6),
        "y": ("F32", (), 4),
    }
