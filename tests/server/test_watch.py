"""Requests and steps that take too long, clients that leave, and the end of the server."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from server_harness import line, random_engine, scripted
from worker_harness import Gate, TestClock, last, look_until, move, replies_to, request, run, timed_worker

from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.model.cache import RowPool
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.request import Admitted, Done, Failed
from ds4.server.watch import StepLostError, StepWatch
from ds4.server.worker import Worker

# ---- requests and steps that take too long ---------------------------------------------------------------------------


OVERDUE = "the request took longer than 60 s (--request-timeout) and was ended while "
KEPT = "; what was computed stays, so the same request goes on from there"
SLOW = (
    "; the same request would write another answer for as long: ask for a shorter one (max_tokens), or start the server"
    " with a longer limit"
)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_request_that_takes_too_long_fails_and_what_was_computed_stays(phase: str, tmp_path: Path) -> None:
    gate = Gate()
    timing = {"prefill_ms_per_token": 1} if phase == "prefill" else {"step_ms": 1}
    worker = timed_worker(
        line("on", then="repeat", **timing), line("fine"), wait=gate, trace=tmp_path / "t", request_timeout=60
    )
    prompt = request("word " * 50)
    (replied,) = replies_to(worker, prompt)
    worker.start()
    assert gate.reached.wait(30)
    move(worker, 59)
    other = request("an other")  # is in time when the first one is late
    (in_time,) = replies_to(worker, other)
    move(worker, 1)
    gate.opened.set()
    reading = phase == "prefill"
    message = OVERDUE + ("its prompt was read" + KEPT if reading else "its answer was written" + SLOW)
    assert last(replied) == Failed(503, message, retry=reading)
    assert isinstance(last(in_time), Done)
    again = run(worker, [prompt], start=False)[0]
    assert again.message.text == "fine"
    assert again.usage.reused >= 16
    assert worker.stop(10)
    worker.trace.close()
    events = [json.loads(text) for text in (tmp_path / "t").read_text().splitlines()]
    assert [(e["request"], e["message"]) for e in events if e["event"] == "error"] == [(1, message)]


def test_a_request_that_waits_too_long_fails_and_takes_no_line() -> None:
    gate = Gate()
    worker = timed_worker(line("one", step_ms=1), line("two"), wait=gate, request_timeout=60, max_sessions=1)
    first, second = replies_to(worker, request("a"), request("b"))
    worker.start()
    assert gate.reached.wait(30)
    (running,) = worker.jobs()
    running.deadline = 1000.0  # type: ignore[attr-defined]
    move(worker, 60)
    gate.opened.set()
    assert last(second) == Failed(503, OVERDUE + "it waited")
    assert isinstance(last(first), Done)
    assert run(worker, [request("c")], start=False)[0].message.text == "two"
    assert worker.stop(10)


def test_without_a_limit_requests_take_their_time() -> None:
    gate = Gate()
    worker = timed_worker(line("one", step_ms=1), wait=gate)
    (replied,) = replies_to(worker, request("a"))
    worker.start()
    assert gate.reached.wait(30)
    move(worker, 1e9)
    gate.opened.set()
    assert isinstance(last(replied), Done)
    assert worker.stop(10)


LOST = (
    "a step of the model did not return within 5 s (--step-timeout) and was given up; the server goes on without the"
    " conversations that were live"
)


class Hang:
    """In the place of the event that ends a scripted step which hangs: this one returns when the test wants."""

    def __init__(self) -> None:
        self.returns = threading.Event()

    def wait(self, seconds: float | None = None) -> bool:
        assert self.returns.wait(30)
        return True

    def set(self) -> None:
        """The worker is stopped."""


@pytest.mark.parametrize("returns", ["late", "never"])
def test_a_step_that_does_not_return_is_given_up_with_its_thread(
    returns: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line("on", then="repeat", hang_at=3), line("on", then="repeat"), line("waited"), line("fine")]
    worker = timed_worker(*lines, trace=tmp_path / "t", step_timeout=5, max_sessions=2)
    runner: Any = worker.engine.runner
    runner._closed = hang = Hang()
    stuck_thread, stuck_engine = worker._thread, worker.engine
    prompts = [request("word " * 50), request("other " * 20), request("third")]
    one, two, waiting = replies_to(worker, *prompts)
    worker.start()
    assert runner.hanging.wait(30)
    move(worker, 4.9)
    assert worker.status() == {"waiting": 1, "running": 2, "sessions": 2}
    move(worker, 0.1)
    assert [last(one), last(two)] == [Failed(500, LOST)] * 2
    done = last(waiting)
    assert isinstance(done, Done)
    assert done.message.text == "waited"
    assert worker.alive
    if returns == "late":
        hang.returns.set()
        stuck_thread.join(30)
        assert not stuck_thread.is_alive()
        assert "has returned" in caplog.text
    again = run(worker, [prompts[0]], start=False)[0]
    assert again.message.text == "fine"
    assert again.usage.reused <= 2  # what all prompts begin with
    assert worker.wait_idle(30)
    assert worker.status() == {"waiting": 0, "running": 0, "sessions": 2, "stuck_steps": 1}
    assert all(session.engine is worker.engine for session in worker.sessions())
    assert worker.engine is not stuck_engine
    assert one.empty()
    assert two.empty()
    assert worker.stop(10)
    hang.returns.set()
    stuck_thread.join(30)
    worker.trace.close()
    events = [json.loads(text) for text in (tmp_path / "t").read_text().splitlines()]
    errors = {(e["request"], e["message"]) for e in events if e["event"] == "error"}
    assert errors == {(1, LOST), (2, LOST)}


def test_a_device_without_room_for_another_engine_ends_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = timed_worker(line("on", then="repeat", hang_at=3), step_timeout=5)
    runner: Any = worker.engine.runner
    runner._closed = hang = Hang()

    def renew() -> Engine:
        raise Ds4Error("the memory of cuda:0 is not enough")

    monkeypatch.setattr(worker.engine, "renew", renew)
    (running,) = replies_to(worker, request("first"))
    worker.start()
    assert runner.hanging.wait(30)
    move(worker, 5)
    assert last(running) == Failed(503, "internal error; see the server's log")
    assert "cannot go on after a step of the model that did not return: the memory of cuda:0" in caplog.text
    hang.returns.set()
    assert worker.stop(10)
    assert not worker.alive


def test_a_thread_whose_step_fails_after_it_was_given_up_touches_nothing() -> None:
    worker = timed_worker(line("on", then="repeat", hang_at=1), line("fine", "x"), step_timeout=5)
    runner: Any = worker.engine.runner
    runner._closed = hang = Hang()
    stuck_thread = worker._thread
    (replied,) = replies_to(worker, request("word"))
    worker.start()
    assert runner.hanging.wait(30)
    touched: list[str] = []
    move(worker, 5)
    assert last(replied) == Failed(500, LOST)
    (other,) = replies_to(worker, request("next"))
    assert isinstance(last(other), Done)
    assert worker.wait_idle(30)
    for name in ("_fail", "_release", "_finish", "_decode", "_prefill", "_end"):
        setattr(worker, name, lambda *args, name=name: touched.append(name))
    worker._replies.deliver = lambda *args: touched.append("deliver")  # type: ignore[method-assign]
    hang.returns.set()  # then the script raises an error in the step
    stuck_thread.join(30)
    assert not stuck_thread.is_alive()
    assert touched == []
    for name in ("_fail", "_release", "_finish", "_decode", "_prefill", "_end"):
        delattr(worker, name)
    del worker._replies.deliver
    assert worker.stop(10)


def test_a_step_that_hangs_while_the_server_stops_does_not_keep_its_client_waiting() -> None:
    worker = timed_worker(line("on", then="repeat", hang_at=1), step_timeout=5, max_sessions=1)
    runner: Any = worker.engine.runner
    runner._closed = hang = Hang()
    stuck_thread = worker._thread
    one, two = replies_to(worker, request("a"), request("b"))
    worker.start()
    assert runner.hanging.wait(30)
    assert not worker.stop(0)
    move(worker, 5)
    assert last(one) == Failed(500, LOST)
    assert last(two) == Failed(503, "server shutting down")
    assert worker.stop(10)
    hang.returns.set()
    stuck_thread.join(30)


def test_a_lost_step_of_a_real_model_does_not_write_into_what_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(ctx=4096, step_timeout=5)
    victim = request("victim " * 200)
    engine = random_engine.__wrapped__()
    alone = Worker(Backend(engine, "m"), config, None, TestClock())
    (expected,) = run(alone, [victim])
    assert alone.stop(30)
    worker = Worker(Backend(engine, "m"), config, None, TestClock())
    stuck, inside, go_on = worker._thread, threading.Event(), threading.Event()
    allocate = RowPool.allocate

    def slow(pool: RowPool) -> int:
        if threading.current_thread() is stuck and not go_on.is_set():
            inside.set()
            assert go_on.wait(30)
        return allocate(pool)

    monkeypatch.setattr(RowPool, "allocate", slow)
    (lost,) = replies_to(worker, request("slow " * 100))
    worker.start()
    assert inside.wait(30)
    move(worker, 5)
    assert isinstance(last(lost), Failed)
    (replied,) = replies_to(worker, victim)
    # The new thread is at work on the victim's prompt when the lost step goes on in its own pages.
    while not isinstance(replied.get(timeout=30), Admitted):
        pass
    go_on.set()
    stuck.join(30)
    assert not stuck.is_alive()
    done = last(replied)
    assert isinstance(done, Done)
    assert done.message == expected.message
    assert run(worker, [victim], start=False)[0].message == expected.message
    pools = worker.engine.runner.model.cache.pools  # type: ignore[attr-defined]
    assert pools is not engine.runner.model.cache.pools
    for pool in pools.values():
        assert sorted(pool._free) == [i for i, count in enumerate(pool._references) if not count]
    assert worker.stop(30)


def test_a_prompt_whose_step_hangs_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = timed_worker(line("x"), line("fine"), step_timeout=5)
    hanging, returns = threading.Event(), threading.Event()
    evaluate = worker.engine.runner.evaluate

    def once(*args: Any) -> Any:
        if not hanging.is_set():
            hanging.set()
            assert returns.wait(30)
        return evaluate(*args)

    monkeypatch.setattr(worker.engine.runner, "evaluate", once)
    stuck_thread = worker._thread
    (replied,) = replies_to(worker, request("word " * 50))
    worker.start()
    assert hanging.wait(30)
    move(worker, 5)
    assert last(replied) == Failed(500, LOST)
    returns.set()  # this one goes on as if nothing had happened
    stuck_thread.join(30)
    assert run(worker, [request("next")], start=False)[0].message.text == "fine"
    assert worker.stop(10)


def test_a_watch_finds_a_step_wherever_it_began() -> None:
    clock = TestClock()
    watch = StepWatch(10, clock)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(watch.wait_for_stuck()))
    waiting.start()
    watch.enter()
    clock.move(watch, 100)  # nothing runs
    assert watch.step(lambda: 7) == 7
    clock.move(watch, 100)
    with pytest.raises(ZeroDivisionError):
        watch.step(lambda: 1 // 0)

    def long() -> None:
        clock.move(watch, 9)
        clock.move(watch, 1)
        waiting.join(30)
        assert found == [True]
        raise ZeroDivisionError

    with pytest.raises(StepLostError):
        watch.step(long)
    watch.enter()
    closing = threading.Thread(target=lambda: found.append(watch.wait_for_stuck()))
    closing.start()
    watch.close()
    closing.join(30)
    assert found == [True, False]


def test_health_shows_a_step_that_was_given_up() -> None:
    hang = line("</think>", "x", hang_at=1)
    with scripted(hang, line("</think>", "fine")) as server:
        worker = server.worker
        assert "stuck_steps" not in server.http.get("/health").json()
        runner: Any = worker.engine.runner
        runner._closed = held = Hang()
        stuck_thread = worker._thread
        answers: list[Any] = []
        ask = {"messages": [{"role": "user", "content": "Hi"}]}
        thread = threading.Thread(target=lambda: answers.append(server.post(ask)))
        thread.start()
        assert runner.hanging.wait(30)
        with worker._watch._changed:  # what the watch does when the time is over
            worker._watch._owner = worker._watch._began = None
        worker._take_over()
        thread.join(30)
        assert answers[0].status_code == 500
        assert "--step-timeout" in answers[0].json()["error"]["message"]
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["stuck_steps"]) == (200, "ok", 1)
        assert server.post(ask).json()["choices"][0]["message"]["content"] == "fine"
        held.returns.set()
        stuck_thread.join(30)


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_is_forgotten_when_its_client_leaves(stream: bool, tmp_path: Path) -> None:
    gate = Gate()
    script = [line("</think>", "one", step_ms=1), line("</think>", "two"), line("</think>", "three")]
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with scripted(*script, wait=gate, max_sessions=1, trace=tmp_path / "t", first_byte_seconds=0.01) as server:
        answers: list[Any] = []
        first = threading.Thread(target=lambda: answers.append(server.post(body)))
        first.start()
        assert gate.reached.wait(30)
        host, port = server.url.removeprefix("http://").split(":")
        payload = json.dumps({**body, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
            client.sendall(head.encode() + payload)
            if stream:
                assert client.recv(15) == b"HTTP/1.1 200 OK"  # its headers are out already
            look_until(lambda: server.worker.status()["waiting"] == 1)
            (waiting,) = server.worker._waiting
        look_until(lambda: waiting.cancelled)
        gate.opened.set()
        first.join(30)
        assert server.worker.wait_idle(30)
        assert answers[0].json()["choices"][0]["message"]["content"] == "one"
        assert server.post(body).json()["choices"][0]["message"]["content"] == "two"
    events = [json.loads(text) for text in (tmp_path / "t").read_text().splitlines()]
    assert [(e["request"], e["phase"]) for e in events if e["event"] == "cancel"] == [(2, "queue")]
    assert all(e["event"] == "cancel" for e in events if e["request"] == 2)


def test_a_cancelled_prompt_is_taken_up_again_at_the_chunk_it_came_to() -> None:
    gate = Gate()
    worker = timed_worker(line("x", prefill_ms_per_token=1), line("fine"), wait=gate)
    prompt = request("word " * 100)
    worker.start()
    job = worker.submit(prompt, worker.prompts.prompt(prompt), lambda reply: None)
    assert gate.reached.wait(30)
    job.cancel()
    gate.opened.set()
    assert worker.wait_idle(30)
    assert len(worker.sessions()[0].tokens) == 16
    again = run(worker, [prompt], start=False)[0]
    assert (again.message.text, again.usage.reused) == ("fine", 16)
    assert worker.stop(10)


def test_at_the_end_running_and_waiting_requests_are_told_and_traced(tmp_path: Path) -> None:
    gate = Gate()
    worker = timed_worker(
        line("on", then="repeat", step_ms=1), wait=gate, max_sessions=1, trace=tmp_path / "t", request_timeout=60
    )
    running, waiting = replies_to(worker, request("a"), request("b"))
    worker.start()
    assert gate.reached.wait(30)
    assert not worker.stop(0)
    gate.opened.set()
    assert worker.stop(30)
    assert [last(running), last(waiting)] == [Failed(503, "server shutting down")] * 2
    worker.trace.close()
    events = [json.loads(text) for text in (tmp_path / "t").read_text().splitlines()]
    assert [(e["request"], e["message"]) for e in events if e["event"] == "error"] == [
        (1, "server shutting down"),
        (2, "server shutting down"),
    ]
