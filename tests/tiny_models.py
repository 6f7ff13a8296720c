# SPDX-License-Identifier: Apache-2.0
"""Tiny randomly initialised models of the architectures the tests run on, on disk and quantized, made once each."""

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from hf_mxfp4 import FP4Config, FP4Experts, FP4Linear

_COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)


def tiny_config(name: str, **changes):
    """Config of a tiny model: qwen3, llama (bias), bert, one of `MIXTURES`, qwen2_moe (a linear as gate), or
    qwen3_vl_moe (a text model inside another, experts that are turned round while they load)."""
    make = {
        "qwen3": lambda **kw: transformers.Qwen3Config(tie_word_embeddings=True, **kw),
        "llama": lambda **kw: transformers.LlamaConfig(attention_bias=True, mlp_bias=True, **kw),
        "qwen3_moe": lambda **kw: transformers.Qwen3MoeConfig(num_experts=4, **_EXPERTS | kw),
        "qwen2_moe": lambda **kw: transformers.Qwen2MoeConfig(
            num_experts=4, shared_expert_intermediate_size=64, **_EXPERTS | kw
        ),
        "mixtral": lambda **kw: transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **kw),
        "olmoe": lambda **kw: transformers.OlmoeConfig(num_experts=4, num_experts_per_tok=2, **kw),
        "deepseek_v3": lambda **kw: transformers.DeepseekV3Config(
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            **_EXPERTS,
            **{**kw, "num_key_value_heads": 4},
        ),
        "gpt_oss": lambda **kw: transformers.GptOssConfig(
            num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2, **kw
        ),
        "qwen3_vl_moe": lambda **kw: transformers.Qwen3VLMoeConfig(
            text_config={
                **kw,
                **_EXPERTS,
                "moe_intermediate_size": 96,  # no stack of experts is square
                "num_experts": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            vision_config={
                **{"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64},
                "deepstack_visual_indexes": [0],
            },
        ),
        "bert": lambda **kw: transformers.BertConfig(
            **{k: v for k, v in kw.items() if k not in ("num_key_value_heads", "head_dim")}
        ),
    }
    return make[name](**_COMMON | changes)


def tiny_model(name: str, dtype=torch.bfloat16, seed: int = 0, **changes):
    """A tiny model with random weights of a trained model's size (standard deviation 0.05)."""
    torch.manual_seed(seed)
    config = tiny_config(name, **changes)
    model = auto_class(name).from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
    return model


DENSE = ("qwen3", "llama", "bert")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


def tokens(rows: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random token ids `[rows, length]`, none of them a special token."""
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def auto_class(name: str):
    """The `Auto` class a tiny model is loaded with."""
    others = {"bert": transformers.AutoModel, "qwen3_vl_moe": transformers.AutoModelForImageTextToText}
    return others.get(name, transformers.AutoModelForCausalLM)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="hf_mxfp4-tests-")  # removed when the interpreter exits


@functools.cache
def source(name: str, dtype=torch.bfloat16) -> Path:
    """Folder of a tiny model saved in full precision. Shared: not to be written to."""
    folder = Path(_scratch().name) / f"{name}-{str(dtype).removeprefix('torch.')}"
    tiny_model(name, dtype).save_pretrained(folder)
    return folder


class Case(NamedTuple):
    """A tiny model quantized on load, and the same saved. Shared: not to be changed."""

    name: str
    format: str
    dense: torch.nn.Module
    model: torch.nn.Module
    folder: Path

    def load(self, **kwargs):
        """The saved model, loaded again."""
        return auto_class(self.name).from_pretrained(self.folder, **kwargs)

    def quantize(self, folder=None, **fields):
        """The full-precision model (or that in `folder`), quantized while it loads."""
        config = FP4Config(format=self.format, **fields)
        return auto_class(self.name).from_pretrained(folder or source(self.name), quantization_config=config)


@functools.cache
def case(name: str, format: str = "nvfp4") -> Case:
    """The `Case` of a tiny model."""
    dense = auto_class(name).from_pretrained(source(name))
    model = auto_class(name).from_pretrained(source(name), quantization_config=FP4Config(format=format))
    folder = Path(_scratch().name) / f"{name}-{format}"
    model.save_pretrained(folder)
    return Case(name, format, dense, model, folder)


def packed_modules(model) -> dict[str, torch.nn.Module]:
    """The packed modules of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (FP4Linear, FP4Experts))}


def outputs(model, rows: int = 2) -> torch.Tensor:
    """Logits (or last hidden states) of a model for fixed tokens, without gradients."""
    with torch.no_grad():
        return model(tokens(rows))[0]


def file_bytes(folder) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def saved_bytes(model, folder) -> dict[str, bytes]:
    """Every file that `save_pretrained` writes."""
    model.save_pretrained(folder)
    return file_bytes(folder)


def assert_same_tensors(state: dict, other: dict):
    """The same keys, dtypes, shapes and bits."""
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert value.dtype == other[key].dtype and value.shape == other[key].shape, key
        one, two = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other[key]))
        assert torch.equal(one, two), key
