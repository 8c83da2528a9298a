"""Whatever a constraint takes is valid by its schema: numbers, formats, names, alternatives; errors name the place."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4.server.constraints import AnswerRules, SchemaError
from ds4.server.constraints.schema import FORMATS
from tests.server.constraint_helpers import constraint_of, follow, refusal_of, schema_of, takes_arguments, tools_of

# ---- limits of numbers ----------------------------------------------------------------------------------------------

LIMITS = st.sampled_from([0, 1, 5, -1, -5, 0.5, 0.01, -0.01, 1e-7, -1e-6, 1.01, 5.05, 0.1, 10, -1.5, 100.25, 1e3])
NUMBERS = [
    "0",
    "-0",
    "0.0",
    "1",
    "-1",
    "5",
    "-5",
    "0.5",
    "0.05",
    "0.00000005",
    "-0.0000005",
    "-0.005",
    "1.0",
    "1.005",
    "5.01",
    "5.05",
    "10",
    "99.5",
    "-1.25",
    "0.1",
    "0.01",
    "100.25",
    "-0.01",
    "12345678901234567890",
]


def holds(schema: Any, text: str) -> bool:
    """Whether a number satisfies the limits, exactly."""
    value = Fraction(text)
    low, high = (Fraction(str(schema[key])) if key in schema else None for key in ("minimum", "maximum"))
    above, below = (
        Fraction(str(schema[key])) if key in schema else None for key in ("exclusiveMinimum", "exclusiveMaximum")
    )
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
        and (schema["type"] == "number" or value.denominator == 1)
    )


@given(
    kind=st.sampled_from(["number", "integer"]),
    keys=st.lists(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), unique=True, max_size=3
    ),
    limits=st.lists(LIMITS, min_size=3, max_size=3),
    split=st.sampled_from(["", "allOf", "anyOf"]),
)
@example(kind="number", keys=["exclusiveMinimum", "maximum"], limits=[0, 1e-7, 0], split="")
@example(kind="number", keys=["exclusiveMinimum", "maximum"], limits=[0, 0.5, 0], split="")
@example(kind="number", keys=["exclusiveMinimum", "maximum"], limits=[0, 0.01, 0], split="allOf")
@example(kind="number", keys=["exclusiveMinimum", "maximum"], limits=[1, 1.01, 0], split="anyOf")
@example(kind="number", keys=["exclusiveMinimum", "maximum"], limits=[5, 5.05, 0], split="")
@example(kind="number", keys=["minimum", "exclusiveMaximum"], limits=[-1e-6, 0, 0], split="")
@example(kind="number", keys=["minimum", "exclusiveMaximum"], limits=[-0.01, 0, 0], split="allOf")
@example(kind="number", keys=["exclusiveMinimum", "exclusiveMaximum"], limits=[0, 0.1, 0], split="")
@settings(max_examples=120, deadline=None)
def test_limits_of_numbers_hold(kind: str, keys: list[str], limits: list[float], split: str) -> None:
    schema: dict[str, Any] = {"type": kind, **dict(zip(keys, limits, strict=False))}
    given_ = dict(schema)
    if split and keys:
        given_ = {key: value for key, value in schema.items() if key != keys[0]}
        given_[split] = [{keys[0]: schema[keys[0]]}]
    rules = AnswerRules(content=given_)
    try:
        constraint_of(rules)
    except SchemaError:
        assert not any(holds(schema, text) for text in NUMBERS)
        return
    for text in NUMBERS:
        taken = follow(constraint_of(rules), text) == "complete"
        assert holds(schema, text) or not taken, (given_, text)
        # Where the limits are in one place, only what is very near to an excluded whole number is missing.
        usual = "00000" not in text and text not in ("-0", "0.0", "1.0")
        assert taken or split or not holds(schema, text) or not usual, (given_, text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
        ({"minimum": 10**18}, [10**18, 2**62], [10**18 - 1]),
        ({"maximum": -(10**18)}, [-(10**18), -(2**62)], [1 - 10**18]),
        ({"exclusiveMinimum": 2**53, "maximum": 2**53 + 5}, [2**53 + 2], [2**53, 2**53 + 6]),
        ({"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        ({"maximum": 1e300}, [10**18], []),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_limits_of_large_numbers(kind: str, schema: Any, good: list[int], bad: list[int]) -> None:
    rules = AnswerRules(content={"type": kind, **schema})
    for value in good:
        assert follow(constraint_of(rules), str(value)) == "complete", value
    for value in bad:
        assert follow(constraint_of(rules), str(value)) != "complete", value


def test_limits_of_the_fourth_draft() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 0, "maximum": 0.5}
    for exclusive in (True, False):
        rules = AnswerRules(content={**schema, "exclusiveMinimum": exclusive})
        assert (follow(constraint_of(rules), "0") == "complete") is not exclusive
        assert follow(constraint_of(rules), "0.25") == "complete"


# ---- formats --------------------------------------------------------------------------------------------------------


@given(
    year=st.sampled_from([1, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 9999]) | st.integers(1, 9999),
    month=st.integers(0, 13),
    day=st.integers(0, 32),
    timed=st.booleans(),
    also=st.booleans(),
)
@example(year=2023, month=2, day=29, timed=False, also=False)
@example(year=2024, month=2, day=29, timed=True, also=True)
@example(year=1900, month=2, day=29, timed=False, also=True)
@settings(max_examples=100, deadline=None)
def test_dates_are_days_that_exist(year: int, month: int, day: int, timed: bool, also: bool) -> None:
    text = f"{year:04}-{month:02}-{day:02}" + ("T23:59:00Z" if timed else "")
    schema: dict[str, Any] = {"type": "string", "format": "date-time" if timed else "date"}
    valid = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(text)
    if also:
        schema["pattern"] = "[0-9]"
    assert (follow(constraint_of(AnswerRules(content=schema)), f'"{text}"') == "complete") is valid, text
    assert takes_arguments(schema_of(a=schema), {"a": text}) is valid, text


EXAMPLES = {
    "date-time": ["2024-02-29T23:59:59.5+01:00"],
    "time": ["12:00:00Z"],
    "date": ["1999-12-31"],
    "duration": ["P1Y2M3D", "PT5M"],
    "email": ["a.b_c+d@example.co.uk"],
    "hostname": ["a-b.example.com"],
    "ipv4": ["192.168.0.1"],
    "ipv6": ["::", "::1", "2001:db8::2", "fe80::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "a::b:c:d"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.com:80/a/b?c=d#e", "mailto:a@example.com", "urn:x:y"],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_alike_in_json_and_in_calls(name: str) -> None:
    schema = {"type": "string", "format": name}
    rules = AnswerRules(content=schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for text in EXAMPLES[name]:
        assert validator.is_valid(text), text
        assert follow(constraint_of(rules), f'"{text}"') == "complete", text
        assert takes_arguments(schema_of(a=schema), {"a": text}), text
    for text in (
        "",
        "x y",
        "a" * 300,
        "2023-02-29",
        "a" * 70 + "@example.com",
        "1.2.3.256",
        ":::",
        "1::2::3",
        "1:2:3:4:5:6:7:8::",
        "é",
    ):
        if not validator.is_valid(text):
            assert follow(constraint_of(rules), f'"{text}"') != "complete", text
            assert not takes_arguments(schema_of(a=schema), {"a": text}), text


# ---- names ----------------------------------------------------------------------------------------------------------

DECLARED = ({"properties": {"a": {"type": "integer"}}}, {"patternProperties": {"^a": {"type": "integer"}}},
            {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^.$": {"type": "string"}}})  # fmt: skip


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("others", [True, {"type": "string"}, False])
def test_a_declared_name_has_one_spelling(declared: Any, others: Any) -> None:
    schema = {"type": "object", **declared, "additionalProperties": others}
    validator = jsonschema_rs.validator_for(schema)
    for name in ("a", "\\u0061", "ab", "\\u0061b", "b", "\\u0062", "\\n"):
        for value in ("1", '"x"'):
            text = f'{{"{name}": {value}}}'
            if follow(constraint_of(AnswerRules(content=schema)), text) == "complete":
                assert validator.is_valid(json.loads(text)), text


# ---- alternatives ---------------------------------------------------------------------------------------------------

DEFINITIONS = {
    "int": {"type": "integer"}, "text": {"type": "string"}, "cat": schema_of(("kind",), kind={"const": "cat"}),
    "dog": schema_of(("kind",), kind={"$ref": "#/$defs/dog_word"}), "dog_word": {"enum": ["dog", "wolf"]},
    "tree": schema_of(next={"oneOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}),
    "maybe": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/int"}]},
}  # fmt: skip
REFERENCES = [{"$ref": f"#/$defs/{name}"} for name in DEFINITIONS]
ALTERNATIVES = st.sampled_from(
    [
        *REFERENCES, {"type": "null"}, {"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3},
        {"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, {"enum": ["dog", 7]}, {"const": 7.0},
        {"const": True}, {"type": "array"}, {"type": ["string", "null"]}, {"const": "long word"},
        {"allOf": [{"type": "integer"}, {"minimum": 9}]}, {"type": "object", "required": ["x"]},
        {**schema_of(("y",), y={"type": "null"}), "additionalProperties": False},
    ]
)  # fmt: skip
VALUES = [None, True, False, 0, 3, 3.5, 7, 9, "", "dog", "ab", "long word", [], {}, {"kind": "cat"}, {"kind": "dog"},
          {"x": 1}, {"y": None}, {"next": None}, {"next": {"next": {}}}]  # fmt: skip


@given(alternatives=st.lists(ALTERNATIVES, min_size=2, max_size=3))
@example(alternatives=[REFERENCES[0], {"type": "null"}])
@example(alternatives=[REFERENCES[1], REFERENCES[0]])
@example(alternatives=[REFERENCES[2], REFERENCES[3]])
@settings(max_examples=100, deadline=None)
def test_alternatives_exclude_one_another_or_are_refused(alternatives: list[Any]) -> None:
    schema = {"oneOf": alternatives, "$defs": DEFINITIONS}
    validator = jsonschema_rs.validator_for(schema)
    if refusal := refusal_of(AnswerRules(content=schema)):
        assert "#: the alternatives" in refusal
        assert "of oneOf cannot be told apart; use anyOf" in refusal
        return
    rules = AnswerRules(content=schema)
    for value in VALUES:
        assert validator.is_valid(value) or follow(constraint_of(rules), json.dumps(value)) != "complete", value


def test_many_alternatives_take_no_long_time() -> None:
    words = {"oneOf": [{"const": f"w{i}", "title": "x"} for i in range(500)]}
    kinds = {"type": "object", "oneOf": [schema_of(("k",), k={"const": f"w{i}"}) for i in range(300)]}
    types = [{"type": "null"}, {"type": "array", "minItems": 9}, {"type": "array", "maxItems": 3}, {"type": "boolean"}]
    ranges = {"oneOf": [*types, *({"type": "integer", "minimum": 5 * i, "maximum": 5 * i + 4} for i in range(40))]}
    for schema, good in ((words, '"w499"'), (kinds, '{"k": "w299"}'), (ranges, "199")):
        assert follow(constraint_of(AnswerRules(content=schema)), good) == "complete"
    bare = {"oneOf": [{"properties": {"k": {"const": word}}, "required": ["k"]} for word in "ab"]}
    assert "cannot be told apart" in refusal_of(AnswerRules(content=bare))  # all but objects satisfy both
    assert follow(constraint_of(AnswerRules(content={**bare, "type": "object"})), '{"k": "b"}') == "complete"


@pytest.mark.parametrize(
    "alternatives",
    [
        [REFERENCES[0], {"type": "null"}],
        [REFERENCES[1], REFERENCES[0], {"type": "null"}],
        [REFERENCES[2], REFERENCES[3]],
        [{"$ref": "#"}, {"type": "null"}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}],
        [{"const": 1}, {"const": 2}, {"const": True}],
        [REFERENCES[6], {"type": "string"}],
    ],
)
def test_what_can_be_told_apart(alternatives: list[Any]) -> None:
    schema = {**schema_of(a={"oneOf": alternatives}), "$defs": DEFINITIONS}
    assert constraint_of(AnswerRules(content=schema))
    assert constraint_of(AnswerRules("required", tools_of(f=schema), strict=frozenset("f")))


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "strin"}, "type cannot be 'strin'; use string, "),
        ({"enum": []}, "enum lists no value"),
        ({"enum": 1}, "enum must be a list of values"),
        ({"$ref": "http://x.y/z"}, "[$]ref 'http://x.y/z' does not point into the same schema"),
        ({"$ref": "#/nowhere"}, "[$]ref '#/nowhere' points to nothing"),
        ({"type": "integer", "minimum": 1e20, "maximum": 1e21}, "the limit 1e[+]20"),
        ({"type": "number", "minimum": 2, "maximum": 1}, "the least number 2 is more than the greatest one 1"),
        ({"type": "number", "minimum": "1"}, "minimum is '1'; it must be a number"),
        ({"type": "number", "minimum": 1e-200}, "nearer to 0 than"),
        ({"type": "number", "multipleOf": 0}, "multipleOf is 0"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "maxItems 1 is less than minItems 2"),
        ({"type": "array", "minItems": -1}, "minItems is -1; it must be a whole number"),
        ({"type": "object", "required": "x"}, "required must be a list of names"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": True}}, "may hold for the same name .*: '.a', 'b.'"),
        ({"type": "object", "patternProperties": {"a": {}, "[a]": True}}, "may hold for the same name .*: 'a', '.a.'"),
        ({"type": "object", "patternProperties": {"(": True}}, "patternProperties: the pattern '.' cannot be read"),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, "be told apart"),
    ],
)
def test_errors_name_the_place(part: Any, words: str) -> None:
    schema = schema_of(o=schema_of(x={"type": "array", "items": part}), a={"type": "object"})
    place = "#/properties/o/properties/x/items"
    with pytest.raises(SchemaError, match=f"the schema of the answer cannot be enforced: {place}.*{words}"):
        constraint_of(AnswerRules(content=schema))
    with pytest.raises(SchemaError, match=f"the tool 'f' cannot be enforced: property 'o': .*{words}"):
        constraint_of(AnswerRules("required", tools_of(f=schema), strict=frozenset("f")))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (schema_of(a={"$ref": "#", "minProperties": 1}), "#/properties/a: a .ref to what it stands in"),
        (schema_of(a={"type": "string", "pattern": "^a$", "minLength": 2}, needed={"const": 1}), ""),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no string has its pattern"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.5}, "no value satisfies it"),
    ],
)
def test_errors_are_in_our_words(schema: Any, words: str) -> None:
    if not words:  # what need not come is left out
        assert follow(constraint_of(AnswerRules(content=schema)), '{"needed": 1}') == "complete"
        return
    with pytest.raises(SchemaError, match=words) as caught:
        constraint_of(AnswerRules(content=schema))
    for foreign in ("Some(", "json-schema:", "SearchRegex", "Unsatisfiable", "registry", "Regex"):
        assert foreign not in str(caught.value)
