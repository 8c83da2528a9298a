"""Device side of `experts`: what a program of gate and up, or of down, does with the rows of an expert."""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.ops.kernels.expert_formats import decode_unit, dot_unit, load_activations, load_table, load_unit
from ds4.ops.kernels.gemv import q8_rows
from ds4.ops.kernels.intrinsics import behind


@triton.jit
def advance(FORMAT: tl.constexpr, p0, p1, p2, p3, row, U: tl.constexpr):
    """The four pointers at a row (int64) of the whole tensor."""
    if FORMAT == "iq2_xxs_b":
        return (p0 + row * (4 * U), p1 + row * (4 * U), p2 + row * (U // 2), p3 + row * (U // 2))
    elif FORMAT == "iq2_xxs_a":
        return (p0 + row * (8 * U), p1 + row * (4 * U), p2 + row * (U // 2), p3 + row * (U // 2))
    elif FORMAT == "q2_k":
        return (p0 + row * (8 * U), p1 + row * (2 * U), p2 + row * (U // 2), p3)
    elif FORMAT == "q4_k":
        return (p0 + row * (16 * U), p1 + row * U, p2 + row * (U // 2), p3 + row * (U // 2))
    else:
        return (p0 + row * (16 * U), p1 + row * U, p2, p3)


@triton.jit
def _sum_rows(values, R: tl.constexpr, UB: tl.constexpr):
    """[R * UB] -> sums of UB neighbours [R]."""
    return tl.sum(tl.reshape(values, [R, UB]), axis=1)


@triton.jit
def _activations(x, sums, scales, row, u, live, U: tl.constexpr, SUMS: tl.constexpr):
    """`load_activations` of one row."""
    return load_activations(x + row * (32 * U), sums + row * (4 * U), scales + row * (4 * U), u, live, U, SUMS)


@triton.jit
def _store_swiglu(gate, up, out, clamp, R: tl.constexpr, UB: tl.constexpr):
    g = tl.minimum(_sum_rows(gate, R, UB), clamp)
    v = tl.minimum(tl.maximum(_sum_rows(up, R, UB), -clamp), clamp)
    tl.store(out + tl.arange(0, R), g / (1.0 + tl.exp(-g)) * v)


@triton.jit
def gate_up_kernel(
    chosen, x, sums, scales, g0, g1, g2, g3, u0, u1, u2, u3, table, out, clamp, steps,
    FORMAT: tl.constexpr, LOOP: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    F: tl.constexpr, U: tl.constexpr, R: tl.constexpr, UB: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    SUMS: tl.constexpr = FORMAT == "q2_k" or FORMAT == "q4_k"
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    if (expert < 0) | (expert >= EXPERTS):
        return
    row0 = tl.program_id(0) * (R * STEPS)
    base = expert.to(tl.int64) * F + row0
    ga, gb, gc, gd = advance(FORMAT, g0, g1, g2, g3, base, U)
    ua, ub, uc, ud = advance(FORMAT, u0, u1, u2, u3, base, U)
    lane = tl.arange(0, R * UB)
    u = tl.minimum(lane % UB, U - 1)
    live = lane % UB < U
    lut = load_table(FORMAT, table)
    out += pair * F + row0
    if LOOP:
        next_gate = load_unit(FORMAT, ga, gb, gc, gd, lane // UB, u, U)
        next_up = load_unit(FORMAT, ua, ub, uc, ud, lane // UB, u, U)
        a = _activations(x, sums, scales, pair // TOP, u, live, U, SUMS)
        for step in range(steps):
            gate, up = next_gate, next_up
            # The rows of the next turn are on their way while these are at work; the last turn loads its own again.
            row = lane // UB + tl.minimum(step + 1, steps - 1) * R
            next_gate = load_unit(FORMAT, ga, gb, gc, gd, row, u, U)
            next_up = load_unit(FORMAT, ua, ub, uc, ud, row, u, U)
            g = dot_unit(FORMAT, gate, decode_unit(FORMAT, gate, table, lut, ASM), a, ASM)
            v = dot_unit(FORMAT, up, decode_unit(FORMAT, up, table, lut, ASM), a, ASM)
            _store_swiglu(g, v, out + step * R, clamp, R, UB)
    else:
        a = _activations(x, sums, scales, pair // TOP, u, live, U, SUMS)
        for step in tl.static_range(STEPS):
            row = lane // UB + step * R
            gate = load_unit(FORMAT, ga, gb, gc, gd, row, u, U)
            up = load_unit(FORMAT, ua, ub, uc, ud, row, u, U)
            g = dot_unit(FORMAT, gate, decode_unit(FORMAT, gate, table, lut, ASM), a, ASM)
            v = dot_unit(FORMAT, up, decode_unit(FORMAT, up, table, lut, ASM), a, ASM)
            _store_swiglu(g, v, out + step * R, clamp, R, UB)


@triton.jit
def down_kernel(
    chosen, weights, x, sums, scales, p0, p1, p2, p3, table, out, row_stride, place_stride, steps,
    pairs, shared_codes, shared_scales, shared_words, shared_xs,
    FORMAT: tl.constexpr, LOOP: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, UB: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
    SHARED: tl.constexpr, S_K: tl.constexpr, S_R: tl.constexpr, S_CB: tl.constexpr, S_STEPS: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    SUMS: tl.constexpr = FORMAT == "q2_k" or FORMAT == "q4_k"
    pair = tl.program_id(1)
    if SHARED > 0:
        if pair >= pairs:
            q8_rows(
                shared_codes, shared_scales, shared_words, shared_xs, out + TOP * place_stride,
                (pair - pairs) * tl.num_programs(0) + tl.program_id(0), N, row_stride,
                SHARED, S_K, 1, N, S_R, S_CB, S_STEPS, ASM,
            )  # fmt: skip
            return
    expert = tl.load(chosen + pair)
    if (expert < 0) | (expert >= EXPERTS):
        return
    row0 = tl.program_id(0) * (R * STEPS)
    pa, pb, pc, pd = advance(FORMAT, p0, p1, p2, p3, expert.to(tl.int64) * N + row0, U)
    lane = tl.arange(0, R * UB)
    u = tl.minimum(lane % UB, U - 1)
    live = lane % UB < U
    lut = load_table(FORMAT, table)
    target = out + (pair // TOP) * row_stride + (pair % TOP) * place_stride + row0
    if LOOP:
        next_unit = load_unit(FORMAT, pa, pb, pc, pd, lane // UB, u, U)
        a = _activations(x, sums, scales, pair, u, live, U, SUMS)
        weight = tl.load(weights + pair)
        for step in range(steps):
            unit = next_unit
            row = lane // UB + tl.minimum(step + 1, steps - 1) * R
            next_unit = load_unit(FORMAT, pa, pb, pc, pd, row, u, U)  # see `gate_up_kernel`
            words = decode_unit(FORMAT, unit, table, lut, ASM)
            y = _sum_rows(dot_unit(FORMAT, unit, words, a, ASM), R, UB) * weight
            tl.store(target + step * R + tl.arange(0, R), y)
    else:
        a = _activations(x, sums, scales, pair, u, live, U, SUMS)
        weight = tl.load(weights + pair)
        for step in tl.static_range(STEPS):
            unit = load_unit(FORMAT, pa, pb, pc, pd, lane // UB + step * R, u, U)
            words = decode_unit(FORMAT, unit, table, lut, ASM)
            y = _sum_rows(dot_unit(FORMAT, unit, words, a, ASM), R, UB) * weight
            tl.store(target + step * R + tl.arange(0, R), y)


@triton.jit
def down_sum_kernel(
    chosen, weights, x, sums, scales, p0, p1, p2, p3, table, out, row_stride,
    FORMAT: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, UB: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    SUMS: tl.constexpr = FORMAT == "q2_k" or FORMAT == "q4_k"
    token = tl.program_id(1)
    row0 = tl.program_id(0) * R
    lane = tl.arange(0, R * UB)
    u = tl.minimum(lane % UB, U - 1)
    live = lane % UB < U
    lut = load_table(FORMAT, table)
    total = tl.zeros([R * UB], tl.float32)
    for place in range(TOP):
        pair = token * TOP + place
        expert = tl.load(chosen + pair)
        if (expert >= 0) & (expert < EXPERTS):
            pa, pb, pc, pd = advance(FORMAT, p0, p1, p2, p3, expert.to(tl.int64) * N + row0, U)
            a = _activations(x, sums, scales, pair, u, live, U, SUMS)
            unit = load_unit(FORMAT, pa, pb, pc, pd, lane // UB, u, U)
            y = dot_unit(FORMAT, unit, decode_unit(FORMAT, unit, table, lut, ASM), a, ASM)
            total += y * tl.load(weights + pair)
    tl.store(out + token * row_stride + row0 + tl.arange(0, R), _sum_rows(total, R, UB))
