"""Attention over the rows of a window and over chosen compressed rows, with a sink (V4 graph, Attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from ds4.ops.elementwise import tree_sum

ROW_STEP = 64
"""Compressed rows are taken in steps of this many: a query's sum has the same order whatever the other queries see."""

_GATHER_LIMIT = 1 << 24
"""Floats of gathered rows that one pass may hold."""


def attention(
    q: Tensor, window: Tensor, near: Tensor, compressed: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """Softmax attention in which a row is key and value at once.

    Args:
        q: float32 [tokens, heads, dim], rotated.
        window: raw rows, float32 [rows, dim].
        near: int64 [tokens, span], the raw rows of each query's window, -1 where there is none.
        compressed: compressed rows, float32 [rows, dim], or None.
        chosen: int64 [tokens, slots], the compressed rows of each query, -1 in slots without one, or None.
        sink: float32 [heads], a logit whose value is zero.

    Returns:
        float32 [tokens, heads, dim].
    """
    tokens, _, dim = q.shape
    slots = near.shape[1] + (0 if chosen is None else chosen.shape[1])
    step = max(1, _GATHER_LIMIT // (slots * dim))
    if tokens <= step:
        return _attend(q, window, near, compressed, chosen, sink)
    out = torch.empty_like(q)
    for t in range(0, tokens, step):
        part = slice(t, t + step)
        out[part] = _attend(q[part], window, near[part], compressed, None if chosen is None else chosen[part], sink)
    return out


def _attend(
    q: Tensor, window: Tensor, near: Tensor, compressed: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    tokens, heads, dim = q.shape
    q = q * dim**-0.5
    groups = [_gather(q, window, near)]
    if compressed is not None and chosen is not None and chosen.shape[1]:
        chosen = torch.nn.functional.pad(chosen, (0, -chosen.shape[1] % ROW_STEP), value=-1)
        groups += [_gather(q, compressed, part) for part in chosen.split(ROW_STEP, dim=1)]

    sink = sink.view(1, heads, 1)
    top = sink.expand(tokens, heads, 1)
    for score, _ in groups:
        top = torch.maximum(top, score.amax(-1, keepdim=True))
    total = torch.exp(sink - top)
    out = torch.zeros_like(q)
    for score, rows in groups:
        weight = torch.exp(score - top)
        total = total + tree_sum(weight, -1).unsqueeze(-1)
        out += torch.bmm(weight, rows)
    return out / total


def _gather(q: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [tokens, heads, slots], -inf where index is negative, and the gathered rows [tokens, slots, dim]."""
    picked = rows[index.clamp(min=0)]
    score = torch.bmm(q, picked.transpose(1, 2))
    score.masked_fill_((index < 0).unsqueeze(1), -torch.inf)
    return score, picked
