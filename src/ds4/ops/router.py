"""The router: which experts a token visits, and with what weight (V4 graph, MoE)."""

from __future__ import annotations

import torch
from torch import Tensor

from ds4.ops.elementwise import softplus
from ds4.ops.linear import linear


def _weights(scores: Tensor, chosen: Tensor, scale: float) -> Tensor:
    w = scores.gather(1, chosen)
    total = w[:, 0]
    for i in range(1, w.shape[1]):
        total = total + w[:, i]
    return w / total.unsqueeze(1) * scale


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    return torch.sqrt(softplus(linear(x, gate)))


def route_by_score(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The k experts of highest score + bias; the bias chooses but does not weigh. Ties go to the lowest expert.

    x: float32 [tokens, hidden]; gate: [experts, hidden]; bias: [experts] -> experts int64 [tokens, k], weights float32
    [tokens, k], whose sum is `scale`.
    """
    scores = _scores(x, gate)
    chosen = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :k]
    return chosen, _weights(scores, chosen, scale)


def route_by_hash(x: Tensor, gate: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The experts that a table gives for the token id (first layers), weighed as in `route_by_score`.

    chosen: [tokens, k], rows of the table -> as `route_by_score`.
    """
    chosen = chosen.to(torch.int64)
    return chosen, _weights(_scores(x, gate), chosen, scale)
