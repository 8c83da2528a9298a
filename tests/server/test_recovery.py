"""A tool call that cannot be read: the model is asked again, once, and the client gets one answer."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import WEATHER, Running, call_pieces, line, scripted, tokenizer
from worker_harness import Gate, look_until

from ds4.chat.events import Event, ReasoningDelta, TextDelta
from ds4.chat.message import Message, read_message
from ds4.chat.stream import StreamParser
from ds4.engine import Sampling
from ds4.server.decode import SamplingChooser
from ds4.server.recovery import MIN_ROOM, Earlier, correction
from ds4.server.scripted import Script, ScriptedTokenizer, read_script

HELLO = [{"role": "user", "content": "Hello"}]
MARK = "｜DSML｜"
EOS = "<｜end▁of▁sentence｜>"
GOOD = call_pieces(("get_weather", [("city", "Rome", True)]))
START = GOOD[:5]
BEGUN = GOOD[: GOOD.index(">\n", GOOD.index(' name="get_weather"')) + 1]
"""A block up to the end of its first invoke tag: a call has begun."""

MALFORMED = {
    "prose": [*START, "I think", " that"],
    "another tag": [*START, "<", "div", ">"],
    "no name": [*START, "<", MARK, "invoke", ">", "x"],
    "a parameter alone": [*START, "<", MARK, "parameter", ' name="city" string="true"', ">", "Rome"],
    "the end of a call": [*START, "</", MARK, "invoke", ">"],
    "a block in a block": [*START, "<", MARK, "tool_calls", ">"],
    "other marks": ["\n\n", "<|DSML|tool_calls>", "\n", "hm"],
    "no call": [*START, "</", MARK, "tool_calls", ">"],
    "cut": [*START, "<", MARK, "inv"],
    "cut at once": [*START[:-1], ">"],
}
"""Blocks that show what they are before any call of theirs has begun."""

BEGUN_AND_MALFORMED = {
    "prose": [*BEGUN, "no"],
    "not JSON": [*BEGUN, "<", MARK, "parameter", ' name="days" string="false"', ">", "[1 2]"],
    "a second call": [*GOOD[:-4], "oops"],
}


def ask(server: Running, stream: bool, **body: Any) -> dict[str, Any]:
    """The answer, streamed or not, as the same values."""
    request = {"messages": HELLO, "tools": [WEATHER], "stream": stream, "stream_options": {"include_usage": True}}
    response = server.post({**request, **body})
    assert response.status_code == 200, response.text
    return streamed(response.text) if stream else whole(response.json())


def whole(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())],
        "finish": choice["finish_reason"],
        "usage": body["usage"],
    }


def streamed(text: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "usage": None}
    for frame in text.split("\n\n"):
        if not frame.startswith("data: {"):
            continue
        chunk = json.loads(frame.removeprefix("data: "))
        if "error" in chunk:
            answer["finish"] = "error"
            continue
        answer["usage"] = chunk.get("usage") or answer["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if "reasoning_content" in delta:
                assert not answer["content"], "reasoning behind text"
            answer["content"] += delta.get("content", "")
            answer["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(answer["calls"])
                    answer["calls"].append((call["function"]["name"], ""))
                name, arguments = answer["calls"][call["index"]]
                answer["calls"][call["index"]] = name, arguments + call["function"]["arguments"]
            answer["finish"] = choice["finish_reason"] or answer["finish"]
    return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("x")) as running:
        yield running


def both(server: Running, *script: dict[str, Any], **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a script answers, not streamed and streamed."""
    answers = []
    for stream in (False, True):
        play(server, *script)
        answers.append(ask(server, stream, **body))
        answers[-1]["usage"] = answers[-1]["usage"] and answers[-1]["usage"]["completion_tokens"]
    return answers[0], answers[1]


def play(server: Running, *script: dict[str, Any]) -> None:
    """Let a server that is idle go on with another script."""
    assert server.worker.wait_idle(30)
    lines = read_script("\n".join(json.dumps(one) for one in script))
    tokens = server.worker.engine.tokenizer
    assert isinstance(tokens, ScriptedTokenizer)
    tokens.add(piece for one in lines for piece in one.pieces)
    server.worker.backend.chooser = Script(lines, tokens).chooser


def events(trace: Path, *names: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in trace.read_text().splitlines()]
    return [event for event in found if event["event"] in names] if names else found


ROME = [("get_weather", '{"city":"Rome"}')]


# ---- what a client gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("think", [True, False])
def test_a_block_that_is_no_call_is_asked_for_again_and_the_client_sees_only_the_answer(
    server: Running, kind: str, think: bool
) -> None:
    close = ["</think>"] if think else []
    script = [line(*close, "Look:", *MALFORMED[kind]), line(*close, *GOOD), line(*close, "never")]
    plain, stream = both(server, *script, think=think)
    assert plain == stream
    assert (plain["content"], plain["reasoning"], plain["finish"]) == ("Look:", "", "tool_calls")
    assert plain["calls"] == ROME


@pytest.mark.parametrize("kind", BEGUN_AND_MALFORMED)
def test_a_call_that_has_begun_is_asked_for_again_only_if_nobody_has_seen_it(server: Running, kind: str) -> None:
    plain, stream = both(server, line("</think>", "Look:", *BEGUN_AND_MALFORMED[kind]), line("</think>", "so", *GOOD))
    assert (plain["content"], plain["calls"], plain["finish"]) == ("Look:\n\nso", ROME, "tool_calls")
    assert (stream["content"], stream["finish"]) == ("Look:", "error")
    for _, arguments in stream["calls"]:
        json.loads(arguments)


def test_ids_of_calls_that_nobody_saw_are_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    script = [line("</think>", *BEGUN_AND_MALFORMED["a second call"]), line("</think>", *GOOD), line("</think>", "ok")]
    with scripted(*script) as server:
        new_id = server.worker.replay.new_id

        def making(*args: Any) -> str:
            made.append(new_id(*args))
            return made[-1]

        monkeypatch.setattr(server.worker.replay, "new_id", making)
        message = server.post({"messages": HELLO, "tools": [WEATHER]}).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert server.worker.replay.attach(read_message(message)).raw_dsml == "".join(GOOD)
        assert len(server.worker.replay) == 1
        assert call["id"] == made[-1]
        assert len(made) > 1


@pytest.mark.parametrize(
    ("first", "second", "content", "reasoning"),
    [
        (["a", "</think>"], ["b", "</think>"], "", "a\n\nb"),
        (["a", "</think>"], ["b", "</think>", "text"], "text", "a\n\nb"),
        (["a", "</think>", "Look"], ["b", "</think>", " at", " it"], "Look at it", "a"),
        (["a", "</think>", "Look"], ["</think>", "at", " it"], "Look\n\nat it", "a"),
        (["</think>", "Look"], ["</think>"], "Look", ""),
        (["</think>"], ["b", "</think>", "text"], "text", "b"),
        (["a\n", "</think>"], ["b", "b", "</think>"], "", "a\nbb"),
    ],
)
def test_the_attempts_make_one_answer(
    server: Running, first: list[str], second: list[str], content: str, reasoning: str
) -> None:
    plain, stream = both(server, line(*first, *MALFORMED["prose"]), line(*second, *GOOD))
    assert plain == stream
    assert (plain["content"], plain["reasoning"], plain["calls"]) == (content, reasoning, ROME)


def test_the_second_answer_may_be_plain_text(server: Running) -> None:
    plain, stream = both(server, line("</think>", *MALFORMED["prose"]), line("</think>", "Never mind."))
    assert plain == stream
    assert (plain["content"], plain["calls"], plain["finish"]) == ("Never mind.", [], "stop")


def test_a_second_failure_is_text_or_an_error_as_if_it_were_the_first(server: Running) -> None:
    bad = "".join(MALFORMED["prose"])
    plain, stream = both(server, line("</think>", "A", *MALFORMED["prose"]), line("</think>", "B", *MALFORMED["prose"]))
    assert plain == stream
    assert (plain["content"], plain["finish"]) == (f"A\n\nB{bad}", "stop")
    begun = BEGUN_AND_MALFORMED["prose"]
    plain, stream = both(server, line("</think>", "A", *MALFORMED["prose"]), line("</think>", "B", *begun))
    assert (plain["content"], plain["calls"], plain["finish"]) == ("A\n\nB" + "".join(begun), [], "stop")
    assert (stream["content"], stream["finish"]) == ("A\n\nB", "error")
    cut, stream = both(server, line("</think>", "A", *MALFORMED["prose"]), line("</think>", "B", *MALFORMED["cut"]))
    assert (cut["content"], cut["finish"], stream["finish"]) == ("A\n\nB", "error", "error")


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_calls> and then the calls.",
        "<tool_calls></tool_calls> holds them.",
        "The tag is <tool_calls>",
        "The tag is <tool_calls>\n<invoke",
        "<tool_calls><parameter name='x'>",
        f"An end: </{MARK}tool_calls>, and {MARK}.",
    ],
)
def test_text_that_explains_markup_is_text(server: Running, text: str) -> None:
    plain, stream = both(server, line("</think>", text), line("</think>", "asked again"))
    assert plain == stream
    assert (plain["content"], plain["calls"], plain["finish"]) == (text, [], "stop")


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_without_room_for_a_second_attempt_there_is_none(server: Running) -> None:
    bad = line("</think>", "A", *MALFORMED["prose"])
    text = "A" + "".join(MALFORMED["prose"])
    short, stream = both(server, bad, line("</think>", *GOOD), max_tokens=MIN_ROOM - 1)
    assert short == stream
    assert (short["content"], short["finish"]) == (text, "stop")
    prompt = ask(server, False)["usage"]["prompt_tokens"]
    injected = len(tokenizer().encode_chat(correction("text between the tags of a tool call", True, "official")))
    needed = prompt + len(START) + 3 + injected + MIN_ROOM
    for context in (needed - 1, needed):
        with scripted(bad, line("</think>", "B"), bad, line("</think>", "B"), ctx=context) as small:
            for streams in (False, True):
                assert ask(small, streams)["content"] == ("A\n\nB" if context == needed else text)
                play(small, bad, line("</think>", "B"))


def test_the_second_attempt_has_the_whole_budget_and_ends_at_it(server: Running) -> None:
    bad = line("</think>", *MALFORMED["prose"])
    plain, stream = both(server, bad, line("</think>", "on", then="repeat"), max_tokens=40)
    assert plain == stream
    assert (plain["content"], plain["finish"]) == ("on" * 39, "length")


@pytest.mark.parametrize("kind", ["cut", "prose"])
def test_a_limit_inside_a_block_is_no_reason_to_ask_again(server: Running, kind: str) -> None:
    pieces = ["</think>", "Look:", *MALFORMED[kind]]
    if kind == "prose":
        pieces.pop()  # the first word behind the tag shows it
    for limit in (MIN_ROOM, MIN_ROOM + 1):
        fill = ["x"] * (limit - len(pieces))
        plain, stream = both(
            server, line(*pieces[:2], *fill, *pieces[2:], "more"), line("</think>", *GOOD), max_tokens=limit
        )
        assert plain == stream
        assert (plain["finish"], plain["calls"], plain["usage"]) == ("length", [], limit)
        assert plain["content"].startswith("Look:x")


def test_a_stop_string_ends_either_attempt(server: Running) -> None:
    bad = line("</think>", "Look: STOP", *MALFORMED["prose"])
    plain, stream = both(server, bad, line("</think>", *GOOD), stop=["STOP"])
    assert plain == stream
    assert (plain["content"], plain["finish"]) == ("Look: ", "stop")
    # What stands between tags is no text, as long as it is not given up.
    inside = line("</think>", "Look:", *START, "STOP")
    plain, stream = both(server, inside, line("</think>", *GOOD), stop=["STOP", "TOP"])
    assert plain == stream
    assert (len(plain["calls"]), plain["finish"]) == (1, "tool_calls")
    plain, stream = both(server, inside, inside, stop=["STOP", "TOP"])
    assert plain == stream
    assert (plain["calls"], plain["finish"]) == ([], "stop")
    assert plain["content"].endswith("tool_calls>\n")
    # What is held back as the beginning of one stop string has another one in it.
    before = line("</think>", "LoE", *START, "E")
    plain, stream = both(server, before, line("</think>", *GOOD), stop=["oEND", "E"])
    assert plain == stream
    assert (plain["content"], plain["calls"], plain["finish"]) == ("Lo", [], "stop")
    bad = line("</think>", "Look:", *MALFORMED["prose"])
    plain, stream = both(server, bad, line("</think>", "one S", "TOP two", *GOOD), stop=["STOP"])
    assert plain == stream
    assert (plain["content"], plain["calls"], plain["finish"]) == ("Look:\n\none ", [], "stop")


def test_usage_counts_both_attempts_and_what_was_injected(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    first, second = ["a", "b", "</think>", "Look:", *MALFORMED["prose"]], ["c", "</think>", *GOOD]
    with scripted(line(*first), line(*second), trace=trace) as server:
        usage = ask(server, False)["usage"]
    injected = events(trace, "inject")
    assert [event["text"] for event in injected] == [
        correction("text between the tags of a tool call", True, "official")
    ]
    tokens = tokenizer().encode_chat(injected[0]["text"])
    assert tokens[0] == tokenizer().eos
    sampled = [event for event in events(trace, "piece") if event["text"] != EOS]
    assert len(sampled) < len(first) + len(second)
    assert usage["completion_tokens"] == len(sampled) + len(tokens) - 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
    assert events(trace, "finish")[0]["usage"]["completion"] == usage["completion_tokens"]
    assert usage["prompt_tokens"] == events(trace, "prompt")[0]["tokens"]


# ---- what the model gets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prose", "cut", "no call"])
@pytest.mark.parametrize("template", ["official", "ds4"])
def test_the_state_holds_the_attempt_that_failed_and_what_was_said_about_it(
    kind: str, template: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    first = ["</think>", "Look:", *MALFORMED[kind]]
    with scripted(line(*first), line("</think>", "ok"), trace=trace, template=template) as server:
        ask(server, False)
        assert server.worker.wait_idle(30)
        (session,) = server.worker.sessions()
        state = server.worker.engine.tokenizer.decode(session.tokens).decode()
        sampled = session.tokens
    (inject,) = events(trace, "inject")
    prompt = events(trace, "prompt")[0]["text"]
    shown = "".join(first[:-1] if kind == "prose" else first)
    assert state == prompt + shown + inject["text"] + "</think>ok"
    special = set(tokenizer().special.values())
    told = tokenizer().encode_chat(inject["text"])
    tail = sampled[len(sampled) - 2 - len(told) : -2]
    assert tail == told
    # The markers in the form of a call are the tokens that the model is to write.
    assert [id for id in tail if id in special].count(tokenizer().dsml) == 8
    assert inject["text"].startswith(f"{EOS}<｜User｜><tool_result>The tool call was malformed (")
    assert inject["text"].endswith("</tool_result><｜Assistant｜><think>")


def test_a_name_that_the_model_made_up_is_no_special_token() -> None:
    problem = "the parameter '<｜User｜></tool_result>｜DSML｜' of 'x' is not JSON" + "y" * 1000
    for template in ("official", "ds4"):
        text = correction(problem, False, template)
        plain = correction("text between", False, template)
        special = set(tokenizer().special.values())
        assert [t for t in tokenizer().encode_chat(text) if t in special] == [
            t for t in tokenizer().encode_chat(plain) if t in special
        ]
        assert text.count("</tool_result>") == 1
        assert len(text) < len(plain) + 220


@pytest.mark.parametrize("keeps_reasoning", [False, True])
def test_the_next_turns_continue_the_hidden_attempt(keeps_reasoning: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    script = [
        line("a", "</think>", *MALFORMED["prose"]), line("b", "</think>", "Look:", *GOOD),
        line("c", "</think>", "Sunny."), line("d", "</think>", "Bye."),
    ]  # fmt: skip
    with scripted(*script, trace=trace) as server:
        messages: list[dict[str, Any]] = list(HELLO)
        held = 0
        for turn, follow in enumerate(({"role": "tool", "content": "sun"}, {"role": "user", "content": "thanks"}, {})):
            reply = server.post({"messages": messages, "tools": [WEATHER]}).json()["choices"][0]["message"]
            if not keeps_reasoning:
                reply.pop("reasoning_content")
            if "tool_calls" in reply:
                follow["tool_call_id"] = reply["tool_calls"][0]["id"]
            messages += [reply, follow]
            prompt = events(trace, "prompt")[-1]
            assert (prompt["source"], prompt["reused"]) == ("live" if turn else "none", held)
            assert (prompt["effective_tokens"] > prompt["tokens"]) == (turn > 0)
            assert server.worker.wait_idle(30)
            (session,) = server.worker.sessions()
            held = len(session.tokens)
        state = server.worker.engine.tokenizer.decode(session.tokens).decode()
    assert state.count("was malformed") == 1
    assert state.count("".join(GOOD)) == 1


def test_when_the_state_is_gone_the_block_comes_back_as_it_was_sampled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    odd = [piece.replace("\n", "\n\n") for piece in GOOD]
    script = [line("</think>", "A", *MALFORMED["prose"]), line("</think>", "B", *odd), line("</think>", "ok")]
    with scripted(*script, trace=trace, max_sessions=1) as server:
        reply = server.post({"messages": HELLO, "tools": [WEATHER]}).json()["choices"][0]["message"]
        server.post({"messages": [{"role": "user", "content": "other"}]})
        result = {"role": "tool", "content": "sun", "tool_call_id": reply["tool_calls"][0]["id"]}
        server.post({"messages": [*HELLO, reply, result], "tools": [WEATHER]})
    last = events(trace, "prompt")[-1]
    assert "A\n\nB" + "".join(odd) + EOS in last["text"]
    assert last["tokens"] == last["effective_tokens"]


def test_it_is_in_the_log_and_takes_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    script = [line("</think>", *MALFORMED["prose"]), line("</think>", "two"), line("</think>", "three")]
    with caplog.at_level(logging.INFO, "ds4.server"), scripted(*script) as server:
        assert ask(server, False)["content"] == "two"
        assert ask(server, True)["content"] == "three"
    said = [record.getMessage() for record in caplog.records if "malformed" in record.getMessage()]
    assert said == ["request 1 malformed tool call, asking the model again: text between the tags of a tool call"]


def test_a_seed_goes_on_in_the_second_attempt() -> None:
    chooser = SamplingChooser(Sampling(seed=7))
    assert chooser.again(None) is chooser  # type: ignore[arg-type]


# ---- what may happen on the way --------------------------------------------------------------------------------------


def test_others_are_not_held_up_while_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = line("</think>", *MALFORMED["prose"])
    with scripted(line("</think>", "on", then="repeat"), bad, line("</think>", *GOOD), chunk=16) as server:
        steps: list[tuple[str, int]] = []
        step = server.worker.engine.step

        def recording(batch: Any, *args: Any, **kwargs: Any) -> Any:
            sizes = [len(ids) for _, ids in batch]
            prefilling = bool(server.worker._prefilling) and server.worker._prefilling[0].first is not None
            steps.append(("told" if prefilling and max(sizes) > 1 else "decode", max(sizes)))
            return step(batch, *args, **kwargs)

        monkeypatch.setattr(server.worker.engine, "step", recording)
        answers: list[dict[str, Any]] = []
        other = threading.Thread(target=lambda: answers.append(ask(server, False, max_tokens=20_000, tools=[])))
        other.start()
        look_until(lambda: steps)
        recovered = ask(server, False)
        other.join()
    assert recovered["calls"] == ROME
    assert answers[0]["usage"]["completion_tokens"] == 20_000
    chunks = [i for i, (what, _) in enumerate(steps) if what == "told"]
    assert len(chunks) > 4
    assert all(size <= 16 for what, size in steps if what == "told")
    for a, b in itertools.pairwise(chunks):
        assert ("decode", 1) in steps[a:b]


def leave(server: Running, gate: Gate, stream: bool) -> None:
    """A client that leaves when the model waits at the gate."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body(stream)).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        assert gate.reached.wait(30)
    look_until(lambda: all(job.cancelled for job in server.worker.jobs()))
    gate.opened.set()
    assert server.worker.wait_idle(30)


def body(stream: bool) -> dict[str, Any]:
    return {"messages": HELLO, "tools": [WEATHER], "stream": stream}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_may_leave_during_the_second_attempt(stream: bool, phase: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    gate = Gate()
    timing = {"prefill_ms_per_token": 1} if phase == "prefill" else {"step_ms": 1}
    script = [line("</think>", "A", *MALFORMED["prose"]), line("</think>", "B", *GOOD, **timing), line("</think>", "C")]
    with scripted(*script, wait=gate, chunk=16, trace=trace, first_byte_seconds=0.01) as server:
        leave(server, gate, stream)
        assert [event["phase"] for event in events(trace, "cancel")] == [phase]
        again = ask(server, False)
        assert again["content"] == "C"
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [{"fail_at": 2}, {"fail_prefill_at": 30}])
def test_a_step_may_fail_in_the_second_attempt(stream: bool, failing: dict[str, int]) -> None:
    script = [
        line("</think>", "A", *MALFORMED["prose"]),
        line("</think>", "B", *GOOD, **failing),
        line("</think>", "C"),
    ]
    with scripted(*script, chunk=16) as server:
        response = server.post(body(stream))
        if stream:
            assert streamed(response.text)["finish"] == "error"
            assert "the script fails at" in response.text
        else:
            assert response.status_code == 500
            assert "the script fails at" in response.json()["error"]["message"]
        assert ask(server, False)["content"] == "C"


def test_a_call_in_the_reasoning_of_the_second_attempt_still_counts(server: Running) -> None:
    second = line("hm", *GOOD[1:5], *GOOD)
    plain, stream = both(server, line("</think>", *MALFORMED["prose"]), second)
    assert plain == stream
    assert plain["calls"] == ROME
    assert plain["reasoning"].startswith("hm")


def test_without_active_tools_nobody_is_asked_again(server: Running) -> None:
    bad = ["</think>", "A", *MALFORMED["prose"]]
    plain, stream = both(server, line(*bad), line("</think>", "B"), tools=[])
    assert plain == stream
    assert plain["content"] == "A" + "".join(MALFORMED["prose"])


# ---- however the text is cut -----------------------------------------------------------------------------------------

TEXTS = [
    "plan</think>Look: " + "".join(MALFORMED["prose"]),
    "</think>" + "".join(MALFORMED["no call"]),
    "p</think>2 < 3\n" + "".join(MALFORMED["no name"]),
    "p</think>😀" + "".join(MALFORMED["cut"]),
]


@settings(max_examples=12)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=40), st.lists(st.integers(0, 200), max_size=40))
def test_any_split_gives_the_same_streamed_and_not(
    server: Running, text: str, first: list[int], second: list[int]
) -> None:
    then = "again</think>So:" + "".join(GOOD)
    plain, stream = both(server, line(*split(text, first)), line(*split(then, second)))
    assert plain == stream
    fine, _ = both(server, line(*text), line(*then))
    for answer in (plain, fine):
        answer.pop("usage")
    assert plain == fine
    assert plain["calls"] == ROME


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MALFORMED)
def test_the_parser_holds_a_malformed_block_until_it_is_told(kind: str) -> None:
    text = "Look:" + "".join(MALFORMED[kind])
    parser = StreamParser(False, ["get_weather"], hold=True)
    seen: list[Event] = []
    for char in text:
        assert not parser.malformed
        seen += parser.push(char.encode())
        if parser.malformed:
            break
    assert seen
    assert all(isinstance(event, TextDelta) for event in seen)
    assert "".join(event.text for event in seen if isinstance(event, TextDelta)) == "Look:"
    if kind.startswith("cut"):
        assert not parser.malformed
        assert parser.settle() == []
    assert parser.malformed
    given_up = StreamParser(False, ["get_weather"], hold=True)
    free = StreamParser(False, ["get_weather"])
    for one in (given_up, free):
        for char in text:
            one.push(char.encode())
            if one is given_up and one.malformed and not one.done:
                one.give_up()
    assert given_up.message == free.message
    assert given_up.finish() == free.finish()


def test_a_parser_that_nobody_tells_makes_it_text_at_the_end() -> None:
    parser = StreamParser(False, ["get_weather"], hold=True)
    parser.push("".join(MALFORMED["prose"]).encode())
    assert parser.push(b" and more") == []
    *seen, finish = parser.finish()
    text = "".join(MALFORMED["prose"]) + " and more"
    assert "".join(event.text for event in seen if isinstance(event, TextDelta)) == text
    assert finish.message.content == text  # type: ignore[union-attr]


def test_joined_events_add_up_to_the_joined_message() -> None:
    texts = ("", "x", " x", "x ")
    for r1, t1, r2, t2 in itertools.product(texts, repeat=4):
        earlier = Earlier(Message(reasoning=r1, content=t1, problems=("p",)), 3, 1)
        deltas: list[Event] = [*map(ReasoningDelta, r2), *map(TextDelta, t2)]
        joined = [event for delta in deltas for event in earlier.events([delta])]
        message = earlier.join(Message(reasoning=r2, content=t2, problems=("q",)))
        assert r1 + "".join(e.text for e in joined if isinstance(e, ReasoningDelta)) == message.reasoning
        assert t1 + "".join(e.text for e in joined if isinstance(e, TextDelta)) == message.text
        assert message.problems == ("p", "q")
