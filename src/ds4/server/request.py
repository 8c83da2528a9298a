"""One request as all APIs share it, and what goes back to the handler that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ds4.chat.events import Event
from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.chat.tools import ToolSchema
from ds4.engine.sampling import Sampling
from ds4.errors import RequestError
from ds4.server.constraints import AnswerRules, Schema
from ds4.server.logprobs import TokenLogprob


class QueueFullError(RequestError):
    """As many requests wait as may wait."""


class ShuttingDownError(RequestError):
    """The server takes no requests any more: it is shutting down, or its worker has ended."""


@dataclass(frozen=True)
class ChatRequest:
    """What a client asked for, in the terms of the chat format.

    Attributes:
        model: the name the client used; it is echoed.
        messages: the conversation, tool calls with their wire ids.
        tools: the offered tools.
        calls_allowed: whether the model may call them; False keeps the tools in the prompt.
        parallel_calls: False ends the answer after its first call.
        forced: whether the answer has to be calls.
        callable: names of the tools that may be called; None: all.
        strict: names of the tools whose arguments have to follow their schemas.
        content_schema: the JSON schema that the text has to follow; None: it is free.
        thinking: whether the answer begins inside reasoning.
        effort: a level for `chat.render`, or None.
        sampling: how tokens are drawn.
        n: how many answers are wanted, each drawn for itself.
        max_tokens: limit of the answer, or None for the server's.
        stop: strings that end the answer.
        logprobs: how many alternatives are told for each token of the text, or None to tell nothing.
        call_prefix: how ids of calls begin on this API.
        streamed: whether the client sees the answer while it grows.
        text: a prompt to be continued as it stands, without the chat format; then `messages` is empty.
        response_id: the answer's id on the wire, under which it can be continued later; empty: it cannot.
        front: how many of the messages at the start belong to this request only, and not to what follows it.
        remembered: whether later requests may continue the answer by its id, or by those of its calls.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    calls_allowed: bool = True
    parallel_calls: bool = True
    forced: bool = False
    callable: frozenset[str] | None = None
    strict: frozenset[str] = frozenset()
    content_schema: Schema | None = None
    thinking: bool = True
    effort: str | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009  (frozen)
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    call_prefix: str = "call_"
    streamed: bool = False
    text: str | None = None
    response_id: str = ""
    front: int = 0
    remembered: bool = False

    @property
    def tools_active(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and self.calls_allowed

    def rules(self, profile: str) -> AnswerRules:
        """What the answer has to be; `profile`: the chat template."""
        return AnswerRules(
            calls="none" if not self.tools_active else "required" if self.forced else "allowed",
            tools=self.tools,
            names=self.callable,
            several=self.parallel_calls,
            strict=self.strict,
            content=self.content_schema,
            profile=profile,
        )


@dataclass(frozen=True)
class Prompt:
    """A rendered request.

    Attributes:
        text: the prompt with its client spans.
        ids: its tokens.
        key: its key bytes (see `Tokenizer.key_bytes`).
        messages: what was rendered, with the sampled bytes of known calls; empty for a raw prompt.
        replay: how the assistant messages with calls were written (see `ReplayMemory.attach`): how many in each way.
    """

    text: Rendered
    ids: list[int]
    key: bytes
    messages: tuple[Message, ...] = ()
    replay: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt: tokens of the prompt that was evaluated or reused; with hidden reasoning more than the client sent.
        reused: those of them that were taken over from live state.
        completion: sampled and injected tokens without the end-of-sequence token.
        reasoning: those of them that are reasoning.
    """

    prompt: int = 0
    reused: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True)
class Admitted:
    """The worker has begun with the request; its prompt is not evaluated yet."""

    usage: Usage


@dataclass(frozen=True)
class Events:
    """What the model wrote since the last time.

    Attributes:
        call_ids: the ids of all calls begun so far, by index.
        logprobs: the tokens whose text begins here, if the request wants to know.
        index: which of several answers this is, from 0.
    """

    events: Sequence[Event]
    call_ids: Sequence[str]
    logprobs: Sequence[TokenLogprob] = ()
    index: int = 0


@dataclass(frozen=True)
class Done:
    """The end of an answer that went well; of several answers each has its own.

    Attributes:
        usage: of all answers that have ended so far.
        reason: `stop`, `length`, `tool_calls`, or `error` for tool calls that cannot be read.
        message: the whole answer, its calls with their ids; it is what the events add up to.
        stop_string: the stop string that ended it, if any.
        whole: for an `error`, the answer with all its text: what a client gets that has seen no events.
        logprobs: the tokens of its text, if the request wants to know.
        index: which of several answers this is, from 0.
        left: how many answers to the request have not ended yet.
    """

    reason: str
    message: Message
    usage: Usage
    stop_string: str | None
    whole: Message
    logprobs: Sequence[TokenLogprob] = ()
    index: int = 0
    left: int = 0


@dataclass(frozen=True)
class Failed:
    """The end of a request that did not go well.

    Attributes:
        status: HTTP status, where it can still be sent.
        message: for the client.
        retry: whether the same request may succeed later.
        fault: what is wrong with the request, if that is why.
    """

    status: int
    message: str
    retry: bool = True
    fault: RequestError | None = field(default=None, compare=False)


Reply = Admitted | Events | Done | Failed


Post = Callable[..., object]
"""Calls a function with arguments where it has to be called, such as on an event loop; RuntimeError if that is gone."""


def post_here(call: Callable[..., object], *arguments: object) -> None:
    """The `Post` of this place."""
    call(*arguments)


@dataclass(eq=False)
class Job:
    """A request on its way through the worker.

    Attributes:
        number: counts requests since the start, from 1.
        deliver: takes each reply; it must not block.
        post: calls `deliver`; jobs with an equal one get their replies in one go.
    """

    number: int
    request: ChatRequest
    prompt: Prompt
    deliver: Callable[[Reply], None]
    post: Post = post_here
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """The client is gone: stop at the next step. May be called from any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """True after `cancel`."""
        return self._cancelled.is_set()
