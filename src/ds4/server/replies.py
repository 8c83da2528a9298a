"""What clients are told of their requests, and how it is counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds4.errors import RequestError
from ds4.server.config import ServerConfig
from ds4.server.metrics import Metrics
from ds4.server.request import Events, Failed, Job, Post, Reply
from ds4.server.running import TimedJob
from ds4.server.trace import Trace
from ds4.server.watch import Clock

log = logging.getLogger("ds4.server")

SHUTTING_DOWN = "server shutting down"
DEFECT = "internal error; see the server's log"


class Replies:
    """Hands replies to those who wait for them. Nothing that goes wrong there reaches the worker.

    The events of all answers in a step are held until `hand_over`: waking another thread once for each of them would
    cost more than they do, and make it compete with the worker for the interpreter. Other replies do not wait.
    """

    def __init__(self, trace: Trace, metrics: Metrics, clock: Clock) -> None:
        self._trace, self._metrics, self._clock = trace, metrics, clock
        self._held: list[tuple[Job, Reply]] = []

    def hold(self, job: Job, events: Events) -> None:
        """Send events with the next `hand_over`, or before the next other reply to anybody."""
        self._held.append((job, events))

    def deliver(self, job: Job, reply: Reply) -> None:
        """Send a reply, and what is held, now; a job whose client cannot have it is cancelled."""
        self._held.append((job, reply))
        self.hand_over()

    def hand_over(self) -> None:
        """Send what is held."""
        held, self._held = self._held, []
        places: dict[Post, list[tuple[Job, Reply]]] = {}
        for job, reply in held:
            places.setdefault(job.post, []).append((job, reply))
        for post, replies in places.items():
            _post(post, replies)

    def fail(self, job: TimedJob, reply: Failed, outcome: str = "failed") -> None:
        """Once for all answers to a request; those that are still being written end with the next step."""
        if job.closed:
            return
        job.closed = True
        self.ended(job, outcome)
        self.deliver(job, reply)
        if job.request.n > 1:
            job.cancel()

    def reject(self, job: TimedJob) -> None:
        """The failure of a request that was never admitted, as its rules cannot be enforced. From any thread.

        What is wrong with the request itself is not counted, as with those that are refused before they wait.
        """
        error = job.fault
        if isinstance(error, RequestError):
            reply = Failed(400, str(error), fault=error)
        else:
            log.error("request %d failed", job.number, exc_info=error)
            reply = Failed(500, text_of(error) if error else DEFECT)
            self.ended(job, "failed")
        self._trace.write(job.number, "error", message=reply.message)
        job.closed = True
        _post(job.post, [(job, reply)])

    def refuse(self, job: TimedJob, status: int, message: str, outcome: str = "failed", retry: bool = True) -> None:
        """The failure of a request that holds nothing."""
        self._trace.write(job.number, "error", message=message)
        self.fail(job, Failed(status, message, retry), outcome)

    def ended(self, job: TimedJob, outcome: str) -> None:
        """Count how a request ended as a whole, if it had not ended yet."""
        if job.finish(outcome):
            self._metrics.ended(outcome, self._clock.now() - job.arrived)


def _post(post: Post, replies: Sequence[tuple[Job, Reply]]) -> None:
    try:
        post(_deliver, replies)
    except RuntimeError:
        # The handlers' event loop is gone, and with it the clients.
        for job, _ in replies:
            job.cancel()


def _deliver(replies: Sequence[tuple[Job, Reply]]) -> None:
    for job, reply in replies:
        try:
            job.deliver(reply)
        except Exception:
            log.exception("request %d: a reply could not be delivered", job.number)
            job.cancel()


def text_of(error: BaseException) -> str:
    """What a client is told of an error."""
    return str(error) or type(error).__name__


_OVERDUE = {
    "queue": "it waited",
    "prompt": "its prompt was read; what was computed stays, so the same request goes on from there",
    "answer": "its answer was written; the same request would write another answer for as long: ask for a shorter one"
    " (max_tokens), or start the server with a longer limit",
}


def overdue(seconds: float, phase: str) -> Failed:
    """The end of a request that took longer than this, in its phase `queue`, `prompt` or `answer`."""
    why = f"the request took longer than {seconds:g} s (--request-timeout) and was ended while {_OVERDUE[phase]}"
    return Failed(503, why, retry=phase != "answer")


def stuck_message(config: ServerConfig) -> str:
    """What clients are told of a step that did not return."""
    return (
        f"a step of the model did not return within {config.step_timeout:g} s (--step-timeout) and was given"
        " up; the server goes on without the conversations that were live"
    )
