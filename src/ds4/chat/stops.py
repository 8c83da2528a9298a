"""Stop strings: cuts a growing text at the first of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of the stop strings occurs; holds back an end that may become one.

    The match that begins first wins; of matches that begin at the same place the shortest, as it is complete first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len))
        self._longest = len(self._stops[-1]) if self._stops else 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may go on, and the stop string if one was found (what follows it is dropped)."""
        if not self._stops:
            return text, None
        text, self._held = self._held + text, ""
        end = self._held_from(text)
        at, stop = self._first(text)
        if stop is not None and at <= end:
            return text[:at], stop
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> tuple[str, str | None]:
        """Return what was held back, as nothing follows any more, and the stop string if there is one in it."""
        text, self._held = self._held, ""
        at, stop = self._first(text)
        return text[:at], stop

    def _first(self, text: str) -> tuple[int, str | None]:
        first: tuple[int, str | None] = len(text), None
        for stop in self._stops:
            at = text.find(stop, 0, first[0] + len(stop) - 1)
            if at >= 0:
                first = at, stop
        return first

    def _held_from(self, text: str) -> int:
        """Return where the earliest proper prefix of a stop string begins that reaches the end of the text."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = len(text) - at
            if any(len(stop) > tail and text.startswith(stop[:tail], at) for stop in self._stops):
                return at
        return len(text)
