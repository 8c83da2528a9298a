"""Greedy decoding as a server does it: tokens chosen where the logits are, the next step begun ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds4.bench.meter import Meter
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.engine import Engine, Session


class Decoder:
    """Sessions of one engine that decode together."""

    def __init__(self, engine: Engine, sessions: Sequence[Session]) -> None:
        from ds4.engine import Sampling
        from ds4.engine.sample_rows import SampleRow
        from ds4.engine.sampling import Sampler

        self._engine, self._sessions = engine, sessions
        self._rows = [SampleRow(session, Sampler(Sampling(temperature=0.0))) for session in sessions]
        self._tokens: list[int] = []

    def choose(self) -> list[int]:
        """The most probable next token of each session."""
        choices = self._engine.sample(self._rows)
        for choice in choices:
            if isinstance(choice, Ds4Error):
                raise choice
        self._tokens = [choice.token for choice in choices if not isinstance(choice, Ds4Error)]
        return self._tokens

    def steps(self, count: int) -> None:
        """Evaluate the chosen tokens and choose the next ones, `count` times; an end of sequence is one of them."""
        if not self._tokens:
            self.choose()
        for _ in range(count):
            batch = [(session, [token]) for session, token in zip(self._sessions, self._tokens, strict=True)]
            self._engine.step(batch, "keep")
            self.choose()


def timed_decode(engine: Engine, sessions: Sequence[Session], count: int, meter: Meter) -> float:
    """Seconds of `count` steps of all sessions.

    The device is idle before and after: of the steps that run ahead the first falls out of the time, and the one behind
    the last is in it.
    """
    decoder = Decoder(engine, sessions)
    decoder.choose()
    start = meter.now()
    decoder.steps(count)
    return meter.now() - start


def diverge(engine: Engine, sessions: Sequence[Session], ids: Sequence[int]) -> None:
    """Give each of several equal sessions a token of its own, so that they choose experts of their own."""
    if len(sessions) > 1:
        engine.step([(session, [ids[i % len(ids)]]) for i, session in enumerate(sessions)], "keep")
