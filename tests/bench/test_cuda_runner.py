"""The benchmark over the runner of CUDA devices: in Triton's interpreter, with the launches left out, as they are slow.

So nothing is computed there; that the walk, filled contexts and the choice ahead of the host fit it is what is tested.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from gguf import GGMLQuantizationType

import ds4
from ds4.bench.decoding import timed_decode
from ds4.bench.growth import measure_growth
from ds4.bench.meter import Meter
from ds4.bench.prompts import random_ids
from ds4.bench.settings import Settings
from ds4.bench.traffic import Traffic
from ds4.bench.walk import Walk
from ds4.engine import EngineConfig
from ds4.engine.device import load_runner
from ds4.engine.synthetic import fill_session
from ds4.gguf.file import ModelFile, open_model
from ds4.gguf.shape import Shape
from ds4.gguf.writer import save
from tests.helpers import random_tensors

SHAPE = Shape(
    name="custom",
    layers=2, hidden=128, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(4, 8), index_heads=2, index_dim=128, index_top_k=4,
    experts=4, experts_used=2, expert_hidden=128, route_scale=1.5, hash_layers=1, vocab=64, context=2048,
)  # fmt: skip


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, none."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    from ds4.model.cuda.weights import TensorBytes

    tensors = random_tensors(SHAPE, 7)
    stored, kinds = TensorBytes(SHAPE, tensors), {}
    for name in tensors:
        if "_exps." in name:
            kinds[name] = GGMLQuantizationType.MXFP4
            tensors[name] = stored.raw(name).view(*tensors[name].shape[:-1], -1)
    path: Path = tmp_path_factory.mktemp("model") / "small.gguf"
    save(path, SHAPE, tensors, types=kinds)
    return open_model(path)


def load(file: ModelFile, settings: Settings) -> tuple[ds4.Engine, Meter]:
    """With room for just the sessions that the settings speak of."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = EngineConfig(
        context=settings.longest, prefill_chunk=32, checkpoint_interval=0, sessions=settings.live_sessions
    )
    runner, config = load_runner(file, device, config, room=4 << 30)
    return ds4.Engine(runner, None, config), Meter(device)


def test_each_step_is_begun_ahead_and_taken(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds4.model.cuda.runner import CudaRunner

    settings = Settings(start=20, end=20, decode=6, sessions=2, first_token=0)
    engine, meter = load(file, settings)
    ran: list[int] = []
    step = CudaRunner._step
    monkeypatch.setattr(CudaRunner, "_step", lambda self, buffers: ran.append(buffers.rows) or step(self, buffers))
    sessions = [engine.session() for _ in range(2)]
    for session in sessions:
        session.sync(random_ids(engine, 20, 1), boundaries=())
    ran.clear()
    timed_decode(engine, sessions, 6, meter)
    assert ran == [2] * 7  # the one behind the last too
    assert [len(session.tokens) for session in sessions] == [26, 26]


def test_the_walk_needs_no_more_sessions_than_it_says(file: ModelFile) -> None:
    settings = Settings(start=20, end=40, multiply=2, decode=3, sessions=3, repeats=2, first_token=30)
    engine, meter = load(file, settings)
    walk = Walk(
        engine, settings, random_ids(engine, 40, 1), Traffic.of(engine, file.tensors), meter, 1e9, profiling=True
    )
    walk.warm_up()
    rows = list(walk.rows())
    assert [(row.ctx_tokens, row.sessions) for row in rows] == [(20, 3), (40, 3)]
    assert walk.first_token() is not None
    assert engine.runner.model.cache.free_slots == settings.live_sessions  # type: ignore[attr-defined]


def test_filled_contexts(file: ModelFile) -> None:
    settings = Settings(fill=(1900,), fill_prefill=40, decode=3, repeats=2, first_token=0)
    engine, meter = load(file, settings)
    walk = Walk(engine, settings, random_ids(engine, 1900, 1), Traffic.of(engine, file.tensors), meter, 1e9)
    walk.warm_up()
    (row,) = walk.rows()
    assert (row.ctx_tokens, row.prefill_tokens, row.filled) == (1900, 40, True)
    session = engine.session()
    fill_session(session, random_ids(engine, 1900, 1))
    exported = session.export()
    assert exported.rows[0, "keys"][0].shape[0] == 1900 // 4
    for planes in exported.rows.values():  # no row is left empty
        assert bool((planes[0] != 0).any(dim=1).all())


def test_growth(file: ModelFile) -> None:
    settings = Settings(start=40, end=40, decode=3, first_token=0)
    engine, meter = load(file, settings)
    found = list(measure_growth(engine, random_ids(engine, 40, 1), 60, 2, settings.longest - 2, meter))
    assert [(growth.what, growth.count) for growth in found] == [("tokens", 60), ("requests", 2)]
