# SPDX-License-Identifier: Apache-2.0
"""Who works on which file of an output, and which are finished: what lets a run go on where another stopped.

Everything stands in files of a hidden folder in the output, so any number of processes on any number of machines that
share a file system can work on one output:

    manifest.json       what is made of what, by which any other config or source is refused
    SHARD.done          size and checksum of a finished file
    SHARD.lock          who works on it; made with O_EXCL, touched while he does

A lock is abandoned when its owner's process is gone (seen on his machine only), or when it was not touched for
`ABANDONED` seconds. Its age is taken from the times that the file system itself stamps on it and on a file touched at
the same moment: clocks of different machines are never compared. A process that hangs without ending keeps its lock on
its own machine; the others wait until it is killed.

What is asked of the file system: O_EXCL and rename work between machines (NFS 3 and on), and a file that was written,
synced and renamed is seen whole. Where they do not, or two processes work on one file for another reason, both write
the same bytes, each under a temporary name of its own: time is lost, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from hf_mxfp4.checkpoint_files import read_json
from hf_mxfp4.output_files import PARTIAL, sync_folder, write_file

JOURNAL = ".hf_mxfp4"
FINISHED = ".hf_mxfp4.finished"  # the journal's name while it is being removed
ABANDONED = 600.0  # seconds
UNWRITTEN = 10.0  # seconds after which a lock that says nothing is abandoned: its owner was killed as it made it
TOUCH = 20.0  # seconds between two touches of a lock


class Done(NamedTuple):
    """A finished file."""

    size: int
    sha256: str


class Journal:
    """The journal of an output folder; any method raises `FileNotFoundError` once another process has finished all."""

    def __init__(self, output: Path):
        self.output, self.folder = output, output / JOURNAL

    @property
    def exists(self) -> bool:
        return (self.folder / "manifest.json").is_file()

    def open(self, manifest: dict[str, Any]) -> None:
        """Begin what the manifest describes. Of several processes one does.

        Raises:
            ValueError: as `check`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self.exists:
            lock = self.claim("manifest")
            if lock is None:
                time.sleep(0.1)
                continue
            with lock:
                if not self.exists:
                    content = json.dumps(manifest, indent=1, sort_keys=True).encode()
                    write_file(self.folder / "manifest.json", content)
        self.check(manifest)

    def check(self, manifest: dict[str, Any], folder: Path | None = None) -> None:
        """Whether this is the job that was begun.

        Raises:
            ValueError: if the folder was begun with another config or source, naming what differs.
        """
        path = (folder or self.folder) / "manifest.json"
        try:
            found = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is damaged. Remove {self.output} and start again.") from error
        differing = sorted(key for key in {*found, *manifest} if found.get(key) != manifest.get(key))
        if differing:
            key = differing[0]
            raise ValueError(
                f"{self.output} was begun with another {key}: {_difference(found.get(key), manifest.get(key))}. "
                "Run the command it was begun with, or choose another output (or remove this one)."
            )

    def done(self, shard: str) -> Done | None:
        """The record of a finished file; `None` if it is not, or if the file is not there in this size."""
        try:
            record = Done(**read_json(self.folder / f"{shard}.done"))
            size = (self.output / shard).stat().st_size
        except (FileNotFoundError, ValueError, TypeError):  # a record that is damaged is none
            return None
        return record if size == record.size else None

    def record(self, shard: str, done: Done) -> None:
        write_file(self.folder / f"{shard}.done", json.dumps(done._asdict()).encode())

    def claim(self, shard: str) -> Lock | None:
        """A lock on a file, or `None` while somebody else works on it."""
        return Lock.take(self.folder, shard)

    def clear_partial(self, shard: str) -> None:
        """Remove what a process that is gone left of a file. Hold its lock."""
        for path in self.output.glob(f".{shard}.*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the journal: from here on the output is as if it had been written at once."""
        os.rename(self.folder, self.output / FINISHED)
        self._clear()

    def is_complete(self, manifest: dict[str, Any]) -> bool:
        """Whether a run made all, and only the removal of its journal was interrupted, which is then done.

        Raises:
            ValueError: as `check`.
        """
        try:
            self.check(manifest, self.output / FINISHED)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                (self.output / FINISHED).rmdir()
            return False
        self._clear()
        return True

    def _clear(self) -> None:
        gone = self.output / FINISHED
        for path in sorted(gone.glob("*"), key=lambda path: path.name == "manifest.json"):  # the manifest last
            path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            gone.rmdir()
        sync_folder(self.output)


def _difference(found: Any, wanted: Any, at: str = "") -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        key = min(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        return _difference(found.get(key), wanted.get(key), f"{at}{'.' if at else ''}{key}")
    return f"{at or 'it'} is {wanted!r} here, and was {found!r}" if len(f"{found}{wanted}") < 300 else f"{at} differs"


# --- locks -----------------------------------------------------------------------------------------------------------


_HELD: set[str] = set()  # tokens of this process


class Lock:
    """A file that says who works on something. A context manager, which touches it and gives it back."""

    def __init__(self, path: Path, content: bytes, token: str):
        self.path, self._content, self._token = path, content, token
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._touch, daemon=True)

    @classmethod
    def take(cls, folder: Path, name: str) -> Lock | None:
        """The lock, or `None` if somebody holds it. An abandoned one is taken over."""
        path, token = folder / f"{name}.lock", secrets.token_hex(8)
        content = json.dumps(_whoami() | {"token": token}).encode()
        if not _create(path, content):
            seen = _read(path)
            if seen is None or not _is_abandoned(path, seen):
                return None
            _take_away(path, seen)
            if not _create(path, content):
                return None
        _HELD.add(token)
        return cls(path, content, token)

    @property
    def held(self) -> bool:
        """Whether nobody took it for abandoned."""
        return _read(self.path) == self._content

    def __enter__(self) -> Lock:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        _HELD.discard(self._token)  # first: Ctrl-C may come at any moment
        self._stop.set()
        self._thread.join()
        if self.held:
            self.path.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._stop.wait(TOUCH):
            with contextlib.suppress(OSError):
                if self.held:
                    os.utime(self.path)


def _create(path: Path, content: bytes) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, content)
        os.fsync(handle)
    except BaseException:  # a lock that says nothing would have to grow old first
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return True


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _take_away(path: Path, seen: bytes) -> None:
    """Remove an abandoned lock, unless somebody else did so and holds a new one."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.old")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) != seen:
        with contextlib.suppress(OSError):  # a file system without links: two work on one file
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _is_abandoned(path: Path, content: bytes) -> bool:
    limit = ABANDONED
    try:
        owner = json.loads(content)
        me = _whoami()
        if owner["host"] == me["host"]:
            lost = owner["pid"] == me["pid"] and owner["token"] not in _HELD  # it could not be given back
            return lost or _started(owner["pid"]) != owner["started"]
    except (ValueError, KeyError, TypeError):
        limit = UNWRITTEN
    probe = path.with_name(f"{secrets.token_hex(4)}.now")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime > limit
    except FileNotFoundError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _whoami() -> dict[str, Any]:
    """This process: its machine (that of a container counts as another one), id and time of start."""
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        host += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    with contextlib.suppress(OSError):
        host += f" {os.readlink('/proc/self/ns/pid')}"
    return {"host": host, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str | None:
    """When a process of this machine was started, in a form of the system's; `None` if it is gone.

    Ids are given out again; the time tells two owners of one apart.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
