# SPDX-License-Identifier: Apache-2.0
"""formats.py against ml_dtypes and torch, which we did not write: every code and every scale byte."""

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from hf_mxfp4.formats import (
    E2M1_MAGNITUDES,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    FORMATS,
    MXFP4,
    NVFP4,
    QuantizedTensor,
    decode_e4m3,
    decode_e8m0,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def bits(values: torch.Tensor) -> torch.Tensor:
    """float32 bits as int32, with every NaN the same."""
    return torch.where(values.isnan(), torch.full_like(values, math.nan), values).view(torch.int32)


def from_numpy(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def test_e2m1_table_is_the_spec():
    """OCP MX v1.0, table 5."""
    assert E2M1_MAGNITUDES == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1_MAX == 6.0


def test_e2m1_table_is_ml_dtypes():
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert torch.equal(bits(torch.tensor(E2M1_VALUES)), bits(from_numpy(theirs)))  # bits: code 8 is -0


def test_e8m0_every_byte():
    ours = bits(decode_e8m0(ALL_BYTES))
    assert torch.equal(ours, bits(from_numpy(ALL_BYTES.numpy().view(ml_dtypes.float8_e8m0fnu))))
    assert torch.equal(ours, bits(ALL_BYTES.view(torch.float8_e8m0fnu).to(torch.float32)))
    assert decode_e8m0(ALL_BYTES)[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert decode_e8m0(ALL_BYTES)[255].isnan()


def test_e8m0_does_not_depend_on_flush_to_zero():
    expected = bits(decode_e8m0(ALL_BYTES))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert torch.equal(decode_e8m0(ALL_BYTES).view(torch.int32), expected)
    finally:
        torch.set_flush_denormal(False)


def test_e4m3_every_byte():
    ours = bits(decode_e4m3(ALL_BYTES))
    assert torch.equal(ours, bits(decode_e4m3(ALL_BYTES.view(torch.float8_e4m3fn))))
    assert torch.equal(ours, bits(from_numpy(ALL_BYTES.numpy().view(ml_dtypes.float8_e4m3fn))))
    assert decode_e4m3(ALL_BYTES)[126] == E4M3_MAX
    assert decode_e4m3(ALL_BYTES)[1] == 2.0**-9


@formats
def test_scale_bytes_rise(fmt):
    """The search walks bytes in order of value, from 0 to `top_byte`, and leaves the next byte (NaN) alone."""
    values = fmt.decode_scale(ALL_BYTES)
    valid = values[: fmt.top_byte + 1]
    assert bool((valid.diff() > 0).all()) and bool(valid.isfinite().all())
    assert values[fmt.top_byte + 1].isnan()


@formats
def test_zero_byte_is_the_smallest_normal_scale(fmt):
    normal = {"mxfp4": 2.0**-126, "nvfp4": 2.0**-6}[fmt.name]
    assert fmt.decode_scale(ALL_BYTES)[fmt.zero_byte] == normal


@formats
def test_undominated_byte(fmt):
    """Above it, half of every scale is a scale too; at it, that is not so."""
    values = fmt.decode_scale(ALL_BYTES)[: fmt.top_byte + 1].tolist()
    halves = [value / 2 in values for value in values]
    assert all(halves[fmt.undominated_byte + 1 :])
    assert not halves[fmt.undominated_byte]


@formats
def test_bits_per_weight_is_what_is_stored(fmt):
    assert fmt.bits_per_weight == {"mxfp4": 4.25, "nvfp4": 4.5}[fmt.name]
    n, k = 3, 8 * fmt.block_size
    stored = QuantizedTensor(
        torch.zeros(n, k // 2, dtype=torch.uint8),
        torch.zeros(n, k // fmt.block_size, dtype=fmt.scale_dtype),
        torch.ones(()) if fmt.has_global_scale else None,
        fmt,
    )
    assert stored.shape == (n, k)
    assert stored.nbytes == n * k * fmt.bits_per_weight / 8 + 4 * fmt.has_global_scale


@formats
def test_scale_from_bytes_is_a_view(fmt):
    data = ALL_BYTES.clone()
    scale = fmt.scale_from_bytes(data)
    assert scale.dtype == fmt.scale_dtype
    assert scale.data_ptr() == data.data_ptr()
    assert torch.equal(scale.view(torch.uint8), ALL_BYTES)


@formats
def test_rows_are_singletons(fmt):
    """A `QuantizedTensor` is compared by `format is NVFP4`, so copies must stay the row itself."""
    assert copy.copy(fmt) is fmt and copy.deepcopy(fmt) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(QuantizedTensor(torch.zeros(1), torch.zeros(1), None, fmt)).format is fmt


@formats
def test_in_features_must_be_whole_blocks(fmt):
    fmt.check_in_features(fmt.block_size)
    fmt.check_in_features(2880)
    for bad in (0, 1, fmt.block_size - 1, 3 * fmt.block_size + 8):
        with pytest.raises(ValueError) as error:
            fmt.check_in_features(bad, "model.layers.0.mlp.up_proj")
        message = str(error.value)
        for part in (f"model.layers.0.mlp.up_proj: in_features={bad} ", fmt.name, str(fmt.block_size)):
            assert part in message
        assert "modules_to_not_convert" in message and 'on_unsupported="keep"' in message


def test_formats_table():
    assert FORMATS == {"mxfp4": MXFP4, "nvfp4": NVFP4}
    assert (MXFP4.block_size, NVFP4.block_size) == (32, 16)
    assert (MXFP4.scale_dtype, NVFP4.scale_dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert (MXFP4.has_global_scale, NVFP4.has_global_scale) == (False, True)
