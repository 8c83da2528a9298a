"""The page at /: files of the package, served as they are, with headers that let the page load nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        # Browsers ask each time whether they have the newest one, so that a page and its server always belong together.
        "cache-control": "no-cache",
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)


@dataclass(frozen=True)
class PageFile:
    """A file of the page.

    Attributes:
        data, type: its bytes, and their media type.
        tag: its entity tag, which changes with its bytes.
    """

    data: bytes
    type: str
    tag: str


def _load() -> dict[str, PageFile]:
    found = {}
    for file in sorted((files("ds4.server") / "page").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = PageFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


FILES: Mapping[str, PageFile] = MappingProxyType(_load())
"""The files by their paths on the server."""


async def answer(request: Request) -> Response:
    """A file of the page, or that the client has it already."""
    file = FILES[request.scope["path"]]
    headers = {**_HEADERS, "etag": file.tag}
    if _has(request.headers.get("if-none-match", ""), file.tag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.type)


def _has(given: str, tag: str) -> bool:
    """Whether an If-None-Match header names a tag; proxies may have made it a weak one."""
    return any(entry.strip().removeprefix("W/") in (tag, "*") for entry in given.split(","))
