"""The sampled bytes of tool calls, kept by call id.

A client sends calls back as names and JSON. Written anew, they need not be the bytes the model sampled, and then the
live state does not fit the prompt any more. So the sampled block is remembered and put back.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

from ds4.chat import json_text
from ds4.chat.message import Message, ToolCall

_OVERHEAD = 200
"""Bytes that one entry costs besides its id and block, roughly."""


class ReplayMemory:
    """Call id -> block of the turn it belongs to; the least recently used ids are forgotten first. Thread-safe."""

    def __init__(self, max_ids: int = 100_000, max_bytes: int = 512 << 20) -> None:
        self.max_ids, self.max_bytes = max_ids, max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[str, tuple[str, tuple[ToolCall, ...]]] = OrderedDict()
        self._users: dict[str, int] = {}  # block -> ids that share it
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def new_id(self, prefix: str = "call_", taken: Collection[str] = ()) -> str:
        """An id that is not in use: `prefix` and 32 lower-case hex digits."""
        while True:
            new = prefix + secrets.token_hex(16)
            if new not in taken and new not in self._blocks:
                return new

    def put(self, calls: Sequence[ToolCall], block: str) -> None:
        """Remember the sampled block of a turn under the ids of all its calls."""
        with self._lock:
            shared = tuple(calls)
            for call in calls:
                self._forget(call.id)
                self._blocks[call.id] = block, shared
                self._users[block] = self._users.get(block, 0) + 1
                self.nbytes += len(call.id) + _OVERHEAD + (_size(block) if self._users[block] == 1 else 0)
            while self._blocks and (len(self._blocks) > self.max_ids or self.nbytes > self.max_bytes):
                self._forget(next(iter(self._blocks)))

    def attach(self, message: Message) -> Message:
        """The message with its sampled block, if all its calls are known and the client did not edit them."""
        if message.role != "assistant" or not message.tool_calls or message.raw_dsml:
            return message
        with self._lock:
            found = [self._blocks.get(call.id) for call in message.tool_calls]
            if found[0] is None or any(entry != found[0] for entry in found):
                return message
            block, calls = found[0]
            if not _same_calls(calls, message.tool_calls):
                return message
            for call in message.tool_calls:
                self._blocks.move_to_end(call.id)
        return replace(message, raw_dsml=block)

    def _forget(self, call_id: str) -> None:
        entry = self._blocks.pop(call_id, None)
        if entry is None:
            return
        block = entry[0]
        self._users[block] -= 1
        self.nbytes -= len(call_id) + _OVERHEAD
        if not self._users[block]:
            del self._users[block]
            self.nbytes -= _size(block)


def _size(block: str) -> int:
    return len(block.encode())


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
