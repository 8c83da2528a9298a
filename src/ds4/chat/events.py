"""What happens while a model writes, independent of any API's wire format."""

from __future__ import annotations

from dataclasses import dataclass

from ds4.chat.message import Message


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call starts; calls are numbered from 0 and do not overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments. The pieces of one call concatenate to one JSON object.

    If the model gave a parameter twice, its key stands twice in the object and the last one counts.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are one JSON object. The call counts if the message at the end holds it."""

    index: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Tool calls cannot be read.

    Attributes:
        message: what was wrong, for people.
        streamed: whether events of a call went out before; if not, the block so far follows as text.
    """

    message: str
    streamed: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The end.

    Attributes:
        reason: `stop`, `length`, `tool_calls`, `error`, or what else the caller of `finish` said.
        message: the whole message; the deltas before add up to it.
        stop_string: the stop string that ended the text, if one did.
    """

    reason: str
    message: Message
    stop_string: str | None = None


Event = ReasoningDelta | TextDelta | CallBegin | ArgumentsDelta | CallEnd | Problem | Finish


def merge(events: list[Event]) -> list[Event]:
    """Join neighbouring deltas of one kind, so that a piece of text makes one event."""
    merged: list[Event] = []
    run: list[str] = []

    def flush() -> None:
        if len(run) > 1:
            last = merged.pop()
            text = "".join(run)
            if isinstance(last, ArgumentsDelta):
                merged.append(ArgumentsDelta(last.index, text))
            else:
                merged.append(TextDelta(text) if isinstance(last, TextDelta) else ReasoningDelta(text))
        run.clear()

    for event in events:
        if isinstance(event, ReasoningDelta | TextDelta | ArgumentsDelta):
            last = merged[-1] if run else None
            same = type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0)
            if not same:
                flush()
                merged.append(event)
            run.append(event.text)
        else:
            flush()
            merged.append(event)
    flush()
    return merged
