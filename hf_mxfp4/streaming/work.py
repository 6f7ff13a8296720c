# SPDX-License-Identifier: Apache-2.0
"""One file of the output: read, quantize, write, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers.core_model_loading import revert_weight_conversion

from hf_mxfp4 import packing
from hf_mxfp4.checkpoint_writer import Shard, ShardWriter
from hf_mxfp4.formats import QuantizedTensor
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.streaming.plan import Copy, Experts, Group, StreamPlan, Unit
from hf_mxfp4.streaming.skeleton import Load, Skeleton
from hf_mxfp4.streaming.source import Source

Advance = Callable[[int, str], None]  # after a unit: bytes read, and a name for the user


class Worker:
    """Makes files of a plan. `device` is where weights are quantized."""

    def __init__(self, skeleton: Skeleton, source: Source, plan: StreamPlan, device: str):
        self.skeleton, self.source, self.plan, self.device = skeleton, source, plan, device

    @torch.no_grad()
    def write(self, folder: Path, shard: Shard, temporary: str, advance: Advance) -> None:
        """Write one file of the plan; nothing is left of it after an error.

        Args:
            folder: the output.
            shard: one of the plan's.
            temporary: its name until it is finished.
            advance: called after each unit; may raise to stop.
        """
        with ShardWriter(folder, shard, temporary=temporary) as writer:
            for unit in self.plan.units[shard.name]:
                self._make(unit, writer)
                advance(unit.nbytes, unit.outputs[0])
        self.source.close()

    def _make(self, unit: Unit, writer: ShardWriter) -> None:
        if isinstance(unit, Copy):
            for start, rows in self.source.pieces(unit.key):
                writer.put(unit.outputs[0], rows.to(unit.dtype), start)
        elif isinstance(unit, Experts):
            self._experts(unit, writer)
        else:
            for name, tensor in self._group(unit).items():
                if name in writer.shard.tensors:
                    writer.put(name, tensor)

    # --- experts, some of a stack at a time --------------------------------------------------------------------------

    def _experts(self, unit: Experts, writer: ShardWriter) -> None:
        name = f"{unit.path}.{unit.leaf}"
        weight = self._slice(unit.load, name, unit.first, unit.last)
        buffers = self._packed_projection(unit.path, unit.leaf, weight, f"{name}[{unit.first}:{unit.last}]")
        for output in unit.outputs:
            if output not in writer.shard.tensors:
                continue
            part, shape = self.plan.parts[output], writer.shard.tensors[output].shape
            buffer = buffers[part.buffer.removeprefix(f"{unit.path}.")]
            count, each = torch.Size(shape).numel(), buffer.numel() // buffer.shape[0]
            if shape == (self._module(unit.path).num_experts, *buffer.shape[1:]) and part.offset == 0:
                writer.put(output, buffer, unit.first)
            else:
                begin = part.offset - unit.first * each
                writer.put(output, buffer.reshape(-1)[begin : begin + count].view(shape))

    def _slice(self, load: Load, name: str, first: int, last: int) -> torch.Tensor:
        """Experts `first` to `last` of a dense parameter, in its dtype."""
        dtype = self.skeleton.dtypes[name]
        if load.converter is None:
            return self.source.rows(load.names[0], first, last).to(dtype)
        found = {
            pattern: [self.source.whole(key).to(dtype) for key in keys[first:last]]
            for pattern, keys in load.keys.items()
        }
        return load.convert(self.skeleton.model, found)[name]

    def _packed_projection(self, path: str, leaf: str, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """The buffers of a projection `[n, ...]` of experts, by their names in the module."""
        module, recipe = self._module(path), self.skeleton.plan.experts[path]
        weight = weight.to(self.device)
        quantized = recipe.quantize(weight.transpose(1, 2) if module.is_transposed else weight, name)
        _, hidden_size, intermediate_size = module.shapes["down_proj"][0], *module.shapes["down_proj"][1:]
        some = FP4Experts(
            len(weight),
            hidden_size,
            intermediate_size,
            format=recipe.format,
            has_gate=module.has_gate,
            macro_block=recipe.macro_block is not None,
            device="meta",
        )
        some.load_projection(leaf, quantized)
        return {key: buffer for key, buffer in some.named_buffers() if key.startswith(f"{leaf}_")}

    def _module(self, path: str) -> FP4Experts:
        return self.skeleton.model.get_submodule(path)

    # --- groups ------------------------------------------------------------------------------------------------------

    def _group(self, unit: Group) -> dict[str, torch.Tensor]:
        """The stored tensors of parameters that belong together, by name."""
        plan, state = self.skeleton.plan, {}
        weights = {name for name in unit.params if name.endswith(".weight") and name[:-7] in plan.linears}
        dense = self._converted(unit.params)
        while weights:
            name = min(weights)
            members = plan.groups.get(name[:-7], (name[:-7],))
            names = [f"{member}.weight" for member in members]
            weights -= set(names)
            state |= self._packed_linears(members, self._joined(names, dense))
        for name in unit.params:
            path, _, leaf = name.rpartition(".")
            if path in plan.experts and leaf in self._module(path).shapes:
                weight = dense.pop(name) if name in dense else self._read(name)
                packed = self._packed_projection(path, leaf, weight, name)
                state |= {f"{path}.{key}": buffer for key, buffer in packed.items()}
            elif path not in plan.linears or leaf != "weight":
                state[name] = dense.pop(name) if name in dense else self._read(name)
        return revert_weight_conversion(self.skeleton.model, state)

    def _converted(self, params: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those of some dense parameters that a converter makes."""
        made: dict[str, torch.Tensor] = {}
        for name in params:
            load = self.skeleton.loads[name]
            if load.converter is not None and name not in made:
                dtype = self.skeleton.dtypes[load.target]
                found = {p: [self.source.whole(key).to(dtype) for key in keys] for p, keys in load.keys.items()}
                made |= load.convert(self.skeleton.model, found)
        return {name: tensor.to(self.skeleton.dtypes.get(name, tensor.dtype)) for name, tensor in made.items()}

    def _read(self, name: str) -> torch.Tensor:
        return self.source.whole(self.skeleton.loads[name].names[0]).to(self.skeleton.dtypes[name])

    def _joined(self, names: list[str], dense: dict[str, torch.Tensor]) -> torch.Tensor:
        """Weights one below the other; read piece by piece, so that there is one copy of them."""
        loads, dtypes = [self.skeleton.loads[name] for name in names], [self.skeleton.dtypes[name] for name in names]
        sizes = [load.shapes[name][0] for load, name in zip(loads, names, strict=True)]
        width = loads[0].shapes[names[0]][1]
        out = torch.empty(sum(sizes), width, dtype=dtypes[0], device=self.device)
        start = 0
        for name, load, size in zip(names, loads, sizes, strict=True):
            if name in dense:
                out[start : start + size] = dense.pop(name)
            else:
                for row, rows in self.source.pieces(load.names[0]):
                    out[start + row : start + row + len(rows)] = rows
            start += size
        return out

    def _packed_linears(self, members: tuple[str, ...], joined: torch.Tensor) -> dict[str, torch.Tensor]:
        recipe = self.skeleton.plan.linears[members[0]]
        quantized: QuantizedTensor = recipe.quantize(joined, packing.matrix_name(members))
        sizes = [self.skeleton.model.get_submodule(member).out_features for member in members]
        parts = [quantized] if len(members) == 1 else quantized.split(sizes)
        return {
            f"{member}.{key}": buffer
            for member, part in zip(members, parts, strict=True)
            for key, buffer in FP4Linear.from_quantized(part).named_buffers()
        }
