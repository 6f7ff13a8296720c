# SPDX-License-Identifier: Apache-2.0
"""What is written, into which files, and the units of work it is made by: each one small enough to be held in memory.

The names and the order of what is written come from running transformers' own saving on the skeleton's empty tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_mxfp4.checkpoint_writer import Shard, TensorSpec, plan_shards
from hf_mxfp4.streaming.skeleton import Load, Skeleton
from hf_mxfp4.streaming.source import Source

SLICE = 1 << 25  # bytes of full-precision experts quantized at once, where one expert is smaller


class Part(NamedTuple):
    """Where a stored tensor lies in the buffer it is cut from: `offset` in elements."""

    buffer: str
    offset: int


class Copy(NamedTuple):
    """A tensor that is copied as it is, or in another dtype."""

    key: str
    dtype: torch.dtype
    outputs: tuple[str, ...]
    nbytes: int


class Experts(NamedTuple):
    """Experts `first` up to `last` of one fused projection, quantized together."""

    path: str
    leaf: str
    first: int
    last: int
    load: Load
    outputs: tuple[str, ...]
    nbytes: int


class Group(NamedTuple):
    """Parameters that are made, quantized and stored together: a linear, siblings, whatever a converter joins."""

    params: tuple[str, ...]
    outputs: tuple[str, ...]
    nbytes: int


Unit = Copy | Experts | Group


class StreamPlan(NamedTuple):
    """All that is to be done.

    Attributes:
        tensors: what is written, by name, in the order of the state dict.
        parts: where outputs that are cut from experts' buffers lie in these.
        shards: files.
        units: of each file, by its name, in the order they are worked on.
    """

    tensors: dict[str, TensorSpec]
    parts: dict[str, Part]
    shards: list[Shard]
    units: dict[str, list[Unit]]

    def nbytes(self, shard: str) -> int:
        """Bytes read to make a file."""
        return sum(unit.nbytes for unit in self.units[shard])


def make_plan(skeleton: Skeleton, source: Source, max_shard_size: int | str) -> StreamPlan:
    """Plan all outputs, files and units of a checkpoint."""
    state = _saved_state(skeleton)
    buffers = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    outputs = revert_weight_conversion(skeleton.model, dict(state))
    tensors, parts = {}, {}
    for name, tensor in outputs.items():
        storage = tensor.untyped_storage()
        tensors[name] = TensorSpec(tensor.dtype, tuple(tensor.shape), storage._cdata, storage.nbytes())
        if storage._cdata in buffers and tensor.is_contiguous():
            parts[name] = Part(buffers[storage._cdata], tensor.storage_offset())
    shards = plan_shards(tensors, max_shard_size)
    units = list(_Units(skeleton, source, state, outputs, parts).all())
    made = [name for unit in units for name in unit.outputs]
    unclear = sorted(set(tensors).symmetric_difference(made))
    if unclear:
        raise ValueError(
            f"{len(unclear)} tensors of {type(skeleton.model).__name__} (such as {unclear[0]}) are converted in a way "
            "that is not known here. Quantize with from_pretrained, and save_pretrained the model."
        )
    by_shard = {shard.name: [u for u in units if not shard.tensors.keys().isdisjoint(u.outputs)] for shard in shards}
    return StreamPlan(tensors, parts, shards, by_shard)


def _saved_state(skeleton: Skeleton) -> dict[str, torch.Tensor]:
    """The state dict `save_pretrained` starts from, on the meta device, each tensor with a storage of its own."""
    model = skeleton.model
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    dtypes = {name: skeleton.dtypes.get(name, tensor.dtype) for name, tensor in state.items()}
    return {name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta") for name, tensor in state.items()}


class _Units:
    """Divides the work on a skeleton into units."""

    def __init__(self, skeleton: Skeleton, source: Source, state, outputs, parts: dict[str, Part]):
        self.skeleton, self.source, self.state, self.outputs, self.parts = skeleton, source, state, outputs, parts
        self.cut: dict[str, list[str]] = {}  # outputs by the buffer they are cut from
        for name, part in parts.items():
            self.cut.setdefault(part.buffer, []).append(name)

    def all(self) -> Iterator[Unit]:
        grouped: list[str] = []
        for path in self.skeleton.plan.experts:
            for leaf in self.skeleton.model.get_submodule(path).shapes:
                if self._can_be_sliced(path, leaf):
                    yield from self._slices(path, leaf)
                else:
                    grouped.append(f"{path}.{leaf}")
        packed = {f"{path}.weight" for path in self.skeleton.plan.linears}
        for name in self.state:
            copy = self._copy(name) if name in self.skeleton.loads else None
            if copy is not None:
                yield copy
            elif name in self.skeleton.loads:
                grouped.append(name)
        yield from self._groups([*grouped, *sorted(packed)])

    def _copy(self, name: str) -> Copy | None:
        load, outputs = self.skeleton.loads[name], self.cut.get(name, [])
        if load.converter is not None or len(outputs) != 1 or self.outputs[outputs[0]].shape != self.state[name].shape:
            return None
        key = load.names[0]
        return Copy(key, self.skeleton.dtypes[name], tuple(outputs), self.source.tensors[key].nbytes)

    # --- experts -----------------------------------------------------------------------------------------------------

    def _buffers(self, path: str, leaf: str) -> list[str]:
        return [name for name in self.state if name.startswith(f"{path}.{leaf}_") and not name.endswith("_bias")]

    def _can_be_sliced(self, path: str, leaf: str) -> bool:
        """Whether experts can be read, quantized and stored one by one."""
        load = self.skeleton.loads[f"{path}.{leaf}"]
        operations = load.converter.operations if load.converter else ()
        steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
        experts = self.skeleton.model.get_submodule(path).num_experts
        if steps not in ([], [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return False
        if steps and any(len(keys) != experts for keys in load.keys.values()):
            return False
        made = [name for buffer in self._buffers(path, leaf) for name in self.cut.get(buffer, [])]
        for name in made:
            buffer = self.state[self.parts[name].buffer]
            per_expert = buffer.numel() // buffer.shape[0]
            begin, count = self.parts[name].offset, self.outputs[name].numel()
            inside = begin // per_expert == (begin + count - 1) // per_expert
            if not inside and self.outputs[name].shape != buffer.shape:
                return False
        covered = sum(self.outputs[name].numel() for name in made)
        return covered == sum(self.state[buffer].numel() for buffer in self._buffers(path, leaf))

    def _slices(self, path: str, leaf: str) -> Iterator[Experts]:
        load = self.skeleton.loads[f"{path}.{leaf}"]
        experts = self.skeleton.model.get_submodule(path).num_experts
        each = sum(self.source.tensors[key].nbytes for key in load.names) // experts
        step = max(1, SLICE // max(1, each))
        outputs: list[list[str]] = [[] for _ in range(0, experts, step)]
        for buffer in self._buffers(path, leaf):
            per_expert = self.state[buffer].numel() // experts
            for name in self.cut[buffer]:
                begin = self.parts[name].offset
                last = (begin + self.outputs[name].numel() - 1) // per_expert
                for number in range(begin // per_expert // step, last // step + 1):
                    outputs[number].append(name)
        for number, names in enumerate(outputs):
            first, last = number * step, min(number * step + step, experts)
            yield Experts(path, leaf, first, last, load, tuple(names), each * (last - first))

    # --- groups ------------------------------------------------------------------------------------------------------

    def _groups(self, params: list[str]) -> Iterator[Group]:
        """Parameters that must be in memory together, by whatever joins them: a converter on loading, one tensor
        scale, a converter on saving."""
        sets = _DisjointSets(params)
        for group in self.skeleton.plan.groups.values():
            sets.join(f"{name}.weight" for name in group)
        for param in params:
            sets.join(name for name in self.skeleton.loads[param].shapes if name in sets)
        buffers = {param: self._stored_names(param) for param in params}
        owner = {name: param for param, names in buffers.items() for name in names}
        for names in self._joined_on_saving(owner):
            sets.join(owner[name] for name in names)
        for members in sets.all():
            state = {name: self.state[name] for param in members for name in buffers[param]}
            outputs = revert_weight_conversion(self.skeleton.model, state)
            keys = {key for param in members for key in self.skeleton.loads[param].names}
            yield Group(tuple(members), tuple(outputs), sum(self.source.tensors[key].nbytes for key in keys))

    def _stored_names(self, param: str) -> list[str]:
        """Names in the packed state dict of a dense parameter."""
        path, _, leaf = param.rpartition(".")
        if path in self.skeleton.plan.experts and leaf in self.skeleton.model.get_submodule(path).shapes:
            return self._buffers(path, leaf)
        if path in self.skeleton.plan.linears and leaf == "weight":
            module = self.skeleton.model.get_submodule(path)
            return [f"{path}.{name}" for name, _ in module.named_buffers(recurse=False)]
        return [param]

    def _joined_on_saving(self, names: Iterable[str]) -> Iterator[list[str]]:
        conversions = (self.skeleton.model._weight_conversions or [])[::-1]
        converters = [c.reverse_transform() for c in conversions if isinstance(c, WeightConverter)]
        joined: dict[str, list[str]] = {}
        for name in names:
            for converter in converters:
                renamed, pattern = converter.rename_source_key(name)
                if pattern is not None:
                    joined.setdefault(renamed, []).append(name)
                    break
        yield from joined.values()


class _DisjointSets:
    """Names, joined step by step to sets."""

    def __init__(self, names: Iterable[str]):
        self.parent = {name: name for name in names}

    def __contains__(self, name: str) -> bool:
        return name in self.parent

    def root(self, name: str) -> str:
        while self.parent[name] != name:
            self.parent[name] = name = self.parent[self.parent[name]]
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = [self.root(name) for name in names]
        for root in roots[1:]:
            self.parent[self.root(root)] = self.root(roots[0])

    def all(self) -> list[list[str]]:
        """The sets, in the order their first names were given."""
        found: dict[str, list[str]] = {}
        for name in self.parent:
            found.setdefault(self.root(name), []).append(name)
        return list(found.values())
