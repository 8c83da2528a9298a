"""Answers that a later request may continue by an id: of a response, or of a call in it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ds4.chat.message import Message

_OVERHEAD = 200
"""Bytes that a message or an id costs besides its text, roughly."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A conversation up to and with one answer of the model.

    Attributes:
        messages: all of it, without what belonged to one request only (its instructions). The answer is the last; its
            calls have their ids and it has its reasoning and sampled bytes, whatever the client was shown.
        response_id: the id of the answer on the wire; empty if it had none.
    """

    messages: tuple[Message, ...]
    response_id: str = ""
    nbytes: int = field(init=False, default=0)

    @property
    def answer(self) -> Message:
        """The model's answer."""
        return self.messages[-1]


class TurnMemory:
    """Id -> turn; the least recently used turns are forgotten first. Thread-safe."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._lock = threading.Lock()
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def put(self, turn: Turn) -> None:
        """Remember a turn under its response id and the ids of its calls."""

    def get(self, id: str) -> Turn | None:
        """The turn that an id of a response or of a call belongs to."""
        with self._lock:
            return self._turns.get(id)

    def ids(self) -> Iterable[str]:
        """All known ids."""
        with self._lock:
            return list(self._turns)
