"""The indexer: which compressed rows a query of a sparse layer attends to (V4 graph, Indexer)."""

from __future__ import annotations

import torch
from torch import Tensor

from ds4.ops.elementwise import tree_sum
from ds4.ops.linear import ROW_BLOCK, pad_rows

KEY_BLOCK = 64


def index_scores(q: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """sum_h relu(q_h . key_n) * weight_h for every key.

    q: float32 [tokens, heads, dim]; weight: [tokens, heads], scaled and signed; keys: [rows, dim] -> [tokens, rows].
    """
    tokens, heads, dim = q.shape
    rows = keys.shape[0]
    out = q.new_empty((tokens, rows))
    q, weight = pad_rows(q), pad_rows(weight)
    keys = pad_rows(keys, KEY_BLOCK)
    for t in range(0, tokens, ROW_BLOCK):
        flat = q[t : t + ROW_BLOCK].reshape(ROW_BLOCK * heads, dim)
        w = weight[t : t + ROW_BLOCK].unsqueeze(-1)
        for n in range(0, rows, KEY_BLOCK):
            dot = torch.mm(flat, keys[n : n + KEY_BLOCK].t()).view(ROW_BLOCK, heads, KEY_BLOCK)
            score = tree_sum(dot.clamp_(min=0.0) * w, 1)
            out[t : t + ROW_BLOCK, n : n + KEY_BLOCK] = score[: tokens - t, : rows - n]
    return out


def select_rows(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The `k` best visible rows of each query, in ascending order; ties go to the lowest row.

    scores: float32 [tokens, rows]; visible: int64 [tokens], the number of rows a query may use, at least k each
    -> int64 [tokens, k].
    """
    tokens, rows = scores.shape
    hidden = torch.arange(rows, device=scores.device) >= visible.unsqueeze(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    threshold = torch.topk(scores, k, dim=1, sorted=True).values[:, -1:]
    above = scores > threshold
    tied = (scores == threshold) & ~hidden
    room = k - above.sum(1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(tokens, k)
