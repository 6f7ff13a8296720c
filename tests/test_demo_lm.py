# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoints: small enough, learned what training.json says, and never saw what is held out."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo_data

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("folder", ["demo_lm", "demo_lm_moe"])
def test_checkpoint_is_small_and_has_learned(folder):
    path = SCRIPTS / folder
    report = json.loads((path / "training.json").read_text())
    assert (path / "model.safetensors").stat().st_size <= 8_000_000
    assert report["held_out_perplexity"] < report["unigram_perplexity"] / 3

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    # A short slice of the running Python's library. Its text differs from version to version and the slice from the
    # whole, so the bound is the unigram bound and not the perplexity of training.json.
    stream = demo_data.held_out_stream(tokenizer)[: 24 * 256 + 1]
    assert demo_data.perplexity(model, stream) < report["unigram_perplexity"] / 3


def test_held_out_modules_are_not_trained_on():
    held_out = demo_data.held_out_files()
    assert all(path.is_file() for path in held_out)
    assert not set(held_out) & set(demo_data.training_files())
    assert sum(map(len, demo_data.read_texts(held_out))) >= 150_000


def test_arithmetic_split_is_disjoint_and_deterministic():
    problems = demo_data.held_out_problems(300, seed=1)
    assert problems == demo_data.held_out_problems(300, seed=1)
    assert len(set(problems)) == 300 and all(problem.held_out for problem in problems)

    lines = "".join(demo_data.arithmetic_document(random.Random(seed)) for seed in range(500)).splitlines()
    assert not {problem.prompt for problem in problems} & {line.split("=")[0] + "=" for line in lines}
    # Written by hand, so that a change of the hash is noticed: it would let trained problems into the held-out side.
    assert [b for b in range(40) if demo_data.Problem(3, "*", b).held_out] == [1, 7, 24, 35]
    assert [b for b in range(20) if demo_data.Problem(37, "-", b).held_out] == [3, 16, 18]
    for a, op, b in random.Random(0).sample([(a, op, b) for a in range(99) for op in "+*" for b in range(99)], 200):
        assert demo_data.Problem(a, op, b).held_out == demo_data.Problem(b, op, a).held_out


def test_windows_predict_each_token_once():
    rows = torch.cat(list(demo_data.windows(torch.arange(33), seq=8, batch=3)))
    assert rows[:, 1:].flatten().tolist() == list(range(1, 33))
