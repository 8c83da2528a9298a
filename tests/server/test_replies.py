"""Handing replies over: all events of a step at once, in their order, and whatever goes wrong concerns one client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from server_harness import line, scripted
from worker_harness import Gate, look_until, request, scripted_worker

from ds4.chat.events import TextDelta
from ds4.server.request import Done, Events, Failed, Job, Reply
from ds4.server.worker import Worker

WORDS = [f" word{i}" for i in range(20)]


class Place:
    """Where replies are waited for; `log` gets the kinds of those that come together."""

    def __init__(self, log: list[Any] | None = None) -> None:
        self.log: list[Any] = [] if log is None else log

    def post(self, call: Any, replies: Sequence[tuple[Job, Reply]]) -> None:
        self.log.append([type(reply) for _, reply in replies])
        call(replies)


def ask(worker: Worker, place: Place, count: int) -> list[list[Reply]]:
    """Submit requests whose replies go to a place."""
    replies: list[list[Reply]] = [[] for _ in range(count)]
    for replied in replies:
        one = request("x", tokens=100)
        worker.submit(one, worker.prompts.prompt(one), replied.append, place.post)
    return replies


def ended(worker: Worker) -> None:
    worker.start()
    assert worker.wait_idle(30)
    assert worker.stop(10)


def text(replies: Sequence[Reply]) -> str:
    events = [event for reply in replies if isinstance(reply, Events) for event in reply.events]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_the_events_of_a_step_go_to_a_place_with_one_call_while_the_next_step_runs() -> None:
    worker = scripted_worker(line(*WORDS), max_sessions=6)
    log: list[Any] = []
    step = worker.engine.step

    def stepping(batch: Any, *args: Any) -> Any:
        # What nobody needs on the host stays on the device.
        assert args[-1] == "keep" or len(batch[0][1]) > 1
        log.append(len(batch))
        return step(batch, *args)

    worker.engine.step = stepping  # type: ignore[method-assign]
    here, there = Place(log), Place(log)
    replies = ask(worker, here, 3) + ask(worker, there, 3)
    ended(worker)
    full = [i for i, entry in enumerate(log) if entry == 6]
    assert len(full) > 10
    for before, after in pairwise(full):
        assert log[before + 1 : after] == [[Events] * 3] * 2
    for replied in replies:
        assert text(replied) == "".join(WORDS)
        assert [type(reply) for reply in replied[-2:]] == [Events, Done]


def test_streams_wake_the_event_loop_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = 6
    woken: list[str] = []
    wake = asyncio.BaseEventLoop.call_soon_threadsafe

    def counting(self: Any, call: Any, *args: Any, **options: Any) -> Any:
        woken.append(threading.current_thread().name)
        return wake(self, call, *args, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", counting)
    gate = Gate()
    with scripted(line("</think>", *WORDS, step_ms=1), wait=gate, max_sessions=streams) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}

        def stream(number: int) -> str:
            frames = server.post(body).text.split("\n\n")
            deltas = [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames if frame.startswith("data: {")]
            return "".join(delta.get("content") or "" for delta in deltas)

        with ThreadPoolExecutor(streams) as pool:
            texts = pool.map(stream, range(streams))
            look_until(lambda: sum(server.worker.status()[name] for name in ("waiting", "running")) == streams)
            gate.opened.set()
            assert list(texts) == ["".join(WORDS)] * streams
        steps = int(server.worker.metrics.stats()["step_seconds"]["count"])
    # Once a request for its admission, and once for its end.
    assert woken.count("ds4-worker") <= steps + 2 * streams


def test_other_replies_do_not_wait_and_come_behind_what_is_held() -> None:
    worker, place = scripted_worker(line("a")), Place()
    one, two = (
        Job(number, request("x"), worker.prompts.prompt(request("x")), [].append, place.post) for number in (1, 2)
    )
    events, failed = Events((TextDelta("a"),), ()), Failed(500, "x")
    worker._replies.hold(one, events)
    worker._replies.hold(two, events)
    assert place.log == []
    worker._replies.deliver(one, failed)
    assert place.log == [[Events, Events, Failed]]
    worker._replies.hand_over()
    assert len(place.log) == 1
    assert worker.stop(10)


def test_a_place_that_is_gone_and_a_client_that_fails_concern_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Place):
        def post(self, call: Any, replies: Sequence[tuple[Job, Reply]]) -> None:
            if any(isinstance(reply, Events) for _, reply in replies):
                raise RuntimeError("Event loop is closed")

    def failing(reply: Reply) -> None:
        if isinstance(reply, Events):
            raise ZeroDivisionError("a defect")

    worker = scripted_worker(line(*WORDS, then="repeat"), max_sessions=6)
    place = Place()
    gone = ask(worker, Gone(), 2)
    one = request("x", tokens=100_000)
    wrong = worker.submit(one, worker.prompts.prompt(one), failing, place.post)
    good = ask(worker, place, 2)
    ended(worker)
    assert wrong.cancelled
    assert "request 3: a reply could not be delivered" in caplog.text
    assert not any(isinstance(reply, Done) for replied in gone for reply in replied)
    for replied in good:
        assert text(replied).startswith("".join(WORDS))
        assert isinstance(replied[-1], Done)
