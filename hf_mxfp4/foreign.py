# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that other tools packed: their matrices find their places in a model and are put there as they are.

`layouts` says what a checkpoint holds, by the names its dense weights would have; the model's own mapping says where
such weights go. transformers' loader then loads the plain tensors only: packed ones it never touches, or it would
merge and cast them as if they were weights.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.utils.logging import tqdm

from hf_mxfp4 import conversion, layouts
from hf_mxfp4.checkpoint_files import Checkpoint, TensorReader, quantization_of, read_headers, read_json
from hf_mxfp4.config import FP4Config
from hf_mxfp4.formats import BlockFormat
from hf_mxfp4.layouts import Contents, PackedMatrix
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packing import Plan
from hf_mxfp4.stored import names_in_model

logger = logging.getLogger(__name__)

_SET_ASIDE = "\0packed by another tool"  # no name of a tensor, and no pattern of a model's mapping matches it
_MERGES = {"MergeModulelist", "Concatenate", "Transpose"}  # operations that make a stack of one matrix per expert
_EXPERT = re.compile(r"(?P<path>.*experts)\.(?P<number>\d+)\.(?P<leaf>gate|up|down)_proj\.weight")


class Part(NamedTuple):
    """Where one packed matrix goes.

    Attributes:
        matrix: the packed matrix.
        leaf: `"weight"` of a linear, or the name of a projection of experts.
        expert: its number in the stack, or `None` for all of a stack (or a linear).
        place: of `places` matrices one below the other (gate, up), which it is.
    """

    matrix: PackedMatrix
    leaf: str
    expert: int | None = None
    place: int = 0
    places: int = 1


class SetAside(WeightRenaming):
    """Keeps tensors from the loader: renames them to what no model has."""

    __slots__ = ("names",)

    def __init__(self, names: set[str]):
        super().__init__([_SET_ASIDE], [_SET_ASIDE])
        self.names = names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """As transformers calls it for each key of the checkpoint: its new name, and no converter."""
        return (_SET_ASIDE if source_key in self.names else source_key), None


def check_device_map(device_map) -> None:
    """Raise `ValueError` for a device map that offloads to the CPU or to disk."""
    devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ValueError(
            "the device_map offloads modules, which works for a model saved by hf_mxfp4 only: load this checkpoint "
            "once without offloading, save_pretrained, and load the saved model with this device_map."
        )


def checkpoint_of(files: list[str] | None, model: PreTrainedModel, quantization: dict[str, Any]) -> Checkpoint:
    """The checkpoint that the files of a model being loaded are."""
    if not files:
        raise ValueError("what another tool packed is loaded from safetensors files, not from a state dict.")
    folders = {Path(file).parent for file in files}
    pickles = [file for file in files if not str(file).endswith(".safetensors")]
    if pickles or len(folders) > 1:
        what = f"{pickles[0]}: only" if pickles else f"{sorted(map(str, folders))}: several folders; only"
        raise ValueError(f"{what} safetensors files of one folder are read, never pickle files.")
    folder = folders.pop()
    path = folder / "config.json"
    config = read_json(path) if path.exists() else model.config.to_dict()
    tensors, metadata = read_headers(map(Path, files))
    return Checkpoint(config, quantization or quantization_of(config, folder), tensors, metadata, folder)


class Adoption:
    """A checkpoint by another tool on its way into a model.

    Attributes:
        checkpoint: its files.
        contents: what they hold.
        parts: by the name of each module to be packed.
        set_aside: what keeps their tensors from the loader.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.contents: Contents = layouts.read(checkpoint)
        self.parts = _places(model, self.contents)
        used = {key for matrix in self.contents.matrices.values() for key in matrix.keys}
        self.set_aside = SetAside(used | self.contents.skipped.keys())

    def plan(self, model: PreTrainedModel, config: FP4Config) -> Plan:
        """What is packed, with its formats written into `config`; everything else is kept.

        Raises:
            ValueError: for packed matrices in modules that cannot be packed here, modules of which a part is packed,
                and parameters of which nothing is stored.
        """
        formats = {path: _format(path, parts) for path, parts in self.parts.items()}
        if not formats:
            raise ValueError(f"this {self.contents.layout} checkpoint holds no packed weights for this model.")
        config.format = Counter(fmt.name for fmt in formats.values()).most_common(1)[0][0]
        other = {path: fmt.name for path, fmt in formats.items() if fmt.name != config.format}
        config.overrides = {f"^{re.escape(path)}$": {"format": name} for path, name in other.items()} or None
        config.origin = self.contents.origin
        if config.requested is None or "activation_format" not in config.requested.given:
            config.activation_format = self.contents.activation_format
        plan = Plan({}, {}, {}, {})
        for path, parts in self.parts.items():
            module = model.get_submodule(path)
            is_experts = conversion.looks_like_experts(path, module)
            (_check_experts if is_experts else _check_linear)(model, path, module, parts)
            recipe = config.recipe(*conversion.aliases(model, path))
            (plan.experts if is_experts else plan.linears)[path] = recipe
        inside = tuple(f"{path}." for path in plan.experts)
        for path, module in model.named_modules():
            packable = isinstance(module, nn.Linear) or conversion.looks_like_experts(path, module)
            if packable and path not in self.parts and not path.startswith(inside):
                plan.kept[path] = "left in full precision by the checkpoint"
        self._check_plain(model, plan)
        return plan

    def _check_plain(self, model: PreTrainedModel, plan: Plan) -> None:
        """What is not packed must be stored plainly, once and in its shape."""
        plain = {n: t for n, t in self.checkpoint.tensors.items() if n not in self.set_aside.names}
        packed, state = plan.weight_names(model), dict(model.state_dict())
        found, split = set(), _targets(model)
        for key, (name, pattern) in names_in_model(model, plain).items():
            if name in packed:
                raise ValueError(
                    f"{key}: the checkpoint holds it both packed and in full precision, or only some of the experts "
                    f"of {name} packed. That cannot be loaded; its files do not belong together, or were edited."
                )
            found |= {name} if pattern is None else {name.replace(split[pattern][0], t) for t in split[pattern]}
            if pattern is None and name in state and _inside(model, name) and plain[key].shape != state[name].shape:
                raise ValueError(
                    f"{key}: shape {list(plain[key].shape)} in {plain[key].file}, {list(state[name].shape)} in the "
                    "model; the checkpoint is of another architecture or size."
                )
        absent = {name for name, _ in model.named_parameters()} - found - packed
        absent -= {tied for tied, source in model.all_tied_weights_keys.items() if source in found}
        absent -= {source for tied, source in model.all_tied_weights_keys.items() if tied in found}
        ignored = model._keys_to_ignore_on_load_missing or ()
        absent = {name for name in absent if not any(re.search(pattern, name) for pattern in ignored)}
        whole = type(model).__name__ in (self.checkpoint.config.get("architectures") or ())
        conversion.check_complete(sorted(name for name in absent if whole or _inside(model, name)))

    def hide_buffers(self, model: nn.Module) -> None:
        """Make the packed buffers ones that the loader allocates on their device, and neither loads nor misses."""
        for path in self.parts:
            module = model.get_submodule(path)
            module._non_persistent_buffers_set.update(module._buffers)
        model._keys_to_ignore_on_load_unexpected.add(_SET_ASIDE)

    def fill(self, model: PreTrainedModel) -> None:
        """Read, rearrange and put every packed matrix into its buffers, one at a time."""
        model._keys_to_ignore_on_load_unexpected.discard(_SET_ASIDE)
        check_device_map(getattr(model, "hf_device_map", None))  # "auto" was not known before
        total = sum(map(len, self.parts.values()))
        reader = TensorReader(self.checkpoint.folder, self.checkpoint.tensors)
        with reader as read, torch.no_grad(), tqdm(total=total, desc="Loading packed weights") as progress:
            for path, parts in self.parts.items():
                module = model.get_submodule(path)
                for part in parts:
                    _put(module, path, part, part.matrix.decode(read))
                    progress.update()
                module._non_persistent_buffers_set.clear()
                module.prepare()

    def report(self, config: FP4Config) -> None:
        """Log what the checkpoint holds or asks for and is not used, or done in another way."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.contents.skipped.items():
            reasons.setdefault(reason, []).append(name)
        lines = [f"{len(names)} tensors (such as {names[0]}): {reason}" for reason, names in reasons.items()]
        lines += self.contents.notes
        if config.activation_format != self.contents.activation_format:
            lines.append(f"activation_format={config.activation_format!r} was given, and goes before what it says.")
        if lines:
            said = f"not all is done as this checkpoint ({self.contents.origin}) says"
            logger.warning("hf_mxfp4: %s:\n  %s", said, "\n  ".join(lines))


# --- places ----------------------------------------------------------------------------------------------------------


def _places(model: PreTrainedModel, contents: Contents) -> dict[str, list[Part]]:
    """Parts by module, by the model's own mapping of dense names; in the order of the checkpoint."""
    state, modules = model.state_dict(), dict(model.named_modules())
    converters = {
        pattern: entry
        for entry in get_model_conversion_mapping(model)
        if isinstance(entry, WeightConverter)
        for pattern in entry.source_patterns
    }
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    places: dict[str, list[Part]] = {}
    homeless = []
    for name, (target, pattern) in names_in_model(model, contents.matrices).items():
        path, _, leaf = target.rpartition(".")
        matrix = contents.matrices[name]
        if target not in state or path not in modules:
            one = _one_expert(modules, target, matrix)
            if one is not None:
                places.setdefault(one[0], []).append(one[1])
            elif not any(
                re.search(ignore, target) for ignore in ignored
            ):  # such as layers that predict further tokens
                homeless.append(name)
            continue
        if pattern is None:
            places.setdefault(path, []).append(Part(matrix, leaf))
            continue
        converter, number = converters[pattern], re.findall(r"\.(\d+)(?=\.)", name)
        operations = {type(operation).__name__ for operation in converter.operations}
        if not operations <= _MERGES or not number or not conversion.looks_like_experts(path, modules[path]):
            raise ValueError(
                f"{name} is packed in the checkpoint, and {type(model).__name__} merges or splits it on load "
                f"({', '.join(sorted(operations))}), which packed weights do not allow. Load it with its own library."
            )
        if "MergeModulelist" not in operations:  # a whole stack: packed along K, whichever way round it is stored
            stack = matrix._replace(transposed=modules[path].is_transposed)
            places.setdefault(path, []).append(Part(stack, leaf))
            continue
        place, places_ = converter.source_patterns.index(pattern), len(converter.source_patterns)
        places.setdefault(path, []).append(Part(matrix, leaf, int(number[-1]), place, places_))
    if homeless:
        raise ValueError(
            f"the checkpoint holds {len(homeless)} packed weights that have no place in {type(model).__name__} (such "
            f"as {homeless[0]}). Load it with the class it was saved from, or download it again."
        )
    return places


def _one_expert(modules: dict[str, nn.Module], name: str, matrix: PackedMatrix) -> tuple[str, Part] | None:
    """Where one expert's matrix goes in a model that is always stored with stacks, and so has no mapping for it: tools
    that take the stacks apart store one matrix per expert even so (Qwen3-VL-MoE)."""
    found = _EXPERT.fullmatch(name)
    module = modules.get(found["path"]) if found else None
    known = module is not None and conversion.looks_like_experts(found["path"], module)
    if not known or FP4Experts.unsupported_reason(module) or module.has_bias or not module.is_concatenated:
        return None
    if found["leaf"] == "down" or not module.has_gate:
        return found["path"], Part(matrix, f"{found['leaf']}_proj", int(found["number"]))
    return found["path"], Part(matrix, "gate_up_proj", int(found["number"]), ("gate", "up").index(found["leaf"]), 2)


def _targets(model: PreTrainedModel) -> dict[str, list[str]]:
    """Target patterns of the model's converters by source pattern."""
    mapping = get_model_conversion_mapping(model)
    return {p: e.target_patterns for e in mapping if isinstance(e, WeightConverter) for p in e.source_patterns}


def _inside(model: PreTrainedModel, name: str) -> bool:
    """Whether a name lies in the base model: what lies outside are heads, which may be new."""
    return model.base_model is model or name.startswith(f"{model.base_model_prefix}.")


def _format(path: str, parts: list[Part]) -> BlockFormat:
    formats = {part.matrix.format.name: part.matrix.format for part in parts}
    if len(formats) > 1:
        raise ValueError(f"{path}: packed in {' and '.join(sorted(formats))}; one module has one format here.")
    return parts[0].matrix.format


def _check_linear(model: PreTrainedModel, path: str, module: nn.Module, parts: list[Part]) -> None:
    tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    shape = None if type(module) is not nn.Linear else (module.out_features, module.in_features)
    if shape is None or parts[0].leaf != "weight":
        raise ValueError(
            f"{path}.{parts[0].leaf} is packed in the checkpoint, and a {type(module).__name__} is not computed from "
            "packed weights here (only nn.Linear and fused experts are). Load it with its own library."
        )
    if path in tied:
        raise ValueError(
            f"{path}.weight is packed in the checkpoint and tied to another weight in the model. Load it with "
            "tie_word_embeddings=False in its config, or with its own library."
        )
    if len(parts) > 1 or tuple(parts[0].matrix.shape) != shape:
        found = [list(part.matrix.shape) for part in parts]
        raise ValueError(
            f"{path}.weight: {', '.join(map(str, found))} in the checkpoint, {list(shape)} in the model; the "
            "checkpoint is of another architecture or size."
        )


def _check_experts(model: PreTrainedModel, path: str, module: nn.Module, parts: list[Part]) -> None:
    reason = FP4Experts.unsupported_reason(module)
    if reason is not None:
        raise ValueError(f"{path} is packed in the checkpoint and cannot be packed here: {reason}.")
    stand_in = FP4Experts.from_experts(module, parts[0].matrix.format)
    for name, (experts, rows, width) in stand_in.shapes.items():
        mine = [part for part in parts if part.leaf == name]
        places = mine[0].places if mine else 1
        wanted = {(expert, place) for expert in range(experts) for place in range(places)}
        wanted = {(None, 0)} if mine and mine[0].expert is None else wanted
        found = Counter((part.expert, part.place) for part in mine)
        absent = sorted(wanted - found.keys(), key=str)
        extra = sorted(place for place, count in found.items() if place not in wanted or count > 1)
        if absent or extra:
            expert, place = (absent or extra)[0]
            raise ValueError(
                f"{path}.{name}: the checkpoint holds {len(mine)} packed matrices of {len(wanted)} "
                f"({'no' if absent else 'an unexpected'} matrix {place} of expert {expert}). All experts of a layer "
                "must be packed, or none; its files do not belong together, or are not complete."
            )
        for part in mine:
            shape = (experts, rows, width) if part.expert is None else (rows // places, width)
            turned = part.expert is None and part.matrix.transposed != module.is_transposed
            if tuple(part.matrix.shape) != shape or turned:
                what = ", transposed" if part.matrix.transposed else ""
                raise ValueError(
                    f"{path}.{name}: {list(part.matrix.shape)}{what} in the checkpoint ({part.matrix.keys[0]}), "
                    f"{list(shape)} in the model; the checkpoint is of another architecture or size."
                )
    others = {part.leaf for part in parts} - stand_in.shapes.keys()
    if others:
        raise ValueError(f"{path}.{min(others)} is packed in the checkpoint; only its projections can be.")


# --- values ----------------------------------------------------------------------------------------------------------


def _put(module: FP4Linear | FP4Experts, path: str, part: Part, tensors: layouts.PackedTensors) -> None:
    """Copy a decoded matrix into its part of a packed module's buffers."""
    transforms = {"pre_quant_scale": tensors.pre_quant_scale, "hadamard": tensors.hadamard}
    transforms = {name: value for name, value in transforms.items() if value is not None}
    if transforms and isinstance(module, FP4Experts):
        raise ValueError(
            f"{path}: the checkpoint transforms the inputs of its experts ({', '.join(transforms)}), which packed "
            "experts do not do here. Load it with its own library."
        )
    if tensors.macro_scale is not None or tensors.outlier_values is not None:
        raise ValueError(f"{path}: macro-blocks and outliers are read from checkpoints of hf_mxfp4 only.")
    device = module._buffers[f"{part.leaf}_packed"].device
    if transforms:
        placed = {name: value.to(device) for name, value in transforms.items()}
        module._register_transforms(module.in_features, device, **placed)
    for suffix in ("packed", "scale", "global_scale"):
        value = getattr(tensors, suffix)
        buffer = module._buffers.get(f"{part.leaf}_{suffix}")
        if (value is None) != (buffer is None):
            raise ValueError(f"{path}.{part.leaf}: decoded with{'out' if value is None else ''} a {suffix}.")
        if buffer is None:
            continue
        place = buffer if part.expert is None else buffer[part.expert]
        size = place.shape[0] // part.places
        if part.places > 1:
            place = place[part.place * size : (part.place + 1) * size]
        if value.dtype != buffer.dtype:
            raise ValueError(f"{path}.{part.leaf}: {suffix} was decoded to {value.dtype}, expected {buffer.dtype}.")
        place.copy_(value.expand(place.shape) if suffix == "global_scale" else value)
