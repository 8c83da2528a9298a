"""Which tokens the text of an answer is made of, and how probable they were."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ds4.chat.events import Event, TextDelta


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the text, with natural logarithms of probabilities.

    Attributes:
        piece: its bytes, which need not be whole characters.
        logprob: its own.
        top: bytes and logprob of the most probable tokens, the most probable first.
    """

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class Places:
    """Tells which character has the first byte of a token. Bytes that are none count as clients see them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._taken = 0  # whole characters

    def next(self, piece: bytes) -> int:
        """The place of the next token."""
        self._taken += len(self._decoder.decode(piece[:1]))
        begun = self._decoder.getstate()[0] or not piece
        place = self._taken if begun else self._taken - 1
        self._taken += len(self._decoder.decode(piece[1:]))
        return place


class TextLogprobs:
    """Matches sampled tokens with the text that clients see of them, which may come later, or never.

    A token belongs to the events that show its first byte. What is behind the text (a stop string, a call) is not part
    of it.
    """

    def __init__(self, shown: Sequence[TokenLogprob] = ()) -> None:
        """`shown`: those of an attempt before this one."""
        self.shown = list(shown)
        self._waiting: deque[TokenLogprob] = deque()
        self._places: deque[int] = deque()  # of those that wait
        self._read = Places()
        self._seen = 0  # characters of the events
        self._fresh: list[TokenLogprob] = []

    def add(self, token: TokenLogprob) -> None:
        """Take a sampled token that is not reasoning."""
        self._waiting.append(token)
        self._places.append(self._read.next(token.piece))

    def skip(self, piece: bytes) -> None:
        """Take text that belongs to none of the tokens."""
        self._read.next(piece)

    def forget(self) -> None:
        """What was taken and not shown is no text."""
        self._waiting.clear()
        self._places.clear()
        self._read = Places()
        self._seen = 0

    def follow(self, events: Sequence[Event]) -> None:
        """Take the events that the tokens so far completed."""
        self._seen += sum(len(event.text) for event in events if isinstance(event, TextDelta))
        while self._waiting and self._places[0] < self._seen:
            token = self._waiting.popleft()
            self._places.popleft()
            self._fresh.append(token)
            self.shown.append(token)

    def take(self) -> tuple[TokenLogprob, ...]:
        """The tokens that were shown since the last time."""
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)

    @property
    def all(self) -> tuple[TokenLogprob, ...]:
        """Those that were shown, and those that were not."""
        return (*self.shown, *self._waiting)
