"""Quantised activations: error of a byte, the two orders and the sums agree, fused forms equal their parts."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.quantize import (
    Quantised,
    quantise,
    quantise_and_swiglu,
    rms_norm_quantise,
    swiglu_quantise,
)
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice

WIDTHS = [128, 256, 1024, 1536, 2048, 3072, 4096, 7168, 8192] if ON_GPU else [128, 768]
ROWS = [1, 6, 64, 384] if ON_GPU else [1, 3]


def buffers(rows: int, k: int, device: str) -> Quantised:
    return Quantised.allocate(rows, k, device, words=True, lanes=True, sums=True)


def tensors(q: Quantised) -> list[torch.Tensor]:
    return [t for t in (q.scales, q.words, q.lanes, q.fine, q.sums) if t is not None]


def check_codes(q: Quantised, x: torch.Tensor, tolerance: float = 0.5) -> None:
    """Codes within half a step of x, in groups of 128 and of 32; sums of 16."""
    for size, scales, lanes in ((128, q.scales, False), (32, q.fine, True)):
        assert scales is not None
        groups = x.double().view(x.shape[0], -1, size)
        scales = scales.double().view(x.shape[0], -1)
        assert torch.allclose(scales, groups.abs().amax(-1) / 127, rtol=1e-5)
        difference = (groups - q.dequantise(lanes).double().view_as(groups)).abs()
        assert float((difference / scales.clamp(min=1e-30).unsqueeze(-1)).max()) <= tolerance + 1e-3
    sums = q.codes(lanes=True).int().view(x.shape[0], -1, 4, 2, 16).sum(-1).to(torch.int16)
    assert torch.equal(q.sums.view(torch.int16).view(sums.shape), sums)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", WIDTHS)
def test_quantise(rows, k, device):
    x = randn(rows, k, seed=k, device=device) * torch.exp(2 * randn(rows, 1, seed=1, device=device))
    q = buffers(rows, k, device)
    run_twice(lambda: quantise(x, q), *tensors(q))
    check_codes(q, x)
    assert error(q.dequantise(), x) < 1e-2
    assert error(q.dequantise(lanes=True), x) < 1e-2


def test_zeros_and_outliers(device):
    x = torch.zeros(2, 256, device=device)
    x[1, 5] = -1e30
    x[1, 40] = x[1, 200] = 1e-30
    q = buffers(2, 256, device)
    quantise(x, q)
    codes = q.codes()
    assert codes[0].abs().max() == 0
    assert q.scales[0].abs().max() == 0
    assert codes[1, 5] == -127
    assert codes[1, 200] == 127
    # Groups of 32 keep a small value beside a large one of another group.
    fine = q.dequantise(lanes=True)
    assert q.codes()[1, 40] == 0
    assert q.codes(lanes=True)[1, 40] == q.codes(lanes=True)[1, 200] == 127
    assert torch.isfinite(torch.cat((q.dequantise(), fine))).all()


def test_other_dtypes_and_strides(device):
    wide = randn(3, 512, seed=5, device=device)
    q, same = buffers(3, 256, device), buffers(3, 256, device)
    for dtype in (torch.float16, torch.bfloat16):
        x = wide.to(dtype)[:, 128:384]
        quantise(x, q)
        quantise(x.float().contiguous(), same)
        assert all(torch.equal(a, b) for a, b in zip(tensors(q), tensors(same), strict=True))


def test_single_orders(device):
    x = randn(2, 256, seed=6, device=device)
    full, words = buffers(2, 256, device), Quantised.allocate(2, 256, device)
    lanes = Quantised.allocate(2, 256, device, words=False, lanes=True)
    for q in (full, words, lanes):
        quantise(x, q)
    assert words.lanes is None
    assert torch.equal(words.words, full.words)
    assert torch.equal(lanes.lanes, full.lanes)
    assert torch.equal(lanes.fine, full.fine)
    assert words.fine is None
    assert lanes.scales is None
    assert (lanes.rows, lanes.k) == (words.rows, words.k) == (2, 256)
    assert torch.equal(lanes.codes(), full.codes(lanes=True))
    with pytest.raises(ValueError, match="sums are those of lanes"):
        Quantised.allocate(2, 256, device, sums=True)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", WIDTHS)
def test_rms_norm(rows, k, with_weight, device):
    x = randn(rows, k, seed=k, device=device) * 3
    weight = 1 + 0.1 * randn(k, seed=2, device=device) if with_weight else None
    q, normed = buffers(rows, k, device), torch.empty(rows, k, device=device)
    run_twice(lambda: rms_norm_quantise(x, weight, 1e-6, q, normed), *tensors(q), normed)
    expected = ops.rms_norm(x.double(), None if weight is None else weight.double(), 1e-6)
    assert error(normed, expected) < 3e-6
    check_codes(q, normed)


def test_rms_norm_without_codes(device):
    x, normed = randn(2, 256, seed=3, device=device), torch.empty(2, 256, dtype=torch.float16, device=device)
    run_twice(lambda: rms_norm_quantise(x, None, 1e-6, None, normed), normed)
    assert error(normed, ops.rms_norm(x, None, 1e-6)) < 5e-4


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", WIDTHS)
def test_swiglu(rows, k, with_weights, device):
    gate_up = randn(rows, 2 * k, seed=k, device=device) * 6
    weights = torch.rand(rows, device=device) if with_weights else None
    q, hidden = buffers(rows, k, device), torch.empty(rows, k, device=device)
    run_twice(lambda: swiglu_quantise(gate_up, 10.0, q, weights, hidden), *tensors(q), hidden)
    expected = ops.swiglu(gate_up.double(), 10.0)
    if weights is not None:
        expected = expected * weights.double().unsqueeze(1)
    assert error(hidden, expected) < 3e-6
    check_codes(q, hidden)


def test_two_in_one_launch(device):
    x, gate_up = randn(4, 384, seed=7, device=device), randn(2, 1024, seed=8, device=device) * 5
    q, s = buffers(4, 384, device), Quantised.allocate(2, 512, device)
    run_twice(lambda: quantise_and_swiglu(x, q, gate_up, 10.0, s), *tensors(q), *tensors(s))
    same_q, same_s = buffers(4, 384, device), Quantised.allocate(2, 512, device)
    quantise(x, same_q)
    swiglu_quantise(gate_up, 10.0, same_s)
    for a, b in zip(tensors(q) + tensors(s), tensors(same_q) + tensors(same_s), strict=True):
        assert torch.equal(a, b)


def test_refusals(device):
    with pytest.raises(ValueError, match="100 channels cannot be quantised"):
        Quantised.allocate(1, 100, device)
    with pytest.raises(ValueError, match="2 rows of 256 do not fit buffers of 1 rows of 256"):
        quantise(torch.zeros(2, 256, device=device), Quantised.allocate(1, 256, device))
    with pytest.raises(ValueError, match="whole units of 128"):
        quantise(torch.zeros(2, 100, device=device), Quantised.allocate(2, 128, device))
