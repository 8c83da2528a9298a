"""Which entries leave: the least valuable ones, and none that others build on."""

from __future__ import annotations

from dataclasses import replace

from ds4.kvstore.container import Reason
from ds4.kvstore.policy import HALF_LIFE_SECONDS, Candidate, choose_victims, score

BASE = Candidate("a", Reason.CONTINUED, tokens=1000, size=100, hits=0, used=0)


def names(entries: list[Candidate], excess: int, *protected: str) -> list[str] | None:
    """The names of those that leave."""
    victims = choose_victims({entry.name: entry for entry in entries}, excess, protected, 0.0)
    return None if victims is None else [victim.name for victim in victims]


def test_scores() -> None:
    assert score(BASE, 0) == 10
    assert score(replace(BASE, hits=3), 0) == 40
    assert score(replace(BASE, hits=3), HALF_LIFE_SECONDS) == 25
    assert score(replace(BASE, hits=3), 100 * HALF_LIFE_SECONDS) == 10
    assert score(replace(BASE, hits=3, used=10**9), 0) == 10, "used in the future: a clock was wrong"
    assert score(replace(BASE, reason=Reason.COLD), 0) == 30
    assert score(replace(BASE, reason=Reason.EVICT), 0) == score(replace(BASE, reason=Reason.SHUTDOWN), 0) == 20
    assert score(replace(BASE, superseded=True), 0) == 0.5
    assert score(replace(BASE, superseded=True, hits=1), 0) == 20 * (0.05 + 0.225)
    assert score(replace(BASE, usable=False, hits=9), 0) == -1


def test_the_least_valuable_leave_until_there_is_room() -> None:
    entries = [BASE, replace(BASE, name="b", hits=1), replace(BASE, name="c", reason=Reason.COLD)]
    assert names(entries, 0) == []
    assert names(entries, 1) == ["a"]
    assert names(entries, 150) == ["a", "b"]
    assert names(entries, 300) == ["a", "b", "c"]
    assert names(entries, 301) is None


def test_of_equal_ones_the_least_recently_used_leaves() -> None:
    assert names([replace(BASE, used=5), replace(BASE, name="b", used=3)], 1) == ["b"]


def test_what_others_build_on_leaves_after_them() -> None:
    entries = [BASE, replace(BASE, name="b", parent="a", hits=9), replace(BASE, name="c", parent="b", hits=99)]
    assert names(entries, 250) == ["c", "b", "a"]
    assert names(entries, 250, "c") is None


def test_all_leave_that_can_if_that_is_wanted() -> None:
    entries = {name: replace(BASE, name=name, parent=parent) for name, parent in [("a", None), ("b", "a"), ("c", None)]}
    found = choose_victims(entries, 1000, "c", 0.0, all_the_same=True)
    assert found is not None
    assert [victim.name for victim in found] == ["b", "a"]


def test_protected_ones_stay_and_useless_ones_go_first() -> None:
    entries = [BASE, replace(BASE, name="b", usable=False, hits=9), replace(BASE, name="c", hits=9)]
    assert names(entries, 150, "a") == ["b", "c"]
    assert names(entries, 300, "a") is None
