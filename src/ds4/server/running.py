"""What the worker has in hand: requests, and questions about them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf

from ds4.chat.message import Message
from ds4.engine import FREE_TRUNCATION
from ds4.engine.session import Prefill
from ds4.server.continuation import Plan
from ds4.server.decode import Chooser, Generation
from ds4.server.recovery import Earlier
from ds4.server.request import ChatRequest, Job, Prompt, Usage
from ds4.server.slots import Slot
from ds4.server.trace import Trace
from ds4.tokenizer import Tokenizer

_TURN_BOUNDARIES = 6
"""Turns of a prompt, counted from its end, that get a way back."""

_MIN_SYSTEM = 32
"""Tokens of a system region that is worth a way back of its own."""


@dataclass(eq=False)
class TimedJob(Job):
    """A job with the moment, on the worker's clock, at which it has taken too long."""

    deadline: float = inf


@dataclass(eq=False)
class Count:
    """A question of how many tokens a request would have before it."""

    request: ChatRequest
    prompt: Prompt
    tokens: Future[int] = field(default_factory=Future)


@dataclass(eq=False)
class Running:
    """A request that has a slot; it has a generation once its prompt is evaluated.

    Attributes:
        boundaries: where its prompt gets checkpoints.
        reused: tokens of its prompt that were not evaluated, once that is known.
        call_ids: ids of the calls begun so far.
        started, answering: when it was admitted, and when its prompt was evaluated.
        first, again: a second attempt continues this one, and its prompt is these tokens.
        prefill: the evaluation of `ids`, while it is under way.
    """

    job: TimedJob
    slot: Slot
    plan: Plan
    chooser: Chooser
    boundaries: list[int]
    reused: int | None = None
    generation: Generation | None = None
    call_ids: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    answering: float = 0.0
    first: Earlier | None = None
    again: list[int] | None = None
    prefill: Prefill | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens that are evaluated before an answer is sampled."""
        return self.plan.ids if self.again is None else self.again

    def evaluate(self, chunk: int) -> bool:
        """Evaluate `ids` up to the next multiple of `chunk` tokens; True once all are."""
        if self.prefill is None:
            self.prefill = self.slot.session.begin(self.ids, boundaries=self.boundaries)
        complete = self.prefill.step(chunk)
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


def trace_end(trace: Trace, number: int, reason: str, message: Message, usage: Usage) -> None:
    """Write what an answer was."""
    if not trace.active:
        return
    trace.write(
        number,
        "parse",
        reasoning=message.reasoning,
        content=message.text,
        calls=[{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        problems=list(message.problems),
    )
    trace.write(number, "finish", reason=reason, usage=vars(usage))
