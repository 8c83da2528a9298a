"""Scoring given continuations token by token, and comparing the scores of two models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.evals.cases import Case, Reference
from ds4.evals.nll import log_softmax_rows, logits_before
from ds4.files import read_text, replacing

FORMAT = "ds4-score"
VERSION = 1
TIE = 1e-9
"""Nats a case by which two scores may differ and still be equal."""


@dataclass
class Agreement:
    """How a model's probabilities compare with the reference's, summed over tokens.

    Attributes:
        tokens, difference: tokens with a logprob, and the sum of absolute differences of logprobs.
        top, top_difference: the same over the reference's alternatives.
        first, first_same: places with alternatives, and those where both have the same most probable token.
        found: the reference's alternatives that are among as many of the model's.
    """

    tokens: int = 0
    difference: float = 0.0
    top: int = 0
    top_difference: float = 0.0
    first: int = 0
    first_same: int = 0
    found: int = 0

    def add(self, other: Agreement) -> None:
        """Take over the sums of another case."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Score:
    """Of one case.

    Attributes:
        nll: nats, summed over the tokens.
        token_nll: nats of each token.
        first_match: the model's most probable first token is the continuation's.
        greedy_prefix: tokens until greedy decoding leaves the continuation.
        agreement: with the reference's probabilities; None if they are not known.
    """

    id: str
    tokens: int
    nll: float
    token_nll: list[float]
    first_match: bool
    greedy_prefix: int
    agreement: Agreement | None = None


def score(engine: Engine, case: Case) -> Score:
    """Score one case, in one evaluation of prompt and continuation.

    Greedy decoding is not run: as long as each most probable token is that of the continuation it would be the same.

    Raises:
        Ds4Error: the case does not fit the context, or the model gives no finite logits.
    """
    check_fits(engine, case)
    ids = [*case.prompt, *case.tokens]
    nll, matches, agreement = list[float](), list[bool](), Agreement()
    for place, logits in logits_before(engine, ids, len(case.prompt)):
        for i, row in enumerate(log_softmax_rows(logits)):
            target = ids[place + i]
            nll.append(-float(row[target]))
            matches.append(int(row.argmax()) == target)
            if case.references:
                _compare_with(case.references[place + i - len(case.prompt)], target, row, agreement)
    prefix = next((i for i, same in enumerate(matches) if not same), len(matches))
    return Score(case.id, len(nll), math.fsum(nll), nll, matches[0], prefix, agreement if case.references else None)


def check_fits(engine: Engine, case: Case) -> None:
    """Raise `Ds4Error` if a case has more tokens than the context."""
    count = len(case.prompt) + len(case.tokens)
    if count > engine.context:
        raise Ds4Error(
            f"case {case.id}: prompt and continuation have {count} tokens, but the context has {engine.context};"
            " raise --ctx, or leave the case out"
        )


def _compare_with(reference: Reference, target: int, row: torch.Tensor, sums: Agreement) -> None:
    if reference.logprob is not None:
        sums.tokens += 1
        sums.difference += abs(float(row[target]) - reference.logprob)
    if not reference.top:
        return
    own = set(torch.topk(row, min(len(reference.top), row.shape[0])).indices.tolist())
    sums.first += 1
    sums.first_same += int(row.argmax()) == max(reference.top, key=lambda pair: pair[1])[0]
    for id, logprob in reference.top:
        sums.top += 1
        sums.top_difference += abs(float(row[id]) - logprob)
        sums.found += id in own


@dataclass
class Results:
    """Scores of one model.

    Attributes:
        model: its name, for people.
        source: the name of the file of cases.
    """

    model: str
    source: str
    scores: list[Score] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Numbers over all cases; means are per token or per case."""
        tokens, cases = sum(s.tokens for s in self.scores), len(self.scores)
        nll = math.fsum(s.nll for s in self.scores)
        found: dict[str, Any] = {
            "cases": cases,
            "tokens": tokens,
            "nll": nll,
            "nll_per_token": nll / max(tokens, 1),
            "first_matches": sum(s.first_match for s in self.scores),
            "mean_greedy_prefix": sum(s.greedy_prefix for s in self.scores) / max(cases, 1),
            "whole_greedy": sum(s.greedy_prefix == s.tokens for s in self.scores),
        }
        total = Agreement()
        for one in self.scores:
            if one.agreement is not None:
                total.add(one.agreement)
        if total.tokens:
            found["reference_logprob_difference"] = total.difference / total.tokens
        if total.first:
            found["reference_top_difference"] = total.top_difference / total.top
            found["reference_top_found"] = total.found / total.top
            found["reference_first_same"] = total.first_same / total.first
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result file, JSON. Raises Ds4Error if it cannot be written."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "source": self.source,
            "summary": self.summary(),
            "cases": [asdict(s) for s in self.scores],
        }
        with replacing(path) as new:
            new.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read a result file. Raises Ds4Error if it is none."""
        try:
            value = json.loads(read_text(path))
            head = _fields(value, "it", {"format": str, "version": int})
            if (head["format"], head["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {head['format']!r}, version {head['version']}")
            body = _fields(value, "it", {"model": str, "source": str, "cases": list})
            return cls(body["model"], body["source"], [_score_of(case) for case in body["cases"]])
        except (ValueError, RecursionError) as error:
            raise Ds4Error(f"{Path(path)}: not a result file of ds4-score ({error}); make it again") from error


_NUMBER = int | float
_CASE = {"tokens": int, "nll": _NUMBER, "token_nll": list, "first_match": bool, "greedy_prefix": int}
_AGREEMENT = {f.name: _NUMBER for f in fields(Agreement)}


def _fields(value: Any, what: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The named fields of a JSON object. Raises ValueError for one that is missing or of another kind."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    for name, kind in kinds.items():
        if name not in value:
            raise ValueError(f"{what} has no {name!r}")
        entry = value[name]
        # JSON has NaN and infinities for Python, and truth values are numbers for it.
        right = isinstance(entry, kind) and isinstance(entry, bool) == (kind is bool)
        if not right or (isinstance(entry, float) and not math.isfinite(entry)):
            raise ValueError(f"{what} has {name!r} as {str(entry)[:40]!r}")
    return {name: value[name] for name in kinds}


def _score_of(value: Any) -> Score:
    id = _fields(value, "a case", {"id": str})["id"]
    case = _fields(value, f"case {id!r}", _CASE)
    agreement = value.get("agreement")
    found = Score(id, **case)
    if agreement is not None:
        found.agreement = Agreement(**_fields(agreement, f"the agreement of {id!r}", _AGREEMENT))
    for number in found.token_nll:
        _fields({"token_nll": number}, f"case {id!r}", {"token_nll": _NUMBER})
    if not 1 <= found.tokens == len(found.token_nll):
        raise ValueError(f"case {found.id!r} has {found.tokens} tokens and {len(found.token_nll)} values")
    return found


def score_all(
    engine: Engine,
    cases: Sequence[Case],
    results: Results,
    progress: Callable[[int, int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> bool:
    """Add the scores of all cases to `results`; False if `stopped` ended it before. Raises as `score`.

    That a case does not fit is told before any is scored.
    """
    for case in cases:
        check_fits(engine, case)
    for number, case in enumerate(cases):
        if stopped is not None and stopped():
            return False
        results.scores.append(score(engine, case))
        if progress is not None:
            progress(number + 1, len(cases))
    return True


# --- two models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """B against A, over the cases that both have.

    Attributes:
        wins, losses, ties: cases that B gives less, more, and the same NLL.
        difference: nats a token, B minus A: below 0 B is better.
        interval: 95 % interval of that difference, from the spread over cases.
        first_matches, greedy_prefix: of A and of B.
        only_a, only_b: cases that the other one lacks.
        best, worst: (id, difference of a case in nats a token), the largest first.
    """

    cases: int
    tokens: int
    nll: tuple[float, float]
    wins: int
    losses: int
    ties: int
    difference: float
    interval: tuple[float, float]
    first_matches: tuple[int, int]
    greedy_prefix: tuple[float, float]
    only_a: int
    only_b: int
    best: tuple[tuple[str, float], ...]
    worst: tuple[tuple[str, float], ...]


def compare(a: Results, b: Results, shown: int = 5) -> Comparison:
    """Compare two results of the same cases.

    Raises:
        Ds4Error: they have no case in common, or one has other numbers of tokens in both.
    """
    ours, theirs = ({s.id: s for s in r.scores} for r in (a, b))
    pairs = [(one, theirs[id]) for id, one in ours.items() if id in theirs]
    if not pairs:
        raise Ds4Error("the two results have no case in common: they were made from different files")
    for one, other in pairs:
        if one.tokens != other.tokens:
            raise Ds4Error(
                f"case {one.id} has {one.tokens} tokens in one result and {other.tokens} in the other: they were made"
                " from different files, or with different tokenizers"
            )
    tokens = sum(one.tokens for one, _ in pairs)
    deltas = [other.nll - one.nll for one, other in pairs]
    difference, half = _ratio_interval(deltas, [one.tokens for one, _ in pairs])
    ranked = [(one.id, delta / one.tokens) for (one, _), delta in zip(pairs, deltas, strict=True) if abs(delta) > TIE]
    ranked.sort(key=lambda pair: pair[1])
    return Comparison(
        cases=len(pairs),
        tokens=tokens,
        nll=(_sum(one.nll for one, _ in pairs) / tokens, _sum(other.nll for _, other in pairs) / tokens),
        wins=sum(delta < -TIE for delta in deltas),
        losses=sum(delta > TIE for delta in deltas),
        ties=sum(abs(delta) <= TIE for delta in deltas),
        difference=difference,
        interval=(difference - half, difference + half),
        first_matches=(sum(one.first_match for one, _ in pairs), sum(other.first_match for _, other in pairs)),
        greedy_prefix=(
            sum(one.greedy_prefix for one, _ in pairs) / len(pairs),
            sum(other.greedy_prefix for _, other in pairs) / len(pairs),
        ),
        only_a=len(ours) - len(pairs),
        only_b=len(theirs) - len(pairs),
        best=tuple(p for p in ranked[:shown] if p[1] < 0),
        worst=tuple(p for p in ranked[::-1][:shown] if p[1] > 0),
    )


def _sum(values: Iterable[float]) -> float:
    return math.fsum(values)


def _ratio_interval(deltas: Sequence[float], weights: Sequence[int]) -> tuple[float, float]:
    """sum(deltas) / sum(weights), and half its 95 % interval (cases are the independent units)."""
    n, total = len(deltas), sum(weights)
    ratio = math.fsum(deltas) / total
    if n < 2:
        return ratio, math.inf
    residuals = math.fsum((d - ratio * w) ** 2 for d, w in zip(deltas, weights, strict=True))
    return ratio, 1.96 * math.sqrt(residuals * n / (n - 1)) / total
