"""The messages of a conversation as all APIs share them, and reading them from OpenAI-style dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat import json_text
from ds4.errors import RequestError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: the tool's name, for a tool of a namespace with the namespace in front.
        arguments: JSON text; from `parse` it is the object `{"k":v}` without spaces.
        id: the call's id on the wire; empty as long as nobody gave it one.
    """

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message's content.

    Attributes:
        type: `text`, `tool_result`, or the client's name of a kind that cannot be rendered.
        text: the text; empty for other kinds.
        tool_call_id: the call that a `tool_result` answers.
        parts: the content of a `tool_result`.
    """

    type: str
    text: str = ""
    tool_call_id: str = ""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message: what `parse` makes of a generation, and what `render` takes.

    Attributes:
        reasoning: the thinking, without its markers.
        content: the visible text. A sequence of parts where a client sent several, or sent results inside.
        tool_calls: the calls, in the order they were written.
        raw_dsml: the sampled bytes of the tool call block with the white space before it. If set, `render` repeats it
            instead of writing the calls anew. Empty if there is no block or it had to be completed.
        problems: what was wrong with the generation, for people; empty if nothing.
        role: `assistant`, `user`, `system`, `developer`, `tool`, `latest_reminder`.
        tool_call_id: for role `tool`, the call that is answered.
        reasoning_closed: False if the generation ended inside its reasoning.
        complete: False if a tool call block was begun and not ended, or had calls that could not be read.
        task: one of the model's internal tasks, on a user message (official format only).
        open_end: the turn is to be continued: no end-of-sentence behind it (official format only).
    """

    reasoning: str = ""
    content: str | tuple[Part, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw_dsml: str = ""
    problems: tuple[str, ...] = ()
    role: str = "assistant"
    tool_call_id: str = ""
    reasoning_closed: bool = True
    complete: bool = True
    task: str = ""
    open_end: bool = False

    @property
    def text(self) -> str:
        """The content's text, parts put together without anything between them."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def parts(self) -> tuple[Part, ...]:
        """The content as parts; a plain string is one part."""
        return (Part("text", self.content),) if isinstance(self.content, str) else self.content


_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


def read_message(value: Message | Mapping[str, Any], where: str = "message") -> Message:
    """Return a message given as a Message or as an OpenAI-style dict.

    Read are `role`, `content` (string, null, or a list of strings and parts; a user's list may hold Anthropic-style
    `tool_result` parts), `reasoning_content` or `reasoning`, `tool_calls`, `tool_call_id`, and for the format's own
    fields `raw_dsml`, `task`, `wo_eos`. Other keys are ignored.

    Raises RequestError that names the message and the key.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object, found {_kind(value)}")
    role = value.get("role", "user")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string, found {_kind(role)}")
    reasoning = value.get("reasoning_content")
    if reasoning is None:
        reasoning = value.get("reasoning")
    calls = value.get("tool_calls")
    if calls is not None and (isinstance(calls, str) or not isinstance(calls, Sequence)):
        raise RequestError(f"{where}.tool_calls must be a list, found {_kind(calls)}")
    return Message(
        reasoning=_optional_text(reasoning, f"{where}.reasoning_content"),
        content=read_content(value.get("content"), f"{where}.content"),
        tool_calls=tuple(_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())),
        raw_dsml=_optional_text(value.get("raw_dsml"), f"{where}.raw_dsml"),
        role="tool" if role == "function" else role,
        tool_call_id=_optional_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        task=_optional_text(value.get("task"), f"{where}.task"),
        open_end=value.get("wo_eos") is True,
    )


def read_content(value: object, where: str) -> str | tuple[Part, ...]:
    """Return a content given as a string, null, or a list of strings and parts. Raises RequestError."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return tuple(_read_part(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise RequestError(f"{where} must be a string or a list of parts, found {_kind(value)}")


def _read_part(value: object, where: str) -> Part:
    if isinstance(value, Part):
        return value
    if isinstance(value, str):
        return Part("text", value)
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be a string or an object, found {_kind(value)}")
    kind = value.get("type", "text")
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string, found {_kind(kind)}")
    if kind == "tool_result":
        content = read_content(value.get("content"), f"{where}.content")
        parts = (Part("text", content),) if isinstance(content, str) else content
        return Part(
            kind, tool_call_id=_optional_text(value.get("tool_use_id"), f"{where}.tool_use_id"), parts=tuple(parts)
        )
    if kind not in _TEXT_TYPES:
        return Part(kind)
    text = value.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, found {_kind(text)}")
    return Part("text", text)


def _read_call(value: object, where: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object, found {_kind(value)}")
    function = value.get("function")
    if function is None:
        function = value
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object, found {_kind(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a non-empty string, found {_kind(name)}")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        try:
            arguments = json_text.dumps({} if arguments is None else arguments)
        except json_text.NotJsonError as error:
            raise RequestError(f"{where}.function.arguments cannot be written as JSON: {error}") from None
    return ToolCall(name, arguments, _optional_text(value.get("id"), f"{where}.id"))


def _optional_text(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    """What a JSON reader would call this value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, Sequence) else str(type(value))
