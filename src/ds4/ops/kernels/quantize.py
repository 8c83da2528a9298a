"""Activations as signed bytes, plain or fused with what comes before.

A value is scale * code with scale = (largest magnitude of its group) / 127 and codes rounded to nearest. `Quantised`
holds them as the matrix kernels want them: for Q8_0 in natural order and groups of 128, for experts in the order of
their planes and groups of 32. Most of what is between an expert's products is small beside the largest of its 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap
from ds4.ops.kernels.planes import UNIT


@dataclass(frozen=True)
class Quantised:
    """Quantised activations of `rows` rows of k channels, U = k / 128 units each.

    Attributes:
        scales: float32 [rows, U], those of `words`; None without them.
        words: int32 [rows, k/4], four codes a word in natural order (for Q8_0 matrices), or None.
        lanes: int32 [rows, 8, U, 4], the 32 words of a unit in fours, as expert planes have them, or None.
        fine: float32 [rows, U, 4], the scales of `lanes`; None without them.
        sums: int32 [rows, U, 4], word j: sums of the two halves of group j of a unit as two int16 (for formats with
            minima), or None.
    """

    scales: Tensor | None = None
    words: Tensor | None = None
    lanes: Tensor | None = None
    fine: Tensor | None = None
    sums: Tensor | None = None

    @classmethod
    def allocate(
        cls, rows: int, k: int, device: torch.device | str, words: bool = True, lanes: bool = False, sums: bool = False
    ) -> Quantised:
        """Buffers without content; `sums` are those of `lanes`."""
        if k % UNIT:
            raise ValueError(f"{k} channels cannot be quantised: not a multiple of {UNIT}")
        if sums and not lanes:
            raise ValueError("sums are those of lanes")
        u = k // UNIT

        def take(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            scales=take(rows, u).view(torch.float32) if words else None,
            words=take(rows, k // 4) if words else None,
            lanes=take(rows, 8, u, 4) if lanes else None,
            fine=take(rows, u, 4).view(torch.float32) if lanes else None,
            sums=take(rows, u, 4) if sums else None,
        )

    @property
    def _some(self) -> Tensor:
        some = self.lanes if self.words is None else self.words
        assert some is not None
        return some

    @property
    def rows(self) -> int:
        return self._some.shape[0]

    @property
    def k(self) -> int:
        return self._some[0].numel() * 4

    def codes(self, lanes: bool = False) -> Tensor:
        """int8 [rows, k] in natural order: those of words, or, if asked or if there are no others, those of lanes."""
        if self.words is not None and not lanes:
            return self.words.view(torch.int8).view(self.rows, self.k)
        assert self.lanes is not None
        return self.lanes.transpose(1, 2).contiguous().view(torch.int8).view(self.rows, self.k)

    def dequantise(self, lanes: bool = False) -> Tensor:
        """float32 [rows, k], the values that Q8_0 matrices see, or experts: of the same codes as `codes`."""
        scales = self.fine if lanes or self.scales is None else self.scales
        assert scales is not None
        blocks = self.codes(lanes).view(self.rows, scales.numel() // self.rows, -1).float()
        return (blocks * scales.view(self.rows, -1, 1)).view(self.rows, self.k)


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def quantise_groups(x):
    """x float32 [groups, n] -> codes int32 [groups, n] and scales [groups]. A group of zeros has scale 0."""
    # Floats that are not negative are ordered like their bits, whose maximum over a warp is one instruction.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    inverse = 127.0 / tl.maximum(largest, 1e-30)
    return tl.floor(x * inverse[:, None] + 0.5).to(tl.int32), largest / 127.0


@triton.jit
def store_quantised(
    x, u, live, scales, words, lanes, fine, sums,
    U: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Quantise x float32 [units, 128] and store it into one row of a `Quantised`, whose pointers come already advanced.

    u: int32 [units], which units of the row these are; live: which of them exist. For kernels that fuse this behind
    something else.
    """
    UB: tl.constexpr = x.shape[0]
    place = tl.arange(0, 4)[None, None, :]
    t = tl.arange(0, 32)[None, :]
    if WORDS:
        codes, scale = quantise_groups(x)
        tl.store(scales + u, scale, mask=live)
        word = tl.sum((tl.reshape(codes, [UB, 32, 4]) & 255) << (8 * place), axis=2)
        tl.store(words + u[:, None] * 32 + t, word, mask=live[:, None])
    if LANES:
        codes, scale = quantise_groups(tl.reshape(x, [4 * UB, 32]))
        j = tl.arange(0, 4)[None, :]
        tl.store(fine + u[:, None] * 4 + j, tl.reshape(scale, [UB, 4]), mask=live[:, None])
        word = tl.sum((tl.reshape(codes, [UB, 32, 4]) & 255) << (8 * place), axis=2)
        tl.store(lanes + ((t // 4) * U + u[:, None]) * 4 + t % 4, word, mask=live[:, None])
    if SUMS:  # of the codes of lanes
        halves = tl.reshape(tl.sum(tl.reshape(codes, [UB, 8, 16]), axis=2), [UB, 4, 2])
        second = tl.arange(0, 2)[None, None, :] == 1
        pair = tl.sum(tl.where(second, halves << 16, halves & 0xFFFF), axis=2)
        tl.store(sums + u[:, None] * 4 + tl.arange(0, 4)[None, :], pair, mask=live[:, None])


@triton.jit
def _quantise_block(
    x, x_stride, row, block, scales, words, lanes, fine, sums,
    U: tl.constexpr, UB: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    u = block * UB + tl.arange(0, UB)
    live = u < U
    at = u[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    store_quantised(
        values, u, live, scales + row * U, words + row * (32 * U), lanes + row * (32 * U), fine + row * (4 * U),
        sums + row * (4 * U), U, WORDS, LANES, SUMS,
    )  # fmt: skip


@triton.jit
def _swiglu_block(
    gate, up, x_stride, weights, clamp, hidden, row, block, scales, words, lanes, fine, sums,
    U: tl.constexpr, UB: tl.constexpr, WEIGHTS: tl.constexpr, HIDDEN: tl.constexpr, CODES: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    u = block * UB + tl.arange(0, UB)
    live = u < U
    at = u[:, None] * 128 + tl.arange(0, 128)[None, :]
    g = tl.load(gate + row * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    v = tl.load(up + row * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    g = tl.minimum(g, clamp)
    values = g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(v, -clamp), clamp)
    if WEIGHTS:
        values = values * tl.load(weights + row)
    if HIDDEN:
        tl.store(hidden + row * (128 * U) + at, values.to(hidden.dtype.element_ty), mask=live[:, None])
    if CODES:
        store_quantised(
            values, u, live, scales + row * U, words + row * (32 * U), lanes + row * (32 * U), fine + row * (4 * U),
            sums + row * (4 * U), U, WORDS, LANES, SUMS,
        )  # fmt: skip


@triton.jit
def _quantise_kernel(
    x, x_stride, scales, words, lanes, fine, sums,
    U: tl.constexpr, UB: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    _quantise_block(x, x_stride, row, tl.program_id(1), scales, words, lanes, fine, sums, U, UB, WORDS, LANES, SUMS)


@triton.jit
def _rms_norm_kernel(
    x, x_stride, weight, eps, normed, normed_stride, scales, words, lanes, fine, sums,
    U: tl.constexpr, UB: tl.constexpr, WEIGHT: tl.constexpr, NORMED: tl.constexpr, CODES: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, UB)
    live = u < U
    at = u[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    square = tl.sum(tl.sum(values * values, axis=1), axis=0)
    values = values * (1.0 / tl.sqrt(square / (U * 128) + eps))
    if WEIGHT:
        values = values * tl.load(weight + at, mask=live[:, None], other=0.0)
    if NORMED:
        tl.store(normed + row * normed_stride + at, values.to(normed.dtype.element_ty), mask=live[:, None])
    if CODES:
        store_quantised(
            values, u, live, scales + row * U, words + row * (32 * U), lanes + row * (32 * U), fine + row * (4 * U),
            sums + row * (4 * U), U, WORDS, LANES, SUMS,
        )  # fmt: skip


@triton.jit
def _swiglu_kernel(
    gate, up, x_stride, weights, clamp, hidden, scales, words, lanes, fine, sums,
    U: tl.constexpr, UB: tl.constexpr, WEIGHTS: tl.constexpr, HIDDEN: tl.constexpr, CODES: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _swiglu_block(
        gate, up, x_stride, weights, clamp, hidden, row, tl.program_id(1), scales, words, lanes, fine, sums,
        U, UB, WEIGHTS, HIDDEN, CODES, WORDS, LANES, SUMS,
    )  # fmt: skip


@triton.jit
def _both_kernel(
    x, x_stride, scales, words, lanes, fine, sums, rows,
    gate, up, s_stride, clamp, s_scales, s_words, s_lanes, s_fine, s_sums,
    U: tl.constexpr, S_U: tl.constexpr, UB: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, SUMS: tl.constexpr,
    S_WORDS: tl.constexpr, S_LANES: tl.constexpr, S_SUMS: tl.constexpr,
    PDL: tl.constexpr = 0,
):  # fmt: skip
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if row < rows:
        _quantise_block(x, x_stride, row, block, scales, words, lanes, fine, sums, U, UB, WORDS, LANES, SUMS)
    else:
        _swiglu_block(
            gate, up, s_stride, gate, clamp, gate, row - rows, block, s_scales, s_words, s_lanes, s_fine, s_sums,
            S_U, UB, False, False, True, S_WORDS, S_LANES, S_SUMS,
        )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def quantised_args(out: Quantised | None, stand_in: Tensor) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """The five pointers of a `Quantised`, a stand-in where there is none, and which are there."""
    if out is None:
        out = Quantised()
    parts = {"WORDS": out.words, "LANES": out.lanes, "SUMS": out.sums}
    tensors = (out.scales, out.words, out.lanes, out.fine, out.sums)
    return tuple(stand_in if t is None else t for t in tensors), {name: t is not None for name, t in parts.items()}


def _check(x: Tensor, channels: int, out: Quantised | None) -> int:
    """Units of a row, after a look at the shapes."""
    if x.dim() != 2 or x.stride(1) != 1 or channels % UNIT:
        raise ValueError(f"expected rows of whole units of {UNIT} channels, got {list(x.shape)}")
    if out is not None and (out.k != channels or out.rows != x.shape[0]):
        raise ValueError(f"{x.shape[0]} rows of {channels} do not fit buffers of {out.rows} rows of {out.k}")
    return channels // UNIT


def quantise(x: Tensor, out: Quantised) -> None:
    """x float32, bfloat16 or float16 [rows, k], rows contiguous -> `out`."""
    units = _check(x, x.shape[1], out)
    targets, orders = quantised_args(out, x)
    block = min(4, triton.next_power_of_2(units))
    _quantise_kernel[(x.shape[0], triton.cdiv(units, block))](
        x,
        x.stride(0),
        *targets,
        U=units,
        UB=block,
        **orders,
        num_warps=block,
        **overlap(early=True),
    )


def rms_norm_quantise(
    x: Tensor, weight: Tensor | None, eps: float, out: Quantised | None, normed: Tensor | None = None
) -> None:
    """`ops.rms_norm` of each row, quantised into `out`.

    Args:
        x: float32, bfloat16 or float16 [rows, k], rows contiguous.
        weight: float32 [k] or None.
        out: where the codes go, or None.
        normed: any float dtype [rows, k], takes the normalised rows as they are, or None.
    """
    units = _check(x, x.shape[1], out)
    targets, orders = quantised_args(out, x)
    block = triton.next_power_of_2(units)
    _rms_norm_kernel[(x.shape[0],)](
        x,
        x.stride(0),
        x if weight is None else weight,
        eps,
        x if normed is None else normed,
        0 if normed is None else normed.stride(0),
        *targets,
        U=units,
        UB=block,
        WEIGHT=weight is not None,
        NORMED=normed is not None,
        CODES=out is not None,
        **orders,
        num_warps=min(16, max(1, block // 4)),
        **overlap(early=True),
    )


def swiglu_quantise(
    gate_up: Tensor, clamp: float, out: Quantised | None, weights: Tensor | None = None, hidden: Tensor | None = None
) -> None:
    """`ops.swiglu` of each row, quantised into `out`.

    Args:
        gate_up: float32, bfloat16 or float16 [rows, 2 k]: the gate's channels, then up's.
        weights: float32 [rows], multiplied in before quantising, or None.
        hidden: any float dtype [rows, k], contiguous, takes the values as they are, or None.
    """
    k = gate_up.shape[1] // 2
    units = _check(gate_up, k, out)
    targets, orders = quantised_args(out, gate_up)
    block = min(4, triton.next_power_of_2(units))
    _swiglu_kernel[(gate_up.shape[0], triton.cdiv(units, block))](
        gate_up,
        gate_up[:, k:],
        gate_up.stride(0),
        gate_up if weights is None else weights,
        clamp,
        gate_up if hidden is None else hidden,
        *targets,
        U=units,
        UB=block,
        WEIGHTS=weights is not None,
        HIDDEN=hidden is not None,
        CODES=out is not None,
        **orders,
        num_warps=block,
    )


def quantise_and_swiglu(x: Tensor, out: Quantised, gate_up: Tensor, clamp: float, swiglu_out: Quantised) -> None:
    """`quantise(x, out)` and `swiglu_quantise(gate_up, clamp, swiglu_out)` in one launch.

    At decode these are the hidden values of the routed experts and those of the shared expert.
    """
    k = gate_up.shape[1] // 2
    units, s_units = _check(x, x.shape[1], out), _check(gate_up, k, swiglu_out)
    targets, orders = quantised_args(out, x)
    s_targets, s_orders = quantised_args(swiglu_out, gate_up)
    block = min(4, triton.next_power_of_2(max(units, s_units)))
    _both_kernel[(x.shape[0] + gate_up.shape[0], triton.cdiv(max(units, s_units), block))](
        x,
        x.stride(0),
        *targets,
        x.shape[0],
        gate_up,
        gate_up[:, k:],
        gate_up.stride(0),
        clamp,
        *s_targets,
        U=units,
        S_U=s_units,
        UB=block,
        **orders,
        **{f"S_{name}": there for name, there in s_orders.items()},
        num_warps=block,
        **overlap(early=True),
    )
