"""The next tokens of many sessions, chosen where the logits are: those that the host's sampler chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.engine.sample_rows import SampleRow, sample_rows
from ds4.engine.sampling import Choice, Sampler, Sampling
from ds4.errors import Ds4Error
from ds4.model.cuda.sampling import TokenSampler

VOCAB = 1300
SETTINGS = [
    Sampling(temperature=0),
    Sampling(min_p=0, seed=5),
    Sampling(temperature=0.6, top_p=0.9, seed=6),
    Sampling(top_k=20, min_p=0.02, seed=7),
    Sampling(temperature=1.5, top_p=0.5, top_k=100, seed=8),
    Sampling(logit_bias=((3, 50.0),), seed=9),
    Sampling(frequency_penalty=1.5, presence_penalty=0.5, temperature=0),
]


class Holder:
    """What stands for a session: it has logits, and no state that could be evaluated."""

    whole = False

    def __init__(self, logits: torch.Tensor, device: str) -> None:
        self.logits, self.device_logits = logits, logits.to(device)


def row(sampling: Sampling, logits: torch.Tensor, device: str, **options: object) -> SampleRow:
    return SampleRow(Holder(logits, device), Sampler(sampling), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sampler(device: str) -> TokenSampler:
    return TokenSampler(4, VOCAB, torch.device(device), device == "cuda")


@st.composite
def asked(draw: st.DrawFn) -> tuple[Sampling, int, bool, int | None, bool, int | None, bool]:
    return (
        draw(st.sampled_from(SETTINGS)),
        draw(st.integers(0, 10**6)),
        draw(st.booleans()),
        draw(st.none() | st.integers(0, 10**6)),
        draw(st.booleans()),
        draw(st.none() | st.integers(0, 3)),
        draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None)
@given(wanted=st.lists(asked(), min_size=1, max_size=6))
def test_many_rows_get_what_each_gets_alone(
    wanted: list[tuple[Sampling, int, bool, int | None, bool, int | None, bool]], sampler: TokenSampler, device: str
) -> None:
    """Several steps, so that the random streams and the counts of penalties go on too; more rows than buffers."""
    together, alone = [], []
    for sampling, seed, greedy, mask, packed, top, best in wanted:
        random = np.random.default_rng(seed)
        logits = torch.from_numpy(random.standard_normal(VOCAB).astype(np.float32) * 3)
        allowed = None
        if mask is not None:
            allowed = torch.from_numpy(np.random.default_rng(mask).random(VOCAB) < 0.2)
            allowed[mask % VOCAB] = True
            if packed:
                bits = np.packbits(allowed.numpy(), bitorder="little")
                allowed = torch.from_numpy(np.pad(bits, (0, -len(bits) % 4)).view("<i4"))
        options = {"greedy": greedy, "allowed": allowed, "top": top, "best": best}
        together.append(row(sampling, logits, device, **options))
        alone.append(row(sampling, logits, device, **options))
    for _ in range(3):
        assert sample_rows(sampler, together) == sample_rows(None, alone)


def test_a_row_that_allows_nothing_fails_alone(sampler: TokenSampler, device: str) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    nothing = torch.zeros(VOCAB, dtype=torch.bool)
    rows = [row(Sampling(temperature=0), logits, device, allowed=mask, best=True) for mask in (None, nothing)]
    rows.append(row(Sampling(temperature=0), torch.full((VOCAB,), float("nan")), device))
    first, second, third = sample_rows(sampler, rows)
    assert first == Choice(VOCAB - 1, best=VOCAB - 1)
    assert isinstance(second, Ds4Error)
    assert "none of them is allowed" in str(second)
    assert isinstance(third, Ds4Error)
    assert "no logit is a finite number" in str(third)
    assert [str(error) for error in sample_rows(None, rows)[1:]] == [str(second), str(third)]


def test_masks_of_earlier_steps_do_not_count(sampler: TokenSampler, device: str) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    low = torch.arange(VOCAB) < 10
    masked = row(Sampling(temperature=0), logits, device, allowed=low)
    free = replace(masked, allowed=None)
    for rows, expected in (([masked, free], [9, VOCAB - 1]), ([free, masked], [VOCAB - 1, 9]), ([free], [VOCAB - 1])):
        assert [choice.token for choice in sample_rows(sampler, rows)] == expected  # type: ignore[union-attr]
