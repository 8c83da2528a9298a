"""The HTTP side: routes, errors as each API writes them, and the headers for web pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ds4 import __version__
from ds4.errors import RequestError
from ds4.server.api import chat
from ds4.server.api.chat_types import ChatCompletionRequest
from ds4.server.api.models import model_ids, model_object
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError, from_request_error
from ds4.server.exchange import ClientGoneError, EventStream, Exchange, JsonResponse, parse_json, read_body
from ds4.server.request import ChatRequest, Failed
from ds4.server.worker import Worker

MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's target and headers together."""

_LONG_BODY = 256 << 10
"""Bodies of more bytes are read in a thread."""

_CORS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
]


def create_app(worker: Worker, config: ServerConfig) -> FastAPI:
    """The application over a worker, which the caller starts and stops."""
    app = FastAPI(title="ds4", version=__version__, redoc_url=None)
    loaded = worker.backend.name
    context = worker.engine.context

    @app.get("/health")
    async def health() -> Response:
        status = "ok" if worker.alive else "failed"
        value = {"status": status, "model": loaded, "context_length": context, **worker.status()}
        return JsonResponse(value, 200 if worker.alive else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object(id, loaded, context, config) for id in model_ids(loaded)]}

    @app.get("/v1/models/{id:path}")
    async def model(id: str) -> dict[str, Any]:
        if id not in model_ids(loaded):
            raise ApiError(404, f"model {id!r} is not known: use one of {', '.join(model_ids(loaded))}", param="model")
        return model_object(id, loaded, context, config)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        def parse(data: bytes) -> tuple[ChatRequest, ChatCompletionRequest]:
            return chat.parse(parse_json(data), config, loaded)

        data = await read_body(request, config.max_body_bytes)
        # Reading a long conversation takes so long that other requests would feel it.
        long = len(data) > _LONG_BODY
        chat_request, body = await asyncio.to_thread(parse, data) if long else parse(data)
        try:
            prompt = await asyncio.to_thread(worker.prompts.build, chat_request)
            exchange = Exchange(request, worker, chat_request, prompt)
        except RequestError as error:
            raise from_request_error(error, "messages") from None
        number = exchange.job.number
        try:
            if body.stream:
                first = await exchange.first(config.first_byte_seconds)
                if isinstance(first, Failed):
                    raise ApiError(first.status, first.message)
                options = body.stream_options
                include_usage = options is not None and bool(options.include_usage)
                projector = chat.ChatStream(number, chat_request.model, include_usage)
                return EventStream(exchange, projector, first, config.keep_alive_seconds)
            end = await exchange.end()
        except BaseException:
            exchange.close()
            raise
        exchange.close()
        if isinstance(end, Failed):
            raise ApiError(end.status, end.message)
        return JsonResponse(chat.completion(end, number, chat_request.model))

    _handle_errors(app)
    app.add_middleware(_Edges, cors=config.cors)
    return app


def _body_schema(kind: type[ChatCompletionRequest]) -> dict[str, Any]:
    """The description of a body that the handler reads itself, for the page at /docs."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    inlined = _inline(schema, definitions)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(item, definitions) for key, item in value.items()}
    return [_inline(item, definitions) for item in value] if isinstance(value, list) else value


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JsonResponse(error.openai(), error.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = {404: "unknown endpoint", 405: "method not allowed"}.get(error.status_code, str(error.detail))
        return JsonResponse(ApiError(error.status_code, text).openai(), error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        # The traceback is logged by the server below.
        return JsonResponse(ApiError(500, "internal error; see the server's log").openai(), 500)


class _Edges:
    """What holds for every path.

    OPTIONS has an empty answer, with `cors` web pages may read the answers, and headers have a greatest size.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]], cors: bool) -> None:
        self._app = app
        self._headers = _CORS if cors else []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        if _head_bytes(scope) > MAX_HEADER_BYTES:
            error = ApiError(431, f"the request's target and headers are larger than {MAX_HEADER_BYTES} bytes together")
            await JsonResponse(error.openai(), error.status, {"connection": "close"})(scope, receive, with_headers)
        elif scope["method"] == "OPTIONS":
            await with_headers({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, with_headers)


def _head_bytes(scope: Any) -> int:
    """Bytes of a request's target and headers, each header with its colon and line break."""
    target = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
