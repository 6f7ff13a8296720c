# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 doctor`."""

from __future__ import annotations

from hf_mxfp4 import doctor as diagnosis
from hf_mxfp4.cli.common import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Versions, and which implementation runs on this machine's CPU and GPUs, and why: for a report of a problem."""
    found = diagnosis.report()
    if as_json:
        print_json(found)
        return
    for name, text in diagnosis.lines(found):
        print(f"{name:<14}{text}")
