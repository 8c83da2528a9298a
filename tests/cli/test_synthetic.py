"""Files of full shape with random weights."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGMLQuantizationType

import ds4
from ds4.gguf.blocks import dequantize
from ds4.gguf.file import ModelFile, open_model
from tests.cli.conftest import TOKENIZER


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("synthetic", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the tiny profile."""
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    synthetic.write(path, ds4.TINY, TOKENIZER)
    return path


def experts_of(file: ModelFile, layer: int) -> list[bytes]:
    return [file.raw(f"blk.{layer}.ffn_{part}_exps.weight").tobytes() for part in ("gate", "up", "down")]


def test_the_model_runs_and_its_next_token_is_neither_certain_nor_uniform(tiny: Path) -> None:
    engine = ds4.load(tiny)
    session = engine.session()
    session.sync([engine.tokenizer.bos, *engine.tokenizer.encode("How are you today?")])
    logits = session.logits.double()
    assert engine.shape == ds4.TINY
    assert logits.isfinite().all()
    assert 1 < float(logits.std()) < 10
    assert 0.001 < float(logits.softmax(0).max()) < 0.9
    first = logits.clone()
    session.step(77)
    assert not first.equal(session.logits.double())


def test_layers_share_sets_of_experts(tiny: Path) -> None:
    file = open_model(tiny)
    assert experts_of(file, 0) == experts_of(file, 2) == experts_of(file, 4)
    assert experts_of(file, 1) == experts_of(file, 5)
    assert experts_of(file, 0) != experts_of(file, 1)
    assert file.raw("blk.0.attn_q_a.weight").tobytes() != file.raw("blk.2.attn_q_a.weight").tobytes()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    synthetic: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    command = ["--shape", "tiny", "--tokenizer", str(TOKENIZER), "--out"]
    assert synthetic.main([*command, str(again)]) == synthetic.main([*command, str(other), "--seed", "2"]) == 0
    assert again.read_bytes() == tiny.read_bytes()
    synthetic.write(again, ds4.TINY, TOKENIZER, threads=5)
    assert again.read_bytes() == tiny.read_bytes()
    assert experts_of(open_model(other), 0) != experts_of(open_model(tiny), 0)


def test_sparse_experts_are_zeros(synthetic: ModuleType, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    synthetic.write(path, ds4.TINY, TOKENIZER, expert_sets=6, sparse=True)
    file = open_model(path)
    for layer in range(ds4.TINY.layers):
        assert not any(any(data) for data in experts_of(file, layer))
    assert file.raw("blk.0.attn_q_a.weight").tobytes() == open_model(tiny).raw("blk.0.attn_q_a.weight").tobytes()


@pytest.mark.parametrize("type", ["Q8_0", "IQ2_XXS", "Q2_K", "Q4_K", "MXFP4"])
def test_blocks_have_the_wanted_spread_around_zero(type: str, synthetic: ModuleType) -> None:
    kind = GGMLQuantizationType[type]
    blocks = synthetic.BLOCKS[kind](np.random.default_rng(3), 2048)
    values = dequantize(synthetic._scaled(blocks, kind, 0.05), kind, 2048 * (32 if type in ("Q8_0", "MXFP4") else 256))
    # MXFP4 scales are powers of two.
    low, high = (0.035, 0.071) if type == "MXFP4" else (0.048, 0.052)
    assert low < float(values.std()) < high
    assert abs(float(values.mean())) < 0.002


@pytest.mark.parametrize(("experts", "type"), [("q4", "Q4_K"), ("mxfp4", "MXFP4")])
def test_other_types_of_experts(experts: str, type: str, synthetic: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    synthetic.write(path, ds4.TINY, TOKENIZER, experts=experts, expert_sets=1)
    assert open_model(path).tensors["blk.5.ffn_down_exps.weight"].type == GGMLQuantizationType[type]


def test_the_last_layers_of_a_mixed_file_are_finer(synthetic: ModuleType, tmp_path: Path) -> None:
    shape = replace(ds4.TINY, layers=8, ratios=ds4.TINY.ratios[:2] * 4)
    types = {t.name: t.type.name for t in synthetic.plan(shape, "q2-q4", 2) if "ffn_gate_exps" in t.name}
    assert list(types.values()) == ["IQ2_XXS"] * 2 + ["Q4_K"] * 6
    sources = {t.name: t.source for t in synthetic.plan(shape, "q2-q4", 2) if "ffn_up_exps" in t.name}
    assert all(
        types[source.replace("up", "gate")] == types[name.replace("up", "gate")] for name, source in sources.items()
    )
    path = tmp_path / "mixed.gguf"
    synthetic.write(path, ds4.TINY, TOKENIZER, experts="q2-q4")
    assert open_model(path).tensors["blk.5.ffn_down_exps.weight"].type == GGMLQuantizationType.Q4_K


def test_full_files_have_the_size_of_the_real_ones(synthetic: ModuleType) -> None:
    for experts, size in (("q2", 86.7e9), ("q2-q4", 97.6e9), ("q4", 164.6e9)):
        tensors = synthetic.plan(ds4.FLASH, experts, ds4.FLASH.layers)
        assert sum(t.nbytes for t in tensors) == pytest.approx(size, rel=0.01)


def test_what_cannot_be_done_is_said(synthetic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main(["--out", str(tmp_path / "x"), "--tokenizer", "/nowhere"]) == 1
    assert "/nowhere: cannot be used as a tokenizer.json" in capsys.readouterr().err
    assert synthetic.main(["--out", str(tmp_path), "--shape", "tiny", "--tokenizer", str(TOKENIZER)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    path = tmp_path / "full.gguf"

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic.os, "pwrite", full)
        assert synthetic.main(["--out", str(path), "--shape", "tiny", "--tokenizer", str(TOKENIZER)]) == 1
    assert "cannot be written: No space left" in capsys.readouterr().err
    assert not path.exists()
    with pytest.raises(SystemExit):
        synthetic.main(["--out", str(tmp_path / "x"), "--expert-sets", "44"])
