"""Sessions of any length without evaluating their tokens, to measure at contexts that would take long to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds4.errors import Ds4Error
from ds4.model.cache import Checkpoint, ExportedState, Planes, key_format, kv_format

if TYPE_CHECKING:
    from ds4.engine.session import Session

_DRAWN_ROWS = 4096
"""Different rows of a layer that are drawn; a longer layer holds each of them several times."""
_PIECE = 65_536
"""Tokens that go into the session at once: the host holds only their rows."""


def fill_session(session: Session, ids: Sequence[int], seed: int = 1) -> None:
    """Make an empty session hold `ids` with random rows, keys, frontiers and logits in place of computed ones.

    Everything is of the kind that the model stores (packed by the same code, on the same grids), and steps from here
    on do all the work of a real context of this length. What they compute means nothing. It goes the way of states
    from disk (`Session.import_state`), so on every device.

    Raises:
        Ds4Error: the session is not empty, there are no ids or more than its context, or a CUDA device has no room.
    """
    ids = session.token_ids(ids)
    if session.tokens:
        raise Ds4Error("only an empty session can be filled: take a new one from the engine")
    if not ids or len(ids) > session.engine.context:
        raise Ds4Error(f"a session is filled with 1 to {session.engine.context} tokens, its context, not {len(ids)}")
    drawn = _Drawn(session, seed)
    for start in range(0, len(ids), _PIECE):
        end = min(start + _PIECE, len(ids))
        session.import_state(ids[:end], drawn.state(start, end))
        session.checkpoints.clear()  # they were only for the next piece


class _Drawn:
    """Random values in the formats of a session's model."""

    def __init__(self, session: Session, seed: int) -> None:
        self._shape, self._layout = session.engine.shape, session.export().layout
        shape, qat_sim = self._layout
        self._random = torch.Generator().manual_seed(seed)
        # One block for all layers: which of its rows a layer holds is drawn for each.
        self._blocks = {"rows": kv_format(shape, qat_sim).pack(self._normal(_DRAWN_ROWS, shape.head_dim))}
        if any(shape.has_indexer(layer) for layer in range(shape.layers)):
            self._blocks["keys"] = key_format(shape, qat_sim).pack(self._normal(_DRAWN_ROWS, shape.index_dim))

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random)

    def _rows(self, kind: str, count: int) -> Planes:
        chosen = torch.randint(_DRAWN_ROWS, (count,), generator=self._random)
        return tuple(plane[chosen] for plane in self._blocks[kind])

    def state(self, start: int, end: int) -> ExportedState:
        """A state of `end` tokens from token `start` on."""
        shape = self._shape
        live = min(end, shape.window - 1)
        window = tuple(p.unflatten(0, (shape.layers, live)) for p in self._rows("rows", shape.layers * live))
        rows, frontier = {}, {}
        for layer, ratio in enumerate(shape.ratios):
            for kind in ("rows", "keys") if shape.has_indexer(layer) else ("rows",) if ratio else ():
                rows[layer, kind] = self._rows(kind, end // ratio - start // ratio)
                width = shape.head_dim if kind == "rows" else shape.index_dim
                wide = 2 * width if shape.has_indexer(layer) else width
                frontier[layer, kind] = self._normal(2, end % ratio, wide)
                if shape.has_indexer(layer) and end >= ratio:
                    frontier[layer, kind + ".previous"] = self._normal(2, ratio, width)
        checkpoint = Checkpoint(end, window, frontier, self._normal(shape.vocab))
        return ExportedState(start, checkpoint, rows, self._layout)
