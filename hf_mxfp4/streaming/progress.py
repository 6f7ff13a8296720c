# SPDX-License-Identifier: Apache-2.0
"""How far a run is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a run is. Bytes are those read from the source, with files that earlier runs finished counted as done.

    Attributes:
        name: the tensor or file that was just made.
    """

    done_bytes: int
    total_bytes: int
    shards_done: int
    shards_total: int
    name: str


class Report:
    """Counts what this process, and others through the journal, have done.

    Args:
        sizes: bytes read for each file of the plan.
        finished: gives the names of files that are finished, whoever made them.
        call: told after each step.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        finished: Callable[[], Iterable[str]],
        call: Callable[[Progress], None] | None,
    ):
        self.sizes, self.finished, self.call = sizes, finished, call
        self.done = set(finished())
        self.current: dict[int, int] = {}  # bytes of the file that each worker is at

    def advance(self, nbytes: int, name: str, worker: int = 0) -> None:
        """A worker has read and written a part of a file."""
        self.current[worker] = self.current.get(worker, 0) + nbytes
        self._tell(name)

    def shard(self, name: str, worker: int = 0) -> None:
        """A worker has finished a file."""
        self.current[worker] = 0
        self.done.add(name)
        self._tell(name)

    def look(self) -> None:
        """See what others have done."""
        new = set(self.finished()) - self.done
        self.done |= new
        for name in sorted(new):
            self._tell(name)

    def _tell(self, name: str) -> None:
        if self.call is not None:
            total = sum(self.sizes.values())
            size = sum(self.sizes[shard] for shard in self.done) + sum(self.current.values())
            self.call(Progress(min(size, total), total, len(self.done), len(self.sizes), name))
