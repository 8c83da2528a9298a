"""What is worth keeping: scores of entries, and the order in which they leave (server-spec of the disk store, 8.6)."""

from __future__ import annotations

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
    entries: Mapping[str, Candidate], excess: int, protected: Collection[str], now: float
) -> list[Candidate] | None:
    """The entries that leave so that `excess` bytes become free, in order; None if that is not possible.

    One that others build on leaves after them: without it they are worth nothing.
    """
    children: dict[str, int] = {}
    for entry in entries.values():
        if entry.parent is not None and entry.usable:
            children[entry.parent] = children.get(entry.parent, 0) + 1
    left, victims = dict(entries), []
    while excess > 0:
        free = [e for e in left.values() if not children.get(e.name) and e.name not in protected]
        if not free:
            return None
        victim = min(free, key=lambda e: (score(e, now), e.used, e.name))
        del left[victim.name]
        if victim.parent is not None and victim.usable:
            children[victim.parent] -= 1
        victims.append(victim)
        excess -= victim.size
    return victims
