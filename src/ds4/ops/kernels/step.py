"""What a decode step does between a layer's projections and its attention, in one launch.

The parts do not depend on one another: the window's row, the two compressors, the index queries, the heads' queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels import intrinsics
from ds4.ops.kernels.attention import load_queries
from ds4.ops.kernels.compress import PAGE, Compressor, store_token, tile_of
from ds4.ops.kernels.indexer import HEADS_BLOCK, round_queries
from ds4.ops.kernels.intrinsics import behind, use_asm
from ds4.ops.kernels.rows import RowPlanes, store_window_row

_HEADS = 8


@dataclass(frozen=True)
class Queries:
    """Projected queries, and where they go.

    Attributes:
        x: float32, bfloat16 or float16 (float32 for index queries) [rows, heads * dim], rows contiguous.
        out: [rows, heads, dim], contiguous: float16 for `attention`, bfloat16 for `index_scores`.
    """

    x: Tensor
    out: Tensor


@triton.jit
def _step_kernel(
    positions, slots, tables, tables_stride, eps,
    kv, kv_stride, kv_norm, kv_turn,
    w_codes, w_tail, w_scales, w_codes_stride, w_tail_stride, w_scales_stride,
    r_k, r_z, r_stride, r_ape, r_norm, r_frontier, r_frontier_stride,
    r_codes, r_tail, r_scales, r_codes_stride, r_tail_stride, r_scales_stride, turn,
    k_k, k_z, k_stride, k_ape, k_norm, k_frontier, k_frontier_stride,
    k_codes, k_tail, k_scales, k_codes_stride, k_tail_stride, k_scales_stride,
    iq, iq_stride, iq_out, q, q_stride, q_out,
    WINDOW: tl.constexpr, HD: tl.constexpr, KD: tl.constexpr, RING: tl.constexpr, RATIO: tl.constexpr,
    OVERLAP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    I_HEADS: tl.constexpr, I_HB: tl.constexpr, Q_HEADS: tl.constexpr, Q_HB: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    """Part 0: the window row. 1 and 2: the compressors of rows and keys. Then index queries, then queries."""
    behind(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    I_PARTS: tl.constexpr = (I_HEADS + I_HB - 1) // I_HB
    if position >= 0:
        slot = tl.load(slots + row).to(tl.int64)
        wide = row.to(tl.int64)
        pages = tables + slot * tables_stride
        if part == 0:
            at = position % WINDOW
            w_codes += slot * w_codes_stride + at * ((HD - 64) // 2)
            w_tail += slot * w_tail_stride + at * 32
            w_scales += slot * w_scales_stride + at * (HD // 64)
            store_window_row(
                kv + wide * kv_stride, kv_norm, eps, kv_turn + row * 64,
                w_codes, w_tail, w_scales, w_codes, w_tail, w_scales, False, HD, False,
            )  # fmt: skip
        elif part == 1:
            if ROWS:
                store_token(
                    row, position, slot, r_k, r_z, r_stride, r_ape, r_norm, r_frontier, r_frontier_stride,
                    r_codes, r_tail, r_scales, r_codes_stride, r_tail_stride, r_scales_stride,
                    pages, turn + row * 64, eps,
                    RING, RATIO, OVERLAP, HD, False, TILE, PAGE_ROWS,
                )  # fmt: skip
        elif part == 2:
            if KEYS:
                store_token(
                    row, position, slot, k_k, k_z, k_stride, k_ape, k_norm, k_frontier, k_frontier_stride,
                    k_codes, k_tail, k_scales, k_codes_stride, k_tail_stride, k_scales_stride,
                    pages, turn + row * 64, eps,
                    RING, RATIO, OVERLAP, KD, True, TILE, PAGE_ROWS,
                )  # fmt: skip
        elif part < 3 + I_PARTS:
            if I_HEADS > 0:
                round_queries(
                    iq + wide * iq_stride, kv_turn + row * 64, iq_out + wide * (I_HEADS * KD),
                    (part - 3) * I_HB, True, I_HEADS, I_HB, KD // 2, ASM,
                )  # fmt: skip
        else:
            if Q_HEADS > 0:
                h = (part - 3 - I_PARTS) * Q_HB + tl.arange(0, Q_HB)
                live = h < Q_HEADS
                low, high = load_queries(q + wide * q_stride, kv_turn + row * 64, eps, h, live, HD)
                to = q_out + (wide * Q_HEADS + h[:, None]) * HD + tl.arange(0, HD // 2)[None, :]
                tl.store(to, low, mask=live[:, None])
                tl.store(to + HD // 2, high, mask=live[:, None])


def store_step(
    positions: Tensor,
    slots: Tensor,
    eps: float,
    kv: Tensor,
    norm: Tensor,
    kv_turn: Tensor,
    ring: RowPlanes,
    ratio: int = 0,
    rows: Compressor | None = None,
    keys: Compressor | None = None,
    tables: Tensor | None = None,
    turn: Tensor | None = None,
    index_queries: Queries | None = None,
    queries: Queries | None = None,
) -> None:
    """All that a layer's decode step stores, and its queries made ready; each row has a sequence of its own.

    Equals `rows.store_window`; for both compressors `ops.pool_blocks`, `ops.rms_norm`, `ops.apply_rope` and the packing
    (after `ops.hadamard` for keys) of the blocks that the rows complete; `indexer.index_queries`;
    `attention.prepare_queries`.

    Args:
        positions, slots: int32 [rows]; rows at negative positions are left out.
        kv, norm, ring: as for `rows.store_window`.
        kv_turn: float32 [rows, 2, 32] of `rope_tables` at the rows' positions, for the window and all queries.
        ratio: tokens of a block.
        rows, keys: the layer's compressors; layers without any have neither, layers without an indexer no keys.
        tables: int32 [slots, pages], the pages of each sequence.
        turn: float32 [rows, 2, 32] of `rope_tables`, taken ratio - 1 back.
        index_queries: what `indexer.index_queries` takes, or None.
        queries: what `attention.prepare_queries` takes, or None.
    """
    if (rows is not None and (tables is None or turn is None)) or (keys is not None and rows is None):
        raise ValueError("compressors of keys go with those of rows, and both with page tables and angles")
    nothing = (norm, norm, 0, norm, norm, norm, 0, norm, norm, norm, 0, 0, 0)
    overlap, head_dim = rows is not None and rows.overlap, ring.head_dim
    index_heads = 0 if index_queries is None else index_queries.out.shape[1]
    heads = 0 if queries is None else queries.out.shape[1]
    parts = 3 + triton.cdiv(index_heads, HEADS_BLOCK) + triton.cdiv(heads, _HEADS)
    _step_kernel[(positions.shape[0], parts)](
        positions,
        slots,
        positions if tables is None else tables,
        0 if tables is None else tables.stride(0),
        eps,
        kv,
        kv.stride(0),
        norm,
        kv_turn,
        *ring.pairs(),
        *(nothing if rows is None else rows.args()),
        kv_turn if turn is None else turn,
        *(nothing if keys is None else keys.args()),
        norm if index_queries is None else index_queries.x,
        0 if index_queries is None else index_queries.x.stride(0),
        norm if index_queries is None else index_queries.out.view(torch.int16),
        norm if queries is None else queries.x,
        0 if queries is None else queries.x.stride(0),
        norm if queries is None else queries.out,
        WINDOW=ring.codes.shape[1],
        HD=head_dim,
        KD=128,
        RING=1 if rows is None else rows.frontier.shape[2],
        RATIO=max(ratio, 1),
        OVERLAP=overlap,
        TILE=tile_of(max(ratio, 1), overlap),
        ROWS=rows is not None,
        KEYS=keys is not None,
        PAGE_ROWS=PAGE,
        I_HEADS=index_heads,
        I_HB=HEADS_BLOCK,
        Q_HEADS=heads,
        Q_HB=_HEADS,
        ASM=use_asm(positions),
        num_warps=8 if rows is not None else 4,
        **intrinsics.overlap(early=True),
    )
