# SPDX-License-Identifier: Apache-2.0
"""What this package writes: `portable` (compressed-tensors with our key) and `own`.

In `own` the codes stand under the dense weight's name, `P.weight` or `P.gate_up_proj`, and all else beside them under
that name with an ending: `_scale`, `_global_scale` (divides), `_macro_scale`, `_outlier_values`, ... Transforms of a
linear layer's input are `P.pre_quant_scale` and `P.hadamard`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import FULL_PRECISION, HF_MXFP4_KEY, WRITTEN
from hf_mxfp4.formats import FORMATS, MACRO_BLOCK, BlockFormat, Outliers
from hf_mxfp4.layouts import compressed_tensors
from hf_mxfp4.layouts.base import (
    EDITED,
    Contents,
    PackedMatrix,
    PackedTensors,
    Read,
    StoredLayout,
    checked,
    expect,
    expect_tensor_scale,
    stored_format,
    weight_shape,
)
from hf_mxfp4.layouts.targets import Patterns, core, refuse_unpacked
from hf_mxfp4.outliers import check, column_dtype

_OUTLIERS = tuple(f"outlier_{name}" for name in Outliers._fields)
_TRANSFORMS = ("pre_quant_scale", "hadamard")
# Projections of a stack of experts, as their own checkpoints name them one by one.
PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
_TRANSPOSED_MODELS = ("gpt_oss",)  # written before configs named the modules themselves


def read_portable(checkpoint: Checkpoint) -> Contents:
    """Contents of a portable checkpoint; see `StoredLayout.read`."""
    contents = compressed_tensors.read(checkpoint, "portable")
    fields = checkpoint.quantization[HF_MXFP4_KEY]
    if not isinstance(fields, dict):
        raise ValueError(f"quantization_config: {HF_MXFP4_KEY} is not a JSON object. Download the checkpoint again.")
    return contents._replace(origin=_origin(fields), activation_format=_activation_format(fields))


def read_own(checkpoint: Checkpoint) -> Contents:
    """Contents of a checkpoint in layout `own`; see `StoredLayout.read`."""
    config, tensors = checkpoint.quantization or {}, checkpoint.tensors
    coded = [key for key, tensor in tensors.items() if tensor.dtype == "U8"]
    packed = [k for k in coded if k.endswith(".weight") or f"{_name_of_scales(checkpoint, k)}_scale" in tensors]
    if not packed:
        raise ValueError(f"quantization_config says hf_mxfp4, and no file holds a packed weight. {EDITED}")
    formats = _formats(config)
    matrices = {}
    for key in packed:
        matrices[key] = matrix = _matrix(checkpoint, key)
        if matrix.format.name not in formats:
            raise ValueError(
                f"{key}: its scales are stored as {matrix.format.name}'s, and quantization_config says "
                f"{' or '.join(sorted(formats))}. {EDITED}"
            )
    _attach_stacked_outliers(checkpoint, matrices)
    _refuse_missing_transforms(checkpoint)
    ignored = Patterns(config.get("ignore"), "ignore")
    modules = {key.removesuffix(".weight") for key in packed}
    refuse_unpacked(checkpoint, modules, lambda module: not ignored.excuses(module))
    return Contents("own", _origin(config), matrices, {}, activation_format=_activation_format(config))


def _origin(fields: dict[str, Any]) -> str:
    made_by = fields.get("origin")
    return f"{made_by}, stored by hf_mxfp4" if isinstance(made_by, str) else "hf_mxfp4"


def _formats(config: dict[str, Any]) -> set[str]:
    """Every format that some module may have."""
    overrides = config.get("overrides") or ()
    pairs = overrides.items() if isinstance(overrides, dict) else overrides if isinstance(overrides, list) else ()
    changes = [
        pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], dict)
    ]
    found = {str(change["format"]) for change in (config, *changes) if "format" in change}
    if not found or not found <= {*FORMATS}:
        raise ValueError(f"quantization_config: formats {sorted(found)}; known: {', '.join(FORMATS)}. {EDITED}")
    return found


def _activation_format(fields: dict[str, Any]) -> str | None:
    found = fields.get("activation_format")
    if found not in (None, "same"):
        raise ValueError(f"quantization_config: activation_format {found!r}; known: null, 'same'. {EDITED}")
    return found


def _matrix(checkpoint: Checkpoint, key: str) -> PackedMatrix:
    tensors, config = checkpoint.tensors, checkpoint.quantization or {}
    named = _name_of_scales(checkpoint, key)
    fmt = stored_format(checkpoint, f"{named}_scale")
    stacked = len(tensors[key].shape) == 3
    shape = weight_shape(checkpoint, fmt, key, f"{named}_scale", stacked)
    names = {"scale": f"{named}_scale"}
    if fmt.has_global_scale:
        names["global_scale"] = f"{named}_global_scale"
        _check_divisor(checkpoint, names["global_scale"], shape)
    if f"{named}_macro_scale" in tensors:
        names["macro_scale"] = f"{named}_macro_scale"
        expect(checkpoint, names["macro_scale"], "U8", (*shape[:-1], -(-shape[-1] // MACRO_BLOCK)))
    stored = [name for name in _OUTLIERS if f"{named}_{name}" in tensors]
    if stored:
        names |= {name: f"{named}_{name}" for name in _OUTLIERS}
        _expect_outliers(
            checkpoint, tuple(names[name] for name in _OUTLIERS), torch.Size(shape[:-1]).numel(), shape[-1]
        )
    if not stacked:
        names |= _transforms(checkpoint, key.removesuffix(".weight"), shape[1])
    listed = config.get("transposed")
    if listed is None:
        transposed = stacked and checkpoint.config.get("model_type") in _TRANSPOSED_MODELS
    else:
        transposed = stacked and Patterns(listed, "transposed").find(named.rpartition(".")[0]) is not None
    return PackedMatrix(fmt, shape, (key, *names.values()), partial(_decode, fmt, key, names), transposed)


def _name_of_scales(checkpoint: Checkpoint, key: str) -> str:
    """What the names of a weight's scales begin with: its own name; but where a model's own checkpoints give nothing
    but the stack of experts itself another name (GraniteMoE's `input_linear.weight`), the model's."""
    tensors, codes = checkpoint.tensors, checkpoint.tensors[key].shape
    if f"{key}_scale" in tensors or len(codes) != 3:
        return key
    parent = key.removesuffix(".weight").rpartition(".")[0]
    sizes = {fmt.block_size // 2 for fmt in FORMATS.values()}
    found = []
    for name, tensor in tensors.items():
        named = name.removesuffix("_scale")
        if name.startswith(f"{parent}.") and named.rpartition(".")[2] in PROJECTIONS and named not in tensors:
            *lead, blocks = tensor.shape
            if (*lead,) == codes[:2] and codes[2] in {blocks * size for size in sizes}:
                found.append(named)
    return found[0] if len(found) == 1 else key


def _attach_stacked_outliers(checkpoint: Checkpoint, matrices: dict[str, PackedMatrix]) -> None:
    """Outliers of a stack of experts are stored in one piece, `X.experts.gate_up_proj_outlier_*`, also where the codes
    are stored expert by expert: every expert's projection gets its rows of them."""
    used = {key for matrix in matrices.values() for key in matrix.keys}
    for key in [key for key in checkpoint.tensors if key.endswith(f"_{_OUTLIERS[2]}") and key not in used]:
        stack = key.removesuffix(f"_{_OUTLIERS[2]}")
        path, _, leaf = stack.rpartition(".")
        members: list[str] = []
        for parts in PROJECTIONS.get(leaf, ()):
            expert = 0
            while f"{path}.{expert}.{parts[0]}.weight" in matrices:
                members += [f"{path}.{expert}.{part}.weight" for part in parts]
                expert += 1
        if not members or not all(name in matrices for name in members):
            raise ValueError(f"{key}: outliers of no packed weight in this checkpoint. {EDITED}")
        rows, k = matrices[members[0]].shape
        stored = tuple(f"{stack}_{name}" for name in _OUTLIERS)
        _expect_outliers(checkpoint, stored, rows * len(members), k)
        for index, name in enumerate(members):
            decode = partial(_with_rows, matrices[name].decode, name, stored, slice(index * rows, (index + 1) * rows))
            matrices[name] = matrices[name]._replace(keys=(*matrices[name].keys, *stored), decode=decode)


def _with_rows(decode, name: str, stored: tuple[str, ...], rows: slice, read: Read) -> PackedTensors:
    """A matrix with its rows of a stack's outliers."""
    found = decode(read)
    values, columns, offsets = (read(key) for key in stored)
    offsets = offsets[rows.start : rows.stop + 1]
    entries = slice(int(offsets[0]), int(offsets[-1]))
    outliers = Outliers(values[entries].clone(), columns[entries].clone(), offsets - offsets[0])
    check(outliers, found.packed, name)
    return found._replace(**dict(zip(_OUTLIERS, outliers, strict=True)))


def _expect_outliers(checkpoint: Checkpoint, stored: tuple[str, ...], rows: int, k: int) -> None:
    expect(checkpoint, stored[0], FULL_PRECISION, None)
    count = checkpoint.tensors[stored[0]].shape
    expect(checkpoint, stored[1], "U16" if column_dtype(k) == torch.uint16 else "I32", count)
    expect(checkpoint, stored[2], "I32", (rows + 1,))


def _transforms(checkpoint: Checkpoint, module: str, k: int) -> dict[str, str]:
    """Names of the input transforms that a linear layer has."""
    names = {name: f"{module}.{name}" for name in _TRANSFORMS if f"{module}.{name}" in checkpoint.tensors}
    if "pre_quant_scale" in names:
        expect(checkpoint, names["pre_quant_scale"], FULL_PRECISION, (k,))
    if "hadamard" in names:
        size = (*checkpoint.tensors[names["hadamard"]].shape, 0)[0]
        expect(checkpoint, names["hadamard"], FULL_PRECISION, (size, size) if size and k % size == 0 else (k, k))
    return names


def _refuse_missing_transforms(checkpoint: Checkpoint) -> None:
    """Raise `ValueError` for input transforms that the config names and the files lack: the weights need them."""
    named = (checkpoint.quantization or {}).get("transforms") or {}
    if not isinstance(named, dict) or not all(isinstance(names, list) for names in named.values()):
        raise ValueError(f"quantization_config: transforms {named!r} is no map of module to names. {EDITED}")
    stored = {core(key) for key in checkpoint.tensors if key.endswith(_TRANSFORMS)}
    missing = [f"{module}.{name}" for module, names in named.items() for name in names]
    missing = [key for key in missing if core(key) not in stored]
    if missing:
        raise ValueError(f"quantization_config names {missing[0]}, and no file holds it. {EDITED}")


def _check_divisor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """One tensor scale for a matrix; for a stack `[E, P]`, where P projections stand one below the other."""
    if len(shape) == 2:
        expect_tensor_scale(checkpoint, name)
        return
    experts, rows = shape[:2]
    expect(checkpoint, name, "F32", None)
    found = checkpoint.tensors[name].shape
    if len(found) != 2 or found[0] != experts or not 0 < found[1] <= 2 or rows % found[1]:
        expect(checkpoint, name, "F32", (experts, 1))


def _decode(fmt: BlockFormat, key: str, names: dict[str, str], read: Read) -> PackedTensors:
    found = {name: read(stored) for name, stored in names.items()}
    found["scale"] = fmt.scale_from_bytes(found["scale"])
    packed = read(key)
    if "global_scale" in found and packed.ndim == 2:
        found["global_scale"] = found["global_scale"].reshape(1)
    if _OUTLIERS[0] in found:
        check(Outliers(*(found[name] for name in _OUTLIERS)), packed, key)
    return checked(key, fmt, PackedTensors(packed, **found))


def _is_portable(checkpoint: Checkpoint) -> bool:
    return HF_MXFP4_KEY in (checkpoint.quantization or {})


def _is_own(checkpoint: Checkpoint) -> bool:
    return (checkpoint.quantization or {}).get("quant_method") == WRITTEN["own"].quant_method


PORTABLE = StoredLayout("portable", _is_portable, read_portable)
OWN = StoredLayout("own", _is_own, read_own)
