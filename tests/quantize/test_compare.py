"""The numbers of --compare-tensor, on a file with one value changed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import Ds4Error
from ds4.gguf.file import open_model
from ds4.quantize.checkpoint import open_checkpoint
from ds4.quantize.compare import compare
from ds4.quantize.convert import Settings, convert
from ds4.quantize.importance import fit
from ds4.quantize.plan import FilePlan, make_plans
from ds4.quantize.recipe import Recipe, parse_overrides
from tests.quantize.conftest import TOY, Make

NAME = "blk.1.ffn_up_exps.weight"
EXPERT, ROW, COL, BY = 2, 37, 5, 0.25


@pytest.fixture(scope="module")
def changed(toy: Make, tmp_path_factory: pytest.TempPathFactory) -> list[FilePlan]:
    """A file whose experts are F32, so exact, but for one weight that is larger by `BY`."""
    out = tmp_path_factory.mktemp("compare") / "toy.gguf"
    plans = make_plans(open_checkpoint(toy()), out, Recipe("q4", 0, parse_overrides(["experts=F32"])))
    convert(plans, Settings(), lambda *_: None, lambda _: None)
    place = open_model(out).tensors[NAME].offset + 4 * ((EXPERT * TOY.expert_hidden + ROW) * TOY.hidden + COL)
    with out.open("r+b") as file:
        file.seek(place)
        value = np.frombuffer(file.read(4), "<f4")[0]
        file.seek(place)
        file.write(np.float32(value + np.float32(BY)).tobytes())
    return plans


def weights(plans: list[FilePlan]) -> np.ndarray:
    """float64 [experts, rows, cols], the checkpoint's values."""
    source = next(output for output in plans[0].outputs if output.name == NAME).source
    cpu = Settings().device
    return np.stack([source.read(e, 0, source.rows, cpu).double().numpy() for e in range(TOY.experts)])


@pytest.mark.parametrize("unit", [1 << 23, 1 << 15])
def test_errors_and_their_place(changed: list[FilePlan], monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    monkeypatch.setattr("ds4.quantize.plan.UNIT_VALUES", unit)
    (found,) = compare(changed, NAME, Settings())
    values = weights(changed)
    assert found.largest == pytest.approx(BY, rel=1e-6)
    assert found.place == (EXPERT, ROW, COL)
    assert found.n_values == values.size
    assert found.rms == pytest.approx(BY / math.sqrt(values.size), rel=1e-6)
    assert found.relative == pytest.approx(BY / math.sqrt((values**2).sum()), rel=1e-6)
    square = values[EXPERT, ROW, COL] ** 2
    assert found.weighted == pytest.approx(BY * math.sqrt(square / (values**4).sum()), rel=1e-5)
    assert not found.by_importance


def test_importance_weighs_columns_of_each_expert(changed: list[FilePlan]) -> None:
    vectors = np.random.default_rng(1).uniform(0.1, 2, (TOY.experts, TOY.hidden)).astype(np.float32)
    importance = fit(changed, {NAME: vectors}, Path("x.dat"))
    (found,) = compare(changed, NAME, Settings(importance=importance))
    energy = (vectors[:, None, :].astype(np.float64) * weights(changed) ** 2).sum()
    assert found.weighted == pytest.approx(BY * math.sqrt(vectors[EXPERT, COL] / energy), rel=1e-5)
    assert found.by_importance
    vectors[0] = 0  # of this expert nothing was measured
    (without,) = compare(changed, NAME, Settings(importance=fit(changed, {NAME: vectors}, Path("x.dat"))))
    energy = (vectors[:, None, :].astype(np.float64) * weights(changed) ** 2).sum()
    assert without.weighted == pytest.approx(BY * math.sqrt(vectors[EXPERT, COL] / energy), rel=1e-5)
    assert without.by_importance


def test_patterns_and_unknown_names(changed: list[FilePlan]) -> None:
    names = [result.name for result in compare(changed, "blk.*.ffn_*_exps.weight", Settings())]
    assert len(names) == 3 * TOY.layers
    assert [r.largest for r in compare(changed, "blk.0.ffn_*_exps.weight", Settings())] == [0, 0, 0]
    with pytest.raises(Ds4Error, match=r"no such tensor; they are named like 'token_embd.weight' or 'output.weight'"):
        list(compare(changed, "layers.0", Settings()))


@pytest.mark.parametrize(
    ("vectors", "shape"),
    [
        (np.ones((3, 256), np.float32), (3, 256)),
        (np.ones(768, np.float32), (3, 256)),
        (np.ones((1, 768), np.float32), (3, 256)),
        (np.ones(256, np.float32), (3, 256)),
        (np.ones((1, 256), np.float32), (3, 256)),
    ],
)
def test_vectors_in_every_form(changed: list[FilePlan], vectors: np.ndarray, shape: tuple[int, ...]) -> None:
    vectors = vectors * np.arange(1, vectors.size + 1, dtype=np.float32).reshape(vectors.shape)
    found = fit(changed, {NAME: vectors}, Path("x.dat"))[NAME]
    assert found.shape == shape
    if vectors.size == 768:
        assert found.flatten().tolist() == vectors.flatten().tolist()
    else:
        assert [row.tolist() for row in found] == [vectors.flatten().tolist()] * 3


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({NAME: np.ones((3, 255), np.float32)}, r"are \[3, 255\], expected \[3, 256\]; they were collected"),
        ({NAME: np.ones((256, 3), np.float32)}, r"are \[256, 3\], expected \[3, 256\]"),
        ({NAME: np.full((3, 256), -1, np.float32)}, "negative or infinite"),
        ({NAME: np.full((3, 256), np.nan, np.float32)}, "negative or infinite"),
        ({"blk.77.x": np.ones(1, np.float32)}, "holds no vectors for a tensor of this model"),
        ({}, "holds no vectors"),
    ],
)  # fmt: skip
def test_vectors_that_do_not_fit(changed: list[FilePlan], vectors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(Ds4Error, match=message) as error:
        fit(changed, vectors, Path("x.dat"))
    assert str(error.value).startswith("x.dat: ")
