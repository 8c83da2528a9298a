"""The whole-model checks for a GPU, on a toy model.

Without a GPU the model in torch stands in for the one in kernels, as the interpreter is slow; what goes to the runner
itself is tried with the launches left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import ds4
from ds4.gguf.shape import Shape

TOOLS = Path(__file__).parents[2] / "tools"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOY = Shape(
    name="custom",
    layers=2, hidden=128, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(0, 4), index_heads=2, index_dim=128, index_top_k=4,
    experts=4, experts_used=2, expert_hidden=128, route_scale=1.5, hash_layers=1, vocab=64, context=1024,
)  # fmt: skip

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def gpu_check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_check", TOOLS / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def toy(gpu_check: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    sys.modules["gpu_checks.layers"].custom_file(path, TOY, "mxfp4", 1)
    return path


@pytest.fixture
def run(
    gpu_check: ModuleType, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Run:
    if not torch.cuda.is_available() and "launches" not in request.fixturenames:

        def stand_in(device: str, path: Path | None, config: ds4.EngineConfig, progress: Any = None) -> ds4.Engine:
            engine = ds4.load(path, device="cpu", config=config, progress=progress)
            engine.runner.quality = config.quality is not False  # type: ignore[attr-defined]
            return engine

        monkeypatch.setattr(sys.modules["gpu_checks.common"], "open_engine", stand_in)

    def run(check: str, *options: str) -> tuple[int, dict[str, Any]]:
        target = tmp_path / "values.json"
        command = [check, "--device", DEVICE, "--file", str(toy), "--json", str(target), *options]
        status = gpu_check.main(command)
        return status, json.loads(target.read_text())

    return run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, none."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)


def test_greedy_texts(run: Run) -> None:
    options = ("--prompts", "2", "--tokens", "3", "--batches", "1,2", "--processes", "0", "--tie", "9", "--bytes")
    status, values = run("tiny", *options)
    assert status == 0
    rows = [(row["mode"], row["batch"], row["texts"]) for row in values["texts"]]
    assert rows == [("float32", 1, 2), ("float32", 2, 2), ("bytes", 1, 2), ("bytes", 2, 2)]
    assert all(row["same"] + row["near-tied"] == 2 and row["different"] == 0 for row in values["texts"])
    assert [row["logits max"] < (0.2 if row["mode"] == "bytes" else 1e-2) for row in values["texts"]] == [True] * 4


def test_sessions(run: Run) -> None:
    status, values = run("sessions", "--length", "40", "--chunk", "16", "--steps", "3", "--batch", "2", "--bytes")
    assert status == 0
    assert [row["mode"] for row in values["sessions"]] == ["float32"] * 11 + ["bytes"] * 11
    assert all(row["same bits"] for row in values["sessions"])


def test_layers(run: Run) -> None:
    status, values = run("layers", "--tokens", "70", "--decode", "2", "--threads", "1")
    assert status == 0
    assert [(row["kind"], row["positions"]) for row in values["layers"]] == [
        ("prefill", 70),
        ("short", 7),
        ("decode", 2),
    ]


def test_fixtures(gpu_check: ModuleType, toy: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gpu_checks.fixtures"], "_templated", lambda ids: [1, *ids])
    ids = [2, 3, 4, 5]
    engine = sys.modules["gpu_checks.common"].cpu_engine(toy, 100, 50)
    session = engine.session()
    session.sync([1, *ids])
    logits = session.logits
    np.savez(tmp_path / "flash-q2-seed1-reference.npz", short=logits.numpy(), short_tokens=np.array(ids))
    order = logits.argsort(descending=True)[:20].tolist()
    top = [{"token": {"id": i}, "logit": float(logits[i])} for i in order]
    steps = {"steps": [{"selected": {"id": order[0]}, "top_logprobs": top}]}
    (tmp_path / "flash-q2-seed1-short.logprobs.json").write_text(json.dumps(steps))
    status, values = run("fixtures", "--fixtures", str(tmp_path), "--chunk", "64")
    (row,) = values["logits"]
    assert status == 0
    assert row["cosine"] > 0.99
    (text,) = values["texts"]
    assert text["same"] + text["near-tied"] == text["steps"] == 1
    assert values["load GB/s"] > 0


def test_speed(launches: None, run: Run) -> None:
    options = ("--contexts", "20,30", "--chunk", "16", "--chunks", "16", "--prefill-tokens", "16", "--steps", "1")
    options += ("--batch", "2", "--batch-context", "20", "--first-token", "20")
    status, values = run("speed", *options)
    assert status == 0
    assert [(row["context"], row["batch"]) for row in values["contexts"]] == [(20, 1), (20, 2), (30, 1)]
    assert [row["tokens"] for row in values["chunks"]] == [16]


def test_the_shape_of_few_layers_is_flash_s(gpu_check: ModuleType) -> None:
    shape = sys.modules["gpu_checks.layers"].layer_shape(gpu_check.parser().parse_args(["layers"]))
    assert shape.ratios == (0, 4, 128, 4)
    assert (shape.hidden, shape.head_dim, shape.expert_hidden) == (4096, 512, 2048)


def test_questions_are_the_same_for_a_seed(gpu_check: ModuleType) -> None:
    texts, common = sys.modules["gpu_checks.texts"], sys.modules["gpu_checks.common"]
    engine = texts._TokenizerOnly(common.open_file(None))
    first = texts.prompts(engine, 40, 1)
    assert first == texts.prompts(engine, 40, 1)
    assert len({tuple(ids) for ids in first}) > 30
