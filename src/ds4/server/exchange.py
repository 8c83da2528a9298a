"""One request between its HTTP handler and the worker: replies with time limits, and noticing a client that left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ds4.server.errors import ApiError
from ds4.server.request import ChatRequest, Done, Events, Failed, Job, Prompt, Reply
from ds4.server.worker import Worker

_Message = MutableMapping[str, Any]
MAX_DEPTH = 256
"""Deepest nesting of a request body."""

UNREAD = 1024
"""Replies, of one token each as a rule, that may wait for a client without anything happening."""

MOST_UNREAD = 32 * UNREAD
"""Replies that may wait at all."""


class ClientGoneError(Exception):
    """The client closed the connection; its job is cancelled."""


class Exchange:
    """A submitted request. `close` must be called in the end; it cancels what still runs.

    A client that is connected but does not read holds up its handler, while the worker goes on writing. After
    `stall_seconds` with more than UNREAD replies waiting, or at once with MOST_UNREAD, it counts as gone: the request
    is cancelled, and what waited becomes one failure.
    """

    def __init__(
        self, request: Request, worker: Worker, chat: ChatRequest, prompt: Prompt, stall_seconds: float = 60.0
    ) -> None:
        """Submits the request. Raises as `Worker.submit`."""
        self._loop = loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._gone = asyncio.create_task(_disconnected(request.receive))
        self._stall_seconds = stall_seconds
        self._behind_since: float | None = None
        self._stalled = False

        def deliver(reply: Reply) -> None:
            loop.call_soon_threadsafe(self._put, reply)

        try:
            self.job: Job = worker.submit(chat, prompt, deliver)
        except BaseException:
            self._gone.cancel()
            raise

    def _put(self, reply: Reply) -> None:
        if self._stalled:
            return
        self._replies.put_nowait(reply)
        waiting = self._replies.qsize()
        if waiting <= UNREAD:
            self._behind_since = None
            return
        now = self._loop.time()
        if self._behind_since is None:
            self._behind_since = now
        if waiting > MOST_UNREAD or now - self._behind_since > self._stall_seconds:
            self._stalled = True
            self.job.cancel()
            while not self._replies.empty():
                self._replies.get_nowait()
            self._replies.put_nowait(Failed(500, "the client did not read the answer"))

    async def next(self, timeout: float | None = None) -> Reply | None:
        """The next reply, or None if there is none for `timeout` seconds. Raises ClientGoneError."""
        if not self._replies.empty():
            return self._replies.get_nowait()
        getter = asyncio.ensure_future(self._replies.get())
        try:
            await asyncio.wait({getter, self._gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
            if self._gone.done():
                self.job.cancel()
                raise ClientGoneError
            return None
        finally:
            getter.cancel()

    async def end(self) -> Done | Failed:
        """The last reply; those before it are dropped. Raises ClientGoneError."""
        while True:
            reply = await self.next()
            if isinstance(reply, Done | Failed):
                return reply

    async def first(self, seconds: float) -> Reply | None:
        """The first reply that decides what is answered, or None if the client should not wait for it any longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            reply = await self.next(max(0.0, deadline - loop.time()))
            if reply is None or isinstance(reply, Events | Done | Failed):
                return reply

    def close(self) -> None:
        """Stop what still runs and forget it."""
        self.job.cancel()
        self._gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[_Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Projector(Protocol):
    """Turns replies into the frames of one API's stream."""

    keep_alive: bytes

    def open(self) -> bytes:
        """The frames before everything else."""
        ...

    def events(self, reply: Events) -> bytes:
        """The frames of new events; maybe none."""
        ...

    def done(self, reply: Done) -> bytes:
        """The frames of the end."""
        ...

    def failed(self, reply: Failed) -> bytes:
        """The frames of a failure."""
        ...


class EventStream(Response):
    """Server-sent events of one request; never silent for longer than `keep_alive` seconds."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, projector: Projector, first: Reply | None, keep_alive: float) -> None:
        super().__init__()
        self._exchange, self._projector, self._first, self._silence = exchange, projector, first, keep_alive

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream; the ASGI interface."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._frames(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):
            pass
        finally:
            self._exchange.close()

    async def _frames(self, send: Any) -> None:
        async def write(frames: bytes) -> None:
            if frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})

        projector, loop = self._projector, asyncio.get_running_loop()
        await write(projector.open())
        quiet_since = loop.time()
        reply = self._first
        while True:
            frames = b""
            if isinstance(reply, Events):
                frames = projector.events(reply)
            elif isinstance(reply, Done):
                return await write(projector.done(reply))
            elif isinstance(reply, Failed):
                return await write(projector.failed(reply))
            elif loop.time() - quiet_since >= self._silence:
                frames = projector.keep_alive
            if frames:
                await write(frames)
                quiet_since = loop.time()
            reply = await self._exchange.next(max(0.0, quiet_since + self._silence - loop.time()))


def to_json(value: object) -> bytes:
    """A value as JSON in UTF-8; halves of surrogate pairs, which a client may have sent, cannot be in it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def frame(value: object) -> bytes:
    """One server-sent event with a JSON object as its data."""
    return b"data: " + to_json(value) + b"\n\n"


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
    if length.isdigit() and int(length) > limit:
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
    """A body as a JSON object. Raises ApiError 400."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"invalid JSON request: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid JSON request: the body must be an object")
    if _depth(value) > MAX_DEPTH:
        raise ApiError(400, f"invalid JSON request: nested deeper than {MAX_DEPTH} levels")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
