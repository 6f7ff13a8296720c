# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' nvfp4-pack-quantized and mxfp4-pack-quantized, as llm-compressor writes them.

`P.weight_packed` U8 `[N, K/2]`, `P.weight_scale` E4M3 `[N, K/16]` or E8M0 `[N, K/32]`, for NVFP4
`P.weight_global_scale` F32 `[1]`, which divides. Source: compressed-tensors 0.20, `compressors/nvfp4/base.py`,
`compressors/mxfp4/base.py`, `quantization/lifecycle/apply.py` (which group a module belongs to).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import HF_MXFP4_KEY, WRITTEN
from hf_mxfp4.formats import MXFP4, NVFP4, BlockFormat
from hf_mxfp4.layouts.base import (
    EDITED,
    Contents,
    PackedMatrix,
    PackedTensors,
    Read,
    StoredLayout,
    checked,
    expect_tensor_scale,
    stored_format,
    weight_shape,
)
from hf_mxfp4.layouts.targets import Patterns, aliases, refuse_unpacked

_FORMATS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}
_PACKED, _SCALE, _GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"
_SKIPPED = {
    "input_global_scale": "tensor scale of activations, which are scaled token by token here",
    "input_scale": "scale of activations, which are scaled token by token here",
    "output_scale": "scale of outputs, which are not quantized here",
} | {
    f"{which}_{what}": "scale of a quantized KV cache; the cache is kept in full precision here"
    for which in "qkv"
    for what in ("scale", "zero_point", "global_scale")
}


class Group(NamedTuple):
    """A row of `config_groups`: its name there, format, targets and `input_activations`."""

    name: str
    format: BlockFormat
    targets: tuple[str, ...]
    activations: dict[str, Any] | None


def read(checkpoint: Checkpoint, layout: str = "compressed-tensors") -> Contents:
    """Contents of a compressed-tensors checkpoint; see `StoredLayout.read`."""
    config = checkpoint.quantization or {}
    _refuse_extras(config)
    notes: list[str] = []
    groups = _groups(config, notes)
    packed = [key.removesuffix(f".{_PACKED}") for key in checkpoint.tensors if key.endswith(f".{_PACKED}")]
    if not packed:
        raise ValueError(
            f"quantization_config promises {' and '.join(sorted({group.format.name for group in groups}))}, and no "
            f"file holds a tensor *.{_PACKED}. {EDITED}"
        )
    finder = _GroupFinder(groups, config.get("ignore"))
    used = {}
    matrices = {f"{module}.weight": _matrix(checkpoint, module, finder, used) for module in packed}
    _refuse_missing(checkpoint, groups, finder, set(packed))
    skipped = {}
    for key in checkpoint.tensors:
        module, _, last = key.rpartition(".")
        if last in _SKIPPED:
            skipped[key] = _SKIPPED[last]
        elif f"{module}.weight" in matrices and last.startswith("weight_") and last not in (_PACKED, _SCALE, _GLOBAL):
            raise ValueError(f"{key}: compressed-tensors' {last} of packed weights is not supported here.")
    activation_format = _activations(list(used.values()), notes)
    if config.get("kv_cache_scheme"):
        notes.append("It asks for a quantized KV cache; the cache is kept in full precision.")
    version = config.get("version")
    origin = "compressed-tensors" + (f" {version}" if isinstance(version, str) else "")
    return Contents(layout, origin, matrices, skipped, tuple(notes), activation_format)


def _refuse_extras(config: dict[str, Any]) -> None:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config of format {sparsity['format']!r} is not supported, only dense weights.")
    transform = config.get("transform_config")
    groups = transform.get("config_groups") if isinstance(transform, dict) else None
    if groups:
        named = ", ".join(groups) if isinstance(groups, dict) else groups
        raise ValueError(
            f"transform_config asks for transforms ({named}), which are not "
            "applied here: the weights are in another basis. Use vLLM, or a checkpoint without transforms."
        )


def _groups(config: dict[str, Any], notes: list[str]) -> list[Group]:
    found = config.get("config_groups")
    if not isinstance(found, dict) or not all(isinstance(group, dict) for group in found.values()):
        raise ValueError(
            "quantization_config of compressed-tensors has no config_groups. Download the checkpoint again."
        )
    groups = []
    for name, group in found.items():
        weights = group.get("weights")
        if weights is None:
            notes.append(f"{name} of its config quantizes no weights ({group.get('targets')}): not followed.")
            continue
        if not isinstance(weights, dict):
            raise ValueError(f"config_groups.{name}: weights {weights!r} is not a JSON object. {EDITED}")
        targets = group.get("targets") or ()
        if not isinstance(targets, (list, tuple)) or not all(isinstance(target, str) for target in targets):
            raise ValueError(f"config_groups.{name}: targets {targets!r} is not a list of names.")
        groups.append(Group(name, _format(config, name, group), tuple(targets), group.get("input_activations")))
    if not groups:
        raise ValueError("quantization_config of compressed-tensors has no group that quantizes weights.")
    return groups


def _format(config: dict[str, Any], name: str, group: dict[str, Any]) -> BlockFormat:
    """The format of a group: by its own `format`, else the config's, else by its arguments; all must agree."""
    weights = group["weights"]
    arguments = {key: weights.get(key, default) for key, default in (("num_bits", 4), ("type", "float"))}
    written = group.get("format") or config.get("format")
    if written in (None, "mixed-precision"):
        written = next((key for key, fmt in _FORMATS.items() if fmt.block_size == weights.get("group_size")), written)
    fmt = _FORMATS.get(str(written))
    described = ", ".join(
        f"{key}={value}" for key, value in weights.items() if key in ("num_bits", "type", "group_size")
    )
    if fmt is None or arguments != {"num_bits": 4, "type": "float"}:
        raise ValueError(
            f"config_groups.{name}: {written} ({described}; targets {group.get('targets')}) is not supported; only "
            f"{' and '.join(_FORMATS)} are. Use the full-precision checkpoint, or one in these formats alone."
        )
    if weights.get("group_size", fmt.block_size) != fmt.block_size:
        raise ValueError(f"config_groups.{name}: format {written} contradicts its weights ({described}).")
    if weights.get("symmetric") is False:
        raise ValueError(f"config_groups.{name}: asymmetric weights (zero points) are not supported.")
    return fmt


class _GroupFinder:
    """Which group a module belongs to: by full name, else by pattern, else by class."""

    def __init__(self, groups: list[Group], ignore: list[str] | None):
        self.by_target = {target: group for group in groups for target in group.targets}
        full = [target for target in self.by_target if "." in target or target.startswith("re:")]
        self.named = Patterns(sorted(full), "targets")
        # A name without a dot is a class, or the name of a module at the top such as lm_head.
        self.classes = [target for target in self.by_target if target not in full]
        self.ignored = Patterns(ignore, "ignore")

    def candidates(self, module: str) -> list[Group]:
        """The groups a module may belong to: one, but several where classes decide, which no header tells."""
        target = self.named.find(module)
        if target is not None:
            return [self.by_target[target]]
        for top in self.classes:
            if top in aliases(module):
                return [self.by_target[top]]
        return [self.by_target[name] for name in self.classes]


def _matrix(checkpoint: Checkpoint, module: str, finder: _GroupFinder, used: dict[str, Group]) -> PackedMatrix:
    packed, scale, divisor = (f"{module}.{name}" for name in (_PACKED, _SCALE, _GLOBAL))
    fmt = stored_format(checkpoint, scale)
    entry = finder.ignored.says(module)
    if entry is not None:
        raise ValueError(f"{packed} is stored packed, and quantization_config lists {entry!r} in ignore. {EDITED}")
    groups = finder.candidates(module)
    group = next((group for group in groups if group.format is fmt), None)
    if group is None:
        says = " or ".join(f"{group.format.name} ({group.name})" for group in groups) or "nothing of this module"
        raise ValueError(
            f"{packed}: its scales are stored as {fmt.name}'s, and quantization_config says {says}. {EDITED}"
        )
    used[group.name] = group
    shape = weight_shape(checkpoint, fmt, packed, scale)
    keys = (packed, scale)
    if fmt.has_global_scale:
        expect_tensor_scale(checkpoint, divisor)
        keys += (divisor,)
    return PackedMatrix(fmt, shape, keys, partial(_decode, fmt, keys))


def _decode(fmt: BlockFormat, keys: tuple[str, ...], read: Read) -> PackedTensors:
    packed, scale, *divisor = map(read, keys)
    divisor = divisor[0].reshape(1) if divisor else None
    return checked(keys[0], fmt, PackedTensors(packed, fmt.scale_from_bytes(scale), divisor))


def _refuse_missing(checkpoint: Checkpoint, groups: list[Group], finder: _GroupFinder, packed: set[str]) -> None:
    """Raise `ValueError` for what the config promises by name, and for linears of its classes, that are not packed."""
    names = {alias for module in packed for alias in aliases(module)}
    for group in groups:
        for target in group.targets:
            full = "." in target and not target.startswith("re:")
            if full and not names.intersection(aliases(target)) and finder.ignored.find(target) is None:
                raise ValueError(
                    f"quantization_config promises {target} in {group.format.name} ({group.name}), and no file holds "
                    f"{target}.{_PACKED}. {EDITED}"
                )

    def promised(module: str) -> bool:
        targeted = finder.named.find(module) is not None or "Linear" in finder.classes
        return targeted and not finder.ignored.excuses(module)

    refuse_unpacked(checkpoint, packed, promised)


def _activations(groups: list[Group], notes: list[str]) -> str | None:
    """`"same"` if all groups in use ask for activations in their own format; other wishes become notes."""
    same = []
    for group in groups:
        asked = group.activations
        fp4 = isinstance(asked, dict) and asked.get("num_bits", 4) == 4 and asked.get("type", "float") == "float"
        same.append(fp4)
        if asked and not fp4:
            wish = f"{asked.get('num_bits')}-bit {asked.get('type')}" if isinstance(asked, dict) else repr(asked)
            notes.append(f"{group.name} asks for {wish} activations; they are kept in full precision.")
    if all(same):
        notes.append(
            "It asks for activations in FP4 (W4A4): rounded token by token, with scales of each token instead of the "
            "stored ones."
        )
        return "same"
    if any(same):
        notes.append("Only some of its groups ask for activations in FP4; they are kept in full precision everywhere.")
    return None


def _recognise(checkpoint: Checkpoint) -> bool:
    config = checkpoint.quantization or {}
    return config.get("quant_method") == WRITTEN["portable"].quant_method and HF_MXFP4_KEY not in config


LAYOUT = StoredLayout("compressed-tensors", _recognise, read)
