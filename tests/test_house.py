# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree, checked on its syntax: who may import whom, and what every file carries."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest on Python 3.10

ROOT = Path(__file__).parents[1]
OPTIMUM = ROOT / "integrations/optimum_commands"  # installed into a folder of optimum's

# A file imports only what stands to its left. A new file of hf_mxfp4/ takes its place here.
ORDER = (
    *("formats", "blocks", "scales", "macro_block", "outliers", "reference", "error_feedback", "activations"),
    *("kernels", "operands", "dispatch", "ops", "experts_ops", "quantization", "recipe", "packed", "modules"),
    *("checkpoint_files", "output_files", "checkpoint_writer", "checkpoints", "layouts", "config"),
    *("packing", "fusion"),
    *("conversion", "calibration_files", "calibration_tokens", "calibration_chain", "calibration_inputs"),
    *("calibration", "whole_model", "stored", "foreign", "quantizer", "loading", "analysis", "export", "inspection"),
    *("verification", "evaluation", "tuner", "doctor", "streaming", "hub", "cli", "plugins"),
)
KNOW_TRANSFORMERS = {*("config", "conversion", "stored", "foreign", "quantizer", "loading", "streaming", "hub", "cli")}


class Import(NamedTuple):
    file: Path
    line: int
    module: str  # absolute, with the imported name: `from .formats import MXFP4` is hf_mxfp4.formats.MXFP4
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"

    def of(self, *packages: str) -> bool:
        return any(self.module == p or self.module.startswith(p + ".") for p in packages)

    @property
    def room(self) -> str:
        """The file or folder of hf_mxfp4/ the import stands in."""
        return room_of(self.file)


def room_of(file: Path) -> str:
    return file.relative_to(ROOT / "hf_mxfp4").with_suffix("").parts[0]


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def package_of(file: Path) -> list[str]:
    folder = file.relative_to(ROOT).parts[:-1]
    return ["hf_mxfp4", *folder] if folder[0] == "integrations" else list(folder)


@cache
def imports_of(file: Path) -> list[Import]:
    return list(walk(file, ast.parse(file.read_text(encoding="utf-8")), lazy=False))


def walk(file: Path, node: ast.AST, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(file, node.lineno, alias.name, lazy)
    elif isinstance(node, ast.ImportFrom):
        package = package_of(file)
        base = package[: len(package) + 1 - node.level] if node.level else []
        for alias in node.names:
            yield Import(file, node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name]), lazy)
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from walk(file, child, lazy)


def imports(*folders: str) -> list[Import]:
    return [i for file in python_files(*folders) for i in imports_of(file)]


def allow_none(found: list[Import]) -> None:
    assert not found, "\n".join(map(str, found))


def test_packages_equal_folders():
    """A package missing from the list works in an editable install and is absent from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {file.parent for file in python_files("hf_mxfp4", "integrations")} - {OPTIMUM}
    expected = {".".join(package_of(folder / "x.py")) for folder in folders}
    expected.add("hf_mxfp4.model_cards")  # of which only the template is installed
    expected.add("optimum.commands.register")  # a namespace of optimum's
    assert setuptools["package-dir"]["optimum.commands.register"] == OPTIMUM.relative_to(ROOT).as_posix()
    assert not (OPTIMUM / "__init__.py").exists()
    assert sorted(setuptools["packages"]) == sorted(expected)
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_every_file_has_a_place():
    assert {room_of(file) for file in python_files("hf_mxfp4")} <= {*ORDER, "__init__"}


def test_imports_point_left():
    position = {f"hf_mxfp4.{room}": i for i, room in enumerate(ORDER)}
    wrong = []
    for i in imports("hf_mxfp4"):
        if i.room == "__init__" or not i.of("hf_mxfp4") or i.of("hf_mxfp4.integrations", "hf_mxfp4.__version__"):
            continue
        target = ".".join(i.module.split(".")[:2])
        in_a_folder = len(i.file.relative_to(ROOT / "hf_mxfp4").parts) > 1
        same_folder = in_a_folder and target == f"hf_mxfp4.{i.room}"
        # A name taken from the package itself has no position: __init__ imports everything.
        if not same_folder and position.get(target, len(ORDER)) >= position[f"hf_mxfp4.{i.room}"]:
            wrong.append(i)
    allow_none(wrong)


def test_only_kernels_import_triton():
    allow_none([i for i in imports("integrations") if i.of("triton")])
    allow_none([i for i in imports("hf_mxfp4") if i.of("triton") and i.room != "kernels"])


def test_kernels_are_imported_lazily():
    """A machine without triton imports everything but kernels/."""
    outside = [i for i in imports("hf_mxfp4", "integrations") if "kernels" not in i.file.relative_to(ROOT).parts]
    allow_none([i for i in outside if i.of("hf_mxfp4.kernels") and not i.lazy])


def test_only_the_upper_rooms_know_transformers():
    hub = [i for i in imports("hf_mxfp4") if i.of("transformers", "huggingface_hub")]
    allow_none([i for i in hub if i.room not in KNOW_TRANSFORMERS])


def test_only_integrations_know_other_libraries():
    allow_none([i for i in imports("hf_mxfp4") if i.of("peft", "trl", "optimum", "lm_eval")])


def test_integrations_stand_above():
    found = [i for i in imports("hf_mxfp4") if i.of("hf_mxfp4.integrations", "integrations")]
    allow_none([i for i in found if i.of("integrations") or i.room != "cli" or not i.lazy])


@pytest.mark.parametrize("folder", ["hf_mxfp4", "integrations", "scripts", "tests"])
def test_license_header(folder):
    for file in python_files(folder):
        lines = file.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith("#!"):
            del lines[0]
        assert lines and lines[0] == "# SPDX-License-Identifier: Apache-2.0", file.relative_to(ROOT)


def test_files_are_short():
    long = [f for f in python_files("hf_mxfp4") if len(f.read_text(encoding="utf-8").splitlines()) > 400]
    assert long == []


def test_readme_code_compiles():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    for block in re.finditer(r"^( *)```(?:python|py)\b[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start(2))
        # Blank lines in front, so that a SyntaxError names the line of README.md.
        compile("\n" * first + textwrap.dedent(block[2]), str(readme), "exec")


def test_ruff_is_pinned_once():
    """The pre-commit hook and `make lint` must not disagree on the format."""
    pin = re.search(r"^ruff==(\S+)$", (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"ruff-pre-commit\n +rev: v(\S+)", hooks) == [pin[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_unwritten_memory_shows(dtype):
    """conftest.py poisons allocations; this holds torch to it."""
    like = torch.zeros(3, dtype=dtype)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    expected = torch.full((3,), poison, dtype=dtype).view(torch.uint8)
    for made in (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3)):
        assert torch.equal(made.view(torch.uint8), expected)
