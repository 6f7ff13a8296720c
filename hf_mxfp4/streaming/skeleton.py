# SPDX-License-Identifier: Apache-2.0
"""What `from_pretrained` would make of a checkpoint, without its weights: the packed model on the meta device, and
which stored tensors each of its parameters is made of.

transformers itself builds and renames: its `from_pretrained` runs as always, except that the two methods which load
weights only note where these would go.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.loading_report import LoadStateDictInfo

from hf_mxfp4 import packing
from hf_mxfp4.config import FP4Config
from hf_mxfp4.streaming.source import Source


class _Parameters(NamedTuple):
    """What converters ask a model for: shapes of its dense parameters."""

    shapes: dict[str, torch.Size]

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")


class Load(NamedTuple):
    """Stored tensors that make one or more parameters or buffers of the dense model.

    Attributes:
        target: full name of the first of them.
        keys: names of stored tensors, in the order the converter wants, by its pattern.
        converter: `None` if the one tensor is the parameter.
        shapes: shapes of all it makes, by full name.
    """

    target: str
    keys: dict[str, tuple[str, ...]]
    converter: WeightConverter | None
    shapes: dict[str, torch.Size]

    @property
    def names(self) -> list[str]:
        """Of all stored tensors."""
        return [key for keys in self.keys.values() for key in keys]

    def convert(self, model: nn.Module, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The converter's result for tensors by pattern, by full name."""
        converter = copy.deepcopy(self.converter)
        for pattern, found in tensors.items():
            for tensor in found:
                converter.add_tensor(self.target, self.target, pattern, tensor)
        dense = _Parameters(self.shapes) if self.shapes else model  # the model's own are packed by then
        made = converter.convert(self.target, model=dense, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class Skeleton(NamedTuple):
    """A packed model on the meta device and where its tensors come from.

    Attributes:
        model: as `from_pretrained` returns it, but for the values; its config says how it is quantized.
        plan: which modules are packed, and how.
        loads: by the full name of each dense parameter or buffer.
        dtypes: that each of them is loaded in.
        ignored: stored tensors that the model does not use.
    """

    model: PreTrainedModel
    plan: packing.Plan
    loads: dict[str, Load]
    dtypes: dict[str, torch.dtype]
    ignored: list[str]


def build(source: Source, config: FP4Config, trust_remote_code: bool = False) -> Skeleton:
    """The skeleton of a checkpoint in full precision.

    Raises:
        ValueError: naming what does not fit: a model class that is not known, modules that cannot be packed, stored
            tensors that are missing or of another shape or dtype.
    """
    folder = source.folder
    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    cls = model_class(model_config, folder, trust_remote_code)
    note = _Note(source, config)
    methods = {"_load_pretrained_model": staticmethod(note.load), "_finalize_model_loading": staticmethod(note.tie)}
    absent = [name for name in methods if not hasattr(cls, name)]
    if absent:  # else it would load all weights
        raise RuntimeError(f"transformers {transformers.__version__} has no {absent[0]}; install one of 5.17 to 5.23.")
    standin = type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})
    model = standin.from_pretrained(
        folder, config=model_config, quantization_config=config, dtype="auto", local_files_only=True
    )
    model.__class__ = cls
    return Skeleton(model, note.plan, note.loads, note.dtypes, note.ignored)


def model_class(config: Any, folder: Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that a config.json names.

    Raises:
        ValueError: if it names none that is known.
    """
    name = (config.architectures or [None])[0]
    for auto_class, entry in (getattr(config, "auto_map", None) or {}).items() if trust_remote_code else ():
        if isinstance(entry, str) and entry.rpartition(".")[2] == name:
            custom = get_class_from_dynamic_module(entry, folder)
            custom.register_for_auto_class(auto_class)  # so that save_pretrained saves its code
            return custom
    found = getattr(transformers, name or "", None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(
            f"config.json names the architecture {name!r}, which transformers {transformers.__version__} does not "
            'have. Write one it has into "architectures", or pass trust_remote_code=True if the folder holds code.'
        )
    return found


class _Note:
    """Stands in for the loading of weights."""

    def __init__(self, source: Source, config: FP4Config):
        self.source, self.config = source, config
        self.loads: dict[str, Load] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.ignored: list[str] = []
        self.plan: packing.Plan

    def load(self, model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """In place of `PreTrainedModel._load_pretrained_model`."""
        quantizer, state = load_config.hf_quantizer, model.state_dict()
        self.plan = quantizer.plan
        mapping = load_config.weight_mapping or []
        for target, (converter, keys) in self._targets(model, state, mapping).items():
            self._add(model, state, target, converter, keys)
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        self._note_dtypes(state, load_config, quantizer)
        quantizer.loader = self
        missing = set(state) - set(self.loads)
        return LoadStateDictInfo(missing, set(), set(), [], {}, set()), None

    def _targets(self, model, state, mapping) -> dict[str, tuple[WeightConverter | None, dict[str, list[str]]]]:
        """Stored tensors by the first parameter they load into; twin of `convert_and_load_state_dict_in_model`."""
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, found = model.base_model_prefix, {}
        for key in sorted(self.source.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                self.ignored.append(key)
                continue
            converter, keys = found.setdefault(name, (by_pattern.get(pattern), {}))
            if converter is None and keys:
                raise ValueError(f"{key} and {keys[name][0]} both load into {name}. Remove one of them.")
            keys.setdefault(pattern or name, []).append(key)
        return found

    def _add(self, model, state, target: str, converter, keys: dict[str, list[str]]) -> None:
        load = Load(target, {pattern: tuple(names) for pattern, names in keys.items()}, converter, {})
        if converter is None:
            load.shapes[target] = torch.Size(self.source.tensors[load.names[0]].shape)
        else:
            empty = {pattern: [self.source.empty(key) for key in found] for pattern, found in keys.items()}
            try:
                load.shapes.update({name: tensor.shape for name, tensor in load.convert(model, empty).items()})
            except Exception as error:  # whatever operation of transformers it was
                raise ValueError(f"{', '.join(load.names[:3])} ... cannot be joined to {target}: {error}.") from error
        for name, shape in load.shapes.items():
            if name in state and shape != state[name].shape:
                raise ValueError(
                    f"{name}: shape {list(shape)} in the checkpoint ({load.names[0]}), {list(state[name].shape)} in "
                    "the model; the checkpoint is of another architecture or size, or incomplete."
                )
            if name in state:
                self.loads[name] = load

    def _note_dtypes(self, state, load_config, quantizer) -> None:
        plan = load_config.dtype_plan or {}
        pattern, groups, _ = build_glob_alternation(list(plan)) if plan else (None, {}, None)
        packed = quantizer.weight_names
        for name, tensor in state.items():
            found = pattern.search(name) if pattern is not None else None
            dtype = load_config.dtype if name in packed else tensor.dtype
            self.dtypes[name] = dtype if found is None else plan[groups[found.lastgroup]]
            if name not in packed:
                self.dtypes[name] = quantizer.dtypes.get(name, self.dtypes[name])

    def tie(self, model, load_config, info: LoadStateDictInfo) -> LoadStateDictInfo:
        """In place of `PreTrainedModel._finalize_model_loading`."""
        for target, origin in list(model.all_tied_weights_keys.items()):
            if target in self.loads and origin in self.loads:
                if self._equal(target, origin):
                    info.missing_keys.add(target)
                else:  # as transformers does: the checkpoint is right, its config is not
                    del model.all_tied_weights_keys[target]
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        self._share_loads(model.all_tied_weights_keys)
        absent = sorted(info.missing_keys)
        if absent:
            raise ValueError(
                f"the checkpoint holds no values for {len(absent)} tensors of {type(model).__name__}: "
                f"{', '.join(absent[:5])}. Only from_pretrained can start new layers: quantize with it, and save."
            )
        return info

    def _share_loads(self, tied: dict[str, str]) -> None:
        """Tied parameters are saved under one name, and may be stored under another."""
        for origin in set(tied.values()):
            names = [origin, *(target for target, other in tied.items() if other == origin)]
            there = next((name for name in names if name in self.loads), None)
            for name in names if there is not None else ():
                if name not in self.loads and self.loads[there].converter is None:
                    shapes = {name: self.loads[there].shapes[there]}
                    self.loads[name] = self.loads[there]._replace(target=name, shapes=shapes)
                    self.dtypes[name] = self.dtypes[there]

    def _equal(self, first: str, second: str) -> bool:
        loads = self.loads[first], self.loads[second]
        if any(load.converter is not None for load in loads) or loads[0].shapes[first] != loads[1].shapes[second]:
            return False
        names = loads[0].names[0], loads[1].names[0]
        for start, rows in self.source.pieces(names[0]):
            other = self.source.rows(names[1], start, start + len(rows))
            if not torch.equal(rows.to(self.dtypes[first]), other.to(self.dtypes[second])):
                return False
        return True

    def finish(self, model: nn.Module) -> None:
        """As `conversion.QuantizeOnLoad.finish`: all that was planned is packed."""
        packing.replace_with_empty(model, self.plan, self.config)
