"""The table of mask costs is made without an error; how long masks take is not a question for a test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


COLUMNS = (
    "mask ms: median | p99 | largest",
    "on the wall: median | p99 | largest",
)


@pytest.fixture
def mask_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("mask_cost", TOOLS / "mask_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mask_cost", module)
    spec.loader.exec_module(module)
    return module


def test_the_table(mask_cost: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_cost, "source", lambda: "def f(): # ü\n    return '</｜DSML｜'\n")
    monkeypatch.setattr(mask_cost, "BOUND_MS", 1e9)
    assert mask_cost.main(["--tokenizer", str(TOOLS / "tiny" / "tokenizer.json")]) == 0
    table = capsys.readouterr().out
    assert table.startswith("4096 tokens")
    titles = [title for title, _, _ in mask_cost.scenarios()]
    assert all(table.count(f"| {title} |") == 3 for title in titles)
    assert all(column in table for column in COLUMNS)
    assert table.count("met:    ") == 2


def steps(module: ModuleType, masks: list[float], wall: float = 0.0) -> Any:
    return [module.Step(mask, max(mask, wall), 0.0, True) for mask in masks]


@pytest.mark.parametrize(
    ("masks", "met", "told"),
    [
        ([0.1] * 1000, True, ["met:    the median", "met:    the 99th", "by this thread: no mask takes longer"]),
        (
            [0.1] * 999 + [7.0],
            True,
            ["met:    the 99th", "by this thread: 1 of 2000 masks take longer, up to 7.000 ms"],
        ),
        ([0.1] * 900 + [7.0] * 100, False, ["met:    the median", "MISSED: the 99th percentile", "7.000: other)"]),
        ([7.0] * 900 + [0.1] * 100, False, ["MISSED: the median", "MISSED: the 99th percentile"]),
    ],
)
def test_the_bound_is_judged_for_every_answer(
    mask_cost: ModuleType, masks: list[float], met: bool, told: list[str]
) -> None:
    """A short one that costs much does not vanish among cheap ones; a single mask that takes long is told."""
    found, text = mask_cost.verdict({"one": steps(mask_cost, [0.1] * 1000), "other": steps(mask_cost, masks)})
    assert found is met
    assert all(part in text for part in told), text


def test_time_on_the_wall_is_told_but_not_judged(mask_cost: ModuleType) -> None:
    found, text = mask_cost.verdict({"one": steps(mask_cost, [0.1] * 10, wall=3.0)})
    assert found
    assert "on the wall: 10 of 10 masks take longer, up to 3.000 ms" in text


def test_a_bound_that_is_missed_is_an_error(
    mask_cost: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_cost, "source", lambda: "x")
    monkeypatch.setattr(mask_cost, "BOUND_MS", -1.0)
    assert mask_cost.main(["--tokenizer", str(TOOLS / "tiny" / "tokenizer.json")]) == 1
    assert capsys.readouterr().out.count("MISSED: ") == 2


def test_no_tokenizer(mask_cost: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert mask_cost.main(["--tokenizer", str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err
