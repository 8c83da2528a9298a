"""HTTP itself, over sockets on which the tests write the bytes: connections, lengths, chunks, methods, paths."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_harness import Running, line, scripted

from ds4.server.main import listen

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi", " there"), ctx=256, max_body_bytes=100_000) as running:
        yield running


class Wire:
    """A connection whose bytes a test writes itself."""

    def __init__(self, server: Running) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, *lines: str, body: bytes = b"") -> None:
        """Send a head, and a body behind it."""
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def end(self) -> None:
        """Send no more."""
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        status = int(self._file.readline().split()[1])
        headers: dict[str, str] = {}
        while (text := self._file.readline().strip()) != b"":
            name, _, value = text.decode().partition(": ")
            headers[name.lower()] = value
        if head or status in (100, 204):
            return status, headers, b""
        if headers.get("transfer-encoding") != "chunked":
            length = headers.get("content-length")
            return status, headers, self._file.read(-1 if length is None else int(length))
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            self._file.readline()
        self._file.readline()
        return status, headers, body

    def closed(self) -> bool:
        """Whether the server has closed the connection and sent nothing more."""
        return self._file.read() == b""


def test_small_pieces_are_sent_at_once() -> None:
    """Without this the system holds each back until the client has acknowledged the one before."""

    async def option() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await accepted

    assert asyncio.run(option()) != 0


CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": HELLO}).encode()
STREAM = json.dumps({"messages": HELLO, "stream": True}).encode()


def post(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    """A whole request."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_connection_stays_open_behind_answers_streams_and_errors(server: Running) -> None:
    with Wire(server) as wire:
        for body, status in ((BODY, 200), (STREAM, 200), (b"{", 400), (BODY, 200)):
            wire.send_raw(post(body))
            got, headers, content = wire.answer()
            assert got == status
            assert "connection" not in headers
            if body == STREAM:
                assert content.endswith(b"data: [DONE]\n\n")
        wire.send("GET /health HTTP/1.1", "host: x", "connection: close")
        assert wire.answer()[0] == 200
        assert wire.closed()


def test_requests_sent_ahead_are_answered_in_order(server: Running) -> None:
    with Wire(server) as wire:
        wire.send_raw(post(STREAM) + post(b"{}") + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + post(BODY))
        answers = [wire.answer() for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 400, 200, 200]
    assert answers[0][2].endswith(b"data: [DONE]\n\n")
    assert json.loads(answers[3][2])["choices"][0]["message"]["content"] == "Hi there"


@pytest.mark.parametrize("size", [1, 1000])
def test_a_chunked_body_is_a_body(server: Running, size: int) -> None:
    with Wire(server) as wire:
        for _ in range(2):
            wire.send(f"POST {CHAT} HTTP/1.1", "host: x", "transfer-encoding: chunked", body=chunked(BODY, size))
            status, _, body = wire.answer()
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")


def test_no_length_is_no_body(server: Running) -> None:
    with Wire(server) as wire:
        wire.send(f"POST {CHAT} HTTP/1.1", "host: x")
        status, _, body = wire.answer()
        assert (status, json.loads(body)["error"]["message"]) == (400, "invalid JSON request: the body is empty")
        wire.send("GET /health HTTP/1.1", "host: x")
        assert wire.answer()[0] == 200


def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent(server: Running) -> None:
    with Wire(server) as wire:
        wire.send(f"POST {CHAT} HTTP/1.1", "host: x", "content-length: 100001", "expect: 100-continue")
        status, _, body = wire.answer()
        assert (status, json.loads(body)["error"]["message"]) == (413, "the request body is larger than 100000 bytes")


def test_a_chunked_body_is_refused_where_it_becomes_too_large(server: Running) -> None:
    with Wire(server) as wire:
        wire.send(f"POST {CHAT} HTTP/1.1", "host: x", "transfer-encoding: chunked")
        for _ in range(11):
            wire.send_raw(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert wire.answer()[0] == 413


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(server: Running) -> None:
    with Wire(server) as wire:
        for _ in range(2):
            wire.send(f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {len(BODY)}", "expect: 100-continue")
            assert wire.answer()[0] == 100
            wire.send_raw(BODY)
            assert wire.answer()[0] == 200


@pytest.mark.parametrize("part", ["head", "body", "chunk"])
def test_half_a_request_is_no_request(part: str, caplog: pytest.LogCaptureFixture) -> None:
    with scripted(line("</think>", "only")) as server:
        with Wire(server) as wire:
            if part == "head":
                wire.send_raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-")
            elif part == "body":
                wire.send_raw(post(BODY)[:-5])
            else:
                head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
                wire.send_raw(head + chunked(BODY, 10)[:-20])
            wire.end()
            assert wire.closed()
        answer = server.post({"messages": HELLO}).json()
        assert answer["id"] == "chatcmpl-1"
        assert answer["choices"][0]["message"]["content"] == "only"
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_no_http_is_a_400(server: Running) -> None:
    for nonsense in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"):
        with Wire(server) as wire:
            wire.send_raw(nonsense)
            assert wire.answer()[0] == 400
            assert wire.closed()
    broken = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n".encode()
    with Wire(server) as wire:
        wire.send_raw(broken)
        assert wire.answer()[0] == 400


def test_head_is_get_without_the_body(server: Running) -> None:
    with Wire(server) as wire:
        for path, status in (("/health", 200), ("/v1/models", 200), ("/docs", 200), ("/nothing", 404), (CHAT, 405)):
            wire.send(f"HEAD {path} HTTP/1.1", "host: x")
            got, headers, _ = wire.answer(head=True)
            assert got == status
            assert int(headers["content-length"]) > 0
        wire.send("GET /v1/models HTTP/1.1", "host: x")
        assert wire.answer()[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "OPTIONS, POST"),
        ("PUT", "/v1/completions", "OPTIONS, POST"),
        ("DELETE", "/v1/messages", "OPTIONS, POST"),
        ("GET", "/v1/messages/count_tokens", "OPTIONS, POST"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PATCH", "/v1/models/ds4-tiny", "GET, HEAD, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("TRACE", "/docs", "GET, HEAD, OPTIONS"),
        ("POST", "/", "GET, HEAD, OPTIONS"),
    ],
)
def test_a_wrong_method_is_a_405_that_names_the_right_ones(
    server: Running, method: str, path: str, allowed: str
) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    shape_of(answer, anthropic=path.startswith("/v1/messages"))


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path",
    ["/x", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/v1/messages/batches", "/v1/messages/", "/v1/x%0ay"],
)
def test_an_unknown_path_is_a_404_in_the_shape_of_its_api(server: Running, method: str, path: str) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == 404
    assert shape_of(answer, anthropic=path.startswith("/v1/messages"))["message"] == "unknown endpoint"


def shape_of(answer: httpx.Response, anthropic: bool) -> dict[str, Any]:
    """The error in a body, which must have the shape of its API and no other."""
    body = answer.json()
    error: dict[str, Any] = body["error"]
    assert set(body) == ({"type", "error"} if anthropic else {"error"})
    assert set(error) == ({"type", "message"} if anthropic else {"message", "type", "param", "code"})
    return error


@pytest.mark.parametrize("host", ["[x", "a b", "x/v1/messages?", "é", "", "x:99999999"])
def test_the_name_a_client_calls_the_server_by_changes_nothing(server: Running, host: str) -> None:
    with Wire(server) as wire:
        for path, status in (("/nothing", 404), ("/health", 200), ("/docs", 200)):
            wire.send(f"GET {path} HTTP/1.1", f"host: {host}")
            got, _, body = wire.answer()
            assert got == status
            if status == 404:
                assert set(json.loads(body)) == {"error"}


def test_query_strings_change_nothing(server: Running) -> None:
    for path in ("/health", "/v1/models", "/v1/models/ds4-tiny", "/docs", "/openapi.json"):
        assert server.http.get(path + "?a=1&limit=0&id=x").status_code == 200
    assert server.post({"messages": HELLO}, CHAT + "?api-version=2&stream=true").json()["object"] == "chat.completion"
