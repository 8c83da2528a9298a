"""Attention over the rows of a window and over chosen compressed rows, with a sink (V4 graph, Attention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds4.ops.elementwise import tree_sum

ROW_STEP = 64
"""Compressed rows are taken in steps of this many: a query's sum has the same order whatever the other queries see."""

_PASS_LIMIT = 1 << 24
"""Floats (scores, weights and gathered rows) that one pass over some of the queries may hold."""


def attention(
    q: Tensor, window: Tensor, first: Tensor, missing: Tensor, span: int, compressed: Compressed | None, sink: Tensor
) -> Tensor:
    """Softmax attention in which a row is key and value at once.

    Args:
        q: float32 [tokens, heads, dim], rotated.
        window: raw rows, float32 [rows, dim].
        first: int64 [tokens]; query t's window is rows first[t] .. first[t] + span - 1.
        missing: int64 [tokens]; the first missing[t] rows of that window do not exist (before the sequence's start).
        span: length of the window, in rows.
        compressed: what each query sees besides.
        sink: float32 [heads], a logit whose value is zero.

    Returns:
        float32 [tokens, heads, dim].
    """
    tokens, heads, dim = q.shape
    slots = span + (compressed.slots if compressed else 0)
    gathered = span + (compressed.slots if compressed and compressed.chosen is not None else 0)
    step = max(1, _PASS_LIMIT // (2 * heads * slots + dim * gathered))
    q = q * dim**-0.5
    outs = []
    for t in range(0, tokens, step):
        part = slice(t, t + step)
        groups = [_near(q[part], window, first[part], missing[part], span)]
        if compressed:
            groups += compressed.groups(q[part], part)
        outs.append(_softmax(groups, sink))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


@dataclass(frozen=True)
class Compressed:
    """The compressed rows that queries see: of all rows those before a limit, or chosen ones.

    Attributes:
        rows: float32 [rows, dim].
        visible: int64 [tokens], query t sees the rows before visible[t]; used if `chosen` is None.
        chosen: int64 [tokens, slots], the rows of each query, -1 in slots without one.
    """

    rows: Tensor
    visible: Tensor
    chosen: Tensor | None = None

    @property
    def slots(self) -> int:
        """Rows that a query may see at most."""
        return self.rows.shape[0] if self.chosen is None else self.chosen.shape[1]

    def as_chosen(self) -> Tensor:
        """`chosen`, or the same in this form."""
        if self.chosen is not None:
            return self.chosen
        index = torch.arange(self.rows.shape[0], device=self.rows.device)
        return torch.where(index < self.visible.unsqueeze(1), index, -1)

    def groups(self, q: Tensor, part: slice) -> list[tuple[Tensor, Tensor]]:
        """Scores and rows of the queries `part`, `ROW_STEP` slots at a time."""
        if self.chosen is not None:
            chosen = torch.nn.functional.pad(self.chosen[part], (0, -self.chosen.shape[1] % ROW_STEP), value=-1)
            return [
                _masked(q, self.rows[index.clamp(min=0)], index < 0)
                for index in (chosen[:, i : i + ROW_STEP] for i in range(0, chosen.shape[1], ROW_STEP))
            ]
        rows = torch.nn.functional.pad(self.rows, (0, 0, 0, -self.rows.shape[0] % ROW_STEP))
        visible, result = self.visible[part].unsqueeze(1), []
        for i in range(0, rows.shape[0], ROW_STEP):
            hidden = torch.arange(i, i + ROW_STEP, device=rows.device) >= visible
            result.append(_masked(q, rows[i : i + ROW_STEP].expand(q.shape[0], -1, -1), hidden))
        return result


def _near(q: Tensor, window: Tensor, first: Tensor, missing: Tensor, span: int) -> tuple[Tensor, Tensor]:
    tokens, dim = q.shape[0], q.shape[2]
    slot = torch.arange(span, device=q.device)
    if int(first[-1] - first[0]) == tokens - 1:
        # Queries that follow one another share all but one row of their windows: a view, not a copy.
        rows = window[int(first[0]) :].as_strided((tokens, span, dim), (dim, dim, 1))
    else:
        rows = window[first.unsqueeze(1) + slot]
    return _masked(q, rows, slot < missing.unsqueeze(1))


def _masked(q: Tensor, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [tokens, heads, slots], -inf where hidden, and the rows [tokens, slots, dim]."""
    score = torch.bmm(q, rows.transpose(1, 2))
    return score.masked_fill_(hidden.unsqueeze(1), -torch.inf), rows


def _softmax(groups: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    tokens, heads, _ = groups[0][0].shape
    sink = sink.view(1, heads, 1)
    top = sink.expand(tokens, heads, 1)
    for score, _ in groups:
        top = torch.maximum(top, score.amax(-1, keepdim=True))
    total = torch.exp(sink - top)
    out = None
    for score, rows in groups:
        weight = torch.exp(score - top)
        total = total + tree_sum(weight, -1).unsqueeze(-1)
        value = torch.bmm(weight, rows)
        out = value if out is None else out.add_(value)
    assert out is not None
    return out / total
