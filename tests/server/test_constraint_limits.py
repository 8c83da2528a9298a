"""Constraints at their limits: what costs too much, what has no end, what is closed, and where a text begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.chat.dsml import END_THINK_INJECTION
from ds4.server.constraints import ANY_OBJECT, AnswerRules, Constraint, SchemaError
from ds4.server.constraints.schema import Document
from tests.server.constraint_helpers import (
    TOKENS,
    block,
    constraint_of,
    follow,
    in_mask,
    schema_of,
    takes,
    takes_arguments,
    tools_of,
)
from tests.server.server_harness import WEATHER, line, scripted

FLAG: dict[str, Any] = {"enum": [1]}


# ---- never without the rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [490, 502, 600, 1000])
def test_objects_of_many_optional_properties_are_enforced(count: int) -> None:
    rules = AnswerRules(content=schema_of(**{f"p{i}": FLAG for i in range(count)}))
    assert takes(rules, f'{{"p1": 1, "p{count - 1}": 1}}')
    assert follow(constraint_of(rules), '{"p1": 2') == "refused"


def test_more_are_refused_before_anything_is_written() -> None:
    many = schema_of(**{f"p{i}": FLAG for i in range(1001)})
    with pytest.raises(SchemaError, match=r"#/properties/a has 1001 properties .* 1000"):
        constraint_of(AnswerRules(content=schema_of(a=many)))
    assert takes(AnswerRules(content={**many, "required": ["p0"]}), '{"p0": 1}')
    with pytest.raises(SchemaError, match=r"property 'o'.* 1001 properties"):
        constraint_of(AnswerRules("required", tools_of(f=schema_of(o=many)), strict=frozenset("f")))


def too_wide() -> Constraint:
    """Its object can be compiled, and costs too much as soon as it begins."""
    parts = [schema_of(**{f"{name}{i}": FLAG for i in range(900)}) for name in "ab"]
    return constraint_of(AnswerRules(content={"anyOf": parts}))


@pytest.mark.parametrize("masked", [True, False])
def test_a_token_that_was_allowed_and_cannot_be_followed_is_an_error(masked: bool) -> None:
    constraint = too_wide()
    token = TOKENS.encode('{"')[0]
    assert constraint.allows(token)
    if masked:
        assert in_mask(constraint.mask(), token)
    with pytest.raises(SchemaError, match="cannot follow its schema"):
        constraint.advance(token)
    assert not constraint.broken
    with pytest.raises(SchemaError, match="cannot follow its schema"):
        constraint.mask()
    with pytest.raises(SchemaError, match="cannot follow its schema"):
        constraint.advance(token)
    assert not constraint.broken


class Failing:
    """A matcher that rejects what it allows, whatever the reason."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def consume_tokens(self, tokens: list[int]) -> bool:
        return False

    def get_error(self) -> str:
        return "anything"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@given(text=st.sampled_from(['{"a": [1, {}]}', "{}"]), at=st.integers(0, 20), masked=st.booleans())
@settings(max_examples=20, deadline=None)
def test_wherever_the_matcher_fails_the_answer_ends(text: str, at: int, masked: bool) -> None:
    constraint = constraint_of(AnswerRules(content=ANY_OBJECT))
    tokens = TOKENS.encode(text)
    at %= len(tokens)
    for token in tokens[:at]:
        constraint.mask()
        assert constraint.advance(token)
    if masked:
        constraint.mask()
    constraint._matcher = Failing(constraint._matcher)  # type: ignore[assignment]
    with pytest.raises(SchemaError):
        constraint.advance(tokens[at])
    assert not constraint.broken


def test_such_an_answer_is_a_400() -> None:
    parts = [schema_of(**{f"{name}{i}": FLAG for i in range(900)}) for name in "ab"]
    schema = {"name": "x", "schema": {"anyOf": parts}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "thinking": False,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    with scripted(line('{"', "a1", obey=True)) as server:
        answer = server.post(body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "cannot follow its schema" in error["message"]
        assert error["param"] is None
        assert server.worker.metrics.stats()["requests"]["failed"] == 1
        assert '"error"' in server.post({**body, "stream": True}).text


# ---- objects are closed ---------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcd")
SCHEMAS = st.recursive(
    st.just({"type": "integer"}),
    lambda inner: st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            **({} if required is None else {"required": [name for name in required if name in properties]}),
        },
        st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        st.none() | st.lists(NAMES, unique=True),
    ),
    max_leaves=5,
)


def value_of(schema: Any) -> Any:
    """A value of such a schema, with all of its properties."""
    if schema["type"] == "integer":
        return 7
    return {name: value_of(part) for name, part in schema["properties"].items()}


def with_more(value: Any) -> list[Any]:
    """The value with one undeclared property, at each of its objects."""
    if not isinstance(value, dict):
        return []
    inner = [{**value, name: other} for name, part in value.items() for other in with_more(part)]
    return [{**value, "more": 1}, *inner]


@given(schema=SCHEMAS)
@settings(max_examples=60, deadline=None)
def test_objects_that_list_properties_have_no_others(schema: Any) -> None:
    value = value_of(schema)
    rules = AnswerRules(content=schema)
    assert takes(rules, json.dumps(value))
    for more in with_more(value):
        assert not takes(rules, json.dumps(more))
    outer = schema_of(o=schema)
    assert takes_arguments(outer, {"o": value})
    for more in with_more(value):
        assert not takes_arguments(outer, {"o": more})


# ---- where a text begins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [" ", "\n", "\n\n", "\t"])
@pytest.mark.parametrize("tools", [False, True])
def test_no_white_space_stands_before_a_text(space: str, tools: bool) -> None:
    rules = AnswerRules("allowed", tools_of(f=schema_of()), content=ANY_OBJECT) if tools else None
    rules = rules or AnswerRules(content=ANY_OBJECT)
    for thinking, before in ((False, ""), (True, "hm</think>")):
        assert takes(rules, before + "{}", thinking=thinking)
        assert not takes(rules, before + space + "{}", thinking=thinking)


def test_behind_reasoning_that_the_server_closed_both_may_follow() -> None:
    rules = AnswerRules("allowed", tools_of(f=schema_of()), content=ANY_OBJECT)
    for rest in ("{}", str(block(("f", {}))).removeprefix("\n\n")):
        constraint = constraint_of(rules, thinking=True)
        assert constraint.injected(TOKENS.encode_chat(END_THINK_INJECTION))
        assert follow(constraint, rest) == "complete"
    constraint = constraint_of(rules)
    assert not in_mask(constraint.mask(), TOKENS.end_think)
    assert not constraint.allows(TOKENS.end_think)


@pytest.mark.parametrize("pieces", [["\n\n"], ["\n", "\n"], ["\n\n", "<"], ["\n\n", "<", "｜DSML｜"]])
@pytest.mark.parametrize("stream", [False, True])
def test_the_begin_of_a_forced_call_is_no_content(pieces: list[str], stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "thinking": False,
        "max_tokens": len(pieces),
        "stream": stream,
    }
    with scripted(line(*pieces, "tool_calls")) as server:
        text = server.post(body).text
    assert '"length"' in text
    assert "\\n" not in text
    assert "<" not in text


# ---- what has no end, and what cannot be written --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"$ref": "#"}, "#"),
        (schema_of(("a",), a={"$ref": "#"}), "#/properties/a"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}}, "#/$defs/x/allOf/0"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#/items"),
        (schema_of(a={"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]}), "#/properties/a/anyOf/"),
    ],
)
def test_values_without_an_end_are_refused_by_their_place(schema: Any, where: str) -> None:
    with pytest.raises(SchemaError, match=f"schema of the answer.*{where.replace('$', '[$]')}.*circle"):
        constraint_of(AnswerRules(content=schema))


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(("v",), v={"type": "integer"}, next={"$ref": "#"}),
        schema_of(("next",), next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}},
        {"$ref": "#/nowhere"},
    ],
)
def test_circles_with_an_end_are_fine(schema: Any) -> None:
    Document(schema).check_ends()


def test_an_endless_schema_is_a_400_before_the_first_byte() -> None:
    schema = {"name": "x", "schema": {"$ref": "#"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    with scripted(line("</think>", "{}")) as server:
        answer = server.post(body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
        assert "circle" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": ["a", "\ud800"]}, "#/enum/1 has half of a surrogate pair"),
        (schema_of(**{"a\udc00": FLAG}), "#/properties has half of a surrogate pair"),
        (schema_of(a={"const": {"k": ["\udfff"]}}), "#/properties/a/const/k/0 has half"),
        (schema_of(a={"type": "array", "items": {"not": {}}}), "'not' at #/properties/a/items is not"),
        ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"uniqueItems": True}}}, "'uniqueItems' at #/[$]defs/x~1y is not"),
        ({**schema_of(a=FLAG), "minProperties": 2}, "minProperties and maxProperties are not supported where"),
    ],
)
def test_errors_say_what_and_where(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        constraint_of(AnswerRules(content=schema))
