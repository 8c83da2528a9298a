"""One request between its HTTP handler and the worker: replies with time limits, and noticing a client that left."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ds4.errors import RequestError
from ds4.server.api.base import Answer
from ds4.server.bodies import ClientGoneError
from ds4.server.constraints import Enforcement
from ds4.server.errors import ApiError
from ds4.server.request import Admitted, ChatRequest, Done, Events, Failed, Job, Prompt, Reply
from ds4.server.worker import Worker

_Message = MutableMapping[str, Any]
UNREAD = 1024
"""Replies, of one token each as a rule, that may wait for a client without anything happening."""

MOST_UNREAD = 32 * UNREAD
"""Replies that may wait at all."""


class Exchange:
    """A submitted request. `close` must be called in the end; it cancels what still runs.

    A client that is connected but does not read holds up its handler, while the worker goes on writing. After
    `stall_seconds` with more than UNREAD replies waiting, or at once with MOST_UNREAD, it counts as gone: the request
    is cancelled, and what waited becomes one failure.
    """

    def __init__(
        self,
        request: Request,
        worker: Worker,
        chat: ChatRequest,
        prompt: Prompt,
        constraint: Future[Enforcement] | None = None,
        stall_seconds: float = 60.0,
    ) -> None:
        """Submits the request. Raises as `Worker.submit`, or the constraint's error if that is known already."""
        if constraint is not None and constraint.done() and isinstance(error := constraint.exception(), RequestError):
            raise error  # whether there is a place or not
        self._loop = loop = asyncio.get_running_loop()
        self._replies: deque[Reply] = deque()
        self._waker: asyncio.Future[None] | None = None
        self._gone = asyncio.create_task(_disconnected(request.receive))
        self._gone.add_done_callback(lambda gone: self._wake())
        self._stall_seconds = stall_seconds
        self._behind_since: float | None = None
        self._stalled = False
        try:
            self.job: Job = worker.submit(chat, prompt, self._put, loop.call_soon_threadsafe, constraint)
        except BaseException:
            self._gone.cancel()
            if constraint is not None:
                constraint.cancel()
            raise

    def _put(self, reply: Reply) -> None:
        if self._stalled:
            return
        self._replies.append(reply)
        self._wake()
        waiting = len(self._replies)
        if waiting <= UNREAD:
            self._behind_since = None
            return
        now = self._loop.time()
        if self._behind_since is None:
            self._behind_since = now
        if waiting > MOST_UNREAD or now - self._behind_since > self._stall_seconds:
            self._stalled = True
            self.job.cancel()
            self._replies.clear()
            self._replies.append(Failed(500, "the client did not read the answer"))

    async def next(self, timeout: float | None = None) -> Reply | None:
        """The next reply, or None if there is none for `timeout` seconds. Raises ClientGoneError."""
        if not self._replies and not self._gone.done():
            await self._wait(timeout)
        if self._replies:
            # Who reads on is not behind, however slowly it reads.
            self._behind_since = None
            return self._replies.popleft()
        if self._gone.done():
            self.job.cancel()
            raise ClientGoneError
        return None

    async def _wait(self, timeout: float | None) -> None:
        """Wait for a reply, for the client's leaving, or for some seconds. It happens for every token: no tasks."""
        loop = asyncio.get_running_loop()
        self._waker = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._wake)
        try:
            await self._waker
        finally:
            self._waker = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def end(self) -> list[Done] | Failed:
        """The ends of all answers by index, or the failure; other replies are dropped. Raises ClientGoneError."""
        ends: list[Done] = []
        while True:
            reply = await self.next()
            if isinstance(reply, Failed):
                return reply
            if isinstance(reply, Done):
                ends.append(reply)
                if not reply.left:
                    return sorted(ends, key=lambda end: end.index)

    async def first(self, latest: float) -> list[Reply]:
        """The replies up to the one that decides what is answered, or as many as there are at a loop's time."""
        loop = asyncio.get_running_loop()
        replies: list[Reply] = []
        while True:
            reply = await self.next(max(0.0, latest - loop.time()))
            if reply is None:
                return replies
            replies.append(reply)
            if isinstance(reply, Events | Done | Failed):
                return replies

    def close(self) -> None:
        """Stop what still runs and forget it."""
        self.job.cancel()
        self._gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[_Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of one request; never silent for longer than `keep_alive` seconds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        first: Sequence[Reply],
        keep_alive: float,
        told: Callable[[Failed], ApiError],
    ) -> None:
        """`first`: the replies that were taken already; `told`: what the API calls a failure."""
        super().__init__()
        self._told = told
        self._exchange, self._answer, self._first, self._silence = exchange, answer, deque(first), keep_alive

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream; the ASGI interface."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # The first event may be far away: who wants to find the request in `/sessions` until then needs its number.
            (b"x-request-id", str(self._exchange.job.number).encode()),
        ]
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

        answer, loop = self._answer, asyncio.get_running_loop()
        await write(answer.opened())
        quiet_since = loop.time()
        while True:
            if self._first:
                reply: Reply | None = self._first.popleft()
            else:
                reply = await self._exchange.next(max(0.0, quiet_since + self._silence - loop.time()))
            frames = b""
            if isinstance(reply, Events):
                frames = answer.events(reply)
            elif isinstance(reply, Admitted):
                frames = answer.admitted(reply)
            elif isinstance(reply, Done):
                frames = answer.done(reply)
                if not reply.left or reply.reason == "error":
                    return await write(frames)
            elif isinstance(reply, Failed):
                return await write(answer.failed(self._told(reply)))
            elif loop.time() - quiet_since >= self._silence:
                frames = answer.keep_alive
            if frames:
                await write(frames)
                quiet_since = loop.time()
