import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat import Rendered
from ds4.chat.rendered import Writer


def owners(text: Rendered) -> list[bool]:
    """For every character, whether a client wrote it."""
    marks = [False] * len(text)
    for start, end in text.client_spans:
        for i in range(start, end):
            marks[i] = True
    return marks


pieces = st.lists(st.tuples(st.sampled_from(["client", "control", "mark"]), st.text(max_size=5)), max_size=8)


def write(items: list[tuple[str, str]]) -> Rendered:
    writer = Writer()
    for kind, text in items:
        if kind == "mark":
            writer.mark()
        else:
            getattr(writer, kind)(text)
    return writer.finish()


@given(pieces, pieces, st.data())
def test_adding_and_slicing_keep_spans_and_boundaries(
    a: list[tuple[str, str]], b: list[tuple[str, str]], data: st.DataObject
) -> None:
    left, right = write(a), write(b)
    both = left + right
    assert str(both) == str(left) + str(right)
    assert owners(both) == owners(left) + owners(right)
    assert set(both.boundaries) == {*left.boundaries, *(len(left) + m for m in right.boundaries)}
    start, stop = (data.draw(st.none() | st.integers(-12, 12)) for _ in range(2))
    part = both[start:stop]
    assert str(part) == str(both)[start:stop]
    assert owners(part) == owners(both)[start:stop]
    for text in (left, right, both, part):
        assert list(text.client_spans) == sorted(set(text.client_spans))
        assert all(x < y for x, y in text.client_spans)
        assert all(x[1] < y[0] for x, y in zip(text.client_spans, text.client_spans[1:], strict=False))
        assert list(text.boundaries) == sorted(set(text.boundaries))
    low, high, _ = slice(start, stop).indices(len(both))
    assert part.boundaries == tuple(m - low for m in both.boundaries if low <= m <= max(low, high))


def test_plain_text_is_control() -> None:
    text = "<" + Rendered("ab", ((0, 1),), (1,)) + ">"
    assert isinstance(text, Rendered)
    assert (str(text), text.client_spans, text.boundaries) == ("<ab>", ((1, 2),), (2,))
    assert text[1].client_spans == ((0, 1),)
    assert text[-1].client_spans == ()
    with pytest.raises(IndexError):
        text[4]
    with pytest.raises(ValueError, match="step 1"):
        text[::2]


def test_copies_keep_everything() -> None:
    text = Rendered("abc", ((0, 1),), (2,))
    for twin in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert twin == "abc"
        assert (twin.client_spans, twin.boundaries) == (((0, 1),), (2,))
    assert type(str(text)) is str


def test_half_surrogates_become_replacement_characters() -> None:
    text = write([("client", "a\ud800b"), ("control", "c")])
    assert text == "a\ufffdbc"
    assert text.client_spans == ((0, 3),)
    text.encode()
