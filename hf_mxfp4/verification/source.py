# SPDX-License-Identifier: Apache-2.0
"""The weights of the full-precision checkpoint, as the packed one arranges them.

Most stand there under the same name. Experts may be one stack in one of the two, and one by one in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import TensorReader
from hf_mxfp4.checkpoints import FULL_PRECISION
from hf_mxfp4.layouts import PackedMatrix
from hf_mxfp4.layouts.own import PROJECTIONS


class Original(NamedTuple):
    """A packed matrix in the source.

    Attributes:
        keys: the source's tensors that it stands for, or is a part of.
        rows: some rows `[n, K]` of it, of one expert (`None` for a matrix `[N, K]`).
    """

    keys: tuple[str, ...]
    rows: Callable[[int | None, slice], torch.Tensor]


def dense_shape(matrix: PackedMatrix) -> tuple[int, ...]:
    """Shape of the dense weight that a packed matrix stands for."""
    *lead, n, k = matrix.shape
    return (*lead, k, n) if matrix.transposed else (*lead, n, k)


def originals(name: str, matrix: PackedMatrix, read: TensorReader) -> list[Original]:
    """A packed matrix in the source: none if it is not there, or has another shape or dtype.

    Two for an expert in a stack of square matrices, whose shape does not tell whether they are transposed.
    """
    if name in read.tensors:
        if not _is(read, name, dense_shape(matrix)):
            return []
        if len(matrix.shape) == 2:
            return [Original((name,), lambda _, rows: read.rows(name, rows.start, rows.stop))]
        return [Original((name,), _Stack(name, read, matrix.transposed))]
    return _one_of_stack(name, matrix, read) if len(matrix.shape) == 2 else _stack_of_many(name, matrix, read)


def _is(read: TensorReader, name: str, shape: tuple[int, ...]) -> bool:
    stored = read.tensors.get(name)
    return stored is not None and stored.shape == shape and stored.dtype in FULL_PRECISION


class _Stack:
    """Rows of a stack's experts, one expert in memory."""

    def __init__(self, name: str, read: TensorReader, transposed: bool):
        self.name, self.read, self.transposed = name, read, transposed
        self.expert, self.weight = None, None

    def __call__(self, expert: int | None, rows: slice) -> torch.Tensor:
        if expert != self.expert:
            weight = self.read.rows(self.name, expert, expert + 1)[0]
            self.expert, self.weight = expert, weight.t() if self.transposed else weight
        return self.weight[rows]


def _one_of_stack(name: str, matrix: PackedMatrix, read: TensorReader) -> list[Original]:
    """`X.experts.3.up_proj.weight` in `X.experts.gate_up_proj`."""
    path, _, leaf = name.removesuffix(".weight").rpartition(".")
    path, _, expert = path.rpartition(".")
    n, k = matrix.shape
    found = []
    for stack, spellings in PROJECTIONS.items():
        key, leaves = f"{path}.{stack}", next((names for names in spellings if leaf in names), None)
        if leaves is None or key not in read.tensors or not expert.isdecimal():
            continue
        experts, rows = (*read.tensors[key].shape, 0)[0], n * len(leaves)
        if int(expert) >= experts:
            continue
        for shape, transposed in (((experts, rows, k), False), ((experts, k, rows), True)):
            if _is(read, key, shape):
                part = partial(_part, _Stack(key, read, transposed), int(expert), n * leaves.index(leaf))
                found.append(Original((key,), part))
    return found


def _part(stack: _Stack, expert: int, first: int, _: None, rows: slice) -> torch.Tensor:
    return stack(expert, slice(first + rows.start, first + rows.stop))


def _stack_of_many(name: str, matrix: PackedMatrix, read: TensorReader) -> list[Original]:
    """`X.experts.gate_up_proj`, of `X.experts.0.gate_proj.weight` and the like."""
    path, _, leaf = name.rpartition(".")
    experts, n, k = matrix.shape
    for leaves in PROJECTIONS.get(leaf, ()):
        names = [[f"{path}.{expert}.{part}.weight" for part in leaves] for expert in range(experts)]
        if n % len(leaves) == 0 and all(_is(read, key, (n // len(leaves), k)) for keys in names for key in keys):
            return [Original(tuple(key for keys in names for key in keys), partial(_rows_of_many, names, read))]
    return []


def _rows_of_many(names: list[list[str]], read: TensorReader, expert: int, rows: slice) -> torch.Tensor:
    size = read.tensors[names[expert][0]].shape[0]
    pieces = []
    for index, key in enumerate(names[expert]):
        start, stop = max(rows.start - index * size, 0), min(rows.stop - index * size, size)
        if start < stop:
            pieces.append(read.rows(key, start, stop))
    return torch.cat(pieces)
