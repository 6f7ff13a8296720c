# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors bit by bit."""

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, all NaNs alike; -0 is not 0."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    nan = one.isnan()
    return (
        one.dtype == other.dtype
        and torch.equal(nan, other.isnan())
        and torch.equal(one.view(as_int)[~nan], other.view(as_int)[~nan])
    )
