"""A prompt's text that knows which parts of it a client wrote, and where a later prompt may leave it."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import Any, SupportsIndex

Span = tuple[int, int]

_SURROGATE = re.compile("[\ud800-\udfff]")


class Rendered(str):
    """Prompt text. Everything outside `client_spans` is control text, in which special tokens are recognised.

    Attributes:
        client_spans: ranges (start, end) of characters that hold text supplied by a client, or what the model wrote
            in values of its calls: sorted, not empty, not touching each other.
        boundaries: character offsets at which state is worth keeping, in ascending order: behind the system region
            (always the first), before each later user turn, and, if the prompt ends in an open turn, right before
            its think marker (the last). The next request often equals this one up to one of them.

    Adding and slicing keep both; a plain str that is added counts as control text.
    """

    client_spans: tuple[Span, ...]
    boundaries: tuple[int, ...]

    def __new__(cls, text: str, client_spans: tuple[Span, ...] = (), boundaries: tuple[int, ...] = ()) -> Rendered:
        self = super().__new__(cls, text)
        self.client_spans = client_spans
        self.boundaries = boundaries
        return self

    def __getnewargs__(self) -> Any:
        return str(self), self.client_spans, self.boundaries

    def __str__(self) -> str:
        # A str without the attributes: what the caller does with it is plain text again.
        return super().__str__()

    def __add__(self, other: str) -> Rendered:
        if not isinstance(other, str):
            return NotImplemented
        shift = len(self)
        spans = other.client_spans if isinstance(other, Rendered) else ()
        marks = other.boundaries if isinstance(other, Rendered) else ()
        return Rendered(
            str.__add__(self, other),
            merge_spans([*self.client_spans, *((a + shift, b + shift) for a, b in spans)]),
            _ascending([*self.boundaries, *(m + shift for m in marks)]),
        )

    def __radd__(self, other: str) -> Rendered:
        return Rendered(other) + self

    def __getitem__(self, key: SupportsIndex | slice) -> Rendered:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
        else:
            start, step = range(len(self))[key], 1
            stop = start + 1
        if step != 1:
            raise ValueError("a prompt can only be sliced with step 1")
        stop = max(start, stop)
        # Spans that end behind the start and begin before the end.
        first = bisect_right(self.client_spans, start, key=lambda span: span[1])
        last = bisect_left(self.client_spans, stop, key=lambda span: span[0]) if stop > start else first
        spans = [(max(a, start) - start, min(b, stop) - start) for a, b in self.client_spans[first:last]]
        low, high = bisect_left(self.boundaries, start), bisect_right(self.boundaries, stop)
        return Rendered(text, tuple(spans), tuple(m - start for m in self.boundaries[low:high]))


def merge_spans(spans: list[Span]) -> tuple[Span, ...]:
    """Return sorted spans with empty ones dropped and touching ones joined."""
    merged: list[Span] = []
    for start, end in spans:
        if start == end:
            continue
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, end))
    return tuple(merged)


def _ascending(marks: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(marks))


class Writer:
    """Collects the pieces of a prompt."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._spans: list[Span] = []
        self._marks: list[int] = []
        self.length = 0

    def control(self, text: str) -> None:
        """Add text of the format itself."""
        self._pieces.append(text)
        self.length += len(text)

    def client(self, text: str) -> None:
        """Add text that came from a client."""
        self._spans.append((self.length, self.length + len(text)))
        self.control(text)

    def mark(self) -> None:
        """Note a boundary here."""
        self._marks.append(self.length)

    def finish(self) -> Rendered:
        """Return what was written. Halves of surrogate pairs become U+FFFD: the text must be valid UTF-8."""
        text = _SURROGATE.sub("\ufffd", "".join(self._pieces))
        return Rendered(text, merge_spans(self._spans), _ascending(self._marks))
