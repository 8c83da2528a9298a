"""The body of a Messages request: the fields that are read, each with its type."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ds4.server.api.chat_types import Body, Count


class ThinkingConfig(Body):
    """Thinking: `enabled` or `adaptive`, and `disabled`; other kinds leave the default. With `display` `omitted` the
    thinking is not shown."""

    type: str | None = None
    display: str | None = None


class OutputConfig(Body):
    """How hard to think, and the format of the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Body):
    """Whether tools may or have to be called, which one, and whether several at once."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Body):
    """Anthropic's request. Unknown fields are ignored."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[str | dict[str, Any]] | None = None
    model: str | None = None
    max_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop_sequences: str | list[str] | None = None
    stream: bool | None = None
    thinking: bool | ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    reasoning_effort: str | None = None
    output_format: dict[str, Any] | None = None

    # Read only to refuse what cannot be done: an answer without it would not be what was asked for.
    mcp_servers: list[Any] | None = None
