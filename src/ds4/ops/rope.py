"""Rotary position embedding on the tail of a vector, with YaRN for the layers that compress (V4 graph, Attention)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """The frequencies of one kind of layer: float32 [rope_dim / 2], in radians per position."""

    frequencies: Tensor

    @classmethod
    def plain(cls, dim: int, base: float) -> Rope:
        """f_i = base^(-2i/dim)."""
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return cls(1.0 / base**exponent)

    @classmethod
    def yarn(
        cls, dim: int, base: float, factor: float, original_context: int, beta_fast: float, beta_slow: float
    ) -> Rope:
        """Frequencies that turn less than `beta_slow` times in the original context are divided by `factor`.

        Those that turn more than `beta_fast` times stay as they are, with a linear ramp in between. Cosine and sine
        are not scaled (YaRN, arXiv 2309.00071, without its attention factor).
        """

        def channel(turns: float) -> float:
            return dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = min(max(math.floor(channel(beta_fast)), 0), dim)  # no channel is beyond, however odd the numbers are
        high = min(math.ceil(channel(beta_slow)), dim - 1)
        index = torch.arange(dim // 2, dtype=torch.float32)
        ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        f = cls.plain(dim, base).frequencies
        return cls(f * (1 - ramp) + f / factor * ramp)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `apply_rope` multiplies with at these positions; the angle is a float32 product, as in the model.

        positions: int64 [n] -> float32 [n, rope_dim] twice: the cosine of each channel's pair, and the sine, negated in
        the pair's first channel.
        """
        angle = positions.to(torch.float32).unsqueeze(-1) * self.frequencies.to(positions.device)
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate neighbouring channel pairs of the last rope_dim channels; the others stay.

    x: float32 [rows, channels] or [rows, heads, channels]; cos, sin: [rows, rope_dim] from `Rope.at`. `inverse` undoes
    the rotation.
    """
    dim = cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    tail = x[..., -dim:]
    swapped = tail.reshape(*tail.shape[:-1], dim // 2, 2).flip(-1).reshape(tail.shape)
    turned = tail * cos - swapped * sin if inverse else tail * cos + swapped * sin
    return torch.cat((x[..., :-dim], turned), dim=-1)
