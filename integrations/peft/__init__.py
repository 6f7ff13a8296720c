# SPDX-License-Identifier: Apache-2.0
"""PEFT on packed models. `import hf_mxfp4` calls `register` where PEFT is installed; nothing else has to be called."""

from __future__ import annotations

import functools

from peft import LoraModel
from torch.nn.modules.module import register_module_module_registration_hook

from hf_mxfp4 import plugins
from hf_mxfp4.integrations.peft import experts, merging, training
from hf_mxfp4.integrations.peft.initialization import Residual, fp4_residual, inject_adapter
from hf_mxfp4.integrations.peft.layers import FP4LoraLinear, take_over
from hf_mxfp4.integrations.peft.merging import MergeReport, merge_report, merge_table, merge_to_bf16
from hf_mxfp4.integrations.peft.training import (
    PackedBaseCheck,
    StopOnNaN,
    base_fingerprint,
    prepare_fp4_for_training,
)

__all__ = [
    "FP4LoraLinear",
    "MergeReport",
    "PackedBaseCheck",
    "Residual",
    "StopOnNaN",
    "base_fingerprint",
    "fp4_residual",
    "merge_report",
    "merge_table",
    "merge_to_bf16",
    "prepare_fp4_for_training",
    "register",
]


@functools.cache  # a second call adds nothing
def register() -> None:
    """Make PEFT know packed layers. Safe to call twice."""
    register_module_module_registration_hook(take_over)
    experts.register()
    merging.register()
    training.register()
    LoraModel.inject_adapter = inject_adapter
    plugins.READY.add("peft")
