# SPDX-License-Identifier: Apache-2.0
"""What calibration writes: the file of tokens and statistics, and finished blocks."""

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import assert_same_tensors, tiny_model, tokens

from hf_mxfp4 import FP4Config, conversion
from hf_mxfp4.calibration_files import Block, Job, Statistics, fingerprint, load_statistics, save_statistics
from hf_mxfp4.calibration_inputs import input_statistics

IDS = tokens(5, 16)


def statistics_of(model) -> Statistics:
    known = Statistics(IDS, {}, {}, fingerprint(model), "given", 0)
    return input_statistics(model, conversion.plan_modules(model, FP4Config()), known)


def lists(counts) -> dict:
    return {name: count.tolist() for name, count in counts.items()}


def test_blocks_keep_every_dtype(tmp_path):
    tensors = {
        "a.columns": torch.tensor([1, 65535]).to(torch.uint16),
        "a.scale": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
        "a.values": torch.tensor([1.5], dtype=torch.bfloat16),
        "a.packed": torch.arange(6, dtype=torch.uint8).view(2, 3).T,  # not contiguous
        "a.offsets": torch.arange(9, dtype=torch.int32)[3:5],  # part of a larger tensor
        "a.divisor": torch.tensor(3.0),
        "b.empty": torch.empty(0, dtype=torch.float16),
    }
    tensors["b.shared"] = tensors["a.divisor"]
    job = Job(tmp_path, {"config": {}})
    assert job.load(3, torch.device("cpu")) is None
    block = Block(tensors, {"a": torch.ones(2)}, {"a": torch.tensor(7)}, {"a": "note"})
    job.save(3, block)
    found = Job(tmp_path, {"config": {}}).load(3, torch.device("cpu"))
    assert found.notes == block.notes and found.counts == block.counts
    assert torch.equal(found.diagonals["a"], torch.ones(2))
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and found.tensors[name].shape == tensor.shape
        assert found.tensors[name].flatten().tolist() == tensor.flatten().tolist()


def test_statistics_come_back(tmp_path):
    model = tiny_model("qwen3_moe").float()
    saved = statistics_of(model)
    save_statistics(tmp_path / "calibration.safetensors", saved)
    found = load_statistics(tmp_path / "calibration.safetensors", model)
    assert torch.equal(found.tokens, IDS) and found[3:] == saved[3:]
    assert_same_tensors(found.diagonals, saved.diagonals)
    assert lists(found.counts) == lists(saved.counts)
    with torch.device("meta"):
        empty = type(model)(model.config)
    load_statistics(tmp_path / "calibration.safetensors", empty)  # weights unknown: names and shapes must do
    load_statistics(tmp_path / "calibration.safetensors", tiny_model("qwen3_moe"))


def test_statistics_of_another_model(tmp_path):
    file = tmp_path / "calibration.safetensors"
    save_statistics(file, statistics_of(tiny_model("qwen3", torch.float32)))
    with pytest.raises(ValueError, match="for a model of other parameters"):
        load_statistics(file, tiny_model("llama", torch.float32))
    with pytest.raises(ValueError, match="with the same parameters and other weights"):
        load_statistics(file, tiny_model("qwen3", torch.float32, seed=1))


def test_bad_statistics_files(tmp_path):
    file, model = tmp_path / "calibration.safetensors", tiny_model("qwen3", torch.float32)
    good = statistics_of(model)
    save_statistics(file, good)
    whole = file.read_bytes()
    for data in (b"", b"text", whole[:-1], whole[:100]):
        file.write_bytes(data)
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            load_statistics(file)
    save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="not a calibration file of version 1"):
        load_statistics(file)
    name = next(iter(good.diagonals))
    for bad in (
        good._replace(tokens=IDS.float()),
        good._replace(tokens=IDS[0]),
        good._replace(counts={}),
        good._replace(diagonals={name: -good.diagonals[name]}),
        good._replace(diagonals={name: good.diagonals[name] * torch.nan}),
        good._replace(diagonals={name: good.diagonals[name].double()}),
    ):
        save_statistics(file, bad)
        with pytest.raises(ValueError, match="is damaged: tokens or statistics"):
            load_statistics(file)
