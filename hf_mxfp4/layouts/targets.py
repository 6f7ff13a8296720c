# SPDX-License-Identifier: Apache-2.0
"""Which modules a config's lists of names and patterns mean, and whether the files hold what it promises of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

from hf_mxfp4.checkpoint_files import Checkpoint
from hf_mxfp4.checkpoints import FULL_PRECISION
from hf_mxfp4.layouts.base import EDITED

# Parts of names by which a model and the same model inside another differ: configs name modules, files tensors.
_WRAPPERS = {"model", "language_model", "module", "base_model", "transformer"}
_WRAPPED = ("model.", "model.language_model.", "language_model.model.")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@lru_cache(maxsize=1 << 17)
def core(name: str) -> str:
    """A module's name without the models it stands in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(maxsize=1 << 17)
def aliases(name: str) -> tuple[str, ...]:
    """A module's name as a checkpoint has it, then as its model may have it."""
    inner = core(name)
    return tuple(dict.fromkeys((name, inner, *(prefix + inner for prefix in _WRAPPED))))


class Patterns:
    """A config's list of modules: full names, `re:` regexes and shell wildcards (`model.layers.0.*`).

    Raises:
        ValueError: for what is not a list of strings, or not a regular expression.
    """

    def __init__(self, entries: Iterable[str] | None, field: str):
        if not isinstance(entries, (list, tuple, type(None))) or not all(isinstance(e, str) for e in entries or ()):
            raise ValueError(
                f"{field} of the config is not a list of names: {entries!r}. Download the checkpoint again."
            )
        self.entries = list(entries or ())
        self.names, self.patterns = {}, []
        for entry in self.entries:
            if entry.startswith("re:"):
                self.patterns.append((entry, _regex(entry, field)))
            elif set(entry) & set("*?["):
                self.patterns.append((entry, re.compile(fnmatch.translate(entry))))
            else:
                self.names[core(entry)] = entry

    def find(self, module: str) -> str | None:
        """The entry that means a module, under any of its names: a full name before a pattern; `None` if none does."""
        if core(module) in self.names:
            return self.names[core(module)]
        return next((e for name in aliases(module) for e, pattern in self.patterns if pattern.match(name)), None)

    def says(self, module: str) -> str | None:
        """The entry that means a module under just this name."""
        if self.names.get(core(module)) == module:
            return module
        return next((entry for entry, pattern in self.patterns if pattern.match(module)), None)

    def covering(self, module: str) -> str | None:
        """The entry that means a module or one it stands in; `None` if none does."""
        parts = module.split(".")
        found = (self.find(".".join(parts[:end])) for end in range(len(parts), 0, -1))
        return next((entry for entry in found if entry is not None), None)

    def excuses(self, module: str) -> bool:
        """Whether a module, read as a list of what is not packed, may be in full precision: it is listed, or one it
        stands in, or, of an expert, some experts of its layer (Mixtral's have other names in files than in models)."""
        if self.covering(module) is not None:
            return True
        layer = _LAYER.search(f"{core(module)}.")
        experts = layer is not None and ".experts." in module
        return experts and any(
            "experts" in name and name.startswith(layer.string[: layer.end()]) for name in self.names
        )


def _regex(entry: str, field: str) -> re.Pattern:
    try:
        return re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{field} of the config: {entry!r} is not a regular expression: {error}.") from error


def listed(config: dict[str, Any], key: str) -> tuple[str, ...]:
    """A config's list of names; none if it has no such list.

    Raises:
        ValueError: if it is no list of strings.
    """
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config: {key} {names!r} is not a list of names. Download it again.")
    return tuple(names)


def refuse_unpacked(checkpoint: Checkpoint, packed: Collection[str], promised: Callable[[str], bool]) -> None:
    """Raise `ValueError` for linear layers in full precision that a config promises to be packed.

    A header does not tell a linear layer from an embedding or a router. Taken for linear are matrices whose last name
    a packed module has too, in the same part of the model and among its layers.
    """
    leaves = {name.rpartition(".")[2] for name in packed}
    parts = {name.partition(".")[0] for name in packed}
    text = checkpoint.config.get("text_config")
    layers = (text if isinstance(text, dict) else checkpoint.config).get("num_hidden_layers")
    wrong = []
    for key, tensor in checkpoint.tensors.items():
        module, _, last = key.rpartition(".")
        if last != "weight" or len(tensor.shape) != 2 or tensor.dtype not in FULL_PRECISION or module in packed:
            continue
        if module.rpartition(".")[2] not in leaves or module.partition(".")[0] not in parts:
            continue
        layer = _LAYER.search(key)
        beyond = layer is not None and isinstance(layers, int) and int(layer[1]) >= layers  # multi-token prediction
        if not beyond and promised(module):
            wrong.append(f"{key} ({tensor.dtype})")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the config says that these are packed, and the files hold them in full precision: "
            f"{', '.join(wrong[:3])}{more}. {EDITED}"
        )
