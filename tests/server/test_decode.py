"""One answer: what may be sampled where, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from server_harness import WEATHER, call_pieces, line, scripted, tokenizer

from ds4.chat.tools import tool_schemas
from ds4.engine import Sampling
from ds4.engine.sampling import Choice
from ds4.server.api.base import ApiContext
from ds4.server.api.chat import parse
from ds4.server.config import ServerConfig
from ds4.server.decode import MAX_EOS_MASKED, Generation, SamplingChooser, TokenRules
from ds4.server.request import ChatRequest
from ds4.server.trace import Trace
from ds4.server.turns import TurnMemory

HELLO = [{"role": "user", "content": "Hello"}]
EOS = "<｜end▁of▁sentence｜>"
BLOCK = call_pieces(("get_weather", [("city", "Rome", True), ("days", '{"a":"b c"}', False)]))


def ask(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.post({"messages": HELLO, "tools": [WEATHER], **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def pieces(trace: Path) -> list[dict[str, Any]]:
    events = [json.loads(text) for text in trace.read_text().splitlines()]
    return [event for event in events if event["event"] == "piece"]


def test_syntax_is_greedy_and_payloads_are_sampled(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    with scripted(line("plan", "</think>", "ok", *BLOCK), trace=trace) as server:
        ask(server)
    seen = [(piece["text"], piece["state"], piece["greedy"]) for piece in pieces(trace)]
    states = {state for _, state, _ in seen}
    assert states == {"outside", "structural", "string_body", "json_structural", "json_string"}
    for _, state, greedy in seen:
        assert greedy == (state in ("structural", "json_structural"))
    assert ("R", "string_body", False) in seen
    assert ("{", "json_structural", True) in seen
    assert ("plan", "outside", False) in seen
    assert seen[-1][0] == ">"  # the end of the block ends the answer


class Wishing:
    """Wants one token at every step, and takes another where that is forbidden."""

    def __init__(self, wish: int, other: int, first: list[int]) -> None:
        self.wish, self.other, self.first = wish, other, first
        self.refused = 0
        self.passed: list[int] = []

    def choose(self, session: Any, rules: TokenRules) -> Choice:
        self.passed = []
        if self.first:
            return Choice(self.first.pop(0))
        if self.wish in rules.forbidden:
            self.refused += 1
            self.passed = [self.wish]
            return Choice(self.other)
        return Choice(self.wish)

    def skipped(self, choice: Choice, rules: TokenRules) -> list[int]:
        return self.passed


class FakeSession:
    pending: int | None = None

    def __init__(self, *logits: float) -> None:
        self.logits = self.device_logits = torch.tensor(logits)


def generate(chooser: Any, request: ChatRequest, limit: int = 1000) -> Generation:
    generation = Generation(
        1, request, FakeSession(), chooser, tokenizer(), opened=tokenizer().end_think, limit=limit,  # type: ignore[arg-type]
        profile="official", think_recovery=True, trace=Trace(),
    )  # fmt: skip
    while generation.ending is None:
        generation.step(generation.choose())  # type: ignore[arg-type]
    return generation


def test_the_end_of_the_sentence_is_held_off_inside_a_call_for_64_steps_and_then_the_call_is_closed() -> None:
    text = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
    request = ChatRequest("m", (), tools=tool_schemas([WEATHER]))
    chooser = Wishing(tokenizer().eos, tokenizer().encode("x")[0], tokenizer().encode_chat(text))
    opened = len(chooser.first)
    generation = generate(chooser, request)
    assert chooser.refused == MAX_EOS_MASKED
    assert generation.completion == opened + chooser.refused
    assert generation.ending is not None
    assert generation.ending.reason == "tool_calls"
    assert generation.ending.message.tool_calls[0].arguments == json.dumps({"city": "x" * chooser.refused}).replace(
        ": ", ":"
    )
    assert not generation.ending.bindable


def test_tool_choice_none_keeps_the_tools_in_the_prompt_and_forbids_the_marker(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    script = [line("</think>", "No", *BLOCK[:4], ".", obey=True), line("</think>", "No", *BLOCK[:4], ".")]
    with scripted(*script, trace=trace) as server:
        first = ask(server, tool_choice="none")
        assert first["choices"][0]["message"]["content"] == "No\n\n<tool_calls."
        assert [piece["text"] for piece in pieces(trace) if not piece["allowed"]] == ["｜DSML｜"]
        second = ask(server, tool_choice="auto")
    prompts = [e for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "prompt"]
    assert prompts[0]["text"] == prompts[1]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= prompts[0]["tokens"] - 1
    request = ChatRequest("m", (), tools=tool_schemas([WEATHER]), calls_allowed=False)
    chooser = Wishing(tokenizer().dsml, tokenizer().eos, [])
    assert generate(chooser, request).completion == 0
    assert chooser.refused == 1


def test_tool_choice_none_leaves_a_call_in_another_spelling_as_text() -> None:
    plain = [piece for piece in BLOCK if piece != "｜DSML｜"]
    with scripted(line("</think>", *plain)) as server:
        assert ask(server)["choices"][0]["finish_reason"] == "tool_calls"
        choice = ask(server, tool_choice="none")["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "".join(plain)


def test_without_tools_a_call_is_text_and_nothing_is_forbidden() -> None:
    with scripted(line("</think>", *BLOCK)) as server:
        choice = ask(server, tools=[])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "".join(BLOCK)


def test_a_call_inside_reasoning_closes_the_reasoning_and_counts(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    inner = call_pieces(("get_weather", [("city", "Oslo", True)]))[5:]  # the calls without the block around them
    inner = inner[: inner.index("tool_calls") - 2]
    unknown = [piece.replace("get_weather", "undeclared") for piece in inner]
    start = ["<", "｜DSML｜", "tool_calls", ">"]
    script = [
        line("hm", *start, *inner),
        line("hm", *start, *unknown),
        line("hm", *start, "</think>", "text"),
        line("hm", *start, *BLOCK),
    ]
    with scripted(*script, trace=trace) as server:
        recovered = ask(server)
        message = recovered["choices"][0]["message"]
        assert recovered["choices"][0]["finish_reason"] == "tool_calls"
        assert message["reasoning_content"].startswith("hm")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
        inject = [e for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "inject"]
        assert [event["text"] for event in inject] == ["</think>\n\n"]
        sampled = 1 + len(start) + len(inner)
        injected = len(tokenizer().encode_chat("</think>\n\n"))
        assert recovered["usage"]["completion_tokens"] == sampled + injected
        undeclared = ask(server)["choices"][0]
        assert undeclared["finish_reason"] == "stop"
        assert "undeclared" in undeclared["message"]["content"]
        ask(server)
        block = ask(server)["choices"][0]
        assert block["finish_reason"] == "tool_calls"
        assert len(block["message"]["tool_calls"]) == 1


def test_without_recovery_a_call_inside_reasoning_is_reasoning() -> None:
    with scripted(line("hm", *BLOCK, "</think>", "text"), think_recovery=False) as server:
        choice = ask(server)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "text"
    assert choice["message"]["reasoning_content"] == "hm" + "".join(BLOCK)


def test_limits_end_with_length_everywhere() -> None:
    with scripted(line("a", "b", "</think>", "c", *BLOCK), ctx=600) as server:
        for limit in range(12):
            answer = ask(server, max_tokens=limit)
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["choices"][0]["finish_reason"] == "length"
            content = answer["choices"][0]["message"]["content"]
            assert content.rstrip("\n<") == ("c" if limit >= 4 else "")
        inside = BLOCK.index("R") + 4 + 2
        cut = ask(server, max_tokens=inside)["choices"][0]
        assert cut["finish_reason"] == "length"
        assert json.loads(cut["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Ro"}
    with scripted(line("</think>", "on", then="repeat"), ctx=300) as server:
        full = ask(server, tools=[])
        assert full["choices"][0]["finish_reason"] == "length"
        assert full["usage"]["total_tokens"] == 300
    with scripted(line("</think>", "on", then="repeat"), max_tokens=7) as server:
        assert ask(server)["usage"]["completion_tokens"] == 7


def test_parallel_tool_calls_false_stops_after_the_first() -> None:
    two = call_pieces(("get_weather", [("city", "a", True)]), ("get_weather", [("city", "b", True)]))
    with scripted(line("</think>", *two)) as server:
        assert len(ask(server)["choices"][0]["message"]["tool_calls"]) == 2
        one = ask(server, parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert one["usage"]["completion_tokens"] < 1 + len(two)


def test_a_stop_string_leaves_a_state_that_the_next_turn_can_use() -> None:
    with scripted(line("</think>", "one", " two", " three", " four"), line("</think>", "ok")) as server:
        first = ask(server, stop=[" three"])
        assert first["choices"][0]["message"]["content"] == "one two"
        assert first["choices"][0]["finish_reason"] == "stop"
        assert first["usage"]["completion_tokens"] == 4
        turns = [*HELLO, {"role": "assistant", "content": "one two"}, {"role": "user", "content": "go"}]
        second = ask(server, messages=turns)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("forbidden", [frozenset(), frozenset({3})])
def test_the_sampling_chooser_never_takes_what_is_forbidden(forbidden: frozenset[int]) -> None:
    session: Any = FakeSession(0.0, 1.0, 2.0, 9.0)
    chooser = SamplingChooser(Sampling(seed=1, min_p=0))
    taken = {chooser.choose(session, TokenRules(forbidden=forbidden)).choose().token for _ in range(200)}
    assert (3 in taken) == (not forbidden)
    rules = TokenRules(greedy=True, forbidden=forbidden)
    choice = chooser.choose(session, rules).choose()
    assert choice.token == (2 if forbidden else 3)
    assert chooser.skipped(choice, rules) == list(forbidden)


def test_the_default_of_thinking_can_be_changed() -> None:
    cases: list[tuple[dict[str, Any], bool, bool]] = [
        ({}, True, False),
        ({"think": True}, True, True),
        ({"think": False}, False, False),
        ({"thinking": {"type": "enabled"}}, True, True),
        ({"thinking": {"type": "disabled"}}, False, False),
        ({"thinking": {"type": "adaptive"}}, True, False),
        ({"thinking": False, "think": True}, False, False),
        ({"thinking": None}, True, False),
        ({"reasoning_effort": "none", "thinking": True}, False, False),
        ({"reasoning_effort": "high"}, True, True),
        ({"reasoning_effort": "low", "think": False}, False, False),
        ({"model": "deepseek-chat"}, False, False),
        ({"model": "deepseek-reasoner"}, True, True),
        ({"model": "deepseek-chat", "think": True}, True, True),
    ]
    for extra, on, off in cases:
        for default, expected in ((None, on), (True, on), (False, off)):
            context = ApiContext(ServerConfig(think_default=default), "ds4-tiny", TurnMemory(), 1024)
            assert parse({"messages": HELLO, **extra}, context).request.thinking is expected, (extra, default)


# ---- however an answer ends inside a block or its reasoning, streamed or not -----------------------------------------


def stream(server: Any, **body: Any) -> dict[str, Any]:
    """A streamed answer, added up."""
    answer = server.post({"messages": HELLO, "tools": [WEATHER], "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    total: dict[str, Any] = {"content": "", "reasoning": "", "arguments": [], "finish": None}
    for text in answer.text.split("\n\n")[:-2]:
        choice = json.loads(text.removeprefix("data: "))["choices"][0]
        total["content"] += choice["delta"].get("content", "")
        total["reasoning"] += choice["delta"].get("reasoning_content", "")
        for call in choice["delta"].get("tool_calls", ()):
            total["arguments"] += [""] if "id" in call else []
            total["arguments"][call["index"]] += call["function"]["arguments"]
        total["finish"] = choice["finish_reason"]
    return total


def added_up(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer as the same values."""
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls", ())
    return {
        "content": choice["message"]["content"],
        "reasoning": choice["message"].get("reasoning_content", ""),
        "arguments": [call["function"]["arguments"] for call in calls],
        "finish": choice["finish_reason"],
    }


def test_every_place_where_the_budget_ends_gives_the_same_answer_streamed_and_not() -> None:
    pieces = ["plan", "</think>", "Look:", *BLOCK]
    seen: list[Any] = []
    with scripted(line(*pieces)) as server:
        for limit in range(1, len(pieces)):
            answer = added_up(ask(server, max_tokens=limit))
            assert answer == stream(server, max_tokens=limit)
            assert answer["finish"] == "length"
            seen.append([json.loads(arguments) for arguments in answer["arguments"]])
        assert added_up(ask(server, max_tokens=len(pieces)))["finish"] == "tool_calls"
    some: list[Any] = [[], [{}], [{"city": ""}], [{"city": "Rom"}], [{"city": "Rome", "days": {"a": "b "}}]]
    assert all(arguments in seen for arguments in some)


@pytest.mark.parametrize("inside", ["R", "m", "{", "a"])
def test_the_context_ends_inside_a_call_like_the_budget(inside: str) -> None:
    pieces = ["</think>", "Look:", *BLOCK]
    cut = pieces.index(inside) + 1
    with scripted(line(*pieces)) as server:
        prompt = ask(server, max_tokens=1)["usage"]["prompt_tokens"]
        budget = added_up(ask(server, max_tokens=cut))
    with scripted(line(*pieces), ctx=prompt + cut) as server:
        answer = ask(server)
        assert answer["usage"]["total_tokens"] == prompt + cut
        assert added_up(answer) == budget == stream(server)
    assert budget["finish"] == "length"
    assert isinstance(json.loads(budget["arguments"][0]), dict)


def test_a_script_that_obeys_holds_off_the_end_inside_a_call(tmp_path: Path) -> None:
    trace = tmp_path / "t"
    opened = BLOCK[: BLOCK.index("R")]
    held = [piece for _ in range(MAX_EOS_MASKED) for piece in (EOS, "x")]
    with scripted(line("</think>", *opened, *held, EOS, "y", obey=True), trace=trace) as server:
        answer = added_up(ask(server))
        refused = [piece for piece in pieces(trace) if not piece["allowed"]]
    with scripted(line("</think>", *opened, *held, EOS, "y", obey=True)) as server:
        assert stream(server) == answer
    assert answer["finish"] == "tool_calls"
    assert [json.loads(arguments) for arguments in answer["arguments"]] == [{"city": "x" * MAX_EOS_MASKED}]
    assert [piece["text"] for piece in refused] == [EOS] * MAX_EOS_MASKED
    assert {piece["state"] for piece in refused} == {"string_body"}
    # A script that does not obey ends where it says.
    with scripted(line("</think>", *opened, "R", EOS, "y")) as server:
        assert json.loads(added_up(ask(server))["arguments"][0]) == {"city": "R"}


@pytest.mark.parametrize("tools", [[], [WEATHER]])
@pytest.mark.parametrize("end", ["eos", "length"])
def test_reasoning_that_is_not_closed_is_no_content(tools: list[Any], end: str) -> None:
    body = {"tools": tools, **({"max_tokens": 2} if end == "length" else {})}
    with scripted(line("why", " not")) as server:
        answer = added_up(ask(server, **body))
        assert answer == stream(server, **body)
    expected = {"content": "", "reasoning": "why not", "arguments": [], "finish": "stop" if end == "eos" else "length"}
    assert answer == expected


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        (BLOCK, 1),  # the calls of the block follow as bare ones
        (["".join(BLOCK)], 0),  # all of it in one token: it is in the reasoning, and nothing else
        (["".join(BLOCK), *BLOCK], 1),  # and written once more
        ([*BLOCK[:5], *BLOCK], 1),
        ([*BLOCK[:5], *BLOCK[5:-4], *BLOCK], 1),
    ],
)
def test_a_call_that_closes_the_reasoning_is_never_run_twice(given: list[str], calls: int) -> None:
    with scripted(line("hm", *given)) as server:
        answer = added_up(ask(server))
        assert len(answer["arguments"]) == calls
        assert answer["reasoning"].startswith("hm")
        assert stream(server) == answer


def test_calls_behind_closed_reasoning_count_once_and_those_inside_never(tmp_path: Path) -> None:
    for recovery in (True, False):
        with scripted(line("hm", "</think>", *BLOCK), think_recovery=recovery) as server:
            assert len(added_up(ask(server))["arguments"]) == 1
    with scripted(line("".join(BLOCK), "</think>", *BLOCK), think_recovery=False) as server:
        answer = added_up(ask(server))
        assert answer == stream(server)
    assert answer["reasoning"] == "".join(BLOCK)
    assert len(answer["arguments"]) == 1
