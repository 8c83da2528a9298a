"""The quantisation round trips against torch's own E4M3 cast and against the table of E2M1, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4 import ops

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_LEAST = 2.0**-126
"""The least scale; blocks whose largest value is below six times that are on it too."""


def values(seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 128, generator=generator)
    return x * torch.exp(spread * torch.randn(40, 1, generator=generator))


def naive_fp8(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 64):
            v = x[row, start : start + 64]
            scale = 2.0 ** math.ceil(math.log2(max(v.abs().max().item(), 1e-4) / 448.0))
            out[row, start : start + 64] = (v / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return out


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
def test_fp8_equals_torchs_cast(spread: float) -> None:
    x = values(1, spread)
    assert torch.equal(ops.fp8_round_trip(x), naive_fp8(x))


def naive_fp4_value(v: float) -> float:
    """Nearest magnitude, ties to the even code, with the sign."""
    size = abs(v)
    best = min(range(8), key=lambda code: (abs(FP4[code] - size), code % 2))
    return math.copysign(FP4[best], v)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_fp4_equals_the_table(spread: float) -> None:
    x = values(2, spread)
    tiny = torch.tensor([1e-3, 1e-7, 1e-20, 6 * FP4_LEAST, FP4_LEAST, FP4_LEAST / 8]).unsqueeze(1)
    x = torch.cat((x, x[:6] / x[:6].abs().amax(1, keepdim=True) * tiny))
    got = ops.fp4_round_trip(x)
    for row in range(x.shape[0]):
        for start in range(0, 128, 32):
            v = x[row, start : start + 32].tolist()
            scale = 2.0 ** math.ceil(math.log2(max(max(map(abs, v)), 6 * FP4_LEAST) / 6.0))
            expected = [naive_fp4_value(value / scale) * scale for value in v]
            assert got[row, start : start + 32].tolist() == expected


def test_fp4_ties_go_to_the_even_code() -> None:
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25])
    assert ops.fp4_round_trip(x)[0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]


@given(st.floats(2.0**-100, 2.0**100))
def test_scales_are_exact_powers_of_two(size: float) -> None:
    """At every magnitude, also at exact powers of two and at the largest code times one."""
    for factor in (1.0, 6.0, 448.0):
        x = torch.zeros(1, 64)
        x[0, 0] = size * factor
        largest = x[0, 0].item()
        for got in (ops.fp8_round_trip(x)[0, 0].item(), ops.fp4_round_trip(x)[0, 0].item()):
            assert got == 0.0 or abs(got - largest) <= largest * 0.34
    exact = torch.zeros(1, 64)
    exact[0, 0] = 448.0 * 2.0 ** round(math.log2(size) / 2)
    if exact[0, 0] >= 1e-4:
        assert torch.equal(ops.fp8_round_trip(exact), exact)


def test_round_trips_are_idempotent() -> None:
    x = values(3, 2.0)
    once8, once4 = ops.fp8_round_trip(x), ops.fp4_round_trip(x)
    assert torch.equal(ops.fp8_round_trip(once8), once8)
    assert torch.equal(ops.fp4_round_trip(once4), once4)


def test_packed_rows_hold_exactly_the_round_trip() -> None:
    x = values(4, 2.0)
    packed = ops.pack_row(x, 64)
    assert [p.dtype for p in packed] == [torch.uint8, torch.bfloat16, torch.uint8]
    assert [p.shape[1] for p in packed] == [64, 64, 1]
    expected = torch.cat((ops.fp8_round_trip(x[:, :64]), x[:, 64:].bfloat16().float()), dim=1)
    row = ops.unpack_row(*packed)
    assert torch.equal(row, expected)
    assert torch.equal(ops.unpack_row(*ops.pack_row(row, 64)), row)


def test_packed_keys_hold_exactly_the_round_trip() -> None:
    x = values(5, 2.0)
    codes, exponents = ops.pack_key(x)
    assert (codes.shape[1], exponents.shape[1]) == (64, 4)
    assert torch.equal(ops.unpack_key(codes, exponents), ops.fp4_round_trip(x))


def test_a_row_of_the_real_model_takes_583_bytes_and_a_key_68() -> None:
    sizes = [p.numel() * p.element_size() for p in ops.pack_row(torch.ones(1, 512), 64)]
    assert sum(sizes) == 583
    assert sum(p.numel() for p in ops.pack_key(torch.ones(1, 128))) == 68


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_hadamard(n: int) -> None:
    x = values(6, 1.0)[:, :n]
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64)
    expected = x.double() @ matrix * n**-0.5
    assert (ops.hadamard(x) - expected).abs().max() < 1e-4
    assert (ops.hadamard(ops.hadamard(x)) - x).abs().max() < 1e-4


def test_hadamard_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        ops.hadamard(torch.ones(1, 48))
