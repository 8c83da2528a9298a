"""The sampled bytes of tool calls, kept by call id.

A client sends calls back as names and JSON. Written anew, they need not be the bytes the model sampled, and then the
live state does not fit the prompt any more. So the sampled block is remembered and put back.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ds4.chat import json_text
from ds4.chat.message import Message, ToolCall

_OVERHEAD = 200
"""Bytes that one id costs besides its characters and its turn, roughly."""


@dataclass(eq=False)
class _Turn:
    """The calls of one turn, their sampled block, and how many ids lead here."""

    calls: tuple[ToolCall, ...]
    block: str
    ids: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = _size(self.block) + sum(_size(call.name) + _size(call.arguments) for call in self.calls)


class ReplayMemory:
    """Call id -> block of the turn it belongs to; the least recently used ids are forgotten first. Thread-safe."""

    def __init__(self, max_ids: int = 100_000, max_bytes: int = 512 << 20) -> None:
        self.max_ids, self.max_bytes = max_ids, max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def new_id(self, prefix: str = "call_", taken: Collection[str] = ()) -> str:
        """An id that is not in use: `prefix` and 32 lower-case hex digits."""
        while True:
            new = prefix + secrets.token_hex(16)
            if new not in taken and new not in self._turns:
                return new

    def put(self, calls: Sequence[ToolCall], block: str) -> None:
        """Remember the sampled block of a turn under the ids of all its calls."""
        with self._lock:
            turn = _Turn(tuple(calls), block)
            for call in calls:
                self._forget(call.id)
                self._turns[call.id] = turn
                turn.ids += 1
                self.nbytes += len(call.id) + _OVERHEAD + (turn.nbytes if turn.ids == 1 else 0)
            while self._turns and (len(self._turns) > self.max_ids or self.nbytes > self.max_bytes):
                self._forget(next(iter(self._turns)))

    def attach(self, message: Message) -> Message:
        """The message with its sampled block, if all its calls are known and the client did not edit them."""
        if message.role != "assistant" or not message.tool_calls or message.raw_dsml:
            return message
        with self._lock:
            found = [self._turns.get(call.id) for call in message.tool_calls]
            turn = found[0]
            if turn is None or any(other is not turn for other in found):
                return message
            if not _same_calls(turn.calls, message.tool_calls):
                return message
            for call in message.tool_calls:
                self._turns.move_to_end(call.id)
        return replace(message, raw_dsml=turn.block)

    def _forget(self, call_id: str) -> None:
        turn = self._turns.pop(call_id, None)
        if turn is None:
            return
        turn.ids -= 1
        self.nbytes -= len(call_id) + _OVERHEAD
        if not turn.ids:
            self.nbytes -= turn.nbytes


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _same_calls(sampled: Sequence[ToolCall], sent: Sequence[ToolCall]) -> bool:
    if len(sampled) != len(sent):
        return False
    return all(
        a.id == b.id and a.name == b.name and (a.arguments == b.arguments or _value(a.arguments) == _value(b.arguments))
        for a, b in zip(sampled, sent, strict=True)
    )


def _value(arguments: str) -> object:
    """Arguments as a value to compare; text that is not a JSON object stands for itself."""
    value = json_text.arguments_object(arguments)
    return arguments if value is None else value
