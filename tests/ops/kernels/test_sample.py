"""Sampling on the device: for a given random number the token that the CPU's sampler chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds4.engine.sampling import Sampler, Sampling, distribution
from ds4.ops.kernels.sample import CHUNK, SamplingRows, SamplingScratch, sample, top_logprobs
from tests.ops.kernels.kernel_checks import ON_GPU, poison, randn, run_twice

VOCAB = 129_280 if ON_GPU else 2500

SETTINGS = [
    Sampling(temperature=0),
    Sampling(),
    Sampling(min_p=0),
    Sampling(temperature=0.3, min_p=0.2),
    Sampling(min_p=1),
    Sampling(temperature=0.7, top_k=40, min_p=0),
    Sampling(top_k=1),
    Sampling(top_k=5000, min_p=0),
    Sampling(temperature=1.5, top_k=100, min_p=0.1),
    Sampling(top_p=0.95, min_p=0),
    Sampling(temperature=0.6, top_p=0.9, min_p=0.05),
    Sampling(top_p=0),
    Sampling(top_p=0.5, top_k=20, min_p=0.01),
    Sampling(temperature=5.0, top_p=0.999, min_p=0),
    Sampling(temperature=1e-3, top_p=0.9),
]


class Given:
    """A stream of random numbers that are known."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def reference(logits: torch.Tensor, sampling: Sampling, u: float, allowed: torch.Tensor | None = None) -> int:
    sampler = Sampler(sampling)
    sampler._random = Given(u)
    return sampler.sample(logits, allowed=allowed)


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """bool [rows, vocab] -> int32 [rows, words]."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32)
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int64).to(torch.int32)


def rows_of(settings: list[Sampling], uniform: list[float], vocab: int, device: str) -> SamplingRows:
    rows = SamplingRows.allocate(len(settings), vocab, device)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        # Not by way of float32: 0.999 would be another number, with another token at its edge.
        getattr(rows, name).copy_(torch.tensor([getattr(s, name) for s in settings], dtype=torch.float64))
    rows.uniform.copy_(torch.tensor(uniform, dtype=torch.float64))
    return rows


def scratch_of(rows: int, vocab: int, device: str, capacity: int = 2048) -> SamplingScratch:
    scratch = SamplingScratch.allocate(rows, vocab, device, capacity)
    for tensor in vars(scratch).values():
        poison(tensor)
    return scratch


def choose(
    logits: torch.Tensor, rows: SamplingRows, device: str, capacity: int = 2048, select: bool = True
) -> torch.Tensor:
    n, vocab = logits.shape
    on_device, tokens = logits.to(device), torch.empty(n, dtype=torch.int64, device=device)
    scratch = scratch_of(n, vocab, device, capacity)
    run_twice(lambda: sample(on_device, rows, scratch, tokens, select=select), tokens)
    return tokens.cpu()


DRAWS = [0.0, 0.31, 0.87, 1 - 2**-53]


@pytest.mark.parametrize(
    ("u", "spread"),
    [(u, spread) for u in DRAWS for spread in (1.0, 4.0)] if ON_GPU else list(zip(DRAWS, (4.0, 1.0) * 2, strict=True)),
)
def test_chooses_what_the_reference_chooses(u, spread, device):
    logits = randn(len(SETTINGS), VOCAB, seed=int(u * 100)) * spread
    tokens = choose(logits, rows_of(SETTINGS, [u] * len(SETTINGS), VOCAB, device), device)
    want = [reference(row, s, u) for row, s in zip(logits, SETTINGS, strict=True)]
    assert tokens.tolist() == want


@pytest.mark.parametrize("seed", range(20 if ON_GPU else 1))
def test_more_tokens_than_the_short_list_holds(seed, device):
    """Flat distributions and a small list: the whole row is searched."""
    generator = np.random.default_rng(seed)
    settings = [s for s in SETTINGS if s.top_k or s.top_p < 1]
    settings = settings if ON_GPU else settings[::2]
    uniform = generator.random(len(settings)).tolist()
    logits = randn(len(settings), VOCAB, seed=seed) * 0.5
    tokens = choose(logits, rows_of(settings, uniform, VOCAB, device), device, capacity=256)
    assert tokens.tolist() == [reference(*given) for given in zip(logits, settings, uniform, strict=True)]


@pytest.mark.parametrize("u", [0.0, 0.2, 0.5, 0.99] if ON_GPU else [0.0, 0.5])
def test_equal_logits(u, device):
    """Of equal ones the lowest ids stay, and are drawn in order of id."""
    logits = torch.round(randn(len(SETTINGS), VOCAB, seed=3) * 2)
    logits[0] = 0
    logits[1, 100:] = -0.0
    logits[9] = 0
    tokens = choose(logits, rows_of(SETTINGS, [u] * len(SETTINGS), VOCAB, device), device)
    assert tokens.tolist() == [reference(row, s, u) for row, s in zip(logits, SETTINGS, strict=True)]


@pytest.mark.parametrize("u", [0.1, 0.9])
def test_masks(u, device):
    generator = torch.Generator().manual_seed(4)
    logits = randn(len(SETTINGS), VOCAB, seed=5) * 3
    allowed = torch.rand(len(SETTINGS), VOCAB, generator=generator) < 0.5
    allowed[:, :40] = False
    allowed[5] = False
    allowed[5, [17, 31, 32, VOCAB - 1]] = True
    allowed[9] = allowed[5]
    rows = rows_of(SETTINGS, [u] * len(SETTINGS), VOCAB, device)
    rows.mask.copy_(bits_of(allowed))
    rows.masked.fill_(1)
    rows.masked[2] = 0
    rows.masked[10] = 0
    tokens = choose(logits, rows, device)
    for i, (row, s) in enumerate(zip(logits, SETTINGS, strict=True)):
        assert tokens[i] == reference(row, s, u, None if i in (2, 10) else allowed[i]), i


def test_logits_that_are_not_finite(device):
    settings = [SETTINGS[i] for i in (0, 1, 5, 9)] * 2
    logits = randn(8, VOCAB, seed=6) * 3
    logits[:, 7::5] = float("nan")
    logits[:, 3::11] = float("-inf")
    logits[:, 1::13] = float("inf")
    logits[4:] = float("nan")
    tokens = choose(logits, rows_of(settings, [0.4] * 8, VOCAB, device), device)
    assert tokens[:4].tolist() == [reference(row, s, 0.4) for row, s in zip(logits[:4], settings[:4], strict=True)]
    assert tokens[4:].tolist() == [-1] * 4


def test_nothing_is_allowed(device):
    rows = rows_of([Sampling(), Sampling(temperature=0)], [0.5, 0.5], VOCAB, device)
    rows.masked.fill_(1)
    assert choose(randn(2, VOCAB, seed=1), rows, device).tolist() == [-1, -1]


@pytest.mark.parametrize("select", [False, True])
def test_without_selection(select, device):
    settings = [s for s in SETTINGS if not s.top_k and s.top_p == 1]
    logits = randn(len(settings), VOCAB, seed=7) * 2
    tokens = choose(logits, rows_of(settings, [0.6] * len(settings), VOCAB, device), device, select=select)
    assert tokens.tolist() == [reference(row, s, 0.6) for row, s in zip(logits, settings, strict=True)]


@pytest.mark.parametrize("vocab", [1, 33, CHUNK, CHUNK + 1])
def test_other_sizes(vocab, device):
    logits = randn(len(SETTINGS), vocab, seed=vocab)
    tokens = choose(logits, rows_of(SETTINGS, [0.7] * len(SETTINGS), vocab, device), device, capacity=256)
    assert tokens.tolist() == [reference(row, s, 0.7) for row, s in zip(logits, SETTINGS, strict=True)]


def test_a_row_does_not_depend_on_its_company(device):
    logits = (randn(4, VOCAB, seed=8) * 2).to(device)
    settings = [SETTINGS[i] for i in (1, 5, 9, 0)]
    rows = rows_of(settings, [0.3, 0.5, 0.7, 0.9], VOCAB, device)
    scratch, tokens = scratch_of(8, VOCAB, device), torch.empty(4, dtype=torch.int32, device=device)
    sample(logits, rows, scratch, tokens)
    for i in range(4):
        alone = torch.empty(1, dtype=torch.int32, device=device)
        sample(logits[i : i + 1], rows_of(settings[i : i + 1], [0.3 + 0.2 * i], VOCAB, device), scratch, alone)
        assert alone[0] == tokens[i]


def test_seeds(device):
    """The same seed and step draw the same number; over steps they are spread as the probabilities are."""
    steps, vocab = (4000, 50) if ON_GPU else (120, 12)
    logits = (randn(1, vocab, seed=9)).expand(steps, -1).contiguous()
    rows = rows_of([Sampling(min_p=0)] * steps, [-1.0] * steps, vocab, device)
    rows.seed.fill_(-(2**62) + 12345)
    rows.step.copy_(torch.arange(steps))
    tokens = choose(logits, rows, device)
    assert torch.equal(tokens, choose(logits, rows, device))
    ids, p = distribution(logits[0], Sampling(min_p=0))
    counts = torch.bincount(tokens, minlength=vocab).numpy()[ids]
    chi = float(((counts - steps * p) ** 2 / (steps * p)).sum())
    assert chi < vocab + 6 * (2 * vocab) ** 0.5
    rows.seed.fill_(1)
    assert not torch.equal(tokens, choose(logits, rows, device))


@pytest.mark.parametrize("top", [1, 20])
def test_logprobs(top, device):
    settings = [SETTINGS[i] for i in (0, 1, 9, 5)]
    logits = randn(4, VOCAB, seed=10) * 3
    logits[2, 5::7] = float("nan")
    logits[3, 4:] = float("-inf")
    rows, scratch = rows_of(settings, [0.5] * 4, VOCAB, device), scratch_of(4, VOCAB, device)
    rows.mask.fill_(-1 << 20)
    rows.masked.fill_(1)
    rows.masked[3] = 0
    tokens, chosen = torch.empty(4, dtype=torch.int64, device=device), torch.empty(4, device=device)
    ids, values = torch.empty(4, top, dtype=torch.int32, device=device), torch.empty(4, top, device=device)
    orders = torch.empty(4, scratch.best.shape[1] * top, dtype=torch.int64, device=device)
    on_device = logits.to(device)

    def run() -> None:
        sample(on_device, rows, scratch, tokens, chosen)
        top_logprobs(on_device, scratch, orders, ids, values)

    run_twice(run, tokens, chosen, orders, ids, values)
    finite = torch.where(logits.isfinite(), logits, -torch.inf).double()
    want = torch.log_softmax(finite, 1)
    assert torch.allclose(chosen.cpu().double(), want.gather(1, tokens.cpu()[:, None])[:, 0], atol=1e-5)
    best = torch.sort(finite, dim=1, descending=True, stable=True).indices[:, :top]
    there = want.gather(1, best) > -torch.inf
    assert torch.equal(ids.cpu().long(), torch.where(there, best, -1))
    assert torch.allclose(values.cpu().double(), want.gather(1, best), atol=1e-5)


def test_refusals(device):
    rows, scratch = SamplingRows.allocate(2, 100, device), SamplingScratch.allocate(2, 100, device)
    tokens = torch.empty(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="contiguous float32"):
        sample(torch.zeros(2, 100).half(), rows, scratch, tokens)
    with pytest.raises(ValueError, match="do not fit scratch"):
        sample(torch.zeros(3, 100), rows, scratch, tokens)
    with pytest.raises(ValueError, match="expected 2 tokens"):
        sample(torch.zeros(2, 100), rows, scratch, tokens[:1])
    with pytest.raises(ValueError, match="orders"):
        top_logprobs(torch.zeros(2, 100), scratch, tokens, torch.empty(2, 5), torch.empty(2, 5))
