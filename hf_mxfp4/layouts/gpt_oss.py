# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 of gpt-oss: fused experts `P_blocks` U8 `[E, N, K/32, 16]` and `P_scales` U8 (E8M0) `[E, N, K/32]`.

32 weights along K are 16 bytes, even k in the low nibble. The dense weight is `[E, K, N]`; rows of gate and up are
interleaved, as the model has them. Source: transformers, `integrations/mxfp4.py` (`convert_moe_packed_tensors`).
"""

from __future__ import annotations

from functools import partial

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import FULL_PRECISION
from hf_mxfp4.formats import MXFP4
from hf_mxfp4.layouts.base import EDITED, Contents, PackedMatrix, PackedTensors, Read, StoredLayout, checked, expect

_PROJECTIONS = ("gate_up_proj", "down_proj")


def read(checkpoint: Checkpoint) -> Contents:
    """Contents of a gpt-oss checkpoint; see `StoredLayout.read`."""
    tensors = checkpoint.tensors
    packed = [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]
    scaled = [key.removesuffix("_scales") for key in tensors if key.endswith("_scales")]
    if not packed and not scaled:
        raise ValueError(f"quantization_config says mxfp4, and no file holds experts *_blocks and *_scales. {EDITED}")
    matrices = {name: _matrix(checkpoint, name) for name in dict.fromkeys((*packed, *scaled))}
    dense = [
        key
        for key, tensor in tensors.items()
        if key.endswith(tuple(f"experts.{name}" for name in _PROJECTIONS)) and tensor.dtype in FULL_PRECISION
    ]
    if dense:
        raise ValueError(
            f"quantization_config says mxfp4, and {dense[0]} is stored in {tensors[dense[0]].dtype}. {EDITED}"
        )
    return Contents("gpt-oss", "gpt-oss mxfp4", matrices, {})


def _matrix(checkpoint: Checkpoint, name: str) -> PackedMatrix:
    keys = (f"{name}_blocks", f"{name}_scales")
    expect(checkpoint, keys[0], "U8", None)
    shape = checkpoint.tensors[keys[0]].shape
    if len(shape) != 4 or shape[3] != MXFP4.block_size // 2 or 0 in shape:
        raise ValueError(f"{keys[0]}: shape {list(shape)}, expected [E, N, K/32, 16], not empty. {EDITED}")
    expect(checkpoint, keys[1], "U8", shape[:3])
    weight = (*shape[:2], shape[2] * MXFP4.block_size)
    return PackedMatrix(MXFP4, weight, keys, partial(_decode, keys), transposed=True)


def _decode(keys: tuple[str, str], read: Read) -> PackedTensors:
    blocks, scales = map(read, keys)
    return checked(keys[0], MXFP4, PackedTensors(blocks.flatten(-2), scales))


def _recognise(checkpoint: Checkpoint) -> bool:
    return (checkpoint.quantization or {}).get("quant_method") == "mxfp4"


LAYOUT = StoredLayout("gpt-oss", _recognise, read)
