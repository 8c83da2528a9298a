"""Turns the parameters of a call into the events that carry its arguments as JSON."""

from __future__ import annotations

from collections.abc import Callable

from ds4.chat import json_text
from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event
from ds4.chat.json_stream import JsonStream
from ds4.chat.message import ToolCall
from ds4.chat.tags import SPACE, BodyEnd


class CallWriter:
    """Writes one call after the other into a list of events.

    Attributes:
        begun: number of calls that were begun.
        name: the tool of the last one.
        depth: number of open JSON objects; 0 if no call is open.
        muted: nothing is written any more.
    """

    def __init__(self, emit: Callable[[Event], None], keep: bool) -> None:
        self.begun = 0
        self.name = ""
        self.muted = False
        self.calls: list[ToolCall] = []
        self._emit = emit
        self._keep = keep
        self._levels: list[set[str]] = []
        self._duplicates = False
        self._pieces: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._levels)

    def begin(self, name: str) -> None:
        self.name = name
        self._levels = [set()]
        self._duplicates = False
        self._emit(CallBegin(self.begun, name))
        self.begun += 1
        self.write("{")

    def key(self, name: str) -> None:
        """Write the name of the parameter whose value follows."""
        names = self._levels[-1]
        comma = "," if names else ""
        self._duplicates = self._duplicates or name in names
        names.add(name)
        self.write(f"{comma}{json_text.dump_string(name)}:")

    def write(self, text: str) -> None:
        if not text or self.muted:
            return
        self._emit(ArgumentsDelta(self.begun - 1, text))
        if self._keep:
            self._pieces.append(text)

    def open_object(self) -> None:
        self.write("{")
        self._levels.append(set())

    def close_object(self) -> None:
        self._levels.pop()
        self.write("}")

    def end(self, drop: bool = False) -> None:
        """Close every open object and the call; with `drop` it does not count as one of the calls."""
        while self._levels:
            self.close_object()
        if self.muted:
            return
        self._emit(CallEnd(self.begun - 1))
        if self._keep and not drop:
            self.calls.append(ToolCall(self.name, self._arguments()))
        self._pieces.clear()

    def _arguments(self) -> str:
        arguments = "".join(self._pieces)
        if not self._duplicates:
            return arguments
        try:
            # Of equal names the last one counts.
            return json_text.dumps(json_text.loads(arguments), compact=True)
        except json_text.NotJsonError:
            return arguments  # nested beyond what we rewrite; readers take the last one as well


class Value:
    """The value of one parameter, as it arrives.

    A value that is announced as JSON but begins with something else is taken as a string: that is what was meant.
    """

    def __init__(self, name: str, end: BodyEnd, string: bool | None, write: Callable[[str], None]) -> None:
        self.name = name
        self.end = end
        self.undecided = string is None
        self.as_text = False
        self._json = JsonStream() if string is False else None
        self._write = write
        self._opened = False
        self._head: list[str] = []

    @property
    def is_json(self) -> bool:
        return self._json is not None

    @property
    def in_string(self) -> bool:
        """Whether the end of what was fed is string text (of a JSON value: inside its quotes)."""
        return self._json is None or self._json.in_string

    def hold(self, text: str) -> None:
        """Take text of an undecided value: white space, which is part of it if it is a string."""
        self._head.append(text)

    def decide_string(self) -> None:
        self.undecided = False
        self._string("".join(self._head))
        self._head.clear()

    def feed(self, text: str) -> bool:
        """Take more of the value. Returns False if it cannot be read."""
        json = self._json
        if json is None:
            self._string(self.end.unescape(text))
            return True
        if self.as_text:
            self._string(text)
            json.feed(text)
            return True
        if not json.started:
            self._head.append(text)
        self._write(json.feed(text))
        return self._check(json)

    def finish(self) -> bool:
        """The closing tag is there. Returns False if the value is not whole."""
        json = self._json
        if json is not None and not self.as_text:
            self._write(json.finish())
            if not self._check(json):
                return False
            if not self.as_text:
                if json.complete:
                    return True
                empty = not json.started and not "".join(self._head).strip(SPACE)
                if empty:
                    self._write("null")
                return empty
        self._string("")
        self._write('"')
        return True

    def cut(self, tail: str) -> None:
        """The text ended inside the value, `tail` being what was held back: close it."""
        if self.undecided:
            self.decide_string()
        elif not tail.startswith("</") and (self._json is None or self.as_text or self._json.in_string):
            # A lone `<` is more likely the text's own.
            self.feed(tail)
        self.close()

    def close(self) -> None:
        """Write what makes the value valid JSON."""
        if self._json is not None and not self.as_text:
            self._write(self._json.close())
        else:
            self._string("")
            self._write('"')

    def _check(self, json: JsonStream) -> bool:
        if json.started:
            self._head.clear()
        if not json.failed:
            return True
        if json.started:
            return False
        self.as_text = True
        self._string("".join(self._head))
        self._head.clear()
        return True

    def _string(self, text: str) -> None:
        if not self._opened:
            self._opened = True
            self._write('"')
        if text:
            self._write(json_text.dump_string(text)[1:-1])
