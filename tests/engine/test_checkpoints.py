"""Which checkpoints stay when there is no room for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ds4.engine.checkpoints import CheckpointBudget, CheckpointList


@dataclass(frozen=True, eq=False)
class Kept:
    """A checkpoint without a state."""

    length: int
    nbytes: int = 10
    logits: Any = None


def listed(lengths: list[int], wanted: tuple[int, ...] = ()) -> CheckpointList:
    some = CheckpointList()
    for n in lengths:
        some.add(Kept(n), n in wanted)
    return some


def test_a_turn_boundary_outlives_round_numbers_around_it() -> None:
    some = listed(list(range(128, 4097, 128)), wanted=(1024,))
    while len(some) > 4:
        some.thin()
    assert 1024 in some.lengths()
    assert some.lengths()[-1] == 4096


def test_what_stays_is_thinner_the_further_back() -> None:
    some = listed(list(range(100, 10_001, 100)))
    while len(some) > 12:
        some.thin()
    gaps = [b - a for a, b in zip(some.lengths(), some.lengths()[1:], strict=False)]
    assert some.lengths()[-1] == 10_000
    assert gaps[0] >= 10 * gaps[-1]
    assert gaps[-1] == 100


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(0, 400), st.integers(0, 3))
def test_a_budget_holds_and_forks_share(lengths: set[int], limit: int, forks: int) -> None:
    budget = CheckpointBudget(limit)
    lists = [listed(sorted(lengths))]
    lists += [lists[0].copy() for _ in range(forks)]
    for some in lists:
        budget.register(some)
    before = budget.used()
    assert before == 10 * len(lengths)  # what forks share counts once
    budget.enforce()
    assert budget.used() <= limit
    if before <= limit:
        assert budget.used() == before
    assert all(some.nbytes == 10 * len(some) for some in lists)


def test_the_same_place_keeps_what_is_known_of_it() -> None:
    some = CheckpointList()
    known = Kept(128, logits="logits")
    some.add(known, wanted=False)
    some.add(Kept(128, nbytes=99), wanted=True)
    assert some.at(128) is known
    assert some.nbytes == 10
