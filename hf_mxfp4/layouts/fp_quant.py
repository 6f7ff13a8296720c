# SPDX-License-Identifier: Apache-2.0
"""fp_quant: weights in a rotated basis, W @ H in groups of channels; the input is multiplied by H before the product.

`P.qweight` U8 `[N, K/2]`, `P.scales` U8 (E8M0 or E4M3 bytes) `[N, K/B]`, filled up to 128 rows and 4 columns where
weights were quantized while loading; `P.weight_global_scale` `[1]`, which divides; `P.forward_hadamard_matrix`
`[g, g]`. Source: fp_quant 0.3.2, `module/linear.py` and `module/linear_fns.py`.

MXFP4 has no tensor scale here, and fp_quant's is 3 for the method abs_max: what the weight is too large by, the input
is made smaller by. H / 3 (or 1/3 for each channel, where H is the identity) is kept in float32, in which
`packed.transform_input` then computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.formats import FORMATS, BlockFormat
from hf_mxfp4.layouts import blocked
from hf_mxfp4.layouts.base import Contents, PackedMatrix, PackedTensors, Read, StoredLayout, checked, expect
from hf_mxfp4.layouts.targets import listed, refuse_unpacked

_CODES, _SCALES, _DIVISOR, _MATRIX = "qweight", "scales", "weight_global_scale", "forward_hadamard_matrix"
_FLOATS = ("F32", "BF16", "F16")
_SKIPPED = {
    "act_global_scale": "tensor scale of activations, which are scaled token by token here",
    "backward_hadamard_matrix": "transform of fp_quant's own backward pass",
}


def read(checkpoint: Checkpoint) -> Contents:
    """Contents of an fp_quant checkpoint; see `StoredLayout.read`."""
    config, tensors = checkpoint.quantization or {}, checkpoint.tensors
    fmt = _format(config)
    modules = [key.removesuffix(f".{_CODES}") for key in tensors if key.endswith(f".{_CODES}")]
    modules = [module for module in modules if 0 not in tensors[f"{module}.{_CODES}"].shape]
    for key, tensor in tensors.items():
        if key.endswith(".dqweight") and 0 not in tensor.shape:
            raise ValueError(
                f"{key}: fp_quant's pseudo-quantization stores weights in {tensor.dtype}, nothing packed. Quantize "
                "the full-precision checkpoint with FP4Config, or save with pseudoquantization=False."
            )
    if not modules:
        raise ValueError(
            "quantization_config says fp_quant, and no file holds a tensor *.qweight: its weights are in full "
            "precision (store_master_weights), or a file is missing. Quantize the full-precision checkpoint with "
            "FP4Config."
        )
    matrices = {f"{module}.weight": _matrix(checkpoint, module, fmt) for module in modules}
    skipped = {}
    for module in modules:
        for leaf, reason in _SKIPPED.items():
            if f"{module}.{leaf}" in tensors:
                skipped[f"{module}.{leaf}"] = reason
        for leaf in ("weight", "dqweight"):  # fp_quant keeps empty ones beside its codes
            if f"{module}.{leaf}" in tensors:
                empty = 0 in tensors[f"{module}.{leaf}"].shape
                reason = "an empty placeholder" if empty else "a master weight; the packed one is used"
                skipped[f"{module}.{leaf}"] = reason
    kept = listed(config, "modules_to_not_convert")
    refuse_unpacked(checkpoint, set(modules), lambda module: not module.endswith(kept))
    return Contents("fp_quant", "fp_quant", matrices, skipped, _notes(config), "same")


def _format(config: dict[str, Any]) -> BlockFormat:
    if config.get("pseudoquantization"):
        raise ValueError(
            "fp_quant's pseudoquantization stores dequantized weights, nothing packed. Quantize the full-precision "
            "checkpoint with FP4Config, or save with pseudoquantization=False."
        )
    name = str(config.get("forward_dtype", "nvfp4"))
    if name not in FORMATS:
        raise ValueError(f"quantization_config: forward_dtype {name!r}; known: {', '.join(FORMATS)}.")
    return FORMATS[name]


def _notes(config: dict[str, Any]) -> tuple[str, ...]:
    method = config.get("forward_method", "abs_max")
    notes = [
        "It asks for activations in FP4 (W4A4): rounded token by token after the transform, by this package's rule "
        f"instead of fp_quant's {method}."
    ]
    if config.get("backward_dtype", "bf16") != "bf16":
        notes.append(f"It asks for gradients in {config['backward_dtype']}; they are computed in full precision.")
    return tuple(notes)


def _matrix(checkpoint: Checkpoint, module: str, fmt: BlockFormat) -> PackedMatrix:
    codes, scales, divisor, transform = (f"{module}.{name}" for name in (_CODES, _SCALES, _DIVISOR, _MATRIX))
    expect(checkpoint, codes, "U8", None)
    found = checkpoint.tensors[codes].shape
    k = 2 * found[-1] if len(found) == 2 else 0
    if k == 0 or k % fmt.block_size:
        raise ValueError(
            f"{codes}: shape {list(found)} of codes in {checkpoint.tensors[codes].file}, expected [N, K/2], not "
            f"empty, K a multiple of {fmt.name}'s {fmt.block_size}. Download the checkpoint again."
        )
    shape, blocks = (found[0], k), k // fmt.block_size
    stored = checkpoint.tensors.get(scales)
    filled = blocked.padded(found[0], blocks)
    expect(checkpoint, scales, "U8", filled if stored is not None and stored.shape == filled else (found[0], blocks))
    expect(checkpoint, divisor, _FLOATS, (1,))
    expect(checkpoint, transform, _FLOATS, None)
    size = checkpoint.tensors[transform].shape
    if len(size) != 2 or size[0] != size[1] or size[0] == 0 or k % size[0]:
        raise ValueError(
            f"{transform}: shape {list(size)}, expected [g, g] with g a divisor of the {k} input channels. Config and "
            "files do not belong together; download the checkpoint again."
        )
    keys = (codes, scales, divisor, transform)
    return PackedMatrix(fmt, shape, keys, partial(_decode, fmt, shape, keys))


def _decode(fmt: BlockFormat, shape: tuple[int, int], keys: tuple[str, ...], read: Read) -> PackedTensors:
    packed, scale, divisor, hadamard = map(read, keys)
    divisor = divisor.float()
    if not bool((torch.isfinite(divisor) & (divisor > 0)).all()):
        raise ValueError(f"{keys[2]}: the tensor scale is {divisor.tolist()}, not a positive number.")
    if not bool(torch.isfinite(hadamard).all()):
        raise ValueError(f"{keys[3]}: the transform holds NaN or Inf; the file is damaged.")
    identity = torch.equal(hadamard.float(), torch.eye(len(hadamard)))
    transform: dict[str, torch.Tensor] = {} if identity else {"hadamard": hadamard}
    if not fmt.has_global_scale and float(divisor) != 1.0:
        if identity:
            transform["pre_quant_scale"] = (1 / divisor).expand(shape[1]).contiguous()
        else:
            transform["hadamard"] = hadamard.float() / divisor
    scale = fmt.scale_from_bytes(scale[: shape[0], : shape[1] // fmt.block_size].contiguous())
    tensor_scale = divisor if fmt.has_global_scale else None
    return checked(keys[0], fmt, PackedTensors(packed, scale, tensor_scale, **transform))


def _recognise(checkpoint: Checkpoint) -> bool:
    return (checkpoint.quantization or {}).get("quant_method") == "fp_quant"


LAYOUT = StoredLayout("fp_quant", _recognise, read)
