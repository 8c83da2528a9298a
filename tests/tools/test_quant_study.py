"""The study of quantised experts on a toy model: its files, what it measures, and that it goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ds4.quantize.codes")
pytest.importorskip("numba")

import quant_study as study
from gguf import GGMLQuantizationType as Type

from ds4.gguf.file import open_model
from ds4.quantize import imatrix
from ds4.quantize.calibration import read_prompts


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved weights of a toy as its training begins."""
    import model as m
    from weights import save

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("weights")
    save(m.new_model(m.toy_shape()), folder, {"shape": "custom"})
    return folder


@pytest.fixture(scope="module")
def done(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of NLL alone, of one seed."""
    out = tmp_path_factory.mktemp("study")
    assert study.main(argv(weights, out)) == 0
    return out


def argv(weights: Path, out: Path, *more: str) -> list[str]:
    few = ["--seeds", "1", "--cases", "0", "--nll-tokens", "200", "--calibration-tokens", "200"]
    return ["--weights", str(weights), "--out", str(out), *few, *more]


def test_files_of_every_variant(done: Path) -> None:
    found = {}
    for variant in study.VARIANTS:
        file = open_model(study.model_path(done, variant, 1))
        types = {name: info.type for name, info in file.tensors.items()}
        found[variant] = types["blk.1.ffn_gate_exps.weight"], types["blk.1.ffn_down_exps.weight"]
        dense = {types["blk.0.attn_q_b.weight"], types["blk.0.ffn_up_shexp.weight"]}
        assert dense == ({Type.BF16} if variant == "bf16" else {Type.Q8_0})
    two = (Type.IQ2_XXS, Type.Q2_K)
    assert found == {
        "bf16": (Type.BF16, Type.BF16),
        "q8": (Type.Q8_0, Type.Q8_0),
        "q4": (Type.Q4_K, Type.Q4_K),
        "q2": two,
        "q2-energy": two,
        "q2-imatrix": two,
        "q2-mixed": two,
        "q2-training": two,
    }
    matrix = imatrix.load(done / "q2-imatrix-1.dat")
    assert len(matrix.vectors) == 9
    blocks = {
        v: bytes(open_model(study.model_path(done, v, 1)).raw("blk.1.ffn_down_exps.weight")) for v in study.VARIANTS
    }
    assert len(set(blocks.values())) == len(blocks)


def test_what_is_measured(done: Path) -> None:
    cells = json.loads((done / "results.json").read_text("utf-8"))["cells"]
    assert sorted(cells) == sorted(f"{variant}/1/{what}" for variant in study.VARIANTS for what in study.SCORED)
    texts = study.scored_texts(1, "nll", 200)
    for variant, name in ((v, f"{v}/1/nll") for v in study.VARIANTS):
        assert cells[name]["tokens"] == [len(places) for _, places in texts]
        per_token = sum(cells[name]["sums"]) / sum(cells[name]["tokens"])
        assert abs(per_token - math.log(4096)) < 3  # an untrained model knows nothing
        kl = sum(cells[name]["kl"])
        assert kl == 0 if variant == "bf16" else kl > 0
    for what in study.SCORED:
        far = {v: sum(cells[f"{v}/1/{what}"]["kl"]) for v in study.VARIANTS}
        assert far["q8"] < far["q4"] < far["q2"]
    assert [len(ids) for ids, _ in study.scored_texts(1, "text", 200)] == [200]


def test_calibration_is_of_the_training_split(done: Path) -> None:
    prompts = read_prompts(done / "q2-imatrix-1.jsonl")
    assert prompts
    held_out = {str(ids) for ids, _ in study.scored_texts(1, "nll", 200)}
    assert not held_out & {str(prompt.text) for prompt in prompts}
    mixed = (done / "q2-mixed-1.jsonl").read_text("utf-8").splitlines()
    assert {key for line in mixed for key in json.loads(line)} >= {"messages", "text"}


def test_nothing_is_done_twice(
    weights: Path, done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "measure", None)
    monkeypatch.setattr(study, "write_model", None)
    assert study.main(argv(weights, done)) == 0
    printed = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in printed.splitlines()[2 : 2 + len(study.VARIANTS)]] == [
        f"| {v}" for v in study.VARIANTS
    ]


def test_more_cases_are_added_part_by_part(
    weights: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variants together, so that one that is stopped compares the same cases; the table counts no others."""
    settings = study.Settings((1,), 40, ("call",), 200, 200)
    results = study.Results(tmp_path / "results.json", settings)
    results.cells = json.loads((done / "results.json").read_text("utf-8"))["cells"]
    todo = results.todo()
    assert todo == [(v, 1, f"call@{first}") for first in (0, 20) for v in study.VARIANTS]
    for number, (variant, seed, what) in enumerate(todo[: len(study.VARIANTS) + 2]):
        results.add(variant, seed, what, {"right": 10 + number, "cases": 20, "seconds": 0})
    again = study.Results(tmp_path / "results.json", settings)
    assert again.todo() == todo[len(study.VARIANTS) + 2 :]
    assert again.of("bf16", "call") == [{"right": 10, "cases": 20, "seconds": 0}]
    assert "| q8 | " in study.table(again)
    assert "11 / 20 = 55.0 %" in study.table(again)
    with pytest.raises(SystemExit, match="other texts"):
        study.Results(tmp_path / "results.json", study.Settings(nll_tokens=7))


def test_calls_are_those_of_the_part(monkeypatch: pytest.MonkeyPatch, done: Path) -> None:
    asked: list[Any] = []

    class Fake:
        def __init__(self, engine: Any, sampling: Any) -> None:
            assert sampling.temperature == 0

        def run(self, cases: list[Any]) -> Any:
            asked.append([case.prompt(case.turns[0]) for case in cases])
            return type("Outcome", (), {"right": 3, "cases": len(cases)})

    monkeypatch.setattr(study, "Runner", Fake)
    settings = study.Settings((1,), 40, ("call",), 200, 200)
    cells = [study.measure(done, "q8", 1, f"call@{first}", settings) for first in (0, 20)]
    assert [(cell["right"], cell["cases"]) for cell in cells] == [(3, 20), (3, 20)]
    assert not set(asked[0]) & set(asked[1])


def test_the_interval_of_a_ratio() -> None:
    assert study.ratio([1.0, 2.0, 3.0], [2, 4, 6]) == (0.5, pytest.approx(0, abs=1e-12))
    value, half = study.ratio([1.0, 3.0], [1, 1])
    assert (value, half) == (2.0, pytest.approx(1.96 * math.sqrt(2 * 2) / 2))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--seeds", "x"], "whole numbers"),
        (["--tasks", "dance"], "dance unknown"),
        (["--weights", "/none"], "weights-0.pt"),
    ],
)
def test_mistakes(
    weights: Path, tmp_path: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.main([*argv(weights, tmp_path), *more])
    assert says in capsys.readouterr().err
