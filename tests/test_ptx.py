# SPDX-License-Identifier: Apache-2.0
"""The kernels as compiled for an A100, inline PTX included, executed on the CPU by ptx.py and equal to reference.py.

The products here are sums that float32 holds exactly, so results are equal but for the sign of zero. Last, the
interpreter itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ptx import Memory, Module, PTXError, to_bits, to_float

CHECKS = ("dequantize", "spoilt", "linear", "linear_grad", "corrections", "grouped", "experts")
HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid 32
{
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<9>;
	.reg .pred 	%p<9>;
$L__func_begin0:
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
"""
TAIL = "\nst.global.b32 [%rd2], %r9;\nret;\n$L__func_end0:\n"


def run(body: str, size: int = 32) -> torch.Tensor:
    """`%r9` of each of 32 threads, whose number is `%r1`."""
    out = torch.zeros(size, dtype=torch.int32)
    Module(HEAD + body + TAIL).launch((1, 1, 1), [out], 256)
    return out


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """From a process of its own (see compile_targets.py), which must not take triton's interpreter."""
    root = Path(__file__).parents[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment |= {"PYTHONPATH": f"{root}{os.pathsep}{root / 'scripts'}"}
    script = Path(__file__).with_name("ptx_target.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check, reports):
    of_check = [report for report in reports if report["check"] == check]
    assert {report["format"] for report in of_check} == {"mxfp4", "nvfp4"}
    for report in of_check:
        assert report["launches"] and set(report["wrong"]) == {0}, report


def test_all_kernels_were_launched(reports):
    assert {report["check"] for report in reports} == {*CHECKS}
    launched = {launch.split()[0] for report in reports for launch in report["launches"]}
    kernels = {"dequantize", "scatter", "linear", "linear_grad", "outlier_product", "project", "route", "combine"}
    assert launched == {f"{name}_kernel" for name in kernels}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN
@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_rounding(kind, dtype):
    """Once, to nearest even, subnormals too: every number, what lies between two and just beside that."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = to_float(bits, kind)
    expected = torch.from_numpy(bits.view(np.int16)).view(dtype).double().numpy()
    assert np.array_equal(values, expected, equal_nan=True)
    finite = np.isfinite(values)
    assert (to_bits(values, kind) == bits)[finite].all()
    below = np.sort(values[finite & (values >= 0)])
    middle = (below[:-1] + below[1:]) / 2
    even = np.where(to_bits(below[:-1], kind) % 2 == 0, below[:-1], below[1:])
    assert (to_float(to_bits(middle, kind), kind) == even).all()
    assert (to_float(to_bits(np.nextafter(middle, np.inf), kind), kind) == below[1:]).all()
    assert (to_float(to_bits(np.nextafter(middle, 0), kind), kind) == below[:-1]).all()


@pytest.mark.parametrize(
    "body, expected",
    [
        ("prmt.b32 %r9, 0x33221100, 0x77665584, 0x4C06;", 0x84FF0066),
        ("lop3.b32 %r9, 0xF0, 0xCC, 0xAA, 0xEA;", 0xEA),  # by definition of the table
        ("bfe.s32 %r9, 0xF0, 4, 4;", -1),
        ("bfe.u32 %r9, 0xF0, 4, 3;", 7),
        ("shl.b32 %r9, 1, 32;", 0),
        ("shr.s32 %r9, -8, 40;", -1),
        ("mul.wide.s32 %rd3, -3, 2;  cvt.u32.u64 %r9, %rd3;", -6),
        ("mov.b32 %r2, 0x3F804000;  fma.rn.bf16x2 %r9, %r2, %r2, 0x3F803F80;", 0x400040A0),
        ("cvt.rn.bf16x2.f32 %r9, 0f3F800000, 0f40000000;", 0x3F804000),
        ("mov.b32 %r2, 0f7FC00000;  setp.neu.f32 %p1, %r2, %r2;  selp.b32 %r9, 1, 0, %p1;", 1),
        ("redux.sync.max.s32 %r9, %r1, -1;", 31),
        ("setp.lt.u32 %p1, %r1, 99;  @%p1 bra $over;\nmov.b32 %r9, 1;\n$over:\nmov.b32 %r9, 2;", 2),
    ],
)
def test_instructions(body, expected):
    assert run(body).unique().tolist() == [(expected + (1 << 31)) % (1 << 32) - (1 << 31)]


def test_instructions_between_threads():
    threads = torch.arange(32)
    assert torch.equal(run("shfl.sync.bfly.b32 %r9, %r1, 2, 31, -1;"), (threads ^ 2).int())
    # Thread i stores its number twice, 4 words are a row; of row 8 + i // 4 it gets the word i % 4 (matrix 1).
    rows = "shl.b32 %r2, %r1, 3;  mov.b32 %r3, global_smem;  add.s32 %r3, %r3, %r2;  st.shared.b32 [%r3], %r1;\n"
    rows += "st.shared.b32 [%r3+4], %r1;\nand.b32 %r2, %r1, 15;  shl.b32 %r2, %r2, 4;\n"
    rows += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r9, %r6, %r7}, [%r2];"
    assert torch.equal(run(rows), (16 + threads // 4 * 2 + threads % 4 // 2).int())


@pytest.mark.parametrize(
    "body, message",
    [
        ("sin.approx.f32 %r9, %r1;", "unknown instruction"),
        ("add.sat.s32 %r9, %r1, %r1;", "sat"),
        ("setp.lt.u32 %p1, %r1, 9;  @%p1 bra $over;\n$over:\nmov.b32 %r9, 1;", "threads part"),
        ("mov.b32 %r9, 1;  st.global.b32 [%rd2+128], %r9;", "outside"),
        ("mov.b32 %r9, 1;  st.global.b32 [%rd2+2], %r9;", "no multiple of 4"),
    ],
)
def test_refused(body, message):
    with pytest.raises(PTXError, match=message):
        run(body)


def test_copies_arrive_when_waited_for():
    """And not before; what is not copied is zero."""
    copy = "shl.b32 %r2, %r1, 2;  cp.async.ca.shared.global [%r2], [%rd2], 0x4, {};  cp.async.commit_group;\n"
    for size, wait, expected in ((4, 0, 0), (4, 1, int(Memory(4, True).bytes.view(np.int32)[0])), (0, 0, 0)):
        body = copy.format(size) + f"cp.async.wait_group {wait};  ld.shared.b32 %r9, [%r2];"
        assert run(body).unique().tolist() == [expected]
