"""The benchmark's walk, its arithmetic, and its outputs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import ds4
from ds4.cli import bench
from ds4.cli.bench import frontiers_of, measure
from ds4.cli.options import BenchOptions, Options
from ds4.engine import Engine
from tests.cli.scripted import ScriptedRunner, scripted_engine


def test_frontiers_multiply_or_add_and_end_at_the_last() -> None:
    assert frontiers_of(BenchOptions(512, 4096, 2)) == [512, 1024, 2048, 4096]
    assert frontiers_of(BenchOptions(512, 3000, 2)) == [512, 1024, 2048, 3000]
    assert frontiers_of(BenchOptions(100, 350, 1, 100)) == [100, 200, 300, 350]
    assert frontiers_of(BenchOptions(64, 64)) == [64]


class Ticks:
    """A clock that moves by a quarter of a second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def test_speeds_are_tokens_by_median_seconds(engine: Engine) -> None:
    rows = list(measure(engine, BenchOptions(32, 64, decode=8, repeats=3), Ticks()))
    assert [(r.context, r.prefilled, r.decoded) for r in rows] == [(32, 32, 8), (64, 32, 8)]
    assert [(r.prefill_speed, r.decode_speed) for r in rows] == [(128.0, 32.0)] * 2
    assert rows[0].state_bytes > 0


def test_every_repeat_does_the_whole_work(engine: Engine, tokenizer: ds4.Tokenizer) -> None:
    scripted = scripted_engine(engine.shape, tokenizer)
    options = BenchOptions(100, 200, decode=10, repeats=2)
    list(measure(scripted, options))
    assert isinstance(scripted.runner, ScriptedRunner)
    # Warm-up 64 + 2, then for each frontier two runs of 100 + 10, and 100 to walk on.
    assert scripted.runner.evaluated == 66 + 2 * (2 * 110 + 100)


def test_prefill_alone_can_be_measured(engine: Engine) -> None:
    (row,) = measure(engine, BenchOptions(16, 16, decode=0, repeats=1), Ticks())
    assert (row.decoded, row.decode_speed) == (0, 0.0)


def test_a_context_that_is_too_small_is_refused(engine: Engine) -> None:
    with pytest.raises(ds4.Ds4Error, match="needs a context of 4161 tokens, but it has 4096; lower --ctx-max"):
        list(measure(engine, BenchOptions()))


def test_bench_tokens_are_the_same_every_time_and_never_special(engine: Engine) -> None:
    ids = bench.bench_tokens(engine, 5000)
    assert ids == bench.bench_tokens(engine, 5000)
    assert not set(ids) & set(engine.tokenizer.special.values())
    assert len(set(ids)) > 1000


def test_table_and_json(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = Options(bench_options=BenchOptions(16, 32, decode=2, repeats=1, first_token=False, json=str(path)))
    out = io.StringIO()
    assert bench.run_bench(engine, options, out) == 0
    table = out.getvalue().splitlines()
    assert len(table) == 4
    assert table[2].split()[:2] == ["16", "16"]
    result = json.loads(path.read_text())
    assert [row["context"] for row in result["frontiers"]] == [16, 32]
    assert result["first_token_seconds"] is None
    assert (result["model"], result["profile"], result["repeats"]) == ("embedded", "custom", 1)


def test_json_on_stdout_stands_alone(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(bench_options=BenchOptions(16, 16, decode=2, repeats=1, first_token=False, json="-"))
    bench.run_bench(engine, options, sys.stdout)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["frontiers"][0]["context"] == 16
    assert "tokens/s" in captured.err


def test_the_first_token_is_timed_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def timed(command: list[str], clock: object) -> float:
        commands.append(command)
        return {1: 100.0, 2: 5.0, 3: 1.0, 4: 2.0}[len(commands)]

    monkeypatch.setattr(bench, "_time_to_output", timed)
    options = Options(model="a.gguf", threads=2, device="cpu", bench_options=BenchOptions(repeats=3))
    assert bench.first_token(options) == 2.0  # the first run does not count
    assert commands[0][1:5] == ["-m", "ds4.cli.main", "-p", "Hello"]
    assert commands[0][-6:] == ["-m", "a.gguf", "-t", "2", "--device", "cpu"]


def test_a_process_that_fails_is_reported() -> None:
    program = "import sys; print('x', flush=True); sys.exit('no such model')"
    with pytest.raises(ds4.Ds4Error, match="no such model"):
        bench._time_to_output([sys.executable, "-c", program], Ticks())
    assert bench._time_to_output([sys.executable, "-c", "print('x')"], Ticks()) == 0.25
