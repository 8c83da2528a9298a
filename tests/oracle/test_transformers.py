"""The graph against an independent implementation: transformers' DeepseekV4ForCausalLM, random weights, float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import ds4

TOLERANCE = 1e-4


def test_prefill(oracle: Any) -> None:
    _, model, ids, expected = oracle
    engine = ds4.from_transformers(model)
    (logits,) = engine.step([(engine.session(), ids[0].tolist())], logits="all")
    assert logits is not None
    assert expected.abs().max() > 1.0  # the comparison is of numbers that matter
    assert (logits - expected).abs().max() <= TOLERANCE


def test_random_chunkings(oracle: Any) -> None:
    _, model, ids, expected = oracle
    engine = ds4.from_transformers(model)
    tokens = ids[0].tolist()
    rng = random.Random(3)
    for _ in range(20):
        session, parts = engine.session(), []
        while len(session.tokens) < len(tokens):
            start = len(session.tokens)
            size = rng.choice([1, 2, 3, 5, 16, 17, 40, 100])
            (part,) = engine.step([(session, tokens[start : start + size])], logits="all")
            assert part is not None
            parts.append(part)
        assert (torch.cat(parts) - expected).abs().max() <= TOLERANCE


def test_token_by_token(oracle: Any) -> None:
    _, model, ids, expected = oracle
    engine = ds4.from_transformers(model)
    session = engine.session()
    logits = torch.stack([session.step(token) for token in ids[0].tolist()])
    assert (logits - expected).abs().max() <= TOLERANCE


def test_batch_of_sequences_of_different_lengths(oracle: Any) -> None:
    _, model, ids, expected = oracle
    engine = ds4.from_transformers(model)
    tokens = ids[0].tolist()
    done = [0, 7, 33, 64, 101]
    sessions = [engine.session() for _ in done]
    for session, n in zip(sessions, done, strict=True):
        if n:
            session.sync(tokens[:n])
    sizes = [10, 1, 5, 30, 2]
    results = engine.step(
        [(s, tokens[n : n + size]) for s, n, size in zip(sessions, done, sizes, strict=True)], logits="all"
    )
    for result, n, size in zip(results, done, sizes, strict=True):
        assert result is not None
        assert (result - expected[n : n + size]).abs().max() <= TOLERANCE


def test_oracle_notices_a_wrong_graph(oracle: Any) -> None:
    """Each part of the graph matters to the logits that are compared: leaving one out is seen."""
    _, model, ids, expected = oracle
    tensors = ds4.engine.loading.tensors_from_transformers(
        model, shape := ds4.engine.loading.shape_from_transformers(model.config)
    )
    parts = ["attn_sinks.weight", "hc_attn_base.weight", "attn_compressor_ape.weight", "indexer.proj.weight", "bias"]
    for part in parts:
        names = [name for name in tensors if name.endswith(part)]
        assert names
        changed = {**tensors, **{name: torch.zeros_like(tensors[name]) for name in names}}
        engine = ds4.from_tensors(shape, changed, qat_sim=False)
        (logits,) = engine.step([(engine.session(), ids[0].tolist())], logits="all")
        assert logits is not None
        assert (logits - expected).abs().max() > 10 * TOLERANCE, part


@pytest.mark.parametrize("seed", range(3))
def test_more_seeds(seed: int) -> None:
    from tests.oracle.conftest import random_model

    model = random_model("flash pattern", seed=100 + seed)
    ids = torch.randint(0, 128, (1, 120), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(ids).logits[0]
    engine = ds4.from_transformers(model)
    (logits,) = engine.step([(engine.session(), ids[0].tolist())], logits="all")
    assert logits is not None
    assert (logits - expected).abs().max() <= TOLERANCE
