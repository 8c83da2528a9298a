"""Functions of single elements, and a sum whose order is fixed."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element.

    torch.sigmoid gives other last bits at the end of an array than in its middle; exp does not.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), element by element."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), element by element; x itself above 20, where the two agree in float32."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(torch.clamp(x, max=20.0))))


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` in a fixed order: halves are added while the length is even, then one by one.

    The order depends on the length alone, so equal rows give equal bits in tensors of any other size.
    """
    n = x.shape[dim]
    while n > 1 and n % 2 == 0:
        n //= 2
        x = x.narrow(dim, 0, n) + x.narrow(dim, n, n)
    total = x.select(dim, 0)
    for i in range(1, n):
        total = total + x.select(dim, i)
    return total
