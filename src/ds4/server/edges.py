"""What holds for every path: API keys, the size of headers, headers for web pages, HEAD, errors in the API's shape."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error
from ds4.server import chat_page
from ds4.server.api.registry import APIS
from ds4.server.bodies import JsonResponse
from ds4.server.config import check_api_key
from ds4.server.errors import ApiError

log = logging.getLogger("ds4.server")

MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's target and headers together."""

MAX_KEY_FILE_BYTES = 1 << 20
"""Largest file of API keys."""

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json", *chat_page.FILES})
"""Paths that need no API key: a monitor and a browser send none, and what is there is no secret."""

_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    # Browsers do not count the header of the API key as part of the star.
    (b"access-control-allow-headers", b"*, Authorization"),
    # What clients look at before they try again.
    (b"access-control-expose-headers", b"Retry-After, X-Should-Retry"),
]
_Headers = Iterable[tuple[bytes, bytes]]


class Edges:
    """Wraps an ASGI application.

    - Headers have a greatest size.
    - OPTIONS has an empty answer; with `cors`, web pages may read all answers. Without it POSTs that a browser sends
      for a page of another site are refused: the page could not read the answer, but it would be computed.
    - With `keys`, requests need one of them, except for OPTIONS and OPEN_PATHS. They are refused before their body is
      read.
    - HEAD is GET without the body.
    - An exception is an error of the API, if nothing was sent yet.
    """

    def __init__(
        self,
        app: Callable[[Any, Any, Any], Awaitable[None]],
        cors: bool = False,
        keys: Sequence[str] = (),
        responded: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        """`responded` is told the path and the status of each response when it begins."""
        self._app, self._responded = app, responded
        self._cors, self._headers = cors, _CORS if cors else []
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; the ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def with_headers(message: Any) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                self._responded(scope["path"], message["status"])
                message["headers"] = [*message.get("headers", ()), *self._headers]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        async def fail(error: ApiError, **headers: str) -> None:
            response = JsonResponse(error_body(error, scope["path"]), error.status, {**error.headers(), **headers})
            await response(scope, receive, with_headers)

        if _head_bytes(scope) > MAX_HEADER_BYTES:
            text = f"the request's target and headers are larger than {MAX_HEADER_BYTES} bytes together"
            await fail(ApiError(431, text), connection="close")
        elif scope["method"] == "OPTIONS":
            await with_headers({"type": "http.response.start", "status": 204, "headers": []})
            await with_headers({"type": "http.response.body", "body": b""})
        elif not self._cors and scope["method"] == "POST" and _is_cross_site(scope["headers"]):
            await fail(
                ApiError(403, "this comes from a web page of another site; --cors lets all pages use the server")
            )
        elif problem := self._stranger(scope):
            await fail(ApiError(401, problem, code="invalid_api_key"))
        else:
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            try:
                await self._app(inner, receive, with_headers)
            except Exception:
                log.exception("%s %r failed", scope["method"], scope["path"])
                if started:
                    raise
                await fail(ApiError(500, "internal error; see the server's log"))

    def _stranger(self, scope: Any) -> str:
        """Why a request has no access; empty if it has."""
        if not self._keys or scope["path"] in OPEN_PATHS:
            return ""
        given = _keys_of(scope["headers"])
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(_digest(key), known) for key in given for known in self._keys]
        if any(matches):
            return ""
        if given:
            return "the API key is not one of this server's"
        return "this server needs an API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The body of an error in the shape of the API that a path belongs to."""
    anthropic = any(api.anthropic and (path == api.path or path.startswith(api.path + "/")) for api in APIS)
    return error.anthropic() if anthropic else error.openai()


def read_key_file(path: Path) -> tuple[str, ...]:
    """The API keys in a file: one a line; empty lines and lines that begin with # do not count. Raises Ds4Error."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise Ds4Error(f"--api-key-file {path}: {error.strerror or error}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise Ds4Error(f"--api-key-file {path}: larger than {MAX_KEY_FILE_BYTES} bytes; is it a file of API keys?")
    keys = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        key = line.strip()
        if key and not key.startswith("#"):
            try:
                keys.append(check_api_key(key))
            except Ds4Error as error:
                raise Ds4Error(f"--api-key-file {path}, line {number}: {error}") from None
    if not keys:
        raise Ds4Error(f"--api-key-file {path} has no keys; write one a line")
    return tuple(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_of(headers: _Headers) -> list[bytes]:
    """The API keys that a request carries: one of each header at most."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"x-api-key":
            found.setdefault(name, value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            found.setdefault(name, key.strip() if scheme.lower() == b"bearer" else b"")
    return [key for key in found.values() if key]


def _is_cross_site(headers: _Headers) -> bool:
    """Whether a browser says that it sends this for a page of another site; nobody else says so.

    It does to https and to this machine, whatever the page wants. The names in `Origin` and `Host` tell less: proxies
    change the latter.
    """
    return any(name == b"sec-fetch-site" and value.strip().lower() == b"cross-site" for name, value in headers)


def _head_bytes(scope: Any) -> int:
    """Bytes of a request's target and headers, each header with its colon and line break."""
    target = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
