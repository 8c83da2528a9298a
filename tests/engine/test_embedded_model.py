"""The model that ships: exact whatever the chunks, the company or the number of threads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import ds4
from ds4.gguf.file import embedded_model_path

CONTEXT = 1_048_576


@pytest.fixture(scope="module")
def engine() -> ds4.Engine:
    return ds4.load()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_it_is_small_enough_to_come_with_the_package() -> None:
    assert embedded_model_path().stat().st_size <= 16_000_000


def test_it_is_the_tiny_profile_with_the_full_context(engine: ds4.Engine) -> None:
    assert engine.shape == ds4.TINY
    assert engine.context == CONTEXT
    assert engine.tokenizer.vocab_size == ds4.TINY.vocab


def test_chunks_company_and_history_do_not_change_a_bit(engine: ds4.Engine, threads: int) -> None:
    rng = random.Random(threads)
    text = "The code word for the river is lamp. " + " ".join(
        rng.choice(["small", "boats", "carry", "salt", "to", "the", "old", "town", "by", "night"]) for _ in range(330)
    )
    ids = engine.tokenizer.encode_chat(ds4.chat.render([{"role": "user", "content": text}]))
    visible = len(ids) // ds4.TINY.sparse_ratio
    assert visible > 2 * ds4.TINY.index_top_k  # the indexer has a choice
    (whole,) = engine.step([(engine.session(), ids)], logits="all")
    assert whole is not None
    session, other, parts = engine.session(), engine.session(), []
    while len(session.tokens) < len(ids):
        n = rng.choice([1, 2, 17, 60, 128])
        part, _ = engine.step([(session, ids[len(session.tokens) :][:n]), (other, ids[:3])], logits="all")
        assert part is not None
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    fresh = engine.session()
    fresh.sync(ids, chunk=128)
    fresh.rewind(len(ids) - 100)
    assert fresh.reused == (len(ids) - 100) // 128 * 128 > 0
    assert torch.equal(fresh.logits, whole[len(ids) - 101])


def test_it_speaks(engine: ds4.Engine) -> None:
    session = engine.session()
    prompt = ds4.chat.render([{"role": "user", "content": "What is 47 + 38?"}])
    session.sync(engine.tokenizer.encode_chat(prompt))
    text = b"".join(session.generate(ds4.Sampling(temperature=0.0), max_tokens=100)).decode()
    message = ds4.chat.parse(text)
    assert "85" in message.text
    assert message.reasoning
    assert session.pending == engine.tokenizer.eos
