"""Bodies of Messages requests, and what they become."""

from __future__ import annotations

from typing import Any

from ds4 import chat
from ds4.server.api.base import ApiContext
from ds4.server.api.messages import parse
from ds4.server.config import ServerConfig
from ds4.server.request import ChatRequest
from ds4.server.turns import TurnMemory

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome", "days": 2}}
OTHER = {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}}
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
HEADER = "x-anthropic-billing-header: cc_version=2.1.37; cch=%s;"


def result(id: str = "toolu_1", content: Any = "sunny", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def request(body: dict[str, Any], turns: TurnMemory | None = None, **options: Any) -> ChatRequest:
    return parse(body, ApiContext(ServerConfig(**options), "ds4-tiny", turns or TurnMemory(), 1024)).request


def prompt(body: dict[str, Any], **options: Any) -> str:
    asked = request(body, **options)
    profile = options.get("template", "official")
    return str(chat.render(asked.messages, asked.tools, asked.thinking, asked.effort, profile))


def dialogue(*messages: dict[str, Any], **options: Any) -> str:
    """The prompt of a conversation behind its first token."""
    return prompt({"messages": list(messages)}, **options).removeprefix(BOS)
