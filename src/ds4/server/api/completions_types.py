"""The body of a text completion request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ds4.server.api.chat_types import Count, StreamOptions, ThinkingOption, Truncated


class CompletionRequest(BaseModel):
    """OpenAI's request, with the fields of this server's sampling and thinking. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt: str | list[Any] = Field(description="The text to answer or to continue; an array may hold one text.")
    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Count | None = None
    seed: Truncated | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    thinking: bool | ThinkingOption | None = None
    think: bool | None = None
    reasoning_effort: str | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    n: Truncated | None = None
    best_of: Truncated | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: bool | Truncated | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
