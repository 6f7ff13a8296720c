# SPDX-License-Identifier: Apache-2.0
"""Folders that checkpoints are written to: whether one may be, files that are there whole or not at all, checksums,
and which files of a source go along with new weights."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CHECKSUMS = "checksums.sha256"
PARTIAL = ".partial"  # how names of unfinished files end
_PIECE = 1 << 24  # bytes read at once for a checksum

# Of a source's files, those that belong to its weights or tell of them.
_NOT_COPIED = (
    *("config.json", "hf_quant_config.json", "recipe.yaml", CHECKSUMS),
    *("README.md", "evaluation.json", "error.json"),
)
_NOT_COPIED_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".npz", ".pkl"),
    *(".index.json", ".png"),
)
_FOLDERS = ("additional_chat_templates",)  # of a processor or tokenizer


# --- files whole or not at all ---------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, for good once this ends, or is removed on an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, `replacing` what is there."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder last. Windows has no such call."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def other_files(source: Path, made: Iterable[str] = ()) -> list[Path]:
    """Tokenizer, generation config, chat template, licence, code of the model: what is no weight and no report.

    Args:
        source: folder of a checkpoint.
        made: further names to leave out, as they are made anew.
    """
    left_out = {*_NOT_COPIED, *made}
    found = [path for path in source.iterdir() if path.name not in left_out]
    found += [path for name in _FOLDERS if (source / name).is_dir() for path in (source / name).iterdir()]
    visible = [path for path in found if path.is_file() and not path.name.startswith(".")]
    return sorted(path for path in visible if not path.name.lower().endswith(_NOT_COPIED_ENDINGS))


def copy_others(source: Path, output: Path, made: Iterable[str] = ()) -> None:
    """Copy `other_files` to a folder."""
    for path in other_files(source, made):
        target = output / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        with replacing(target) as temporary:
            shutil.copyfile(path, temporary)


# --- checksums -------------------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def write_checksums(folder: str | Path, known: Mapping[str, str] | None = None) -> Path:
    """Write `checksums.sha256`, which `sha256sum --check` reads: each file of a folder, hidden ones left out.

    Args:
        folder: of a finished checkpoint.
        known: checksums by path in the folder that need not be computed again, also of files that are still to come.
    """
    folder = Path(folder)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = sorted(there.union(known or ()))
    visible = [name for name in names if name != CHECKSUMS and not any(p.startswith(".") for p in name.split("/"))]
    lines = [f"{(known or {}).get(name) or sha256(folder / name)}  {name}\n" for name in visible]
    write_file(folder / CHECKSUMS, "".join(lines).encode("utf-8", "surrogateescape"))
    return folder / CHECKSUMS


# --- where to write --------------------------------------------------------------------------------------------------


def check_output(
    source: str | Path | None,
    output: str | Path,
    needed_bytes: int = 0,
    *,
    force: bool = False,
    own: Iterable[str] = (),
) -> Path:
    """Refuse a folder that must not or cannot be written to, before any work is done. Makes no folder.

    Args:
        source: the folder that is read, if there is one.
        output: the folder to be written.
        needed_bytes: how much will be written.
        force: let existing files stand; those that are written replace them.
        own: names that may stand in it without `force` (of an interrupted run).

    Returns:
        `Path`: output, absolute.

    Raises:
        ValueError: naming the folder, the reason and the way out.
        OSError: if there is not enough space.
    """
    output = Path(output)
    if output.is_symlink():
        raise ValueError(f"{output} is a symbolic link to {output.resolve()}. Name the folder itself.")
    real = output.resolve()
    if source is not None:
        origin = Path(source).resolve()
        if real == origin:
            raise ValueError(f"{output} is the source itself, which is never written to. Choose another output.")
        if origin in real.parents:
            raise ValueError(f"{output} lies inside the source {source}. Choose an output outside of it.")
        if real in origin.parents:
            raise ValueError(f"the source {source} lies inside the output {output}. Choose another output.")
    if real.exists() and not real.is_dir():
        raise ValueError(f"{output} is a file, and a folder is needed. Choose another output.")
    foreign = sorted(os.fsencode(path.name) for path in real.iterdir()) if real.exists() else []
    foreign = [name for name in foreign if os.fsdecode(name) not in set(own)]
    if foreign and not force:
        name = foreign[0].decode("utf-8", "backslashreplace")
        done = "; it is a finished checkpoint already" if {CHECKSUMS.encode(), b"config.json"} <= {*foreign} else ""
        what = f"{output} holds {len(foreign)} other files (such as {name}){done}"
        raise ValueError(f"{what}. Choose an empty or new folder.")
    place = real
    while not place.exists():
        place = place.parent
    probe = place / f".{secrets.token_hex(4)}{PARTIAL}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{output} cannot be written to: {error.strerror}. Choose another output.") from error
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OSError(
            f"{output}: {needed_bytes / 1e9:.2f} GB will be written, and {free / 1e9:.2f} GB are free on that file "
            "system. Make room, or choose another output."
        )
    return real
