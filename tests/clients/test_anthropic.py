"""The official anthropic client against the server: messages, streams, thinking, tools, counting, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from server_harness import Running, call_pieces, line, random_engine, scripted, serving

from ds4.engine import Session
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
THINKS = {"type": "enabled", "budget_tokens": 1024}
CACHE = {"cache_control": {"type": "ephemeral"}}


@contextmanager
def client_of(server: Running) -> Iterator[Any]:
    """A client that tries everything once."""
    http = anthropic.DefaultHttpxClient(trust_env=False, verify=False)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, http_client=http) as client:
        yield client


def create(client: Any, **body: Any) -> Any:
    return client.messages.create(model="ds4-tiny", **{"max_tokens": 400, **body})


def stream(client: Any, **body: Any) -> Any:
    with client.messages.stream(model="ds4-tiny", **{"max_tokens": 400, **body}) as events:
        return events.get_final_message()


Ask = Callable[..., Any]
BOTH = pytest.mark.parametrize("ask", [create, stream])


def shown(message: Any) -> list[Any]:
    """The content, as a client compares it."""
    return [
        {"thinking": block.thinking} if block.type == "thinking"
        else {"text": block.text} if block.type == "text"
        else {"name": block.name, "input": block.input}
        for block in message.content
    ]  # fmt: skip


def state(session: Session) -> str:
    """What the model of a scripted session has before it."""
    return session.engine.tokenizer.decode(session.tokens).decode()


def test_a_stream_adds_up_to_the_answer_that_is_not_streamed() -> None:
    config = ServerConfig(ctx=4096)
    with serving(Backend(random_engine(), "ds4-custom"), config) as server, client_of(server) as client:
        for thinking in ({"type": "disabled"}, THINKS):
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": "Hi 😀!"}], "system": "Be brief.", "max_tokens": 24,
                "thinking": thinking, "extra_body": {"temperature": 0},
            }  # fmt: skip
            whole, streamed = create(client, **body), stream(client, **body)
            assert shown(whole) == shown(streamed)
            assert whole.stop_reason == streamed.stop_reason == "max_tokens"
            assert whole.usage.output_tokens == streamed.usage.output_tokens == 24
            total = client.messages.count_tokens(
                **{key: value for key, value in body.items() if key not in ("max_tokens", "extra_body")},
                model="ds4-tiny",
            ).input_tokens
            for usage in (whole.usage, streamed.usage):
                assert usage.input_tokens + usage.cache_read_input_tokens == total
            assert streamed.usage.cache_read_input_tokens == total - 1


def test_events_of_the_stream_helper() -> None:
    block = call_pieces(("get_weather", [("city", "Rome", True), ("days", "[1, 2]", False)]))
    with scripted(line("hm", "</think>", "Let", " me", *block)) as server, client_of(server) as client:
        with client.messages.stream(
            model="m", max_tokens=200, messages=[HI], tools=[WEATHER], thinking=THINKS
        ) as events:
            kinds = [event.type for event in events]
            message = events.get_final_message()
        first = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
        start = ["message_start", "content_block_start", "content_block_delta", "thinking"]
        assert first[:4] == start
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        assert kinds.count("signature") == 1
        assert kinds.count("text") == 2
        assert kinds.count("input_json") > 4
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert message.content[2].input == {"city": "Rome", "days": [1, 2]}
        with client.messages.stream(model="m", max_tokens=200, messages=[HI]) as events:
            assert "".join(events.text_stream) == events.get_final_text() == "hm</think>Let me" + "".join(block)


@BOTH
@pytest.mark.parametrize("replays_thinking", [False, True])
@pytest.mark.parametrize("template", ["official", "ds4"])
def test_a_tool_loop_reuses_the_live_state(ask: Ask, replays_thinking: bool, template: str) -> None:
    """Three turns of an agent whose system text begins with a line that changes and whose cache marks move."""
    block = call_pieces(
        ("get_weather", [("city", "Ro me", True), ("days", "[ 1,  2 ]", False)]),
        ("get_weather", [("city", "Oslo", True)]),
    )
    script = [
        line("need", " both", "</think>", "Let me", " see.", *block),
        line("It is sunny", "</think>", "Sunny", "!"),
        line("</think>", "Bye."),
    ]
    with scripted(*script, template=template) as server, client_of(server) as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Weather?", **CACHE}]}]

        def turn(number: int) -> Any:
            header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05};"
            system = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief.", **CACHE}]
            body = {"messages": messages, "system": system, "tools": [WEATHER], "thinking": {"type": "adaptive"}}
            counted = client.messages.count_tokens(model="m", **body).input_tokens
            answer = ask(client, metadata={"user_id": "u"}, **body)
            usage = answer.usage
            assert usage.cache_creation_input_tokens == 0
            if number == 1:
                assert usage.input_tokens == counted
            return answer

        def say(answer: Any, *blocks: Any) -> None:
            content = [part.model_dump(exclude_none=True) for part in answer.content]
            kept = [part for part in content if part["type"] != "thinking" or replays_thinking]
            messages.extend([{"role": "assistant", "content": kept}, {"role": "user", "content": list(blocks)}])

        first = turn(1)
        assert first.stop_reason == "tool_use"
        assert shown(first) == [
            {"thinking": "need both"},
            {"text": "Let me see."},
            {"name": "get_weather", "input": {"city": "Ro me", "days": [1, 2]}},
            {"name": "get_weather", "input": {"city": "Oslo"}},
        ]
        assert first.usage.cache_read_input_tokens == 0
        one, two = (part.id for part in first.content[2:])
        assert one.startswith("toolu_")
        assert one != two
        del messages[0]["content"][0]["cache_control"]
        say(
            first,
            {
                "type": "tool_result",
                "tool_use_id": two,
                "content": [{"type": "text", "text": "rain"}],
                "is_error": True,
            },
            {"type": "tool_result", "tool_use_id": one, "content": "sunny", **CACHE},
            {"type": "text", "text": "Which is better?"},
        )
        second = turn(2)
        assert shown(second) == [{"thinking": "It is sunny"}, {"text": "Sunny!"}]
        live = first.usage.input_tokens + first.usage.output_tokens - 1
        assert second.usage.cache_read_input_tokens >= live
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        written = "need both</think>Let me see." + "".join(block)
        assert f"<think>{written}<｜end▁of▁sentence｜><｜User｜><tool_result>sunny</tool_result>" in state(session)
        say(second, {"type": "text", "text": "Thanks."})
        third = turn(3)
        assert shown(third) == [{"text": "Bye."}]
        live = second.usage.input_tokens + second.usage.cache_read_input_tokens + second.usage.output_tokens
        assert third.usage.cache_read_input_tokens >= live
        assert server.worker.wait_idle(30)
        assert len(server.worker.sessions()) == 1


@BOTH
def test_results_alone_continue_their_conversation(ask: Ask) -> None:
    block = call_pieces(("get_weather", [("city", "Rome", True)]))
    with scripted(line("need", "</think>", *block), line("</think>", "Sunny.")) as server, client_of(server) as client:
        body: dict[str, Any] = {"tools": [WEATHER], "system": "Be brief.", "thinking": THINKS}
        first = ask(client, messages=[HI], **body)
        id = first.content[1].id
        results = [{"type": "tool_result", "tool_use_id": id, "content": "sunny"}]
        second = ask(client, messages=[{"role": "user", "content": results}], **body)
        assert shown(second) == [{"text": "Sunny."}]
        assert second.usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1


@BOTH
def test_a_second_turn_reads_from_the_cache(ask: Ask) -> None:
    with scripted(line("Hello", "."), line("Bye", ".")) as server, client_of(server) as client:
        first = ask(client, messages=[HI])
        messages = [HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Bye! " * 20}]
        second = ask(client, messages=messages)
        assert second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens
        assert second.usage.input_tokens > 20


@BOTH
def test_the_beginning_of_an_answer_can_be_given(ask: Ask) -> None:
    with scripted(line("B", ")", "."), line("Yes", ".")) as server, client_of(server) as client:
        start = "The best answer is ("
        first = ask(client, messages=[HI, {"role": "assistant", "content": start}])
        assert shown(first) == [{"text": "B)."}]
        messages = [
            HI,
            {"role": "assistant", "content": start + first.content[0].text},
            {"role": "user", "content": "?"},
        ]
        second = ask(client, messages=messages)
        assert second.usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        assert f"<｜Assistant｜></think>{start}B).<｜end▁of▁sentence｜><｜User｜>?" in state(session)


@BOTH
def test_why_an_answer_ended(ask: Ask) -> None:
    with scripted(line("one", " two", " STOP", " three")) as server, client_of(server) as client:
        stopped = ask(client, messages=[HI], stop_sequences=["FULL", "STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert shown(stopped) == [{"text": "one two "}]
        cut = ask(client, messages=[HI], max_tokens=2)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        assert shown(cut) == [{"text": "one two"}]
        none = ask(client, messages=[HI], max_tokens=0)
        assert (none.stop_reason, none.usage.output_tokens) == ("max_tokens", 0)
        assert shown(none) == [{"text": ""}]
        ended = ask(client, messages=[HI])
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


@BOTH
def test_thinking_that_the_client_does_not_want_to_see(ask: Ask) -> None:
    script = [line("deep", "</think>", "42"), line("</think>", "Sure.")]
    with scripted(*script) as server, client_of(server) as client:
        body: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": [WEATHER]}
        first = ask(client, messages=[HI], **body)
        assert shown(first) == [{"thinking": ""}, {"text": "42"}]
        assert first.content[0].signature
        messages = [HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
        second = ask(client, messages=messages, **body)
        # What was thought is still before the model.
        assert second.usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.output_tokens
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        assert "<think>deep</think>42" in state(session)


def test_the_beta_client_and_its_tool_runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str, days: int = 1) -> str:
        """Weather of a city.

        Args:
            city: Which city.
            days: How many days.
        """
        asked.append((city, days))
        return "sunny"

    asked: list[Any] = []
    block = call_pieces(("get_weather", [("city", "Rome", True), ("days", "3", False)]))
    with scripted(line("Let me see.", *block), line("Sunny", ".")) as server, client_of(server) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=200, messages=[HI], tools=[get_weather], betas=["interleaved-thinking-2025-05-14"]
        )
        final = runner.until_done()
    assert asked == [("Rome", 3)]
    assert final.content[0].text == "Sunny."


def test_errors_are_those_the_client_knows() -> None:
    script = [line("a", "b", fail_at=2), line("x", fail_prefill_at=2)]
    with scripted(*script, ctx=256, max_body_bytes=50_000) as server, client_of(server) as client:

        def fails(kind: Any, type: str, words: str, ask: Ask = create, **body: Any) -> None:
            with pytest.raises(kind, match=words) as caught:
                ask(client, **{"messages": [HI], **body})
            assert caught.value.type == type

        bad = anthropic.BadRequestError, "invalid_request_error"
        long = [{"role": "user", "content": "word " * 300}]
        large = [{"role": "user", "content": "x" * 60_000}]
        for ask in (create, stream):
            fails(*bad, "tool_choice", ask, tools=[WEATHER], tool_choice={"type": "tool", "name": "x"})
            fails(*bad, "prompt is too long: ", ask, messages=long)
            fails(anthropic.APIStatusError, "request_too_large", "larger than", ask, messages=large)
        source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
        image = {"role": "user", "content": [{"type": "image", "source": source}]}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] has type 'image'"):
            client.messages.count_tokens(model="m", messages=[image])
        fails(anthropic.APIStatusError, "api_error", "fails at step 2", stream)
        fails(anthropic.InternalServerError, "api_error", "fails at token 2")
        assert server.worker.stop(30)
        fails(anthropic.InternalServerError, "overloaded_error", "shutting down")


def test_results_of_a_lost_conversation_are_a_conflict_that_is_not_tried_again() -> None:
    block = call_pieces(("get_weather", [("city", "Rome", True)]))
    with scripted(line(*block), line("x")) as server, client_of(server) as client:
        id = create(client, messages=[HI], tools=[WEATHER]).content[0].id
        results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "sunny"}]}
        with pytest.raises(
            anthropic.ConflictError, match="continuation state is not available; retry by replaying"
        ) as lost:
            create(client, messages=[HI, {"role": "assistant", "content": "Hello"}, results], tools=[WEATHER])
        assert lost.value.response.headers["x-should-retry"] == "false"
        results["content"][0]["tool_use_id"] = "toolu_unknown"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="for tool_use_id toolu_unknown; retry by replaying"):
            create(client, messages=[results], tools=[WEATHER])
