"""What goes wrong between a client and the server, with the status it is answered with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds4.errors import ContextOverflowError, RequestError
from ds4.server.worker import QueueFullError, ShuttingDownError


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: for the person at the client.
        param: the field of the request that is to blame, if one is.
        code: a word for programs, if there is one.
        extra: further members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.extra = dict(extra or {})

    def openai(self) -> dict[str, Any]:
        """The body in the shape of OpenAI's APIs."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"message": self.message, "type": "rate_limit_error" if self.status == 429 else kind}
        return {"error": {**error, "param": self.param, "code": self.code, **self.extra}}


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
