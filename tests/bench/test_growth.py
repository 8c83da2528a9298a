"""The check of memory: what it does, and that it finds what grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds4
from ds4.bench.growth import measure_growth
from ds4.bench.meter import Meter
from ds4.bench.prompts import random_ids
from tests.bench.conftest import meter
from tests.cli.scripted import ScriptedRunner, scripted_engine


def test_tokens_and_requests_are_counted(engine: ds4.Engine, tokenizer: ds4.Tokenizer) -> None:
    scripted = scripted_engine(engine.shape, tokenizer)
    assert isinstance(scripted.runner, ScriptedRunner)
    evaluated: list[int] = []

    class Watched(Meter):
        def held(self) -> dict[str, int]:
            evaluated.append(scripted.runner.evaluated)  # type: ignore[attr-defined]
            return {"host": 1000 + 3 * evaluated[-1]}

    watched = Watched(meter().device)
    tokens, requests = measure_growth(scripted, random_ids(engine, 200, 1), 100, 10, 64, watched)
    # Sessions of 62 tokens, 16 of them prompt: 46, 46 and 8 are decoded.
    assert evaluated[1] - evaluated[0] == 100 + 3 * 16
    assert (tokens.what, tokens.count, tokens.per_item) == ("tokens", 100, {"host": 3 * 148 / 100})
    # Prompts of 32, 32, 32, 32 and 7 tokens, twice, and 8 tokens of answer.
    assert evaluated[3] - evaluated[2] == 2 * (4 * 32 + 7) + 10 * 8
    assert (requests.what, requests.count) == ("requests", 10)


def test_a_part_can_be_left_out(engine: ds4.Engine, model_file: Path) -> None:
    seen: list[Any] = []
    found = list(measure_growth(engine, random_ids(engine, 50, 1), 0, 2, 40, meter(), lambda *at: seen.append(at)))
    assert [growth.what for growth in found] == ["requests"]
    assert seen[-1] == (2, 2)
    assert set(found[0].before) == {"host"}
