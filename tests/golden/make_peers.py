# SPDX-License-Identifier: Apache-2.0
"""Makes the checkpoints of torchao, fouroversix and fp_quant beside this file, with those packages; no test runs it.

Each `<name>/` is a checkpoint as the peer stores it, each `<name>.expected.safetensors` what the peer decodes from it,
by the names of the dense weights. The folders here were made with torchao 0.18.0, fouroversix 1.0.5, fp_quant 0.3.2
(with scipy), transformers 5.17.0 (from 5.23 on, it loads no weights that fouroversix has filled up) and torch 2.13.0:

    python tests/golden/make_peers.py torchao fouroversix fp_quant
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # fp_quant's kernels

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PREFIX = "model.layers.0."
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def dense(folder: Path, intermediate_size: int) -> Path:
    """A tiny Llama in full precision."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder


def write(name: str, tensors: dict, config: dict, metadata: dict, expected: dict) -> None:
    (HERE / name).mkdir(exist_ok=True)
    (HERE / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: value.contiguous() for key, value in tensors.items()}, HERE / name / "model.safetensors", metadata)
    save_file({key: value.contiguous() for key, value in expected.items()}, HERE / f"{name}.expected.safetensors")


def tidy(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)


# --- torchao ---------------------------------------------------------------------------------------------------------


def torchao(scratch: Path) -> None:
    from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        QuantizeTensorToNVFP4Kwargs,
        per_tensor_amax_to_scale,
    )
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    config = TorchAoConfig(NVFP4WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        dense(scratch / "t", 48), quantization_config=config, dtype="bfloat16"
    )
    model.save_pretrained(HERE / "torchao_nvfp4")
    tidy(HERE / "torchao_nvfp4")
    weights = {f"{name}.weight": module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    expected = {name: w.dequantize(torch.bfloat16) for name, w in weights.items() if type(w.data) is NVFP4Tensor}
    save_file(expected, HERE / "torchao_nvfp4.expected.safetensors")

    # What its tensors can be beside what transformers saves of them.
    torch.manual_seed(1)

    def nvfp4(shape, swizzled, scaled, **more):
        weight = torch.randn(shape, dtype=torch.bfloat16) * 0.05
        amax = weight.abs().amax((-2, -1), keepdim=len(shape) == 3)
        scale = per_tensor_amax_to_scale(amax) if scaled else None
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=swizzled, **more)

    def mxfp4(shape, swizzled, **more):
        weight = torch.randn(shape, dtype=torch.bfloat16) * 0.05
        return MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=swizzled, **more)

    four_bits = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True)
    mx_four_bits = QuantizeTensorToMXKwargs(elem_dtype=torch.float4_e2m1fn_x2)
    weights = {
        "model.layers.0.self_attn.q_proj.weight": nvfp4((48, 80), True, True, act_quant_kwargs=four_bits),
        "model.layers.0.self_attn.k_proj.weight": nvfp4((48, 80), False, True),
        "model.layers.0.self_attn.v_proj.weight": nvfp4((48, 80), False, False),
        "model.layers.0.self_attn.o_proj.weight": mxfp4((48, 96), True, act_quant_kwargs=mx_four_bits),
        "model.layers.0.mlp.up_proj.weight": mxfp4((48, 96), False),
        "model.layers.0.mlp.experts.gate_up_proj": nvfp4((2, 128, 48), True, True),
        "model.layers.0.mlp.experts.down_proj": nvfp4((2, 32, 48), False, True),
        "model.norm.weight": torch.ones(8),
    }
    tensors, metadata = flatten_tensor_state_dict(weights)
    expected = {name: w.dequantize(torch.bfloat16) for name, w in weights.items() if type(w) is not torch.Tensor}
    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}}
    write("torchao_kinds", tensors, {"quantization_config": quantization}, metadata, expected)


# --- fouroversix -----------------------------------------------------------------------------------------------------


def fouroversix(scratch: Path) -> None:
    from fouroversix.quantize.frontend import dequantize
    from transformers import FourOverSixConfig

    def decoded(weight) -> torch.Tensor:
        return dequantize(weight, torch.bfloat16, backend="pytorch", intermediate_dtype=torch.float32)

    kept = ["lm_head"] + [PREFIX + f"self_attn.{which}_proj" for which in "kvo"]
    kept += [PREFIX + f"mlp.{which}_proj" for which in ("gate", "up")]
    kinds = {
        "nvfp4": {},
        "nvfp4_static_4": {"scale_rule": "static_4"},
        "mxfp4": {"dtype": "mxfp4", "scale_rule": "static_6"},
    }
    for kind, fields in kinds.items():
        config = FourOverSixConfig(quantize_backend="pytorch", modules_to_not_convert=kept, **fields)
        model = AutoModelForCausalLM.from_pretrained(
            dense(scratch / "f", 96), quantization_config=config, dtype="bfloat16"
        )
        name = f"fouroversix_{kind}"
        model.save_pretrained(HERE / name)
        tidy(HERE / name)
        modules = {key: module for key, module in model.named_modules() if hasattr(module, "quantized_weight")}
        expected = {f"{key}.weight": decoded(module.quantized_weight()) for key, module in modules.items()}
        save_file({key: value.contiguous() for key, value in expected.items()}, HERE / f"{name}.expected.safetensors")
    _fouroversix_experts(decoded)


def _fouroversix_experts(decoded) -> None:
    from fouroversix.model.config import ModuleQuantizationConfig
    from fouroversix.model.modules.gpt_oss import FourOverSixGptOssExperts
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(2)
    config = GptOssConfig(hidden_size=32, intermediate_size=48, num_local_experts=2)
    # As from the original checkpoint, whose experts it decodes to [E, 2I, H] and [E, H, I].
    dense = {"gate_up_proj": torch.randn(2, 96, 32) * 0.05, "down_proj": torch.randn(2, 32, 48) * 0.05}
    module = FourOverSixGptOssExperts(GptOssExperts(config), ModuleQuantizationConfig(quantize_backend="pytorch"))
    tensors, expected, path = {}, {}, PREFIX + "mlp.experts."
    for name, weight in dense.items():
        found = module.get_quantized_parameters(name, weight.to(torch.bfloat16))
        for key, value in found.items():
            setattr(module, key, torch.nn.Buffer(value))
            tensors[path + key] = value
    down, gate_up = module.quantized_weights()
    for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
        expected[path + name] = torch.stack([decoded(weight) for weight in weights])
    quantization = {"quant_method": "fouroversix", "dtype": "nvfp4", "scale_rule": "mse", "weight_scale_rule": None}
    config = {"model_type": "gpt_oss", "quantization_config": quantization}
    write("fouroversix_experts", tensors, config, {"format": "pt"}, expected)


# --- fp_quant --------------------------------------------------------------------------------------------------------


def fp_quant(scratch: Path) -> None:
    """fp_quant packs on Blackwell GPUs only. Its Triton kernels, which decode at once, run anywhere: what they return
    is packed here as its `FPQuantLinear` would, after a check that codes and scales give it back exactly."""
    kinds = {
        "fp_quant_mxfp4": ("mxfp4", "abs_max", "hadamard", 32),
        "fp_quant_mxfp4_quest": ("mxfp4", "quest", "gsr", 32),
        "fp_quant_mxfp4_identity": ("mxfp4", "abs_max", "identity", 32),
        "fp_quant_nvfp4": ("nvfp4", "abs_max", "hadamard", 16),
    }
    for name, kind in kinds.items():
        _fp_quant(scratch, name, *kind)


def _fp_quant(scratch: Path, name: str, format: str, method: str, transform: str, size: int) -> None:
    from fp_quant.module.linear import get_gsr_matrix, get_hadamard_matrix, get_identity_matrix

    make = {"hadamard": get_hadamard_matrix, "gsr": get_gsr_matrix, "identity": get_identity_matrix}[transform]
    matrix = make(size, torch.bfloat16, torch.device("cpu"))
    if transform == "gsr":  # its own are all symmetric, and would not show in which basis weights are
        matrix *= torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    folder = dense(scratch / "q", 64)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    expected = {}
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight = tensors.pop(key)
        rotated, codes, scales, divisor = _pack(weight.float(), matrix.float(), format, method)
        path = key.removesuffix(".weight")
        expected[key] = rotated.to(torch.bfloat16)
        if transform == "gsr" and "q_proj" in key:
            expected[f"original.{key}"] = weight
        rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
        filled = torch.full((rows, columns), 255, dtype=torch.uint8)  # left unwritten by its kernels
        filled[: scales.shape[0], : scales.shape[1]] = scales
        tensors |= {f"{path}.qweight": codes, f"{path}.scales": filled if "q_proj" in key else scales}
        for which in ("weight", "act"):
            tensors[f"{path}.{which}_global_scale"] = torch.tensor([divisor], dtype=torch.bfloat16)
        for which in ("forward", "backward"):
            tensors[f"{path}.{which}_hadamard_matrix"] = matrix.clone()
        tensors |= {f"{path}.{which}": torch.zeros(0, dtype=torch.bfloat16) for which in ("weight", "dqweight")}
    config["quantization_config"] = {
        "backward_dtype": "bf16",
        "forward_dtype": format,
        "forward_method": method,
        "hadamard_group_size": size,
        "modules_to_not_convert": ["lm_head"],
        "pseudoquantization": False,
        "quant_method": "fp_quant",
        "store_master_weights": False,
        "transform_init": transform,
    }
    write(name, tensors, config, {"format": "pt"}, expected)


def _pack(weight: torch.Tensor, matrix: torch.Tensor, format: str, method: str) -> tuple:
    """What fp_quant decodes from a weight, in the rotated basis; the codes, scale bytes and divisor it stands for."""
    from fp_quant.module.triton.mxfp4 import mxfp4_forward_kernel
    from fp_quant.module.triton.nvfp4 import nvfp4_forward_kernel

    rotated, block, divisor = (
        torch.empty_like(weight),
        32 if format == "mxfp4" else 16,
        1.0 if method == "quest" else 3.0,
    )
    grid, shape = (-(-weight.numel() // 1024),), (weight.numel(), matrix.shape[0])
    turned = (weight.view(-1, matrix.shape[0]) @ matrix).view(-1, block)
    if format == "mxfp4":
        fraction = 2.92247856 / 6.0 if method == "quest" else 0.75
        mxfp4_forward_kernel.fn[grid](
            weight, matrix, rotated, None, *shape, 32, fraction, method == "quest", BLOCK_SIZE=1024
        )
        peak = turned.abs().amax(-1)
        if method == "quest":
            peak = fraction * turned.std(-1, unbiased=False) + 1e-8
        scales = (torch.floor(torch.log2(peak)) + 127).to(torch.uint8)
        values = torch.exp2(scales.float() - 127) / (1.0 if method == "quest" else 3.0)
    else:
        tensor_scale = torch.tensor([divisor])
        nvfp4_forward_kernel.fn[grid](weight, matrix, tensor_scale, rotated, *shape, BLOCK_SIZE=1024)
        scales = (divisor * turned.abs().amax(-1) / 6).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = _as_the_interpreter_rounds(scales, rotated.view(-1, block), divisor)
        values = scales.view(torch.float8_e4m3fn).float() / divisor
    ratio = rotated.view(-1, block) / values[:, None]
    distance, codes = (ratio.abs()[..., None] - MAGNITUDES).abs().min(-1)
    assert distance.max() < 1e-5, f"{format}, {method}: not the codes and scales that the kernel had"
    codes = (codes | (torch.signbit(ratio).long() << 3)).to(torch.uint8).view(weight.shape)
    return rotated, codes[:, 0::2] | codes[:, 1::2] << 4, scales.view(weight.shape[0], -1), divisor


def _as_the_interpreter_rounds(scales: torch.Tensor, blocks: torch.Tensor, divisor: float) -> torch.Tensor:
    """Bytes of E4M3 scales; or half of those, which Triton's interpreter makes of scales that round up to a power of
    two, where blocks `[n, 16]` have E2M1 codes only so."""
    misses = []
    for byte in (scales, scales - 8):
        values = byte.view(torch.float8_e4m3fn).float() / divisor
        misses.append(((blocks / values[:, None]).abs()[..., None] - MAGNITUDES).abs().amin(-1).amax(-1))
    return torch.where(misses[0] <= misses[1], scales, scales - 8)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for peer in sys.argv[1:]:
            {"torchao": torchao, "fouroversix": fouroversix, "fp_quant": fp_quant}[peer](Path(scratch))
