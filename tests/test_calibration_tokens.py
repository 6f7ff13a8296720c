# SPDX-License-Identifier: Apache-2.0
"""Tokens to calibrate with, from every source."""

import importlib.metadata
import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from tiny_models import tiny_model

from hf_mxfp4 import calibration_tokens as module
from hf_mxfp4.calibration_files import Statistics, fingerprint, save_statistics
from hf_mxfp4.calibration_tokens import calibration_tokens
from hf_mxfp4.integrations.optimum import token_rows

DEMO = Path(__file__).parents[1] / "scripts" / "demo_lm"


@pytest.fixture(scope="module")
def demo():
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(DEMO)


class Words:
    """A tokenizer: each word is a number; `[CLS] ... [SEP]` around."""

    all_special_ids = (1, 2)

    def __len__(self):
        return 50

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [ord(word) - ord("a") + 3 if word.isalpha() else int(word) for word in text.split()]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


# --- from the model itself ------------------------------------------------------------------------------------------


def test_sampled_from_the_model(demo):
    model, tokenizer = demo
    state = torch.get_rng_state()
    found = calibration_tokens(model, "self", tokenizer, 6, 32, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.shape == (6, 32) and found.dtype == torch.int64 and (found[:, 0] == model.config.bos_token_id).all()
    torch.manual_seed(5)
    assert torch.equal(calibration_tokens(model, "self", tokenizer, 6, 32, 0), found)
    assert not torch.equal(calibration_tokens(model, "self", tokenizer, 6, 32, 1), found)
    other = calibration_tokens(model, "random", tokenizer, 6, 32, 0)
    with torch.no_grad():
        own, other = (model(ids, labels=ids).loss for ids in (found, other))
    assert own < other - 3  # nats: the model finds its own text likely


def test_nothing_bends_or_ends_a_sample(monkeypatch):
    model = tiny_model("qwen3", torch.float32)
    ends = list(range(3, 100))  # of 128 ids
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 40)  # two rows at once
    model.generation_config.update(
        eos_token_id=ends, do_sample=False, top_k=1, repetition_penalty=9.0, max_length=5, num_beams=2
    )
    before = model.generation_config.to_dict()
    model.train()
    found = calibration_tokens(model, "self", None, 5, 20, 3)
    assert model.training and model.generation_config.to_dict() == before
    assert found.shape == (5, 20) and not torch.isin(found, torch.tensor(ends)).any()
    assert len(found[:, 1:].unique()) > 15  # of the 28 that are left, less special ones


def test_first_token_without_bos():
    model = tiny_model("qwen3")
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    first = calibration_tokens(model, "self", None, 20, 2)[:, 0]
    assert len(first.unique()) > 10 and torch.equal(calibration_tokens(model, "self", None, 20, 1)[:, 0], first)


def test_models_that_do_not_generate():
    for name, model in {"BertModel": tiny_model("bert"), "Qwen3Model": tiny_model("qwen3").model}.items():
        with pytest.raises(ValueError, match=f'calibration="self": {name} does not generate.*"random"'):
            calibration_tokens(model, "self", None, 2, 8)


# --- random and text ------------------------------------------------------------------------------------------------


def test_random_tokens():
    model = tiny_model("llama")
    model.config.image_token_id = 77
    found = calibration_tokens(model, "random", None, 200, 64, 0)
    assert set(range(128)) - set(found.unique().tolist()) == {0, 1, 2, 77}
    assert torch.equal(calibration_tokens(model, "random", None, 200, 64, 0), found)
    assert not torch.equal(calibration_tokens(model, "random", None, 200, 64, 1), found)
    assert calibration_tokens(model, "random", Words(), 200, 64).max() == 49  # as far as the tokenizer goes


def test_text(tmp_path):
    model = tiny_model("llama")
    text = " ".join(map(str, range(20, 60)))
    expected = torch.tensor([[1, 20, 21, 22, 2], [1, 38, 39, 40, 2], [1, 57, 58, 59, 2]])
    assert torch.equal(calibration_tokens(model, [text], Words(), 3, 5), expected)
    pieces = [text[:30], "", text[30:]]
    assert torch.equal(calibration_tokens(model, pieces, Words(), 3, 5), expected)
    (tmp_path / "text.md").write_text(text, encoding="utf-8")
    assert torch.equal(calibration_tokens(model, tmp_path / "text.md", Words(), 3, 5), expected)
    assert torch.equal(calibration_tokens(model, str(tmp_path / "text.md"), Words(), 3, 5, seed=9), expected)
    assert calibration_tokens(model, [text], Words(), 1, 42).tolist() == [[1, *range(20, 60), 2]]


def test_text_of_a_real_tokenizer(demo):
    model, tokenizer = demo
    found = calibration_tokens(model, ["12+7=19\n" * 50], tokenizer, 4, 16)
    assert (found[:, 0] == tokenizer.bos_token_id).all() and "12+7=19" in tokenizer.decode(found[0])


def test_earlier_tokens(tmp_path):
    model, ids = tiny_model("llama"), torch.arange(3, 33).view(3, 10)
    file = tmp_path / "calibration.safetensors"
    save_statistics(file, Statistics(ids, {}, {}, fingerprint(model), "given", 0))
    assert torch.equal(calibration_tokens(model, str(file), None, 99, 99), ids)


@pytest.mark.parametrize(
    "source, kwargs, error, message",
    [
        (
            ["a"],
            {},
            ValueError,
            "the calibration text has 1 tokens; 2 samples of 8 tokens .of which 2 special. need 12",
        ),
        ([], {}, ValueError, "has 0 tokens"),
        (["a b c d"], {"length": 2}, ValueError, "has 4 tokens; 2 samples of 2 tokens .of which 2 special. need 2"),
        (["a"], {"tokenizer": None}, ValueError, "from text needs a tokenizer"),
        (["500 " * 99], {}, ValueError, "token ids from 1 to 500, the model has 128 tokens"),
        ("random", {"length": 65}, ValueError, "rows of 65 tokens; the model reads at most 64"),
        ("random", {"samples": 0}, ValueError, "samples=0; allowed: an int from 1"),
        ("random", {"length": 2.0}, ValueError, "length=2.0; allowed"),
        (3, {}, TypeError, 'calibration=3; allowed: "self"'),
        (["a", 3], {}, TypeError, "allowed"),
        (Path("no/such.txt"), {}, ValueError, "no/such.txt': there is no such file"),
        ("no/such.txt", {}, ValueError, "no such file, and no data set provider knows it"),
        (".", {}, ValueError, "no such file"),
    ],
)
def test_bad_sources(source, kwargs, error, message):
    arguments = {"tokenizer": Words(), "samples": 2, "length": 8} | kwargs
    with pytest.raises(error, match=message):
        calibration_tokens(tiny_model("llama"), source, **arguments)


def test_bad_files(tmp_path):
    model = tiny_model("llama")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.txt is not a text file in utf-8"):
        calibration_tokens(model, tmp_path / "latin.txt", Words(), 2, 8)
    (tmp_path / "x.safetensors").write_bytes(b"text")
    with pytest.raises(ValueError, match="x.safetensors is damaged or not a safetensors file"):
        calibration_tokens(model, tmp_path / "x.safetensors", Words(), 2, 8)


# --- data sets of other packages ------------------------------------------------------------------------------------


@pytest.fixture
def providers(monkeypatch):
    """Entry points by name, to be filled."""
    found = {}

    def entry_points(group):
        assert group == "hf_mxfp4.calibration"
        return [SimpleNamespace(name=name, load=lambda rows=rows: rows) for name, rows in found.items()]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return found


def refuse(error):
    def rows(*args):
        raise error

    return rows


def test_data_set_of_a_provider(providers):
    model, asked = tiny_model("llama"), []

    def rows(*args):
        asked.append(args)
        return [range(3, 11), range(13, 21)]

    providers |= {"first": refuse(LookupError("knows cats")), "second": rows}
    tokenizer = Words()
    found = calibration_tokens(model, "dogs", tokenizer, 2, 8, 4)
    assert found.tolist() == [list(range(3, 11)), list(range(13, 21))] and found.dtype == torch.int64
    assert asked == [("dogs", tokenizer, 2, 8, 4)]
    with pytest.raises(ValueError, match=r"second gave tokens \[2, 8\] for 'dogs', not \[3, 8\]"):
        calibration_tokens(model, "dogs", tokenizer, 3, 8)
    with pytest.raises(ValueError, match="a data set needs a tokenizer"):
        calibration_tokens(model, "dogs", None, 2, 8)


def test_data_set_that_nobody_knows(providers):
    providers |= {"first": refuse(LookupError("knows cats")), "second": refuse(ImportError("run `pip install x`"))}
    with pytest.raises(ValueError, match="'dogs' is neither.*first: knows cats; second: run `pip install x`"):
        calibration_tokens(tiny_model("llama"), "dogs", Words(), 2, 8)


def test_optimum(monkeypatch):
    splits = []

    def get_dataset(name, tokenizer, nsamples, seqlen, seed, split):
        assert (name, nsamples, seqlen) == ("c4", 3, 5)
        splits.append(split)
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        return [{"input_ids": torch.full((1, seqlen), row), "attention_mask": None} for row in range(nsamples)]

    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].copy()
    monkeypatch.setitem(__import__("sys").modules, "optimum.gptq.data", SimpleNamespace(get_dataset=get_dataset))
    rows = token_rows("c4", None, 3, 5, 7)
    assert [row.tolist() for row in rows] == [[0] * 5, [1] * 5, [2] * 5]
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert (numpy.random.get_state()[1] == states[2]).all()
    token_rows("c4", None, 3, 5, 7, split="validation")
    assert splits == ["train", "validation"]
    with pytest.raises(LookupError, match="optimum knows wikitext2, c4, c4-new"):
        token_rows("dogs", None, 3, 5, 7)


def test_optimum_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optimum.gptq.data", None)
    with pytest.raises(ImportError, match="pip install optimum datasets"):
        token_rows("c4", None, 3, 5, 7)
