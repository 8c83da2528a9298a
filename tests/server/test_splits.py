"""However an answer is cut into tokens, and whether it is streamed or not, the client gets the same."""

from __future__ import annotations

import asyncio
import base64
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_harness import WEATHER, call_pieces, script_backend

from ds4.chat import parse
from ds4.server.app import create_app
from ds4.server.config import ServerConfig
from ds4.server.worker import Worker

BLOCK = "".join(call_pieces(("get_weather", [("city", 'Zürich <b>"x" 😀', True), ("days", "[1, 2]", False)])))
TWO = "".join(call_pieces(("get_weather", [("city", "a", True)]), ("get_weather", [])))
TEXTS = [
    "Just thoughts",
    "plan</think>Grüße 😀, 2 < 3 && x",
    f"plan</think>Let me look.{BLOCK}",
    f"</think>{TWO} dropped",
    f"thinking{BLOCK}more</think>done",
    f"p</think>cut{BLOCK[:-40]}",
    f"p</think>bad{BLOCK.replace('<｜DSML｜invoke', 'nonsense<｜DSML｜invoke')}",
    "</think><tool_calls> is not a block, nor </｜DSML｜tool_calls>",
    "<think>again</think>\n\n  spaced  \n",
]
SPECIAL = ("</think>", "｜DSML｜")


def ask(app: Any, body: dict[str, Any]) -> httpx.Response:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(post())


def answers(pieces: list[str], body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same generation, not streamed and streamed, as comparable values."""
    config = ServerConfig(ctx=4096)
    worker = Worker(script_backend({"pieces": pieces}, config=config), config)
    worker.start()
    try:
        app = create_app(worker, config)
        return whole_answer(ask(app, body)), streamed_answer(ask(app, {**body, "stream": True}))
    finally:
        assert worker.stop(10)


def whole_answer(response: httpx.Response) -> dict[str, Any]:
    choice = response.json()["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())],
        "finish": choice["finish_reason"],
    }


def streamed_answer(response: httpx.Response) -> dict[str, Any]:
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    frames = [text.removeprefix("data: ") for text in response.text.split("\n\n") if text]
    for text in frames:
        if text == "[DONE]":
            continue
        chunk = json.loads(text)
        if "error" in chunk:
            answer["finish"] = "error"
            continue
        delta = chunk["choices"][0]["delta"]
        answer["content"] += delta.get("content", "")
        answer["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                answer["calls"].append([call["function"]["name"], ""])
            answer["calls"][call["index"]][1] += call["function"]["arguments"]
        answer["finish"] = chunk["choices"][0]["finish_reason"] or answer["finish"]
    answer["calls"] = [tuple(call) for call in answer["calls"]]
    return answer


def split(text: str, cuts: list[int]) -> list[str]:
    """Cut the UTF-8 of a text into pieces, also inside characters; special tokens may also be spelled out."""
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = []
    for start, end in pairwise(places):
        part = data[start:end]
        try:
            pieces.append(part.decode())
        except UnicodeDecodeError:
            pieces.append("base64:" + base64.b64encode(part).decode())
    return pieces


@settings(max_examples=60)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 10_000), max_size=60), st.booleans())
@example(TEXTS[2], list(range(400)), True)
@example(TEXTS[6], list(range(400)), True)
def test_any_split_gives_the_same_streamed_and_not(text: str, cuts: list[int], tools: bool) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if tools:
        body["tools"] = [WEATHER]
    whole, streamed = answers(split(text, cuts), body)
    expected = parse(text, True, [WEATHER] if tools else None, recovered=False)
    if tools and (text.startswith("thinking") or "nonsense" in text):
        # Recovery closes the reasoning at the first complete tag, so what is read depends on where tokens end. And of
        # a malformed block the model is told, so that the answer has two attempts.
        assert whole == streamed
        return
    assert whole["content"] == expected.text
    assert whole["reasoning"] == streamed["reasoning"] == expected.reasoning
    assert whole["calls"] == [(call.name, call.arguments) for call in expected.tool_calls]
    if streamed["finish"] == "error":
        assert expected.problems
    else:
        assert streamed == whole


@pytest.mark.parametrize("stop", [["<"], ["look"], ["ook.", "Let me look.\n"], ["😀"], ["absent"]])
@pytest.mark.parametrize("text", TEXTS)
def test_stop_strings_cut_both_at_the_same_place(text: str, stop: list[str]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stop": stop}
    fine, coarse = answers(split(text, list(range(500))), body), answers([text], body)
    assert fine[0] == fine[1] == coarse[0] == coarse[1]
    assert not any(s in fine[0]["content"] for s in stop)
