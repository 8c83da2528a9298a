"""Experts: gated feed-forward networks with a clamp (V4 graph, MoE)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ds4.ops.elementwise import silu
from ds4.ops.linear import linear


class ExpertSource(Protocol):
    """Where the matrices of one layer's routed experts come from: memory, the mapped file, later a disk cache.

    A matrix may be a buffer that the next call of the same method fills again.
    """

    def gate_up(self, expert: int) -> Tensor:
        """float32 [2 * expert_hidden, hidden]: the gate's rows, then the up projection's."""
        ...

    def down(self, expert: int) -> Tensor:
        """float32 [hidden, expert_hidden]."""
        ...


def swiglu(gate_up: Tensor, clamp: float) -> Tensor:
    """silu(min(gate, clamp)) * clip(up, -clamp, clamp): [rows, 2 * hidden] -> [rows, hidden]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertSource, clamp: float) -> Tensor:
    """sum over a token's chosen experts of weight * expert(x), in the order of the choice.

    x: float32 [tokens, hidden]; chosen: int64 [tokens, k]; weights: float32 [tokens, k] -> float32 [tokens, hidden].
    """
    tokens, k = chosen.shape
    parts = x.new_empty((tokens * k, x.shape[1]))
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    names, counts = torch.unique_consecutive(flat[order], return_counts=True)
    start = 0
    for expert, count in zip(names.tolist(), counts.tolist(), strict=True):
        slots = order[start : start + count]
        start += count
        inner = swiglu(linear(x[slots // k], experts.gate_up(expert)), clamp)
        parts[slots] = linear(inner, experts.down(expert))
    parts = parts.view(tokens, k, -1)
    total = weights[:, 0, None] * parts[:, 0]
    for i in range(1, k):
        total = total + weights[:, i, None] * parts[:, i]
    return total
