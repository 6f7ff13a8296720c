# SPDX-License-Identifier: Apache-2.0
"""What an exported checkpoint holds, as units: tensors that are made together, from matrices that are read together.

A unit is one plain tensor, one packed matrix, matrices that serving engines fuse (q, k and v; gate and up), or a stack
of experts. Only one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoint_writer import DTYPES, TensorSpec
from hf_mxfp4.checkpoints import SIBLINGS, check_scales
from hf_mxfp4.export.tensor_scales import Scaled, common_divisor, multiplier, with_divisor
from hf_mxfp4.formats import NVFP4, BlockFormat
from hf_mxfp4.layouts import Contents, PackedMatrix, PackedTensors
from hf_mxfp4.layouts.base import Read
from hf_mxfp4.layouts.own import PROJECTIONS
from hf_mxfp4.packed import dense_copy

_STORED_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}
_STACKS = {stack: names[0] for stack, names in PROJECTIONS.items()}
_OTHERS_CANNOT = {
    "macro_scale": "macro-blocks",
    "outlier_values": "outliers in full precision",
    "hadamard": "a Hadamard transform of its input",
    "pre_quant_scale": "scales of its input's channels (AWQ)",
}


MANY = 50  # modules after which no further ones are looked for that a target cannot hold


class CannotExport(ValueError):
    """Something the target cannot hold; `modules` says where."""

    def __init__(self, reason: str, way_out: str, modules: Iterable[str]):
        self.reason, self.way_out, self.modules = reason, way_out, list(modules)
        more = f"{'at least ' if len(self.modules) >= MANY else ''}{len(self.modules) - 5} more"
        shown = ", ".join(self.modules[:5]) + (f" and {more}" if len(self.modules) > 5 else "")
        super().__init__(f"{shown}: {reason}. {way_out}")


@dataclass
class Changes:
    """What became of block scales on the way.

    Attributes:
        requantize: whether weights may be quantized anew where no common tensor scale leaves them as they are.
        shifted: matrices whose block scales and tensor scale were changed, with every weight the same.
        requantized: matrices of which weights were quantized anew: their number and the matrix's relative squared
            error.
    """

    requantize: bool = False
    shifted: set[str] = field(default_factory=set)
    requantized: dict[str, tuple[int, float]] = field(default_factory=dict)


class Unit(NamedTuple):
    """Tensors made together.

    Attributes:
        outputs: names and kinds of the tensors that are written.
        nbytes: bytes read for them.
        make: makes them from the tensors of the source.
    """

    outputs: dict[str, TensorSpec]
    nbytes: int
    make: Callable[[Read], dict[str, torch.Tensor]]


class Packing(NamedTuple):
    """How a target stores packed matrices.

    Attributes:
        fields: endings of the names of codes, block scale and tensor scale, behind the module's name.
        multiplies: whether its tensor scale multiplies, and is 0-d; else it divides and is `[1]`.
        formats: block formats it holds without activations in FP4.
        transposed_stacks: whether stacks of transposed experts stay one tensor, as `[E, K/2, N]`.
    """

    fields: tuple[str, str, str]
    multiplies: bool
    formats: tuple[BlockFormat, ...]
    transposed_stacks: bool


def plain_units(checkpoint: Checkpoint, contents: Contents, dtypes: dict[str, torch.dtype]) -> list[Unit]:
    """The tensors that are not packed; those named in `dtypes` are cast."""
    units = []
    for name, stored in contents.plain(checkpoint.tensors).items():
        if stored.dtype not in _STORED_DTYPES:
            raise ValueError(f"{name}: dtype {stored.dtype} in {stored.file} cannot be read by torch.")
        dtype = dtypes.get(name, _STORED_DTYPES[stored.dtype])
        units.append(Unit({name: TensorSpec(dtype, stored.shape)}, stored.nbytes, _copy(name, dtype)))
    return units


def _copy(name: str, dtype: torch.dtype) -> Callable[[Read], dict[str, torch.Tensor]]:
    def make(read: Read) -> dict[str, torch.Tensor]:
        tensor = read(name)
        return {name: cast(name, tensor, dtype)}

    return make


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype; `ValueError` if finite values become infinite."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and int(result.isinf().sum()) > int(tensor.isinf().sum()):
        raise ValueError(f"{name}: values do not fit {dtype}. Use bfloat16 or float32.")
    return result


def dense_units(checkpoint: Checkpoint, contents: Contents, dtype: torch.dtype) -> list[Unit]:
    """Every packed matrix as a dense one of its name."""
    units = []
    for name, matrix in contents.matrices.items():
        shape = (*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-2]) if matrix.transposed else matrix.shape
        nbytes = sum(checkpoint.tensors[key].nbytes for key in matrix.keys)
        units.append(Unit({name: TensorSpec(dtype, shape)}, nbytes, _dense(name, matrix, dtype)))
    return units


def _dense(name: str, matrix: PackedMatrix, dtype: torch.dtype) -> Callable[[Read], dict[str, torch.Tensor]]:
    def make(read: Read) -> dict[str, torch.Tensor]:
        weight = matrix.decode(read)
        check_scales(name, matrix.format, weight.scale, weight.global_scale)
        dense = dense_copy(matrix.format, dtype, **weight._asdict())
        if dtype == torch.float16 and not dense.isfinite().all():
            raise ValueError(f"{name}: weights do not fit {dtype}. Use bfloat16 or float32.")
        return {name: dense.transpose(-1, -2).contiguous() if matrix.transposed else dense}

    return make


def packed_units(checkpoint: Checkpoint, contents: Contents, packing: Packing, changes: Changes) -> list[Unit]:
    """Every packed matrix in the target's layout.

    Raises:
        CannotExport: for what can be seen from headers; the rest is found when a unit is made.
    """
    problems = [_problem(checkpoint, name, matrix, packing) for name, matrix in contents.matrices.items()]
    raise_together([problem for problem in problems if problem is not None])
    units = []
    for names in _groups(contents.matrices):
        matrices = {name: contents.matrices[name] for name in names}
        stacked = all(m.transposed for m in matrices.values()) and packing.transposed_stacks
        outputs = {}
        for name, matrix in matrices.items():
            for module, shape in [(name, matrix.shape)] if stacked else _parts(name, matrix.shape):
                outputs |= _specs(module, matrix.format, shape, packing, stacked)
        nbytes = sum(checkpoint.tensors[key].nbytes for matrix in matrices.values() for key in matrix.keys)
        units.append(Unit(outputs, nbytes, _pack(matrices, packing, changes, stacked)))
    return units


def modules_of(contents: Contents) -> dict[str, BlockFormat]:
    """Packed modules of an export, stacks of experts one by one, and their formats."""
    return {
        module: matrix.format for name, matrix in contents.matrices.items() for module, _ in _parts(name, matrix.shape)
    }


def _groups(matrices: dict[str, PackedMatrix]) -> list[list[str]]:
    """Names of matrices, siblings together."""
    groups: dict[tuple, list[str]] = {}
    for name, matrix in matrices.items():
        groups.setdefault((*sibling_key(name.removesuffix(".weight")), matrix.format.name), []).append(name)
    return list(groups.values())


def sibling_key(module: str) -> tuple[str, str]:
    """The same for two modules if serving engines fuse them into one matrix."""
    parent, _, leaf = module.rpartition(".")
    return parent, next((siblings[0] for siblings in SIBLINGS if leaf in siblings), leaf)


def _problem(checkpoint: Checkpoint, name: str, matrix: PackedMatrix, packing: Packing) -> CannotExport | None:
    """Why the target cannot hold a matrix, as far as headers tell."""
    leaf = name.rpartition(".")[2]
    if matrix.format not in packing.formats:
        return CannotExport(
            f"{matrix.format} weights with activations in full precision have no name in this layout",
            "Export to compressed-tensors, which has one.",
            [name],
        )
    if len(matrix.shape) != (2 if leaf == "weight" else 3) or (len(matrix.shape) == 3 and leaf not in _STACKS):
        return CannotExport(
            f"packed {list(matrix.shape)}, neither a linear's weight nor a stack of experts", "Export to bf16.", [name]
        )
    if len(matrix.shape) == 3 and not packing.transposed_stacks and f"{name}_bias" in checkpoint.tensors:
        return CannotExport(
            "stacks of experts with biases (gpt-oss) have no names in this layout that engines read",
            "Export to bf16 or, from NVFP4, to modelopt.",
            [name],
        )
    return None


def raise_together(problems: list[CannotExport]) -> None:
    """Raise the first of some problems, naming all modules that have the same way out; nothing for none."""
    if problems:
        first = problems[0]
        alike = [problem.modules for problem in problems if problem.way_out == first.way_out]
        raise CannotExport(first.reason, first.way_out, dict.fromkeys(module for one in alike for module in one))


def _parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of the modules of a matrix: itself, or each expert's projections."""
    if len(shape) == 2:
        return [(name.removesuffix(".weight"), shape)]
    path, _, leaf = name.rpartition(".")
    leaves = _STACKS[leaf]
    rows = shape[1] // len(leaves)
    return [(f"{path}.{expert}.{part}", (rows, shape[2])) for expert in range(shape[0]) for part in leaves]


def _specs(module: str, fmt: BlockFormat, shape, packing: Packing, stacked: bool) -> dict[str, TensorSpec]:
    n, k = shape[-2:]
    codes, scale = (n, k // 2), (n, k // fmt.block_size)
    names = _names(module, packing, stacked)
    if stacked:
        codes, scale = (shape[0], *codes[::-1]), (shape[0], *scale[::-1])
    specs = {names[0]: TensorSpec(torch.uint8, codes), names[1]: TensorSpec(fmt.scale_dtype, scale)}
    if fmt.has_global_scale:
        specs[names[2]] = TensorSpec(torch.float32, () if packing.multiplies else (1,))
    return specs


def _names(module: str, packing: Packing, stacked: bool) -> list[str]:
    """Stacks are parameters: what stands behind `.weight` elsewhere stands behind their own name."""
    if not stacked:
        return [f"{module}.{ending}" for ending in packing.fields]
    codes, *scales = packing.fields
    return [module + codes.removeprefix("weight"), *(f"{module}_{ending}" for ending in scales)]


def _pack(matrices: dict[str, PackedMatrix], packing: Packing, changes: Changes, stacked: bool):
    def make(read: Read) -> dict[str, torch.Tensor]:
        groups: dict[tuple, dict[str, Scaled]] = {}
        weights = {name: matrix.decode(read) for name, matrix in matrices.items()}
        raise_together([problem for name, weight in weights.items() for problem in _beyond(name, weight)])
        for name, matrix in matrices.items():
            weight = weights.pop(name)
            check_scales(name, matrix.format, weight.scale, weight.global_scale)
            for module, part in _split(name, matrix, weight):
                groups.setdefault((name,) if stacked else sibling_key(module), {})[module] = part
        outputs: dict[str, torch.Tensor] = {}
        for key, members in groups.items():
            factor = None
            if NVFP4 in (matrix.format for matrix in matrices.values()):
                members = unify(members, changes)
                factor = _factor(members, packing)
            if stacked:
                members = {key[0]: _stack(matrices[key[0]].shape, list(members.values()))}
            for module, part in members.items():
                # formats without a tensor scale have two tensors only
                tensors = (part.packed, part.scale, factor)[: 2 if factor is None else 3]
                outputs |= dict(zip(_names(module, packing, stacked), tensors, strict=False))
        return outputs

    return make


def _stack(shape: tuple[int, ...], parts: list[Scaled]) -> Scaled:
    """Projections of experts, in order, as one stack `[E, K/2, N]` of transposed matrices."""
    packed, scale = (
        torch.cat([getattr(part, name).view(torch.uint8) for part in parts]).view(shape[0], shape[1], -1)
        for name in ("packed", "scale")
    )
    scale = scale.transpose(1, 2).contiguous().view(NVFP4.scale_dtype)
    return Scaled(packed.transpose(1, 2).contiguous(), scale, parts[0].divisor)


def _beyond(name: str, weight: PackedTensors) -> list[CannotExport]:
    """What only our own layout holds of a weight."""
    way_out = "Export to bf16, or quantize again without."
    found = [what for part, what in _OTHERS_CANNOT.items() if getattr(weight, part) is not None]
    return [CannotExport(f"it has {what}, which this layout cannot hold", way_out, [name]) for what in found]


def _split(name: str, matrix: PackedMatrix, weight: PackedTensors) -> list[tuple[str, Scaled]]:
    """A matrix as `_parts` names them, each with its own divisor."""
    divisor = weight.global_scale
    if len(matrix.shape) == 2:
        own = None if divisor is None else divisor[0]
        return [(name.removesuffix(".weight"), Scaled(weight.packed, weight.scale, own))]
    split = []
    for index, (module, (rows, _)) in enumerate(_parts(name, matrix.shape)):
        per_expert = len(_STACKS[name.rpartition(".")[2]])
        expert, part = divmod(index, per_expert)
        place = expert, slice(part * rows, (part + 1) * rows)
        own = None if divisor is None else divisor[expert, part if divisor.shape[-1] == per_expert else 0]
        split.append((module, Scaled(weight.packed[place], weight.scale[place], own)))
    return split


def unify(members: dict[str, Scaled], changes: Changes) -> dict[str, Scaled]:
    """Matrices under one divisor.

    Raises:
        CannotExport: if that would change weights and `changes.requantize` is not set.
    """
    matrices = list(members.values())
    if all(torch.equal(matrix.divisor, matrices[0].divisor) for matrix in matrices):
        return members
    found = common_divisor(matrices)
    if found is not None:
        divisor, tables = found
        moved = {}
        for (name, matrix), table in zip(members.items(), tables, strict=True):
            scale = table[matrix.scale.view(torch.uint8).to(torch.int64)].view(NVFP4.scale_dtype)
            moved[name] = Scaled(matrix.packed, scale, divisor)
            if not torch.equal(matrix.divisor, divisor):
                changes.shifted.add(name)
        return moved
    if not changes.requantize:
        divisors = ", ".join(f"{float(matrix.divisor):g}" for matrix in matrices[:4])
        raise CannotExport(
            f"engines give these matrices one tensor scale, theirs differ (divisors {divisors}), and no common one "
            "leaves every weight as it is",
            "Quantize the full-precision model again (tensor scales that are powers of two avoid this), or export "
            "with requantize=True (--requantize), which quantizes the affected blocks anew and reports the error.",
            members,
        )
    divisor = min((matrix.divisor for matrix in matrices), key=float)
    moved = {}
    for name, matrix in members.items():
        moved[name], weights, error = with_divisor(matrix, divisor)
        if weights:
            changes.requantized[name] = (weights, error)
        elif not torch.equal(matrix.divisor, divisor):
            changes.shifted.add(name)
    return moved


def _factor(members: dict[str, Scaled], packing: Packing) -> torch.Tensor:
    matrices = list(members.values())
    divisor = matrices[0].divisor
    if not packing.multiplies:
        return divisor.reshape(1).clone()
    factor = multiplier(divisor, matrices)
    if factor is None:
        raise CannotExport(
            f"no tensor scale that multiplies gives the same bfloat16 weights as their divisor {float(divisor):g}",
            "Export to compressed-tensors, whose tensor scale divides.",
            members,
        )
    return factor
