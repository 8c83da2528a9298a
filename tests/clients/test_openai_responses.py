"""The official openai client against the Responses API: whole, streamed, with tools, over several turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel
from server_harness import Running, call_pieces, line, random_engine, scripted, serving

from ds4.server.backend import Backend
from ds4.server.config import ServerConfig

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = call_pieces(("get_weather", [("city", "Ro me", True), ("days", "[ 1,  2 ]", False)]))
EOS, USER, THINK = "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜><think>"


@pytest.fixture(scope="module")
def model() -> Iterator[Running]:
    """A server over the real graph with random weights."""
    with serving(Backend(random_engine(), "ds4-custom"), ServerConfig(ctx=4096)) as running:
        yield running


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def evaluated(response: Response) -> int:
    """Tokens of the prompt and of the answer."""
    assert response.usage is not None
    return response.usage.input_tokens + response.usage.output_tokens


def live_text(server: Running) -> str:
    """The text of the only live session."""
    assert server.worker.wait_idle(30)
    (session,) = server.worker.sessions()
    return session.engine.tokenizer.decode(session.tokens).decode()


def the_call(response: Response) -> ResponseFunctionToolCall:
    (call,) = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    return call


def result_of(call: ResponseFunctionToolCall, text: str) -> Any:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def streamed(server: Running, **body: Any) -> Response:
    """The final response of the stream helper, after a look at its events."""
    with server.client.responses.stream(**body) as stream:
        text, arguments = "", ""
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot.endswith(event.delta)
            elif event.type == "response.output_text.done":
                assert event.text == text
            elif event.type == "response.function_call_arguments.delta":
                arguments += event.delta
                assert event.snapshot == arguments
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == arguments
                arguments = ""
        final = stream.get_final_response()
    assert final.output_text == text
    return final


def ask(server: Running, stream: bool, **body: Any) -> Response:
    body = {"model": "ds4-tiny", **body}
    return streamed(server, **body) if stream else server.client.responses.create(**body)


# ---- one turn -------------------------------------------------------------------------------------------------------


def test_a_real_model_says_the_same_streamed_and_not(model: Running) -> None:
    for thinking in (False, True):
        body: dict[str, Any] = {
            "model": "ds4-custom", "input": [{"role": "user", "content": "Hi 😀!"}], "instructions": "Be brief.",
            "temperature": 0, "max_output_tokens": 24, "reasoning": {"summary": "auto"},
            "extra_body": {"think": thinking},
        }  # fmt: skip
        whole = model.client.responses.create(**body)
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert (whole.instructions, whole.model) == ("Be brief.", "ds4-custom")
        assert whole.usage is not None
        assert whole.usage.output_tokens == 24
        events = list(model.client.responses.create(**body, stream=True))
        last = events[-1]
        assert last.type == "response.incomplete"
        assert [(item.type, item.to_dict() | {"id": ""}) for item in last.response.output] == [
            (item.type, item.to_dict() | {"id": ""}) for item in whole.output
        ]
        assert cached(last.response) == whole.usage.input_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_text_reasoning_and_usage(stream: bool) -> None:
    with scripted(line("plan", " it", "</think>", "Hello", " there", "!"), ctx=1024) as server:
        response = ask(server, stream, input="Hi", reasoning={"effort": "high", "summary": "detailed"})
        assert (response.status, response.output_text) == ("completed", "Hello there!")
        reasoning, message = response.output
        assert isinstance(reasoning, ResponseReasoningItem)
        assert reasoning.summary[0].text == "plan it"
        assert message.type == "message"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == 2
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        hidden = ask(server, stream, input="Hi")
        assert [item.type for item in hidden.output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_is_an_empty_text(stream: bool) -> None:
    with scripted(line("thought", "</think>"), ctx=1024) as server:
        response = ask(server, stream, input="Hi")
        assert (response.status, response.output_text) == ("completed", "")
        # It is a turn like any other: sent back, the prompt goes on behind it.
        first: Any = {"role": "user", "content": "Hi"}
        again = ask(server, stream, input=[first, *response.output, {"role": "user", "content": "Well?"}])
        assert cached(again) == evaluated(response)


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str
    days: list[int]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_parsed_by_the_helpers(stream: bool) -> None:
    block = call_pieces(("GetWeather", [("city", "Rome", True), ("days", "[1]", False)]))
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    tools = [{"type": "function", **tools[0]["function"]}]
    with scripted(line("</think>", "Let me see.", *block), ctx=2048) as server:
        if stream:
            response: Any = streamed(server, model="m", input="Rome?", tools=tools)
        else:
            response = server.client.responses.parse(model="m", input="Rome?", tools=tools)
        message, call = response.output
        assert message.content[0].text == "Let me see."
        assert call.name == "GetWeather"
        assert json.loads(call.arguments) == {"city": "Rome", "days": [1]}
        assert call.parsed_arguments == {"city": "Rome", "days": [1]}


def test_custom_tools_and_tools_of_a_namespace() -> None:
    block = call_pieces(("apply_patch", [("input", "*** a\n+ b", True)]), ("mcp__db__query", [("sql", "x", True)]))
    tools: Any = [
        {"type": "custom", "name": "apply_patch", "description": "Changes files"},
        {
            "type": "namespace",
            "name": "mcp__db__",
            "description": "A database",
            "tools": [{"type": "function", "name": "query", "parameters": {"type": "object"}, "strict": False}],
        },
    ]
    with scripted(line("</think>", *block), line("</think>", "Done."), ctx=2048) as server:
        events = list(server.client.responses.create(model="m", input="Go", tools=tools, stream=True))
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == "*** a\n+ b"
        last = events[-1]
        assert last.type == "response.completed"
        patch, query = last.response.output
        assert patch.type == "custom_tool_call"
        assert (patch.name, patch.input) == ("apply_patch", "*** a\n+ b")
        assert query.type == "function_call"
        assert (query.namespace, query.name) == ("mcp__db__", "query")
        replay: Any = [
            {"role": "user", "content": "Go"},
            patch,
            query,
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"},
            {"type": "function_call_output", "call_id": query.call_id, "output": "1 row"},
        ]
        second = server.client.responses.create(model="m", input=replay, tools=tools)
        assert second.output_text == "Done."
        # Both calls were put back byte for byte.
        assert cached(second) >= evaluated(last.response) - 1


# ---- several turns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("template", ["official", "ds4"])
def test_a_tool_loop_by_full_replay_stays_live(stream: bool, summary: Any, template: str) -> None:
    script = [
        line("need", " the", " tool", "</think>", "Let me", " see.", *CALL),
        line("It is sunny", "</think>", "Sunny", "!"),
        line("</think>", "Bye."),
    ]
    with scripted(*script, template=template) as server:
        options: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief.", "reasoning": {"summary": summary}}
        items: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
        first = ask(server, stream, input=items, **options)
        call = the_call(first)
        assert (first.output_text, call.name) == ("Let me see.", "get_weather")
        assert json.loads(call.arguments) == {"city": "Ro me", "days": [1, 2]}
        assert cached(first) == 0

        items += [*first.output, result_of(call, "sunny")]
        second = ask(server, stream, input=items, **options)
        assert second.output_text == "Sunny!"
        # The last token of the first turn ends its block; nothing before it is computed again.
        assert cached(second) >= evaluated(first) - 1
        written = "need the tool</think>Let me see." + "".join(CALL)
        assert f"{THINK}{written}{EOS}{USER}<tool_result>sunny</tool_result>{THINK}" in live_text(server)

        items += [*second.output, {"role": "user", "content": "Thanks."}]
        third = ask(server, stream, input=items, **options)
        assert third.output_text == "Bye."
        assert cached(third) >= evaluated(second)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_by_previous_response_id_keeps_the_hidden_reasoning(stream: bool) -> None:
    script = [
        line("need", " the", " tool", "</think>", "Let me", " see.", *CALL),
        line("It is sunny", "</think>", "Sunny", "!"),
        line("</think>", "Bye."),
    ]
    with scripted(*script) as server:
        options: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief."}
        first = ask(server, stream, input="Weather in Rome?", **options)
        assert first.id.startswith("resp_")
        result = result_of(the_call(first), "sunny")
        second = ask(server, stream, input=[result], previous_response_id=first.id, **options)
        assert (second.output_text, second.previous_response_id) == ("Sunny!", first.id)
        assert cached(second) >= evaluated(first) - 1
        third = ask(server, stream, input="Thanks.", previous_response_id=second.id, **options)
        assert third.output_text == "Bye."
        assert cached(third) >= evaluated(second)
        text = live_text(server)
        assert "need the tool</think>Let me see." + "".join(CALL) in text
        assert text.count("Be brief.") == 1


def test_results_alone_continue_their_call() -> None:
    with scripted(line("hm", "</think>", *CALL), line("</think>", "Sunny!")) as server:
        first = ask(server, False, input="Weather in Rome?", tools=[WEATHER])
        result = result_of(the_call(first), "sunny")
        second = ask(server, True, input=[result], tools=[WEATHER])
        assert second.output_text == "Sunny!"
        assert cached(second) >= evaluated(first) - 1
        unknown = result | {"call_id": "call_0"}
        with pytest.raises(openai.BadRequestError, match="not available for call_id call_0; retry by replaying"):
            ask(server, False, input=[unknown], tools=[WEATHER])


def test_instructions_belong_to_one_request() -> None:
    with scripted(line("</think>", "Arr."), line("</think>", "Yes.")) as server:
        first = ask(server, False, input="Hi", instructions="You are a pirate.")
        second = ask(server, False, input="Again", previous_response_id=first.id, instructions="You are a butler.")
        assert (first.output_text, second.output_text) == ("Arr.", "Yes.")
        assert (first.instructions, second.instructions) == ("You are a pirate.", "You are a butler.")
        assert server.worker.wait_idle(30)
        texts = [s.engine.tokenizer.decode(s.tokens).decode() for s in server.worker.sessions()]
        (text,) = [text for text in texts if "butler" in text]
        assert "pirate" not in text
        assert f"You are a butler.{USER}Hi<｜Assistant｜></think>Arr.{EOS}{USER}Again" in text


def test_a_branch_from_an_earlier_response() -> None:
    with scripted(line("</think>", "One."), line("</think>", "Two."), line("</think>", "Three.")) as server:
        first = ask(server, False, input="word " * 40)
        second = ask(server, False, input="Go on.", previous_response_id=first.id)
        other = ask(server, False, input="Or not.", previous_response_id=first.id)
        assert (second.output_text, other.output_text) == ("Two.", "Three.")
        assert first.usage is not None
        assert cached(other) >= first.usage.input_tokens - 1


def test_a_response_that_is_gone_is_a_409_that_is_not_repeated() -> None:
    with scripted(line("</think>", "hi")) as server:
        retrying = server.client.with_options(max_retries=3)
        with pytest.raises(openai.ConflictError, match="previous_response_id") as caught:
            retrying.responses.create(model="m", input="x", previous_response_id="resp_0")
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert caught.value.param == "previous_response_id"


# ---- limits and failures --------------------------------------------------------------------------------------------


def test_incomplete_and_failed_streams() -> None:
    script = [line("a", "</think>", "b", then="repeat"), line("</think>", "x", "y", fail_at=3)]
    with scripted(*script, ctx=1024) as server:
        kinds = []
        with server.client.responses.stream(model="m", input="x", max_output_tokens=5) as stream:
            kinds += [event.type for event in stream]
            with pytest.raises(RuntimeError, match=r"response\.completed"):
                stream.get_final_response()
        assert kinds[-1] == "response.incomplete"
        *_, last = server.client.responses.create(model="m", input="x", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert (last.response.error.code, last.response.error.message) == ("server_error", "the script fails at step 3")
        with pytest.raises(openai.InternalServerError, match="the script fails at step 3"):
            server.client.responses.create(model="m", input="x")


def test_what_is_not_supported_is_refused_with_its_name() -> None:
    image: Any = {"type": "input_image", "image_url": "data:image/png;base64,xx", "detail": "auto"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"role": "user", "content": [image]}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
    ]
    with scripted(line("</think>", "hi")) as server:
        for body, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                server.client.responses.create(**{"model": "m", "input": "x", **body})
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError, match="unknown endpoint"):
            server.client.responses.retrieve("resp_1")


def test_the_async_client_streams() -> None:
    async def collect(url: str) -> list[str]:
        http = httpx.AsyncClient(timeout=60, verify=False, trust_env=False)
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http) as client:
            async with client.responses.stream(model="m", input="x") as stream:
                texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert final.output_text == "".join(texts)
            return texts

    with scripted(line("</think>", "a", "b")) as server:
        assert asyncio.run(collect(server.url)) == ["a", "b"]


# ---- the kinds of requests that checks of this API make -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "message", "role": "user", "content": "Say hello."}]},
        {
            "input": [
                {"type": "message", "role": "system", "content": "You are a pirate."},
                {"type": "message", "role": "user", "content": "Say hello."},
            ]
        },
        {
            "input": [
                {"type": "message", "role": "user", "content": "My name is Alice."},
                {"type": "message", "role": "assistant", "content": "Hello Alice!"},
                {"type": "message", "role": "user", "content": "What is my name?"},
            ]
        },
    ],
    ids=["basic", "system", "multi-turn"],
)
def test_conversations_of_plain_messages(body: dict[str, Any], stream: bool, tmp_path: Any) -> None:
    trace = tmp_path / "trace"
    with scripted(line("</think>", "Hello."), trace=trace) as server:
        response = ask(server, stream, **body)
        assert (response.status, response.output_text) == ("completed", "Hello.")
        Response.model_validate(response.to_dict())
    events = [json.loads(text) for text in trace.read_text().splitlines()]
    prompt = next(event["text"] for event in events if event["event"] == "prompt")
    at = [prompt.index(item["content"]) for item in body["input"]]
    assert at == sorted(at)
