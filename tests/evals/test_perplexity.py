"""Windows that score every token once, and numbers that equal a computation over whole prefills."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ds4
from ds4.errors import Ds4Error
from ds4.evals.nll import logits_before, token_nll
from ds4.evals.perplexity import perplexity, windows_of
from tests.quality_models import text_engine

TEXT = "The king asked for 12 apples and 3 pears. " * 8


@pytest.fixture(scope="module")
def engine() -> ds4.Engine:
    return text_engine()


@pytest.fixture(scope="module")
def ids(engine: ds4.Engine) -> list[int]:
    found = engine.tokenizer.encode(TEXT)
    assert len(found) > engine.context
    return found


def plain_nll(engine: ds4.Engine, ids: list[int], first: int) -> list[float]:
    """Of the tokens from `first` on, from one step."""
    session = engine.session()
    (logits,) = engine.step([(session, ids)], "all")
    assert logits is not None
    values = torch.log_softmax(logits.double(), dim=-1)
    return [-float(values[i - 1, ids[i]]) for i in range(first, len(ids))]


@given(st.integers(1, 300), st.integers(3, 60))
def test_each_token_is_scored_once_with_half_a_window_before_it(count: int, window: int) -> None:
    scored = 0
    for number, (begin, first, end) in enumerate(windows_of(count, window)):
        assert first == scored < end
        assert begin <= first
        assert end - begin + 1 <= window
        if number:
            assert first - begin >= (window - 1) // 2
        scored = end
    assert scored == count


def test_a_text_that_fits_one_window(engine: ds4.Engine, ids: list[int]) -> None:
    part = ids[:50]
    found = perplexity(engine, part, window=64)
    values = plain_nll(engine, [engine.tokenizer.bos, *part], 1)
    assert (found.tokens, found.windows) == (50, 1)
    assert found.nll == pytest.approx(sum(values) / 50, rel=1e-12)
    assert found.value == pytest.approx(math.exp(sum(values) / 50))
    mean = sum(values) / 50
    assert found.error == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values)) / 50, rel=1e-9)


def test_a_text_of_several_windows(engine: ds4.Engine, ids: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    found = perplexity(engine, ids, window=32, progress=lambda *at: seen.append(at))
    values = []
    for begin, first, end in windows_of(len(ids), 32):
        values += plain_nll(engine, [engine.tokenizer.bos, *ids[begin:end]], first - begin + 1)
    assert found.tokens == len(values) == len(ids)
    assert found.nll == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert len(seen) == found.windows > 3
    assert seen[-1] == (len(ids), len(ids))


def test_one_token_is_enough(engine: ds4.Engine, ids: list[int]) -> None:
    assert perplexity(engine, ids[:1], 3).nll == pytest.approx(plain_nll(engine, [engine.tokenizer.bos, ids[0]], 1)[0])


def test_refusals(engine: ds4.Engine, ids: list[int]) -> None:
    with pytest.raises(Ds4Error, match="the text is empty"):
        perplexity(engine, [])
    for window in (2, engine.context + 1):
        with pytest.raises(Ds4Error, match=f"a window of {window} tokens does not fit: it must have 3 to 96"):
            perplexity(engine, ids, window)
    for first in (0, 3):
        with pytest.raises(Ds4Error, match="cannot be scored"):
            next(logits_before(engine, ids[:3], first))
    with pytest.raises(Ds4Error, match="no numbers"):
        token_nll(torch.full((2, 5), math.nan), [1, 2])


@pytest.mark.parametrize("first", [1, 15, 16, 17, 40])
def test_pieces_give_each_place_once(engine: ds4.Engine, ids: list[int], first: int) -> None:
    values: list[float] = []
    for place, logits in logits_before(engine, ids[:41], first):
        assert place == first + len(values)
        values += token_nll(logits, ids[place : place + logits.shape[0]])
    assert values == pytest.approx(plain_nll(engine, ids[:41], first), rel=1e-12)
