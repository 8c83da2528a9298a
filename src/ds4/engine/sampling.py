"""How the next token is chosen from the logits.

Order: top_k, temperature, softmax, min_p (relative to the most probable token), top_p (the token that crosses the sum
is kept), renormalise, draw. The most probable token always stays; logits that are not finite are never chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ds4.errors import Ds4Error

MAX_TOP_K = 1024

_NUCLEUS = 1024
"""Tokens that top_p tries before it sorts a whole vocabulary; a usual nucleus is smaller."""


@dataclass(frozen=True)
class Sampling:
    """How one request samples.

    Attributes:
        temperature: >= 0; 0 takes the most probable token and ignores the other settings.
        top_p: 0 to 1; keeps the most probable tokens up to this sum. 1 keeps all.
        min_p: 0 to 1; drops tokens less probable than this times the most probable one. 0 drops none.
        top_k: >= 0; keeps this many tokens, at most 1024 (a larger value counts as 1024). 0 keeps all.
        seed: -2**63 to 2**64 - 1; the same seed draws the same tokens. None or 0: a random one.

    Raises:
        Ds4Error: a value is of the wrong type, not a number, or out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.05
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, math.inf)
        _check_number("top_p", self.top_p, 1)
        _check_number("min_p", self.min_p, 1)
        _check_integer("top_k", self.top_k, 0, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)


class Sampler:
    """One request's stream of random choices; other requests do not disturb it.

    A choice at temperature 0 uses no random number, so it does not move the stream.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed % 2**64 if sampling.seed else None)

    def sample(self, logits: torch.Tensor, greedy: bool = False, allowed: torch.Tensor | None = None) -> int:
        """Chooses a token.

        Args:
            logits: float [vocab], on any device.
            greedy: take the most probable token, as at temperature 0 (the lowest id of equals).
            allowed: bool [vocab]; tokens where it is False are never chosen. None allows all.

        Raises:
            Ds4Error: no token is both allowed and has a finite logit.
        """
        if greedy or self.sampling.temperature == 0:
            return int(np.argmax(_usable(logits, allowed)))
        ids, probabilities = distribution(logits, self.sampling, allowed)
        sums = np.cumsum(probabilities)
        # The last sum may be a little below 1, or the product rounded up to it.
        chosen = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(ids[min(chosen, len(ids) - 1)])


def distribution(
    logits: torch.Tensor, sampling: Sampling, allowed: torch.Tensor | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that can be drawn and their probabilities.

    Args and errors are those of `Sampler.sample`.

    Returns:
        (ids int64 [n], probabilities float64 [n], sum 1), n >= 1, in no particular order. With top_k and top_p the
        lower ids of equally probable tokens stay.
    """
    scores = _usable(logits, allowed)
    best = int(np.argmax(scores))
    if sampling.temperature == 0:
        return np.array([best]), np.ones(1)

    # Below this score min_p drops a token for certain. Not used with top_p, which needs the sum of all.
    floor = -math.inf
    if sampling.min_p > 0 and sampling.top_p == 1:
        floor = float(scores[best]) + sampling.temperature * (math.log(sampling.min_p) - 1)
    if 0 < sampling.top_k < len(scores):
        ids = _largest(scores, min(sampling.top_k, MAX_TOP_K))
    else:
        ids = np.flatnonzero(scores >= floor)

    # Subtracting the maximum first keeps any temperature above 0 finite; at worst -inf is left, that is weight 0.
    with np.errstate(over="ignore"):
        weights = np.exp((scores[ids].astype(np.float64) - float(scores[best])) / sampling.temperature)
    total = float(weights.sum())

    likely = np.flatnonzero((weights >= sampling.min_p) & (weights > 0))  # the largest weight is 1
    ids, weights = ids[likely], weights[likely]
    if sampling.top_p < 1:
        nucleus = _nucleus(weights, sampling.top_p * total)
        ids, weights = ids[nucleus], weights[nucleus]
    return ids, weights / weights.sum()


def _usable(logits: torch.Tensor, allowed: torch.Tensor | None) -> NDArray[np.float32]:
    """The logits on the CPU, with -inf for every token that must not be chosen."""
    if logits.ndim != 1 or (allowed is not None and allowed.shape != logits.shape):
        raise ValueError("logits must be [vocab], and allowed of the same shape")
    scores: NDArray[np.float32] = logits.detach().to("cpu", torch.float32).numpy()
    usable = np.isfinite(scores)
    if allowed is not None:
        usable &= allowed.detach().to("cpu", torch.bool).numpy()
    if not usable.any():
        why = "none of them is allowed here" if np.isfinite(scores).any() else "no logit is a finite number"
        raise Ds4Error(f"No token can be sampled from a vocabulary of {len(scores)}: {why}")
    return np.where(usable, scores, np.float32(-np.inf))


def _largest(scores: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest scores, in order of index; of equal ones the first. count < len(scores)."""
    limit = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > limit)
    equal = np.flatnonzero(scores == limit)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: NDArray[np.float64], wanted: float) -> NDArray[np.int64]:
    """Indices of the largest weights, from the largest on until their sum reaches `wanted`."""
    some = _largest(weights, _NUCLEUS) if len(weights) > _NUCLEUS else np.arange(len(weights))
    if len(some) < len(weights) and weights[some].sum() < wanted:
        some = np.arange(len(weights))
    order = some[np.argsort(-weights[some], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(weights[order]), wanted, side="left"))
    return order[: reached + 1]


def _check_number(name: str, value: object, highest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= highest or value == math.inf:  # type: ignore[operator]
        limits = "a number of at least 0" if highest == math.inf else f"a number from 0 to {highest}"
        raise Ds4Error(f"{name} is {value!r}; it must be {limits}")


def _check_integer(name: str, value: object, lowest: int, highest: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < lowest or (highest is not None and value > highest):  # type: ignore[operator]
        limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise Ds4Error(f"{name} is {value!r}; it must be a whole number {limits}")
