"""Text completions: what is read of a body, the prompt it makes, and the bodies and chunks that come back."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai.types
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_harness import Running, call_pieces, line, script_backend, scripted, tokenizer

from ds4 import chat
from ds4.chat.template import BOS
from ds4.server.api.base import ApiContext
from ds4.server.api.completions import parse
from ds4.server.app import create_app
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.prompting import PromptBuilder
from ds4.server.request import ChatRequest
from ds4.server.turns import TurnMemory
from ds4.server.worker import Worker

PATH = "/v1/completions"
OPENED = "You are a helpful assistant<｜User｜>Say <think> loud<｜Assistant｜>"


def read(body: dict[str, Any], **options: Any) -> ChatRequest:
    """The request that a body makes."""
    return parse(body, ApiContext(ServerConfig(**options), "ds4-tiny", TurnMemory(), 1024)).request


def prompt_of(body: dict[str, Any], **options: Any) -> str:
    """The prompt that a body makes."""
    builder = PromptBuilder(tokenizer(), ServerConfig(**options), 1000, None)
    return str(builder.prompt(read(body, **options)).text)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("plan", "</think>", "Hi", " the", "re.", " STOP", " on"), ctx=512) as running:
        yield running


@pytest.mark.parametrize("prompt", ["Say <think> loud", ["Say <think> loud"]])
def test_the_prompt_is_a_user_message_behind_a_system_message(prompt: str | list[str]) -> None:
    body = {"prompt": prompt}
    assert prompt_of(body) == f"{BOS}{OPENED}<think>"
    assert prompt_of({**body, "think": False}) == f"{BOS}{OPENED}</think>"
    assert prompt_of(body, template="ds4") == f"{BOS}{OPENED}<think>"
    assert prompt_of(body, think_default=False) == f"{BOS}{OPENED}</think>"
    assert prompt_of({**body, "reasoning_effort": "high"}, effort_profile="0731").startswith(f"{BOS}Reasoning Effort")


def test_a_raw_prompt_stands_behind_the_first_token_and_nothing_else() -> None:
    body = {"prompt": "Say <think> loud", "think": True, "reasoning_effort": "max"}
    assert prompt_of(body, raw_completions=True) == f"{BOS}Say <think> loud"
    assert prompt_of({"prompt": [""]}, raw_completions=True) == BOS
    request = read(body, raw_completions=True)
    assert not request.thinking
    assert request.messages == ()


def test_a_raw_prompt_is_plain_text_unless_clients_may_write_special_tokens() -> None:
    think = tokenizer().think
    for safe in (True, False):
        config = ServerConfig(safe_client_text=safe, raw_completions=True)
        request = read({"prompt": "a<think>"}, raw_completions=True)
        ids = PromptBuilder(tokenizer(), config, 1000, None).prompt(request).ids
        assert ids[0] == tokenizer().bos
        assert (think in ids) == (not safe)


def test_all_that_is_read_reaches_the_request() -> None:
    body = {
        "prompt": "x", "model": "gpt", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 3,
        "seed": 11, "stop": ["a", "", "b"], "stream": True, "thinking": {"type": "disabled"}, "n": 1, "best_of": 1,
        "echo": False, "suffix": None, "logprobs": None, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "user": "me", "unknown": [1],
    }  # fmt: skip
    request = read(body)
    assert (request.model, request.max_tokens, request.stop) == ("gpt", 7, ("a", "b"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed) == (
        0.5,
        0.9,
        0.1,
        3,
        11,
    )
    assert request.streamed
    assert not request.thinking
    assert request.tools == ()
    assert read({"prompt": "x"}).model == "ds4-tiny"
    assert not read({"prompt": "x", "model": "deepseek-chat"}).thinking


@pytest.mark.parametrize(
    ("extra", "param", "said"),
    [
        ({"prompt": None}, "prompt", "missing prompt"),
        ({"prompt": 3}, "prompt", "prompt: expected"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format is not supported"),
        ({"prompt": []}, "prompt", "an array with one text"),
        ({"prompt": [{}]}, "prompt", "an array with one text"),
        ({"prompt": ["a", 1]}, "prompt", "an array with one text"),
        ({"prompt": ["a", "b"]}, "prompt", "2 texts; send one request for each"),
        ({"prompt": [1, 2]}, "prompt", "token ids; send the text"),
        ({"prompt": [[1, 2], [3]]}, "prompt", "token ids; send the text"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "all n answers"),
        ({"best_of": 0}, "best_of", "all n answers"),
        ({"best_of": 3, "n": 2}, "best_of", "all n answers"),
        ({"n": 9}, "n", "from 1 to 8"),
        ({"n": -1}, "n", "from 1 to 8"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"presence_penalty": 5}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "token id"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"max_tokens": "8"}, "max_tokens", "expected"),
        ({"stream": 1}, "stream", "expected"),
        ({"reasoning_effort": "herculean"}, "reasoning_effort", "not known"),
    ],
)
def test_a_wrong_or_unsupported_field_is_a_400_that_names_it(extra: dict[str, Any], param: str, said: str) -> None:
    for raw in (False, True):
        with pytest.raises(ApiError) as caught:
            read({"prompt": "x", **extra}, raw_completions=raw)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert param in caught.value.message
        assert said in caught.value.message


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON of every event of a stream that ends as it should."""
    *frames, mark, rest = text.split("\n\n")
    assert (mark, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_the_body_is_a_completion_without_the_reasoning(server: Running) -> None:
    answer = server.post({"prompt": "x", "stop": "STOP", "model": "m"}, PATH).json()
    completion = openai.types.Completion.model_validate(answer, strict=True)
    assert completion.choices[0].text == "Hi there. "
    assert (completion.choices[0].finish_reason, completion.choices[0].index) == ("stop", 0)
    assert (completion.object, completion.model) == ("text_completion", "m")
    assert completion.id.startswith("cmpl-")
    assert completion.id.removeprefix("cmpl-").isdigit()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6
    cut = server.post({"prompt": "x", "max_tokens": 3}, PATH).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("Hi", "length")
    nothing = server.post({"prompt": "x", "max_tokens": 0}, PATH).json()["choices"][0]
    assert (nothing["text"], nothing["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_adds_up_to_the_body(server: Running, include_usage: bool) -> None:
    body = {"prompt": "x", "model": "m"}
    whole = server.post(body, PATH).json()
    stream = server.post({**body, "stream": True, "stream_options": {"include_usage": include_usage}}, PATH)
    assert stream.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(stream.text)
    for chunk in chunks:
        # Until the last one the API says null there, which its own types leave out.
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        openai.types.Completion.model_validate({**chunk, "choices": choices}, strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    if include_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    *texts, end = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in texts) == whole["choices"][0]["text"] == "Hi there. STOP on"
    assert all(choice["text"] and choice["finish_reason"] is None for choice in texts)
    assert (end["text"], end["finish_reason"]) == ("", "stop")


def test_a_tool_call_is_text_here() -> None:
    block = ["\n\n<", "｜DSML｜", "tool_calls", ">\n<", "｜DSML｜", 'invoke name="x"', ">"]
    with scripted(line("</think>", "See:", *block)) as server:
        whole = server.post({"prompt": "x"}, PATH).json()["choices"][0]
        assert whole["text"] == "See:" + "".join(block)
        assert whole["finish_reason"] == "stop"
        chunks = chunks_of(server.post({"prompt": "x", "stream": True}, PATH).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_a_raw_prompt_is_continued_and_its_state_is_used_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with scripted(line(" there", " was"), raw_completions=True, trace=trace) as server:
        answer = server.post({"prompt": "Once upon a time"}, PATH).json()
        assert answer["choices"][0]["text"] == " there was"
        assert answer["usage"]["prompt_tokens"] == 1 + len(tokenizer().encode("Once upon a time"))
        again = server.post({"prompt": "Once upon a time there was"}, PATH).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]
    prompts = [entry["text"] for entry in map(json.loads, trace.read_text().splitlines()) if entry["event"] == "prompt"]
    assert prompts == [f"{BOS}Once upon a time", f"{BOS}Once upon a time there was"]


def test_failures_are_in_the_shape_of_the_api() -> None:
    script = [line("</think>", "a", fail_at=2), line("x", fail_prefill_at=1)]
    with scripted(*script, ctx=64, first_byte_seconds=5.0) as server:
        late = server.post({"prompt": "x", "stream": True}, PATH)
        assert late.status_code == 200
        last = json.loads(late.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["type"] == "server_error"
        assert "step 2" in last["error"]["message"]
        early = server.post({"prompt": "x", "stream": True}, PATH)
        assert (early.status_code, early.json()["error"]["type"]) == (500, "server_error")
        long = server.post({"prompt": "word " * 100}, PATH)
        assert long.status_code == 400
        error = long.json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


# ---- any split ------------------------------------------------------------------------------------------------------

BLOCK = "".join(call_pieces(("get_weather", [("city", "Zürich 😀", True)])))
TEXTS = [
    "Just thoughts",
    "plan</think>Grüße 😀, 2 < 3 && x",
    f"plan</think>Let me look.{BLOCK} more",
    f"thinking{BLOCK}more</think>done",
    f"</think>cut{BLOCK[:-30]}",
    "<think>again</think>\n\n  spaced, \n\n</think>\n",
    "",
]


def split(text: str, cuts: list[int]) -> list[str]:
    """The UTF-8 of a text as pieces of a script, cut also inside characters."""
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = []
    for start, end in pairwise(places):
        try:
            pieces.append(data[start:end].decode())
        except UnicodeDecodeError:
            pieces.append("base64:" + base64.b64encode(data[start:end]).decode())
    return pieces


def answers(pieces: list[str], body: dict[str, Any], raw: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same generation, as a body and as chunks."""
    config = ServerConfig(ctx=4096, raw_completions=raw)
    worker = Worker(script_backend({"pieces": pieces}, config=config), config)
    worker.start()

    async def post() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        transport = httpx.ASGITransport(create_app(worker, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            whole = await client.post(PATH, json=body)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await client.post(PATH, json={**body, **options})
            return whole.json(), chunks_of(stream.text)

    try:
        return asyncio.run(post())
    finally:
        assert worker.stop(10)


@settings(max_examples=60)
@given(
    st.sampled_from(TEXTS),
    st.lists(st.integers(0, 10_000), max_size=60),
    st.booleans(),
    st.sampled_from([None, ["o"], ["look.", "😀, 2"], ["</think>", "tool_calls"], ["absent"]]),
    st.none() | st.integers(0, 30),
)
@example(TEXTS[1], list(range(400)), False, None, None)
@example(TEXTS[2], list(range(400)), True, ["ook.", "look"], None)
@example(TEXTS[4], list(range(400)), False, None, None)
@example("<think>again</think> and on", list(range(400)), True, None, None)
@example("<think>again", [3, 9], True, ["gain"], None)
def test_any_split_gives_the_same_text_streamed_and_not(
    text: str, cuts: list[int], raw: bool, stop: list[str] | None, limit: int | None
) -> None:
    body = {"prompt": "x", "stop": stop, "max_tokens": limit}
    pieces = split(text, cuts)
    whole, chunks = answers(pieces, body, raw)
    *parts, end, counts = chunks
    (choice,) = whole["choices"]
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    assert end["choices"][0]["finish_reason"] == choice["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert counts["usage"][name] == whole["usage"][name]
    if limit is not None and limit <= len(pieces):
        # How much of the text so many tokens are depends on where they end.
        return
    expected = text if raw else chat.parse(text, True, None, recovered=False).text
    found = [at for at in (expected.find(one) for one in stop or ()) if at >= 0]
    assert choice["text"] == expected[: min(found, default=len(expected))]
    assert choice["finish_reason"] == "stop"
