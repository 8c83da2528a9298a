"""Which checkpoints of a session are kept: all while they fit a byte budget, then thinner the further back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

WANTED_WEIGHT = 8.0
"""How many times more a checkpoint at a turn boundary is worth than one at a round number of tokens."""


class CheckpointLike(Protocol):
    """What a model's state can go back to."""

    @property
    def length(self) -> int:
        """Tokens evaluated."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    @property
    def logits(self) -> Any:
        """Logits after the last token, or None."""
        ...


class CheckpointList:
    """The checkpoints of one session, by length."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._entries: dict[int, CheckpointLike] = {}
        self._wanted: set[int] = set()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> list[int]:
        """Lengths of all checkpoints, ascending."""
        return list(self._lengths)

    def add(self, checkpoint: CheckpointLike, wanted: bool) -> None:
        """Keep a checkpoint; an earlier one of the same length is replaced if this one knows as much."""
        n = checkpoint.length
        if wanted:
            self._wanted.add(n)
        old = self._entries.get(n)
        if old is not None:
            if old.logits is not None and checkpoint.logits is None:
                return
            self.nbytes -= old.nbytes
        else:
            self._lengths.insert(bisect_right(self._lengths, n), n)
        self._entries[n] = checkpoint
        self.nbytes += checkpoint.nbytes

    def best(self, length: int) -> CheckpointLike | None:
        """The longest checkpoint of at most `length` tokens."""
        i = bisect_right(self._lengths, length)
        return self._entries[self._lengths[i - 1]] if i else None

    def at(self, length: int) -> CheckpointLike | None:
        """The checkpoint of exactly `length` tokens."""
        return self._entries.get(length)

    def drop_above(self, length: int) -> None:
        """Forget what lies behind a cut."""
        while self._lengths and self._lengths[-1] > length:
            self._remove(self._lengths[-1])

    def copy(self) -> CheckpointList:
        """An equal list that shares the checkpoints."""
        other = CheckpointList()
        other._lengths, other._entries = list(self._lengths), dict(self._entries)
        other._wanted, other.nbytes = set(self._wanted), self.nbytes
        return other

    def entries(self) -> Iterable[CheckpointLike]:
        """All checkpoints."""
        return self._entries.values()

    def discard(self, checkpoint: CheckpointLike) -> None:
        """Forget this one, if it is here."""
        if self._entries.get(checkpoint.length) is checkpoint:
            self._remove(checkpoint.length)

    def thin(self) -> CheckpointLike:
        """Drop, and return, what is missed least: the gap it leaves is smallest against its distance from the end."""
        end = self._lengths[-1]

        def loss(i: int) -> float:
            before = self._lengths[i - 1] if i else 0
            gap = self._lengths[i + 1] - before
            value = gap / (end - self._lengths[i] + 1)
            return value * WANTED_WEIGHT if self._lengths[i] in self._wanted else value

        # The newest stays unless it is the only one.
        candidates = range(len(self._lengths) - 1)
        i = min(candidates, key=loss) if candidates else 0
        dropped = self._entries[self._lengths[i]]
        self._remove(self._lengths[i])
        return dropped

    def clear(self) -> None:
        """Forget all."""
        self.drop_above(-1)

    def _remove(self, length: int) -> None:
        self._lengths.remove(length)
        self._wanted.discard(length)
        self.nbytes -= self._entries.pop(length).nbytes


@dataclass
class CheckpointBudget:
    """The bytes that the checkpoints of all sessions of an engine may hold together."""

    limit: int
    _lists: WeakSet[CheckpointList] = field(default_factory=WeakSet)

    def register(self, checkpoints: CheckpointList) -> None:
        """Count a session's list from now on."""
        self._lists.add(checkpoints)

    def used(self) -> int:
        """Bytes held now; a checkpoint that forks share counts once."""
        return sum({id(c): c.nbytes for some in self._lists for c in some.entries()}.values())

    def enforce(self) -> None:
        """Thin the largest list until all fit; what it drops leaves the lists of its forks too."""
        while sum(some.nbytes for some in self._lists) > self.limit and self.used() > self.limit:
            largest = max(self._lists, key=lambda some: some.nbytes)
            dropped = largest.thin()
            for some in self._lists:
                some.discard(dropped)
