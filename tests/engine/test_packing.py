"""What is taken in pieces is let go of where it is left, whoever else still knows of it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from ds4.engine import Snapshot, packing
from ds4.model.cache import KVCache
from tests.helpers import SMALL


class Kept:
    """Makes generators and keeps them, so that only closing ends one."""

    def __init__(self) -> None:
        self.made: list[Generator[torch.Tensor, None, None]] = []
        self.held = 0

    def pieces(self, *args: Any) -> Generator[torch.Tensor, None, None]:
        def rows() -> Iterator[torch.Tensor]:
            self.held += 1
            try:
                for _ in range(3):
                    yield torch.zeros(4, 64, dtype=torch.uint8)
            finally:
                self.held -= 1

        self.made.append(rows())  # type: ignore[arg-type]
        return self.made[-1]


def test_buffers_that_are_left_let_go() -> None:
    kept = Kept()
    buffers = packing._row_buffers(kept.pieces)
    with contextlib.closing(buffers):
        next(buffers)
        assert kept.held == 1
    assert kept.held == 0
    assert len(kept.made) == 1


def test_sections_that_are_left_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, state = Kept(), KVCache(SMALL, True).new_state()
    state.prepare(700)
    state.advance(700)
    snapshot = Snapshot(tuple(range(700)), state.checkpoint(None), state.hold(700))
    monkeypatch.setattr(type(snapshot.rows), "pieces", kept.pieces)
    left = 0
    for part in packing.pack(SMALL, snapshot, 0):
        pieces = part.pieces()
        with contextlib.closing(pieces):
            next(pieces)
            left += kept.held
        assert kept.held == 0
    assert left == len(kept.made) > 3
