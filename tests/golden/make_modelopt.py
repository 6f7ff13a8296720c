# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/modelopt_*: tiny models quantized and exported by nvidia-modelopt 0.47.0, on the CPU.

    pip install nvidia-modelopt[hf]==0.47.0 && python tests/golden/make_modelopt.py tests/golden

`decoded.json` beside each has the SHA-256 of every packed weight as ModelOpt's own `dequantize` gives it in bfloat16.
"""

import copy
import hashlib
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file

SIZES = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=32,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, **SIZES
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"], **SIZES
    ),
}
MXFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
# Golden file: model, ModelOpt's config, and rows added to it.
FILES = {
    "modelopt_moe": ("qwen3_moe", "NVFP4_DEFAULT_CFG", mtq.FP8_KV_CFG["quant_cfg"]),
    "modelopt_gpt_oss": ("gpt_oss", "NVFP4_DEFAULT_CFG", []),
    "modelopt_awq": ("llama", "NVFP4_AWQ_LITE_CFG", []),
    "modelopt_mxfp4": ("llama", "MXFP4_DEFAULT_CFG", []),
    "modelopt_mixed": (
        "llama",
        "W4A16_NVFP4_CFG",
        [
            {"quantizer_name": "*mlp*weight_quantizer", "cfg": MXFP4},
            {"quantizer_name": "*o_proj.weight_quantizer", "enable": False},
        ],
    ),
}


def fake_quantize(inputs, block_size, amax, *args):
    """What ModelOpt does in CUDA while it searches; only AWQ needs it, and nothing of it is stored."""
    packed, scale, tensor_scale = NVFP4QTensor.quantize(
        inputs.clone(), block_size, weights_scaling_factor_2=amax.float().amax() / (6 * 448)
    )
    return packed.dequantize(scale=scale, double_scale=tensor_scale, block_sizes={-1: block_size})


def decoded(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, packed in tensors.items():
        prefix = name if name.endswith(".weight") else f"{name}_weight"
        if packed.dtype != torch.uint8 or f"{prefix}_scale" not in tensors:
            continue
        scale, tensor_scale = tensors[f"{prefix}_scale"], tensors.get(f"{prefix}_scale_2")
        if packed.ndim == 3:
            packed, scale = packed.mT.contiguous(), scale.mT.contiguous()
        shape, kind = (
            (*packed.shape[:-1], 2 * packed.shape[-1]),
            MXFP4QTensor if tensor_scale is None else NVFP4QTensor,
        )
        options = dict(scale=scale, double_scale=tensor_scale, block_sizes={-1: shape[-1] // scale.shape[-1]})
        weight = kind(torch.Size(shape), torch.bfloat16, packed).dequantize(torch.bfloat16, **options)
        weight = weight.view(shape) + 0.0  # no negative zeros, which ModelOpt's two decoders treat differently
        found[name] = hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def main(folder: Path):
    tensor_quant.dynamic_block_quantize_op = fake_quantize
    for name, (model_name, config_name, more) in FILES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[model_name](), dtype=torch.bfloat16).eval()
        model.config.architectures = [type(model).__name__]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.05)
        config = copy.deepcopy(getattr(mtq, config_name))
        config["quant_cfg"] += more
        tokens = torch.randint(3, 32, (4, 8))
        model = mtq.quantize(model, config, lambda model, tokens=tokens: model(tokens))
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=folder / name)
        hashes = decoded(load_file(folder / name / "model.safetensors"))
        (folder / name / "decoded.json").write_text(json.dumps(hashes, indent=1) + "\n")
        (folder / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
