"""What the worker has in hand: requests, and questions about them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, TypeVar

from ds4.chat.events import Event
from ds4.chat.message import Message
from ds4.engine import FREE_TRUNCATION, Engine, SampleRow
from ds4.engine.sampling import Choice
from ds4.engine.session import Prefill
from ds4.server.config import ServerConfig
from ds4.server.constraints import Enforcement
from ds4.server.continuation import Plan, loses_reasoning
from ds4.server.decode import Chooser, Ending, Generation
from ds4.server.logprobs import TokenLogprob
from ds4.server.recovery import Earlier
from ds4.server.request import ChatRequest, Job, Usage
from ds4.server.slots import Slot
from ds4.server.trace import Trace
from ds4.server.turns import Turn
from ds4.tokenizer import Tokenizer

log = logging.getLogger("ds4.server")

Found = TypeVar("Found")

_TURN_BOUNDARIES = 6
"""Turns of a prompt, counted from its end, that get a way back."""

MOST_PASSED = 16
"""Later requests that may be admitted before one that needs more places than are free."""

_MIN_SYSTEM = 32
"""Tokens of a system region that is worth a way back of its own."""


@dataclass(eq=False)
class TimedJob(Job):
    """A job as the worker keeps it.

    Attributes:
        arrived, first_token, deadline: when it was submitted, when its first token was there, and when it has taken
            too long, on the worker's clock.
        constraint: what enforces the rules that its answer has to follow, once their grammar is made; None: no rules.
        ended, usage: how many of its answers have ended well, and their tokens.
        outcome: how it ended as a whole; what happens to answers that are left does not change that.
        closed: its last reply is out.
    """

    arrived: float = 0.0
    first_token: float | None = None
    deadline: float = inf
    constraint: Future[Enforcement] | None = None
    ended: int = 0
    usage: Usage = Usage()  # noqa: RUF009  (frozen)
    outcome: str | None = None
    closed: bool = False

    def cancel(self) -> None:
        """As `Job.cancel`; nor is its grammar made any more, unless others want it."""
        super().cancel()
        if self.constraint is not None:
            self.constraint.cancel()

    @property
    def ready(self) -> bool:
        """Whether it may be admitted: it waits for no grammar."""
        made = self.constraint
        return made is None or (made.done() and not made.cancelled() and made.exception() is None)

    @property
    def fault(self) -> BaseException | None:
        """Why its grammar cannot be made, once that is known."""
        made = self.constraint
        return made.exception() if made is not None and made.done() and not made.cancelled() else None

    def end(self, usage: Usage) -> int:
        """One more answer has ended with these tokens; returns how many are left."""
        self.ended += 1
        self.usage = replace(
            usage,
            completion=self.usage.completion + usage.completion,
            reasoning=self.usage.reasoning + usage.reasoning,
        )
        return self.request.n - self.ended

    def finish(self, outcome: str) -> bool:
        """It ended as a whole; False if it had already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


class WaitingLine:
    """The requests that wait for places, in the order in which they came. Whoever changes it holds the lock for it.

    The first one is admitted for which enough places are free. Who needs more of them is passed by later ones, but by
    MOST_PASSED at most: from then on all wait until it has its places. Nobody waits for another one's grammar.
    """

    def __init__(self) -> None:
        self._passed: dict[TimedJob, int] = {}

    def __len__(self) -> int:
        return len(self._passed)

    def __iter__(self) -> Iterator[TimedJob]:
        return iter(list(self._passed))

    def put(self, job: TimedJob) -> None:
        """One more, at the end."""
        self._passed[job] = 0

    def take(self, free: int) -> TimedJob | None:
        """Take out the one that is admitted to some of these places, if any is."""
        ahead: list[TimedJob] = []
        for job, passed in self._passed.items() if free > 0 else ():
            if not job.ready:
                continue
            if job.request.n <= free:
                del self._passed[job]
                self._passed.update({other: self._passed[other] + 1 for other in ahead})
                return job
            if passed >= MOST_PASSED:
                return None
            ahead.append(job)
        return None

    def patience(self, now: float) -> float:
        """Seconds until something can be done for one of them, if nobody changes anything."""
        due = (now if job.ready or job.cancelled else job.deadline for job in self._passed)
        return max(0.0, min(due, default=inf) - now)

    def leave(self, job: TimedJob) -> bool:
        """Take out this one; False if it does not wait."""
        return self._passed.pop(job, None) is not None

    def take_gone(self, now: float) -> list[TimedJob]:
        """Take out those whose clients left, or that have waited too long."""
        gone = [job for job in self._passed if job.cancelled or job.deadline <= now]
        for job in gone:
            del self._passed[job]
        return gone

    def take_all(self) -> list[TimedJob]:
        """Take out all."""
        jobs = list(self._passed)
        self._passed.clear()
        return jobs


class Question(Generic[Found]):
    """Something that only the worker's thread can look up, for another one that waits for `answer`."""

    def __init__(self, look: Callable[[], Found], otherwise: Found) -> None:
        """`otherwise`: the answer if the worker has ended."""
        self._look, self._otherwise = look, otherwise
        self.answer: Future[Found] = Future()

    def settle(self) -> None:
        """Look it up. Who does not wait for it any more has cancelled it."""
        self._answer(self._look)

    def give_up(self) -> None:
        """Nobody looks it up any more: give the other answer."""
        self._answer(lambda: self._otherwise)

    def _answer(self, look: Callable[[], Found]) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(look())
        except Exception as error:
            self.answer.set_exception(error)


class Questions:
    """The questions that wait for the worker's thread. Any thread may put one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Question[Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, question: Question[Any]) -> None:
        """One more; those whose askers gave up while a step took long are dropped, so that they do not add up."""
        with self._lock:
            self._waiting = [*(other for other in self._waiting if not other.answer.cancelled()), question]

    def settle(self) -> None:
        """Look all up."""
        for question in self._take():
            question.settle()

    def give_up(self) -> None:
        """Nobody looks them up any more."""
        for question in self._take():
            question.give_up()

    def _take(self) -> list[Question[Any]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting


@dataclass(eq=False)
class Running:
    """A request that has a slot, or one of several answers to it; it has a generation once its prompt is evaluated.

    Attributes:
        boundaries: where its prompt gets checkpoints.
        source: what it continues (see `Plan.source`), as it was then.
        reused: tokens of its prompt that were not evaluated, once that is known.
        call_ids: ids of the calls begun so far.
        started, answering: when it was admitted, and when its prompt was evaluated.
        first, again: a second attempt continues this one, and its prompt is these tokens.
        prefill: the evaluation of `ids`, while it is under way.
        index: which of several answers this is, from 0.
        malformed: a call in its present attempt could not be read.
        choice: its next token, or what went wrong when it was chosen.
        evaluated, found: how many tokens of `ids` the last `evaluate` has evaluated, and how many of its prompt it
            found to be reused.
    """

    job: TimedJob
    slot: Slot
    plan: Plan
    chooser: Chooser
    boundaries: list[int]
    source: str
    reused: int | None = None
    generation: Generation | None = None
    call_ids: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    answering: float = 0.0
    first: Earlier | None = None
    again: list[int] | None = None
    prefill: Prefill | None = None
    index: int = 0
    malformed: bool = False
    evaluated: int = 0
    found: int = 0
    choice: Choice | Exception | None = None

    def __post_init__(self) -> None:
        self.slot.request = self.job.number

    def fork(self, slot: Slot) -> Running:
        """A further answer to its prompt, which is evaluated."""
        index = self.index + 1
        chooser = self.chooser.other(slot.session, index)
        return replace(self, slot=slot, chooser=chooser, index=index, call_ids=[])

    @property
    def due(self) -> int:
        """The answers that are to be forked from it once its prompt is evaluated."""
        return 0 if self.generation or self.first or self.index else self.job.request.n - 1

    @property
    def ids(self) -> list[int]:
        """The tokens that are evaluated before an answer is sampled."""
        return self.plan.ids if self.again is None else self.again

    def evaluate(self, chunk: int) -> bool:
        """Evaluate `ids` up to the next multiple of `chunk` tokens; True once all are."""
        if self.prefill is None:
            self.prefill = self.slot.session.begin(self.ids, boundaries=self.boundaries)
            self.slot.read = len(self.ids)
        before = self.slot.session.recomputed
        complete = self.prefill.step(chunk)
        after = self.slot.session.recomputed
        # A step that starts over counts from 0 again.
        self.evaluated = after - before if after >= before else after
        self.found = 0
        if self.reused is None:
            self.reused = self.found = self.prefill.reused
        if complete:
            self.prefill = None
        return complete

    def open(self, tokenizer: Tokenizer, limit: int, config: ServerConfig, trace: Trace) -> None:
        """Its prompt is evaluated: begin an answer of at most `limit` tokens."""
        self.answering = self.answering or time.monotonic()
        self.generation = Generation(
            self.job.number,
            self.job.request,
            self.slot.session,
            self.chooser,
            tokenizer,
            opened=self.ids[-1],
            limit=limit,
            profile=config.template,
            think_recovery=config.think_recovery,
            trace=trace,
            first=self.first,
            constraint=self.job.constraint.result() if self.job.constraint else None,
            index=self.index,
        )

    def attempt_again(self, ids: list[int], first: Earlier) -> None:
        """A second attempt continues `first`, and its prompt is these tokens."""
        self.first, self.generation = first, None
        self.again, self.boundaries, self.malformed = ids, [], False
        self.chooser = self.chooser.again(self.slot.session)
        self.call_ids.clear()

    def step(self, generation: Generation) -> list[Event]:
        """Take the next token of its answer (see `Generation.step`). Raises what went wrong when it was chosen."""
        choice, self.choice = self.choice, None
        if isinstance(choice, Exception):
            raise choice
        return generation.step(choice)

    def note_malformed(self) -> bool:
        """A call in its present attempt cannot be read; False if that was known."""
        known, self.malformed = self.malformed, True
        return not known

    @property
    def usage(self) -> Usage:
        """Its tokens so far."""
        attempt = self.generation or self.first
        return Usage(
            prompt=len(self.plan.ids),
            reused=self.plan.reused if self.reused is None else self.reused,
            completion=attempt.completion if attempt else 0,
            reasoning=attempt.reasoning if attempt else 0,
        )


def boundaries(ids: list[int], reused: int, tokenizer: Tokenizer) -> list[int]:
    """Where later prompts may leave this one.

    That is behind the system region, at the think markers of the last turns, and before the last user turn. Behind
    an answer of this server there is a way back already.
    """
    turns = [i + 1 for i, token in enumerate(ids) if token == tokenizer.assistant]
    users = [i for i, token in enumerate(ids) if token == tokenizer.user] or [0]
    first = users[:1] if users[0] >= _MIN_SYSTEM else []
    last = users[-1:] if users[-1] > reused + FREE_TRUNCATION else []
    return sorted({*first, *last, *turns[-_TURN_BOUNDARIES:]})


def note_prompt(trace: Trace, job: Job, chosen: Plan) -> None:
    """Write what is evaluated for a request, to the log and the trace."""
    if chosen.miss:
        log.info("request %d live kv cache miss %s", job.number, chosen.miss)
    if loses_reasoning(job.request, chosen):
        log.warning(
            "request %d goes on from what its history shows: the reasoning behind its calls is not live any more",
            job.number,
        )
    log.info(
        "request %d prompt start tokens=%d reused=%d source=%s %s",
        job.number, len(chosen.ids), chosen.reused, chosen.source, chosen.detail,
    )  # fmt: skip
    if trace.active:
        trace.write(
            job.number,
            "prompt",
            text=str(job.prompt.text),
            tokens=len(job.prompt.ids),
            effective_tokens=len(chosen.ids),
            reused=chosen.reused,
            source=chosen.source,
            detail=chosen.detail,
            miss=chosen.miss,
            replay=dict(job.prompt.replay),
        )


def answer_of(running: Running, ending: Ending, keep_blocks: bool) -> tuple[Message, Message, tuple[TokenLogprob, ...]]:
    """An answer that has ended: its message, with ids; what a client gets that saw no events; its text's tokens.

    `keep_blocks`: the calls may be repeated as they were sampled.
    """
    calls = tuple(replace(call, id=id) for call, id in zip(ending.message.tool_calls, running.call_ids, strict=False))
    message = replace(ending.message, tool_calls=calls, raw_dsml=ending.message.raw_dsml if keep_blocks else "")
    generation = running.generation
    if generation is None:
        return message, message, ()
    if message.complete or calls or ending.stop_string:
        return message, message, generation.logprobs(whole=False)
    return message, generation.whole_text(), generation.logprobs(whole=True)


def turn_of(request: ChatRequest, reason: str, message: Message, whole: Message) -> Turn | None:
    """What is remembered of an answer that ended for this reason, as `answer_of` has it; None: nothing."""
    if reason == "error":
        if request.streamed or whole.text == message.text:
            return None
        message = whole
    return Turn((*request.messages[request.front :], message), request.response_id) if request.remembered else None


def note_end(trace: Trace, running: Running, reason: str, message: Message) -> None:
    """Write what an answer was, to the log and the trace."""
    number, usage = running.job.number, running.usage
    speed = usage.completion / max(time.monotonic() - running.answering, 1e-9)
    log.info(
        "request %d finish=%s prompt=%d reused=%d completion=%d %.1f tokens/s",
        number, reason, usage.prompt, usage.reused, usage.completion, speed,
    )  # fmt: skip
    if not trace.active:
        return
    mark = {"choice": running.index} if running.job.request.n > 1 else {}
    trace.write(
        number,
        "parse",
        reasoning=message.reasoning,
        content=message.text,
        calls=[{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        problems=list(message.problems),
        **mark,
    )
    trace.write(number, "finish", reason=reason, usage=vars(usage), **mark)


def choose(engine: Engine, answers: Sequence[Running]) -> None:
    """Choose the next tokens of many answers, together where logits decide; see `Running.choice`."""
    rows: dict[Running, SampleRow] = {}
    for running in answers:
        if running.generation is None or running.job.cancelled:
            continue
        try:
            chosen = running.generation.choose()
        except Exception as error:
            running.choice = error
        else:
            if isinstance(chosen, SampleRow):
                rows[running] = chosen
            else:
                running.choice = chosen
    if not rows:
        return
    try:
        choices: Sequence[Choice | Exception] = engine.sample(list(rows.values()))
    except Exception as error:
        choices = [error] * len(rows)
    for running, choice in zip(rows, choices, strict=True):
        running.choice = choice
