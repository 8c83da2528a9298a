"""The comparison with another engine's logits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ds4.cli import diagnostics
from ds4.engine import Engine

PROMPT = [0, 300, 301, 302]


@pytest.fixture(scope="module")
def check_full() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "check_full.py"
    spec = importlib.util.spec_from_file_location("check_full", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_full"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_equal_logits_differ_in_nothing(check_full: ModuleType) -> None:
    logits = np.random.default_rng(1).normal(size=100).astype(np.float32)
    result = check_full.compare(logits, logits)
    assert (result.max_difference, result.kl_divergence, result.same_top_1, result.shared_top_20) == (0, 0, True, 20)
    assert result.cosine == pytest.approx(1, abs=1e-12)


def test_the_numbers_mean_what_they_say(check_full: ModuleType) -> None:
    result = check_full.compare(np.array([3.0, 0.0]), np.array([0.0, 4.0]))
    p = np.exp([0.0, 4.0]) / np.exp([0.0, 4.0]).sum()
    q = np.exp([3.0, 0.0]) / np.exp([3.0, 0.0]).sum()
    assert (result.cosine, result.max_difference, result.same_top_1) == (0, 4, False)
    assert result.rms_difference == pytest.approx(np.sqrt((9 + 16) / 2))
    assert result.kl_divergence == pytest.approx(float((p * np.log(p / q)).sum()))


def test_other_sizes_and_broken_logits_are_refused(check_full: ModuleType) -> None:
    with pytest.raises(ValueError, match="not the same model"):
        check_full.compare(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="not finite"):
        check_full.compare(np.array([np.nan, 1.0]), np.ones(2))


def test_a_file_passes_against_its_own_logits_and_fails_against_others(
    check_full: ModuleType, engine: Engine, model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = tmp_path / "reference.npz"
    diagnostics.write_logits(engine, PROMPT, str(reference))
    command = ["--file", str(model_file), "--reference", str(reference), "--json"]
    assert check_full.main(command) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["max_difference"], numbers["tokens"]) == (0, len(PROMPT))
    assert 0 < numbers["anonymous_gib"] < 4

    with np.load(reference) as stored:
        np.savez(reference, tokens=stored["tokens"], logits=stored["logits"][::-1])
    assert check_full.main(command) == 1
    assert "FAILED" in capsys.readouterr().err
    assert check_full.main(["--file", str(model_file), "--memory", "0.0001"]) == 1
    assert check_full.main(["--file", "/nowhere"]) == 1
