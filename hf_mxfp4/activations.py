# SPDX-License-Identifier: Apache-2.0
"""What stands between the two projections of fused experts: activations, in torch, and which of them a module uses.

    gated    act(min(gate, limit)) * (clamp(up, -limit, limit) + shift)
    without  act(min(x, limit))

act is a row of `ACTIVATIONS`. The kernels (kernels/experts.py) compute the same; what is not recognised here is left
to the module's own gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

_CUBIC = 0.044715


def _silu(x, alpha):
    return x * torch.sigmoid(alpha * x)


def _silu_slope(x, alpha):
    s = torch.sigmoid(alpha * x)
    return s * (1 + alpha * x * (1 - s))


def _gelu_slope(x, alpha):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x, alpha):
    s = torch.sigmoid(math.sqrt(8 / math.pi) * (x + _CUBIC * x**3))
    return s + x * s * (1 - s) * math.sqrt(8 / math.pi) * (1 + 3 * _CUBIC * x * x)


# Name: the function and its derivative, of x and alpha; alpha is silu's alone.
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "silu": (_silu, _silu_slope),
    "gelu": (lambda x, alpha: F.gelu(x), _gelu_slope),
    "gelu_tanh": (lambda x, alpha: F.gelu(x, approximate="tanh"), _gelu_tanh_slope),
    "relu": (lambda x, alpha: F.relu(x), lambda x, alpha: (x > 0).to(x.dtype)),
    "relu2": (lambda x, alpha: F.relu(x).square(), lambda x, alpha: 2 * F.relu(x)),
}


class Activation(NamedTuple):
    """An activation as the operator `hf_mxfp4::experts` takes it: gate and up rows stand one after the other, or
    `interleaved`."""

    name: str
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        """`[..., 2I]` (or, without a gate, `[..., I]`) -> `[..., I]`, in x's dtype."""
        gate, up = self.split(x) if gated else (x, None)
        out = ACTIVATIONS[self.name][0](gate.clamp(max=self.limit), self.alpha)
        return out if up is None else out * (up.clamp(-self.limit, self.limit) + self.shift)

    def backward(self, grad: torch.Tensor, x: torch.Tensor, gated: bool) -> torch.Tensor:
        """The gradient with respect to x; `grad` `[..., I]` is that of the output."""
        function, slope = ACTIVATIONS[self.name]
        gate, up = self.split(x) if gated else (x, None)
        low = gate.clamp(max=self.limit)
        grad_gate = grad * slope(low, self.alpha) * (gate <= self.limit)
        if up is None:
            return grad_gate
        grad_gate = grad_gate * (up.clamp(-self.limit, self.limit) + self.shift)
        grad_up = grad * function(low, self.alpha) * (up.abs() <= self.limit)
        if self.interleaved:
            return torch.stack((grad_gate, grad_up), -1).flatten(-2)
        return torch.cat((grad_gate, grad_up), -1)


class _Between(torch.autograd.Function):
    """An activation in float32 that keeps nothing for its gradient but its input."""

    @staticmethod
    def forward(ctx, x, activation, gated):
        ctx.save_for_backward(x)
        ctx.arguments = activation, gated
        return activation.forward(x.to(torch.promote_types(x.dtype, torch.float32)), gated).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,), (activation, gated) = ctx.saved_tensors, ctx.arguments
        wide = torch.promote_types(x.dtype, torch.float32)
        return activation.backward(grad.to(wide), x.to(wide), gated).to(x.dtype), None, None


def between(x: torch.Tensor, activation: Activation, gated: bool) -> torch.Tensor:
    """`activation` of a first projection's output `[..., 2I]`, or `[..., I]` without a gate, as the operator
    `hf_mxfp4::experts` computes it: in float32, rounded to x's dtype."""
    return _Between.apply(x, activation, gated)


# --- recognition -----------------------------------------------------------------------------------------------------

# Functions and exact types by their full name: a module that uses them has imported them, we need not.
_FUNCTIONS = {
    "transformers.activations.SiLUActivation": Activation("silu"),
    "transformers.activations.GELUActivation": Activation("gelu"),
    "transformers.activations.GELUTanh": Activation("gelu_tanh"),
    "transformers.activations.NewGELUActivation": Activation("gelu_tanh"),
    "transformers.activations.QuickGELUActivation": Activation("silu", 1.702),
    "transformers.activations.ReLUSquaredActivation": Activation("relu2"),
    "torch.nn.modules.activation.SiLU": Activation("silu"),
    "torch.nn.modules.activation.ReLU": Activation("relu"),
    "torch.nn.functional.silu": Activation("silu"),
    "torch.nn.functional.relu": Activation("relu"),
}
_BUILTINS = ((torch.relu, Activation("relu")), (F.gelu, Activation("gelu")))


class Gate(NamedTuple):
    """A model's gate: its own attributes that hold alpha and the limit, and whether its act_fn is used."""

    act_fn: bool = True
    alpha: str | None = None
    limit: str | None = None
    shift: float = 0.0
    interleaved: bool = False


_MODELS = "transformers.models.{0}.modeling_{0}.{1}Experts._apply_gate"
GATES = {
    "transformers.integrations.moe._default_apply_gate": Gate(),
    _MODELS.format("gpt_oss", "GptOss"): Gate(False, "alpha", "limit", 1.0, True),
    _MODELS.format("openai_privacy_filter", "OpenAIPrivacyFilter"): Gate(False, "alpha", "limit", 1.0),
    _MODELS.format("minimax_m3_vl", "MiniMaxM3VL"): Gate(False, "swiglu_alpha", "swiglu_limit", 1.0),
    _MODELS.format("deepseek_v4", "DeepseekV4"): Gate(True, limit="limit"),
    _MODELS.format("hy_v4", "HYV4"): Gate(False, limit="swiglu_limit"),
    _MODELS.format("glm5_next", "Glm5NextText"): Gate(False, limit="swiglu_limit"),
}


def _full_name(thing) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def _function(act_fn) -> Activation | None:
    if isinstance(act_fn, nn.Module):
        return _FUNCTIONS.get(_full_name(type(act_fn)))
    return next((row for builtin, row in _BUILTINS if builtin is act_fn), None) or _FUNCTIONS.get(_full_name(act_fn))


def recognise(experts: nn.Module) -> Activation | None:
    """The activation of an `FP4Experts`, or `None` if it has one that is not known here.

    Only what is known by name is recognised: a gate that a model or a user wrote themselves is none of these.
    """
    gate = (
        Gate()
        if experts.gate_function is None or not experts.has_gate
        else GATES.get(_full_name(experts.gate_function))
    )
    if gate is None:
        return None
    found = _function(experts.act_fn) if gate.act_fn else Activation("silu")
    settings = {}
    for field, attribute in (("alpha", gate.alpha), ("limit", gate.limit)):
        if attribute is not None:
            settings[field] = getattr(experts, attribute, None)
            if not isinstance(settings[field], int | float):
                return None
    return found and found._replace(**settings, shift=gate.shift, interleaved=gate.interleaved)
