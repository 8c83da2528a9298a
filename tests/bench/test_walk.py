"""What the walk evaluates, what it makes of the times, and that its sessions are given back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ds4
from ds4.bench import kernels
from ds4.bench.decoding import timed_decode
from ds4.bench.meter import Meter
from ds4.bench.prompts import random_ids
from ds4.bench.settings import Settings
from ds4.bench.traffic import Traffic
from ds4.bench.walk import Walk
from ds4.engine import SampleRow
from ds4.gguf.file import open_model
from tests.bench.conftest import meter
from tests.cli.scripted import ScriptedRunner, scripted_engine


def walk(engine: ds4.Engine, model: Path, profiling: bool = False, **values: Any) -> Walk:
    settings = Settings(**{"start": 32, "end": 64, "multiply": 2, "decode": 8, "first_token": 0, **values})
    ids = random_ids(engine, max(settings.contexts()[-1][1], settings.first_token), 1)
    return Walk(engine, settings, ids, Traffic.of(engine, open_model(model).tensors), meter(), 1e6, profiling)


def test_speeds_are_tokens_by_median_seconds(engine: ds4.Engine, model_file: Path) -> None:
    rows = list(walk(engine, model_file).rows())
    assert [(r.ctx_tokens, r.prefill_tokens, r.gen_tokens) for r in rows] == [(32, 32, 8), (64, 32, 8)]
    assert [(r.prefill_tps, r.gen_tps, r.prefill_ms, r.step_ms) for r in rows] == [(128.0, 32.0, 250.0, 31.25)] * 2
    for row in rows:
        assert row.bandwidth_fraction == pytest.approx(row.step_bytes * 32 / 1e6)
        assert row.bytes_per_token == row.step_bytes
        assert (row.kernels, row.device_peak_bytes, row.filled) == (None, None, False)
        assert (len(row.prefill_seconds), len(row.gen_seconds)) == (3, 3)
        assert row.host_peak_bytes > 0
    assert rows[1].kvcache_bytes > 0
    assert rows[1].step_bytes > rows[0].step_bytes


def test_sessions_decode_together_and_differ(engine: ds4.Engine, model_file: Path, monkeypatch: Any) -> None:
    batches: list[list[list[int]]] = []
    step = engine.step

    def watched(batch: Sequence[Any], *args: Any, **more: Any) -> Any:
        if len(batch) > 1:
            batches.append([list(ids) for _, ids in batch])
        return step(batch, *args, **more)

    monkeypatch.setattr(engine, "step", watched)
    (row,) = walk(engine, model_file, end=32, sessions=3, repeats=1).rows()
    assert [len(batch) for batch in batches] == [3] * 9  # one that tells them apart, eight that count
    assert len({tuple(ids) for ids in batches[0]}) == 3
    assert (row.sessions, row.gen_tps) == (3, 96.0)
    assert row.bytes_per_token == row.step_bytes / 3


def test_every_repeat_does_the_whole_work(engine: ds4.Engine, model_file: Path, tokenizer: ds4.Tokenizer) -> None:
    scripted = scripted_engine(engine.shape, tokenizer)
    measured = walk(engine, model_file, start=100, end=200, decode=10, repeats=2)
    measured._engine = scripted
    list(measured.rows())
    assert isinstance(scripted.runner, ScriptedRunner)
    assert scripted.runner.evaluated == 2 * 2 * 110  # two contexts, two runs; the last one goes on


def test_decoding_chooses_and_steps_as_a_server_does(engine: ds4.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens through `Engine.sample`, logits kept where they are, and the first choice before the clock starts."""
    seen: list[Any] = []
    sample, step = engine.sample, engine.step
    session = engine.session()
    session.sync([5, 6, 7])

    def watched_sample(rows: Sequence[SampleRow]) -> Any:
        assert all(row.sampler.sampling.temperature == 0 for row in rows)
        seen.append("sample")
        return sample(rows)

    def watched_step(batch: Any, logits: Any = "last", **more: Any) -> Any:
        seen.append(logits)
        return step(batch, logits, **more)

    def clock() -> float:
        seen.append("clock")
        return 0.0

    monkeypatch.setattr(engine, "sample", watched_sample)
    monkeypatch.setattr(engine, "step", watched_step)
    timed_decode(engine, [session], 2, Meter(torch.device("cpu"), clock))
    assert seen == ["sample", "clock", "keep", "sample", "keep", "sample", "clock"]


def test_prefill_alone_and_decode_alone(engine: ds4.Engine, model_file: Path) -> None:
    (row,) = walk(engine, model_file, end=32, decode=0).rows()
    assert (row.gen_tps, row.step_ms, row.bandwidth_fraction, row.gen_seconds) == (None, None, None, ())
    first, second = walk(engine, model_file, fill=(3000, 100), repeats=2).rows()
    assert (first.ctx_tokens, first.prefill_tokens, first.prefill_tps, first.gen_tps) == (100, 0, None, 32.0)
    assert (second.ctx_tokens, second.filled) == (3000, True)
    assert second.kvcache_bytes > 2 * first.kvcache_bytes
    (row,) = walk(engine, model_file, fill=(3000,), fill_prefill=64).rows()
    assert (row.prefill_tokens, row.prefill_tps) == (64, 256.0)


def test_the_first_token_is_timed_from_the_prompt_on(engine: ds4.Engine, model_file: Path) -> None:
    found = walk(engine, model_file, first_token=40).first_token()
    assert found is not None
    assert (found.tokens, found.ms, found.tps, len(found.seconds)) == (40, 250.0, 160.0, 3)
    assert walk(engine, model_file).first_token() is None


def test_all_sessions_are_given_back(engine: ds4.Engine, model_file: Path) -> None:
    pools = engine.runner.new_state().cache.pools.values()  # type: ignore[attr-defined]
    before = [pool.used_pages for pool in pools]
    measured = walk(engine, model_file, sessions=2, repeats=2, first_token=20)
    measured.warm_up()
    list(measured.rows())
    measured.first_token()
    assert [pool.used_pages for pool in pools] == before


def test_logits_of_each_context_can_be_seen(engine: ds4.Engine, model_file: Path) -> None:
    seen: dict[int, torch.Tensor] = {}
    measured = walk(engine, model_file, decode=3, repeats=2)
    list(measured.rows(seen.__setitem__))
    session = engine.session()
    for context, logits in seen.items():
        session.sync(measured._ids[:context])
        assert torch.equal(session.logits, logits)
    assert list(seen) == [32, 64]


def test_what_does_not_fit_is_refused(engine: ds4.Engine, model_file: Path) -> None:
    with pytest.raises(ds4.Ds4Error, match="needs a context of 4106 tokens, but it has 4096; lower --ctx-max"):
        walk(engine, model_file, end=4096)
    settings = Settings(start=32, end=64, first_token=0)
    with pytest.raises(ds4.Ds4Error, match="the prompt has 10 tokens, but 64 are needed"):
        Walk(engine, settings, [1] * 10, Traffic(engine.shape, 0, 0, 0, 0, 0), meter(), 1.0)


def test_a_profile_is_of_whole_steps(engine: ds4.Engine, model_file: Path) -> None:
    measured = walk(engine, model_file, end=32, repeats=1, profiling=True)
    (row,) = measured.rows()
    chunk, found = measured.profiles
    assert (chunk.kind, chunk.ctx_tokens, chunk.tokens, chunk.floor_us) == ("prefill", 0, 32, None)
    assert all(kernel.floor_share is None for kernel in chunk.kernels)
    assert (found.kind, found.ctx_tokens, found.tokens) == ("decode", 32, 1)
    assert row.kernels == found.launches > engine.shape.layers
    assert found.floor_us == pytest.approx(row.step_bytes)  # at a megabyte a second
    assert sum(kernel.share for kernel in found.kernels) == pytest.approx(1)
    assert any("mm" in kernel.name for kernel in found.kernels)


def test_kernels_are_summed_by_name_and_copies_are_no_launches() -> None:
    events = [("a", 1, 30.0), ("Memcpy HtoD", 1, 5.0), ("b", 1, 40.0), ("a", 1, 25.0)]
    found = kernels.summary("decode", events, 100, 1, 2, 20e-6)
    assert [(k.name, k.launches, k.us) for k in found.kernels] == [
        ("a", 1.0, 27.5), ("b", 0.5, 20.0), ("Memcpy HtoD", 0.5, 2.5)
    ]  # fmt: skip
    assert (found.launches, found.us) == (1.5, 50.0)
    assert found.kernels[0].share == pytest.approx(0.55)
    assert found.kernels[0].floor_share == pytest.approx(27.5 / 20)
