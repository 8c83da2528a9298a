"""The body of a text completion request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ds4.server.api.chat_types import Count, OpenAIRequest, StreamOptions, Whole


class CompletionRequest(OpenAIRequest):
    """A text completion request."""

    prompt: str | list[Any] = Field(description="The text to answer or to continue; an array may hold one text.")
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: str | None = None
    n: Whole | None = None
    logprobs: bool | Whole | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    best_of: Whole | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
