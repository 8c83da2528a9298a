"""The tensor-core path of `gemv`: matrices times 5 to 64 rows of activations.

Q8_0 is multiplied in integers, whose sums of 32 get their scales as float32, F16 in fp16, with float32 activations as
two fp16 terms each. A program goes through the channels in rounds, each of which is one three-dimensional dot: warp i
takes unit i (128 channels) of the round. So programs of few weight rows have several warps too, and a round reads every
row in one contiguous piece. One dot after the other, with the warps along the rows, took twice as long at 16 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.ops.kernels.intrinsics import behind, rounded_product

COARSE = tl.constexpr(2.0**-8)  # float activations as fp16 are those times this: fp16 alone ends at 65504
FINE = tl.constexpr(2.0**11)  # what fp16 rounds off, times this, fits fp16 again and stays clear of its smallest values

# The bits of 1.5 * 2^23. An integer sum that starts there is, read as float32, that number plus the sum: a subtraction
# takes the place of the slower conversion. Exact for sums below 2^22 in size, and 32 products of bytes stay below 2^20.
MAGIC_BITS = tl.constexpr(0x4B400000)
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _q8_dot(
    codes, scales, x8, xs, out, program, n, out_stride, rows,
    K: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BN rows of a Q8_0 matrix times up to BB rows of activations: a dot of 4 UNITS batches of 32 channels a round."""
    target = program * BN + tl.arange(0, BN)
    row = tl.minimum(target, n - 1).to(tl.int64)
    group = 0 if GROUPS == 1 else (program * BN) // GROUP_ROWS
    batch = tl.arange(0, BB)
    b = tl.minimum(batch, rows - 1) * GROUPS + group
    i = tl.arange(0, UNITS * 128)
    w_at = codes + row[:, None] * K + i[None, :]
    x_at = x8 + b[:, None] * K + i[None, :]
    s_at = scales + row[:, None] * (K // 32) + tl.arange(0, UNITS * 4)[None, :]
    xs_at = xs + b[:, None] * (K // 128) + tl.arange(0, UNITS)[None, :]
    start = tl.full([4 * UNITS, BN, BB], MAGIC_BITS, tl.int32)
    total = tl.zeros([UNITS, BN, BB], tl.float32)
    # A number of stages on the loop itself lets the scales run ahead too, not only the operands of the dot.
    for unit in tl.range(0, K // 128, UNITS, num_stages=STAGES):
        w = tl.reshape(tl.load(w_at + unit * 128), [BN, UNITS, 4, 32])
        x = tl.reshape(tl.load(x_at + unit * 128), [BB, UNITS, 4, 32])
        s = tl.reshape(tl.load(s_at + unit * 4), [BN, UNITS, 4])
        x_scale = tl.permute(tl.load(xs_at + unit), (1, 0))
        # Group j of unit u is batch j * UNITS + u: one warp has a unit, and its sum stays there.
        w = tl.reshape(tl.permute(w, (2, 1, 0, 3)), [4 * UNITS, BN, 32])
        x = tl.reshape(tl.permute(x, (2, 1, 3, 0)), [4 * UNITS, 32, BB])
        sums = tl.dot(w, x, start, out_dtype=tl.int32).to(tl.float32, bitcast=True) - MAGIC
        s = tl.permute(s, (2, 1, 0)).to(tl.float32)
        part = tl.sum(rounded_product(tl.reshape(sums, [4, UNITS, BN, BB]), s[:, :, :, None], ASM), 0)
        total += part * x_scale[:, None, :]
    at = out + batch[None, :] * out_stride + target[:, None]
    tl.store(at, tl.sum(total, 0), mask=(batch < rows)[None, :] & (target < n)[:, None])


@triton.jit
def _f16_dot(
    weight, x, out, program, n, x_stride, out_stride, rows,
    K: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN rows of an F16 matrix times up to BB rows of float32, PARTS times BK channels a round, one part a warp."""
    target = program * BN + tl.arange(0, BN)
    row = tl.minimum(target, n - 1).to(tl.int64)
    batch = tl.arange(0, BB)
    i = tl.arange(0, PARTS * BK)
    w_at = weight + row[:, None] * K + i[None, :]
    x_at = x + tl.minimum(batch, rows - 1)[:, None] * x_stride + i[None, :]
    total = tl.zeros([PARTS, BN, BB], tl.float32)
    rest = tl.zeros([PARTS, BN, BB], tl.float32)
    for k in tl.range(0, K, PARTS * BK, num_stages=STAGES):
        w = tl.permute(tl.reshape(tl.load(w_at + k), [BN, PARTS, BK]), (1, 0, 2))
        values = tl.permute(tl.reshape(tl.load(x_at + k), [BB, PARTS, BK]), (1, 2, 0)) * COARSE
        coarse = values.to(tl.float16)
        fine = ((values - coarse.to(tl.float32)) * FINE).to(tl.float16)
        total = tl.dot(w, coarse, total)
        rest = tl.dot(w, fine, rest)
    y = tl.sum((total + rest * (1 / FINE)) * (1 / COARSE), 0)
    at = out + batch[None, :] * out_stride + target[:, None]
    tl.store(at, y, mask=(batch < rows)[None, :] & (target < n)[:, None])


@triton.jit
def dot_kernel(
    codes, scales, x8, xs, q8_out, q8_n, q8_stride, q8_programs,
    weight, x, f16_out, f16_n, f16_stride, x_stride, rows,
    K: tl.constexpr, GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, Q8: tl.constexpr, F16: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    F_BN: tl.constexpr, F_PARTS: tl.constexpr, F_BK: tl.constexpr, F_STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    program = tl.program_id(0)
    if Q8 & F16:
        # The programs of F16 read more, so they go first.
        f16_programs = tl.num_programs(0) - q8_programs
        if program < f16_programs:
            _f16_dot(
                weight, x, f16_out, program, f16_n, x_stride, f16_stride, rows, K, F_BN, BB, F_PARTS, F_BK, F_STAGES
            )  # fmt: skip
        else:
            _q8_dot(
                codes, scales, x8, xs, q8_out, program - f16_programs, q8_n, q8_stride, rows,
                K, 1, 1, BN, BB, UNITS, STAGES, ASM,
            )  # fmt: skip
    elif Q8:
        _q8_dot(
            codes, scales, x8, xs, q8_out, program, q8_n, q8_stride, rows,
            K, GROUPS, GROUP_ROWS, BN, BB, UNITS, STAGES, ASM,
        )  # fmt: skip
    else:
        _f16_dot(
            weight, x, f16_out, program, f16_n, x_stride, f16_stride, rows, K, F_BN, BB, F_PARTS, F_BK, F_STAGES
        )  # fmt: skip
