"""Stop strings: cuts a growing text at the first of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of the stop strings occurs; holds back an end that may become one.

    The match that begins first wins; of matches that begin at the same place the shortest, as it is complete first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._by_first: dict[str, list[str]] = {}
        for stop in sorted({stop for stop in stops if stop}, key=len):
            self._by_first.setdefault(stop[0], []).append(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may go on, and the stop string if one was found (what follows it is dropped)."""
        text, self._held = self._held + text, ""
        end, stop = self._look(text, more=True)
        if stop is None:
            self._held = text[end:]
        return text[:end], stop

    def flush(self) -> tuple[str, str | None]:
        """Return what was held back, as nothing follows any more, and the stop string if there is one in it."""
        text, self._held = self._held, ""
        end, stop = self._look(text, more=False)
        return text[:end], stop

    def _look(self, text: str, more: bool) -> tuple[int, str | None]:
        """Where the first stop string begins, and which it is; or where the text may become one, if there is more."""
        for at, first in enumerate(text):
            # The shorter ones come first.
            for stop in self._by_first.get(first, ()):
                if text.startswith(stop, at):
                    return at, stop
                if more and len(stop) > len(text) - at and stop.startswith(text[at:]):
                    return at, None
        return len(text), None
