# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, and C for CPUs (cpu.py). The only place that imports triton; it is imported when first needed."""
