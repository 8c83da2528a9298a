"""Whatever JSON arrives, the answer is a 200 or a 400 in the API's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import WEATHER, Running, line, scripted

from ds4.server.api.chat_types import ChatCompletionRequest

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | TEXT},
    optional={
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2) | JSON,
        "reasoning_content": TEXT | JSON,
        "tool_calls": st.lists(st.just(CALL) | JSON, max_size=2) | JSON,
        "tool_call_id": TEXT | JSON,
    },
)
LIKELY: dict[str, Any] = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=4),
    "tools": st.just([WEATHER]),
    "tool_choice": st.sampled_from(["none", "auto"]),
    "stop": st.lists(TEXT, max_size=3),
    "stream": st.booleans(),
    "model": TEXT,
    "max_tokens": st.integers(0, 20),
}
FIELDS = {name: LIKELY.get(name, st.nothing()) | JSON for name in ChatCompletionRequest.model_fields}
MESSAGES = FIELDS.pop("messages")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("hm", "</think>", "x", "y"), ctx=2048) as running:
        yield running


@settings(max_examples=80)
@given(st.fixed_dictionaries({"messages": MESSAGES}, optional={**FIELDS, "other": JSON}))
def test_any_body_is_answered_or_refused(server: Running, body: dict[str, Any]) -> None:
    check(server.post(body))


@settings(max_examples=30)
@given(JSON)
def test_any_json_is_answered_or_refused(server: Running, body: Any) -> None:
    check(server.post(body))


def test_halves_of_characters_and_nul_are_survived(server: Running) -> None:
    text = r'"a\ud800b\u0000c\udfff"'
    content = (
        f'{{"messages": [{{"role": "user", "content": {text}}}], "model": {text}, "stop": {text}, "stream": true}}'
    )
    for stream in ("true", "false"):
        check(server.http.post("/v1/chat/completions", content=f'{{"stream": {stream}, {content}}}'))
    check(server.http.post("/v1/chat/completions", content=rb'{"messages": [{"role": "\ud800"}]}'))


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["message"], str)
        assert error["message"]
