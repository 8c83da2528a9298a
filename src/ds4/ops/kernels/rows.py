"""KV rows and index keys in planes: pack, unpack, and the step from a projection to a stored window row.

A row of head_dim channels, the last 64 of them rotary, is three planes: E4M3 bytes of the plain channels, the tail as
bfloat16, and one exponent byte for each 64 channels (the tail's byte is 0). A key is two: FP4 codes, the even channel
in the low half of a byte, and one exponent for each 32 channels. Both are what `ops.pack_row` and `ops.pack_key` give,
but for the eighth exponent byte, which makes a row's exponents a word.

Kernels hold rows as neighbouring channels, even and odd apart: that is what rope turns, what shares a byte of FP4 codes
or a word of stored values, and it takes no exchange between threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap

ROPE = 64
"""Rotary channels of a row or key, its last ones."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RowPlanes:
    """Rows of one layer: `lead` is [pages, 64] in a pool, [slots, ring] in a window, anything for loose rows.

    Attributes:
        codes: uint8 [*lead, head_dim - 64].
        tail: bfloat16 [*lead, 64].
        scales: uint8 [*lead, head_dim / 64].
    """

    codes: Tensor
    tail: Tensor
    scales: Tensor

    @classmethod
    def allocate(cls, *lead: int, head_dim: int, device: torch.device | str) -> RowPlanes:
        """Planes of zeros."""
        check_head_dim(head_dim)
        return cls(
            torch.zeros((*lead, head_dim - ROPE), dtype=torch.uint8, device=device),
            torch.zeros((*lead, ROPE), dtype=torch.bfloat16, device=device),
            torch.zeros((*lead, head_dim // 64), dtype=torch.uint8, device=device),
        )

    @property
    def head_dim(self) -> int:
        return self.codes.shape[-1] + ROPE

    def planes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.tail, self.scales

    def flat(self) -> RowPlanes:
        """The same as [1, rows]."""
        return RowPlanes(*(plane.reshape(1, -1, plane.shape[-1]) for plane in self.planes()))

    def layer(self, index: int) -> RowPlanes:
        """One layer of planes that have layers in front."""
        return RowPlanes(*(plane[index] for plane in self.planes()))

    def pairs(self) -> tuple[Any, ...]:
        """For kernels that write: codes as int16, tail as int32, exponents; then their strides over the first axis."""
        codes, tail, scales = self.codes.view(torch.int16), self.tail.view(torch.int32), self.scales
        return codes, tail, scales, codes.stride(0), tail.stride(0), scales.stride(0)

    def bytes(self) -> tuple[Any, ...]:
        """For kernels that read: codes, tail as int16, exponents; then their strides over the first axis."""
        tail = self.tail.view(torch.int16)
        return self.codes, tail, self.scales, self.codes.stride(0), tail.stride(0), self.scales.stride(0)

    def words(self) -> tuple[Any, ...]:
        """As `bytes`, with a row's exponents as one word."""
        tail, scales = self.tail.view(torch.int16), self.scales.view(_WORDS[self.scales.shape[-1]])
        return self.codes, tail, scales, self.codes.stride(0), tail.stride(0), scales.stride(0)


@dataclass(frozen=True)
class KeyPlanes:
    """Index keys of one layer, `lead` as in `RowPlanes`.

    Attributes:
        codes: uint8 [*lead, dim / 2].
        scales: uint8 [*lead, dim / 32].
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def allocate(cls, *lead: int, dim: int, device: torch.device | str) -> KeyPlanes:
        """Planes of zeros."""
        if dim != 128:
            raise ValueError(f"kernels take index keys of 128 channels, not {dim}")
        return cls(
            torch.zeros((*lead, dim // 2), dtype=torch.uint8, device=device),
            torch.zeros((*lead, dim // 32), dtype=torch.uint8, device=device),
        )

    @property
    def dim(self) -> int:
        return 2 * self.codes.shape[-1]

    def planes(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def flat(self) -> KeyPlanes:
        """The same as [1, rows]."""
        return KeyPlanes(*(plane.reshape(1, -1, plane.shape[-1]) for plane in self.planes()))

    def layer(self, index: int) -> KeyPlanes:
        """One layer of planes that have layers in front."""
        return KeyPlanes(*(plane[index] for plane in self.planes()))

    def bytes(self) -> tuple[Any, ...]:
        """Codes, exponents, and their strides over the first axis."""
        return self.codes, self.scales, self.codes.stride(0), self.scales.stride(0)


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError where kernels cannot hold a row."""
    if head_dim // 64 not in _WORDS or head_dim % 64:
        raise ValueError(f"kernels take rows of 128, 256 or 512 channels, not {head_dim}")


# --- device functions -------------------------------------------------------------------------------------------------


@triton.jit
def load_pairs(x, at, live):
    """float32 neighbours x[2 at] and x[2 at + 1], 0 where not live; x aligned to 8 bytes."""
    pair = tl.load(x.to(tl.pointer_type(tl.int64)) + at, mask=live, other=0)
    return even_of(pair), odd_of(pair)


@triton.jit
def even_of(pair):
    return pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def odd_of(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(field):
    """2^(field - 127), field from 1 to 254."""
    return (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """The bits of x rounded to bfloat16, int32, to nearest and ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def fp8_field(largest):
    """Exponent of the scale of a block: ceil(log2(max(largest, 1e-4) / 448)) + 127, from the bits; 448 = 1.75 * 2^8."""
    bits = tl.maximum(largest, 1e-4).to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def fp8_code(x):
    """E4M3 byte of x, |x| <= 448, as int32: to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Adding 2^14 leaves multiples of 2^-9, the step of the smallest values, in the last bits.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 0x3C800000, small, tl.minimum(normal, 126)) | ((bits >> 24) & 0x80)


@triton.jit
def fp8_value(code):
    """The value of an E4M3 byte, given as int32."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def fp4_field(largest):
    """Exponent field of the scale of a block: ceil(log2(max(largest, 6 * 2^-126) / 6)) + 127; 6 = 1.5 * 2^2."""
    bits = tl.maximum(largest.to(tl.int32, bitcast=True), 0x01C00000)
    return (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def fp4_size(x):
    """Code 0..7 of |x| <= 6: to nearest, ties to the even code."""
    s = tl.abs(x)
    code = (s > 0.25).to(tl.int32) + (s >= 0.75).to(tl.int32) + (s > 1.25).to(tl.int32) + (s >= 1.75).to(tl.int32)
    return code + (s > 2.5).to(tl.int32) + (s >= 3.5).to(tl.int32) + (s > 5.0).to(tl.int32)


@triton.jit
def fp4_code(x):
    """Code 0..15 of |x| <= 6."""
    return fp4_size(x) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def fp4_value(code):
    """The value of a code 0..15, int32; bits above the fourth are ignored."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def hadamard_pairs(even, odd, P: tl.constexpr):
    """Walsh-Hadamard transform of 2 P channels held as two [P]; natural order, scaled by (2 P)^-0.5."""
    i = tl.arange(0, P)
    bit = i[:, None] & i[None, :]
    bit ^= bit >> 4
    bit ^= bit >> 2
    bit ^= bit >> 1
    sign = tl.where((bit & 1) == 1, -1.0, 1.0)
    scale: tl.constexpr = (2 * P) ** -0.5
    return tl.sum(sign * (even + odd)[None, :], 1) * scale, tl.sum(sign * (even - odd)[None, :], 1) * scale


@triton.jit
def rope_pairs(even, odd, table, at, live, HALF: tl.constexpr):
    """Rotate pairs `at` of a table row (cosines, then sines); pairs that are not live stay."""
    cos = tl.load(table + at, mask=live, other=1.0)
    sin = tl.load(table + HALF + at, mask=live, other=0.0)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def write_row(even, odd, codes, tail, scales, HD: tl.constexpr):
    """Round and store a row held as two [HD/64, 32]; the pointers (int16, int32, bytes) come advanced to it."""
    NB: tl.constexpr = HD // 64
    block = tl.arange(0, NB)
    b, i = block[:, None], tl.arange(0, 32)[None, :]
    field = fp8_field(tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)))
    inverse = power_of_two(254 - field)[:, None]
    word = fp8_code(even * inverse) | (fp8_code(odd * inverse) << 8)
    tl.store(codes + b * 32 + i, word.to(tl.int16), mask=b < NB - 1)
    tl.store(tail + b * 0 + i, bf16_bits(even) | (bf16_bits(odd) << 16), mask=b == NB - 1)
    tl.store(scales + block, tl.where(block < NB - 1, field, 0).to(tl.uint8))


@triton.jit
def write_key(even, odd, codes, scales, P: tl.constexpr):
    """Round and store a transformed key held as two [P]; the pointers come advanced to it."""
    NB: tl.constexpr = P // 16
    e, o = tl.reshape(even, [NB, 16]), tl.reshape(odd, [NB, 16])
    field = fp4_field(tl.maximum(tl.max(tl.abs(e), 1), tl.max(tl.abs(o), 1)))
    inverse = power_of_two(254 - field)[:, None]
    byte = fp4_code(e * inverse) | (fp4_code(o * inverse) << 4)
    block = tl.arange(0, NB)
    tl.store(codes + block[:, None] * 16 + tl.arange(0, 16)[None, :], byte.to(tl.uint8))
    tl.store(scales + block, field.to(tl.uint8))


@triton.jit
def norm_rope_pairs(even, odd, weight, eps, table, HD: tl.constexpr):
    """RMS norm with weight, then rope on the last block, of a row held as two [HD/64, 32]."""
    NB: tl.constexpr = HD // 64
    b, i = tl.arange(0, NB)[:, None], tl.arange(0, 32)[None, :]
    total = tl.sum(tl.sum(even * even + odd * odd, 1), 0)
    scale = tl.rsqrt(total / HD + eps)
    w_even, w_odd = load_pairs(weight, b * 32 + i, b < NB)
    return rope_pairs(even * scale * w_even, odd * scale * w_odd, table, b * 0 + i, b == NB - 1, 32)


@triton.jit
def store_window_row(
    kv, weight, eps, table, codes, tail, scales, codes_to, tail_to, scales_to, WRITE_TO, HD: tl.constexpr,
    BOTH: tl.constexpr,
):  # fmt: skip
    """One row of a projection, normed, rotated, rounded and written; with BOTH a second time if WRITE_TO."""
    NB: tl.constexpr = HD // 64
    b, i = tl.arange(0, NB)[:, None], tl.arange(0, 32)[None, :]
    even, odd = load_pairs(kv, b * 32 + i, b < NB)
    even, odd = norm_rope_pairs(even, odd, weight, eps, table, HD)
    write_row(even, odd, codes, tail, scales, HD)
    if BOTH:
        if WRITE_TO:
            write_row(even, odd, codes_to, tail_to, scales_to, HD)


@triton.jit(do_not_specialize=["rows"])
def _window_kernel(
    kv, kv_stride, weight, eps, table, positions, slots, rows,
    codes, tail, scales, codes_stride, tail_stride, scales_stride,
    s_codes, s_tail, s_scales,
    RING: tl.constexpr, SCRATCH: tl.constexpr, HD: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position >= 0:
        slot = tl.load(slots + row).to(tl.int64)
        at = position % RING
        ring_codes = codes + slot * codes_stride + at * ((HD - 64) // 2)
        ring_tail = tail + slot * tail_stride + at * 32
        ring_scales = scales + slot * scales_stride + at * (HD // 64)
        x = kv + row.to(tl.int64) * kv_stride
        turn = table + row * 64
        if BOTH:
            # The ring keeps the last row that falls on a slot.
            later = row + RING
            last = tl.load(positions + later, mask=later < rows, other=-1) < 0
            to = (position % SCRATCH).to(tl.int64)
            s_codes += to * ((HD - 64) // 2)
            s_tail += to * 32
            s_scales += to * (HD // 64)
            store_window_row(
                x, weight, eps, turn, s_codes, s_tail, s_scales, ring_codes, ring_tail, ring_scales, last, HD, True
            )
        else:
            store_window_row(
                x, weight, eps, turn, ring_codes, ring_tail, ring_scales, s_codes, s_tail, s_scales, False, HD, False
            )


@triton.jit
def _before_kernel(
    positions, slots,
    codes, tail, scales, codes_stride, tail_stride, scales_stride, s_codes, s_tail, s_scales,
    RING: tl.constexpr, SCRATCH: tl.constexpr, HD: tl.constexpr,
):  # fmt: skip
    """Copies the ring's row 1 + program places before the chunk into the scratch ring."""
    position = tl.load(positions) - 1 - tl.program_id(0)
    if position >= 0:
        slot = tl.load(slots).to(tl.int64)
        source, to = position % RING, position % SCRATCH
        c = tl.arange(0, HD // 2)
        live = c < (HD - 64) // 2
        value = tl.load(codes + slot * codes_stride + source * ((HD - 64) // 2) + c, mask=live, other=0)
        tl.store(s_codes + to * ((HD - 64) // 2) + c, value, mask=live)
        c = tl.arange(0, 32)
        tl.store(s_tail + to * 32 + c, tl.load(tail + slot * tail_stride + source * 32 + c))
        c = tl.arange(0, HD // 64)
        value = tl.load(scales + slot * scales_stride + source * (HD // 64) + c)
        tl.store(s_scales + to * (HD // 64) + c, value)


@triton.jit(do_not_specialize=["rows"])
def _rope_kernel(positions, frequencies, back, out, rows, HALF: tl.constexpr, PDL: tl.constexpr = 0):
    behind(PDL)
    row, kind = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, HALF)
    position = tl.maximum(tl.load(positions + row) - tl.load(back + kind), 0)
    angle = position.to(tl.float32) * tl.load(frequencies + kind * HALF + i)
    at = out + (kind.to(tl.int64) * rows + row) * (2 * HALF) + i
    tl.store(at, tl.cos(angle))
    tl.store(at + HALF, tl.sin(angle))


@triton.jit
def _pack_rows_kernel(x, x_stride, codes, tail, scales, HD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    NB: tl.constexpr = HD // 64
    b, i = tl.arange(0, NB)[:, None], tl.arange(0, 32)[None, :]
    even, odd = load_pairs(x + row * x_stride, b * 32 + i, b < NB)
    write_row(even, odd, codes + row * ((HD - 64) // 2), tail + row * 32, scales + row * NB, HD)


@triton.jit
def _unpack_rows_kernel(codes, tail, scales, out, HD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    NB: tl.constexpr = HD // 64
    b, c = tl.arange(0, NB)[:, None], tl.arange(0, 64)[None, :]
    plain = b < NB - 1
    code = tl.load(codes + row * (HD - 64) + b * 64 + c, mask=plain, other=0).to(tl.int32)
    field = tl.load(scales + row * NB + b).to(tl.int32)
    value = fp8_value(code) * power_of_two(field)
    last = tl.load(tail + row * 64 + b * 0 + c, mask=b == NB - 1, other=0).to(tl.int32) << 16
    tl.store(out + row * HD + b * 64 + c, tl.where(plain, value, last.to(tl.float32, bitcast=True)))


@triton.jit
def _pack_keys_kernel(x, x_stride, codes, scales, P: tl.constexpr, TURN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    even, odd = load_pairs(x + row * x_stride, i, i < P)
    if TURN:
        even, odd = hadamard_pairs(even, odd, P)
    write_key(even, odd, codes + row * P, scales + row * (P // 16), P)


@triton.jit
def _unpack_keys_kernel(codes, scales, out, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, P)
    byte = tl.load(codes + row * P + i).to(tl.int32)
    scale = power_of_two(tl.load(scales + row * (P // 16) + i // 16).to(tl.int32))
    tl.store(out + row * 2 * P + 2 * i, fp4_value(byte) * scale)
    tl.store(out + row * 2 * P + 2 * i + 1, fp4_value(byte >> 4) * scale)


# --- launchers --------------------------------------------------------------------------------------------------------


def pack_rows(x: Tensor, out: RowPlanes) -> None:
    """`ops.pack_row`: x float32 [rows, head_dim], rows contiguous -> planes [rows, ...], contiguous."""
    codes, tail, scales = out.pairs()[:3]
    _pack_rows_kernel[(x.shape[0],)](x, x.stride(0), codes, tail, scales, HD=out.head_dim, num_warps=1)


def unpack_rows(planes: RowPlanes, out: Tensor) -> None:
    """`ops.unpack_row`: planes [rows, ...], contiguous -> out float32 [rows, head_dim], exact."""
    codes, tail, scales = planes.bytes()[:3]
    _unpack_rows_kernel[(out.shape[0],)](codes, tail, scales, out, HD=planes.head_dim, num_warps=1)


def pack_keys(x: Tensor, out: KeyPlanes, transform: bool = True) -> None:
    """`ops.pack_key(ops.hadamard(x))`, or without `transform` `ops.pack_key(x)`: x float32 [rows, dim]."""
    _pack_keys_kernel[(x.shape[0],)](
        x, x.stride(0), out.codes, out.scales, P=out.dim // 2, TURN=transform, num_warps=4 if transform else 1
    )


def unpack_keys(planes: KeyPlanes, out: Tensor) -> None:
    """`ops.unpack_key`: planes [rows, ...], contiguous -> out float32 [rows, dim], exact."""
    _unpack_keys_kernel[(out.shape[0],)](planes.codes, planes.scales, out, P=planes.dim // 2, num_warps=1)


def rope_tables(positions: Tensor, frequencies: Tensor, back: Tensor, out: Tensor) -> None:
    """Cosines and sines of a step, computed once for all layers; the angle is a float32 product, as in `ops.Rope.at`.

    Args:
        positions: int32 [rows]; negative ones (padding) are taken as 0.
        frequencies: float32 [kinds, 32], radians per position.
        back: int32 [kinds]: how far before the row's position the angle is taken. A row that completes a block of
            `ratio` tokens stands at that block's first token, ratio - 1 back.
        out: float32 [kinds, rows, 2, 32]: cosines, then sines.
    """
    kinds, rows, _, half = out.shape
    _rope_kernel[(rows, kinds)](positions, frequencies, back, out, rows, HALF=half, num_warps=1, **overlap(early=True))


def store_window(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: RowPlanes,
    scratch: RowPlanes | None = None,
    window: int = 128,
) -> None:
    """`pack_row(apply_rope(rms_norm(kv, weight), ...))` of each row, written to its place in its sequence's window.

    At decode each row has a sequence of its own. With `scratch`, at prefill, the rows are consecutive tokens of one
    sequence, padding at the end; the scratch ring then holds them and the window - 1 rows before them, and the window
    takes the last ones.

    Args:
        kv: float32 [rows, head_dim], rows contiguous, 8-byte aligned.
        weight: float32 [head_dim].
        table: float32 [rows, 2, 32] of `rope_tables`.
        positions, slots: int32 [rows]; rows at negative positions are left out.
        ring: planes [slots, ring, ...]: position p of a sequence stands at p % ring.
        scratch: planes [1, length, ...], length >= rows + window - 1: position p stands at p % length.
    """
    size, rows = ring.codes.shape[1], kv.shape[0]
    codes, tail, scales, *strides = ring.pairs()
    length, into = size, (codes, tail, scales)
    if scratch is not None:
        length, into = scratch.codes.shape[1], scratch.pairs()[:3]
        if length < rows + window - 1:
            raise ValueError(f"a scratch ring of {length} rows is too short for {rows} rows and a window of {window}")
        _before_kernel[(window - 1,)](
            positions, slots, codes, tail, scales, *strides, *into,
            RING=size, SCRATCH=length, HD=ring.head_dim, num_warps=1,
        )  # fmt: skip
    _window_kernel[(rows,)](
        kv, kv.stride(0), weight, eps, table, positions, slots, rows, codes, tail, scales, *strides, *into,
        RING=size, SCRATCH=length, HD=ring.head_dim, BOTH=scratch is not None, num_warps=2,
    )  # fmt: skip
