"""Simple quantisers: float tensors to the blocks of a GGUF file (Q8_0, Q2_K, IQ2_XXS), on CPU or GPU.

One function chooses the codes; `values` decodes them for quantisation-aware training and `pack` writes the same
codes as bytes, so what is trained is what ships. Every codec reads rows whose length is a multiple of its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

TINY_HALF = 2.0**-24  # smallest positive float16


@cache
def _grid(device: torch.device) -> torch.Tensor:
    from gguf import quants

    quants.IQ2_XXS.init_grid()
    return torch.from_numpy(np.asarray(quants.IQ2_XXS.grid, dtype=np.float32).reshape(256, 8)).to(device)


def _half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, as the file stores it; float32."""
    return x.half().float()


@dataclass
class IQ2XXS:
    """Codes of n blocks of 256: d [n], scale [n, 8] (0 to 15), grid [n, 8, 4], sign [n, 8, 4, 8] (+1, -1)."""

    d: torch.Tensor
    scale: torch.Tensor
    grid: torch.Tensor
    sign: torch.Tensor

    def values(self) -> torch.Tensor:
        """float32 [n, 256]."""
        db = self.d[:, None] * (0.5 + self.scale) * 0.25
        g = _grid(self.d.device)[self.grid] * self.sign
        return (db[:, :, None, None] * g).flatten(1)

    def pack(self) -> np.ndarray:
        """uint8 [n, 66]."""
        grid, negative = self.grid.cpu().numpy().astype(np.uint32), (self.sign < 0).cpu().numpy().astype(np.uint32)
        a0 = sum(grid[:, :, k] << np.uint32(8 * k) for k in range(4))
        seven = sum(negative[..., i] << np.uint32(i) for i in range(7))
        a1 = sum(seven[:, :, k] << np.uint32(7 * k) for k in range(4))
        a1 = a1 | (self.scale.cpu().numpy().astype(np.uint32) << np.uint32(28))
        words = np.stack((a0, a1), -1).astype("<u4").reshape(len(a0), 16)
        d = self.d.cpu().numpy().astype("<f2").reshape(-1, 1)
        return np.concatenate((d.view(np.uint8), words.view(np.uint8)), 1)


def _nearest_grid(a: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best grid row [m, 4] for values a [m, 4, 8] at a scale [m], and its squared error [m]."""
    grid = _grid(a.device)
    norm = grid.square().sum(1)
    score = 2 * (a @ grid.t()) - scale[:, None, None] * norm  # larger is nearer, scale > 0
    best, index = score.max(-1)
    error = a.square().sum((1, 2)) - (best * scale[:, None]).sum(1)
    return index, error


def iq2_xxs(w: torch.Tensor) -> IQ2XXS:
    """Codes of w [..., 256 k], float32: a few scales per group of 32, the exact nearest grid row for each."""
    x = w.reshape(-1, 8, 4, 8).float()
    n = x.shape[0]
    # An eighth sign is the parity of the other seven: an odd count flips the smallest value.
    sign = torch.where(x < 0, -1.0, 1.0)
    odd = sign.prod(-1, keepdim=True) < 0
    smallest = torch.nn.functional.one_hot(x.abs().argmin(-1), 8).bool()
    sign = torch.where(odd & smallest, -sign, sign)
    a = (x * sign).reshape(-1, 4, 8)
    top = a.amax((1, 2)).clamp_min(1e-8)
    best_error, best_scale = torch.full_like(top, float("inf")), top
    for factor in (0.55, 0.65, 0.75, 0.85, 0.95, 1.05):
        scale = top * (factor / 43.0)
        _, error = _nearest_grid(a, scale)
        better = error < best_error
        best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    want = best_scale.view(n, 8)
    d = _half(want.amax(1) * 4 / 15.5).clamp_min(TINY_HALF)
    code = torch.round(want * 4 / d[:, None] - 0.5).clamp(0, 15)
    scale = (d[:, None] * (0.5 + code) * 0.25).reshape(-1)
    index, _ = _nearest_grid(a, scale)
    # One least-squares step on the block's own scale.
    g = _grid(x.device)[index] * ((0.5 + code) * 0.25).reshape(-1, 1, 1)
    fit = (g * a).reshape(n, -1).sum(1) / g.square().reshape(n, -1).sum(1).clamp_min(1e-12)
    d = torch.where(fit > 0, _half(fit).clamp_min(TINY_HALF), d)
    return IQ2XXS(d, code, index.view(n, 8, 4), sign)


@dataclass
class Q2K:
    """Codes of n blocks of 256: d, dmin [n], scale, low [n, 16] (0 to 15), q [n, 16, 16] (0 to 3)."""

    d: torch.Tensor
    dmin: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor
    q: torch.Tensor

    def values(self) -> torch.Tensor:
        """float32 [n, 256]."""
        s, m = self.d[:, None] * self.scale, self.dmin[:, None] * self.low
        return (s[..., None] * self.q - m[..., None]).flatten(1)

    def pack(self) -> np.ndarray:
        """uint8 [n, 84]."""
        scale, low = self.scale.cpu().numpy().astype(np.uint8), self.low.cpu().numpy().astype(np.uint8)
        q = self.q.cpu().numpy().astype(np.uint8).reshape(-1, 2, 4, 32)  # half, 2-bit plane, position
        planes = sum(q[:, :, j] << np.uint8(2 * j) for j in range(4)).astype(np.uint8).reshape(-1, 64)
        d, dmin = (v.cpu().numpy().astype("<f2").reshape(-1, 1).view(np.uint8) for v in (self.d, self.dmin))
        return np.concatenate((scale | (low << np.uint8(4)), planes, d, dmin), 1)


def q2_k(w: torch.Tensor) -> Q2K:
    """Codes of w [..., 256 k], float32: a few spans per group of 16, scales and offsets on a 4-bit grid."""
    x = w.reshape(-1, 16, 16).float()
    low0 = (-x.amin(-1)).clamp_min(0)
    span = (x.amax(-1) + low0).clamp_min(1e-8)
    best, scale, low = torch.full_like(span, float("inf")), span / 3, low0
    for factor in (0.65, 0.8, 0.9, 1.0):
        s, m = span * factor / 3, low0 * factor
        q = torch.round((x + m[..., None]) / s[..., None]).clamp(0, 3)
        # Least squares of x ~ s q - m for these codes.
        qm, xm = q.mean(-1), x.mean(-1)
        var = (q * q).mean(-1) - qm * qm
        s2 = torch.where(var > 1e-6, ((q * x).mean(-1) - qm * xm) / var.clamp_min(1e-6), s).clamp_min(1e-8)
        m2 = (s2 * qm - xm).clamp_min(0)
        error = (s2[..., None] * q - m2[..., None] - x).square().sum(-1)
        better = error < best
        best, scale, low = (
            torch.where(better, error, best),
            torch.where(better, s2, scale),
            torch.where(better, m2, low),
        )
    d, dmin = _half(scale.amax(1) / 15).clamp_min(TINY_HALF), _half(low.amax(1) / 15)
    sc = torch.round(scale / d[:, None]).clamp(1, 15)
    lo = torch.where(dmin[:, None] > 0, torch.round(low / dmin[:, None].clamp_min(1e-12)).clamp(0, 15), 0)
    s, m = d[:, None] * sc, dmin[:, None] * lo
    q = torch.round((x + m[..., None]) / s[..., None]).clamp(0, 3)
    return Q2K(d, dmin, sc, lo, q)


@dataclass
class Q80:
    """Codes of n blocks of 32: d [n], q [n, 32] (-127 to 127)."""

    d: torch.Tensor
    q: torch.Tensor

    def values(self) -> torch.Tensor:
        """float32 [n, 32]."""
        return self.d[:, None] * self.q

    def pack(self) -> np.ndarray:
        """uint8 [n, 34]."""
        d = self.d.cpu().numpy().astype("<f2").reshape(-1, 1).view(np.uint8)
        return np.concatenate((d, self.q.cpu().numpy().astype(np.int8).view(np.uint8)), 1)


def q8_0(w: torch.Tensor) -> Q80:
    """Codes of w [..., 32 k], float32."""
    x = w.reshape(-1, 32).float()
    d = _half(x.abs().amax(1) / 127)
    q = torch.where(d[:, None] > 0, torch.round(x / d[:, None].clamp_min(1e-12)).clamp(-127, 127), 0)
    return Q80(d, q)


CODECS = {"Q8_0": q8_0, "Q2_K": q2_k, "IQ2_XXS": iq2_xxs}


def rounded(w: torch.Tensor, codec: str) -> torch.Tensor:
    """What the file will hold of w, float32, same shape."""
    return CODECS[codec](w).values().view(w.shape)


def encode(w: torch.Tensor, codec: str) -> np.ndarray:
    """Bytes of w [..., row], uint8 [..., row bytes], ready for a GGUF writer."""
    return CODECS[codec](w).pack().reshape(*w.shape[:-1], -1)


def expert_deltas(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, what rounding adds to the routed experts: (gate_up, down), the constants of a training step."""
    out = []
    with torch.no_grad():
        for layer in model.model.layers:
            e = layer.mlp.experts
            up, down = e.gate_up_proj.detach(), e.down_proj.detach()
            out.append((rounded(up, "IQ2_XXS") - up, rounded(down, "Q2_K") - down))
    return out
