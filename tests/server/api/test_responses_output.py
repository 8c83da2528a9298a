"""Output items and their events: what a client adds up equals what the items say, wherever the answer ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event, Problem, ReasoningDelta, TextDelta
from ds4.chat.message import Message
from ds4.chat.tools import tool_schemas
from ds4.server.api.responses_output import InputReader, OutputWriter, WireEvent, custom_input, new_id

TOOLS = tool_schemas(
    [
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "custom", "name": "patch"},
        {"type": "tool_search"},
        {"type": "namespace", "name": "mcp__db__", "tools": [{"type": "function", "name": "query"}]},
    ]
)
IDS = ["call_a", "call_b"]


def called(name: str, *pieces: str, index: int = 0, ended: bool = True) -> list[Event]:
    deltas = [ArgumentsDelta(index, piece) for piece in pieces]
    return [CallBegin(index, name), *deltas, *([CallEnd(index)] if ended else [])]


def write(*events: Event, shown: bool = True) -> tuple[OutputWriter, list[WireEvent]]:
    writer = OutputWriter(TOOLS, shown)
    out: list[WireEvent] = []
    for event in events:
        out += writer.write([event], IDS)
    return writer, out


def kinds(events: Sequence[WireEvent]) -> list[str]:
    return [kind.removeprefix("response.") for kind, _ in events]


def deltas(events: Sequence[WireEvent]) -> str:
    return "".join(fields["delta"] for kind, fields in events if kind.endswith(".delta"))


def test_ids_cannot_be_guessed() -> None:
    ids = {new_id("fc_") for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id) == 3 + 24 and int(id[3:], 16) >= 0 for id in ids)


def test_items_begin_when_they_begin_and_never_overlap() -> None:
    writer, out = write(ReasoningDelta("why"), TextDelta("Hel"), TextDelta("lo"), *called("f", "{", "}"))
    out += writer.end(Message(), cut=False)
    assert kinds(out) == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [item["type"] for item in writer.items()] == ["reasoning", "message", "function_call"]
    assert [item["status"] for item in writer.items()] == ["completed"] * 3
    done = [fields["item"] for kind, fields in out if kind == "response.output_item.done"]
    assert done == writer.items()


def test_reasoning_is_hidden_unless_it_was_asked_for() -> None:
    writer, out = write(ReasoningDelta("why"), TextDelta("x"), shown=False)
    assert "reasoning" not in str(out)
    assert [item["type"] for item in writer.items()] == ["message"]


def test_an_answer_without_text_and_calls_is_an_empty_message() -> None:
    for shown, types in ((True, ["reasoning", "message"]), (False, ["message"])):
        writer, _ = write(ReasoningDelta("why"), shown=shown)
        end = writer.end(Message(), cut=False)
        assert [item["type"] for item in writer.items()] == types
        assert writer.items()[-1]["content"][0]["text"] == ""
        assert kinds(end)[-5:] == [
            "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        ]  # fmt: skip
    # What a limit cut before its first word has no message.
    writer, _ = write(ReasoningDelta("why"), shown=False)
    assert writer.end(Message(reasoning_closed=False), cut=True) == []
    assert writer.items() == []


@pytest.mark.parametrize(
    ("events", "message", "cut", "statuses"),
    [
        ([ReasoningDelta("a")], Message(reasoning_closed=False), True, ["incomplete"]),
        ([ReasoningDelta("a")], Message(reasoning_closed=False), False, ["incomplete", "completed"]),
        ([ReasoningDelta("a")], Message(), True, ["completed"]),
        ([ReasoningDelta("a"), TextDelta("b")], Message(), True, ["completed", "incomplete"]),
        ([TextDelta("b")], Message(), False, ["completed"]),
        ([TextDelta("b"), *called("f", "{}")], Message(complete=False), True, ["completed", "incomplete"]),
        ([TextDelta("b"), *called("f", "{}")], Message(complete=True), True, ["completed", "completed"]),
        ([*called("f", "{}"), *called("f", "{}", index=1)], Message(complete=False), True, ["completed", "incomplete"]),
        # A block that the model itself did not end was completed for it.
        (called("f", "{}"), Message(complete=False), False, ["completed"]),
    ],
)
def test_statuses_say_what_was_cut(events: list[Event], message: Message, cut: bool, statuses: list[str]) -> None:
    writer, _ = write(*events)
    writer.end(message, cut)
    assert [item["status"] for item in writer.items()] == statuses


def test_a_call_has_no_end_before_something_follows_it() -> None:
    """Clients run a call as soon as it is done; only what follows shows that no limit cut it."""
    writer, out = write(*called("f", "{}"))
    assert "output_item.done" not in kinds(out)
    assert kinds(writer.end(Message(), cut=False))[-1] == "output_item.done"
    writer, out = write(*called("f", "{}"), *called("f", "{}", index=1, ended=False))
    assert kinds(out).count("output_item.done") == 1


def test_a_failed_answer_closes_its_text_and_leaves_its_call_open() -> None:
    writer, _ = write(TextDelta("a"))
    assert kinds(writer.abandon()) == ["output_text.done", "content_part.done", "output_item.done"]
    assert writer.items()[0]["status"] == "incomplete"
    writer, _ = write(*called("f", '{"a', ended=False))
    assert writer.abandon() == []
    assert writer.items() == [
        {
            "id": writer.items()[0]["id"],
            "type": "function_call",
            "status": "incomplete",
            "call_id": "call_a",
            "name": "f",
            "arguments": '{"a',
        }
    ]
    writer, _ = write(*called("tool_search", '{"a', ended=False))
    assert writer.abandon() == []
    assert writer.items()[0]["arguments"] == {}
    writer, _ = write(*called("patch", '{"input":"xy', ended=False))
    assert writer.abandon() == []
    assert writer.items()[0]["input"] == "xy"
    assert OutputWriter(TOOLS, True).abandon() == []


def test_problems_are_no_output() -> None:
    writer, out = write(Problem("odd", streamed=False), CallEnd(0), ReasoningDelta(""), TextDelta(""))
    assert out == []
    assert writer.items() == []


def test_a_tool_of_a_namespace_shows_both_names() -> None:
    writer, out = write(*called("mcp__db__query", "{}"))
    out += writer.end(Message(), cut=False)
    (item,) = writer.items()
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "query", "mcp__db__")
    assert next(fields for kind, fields in out if kind.endswith("arguments.done"))["name"] == "query"
    writer, _ = write(*called("mcp__db__other", "{}"))
    assert "namespace" not in writer.items()[0]


def test_a_search_for_tools_has_its_arguments_as_an_object() -> None:
    writer, out = write(*called("tool_search", '{"query":"db"', ',"limit":1e999,"n":2.5}'))
    assert kinds(out) == ["output_item.added"]
    assert out[0][1]["item"]["arguments"] == {}
    assert kinds(writer.end(Message(), cut=False)) == ["output_item.done"]
    (item,) = writer.items()
    assert (item["type"], item["execution"], item["call_id"]) == ("tool_search_call", "client", "call_a")
    # No JSON reader could read an infinite number.
    assert item["arguments"] == {"query": "db", "limit": "1e999", "n": 2.5}


def test_a_custom_tool_gets_its_text_as_it_is_written() -> None:
    writer, out = write(*called("patch", "{", '"input":', '"*** a', '\\"b\\n', '"', "}"))
    assert kinds(out) == ["output_item.added", *["custom_tool_call_input.delta"] * 2]
    assert out[0][1]["item"]["input"] == ""
    out += writer.end(Message(), cut=False)
    assert kinds(out)[-2:] == ["custom_tool_call_input.done", "output_item.done"]
    assert deltas(out) == out[-2][1]["input"] == '*** a"b\n'
    (item,) = writer.items()
    assert (item["type"], item["name"], item["call_id"]) == ("custom_tool_call", "patch", "call_a")
    assert (item["input"], item["status"]) == ('*** a"b\n', "completed")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"x"}', "x"),
        ('{"other":"y","input":"x"}', "x"),
        ('{"other":{"input":"y"},"list":["input","z"],"input":"x"}', "x"),
        ('{"input":{"a":[1.50]}}', '{"a":[1.50]}'),
        # The model was not told the parameter's name.
        ('{"patch":"x"}', "x"),
        ('{"a":"x","b":"y"}', '{"a":"x","b":"y"}'),
        ("{}", ""),
        ("no JSON", "no JSON"),
    ],
)
def test_the_text_of_a_custom_call(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
    for size in (1, 3, 100):
        writer, out = write(*called("patch", *(arguments[i : i + size] for i in range(0, len(arguments), size))))
        out += writer.end(Message(), cut=False)
        assert deltas(out) == writer.items()[0]["input"] == text


def test_of_equal_parameters_the_last_one_counts() -> None:
    writer, _ = write(*called("patch", '{"input":"a","input":"b"}'))
    end = writer.end(Message(), cut=False)
    assert writer.items()[0]["input"] == end[-2][1]["input"] == "b"


texts = st.text(alphabet=st.one_of(st.sampled_from('ab\\"{}[],:/\n\t\x01é😀u0d8'), st.characters()), max_size=12)
values = st.recursive(texts, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner)))


@given(
    st.dictionaries(texts, values, max_size=3),
    texts,
    st.dictionaries(texts, values, max_size=2),
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=20),
)
def test_the_input_is_found_wherever_it_stands_and_is_cut(
    before: dict[str, Any], text: str, after: dict[str, Any], ascii_only: bool, cuts: list[int]
) -> None:
    before.pop("input", None)
    after.pop("input", None)
    arguments = json.dumps({**before, "input": text, **after}, ensure_ascii=ascii_only)
    expected = json.loads(json.dumps(text))
    places = sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    reader = InputReader()
    pieces = [reader.read(arguments[start:end]) for start, end in pairwise(places)]
    assert "".join(pieces) == expected
    assert not any(piece and "\ud800" <= piece[-1] <= "\udbff" for piece in pieces)
