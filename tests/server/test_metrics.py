"""What a server counts: the numbers of a worker, /metrics and /stats, and the dashboard over them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as families
from server_harness import WEATHER, Running, call_pieces, line, scripted
from worker_harness import Gate, last, move, replies_to, request, run, scripted_worker, timed_worker

from ds4.chat.tools import tool_schemas
from ds4.server.metrics import Metrics
from ds4.server.request import Failed, QueueFullError
from ds4.server.worker import Worker

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
MALFORMED = [*call_pieces(("x", []))[:5], "nonsense"]
CALL = call_pieces(("get_weather", [("city", "Oslo", True)]))
TOOLS = tool_schemas([WEATHER])


def numbers(worker: Worker) -> dict[str, Any]:
    """What a worker has counted."""
    worker.measure().result(30)
    return worker.metrics.stats()


def counted(value: dict[str, Any]) -> dict[str, Any]:
    """Without what is 0."""
    return {name: number for name, number in value.items() if number}


def test_requests_are_counted_by_how_they_end() -> None:
    worker = scripted_worker(
        line("a", "b"),
        line("on", then="repeat"),
        line(*CALL),
        line(*MALFORMED),
        line(*MALFORMED),
        line("x", fail_at=1),
        max_queue=1,
    )
    run(worker, [request("stop")])
    run(worker, [request("length", tokens=7)], start=False)
    run(worker, [request("call", tools=TOOLS, tokens=200)], start=False)
    run(worker, [request("malformed", tools=TOOLS, tokens=200)], start=False)
    (replied,) = replies_to(worker, request("fails"))
    assert isinstance(last(replied), Failed)
    assert worker.wait_idle(30)
    now = numbers(worker)
    # A call that fails twice before anything of it was sent is text.
    assert counted(now["requests"]) == {"stop": 2, "length": 1, "tool_calls": 1, "failed": 1}
    assert now["malformed_calls"] == 2  # both attempts
    assert now["request_seconds"]["count"] == 5
    assert counted(now["session_evictions"]) == {"failed": 1}
    assert worker.stop(10)


def test_tokens_add_up_to_the_usage_of_the_answers() -> None:
    worker = scripted_worker(line("a", "b", "c"), line("d"), line(*MALFORMED), line("again", *CALL), chunk=16)
    first = run(worker, [request("word " * 60)])[0].usage
    second = run(worker, [request("word " * 60, "abc", "more " * 20)], start=False)[0].usage
    third = run(worker, [request("call", tools=TOOLS, tokens=300)], start=False)[0].usage
    assert worker.wait_idle(30)
    now = numbers(worker)
    usages = (first, second, third)
    assert now["completion_tokens"] == sum(usage.completion for usage in usages)
    assert now["prompt_tokens"]["live"] == second.reused > 60
    assert now["prompt_tokens"]["checkpoint"] == third.reused
    evaluated = now["prompt_tokens"]["evaluated"] - sum(usage.prompt - usage.reused for usage in usages)
    assert evaluated > 30  # what the model was told about its malformed call
    assert counted(now["prefix_matches"]["live"]) == {"visible": 1}
    assert counted(now["recoveries"]) == {"second_attempt": 1}
    assert worker.stop(10)


def test_a_state_that_is_gone_back_to_is_a_checkpoint() -> None:
    worker = scripted_worker(line("a"))
    run(worker, [request("word " * 60)])
    again = run(worker, [request("word " * 60)], start=False)[0].usage
    assert again.reused
    now = numbers(worker)
    assert counted(now["prompt_tokens"]) == {
        "evaluated": 2 * again.prompt - again.reused, "checkpoint": again.reused,
    }  # fmt: skip
    assert counted(now["prefix_matches"]["checkpoint"]) == {"memory-token": 1}
    assert now["prefix_matches"]["none"] == {"none": 1}
    assert worker.stop(10)


def test_a_call_in_the_reasoning_is_a_recovery_and_sampled_calls_are_replayed() -> None:
    with scripted(line("hm", *CALL), line("</think>", "ok")) as server:
        asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
        message = server.post(asked).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        server.post({**asked, "messages": [*asked["messages"], message, result]})
        now = server.http.get("/stats").json()
    assert counted(now["recoveries"]) == {"closed_reasoning": 1}
    assert counted(now["replayed_turns"]) == {"memory": 1}


def test_times_are_those_of_the_request_and_not_of_its_steps() -> None:
    gate = Gate()
    worker = timed_worker(line("a", "b", "c", step_ms=1), wait=gate)
    (replied,) = replies_to(worker, request("hi"))
    move(worker, 3)
    worker.start()
    assert gate.reached.wait(30)  # in the step behind the first token
    move(worker, 4)
    gate.opened.set()
    last(replied)
    now = numbers(worker)
    assert now["queue_seconds"]["sum"] == 3
    assert now["time_to_first_token_seconds"]["sum"] == 3
    assert now["time_per_token_seconds"]["sum"] == 2  # 4 s, and two tokens behind the first
    assert now["request_seconds"]["sum"] == 7
    assert now["step_seconds"] == {**now["step_seconds"], "count": 3, "sum": 4}
    assert worker.stop(10)


def test_an_answer_that_was_asked_for_twice_says_nothing_of_the_time_of_a_token() -> None:
    """Between its attempts a prompt is evaluated, and the tokens of that are among its own."""
    worker = scripted_worker(line(*MALFORMED), line("again", *CALL), line("a", "b"))
    run(worker, [request("call", tools=TOOLS, tokens=300)])
    assert worker.wait_idle(30)
    now = numbers(worker)
    assert counted(now["recoveries"]) == {"second_attempt": 1}
    assert now["time_per_token_seconds"]["count"] == 0
    assert now["time_to_first_token_seconds"]["count"] == 1
    run(worker, [request("other")], start=False)
    assert numbers(worker)["time_per_token_seconds"]["count"] == 1
    assert worker.stop(10)


def test_an_answer_without_a_token_has_no_time_to_it() -> None:
    worker = scripted_worker(line("a"))
    run(worker, [request("hi", tokens=0)])
    now = numbers(worker)
    assert counted(now["requests"]) == {"length": 1}
    assert now["time_to_first_token_seconds"]["count"] == now["time_per_token_seconds"]["count"] == 0
    assert worker.stop(10)


def test_a_request_of_several_answers_counts_once() -> None:
    worker = scripted_worker(line("a", "b"), line("c"), line("d", "e", "f"))
    (replied,) = replies_to(worker, request("hi", n=3))
    worker.start()
    done = last(replied)
    while not isinstance(done, Failed) and done.left:
        done = last(replied)
    now = numbers(worker)
    assert counted(now["requests"]) == {"stop": 1}
    assert now["completion_tokens"] == 6
    assert now["time_to_first_token_seconds"]["count"] == 1
    assert now["time_per_token_seconds"]["count"] == 2  # one answer has no second token
    assert worker.stop(10)


def test_clients_that_leave_and_requests_that_are_refused_or_late() -> None:
    gate = Gate()
    worker = timed_worker(
        line("on", then="repeat", step_ms=1), wait=gate, request_timeout=60, max_queue=2, max_sessions=1
    )
    running = worker.submit(request("a"), worker.prompts.prompt(request("a")), lambda reply: None)
    worker.start()
    assert gate.reached.wait(30)
    waiting = worker.submit(request("b"), worker.prompts.prompt(request("b")), lambda reply: None)
    (late,) = replies_to(worker, request("c"))
    with pytest.raises(QueueFullError):
        replies_to(worker, request("d"))
    before = worker.metrics.stats()
    assert (before["requests_waiting"], before["requests_running"], before["sessions"]) == (2, 1, 1)
    running.cancel()
    waiting.cancel()
    move(worker, 60)
    gate.opened.set()
    assert isinstance(last(late), Failed)
    assert worker.wait_idle(30)
    assert counted(numbers(worker)["requests"]) == {"cancelled": 2, "overdue": 1, "refused": 1}
    assert worker.stop(10)


def test_steps_that_are_given_up_take_their_conversations_along() -> None:
    worker = timed_worker(line("on", then="repeat", hang_at=1), line("fine"), step_timeout=5)
    runner: Any = worker.engine.runner
    (stuck,) = replies_to(worker, request("a"))
    worker.start()
    assert runner.hanging.wait(30)
    gone = [worker.measure() for _ in range(50)]
    for answer in gone:
        assert answer.cancel()
    waits = worker.measure()
    assert len(worker._questions) == 1
    move(worker, 5)
    assert isinstance(last(stuck), Failed)
    waits.result(30)
    assert run(worker, [request("a")], start=False)[0].message.text == "fine"
    now = numbers(worker)
    assert now["stuck_steps"] == 1
    assert counted(now["session_evictions"]) == {"stuck": 1}
    assert counted(now["requests"]) == {"failed": 1, "stop": 1}
    assert worker.stop(10)


def test_conversations_and_what_they_hold() -> None:
    worker = scripted_worker(line("a"), max_sessions=2)
    assert worker.metrics.stats()["kv_bytes"] == {"sessions": 0, "checkpoints": 0}
    run(worker, [request(f"{word} " * 40) for word in ("alpha", "beta")])
    run(worker, [request("gamma " * 40)], start=False)
    assert worker.wait_idle(30)
    now = numbers(worker)
    sessions = worker.sessions()
    assert now["sessions"] == now["sessions_limit"] == 2
    assert counted(now["session_evictions"]) == {"room": 1}
    assert now["kv_tokens"] == sum(len(session.tokens) for session in sessions)
    assert now["kv_bytes"]["sessions"] == 64 * now["kv_tokens"]
    assert now["kv_bytes"]["checkpoints"] == worker.engine.checkpoint_budget.used() > 0
    assert worker.stop(10)
    worker.measure().result(0)  # nobody waits for a worker that has ended


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_prometheus_reads_it_in_both_formats() -> None:
    with scripted(line("</think>", "Hi")) as server:
        ask(server)
        plain = server.http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        names = {family.name for family in families(plain.text)}
        assert {"ds4_requests", "ds4_time_to_first_token_seconds", "process_resident_memory_bytes"} <= names
        other = server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert {family.name for family in openmetrics(other.text)} >= names - {"ds4_info"}
        assert "_created" not in plain.text + other.text
        responses = server.http.get("/stats").json()["http_responses"]
        assert responses == {"/v1/chat/completions": {"200": 1}, "/metrics": {"200": 2}}


def test_paths_of_clients_make_no_series_of_their_own() -> None:
    with scripted(line("x")) as server:
        for path in ("/nothing", "/v1/models/a", "/v1/models/ds4-tiny", "/v1/models", "/nothing/2"):
            server.http.get(path)
        server.post({})
        responses = server.http.get("/stats").json()["http_responses"]
    assert responses == {
        "other": {"404": 2},
        "/v1/models/{id}": {"404": 1, "200": 1},
        "/v1/models": {"200": 1},
        "/v1/chat/completions": {"400": 1},
    }


def test_the_numbers_need_a_key_and_health_does_not() -> None:
    with scripted(line("x"), api_keys=("secret",)) as server:
        for path in ("/metrics", "/stats"):
            assert server.http.get(path).status_code == 401
            assert server.http.get(path, headers={"authorization": "Bearer secret"}).status_code == 200
        assert server.http.get("/health").status_code == 200


def test_servers_of_one_process_count_for_themselves() -> None:
    with scripted(line("x")) as one, scripted(line("x"), max_sessions=3) as two:
        ask(one)
        assert one.http.get("/stats").json()["requests"]["stop"] == 1
        other = two.http.get("/stats").json()
        assert (other["requests"]["stop"], other["sessions_limit"]) == (0, 3)


def test_numbers_come_while_a_step_does_not_return() -> None:
    gate = Gate()
    with scripted(line("x", step_ms=1), wait=gate, first_byte_seconds=0.01) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert gate.reached.wait(30)
            assert server.http.get("/stats").json()["requests_running"] == 1
            gate.opened.set()
            assert b"".join(answer.iter_raw()).endswith(b"data: [DONE]\n\n")


def test_quantiles_are_estimated_within_their_buckets() -> None:
    metrics = Metrics("m", 10, 1)
    assert metrics.stats()["step_seconds"] == {
        "count": 0, "sum": 0, "mean": None, "p50": None, "p90": None, "p99": None,
    }  # fmt: skip
    for value in (0.0015, 0.002, 0.015, 99):
        metrics.step_seconds.observe(value)
    found = metrics.stats()["step_seconds"]
    assert found["count"] == 4
    assert 0.001 < found["p50"] <= 0.0025
    assert found["p99"] == 2.5  # all that is known of what is longer than the last limit


def ask(server: Running) -> None:
    server.post({"messages": [{"role": "user", "content": "hi"}]}).raise_for_status()


# ---- the dashboard --------------------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_there_is() -> None:
    series = set()
    with scripted(line("x")) as server:
        ask(server)
        for family in families(server.http.get("/metrics").text):
            series |= {(sample.name, label) for sample in family.samples for label in (*sample.labels, "")}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    expressions += [variable["query"]["query"] for variable in variables]
    assert len(expressions) > 15
    asked = set()
    for text in expressions:
        for name, selector in re.findall(r"\b((?:ds4|process)_\w+)(\{[^}]*\})?", text):
            asked.add(name)
            for label in re.findall(r"(\w+)\s*[=!]~?", selector):
                assert label in ("job", "instance") or (name, label) in series, (text, label)
        names = re.findall(r"\b(?:ds4|process)_\w+", text)
        for labels in re.findall(r"\bby \(([^)]*)\)", text):
            for label in re.split(r",\s*", labels):
                assert label in ("job", "instance") or all((name, label) in series for name in names), (text, label)
    known = {name for name, _ in series}
    assert asked <= known, asked - known
    ours = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known if name.startswith("ds4_")}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert ours <= shown, ours - shown


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"]
            assert panel["description"]
