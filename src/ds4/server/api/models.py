"""The models a client can name. One model is loaded; all known names mean it."""

from __future__ import annotations

from typing import Any

from ds4.server.config import ServerConfig

CREATED = 1_767_225_600
"""2026-01-01, as a fixed date: a model list should not change from call to call."""

NAMES = {"tiny": "ds4-tiny", "flash": "deepseek-v4-flash", "pro": "deepseek-v4-pro"}

_PARAMETERS = (
    "tools",
    "tool_choice",
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
    """The description of the loaded model under one of its names."""
    return {
        "id": id,
        "object": "model",
        "created": CREATED,
        "owned_by": "ds4",
        "name": loaded,
        "context_length": context,
        "top_provider": {
            "context_length": context,
            "max_completion_tokens": min(config.max_tokens, context),
            "is_moderated": False,
        },
        "supported_parameters": list(_PARAMETERS),
    }
