"""Whatever is sampled under the masks of a constraint satisfies it: random logits, read back as a client reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.chat.events import Finish
from ds4.chat.message import Message
from ds4.chat.stream import StreamParser
from ds4.engine.sampling import Sampler, Sampling
from ds4.server.constraints import AnswerRules, Constraint
from tests.server.constraint_helpers import MARK, TOKENS, begin, constraint_of, schema_of, tools_of

ENDING = ("</", '"', "}", "]", ">", '">', '"}', "</think>", MARK, "<", "\n\n", "1")


def sampled(constraint: Constraint, rules: AnswerRules, seed: int, thinking: bool, limit: int = 1200) -> Message | None:
    """What comes out of random logits under the masks; None if it was cut. Tokens that end something are likelier."""
    sampler, random = Sampler(Sampling(min_p=0, seed=seed + 1)), np.random.default_rng(seed)
    likely = np.zeros(TOKENS.vocab_size, np.float32)
    for text in ENDING:
        likely[TOKENS.encode_chat(text)[-1]] = 7
    likely[TOKENS.eos] = 5
    parser = StreamParser(thinking, rules.tools if rules.calls != "none" else None, profile=rules.profile)
    for _ in range(limit):
        logits = random.standard_normal(TOKENS.vocab_size, np.float32) * 2 + likely
        token = sampler.sample(torch.from_numpy(logits), random.random() < 0.2, constraint.mask())
        assert constraint.allows(token)
        assert constraint.advance(token)
        if token != TOKENS.eos:
            parser.push(TOKENS.token_bytes(token))
        if token == TOKENS.eos or parser.done:
            assert parser.done or constraint.allows(TOKENS.eos)
            last = parser.finish("stop")[-1]
            assert isinstance(last, Finish)
            return last.message
    return None


VALUES: list[Any] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^(a|b)+[^x]?$"},
    {"type": ["string", "integer"], "minimum": -5, "maximum": 1000},
    {"enum": ["x", "</", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    schema_of(("k",), k={"type": "string", "maxLength": 5}, l={"type": "number"}),
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "time"}]},
    {"type": "string", "format": "email"},
    {"type": ["string", "null"], "format": "date"},
    {"type": "boolean"},
    {"type": "string", "pattern": '^[^"]{0,5}$'},
    {"type": "array", "items": {"type": "string", "pattern": '^[^"\\\\]+$', "maxLength": 9}, "maxItems": 2},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
]


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "ab", "ü", "x y", "name", "b-1"]), unique=True, max_size=4))
    properties = {name: draw(st.sampled_from(VALUES)) for name in names}
    return {**schema_of(tuple(draw(st.lists(st.sampled_from(names), unique=True))) if names else (), **properties)}


def check(message: Message, rules: AnswerRules, schemas: Mapping[str, Any]) -> None:
    """The answer is what the rules ask for."""
    assert not message.problems
    calls = message.tool_calls
    if rules.calls == "required":
        assert calls
        assert not message.text
    assert rules.several or len(calls) < 2
    for call in calls:
        assert rules.names is None or call.name in rules.names
        arguments = json.loads(call.arguments)
        if call.name in rules.strict:
            schema = schemas[call.name]
            assert set(arguments) <= set(schema["properties"])
            jsonschema_rs.validate(schema, arguments, validate_formats=True)
    if rules.content is not None and not calls:
        jsonschema_rs.validate(dict(rules.content), json.loads(message.text), validate_formats=True)  # type: ignore[arg-type]


@given(data=st.data(), seed=st.integers(0, 2**32), thinking=st.booleans())
@settings(max_examples=60)
def test_whatever_is_sampled_satisfies_the_rules(data: st.DataObject, seed: int, thinking: bool) -> None:
    schemas = {"f": data.draw(objects()), "gg": data.draw(objects())}
    rules = AnswerRules(
        data.draw(st.sampled_from(["required", "required", "allowed", "none"])),
        tools_of(**schemas),
        names=data.draw(st.none() | st.just(frozenset({"gg"}))),
        several=data.draw(st.booleans()),
        strict=data.draw(st.sampled_from([frozenset({"f", "gg"}), frozenset({"gg"}), frozenset()])),
        content=data.draw(st.none() | objects()),
        profile=data.draw(st.sampled_from(["official", "ds4"])),
    )
    constraint = begin(rules, thinking)
    if constraint is None:
        return
    message = sampled(constraint, rules, seed, thinking)
    if message is not None:
        check(message, rules, schemas)


def test_most_random_answers_come_to_an_end() -> None:
    """So that the test above says something."""
    schema = schema_of(("a", "c"), a={"type": "string"}, b=VALUES[6], c=VALUES[5])
    rules = AnswerRules("required", tools_of(f=schema), strict=frozenset("f"), several=False)
    messages = [sampled(constraint_of(rules), rules, seed, False) for seed in range(10)]
    finished = [message for message in messages if message is not None]
    assert len(finished) >= 8
    for message in finished:
        check(message, rules, {"f": schema})
    assert len({message.tool_calls[0].arguments for message in finished}) == len(finished)
