"""The memory of answers that are continued by an id."""

from __future__ import annotations

import gc
import sys
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.message import Message, Part, ToolCall
from ds4.server.turns import Turn, TurnMemory, _own_size, _size


def user(text: str) -> Message:
    return Message(role="user", content=text)


def answer(text: str, *ids: str) -> Message:
    return Message(reasoning="why", content=text, tool_calls=tuple(ToolCall("f", "{}", id) for id in ids))


def conversation(turns: int, size: int = 0) -> list[Turn]:
    """The turns of a conversation of a client that replays all of it, with objects of its own each time."""
    made: list[Turn] = []
    for n in range(turns):
        messages = []
        for i in range(n):
            messages += [user(f"question {i}" + "x" * size), Message(content=f"answer {i}")]
        made.append(Turn((*messages, user(f"question {n}" + "x" * size), answer(f"answer {n}")), f"resp_{n}"))
    return made


def test_a_turn_is_found_by_its_response_and_by_each_of_its_calls() -> None:
    memory = TurnMemory()
    turn = Turn((user("hi"), answer("look", "call_a", "call_b")), "resp_1")
    memory.put(turn)
    for id in ("resp_1", "call_a", "call_b"):
        found = memory.get(id)
        assert found is not None
        assert (found.messages, found.response_id) == (turn.messages, "resp_1")
        assert found.call_ids == {"call_a", "call_b"}
        assert found.answer.reasoning == "why"
    assert memory.get("resp_2") is None
    assert memory.get("") is None
    assert len(memory) == 1


def test_what_nobody_can_ask_for_is_not_kept() -> None:
    memory = TurnMemory()
    memory.put(Turn((user("hi"), answer("x"))))
    assert (len(memory), memory.nbytes) == (0, 0)


def test_the_least_recently_used_turns_leave_whole() -> None:
    memory = TurnMemory(max_ids=5)
    memory.put(Turn((user("a"), answer("1", "a1", "a2")), "ra"))
    memory.put(Turn((user("b"), answer("2", "b1")), "rb"))
    assert memory.get("a2") is not None
    memory.put(Turn((user("c"), answer("3")), "rc"))
    assert memory.get("rb") is None
    assert memory.get("b1") is None
    assert memory.get("ra") is not None
    assert memory.get("rc") is not None
    # More ids than are kept at all: nothing else leaves for them.
    memory.put(Turn((user("d"), answer("4", *"123456")), "rd"))
    assert memory.get("rd") is None
    assert memory.get("ra") is not None


def test_an_id_that_comes_again_belongs_to_the_new_turn_only() -> None:
    memory = TurnMemory()
    memory.put(Turn((user("a"), answer("1", "x", "y")), "r"))
    first = memory.nbytes
    memory.put(Turn((user("b"), answer("2", "x")), "s"))
    found = memory.get("x")
    assert found is not None
    assert found.answer.content == "2"
    for id in ("y", "r"):
        kept = memory.get(id)
        assert kept is not None
        assert kept.answer.content == "1"
    memory.put(Turn((user("a"), answer("1", "y")), "r"))
    assert len(memory) == 2
    memory.put(Turn((user("a"), answer("1", "x", "y")), "r"))
    memory.put(Turn((user("a"), answer("1", "x", "y")), "s"))
    memory.put(Turn((user("a"), answer("1", "x", "y")), "r"))
    memory.put(Turn((user("a"), answer("1")), "s"))
    assert len(memory) == 2
    assert memory.nbytes > first


def test_equal_messages_are_kept_once_however_often_a_client_sends_them() -> None:
    memory = TurnMemory()
    sizes = []
    for turn in conversation(30, size=10_000):
        memory.put(turn)
        sizes.append(memory.nbytes)
    growth = [b - a for a, b in pairwise(sizes)]
    # Each turn adds its question and its answers, and 8 bytes for each message before them.
    assert max(growth) < 10_000 + 4000
    held = memory.get("resp_29")
    earlier = memory.get("resp_3")
    assert held is not None
    assert earlier is not None
    assert held.messages[0] is earlier.messages[0]


def test_memory_is_bounded_and_the_newest_turn_stays() -> None:
    memory = TurnMemory(max_bytes=100_000)
    for turn in conversation(40, size=5_000):
        memory.put(turn)
        assert memory.nbytes <= 100_000
        fits = sum(sys.getsizeof(message.content) for message in turn.messages) < 80_000
        if fits:
            assert memory.get(turn.response_id) is not None
    # A turn that is too large alone is not kept, and nothing leaves for it.
    memory = TurnMemory(max_bytes=20_000)
    memory.put(Turn((user("a"), answer("1")), "r"))
    memory.put(Turn((user("b" * 30_000), answer("2")), "s"))
    assert memory.get("r") is not None
    assert memory.get("s") is None


@pytest.mark.parametrize(
    "message",
    [
        Message(reasoning="x" * 50_000),
        Message(content="x" * 50_000),
        Message(raw_dsml="x" * 50_000),
        Message(problems=("x" * 50_000,)),
        Message(tool_call_id="x" * 50_000),
        Message(tool_calls=(ToolCall("x" * 50_000),)),
        Message(tool_calls=(ToolCall("f", "x" * 50_000),)),
        Message(content=(Part("text", "x" * 50_000),)),
        Message(role="user", content=(Part("tool_result", parts=(Part("text", "x" * 50_000),)),)),
        Message(role="user", content=(Part("tool_result", "x" * 50_000),)),
        Message(content="\U0001f600" * 12_500),
    ],
)
def test_everything_a_message_holds_counts(message: Message) -> None:
    memory = TurnMemory()
    memory.put(Turn((message, answer("x")), "r"))
    assert 50_000 <= memory.nbytes < 54_000


def test_the_size_that_is_counted_is_about_what_the_memory_takes() -> None:
    memory = TurnMemory()
    for turn in conversation(20, size=300):
        memory.put(turn)
    seen: set[int] = set()

    def size(value: object) -> int:
        if id(value) in seen or isinstance(value, type):
            return 0
        seen.add(id(value))
        return sys.getsizeof(value) + sum(map(size, gc.get_referents(value)))

    true = size(memory._turns) + size(memory._by_id) + size(memory._messages)
    assert true / 2 < memory.nbytes < 3 * true


IDS = st.sampled_from(["a", "b", "c", "d", "e", ""])
TEXTS = st.lists(st.sampled_from(["x", "yy", "z" * 700]), max_size=4)


@given(st.lists(st.tuples(TEXTS, IDS, st.sets(IDS, max_size=3)), max_size=25), st.integers(2000, 12_000))
def test_counts_stay_right_whatever_comes_and_leaves(steps: list[tuple[list[str], str, set[str]]], limit: int) -> None:
    memory = TurnMemory(max_bytes=limit, max_ids=6)
    known: dict[str, tuple[Message, ...]] = {}
    for texts, response_id, calls in steps:
        turn = Turn((*map(user, texts), answer("x", *sorted(calls))), response_id)
        memory.put(turn)
        for id in {response_id, *calls} - {""}:
            known[id] = turn.messages
        for id, messages in known.items():
            found = memory.get(id)
            assert found is None or found.messages == messages
        assert memory.nbytes <= limit
        assert len(memory._by_id) <= 6
        # What is kept is exactly what its ids lead to.
        held = {message for kept in memory._by_id.values() for message in kept.messages}
        assert set(memory._by_id.values()) == set(memory._turns)
        assert set(memory._messages) == held
        assert memory.nbytes == sum(map(_size, held)) + sum(_own_size(*kept) for kept in memory._turns.items())
    for id in list(memory._by_id):
        if id in memory._by_id:
            memory._forget(memory._by_id[id])
    assert memory.nbytes == 0
    assert not memory._messages


def test_threads_may_use_it_at_once() -> None:
    memory = TurnMemory(max_ids=20)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(300):
                memory.put(Turn((user(f"{i}"), answer("x", f"{name}{i}")), f"r{name}{i}"))
                memory.get(f"r{name}{i - 5}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert len(memory._by_id) <= 20
