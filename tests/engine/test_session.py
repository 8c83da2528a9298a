"""Session operations against a fresh prefill of the same tokens: equal to the bit."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4
from ds4.engine import EngineConfig
from ds4.model import Taps
from tests.engine.session_helpers import CONFIG, assert_fresh, fresh_logits, tokens
from tests.helpers import SMALL, random_engine


@pytest.fixture(scope="module", params=[True, False], ids=["qat_sim", "exact"])
def engine(request: pytest.FixtureRequest) -> ds4.Engine:
    return random_engine(qat_sim=request.param, config=CONFIG)


def test_rows_do_not_depend_on_their_company(engine: ds4.Engine) -> None:
    ids = tokens(90)
    (every,) = engine.step([(engine.session(), ids)], logits="all")
    others = [engine.session() for _ in range(3)]
    mixed = engine.session()
    parts = []
    for start in range(0, 90, 9):
        batch = [(o, tokens(n, seed=start + n)) for o, n in zip(others, (1, 5, 20), strict=True)]
        results = engine.step([*batch[:2], (mixed, ids[start : start + 9]), batch[2]], logits="all")
        parts.append(results[2])
    assert torch.equal(torch.cat(parts), every)
    one_by_one = engine.session()
    assert torch.equal(torch.stack([one_by_one.step(t) for t in ids]), every)


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 130])
def test_fork_checkpoint_rewind_at_every_kind_of_length(engine: ds4.Engine, length: int) -> None:
    ids = tokens(200)
    session = engine.session()
    session.sync(ids[:length])
    session.checkpoint()
    fork = session.fork()
    session.sync(ids)
    fork.sync(ids[:length] + tokens(40, seed=9))
    assert_fresh(engine, session)
    assert_fresh(engine, fork)
    session.rewind(length)
    assert session.tokens == ids[:length]
    assert (session.reused, session.recomputed) == (length, 0)
    assert_fresh(engine, session)
    session.sync(ids[:length] + tokens(50, seed=8))
    assert session.reused == length
    assert_fresh(engine, session)
    assert_fresh(engine, fork)


def test_a_rewind_starts_from_the_nearest_checkpoint(engine: ds4.Engine) -> None:
    ids = tokens(150)
    session = engine.session()
    session.sync(ids)
    lengths = session.checkpoints.lengths()
    assert [n for n in lengths if n % CONFIG.checkpoint_interval == 0] == lengths
    assert 96 in lengths
    session.rewind(120)
    assert (session.reused, session.recomputed) == (96, 24)
    assert_fresh(engine, session)
    session.rewind(32)
    assert (session.reused, session.recomputed) == (32, 0)
    session.rewind(10)  # before the first checkpoint: from nothing, and the counters say so
    assert (session.reused, session.recomputed) == (0, 10)


def test_an_edited_tail_is_all_that_is_evaluated(engine: ds4.Engine) -> None:
    ids = tokens(100)
    session = engine.session()
    session.sync(ids)
    session.sync(ids[:95] + tokens(30, seed=5))
    assert (session.reused, session.recomputed) == (95, 30)  # the last 16 tokens can be cut off for free
    assert_fresh(engine, session)
    session.sync(session.tokens)
    assert session.recomputed == 0
    session.sync([*session.tokens, 1])
    assert session.recomputed == 1


def test_truncation_is_free_up_to_16_tokens(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(120)
    evaluated, step = 0, engine.step

    def counted(batch: Any, *args: Any) -> Any:
        nonlocal evaluated
        evaluated += sum(len(ids) for _, ids in batch)
        return step(batch, *args)

    for cut in range(1, 17):
        session = engine.session()
        session.sync(ids)
        expected = fresh_logits(engine, ids[: 120 - cut])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", counted)
            session.truncate(120 - cut)
            assert session.tokens == ids[: 120 - cut]
            assert evaluated == 0
            assert torch.equal(session.logits, expected)
            assert evaluated == 1  # the last token, for its logits
            session.sync(ids)
            assert evaluated == 1 + cut
        evaluated = 0
        assert_fresh(engine, session)
    session = engine.session()
    session.sync(ids)
    with pytest.raises(ds4.Ds4Error, match="use rewind"):
        session.truncate(120 - 17)


def test_truncating_twice_does_not_reach_further_than_the_rings(engine: ds4.Engine) -> None:
    session = engine.session()
    session.sync(tokens(100))
    session.truncate(90)
    with pytest.raises(ds4.Ds4Error, match="use rewind"):
        session.truncate(80)
    session.rewind(80)
    assert_fresh(engine, session)


def test_a_cancelled_prefill_is_a_shorter_valid_session(engine: ds4.Engine) -> None:
    ids = tokens(100)
    session = engine.session()
    asked = itertools.count()
    assert session.sync(ids, cancelled=lambda: next(asked) == 2) is False
    assert session.tokens == ids[:64]
    assert_fresh(engine, session)
    seen: list[tuple[int, int]] = []
    assert session.sync(ids, progress=lambda done, total: seen.append((done, total))) is True
    assert session.reused == 64
    assert seen[-1] == (100, 100)
    assert_fresh(engine, session)


def test_a_failed_step_leaves_the_session_usable(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(120)
    session = engine.session()
    session.sync(ids[:70])
    with monkeypatch.context() as patch:
        model: Any = engine.runner
        patch.setattr(model.model, "_moe", lambda *args: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            session.sync(ids)
    session.sync(ids)
    assert_fresh(engine, session)


@pytest.mark.parametrize("after", ["step", "batch", "rewind", "sampling"])
def test_whatever_follows_a_failed_step_is_right(engine: ds4.Engine, after: str) -> None:
    ids = tokens(150)
    session = engine.session()
    session.sync(ids[:100])

    def fail(layer: int, x: torch.Tensor) -> None:
        if layer == 3:
            raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        engine.step([(session, ids[100:140])], taps=Taps(stream=fail))
    assert session.tokens == ids[:100]
    if after == "step":
        session.step(7)
    elif after == "batch":
        engine.step([(engine.session(), [1, 2]), (session, [7, 8])])
    elif after == "rewind":
        session.rewind(95)
    elif after == "sampling":
        for _ in range(3):
            session.step(int(session.logits.argmax()))
    assert_fresh(engine, session)


def test_logits_are_the_sessions_own(engine: ds4.Engine) -> None:
    session = engine.session()
    (every,) = engine.step([(session, tokens(64))], logits="all")
    assert every is not None
    assert session.logits.untyped_storage().nbytes() == SMALL.vocab * 4
    expected = session.logits.clone()
    every.zero_()
    assert torch.equal(session.logits, expected)
    kept = session.checkpoints.at(64)
    assert kept is not None
    assert torch.equal(kept.logits, expected)


def test_export_and_import_move_a_session(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(130)
    session = engine.session()
    session.sync(ids[:77])
    other = engine.session()
    other.import_state(ids[:77], session.export())
    other.sync(ids)
    assert other.reused == 77
    assert_fresh(engine, other)
    # Only what came since token 77, on top of a session that holds those.
    session.sync(ids)
    third = engine.session()
    third.sync(ids[:77])
    third.import_state(ids, session.export(77))
    third.sync([*ids, 3])
    assert third.recomputed == 1
    assert_fresh(engine, third)
    # The logits come along: nothing is evaluated to go on sampling.
    fourth = engine.session()
    fourth.import_state(ids, session.export())
    expected = session.logits
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda *args: pytest.fail("something was evaluated"))
        assert torch.equal(fourth.logits, expected)
        fourth.sync(ids)
    assert fourth.recomputed == 0


def test_a_state_that_does_not_fit_is_refused(engine: ds4.Engine) -> None:
    ids = tokens(130)
    session = engine.session()
    session.sync(ids)
    other = engine.session()
    with pytest.raises(ds4.Ds4Error, match="one of 130 tokens, but 90"):
        other.import_state(ids[:90], session.export())
    other.sync(tokens(60, seed=3))
    with pytest.raises(ds4.Ds4Error, match="starts at token 32, but only 0"):
        other.import_state(ids, session.export(32))
    qat_sim = engine.runner.model.qat_sim  # type: ignore[attr-defined]
    stranger = random_engine(qat_sim=not qat_sim, config=CONFIG).session()
    with pytest.raises(ds4.Ds4Error, match="another model"):
        stranger.import_state(ids, session.export())
    assert_fresh(engine, other)


def test_pages_are_given_back(engine: ds4.Engine) -> None:
    def used() -> int:
        return sum(pool.used_pages for pool in engine.runner.model.cache.pools.values())  # type: ignore[attr-defined]

    before = used()
    session = engine.session()
    session.sync(tokens(600))
    fork = session.fork()
    fork.sync(tokens(300) + tokens(300, seed=4))
    assert used() > before
    session.close()
    fork.close()
    assert used() == before
    with pytest.raises(ds4.Ds4Error, match="closed"):
        session.sync([1])
    with pytest.raises(ds4.Ds4Error, match="closed"):
        session.step(1)
    for _ in range(3):  # sessions that nobody closes
        session = engine.session()
        session.sync(tokens(300))
        fork = session.fork()
    del session, fork
    gc.collect()
    assert used() == before


def test_what_was_not_a_number_does_not_outlive_a_reset(engine: ds4.Engine) -> None:
    session = engine.session()
    session.sync(tokens(100))
    for plane in session.state._window:  # type: ignore[attr-defined]
        plane.fill_(float("nan") if plane.dtype.is_floating_point else 0x7F)
    session.rewind(0)
    session.sync(tokens(40, seed=2))
    assert_fresh(engine, session)


def test_forks_share_the_budget_of_what_they_share() -> None:
    engine = random_engine(config=EngineConfig(prefill_chunk=32, checkpoint_interval=32))
    session = engine.session()
    session.sync(tokens(640))
    budget = engine.checkpoint_budget
    used = budget.used()
    forks = [session.fork() for _ in range(5)]
    assert budget.used() == used
    budget.limit = used
    budget.enforce()
    assert len(session.checkpoints) == len(forks[0].checkpoints) == 20
    budget.limit = used // 2
    budget.enforce()
    assert used // 4 < budget.used() <= used // 2
    assert len(session.checkpoints) > 5


def test_a_boundary_at_the_wanted_length_does_not_hide_the_free_cut(engine: ds4.Engine) -> None:
    ids = tokens(64)
    session = engine.session()
    session.sync(ids, boundaries=[60])
    session.sync(ids[:60])
    assert (session.reused, session.recomputed) == (59, 1)
    assert_fresh(engine, session)


def test_a_session_belongs_to_its_engine(engine: ds4.Engine) -> None:
    with pytest.raises(ds4.Ds4Error, match="engine that it came from"):
        random_engine().step([(engine.session(), [1])])


def test_checkpoints_stay_within_their_budget() -> None:
    engine = random_engine(config=EngineConfig(prefill_chunk=32, checkpoint_interval=32))
    session = engine.session()
    session.sync(tokens(64))
    one = session.checkpoints.nbytes // 2
    small = random_engine(config=EngineConfig(prefill_chunk=32, checkpoint_interval=32, checkpoint_bytes=6 * one))
    session = small.session()
    session.sync(tokens(1600))
    lengths = session.checkpoints.lengths()
    assert small.checkpoint_budget.used() <= 6 * one
    assert len(lengths) >= 4
    assert lengths[-1] == 1600
    gaps = [b - a for a, b in itertools.pairwise(lengths)]
    assert gaps == sorted(gaps, reverse=True)  # thinner the further back
    assert_fresh(small, session)


def test_each_item_of_a_batch_says_which_logits_it_wants(engine: ds4.Engine) -> None:
    ids = tokens(20)
    sessions = [engine.session() for _ in range(3)]
    none, last, every = engine.step([(s, ids) for s in sessions], logits=["none", "last", "all"])
    assert none is None
    assert last is not None
    assert every is not None
    assert (last.shape, every.shape) == ((SMALL.vocab,), (20, SMALL.vocab))
    assert torch.equal(every[-1], last)
    for session in sessions:
        assert_fresh(engine, session)
    with pytest.raises(ds4.Ds4Error, match="names 2 items, but the batch has 1"):
        engine.step([(sessions[0], [1])], logits=["last", "all"])


def test_what_is_pending_is_not_lost(engine: ds4.Engine) -> None:
    session = engine.session()
    session.sync(tokens(20))
    session.pending = 9
    session.step(5)
    assert session.tokens == [*tokens(20), 9, 5]
    assert session.pending is None
    assert_fresh(engine, session)


@pytest.mark.parametrize("wrong", ["abc", [[1]], [1.5], [None], 7, ["1"]])
def test_what_is_no_list_of_ids_is_refused(engine: ds4.Engine, wrong: Any) -> None:
    session = engine.session()
    with pytest.raises(ds4.Ds4Error, match="token ids are integers"):
        session.sync(wrong)
    with pytest.raises(ds4.Ds4Error, match="token ids are integers"):
        engine.step([(session, wrong)])
    assert session.tokens == []
    session.sync(torch.tensor([1, 2]))
    assert [type(i) for i in session.tokens] == [int, int]


def test_wrong_arguments_are_refused(engine: ds4.Engine) -> None:
    assert engine.step([]) == []
    session = engine.session()
    session.sync([1, 2, 3])
    with pytest.raises(ds4.Ds4Error, match="use last, all, none or keep"):
        engine.step([(session, [1])], logits="foo")  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match=r"cannot go back to 1\.5"):
        session.rewind(1.5)  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match=r"takes a ds4\.Sampling"):
        next(session.generate(None, 3))  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match="prefill chunk must be at least 1"):
        session.sync([1, 2], chunk=0)
    for wrong in (
        {"context": "a"},
        {"context": 0},
        {"checkpoint_interval": -5},
        {"threads": 100_000},
        {"context": 1.5},
    ):
        with pytest.raises(ds4.Ds4Error, match="must be a whole number from"):
            EngineConfig(**wrong)  # type: ignore[arg-type]


def test_errors_name_what_is_wrong(engine: ds4.Engine) -> None:
    session = engine.session()
    with pytest.raises(ds4.Ds4Error, match="at least one token"):
        session.sync([])
    with pytest.raises(ds4.Ds4Error, match="token id 64 is not in the vocabulary"):
        session.sync([1, 64])
    with pytest.raises(ds4.Ds4Error, match="token id -1"):
        session.step(-1)
    with pytest.raises(ds4.ContextOverflowError, match=r"Prompt has 4096 tokens, .* context size is 4096 tokens"):
        session.sync([1] * 4096)
    with pytest.raises(ds4.Ds4Error, match="no logits"):
        _ = session.logits
    session.sync([1, 2])
    with pytest.raises(ds4.Ds4Error, match="holds 2"):
        session.rewind(3)
    with pytest.raises(ds4.Ds4Error, match="only once"):
        engine.step([(session, [1]), (session, [2])])
    with pytest.raises(ds4.Ds4Error, match="no tokenizer"):
        next(iter(session.generate(ds4.Sampling(), max_tokens=1)))


operation = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 60), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(1, 8), st.integers(0, 3)),
    st.tuples(st.just("edit"), st.integers(0, 100), st.integers(1, 40)),
    st.tuples(st.just("rewind"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("truncate"), st.integers(0, 16), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(0), st.just(0)),
    st.tuples(st.just("fork"), st.just(0), st.just(0)),
    st.tuples(st.just("batch"), st.integers(1, 30), st.integers(1, 30)),
    st.tuples(st.just("fail"), st.integers(1, 40), st.integers(0, 4)),
    st.tuples(st.just("move"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("every"), st.integers(1, 40), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(operation, min_size=1, max_size=14), st.integers(0, 1000))
def test_any_sequence_of_operations(engine: ds4.Engine, operations: list[tuple[str, int, int]], seed: int) -> None:
    rng = random.Random(seed)

    def some(n: int) -> list[int]:
        return [rng.randrange(SMALL.vocab) for _ in range(n)]

    main, other = engine.session(), engine.session()
    main.sync(some(5))
    other.sync(some(30))
    for name, a, b in operations:
        n = len(main.tokens)
        if name == "extend":
            whole = main.state.can_truncate(n)  # no step has just failed
            main.sync(main.tokens + some(a), chunk=[7, 16, 24, 64][b])
            assert main.reused == n or not whole
        elif name == "step":
            for token in some(a):
                main.step(token)
        elif name == "edit":
            kept = n * a // 100
            main.sync(main.tokens[:kept] + some(b))
        elif name == "rewind" and n:
            best = max([c for c in main.checkpoints.lengths() if c <= n * a // 100], default=0)
            main.rewind(n * a // 100)
            assert main.reused >= best  # never from 0 where a checkpoint exists
            if not main.tokens:
                main.sync(some(3))
        elif name == "truncate" and n > a and main.state.can_truncate(n - a):
            main.truncate(n - a)
        elif name == "checkpoint":
            main.checkpoint()
        elif name == "fork":
            other.close()
            other = main.fork()
        elif name == "batch":
            engine.step([(other, some(b)), (main, some(a))])
        elif name == "every":
            engine.step([(main, some(a))], logits="all")
        elif name == "fail":
            broken = Taps(stream=lambda layer, x, last=b: 1 // (layer - last))  # type: ignore[misc]
            with pytest.raises(ZeroDivisionError):
                engine.step([(main, some(a)), (other, some(1))], taps=broken)
        elif name == "move" and n:
            start = n * a // 100
            moved = engine.session()
            if start:
                moved.sync(main.tokens[:start])
            moved.import_state(main.tokens, main.export(start))
            main.close()
            main = moved
    # Logits may be from before what spoiled the rows: both go on, one after the other and back.
    for session in (other, main, other):
        session.step(1) if session.tokens else session.sync([1])
        assert_fresh(engine, session)
    assert_fresh(engine, main)
    main.close()
    other.close()


def test_turn_boundaries_near_the_end_cost_no_step(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, steps = tokens(150), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda batch, *args: (steps.append(len(batch[0][1])), step(batch, *args))[1])
    session = engine.session()
    session.sync(ids, chunk=100, boundaries=[30, 92, 99, 140, 149])
    assert steps == [30, 70, 50]  # 30 lies too far back from 100; the others are within reach of a step's end
    assert set(session.checkpoints.lengths()) == {30, 92, 99, 100, 140, 149}
    for n in (149, 140, 99, 92, 30):
        session.rewind(n)
        assert (session.reused, session.recomputed) == (n, 0)
        assert_fresh(engine, session)


def test_a_fork_and_its_origin_go_on_apart(engine: ds4.Engine) -> None:
    first = engine.session()
    first.sync(tokens(50))
    second = first.fork()
    engine.step([(second, tokens(20, seed=1)), (first, tokens(30, seed=2))])
    assert_fresh(engine, second)
    for session, token in ((second, 3), (first, 5), (second, 7), (first, 9)):
        session.step(token)
        assert_fresh(engine, session)


def test_a_fork_has_the_token_that_waits(engine: ds4.Engine) -> None:
    session = engine.session()
    session.sync(tokens(20))
    session.pending = 7
    fork = session.fork()
    assert fork.pending == 7
    fork.step(3)
    assert fork.tokens == [*tokens(20), 7, 3]
    assert_fresh(engine, fork)


@pytest.mark.parametrize("chunk", [20, 33, 50, 100])
def test_chunks_of_any_size_leave_ways_back(chunk: int) -> None:
    engine = random_engine(config=EngineConfig(prefill_chunk=chunk, checkpoint_interval=32))
    session = engine.session()
    session.sync(tokens(330))
    edited = tokens(300) + tokens(30, seed=1)
    session.sync(edited)
    kept = next(n for n in range(300, 0, -1) if tokens(330)[:n] == edited[:n])
    assert session.reused >= kept - chunk - 32
    assert_fresh(engine, session)
    # No more of them than multiples of the interval, and none at the end, where the state itself is.
    whole = engine.session()
    whole.sync(tokens(330))
    assert len(whole.checkpoints) <= 330 // 32
    assert 330 not in whole.checkpoints.lengths()


def test_each_way_back_is_copied_once(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session, made = engine.session(), []
    checkpoint = session.state.checkpoint

    def counted(logits: Any, length: int | None = None) -> Any:
        made.append(checkpoint(logits, length))
        return made[-1]

    monkeypatch.setattr(session.state, "checkpoint", counted)
    session.sync(tokens(340), chunk=256, boundaries=[70, 150, 230, 330])
    assert [one.length for one in made] == [70, 150, 230, 256, 330] == session.checkpoints.lengths()


def test_a_session_of_the_default_configuration_goes_back_to_multiples_of_128() -> None:
    assert (EngineConfig().checkpoint_interval, EngineConfig().checkpoint_bytes) == (128, 1 << 30)
    engine = random_engine()
    session = engine.session()
    session.sync(tokens(1100), chunk=256)
    session.rewind(1000)
    assert (session.reused, session.recomputed) == (768, 232)
    assert_fresh(engine, session)


def test_of_many_boundaries_the_last_ones_get_a_way_back(engine: ds4.Engine) -> None:
    session = engine.session()
    session.sync(tokens(400), chunk=400, boundaries=range(30, 390, 30))
    assert [n for n in session.checkpoints.lengths() if n % 32] == list(range(150, 390, 30))
