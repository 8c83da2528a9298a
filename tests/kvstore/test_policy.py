"""Which entries leave: the least valuable ones, and none that others build on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

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


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 50), st.integers(0, 3), st.booleans()), max_size=12),
    st.integers(0, 700),
    st.sets(st.integers(0, 11), max_size=2),
)
def test_it_is_always_the_least_valuable_that_leaves_next(
    drawn: list[tuple[int, int, int, bool]], excess: int, protected: set[int]
) -> None:
    """Each that leaves is the worst of those that nobody builds on by then."""
    entries = {
        str(i): replace(
            BASE, name=str(i), size=size, hits=hits, usable=usable, parent=str(parent) if parent < i else None
        )
        for i, (parent, size, hits, usable) in enumerate(drawn)
    }
    names = {str(i) for i in protected}
    left, expected = dict(entries), []
    while sum(entries[name].size for name in expected) < excess:
        built_on = {e.parent for e in left.values() if e.usable}
        free = [e for e in left.values() if e.name not in built_on | names]
        if not free:
            break
        expected.append(min(free, key=lambda e: (score(e, 0.0), e.used, e.name)).name)
        del left[expected[-1]]
    enough = sum(entries[name].size for name in expected) >= excess
    found = choose_victims(entries, excess, names, 0.0, all_the_same=True)
    assert found is not None
    assert [victim.name for victim in found] == expected
    assert (choose_victims(entries, excess, names, 0.0) is not None) == enough
