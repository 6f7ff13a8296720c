# SPDX-License-Identifier: Apache-2.0
"""What every stored layout is read into: packed matrices by the names their dense weights would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hf_mxfp4.checkpoint_files import Checkpoint, StoredTensor
from hf_mxfp4.checkpoints import FULL_PRECISION, check_scales
from hf_mxfp4.formats import MXFP4, NVFP4, BlockFormat, decode_e4m3

SCALE_DTYPES = {NVFP4.name: ("F8_E4M3",), MXFP4.name: ("U8", "F8_E8M0")}
_QUANTIZED_ENDINGS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point")
EDITED = "Config and files do not belong together, or were edited; download the checkpoint again."

Read = Callable[[str], torch.Tensor]  # a tensor of the checkpoint by its name, such as a `TensorReader`
Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # float32 codes `[2, 1]`, scales `[n]` -> weights `[2, n]`


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
        wanted = " or ".join(allowed) + ("" if shape is None else f" {list(shape)}")
        raise ValueError(f"{name}: {found.dtype} {list(found.shape)} in {found.file}, expected {wanted}. {EDITED}")


def refuse_leftovers(checkpoint: Checkpoint, contents: Contents) -> None:
    """Raise `ValueError` for tensors that no packed weight uses and that are quantized: FP8, integers, lone scales.

    A loader would cast them to the model's dtype, and the model would run on nonsense.
    """
    left = []
    for name, tensor in contents.plain(checkpoint.tensors).items():
        whole = tensor.dtype in FULL_PRECISION
        matrix = len(tensor.shape) > 1 and name.endswith(("weight", "_proj", "packed"))
        if name.endswith(_QUANTIZED_ENDINGS) or (not whole and (matrix or tensor.dtype[0] == "F")):
            left.append(f"{name} ({tensor.dtype})")
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ValueError(
            f"this checkpoint ({contents.layout}) holds tensors that are quantized in another way: "
            f"{', '.join(left[:3])}{more}. They are not supported beside FP4; use the full-precision checkpoint."
        )


def stored_format(checkpoint: Checkpoint, scale: str) -> BlockFormat:
    """The format of a packed weight, by the stored dtype of its block scales."""
    expect(checkpoint, scale, (*SCALE_DTYPES[NVFP4.name], *SCALE_DTYPES[MXFP4.name]), None)
    return NVFP4 if checkpoint.tensors[scale].dtype in SCALE_DTYPES[NVFP4.name] else MXFP4


def weight_shape(checkpoint: Checkpoint, fmt: BlockFormat, packed: str, scale: str, stacked: bool = False):
    """Shape `[N, K]` (or `[E, N, K]`: `stacked`) of a weight from its stored codes and block scales, both checked."""
    expect(checkpoint, packed, "U8", None)
    *lead, half = checkpoint.tensors[packed].shape or (0,)
    shape = (*lead, 2 * half)
    if len(shape) != 2 + stacked or 0 in shape or shape[-1] % fmt.block_size:
        wanted = f"[{'E, ' if stacked else ''}N, K/2], not empty, K a multiple of {fmt.name}'s {fmt.block_size}"
        file = checkpoint.tensors[packed].file
        raise ValueError(f"{packed}: codes of shape {[*lead, half]} in {file}, expected {wanted}. {EDITED}")
    expect(checkpoint, scale, SCALE_DTYPES[fmt.name], (*lead, shape[-1] // fmt.block_size))
    return shape


def expect_tensor_scale(checkpoint: Checkpoint, name: str) -> None:
    """Raise `ValueError` unless a float32 tensor of one value is there, whatever its number of dimensions."""
    expect(checkpoint, name, "F32", None)
    shape = checkpoint.tensors[name].shape
    if any(size != 1 for size in shape):
        expect(checkpoint, name, "F32", (1,))


def checked(name: str, fmt: BlockFormat, stored: PackedTensors) -> PackedTensors:
    """Packed tensors as our modules want them: contiguous, with positive scales.

    A block scale of zero, which some tools store, makes its block zero: so do codes of zero under the smallest normal
    scale, which is what this package stores for such blocks.

    Raises:
        ValueError: for scales that are negative, NaN or out of range.
    """
    packed, scale = stored.packed.contiguous(), stored.scale.contiguous()
    byte = scale.view(torch.uint8)
    if fmt.has_global_scale and bool((empty := byte & 0x7F == 0).any()):
        signs = packed.unflatten(-1, (-1, fmt.block_size // 2)) & 0x88
        packed = torch.where(empty[..., None], signs, packed.view(signs.shape)).flatten(-2)
        byte = byte.masked_fill(empty, fmt.zero_byte)
    stored = stored._replace(packed=packed, scale=fmt.scale_from_bytes(byte))
    check_scales(name, fmt, stored.scale, stored.global_scale)
    return stored


def divisor_of(multiplier: torch.Tensor, scale: torch.Tensor, form: Form | None = None) -> torch.Tensor:
    """The float32 divisor that stands for an NVFP4 tensor scale which multiplies.

    The nearest reciprocal may decode a block scale one float32 step off, which shows in bfloat16 where the weight lies
    next to, or exactly, halfway between two values. Of it and its two neighbours, the one is taken with which the
    fewest block scales in use decode to weights of other bfloat16 bits, and among those to other float32 bits.

    No divisor is right for every tensor scale. Enumerated over amax/2688, for amax in bfloat16: 1 mantissa of 128 has
    such weights (one of 16 products of code and scale; 2 of 128 with the nearest reciprocal); over amax/1536: 9 of 128
    (21 with the nearest); for amax of 24 bits less than 1 in 10000. They are rounded to the other of two values that
    are equally near.

    Args:
        multiplier: float32 `[...]`, one for each matrix.
        scale: float8_e4m3fn `[..., N, K/16]`, the stored block scales.
        form: how weights are formed where that is not `code * (scale * multiplier)`.

    Returns:
        float32, of `multiplier`'s shape.
    """
    scales = scale.view(torch.uint8).reshape(multiplier.numel(), -1)
    factors = multiplier.float().flatten()
    divisors = [_divisor(factor, used, form) for factor, used in zip(factors, scales, strict=True)]
    return torch.stack(divisors).view(multiplier.shape)


def _divisor(multiplier: torch.Tensor, scale: torch.Tensor, form: Form | None) -> torch.Tensor:
    nearest = multiplier.reciprocal()
    if not bool(nearest.isfinite()) or (form is None and float(multiplier.frexp().mantissa) == 0.5):
        return nearest  # a power of two is exact; 0, NaN and the like are refused by `checked`
    candidates = [nearest, *(nearest.nextafter(torch.tensor(end)) for end in (0.0, torch.inf))]
    count = torch.bincount(scale.to(torch.int32), minlength=256)
    used = count.nonzero().flatten()
    value = decode_e4m3(used.to(torch.uint8))
    value, count = value[value.isfinite()], count[used][value.isfinite()]
    codes = torch.tensor([[1.0], [1.5]])  # the two mantissas of E2M1
    wanted = codes * (value * multiplier) if form is None else form(codes, value)

    def misses(divisor: torch.Tensor) -> tuple[int, int]:
        found = codes * (value / divisor)
        bits = found.bfloat16() != wanted.bfloat16()
        return int((bits.any(0) * count).sum()), int(((found != wanted).any(0) * count).sum())

    return min(candidates, key=misses)
