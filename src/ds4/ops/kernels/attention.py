"""Attention of all heads over the rows of a window and over compressed rows, with a sink; a row is key and value.

Rows are read as they are stored and become float16 in the kernel: eleven bits hold what eight were rounded to. Heads
share their rows, so a program takes one token and some of its heads, which are the rows of its products. At decode the
rows of a token are shared among programs, whose parts a second kernel merges; at prefill a program takes them all.

The exact variant keeps rows, queries and weights in float32; its products are sums of three of tf32, which together
hold 22 bits of each factor.

Queries come as the projection leaves them: they are normed and rotated here. The outputs' tails are rotated back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap, use_asm
from ds4.ops.kernels.quantize import Quantised, quantised_args, store_quantised
from ds4.ops.kernels.rows import RowPlanes, fp8_value, power_of_two


@dataclass(frozen=True)
class Rows:
    """The compressed rows that tokens see.

    Attributes:
        pages: planes [pages, 64, ...].
        tables: int32 [slots, pages], the pages of each sequence.
        ratio: token t sees the rows before (t + 1) // ratio.
        chosen: int32 [rows, k], which of them: the first min(k, visible) entries; None for all.
    """

    pages: RowPlanes
    tables: Tensor
    ratio: int
    chosen: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """Scratch of tokens whose rows are shared among programs.

    Attributes:
        out: float32 [rows, splits, heads, head_dim].
        stats: float32 [rows, splits, heads, 2]: largest logit and sum of weights.
    """

    out: Tensor
    stats: Tensor

    @classmethod
    def allocate(cls, rows: int, splits: int, heads: int, head_dim: int, device: torch.device | str) -> Parts:
        """Buffers without content."""
        return cls(
            torch.empty((rows, splits, heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((rows, splits, heads, 2), dtype=torch.float32, device=device),
        )


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def _fp8_to_half(code, ASM: tl.constexpr):
    """The values of E4M3 bytes, as float16; exact."""
    if ASM:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return fp8_value(code.to(tl.int32)).to(tl.float16)


@triton.jit
def _load_rows(
    codes, tail, word, code_at, tail_at, live, FIRST: tl.constexpr, NB: tl.constexpr, TAIL: tl.constexpr,
    EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """NB blocks of 64 channels from block FIRST on, of rows at these places; float16 or, EXACT, float32; 0 if not live.

    word: their exponents. With TAIL the last block is the rotary tail.
    """
    ROWS: tl.constexpr = live.shape[0]
    b, c = tl.arange(0, NB)[None, :, None], tl.arange(0, 64)[None, None, :]
    there = live[:, None, None]
    field = (word[:, None] >> (8 * (FIRST + tl.arange(0, NB)[None, :]))).to(tl.int32) & 255
    if EXACT:
        scale = power_of_two(field)[:, :, None]
    else:
        # Values above 57344 would not fit into float16; a row's norm keeps it far below.
        scale = power_of_two(tl.minimum(field, 134)).to(tl.float16)[:, :, None]
    at = codes + code_at[:, None, None] + ((FIRST + b) * 64 + c)
    coded = there & (b < NB - 1) if TAIL else there
    value = _fp8_to_half(tl.load(at, mask=coded, other=0), ASM).to(scale.dtype) * scale
    if TAIL:
        last = tl.load(tail + tail_at[:, None, None] + (b * 0 + c), mask=there & (b == NB - 1), other=0)
        last = (last.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(scale.dtype)
        value = tl.where(b < NB - 1, value, last)
    return tl.reshape(value, [ROWS, NB * 64])


@triton.jit
def _attend(
    q_low, q_high, codes, tail, scales, code_at, tail_at, scale_at, live, scale, top, total, low, high,
    HD: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax over rows at these places; logits in base 2, channels in two halves."""
    NB: tl.constexpr = HD // 128
    PRECISION: tl.constexpr = "tf32x3" if ASM else "ieee"  # of float32
    word = tl.load(scales + scale_at, mask=live, other=0)
    first = _load_rows(codes, tail, word, code_at, tail_at, live, 0, NB, False, EXACT, ASM)
    logit = tl.dot(q_low, tl.trans(first), input_precision=PRECISION)
    second = _load_rows(codes, tail, word, code_at, tail_at, live, NB, NB, True, EXACT, ASM)
    logit = tl.dot(q_high, tl.trans(second), logit, input_precision=PRECISION) * scale
    logit = tl.where(live[None, :], logit, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1))
    weight = tl.exp2(logit - new[:, None])
    fade = tl.exp2(top - new)
    total = total * fade + tl.sum(weight, 1)
    weight = weight.to(first.dtype)
    low = tl.dot(weight, first, low * fade[:, None], input_precision=PRECISION)
    high = tl.dot(weight, second, high * fade[:, None], input_precision=PRECISION)
    return new, total, low, high


@triton.jit
def load_queries(q, turn, eps, h, live, HD: tl.constexpr):
    """Heads h of a row, normed and rotated: the halves of the channels, float32 [heads, HD / 2] each."""
    N: tl.constexpr = HD // 2
    c = tl.arange(0, N)[None, :]
    at = q + h[:, None] * HD
    low = tl.load(at + c, mask=live[:, None], other=0.0).to(tl.float32)
    high = tl.load(at + N + c, mask=live[:, None], other=0.0).to(tl.float32)
    rotary = c >= N - 64
    # The neighbour of each channel, which rope mixes in.
    near = tl.load(at + N + (c ^ 1), mask=live[:, None] & rotary, other=0.0).to(tl.float32)
    pair = (c - (N - 64)) // 2
    cos = tl.load(turn + pair, mask=rotary, other=1.0)
    sin = tl.load(turn + 32 + pair, mask=rotary, other=0.0)
    sin = tl.where(c % 2 == 0, -sin, sin)
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HD + eps)[:, None]
    return scale * low, scale * (high * cos + near * sin)


@triton.jit
def _queries_kernel(q, q_stride, turn, eps, positions, out, HEADS: tl.constexpr, HB: tl.constexpr, HD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions + row) >= 0:
        h = tl.program_id(1) * HB + tl.arange(0, HB)
        low, high = load_queries(q + row * q_stride, turn + row * 64, eps, h, h < HEADS, HD)
        at = out + (row * HEADS + h[:, None]) * HD + tl.arange(0, HD // 2)[None, :]
        tl.store(at, low, mask=(h < HEADS)[:, None])
        tl.store(at + HD // 2, high, mask=(h < HEADS)[:, None])


@triton.jit
def _write_out(out, x_even, x_odd, at, live, HALF: tl.constexpr):
    """Neighbouring channels at pair numbers `at`: float16 (HALF) or float32."""
    if HALF:
        low = x_even.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = x_odd.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(out.to(tl.pointer_type(tl.int32)) + at, low | high, mask=live)
    else:
        low = x_even.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = x_odd.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(out.to(tl.pointer_type(tl.int64)) + at, low | high, mask=live)


@triton.jit
def _turn_back(even, odd, turn, pair, P: tl.constexpr):
    """Inverse rope of pairs [.., P]: only the last 32 turn."""
    rotary = pair >= P - 32
    cos = tl.load(turn + pair - (P - 32), mask=rotary, other=1.0)
    sin = tl.load(turn + 32 + pair - (P - 32), mask=rotary, other=0.0)
    return even * cos + odd * sin, odd * cos - even * sin


@triton.jit
def _attention_kernel(
    q, q_stride, turn, eps, sink, positions, slots, window_slots,
    w_codes, w_tail, w_scales, w_codes_stride, w_tail_stride, w_scales_stride,
    p_codes, p_tail, p_scales, p_codes_stride, p_tail_stride, p_scales_stride,
    tables, tables_stride, chosen, out, stats,
    HEADS: tl.constexpr, HB: tl.constexpr, HD: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    RATIO: tl.constexpr, TOP: tl.constexpr, CHOSEN: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MERGE: tl.constexpr, PAGE_ROWS: tl.constexpr, HALF: tl.constexpr, READY: tl.constexpr, EXACT: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    position = tl.load(positions + row)
    if position >= 0:
        h = tl.program_id(1) * HB + tl.arange(0, HB)
        there = h < HEADS
        if READY:
            # Straight from memory, so that they stay in shared memory and not in registers.
            q_at = q + row * q_stride + h[:, None] * HD + tl.arange(0, HD // 2)[None, :]
            q_low = tl.load(q_at, mask=there[:, None], other=0.0)
            q_high = tl.load(q_at + HD // 2, mask=there[:, None], other=0.0)
        else:
            q_low, q_high = load_queries(q + row * q_stride, turn + row * 64, eps, h, there, HD)
            if not EXACT:
                q_low, q_high = q_low.to(tl.float16), q_high.to(tl.float16)
        scale: tl.constexpr = HD**-0.5 * 1.4426950408889634
        if not MERGE:
            top = tl.load(sink + h, mask=there, other=0.0) * 1.4426950408889634
            total = tl.full([HB], 1.0, tl.float32)
        else:
            top = tl.full([HB], -1e30, tl.float32)
            total = tl.zeros([HB], tl.float32)
        N: tl.constexpr = HD // 2
        low, high = tl.zeros([HB, N], tl.float32), tl.zeros([HB, N], tl.float32)
        near = tl.minimum(position + 1, WINDOW)
        near_tiles = (near + TILE - 1) // TILE
        count = 0
        if RATIO > 0:
            count = (position + 1) // RATIO
            if CHOSEN:
                count = tl.minimum(count, TOP)
        tiles = near_tiles + (count + TILE - 1) // TILE
        share = (tiles + SPLITS - 1) // SPLITS
        begin = split * share
        end = tl.minimum(begin + share, tiles)
        window_slot = tl.load(window_slots + row)
        pages = tables + tl.load(slots + row).to(tl.int64) * tables_stride
        for tile in range(begin, end):
            # Either kind of rows: a window is one long page.
            codes, tail, scales = w_codes, w_tail, w_scales
            codes_stride, tail_stride, scales_stride = w_codes_stride, w_tail_stride, w_scales_stride
            r = tile * TILE + tl.arange(0, TILE)
            live = r < near
            place = (position - r + RING) % RING  # from the newest row back
            page = r * 0 + window_slot
            if RATIO > 0:
                if tile >= near_tiles:
                    codes, tail, scales = p_codes, p_tail, p_scales
                    codes_stride, tail_stride, scales_stride = p_codes_stride, p_tail_stride, p_scales_stride
                n = r - near_tiles * TILE
                far = (n >= 0) & (n < count)
                if CHOSEN:
                    n = tl.load(chosen + row * TOP + n, mask=far, other=-1)
                    far = n >= 0
                live = live | far
                page = tl.where(far, tl.load(pages + n // PAGE_ROWS, mask=far, other=0), page)
                place = tl.where(far, n % PAGE_ROWS, place)
            page = page.to(tl.int64)
            top, total, low, high = _attend(
                q_low, q_high, codes, tail, scales, page * codes_stride + place * (HD - 64),
                page * tail_stride + place * 64, page * scales_stride + place,
                live, scale, top, total, low, high, HD, EXACT, ASM,
            )  # fmt: skip
        if MERGE:
            at = (row * SPLITS + split) * HEADS + h
            tl.store(stats + at * 2, top, mask=there)
            tl.store(stats + at * 2 + 1, total, mask=there)
            if begin < end:
                to = out + at[:, None] * HD + tl.arange(0, N)[None, :]
                tl.store(to, low, mask=there[:, None])
                tl.store(to + N, high, mask=there[:, None])
        else:
            P: tl.constexpr = N // 2
            pair = tl.arange(0, P)[None, :]
            to = (row * HEADS + h[:, None]) * N + pair
            even, odd = tl.split(tl.reshape(low / total[:, None], [HB, P, 2]))
            _write_out(out, even, odd, to, there[:, None], HALF)
            even, odd = tl.split(tl.reshape(high / total[:, None], [HB, P, 2]))
            even, odd = _turn_back(even, odd, turn + row * 64, pair, P)
            _write_out(out, even, odd, to + P, there[:, None], HALF)
    elif not MERGE:
        heads = tl.program_id(1) * HB + tl.arange(0, HB)[:, None]
        nothing = tl.zeros([HB, HD // 2], tl.float32)
        each = (row * HEADS + heads) * (HD // 2) + tl.arange(0, HD // 2)[None, :]
        _write_out(out, nothing, nothing, each, heads < HEADS, HALF)


@triton.jit
def _merge_kernel(
    parts, stats, sink, turn, positions, out, scales, words, lanes, fine, sums,
    HEADS: tl.constexpr, HD: tl.constexpr, SPLITS: tl.constexpr, SB: tl.constexpr, OUT: tl.constexpr,
    HALF: tl.constexpr, CODES: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    """One head of a token: the parts weighted by their largest logits and sums, the sink among them."""
    behind(PDL)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    P: tl.constexpr = HD // 2
    pair = tl.arange(0, P)
    even, odd = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    if tl.load(positions + row) >= 0:
        s = tl.arange(0, SB)
        at = (row * SPLITS + s) * HEADS + h
        top = tl.load(stats + at * 2, mask=s < SPLITS, other=-1e30)
        total = tl.load(stats + at * 2 + 1, mask=s < SPLITS, other=0.0)
        rest = tl.load(sink + h) * 1.4426950408889634
        most = tl.maximum(tl.max(top, 0), rest)
        whole = tl.sum(tl.exp2(top - most) * total, 0) + tl.exp2(rest - most)
        pairs = parts.to(tl.pointer_type(tl.int64))
        for i in range(SPLITS):
            part = (row * SPLITS + i) * HEADS + h
            factor = tl.exp2(tl.load(stats + part * 2) - most) / whole
            there = tl.where(tl.load(stats + part * 2 + 1) > 0.0, P, 0)  # a part without rows left nothing
            both = tl.load(pairs + part * P + pair, mask=pair < there, other=0)
            even += factor * both.to(tl.int32).to(tl.float32, bitcast=True)
            odd += factor * (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        even, odd = _turn_back(even, odd, turn + row * 64, pair, P)
    if OUT:
        _write_out(out, even, odd, (row * HEADS + h) * P + pair, pair < P, HALF)
    if CODES:
        UNITS: tl.constexpr = HD // 128
        U: tl.constexpr = HEADS * UNITS
        K: tl.constexpr = HEADS * HD
        x = tl.reshape(tl.join(even, odd), [UNITS, 128])
        u = h * UNITS + tl.arange(0, UNITS)
        store_quantised(
            x, u, u < U, scales + row * U, words + row * (K // 4), lanes + row * (K // 4), fine + row * (U * 4),
            sums + row * (U * 4), U, WORDS, LANES, SUMS,
        )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def splits_for(rows: int, heads: int, programs: int = 264) -> int:
    """Into how many parts a decode step's attention is cut, so that about this many programs run."""
    each = max(1, programs // (rows * -(-heads // 16)))
    return min(32, 1 << (each.bit_length() - 1))


def prepare_queries(q: Tensor, turn: Tensor, eps: float, positions: Tensor, out: Tensor) -> None:
    """`ops.rms_norm` and `ops.apply_rope` of the queries, for `attention` with `ready`.

    Args:
        q: float32, bfloat16 or float16 [rows, heads * head_dim], rows contiguous.
        turn: float32 [rows, 2, 32] of `rope_tables`.
        positions: int32 [rows]; rows at negative positions are left out.
        out: float16, or float32 for the exact variant, [rows, heads, head_dim], contiguous; may be q itself.
    """
    rows, heads, head_dim = out.shape
    block = min(8, triton.next_power_of_2(heads))
    _queries_kernel[(rows, triton.cdiv(heads, block))](
        q, q.stride(0), turn, eps, positions, out, HEADS=heads, HB=block, HD=head_dim, num_warps=4
    )


def attention(
    q: Tensor,
    turn: Tensor,
    eps: float,
    sink: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: RowPlanes,
    rows: Rows | None,
    out: Tensor | None,
    parts: Parts | None = None,
    quantised: Quantised | None = None,
    window_slots: Tensor | None = None,
    ready: bool = False,
    window: int = 128,
    exact: bool = False,
    heads_block: int = 0,
    tile: int = 0,
    warps: int = 0,
    stages: int = 1,
) -> None:
    """`ops.rms_norm` and `ops.apply_rope` of the queries, `ops.attention`, and the inverse rope of its output.

    Args:
        q: float32, bfloat16 or float16 [rows, heads * head_dim], rows contiguous: the projection. With `ready` float16,
            what `prepare_queries` or `step.store_step` made of it, which spares programs registers and time; float32 if
            `exact`.
        turn: float32 [rows, 2, 32] of `rope_tables` at the rows' positions.
        sink: float32 [heads].
        positions, slots: int32 [rows]; the outputs of rows at negative positions are zeros.
        ring: planes [slots, ring, ...] of raw rows, position p at p % ring; the rows' own are already there. At prefill
            the scratch ring of `rows.store_window`.
        rows: the compressed rows of the layer, or None.
        out: float32 or float16 [rows, heads, head_dim], contiguous. May be None if `quantised` is there.
        parts: with it, the rows of a token are shared among as many programs as it has splits, and merged by a second
            launch (decode). Without it one program takes them all (prefill).
        quantised: takes the output as bytes, rows of heads * head_dim; needs `parts`.
        window_slots: int32 [rows], where in `ring` a row's window is, if not at `slots` (zeros for a scratch ring).
        window: rows of a window.
        exact: everything is float32, prepared queries too. Slow.
        heads_block, tile, warps, stages: heads and rows that a program takes at once and how; 0 for the usual.
    """
    count, head_dim, heads = positions.shape[0], ring.head_dim, sink.shape[0]
    if ready and q.dtype != (torch.float32 if exact else torch.float16):
        raise ValueError(f"prepared queries are {'float32' if exact else 'float16'}, not {q.dtype}")
    if q.shape != (count, heads * head_dim) or q.stride(1) != 1:
        raise ValueError(f"queries of shape {list(q.shape)} do not fit {count} rows of {heads} heads of {head_dim}")
    if out is not None and out.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"an output is float32 or float16, not {out.dtype}")
    if (out is None and quantised is None) or (quantised is not None and parts is None):
        raise ValueError("attention needs an output, and parts to leave it quantised")
    splits = 1 if parts is None else parts.out.shape[1]
    merge = parts is not None
    limit = 16 if merge or exact else 64
    block = heads_block or max(16, min(limit, triton.next_power_of_2(heads)))
    half = out is not None and out.dtype == torch.float16
    target = out if parts is None else parts.out
    chosen = None if rows is None else rows.chosen
    asm = use_asm(q)
    _attention_kernel[(count, triton.cdiv(heads, block), splits)](
        q,
        q.stride(0),
        turn,
        eps,
        sink,
        positions,
        slots,
        slots if window_slots is None else window_slots,
        *ring.words(),
        *(ring if rows is None else rows.pages).words(),
        positions if rows is None else rows.tables,
        0 if rows is None else rows.tables.stride(0),
        positions if chosen is None else chosen,
        target,
        sink if parts is None else parts.stats,
        HEADS=heads,
        HB=block,
        HD=head_dim,
        WINDOW=window,
        RING=ring.codes.shape[1],
        RATIO=0 if rows is None else rows.ratio,
        TOP=0 if chosen is None else chosen.shape[1],
        CHOSEN=chosen is not None,
        TILE=tile or (16 if exact else 32 if merge else 64),
        SPLITS=splits,
        MERGE=merge,
        PAGE_ROWS=64,
        HALF=half,
        READY=ready,
        EXACT=exact,
        ASM=asm,
        num_warps=warps or (4 if merge and not exact else 8),
        num_stages=stages,
        **overlap(),
    )
    if parts is None:
        return
    if quantised is not None and (quantised.k != heads * head_dim or quantised.rows != count):
        raise ValueError(f"buffers of {quantised.rows} rows of {quantised.k} do not fit the heads' output")
    codes, orders = quantised_args(quantised, parts.stats)
    _merge_kernel[(count, heads)](
        parts.out,
        parts.stats,
        sink,
        turn,
        positions,
        parts.out if out is None else out,
        *codes,
        HEADS=heads,
        HD=head_dim,
        SPLITS=splits,
        SB=triton.next_power_of_2(splits),
        OUT=out is not None,
        HALF=half,
        CODES=quantised is not None,
        **orders,
        num_warps=max(1, head_dim // 128),
        **overlap(early=True),
    )
