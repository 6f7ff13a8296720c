# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. The only place that imports triton; `ops.py` imports these files when it first needs a kernel."""
