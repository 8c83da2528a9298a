"""Many rows at once: planes decoded to a scratch, and grouped matrix products over pairs sorted by expert.

So are experts evaluated in float32 (`experts_fused` is for float16), for as many at a time as the scratch holds:

    group(chosen, groups)
    dequantise_experts(gate, ...), dequantise_experts(up, ...), gate_up_grouped(...)
    dequantise_experts(down, ...), down_grouped(...)
    sum_pairs(...)

Dense matrices: `dequantise_q8`, then a matrix product of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.expert_chunks import chunk_values
from ds4.ops.kernels.expert_formats import load_table
from ds4.ops.kernels.expert_programs import advance
from ds4.ops.kernels.experts import pointers
from ds4.ops.kernels.grouping import Groups, expert_tile, tile_pairs
from ds4.ops.kernels.intrinsics import use_asm
from ds4.ops.kernels.planes import Planes, Q8Planes

# --- planes -> matrices -----------------------------------------------------------------------------------------------
# A lane makes eight neighbouring weights.


@triton.jit
def _dequantise_kernel(
    p0, p1, p2, p3, table, offsets, out, first,
    FORMAT: tl.constexpr, SKIP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """L chunks of eight weights in each of STEPS rows of one matrix."""
    matrix = tl.program_id(1)
    if SKIP:
        if tl.load(offsets + first + matrix) == tl.load(offsets + first + matrix + 1):
            return
    U: tl.constexpr = K // 128
    COLUMNS: tl.constexpr = K // 8 // L
    lut = load_table(FORMAT, table)
    c = tl.program_id(0) % COLUMNS * L + tl.arange(0, L)
    row = tl.program_id(0) // COLUMNS * STEPS
    whole = (first + matrix).to(tl.int64) * N + row
    if FORMAT == "q8_0":
        q0, q1, q2, q3 = p0 + whole * (K // 4), p1 + whole * (K // 32), p2, p3
    else:
        q0, q1, q2, q3 = advance(FORMAT, p0, p1, p2, p3, whole, U)
    u = c // 16
    j = c // 4 % 4
    k = c % 4
    at = out + (matrix.to(tl.int64) * N + row) * K + (c[:, None] * 8 + tl.arange(0, 8)[None, :])
    for step in tl.static_range(STEPS):
        values = chunk_values(FORMAT, q0, q1, q2, q3, table, lut, step, u, j, k, U, ASM)
        tl.store(at + step * K, values.to(out.dtype.element_ty))


# --- grouped products -------------------------------------------------------------------------------------------------


@triton.jit
def _gate_up_kernel(
    x, x_stride, order, offsets, tiles, gate, up, out, clamp, first, count,
    E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, begin, pairs = expert_tile(offsets, tiles, first, count, E, EP, BM)
    if expert < 0:
        return
    place, live, pair = tile_pairs(order, begin, pairs, BM)
    PRECISION: tl.constexpr = "tf32x3" if ASM else "ieee"  # of float32
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = (expert - first).to(tl.int64) * (F * K)
    x_at = x + (pair // TOP)[:, None] * x_stride + k[None, :]
    w_at = n[None, :] * K + k[:, None]
    g = tl.zeros([BM, BN], tl.float32)
    v = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        a = tl.load(x_at + start)
        g = tl.dot(a, tl.load(gate + base + start + w_at), g, input_precision=PRECISION)
        v = tl.dot(a, tl.load(up + base + start + w_at), v, input_precision=PRECISION)
    g = tl.minimum(g, clamp)
    h = g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(v, -clamp), clamp)
    tl.store(out + place[:, None] * F + n[None, :], h.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _down_kernel(
    h, order, offsets, tiles, weight, weights, out, out_stride, first, count,
    E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, begin, pairs = expert_tile(offsets, tiles, first, count, E, EP, BM)
    if expert < 0:
        return
    place, live, pair = tile_pairs(order, begin, pairs, BM)
    PRECISION: tl.constexpr = "tf32x3" if ASM else "ieee"  # of float32
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = (expert - first).to(tl.int64) * (N * K)
    h_at = h + tl.where(live, place, 0)[:, None] * K + k[None, :]
    w_at = n[None, :] * K + k[:, None]
    y = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        y = tl.dot(tl.load(h_at + start), tl.load(weight + base + start + w_at), y, input_precision=PRECISION)
    y = y * tl.load(weights + pair)[:, None]
    at = pair.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _sum_kernel(parts, chosen, extra, out, N, E, TOP: tl.constexpr, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP):
        expert = tl.load(chosen + row * TOP + i)
        there = (n < N) & (expert >= 0) & (expert < E)
        total += tl.load(parts + (row * TOP + i) * N + n, mask=there, other=0.0).to(tl.float32)
    if EXTRA:
        total += tl.load(extra + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


# --- launchers --------------------------------------------------------------------------------------------------------


def _divisor(n: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides n."""
    return min(n & -n, limit)


def _dequantise(planes: Planes, out: Tensor, matrices: int, first: int, groups: Groups | None) -> None:
    if out.numel() != matrices * planes.n * planes.k or not out.is_contiguous():
        raise ValueError(f"expected a scratch of {matrices} x {planes.n} x {planes.k} values, got {list(out.shape)}")
    if isinstance(planes, Q8Planes):
        p0, p1 = planes.codes, planes.scales
        p2 = p3 = table = p0
    else:
        p0, p1, p2, p3, table = pointers(planes)
    lanes = _divisor(planes.k // 8, 128)
    steps = _divisor(planes.n, 8)
    _dequantise_kernel[(planes.n * planes.k // 8 // lanes // steps, matrices)](
        p0, p1, p2, p3, table, p0 if groups is None else groups.offsets, out, first,
        FORMAT=planes.FORMAT, SKIP=groups is not None, N=planes.n, K=planes.k, L=lanes, STEPS=steps,
        ASM=use_asm(out), num_warps=max(1, lanes // 32),
    )  # fmt: skip


def dequantise_q8(planes: Q8Planes, out: Tensor) -> None:
    """The weights, rounded to the dtype of out: bfloat16, float16 or float32 [n, k], contiguous."""
    _dequantise(planes, out, 1, 0, None)


def dequantise_experts(planes: Planes, out: Tensor, first: int = 0, groups: Groups | None = None) -> None:
    """The weights of experts first .. first + count - 1, rounded to the dtype of `out`.

    Args:
        out: bfloat16, float16 or float32 [count, n, k], contiguous.
        groups: leaves out experts that have no pairs; their part of `out` stays as it was.
    """
    if planes.experts is None or out.dim() != 3 or first < 0 or first + out.shape[0] > planes.experts:
        raise ValueError(f"experts from {first} into {list(out.shape)}, there are {planes.experts}")
    _dequantise(planes, out, out.shape[0], first, groups)


def _grid(n: int, pairs: int, count: int, groups: Groups, block: int) -> tuple[int, int]:
    """Tiles of columns, and as many tiles of pairs as there can be at most for `count` experts."""
    return n // block, triton.cdiv(pairs, groups.tile_rows) + count


@dataclass(frozen=True)
class Tile:
    """How a grouped product is cut, besides `groups.tile_rows`. None: chosen by the shape.

    Attributes:
        columns: columns of a program, of each matrix.
        depth: channels of one round.
        warps: of a program; a multiple of 4 for the matrix units.
        stages: how many rounds are on their way or at work.
    """

    columns: int | None = None
    depth: int | None = None
    warps: int | None = None
    stages: int | None = None


def _blocks(groups: Groups, x: Tensor, n: int, tile: Tile, matrices: int) -> dict[str, int]:
    """Constants and options of a grouped product of one or two matrices at once.

    256 columns in all: what comes through the L2 for each product is what bounds these kernels, and it falls with the
    tile. The sums of 128 x 256 take nearly all registers of eight warps. Tiles of float32 are a quarter as large, with
    which a round takes as many bytes, and their products need registers for the parts of each factor.
    """
    wide = x.dtype == torch.float32
    columns = _divisor(n, tile.columns or (128 if wide else 256) // matrices)
    large = groups.tile_rows * columns * matrices >= (64 * 128 if wide else 64 * 256)
    return {
        "E": groups.experts,
        "EP": triton.next_power_of_2(groups.experts),
        "BM": groups.tile_rows,
        "BN": columns,
        "BK": _divisor(x.shape[1], tile.depth or (32 if wide else 64)),
        "ASM": use_asm(x),
        "num_warps": tile.warps or (8 if large else 4),
        "num_stages": tile.stages or (3 if wide else 4),
    }


def gate_up_grouped(
    x: Tensor,
    chosen: Tensor,
    groups: Groups,
    gate: Tensor,
    up: Tensor,
    first: int,
    clamp: float,
    out: Tensor,
    tile: Tile = Tile(),
) -> None:
    """swiglu of the gate and up projections of all pairs of experts first .. first + count - 1.

    Args:
        x: [tokens, hidden], rows contiguous, bfloat16, float16 or float32, whose products hold 22 bits.
        chosen: int32 [tokens, top], already in `groups`.
        gate, up: [count, expert_hidden, hidden], the decoded experts, in the dtype of x.
        out: [tokens * top, expert_hidden], contiguous; row i belongs to pair `groups.order[i]`.
    """
    count, n, k = gate.shape
    if up.shape != gate.shape or x.shape[1] != k or out.shape != (chosen.numel(), n):
        raise ValueError(f"x {list(x.shape)}, gate {list(gate.shape)}, up {list(up.shape)}, out {list(out.shape)}")
    blocks = _blocks(groups, x, n, tile, matrices=2)
    _gate_up_kernel[_grid(n, chosen.numel(), count, groups, blocks["BN"])](
        x, x.stride(0), groups.order, groups.offsets, groups.tiles, gate, up, out, clamp, first, count,
        TOP=chosen.shape[1], F=n, K=k, **blocks,
    )  # fmt: skip


def down_grouped(
    h: Tensor,
    chosen: Tensor,
    groups: Groups,
    weight: Tensor,
    weights: Tensor,
    first: int,
    out: Tensor,
    tile: Tile = Tile(),
) -> None:
    """weight * down projection of all pairs of experts first .. first + count - 1.

    Args:
        h: [tokens * top, expert_hidden] from `gate_up_grouped`.
        weight: [count, hidden, expert_hidden], the decoded experts, in the dtype of h.
        weights: float32 [tokens, top], contiguous.
        out: float32 or 16 bits [tokens, top, hidden], contiguous: each pair in its own place.
    """
    count, n, k = weight.shape
    if h.shape != (chosen.numel(), k) or out.shape != (*chosen.shape, n) or not out.is_contiguous():
        raise ValueError(f"h {list(h.shape)}, weight {list(weight.shape)}, out {list(out.shape)} do not fit")
    blocks = _blocks(groups, h, n, tile, matrices=1)
    _down_kernel[_grid(n, chosen.numel(), count, groups, blocks["BN"])](
        h, groups.order, groups.offsets, groups.tiles, weight, weights, out, out.stride(1), first, count,
        N=n, K=k, **blocks,
    )  # fmt: skip


def sum_pairs(parts: Tensor, chosen: Tensor, experts: int, out: Tensor, extra: Tensor | None = None) -> None:
    """Sum of a token's pairs in the order of the choice, plus `extra`.

    Args:
        parts: [tokens, top, hidden], contiguous, from `down_grouped` or `experts.down`.
        chosen: int32 [tokens, top]; places that name none of `experts` experts are left out.
        out, extra: [tokens, hidden], contiguous; extra is what the shared expert gives, or None.
    """
    tokens, top, n = parts.shape
    block = min(1024, triton.next_power_of_2(n))
    _sum_kernel[(tokens, triton.cdiv(n, block))](
        parts, chosen, parts if extra is None else extra, out, n, experts,
        TOP=top, EXTRA=extra is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
