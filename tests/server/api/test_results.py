"""Results whose calls are not in the request: continued, or refused in the words of the API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import WEATHER, Running, call_pieces, line, scripted

from ds4.chat.message import Message, Part, ToolCall
from ds4.server.api.results import ANTHROPIC_WORDS, RESPONSES_WORDS, ResultWords, complete_history, previous_turn
from ds4.server.errors import ApiError
from ds4.server.turns import Turn, TurnMemory

SYSTEM = Message(role="system", content="be brief")
ASK = Message(role="user", content="weather?")
RESPONSES_LOST = "Responses continuation state is not available; retry by replaying the full input history"
ANTHROPIC_LOST = "Anthropic continuation state is not available; retry by replaying the full messages history"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def called(*ids: str) -> Message:
    return Message(reasoning="hidden", content="look", tool_calls=tuple(ToolCall("f", "{}", id) for id in ids))


def tool(id: str, text: str = "sunny") -> Message:
    return Message(role="tool", tool_call_id=id, content=text)


def results(*ids: str, text: str = "") -> Message:
    parts = [Part("tool_result", tool_call_id=id, parts=(Part("text", "sunny"),)) for id in ids]
    return Message(role="user", content=(*parts, *([Part("text", text)] if text else [])))


TURN = Turn((ASK, called("a", "b")), "resp_1")
OTHER = Turn((user("other"), called("c")), "resp_2")


def memory() -> TurnMemory:
    made = TurnMemory()
    made.put(TURN)
    made.put(OTHER)
    made.put(Turn((user("plain"), Message(content="done")), "resp_3"))
    return made


def complete(words: ResultWords, *messages: Message, front: int = 0) -> tuple[Message, ...]:
    return complete_history(tuple(messages), front, memory(), words)


def refused(words: ResultWords, *messages: Message, front: int = 0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        complete(words, *messages, front=front)
    return caught.value


@pytest.mark.parametrize(
    "tail",
    [
        (tool("a"), tool("b")),
        (tool("b"), tool("a")),
        (tool("a"), tool("b"), tool("a", "rain")),
    ],
)
def test_outputs_alone_continue_their_turn_in_any_order_and_doubled(tail: tuple[Message, ...]) -> None:
    assert complete(RESPONSES_WORDS, *tail) == (*TURN.messages, *tail)
    # What belongs to this request only stays in front.
    assert complete(RESPONSES_WORDS, SYSTEM, *tail, front=1) == (SYSTEM, *TURN.messages, *tail)


@pytest.mark.parametrize(
    "tail",
    [
        (results("a", "b"),),
        (results("b", "a"),),
        (results("a"), results("b")),
        (results("a", "b", "b"),),
        (results("a", "b", text="and be quick"),),
        (results("a", "b"), SYSTEM),
        (results("a", text="one"), results("b"), SYSTEM, SYSTEM),
    ],
)
def test_users_results_alone_continue_with_the_text_beside_them(tail: tuple[Message, ...]) -> None:
    assert complete(ANTHROPIC_WORDS, *tail) == (*TURN.messages, *tail)
    assert complete(ANTHROPIC_WORDS, SYSTEM, *tail, front=1) == (SYSTEM, *TURN.messages, *tail)


def test_the_hidden_reasoning_comes_with_the_history() -> None:
    assert complete(RESPONSES_WORDS, tool("c"))[1].reasoning == "hidden"


@pytest.mark.parametrize(
    "messages",
    [
        (ASK,),
        (ASK, called("a", "b"), tool("a"), tool("b")),
        (ASK, called("a", "b"), tool("a")),
        (ASK, called("never"), tool("never")),
        (ASK, called("a", "b"), tool("b"), tool("a"), user("go on")),
        (ASK, called("a", "b"), results("a", "b", text="x")),
        (ASK, called("n1"), tool("n1"), called("n2"), tool("n2"), tool("n1")),
        (tool(""),),
    ],
)
def test_results_of_calls_in_the_request_are_left_as_they_are(messages: tuple[Message, ...]) -> None:
    assert complete(RESPONSES_WORDS, *messages) == messages
    assert complete(ANTHROPIC_WORDS, *messages) == messages


@pytest.mark.parametrize(
    "messages",
    [
        (tool("nobody"),),
        (tool("a"), tool("nobody")),
        (tool("nobody"), user("and?")),
        (ASK, tool("nobody"), called("nobody")),
        (ASK, called("a"), tool("a"), tool("nobody")),
        (results("nobody", "a"),),
    ],
)
def test_an_unknown_call_is_named(messages: tuple[Message, ...]) -> None:
    error = refused(RESPONSES_WORDS, *messages)
    assert (error.status, error.param) == (400, "input")
    assert error.message == (
        "Responses continuation state is not available for call_id nobody; retry by replaying the full input history"
    )
    error = refused(ANTHROPIC_WORDS, *messages)
    assert (error.status, error.param) == (400, "messages")
    assert error.message == (
        "Anthropic continuation state is not available for tool_use_id nobody; "
        "retry by replaying the full messages history"
    )
    assert error.headers() == {}


@pytest.mark.parametrize("id", ["resp_1", "resp_3"])
def test_the_id_of_a_response_is_no_call(id: str) -> None:
    assert refused(RESPONSES_WORDS, tool(id)).status == 400


@pytest.mark.parametrize(
    ("messages", "front"),
    [
        ((tool("a"),), 0),  # a subset
        ((tool("a"), tool("b"), tool("c")), 0),  # calls of two turns
        ((tool("a"), tool("c")), 0),
        ((tool("a"), tool("b"), tool("")), 0),
        ((called("n"), tool("a"), tool("b"), tool("n")), 0),
        ((ASK, called("a"), tool("a"), tool("b")), 0),  # one of its calls was dropped
        ((tool("a"), tool("b"), user("and?")), 0),  # not at the end
        ((tool("a"), tool("b"), called("n"), tool("n")), 0),
        ((tool("a"), tool("b"), SYSTEM), 0),
        ((ASK, tool("a"), tool("b")), 0),  # part of a history
        ((SYSTEM, tool("a"), tool("b")), 0),
        ((SYSTEM, ASK, tool("a"), tool("b")), 1),
        ((tool("a"), tool("b"), called("a", "b")), 0),
    ],
)
def test_results_that_do_not_fit_behind_their_turn_conflict(messages: tuple[Message, ...], front: int) -> None:
    error = refused(RESPONSES_WORDS, *messages, front=front)
    assert (error.status, error.message, error.param) == (409, RESPONSES_LOST, "input")
    assert error.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "messages",
    [
        (results("a"),),
        (results("a", "b", "c"),),
        (results("a", "b"), user("and?")),
        (user("first"), results("a", "b")),
        (results("a"), called("n"), results("b")),
        (results("a", "b"), user("and?"), SYSTEM),
    ],
)
def test_users_results_that_do_not_fit_conflict(messages: tuple[Message, ...]) -> None:
    error = refused(ANTHROPIC_WORDS, *messages)
    assert (error.status, error.message, error.param) == (409, ANTHROPIC_LOST, "messages")
    assert error.headers() == {"x-should-retry": "false"}


def test_an_earlier_response_is_found_by_its_own_id_only() -> None:
    turns = memory()
    assert previous_turn(turns, "resp_1").messages == TURN.messages
    for id in ("resp_9", "a", ""):
        with pytest.raises(ApiError) as caught:
            previous_turn(turns, id)
        error = caught.value
        assert (error.status, error.param) == (409, "previous_response_id")
        assert error.code == "previous_response_not_found"
        assert id in error.message
        assert "retry by replaying the full input history without previous_response_id" in error.message
        assert error.headers() == {"x-should-retry": "false"}


# ---- through the APIs ------------------------------------------------------------------------------------------------

SCHEMA = WEATHER["function"]["parameters"]
TWO = call_pieces(("get_weather", [("city", "Rome", True)]), ("get_weather", [("city", "Oslo", True)]))
LOOK = line("why", "</think>", "Let", " me", " look", *TWO)
SAY = line("it is", "</think>", "Sunny.")


@dataclass
class Wire:
    """A client of one of the APIs with results, and the worker's trace."""

    server: Running
    trace: Path
    anthropic: bool

    def post(self, *items: dict[str, Any], **options: Any) -> httpx.Response:
        """The answer to some items or messages."""
        if self.anthropic:
            tool = {"name": "get_weather", "input_schema": SCHEMA}
            body = {"messages": list(items), "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 2000}}
            return self.server.post({"max_tokens": 500, "system": "Be brief.", **body, **options}, "/v1/messages")
        tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
        body = {"input": list(items), "tools": [tool], "instructions": "Be brief."}
        return self.server.post({**body, **options}, "/v1/responses")

    def ask(self, *items: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The body of an answer that is none but good."""
        answer = self.post(*items, **options)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def prompt(self) -> dict[str, Any]:
        """What the trace says of the last request's prompt."""
        events = [json.loads(text) for text in self.trace.read_text(encoding="utf-8").splitlines()]
        return [event for event in events if event["event"] == "prompt"][-1]

    def text(self, text: str) -> dict[str, Any]:
        """A user's message."""
        return {"role": "user", "content": text}

    def calls(self, answer: dict[str, Any]) -> list[str]:
        """The ids of an answer's calls."""
        if self.anthropic:
            return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]

    def results(self, *ids: str, text: str = "sunny") -> list[dict[str, Any]]:
        """The results of calls."""
        if self.anthropic:
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id in ids]
            return [{"role": "user", "content": blocks}]
        return [{"type": "function_call_output", "call_id": id, "output": text} for id in ids]

    def shown(self, answer: dict[str, Any], drop: Sequence[str] = ()) -> list[dict[str, Any]]:
        """An answer as it is sent back, without what is of some types."""
        if self.anthropic:
            blocks = [block for block in answer["content"] if block["type"] not in drop]
            return [{"role": "assistant", "content": blocks}]
        return [item for item in answer["output"] if item["type"] not in drop]

    def held(self, answer: dict[str, Any]) -> int:
        """Tokens that are live behind an answer with calls."""
        usage = answer["usage"]
        asked = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        return int(asked + usage["output_tokens"]) - 1

    def refused(self, *items: dict[str, Any], status: int) -> str:
        """The message of an error in the API's own shape."""
        answer = self.post(*items)
        assert answer.status_code == status, answer.text
        assert answer.headers.get("x-should-retry") == ("false" if status == 409 else None)
        value = answer.json()
        assert value["error"]["type"] == "invalid_request_error"
        assert (value.get("type") == "error") == self.anthropic
        return str(value["error"]["message"])


@pytest.fixture(params=["responses", "messages"])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    """A server that calls, then says something, then does both again and again."""
    with scripted(LOOK, SAY, LOOK, SAY, SAY, trace=tmp_path / "trace") as server:
        yield Wire(server, tmp_path / "trace", request.param == "messages")


ASKED = {"role": "user", "content": "How is Rome?"}


def test_results_alone_go_on_live(wire: Wire) -> None:
    first = wire.ask(ASKED)
    a, b = wire.calls(first)
    wire.ask(*wire.results(b, a))
    prompt = wire.prompt()
    assert (prompt["source"], prompt["reused"]) == ("live", wire.held(first))
    assert "<think>why</think>Let me look" + "".join(TWO) in prompt["text"]
    assert prompt["replay"] == {"memory": 1}
    # The turn is as good a start after its session is gone, or has gone elsewhere.
    wire.ask(*wire.results(a, b, text="rain"))
    assert wire.prompt()["reused"] >= wire.held(first)


def test_results_alone_that_do_not_fit_are_refused(wire: Wire) -> None:
    first = wire.ask(ASKED)
    a, b = wire.calls(first)
    second = wire.ask(wire.text("other"))
    assert not wire.calls(second)
    third = wire.ask(wire.text("third"))
    (c, _) = wire.calls(third)
    name, field, history = (
        ("Anthropic", "tool_use_id", "messages") if wire.anthropic else ("Responses", "call_id", "input")
    )
    lost = f"{name} continuation state is not available; retry by replaying the full {history} history"
    for items in (
        wire.results(a),
        wire.results(a, b, c),
        wire.results(a, c),
        [*wire.results(a, b), wire.text("and?")],
        [wire.text("and?"), *wire.results(a, b)],
    ):
        assert wire.refused(*items, status=409) == lost
    for items in (wire.results("toolu_x"), wire.results(a, "toolu_x")):
        assert wire.refused(*items, status=400) == lost.replace("available;", f"available for {field} toolu_x;")


@pytest.mark.parametrize("drop", [(), ("thinking", "reasoning"), ("thinking", "reasoning", "text", "message")])
def test_a_history_that_is_replayed_goes_on_live_whatever_is_left_out(wire: Wire, drop: tuple[str, ...]) -> None:
    options = {} if wire.anthropic else {"reasoning": {"summary": "auto"}}
    first = wire.ask(ASKED, **options)
    items = [ASKED, *wire.shown(first, drop), *wire.results(*wire.calls(first))]
    second = wire.ask(*items, **options)
    prompt = wire.prompt()
    assert (prompt["source"], prompt["reused"]) == ("live", wire.held(first))
    # And on, with all of that behind it.
    items += [*wire.shown(second, drop[:2]), wire.text("And Oslo?")]
    third = wire.ask(*items, **options)
    prompt = wire.prompt()
    assert (prompt["source"], prompt["reused"]) == ("live", wire.held(second) + 1)
    items += [*wire.shown(third, drop), *wire.results(*wire.calls(third))]
    # Half of the results, when the calls are there, are nothing to refuse.
    wire.ask(*items[:-1] if not wire.anthropic else items, **options)
    assert wire.prompt()["source"] == "live"


def test_an_edited_history_is_not_the_live_one(wire: Wire) -> None:
    first = wire.ask(ASKED)
    items = [wire.text("How is Oslo?"), *wire.shown(first), *wire.results(*wire.calls(first))]
    wire.ask(*items)
    prompt = wire.prompt()
    assert prompt["effective_tokens"] == prompt["tokens"]
    assert prompt["detail"] not in ("calls", "visible")
    assert prompt["reused"] < wire.held(first) - 50


@pytest.mark.parametrize("limit", [None, 6])
def test_a_response_is_continued_by_its_id_even_if_it_was_cut(limit: int | None, tmp_path: Path) -> None:
    said = line("it is", "</think>", "Sunny", " and", " very", " warm", " and", " dry")
    with scripted(said, SAY, SAY, LOOK, SAY, SAY, trace=tmp_path / "trace") as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)
        first = wire.ask(ASKED, max_output_tokens=limit)
        assert first["status"] == ("incomplete" if limit else "completed")
        second = wire.ask(wire.text("And?"), previous_response_id=first["id"], instructions="Be long.")
        prompt = wire.prompt()
        assert "Be long." in prompt["text"]
        assert "Be brief." not in prompt["text"]
        assert "<think>it is</think>Sunny and very warm" in prompt["text"]
        assert ("dry" in prompt["text"]) == (limit is None)
        wire.ask(wire.text("Really?"), previous_response_id=second["id"], instructions="Be long.")
        prompt = wire.prompt()
        assert prompt["source"] == "live"
        assert prompt["reused"] == wire.held(second) + 1
        # A call is answered behind its response, or by itself.
        fourth = wire.ask(wire.text("Look"), previous_response_id=second["id"], instructions="Be long.")
        outputs = wire.results(*wire.calls(fourth))
        for options in ({"previous_response_id": fourth["id"]}, {}):
            wire.ask(*outputs, instructions="Be long.", **options)
            prompt = wire.prompt()
            assert prompt["reused"] >= wire.held(fourth)
            assert prompt["text"].count("<｜User｜>") == 4
        unknown = wire.post(wire.text("?"), previous_response_id="resp_x")
        assert unknown.status_code == 409
        assert unknown.headers["x-should-retry"] == "false"
        assert "without previous_response_id" in unknown.json()["error"]["message"]


def test_answers_that_failed_or_were_refused_are_not_remembered(tmp_path: Path) -> None:
    with scripted(line("a", "</think>", "b", "c", fail_at=3), SAY, LOOK, trace=tmp_path / "trace") as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)
        assert wire.post(ASKED).status_code == 500
        assert len(server.worker.turns) == 0
        wire.ask(ASKED)
        assert len(server.worker.turns) == 1
        # Chat completions are never asked for by an id.
        called = server.post({"messages": [ASKED], "tools": [WEATHER]}).json()["choices"][0]["message"]
        assert called["tool_calls"]
        assert len(server.worker.turns) == 1


def test_calls_that_were_answered_as_text_are_continued_as_text(tmp_path: Path) -> None:
    cut = [*LOOK["pieces"][: LOOK["pieces"].index(' name="get_weather"') + 1], ">\n", "nonsense", ">", *TWO[-3:]]
    with scripted(line(*cut), line(*cut), SAY, line(*cut), trace=tmp_path / "trace") as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)
        first = wire.ask(ASKED)
        (message,) = [item for item in first["output"] if item["type"] == "message"]
        text = message["content"][0]["text"]
        assert "nonsense" in text
        wire.ask(wire.text("What?"), previous_response_id=first["id"])
        assert f"</think>{text}<｜end▁of▁sentence｜><｜User｜>What?" in wire.prompt()["text"]
        # A stream ends in an error there, and its client has no such answer.
        streamed = wire.post(ASKED, stream=True).text
        assert "response.failed" in streamed
        assert len(server.worker.turns) == 2


@pytest.mark.parametrize("replay", [True, False])
def test_a_remembered_turn_has_its_sampled_bytes_if_these_are_repeated(replay: bool, tmp_path: Path) -> None:
    odd = ["\n", *TWO]
    with scripted(line("why", "</think>", "t", *odd), SAY, trace=tmp_path / "trace", replay=replay) as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)
        first = wire.ask(ASKED)
        wire.ask(*wire.results(*wire.calls(first)))
        prompt = wire.prompt()
        assert f"</think>t{''.join(odd if replay else TWO)}<｜end▁of▁sentence｜>" in prompt["text"]
        assert prompt["replay"] == ({"memory": 1} if replay else {})
        # What is live stays as it was sampled, of course.
        assert (prompt["source"], prompt["reused"]) == ("live", wire.held(first))


def test_a_turn_that_cannot_be_remembered_does_not_hurt_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted(SAY, trace=tmp_path / "trace") as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)

        def failing(turn: Turn) -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(server.worker.turns, "put", failing)
        answer = wire.ask(ASKED)
        assert answer["status"] == "completed"
        assert "its answer cannot be continued by its id" in caplog.text
        assert wire.post(wire.text("?"), previous_response_id=answer["id"]).status_code == 409


def test_reasoning_that_is_lost_behind_calls_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scripted(LOOK, SAY, SAY, SAY, trace=tmp_path / "trace", max_sessions=1) as server:
        wire = Wire(server, tmp_path / "trace", anthropic=False)
        first = wire.ask(ASKED)
        items = [ASKED, *wire.shown(first), *wire.results(*wire.calls(first))]
        wire.ask(*items)
        wire.ask(*items)
        assert wire.prompt()["source"] == "checkpoint"
        assert "reasoning behind its calls" not in caplog.text
        wire.ask(wire.text("Something else"))
        wire.ask(*items)
        assert "request 5 goes on from what its history shows" in caplog.text
        caplog.clear()
        # Not where the server has it, nor where nobody is to think.
        wire.ask(wire.text("Something else"))
        wire.ask(*items[-2:])
        wire.ask(wire.text("Something else"))
        wire.ask(*items, reasoning={"effort": "none"})
        assert "reasoning behind its calls" not in caplog.text
