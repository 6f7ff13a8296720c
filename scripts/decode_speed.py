# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a randomly initialised Qwen3: static cache, one CUDA graph a token, bf16 against FP4.

No weights are read or quantized: the model is made on the device in bfloat16, timed, and then its linears are replaced
by random packed ones. A regime of scripts/benchmark_kernels.py.
"""

import gc
import time
from collections.abc import Callable

import torch
from torch import nn

import timing
from exactness import random_weight
from hf_mxfp4 import FP4Linear
from hf_mxfp4.formats import FORMATS, BlockFormat
from hf_mxfp4.fusion import fuse_projections, unfuse_projections
from kernel_peers import BASELINE, OURS
from kernel_regimes import Bench, Case, describe, finite, new_row

CACHE = 256  # positions
PROMPT = 16  # tokens that replayed and direct steps are compared on
# hidden, intermediate, layers, heads, key-value heads, head dimension, vocabulary
MODELS = {
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151936),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151936),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "tiny": (128, 256, 2, 4, 2, 32, 512),
}


def decode_cases(bench: Bench) -> list[Case]:
    """The 8B and the 3B shape; on a CPU the 0.6B one."""
    if bench.device.type == "cpu":
        name = "tiny" if bench.quick else "Qwen3-0.6B"
        return [Case("end to end", name, MODELS[name], 1, threads) for threads in bench.threads]
    names = ["Qwen3-8B", "Qwen2.5-3B"]
    return [Case("end to end", name, MODELS[name], 1) for name in names[: 1 if bench.quick else None]]


def make_model(shape: tuple[int, ...], device: torch.device) -> nn.Module:
    """A causal Qwen3 in bfloat16 with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = shape
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def pack_linears(model: nn.Module, fmt: BlockFormat) -> None:
    """Put random packed layers in the place of all linears of the decoder layers, one by one."""
    for layer in model.model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    n, k = child.out_features, child.in_features
                    weight = random_weight(n, k, fmt=fmt, device=next(model.parameters()).device)
                    if weight.global_scale is not None:  # one for all, as siblings must have that are fused
                        weight = weight._replace(global_scale=torch.full_like(weight.global_scale, 2.0**-4))
                    setattr(module, name, FP4Linear.from_quantized(weight, dtype=torch.bfloat16))


class LayerCache:
    """Keys and values of one decoder layer, written in place at `position` int64 `[1]`.

    One for each layer, whose index it never looks at: so a compiled layer serves for all layers.
    """

    def __init__(self, config, position: torch.Tensor):
        shape = (1, config.num_key_value_heads, CACHE, config.head_dim)
        self.position = position
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device=position.device) for _ in range(2))

    def update(self, keys, values, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


def run_layer(layer: nn.Module, hidden, mask, cache: LayerCache, cos, sin):
    return layer(hidden, attention_mask=mask, past_key_values=cache, use_cache=True, position_embeddings=(cos, sin))


class Decoder:
    """Greedy decoding of one sequence by `step`, which reads and writes tensors in place and nothing else.

    Args:
        model: a Qwen3 for causal language modelling.
        layer: `run_layer`, or the same compiled.
    """

    def __init__(self, model: nn.Module, layer: Callable = run_layer):
        device = next(model.parameters()).device
        self.model, self.layer = model, layer
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.caches = [LayerCache(model.config, self.position) for _ in model.model.layers]
        self.steps = torch.arange(CACHE, device=device)
        self.logits = torch.zeros(1, 1, model.config.vocab_size, dtype=torch.bfloat16, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """One token: `token` at `position` becomes its successor, `position` the next one, from the last the first."""
        inner = self.model.model
        hidden = inner.embed_tokens(self.token)
        cos, sin = inner.rotary_emb(hidden, self.position[None])
        mask = (self.steps <= self.position)[None, None, None]
        for layer, cache in zip(inner.layers, self.caches, strict=True):
            hidden = self.layer(layer, hidden, mask, cache, cos, sin)
        self.logits.copy_(self.model.lm_head(inner.norm(hidden)))
        self.token.copy_(self.logits.argmax(-1))
        self.position.copy_((self.position + 1) % CACHE)

    def tokens(self, count: int) -> list[int]:
        """The first `count` tokens after token 0."""
        self.position.zero_()
        self.token.zero_()
        found = []
        for _ in range(count):
            self.step()
            found.append(int(self.token))
        return found

    def scores(self, ids: list[int], step: Callable[[], object]) -> torch.Tensor:
        """Logits float32 `[S, V]` of `step` over given tokens."""
        self.position.zero_()
        found = []
        for token in ids:
            self.token.fill_(token)
            step()
            found.append(self.logits[0, -1].float())
        return torch.stack(found)


# A captured product may take another algorithm of cuBLAS: other sums, rounded to bfloat16 in every layer. A buffer
# that was not written, or a step at another position, is seen to differ by more than 0.5.
ALLOWED = 0.1


def gate_replay(decoder: Decoder, step: Callable[[], object]) -> dict:
    """Judge a captured step by the logits of a direct one."""
    ids = torch.randint(0, decoder.model.config.vocab_size, (PROMPT,)).tolist()
    direct, replayed = decoder.scores(ids, decoder.step), decoder.scores(ids, step)
    found = finite((direct - replayed).abs().max() / direct.abs().max())
    return {"error": found, "allowed": ALLOWED, "passed": found <= ALLOWED}


def time_decoder(decoder: Decoder, device: torch.device, rounds: int) -> tuple[dict, timing.Times | None]:
    """Gate, then microseconds a token."""
    step = decoder.step
    decoder.tokens(2)
    if device.type == "cuda":
        with timing.on_capture_stream():
            decoder.step()
        step = timing.capture(decoder.step)
    gate = gate_replay(decoder, step)
    if not gate["passed"]:
        return gate, None
    sample = timing.replay_sampler(step) if device.type == "cuda" else timing.host_sampler([step], device)
    return gate, timing.summarize(timing.take_turns({"": sample}, rounds, 5.0)[""])


def variants(device: torch.device, quick: bool) -> list[tuple[str, str | None, bool, bool]]:
    """(name, format, fused, compiled); bf16 first, since packing is not undone.

    None is both fused and compiled: fused siblings carry hooks whose ids differ from layer to layer, so that every
    layer would be compiled anew.
    """
    found: list[tuple[str, str | None, bool, bool]] = []
    for name, fmt in ((BASELINE, None), *((name, name) for name in OURS)):
        found.append((name, fmt, False, False))
        found += [] if quick or device.type == "cpu" else [(f"{name} compiled", fmt, False, True)]
        found += [(f"{name} fused", fmt, True, False)] if fmt else []
    return found


def measure_decode(case: Case, bench: Bench) -> dict:
    """Microseconds a token at batch 1: layers called directly, and compiled (`torch.compile`); on CUDA in one graph.

    `left_out` names what there was no time for.
    """
    bench.release()
    row, model, state = new_row(case, 0.0), make_model(case.shape, bench.device), (None, False)
    row |= {"baseline": BASELINE, "times": {}, "ratios": {}, "left_out": []}
    longest = 0.0
    for name, fmt, fused, compiled in variants(bench.device, bench.quick):
        start = time.monotonic()
        if start + longest > bench.until:
            row["left_out"].append(name)
            continue
        if (fmt, fused) != state:
            if fmt != state[0]:
                unfuse_projections(model)
                pack_linears(model, FORMATS[fmt])
            if fused:
                fuse_projections(model)
            state = (fmt, fused)
        try:
            layer = torch.compile(run_layer, dynamic=False) if compiled else run_layer
            row["gate"][name], found = time_decoder(Decoder(model, layer), bench.device, bench.rounds)
        except Exception as error:
            row["failed"][name] = describe(error)
            continue
        row["bytes"][name] = float(bytes_read(model))
        if found:
            row["times"][name] = found._asdict()
            row["ratios"][name] = ratio_to(row["times"], BASELINE + " compiled" * compiled, found)
        gc.collect()  # graphs and caches
        longest = max(longest, time.monotonic() - start)
    torch.compiler.reset()
    return row


def ratio_to(times: dict[str, dict], base: str, own: timing.Times) -> dict | None:
    """Ratio of medians, with the quartiles that are furthest apart; `None` if there is nothing to compare to."""
    if base not in times:
        return None
    base = timing.Times(**times[base])
    return timing.Times(base.us / own.us, base.low / own.high, base.high / own.low, own.rounds)._asdict()


def bytes_read(model: nn.Module) -> int:
    """Bytes of what a token reads of a model: all but the embeddings."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not model.model.embed_tokens.weight)
