"""The sampled bytes of tool calls, kept by call id.

A client sends calls back as names and JSON. Written anew, they need not be the bytes the model sampled, and then the
live state does not fit the prompt any more. So the sampled block is remembered and put back.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from ds4.chat import json_text
from ds4.chat.message import Message, ToolCall
from ds4.chat.template import EOS
from ds4.chat.tools import ToolSchema

_OVERHEAD = 200
"""Bytes that one id costs besides its characters and its turn, roughly."""

_MAX_ID = 256
"""Most characters of an id that is read from a file."""

_MAX_DIGITS = 400
"""Numbers that are longer, or have more digits, are compared as text."""

_BLOCK_START = re.compile("<(?:[｜|]{0,2}DSML[｜|]{1,2})?(?:tool_calls|invoke)")


@dataclass(frozen=True)
class ReplayEntry:
    """What is remembered of one turn, as it is kept in a file.

    Attributes:
        block: the sampled bytes of its calls.
        calls: the calls with their ids.
    """

    block: str
    calls: tuple[ToolCall, ...]


@dataclass(eq=False)
class _Turn:
    """The calls of one turn, their sampled block, where that is from, and how many ids lead here."""

    calls: tuple[ToolCall, ...]
    block: str
    source: str = "memory"
    ids: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = _size(self.block) + sum(_size(call.name) + _size(call.arguments) for call in self.calls)


class ReplayMemory:
    """Call id -> block of the turn it belongs to; the least recently used ids are forgotten first. Thread-safe.

    Attributes:
        recall: called when calls are not known, before they are looked up again; it may import what is on disk.
    """

    def __init__(self, max_ids: int = 100_000, max_bytes: int = 512 << 20) -> None:
        self.max_ids, self.max_bytes = max_ids, max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self.nbytes = 0
        self.recall: Callable[[], None] | None = None

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
            self._put(_Turn(tuple(calls), block))

    def attach(self, message: Message, counts: Counter[str] | None = None, tools: Sequence[ToolSchema] = ()) -> Message:
        """The message with its sampled block and calls, if all its calls are known and the client did not edit them.

        Parameters that the schemas of `tools` give a default are no edit if a client adds them with that value.
        For an assistant message with calls, one is added to `counts` under the way it will be written: `memory` or
        `disk`, for a sampled block from there; `canonical`, as the calls are not as they were sampled; or `missing`,
        as one of them is not known.
        """
        if message.role != "assistant" or not message.tool_calls:
            return message
        block, way, calls = message.raw_dsml, "memory", message.tool_calls
        if not block:
            block, way, calls = self._find(message.tool_calls, tools)
            if way == "missing" and self.recall is not None:
                self.recall()
                block, way, calls = self._find(message.tool_calls, tools)
        if counts is not None:
            counts[way] += 1
        return replace(message, raw_dsml=block, tool_calls=calls)

    def export_entries(self, text: str) -> list[ReplayEntry]:
        """The turns whose sampled block stands in a prompt's text, verbatim, where a turn of the model ends."""
        with self._lock:
            turns = dict.fromkeys(self._turns.values())
        by_block: dict[str, list[_Turn]] = {}
        for turn in turns:
            if turn.ids == len(turn.calls):
                by_block.setdefault(turn.block, []).append(turn)
        lengths = {len(block) for block in by_block}
        found: dict[_Turn, None] = {}
        for spoken in text.split(EOS):
            for match in _BLOCK_START.finditer(spoken):
                for start in _blanks_before(spoken, match.start()):
                    if len(spoken) - start in lengths:
                        found.update(dict.fromkeys(by_block.get(spoken[start:], ())))
        return [ReplayEntry(turn.block, turn.calls) for turn in found]

    def import_entries(self, entries: Iterable[ReplayEntry]) -> int:
        """Remember what `export_entries` gave earlier; returns how many entries were new and in order.

        What is known already stays as it is. Entries that cannot be right are left out: a file may be damaged.
        """
        taken = 0
        for entry in entries:
            if not _valid(entry):
                continue
            with self._lock:
                if not any(call.id in self._turns for call in entry.calls):
                    self._put(_Turn(entry.calls, entry.block, "disk"))
                    taken += 1
        return taken

    def _put(self, turn: _Turn) -> None:
        for call in turn.calls:
            self._forget(call.id)
            self._turns[call.id] = turn
            turn.ids += 1
            self.nbytes += len(call.id) + _OVERHEAD + (turn.nbytes if turn.ids == 1 else 0)
        while self._turns and (len(self._turns) > self.max_ids or self.nbytes > self.max_bytes):
            self._forget(next(iter(self._turns)))

    def _find(self, calls: tuple[ToolCall, ...], tools: Sequence[ToolSchema]) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The sampled block of calls, where it is from, and these as sampled; or an empty one, and why."""
        with self._lock:
            found = [self._turns.get(call.id) for call in calls]
            turn = found[0]
            if turn is None or any(other is None for other in found):
                return "", "missing", calls
            if any(other is not turn for other in found) or not same_calls(turn.calls, calls, tools):
                return "", "canonical", calls
            for call in calls:
                self._turns.move_to_end(call.id)
            return turn.block, turn.source, turn.calls

    def _forget(self, call_id: str) -> None:
        turn = self._turns.pop(call_id, None)
        if turn is None:
            return
        turn.ids -= 1
        self.nbytes -= len(call_id) + _OVERHEAD
        if not turn.ids:
            self.nbytes -= turn.nbytes


def _blanks_before(text: str, at: int) -> Iterable[int]:
    """`at`, and each place before it from which there is only white space."""
    yield at
    while at and text[at - 1].isspace():
        at -= 1
        yield at


def _valid(entry: object) -> bool:
    """Whether an entry from a file is one: text everywhere, ids of a sane length, each of them once."""
    if not isinstance(entry, ReplayEntry) or not isinstance(entry.block, str) or not isinstance(entry.calls, tuple):
        return False
    if not entry.block or not entry.calls or not all(isinstance(call, ToolCall) for call in entry.calls):
        return False
    texts = [text for call in entry.calls for text in (call.id, call.name, call.arguments)]
    if not all(isinstance(text, str) for text in texts):
        return False
    ids = {call.id for call in entry.calls}
    return (
        len(ids) == len(entry.calls)
        and all(0 < len(id) <= _MAX_ID for id in ids)
        and all(call.name for call in entry.calls)
    )


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def same_calls(sampled: Sequence[ToolCall], sent: Sequence[ToolCall], tools: Sequence[ToolSchema] = ()) -> bool:
    """Whether calls that a client sent are those that were sampled: ids, names, and arguments as JSON values.

    Parameters that a client added count as well, unless `tools` declares their values as defaults.
    """
    if len(sampled) != len(sent):
        return False
    return all(
        a.id == b.id
        and a.name == b.name
        and (a.arguments == b.arguments or _same_arguments(a.arguments, b.arguments, a.name, tools))
        for a, b in zip(sampled, sent, strict=True)
    )


def _same_arguments(a: str, b: str, name: str, tools: Sequence[ToolSchema]) -> bool:
    """Whether two texts are the same JSON object; a text that is none equals itself only."""
    value, other = json_text.arguments_object(a), json_text.arguments_object(b)
    if value is None or other is None:
        return False
    added = other.keys() - value.keys()
    if added:
        defaults = _defaults(name, tools)
        if not all(key in defaults and _same_value(defaults[key], other[key]) for key in added):
            return False
    return value.keys() <= other.keys() and all(_same_value(item, other[key]) for key, item in value.items())


def _defaults(name: str, tools: Sequence[ToolSchema]) -> dict[str, object]:
    """The parameters of a tool that have a default, with it."""
    line = next((tool.schema for tool in tools if tool.name == name), "{}")
    shown = json_text.arguments_object(line) or {}
    schema = shown.get("parameters") or shown.get("input_schema")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: part["default"] for key, part in properties.items() if isinstance(part, dict) and "default" in part}


def _same_value(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if type(a) is not type(b):
        # Numbers are text of a type of their own.
        return False
    return a == b or (isinstance(a, str) and not json_text.is_string(a) and _same_number(a, str(b)))


def _same_number(a: str, b: str) -> bool:
    """Whether 1.0 is 1: clients read numbers and write them again."""
    if max(len(a), len(b)) > _MAX_DIGITS:
        return False
    try:
        x, y = Decimal(a), Decimal(b)
    except ArithmeticError:
        return False
    return max(abs(x.adjusted()), abs(y.adjusted())) < _MAX_DIGITS and x == y
