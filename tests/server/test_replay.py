"""The memory of sampled tool calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.message import Message, ToolCall
from ds4.chat.tools import tool_schemas
from ds4.server.replay import ReplayEntry, ReplayMemory, same_calls

BLOCK = "\n\n<｜DSML｜tool_calls>..."


def calls(*ids: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"tool{i}", '{"a":1}', id) for i, id in enumerate(ids))


def test_known_calls_get_their_block_back_however_their_json_is_written() -> None:
    memory = ReplayMemory()
    memory.put(calls("a", "b"), BLOCK)
    sent = Message(tool_calls=(ToolCall("tool0", '{ "a": 1 }', "a"), ToolCall("tool1", '{"a":1}', "b")))
    assert memory.attach(sent).raw_dsml == BLOCK


def test_edited_unknown_missing_or_mixed_calls_are_written_anew() -> None:
    memory = ReplayMemory()
    memory.put(calls("a", "b"), BLOCK)
    memory.put(calls("c"), "other")
    good = Message(tool_calls=calls("a", "b"))
    assert memory.attach(good).raw_dsml == BLOCK
    first, second = good.tool_calls
    for wrong in (
        (replace(first, arguments='{"a":2}'), second),
        (replace(first, name="x"), second),
        (replace(first, arguments="not json"), second),
        (first,),
        (second, first),
        (first, second, replace(first, id="c")),
        (first, replace(second, id="c")),
        (first, replace(second, id="unknown")),
    ):
        assert memory.attach(Message(tool_calls=wrong)).raw_dsml == ""
    assert memory.attach(replace(good, role="user")).raw_dsml == ""
    assert memory.attach(Message(content="x")) == Message(content="x")


def test_ids_are_unguessable_and_new() -> None:
    memory = ReplayMemory()
    made = {memory.new_id("toolu_") for _ in range(50)}
    assert len(made) == 50
    for id in made:
        assert id.startswith("toolu_")
        assert len(bytes.fromhex(id.removeprefix("toolu_"))) == 16


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.booleans()), max_size=40))
def test_the_least_recently_used_ids_leave_and_the_size_is_exact(steps: list[tuple[int, int, bool]]) -> None:
    memory = ReplayMemory(max_ids=5)
    known: dict[str, str] = {}  # in order of use
    for id_number, block_number, look_up in steps:
        id, block = f"id{id_number}", "x" * (block_number + 1)
        if look_up:
            found = memory.attach(Message(tool_calls=calls(id))).raw_dsml
            assert found == known.get(id, "")
            if id in known:
                known[id] = known.pop(id)
        else:
            memory.put(calls(id), block)
            known.pop(id, None)
            known[id] = block
            if len(known) > 5:
                del known[next(iter(known))]
    assert len(memory) == len(known)
    call = len('tool0{"a":1}')
    assert memory.nbytes == sum(len(id) + 200 + len(block) + call for id, block in known.items())


def test_bytes_are_bounded_and_a_shared_block_counts_once() -> None:
    memory = ReplayMemory(max_bytes=2000)
    memory.put(calls("a", "b"), "x" * 1000)
    assert memory.attach(Message(tool_calls=calls("a", "b"))).raw_dsml
    memory.put(calls("c"), "y" * 1000)
    assert memory.nbytes <= 2000
    assert not memory.attach(Message(tool_calls=calls("a", "b"))).raw_dsml
    assert memory.attach(Message(tool_calls=calls("c"))).raw_dsml
    memory.put(calls("d"), "z" * 5000)
    assert len(memory) == 0
    assert memory.nbytes == 0


def test_the_arguments_that_are_kept_count() -> None:
    memory = ReplayMemory(max_bytes=2000)
    memory.put((ToolCall("f", "{" + " " * 500 + "}", "a"), ToolCall("f", "{}", "b")), "x")
    assert memory.nbytes == 2 * 201 + 1 + 2 + 502 + 2
    memory.put((ToolCall("f", "{" + " " * 2000 + "}", "c"),), "x")
    assert len(memory) == 0
    assert memory.nbytes == 0


@pytest.mark.parametrize(
    ("sampled", "sent", "same"),
    [
        ('{"a":1,"b":[1,{"c":null}]}', '{ "b": [1, {"c": null}], "a": 1 }', True),
        ('{"a":"\\u00fc"}', '{"a":"ü"}', True),
        ('{"a":3.0}', '{"a":3}', True),
        ('{"a":[1e3]}', '{"a":[1000]}', True),
        ('{"a":-0}', '{"a":0.0}', True),
        ('{"a":3}', '{"a":"3"}', False),
        ('{"a":"3.0"}', '{"a":"3"}', False),
        ('{"a":3.1}', '{"a":3}', False),
        ('{"a":1}', '{"a":true}', False),
        ('{"a":1}', '{"a":1,"b":null}', False),
        ('{"a":[1,2]}', '{"a":[2,1]}', False),
        ('{"a":[1]}', '{"a":[1,1]}', False),
        ('{"a":12345678901234567890}', '{"a":12345678901234567000}', False),
        ('{"a":1e999999999}', '{"a":10e999999998}', False),
        ('{"a":1e99999999999999999999}', '{"a":10e99999999999999999998}', False),
        ('{"a":1e999999999}', '{"a":1e999999999}', True),
        ("not json", "not json", True),
        ("not json", "not  json", False),
        ("[1]", "[ 1]", False),
        ("{", "{}", False),
    ],
)
def test_arguments_are_compared_as_json_values(sampled: str, sent: str, same: bool) -> None:
    for a, b in ((sampled, sent), (sent, sampled)):
        assert same_calls([ToolCall("f", a, "id")], [ToolCall("f", b, "id")]) is same


EDIT: dict[str, Any] = {
    "name": "edit",
    "input_schema": {"properties": {"path": {}, "all": {"default": False}, "depth": {"default": 1.0}, "odd": True}},
}


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        ('{"path": "a", "all": false}', True),
        ('{"all": false, "depth": 1, "path": "a"}', True),
        ('{"path": "a", "all": true}', False),
        ('{"path": "b", "all": false}', False),
        ('{"path": "a", "odd": false}', False),
        ('{"path": "a", "other": null}', False),
        ('{"all": false}', False),
    ],
)
@pytest.mark.parametrize("key", ["input_schema", "parameters"])
def test_defaults_that_a_client_adds_are_no_edit(key: str, sent: str, same: bool) -> None:
    tools = tool_schemas([{"name": "edit", key: EDIT["input_schema"]}])
    sampled = ToolCall("edit", '{"path":"a"}', "id")
    memory = ReplayMemory()
    memory.put([sampled], BLOCK)
    message = Message(tool_calls=(replace(sampled, arguments=sent),))
    found = memory.attach(message, None, tools)
    # The calls are those that were sampled again, as what continues the conversation compares them too.
    assert (found.raw_dsml, found.tool_calls) == ((BLOCK, (sampled,)) if same else ("", message.tool_calls))
    assert memory.attach(message, None, tool_schemas([{"name": "edit", "input_schema": {}}])).raw_dsml == ""
    assert memory.attach(message).raw_dsml == ""
    # What was sampled with its default and sent without it is another call.
    assert not same_calls([replace(sampled, arguments='{"path":"a","all":false}')], [sampled], tools)


def test_how_calls_are_written_is_counted() -> None:
    memory = ReplayMemory()
    memory.put(calls("a", "b"), BLOCK)
    memory.put(calls("c"), "other")
    memory.import_entries([ReplayEntry("from disk", calls("d"))])
    counts: Counter[str] = Counter()
    first = calls("a", "b")
    for message in (
        Message(tool_calls=first),
        Message(tool_calls=calls("x"), raw_dsml="known already"),
        Message(tool_calls=calls("d")),
        Message(tool_calls=(replace(first[0], name="x"), first[1])),
        Message(tool_calls=first[:1]),
        Message(tool_calls=calls("a", "c")),
        Message(tool_calls=calls("a", "x")),
        Message(tool_calls=calls("x")),
        Message(content="no calls"),
        Message(role="user", content="x"),
    ):
        memory.attach(message, counts)
    assert counts == {"memory": 2, "disk": 1, "canonical": 3, "missing": 2}


# ---- the way to disk and back ----------------------------------------------------------------------------------------

DSML = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f{}">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
EOS = "<｜end▁of▁sentence｜>"


def text_with(*blocks: str) -> str:
    return "<｜begin▁of▁sentence｜>x" + "".join(f"<｜User｜>q<｜Assistant｜></think>t{block}{EOS}" for block in blocks)


def test_the_turns_whose_block_a_text_has_are_exported_and_come_back() -> None:
    memory = ReplayMemory()
    blocks = [DSML.format(i) for i in range(4)]
    blocks.append(" \t\n<|DSML|tool_calls><invoke name='f4'></invoke></|DSML|tool_calls>")
    blocks.append('<｜DSML｜invoke name="f5"></｜DSML｜invoke>')
    for i, block in enumerate(blocks):
        memory.put(calls(f"a{i}", f"b{i}"), block)
    memory.put(calls("twin"), blocks[0])
    assert memory.export_entries(text_with(blocks[2])) == [ReplayEntry(blocks[2], calls("a2", "b2"))]
    # The answer that was sampled last has no end of sentence behind it.
    assert len(memory.export_entries(text_with(blocks[2]) + "<｜Assistant｜><think>x</think>" + blocks[1])) == 2
    entries = memory.export_entries(text_with(*blocks, blocks[0], "no call"))
    assert sorted(entry.calls[0].id for entry in entries) == ["a0", "a1", "a2", "a3", "a4", "a5", "twin"]
    other = ReplayMemory()
    assert other.import_entries(entries) == 7
    for i, block in enumerate(blocks):
        counts: Counter[str] = Counter()
        assert other.attach(Message(tool_calls=calls(f"a{i}", f"b{i}")), counts).raw_dsml == block
        assert counts == {"disk": 1}
    assert set(other.export_entries(text_with(*blocks))) == set(entries)
    assert other.nbytes == memory.nbytes


def test_a_block_that_is_there_only_in_part_or_as_a_quotation_is_not_exported() -> None:
    memory = ReplayMemory()
    block = DSML.format(0)
    memory.put(calls("a"), block)
    for text in ("", "x", block[1:], block[:-1], text_with(block[1:]), text_with(block + "x"), text_with(block[:40])):
        assert memory.export_entries(text) == []
    assert len(memory.export_entries(text_with("look: <｜DSML｜tool_calls> " + block))) == 1


def test_a_turn_that_is_forgotten_in_part_is_not_exported() -> None:
    memory = ReplayMemory(max_ids=3)
    memory.put(calls("a", "b"), DSML.format(0))
    memory.put(calls("c", "d"), DSML.format(1))
    entries = memory.export_entries(text_with(DSML.format(0), DSML.format(1)))
    assert [entry.calls[0].id for entry in entries] == ["c"]


def test_what_memory_knows_is_not_replaced_from_disk() -> None:
    memory = ReplayMemory()
    memory.put(calls("a"), "sampled")
    assert memory.import_entries([ReplayEntry("older", calls("a")), ReplayEntry("x", calls("b", "a"))]) == 0
    assert memory.attach(Message(tool_calls=calls("a"))).raw_dsml == "sampled"
    assert len(memory) == 1
    # But what was sampled replaces what came from disk.
    memory.import_entries([ReplayEntry("older", calls("c"))])
    memory.put(calls("c"), "newer")
    counts: Counter[str] = Counter()
    assert memory.attach(Message(tool_calls=calls("c")), counts).raw_dsml == "newer"
    assert counts == {"memory": 1}


def test_records_that_cannot_be_right_are_left_out() -> None:
    good = ToolCall("f", "{}", "id")
    wrong: list[Any] = [
        None,
        ("block", (good,)),
        ReplayEntry("", (good,)),
        ReplayEntry("block", ()),
        ReplayEntry(b"block", (good,)),  # type: ignore[arg-type]
        ReplayEntry("block", [good]),  # type: ignore[arg-type]
        ReplayEntry("block", ("id",)),  # type: ignore[arg-type]
        ReplayEntry("block", (replace(good, id=""),)),
        ReplayEntry("block", (replace(good, id="x" * 257),)),
        ReplayEntry("block", (replace(good, id=5),)),  # type: ignore[arg-type]
        ReplayEntry("block", (replace(good, name=""),)),
        ReplayEntry("block", (replace(good, name=None),)),  # type: ignore[arg-type]
        ReplayEntry("block", (replace(good, arguments={}),)),  # type: ignore[arg-type]
        ReplayEntry("block", (good, good)),
    ]
    memory = ReplayMemory()
    assert memory.import_entries(wrong) == 0
    assert (len(memory), memory.nbytes) == (0, 0)
    assert memory.import_entries([*wrong, ReplayEntry("block", (replace(good, id="x" * 256),)), *wrong]) == 1


def test_limits_hold_for_what_comes_from_disk() -> None:
    memory = ReplayMemory(max_ids=3, max_bytes=3000)
    memory.import_entries(ReplayEntry(f"{i}", calls(f"id{i}")) for i in range(9))
    assert len(memory) == 3
    memory.import_entries([ReplayEntry("x" * 5000, calls("large"))])
    assert memory.nbytes <= 3000
    off = ReplayMemory(max_ids=0)
    off.put(calls("a"), BLOCK)
    off.import_entries([ReplayEntry(BLOCK, calls("b"))])
    assert (len(off), off.nbytes, off.export_entries(text_with(BLOCK))) == (0, 0, [])


def test_a_long_text_is_searched_quickly_enough() -> None:
    """Linear: neither blanks nor tags in a text make it slow."""
    memory = ReplayMemory()
    for i in range(200):
        memory.put(calls(f"id{i}"), DSML.format(i))
    hostile = "\n" * 200_000 + "<｜DSML｜tool_calls>" * 20_000 + " <" * 50_000
    assert len(memory.export_entries(hostile + text_with(*[DSML.format(i) for i in range(200)]))) == 200
