"""Hyper-connections: several residual streams, mixed by small matrices made from the streams themselves.

V4 graph, hc_pre, hc_post and Output head (manifold-constrained hyper-connections, arXiv 2512.24880).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds4.ops.elementwise import sigmoid
from ds4.ops.linear import linear


def _mix(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """fn @ flatten(x), over the root mean square of all streams: [tokens, streams, hidden] -> [tokens, rows of fn]."""
    flat = x.flatten(1)
    return linear(flat, fn) * torch.rsqrt((flat * flat).mean(-1, keepdim=True) + rms_eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A nearly doubly stochastic matrix from logits: [tokens, n, n] -> [tokens, n, n].

    Softmax along rows, then columns and rows are normalised in turn, columns first and last; `eps` joins every sum.
    """
    tokens, n, _ = logits.shape
    e = torch.exp(logits - logits.amax(-1, keepdim=True))
    # A further row and column of eps join every sum, which saves an addition for each.
    framed = logits.new_full((tokens, n + 1, n + 1), eps)
    c, rows, columns = framed[:, :n, :n], framed[:, :n], framed[:, :, :n]
    torch.add(e / e.sum(-1, keepdim=True), eps, out=c)
    c /= columns.sum(-2, keepdim=True)
    for _ in range(iterations - 1):
        c /= rows.sum(-1, keepdim=True)
        c /= columns.sum(-2, keepdim=True)
    return c


def hc_pre(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a sublayer and what `hc_post` needs to write its output back.

    Args:
        x: streams, float32 [tokens, streams, hidden], before any norm.
        fn: [2 * streams + streams^2, streams * hidden]; rows are pre, post, then comb row by row.
        scale: [3]. base: [2 * streams + streams^2].

    Returns:
        sublayer input [tokens, hidden], post [tokens, streams], comb [tokens, streams, streams], all float32.
    """
    s = x.shape[1]
    m = _mix(x, fn, rms_eps)
    pre = sigmoid(m[:, :s] * scale[0] + base[:s]) + hc_eps
    post = 2.0 * sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = sinkhorn((m[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s)), iterations, hc_eps)
    return _weighted_sum(x, pre), post, comb


def hc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: stream k gets post_k * y + sum_j comb[j, k] * x_j (the sum runs over the first index).

    y: sublayer output [tokens, hidden]; x: the streams that went into `hc_pre` -> [tokens, streams, hidden].
    """
    out = post.unsqueeze(-1) * y.unsqueeze(1)
    for j in range(x.shape[1]):
        out += comb[:, j].unsqueeze(-1) * x[:, j].unsqueeze(1)
    return out


def hc_collapse(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, rms_eps: float) -> Tensor:
    """The one vector that goes to the vocabulary: [tokens, streams, hidden] -> [tokens, hidden]."""
    return _weighted_sum(x, sigmoid(_mix(x, fn, rms_eps) * scale + base) + hc_eps)


def _weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    total = weight[:, 0, None] * x[:, 0]
    for i in range(1, x.shape[1]):
        total += weight[:, i, None] * x[:, i]
    return total
