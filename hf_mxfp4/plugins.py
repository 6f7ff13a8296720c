# SPDX-License-Identifier: Apache-2.0
"""What `import hf_mxfp4` makes other installed libraries know of packed modules.

An entry point of the group `hf_mxfp4.plugins` is named for a library and is a function without arguments. So nothing
here imports the folder `integrations/`, and a library that is not installed costs nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from importlib import metadata

from torch import nn

from hf_mxfp4.packed import PackedModule

GROUP = "hf_mxfp4.plugins"
READY: set[str] = set()  # libraries that know packed modules; each plugin adds its own
_failed: dict[str, str] = {}  # why others do not


def load_plugins() -> None:
    """Call each plugin whose library is installed; one that fails is warned of, and import goes on."""
    _guard()
    for entry in metadata.entry_points(group=GROUP):
        try:
            if importlib.util.find_spec(entry.name) is not None:
                entry.load()()
        except Exception as error:  # whatever a library of another version may raise
            _failed[entry.name] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"hf_mxfp4 cannot work with the installed {entry.name} ({_failed[entry.name]}): "
                f"do not use it on packed models, or install a version that hf-mxfp4[{entry.name}] takes.",
                stacklevel=2,
            )


@functools.cache  # once
def _guard() -> None:
    """Refuse PEFT's layers around packed ones while PEFT does not know these.

    It would take them for dense linears, and a merge would write into a copy, in silence.
    """

    def refuse(module: nn.Module, name: str, member: nn.Module | None) -> None:
        if name != "base_layer" or "peft" in READY or not isinstance(member, PackedModule):
            return
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__):
            raise RuntimeError(
                f"{type(module).__module__}.{type(module).__name__} cannot adapt a packed {type(member).__name__}: "
                f"this PEFT does not know packed layers ({_failed.get('peft', 'it was not there on import')}). It "
                "would take it for a dense one and lose merges. Install hf-mxfp4[peft] and start anew."
            )

    nn.modules.module.register_module_module_registration_hook(refuse)
