"""Load tests in small: many streams, clients that leave, and the tool that measures it. How long things take is not a
question for a test."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import load
import pytest
from load_client import APIS, Answer, Ask, Pace, StreamError, ask, reader_of
from server_harness import Running, line, random_engine, scripted, serving

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
    with scripted(line(*["word "] * 200_000), line("</think>", "Hi"), ctx=300_000, max_tokens=300_000) as server:
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


def test_blocks_of_a_message_open_and_close_in_order() -> None:
    def block(kind: str, index: int) -> str:
        return f'event: content_block_{kind}\ndata: {{"type": "content_block_{kind}", "index": {index}, "delta": {{}}}}'

    for kinds in itertools.permutations((("start", 0), ("delta", 0), ("stop", 0))):
        frames = [block(*kind) for kind in kinds]
        if [kind for kind, _ in kinds] != ["start", "delta", "stop"]:
            with pytest.raises(StreamError):
                read("messages", [*frames, *frames])


def read(api: str, frames: list[str]) -> Answer:
    reader = reader_of(api)
    for frame in frames:
        reader.take(frame)
    return reader.answer()


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_is_no_stream(api: str, server: Running) -> None:
    with pytest.raises(StreamError, match="status 400"):
        asyncio.run(ask(server.url, Ask(api, "word " * 3000, 5)))
