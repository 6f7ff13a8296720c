# SPDX-License-Identifier: Apache-2.0
"""Check the wheel and the sdist: every source file is in them, and every module imports from the installed wheel.

    python check_dist.py CHECKOUT DIST

Runs with the wheel installed and from a folder outside the checkout.
"""

import importlib
import sys
import tarfile
import zipfile
from pathlib import Path

# integrations/ may import these at the top; they are not part of the tested set.
OPTIONAL = {"peft", "trl", "optimum", "lm_eval"}


def check_contents(checkout: Path, dist: Path) -> list[str]:
    """The modules of the wheel, after comparing both archives with the files of the checkout."""
    sources = [f.relative_to(checkout) for d in ("hf_mxfp4", "integrations") for f in (checkout / d).rglob("*")]
    compiled = [f for f in sources if f.suffix in (".c", ".h")]  # in the sdist, where they are compiled
    sources = [f for f in sources if f.suffix in (".py", ".json")] + [Path("model_cards/template.md")]
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")

    installed = {f if f.parts[0] == "hf_mxfp4" else Path("hf_mxfp4", f) for f in sources}
    commands = {f for f in installed if "optimum_commands" in f.parts}
    installed = installed - commands | {Path("optimum/commands/register", f.name) for f in commands}
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packed = {f for f in packed if not f.match("hf_mxfp4/kernels/_cpu.*")}  # not there without a C compiler
    assert packed == installed, f"wheel: missing {installed - packed}, unexpected {packed - installed}"

    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    missing = {*sources, *compiled, Path("LICENSE"), Path("README.md"), Path("pyproject.toml")} - packed
    assert not missing, f"sdist: missing {missing}"
    modules = [f for f in installed if f.suffix == ".py" and f.parts[0] == "hf_mxfp4"]
    return sorted(".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in modules)


def main(checkout: Path, dist: Path) -> None:
    modules = check_contents(checkout, dist)
    skipped = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL or ".integrations." not in name:
                raise
            skipped.append(f"{name} (needs {error.name})")
            continue
        assert Path(module.__file__).is_relative_to(sys.prefix), f"{name} comes from {module.__file__}"
    print(f"{len(modules) - len(skipped)} modules imported from the wheel; skipped: {', '.join(skipped) or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
