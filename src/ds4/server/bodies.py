"""Bodies: reading a request's, writing an answer's, and the frames of a stream."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ds4.server.errors import ApiError

MAX_DEPTH = 256
"""Deepest nesting of a request body."""

MAX_VALUES = 2 << 20
"""Most commas and opening brackets of a request body: in memory a value is far larger than there."""


# `json.dumps` makes one for each value.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGoneError(Exception):
    """The client closed the connection; its job is cancelled."""


def to_json(value: object) -> bytes:
    """A value as JSON in UTF-8; halves of surrogate pairs, which a client may have sent, cannot be in it."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def frame(value: object, event: str = "") -> bytes:
    """One server-sent event with a JSON object as its data, and with a name if one is given."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + to_json(value) + b"\n\n"


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body's bytes."""
        return to_json(content)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises ApiError 413, ClientGoneError."""
    too_large = ApiError(413, f"the request body is larger than {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises ApiError 400 and 413."""
    if not body:
        raise ApiError(400, "invalid JSON request: the body is empty")
    if len(body) > MAX_VALUES and sum(body.count(byte) for byte in b",[{") > MAX_VALUES:
        raise ApiError(413, f"the request body has more than {MAX_VALUES} commas and brackets")
    try:
        value = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ApiError(400, f"invalid JSON request: nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"invalid JSON request: not UTF-8 at byte {error.start}") from None
    except (json.JSONDecodeError, _NumberError) as error:
        raise ApiError(400, f"invalid JSON request: {error}") from None
    except ValueError:
        # The interpreter's limit, as reading them takes time with the square of their length.
        raise ApiError(400, "invalid JSON request: a number has too many digits") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid JSON request: the body must be an object")
    if _depth(value) > MAX_DEPTH:
        raise ApiError(400, f"invalid JSON request: nested deeper than {MAX_DEPTH} levels")
    return value


class _NumberError(ValueError):
    """A number that cannot be used."""


def _refuse(name: str) -> None:
    raise _NumberError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise _NumberError(f"the number {text[:40]} is too large")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [child for child in item.values() if isinstance(child, dict | list)]
            elif isinstance(item, list):
                inner += [child for child in item if isinstance(child, dict | list)]
        level = inner
    return depth
