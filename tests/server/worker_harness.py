"""Workers for tests, without a server in front: requests, replies, and time that only the test moves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server_harness import script_backend

from ds4.chat.message import Message
from ds4.engine import Sampling
from ds4.server.config import ServerConfig
from ds4.server.request import ChatRequest, Done, Failed, Job, Reply
from ds4.server.trace import Trace
from ds4.server.watch import Clock, StepWatch
from ds4.server.worker import Worker

# More tokens than a test waits for: an answer of so many ends when the test says so, however fast the machine is.
ENDLESS = 10**9


def request(*texts: str, tokens: int = 12, **options: Any) -> ChatRequest:
    """A conversation that ends with a user; roles take turns."""
    roles = ("user", "assistant")
    return ChatRequest(
        "m",
        tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)),
        thinking=False,
        sampling=Sampling(temperature=0),
        max_tokens=tokens,
        **options,
    )


def submitted(worker: Worker, asked: ChatRequest, deliver: Callable[[Reply], None] = lambda reply: None) -> Job:
    """Submit a request as the server does."""
    prompt, constraint = worker.prompts.build(asked)
    return worker.submit(asked, prompt, deliver, constraint=constraint)


def run(worker: Worker, requests: Sequence[ChatRequest], start: bool = True) -> list[Done]:
    """Submit all at once and wait for all answers."""
    replies: list[queue.Queue[Reply]] = [queue.Queue() for _ in requests]
    for one, replied in zip(requests, replies, strict=True):
        submitted(worker, one, replied.put)
    if start:
        worker.start()
    answers = []
    for replied in replies:
        while not isinstance(reply := replied.get(timeout=60), Done):
            assert not isinstance(reply, Failed), reply
        answers.append(reply)
    return answers


def scripted_worker(*lines: dict[str, Any], chunk: int = 64, **options: Any) -> Worker:
    """A worker over a script, not started."""
    config = ServerConfig(ctx=ENDLESS, **options)
    return Worker(script_backend(*lines, config=config, chunk=chunk), config)


def replies_to(worker: Worker, *requests: ChatRequest) -> list[queue.Queue[Reply]]:
    """Submit requests; their replies."""
    replies: list[queue.Queue[Reply]] = [queue.Queue() for _ in requests]
    for one, replied in zip(requests, replies, strict=True):
        submitted(worker, one, replied.put)
    return replies


def last(replied: queue.Queue[Reply]) -> Done | Failed:
    """The last reply."""
    while not isinstance(reply := replied.get(timeout=30), Done | Failed):
        pass
    return reply


class TestClock(Clock):
    """A clock that a test moves on."""

    __test__ = False

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        condition.wait()

    def move(self, watch: StepWatch, seconds: float) -> None:
        with watch._changed:
            self.time += seconds
            watch._changed.notify_all()


class Gate:
    """A scripted model's clock whose waits end when it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, seconds: float) -> bool:
        self.reached.set()
        assert self.opened.wait(30)
        return False


def look_until(condition: Any) -> None:
    """Look until a condition holds; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.001)


def timed_worker(*lines: dict[str, Any], wait: Any = None, trace: Path | None = None, **options: Any) -> Worker:
    """A worker over a script, that goes by a clock of the test."""
    config = ServerConfig(ctx=ENDLESS, **options)
    backend = script_backend(*lines, config=config, chunk=16, wait=wait)
    return Worker(backend, config, Trace(trace), TestClock())


def move(worker: Worker, seconds: float) -> None:
    """Move the time of a worker on."""
    assert isinstance(worker._clock, TestClock)
    worker._clock.move(worker._watch, seconds)
    with worker._changed:
        worker._changed.notify_all()
