"""Whether memory grows with tokens or requests: both are repeated after a warm-up that has taken all that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4.bench.decoding import Decoder
from ds4.bench.meter import Meter

if TYPE_CHECKING:
    from ds4.engine import Engine

_PROMPTS = (33, 64, 100, 128, 7)
"""Lengths of the requests' prompts, in turn; shorter ones where the context is small."""
_ANSWER = 8


@dataclass(frozen=True)
class Growth:
    """Memory before and after `count` of `what` ("tokens" or "requests").

    Attributes:
        before, after: see `Meter.held`; bytes.
        per_item: name -> bytes by which it grew with each.
    """

    what: str
    count: int
    before: dict[str, int]
    after: dict[str, int]

    @property
    def per_item(self) -> dict[str, float]:
        return {name: (self.after[name] - self.before[name]) / self.count for name in self.before}


def measure_growth(
    engine: Engine, ids: Sequence[int], tokens: int, requests: int, length: int, meter: Meter,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Growth]:  # fmt: skip
    """Decode `tokens` tokens, then serve `requests` requests, and look at the memory before and after each.

    A session decodes until it has `length` tokens and is followed by a new one. Before the first look one whole such
    session is done, and a tenth of the requests but at least ten, so that what is kept for later ones is there.
    """

    def decode(count: int) -> None:
        done = 0
        while done < count:
            session = engine.session()
            session.sync(ids[: min(16, length // 2)], boundaries=())
            decoder = Decoder(engine, [session])
            some = min(count - done, length - len(session.tokens) - 2)
            decoder.steps(some)
            session.close()
            done += some
            if progress is not None:
                progress(done, count)

    def serve(count: int) -> None:
        for number in range(count):
            session = engine.session()
            first = number % max(1, len(ids) // 2)
            session.sync(ids[first : first + min(_PROMPTS[number % len(_PROMPTS)], length // 2)], boundaries=())
            Decoder(engine, [session]).steps(min(_ANSWER, length // 4))
            session.close()
            if progress is not None:
                progress(number + 1, count)

    for what, count, work, warm in (
        ("tokens", tokens, decode, length),
        ("requests", requests, serve, max(2 * len(_PROMPTS), requests // 10)),
    ):
        if count:
            work(warm)
            before = meter.held()
            work(count)
            yield Growth(what, count, before, meter.held())
