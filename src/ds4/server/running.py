"""What the worker has in hand: requests, and questions about them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, TypeVar

from ds4.chat.message import Message
from ds4.engine import FREE_TRUNCATION
from ds4.engine.session import Prefill
from ds4.server.continuation import Plan
from ds4.server.decode import Chooser, Ending, Generation
from ds4.server.logprobs import TokenLogprob
from ds4.server.recovery import Earlier
from ds4.server.request import ChatRequest, Job, Usage
from ds4.server.slots import Slot
from ds4.server.trace import Trace
from ds4.server.turns import Turn
from ds4.tokenizer import Tokenizer

Found = TypeVar("Found")

_TURN_BOUNDARIES = 6
"""Turns of a prompt, counted from its end, that get a way back."""

_MIN_SYSTEM = 32
"""Tokens of a system region that is worth a way back of its own."""


@dataclass(eq=False)
class TimedJob(Job):
    """A job as the worker keeps it.

    Attributes:
        deadline: the moment, on the worker's clock, at which it has taken too long.
        ended: how many of its answers have ended well, and their tokens.
        failed: its failure was delivered.
        arrived, first_token: when it was submitted, and when its first token was there, on the worker's clock.
        counted: it is among the requests that ended.
    """

    deadline: float = inf
    ended: int = 0
    usage: Usage = Usage()  # noqa: RUF009  (frozen)
    failed: bool = False
    arrived: float = 0.0
    first_token: float | None = None
    counted: bool = False

    def end(self, usage: Usage) -> int:
        """One more answer has ended with these tokens; returns how many are left."""
        self.ended += 1
        self.usage = replace(
            usage,
            completion=self.usage.completion + usage.completion,
            reasoning=self.usage.reasoning + usage.reasoning,
        )
        return self.request.n - self.ended


class Question(Generic[Found]):
    """Something that only the worker's thread can look up, for another one that waits for `answer`."""

    def __init__(self, look: Callable[[], Found], otherwise: Found) -> None:
        """`otherwise`: the answer if the worker has ended."""
        self._look, self._otherwise = look, otherwise
        self.answer: Future[Found] = Future()

    def settle(self, ended: bool = False) -> None:
        """Look it up, or give the other answer. Who does not wait for it any more has cancelled it."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self._otherwise if ended else self._look())
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

    def settle(self, ended: bool = False) -> None:
        """Settle all (see `Question.settle`)."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for question in waiting:
            question.settle(ended)


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
        counted, malformed: that a part of its prompt was reused was counted, and that a call in its present attempt
            could not be read.
        evaluated: how many tokens of `ids` the last `evaluate` has evaluated.
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
    counted: bool = False
    malformed: bool = False
    evaluated: int = 0

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
        before = self.slot.session.recomputed
        complete = self.prefill.step(chunk)
        after = self.slot.session.recomputed
        # A step that starts over counts from 0 again.
        self.evaluated = after - before if after >= before else after
        if self.reused is None:
            self.reused = self.prefill.reused
        if complete:
            self.prefill = None
        return complete

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


def trace_prompt(trace: Trace, job: Job, chosen: Plan) -> None:
    """Write what is evaluated for a request."""
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


def trace_end(trace: Trace, running: Running, reason: str, message: Message) -> None:
    """Write what an answer was."""
    if not trace.active:
        return
    number, usage = running.job.number, running.usage
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
