"""Repacking loses nothing: planes give back, bit for bit, what the block codecs make of the file's bytes."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4.gguf.blocks import dequantize
from ds4.ops.kernels import planes as P
from tests.ops.kernels.kernel_checks import ON_GPU, random_raw

FORMS = [
    (T.Q8_0, "b"),
    (T.F16, "b"),
    (T.IQ2_XXS, "a"),
    (T.IQ2_XXS, "b"),
    (T.Q2_K, "b"),
    (T.Q4_K, "b"),
    (T.MXFP4, "b"),
]
WIDTHS = [256, 512, 768, 7168] if ON_GPU else [256, 768]


def ids(value: object) -> str:
    return value.name if isinstance(value, T) else str(value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_unpack_equals_the_codecs(type, layout, k, device):
    experts, n = 3, 5
    raw = random_raw(type, experts * n, k, seed=1, device=device)
    made = P.allocate(type, n, k, device, experts=experts, layout=layout)
    P.repack(raw, made)
    expected = dequantize(raw, type, experts * n * k).view(experts * n, k)
    assert same_bits(P.unpack(made), expected)
    assert same_bits(P.unpack(made, 4, 7), expected[4:11])


@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_sizes_are_known_before(type, layout, device):
    made = P.allocate(type, 6, 512, device, experts=2, layout=layout)
    assert made.nbytes == P.planes_nbytes(type, 6, 512, experts=2, layout=layout)
    assert made.rows == 12
    assert made.units == 4


def test_sizes_at_full_shape():
    """Bits per weight of the experts of Flash, from the formulas alone."""
    count = 256 * 2048 * 4096
    for type, layout, bits in [
        (T.IQ2_XXS, "b", 2.1875),
        (T.IQ2_XXS, "a", 3.1875),
        (T.Q2_K, "b", 2.625),
        (T.Q4_K, "b", 4.5),
        (T.MXFP4, "b", 4.25),
    ]:
        assert P.planes_nbytes(type, 2048, 4096, experts=256, layout=layout) * 8 == bits * count
    assert P.planes_nbytes(T.Q8_0, 129_280, 4096) * 8 == 8.5 * 129_280 * 4096


@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_pieces_and_slices_give_the_whole(type, layout, device, monkeypatch):
    """A tensor that comes in pieces of rows, each repacked in several slices."""
    experts, n, k = 4, 6, 256
    raw = random_raw(type, experts * n, k, seed=2, device=device)
    size = raw.numel() // (experts * n)
    whole = P.allocate(type, n, k, device, experts=experts, layout=layout)
    P.repack(raw, whole)
    monkeypatch.setattr(P, "_SLICE", 3 * size + 1)
    pieces = P.allocate(type, n, k, device, experts=experts, layout=layout)
    for first, count in ((10, 14), (0, 3), (3, 7)):
        P.repack(raw[first * size : (first + count) * size], pieces, first)
    for (_, a), (_, b) in zip(whole.planes(), pieces.planes(), strict=True):
        assert torch.equal(a, b)


def test_bytes_at_odd_addresses(device):
    raw = random_raw(T.IQ2_XXS, 2, 256, seed=3, device=device)
    moved = torch.zeros(raw.numel() + 3, dtype=torch.uint8, device=device)
    moved[3:] = raw
    made = P.allocate(T.IQ2_XXS, 2, 256, device)
    P.repack(moved[3:], made)
    assert same_bits(P.unpack(made).flatten(), dequantize(raw, T.IQ2_XXS, 512))


def test_matrices_joined_by_rows(device):
    first, second = (random_raw(T.Q8_0, rows, 128, seed=rows, device=device) for rows in (3, 5))
    made = P.allocate(T.Q8_0, 8, 128, device)
    P.repack(first, made)
    P.repack(second, made, 3)
    expected = torch.cat((dequantize(first, T.Q8_0, 3 * 128), dequantize(second, T.Q8_0, 5 * 128)))
    assert torch.equal(P.unpack(made).flatten(), expected)


def test_refusals(device):
    with pytest.raises(ValueError, match="no planes for Q6_K; known: F16"):
        P.planes_nbytes(T.Q6_K, 1, 256)
    with pytest.raises(ValueError, match="must be a multiple of 256"):
        P.allocate(T.Q2_K, 1, 128, device)
    with pytest.raises(ValueError, match="must be a multiple of 128"):
        P.allocate(T.Q8_0, 1, 96, device)
    made = P.allocate(T.Q8_0, 2, 128, device)
    with pytest.raises(ValueError, match="rows of 136 bytes"):
        P.repack(torch.zeros(135, dtype=torch.uint8, device=device), made)
    with pytest.raises(ValueError, match="rows 1 to 3 of 2"):
        P.repack(torch.zeros(272, dtype=torch.uint8, device=device), made, 1)
