# SPDX-License-Identifier: Apache-2.0
"""Where an export is written: a temporary folder beside its place, which becomes it when all is there."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_mxfp4.output_files import PARTIAL, sync_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

HF_QUANT_CONFIG = "hf_quant_config.json"


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that becomes it, or is removed after an error.

    Raises:
        ValueError: if it could not become it: `folder` is the root of a file system, or no folder may be made beside.
    """
    if folder.is_mount():
        raise ValueError(
            f"{folder} is the root of a file system, which cannot be replaced. Choose a new folder inside of it."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=PARTIAL, dir=folder.parent))
    except PermissionError as error:
        raise ValueError(
            f"no folder can be made in {folder.parent}, where the export is written first: {error.strerror}. "
            "Choose another output."
        ) from error
    lock = _locked(place)
    try:
        yield place
        mask = os.umask(0)
        os.umask(mask)
        place.chmod(0o777 & ~mask)  # mkdtemp's folders are private
        sync_folder(place)
        if folder.exists():
            folder.rmdir()  # empty, or this raises: something was put there meanwhile
        place.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed exports to `folder` left beside it.

    Returns:
        Those of another process that is writing, or may be: not every file system can tell.
    """
    name = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]+{re.escape(PARTIAL)}")
    if not folder.parent.is_dir():
        return []
    left = []
    for place in sorted(folder.parent.iterdir()):
        if not name.fullmatch(place.name) or place.is_symlink() or not place.is_dir():
            continue
        lock = _locked(place)
        if lock is None:
            left.append(place)
            continue
        if any(place.iterdir()):  # an empty one may have been made this instant
            shutil.rmtree(place, ignore_errors=True)
        os.close(lock)
    return left


def _locked(place: Path) -> int | None:
    """A handle that holds a folder's lock until it is closed or the process dies; `None` if another has it."""
    if fcntl is None:
        return None
    handle = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
