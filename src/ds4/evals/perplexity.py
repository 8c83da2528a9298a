"""Perplexity of a text, each of its tokens scored once.

The text is read in windows of `window` tokens, the first of which is always the begin-of-sentence token. The first
window scores all of its text. Each later one begins half a window further on and scores only what no window before
scored, so that every token but those at the text's start has at least half a window of text before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.evals.nll import logits_before, token_nll

DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Perplexity:
    """Of a text.

    Attributes:
        tokens: how many were scored: all of the text's.
        nll: nats a token, on average.
        error: standard error of that mean, as if tokens were independent.
        windows: how many were evaluated, of `window` tokens.
    """

    tokens: int
    nll: float
    error: float
    windows: int
    window: int

    @property
    def value(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if self.nll < 700 else math.inf


def windows_of(count: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored, end) of each window, as places in a text of `count` tokens."""
    size, step = window - 1, max(1, (window - 1) // 2)  # one place is that of the begin-of-sentence token
    begin, scored = 0, 0
    while scored < count:
        end = min(begin + size, count)
        yield begin, scored, end
        begin, scored = begin + step, end


def perplexity(
    engine: Engine,
    ids: Sequence[int],
    window: int = DEFAULT_WINDOW,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score a text.

    Args:
        ids: the text, without a begin-of-sentence token.
        window: tokens of a window, at least 3 and at most the engine's context.
        progress: called with (tokens scored, tokens in all) after each window.

    Raises:
        Ds4Error: there is no text, the window does not fit, or the model gives no finite logits.
    """
    if not ids:
        raise Ds4Error("the text is empty: there is nothing to score")
    if not 3 <= window <= engine.context:
        raise Ds4Error(f"a window of {window} tokens does not fit: it must have 3 to {engine.context}, the context")
    bos, total, squares, count = engine.tokenizer.bos, 0.0, 0.0, 0
    for begin, first, end in windows_of(len(ids), window):
        part = [bos, *ids[begin:end]]
        for place, logits in logits_before(engine, part, first - begin + 1):
            values = token_nll(logits, part[place : place + logits.shape[0]])
            total += math.fsum(values)
            squares += math.fsum(v * v for v in values)
        count += 1
        if progress is not None:
            progress(end, len(ids))
    n = len(ids)
    variance = max(0.0, squares / n - (total / n) ** 2)
    return Perplexity(n, total / n, math.sqrt(variance / n), count, window)
