"""OpenAI's Responses API: the request in, the events out. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event, ReasoningDelta, TextDelta
from ds4.chat.message import Message
from ds4.chat.tools import ToolSchema, tool_schemas
from ds4.errors import RequestError
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.common import check_effort, malformed, openai_thinking, refuse, sampling_of, validate
from ds4.server.api.demands import calls_of, check_names, format_of
from ds4.server.api.responses_input import found_tools, read_input
from ds4.server.api.responses_output import OutputWriter, WireEvent, new_id
from ds4.server.api.responses_types import ReasoningOption, ResponsesRequest
from ds4.server.api.results import RESPONSES_WORDS, complete_history, previous_turn
from ds4.server.api.token_logprobs import check_top
from ds4.server.bodies import frame
from ds4.server.constraints import Schema, strict_names
from ds4.server.errors import ApiError
from ds4.server.request import Admitted, ChatRequest, Done, Events, Usage


def parse(value: Mapping[str, Any], context: ApiContext) -> Ask:
    """The request in the terms of the chat format. Raises ApiError 400 that names the field, and 409."""
    config = context.config
    if value.get("input") is None:
        raise ApiError(400, "missing input", param="input")
    body = validate(ResponsesRequest, value)
    _check_supported(body)
    given = read_input(body.input)
    earlier: tuple[Message, ...] = ()
    if body.previous_response_id:
        earlier = previous_turn(context.turns, body.previous_response_id).messages
    if not (earlier or given.messages):
        raise ApiError(400, "input is empty: it needs at least one message", param="input")
    front = (Message(role="system", content=body.instructions),) if body.instructions else ()
    messages = (*front, *earlier, *given.messages)
    messages = complete_history(messages, len(front), context.turns, RESPONSES_WORDS)
    own = _tools(body.tools, "tools")
    check_names(own)
    tools = _with_found(own, given.tools, messages[: len(messages) - len(given.messages)])
    calls = calls_of(body.tool_choice, tools)
    reasoning = body.reasoning or ReasoningOption()
    effort = check_effort(reasoning.effort, config, "reasoning.effort")
    request = ChatRequest(
        model=body.model or context.model,
        messages=messages,
        tools=tools,
        calls_allowed=calls.allowed,
        parallel_calls=body.parallel_tool_calls is not False,
        thinking=openai_thinking(body, effort, config),
        forced=calls.forced,
        callable=calls.names,
        strict=strict_names(tools, config.strict_tools),
        content_schema=_format(body),
        effort=effort,
        sampling=sampling_of(body, context.vocab),
        logprobs=_logprobs(body),
        max_tokens=body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
        streamed=bool(body.stream),
        response_id=new_id("resp_"),
        front=len(front),
        remembered=True,
    )
    echo = _echo(body, request)
    return Ask(request, bool(body.stream), lambda number: ResponsesAnswer(echo, tools, reasoning.shown is not None))


def _check_supported(body: ResponsesRequest) -> None:
    """Refuse what would silently be missing from the answer."""
    if body.background:
        raise refuse("background", "the answer comes in the reply to its request; set stream to see it grow")
    if body.conversation is not None:
        raise refuse("conversation", "continue with previous_response_id, or replay the full input")
    if body.prompt is not None:
        raise refuse("prompt", "this server keeps no prompt templates; send input and instructions")
    if body.n is not None and body.n != 1:
        raise refuse("n", "a response is one answer; send several requests")


def _format(body: ResponsesRequest) -> Schema | None:
    """The schema of the text; clients of chat's habits write the field as there."""
    given = format_of(body.text.format if body.text else None, "text.format")
    return format_of(body.response_format, "response_format", nested=True) if given is None else given


def _logprobs(body: ResponsesRequest) -> int | None:
    """How many alternatives each token comes with; None: the tokens are not wanted."""
    top = check_top(body.top_logprobs, "top_logprobs")
    included = isinstance(body.include, list) and "message.output_text.logprobs" in body.include
    return top if top or included or body.logprobs else None


def _tools(tools: Sequence[Mapping[str, Any]] | None, param: str) -> tuple[ToolSchema, ...]:
    try:
        return tool_schemas(tools)
    except RequestError as error:
        raise ApiError(400, str(error), param=param) from None


def _with_found(
    tools: tuple[ToolSchema, ...], found: Sequence[Mapping[str, Any]], remembered: Sequence[Message]
) -> tuple[ToolSchema, ...]:
    """The tools, and behind them those that searches have found, each once."""
    if any(tool.kind == "tool_search" for tool in tools):
        found = (*found_tools(remembered), *found)
    known = {tool.name for tool in tools}
    more: dict[str, ToolSchema] = {}
    for tool in _tools(found, "input"):
        if tool.name not in known:
            more.setdefault(tool.name, tool)
    return (*tools, *more.values())


# ---- the answer -----------------------------------------------------------------------------------------------------


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as this API writes them."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.reused,
            "cache_write_tokens": max(0, usage.prompt - usage.reused),
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _echo(body: ResponsesRequest, request: ChatRequest) -> dict[str, Any]:
    """What a response says about its request."""
    reasoning = body.reasoning or ReasoningOption()
    verbosity = body.text.verbosity if body.text else None
    return {
        "id": request.response_id,
        "object": "response",
        "model": request.model,
        "previous_response_id": body.previous_response_id or None,
        "instructions": body.instructions,
        "tools": [_tool_object(tool) for tool in body.tools or ()],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_calls,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.shown},
        "text": {"format": _format_object(body), **({"verbosity": verbosity} if verbosity else {})},
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "presence_penalty": request.sampling.presence_penalty,
        "frequency_penalty": request.sampling.frequency_penalty,
        "top_logprobs": request.logprobs or 0,
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": body.max_tool_calls if type(body.max_tool_calls) is int else None,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": body.store is not False,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "user": _text(body.user),
        "safety_identifier": _text(body.safety_identifier),
        "prompt_cache_key": _text(body.prompt_cache_key),
    }


def _format_object(body: ResponsesRequest) -> Mapping[str, Any]:
    """The format of the text as a response shows it."""
    given = (body.text.format if body.text else None) or body.response_format or {}
    inner = given.get("json_schema")
    return {"type": "text", **({"type": "json_schema", **inner} if isinstance(inner, Mapping) else given)}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _tool_object(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as a response shows it: of a function all fields are there, also if it came in the shape for chat."""
    if tool.get("type", "function") != "function":
        return dict(tool)
    function = tool.get("function")
    fields = {"type": "function", "description": None, "parameters": None, "strict": None}
    return {**fields, **(function if isinstance(function, Mapping) else tool)}


class ResponsesAnswer:
    """An answer as this API writes it (see `ds4.server.api.base.Answer`)."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, echo: Mapping[str, Any], tools: Sequence[ToolSchema], reasoning_shown: bool) -> None:
        """`echo`: the fields of the response that repeat its request."""
        self._base = {**echo, "created_at": int(time.time())}
        self._writer = OutputWriter(tools, reasoning_shown)
        self._sequence = 0

    def whole(self, ends: Sequence[Done]) -> dict[str, Any]:
        """The body of an answer that is not streamed: the same items as a stream has."""
        (reply,) = ends
        answer = reply.whole
        # Calls that cannot be read are text here, and text is a normal end.
        unreadable = reply.reason == "error" and answer.text != reply.message.text
        self._writer.write(_events_of(answer), [call.id for call in answer.tool_calls], reply.logprobs)
        if reply.reason == "error" and not unreadable:
            self._writer.abandon()
            return self._failure(malformed(reply).message, reply.usage)
        self._writer.end(answer, reply.reason == "length")
        return self._end(reply)

    def opened(self) -> bytes:
        """The event that names the response."""
        return self._frames([("response.created", {"response": self._response("in_progress")})])

    def admitted(self, reply: Admitted) -> bytes:
        """The event that says that the work has begun."""
        return self._frames([("response.in_progress", {"response": self._response("in_progress")})])

    def events(self, reply: Events) -> bytes:
        """The events of the items."""
        return self._frames(self._writer.write(reply.events, reply.call_ids, reply.logprobs))

    def done(self, reply: Done) -> bytes:
        """The end of the last item, and the whole response."""
        if reply.reason == "error":
            return self._failed(malformed(reply).message, reply.usage)
        events = self._writer.end(reply.message, reply.reason == "length")
        response = self._end(reply)
        return self._frames([*events, (f"response.{response['status']}", {"response": response})])

    def failed(self, error: ApiError) -> bytes:
        """The response with its error; nothing follows it."""
        # The API has no other word for a request that is at fault.
        return self._failed(error.message, None, "server_error" if error.status >= 500 else "invalid_prompt")

    def _failed(self, message: str, usage: Usage | None, code: str = "server_error") -> bytes:
        events = self._writer.abandon()
        return self._frames([*events, ("response.failed", {"response": self._failure(message, usage, code)})])

    def _failure(self, message: str, usage: Usage | None, code: str = "server_error") -> dict[str, Any]:
        return self._response("failed", usage, error={"code": code, "message": message})

    def _end(self, reply: Done) -> dict[str, Any]:
        if reply.reason == "length":
            return self._response("incomplete", reply.usage, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", reply.usage, completed_at=int(time.time()))

    def _response(self, status: str, usage: Usage | None = None, **fields: Any) -> dict[str, Any]:
        return {
            **self._base,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": self._writer.items(),
            "usage": None if usage is None else usage_object(usage),
            **fields,
        }

    def _frames(self, events: Sequence[WireEvent]) -> bytes:
        frames = []
        for kind, fields in events:
            frames.append(frame({"type": kind, "sequence_number": self._sequence, **fields}, event=kind))
            self._sequence += 1
        return b"".join(frames)


def _events_of(message: Message) -> list[Event]:
    """The events that add up to a message."""
    events: list[Event] = [ReasoningDelta(message.reasoning), TextDelta(message.text)]
    for i, call in enumerate(message.tool_calls):
        events += [CallBegin(i, call.name), ArgumentsDelta(i, call.arguments), CallEnd(i)]
    return events


API = Api(
    "/v1/responses", "An answer to a conversation of items", ResponsesRequest, parse, "input", format="text.format"
)
