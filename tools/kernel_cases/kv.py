"""Cases of the kernels around the KV state: rows, compressor, indexer and attention.

Rows of a decode step stand at `CONTEXTS`; a prefill chunk ends at the first of them from its own length on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds4 import ops
from ds4.ops.kernels.attention import Parts, Rows, attention, prepare_queries, splits_for
from ds4.ops.kernels.compress import Compressor, store_chunk
from ds4.ops.kernels.indexer import index_queries, index_scores, select_rows, select_scratch
from ds4.ops.kernels.rows import KeyPlanes, RowPlanes, rope_tables, store_window
from ds4.ops.kernels.step import Queries, store_step
from kernel_cases.harness import Bench, Case, error

CONTEXTS = (2048, 32_768, 1_048_576)
RING = 145
BAR = 2e-3


def _int(bench: Bench, value: int | list[int], *size: int) -> Tensor:
    if isinstance(value, list):
        return torch.tensor(value, dtype=torch.int32, device=bench.device)
    return torch.full(size, value, dtype=torch.int32, device=bench.device)


def _turn(bench: Bench, rows: int) -> Tensor:
    """Angles of any positions: float32 [rows, 2, 32]."""
    angle = bench.empty(rows, 32) if bench.compile_only else 1000 * bench.rand(rows, 32)
    return torch.stack((torch.cos(angle), torch.sin(angle)), dim=1).contiguous()


def _rows(bench: Bench, *lead: int) -> RowPlanes:
    planes = RowPlanes.allocate(*lead, head_dim=bench.shape.head_dim, device=bench.device)
    if not bench.compile_only:
        flat = planes.codes.view(-1, planes.codes.shape[-1])
        for start in range(0, flat.shape[0], 1 << 16):
            x = bench.randn(min(1 << 16, flat.shape[0] - start), bench.shape.head_dim)
            codes, tail, scales = ops.pack_row(x, 64)
            part = slice(start, start + x.shape[0])
            flat[part] = codes
            planes.tail.view(-1, 64)[part] = tail
            planes.scales.view(-1, planes.scales.shape[-1])[part, :-1] = scales
    return planes


def _keys(bench: Bench, *lead: int) -> KeyPlanes:
    planes = KeyPlanes.allocate(*lead, dim=128, device=bench.device)
    if not bench.compile_only:
        codes, scales = ops.pack_key(bench.randn(planes.codes.numel() // 64, 128))
        planes.codes.view(-1, 64).copy_(codes)
        planes.scales.view(-1, 4).copy_(scales)
    return planes


def _unpack(planes: RowPlanes, places: tuple[Tensor, ...]) -> Tensor:
    codes, tail, scales = (plane[places] for plane in planes.planes())
    return ops.unpack_row(codes, tail, scales[..., :-1])


def _tables(bench: Bench, rows: int, count: int) -> tuple[Tensor, int]:
    """Pages of `rows` sequences of `count` rows each, in any order, and how many pages there are."""
    pages = -(-count // 64)
    if bench.compile_only:
        return _int(bench, 0, rows, pages), 1
    order = torch.randperm(rows * pages, device=bench.device)
    return order.view(rows, pages).to(torch.int32), rows * pages


def _contexts(bench: Bench, rows: int) -> Iterator[int]:
    """Context lengths that fit."""
    for context in CONTEXTS:
        if context <= bench.shape.context and rows * context <= 1 << 21:
            yield context


def decode_attention(bench: Bench) -> Iterator[Case]:
    """One token of each row against its window and its chosen rows (ratio 4), or all rows of ratio 128."""
    s = bench.shape
    for rows in bench.rows:
        for ratio in (4, 128):
            for context in (2048, 32_768, 1_048_576):
                count = context // ratio
                top = s.index_top_k if ratio == 4 else 0
                if rows * context > 1 << 22 or (ratio == 4 and context > 32_768):
                    continue
                tables, pages = _tables(bench, rows, count)
                planes, ring = _rows(bench, pages, 64), _rows(bench, rows, RING)
                q, sink, turn = bench.randn(rows, s.heads * s.head_dim), bench.randn(s.heads), _turn(bench, rows)
                positions = _int(bench, context - 1, rows)
                slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
                ready = bench.empty(rows, s.heads * s.head_dim, dtype=torch.float16)
                prepare_queries(q, turn, 1e-6, positions, ready.view(rows, s.heads, s.head_dim))
                chosen = None
                if top:
                    chosen = bench.choices(rows, min(top, count), count) if count < 1 << 16 else None
                    chosen = _int(bench, 0, rows, top) if bench.compile_only else chosen
                    if chosen is not None and chosen.shape[1] < top:
                        chosen = torch.nn.functional.pad(chosen, (0, top - chosen.shape[1]), value=-1)
                seen = min(count, top) if top else count
                for splits in sorted({splits_for(rows, s.heads), *((4, 8, 16, 32) if bench.sweep else ())}):
                    parts = Parts.allocate(rows, splits, s.heads, s.head_dim, bench.device)
                    out = bench.empty(rows, s.heads, s.head_dim)
                    held = Rows(planes, tables, ratio, chosen)

                    def run(
                        q=ready, turn=turn, sink=sink, positions=positions, slots=slots, ring=ring, held=held, out=out,
                        parts=parts,
                    ) -> None:  # fmt: skip
                        attention(q, turn, 1e-6, sink, positions, slots, ring, held, out, parts, ready=True)

                    def check(
                        q=q, turn=turn, sink=sink, ring=ring, held=held, out=out, context=context, seen=seen
                    ) -> float:
                        return error(out[0], _attention_of(bench, q, turn, sink, ring, held, context - 1, seen))

                    nbytes = rows * (128 + seen) * 584
                    yield Case(
                        f"rows {rows} ratio {ratio} at {context} splits {splits}", [run], nbytes, check, BAR, [out]
                    )


def _attention_of(
    bench: Bench, q: Tensor, turn: Tensor, sink: Tensor, ring: RowPlanes, held: Rows, position: int, seen: int
) -> Tensor:
    """Row 0 by torch in float64."""
    s = bench.shape
    x = ops.rms_norm(q[:1].double().view(1, s.heads, s.head_dim), None, 1e-6)
    cos, sin = turn[:1, 0].double().repeat_interleave(2, 1), turn[:1, 1].double().repeat_interleave(2, 1)
    sign = torch.tensor([-1.0, 1.0], device=sin.device, dtype=sin.dtype).repeat(32)
    x = ops.apply_rope(x, cos, sin * sign)
    size = ring.codes.shape[1]
    place = torch.arange(position - 127, position + 1, device=x.device)
    window = _unpack(ring, (torch.zeros_like(place), place % size)).double()
    n = torch.arange(seen, device=x.device) if held.chosen is None else held.chosen[0, :seen].long()
    rows = _unpack(held.pages, (held.tables[0, n // 64].long(), n % 64)).double()
    zero = torch.zeros(1, dtype=torch.int64, device=x.device)
    out = ops.attention(x, window, zero, zero, 128, ops.Compressed(rows, zero + seen), sink.double())
    return ops.apply_rope(out, cos, sin * sign, inverse=True)[0]


def prefill_attention(bench: Bench) -> Iterator[Case]:
    """A chunk of one sequence; checked on its first and last token."""
    s = bench.shape
    for tokens in bench.tokens:
        for ratio in (4, 128):
            context = max(32_768, tokens)
            count = context // ratio
            top = min(s.index_top_k, count) if ratio == 4 else 0
            tables, pages = _tables(bench, 1, count)
            planes, scratch = _rows(bench, pages, 64), _rows(bench, 1, tokens + 128)
            q = bench.randn(tokens, s.heads * s.head_dim, dtype=bench.half)
            sink, turn = bench.randn(s.heads), _turn(bench, tokens)
            positions = torch.arange(context - tokens, context, dtype=torch.int32, device=bench.device)
            slots = _int(bench, 0, tokens)
            chosen = None
            if top:
                first = (context - tokens + 1) // ratio
                chosen = bench.choices(tokens, top, first) if first > top else bench.choices(tokens, top, count)
            held = Rows(planes, tables, ratio, chosen)
            out = bench.empty(tokens, s.heads, s.head_dim, dtype=torch.float16)
            ready = bench.empty(tokens, s.heads, s.head_dim, dtype=torch.float16)

            def prepare(q=q, turn=turn, p=positions, ready=ready) -> None:
                prepare_queries(q, turn, 1e-6, p, ready)

            yield Case(f"queries {tokens}", [prepare], q.numel() * 4, lambda: 0.0, BAR, [ready])
            visible = top or count - tokens // ratio // 2
            options = [{}]
            if bench.sweep:
                options += [
                    {"tile": t, "warps": w, "stages": g, "heads_block": h}
                    for h, t, w in ((64, 32, 8), (64, 64, 4), (32, 64, 4), (32, 32, 4), (64, 32, 4), (64, 128, 8))
                    for g in (1, 2)
                ]
            for option in options:

                def run(q=ready, turn=turn, sink=sink, p=positions, slots=slots, r=scratch, h=held, out=out, o=option):
                    attention(q.flatten(1), turn, 1e-6, sink, p, slots, r, h, out, ready=True, **o)

                def check(q=q, turn=turn, sink=sink, r=scratch, h=held, out=out, c=context, n=tokens, top=top) -> float:
                    seen = top or (c - n + 1) // h.ratio
                    got = _attention_of(bench, q, turn, sink, r, h, c - n, seen)
                    return error(out[0], got)

                flops = 4 * tokens * s.heads * s.head_dim * (128 + visible)
                name = f"tokens {tokens} ratio {ratio} {' '.join(f'{k}={v}' for k, v in option.items())}".strip()
                yield Case(name, [run], out.numel() * 4, check, 4e-3, [out], flops)


def scores(bench: Bench) -> Iterator[Case]:
    """Scores and choice at decode, apart and then together."""
    s = bench.shape
    top = s.index_top_k
    for rows in bench.rows:
        for context in _contexts(bench, rows):
            count = context // 4
            if count <= top:
                continue
            tables, pages = _tables(bench, rows, count)
            keys, q = _keys(bench, pages, 64), bench.empty(rows, s.index_heads, 128, dtype=torch.bfloat16)
            x, turn, weights = (
                bench.randn(rows, s.index_heads * 128),
                _turn(bench, rows),
                bench.randn(rows, s.index_heads),
            )
            positions = _int(bench, context - 1, rows)
            slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
            out, chosen = bench.empty(rows, count), bench.empty(rows, top, dtype=torch.int32)
            scratch = select_scratch(rows, count, top, bench.device)
            splits = max(1, min(-(-count // 64), 528 // rows))

            def queries(x=x, turn=turn, positions=positions, q=q) -> None:
                index_queries(x, turn, positions, q)

            def score(q=q, w=weights, p=positions, slots=slots, t=tables, keys=keys, out=out, splits=splits) -> None:
                index_scores(q, w, 0.01, p, slots, t, keys, 4, top, out, splits)

            def select(out=out, p=positions, chosen=chosen, scratch=scratch) -> None:
                select_rows(out, p, 4, top, chosen, scratch)

            def check(q=q, w=weights, t=tables, keys=keys, out=out, count=count, queries=queries, score=score) -> float:
                queries()
                score()
                n = torch.arange(count, device=out.device)
                places = (t[0, n // 64].long(), n % 64)
                k = ops.unpack_key(*(plane[places] for plane in keys.planes())).double()
                flat = torch.stack(q[0].double().chunk(2, dim=-1), dim=-1).flatten(-2)
                return error(out[0], (torch.relu(flat @ k.t()) * (0.01 * w[0].double()).unsqueeze(1)).sum(0))

            def exact(out=out, chosen=chosen, count=count, select=select) -> float:
                select()
                got = ops.select_rows(out, torch.full((out.shape[0],), count, device=out.device), top)
                return float((got != chosen).sum())

            name = f"rows {rows} at {context}"
            yield Case(f"queries {name}", [queries], x.numel() * 6, lambda: 0.0, BAR)
            yield Case(
                f"score {name}", [score], rows * count * 72, check, 1e-5, [out], 2 * rows * count * s.index_heads * 128
            )
            yield Case(f"select {name}", [select], rows * count * 4, exact, 0.0, [chosen])


def prefill_scores(bench: Bench) -> Iterator[Case]:
    """Scores and choice of a part of a chunk at 32k."""
    s, context = bench.shape, 32_768
    top, count = s.index_top_k, context // 4
    for tokens in bench.tokens:
        rows = min(tokens, 2048)
        tables, pages = _tables(bench, 1, count)
        keys = _keys(bench, pages, 64)
        q = bench.randn(rows, s.index_heads, 128).bfloat16()
        weights, out = bench.randn(rows, s.index_heads), bench.empty(rows, count)
        positions = torch.arange(context - rows, context, dtype=torch.int32, device=bench.device)
        slots, chosen = _int(bench, 0, rows), bench.empty(rows, top, dtype=torch.int32)
        for tile in (32, 8, 16, 64) if bench.sweep else (32,):

            def score(q=q, w=weights, p=positions, slots=slots, t=tables, keys=keys, out=out, tile=tile) -> None:
                index_scores(q, w, 0.01, p, slots, t, keys, 4, top, out, queries=tile)

            flops = 2 * rows * count * s.index_heads * 128
            yield Case(f"score rows {rows} tile {tile}", [score], out.numel() * 4, lambda: 0.0, 1e-5, [], flops)

        def select(out=out, p=positions, chosen=chosen) -> None:
            select_rows(out, p, 4, top, chosen)

        yield Case(f"select rows {rows}", [select], out.numel() * 4, lambda: 0.0, 0.0)


def _compressor(bench: Bench, rows: int, slots: int, ratio: int, key: bool, pages: int) -> Compressor:
    channels = 128 if key else bench.shape.head_dim
    width = channels * (2 if ratio == 4 else 1)
    ring = ratio * (2 if ratio == 4 else 1) + 16
    planes = _keys(bench, pages, 64) if key else _rows(bench, pages, 64)
    frontier = bench.randn(slots, 2, ring, width)
    return Compressor(bench.randn(rows, 2 * width), bench.randn(ratio, width), bench.randn(channels), frontier, planes)


def store(bench: Bench) -> Iterator[Case]:
    """What a step writes to the KV state: at decode with and without a finished block, and a chunk."""
    s = bench.shape
    for rows in bench.rows:
        slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
        kv, weight, turn = bench.randn(rows, s.head_dim), bench.randn(s.head_dim), _turn(bench, rows)
        ring = RowPlanes.allocate(rows, RING, head_dim=s.head_dim, device=bench.device)
        tables = _int(bench, 0, rows, 64)
        heads = s.index_heads
        iq = Queries(bench.randn(rows, heads * 128), bench.empty(rows, heads, 128, dtype=torch.bfloat16))
        q_out = bench.empty(rows, s.heads, s.head_dim, dtype=torch.float16)
        q = Queries(bench.randn(rows, s.heads * s.head_dim), q_out)
        for ratio in (0, 4, 128):
            parts = (None, None)
            if ratio:
                parts = (
                    _compressor(bench, rows, rows, ratio, False, 1),
                    _compressor(bench, rows, rows, ratio, True, 1) if ratio == 4 else None,
                )
            for position in (1000, 1023) if ratio else (1000,):
                at = _int(bench, position, rows)

                def run(
                    at=at,
                    slots=slots,
                    kv=kv,
                    weight=weight,
                    turn=turn,
                    ring=ring,
                    r=ratio,
                    p=parts,
                    t=tables,
                    iq=iq,
                    q=q,
                ) -> None:
                    store_step(at, slots, 1e-6, kv, weight, turn, ring, r, *p, t, turn, iq if r == 4 else None, q)

                name = f"step rows {rows} ratio {ratio} {'emits' if position % 4 == 3 else ''}".strip()
                yield Case(name, [run], 4 * kv.numel(), lambda: 0.0, BAR)
    for tokens in bench.tokens:
        slots, turn = _int(bench, 0, tokens), _turn(bench, tokens)
        at = torch.arange(tokens, dtype=torch.int32, device=bench.device)
        for ratio, key in ((4, False), (4, True), (128, False)):
            c, tables = _compressor(bench, tokens, 1, ratio, key, 64), _int(bench, 0, 1, -(-tokens // 64))

            def chunk(at=at, slots=slots, ratio=ratio, c=c, tables=tables, turn=turn) -> None:
                store_chunk(at, slots, 1e-6, ratio, c, tables, turn)

            yield Case(
                f"chunk {tokens} ratio {ratio} {'keys' if key else 'rows'}", [chunk], c.kz.numel() * 4, lambda: 0.0, BAR
            )
        kv, weight = bench.randn(tokens, s.head_dim), bench.randn(s.head_dim)
        ring = RowPlanes.allocate(1, RING, head_dim=s.head_dim, device=bench.device)
        scratch = RowPlanes.allocate(1, tokens + 128, head_dim=s.head_dim, device=bench.device)

        def window(kv=kv, weight=weight, turn=turn, at=at, slots=slots, ring=ring, scratch=scratch) -> None:
            store_window(kv, weight, 1e-6, turn, at, slots, ring, scratch)

        yield Case(f"window {tokens}", [window], kv.numel() * 5, lambda: 0.0, BAR)


def rope(bench: Bench) -> Iterator[Case]:
    for rows in (*bench.rows, *bench.tokens):
        positions, frequencies = _int(bench, 1_000_003, rows), bench.randn(4, 32)
        out, back = bench.empty(4, rows, 2, 32), _int(bench, [0, 0, 3, 127])

        def run(positions=positions, frequencies=frequencies, back=back, out=out) -> None:
            rope_tables(positions, frequencies, back, out)

        def check(positions=positions, frequencies=frequencies, back=back, out=out) -> float:
            angle = (positions - back.unsqueeze(1)).float().unsqueeze(-1) * frequencies.unsqueeze(1)
            return error(out, torch.stack((torch.cos(angle.double()), torch.sin(angle.double())), dim=2))

        yield Case(f"rows {rows}", [run], out.numel() * 4, check, 1e-6, [out])


CASES = {
    "attention.decode": decode_attention,
    "attention.prefill": prefill_attention,
    "index.decode": scores,
    "index.prefill": prefill_scores,
    "kv.store": store,
    "kv.rope": rope,
}
