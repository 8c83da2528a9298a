"""Scores against whole prefills and greedy decoding; results on disk; two models compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import ds4
from ds4.errors import Ds4Error
from ds4.evals.cases import Case, Reference
from ds4.evals.score import Agreement, Results, Score, compare, score, score_all
from tests.quality_models import text_engine


@pytest.fixture(scope="module")
def engine() -> ds4.Engine:
    return text_engine()


@pytest.fixture(scope="module")
def prompt(engine: ds4.Engine) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode_chat("<｜begin▁of▁sentence｜>The king had three sons, and each of them was"))


@pytest.fixture(scope="module")
def greedy(engine: ds4.Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the model says, token by token."""
    session = engine.session()
    session.sync(list(prompt))
    tokens = [int(session.logits.argmax())]
    while len(tokens) < 12:
        tokens.append(int(session.step(tokens[-1]).argmax()))
    return tuple(tokens)


def rows(engine: ds4.Engine, case: Case) -> torch.Tensor:
    """Log probabilities at the continuation's tokens, from one step."""
    session = engine.session()
    (logits,) = engine.step([(session, [*case.prompt, *case.tokens])], "all")
    assert logits is not None
    return torch.log_softmax(logits[len(case.prompt) - 1 : -1].double(), dim=-1)


def other(token: int) -> int:
    return (token + 1) % 4000


def test_nll_of_each_token(engine: ds4.Engine, prompt: tuple[int, ...], greedy: tuple[int, ...]) -> None:
    case = Case("a", prompt, (*greedy[:3], other(greedy[3]), 17, 42))
    found, values = score(engine, case), rows(engine, case)
    expected = [-float(values[i, token]) for i, token in enumerate(case.tokens)]
    assert found.token_nll == pytest.approx(expected, rel=1e-12)
    assert found.nll == pytest.approx(sum(expected), rel=1e-12)
    assert (found.id, found.tokens, found.agreement) == ("a", 6, None)


@pytest.mark.parametrize("same", [0, 1, 5, 12])
def test_greedy_prefix(engine: ds4.Engine, prompt: tuple[int, ...], greedy: tuple[int, ...], same: int) -> None:
    """As far as greedy decoding says the same; what it would say behind another token does not count."""
    tokens = list(greedy)
    if same < len(tokens):
        tokens[same] = other(tokens[same])
    found = score(engine, Case("a", prompt, tuple(tokens)))
    assert (found.first_match, found.greedy_prefix) == (same > 0, same)


def test_agreement_with_the_reference(engine: ds4.Engine, prompt: tuple[int, ...], greedy: tuple[int, ...]) -> None:
    plain = Case("a", prompt, greedy[:3])
    values = rows(engine, plain)
    best = values.topk(2).indices.tolist()
    worst = int(values[1].argmin())
    references = (
        Reference(float(values[0, greedy[0]]) - 0.25, ((best[0][1], -0.2), (best[0][0], -0.1))),
        Reference(None, ((worst, -0.1), (best[1][0], -0.3))),
        Reference(float(values[2, greedy[2]]) + 0.5, ()),
    )
    found = score(engine, Case("a", prompt, greedy[:3], references)).agreement
    assert found is not None
    assert (found.tokens, found.top, found.first, found.first_same, found.found) == (2, 4, 2, 1, 3)
    assert found.difference == pytest.approx(0.75)
    expected = [abs(float(values[row, id]) - logprob) for row in (0, 1) for id, logprob in references[row].top]
    assert found.top_difference == pytest.approx(sum(expected))


def test_a_case_that_does_not_fit(engine: ds4.Engine, prompt: tuple[int, ...]) -> None:
    fits = engine.context - len(prompt)
    assert score(engine, Case("a", prompt, (5,) * fits)).tokens == fits
    with pytest.raises(Ds4Error, match=r"case b: .* have 97 tokens, but the context has 96"):
        score(engine, Case("b", prompt, (5,) * (fits + 1)))


def test_results_on_disk(engine: ds4.Engine, prompt: tuple[int, ...], greedy: tuple[int, ...], tmp_path: Path) -> None:
    cases = [
        Case("a", prompt, greedy[:4]),
        Case("b", prompt, (other(greedy[0]), 7), (Reference(-1.0, ((3, -1.0),)), Reference(-2.0, ()))),
    ]
    results, seen = Results("m.gguf", "c.jsonl"), list[tuple[int, int]]()
    assert score_all(engine, cases, results, progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]
    results.save(tmp_path / "r.json")
    again = Results.load(tmp_path / "r.json")
    assert again == results
    summary = json.loads((tmp_path / "r.json").read_text("utf-8"))["summary"]
    total = results.scores[0].nll + results.scores[1].nll
    assert summary == again.summary()
    assert (summary["cases"], summary["tokens"], summary["first_matches"], summary["whole_greedy"]) == (2, 6, 1, 1)
    assert summary["nll_per_token"] == pytest.approx(total / 6)
    assert summary["mean_greedy_prefix"] == 2
    assert set(summary) >= {"reference_logprob_difference", "reference_top_found", "reference_first_same"}
    stops = iter([False, True])
    half = Results("m", "c")
    assert not score_all(engine, cases, half, stopped=lambda: next(stops))
    assert half.scores == results.scores[:1]


HEAD = '{"format": "ds4-score", "version": 1, "model": "", "source": "", '


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", HEAD.replace("1", "2") + '"cases": []}', HEAD.replace("ds4-", "") + '"cases": []}',
     HEAD + '"cases": [{"id": "a"}]}',
     HEAD + '"cases": [{"id": "a", "tokens": 0, "nll": 0, "token_nll": [], "first_match": true, "greedy_prefix": 0, '
     '"agreement": null}]}',
     HEAD + '"cases": [{"id": "a", "tokens": 2, "nll": 1, "token_nll": [1], "first_match": true, "greedy_prefix": 0, '
     '"agreement": null}]}'],
)  # fmt: skip
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Ds4Error, match=r"r\.json: not a result file of ds4-score"):
        Results.load(path)
    good = Results("m", "c", [Score("a", 1, 1.0, [math.nan], True, 1)])
    good.save(path)
    with pytest.raises(Ds4Error, match="not a result file"):
        Results.load(path)


GOOD = {
    "id": "a", "tokens": 2, "nll": 1.5, "token_nll": [1, 0.5], "first_match": True, "greedy_prefix": 0,
    "agreement": vars(Agreement()),
}  # fmt: skip
RIGHT = [("id", "no"), ("first_match", True), ("nll", 5), ("greedy_prefix", 5), ("agreement", None), ("difference", 5)]


@pytest.mark.parametrize("name", [*GOOD, "difference"])
@pytest.mark.parametrize("value", ["no", None, True, 5, [], ["x"], [True, 1], {}, math.inf])
def test_values_of_another_kind_are_named(tmp_path: Path, name: str, value: object) -> None:
    """True is a number for Python, and infinities are for its JSON."""
    case = GOOD | {name: value}
    if name == "difference":
        case = GOOD | {"agreement": vars(Agreement()) | {name: value}}
    path = tmp_path / "r.json"
    path.write_text(HEAD + '"cases": [' + json.dumps(case) + "]}", encoding="utf-8")
    if (name, value) in RIGHT:
        assert len(Results.load(path).scores) == 1
    else:
        with pytest.raises(Ds4Error, match=r"r\.json: not a result file of ds4-score \(.+\); make it again"):
            Results.load(path)


def made(*nll: float, tokens: int = 2, first: int = 0) -> Results:
    """Results of cases "0", "1", ..."""
    scores = [
        Score(str(n), tokens, value, [value / tokens] * tokens, n < first, min(first, tokens))
        for n, value in enumerate(nll)
    ]
    return Results("m", "c", scores)


def test_wins_losses_and_ties() -> None:
    a, b = made(1.0, 2.0, 3.0, 4.0, first=1), made(0.5, 2.0 + 1e-12, 3.5, 1.0, 9.0, first=3)
    found = compare(a, b)
    assert (found.cases, found.tokens) == (4, 8)
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert found.nll == (10 / 8, pytest.approx(7 / 8))
    assert found.difference == pytest.approx(-3 / 8)
    assert found.interval[0] < found.difference < found.interval[1]
    assert (found.only_a, found.only_b) == (0, 1)
    assert (found.first_matches, found.greedy_prefix) == ((1, 3), (1, 2))
    assert [id for id, _ in found.best] == ["3", "0"]
    assert found.worst == (("2", 0.25),)
    back = compare(b, a)
    assert (back.wins, back.losses, back.ties) == (1, 2, 1)
    assert back.difference == -found.difference
    same = compare(a, a)
    assert (same.wins, same.losses, same.ties, same.difference, same.best, same.worst) == (0, 0, 4, 0.0, (), ())


def test_the_interval_is_that_of_the_mean_of_equal_cases() -> None:
    deltas = [-0.5, 0.1, 0.3, -0.7, 0.2]
    found = compare(made(*[2.0] * 5), made(*[2.0 + d for d in deltas]))
    mean = sum(deltas) / 5
    spread = math.sqrt(sum((d - mean) ** 2 for d in deltas) / 4 / 5) / 2  # per token, of two
    assert found.interval == pytest.approx((mean / 2 - 1.96 * spread, mean / 2 + 1.96 * spread))
    assert compare(made(1.0), made(2.0)).interval == (-math.inf, math.inf)


def test_results_that_cannot_be_compared() -> None:
    with pytest.raises(Ds4Error, match="no case in common"):
        compare(made(1.0), Results("m", "c"))
    with pytest.raises(Ds4Error, match="case 0 has 2 tokens in one result and 3 in the other"):
        compare(made(1.0), made(1.0, tokens=3))


def test_agreements_add_up() -> None:
    one = Agreement(1, 2.0, 3, 4.0, 5, 6, 7)
    one.add(one)
    assert one == Agreement(2, 4.0, 6, 8.0, 10, 12, 14)


def test_a_case_that_does_not_fit_is_told_first(engine: ds4.Engine, prompt: tuple[int, ...]) -> None:
    """Not after hours of scoring the cases before it."""
    results = Results("m", "c")
    long = Case("long", prompt, (1,) * engine.context)
    with pytest.raises(Ds4Error, match=r"case long: .* raise --ctx"):
        score_all(engine, [Case("a", prompt, (1,)), long], results)
    assert results.scores == []
