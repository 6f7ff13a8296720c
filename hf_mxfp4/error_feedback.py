# SPDX-License-Identifier: Apache-2.0
"""Error feedback: columns are rounded in order, and those to come make up for what rounding did to a layer's output.

With H the mean of x xᵀ over inputs x, rounding W to Ŵ costs tr(E H Eᵀ), E = W − Ŵ. Let H = R Rᵀ with R upper
triangular, and S = R diag(R)⁻¹. A column's target is what costs least given how those before it were rounded; with D
the targets less what they became, target j is W_j − Σ_{i<j} D_i (S⁻¹)_ij, and the cost is Σ_j R_jj² ‖D_j‖². That is
GPTQ, whose factor of H⁻¹ is R⁻¹.

Without the D_i of some columns before it, the same sum is a column's target should those be met exactly. Block scales
and macro factors are searched on that when their first column is reached, with weights R_jj²: the held-out KL of
a small LM is then 0.0205, and 0.0212 with the Hessian's diagonal (NVFP4; `soar` without feedback: 0.0366).
Damping 0.01 to 0.1 makes little difference there (0.0209 to 0.0207); with less varied text, 0.1 is better (0.0224
against 0.0228).

Sources: GPTQ, arXiv 2210.17323; as a triangular decomposition of H: QuIP (LDLQ), arXiv 2307.13304.
"""

from __future__ import annotations

import logging

import torch

from hf_mxfp4 import macro_block as macro_blocks
from hf_mxfp4 import outliers, reference
from hf_mxfp4.blocks import SMALLEST_WEIGHT, Units, block_amax, round_magnitude
from hf_mxfp4.formats import MACRO_BLOCK, BlockFormat, QuantizedTensor
from hf_mxfp4.scales import ScaleOptions, finish, power_of_two_global_scale

logger = logging.getLogger(__name__)

_SLAB = MACRO_BLOCK  # columns that get the feedback of all before them in one matrix product
_MOST_DAMPING = 1e4  # times the damping asked for


class Hessian:
    """Second moments of a layer's inputs: the mean of x xᵀ over tokens, collected in float32.

    Args:
        in_features (`int`): K.
        device (`torch.device`, *optional*): where they are summed up; inputs are brought there.

    Attributes:
        tokens (`int`): inputs seen.
    """

    def __init__(self, in_features: int, device: torch.device | None = None):
        self.tokens, self._sum = 0, torch.zeros((in_features, in_features), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, x: torch.Tensor, name: str = "input") -> None:
        """Count inputs `[..., K]` of any float dtype. Raises `ValueError` for another K, and for NaN and Inf."""
        if x.ndim == 0 or x.shape[-1] != len(self._sum):
            raise ValueError(f"{name}: inputs {list(x.shape)}; [..., {len(self._sum)}] is needed.")
        rows = x.reshape(-1, x.shape[-1]).to(self._sum)
        if not bool(rows.isfinite().all()):
            raise ValueError(
                f"{name}: inputs hold NaN or Inf; the model or the tokens are broken. Run the model in bfloat16 or "
                "float32, or leave error_feedback out."
            )
        self._sum.addmm_(rows.t(), rows)
        self.tokens += len(rows)

    @property
    def matrix(self) -> torch.Tensor:
        """float32 `[K, K]`; zero before the first input."""
        return self._sum / max(self.tokens, 1)

    @property
    def diagonal(self) -> torch.Tensor:
        """Mean square of each input channel, float32 `[K]`."""
        return self._sum.diagonal() / max(self.tokens, 1)


@torch.no_grad()
def quantize_with_feedback(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    fmt: BlockFormat,
    options: ScaleOptions = ScaleOptions(),
    macro_block: str | None = None,
    keep: torch.Tensor | None = None,
    damping: float = 0.1,
    name: str = "weight",
) -> QuantizedTensor:
    """Quantize a matrix such that its outputs change least for inputs like those seen.

    A tensor scale is the power of two `soar` takes for the weight; targets beyond it (they can grow) saturate, and the
    columns to come make up for that too. Inputs that were never nonzero get no feedback: their weights are rounded as
    they are. With a Hessian of zeros that is so for all of them, and the result is that of plain `soar`.

    Args:
        weight (`torch.Tensor`): bfloat16, float16 or float32 `[N, K]`.
        hessian (`torch.Tensor`): `[K, K]`, `Hessian.matrix` of the inputs.
        fmt (`BlockFormat`): the format.
        options (`ScaleOptions`): must be the default: full search under a power-of-two tensor scale.
        macro_block (`str`, *optional*): `"static"` or `"search"`; factors are chosen when their columns are reached.
        keep (`torch.Tensor`, *optional*): bool `[N, K]`, entries to store as outliers. What is stored is the target in
            the weight's dtype; they count as zero in the choice of scales.
        damping (`float`, defaults to 0.1): added to the Hessian's diagonal, as a fraction of its mean. Raised tenfold
            (with a warning) as often as the Hessian needs to become positive definite, up to 10^4 times.
        name (`str`): named in errors and warnings.

    Returns:
        `QuantizedTensor` with `macro` and `outliers` if asked for.

    Raises:
        TypeError: for a dtype that is not one of the three.
        ValueError: for NaN or Inf, other shapes or options, and a Hessian that no damping repairs.
    """
    reference.check_weight(weight, fmt, name)
    reference.check_macro_block(macro_block, fmt, "soar")
    _check(weight, hessian, options, keep, damping, name)
    feedback, cost = _factor(hessian.to(weight.device, torch.float32), damping, name)

    n, k = weight.shape
    global_scale = power_of_two_global_scale(block_amax(weight, fmt.block_size)) if fmt.has_global_scale else None
    residual = torch.zeros((n, k), dtype=torch.float32, device=weight.device)  # target - stored, of the columns done
    stored = None if keep is None else weight.clone()
    codes, scales, macros = [], [], []
    for start in range(0, k, _SLAB):
        slab = slice(start, min(start + _SLAB, k))
        target = torch.addmm(weight[:, slab].to(torch.float32), residual[:, :start], feedback[:start, slab])
        factors = None
        if macro_block is not None:
            free = target if keep is None else target.masked_fill(keep[:, slab], 0.0)
            macros.append(
                macro_blocks.static_factors(free)
                if macro_block == "static"
                else macro_blocks.search(free, fmt, cost[slab])[1]
            )
            factors = macro_blocks.factors(macros[-1][:, 0])
        for first in range(start, slab.stop, fmt.block_size):
            block = slice(first, first + fmt.block_size)
            inside = slice(first - start, block.stop - start)
            columns, kept = target[:, inside], None if keep is None else keep[:, block]
            scale = _search(columns, kept, fmt, global_scale, factors, cost[block])
            real = fmt.decode_scale(scale) if factors is None else fmt.decode_scale(scale) * factors
            part = None if stored is None else stored[:, block]
            codes.append(_round(columns, real, global_scale, feedback[block, block], kept, part))
            scales.append(scale)
            residual[:, block] = columns
            target[:, inside.stop :].addmm_(columns, feedback[block, block.stop : slab.stop])
    return QuantizedTensor(
        reference.pack(torch.cat(codes, 1)),
        fmt.scale_from_bytes(torch.stack([scale.view(torch.uint8) for scale in scales], 1)),
        global_scale,
        fmt,
        torch.cat(macros, 1) if macros else None,
        None if keep is None else outliers.collect(stored, keep),
    )


def _check(weight, hessian, options, keep, damping, name) -> None:
    """Raise `ValueError` for what does not go together with `weight`."""
    if weight.ndim != 2:
        raise ValueError(f"{name}: a weight {list(weight.shape)}; error feedback takes one matrix [N, K] at a time.")
    k = weight.shape[1]
    if hessian.shape != (k, k):
        raise ValueError(f"{name}: a Hessian {list(hessian.shape)}; [{k}, {k}] is needed for a weight [N, {k}].")
    if keep is not None and (keep.shape != weight.shape or keep.dtype != torch.bool):
        raise ValueError(f"{name}: keep is {keep.dtype} {list(keep.shape)}; bool {list(weight.shape)} is needed.")
    if options._replace(iterations=0) != ScaleOptions(iterations=0):
        raise ValueError(
            f"{name}: {options}; error feedback searches all scales under a power-of-two tensor scale. Leave search "
            "and global_scale at their defaults, or error_feedback out."
        )
    if not 0 < damping < float("inf"):
        raise ValueError(f"{name}: damping={damping}; allowed: a positive number, typical is 0.01 to 0.3.")


def _factor(hessian: torch.Tensor, damping: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a residual of column i adds to the target of column j, float32 `[K, K]` at (i, j), and the cost of squared
    residuals in each column, `[K]`, relative to the mean of the Hessian's diagonal."""
    mean = hessian.diagonal().mean()
    if mean == 0:
        return torch.zeros_like(hessian), torch.ones_like(hessian[0])
    tried = damping
    while mean > 0 and bool(mean.isfinite()) and tried <= 1.001 * _MOST_DAMPING * damping:
        damped = (hessian / mean).flip(0, 1)  # the lower factor of the flipped matrix is the upper one, flipped
        damped.diagonal().add_(tried)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed and bool(factor.isfinite().all()):
            if tried != damping:
                logger.warning(
                    "%s: the Hessian of its inputs is not positive definite with damping %g; error feedback uses %g.",
                    name,
                    damping,
                    tried,
                )
            factor = factor.flip(0, 1)
            root = factor.diagonal().clone()
            identity = torch.eye(len(root), device=root.device)
            inverse = torch.linalg.solve_triangular(factor.div_(root), identity, upper=True, unitriangular=True)
            return inverse.neg_().fill_diagonal_(0.0), root.square()
        tried *= 10
    raise ValueError(
        f"{name}: the Hessian of its inputs is not positive definite, or holds NaN or Inf, and damping up to "
        f"{tried / 10:g} does not repair it. Collect it anew with `Hessian`, or leave error_feedback out."
    )


def _search(columns, kept, fmt, global_scale, factors, cost) -> torch.Tensor:
    """The best block scales `[N]`, in the storage dtype, for one block's targets `[N, B]`."""
    unit = Units(columns if kept is None else columns.masked_fill(kept, 0.0), fmt, global_scale, cost)
    unit.factor = factors
    return finish(unit.search_full()[0], unit.amax, fmt).scale


def _round(columns, scale, global_scale, feedback, kept, stored) -> torch.Tensor:
    """Round one block's columns in order: codes uint8 `[N, B]`.

    `columns` `[N, B]` holds the targets as the columns left of the block made them, and then the residuals. `feedback`
    `[B, B]`; `kept` bool `[N, B]`, whose values are written into `stored` `[N, B]`, of the weight's dtype.
    """
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    for j in range(columns.shape[1]):
        target = columns[:, j]
        free = target if kept is None else target.masked_fill(kept[:, j], 0.0)
        magnitude = free.abs()
        magnitude[magnitude < SMALLEST_WEIGHT] = 0.0
        if global_scale is not None:
            magnitude /= global_scale
        magnitude /= scale
        codes[:, j] = reference.round_to_e2m1(magnitude.copysign(free))
        value = round_magnitude(magnitude) * scale
        if global_scale is not None:
            value *= global_scale
        value = value.copysign(free)
        if kept is not None:
            limit = torch.finfo(stored.dtype).max
            exact = target.clamp(-limit, limit).to(stored.dtype)
            stored[:, j] = torch.where(kept[:, j], exact, stored[:, j])
            value = torch.where(kept[:, j], exact.to(torch.float32), value)
        target -= value
        columns[:, j + 1 :].addr_(target, feedback[j, j + 1 :])
    return codes
