"""RMS norm of rows, and of each head of q with the rotation of its tail, where nothing is quantised behind it.

`quantize.rms_norm_quantise` is the norm before a product with int8 activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, x_row, weight, eps, out, out_row, rows,
    K: tl.constexpr, KB: tl.constexpr, BM: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    k = tl.arange(0, KB)[None, :]
    here = (row < rows) & (k < K)
    values = tl.load(x + row * x_row + k, mask=here, other=0.0).to(tl.float32)
    square = tl.sum(values * values, axis=1)[:, None]
    values = values * (1.0 / tl.sqrt(square / K + eps))
    if WEIGHT:
        values = values * tl.load(weight + k, mask=k < K, other=0.0)
    tl.store(out + row * out_row + k, values.to(out.dtype.element_ty), mask=here)


@triton.jit
def _heads_kernel(
    q, q_row, table, eps, out, heads,
    D: tl.constexpr, DB: tl.constexpr, ROPE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    d = tl.arange(0, DB)[None, :]
    here = (head < heads) & (d < D)
    source = q + row * q_row + head * D
    values = tl.load(source + d, mask=here, other=0.0).to(tl.float32)
    square = tl.sum(values * values, axis=1)[:, None]
    # The other channel of each pair of the tail; both are scaled by the same norm.
    tail = d - (D - ROPE)
    turns = here & (tail >= 0)
    other = tl.load(source + (D - ROPE) + (tail ^ 1), mask=turns, other=0.0).to(tl.float32)
    pair = table + row * ROPE + tail // 2
    turned = (tail >= 0) & (d < D)
    cos = tl.load(pair, mask=turned, other=1.0)
    sin = tl.load(pair + ROPE // 2, mask=turned, other=0.0)
    values = values * cos + tl.where(tail % 2 == 0, -sin, sin) * other
    values = values * (1.0 / tl.sqrt(square / D + eps))
    tl.store(out + (row * heads + head) * D + d, values.to(out.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    """`ops.rms_norm` of each row.

    Args:
        x: any float dtype [rows, channels], channels contiguous, rows at any distance.
        weight: float32 [channels] or None.
        out: any float dtype, as x; may be x itself.
    """
    rows, k = x.shape
    if out.shape != x.shape or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"expected rows of contiguous channels, got {list(x.shape)} and {list(out.shape)}")
    width = triton.next_power_of_2(k)
    together = max(1, min(2048 // width, triton.next_power_of_2(rows)))
    _rms_norm_kernel[(triton.cdiv(rows, together),)](
        x,
        x.stride(0),
        x if weight is None else weight,
        eps,
        out,
        out.stride(0),
        rows,
        K=k,
        KB=width,
        BM=together,
        WEIGHT=weight is not None,
        num_warps=min(16, max(1, width * together // 512)),
    )


def norm_rope_heads(q: Tensor, table: Tensor, heads: int, eps: float, out: Tensor) -> None:
    """`ops.apply_rope` behind the norm of each head without weight, `ops.rms_norm`.

    Args:
        q: any float dtype [rows, heads * head_dim], channels contiguous.
        table: float32 [rows, 2, rope_dim / 2] from `rows.rope_tables`: the cosines of the pairs, then their sines.
        out: any float dtype [rows, heads, head_dim], contiguous.
    """
    rows, d = q.shape[0], q.shape[1] // heads
    if out.shape != (rows, heads, d) or not out.is_contiguous() or q.stride(1) != 1:
        raise ValueError(f"expected {heads} heads of {d} channels, got {list(out.shape)}")
    rope = 2 * table.shape[2]
    if table.shape != (rows, 2, rope // 2) or rope > d or not table.is_contiguous():
        raise ValueError(f"expected a table of {rows} rows, got {list(table.shape)}")
    together = 1 if rows <= 4 else 4
    _heads_kernel[(rows, triton.cdiv(heads, together))](
        q, q.stride(0), table, eps, out, heads,
        D=d, DB=triton.next_power_of_2(d), ROPE=rope, BH=together, num_warps=2 if together == 1 else 4,
    )  # fmt: skip
