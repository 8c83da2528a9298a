import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.json_stream import JsonStream
from tests.chat.helpers import pieces_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def run(pieces: list[str]) -> tuple[str, JsonStream]:
    stream = JsonStream()
    return "".join(stream.feed(piece) for piece in pieces), stream


@given(values, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_valid_json_passes_without_its_spaces(
    value: object, indent: int | None, ascii_: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    out, stream = run(pieces_of(data, text))
    out += stream.finish()
    assert not stream.failed
    assert stream.complete
    assert json.loads(out) == json.loads(json.dumps(value))
    assert len(out) <= len(text)


@given(values, st.data())
def test_cut_json_is_completed(value: object, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    cut = text[: data.draw(st.integers(0, len(text)))]
    out, stream = run(pieces_of(data, cut))
    assert not stream.failed
    json.loads(out + stream.close())


@given(st.text(alphabet='{}[]",:\\u0dD8a 1-.etrn\n', max_size=40), st.data())
def test_a_value_that_ends_too_early_can_be_closed_behind_its_end(text: str, data: st.DataObject) -> None:
    out, stream = run(pieces_of(data, text))
    out += stream.finish()
    if not stream.complete:
        json.loads(out + stream.close())


@pytest.mark.parametrize("text", ['[{"x": 2.5', '{"days":[1, 2', '{"a": tru', "[[-", '{"a": nonsense'])
def test_a_scalar_that_ends_inside_a_list_is_not_lost(text: str) -> None:
    out, stream = run([text])
    out += stream.finish()
    assert not stream.complete
    json.loads(out + stream.close())


@given(st.text(alphabet='{}[]",:\\u0dD8a 1-.etrn\n', max_size=40), st.data())
def test_anything_gives_a_prefix_that_can_be_closed(text: str, data: st.DataObject) -> None:
    out, stream = run(pieces_of(data, text))
    whole, same = run([text])
    assert (out, stream.failed, stream.in_string) == (whole, same.failed, same.in_string)
    json.loads(out + stream.close())


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[1, 2,]", [1, 2]),
        ('{"a": True, "b": None, "c": False,}', {"a": True, "b": None, "c": False}),
        ('"a\nb\tc"', "a\nb\tc"),
        (r'"\d+\.\w \u12"', r"\d+\.\w \u12"),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\ud83d!\ude00"', "\ufffd!\ufffd"),
        (r'["\ud83d"]', ["\ufffd"]),
    ],
)
def test_slips_are_mended(text: str, meant: object) -> None:
    out, stream = run(list(text))
    assert json.loads(out + stream.finish()) == meant
    assert stream.complete
    assert not stream.failed


@pytest.mark.parametrize(
    "text", ["{'a': 1}", "[1 2]", "{1: 2}", "[1}", "]", "[foo]", "[01]", '{"a" 1}', '["a"] x', "[NaN]"]
)
def test_failures(text: str) -> None:
    _, stream = run(list(text))
    assert stream.failed


@pytest.mark.parametrize("text", ["12 apples", "truely", "1.", "--1", "9" * 5000])
def test_a_bare_scalar_is_held_until_it_is_certain(text: str) -> None:
    out, stream = run(list(text))
    out += stream.finish()
    assert out == ""
    assert stream.failed
    assert not stream.started


def test_numbers_keep_their_characters() -> None:
    out, _ = run(["[1.5", "0, 1E", "5 ]"])
    assert out == "[1.50,1E5]"


def test_quotes_are_followed_behind_a_failure() -> None:
    stream = JsonStream()
    states = []
    for char in '[x "a\\"b" c':
        stream.feed(char)
        states.append(stream.in_string)
    assert states == [False, False, False, True, True, True, True, True, False, False, False]
