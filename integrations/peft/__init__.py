# SPDX-License-Identifier: Apache-2.0
"""PEFT on packed models. `import hf_mxfp4` calls `register` where PEFT is installed."""


def register() -> None:
    """Make PEFT know packed layers. Safe to call twice."""
