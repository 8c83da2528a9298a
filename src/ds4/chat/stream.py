"""From sampled bytes to events that every API can send.

What has left in an event is final: it never ends inside a character or a tag, and the arguments of a call always add
up to one JSON object, however the generation ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from ds4.chat.dsml import END_THINK_INJECTION, tool_names
from ds4.chat.events import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Event,
    Finish,
    Problem,
    ReasoningDelta,
    TextDelta,
    merge,
)
from ds4.chat.message import Message
from ds4.chat.scanner import Scanner
from ds4.chat.stops import StopFilter

__all__ = [
    "ArgumentsDelta",
    "CallBegin",
    "CallEnd",
    "Event",
    "Finish",
    "Problem",
    "ReasoningDelta",
    "StreamParser",
    "TextDelta",
]


class StreamParser:
    """Turns one generation into events.

    Args:
        thinking: the prompt ended in `<think>`.
        tools: the active tools or their names. Without any, everything is text and leaves at once.
        stops: strings that end the answer where they occur in its text, or in a value that is a string. They are not
            looked for in reasoning and tags.
        parallel: False stops after the first call.
        profile: the template profile, which says whether values are escaped.
        hold: wait at a block of which nothing has left when it shows that it cannot be read (see `malformed`).
        forced: a block of calls has to come: white space alone is the begin of one, and no text.
        verbatim: all is text, as a raw prompt has no turns that could begin with reasoning.
    """

    def __init__(
        self,
        thinking: bool = True,
        tools: Sequence[Any] | Collection[str] | None = None,
        *,
        stops: Sequence[str] = (),
        parallel: bool = True,
        profile: str = "official",
        hold: bool = False,
        forced: bool = False,
        verbatim: bool = False,
    ) -> None:
        self._scanner = Scanner(
            thinking,
            tool_names(tools),
            decode=profile == "ds4",
            parallel=parallel,
            stops=StopFilter(stops) if any(stops) else None,
            hold=hold,
            forced=forced,
            verbatim=verbatim,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finished = False

    def push(self, piece: bytes) -> list[Event]:
        """Take the bytes of one or more tokens, cut anywhere; returns the events that are certain now."""
        return self._feed(self._decoder.decode(piece))

    def inject(self, text: str = END_THINK_INJECTION) -> list[Event]:
        """Take text that was fed to the model to close its reasoning (bare calls of active tools count from now)."""
        self._scanner.recover()
        return self._feed(text)

    def settle(self) -> list[Event]:
        """The model ended its sentence: returns the events of what was held back. Then `malformed` is certain."""
        return merge(self._scanner.feed(self._decoder.decode(b"", True)) + self._scanner.flush())

    def give_up(self) -> list[Event]:
        """Read a malformed block as text after all; returns its events."""
        return merge(self._scanner.give_up())

    def finish(self, reason: str = "stop") -> list[Event]:
        """The generation is over; returns the remaining events, the last of them Finish.

        `reason` is why it ended: `stop` (end of sentence, a stop string, or `done`), `length`, or anything else, which
        is passed on. `stop` becomes `tool_calls` if calls were read, and `error` if they were begun but not readable.
        A call that a stop string cuts is closed, but the message does not hold it: nobody should run half a call.
        """
        if self._finished:
            return []
        self._finished = True
        events = self._scanner.feed(self._decoder.decode(b"", True)) + self._scanner.finish()
        return [*merge(events), Finish(self._reason(reason), self._scanner.message(), self._scanner.stop_string)]

    def _feed(self, text: str) -> list[Event]:
        if not text or self.done:
            return []
        return merge(self._scanner.feed(text))

    def _reason(self, reason: str) -> str:
        scanner = self._scanner
        if reason not in ("stop", "tool_calls") or scanner.stop_string is not None:
            return reason
        message = scanner.message()
        if message.tool_calls:
            return "tool_calls"
        unreadable = scanner.failed and scanner.calls_begun
        unterminated = not message.complete and not scanner.failed
        return "error" if unreadable or unterminated else "stop"

    @property
    def done(self) -> str | None:
        """Why generation can stop now: `stop` (a stop string), `tool_calls` (the block is over), or None."""
        if self._scanner.finished_calls:
            return "tool_calls"
        return "stop" if self._scanner.stop_string is not None else None

    @property
    def malformed(self) -> bool:
        """Whether calls are malformed and no event tells of them yet: the model may be asked again.

        With `hold` that is known as soon as a block breaks the grammar, and else at its end or after `settle`.
        """
        return self._scanner.malformed

    @property
    def failed(self) -> bool:
        """Whether calls are malformed, though a call was announced before that showed."""
        return self._scanner.failed

    @property
    def calls_begun(self) -> int:
        """Number of calls that have been announced."""
        return self._scanner.calls_begun

    @property
    def message(self) -> Message:
        """What the events so far add up to."""
        return self._scanner.message()
