"""Differentiable pieces of the training forward: Sinkhorn, straight-through rounding, rotary channels, pooling.

Everything here is written for `torch.compile`; the Sinkhorn iteration is one Triton kernel each way on a GPU and plain
torch on a CPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only machines check the forward with plain torch
    triton = None

STREAMS = 4
ITERATIONS = 20
STEPS = 2 * ITERATIONS - 1  # one column step, then 19 times row and column
EPS = 1e-6


def sinkhorn_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Doubly-stochastic matrices [n, 16] of logits [n, 16] and all divisors [39, 4, n] (V4 graph, hc_pre)."""
    c = torch.softmax(logits.float().view(-1, STREAMS, STREAMS), -1) + EPS
    sums = []
    for step in range(STEPS):
        axis = 1 if step % 2 == 0 else 2
        s = c.sum(axis, keepdim=True) + EPS
        sums.append(s.flatten(1).t())
        c = c / s
    return c.reshape(-1, STREAMS * STREAMS), torch.stack(sums).contiguous()


def sinkhorn_backward_reference(
    grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Gradient of the logits [n, 16]; walks the iteration back with input = output * divisor."""
    g, y = grad.view(-1, STREAMS, STREAMS), out.view(-1, STREAMS, STREAMS)
    for step in reversed(range(STEPS)):
        axis = 1 if step % 2 == 0 else 2
        s = sums[step].t().unsqueeze(axis)
        g = (g - (g * y).sum(axis, keepdim=True)) / s
        y = y * s
    p = torch.softmax(logits.float().view(-1, STREAMS, STREAMS), -1)
    return (p * (g - (g * p).sum(-1, keepdim=True))).reshape(-1, STREAMS * STREAMS)


if triton is not None:

    @triton.jit
    def _divide(a, b, c, d, eps):
        s = a + b + c + d + eps
        r = 1.0 / s
        return a * r, b * r, c * r, d * r, s

    @triton.jit
    def _softmax4(a, b, c, d):
        m = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        a, b, c, d = tl.exp(a - m), tl.exp(b - m), tl.exp(c - m), tl.exp(d - m)
        r = 1.0 / (a + b + c + d)
        return a * r, b * r, c * r, d * r

    @triton.jit
    def _back(g0, g1, g2, g3, y0, y1, y2, y3, s):
        dot = g0 * y0 + g1 * y1 + g2 * y2 + g3 * y3
        r = 1.0 / s
        return (g0 - dot) * r, (g1 - dot) * r, (g2 - dot) * r, (g3 - dot) * r, y0 * s, y1 * s, y2 * s, y3 * s

    @triton.jit
    def _softmax_back(g0, g1, g2, g3, p0, p1, p2, p3):
        dot = g0 * p0 + g1 * p1 + g2 * p2 + g3 * p3
        return p0 * (g0 - dot), p1 * (g1 - dot), p2 * (g2 - dot), p3 * (g3 - dot)

    @triton.jit
    def _forward_kernel(x_ptr, y_ptr, sums_ptr, n, EPS_: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok = row < n
        x = x_ptr + row * 16
        a0, a1, a2, a3 = _softmax4(
            tl.load(x, ok, 0.0), tl.load(x + 1, ok, 0.0), tl.load(x + 2, ok, 0.0), tl.load(x + 3, ok, 0.0)
        )
        b0, b1, b2, b3 = _softmax4(
            tl.load(x + 4, ok, 0.0), tl.load(x + 5, ok, 0.0), tl.load(x + 6, ok, 0.0), tl.load(x + 7, ok, 0.0)
        )
        c0, c1, c2, c3 = _softmax4(
            tl.load(x + 8, ok, 0.0), tl.load(x + 9, ok, 0.0), tl.load(x + 10, ok, 0.0), tl.load(x + 11, ok, 0.0)
        )
        d0, d1, d2, d3 = _softmax4(
            tl.load(x + 12, ok, 0.0), tl.load(x + 13, ok, 0.0), tl.load(x + 14, ok, 0.0), tl.load(x + 15, ok, 0.0)
        )
        a0, a1, a2, a3 = a0 + EPS_, a1 + EPS_, a2 + EPS_, a3 + EPS_
        b0, b1, b2, b3 = b0 + EPS_, b1 + EPS_, b2 + EPS_, b3 + EPS_
        c0, c1, c2, c3 = c0 + EPS_, c1 + EPS_, c2 + EPS_, c3 + EPS_
        d0, d1, d2, d3 = d0 + EPS_, d1 + EPS_, d2 + EPS_, d3 + EPS_
        out = sums_ptr + row
        for step in range(39):
            if step % 2 == 0:
                a0, b0, c0, d0, s0 = _divide(a0, b0, c0, d0, EPS_)
                a1, b1, c1, d1, s1 = _divide(a1, b1, c1, d1, EPS_)
                a2, b2, c2, d2, s2 = _divide(a2, b2, c2, d2, EPS_)
                a3, b3, c3, d3, s3 = _divide(a3, b3, c3, d3, EPS_)
            else:
                a0, a1, a2, a3, s0 = _divide(a0, a1, a2, a3, EPS_)
                b0, b1, b2, b3, s1 = _divide(b0, b1, b2, b3, EPS_)
                c0, c1, c2, c3, s2 = _divide(c0, c1, c2, c3, EPS_)
                d0, d1, d2, d3, s3 = _divide(d0, d1, d2, d3, EPS_)
            tl.store(out, s0, ok)
            tl.store(out + n, s1, ok)
            tl.store(out + 2 * n, s2, ok)
            tl.store(out + 3 * n, s3, ok)
            out += 4 * n
        y = y_ptr + row * 16
        tl.store(y, a0, ok), tl.store(y + 1, a1, ok), tl.store(y + 2, a2, ok), tl.store(y + 3, a3, ok)
        tl.store(y + 4, b0, ok), tl.store(y + 5, b1, ok), tl.store(y + 6, b2, ok), tl.store(y + 7, b3, ok)
        tl.store(y + 8, c0, ok), tl.store(y + 9, c1, ok), tl.store(y + 10, c2, ok), tl.store(y + 11, c3, ok)
        tl.store(y + 12, d0, ok), tl.store(y + 13, d1, ok), tl.store(y + 14, d2, ok), tl.store(y + 15, d3, ok)

    @triton.jit
    def _load16(p, ok):
        return (
            tl.load(p, ok, 0.0), tl.load(p + 1, ok, 0.0), tl.load(p + 2, ok, 0.0), tl.load(p + 3, ok, 0.0),
            tl.load(p + 4, ok, 0.0), tl.load(p + 5, ok, 0.0), tl.load(p + 6, ok, 0.0), tl.load(p + 7, ok, 0.0),
            tl.load(p + 8, ok, 0.0), tl.load(p + 9, ok, 0.0), tl.load(p + 10, ok, 0.0), tl.load(p + 11, ok, 0.0),
            tl.load(p + 12, ok, 0.0), tl.load(p + 13, ok, 0.0), tl.load(p + 14, ok, 0.0), tl.load(p + 15, ok, 0.0),
        )  # fmt: skip

    @triton.jit
    def _backward_kernel(g_ptr, y_ptr, sums_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok = row < n
        ga0, ga1, ga2, ga3, gb0, gb1, gb2, gb3, gc0, gc1, gc2, gc3, gd0, gd1, gd2, gd3 = _load16(g_ptr + row * 16, ok)
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _load16(y_ptr + row * 16, ok)
        sums = sums_ptr + row + 38 * 4 * n
        for step in range(39):
            s0 = tl.load(sums, ok, 1.0)
            s1 = tl.load(sums + n, ok, 1.0)
            s2 = tl.load(sums + 2 * n, ok, 1.0)
            s3 = tl.load(sums + 3 * n, ok, 1.0)
            if step % 2 == 0:
                ga0, gb0, gc0, gd0, a0, b0, c0, d0 = _back(ga0, gb0, gc0, gd0, a0, b0, c0, d0, s0)
                ga1, gb1, gc1, gd1, a1, b1, c1, d1 = _back(ga1, gb1, gc1, gd1, a1, b1, c1, d1, s1)
                ga2, gb2, gc2, gd2, a2, b2, c2, d2 = _back(ga2, gb2, gc2, gd2, a2, b2, c2, d2, s2)
                ga3, gb3, gc3, gd3, a3, b3, c3, d3 = _back(ga3, gb3, gc3, gd3, a3, b3, c3, d3, s3)
            else:
                ga0, ga1, ga2, ga3, a0, a1, a2, a3 = _back(ga0, ga1, ga2, ga3, a0, a1, a2, a3, s0)
                gb0, gb1, gb2, gb3, b0, b1, b2, b3 = _back(gb0, gb1, gb2, gb3, b0, b1, b2, b3, s1)
                gc0, gc1, gc2, gc3, c0, c1, c2, c3 = _back(gc0, gc1, gc2, gc3, c0, c1, c2, c3, s2)
                gd0, gd1, gd2, gd3, d0, d1, d2, d3 = _back(gd0, gd1, gd2, gd3, d0, d1, d2, d3, s3)
            sums -= 4 * n
        x = x_ptr + row * 16
        a0, a1, a2, a3 = _softmax4(
            tl.load(x, ok, 0.0), tl.load(x + 1, ok, 0.0), tl.load(x + 2, ok, 0.0), tl.load(x + 3, ok, 0.0)
        )
        b0, b1, b2, b3 = _softmax4(
            tl.load(x + 4, ok, 0.0), tl.load(x + 5, ok, 0.0), tl.load(x + 6, ok, 0.0), tl.load(x + 7, ok, 0.0)
        )
        c0, c1, c2, c3 = _softmax4(
            tl.load(x + 8, ok, 0.0), tl.load(x + 9, ok, 0.0), tl.load(x + 10, ok, 0.0), tl.load(x + 11, ok, 0.0)
        )
        d0, d1, d2, d3 = _softmax4(
            tl.load(x + 12, ok, 0.0), tl.load(x + 13, ok, 0.0), tl.load(x + 14, ok, 0.0), tl.load(x + 15, ok, 0.0)
        )
        ga0, ga1, ga2, ga3 = _softmax_back(ga0, ga1, ga2, ga3, a0, a1, a2, a3)
        gb0, gb1, gb2, gb3 = _softmax_back(gb0, gb1, gb2, gb3, b0, b1, b2, b3)
        gc0, gc1, gc2, gc3 = _softmax_back(gc0, gc1, gc2, gc3, c0, c1, c2, c3)
        gd0, gd1, gd2, gd3 = _softmax_back(gd0, gd1, gd2, gd3, d0, d1, d2, d3)
        y = dx_ptr + row * 16
        tl.store(y, ga0, ok), tl.store(y + 1, ga1, ok), tl.store(y + 2, ga2, ok), tl.store(y + 3, ga3, ok)
        tl.store(y + 4, gb0, ok), tl.store(y + 5, gb1, ok), tl.store(y + 6, gb2, ok), tl.store(y + 7, gb3, ok)
        tl.store(y + 8, gc0, ok), tl.store(y + 9, gc1, ok), tl.store(y + 10, gc2, ok), tl.store(y + 11, gc3, ok)
        tl.store(y + 12, gd0, ok), tl.store(y + 13, gd1, ok), tl.store(y + 14, gd2, ok), tl.store(y + 15, gd3, ok)


@torch.library.custom_op("tiny::sinkhorn", mutates_args=())
def sinkhorn(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sinkhorn_reference` with a gradient: float32 [n, 16] -> ([n, 16], divisors [39, 4, n])."""
    if not logits.is_cuda:
        return sinkhorn_reference(logits)
    logits = logits.contiguous()
    n = logits.shape[0]
    out = torch.empty_like(logits)
    sums = torch.empty(STEPS, STREAMS, n, device=logits.device)
    _forward_kernel[(triton.cdiv(n, 128),)](logits, out, sums, n, EPS_=EPS, BLOCK=128, num_warps=4)
    return out, sums


@sinkhorn.register_fake
def _(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(logits, memory_format=torch.contiguous_format), logits.new_empty(
        STEPS, STREAMS, logits.shape[0]
    )


@torch.library.custom_op("tiny::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Gradient of `sinkhorn`'s logits, float32 [n, 16]."""
    if not logits.is_cuda:
        return sinkhorn_backward_reference(grad, out, sums, logits)
    grad, out, sums, logits = grad.contiguous(), out.contiguous(), sums.contiguous(), logits.contiguous()
    n = logits.shape[0]
    dx = torch.empty_like(logits)
    _backward_kernel[(triton.cdiv(n, 128),)](grad, out, sums, logits, dx, n, BLOCK=128, num_warps=4)
    return dx


@sinkhorn_backward.register_fake
def _(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0], output[1], inputs[0])


def _backward(ctx, grad, _grad_sums):
    return sinkhorn_backward(grad.contiguous(), *ctx.saved_tensors)


sinkhorn.register_autograd(_backward, setup_context=_setup)


def rms(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """x / root-mean-square over the last axis, times `weight`; float32 inside, dtype of x outside."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates interleaved pairs of the last 2 * cos.shape[-1] channels; cos, sin float32 broadcast to them."""
    width = 2 * cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:].float().unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    tail = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((head, tail.to(x.dtype)), -1)


def rope_tables(shape, length: int, device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin [length, rope_dim / 2] of plain layers ("main") and of those with a compressor ("compress", YaRN)."""
    half = torch.arange(0, shape.rope_dim, 2, dtype=torch.float32) / shape.rope_dim
    position = torch.arange(length, dtype=torch.float32)
    plain = shape.rope_base**-half
    freq = shape.compress_rope_base**-half

    def channel(rotations: float) -> float:
        span = math.log(shape.yarn_original_context / (2 * math.pi * rotations))
        return shape.rope_dim * span / (2 * math.log(shape.compress_rope_base))

    low, high = math.floor(channel(shape.yarn_beta_fast)), math.ceil(channel(shape.yarn_beta_slow))
    low, high = max(low, 0), min(high, shape.rope_dim - 1)
    ramp = ((torch.arange(len(freq), dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    freq = freq * (1 - ramp) + freq / shape.yarn_factor * ramp
    tables = {}
    for name, f in (("main", plain), ("compress", freq)):
        angle = torch.outer(position, f)
        tables[name] = (angle.cos().to(device), angle.sin().to(device))
    return tables


def round_fp8(x: torch.Tensor, channels: int) -> torch.Tensor:
    """E4M3 round trip of the first `channels` channels in blocks of 64, gradient passed straight through."""
    v = x[..., :channels].float().unflatten(-1, (-1, 64))
    peak = v.detach().abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 448.0)))
    q = (v.detach() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    v = v + (q - v.detach())
    return torch.cat((v.flatten(-2).to(x.dtype), x[..., channels:]), -1)


def hadamard_matrix(n: int, device=None, dtype=torch.float32) -> torch.Tensor:
    """Sylvester matrix of +1 and -1, [n, n]."""
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h.to(device, dtype)


def round_fp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 round trip in blocks of 32 of the last axis, gradient passed straight through."""
    v = x.float().unflatten(-1, (-1, 32))
    d = v.detach()
    peak = d.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 6.0)))
    a = (d / scale).abs()
    q = torch.where(
        a < 2, torch.round(a * 2) * 0.5, torch.where(a < 4, torch.round(a), torch.round(a * 0.5) * 2)
    ).clamp_max(6)
    q = torch.copysign(q, d) * scale
    return (v + (q - d)).flatten(-2).to(x.dtype)


def pool(k: torch.Tensor, z: torch.Tensor, ape: torch.Tensor, ratio: int, overlap: bool) -> torch.Tensor:
    """Compressed rows [batch, tokens / ratio, width] before their norm, float32 (V4 graph, Compressor).

    k, z: [batch, tokens, coff * width] with coff 2 when `overlap`; ape [ratio, coff * width].
    """
    k = k.unflatten(1, (-1, ratio)).float()
    z = z.unflatten(1, (-1, ratio)).float() + ape.float()
    if overlap:
        width = k.shape[-1] // 2
        k = torch.cat((F.pad(k[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), k[..., width:]), 2)
        z = torch.cat((F.pad(z[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-1e30), z[..., width:]), 2)
    return (k * torch.softmax(z, 2)).sum(2)
