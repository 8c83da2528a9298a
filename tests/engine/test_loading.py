"""Engines from tensors, transformers models and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ds4
from ds4.gguf.shape import expected_tensors
from tests.helpers import SMALL, random_engine, random_tensors

IDS = [5, 9, 2, 33, 60, 1, 1, 7] * 12


def logits(engine: ds4.Engine) -> torch.Tensor:
    (result,) = engine.step([(engine.session(), IDS)], logits="all")
    assert result is not None
    return result


@pytest.mark.parametrize("qat_sim", [True, False])
def test_a_saved_engine_loads_with_the_same_logits(tmp_path: Path, qat_sim: bool) -> None:
    engine = random_engine(qat_sim=qat_sim)
    engine.save_gguf(tmp_path / "small.gguf")
    again = ds4.load(tmp_path / "small.gguf")
    assert again.shape == engine.shape
    assert again.runner.model.qat_sim is qat_sim  # type: ignore[attr-defined]
    assert torch.equal(logits(again), logits(engine))
    other = ds4.load(tmp_path / "small.gguf", qat_sim=not qat_sim)
    assert not torch.equal(logits(other), logits(engine))


def test_weights_that_stay_in_the_file_give_nearly_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = random_engine(qat_sim=False)
    engine.save_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr("ds4.model.weights.RESIDENT_LIMIT", 0)
    monkeypatch.setattr("ds4.model.weights._SLICE_VALUES", 100)
    mapped = ds4.load(tmp_path / "small.gguf")
    # Matrices come in slices, so the order of the sums is another one.
    assert (logits(mapped) - logits(engine)).abs().max() < 1e-4


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    random_engine().save_gguf(tmp_path / "small.gguf")
    seen: list[tuple[int, int]] = []
    ds4.load(tmp_path / "small.gguf", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_missing_and_wrong_tensors_are_named() -> None:
    tensors = random_tensors(SMALL, 1)
    with pytest.raises(ds4.Ds4Error, match=r"blk\.1\.attn_kv\.weight is missing"):
        ds4.from_tensors(SMALL, {k: v for k, v in tensors.items() if k != "blk.1.attn_kv.weight"})
    with pytest.raises(ds4.Ds4Error, match=r"tensor blk\.9\.attn_kv\.weight is unknown"):
        ds4.from_tensors(SMALL, {**tensors, "blk.9.attn_kv.weight": torch.ones(3)})
    table = next(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    for name, kind in (
        (table, torch.float32),
        ("output_norm.weight", torch.int32),
        ("output.weight", torch.complex64),
        ("output.weight", torch.float8_e4m3fn),
    ):
        with pytest.raises(ds4.Ds4Error, match=rf"tensor {name} has dtype {kind}, but"):
            ds4.from_tensors(SMALL, {**tensors, name: tensors[name].to(kind)})
    for expert in (-1, SMALL.experts):
        with pytest.raises(ds4.Ds4Error, match=rf"tensor {table} holds numbers that are no experts"):
            ds4.from_tensors(SMALL, {**tensors, table: torch.full_like(tensors[table], expert)})
    tensors["output_norm.weight"] = torch.ones(3)
    with pytest.raises(ds4.Ds4Error, match=r"output_norm\.weight has shape \(3,\), but \(32,\)"):
        ds4.from_tensors(SMALL, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 64, "rope_dim": 32}, "leaves 32 channels beside rope_dim 32, expected a multiple of 64"),
        ({"index_dim": 48}, "index_dim is 48, expected a power of two of at least 32"),
        ({"index_dim": 16}, "index_dim is 16, expected a power of two of at least 32"),
    ],
)
def test_round_trips_need_whole_blocks(change: dict[str, int], message: str) -> None:
    shape = replace(SMALL, **change)
    with pytest.raises(ds4.Ds4Error, match=message):
        random_engine(shape, qat_sim=True)
    assert random_engine(shape, qat_sim=False).session().tokens == []


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ds4.Ds4Error, match="path of its file"):
        ds4.load(5)  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match=r"config is {'quality': True}; give a ds4\.EngineConfig"):
        ds4.load(config={"quality": True})  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match="use topk, random or all"):
        ds4.load(index_selection="foo")  # type: ignore[arg-type]
    with pytest.raises(ds4.Ds4Error, match="DeepseekV4ForCausalLM, not a Linear"):
        ds4.from_transformers(torch.nn.Linear(2, 2))
    numpy = {name: tensor.numpy() for name, tensor in random_tensors(SMALL, 1).items()}
    with pytest.raises(ds4.Ds4Error, match="is a ndarray; torch tensors are needed"):
        ds4.from_tensors(SMALL, numpy)  # type: ignore[arg-type]


def test_devices_that_do_not_exist_here_are_refused_by_name() -> None:
    with pytest.raises(ds4.Ds4Error, match="'cuda' is not available"):
        ds4.from_tensors(SMALL, random_tensors(SMALL, 1), device="cuda")


def test_a_loaded_engine_cannot_be_saved(tmp_path: Path) -> None:
    random_engine().save_gguf(tmp_path / "small.gguf")
    with pytest.raises(ds4.Ds4Error, match="already has its file"):
        ds4.load(tmp_path / "small.gguf").save_gguf(tmp_path / "other.gguf")


def test_random_tensors_cover_the_shape() -> None:
    assert set(random_tensors(SMALL, 1)) == set(expected_tensors(SMALL))
