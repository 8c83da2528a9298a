"""A prompt evaluated chunk by chunk, whatever happens to its session in between."""

from __future__ import annotations

import itertools
from typing import Any, SupportsIndex

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4
from ds4.engine import EngineConfig
from ds4.engine.session import Prefill
from ds4.model import Taps
from tests.engine.session_helpers import CONFIG, assert_fresh, tokens
from tests.helpers import SMALL, random_engine


@pytest.fixture(scope="module", params=[True, False], ids=["qat_sim", "exact"])
def engine(request: pytest.FixtureRequest) -> ds4.Engine:
    return random_engine(qat_sim=request.param, config=CONFIG)


def record_steps(engine: ds4.Engine, patch: pytest.MonkeyPatch) -> list[tuple[ds4.Session, int, int]]:
    """From now on the steps of single sessions: the session, and where the step begins and ends."""
    steps: list[tuple[ds4.Session, int, int]] = []
    step = engine.step

    def recording(batch: Any, *args: Any, **kwargs: Any) -> Any:
        session, ids = batch[0]
        start = len(session.tokens)
        result = step(batch, *args, **kwargs)
        steps.append((session, start, start + len(ids)))
        return result

    patch.setattr(engine, "step", recording)
    return steps


def fail_a_step(engine: ds4.Engine, session: ds4.Session) -> None:
    """A step of the session that breaks off half way."""
    with pytest.raises(ZeroDivisionError):
        engine.step([(session, [1, 2])], taps=Taps(stream=lambda layer, x: 1 // (layer - 2)))  # type: ignore[misc]


def test_a_prefill_goes_on_where_it_was(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(150)
    session = engine.session()
    session.sync(ids[:20])
    session.pending = 3
    steps = record_steps(engine, monkeypatch)
    prefill = session.begin(ids, chunk=64, boundaries=[100])
    assert (session.pending, steps, prefill.done, prefill.reused) == (None, [], False, 20)
    assert [prefill.step(), prefill.step(8), prefill.step(), prefill.step(), prefill.step()] == [False] * 4 + [True]
    assert [(start, end) for _, start, end in steps] == [(20, 64), (64, 72), (72, 100), (100, 128), (128, 150)]
    assert prefill.done
    assert (prefill.reused, session.reused, session.recomputed) == (20, 20, 130)
    assert 100 in session.checkpoints.lengths()
    session.pending = 3
    assert prefill.step()
    assert session.pending is None
    assert len(steps) == 5
    assert_fresh(engine, session)
    again = session.begin(ids)
    assert again.done
    assert again.step()
    assert (again.reused, session.recomputed) == (150, 0)


def test_a_prefill_stops_at_turn_boundaries_of_its_own_accord(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = random_engine(config=EngineConfig(prefill_chunk=64, checkpoint_interval=0))
    monkeypatch.setattr(ds4.Engine, "has_tokenizer", True)
    monkeypatch.setattr(ds4.Engine, "tokenizer", type("Turns", (), {"assistant": 63}))
    ids = [token % 63 for token in tokens(200)]
    ids[29] = ids[89] = 63
    session = engine.session()
    steps = record_steps(engine, monkeypatch)
    prefill = session.begin(ids)
    while not prefill.step():
        pass
    assert [end for _, _, end in steps] == [30, 64, 90, 128, 192, 200]
    assert session.checkpoints.lengths() == [30, 90]


def test_the_tokens_looked_at_grow_with_the_prompt_alone(engine: ds4.Engine) -> None:
    looked = 0

    class Id:
        def __init__(self, id: int) -> None:
            self.id = id

        def __index__(self) -> int:
            nonlocal looked
            looked += 1
            return self.id

    class Counted(list[int]):
        def __getitem__(self, key: SupportsIndex | slice) -> Any:
            nonlocal looked
            found = super().__getitem__(key)
            looked += len(found) if isinstance(found, list) else 1
            return found

        def __iter__(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    counts = []
    for n in (160, 320):
        looked = 0
        session = engine.session()
        session.tokens = Counted()
        prefill = session.begin([Id(i) for i in tokens(n)], boundaries=[n // 2])  # type: ignore[misc]
        prefill.ids = Counted(prefill.ids)
        assert looked == n
        steps = 0
        while not prefill.step(4):
            steps += 1
        assert steps == n // 4 - 1
        counts.append(looked)
    assert counts == [320, 640]  # once to check it, once to evaluate it


@pytest.mark.parametrize("change", ["truncate", "step", "rewind", "edit", "fail", "logits", "move", "longer"])
@pytest.mark.parametrize("done", [False, True])
def test_a_prefill_notices_that_its_session_has_changed(engine: ds4.Engine, change: str, done: bool) -> None:
    ids = tokens(150)
    session = engine.session()
    prefill = session.begin(ids)
    while not prefill.step() and (done or len(session.tokens) < 96):
        pass
    held = len(session.tokens)
    if change == "truncate":
        session.truncate(held - 9)
    elif change == "step":
        session.step((ids[96] + 1) % SMALL.vocab)
    elif change == "rewind":
        session.rewind(40)
    elif change == "edit":
        # As many tokens, and another conversation.
        session.sync([*ids[:50], *tokens(held - 50, seed=6)])
    elif change == "fail":
        fail_a_step(engine, session)
    elif change == "logits":
        assert session.logits is not None
    elif change == "move":
        other = engine.session()
        other.sync(tokens(held, seed=7))
        session.import_state(other.tokens, other.export())
    elif change == "longer":
        session.sync([*ids, 5, 6])
    assert prefill.done == (done and change in ("fail", "logits"))
    while not prefill.step():
        pass
    assert session.tokens == ids
    assert_fresh(engine, session)


def test_a_prefill_counts_as_reused_only_what_it_never_evaluated(engine: ds4.Engine) -> None:
    ids = tokens(120)
    session = engine.session()
    session.sync(ids[:40])
    prefill = session.begin(ids)
    for length, reused in ((120, 40), (110, 40), (32, 32), (64, 32)):
        session.rewind(min(length, len(session.tokens)))
        while not prefill.step():
            pass
        assert prefill.reused == reused


def test_a_prefill_starts_over_when_its_step_breaks_off(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(120)
    session = engine.session()
    prefill = session.begin(ids, chunk=24)
    prefill.step()
    with monkeypatch.context() as patch:
        model: Any = engine.runner
        patch.setattr(model.model, "_moe", lambda *args: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            prefill.step()
    assert session.tokens == ids[:24]
    steps = record_steps(engine, monkeypatch)
    while not prefill.step():
        pass
    # There is no checkpoint before 24, and the ends of the chunks stay where they were.
    assert [(start, end) for _, start, end in steps] == [(0, 24), (24, 48), (48, 72), (72, 96), (96, 120)]
    assert prefill.reused == 0
    assert_fresh(engine, session)


def test_a_prefill_refuses_what_a_sync_refuses(engine: ds4.Engine) -> None:
    session = engine.session()
    for ids, said in (([], "at least one token"), ([1, 64], "token id 64"), ([1] * 4096, "Prompt has 4096 tokens")):
        with pytest.raises(ds4.Ds4Error, match=said):
            session.begin(ids)
    with pytest.raises(ds4.Ds4Error, match="prefill chunk must be at least 1"):
        session.begin([1, 2], chunk=0)
    prefill = session.begin([1, 2])
    with pytest.raises(ds4.Ds4Error, match="prefill chunk must be at least 1"):
        prefill.step(0)
    assert session.tokens == []
    session.close()
    assert not prefill.done
    with pytest.raises(ds4.Ds4Error, match="closed"):
        prefill.step()
    with pytest.raises(ds4.Ds4Error, match="closed"):
        session.begin([1, 2])


between = st.one_of(
    st.tuples(st.just("chunk"), st.sampled_from([1, 7, 16, 24, 64])),
    st.tuples(st.just("truncate"), st.integers(1, 16)),
    st.tuples(st.just("rewind"), st.integers(0, 100)),
    st.tuples(st.just("step"), st.integers(0, SMALL.vocab - 1)),
    st.tuples(st.just("edit"), st.integers(0, 100)),
    st.tuples(st.just("fail"), st.just(0)),
    st.tuples(st.just("logits"), st.just(0)),
)


@settings(max_examples=30)
@given(
    st.lists(between, max_size=10),
    st.lists(st.integers(1, 119), max_size=4),
    st.integers(0, 100),
    st.integers(1, 120),
    st.integers(0, 9),
)
def test_an_open_prefill_is_a_sync_from_anew_at_each_chunk(
    engine: ds4.Engine,
    operations: list[tuple[str, int]],
    boundaries: list[int],
    before: int,
    length: int,
    seed: int,
) -> None:
    """The same steps, from the same tokens to the same, whatever is done to the session in between."""
    ids = tokens(length, seed)
    opened, synced = engine.session(), engine.session()
    for session in (opened, synced):
        if before:
            session.sync((ids + tokens(150, seed + 10))[:before], chunk=32)
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(engine, patch)
        prefill: Prefill = opened.begin(ids, boundaries=boundaries)
        synced.sync(ids, boundaries=boundaries, cancelled=lambda: True)
        for name, n in [*operations, *[("chunk", 24)] * 12]:
            if name == "chunk":
                asked = itertools.count()
                complete = synced.sync(
                    ids, chunk=n, boundaries=boundaries, cancelled=lambda asked=asked: next(asked) > 0
                )
                assert prefill.step(n) == prefill.done == complete
                continue
            for session in (opened, synced):
                held = len(session.tokens)
                if name == "truncate" and held > n and session.state.can_truncate(held - n):
                    session.truncate(held - n)
                elif name == "rewind":
                    session.rewind(held * n // 100)
                elif name == "step":
                    session.step(n)
                elif name == "edit":
                    session.sync([*session.tokens[: held * n // 100], *tokens(20, seed + 20)])
                elif name == "fail":
                    fail_a_step(engine, session)
                elif name == "logits" and held:
                    assert torch.equal(session.logits, session.logits)
            assert opened.tokens == synced.tokens
        mine, reference = ([step[1:] for step in steps if step[0] is session] for session in (opened, synced))
    assert mine == reference
    assert prefill.done
    assert opened.tokens == synced.tokens == ids
    assert opened.checkpoints.lengths() == synced.checkpoints.lengths()
    assert_fresh(engine, opened)
    opened.close()
    synced.close()
