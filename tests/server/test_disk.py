"""Conversations that survive their server: what is reused, and that answers are those of a cold server."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from server_harness import WEATHER, Running, call_pieces, line, scripted, tokenizer
from worker_harness import request, run, scripted_worker

from ds4.engine import Engine, EngineConfig
from ds4.engine.loading import from_tensors
from ds4.engine.packing import ModelCodec
from ds4.errors import Ds4Error
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig, parse_args
from ds4.server.request import ChatRequest, Done
from ds4.server.slots import Slot
from ds4.server.worker import Worker
from tests.helpers import SMALL, random_tensors

OPTIONS: dict[str, Any] = {"kv_cache_min_tokens": 16, "kv_cache_boundary_align_tokens": 64}


@functools.cache
def engine() -> Engine:
    """A small random model whose states are packed, and that writes letters and blanks.

    Bytes that are no UTF-8 come back from a client as another text, which continues less than all.
    """
    shape = replace(SMALL, vocab=tokenizer().vocab_size)
    config = EngineConfig(context=2048, prefill_chunk=64, checkpoint_interval=32)
    tensors = random_tensors(shape, 3)
    for id in range(shape.vocab):
        piece = tokenizer().token_bytes(id)
        if not all(chr(byte).isalpha() or byte == 32 for byte in piece) or not piece.isascii():
            tensors["output.weight"][id] = 0
    return from_tensors(shape, tensors, tokenizer(), config=config)


@contextmanager
def working(path: Path | None, **options: Any) -> Iterator[Worker]:
    """A worker over the small model; afterwards everything is stored."""
    config = ServerConfig(ctx=2048, kv_disk_dir=path, **{**OPTIONS, **options})
    worker = Worker(Backend(engine(), "m", codec=ModelCodec(engine())), config)
    try:
        yield worker
    finally:
        assert worker.stop(60)


@contextmanager
def killed(path: Path, **options: Any) -> Iterator[Worker]:
    """The same, but as if the process had been killed once all was written that was on its way."""
    with working(path, **options) as worker:
        yield worker
        assert worker.wait_idle(60)
        worker.disk.shutdown = lambda slots: None  # type: ignore[method-assign]


def ask(worker: Worker, *texts: str, **options: Any) -> Done:
    """One answer."""
    return run(worker, [request(*texts, **options)], start=not worker._started)[0]


def text(seed: int, words: int = 120) -> str:
    """Some words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(["red", "house", "seven", "to", "walk", "blue", "and", "the"]) for _ in range(words))


def slot(worker: Worker) -> Slot:
    """The conversation that was used last."""
    assert worker.wait_idle(60)
    return max(worker._slots.slots, key=lambda slot: slot.used)


def held(worker: Worker) -> int:
    """Tokens of the conversation that was used last."""
    return len(slot(worker).session.tokens)


def stored(worker: Worker) -> list[int]:
    """Tokens of the states of the conversation used last that are on disk, once all are."""
    assert worker.wait_idle(60)
    assert worker.disk.drain(60)
    return sorted(saved.tokens for saved in slot(worker).saved if saved.entry is not None)


def exact(worker: Worker) -> bool:
    """Whether all live states are, to the bit, those of new sessions with their tokens."""
    assert worker.wait_idle(60)
    for session in worker.sessions():
        fresh = engine().session()
        fresh.sync(session.tokens)
        if not torch.equal(fresh.logits, session.logits):
            return False
    return True


@pytest.mark.parametrize("chunk", [48, 100, 128, 256])
def test_the_beginning_of_a_new_prompt_is_stored_whatever_the_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine(), "prefill_chunk", chunk)
    with killed(tmp_path) as worker:
        ask(worker, text(1, 300), tokens=1)
        prompt = len(worker.sessions()[0].tokens)
        cold = stored(worker)[0]
        # 32 tokens before the end, at a multiple of 64 or where the chunk before that ended.
        assert prompt - 32 - 64 - chunk - 32 <= cold <= prompt - 32
    with working(tmp_path) as worker:
        reused = ask(worker, text(1, 300)[:-40] + " other", tokens=1).usage.reused
        assert reused >= cold - 16
        assert exact(worker)


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        first = ask(worker, text(1))
        all_of_it = held(worker)
    with working(tmp_path) as worker:
        second = ask(worker, text(1), first.message.text, "go on")
        assert exact(worker)
    assert second.usage.reused == all_of_it > first.usage.prompt


def test_after_a_kill_what_was_stored_on_the_way_is_there(tmp_path: Path) -> None:
    with killed(tmp_path) as worker:
        first = ask(worker, text(2, 310), tokens=80)
        lengths = stored(worker)
    # At the alignment, at the end of the prompt, and at the end of the answer.
    assert lengths == [320, first.usage.prompt, first.usage.prompt + 79]
    with killed(tmp_path) as worker:
        again = ask(worker, text(2, 310), tokens=80)
        assert again.usage.reused == first.usage.prompt
        assert again.message.text == first.message.text
    with killed(tmp_path) as worker:
        second = ask(worker, text(2, 310), first.message.text, text(3, 100))
        assert second.usage.reused == lengths[-1]
    with killed(tmp_path) as worker:
        edited = ask(worker, text(2, 310), first.message.text, text(4, 40))
        assert exact(worker)
    assert edited.usage.reused == lengths[-1]


def test_conversations_that_alternate_come_back_from_disk(tmp_path: Path) -> None:
    with working(tmp_path, max_sessions=1) as worker:
        said = {seed: [text(seed)] for seed in (5, 6)}
        before = dict.fromkeys(said, 0)
        for turn in range(3):
            for seed, texts in said.items():
                answer = ask(worker, *texts)
                assert exact(worker)
                assert answer.usage.reused == before[seed]
                before[seed] = held(worker)
                texts += [answer.message.text, f"and {turn}"]


def test_new_conversations_begin_with_the_system_region_of_others(tmp_path: Path) -> None:
    rules = text(7, 200)

    def about(question: str) -> ChatRequest:
        whole = request(question)
        return replace(whole, messages=(replace(whole.messages[0], role="system", content=rules), *whole.messages))

    with killed(tmp_path) as worker:
        run(worker, [about("first")])
        region = slot(worker).session.tokens.index(tokenizer().user)
    with killed(tmp_path) as worker:
        (answer,) = run(worker, [about("another question")])
    assert answer.usage.reused == region > 200


def test_several_servers_share_a_directory(tmp_path: Path) -> None:
    with working(tmp_path) as one, working(tmp_path) as two:
        first = ask(one, text(8), tokens=70)
        lengths = stored(one)
        assert lengths[-1] == held(one) == first.usage.prompt + 69
        second = ask(two, text(8), first.message.text, "and you", tokens=70)
        assert second.usage.reused == lengths[-1]
        assert stored(two)[-1] == held(two)
        third = ask(one, text(8), first.message.text, "and you", second.message.text, "and I")
        assert third.usage.reused == held(two)
        assert exact(one)
        assert exact(two)


def test_short_states_are_neither_stored_nor_loaded(tmp_path: Path) -> None:
    with working(tmp_path, kv_cache_min_tokens=500) as worker:
        ask(worker, text(9))
    assert list(tmp_path.glob("*.kv")) == []


def test_damaged_states_cost_time_only(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        first = ask(worker, text(10))
    for path in tmp_path.glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    with working(tmp_path) as worker:
        second = ask(worker, text(10), first.message.text, "go on")
        assert exact(worker)
    assert second.usage.reused == 0


def test_a_stored_state_whose_continuation_fails_is_deleted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_disk_dir": tmp_path, **OPTIONS}
    worker = scripted_worker(line("a", " b"), **options)
    first = run(worker, [request(text(11))])[0]
    assert worker.stop(30)
    before = set(tmp_path.glob("*.kv"))
    with scripted(line("x", fail_prefill_at=1), ctx=2048, **options) as server:
        body = {
            "messages": [{"role": "user", "content": text(11)}, {"role": "assistant", "content": first.message.text}]
        }
        answer = server.post({**body, "messages": [*body["messages"], {"role": "user", "content": "more"}]})
        assert answer.status_code == 500
    assert before - set(tmp_path.glob("*.kv"))


def test_many_conversations_with_little_room(tmp_path: Path) -> None:
    """Every state is the one of a cold server, whatever was stored, evicted and loaded meanwhile."""
    rng = random.Random(12)
    said: dict[int, list[str]] = {seed: [text(seed, 60)] for seed in range(20, 32)}
    budget = 1
    for _ in range(2):
        with working(tmp_path, max_sessions=2, kv_disk_space_mb=budget) as worker:
            for _ in range(18):
                texts = said[rng.choice(sorted(said))]
                kind = rng.random()
                if kind < 0.2 and len(texts) > 2:
                    del texts[-2:]
                elif kind < 0.3:
                    texts[-1] += " edited"
                answer = ask(worker, *texts, tokens=6)
                assert exact(worker)
                texts += [answer.message.text, "next"]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget << 20


# ---- tools and what clients leave out --------------------------------------------------------------------------------

CALL = call_pieces(("get_weather", [("city", "Rome", True), ("days", "3", False)]))
LOOK = line("why", " not", "</think>", "Let", " me", " look", *CALL)
SAY = line("it", " is", "</think>", "Sunny", ".")


def conversation(server: Running, trace: Path, *messages: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer's message, and what the trace says of its prompt."""
    answer = server.post({"messages": list(messages), "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    events = [json.loads(row) for row in trace.read_text(encoding="utf-8").splitlines()]
    return answer.json()["choices"][0]["message"], [event for event in events if event["event"] == "prompt"][-1]


@pytest.mark.parametrize(
    "shown", [("tool_calls",), ("content", "tool_calls"), ("content", "tool_calls", "reasoning_content")]
)
def test_calls_go_on_exactly_after_a_restart(tmp_path: Path, shown: Sequence[str]) -> None:
    trace = tmp_path / "trace"
    options: dict[str, Any] = {"kv_disk_dir": tmp_path / "kv", "trace": trace, "ctx": 4096, **OPTIONS}
    user = {"role": "user", "content": "How is Rome?"}
    with scripted(LOOK, **options) as server:
        look, _ = conversation(server, trace, user)
    kept = {"role": "assistant", **{key: look[key] for key in shown}}
    result = {"role": "tool", "tool_call_id": look["tool_calls"][0]["id"], "content": "sunny"}
    with scripted(SAY, **options) as server:
        answer, prompt = conversation(server, trace, user, kept, result)
    assert answer["content"] == "Sunny."
    assert prompt["source"] == "disk"
    assert prompt["replay"] == {"disk": 1}
    assert prompt["effective_tokens"] - prompt["reused"] < 30
    events = [json.loads(row)["event"] for row in trace.read_text(encoding="utf-8").splitlines()]
    assert "load" in events
    assert "store" in events


# ---- the command line ------------------------------------------------------------------------------------------------


def test_a_model_without_packed_states_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(ctx=2048, kv_disk_dir=tmp_path)
    with pytest.raises(Ds4Error, match="not packed"):
        Worker(Backend(engine(), "m"), config)


def test_the_flags() -> None:
    flags = (
        "--kv-disk-dir d --kv-disk-space-mb 5 --kv-cache-min-tokens 6 --kv-cache-cold-max-tokens 7"
        " --kv-cache-continued-interval-tokens 8 --kv-cache-boundary-trim-tokens 9"
        " --kv-cache-boundary-align-tokens 10 --kv-cache-reject-different-quant"
    )
    config = parse_args(flags.split())
    assert config == ServerConfig(
        kv_disk_dir=Path("d"), kv_disk_space_mb=5, kv_cache_min_tokens=6, kv_cache_cold_max_tokens=7,
        kv_cache_continued_interval_tokens=8, kv_cache_boundary_trim_tokens=9, kv_cache_boundary_align_tokens=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-cold-max-tokens", "100"], "must be 0 or at least"),
        (["--kv-disk-space-mb", "0"], "--kv-disk-space-mb is 0"),
        (["--kv-disk-dir", ""], "the name is empty"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
