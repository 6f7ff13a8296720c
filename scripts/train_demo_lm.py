# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoints: a small Qwen3 (or Qwen3-MoE) that writes Python and adds, subtracts and multiplies.

The text is the running Python's own library source (no download) and generated arithmetic lines, one eighth of the
tokens. An interrupted run goes on where it was from `OUT.state/`; `--steps` in place of `--minutes` makes two runs
on one machine do the same steps.
"""

import argparse
import copy
import dataclasses
import datetime
import json
import math
import os
import platform
import random
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from demo_data import (
    VOCAB_SIZE,
    arithmetic_accuracy,
    arithmetic_document,
    held_out_stream,
    perplexity,
    read_texts,
    token_stream,
    train_tokenizer,
    training_files,
    unigram_perplexity,
)

MAX_BYTES = 8_000_000
ARITHMETIC_SHARE = 1 / 8  # of the rows of a batch
WARMUP_STEPS = 100
MATRIX_LR, OTHER_LR = 4e-3, 3e-3


def build_model(tokenizer, moe: bool) -> transformers.PreTrainedModel:
    """Fresh float32 model. Every linear layer's in_features is a multiple of 128."""
    shared = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not moe:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_hidden_layers=4, **shared))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(num_hidden_layers=3, router_aux_loss_coef=0.01, **experts, **shared)
    return transformers.Qwen3MoeForCausalLM(config)


def build_optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the 2-D weights inside the layers, AdamW for embeddings, norms, routers and stacked experts."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and not name.endswith("mlp.gate.weight")
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def make_batch(stream: torch.Tensor, tokenizer, rows: int, seq: int, seed: int, step: int) -> torch.Tensor:
    """Batch `[rows, seq]` of a step: random windows of the stream, then rows of arithmetic documents.

    It depends on the seed and the step alone, so a resumed run sees what an uninterrupted one would have seen.
    """
    arithmetic_rows = round(rows * ARITHMETIC_SHARE)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - seq, (rows - arithmetic_rows, 1), generator=generator)
    batch = [stream[starts + torch.arange(seq)]]
    rng = random.Random(f"{seed} {step}")
    for _ in range(arithmetic_rows):
        ids: list[int] = []
        while len(ids) < seq:
            ids += [*tokenizer(arithmetic_document(rng))["input_ids"], tokenizer.eos_token_id]
        batch.append(torch.tensor([ids[:seq]]))
    return torch.cat(batch)


def learning_rate_factor(step: int, progress: float) -> float:
    """Linear warm-up, constant to 40 % of the run, then linearly to zero."""
    return min((step + 1) / WARMUP_STEPS, 1.0, max(1.0 - progress, 0.0) / 0.6)


def save_checkpoint(model, tokenizer, out: Path, state_dir: Path) -> None:
    """Write the bf16 checkpoint, each file moved into place whole, so a reader never meets half a file."""
    staging = state_dir / "staging"
    snapshot = copy.deepcopy(model).to(torch.bfloat16)
    snapshot.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    out.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        path.chmod(0o644)  # safetensors leaves 0600
        os.replace(path, out / path.name)


@dataclasses.dataclass
class Position:
    """How far a run has come: what a resumed run needs besides weights and optimizer states."""

    step: int = 0
    elapsed: float = 0.0  # seconds in the training loop, over all resumptions
    loss: float = math.log(VOCAB_SIZE)  # running mean of the training loss


def save_state(state_file: Path, model, optimizers: list, position: Position) -> None:
    """Write the float32 training state, moved into place whole."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    partial = state_file.with_suffix(".partial")
    torch.save({**state, "position": dataclasses.asdict(position)}, partial)
    os.replace(partial, state_file)


def load_state(state_file: Path, model, optimizers: list) -> Position:
    """Restore what an interrupted run left, in place; a fresh `Position` where there is nothing."""
    if not state_file.exists():
        return Position()
    state = torch.load(state_file, map_location=model.device)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Position(**state["position"])


def train_step(forward, model, optimizers: list, rows: torch.Tensor) -> float:
    """One update of the weights; returns the cross-entropy without the routers' balancing loss."""
    extra = {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}
    with torch.autocast(rows.device.type, torch.bfloat16):
        output = forward(input_ids=rows, labels=rows, use_cache=False, **extra)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return output.loss.item() - (model.config.router_aux_loss_coef * output.aux_loss.item() if extra else 0.0)


def train(args: argparse.Namespace, model, tokenizer, stream: torch.Tensor, state_dir: Path) -> Position:
    """Run the training loop to its end, with a snapshot of checkpoint and state now and then."""
    optimizers = build_optimizers(model)
    base_lrs = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    position = load_state(state_dir / "state.pt", model, optimizers)
    forward = torch.compile(model) if args.compile else model
    total, done = (args.steps, position.step) if args.steps else (round(60 * args.minutes), round(position.elapsed))
    bar = tqdm(total=total, initial=done, unit="step" if args.steps else "s", mininterval=1)
    last_snapshot, clock = -math.inf, time.monotonic()
    while (progress := (position.step if args.steps else position.elapsed) / total) < 1:
        for optimizer, base in zip(optimizers, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base * learning_rate_factor(position.step, progress)
        rows = make_batch(stream, tokenizer, args.batch, args.seq, args.seed, position.step).to(model.device)
        loss = train_step(forward, model, optimizers, rows)
        position.step += 1
        position.loss += (loss - position.loss) * max(0.02, 1 / position.step)
        position.elapsed += time.monotonic() - clock
        clock = time.monotonic()
        bar.update((position.step if args.steps else round(position.elapsed)) - bar.n)
        bar.set_postfix(step=position.step, loss=f"{position.loss:.3f}", refresh=False)
        if position.elapsed - last_snapshot > 60 * args.snapshot_minutes:
            save_checkpoint(model, tokenizer, args.out, state_dir)
            save_state(state_dir / "state.pt", model, optimizers, position)
            last_snapshot = position.elapsed
    bar.close()
    return position


def measure(args: argparse.Namespace, model, tokenizer, stream: torch.Tensor, position: Position) -> dict:
    """What training.json holds: how the bf16 model was made and how well it does on held-out text and problems."""
    held_out = held_out_stream(tokenizer)
    return {
        "command": shlex.join(["python", "scripts/train_demo_lm.py", *sys.argv[1:]]),
        "seed": args.seed,
        "steps": position.step,
        "tokens_seen": position.step * args.batch * args.seq,
        "training_tokens": len(stream),
        "training_minutes": round(position.elapsed / 60, 2),
        "train_loss": round(position.loss, 4),
        "held_out_perplexity": round(perplexity(model, held_out), 4),
        "unigram_perplexity": round(unigram_perplexity(stream, held_out), 4),
        "arithmetic_accuracy": arithmetic_accuracy(model, tokenizer),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def parse_args() -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished checkpoint")
    parser.add_argument("--moe", action="store_true", help="train the mixture-of-experts model")
    parser.add_argument("--minutes", type=float, default=45.0, help="wall-clock budget the schedule follows (45)")
    parser.add_argument("--steps", type=int, default=0, help="train exactly this many steps, whatever --minutes says")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="rows a step (16)")
    parser.add_argument("--seq", type=int, default=256, help="tokens a row (256)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="for a machine without a compiler")
    parser.add_argument("--snapshot-minutes", type=float, default=4.0, help="save checkpoint and state this often (4)")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    """Train, measure, and write a bf16 checkpoint with its tokenizer and training.json."""
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    texts = read_texts(training_files())
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    model = build_model(tokenizer, args.moe).to(args.device)
    if (size := 2 * model.num_parameters()) > MAX_BYTES:
        raise ValueError(f"the model takes {size} bytes in bf16, more than {MAX_BYTES}; make it smaller.")
    state_dir = args.out.with_name(args.out.name + ".state")
    state_dir.mkdir(parents=True, exist_ok=True)
    position = train(args, model, tokenizer, stream, state_dir)
    model = model.to(torch.bfloat16).eval()
    save_checkpoint(model, tokenizer, args.out, state_dir)  # before measuring, which leaves the tokenizer set to pad
    report = measure(args, model, tokenizer, stream, position)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    shutil.rmtree(state_dir)
    print(json.dumps(report, indent=2))
    if report["held_out_perplexity"] >= report["unigram_perplexity"] / 3:
        sys.exit("the model has not learned: its held-out perplexity is not below a third of the unigram perplexity.")


if __name__ == "__main__":
    main()
