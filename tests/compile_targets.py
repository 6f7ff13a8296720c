# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for a GPU that need not be there; what they use comes out as a JSON line per variant.

    python tests/compile_targets.py cuda:90
    python tests/compile_targets.py hip:gfx942 --brief

One process per target: triton 3.6 keeps state about E4M3 conversions between targets.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_mxfp4.formats import FORMATS, QuantizedTensor
from hf_mxfp4.kernels import dequantize, fake_quantize, gemm, gemm_grad, outliers, quantize

POINTERS = {
    **{"packed": "*u8", "scale": "*u8", "global_scale": "*fp32", "offsets": "*i32"},
    **{"channel_weights": "*fp32", "words": "*i32"},
    **{"macro": "*u8", "addend": "*fp32", "columns": "*u16", "row_offsets": "*i32"},
}
ACTIVATIONS = ("x", "bias", "out", "weight", "values")
ANY_SIZE = ("tokens", "experts", "R", "rows_per_matrix", "blocks", "blocks_per_row", "first")  # no multiples of 16
# Every kernel, format, dtype and tile size at least once, in a third of the time that all of them take.
BRIEF = """
dequantize mxfp4 bf16
dequantize nvfp4 fp32
fake_quantize mxfp4 fp32
fake_quantize nvfp4 bf16
linear mxfp4 tokens=512 experts=1 bf16
linear mxfp4 tokens=512 experts=1 bf16 corrected
linear mxfp4 tokens=64 experts=1 fp16
linear mxfp4 tokens=64 experts=1 fp32
linear nvfp4 tokens=1 experts=1 bf16
linear nvfp4 tokens=4096 experts=128 bf16
linear_grad mxfp4 tokens=4096 experts=128 bf16
linear_grad mxfp4 tokens=64 experts=1 fp16 corrected
linear_grad nvfp4 tokens=64 experts=1 bf16
outlier_product tokens=64 experts=128 bf16
quantize mxfp4 bf16 macro
quantize nvfp4 fp32 weighted
scatter bf16
""".strip().splitlines()
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def variants(backend: str) -> Iterator[tuple]:
    """(name, kernel, dtype, compile-time arguments, launch options), as the launchers would choose them."""
    for fmt in FORMATS.values():
        e8m0 = fmt.scale_dtype == torch.uint8
        absent = {"macro": None} if fmt.has_global_scale else {"global_scale": None}
        plain = {"macro": None, "addend": None}
        shape = {"E8M0": e8m0, "BLOCK": fmt.block_size}
        for dtype in (torch.bfloat16, torch.float32):
            constants = {**shape, **absent, "EVEN_K": dtype == torch.bfloat16}
            name = f"dequantize {fmt.name} {SHORT[dtype]}"
            yield name, dequantize.dequantize_kernel, dtype, constants | plain, dequantize.TILE
            yield f"{name} corrected", dequantize.dequantize_kernel, dtype, constants, dequantize.TILE
            name = f"fake_quantize {fmt.name} {SHORT[dtype]}"
            yield name, fake_quantize.fake_quantize_kernel, dtype, shape, fake_quantize.options(fmt, 4096)
            for weighted, macro in ((False, False), (True, False), (False, True), (True, True)):
                if macro and fmt.has_global_scale:
                    continue
                constants = quantize.constants(fmt, backend == "hip") | absent | ({} if macro else {"macro": None})
                constants |= {} if weighted else {"channel_weights": None}
                name = (
                    f"quantize {fmt.name} {SHORT[dtype]}{' weighted' if weighted else ''}{' macro' if macro else ''}"
                )
                yield name, quantize.quantize_kernel, dtype, constants, quantize.OPTIONS
        weight = QuantizedTensor(*(torch.empty(256, 4096 // d, device="meta") for d in (2, fmt.block_size)), None, fmt)
        for dtype, tokens, experts in (
            *((torch.bfloat16, tokens, 1) for tokens in (1, 64, 512)),
            *((dtype, 64, 1) for dtype in (torch.float16, torch.float32)),
            (torch.bfloat16, 4096, 128),
        ):
            for grad, corrected in ((False, False), (True, False), (False, True), (True, True)):
                if grad and tokens == 1:
                    continue
                launcher = gemm_grad if grad else gemm
                tile = launcher.tile(dtype, tokens, experts, macro=corrected and e8m0)
                constants = {**launcher.constants(dtype, weight, tile["TILE_K"], experts), **absent}
                constants |= {} if corrected else plain
                if experts == 1:
                    constants |= {"offsets": None, "bias": None}
                kernel = gemm_grad.linear_grad_kernel if grad else gemm.linear_kernel
                name = (
                    f"{fmt.name} tokens={tokens} experts={experts} {SHORT[dtype]}{' corrected' if corrected else ''}"
                )
                yield f"{'linear_grad' if grad else 'linear'} {name}", kernel, dtype, constants, tile
    for dtype in (torch.bfloat16, torch.float32):
        yield f"scatter {SHORT[dtype]}", outliers.scatter_kernel, dtype, {}, outliers.SCATTER
    for tokens, experts in ((16, 1), (64, 128), (128, 1)):
        constants = {"EXPERTS": experts, **({"offsets": None} if experts == 1 else {})}
        name, options = f"outlier_product tokens={tokens} experts={experts} bf16", outliers.product_options(tokens)
        yield name, outliers.outlier_product_kernel, torch.bfloat16, constants, options


def compile_variant(kernel, dtype, constants: dict, options: dict, target: GPUTarget):
    """`triton.compile` with pointers, sizes and strides aligned to 16, as real tensors have them."""
    options = dict(options)
    constants = {**constants, **{name: options.pop(name) for name in [*options] if name.isupper()}}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        activation = f"*{SHORT[dtype]}" if name in ACTIVATIONS else "i32"
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, activation)
        if name not in constants and name not in ANY_SIZE:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(compiled, backend: str) -> dict[str, int]:
    """Registers and shared memory, and whatever was put on the stack for want of registers."""
    used = {"shared": compiled.metadata.shared}
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        fields = {
            "registers": r"\.vgpr_count",
            "spills": r"\.vgpr_spill_count",
            "stack": r"\.private_segment_fixed_size",
        }
        return used | {key: int(re.search(rf"{field}:\s+(\d+)", text)[1]) for key, field in fields.items()}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    fields = {"registers": "REG", "stack": "STACK", "spills": "LOCAL"}
    return used | {key: int(re.search(rf"{field}:(\d+)", text)[1]) for key, field in fields.items()}


def main(name: str, *options: str) -> None:
    backend, arch = name.split(":")
    target = GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    for label, kernel, dtype, constants, launch in variants(backend):
        if "--brief" not in options or label in BRIEF:
            compiled = compile_variant(kernel, dtype, constants, launch, target)
            print(json.dumps({"variant": label, **resources(compiled, backend)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
