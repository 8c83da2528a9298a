"""What is worth keeping: scores of entries, and the order in which they leave (server-spec of the disk store, 8.6)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ds4.kvstore.container import Reason

HALF_LIFE_SECONDS = 6 * 3600.0
_WEIGHTS = {Reason.COLD: 3.0, Reason.EVICT: 2.0, Reason.SHUTDOWN: 2.0}
"""Anchors at stable boundaries serve many conversations, so they weigh more than dumps of a single one."""


@dataclass(frozen=True)
class Candidate:
    """What the score of an entry depends on.

    Attributes:
        tokens: those that it adds to its parent.
        size: bytes of its file.
        superseded: it is a continued entry whose key the incoming one begins with.
        usable: it can be loaded: intact, and all that it builds on is there.
    """

    name: str
    reason: Reason
    tokens: int
    size: int
    hits: int
    used: int
    parent: str | None = None
    superseded: bool = False
    usable: bool = True


def score(entry: Candidate, now: float) -> float:
    """The worth of an entry: tokens saved per byte, more if it was used lately. Unusable ones have none."""
    if not entry.usable:
        return -1.0
    # A clock that was wrong once must not keep an entry for ever.
    hits: float = entry.hits * 2.0 ** (-abs(now - entry.used) / HALF_LIFE_SECONDS)
    if hits < 0.01:
        hits = 0.0
    value = (hits + 1) * entry.tokens / max(entry.size, 1) * _WEIGHTS.get(entry.reason, 1.0)
    return value * (0.05 + 0.45 * hits / (hits + 1)) if entry.superseded else value


def choose_victims(
    entries: Mapping[str, Candidate], excess: int, protected: Collection[str], now: float, all_the_same: bool = False
) -> list[Candidate] | None:
    """The entries that leave so that `excess` bytes become free, in order; None if that is not possible.

    One that others build on leaves after them: without it they are worth nothing. `all_the_same`: what can leave does,
    though it may not be enough.
    """
    children: dict[str, int] = {}
    for entry in entries.values():
        if entry.parent is not None and entry.usable:
            children[entry.parent] = children.get(entry.parent, 0) + 1

    def ranked(entry: Candidate) -> tuple[float, int, str]:
        return score(entry, now), entry.used, entry.name

    free = [ranked(e) for e in entries.values() if not children.get(e.name) and e.name not in protected]
    heapq.heapify(free)
    victims: list[Candidate] = []
    while excess > 0:
        if not free:
            return victims if all_the_same else None
        victim = entries[heapq.heappop(free)[2]]
        if victim.parent is not None and victim.usable:
            children[victim.parent] -= 1
            parent = entries.get(victim.parent)
            if parent is not None and not children[victim.parent] and parent.name not in protected:
                heapq.heappush(free, ranked(parent))
        victims.append(victim)
        excess -= victim.size
    return victims
