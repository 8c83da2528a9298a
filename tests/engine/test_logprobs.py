"""Log probabilities against torch's, and the order of equal ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4.engine.logprobs import MAX_TOP, logprobs_of

LOGIT = st.floats(-50, 50, width=32) | st.sampled_from([2.0, math.nan, math.inf, -math.inf])


@given(logits=st.lists(LOGIT, min_size=1, max_size=40), top=st.integers(0, MAX_TOP), data=st.data())
def test_logprobs_equal_those_of_torch(logits: list[float], top: int, data: st.DataObject) -> None:
    finite = [i for i, x in enumerate(logits) if math.isfinite(x)]
    if not finite:
        return
    token = data.draw(st.sampled_from(finite))
    found = logprobs_of(np.array(logits, np.float32), token, top)
    expected = dict(
        zip(finite, torch.log_softmax(torch.tensor([logits[i] for i in finite]).double(), 0).tolist(), strict=True)
    )
    assert found.token == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-4)
    best = sorted(finite, key=lambda i: (-logits[i], i))[:top]
    assert [id for id, _ in found.top] == best
    assert [logprob for _, logprob in found.top] == pytest.approx([expected[i] for i in best], abs=1e-4)


def test_a_large_vocabulary_keeps_its_rare_tokens() -> None:
    """A hundred thousand tokens of weight e^-12 are close to half of the whole."""
    logits = np.full(130_000, -12.0, np.float32)
    logits[77] = 0
    found = logprobs_of(logits, 77, 2)
    total = math.log(1 + 129_999 * math.exp(-12))
    assert found.logprob == pytest.approx(-total, abs=1e-6)
    assert found.top[1] == (0, pytest.approx(-12 - total, abs=1e-5))
