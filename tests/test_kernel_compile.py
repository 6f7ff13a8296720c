# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every GPU we support, without running out of registers; the loop that decides the speed of
a token is as short as it should be. No GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from compile_targets import BRIEF, hot_loop

import kernels_static

# SASS instructions for a weight in the hot loop, for up to 16 tokens (kernels 0.1: at 4.1 an H200 that does nothing
# else keeps up with its memory). Stores to shared memory in it: x, 16 tokens of it at most. Tensor cores.
LIMITS = {"cuda:90": {"mxfp4": 3.8, "nvfp4": 3.9}, "cuda:100": {"mxfp4": 3.8, "nvfp4": 3.9}}
OTHERS = {"mxfp4": 4.3, "nvfp4": 4.3}
SHARED_STORES = 8
PRODUCTS = {"cuda:90": "HGMMA", "cuda:100": "UTCHMMA"}
LATER = ("hip:gfx950", "hip:gfx1201")  # slow only: on the whole the code of gfx942 and gfx1100
CASES = [(target, "--brief") for target in kernels_static.TARGETS if target not in LATER]
CASES += [pytest.param(target, "--all", marks=pytest.mark.slow) for target in kernels_static.TARGETS]


def compiled(target: str, option: str, cache: Path) -> dict[str, dict]:
    """Variants by name, from a process of its own (see compile_targets.py), which must not take the interpreter."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[1])}
    script = Path(__file__).with_name("compile_targets.py")
    done = subprocess.run(
        [sys.executable, script, target, option], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {row.pop("variant"): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("target, option", CASES)
def test_compiles(target, option, tmp_path):
    used = compiled(target, option, tmp_path)
    assert {*used} >= {name for name in BRIEF if kernels_static.concerns(name, target)}
    for name, row in used.items():
        assert row["spills"] == 0 and row["shared"] <= kernels_static.TARGETS[target] * 1024, (name, row)
        # ptxas may spend a few bytes of stack to get down to 128 registers (seen: 8 on sm_90, 16 on sm_120), or to 255
        # (24 on sm_120).
        assert row["stack"] <= 24, (name, row)
        if target.startswith("cuda") and name.startswith("linear ") and "tokens=1 " in name and "fp32" not in name:
            check_loop(target, name, row)
    published = kernels_static.published()
    if published["triton"] == triton.__version__:
        expected = published["targets"][target]
        assert used | expected == expected | used and {*expected} >= {name for name in used if name in BRIEF}, (
            f"{target}: python scripts/kernels_static.py writes this table anew"
        )


def check_loop(target: str, name: str, row: dict) -> None:
    """The hot loop of a product with up to 16 tokens."""
    assert row["products"] == PRODUCTS.get(target, "HMMA"), (name, row)
    assert row["wide_copies"] >= 4 and row["shared_stores"] <= SHARED_STORES + name.endswith("corrected"), (name, row)
    if "bf16" in name and not name.endswith("corrected"):
        assert row["sass_per_weight"] <= LIMITS.get(target, OTHERS)[name.split()[1]], (name, row)


def test_hot_loop():
    """The inner one of two loops with the most products; predicates, labels and addresses are no instructions."""
    sass = """
.L_x_0:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_1:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
                                                            /* 0x000fe200078e00ff */
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0040*/              @P1 BRA `(.L_x_1) ;
        /*0050*/              @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   NOP ;
        /*0070*/                   NOP ;
        /*0080*/                   NOP ;
        /*0090*/              @P1 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""
    assert hot_loop(sass) == ["LDGSTS.E.BYPASS.128", "HGMMA.64x16x16.F32.BF16", "BRA"]
    assert hot_loop("/*0010*/ FADD R1, R1, R2 ;\n/*0020*/ EXIT ;") == ["FADD", "EXIT"]


def test_table(tmp_path):
    """What is committed is rendered from what is committed, and speaks of every target."""
    published = kernels_static.published()
    assert {*published["targets"]} == {*kernels_static.TARGETS}
    assert kernels_static.MARKDOWN.read_text() == kernels_static.render(published)
