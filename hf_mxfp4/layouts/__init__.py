# SPDX-License-Identifier: Apache-2.0
"""Every stored layout of FP4 that is read: one file a family, one row each in `LAYOUTS`."""

from __future__ import annotations

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.layouts import compressed_tensors, fouroversix, fp_quant, gpt_oss, modelopt, own, torchao
from hf_mxfp4.layouts.base import Contents, PackedMatrix, PackedTensors, StoredLayout, refuse_leftovers

__all__ = ["LAYOUTS", "Contents", "PackedMatrix", "PackedTensors", "StoredLayout", "read", "recognise"]

# In the order of asking: what carries our key comes before plain compressed-tensors.
LAYOUTS: tuple[StoredLayout, ...] = (
    own.OWN,
    own.PORTABLE,
    compressed_tensors.LAYOUT,
    modelopt.LAYOUT,
    gpt_oss.LAYOUT,
    fp_quant.LAYOUT,
    torchao.LAYOUT,
    fouroversix.LAYOUT,
)


def recognise(checkpoint: Checkpoint) -> StoredLayout:
    """The layout of a quantized checkpoint.

    Raises:
        ValueError: for a checkpoint in full precision, and one in a layout that is not known, with what is.
    """
    for layout in LAYOUTS:
        if layout.recognise(checkpoint):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    if checkpoint.quantization is None:
        raise ValueError(f"this checkpoint says nothing of quantization: it is in full precision. Known: {known}.")
    method = checkpoint.quantization.get("quant_method")
    raise ValueError(f"quant_method {method!r} is not an FP4 layout known here; known: {known}.")


def read(checkpoint: Checkpoint) -> Contents:
    """What a quantized checkpoint holds, in whatever layout.

    Raises:
        ValueError: see `recognise` and `StoredLayout.read`; for tensors that are quantized in another way.
    """
    contents = recognise(checkpoint).read(checkpoint)
    refuse_leftovers(checkpoint, contents)
    return contents
