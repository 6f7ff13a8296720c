# SPDX-License-Identifier: Apache-2.0
"""The linear layers that scripts/benchmark_kernels.py times: ours, torch's bf16 one, and those of other projects.

A peer's package is imported when it is first used.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from exactness import random_weight
from hf_mxfp4 import ops
from hf_mxfp4.formats import FORMATS, QuantizedTensor

BASELINE = "bf16"
OURS = tuple(FORMATS)  # names of our contenders: the formats'
Forward = Callable[[torch.Tensor], torch.Tensor]


class Layer:
    """The weight `[N, K]` of a layer, dense and packed (random, and not each other's)."""

    def __init__(self, n: int, k: int, device: torch.device):
        self.n, self.k, self.device = n, k, device

    @cached_property
    def dense(self) -> torch.Tensor:
        """bfloat16 `[N, K]`."""
        return torch.randn(self.n, self.k, dtype=torch.bfloat16, device=self.device) * 0.02

    @cached_property
    def packed(self) -> dict[str, QuantizedTensor]:
        """One packed weight for each format, by name."""
        return {name: random_weight(self.n, self.k, fmt=fmt, device=self.device) for name, fmt in FORMATS.items()}

    def linear(self) -> nn.Linear:
        """A bfloat16 `nn.Linear` with a copy of the dense weight."""
        linear = nn.Linear(self.k, self.n, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dense.clone(), requires_grad=False)
        return linear


class Contender(NamedTuple):
    """A way to multiply.

    Attributes:
        name: unique among `KNOWN`.
        package: on PyPI; empty for ours and torch's.
        make: a layer -> its forward, around a copy of the weight that no other call shares.
        nbytes: a layer -> bytes of one copy of the weight.
        devices: types of device it runs on.
        suits: (layer, tokens) -> whether it is worth its time there.
    """

    name: str
    package: str
    make: Callable[[Layer], Forward]
    nbytes: Callable[[Layer], float]
    devices: tuple[str, ...] = ("cuda", "cpu")
    suits: Callable[[Layer, int], bool] = lambda layer, tokens: True

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package) if self.package else ""

    def is_installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


def clone(weight: QuantizedTensor) -> QuantizedTensor:
    """A copy of what is stored for each weight (a tensor scale is shared)."""
    return weight._replace(packed=weight.packed.clone(), scale=weight.scale.clone())


def _ours(name: str, layer: Layer) -> Forward:
    return partial(ops.linear, weight=clone(layer.packed[name]))


def _dequantized(layer: Layer) -> Forward:
    weight = clone(layer.packed["mxfp4"])
    return lambda x: F.linear(x, ops.dequantize(weight, x.dtype))


def _bitsandbytes(quant_type: str, layer: Layer) -> Forward:
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(
        layer.k, layer.n, bias=False, compute_dtype=torch.bfloat16, quant_type=quant_type, device="meta"
    )
    linear.weight = bitsandbytes.nn.Params4bit(layer.dense.clone(), requires_grad=False, quant_type=quant_type)
    return linear.to(layer.device).eval()  # in eval mode it packs for the CPU, at the first call


def _torchao(layer: Layer) -> Forward:
    from torchao.quantization import quantize_

    if layer.device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=128)
    else:
        from torchao.quantization import Int4WeightOnlyConfig

        config = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
    linear = layer.linear()
    quantize_(linear, config)
    return linear


def _gemlite(layer: Layer) -> Forward:
    from gemlite.helper import A16W4_MXFP

    return A16W4_MXFP(device=str(layer.device), dtype=torch.bfloat16).from_linear(layer.linear())


def _is_gemlites(layer: Layer, tokens: int) -> bool:
    """It tunes itself for every shape and bucket of tokens, which takes long: only where a target is set."""
    return (layer.n, layer.k) == (12288, 4096) and tokens <= 16


def _bits(bits: float) -> Callable[[Layer], float]:
    return lambda layer: layer.n * layer.k * bits / 8


def _known() -> Iterator[Contender]:
    yield Contender(BASELINE, "", lambda layer: partial(F.linear, weight=layer.dense.clone()), _bits(16))
    for name in OURS:
        yield Contender(name, "", partial(_ours, name), lambda layer, name=name: layer.packed[name].nbytes)
    # Read packed; written and read as bfloat16.
    yield Contender("dequantize, matmul", "", _dequantized, _bits(4.25 + 32))
    yield Contender("gemlite mxfp4", "gemlite", _gemlite, _bits(4.25), ("cuda",), _is_gemlites)
    for quant_type in ("nf4", "fp4"):
        make = partial(_bitsandbytes, quant_type)
        yield Contender(f"bitsandbytes {quant_type}", "bitsandbytes", make, _bits(4.5))
    yield Contender("torchao int4", "torchao", _torchao, _bits(4.25))


KNOWN = {contender.name: contender for contender in _known()}


def contenders(device: torch.device) -> dict[str, Contender]:
    """Those that are installed and run on a device."""
    return {c.name: c for c in KNOWN.values() if device.type in c.devices and c.is_installed()}
