"""Calls that have to come and texts that follow a schema, on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from server_harness import WEATHER, Running, call_pieces, line, random_engine, scripted, serving, tokenizer

from ds4.chat.dsml import END_THINK_INJECTION
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.constraints import Constraint
from ds4.server.scripted import ScriptedChooser

EOS = "<｜end▁of▁sentence｜>"
HELLO: Any = [{"role": "user", "content": "Hello"}]
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Any = [WEATHER, TIME]
ROME = call_pieces(("get_weather", [("city", "Rome", True)]))
NOW = call_pieces(("get_time", []))
THOUGHT = ["Hm.", "</think>"]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
}


def obeying(*pieces: str) -> dict[str, Any]:
    return line(*pieces, obey=True)


def choice_of(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post({"messages": HELLO, "tools": TOOLS, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@contextmanager
def anthropic_client(server: Running) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False, verify=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, http_client=http) as client:
        yield client


def names(choice: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]


def test_text_before_a_call_that_has_to_come_is_passed_over() -> None:
    """The model wants to chat, and then to stop; its reasoning is its own."""
    for thinking in (True, False):
        thought = THOUGHT if thinking else []
        with scripted(obeying(*thought, "No", " thanks", EOS, *ROME)) as server:
            choice = choice_of(server, tool_choice="required", thinking=thinking)
            assert (names(choice), choice["finish_reason"]) == (["get_weather"], "tool_calls")
            assert not choice["message"]["content"]
            assert choice["message"].get("reasoning_content", "") == ("Hm." if thinking else "")
            assert names(choice_of(server, tool_choice="auto", thinking=thinking)) == []


@pytest.mark.parametrize(
    "tool_choice",
    [
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "function", "name": "get_time"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
    ],
)
def test_only_the_named_tool_can_be_called(tool_choice: Any) -> None:
    with scripted(obeying(*THOUGHT, *NOW[:8], ' name="get_weather"', *NOW[8:])) as server:
        choice = choice_of(server, tool_choice=tool_choice)
        assert names(choice) == ["get_time"]


def test_no_parallel_calls_is_one_call_in_one_block() -> None:
    two = call_pieces(("get_time", []), ("get_time", []))
    with scripted(obeying("</think>", *two)) as server:
        assert names(choice_of(server, tool_choice="required", parallel_tool_calls=False)) == ["get_time"]
        assert names(choice_of(server, tool_choice="required")) == ["get_time", "get_time"]


def test_a_call_begun_in_the_reasoning_is_a_call_that_had_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes the reasoning; from there on nothing but the call may come."""
    counted: list[int] = []
    monkeypatch.setattr(ScriptedChooser, "count", lambda self, tokens: counted.extend(tokens))
    with scripted(obeying("Hm.", *NOW[:5], "No", *NOW[1:])) as server:
        choice = choice_of(server, tool_choice="required")
        assert names(choice) == ["get_time"]
        assert choice["message"]["reasoning_content"].startswith("Hm.")
        assert not choice["message"]["content"]
    # They count for the penalties like sampled ones.
    assert counted == tokenizer().encode_chat(END_THINK_INJECTION)


def test_reasoning_that_cannot_be_closed_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never goes on without its rules."""
    monkeypatch.setattr(Constraint, "injected", lambda self, tokens: False)
    with scripted(obeying("Hm.", *NOW[:5], "No", *NOW[1:])) as server:
        body = {"messages": HELLO, "tools": [WEATHER, TIME], "tool_choice": "required"}
        answer = server.post(body)
        assert answer.status_code == 400
        assert "its reasoning could not be closed" in answer.json()["error"]["message"]
        assert server.worker.wait_idle(30)


def test_anthropic_clients_force_calls() -> None:
    tools: Any = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    with scripted(obeying(*THOUGHT, "No", EOS, *ROME)) as server, anthropic_client(server) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
            answer = client.messages.create(
                model="m", max_tokens=100, messages=HELLO, tools=tools, tool_choice=choice, thinking=thinking
            )
            assert [block.type for block in answer.content] == ["thinking", "tool_use"]
            assert answer.stop_reason == "tool_use"


def test_responses_clients_force_calls() -> None:
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    with scripted(obeying(*THOUGHT, "No", EOS, *ROME)) as server:
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            answer = server.client.responses.create(model="m", input="x", tools=tools, tool_choice=choice)
            assert [item.type for item in answer.output] == ["function_call"]
            assert answer.tool_choice == choice or answer.tool_choice.model_dump() == choice  # type: ignore[union-attr]
        space: Any = {"type": "namespace", "name": "get_", "description": "", "tools": [{"name": "weather"}]}
        named: Any = {"type": "function", "namespace": "get_", "name": "weather"}
        answer = server.client.responses.create(model="m", input="x", tools=[space], tool_choice=named)
        assert [item.type for item in answer.output] == ["function_call"]


# ---- arguments ------------------------------------------------------------------------------------------------------


def strict_weather(strict: bool | None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize(("strict", "flag"), [(True, False), (None, True), (False, True), (None, False)])
def test_strict_tools_get_arguments_that_follow_their_schema(strict: bool | None, flag: bool) -> None:
    begin = ROME[: ROME.index("R")]
    pieces = [*begin, "Paris", "Oslo", *ROME[ROME.index("R") + 4 :]]
    with scripted(obeying("</think>", "Let me see.", *pieces), strict_tools=flag) as server:
        choice = choice_of(server, tools=[strict_weather(strict)])
        assert choice["message"]["content"] == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        enforced = strict or flag
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo" if enforced else "ParisOslo"}


def test_a_strict_tool_of_a_namespace_is_strict_and_looks_to_the_model_like_any_other() -> None:
    pieces = call_pieces(("geo_weather", [("city", "Rome", True)]))
    begin = pieces[: pieces.index("R")]
    parameters = strict_weather(True)["function"]["parameters"]
    prompts = set()
    for strict in (True, False):
        inner = {"type": "function", "name": "weather", "parameters": parameters, "strict": strict}
        tools = [{"type": "namespace", "name": "geo_", "tools": [inner]}]
        with scripted(obeying("</think>", *begin, "Paris", "Oslo", *pieces[pieces.index("R") + 4 :])) as server:
            answer = server.post({"input": "Hello", "tools": tools}, "/v1/responses").json()
            (call,) = (item for item in answer["output"] if item["type"] == "function_call")
            assert json.loads(call["arguments"]) == {"city": "Oslo" if strict else "ParisOslo"}
            prompts.add(answer["usage"]["input_tokens"])
    assert len(prompts) == 1


def test_a_schema_that_cannot_be_enforced_names_the_tool() -> None:
    tool = strict_weather(True)
    tool["function"]["parameters"]["properties"]["city"] = {"type": "string", "not": {"const": "x"}}
    with scripted(obeying("</think>", "x")) as server:
        for stream in (False, True):
            answer = server.post({"messages": HELLO, "tools": [tool], "stream": stream})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "tools"
            assert error["message"].startswith("tools: ")
            assert "get_weather" in error["message"]
        assert server.worker.wait_idle(30)


def test_a_schema_that_leads_nowhere_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^x[a-c]*(?:&[a-z]+)$", "format": "uuid"}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    config = ServerConfig(ctx=512, max_tokens=200)
    with serving(Backend(random_engine(), "m"), config) as server:
        body = {"messages": HELLO, "thinking": False, "tools": [tool], "tool_choice": "required", "temperature": 0}
        answer = server.post(body)
        assert answer.status_code == 400
        assert "cannot follow its schema" in answer.json()["error"]["message"]
        assert "cannot follow its schema" in server.post({**body, "stream": True}).text
        flat = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
        responses = {**body, "input": "Hello", "tools": [flat], "stream": True}
        *_, last, _ = server.post(responses, "/v1/responses").text.split("\n\n")
        assert json.loads(last.partition("data: ")[2])["response"]["error"]["code"] == "invalid_prompt"
        assert server.post({"messages": HELLO, "max_tokens": 2}).status_code == 200
    assert "Traceback" not in caplog.text


# ---- texts ----------------------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    old: bool


ADA = ["Sure: ", "{", '"name"', ":", " ", '"Ada"', ",", '"old"', ": ", "maybe", "true", "}", " Done."]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def test_a_text_that_follows_a_schema() -> None:
    with scripted(obeying(*THOUGHT, *ADA)) as server, anthropic_client(server) as client:
        choice = choice_of(server, response_format=FORMAT, tools=[])
        assert json.loads(choice["message"]["content"]) == {"name": "Ada", "old": True}
        assert choice["finish_reason"] == "stop"
        parsed = server.client.chat.completions.parse(model="m", messages=HELLO, response_format=Person)
        assert parsed.choices[0].message.parsed == Person(name="Ada", old=True)
        reply = server.client.responses.parse(model="m", input="x", text_format=Person)
        assert reply.output_parsed == Person(name="Ada", old=True)
        assert reply.text is not None
        assert reply.text.format is not None
        assert reply.text.format.type == "json_schema"
        body: Any = {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}
        message = client.messages.create(
            model="m", max_tokens=99, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}, **body
        )
        assert json.loads(message.content[-1].text) == {"name": "Ada", "old": True}  # type: ignore[union-attr]


def test_any_object_and_the_schema_in_the_prompt(tmp_path: Any) -> None:
    trace = tmp_path / "trace"
    pieces = [*THOUGHT, "[", "{", '"a"', ": ", "1", "}"]
    with scripted(obeying(*pieces), trace=trace) as server:
        choice = choice_of(server, response_format={"type": "json_object"}, tools=[])
        assert choice["message"]["content"] == '{"a": 1}'
        choice_of(server, response_format=FORMAT, tools=[])
    first, second = [event["text"] for event in map(json.loads, trace.read_text().splitlines()) if "replay" in event]
    assert "Response Format" not in first
    assert json.dumps(PERSON) in second


# ---- a model that would write anything ------------------------------------------------------------------------------


def test_a_model_that_writes_nonsense_is_held_to_everything() -> None:
    config = ServerConfig(ctx=1024, strict_tools=True)
    with serving(Backend(random_engine(), "m"), config) as server:
        for seed in range(1, 4):
            common = {"seed": seed, "thinking": False, "max_tokens": 300, "min_p": 0}
            choice = choice_of(
                server, tools=[strict_weather(None), TIME], tool_choice="required", parallel_tool_calls=False, **common
            )
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} if call["function"]["name"] == "get_time" else arguments["city"] in ("Rome", "Oslo")
            choice = choice_of(server, tools=[], response_format=FORMAT, **common)
            value = json.loads(choice["message"]["content"])
            assert (value["name"] in ("Ada", "Bob"), type(value["old"]), len(value)) == (True, bool, 2)
            assert choice["finish_reason"] == "stop"
