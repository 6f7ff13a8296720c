# SPDX-License-Identifier: Apache-2.0
"""hf_mxfp4 inside other libraries: PEFT, TRL, optimum, lm-eval. One file per library.

The folder stands beside hf_mxfp4/ in the checkout and is installed and imported as hf_mxfp4.integrations
(`[tool.setuptools.package-dir]` in pyproject.toml). Nothing in hf_mxfp4 needs these files.
"""
