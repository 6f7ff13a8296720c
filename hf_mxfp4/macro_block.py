# SPDX-License-Identifier: Apache-2.0
"""Macro-block scaling: one factor 1 + m/256 for each 128 weights, which repairs the bias of power-of-two scales.

Sources: arXiv 2603.08713 and 2605.20402 (MBS-S is `static`, MBS-D is `search`).
"""

from __future__ import annotations

import torch

from hf_mxfp4.formats import MACRO_BLOCK

MODES = ("static", "search")


def factors(macro: torch.Tensor) -> torch.Tensor:
    """Bytes m (uint8, any shape) -> float32 factors 1 + m/256."""
    return 1 + macro.to(torch.float32) / 256


def block_factors(macro: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """Bytes m uint8 `[..., ceil(K/128)]` -> the factor of each block, float32 `[..., blocks]`, blocks = K/B."""
    return factors(macro).repeat_interleave(MACRO_BLOCK // block_size, -1)[..., :blocks]
