"""Pairs of tokens and experts in the order of the experts, found on the device.

A pair is a token together with one of its chosen experts, numbered token * top + place. Sorting is stable, so the same
choices give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALL = 512
"""Pairs that one launch sorts by comparing each with all."""

_BLOCK = 256
"""Pairs of one program when there are more."""

_RANKS = 32
"""Pairs of one program when there are few."""


@dataclass(frozen=True)
class Groups:
    """Which pairs go to which expert. Everything is int32 and filled by `group`.

    Attributes:
        order: [pairs], the pairs sorted by expert; what stands behind the last expert's pairs means nothing.
        offsets: [experts + 1], where each expert's pairs begin in `order`.
        used: [experts + 1], the experts that have pairs, in ascending order; their number is the last entry.
        tiles: [experts + 1], how many tiles of `tile_rows` pairs all experts before one have.
        tile_rows: see `tiles`.
        scratch: [blocks, experts], counts of each block of pairs.
    """

    order: Tensor
    offsets: Tensor
    used: Tensor
    tiles: Tensor
    tile_rows: int
    scratch: Tensor

    @classmethod
    def allocate(cls, pairs: int, experts: int, device: torch.device | str, tile_rows: int = 128) -> Groups:
        """Buffers without content for exactly `pairs` pairs."""

        def take(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        blocks = triton.cdiv(pairs, _BLOCK) if pairs > _SMALL else 1
        return cls(
            order=take(pairs),
            offsets=take(experts + 1),
            used=take(experts + 1),
            tiles=take(experts + 1),
            tile_rows=tile_rows,
            scratch=take(blocks, experts),
        )

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1


@triton.jit
def _keys(chosen, place, P, E: tl.constexpr):
    """The experts of pairs, E for those that name none and for places behind the end."""
    expert = tl.load(chosen + place, mask=place < P, other=E)
    return tl.where((expert < 0) | (expert > E), E, expert)


@triton.jit
def _store_tables(counts, offsets, used, tiles, E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr):
    """counts [EP]: pairs of each expert, 0 from E on."""
    e = tl.arange(0, EP)
    real = e < E
    tl.store(offsets + e + 1, tl.cumsum(counts, 0), mask=real)
    tl.store(tiles + e + 1, tl.cumsum((counts + (TILE - 1)) // TILE, 0), mask=real)
    some = (counts > 0).to(tl.int32)
    tl.store(used + tl.cumsum(some, 0) - 1, e, mask=real & (some > 0))
    tl.store(used + E, tl.sum(some, 0))
    tl.store(offsets, 0)
    tl.store(tiles, 0)


@triton.jit(do_not_specialize=["P"])
def _small_kernel(
    chosen, order, offsets, used, tiles, P,
    PP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, PP)
    keys = _keys(chosen, q, P, E)
    if tl.program_id(0) == 0:
        counts = tl.histogram(keys, EP)
        counts = tl.where(tl.arange(0, EP) < E, counts, 0)
        _store_tables(counts, offsets, used, tiles, E, EP, TILE)
    else:
        mine = (tl.program_id(0) - 1) * RANKS + tl.arange(0, RANKS)
        key = _keys(chosen, mine, P, E)[:, None]
        before = (keys[None, :] < key) | ((keys[None, :] == key) & (q[None, :] < mine[:, None]))
        tl.store(order + tl.sum((before & (q[None, :] < P)).to(tl.int32), 1), mine, mask=mine < P)


@triton.jit(do_not_specialize=["P"])
def _count_kernel(chosen, scratch, P, BLOCK: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    block = tl.program_id(0)
    counts = tl.histogram(_keys(chosen, block * BLOCK + tl.arange(0, BLOCK), P, E), EP)
    e = tl.arange(0, EP)
    tl.store(scratch + block * E + e, counts, mask=e < E)


@triton.jit(do_not_specialize=["blocks"])
def _offset_kernel(
    scratch, offsets, used, tiles, blocks,
    E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Turns the counts of blocks into the counts of all blocks before, and the totals into the tables."""
    e = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    for start in range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)[:, None]
        real = (block < blocks) & (e < E)[None, :]
        at = scratch + block * E + e[None, :]
        counts = tl.load(at, mask=real, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=real)
        total += tl.sum(counts, 0)
    _store_tables(total, offsets, used, tiles, E, EP, TILE)


@triton.jit(do_not_specialize=["P"])
def _scatter_kernel(chosen, scratch, offsets, order, P, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, E: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = tl.arange(0, BLOCK)
    key = _keys(chosen, first + i, P, E)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, AT_ONCE):
        j = start + tl.arange(0, AT_ONCE)
        earlier = (_keys(chosen, first + j, P, E)[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    real = key < E
    before = tl.load(scratch + tl.program_id(0) * E + key, mask=real, other=0)
    place = tl.load(offsets + key, mask=real, other=0) + before + rank
    tl.store(order + place, first + i, mask=real)


def group(chosen: Tensor, groups: Groups) -> None:
    """Sort the pairs of `chosen` by expert.

    Args:
        chosen: int32 [tokens, top], contiguous; a token with other numbers than 0 .. experts - 1 has no expert there.
        groups: filled.
    """
    pairs, experts = chosen.numel(), groups.experts
    if groups.order.shape[0] != pairs or not chosen.is_contiguous() or chosen.dtype != torch.int32:
        raise ValueError(f"expected int32 with {groups.order.shape[0]} pairs, got {chosen.dtype} {list(chosen.shape)}")
    padded = triton.next_power_of_2(experts + 1)
    if pairs <= _SMALL:
        _small_kernel[(1 + triton.cdiv(pairs, _RANKS),)](
            chosen, groups.order, groups.offsets, groups.used, groups.tiles, pairs,
            PP=triton.next_power_of_2(pairs), E=experts, EP=padded, RANKS=_RANKS, TILE=groups.tile_rows, num_warps=4,
        )  # fmt: skip
        return
    blocks = triton.cdiv(pairs, _BLOCK)
    _count_kernel[(blocks,)](chosen, groups.scratch, pairs, BLOCK=_BLOCK, E=experts, EP=padded, num_warps=4)
    _offset_kernel[(1,)](
        groups.scratch, groups.offsets, groups.used, groups.tiles, blocks,
        E=experts, EP=padded, TILE=groups.tile_rows, AT_ONCE=16, num_warps=8,
    )  # fmt: skip
    _scatter_kernel[(blocks,)](
        chosen, groups.scratch, groups.offsets, groups.order, pairs, BLOCK=_BLOCK, AT_ONCE=32, E=experts, num_warps=4
    )


@triton.jit
def expert_tile(offsets, tiles, first, count, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """Of this program's tile of experts first .. first + count - 1: the expert (-1: none), the first of its places in
    `order`, and how many there are, at most BM."""
    tile = tl.program_id(1) + tl.load(tiles + first)
    e = tl.arange(0, EP)
    behind = tl.load(tiles + 1 + e, mask=e < E, other=2147483647)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    expert = tl.where(tile < tl.load(tiles + first + count), expert, -1)
    safe = tl.maximum(expert, 0)
    begin = tl.load(offsets + safe) + (tile - tl.load(tiles + safe)) * BM
    return expert, begin, tl.minimum(tl.load(offsets + safe + 1) - begin, BM)


@triton.jit
def tile_pairs(order, begin, count, BM: tl.constexpr):
    """Places in `order` of a tile with room for BM, which of them exist, and their pairs."""
    i = tl.arange(0, BM)
    live = i < count
    return begin + i, live, tl.load(order + begin + i, mask=live, other=0)
