"""The table of mask costs is made without an error; how long masks take is not a question for a test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


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
    assert mask_cost.main(["--tokenizer", str(TOOLS / "tiny" / "tokenizer.json")]) == 0
    table = capsys.readouterr().out
    assert table.startswith("4096 tokens")
    titles = [title for title, _, _ in mask_cost.scenarios()]
    assert all(table.count(f"| {title} |") == 3 for title in titles)


def test_no_tokenizer(mask_cost: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert mask_cost.main(["--tokenizer", str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err
