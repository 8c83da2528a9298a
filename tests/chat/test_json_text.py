import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat import json_text

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_dumps_is_pythons_spaced_form(value: object) -> None:
    text = json_text.dumps(value)
    assert text == json.dumps(value, ensure_ascii=False)
    assert json_text.dumps(json_text.loads(json.dumps(value))) == text
    assert json_text.dumps(value, compact=True) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("number", ["1.50", "1e999", "-0", "1E+5", "0.1000", "9" * 6000])
def test_numbers_keep_their_characters(number: str) -> None:
    assert json_text.dumps(json_text.loads(f'{{"n": [{number}]}}')) == f'{{"n": [{number}]}}'


def test_a_number_is_no_string() -> None:
    value = json_text.arguments_object('{"a": 1, "b": "1"}')
    assert value is not None
    assert [json_text.is_string(item) for item in value.values()] == [False, True]


@pytest.mark.parametrize("text", ["", "NaN", "[Infinity]", "{'a': 1}", "1 2", "[" * 100_000, "{"])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(json_text.NotJsonError):
        json_text.loads(text)
    assert json_text.arguments_object(text) is None


def test_depth_is_bounded() -> None:
    deep = "[" * 300 + "]" * 300
    with pytest.raises(json_text.NotJsonError, match="256"):
        json_text.dumps(json_text.loads(deep))
    assert json_text.arguments_object(f'{{"a": {deep}}}') is None


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    assert json_text.dump_string("a\ud83dé") == '"a\\ud83dé"'


@pytest.mark.parametrize("value", [float("nan"), object(), {1: 2}])
def test_what_json_cannot_hold(value: object) -> None:
    with pytest.raises(json_text.NotJsonError):
        json_text.dumps(value)
