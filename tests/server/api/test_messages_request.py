"""What a Messages request becomes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_type_hints

import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_bodies import (
    ASSISTANT,
    BOS,
    CALL,
    EOS,
    HEADER,
    HI,
    OTHER,
    USER,
    WEATHER,
    assistant,
    dialogue,
    prompt,
    request,
    result,
    text,
    user,
)

from ds4.chat import message as chat_message
from ds4.chat.dsml import calls_text
from ds4.errors import RequestError
from ds4.server.api import messages as messages_api
from ds4.server.api.messages_types import MessagesRequest
from ds4.server.errors import ApiError
from ds4.server.turns import Turn, TurnMemory


def test_the_body_has_the_fields_of_the_api() -> None:
    known = set(get_type_hints(MessageCreateParamsStreaming))
    # Some that only other versions of the API have, and one of this server.
    ours = {"temperature", "top_p", "top_k", "output_format", "mcp_servers", "reasoning_effort"}
    assert set(MessagesRequest.model_fields) - ours <= known
    assert {"messages", "system", "tools", "tool_choice", "thinking"} <= set(get_type_hints(MessageCountTokensParams))


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ("Be brief.", "Be brief."),
        (["Be brief.", text("Be kind.")], "Be brief.\nBe kind."),
        ([text("Be brief.\n", cache_control={"type": "ephemeral"}), text(""), text("Be kind.")], "Be brief.\nBe kind."),
        (HEADER % "1", ""),
        (HEADER % "1" + "\nBe brief.\n", "Be brief.\n"),
        (f"\n{HEADER % '1'}\nx-anthropic-other: 3\nBe brief.", "Be brief."),
        ([text(HEADER % "1"), text("Be brief.")], "Be brief."),
        ([text("Be brief."), text(HEADER % "1"), text("Be kind.")], "Be brief.\nBe kind."),
        ([text(HEADER % "1" + "\nBe brief.")], "Be brief."),
        ("Say x-anthropic-foo: 1\nx-anthropic-bar", "Say x-anthropic-foo: 1\nx-anthropic-bar"),
    ],
)
def test_the_system_text_is_without_lines_that_change_with_every_request(system: Any, expected: str) -> None:
    body = {"messages": [HI], "system": system}
    assert prompt(body) == f"{BOS}{expected}{USER}Hi{ASSISTANT}</think>"
    assert request(body).front == (1 if expected else 0)


def test_system_messages_stay_where_they_are() -> None:
    late = {"role": "system", "content": [text(HEADER % "1"), text("Now in French."), text("Or Latin.")]}
    assert dialogue(HI, assistant(text("Hello")), user(text("Bye")), late) == (
        f"{USER}Hi{ASSISTANT}</think>Hello{EOS}{USER}Bye\n\nNow in French.\nOr Latin.{ASSISTANT}</think>"
    )
    first = {"role": "system", "content": f"{HEADER % '1'}\nBe brief."}
    body = {"messages": [first, HI], "system": "Be kind."}
    assert prompt(body).startswith(f"{BOS}Be kind.\n\nBe brief.{USER}Hi")
    assert request(body).front == 1


def test_results_and_texts_of_a_user_are_one_turn_in_their_order() -> None:
    calls = assistant(text("Let me see."), CALL, OTHER)
    parts = [result("toolu_1", "sunny"), result("toolu_2", [text("rain"), text("wind")]), text("And?"), text("Go on.")]
    shown = dialogue(HI, calls, user(*parts))
    block = calls_text(
        [chat_message.ToolCall("get_weather", '{"city":"Rome","days":2}'), chat_message.ToolCall("get_weather")]
    )
    start = f"{USER}Hi{ASSISTANT}</think>Let me see.{block}{EOS}{USER}"
    results = "<tool_result>sunny</tool_result>\n\n<tool_result>rain\n\nwind</tool_result>"
    assert shown == f"{start}{results}\n\nAnd?\n\nGo on.{ASSISTANT}</think>"
    # However a client cuts what it says into messages.
    assert dialogue(HI, calls, user(*parts[:1]), user(*parts[1:3]), {"role": "user", "content": "Go on."}) == shown
    assert dialogue(user(text(""), text("Hi")), calls, user(*parts)) == shown
    # Results are in the order of their calls.
    assert dialogue(HI, calls, user(parts[1], parts[0], *parts[2:])) == shown


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("sunny", "sunny"),
        (None, ""),
        ([], ""),
        (["sunny"], "sunny"),
        (
            [text("see: "), {"type": "image", "source": {"type": "base64", "data": "eA=="}}],
            "see: \n\n[Unsupported image]",
        ),
        ([{"type": "tool_reference", "tool_name": "grep"}], "grep"),
    ],
)
def test_what_a_result_shows(content: Any, shown: str) -> None:
    for more in ({}, {"is_error": True, "cache_control": {"type": "ephemeral"}}):
        assert dialogue(HI, assistant(CALL), user(result(content=content, **more))).endswith(
            f"{USER}<tool_result>{shown}</tool_result>{ASSISTANT}</think>"
        )


def test_an_assistant_turn_is_the_same_in_one_message_or_several() -> None:
    blocks = [
        {"type": "thinking", "thinking": "plan", "signature": "msg_1"},
        {"type": "redacted_thinking", "data": "xyz"},
        text("Let me"),
        text(" see."),
        CALL,
    ]
    body: dict[str, Any] = {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    whole = prompt({**body, "messages": [HI, assistant(*blocks), user(result())]})
    assert f"{ASSISTANT}<think>plan</think>Let me see.\n\n<｜DSML｜tool_calls>" in whole
    pieces = [assistant(block) for block in blocks]
    assert prompt({**body, "messages": [HI, *pieces, user(result())]}) == whole


def test_neighbours_of_the_assistant_are_joined_once_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each would copy all text before it."""
    joined: list[int] = []
    join = messages_api._joined

    def counted(run: Any) -> Any:
        joined.append(len(run))
        return join(run)

    monkeypatch.setattr(messages_api, "_joined", counted)
    said = [{"role": "assistant", "content": f"{i} "} for i in range(50)]
    ask = {"role": "user", "content": "x"}
    read = messages_api._messages([ask, *said, ask, *said, ask])
    assert [message.role for message in read] == ["user", "assistant", "user", "assistant", "user"]
    assert read[1].text == read[3].text == "".join(f"{i} " for i in range(50))
    assert joined == [50, 50]


def test_marks_for_the_api_do_not_reach_the_model() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [user(text("Hi"))], "system": [text("Be brief.")], "tools": [WEATHER]}
    tool = {"type": "custom", **WEATHER, **mark, "defer_loading": True, "eager_input_streaming": True}
    marked = {"messages": [user(text("Hi", **mark))], "system": [text("Be brief.", **mark)], "tools": [tool]}
    more = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}, "betas": ["x"],
        "anthropic_beta": ["y"], "container": None, "max_tokens": 7, "unknown": [],
    }  # fmt: skip
    assert prompt({**marked, **more}) == prompt(body)
    assert '{"name": "get_weather", "description": "Weather of a city", "input_schema": {"type"' in prompt(body)


@pytest.mark.parametrize(
    ("extra", "options", "thinks"),
    [
        ({}, {}, False),
        ({}, {"think_default": True}, True),
        ({}, {"think_default": False}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {}, True),
        ({"thinking": {"type": "adaptive"}}, {"think_default": False}, True),
        ({"thinking": {"type": "disabled"}}, {"think_default": True}, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {}, False),
        ({"thinking": True}, {}, True),
        ({"thinking": {"type": "between_tools"}}, {}, False),
        ({"thinking": None}, {"think_default": True}, True),
        ({"output_config": {"effort": "low"}}, {}, True),
        ({"reasoning_effort": "high"}, {}, True),
        ({"reasoning_effort": "high", "output_config": {"effort": "none"}}, {}, False),
        ({"thinking": {"type": "enabled"}, "output_config": {"effort": "none"}}, {}, False),
        ({"model": "deepseek-reasoner"}, {}, True),
    ],
)
def test_thinking_is_off_unless_asked_for(extra: dict[str, Any], options: dict[str, Any], thinks: bool) -> None:
    assert request({"messages": [HI], **extra}, **options).thinking is thinks


def test_what_the_request_says_is_taken_over() -> None:
    body = {
        "messages": [HI], "model": "claude-x", "max_tokens": 0, "temperature": 0.5, "top_p": 0.75, "top_k": 9,
        "stop_sequences": ["", "END"], "tools": [WEATHER], "output_config": {"effort": "max"}, "stream": True,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }  # fmt: skip
    asked = request(body)
    assert (asked.model, asked.max_tokens, asked.stop, asked.effort) == ("claude-x", 0, ("END",), "max")
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.75, 9)
    assert (asked.calls_allowed, asked.parallel_calls, asked.streamed) == (True, False, True)
    assert (asked.call_prefix, asked.remembered, asked.response_id) == ("toolu_", True, "")
    assert asked.tools_active
    silent = request({"messages": [HI], "tools": [WEATHER], "tool_choice": {"type": "none"}})
    assert (silent.model, silent.max_tokens, silent.calls_allowed, silent.parallel_calls) == (
        "ds4-tiny",
        None,
        False,
        True,
    )
    assert silent.tools


def test_the_last_message_of_the_assistant_begins_the_answer() -> None:
    start = assistant(text("The best answer is ("))
    assert dialogue(HI, start) == f"{USER}Hi{ASSISTANT}</think>The best answer is ("
    assert dialogue(HI, start, think_default=True) == f"{USER}Hi{ASSISTANT}</think>The best answer is ("
    assert dialogue(HI, assistant()) == dialogue(HI, {"role": "assistant", "content": " "}) == dialogue(HI)
    for messages, extra, options, words in (
        ([HI, start], {"thinking": {"type": "adaptive"}}, {}, r"messages\[1\] .* thinking off"),
        ([HI, start], {}, {"template": "ds4"}, r"messages\[1\] .* 'ds4' cannot continue"),
        ([HI, assistant(text("x")), assistant(CALL)], {}, {}, r"messages\[2\] .* tool calls have no results"),
    ):
        with pytest.raises(ApiError, match=words):
            request({"messages": messages, **extra}, **options)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"messages": None}, "missing messages"),
        ({"messages": []}, "messages: expected"),
        ({"messages": "Hi"}, "messages: expected"),
        ({"messages": [{"role": "system", "content": "x"}]}, "one message of the user"),
        ({"messages": [assistant()]}, "one message of the user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role is 'tool'"),
        ({"messages": [HI, {"role": "user"}]}, r"messages\[1\].content: expected"),
        ({"messages": [user(3)]}, r"messages\[0\].content\[0\]: expected an object"),
        ({"messages": [user({"text": "x"})]}, r"messages\[0\].content\[0\].type: expected a string"),
        ({"messages": [user({"type": "text"})]}, r"messages\[0\].content\[0\].text: expected a string"),
        ({"messages": [user(text("see"), IMAGE)]}, r"messages\[0\].content\[1\] has type 'image'"),
        ({"messages": [user({"type": "document"})]}, r"messages\[0\].content\[0\] has type 'document'"),
        ({"messages": [user({"type": "video"})]}, r"messages\[0\].content\[0\] has type 'video'"),
        ({"messages": [user(CALL)]}, r"messages\[0\].content\[0\] has type 'tool_use'"),
        ({"messages": [HI, assistant(result())]}, r"messages\[1\].content\[0\] has type 'tool_result'"),
        ({"messages": [HI, assistant({**CALL, "name": ""}), HI]}, r"messages\[1\].content\[0\].name"),
        ({"messages": [HI, assistant({**CALL, "id": None}), HI]}, r"messages\[1\].content\[0\].id"),
        ({"messages": [HI, assistant({**CALL, "input": "{}"}), HI]}, r"messages\[1\].content\[0\].input"),
        ({"messages": [HI, assistant({"type": "thinking"}), HI]}, r"messages\[1\].content\[0\].thinking"),
        ({"messages": [user({"type": "tool_result"})]}, r"messages\[0\].content\[0\].tool_use_id"),
        ({"messages": [HI, assistant(CALL), user(result(content=3))]}, r"messages\[2\].content\[0\].content: expected"),
        ({"messages": [HI, assistant(CALL), user(result(content=[3]))]}, r"messages\[2\].content\[0\].content\[0\]"),
        ({"messages": [user(result("toolu_9"))]}, "not available for tool_use_id toolu_9; retry by replaying the full"),
        ({"system": 3}, "system: expected"),
        ({"system": [text("x"), IMAGE]}, r"system\[1\] has type 'image'"),
        ({"system": [{"type": "text"}]}, r"system\[0\].text"),
        ({"tools": {}}, "tools: expected"),
        ({"tools": [{"description": "x", "input_schema": {}}]}, r"tools\[0\].name"),
        ({"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[1\] .*web_search_2025"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', but the request has no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "no tool 'x'; it has get_weather"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type is 'maybe'"),
        ({"tool_choice": "auto"}, "tool_choice: expected"),
        ({"max_tokens": "many"}, "max_tokens: expected"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "x"}, "top_k: expected"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stream": "yes"}, "stream: expected"),
        ({"thinking": "on"}, "thinking: expected"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: reasoning effort 'huge'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort: reasoning effort 'huge'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: expected an object"),
        ({"output_format": {"type": "yaml"}}, "output_format.type is 'yaml'"),
        (
            {"messages": [HI, assistant(text("{"))], "output_format": {"type": "json_schema", "schema": {}}},
            "the beginning of an answer cannot be given",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        request({"messages": [HI], **extra})
    assert caught.value.status == 400


def test_tools_that_clients_run_without_a_schema_are_shown_as_they_are() -> None:
    shown = prompt({"messages": [HI], "tools": [{"type": "bash_20250124", "name": "bash"}]})
    assert '{"type": "bash_20250124", "name": "bash"}' in shown


def test_results_alone_continue_the_conversation_of_their_calls() -> None:
    answer = chat_message.Message(
        reasoning="hidden", content="Let me see.", tool_calls=(chat_message.ToolCall("get_weather", "{}", "toolu_a"),)
    )
    turns = TurnMemory()
    turns.put(Turn((chat_message.Message(role="user", content="Hi"), answer)))
    body = {"messages": [user(result("toolu_a"))], "system": "Be brief."}
    messages = request(body, turns).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2] == answer
    with pytest.raises(
        ApiError, match="continuation state is not available; retry by replaying the full messages"
    ) as lost:
        request({"messages": [HI, assistant(text("x")), user(result("toolu_a"))]}, turns)
    assert lost.value.status == 409
    assert lost.value.headers() == {"x-should-retry": "false"}


WORDS = [
    "user", "assistant", "system", "text", "thinking", "tool_use", "tool_result", "image", "toolu_1", "get_weather",
    "enabled", "x-anthropic-a: 1", "", "\ud800", "</think>",
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=4,
)
KEYS = ["type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "tool_name", "source", "role"]
BLOCKS = st.dictionaries(st.sampled_from(KEYS), VALUES) | st.sampled_from([CALL, result(), text("Hi"), IMAGE])
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | VALUES,
        "content": st.lists(BLOCKS, max_size=4) | VALUES,
    }
)
FIELDS = sorted({*MessagesRequest.model_fields, "thread"} - {"messages"})


@settings(max_examples=150)
@given(st.lists(MESSAGES | VALUES, max_size=5) | VALUES, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_any_body_is_read_or_refused(messages: Any, extra: dict[str, Any]) -> None:
    with suppress(ApiError, RequestError):
        prompt({"messages": messages, **extra})
