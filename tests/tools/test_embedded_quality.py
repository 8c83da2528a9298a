"""A few cases of each kind through the shipped file: too few to measure its skill, enough to see that it is broken."""

from __future__ import annotations

import pytest
from data.cases import Cases
from data.generator import TOKENIZER
from evaluate import Runner
from tokenizers import Tokenizer

import ds4


@pytest.fixture(scope="module")
def engine() -> ds4.Engine:
    return ds4.load()


@pytest.mark.parametrize(
    "task",
    ["call", "none", "parallel", "chain", "result", "result_json", "arithmetic", "chat", "recall_near", "recall_far"],
)
def test_most_cases_are_right(engine: ds4.Engine, task: str) -> None:
    cases = Cases(4711, Tokenizer.from_file(str(TOKENIZER))).make(task, 8)
    outcome = Runner(engine, ds4.Sampling(temperature=0.0), batch=8).run(cases)
    assert outcome.cases == 8
    assert outcome.right >= 6, outcome.failures
