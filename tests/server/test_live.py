"""The list of live sessions: what it says of them, what it does not say, and who may read it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from server_harness import Running, line, scripted
from worker_harness import Gate

from ds4.server.live import LiveSession

HELLO = [{"role": "user", "content": "Hello there, my secret word is swordfish"}]


def test_the_document_has_its_fields() -> None:
    document = (Path(__file__).parents[2] / "docs" / "web.md").read_text(encoding="utf-8")
    for field in fields(LiveSession):
        assert f"`data[].{field.name}`" in document


def listed(server: Running) -> list[dict[str, Any]]:
    answer = server.http.get("/sessions")
    assert answer.status_code == 200
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def test_an_idle_session_says_what_it_holds() -> None:
    with scripted(line("</think>", "Hi"), line("</think>", "Ho"), ctx=256, max_sessions=3) as server:
        empty = server.http.get("/sessions").json()
        assert empty == {
            "object": "list", "data": [], "waiting": 0, "running": 0, "limit": 3, "context_length": 256,
        }  # fmt: skip
        usage = server.post({"messages": HELLO}).json()["usage"]
        server.worker.wait_idle(30)
        (first,) = listed(server)
        # The last token sampled is not evaluated before it is needed.
        assert first["tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert first["kv_bytes"] == 64 * first["tokens"]
        assert (first["request"], first["state"]) == (1, "idle")
        assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (0, 0, 0)
        server.post({"messages": [{"role": "user", "content": "Something else"}]})
        server.worker.wait_idle(30)
        assert [session["request"] for session in listed(server)] == [2, 1]
        assert "swordfish" not in server.http.get("/sessions").text


def test_in_a_long_step_what_was_known_last_has_to_do() -> None:
    gate = Gate()
    slow = line("</think>", "a", prefill_ms_per_token=1)
    with scripted(line("</think>", "Hi"), slow, wait=gate, first_byte_seconds=0.05) as server:
        server.post({"messages": HELLO})
        server.worker.wait_idle(30)
        known = listed(server)
        body = {"messages": [{"role": "user", "content": "Else"}], "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert gate.reached.wait(30)
            assert listed(server) == known
            gate.opened.set()
            response.read()
        server.worker.wait_idle(30)
        assert [session["request"] for session in listed(server)] == [2, 1]


def test_states_and_numbers_while_a_prompt_is_read_and_an_answer_written() -> None:
    seen: list[dict[str, Any]] = []

    def wait(seconds: float) -> bool:
        # In the worker's thread, so it may look at once.
        worker = server.worker
        look = worker._questions
        answer = worker.measure()
        look.settle()
        seen.extend(session.wire() for session in answer.result(30))
        return False

    slow = line("</think>", "a", "b", "c", prefill_ms_per_token=1, step_ms=1)
    with scripted(slow, wait=wait, chunk=16) as server:
        usage = server.post({"messages": HELLO, "max_tokens": 3}).json()["usage"]
        again = server.post({"messages": HELLO, "max_tokens": 3}).json()["usage"]
    reading = [session for session in seen if session["state"] == "reading"]
    writing = [session for session in seen if session["state"] == "writing"]
    first = [session for session in reading if session["request"] == 1]
    assert [session["tokens"] for session in first] == [0, 16][: len(first)]
    assert {session["prompt_tokens"] for session in [*reading, *writing]} == {usage["prompt_tokens"]}
    assert [session["completion_tokens"] for session in writing if session["request"] == 1] == [1, 2]
    cached = {session["cached_tokens"] for session in writing if session["request"] == 2}
    assert cached == {again["prompt_tokens_details"]["cached_tokens"]}
    assert cached != {0}


def test_it_needs_a_key_where_others_do() -> None:
    with scripted(line("</think>", "Hi"), ctx=256, api_keys=("secret",)) as server:
        assert server.http.get("/sessions").status_code == 401
        assert server.http.get("/sessions", headers={"authorization": "Bearer secret"}).status_code == 200


def test_further_answers_are_listed_under_their_request() -> None:
    with scripted(line("</think>", "Hi"), ctx=256) as server:
        server.post({"messages": HELLO, "n": 3})
        server.worker.wait_idle(30)
        assert [session["request"] for session in listed(server)] == [1, 1, 1]
