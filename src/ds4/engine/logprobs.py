"""How probable the tokens of an answer were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TOP = 20
"""Most alternatives that are told for one token."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities, by the model's logits.

    Attributes:
        token: the chosen token.
        logprob: its own.
        top: (token, logprob) of the most probable tokens, the most probable first; of equal ones the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: NDArray[np.float32], token: int, top: int) -> Logprobs:
    """How probable a token is, and which `top` tokens are most probable; logits that are not finite do not count."""
    finite = np.isfinite(logits)
    scores = logits if finite.all() else np.where(finite, logits, np.float32(-np.inf))
    best = float(scores.max())
    total = best + float(np.log(np.exp(scores - np.float32(best), dtype=np.float32).sum(dtype=np.float64)))
    return Logprobs(
        token, float(scores[token]) - total, tuple((int(id), float(scores[id]) - total) for id in _top(scores, top))
    )


def _top(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the largest scores, from the largest on; of equal ones the lower id first."""
    count = min(count, int(np.isfinite(scores).sum()))
    if not count:
        return np.empty(0, np.int64)
    limit = np.partition(scores, len(scores) - count)[len(scores) - count]
    # All that are equal to the last one, of which the first ones stay.
    some = np.flatnonzero(scores >= limit)
    return some[np.argsort(-scores[some], kind="stable")[:count]]
