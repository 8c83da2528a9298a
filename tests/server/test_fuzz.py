"""Whatever arrives, the answer is one that the description of the paths declares, and never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_harness import WEATHER, Running, line, script_backend, scripted

from ds4.server.api.chat_types import ChatCompletionRequest
from ds4.server.api.models import NAMES
from ds4.server.api.registry import APIS
from ds4.server.app import create_app
from ds4.server.config import ServerConfig
from ds4.server.worker import Worker

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
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": JSON})},
    ),
    "n": st.integers(1, 3),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "logit_bias": st.dictionaries(st.integers(-1, 3000).map(str), st.integers(-101, 101), max_size=3),
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


# ---- by the description ---------------------------------------------------------------------------------------------

GETS = ("/health", "/metrics", "/stats", "/sessions", "/v1/models", "/v1/models/{id}")
POSTS = (*(api.path for api in APIS), "/v1/messages/count_tokens")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

# What the schema of a body calls just an object, as a client would write it: most other bodies end at its parser.
CONTENT = TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), min_size=1, max_size=2)
QUESTION = st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT})
ANSWER = st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT})
CONVERSATION = st.tuples(QUESTION) | st.tuples(QUESTION, ANSWER, QUESTION) | st.tuples(QUESTION, QUESTION)
PROPER = {"messages": CONVERSATION.map(list), "input": TEXT | CONVERSATION.map(list), "prompt": TEXT}
HARMLESS = {"model", "stream", "stream_options", "think", "thinking", "seed", "top_k", "max_tokens"}
PARTS = {
    path: [name for name in PROPER if name in api.body.model_fields]
    for api in APIS
    for path in (api.path, f"{api.path}/count_tokens")
}


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """The description of an application, from which requests to it are made."""
    config = ServerConfig(ctx=512, max_tokens=8, first_byte_seconds=60.0)
    worker = Worker(script_backend(line("hm", "</think>", "x", "y"), config=config), config)
    worker.start()
    try:
        yield schemathesis.openapi.from_asgi("/openapi.json", create_app(worker, config))
    finally:
        assert worker.stop(10)


def test_every_described_operation_is_among_those_tried(described: Any) -> None:
    paths = described.raw_schema["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == {
        *((path, "get") for path in GETS),
        *((path, "post") for path in POSTS),
    }


@pytest.mark.parametrize("path", GETS)
def test_reading_is_answered_as_described(described: Any, path: str) -> None:
    @settings(max_examples=25)
    @given(described[path]["GET"].as_strategy(), st.none() | st.sampled_from(list(NAMES.values())))
    def try_it(case: Any, known: str | None) -> None:
        if "{id}" in path and known is not None:
            case.path_parameters["id"] = known
        answer = case.call()
        assert answer.status_code == (
            404 if "{id}" in path and case.path_parameters["id"] not in NAMES.values() else 200
        )
        case.validate_response(answer, checks=CHECKS)

    try_it()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", POSTS)
def test_bodies_are_answered_as_described(described: Any, path: str, mode: GenerationMode) -> None:
    statuses = set()

    @settings(max_examples=25)
    @given(
        described[path]["POST"].as_strategy(generation_mode=mode),
        st.fixed_dictionaries({name: PROPER[name] for name in PARTS[path]}),
        st.booleans(),
    )
    def try_it(case: Any, proper: dict[str, Any], whole: bool) -> None:
        bodies = [case.body]
        if isinstance(case.body, dict):
            kept = {name: value for name, value in case.body.items() if whole or name in HARMLESS}
            bodies.append({**kept, **proper})
        for body in bodies:
            case.body = body
            answer = case.call()
            statuses.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

    try_it()
    assert statuses <= {200, 400, 409}  # 409: an id that nobody knows
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
