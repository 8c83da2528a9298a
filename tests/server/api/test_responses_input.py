"""Input items of the Responses API as messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds4 import chat
from ds4.chat.message import Message, Part, ToolCall
from ds4.server.api import responses_input
from ds4.server.api.responses_input import found_tools, read_input
from ds4.server.errors import ApiError


def read(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read_input(items).messages


def reasoning(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in texts], **fields}


def call(id: str = "call_1", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": '{"a":1}', **fields}


def output(value: Any, id: str = "call_1", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": id, "output": value}


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
CALL = ToolCall("f", '{"a":1}', "call_1")


def test_a_string_is_a_users_message() -> None:
    assert read_input("hello").messages == (Message(role="user", content="hello"),)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([], ""),
        (["a", "b"], "ab"),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}, {"text": "c"}], "abc"),
        ([{"type": "output_text", "text": None}, {"type": "summary_text", "text": "x"}], "x"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_contents(content: Any, text: str, role: str) -> None:
    (message,) = read({"type": "message", "role": role, "content": content, "status": "completed"})
    assert (message.role, message.text) == (role, text)


def test_what_cannot_be_shown_of_a_result_is_named_in_its_place() -> None:
    image = {"type": "input_image", "image_url": "data:..."}
    (_, message) = read(call(), output([{"type": "input_text", "text": "seen"}, image]))
    assert chat.render([message]).endswith(
        "<tool_result>seen\n\n[Unsupported input_image]</tool_result><｜Assistant｜><think>"
    )


def test_what_a_limit_cut_can_be_replayed() -> None:
    thought, message = reasoning("hm", status="incomplete"), {**ASSISTANT, "status": "incomplete"}
    assert read(thought, message) == read(reasoning("hm"), ASSISTANT)


def test_messages_need_no_type_and_no_role_and_developers_write_the_system_prompt() -> None:
    roles = [message.role for message in read({"content": "x"}, {"role": "developer", "content": "x"}, USER)]
    assert roles == ["user", "system", "user"]
    assert read({"role": None, "content": "x"})[0].role == "user"


def test_reasoning_belongs_to_the_next_assistant_message_or_call() -> None:
    assert read(USER, reasoning("a", "b"), ASSISTANT)[1:] == (Message("a\nb", (Part("text", "yes"),)),)
    assert read(USER, reasoning("a"), reasoning("b"), call())[1:] == (Message("a\nb", tool_calls=(CALL,)),)
    texts = reasoning("s", content=[{"type": "reasoning_text", "text": "c"}], encrypted_content="xyz")
    assert read(texts, ASSISTANT)[0].reasoning == "s\nc"


def test_reasoning_that_nothing_follows_is_a_turn_of_its_own() -> None:
    assert [(m.role, m.reasoning) for m in read(reasoning("a"), USER, reasoning("b"))] == [
        ("assistant", "a"),
        ("user", ""),
        ("assistant", "b"),
    ]
    assert [m.role for m in read(call(), reasoning("a"), output("x"))] == ["assistant", "assistant", "tool"]
    # Without any text there is nothing to keep: clients send such items back for what is encrypted in them.
    assert [m.role for m in read(USER, {"type": "reasoning", "summary": [], "content": None}, USER)] == ["user"] * 2


def test_calls_join_the_message_before_them() -> None:
    two = read(USER, reasoning("why"), ASSISTANT, call(), call("call_2"))
    assert two[1:] == (Message("why", (Part("text", "yes"),), (CALL, ToolCall("f", '{"a":1}', "call_2"))),)
    apart = read(call(), output("x"), call("call_2"))
    assert [m.role for m in apart] == ["assistant", "tool", "assistant"]
    # Other servers reason between the calls of one turn.
    (one,) = read(reasoning("a"), call(), reasoning("b"), call("call_2"))
    assert (one.reasoning, [c.id for c in one.tool_calls]) == ("a\nb", ["call_1", "call_2"])


def test_calls_join_once_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each would copy all calls before it."""
    copied: list[int] = []

    def counted(message: Message, **changes: Any) -> Message:
        copied.append(len(changes["tool_calls"]))
        return replace(message, **changes)

    monkeypatch.setattr(responses_input, "replace", counted)
    items = [item for i in range(50) for item in (reasoning(f"why {i}"), call(f"call_{i}"))]
    first, _, second, last = read(ASSISTANT, *items, output("x", "call_1"), *items, reasoning("last"))
    assert copied == [50, 50]
    assert [call.id for call in first.tool_calls] == [call.id for call in second.tool_calls]
    assert [call.id for call in first.tool_calls] == [f"call_{i}" for i in range(50)]
    assert first.reasoning == second.reasoning == "\n".join(f"why {i}" for i in range(50))
    assert (first.text, second.text, last) == ("yes", "", Message(reasoning="last"))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (call(), CALL),
        (call(namespace="mcp__db__"), ToolCall("mcp__db__f", '{"a":1}', "call_1")),
        (call(arguments={"a": 1.5}), ToolCall("f", '{"a":1.5}', "call_1")),
        (call(arguments=None, input='{"b":2}'), ToolCall("f", '{"b":2}', "call_1")),
        (call(arguments=""), ToolCall("f", "{}", "call_1")),
        ({"type": "function_call", "id": "fc_1", "name": "f"}, ToolCall("f", "{}", "fc_1")),
        (
            {"type": "custom_tool_call", "call_id": "c", "id": "ctc_1", "name": "patch", "input": '*** "x"\n'},
            ToolCall("patch", '{"input":"*** \\"x\\"\\n"}', "c"),
        ),
        ({"type": "custom_tool_call", "call_id": "c", "name": "patch"}, ToolCall("patch", '{"input":""}', "c")),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            ToolCall("local_shell", '{"type":"exec","command":["ls"]}', "c"),
        ),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, ToolCall("web_search_call", "{}", "ws_1")),
        (
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
            ToolCall("tool_search", '{"query":"q"}', "c"),
        ),
        (
            {"type": "image_generation_call", "id": "ig", "input": "a cat", "result": "..."},
            ToolCall("image_generation_call", "a cat", "ig"),
        ),
    ],
)
def test_calls_of_all_kinds(item: dict[str, Any], expected: ToolCall) -> None:
    assert read(item) == (Message(tool_calls=(expected,)),)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("sunny", "sunny"),
        (None, ""),
        ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ({"temperature": 21, "sky": "blå"}, '{"temperature":21,"sky":"blå"}'),
        ([1, 2], "[1,2]"),
        ([{"no": "type"}], '[{"no":"type"}]'),
        (7, "7"),
        (False, "false"),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output", "local_shell_call_output"])
def test_outputs(value: Any, text: str, kind: str) -> None:
    (message,) = read(output(value, kind=kind))
    assert (message.role, message.tool_call_id, message.text) == ("tool", "call_1", text)


def test_outputs_of_hosted_tools_and_what_a_search_has_found() -> None:
    tool = {"type": "function", "name": "found", "parameters": {"type": "object"}}
    given = read_input(
        [
            {"type": "tool_search_call", "call_id": "s", "arguments": {}},
            {"type": "tool_search_output", "call_id": "s", "status": "completed", "tools": [tool]},
            {"type": "image_generation_call_output", "id": "i", "result": "a picture"},
            {"type": "web_search_call_output", "id": "w", "output": "text", "result": "not this"},
        ]
    )
    assert given.tools == (tool,)
    assert [message.text for message in given.messages[1:]] == [
        '{"type":"function","name":"found","parameters":{"type":"object"}}'.join("[]"),
        "a picture",
        "text",
    ]
    assert found_tools(given.messages) == (tool,)
    assert found_tools(given.messages[1:]) == ()


@pytest.mark.parametrize("text", ["no JSON", '{"type":"function"}', "[1]", '[{"name":"f"}]'])
def test_results_of_a_search_that_are_no_tools_are_only_text(text: str) -> None:
    search = {"type": "tool_search_call", "call_id": "s", "arguments": {}}
    assert found_tools(read(search, {"type": "tool_search_output", "call_id": "s", "output": text})) == ()


def test_compactions_are_passed_over() -> None:
    assert read(USER, {"type": "compaction", "encrypted_content": "x"}, {"type": "context_compaction"}) == read(USER)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "computer_call", "id": "x"}, "input[1] has type 'computer_call'"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1] has type 'item_reference'"),
        ({"type": None, "id": "msg_1"}, "input[1] has no type and no content"),
        ({"type": 5}, "input[1].type must be a string"),
        (call(status="incomplete"), "input[1].status is 'incomplete'"),
        (reasoning("x", status="in_progress"), "input[1].status is 'in_progress'"),
        ({"type": "image_generation_call", "id": "x", "status": ["odd"]}, "input[1].status is ['odd']"),
        ({"role": "critic", "content": "x"}, "input[1].role 'critic' is not known"),
        ({"role": ["user"], "content": "x"}, "input[1].role ['user'] is not known"),
        ({"role": "user", "content": {"text": "x"}}, "input[1].content must be a string or a list of parts"),
        ({"role": "user", "content": [5]}, "input[1].content[0] must be a string or an object"),
        (
            {"role": "user", "content": ["x", {"type": "input_image", "image_url": "data:..."}]},
            "input[1].content[1] has type 'input_image'",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[1].content[0] has type 'input_file'"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "input[1].content[0] has type 'refusal'"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "input[1].content[0] has type ['text']"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "input[1].content[0].text must be a string"),
        ({"type": "reasoning", "summary": {}}, "input[1].summary must be a string or a list of parts"),
        ({"type": "function_call", "name": "f"}, "input[1].call_id must be a non-empty string"),
        (call(name=""), "input[1].name must be a non-empty string"),
        (call(namespace=5), "input[1].namespace must be a string"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id must be a non-empty string"),
        ({"type": "tool_search_output", "call_id": "s", "tools": ["x"]}, "input[1].tools must be a list of objects"),
    ],
)
def test_what_cannot_be_read_is_named(item: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(USER, item)
    error = caught.value
    assert (error.status, error.param) == (400, "input")
    assert words in error.message
    assert error.message.startswith("invalid JSON request: ")


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    deep = json.loads("[" * 300 + "]" * 300)
    with pytest.raises(ApiError, match=r"input\[0\].output"):
        read(output({"x": deep}))
