"""The input items of a Responses request as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds4.chat import json_text
from ds4.chat.message import Message, Part, ToolCall
from ds4.server.errors import ApiError

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_HOSTED = {
    "local_shell_call": "local_shell",
    "web_search_call": "web_search_call",
    "tool_search_call": "tool_search",
    "image_generation_call": "image_generation_call",
}
"""Calls of tools that have a kind of their own, and the name each has for the model."""

_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_HOSTED_OUTPUTS = frozenset({"tool_search_output", *(f"{kind}_output" for kind in _HOSTED)})
_IGNORED = frozenset({"compaction", "context_compaction"})


@dataclass(frozen=True)
class Input:
    """What a request's input says.

    Attributes:
        messages: the conversation.
        tools: what tool searches in it have found, as the client sent it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_input(value: str | Sequence[Mapping[str, Any]]) -> Input:
    """The input as messages; a string is one message of the user. Raises ApiError 400 that names the item."""
    if isinstance(value, str):
        return Input((Message(role="user", content=value),))
    reader = _Reader()
    for i, item in enumerate(value):
        reader.read(item, f"input[{i}]")
    reader.flush()
    return Input(tuple(reader.messages), tuple(reader.tools))


def found_tools(messages: Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    """What tool searches in remembered messages have found: the results are all that is left of their items."""
    searches = {call.id for message in messages for call in message.tool_calls if call.name == "tool_search"}
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if message.role != "tool" or message.tool_call_id not in searches:
            continue
        try:
            value = json_text.loads(message.text)
        except json_text.NotJsonError:
            continue
        if isinstance(value, list) and all(isinstance(tool, Mapping) and "type" in tool for tool in value):
            found += value
    return tuple(found)


class _Reader:
    """Reads items one by one.

    One turn of the model is several items here and one message there: its reasoning waits for what it belongs to, and
    calls join the text before them, all at once as there may be many.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Mapping[str, Any]] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []  # those that the last message gets, and the reasoning between them
        self._call_reasoning: list[str] = []

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type")
        if kind is not None and not isinstance(kind, str):
            raise _wrong(f"{where}.type must be a string")
        # What a limit cut is text all the same, and clients replay it; half a call is none.
        whole = ("completed", "incomplete") if kind in ("message", "reasoning", None) else ("completed",)
        if item.get("status") not in (None, *whole):
            raise _wrong(
                f"{where}.status is {item['status']!r}, but only completed items can be replayed: leave the item out, "
                "or its status if it counts as completed"
            )
        if kind == "message" or (kind is None and "content" in item):
            self._message(item, where)
        elif kind == "reasoning":
            for key in ("summary", "content"):
                texts = [part.text for part in _parts(item.get(key), f"{where}.{key}")]
                self._reasoning += [text for text in texts if text]
        elif kind in ("function_call", "custom_tool_call") or kind in _HOSTED:
            self._call(_read_call(item, kind, where))
        elif kind in _OUTPUTS or kind in _HOSTED_OUTPUTS:
            self._output(item, kind, where)
        elif kind is None:
            raise _wrong(f"{where} has no type and no content; items are sent whole, not by their id")
        elif kind not in _IGNORED:
            raise _wrong(f"{where} has type {kind!r}, which is not supported")

    def flush(self) -> None:
        """Reasoning that nothing followed is a turn of its own."""
        reasoning = self._take_reasoning()
        if reasoning:
            self._add(Message(reasoning=reasoning))
        self._join_calls()

    def _take_reasoning(self) -> str:
        reasoning = "\n".join(self._reasoning)
        self._reasoning.clear()
        return reasoning

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = _first(item, "role") or "user"
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong(f"{where}.role {role!r} is not known: use system, developer, user or assistant")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._add(Message(content=content, reasoning=self._take_reasoning()))
            return
        self.flush()
        # Clients of this API write `developer` where they mean the system prompt. The format's own developer role is
        # another thing: it is forgotten together with old reasoning.
        self._add(Message(role="user" if role == "user" else "system", content=content))

    def _call(self, call: ToolCall) -> None:
        if not self.messages or self.messages[-1].role != "assistant":
            self._add(Message())
        self._calls.append(call)
        self._call_reasoning.append(self._take_reasoning())

    def _add(self, message: Message) -> None:
        self._join_calls()
        self.messages.append(message)

    def _join_calls(self) -> None:
        """Give the last message the calls that belong to it."""
        if not self._calls:
            return
        last = self.messages[-1]
        reasoning = "\n".join(text for text in (last.reasoning, *self._call_reasoning) if text)
        self.messages[-1] = replace(last, reasoning=reasoning, tool_calls=(*last.tool_calls, *self._calls))
        self._calls.clear()
        self._call_reasoning.clear()

    def _output(self, item: Mapping[str, Any], kind: str, where: str) -> None:
        self.flush()
        content = _output_content(item.get("output"), f"{where}.output")
        if kind in _HOSTED_OUTPUTS and item.get("output") is None:
            content = _json(_first(item, "result", "tools"), where)
        if kind == "tool_search_output":
            tools = item.get("tools") or ()
            if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
                raise _wrong(f"{where}.tools must be a list of objects")
            self.tools += tools
        self._add(Message(role="tool", tool_call_id=_call_id(item, where), content=content))


def _wrong(message: str) -> ApiError:
    return ApiError(400, f"invalid JSON request: {message}", param="input")


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    """The first of some fields that is there."""
    return next((item[key] for key in keys if item.get(key) is not None), None)


def _json(value: Any, where: str) -> str:
    """A value as text: strings as they are, nothing for null, else JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json_text.dumps(value, compact=True)
    except json_text.NotJsonError as error:
        raise _wrong(f"{where}: {error}") from None


def _content(value: Any, where: str) -> str | tuple[Part, ...]:
    return value if isinstance(value, str) else _parts(value, where)


def _parts(value: Any, where: str, result: bool = False) -> tuple[Part, ...]:
    """Text parts of a content. Raises ApiError 400 for any other kind of part: it would be missing from the prompt.

    Of a `result` it stays as its kind: a result cannot be taken back, and the format has words for what it cannot show.
    """
    if value is None or isinstance(value, str):
        return (Part("text", value),) if value else ()
    if not isinstance(value, list):
        raise _wrong(f"{where} must be a string or a list of parts")
    parts = []
    for i, part in enumerate(value):
        place = f"{where}[{i}]"
        if isinstance(part, str):
            parts.append(Part("text", part))
            continue
        if not isinstance(part, Mapping):
            raise _wrong(f"{place} must be a string or an object")
        kind = part.get("type", "text")
        if isinstance(kind, str) and kind not in _TEXT_TYPES and result:
            parts.append(Part(kind))
            continue
        if not isinstance(kind, str) or kind not in _TEXT_TYPES:
            raise _wrong(f"{place} has type {kind!r}, which is not supported: the model reads text only")
        text = part.get("text")
        if text is not None and not isinstance(text, str):
            raise _wrong(f"{place}.text must be a string")
        parts.append(Part("text", text or ""))
    return tuple(parts)


def _output_content(value: Any, where: str) -> str | tuple[Part, ...]:
    """A tool's output: text, a list of parts, or any other JSON value as its text."""
    parts = isinstance(value, list) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("type"), str)) for part in value
    )
    return _parts(value, where, result=True) if parts else _json(value, where)


def _call_id(item: Mapping[str, Any], where: str) -> str:
    id = _first(item, "call_id", "id")
    if not isinstance(id, str) or not id:
        raise _wrong(f"{where}.call_id must be a non-empty string")
    return id


def _read_call(item: Mapping[str, Any], kind: str, where: str) -> ToolCall:
    id = _call_id(item, where)
    if kind in _HOSTED:
        return ToolCall(_HOSTED[kind], _json(_first(item, "action", "arguments", "input"), where) or "{}", id)
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.name must be a non-empty string")
    if namespace is not None and not isinstance(namespace, str):
        raise _wrong(f"{where}.namespace must be a string")
    if kind == "function_call":
        arguments = _json(_first(item, "arguments", "input"), where)
        return ToolCall((namespace or "") + name, arguments if arguments.strip() else "{}", id)
    text = _first(item, "input", "arguments")
    # The model gives the text of such a call as a parameter.
    return ToolCall(name, _json({"input": text or ""} if text is None or isinstance(text, str) else text, where), id)
