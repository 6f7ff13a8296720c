# SPDX-License-Identifier: Apache-2.0
"""One tensor scale again for siblings (q/k/v, gate/up) of which a merge has changed one's."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hf_mxfp4.checkpoints import SIBLINGS
from hf_mxfp4.export.tensor_scales import Scaled, common_divisor, with_divisor
from hf_mxfp4.integrations.peft.requantization import restore, stash
from hf_mxfp4.modules import FP4Linear

logger = logging.getLogger(__name__)


@torch.no_grad()
def share_tensor_scales(model: nn.Module) -> None:
    """Bring siblings whose tensor scales are powers of two apart under the largest, where one of them was merged.

    Serving engines fuse them and know one scale for all. Block scales take up the difference, which changes no weight;
    the few blocks whose scales would leave E4M3's range are quantized anew, and the error is logged. An exception
    takes all of it back.
    """
    before = []
    try:
        for path, parent in model.named_modules():
            for leaves in SIBLINGS:
                members = [parent._modules.get(leaf) for leaf in leaves]
                if all(isinstance(member, FP4Linear) for member in members) and _are_shifted(members):
                    before += [(member, stash(member)) for member in members]
                    _share(members, f"{path}.({', '.join(leaves)})")
    except BaseException:
        for member, stashed in before:
            restore(member, stashed)
        raise


def _are_shifted(members: list[FP4Linear]) -> bool:
    divisors = [member._buffers.get("weight_global_scale") for member in members]
    if any(divisor is None or divisor.is_meta for divisor in divisors):
        return False
    if not any(vars(member).get("_merges") for member in members):
        return False
    octaves = [divisor.cpu() / divisors[0].cpu() for divisor in divisors]
    equal = all(bool(octave == 1) for octave in octaves)
    return not equal and all(bool(torch.frexp(octave)[0] == 0.5) for octave in octaves)


def _share(members: list[FP4Linear], name: str) -> None:
    device = members[0].weight_packed.device
    matrices = [Scaled(m.weight_packed.cpu(), m.weight_scale.cpu(), m.weight_global_scale[0].cpu()) for m in members]
    found = common_divisor(matrices)
    if found is not None:
        divisor, tables = found
        for number, table in enumerate(tables):
            shifted = table[matrices[number].scale.view(torch.uint8).to(torch.int64)].view(
                matrices[number].scale.dtype
            )
            matrices[number] = Scaled(matrices[number].packed, shifted, divisor)
    else:
        divisor = min((matrix.divisor for matrix in matrices), key=float)
        for number, matrix in enumerate(matrices):
            matrices[number], weights, error = with_divisor(matrix, divisor)
            if weights:
                text = "hf_mxfp4: %s: %d weights quantized anew for one tensor scale, relative squared error %.1e"
                logger.info(text, name, weights, error)
    for member, matrix in zip(members, matrices, strict=True):
        own = (matrix.packed.to(device), matrix.scale.to(device), matrix.divisor.reshape(1).to(device, copy=True))
        member._buffers.update(zip(("weight_packed", "weight_scale", "weight_global_scale"), own, strict=True))
        member.prepare()
