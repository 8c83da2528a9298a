"""Matrices times a few rows of float32, straight from planes, with nothing rounded: decode where numbers are the CPU's.

Products and sums are those of float32 in an order that depends on the matrix alone, so a result depends neither on how
many rows there are nor on where its own is. A program decodes what it reads for up to four rows: this is for models
whose weights stay in the L2, and for others slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.expert_chunks import chunk_values
from ds4.ops.kernels.expert_formats import load_table
from ds4.ops.kernels.expert_programs import advance
from ds4.ops.kernels.experts import FORMATS, pointers
from ds4.ops.kernels.intrinsics import rounded_product, use_asm
from ds4.ops.kernels.planes import F16Planes, Planes, Q8Planes

_ROWS, _CHUNKS, _TOGETHER = 4, 128, 4
"""Rows of the matrix, chunks of eight channels and rows of activations that a program takes at once."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    p0, p1, p2, p3, table, x, chosen, weights, out, rows, x_row, x_place, out_row, out_place,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    TOP: tl.constexpr, WEIGHTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """R rows of a matrix times B rows of activations; EXPERTS > 0: times one, of the matrix that a pair has chosen."""
    pair = tl.program_id(1).to(tl.int64) * B
    row0 = tl.program_id(0) * R
    first = row0.to(tl.int64)
    if EXPERTS > 0:
        expert = tl.load(chosen + pair)
        if (expert < 0) | (expert >= EXPERTS):
            return
        first += expert.to(tl.int64) * N
    x += row0 // GROUP_ROWS * K
    if FORMAT == "f16":
        p0 += first * K
        lut = (0, 0)
    elif FORMAT == "q8_0":
        p0, p1 = p0 + first * (K // 4), p1 + first * (K // 32)
        lut = (0, 0)
    else:
        p0, p1, p2, p3 = advance(FORMAT, p0, p1, p2, p3, first, K // 128)
        lut = load_table(FORMAT, table)
    # The last program may have fewer rows: it takes the last of them again, and does not store it.
    here = tl.minimum(R, N - row0)
    r = tl.minimum(tl.arange(0, R), here - 1)
    i = tl.arange(0, 8)
    totals = ()
    for _ in tl.static_range(B):
        totals = totals + (tl.zeros([R, C], tl.float32),)
    for start in range(0, K // 8, C):
        c = start + tl.arange(0, C)
        channel = c[:, None] * 8 + i[None, :]
        if FORMAT == "f16":
            w = tl.load(p0 + r[:, None, None] * K + channel[None]).to(tl.float32)
        else:
            of_row, k = tl.broadcast(r[:, None], c[None, :])
            w = chunk_values(
                FORMAT, p0, p1, p2, p3, table, lut, of_row, k // 16, k // 4 % 4, k % 4, K // 128, ASM
            )  # fmt: skip
        sums = ()
        for b in tl.static_range(B):
            one = tl.minimum(pair + b, rows - 1)
            values = tl.load(x + (one // TOP * x_row + one % TOP * x_place) + channel)
            values = tl.broadcast_to(values[None], [R, C, 8])
            sums = sums + (totals[b] + tl.sum(rounded_product(w, values, ASM), axis=2),)
        totals = sums
    for b in tl.static_range(B):
        y = tl.sum(totals[b], axis=1)
        one = pair + b
        if WEIGHTS:
            y = y * tl.load(weights + one)
        at = out + one // TOP * out_row + one % TOP * out_place + row0 + tl.arange(0, R)
        tl.store(at, y, mask=tl.arange(0, R) < tl.where(one < rows, here, 0))


# --- launchers --------------------------------------------------------------------------------------------------------


def _launch(
    planes: Planes,
    x: Tensor,
    out: Tensor,
    group_rows: int,
    chosen: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    top = 1 if chosen is None else chosen.shape[1]
    if isinstance(planes, Q8Planes):
        sources = (planes.codes, planes.scales, *(planes.codes,) * 3)
    elif isinstance(planes, F16Planes):
        sources = (planes.weight,) * 5
    else:
        sources = pointers(planes)
    chunks = planes.k // 8
    lanes = min(chunks & -chunks, _CHUNKS)
    # The interpreter minds the number of programs only.
    rows = min(triton.next_power_of_2(group_rows), 64 if triton.knobs.runtime.interpret else _ROWS)
    if group_rows < planes.n:  # a program's rows are of one group
        rows = min(rows, group_rows & -group_rows)
    experts = 0 if chosen is None else planes.experts or 0
    places = [t.stride(1) if t.dim() == 3 else 0 for t in (x, out)]
    pairs = x.shape[0] * top
    together = 1 if chosen is not None else min(_TOGETHER, triton.next_power_of_2(pairs))
    _linear_kernel[(triton.cdiv(planes.n, rows), triton.cdiv(pairs, together))](
        *sources, x, x if chosen is None else chosen, x if weights is None else weights, out,
        pairs, x.stride(0), places[0], out.stride(0), places[1],
        FORMAT=planes.FORMAT, N=planes.n, K=planes.k, GROUP_ROWS=group_rows, EXPERTS=experts,
        TOP=top, WEIGHTS=weights is not None, R=rows, C=lanes, B=together, ASM=use_asm(out),
        num_warps=max(1, rows * lanes // 128),
    )  # fmt: skip


def exact_linear(planes: Q8Planes | F16Planes, x: Tensor, out: Tensor, groups: int = 1) -> None:
    """x @ weight^T as `ops.linear`; with groups as `ops.grouped_linear`, each run of rows with channels of its own.

    Args:
        planes: [groups * rows of a group, k].
        x: float32 [rows, groups * k], channels contiguous.
        out: float32 [rows, groups * rows of a group], columns contiguous.
    """
    rows = x.shape[0]
    if planes.experts is not None or not isinstance(planes, Q8Planes | F16Planes):
        raise ValueError(f"expected a single matrix in Q8_0 or F16, got {planes.FORMAT}")
    if x.dtype != torch.float32 or x.shape[1] != groups * planes.k or x.stride(1) != 1 or planes.n % groups:
        raise ValueError(f"expected float32 with {groups * planes.k} channels, got {x.dtype} {list(x.shape)}")
    if out.dtype != torch.float32 or out.shape != (rows, planes.n) or out.stride(1) != 1:
        raise ValueError(f"expected a float32 output of {rows} rows of {planes.n}, got {out.dtype} {list(out.shape)}")
    _launch(planes, x, out, planes.n // groups)


def exact_experts(planes: Planes, x: Tensor, chosen: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
    """The product of each pair, a row and one of the experts that it has chosen; times its weight if there are any.

    Args:
        planes: of all experts, [n, k] each.
        x: float32 [rows, k] or, for each pair its own, [rows, top, k]; channels contiguous.
        chosen: int32 [rows, top], contiguous; a place that names no expert is left out and its output not written.
        out: float32 [rows, top, n], columns contiguous; may be a part of a larger buffer.
        weights: float32 [rows, top], contiguous.
    """
    rows, top = chosen.shape
    if planes.experts is None or planes.FORMAT not in FORMATS:
        raise ValueError(f"expected planes of experts in one of {', '.join(FORMATS)}, got {planes.FORMAT}")
    if chosen.dtype != torch.int32 or not chosen.is_contiguous():
        raise ValueError(f"expected contiguous int32 choices, got {chosen.dtype} of stride {chosen.stride()}")
    if weights is not None and (weights.shape != chosen.shape or not weights.is_contiguous()):
        raise ValueError(f"expected contiguous weights {[rows, top]}, got {list(weights.shape)}")
    shapes = [rows, planes.k], [rows, top, planes.k]
    if x.dtype != torch.float32 or list(x.shape) not in shapes or x.stride(-1) != 1:
        raise ValueError(f"expected float32 {shapes[0]} or {shapes[1]}, got {x.dtype} {list(x.shape)}")
    if out.dtype != torch.float32 or out.shape != (rows, top, planes.n) or out.stride(2) != 1:
        raise ValueError(f"expected float32 {[rows, top, planes.n]}, got {out.dtype} {list(out.shape)}")
    _launch(planes, x, out, planes.n, chosen, weights)
