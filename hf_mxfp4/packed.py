# SPDX-License-Identifier: Apache-2.0
"""PackedModule: the buffers of packed weights, and what becomes of them when a module is moved, cast or pickled.

Buffers carry compressed-tensors' names and meanings, so a state dict is a checkpoint: `*_global_scale` **divides**
there, while every function of this package multiplies.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_mxfp4.formats import MACRO_BLOCK, BlockFormat, Outliers, QuantizedTensor
from hf_mxfp4.outliers import column_dtype
from hf_mxfp4.quantization import fake_quantize

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element
_OUTLIERS = tuple(f"outlier_{name}" for name in Outliers._fields)


class PackedModule(nn.Module):
    """Buffers of one or more packed weights. `.to(dtype)`, `.half()` and the like leave codes and scales alone.

    With macro-blocks there is `{prefix}_macro_scale` uint8 `[..., N, ceil(K/128)]`, with outliers
    `{prefix}_outlier_values`, `_columns`, `_offsets` (`formats.Outliers`).
    """

    format: BlockFormat
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    activation_format: str | None

    def _register_packed(
        self,
        prefix: str,
        shape: tuple[int, ...],
        global_shape: tuple[int, ...],
        device,
        macro_block: bool,
        outliers: bool,
    ) -> None:
        """Register `{prefix}_packed`, `{prefix}_scale` and what else a weight of this kind has; no outliers yet."""
        if self.activation_format not in (None, "same"):
            raise ValueError(f"activation_format={self.activation_format!r}; allowed: None, same.")
        *lead, in_features = shape
        self.format.check_in_features(in_features, prefix)
        self.__dict__.setdefault("_tensor_scales", {})
        scale_shape = (*lead, in_features // self.format.block_size)
        packed = torch.empty((*lead, in_features // 2), dtype=torch.uint8, device=device)
        self.register_buffer(f"{prefix}_packed", packed)
        self.register_buffer(f"{prefix}_scale", torch.empty(scale_shape, dtype=self.format.scale_dtype, device=device))
        if self.format.has_global_scale:
            global_scale = torch.empty(global_shape, dtype=torch.float32, device=device)
            self.register_buffer(f"{prefix}_global_scale", global_scale)
        if macro_block:
            macro = torch.empty((*lead, -(-in_features // MACRO_BLOCK)), dtype=torch.uint8, device=device)
            self.register_buffer(f"{prefix}_macro_scale", macro)
        if outliers:
            rows = torch.Size(lead).numel()
            self._set_outliers(
                prefix,
                Outliers(
                    torch.empty(0, dtype=self.dtype, device=device),
                    torch.empty(0, dtype=column_dtype(in_features), device=device),
                    torch.zeros(rows + 1, dtype=torch.int32, device=device),
                ),
            )

    def _set_outliers(self, prefix: str, outliers: Outliers) -> None:
        for name, value in zip(_OUTLIERS, outliers, strict=True):
            self.register_buffer(f"{prefix}_{name}", value)

    def tensor_scale(self, prefix: str) -> torch.Tensor | None:
        """The tensor scale of a packed weight that **multiplies**, float32 `[]` or `[E]`; `None` without one.

        It is computed once, not in each forward (two launches on a GPU), and again when the buffer is another one or
        was written to. Call `prepare` after writes through `.data`, which no forward sees, and after any others if
        the forward is compiled.
        """
        stored = self._buffers.get(f"{prefix}_global_scale")
        if stored is None:
            return None
        kept = self._tensor_scales.get(prefix)
        if torch.compiler.is_compiling():
            return kept[1] if kept is not None and kept[0] is stored else stored[..., 0].reciprocal()
        if kept is None or kept[0] is not stored or stored.is_inference() or kept[2] != stored._version:
            with torch.inference_mode(False):  # or no later call could keep it for its gradient
                scale = stored.detach()[..., 0].reciprocal()
            if stored.is_cuda and torch.cuda.is_current_stream_capturing():
                return scale  # it has its value only once the graph is replayed
            if type(scale) is not type(stored) or torch._C._functorch.peek_interpreter_stack() is not None:
                return scale  # a FakeTensorMode's or a transform's, which ends
            kept = stored, scale, None if stored.is_inference() else stored._version
            self._tensor_scales[prefix] = kept
        return kept[1]

    def prepare(self) -> None:
        """Compute what a forward keeps, from buffers that have values: so that compiled graphs need not."""
        self._tensor_scales.clear()
        for name, buffer in self._buffers.items():
            if name.endswith("_global_scale") and buffer is not None and buffer.device.type != "meta":
                self.tensor_scale(name.removesuffix("_global_scale"))

    def packed_weight(self, prefix: str) -> QuantizedTensor:
        """A packed weight from its buffers; its scales multiply."""
        buffers = self._buffers  # read on every forward: `getattr` of a buffer that is not there takes microseconds
        outliers = [buffers.get(f"{prefix}_{name}") for name in _OUTLIERS]
        return QuantizedTensor(
            buffers[f"{prefix}_packed"],
            buffers[f"{prefix}_scale"],
            self.tensor_scale(prefix),
            self.format,
            buffers.get(f"{prefix}_macro_scale"),
            None if outliers[0] is None else Outliers(*outliers),
        )

    def _activations(self, x: torch.Tensor) -> torch.Tensor:
        """x as the product takes it: in the compute dtype, and rounded to FP4 where that is asked for (W4A4)."""
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        return x if self.activation_format is None else fake_quantize(x, self.format, self.backend)

    def _load_packed(self, prefix: str, weight: QuantizedTensor) -> None:
        """Take over the tensors of `weight` (no copy); the tensor scale is stored as its reciprocal."""
        if weight.format is not self.format:
            raise ValueError(f"{prefix}: a weight in {weight.format.name} cannot go into a {self.format.name} module.")
        stored = {"packed": weight.packed, "scale": weight.scale}
        if weight.global_scale is not None:
            stored["global_scale"] = weight.global_scale.reciprocal()
        if weight.macro is not None:
            stored["macro_scale"] = weight.macro
        for suffix, value in (("macro_scale", weight.macro), ("outlier_values", weight.outliers)):
            if hasattr(self, f"{prefix}_{suffix}") != (value is not None):
                raise ValueError(f"{prefix}: the weight and the module must both have {suffix}, or neither.")
        if weight.outliers is not None:
            self._set_outliers(prefix, weight.outliers)
        for suffix, value in stored.items():
            buffer = getattr(self, f"{prefix}_{suffix}")
            if suffix == "global_scale":
                value = value.reshape(-1, *[1] * (buffer.ndim - 1)).expand(buffer.shape).contiguous()
            if value.shape != buffer.shape:
                raise ValueError(
                    f"{prefix}_{suffix}: shape {tuple(value.shape)} does not fit the module's {tuple(buffer.shape)}."
                )
            setattr(self, f"{prefix}_{suffix}", value)
        self.prepare()

    def _kind(self) -> str:
        """For `extra_repr`."""
        has = [
            word for word in ("macro_scale", "outlier_values") if any(name.endswith(word) for name in self._buffers)
        ]
        return ", ".join([f"format={self.format.name}", *has, *(["W4A4"] if self.activation_format else [])])

    def _apply(self, fn, recurse=True):
        # Moving must reach the packed buffers, casting must not: `fn` is applied to them as integers, and what it
        # casts even so (`Module.type`) only tells the device.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        buffers, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        for name, buffer in buffers.items():
            integers = buffer.view(_INTEGERS[buffer.itemsize])
            moved = fn(integers)
            moved = moved if moved.dtype == integers.dtype else integers.to(moved.device)
            buffers[name] = moved.view(buffer.dtype)
        self.prepare()
        return self

    def __getstate__(self):
        # torch (2.13) cannot unpickle float8 and uint16 tensors outside torch.save.
        travel = {torch.float8_e4m3fn: torch.uint8, torch.uint16: torch.int16}
        buffers = {name: buffer.view(travel.get(buffer.dtype, buffer.dtype)) for name, buffer in self._buffers.items()}
        return {**self.__dict__, "_buffers": buffers, "_tensor_scales": {}}

    def __setstate__(self, state):
        super().__setstate__(state)
        for name, buffer in self._buffers.items():
            if name.endswith("_scale") and buffer.itemsize == 1:
                self._buffers[name] = buffer.view(self.format.scale_dtype)
            elif buffer.dtype == torch.int16:
                self._buffers[name] = buffer.view(torch.uint16)
        self.prepare()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            if buffer is not None and value is not None and value.dtype != buffer.dtype:
                errors.append(f"{prefix + name}: dtype {value.dtype} in the state dict, {buffer.dtype} in the module.")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self.prepare()
