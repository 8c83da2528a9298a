"""The models a client can name. One model is loaded; all known names mean it."""

from __future__ import annotations

from typing import Any

from ds4.server.config import ServerConfig

CREATED = 1_767_225_600
"""2026-01-01, as a fixed date: a model list should not change from call to call."""

_CREATED_AT = "2026-01-01T00:00:00Z"

NAMES = {"tiny": "ds4-tiny", "flash": "deepseek-v4-flash", "pro": "deepseek-v4-pro"}

_PARAMETERS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "seed",
    "stream",
    "reasoning_effort",
)


def model_id(shape_name: str) -> str:
    """The name of a loaded model by its shape."""
    return NAMES.get(shape_name, f"ds4-{shape_name}")


def model_ids(loaded: str) -> list[str]:
    """All names that can be asked for, the loaded model's own first."""
    return [loaded, *(name for name in NAMES.values() if name != loaded)]


def model_object(id: str, loaded: str, context: int, config: ServerConfig) -> dict[str, Any]:
    """The description of the loaded model under one of its names, for clients of OpenAI's and of Anthropic's API."""
    longest = min(config.max_tokens, context)
    return {
        "id": id,
        "object": "model",
        "created": CREATED,
        "owned_by": "ds4",
        "type": "model",
        "display_name": loaded,
        "created_at": _CREATED_AT,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": longest,
        "name": loaded,
        "context_length": context,
        "top_provider": {
            "context_length": context,
            "max_completion_tokens": longest,
            "is_moderated": False,
        },
        "supported_parameters": list(_PARAMETERS),
    }


def model_list(loaded: str, context: int, config: ServerConfig) -> dict[str, Any]:
    """All names of the loaded model, its own first; one page holds them all."""
    ids = model_ids(loaded)
    return {
        "object": "list",
        "data": [model_object(id, loaded, context, config) for id in ids],
        "has_more": False,
        "first_id": ids[0],
        "last_id": ids[-1],
    }
