"""Both layouts of IQ2_XXS experts: the same model, the same bits, states for each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from ds4.engine import Engine, EngineConfig
from ds4.engine.device import load_runner, plan_for
from ds4.engine.packing import ModelCodec
from ds4.errors import Ds4Error
from ds4.gguf import writer
from ds4.gguf.file import ModelFile, open_model
from ds4.gguf.shape import Shape
from ds4.model.cuda.runner import CudaRunner, RunnerConfig
from ds4.model.cuda.weights import FileBytes, TensorBytes
from tests.helpers import random_tensors
from tests.kvstore.helpers import open_store, restore, save
from tests.ops.kernels.kernel_checks import random_raw

SHAPE = Shape(
    name="custom",
    layers=1, hidden=256, heads=2, head_dim=128, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64,
    window=16, ratios=(4,), index_heads=2, index_dim=128, index_top_k=4,
    experts=3, experts_used=2, expert_hidden=128, route_scale=1.5, hash_layers=0, vocab=64, context=512,
)  # fmt: skip
CONFIG = EngineConfig(context=512, prefill_chunk=8, sessions=2, checkpoint_interval=0)
IDS = torch.randint(0, SHAPE.vocab, (8,), generator=torch.Generator().manual_seed(3)).tolist()
ROOM = 4 << 30


def save_model(path: Path, kind: GGMLQuantizationType) -> ModelFile:
    """A random model whose gate and up experts are of that type, and down MXFP4."""
    tensors = random_tensors(SHAPE, 7)
    stored, kinds = TensorBytes(SHAPE, tensors), {}
    for name in tensors:
        if "_exps." in name:
            *lead, n, k = tensors[name].shape
            kinds[name] = kind if "down" not in name else GGMLQuantizationType.MXFP4
            raw = stored.raw(name)
            if kinds[name] == GGMLQuantizationType.IQ2_XXS:
                raw = random_raw(kind, lead[0] * n, k, len(kinds), "cpu", size=2 * k**-0.5 / 55)
            tensors[name] = raw.view(*lead, n, -1)
    writer.save(path, SHAPE, tensors, types=kinds)
    return open_model(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return save_model(tmp_path_factory.mktemp("model") / "iq2.gguf", GGMLQuantizationType.IQ2_XXS)


def load(file: ModelFile, device: str, layout: str, config: EngineConfig = CONFIG, room: int = ROOM) -> Engine:
    asked = replace(config, expert_layout=layout)  # type: ignore[arg-type]
    runner, config = load_runner(file, torch.device(device), asked, room=room)
    return Engine(runner, None, config, identity=file.identity())


def test_the_layout_that_was_taken(file: ModelFile, device: str, tmp_path: Path) -> None:
    for asked, taken in (("auto", "a"), ("a", "a"), ("b", "b")):
        engine = load(file, device, asked)
        assert isinstance(engine.runner, CudaRunner)
        assert engine.expert_layout == engine.config.expert_layout == taken
        assert engine.runner.model.weights.layers[0].gate.FORMAT.removeprefix("iq2_xxs_") == taken
        assert engine.renew().expert_layout == taken
    tight = plan_for(file, replace(CONFIG, expert_layout="a"), ROOM).card_bytes
    assert load(file, device, "auto", room=tight).expert_layout == "b"  # nothing would be left
    assert load(file, device, "a", room=tight).expert_layout == "a"
    with pytest.raises(Ds4Error, match=r"in layout A takes .*layout B of the experts \(--expert-layout b or auto\)"):
        load(file, device, "a", room=tight - 1)
    other = save_model(tmp_path / "mxfp4.gguf", GGMLQuantizationType.MXFP4)
    for asked in ("auto", "a", "b"):  # without effect
        engine = load(other, device, asked)
        assert (engine.expert_layout, engine.config.expert_layout) == (None, asked)


def test_results_and_states_are_the_same_to_the_bit(file: ModelFile, device: str, tmp_path: Path) -> None:
    """Of a long piece and steps behind it; a state that one has computed is good for the other.

    On a GPU with all kernels; those that read the experts have a test of the same of their own.
    """
    settings = RunnerConfig(context=512, slots=2, chunk=16, short=4, experts_at_once=2, limits={4: 4})
    engines, sessions = [], []
    for layout in ("a", "b"):
        runner: Any = CudaRunner.load(FileBytes(file), device, replace(settings, layout=layout))
        assert runner.expert_layout == layout
        engines.append(Engine(runner, None, CONFIG, identity=file.identity()))
        sessions.append(engines[-1].session())
        sessions[-1].sync(IDS[:7])
    a, b = sessions
    assert a.logits.isfinite().all()
    assert float(a.logits.std()) > 0.1
    assert torch.equal(a.logits, b.logits)

    store = open_store(tmp_path, engines[0])
    assert ModelCodec(engines[0]).fingerprint == ModelCodec(engines[1]).fingerprint
    entry = save(store, a)
    assert entry is not None
    assert store.codec is not None
    store.codec = store.codec.of(engines[1])
    again = restore(store, engines[1], entry)
    expected = a.step(IDS[7])
    assert torch.equal(b.step(IDS[7]), expected)
    assert torch.equal(again.step(IDS[7]), expected)
