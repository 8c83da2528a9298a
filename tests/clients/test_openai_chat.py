"""The official openai client against the server: chat, tools, streams, the way back into live state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_harness import WEATHER, Running, call_pieces, line, random_engine, scripted, serving, tokenizer

from ds4.engine import Session
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"model": "ds4-tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def model() -> Iterator[Running]:
    """A server over the real graph with random weights."""
    config = ServerConfig(ctx=4096)
    with serving(Backend(random_engine(), "ds4-custom"), config) as running:
        yield running


def tokenizer_of(session: Session) -> Tokenizer:
    """The tokenizer that knows the ids of a scripted session."""
    return session.engine.tokenizer


def collect(stream: Any) -> dict[str, Any]:
    """What the chunks of a stream add up to."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None}
    for chunk in stream:
        if chunk.usage is not None:
            result["usage"] = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            result["content"] += delta.content or ""
            result["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                entry = result["calls"].setdefault(call.index, {"id": None, "name": None, "arguments": ""})
                entry["id"] = call.id or entry["id"]
                if call.function is not None:
                    entry["name"] = call.function.name or entry["name"]
                    entry["arguments"] += call.function.arguments or ""
            result["finish"] = choice.finish_reason or result["finish"]
    return result


@pytest.mark.parametrize("thinking", [False, True])
def test_two_turn_chat_reuses_the_live_state(model: Running, thinking: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Tell me a story ({thinking})."}]
    options = {**GREEDY, "extra_body": {"thinking": {"type": "enabled" if thinking else "disabled"}}}
    first = model.client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    assert first.usage.completion_tokens == 24
    assert first.choices[0].finish_reason == "length"
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "Go on."}]
    second = model.client.chat.completions.create(messages=messages, **options)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # An answer cut at its limit is not bound, but its prompt is live.
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 1


def test_streaming_equals_not_streaming_at_temperature_0(model: Running) -> None:
    for thinking in (False, True):
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀!"}]
        options = {**GREEDY, "extra_body": {"think": thinking}}
        whole = model.client.chat.completions.create(messages=messages, **options)
        stream = model.client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        parts = collect(stream)
        message = whole.choices[0].message
        assert parts["content"] == message.content
        assert parts["reasoning"] == (getattr(message, "reasoning_content", None) or "")
        assert parts["finish"] == whole.choices[0].finish_reason
        assert whole.usage is not None
        assert parts["usage"].completion_tokens == whole.usage.completion_tokens
        assert parts["usage"].prompt_tokens == whole.usage.prompt_tokens
        # The same prompt again: all of it but the think marker is live.
        assert parts["usage"].prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens - 1


def test_seeded_sampling_repeats(model: Running) -> None:
    def answer(seed: int) -> str | None:
        reply = model.client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "Dice!"}], max_tokens=12, seed=seed, temperature=1.3,
            extra_body={"think": False, "min_p": 0, "top_k": 50},
        )  # fmt: skip
        return reply.choices[0].message.content

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)


@pytest.mark.parametrize("replays_reasoning", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ["official", "ds4"])
def test_tool_loop_reuses_the_live_state(replays_reasoning: bool, stream: bool, template: str) -> None:
    """Call, result, answer. The state holds reasoning and bytes of the call that the client may never send."""
    block = call_pieces(("get_weather", [("city", "Ro me", True), ("days", "[ 1,  2 ]", False)]))
    script = [
        line("need", " the", " tool", "</think>", "Let me", " see.", *block),
        line("It is sunny", "</think>", "Sunny", "!"),
        line("</think>", "Bye."),
    ]
    with scripted(*script, template=template) as server:
        messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]

        def ask() -> dict[str, Any]:
            options: dict[str, Any] = {"model": "ds4-tiny", "messages": messages, "tools": [WEATHER]}
            if stream:
                options |= {"stream": True, "stream_options": {"include_usage": True}}
                return collect(server.client.chat.completions.create(**options))
            reply = server.client.chat.completions.create(**options)
            message = reply.choices[0].message
            calls = [
                {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
                for call in message.tool_calls or ()
            ]
            return {
                "content": message.content,
                "reasoning": getattr(message, "reasoning_content", ""),
                "calls": dict(enumerate(calls)),
                "finish": reply.choices[0].finish_reason,
                "usage": reply.usage,
            }

        first = ask()
        assert first["finish"] == "tool_calls"
        assert first["reasoning"] == "need the tool"
        assert first["content"] == "Let me see."
        call = first["calls"][0]
        assert call["id"].startswith("call_")
        assert len(call["id"]) == 5 + 32
        assert call["name"] == "get_weather"
        assert json.loads(call["arguments"]) == {"city": "Ro me", "days": [1, 2]}
        assert first["usage"].prompt_tokens_details.cached_tokens == 0

        assistant: dict[str, Any] = {
            "role": "assistant",
            "content": first["content"],
            # A client may write the arguments in its own way.
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.dumps(json.loads(call["arguments"]), indent=1),
                    },
                }
            ],
        }
        if replays_reasoning:
            assistant["reasoning_content"] = first["reasoning"]
        messages += [assistant, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        second = ask()
        assert second["content"] == "Sunny!"
        assert second["finish"] == "stop"
        live = first["usage"].prompt_tokens + first["usage"].completion_tokens - 1
        assert second["usage"].prompt_tokens_details.cached_tokens >= live
        suffix = second["usage"].prompt_tokens - live
        assert suffix <= len(tokenizer().encode("<tool_result>sunny</tool_result>")) + 6
        # What the model has before it: its own reasoning and bytes, the end of its turn, the result.
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        state = tokenizer_of(session).decode(session.tokens).decode()
        eos, user, open_turn = "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜><think>"
        written = "need the tool</think>Let me see." + "".join(block)
        result = f"{eos}{user}<tool_result>sunny</tool_result>{open_turn}"
        assert f"{open_turn}{written}{result}" in state

        assistant = {"role": "assistant", "content": second["content"]}
        if replays_reasoning:
            assistant["reasoning_content"] = second["reasoning"]
        messages += [assistant, {"role": "user", "content": "Thanks."}]
        third = ask()
        assert third["content"] == "Bye."
        live = second["usage"].prompt_tokens + second["usage"].completion_tokens
        assert third["usage"].prompt_tokens_details.cached_tokens >= live


def test_thinking_turns_without_tools_keep_their_state() -> None:
    with scripted(line("deep", " thought", "</think>", "42", "."), line("</think>", "Sure.")) as server:
        messages: list[Any] = [{"role": "user", "content": "Answer?"}]
        first = server.client.chat.completions.create(model="m", messages=messages)
        assert first.choices[0].message.content == "42."
        assert first.usage is not None
        assert first.usage.completion_tokens_details is not None
        assert first.usage.completion_tokens_details.reasoning_tokens == 2
        messages += [{"role": "assistant", "content": "42."}, {"role": "user", "content": "Sure? " * 40}]
        second = server.client.chat.completions.create(model="m", messages=messages)
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        live = first.usage.prompt_tokens + first.usage.completion_tokens
        assert second.usage.prompt_tokens_details.cached_tokens == live
        assert server.worker.status()["sessions"] == 1
        # Another answer to the second question: hidden reasoning and question are live up to the think marker.
        again = server.client.chat.completions.create(model="m", messages=messages)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens == second.usage.prompt_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_models_and_errors_come_as_the_client_expects() -> None:
    with scripted(line("hi"), ctx=64) as server:
        ids = [model.id for model in server.client.models.list()]
        assert ids == ["ds4-tiny", "deepseek-v4-flash", "deepseek-v4-pro"]
        for id in ids:
            assert server.client.models.retrieve(id).id == id
        with pytest.raises(openai.NotFoundError):
            server.client.models.retrieve("gpt-4")
        with pytest.raises(openai.BadRequestError, match="configured context size is 64 tokens") as caught:
            server.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 100}])
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            server.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], frequency_penalty=5
            )
