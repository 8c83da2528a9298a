"""A file on a device through `ds4.engine`: planned, loaded, and sessions that come back to what they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

import ds4
from ds4.engine import Engine, EngineConfig, Sampler, SampleRow, Sampling
from ds4.engine.device import load_runner
from ds4.engine.packing import ModelCodec
from ds4.engine.sampling import Choice
from ds4.errors import Ds4Error
from ds4.gguf import writer
from ds4.gguf.file import ModelFile, embedded_model_path, open_model
from ds4.gguf.shape import FLASH, Shape
from ds4.model.cuda import plan
from ds4.model.cuda.exact import ExactBuffers, ExactModel
from ds4.model.cuda.forward import Buffers, ByteModel, StepBuffers
from ds4.model.cuda.pool import DeviceCache
from ds4.model.cuda.runner import CudaRunner
from ds4.model.cuda.sampling import TokenSampler
from ds4.model.cuda.weights import DeviceWeights, FileBytes, TensorBytes
from ds4.ops.kernels.attention import splits_for
from tests.helpers import random_tensors
from tests.kvstore.helpers import open_store, restore, save

SHAPE = Shape(
    name="custom",
    layers=1, hidden=128, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(4,), index_heads=2, index_dim=128, index_top_k=4,
    experts=4, experts_used=2, expert_hidden=128, route_scale=1.5, hash_layers=1, vocab=64, context=512,
)  # fmt: skip
CONFIG = EngineConfig(context=512, prefill_chunk=4, sessions=3, quality=False)
IDS = [5, 9, 2, 33, 60]
ROOM = 4 << 30


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """A random model whose experts are MXFP4; the other matrices become Q8_0 and F16 on the device."""
    tensors = random_tensors(SHAPE, 7)
    stored, kinds = TensorBytes(SHAPE, tensors), {}
    for name in tensors:
        if "_exps." in name:
            kinds[name] = GGMLQuantizationType.MXFP4
            tensors[name] = stored.raw(name).view(*tensors[name].shape[:-1], -1)
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    writer.save(path, SHAPE, tensors, types=kinds)
    return open_model(path)


def load(file: ModelFile, device: str, config: EngineConfig = CONFIG) -> Engine:
    runner, config = load_runner(file, torch.device(device), config, room=ROOM)
    return Engine(runner, None, config, identity=file.identity())


def test_the_plan_reaches_the_runner(file: ModelFile, device: str) -> None:
    seen: list[tuple[int, int]] = []
    runner, config = load_runner(file, torch.device(device), CONFIG, lambda *done: seen.append(done), ROOM)
    assert isinstance(runner, CudaRunner)
    assert seen[-1][0] == seen[-1][1]
    assert (config.context, config.prefill_chunk, config.sessions) == (512, 4, 3)
    assert runner.config.limits == {4: 6}
    assert not runner.config.quality
    engine = Engine(runner, None, config)
    assert (engine.context, engine.prefill_chunk) == (512, 4)
    sessions = [engine.session() for _ in range(3)]
    with pytest.raises(Ds4Error, match="all 3 sequences"):
        engine.session()
    sessions[0].close()
    engine.session()
    open_config = load(file, device, EngineConfig(quality=False))
    assert (open_config.context, open_config.prefill_chunk, open_config.config.sessions) == (512, 4096, 8)


def test_sessions_against_a_computation_from_nothing(file: ModelFile, device: str) -> None:
    engine = load(file, device)
    session = engine.session()
    session.sync(IDS[:4])
    behind_four = session.logits
    session.checkpoint()
    behind_five = session.step(IDS[4])
    fork = session.fork()
    session.rewind(4)
    assert session.recomputed == 0
    assert torch.equal(session.logits, behind_four)
    assert torch.equal(fork.logits, behind_five)
    fork.truncate(3)
    assert fork.tokens == IDS[:3]
    fresh = engine.renew().session()
    fresh.sync(IDS)  # 4 and 1, as before
    assert torch.equal(fresh.logits, behind_five)
    session.import_state(IDS, fresh.export())
    assert torch.equal(session.logits, behind_five)


def test_states_on_disk_go_on_to_the_bit(file: ModelFile, device: str, tmp_path: Path) -> None:
    engine = load(file, device)
    session = engine.session()
    session.sync(IDS)
    store = open_store(tmp_path, engine)
    entry = save(store, session)
    assert entry is not None
    assert (store.files.path / entry.name).read_bytes()[4] == 4  # bits of the routed experts
    # A step was lost: what comes from the file goes to the engine that took its place.
    other = engine.renew()
    assert store.codec is not None
    store.codec = store.codec.of(other)
    again = restore(store, other, entry)
    assert again.tokens == IDS
    assert torch.equal(again.logits, session.logits)
    assert torch.equal(again.step(7), session.step(7))
    # Its values are those of the kernels.
    quality = load(file, device, replace(CONFIG, quality=True))
    fingerprints = {ModelCodec(e).fingerprint for e in (engine, other, quality, ds4.load(file.path, "cpu"))}
    assert len(fingerprints) == 3


def test_a_small_model_computes_in_float32(file: ModelFile, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told otherwise, as a larger one does."""
    found = {}
    for asked in (None, True, False):
        for small in (True, False):
            monkeypatch.setattr(plan, "SMALL_MODEL", (256 << 20) if small else 1000)
            engine = load(file, device, replace(CONFIG, quality=asked))
            assert isinstance(engine.runner, CudaRunner)
            assert isinstance(engine.runner.model, ExactModel) == engine.config.quality == engine.quality
            found[asked, small] = engine.config.quality
    assert found == {(asked, small): small if asked is None else asked for asked, small in found}
    with pytest.raises(Ds4Error, match="quality is 1; it must be True, False or None"):
        EngineConfig(quality=1)  # type: ignore[arg-type]


def nbytes(*held: object) -> int:
    """Bytes of all tensors in some objects, each storage once."""
    found: dict[int, int] = {}
    todo = list(held)
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (tuple, list)):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()
        elif hasattr(value, "__dataclass_fields__"):
            todo += [getattr(value, name) for name in value.__dataclass_fields__]
    return sum(found.values())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_buffers_of_a_step_are_as_planned(file: ModelFile, rows: int, exact: bool) -> None:
    """The plan may say a little more: of sums of blocks that only some types need, and of widths that not all use."""
    weights = DeviceWeights.load(FileBytes(file), "cpu")
    model = (ExactModel if exact else ByteModel)(weights, DeviceCache(SHAPE, "cpu", 1, 512))
    keys = model.scores.shape[1]
    buffers = model.buffers(rows)
    assert isinstance(buffers, ExactBuffers if exact else StepBuffers)
    assert buffers.parts.out.shape[1] == (plan.EXACT_SPLITS if exact else splits_for(rows, SHAPE.heads))
    own = nbytes(buffers) - nbytes(model.scores)
    planned = plan.step_bytes(SHAPE, rows, keys, exact) + 4 * rows * SHAPE.vocab
    assert own <= planned < 1.5 * own
    assert [plan.splits(n, 64) for n in plan.BUCKETS] == [splits_for(n, 64) for n in plan.BUCKETS]


def test_sampling_takes_what_is_planned() -> None:
    for rows in (1, 8):
        sampler = TokenSampler(rows, 129_280, torch.device("cpu"), capture=False)
        host = nbytes(sampler._numbers_host, sampler._masks_host, sampler._tokens_host)
        planned = plan.sampling_bytes(FLASH, rows)
        assert 0.99 * planned < nbytes(sampler) - host <= planned


def test_tokens_are_chosen_on_the_device_and_are_those_of_the_host(file: ModelFile, device: str) -> None:
    engine = load(file, device)
    sampling, logits = Sampling(temperature=1.3, min_p=0, seed=4), []
    session, other = engine.session(), engine.session()
    for each in (session, other):
        each.sync(IDS)
    host = [Sampler(sampling), Sampler(replace(sampling, seed=5))]
    rows = [SampleRow(session, Sampler(sampling)), SampleRow(other, Sampler(replace(sampling, seed=5)))]
    for _ in range(3):
        assert {row.session.device_logits.device.type for row in rows} == {device}
        chosen = [choice.token for choice in engine.sample(rows) if isinstance(choice, Choice)]
        logits = [row.session.logits for row in rows]
        assert chosen == [sampler.sample(each) for sampler, each in zip(host, logits, strict=True)]
        assert engine.step([(s, [t]) for s, t in zip((session, other), chosen, strict=True)], "keep") == [None, None]
    before = session.device_logits.clone()
    engine.step([(other, [1])], "keep")
    assert torch.equal(session.device_logits, before)


def count_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the decode steps that are made from now on."""
    runner, made = engine.runner, []
    assert isinstance(runner, CudaRunner)
    step = runner._step
    monkeypatch.setattr(runner, "_step", lambda buffers: (made.append(buffers.rows), step(buffers)))
    return made


@pytest.mark.parametrize("quality", [False, True])
def test_chosen_tokens_are_evaluated_before_anybody_asks(
    file: ModelFile, device: str, monkeypatch: pytest.MonkeyPatch, quality: bool
) -> None:
    engine = load(file, device, replace(CONFIG, quality=quality))
    sessions = [engine.session() for _ in range(2)]
    for number, session in enumerate(sessions):
        session.sync(IDS[number:])
    made = count_steps(engine, monkeypatch)
    greedy = Sampling(temperature=0)
    for rounds in range(1, 3):
        chosen = engine.sample([SampleRow(session, Sampler(greedy)) for session in sessions])
        assert made == [2] * rounds
        assert [len(session.tokens) for session in sessions] == [4 + rounds, 3 + rounds]
        tokens = [choice.token for choice in chosen if isinstance(choice, Choice)]
        engine.step([(s, [t]) for s, t in zip(sessions, tokens, strict=True)], "keep")
        assert made == [2] * rounds
    # Where part of a batch cannot be chosen on the device, the rest is not evaluated twice for it.
    engine.sample([SampleRow(sessions[0], Sampler(greedy)), SampleRow(sessions[1], Sampler(greedy), top=0)])
    assert made == [2, 2]


def test_tokens_are_chosen_where_there_is_no_room_to_go_on(
    file: ModelFile, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of a step that nothing was warmed up for are missing: only who asks for that step is told."""
    engine = load(file, device)
    session = engine.session()
    session.sync(IDS)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)

    def no_room(rows: int) -> Buffers:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "buffers", no_room)
        (choice,) = engine.sample([SampleRow(session, Sampler(Sampling(temperature=0)))])
        assert isinstance(choice, Choice)
        assert choice.token == int(session.logits.argmax())
        with pytest.raises(Ds4Error, match=r"memory of .* is not enough"):
            session.engine.step([(session, [choice.token])])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_between_steps_only_the_tokens_are_waited_for(file: ModelFile, device: str) -> None:
    engine = load(file, device)
    sessions = [engine.session() for _ in range(2)]
    for number, session in enumerate(sessions):
        session.sync(IDS[number:])

    def step() -> None:
        chosen = engine.sample([SampleRow(session, Sampler(Sampling(temperature=0))) for session in sessions])
        tokens = [choice.token for choice in chosen if isinstance(choice, Choice)]
        engine.step([(s, [t]) for s, t in zip(sessions, tokens, strict=True)], "keep")

    step()  # compiles and captures
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference over the norm: rows of steps of other sizes differ in rounding, other tokens by 1."""
    return float((first - second).norm() / second.norm())


OPERATIONS = ("other", "one", "fork", "truncate", "longer", "take", "rewind", "checkpoint", "end", "export")
"""Those on top are the ones that the interpreter has time for."""


def test_what_was_begun_ahead_changes_nothing(file: ModelFile, device: str) -> None:
    """Operations between a choice and its step; the other engine never begins anything by itself."""
    random = np.random.default_rng(1)
    config = replace(CONFIG, sessions=4)
    ahead, plain = load(file, device, config), load(file, device, config)
    pairs = [(ahead.session(), plain.session()) for _ in range(2)]
    for number, pair in enumerate(pairs):
        for session in pair:
            session.sync(IDS[number:])
    for what in OPERATIONS if device == "cuda" else OPERATIONS[:5]:
        chosen = ahead.sample([SampleRow(pair[0], Sampler(Sampling(temperature=0))) for pair in pairs])
        tokens = [choice.token for choice in chosen if isinstance(choice, Choice)]
        i = int(random.integers(2))
        length = max(1, len(pairs[i][0].tokens) - int(random.integers(1, 12)))
        which = [0, 1]
        if what == "other":
            tokens[i] = (tokens[i] + 1) % SHAPE.vocab
        elif what == "one":
            which = [i]
        elif what in ("rewind", "truncate"):
            for session in pairs[i]:
                getattr(session, what)(length)
        elif what == "fork":
            forks = tuple(session.fork() for session in pairs[i])
            for session in pairs[i]:
                session.close()
            pairs[i] = forks
        elif what == "checkpoint":
            for session in pairs[i]:
                session.checkpoint()
        elif what == "longer":
            for session in pairs[i]:
                session.engine.step([(session, [tokens[i], 3, 4])])
            which = [1 - i]
        elif what == "end":
            for session in pairs[i]:
                session.sync(IDS[:3])
            which = [1 - i]
        elif what == "export":
            exported = [session.export().checkpoint.logits for session in pairs[i]]
            assert apart(*exported) < 0.1
        for side, engine in enumerate((ahead, plain)):
            engine.step([(pairs[k][side], [tokens[k]]) for k in which])
        for first, second in pairs:
            assert first.tokens == second.tokens
            assert apart(first.logits, second.logits) < 0.1


def test_weights_and_state_are_as_planned() -> None:
    file = open_model(embedded_model_path())
    weights = DeviceWeights.load(FileBytes(file), "cpu")
    found = plan.fit(file.shape, file.tensors, ROOM, context=100_000, sessions=2, layout="b")
    # Tables that some formats are decoded with are not counted.
    assert abs(found.bytes_of("weights") - nbytes(weights)) < 0.01 * nbytes(weights)
    cache = DeviceCache(file.shape, "cpu", 2, 100_000, limits=found.page_limits())
    states = [cache.new_state() for _ in range(2)]
    for state in states:
        state.prepare(100_000)
    assert 0.98 * found.bytes_of("sessions") < cache.nbytes <= found.bytes_of("sessions")
