"""What Messages answers, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_bodies import CALL, HI, WEATHER, assistant, request, result, text, user
from pydantic import TypeAdapter
from server_harness import Running, call_pieces, line, script_backend, scripted
from worker_harness import Gate

from ds4 import chat
from ds4.server.app import create_app
from ds4.server.config import ServerConfig
from ds4.server.worker import Worker

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type, and all but errors and pings are what the client knows."""
    events = []
    for frame in text.split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            if event["type"] not in ("error", "ping"):
                EVENT.validate_python(event)
            events.append(event)
    return events


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream adds up to, each begun and ended before the next."""
    blocks: list[dict[str, Any]] = []
    open_block: dict[str, Any] | None = None
    pieces = ""
    for event in events:
        if not event["type"].startswith("content_block_"):
            assert open_block is None or event["type"] == "ping"
            continue
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(blocks)
            open_block, pieces = dict(event["content_block"]), ""
            continue
        assert open_block is not None
        assert event["index"] == len(blocks)
        if event["type"] == "content_block_stop":
            if open_block["type"] == "tool_use":
                assert open_block["input"] == {}
                open_block["input"] = json.loads(pieces)
            blocks.append(open_block)
            open_block = None
        elif event["delta"]["type"] == "input_json_delta":
            pieces += event["delta"]["partial_json"]
        else:
            key = event["delta"]["type"].removesuffix("_delta")
            open_block[key] += event["delta"][key]
    assert open_block is None
    return blocks


def comparable(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks without what is drawn anew for every answer."""
    return [{key: value for key, value in block.items() if key not in ("id", "signature")} for block in blocks]


def both(server: Running, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same answer, whole and as events, with the same blocks and the same end."""
    whole = server.post(body, "/v1/messages").json()
    Message.model_validate(whole, strict=True)
    events = events_of(server.post({**body, "stream": True}, "/v1/messages").text)
    assert comparable(blocks_of(events)) == comparable(whole["content"])
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole, events


TWO_CALLS = call_pieces(("get_weather", [("city", 'Zü"rich', True), ("days", "[1, 2]", False)]), ("get_weather", []))


def test_a_stream_has_its_events_in_order() -> None:
    with scripted(line("a", "b", "</think>", "Let", " me", *TWO_CALLS)) as server:
        body = {"messages": [HI], "tools": [WEATHER], "thinking": {"type": "enabled"}, "model": "claude-x"}
        whole, events = both(server, body)
        start = events[0]["message"]
        assert {key: value for key, value in start.items() if key not in ("id", "usage")} == {
            "type": "message", "role": "assistant", "model": "claude-x", "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip
        id = start["id"]
        assert id.startswith("msg_")
        assert len(id) == 4 + 24
        assert int(id[4:], 16) >= 0
        assert whole["id"] != id
        deltas = [(event["type"], event.get("index"), event.get("delta")) for event in events[1:12]]
        assert deltas == [
            ("content_block_start", 0, None),
            ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "a"}),
            ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "b"}),
            ("content_block_delta", 0, {"type": "signature_delta", "signature": id}),
            ("content_block_stop", 0, None),
            ("content_block_start", 1, None),
            ("content_block_delta", 1, {"type": "text_delta", "text": "Let"}),
            ("content_block_delta", 1, {"type": "text_delta", "text": " me"}),
            ("content_block_stop", 1, None),
            ("content_block_start", 2, None),
            ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": "{"}),
        ]
        # Arguments leave as they are sampled.
        assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 8
        calls = blocks_of(events)[2:]
        assert [call["input"] for call in calls] == [{"city": 'Zü"rich', "days": [1, 2]}, {}]
        assert len({call["id"] for call in calls}) == 2
        assert all(call["id"].startswith("toolu_") for call in calls)
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        prompt_tokens = server.post(body, "/v1/messages/count_tokens").json()["input_tokens"]
        usage = whole["usage"]
        assert usage["input_tokens"] == prompt_tokens
        assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
        assert usage["output_tokens_details"] == {"thinking_tokens": 2}
        assert events[0]["message"]["usage"]["output_tokens"] == 0
        # The second time all but the mark that opens the answer is live.
        for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, prompt_tokens - 1)
            assert usage["cache_creation_input_tokens"] == 0


THINKS = {"thinking": {"type": "adaptive"}}


@pytest.mark.parametrize(
    ("pieces", "extra", "content", "reason"),
    [
        (["Hi"], {}, [text("Hi")], "end_turn"),
        (["Hi", " there"], {"max_tokens": 1}, [text("Hi")], "max_tokens"),
        (["Hi"], {"max_tokens": 0}, [text("")], "max_tokens"),
        ([], {}, [text("")], "end_turn"),
        (["hm", "</think>"], THINKS, [{"type": "thinking", "thinking": "hm"}, text("")], "end_turn"),
        (["hm"], {**THINKS, "max_tokens": 1}, [{"type": "thinking", "thinking": "hm"}, text("")], "max_tokens"),
        (["</think>", "Hi"], THINKS, [text("Hi")], "end_turn"),
        (["hm", "</think>", "Hi"], {"thinking": {"type": "adaptive", "display": "omitted"}},
         [{"type": "thinking", "thinking": ""}, text("Hi")], "end_turn"),
        (["Hi STO", "P there"], {"stop_sequences": ["STOP", "x"]}, [text("Hi ")], "stop_sequence"),
        (["Hi", *TWO_CALLS], {}, [text("Hi" + "".join(TWO_CALLS))], "end_turn"),
        (TWO_CALLS, {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         [{"type": "tool_use", "name": "get_weather", "input": {"city": 'Zü"rich', "days": [1, 2]}}], "tool_use"),
    ],
)  # fmt: skip
def test_answers_are_the_same_whole_and_streamed(
    pieces: list[str], extra: dict[str, Any], content: list[dict[str, Any]], reason: str
) -> None:
    with scripted(line(*pieces)) as server:
        whole, _ = both(server, {"messages": [HI], **extra})
    assert comparable(whole["content"]) == content
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == ("STOP" if reason == "stop_sequence" else None)


def test_a_limit_inside_a_call_leaves_an_object() -> None:
    pieces = call_pieces(("get_weather", [("city", '"\n', True), ("days", '[{"x": 2.5}]', False)]))
    with scripted(line("Look", *pieces)) as server:
        for limit in range(1, len(pieces) + 2):
            whole, _ = both(server, {"messages": [HI], "tools": [WEATHER], "max_tokens": limit})
            assert whole["stop_reason"] in ("max_tokens", "tool_use")
            assert whole["content"][0]["text"].startswith("Look")


def test_numbers_that_are_too_large_stay_json() -> None:
    pieces = call_pieces(("get_weather", [("days", "[-1e999, 1e999, 1.50]", False)]))
    with scripted(line(*pieces)) as server:
        answer = server.post({"messages": [HI], "tools": [WEATHER]}, "/v1/messages").text
    assert "Infinity" not in answer
    assert json.loads(answer)["content"][0]["input"]["days"][2] == 1.5


def test_a_malformed_call_is_an_error_event_in_a_stream_and_text_otherwise() -> None:
    good = call_pieces(("get_weather", [("city", "Rome", True)]))
    cut = good.index(">\n", good.index(' name="get_weather"')) + 1
    broken = [*good[:cut], "nonsense", *good[cut:]]
    body = {"messages": [HI], "tools": [WEATHER]}
    with scripted(line("Look:", *broken)) as server:
        *events, last = events_of(server.post({**body, "stream": True}, "/v1/messages").text)
        assert last["error"]["type"] == "api_error"
        assert "malformed tool call" in last["error"]["message"]
        assert comparable(blocks_of(events)) == [
            text("Look:"),
            {"type": "tool_use", "name": "get_weather", "input": {}},
        ]
        whole = server.post(body, "/v1/messages").json()
        assert whole["stop_reason"] == "end_turn"
        (block,) = whole["content"]
        assert block["type"] == "text"
        assert block["text"].endswith("".join(broken))
    start = good[: good.index(">\n") + 1]
    with scripted(line("Look:", *start)) as server:
        *events, last = events_of(server.post({**body, "stream": True}, "/v1/messages").text)
        assert last["type"] == "error"
        assert blocks_of(events)[0]["text"].startswith("Look:")
    with scripted(line(*start)) as server:
        # Nothing but the start of a block, and then the end: there is no answer.
        answer = server.post(body, "/v1/messages")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "api_error"


def test_a_stream_that_waits_has_pings_and_starts_when_its_tokens_are_known() -> None:
    gate = Gate()
    script = [line("one", step_ms=1), line("two")]
    quick = {"first_byte_seconds": 0.01, "keep_alive_seconds": 0.02}
    with scripted(*script, wait=gate, max_sessions=1, **quick) as server:
        body = {"messages": [HI], "stream": True}
        first = threading.Thread(target=server.post, args=({"messages": [HI]}, "/v1/messages"))
        first.start()
        assert gate.reached.wait(30)
        with server.http.stream("POST", "/v1/messages", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            waiting = [next(lines) for _ in range(9)]
            assert waiting == ["event: ping", 'data: {"type":"ping"}', ""] * 3
            gate.opened.set()
            events = events_of("\n".join(lines) + "\n")
        first.join()
    assert next(event["type"] for event in events if event["type"] != "ping") == "message_start"
    assert comparable(blocks_of(events)) == [text("two")]


def test_a_failure_behind_the_first_byte_is_an_event() -> None:
    with scripted(line("a", "b", "c", fail_at=2), first_byte_seconds=5.0) as server:
        *events, last = events_of(server.post({"messages": [HI], "stream": True}, "/v1/messages").text)
    assert events[0]["type"] == "message_start"
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the script fails at step 2"}}


# ---- errors and counting --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("Hi"), ctx=256, max_body_bytes=100_000) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_the_shape_of_the_api(server: Running, path: str) -> None:
    large = {"messages": [{"role": "user", "content": "x" * 200_000}]}
    for status, kind, response in (
        (400, "invalid_request_error", server.post({"messages": []}, path)),
        (400, "invalid_request_error", server.http.post(path, content=b'{"messages": [NaN]}')),
        (400, "invalid_request_error", server.post({"messages": [user(result("toolu_9"))]}, path)),
        (405, "invalid_request_error", server.http.get(path)),
        (413, "request_too_large", server.post(large, path)),
        (404, "not_found_error", server.http.get(path + "/nothing")),
    ):
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["error"]["message"]


def test_a_prompt_that_does_not_fit_is_said_in_the_words_that_clients_look_for(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 300}]}
    count = server.post(body, "/v1/messages/count_tokens").json()["input_tokens"]
    assert count > 256
    for stream in (False, True):
        response = server.post({**body, "stream": stream}, "/v1/messages")
        assert response.status_code == 400
        words = f"prompt is too long: Prompt has {count} tokens, but the configured context size is 256 tokens"
        assert response.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": words, "n_prompt_tokens": count, "n_ctx": 256},
        }
    chat_error = server.post(body).json()["error"]["message"]
    assert chat_error.startswith("Prompt has")


def test_counting_needs_no_turn_of_the_model() -> None:
    body = {
        "messages": [HI, assistant({"type": "thinking", "thinking": "hm", "signature": ""}, CALL), user(result())],
        "system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto"},
    }  # fmt: skip
    with scripted(line("</think>", "first"), line("</think>", "second")) as server:
        counts = [server.post(body, "/v1/messages/count_tokens?beta=true").json() for _ in range(3)]
        answer = server.post(body, "/v1/messages?beta=true").json()
    assert counts == [{"input_tokens": answer["usage"]["input_tokens"]}] * 3
    assert answer["content"] == [text("first")]


def test_counts_are_what_the_usage_will_say_hidden_reasoning_included() -> None:
    with scripted(line("let me think", " hard", "</think>", "first"), line("</think>", "second")) as server:
        body: dict[str, Any] = {"messages": [HI], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert server.post(body, "/v1/messages").json()["content"][-1] == text("first")
        body["messages"] += [assistant(text("first")), user(text("And then?"))]
        counted = server.post(body, "/v1/messages/count_tokens").json()["input_tokens"]
        usage = server.post(body, "/v1/messages").json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert counted > server.worker.prompts.count(request(body))


def test_counting_does_not_wait_for_a_long_step() -> None:
    gate = Gate()
    with scripted(line("</think>", "x", step_ms=1), wait=gate, first_byte_seconds=0.0) as server:
        answering = threading.Thread(target=server.post, args=({"messages": [HI]}, "/v1/messages"))
        answering.start()
        assert gate.reached.wait(30)
        counted = server.post({"messages": [HI]}, "/v1/messages/count_tokens").json()["input_tokens"]
        assert counted == server.worker.prompts.count(request({"messages": [HI]}))
        gate.opened.set()
        answering.join(30)
        assert server.worker.wait_idle(30)


# ---- any split ------------------------------------------------------------------------------------------------------

TEXTS = [
    "Grüße 😀, 2 < 3",
    f"plan</think>Let me look.{''.join(TWO_CALLS)}",
    f"</think>{''.join(TWO_CALLS)} dropped",
    f"plan</think>cut{''.join(TWO_CALLS)[:-60]}",
    f"p</think>bad{''.join(TWO_CALLS).replace('<｜DSML｜invoke', 'nonsense<｜DSML｜invoke')}",
]


@settings(max_examples=30)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 10_000), max_size=60), st.booleans())
def test_any_split_gives_the_same_blocks_streamed_and_not(written: str, cuts: list[int], tools: bool) -> None:
    places = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    config = ServerConfig(ctx=4096)
    pieces = [written[start:end] for start, end in pairwise(places)]
    worker = Worker(script_backend({"pieces": pieces}, config=config), config)
    worker.start()
    body = {"messages": [HI], "thinking": {"type": "enabled"}, **({"tools": [WEATHER]} if tools else {})}

    async def post() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        transport = httpx.ASGITransport(create_app(worker, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            whole = await client.post("/v1/messages", json=body)
            stream = await client.post("/v1/messages", json={**body, "stream": True})
            return whole.json(), events_of(stream.text)

    try:
        whole, events = asyncio.run(post())
    finally:
        assert worker.stop(10)
    if events[-1]["type"] != "error":
        assert comparable(blocks_of(events)) == comparable(whole["content"])
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    expected = chat.parse(written, True, [WEATHER] if tools else None)
    if not expected.complete or expected.problems:
        # What the model is told then, and what it makes of it, depends on more than the text.
        return
    assert events[-1]["type"] == "message_stop"
    shown = [{"type": "thinking", "thinking": expected.reasoning}] if expected.reasoning else []
    if expected.text or not expected.tool_calls:
        shown.append(text(expected.text))
    shown += [
        {"type": "tool_use", "name": call.name, "input": json.loads(call.arguments)} for call in expected.tool_calls
    ]
    assert comparable(whole["content"]) == shown
