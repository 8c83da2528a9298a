"""Between the worker and a handler: what happens to replies that nobody takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
from starlette.requests import Request

from ds4.chat.events import TextDelta
from ds4.chat.rendered import Rendered
from ds4.server.bodies import ClientGoneError
from ds4.server.constraints import SchemaError
from ds4.server.errors import ApiError
from ds4.server.exchange import MOST_UNREAD, UNREAD, EventStream, Exchange
from ds4.server.request import (
    Admitted,
    ChatRequest,
    Done,
    Events,
    Failed,
    Job,
    Post,
    Prompt,
    QueueFullError,
    Reply,
    Usage,
)
from ds4.server.worker import Worker

REPLY = Events((TextDelta("x"),), ())
STALLED = Failed(500, "the client did not read the answer")


class Source:
    """A worker that writes when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(
        self, request: ChatRequest, prompt: Prompt, deliver: Callable[[Reply], None], post: Post, constraint: Any
    ) -> Job:
        self.jobs.append(Job(1, request, prompt, deliver, post))
        return self.jobs[-1]


Write = Callable[[int], Awaitable[None]]


def with_exchange(
    test: Callable[[Exchange, Write], Awaitable[None]], left: asyncio.Event | None = None, **options: Any
) -> None:
    """Run a test with an exchange whose client is silent, and a function that makes replies arrive.

    The client is connected until `left` is set.
    """

    async def main() -> None:
        async def receive() -> dict[str, Any]:
            await (left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def write(count: int) -> None:
            for _ in range(count):
                source.jobs[0].deliver(REPLY)
            await asyncio.sleep(0)

        source = Source()
        request = Request({"type": "http"}, receive)
        chat, prompt = ChatRequest("m", ()), Prompt(Rendered(""), [], b"")
        exchange = Exchange(request, cast(Worker, source), chat, prompt, **options)
        try:
            await asyncio.wait_for(test(exchange, write), 30)
        finally:
            exchange.close()

    asyncio.run(main())


@pytest.mark.parametrize("fault", [None, SchemaError("nothing fits")])
def test_where_there_is_no_place_a_known_fault_is_told_and_no_grammar_is_made(fault: SchemaError | None) -> None:
    class Full(Source):
        def submit(self, *arguments: Any) -> Job:
            raise QueueFullError("full")

    async def main() -> None:
        chat, prompt = ChatRequest("m", ()), Prompt(Rendered(""), [], b"")
        constraint: Future[Any] = Future()
        if fault:
            constraint.set_exception(fault)
        with pytest.raises(type(fault) if fault else QueueFullError):
            Exchange(Request({"type": "http"}), cast(Worker, Full()), chat, prompt, constraint)
        assert constraint.cancelled() is not bool(fault)

    asyncio.run(main())


def test_a_client_that_does_not_read_is_cancelled_and_what_waits_is_bounded() -> None:
    async def test(exchange: Exchange, write: Write) -> None:
        await write(MOST_UNREAD)
        assert not exchange.job.cancelled
        await write(1)
        assert exchange.job.cancelled
        await write(5)
        assert len(exchange._replies) == 1
        assert await exchange.next() == STALLED

    with_exchange(test)


def test_a_client_that_is_behind_for_too_long_is_cancelled() -> None:
    async def test(exchange: Exchange, write: Write) -> None:
        await write(UNREAD)
        assert not exchange.job.cancelled
        exchange._loop = clock = Clock()  # type: ignore[assignment]
        await write(1)
        clock.now += 60
        await write(1)
        assert not exchange.job.cancelled
        clock.now += 0.5
        await write(1)
        assert exchange.job.cancelled
        assert await exchange.end() == STALLED

    with_exchange(test, stall_seconds=60)


def test_a_client_that_reads_on_slowly_is_not_cancelled() -> None:
    async def test(exchange: Exchange, write: Write) -> None:
        exchange._loop = clock = Clock()  # type: ignore[assignment]
        await write(2 * UNREAD)
        for _ in range(200):
            clock.now += 30
            await write(2)
            assert await exchange.next() == REPLY
        assert not exchange.job.cancelled

    with_exchange(test, stall_seconds=60)


def test_a_client_that_catches_up_has_its_time_again() -> None:
    async def test(exchange: Exchange, write: Write) -> None:
        exchange._loop = clock = Clock()  # type: ignore[assignment]
        for _ in range(3):
            await write(UNREAD + 1)
            clock.now += 59
            for _ in range(UNREAD + 1):
                assert await exchange.next() == REPLY
        assert not exchange.job.cancelled

    with_exchange(test, stall_seconds=60)


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_stream_whose_client_does_not_read_ends_in_an_error() -> None:
    class Frames:
        keep_alive = b""

        def opened(self) -> bytes:
            return b"open"

        def admitted(self, reply: Admitted) -> bytes:
            return b"admitted"

        def events(self, reply: Events) -> bytes:
            return b"event"

        def done(self, reply: Done) -> bytes:
            return b"done"

        def failed(self, error: ApiError) -> bytes:
            return error.message.encode()

        def whole(self, reply: Done) -> dict[str, Any]:
            return {}

    async def test(exchange: Exchange, write: Write) -> None:
        reads = asyncio.Event()
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if message.get("body") == b"event":
                await reads.wait()

        answer = EventStream(
            exchange, Frames(), [Admitted(Usage())], 10.0, lambda reply: ApiError(reply.status, reply.message)
        )
        stream = asyncio.create_task(answer({}, None, send))
        await write(1)
        while b"event" not in sent:
            await asyncio.sleep(0)
        await write(MOST_UNREAD + 1)
        assert exchange.job.cancelled
        reads.set()
        await stream
        assert sent == [b"", b"open", b"admitted", b"event", STALLED.message.encode(), b""]

    with_exchange(test)


def test_the_end_is_found_behind_what_nobody_reads() -> None:
    end = Failed(500, "x")

    async def test(exchange: Exchange, write: Write) -> None:
        await write(UNREAD - 1)
        exchange.job.deliver(end)
        assert await exchange.end() == end

    with_exchange(test)


def test_a_client_that_leaves_ends_the_wait_at_once_behind_the_replies_that_are_there() -> None:
    left = asyncio.Event()

    async def test(exchange: Exchange, write: Write) -> None:
        waiting = asyncio.create_task(exchange.next())
        await write(2)
        assert await waiting == REPLY
        left.set()
        await asyncio.sleep(0)
        assert await exchange.next() == REPLY
        for _ in range(2):
            with pytest.raises(ClientGoneError):
                await exchange.next()
            assert exchange.job.cancelled

    with_exchange(test, left)


def test_a_wait_that_ends_early_loses_no_reply() -> None:
    async def test(exchange: Exchange, write: Write) -> None:
        assert await exchange.next(0) is None
        given_up = asyncio.create_task(exchange.next())
        await asyncio.sleep(0)
        await write(1)
        given_up.cancel()
        await asyncio.wait([given_up])
        rest = [] if given_up.cancelled() else [given_up.result()]
        await write(1)
        while len(rest) < 2:
            rest.append(await exchange.next())
        assert rest == [REPLY, REPLY]

    with_exchange(test)
