"""OpenAI's chat completions: the request in, the events out. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds4.chat.events import ArgumentsDelta, CallBegin, ReasoningDelta, TextDelta
from ds4.chat.message import Message, ToolCall, read_message
from ds4.chat.tools import ToolSchema, tool_schemas
from ds4.errors import RequestError
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.chat_types import ChatCompletionRequest
from ds4.server.api.common import (
    check_effort,
    count_of,
    malformed,
    openai_thinking,
    refuse,
    sampling_of,
    stops_of,
    validate,
)
from ds4.server.api.demands import calls_of, check_names, format_of
from ds4.server.api.token_logprobs import check_top, logprob_objects
from ds4.server.bodies import frame
from ds4.server.constraints import strict_names
from ds4.server.errors import ApiError
from ds4.server.logprobs import TokenLogprob
from ds4.server.request import Admitted, ChatRequest, Done, Events, Usage

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def parse(value: Mapping[str, Any], context: ApiContext) -> Ask:
    """The request in the terms of the chat format. Raises ApiError 400 that names the field."""
    config = context.config
    if value.get("messages") is None:
        raise ApiError(400, "missing messages", param="messages")
    body = validate(ChatCompletionRequest, value)
    _check_supported(body)
    tools = _tools(body)
    calls = calls_of(body.tool_choice, tools)
    effort = check_effort(body.reasoning_effort, config, "reasoning_effort")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = ChatRequest(
        model=body.model or context.model,
        messages=_messages(body.messages),
        tools=tools,
        calls_allowed=calls.allowed,
        parallel_calls=body.parallel_tool_calls is not False,
        thinking=openai_thinking(body, effort, config),
        forced=calls.forced,
        callable=calls.names,
        strict=strict_names(tools, config.strict_tools),
        content_schema=format_of(body.response_format, "response_format", nested=True),
        effort=effort,
        sampling=sampling_of(body, context.vocab),
        logprobs=_logprobs(body),
        n=count_of(body.n, config),
        max_tokens=limit,
        stop=stops_of(body.stop),
        streamed=bool(body.stream),
    )
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Ask(request, bool(body.stream), lambda number: ChatAnswer(number, request, include_usage))


def _check_supported(body: ChatCompletionRequest) -> None:
    """Refuse what would silently be missing from the answer."""
    for name in ("functions", "function_call"):
        if getattr(body, name) is not None:
            raise refuse(name, "use tools and tool_choice")
    if body.modalities is not None and set(body.modalities) - {"text"}:
        raise refuse("modalities", "the model reads and writes text only")
    if body.audio is not None:
        raise refuse("audio", "the model reads and writes text only")


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives each token comes with; None: the tokens are not wanted."""
    top = check_top(body.top_logprobs, "top_logprobs")
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return top if body.logprobs else None


def _tools(body: ChatCompletionRequest) -> tuple[ToolSchema, ...]:
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type", "function") != "function":
            raise refuse(f"tools[{i}]", f"a tool of type {tool['type']!r} has no answer here; use functions", "tools")
        if tool.get("function") is None and "name" not in tool:
            raise ApiError(400, f"tools[{i}].function is missing: it describes the function", param="tools")
    try:
        tools = tool_schemas(body.tools)
    except RequestError as error:
        raise ApiError(400, str(error), param="tools") from None
    check_names(tools)
    return tools


def _message(value: Mapping[str, Any], index: int) -> Message:
    where = f"messages[{index}]"
    if value.get("function_call") is not None:
        raise refuse(f"{where}.function_call", "use tool_calls", "messages")
    try:
        message = read_message(value, where)
    except RequestError as error:
        raise ApiError(400, str(error), param="messages") from None
    if message.role not in _ROLES:
        raise ApiError(
            400,
            f"{where}.role {message.role!r} is not known: use system, developer, user, assistant or tool",
            param="messages",
        )
    # The template's own marks are not a client's to set: replayed bytes count as control text.
    message = replace(message, raw_dsml="", task="", open_end=False)
    if isinstance(message.content, str):
        return message
    # What the model once refused to say is no text; anything else that is no text would be missing from the prompt.
    parts = tuple(part for part in message.content if part.type != "refusal")
    for part in parts:
        # A result stays in the conversation for good, and the format has words for what it cannot show of one.
        if part.type != "text" and message.role != "tool":
            raise refuse("messages", f"{where}.content has a part of type {part.type!r}; the model reads text only")
    return replace(message, content=parts)


def _messages(values: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """All messages. Clients of this API write `developer` where they mean the system prompt: ahead of all others it is.

    The format's own developer role is another thing: it is forgotten together with old reasoning.
    """
    messages = [_message(value, i) for i, value in enumerate(values)]
    for i, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            break
        messages[i] = replace(message, role="system")
    return tuple(messages)


# ---- the answer -----------------------------------------------------------------------------------------------------


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as this API writes them."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.reused,
            "cache_write_tokens": max(0, usage.prompt - usage.reused),
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatAnswer:
    """An answer as this API writes it (see `ds4.server.api.base.Answer`)."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, number: int, request: ChatRequest, include_usage: bool) -> None:
        self._base = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": request.model}
        self._logprobs, self._count = request.logprobs is not None, request.n
        self._begun = False
        self._include_usage = include_usage

    def whole(self, ends: Sequence[Done]) -> dict[str, Any]:
        """The body of the answers that are not streamed."""
        usage = usage_object(min(ends, key=lambda end: end.left).usage)
        return {"object": "chat.completion", **self._base, "choices": [*map(self._choice, ends)], "usage": usage}

    def _choice(self, reply: Done) -> dict[str, Any]:
        answer = reply.whole
        # Calls that cannot be read are text here, and text is a normal end.
        unreadable = reply.reason == "error" and answer.text != reply.message.text
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_call_object(call) for call in answer.tool_calls]
        finish = "stop" if unreadable else reply.reason
        logprobs = _logprobs_object(reply.logprobs) if self._logprobs else None
        return {"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def opened(self) -> bytes:
        """Nothing: clients take the first chunk for the end of the prompt's evaluation."""
        return b""

    def admitted(self, reply: Admitted) -> bytes:
        """Nothing."""
        return b""

    def events(self, reply: Events) -> bytes:
        """One chunk for each event that is visible on this API."""
        chunks, tokens = [], reply.logprobs
        for delta in _deltas(reply):
            shown = tokens if "content" in delta else ()
            chunks.append(self._chunk(reply.index, delta, tokens=shown))
            tokens = () if shown else tokens
        return self._roles() + b"".join(chunks) if chunks else b""

    def _roles(self) -> bytes:
        """The chunks that name the roles, before everything else."""
        if self._begun:
            return b""
        self._begun = True
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(self._count))

    def done(self, reply: Done) -> bytes:
        """The finish, the usage if it was asked for, and the end mark."""
        if reply.reason == "error":
            return self.failed(malformed(reply))
        frames = self._roles() + self._chunk(reply.index, {}, reply.reason)
        if reply.left:
            return frames
        if self._include_usage:
            frames += self._frame({"choices": [], "usage": usage_object(reply.usage)})
        return frames + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """An error event; nothing follows it."""
        return frame(error.openai())

    def _chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, tokens: Sequence[TokenLogprob] = ()
    ) -> bytes:
        logprobs = _logprobs_object(tokens) if self._logprobs and tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._frame({"choices": [choice], **({"usage": None} if self._include_usage else {})})

    def _frame(self, value: Mapping[str, Any]) -> bytes:
        return frame({"object": "chat.completion.chunk", **self._base, **value})


def _logprobs_object(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": logprob_objects(tokens), "refusal": None}


def _deltas(reply: Events) -> Sequence[Mapping[str, Any]]:
    deltas: list[Mapping[str, Any]] = []
    for event in reply.events:
        if isinstance(event, ReasoningDelta):
            deltas.append({"reasoning_content": event.text})
        elif isinstance(event, TextDelta):
            deltas.append({"content": event.text})
        elif isinstance(event, CallBegin):
            call = ToolCall(event.name, "", reply.call_ids[event.index])
            deltas.append({"tool_calls": [{"index": event.index, **_call_object(call)}]})
        elif isinstance(event, ArgumentsDelta):
            deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return deltas


API = Api("/v1/chat/completions", "An answer to a conversation", ChatCompletionRequest, parse, "messages")
