# SPDX-License-Identifier: Apache-2.0
"""Packed weights changed in place: quantized anew by the rule they were quantized by, and put back bit for bit.

The rule alone is applied: what it was once given besides (error feedback, channel weights) was of the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_mxfp4.blocks import row_chunks
from hf_mxfp4.formats import E2M1_MAX, E4M3_MAX, MACRO_BLOCK, Outliers, QuantizedTensor
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.packed import INTEGERS, TRANSFORMS, PackedModule, dense_copy
from hf_mxfp4.recipe import Recipe
from hf_mxfp4.reference import decode_rows, encode, outlier_mask
from hf_mxfp4.scales import ScaleOptions, Scales

_TIE = 1e-4  # errors this close to each other, relatively, are equal
_E4M3_EDGE = 464.0  # what is below rounds to 448, the largest E4M3 number
_SINGULAR = 1e-6  # of an input transform: its smallest singular value, relative to the largest


class Stash:
    """The tensors of one packed weight, and of a linear the bias: by reference, until `restore` puts them back.

    It holds integers, which no cast changes and every pickle takes, and stands in no state dict. With them goes the
    record of the last merge, if there was one.
    """

    def __init__(self, module: PackedModule, prefix: str):
        buffers = {name: buffer for name, buffer in module._buffers.items() if name.startswith(f"{prefix}_")}
        bias = module.bias if isinstance(module, FP4Linear) else None
        self.prefix, self.record = prefix, vars(module).get("_merges", {}).get(prefix)
        self.dtypes = {name: buffer.dtype for name, buffer in buffers.items()}
        self.integers = {name: buffer.view(INTEGERS[buffer.itemsize]) for name, buffer in buffers.items()}
        self.bias = None if bias is None else bias.data

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move it as `nn.Module._apply` moves a module; only the bias is cast."""
        for name, integers in self.integers.items():
            moved = fn(integers)
            self.integers[name] = moved if moved.dtype == integers.dtype else integers.to(moved.device)
        self.bias = None if self.bias is None else fn(self.bias)


def stash(module: PackedModule, prefix: str = "weight") -> Stash:
    """What `restore` needs to undo any change of a packed weight: no copies, but the old tensors stay in memory.

    Args:
        module (`FP4Linear` or `FP4Experts`): the module; nothing in it changes.
        prefix (`str`): `"weight"` of a linear, or the name of a projection of experts.
    """
    return Stash(module, prefix)


def restore(module: PackedModule, stashed: Stash) -> None:
    """Put the tensors of `stash` back, bit for bit."""
    buffers = {name: integers.view(stashed.dtypes[name]) for name, integers in stashed.integers.items()}
    module._buffers.update(buffers)  # at once: codes and scales of two weights must not meet
    if stashed.bias is not None:
        module.bias.data = stashed.bias
    records = vars(module).setdefault("_merges", {})
    records.pop(stashed.prefix, None)
    if stashed.record is not None:
        records[stashed.prefix] = stashed.record
    module.prepare()


def recipe_of(module: PackedModule) -> Recipe:
    """The rule a module is quantized by; `soar` where it is not known (`soar` with searched factors if it has any)."""
    if module.recipe is not None:
        return module.recipe
    has_factors = any(name.endswith("_macro_scale") for name in module._buffers)
    return Recipe(module.format, "soar", ScaleOptions(), "search" if has_factors else None)


def matrix_name(module: PackedModule, prefix: str, expert: int | None = None) -> str:
    """How messages call a packed weight, or one expert's."""
    name = f"{module.path or type(module).__name__}.{prefix}"
    return name if expert is None or isinstance(module, FP4Linear) else f"{name}[{expert}]"


def check_in_memory(module: PackedModule, what: str) -> None:
    """Raise `ValueError` for a module whose tensors are not there to be changed."""
    hook = getattr(module, "_hf_hook", None)
    if any(tensor.is_meta for tensor in (*module.buffers(), *module.parameters())) or getattr(hook, "offload", False):
        raise ValueError(
            f"{module.path or type(module).__name__} is offloaded, or on the meta device: {what} needs its packed "
            "weights in memory. Load the model without offloading."
        )


@torch.no_grad()
def requantize(module: PackedModule, prefix: str, dense: torch.Tensor, expert: int = 0) -> QuantizedTensor:
    """One matrix quantized as a module's own was: by its recipe, with outliers in the same places.

    The tensor scale stays as it is while the weight fits: siblings (q/k/v) keep sharing one. Otherwise it is
    multiplied by the power of two that fits, which keeps theirs a shift of exponents apart.

    Blocks keep their stored scale where it brings the new values closer than the rule's. (Dequantized maxima lie on
    the edges of the rules that read them: the smallest change would move MXFP4's `amax` to half a block's scale, and
    its maximum from 8 to 6 of the new steps.) The rule `soar` has the best scale anyway.

    Args:
        module (`FP4Linear` or `FP4Experts`): is left as it is.
        prefix (`str`): `"weight"`, or the name of a projection.
        dense (`torch.Tensor`): float32 or float64 `[N, K]`, for the module's input as it comes (before any transform
            of it). K is the dimension that is summed over, also where the model stores experts transposed.
        expert (`int`): which matrix of a stack it stands for.

    Returns:
        `QuantizedTensor` `[N, K]`, as the transformed input meets it; of experts whose halves have tensor scales of
        their own `[2, N/2, K]`.

    Raises:
        ValueError: for another shape, NaN or Inf, and input transforms that cannot be inverted.
    """
    own = stored_matrix(module, prefix, expert)
    name = matrix_name(module, prefix, expert)
    shape = (own["packed"].shape[0], 2 * own["packed"].shape[1])
    if dense.shape != shape or dense.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: {dense.dtype} {list(dense.shape)}; float32 or float64 {list(shape)} is needed.")
    values = _packed_basis(module, dense, name).to(torch.float32)
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: {int((~values.isfinite()).sum())} of {values.numel()} values are NaN or Inf.")
    keep = None
    if "outlier_values" in own:
        keep = outlier_mask(Outliers(*(own[f"outlier_{field}"] for field in Outliers._fields)), shape[1])
    parts, octaves = _tensor_scales(module, prefix, own), 0
    if parts is not None:
        free = values if keep is None else values.masked_fill(keep, 0)
        octaves = _octaves(free.view(len(parts), -1), parts)
        parts = parts * 2.0**octaves
        if len(parts) > 1:
            values, keep = (None if t is None else t.view(len(parts), -1, shape[1]) for t in (values, keep))
    quantized = recipe_of(module).quantize(values, name, keep=keep, tensor_scale=parts)
    if octaves == 0:
        quantized = _closer(values if keep is None else values.masked_fill(keep, 0), own, quantized)
    if keep is None:
        return quantized
    kept = quantized.outliers.values.to(own["outlier_values"].dtype)
    if not bool(kept.isfinite().all()):
        raise ValueError(f"{name}: its outliers are kept in {kept.dtype}, which some of the new values exceed.")
    return quantized._replace(outliers=quantized.outliers._replace(values=kept))


def reweight(
    module: PackedModule,
    prefix: str,
    wanted: Callable[[int, torch.Tensor], torch.Tensor],
    adapters: tuple[str, ...] | list[str] = (),
) -> None:
    """Change a packed weight matrix by matrix: all of it, or nothing. What became of the change is recorded.

    Args:
        module (`FP4Linear` or `FP4Experts`): is changed in place. `stash` it before to have it back.
        prefix (`str`): `"weight"`, or the name of a projection.
        wanted (`Callable`): `wanted(expert, dense)` gives the new float32 `[N, K]` for the dequantized one, which it
            must leave as it is; a linear is expert 0. A matrix that does not change keeps its bytes.
        adapters (`Sequence[str]`): whose merge this is, for messages and the record.

    Raises:
        ValueError: as `requantize`; and for offloaded modules.
    """
    check_in_memory(module, "merging")
    experts = module.shapes[prefix][0] if isinstance(module, FP4Experts) else 1
    parts, sums = [], torch.zeros(5, dtype=torch.float64)
    for expert in range(experts):
        stored = stored_matrix(module, prefix, expert)
        before = decode(module, stored)
        dense = wanted(expert, before)
        bad = int((~dense.isfinite()).sum())
        if bad and not bool(before.isfinite().all()):
            raise ValueError(
                f"{matrix_name(module, prefix, expert)}: its packed weight holds NaN or Inf, without any adapter. "
                "Nothing was merged here; the checkpoint is damaged: load the model from a sound one."
            )
        if bad:
            raise ValueError(
                f"{matrix_name(module, prefix, expert)}: with adapter {', '.join(adapters)} merged, {bad} of "
                f"{dense.numel()} values are NaN or Inf. Nothing was merged here; the adapter is broken (its training "
                "diverged, or its file is damaged)."
            )
        if not torch.equal(dense, before):
            stored = _to_stored(module, prefix, stored, requantize(module, prefix, dense, expert))
            sums += _sums(before, dense, decode(module, stored))
        else:
            sums[0] += before.double().square().sum().cpu()
        parts.append(stored)
    _load(module, prefix, parts)
    vars(module).setdefault("_merges", {})[prefix] = (tuple(adapters), *_survival(*sums.tolist()))


# --- one matrix of a module ------------------------------------------------------------------------------------------


def stored_matrix(module: PackedModule, prefix: str, expert: int = 0) -> dict[str, torch.Tensor]:
    """The stored tensors of one matrix `[N, K]`, as views, by their names without the prefix."""
    own = {name.removeprefix(f"{prefix}_"): t for name, t in module._buffers.items() if name.startswith(f"{prefix}_")}
    if isinstance(module, FP4Linear):
        return own
    rows = own["packed"].shape[1]
    for name in ("packed", "scale", "global_scale", "macro_scale"):
        if name in own:
            own[name] = own[name][expert]
    if "outlier_offsets" in own:
        own["outlier_offsets"] = own["outlier_offsets"][expert * rows : (expert + 1) * rows + 1]
    return own


def decode(module: PackedModule, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """float32 `[N, K]`, for the module's input as it comes."""
    transforms = {name: module._buffers[name] for name in TRANSFORMS if name in module._buffers}
    return dense_copy(module.format, torch.float32, **stored, **transforms, backend=module.backend)


def _tensor_scales(module: PackedModule, prefix: str, own: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """What multiplies: float32 `[1]`, or `[2]` for halves with scales of their own."""
    if "global_scale" not in own:
        return None
    halves = isinstance(module, FP4Experts) and module.is_uneven(prefix)
    return own["global_scale"][: 2 if halves else 1].reciprocal()


def _octaves(parts: torch.Tensor, scales: torch.Tensor) -> int:
    """By how many powers of two the tensor scales `[P]` of weights `[P, n]` must change, all of them together.

    None, while the largest block scale rounds to one of E4M3's and is not below 1: smaller ones would soon be
    subnormal.
    """
    peaks = torch.linalg.vector_norm(parts, math.inf, -1).tolist()
    top = max(peak / (E2M1_MAX * scale) for peak, scale in zip(peaks, scales.tolist(), strict=True))
    if top == 0 or 1 <= top <= _E4M3_EDGE:
        return 0
    mantissa, exponent = math.frexp(top / E4M3_MAX)
    exponent -= mantissa == 0.5
    lowest, highest = (math.frexp(float(scale))[1] for scale in (scales.min(), scales.max()))
    return min(max(exponent, -124 - lowest), 125 - highest)


def _closer(values: torch.Tensor, own: dict[str, torch.Tensor], new: QuantizedTensor) -> QuantizedTensor:
    """`new` `[..., N, K]`, but with the stored scales (and macro factors) of those blocks that they bring closer to
    `values`; both have the same tensor scales."""
    fmt, k, rows = new.format, values.shape[-1], values.reshape(-1, values.shape[-1])
    unit = fmt.block_size if new.macro is None else MACRO_BLOCK  # what is chosen together
    packed, byte = new.packed.view(len(rows), -1), new.scale.view(torch.uint8).view(len(rows), -1)  # written to
    macro = None if new.macro is None else new.macro.view(len(rows), -1)
    tensor_scale = None
    if new.global_scale is not None:
        tensor_scale = new.global_scale.reshape(-1, 1).expand(-1, values.shape[-2]).reshape(-1, 1, 1)
    for part in row_chunks(rows):
        scale, factors = own["scale"][part], None if macro is None else own["macro_scale"][part]
        one = None if tensor_scale is None else tensor_scale[part]
        codes = encode(rows[part], Scales(scale, one), fmt, factors)
        found = fmt.scale_from_bytes(byte[part]), None if macro is None else macro[part]
        errors = []
        for some, (stored, factor) in ((codes, (scale, factors)), (packed[part], found)):
            error = (decode_rows(some, stored, one, fmt, macro=factor) - rows[part]).double().square()
            errors.append(F.pad(error, (0, -k % unit)).unflatten(1, (-1, unit)).sum(-1))
        better = errors[0] < (1 - _TIE) * errors[1]
        places = {each: better.repeat_interleave(unit // each, -1)[:, : k // each] for each in (2, fmt.block_size)}
        packed[part] = torch.where(places[2], codes, packed[part])
        byte[part] = torch.where(places[fmt.block_size], scale.view(torch.uint8), byte[part])
        if macro is not None:
            macro[part] = torch.where(better, factors, macro[part])
    return new


def _packed_basis(module: PackedModule, dense: torch.Tensor, name: str) -> torch.Tensor:
    """Weights `[N, K]` for the input before its transforms, as the transformed input meets them."""
    scale, hadamard = (module._buffers.get(transform) for transform in TRANSFORMS)
    if scale is None and hadamard is None:
        return dense
    values = dense.to(torch.float64)
    if scale is not None:
        if not bool((scale.isfinite() & (scale != 0)).all()):
            raise ValueError(_cannot_invert(name, "pre_quant_scale"))
        values = values / scale.to(torch.float64)
    if hadamard is not None:
        size, matrix = hadamard.shape[0], hadamard.to(torch.float64)
        singular = torch.linalg.svdvals(matrix) if bool(matrix.isfinite().all()) else matrix.new_zeros(1)
        if not bool(singular.min() > _SINGULAR * singular.max()):
            raise ValueError(_cannot_invert(name, "hadamard"))
        groups = values.unflatten(1, (values.shape[1] // size, size))  # dense = packed @ matrix.T, group by group
        values = torch.linalg.solve(matrix.T, groups, left=False).flatten(1)
    return values


def _cannot_invert(name: str, transform: str) -> str:
    return (
        f"{name}: the transform of its input ({transform}) cannot be inverted, so there is no packed weight for "
        "another dense one. Keep the adapter, or use merge_to_bf16."
    )


def _to_stored(
    module: PackedModule, prefix: str, old: dict[str, torch.Tensor], new: QuantizedTensor
) -> dict[str, torch.Tensor]:
    """A quantized matrix as `stored_matrix` has it. The divisor is the old one but for a power of two, exactly."""
    stored = {"packed": new.packed, "scale": new.scale}
    if new.macro is not None:
        stored["macro_scale"] = new.macro
    stored = {name: value.reshape(old[name].shape) for name, value in stored.items()}
    if new.global_scale is not None:
        octaves = _tensor_scales(module, prefix, old) / new.global_scale.reshape(-1)
        stored["global_scale"] = old["global_scale"] * octaves
    if new.outliers is not None:
        stored |= {f"outlier_{name}": value for name, value in new.outliers._asdict().items()}
    return stored


@torch.no_grad()
def _load(module: PackedModule, prefix: str, parts: list[dict[str, torch.Tensor]]) -> None:
    """Put the matrices of a weight in the place of its own."""
    joined = {}
    for name in parts[0].keys() - {f"outlier_{field}" for field in Outliers._fields}:
        tensors = [part[name] for part in parts]
        buffer = module._buffers[f"{prefix}_{name}"]
        integer = INTEGERS[buffer.itemsize]
        joined[name] = torch.stack([t.view(integer) for t in tensors]).view(buffer.dtype).view(buffer.shape)
    if "outlier_offsets" in parts[0]:
        offsets, values, columns, start = [], [], [], 0
        for part in parts:
            own = part["outlier_offsets"]
            entries = slice(int(own[0]), int(own[-1]))
            values.append(part["outlier_values"][entries])
            columns.append(part["outlier_columns"][entries].view(INTEGERS[part["outlier_columns"].itemsize]))
            offsets.append(own[:-1] - own[0] + start)
            start += entries.stop - entries.start
        dtype = parts[0]["outlier_columns"].dtype
        joined |= {"outlier_values": torch.cat(values), "outlier_columns": torch.cat(columns).view(dtype)}
        joined["outlier_offsets"] = torch.cat([*offsets, own.new_tensor([start])])
    module._buffers.update({f"{prefix}_{name}": tensor for name, tensor in joined.items()})
    module.prepare()


# --- what became of the change ---------------------------------------------------------------------------------------


def _sums(before: torch.Tensor, wanted: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """float64 `[5]`: squares of the weight, of the change asked for, of the one made, of their difference; product."""
    sums = torch.zeros(5, dtype=torch.float64)
    for rows in row_chunks(before):
        old = before[rows].double()
        asked, made = wanted[rows].double() - old, after[rows].double() - old
        products = (old * old, asked * asked, made * made, (made - asked).square(), made * asked)
        sums += torch.stack([product.sum() for product in products]).cpu()
    return sums


def _survival(weight: float, asked: float, made: float, missed: float, product: float) -> tuple[float, float, float]:
    """Size of the change relative to the weight, relative error, and cosine."""
    if asked == 0:
        return 0.0, 0.0, 1.0
    cosine = product / math.sqrt(asked * made) if made else 0.0
    return math.sqrt(asked / weight) if weight else math.inf, math.sqrt(missed / asked), cosine


def own_bias(linear: FP4Linear, bias: torch.Tensor | None) -> None:
    """Give a linear another bias float32 `[N]` in the dtype of its own; one that equals it changes nothing."""
    if bias is None or linear.bias is None or torch.equal(bias, linear.bias.data.to(bias.dtype)):
        return
    cast = bias.to(linear.bias.dtype)
    if not bool(cast.isfinite().all()):
        raise ValueError(
            f"{matrix_name(linear, 'bias')}: with the adapter merged it holds NaN or Inf in {cast.dtype}; the adapter "
            "is broken (its training diverged, or its file is damaged)."
        )
    linear.bias.data = cast
