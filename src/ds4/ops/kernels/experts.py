"""Routed experts at decode: gate, up and SwiGLU, then down, straight from quantised planes.

A pair is a row of the step together with one of its chosen experts, numbered row * top + place. Every pair reads its
expert's weights itself, of which the L2 keeps what another needs at the same time: to find out who shares an expert
takes longer, up to 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from ds4.ops.kernels.expert_programs import down_kernel, down_sum_kernel, gate_up_kernel
from ds4.ops.kernels.gemv import DP4A_ROWS, gemv, lanes_of
from ds4.ops.kernels.intrinsics import overlap, use_asm
from ds4.ops.kernels.planes import Iq2aPlanes, Iq2bPlanes, Mxfp4Planes, Planes, Q8Planes
from ds4.ops.kernels.quantize import Quantised

FORMATS = ("iq2_xxs_a", "iq2_xxs_b", "q2_k", "q4_k", "mxfp4")
"""Formats of planes that these kernels read."""


def pointers(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The four planes that a kernel takes for any format, the first again where there are fewer, and the table."""
    tensors = [tensor for _, tensor in planes.planes()]
    p0, p1, p2, p3 = tensors + [tensors[0]] * (4 - len(tensors))
    table = planes.table if isinstance(planes, Iq2aPlanes | Iq2bPlanes | Mxfp4Planes) else p0
    return p0, p1, p2, p3, table


@dataclass(frozen=True)
class Tile:
    """How the work is cut into programs.

    A row takes as many lanes as it has units (rounded up to a power of two), so short rows stand side by side.

    Attributes:
        steps: a program takes so many times the rows that its lanes hold side by side.
        warps: of a program.
        loop: the steps are turns of a loop that loads the rows of the next turn ahead, not unrolled.
    """

    steps: int = 1
    warps: int = 1
    loop: bool = False


# Without a loop and with it, the latter for more rows than `DP4A_ROWS`.
GATE_UP = (Tile(), Tile(steps=4, loop=True))
DOWN = (Tile(steps=2), Tile(steps=8, loop=True))


# Registers of a thread with which as many warps fit a multiprocessor as without the scales of 32; the compiler, left
# alone, takes 96.
_LOOP_REGISTERS = {"q2_k": 72}


def _cut(rows: int, units: int, tile: Tile) -> tuple[dict[str, int], int]:
    """Constants of a kernel for matrices of `rows` rows, and its programs for each."""
    lanes = 32 * tile.warps
    per_row = triton.next_power_of_2(units)
    side_by_side = max(1, lanes // per_row)
    steps = tile.steps
    while rows % (side_by_side * steps):
        if steps > 1:
            steps -= 1
        elif side_by_side > 1:
            side_by_side //= 2
    block = side_by_side * steps
    # With fewer lanes than units the tile grows to whole rows, with more warps.
    warps = max(1, side_by_side * per_row // 32)
    return {"U": units, "R": side_by_side, "UB": per_row, "STEPS": steps, "num_warps": warps}, rows // block


def _check_experts(planes: Planes, x: Quantised) -> int:
    """Their number, after a look at planes and activations."""
    if planes.experts is None or planes.FORMAT not in FORMATS:
        raise ValueError(f"expected planes of experts in one of {', '.join(FORMATS)}, got {planes.FORMAT}")
    if x.lanes is None or x.k != planes.k:
        raise ValueError(f"expected {planes.k} channels in the order of lanes, got {x.k}")
    if x.sums is None and planes.FORMAT in ("q2_k", "q4_k"):
        raise ValueError(f"{planes.FORMAT} needs activations with sums")
    return planes.experts


def _activation_args(x: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    assert x.lanes is not None
    assert x.fine is not None
    return x.lanes, x.lanes if x.sums is None else x.sums, x.fine


def gate_up(
    x: Quantised,
    chosen: Tensor,
    gate: Planes,
    up: Planes,
    clamp: float,
    out: Tensor,
    tile: Tile | None = None,
) -> None:
    """swiglu of the gate and up projections of every pair: what `ops.routed_experts` computes before `down`.

    Args:
        x: activations of `rows` rows with lanes (and sums for Q2_K and Q4_K).
        chosen: int32 [rows, top], contiguous; a place that names no expert is left out and its output not written.
        gate, up: planes of one format with experts, [expert_hidden, hidden] each.
        out: float32 [rows * top, expert_hidden], contiguous.
        tile: one of `GATE_UP` if it is None.
    """
    tile = tile or GATE_UP[chosen.shape[0] > DP4A_ROWS]
    experts, pairs = _check_experts(gate, x), chosen.numel()
    if up.FORMAT != gate.FORMAT or (up.n, up.k, up.experts) != (gate.n, gate.k, gate.experts):
        raise ValueError(f"gate is {gate.FORMAT} {gate.n} x {gate.k}, up is {up.FORMAT} {up.n} x {up.k}")
    constants, programs = _cut(gate.n, gate.units, tile)
    *gate_pointers, table = pointers(gate)
    *up_pointers, _ = pointers(up)
    gate_up_kernel[(programs, pairs)](
        chosen,
        *_activation_args(x),
        *gate_pointers,
        *up_pointers,
        table,
        out,
        clamp,
        constants["STEPS"],
        FORMAT=gate.FORMAT,
        LOOP=tile.loop,
        EXPERTS=experts,
        TOP=chosen.shape[1],
        F=gate.n,
        ASM=use_asm(out),
        **constants,
        **overlap(),
    )


def down(
    h: Quantised,
    chosen: Tensor,
    weights: Tensor,
    planes: Planes,
    out: Tensor,
    shared: tuple[Q8Planes, Quantised] | None = None,
    tile: Tile | None = None,
) -> None:
    """weight * down projection of every pair; the sum over a row's pairs is what `ops.routed_experts` returns.

    Args:
        h: activations of the rows * top pairs, with lanes (and sums for Q2_K and Q4_K).
        chosen: as in `gate_up`.
        weights: float32 [rows, top], contiguous.
        planes: [hidden, expert_hidden] of each expert.
        out: float32 [rows, top, hidden], hidden contiguous; strides are free, so it may be a part of a larger buffer.
            With `shared` [rows, top + 1, hidden].
        shared: down projection of the shared expert and its activations with words: goes into the last place of a row,
            up to `DP4A_ROWS` rows in the same launch.
        tile: one of `DOWN` if it is None.
    """
    tile = tile or DOWN[chosen.shape[0] > DP4A_ROWS]
    experts, pairs, rows = _check_experts(planes, h), chosen.numel(), chosen.shape[0]
    places = chosen.shape[1] + (shared is not None)
    if out.shape != (rows, places, planes.n) or out.stride(2) != 1 or h.rows != pairs:
        raise ValueError(f"{h.rows} pairs into {list(out.shape)}, expected {pairs} and {[rows, places, planes.n]}")
    constants, programs = _cut(planes.n, planes.units, tile)
    extra, s_args, s_shape = 0, (out, out, out, out), {"SHARED": 0, "S_K": 0, "S_R": 0, "S_CB": 0, "S_STEPS": 0}
    if shared is not None and rows > DP4A_ROWS:
        gemv(*shared, out[:, places - 1])
    elif shared is not None:
        s_planes, s_x = shared
        if s_planes.n != planes.n or s_x.words is None or s_x.scales is None or s_x.k != s_planes.k:
            raise ValueError(f"shared expert: {s_planes.n} x {s_planes.k}, {s_x.k} channels, expected {planes.n} rows")
        s_rows, s_lanes = lanes_of(s_planes.k, 16, constants["num_warps"])
        # More than one row at a time would hold too many registers, also for the experts' programs.
        s_steps = max(1, 2 // s_rows) if rows == 1 else 1
        extra = triton.cdiv(triton.cdiv(planes.n, s_rows * s_steps), programs)
        s_args = (s_planes.codes, s_planes.scales, s_x.words, s_x.scales)
        s_shape = {"SHARED": rows, "S_K": s_planes.k, "S_R": s_rows, "S_CB": s_lanes, "S_STEPS": s_steps}
    *plane_pointers, table = pointers(planes)
    down_kernel[(programs, pairs + extra)](
        chosen,
        weights,
        *_activation_args(h),
        *plane_pointers,
        table,
        out,
        out.stride(0),
        out.stride(1),
        constants["STEPS"],
        pairs,
        *s_args,
        FORMAT=planes.FORMAT,
        LOOP=tile.loop,
        EXPERTS=experts,
        TOP=chosen.shape[1],
        N=planes.n,
        ASM=use_asm(out),
        maxnreg=_LOOP_REGISTERS.get(planes.FORMAT) if tile.loop else None,
        **s_shape,
        **constants,
        **overlap(),
    )


def down_sum(
    h: Quantised,
    chosen: Tensor,
    weights: Tensor,
    planes: Planes,
    out: Tensor,
    tile: Tile = Tile(),
) -> None:
    """As `down`, summed over the pairs of a row in the order of the choice: out float32 [rows, hidden]."""
    experts = _check_experts(planes, h)
    constants, programs = _cut(planes.n, planes.units, Tile(warps=tile.warps))
    constants.pop("STEPS")
    *plane_pointers, table = pointers(planes)
    down_sum_kernel[(programs, chosen.shape[0])](
        chosen,
        weights,
        *_activation_args(h),
        *plane_pointers,
        table,
        out,
        out.stride(0),
        FORMAT=planes.FORMAT,
        EXPERTS=experts,
        TOP=chosen.shape[1],
        N=planes.n,
        ASM=use_asm(out),
        **constants,
        **overlap(),
    )
