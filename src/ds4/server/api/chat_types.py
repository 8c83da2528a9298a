"""The body of a chat completion request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: object) -> object:
    """Numbers for whole-number fields: fractions are cut off, negative ones count as 0."""
    if isinstance(value, float) and abs(value) < 2**63:
        value = int(value)
    return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else value


def _truncated(value: object) -> object:
    return int(value) if isinstance(value, float) and abs(value) < 2**63 else value


Count = Annotated[int, BeforeValidator(_whole)]
Truncated = Annotated[int, BeforeValidator(_truncated)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ThinkingOption(_Body):
    """Thinking as an object; kinds other than enabled and disabled leave the default."""

    type: str | None = None


class ChatCompletionRequest(_Body):
    """OpenAI's request, with the fields of this server's sampling and thinking. Unknown fields are ignored."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
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
    logprobs: bool | None = None
    top_logprobs: Truncated | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
