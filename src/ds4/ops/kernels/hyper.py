"""Hyper-connections: the end of one sublayer and the start of the next in two launches, for one row or many.

The first launch writes a sublayer's output back into the streams (`ops.hc_post`) and multiplies the new streams with
the mixing matrix, cut along the channels: each program leaves sums of its channels. The second adds those up in a
fixed order and gives the next sublayer's input, normalised and quantised; beside that, in programs of their own because
twenty rounds of Sinkhorn take as long as all the rest, what the next write-back needs.

Up to `FEW_ROWS` rows are multiplied one by one, more on the tensor cores: as tf32, in which F16 weights are exact and
a stream is the sum of two terms, so the products lose nothing that float32 would keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import asked_for, behind, overlap, prefetch, reciprocal, use_asm
from ds4.ops.kernels.planes import UNIT
from ds4.ops.kernels.quantize import Quantised, quantised_args, store_quantised
from ds4.ops.kernels.sinkhorn import matrix, sinkhorn

STREAMS = 4
COEFFICIENTS = STREAMS * (2 + STREAMS)
"""Floats of a row of coefficients: pre, post, then comb row by row."""
FEW_ROWS = 8

_WIDTH = 32  # floats of one program's sums: pre, the sum of squares at 4, post from 8 and comb from 16 on
_UNITS_PER_WARP = 8  # of the second launch: four warps for 4096 channels, one for each scheduler of a multiprocessor


@triton.jit(do_not_specialize=["rows"])
def _stream_kernel(
    streams, target, index, y, y_row, y_part, extra, extra_row, coefficients, fn, scale, base, weight, partials, rows,
    D: tl.constexpr, POST: tl.constexpr, PARTS: tl.constexpr, EXTRA: tl.constexpr, INDEX: tl.constexpr,
    MIX: tl.constexpr, NM: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    split = tl.program_id(1)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    live = r < rows
    source = r.to(tl.int64)
    if INDEX:
        source = tl.load(index + r, mask=live, other=0).to(tl.int64)
    here = live[:, None]
    streams += source[:, None] * (4 * D)
    row = r.to(tl.int64)[:, None]
    n = tl.arange(0, NP)
    if MIX:
        squares = tl.zeros([BM, C], tl.float32)
        if DOT:
            sums = tl.zeros([BM, NP], tl.float32)
        else:
            lanes = tl.zeros([NP, C], tl.float32)
            # The second launch's constants too: a whole step went through the L2 since they were there last.
            if split == 0:
                prefetch(scale, ASM)
                prefetch(base, ASM)
    for step in range(STEPS):
        d = (split * STEPS + step) * C + tl.arange(0, C)
        if MIX and not DOT:
            prefetch(weight + d, ASM)
            # Asked for up here: below a store they would wait until what is stored is known.
            matrices = ()
            for k in tl.static_range(4):
                at = fn + n[:, None] * (4 * D) + k * D + d[None, :]
                matrices = matrices + (tl.load(at, mask=n[:, None] < NM, other=0.0),)
        if POST and not DOT:
            factors = ()
            for j in tl.static_range(20):
                factors = factors + (tl.load(coefficients + row * 24 + 4 + j, mask=here, other=0.0),)
        old = ()
        for j in tl.static_range(4):
            old = old + (tl.load(streams + j * D + d[None, :], mask=here, other=0.0),)
        if POST:
            if not DOT:
                tl.debug_barrier()  # the compiler would move loads from above it down behind sums of what is below
            add = tl.load(y + row * y_row + d[None, :], mask=here, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                add += tl.load(y + row * y_row + part * y_part + d[None, :], mask=here, other=0.0).to(tl.float32)
            if EXTRA:
                add += tl.load(extra + row * extra_row + d[None, :], mask=here, other=0.0).to(tl.float32)
        for k in tl.static_range(4):
            new = old[k]
            if POST:
                if DOT:  # read anew each time: twenty numbers for every row are too many to keep
                    new = tl.load(coefficients + row * 24 + 4 + k, mask=here, other=0.0) * add
                    for j in tl.static_range(4):
                        new += tl.load(coefficients + row * 24 + 8 + 4 * j + k, mask=here, other=0.0) * old[j]
                else:
                    new = factors[k] * add
                    for j in tl.static_range(4):
                        new += factors[4 + 4 * j + k] * old[j]
                tl.store(target + row * (4 * D) + k * D + d[None, :], new, mask=here)
            if MIX:
                squares += new * new
                if DOT:
                    w = tl.load(fn + n[None, :] * (4 * D) + k * D + d[:, None], mask=n[None, :] < NM, other=0.0)
                    w = w.to(tl.float32)
                    # tf32 keeps 11 bits: the product of the upper ones is exact, and so is what they leave.
                    bits = new.to(tl.int32, bitcast=True) & -8192
                    upper = bits.to(tl.float32, bitcast=True)
                    sums = tl.dot(new - upper, w, sums, input_precision="tf32")
                    sums = tl.dot(upper, w, sums, input_precision="tf32")
                else:
                    lanes += matrices[k].to(tl.float32) * new
    if MIX:
        at = partials + (row * SPLITS + split) * 32
        place = (n + 4 * (n >= 4) + 4 * (n >= 8))[None, :]
        if DOT:
            tl.store(at + place, sums, mask=here & (n[None, :] < NM))
        else:
            tl.store(at + place, tl.sum(lanes, 1)[None, :], mask=here & (n[None, :] < NM))
        tl.store(at + 4, tl.sum(squares, 1)[:, None], mask=here)


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    return reciprocal(1.0 + tl.exp(-x), ASM)


@triton.jit
def _input_of_row(
    streams, row, source, partials, scale, base, weight, normed, normed_row,
    scales, words, lanes, fine, sums, rms_eps, hc_eps,
    U: tl.constexpr, UB: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    NORMED: tl.constexpr, CODES: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The weighted sum of the streams, normalised and quantised."""
    D: tl.constexpr = 128 * U
    split = tl.arange(0, SP)
    i = tl.arange(0, 8)
    u = tl.arange(0, UB)
    live = u < U
    at = u[:, None] * 128 + tl.arange(0, 128)[None, :]
    # All that is loaded is asked for before anything is waited for, in the order in which it is needed: this program
    # is alone on its multiprocessor.
    partials += row * (SPLITS * 32) + split[:, None] * 32 + i[None, :]
    m = tl.load(partials, mask=(split < SPLITS)[:, None], other=0.0)
    a = tl.load(scale)
    b = tl.load(base + i, mask=i < 4, other=0.0)
    s0 = tl.load(streams + source * (4 * D) + at, mask=live[:, None], other=0.0)
    s1 = tl.load(streams + source * (4 * D) + D + at, mask=live[:, None], other=0.0)
    s2 = tl.load(streams + source * (4 * D) + 2 * D + at, mask=live[:, None], other=0.0)
    s3 = tl.load(streams + source * (4 * D) + 3 * D + at, mask=live[:, None], other=0.0)
    gain = tl.load(weight + at, mask=live[:, None], other=0.0)
    m = tl.where(asked_for(ASM), m, 0.0)
    m = tl.sum(m, axis=0)
    square = tl.sum(tl.where(i == 4, m, 0.0), axis=0)
    pre = _sigmoid(tl.where(i < 4, m, 0.0) * tl.rsqrt(square / (4 * D) + rms_eps) * a + b, ASM) + hc_eps
    x = tl.sum(tl.where(i == 0, pre, 0.0), axis=0) * s0
    x += tl.sum(tl.where(i == 1, pre, 0.0), axis=0) * s1
    x += tl.sum(tl.where(i == 2, pre, 0.0), axis=0) * s2
    x += tl.sum(tl.where(i == 3, pre, 0.0), axis=0) * s3
    square = tl.sum(tl.sum(tl.reshape(x * x, [UB, 32, 4]), axis=2))
    x = x * tl.rsqrt(square / D + rms_eps)
    x = x * gain
    if NORMED:
        tl.store(normed + row * normed_row + at, x.to(normed.dtype.element_ty), mask=live[:, None])
    if CODES:
        store_quantised(
            x, u, live, scales + row * U, words + row * (32 * U), lanes + row * (32 * U), fine + row * (4 * U),
            sums + row * (4 * U), U, WORDS, LANES, SUMS,
        )  # fmt: skip


@triton.jit
def _coefficients_of_rows(
    first, partials, scale, base, coefficients, rows, rms_eps, hc_eps,
    D: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, LR: tl.constexpr, ROUNDS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """pre, post and comb of LR rows, each row's comb in registers of one lane."""
    split = tl.arange(0, SP)
    r = first + tl.arange(0, LR)
    i = tl.arange(0, 32)
    live = r < rows
    at = partials + (r.to(tl.int64)[:, None] * SPLITS + split[None, :])[:, :, None] * 32 + i[None, None, :]
    here = (live[:, None] & (split < SPLITS)[None, :])[:, :, None] & ((i < 12) | (i >= 16))[None, None, :]
    m = tl.load(at, mask=here, other=0.0)
    # The place of a sum among the coefficients, right where there is one.
    place = tl.max_contiguous(tl.multiple_of(i - 4 * (i >= 4) - 4 * (i >= 12), 4), 4)
    is_pre, is_post = i < 4, (i >= 8) & (i < 12)
    a = tl.load(scale + (i >= 4).to(tl.int32) + (i >= 16).to(tl.int32))
    b = tl.load(base + place, mask=is_pre | is_post | (i >= 16), other=0.0)
    m = tl.where(asked_for(ASM), m, 0.0)
    m = tl.sum(m, axis=1)
    square = tl.sum(tl.where((i == 4)[None, :], m, 0.0), axis=1)
    logits = m * tl.rsqrt(square / (4 * D) + rms_eps)[:, None] * a[None, :] + b[None, :]
    e = tl.reshape(logits, [LR, 8, 4])
    e = tl.exp(e - tl.max(e, axis=2)[:, :, None])
    e = e * reciprocal(tl.sum(e, axis=2), ASM)[:, :, None] + hc_eps
    _, e = tl.split(tl.permute(tl.reshape(e, [LR, 2, 16]), [0, 2, 1]))
    comb = sinkhorn(matrix(e), hc_eps, ROUNDS, ASM)
    target = coefficients + r.to(tl.int64) * 24
    for n in tl.static_range(4):
        for j in tl.static_range(4):
            tl.store(target + (8 + 4 * n + j), comb[n][j], mask=live)
    gate = _sigmoid(tl.where((is_pre | is_post)[None, :], logits, 0.0), ASM)
    gate = tl.where(is_pre[None, :], gate + hc_eps, 2.0 * gate)
    tl.store(target[:, None] + place[None, :], gate, mask=live[:, None] & (is_pre | is_post)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    streams, index, partials, scale, base, weight, coefficients, normed, normed_row,
    scales, words, lanes, fine, sums, rows, rms_eps, hc_eps,
    U: tl.constexpr, UB: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, LR: tl.constexpr,
    ROUNDS: tl.constexpr, HEAD: tl.constexpr, INDEX: tl.constexpr, NORMED: tl.constexpr,
    CODES: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    program = tl.program_id(0)
    if program < rows:
        row = program.to(tl.int64)
        source = row
        if INDEX:
            source = tl.load(index + row).to(tl.int64)
        _input_of_row(
            streams, row, source, partials, scale, base, weight, normed, normed_row,
            scales, words, lanes, fine, sums, rms_eps, hc_eps,
            U, UB, SPLITS, SP, NORMED, CODES, WORDS, LANES, SUMS, ASM,
        )  # fmt: skip
    elif not HEAD:
        _coefficients_of_rows(
            (program - rows) * LR, partials, scale, base, coefficients, rows, rms_eps, hc_eps,
            128 * U, SPLITS, SP, LR, ROUNDS, ASM,
        )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HyperWeights:
    """One mixing matrix with its constants, on the device.

    Attributes:
        fn: float16 [24, 4 * hidden] contiguous, of the head [4, 4 * hidden].
        scale: float32 [3], of the head [1].
        base: float32 [24], of the head [4].
        norm: float32 [hidden], the RMS norm that follows.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Constants:
    """Numbers of the shape that hyper-connections need."""

    rms_eps: float = 1e-6
    hc_eps: float = 1e-6
    iterations: int = 20


@dataclass(frozen=True)
class Update:
    """What a sublayer adds to the streams.

    Attributes:
        y: [rows, hidden], or [rows, parts, hidden] whose parts are added in their order; any float dtype, hidden
            contiguous.
        coefficients: float32 [rows, 24], from the `hc_pre` that gave the sublayer its input.
        target: float32 [rows, 4, hidden], contiguous, takes the new streams. Not the memory of the old ones: several
            threads read what one of them writes.
        extra: [rows, hidden], added behind the parts, or None.
    """

    y: Tensor
    coefficients: Tensor
    target: Tensor
    extra: Tensor | None = None


@dataclass(frozen=True)
class _Cut:
    """How the first launch is cut: rows and channels of a tile, tiles of a program, programs along the channels.

    Larger tiles than these need more registers than a thread has: four streams and both halves of the product's left
    side are held at once.
    """

    rows: int
    channels: int
    steps: int
    splits: int


def _cut(rows: int, hidden: int, alone: bool = False) -> _Cut:
    power, few = hidden & -hidden, alone or rows <= FEW_ROWS
    if rows <= 64:
        channels = min(power, 32 if hidden <= 4096 or not few else 64)
        steps = 2 if hidden // channels > 128 and hidden // channels % 2 == 0 else 1
        return _Cut(1 if few else 16, channels, steps, hidden // channels // steps)
    channels = 16
    chunks, splits, programs = hidden // channels, 1, triton.cdiv(rows, 64)
    while programs * splits < 512 and splits < 64 and chunks % (2 * splits) == 0:
        splits *= 2
    return _Cut(64, channels, chunks // splits, splits)


def partial_floats(rows: int, hidden: int) -> int:
    """Floats of scratch (`partials`) that are enough for calls of up to `rows` rows."""
    return _WIDTH * max(r * _cut(r, hidden).splits for r in range(1, rows + 1))


def _check(streams: Tensor, rows: int, update: Update | None) -> int:
    hidden = streams.shape[2]
    if streams.dim() != 3 or streams.shape[1] != STREAMS or not streams.is_contiguous():
        raise ValueError(f"expected contiguous streams [rows, {STREAMS}, hidden], got {list(streams.shape)}")
    if hidden % UNIT or streams.dtype != torch.float32:
        raise ValueError(f"expected float32 with a multiple of {UNIT} channels, got {streams.dtype} {hidden}")
    if update is not None:
        y, extra = update.y, update.extra
        if (y.shape[0], y.shape[-1]) != (rows, hidden) or y.stride(-1) != 1 or y.dim() not in (2, 3):
            raise ValueError(f"expected an output of {rows} rows of {hidden}, got {list(y.shape)}")
        if extra is not None and (extra.shape != (rows, hidden) or extra.stride(1) != 1):
            raise ValueError(f"expected extra [{rows}, {hidden}], got {list(extra.shape)}")
        target = update.target
        if target.shape != streams.shape or target.dtype != torch.float32 or not target.is_contiguous():
            raise ValueError(f"expected new streams like the old ones, got {target.dtype} {list(target.shape)}")
        if target.data_ptr() == streams.data_ptr():
            raise ValueError("the new streams need memory of their own")
        if update.coefficients.shape != (rows, COEFFICIENTS) or not update.coefficients.is_contiguous():
            raise ValueError(f"expected coefficients [{rows}, {COEFFICIENTS}], got {list(update.coefficients.shape)}")
    return hidden


def _launch_streams(
    streams: Tensor,
    rows: int,
    wanted: Tensor | None,
    update: Update | None,
    weights: HyperWeights | None,
    partials: Tensor | None,
    alone: bool = False,
) -> _Cut:
    hidden = _check(streams, rows, update)
    cut = _cut(rows, hidden, alone)
    if partials is not None and partials.numel() < rows * cut.splits * _WIDTH:
        raise ValueError(f"{partials.numel()} floats of scratch, {rows * cut.splits * _WIDTH} are needed")
    y = streams if update is None else update.y
    extra = None if update is None else update.extra
    nm = 0 if weights is None else weights.fn.shape[0]
    few = cut.rows == 1
    _stream_kernel[(triton.cdiv(rows, cut.rows), cut.splits)](
        streams,
        streams if update is None else update.target,
        streams if wanted is None else wanted,
        y,
        y.stride(0),
        y.stride(1) if y.dim() == 3 else 0,
        y if extra is None else extra,
        0 if extra is None else extra.stride(0),
        streams if update is None else update.coefficients,
        *((streams,) * 4 if weights is None else (weights.fn, weights.scale, weights.base, weights.norm)),
        streams if partials is None else partials,
        rows,
        D=hidden,
        POST=update is not None,
        PARTS=y.shape[1] if y.dim() == 3 else 1,
        EXTRA=extra is not None,
        INDEX=wanted is not None,
        MIX=weights is not None,
        NM=nm,
        NP=32 if nm > 16 else 16,
        BM=cut.rows,
        C=cut.channels,
        STEPS=cut.steps,
        SPLITS=cut.splits,
        DOT=not few,
        ASM=use_asm(streams),
        num_warps=4,
        num_stages=2,
        **overlap(early=True),
    )
    return cut


def _launch_finish(
    streams: Tensor,
    rows: int,
    wanted: Tensor | None,
    cut: _Cut,
    weights: HyperWeights,
    partials: Tensor,
    coefficients: Tensor | None,
    constants: Constants,
    out: Quantised | None,
    normed: Tensor | None,
) -> None:
    hidden = streams.shape[2]
    if out is not None and (out.rows, out.k) != (rows, hidden):
        raise ValueError(f"{rows} rows of {hidden} do not fit buffers of {out.rows} rows of {out.k}")
    if normed is not None and (normed.shape != (rows, hidden) or normed.stride(1) != 1):
        raise ValueError(f"expected normed [{rows}, {hidden}], got {list(normed.shape)}")
    units = hidden // UNIT
    block = triton.next_power_of_2(units)
    head = coefficients is None
    # Enough rows side by side to fill the lanes, as many as their sums leave room for.
    together = 1 if cut.rows == 1 else max(1, min(32, 128 // triton.next_power_of_2(cut.splits)))
    targets, orders = quantised_args(out, partials)
    _finish_kernel[(rows if head else rows + triton.cdiv(rows, together),)](
        streams,
        streams if wanted is None else wanted,
        partials,
        weights.scale,
        weights.base,
        weights.norm,
        partials if coefficients is None else coefficients,
        streams if normed is None else normed,
        0 if normed is None else normed.stride(0),
        *targets,
        rows,
        constants.rms_eps,
        constants.hc_eps,
        U=units,
        UB=block,
        SPLITS=cut.splits,
        SP=triton.next_power_of_2(cut.splits),
        LR=together,
        ROUNDS=constants.iterations,
        HEAD=head,
        INDEX=wanted is not None,
        NORMED=normed is not None,
        CODES=out is not None,
        **orders,
        ASM=use_asm(streams),
        num_warps=min(16, max(1, block // _UNITS_PER_WARP)),
        **overlap(early=True),
    )


def hc_pre(
    streams: Tensor,
    weights: HyperWeights,
    partials: Tensor,
    coefficients: Tensor,
    out: Quantised | None = None,
    normed: Tensor | None = None,
    update: Update | None = None,
    constants: Constants = Constants(),
    alone: bool = False,
) -> None:
    """`ops.hc_post` of the sublayer before, if there is one, then `ops.hc_pre` and `ops.rms_norm` of the next.

    Args:
        streams: float32 [rows, 4, hidden], contiguous; with an update those before it, the new ones go to its target.
        partials: float32 scratch of `partial_floats(rows, hidden)`.
        coefficients: float32 [rows, 24], takes what the next update needs; may be the update's own.
        out: takes the normalised input quantised, or None.
        normed: [rows, hidden] of any float dtype, takes it as it is, or None.
        alone: each of up to 64 rows is multiplied by itself, so that its bits do not depend on how many there are.
    """
    rows = streams.shape[0]
    if weights.fn.shape != (COEFFICIENTS, STREAMS * streams.shape[2]) or not weights.fn.is_contiguous():
        raise ValueError(f"expected fn [{COEFFICIENTS}, {STREAMS * streams.shape[2]}], got {list(weights.fn.shape)}")
    if coefficients.shape != (rows, COEFFICIENTS) or not coefficients.is_contiguous():
        raise ValueError(f"expected coefficients [{rows}, {COEFFICIENTS}], got {list(coefficients.shape)}")
    cut = _launch_streams(streams, rows, None, update, weights, partials, alone)
    new = streams if update is None else update.target
    _launch_finish(new, rows, None, cut, weights, partials, coefficients, constants, out, normed)


def hc_post(streams: Tensor, update: Update) -> None:
    """`ops.hc_post` alone: streams float32 [rows, 4, hidden], the new ones go to the update's target."""
    _launch_streams(streams, streams.shape[0], None, update, None, None)


def hc_collapse(
    streams: Tensor,
    weights: HyperWeights,
    partials: Tensor,
    out: Quantised | None = None,
    normed: Tensor | None = None,
    update: Update | None = None,
    wanted: Tensor | None = None,
    constants: Constants = Constants(),
    alone: bool = False,
) -> None:
    """`ops.hc_collapse` and the output norm of all rows, or of those in `wanted`.

    Args:
        weights: of the head.
        out, normed, alone: as in `hc_pre`, one row for each row or each entry of `wanted`.
        update: as in `hc_pre`; not together with `wanted`.
        wanted: int32 or int64 [n], rows of the streams, or None for all.
    """
    if update is not None and wanted is not None:
        raise ValueError("streams are updated either whole or, before, with hc_post")
    if weights.fn.shape != (STREAMS, STREAMS * streams.shape[2]) or not weights.fn.is_contiguous():
        raise ValueError(f"expected fn [{STREAMS}, {STREAMS * streams.shape[2]}], got {list(weights.fn.shape)}")
    rows = streams.shape[0] if wanted is None else wanted.shape[0]
    cut = _launch_streams(streams, rows, wanted, update, weights, partials, alone)
    new = streams if update is None else update.target
    _launch_finish(new, rows, wanted, cut, weights, partials, None, constants, out, normed)
