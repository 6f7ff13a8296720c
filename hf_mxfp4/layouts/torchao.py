# SPDX-License-Identifier: Apache-2.0
"""torchao's NVFP4Tensor and MXTensor (FP4 elements), flattened into safetensors files.

A weight `P.name` is stored as `P._name_qdata` U8 `[..., N, K/2]`, `P._name_scale` E4M3 `[..., N, K/16]` or E8M0
`[..., N, K/32]`, in tiles (`blocked`) if the weight's JSON in the header's metadata says so, and for NVFP4 possibly
`P._name_per_tensor_scale` F32 `[]` or `[E, 1, 1]`, which multiplies. Source: torchao 0.18,
`prototype/safetensors/safetensors_support.py`, `prototype/mx_formats/nvfp4_tensor.py`, `mx_tensor.py`.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import torch

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.formats import MXFP4, NVFP4, BlockFormat
from hf_mxfp4.layouts import blocked
from hf_mxfp4.layouts.base import (
    SCALE_DTYPES,
    Contents,
    PackedMatrix,
    PackedTensors,
    Read,
    StoredLayout,
    checked,
    divisor_of,
    expect,
)

_TYPES = {"NVFP4Tensor": NVFP4, "MXTensor": MXFP4}
_TENSOR_NAMES = "tensor_names"  # of the list of all weights, in the metadata
_FP4 = "float4_e2m1fn_x2"
_ACTIVATIONS = "act_per_tensor_scale"
_TRANSPOSED_MODELS = ("gpt_oss", "llama4", "llama4_text")  # whose dense experts are [E, K, N]


def read(checkpoint: Checkpoint) -> Contents:
    """Contents of a torchao checkpoint; see `StoredLayout.read`."""
    described = _described(checkpoint)
    matrices, skipped, four_bit, other = {}, {}, 0, 0
    for name, (kind, data, parts) in described.items():
        matrix = matrices[name] = _matrix(checkpoint, name, kind, data, parts)
        if _ACTIVATIONS in parts:
            skipped[_key(name, _ACTIVATIONS)] = "tensor scale of activations, which are scaled token by token here"
        asked = data.get("act_quant_kwargs")
        asked = asked.get("_data") if isinstance(asked, dict) else None
        if isinstance(asked, dict):
            fp4 = matrix.format is NVFP4 or _dtype(asked.get("elem_dtype")) == _FP4
            four_bit, other = four_bit + fp4, other + (not fp4)
    notes = []
    if other:
        notes.append(f"It asks for activations in FP8 ({other} weights); they are kept in full precision.")
    if four_bit == len(matrices):
        notes.append("It asks for activations in FP4 (W4A4): rounded token by token, with scales of each token.")
    elif four_bit:
        notes.append("Only some of its weights ask for activations in FP4; they are kept in full precision.")
    activation_format = "same" if four_bit == len(matrices) else None
    return Contents("torchao", "torchao", matrices, skipped, tuple(notes), activation_format)


def _described(checkpoint: Checkpoint) -> dict[str, tuple[str, dict[str, Any], list[str]]]:
    """Of each packed weight: its type, attributes and names of its parts, as the headers' metadata say."""
    found, others = {}, {}
    for file, metadata in checkpoint.metadata.items():
        for name in _json(file, _TENSOR_NAMES, metadata.get(_TENSOR_NAMES, "[]"), list):
            entry = _json(file, str(name), metadata.get(str(name), "null"), dict)
            kind, data, parts = entry.get("_type"), entry.get("_data"), entry.get("_tensor_data_names")
            if kind == "Tensor":
                continue
            if not isinstance(data, dict) or not isinstance(parts, list) or not isinstance(kind, str):
                raise ValueError(f"{file}: metadata of {name} is not what torchao writes. Download it again.")
            (found if kind in _TYPES else others)[name] = (kind, data, parts)
    if others:
        name, (kind, *_) = next(iter(others.items()))
        raise ValueError(
            f"{len(others)} weights (such as {name}) are torchao's {kind}; only {' and '.join(_TYPES)} in FP4 are "
            "supported. Load the checkpoint with torchao, or quantize the full-precision one with FP4Config."
        )
    if not found:
        raise ValueError(
            "quantization_config says torchao, and no header's metadata describes a packed weight: the file was "
            "written by a tool that drops metadata, or by an older torchao. Download it again, or save it again with "
            "torchao."
        )
    codes = {_key(name, "qdata") for name in found}
    lost = [key for key in checkpoint.tensors if key.endswith("_qdata") and key not in codes]
    if lost:
        raise ValueError(f"no header's metadata describes {lost[0]}. The files were edited; download them again.")
    return found


def _json(file: str, name: str, text: str, kind: type) -> Any:
    try:
        content = json.loads(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: metadata of {name} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, kind):
        raise ValueError(f"{file}: metadata of {name} is not what torchao writes. Download it again.")
    return content


def _key(name: str, part: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}._{leaf}_{part}"


def _dtype(entry: Any) -> str:
    """A dtype's name as torchao writes it into JSON."""
    return str(entry.get("_data") if isinstance(entry, dict) else entry).removeprefix("torch.")


def _matrix(checkpoint: Checkpoint, name: str, kind: str, data: dict[str, Any], parts: list[str]) -> PackedMatrix:
    fmt, codes = _TYPES[kind], _key(name, "qdata")
    elements = _dtype(data.get("elem_dtype", _FP4))
    if elements != _FP4 or data.get("block_size") != fmt.block_size:
        raise ValueError(
            f"{name}: torchao's {kind} of {elements} in blocks of {data.get('block_size')}; only FP4 ({_FP4}) in "
            f"blocks of {fmt.block_size} is supported."
        )
    expect(checkpoint, codes, "U8", None)
    *lead, half = checkpoint.tensors[codes].shape or (0,)
    shape = (*lead, 2 * half)
    if len(shape) not in (2, 3) or 0 in shape or shape[-1] % fmt.block_size:
        raise ValueError(
            f"{codes}: shape {[*lead, half]} of codes, expected [N, K/2] or [E, N, K/2], not empty, K a multiple of "
            f"{fmt.block_size}. Download the checkpoint again."
        )
    rows, columns = math.prod(lead), shape[-1] // fmt.block_size
    swizzled, scale = data.get("is_swizzled_scales", False), _key(name, "scale")
    if not isinstance(swizzled, bool):
        raise ValueError(f"{name}: is_swizzled_scales is {swizzled!r} in the metadata, not true or false.")
    expect(checkpoint, scale, SCALE_DTYPES[fmt.name], None)
    stored = checkpoint.tensors[scale].shape
    if not swizzled or math.prod(stored) != math.prod(blocked.padded(rows, columns)):
        expect(checkpoint, scale, SCALE_DTYPES[fmt.name], (*lead, columns))
        if swizzled:
            raise ValueError(f"{scale}: {list(stored)} scales, not the whole tiles that the metadata promise.")
    keys = [codes, scale]
    if "per_tensor_scale" in parts:
        keys.append(_key(name, "per_tensor_scale"))
        expect(checkpoint, keys[2], "F32", None)
        count = math.prod(checkpoint.tensors[keys[2]].shape)
        if fmt is MXFP4 or count not in (1, shape[0] if len(shape) == 3 else 1):
            expect(checkpoint, keys[2], "F32", (shape[0], 1, 1) if len(shape) == 3 else ())
    if len(shape) == 3 and checkpoint.config.get("model_type") in _TRANSPOSED_MODELS:
        raise ValueError(
            f"{name}: torchao packs the experts of {checkpoint.config['model_type']} along their outputs, which no "
            "kernel here reads. Quantize the full-precision checkpoint with FP4Config."
        )
    return PackedMatrix(fmt, shape, tuple(keys), partial(_decode, fmt, shape, swizzled, keys))


def _decode(fmt: BlockFormat, shape: tuple[int, ...], swizzled: bool, keys: list[str], read: Read) -> PackedTensors:
    packed, scale, *multiplier = map(read, keys)
    *lead, k = shape
    scale = scale.view(torch.uint8)
    if swizzled:
        scale = blocked.unblock(scale, math.prod(lead), k // fmt.block_size).reshape(*lead, -1)
    scale = fmt.scale_from_bytes(scale.contiguous())
    divisor = None
    if fmt.has_global_scale:
        matrices = lead[:-1]
        factor = multiplier[0].reshape(-1).expand(math.prod(matrices)) if multiplier else torch.ones(matrices)
        divisor = divisor_of(factor.reshape(matrices), scale)[..., None]
    return checked(keys[0], fmt, PackedTensors(packed, scale, divisor))


def _recognise(checkpoint: Checkpoint) -> bool:
    return (checkpoint.quantization or {}).get("quant_method") == "torchao"


LAYOUT = StoredLayout("torchao", _recognise, read)
