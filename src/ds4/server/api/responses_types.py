"""The body of a Responses request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ds4.server.api.chat_types import Count, ThinkingOption, Truncated


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class ReasoningOption(_Body):
    """How hard to think, and whether the reasoning is shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def shown(self) -> str | None:
        """The kind of summary that the client wants to see, all of which are the reasoning itself; None: none."""
        kinds = ("auto", "concise", "detailed")
        return next((kind for kind in (self.summary, self.generate_summary) if kind in kinds), None)


class TextOption(_Body):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(_Body):
    """OpenAI's request, with the fields of this server's sampling and thinking. Unknown fields are ignored."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Count | None = None
    seed: Truncated | None = None
    stream: bool | None = None
    reasoning: ReasoningOption | None = None
    thinking: bool | ThinkingOption | None = None
    think: bool | None = None
    text: TextOption | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    n: Truncated | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    top_logprobs: Truncated | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # They change nothing and come back as they were sent.
    metadata: Any = None
    store: Any = None
    max_tool_calls: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
