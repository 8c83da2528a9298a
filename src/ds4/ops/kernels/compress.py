"""The compressor: keep the projections of unfinished blocks, pool finished ones, write their rows into pages.

A frontier is a ring of the last projections of a sequence, [2, ring, width]: values, then gate logits with the position
bias added. A block's row is pooled from the ring and from the rows of the step itself, normed, rotated to the block's
first token, rounded and written to the page that the page table names.

A chunk of one sequence is stored here; a decode step by `step`, which uses the same device functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.rows import (
    KeyPlanes,
    RowPlanes,
    even_of,
    hadamard_pairs,
    load_pairs,
    norm_rope_pairs,
    odd_of,
    rope_pairs,
    write_key,
    write_row,
)

PAGE = 64
"""Rows of a page."""


@dataclass(frozen=True)
class Compressor:
    """One compressor of a layer, and where its rows go.

    Attributes:
        kz: float32 [rows, 2 * width], rows contiguous, 8-byte aligned: values, then gate logits; width is the row's,
            twice that where blocks overlap.
        ape: float32 [ratio, width].
        norm: float32 [row width].
        frontier: float32 [slots, 2, ring, width], the last three axes contiguous.
        pages: planes [pages, 64, ...] of rows, or of keys, which take the Hadamard transform.
    """

    kz: Tensor
    ape: Tensor
    norm: Tensor
    frontier: Tensor
    pages: RowPlanes | KeyPlanes

    @property
    def channels(self) -> int:
        """Channels of a pooled row."""
        return self.norm.shape[0]

    @property
    def overlap(self) -> bool:
        return self.ape.shape[1] == 2 * self.channels

    def args(self) -> tuple[Any, ...]:
        """Pointers and strides in the kernels' order."""
        width = self.ape.shape[1]
        if self.kz.shape[1] != 2 * width or self.kz.stride(1) != 1 or self.kz.stride(0) % 2:
            raise ValueError(f"{list(self.kz.shape)} projections do not fit a compressor of width {width}")
        if isinstance(self.pages, RowPlanes):
            planes = self.pages.pairs()
        else:
            codes, scales, a, b = self.pages.bytes()
            planes = codes, codes, scales, a, a, b
        frontier = (self.frontier, self.frontier.stride(0))
        return self.kz, self.kz[:, width:], self.kz.stride(0) // 2, self.ape, self.norm, *frontier, *planes


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def _pool(
    n, start, k, z, stride, ape, frontier,
    RING: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Row n before the norm, as two [P]: a softmax over the block's tokens for every channel.

    Tokens from `start` on are rows of k and z (stride in pairs), those before it stand in the frontier.
    """
    COUNT: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    W: tl.constexpr = 2 * P if OVERLAP else P
    i = tl.arange(0, P)[None, :]
    top_e, top_o = tl.full([P], -1e30, tl.float32), tl.full([P], -1e30, tl.float32)
    sum_e, sum_o = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    row_e, row_o = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    k_pairs, z_pairs = k.to(tl.pointer_type(tl.int64)), z.to(tl.pointer_type(tl.int64))
    ring_k = frontier.to(tl.pointer_type(tl.int64))
    ring_z = ring_k + RING * W
    for j0 in range(0, COUNT, TILE):
        j = (j0 + tl.arange(0, TILE))[:, None]
        token = n * RATIO - (COUNT - RATIO) + j
        live = (j < COUNT) & (token >= 0)
        at = i
        if OVERLAP:
            at = i + tl.where(j >= RATIO, P, 0)
        fresh = live & (token >= start)
        kept = live & (token < start)
        new = (token - start).to(tl.int64) * stride + at
        old = (token % RING) * W + at
        kk = tl.load(k_pairs + new, mask=fresh, other=0) | tl.load(ring_k + old, mask=kept, other=0)
        zz = tl.load(z_pairs + new, mask=fresh, other=0) | tl.load(ring_z + old, mask=kept, other=0)
        a_e, a_o = load_pairs(ape, (token % RATIO) * W + at, fresh)
        z_e = tl.where(live, even_of(zz) + a_e, float("-inf"))
        z_o = tl.where(live, odd_of(zz) + a_o, float("-inf"))
        new_e, new_o = tl.maximum(top_e, tl.max(z_e, 0)), tl.maximum(top_o, tl.max(z_o, 0))
        w_e, w_o = tl.exp(z_e - new_e[None, :]), tl.exp(z_o - new_o[None, :])
        f_e, f_o = tl.exp(top_e - new_e), tl.exp(top_o - new_o)
        sum_e, sum_o = sum_e * f_e + tl.sum(w_e, 0), sum_o * f_o + tl.sum(w_o, 0)
        row_e, row_o = row_e * f_e + tl.sum(w_e * even_of(kk), 0), row_o * f_o + tl.sum(w_o * odd_of(kk), 0)
        top_e, top_o = new_e, new_o
    return row_e / sum_e, row_o / sum_o


@triton.jit
def _emit(
    n, start, k, z, stride, ape, norm, frontier, codes, tail, scales, codes_stride, tail_stride, scales_stride,
    pages, turn, eps,
    RING: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, HD: tl.constexpr, KEY: tl.constexpr,
    TILE: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Pool, norm, rotate, round and write row n."""
    P: tl.constexpr = HD // 2
    even, odd = _pool(n, start, k, z, stride, ape, frontier, RING, RATIO, OVERLAP, P, TILE)
    page = tl.load(pages + n // PAGE_ROWS).to(tl.int64)
    place = n % PAGE_ROWS
    if KEY:
        i = tl.arange(0, P)
        scale = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / HD + eps)
        w_even, w_odd = load_pairs(norm, i, i < P)
        even, odd = rope_pairs(even * scale * w_even, odd * scale * w_odd, turn, i - (P - 32), i >= P - 32, 32)
        even, odd = hadamard_pairs(even, odd, P)
        write_key(
            even, odd, codes + page * codes_stride + place * P, scales + page * scales_stride + place * (P // 16), P
        )
    else:
        NB: tl.constexpr = HD // 64
        even, odd = tl.reshape(even, [NB, 32]), tl.reshape(odd, [NB, 32])
        even, odd = norm_rope_pairs(even, odd, norm, eps, turn, HD)
        codes += page * codes_stride + place * ((HD - 64) // 2)
        tail += page * tail_stride + place * 32
        scales += page * scales_stride + place * NB
        write_row(even, odd, codes, tail, scales, HD)


@triton.jit
def _keep(k, z, ape, frontier, position, RING: tl.constexpr, RATIO: tl.constexpr, W: tl.constexpr):
    """Store one token's projections into the frontier; W floats, a power of two."""
    c = tl.arange(0, W)
    at = frontier + (position % RING) * W + c
    tl.store(at, tl.load(k + c))
    tl.store(at + RING * W, tl.load(z + c) + tl.load(ape + (position % RATIO) * W + c))


@triton.jit
def store_token(
    row, position, slot, k, z, stride, ape, norm, frontier, frontier_stride,
    codes, tail, scales, codes_stride, tail_stride, scales_stride, pages, turn, eps,
    RING: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, HD: tl.constexpr, KEY: tl.constexpr,
    TILE: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """One token of a sequence of its own: keep it, and emit the block that it completes."""
    k += row.to(tl.int64) * stride * 2
    z += row.to(tl.int64) * stride * 2
    frontier += slot * frontier_stride
    if (position + 1) % RATIO == 0:
        _emit(
            position // RATIO, position, k, z, stride, ape, norm, frontier,
            codes, tail, scales, codes_stride, tail_stride, scales_stride, pages, turn, eps,
            RING, RATIO, OVERLAP, HD, KEY, TILE, PAGE_ROWS,
        )  # fmt: skip
    W: tl.constexpr = 2 * HD if OVERLAP else HD
    _keep(k, z, ape, frontier, position, RING, RATIO, W)


@triton.jit(do_not_specialize=["rows"])
def _chunk_kernel(
    positions, slots, tables, tables_stride, turn, eps, rows,
    k, z, stride, ape, norm, frontier, frontier_stride,
    codes, tail, scales, codes_stride, tail_stride, scales_stride,
    RING: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, HD: tl.constexpr, KEY: tl.constexpr,
    TILE: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """One block that the chunk of one sequence completes, if it does."""
    start = tl.load(positions)
    n = start // RATIO + tl.program_id(0)
    row = (n + 1) * RATIO - 1 - start  # the token that completes it
    if tl.load(positions + row, mask=(row < rows) & (start >= 0), other=-1) >= 0:
        slot = tl.load(slots).to(tl.int64)
        _emit(
            n, start, k, z, stride, ape, norm, frontier + slot * frontier_stride,
            codes, tail, scales, codes_stride, tail_stride, scales_stride, tables + slot * tables_stride,
            turn + row * 64, eps,
            RING, RATIO, OVERLAP, HD, KEY, TILE, PAGE_ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _keep_kernel(
    positions, slots, rows, k, z, stride, ape, frontier, frontier_stride,
    RING: tl.constexpr, RATIO: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The last rows of a chunk go into the frontier: those behind which no row falls on the same slot."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    later = row + RING
    if (position >= 0) & (tl.load(positions + later, mask=later < rows, other=-1) < 0):
        slot = tl.load(slots).to(tl.int64)
        at = row.to(tl.int64) * stride * 2
        _keep(k + at, z + at, ape, frontier + slot * frontier_stride, position, RING, RATIO, W)


# --- launchers --------------------------------------------------------------------------------------------------------


def tile_of(ratio: int, overlap: bool) -> int:
    """Tokens that are pooled at once."""
    count = 2 * ratio if overlap else ratio
    return 16 if count > 8 else int(triton.next_power_of_2(count))


def store_chunk(
    positions: Tensor,
    slots: Tensor,
    eps: float,
    ratio: int,
    compressor: Compressor,
    tables: Tensor,
    turn: Tensor,
) -> None:
    """Emit all blocks that a chunk of one sequence completes, then keep its last projections; two launches.

    Equals `SequenceState.complete_blocks`, `ops.pool_blocks`, `ops.rms_norm`, `ops.apply_rope` and
    `SequenceState.append`.

    Args:
        positions, slots: int32 [rows], consecutive positions of one sequence, padding (-1) at the end.
        turn: float32 [rows, 2, 32] of `rope_tables`, taken ratio - 1 back.
    """
    k, z, stride, ape, norm, frontier, frontier_stride, *planes = compressor.args()
    count, ring, overlap = positions.shape[0], compressor.frontier.shape[2], compressor.overlap
    channels, key = compressor.channels, isinstance(compressor.pages, KeyPlanes)
    _chunk_kernel[(count // ratio + 1,)](
        positions, slots, tables, tables.stride(0), turn, eps, count,
        k, z, stride, ape, norm, frontier, frontier_stride, *planes,
        RING=ring, RATIO=ratio, OVERLAP=overlap, HD=channels, KEY=key, TILE=tile_of(ratio, overlap), PAGE_ROWS=PAGE,
        num_warps=4 if key else 8,
    )  # fmt: skip
    _keep_kernel[(count,)](
        positions, slots, count, k, z, stride, ape, frontier, frontier_stride,
        RING=ring, RATIO=ratio, W=ape.shape[1], num_warps=4,
    )  # fmt: skip
