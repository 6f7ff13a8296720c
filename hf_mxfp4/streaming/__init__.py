# SPDX-License-Identifier: Apache-2.0
"""Quantizing checkpoints that do not fit into memory: file by file, resumable, by any number of processes."""

from hf_mxfp4.streaming.progress import Progress
from hf_mxfp4.streaming.run import Summary, quantize_checkpoint

__all__ = ["Progress", "Summary", "quantize_checkpoint"]
