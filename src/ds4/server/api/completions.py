"""OpenAI's text completions: a prompt in, text out. The prompt is a user's message, or, raw, continued as it stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ds4.chat.events import TextDelta
from ds4.chat.message import Message
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.chat import usage_object
from ds4.server.api.common import check_effort, count_of, openai_thinking, refuse, sampling_of, stops_of, validate
from ds4.server.api.completions_types import CompletionRequest
from ds4.server.api.token_logprobs import CompletionLogprobs, check_top
from ds4.server.bodies import frame
from ds4.server.errors import ApiError
from ds4.server.logprobs import TokenLogprob
from ds4.server.request import Admitted, ChatRequest, Done, Events

_SYSTEM = "You are a helpful assistant"


def parse(value: Mapping[str, Any], context: ApiContext) -> Ask:
    """The request in the terms of the chat format. Raises ApiError 400 that names the field."""
    config = context.config
    if value.get("prompt") is None:
        raise ApiError(400, "missing prompt", param="prompt")
    body = validate(CompletionRequest, value)
    _check_supported(body)
    prompt = _prompt(body.prompt)
    raw = config.raw_completions
    effort = check_effort(body.reasoning_effort, config, "reasoning_effort")
    request = ChatRequest(
        model=body.model or context.model,
        messages=() if raw else (Message(role="system", content=_SYSTEM), Message(role="user", content=prompt)),
        # A raw prompt has no turns that could begin with reasoning.
        thinking=not raw and openai_thinking(body, effort, config),
        effort=effort,
        sampling=sampling_of(body, context.vocab),
        logprobs=_logprobs(body),
        n=count_of(body.n, config),
        max_tokens=body.max_tokens,
        stop=stops_of(body.stop),
        streamed=bool(body.stream),
        text=prompt if raw else None,
    )
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Ask(request, bool(body.stream), lambda number: CompletionAnswer(number, request, include_usage))


def _logprobs(body: CompletionRequest) -> int | None:
    """How many alternatives each token comes with; 0 and true: none; None: the tokens are not wanted."""
    if body.logprobs is None or body.logprobs is False:
        return None
    return 0 if body.logprobs is True else check_top(body.logprobs, "logprobs")


def _prompt(prompt: str | list[Any]) -> str:
    """The text of a prompt, which may come as an array of one."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    if prompt and all(isinstance(item, str) for item in prompt):
        raise refuse("prompt", f"it has {len(prompt)} texts; send one request for each")
    if prompt and all(isinstance(item, int | list) for item in prompt):
        raise refuse("prompt", "this server does not take token ids; send the text")
    raise ApiError(400, "prompt must be a text, or an array with one text", param="prompt")


def _check_supported(body: CompletionRequest) -> None:
    """Refuse what would silently be missing from the answer."""
    if body.best_of not in (None, body.n or 1):
        raise refuse("best_of", "all n answers are given")
    if body.echo:
        raise refuse("echo", "the answer is only what follows the prompt")
    if body.response_format not in (None, {"type": "text"}):
        raise refuse("response_format", "texts with a form are answers of /v1/chat/completions and /v1/responses")
    if body.suffix:
        raise refuse("suffix", "the model cannot fill a gap")


# ---- the answer -----------------------------------------------------------------------------------------------------


class CompletionAnswer:
    """An answer as this API writes it (see `ds4.server.api.base.Answer`). Reasoning is not shown."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, number: int, request: ChatRequest, include_usage: bool) -> None:
        head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time())}
        self._base = {**head, "model": request.model}
        self._logprobs = (
            [] if request.logprobs is None else [CompletionLogprobs(request.logprobs) for _ in range(request.n)]
        )
        self._include_usage = include_usage

    def whole(self, ends: Sequence[Done]) -> dict[str, Any]:
        """The body of the answers that are not streamed."""
        choices = [
            self._choice(end.index, end.whole.text, end.reason, self._written(end.index, end.logprobs)) for end in ends
        ]
        usage = usage_object(min(ends, key=lambda end: end.left).usage)
        return {**self._base, "choices": choices, "usage": usage}

    def opened(self) -> bytes:
        """Nothing."""
        return b""

    def admitted(self, reply: Admitted) -> bytes:
        """Nothing."""
        return b""

    def events(self, reply: Events) -> bytes:
        """One chunk for each piece of text."""
        chunks, tokens = [], reply.logprobs
        for event in reply.events:
            if isinstance(event, TextDelta):
                chunks.append(self._chunk(reply.index, event.text, tokens=tokens))
                tokens = ()
        return b"".join(chunks)

    def done(self, reply: Done) -> bytes:
        """The finish, the usage if it was asked for, and the end mark."""
        frames = self._chunk(reply.index, "", reply.reason)
        if reply.left:
            return frames
        if self._include_usage:
            frames += frame({**self._base, "choices": [], "usage": usage_object(reply.usage)})
        return frames + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """An error event; nothing follows it."""
        return frame(error.openai())

    def _chunk(self, index: int, text: str, finish: str | None = None, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        told = self._written(index, tokens) if tokens else None
        return frame({**self._base, "choices": [self._choice(index, text, finish, told)], **usage})

    def _written(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._logprobs[index].write(tokens) if self._logprobs else None

    def _choice(self, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


API = Api("/v1/completions", "An answer to one prompt", CompletionRequest, parse, "prompt")
