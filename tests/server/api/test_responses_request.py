"""What a request of the Responses API becomes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4 import chat
from ds4.chat.message import Message, ToolCall
from ds4.server.api.base import ApiContext, Ask
from ds4.server.api.responses import parse
from ds4.server.api.responses_types import ResponsesRequest
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.turns import Turn, TurnMemory

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch"}
SEARCH = {"type": "tool_search", "execution": "client"}
NAMESPACE = {"type": "namespace", "name": "mcp__db__", "tools": [{"type": "function", "name": "query"}]}
TOOLS = [WEATHER, PATCH, SEARCH, NAMESPACE]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def ask(turns: TurnMemory | None = None, config: ServerConfig | None = None, **body: Any) -> Ask:
    return parse({"input": "hi", **body}, ApiContext(config or ServerConfig(), "ds4-tiny", turns or TurnMemory(), 1024))


def refused(status: int, param: str | None, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**body)
    assert (caught.value.status, caught.value.param) == (status, param)
    return caught.value


def test_a_plain_request() -> None:
    request = ask().request
    assert request.messages == (Message(role="user", content="hi"),)
    assert (request.model, request.thinking, request.effort, request.max_tokens) == ("ds4-tiny", True, None, None)
    assert (request.front, request.remembered, request.call_prefix) == (0, True, "call_")
    assert request.response_id.startswith("resp_")
    assert len(request.response_id) == 5 + 24
    assert request.response_id != ask().request.response_id
    assert not ask().stream
    assert ask(stream=True).stream
    assert ask(stream=True).request.streamed


def test_fields_of_a_request() -> None:
    request = ask(
        model="m", instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=7, max_tokens=9,
        tools=[WEATHER], tool_choice="none", parallel_tool_calls=False, reasoning={"effort": "high"}, min_p=0.1,
        top_k=3, seed=4,
    ).request  # fmt: skip
    assert request.messages[0] == Message(role="system", content="Be brief.")
    assert (request.front, request.model, request.effort, request.max_tokens) == (1, "m", "high", 7)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.min_p) == (0.5, 0.9, 0.1)
    assert (request.sampling.top_k, request.sampling.seed) == (3, 4)
    assert (request.calls_allowed, request.parallel_calls, [tool.name for tool in request.tools]) == (
        False,
        False,
        ["get_weather"],
    )
    assert ask(max_tokens=9).request.max_tokens == 9
    assert ask(instructions="").request.front == 0


def test_thinking_is_on_unless_something_says_otherwise() -> None:
    off = ServerConfig(think_default=False)
    assert ask().request.thinking
    assert not ask(config=off).request.thinking
    assert ask(config=off, reasoning={"effort": "low"}).request.thinking
    assert not ask(reasoning={"effort": "none"}).request.thinking
    assert not ask(model="deepseek-chat").request.thinking
    assert not ask(think=False).request.thinking
    assert not ask(thinking={"type": "disabled"}).request.thinking


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "compaction"}], "instructions": "x"}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": "plain"}, "text"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"max_output_tokens": "8"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"reasoning": {"effort": "herculean"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 30}, "top_logprobs"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ],
)
def test_a_wrong_or_unsupported_field_is_named(body: dict[str, Any], param: str) -> None:
    error = refused(400, param, **body)
    assert param in error.message
    assert (error.message == "missing input") == (body == {"input": None})


def test_fields_that_change_nothing_are_ignored() -> None:
    plain = ask().request
    request = ask(
        store=False, include=["reasoning.encrypted_content"], truncation="auto", user="u", metadata={"a": "b"},
        service_tier="flex", prompt_cache_key="k", safety_identifier="s", client_metadata={"x": 1}, stream_options={},
        max_tool_calls=3, text={"format": {"type": "text"}, "verbosity": "low"}, background=False, conversation=None,
        previous_response_id=None, top_logprobs=0, tool_choice="auto", n=1, something_new=[1],
    ).request  # fmt: skip
    assert request.messages == plain.messages
    assert (request.sampling, request.tools, request.thinking) == (plain.sampling, (), True)


def test_instructions_and_developers_make_the_system_prompt() -> None:
    items = [{"role": "developer", "content": "Be kind."}, USER, {"role": "developer", "content": "Now stop."}]
    text = str(chat.render(ask(input=items, instructions="Be brief.").request.messages))
    assert "Be brief.\n\nBe kind.<｜User｜>hi" in text
    # What comes later stays in its place, and is never forgotten.
    assert text.index("Now stop.") > text.index("hi")


def test_the_request_of_a_coding_agent_in_the_middle_of_its_work() -> None:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    items = [
        said("developer", "<permissions>"),
        said("user", "<environment>"),
        said("user", "Fix it."),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "***", "call_id": "call_2", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
    ]
    tools = [{"type": "function", "name": "shell"}, PATCH, {"type": "web_search"}, {"type": "local_shell"}]
    request = ask(
        instructions="You are an agent.", input=items, tools=tools, tool_choice="auto", parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"}, store=False, stream=True, prompt_cache_key="x",
        include=["reasoning.encrypted_content"], client_metadata={}, text={"verbosity": "low"},
    ).request  # fmt: skip
    assert [tool.name for tool in request.tools] == ["shell", "apply_patch", "web_search", "local_shell"]
    assert [message.role for message in request.messages] == [
        "system", "system", "user", "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    text = str(chat.render(request.messages))
    start = "<｜begin▁of▁sentence｜>You are an agent.\n\n<permissions><｜User｜><environment>\n\nFix it.<｜Assistant｜>"
    assert text.startswith(start)
    assert "Looking.\n\n<｜DSML｜tool_calls>" in text
    assert '<｜DSML｜parameter name="input" string="true">***</｜DSML｜parameter>' in text
    end = "<tool_result>a.txt</tool_result>\n\n<tool_result>ok</tool_result><｜Assistant｜><think>"
    assert text.endswith(end)


def test_earlier_answers_are_continued_by_their_id() -> None:
    turns = TurnMemory()
    earlier = (Message(role="user", content="first"), Message("why", "one"))
    turns.put(Turn(earlier, "resp_1"))
    request = ask(turns, input="second", previous_response_id="resp_1", instructions="Be brief.").request
    system = Message(role="system", content="Be brief.")
    assert request.messages == (system, *earlier, Message(role="user", content="second"))
    assert request.front == 1
    error = refused(409, "previous_response_id", previous_response_id="resp_2")
    assert "resp_2" in error.message
    assert error.headers() == {"x-should-retry": "false"}
    # An empty id names nothing.
    assert len(ask(previous_response_id="").request.messages) == 1


def test_results_alone_continue_the_turn_of_their_calls() -> None:
    turns = TurnMemory()
    question = Message(role="user", content="Weather?")
    answer = Message("need it", "", (ToolCall("get_weather", "{}", "call_1"),))
    turns.put(Turn((question, answer), "resp_1"))
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    told = Message(role="tool", tool_call_id="call_1", content="sunny")
    assert ask(turns, input=[result]).request.messages == (question, answer, told)
    assert ask(turns, input=[result], previous_response_id="resp_1").request.messages == (question, answer, told)
    error = refused(400, "input", input=[result])
    assert error.message == (
        "Responses continuation state is not available for call_id call_1; retry by replaying the full input history"
    )
    with pytest.raises(ApiError) as caught:
        ask(turns, input=[USER, result])
    assert caught.value.status == 409
    assert caught.value.message == (
        "Responses continuation state is not available; retry by replaying the full input history"
    )


def test_tools_that_searches_have_found_are_active() -> None:
    found = [WEATHER, NAMESPACE]
    items = [
        USER,
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": found},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": found},
    ]

    def names(**body: Any) -> list[str]:
        return [tool.name for tool in ask(**body).request.tools]

    assert names(input=items, tools=[SEARCH]) == ["tool_search", "get_weather", "mcp__db__query"]
    assert names(input=items, tools=[WEATHER]) == ["get_weather", "mcp__db__query"]
    assert refused(400, "input", input=[*items, {**items[2], "tools": [{"type": "function", "name": 5}]}])
    # Continued by id, the search is in what is remembered.
    turns = TurnMemory()
    messages = ask(input=items).request.messages
    turns.put(Turn((*messages, Message("", "done")), "resp_1"))
    more = {"turns": turns, "input": "go on", "previous_response_id": "resp_1"}
    assert names(**more, tools=[SEARCH]) == ["tool_search", "get_weather", "mcp__db__query"]
    assert names(**more, tools=[PATCH]) == ["apply_patch"]


TEXT = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KINDS = [
    "message", "reasoning", "function_call", "custom_tool_call", "local_shell_call", "tool_search_call",
    "function_call_output", "custom_tool_call_output", "tool_search_output", "web_search_call_output", "compaction",
]  # fmt: skip
PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "summary_text", "input_image"]), "text": TEXT})
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "status": st.just("completed") | JSON,
        "tools": st.just(TOOLS) | JSON,
        **dict.fromkeys(["content", "summary", "output"], st.lists(PART, max_size=2) | TEXT | JSON),
        **dict.fromkeys(["call_id", "id"], st.sampled_from(["a", "b"]) | JSON),
        **dict.fromkeys(["name", "namespace", "arguments", "input", "action", "result"], TEXT | JSON),
    },
)
FIELDS = {name: JSON for name in ResponsesRequest.model_fields if name != "input"}


@settings(max_examples=150)
@given(
    TEXT | JSON | st.lists(ITEM, min_size=1, max_size=4),
    st.fixed_dictionaries({}, optional={"tools": st.just(TOOLS) | JSON, "instructions": TEXT}),
    st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON, max_size=2),
)
def test_any_body_is_read_or_refused(value: Any, likely: dict[str, Any], fields: dict[str, Any]) -> None:
    refusal = None
    try:
        request = ask(**{**likely, **fields, "input": value}).request
    except ApiError as error:
        refusal = error
    if refusal is None:
        assert chat.render(request.messages, request.tools)
    else:
        assert (refusal.status in (400, 409), bool(refusal.param)) == (True, True)
