# SPDX-License-Identifier: Apache-2.0
"""FP4Linear and FP4Experts: packed buffers and a forward. The numerics live in `ops`.

Their buffers are `packed.PackedModule`'s, whose `*_global_scale` **divides**; `quantized` is the multiplying form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hf_mxfp4 import experts_ops, ops
from hf_mxfp4.activations import Activation, between, recognise
from hf_mxfp4.formats import NVFP4, BlockFormat, QuantizedTensor
from hf_mxfp4.packed import PackedModule

_STEP = 2.0**-20  # of tensor scales, relative; eight steps of float32
Delta = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # see FP4Experts.forward


class FP4Linear(PackedModule, nn.Linear):
    """A linear layer whose weight stays packed in 4 bits.

    It is an `nn.Linear` by type (so PEFT's "all-linear" finds it), but holds no dense weight: `weight_packed` uint8
    `[N, K/2]`, `weight_scale` `[N, K/B]`, and for NVFP4 `weight_global_scale` float32 `[1]`, which **divides** as in
    compressed-tensors.

    Args:
        in_features (`int`): K, a multiple of the format's block size.
        out_features (`int`): N.
        bias (`bool`): whether there is a bias parameter `[N]`.
        format (`BlockFormat`): a row of `hf_mxfp4.formats`.
        dtype (`torch.dtype`, *optional*): dtype of the bias and of `weight`; torch's default dtype if not given.
        compute_dtype (`torch.dtype`, *optional*): dtype the product is computed in; the input's if not given.
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.
        activation_format (`str`, *optional*): `"same"` rounds inputs to `format` too (W4A4).
        macro_block (`bool`): whether the weight has macro factors.
        outliers (`bool`): whether the weight has outliers.
        pre_quant_scale (`torch.Tensor`, *optional*): `[K]`, multiplies the input first (ModelOpt's AWQ). Becomes a
            buffer; a meta tensor only tells dtype and shape of one to be loaded. So does `hadamard`.
        hadamard (`torch.Tensor`, *optional*): `[g, g]`, by which groups of g input channels are multiplied next, as
            the weight is stored in that basis (fp_quant). See `packed.transform_input`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: BlockFormat = NVFP4,
        device=None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        backend: str = "auto",
        activation_format: str | None = None,
        macro_block: bool = False,
        outliers: bool = False,
        pre_quant_scale: torch.Tensor | None = None,
        hadamard: torch.Tensor | None = None,
    ):
        nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.in_features, self.out_features = in_features, out_features
        self.format, self.backend, self.compute_dtype = format, backend, compute_dtype
        self.activation_format = activation_format
        self.dtype = dtype or torch.get_default_dtype()
        self._register_packed("weight", (out_features, in_features), (1,), device, macro_block, outliers)
        self._register_transforms(in_features, device, pre_quant_scale=pre_quant_scale, hadamard=hadamard)
        empty = torch.empty(out_features, device=device, dtype=self.dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))

    @classmethod
    def from_quantized(cls, weight: QuantizedTensor, bias: torch.Tensor | None = None, **kwargs) -> FP4Linear:
        """A layer around a `QuantizedTensor` `[N, K]` (its tensors are taken over) and an optional bias `[N]`."""
        out_features, in_features = weight.shape
        parts = {"macro_block": weight.macro is not None, "outliers": weight.outliers is not None}
        layer = cls(
            in_features, out_features, bias is not None, format=weight.format, device="meta", **parts, **kwargs
        )
        layer._load_packed("weight", weight)
        if bias is not None:
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return layer

    @property
    def quantized(self) -> QuantizedTensor:
        """The packed weight, as the transformed input meets it; its scales multiply."""
        return self.packed_weight("weight")

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight `[N, K]` in `dtype`, for the input as it comes: a fresh dense copy for code that
        asks (`packed.dense_copy`); `forward` makes none."""
        return self.dense("weight", self.dtype)

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        own = self.weight
        if not isinstance(value, torch.Tensor) or value.shape != own.shape or not torch.equal(value.to(own), own):
            raise ValueError(
                "an FP4Linear holds no dense weight to assign to. Quantize the new one: FP4Linear.from_quantized("
                "FP4Config(...).recipe().quantize(weight))."
            )

    @property
    def W_q(self) -> torch.Tensor:
        """`weight_packed`, by the name HQQ's layers have: there PEFT asks for the device, ten times a layer, and
        nothing is decoded. It takes dense weights from `dequantize`."""
        return self._buffers["weight_packed"]

    def dequantize(self) -> torch.Tensor:
        """`weight`, for code that asks quantized layers so."""
        return self.weight

    def reset_parameters(self) -> None:
        """Nothing to initialize: packed weights come from a quantizer or a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [..., K]` -> `[..., N]` in x's dtype (the autocast dtype under autocast)."""
        bias, activations = self.bias, self._activations(x)
        if self.compute_dtype is None:
            return ops.linear(activations, self.quantized, bias, self.backend)
        bias = None if bias is None else bias.to(self.compute_dtype)
        return ops.linear(activations, self.quantized, bias, self.backend).to(x.dtype)

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, {self._kind()}"


class FP4Experts(PackedModule):
    """The fused experts of a mixture-of-experts layer, packed: two projections around the model's own gate.

    Stands in for transformers' experts modules (Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V3 and the like, gpt-oss) and
    keeps their attributes. Whatever the original's arrangement, weights are packed along the reduction dimension:
    `gate_up_proj_packed` uint8 `[E, 2I, H/2]`, `down_proj_packed` uint8 `[E, H, I/2]`, with `_scale` and, for NVFP4,
    `_global_scale` float32 `[E, P]` (one column for each projection merged in; **divides**). Rows of gate_up_proj stay
    in the model's order ([gate; up], or interleaved for gpt-oss). Where gate and up of an expert have different tensor
    scales, as checkpoints of other tools may, the two are multiplied as matrices of their own (`is_uneven`).

    With a gate that is known (`activation`), the whole layer is one operator, `experts_ops.experts`; any other gate
    runs in torch between two grouped linears. transformers' choice of an experts implementation does not apply: its
    functions read dense weights.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        format: BlockFormat = NVFP4,
        act_fn: Callable | None = None,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        device=None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        backend: str = "auto",
        activation_format: str | None = None,
        macro_block: bool = False,
        outliers: bool = False,
    ):
        super().__init__()
        self.num_experts, self.format = num_experts, format
        self.backend, self.compute_dtype, self.activation_format = backend, compute_dtype, activation_format
        self.dtype = dtype or torch.get_default_dtype()
        self.act_fn, self.has_gate, self.has_bias = act_fn, has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.gate_function: Callable | None = None
        self.activation: Activation | None = None
        self.first = "gate_up_proj" if has_gate else "up_proj"
        self.shapes = {
            self.first: (num_experts, intermediate_size * (2 if has_gate else 1), hidden_size),
            "down_proj": (num_experts, hidden_size, intermediate_size),
        }
        for name, shape in self.shapes.items():
            merged = 2 if name == "gate_up_proj" else 1
            self._register_packed(name, shape, (num_experts, merged), device, macro_block, outliers)
            if has_bias:
                bias = torch.empty(shape[:2], device=device, dtype=self.dtype)
                self.register_parameter(f"{name}_bias", nn.Parameter(bias))

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        # A setting of the gate may have changed: what was recognised before would be a wrong guess.
        if not name.startswith("_") and name not in ("activation", "training") and "activation" in self.__dict__:
            self.activation = recognise(self)

    @classmethod
    def unsupported_reason(cls, experts: nn.Module) -> str | None:
        """Why an experts module cannot be packed, or `None` if it can."""
        flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
        missing = [flag for flag in flags if not hasattr(experts, flag)]
        if missing:
            return f"{type(experts).__name__} does not say how its weights are laid out (no {', '.join(missing)})"
        if getattr(experts, "has_post_expert_norm", False):
            return f"{type(experts).__name__} normalizes after each expert"
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        known = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if experts.has_bias else set())
        found = {name for name, _ in experts.named_parameters()}
        if found != known:
            return f"{type(experts).__name__} has parameters {sorted(found)}, expected {sorted(known)}"
        if getattr(experts, first).ndim != 3 or experts.down_proj.ndim != 3:
            return f"{type(experts).__name__}'s weights are not stacks of matrices"
        return None

    @classmethod
    def from_experts(cls, experts: nn.Module, format: BlockFormat, device="meta", **kwargs) -> FP4Experts:
        """An empty stand-in (buffers on `device`) for a transformers experts module; biases are taken over."""
        down = experts.down_proj.shape
        intermediate_size, hidden_size = down[1:] if experts.is_transposed else (down[2], down[1])
        module = cls(
            experts.num_experts,
            hidden_size,
            intermediate_size,
            format=format,
            act_fn=getattr(experts, "act_fn", None),
            has_gate=experts.has_gate,
            has_bias=experts.has_bias,
            is_transposed=experts.is_transposed,
            is_concatenated=experts.is_concatenated,
            dtype=experts.down_proj.dtype,
            device=device,
            **kwargs,
        )
        for name, value in vars(experts).items():  # the gate's own settings, such as gpt-oss's alpha and limit
            if not name.startswith("_") and name not in vars(module) and name not in module._modules:
                setattr(module, name, value)
        module._is_expert_parallel = getattr(experts, "_is_expert_parallel", False)
        module.gate_function = getattr(type(experts), "_apply_gate", None)
        for name in module.shapes if experts.has_bias else ():
            setattr(module, f"{name}_bias", getattr(experts, f"{name}_bias"))
        return module

    def load_projection(self, name: str, weight: QuantizedTensor) -> None:
        """Take over a packed projection `[E, N, K]`, `name` being `gate_up_proj`, `up_proj` or `down_proj`."""
        self._load_packed(name, weight)

    def quantized(self, name: str) -> QuantizedTensor:
        """A packed projection `[E, N, K]`; its scales multiply, `global_scale` `[E]`.

        If it `is_uneven`: `[2E, I, K]`, gate and up of each expert in turn, `global_scale` `[2E]`.
        """
        weight = self.packed_weight(name)
        if not self.is_uneven(name):
            return weight
        experts, rows, _ = self.shapes[name]
        parts = {part: getattr(weight, part) for part in ("packed", "scale", "macro")}
        parts = {
            part: None if value is None else value.view(2 * experts, rows // 2, -1) for part, value in parts.items()
        }
        divisor = self._buffers[f"{name}_global_scale"]
        return weight._replace(**parts, global_scale=divisor.reciprocal().flatten())

    def is_uneven(self, name: str) -> bool:
        """Whether gate and up of an expert have different tensor scales; where values cannot be read, if they may.

        Scales a few float32 steps apart count as one (reciprocals of one that multiplied, each rounded for itself):
        products are formed with the gate's, `dequantized` with each its own.

        Read once, as `tensor_scale` is computed once; while a graph is made, as `prepare` last saw it.
        """
        stored = self._buffers.get(f"{name}_global_scale")
        if stored is None or stored.shape[-1] == 1 or not self.is_concatenated or stored.is_meta:
            return False
        kept = self._tensor_scales.get(f"{name}, halves")
        if torch.compiler.is_compiling():
            return True if kept is None else kept[1]
        version = None if stored.is_inference() else stored._version
        if kept is None or kept[0] is not stored or kept[2] != version:
            unreadable = type(stored) is not torch.Tensor or torch._C._functorch.peek_interpreter_stack() is not None
            if unreadable or (stored.is_cuda and torch.cuda.is_current_stream_capturing()):
                return True
            gate, up = stored.unbind(-1)
            kept = stored, bool(((gate - up).abs() > _STEP * gate.abs()).any()), version
            self._tensor_scales[f"{name}, halves"] = kept
        return kept[1]

    def prepare(self) -> None:
        """As `PackedModule.prepare`; and read whether projections are uneven."""
        super().prepare()
        for name in self.shapes:
            self.is_uneven(name)

    def dequantized(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A projection in the original module's arrangement (transposed where that one is), in `dtype`."""
        dense = self.dense(name, dtype or self.dtype)
        return dense.transpose(1, 2).contiguous() if self.is_transposed else dense

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.gate_function is not None and self.has_gate:
            return self.gate_function(self, gate_up)
        if not self.has_gate:
            return self.act_fn(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _project(self, name: str, x: torch.Tensor, offsets: torch.Tensor, deltas: Sequence[Delta] = ()):
        out = self._packed_product(name, x, offsets)
        for delta in deltas:
            out = out + delta(x.to(out.dtype), offsets)
        return out

    def _packed_product(self, name: str, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        if bias is not None:
            bias = bias.to(x.dtype)
        x, weight = self._activations(x), self.quantized(name)
        if not self.is_uneven(name):
            return ops.grouped_linear(x, offsets, weight, bias, self.backend)
        bias = None if bias is None else bias.view(weight.shape[:2])
        token, gate, up, offsets = experts_ops.halves(x.shape[0], offsets)
        out = ops.grouped_linear(x[token], offsets, weight, bias, self.backend)
        return torch.cat([out[gate], out[up]], dim=-1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        deltas: Mapping[str, Sequence[Delta]] | None = None,
    ) -> torch.Tensor:
        """Route tokens through their experts.

        Args:
            hidden_states: `[..., H]`.
            top_k_index: int64 `[M, k]`, expert ids; ids >= num_experts (expert-parallel sentinels) contribute nothing.
            top_k_weights: `[M, k]`.
            deltas: by projection, what adapters add to its product: each a function of rows `[T, K]` sorted by
                expert, in the product's dtype, and int32 offsets `[E+1]` of the experts, that returns `[T, N]` and
                nothing but zeros for the rows of no expert.

        Returns:
            `[..., H]` in the dtype of `hidden_states`.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        if deltas or self.activation is None or self.activation_format is not None or self.is_uneven(self.first):
            out = self._by_projection(x, top_k_index, top_k_weights, deltas or {})
        else:
            (first, first_bias), (down, down_bias) = (
                (self.packed_weight(name), getattr(self, f"{name}_bias") if self.has_bias else None)
                for name in self.shapes
            )
            weights = (first, first_bias, down, down_bias)
            out = experts_ops.experts(x, top_k_index, top_k_weights, *weights, self.activation, self.backend)
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    def _by_projection(self, x, top_k_index, top_k_weights, deltas) -> torch.Tensor:
        """Tokens `[M, H]` projection by projection: through a gate that is not fused, inputs rounded to FP4, uneven
        halves, or adapters."""
        order, offsets = experts_ops.route(top_k_index, self.num_experts)
        top_k = top_k_index.shape[-1]
        out = self._project(self.first, x[order // top_k], offsets, deltas.get(self.first, ()))
        out = self._apply_gate(out) if self.activation is None else between(out, self.activation, self.has_gate)
        out = self._project("down_proj", out, offsets, deltas.get("down_proj", ()))
        out = torch.zeros_like(out).index_copy(0, order, out)  # back in the order of the tokens
        out, kept = out.unflatten(0, (x.shape[0], top_k)), (top_k_index >= 0) & (top_k_index < self.num_experts)
        weights = torch.where(kept, top_k_weights, 0)
        if weights.dtype != out.dtype:
            return (out * weights[..., None]).sum(1, dtype=torch.promote_types(out.dtype, torch.float32))
        return torch.bmm(weights[:, None], out)[:, 0]  # summed in float32, with no product of its own to keep

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={shape}" for name, shape in self.shapes.items())
        return f"num_experts={self.num_experts}, {shapes}, {self._kind()}"
