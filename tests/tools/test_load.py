"""Load tests in small: many streams, clients that leave, and the tool that measures it. How long things take is not a
question for a test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import load
import pytest
from load_client import APIS, Answer, Ask, Pace, StreamError, ask, reader_of
from server_harness import Running, line, random_engine, scripted, serving

from ds4.errors import Ds4Error
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The real graph, small and with random weights; it writes until its limit."""
    config = ServerConfig(ctx=2048, max_sessions=4, first_byte_seconds=0.0)
    with serving(Backend(random_engine(2048), "ds4-tiny"), config) as running:
        yield running


def test_answers_under_load_are_those_of_each_alone(server: Running) -> None:
    asks = load.requests(9)[:12]
    wanted = asyncio.run(load.references(server.url, asks))
    assert {answer.finish for answer in wanted.values()} <= {"length", "incomplete", "max_tokens"}
    assert {answer.tokens for answer in wanted.values()} == {9}
    found = asyncio.run(load.streams(server.url, wanted, 16, 4, 0, rounds=3, pace=Pace(7)))
    assert not found.problems
    assert len(found.answers) == len(found.first_bytes) == 48
    assert found.memory


def test_clients_that_leave_in_all_phases_leave_nothing_behind(server: Running) -> None:
    asks = load.requests(9)[:8]
    wanted = asyncio.run(load.references(server.url, asks))
    phases = asyncio.run(load.disconnects(server.url, asks, 100, 10, seed=3, patience=0.01))
    assert sum(phases.values()) == 100
    assert set(phases) == set(load.PHASES)
    now = asyncio.run(load.settled(server.url))
    assert not now["requests"]["failed"]
    assert server.worker.wait_idle(30)
    assert not any(slot.busy for slot in server.worker._slots.slots)
    assert len(server.worker.sessions()) <= 4
    _, answers = asyncio.run(load.together(server.url, asks))
    assert answers == list(wanted.values())


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    lines = line(*["word "] * 200_000), line("</think>", "Hi")
    # No header before the answer has begun: on a busy machine the other request could take the first line.
    with scripted(*lines, ctx=300_000, max_tokens=300_000, first_byte_seconds=60.0) as server:
        endless, short = Ask("chat", "one", 250_000, thinking=True), Ask("chat", "two", 5, thinking=True)

        async def both() -> Answer:
            connection = await load.Connection.open(server.url, Pace(1, 1e-9))
            try:
                connection.writer.write(endless.head("x") + endless.body())
                await connection.head()
                return await ask(server.url, short)
            finally:
                connection.close()

        assert asyncio.run(both()).text == "Hi"
        assert asyncio.run(load.settled(server.url))["requests"]["stop"] == 1


def test_runs_with_and_without_http_make_the_same_steps(tmp_path: Path) -> None:
    pacing = load.Pacing(4, 30, 0)
    script = tmp_path / "script.jsonl"
    script.write_text(pacing.script(), encoding="utf-8")
    assert load.without_http(script, pacing) > 0
    with scripted(*map(json.loads, script.read_text().splitlines()), max_sessions=4) as server:
        assert asyncio.run(load.paced(server.url, pacing)) > 0


def test_the_command_says_what_it_measured(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", server.url, "--clients", "3", "--tokens", "4"]
    load.main(["streams", *arguments, "--slow", "1", "--seconds", "0.2"])
    told = capsys.readouterr().out
    assert "met:    every stream ends, with no event lost and the answer that it has alone" in told
    load.main(["disconnects", *arguments, "--times", "20", "--patience", "0.01"])
    told = capsys.readouterr().out
    for bar in (
        "20 clients left, and nothing runs or waits for them",
        "no request failed",
        "the next requests are right",
    ):
        assert f"met:    {bar}" in told


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["streams", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


# ---- what the tool says of a server that fails ----------------------------------------------------------------------

ASK = Ask("chat", "x", 1)
ANSWER = Answer("", "x", "stop", 1)
DONE = "the model goes on while clients read slowly"


class Server:
    """Numbers of a server that is not there; looks at it are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.numbers: dict[str, Any] = {
            "process_resident_memory_bytes": 100, "process_open_fds": 1, "step_seconds": {"count": 1},
            "prompt_tokens": {"evaluated": 0}, "completion_tokens": 0, "requests_running": 0, "requests_waiting": 0,
            "requests": dict.fromkeys(("stop", "failed", "overdue", "malformed"), 0), "sessions": 0,
            "sessions_limit": 4,
        }  # fmt: skip
        self.fails_at: int | None = None
        self.error: Exception = OSError("timed out")
        monkeypatch.setattr(load, "read", self.read)
        monkeypatch.setattr(load, "ask", self.ask)
        monkeypatch.setattr(load, "LOOK", 0.0)
        monkeypatch.setattr(load, "SETTLE", 0.0)

    def read(self, url: str, path: str) -> dict[str, Any]:
        self.looks += 1
        if self.fails_at is not None and self.looks >= self.fails_at:
            raise self.error
        return self.numbers

    async def ask(self, url: str, request: Ask, pace: Pace | None = None) -> Answer:
        while self.fails_at is not None and self.looks < self.fails_at:
            await asyncio.sleep(0)
        return ANSWER


@pytest.mark.parametrize("error", [OSError("timed out"), Ds4Error("answers 500"), KeyError("step_seconds")])
def test_a_server_that_cannot_be_watched_meets_no_bar_by_that(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch)
    server.error, server.fails_at = error, 2
    found = asyncio.run(load.streams("u", {ASK: ANSWER}, 1, 0, 0, rounds=1))
    assert ["the server could not be watched" in problem for problem in found.problems] == [True]
    assert not found.memory
    assert math.isnan(found.stalls)

    async def unseen(*_: Any) -> load.Load:
        return found

    server.fails_at = None
    monkeypatch.setattr(load, "streams", unseen)
    options = SimpleNamespace(tokens=1, clients=1, slow=0, seconds=0)
    assert not asyncio.run(load.run_streams("u", options))  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "MISSED: every stream ends" in told
    assert f"MISSED: {DONE}" in told
    assert "MISSED: memory is flat" in told


def test_no_answer_at_all_meets_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Server(monkeypatch)

    async def nothing(*_: Any) -> load.Load:
        return load.Load()

    monkeypatch.setattr(load, "streams", nothing)
    options = SimpleNamespace(tokens=1, clients=0, slow=0, seconds=0)
    assert not asyncio.run(load.run_streams("u", options))  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "MISSED: the first byte of every stream" in told
    assert "MISSED: memory is flat" in told


def test_there_is_a_look_behind_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause up to the end counts."""
    server = Server(monkeypatch)
    monkeypatch.setattr(load, "LOOK", 1e9)
    times = iter(range(0, 10**6, 10))
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: next(times)))

    async def answer(url: str, request: Ask, pace: Pace | None = None) -> Answer:
        while not server.looks:
            await asyncio.sleep(0)
        return ANSWER

    monkeypatch.setattr(load, "ask", answer)
    found = asyncio.run(load.streams("u", {ASK: ANSWER}, 1, 0, 0, rounds=1))
    assert len(found.memory) == server.looks == 2
    assert found.stalls == found.memory[1][0] - found.memory[0][0] > 0


@pytest.mark.parametrize("key", ["requests_running", "requests_waiting"])
def test_requests_that_stay_behind_clients_that_left_are_a_bar(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch)

    async def left(*_: Any) -> Any:
        server.numbers = {**server.numbers, key: 2}
        return Counter(load.PHASES)

    async def together(*_: Any) -> Any:
        return 4, [ANSWER] * len(load.requests(1))

    monkeypatch.setattr(load, "disconnects", left)
    monkeypatch.setattr(load, "together", together)
    options = SimpleNamespace(tokens=1, times=7, clients=1, seed=1, patience=0)
    assert not asyncio.run(load.run_disconnects("u", options))  # type: ignore[arg-type]
    assert "MISSED: 7 clients left, and nothing runs or waits for them" in capsys.readouterr().out
    with pytest.raises(Ds4Error, match="for nobody"):
        asyncio.run(load.settled("u"))


def test_a_server_is_at_rest_when_two_looks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    monkeypatch.setattr(load, "SETTLE", 1e9)
    seen = iter([0, 1, 0, 1, 0, 0])
    monkeypatch.setattr(load, "read", lambda *_: {**server.numbers, "requests_running": next(seen)})
    asyncio.run(load.settled("u"))
    assert not list(seen)


@pytest.mark.parametrize(
    ("served", "met"),
    [([90.0, 90, 90, 99, 101], False), ([96.0, 96, 96, 20, 20], True), ([94.0, 94, 94, 94, 94], False)],
)
def test_what_http_costs_is_judged_by_the_medians(
    served: list[float], met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter(served)

    async def paced(*_: Any) -> float:
        return next(rates)

    monkeypatch.setattr(load, "server", lambda flags: contextlib.nullcontext("u"))
    monkeypatch.setattr(load, "paced", paced)
    monkeypatch.setattr(load.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="100.0"))
    options = SimpleNamespace(streams=1, tokens=1, step_ms=1, rounds=5, flags=[])
    assert load.run_steps(options) is met  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "median 100.0, best 100.0" in told
    assert f"best {max(served):.1f}" in told


# ---- a stream that is not as it should be ----------------------------------------------------------------------------


def chunk(text: str = "", finish: str = "null", id: str = "1") -> str:
    choice = f'{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": {finish}}}'
    return f'data: {{"id": "{id}", "choices": [{choice}]}}'


USAGE = 'data: {"id": "1", "choices": [], "usage": {"completion_tokens": 2}}'
WHOLE = [": keep-alive", chunk("a"), chunk("b"), chunk(finish='"stop"'), USAGE, "data: [DONE]"]


def test_a_whole_stream_is_the_sum_of_its_events() -> None:
    assert read("chat", WHOLE) == Answer("", "ab", "stop", 2)


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        (WHOLE[:-1], "without its last event"),
        ([*WHOLE, WHOLE[-1]], "follows the last one"),
        ([*WHOLE[:4], chunk("c"), *WHOLE[4:]], "follows its finish"),
        ([chunk("a"), USAGE, "data: [DONE]"], "why it ended"),
        ([*WHOLE[:4], "data: [DONE]"], "how many tokens"),
        ([chunk("a", id="2"), *WHOLE[1:]], "the id changes"),
        (["data: {"], "not JSON"),
        (["data: {}\ndata: {}"], "not an event"),
        (['data: {"error": {"message": "no"}}'], "an error event"),
    ],
)
def test_chat_streams_that_are_wrong(frames: list[str], problem: str) -> None:
    with pytest.raises(StreamError, match=problem):
        read("chat", frames)


def test_an_event_of_a_response_that_is_missing_is_noticed() -> None:
    frames = [f'event: x\ndata: {{"type": "x", "sequence_number": {number}}}' for number in (0, 1, 3)]
    with pytest.raises(StreamError, match="event 2 is missing: 3 comes"):
        read("responses", frames)
    with pytest.raises(StreamError, match=r"says that it is y"):
        read("responses", ['event: x\ndata: {"type": "y"}'])
    with pytest.raises(StreamError, match="does not belong"):
        read("responses", ["data: [DONE]"])


OPENED = 'event: message_start\ndata: {"type": "message_start", "message": {}}'
CLOSED = (
    'event: message_delta\ndata: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, '
    '"usage": {"output_tokens": 3}}',
    'event: message_stop\ndata: {"type": "message_stop"}',
)


def test_blocks_of_a_message_open_and_close_in_order() -> None:
    def block(kind: str, index: int) -> str:
        value = {"type": f"content_block_{kind}", "index": index, "delta": {"text": "text"}}
        return f"event: {value['type']}\ndata: {json.dumps(value)}"

    def message(*blocks: tuple[str, int]) -> Answer:
        return read("messages", [OPENED, *(block(*one) for one in blocks), *CLOSED])

    right = [("start", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("stop", 1)]
    assert message(*right) == Answer("", "text" * 2, "end_turn", 3)
    assert message(*right[:3]) == Answer("", "text", "end_turn", 3)
    # Of all orders of two blocks one is right: they do not overlap, and come by their numbers.
    accepted = []
    for order in itertools.permutations(right):
        with contextlib.suppress(StreamError):
            message(*order)
            accepted.append(list(order))
    assert accepted == [right]
    for at in range(len(right)):
        if right[at][0] != "delta":
            with pytest.raises(StreamError):
                message(*right[:at], *right[at + 1 :])


def read(api: str, frames: list[str]) -> Answer:
    reader = reader_of(api)
    for frame in frames:
        reader.take(frame)
    return reader.answer()


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_is_no_stream(api: str, server: Running) -> None:
    with pytest.raises(StreamError, match="status 400"):
        asyncio.run(ask(server.url, Ask(api, "word " * 3000, 5)))
