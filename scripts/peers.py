# SPDX-License-Identifier: Apache-2.0
"""Quantizers of other projects on the same weights: what the accuracy table and the tests compare ours to.

`PEERS` holds those that are installed; a peer's package is imported when it is first used. Run as a script it measures
how fast they and we quantize on one core.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import rich.progress
import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_mxfp4
from hf_mxfp4 import FP4Config


class Peer(NamedTuple):
    """A quantizer of another project.

    Attributes:
        name: unique among `KNOWN`, begins with the project's name.
        module: top-level module that must be importable.
        package: its name on PyPI.
        bits_per_weight: codes and block scales as stored; what is stored once per matrix is not counted.
        quantize: contiguous bfloat16 or float32 `[N, K]`, K a multiple of 32 -> what the peer stores.
        decode: what the peer stores -> the weight `[N, K]` as the peer decodes it.
    """

    name: str
    module: str
    package: str
    bits_per_weight: float
    quantize: Callable[[torch.Tensor], Any]
    decode: Callable[[Any], torch.Tensor]

    @property
    def version(self) -> str:
        """Version of the installed package."""
        return importlib.metadata.version(self.package)

    def dequantized(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 weight `[N, K]` left of `weight` after quantizing and decoding; float16 goes in as float32."""
        weight = weight.float() if weight.dtype == torch.float16 else weight
        return self.decode(self.quantize(weight.contiguous())).float()


# --- compressed-tensors: scales as its observers in llm-compressor form them, then its compressor --------------------


def _compressed_tensors(format: str):
    """The compressor of a format, with the preset scheme for weights in it."""
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    compressor = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}[format]
    return compressor, preset_name_to_scheme(f"{format.upper()}A16", ["Linear"])


def _compress(format: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    compressor, scheme = _compressed_tensors(format)
    low, high = weight.unflatten(-1, (-1, scheme.weights.group_size)).aminmax(dim=-1)
    stored, global_scale = {"weight": weight}, None
    if format == "nvfp4":
        stored["weight_global_scale"] = global_scale = generate_gparam(low.amin(), high.amax())
    stored["weight_scale"], _ = calculate_qparams(low, high, scheme.weights, global_scale=global_scale)
    return compressor.compress(stored, scheme)


def _decompress(format: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    compressor, scheme = _compressed_tensors(format)
    return compressor.decompress(stored, scheme)["weight"]  # bfloat16, whatever the weight was


# --- torchao: as NVFP4WeightOnlyConfig, but for the order of scales in memory, which changes no value ----------------


def _to_nvfp4(weight: torch.Tensor):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))


# --- fouroversix: its torch backend, which needs no GPU --------------------------------------------------------------


def _quantize_to_fp4(weight: torch.Tensor):
    from fouroversix.quantize import QuantizationConfig, quantize_to_fp4

    return quantize_to_fp4(weight, QuantizationConfig(backend="pytorch", dtype="nvfp4", scale_rule="mse"))


def _dequantize_fp4(stored) -> torch.Tensor:
    from fouroversix.quantize.frontend import dequantize

    return dequantize(stored, torch.float32, backend="pytorch", intermediate_dtype=torch.float32)


# --- gguf: the numpy quantizer that converts checkpoints for llama.cpp -----------------------------------------------


def _gguf_quantize(weight: torch.Tensor):
    from gguf import GGMLQuantizationType, quants

    return quants.quantize(weight.float().numpy(), GGMLQuantizationType.MXFP4)


def _gguf_dequantize(stored) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType.MXFP4))


# --- bitsandbytes: its default block of 64 under a float32 maximum ---------------------------------------------------
# The weight goes in flat: where K is not a multiple of 64, blocks run over the ends of rows, and its decoding on CPUs
# (0.50.2) takes the wrong maxima there.


def _quantize_4bit(quant_type: str, double: bool, weight: torch.Tensor):
    from bitsandbytes.functional import quantize_4bit

    flat = weight.flatten()
    return *quantize_4bit(flat, blocksize=64, quant_type=quant_type, compress_statistics=double), weight.shape


def _dequantize_4bit(stored) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    codes, state, shape = stored
    return dequantize_4bit(codes, state).view(shape)


def _known() -> Iterator[Peer]:
    for format, bits in (("nvfp4", 4.5), ("mxfp4", 4.25)):
        compress, decompress = partial(_compress, format), partial(_decompress, format)
        package = "compressed-tensors"
        yield Peer(f"{package} {format}", "compressed_tensors", package, bits, compress, decompress)
    yield Peer("torchao nvfp4", "torchao", "torchao", 4.5, _to_nvfp4, lambda w: w.dequantize(torch.float32))
    yield Peer("fouroversix nvfp4", "fouroversix", "fouroversix", 4.5, _quantize_to_fp4, _dequantize_fp4)
    yield Peer("gguf mxfp4", "gguf", "gguf", 4.25, _gguf_quantize, _gguf_dequantize)
    single, double = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256)  # double: 8-bit maxima, 256 of them under a float32
    for name, bits in (("nf4", single), ("fp4", single), ("nf4 double", double)):
        quantize = partial(_quantize_4bit, name[:3], "double" in name)
        yield Peer(f"bitsandbytes {name}", "bitsandbytes", "bitsandbytes", bits, quantize, _dequantize_4bit)


KNOWN = tuple(_known())
PEERS = {peer.name: peer for peer in KNOWN if importlib.util.find_spec(peer.module)}


# --- speed -----------------------------------------------------------------------------------------------------------

BASELINE = "compressed-tensors nvfp4"
OURS = {
    f"hf_mxfp4 {format} {rule}": partial(hf_mxfp4.quantize, config=FP4Config(format=format, scale_rule=rule))
    for format in ("nvfp4", "mxfp4")
    for rule in ("amax", "soar")
}
OURS["hf_mxfp4 mxfp4 macro search"] = partial(
    hf_mxfp4.quantize, config=FP4Config(format="mxfp4", macro_block="search")
)


def cpu_seconds(
    quantizers: dict[str, Callable[[torch.Tensor], Any]],
    weight: torch.Tensor,
    rounds: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Median CPU time of each quantizer on `weight`. Taken in turn, round by round: a slow spell hits all of them."""
    for quantize in quantizers.values():
        quantize(weight[:64].clone())  # imports, tables
    found = {name: [] for name in quantizers}
    for _ in range(rounds):
        for name, quantize in quantizers.items():
            start = time.process_time()
            quantize(weight)
            found[name].append(time.process_time() - start)
            advance()
    return {name: statistics.median(times) for name, times in found.items()}


def main(
    rows: Annotated[int, typer.Option(help="N of the bfloat16 weight.")] = 2048,
    columns: Annotated[int, typer.Option(help="K of the bfloat16 weight, a multiple of 32.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Measurements of each; the median counts.")] = 3,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Quantizing speed on one core: ours, and those of the other projects that are installed."""
    if columns % 32 or min(rows, columns, rounds) < 1:
        raise typer.BadParameter(f"{rows=}, {columns=}, {rounds=}: all positive, --columns a multiple of 32.")
    if BASELINE not in PEERS:
        raise typer.BadParameter(f"{BASELINE}, which speeds are relative to, is not installed.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(rows, columns) * 0.02).bfloat16()
    quantizers = OURS | {name: peer.quantize for name, peer in PEERS.items()}
    with rich.progress.Progress(transient=True) as progress:
        bar = progress.add_task("quantizing", total=rounds * len(quantizers))
        seconds = cpu_seconds(quantizers, weight, rounds, lambda: progress.advance(bar))

    versions = dict.fromkeys(OURS, hf_mxfp4.__version__) | {name: peer.version for name, peer in PEERS.items()}
    table = [
        {
            "name": name,
            "version": versions[name],
            "cpu_seconds": spent,
            "mb_per_second": weight.nbytes / 1e6 / spent,
            "ratio": seconds[BASELINE] / spent,
        }
        for name, spent in sorted(seconds.items(), key=lambda item: item[1])
    ]
    shown = Table(
        title=f"Quantizing a bfloat16 weight {rows} x {columns} on one core",
        caption=f"ratio: speed over that of {BASELINE}",
    )
    for number, title in enumerate(("quantizer", "version", "CPU s", "MB/s", "ratio")):
        shown.add_column(title, justify="right" if number > 1 else "left")
    for row in table:
        numbers = f"{row['cpu_seconds']:.2f}", f"{row['mb_per_second']:.2f}", f"{row['ratio']:.2f}"
        shown.add_row(row["name"], row["version"], *numbers)
    Console().print(shown)
    if output:
        about = {
            "weight": {"shape": [rows, columns], "dtype": "bfloat16", "bytes": weight.nbytes},
            "rounds": rounds,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        }
        output.write_text(json.dumps({**about, "results": table}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
