"""The router behind its matrix product: scores, the choice of experts and their weights."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap


@triton.jit
def _score(logits):
    """sqrt(softplus), as `ops.softplus` has it: the value itself above 20."""
    e = tl.exp(tl.minimum(logits, 20.0))
    # log(1 + e) loses the digits of a small e: below 0.5 it is the series of 2 atanh(e / (2 + e)).
    z = e / (2.0 + e)
    q = z * z
    series = 2.0 * z * (1.0 + q * (1.0 / 3.0 + q * (0.2 + q * (1.0 / 7.0 + q * (1.0 / 9.0)))))
    soft = tl.where(e < 0.5, series, tl.log(1.0 + e))
    return tl.sqrt(tl.where(logits > 20.0, logits, soft))


@triton.jit
def _router_kernel(
    logits, logits_row, bias, table, ids, positions, scale, chosen, weights,
    E: tl.constexpr, EB: tl.constexpr, TOP: tl.constexpr, TB: tl.constexpr, HASH: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TB)
    logits += row * logits_row
    there = True
    if PADDED:
        there = tl.load(positions + row) >= 0
    if HASH:
        picked = tl.load(table + tl.load(ids + row).to(tl.int64) * TOP + slot, mask=(slot < TOP) & there, other=0)
    else:
        expert = tl.arange(0, EB)
        live = expert < E
        score = _score(tl.load(logits + expert, mask=live, other=0.0).to(tl.float32))
        key = score + tl.load(bias + expert, mask=live, other=0.0) + 0.0  # no -0
        # In order as integers; below them the expert, so that of equal ones the lowest is largest.
        bits = key.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = (bits.to(tl.int64) << 32) | (EB - 1 - expert).to(tl.int64)
        order = tl.where(live, order, -9223372036854775808)
        picked = tl.zeros([TB], tl.int32)
        for i in tl.static_range(TOP):
            best = tl.max(order, axis=0)
            picked = tl.where(slot == i, EB - 1 - (best & (EB - 1)).to(tl.int32), picked)
            order = tl.where(order == best, -9223372036854775808, order)
    w = _score(tl.load(logits + picked, mask=slot < TOP, other=0.0).to(tl.float32))
    w = tl.where(slot < TOP, w, 0.0)
    w = w / tl.sum(w, axis=0) * scale
    if PADDED:
        picked = tl.where(there, picked, -1)
        w = tl.where(there, w, 0.0)
    tl.store(chosen + row * TOP + slot, picked, mask=slot < TOP)
    tl.store(weights + row * TOP + slot, w, mask=slot < TOP)


def _launch(
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor | None,
    scale: float,
    chosen: Tensor,
    weights: Tensor,
    positions: Tensor | None,
) -> None:
    rows, experts = logits.shape
    top = chosen.shape[1]
    if logits.stride(1) != 1 or not chosen.shape == weights.shape == (rows, top) or top > experts:
        raise ValueError(f"logits {list(logits.shape)}, chosen {list(chosen.shape)}, weights {list(weights.shape)}")
    if not chosen.is_contiguous() or not weights.is_contiguous():
        raise ValueError("chosen and weights have to be contiguous")
    _router_kernel[(rows,)](
        logits,
        logits.stride(0),
        logits if bias is None else bias,
        chosen if table is None else table,
        chosen if ids is None else ids,
        chosen if positions is None else positions,
        scale,
        chosen,
        weights,
        E=experts,
        EB=triton.next_power_of_2(experts),
        TOP=top,
        TB=triton.next_power_of_2(top),
        HASH=table is not None,
        PADDED=positions is not None,
        num_warps=1,
        **overlap(early=True),
    )


def route_by_score(
    logits: Tensor, bias: Tensor, scale: float, chosen: Tensor, weights: Tensor, positions: Tensor | None = None
) -> None:
    """`ops.route_by_score` behind the product with the gate. Ties go to the lowest expert.

    Args:
        logits: any float dtype [rows, experts], experts contiguous.
        bias: float32 [experts].
        chosen, weights: int32 and float32 [rows, top], contiguous.
        positions: int32 or int64 [rows], or None; a row with a negative one gets experts -1 of weight 0.
    """
    _launch(logits, bias, None, None, scale, chosen, weights, positions)


def route_by_hash(
    logits: Tensor,
    table: Tensor,
    ids: Tensor,
    scale: float,
    chosen: Tensor,
    weights: Tensor,
    positions: Tensor | None = None,
) -> None:
    """`ops.route_by_hash` behind the product with the gate.

    Args:
        table: int32 [vocab, top], contiguous.
        ids: int32 or int64 [rows], the tokens; of a padding row any that the table holds.
        logits, chosen, weights, positions: as in `route_by_score`.
    """
    if table.shape[1] != chosen.shape[1] or not table.is_contiguous():
        raise ValueError(f"a table of {table.shape[1]} experts a token, {chosen.shape[1]} are wanted")
    _launch(logits, None, table, ids, scale, chosen, weights, positions)
