"""Answers that a later request may continue by an id: of a response, or of a call in it."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ds4.chat.message import Message, Part

_OVERHEAD = 400
"""Bytes that a message, a turn or an id costs besides its text, roughly."""

_POINTER = 8
"""Bytes that each message of a turn costs, whoever holds the message itself."""


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

    @property
    def answer(self) -> Message:
        """The model's answer."""
        return self.messages[-1]

    @property
    def call_ids(self) -> frozenset[str]:
        """The ids of the answer's calls."""
        return frozenset(call.id for call in self.answer.tool_calls if call.id)


@dataclass(eq=False)
class _Kept:
    """A message, and how often it occurs in the turns that are remembered."""

    message: Message
    count: int = 0


class TurnMemory:
    """Id -> turn; the least recently used turns are forgotten first. Thread-safe.

    Messages that are equal are kept once: each turn of a conversation repeats all that came before it.

    Attributes:
        nbytes: memory that everything remembered takes.
    """

    def __init__(self, max_bytes: int = 256 << 20, max_ids: int = 100_000) -> None:
        self.max_bytes, self.max_ids = max_bytes, max_ids
        self.nbytes = 0
        self._lock = threading.Lock()
        self._turns: OrderedDict[Turn, set[str]] = OrderedDict()
        self._by_id: dict[str, Turn] = {}
        self._messages: dict[Message, _Kept] = {}

    def __len__(self) -> int:
        """The number of turns."""
        return len(self._turns)

    def put(self, turn: Turn) -> None:
        """Remember a turn under its response id and the ids of its calls.

        A turn without ids, or one that alone is larger than all memory, is not remembered.
        """
        ids = {id for id in (turn.response_id, *turn.call_ids) if id}
        with self._lock:
            for id in ids & self._by_id.keys():
                self._forget_id(id)
            if not ids or len(ids) > self.max_ids or _alone(turn, ids) > self.max_bytes:
                return
            kept = Turn(tuple(self._hold(message) for message in turn.messages), turn.response_id)
            self._turns[kept] = ids
            self._by_id.update(dict.fromkeys(ids, kept))
            self.nbytes += _own_size(kept, ids)
            while self.nbytes > self.max_bytes or len(self._by_id) > self.max_ids:
                self._forget(next(iter(self._turns)))

    def get(self, id: str) -> Turn | None:
        """The turn that an id of a response or of a call belongs to."""
        with self._lock:
            turn = self._by_id.get(id)
            if turn is not None:
                self._turns.move_to_end(turn)
            return turn

    def _hold(self, message: Message) -> Message:
        kept = self._messages.get(message)
        if kept is None:
            kept = self._messages[message] = _Kept(message)
            self.nbytes += _size(message)
        kept.count += 1
        return kept.message

    def _forget(self, turn: Turn) -> None:
        ids = self._turns.pop(turn)
        self.nbytes -= _own_size(turn, ids)
        for id in ids:
            del self._by_id[id]
        for message in turn.messages:
            kept = self._messages[message]
            kept.count -= 1
            if not kept.count:
                del self._messages[message]
                self.nbytes -= _size(message)

    def _forget_id(self, id: str) -> None:
        turn = self._by_id[id]
        ids = self._turns[turn]
        if len(ids) == 1:
            self._forget(turn)
            return
        self.nbytes -= _own_size(turn, ids)
        ids.remove(id)
        del self._by_id[id]
        self.nbytes += _own_size(turn, ids)


def _alone(turn: Turn, ids: Iterable[str]) -> int:
    """Bytes of a turn of which nothing is remembered yet."""
    return _own_size(turn, ids) + sum(_size(message) for message in set(turn.messages))


def _own_size(turn: Turn, ids: Iterable[str]) -> int:
    """Bytes of a turn without its messages."""
    return _OVERHEAD + _POINTER * len(turn.messages) + sum(_OVERHEAD + sys.getsizeof(id) for id in ids)


def _size(message: Message) -> int:
    """Bytes of a message with all its text, as it lies in memory."""
    texts = [message.reasoning, message.raw_dsml, message.tool_call_id, *message.problems]
    for call in message.tool_calls:
        texts += (call.id, call.name, call.arguments)
    content = sys.getsizeof(message.content) if isinstance(message.content, str) else _parts_size(message.content)
    return _OVERHEAD + content + sum(map(sys.getsizeof, texts)) + _OVERHEAD * len(message.tool_calls)


def _parts_size(parts: Iterable[Part]) -> int:
    return sum(
        _OVERHEAD + sys.getsizeof(part.text) + sys.getsizeof(part.tool_call_id) + _parts_size(part.parts)
        for part in parts
    )
