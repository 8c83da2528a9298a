"""Weights on disk, plans and the build: what is saved comes back, and a stopped build goes on where it was."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import build
import model as m
import numpy as np
import plans
import pytest
import torch
import train
import weights
from batches import GROUPS, Maker, answers
from quantize import rounded

from ds4.gguf.file import embedded_model_path


@pytest.fixture(scope="module")
def toy() -> Any:
    return m.new_model(m.toy_shape(), 3)


def test_saved_weights_come_back_and_an_older_state_is_replaced_whole(toy: Any, tmp_path: Path) -> None:
    weights.save(toy, tmp_path, {"steps": 1})
    weights.save(toy, tmp_path, {"steps": 2})
    assert weights.read_info(tmp_path) == {"steps": 2}
    assert not list(tmp_path.glob("*.new"))
    assert all(path.stat().st_size < 16 * 2**20 for path in tmp_path.iterdir())
    other = m.new_model(m.toy_shape(), 4)
    weights.load(other, tmp_path)
    for (name, value), (_, again) in zip(toy.state_dict().items(), other.state_dict().items(), strict=True):
        if value.is_floating_point() and value.dim() > 1:
            value = value.bfloat16().float()
        assert torch.equal(value, again) or "rotary" in name


def test_weights_that_are_not_there_or_do_not_fit_are_refused(toy: Any, tmp_path: Path) -> None:
    assert weights.read_info(tmp_path) is None
    with pytest.raises(SystemExit, match="neither a GGUF file"):
        weights.load(toy, tmp_path)
    torch.save({"model.nothing": torch.zeros(2)}, tmp_path / "weights-0.pt")
    with pytest.raises(SystemExit, match="do not fit"):
        weights.load(toy, tmp_path)
    with pytest.raises(SystemExit, match="has shape"):
        weights.load(toy, embedded_model_path())


def test_training_can_begin_with_the_shipped_file() -> None:
    first, second = (m.new_model(m.tiny_shape(), seed) for seed in (1, 2))
    weights.load(first, embedded_model_path())
    weights.load(second, embedded_model_path())
    for (name, value), (_, again) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(value, again), name  # nothing of the initial values is left
    from ds4.engine.loading import load, tensors_from_transformers

    engine = load(embedded_model_path())
    tokens = list(range(100, 228))
    with torch.no_grad():
        ours = m.Forward(first, m.tiny_shape(), "cpu", torch.float32).logits(torch.tensor([tokens]), select=32)[0]
    theirs = engine.step([(engine.session(), tokens)], logits="all")[0]
    assert (ours.softmax(-1) - theirs.softmax(-1)).abs().sum(-1).mean() < 0.05
    down = tensors_from_transformers(first, m.tiny_shape())["blk.3.ffn_down_exps.weight"]
    assert (rounded(down, "Q2_K") - down).norm() < 0.25 * down.norm()


def test_answers_are_numbered_by_turn() -> None:
    weight = np.array([[0, 1, 1, 0, 2, 0], [1, 1, 0, 0, 0, 1]], np.float32)
    assert answers(weight).tolist() == [[-1, 0, 0, -1, 1, -1], [2, 2, -1, -1, -1, 3]]


def test_held_out_rows_hold_answers_of_their_kind() -> None:
    maker = Maker(5, split="eval")
    for name, part in plans.HELD_OUT.items():
        batch = maker.batch(plans.replace(part, length=1536 if name != "far" else part.length, rows=1))
        kind = "recall" if name == "far" else "copy" if name == "copy" else "tools"
        assert (batch["group"] == GROUPS.index(kind)).sum() > 20


def test_a_plan_can_last_another_time() -> None:
    plan = plans.PLANS["main"].lasting(8.35)
    assert (plan.total, round(plan.ends, 3), round(plan.select_at, 2)) == (8.35, 5.0, 3.8)
    assert [round(stage.until, 2) if stage.until < 1e9 else 0 for stage in plan.stages] == [1.9, 0]
    assert plans.PLANS["finish"].lasting(100).select_at == 0


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    values = {
        "plan": "smoke", "total": 0.0, "seconds": 0.0, "steps": 1, "init": "", "out": str(out), "score_every": 500,
        "lr": 0.02, "qat": True, "verify": False, "profile": False, "workers": 1, "seed": 1, "device": "cpu",
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def test_training_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    first = train.Run(arguments(tmp_path / "a", total=1e6))
    before = first.model.lm_head.weight.detach().clone()
    first.train()
    info = weights.read_info(tmp_path / "a")
    assert info is not None
    assert (info["plan"], info["steps"], info["ends"]) == ("smoke", 1, 1e6)
    assert not torch.equal(first.model.lm_head.weight, before)
    assert set(info["held_out"]) == {"copy"}
    second = train.Run(arguments(tmp_path / "a", total=1e6))
    assert second.start == info["elapsed"] > 0
    assert torch.equal(second.model.lm_head.weight, first.model.lm_head.weight.bfloat16().float())
    other = train.Run(arguments(tmp_path / "b", init=str(tmp_path / "a")))
    assert other.start == 0
    assert torch.equal(other.model.lm_head.weight, second.model.lm_head.weight)
    done = train.Run(arguments(tmp_path / "a", total=info["elapsed"] / 2))
    done.train()
    assert "nothing left to do" in capsys.readouterr().out
    torch.set_num_threads(threads)


class Commands:
    """Stands in for subprocess.run: every command leaves behind what its stage is judged by."""

    def __init__(self, fail: str = "", short: str = "") -> None:
        self.fail, self.short, self.seen = fail, short, []

    def __call__(self, command: list[str], env: dict[str, str], check: bool) -> Any:
        tool, options = Path(command[1]).name, dict(zip(command[2::2], command[3::2], strict=False))
        name = options.get("--plan") or options.get("--sampling") or ("table" if "--table" in command else tool)
        self.seen.append((name, options))
        assert env["PYTHONPATH"].split(os.pathsep)[0].endswith("src")
        code = 1 if name == self.fail else 0
        if tool == "train.py":
            folder = Path(options["--out"])
            folder.mkdir(parents=True, exist_ok=True)
            elapsed = 10 if name == self.short else 500
            (folder / "info.json").write_text(json.dumps({"elapsed": elapsed, "ends": 500}))
        for key in ("--out", "--done", "--json"):
            if key in options and tool != "train.py" and not code:
                Path(options[key]).touch()
        if "--table" in command and not code:
            Path(command[command.index("--out") + 1]).touch()
        return argparse.Namespace(returncode=code)


STAGES = ["main", "finish", "polish", "export.py", "check.py", "greedy", "default", "table"]


def built(monkeypatch: pytest.MonkeyPatch, commands: Commands, *options: object) -> int:
    monkeypatch.setattr(build.subprocess, "run", commands)
    return build.main([str(o) for o in options])


def test_the_build_runs_every_stage_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = Commands(), Commands()
    assert built(monkeypatch, first, "--work", tmp_path) == 0
    assert [name for name, _ in first.seen] == STAGES
    runs = [options for name, options in first.seen[:3]]
    assert "--init" not in runs[0]
    assert [r["--init"] for r in runs[1:]] == [str(tmp_path / "main"), str(tmp_path / "finish")]
    assert built(monkeypatch, second, "--work", tmp_path) == 0
    assert second.seen == []


def test_a_build_from_weights_leaves_the_first_run_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands()
    assert built(monkeypatch, commands, "--work", tmp_path, "--init", embedded_model_path(), "--until", "polish") == 0
    assert [name for name, _ in commands.seen] == ["finish", "polish"]
    assert commands.seen[0][1]["--init"] == str(embedded_model_path())
    last = Commands()
    options = ("--work", tmp_path / "b", "--init", tmp_path / "finish", "--runs", "polish", "--until", "polish")
    assert built(monkeypatch, last, *options) == 0
    assert [(name, o["--init"]) for name, o in last.seen] == [("polish", str(tmp_path / "finish"))]


def test_a_stopped_build_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert built(monkeypatch, Commands(), "--work", tmp_path, "--within", 5) == 2
    short, rest = Commands(short="finish"), Commands()
    assert built(monkeypatch, short, "--work", tmp_path, "--within", 580) == 2
    assert [name for name, _ in short.seen] == ["main", "finish"]
    assert 500 < float(short.seen[0][1]["--seconds"]) < 560
    assert built(monkeypatch, rest, "--work", tmp_path) == 0
    assert [name for name, _ in rest.seen] == STAGES[1:]
    assert "--seconds" not in rest.seen[0][1]


def test_a_failed_stage_ends_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands(fail="check.py")
    assert built(monkeypatch, commands, "--work", tmp_path) == 1
    assert [name for name, _ in commands.seen] == STAGES[:5]


def test_a_new_model_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert built(monkeypatch, Commands(), "--work", tmp_path) == 0
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    (tmp_path / "polish" / "info.json").touch()
    commands = Commands()
    assert built(monkeypatch, commands, "--work", tmp_path, "--within", 1) == 2
    assert built(monkeypatch, commands, "--work", tmp_path, "--until", "export") == 0
    assert built(monkeypatch, commands, "--work", tmp_path, "--until", "export") == 0
    assert [name for name, _ in commands.seen] == ["export.py"]
    assert built(monkeypatch, commands, "--work", tmp_path) == 0
    assert [name for name, _ in commands.seen] == STAGES[3:]


def test_a_toy_is_never_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        built(monkeypatch, Commands(), "--work", tmp_path, "--smoke", "--install")
    with pytest.raises(SystemExit):
        built(monkeypatch, Commands(), "--work", tmp_path, "--until", "dance")
