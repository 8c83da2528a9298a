"""Cases of `ds4.ops.kernels.gemv`: every dense matrix of a layer, and the vocabulary head."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import GGMLQuantizationType as T

from ds4.ops.kernels.gemv import DP4A_ROWS, Tile, gemv, gemv_both, gemv_f16, gemv_grouped
from kernel_cases.harness import Bench, Case, error, tiles

FEW = [Tile(warps=w, steps=s) for w, s in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (4, 2), (8, 1))]
MANY = [
    Tile(rows=rows, warps=warps, span=128 * warps, stages=stages)
    for rows, warps in ((16, 2), (32, 2), (16, 4), (32, 4), (64, 4), (16, 8), (32, 8))
    for stages in (3, 4)
]
MANY_F16 = [Tile(f16_rows=rows, f16_span=span) for rows in (16, 32, 64) for span in (128, 256)]

SHARED = 220 << 10
"""Bytes of shared memory that a program may take."""


def _fits(tile: Tile, rows: int) -> bool:
    """Whether the rounds of a tile fit into shared memory."""
    if tile.stages is None:
        return True
    span, weight_rows, x_rows = tile.span or 512, tile.rows or 32, max(8, 1 << (rows - 1).bit_length())
    round_bytes = max(span * (weight_rows + x_rows), (tile.f16_span or span // 2) * (2 * weight_rows + 4 * x_rows))
    return round_bytes * (tile.stages - 1) <= SHARED


def _others(rows: int, f16: bool = False) -> list[Tile]:
    return FEW if rows <= DP4A_ROWS else [tile for tile in MANY + f16 * MANY_F16 if _fits(tile, rows)]


def _q8(bench: Bench, n: int, k: int, groups: int = 1) -> Iterator[Case]:
    size = n * k * 17 // 16
    weights = [bench.planes(T.Q8_0, n, k) for _ in range(bench.copies(size))]
    for rows in bench.rows:
        x, out = bench.activations(rows, groups * k), bench.empty(rows, n)

        def check(x=x, out=out, rows=rows) -> float:
            w = bench.weight(weights[0]).view(groups, n // groups, k)
            values = x.dequantise().double().view(rows, groups, k)
            return error(out, (values.transpose(0, 1) @ w.transpose(1, 2)).transpose(0, 1))

        for label, tile in tiles(bench, Tile(), _others(rows)):
            runs = [
                lambda w=w, x=x, out=out, tile=tile: (
                    gemv(w, x, out, tile) if groups == 1 else gemv_grouped(w, x, out, groups, tile)
                )
                for w in weights
            ]
            nbytes = size + rows * (groups * k * 33 // 32 + 4 * n)
            yield Case(f"{n}x{k} rows {rows} {label}", runs, nbytes, check, 1e-5, [out])


def _f16(bench: Bench, n: int, k: int) -> Iterator[Case]:
    size = n * k * 2
    weights = [bench.planes(T.F16, n, k) for _ in range(bench.copies(size))]
    for rows in bench.rows:
        x, out = bench.randn(rows, k), bench.empty(rows, n)

        def check(x=x, out=out) -> float:
            return error(out, x.double() @ bench.weight(weights[0]).t())

        for label, tile in tiles(bench, Tile(), _others(rows, f16=True)):
            runs = [lambda w=w, x=x, out=out, tile=tile: gemv_f16(w, x, out, tile) for w in weights]
            yield Case(f"{n}x{k} rows {rows} {label}", runs, size + 4 * rows * (n + k), check, 2e-5, [out])


def _both(bench: Bench, n: int, m: int, k: int) -> Iterator[Case]:
    size = n * k * 17 // 16 + m * k * 2
    weights = [(bench.planes(T.Q8_0, n, k), bench.planes(T.F16, m, k)) for _ in range(bench.copies(size))]
    for rows in bench.rows:
        q, x = bench.activations(rows, k), bench.randn(rows, k)
        out, f16_out = bench.empty(rows, n), bench.empty(rows, m)

        def check(q=q, x=x, out=out, f16_out=f16_out) -> float:
            a, b = (bench.weight(w) for w in weights[0])
            return max(error(out, q.dequantise().double() @ a.t()), error(f16_out, x.double() @ b.t()))

        for label, tile in tiles(bench, Tile(), _others(rows, f16=True)):
            runs = [
                lambda a=a, b=b, q=q, x=x, out=out, f16_out=f16_out, tile=tile: gemv_both(
                    a, q, out, b, x, f16_out, tile
                )
                for a, b in weights
            ]
            nbytes = size + rows * (5 * k + 4 * (n + m))
            yield Case(f"{n}+{m}x{k} rows {rows} {label}", runs, nbytes, check, 2e-5, [out, f16_out])


def attention_inputs(bench: Bench) -> Iterator[Case]:
    """q_a and kv (Q8_0) with both compressors and the index weights (F16) of a sparse layer."""
    s = bench.shape
    yield from _both(bench, s.q_lora_rank + s.head_dim, 4 * s.head_dim + 4 * s.index_dim + s.index_heads, s.hidden)


def ffn_inputs(bench: Bench) -> Iterator[Case]:
    """The shared expert's gate and up (Q8_0) with the router (F16)."""
    s = bench.shape
    yield from _both(bench, 2 * s.expert_hidden, s.experts, s.hidden)


def _low(bench: Bench) -> int:
    return bench.shape.o_groups * bench.shape.o_lora_rank


CASES = {
    "gemv.q_a_kv": lambda b: _q8(b, b.shape.q_lora_rank + b.shape.head_dim, b.shape.hidden),
    "gemv.q_b": lambda b: _q8(b, b.shape.heads * b.shape.head_dim, b.shape.q_lora_rank),
    "gemv.output_a": lambda b: _q8(b, _low(b), b.shape.heads // b.shape.o_groups * b.shape.head_dim, b.shape.o_groups),
    "gemv.output_b": lambda b: _q8(b, b.shape.hidden, _low(b)),
    "gemv.shared_gate_up": lambda b: _q8(b, 2 * b.shape.expert_hidden, b.shape.hidden),
    "gemv.shared_down": lambda b: _q8(b, b.shape.hidden, b.shape.expert_hidden),
    "gemv.head": lambda b: _q8(b, b.shape.vocab, b.shape.hidden),
    "gemv.f16_compressors": lambda b: _f16(b, 4 * b.shape.head_dim + 4 * b.shape.index_dim, b.shape.hidden),
    "gemv.f16_index_q": lambda b: _f16(b, b.shape.index_heads * b.shape.index_dim, b.shape.q_lora_rank),
    "gemv.f16_router": lambda b: _f16(b, b.shape.experts, b.shape.hidden),
    "gemv.attention_inputs": attention_inputs,
    "gemv.ffn_inputs": ffn_inputs,
}
