# SPDX-License-Identifier: Apache-2.0
"""NVIDIA ModelOpt's NVFP4 and MXFP4 checkpoints.

`P.weight` U8 `[N, K/2]`, `P.weight_scale` E4M3 `[N, K/16]` or E8M0 `[N, K/32]`, for NVFP4 `P.weight_scale_2` F32,
which **multiplies**, and with AWQ `P.pre_quant_scale` `[K]`. Fused experts that their model has as `[E, K, N]`
(gpt-oss, Llama 4) stay so: `X.gate_up_proj` U8 `[E, K/2, N]`, `X.gate_up_proj_weight_scale` `[E, K/16, N]`.

Source: nvidia-modelopt 0.47, `export/unified_export_hf.py` (`_export_quantized_weight`), `export/quant_utils.py`
(names of algorithms), `quantization/qtensor/nvfp4_tensor.py` (the decoded weight is `E2M1 * (scale * scale_2)`).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import FULL_PRECISION
from hf_mxfp4.formats import MXFP4, NVFP4, BlockFormat
from hf_mxfp4.layouts.base import (
    EDITED,
    Contents,
    PackedMatrix,
    PackedTensors,
    Read,
    StoredLayout,
    checked,
    divisor_of,
    expect,
    expect_tensor_scale,
    stored_format,
    weight_shape,
)
from hf_mxfp4.layouts.targets import Patterns, core, refuse_unpacked


class Algorithm(NamedTuple):
    """What a `quant_algo` means: the format of weights, and whether activations are in FP4 too (`None`: not said)."""

    format: BlockFormat
    activations: bool | None


_ALGORITHMS = {
    "NVFP4": Algorithm(NVFP4, True),
    "NVFP4_AWQ": Algorithm(NVFP4, True),
    "W4A16_NVFP4": Algorithm(NVFP4, False),
    "MXFP4": Algorithm(MXFP4, None),
}
_MIXED = "MIXED_PRECISION"
_KV_CACHE = "scale of a quantized KV cache; the cache is kept in full precision here"
_SKIPPED = {
    "input_scale": "tensor scale of activations, which are scaled token by token here",
    "output_scale": "scale of outputs, which are not quantized here",
    ".k_scale": _KV_CACHE,
    ".v_scale": _KV_CACHE,
    "k_proj.k_bias": _KV_CACHE,
    "v_proj.v_bias": _KV_CACHE,
}


def read(checkpoint: Checkpoint) -> Contents:
    """Contents of a ModelOpt checkpoint; see `StoredLayout.read`."""
    config = checkpoint.quantization or {}
    said = config["quantization"] if isinstance(config.get("quantization"), dict) else config
    algorithms = _Algorithms(said)
    svd = next((key for key in checkpoint.tensors if ".svdquant_lora_" in key), None)
    if svd is not None:
        raise ValueError(f"{svd}: SVDQuant's low-rank branches are not supported. Use the full-precision checkpoint.")
    matrices, used = {}, set()
    for key, tensor in checkpoint.tensors.items():
        module, _, last = key.rpartition(".")
        prefix = key if last == "weight" else f"{key}_weight"
        scaled = last == "weight" or any(f"{prefix}_{end}" in checkpoint.tensors for end in ("scale", "scale_2"))
        if tensor.dtype == "U8" and scaled:
            matrices[key] = matrix = _matrix(checkpoint, key, prefix)
            algorithm = algorithms.of(module)
            if algorithm is None or matrix.format is not algorithm.format:
                says = "that it is not quantized" if algorithm is None else algorithm.format.name
                raise ValueError(
                    f"{key} is stored packed in {matrix.format.name}, and the config says {says}. {EDITED}"
                )
            used.add(algorithm)
    algorithms.refuse_missing(checkpoint, list(matrices))
    taken = {key for matrix in matrices.values() for key in matrix.keys}
    alone = [key for key in checkpoint.tensors if key.endswith("pre_quant_scale") and key not in taken]
    if alone:
        raise ValueError(f"{alone[0]} multiplies the input of no packed linear layer. {EDITED}")
    skipped = {key: why for key in checkpoint.tensors for end, why in _SKIPPED.items() if key.endswith(end)}
    producer = config.get("producer")
    version = producer.get("version") if isinstance(producer, dict) else None
    origin = "modelopt" + (f" {version}" if isinstance(version, str) else "")
    same = all(algorithm.activations for algorithm in used)
    return Contents("modelopt", origin, matrices, skipped, tuple(_notes(said, used)), "same" if same else None)


class _Algorithms:
    """Which algorithm each module was quantized with, as a config says: one for all, or one for each layer."""

    def __init__(self, said: dict[str, Any]):
        self.excluded = Patterns(said.get("exclude_modules", said.get("ignore")), "exclude_modules")
        self.layers: dict[str, Algorithm] = {}
        name = str(said.get("quant_algo")).upper()
        if name != _MIXED:
            self.default = _algorithm(name, said, "the whole model")
        else:
            self.default = None
            self._read_layers(said.get("quantized_layers"))
        self.named = Patterns(list(self.layers), "quantized_layers")

    def _read_layers(self, layers: Any) -> None:
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise ValueError(f"quant_algo {_MIXED} without quantized_layers, a map of layer to quant_algo. {EDITED}")
        count = Counter(str(fields.get("quant_algo")).upper() for fields in layers.values())
        for layer, fields in layers.items():
            name = str(fields.get("quant_algo")).upper()
            self.layers[layer] = _algorithm(name, fields, f"{count[name]} layers such as {layer}")

    def of(self, module: str) -> Algorithm | None:
        """The algorithm of a module; `None` if it stays in full precision."""
        if self.excluded.says(module) is not None:
            return None
        return self.default or self.layers.get(self.named.covering(module))

    def refuse_missing(self, checkpoint: Checkpoint, packed: list[str]) -> None:
        """Raise `ValueError` for what the config promises to be packed and the files do not hold packed."""
        if not packed:
            raise ValueError(f"the config says that weights are in FP4, and no file holds a packed weight. {EDITED}")
        stored = {core(".".join(key.split(".")[:end])) for key in packed for end in range(key.count(".") + 2)}
        for layer, entry in self.named.names.items():
            if layer not in stored:
                raise ValueError(
                    f"quantized_layers of the config names {entry} ({self.layers[entry].format.name}), and no file "
                    f"holds its packed weight. {EDITED}"
                )

        def promised(module: str) -> bool:
            named = self.default is not None or self.named.find(module) is not None
            return named and not self.excluded.excuses(module)

        refuse_unpacked(checkpoint, {key.removesuffix(".weight") for key in packed}, promised)


def _algorithm(name: str, fields: dict[str, Any], of: str) -> Algorithm:
    if name not in _ALGORITHMS:
        raise ValueError(
            f"ModelOpt's quant_algo {name} ({of}) is not supported; {', '.join(_ALGORITHMS)} are, and {_MIXED} of "
            "them. Use the full-precision checkpoint, or one in these formats alone."
        )
    found, size = _ALGORITHMS[name], fields.get("group_size")
    if size and size != found.format.block_size:
        raise ValueError(f"{name} with group_size {size} ({of}): only {found.format.block_size} is supported.")
    return found


def _matrix(checkpoint: Checkpoint, key: str, prefix: str) -> PackedMatrix:
    """A packed weight whose scales are named `{prefix}_scale`, `{prefix}_scale_2`."""
    tensors, scale = checkpoint.tensors, f"{prefix}_scale"
    fmt = stored_format(checkpoint, scale)
    shape = tensors[key].shape
    stacked = len(shape) == 3
    # Codes are 8 (or 16) times as many as scales along the dimension that is packed.
    transposed = stacked and tensors[scale].shape == (shape[0], 2 * shape[1] // fmt.block_size, shape[2])
    if transposed:
        shape = (shape[0], shape[2], 2 * shape[1])
        if 0 in shape or shape[2] % fmt.block_size:
            raise ValueError(f"{key}: shape {list(tensors[key].shape)}, expected [E, K/2, N], not empty. {EDITED}")
    else:
        shape = weight_shape(checkpoint, fmt, key, scale, stacked)
    names = {"packed": key, "scale": scale}
    if fmt.has_global_scale:
        names["multiplier"] = f"{prefix}_scale_2"
        _check_multiplier(checkpoint, names["multiplier"], shape)
    pre_quant_scale = f"{key.removesuffix('.weight')}.pre_quant_scale"
    if key.endswith(".weight") and pre_quant_scale in tensors:
        names["pre_quant_scale"] = pre_quant_scale
        expect(checkpoint, pre_quant_scale, FULL_PRECISION, (shape[-1],))
    return PackedMatrix(fmt, shape, tuple(names.values()), partial(_decode, fmt, names, transposed), transposed)


def _check_multiplier(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """One tensor scale for a matrix; for fused experts one each, or one for all."""
    expect(checkpoint, name, "F32", None)
    found = checkpoint.tensors[name].shape
    if len(shape) == 2 or found != (shape[0], *[1] * (len(found) - 1)):
        expect_tensor_scale(checkpoint, name)


def _decode(fmt: BlockFormat, names: dict[str, str], transposed: bool, read: Read) -> PackedTensors:
    found = {name: read(stored) for name, stored in names.items()}
    packed, scale = found["packed"], fmt.scale_from_bytes(found["scale"])
    if transposed:
        packed, scale = packed.mT, scale.view(torch.uint8).mT
        scale = fmt.scale_from_bytes(scale.contiguous())
    divisor = None
    if "multiplier" in found:
        stack = packed.shape[:-2]
        divisor = divisor_of(found["multiplier"].flatten().expand(stack.numel()).view(stack), scale)[..., None]
    return checked(
        names["packed"], fmt, PackedTensors(packed, scale, divisor, pre_quant_scale=found.get("pre_quant_scale"))
    )


def _notes(said: dict[str, Any], used: set[Algorithm]) -> list[str]:
    notes = []
    activations = {algorithm.activations for algorithm in used}
    if activations == {True}:
        notes.append(
            "It asks for activations in FP4 (W4A4): rounded token by token, with scales of each token instead of the "
            "stored ones."
        )
    elif True in activations:
        notes.append("Only some of its layers ask for activations in FP4; they are kept in full precision everywhere.")
    if None in activations:
        notes.append("It does not say whether activations are to be in MXFP4; they are kept in full precision.")
    cache = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    if cache:
        notes.append("It asks for a quantized KV cache; the cache is kept in full precision.")
    return notes


def _recognise(checkpoint: Checkpoint) -> bool:
    config = checkpoint.quantization or {}
    producer = config.get("producer")
    made_by = producer.get("name") if isinstance(producer, dict) else None
    method = config.get("quant_method")
    return method in ("modelopt", "modelopt_fp4") or (method is None and made_by == "modelopt")


LAYOUT = StoredLayout("modelopt", _recognise, read)
