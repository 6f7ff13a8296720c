# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for a GPU that need not be there; what they use comes out as a JSON line per variant.

    python tests/compile_targets.py cuda:90
    python tests/compile_targets.py hip:gfx942 --brief

One process per target: triton 3.6 keeps state about E4M3 conversions between targets. scripts/kernels_static.py makes
a table of it, tests/test_kernel_compile.py holds it to bounds.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_mxfp4.activations import Activation

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import kernels_static
from hf_mxfp4.formats import FORMATS, BlockFormat, QuantizedTensor
from hf_mxfp4.kernels import dequantize, fake_quantize, gemm, gemm_grad, outliers, permuted, quantize, routing
from hf_mxfp4.kernels import experts as mixture

POINTERS = {
    **{"packed": "*u8", "scale": "*u8", "global_scale": "*fp32", "offsets": "*i32"},
    **{"channel_weights": "*fp32", "words": "*i32"},
    **{"macro": "*u8", "addend": "*fp32", "columns": "*u16", "row_offsets": "*i32"},
    **{"workspace": "*fp32", "counters": "*i32"},
    **{"index": "*i64", "order": "*i32", "router": "*fp32", "rows": "*fp32"},
}
ACTIVATIONS = ("x", "bias", "out", "weight", "values")
ANY_SIZE = (
    "tokens",
    "slots",
    "experts",
    "R",
    "rows_per_matrix",
    "blocks",
    "blocks_per_row",
    "first",
)  # no multiples of 16
PROCESSORS = 132  # of an H200, for all targets: how many parts a sum is cut into
# Every kernel, format, dtype and tile size at least once, in a third of the time that all of them take.
BRIEF = """
dequantize mxfp4 bf16
dequantize nvfp4 fp32
combine bf16
experts_down mxfp4 tokens=1024 fp16 corrected
experts_down nvfp4 tokens=64 bf16
experts_first mxfp4 tokens=1 bf16
experts_first nvfp4 tokens=1024 bf16 corrected
experts_first nvfp4 tokens=1 bf16
route
fake_quantize mxfp4 fp32
fake_quantize nvfp4 bf16
linear mxfp4 tokens=1 experts=1 bf16
linear mxfp4 tokens=512 experts=1 bf16
linear mxfp4 tokens=512 experts=1 bf16 corrected
linear mxfp4 tokens=512 experts=1 fp16
linear mxfp4 tokens=64 experts=1 fp32
linear nvfp4 tokens=1 experts=1 bf16
linear nvfp4 tokens=32 experts=1 bf16
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


class Variant(NamedTuple):
    """A kernel as its launcher would choose it for some input."""

    name: str
    kernel: triton.JITFunction
    dtype: torch.dtype  # of the activations
    constants: dict  # compile-time arguments by name; those that the kernel does not have are left out
    options: dict  # tile sizes and launch options
    weights: int | None = None  # that a program decodes in a step of its loop, or at all


def variants(target: permuted.Target) -> Iterator[Variant]:
    """All of them for a target, a function for each file of kernels."""
    for fmt in FORMATS.values():
        yield from quantizers(fmt, target)
        yield from linears(fmt, target)
        yield from gradients(fmt, target)
        yield from mixtures(fmt, target)
    yield from of_outliers()


def absent(fmt: BlockFormat) -> dict:
    """Operands that weights of a format never have."""
    return {"macro": None} if fmt.has_global_scale else {"global_scale": None}


def meta_weight(fmt: BlockFormat, n: int = 4096, k: int = 4096) -> QuantizedTensor:
    return QuantizedTensor(*(torch.empty(n, k // d, device="meta") for d in (2, fmt.block_size)), None, fmt)


def quantizers(fmt: BlockFormat, target: permuted.Target) -> Iterator[Variant]:
    shape = {"E8M0": fmt.scale_dtype == torch.uint8, "BLOCK": fmt.block_size}
    for dtype in (torch.bfloat16, torch.float32):
        constants = {**shape, **absent(fmt), "EVEN_K": dtype == torch.bfloat16}
        name = f"dequantize {fmt.name} {SHORT[dtype]}"
        constants |= {"ASM": dtype != torch.float32 and permuted.target(target)["ASM"], "rows_per_matrix": None}
        plain = {"macro": None, "addend": None}
        yield Variant(name, dequantize.dequantize_kernel, dtype, constants | plain, dequantize.TILE)
        yield Variant(f"{name} corrected", dequantize.dequantize_kernel, dtype, constants, dequantize.TILE)
        name = f"fake_quantize {fmt.name} {SHORT[dtype]}"
        yield Variant(name, fake_quantize.fake_quantize_kernel, dtype, shape, fake_quantize.options(fmt, 4096))
        for weighted, macro in ((False, False), (True, False), (False, True), (True, True)):
            if macro and fmt.has_global_scale:
                continue
            constants = quantize.constants(fmt, target.backend == "hip") | absent(fmt)
            constants |= ({} if macro else {"macro": None}) | ({} if weighted else {"channel_weights": None})
            name = f"quantize {fmt.name} {SHORT[dtype]}{' weighted' if weighted else ''}{' macro' if macro else ''}"
            yield Variant(name, quantize.quantize_kernel, dtype, constants, quantize.OPTIONS)


def products(fmt: BlockFormat, corrected: bool) -> Iterator[tuple[str, torch.dtype, int, int, dict]]:
    """(name, dtype, tokens, experts, operands that are absent) of the products in question."""
    for dtype, tokens, experts in (
        *((torch.bfloat16, tokens, 1) for tokens in (1, 32, 64, 512)),
        *((torch.float16, tokens, 1) for tokens in (1, 64, 512)),
        *((torch.float32, tokens, 1) for tokens in (1, 64)),
        (torch.bfloat16, 4096, 128),
    ):
        missing = absent(fmt) | ({} if corrected else {"macro": None, "addend": None})
        missing |= {"offsets": None, "bias": None} if experts == 1 else {}
        name = f"{fmt.name} tokens={tokens} experts={experts} {SHORT[dtype]}{' corrected' if corrected else ''}"
        yield name, dtype, tokens, experts, missing


def linears(fmt: BlockFormat, target: permuted.Target) -> Iterator[Variant]:
    weight, macro = meta_weight(fmt), not fmt.has_global_scale
    for corrected in (False, True):
        for name, dtype, tokens, experts, missing in products(fmt, corrected):
            options = gemm.tile(dtype, tokens, *weight.shape, experts, macro and corrected, target)
            constants = gemm.constants(dtype, weight, options["TILE_K"], experts) | permuted.target(target) | missing
            # float32 takes the loop of 32 at a time.
            step = options["TILE_N"] * (32 if dtype == torch.float32 else options["TILE_K"])
            yield Variant(f"linear {name}", gemm.linear_kernel, dtype, constants, options, step)


def gradients(fmt: BlockFormat, target: permuted.Target) -> Iterator[Variant]:
    weight, macro = meta_weight(fmt), not fmt.has_global_scale
    for corrected in (False, True):
        for name, dtype, tokens, experts, missing in products(fmt, corrected):
            if tokens > 1:
                options = gemm_grad.tile(dtype, tokens, *weight.shape, experts, macro and corrected)
                asm = permuted.target(target)["ASM"]
                constants = gemm_grad.constants(dtype, fmt, weight.scale, options["TILE_K"], experts, asm) | missing
                step = options["TILE_N"] * options["TILE_K"]
                yield Variant(f"linear_grad {name}", gemm_grad.linear_grad_kernel, dtype, constants, options, step)


def mixtures(fmt: BlockFormat, target: permuted.Target) -> Iterator[Variant]:
    """Both projections of 128 experts of 2048 x 768, of which a token takes 8."""
    weights = {"first": (1536, 2048), "down": (2048, 768)}
    rows = [(torch.bfloat16, tokens, False) for tokens in (1, 64, 1024)]
    rows += [(dtype, tokens, True) for dtype in (torch.bfloat16, torch.float16) for tokens in (1, 64, 1024)]
    for dtype, tokens, corrected in (*rows, (torch.float32, 64, True)):
        for name, shape in weights.items():
            direct = tokens <= mixture.DIRECT
            options = mixture.options_of(8 * tokens, *shape, 128, dtype, direct, corrected, target)
            activation = Activation("silu") if name == "first" else None
            step = options["TILE_K"]
            constants = mixture.constants(dtype, fmt, shape[1], 128, activation, name == "first", 8, step)
            constants |= permuted.target(target) | absent(fmt)
            constants |= {} if corrected else dict.fromkeys(("macro", "values", "columns", "row_offsets", "bias"))
            constants |= dict.fromkeys(("order", "offsets") if direct else ("workspace", "counters"))
            constants |= {"router": None} if name == "first" else {}
            label = f"experts_{name} {fmt.name} tokens={tokens} {SHORT[dtype]}{' corrected' if corrected else ''}"
            # With outliers there is a second loop, which is not over weights.
            step = None if corrected else options["TILE_N"] * step
            yield Variant(label, mixture.project_kernel, dtype, constants, options, step)
    if fmt.has_global_scale:
        yield Variant("route", routing.route_kernel, torch.bfloat16, {}, routing.ROUTE[-1])
        yield Variant("combine bf16", routing.combine_kernel, torch.bfloat16, {"TOP_K": 8}, routing.COMBINE)


def of_outliers() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        yield Variant(f"scatter {SHORT[dtype]}", outliers.scatter_kernel, dtype, {}, outliers.SCATTER)
    for tokens, experts in ((16, 1), (64, 128), (128, 1)):
        constants = {"EXPERTS": experts, **({"offsets": None} if experts == 1 else {})}
        name, options = f"outlier_product tokens={tokens} experts={experts} bf16", outliers.product_options(tokens)
        yield Variant(name, outliers.outlier_product_kernel, torch.bfloat16, constants, options)


def compile_variant(variant: Variant, target: GPUTarget):
    """`triton.compile` with pointers, sizes and strides aligned to 16, as real tensors have them."""
    options, kernel = dict(variant.options), variant.kernel
    constants = {**variant.constants, **{name: options.pop(name) for name in [*options] if name.isupper()}}
    if constants.get("SPLITS") == 1 and kernel is not mixture.project_kernel:  # which adds up over experts too
        constants |= {"workspace": None, "counters": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        activation = f"*{SHORT[variant.dtype]}" if name in ACTIVATIONS else "i32"
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, activation)
        if name not in constants and name not in ANY_SIZE:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(compiled, variant: Variant, backend: str) -> dict[str, int | float]:
    """Registers and shared memory, whatever was put on the stack for want of registers, and the hot loop's make-up."""
    used = {"shared": compiled.metadata.shared}
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        fields = {
            "registers": r"\.vgpr_count",
            "spills": r"\.vgpr_spill_count",
            "stack": r"\.private_segment_fixed_size",
        }
        return used | {key: int(re.search(rf"{field}:\s+(\d+)", text)[1]) for key, field in fields.items()}
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        commands = [tools / "cuobjdump", "-res-usage", cubin], [tools / "nvdisasm", "-c", cubin]
        usage, sass = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    fields = {"registers": "REG", "stack": "STACK", "spills": "LOCAL"}
    used |= {key: int(re.search(rf"{field}:(\d+)", usage)[1]) for key, field in fields.items()}
    if variant.weights is None:
        return used
    hot = hot_loop(sass)
    each = variant.weights / (32 * compiled.metadata.num_warps)  # weights of a thread
    return used | {
        "sass_per_weight": round(len(hot) / each, 3),
        "shared_stores": sum(name.startswith("STS") for name in hot),
        "wide_copies": sum(name.startswith("LDGSTS") and name.endswith(".128") for name in hot),
        "products": next((p for p in PRODUCTS if any(name.startswith(p) for name in hot)), None),
    }


PRODUCTS = ("HGMMA", "UTCHMMA", "HMMA", "FFMA")


def hot_loop(sass: str) -> list[str]:
    """Names of the instructions of the loop with the most products, or of the whole kernel if it has no loop.

    A loop reaches from a label to the jump back to it. One that contains another is not looked at. Of two with as many
    products it is the one that loads ahead, or else the shorter: the gradient's slow sum has as many as the fast one.
    """
    names, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);", line):
            names.append(found[1])
            back = re.search(r"(\.L_x_\d+)", found[2]) if found[1].startswith("BRA") else None
            if back and labels.get(back[1], len(names)) < len(names) - 1:
                loops.append((labels[back[1]], len(names)))
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    bodies = [names[a:b] for a, b in inner] or [names]

    def count(body: list[str], names: str | tuple) -> int:
        return sum(name.startswith(names) for name in body)

    return max(bodies, key=lambda body: (count(body, PRODUCTS), count(body, "LDGSTS"), -len(body)))


def main(name: str, *options: str) -> None:
    backend, arch = name.split(":")
    lanes = 64 if arch.startswith("gfx9") else 32
    arch = int(arch) if backend == "cuda" else arch
    for variant in variants(permuted.Target(backend, arch, PROCESSORS)):
        wanted = "--brief" not in options or variant.name in BRIEF
        if wanted and kernels_static.concerns(variant.name, name):
            compiled = compile_variant(variant, GPUTarget(backend, arch, lanes))
            print(json.dumps({"variant": variant.name, **resources(compiled, variant, backend)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
