"""FP8, FP4 and MXFP4 against values computed one at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ds4.gguf.blocks import dequantize
from ds4.quantize import decode

TABLE = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def exponents(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_scales_of_every_byte() -> None:
    found = decode.scales(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert [math.ldexp(1.0, e - 127) for e in range(255)] == found[:255].tolist()
    assert math.isnan(found[255])


def test_plain_scales_stay() -> None:
    assert decode.scales(torch.tensor([0.3, 1e-30])).tolist() == torch.tensor([0.3, 1e-30]).tolist()
    assert decode.scales(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(("rows", "cols", "tile"), [(256, 128, (128, 128)), (130, 200, (128, 128)), (5, 7, (2, 3))])
def test_fp8_tiles(rows: int, cols: int, tile: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = (torch.randn(rows, cols, generator=generator) * 50).to(torch.float8_e4m3fn)
    shape = (math.ceil(rows / tile[0]), math.ceil(cols / tile[1]))
    scale = torch.randint(110, 140, shape, generator=generator, dtype=torch.uint8)
    found = decode.fp8(codes, scale.view(torch.float8_e8m0fnu), tile)
    for row, col in ((0, 0), (rows - 1, cols - 1), (rows - 1, 0), (rows // 2, cols // 2), (tile[0] - 1, tile[1] - 1)):
        factor = math.ldexp(1.0, int(scale[row // tile[0], col // tile[1]]) - 127)
        assert found[row, col] == float(codes[row, col]) * factor


def test_fp8_with_float_scales() -> None:
    codes = torch.full((2, 2), 1.5).to(torch.float8_e4m3fn)
    assert decode.fp8(codes, torch.tensor([[0.3]]), (128, 128)).tolist() == [[torch.tensor(0.3).item() * 1.5] * 2] * 2


def test_fp4_order_and_scale() -> None:
    packed = torch.arange(32, dtype=torch.uint8).view(2, 16)
    packed[0, 0] = 0x21  # value 0 is code 1, value 1 is code 2
    packed[1, 15] = 0xF7
    found = decode.fp4(packed.view(torch.int8), exponents(127, 130).view(2, 1).view(torch.float8_e8m0fnu))
    assert found.shape == (2, 32)
    assert found[0, :2].tolist() == [0.5, 1.0]
    assert found[1, 30:].tolist() == [6 * 8.0, -6 * 8.0]
    for row in range(2):
        for col in range(32):
            code = int(packed[row, col // 2]) >> 4 * (col % 2) & 15
            assert found[row, col] == TABLE[code] * (1, 8)[row]


def test_mxfp4_has_the_same_values() -> None:
    generator = torch.Generator().manual_seed(2)
    # 252 is the largest whose products are all finite.
    packed = torch.randint(0, 256, (253, 48), generator=generator, dtype=torch.uint8)
    scale = torch.arange(253, dtype=torch.uint8).view(253, 1).repeat(1, 3)
    blocks = decode.mxfp4(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    assert blocks.shape == (253, 3 * 17)
    expected = decode.fp4(packed, scale)
    by_gguf = quants.dequantize(blocks.numpy(), GGMLQuantizationType.MXFP4)
    ours = dequantize(blocks.flatten(), GGMLQuantizationType.MXFP4, expected.numel()).view_as(expected)
    # Exponent 0 with the subnormal products too. Readers' tables know no -0.
    assert np.array_equal(by_gguf, expected.numpy())
    assert torch.equal(ours, expected)
    assert len(expected[0].unique()) > 8


def test_mxfp4_takes_views_of_larger_tensors() -> None:
    packed = torch.arange(64, dtype=torch.uint8).view(2, 32)
    scale = exponents(1, 2, 3, 4).view(2, 2)
    whole = decode.mxfp4(packed, scale)
    assert torch.equal(decode.mxfp4(packed[:, 16:], scale[:, 1:]), whole[:, 17:])
