"""JSON written the way the chat format wants it, without touching what a number looks like.

`json.loads` followed by `json.dumps` would turn 1.50 into 1.5 and 1e999 into Infinity. Here numbers keep their
characters, so a tool argument survives any number of trips through a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Deeper values are nobody's tool arguments; the limit keeps us away from Python's recursion limit.
MAX_DEPTH = 256

_SURROGATE = re.compile("[\ud800-\udfff]")


class _Number(str):
    """The characters of a JSON number."""

    __slots__ = ()


class NotJsonError(ValueError):
    """Text that is not one JSON value (or nested deeper than MAX_DEPTH)."""


def _refuse_constant(name: str) -> Any:
    raise NotJsonError(f"{name} is not JSON")


def loads(text: str) -> Any:
    """Parse one JSON value; numbers stay text. Of equal keys the last one wins. Raises NotJsonError."""
    try:
        return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NotJsonError(str(error)) from None


def dump_string(text: str) -> str:
    """Return `text` as a JSON string, non-ASCII raw; halves of surrogate pairs are escaped, as UTF-8 has no such."""
    quoted = json.dumps(text, ensure_ascii=False)
    if quoted.isascii():
        return quoted
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)


def dumps(value: Any, *, compact: bool = False, depth: int = 0) -> str:
    """Write a value of `loads`, or any plain Python value, as JSON.

    Separators are `, ` and `: ` (compact: `,` and `:`), key order is kept, non-ASCII stays raw. Raises NotJsonError for
    what JSON cannot hold.
    """
    if depth > MAX_DEPTH:
        raise NotJsonError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, str):
        return dump_string(value)
    comma, colon = (",", ":") if compact else (", ", ": ")
    if isinstance(value, Mapping):
        pairs = (
            f"{_dump_key(key)}{colon}{dumps(item, compact=compact, depth=depth + 1)}" for key, item in value.items()
        )
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(dumps(item, compact=compact, depth=depth + 1) for item in value) + "]"
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NotJsonError(str(error)) from None


def _dump_key(key: object) -> str:
    if not isinstance(key, str):
        raise NotJsonError(f"the key {key!r} is not a string")
    return dump_string(key)


def arguments_object(arguments: str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call as a dict whose numbers are text, or None if they are not one JSON object."""
    try:
        # A mapping goes through text as well, so that both spellings of a call come out the same.
        value = loads(arguments if isinstance(arguments, str) else dumps(arguments))
        dumps(value)
    except NotJsonError:
        return None
    return value if isinstance(value, dict) else None


def argument_items(arguments: str, compact: bool) -> list[tuple[str, bool, str]] | None:
    """Return name, whether the value is a string, and the string or the value's JSON text, for each argument.

    None if the text is not one JSON object.
    """
    try:
        value = loads(arguments)
        if not isinstance(value, dict):
            return None
        return [
            (name, is_string(item), str(item) if is_string(item) else dumps(item, compact=compact, depth=1))
            for name, item in value.items()
        ]
    except NotJsonError:
        return None


def is_string(value: Any) -> bool:
    """Whether a value of `loads` is a JSON string (numbers are kept as text, but are no strings)."""
    return isinstance(value, str) and not isinstance(value, _Number)
