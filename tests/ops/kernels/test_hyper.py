"""Hyper-connections: write-back, mixing, Sinkhorn, norm and codes against the torch operations in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ds4 import ops
from ds4.ops.hyper_connection import sinkhorn
from ds4.ops.kernels.hyper import Constants, HyperWeights, Update, hc_collapse, hc_post, hc_pre, partial_floats
from ds4.ops.kernels.quantize import Quantised, quantise
from tests.ops.kernels.kernel_checks import ON_GPU, bits, error, poison, randn, run_twice

HIDDEN = [256, 4096, 7168] if ON_GPU else [256, 384]
ROWS = [1, 2, 8, 16, 33, 64, 128, 1000, 4096] if ON_GPU else [1, 3, 17, 70]
BAR = 2e-5 if ON_GPU else 2e-6  # tensor cores and the fast exponential round more coarsely
EPS, ROUNDS = 1e-6, 20


def weights(hidden: int, rows: int, device: str) -> HyperWeights:
    return HyperWeights(
        (randn(rows, 4 * hidden, seed=1) * 0.02).half().to(device),
        (0.5 + randn(3 if rows == 24 else 1, seed=2).abs()).to(device),
        randn(rows, seed=3, device=device),
        (1 + 0.1 * randn(hidden, seed=4)).to(device),
    )


def partials(rows: int, hidden: int, device: str) -> torch.Tensor:
    return poison(torch.empty(partial_floats(rows, hidden), device=device))


def expected_pre(x: torch.Tensor, w: HyperWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised input and post and comb as one row, float64."""
    h, post, comb = ops.hc_pre(x, w.fn.double(), w.scale.double(), w.base.double(), ROUNDS, EPS, EPS)
    return ops.rms_norm(h, w.norm.double(), EPS), torch.cat((post, comb.flatten(1)), dim=1)


def an_update(rows: int, hidden: int, device: str, parts: int | None, extra: bool) -> Update:
    comb = sinkhorn(randn(rows, 4, 4, seed=7).double(), ROUNDS, EPS).float()
    coefficients = torch.cat((torch.full((rows, 4), float("nan")), randn(rows, 4, seed=8).abs(), comb.flatten(1)), 1)
    y = randn(rows, hidden, seed=5) if parts is None else randn(rows, parts + 1, hidden, seed=5)[:, :parts]
    target = torch.empty(rows, 4, hidden, device=device)
    added = randn(rows, hidden, seed=6).to(device) if extra else None
    return Update(y.to(device), coefficients.to(device), target, added)


def updated(x: torch.Tensor, update: Update) -> torch.Tensor:
    y = update.y.double()
    y = y.sum(1) if y.dim() == 3 else y
    if update.extra is not None:
        y = y + update.extra.double()
    return ops.hc_post(
        y, x.double(), update.coefficients[:, 4:8].double(), update.coefficients[:, 8:].double().view(-1, 4, 4)
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_pre(rows, hidden, device):
    x, w = (randn(rows, 4, hidden, seed=9) * 3).to(device), weights(hidden, 24, device)
    scratch = partials(rows, hidden, device)
    coefficients, normed = (torch.empty(rows, n, device=device) for n in (24, hidden))
    before = x.clone()
    run_twice(lambda: hc_pre(x, w, scratch, coefficients, normed=normed), coefficients, normed)
    want, mixes = expected_pre(x.double(), w)
    assert torch.equal(x, before)
    assert error(normed, want) < BAR
    assert error(coefficients[:, 4:], mixes) < BAR
    assert torch.isfinite(coefficients).all()


def test_company_changes_nothing(device):
    """A row's bits are the same alone, among others and in any place."""
    rows, hidden = 5, HIDDEN[-1]
    x, w = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 24, device)

    def results(order: list[int]) -> list[np.ndarray]:
        n = len(order)
        q = Quantised.allocate(n, hidden, device, words=True, lanes=True, sums=True)
        coefficients, normed = (torch.empty(n, size, device=device) for size in (24, hidden))
        hc_pre(x[order].contiguous(), w, partials(n, hidden, device), coefficients, q, normed)
        tensors = (coefficients, normed, q.scales, q.words, q.lanes, q.fine, q.sums)
        return [bits(t.reshape(n, -1)) for t in tensors if t is not None]

    together = results([3, 0, 4, 1, 2])
    for place, row in enumerate([3, 0, 4, 1, 2]):
        for mine, theirs in zip(results([row]), together, strict=True):
            assert np.array_equal(mine[0], theirs[place])


def test_many_rows_that_are_alone(device):
    """A row's bits do not depend on how many there are; left to themselves, so many would be multiplied together."""
    rows, hidden = 12, HIDDEN[-1]
    x, w, head = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 24, device), weights(hidden, 4, device)
    update = an_update(rows, hidden, device, None, False)

    def results(part: slice, alone: bool = True) -> list[np.ndarray]:
        old, n = x[part], len(x[part])
        # Coefficients are read and written.
        mine = [replace(update, y=update.y[part], target=torch.empty_like(old)) for _ in range(2)]
        mine = [replace(u, coefficients=update.coefficients[part].clone()) for u in mine]
        found = [torch.empty(n, hidden, device=device) for _ in range(2)]
        scratch = partials(n, hidden, device)
        hc_pre(old, w, scratch, mine[0].coefficients, normed=found[0], update=mine[0], alone=alone)
        hc_collapse(old, head, scratch, normed=found[1], update=mine[1], alone=alone)
        return [bits(t.reshape(n, -1)) for t in (*found, *(u.target for u in mine), mine[0].coefficients)]

    together = results(slice(None))
    for row in (0, 7, rows - 1):
        for mine, theirs in zip(results(slice(row, row + 1)), together, strict=True):
            assert np.array_equal(mine[0], theirs[row])
    others = results(slice(None), alone=False)
    assert not all(np.array_equal(a, b) for a, b in zip(together, others, strict=True))


FORMS = [(None, False), (6, True), (7, False)]


@pytest.mark.parametrize(
    ("rows", "parts", "extra"), [(r, *form) for r in ROWS for form in FORMS if ON_GPU or r < 70 or form[1]]
)
def test_update_and_pre(rows, parts, extra, device):
    hidden = HIDDEN[-1]
    old, w = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 24, device)
    update = an_update(rows, hidden, device, parts, extra)
    given = update.coefficients.clone()
    normed = torch.empty(rows, hidden, dtype=torch.float16, device=device)
    q = Quantised.allocate(rows, hidden, device, words=True, lanes=True, sums=True)
    scratch = partials(rows, hidden, device)

    def run() -> None:
        update.coefficients.copy_(given)
        hc_pre(old, w, scratch, update.coefficients, q, normed, update)

    tensors = [t for t in (q.scales, q.words, q.lanes, q.fine, q.sums) if t is not None]
    run_twice(run, update.target, normed, *tensors)
    streams = updated(old, replace(update, coefficients=given))
    want, mixes = expected_pre(streams, w)
    assert error(update.target, streams) < BAR
    assert error(update.coefficients[:, 4:], mixes) < BAR
    assert error(normed, want) < 5e-4
    same = Quantised.allocate(rows, hidden, device, words=True, lanes=True, sums=True)
    quantise(want.float(), same)
    for lanes in (False, True):
        assert error(q.dequantise(lanes), want) < 1e-2
        assert int((q.codes(lanes).int() - same.codes(lanes).int()).abs().max()) <= 1


def test_post_alone(device):
    rows, hidden = 5, HIDDEN[0]
    x, update = randn(rows, 4, hidden, seed=9).to(device), an_update(5, hidden, device, 6, True)
    run_twice(lambda: hc_post(x, update), update.target)
    assert error(update.target, updated(x, update)) < BAR


def test_half_precision_output(device):
    rows, hidden = 70, HIDDEN[0]
    x, update = randn(rows, 4, hidden, seed=9).to(device), an_update(rows, hidden, device, None, False)
    half = replace(update, y=update.y.half())
    run_twice(lambda: hc_post(x, half), update.target)
    assert error(update.target, updated(x, half)) < BAR


@pytest.mark.parametrize("rows", ROWS[:3])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_collapse(rows, hidden, device):
    x, w = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 4, device)
    update = an_update(rows, hidden, device, 7, False)
    streams = updated(x, update)
    normed, q = torch.empty(rows, hidden, device=device), Quantised.allocate(rows, hidden, device)
    scratch = partials(rows, hidden, device)
    run_twice(lambda: hc_collapse(x, w, scratch, q, normed, update), update.target, normed, q.scales, q.words)
    h = ops.hc_collapse(streams, w.fn.double(), w.scale.double(), w.base.double(), EPS, EPS)
    want = ops.rms_norm(h, w.norm.double(), EPS)
    assert error(update.target, streams) < BAR
    assert error(normed, want) < BAR
    assert error(q.dequantise(), want) < 1e-2


def test_collapse_of_wanted_rows(device):
    rows, hidden = 40, HIDDEN[0]
    x, w = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 4, device)
    all_rows = torch.empty(rows, hidden, device=device)
    hc_collapse(x, w, partials(rows, hidden, device), normed=all_rows)
    for wanted in (torch.tensor([39]), torch.tensor([7, 0, 39], dtype=torch.int32)):
        some = torch.empty(len(wanted), hidden, device=device)
        wanted = wanted.to(device)
        run_twice(lambda s=some, i=wanted: hc_collapse(x, w, partials(3, hidden, device), normed=s, wanted=i), some)
        assert error(some, all_rows[wanted.long()]) < BAR


def test_large_streams_keep_their_precision(device):
    """Streams beyond the range of float16, in the tensor core path."""
    rows, hidden = 20, HIDDEN[0]
    x, w = (randn(rows, 4, hidden, seed=9) * 1e6).to(device), weights(hidden, 24, device)
    coefficients, normed = (torch.empty(rows, n, device=device) for n in (24, hidden))
    hc_pre(x, w, partials(rows, hidden, device), coefficients, normed=normed)
    want, mixes = expected_pre(x.double(), w)
    assert error(normed, want) < BAR
    assert error(coefficients[:, 4:], mixes) < BAR


def test_other_constants(device):
    rows, hidden = 2, HIDDEN[0]
    x, w = randn(rows, 4, hidden, seed=9).to(device), weights(hidden, 24, device)
    coefficients = torch.empty(rows, 24, device=device)
    hc_pre(x, w, partials(rows, hidden, device), coefficients, constants=Constants(1e-3, 1e-2, 3))
    _, post, comb = ops.hc_pre(x.double(), w.fn.double(), w.scale.double(), w.base.double(), 3, 1e-2, 1e-3)
    assert error(coefficients[:, 4:], torch.cat((post, comb.flatten(1)), 1)) < BAR


def test_refusals(device):
    x, w = torch.zeros(2, 4, 256, device=device), weights(256, 24, device)
    scratch, coefficients = partials(2, 256, device), torch.empty(2, 24, device=device)
    with pytest.raises(ValueError, match="expected contiguous streams"):
        hc_pre(torch.zeros(2, 3, 256), w, scratch, coefficients)
    with pytest.raises(ValueError, match="floats of scratch"):
        hc_pre(x, w, scratch[:10], coefficients)
    with pytest.raises(ValueError, match="expected coefficients"):
        hc_pre(x, w, scratch, coefficients[:1])
    with pytest.raises(ValueError, match="do not fit buffers"):
        hc_pre(x, w, scratch, coefficients, Quantised.allocate(1, 256, device))
    with pytest.raises(ValueError, match="memory of their own"):
        hc_post(x, Update(x[:, 0], coefficients, x))
    with pytest.raises(ValueError, match="new streams like the old"):
        hc_post(x, Update(x[:, 0], coefficients, x[:1]))
    update = Update(x[:, 0], coefficients, torch.empty_like(x))
    with pytest.raises(ValueError, match="either whole or"):
        hc_collapse(x, weights(256, 4, device), scratch, update=update, wanted=torch.tensor([0]))
