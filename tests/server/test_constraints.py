"""Constrained answers: what every grammar takes and refuses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.chat.dsml import END_THINK_INJECTION, parse
from ds4.chat.tools import tool_schemas
from ds4.errors import RequestError
from ds4.server.constraints import ANY_OBJECT, AnswerRules, SchemaError, strict_names
from tests.server.constraint_helpers import (
    MARK,
    PARAMETER_END,
    TOKENS,
    begin,
    block,
    constraint_of,
    follow,
    grammars,
    in_mask,
    plain,
    schema_of,
    takes,
    takes_arguments,
    tools_of,
)

TOOLS = tools_of(
    get_weather=schema_of(("city",), city={"type": "string"}, days={"type": "integer"}),
    ping=schema_of(),
    **{"größe.b": schema_of(n={"type": "number"})},
)
REQUIRED = AnswerRules("required", TOOLS)


# ---- calls that have to come ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (block(("ping", {})), True),
        (f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="ping">\n</{MARK}invoke>\n</{MARK}tool_calls>', True),
        (block(("get_weather", {"city": "Rome", "days": 2})), True),
        (block(("größe.b", {"any": "x\n</b>", "n": [1, {"a": None}], "unknown name": True})), True),
        (block(("get_weather", {"city": "Rome"}), ("ping", {}), ("get_weather", {})), True),
        (block(("pong", {})), False),
        ("I will not.", False),
        ("Well: " + block(("ping", {})), False),
        ("\n" + block(("ping", {})), False),
        (f"\n\n<{MARK}tool_calls>\n</{MARK}tool_calls>", False),
        (plain(str(block(("ping", {})))), False),
        (block(("ping", {})) + "\nThere.", False),
        (f'\n\n<{MARK}invoke name="ping">\n</{MARK}invoke>', False),
    ],
)
def test_a_required_call(text: str, taken: bool) -> None:
    assert takes(REQUIRED, text) == taken


def test_a_named_tool() -> None:
    rules = AnswerRules("required", TOOLS, names=frozenset({"ping"}))
    assert takes(rules, block(("ping", {}), ("ping", {})))
    assert not takes(rules, block(("get_weather", {"city": "Rome"})))


def test_one_call_at_most() -> None:
    rules = AnswerRules("required", TOOLS, several=False)
    assert takes(rules, block(("ping", {})))
    assert not takes(rules, block(("ping", {}), ("ping", {})))


def test_the_end_may_not_come_before_the_block_is_over() -> None:
    constraint = constraint_of(REQUIRED)
    for token in TOKENS.encode_chat(block(("get_weather", {"city": "Rome"}))):
        assert not in_mask(constraint.mask(), TOKENS.eos)
        assert not constraint.done
        constraint.advance(token)
    mask = constraint.mask()
    assert mask is not None
    assert [token for token in range(TOKENS.vocab_size) if in_mask(mask, token)] == [TOKENS.eos]
    assert constraint.done
    assert constraint.advance(TOKENS.eos)


# ---- reasoning ------------------------------------------------------------------------------------------------------


def test_reasoning_is_free_but_has_to_be_followed() -> None:
    thoughts = f'A <tool_calls> b {{}} <{MARK}tool_calls>\n<{MARK}invoke name="none">'
    assert takes(REQUIRED, thoughts + "</think>" + block(("ping", {})), thinking=True)
    assert not takes(REQUIRED, thoughts + "</think>No.", thinking=True)
    constraint = constraint_of(REQUIRED, thinking=True)
    assert follow(constraint, thoughts) == "open"
    assert not in_mask(constraint.mask(), TOKENS.eos)
    assert in_mask(constraint.mask(), TOKENS.end_think)


def test_reasoning_costs_no_mask_where_nothing_must_follow() -> None:
    constraint = constraint_of(AnswerRules("allowed", TOOLS, strict=frozenset({"ping"})), thinking=True)
    for token in TOKENS.encode_chat("What? Nothing</think>I see."):
        assert constraint.mask() is None
        assert constraint.advance(token)
    assert constraint.mask() is None


def test_the_server_may_close_the_reasoning() -> None:
    for rules in (REQUIRED, AnswerRules("allowed", TOOLS, strict=frozenset({"ping"}))):
        constraint = constraint_of(rules, thinking=True)
        assert follow(constraint, f"Now <{MARK}tool_calls>") != "refused"
        assert constraint.injected(TOKENS.encode_chat(END_THINK_INJECTION))
        rest = str(block(("ping", {}))).removeprefix("\n\n" if rules is REQUIRED else "")
        assert follow(constraint, rest) == "complete"
        assert constraint.done


def test_no_bare_call_behind_reasoning_that_the_server_closed() -> None:
    """There, calls without a block are read as well."""
    rules = AnswerRules("allowed", TOOLS, strict=frozenset({"ping"}))
    text = '<invoke name="ping">\n'
    assert follow(constraint_of(rules, thinking=True), "</think>\n\n" + text) == "complete"
    constraint = constraint_of(rules, thinking=True)
    assert constraint.injected(TOKENS.encode_chat(END_THINK_INJECTION))
    assert follow(constraint, text) == "refused"


# ---- arguments by their schema --------------------------------------------------------------------------------------

CHOICE = {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "array", "items": {"type": "integer"}}]}
TREE = {
    "$defs": {"node": schema_of(("v",), v={"type": "integer"}, next={"$ref": "#/$defs/node"})},
    **schema_of(root={"$ref": "#/$defs/node"}, word={"$ref": "#/properties/kind"}, kind={"enum": ["a", "b"]}),
}
ARGUMENTS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        schema_of(("a",), a={"type": "string"}, b={"type": "integer"}, c={"type": "boolean"}),
        [{"a": "x"}, {"c": True, "a": " \n</b> &lt;", "b": -1}, {"b": 0, "c": False, "a": ""}],
        [{}, {"b": 1}, {"a": 1}, {"a": "x", "d": 1}, {"a": "x", "b": "1"}, {"a": "x", "b": 1.5}, {"a": None}],
    ),
    (schema_of(), [{}], [{"a": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
    ({**schema_of(a={"type": "null"}), "additionalProperties": True}, [{"b": "t", "a": None, "c": [1]}], [{"a": "t"}]),
    (schema_of(a={"enum": ["red", "red</", 1, None, "ü\n"]}), [{"a": v} for v in ("red", "red</", 1, None, "ü\n")],
     [{"a": "re"}, {"a": "redd"}, {"a": 2}, {"a": "1"}]),
    (schema_of(a={"const": "x"}, b={"const": {"k": [1, 2]}}), [{"a": "x", "b": {"k": [1, 2]}}], [{"a": "y"}, {"b": 1}]),
    (schema_of(a={"type": "string", "minLength": 2, "maxLength": 3}), [{"a": "äö"}, {"a": "a<b"}],
     [{"a": "x"}, {"a": "abcd"}]),
    (schema_of(a={"type": "string", "pattern": "^a/|b$"}), [{"a": "a/x"}, {"a": "xb"}], [{"a": "xa/"}, {"a": "bx"}]),
    (schema_of(a={"type": "string", "pattern": "[0-9]{2}[|)]\\$"}), [{"a": "x12|$y"}], [{"a": "12$"}, {"a": "1|$"}]),
    (schema_of(a={"type": "string", "pattern": "^\\w+$", "maxLength": 4}), [{"a": "ab_1"}],
     [{"a": "ab_1c"}, {"a": "é"}]),
    (schema_of(a={"type": ["string", "null"]}), [{"a": "x"}, {"a": None}], [{"a": 1}]),
    (schema_of(a=CHOICE), [{"a": "abc"}, {"a": [1, 2]}, {"a": []}], [{"a": "A"}, {"a": ["x"]}, {"a": 1}]),
    (schema_of(a={"oneOf": [{"const": "x"}, {"const": "y"}, {"type": "null"}]}), [{"a": "y"}, {"a": None}],
     [{"a": "z"}]),
    (schema_of(a={"anyOf": [False, {"type": "integer"}]}), [{"a": 3}], [{"a": "x"}]),
    (schema_of(a={}), [{"a": "x"}, {"a": {"b": [1.5, None]}}, {"a": True}], []),
    (schema_of(a={"items": {"type": "integer"}}), [{"a": [1]}], [{"a": ["x"]}, {"a": 1}]),
    (schema_of(a={"maxLength": 2}), [{"a": "x"}], [{"a": "xyz"}, {"a": 1}]),
    (schema_of(a=schema_of(("b",), b={"type": "string"})), [{"a": {"b": "x"}}], [{"a": {"b": "x", "c": 1}}, {"a": {}}]),
    (TREE, [{"root": {"v": 1, "next": {"v": 2}}, "word": "b"}], [{"root": {"v": 1, "next": {}}}, {"word": "c"}]),
    ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": schema_of(("p",), p={"type": "string"})}},
     [{"p": "x"}], [{}, {"q": 1}]),
    (schema_of(a={"allOf": [{"type": "string"}, {"maxLength": 2}]}), [{"a": "xy"}], [{"a": "xyz"}]),
    (schema_of(a={"allOf": [schema_of(b={"type": "integer"}), schema_of(("c",), c={"type": "string"})]}),
     [{"a": {"b": 1, "c": "x"}}, {"a": {"c": "x"}}], [{"a": {"b": 1}}, {"a": {"b": "x", "c": "x"}}, {"a": "x"}]),
    ({**schema_of(a={"anyOf": [{"allOf": [{"$ref": "#/$defs/x"}, schema_of(c={"type": "null"})]}, {"type": "null"}]}),
      "$defs": {"x": schema_of(("b",), b={"type": "integer"})}},
     [{"a": {"b": 1, "c": None}}, {"a": {"b": 1}}, {"a": None}], [{"a": {"c": None}}, {"a": {"b": None}}, {"a": "x"}]),
    (schema_of(a={"allOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 2}]}),
     [{"a": 1}, {"a": 2}], [{"a": 0}, {"a": 3}, {"a": "1"}]),
    (schema_of(a={"allOf": [{"type": ["integer", "null"]}, {"type": "integer"}]}), [{"a": 5}], [{"a": None}]),
    (schema_of(a={"type": "string", "format": "date"}, b={"type": "string", "format": "made-up"}),
     [{"a": "2024-12-31", "b": "?"}], [{"a": "2024-13-01"}, {"a": "2023-02-30"}]),
    (schema_of(**{f"p{i}": {"type": "integer"} for i in range(70)}), [{"p0": 1, "p69": 2}, {"p5": 1}],
     [{"p5": 1, "p4": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), ARGUMENTS)
def test_strict_arguments(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for arguments in good:
        assert takes_arguments(schema, arguments), arguments
    for arguments in bad:
        assert not takes_arguments(schema, arguments), arguments


def test_very_long_strings_are_not_counted() -> None:
    schema = schema_of(a={"type": "string", "maxLength": 6000}, b={"type": "string", "maxLength": 5000})
    assert takes_arguments(schema, {"a": "x " * 3500, "b": "x " * 2500})
    assert not takes_arguments(schema, {"b": "x " * 2501})


def test_each_parameter_at_most_once() -> None:
    twice = str(block(("ping", {"n": 1, "m": 2}))).replace('"m"', '"n"')
    rules = AnswerRules("required", tools_of(ping=schema_of(n={"type": "integer"})), strict=frozenset({"ping"}))
    assert not takes(rules, twice)


def test_white_space_in_json_has_bounds() -> None:
    schema = schema_of(a={"type": "array", "items": {"type": "integer"}})
    tools = AnswerRules("required", tools_of(f=schema), strict=frozenset("f"))
    text = str(block(("f", {"a": [1, 2]})))
    for spaces, taken in ((",", True), (", ", True), (",\n    ", True), (",  ", False), (",\n\n", False)):
        assert takes(tools, text.replace("[1, 2]", f"[1{spaces}2]")) == taken


def test_only_strict_tools_are_strict() -> None:
    tools = tools_of(free=schema_of(n={"type": "integer"}), bound=schema_of(n={"type": "integer"}))
    rules = AnswerRules("required", tools, strict=frozenset({"bound"}))
    assert takes(rules, block(("free", {"n": "many", "m": 1}), ("bound", {"n": 3})))
    assert not takes(rules, block(("bound", {"n": "many"})))


def test_tools_say_themselves_that_they_are_strict() -> None:
    function = {"name": "a", "parameters": schema_of()}
    listed = [
        {"type": "function", "function": {**function, "strict": True}},
        {**function, "name": "b", "strict": False},
    ]
    inner = [{"type": "function", **function, "name": name, "strict": name == "d"} for name in "de"]
    space = {"type": "namespace", "name": "n_", "tools": inner}
    listed += [{"name": "c", "input_schema": schema_of(), "strict": True}, {"type": "web_search"}, space]
    tools = tool_schemas(listed)
    assert strict_names(tools) == {"a", "c", "n_d"}
    assert strict_names(tools, all_of_them=True) == {"a", "b", "c", "web_search", "n_d", "n_e"}
    rules = AnswerRules("required", tools, strict=strict_names(tools, all_of_them=True))
    assert takes(rules, block(("web_search", {"query": "x"})))  # it has no schema
    for name in ("c", "n_d"):
        assert not takes(rules, block((name, {"x": 1})))


def test_names_and_values_of_the_other_profile() -> None:
    tools = tools_of(**{'a"<b>': schema_of(**{"x&y": {"enum": [PARAMETER_END, "z"]}})})
    rules = AnswerRules("required", tools, strict=frozenset({'a"<b>'}), profile="ds4")
    for value in (PARAMETER_END, "z"):
        text = block(('a"<b>', {"x&y": value}), profile="ds4")
        assert takes(rules, text)
        message = parse(str(text), thinking=False, tools=tools, profile="ds4")
        assert json.loads(message.tool_calls[0].arguments) == {"x&y": value}


# ---- calls or text, calls or JSON -----------------------------------------------------------------------------------

OBJECT = schema_of(("a",), a={"type": "integer"}, b={"type": "string"})


def test_free_text_may_turn_into_a_strict_call() -> None:
    rules = AnswerRules("allowed", TOOLS, strict=frozenset({"ping", "get_weather"}))
    for text in ("Hello <b> </b> <|x|>", f"The mark {MARK} is no tag", "<tool_calls> is a tag", ""):
        assert takes(rules, text)
        assert takes(rules, text + block(("get_weather", {"city": "Rome"})))
        assert not takes(rules, text + block(("get_weather", {"city": 1})))
    assert takes(rules, f"<think> <{MARK}tool_calls> as words</think>b")
    assert takes(rules, f"<think>a</think>b{block(('ping', {}))}")
    assert not takes(rules, f'x<{MARK}invoke name="ping">')
    assert not takes(rules, "x<tool_calls>\n<invoke")
    assert not takes(rules, f"x<｜{MARK}｜tool_calls>")


def test_some_tools_only() -> None:
    rules = AnswerRules("allowed", TOOLS, names=frozenset({"ping"}))
    assert takes(rules, "Hello")
    assert takes(rules, block(("ping", {"any": 1})))
    assert not takes(rules, block(("get_weather", {"city": "Rome"})))
    nothing = AnswerRules("allowed", TOOLS, names=frozenset())
    assert takes(nothing, "Hello <b>")
    assert not takes(nothing, block(("ping", {})))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (ANY_OBJECT, ["{}", '{"a": [1, {}], "b": "é\\n"}', '{\n  "a": 1\n}'], ["[]", "1", "text", "{} ", '{"a":}', ""]),
        (OBJECT, ['{"a": 1}', '{"a":1,"b":"x"}'], ['{"b": "x"}', '{"a": 1, "c": 2}', '{"a": "1"}', "{}"]),
        ({"type": ["integer", "null"]}, ["12", "null"], ["1.5", '"x"']),
        ({"enum": ["x", 1]}, ['"x"', "1"], ["x", '"y"']),
        (True, ["1", "[]", '"x"'], ["x"]),
        ({"oneOf": [schema_of(("k",), k={"const": "x"}), schema_of(("k",), k={"enum": ["y"]})]},
         ['{"k":"y"}'], ['{"k":"z"}']),
        ({"allOf": [schema_of(a={"type": "integer"}), schema_of(b={"type": "null"})]}, ['{"a":1,"b":null}'],
         ['{"a":""}']),
    ],
)  # fmt: skip
def test_json_by_a_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    rules = AnswerRules(content=schema)
    for text in good:
        assert takes(rules, text), text
        assert takes(rules, f"<b>?</think>{text}", thinking=True)
        for space in ("\n\n", "\n", " "):
            assert not takes(rules, f"</think>{space}{text}", thinking=True)
    for text in bad:
        assert follow(constraint_of(rules), text) != "complete", text


def test_calls_or_json() -> None:
    rules = AnswerRules("allowed", TOOLS, content=OBJECT, strict=frozenset({"ping"}))
    assert takes(rules, '{"a": 1}')
    assert takes(rules, block(("ping", {}), ("get_weather", {"x": 1})))
    assert not takes(rules, block(("ping", {"x": 1})))
    assert not takes(rules, "Hello")
    assert takes(AnswerRules("required", TOOLS, content=OBJECT), block(("ping", {})))
    assert not takes(AnswerRules("required", TOOLS, content=OBJECT), '{"a": 1}')


def test_nothing_to_constrain() -> None:
    for rules in (AnswerRules(), AnswerRules("allowed", TOOLS), AnswerRules("none", TOOLS, strict=frozenset({"ping"}))):
        assert begin(rules, thinking=True) is None


# ---- special tokens that are spelled out ----------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 7), tuple(range(40))])
def test_ordinary_tokens_do_not_spell_tags(cuts: tuple[int, ...]) -> None:
    """However the text is cut, the token that would complete it is refused, and any other is not."""
    strict = AnswerRules(
        "required", tools_of(f=schema_of(s={"type": "string"}, j={"type": "array"})), strict=frozenset("f")
    )
    string, array = (str(block(("f", {key: value}))) for key, value in (("s", "@"), ("j", ["@"])))
    either = AnswerRules("allowed", TOOLS, content=ANY_OBJECT)
    for rules, before, word, thinking in (
        (strict, string.split("@")[0], PARAMETER_END, False),
        (strict, array.split("@")[0], PARAMETER_END, False),
        (REQUIRED, "", "</think>", True),
        (either, '{"a": "', "<tool_calls> <", False),
        (AnswerRules("allowed", TOOLS, strict=frozenset({"ping"})), "", "tool_calls>\n \n<", False),
    ):
        ends = [0, *(cut for cut in cuts if cut < len(word)), len(word)]
        pieces = [word[a:b] for a, b in itertools.pairwise(ends)]
        tokens = [token for piece in pieces for token in TOKENS.encode(piece)]
        for last, allowed in ((TOKENS.encode("x")[0], True), (tokens[-1], False)):
            constraint = constraint_of(rules, thinking)
            assert follow(constraint, before) != "refused"
            for token in tokens[:-1]:
                assert in_mask(constraint.mask(), token)
                assert constraint.advance(token)
            assert in_mask(constraint.mask(), last) == constraint.allows(last) == allowed
            assert constraint.advance(last) == allowed
            assert constraint.broken != allowed
        assert constraint.mask() is None


def test_answers_that_follow_the_same_rules_go_their_own_ways() -> None:
    made = grammars().submit(AnswerRules("required", TOOLS, several=False))
    assert made is not None
    first, second = (made.result().begin(thinking=False) for _ in range(2))
    for constraint in (first, second):
        assert follow(constraint, '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="') == "open"
    rest = str(block(("ping", {}))).split('name="')[1]
    assert follow(first, rest) == "complete"
    assert first.done
    assert not second.done
    assert follow(second, str(block(("get_weather", {"city": "Rome"}))).split('name="', 1)[1]) == "complete"


def test_a_second_attempt_begins_at_the_start() -> None:
    made = grammars().submit(REQUIRED)
    assert made is not None
    first = made.result().begin(thinking=True)
    assert follow(first, f"a</think>{block(('ping', {}))}") == "complete"
    assert not first.advance(TOKENS.encode("x")[0])
    for thinking, before in ((True, "b</think>"), (False, "")):
        again = made.result().begin(thinking)
        assert follow(again, before + block(("get_weather", {}))) == "complete"


def test_the_caller_may_forbid_more() -> None:
    constraint = constraint_of(AnswerRules("allowed", TOOLS, strict=frozenset({"ping"})))
    assert constraint.mask() is None
    mask = constraint.mask({TOKENS.dsml, 300})
    assert [token for token in range(TOKENS.vocab_size) if not in_mask(mask, token)] == [300, TOKENS.dsml]
    constraint = constraint_of(AnswerRules(content=ANY_OBJECT))
    (brace,) = TOKENS.encode("{")
    assert in_mask(constraint.mask(), brace)
    assert not in_mask(constraint.mask({brace}), brace)
    everything = range(TOKENS.vocab_size)
    with pytest.raises(RequestError, match="nothing is allowed"):
        constraint.mask(everything)


# ---- schemas that cannot be enforced --------------------------------------------------------------------------------


def bomb(key: str) -> dict[str, Any]:
    """Each definition holds the next one twice."""
    levels = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(14)}
    return {
        "type": "object",
        "$defs": {**levels, "d14": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    }


def nested(levels: int) -> dict[str, Any]:
    return schema_of(a=nested(levels - 1)) if levels else {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (schema_of(a={"not": {"type": "string"}}), ["'f'", "'a'", "not"]),
        (schema_of(a={"type": "array", "uniqueItems": True}), ["'f'", "'a'", "uniqueItems"]),
        (schema_of(b={"type": "string"}, a={"type": "array", "contains": {}}), ["'f'", "'a'", "contains"]),
        (schema_of(a={"type": "string", "pattern": "(?=x)y"}), ["'f'", "'a'", "look"]),
        (schema_of(a={"type": "string", "pattern": "("}), ["'f'", "'a'"]),
        (schema_of(a={"type": "string", "pattern": "x(^y)"}), ["'a'", "anchor"]),
        (schema_of(a={"type": "string", "minLength": 3, "maxLength": 2}), ["'a'", "maxLength"]),
        (schema_of(a={"type": "text"}), ["'a'", "'text'"]),
        (schema_of(a={"type": "integer", "minimum": 2, "maximum": 1}), ["'f'", "'a'"]),
        (schema_of(a={"$ref": "#/nowhere"}), ["'a'", "'#/nowhere'"]),
        (schema_of(a={"$ref": "https://example.com/x.json"}), ["'a'", "example.com"]),
        (schema_of(a={"$ref": "#/properties/a"}), ["'a'", "circle"]),
        (schema_of(("a",), a=False), ["'a'", "no value"]),
        (schema_of(("b",), a={}), ["'b'", "no value"]),
        (schema_of(a={"oneOf": [{"type": "string"}, {"maxLength": 3}]}), ["'a'", "oneOf"]),
        (schema_of(a={"enum": [{"x": f"y{PARAMETER_END}"}]}), ["'a'", "ends a parameter"]),
        (schema_of(**{'a" b="c': {}}), ["'f'", "name"]),
        (schema_of(**{"n" * 2000: {}}), ["'f'", "name"]),
        ({"type": "array"}, ["'f'", "object"]),
        ({**schema_of(), "minProperties": 1}, ["'f'", "minProperties"]),
        ({"anyOf": [schema_of(), schema_of()]}, ["'f'", "anyOf"]),
        (schema_of(a={"enum": [f"v{i}" * 5 for i in range(60_000)]}), ["'f'"]),
        (schema_of(a={"type": "integer", "minimum": 10**400}), ["'f'"]),
        (nested(70), ["nested deeper"]),
        (schema_of(a={"enum": [json.loads("[" * 100 + "]" * 100)]}), ["properties.a", "nested deeper"]),
        (bomb("anyOf"), ["references"]),
        (
            schema_of(a={"$ref": "#/$defs/x"}, b={"enum": [1]}) | {"$defs": {"x": {"$ref": "#/$defs/x"}}},
            ["'a'", "circle"],
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, words: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        constraint_of(AnswerRules("required", tools_of(f=schema), strict=frozenset("f")))
    assert len(str(caught.value)) < 3000
    assert [word for word in words if word not in str(caught.value)] == []


def test_other_requests_that_cannot_be_met() -> None:
    for rules, words in (
        (AnswerRules(content={"not": {}}), "schema of the answer.*not"),
        (AnswerRules(content=False), "no value"),
        (AnswerRules(content={"type": "object", "properties": 3}), "properties"),
        (AnswerRules(content={"const": float("inf")}), "JSON"),
        (AnswerRules("required"), "no tool"),
        (AnswerRules("required", TOOLS, names=frozenset()), "no tool"),
        (AnswerRules("required", tools_of(**{'a"> <b': {}})), "tool name"),
    ):
        with pytest.raises(RequestError, match=words):
            begin(rules)


def test_a_schema_that_leads_nowhere_ends_the_answer_with_an_error() -> None:
    """What no one can see beforehand is an error when it is reached."""
    schema = schema_of(a={"type": "string", "pattern": "^x[a-c]*(?:&[a-z]+)$", "format": "uuid"}, b={"type": "null"})
    rules = AnswerRules("required", tools_of(f=schema), strict=frozenset("f"))
    constraint = constraint_of(rules)
    with pytest.raises(RequestError, match="cannot follow its schema"):
        follow(constraint, block(("f", {"a": "x"})))


KEYWORDS = (
    "type", "properties", "required", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "items", "pattern", "not",
    "minLength", "maxLength", "format", "minimum", "additionalProperties", "$defs", "title", "x-guidance", "$schema",
    "prefixItems", "patternProperties", "uniqueItems", "maxItems",
)  # fmt: skip
ODD = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 1.5, "", "string", "object", "array", "a", "#", "#/$defs/a", "^a$", [], {}]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a", "é"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(parameters=st.dictionaries(st.sampled_from(KEYWORDS), ODD, max_size=5), content=ODD)
@settings(max_examples=400)
def test_no_schema_breaks_anything(parameters: dict[str, Any], content: Any) -> None:
    schemas: list[Any] = [parameters, {"type": "object", "properties": {"a": content}}]
    for rules in (
        AnswerRules(content=content),
        *(AnswerRules("required", tools_of(f=schema), strict=frozenset("f")) for schema in schemas),
    ):
        try:
            constraint = begin(rules)
            if constraint is not None:
                assert constraint.mask() is not None
        except RequestError:
            continue
