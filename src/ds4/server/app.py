"""The HTTP side: routes, errors as each API writes them, and the headers for web pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ds4 import __version__
from ds4.errors import RequestError
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.models import model_ids, model_object
from ds4.server.api.registry import APIS
from ds4.server.bodies import ClientGoneError, JsonResponse, parse_json, read_body
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError, from_request_error
from ds4.server.exchange import EventStream, Exchange
from ds4.server.request import Failed
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
    apis = ApiContext(config, loaded, worker.turns)

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

    for api in APIS:
        app.add_api_route(
            api.path, _endpoint(api, worker, apis), methods=["POST"], summary=api.summary, **_body_schema(api.body)
        )

    _handle_errors(app)
    app.add_middleware(_Edges, cors=config.cors)
    return app


def _endpoint(api: Api, worker: Worker, context: ApiContext) -> Callable[[Request], Awaitable[Response]]:
    """What answers the POSTs of one API."""
    config = context.config

    async def answer(request: Request) -> Response:
        ask = await read_ask(request, api, context)
        try:
            prompt = await asyncio.to_thread(worker.prompts.build, ask.request)
            exchange = Exchange(request, worker, ask.request, prompt)
        except RequestError as error:
            raise from_request_error(error, messages=api.conversation) from None
        writer = ask.answer(exchange.job.number)
        try:
            if ask.stream:
                first = await exchange.first(config.first_byte_seconds)
                if first and isinstance(first[-1], Failed):
                    raise ApiError(first[-1].status, first[-1].message)
                return EventStream(exchange, writer, first, config.keep_alive_seconds)
            end = await exchange.end()
        except BaseException:
            exchange.close()
            raise
        exchange.close()
        if isinstance(end, Failed):
            raise ApiError(end.status, end.message)
        return JsonResponse(writer.whole(end))

    return answer


async def read_ask(request: Request, api: Api, context: ApiContext) -> Ask:
    """The request in a body. Raises ApiError, ClientGoneError."""
    data = await read_body(request, context.config.max_body_bytes)
    # Reading a long conversation takes so long that other requests would feel it.
    if len(data) > _LONG_BODY:
        return await asyncio.to_thread(lambda: api.parse(parse_json(data), context))
    return api.parse(parse_json(data), context)


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body that the endpoint reads itself, for the page at /docs."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    inlined = _inline(schema, definitions)
    content = {"application/json": {"schema": inlined}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(item, definitions) for key, item in value.items()}
    return [_inline(item, definitions) for item in value] if isinstance(value, list) else value


def _handle_errors(app: FastAPI) -> None:
    def respond(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        return JsonResponse(error_body(error, request.url.path), error.status, {**error.headers(), **(headers or {})})

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return respond(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = {404: "unknown endpoint", 405: "method not allowed"}.get(error.status_code, str(error.detail))
        return respond(request, ApiError(error.status_code, text), error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        # The traceback is logged by the server below.
        return respond(request, ApiError(500, "internal error; see the server's log"))


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The body of an error in the shape of the API that a path belongs to."""
    anthropic = any(api.anthropic and (path == api.path or path.startswith(api.path + "/")) for api in APIS)
    return error.anthropic() if anthropic else error.openai()


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
            await JsonResponse(error_body(error, scope["path"]), error.status, {"connection": "close"})(
                scope, receive, with_headers
            )
        elif scope["method"] == "OPTIONS":
            await with_headers({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, with_headers)


def _head_bytes(scope: Any) -> int:
    """Bytes of a request's target and headers, each header with its colon and line break."""
    target = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
