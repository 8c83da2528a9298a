from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.stops import StopFilter
from tests.chat.helpers import pieces_of


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    for at in range(len(text)):
        for stop in sorted(stops, key=len):
            if stop and text.startswith(stop, at):
                return text[:at], stop
    return text, None


@given(st.text("abc", max_size=30), st.lists(st.text("abc", max_size=5), max_size=8), st.data())
def test_any_split_cuts_at_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces = pieces_of(data, text)
    stop_filter = StopFilter(stops)
    out, found = "", None
    for piece in pieces:
        assert found is None
        passed, found = stop_filter.push(piece)
        out += passed
        if found:
            break
    if not found:
        passed, found = stop_filter.flush()
        out += passed
    assert (out, found) == naive(text, stops)


class CountedText(str):
    """A text that counts how often it is looked into."""

    __slots__ = ()
    looked = 0

    def __add__(self, other: str) -> CountedText:
        return CountedText(str.__add__(self, other))

    def startswith(self, *args: object) -> bool:
        CountedText.looked += 1
        return str.startswith(self, *args)  # type: ignore[arg-type]


def test_stops_that_begin_otherwise_cost_nothing() -> None:
    """They are looked for with every token."""
    stop_filter = StopFilter([*(chr(0x4E00 + i) for i in range(1000)), "END"])
    stop_filter._held = CountedText()
    assert stop_filter.push("x" * 100 + "E") == ("x" * 100, None)
    assert 0 < CountedText.looked < 3


def test_only_a_beginning_of_a_stop_is_held() -> None:
    stop_filter = StopFilter(["END", ""])
    assert stop_filter.push("text E") == ("text ", None)
    assert stop_filter.push("N") == ("", None)
    assert stop_filter.push("d") == ("ENd", None)
    assert stop_filter.push("xENDy") == ("x", "END")
