"""A client for load tests: streams of all four APIs over plain sockets, checked event by event.

It reads the bytes itself, so that it costs little, sees the end of a chunked body, and can be slow or leave anywhere.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ds4.errors import Ds4Error

APIS = ("chat", "responses", "messages", "completions")
_PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}


class StreamError(Ds4Error):
    """A stream that is not as it should be: a status other than 200, a missing or doubled event, an early end."""


@dataclass(frozen=True)
class Ask:
    """A request for a stream.

    Attributes:
        api: one of APIS.
        text: what the user says.
        tokens: limit of the answer.
        thinking: whether it thinks.
    """

    api: str
    text: str
    tokens: int
    thinking: bool = False

    @property
    def path(self) -> str:
        """Where it goes."""
        return _PATHS[self.api]

    def head(self, host: str) -> bytes:
        """The request as bytes, up to its body."""
        size = len(self.body())
        lines = (f"POST {self.path} HTTP/1.1", f"host: {host}", f"content-length: {size}", "connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def body(self) -> bytes:
        """Its body: a greedy stream that ends with the numbers of tokens."""
        value: dict[str, Any] = {"model": "load", "stream": True, "temperature": 0}
        if self.api == "responses":
            value |= {"input": self.text, "max_output_tokens": self.tokens, "think": self.thinking}
        elif self.api == "messages":
            kind = "enabled" if self.thinking else "disabled"
            value |= {"messages": [{"role": "user", "content": self.text}], "max_tokens": self.tokens}
            value |= {"thinking": {"type": kind}}
        else:
            value |= {"max_tokens": self.tokens, "think": self.thinking, "stream_options": {"include_usage": True}}
            value |= (
                {"messages": [{"role": "user", "content": self.text}]} if self.api == "chat" else {"prompt": self.text}
            )
        return json.dumps(value).encode()


@dataclass
class Answer:
    """What a stream added up to.

    Attributes:
        reasoning, text: as they were shown.
        finish: why it ended, in the API's word.
        tokens: of the answer, as its usage says.
        first_byte: seconds from the request's last byte to the first one of the answer.
    """

    reasoning: str = ""
    text: str = ""
    finish: str = ""
    tokens: int = -1
    first_byte: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Pace:
    """How a client reads: as fast as it can, or so many bytes at a time with a pause behind them."""

    size: int = 1 << 16
    pause: float = 0.0


class Connection:
    """One connection to a server, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace) -> None:
        self.reader, self.writer, self._pace = reader, writer, pace
        self._data = bytearray()
        self.received = 0

    @classmethod
    async def open(cls, url: str, pace: Pace | None = None) -> Connection:
        """Connect to the server of a URL. Raises OSError."""
        pace = pace or Pace()
        parts = urlsplit(url)
        connection = socket.socket()
        if pace.pause:
            # Else the system takes in the whole answer for a slow reader.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (parts.hostname, parts.port))
            limit = 2 * pace.size
            return cls(*await asyncio.open_connection(sock=connection, limit=limit), pace)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Leave, wherever the answer is: what comes now meets a closed connection."""
        self.writer.transport.abort()

    async def head(self) -> int:
        """The status of the answer; raises StreamError if it is no chunked one."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status == 200 and not any(line.lower() == "transfer-encoding: chunked" for line in lines):
            raise StreamError("the answer is no stream")
        return status

    async def frames(self) -> AsyncIterator[str]:
        """The events of a chunked body, each with its lines; raises StreamError if the body breaks off."""
        text = b""
        while size := int((await self._until(b"\r\n"))[:-2], 16):
            chunk = await self._exactly(size + 2)
            text += chunk[:-2]
            *whole, text = text.split(b"\n\n")
            for one in whole:
                yield one.decode()
        await self._exactly(2)
        if text:
            raise StreamError(f"the stream ends inside an event: {text[:100]!r}")
        if self._data or await self.reader.read(1):
            raise StreamError("bytes follow the end of the stream")

    async def _more(self) -> None:
        data = await self.reader.read(self._pace.size)
        if not data:
            raise StreamError(f"the connection broke off after {self.received} bytes")
        self.received += len(data)
        self._data += data
        if self._pace.pause:
            await asyncio.sleep(self._pace.pause)

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            await self._more()
        return self._take(self._data.index(mark) + len(mark))

    async def _exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            await self._more()
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._data[:size])
        del self._data[:size]
        return data


async def ask(url: str, request: Ask, pace: Pace | None = None) -> Answer:
    """The answer to a request, every event of its stream checked.

    Raises:
        StreamError: the stream is not as it should be. OSError: there is no connection.
    """
    connection = await Connection.open(url, pace)
    try:
        host = urlsplit(url).netloc
        connection.writer.write(request.head(host) + request.body())
        await connection.writer.drain()
        begun = time.perf_counter()
        status = await connection.head()
        first_byte = time.perf_counter() - begun
        if status != 200:
            body = (await connection.reader.read(2000)).decode(errors="replace")
            raise StreamError(f"status {status}: {body}")
        reader = reader_of(request.api)
        async for frame in connection.frames():
            reader.take(frame)
        answer = reader.answer()
        answer.first_byte = first_byte
        return answer
    finally:
        connection.close()


# ---- the events of each API -----------------------------------------------------------------------------------------


class Reader:
    """Adds up the events of one stream. `take` and `answer` raise StreamError."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._ended = False

    def take(self, frame: str) -> None:
        """One event; comments are passed over."""
        lines = frame.split("\n")
        if lines[0].startswith(":"):
            return
        if self._ended:
            raise StreamError(f"an event follows the last one: {frame[:200]}")
        name = lines[0].removeprefix("event: ") if lines[0].startswith("event: ") else ""
        data = lines[-1]
        if len(lines) != 1 + bool(name) or not data.startswith("data: "):
            raise StreamError(f"not an event: {frame[:200]!r}")
        if data == "data: [DONE]":
            self._done()
            return
        try:
            value = json.loads(data.removeprefix("data: "))
        except ValueError:
            raise StreamError(f"not JSON: {data[:200]!r}") from None
        if value.get("error"):
            raise StreamError(f"an error event: {value['error']}")
        if name and value.get("type") != name:
            raise StreamError(f"the event {name} says that it is {value.get('type')}")
        self._event(value)

    def answer(self) -> Answer:
        """The sum, once the stream has ended."""
        if not self._ended:
            raise StreamError("the stream ends without its last event")
        if not self._answer.finish or self._answer.tokens < 0:
            raise StreamError("the stream does not say why it ended, or how many tokens it has")
        return self._answer

    def _event(self, value: dict[str, Any]) -> None:
        raise StreamError(f"unknown event: {value}")

    def _done(self) -> None:
        raise StreamError("[DONE] does not belong to this API")

    def _end(self, finish: str, tokens: int) -> None:
        self._answer.finish, self._answer.tokens, self._ended = finish, tokens, True


class _Choices(Reader):
    """Chat completions and completions."""

    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        self._roles = 0

    def _event(self, value: dict[str, Any]) -> None:
        if self._id not in ("", value["id"]):
            raise StreamError(f"the id changes from {self._id} to {value['id']}")
        self._id = value["id"]
        if value.get("usage"):
            self._answer.tokens = value["usage"]["completion_tokens"]
            return
        (choice,) = value["choices"]
        if self._answer.finish:
            raise StreamError("a choice follows its finish")
        delta = choice.get("delta", {})
        self._roles += "role" in delta
        self._answer.reasoning += delta.get("reasoning_content") or ""
        self._answer.text += delta.get("content") or choice.get("text") or ""
        self._answer.finish = choice["finish_reason"] or ""

    def _done(self) -> None:
        if self._roles > 1:
            raise StreamError("the role comes twice")
        self._ended = True


class _Responses(Reader):
    """Responses: the numbers of their events show whether one is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def _event(self, value: dict[str, Any]) -> None:
        if value["sequence_number"] != self._next:
            raise StreamError(f"event {self._next} is missing: {value['sequence_number']} comes")
        self._next += 1
        kind = value["type"]
        if kind == "response.output_text.delta":
            self._answer.text += value["delta"]
        elif kind == "response.output_text.done" and value["text"] != self._answer.text:
            raise StreamError("the deltas do not add up to the text")
        elif kind == "response.failed":
            raise StreamError(f"an error event: {value['response']}")
        elif kind in ("response.completed", "response.incomplete"):
            self._end(value["response"]["status"], value["response"]["usage"]["output_tokens"])


class _Messages(Reader):
    """Messages: blocks that open and close."""

    def __init__(self) -> None:
        super().__init__()
        self._open: int | None = None
        self._blocks = 0
        self._finish, self._tokens = "", -1

    def _event(self, value: dict[str, Any]) -> None:
        kind = value["type"]
        if kind == "content_block_start":
            if self._open is not None or value["index"] != self._blocks:
                raise StreamError(f"block {value['index']} opens while {self._open} is open")
            self._open = self._blocks
            self._blocks += 1
        elif kind == "content_block_delta":
            if value["index"] != self._open:
                raise StreamError(f"a delta of block {value['index']} while {self._open} is open")
            self._answer.text += value["delta"].get("text", "")
            self._answer.reasoning += value["delta"].get("thinking", "")
        elif kind == "content_block_stop":
            if value["index"] != self._open:
                raise StreamError(f"block {value['index']} ends while {self._open} is open")
            self._open = None
        elif kind == "message_delta":
            self._finish, self._tokens = value["delta"]["stop_reason"], value["usage"]["output_tokens"]
        elif kind == "message_stop":
            if self._open is not None:
                raise StreamError(f"the message ends while block {self._open} is open")
            self._end(self._finish, self._tokens)
        elif kind not in ("message_start", "ping"):
            raise StreamError(f"unknown event: {kind}")


def reader_of(api: str) -> Reader:
    """What adds up a stream of one of APIS."""
    if api == "responses":
        return _Responses()
    return _Messages() if api == "messages" else _Choices()
