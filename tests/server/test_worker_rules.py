"""What the worker promises whatever happens: no place is lost, one end for each request, who is next, who leaves first,
and that every request can be seen all the time."""

from __future__ import annotations

import copy
import logging
import queue
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from server_harness import WEATHER, call_pieces, line, scripted
from worker_harness import (
    ENDLESS,
    Gate,
    last,
    look_until,
    move,
    replies_to,
    request,
    run,
    scripted_worker,
    submitted,
    timed_worker,
)

from ds4.chat.tools import tool_schemas
from ds4.engine import Session
from ds4.server import running as running_module
from ds4.server import worker as worker_module
from ds4.server.decode import SamplingChooser
from ds4.server.metrics import Metrics
from ds4.server.request import ChatRequest, Done, Events, Failed, Reply
from ds4.server.running import MOST_PASSED, TimedJob, WaitingLine
from ds4.server.slots import Slot, SlotTable
from ds4.server.worker import Worker

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = tool_schemas([WEATHER])
CALL = call_pieces(("get_weather", [("city", "Rome", True)]))
MALFORMED = ["\n\n", "<", "｜DSML｜", "tool_calls", ">\n", "Oh."]


def ends(replied: queue.Queue[Reply], count: int = 1) -> list[Done | Failed]:
    """So many last replies; of a failure there is one."""
    found: list[Done | Failed] = []
    while len(found) < count and not (found and isinstance(found[-1], Failed)):
        found.append(last(replied))
    return found


# ---- nothing is lost when something fails ---------------------------------------------------------------------------

MOMENTS: list[tuple[str, Any, str, int]] = [
    # Where, which function fails there, and at which of its calls for the failing request.
    ("at its admission", Slot, "keep", 1),
    ("at its admission", worker_module, "boundaries", 1),
    ("at its admission", worker_module, "Running", 1),
    ("at its admission", worker_module, "note_prompt", 1),
    ("at its admission", Metrics, "admitted", 1),
    ("when its answers begin", SlotTable, "fork", 1),
    ("when its answers begin", SlotTable, "fork", 2),
    ("when its answers begin", Session, "fork", 2),
    ("when its answers begin", worker_module.Running, "fork", 1),
    ("when its answers begin", worker_module.Running, "fork", 2),
    ("when its answers begin", running_module, "Generation", 1),
    ("when its answers begin", running_module, "Generation", 3),
]


CASES = [(*moment, n) for moment in MOMENTS for n in (1, 3) if n == 3 or moment[0] == "at its admission"]


@pytest.mark.parametrize(
    ("where", "owner", "name", "call", "n"), CASES, ids=[f"{case[2]} {case[3]} of {case[4]}" for case in CASES]
)
def test_what_fails_for_one_request_ends_that_one_once_and_frees_its_places(
    where: str, owner: Any, name: str, call: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scripted_worker(line("on", then="repeat"), max_sessions=4)
    other: queue.Queue[Reply] = queue.Queue()
    bystander = submitted(worker, request("bystander", tokens=ENDLESS), other.put)
    worker.start()
    look_until(lambda: isinstance(other.get(timeout=30), Events))
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise MemoryError(f"no memory {where}")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, failing)
    (replied,) = replies_to(worker, request("hi", tokens=5, n=n))
    assert last(replied) == Failed(500, f"no memory {where}")
    monkeypatch.undo()
    # All three places are free again, and the other answer goes on.
    (after,) = replies_to(worker, request("ho", tokens=5, n=3))
    assert all(isinstance(end, Done) for end in ends(after, 3))
    assert not [reply for reply in list(other.queue) if isinstance(reply, Failed)]
    assert not [reply for reply in list(replied.queue) if isinstance(reply, Done | Failed)]
    bystander.cancel()
    assert worker.wait_idle(30)
    assert worker.status()["running"] == worker._slots.busy == 0
    requests = worker.metrics.stats()["requests"]
    assert (requests["failed"], requests["length"], requests["cancelled"]) == (1, 1, 1)
    assert worker.stop(10)


def test_a_second_attempt_that_cannot_begin_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = scripted_worker(line(*MALFORMED), line("fine"), max_sessions=1)
    original = running_module.Generation

    def failing(*args: Any, **options: Any) -> Any:
        if options["first"] is not None:
            raise MemoryError("no memory")
        return original(*args, **options)

    monkeypatch.setattr(running_module, "Generation", failing)
    (replied,) = replies_to(worker, request("hi", tools=TOOLS, tokens=200))
    worker.start()
    assert last(replied) == Failed(500, "no memory")
    assert isinstance(run(worker, [request("ho")], start=False)[0], Done)
    assert worker.wait_idle(30)
    assert worker._slots.busy == 0
    assert worker.stop(10)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Metrics, "answered"), (Metrics, "ended"), (worker_module, "note_end"), (worker_module, "Done")],
)
@pytest.mark.parametrize("n", [1, 2])
def test_what_fails_at_the_end_of_an_answer_leaves_nobody_waiting(
    owner: Any, name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scripted_worker(line("a"), max_sessions=2)
    original, failed = getattr(owner, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed == 1:
            raise MemoryError("no memory")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, failing)
    (replied,) = replies_to(worker, request("hi", n=n))
    worker.start()
    assert ends(replied, n)[-1] == Failed(500, "no memory")
    assert worker.wait_idle(30)
    assert not [reply for reply in list(replied.queue) if isinstance(reply, Done | Failed)]
    assert worker._slots.busy == 0
    assert isinstance(run(worker, [request("ho")], start=False)[0], Done)
    assert worker.stop(10)


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("broken_first", [False, True])
def test_a_call_that_breaks_in_a_stream_of_several_answers_is_malformed(others: int, broken_first: bool) -> None:
    """Not that its client left, though the answers that are left end with it."""
    lines = [line("</think>", "x", then="repeat")] * others
    broken = line("</think>", *CALL[:10], "prose that is no call", *CALL[-4:])
    with scripted(*([broken, *lines] if broken_first else [*lines, broken])) as server:
        body = {"messages": HELLO, "n": others + 1, "stream": True, "tools": [WEATHER], "max_tokens": 10**5}
        assert '"error"' in server.post(body).text
        assert server.worker.wait_idle(30)
        now = server.http.get("/stats").json()
    assert {name: count for name, count in now["requests"].items() if count} == {"malformed": 1}
    assert now["request_seconds"]["count"] == now["malformed_calls"] == 1


def test_the_worker_itself_ends_a_stream_that_is_malformed() -> None:
    """Also for a client that reads on."""
    broken = line(*CALL[:10], "prose that is no call", *CALL[-4:])
    worker = scripted_worker(line("x", then="repeat"), broken)
    (replied,) = replies_to(worker, request("hi", tokens=ENDLESS, n=2, tools=TOOLS, streamed=True))
    worker.start()
    end = last(replied)
    assert isinstance(end, Done)
    assert end.reason == "error"
    assert worker.wait_idle(30)
    assert not [reply for reply in list(replied.queue) if isinstance(reply, Done | Failed)]
    assert worker.stop(10)


# ---- who is next ----------------------------------------------------------------------------------------------------


def waiting(*counts: int) -> tuple[WaitingLine, list[TimedJob]]:
    """A line of requests for so many answers each."""
    of = WaitingLine()
    jobs = [TimedJob(i, request("x", n=n), None, lambda reply: None) for i, n in enumerate(counts)]  # type: ignore[arg-type]
    for job in jobs:
        of.put(job)
    return of, jobs


def test_one_that_needs_more_places_is_passed_a_bounded_number_of_times() -> None:
    of, jobs = waiting(4, *[1] * (MOST_PASSED + 5))
    passing = [of.take(1) for _ in range(MOST_PASSED)]
    assert passing == jobs[1 : MOST_PASSED + 1]
    assert of.take(1) is None  # from now on places are kept for it
    assert of.take(3) is None
    assert of.take(4) is jobs[0]
    assert of.take(1) is jobs[MOST_PASSED + 1]


def test_each_that_waits_counts_those_that_pass_it() -> None:
    of, jobs = waiting(4, 1, 3, *[1] * (2 * MOST_PASSED))
    assert of.take(2) is jobs[1]  # passes the first one only
    for i in range(MOST_PASSED - 1):
        assert of.take(2) is jobs[3 + i]
    assert of.take(3) is None
    assert of.take(4) is jobs[0]
    assert of.take(2) is jobs[3 + MOST_PASSED - 1]  # the third one has been passed once less
    assert of.take(2) is None
    assert of.take(3) is jobs[2]


@pytest.mark.parametrize("free", [0, -2])
def test_nobody_is_admitted_and_nobody_passed_without_a_place(free: int) -> None:
    of, jobs = waiting(2, 1)
    for _ in range(2 * MOST_PASSED):
        assert of.take(free) is None
    assert of.take(1) is jobs[1]


def test_those_that_are_gone_leave_the_line_and_the_others_keep_their_order() -> None:
    of, jobs = waiting(*[1] * 6)
    jobs[1].cancel()
    jobs[4].deadline = 5
    assert of.take_gone(5) == [jobs[1], jobs[4]]
    assert list(of) == [jobs[0], jobs[2], jobs[3], jobs[5]]
    assert of.take_all() == [jobs[0], jobs[2], jobs[3], jobs[5]]
    assert len(of) == 0


def test_a_request_for_many_answers_does_not_keep_places_empty_until_all_are_free() -> None:
    worker = scripted_worker(line("on", then="repeat"), max_sessions=3)
    endless = submitted(worker, request("endless", tokens=ENDLESS))
    order: list[int] = []
    start = worker._start

    def starting(job: Any) -> None:
        order.append(job.number)
        start(job)

    worker._start = starting  # type: ignore[method-assign]
    (many,) = replies_to(worker, request("many", n=3))
    small = replies_to(worker, *(request(f"small {i}") for i in range(MOST_PASSED + 3)))
    worker.start()
    # They pass it while it cannot have its places: without that they would wait for the endless one.
    for replied in small[:MOST_PASSED]:
        assert isinstance(last(replied), Done)
    assert order == [1, *range(3, 3 + MOST_PASSED)]
    endless.cancel()
    assert len(ends(many, 3)) == 3
    for replied in small[MOST_PASSED:]:
        assert isinstance(last(replied), Done)
    assert order[MOST_PASSED + 1] == 2
    assert worker.stop(10)


# ---- who leaves first -----------------------------------------------------------------------------------------------


def reused(worker: Worker, text: str) -> int:
    return run(worker, [request(text)], start=False)[0].usage.reused


def test_further_answers_to_one_prompt_leave_before_conversations() -> None:
    texts = [f"conversation {i} " * 30 for i in range(3)]
    worker = scripted_worker(line("a", "b"), max_sessions=6)
    run(worker, [request(texts[0])])
    for text in texts[1:]:
        reused(worker, text)
    (replied,) = replies_to(worker, request("one-off", n=3))
    assert len(ends(replied, 3)) == 3
    for i in range(2):
        reused(worker, f"new {i} " * 30)
    assert all(reused(worker, text) > 50 for text in texts)
    assert worker.stop(10)


@pytest.mark.parametrize("kept_by", ["calls", "id", "nothing"])
def test_a_further_answer_that_will_be_continued_is_a_conversation(kept_by: str) -> None:
    plain = line("a", "b")
    last_line = line(*CALL) if kept_by == "calls" else plain
    options: dict[str, Any] = {"response_id": "resp_1", "remembered": True} if kept_by == "id" else {}
    worker = scripted_worker(plain, last_line, plain, max_sessions=3)
    (replied,) = replies_to(worker, request("hi", n=2, tools=TOOLS, tokens=200, **options))
    worker.start()
    ends(replied, 2)
    assert worker.wait_idle(30)
    assert [slot.spare for slot in worker._slots.slots] == [False, kept_by == "nothing"]
    assert worker.stop(10)


def test_a_further_answer_that_is_continued_is_a_conversation() -> None:
    worker = scripted_worker(line("first"), line("second"), line("x"), max_sessions=4)
    (replied,) = replies_to(worker, request("word " * 30, n=2))
    worker.start()
    found = ends(replied, 2)
    assert worker.wait_idle(30)
    spare = [slot.spare for slot in worker._slots.slots]
    answers = [end.message.text for end in found if isinstance(end, Done)]
    run(worker, [request("word " * 30, answers[1], "more")], start=False)
    assert worker.wait_idle(30)
    assert spare == [False, True]
    assert not any(slot.spare for slot in worker._slots.slots)
    assert worker.stop(10)


# ---- who left -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overdue", [False, True])
def test_prompts_that_nobody_waits_for_free_their_places_all_at_once(overdue: bool) -> None:
    gate = Gate()
    lines = (line("on", then="repeat", step_ms=1), line("on", then="repeat"))
    worker = timed_worker(*lines, wait=gate, max_sessions=5, request_timeout=60 if overdue else 0)
    endless: queue.Queue[Reply] = queue.Queue()
    jobs = [submitted(worker, request("go", tokens=ENDLESS), endless.put)]
    jobs += [submitted(worker, request(f"q{i} " + "word " * 600)) for i in range(4)]
    worker.start()
    assert gate.reached.wait(30)
    # The worker is in a step, with four prompts half way; one more request waits.
    look_until(lambda: worker.status()["running"] == 5)
    seen: list[int] = []
    admit = worker._admit

    def admitting() -> None:
        seen.append(worker.status()["running"])
        admit()

    worker._admit = admitting  # type: ignore[method-assign]
    if overdue:
        move(worker, 60)
    for job in jobs[1:]:
        job.cancel() if not overdue else None
    (replied,) = replies_to(worker, request("next", tokens=2))
    gate.opened.set()
    assert isinstance(last(replied), Done)
    assert seen[0] == (0 if overdue else 1)
    jobs[0].cancel()
    assert worker.wait_idle(30)
    assert worker.stop(10)


# ---- what can be seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [request("a " * 10, tools=TOOLS, tokens=200), request("b " * 10, n=3)],
    ids=["two attempts", "three answers"],
)
def test_a_request_is_seen_at_every_moment(asked: ChatRequest) -> None:
    """Between any two operations of the worker it waits or runs: another thread may look at any time."""
    worker = scripted_worker(line(*MALFORMED), line("a"), line("b"), chunk=8, max_sessions=3)
    modules = (worker_module, running_module, sys.modules[Slot.__module__])
    files = {str(module.__file__) for module in modules}
    left = True
    missed: list[str] = []
    looks = 0

    def deliver(reply: Reply) -> None:
        nonlocal left
        if isinstance(reply, Done | Failed) and not getattr(reply, "left", 0):
            left = False

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal looks
        if frame.f_code.co_filename not in files or frame.f_code.co_name in ("status", "busy", "jobs", "<genexpr>"):
            return None
        frame.f_trace_opcodes = True
        # While the worker holds the lock nobody else can look.
        if left and event == "opcode" and not worker._changed._is_owned():  # type: ignore[attr-defined]
            looks += 1
            now = worker.status()
            if not now["waiting"] + now["running"]:
                missed.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return trace

    submitted(worker, asked, deliver)
    threading.settrace(trace)
    try:
        worker.start()
        assert worker.wait_idle(60)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert not left
    assert looks > 1000
    assert not missed
    assert worker.stop(10)


def test_the_lock_is_never_held_while_something_is_written_or_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who submits a request, on the event loop, waits for the lock."""
    gate = Gate()
    worker = timed_worker(
        line("on", then="repeat", step_ms=1), wait=gate, request_timeout=60, max_sessions=1, trace=tmp_path / "trace"
    )
    held: list[str] = []
    done: list[str] = []

    def looking(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            if worker._changed._is_owned():  # type: ignore[attr-defined]
                held.append(name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (worker.trace, "write"),
        (worker.metrics, "ended"),
        (worker._replies, "deliver"),
        (worker, "_plan"),
    ):
        looking(owner, name)
    running = submitted(worker, request("a", tokens=ENDLESS))
    worker.start()
    assert gate.reached.wait(30)
    jobs = [submitted(worker, request(f"{i}")) for i in range(3)]
    jobs[0].cancel()
    jobs[2].cancel()
    running.cancel()
    move(worker, 60)
    gate.opened.set()
    assert worker.wait_idle(30)
    assert done.count("ended") == 4
    assert {"write", "deliver", "_plan"} <= set(done)
    assert not held
    assert worker.stop(10)
    worker.trace.close()


def test_what_counts_requests_keeps_nothing_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []

    def watched(name: str) -> None:
        original = getattr(Metrics, name)

        def call(self: Metrics, *args: Any) -> Any:
            kept = [one for one in (*args, *(getattr(arg, "job", None) for arg in args)) if hasattr(one, "__dict__")]
            before = [copy.copy(vars(one)) for one in kept]
            result = original(self, *args)
            if before != [vars(one) for one in kept]:
                changed.append(name)
            return result

        monkeypatch.setattr(Metrics, name, call)

    names = [name for name, value in vars(Metrics).items() if callable(value) and not name.startswith("_")]
    for name in names:
        watched(name)
    worker = scripted_worker(line(*MALFORMED), line("fine"), line("a", "b"))
    run(worker, [request("hi", tools=TOOLS, tokens=200), request("word " * 50)])
    assert worker.wait_idle(30)
    assert {"admitted", "begun", "evaluated", "answered", "ended"} <= set(names)
    assert not changed
    assert worker.stop(10)


def test_a_request_ends_once_whatever_comes_behind_it() -> None:
    job = TimedJob(1, request("x"), None, lambda reply: None)  # type: ignore[arg-type]
    assert [job.finish(outcome) for outcome in ("malformed", "cancelled", "failed")] == [True, False, False]
    assert job.outcome == "malformed"


def test_choosers_of_further_answers_that_fail_lose_no_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The place is taken already when its chooser is made."""
    from server_harness import random_engine

    from ds4.server.backend import Backend
    from ds4.server.config import ServerConfig

    def failing(*args: Any) -> Any:
        raise MemoryError("no chooser")

    worker = Worker(Backend(random_engine(), "m"), ServerConfig(ctx=4096, max_sessions=3))
    monkeypatch.setattr(SamplingChooser, "other", failing)
    (replied,) = replies_to(worker, request("hi", n=3))
    with caplog.at_level(logging.ERROR):
        worker.start()
        assert last(replied) == Failed(500, "no chooser")
    assert worker.wait_idle(30)
    assert worker._slots.busy == 0
    assert worker.stop(10)
