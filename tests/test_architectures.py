# SPDX-License-Identifier: Apache-2.0
"""Architectures beside the main eight: encoders, encoder-decoders, vision, speech, several towers, other mixtures."""

import pytest
import torch
import transformers as tf
from tiny_models import file_bytes, packed_modules, saved_bytes, tokens

from hf_mxfp4 import FP4Config

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**SIZES, "image_size": 32, "patch_size": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
QWEN_VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
WHISPER = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 128))}
WHISPER |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
WHISPER |= {"vocab_size": 128, "d_model": 64, "num_mel_bins": 16, "max_source_positions": 20, "pad_token_id": 0}
NEMOTRON = {k: v for k, v in DECODER.items() if k != "num_hidden_layers"} | EXPERTS
NEMOTRON |= {"layers_block_type": ["mamba", "moe", "attention"], "head_dim": 16, "mamba_num_heads": 4}
NEMOTRON |= {"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "n_group": 1}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 32, "topk_group": 1}
LINEAR = {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}

MODELS = {  # name: (model class, config, has fused experts)
    "t5": (tf.T5ForConditionalGeneration, lambda: tf.T5Config(**T5, decoder_start_token_id=0), False),
    "whisper": (tf.WhisperForConditionalGeneration, lambda: tf.WhisperConfig(**WHISPER, eos_token_id=2), False),
    "phi3": (tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**DECODER), False),
    "gemma3": (tf.Gemma3ForCausalLM, lambda: tf.Gemma3TextConfig(**DECODER, head_dim=16), False),
    "distilbert": (
        tf.DistilBertForMaskedLM,
        lambda: tf.DistilBertConfig(vocab_size=128, dim=64, hidden_dim=128, n_layers=2, n_heads=4),
        False,
    ),
    "roberta": (tf.RobertaForSequenceClassification, lambda: tf.RobertaConfig(**TEXT), False),
    "clip": (
        tf.CLIPModel,
        lambda: tf.CLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VISION, projection_dim=64),
        False,
    ),
    "siglip": (tf.SiglipVisionModel, lambda: tf.SiglipVisionConfig(**VISION), False),  # nn.MultiheadAttention
    "llava": (
        tf.LlavaForConditionalGeneration,
        lambda: tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(**VISION), text_config=tf.LlamaConfig(**DECODER), image_token_index=127
        ),
        False,
    ),
    "qwen2_vl": (  # a convolution that is called `proj`, as linears are elsewhere
        tf.Qwen2VLForConditionalGeneration,
        lambda: tf.Qwen2VLConfig(text_config={**DECODER, "rope_parameters": MROPE}, vision_config=QWEN_VISION),
        False,
    ),
    "qwen3_next": (
        tf.Qwen3NextForCausalLM,
        lambda: tf.Qwen3NextConfig(
            **DECODER | EXPERTS | LINEAR,
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
        ),
        True,
    ),
    "granitemoe": (
        tf.GraniteMoeForCausalLM,
        lambda: tf.GraniteMoeConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2),
        True,
    ),
    "nemotron_h": (tf.NemotronHForCausalLM, lambda: tf.NemotronHConfig(**NEMOTRON), True),  # experts without a gate
    "jina": (  # one matrix with one bias, split into q, k and v while it loads
        tf.JinaEmbeddingsV3Model,
        lambda: tf.JinaEmbeddingsV3Config(**TEXT),
        False,
    ),
    "qwen3_vl_moe": (  # stacks of experts that are turned round while they load
        tf.Qwen3VLMoeForConditionalGeneration,
        lambda: tf.Qwen3VLMoeConfig(
            text_config={**DECODER, **EXPERTS, "rope_parameters": MROPE, "head_dim": 16, "num_experts": 4},
            vision_config={"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
            | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
        True,
    ),
    "minimax_m2": (
        tf.MiniMaxM2ForCausalLM,
        lambda: tf.MiniMaxM2Config(**DECODER, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        True,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def dense(request, tmp_path_factory):
    """(name, a tiny model, its folder), random weights of a trained model's size."""
    cls, config, _ = MODELS[request.param]
    torch.manual_seed(0)
    model = cls(config()).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


def run(model) -> torch.Tensor:
    """The first output, for whatever inputs the model takes."""
    generator = torch.Generator().manual_seed(3)
    name = type(model).__name__
    inputs = {"input_ids": tokens()}
    if name.startswith(("T5", "Whisper")):
        inputs["decoder_input_ids"] = tokens(seed=2)
    if name.startswith("Whisper"):
        inputs["input_features"] = torch.randn(2, 16, 40, generator=generator).to(model.dtype)
        del inputs["input_ids"]
    if name.startswith(("CLIP", "Siglip")):
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator).to(model.dtype)
    if name.startswith("Siglip"):
        del inputs["input_ids"]
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("layout, format", [("auto", "nvfp4"), ("own", "mxfp4")])
def test_round_trip(dense, layout, format, tmp_path):
    """Quantize, save, load, save, dequantize: same outputs, same files, nothing missing."""
    name, model, folder = dense
    cls, _, has_experts = MODELS[name]
    # Some widths here are not multiples of a block; a warning lists them.
    config = FP4Config(format=format, layout=layout, on_unsupported="keep")
    packed = cls.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    assert packed.hf_quantizer.layout == ("own" if has_experts or layout == "own" else "portable")
    assert len(packed_modules(packed)) > 7 and packed.num_parameters() == model.num_parameters()
    expected, original = run(packed).float(), run(model).float()
    error = (expected - original).norm() / original.norm()
    assert 0.003 < error < 0.8  # 4-bit weights, random ones: noticeable, and still the same function
    files = saved_bytes(packed, tmp_path / "packed")
    reloaded, report = cls.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(run(reloaded).float(), expected)
    assert saved_bytes(reloaded, tmp_path / "again") == files
    plain = reloaded.dequantize()
    assert not packed_modules(plain) and plain.num_parameters() == model.num_parameters()
    # bfloat16, sums in another order for experts
    torch.testing.assert_close(run(plain).float(), expected, rtol=0, atol=3e-2 * expected.abs().max().item())
    plain.save_pretrained(tmp_path / "plain")
    again = cls.from_pretrained(tmp_path / "plain")
    assert torch.equal(run(again), run(plain))
    assert file_bytes(tmp_path / "plain").keys() == file_bytes(folder).keys()
