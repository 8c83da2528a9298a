"""Sessions with random state: steps from there do all the work of a real context of that length."""

from __future__ import annotations

import pytest
import torch

import ds4
from ds4.engine import synthetic
from ds4.engine.synthetic import fill_session
from tests.engine.session_helpers import CONFIG, tokens
from tests.helpers import SMALL, random_engine


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "float32"])
def engine(request: pytest.FixtureRequest) -> ds4.Engine:
    engine: ds4.Engine = random_engine(qat_sim=request.param, config=CONFIG)
    return engine


@pytest.mark.parametrize("count", [1, 3, 4, 127, 128, 301])
def test_a_filled_session_is_as_large_as_a_real_one_and_goes_on(engine: ds4.Engine, count: int) -> None:
    real, filled = engine.session(), engine.session()
    real.sync(tokens(count))
    fill_session(filled, tokens(count))
    assert filled.tokens == real.tokens
    assert filled.state.nbytes == real.state.nbytes
    ours, theirs = filled.export(), real.export()
    assert ours.checkpoint.frontier.keys() == theirs.checkpoint.frontier.keys()
    for key, planes in theirs.rows.items():
        assert [(p.shape, p.dtype) for p in ours.rows[key]] == [(p.shape, p.dtype) for p in planes]
    assert bool(filled.logits.isfinite().all())
    assert bool(filled.step(7).isfinite().all())
    filled.sync([*filled.tokens, *tokens(40, 5)])
    assert filled.reused == count + 1
    assert bool(filled.logits.isfinite().all())


def test_a_long_state_comes_in_pieces(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_PIECE", 90)
    session = engine.session()
    fill_session(session, tokens(301))
    assert (len(session.tokens), session.state.length) == (301, 301)
    assert not len(session.checkpoints)
    for planes in session.export().rows.values():  # no row is left empty
        assert all(bool((row.float() != 0).any()) for row in planes[0])


def test_the_seed_decides_what_it_holds(engine: ds4.Engine) -> None:
    logits = []
    for seed in (1, 1, 2):
        session = engine.session()
        fill_session(session, tokens(50), seed)
        logits.append(session.step(3))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_what_cannot_be_filled_is_refused(engine: ds4.Engine) -> None:
    session = engine.session()
    with pytest.raises(ds4.Ds4Error, match="its context, not 0"):
        fill_session(session, [])
    with pytest.raises(ds4.Ds4Error, match=f"1 to {engine.context} tokens, its context, not {engine.context + 1}"):
        fill_session(session, [1] * (engine.context + 1))
    with pytest.raises(ds4.Ds4Error, match="not in the vocabulary"):
        fill_session(session, [SMALL.vocab])
    session.sync(tokens(3))
    with pytest.raises(ds4.Ds4Error, match="only an empty session"):
        fill_session(session, tokens(5))
