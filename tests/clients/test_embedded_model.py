"""The model that ships, through the official openai client over a real socket: it answers, thinks and uses tools."""

from __future__ import annotations

import json
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Running, serving

import ds4
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GREEDY: dict[str, Any] = {"model": "ds4-tiny", "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    config = ServerConfig(ctx=8192)
    engine = ds4.load(config=ds4.EngineConfig(context=config.ctx))
    with serving(Backend(engine, "ds4-tiny"), config) as running:
        yield running


def test_two_turns_reuse_the_first(tiny: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 47 + 38?"}]
    first = tiny.client.chat.completions.create(messages=messages, **GREEDY)
    reply = first.choices[0].message
    assert "85" in (reply.content or "")
    assert reply.reasoning_content  # type: ignore[attr-defined]
    assert "</think>" not in (reply.content or "")
    assert first.choices[0].finish_reason == "stop"
    messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "What is 12 + 30?"}]
    second = tiny.client.chat.completions.create(messages=messages, **GREEDY)
    assert "42" in (second.choices[0].message.content or "")
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    # Reasoning of an old turn is not rendered again, so the way back is the one before the think marker.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_tool_loop_goes_on_from_the_live_state(tiny: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = tiny.client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    reply = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert reply.tool_calls
    call = reply.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = json.dumps({"temperature": 21, "condition": "sunny"})
    messages += [
        reply.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    second = tiny.client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    assert "21" in (second.choices[0].message.content or "")
    assert second.choices[0].finish_reason == "stop"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # All of the first prompt and all that was sampled, but for the last token, which was not evaluated yet.
    live = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == live


@pytest.mark.parametrize("question", ["Hello! Who are you?", "What is 47 + 38?", "What is the weather in Paris?"])
def test_streamed_and_whole_answers_are_the_same(tiny: Running, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    whole = tiny.client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY).choices[0]
    content, reasoning, name, arguments, finish = "", "", "", "", None
    for chunk in tiny.client.chat.completions.create(messages=messages, tools=[WEATHER], stream=True, **GREEDY):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = choice.finish_reason or finish
    calls = whole.message.tool_calls or []
    assert content == (whole.message.content or "")
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    assert (name, arguments) == ("".join(c.function.name for c in calls), "".join(c.function.arguments for c in calls))
    assert finish == whole.finish_reason


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(("name", "arguments"), [("tool_loop", ["Hi?"]), ("continue_live", [])])
def test_an_example_without_a_server_says_what_to_do(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[2] / "examples" / f"{name}.py"
    without_proxies(monkeypatch)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("sys.argv", [str(example), *arguments, f"http://127.0.0.1:{taken.getsockname()[1]}"])
        with pytest.raises(SystemExit, match="start one with `make serve`"):
            runpy.run_path(str(example), run_name="__main__")


def test_the_example_of_live_continuation(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "continue_live.py"
    without_proxies(monkeypatch)
    monkeypatch.setattr("sys.argv", [str(example), tiny.url])
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "42" in lines[0]
    assert "16" in lines[2]
    assert any("get_weather" in text and "Paris" in text for text in lines)
    counts = [[int(word) for word in text.split() if word.isdigit()] for text in lines if "reused" in text]
    assert [len(count) for count in counts] == [2] * 4
    for (before, _), (total, reused) in (counts[:2], counts[2:]):
        assert before < reused <= total
