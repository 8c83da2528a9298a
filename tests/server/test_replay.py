"""The memory of sampled tool calls."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.message import Message, ToolCall
from ds4.server.replay import ReplayMemory

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
