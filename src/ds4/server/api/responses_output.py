"""The output items of a response, and the events by which a client sees them grow.

An event is its type and its fields; who sends it numbers it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ds4.chat import json_text
from ds4.chat.events import ArgumentsDelta, CallBegin, Event, ReasoningDelta, TextDelta
from ds4.chat.message import Message
from ds4.chat.tools import ToolSchema
from ds4.server.api.token_logprobs import logprob_objects, without_bytes
from ds4.server.logprobs import TokenLogprob

WireEvent = tuple[str, Mapping[str, Any]]


def new_id(prefix: str) -> str:
    """An id nobody can guess: `prefix` and 24 lower-case hex digits."""
    return prefix + secrets.token_hex(12)


class _Item(ABC):
    """An output item while it grows."""

    prefix = ""

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.status = "in_progress"
        self.ended = False
        self.index = index
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def value(self) -> dict[str, Any]:
        """The item as it is now."""

    def event(self, kind: str, **fields: Any) -> WireEvent:
        return f"response.{kind}", {"item_id": self.id, "output_index": self.index, **fields}

    def begin(self) -> list[WireEvent]:
        """The events of its start."""
        return [("response.output_item.added", {"output_index": self.index, "item": self.value()})]

    def write(self, text: str) -> list[WireEvent]:
        """Take more of it; returns the events of that."""
        self.pieces.append(text)
        return []

    def end(self, status: str) -> list[WireEvent]:
        """Take its last status; returns the events of its end."""
        self.status, self.ended = status, True
        return [("response.output_item.done", {"output_index": self.index, "item": self.value()})]


class _Reasoning(_Item):
    prefix = "rs_"

    def value(self) -> dict[str, Any]:
        summary = [self._part()] if self.pieces else []
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": summary}

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}

    def begin(self) -> list[WireEvent]:
        return [*super().begin(), self.event("reasoning_summary_part.added", summary_index=0, part=self._part())]

    def write(self, text: str) -> list[WireEvent]:
        super().write(text)
        return [self.event("reasoning_summary_text.delta", summary_index=0, delta=text)]

    def end(self, status: str) -> list[WireEvent]:
        return [
            self.event("reasoning_summary_text.done", summary_index=0, text=self.text),
            self.event("reasoning_summary_part.done", summary_index=0, part=self._part()),
            *super().end(status),
        ]


class _Text(_Item):
    prefix = "msg_"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []
        self._fresh = 0  # those that no event has told

    def take(self, tokens: Sequence[TokenLogprob]) -> None:
        """Take the tokens of the text that comes next."""
        self._logprobs += logprob_objects(tokens)
        self._fresh += len(tokens)

    def value(self) -> dict[str, Any]:
        content = [self._part()] if self.pieces or self.ended else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def begin(self) -> list[WireEvent]:
        return [*super().begin(), self.event("content_part.added", content_index=0, part=self._part())]

    def write(self, text: str) -> list[WireEvent]:
        super().write(text)
        fresh, self._fresh = self._logprobs[len(self._logprobs) - self._fresh :], 0
        return [self.event("output_text.delta", content_index=0, delta=text, logprobs=without_bytes(fresh))]

    def end(self, status: str) -> list[WireEvent]:
        return [
            self.event("output_text.done", content_index=0, text=self.text, logprobs=without_bytes(self._logprobs)),
            self.event("content_part.done", content_index=0, part=self._part()),
            *super().end(status),
        ]


class _Call(_Item):
    """A call of a function; `text` is its arguments."""

    prefix = "fc_"

    def __init__(self, index: int, call_id: str, name: str, namespace: str) -> None:
        super().__init__(index)
        self.call_id = call_id
        self.name = name.removeprefix(namespace)
        self.namespace = namespace

    def value(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "function_call", "status": self.status, "call_id": self.call_id}
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {**head, "name": self.name, **namespace, "arguments": self.text}

    def write(self, text: str) -> list[WireEvent]:
        super().write(text)
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[WireEvent]:
        done = self.event("function_call_arguments.done", name=self.name, arguments=self.text)
        return [done, *super().end(status)]


class _CustomCall(_Call):
    """A call of a tool whose input is free text, which the model writes as the parameter `input`."""

    prefix = "ctc_"

    def __init__(self, index: int, call_id: str, name: str, namespace: str) -> None:
        super().__init__(index, call_id, name, namespace)
        self._reader = InputReader()
        self._sent: list[str] = []

    def value(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "custom_tool_call", "status": self.status, "call_id": self.call_id}
        text = custom_input(self.text) if self.ended else "".join(self._sent)
        return {**head, "name": self.name, "input": text}

    def write(self, text: str) -> list[WireEvent]:
        self.pieces.append(text)
        return self._send(self._reader.read(text))

    def _send(self, text: str) -> list[WireEvent]:
        self._sent.append(text)
        return [self.event("custom_tool_call_input.delta", delta=text)] if text else []

    def end(self, status: str) -> list[WireEvent]:
        text, sent = custom_input(self.text), "".join(self._sent)
        rest = self._send(text.removeprefix(sent)) if text.startswith(sent) else []
        done = self.event("custom_tool_call_input.done", input=text)
        return [*rest, done, *_Item.end(self, status)]


class _SearchCall(_Call):
    """A call of the client's search for tools; its arguments are an object, and come at its end."""

    prefix = "tsc_"

    def value(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "tool_search_call", "status": self.status, "call_id": self.call_id}
        arguments = _object(self.text) if self.ended else {}
        return {**head, "execution": "client", "arguments": arguments}

    def write(self, text: str) -> list[WireEvent]:
        self.pieces.append(text)
        return []

    def end(self, status: str) -> list[WireEvent]:
        return _Item.end(self, status)


class OutputWriter:
    """Turns the events of an answer into items: its reasoning if it is shown, its text, its calls.

    A call ends on the wire only when the next one begins or the answer ends: what a limit cuts is then known to be
    incomplete, and nobody runs it.
    """

    def __init__(self, tools: Sequence[ToolSchema], reasoning_shown: bool) -> None:
        self._tools: dict[str, ToolSchema] = {}
        for tool in tools:
            self._tools.setdefault(tool.name, tool)
        self._reasoning_shown = reasoning_shown
        self._items: list[_Item] = []

    def items(self) -> list[dict[str, Any]]:
        """All items as they are now."""
        return [item.value() for item in self._items]

    def write(
        self, events: Sequence[Event], call_ids: Sequence[str], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[WireEvent]:
        """Take more of the answer, and the tokens of its text; returns what a client sees of it."""
        out: list[WireEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self._reasoning_shown:
                    out += self._grow(_Reasoning, event.text)
            elif isinstance(event, TextDelta):
                out += self._grow(_Text, event.text, logprobs)
                logprobs = ()
            elif isinstance(event, CallBegin):
                out += self._open(self._new_call(event.name, call_ids[event.index]))
            elif isinstance(event, ArgumentsDelta):
                out += self._items[-1].write(event.text)
        return out

    def end(self, message: Message, cut: bool) -> list[WireEvent]:
        """The answer is over. `message`: all of it; `cut`: a limit ended it."""
        item = self._items[-1] if self._items else None
        whole = True
        if isinstance(item, _Reasoning):
            whole = message.reasoning_closed
        elif isinstance(item, _Text):
            whole = not cut
        elif item is not None:
            whole = message.complete or not cut
        out = self._close("completed" if whole else "incomplete")
        if not cut and not any(isinstance(item, _Text | _Call) for item in self._items):
            # Clients look for a message, and send it back: so the turn stays in the conversation.
            out += self._open(_Text(len(self._items))) + self._close("completed")
        return out

    def abandon(self) -> list[WireEvent]:
        """The answer failed. A call that is open gets no end, so that nobody runs it."""
        item = self._items[-1] if self._items else None
        if isinstance(item, _Call) and not item.ended:
            item.status = "incomplete"
            return []
        return self._close("incomplete")

    def _grow(
        self, kind: type[_Reasoning] | type[_Text], text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> list[WireEvent]:
        if not text:
            return []
        begin = [] if self._items and type(self._items[-1]) is kind else self._open(kind(len(self._items)))
        item = self._items[-1]
        if isinstance(item, _Text):
            item.take(logprobs)
        return begin + item.write(text)

    def _open(self, item: _Item) -> list[WireEvent]:
        out = self._close("completed")
        self._items.append(item)
        return out + item.begin()

    def _close(self, status: str) -> list[WireEvent]:
        """End the last item if it is open."""
        if not self._items or self._items[-1].ended:
            return []
        return self._items[-1].end(status)

    def _new_call(self, name: str, call_id: str) -> _Call:
        tool = self._tools.get(name)
        kinds = {"custom": _CustomCall, "tool_search": _SearchCall}
        kind = kinds.get(tool.kind, _Call) if tool else _Call
        return kind(len(self._items), call_id, name, tool.namespace if tool else "")


def custom_input(arguments: str) -> str:
    """The text that a call of a custom tool gives.

    It is the parameter `input`. Without it: the only parameter there is, whatever its name, else all of them as JSON.
    """
    items = json_text.argument_items(arguments, compact=True)
    if items is None:
        return arguments
    values = {name: text for name, _, text in items}
    if "input" in values:
        return values["input"]
    return next(iter(values.values())) if len(values) == 1 else arguments if values else ""


def _object(arguments: str) -> Any:
    """Arguments as a JSON value; numbers that no float can hold stay text."""

    def number(text: str) -> float | str:
        value = float(text)
        return value if math.isfinite(value) else text

    return json.loads(arguments, parse_float=number)


_TOKEN = re.compile(r'[^"\\{}\[\],:]+|.', re.DOTALL)
# Escapes that are whole; the halves of a surrogate pair belong together.
_CERTAIN = re.compile(
    r"(?:[^\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)


class InputReader:
    """Finds the string `input` of a JSON object that arrives in pieces cut anywhere."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._in_value = False  # behind the colon of one of the object's own keys
        self._key = ""
        self._raw = ""  # of the key, or of the string that is looked for, as far as it was not returned
        self._done = False

    def read(self, text: str) -> str:
        """Take more of the object; returns what that adds to the string."""
        if self._done:
            return ""
        for token in _TOKEN.findall(text):
            if self._in_string:
                self._inside(token)
            else:
                self._between(token)
            if self._done:
                return _unquoted(self._raw)
        if not self._found:
            return ""
        certain = _CERTAIN.match(self._raw)
        end = certain.end() if certain else 0
        text, self._raw = self._raw[:end], self._raw[end:]
        return _unquoted(text)

    @property
    def _found(self) -> bool:
        return self._in_string and self._in_value and self._depth == 1 and self._key == "input"

    def _between(self, token: str) -> None:
        if token == '"':
            self._in_string, self._raw = True, ""
        elif token in ("{", "["):
            self._depth += 1
        elif token in ("}", "]"):
            self._depth -= 1
        elif token in (":", ",") and self._depth == 1:
            self._in_value = token == ":"

    def _inside(self, token: str) -> None:
        is_key = self._depth == 1 and not self._in_value
        if token == '"' and not self._escaped:
            self._done = self._found
            self._in_string = False
            if is_key:
                self._key = _unquoted(self._raw)
            return
        self._escaped = token == "\\" and not self._escaped
        if is_key or self._found:
            self._raw += token


def _unquoted(raw: str) -> str:
    return str(json.loads(f'"{raw}"'))
