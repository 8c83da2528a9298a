"""Several answers to one prompt."""

from __future__ import annotations

import json
import queue
from typing import Any

import pytest
from server_harness import WEATHER, Running, call_pieces, line, random_engine, scripted, serving
from worker_harness import (
    ENDLESS,
    Gate,
    last,
    look_until,
    move,
    replies_to,
    request,
    scripted_worker,
    submitted,
    timed_worker,
)

from ds4.chat.tools import tool_schemas
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.request import Done, Events, Failed, Reply

HELLO: Any = [{"role": "user", "content": "Hello"}]
THREE = [line("</think>", "one", ".", "."), line("Hm.", "</think>", "two"), line("</think>", "three", "!")]
TEXTS = ["one..", "two", "three!"]


def post(server: Running, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    answer = server.post({"messages": HELLO, "prompt": "Hello", **body}, path)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_each_choice_has_its_own_line_and_the_usage_is_that_of_all() -> None:
    with scripted(*THREE) as server:
        answer = post(server, n=3)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in answer["choices"]] == TEXTS
        assert [choice["message"].get("reasoning_content") for choice in answer["choices"]] == [None, "Hm.", None]
        usage = answer["usage"]
        assert usage["completion_tokens"] == 4 + 3 + 3
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert server.worker.wait_idle(30)
        assert server.worker.status() == {"waiting": 0, "running": 0, "sessions": 3}
        assert usage["prompt_tokens"] == post(server)["usage"]["prompt_tokens"]


def test_a_stream_of_choices() -> None:
    with scripted(*THREE) as server:
        chunks = list(
            server.client.chat.completions.create(
                model="m", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
            )
        )
    texts, ends = dict.fromkeys(range(3), ""), []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.finish_reason))
    assert list(texts.values()) == TEXTS
    assert sorted(ends) == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [10]


@pytest.mark.parametrize("stream", [True, False])
def test_completions(stream: bool) -> None:
    with scripted(*THREE) as server:
        body: Any = {"model": "m", "prompt": "x", "n": 3, "best_of": 3, "logprobs": 0}
        if not stream:
            answer = server.client.completions.create(**body)
            assert [choice.text for choice in answer.choices] == TEXTS
            assert [choice.logprobs and choice.logprobs.text_offset for choice in answer.choices] == [
                [0, 3, 4],
                [0],
                [0, 5],
            ]
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 10
            return
        texts, offsets = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
        for chunk in server.client.completions.create(stream=True, **body):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
        assert (texts, offsets) == (TEXTS, [[0, 3, 4], [0], [0, 5]])


def test_calls_of_choices_have_ids_of_their_own_and_each_can_be_continued() -> None:
    calls = ["</think>", *call_pieces(("get_weather", [("city", "Rome", True)]))]
    with scripted(line(*calls), line(*calls), line("</think>", "20 degrees")) as server:
        answer = post(server, n=2, tools=[WEATHER])
        messages = [choice["message"] for choice in answer["choices"]]
        ids = [message["tool_calls"][0]["id"] for message in messages]
        assert len(set(ids)) == 2
        for message, id in zip(messages, ids, strict=True):
            result = {"role": "tool", "tool_call_id": id, "content": "20"}
            more = post(server, messages=[*HELLO, message, result], tools=[WEATHER])
            assert more["choices"][0]["message"]["content"] == "20 degrees"
            details = more["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] > answer["usage"]["prompt_tokens"]


def test_a_malformed_call_of_one_choice_is_asked_for_again() -> None:
    bad = line("</think>", "\n\n", "<", "｜DSML｜", "tool_calls", ">\n", "Oh.")
    with scripted(line("</think>", "one"), bad, line("</think>", "two"), line("</think>", "again")) as server:
        answer = post(server, n=3, tools=[WEATHER])
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "again", "two"]


def test_the_choices_of_a_real_model() -> None:
    with serving(Backend(random_engine(), "m"), ServerConfig(ctx=1024, max_sessions=4)) as server:
        body: Any = {"thinking": False, "max_tokens": 12, "seed": 5, "logprobs": True}
        several = post(server, n=4, **body)["choices"]
        texts = [choice["message"]["content"] for choice in several]
        assert len(set(texts)) == 4
        assert post(server, n=4, **body)["choices"] == several
        assert post(server, **body)["choices"] == several[:1]
        greedy = post(server, n=2, thinking=False, max_tokens=12, temperature=0)["choices"]
        assert greedy[0]["message"] == greedy[1]["message"]
        assert (
            greedy[0]["message"] == post(server, thinking=False, max_tokens=12, temperature=0)["choices"][0]["message"]
        )
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for choice in post(server, n=3, thinking=False, max_tokens=99, response_format=form)["choices"]:
            assert json.loads(choice["message"]["content"])["a"] in (1, 2, 3)
        assert server.worker.wait_idle(30)
        assert server.worker.status()["sessions"] <= 4


# ---- room, ends and failures ----------------------------------------------------------------------------------------


def test_never_more_sessions_than_there_may_be() -> None:
    """Requests with several answers wait until all of them have room; nobody waits for ever."""
    worker = scripted_worker(line("a", "b", "c", "d"), chunk=8, max_sessions=3)
    seen: list[int] = []
    replies = replies_to(worker, *(request(f"question {i} " * 9, n=1 + i % 3) for i in range(9)))
    evaluate = worker.engine.step

    def step(*args: Any) -> Any:
        seen.append(worker.status()["sessions"])
        return evaluate(*args)

    worker.engine.step = step  # type: ignore[method-assign]
    worker.start()
    for i, replied in enumerate(replies):
        assert sorted(end.index for end in ends_of(replied, 1 + i % 3)) == list(range(1 + i % 3))
    assert worker.stop(10)
    assert max(seen) == 3


def ends_of(replied: queue.Queue[Reply], count: int) -> list[Done]:
    ends: list[Done] = []
    while len(ends) < count:
        reply = replied.get(timeout=30)
        assert not isinstance(reply, Failed), reply
        if isinstance(reply, Done):
            ends.append(reply)
    assert [end.left for end in ends] == list(range(count - 1, -1, -1))
    return ends


def test_a_client_that_leaves_ends_all_answers() -> None:
    worker = scripted_worker(line("a", then="repeat"))
    replied: queue.Queue[Reply] = queue.Queue()
    asked = request("hi", tokens=ENDLESS, n=3)
    job = submitted(worker, asked, replied.put)
    worker.start()
    look_until(lambda: isinstance(reply := replied.get(timeout=30), Events) and reply.index == 2)
    job.cancel()
    assert worker.wait_idle(30)
    assert worker.status()["running"] == 0
    assert not any(slot.busy for slot in worker._slots.slots)
    assert all(not isinstance(reply, Done | Failed) for reply in list(replied.queue))
    assert last(*replies_to(worker, request("hi", tokens=2))).reason == "length"  # type: ignore[union-attr]
    assert worker.stop(10)


def test_a_client_that_leaves_before_the_answers_begin_frees_their_places() -> None:
    worker = scripted_worker(line("a"), max_sessions=2)
    asked = request("hi " * 200, n=2)
    job = submitted(worker, asked, lambda reply: job.cancel())
    worker.start()
    assert worker.wait_idle(30)
    assert len(ends_of(replies_to(worker, request("yo", n=2))[0], 2)) == 2
    assert worker.stop(10)


@pytest.mark.parametrize("failing", [0, 2])
def test_one_failure_ends_all_answers_once(failing: int) -> None:
    lines = [line("a", then="repeat") for _ in range(3)]
    lines[failing]["fail_at"] = 4
    worker = scripted_worker(*lines, line("fine"))
    (replied,) = replies_to(worker, request("hi", tokens=1000, n=3))
    worker.start()
    assert isinstance(last(replied), Failed)
    assert worker.wait_idle(30)
    assert replied.empty()
    assert not any(slot.busy for slot in worker._slots.slots)
    assert isinstance(last(*replies_to(worker, request("again"))), Done)
    assert worker.stop(10)


def test_a_failure_of_one_answer_alone_ends_the_others() -> None:
    bad = line("\n\n", "<", "｜DSML｜", "tool_calls", ">\n", "Oh.")
    endless = line("a", then="repeat")
    worker = scripted_worker(endless, bad, line("b", fail_prefill_at=1), line("fine"))
    (replied,) = replies_to(worker, request("hi", tokens=1500, n=2, tools=tool_schemas([WEATHER])))
    worker.start()
    assert isinstance(last(replied), Failed)
    assert worker.wait_idle(30)
    assert replied.empty()
    assert not any(slot.busy for slot in worker._slots.slots)
    assert worker.stop(10)


def test_a_request_that_takes_too_long_fails_once() -> None:
    gate = Gate()
    worker = timed_worker(line("a", then="repeat", step_ms=1), wait=gate, request_timeout=5)
    (replied,) = replies_to(worker, request("hi", tokens=ENDLESS, n=3))
    worker.start()
    assert gate.reached.wait(30)
    move(worker, 6)
    gate.opened.set()
    assert isinstance(failed := last(replied), Failed)
    assert "--request-timeout" in failed.message
    assert worker.wait_idle(30)
    assert not [reply for reply in list(replied.queue) if isinstance(reply, Done | Failed)]
    assert worker.stop(10)


def test_a_call_that_breaks_in_one_choice_ends_the_stream() -> None:
    calls = call_pieces(("get_weather", [("city", "Rome", True)]))
    broken = line("</think>", *calls[:10], "prose that is no call", *calls[-4:])
    with scripted(line("</think>", "x", then="repeat"), broken) as server:
        text = server.post({"messages": HELLO, "tools": [WEATHER], "n": 2, "stream": True, "max_tokens": 10**5}).text
        assert '"error"' in text.strip().split("\n\n")[-1]
        assert server.worker.wait_idle(30)
        assert not any(slot.busy for slot in server.worker._slots.slots)
