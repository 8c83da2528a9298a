"""Collected importance against a computation of its own, in pieces of any size; stopped runs that go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds4
from ds4.errors import Ds4Error
from ds4.model import Taps
from ds4.quantize import collect as collecting
from ds4.quantize.calibration import Prompt
from ds4.quantize.collect import Limits, collect
from ds4.quantize.imatrix import load
from tests.cli.conftest import random_tensors
from tests.quality_models import text_engine

PROMPTS = [
    Prompt(f"prompt {n}", "<｜begin▁of▁sentence｜>" + text)
    for n, text in enumerate(("Once upon a time there was a king.", "Hello! " * 60, "2 + 2 = 4", "def f(x): return x"))
]


@pytest.fixture(scope="module")
def engine() -> ds4.Engine:
    return text_engine()


def independent(engine: ds4.Engine, prompts: list[Prompt]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (means, counts), token by token in float64 from the file's tensors and what the router chose."""
    s, tensors = engine.shape, random_tensors(engine.shape)
    sums: dict[str, torch.Tensor] = {}
    counts = torch.zeros(s.layers, s.experts, dtype=torch.int64)
    inputs: dict[int, torch.Tensor] = {}

    def route(layer: int, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        matrices = [tensors[f"blk.{layer}.ffn_{kind}_exps.weight"].double() for kind in ("gate", "up")]
        for row, experts, factors in zip(inputs[layer].double(), chosen.tolist(), weights.double(), strict=True):
            for expert, factor in zip(experts, factors, strict=True):
                gate, up = (matrix[expert] @ row for matrix in matrices)
                gate, up = gate.clamp(max=s.swiglu_clamp), up.clamp(-s.swiglu_clamp, s.swiglu_clamp)
                inner = factor * gate * torch.sigmoid(gate) * up
                for kind, values in (("gate", row), ("up", row), ("down", inner)):
                    name = f"blk.{layer}.ffn_{kind}_exps.weight"
                    sums.setdefault(name, torch.zeros(s.experts, len(values), dtype=torch.float64))
                    sums[name][expert] += values**2
                counts[layer, expert] += 1

    taps = Taps(router=route, expert_input=inputs.__setitem__)
    for prompt in prompts:
        session = engine.session()
        ids = engine.tokenizer.encode_chat(prompt.text)[: engine.context]
        engine.step([(session, ids)], "none", taps=taps)
        session.close()
    result = {}
    for name, total in sums.items():
        own = counts[int(name.split(".")[1])]
        means = total / own.clamp(min=1)[:, None]
        means[own == 0] = 1
        result[name] = means.numpy(), own.numpy()
    return result


def test_against_an_independent_computation(engine: ds4.Engine, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    end = collect(engine, PROMPTS, tmp_path / "a.dat", dataset="text", progress=lambda *at: seen.append(at))
    found = load(tmp_path / "a.dat")
    expected = independent(engine, PROMPTS)
    s = engine.shape
    assert list(found.vectors) == [
        f"blk.{layer}.ffn_{kind}_exps.weight" for layer in range(s.layers) for kind in ("gate", "up", "down")
    ]
    for name, (means, counts) in expected.items():
        assert found.vectors[name].shape == (s.experts, s.expert_hidden if "down" in name else s.hidden)
        assert found.counts[name].tolist() == counts.tolist()
        np.testing.assert_allclose(found.vectors[name], means, rtol=2e-4, atol=1e-12)
    lengths = [len(engine.tokenizer.encode_chat(p.text)) for p in PROMPTS]
    assert max(lengths) > engine.context
    assert (end.done, end.prompts, end.resumed, end.cut) == (True, 4, 0, 1)
    assert end.tokens == sum(min(n, engine.context) for n in lengths)
    assert sum(found.counts["blk.0.ffn_up_exps.weight"]) == end.tokens * s.experts_used
    assert (found.chunks, found.dataset) == (sum(-(-min(n, engine.context) // 16) for n in lengths), "text")
    assert seen == [(n, 4) for n in range(4)]
    assert [file.name for file in tmp_path.iterdir()] == ["a.dat"]


def test_experts_without_a_token_get_ones(engine: ds4.Engine, tmp_path: Path) -> None:
    end = collect(engine, [Prompt("one", "<｜begin▁of▁sentence｜>")], tmp_path / "a.dat")
    found = load(tmp_path / "a.dat")
    unused = {name: counts == 0 for name, counts in found.counts.items()}
    assert end.unseen == sum(int(rows.sum()) for name, rows in unused.items() if "down" in name) > 0
    for name, rows in unused.items():
        assert (found.vectors[name][rows] == 1).all()
        assert not (found.vectors[name][~rows] == 1).all()


def test_limits(engine: ds4.Engine, tmp_path: Path) -> None:
    end = collect(engine, PROMPTS, tmp_path / "a.dat", limits=Limits(prompts=2))
    assert (end.done, end.prompts) == (True, 2)
    end = collect(engine, PROMPTS, tmp_path / "b.dat", limits=Limits(tokens=20))
    assert (end.done, end.tokens) == (True, 20)
    assert sum(load(tmp_path / "b.dat").counts["blk.0.ffn_up_exps.weight"]) == 20 * engine.shape.experts_used
    with pytest.raises(Ds4Error, match="the limits leave none"):
        collect(engine, PROMPTS, tmp_path / "c.dat", limits=Limits(prompts=0))
    assert not (tmp_path / "c.dat").exists()


def counting(limit: int) -> Callable[[], bool]:
    """True from the call behind `limit` on."""
    left = [limit]

    def stopped() -> bool:
        left[0] -= 1
        return left[0] < 0

    return stopped


def test_a_stopped_run_goes_on_to_the_same_bytes(engine: ds4.Engine, tmp_path: Path) -> None:
    collect(engine, PROMPTS, tmp_path / "whole.dat")
    out = tmp_path / "parts.dat"
    ends = [collect(engine, PROMPTS, out, stopped=counting(n)) for n in (0, 1, 2)]
    assert [(end.done, end.prompts, end.resumed) for end in ends] == [(False, 0, 0), (False, 1, 0), (False, 3, 1)]
    assert not out.exists()
    last = collect(engine, PROMPTS, out)
    assert (last.done, last.prompts, last.resumed) == (True, 4, 3)
    assert out.read_bytes() == (tmp_path / "whole.dat").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["parts.dat", "whole.dat"]


def test_progress_is_kept_as_time_passes(engine: ds4.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies loses what came after it was kept last, and nothing else."""
    times = iter([0, 100, 400, 401, 450, 500])  # the fourth is asked for when all is kept
    kept: list[int] = []
    collect(engine, PROMPTS, tmp_path / "a.dat", clock=lambda: next(times), saved=lambda c: kept.append(c.prompts))
    assert kept == [2]
    evaluate, calls = collecting.Collector.evaluate, iter(range(9))

    def dies(self: Any, *args: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("power cut")
        evaluate(self, *args)

    monkeypatch.setattr(collecting.Collector, "evaluate", dies)
    times = iter([0, 100, 400, 401, 450])
    with pytest.raises(RuntimeError, match="power cut"):
        collect(engine, PROMPTS, tmp_path / "b.dat", clock=lambda: next(times))
    end = collect(engine, PROMPTS, tmp_path / "b.dat")
    assert (end.resumed, end.prompts) == (2, 4)
    assert (tmp_path / "b.dat").read_bytes() == (tmp_path / "a.dat").read_bytes()


def test_progress_of_another_run_is_refused(engine: ds4.Engine, tmp_path: Path) -> None:
    out, progress = tmp_path / "a.dat", tmp_path / "a.dat.progress"
    collect(engine, PROMPTS, out, model="one", stopped=counting(1))
    for options, what in (({"model": "two"}, "model"), ({"model": "one", "prompts": PROMPTS[:3]}, "text")):
        with pytest.raises(Ds4Error, match=rf"a\.dat\.progress: the progress of a run with another {what}; delete it"):
            collect(engine, options.pop("prompts", PROMPTS), out, **options)  # type: ignore[arg-type]
    with pytest.raises(Ds4Error, match="another context"):
        collect(text_engine(context=64), PROMPTS, out, model="one")
    good = progress.read_bytes()
    for bad in (b"", b"garbage", good[: len(good) // 2], good.replace(b"1.down", b"9.down")):
        progress.write_bytes(bad)
        with pytest.raises(Ds4Error, match="not the progress of an earlier run"):
            collect(engine, PROMPTS, out, model="one")
        assert progress.read_bytes() == bad
    progress.write_bytes(good)
    assert collect(engine, PROMPTS, out, model="one").resumed == 1


def test_an_output_that_cannot_be_written(engine: ds4.Engine, tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match=r"a\.dat: cannot be written: .*nowhere: no such folder"):
        collect(engine, PROMPTS[:1], tmp_path / "nowhere" / "a.dat")
