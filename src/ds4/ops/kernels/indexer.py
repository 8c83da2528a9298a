"""The indexer: queries rounded as the keys are, scores of all visible keys, and the k best of them.

Channels of a key are held even and odd apart, as its bytes are: scores are sums over channels, whose order is free. The
Hadamard transform of 128 channels is then one of 64 over the sums and one over the differences of neighbours.

The k best are found without sorting: the k-th largest score is built from its top bits down, two bits a round, by
counting. Beyond `SELECT_BLOCK` keys each block first names its own k best, then the same is done among those. Both keep
the order of the keys, so ties go to the lowest row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap, use_asm
from ds4.ops.kernels.rows import (
    KeyPlanes,
    bf16_bits,
    fp4_field,
    fp4_size,
    fp4_value,
    load_pairs,
    power_of_two,
    rope_pairs,
)

DIM = 128
SELECT_BLOCK = 8192
"""Keys that one program chooses from; a row with more takes two launches."""
FEW_BLOCKS = 4
"""Candidates of up to so many blocks are merged in a smaller tile, where there is room for many more."""
HEADS_BLOCK = 16
"""Heads whose queries a program rounds."""
_HALF = DIM // 2


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def _fp4_round(x, scale, inverse):
    """x rounded to FP4 under a scale."""
    code = fp4_size(x * inverse) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return fp4_value(code) * scale


@triton.jit
def _sylvester(P: tl.constexpr):
    """The matrix of signs, float32 [P, P], P at most 256."""
    i = tl.arange(0, P)
    bit = i[:, None] & i[None, :]
    bit ^= bit >> 4
    bit ^= bit >> 2
    bit ^= bit >> 1
    return tl.where((bit & 1) == 1, -1.0, 1.0)


@triton.jit
def round_queries(
    x, table, out, first, live, HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr, ASM: tl.constexpr
):
    """Heads first .. first + HB - 1 of a row, rotated, transformed and rounded; the pointers come advanced to the row.

    live: whether the row is one; zeros are written if not.
    """
    h = first + tl.arange(0, HB)[:, None]
    i = tl.arange(0, P)[None, :]
    even, odd = load_pairs(x, h * P + i, (h < HEADS) & live)
    even, odd = rope_pairs(even, odd, table, i - (P - 32), i >= P - 32, 32)
    matrix = _sylvester(P)
    scale: tl.constexpr = (2 * P) ** -0.5
    if ASM:
        total = tl.dot(even + odd, matrix, input_precision="tf32x3") * scale
        rest = tl.dot(even - odd, matrix, input_precision="tf32x3") * scale
    else:
        total = tl.dot(even + odd, matrix, input_precision="ieee") * scale
        rest = tl.dot(even - odd, matrix, input_precision="ieee") * scale
    NB: tl.constexpr = P // 16
    e, o = tl.reshape(total, [HB, NB, 16]), tl.reshape(rest, [HB, NB, 16])
    field = fp4_field(tl.maximum(tl.max(tl.abs(e), 2), tl.max(tl.abs(o), 2)))
    size, inverse = power_of_two(field)[:, :, None], power_of_two(254 - field)[:, :, None]
    head = (first + tl.arange(0, HB))[:, None, None]
    at = out + head * (2 * P) + tl.arange(0, NB)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    there = head < HEADS
    tl.store(at, bf16_bits(_fp4_round(e, size, inverse)).to(tl.int16), mask=there)
    tl.store(at + P, bf16_bits(_fp4_round(o, size, inverse)).to(tl.int16), mask=there)


@triton.jit
def _queries_kernel(
    x, x_stride, table, positions, out, HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr, ASM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(positions + row) >= 0
    first = tl.program_id(1) * HB
    round_queries(x + row * x_stride, table + row * 64, out + row * (HEADS * 2 * P), first, live, HEADS, HB, P, ASM)


@triton.jit
def _operand(bits, ASM: tl.constexpr):
    """Bits of bfloat16, int16, as what a dot takes: themselves, or float32 for the interpreter."""
    if ASM:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(codes, scales, pages, codes_stride, scales_stride, n, live, P: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Keys n [rows] of a sequence: even and odd channels, float32 [rows, P] each. scales as int32 words."""
    page = tl.load(pages + n // PAGE_ROWS, mask=live, other=0).to(tl.int64)
    place = n % PAGE_ROWS
    i = tl.arange(0, P)[None, :]
    code_at = page * codes_stride + place * P
    byte = tl.load(codes + code_at[:, None] + i, mask=live[:, None], other=0).to(tl.int32)
    word = tl.load(scales + page * scales_stride + place, mask=live, other=0x7F7F7F7F)
    size = power_of_two((word[:, None] >> (8 * (i // 16))) & 255)
    return fp4_value(byte) * size, fp4_value(byte >> 4) * size


@triton.jit
def _score(even, odd, q_even, q_odd, weight, ASM: tl.constexpr):
    """Scores [keys] of one query: q [heads, P] twice, weight [heads]."""
    if ASM:
        dot = tl.dot(even.to(tl.bfloat16), tl.trans(q_even))
        dot = tl.dot(odd.to(tl.bfloat16), tl.trans(q_odd), dot)
    else:
        dot = tl.dot(even, tl.trans(q_even), input_precision="ieee")
        dot = tl.dot(odd, tl.trans(q_odd), dot, input_precision="ieee")
    return tl.sum(tl.maximum(dot, 0.0) * weight[None, :], 1)


@triton.jit
def _load_query(q, weights, row, weights_stride, weight_scale, HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr):
    h, i = tl.arange(0, HB), tl.arange(0, P)[None, :]
    live = h < HEADS
    at = q + (row * HEADS + h[:, None]) * (2 * P) + i
    even, odd = tl.load(at, mask=live[:, None], other=0), tl.load(at + P, mask=live[:, None], other=0)
    return even, odd, tl.load(weights + row * weights_stride + h, mask=live, other=0.0) * weight_scale


@triton.jit
def _scores_kernel(
    q, weights, weights_stride, weight_scale, positions, slots, tables, tables_stride,
    codes, scales, codes_stride, scales_stride, out, out_stride,
    RATIO: tl.constexpr, TOP: tl.constexpr, HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr,
    KEYS: tl.constexpr, PAGE_ROWS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    """Decode: one query against a share of its keys, KEYS at a time."""
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    step = tl.num_programs(1)
    if visible > TOP:
        pages = tables + tl.load(slots + row).to(tl.int64) * tables_stride
        even, odd, weight = _load_query(q, weights, row, weights_stride, weight_scale, HEADS, HB, P)
        q_even, q_odd = _operand(even, ASM), _operand(odd, ASM)
        for tile in range(tl.program_id(1), (visible + KEYS - 1) // KEYS, step):
            n = tile * KEYS + tl.arange(0, KEYS)
            live = n < visible
            k_even, k_odd = _load_keys(codes, scales, pages, codes_stride, scales_stride, n, live, P, PAGE_ROWS)
            score = _score(k_even, k_odd, q_even, q_odd, weight, ASM)
            tl.store(out + row * out_stride + n, score, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _chunk_scores_kernel(
    q, weights, weights_stride, weight_scale, positions, slots, tables, tables_stride,
    codes, scales, codes_stride, scales_stride, out, out_stride, rows,
    RATIO: tl.constexpr, TOP: tl.constexpr, HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, ONCE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Prefill: a tile of queries of one sequence against a tile of keys, which is read and unpacked once."""
    first = tl.program_id(1) * QUERIES
    each = first + tl.arange(0, QUERIES)
    most = tl.max((tl.load(positions + each, mask=each < rows, other=-1) + 1) // RATIO, 0)
    start = tl.program_id(0) * KEYS
    if (most > TOP) & (start < most):
        pages = tables + tl.load(slots + first).to(tl.int64) * tables_stride
        n = start + tl.arange(0, KEYS)
        k_even, k_odd = _load_keys(codes, scales, pages, codes_stride, scales_stride, n, n < most, P, PAGE_ROWS)
        keys = tl.reshape(tl.permute(tl.join(k_even, k_odd), 0, 2, 1), [KEYS, 2 * P])
        keys = keys.to(tl.bfloat16) if ASM else keys
        source = q.to(tl.pointer_type(tl.bfloat16)) if ASM else q
        column = tl.arange(0, ONCE * HB)
        head = column % HB
        for row in tl.range(first, min(first + QUERIES, rows), ONCE, num_stages=2):
            query = (row + column // HB).to(tl.int64)
            live = (query < rows) & (head < HEADS)
            at = source + (query * HEADS + head)[:, None] * (2 * P) + tl.arange(0, 2 * P)[None, :]
            operand = tl.load(at, mask=live[:, None], other=0)
            weight = tl.load(weights + query * weights_stride + head, mask=live, other=0.0) * weight_scale
            if ASM:
                dot = tl.dot(keys, tl.trans(operand))
            else:
                dot = tl.dot(keys, tl.trans(_operand(operand, ASM)), input_precision="ieee")
            score = tl.sum(tl.reshape(tl.maximum(dot, 0.0) * weight[None, :], [KEYS, ONCE, HB]), 2)
            token = row + tl.arange(0, ONCE)
            visible = (tl.load(positions + token, mask=token < rows, other=-1) + 1) // RATIO
            seen = (n[:, None] < visible[None, :]) & (visible[None, :] > TOP)
            tl.store(out + token.to(tl.int64)[None, :] * out_stride + n[:, None], score, mask=seen)


@triton.jit
def _order(score, live):
    """int32 that sorts like the score; where not live the lowest of all, which no score is. Both zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(live, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@triton.jit
def _signed(unsigned):
    """The int32 at this place, an int64, among all of them counted from 0."""
    return (unsigned - 2147483648).to(tl.int32)


@triton.jit
def _best(key, k):
    """Which of the keys int32 [n] are the k largest, the first ones of equal ones, and where each goes among them.

    There have to be at least k keys above the lowest int32.
    """
    lowest = tl.cast(0, tl.int64)
    step = tl.cast(1 << 30, tl.int64)
    exact = tl.cast(0, tl.int32)
    while step > 0:
        one = (key >= _signed(lowest + step)).to(tl.int64)
        two = (key >= _signed(lowest + 2 * step)).to(tl.int64)
        three = (key >= _signed(lowest + 3 * step)).to(tl.int64)
        counts = tl.sum(one | (two << 20) | (three << 40), 0)
        first, second, third = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        up = (first >= k).to(tl.int64) + (second >= k).to(tl.int64) + (third >= k).to(tl.int64)
        lowest += up * step
        # Where just k are left, the further bits of the threshold do not matter.
        exact = (tl.where(up == 3, third, tl.where(up == 2, second, first)) == k).to(tl.int32)
        step = tl.where(exact > 0, 0, step >> 2)
    threshold = _signed(lowest - exact)
    above, tied = key > threshold, key == threshold
    both = (above.to(tl.int64) << 32) | tied.to(tl.int64)
    until = tl.cumsum(both, 0)
    room = k - tl.sum(above.to(tl.int32), 0)
    ties = (until & 0x7FFFFFFF).to(tl.int32)
    chosen = above | (tied & (ties <= room))
    place = (until >> 32).to(tl.int32) + tl.minimum(ties, room) - 1
    return chosen, place


@triton.jit
def _select_kernel(
    scores, scores_stride, positions, out, found_key, found_row,
    RATIO: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, TOP_BLOCK: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    """The TOP best of one block of a row's keys: the result if there is one block (LAST), else candidates."""
    behind(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    count = tl.minimum(visible - block * BLOCK, BLOCK)
    if LAST:
        if visible <= TOP:
            every = tl.arange(0, TOP_BLOCK)
            tl.store(out + row * TOP + every, tl.where(every < visible, every, -1), mask=every < TOP)
        else:
            n = tl.arange(0, BLOCK)
            live = n < visible
            key = _order(tl.load(scores + row * scores_stride + n, mask=live, other=0.0), live)
            chosen, place = _best(key, TOP)
            tl.store(out + row * TOP + place, n, mask=chosen)
    else:
        if (visible > TOP) & (count > 0):
            at = (row * tl.num_programs(1) + block) * TOP
            n = block * BLOCK + tl.arange(0, BLOCK)
            live = n < visible
            key = _order(tl.load(scores + row * scores_stride + n, mask=live, other=0.0), live)
            if count <= TOP:
                there = tl.arange(0, BLOCK)
                tl.store(found_key + at + there, key, mask=live & (there < TOP))
                tl.store(found_row + at + there, n, mask=live & (there < TOP))
            else:
                chosen, place = _best(key, TOP)
                tl.store(found_key + at + place, key, mask=chosen)
                tl.store(found_row + at + place, n, mask=chosen)


@triton.jit
def _merge_found(
    row, visible, out, found_key, found_row, blocks, TOP: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr
):  # fmt: skip
    """The TOP best of the first FOUND candidates."""
    c = tl.arange(0, FOUND)
    block = c // TOP
    live = (block < blocks) & (c % TOP < tl.minimum(visible - block * BLOCK, TOP))
    at = row * blocks * TOP + c
    key = tl.load(found_key + at, mask=live, other=-2147483648)
    chosen, place = _best(key, TOP)
    tl.store(out + row * TOP + place, tl.load(found_row + at, mask=chosen, other=0), mask=chosen)


@triton.jit
def _merge_kernel(
    positions, out, found_key, found_row, blocks,
    RATIO: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr, FEW: tl.constexpr,
    FEW_FOUND: tl.constexpr, TOP_BLOCK: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    """The TOP best of all blocks' candidates."""
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    if visible <= TOP:
        n = tl.arange(0, TOP_BLOCK)
        tl.store(out + row * TOP + n, tl.where(n < visible, n, -1), mask=n < TOP)
    elif (FEW > 0) & (visible <= FEW * BLOCK):
        _merge_found(row, visible, out, found_key, found_row, blocks, TOP, BLOCK, FEW_FOUND)
    else:
        _merge_found(row, visible, out, found_key, found_row, blocks, TOP, BLOCK, FOUND)


# --- launchers --------------------------------------------------------------------------------------------------------


def index_queries(x: Tensor, table: Tensor, positions: Tensor, out: Tensor) -> None:
    """`ops.fp4_round_trip(ops.hadamard(ops.apply_rope(x, ...)))` of every head.

    Args:
        x: float32 [rows, heads * 128], rows contiguous, 8-byte aligned.
        table: float32 [rows, 2, 32] of `rope_tables`.
        positions: int32 [rows].
        out: bfloat16 [rows, heads, 128], the even channels, then the odd ones; exact.
    """
    heads = out.shape[1]
    _queries_kernel[(x.shape[0], triton.cdiv(heads, HEADS_BLOCK))](
        x, x.stride(0), table, positions, out.view(torch.int16),
        HEADS=heads, HB=HEADS_BLOCK, P=_HALF, ASM=use_asm(x), num_warps=4,
    )  # fmt: skip


def _key_args(tables: Tensor, pages: KeyPlanes) -> tuple[Any, ...]:
    codes, scales = pages.codes, pages.scales.view(torch.int32)
    return tables, tables.stride(0), codes, scales, codes.stride(0), scales.stride(0)


def index_scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    pages: KeyPlanes,
    ratio: int,
    top: int,
    scores: Tensor,
    splits: int = 1,
    queries: int = 0,
    keys: int = 0,
) -> None:
    """`ops.index_scores(q, weights * scale, keys)` over the keys that each row sees, if these are more than `top`.

    Args:
        q: bfloat16 [rows, heads, 128] of `index_queries`.
        weights: float32 [rows, heads], rows contiguous.
        positions, slots: int32 [rows]; position t sees (t + 1) // ratio keys, padding (-1) none.
        tables: int32 [slots, pages].
        pages: planes [pages, 64, ...] of keys.
        scores: float32 [rows, most keys], those of other keys and rows stay as they are.
        splits: decode: programs that share a row's keys.
        queries: prefill: rows are consecutive tokens of one sequence and taken this many at a time; 0 for decode.
        keys: how many a program takes at once, 0 for the usual.

    Raises:
        ValueError: an odd number of queries at a time.
    """
    table, table_stride, *planes = _key_args(tables, pages)
    rows, heads, _ = q.shape
    head_block = max(16, triton.next_power_of_2(heads))
    shared = (q.view(torch.int16), weights, weights.stride(0), scale, positions, slots, table, table_stride, *planes)
    asm = use_asm(q)
    if queries:
        keys = keys or (128 if asm else 64)
        once = 2 if head_block <= 64 else 1  # sums of 128 x 128 are what the registers of four warps hold
        if queries % once:
            raise ValueError(f"queries are taken {once} at a time, which does not divide {queries}")
        _chunk_scores_kernel[(triton.cdiv(scores.shape[1], keys), triton.cdiv(rows, queries))](
            *shared, scores, scores.stride(0), rows,
            RATIO=ratio, TOP=top, HEADS=heads, HB=head_block, P=_HALF, KEYS=keys, QUERIES=queries, ONCE=once,
            PAGE_ROWS=64, ASM=asm, num_warps=4,
        )  # fmt: skip
    else:
        _scores_kernel[(rows, splits)](
            *shared, scores, scores.stride(0),
            RATIO=ratio, TOP=top, HEADS=heads, HB=head_block, P=_HALF, KEYS=keys or 64, PAGE_ROWS=64,
            ASM=asm, num_warps=4, **overlap(),
        )  # fmt: skip


def select_scratch(rows: int, most: int, top: int, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """What `select_rows` needs besides for rows of up to `most` keys: two int32 [rows, blocks, top], or None."""
    if most <= SELECT_BLOCK:
        return None
    size = (rows, triton.cdiv(most, SELECT_BLOCK), top)
    return torch.empty(size, dtype=torch.int32, device=device), torch.empty(size, dtype=torch.int32, device=device)


def select_sizes(most: int, top: int) -> list[int]:
    """Numbers of keys up to `most` with which `select_rows` compiles all that it needs for any number up to it."""
    found: dict[tuple[int, int, bool], int] = {}
    for keys in [*range(top + 1, min(most, SELECT_BLOCK) + 1), *range(SELECT_BLOCK + 1, most + 1, SELECT_BLOCK)]:
        blocks = triton.cdiv(keys, SELECT_BLOCK)
        size = keys if blocks == 1 else blocks * top
        # Triton compiles a number of blocks that 16 divides by itself.
        found.setdefault((min(blocks, 2), triton.next_power_of_2(size), blocks % 16 == 0), keys)
    return list(found.values())


def select_rows(
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    top: int,
    out: Tensor,
    scratch: tuple[Tensor, Tensor] | None = None,
    block: int = SELECT_BLOCK,
) -> None:
    """`ops.select_rows`: the `top` best keys of each row, ties to the lowest; all of them where there are no more.

    Args:
        scores: float32 [rows, most keys] of `index_scores`.
        positions: int32 [rows]; position t sees (t + 1) // ratio keys.
        out: int32 [rows, top], ascending, then -1.
        scratch: of `select_scratch`, if the rows have more keys than `block`.
    """
    rows, most = scores.shape[0], scores.shape[1]
    blocks = triton.cdiv(most, block)
    if blocks > 1 and (scratch is None or scratch[0].shape != (rows, blocks, top) or top > block):
        raise ValueError(f"choosing {top} of {most} keys in blocks of {block} needs its own scratch for {rows} rows")
    key, row = (out, out) if scratch is None or blocks == 1 else scratch
    size = triton.next_power_of_2(most) if blocks == 1 else block
    top_block = triton.next_power_of_2(top)
    _select_kernel[(rows, blocks)](
        scores, scores.stride(0), positions, out, key, row,
        RATIO=ratio, TOP=top, BLOCK=size, LAST=blocks == 1, TOP_BLOCK=top_block,
        num_warps=min(32, max(4, size // 256)), **overlap(early=True),
    )  # fmt: skip
    if blocks > 1:
        found = triton.next_power_of_2(blocks * top)
        _merge_kernel[(rows,)](
            positions, out, key, row, blocks,
            RATIO=ratio, TOP=top, BLOCK=block, FOUND=found, FEW=FEW_BLOCKS if blocks > 2 * FEW_BLOCKS else 0,
            FEW_FOUND=triton.next_power_of_2(FEW_BLOCKS * top), TOP_BLOCK=top_block,
            num_warps=min(32, max(4, found // 256)), **overlap(early=True),
        )  # fmt: skip
