"""One answer as it is sampled: token by token, from logits to events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds4.chat.dsml import END_THINK_INJECTION, DecodeState, parse
from ds4.chat.events import Event, Finish
from ds4.chat.message import Message
from ds4.chat.stream import StreamParser
from ds4.engine import Sampler, SampleRow, Sampling, Session
from ds4.engine.logprobs import Logprobs
from ds4.engine.sampling import Choice
from ds4.errors import RequestError
from ds4.server.constraints import Constraint, Enforcement, SchemaError
from ds4.server.logprobs import TextLogprobs, TokenLogprob
from ds4.server.recovery import Earlier
from ds4.server.request import ChatRequest
from ds4.server.trace import Trace, printable
from ds4.tokenizer import Tokenizer

MAX_EOS_MASKED = 64
"""How often the end of the sentence is refused inside a tool call; after that the call is closed as it is."""

_END_THINK = b"</think>"


class TokenRules(NamedTuple):
    """What holds for the next token.

    Attributes:
        greedy: it is the most probable one.
        forbidden: tokens that may not come.
        constraint: what it obeys; choosing leaves that where it is.
        top: how many of the most probable ones are told, with how probable it is; None: nothing is.
    """

    greedy: bool = False
    forbidden: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    top: int | None = None


class Chooser(Protocol):
    """Chooses the tokens of one answer."""

    def choose(self, session: Session, rules: TokenRules) -> Choice | SampleRow:
        """The next token, or what `Engine.sample` has to know to choose it together with those of other answers."""
        ...

    def skipped(self, choice: Choice, rules: TokenRules) -> list[int]:
        """The tokens that would have been taken instead of the one just chosen, had they not been forbidden."""
        ...

    def count(self, tokens: Sequence[int]) -> None:
        """Take tokens into account that became part of the answer without being chosen."""
        ...

    def again(self, session: Session) -> Chooser:
        """What chooses the tokens of a second attempt at the same answer."""
        ...

    def other(self, session: Session, number: int) -> Chooser:
        """What chooses the tokens of a further answer to the same prompt; `number`: from 1."""
        ...


ChooserFactory = Callable[[Session, Sampling], Chooser]


class SamplingChooser:
    """Samples from the logits."""

    def __init__(self, sampling: Sampling, number: int = 0) -> None:
        self._sampler = Sampler(sampling, number)
        self._masks: dict[frozenset[int], Tensor] = {}

    def choose(self, session: Session, rules: TokenRules) -> SampleRow:
        """See `Chooser`. Raises SchemaError if the constraint leads nowhere."""
        allowed = self._allowed(session, rules)
        return SampleRow(session, self._sampler, rules.greedy, allowed, rules.top, best=bool(rules.forbidden))

    def skipped(self, choice: Choice, rules: TokenRules) -> list[int]:
        """See `Chooser`; only the most probable token counts."""
        return [choice.best] if choice.best is not None and choice.best in rules.forbidden else []

    def count(self, tokens: Sequence[int]) -> None:
        """See `Chooser`."""
        self._sampler.count(tokens)

    def again(self, session: Session) -> Chooser:
        """See `Chooser`; the stream of random numbers goes on, so that the attempts differ."""
        return self

    def other(self, session: Session, number: int) -> Chooser:
        """See `Chooser`; it draws random numbers of its own."""
        return SamplingChooser(self._sampler.sampling, number)

    def _allowed(self, session: Session, rules: TokenRules) -> Tensor | None:
        if rules.constraint is not None:
            return rules.constraint.mask(rules.forbidden)
        if not rules.forbidden:
            return None
        mask = self._masks.get(rules.forbidden)
        if mask is None:
            mask = torch.ones(session.device_logits.shape[0], dtype=torch.bool)
            mask[list(rules.forbidden)] = False
            self._masks[rules.forbidden] = mask
        return mask


def sampling_chooser(session: Session, sampling: Sampling) -> Chooser:
    """The chooser of a real model."""
    return SamplingChooser(sampling)


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    Attributes:
        reason: `stop`, `length`, `tool_calls` or `error`.
        message: the answer, without ids of calls.
        bindable: the state ends where the message ends, so a client's view of it can be bound to the state.
    """

    reason: str
    message: Message
    stop_string: str | None
    bindable: bool


class Generation:
    """The answer to one request on one session.

    Attributes:
        fresh: tokens to evaluate next: the sampled one, and what was injected behind it.
        completion, reasoning: tokens sampled or injected so far, without the end-of-sentence token.
        ending: how it ended, or None while it goes on.
        malformed: what is wrong with the tool calls, if the model may be asked again as nobody has seen them. Then
            either `earlier` or `give_up` comes next.
        recovered: the reasoning was closed for a call that began in it.
    """

    def __init__(
        self,
        number: int,
        request: ChatRequest,
        session: Session,
        chooser: Chooser,
        tokenizer: Tokenizer,
        *,
        opened: int,
        limit: int,
        profile: str,
        think_recovery: bool,
        trace: Trace,
        first: Earlier | None = None,
        constraint: Enforcement | None = None,
        index: int = 0,
    ) -> None:
        """`opened`: the prompt's last token. `limit`: most tokens. `first`: the attempt that this one continues.

        `constraint`: what enforces the rules of this answer. `index`: which of several answers this is.
        """
        self.number, self.request, self.session = number, request, session
        self.fresh: list[int] = []
        self.completion = first.completion if first else 0
        self.reasoning = first.reasoning if first else 0
        self.ending: Ending | None = None
        self.malformed: str | None = None
        self._chooser, self._tokenizer, self._trace = chooser, tokenizer, trace
        self._limit = self.completion + limit
        self._profile = profile
        self._recovery = think_recovery and request.tools_active
        verbatim = request.text is not None
        self._thinking = opened == tokenizer.think and not verbatim
        self._constraint = constraint.begin(self._thinking) if constraint else None
        self._tools = request.tools if request.tools_active else None
        self._first = first
        self._may_retry = first is None and self._tools is not None
        self._parser = StreamParser(
            self._thinking,
            self._tools,
            stops=request.stop,
            parallel=request.parallel_calls,
            profile=profile,
            hold=self._may_retry,
            forced=request.forced or (request.content_schema is not None and request.tools_active),
            verbatim=verbatim,
        )
        self._state = DecodeState(self._thinking, self._tools, profile=profile, verbatim=verbatim)
        self._masked = 0
        self._never = frozenset([tokenizer.dsml] if request.tools and not request.calls_allowed else [])
        self._rules = TokenRules()
        self._mark = {"choice": index} if request.n > 1 else {}
        self.recovered = False
        self._over = False
        self._text: list[bytes] = []
        self._logprobs = TextLogprobs(first.logprobs if first else ())

    def choose(self) -> Choice | SampleRow | None:
        """The next token, or what `Engine.sample` has to know to choose it; None: there may be no more.

        Raises SchemaError if the constraint leads nowhere.
        """
        if self.completion >= self._limit:
            return None
        # Nothing is told of how probable reasoning is.
        top = None if self._state.in_reasoning else self.request.logprobs
        self._rules = TokenRules(self._state.greedy, self._forbidden(), self._constraint, top)
        return self._chooser.choose(self.session, self._rules)

    def step(self, choice: Choice | None) -> list[Event]:
        """Take the next token, which `choose` led to; returns the events it completes.

        Afterwards either `ending` or `malformed` is set, or `fresh` holds the tokens to evaluate before the next step.
        """
        self.fresh = []
        if choice is None:
            return self._end("length")
        token = choice.token
        self._note(choice)
        self.session.pending = token
        if token == self._tokenizer.eos:
            self._over = True
            events = self._parser.settle()
        else:
            self.fresh = [token]
            events = self._take(token)
        if self._may_retry and self.completion < self._limit and self._is_malformed():
            problems = self._parser.message.problems
            self.malformed = problems[-1] if problems else "a tool call block without a call"
            return self._joined(events)
        return self._joined(events) + self._go_on()

    def earlier(self, injected: int) -> Earlier:
        """This attempt, for the one that comes after `injected` tokens about its malformed calls."""
        message = self._parser.message
        if self.malformed not in message.problems:
            message = replace(message, problems=(*message.problems, self.malformed or ""))
        logprobs = tuple(self._logprobs.shown)
        return Earlier(message, self.completion + injected, self.reasoning, logprobs)

    def give_up(self) -> list[Event]:
        """There is no second attempt: go on with the malformed calls as text, or as an error where they have begun."""
        self.malformed = None
        self._may_retry = False
        return self._joined(self._parser.give_up()) + self._go_on()

    def _is_malformed(self) -> bool:
        # Of an answer that is not streamed nobody has seen calls that have begun.
        return self._parser.malformed or (self._parser.failed and not self.request.streamed)

    def _go_on(self) -> list[Event]:
        # Of a call that was sent and cannot be read, a client gets nothing more than that it failed.
        if self._over or self._parser.done or (self._parser.failed and self.request.streamed):
            return self._end("stop")
        if self.completion >= self._limit:
            return self._end("length")
        if self._recovery and not self.recovered and self._state.dangling_start:
            return self._joined(self._close_reasoning())
        return []

    @property
    def unreadable(self) -> bool:
        """Whether there are calls in it that cannot be read; those that were given up do not count."""
        return self._parser.malformed or self._parser.failed

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The tokens that the text of the last events is made of, if the request wants to know."""
        return self._logprobs.take()

    def logprobs(self, whole: bool) -> tuple[TokenLogprob, ...]:
        """The tokens of the text so far; `whole`: of that of `whole_text`."""
        return self._logprobs.all if whole else tuple(self._logprobs.shown)

    def _joined(self, events: list[Event]) -> list[Event]:
        self._logprobs.follow(events)
        return self._first.events(events) if self._first else events

    def _note(self, choice: Choice) -> None:
        """What follows from a choice, whatever its token means."""
        token, rules = choice.token, self._rules
        if choice.logprobs is not None and token != self._tokenizer.eos:
            self._logprobs.add(self._token_logprob(choice.logprobs))
        allowed = token not in rules.forbidden
        if self._constraint is not None:
            allowed = self._constraint.advance(token) and allowed
        skipped = self._chooser.skipped(choice, rules)
        self._masked += self._tokenizer.eos in skipped
        if self._trace.active:
            for passed_over in skipped:
                self._trace_piece(passed_over, rules.greedy, allowed=False)
            self._trace_piece(token, rules.greedy, allowed=allowed)

    def _take(self, token: int) -> list[Event]:
        piece = self._tokenizer.token_bytes(token)
        self.completion += 1
        self._text.append(piece)
        reasoned = self._state.in_reasoning
        self._state.push(piece)
        self.reasoning += reasoned and self._state.in_reasoning
        if self._state.in_reasoning:
            self._logprobs.forget()
        elif reasoned:
            # The token that ends the reasoning may go on.
            tail = b"".join(self._text[-len(_END_THINK) :])
            self._logprobs.skip(tail.rpartition(_END_THINK)[2])
        return self._parser.push(piece)

    def _token_logprob(self, found: Logprobs) -> TokenLogprob:
        top = tuple((self._bytes(token), logprob) for token, logprob in found.top)
        return TokenLogprob(self._bytes(found.token), found.logprob, top)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except RequestError:
            return b""  # a logit that belongs to no token

    def _forbidden(self) -> frozenset[int]:
        if self._state.open_block and not self._state.failed and self._masked < MAX_EOS_MASKED:
            return self._never | {self._tokenizer.eos}
        return self._never

    def _close_reasoning(self) -> list[Event]:
        """The model began a call inside its reasoning: close the reasoning for it, so that the call counts."""
        tokens = self._tokenizer.encode_chat(END_THINK_INJECTION)
        if self.completion + len(tokens) >= self._limit:
            return []
        self.recovered = True
        self.completion += len(tokens)
        self.fresh += tokens
        self._text.append(END_THINK_INJECTION.encode())
        self._state.inject()
        self._logprobs.skip(END_THINK_INJECTION.encode().rpartition(_END_THINK)[2])
        if self._constraint is not None and not self._constraint.broken and not self._constraint.injected(tokens):
            raise SchemaError("the answer cannot follow its schema any further: its reasoning could not be closed")
        self._chooser.count(tokens)
        self._trace.write(self.number, "inject", text=END_THINK_INJECTION, **self._mark)
        return self._parser.inject()

    def _end(self, reason: str) -> list[Event]:
        *events, last = self._parser.finish(reason)
        if not isinstance(last, Finish):
            raise TypeError("the parser did not finish")
        message = self._first.join(last.message) if self._first else last.message
        self.fresh = []
        self.ending = Ending(
            last.reason,
            message,
            last.stop_string,
            bindable=last.reason in ("stop", "tool_calls") and last.stop_string is None and message.complete,
        )
        return self._joined(events)

    def whole_text(self) -> Message:
        """The answer read as a whole: calls that cannot be read are text in it. For answers that were not streamed."""
        text = b"".join(self._text).decode(errors="replace")
        message = parse(text, self._thinking, self._tools, profile=self._profile, recovered=self.recovered)
        return self._first.join(message) if self._first else message

    def _trace_piece(self, token: int, greedy: bool, allowed: bool) -> None:
        self._trace.write(
            self.number,
            "piece",
            text=printable(self._tokenizer.token_bytes(token)),
            greedy=greedy,
            state=self._state.state.value,
            allowed=allowed,
            **self._mark,
        )
