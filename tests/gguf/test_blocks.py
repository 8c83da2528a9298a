"""Every codec against the `gguf` package's dequantiser: bit for bit, on random blocks and on all scales."""

import warnings

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as T

from ds4.gguf.blocks import CODEC_TYPES, as_tensor, dequantize, row_bytes

# Where the float16 scales of a block are.
SCALES = {T.Q8_0: (0,), T.Q2_K: (80, 82), T.Q4_K: (0, 2), T.IQ2_XXS: (0,)}


def reference(raw, type):
    size = GGML_QUANT_SIZES[type][1]
    data = raw if type in (T.F32, T.F16) else raw.reshape(-1, size)
    with np.errstate(all="ignore"):
        return np.asarray(quants.dequantize(data, type)).reshape(-1)


def assert_equal_bits(got, expected):
    """Equal bit patterns, signs of zero included; NaN exactly where the reference has one."""
    got = got.numpy()
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.int32)[~nan], expected.view(np.int32)[~nan])


def random_blocks(type, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, GGML_QUANT_SIZES[type][1]), dtype=np.uint8)


@pytest.mark.parametrize("type", CODEC_TYPES, ids=lambda t: t.name)
def test_random_blocks(type):
    # More than two chunks, the last one short.
    values = GGML_QUANT_SIZES[type][0]
    count = 600_000 // values
    raw = random_blocks(type, count).reshape(-1)
    assert_equal_bits(dequantize(raw, type, count * values), reference(raw, type))


@pytest.mark.parametrize("type", SCALES, ids=lambda t: t.name)
def test_every_scale(type):
    """All 65,536 float16 patterns as scale: subnormal, zero of either sign, infinite, NaN."""
    raw = random_blocks(type, 65_536, seed=1)
    patterns = np.arange(65_536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    for turn, start in enumerate(SCALES[type]):
        raw[:, start : start + 2] = np.roll(patterns, turn * 12_345, axis=0)
    with np.errstate(all="ignore"):
        expected = reference(raw.reshape(-1), type)
    assert_equal_bits(dequantize(raw.reshape(-1), type, expected.size), expected)


def test_every_mxfp4_scale_and_byte():
    raw = np.zeros((256 * 256, 17), np.uint8)
    raw[:, 0] = np.repeat(np.arange(256), 256)
    raw[:, 1:] = np.tile(np.arange(256), 256)[:, None]
    assert_equal_bits(dequantize(raw.reshape(-1), T.MXFP4, raw.shape[0] * 32), reference(raw.reshape(-1), T.MXFP4))


@pytest.mark.parametrize("type", [T.F16, T.BF16], ids=lambda t: t.name)
def test_every_half(type):
    raw = np.arange(65_536, dtype="<u2").view(np.uint8)
    assert_equal_bits(dequantize(raw, type, 65_536), reference(raw, type))


def test_every_iq2_xxs_sign_code_and_grid_row():
    raw = random_blocks(T.IQ2_XXS, 4096, seed=2)
    words = np.arange(4096 * 8 * 2, dtype=np.uint32).reshape(4096, 8, 2) * np.uint32(2_654_435_761)
    raw[:, 2:] = words.view(np.uint8).reshape(4096, 64)
    raw[:, :2] = np.array([1.0], "<f2").view(np.uint8)
    assert_equal_bits(dequantize(raw.reshape(-1), T.IQ2_XXS, 4096 * 256), reference(raw.reshape(-1), T.IQ2_XXS))


def test_float32_keeps_every_bit():
    raw = np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)
    raw[3::16] = 0x7F
    raw[2::16] |= 0x80  # many NaN of different payload
    assert dequantize(raw, T.F32, 1024).numpy().tobytes() == raw.tobytes()


@pytest.mark.parametrize("type", CODEC_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shift", range(5))
def test_slices_at_any_byte(type, shift):
    """One block, and one row of several, wherever they lie in memory."""
    values, size = GGML_QUANT_SIZES[type]
    raw = random_blocks(type, 6, seed=4).reshape(-1)
    expected = reference(raw, type)
    moved = torch.zeros(raw.size + shift, dtype=torch.uint8)
    moved[shift:] = torch.from_numpy(raw)
    for first, count in ((0, 6), (3, 1), (5, 1), (1, 4)):
        start = shift + first * size
        got = dequantize(moved[start : start + count * size], type, count * values)
        assert_equal_bits(got, expected[first * values : (first + count) * values])
        got = dequantize(moved.numpy()[start : start + count * size], type, count * values)
        assert_equal_bits(got, expected[first * values : (first + count) * values])


@pytest.mark.parametrize("type", CODEC_TYPES, ids=lambda t: t.name)
def test_given_buffer(type):
    raw = random_blocks(type, 512, seed=5).reshape(-1)
    n = 512 * GGML_QUANT_SIZES[type][0]
    buffer = torch.full((n + 8,), 7.0)
    out = buffer[4 : n + 4].view(2, n // 2)
    got = dequantize(raw, type, n, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert got.shape == (n,)
    assert_equal_bits(got, reference(raw, type))
    assert buffer[:4].tolist() + buffer[-4:].tolist() == [7.0] * 8


def test_bytes_that_must_not_be_written():
    raw = random_blocks(T.Q8_0, 4, seed=6).reshape(-1)
    raw.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_tensor(raw).data_ptr() == raw.ctypes.data
        assert_equal_bits(dequantize(raw, T.Q8_0, 128), reference(raw, T.Q8_0))


def test_view_keeps_the_memory_alive():
    tensor = as_tensor(np.full(1 << 20, 7, np.uint8))
    assert int(tensor.sum(dtype=torch.int64)) == 7 << 20


def test_nothing_to_do():
    assert dequantize(np.empty(0, np.uint8), T.Q2_K, 0).shape == (0,)


def test_refusals():
    raw = torch.zeros(34 * 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no codec for Q6_K; known: F32"):
        dequantize(raw, T.Q6_K, 256)
    with pytest.raises(ValueError, match="96 values of Q8_0"):
        dequantize(raw, T.Q8_0, 96)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        dequantize(raw, T.Q8_0, 100)
    with pytest.raises(ValueError, match="int8"):
        dequantize(raw.view(torch.int8), T.Q8_0, 128)
    for out in (torch.empty(127), torch.empty(128, dtype=torch.float64), torch.empty(128, 2)[:, 0]):
        with pytest.raises(ValueError, match="expected contiguous float32 with 128 values"):
            dequantize(raw, T.Q8_0, 128, out=out)
    assert row_bytes(T.Q8_0, 128) == 34 * 4
