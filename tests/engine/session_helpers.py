"""Tokens for sessions of small random models, and what a session is compared with."""

from __future__ import annotations

import random

import torch

import ds4
from ds4.engine import EngineConfig
from tests.helpers import SMALL

CONFIG = EngineConfig(prefill_chunk=32, checkpoint_interval=32)


def tokens(n: int, seed: int = 0) -> list[int]:
    """Some token ids."""
    rng = random.Random(seed)
    return [rng.randrange(SMALL.vocab) for _ in range(n)]


def fresh_logits(engine: ds4.Engine, ids: list[int]) -> torch.Tensor:
    """The logits behind these tokens, evaluated in one step from nothing."""
    (logits,) = engine.step([(engine.session(), ids)])
    assert logits is not None
    return logits


def assert_fresh(engine: ds4.Engine, session: ds4.Session) -> None:
    """The session's logits are, to the bit, those of a new one with its tokens."""
    assert torch.equal(session.logits, fresh_logits(engine, session.tokens))
