# SPDX-License-Identifier: Apache-2.0
"""PackedModule: the buffers of packed weights, and what becomes of them when a module is moved, cast or pickled.

Buffers carry compressed-tensors' names and meanings, so a state dict is a checkpoint: `*_global_scale` **divides**
there, while every function of this package multiplies. `dense_copy` and `transform_input` are what such buffers mean.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_mxfp4 import ops
from hf_mxfp4.blocks import row_chunks
from hf_mxfp4.formats import MACRO_BLOCK, BlockFormat, Outliers, QuantizedTensor
from hf_mxfp4.outliers import column_dtype
from hf_mxfp4.quantization import fake_quantize
from hf_mxfp4.recipe import Recipe
from hf_mxfp4.reference import byte_pairs, scatter_outliers

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element
_PAIRS = {2: torch.int32, 4: torch.int64}  # two elements as one
_OUTLIERS = tuple(f"outlier_{name}" for name in Outliers._fields)
TRANSFORMS = ("pre_quant_scale", "hadamard")  # of a module's input, before the product


class PackedModule(nn.Module):
    """Buffers of one or more packed weights. `.to(dtype)`, `.half()` and the like leave codes and scales alone.

    With macro-blocks there is `{prefix}_macro_scale` uint8 `[..., N, ceil(K/128)]`, with outliers
    `{prefix}_outlier_values`, `_columns`, `_offsets` (`formats.Outliers`). A module may also have `pre_quant_scale`
    `[K]` and `hadamard` `[g, g]`, each in its own floating dtype (`transform_input`).

    Attributes:
        recipe (`Recipe`, *optional*): the rule it was quantized by, for what quantizes it anew; `None` where that is
            not known.
        path (`str`, *optional*): its name in the model it was made for, for messages.
    """

    format: BlockFormat
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    activation_format: str | None
    recipe: Recipe | None = None
    path: str | None = None

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

    def _register_transforms(self, in_features: int, device, **transforms: torch.Tensor | None) -> None:
        """Register those of `TRANSFORMS` that are given; a meta tensor only tells dtype and shape of one to come."""
        for name, tensor in transforms.items():
            if tensor is None:
                continue
            if not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
                raise TypeError(f"{name}: dtype {tensor.dtype}; allowed: float32, bfloat16, float16.")
            shape = tuple(tensor.shape)
            if name == "pre_quant_scale" and shape != (in_features,):
                raise ValueError(f"{name}: shape {shape}, expected {(in_features,)}: one for each input channel.")
            if name == "hadamard" and (len(shape) != 2 or shape[0] != shape[1] or not 0 < shape[0] <= in_features):
                raise ValueError(f"{name}: shape {shape}, expected [g, g] with g at most {in_features}.")
            if name == "hadamard" and in_features % shape[0]:
                raise ValueError(f"{name}: {in_features} input channels are no whole groups of {shape[0]}.")
            if tensor.is_meta:
                tensor = torch.empty(shape, dtype=tensor.dtype, device=device)
            self.register_buffer(name, tensor.detach())

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

    def dense(self, prefix: str, dtype: torch.dtype) -> torch.Tensor:
        """`dense_copy` of a packed weight, in `dtype`."""
        start = f"{prefix}_"
        own = {name.removeprefix(start): value for name, value in self._buffers.items() if name.startswith(start)}
        own |= {name: self._buffers[name] for name in TRANSFORMS if name in self._buffers}
        return dense_copy(self.format, dtype, **own, backend=self.backend)

    def _activations(self, x: torch.Tensor) -> torch.Tensor:
        """x as the product takes it: in the compute dtype, transformed where the weight asks for it, and rounded to
        FP4 where that is asked for (W4A4)."""
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        scale, hadamard = self._buffers.get("pre_quant_scale"), self._buffers.get("hadamard")
        if scale is not None or hadamard is not None:
            x = transform_input(x, scale, hadamard)
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
        words = ("macro_scale", "outlier_values", *TRANSFORMS)
        has = [word for word in words if any(name.endswith(word) for name in self._buffers)]
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
            integers = buffer.view(INTEGERS[buffer.itemsize])
            moved = fn(integers)
            moved = moved if moved.dtype == integers.dtype else integers.to(moved.device)
            buffers[name] = moved.view(buffer.dtype)
        self.prepare()
        return self

    def _replicate_for_data_parallel(self):
        raise ValueError(
            "nn.DataParallel copies a model to every GPU in each forward, the packed weights too. Start one process a "
            "GPU in its place: `accelerate launch script.py` or `torchrun --nproc-per-node N script.py`; or show this "
            "one a single GPU by CUDA_VISIBLE_DEVICES."
        )

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


def transform_input(
    x: torch.Tensor, pre_quant_scale: torch.Tensor | None = None, hadamard: torch.Tensor | None = None
) -> torch.Tensor:
    """A layer's input as its packed weight wants it: channels times their scales, then groups of channels times H.

    It is formed in the widest dtype among x and the two, also under autocast, and rounded once: a matrix in float32
    is never rounded to x's 16 bits.

    Args:
        x (`torch.Tensor`): `[..., K]`, floating.
        pre_quant_scale (`torch.Tensor`, *optional*): `[K]`.
        hadamard (`torch.Tensor`, *optional*): `[g, g]`, K a multiple of g.

    Returns:
        `torch.Tensor` `[..., K]` in x's dtype (the autocast dtype under autocast).

    Source: ModelOpt's `TensorQuantizer.forward` (`pre_quant_scale`), fp_quant's `forward_quantize` (`x @ H`).
    """
    x, _ = ops.autocast_inputs(x, None)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _transform(x, pre_quant_scale, hadamard)
    return _transform(x, pre_quant_scale, hadamard)


def _transform(x: torch.Tensor, scale: torch.Tensor | None, hadamard: torch.Tensor | None) -> torch.Tensor:
    dtype = x.dtype
    for transform in (scale, hadamard):
        dtype = dtype if transform is None else torch.promote_types(dtype, transform.dtype)
    out = x.to(dtype)
    if scale is not None:
        out = out * scale
    if hadamard is not None:
        size = hadamard.shape[0]
        out = (out.unflatten(-1, (out.shape[-1] // size, size)) @ hadamard.to(dtype)).flatten(-2)
    return out.to(x.dtype)


@torch.no_grad()
def dense_copy(
    format: BlockFormat,
    dtype: torch.dtype,
    *,
    packed: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    macro_scale: torch.Tensor | None = None,
    outlier_values: torch.Tensor | None = None,
    outlier_columns: torch.Tensor | None = None,
    outlier_offsets: torch.Tensor | None = None,
    pre_quant_scale: torch.Tensor | None = None,
    hadamard: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The weight that stored tensors stand for: decoded as compressed-tensors does, input transforms taken in.

    `E2M1[code] * (scale / global_scale)`, each step in float32, rounded once; the operators of `ops` multiply by a
    reciprocal instead, which is the same only for powers of two. A layer with transforms computes
    `transform_input(x) @ W.T`; its dense copy is `(W @ H.T per group) * pre_quant_scale`, for the original input.

    Args:
        format (`BlockFormat`): of the weight.
        dtype (`torch.dtype`): of the result: bfloat16, float16, float32 or float64.
        packed (`torch.Tensor`): and all others, as `layouts.PackedTensors` describes them; `global_scale` divides.
        backend (`str`): of `ops.dequantize`, which decodes where it gives the same.

    Returns:
        `torch.Tensor` `[..., N, K]`.

    Source: compressed-tensors 0.20, `_dequantize` in quantization/lifecycle/forward_helpers.py.
    """
    outliers = None if outlier_values is None else Outliers(outlier_values, outlier_columns, outlier_offsets)
    weight = QuantizedTensor(packed, scale, None, format, macro_scale, outliers)
    by_operator, plain = _is_exact(global_scale), pre_quant_scale is None and hadamard is None
    if by_operator and plain:
        tensor_scale = None if global_scale is None else global_scale[..., 0].reciprocal()
        return ops.dequantize(weight._replace(global_scale=tensor_scale), dtype, backend)
    *lead, k = weight.shape
    out = torch.empty((*lead, k), dtype=dtype, device=packed.device)
    if packed.is_meta or not out.numel():
        return out
    parts = {name: getattr(weight, name) for name in ("packed", "scale", "macro")}
    weight = weight._replace(**{n: None if t is None else t.reshape(-1, t.shape[-1]) for n, t in parts.items()})
    divisors = [None] if global_scale is None else global_scale.reshape(-1)
    wide = dtype if plain and dtype.itemsize == 2 else torch.float32
    for index, matrix in enumerate(out.view(len(divisors), -1, k)):
        divisor, start = divisors[index], index * len(matrix)
        table = None if by_operator else _table(format, divisor, wide)
        for rows in row_chunks(matrix):
            part = weight.rows(slice(start + rows.start, start + min(rows.stop, len(matrix))))
            if table is None:
                part = part._replace(global_scale=None if divisor is None else divisor.reciprocal())
                values = ops.dequantize(part, wide, backend)
            else:
                values = _look_up(part, table, wide)
            matrix[rows] = values if plain else _untransform(values, pre_quant_scale, hadamard)
    return out


def _is_exact(global_scale: torch.Tensor | None) -> bool:
    """Whether matrices have no divisor, or one each with an exact reciprocal; not where values cannot be read."""
    if global_scale is None:
        return True
    if global_scale.is_meta or torch.compiler.is_compiling():
        return False
    exact = (torch.frexp(global_scale)[0] == 0.5) & (global_scale >= 2.0**-126) & (global_scale <= 2.0**126)
    exact = (exact & (global_scale == global_scale[..., :1])).all()
    return type(exact) is torch.Tensor and bool(exact)  # else under a FakeTensorMode


def _table(format: BlockFormat, divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The two weights in `dtype` of each scale byte and byte of codes, as one integer: `[256 * 256]`."""
    scales = format.decode_scale(torch.arange(256, dtype=torch.uint8, device=divisor.device)) / divisor
    codes = byte_pairs(divisor.device).view(torch.float32).view(256, 2)
    return (codes * scales[:, None, None]).to(dtype).view(_PAIRS[dtype.itemsize]).flatten()


def _look_up(weight: QuantizedTensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix `[N, K]` decoded by its `_table` of weights in `dtype`, with its outliers."""
    block = weight.scale.view(torch.uint8).to(torch.int32)[..., None] * 256
    index = block + weight.packed.view(*weight.scale.shape, weight.format.block_size // 2)
    values = table.index_select(0, index.flatten()).view(dtype).view(weight.shape)
    if weight.outliers is not None:
        scatter_outliers(values, weight.outliers)
    return values


def _untransform(values: torch.Tensor, scale: torch.Tensor | None, hadamard: torch.Tensor | None) -> torch.Tensor:
    """Decoded weights `[n, K]`, float32, for the input before `transform_input`."""
    if hadamard is not None:
        # Products in float32 may be in TF32.
        wide, size = torch.float32 if values.device.type == "mps" else torch.float64, hadamard.shape[0]
        groups = values.to(wide).unflatten(1, (values.shape[1] // size, size))
        values = (groups @ hadamard.to(wide).T).flatten(1)
    return values if scale is None else values * scale
