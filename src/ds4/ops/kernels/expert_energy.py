"""How large the inputs of each expert's matrices are: sums of squares over the pairs that it was given."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.grouping import Groups

_ROWS = 32
"""Pairs that a program loads at once."""


@triton.jit
def _energy_kernel(
    x, x_stride, order, offsets, weights, out,
    N: tl.constexpr, TOP: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of channels of one expert; TOP 1 and INNER: x has a row for each place in `order`."""
    expert = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, ROWS):
        place = start + tl.arange(0, ROWS)
        live = place < end
        pair = tl.load(order + place, mask=live, other=0)
        row = place if INNER else pair // TOP
        at = x + row.to(tl.int64)[:, None] * x_stride + n[None, :]
        v = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if INNER:
            v *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
        total += tl.sum(v * v, 0)
    tl.store(out + expert.to(tl.int64) * N + n, total, mask=n < N)


def expert_energy(x: Tensor, h: Tensor, weights: Tensor, groups: Groups, gate_up: Tensor, down: Tensor) -> None:
    """Sums of squares of what the experts' matrices were given.

    Args:
        x: [tokens, hidden], rows contiguous: the input of gate and up.
        h: [tokens * top, expert_hidden], contiguous, from `gate_up_grouped` or `gate_up_fused`: row i belongs to pair
            `groups.order[i]`.
        weights: float32 [tokens, top], contiguous: of the pairs, which h is yet to be multiplied with.
        groups: of the same pairs.
        gate_up: filled, float32 [experts, hidden]; zeros for an expert without pairs.
        down: filled, float32 [experts, expert_hidden], the routing weight included.
    """
    experts, top = groups.experts, weights.shape[1]
    if (
        gate_up.shape != (experts, x.shape[1])
        or down.shape != (experts, h.shape[1])
        or weights.numel() != h.shape[0]
        or groups.order.shape[0] != h.shape[0]
        or x.shape[0] != weights.shape[0]
    ):
        raise ValueError(
            f"x {list(x.shape)}, h {list(h.shape)}, weights {list(weights.shape)}, {experts} experts,"
            f" gate_up {list(gate_up.shape)}, down {list(down.shape)} do not fit"
        )
    for source, out, inner in ((x, gate_up, False), (h, down, True)):
        n = out.shape[1]
        block = min(256, triton.next_power_of_2(n))
        _energy_kernel[(triton.cdiv(n, block), experts)](
            source, source.stride(0), groups.order, groups.offsets, weights, out,
            N=n, TOP=top, INNER=inner, ROWS=_ROWS, BLOCK=block, num_warps=4,
        )  # fmt: skip
