"""The quantisers of ds4-tiny: what training rounds to is what the file holds, and it is near the weights."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from quantize import CODECS, encode, rounded
from tiny_path import TINY

from ds4.gguf.blocks import dequantize

# Relative errors on normal weights: of the format, with a little room.
ERRORS = {"IQ2_XXS": 0.36, "Q2_K": 0.32, "Q8_0": 0.006}


def weights(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 3, 512, generator=generator) * 0.05
    w[1] *= 100
    w[2, 0] = 0
    w[3, 1, :40] = 3.0
    return w


def test_there_is_a_quantiser_for_each_format_of_the_file() -> None:
    assert set(CODECS) == set(ERRORS)
    assert TINY.is_dir()


@pytest.mark.parametrize("codec", sorted(ERRORS))
def test_the_bytes_decode_to_what_training_rounds_to(codec: str) -> None:
    w = weights(1)
    kind = GGMLQuantizationType[codec]
    data = encode(w, codec)
    expected = rounded(w, codec)
    assert torch.equal(torch.from_numpy(gguf.dequantize(data, kind)), expected)
    assert torch.equal(dequantize(data.reshape(-1), kind, w.numel()).view(w.shape), expected)


@pytest.mark.parametrize("codec", sorted(ERRORS))
def test_rounding_is_as_near_as_the_format_allows(codec: str) -> None:
    w = weights(2)[4:]
    error = (rounded(w, codec) - w).norm() / w.norm()
    assert error < ERRORS[codec]
    again = rounded(rounded(w, codec), codec)
    assert (again - rounded(w, codec)).norm() <= 1.5 * (rounded(w, codec) - w).norm()
