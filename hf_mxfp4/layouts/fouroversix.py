# SPDX-License-Identifier: Apache-2.0
"""fouroversix (Four Over Six): NVFP4 and MXFP4, filled up to 128 rows and 4 blocks, scales in tiles (`blocked`).

`P.quantized_weight_values` U8 `[N', K'/2]`, `_scale_factors` 1-D, `_amax` F32 of one value, `_metadata` integers `[6]`
(N, K, N', K', packed, tiles); fused experts `quantized_gate_up_proj_values` `[E, N', K'/2]` and so on, with metadata
`[E, 4]`. `w = E2M1[code] * scale * amax / (M * S)`, with M and S by the scale rule in the config; MXFP4 has no amax.
Source: fouroversix 1.0.5, `model/modules/`, `quantize/backend.py` (dequantize), `utils.py` (M and S).
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import torch

from hf_mxfp4.checkpoint_files import Checkpoint, TensorReader
from hf_mxfp4.formats import E2M1_MAX, E4M3_MAX, FORMATS, NVFP4, BlockFormat
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
from hf_mxfp4.layouts.targets import listed, refuse_unpacked

_CODES = re.compile(r"(?P<module>.*)\.quantized_(?P<weight>weight|gate_up_proj|down_proj)_values")
_PARTS = ("values", "scale_factors", "amax", "metadata")
# Largest code and block scale that a rule fills: M and S. E4M3 scales up to 256 leave room for blocks scaled to 4.
_TOP = {
    "static_6": E2M1_MAX * E4M3_MAX,
    "static_4": 4 * E4M3_MAX,
    **dict.fromkeys(("mse", "mae", "abs_max"), E2M1_MAX * 256.0),
}
_TRANSPOSED_MODELS = ("gpt_oss",)  # whose dense weights are [E, K, N]


def read(checkpoint: Checkpoint) -> Contents:
    """Contents of a fouroversix checkpoint; see `StoredLayout.read`.

    The shapes of weights that were filled up stand in `_metadata`: those few bytes are read where the files are here.
    """
    config = checkpoint.quantization or {}
    if config.get("keep_master_weights"):
        raise ValueError(
            "fouroversix's keep_master_weights stores weights in full precision, nothing packed. Quantize them with "
            "FP4Config instead."
        )
    found = [match for match in map(_CODES.fullmatch, checkpoint.tensors) if match]
    pseudo = [key for key in checkpoint.tensors if key.endswith("_pseudoquant")]
    if pseudo:
        raise ValueError(
            f"{pseudo[0]}: fouroversix's pseudo-quantized experts are stored dequantized, nothing packed. Quantize "
            "the full-precision checkpoint with FP4Config."
        )
    if not found:
        raise ValueError(
            "quantization_config says fouroversix, and no file holds a tensor *.quantized_weight_values. Config and "
            "files do not belong together; download the checkpoint again."
        )
    matrices, activations = {}, set()
    with TensorReader(checkpoint.folder, checkpoint.tensors) as reader:
        for match in found:
            settings = _settings(config, match["module"])
            fmt, same = _formats(settings, match["module"])
            activations.add(same)
            name = f"{match['module']}.{match['weight']}"
            matrices[name] = _matrix(checkpoint, match, fmt, settings, reader if checkpoint.folder else None)
    kept = listed(config, "modules_to_not_convert")
    modules = {name.removesuffix(".weight") for name in matrices}
    refuse_unpacked(checkpoint, modules, lambda module: module not in kept)
    if activations == {True}:
        note = (
            "It asks for activations in FP4 (W4A4): rounded token by token by this package's rule, instead of all at "
            "once by fouroversix's."
        )
    elif True in activations:
        note = "Only some of its weights ask for activations in FP4; they are kept in full precision everywhere."
    else:
        note = "It asks for activations in another format than its weights; they are kept in full precision."
    activation_format = "same" if activations == {True} else None
    return Contents("fouroversix", "fouroversix", matrices, {}, (note,), activation_format)


def _settings(config: dict[str, Any], module: str) -> dict[str, Any]:
    """The config of a module: its own, which does not inherit, or the model's."""
    overrides = config.get("module_config_overrides") or {}
    found = overrides.get(module, config) if isinstance(overrides, dict) else None
    if not isinstance(found, dict):
        raise ValueError("quantization_config: module_config_overrides is not a JSON object. Download it again.")
    return found


def _formats(settings: dict[str, Any], module: str) -> tuple[BlockFormat, bool]:
    """The weight's format, and whether activations are asked for in the same."""
    default = settings.get("dtype") or "nvfp4"
    weight = str(settings.get("weight_dtype") or default)
    if weight not in FORMATS:
        raise ValueError(
            f"{module}: fouroversix's {weight} is not supported, only {' and '.join(FORMATS)}. Use fouroversix, or "
            "the full-precision checkpoint."
        )
    return FORMATS[weight], (settings.get("activation_dtype") or default) == weight


def _matrix(
    checkpoint: Checkpoint, match: re.Match, fmt: BlockFormat, settings: dict[str, Any], reader: TensorReader | None
) -> PackedMatrix:
    prefix = f"{match['module']}.quantized_{match['weight']}_"
    codes, scales, amax, metadata = keys = tuple(prefix + part for part in _PARTS)
    stacked = match["weight"] != "weight"
    expect(checkpoint, codes, "U8", None)
    *lead, half = checkpoint.tensors[codes].shape or (0,)
    stored = (*lead, 2 * half)
    if len(stored) != 2 + stacked or 0 in stored or stored[-1] % (blocked.TILE_COLUMNS * fmt.block_size):
        wanted = f"[{'E, ' if stacked else ''}N, K/2], K a multiple of {blocked.TILE_COLUMNS * fmt.block_size}"
        raise ValueError(f"{codes}: shape {[*lead, half]} of codes, expected {wanted}. Download the checkpoint again.")
    experts = tuple(lead[:-1])
    expect(checkpoint, scales, SCALE_DTYPES[fmt.name], (*experts, stored[-2] * stored[-1] // fmt.block_size))
    expect(checkpoint, amax, ("F32",) if fmt is NVFP4 else ("F32", "BF16", "F16"), None)
    if math.prod(checkpoint.tensors[amax].shape) != math.prod(experts):
        expect(checkpoint, amax, "F32", (*experts, 1))
    expect(checkpoint, metadata, ("I32", "I64"), None)
    if (described := checkpoint.tensors[metadata].shape) not in ((*experts, 4), (*experts, 6)):
        expect(checkpoint, metadata, ("I32", "I64"), (*experts, 4 if stacked else 6))
    rule = str(settings.get("weight_scale_rule") or settings.get("scale_rule") or "mse")
    if rule not in _TOP:
        raise ValueError(f"{match['module']}: scale rule {rule!r} of fouroversix; known: {', '.join(_TOP)}.")
    shape = stored
    if reader is not None:
        rows = reader(metadata).reshape(-1, described[-1])
        shape, _ = _meaning(metadata, rows, stored, fmt)
    top = _TOP[rule] if fmt.has_global_scale else None
    transposed = stacked and checkpoint.config.get("model_type") in _TRANSPOSED_MODELS
    return PackedMatrix(fmt, shape, keys, partial(_decode, fmt, stored, top, keys), transposed)


def _meaning(name: str, rows: torch.Tensor, stored: tuple[int, ...], fmt: BlockFormat) -> tuple[tuple[int, ...], bool]:
    """Shape of the weight, and whether its scales lie in tiles, by `_metadata` `[1 or E, 4 or 6]`."""
    n, k, *rest = values = rows[0].tolist()
    packed, tiled = rest[2:] or (1, 1)
    sound = 0 < n <= stored[-2] and 0 < k <= stored[-1] and tuple(rest[:2]) == stored[-2:] and packed == 1
    if not sound or tiled not in (0, 1) or stored[-2] % blocked.TILE_ROWS or not bool((rows == rows[0]).all()):
        raise ValueError(
            f"{name}: {values} does not describe codes of {list(stored[-2:])} weights. The file is damaged; download "
            "it again."
        )
    if k % fmt.block_size:
        raise ValueError(
            f"{name}: K = {k} is not a multiple of {fmt.name}'s block size {fmt.block_size}, so the last block stands "
            "for inputs that the layer does not have. Use fouroversix, or the full-precision checkpoint."
        )
    return (*stored[:-2], n, k), tiled == 1


def _decode(
    fmt: BlockFormat, stored: tuple[int, ...], top: float | None, keys: tuple[str, ...], read: Read
) -> PackedTensors:
    packed, scale, amax, metadata = map(read, keys)
    *experts, rows, columns = stored
    (*_, n, k), tiled = _meaning(keys[3], metadata.reshape(-1, metadata.shape[-1]), stored, fmt)
    scale, blocks = scale.view(torch.uint8).reshape(-1, rows * columns // fmt.block_size), columns // fmt.block_size
    tiles = [blocked.unblock(part, rows, blocks) if tiled else part.view(rows, blocks) for part in scale]
    scale = fmt.scale_from_bytes(torch.stack(tiles)[:, :n, : k // fmt.block_size].contiguous())
    divisor = None
    if top is not None:
        peaks = amax.float().reshape(-1)
        found = [_divisor(peak, top, part) for peak, part in zip(peaks, scale, strict=True)]
        divisor = torch.stack(found).view(*experts, 1)
    packed, scale = packed[..., :n, : k // 2], scale.view(*experts, n, -1)
    return checked(keys[0], fmt, PackedTensors(packed, scale, divisor))


def _divisor(amax: torch.Tensor, top: float, scale: torch.Tensor) -> torch.Tensor:
    """The divisor of a matrix. All its weights are zero where amax is: any divisor does."""
    if float(amax) == 0.0:
        return torch.ones(())
    return divisor_of(amax / top, scale, lambda codes, value: codes * value * amax / top)


def _recognise(checkpoint: Checkpoint) -> bool:
    return (checkpoint.quantization or {}).get("quant_method") == "fouroversix"


LAYOUT = StoredLayout("fouroversix", _recognise, read)
