"""The body of a chat completion request, and what the other APIs share of it: each field with its type."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _truncated(value: object) -> object:
    """Numbers for whole-number fields: fractions are cut off."""
    return int(value) if isinstance(value, float) and abs(value) < 2**63 else value


def _count(value: object) -> object:
    """The same, and negative ones count as 0: some clients write -1 for "none"."""
    value = _truncated(value)
    return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else value


def _seed(value: object) -> object:
    """The same, of all numbers that a seed may be."""
    return int(value) if isinstance(value, float) and abs(value) < 2**64 else value


Whole = Annotated[int, BeforeValidator(_truncated)]
Count = Annotated[int, BeforeValidator(_count)]
Seed = Annotated[int, BeforeValidator(_seed)]


class Body(BaseModel):
    """A part of a request: types are not converted, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ThinkingOption(Body):
    """Thinking as an object; kinds other than enabled and disabled leave the default."""

    type: str | None = None


class OpenAIRequest(Body):
    """What OpenAI's APIs have in common, with the fields of this server's sampling and thinking."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Count | None = None
    seed: Seed | None = None
    stream: bool | None = None
    thinking: bool | ThinkingOption | None = None
    think: bool | None = None
    n: Whole | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class ChatCompletionRequest(OpenAIRequest):
    """A chat completion request."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
