# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are pushed, which are left out and why, and what is never followed."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.npy", "*.npz")
_TEMPORARY = ("*.tmp", "*.tmp.*", "*.temp", "*.part", "*.incomplete", "*.lock", "*.journal", "*.swp", "*~")
_FOLDERS = {"__pycache__"}
_LARGE = 10_000_000  # bytes above which the Hub keeps any file as a large one
_LARGE_ENDINGS = (".safetensors", ".png", ".model")  # of its own .gitattributes; said beforehand only in a dry run


class File(NamedTuple):
    """A file to be pushed: its path in the repository, its size, and whether the Hub keeps it as a large one (LFS)."""

    path: str
    nbytes: int
    large: bool

    @classmethod
    def described(cls, path: str, nbytes: int) -> File:
        """As the Hub's usual .gitattributes would have it."""
        return cls(path, nbytes, nbytes > _LARGE or (nbytes > 0 and path.endswith(_LARGE_ENDINGS)))


def list_files(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files to push by their path in the repository, and what is left out with the reason.

    Raises:
        ValueError: for links that lead out of the folder, and names that are not UTF-8.
    """
    top = folder.resolve()
    files: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for where, folders, names in os.walk(folder):
        for name in sorted(folders):
            path = Path(where, name)
            inside = path.relative_to(folder).as_posix()
            why = _not_followed(path, name)
            if why is not None:
                left_out[_printable(inside)] = why
                folders.remove(name)
        folders.sort()
        for name in sorted(names):
            path = Path(where, name)
            inside = path.relative_to(folder).as_posix()
            why = _left_out(inside)
            if why is None and not path.exists():
                raise ValueError(f"{_printable(str(path))} is a link to nothing. Remove it.")
            if why is None and not path.is_file():
                why = "neither a file nor a folder"
            if why is not None:
                left_out[_printable(inside)] = why
                continue
            if _printable(inside) != inside:
                raise ValueError(f"{folder}: the name {_printable(inside)} is not UTF-8. Rename the file.")
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise ValueError(
                    f"{path} is a link to {path.resolve()}, outside the folder; what it leads to is not published. "
                    "Copy the folder with its links followed (cp -rL), or remove the link."
                )
            files[inside] = path
    return files, left_out


def _not_followed(path: Path, name: str) -> str | None:
    if path.is_symlink():
        return "a link to a folder"
    if name.startswith("."):
        return "hidden"
    return "temporary" if name in _FOLDERS else None


def _left_out(inside: str) -> str | None:
    name = PurePosixPath(inside).name
    if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in PICKLES):
        return "may hold a pickle, which can run code when it is read"
    if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _TEMPORARY):
        return "temporary"
    return "hidden" if name.startswith(".") else None


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
