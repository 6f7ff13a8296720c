# SPDX-License-Identifier: Apache-2.0
"""What every stored layout is read into: packed matrices by the names their dense weights would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import Checkpoint, StoredTensor
from hf_mxfp4.formats import BlockFormat

Read = Callable[[str], torch.Tensor]  # a tensor of the checkpoint by its name, such as a `TensorReader`


class PackedTensors(NamedTuple):
    """A packed weight `[..., N, K]` as the buffers of our modules hold it (`packed.PackedModule`).

    Attributes:
        packed: uint8 `[..., N, K/2]`, even k in the low nibble.
        scale: `[..., N, K/B]` in the format's scale dtype.
        global_scale: float32 `[..., 1]` that **divides**, or `None` for formats without one; a stack of matrices
            `[E, N, K]` with P projections one below the other may have `[E, P]`.
        macro_scale: uint8 `[..., N, ceil(K/128)]`, or `None`.
        outlier_values, outlier_columns, outlier_offsets: `formats.Outliers`, or `None`.
        pre_quant_scale: `[K]`, multiplies the input before the product (AWQ), or `None`.
        hadamard: `[g, g]` H: the input is to be multiplied by it, in groups of g channels, before the product
            (`x.unflatten(-1, (-1, g)) @ H`), since the weight is stored as W @ H; or `None`.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    macro_scale: torch.Tensor | None = None
    outlier_values: torch.Tensor | None = None
    outlier_columns: torch.Tensor | None = None
    outlier_offsets: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None
    hadamard: torch.Tensor | None = None


class PackedMatrix(NamedTuple):
    """One packed weight of a checkpoint, not read yet.

    Attributes:
        format: its block format.
        shape: of the weight it stands for, packed dimension last: `[N, K]`, or `[E, N, K]` for fused experts.
        keys: names in the checkpoint of all its tensors.
        decode: reads and rearranges them.
        transposed: whether the dense weight of that name is `[..., K, N]` (gpt-oss, Llama 4).
    """

    format: BlockFormat
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    decode: Callable[[Read], PackedTensors]
    transposed: bool = False


class Contents(NamedTuple):
    """What a quantized checkpoint holds.

    Attributes:
        layout: the row of `layouts.LAYOUTS` that read it.
        origin: the tool that made it, with its version where the checkpoint says so.
        matrices: packed weights by the name of the dense weight in a full-precision checkpoint of the same model:
            `model.layers.0.self_attn.q_proj.weight`, `model.layers.0.mlp.experts.3.gate_proj.weight`, or for fused
            experts `model.layers.0.mlp.experts.gate_up_proj`.
        skipped: tensors that are not used, by name, and why (scales of a KV cache, of activations).
        notes: what the checkpoint asks for that loading does not follow, in sentences for the user.
        activation_format: `"same"` if it asks for activations in FP4 (W4A4), else `None`.
    """

    layout: str
    origin: str
    matrices: dict[str, PackedMatrix]
    skipped: dict[str, str]
    notes: tuple[str, ...] = ()
    activation_format: str | None = None

    def plain(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors that are neither packed nor skipped: stored in full precision."""
        used = {key for matrix in self.matrices.values() for key in matrix.keys}
        return {name: tensor for name, tensor in tensors.items() if name not in used and name not in self.skipped}


class StoredLayout(NamedTuple):
    """A row of `layouts.LAYOUTS`.

    Attributes:
        name: as users see it.
        recognise: whether a checkpoint is in this layout, from its configs and headers.
        read: its contents, from headers alone.

            Raises:
                ValueError: for what is damaged or incomplete, and `NotImplementedError`'s cases, by name: FP8 layers,
                SVD branches and whatever else this package does not compute.
    """

    name: str
    recognise: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], Contents]


def expect(checkpoint: Checkpoint, name: str, dtype: str | tuple[str, ...], shape: tuple[int, ...] | None) -> None:
    """Raise `ValueError` unless a tensor is there with this stored dtype (or one of them) and shape (`None`: any)."""
    allowed = (dtype,) if isinstance(dtype, str) else dtype
    found = checkpoint.tensors.get(name)
    if found is None:
        raise ValueError(f"the checkpoint holds no {name}, which its quantized weight needs. Download it again.")
    if found.dtype not in allowed or (shape is not None and found.shape != shape):
        wanted = "" if shape is None else f" {list(shape)}"
        raise ValueError(
            f"{name}: {found.dtype} {list(found.shape)} in {found.file}, expected {' or '.join(allowed)}{wanted}. Its "
            "config and files do not belong together, or were edited; download it again."
        )


def divisor_of(multiplier: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 divisor `[...]` that stands for a tensor scale which multiplies.

    The nearest reciprocal may decode a block scale one float32 step off; of its neighbours, the one is taken with
    which the most block scales in use (`scale`, stored scales of the weight) decode to the same float32.
    """
    raise NotImplementedError
