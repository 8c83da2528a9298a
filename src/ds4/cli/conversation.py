"""A conversation at the keyboard: from a question to the events of its answer, with the session that carries it."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ds4.chat import Message
from ds4.chat.events import Event, Finish, TextDelta
from ds4.chat.stream import StreamParser
from ds4.cli.prompt import Style, render_question
from ds4.engine import Engine, Sampling, Session
from ds4.tokenizer import Tokenizer

End = Literal["stop", "length", "context", "interrupted"]
"""Why an answer ended: the model was done, --tokens, the context is full, or the user stopped it."""

Progress = Callable[[int, int], None]

_ANY_TOOL = frozenset({"*"})
"""Calls are read whatever their name. None are offered; only a system text can bring the model to write some."""


@dataclass(frozen=True)
class Answer:
    """An answer and what it took; times in seconds, `reused` of the prompt's tokens were in the session already.

    `prompt_tokens` are those that were read: not all of the prompt if that was interrupted.
    """

    message: Message
    end: End
    prompt_tokens: int
    reused: int
    generated: int
    prefill_seconds: float
    decode_seconds: float

    def speed(self) -> str:
        """One line for people: tokens and tokens per second of prompt and answer."""
        evaluated = self.prompt_tokens - self.reused
        prompt = f"prompt {self.prompt_tokens} tokens"
        if self.reused:
            prompt += f" ({self.reused} reused)"
        if evaluated and self.prefill_seconds > 0:
            prompt += f", {evaluated / self.prefill_seconds:.0f} tokens/s"
        answer = f"answer {self.generated} tokens"
        if self.generated > 1 and self.decode_seconds > 0:
            answer += f", {(self.generated - 1) / self.decode_seconds:.1f} tokens/s"
        return f"{prompt}; {answer}"


class Conversation:
    """Messages and the session behind them.

    Attributes:
        style, sampling, max_tokens: may be changed between questions; `max_tokens` None is what the context leaves.
        messages: what was said so far, without the system text.
        session: its tokens are the evaluated part of the conversation.
    """

    def __init__(
        self,
        engine: Engine,
        style: Style | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.engine = engine
        self.style = style or Style()
        self.sampling = sampling or Sampling()
        self.max_tokens = max_tokens
        self.session: Session = engine.session()
        self.messages: list[Message] = []
        self._turn = 0

    def ask(
        self,
        text: str,
        emit: Callable[[Event], None],
        *,
        stopped: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Answer:
        """Ask, and pass the events of the answer on while it comes.

        A question that was stopped before the first visible word of its answer is forgotten.

        Args:
            emit: takes each event; the last is `Finish`, unless the prompt itself was stopped.
            stopped: asked before each token and each chunk of the prompt.
            progress: (tokens evaluated, tokens of the prompt) after each chunk.

        Raises:
            ContextOverflowError: the conversation does not fit the context; it stays as it was.
        """
        tokenizer = self.engine.tokenizer
        question = Message(role="user", content=text)
        rendered = render_question([*self.messages, question], self.style, self.engine.context)
        ids = as_sampled(tokenizer, live_tokens(self.session), tokenizer.encode_chat(rendered))
        parser = StreamParser(self.style.thinking, _ANY_TOOL, profile=self.style.template)
        answer = self._run(ids, parser, emit, stopped, progress)
        if answer.end != "interrupted" or answer.message.text or answer.message.tool_calls:
            self.messages += [question, answer.message]
        return answer

    def continue_text(
        self,
        text: str,
        emit: Callable[[Event], None],
        *,
        stopped: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Answer:
        """Let the model continue a raw text in which special tokens are recognised; the answer is plain text."""
        ids = self.engine.tokenizer.encode_chat(text)
        return self._run(ids, _PlainText(), emit, stopped, progress)

    def remembers(self, answer: Answer) -> bool:
        """True if the answer is the last message of the conversation."""
        return bool(self.messages) and self.messages[-1] is answer.message

    @property
    def used(self) -> int:
        """Tokens of the context that the conversation takes; a forgotten one takes none."""
        return len(live_tokens(self.session)) if self.messages else 0

    def forget(self) -> None:
        """Begin anew; the session stays, so that the system text is not evaluated again."""
        self.messages.clear()

    def _run(
        self,
        ids: list[int],
        parser: StreamParser | _PlainText,
        emit: Callable[[Event], None],
        stopped: Callable[[], bool],
        progress: Progress | None,
    ) -> Answer:
        start = time.perf_counter()
        done = self.session.sync(ids, progress=progress, cancelled=stopped)
        first = begin = time.perf_counter()
        reused = self.session.reused
        if not done:
            return Answer(Message(), "interrupted", len(self.session.tokens), reused, 0, begin - start, 0.0)
        limit = self.engine.context - len(ids)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens)
        count, end = 0, self._end_of_limit(limit)
        for piece in self.session.generate(self._sampling(), limit):
            count += 1
            if count == 1:
                first = time.perf_counter()
            for event in parser.push(piece):
                emit(event)
            if stopped():
                end = "interrupted"
                break
            if parser.done:
                end = "stop"
                break
        else:
            if self.session.pending == self.engine.tokenizer.eos:
                end = "stop"
        message = Message()
        for event in parser.finish("length" if end in ("length", "context") else "stop"):
            if isinstance(event, Finish):
                message = event.message
            emit(event)
        self._turn += 1
        now = time.perf_counter()
        return Answer(message, end, len(ids), reused, count, begin - start, now - first)

    def _end_of_limit(self, limit: int) -> End:
        return "length" if limit == self.max_tokens else "context"

    def _sampling(self) -> Sampling:
        sampling = self.sampling
        # Each answer has a stream of its own, or a repeated question could only be answered in the same words.
        return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + self._turn)


class _PlainText:
    """A stand-in for the parser where text means nothing but itself."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def done(self) -> str | None:
        return None

    def push(self, piece: bytes) -> list[Event]:
        return self._text(self._decoder.decode(piece))

    def finish(self, reason: str) -> list[Event]:
        events = self._text(self._decoder.decode(b"", True))
        return [*events, Finish(reason, Message(content="".join(self._pieces)))]

    def _text(self, text: str) -> list[Event]:
        self._pieces.append(text)
        return [TextDelta(text)] if text else []


def live_tokens(session: Session) -> list[int]:
    """All tokens of a session, the one that was sampled and not evaluated included."""
    return [*session.tokens, *([] if session.pending is None else [session.pending])]


def as_sampled(tokenizer: Tokenizer, live: Sequence[int], prompt: list[int]) -> list[int]:
    """The prompt, its start spelled in the `live` tokens where both are the same text.

    The model's own spelling of a text need not be the tokenizer's. Keeping the sampled one keeps what is computed.
    """
    key = tokenizer.key_bytes(live)
    count = length = 0
    while length < len(key) and count < len(prompt):
        length += len(tokenizer.key_bytes(prompt[count : count + 1]))
        count += 1
    if length == len(key) and tokenizer.key_bytes(prompt[:count]) == key:
        return [*live, *prompt[count:]]
    return prompt
