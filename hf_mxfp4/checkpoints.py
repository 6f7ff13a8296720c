# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and meanings of stored layouts, and the checks a checkpoint must pass before a tensor is loaded.

Two layouts are written. `portable` is compressed-tensors' own (nvfp4-pack-quantized, mxfp4-pack-quantized): read by
vLLM, by transformers with compressed-tensors, and by us. `own` holds what other readers would get wrong (fused
experts): its codes are stored under the dense weight's name, so a reader without this package stops at a shape
mismatch instead of running on random weights.

Source of the portable layout: compressed-tensors 0.20, `compressors/nvfp4/base.py` and `compressors/mxfp4/base.py`;
its tensor scale divides: `w = E2M1[code] * weight_scale / weight_global_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import SAFETENSORS_DTYPES, StoredTensor
from hf_mxfp4.formats import MXFP4, NVFP4, BlockFormat

HF_MXFP4_KEY = "hf_mxfp4"  # our recipe inside a portable checkpoint's quantization_config; other readers ignore it


class Layout(NamedTuple):
    """A stored layout: its `quant_method`, and the name (in place of `weight`) its codes are stored under."""

    quant_method: str
    packed_name: str


FULL_PRECISION = ("BF16", "F16", "F32", "F64")  # stored dtypes a weight can be quantized from
OUTLIER_ENDINGS = ("_outlier_values", "_outlier_columns")  # whose length only the checkpoint knows
PACKED_ENDINGS = ("_packed", "_scale", *OUTLIER_ENDINGS)  # of the names of packed tensors in a model

WRITTEN = {"portable": Layout("compressed-tensors", "weight_packed"), "own": Layout("hf_mxfp4", "weight")}

# How compressed-tensors names and describes each format in config.json.
_CT_FORMATS = {
    NVFP4.name: (
        "nvfp4-pack-quantized",
        {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    ),
    MXFP4.name: ("mxfp4-pack-quantized", {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}),
}

# Linears that serving engines fuse into one matrix, which then has one tensor scale.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def compressed_tensors_config(modules: dict[str, BlockFormat], ignore: Iterable[str]) -> dict:
    """The `quantization_config` compressed-tensors writes for weight-only FP4.

    Args:
        modules: packed modules by name and format. The most frequent format is written as the group of all linears,
            the others as groups of full names.
        ignore: names (or `re:` patterns) of the modules that are not packed.
    """
    names: dict[str, list[str]] = {}
    for name, fmt in modules.items():
        names.setdefault(fmt.name, []).append(name)
    by_size = sorted(names, key=lambda fmt: -len(names[fmt]))
    groups = {}
    # compressed-tensors prefers a full name to a class, so the group of all linears takes the rest.
    for number, fmt in enumerate(reversed(by_size)):
        ct_format, arguments = _CT_FORMATS[fmt]
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **arguments}
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if fmt == by_size[0] else names[fmt],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": ct_format,
        }
    formats = [_CT_FORMATS[fmt][0] for fmt in by_size]
    return {
        "config_groups": groups,
        "quant_method": WRITTEN["portable"].quant_method,
        "kv_cache_scheme": None,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": sorted(ignore),
    }


class Expected(NamedTuple):
    """What a module's tensor needs from a checkpoint: dtype (`None`: any), shape and number of stored tensors."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    count: int = 1


def check_stored(expected: dict[str, Expected], found: dict[str, list[tuple[str, StoredTensor]]]) -> None:
    """Compare what packed modules need with what a checkpoint holds.

    Args:
        expected: by name in the model.
        found: by name in the model: the stored tensors that load into it, with their names in the checkpoint.

    Raises:
        ValueError: naming up to five tensors that are missing or have another dtype or shape.
    """
    wrong = []
    for name, (dtype, shape, count) in expected.items():
        stored = found.get(name, [])
        if len(stored) != count:
            wrong.append(f"{name}: {len(stored)} of {count} tensors found")
        for key, tensor in stored:
            wanted = SAFETENSORS_DTYPES.get(dtype, tensor.dtype)
            if tensor.dtype != wanted or tensor.shape != shape:
                wrong.append(
                    f"{key}: {tensor.dtype} {list(tensor.shape)} in {tensor.file}, expected {wanted} {list(shape)}"
                )
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ValueError(
            "the checkpoint does not hold what its quantization_config promises: " + "; ".join(wrong[:5]) + more + ". "
            "Its config.json and safetensors files do not belong together, or were edited; download or quantize it "
            "again."
        )


def check_scales(name: str, fmt: BlockFormat, scale: torch.Tensor, global_scale: torch.Tensor | None) -> None:
    """Raise `ValueError` on stored scales that decode to NaN, zero, or a negative value."""
    byte = scale.view(torch.uint8)
    bad = int(((byte > fmt.top_byte) | (fmt.decode_scale(byte) == 0)).sum())
    if bad:
        raise ValueError(
            f"{name}: {bad} block scales are negative, NaN or out of {fmt.name}'s range; the file is damaged."
        )
    if global_scale is not None and not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
        raise ValueError(f"{name}: the tensor scale is {global_scale.flatten().tolist()[:4]}, not a positive number.")


def key_pattern(path: str) -> str:
    """Regex for a checkpoint key that ends in `path`, exactly, and is not one of an expert's.

    Look-arounds and escaped dots only: those transformers takes back when it reverses a renaming.
    """
    not_an_expert = "".join(rf"(?<!experts\.{digits}\.)" for digits in (r"\d", r"\d\d", r"\d\d\d"))
    return rf"(?<![^.]){not_an_expert}" + path.replace(".", r"\.") + r"(?!\w)"
