"""The body of a Responses request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Any

from ds4.server.api.chat_types import Body, Count, OpenAIRequest, Whole


class ReasoningOption(Body):
    """How hard to think, and whether the reasoning is shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def shown(self) -> str | None:
        """The kind of summary that the client wants to see, all of which are the reasoning itself; None: none."""
        kinds = ("auto", "concise", "detailed")
        return next((kind for kind in (self.summary, self.generate_summary) if kind in kinds), None)


class TextOption(Body):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(OpenAIRequest):
    """A Responses request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    max_tokens: Count | None = None
    reasoning: ReasoningOption | None = None
    text: TextOption | None = None
    include: Any = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    # They change nothing and come back as they were sent.
    metadata: Any = None
    store: Any = None
    max_tool_calls: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
