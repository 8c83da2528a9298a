"""Anthropic's Messages: the request in, the events out. Nothing is decided here."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ds4.chat import json_text
from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, ReasoningDelta, TextDelta
from ds4.chat.message import Message, Part, ToolCall
from ds4.chat.tools import ToolSchema, tool_schemas
from ds4.errors import RequestError
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.common import check_effort, malformed, refuse, sampling_of, stops_of, thinking_of, validate
from ds4.server.api.demands import Calls, check_names, forced_calls, format_of
from ds4.server.api.messages_types import MessagesRequest, ThinkingConfig, ToolChoice
from ds4.server.api.results import ANTHROPIC_WORDS, complete_history
from ds4.server.bodies import frame
from ds4.server.constraints import Schema, strict_names
from ds4.server.errors import ApiError
from ds4.server.request import Admitted, ChatRequest, Done, Events, Usage

_HEADER_LINES = re.compile(r"(?:\s*x-anthropic-[^\n]*\n?)+")
"""Lines at the start of a system text that some clients put there anew with every request."""

_USER_BLOCKS = ("text", "tool_result")
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")

_SCHEMALESS_TOOLS = ("bash_", "text_editor_", "memory_", "computer_")
"""Kinds of tools that clients run although they send no schema."""

_HIDDEN_TOOL_KEYS = frozenset({"type", "cache_control", "defer_loading", "eager_input_streaming", "allowed_callers"})
"""What a tool with a schema says to the API and not to the model."""


def parse(value: Mapping[str, Any], context: ApiContext) -> Ask:
    """The request in the terms of the chat format. Raises ApiError that names the field."""
    config = context.config
    if value.get("thread") is not None:
        raise _no_threads()
    if value.get("messages") is None:
        raise ApiError(400, "missing messages", param="messages")
    body = validate(MessagesRequest, value)
    _check_supported(body)
    system = _system(body.system)
    messages = _messages(body.messages)
    prefilled = messages[-1].role == "assistant"
    effort, field = body.reasoning_effort, "reasoning_effort"
    if body.output_config is not None and body.output_config.effort is not None:
        effort, field = body.output_config.effort, "output_config.effort"
    effort = check_effort(effort, config, field)
    option = body.thinking if isinstance(body.thinking, ThinkingConfig) else ThinkingConfig()
    asked = body.thinking if isinstance(body.thinking, bool) else option.type
    # An answer whose beginning is given has no thinking before it, so it is off unless the request asks for it.
    default = config.think_default is True and not prefilled
    thinking = thinking_of("enabled" if asked == "adaptive" else asked, None, effort, body.model, default)
    if prefilled:
        messages[-1] = _prefill(messages[-1], len(body.messages) - 1, thinking, config.template)
    front = (Message(role="system", content=system),) if system else ()
    tools = _tools(body.tools or ())
    choice = body.tool_choice or ToolChoice(type="auto")
    calls = _calls(choice, tools)
    schema = _format(body)
    if schema is not None and prefilled:
        raise ApiError(
            400, "messages: the beginning of an answer cannot be given for one that follows a schema", param="messages"
        )
    request = ChatRequest(
        model=body.model or context.model,
        messages=complete_history((*front, *messages), len(front), context.turns, ANTHROPIC_WORDS),
        tools=tools,
        calls_allowed=calls.allowed,
        parallel_calls=not choice.disable_parallel_tool_use,
        forced=calls.forced,
        callable=calls.names,
        strict=strict_names(tools, config.strict_tools),
        content_schema=schema,
        thinking=thinking,
        effort=effort,
        sampling=sampling_of(body, context.vocab),
        max_tokens=body.max_tokens,
        stop=stops_of(body.stop_sequences, "stop_sequences"),
        call_prefix="toolu_",
        streamed=bool(body.stream),
        front=len(front),
        remembered=True,
    )
    shown = option.display != "omitted"
    return Ask(request, bool(body.stream), lambda _: MessagesAnswer(request.model, shown))


def _no_threads() -> ApiError:
    """The answer to a request that names a conversation kept by the server. Clients know the code and send it whole."""
    return ApiError(
        400,
        "thread is not supported: send the whole conversation without it",
        param="thread",
        extra={"details": {"error_code": "thread_unsupported_request"}},
    )


def _check_supported(body: MessagesRequest) -> None:
    """Refuse what would silently be missing from the answer."""
    if body.mcp_servers:
        raise refuse("mcp_servers", "this server connects to no other one; let the client call such tools")


def _calls(choice: ToolChoice, tools: Sequence[ToolSchema]) -> Calls:
    if choice.type == "any":
        return forced_calls(None, tools, "tool_choice.type is 'any'")
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice.name is missing", param="tool_choice")
        return forced_calls([choice.name], tools, "tool_choice")
    if choice.type not in ("auto", "none"):
        raise ApiError(400, f"tool_choice.type is {choice.type!r}; use auto, any, tool or none", param="tool_choice")
    return Calls(allowed=choice.type == "auto")


def _format(body: MessagesRequest) -> Schema | None:
    """The schema of the text; `output_format` is the field's older name."""
    given = body.output_config.format if body.output_config else None
    if given is not None:
        return format_of(given, "output_config.format")
    return format_of(body.output_format, "output_format")


def _tools(values: Sequence[Mapping[str, Any]]) -> tuple[ToolSchema, ...]:
    try:
        tools = tool_schemas([_tool(value, f"tools[{i}]") for i, value in enumerate(values)])
    except RequestError as error:
        raise ApiError(400, str(error), param="tools") from None
    check_names(tools)
    return tools


def _tool(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A tool as the model is to see it. A tool that nobody would run is refused."""
    kind = value.get("type")
    if "input_schema" in value or kind in (None, "custom"):
        return {key: item for key, item in value.items() if key not in _HIDDEN_TOOL_KEYS}
    if kind != "function" and not (str(kind).startswith(_SCHEMALESS_TOOLS) and "name" in value):
        raise refuse(where, f"a tool of type {kind!r} does not run here; send tools that the client runs")
    return value


# ---- the conversation -----------------------------------------------------------------------------------------------


def _system(value: str | Sequence[object] | None, where: str = "system", param: str = "system") -> str:
    """A system text, without the lines that change with every request; its parts on lines of their own."""
    system = ""
    for i, block in enumerate([value] if isinstance(value, str) else value or ()):
        text = _system_text(block, f"{where}[{i}]", param)
        system += f"\n{text}" if text and system and not system.endswith("\n") else text
    return system


def _system_text(block: object, where: str, param: str) -> str:
    if isinstance(block, Mapping):
        kind = block.get("type", "text")
        if kind != "text":
            raise ApiError(400, f"{where} has type {kind!r}; a system text is made of text", param=param)
        block = _string(block, "text", where, param)
    if not isinstance(block, str):
        raise ApiError(400, f"{where}: expected a string or a text block", param=param)
    headers = _HEADER_LINES.match(block)
    return block[headers.end() :] if headers else block


def _messages(values: Sequence[Mapping[str, Any]]) -> list[Message]:
    """All messages; neighbours of the assistant's are one, and an empty last one of it is none."""
    messages: list[Message] = []
    read = [_message(value, f"messages[{i}]") for i, value in enumerate(values)]
    for role, group in groupby(read, lambda message: message.role):
        run = list(group)
        messages += [_joined(run)] if role == "assistant" else run
    if messages[-1].role == "assistant" and not messages[-1].tool_calls and not messages[-1].text.strip():
        messages.pop()
    if not any(message.role == "user" for message in messages):
        raise ApiError(400, "messages: at least one message of the user is needed", param="messages")
    return messages


def _message(value: Mapping[str, Any], where: str) -> Message:
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role is {role!r}; use user or assistant", param="messages")
    if not isinstance(content, str | list):
        raise ApiError(400, f"{where}.content: expected a string or a list of blocks", param="messages")
    if role == "system":
        return Message(role="system", content=_system(content, f"{where}.content", "messages"))
    blocks = [content] if isinstance(content, str) else content
    if role == "user":
        return Message(role="user", content=tuple(_user_parts(blocks, f"{where}.content")))
    return _assistant(blocks, f"{where}.content")


def _joined(messages: Sequence[Message]) -> Message:
    """One of the assistant's messages that says what all of them say."""
    return Message(
        reasoning="".join(message.reasoning for message in messages),
        content="".join(message.text for message in messages),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def _user_parts(blocks: Sequence[object], where: str) -> list[Part]:
    """What a user says: texts and results of calls, in their order. Each is a part of its own.

    So the prompt does not depend on whether a client sends them in one message or in several.
    """
    parts: list[Part] = []
    for i, block in enumerate(blocks):
        kind, values = _block(block, f"{where}[{i}]", _USER_BLOCKS, "user")
        if kind == "text":
            text = _string(values, "text", f"{where}[{i}]")
            parts += [Part("text", text)] if text else []
        else:
            id = _string(values, "tool_use_id", f"{where}[{i}]")
            content = _result_parts(values.get("content"), f"{where}[{i}].content")
            parts.append(Part("tool_result", tool_call_id=id, parts=content))
    return parts


def _result_parts(content: object, where: str) -> tuple[Part, ...]:
    """The content of a result. What is no text stays as its kind: it cannot be taken back from the conversation."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Part("text", content),)
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a string or a list of blocks", param="messages")
    parts: list[Part] = []
    for i, block in enumerate(content):
        kind, values = _block(block, f"{where}[{i}]")
        if kind == "text":
            parts.append(Part("text", _string(values, "text", f"{where}[{i}]")))
        elif kind == "tool_reference":
            parts.append(Part("text", _string(values, "tool_name", f"{where}[{i}]")))
        else:
            parts.append(Part(kind))
    return tuple(parts)


def _assistant(blocks: Sequence[object], where: str) -> Message:
    reasoning, text, calls = "", "", []
    for i, block in enumerate(blocks):
        kind, values = _block(block, f"{where}[{i}]", _ASSISTANT_BLOCKS, "assistant")
        if kind == "text":
            text += _string(values, "text", f"{where}[{i}]")
        elif kind == "thinking":
            reasoning += _string(values, "thinking", f"{where}[{i}]")
        elif kind == "tool_use":
            calls.append(_call(values, f"{where}[{i}]"))
    return Message(reasoning, text, tuple(calls))


def _call(values: Mapping[str, Any], where: str) -> ToolCall:
    name = _string(values, "name", where)
    id = _string(values, "id", where)
    if not name:
        raise ApiError(400, f"{where}.name is empty", param="messages")
    arguments = values.get("input")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ApiError(400, f"{where}.input: expected an object", param="messages")
    try:
        return ToolCall(name, json_text.dumps(arguments, compact=True), id)
    except json_text.NotJsonError as error:
        raise ApiError(400, f"{where}.input cannot be written as JSON: {error}", param="messages") from None


def _block(
    block: object, where: str, allowed: Sequence[str] | None = None, role: str = ""
) -> tuple[str, Mapping[str, Any]]:
    """The type of a block and its members; a string is a text block. Raises ApiError for what is not allowed."""
    if isinstance(block, str):
        return "text", {"text": block}
    if not isinstance(block, Mapping):
        raise ApiError(400, f"{where}: expected an object", param="messages")
    kind = _string(block, "type", where)
    if allowed is not None and kind not in allowed:
        raise ApiError(
            400,
            f"{where} has type {kind!r}, which is not supported: {role} messages hold {', '.join(allowed)}",
            param="messages",
            code="unsupported_parameter",
        )
    return kind, block


def _string(values: Mapping[str, Any], key: str, where: str, param: str = "messages") -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{key}: expected a string", param=param)
    return value


def _prefill(message: Message, index: int, thinking: bool, template: str) -> Message:
    """The last message as the beginning of the answer. Raises ApiError where an answer cannot be continued."""
    why = ""
    if message.tool_calls:
        why = "its tool calls have no results; send them in a message of the user"
    elif thinking:
        why = "the model thinks before it answers; switch thinking off to give the beginning of its answer"
    elif template != "official":
        why = f"the chat template {template!r} cannot continue an answer"
    if why:
        raise ApiError(400, f"messages[{index}] is the assistant's and the last: {why}", param="messages")
    return replace(message, reasoning="", open_end=True)


# ---- the answer -----------------------------------------------------------------------------------------------------


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as this API writes them: its input tokens are those that were not reused."""
    return {
        "input_tokens": max(0, usage.prompt - usage.reused),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.reused,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


class MessagesAnswer:
    """An answer as this API writes it (see `ds4.server.api.base.Answer`): blocks one after the other."""

    keep_alive = frame({"type": "ping"}, "ping")

    def __init__(self, model: str, show_thinking: bool = True) -> None:
        self._id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._show_thinking = show_thinking
        self._index = 0
        self._open = ""  # the type of the open block
        self._visible = False  # there was more than thinking

    def whole(self, ends: Sequence[Done]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        (reply,) = ends
        answer = reply.whole
        if reply.reason == "error" and not (answer.text or answer.tool_calls):
            raise malformed(reply)
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            thinking = answer.reasoning if self._show_thinking else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": self._id})
        if answer.text or not answer.tool_calls:
            content.append({"type": "text", "text": answer.text})
        content += [{**_tool_use(call.id, call.name), "input": _input(call)} for call in answer.tool_calls]
        return {**self._message(content, reply.usage), **_stop(reply)}

    def opened(self) -> bytes:
        """Nothing: the first event has the token counts."""
        return b""

    def admitted(self, reply: Admitted) -> bytes:
        """The start of the message."""
        message = {**self._message([], reply.usage), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def events(self, reply: Events) -> bytes:
        """One event or more for each that is visible on this API."""
        frames = b""
        for event in reply.events:
            if isinstance(event, ReasoningDelta):
                frames += self._block({"type": "thinking", "thinking": "", "signature": ""})
                if self._show_thinking:
                    frames += self._delta("thinking_delta", thinking=event.text)
            elif isinstance(event, TextDelta):
                frames += self._block({"type": "text", "text": ""}) + self._delta("text_delta", text=event.text)
            elif isinstance(event, CallBegin):
                frames += self._block({**_tool_use(reply.call_ids[event.index], event.name), "input": {}})
            elif isinstance(event, ArgumentsDelta):
                frames += self._delta("input_json_delta", partial_json=event.text)
            elif isinstance(event, CallEnd):
                frames += self._close()
        return frames

    def done(self, reply: Done) -> bytes:
        """The end of the last block, why the answer ended, and the token counts."""
        if reply.reason == "error":
            return self._close() + self.failed(malformed(reply))
        frames = self._close()
        if not self._visible:
            frames += self._block({"type": "text", "text": ""}) + self._close()
        return (
            frames
            + _event("message_delta", delta=_stop(reply), usage=usage_object(reply.usage))
            + _event("message_stop")
        )

    def failed(self, error: ApiError) -> bytes:
        """An error event; nothing follows it."""
        return frame(error.anthropic(), "error")

    def _message(self, content: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": usage_object(usage)}

    def _block(self, block: Mapping[str, Any]) -> bytes:
        """The start of a block, unless it is open already."""
        if self._open == block["type"]:
            return b""
        frames = self._close()
        self._open = block["type"]
        self._visible = self._visible or self._open != "thinking"
        return frames + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **values: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **values})

    def _close(self) -> bytes:
        """The end of the open block, if one is open."""
        if not self._open:
            return b""
        # What the signature proves elsewhere nobody checks here; clients want one.
        frames = self._delta("signature_delta", signature=self._id) if self._open == "thinking" else b""
        frames += _event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1
        return frames


def _event(kind: str, **values: Any) -> bytes:
    return frame({"type": kind, **values}, kind)


def _tool_use(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name}


def _stop(reply: Done) -> dict[str, str | None]:
    """Why the answer ended. Calls that cannot be read are text in a whole answer, and text is a normal end."""
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.reason, "end_turn")
    if reply.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}


def _input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as an object; what is none is empty."""
    try:
        value = json.loads(call.arguments, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(number: str) -> float:
    """A number as JSON can hold it: the largest one stands for those that are larger."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


API = Api(
    "/v1/messages",
    "An answer to a conversation, as Anthropic's clients expect it",
    MessagesRequest,
    parse,
    "messages",
    True,
    "output_config.format",
)
