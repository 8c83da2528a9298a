"""What goes wrong between a client and the server, with the status it is answered with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ds4.errors import ContextOverflowError, RequestError
from ds4.server.request import QueueFullError, ShuttingDownError

_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)
_NO_RETRY = {"x-should-retry": "false"}
_HEADERS: Mapping[int, dict[str, str]] = MappingProxyType(
    {
        # Clients repeat a request that met a conflict; what was lost does not come back.
        409: _NO_RETRY,
        401: {"www-authenticate": "Bearer"},
        429: {"retry-after": "5"},
    }
)


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: for the person at the client.
        param: the field of the request that is to blame, if one is.
        code: a word for programs, if there is one.
        extra: further members of the error object.
        retry: False tells clients not to send the same request again, whatever they do at this status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Any] | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.retry = retry
        self.status, self.message, self.param, self.code = status, message, param, code
        self.extra = dict(extra or {})

    def openai(self) -> dict[str, Any]:
        """The body in the shape of OpenAI's APIs."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"message": self.message, "type": "rate_limit_error" if self.status == 429 else kind}
        return {"error": {**error, "param": self.param, "code": self.code, **self.extra}}

    def anthropic(self) -> dict[str, Any]:
        """The body in the shape of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        # These words are how clients of that API notice that a conversation has to be shortened.
        start = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        return {"type": "error", "error": {"type": kind, "message": start + self.message, **self.extra}}

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = _HEADERS.get(self.status, {})
        return headers if self.retry else {**headers, **_NO_RETRY}


def from_request_error(error: RequestError, param: str | None = None, *, messages: str = "messages") -> ApiError:
    """The answer to a request that cannot be served. `messages`: what the API calls its conversation."""
    if isinstance(error, ContextOverflowError):
        return ApiError(
            400,
            str(error),
            param=messages,
            code="context_length_exceeded",
            extra={"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context},
        )
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error))
    if isinstance(error, ShuttingDownError):
        return ApiError(503, str(error))
    return ApiError(400, str(error), param=param)
