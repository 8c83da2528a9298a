"""The router's choice and weights, by score and by the table of tokens."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.router import route_by_hash, route_by_score
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice

ROWS = [1, 6, 64, 4096] if ON_GPU else [1, 6]
SHAPES = [(256, 6, 1.5), (384, 6, 2.5), (8, 2, 1.5)]


def outputs(rows: int, top: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, top, dtype=torch.int32, device=device), torch.empty(rows, top, device=device)


def by_score(logits: torch.Tensor, bias: torch.Tensor, top: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's choice for given products: they times the unit matrix."""
    return ops.route_by_score(logits, torch.eye(logits.shape[1], dtype=logits.dtype), bias, top, scale)


@pytest.mark.parametrize(("experts", "top", "scale"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_by_score(rows, experts, top, scale, device):
    logits, bias = randn(rows, experts, seed=1) * 4, 0.3 * randn(experts, seed=2)
    chosen, weights = outputs(rows, top, device)
    run_twice(lambda: route_by_score(logits.to(device), bias.to(device), scale, chosen, weights), chosen, weights)
    want, want_weights = by_score(logits.double(), bias.double(), top, scale)
    found = chosen.cpu().long()
    same = (found == want).all(1)
    assert int((~same).sum()) <= rows // 1000
    # Where the choice differs, the scores are equal but for a rounding.
    keys = torch.sqrt(ops.softplus(logits.double())) + bias.double()
    assert torch.allclose(keys.gather(1, found), keys.gather(1, want), atol=1e-5)
    assert error(weights.cpu()[same], want_weights[same]) < 2e-6
    assert torch.allclose(weights.sum(1).cpu(), torch.tensor(scale))


def test_ties_go_to_the_lowest(device):
    logits = torch.zeros(2, 16, device=device)
    logits[1, [3, 9, 12]] = 1.0
    chosen, weights = outputs(2, 4, device)
    route_by_score(logits, torch.zeros(16, device=device), 1.0, chosen, weights)
    assert chosen.tolist() == [[0, 1, 2, 3], [3, 9, 12, 0]]
    bias = torch.full((16,), -5.0, device=device)  # negative keys are in order too
    bias[5] = -4.0
    route_by_score(logits, bias, 1.0, chosen, weights)
    assert chosen.tolist() == [[5, 0, 1, 2], [5, 3, 9, 12]]


def test_extreme_logits(device):
    logits = torch.tensor([[50.0, 30.0, -30.0, -80.0, 20.0, -0.6, 0.0, -6.0]])
    chosen, weights = outputs(1, 8, device)
    route_by_score(logits.to(device), torch.zeros(8, device=device), 1.5, chosen, weights)
    want, want_weights = by_score(logits.double(), torch.zeros(8).double(), 8, 1.5)
    assert torch.equal(chosen.cpu().long(), want)
    assert torch.allclose(weights.cpu().double(), want_weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", ROWS)
def test_by_hash(rows, dtype, device):
    experts, top, vocab = 256, 6, 50
    logits = randn(rows, experts + 8, seed=3)[:, 8:] * 4
    table = torch.rand(vocab, experts, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :top].int()
    ids = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(5), dtype=dtype)
    chosen, weights = outputs(rows, top, device)
    args = [t.to(device) for t in (logits, table.contiguous(), ids)]
    run_twice(lambda: route_by_hash(*args, 1.5, chosen, weights), chosen, weights)
    want, want_weights = ops.route_by_hash(logits.double(), torch.eye(experts).double(), table[ids.long()], 1.5)
    assert torch.equal(chosen.cpu().long(), want)
    assert error(weights.cpu(), want_weights) < 2e-6


def test_padding_rows(device):
    logits, positions = randn(3, 32, seed=6, device=device), torch.tensor([5, -1, 0], device=device)
    chosen, weights = outputs(3, 4, device)
    route_by_score(logits, torch.zeros(32, device=device), 1.0, chosen, weights, positions)
    assert chosen[1].tolist() == [-1] * 4
    assert weights[1].tolist() == [0.0] * 4
    assert int(chosen[[0, 2]].min()) >= 0
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    route_by_hash(logits, table, torch.tensor([1, 0, 1], device=device), 1.0, chosen, weights, positions)
    assert chosen.tolist() == [[4, 5, 6, 7], [-1] * 4, [4, 5, 6, 7]]


def test_refusals(device):
    logits = torch.zeros(2, 16, device=device)
    with pytest.raises(ValueError, match="weights"):
        route_by_score(logits, logits[0], 1.0, *outputs(3, 4, device))
    with pytest.raises(ValueError, match="2 experts a token, 4 are wanted"):
        route_by_hash(logits, torch.zeros(5, 2), torch.zeros(2), 1.0, *outputs(2, 4, device))
