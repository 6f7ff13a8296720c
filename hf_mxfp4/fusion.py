# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion: q/k/v, or gate and up, of one parent by one product (`FP4Config(fuse_projections=True)`).

The packed rows of such siblings lie one below the other in one tensor, of which each member's buffers are views:
state dicts, checkpoints and memory are those of an unfused model. Within one forward of their parent, the first member
that is called computes the rows of all, and the others hand out what it has computed for them. A member computes its
own rows, as if it were alone, whenever that would not be the very same product: for another input (by identity), one
changed in place since (by torch's version counter, which inference mode lacks), under another autocast or on another
stream, outside the parent's forward, and where a gradient will be needed.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from hf_mxfp4 import ops
from hf_mxfp4.checkpoints import SIBLINGS
from hf_mxfp4.formats import Outliers, QuantizedTensor
from hf_mxfp4.modules import FP4Linear
from hf_mxfp4.packed import TRANSFORMS

logger = logging.getLogger(__name__)

_SAME = ("format", "in_features", "dtype", "compute_dtype", "activation_format", "backend")
_OWN = ("weight_global_scale", "weight_outlier_offsets", *TRANSFORMS)  # buffers that are no rows of a joined one


class FusedLinear(FP4Linear):
    """An `FP4Linear` whose rows may be computed together with its siblings'. Made by `fuse_projections` only."""

    siblings: Siblings
    place: int  # among them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [..., K]` -> `[..., N]`, possibly a view of all siblings' output: rows then lie further apart."""
        out = self.siblings.take(self.place, x)
        return super().forward(x) if out is None else out

    def __setattr__(self, name: str, value) -> None:
        changed = name in _SAME and "siblings" in vars(self) and getattr(self, name) != value
        super().__setattr__(name, value)
        if changed:
            self.siblings.refresh()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.siblings.refresh()
        return self

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.siblings.refresh()

    def __getstate__(self):
        # A view travels with the whole tensor behind it, each of them once more.
        state = super().__getstate__()
        return state | {"_buffers": {name: buffer.clone() for name, buffer in state["_buffers"].items()}}

    def __setstate__(self, state):
        super().__setstate__(state)
        if not self.siblings.refresh():
            return
        if self.siblings.members[self.place] is not self:  # copied without its siblings
            _leave(self)


class Siblings:
    """Members of one parent that read the same input, their joined weight, and what is computed but not yet taken.

    Attributes:
        members: the linears, in the order of their rows.
        weight: their rows as one `QuantizedTensor` `[sum of N, K]`; `None` while these cannot be computed together
            (between the members' moves to another device, say).
        tensors: the members' buffers by name, as they were joined.
        versions: and torch's counts of changes to those of them that are no rows of `weight`.
        held: `None` outside of the parent's forward; then `()` or (input, its circumstances, outputs by place).
        off: whether the parent was seen to call members for different inputs or not at all.
    """

    def __init__(self, name: str, parent: nn.Module, members: list[FP4Linear]):
        self.name, self.members = name, tuple(members)
        self.weight: QuantizedTensor | None = None
        self.held: tuple | None = None
        self.off = False
        self.hooks = [
            parent.register_forward_pre_hook(self.open),
            parent.register_forward_hook(self.close, always_call=True),
        ]
        for place, member in enumerate(members):
            _become(member, FusedLinear)
            member.siblings, member.place = self, place
        self.refresh()

    # --- in a forward ------------------------------------------------------------------------------------------------

    def open(self, parent: nn.Module, args: tuple) -> None:
        """The parent's forward begins."""
        self.held = None if self.off or self.weight is None else ()

    def close(self, parent: nn.Module, args: tuple, output) -> None:
        """The parent's forward has ended, be it with an exception (`output` is then `None`): nothing stays behind."""
        held, self.held = self.held, None
        if held and output is not None:
            self.off = True
            if not torch.compiler.is_compiling():
                logger.info("hf_mxfp4: %s: not fused any more, it does not call all for one input", self.name)

    def take(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """A member's output for `x`, or `None` if it has to compute that itself."""
        held = self.held  # read once: other threads may be in the same model
        if held is None or x.is_meta:
            return None
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            return None  # vmap has no rule for the split below
        biases = [member._parameters["bias"] for member in self.members]
        if torch.is_grad_enabled() and (x.requires_grad or any([b is not None and b.requires_grad for b in biases])):
            return None  # one graph for all would keep the outputs of all alive for a gradient of one
        circumstances = _circumstances(x)
        if not held:
            if not self._intact(biases):
                return None
            parts = torch.unsafe_split_with_sizes(self._product(x, biases), [m.out_features for m in self.members], -1)
            outputs = dict(enumerate(parts))  # unsafe: as if each had memory of its own, and no two overlap
            out = outputs.pop(place)
            self.held = (x, circumstances, outputs)
            return out
        computed_for, then, outputs = held
        if computed_for is not x or then != circumstances:
            return None
        out = outputs.pop(place, None)
        if not outputs:
            self.held = ()
        return out

    def _product(self, x: torch.Tensor, biases: list[torch.Tensor | None]) -> torch.Tensor:
        """As `FP4Linear.forward`, of all rows. Biases are joined anew each time: they may have been trained."""
        first = self.members[0]
        bias, activations = None if biases[0] is None else torch.cat(biases), first._activations(x)
        if first.compute_dtype is None:
            return ops.linear(activations, self.weight, bias, first.backend)
        bias = None if bias is None else bias.to(first.compute_dtype)
        return ops.linear(activations, self.weight, bias, first.backend).to(x.dtype)

    def _intact(self, biases: list[torch.Tensor | None]) -> bool:
        """Whether every member still has the buffers that were joined, and a bias like the others'."""
        if len({None if bias is None else bias.dtype for bias in biases}) > 1:
            return False
        for member, tensors in zip(self.members, self.tensors, strict=True):
            for name, tensor in tensors.items():
                if member._buffers.get(name) is not tensor:
                    return False
        return torch.compiler.is_compiling() or self.versions == self._versions()

    def _versions(self) -> list[int | None]:
        return [_version(tensors[name]) for tensors in self.tensors for name in _OWN if name in tensors]

    # --- joining -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> bool:
        """Join the members' rows (again: they were moved, loaded, ...); `False` while they are being copied."""
        if any("_buffers" not in vars(member) for member in getattr(self, "members", [self])):
            return False
        self.held = self.weight = None
        if why_apart(self.members) is not None:
            return True
        joined = {name: self._joined(name) for name in self.members[0]._buffers if name not in _OWN}
        self.tensors = [dict(member._buffers) for member in self.members]
        self.versions = self._versions()
        outliers = None
        if "weight_outlier_offsets" in self.members[0]._buffers:
            values, columns = joined["weight_outlier_values"], joined["weight_outlier_columns"]
            outliers = Outliers(values, columns, self._joined_offsets())
        first = self.members[0].quantized
        macro = joined.get("weight_macro_scale")
        self.weight = QuantizedTensor(
            joined["weight_packed"], joined["weight_scale"], first.global_scale, first.format, macro, outliers
        )
        return True

    def _joined(self, name: str) -> torch.Tensor:
        """A buffer of all members, one below the other; theirs become its rows, unless they are that already."""
        tensors = [member._buffers[name] for member in self.members]
        found = _adjacent(tensors)
        if found is not None:
            return found
        joined = torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
        start = 0
        for member, tensor in zip(self.members, tensors, strict=True):
            member._buffers[name] = joined[start : start + tensor.shape[0]]
            start += tensor.shape[0]
        return joined

    def _joined_offsets(self) -> torch.Tensor:
        offsets = [member._buffers["weight_outlier_offsets"] for member in self.members]
        starts = [member._buffers["weight_outlier_values"].shape[0] for member in self.members]
        shifted = [part[:-1] + sum(starts[:place]) for place, part in enumerate(offsets)]
        return torch.cat([*shifted, offsets[0].new_tensor([sum(starts)])])

    def undo(self) -> None:
        """Make the members plain again, with buffers of their own."""
        for hook in self.hooks:
            hook.remove()
        for member in self.members:
            for name, buffer in member._buffers.items():
                member._buffers[name] = buffer.clone()
            _leave(member)

    def __getstate__(self):
        return {"name": self.name, "members": self.members, "off": self.off, "hooks": self.hooks}

    def __setstate__(self, state):
        self.__dict__ |= state
        self.refresh()


def fuse_projections(model: nn.Module) -> None:
    """Compute q/k/v, and gate and up, by one product each wherever a model has them packed alike.

    What `FP4Config(fuse_projections=True)` does after loading; `unfuse_projections` takes it back. Siblings that
    cannot be computed together are left as they are and named in the log.
    """
    fused, apart = 0, []
    for path, parent in list(model.named_modules()):
        for leaves in SIBLINGS:
            members = [parent._modules.get(leaf) for leaf in leaves]
            if not all(type(member) is FP4Linear for member in members) or len(set(members)) < len(members):
                continue
            name = f"{path}.({', '.join(leaves)})".removeprefix(".")
            reason = why_apart(members)
            if reason is not None:
                apart.append(f"{name}: {reason}")
                continue
            Siblings(name, parent, members)
            fused += 1
    if fused:
        _unfuse_adapted()
    logger.info("hf_mxfp4: %d groups of projections fused; left apart: %s", fused, "; ".join(apart) or "none")


def unfuse_projections(model: nn.Module) -> None:
    """Take back `fuse_projections`, in place: every projection computes its own output again."""
    for module in list(model.modules()):
        if isinstance(module, FusedLinear):
            module.siblings.undo()


def why_apart(members: tuple[FP4Linear, ...] | list[FP4Linear]) -> str | None:
    """Why linears cannot be computed by one product, or `None` if they can. Waits for the device."""
    first = members[0]
    if any(tensor.is_meta for member in members for tensor in (*member.buffers(), *member.parameters())):
        return "offloaded"
    for what in _SAME:
        if len({getattr(member, what) for member in members}) > 1:
            return f"they differ in {what}"
    kinds = [
        {name: (t.dtype, t.device, t.shape[1:]) for name, t in (*m.named_buffers(), *m.named_parameters())}
        for m in members
    ]
    if any(kind != kinds[0] for kind in kinds):
        return "their tensors differ in name, dtype, device or width"
    for what, names in (("tensor scales", ["weight_global_scale"]), ("input transforms", TRANSFORMS)):
        for name in first._buffers.keys() & names:
            if not all(torch.equal(member._buffers[name], first._buffers[name]) for member in members):
                return f"their {what} differ"
    return None


def _circumstances(x: torch.Tensor) -> tuple:
    """What else must be the same for a product to be the same."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    stream = torch.cuda.current_stream(x.device) if x.is_cuda and not torch.compiler.is_compiling() else None
    return _version(x), _inference_mode(), autocast, stream


@torch.compiler.assume_constant_result  # while torch.compile traces, too: it counts the changes that it has traced
def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


@torch.compiler.assume_constant_result
def _inference_mode() -> bool:
    return torch.is_inference_mode_enabled()


def _adjacent(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors as one, without a copy, if they lie one below the other in one storage."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    storage, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for tensor in filled:
        if tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    return filled[0].as_strided((rows, *filled[0].shape[1:]), filled[0].stride(), filled[0].storage_offset())


def _become(member: FP4Linear, kind: type[FP4Linear]) -> None:
    member.__class__ = kind
    if hasattr(member, "_old_forward"):  # accelerate's hook calls this one
        member._old_forward = kind.forward.__get__(member)


def _leave(member: FusedLinear) -> None:
    _become(member, FP4Linear)
    del member.siblings, member.place


@functools.cache  # once
def _unfuse_adapted() -> None:
    """Have torch tell us when a fused member is put into an adapter's layer: its group is then unfused.

    PEFT keeps the layer it adapts as `base_layer`, whatever the method. An adapter may change the output of a member
    in place, a merge changes its weight, and a gradient is wanted for each alone.
    """

    def unfuse(module: nn.Module, name: str, member: nn.Module | None) -> None:
        if name == "base_layer" and isinstance(member, FusedLinear):
            logger.info("hf_mxfp4: %s: not fused any more, one of them gets an adapter", member.siblings.name)
            member.siblings.undo()

    nn.modules.module.register_module_module_registration_hook(unfuse)
