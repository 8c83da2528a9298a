"""RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the innermost axis, times `weight` if there is one.

    x: float32 [..., channels]; weight: float32 [channels] -> float32 [..., channels].
    """
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight
