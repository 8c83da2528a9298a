"""`RunnerConfig.quality`: the torch graph's numbers, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds4.engine.engine import ModelRunner
from ds4.gguf.shape import Shape
from ds4.model import DeepseekV4, ModelWeights, TensorSource
from ds4.model.cuda import exact
from ds4.model.cuda import prefill as long_pieces
from ds4.model.cuda.runner import CudaRunner, RunnerConfig
from ds4.model.cuda.weights import DeviceWeights, TensorBytes
from tests.helpers import random_tensors

SHAPE = Shape(
    name="custom",
    layers=3, hidden=128, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(0, 4, 16), index_heads=2, index_dim=128, index_top_k=4,
    experts=4, experts_used=2, expert_hidden=128, route_scale=1.5, hash_layers=1, vocab=64, context=512,
)  # fmt: skip
FAST = RunnerConfig(context=512, slots=4, chunk=16, short=8, experts_at_once=3)
CONFIG = replace(FAST, quality=True)
IDS = torch.randint(0, SHAPE.vocab, (64,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def source() -> TensorBytes:
    return TensorBytes(SHAPE, random_tensors(SHAPE, 7))


@pytest.fixture(scope="module")
def weights(source: TensorBytes, device: str) -> DeviceWeights:
    return DeviceWeights.load(source, device)


@pytest.fixture(scope="module")
def reference(source: TensorBytes) -> ModelRunner:
    return ModelRunner(DeepseekV4(ModelWeights.load(TensorSource(SHAPE, source.decoded())), qat_sim=True))


def difference(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None
    assert b is not None
    assert a.shape == b.shape
    assert a.dtype == torch.float32
    return float((a.double() - b.double()).norm() / b.double().norm())


def logits(runner: Any) -> list[Tensor | None]:
    """Of a prompt of two pieces, of one token, and of a few."""
    state = runner.new_state()
    found = runner.evaluate([(state, IDS[:22])], ["all"], None, None)
    found += runner.evaluate([(state, IDS[22:23])], ["last"], None, None)
    found += runner.evaluate([(state, IDS[23:25])], ["all"], None, None)
    assert state.length == 25
    return found


def test_it_is_the_torch_graph(weights: DeviceWeights, reference: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, runner = logits(reference), CudaRunner(weights, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(long_pieces, "VOCABULARY_ROWS", 24)
        patch.setattr(long_pieces, "split_terms", None)  # nothing is rounded
        errors = [difference(a, b) for a, b in zip(logits(runner), expected, strict=True)]
    assert "expert_scales" not in vars(runner.model)  # weights that float16 does not hold are no trouble
    assert sorted(errors)[1] < 1e-4
    assert max(errors) < 5e-3  # a code of FP8 or FP4 may fall on the other side
    both = (reference, CudaRunner(weights, FAST))
    right, fast = (runner.evaluate([(runner.new_state(), IDS[:1])], ["last"], None, None)[0] for runner in both)
    assert difference(fast, right) > 1e-3


def test_an_item_does_not_depend_on_the_batch(weights: DeviceWeights) -> None:
    runner = CudaRunner(weights, CONFIG)
    alone, other, longer = (runner.new_state() for _ in range(3))
    runner.evaluate([(alone, IDS[:5])], ["none"], None, None)
    together = alone.fork()
    expected = runner.evaluate([(alone, [7])], ["last"], None, None)[0]
    batch = [(other, [3]), (together, [7]), (longer, IDS[:3])]
    found = runner.evaluate(batch, ["none", "all", "last"], None, None)
    assert found[0] is None
    assert expected is not None
    assert found[1] is not None
    assert torch.equal(found[1][0], expected)
    assert found[2] is not None
    assert [state.length for state in (alone, together, other, longer)] == [6, 6, 1, 3]


def test_a_row_does_not_depend_on_the_size_of_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than hyper-connections and products multiply one by one where they may."""
    monkeypatch.setattr(exact, "EXACT_SPLITS", 3)  # fewer programs to interpret
    shape = replace(SHAPE, layers=1, ratios=(4,), hash_layers=0)
    weights = DeviceWeights.load(TensorBytes(shape, random_tensors(shape, 8)), device)
    runner = CudaRunner(weights, replace(CONFIG, slots=12))
    start = runner.new_state()
    runner.evaluate([(start, IDS[:18])], ["none"], None, None)
    others = [runner.new_state() for _ in range(9)]
    forks = [start.fork() for _ in range(2)]
    alone = runner.evaluate([(start, [7])], ["last"], None, None)[0]
    pair = runner.evaluate([(others[0], [5]), (forks[0], [7])], ["none", "last"], None, None)[1]
    batch = [(state, [i]) for i, state in enumerate(others)]
    many = runner.evaluate([*batch, (forks[1], [7])], ["none"] * 9 + ["last"], None, None)[9]
    assert sorted(runner.model._buffers) == [1, 2, 16]
    assert alone is not None
    for found in (pair, many):
        assert found is not None
        assert torch.equal(found, alone)
    # What it stored is the same, too.
    again = [runner.evaluate([(state, [3])], ["last"], None, None)[0] for state in (start, *forks)]
    assert all(torch.equal(logits, again[0]) for logits in again[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_the_setting_for_products_comes_back(before: str) -> None:
    settings = torch.backends.cuda.matmul
    was = settings.fp32_precision
    settings.fp32_precision = before
    try:
        with long_pieces._exact_products(torch.device("cuda")):
            inside = settings.fp32_precision
        assert inside in ("none", "ieee")
        assert settings.fp32_precision == before
    finally:
        settings.fp32_precision = was


def test_the_older_setting_for_products_comes_back() -> None:
    settings = torch.backends.cuda.matmul
    settings.allow_tf32 = True
    try:
        with long_pieces._exact_products(torch.device("cpu")):
            assert settings.allow_tf32
        with long_pieces._exact_products(torch.device("cuda")):
            assert not settings.allow_tf32
            assert torch.get_float32_matmul_precision() == "highest"
        assert settings.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        settings.allow_tf32 = False
