# SPDX-License-Identifier: Apache-2.0
"""What `import hf_mxfp4` makes other installed libraries know of packed modules.

An entry point of the group `hf_mxfp4.plugins` is named for a library and is a function without arguments. So nothing
here imports the folder `integrations/`, and a library that is not installed costs nothing.
"""

from __future__ import annotations

import importlib.util
import warnings
from importlib import metadata

GROUP = "hf_mxfp4.plugins"


def load_plugins() -> None:
    """Call each plugin whose library is installed; one that fails is warned of, and import goes on."""
    for entry in metadata.entry_points(group=GROUP):
        if importlib.util.find_spec(entry.name) is None:
            continue
        try:
            entry.load()()
        except Exception as error:  # whatever a library of another version may raise
            warnings.warn(
                f"hf_mxfp4 cannot work with the installed {entry.name} ({type(error).__name__}: {error}): "
                f"do not use it on packed models, or install a version that hf-mxfp4[{entry.name}] takes.",
                stacklevel=2,
            )
