"""Conversations with tools over HTTP: what was sampled stays, however a client shows it, and edits are honoured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from server_harness import WEATHER, Running, call_pieces, line, scripted

CALL = call_pieces(("get_weather", [("city", "Rome", True), ("days", "3", False)]))
TWO_CALLS = call_pieces(("get_weather", [("city", "Rome", True)]), ("get_weather", [("city", "Oslo", True)]))
LOOK = line("why", "</think>", "Let", " me", " look", *CALL)
"""Thinks, says something, and calls; the call's JSON has a whole number and no spaces."""

SAY = line("it", " is", "</think>", "Sunny", ".")
SYSTEM = {"role": "system", "content": "You know the weather of every city."}
ASK = {"role": "user", "content": "How is Rome?"}


class Talk:
    """A client of the chat API, and what the server says of its requests."""

    def __init__(self, server: Running, trace: Path) -> None:
        self.server, self.trace = server, trace

    def ask(self, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The answer's message, with `usage` and `prompt` (the trace of it) beside its own fields."""
        body = {"messages": list(messages), "tools": [WEATHER], **options}
        answer = self.server.post(body)
        assert answer.status_code == 200, answer.text
        value = answer.json()
        events = [json.loads(text) for text in self.trace.read_text(encoding="utf-8").splitlines()]
        prompt = [event for event in events if event["event"] == "prompt"][-1]
        usage = value["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == prompt["reused"]
        return {**value["choices"][0]["message"], "usage": usage, "prompt": prompt}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where the server writes its trace."""
    return tmp_path / "trace"


def held(answer: dict[str, Any]) -> int:
    """Tokens that the state holds after an answer that ended with its block of calls, or by itself."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] + usage["completion_tokens"]) - (1 if answer.get("tool_calls") else 0)


def shown(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An assistant message as a client sends it back: without reasoning, unless it is among the changes."""
    kept = {key: answer[key] for key in ("role", "content", "tool_calls") if key in answer}
    return {key: value for key, value in {**kept, **changes}.items() if value is not ...}


def result(answer: dict[str, Any], index: int = 0, text: str = "sunny") -> dict[str, Any]:
    """The result of one of an answer's calls."""
    return {"role": "tool", "tool_call_id": answer["tool_calls"][index]["id"], "content": text}


def with_arguments(answer: dict[str, Any], arguments: str) -> list[dict[str, Any]]:
    """An answer's calls with other arguments in the first."""
    first, *others = answer["tool_calls"]
    return [{**first, "function": {**first["function"], "arguments": arguments}}, *others]


def live_text(server: Running) -> str:
    """What the one session of a server holds."""
    assert server.worker.wait_idle(30)
    (session,) = server.worker.sessions()
    return session.engine.tokenizer.decode(session.tokens).decode()


CLIENTS: dict[str, dict[str, Any]] = {
    "drops reasoning": {},
    "keeps reasoning": {"reasoning_content": "why"},
    "trims reasoning": {"reasoning_content": " why\n"},
    "drops text": {"content": None},
    "empties text": {"content": ""},
    "pads text": {"content": "Let me look\n\n"},
    "cuts text in parts": {"content": [{"type": "text", "text": "Let me"}, {"type": "text", "text": " look"}]},
    "rewrites reasoning and drops text": {"reasoning_content": "because", "content": None},
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("rewrites", "replay"), [(True, True), (False, False)])
def test_however_a_client_shows_a_call_all_that_was_sampled_stays(
    client: str, rewrites: bool, replay: bool, trace: Path
) -> None:
    with scripted(LOOK, SAY, trace=trace, replay=replay) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        assert first["reasoning_content"] == "why"
        calls = with_arguments(first, '{ "days" : 3, "city" : "R\\u006fme" }') if rewrites else first["tool_calls"]
        turn = shown(first, tool_calls=calls, **CLIENTS[client])
        second = talk.ask(SYSTEM, ASK, turn, result(first))
        assert second["content"] == "Sunny."
        assert (second["prompt"]["source"], second["prompt"]["miss"]) == ("live", "")
        assert second["prompt"]["reused"] == held(first)
        text = live_text(server)
        assert text.endswith(
            "<｜Assistant｜><think>why</think>Let me look" + "".join(CALL) + "<｜end▁of▁sentence｜>"
            "<｜User｜><tool_result>sunny</tool_result><｜Assistant｜><think>it is</think>Sunny."
        )


def test_a_long_conversation_of_a_client_that_trims_everything_is_never_evaluated_twice(trace: Path) -> None:
    with scripted(LOOK, LOOK, SAY, LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        messages: list[dict[str, Any]] = [SYSTEM, ASK]
        before = 0
        for _ in range(5):
            answer = talk.ask(*messages)
            assert answer["prompt"]["reused"] == before
            before = held(answer)
            if answer.get("tool_calls"):
                messages += [shown(answer, content=None), result(answer)]
            else:
                messages += [shown(answer), {"role": "user", "content": "And tomorrow?"}]
        assert live_text(server).count("why") == 3


def edits(first: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Prompts that are not quite what the client was told, or had asked."""
    turn, answer = shown(first), result(first)
    call = first["tool_calls"][0]
    renamed = {**call, "function": {**call["function"], "name": "get_weathers"}}
    return {
        "text": [SYSTEM, ASK, shown(first, content="Let me see"), answer],
        "part of the text": [SYSTEM, ASK, shown(first, content="Let me"), answer],
        "arguments": [SYSTEM, ASK, {**turn, "tool_calls": with_arguments(first, '{"city":"Oslo","days":3}')}, answer],
        "number": [SYSTEM, ASK, {**turn, "tool_calls": with_arguments(first, '{"city":"Rome","days":"3"}')}, answer],
        "name": [SYSTEM, ASK, {**turn, "tool_calls": [renamed]}, answer],
        "id": [SYSTEM, ASK, {**turn, "tool_calls": [{**call, "id": "call_x"}], "content": None}, answer],
        "another call": [SYSTEM, ASK, {**turn, "tool_calls": [call, {**call, "id": "call_x"}]}, answer],
        "no call": [SYSTEM, ASK, {"role": "assistant", "content": None}, answer],
        "question": [SYSTEM, {**ASK, "content": "How is Rome??"}, {**turn, "content": None}, answer],
        "system": [{**SYSTEM, "content": "You know nothing."}, ASK, {**turn, "content": None}, answer],
        "two messages": [SYSTEM, ASK, {"role": "assistant", "content": "Well."}, {**turn, "content": None}, answer],
    }


@pytest.mark.parametrize("edit", edits({"role": "assistant", "tool_calls": [{"id": "", "function": {}}]}))
def test_an_edit_is_honoured_and_costs_no_more_than_what_follows_it(edit: str, trace: Path) -> None:
    with scripted(LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        messages = edits(first)[edit]
        second = talk.ask(*messages)
        prompt = second["prompt"]
        assert prompt["detail"] not in ("calls", "visible")
        assert prompt["miss"]
        # What is evaluated is what the client sent.
        assert prompt["effective_tokens"] == prompt["tokens"]
        asked = first["usage"]["prompt_tokens"]
        if edit not in ("question", "system"):
            assert prompt["reused"] == asked - 1
        else:
            assert prompt["reused"] < asked - 1


def test_other_tools_are_another_front(trace: Path) -> None:
    other = {**WEATHER, "function": {**WEATHER["function"], "description": "Weather of any city"}}
    with scripted(LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        for tools in ([other], [WEATHER, {**other, "function": {**other["function"], "name": "f"}}], []):
            second = talk.ask(SYSTEM, ASK, shown(first, content=None), result(first), tools=tools)
            assert second["prompt"]["detail"] not in ("calls", "visible")
            assert second["prompt"]["effective_tokens"] == second["prompt"]["tokens"]


@pytest.mark.parametrize("thinks", [(True, False, True, False), (False, True, False, True), (True, True, False, False)])
def test_thinking_may_change_from_turn_to_turn(thinks: Sequence[bool], trace: Path) -> None:
    def said(thinking: bool, *pieces: str) -> dict[str, Any]:
        return line(*(["why", "</think>"] if thinking else []), *pieces)

    lines = [said(thinks[0], *CALL), said(thinks[1], "Sun", *CALL), said(thinks[2], "Fine."), said(thinks[3], "Bye.")]
    with scripted(*lines, trace=trace) as server:
        talk = Talk(server, trace)
        messages: list[dict[str, Any]] = [SYSTEM, ASK]
        before = 0
        for thinking in thinks:
            answer = talk.ask(*messages, thinking=thinking)
            assert answer["prompt"]["reused"] == before
            before = held(answer)
            if answer.get("tool_calls"):
                messages += [shown(answer), result(answer)]
            else:
                messages += [shown(answer), {"role": "user", "content": "Thanks."}]
            marker = "<think>why" if thinking else ""
            assert f"<｜Assistant｜>{marker}</think>" in live_text(server)
        assert live_text(server).count("<think>why</think>") == sum(thinks)


def test_reasoning_that_is_dropped_later_was_still_there(trace: Path) -> None:
    """Some clients send the reasoning while a question is worked on, and drop it with the next one."""
    with scripted(LOOK, line("hm", "</think>", *CALL), SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        turns = [shown(first, reasoning_content="why"), result(first)]
        second = talk.ask(SYSTEM, ASK, *turns)
        turns += [shown(second, reasoning_content="hm"), result(second)]
        third = talk.ask(SYSTEM, ASK, *turns)
        assert third["prompt"]["reused"] == held(second)
        bare = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in turns]
        more = [shown(third), {"role": "user", "content": "And Oslo?"}]
        fourth = talk.ask(SYSTEM, ASK, *bare, *more)
        assert (fourth["prompt"]["detail"], fourth["prompt"]["reused"]) == ("visible", held(third))
        # Another question is an edit, as long as the true one or not.
        for question in ("How is Roma", "How is Oslo?"):
            other = talk.ask(SYSTEM, {**ASK, "content": question}, *bare, *more)
            assert other["prompt"]["reused"] < first["usage"]["prompt_tokens"]
        # And reasoning that is not the true one.
        edited = [{**bare[0], "reasoning_content": "so"}, *bare[1:]]
        fifth = talk.ask(SYSTEM, ASK, *edited, *more)
        assert fifth["prompt"]["reused"] < held(second)


def test_reasoning_that_a_client_tells_in_its_own_words_is_no_edit_of_what_follows(trace: Path) -> None:
    with scripted(LOOK, line("hm", "</think>", *CALL), SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        messages, before = [SYSTEM, ASK], 0
        for _ in range(2):
            answer = talk.ask(*messages)
            assert answer["prompt"]["reused"] == before
            before = held(answer)
            messages += [shown(answer, reasoning_content="It looks up the weather."), result(answer)]
        answer = talk.ask(*messages)
        assert answer["prompt"]["reused"] == before
        messages += [shown(answer), {"role": "user", "content": "And Oslo?"}]
        assert talk.ask(*messages)["prompt"]["reused"] == held(answer)
        assert "It looks up" not in live_text(server)


@pytest.mark.parametrize(
    ("content", "live"), [("\n Sunny.  ", True), ("Sunny.", True), ("", False), (None, False), ("Sunny", False)]
)
def test_an_answer_without_calls_may_be_trimmed_but_not_left_out(content: str | None, live: bool, trace: Path) -> None:
    with scripted(line("it is", "</think>", "\n\n", " Sunny.", "\n"), SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        second = talk.ask(SYSTEM, ASK, shown(first, content=content), {"role": "user", "content": "Ok."})
        assert (second["prompt"]["detail"] == "visible") == live
        assert second["prompt"]["reused"] == (held(first) if live else first["usage"]["prompt_tokens"])


def test_an_old_answer_with_calls_is_a_way_in_as_well(trace: Path) -> None:
    with scripted(LOOK, SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        turn = [shown(first, content=None), result(first)]
        second = talk.ask(SYSTEM, ASK, *turn)
        # Its final answer is edited: everything up to there stays.
        edited = [shown(second, content="Rainy."), {"role": "user", "content": "Really?"}]
        third = talk.ask(SYSTEM, ASK, *turn, *edited)
        assert third["prompt"]["detail"] == "calls"
        assert third["prompt"]["reused"] == second["usage"]["prompt_tokens"]
        assert "Rainy." in third["prompt"]["miss"]
        text = live_text_of_last(server)
        assert "<think>why</think>Let me look" in text
        assert "<think></think>Rainy.<｜end▁of▁sentence｜><｜User｜>Really?" in text


def live_text_of_last(server: Running) -> str:
    """What the session that was used last holds."""
    assert server.worker.wait_idle(30)
    session = max(server.worker._slots.slots, key=lambda slot: slot.used).session
    return session.engine.tokenizer.decode(session.tokens).decode()


def test_regenerate_and_other_results_branch_off_behind_the_sampled_calls(trace: Path) -> None:
    with scripted(LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        turn = shown(first, content=None)
        second = talk.ask(SYSTEM, ASK, turn, result(first))
        again = talk.ask(SYSTEM, ASK, turn, result(first))
        assert (again["prompt"]["source"], again["prompt"]["detail"]) == ("checkpoint", "calls")
        assert again["prompt"]["reused"] == second["usage"]["prompt_tokens"] - 1
        assert "prompt-shorter" in again["prompt"]["miss"]
        other = talk.ask(SYSTEM, ASK, turn, result(first, text="rainy, and cold"))
        assert (other["prompt"]["source"], other["prompt"]["detail"]) == ("checkpoint", "calls")
        assert other["prompt"]["reused"] >= held(first)
        # Every branch is live.
        for answer, text in ((second, "sunny"), (other, "rainy, and cold")):
            messages = [SYSTEM, ASK, turn, result(first, text=text), shown(answer), {"role": "user", "content": "Ok."}]
            assert talk.ask(*messages)["prompt"]["reused"] == held(answer)


def test_of_answers_that_look_alike_the_one_with_the_ids_goes_on(trace: Path) -> None:
    def thought(text: str, *pieces: str) -> dict[str, Any]:
        return line(text, "</think>", *pieces)

    lines = [thought("one", *CALL), thought("two", *CALL), thought("three", "Ok."), thought("four", "Ok."), SAY, SAY]
    with scripted(*lines, trace=trace) as server:
        talk = Talk(server, trace)
        first, second = talk.ask(SYSTEM, ASK), talk.ask(SYSTEM, ASK)
        histories = [[SYSTEM, ASK, shown(answer), result(answer)] for answer in (first, second)]
        ends = []
        for answer, history, thought_of in zip((first, second), histories, ("one", "two"), strict=True):
            ends.append(talk.ask(*history))
            assert (ends[-1]["prompt"]["source"], ends[-1]["prompt"]["reused"]) == ("live", held(answer))
            assert f"<think>{thought_of}</think>" in live_text_of_last(server)
        # And with an answer behind them that looks alike as well.
        for end, history, thoughts in zip(ends, histories, (("one", "three"), ("two", "four")), strict=True):
            last = talk.ask(*history, shown(end), {"role": "user", "content": "Thanks."})
            assert last["prompt"]["reused"] == held(end)
            assert all(f"<think>{text}</think>" in live_text_of_last(server) for text in thoughts)


def test_of_answers_that_look_alike_and_have_no_ids_the_last_one_goes_on(trace: Path) -> None:
    lines = [line(*["hm "] * 9, "</think>", "Ok."), line("so", "</think>", "Ok."), SAY]
    with scripted(*lines, trace=trace) as server:
        talk = Talk(server, trace)
        talk.ask(SYSTEM, ASK)
        second = talk.ask(SYSTEM, ASK)
        third = talk.ask(SYSTEM, ASK, shown(second), {"role": "user", "content": "Thanks."})
        assert third["prompt"]["reused"] == held(second)
        assert "<think>so</think>Ok." in live_text_of_last(server)


def test_a_client_with_ids_of_its_own_goes_on_by_what_it_shows(trace: Path) -> None:
    with scripted(line("why", "</think>", *CALL), SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        turn = shown(first, tool_calls=[{**first["tool_calls"][0], "id": "x1"}])
        messages = [SYSTEM, ASK, turn, {"role": "tool", "tool_call_id": "x1", "content": "sunny"}]
        second = talk.ask(*messages)
        assert (second["prompt"]["detail"], second["prompt"]["reused"]) == ("visible", held(first))
        third = talk.ask(*messages, shown(second), {"role": "user", "content": "Thanks."})
        assert third["prompt"]["reused"] == held(second)


def test_requests_in_between_and_several_conversations(trace: Path) -> None:
    with scripted(LOOK, LOOK, SAY, SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        one = talk.ask(SYSTEM, ASK)
        two = talk.ask(SYSTEM, {**ASK, "content": "How is it in Rome?"})
        talk.ask({"role": "user", "content": "Hello"}, tools=[])
        second = talk.ask(SYSTEM, ASK, shown(one), result(one))
        assert second["prompt"]["reused"] == held(one)
        second = talk.ask(SYSTEM, {**ASK, "content": "How is it in Rome?"}, shown(two, content=None), result(two))
        assert second["prompt"]["reused"] == held(two)
        # The ids of one conversation do not lead another one there.
        mixed = talk.ask(SYSTEM, ASK, shown(two, content=None), result(two))
        assert mixed["prompt"]["reused"] == one["usage"]["prompt_tokens"] - 1
        assert mixed["prompt"]["effective_tokens"] == mixed["prompt"]["tokens"]


def test_without_a_session_left_the_sampled_block_is_repeated(trace: Path) -> None:
    with scripted(LOOK, SAY, trace=trace, max_sessions=1) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        talk.ask({"role": "user", "content": "Hello"}, tools=[])
        second = talk.ask(SYSTEM, ASK, shown(first), result(first))
        assert second["prompt"]["reused"] <= 1
        assert second["prompt"]["replay"] == {"memory": 1}
        assert "<think></think>Let me look" + "".join(CALL) in second["prompt"]["text"]
        edited = shown(first, tool_calls=with_arguments(first, '{"city":"Oslo"}'))
        for turn, way in (
            (edited, "canonical"),
            (shown(first, tool_calls=[{**first["tool_calls"][0], "id": "x"}]), "missing"),
        ):
            answer = talk.ask(SYSTEM, ASK, turn, {"role": "tool", "tool_call_id": "x", "content": "?"})
            assert answer["prompt"]["replay"] == {way: 1}


def test_calls_that_replay_has_forgotten_are_still_known_to_the_state(trace: Path) -> None:
    with scripted(LOOK, LOOK, SAY, trace=trace, tool_memory_max_ids=1) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        talk.ask(SYSTEM, {**ASK, "content": "And Oslo?"})
        second = talk.ask(SYSTEM, ASK, shown(first, content=None), result(first))
        assert second["prompt"]["replay"] == {"missing": 1}
        assert (second["prompt"]["detail"], second["prompt"]["reused"]) == ("calls", held(first))


def test_results_in_any_order_and_what_the_user_adds_to_them(trace: Path) -> None:
    with scripted(line("why", "</think>", *TWO_CALLS), SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        results = [result(first, 1, "rain"), result(first, 0, "sun")]
        second = talk.ask(SYSTEM, ASK, shown(first), *results, {"role": "user", "content": "Be brief."})
        assert second["prompt"]["reused"] == held(first)
        assert (
            "<｜User｜><tool_result>sun</tool_result>\n\n<tool_result>rain</tool_result>\n\nBe brief.<｜Assistant｜>"
        ) in live_text(server)


def test_one_call_at_a_time_leaves_a_block_that_is_closed_for_the_model(trace: Path) -> None:
    with scripted(line("why", "</think>", *TWO_CALLS), SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK, parallel_tool_calls=False)
        assert len(first["tool_calls"]) == 1
        second = talk.ask(SYSTEM, ASK, shown(first), result(first), parallel_tool_calls=False)
        assert (second["prompt"]["detail"], second["prompt"]["source"]) == ("calls", "live")
        one = "".join(call_pieces(("get_weather", [("city", "Rome", True)])))
        assert f"<think>why</think>{one}<｜end▁of▁sentence｜><｜User｜>" in live_text(server)


def test_a_block_that_had_to_be_completed_goes_on_as_it_was_sampled(trace: Path) -> None:
    cut = CALL[: CALL.index("</", CALL.index("3"))]
    with scripted(line("why", "</think>", *cut), SAY, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome", "days": 3}
        second = talk.ask(SYSTEM, ASK, shown(first), result(first))
        assert (second["prompt"]["detail"], second["prompt"]["source"]) == ("calls", "live")
        assert f"<think>why</think>{''.join(cut)}<｜end▁of▁sentence｜><｜User｜>" in live_text(server)
        edited = shown(first, tool_calls=with_arguments(first, '{"city":"Rome","days":4}'))
        assert talk.ask(SYSTEM, ASK, edited, result(first))["prompt"]["detail"] not in ("calls", "visible")


def test_an_answer_that_was_cut_is_not_continued(trace: Path) -> None:
    with scripted(LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK, max_tokens=len(LOOK["pieces"]) - 4)
        assert first["tool_calls"]
        second = talk.ask(SYSTEM, ASK, shown(first), result(first))
        assert second["prompt"]["detail"] not in ("calls", "visible")


def test_a_conversation_without_room_for_its_hidden_reasoning_goes_on_without_it(trace: Path) -> None:
    thought = line(*["hm "] * 60, "</think>", *CALL)
    with scripted(thought, SAY, trace=trace, ctx=400) as server:
        talk = Talk(server, trace)
        first = talk.ask(ASK)
        room = 400 - first["usage"]["prompt_tokens"] - first["usage"]["completion_tokens"]
        second = talk.ask(ASK, shown(first), result(first, text="7 " * (room // 2 + 10)))
        assert second["prompt"]["tokens"] < 400 <= second["prompt"]["tokens"] + 60
        assert second["prompt"]["effective_tokens"] == second["prompt"]["tokens"]


def test_hidden_reasoning_never_takes_the_room_that_the_answer_needs(trace: Path) -> None:
    thought, said = line(*["hm "] * 240, "</think>", *CALL), line("</think>", *["word "] * 60)
    with scripted(thought, said, said, trace=trace, ctx=600) as server:
        talk = Talk(server, trace)
        first = talk.ask(ASK)
        turn = [shown(first), result(first)]
        # It wants little, and that fits behind the reasoning.
        little = talk.ask(ASK, *turn, max_tokens=10)
        assert little["prompt"]["reused"] == held(first)
        assert little["prompt"]["effective_tokens"] > 600 - 60
        for _ in range(2):
            second = talk.ask(ASK, *turn)
            assert second["prompt"]["effective_tokens"] == second["prompt"]["tokens"]
            assert second["content"] == "word " * 60


@pytest.mark.parametrize("template", ["official", "ds4"])
def test_both_templates_continue_live(template: str, trace: Path) -> None:
    with scripted(LOOK, SAY, SAY, trace=trace, template=template) as server:
        talk = Talk(server, trace)
        messages: list[dict[str, Any]] = [SYSTEM, ASK]
        first = talk.ask(*messages)
        messages += [shown(first, content=None), result(first)]
        second = talk.ask(*messages)
        assert second["prompt"]["reused"] == held(first)
        messages += [shown(second), {"role": "user", "content": "And Oslo?"}]
        third = talk.ask(*messages)
        assert third["prompt"]["reused"] == held(second)


def test_an_edited_question_of_a_history_that_came_whole_starts_at_its_turn(trace: Path) -> None:
    history = [SYSTEM, ASK, {"role": "assistant", "content": "It is sunny. " * 20}]
    with scripted(SAY, trace=trace) as server:
        talk = Talk(server, trace)
        talk.ask(*history, {"role": "user", "content": "And Oslo? " * 20})
        edited = talk.ask(*history, {"role": "user", "content": "But Oslo? " * 20})
        whole = edited["prompt"]["text"]
        start = whole.index("<｜User｜>But")
        before = len(server.worker.engine.tokenizer.encode_chat(whole[:start]))
        assert edited["prompt"]["reused"] == before
        assert (
            "after '. <｜end▁of▁sentence｜><｜User｜>'" in edited["prompt"]["miss"]
            or "'And Oslo" in edited["prompt"]["miss"]
        )


def test_what_a_second_attempt_made_good_stays_hidden_and_live(trace: Path) -> None:
    """The client sees neither the malformed calls nor what the model was told about them."""
    broken = ["".join(CALL[:6]).replace("get_weather", "get"), "nonsense", *CALL[-3:]]
    pieces = [piece for part in broken for piece in part.replace("｜DSML｜", "\0｜DSML｜\0").split("\0") if piece]
    first_try = line("hm", "</think>", *pieces)
    with scripted(first_try, line("so", "</think>", *CALL), LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(SYSTEM, ASK)
        assert len(first["tool_calls"]) == 1
        messages = [SYSTEM, ASK, shown(first, content=None), result(first)]
        second = talk.ask(*messages)
        assert (second["prompt"]["source"], second["prompt"]["miss"]) == ("live", "")
        text = live_text(server)
        assert "nonsense" in text
        assert text.count("<｜Assistant｜>") == 3
        messages += [shown(second, reasoning_content="why"), result(second)]
        third = talk.ask(*messages, thinking=False)
        assert (third["prompt"]["source"], third["prompt"]["reused"]) == ("live", held(second))
        assert "<｜Assistant｜></think>" in live_text(server)
        # Of the three turns before, the client has seen two.
        messages += [shown(third), {"role": "user", "content": "And Oslo?"}]
        fourth = talk.ask(*messages)
        assert (fourth["prompt"]["source"], fourth["prompt"]["reused"]) == ("live", held(third))


@pytest.mark.parametrize(("added", "live"), [("metric", True), ("imperial", False)])
def test_a_default_that_a_client_adds_to_a_call_is_no_edit(added: str, live: bool, trace: Path) -> None:
    function = WEATHER["function"]
    assert isinstance(function, dict)
    properties = {**function["parameters"]["properties"], "units": {"type": "string", "default": "metric"}}
    tool = {"type": "function", "function": {**function, "parameters": {"type": "object", "properties": properties}}}
    with scripted(LOOK, SAY, trace=trace) as server:
        talk = Talk(server, trace)
        first = talk.ask(ASK, tools=[tool])
        calls = with_arguments(first, json.dumps({"units": added, "city": "Rome", "days": 3}))
        second = talk.ask(ASK, shown(first, tool_calls=calls), result(first), tools=[tool])
        assert (second["prompt"]["source"] == "live") == live
        assert second["prompt"]["replay"] == {"memory" if live else "canonical": 1}
        said = second["prompt"]["text"].partition("<｜User｜>")[2]
        assert ("units" in said) == (not live)
        assert not live or "<think>why</think>Let me look" in live_text(server)
