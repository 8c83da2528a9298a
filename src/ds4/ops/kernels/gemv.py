"""Matrices times few rows of activations, straight from Q8_0 planes and F16.

One launch takes any number of matrices of the same input: their rows stand one behind the other in the planes. Up to
`DP4A_ROWS` rows each program reads whole weight rows and multiplies in integers, `dp4a`; more rows go through the
tensor cores (`gemv_dot`), in integers for Q8_0 and in fp16 with float32 sums for F16, whose activations are split into
two fp16 terms so that nothing that counts is lost: 22 bits of what is above 2^-6, to 2^-28 what is below, up to 1.6e7
in size.
Both ways give the same up to the order of a float32 sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.expert_formats import load_four
from ds4.ops.kernels.gemv_dot import dot_kernel
from ds4.ops.kernels.intrinsics import behind, dp4a, high_half, low_half, overlap, use_asm
from ds4.ops.kernels.planes import F16Planes, Q8Planes
from ds4.ops.kernels.quantize import Quantised

DP4A_ROWS = 4
"""Up to so many rows of activations are multiplied one by one."""


@triton.jit
def _store_rows(totals, out, out_stride, target, n, B: tl.constexpr, R: tl.constexpr, CB: tl.constexpr):
    """Sum the lanes of each row and store the results for B rows of activations. totals: B tensors [R * CB]."""
    if B == 2 or B == 4:
        # One reduction for all: each costs barriers where a program has several warps.
        first = tl.join(totals[0], totals[1])
        b = tl.arange(0, 2)[None, :]
        if B == 4:
            y = tl.sum(tl.reshape(tl.join(first, tl.join(totals[2], totals[3])), [R, CB, 2, 2]), axis=1)
            at = (2 * b[:, None, :] + b[:, :, None]) * out_stride + target[:, None, None]
            tl.store(out + at, y, mask=(target < n)[:, None, None])
        else:
            y = tl.sum(tl.reshape(first, [R, CB, 2]), axis=1)
            tl.store(out + b * out_stride + target[:, None], y, mask=(target < n)[:, None])
    else:
        for b in tl.static_range(B):
            y = tl.sum(tl.reshape(totals[b], [R, CB]), axis=1)
            tl.store(out + b * out_stride + target, y, mask=target < n)


@triton.jit
def q8_rows(
    codes, scales, words, xs, out, program, n, out_stride,
    B: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    R: tl.constexpr, CB: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """R * STEPS rows of a Q8_0 matrix times B rows of activations. A lane takes 16 weights at a time."""
    NB: tl.constexpr = K // 16 // CB
    lane = tl.arange(0, R * CB)
    chunk = lane % CB
    row0 = program * (R * STEPS)
    # With groups, each run of GROUP_ROWS weight rows has its own K channels of the activations.
    group = 0 if GROUPS == 1 else row0 // GROUP_ROWS
    x = ()
    for b in tl.static_range(B):
        for nb in tl.static_range(NB):
            c = nb * CB + chunk
            x = x + load_four(words + (b * GROUPS + group) * (K // 4) + c * 4)
            x = x + (tl.load(xs + (b * GROUPS + group) * (K // 128) + c // 8),)
    for step in tl.static_range(STEPS):
        row = tl.minimum(row0 + step * R + lane // CB, n - 1)
        code_row = codes + row.to(tl.int64) * (K // 4)
        scale_row = scales + row.to(tl.int64) * (K // 32)
        w = ()
        for nb in tl.static_range(NB):
            c = nb * CB + chunk
            w = w + load_four(code_row + c * 4) + (tl.load(scale_row + c // 2).to(tl.float32),)
        totals = ()
        for b in tl.static_range(B):
            total = tl.zeros([R * CB], tl.float32)
            for nb in tl.static_range(NB):
                products = lane * 0
                for i in tl.static_range(4):
                    products = dp4a(w[5 * nb + i], x[5 * (b * NB + nb) + i], products, ASM)
                total += products.to(tl.float32) * (w[5 * nb + 4] * x[5 * (b * NB + nb) + 4])
            totals = totals + (total,)
        _store_rows(totals, out, out_stride, row0 + step * R + tl.arange(0, R), n, B, R, CB)


@triton.jit
def _f16_rows(
    weight, x, out, program, n, x_stride, out_stride,
    B: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, NI: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """R * STEPS rows of an F16 matrix times B rows of float32. A lane takes 8 weights at a time, NI times unrolled."""
    lane = tl.arange(0, R * CB)
    chunk = lane % CB
    row0 = program * (R * STEPS)
    # Sums of step s and activations b stand at s * B + b.
    totals = ()
    for _ in tl.static_range(STEPS * B):
        totals = totals + (tl.zeros([R * CB], tl.float32),)
    for outer in range(K // 8 // CB // NI):
        w = ()
        for i in tl.static_range(NI):
            for step in tl.static_range(STEPS):
                row = tl.minimum(row0 + step * R + lane // CB, n - 1)
                c = (outer * NI + i) * CB + chunk
                w = w + load_four(weight + row.to(tl.int64) * (K // 2) + c * 4)
        for i in tl.static_range(NI):
            c = (outer * NI + i) * CB + chunk
            x8 = ()
            for b in tl.static_range(B):
                x8 = x8 + load_four(x + b * x_stride + c * 8) + load_four(x + b * x_stride + c * 8 + 4)
            sums = ()
            for step in tl.static_range(STEPS):
                for b in tl.static_range(B):
                    total = totals[step * B + b]
                    for j in tl.static_range(4):
                        word = w[4 * (i * STEPS + step) + j]
                        total += low_half(word) * x8[8 * b + 2 * j]
                        total += high_half(word) * x8[8 * b + 2 * j + 1]
                    sums = sums + (total,)
            totals = sums
    for step in tl.static_range(STEPS):
        target = row0 + step * R + tl.arange(0, R)
        _store_rows(totals[step * B : step * B + B], out, out_stride, target, n, B, R, CB)


@triton.jit
def _rows_kernel(
    codes, scales, words, xs, q8_out, q8_n, q8_stride, q8_programs,
    weight, x, f16_out, f16_n, f16_stride, x_stride,
    B: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, Q8: tl.constexpr,
    F16: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, STEPS: tl.constexpr,
    F_R: tl.constexpr, F_CB: tl.constexpr, F_NI: tl.constexpr, F_STEPS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    program = tl.program_id(0)
    if Q8 & F16:
        if program < q8_programs:
            q8_rows(
                codes, scales, words, xs, q8_out, program, q8_n, q8_stride, B, K, 1, 1, R, CB, STEPS, ASM
            )  # fmt: skip
        else:
            _f16_rows(
                weight, x, f16_out, program - q8_programs, f16_n, x_stride, f16_stride,
                B, K, F_R, F_CB, F_NI, F_STEPS,
            )  # fmt: skip
    elif Q8:
        q8_rows(
            codes, scales, words, xs, q8_out, program, q8_n, q8_stride, B, K, GROUPS, GROUP_ROWS, R, CB, STEPS, ASM
        )  # fmt: skip
    else:
        _f16_rows(
            weight, x, f16_out, program, f16_n, x_stride, f16_stride, B, K, F_R, F_CB, F_NI, F_STEPS
        )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How programs are cut. None: chosen by the shape.

    Attributes:
        warps: of a program.
        steps: with up to `DP4A_ROWS` rows, how many times over a program takes the rows that its lanes hold.
        rows: with more, weight rows of a program.
        span: with more, channels of one round of a program, a power of two from 128 on.
        f16_rows: with more, F16 weight rows of a program.
        f16_span: with more, channels of one round of F16, a power of two.
        stages: with more, how many rounds are on their way or at work.
    """

    warps: int | None = None
    steps: int | None = None
    rows: int | None = None
    span: int | None = None
    f16_rows: int | None = None
    f16_span: int | None = None
    stages: int | None = None


def _power_of_two(count: int, limit: int) -> int:
    """The largest power of two that divides `count`, at most `limit`."""
    return min(count & -count, limit)


def lanes_of(k: int, per_lane: int, warps: int) -> tuple[int, int]:
    """Rows side by side and lanes of a row, for rows of k weights of which a lane takes `per_lane` at a time."""
    lanes = _power_of_two(k // per_lane, 32 * warps)
    return 32 * warps // lanes, lanes


def _launch(
    q8: Q8Planes | None,
    q: Quantised | None,
    q8_out: Tensor | None,
    f16: F16Planes | None,
    x: Tensor | None,
    f16_out: Tensor | None,
    groups: int,
    tile: Tile,
) -> None:
    some = q8_out if q8_out is not None else f16_out
    assert some is not None
    rows = some.shape[0]
    planes = q8 or f16
    assert planes is not None
    k, q8_n, f16_n = planes.k, q8.n if q8 else 0, f16.n if f16 else 0
    few = rows <= DP4A_ROWS
    if q8:
        assert q is not None
        assert q.words is not None
        assert q.scales is not None
        codes, scales, words, xs = q8.codes, q8.scales, q.words, q.scales
        if not few:
            codes, words = codes.view(torch.int8), words.view(torch.int8)
    else:
        codes = scales = words = xs = some
    if f16:
        assert x is not None
        weight = f16.weight.view(torch.int32) if few else f16.weight
    else:
        weight = x = some
    q8_target, f16_target = (some if out is None else out for out in (q8_out, f16_out))
    q8_args = (codes, scales, words, xs, q8_target, q8_n, q8_target.stride(0))
    f16_args = (weight, x, f16_target, f16_n, f16_target.stride(0))
    # The number of rows is no constant where nothing depends on it: matrices of the same width share a kernel.
    group_rows = q8_n // groups if groups > 1 else 1
    shape = {"K": k, "GROUPS": groups, "GROUP_ROWS": group_rows, "Q8": q8 is not None, "F16": f16 is not None}
    if few:
        warps = tile.warps or (1 if k < 4096 else 8 if k > 8192 else 4)
        r, cb = lanes_of(k, 16, warps)
        f_r, f_cb = lanes_of(k, 8, warps)
        if groups > 1 and q8_n // groups % r:
            raise ValueError(f"groups of {q8_n // groups} rows do not fit programs of {r}")
        steps = tile.steps or max(1, 4 // r if k < 2048 else 2 // r if k < 4096 and rows == 1 else 1)
        steps = steps if (q8_n // groups) % (r * steps) == 0 else 1
        # Float activations are four times the bytes: with several rows of them, read them for two weight rows at least.
        f_steps = tile.steps or (max(2 // f_r, 1) if rows > 1 or k < 2048 else 1)
        q8_programs = triton.cdiv(q8_n, r * steps)
        grid = (q8_programs + triton.cdiv(f16_n, f_r * f_steps),)
        _rows_kernel[grid](
            *q8_args, q8_programs, *f16_args, x.stride(0),
            B=rows, R=r, CB=cb, STEPS=steps, F_R=f_r, F_CB=f_cb, F_NI=_power_of_two(k // 8 // f_cb, 4), F_STEPS=f_steps,
            ASM=use_asm(some), **shape, num_warps=warps, **overlap(),
        )  # fmt: skip
        return
    q8_programs, f16_programs, constants = _dot_cut(k, q8_n, f16_n, groups, rows, tile)
    dot_kernel[(q8_programs + f16_programs,)](
        *q8_args, q8_programs, *f16_args, x.stride(0), rows, ASM=use_asm(some), **shape, **constants, **overlap()
    )  # fmt: skip


def _dot_cut(k: int, q8_n: int, f16_n: int, groups: int, rows: int, tile: Tile) -> tuple[int, int, dict[str, int]]:
    """Programs for the Q8_0 and for the F16 matrices, and the constants that say how they are cut."""
    bb, large = max(8, triton.next_power_of_2(rows)), q8_n >= 8192
    bn = _fit_group(tile.rows or (32 if large and bb <= 32 else 16), q8_n, groups)
    # Few rows of F16 are few programs, each of which reads long: they are made small.
    f16_bn = tile.f16_rows or tile.rows or (32 if f16_n >= 2048 else 16)
    span = _power_of_two(k, tile.span or (256 if large else 512))
    f16_span = _power_of_two(k, max(tile.f16_span or span // 2, 16))
    warps = tile.warps or span // 128
    parts = min(warps, f16_span // 16)
    stages = tile.stages or _stages(span * (bn + bb), k // span)
    f16_stages = tile.stages or _stages(f16_span * (2 * f16_bn + 4 * bb), k // f16_span)
    constants = {"BN": bn, "BB": bb, "UNITS": span // 128, "STAGES": stages}
    constants.update(F_BN=f16_bn, F_PARTS=parts, F_BK=f16_span // parts, F_STAGES=f16_stages, num_warps=warps)
    return triton.cdiv(q8_n, bn), triton.cdiv(f16_n, f16_bn), constants


def _stages(round_bytes: int, rounds: int) -> int:
    """So many that two programs find room in the shared memory of a multiprocessor, or one where rounds are large.

    Rounds on their way are one less than stages.
    """
    return max(2, min(max(3, 1 + (110 << 10) // round_bytes), 4, rounds + 1))


def _fit_group(bn: int, q8_n: int, groups: int) -> int:
    """Rows of a program, fewer where a group of rows would not be whole programs."""
    while q8_n // groups % bn and groups > 1:
        bn //= 2
    return bn


def _check_q8(planes: Q8Planes, x: Quantised, out: Tensor, groups: int) -> None:
    if x.words is None or x.k != groups * planes.k:
        raise ValueError(f"expected {groups * planes.k} channels in natural order, got {x.k}")
    if out.shape != (x.rows, planes.n) or out.stride(1) != 1:
        raise ValueError(f"expected an output of {x.rows} rows of {planes.n}, got {list(out.shape)}")


def _check_f16(planes: F16Planes, x: Tensor, out: Tensor) -> None:
    if x.shape[1] != planes.k or x.stride(1) != 1 or x.dtype != torch.float32:
        raise ValueError(f"expected float32 with {planes.k} channels, got {x.dtype} {list(x.shape)}")
    if out.shape != (x.shape[0], planes.n) or out.stride(1) != 1:
        raise ValueError(f"expected an output of {x.shape[0]} rows of {planes.n}, got {list(out.shape)}")


def gemv(planes: Q8Planes, x: Quantised, out: Tensor, tile: Tile = Tile()) -> None:
    """x @ weight^T as `ops.linear`, for 1 to 64 rows of quantised activations with words.

    Args:
        out: float32 [rows, n], columns contiguous.
    """
    _check_q8(planes, x, out, 1)
    _launch(planes, x, out, None, None, None, 1, tile)


def gemv_grouped(planes: Q8Planes, x: Quantised, out: Tensor, groups: int, tile: Tile = Tile()) -> None:
    """As `ops.grouped_linear`: each of `groups` runs of rows multiplies its own part of the channels.

    Args:
        planes: [groups * rows of a group, k].
        x: [rows, groups * k] with words.
        out: float32 [rows, groups * rows of a group], columns contiguous.
    """
    _check_q8(planes, x, out, groups)
    _launch(planes, x, out, None, None, None, groups, tile)


def gemv_f16(planes: F16Planes, x: Tensor, out: Tensor, tile: Tile = Tile()) -> None:
    """x @ weight^T as `ops.linear`, for 1 to 64 rows float32 [rows, k]; out float32 [rows, n], columns contiguous.

    With more than `DP4A_ROWS` rows, activations beyond 1.6e7 in size give what is not finite.
    """
    _check_f16(planes, x, out)
    _launch(None, None, None, planes, x, out, 1, tile)


def gemv_both(
    planes: Q8Planes,
    x: Quantised,
    out: Tensor,
    f16_planes: F16Planes,
    f16_x: Tensor,
    f16_out: Tensor,
    tile: Tile = Tile(),
) -> None:
    """`gemv` and `gemv_f16` of the same rows and channels in one launch."""
    _check_q8(planes, x, out, 1)
    _check_f16(f16_planes, f16_x, f16_out)
    if planes.k != f16_planes.k or out.shape[0] != f16_out.shape[0]:
        raise ValueError(f"{out.shape[0]} rows of {planes.k} and {f16_out.shape[0]} rows of {f16_planes.k} differ")
    _launch(planes, x, out, f16_planes, f16_x, f16_out, 1, tile)
