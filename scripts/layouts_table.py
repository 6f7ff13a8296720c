#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A table of stored layouts: loaded packed, decoded like the tool that made them, saved, exported, read by others.

    python scripts/layouts_table.py [--output scripts/results/layouts.json]

The checkpoints are the tests' own (tests/foreign_checkpoints.py, tests/golden): tiny models made by the tools
themselves, or by their documented formula. "Weights that differ" compares bfloat16 bits with the tool's own decoding.
Exports are read back by compressed-tensors' decompressors and by ModelOpt's formula, not by this package.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import foreign_checkpoints as foreign  # noqa: E402
import tiny_models  # noqa: E402
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor  # noqa: E402
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402

from hf_mxfp4 import layouts, load  # noqa: E402
from hf_mxfp4.checkpoint_files import TensorReader, read_checkpoint  # noqa: E402
from hf_mxfp4.export import TARGETS, export_checkpoint  # noqa: E402
from hf_mxfp4.packed import dense_copy  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


class Source(NamedTuple):
    """A checkpoint, and where its weights as its own tool decodes them are (`None`: made by us)."""

    layout: str
    model: str
    folder: Path
    decoded: Path | None


def sources(folder: Path) -> Iterator[Source]:
    for name in ("llama", "qwen3_moe", "mixtral"):
        for kind in foreign.KINDS:
            if name == "llama" or kind != "modelopt-awq":  # input scales of experts are refused
                made = foreign.made(name, kind)
                yield Source(kind, name, made.folder, made.dense / foreign.FILE)
    made = foreign.made_gpt_oss()
    yield Source("gpt-oss mxfp4", "gpt_oss", made.folder, made.dense / foreign.FILE)
    for path in sorted(GOLDEN.glob("*.expected.safetensors")):
        name = path.name.removesuffix(".expected.safetensors")
        config = json.loads((GOLDEN / name / "config.json").read_text())
        yield Source(name.replace("_", " "), config.get("model_type", "matrices only"), GOLDEN / name, path)
    for name, format in (("llama", "nvfp4"), ("qwen3", "mxfp4"), ("qwen3_moe", "nvfp4"), ("gpt_oss", "nvfp4")):
        ours = folder / f"{name}-{format}"
        tiny_models.case(name, format).quantize().save_pretrained(ours)
        yield Source(f"ours, {format}", name, ours, None)


def decoded(folder: Path, as_stored: bool = False) -> dict[str, torch.Tensor]:
    """Every packed weight in bfloat16, by the name of the dense one and as that is: or, as stored, packed dimension
    last and without what transforms of the input do to it."""
    checkpoint, weights = read_checkpoint(folder), {}
    with TensorReader(folder, checkpoint.tensors) as read:
        for name, matrix in layouts.read(checkpoint).matrices.items():
            tensors = matrix.decode(read)
            factor = 1.0
            if as_stored:
                factor = fp_quant_factor(checkpoint.quantization)
                tensors = tensors._replace(hadamard=None, pre_quant_scale=None)
            weight = dense_copy(matrix.format, torch.float32, **tensors._asdict()) / factor
            weight = weight.to(torch.bfloat16)
            weights[name] = weight.mT if matrix.transposed and not as_stored else weight
    return weights


def fp_quant_factor(quantization: dict) -> float:
    """What fp_quant divides MXFP4 weights by; here it is a part of the transform of the input."""
    of_fp_quant = quantization.get("quant_method") == "fp_quant" and quantization["forward_dtype"] == "mxfp4"
    return 3.0 if of_fp_quant and quantization["forward_method"] == "abs_max" else 1.0


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    pairs = [(weight, expected[name]) for name, weight in found.items()]
    wrong = sum(int((a.contiguous() != b).sum()) for a, b in pairs)
    return f"{wrong} of {sum(a.numel() for a, _ in pairs):,}"


def saved_and_loaded(source: Source, folder: Path) -> str:
    """Whether a model loaded from a source, saved and loaded again gives the same logits, and the layout it is in."""
    if "architectures" not in json.loads((source.folder / "config.json").read_text()):
        return "not a model"
    model, tokens = load(source.folder), torch.arange(3, 13)[None]
    model.save_pretrained(folder)
    with torch.no_grad():
        same = torch.equal(model(tokens)[0], load(folder)(tokens)[0])
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    return f"{'own' if method == 'hf_mxfp4' else 'portable'}, logits {'equal' if same else 'DIFFER'}"


def exported(source: Source, target: str, folder: Path) -> str:
    """Weights of an export that its own reader decodes otherwise than we decode the source."""
    if not (source.folder / "config.json").exists() or source.model == "matrices only":
        return ""
    try:
        export_checkpoint(source.folder, folder, target)
    except ValueError as error:
        return f"refused: {reason(str(error))}"
    stored, ours = load_file(folder / "model.safetensors"), decoded(source.folder)
    if target == "bf16":
        theirs = stored
    else:
        theirs = from_compressed_tensors(stored) if target == "compressed-tensors" else from_modelopt(stored)
    for name in ours.keys() - theirs.keys():
        theirs[name] = put_together(theirs, name).mT
    return differing(ours, theirs)


def put_together(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Fused experts `[E, N, K]` from weights expert by expert."""
    path, _, projection = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    experts = sum(key.startswith(path) and key.endswith(f".{leaves[0]}.weight") for key in weights)
    return torch.stack([torch.cat([weights[f"{path}.{e}.{leaf}.weight"] for leaf in leaves]) for e in range(experts)])


def reason(message: str) -> str:
    words = {  # of a refusal's message, and what the table says
        "input": "input transform",
        "biases": "experts with biases",
        "MXFP4": "MXFP4 weight-only",
        "requantize": "no common tensor scale",
    }
    return next((short for word, short in words.items() if word in message), message[:60])


def from_compressed_tensors(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = dict(stored)
    for name in [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]:
        module = name.removesuffix("weight")
        parts = {key.removeprefix(module): value for key, value in stored.items() if key.startswith(name)}
        nvfp4 = "weight_global_scale" in parts
        compressor = NVFP4PackedCompressor if nvfp4 else MXFP4PackedCompressor
        scheme = preset_name_to_scheme("NVFP4A16" if nvfp4 else "MXFP4A16", ["Linear"])
        weights[name] = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)
    return weights


def from_modelopt(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = dict(stored)
    for key in [key for key in stored if key.endswith("_scale_2")]:
        start = key.removesuffix("_scale_2")
        name = start if start in stored else start.removesuffix("_weight")
        packed, scale, scale_2 = stored[name], stored[f"{start}_scale"], stored[key]
        stack = packed.ndim == 3  # fused experts, packed along the next to last dimension
        packed, scale = (packed.mT, scale.view(torch.uint8).mT.contiguous()) if stack else (packed, scale)
        factor = scale.view(torch.float8_e4m3fn).float() * scale_2.reshape(-1, *[1] * (packed.ndim - 1))
        weight = foreign.values_of(packed) * factor.repeat_interleave(16, -1)
        weights[name] = (weight.mT if stack else weight).to(torch.bfloat16)
    return weights


HEAD = ("layout", "model", "weights that differ from the tool's decoding", "saved as, reloaded", *TARGETS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "layouts.json")
    output = parser.parse_args().output
    logging.getLogger("hf_mxfp4").setLevel(logging.ERROR)
    disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, source in enumerate(sources(Path(scratch))):
            against = "itself"
            if source.decoded is not None:
                as_stored = GOLDEN in source.folder.parents
                against = differing(decoded(source.folder, as_stored), load_file(source.decoded))
            work = Path(scratch) / str(number)
            row = [source.layout, source.model, against, saved_and_loaded(source, work)]
            row += [exported(source, target, Path(f"{work}-{target}")) for target in TARGETS]
            rows.append(dict(zip(HEAD, row, strict=True)))
            print("| " + " | ".join(row) + " |", flush=True)
    versions = {name: version(name) for name in ("torch", "transformers", "compressed-tensors")}
    output.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")
    lines = ["# Stored layouts", "", "`python scripts/layouts_table.py`: " + __doc__.split("\n\n", 2)[2].strip(), ""]
    lines += [", ".join(f"{name} {value}" for name, value in versions.items()) + ".", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
