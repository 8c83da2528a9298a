"""Turns the text of an answer into events, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable

from ds4.chat.events import Event, TextDelta
from ds4.chat.stops import StopFilter
from ds4.chat.tags import SPACE


class TextWriter:
    """Writes text into a list of events, and cuts it, and values that are text, at a stop string.

    Attributes:
        content: what was written, if it is kept.
        stop_string: the stop string that was found; nothing is written any more.
    """

    def __init__(self, emit: Callable[[Event], None], keep: bool, stops: StopFilter | None, forced: bool) -> None:
        """`forced`: a block of calls has to come, so white space that nothing follows is the begin of one."""
        self.content: list[str] = []
        self.stop_string: str | None = None
        self._emit, self._keep, self._stops, self._forced = emit, keep, stops, forced
        self._begun = False

    def write(self, text: str) -> None:
        """Write more text; an end that may become a stop string is held back."""
        self._show(self.cut(text))

    def write_last(self, text: str) -> None:
        """Write the end of the text, and what was held back."""
        begin = not self._begun and not text.removesuffix("<").strip(SPACE)
        if not (self._forced and begin):
            self.write(text)
        self._show(self.held())

    def cut(self, text: str) -> str:
        """What of a further text may be seen now."""
        if self.stop_string is not None:
            return ""
        if self._stops is not None:
            text, self.stop_string = self._stops.push(text)
        return text

    def held(self) -> str:
        """What was held back of a text that does not go on."""
        if self._stops is None or self.stop_string is not None:
            return ""
        text, self.stop_string = self._stops.flush()
        return text

    def _show(self, text: str) -> None:
        if text:
            self._begun = True
            self._emit(TextDelta(text))
            if self._keep:
                self.content.append(text)

    def write_held(self) -> None:
        """Write what was held back of a text that does not go on."""
        self._show(self.held())
