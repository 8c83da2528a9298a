"""What compiling grammars costs, and whom it holds up: counted, not timed."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from math import inf
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import Running, line, scripted
from worker_harness import Gate, last, look_until, move, request, run, timed_worker

from ds4.errors import RequestError
from ds4.server.constraints import AnswerRules, Enforcement, Grammars, GrammarsBusyError, SchemaError, grammar, grammars
from ds4.server.constraints.schema import MAX_PARTS, Document
from ds4.server.constraints.vocabulary import Vocabulary
from ds4.server.request import Done, Failed, Reply
from ds4.server.running import MOST_PASSED, TimedJob, WaitingLine
from tests.server.constraint_helpers import TOKENS, begin, schema_of, tools_of

HELLO: Any = [{"role": "user", "content": "Hello"}]
UNIQUE = {"type": "array", "uniqueItems": True}
EMPTY = {"type": "integer", "minimum": 1.2, "maximum": 1.5}


class Costs:
    """Counts what is done, and holds compiling up on demand."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.documents = 0
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Semaphore(0)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    counted = Costs()
    matcher, document = Vocabulary.matcher, Document.__init__

    def compiling(self: Vocabulary, text: str) -> Any:
        counted.compiled.append(text)
        counted.reached.release()
        assert counted.open.wait(30)
        return matcher(self, text)

    def reading(self: Document, schema: Any) -> None:
        counted.documents += 1
        document(self, schema)

    monkeypatch.setattr(Vocabulary, "matcher", compiling)
    monkeypatch.setattr(Document, "__init__", reading)
    yield counted
    counted.open.set()


def strict(*schemas: Any) -> AnswerRules:
    tools = tools_of(**{f"f{i}": schema for i, schema in enumerate(schemas)})
    return AnswerRules("required", tools, strict=frozenset(tool.name for tool in tools))


def numbers(count: int, name: str = "p") -> dict[str, Any]:
    return {f"{name}{i}": {"type": "integer"} for i in range(count)}


def asked(made: Grammars, rules: AnswerRules) -> Future[Enforcement]:
    future = made.submit(rules)
    assert future is not None
    return future


# ---- what errors cost -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 150, 300])
@pytest.mark.parametrize("bad", [UNIQUE, EMPTY])
def test_the_property_to_blame_is_found_in_a_few_steps(bad: Any, place: int, costs: Costs) -> None:
    names = list(numbers(300))
    properties = {name: {"type": "integer"} for name in names[:place]}
    schema = schema_of(**properties, bad=bad, **{name: {"type": "integer"} for name in names[place:]})
    with pytest.raises(SchemaError, match=r"'bad'.*'f1'|'f1'.*'bad'"):
        begin(strict(schema_of(a={"type": "string"}), schema), of=Grammars(TOKENS))
    assert costs.documents == 2
    assert len(costs.compiled) <= (0 if bad is UNIQUE else 12)
    # All that is compiled to find it is no more than the grammar itself, about.
    assert sum(map(len, costs.compiled)) <= 3 * len(costs.compiled[0] if costs.compiled else "")


KEYWORDS: dict[str, Any] = {
    "not": {"type": "null"}, "if": {}, "then": {}, "else": {}, "uniqueItems": True, "contains": {}, "minContains": 1,
    "maxContains": 2, "propertyNames": {"pattern": "a"}, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {},
    "dependencies": {}, "unevaluatedItems": False, "unevaluatedProperties": False, "$dynamicRef": "#a",
    "$dynamicAnchor": "a", "$recursiveRef": "#", "$recursiveAnchor": True,
}  # fmt: skip
PLACES = st.lists(
    st.sampled_from(
        [
            lambda inner: schema_of(p=inner),
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"type": "array", "prefixItems": [inner]},
            lambda inner: {"anyOf": [{"type": "null"}, inner]},
            lambda inner: {"type": "object", "additionalProperties": inner},
        ]
    ),
    max_size=3,
)


@given(
    keyword=st.sampled_from(sorted(KEYWORDS)),
    kind=st.sampled_from(["array", "object", "integer"]),
    places=PLACES,
    referred=st.booleans(),
)
@settings(max_examples=60)
def test_keywords_that_are_not_supported_are_found_without_compiling(
    keyword: str, kind: str, places: list[Any], referred: bool
) -> None:
    schema: Any = {"type": kind, keyword: KEYWORDS[keyword]}
    for place in places:
        schema = place(schema)
    if referred:
        schema = {"$defs": {"x": schema}, **schema_of(p={"$ref": "#/$defs/x"})}
    document = Document(schema)
    with pytest.raises(SchemaError, match=keyword.replace("$", "[$]")):
        document.check(document.root)


def test_names_and_values_are_no_keywords() -> None:
    schema = schema_of(**{name: {"enum": [{"not": 1}, [{"if": 2}]]} for name in KEYWORDS})
    unused = {**schema, "$defs": {"unused": {"not": {}}}}
    for rules in (AnswerRules(content=unused), strict(unused)):
        assert begin(rules, of=Grammars(TOKENS)) is not None


def test_what_failed_is_remembered_and_so_is_what_did_not(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_CACHED", 3)
    made = Grammars(TOKENS)
    good, bad = strict(schema_of(a={"type": "null"})), strict(schema_of(a=EMPTY))
    for rules, fails in ((good, False), (bad, True), (bad, True), (good, False)):
        try:
            asked(made, rules).result()
        except SchemaError:
            assert fails
    once = len(costs.compiled)
    assert once <= 4
    for i in range(5):
        with pytest.raises(SchemaError):
            asked(made, strict(schema_of(**{f"p{i}": EMPTY}))).result()
    assert len(made._failed) == 3
    before = len(costs.compiled)
    asked(made, good).result()
    assert len(costs.compiled) == before


def test_what_is_not_in_the_grammar_does_not_compile_it_anew(costs: Costs) -> None:
    made = Grammars(TOKENS)
    for schema in (schema_of(), schema_of(a={"type": "null"})):
        tools = tools_of(free=schema, bound=schema_of())
        asked(made, AnswerRules("required", tools, strict=frozenset({"bound", "other"}))).result()
    assert len(costs.compiled) == 1


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(**numbers(MAX_PARTS)),
        {"anyOf": [{"type": "integer", "minimum": i} for i in range(MAX_PARTS)]},
        schema_of(a=schema_of(**numbers(MAX_PARTS // 2)), b=schema_of(**numbers(MAX_PARTS // 2))),
    ],
)
def test_schemas_of_too_many_parts_are_refused_uncompiled(schema: Any, costs: Costs) -> None:
    rules = (AnswerRules(content=schema), strict(schema_of(x=schema)))
    for one in rules:
        with pytest.raises(SchemaError, match=rf"at most {MAX_PARTS} are supported"):
            begin(one, of=Grammars(TOKENS))
    assert not costs.compiled


def test_schemas_that_are_too_long_are_refused_unread(costs: Costs) -> None:
    long = {"enum": ["x" * (grammars.MAX_SCHEMAS // 4)] * 5}
    rules = (AnswerRules(content=long), strict(schema_of(), schema_of(a=long)))
    for one, words in zip(rules, ("the schema of the answer", "'f1'"), strict=True):
        with pytest.raises(SchemaError, match=rf"{words}.*at most {grammars.MAX_SCHEMAS}"):
            Grammars(TOKENS).submit(one)
    assert not costs.documents


def test_all_tools_together_have_a_bound(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_GRAMMAR", 5000)
    with pytest.raises(SchemaError, match="too large"):
        begin(strict(*[schema_of(**numbers(5))] * 100), of=Grammars(TOKENS))
    assert costs.documents < 10


# ---- who waits for whom ---------------------------------------------------------------------------------------------


def test_those_who_ask_for_the_same_wait_for_one_and_the_others_do_not_wait(costs: Costs) -> None:
    made = Grammars(TOKENS)
    known = strict(schema_of(k={"type": "null"}))
    asked(made, known).result()
    costs.open.clear()
    same = [asked(made, strict(schema_of(a={"type": "null"}))) for _ in range(5)]
    assert asked(made, known).done()
    nothing = asked(made, AnswerRules("allowed", tools_of(f=schema_of()), names=frozenset()))
    assert nothing.done()
    costs.open.set()
    assert all(one.result(30) for one in same)
    assert len(costs.compiled) == 2


def test_nobody_is_put_at_the_end_of_a_long_backlog(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_THREADS", 1)
    made = Grammars(TOKENS)
    costs.open.clear()
    large = [strict(schema_of(**numbers(1500, name))) for name in "abc"]
    first = asked(made, large[0])
    assert costs.reached.acquire(timeout=30)
    with pytest.raises(GrammarsBusyError):
        made.submit(large[1])
    small = asked(made, strict(schema_of(s={"type": "null"})))
    # A first one may be of any size, and the same one again adds nothing.
    again = asked(made, large[0])
    costs.open.set()
    assert first.result(30)
    assert again.result(30)
    assert small.result(30)
    assert asked(made, large[2]).result(30)


def test_what_nobody_waits_for_any_more_is_not_compiled(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_THREADS", 1)
    made = Grammars(TOKENS)
    costs.open.clear()
    first = asked(made, strict(schema_of(a={"type": "null"})))
    assert costs.reached.acquire(timeout=30)
    rules = [strict(schema_of(**numbers(900, name))) for name in "bcd"]
    left, halved = asked(made, rules[0]), [asked(made, rules[1]) for _ in range(2)]
    assert left.cancel()
    assert halved[0].cancel()
    with pytest.raises(GrammarsBusyError):
        made.submit(strict(schema_of(**numbers(1500, "e"))))
    assert halved[1].cancel()
    last = asked(made, rules[2])  # the others left, so there is room
    costs.open.set()
    assert first.result(30)
    assert last.result(30)
    assert len(costs.compiled) == 2
    assert not made._works


def test_a_waiting_request_costs_no_copy_of_the_grammar() -> None:
    class Copied:
        copies = 0

        def deep_copy(self) -> Copied:
            self.copies += 1
            return self

    copied: Any = Copied()
    made = Grammars(TOKENS)
    rules = strict(schema_of())
    made._compiled[rules.key()] = copied
    enforcements = [asked(made, rules).result() for _ in range(10)]
    assert copied.copies == 0
    enforcements[0].begin(thinking=False)
    enforcements[0].begin(thinking=True)
    assert copied.copies == 2


# ---- on the wire ----------------------------------------------------------------------------------------------------


def body(schema: Any, **more: Any) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": HELLO, "response_format": format, **more}


def one_thread(server: Running) -> Grammars:
    made = server.worker.prompts._grammars
    made._pool._max_workers = 1
    return made


JSON = line("</think>", "{", "}")


def chunks_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream of chat completions."""
    return [json.loads(text[6:]) for text in answer.text.split("\n\n") if text.startswith("data: {")]


def test_a_stream_opens_while_its_grammar_is_made_and_others_do_not_wait(costs: Costs) -> None:
    with scripted(JSON, JSON, first_byte_seconds=0.02, keep_alive_seconds=0.02) as server:
        costs.open.clear()
        schema = schema_of(a={"type": "null"})
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body(schema, stream=True), timeout=60, trust_env=False) as slow:
            assert slow.status_code == 200
            pieces = slow.iter_text()
            assert next(pieces).startswith(":")  # a sign of life
            other = server.post({"messages": HELLO})
            assert other.json()["choices"][0]["message"]["content"] == "{}"
            assert server.worker.status()["waiting"] == 1
            costs.open.set()
            text = "".join(pieces)
        assert '"content":"{' in text
        assert text.endswith("data: [DONE]\n\n")
        assert len(costs.compiled) == 1


def test_a_schema_that_proves_wrong_ends_the_stream_that_waits_for_it(costs: Costs) -> None:
    with scripted(JSON, first_byte_seconds=0.02, keep_alive_seconds=0.02) as server:
        costs.open.clear()
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body(EMPTY, stream=True), timeout=60, trust_env=False) as slow:
            assert slow.status_code == 200
            costs.open.set()
            slow.read()
        error = chunks_of(slow)[-1]["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "response_format"
        assert "cannot be enforced" in error["message"]
        # Known by now: refused before the first byte.
        again = server.post(body(EMPTY, stream=True))
        assert again.status_code == 400
        assert again.json()["error"]["param"] == "response_format"
        assert server.worker.wait_idle(30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_refused_at_once_while_all_places_are_taken(stream: bool, costs: Costs) -> None:
    gate = Gate()
    with scripted(line("on", then="repeat", step_ms=1), wait=gate, max_sessions=1) as server:
        endless = threading.Thread(target=lambda: server.post({"messages": HELLO, "max_tokens": 3}))
        endless.start()
        assert gate.reached.wait(30)  # the worker is in a step, and does not come back
        refused = server.post(body(EMPTY, stream=stream))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"
        # As before it waited: neither the engine's failure nor anybody's leaving.
        assert not any(server.worker.metrics.stats()["requests"].values())
        gate.opened.set()
        endless.join(30)
        assert server.worker.wait_idle(30)
    assert costs.compiled


def test_one_whose_grammar_is_made_takes_no_place_and_nobody_waits_behind_it() -> None:
    made: list[Future[Enforcement]] = [Future(), Future()]
    line_of = WaitingLine()
    slow, left, next_one = (
        TimedJob(i, request("x", n=n), None, lambda reply: None, constraint=wait)  # type: ignore[arg-type]
        for i, (n, wait) in enumerate(((1, made[0]), (1, made[1]), (1, None)))
    )
    for job in (slow, left):
        line_of.put(job)
    assert line_of.patience(0.0) == inf
    assert line_of.take(1) is None
    for _ in range(2 * MOST_PASSED):
        line_of.put(next_one)
        assert line_of.patience(0.0) == 0.0
        assert line_of.take(1) is next_one
    left.cancel()
    assert made[1].cancelled()
    assert line_of.take(1) is None
    assert line_of.patience(0.0) == 0.0
    assert line_of.take_gone(0.0) == [left]
    slow.deadline = 5.0
    assert line_of.patience(2.0) == 3.0
    made[0].set_exception(SchemaError("wrong"))
    assert line_of.take(1) is None
    assert line_of.leave(slow)
    assert not line_of.leave(slow)


@pytest.mark.parametrize("way", ["made", "wrong", "broken", "left", "overdue", "stopped"])
def test_a_worker_sleeps_while_a_grammar_is_made(way: str) -> None:
    worker = timed_worker(line("{", "}"), line("{", "}"), request_timeout=60)
    asleep, wait = threading.Event(), worker._clock.wait

    def sleeping(condition: threading.Condition, seconds: float) -> None:
        asleep.set()
        wait(condition, seconds)

    worker._clock.wait = sleeping  # type: ignore[method-assign]
    worker.start()
    constraint: Future[Enforcement] = Future()
    asked_for = request("hi")
    replied: queue.Queue[Reply] = queue.Queue()
    job = worker.submit(asked_for, worker.prompts.prompt(asked_for), replied.put, constraint=constraint)
    # Another one passes; behind it the worker sleeps until something changes, and sleeps again if that is nothing.
    run(worker, [request("other")], start=False)
    look_until(lambda: not worker.status()["running"])
    asleep.clear()
    move(worker, 0)
    assert asleep.wait(30)
    assert worker.status()["waiting"] == 1
    assert not worker.wait_idle(0)
    if way == "made":
        constraint.set_result(Enforcement(worker.prompts._grammars.prepare(), None, AnswerRules()))
        assert isinstance(last(replied), Done)
    elif way == "wrong":
        constraint.set_exception(SchemaError("nothing fits"))
        reply = last(replied)
        assert worker.metrics.stats()["requests"]["failed"] == 0
        assert reply == Failed(400, "nothing fits")
        assert isinstance(reply, Failed)
        assert isinstance(reply.fault, SchemaError)
    elif way == "broken":
        constraint.set_exception(KeyboardInterrupt("no error that anybody expects"))
        assert last(replied) == Failed(500, "no error that anybody expects")
        assert worker.metrics.stats()["requests"]["failed"] == 1
    elif way == "left":
        job.cancel()
        assert constraint.cancelled()
    elif way == "overdue":
        move(worker, 60)
        reply = last(replied)
        assert isinstance(reply, Failed)
        assert (reply.status, reply.retry) == (503, True)
    if way == "stopped":
        assert worker.stop(10)
        assert last(replied) == Failed(503, "server shutting down")
        return
    assert worker.wait_idle(30)
    assert worker.status() == {"waiting": 0, "running": 0, "sessions": len(worker.sessions())}
    assert worker.stop(10)


def test_plain_requests_do_not_wait_for_any_number_of_compilations(costs: Costs) -> None:
    with scripted(*[JSON] * 80, max_sessions=2) as server:
        costs.open.clear()
        statuses: list[int] = []

        def post(i: int) -> None:
            one = body(schema_of(**numbers(1, f"q{i}_")))
            answer = httpx.post(server.url + "/v1/chat/completions", json=one, timeout=60, trust_env=False)
            statuses.append(answer.status_code)

        clients = [threading.Thread(target=post, args=(i,)) for i in range(40)]
        for client in clients:
            client.start()
        while len(server.worker.prompts._grammars._works) < 40:
            threading.Event().wait(0.001)
        assert server.post({"messages": HELLO}).status_code == 200
        large = server.post(body(schema_of(**numbers(1990))))
        assert large.status_code == 429
        assert int(large.headers["retry-after"]) > 0
        costs.open.set()
        for client in clients:
            client.join(60)
        assert statuses == [200] * 40


def test_for_a_client_that_left_nothing_is_compiled(costs: Costs) -> None:
    with scripted(JSON, JSON) as server:
        made = one_thread(server)
        costs.open.clear()
        first = made.submit(AnswerRules(content=schema_of(first={"type": "null"})))
        assert costs.reached.acquire(timeout=30)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/chat/completions", json=body(schema_of(gone={"type": "null"})), timeout=0.3,
                       trust_env=False)  # fmt: skip
        while any(work.wanted for work in list(made._works.values())[1:]):
            threading.Event().wait(0.001)
        costs.open.set()
        assert server.post(body(schema_of(next={"type": "null"}))).status_code == 200
        assert first is not None
        assert first.result(30)
        assert [text for text in costs.compiled if "gone" in text] == []


@pytest.mark.parametrize("length", [200, 201, 300, 10_000])
def test_pieces_of_scripts_may_be_long(length: int) -> None:
    long = '"' + "x" * (length - 2) + '"'
    with scripted(line("</think>", "a" * length), line("</think>", long)) as server:
        server.worker.prompts.prepare()
        assert server.post({"messages": HELLO}).status_code == 200
        assert server.post(body({"type": "string"})).status_code == 200


def test_counting_tokens_compiles_nothing(costs: Costs) -> None:
    tool = {"name": "f", "input_schema": schema_of(a={"type": "null"}), "strict": True}
    with scripted(JSON) as server:
        counted = server.post({"messages": HELLO, "model": "m", "tools": [tool]}, "/v1/messages/count_tokens")
        assert counted.status_code == 200
        assert not costs.compiled


def test_counting_tokens_refuses_what_messages_refuses(costs: Costs) -> None:
    bare: dict[str, Any] = {"messages": HELLO, "model": "m", "max_tokens": 5}
    tool = {"name": "f", "input_schema": schema_of(a=UNIQUE), "strict": True}
    bodies: list[dict[str, Any]] = [
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "("}}}},
        {"tools": [tool]},
        {"tool_choice": {"type": "tool", "name": "g"}, "tools": [tool]},
    ]
    with scripted(JSON) as server:
        for more in bodies:
            answers = [server.post({**bare, **more}, f"/v1/messages{path}") for path in ("/count_tokens", "")]
            assert [answer.status_code for answer in answers] == [400, 400]
            assert answers[0].json() == answers[1].json()
    assert not costs.compiled


def test_errors_name_the_field(costs: Costs) -> None:
    with scripted(JSON) as server:
        for _ in range(2):
            for wrong in (EMPTY, UNIQUE, schema_of(**numbers(MAX_PARTS))):
                error = server.post(body(wrong))
                assert error.status_code == 400
                assert error.json()["error"]["param"] == "response_format"
    assert len(costs.compiled) == 2  # one grammar, and its only part


def test_the_errors_are_errors_of_requests() -> None:
    assert issubclass(GrammarsBusyError, RequestError)
