"""What engines over one model share, and what they do not."""

from __future__ import annotations

import threading

import torch

from ds4.engine import EngineConfig
from ds4.model.weights import Scratch
from tests.helpers import random_engine

PROMPT = [i * 7 % 60 for i in range(150)]


def test_what_an_engine_was_doing_when_it_was_renewed_changes_nothing() -> None:
    config = EngineConfig(prefill_chunk=32, checkpoint_interval=32)
    old = random_engine(config=config)
    stuck = old.session()
    stuck.sync(PROMPT[:100])
    new = old.renew()
    assert (new.context, new.config) == (old.context, old.config)
    session = new.session()
    session.sync(PROMPT[:80])
    # The lost step ends behind the back of the new engine, and its session is given up.
    stuck.sync([*PROMPT[:100], *PROMPT[::-1]])
    stuck.close()
    session.sync(PROMPT)
    reference = random_engine(config=config).session()
    reference.sync(PROMPT)
    assert torch.equal(session.logits, reference.logits)
    pools = old.runner.model.cache.pools, new.runner.model.cache.pools
    for ratio, pool in pools[1].items():
        assert pool is not pools[0][ratio]
        assert sum(pools[0][ratio]._references) == 0


def test_threads_do_not_share_the_memory_they_dequantise_into() -> None:
    scratch = Scratch()
    mine = scratch.take("slice", 2, 8)
    assert scratch.take("slice", 1, 8).data_ptr() == mine.data_ptr()
    others: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: others.append(scratch.take("slice", 2, 8)))
    thread.start()
    thread.join(30)
    assert others[0].data_ptr() != mine.data_ptr()
