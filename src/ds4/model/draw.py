"""What is told to those who choose tokens on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One choice in numbers; they mean what they mean in `ds4.engine.sampling`.

    Attributes:
        logits: float32 [vocab], on any device.
        temperature: 0 for the most probable token.
        top_k, top_p, min_p: 0, 1 and 0 keep all tokens.
        uniform: the random number, from 0 to below 1.
        allowed: int32 [ceil(vocab / 32)] on the host, bit i of word w allowing token 32 w + i; None allows all.
        state: of the sequence that the token will most likely be evaluated in next, or None.
    """

    logits: Tensor
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    allowed: Tensor | None
    state: Any = None
