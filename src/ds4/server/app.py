"""The HTTP side: what is at which path, and what a request goes through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ds4 import __version__
from ds4.errors import ContextOverflowError, RequestError
from ds4.server import chat_page, openapi
from ds4.server.api import messages
from ds4.server.api.base import Api, ApiContext, Ask
from ds4.server.api.models import model_ids, model_list, model_object
from ds4.server.api.registry import APIS
from ds4.server.bodies import ClientGoneError, JsonResponse, parse_json, read_body
from ds4.server.config import ServerConfig
from ds4.server.constraints import GrammarsBusyError, SchemaError
from ds4.server.constraints.grammar import OF_CONTENT
from ds4.server.docs_page import HEADERS, page
from ds4.server.edges import Edges, error_body
from ds4.server.errors import ApiError, from_request_error
from ds4.server.exchange import EventStream, Exchange
from ds4.server.live import LiveSession
from ds4.server.request import Failed
from ds4.server.worker import Worker

_LONG_BODY = 256 << 10
"""Bodies of more bytes are read in a thread."""

_ABOUT = "A DeepSeek V4 model on this machine. All APIs answer from the same model and share its live conversations."


def create_app(worker: Worker, config: ServerConfig) -> FastAPI:
    """The application over a worker, which the caller starts and stops."""
    # The pages of FastAPI load scripts from elsewhere; ours need no network.
    app = FastAPI(
        title="ds4",
        version=__version__,
        description=_ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    loaded = worker.backend.name
    context = worker.engine.context
    apis = ApiContext(config, loaded, worker.turns, worker.engine.shape.vocab)

    async def health(request: Request) -> Response:
        status = "ok" if worker.alive else "failed"
        value = {"status": status, "model": loaded, "context_length": context, **worker.status()}
        return JsonResponse(value, 200 if worker.alive else 503)

    live: list[LiveSession] = []

    async def measured() -> None:
        # In a long step of the model the last numbers have to do.
        measuring: asyncio.Future[list[LiveSession]] = asyncio.wrap_future(worker.measure())
        with contextlib.suppress(TimeoutError):
            live[:] = await asyncio.wait_for(measuring, config.first_byte_seconds)

    async def metrics(request: Request) -> Response:
        await measured()
        body, content_type = worker.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    async def stats(request: Request) -> Response:
        await measured()
        return JsonResponse(worker.metrics.stats())

    async def sessions(request: Request) -> Response:
        await measured()
        numbers = {name: worker.status()[name] for name in ("waiting", "running")}
        numbers.update(limit=config.max_sessions, context_length=context)
        return JsonResponse({"object": "list", "data": [session.wire() for session in live], **numbers})

    async def models(request: Request) -> Response:
        return JsonResponse(model_list(loaded, context, config))

    async def model(request: Request) -> Response:
        id = request.path_params["id"]
        if id not in model_ids(loaded):
            text = f"model {id!r} is not known: use one of {', '.join(model_ids(loaded))}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return JsonResponse(model_object(id, loaded, context, config))

    async def schema(request: Request) -> Response:
        return JsonResponse(description)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page(description), headers=dict(HEADERS))

    app.add_api_route("/health", health, **openapi.health_operation())
    app.add_api_route("/metrics", metrics, **openapi.metrics_operation())
    app.add_api_route("/stats", stats, **openapi.stats_operation())
    app.add_api_route("/sessions", sessions, **openapi.sessions_operation())
    app.add_api_route("/v1/models", models, **openapi.models_operation())
    app.add_api_route("/v1/models/{id:path}", model, **openapi.model_operation())
    for api in APIS:
        app.add_api_route(api.path, _endpoint(api, worker, apis), **openapi.api_operation(api))
    app.add_api_route(
        f"{messages.API.path}/count_tokens",
        _token_count(messages.API, worker, apis),
        **openapi.count_operation(messages.API),
    )
    for path in chat_page.FILES:
        app.add_api_route(path, chat_page.answer, include_in_schema=False)
    description = openapi.describe(app, keys_needed=bool(config.api_keys))
    for path, handler in (("/openapi.json", schema), ("/docs", docs)):
        app.add_api_route(path, handler, include_in_schema=False)

    _handle_errors(app)
    known = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(
        Edges,
        cors=config.cors,
        keys=config.api_keys,
        responded=lambda path, status: worker.metrics.responded(_label(path, known), status),
    )
    return app


def _label(path: str, known: frozenset[str]) -> str:
    """A path among the known ones: metrics have one series for each, so there must be few."""
    if path in known:
        return "/page/{file}" if path.startswith("/page/") else path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def _endpoint(api: Api, worker: Worker, context: ApiContext) -> Callable[[Request], Awaitable[Response]]:
    """What answers the POSTs of one API."""
    config = context.config

    def failure(reply: Failed) -> ApiError:
        if reply.fault is not None:
            return _wire_error(reply.fault, api)
        return ApiError(reply.status, reply.message, retry=reply.retry)

    async def answer(request: Request) -> Response:
        ask = await read_ask(request, api, context)
        # Many requests at once wait for their prompts as well.
        latest = asyncio.get_running_loop().time() + config.first_byte_seconds
        try:
            prompt, constraint = await asyncio.to_thread(worker.prompts.build, ask.request)
            exchange = Exchange(request, worker, ask.request, prompt, constraint)
        except RequestError as error:
            if isinstance(error, GrammarsBusyError):
                worker.metrics.refused()
            raise _wire_error(error, api) from None
        try:
            writer = ask.answer(exchange.job.number)
            if ask.stream:
                first = await exchange.first(latest)
                if first and isinstance(first[-1], Failed):
                    raise failure(first[-1])
                return EventStream(exchange, writer, first, config.keep_alive_seconds, failure)
            end = await exchange.end()
        except BaseException:
            exchange.close()
            raise
        exchange.close()
        if isinstance(end, Failed):
            raise failure(end)
        return JsonResponse(writer.whole(end), headers={"x-request-id": str(exchange.job.number)})

    return answer


def _wire_error(error: RequestError, api: Api) -> ApiError:
    """What a client is told of an error in its prompt, or in a schema that its answer should follow."""
    if isinstance(error, GrammarsBusyError):
        return ApiError(429, str(error))
    if isinstance(error, SchemaError):
        field = api.format if str(error).startswith(OF_CONTENT) else "tools"
        return ApiError(400, f"{field}: {error}", param=field)
    return from_request_error(error, messages=api.conversation)


def _token_count(api: Api, worker: Worker, context: ApiContext) -> Callable[[Request], Awaitable[Response]]:
    """What counts the tokens of one API's requests as their answers would; nothing is evaluated for it."""

    async def count(request: Request) -> Response:
        ask = await read_ask(request, api, context)
        try:
            tokens = await count_tokens(ask)
        except RequestError as error:
            raise _wire_error(error, api) from None
        return JsonResponse({"input_tokens": tokens})

    async def count_tokens(ask: Ask) -> int:
        await asyncio.to_thread(worker.prompts.check, ask.request)
        try:
            prompt = await asyncio.to_thread(worker.prompts.prompt, ask.request)
        except ContextOverflowError:
            return await asyncio.to_thread(worker.prompts.count, ask.request)
        effective = asyncio.wrap_future(worker.count(ask.request, prompt))
        try:
            return await asyncio.wait_for(effective, context.config.first_byte_seconds)
        except TimeoutError:
            # The model is in a long step. What the client sent is known at least.
            return len(prompt.ids)

    return count


async def read_ask(request: Request, api: Api, context: ApiContext) -> Ask:
    """The request in a body. Raises ApiError, ClientGoneError."""
    data = await read_body(request, context.config.max_body_bytes)
    # Reading a long conversation takes so long that other requests would feel it.
    if len(data) > _LONG_BODY:
        return await asyncio.to_thread(lambda: api.parse(parse_json(data), context))
    return api.parse(parse_json(data), context)


def _handle_errors(app: FastAPI) -> None:
    def respond(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        return JsonResponse(
            error_body(error, request.scope["path"]), error.status, {**error.headers(), **(headers or {})}
        )

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return respond(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = {404: "unknown endpoint", 405: "method not allowed"}.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        if "Allow" in headers:
            allowed = {*headers["Allow"].split(", "), "OPTIONS"}
            headers["Allow"] = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
        return respond(request, ApiError(error.status_code, text), headers)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)
