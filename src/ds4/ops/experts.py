"""Experts: gated feed-forward networks with a clamp (V4 graph, MoE)."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class ExpertEnergy:
    """How large the inputs of a layer's routed experts are: sums of squares over the rows that each was given.

    Attributes:
        gate_up: [experts, hidden], of what gate and up were given.
        down: [experts, expert_hidden], of what the down projection was given, the routing weight multiplied in.
        counts: [experts], the rows.
    """

    gate_up: Tensor
    down: Tensor
    counts: Tensor

    @classmethod
    def zeros(cls, experts: int, hidden: int, expert_hidden: int, device: torch.device | str = "cpu") -> ExpertEnergy:
        """Sums of nothing, float64; counts int64."""
        return cls(
            torch.zeros(experts, hidden, dtype=torch.float64, device=device),
            torch.zeros(experts, expert_hidden, dtype=torch.float64, device=device),
            torch.zeros(experts, dtype=torch.int64, device=device),
        )

    def add(self, other: ExpertEnergy) -> None:
        """Take over the sums of other rows."""
        self.gate_up.add_(other.gate_up)
        self.down.add_(other.down)
        self.counts.add_(other.counts)

    def add_rows(self, expert: int, x: Tensor, inner: Tensor) -> None:
        """Rows of one expert: x [rows, hidden], inner [rows, expert_hidden] with the routing weight."""
        self.gate_up[expert] += x.double().square().sum(0)
        self.down[expert] += inner.double().square().sum(0)
        self.counts[expert] += x.shape[0]


def swiglu(gate_up: Tensor, clamp: float) -> Tensor:
    """silu(min(gate, clamp)) * clip(up, -clamp, clamp): [rows, 2 * hidden] -> [rows, hidden]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: ExpertSource,
    clamp: float,
    energy: ExpertEnergy | None = None,
) -> Tensor:
    """sum over a token's chosen experts of weight * expert(x), in the order of the choice.

    x: float32 [tokens, hidden]; chosen: int64 [tokens, k]; weights: float32 [tokens, k] -> float32 [tokens, hidden].
    `energy`, if there is one, takes over the sums of these rows.
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
        if energy is not None:
            energy.add_rows(expert, x[slots // k], inner * weights.reshape(-1)[slots, None])
        parts[slots] = linear(inner, experts.down(expert))
    parts = parts.view(tokens, k, -1)
    total = weights[:, 0, None] * parts[:, 0]
    for i in range(1, k):
        total = total + weights[:, i, None] * parts[:, i]
    return total
