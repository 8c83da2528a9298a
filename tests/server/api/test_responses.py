"""The Responses API on the wire: streams and whole answers say the same, and both what the official types expect."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_harness import Running, call_pieces, line, script_backend, scripted

from ds4 import chat
from ds4.server.app import create_app
from ds4.server.config import ServerConfig
from ds4.server.worker import Worker

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files", "format": {"type": "text"}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": {"type": "object"}}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__db__",
    "description": "A database",
    "tools": [{"type": "function", "name": "query", "parameters": {"type": "object"}}],
}
TOOLS = [WEATHER, PATCH, SEARCH, NAMESPACE]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("plan", " it", "</think>", "Hi", " there"), ctx=2048) as running:
        yield running


def read_stream(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the official types."""
    events = []
    for number, block in enumerate(text.strip("\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert list(event)[:2] == ["type", "sequence_number"]
        assert event["sequence_number"] == number
        assert name == f"event: {event['type']}"
        assert EVENTS.validate_python(event).type == event["type"]
        events.append(event)
    return events


def add_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end of a stream, after checks that its parts add up to it."""
    created, *middle, last = events
    assert created["type"] == "response.created"
    assert created["response"]["status"] == "in_progress"
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["id"] == created["response"]["id"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    ended = 0
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            assert not items
        elif kind == "output_item.added":
            assert event["output_index"] == len(items) == ended
            items.append(event["item"])
            texts.append("")
        else:
            assert event["output_index"] == len(items) - 1
            item = items[-1]
            assert event.get("item_id", item["id"]) == item["id"]
            if kind.endswith(".delta"):
                assert event["delta"]
                texts[-1] += event["delta"]
            elif kind == "output_item.done":
                ended += 1
                assert event["item"] == response["output"][len(items) - 1]
                assert event["item"]["id"] == item["id"]
            elif kind.endswith(".done"):
                part = event.get("part", event)
                assert next(part[key] for key in ("text", "arguments", "input") if key in part) == texts[-1]
    assert [item["id"] for item in response["output"]] == [item["id"] for item in items]
    assert [text_of(item) for item in response["output"] if item["type"] != "tool_search_call"] == [
        text for text, item in zip(texts, items, strict=True) if item["type"] != "tool_search_call"
    ]
    if response["status"] != "failed":
        assert ended == len(items)
    return response


def text_of(item: dict[str, Any]) -> Any:
    if item["type"] == "reasoning":
        return "".join(part["text"] for part in item["summary"])
    if item["type"] == "message":
        return "".join(part["text"] for part in item["content"])
    return item["input"] if item["type"] == "custom_tool_call" else item["arguments"]


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from answer to answer."""
    assert Response.model_validate(response).id.startswith("resp_")
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    kept = {"status", "error", "incomplete_details", "usage"}
    return {**{key: response[key] for key in kept}, "output": items}


def both(server: Running, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer whole and streamed."""
    body = {"input": "hi", **body}
    whole = server.post(body, PATH)
    assert whole.status_code == 200, whole.text
    streamed = server.post({**body, "stream": True}, PATH)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    return whole.json(), add_up(read_stream(streamed.text))


def test_a_response_repeats_its_request(server: Running) -> None:
    fields = {
        "model": "some-model", "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50,
        "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "metadata": {"a": "b"}, "user": "u",
        "reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}, "store": False,
        "prompt_cache_key": "key", "safety_identifier": "me", "max_tool_calls": 4,
    }  # fmt: skip
    for response in both(server, **fields):
        parsed = Response.model_validate(response)
        assert parsed.tools[0].type == "function"
        expected = {
            **fields,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "object": "response",
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "background": False,
            "truncation": "disabled",
            "top_logprobs": 0,
        }
        assert {key: response[key] for key in expected} == expected
        assert response["created_at"] <= response["completed_at"]
    (plain, _) = both(server)
    assert (plain["model"], plain["tools"], plain["tool_choice"]) == ("ds4-tiny", [], "auto")
    assert (plain["parallel_tool_calls"], plain["temperature"], plain["top_p"]) == (True, 1.0, 1.0)
    assert (plain["instructions"], plain["metadata"], plain["reasoning"]["summary"]) == (None, {}, None)
    (chat_shaped, _) = both(server, tools=[{"type": "function", "function": {"name": "f"}}], metadata=["odd"])
    nothing = {"description": None, "parameters": None, "strict": None}
    assert chat_shaped["tools"] == [{"type": "function", "name": "f", **nothing}]
    assert chat_shaped["metadata"] == {}


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed", "none", None])
@pytest.mark.parametrize("field", ["summary", "generate_summary"])
def test_reasoning_is_shown_on_request_only(server: Running, field: str, summary: str | None) -> None:
    for response in both(server, reasoning={field: summary}):
        shown = [text_of(item) for item in response["output"] if item["type"] == "reasoning"]
        assert shown == (["plan it"] if summary in ("auto", "concise", "detailed") else [])
        assert response["output"][-1]["content"] == [
            {"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}
        ]
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_usage_counts_what_was_live(server: Running) -> None:
    first, second = both(server, input="count me")
    usage = first["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == 5
    details = second["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == usage["input_tokens"] - 1
    assert details["cached_tokens"] + details["cache_write_tokens"] == second["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("limit", "items"),
    [
        (0, []),
        (2, [("reasoning", "incomplete")]),
        (4, [("reasoning", "completed"), ("message", "incomplete")]),
    ],
)
def test_a_limit_makes_a_response_incomplete(server: Running, limit: int, items: list[tuple[str, str]]) -> None:
    whole, streamed = both(server, max_output_tokens=limit, reasoning={"summary": "auto"})
    for response in (whole, streamed):
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [(item["type"], item["status"]) for item in response["output"]] == items
    hidden, _ = both(server, max_output_tokens=2)
    assert hidden["output"] == []


def test_calls_of_every_kind_come_as_the_client_knows_them() -> None:
    block = call_pieces(
        ("get_weather", [("city", "Zürich 😀", True)]),
        ("apply_patch", [("input", '*** "Begin"\n\\x', True)]),
        ("tool_search", [("query", "db", True), ("limit", "3", False)]),
        ("mcp__db__query", []),
    )
    with scripted(line("</think>", "On it.", *block), ctx=2048) as server:
        for response in both(server, tools=TOOLS):
            assert response["status"] == "completed"
            message, weather, patch, search, query = response["output"]
            assert text_of(message) == "On it."
            assert (weather["type"], weather["name"]) == ("function_call", "get_weather")
            assert json.loads(weather["arguments"]) == {"city": "Zürich 😀"}
            assert (patch["type"], patch["input"]) == ("custom_tool_call", '*** "Begin"\n\\x')
            assert (search["type"], search["arguments"]) == ("tool_search_call", {"query": "db", "limit": 3})
            assert (query["type"], query["namespace"], query["name"]) == ("function_call", "mcp__db__", "query")
            ids = [call["call_id"] for call in response["output"][1:]]
            assert len(set(ids)) == 4
            assert all(id.startswith("call_") and len(id) == 5 + 32 for id in ids)


def test_arguments_leave_as_they_are_sampled() -> None:
    block = call_pieces(("get_weather", [("city", "Rome", True)]), ("apply_patch", [("input", "abc", True)]))
    with scripted(line("</think>", *block), ctx=2048) as server:
        events = read_stream(server.post({"input": "x", "tools": TOOLS, "stream": True}, PATH).text)
        deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert [delta for delta in deltas if len(delta) == 1 and delta.isalpha()] == ["o", "m", "e"]
        assert [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"] == ["a", "b", "c"]


def test_a_call_that_a_limit_cuts_is_valid_json_and_incomplete() -> None:
    block = call_pieces(("get_weather", [("city", "Zürich", True)]))
    with scripted(line("</think>", *block), ctx=2048) as server:
        for limit in range(14, len(block)):
            whole, streamed = both(server, tools=[WEATHER], max_output_tokens=limit)
            assert whole["status"] == streamed["status"] == "incomplete"
            (call,) = streamed["output"]
            assert (call["type"], call["status"]) == ("function_call", "incomplete")
            assert comparable(whole)["output"] == comparable(streamed)["output"]
            assert "Zürich".startswith(json.loads(call["arguments"]).get("city") or "")


def test_only_one_call_is_made_if_parallel_ones_are_not_wanted() -> None:
    block = call_pieces(("get_weather", [("city", "a", True)]), ("get_weather", [("city", "b", True)]))
    with scripted(line("</think>", *block), ctx=2048) as server:
        for response in both(server, tools=[WEATHER], parallel_tool_calls=False):
            assert response["status"] == "completed"
            assert [item["arguments"] for item in response["output"]] == ['{"city":"a"}']


def test_a_malformed_call_fails_a_stream_and_is_text_otherwise() -> None:
    good = call_pieces(("get_weather", [("city", "Rome", True)]))
    cut = good.index(">\n", good.index(' name="get_weather"')) + 1
    broken = line("</think>", "Look:", *good[:cut], "nonsense", *good[cut:])
    with scripted(broken, broken, ctx=2048) as server:
        events = read_stream(server.post({"input": "x", "tools": [WEATHER], "stream": True}, PATH).text)
        response = add_up(events)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert "malformed tool call" in response["error"]["message"]
        assert response["usage"]["output_tokens"] > 0
        message, call = response["output"]
        assert (message["status"], call["status"]) == ("completed", "incomplete")
        # What was streamed of the call is closed, and nothing tells a client to run it.
        assert json.loads(call["arguments"]) == {}
        done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
        assert done == ["message"]
        # The second try of an answer that is not streamed is as bad.
        whole = server.post({"input": "x", "tools": [WEATHER]}, PATH).json()
        assert (whole["status"], [item["type"] for item in whole["output"]]) == ("completed", ["message"])
        assert "nonsense" in text_of(whole["output"][0])


def test_a_block_without_a_call_gets_a_second_try_and_then_fails() -> None:
    empty = line("</think>", "Look:", "\n\n<", "｜DSML｜", "tool_calls", ">\n")
    good = line("</think>", *call_pieces(("get_weather", [("city", "Rome", True)])))
    with scripted(empty, good, empty, good, empty, ctx=2048) as server:
        for response in both(server, tools=[WEATHER]):
            assert response["status"] == "completed"
            assert [text_of(item) for item in response["output"]] == ["Look:", '{"city":"Rome"}']
        whole, streamed = both(server, tools=[WEATHER])
        assert comparable(whole)["output"] == comparable(streamed)["output"]
        for response in (whole, streamed):
            assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
            assert [(item["type"], item["status"]) for item in response["output"]] == [("message", "incomplete")]
            assert response["usage"]["output_tokens"] > 0


def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    fails = line("</think>", "a", "b", "c", fail_at=3)
    with scripted(fails, line("x", fail_prefill_at=2), line("</think>", "fine"), ctx=512) as server:
        body = {"input": "hi", "stream": True}
        response = add_up(read_stream(server.post(body, PATH).text))
        assert (response["status"], response["usage"]) == ("failed", None)
        assert response["error"] == {"code": "server_error", "message": "the script fails at step 3"}
        assert [(text_of(item), item["status"]) for item in response["output"]] == [("ab", "incomplete")]
        early = server.post(body, PATH)
        assert early.status_code == 500
        assert "fails at token 2" in early.json()["error"]["message"]
        # The server lives, and the next answer is right.
        assert add_up(read_stream(server.post(body, PATH).text))["status"] == "completed"


def test_a_stream_that_waits_is_named_and_kept_alive() -> None:
    opened = threading.Event()

    def gate(seconds: float) -> bool:
        opened.wait(30)
        return False

    slow = line("</think>", "x", prefill_ms_per_token=1)
    with (
        scripted(slow, wait=gate, first_byte_seconds=0.01, keep_alive_seconds=0.02) as waiting,
        waiting.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        seen: list[str] = []
        while seen.count(": keep-alive") < 2:
            seen.append(next(lines))
        opened.set()
        text = "\n".join([*seen, *lines]).replace(": keep-alive\n\n", "")
    assert add_up(read_stream(text))["status"] == "completed"


def test_errors_have_openais_shape_and_unknown_paths_are_404s(server: Running) -> None:
    response = server.post({"input": [{"type": "odd"}]}, PATH)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "invalid JSON request: input[0] has type 'odd', which is not supported",
        "type": "invalid_request_error",
        "param": "input",
        "code": None,
    }
    long = server.post({"input": "word " * 3000}, PATH).json()["error"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "input")
    stored = server.http.get(f"{PATH}/resp_1")
    assert (stored.status_code, stored.json()["error"]["message"]) == (404, "unknown endpoint")


# ---- any split ------------------------------------------------------------------------------------------------------

BLOCK = "".join(
    call_pieces(
        ("get_weather", [("city", 'Zürich <b>"x" 😀', True), ("days", "[1, 2]", False)]),
        ("apply_patch", [("input", 'a "b" \\ 😀\n', True)]),
        ("tool_search", [("query", "x", True)]),
    )
)
TEXTS = [
    "Just thoughts",
    "plan</think>Grüße 😀, 2 < 3 && x",
    f"plan</think>Let me look.{BLOCK}",
    f"</think>{BLOCK} dropped",
    f"p</think>cut{BLOCK[:-40]}",
    f"p</think>cut{BLOCK[:320]}",
    f"p</think>bad{BLOCK.replace('<｜DSML｜invoke', 'nonsense<｜DSML｜invoke', 1)}",
    "</think><tool_calls> is not a block, nor </｜DSML｜tool_calls>",
    "",
]


def answers(pieces: list[str], body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same generation, not streamed and streamed."""
    config = ServerConfig(ctx=4096)
    worker = Worker(script_backend({"pieces": pieces}, config=config), config)
    worker.start()
    app = create_app(worker, config)

    async def post(body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post(PATH, json=body)

    try:
        whole = asyncio.run(post(body)).json()
        streamed = add_up(read_stream(asyncio.run(post({**body, "stream": True})).text))
        return comparable(whole), comparable(streamed)
    finally:
        assert worker.stop(10)


def split(text: str, cuts: list[int]) -> list[str]:
    """Cut a text between characters."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=40)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 10_000), max_size=40), st.booleans(), st.booleans())
@example(TEXTS[2], list(range(600)), True, True)
@example(TEXTS[6], [], True, True)
def test_any_split_gives_the_same_items_streamed_and_not(text: str, cuts: list[int], tools: bool, shown: bool) -> None:
    body = {"input": "x", "tools": TOOLS if tools else [], "reasoning": {"summary": "auto" if shown else None}}
    whole, streamed = answers(split(text, cuts), body)
    assert whole["output"] == streamed["output"]
    assert whole["status"] == streamed["status"] == "completed"
    if text.startswith("p</think>bad") and tools:
        # The model gets a second try, whose text comes behind the first one's.
        return
    expected = chat.parse(text, True, TOOLS if tools else None)
    kinds = ["reasoning"] if shown and expected.reasoning else []
    kinds += ["message"] if expected.text or not expected.tool_calls else []
    known = {"get_weather": "function_call", "apply_patch": "custom_tool_call", "tool_search": "tool_search_call"}
    kinds += [known[call.name] for call in expected.tool_calls]
    assert [item["type"] for item in streamed["output"]] == kinds
    assert text_of(next((item for item in whole["output"] if item["type"] == "message"), MESSAGE)) == expected.text


MESSAGE = {"type": "message", "content": []}
