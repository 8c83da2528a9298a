"""How the next token is chosen from the logits.

Order: bias and penalties, top_k, temperature, softmax, min_p (relative to the most probable token), top_p (the token
that crosses the sum is kept), renormalise, draw. The most probable token always stays; logits that are not finite are
never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds4.engine.logprobs import MAX_TOP, Logprobs, logprobs_of
from ds4.errors import Ds4Error
from ds4.model.draw import Draw

MAX_TOP_K = 1024
MAX_BIASED = 1024
MAX_PENALTY = 2.0
MAX_BIAS = 100.0

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
        frequency_penalty: -2 to 2; subtracted from a token's logit once for each time it was taken before.
        presence_penalty: -2 to 2; subtracted from the logits of all tokens that were taken before.
        logit_bias: (token, -100 to 100), at most 1024; added to these tokens' logits (see `logit_bias`).

    Raises:
        Ds4Error: a value is of the wrong type, not a number, or out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.05
    top_k: int = 0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_integer("top_k", self.top_k, 0, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        _check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        if len(self.logit_bias) > MAX_BIASED:
            raise Ds4Error(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASED} are supported")
        for token, bias in self.logit_bias:
            _check_integer("a token id of logit_bias", token, 0, None)
            _check_number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)


def logit_bias(values: Mapping[Any, Any], vocab: int) -> tuple[tuple[int, float], ...]:
    """The bias of a request as `Sampling` wants it.

    Args:
        values: token id, as a number or in decimal digits (JSON has no other keys), to bias.
        vocab: number of ids; they run from 0.

    Raises:
        Ds4Error: a key is no id of the vocabulary, or the bias is wrong.
    """
    pairs = []
    for key, bias in values.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise Ds4Error(f"logit_bias has the key {key!r}; it must be a token id from 0 to {vocab - 1}")
        pairs.append((token, bias))
    return Sampling(logit_bias=tuple(pairs)).logit_bias


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token.

    Attributes:
        token: its id.
        logprobs: how probable it and others were, if that was asked for.
        best: the most probable token of the logits as they are, if that was asked for.
    """

    token: int
    logprobs: Logprobs | None = None
    best: int | None = None


class Sampler:
    """One request's stream of random choices; other requests do not disturb it.

    A choice at temperature 0 uses no random number, so it does not move the stream. What was chosen counts for the
    penalties of the next choices.
    """

    def __init__(self, sampling: Sampling, number: int = 0) -> None:
        """`number`: which of several answers to one request this is; each draws a stream of its own."""
        self.sampling = sampling
        key = (number,) if number else ()
        seed = sampling.seed % 2**64 if sampling.seed else None
        self._random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
        self._bias = dict(sampling.logit_bias)
        self._counts: dict[int, int] = {}
        self._offsets: NDArray[np.float32] | None = None
        self._penalised = bool(sampling.frequency_penalty or sampling.presence_penalty)

    def sample(self, logits: torch.Tensor, greedy: bool = False, allowed: torch.Tensor | None = None) -> int:
        """Chooses a token.

        Args:
            logits: float [vocab], on any device.
            greedy: take the most probable token of the logits as they are, whatever the bias, the penalties and the
                temperature (the lowest id of equals).
            allowed: bool [vocab], or its bits: int32 [ceil(vocab / 32)], bit i of word w standing for token 32 w + i.
                Other tokens are never chosen. None allows all.

        Raises:
            Ds4Error: no token is both allowed and has a finite logit, or the bias has a token beyond the vocabulary.
        """
        return self.choose(logits, greedy, allowed).token

    def choose(
        self,
        logits: torch.Tensor,
        greedy: bool = False,
        allowed: torch.Tensor | None = None,
        top: int | None = None,
        best: bool = False,
    ) -> Choice:
        """As `sample`, with `top` also how probable the token was and the `top` most probable ones (0 to 20).

        They are those of the model after bias and penalties, before temperature and the limits of `Sampling`, and
        whatever `allowed` says: they tell what the model wanted to say. With `best` also the most probable token of
        all logits as they are.
        """
        if top is not None:
            _check_integer("top_logprobs", top, 0, MAX_TOP)
        scores = _on_cpu(logits)
        wanted = self._adjusted(scores)
        token = self._choose(scores if greedy else wanted, greedy, allowed)
        self.count([token])
        logprobs = None if top is None else logprobs_of(wanted, token, top)
        return Choice(token, logprobs, int(np.argmax(_usable(scores, None))) if best else None)

    @property
    def draws(self) -> bool:
        """Whether `draw` can tell what `sample` would choose by: there are neither bias nor penalties."""
        return not (self._bias or self._penalised)

    def draw(
        self, logits: torch.Tensor, greedy: bool = False, allowed: torch.Tensor | None = None, state: Any = None
    ) -> Draw:
        """What `sample` would choose by, as numbers.

        Moves the random stream as the choice itself would; what is chosen has to be counted.
        """
        s = self.sampling
        mask = None if allowed is None else _packed(allowed, logits.shape[0])
        if greedy or s.temperature == 0:
            return Draw(logits, 0.0, 0, 1.0, 0.0, 0.0, mask, state)
        top_k, uniform = min(s.top_k, MAX_TOP_K), self._random.random()
        return Draw(logits, s.temperature, top_k, s.top_p, s.min_p, uniform, mask, state)

    def count(self, tokens: Iterable[int]) -> None:
        """Take tokens for the penalties that became part of the answer without being chosen here."""
        if not self._penalised:
            return
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
            if self._offsets is not None:
                self._set_offset(token)

    def _choose(self, scores: NDArray[np.float32], greedy: bool, allowed: torch.Tensor | None) -> int:
        usable = _usable(scores, allowed)
        if greedy or self.sampling.temperature == 0:
            return int(np.argmax(usable))
        ids, probabilities = _distribution(usable, self.sampling)
        sums = np.cumsum(probabilities)
        # The last sum may be a little below 1, or the product rounded up to it.
        chosen = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(ids[min(chosen, len(ids) - 1)])

    def _adjusted(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits with bias and penalties."""
        if not self._bias and not self._penalised:
            return scores
        if self._offsets is None:
            beyond = [token for token in {*self._bias, *self._counts} if token >= len(scores)]
            if beyond:
                raise Ds4Error(f"logit_bias has the token {beyond[0]}; the vocabulary has ids up to {len(scores) - 1}")
            self._offsets = np.zeros(len(scores), np.float32)
            for token in {*self._bias, *self._counts}:
                self._set_offset(token)
        return scores + self._offsets

    def _set_offset(self, token: int) -> None:
        sampling, count = self.sampling, self._counts.get(token, 0)
        penalty = sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count
        if self._offsets is not None:
            self._offsets[token] = self._bias.get(token, 0.0) - penalty


def distribution(
    logits: torch.Tensor, sampling: Sampling, allowed: torch.Tensor | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that can be drawn and their probabilities.

    Args and errors are those of `Sampler.sample`; bias and penalties, which belong to a sampler, are left out.

    Returns:
        (ids int64 [n], probabilities float64 [n], sum 1), n >= 1, in no particular order. With top_k and top_p the
        lower ids of equally probable tokens stay.
    """
    return _distribution(_usable(_on_cpu(logits), allowed), sampling)


def _distribution(scores: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    best = int(np.argmax(scores))
    if sampling.temperature == 0:
        return np.array([best]), np.ones(1)

    # Below this score min_p drops a token for certain. Not used with top_p, which needs the sum of all.
    floor = -math.inf
    if sampling.min_p > 0 and sampling.top_p == 1:
        floor = float(scores[best]) + sampling.temperature * (math.log(sampling.min_p) - 1)
    top_k = min(sampling.top_k, MAX_TOP_K)
    ids = _largest(scores, top_k) if 0 < top_k < len(scores) else np.flatnonzero(scores >= floor)

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


def _on_cpu(logits: torch.Tensor) -> NDArray[np.float32]:
    if logits.ndim != 1:
        raise ValueError("logits must be [vocab]")
    scores: NDArray[np.float32] = logits.detach().to("cpu", torch.float32).numpy()
    return scores


def _usable(scores: NDArray[np.float32], allowed: torch.Tensor | None) -> NDArray[np.float32]:
    """The logits, with -inf for every token that must not be chosen."""
    usable = np.isfinite(scores)
    if allowed is not None:
        usable &= _unpacked(allowed, len(scores))
    if not usable.any():
        why = "none of them is allowed here" if np.isfinite(scores).any() else "no logit is a finite number"
        raise Ds4Error(f"No token can be sampled from a vocabulary of {len(scores)}: {why}")
    return np.where(usable, scores, np.float32(-np.inf))


def _unpacked(allowed: torch.Tensor, vocab: int) -> NDArray[np.bool_]:
    """A mask as one bool for each token."""
    mask = allowed.detach().to("cpu")
    if mask.dtype != torch.int32:
        if mask.shape != (vocab,):
            raise ValueError("allowed must be bool [vocab] or int32 [ceil(vocab / 32)]")
        unpacked: NDArray[np.bool_] = mask.to(torch.bool).numpy()
        return unpacked
    if mask.shape != ((vocab + 31) // 32,):
        raise ValueError("allowed must be bool [vocab] or int32 [ceil(vocab / 32)]")
    words = mask.numpy().astype("<i4", copy=False)
    return np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)


def _packed(allowed: torch.Tensor, vocab: int) -> torch.Tensor:
    """A mask as bits, on the host."""
    if allowed.dtype == torch.int32 and allowed.shape == ((vocab + 31) // 32,):
        return allowed
    bits = np.zeros((vocab + 31) // 32 * 4, np.uint8)
    packed = np.packbits(_unpacked(allowed, vocab), bitorder="little")
    bits[: len(packed)] = packed
    return torch.from_numpy(bits.view("<i4"))


def check_choosable(logits: torch.Tensor, allowed: torch.Tensor | None) -> None:
    """Raise what `Sampler.sample` raises where no token can be chosen."""
    _usable(_on_cpu(logits), allowed)


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


def _check_number(name: str, value: object, lowest: float, highest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not lowest <= value <= highest or value == math.inf:  # type: ignore[operator]
        limits = f"of at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
        raise Ds4Error(f"{name} is {value!r}; it must be a number {limits}")


def _check_integer(name: str, value: object, lowest: int, highest: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < lowest or (highest is not None and value > highest):  # type: ignore[operator]
        limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise Ds4Error(f"{name} is {value!r}; it must be a whole number {limits}")
