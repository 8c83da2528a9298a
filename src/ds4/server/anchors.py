"""Anchors as JSON, so that a stored state can be continued by what clients show of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ds4.chat.message import ToolCall
from ds4.server.slots import Anchor, Prefix

MAX_ANCHORS = 64
"""The last answers of a conversation whose anchors are kept."""


def anchor_values(anchors: Sequence[Anchor]) -> list[dict[str, Any]]:
    """The last anchors as JSON values."""
    return [
        {
            "front": _prefix(a.front), "bare": _prefix(a.bare), "ids": a.ids.hex(), "opened": a.opened, "held": a.held,
            "reasoning": a.reasoning.hex(), "shown": None if a.shown is None else _prefix(a.shown),
            "content": a.content.hex(), "calls": [[call.id, call.name, call.arguments] for call in a.calls],
            "tokens": a.tokens, "extra": list(a.extra),
        }
        for a in _last(anchors)
    ]  # fmt: skip


def ways(anchors: Sequence[Anchor]) -> list[list[Any]]:
    """How prompts that show less than the state holds find it: by the front of its last answer, with reasoning or not.

    A stored state is continued as a whole, and a prompt that does so shows that answer.
    """
    return [way for a in _last(anchors)[-1:] for way in (["front", *_prefix(a.front)], ["bare", *_prefix(a.bare)])]


def read_anchors(meta: Mapping[str, Any], tokens: int, vocab: int) -> list[Anchor]:
    """The inverse of `anchor_values`, in the notes of a state of so many tokens; what makes no sense is left out.

    `vocab`: how many ids there are.
    """
    found: list[Anchor] = []
    values = meta.get("anchors")
    for value in values if isinstance(values, list) else ():
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, OverflowError):
            anchor = Anchor(
                front=_read_prefix(value["front"]),
                bare=_read_prefix(value["bare"]),
                ids=bytes.fromhex(value["ids"]),
                opened=int(value["opened"]),
                held=int(value["held"]),
                reasoning=bytes.fromhex(value["reasoning"]),
                shown=None if value["shown"] is None else _read_prefix(value["shown"]),
                content=bytes.fromhex(value["content"]),
                calls=tuple(ToolCall(str(name), str(arguments), str(id)) for id, name, arguments in value["calls"]),
                tokens=int(value["tokens"]),
                extra=tuple(int(id) for id in value["extra"]),
            )
            numbers = (anchor.opened, anchor.held, anchor.front.length, anchor.bare.length)
            if 0 < anchor.tokens <= tokens and min(numbers) >= 0 and all(0 <= id < vocab for id in anchor.extra):
                found.append(anchor)
    return found


def read_length(meta: Mapping[str, Any], tokens: int) -> int:
    """How many of a state's tokens were read from a prompt, by its notes; all where they do not say."""
    value = meta.get("read")
    return value if type(value) is int and 0 <= value <= tokens else tokens


def _last(anchors: Sequence[Anchor]) -> list[Anchor]:
    return sorted(anchors, key=lambda anchor: anchor.tokens)[-MAX_ANCHORS:]


def _prefix(prefix: Prefix) -> list[Any]:
    return [prefix.length, prefix.digest.hex()]


def _read_prefix(value: Sequence[Any]) -> Prefix:
    length, digest = value
    return Prefix(int(length), bytes.fromhex(digest))
