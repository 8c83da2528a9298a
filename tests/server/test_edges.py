"""What holds for every path: API keys, headers for web pages, HEAD, and exceptions that nobody expected."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from server_harness import Running, line, script_backend, scripted

from ds4.errors import Ds4Error
from ds4.server import edges, serve
from ds4.server.config import ServerConfig
from ds4.server.edges import MAX_KEY_FILE_BYTES, Edges, read_key_file
from ds4.server.worker import Worker

HELLO = [{"role": "user", "content": "Hello"}]
KEYS = ("first-key", "zweiter+/=", "x" * 500)
PROTECTED = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/messages"), ("POST", "/v1/responses"),
    ("POST", "/v1/messages/count_tokens"), ("GET", "/metrics"), ("GET", "/stats"), ("GET", "/sessions"),
    ("GET", "/v1/models"), ("HEAD", "/v1/models"),
    ("GET", "/v1/models/ds4-tiny"), ("GET", "/nothing"), ("PUT", "/health/"), ("GET", "/docs/x"), ("GET", "/%2Fhealth"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi"), ctx=256, api_keys=KEYS, cors=True) as running:
        yield running


# ---- web pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for method, path in PROTECTED if method == "POST"])
def test_a_page_of_another_site_cannot_make_the_model_work(path: str) -> None:
    page = {"origin": "https://site.example", "content-type": "text/plain"}
    asked = {"prompt": "x"} if path.endswith("/completions") and "chat" not in path else {"input": "x"}
    body = json.dumps({"messages": HELLO, "max_tokens": 1, **asked}).encode()

    def status(server: Running, **headers: str) -> int:
        return server.http.post(path, content=body, headers={**page, **headers}).status_code

    with scripted(line("</think>", "Hi"), ctx=256) as server:
        refused = server.http.post(path, content=body, headers={**page, "sec-fetch-site": "cross-site"})
        assert refused.status_code == 403
        assert "--cors" in refused.json()["error"]["message"]
        assert "permission_error" in refused.text or "messages" not in path
        # The own page, a person's tool, and what stands behind a proxy that changes names.
        for headers in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {"host": "other"}, {}):
            assert status(server, **headers) == 200
        assert server.http.get("/health", headers={"sec-fetch-site": "cross-site"}).status_code == 200
        assert server.worker._count == 4 * (not path.endswith("count_tokens"))
    with scripted(line("</think>", "Hi"), ctx=256, cors=True) as server:
        assert status(server, **{"sec-fetch-site": "cross-site"}) == 200


# ---- API keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_by_either_header(server: Running, key: str) -> None:
    for headers in (
        {"authorization": f"Bearer {key}"},
        {"authorization": f"bEARER   {key}"},
        {"x-api-key": key},
        {"x-api-key": key, "authorization": "Bearer none"},
        {"x-api-key": "none", "authorization": f"Bearer {key}"},
    ):
        answer = server.http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_without_a_key_nothing_is_answered(server: Running, method: str, path: str) -> None:
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer FIRST-KEY"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer first-key x"},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"x-api-key": ""},
        {"x-api-key": "Bearer first-key"},
        {"x-api-key": "first-key, zweiter+/="},
        {"cookie": "first-key"},
    ]
    for headers in wrong:
        answer = server.http.request(method, path + "?key=first-key&api_key=first-key", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["access-control-allow-origin"] == "*"
        if method == "HEAD":
            continue
        error = answer.json()["error"]
        given = any(value not in ("", "Bearer") for name, value in headers.items() if name == "x-api-key")
        given |= headers.get("authorization", "").startswith("Bearer ")
        assert error["message"].startswith("the API key is not" if given else "this server needs an API key")
        if path.startswith("/v1/messages"):
            assert error["type"] == "authentication_error"
        else:
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_health_the_description_and_options_are_open(server: Running) -> None:
    for path in ("/health", "/docs", "/openapi.json"):
        assert server.http.get(path).status_code == 200
        assert server.http.head(path).status_code == 200
        for key in KEYS:
            assert key not in server.http.get(path).text
    assert server.http.options("/v1/chat/completions").status_code == 204
    schema = server.http.get("/openapi.json").json()
    assert schema["security"] == [{"bearer": []}, {"header": []}]
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "header"}
    assert "API key" in server.http.get("/docs").text


def test_a_stranger_is_refused_before_the_body_is_sent(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\nexpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_without_keys_any_key_will_do() -> None:
    with scripted(line("</think>", "x")) as server:
        for headers in ({}, {"authorization": "Bearer none"}, {"x-api-key": "y"}):
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert "security" not in server.http.get("/openapi.json").json()


def test_all_digests_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def comparing(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(edges.hmac, "compare_digest", comparing)
    wrapped = Edges(fine, keys=KEYS)
    for key in (*KEYS, "wrong"):
        compared.clear()
        status, _, _ = call(wrapped, headers=[(b"x-api-key", key.encode())])
        assert status == (401 if key == "wrong" else 200)
        assert len(compared) == len(KEYS)
        assert {len(value) for pair in compared for value in pair} == {32}


def test_keys_are_neither_shown_nor_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
    with scripted(line("</think>", "x"), api_keys=("secret",), trace=tmp_path / "trace") as server:
        for key in ("secret", "secret-typo"):
            headers = {"authorization": f"Bearer {key}", "x-api-key": key}
            server.http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
    # The client's own log is not the server's.
    ours = [record.getMessage() for record in caplog.records if record.name.split(".")[0] in ("ds4", "uvicorn")]
    assert ours
    assert "secret" not in "".join(ours)
    assert "secret" not in (tmp_path / "trace").read_text()


def test_the_clients_of_both_apis_know_the_error(server: Running) -> None:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    client = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0, http_client=http)
    with pytest.raises(anthropic.AuthenticationError, match="not one of this server's"):
        client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.AuthenticationError):
        client.models.list()
    names = [model.id for model in client.with_options(api_key=KEYS[0]).models.list()]
    assert names == ["ds4-tiny", "deepseek-v4-flash", "deepseek-v4-pro"]


# ---- the file of keys -----------------------------------------------------------------------------------------------


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# of the team\r\n  one \r\n\r\n#two\nthree#3\n\t# four\nsk-four")
    assert read_key_file(path) == ("one", "three#3", "sk-four")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no keys; write one a line"),
        (b"\n# nothing\n", "has no keys"),
        (b"ok\nhush hush\n", "line 2: the API key has a space"),
        ("schlüssel".encode(), "line 1: the API key has a space or a character that is not ASCII"),
        (b"# \xff is read over\n\xffhush", "line 2: the API key has"),
        (b"hush\0hush", "line 1: the API key has"),
        (b"#" * (MAX_KEY_FILE_BYTES + 1), "is it a file of API keys?"),
    ],
)
def test_a_wrong_file_is_named_and_its_keys_are_not_shown(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(Ds4Error) as caught:
        read_key_file(path)
    assert f"--api-key-file {path}" in str(caught.value)
    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(Ds4Error, match=f"--api-key-file {path}: {said}"):
            read_key_file(path)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that `run` would serve, once it has loaded everything."""
    configs: list[ServerConfig] = []
    create = serve.create_app

    def creating(worker: Worker, config: ServerConfig) -> Any:
        configs.append(config)
        return create(worker, config)

    monkeypatch.setattr(serve, "create_app", creating)
    monkeypatch.setattr(serve.GracefulServer, "run", lambda self, sockets: None)
    monkeypatch.setattr(serve, "load_backend", lambda config: script_backend(line("x"), config=config))
    return configs


class Listener:
    """A listening socket on any address one likes."""

    def __init__(self, host: str) -> None:
        self.host = host

    def getsockname(self) -> tuple[str, int]:
        return self.host, 8000


def test_the_vocabulary_is_read_before_anybody_can_ask(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While that is done the whole process stands still."""
    ready: list[bool] = []

    def run(server: serve.GracefulServer, sockets: Any) -> None:
        ready.append(server._worker.prompts._grammars._vocabulary is not None)

    monkeypatch.setattr(serve.GracefulServer, "run", run)
    serve.run(ServerConfig(), Listener("127.0.0.1"))  # type: ignore[arg-type]
    assert ready == [True]


def test_the_keys_of_the_file_join_those_of_the_command_line(served: list[ServerConfig], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("two\nthree\n")
    serve.run(ServerConfig(api_keys=("one",), api_key_file=path), Listener("127.0.0.1"))  # type: ignore[arg-type]
    assert served[0].api_keys == ("one", "two", "three")
    with pytest.raises(Ds4Error, match="--api-key-file"):
        serve.run(ServerConfig(api_key_file=tmp_path / "no"), Listener("127.0.0.1"))  # type: ignore[arg-type]
    assert len(served) == 1


@pytest.mark.parametrize(
    ("host", "open_to_others"),
    [
        ("127.0.0.1", False), ("127.8.9.1", False), ("::1", False), ("::ffff:127.0.0.1", False), ("0.0.0.0", True),
        ("::", True), ("192.168.1.5", True), ("fe80::1%eth0", True), ("::ffff:10.0.0.1", True),
    ],
)  # fmt: skip
def test_an_address_that_others_reach_without_a_key_is_warned_of(
    host: str, open_to_others: bool, served: list[ServerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    serve.run(ServerConfig(), Listener(host))  # type: ignore[arg-type]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == open_to_others
    assert all(host in text and "--api-key-file" in text for text in warnings)
    caplog.clear()
    serve.run(ServerConfig(api_keys=("k",)), Listener(host))  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---- the rest -------------------------------------------------------------------------------------------------------


async def fine(scope: Any, receive: Any, send: Any) -> None:
    """An application that says which method it sees."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": scope["method"].encode()})


async def fails(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError("defect")


async def fails_late(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("defect")


def call(
    app: Any, method: str = "GET", path: str = "/v1/x", headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an ASGI application's answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    asyncio.run(app({**scope, "headers": headers or []}, None, send))
    body = b"".join(message["body"] for message in sent[1:])
    return sent[0]["status"], sent[0]["headers"], body


def test_head_is_get_without_a_body_and_options_reach_nothing() -> None:
    assert call(Edges(fine)) == (200, [(b"a", b"b")], b"GET")
    assert call(Edges(fine), "HEAD") == (200, [(b"a", b"b")], b"")
    assert call(Edges(fine), "PURGE") == (200, [(b"a", b"b")], b"PURGE")
    assert call(Edges(fails, keys=("k",)), "OPTIONS") == (204, [], b"")


def test_web_pages_may_send_keys_and_read_every_answer() -> None:
    for app, method, status in ((fine, "GET", 200), (fails, "GET", 500), (fine, "OPTIONS", 204)):
        got, headers, _ = call(Edges(app, cors=True), method)
        assert got == status
        values = {name.decode(): value.decode() for name, value in headers}
        assert values["access-control-allow-origin"] == "*"
        assert values["access-control-allow-methods"] == "GET, POST, OPTIONS"
        assert values["access-control-allow-headers"] == "*, Authorization"
    assert call(Edges(fine))[1] == [(b"a", b"b")]


def test_an_exception_is_an_error_of_the_api_until_something_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    status, _, body = call(Edges(fails), path="/v1/chat/completions\nforged line")
    assert status == 500
    assert json.loads(body)["error"]["type"] == "server_error"
    assert "defect" not in body.decode()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.getMessage() == "GET '/v1/chat/completions\\nforged line' failed"
    assert json.loads(call(Edges(fails), path="/v1/messages")[2])["error"]["type"] == "api_error"
    with pytest.raises(ValueError, match="defect"):
        call(Edges(fails_late))
