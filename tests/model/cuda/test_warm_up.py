"""What is compiled and captured before the first request is all that requests need, and nothing of it stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds4.engine import Engine, EngineConfig
from ds4.gguf.shape import Shape
from ds4.model.cuda.runner import CudaRunner, RunnerConfig
from ds4.model.cuda.weights import DeviceWeights, TensorBytes
from ds4.ops.kernels import indexer
from tests.helpers import random_tensors

ON_GPU = torch.cuda.is_available()
SHAPE = Shape(
    name="custom",
    layers=3, hidden=1024, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(0, 4, 16), index_heads=2, index_dim=128, index_top_k=64,
    experts=13, experts_used=6, expert_hidden=128, route_scale=1.5, hash_layers=1, vocab=64, context=150_000,
)  # fmt: skip
CONFIG = RunnerConfig(slots=5, chunk=4096, experts_at_once=3)


@pytest.fixture(scope="module")
def weights(device: str) -> DeviceWeights:
    return loaded(SHAPE, device)


def loaded(shape: Shape, device: str) -> DeviceWeights:
    return DeviceWeights.load(TensorBytes(shape, random_tensors(shape, 7)), device)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels that are launched, as Triton would compile them; in the interpreter nothing else happens then."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[Any] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        types = self.fn.__annotations__
        constants = {n for n in given if n not in self.arg_names or "constexpr" in str(types.get(n))}
        alike = self.kwargs.get("do_not_specialize") or ()
        variant = [(n, v if n in constants else _variant(v, n in alike)) for n, v in sorted(given.items())]
        found.add((self.fn.__module__, self.fn.__name__, tuple(variant)))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def _variant(value: Any, alike: bool) -> Any:
    """What Triton compiles a kernel for: the type of an argument, its alignment, and integers that are 1."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if alike else "1" if value == 1 else "int, 16 divides it" if value % 16 == 0 else "int"
    return type(value)


@pytest.mark.skipif(ON_GPU, reason="the launches are left out, which the interpreter allows")
@pytest.mark.parametrize("quality", [False, True])
# Tiles of experts change at 69 and 128 tokens, pairs that one launch sorts at 85 and 256.
@pytest.mark.parametrize(("experts", "used", "chunk"), [(13, 6, 4096), (8, 2, 4096), (13, 6, 71)])
def test_requests_compile_nothing(
    weights: DeviceWeights, launched: set[Any], quality: bool, experts: int, used: int, chunk: int, device: str
) -> None:
    if experts != SHAPE.experts:
        weights = loaded(replace(SHAPE, experts=experts, experts_used=used), device)
    runner = CudaRunner(weights, replace(CONFIG, quality=quality, chunk=chunk))
    runner.warm_up()
    ready = set(launched)
    assert len(ready) > 50
    lengths = [1, 2, 5, 8, 9, 31, 64, 65, 85, 86, 100, 127, 200, 961, 1400, 2000, 4033, 4096]
    for start in (0, 255, 1234, 4097, 20_000, 33_000, 145_000):
        for length in lengths:
            if start in (0, 1234) or length in (2, 65, 100):
                state = runner.new_state()
                state.prepare(start)
                state.advance(start)
                runner.evaluate([(state, [1] * length)], ["last"], None, None)
                state.release()
    states = [runner.new_state() for _ in range(5)]
    for state in states:
        state.prepare(70_000)
        state.advance(70_000)
    for count in (1, 2, 3, 4, 5):
        runner.evaluate([(state, [1]) for state in states[:count]], ["last"] * count, None, None)
    assert sorted({name[:2] for name in launched - ready}) == []


def test_the_first_session_is_what_it_would_have_been(weights: DeviceWeights, request: pytest.FixtureRequest) -> None:
    if not ON_GPU:
        request.getfixturevalue("launched")
    seen: list[tuple[int, int]] = []
    runners = [CudaRunner(weights, replace(CONFIG, context=3000, chunk=512)) for _ in range(2)]
    engines = [Engine(runner, None, EngineConfig()) for runner in runners]
    engines[0].warm_up(lambda *done: seen.append(done))
    assert seen == [(n, len(seen) - 1) for n in range(len(seen))]
    model = runners[0].model
    assert model.cache.free_slots == CONFIG.slots
    assert all(pool.used_pages == 0 for pool in model.cache.pools.values())
    assert sorted(model._buffers) == [1, 2, 4, 8, 16, 32, 64]
    if ON_GPU:
        assert sorted(runners[0]._graphs) == [1, 2, 4, 8]
        sessions = [engine.session() for engine in engines]
        for session in sessions:
            session.sync([i % 64 for i in range(600)])
        assert torch.equal(*(session.step(3) for session in sessions))


@pytest.mark.parametrize("most", [0, 40, 513, 9_000, 300_000])
def test_sizes_of_the_choice(most: int) -> None:
    """For each number of keys one of the sizes is compiled alike."""
    sizes = indexer.select_sizes(most, 512)
    assert all(512 < size <= most for size in sizes)
    assert len(sizes) < 20

    def compiled(keys: int) -> Any:
        blocks = -(-keys // indexer.SELECT_BLOCK)
        if blocks == 1:
            return 1, (keys - 1).bit_length()
        return 2, (blocks * 512 - 1).bit_length(), blocks % 16 == 0

    assert {compiled(keys) for keys in range(513, most + 1, 7)} <= {compiled(size) for size in sizes}
