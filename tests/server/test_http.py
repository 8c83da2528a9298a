"""What a client sees on the wire: errors, limits, headers, silence, and leaving early."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_harness import WEATHER, Running, call_pieces, line, scripted

from ds4.server import app as app_module
from ds4.server.api.chat import ChatAnswer

HELLO = [{"role": "user", "content": "Hello"}]
FLAT = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi", " there"), ctx=256, max_body_bytes=100_000, cors=True) as running:
        yield running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages"),
        ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "q"}}]}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "function", "function": {"description": "no name"}}]}, "tools"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"seed": 1 << 70}, "seed"),
        ({"seed": -(1 << 70)}, "seed"),
        ({"seed": 1e20}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": 3}, "stop"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": None}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}}, "response_format"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "strict": "true"}}]}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, "tool_choice.allowed_tools"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"thinking": 1}, "thinking"),
        ({"reasoning_effort": "herculean"}, "reasoning_effort"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
def test_a_wrong_or_unsupported_field_is_a_400_that_names_it(
    server: Running, extra: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        error = error_of(server.post({"messages": HELLO, "stream": stream, **extra}), 400)
        assert error["param"] == param.split(".")[0]
        assert param in error["message"]


def test_fields_that_change_nothing_are_accepted(server: Running) -> None:
    harmless = {
        "n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me",
        "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "unknown": [1],
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "top_k": -1, "max_tokens": 5.9,
        "stop": ["", ""], "thinking": {"type": "adaptive"}, "seed": -3, "stream": None, "temperature": 0,
    }  # fmt: skip
    answer = server.post({"messages": HELLO, **harmless})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hi there"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages":NaN}', b'{"a":1}x', b'"x"', b'{"a":' * 3000, b"\xff\xfe", b"{}{}"]
)
def test_a_body_that_is_no_json_object_is_a_400(server: Running, body: bytes) -> None:
    error_of(server.http.post("/v1/chat/completions", content=body), 400)


def test_an_unknown_model_is_a_404_that_names_the_known_ones(server: Running) -> None:
    for id in ("gpt-4", "", "a/b"):
        error = error_of(server.http.get(f"/v1/models/{id}"), 404)
        assert repr(id) in error["message"]
        assert "ds4-tiny, deepseek-v4-flash, deepseek-v4-pro" in error["message"]
        assert error["code"] == "model_not_found"


def test_a_body_over_the_limit_is_a_413_with_and_without_its_length(server: Running) -> None:
    big = json.dumps({"messages": HELLO, "pad": "x" * 200_000}).encode()
    error_of(server.http.post("/v1/chat/completions", content=big), 413)

    def chunks() -> Iterator[bytes]:
        yield big

    error_of(server.http.post("/v1/chat/completions", content=chunks()), 413)
    chunked = json.dumps({"messages": HELLO}).encode()
    assert server.http.post("/v1/chat/completions", content=iter([chunked[:9], chunked[9:]])).status_code == 200


def test_a_prompt_as_long_as_the_context_is_refused_in_the_words_clients_look_for(server: Running) -> None:
    error = error_of(server.post({"messages": [{"role": "user", "content": "a b c d " * 100}]}), 400)
    tokens = error["n_prompt_tokens"]
    assert error["message"] == f"Prompt has {tokens} tokens, but the configured context size is 256 tokens"
    assert (error["param"], error["code"], error["n_ctx"]) == ("messages", "context_length_exceeded", 256)
    assert tokens >= 256


def test_cors_options_and_health(server: Running) -> None:
    answer = server.http.options("/v1/anything")
    assert (answer.status_code, answer.content) == (204, b"")
    for response in (answer, server.http.get("/v1/models"), server.post({"messages": HELLO, "stream": True})):
        assert response.headers["access-control-allow-origin"] == "*"
        assert response.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
        assert response.headers["access-control-expose-headers"] == "Retry-After, X-Should-Retry"
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert health["model"] == "ds4-tiny"
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]


def test_without_cors_there_are_no_such_headers() -> None:
    with scripted(line("x")) as server:
        assert "access-control-allow-origin" not in server.http.get("/v1/models").headers


class Gate:
    """A scripted model's clock: every wait lasts until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, seconds: float) -> bool:
        self.reached.set()
        self.opened.wait(30)
        return False


def test_a_silent_stream_gets_headers_and_keep_alives_in_prefill_and_decode() -> None:
    gate = Gate()
    slow = line("</think>", "x", prefill_ms_per_token=1)
    with scripted(slow, wait=gate, first_byte_seconds=0.01, keep_alive_seconds=0.02) as server:
        body = {"messages": HELLO, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            # Known before the first event, so that the request can be found in /sessions.
            assert response.headers["x-request-id"] == "1"
            assert response.headers["cache-control"] == "no-cache"
            lines = response.iter_lines()
            seen = []
            for text in lines:
                seen.append(text)
                if seen.count(": keep-alive") == 3:
                    break
            # No chunk before there is something to say: clients measure by the first one how fast prompts are read.
            assert set(seen) == {": keep-alive", ""}
            gate.opened.set()
            rest = [text for text in lines if text.startswith("data: ")]
        assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
        assert server.post({"messages": HELLO}).headers["x-request-id"] == "2"


def test_a_failure_is_a_status_before_the_first_byte_and_an_event_after_it() -> None:
    gate = Gate()
    fails_late = line("</think>", "a", "b", "c", fail_at=3)
    fails_early = line("x", fail_prefill_at=2)
    fails_slowly = line("x", fail_prefill_at=30, prefill_ms_per_token=1)
    good = line("</think>", "fine")
    with scripted(fails_late, fails_early, fails_slowly, good, wait=gate, chunk=16, first_byte_seconds=5.0) as server:
        gate.opened.set()
        body = {"messages": HELLO, "stream": True}
        late = server.post(body)
        assert late.status_code == 200
        frames = [text for text in late.text.split("\n\n") if text]
        assert json.loads(frames[-1].removeprefix("data: "))["error"] == {
            "message": "the script fails at step 3", "type": "server_error", "param": None, "code": None,
        }  # fmt: skip
        assert '"content":"b"' in frames[-2]
        assert "fails at token 2" in error_of(server.post(body), 500)["message"]
        long = {"messages": [{"role": "user", "content": "word " * 40}]}
        assert "fails at token 30" in error_of(server.post(long), 500)["message"]
        # The server lives, and the next answer is right.
        assert server.post({"messages": HELLO}).json()["choices"][0]["message"]["content"] == "fine"


def hang_up(server: Running, body: dict[str, Any], until: threading.Event) -> None:
    """Send a request and close the connection once the event is set."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        assert until.wait(30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_ends_its_answer_and_what_was_computed_stays(
    stream: bool, phase: str, tmp_path: Any
) -> None:
    trace = tmp_path / "trace"
    gate = Gate()
    timing = {"prefill_ms_per_token": 1} if phase == "prefill" else {"step_ms": 1}
    endless = line("</think>", "on", " and", then="repeat", **timing)
    prompt = {"messages": [{"role": "user", "content": "word " * 50}]}
    with scripted(endless, line("</think>", "Right."), wait=gate, chunk=16, trace=trace) as server:
        hang_up(server, {**prompt, "stream": stream}, gate.reached)
        wait_until(lambda: all(job.cancelled for job in server.worker.jobs()))
        gate.opened.set()
        assert server.worker.wait_idle(30)
        events = [json.loads(text) for text in trace.read_text().splitlines()]
        assert events[-1]["event"] == "cancel"
        assert events[-1]["phase"] == phase
        answer = server.post(prompt).json()
        assert answer["choices"][0]["message"]["content"] == "Right."
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_a_waiting_request_whose_client_leaves_takes_no_line_and_a_full_queue_is_a_429(tmp_path: Any) -> None:
    trace = tmp_path / "trace"
    gate = Gate()
    script = [line("</think>", "one", step_ms=1), line("</think>", "two"), line("</think>", "three")]
    with scripted(*script, wait=gate, max_sessions=1, max_queue=1, trace=trace) as server:
        answers: list[Any] = []
        first = threading.Thread(target=lambda: answers.append(server.post({"messages": HELLO})))
        first.start()
        assert gate.reached.wait(30)
        queued = threading.Event()
        leaving = threading.Thread(target=hang_up, args=(server, {"messages": HELLO}, queued))
        leaving.start()
        wait_until(lambda: server.worker.status()["waiting"] == 1)
        full = server.post({"messages": HELLO})
        assert full.status_code == 429
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert full.headers["retry-after"] == "5"
        queued.set()
        leaving.join()
        wait_until(lambda: all(job.cancelled for job in list(server.worker._waiting)))
        gate.opened.set()
        first.join()
        assert server.worker.wait_idle(30)
        assert answers[0].json()["choices"][0]["message"]["content"] == "one"
        second = server.post({"messages": [{"role": "user", "content": "Next"}]})
        assert second.json()["choices"][0]["message"]["content"] == "two"
    events = [json.loads(text) for text in trace.read_text().splitlines()]
    assert [(e["request"], e["phase"]) for e in events if e["event"] == "cancel"] == [(2, "queue")]


def wait_until(condition: Any) -> None:
    """Look until a condition holds; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.001)


def test_stopping_ends_running_and_waiting_requests() -> None:
    gate = Gate()
    endless = line("</think>", "on", then="repeat", step_ms=1)
    with scripted(endless, wait=gate, max_sessions=1, ctx=10**9, max_tokens=10**9) as server:
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(server.post({"messages": HELLO}))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.worker.status() == {"waiting": 1, "running": 1, "sessions": 1})
        gate.opened.set()
        assert server.worker.stop(30)
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [503, 503]
        assert {answer.json()["error"]["message"] for answer in answers} == {"server shutting down"}
        assert server.post({"messages": HELLO}).status_code == 503


def test_a_malformed_call_is_an_error_event_in_a_stream_and_text_otherwise() -> None:
    good = call_pieces(("get_weather", [("city", "Rome", True)]))
    cut = good.index(">\n", good.index(' name="get_weather"')) + 1
    broken = [*good[:cut], "nonsense", *good[cut:]]
    with scripted(line("</think>", "Look:", *broken)) as server:
        body = {"messages": HELLO, "tools": [WEATHER]}
        frames = [text for text in server.post({**body, "stream": True}).text.split("\n\n") if text]
        assert "malformed tool call" in json.loads(frames[-1].removeprefix("data: "))["error"]["message"]
        arguments = "".join(
            call["function"]["arguments"]
            for text in frames[:-1]
            for call in json.loads(text.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls", ())
        )
        assert json.loads(arguments) == {}
        choice = server.post(body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "nonsense" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER]}, '"error":'),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **WEATHER["function"]}]}, "response.failed"),
        ("/v1/messages", {"messages": HELLO, "tools": [FLAT], "thinking": True}, "event: error"),
    ],
)
def test_a_stream_ends_where_its_call_turns_out_malformed(path: str, body: dict[str, Any], ends: str) -> None:
    start = call_pieces(("get_weather", [("city", "Rome", True)]))
    cut = start.index(">\n", start.index(' name="get_weather"')) + 1
    with scripted(line("</think>", *start[:cut], "nonsense", then="repeat")) as server:
        text = server.post({**body, "stream": True, "max_tokens": 1500}, path).text
        assert ends in text
        assert "malformed tool call" in text
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        assert server.worker.engine.tokenizer.decode(session.tokens).count(b"nonsense") <= 2


def test_half_a_call_that_a_stop_string_leaves_is_no_call() -> None:
    pieces = call_pieces(("get_weather", [("city", "hello STOP there", True)]))
    with scripted(line("</think>", "Look:", *pieces)) as server:
        body = {"messages": HELLO, "tools": [WEATHER], "stop": ["STOP"]}
        choice = server.post(body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "Look:"
        assert "tool_calls" not in choice["message"]
        frames = [text.removeprefix("data: ") for text in server.post({**body, "stream": True}).text.split("\n\n")]
        assert frames[-2:] == ["[DONE]", ""]
        choices = [json.loads(text)["choices"][0] for text in frames[:-2]]
        assert choices[-1]["finish_reason"] == "stop"
        arguments = "".join(
            call["function"]["arguments"] for one in choices for call in one["delta"].get("tool_calls", ())
        )
        assert json.loads(arguments) == {"city": "hello "}


def test_a_conflict_tells_the_client_not_to_repeat_the_request(server: Running) -> None:
    answer = server.post({"input": "x", "previous_response_id": "resp_gone"}, "/v1/responses")
    assert answer.headers["x-should-retry"] == "false"
    assert error_of(answer, 409)["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_not_asked_for_again(stream: bool) -> None:
    """Clients repeat a 503 by themselves, and the same answer would take as long."""
    with scripted(line("on", then="repeat", step_ms=1), request_timeout=0.2, first_byte_seconds=60) as server:
        body = {"messages": HELLO, "max_tokens": 10**6, "stream": stream}
        answer = server.post(body)
        if stream:
            assert "max_tokens" in answer.text.split("\n\n")[-2]
            return
        assert "max_tokens" in error_of(answer, 503)["message"]
        assert answer.headers["x-should-retry"] == "false"


def test_a_defect_before_the_first_byte_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(line("on", then="repeat", step_ms=1), ctx=10**6) as server:
        monkeypatch.setattr(ChatAnswer, "__init__", lambda *_: 1 / 0)
        assert error_of(server.post({"messages": HELLO, "max_tokens": 10**9}), 500)
        assert server.worker.wait_idle(30)


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_headers_over_the_limit_are_a_431(server: Running, method: str) -> None:
    path = "/v1/chat/completions" if method == "POST" else "/health"
    body = {"json": {"messages": HELLO}} if method == "POST" else {}
    fine = server.http.request(method, path, headers={"x-long": "a" * 60_000}, **body)  # type: ignore[arg-type]
    assert fine.status_code in (200, 204)
    for headers in ({"x-long": "a" * 100_000}, {f"x-{i}": "a" * 1000 for i in range(70)}):
        answer = server.http.request(method, path, headers=headers, **body)  # type: ignore[arg-type]
        assert "65536" in error_of(answer, 431)["message"]
    both = server.http.request(method, path + "?" + "a" * 40_000, headers={"x-long": "a" * 40_000}, **body)  # type: ignore[arg-type]
    assert "65536" in error_of(both, 431)["message"]
    assert server.http.get("/health").status_code == 200


def test_without_a_worker_requests_and_health_are_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(line("x")) as server:
        assert server.http.get("/health").json()["status"] == "ok"
        assert server.worker.stop(10)
        server.worker._stopping = False  # as if the thread had ended by itself
        assert "the worker has ended" in error_of(server.post({"messages": HELLO}), 503)["message"]
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")


def test_a_long_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    parse = app_module.parse_json

    def parsing(body: bytes) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse(body)

    monkeypatch.setattr(app_module, "parse_json", parsing)
    with scripted(line("</think>", "x"), ctx=4096) as server:
        for padding in (0, 10, 600_000):
            assert server.post({"messages": HELLO, "metadata": {"a": "b" * padding}}).status_code == 200
        error_of(server.http.post("/v1/chat/completions", content=b"[" + b"1," * 300_000 + b"1]"), 400)
    small, other, large, wrong = threads
    assert small == other
    assert small not in (large, wrong)
