"""Many rows at once, straight from quantised planes: weights are decoded to float16 between their load and the product.

A program multiplies a tile of one expert's rows with a tile of its tokens on the tensor cores, weights on the left:
that side of a product may come from registers, so a decoded weight never leaves the thread that made it. For that a
thread has to make the very weights that the tensor cores want from it. Of a tile of 16 rows and 16 channels they want
from lane l rows l / 4 and l / 4 + 8, channels 2 (l % 4), 2 (l % 4) + 1 and those 8 further. A chunk of eight
neighbouring channels, which is what decodes well, serves two such tiles if channels are numbered anew within groups of
32: `fragments` does that with the activations, once for all experts. Gate and up are the two rows of a thread.

Weights are multiplied with a power of two (`half_gains`), with which float16 holds all of a matrix; the sums in float32
are divided by it. In the interpreter, where `x` is float32, everything is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.expert_chunks import chunk_bytes, halves_of_bytes, load_chunk
from ds4.ops.kernels.expert_formats import load_table
from ds4.ops.kernels.expert_programs import advance
from ds4.ops.kernels.experts import FORMATS, pointers
from ds4.ops.kernels.experts_prefill import tile_of
from ds4.ops.kernels.grouping import Groups
from ds4.ops.kernels.intrinsics import use_asm
from ds4.ops.kernels.planes import Planes

_TILES = ((24, 32), (52, 64))
"""Pairs of an expert on average up to which a tile has so many rows; beyond that 128."""

_LARGEST = 2048.0
"""What the largest weight is scaled to: float16 still has all its bits 25 powers of two below."""

# The axes of a tile of weights: a lane's place in four, in eight, sixteens of rows, the two rows of a thread, groups of
# channels. The compiler hands out lanes, then warps, then registers along them, in this order (Triton 3.6) or from the
# last one on (3.7), if it has no other reason; and a permutation of axes that a thread has to itself costs nothing. It
# does find a reason in neighbouring words of a lane: those come by one load. That chunks of neighbouring lanes are
# neighbours, too, it is not to know.
_LANE, _EIGHT, _SIXTEENS, _PAIR, _GROUP = (tl.constexpr(i) for i in range(5))
_BACKWARDS = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@triton.jit
def _axis(N: tl.constexpr, AXIS: tl.constexpr):
    """0 to N - 1 along an axis of a tile."""
    i = tl.arange(0, N)
    AT: tl.constexpr = 4 - AXIS if _BACKWARDS else AXIS
    if AT == 0:
        return i[:, None, None, None, None]
    elif AT == 1:
        return i[None, :, None, None, None]
    elif AT == 2:
        return i[None, None, :, None, None]
    elif AT == 3:
        return i[None, None, None, :, None]
    else:
        return i[None, None, None, None, :]


@triton.jit
def _chunk_axis():
    """The lane's chunk of a group; a reshape hides that it counts."""
    if _BACKWARDS:
        return tl.reshape(tl.arange(0, 4), [1, 1, 1, 1, 4])
    else:
        return tl.reshape(tl.arange(0, 4), [4, 1, 1, 1, 1])


@triton.jit
def _in_tile(x, W: tl.constexpr, G: tl.constexpr):
    """x broadcast to all axes of a tile."""
    if _BACKWARDS:
        return tl.broadcast_to(x, [G, 2, W, 8, 4])
    else:
        return tl.broadcast_to(x, [4, 8, W, 2, G])


@triton.jit
def _grid_rows(grid, index, W: tl.constexpr, G: tl.constexpr):
    """grid[index], through shared memory: lanes that load from 32 places of a table each wait for all the others."""
    found = tl.gather(grid, tl.reshape(index, [64 * W * G]), 0)
    if _BACKWARDS:
        return tl.reshape(found, [G, 2, W, 8, 4])
    else:
        return tl.reshape(found, [4, 8, W, 2, G])


@triton.jit
def _matrix_of(eight, W: tl.constexpr, G: tl.constexpr):
    """A tile with the eight weights of each chunk in three more axes as the left side of a product."""
    if _BACKWARDS:
        return tl.reshape(tl.permute(eight, 2, 1, 3, 0, 5, 6, 4, 7), [16 * W, 32 * G])
    else:
        return tl.reshape(tl.permute(eight, 2, 3, 1, 4, 5, 6, 0, 7), [16 * W, 32 * G])


@triton.jit
def _load(FORMAT: tl.constexpr, p, start, U: tl.constexpr, BK: tl.constexpr):
    """The words of a tile's channels from `start` on; p: four planes at its rows."""
    g = _axis(BK // 32, _GROUP)
    if BK == 128:
        return load_chunk(FORMAT, p[0], p[1], p[2], p[3], 0, start // 128, g // 2, g, _chunk_axis(), U)
    else:
        half = start // 64 % 2
        return load_chunk(FORMAT, p[0], p[1], p[2], p[3], 0, start // 128, half, half * 2 + g, _chunk_axis(), U)


@triton.jit
def _iq2_halves(magnitudes, signs, sign_turn, scales, scale_turn, d, lut):
    """`halves_of_bytes` from where IQ2_XXS begins: d * (2 scale + 1) * (magnitude with its sign).

    The rotations bring the signs of the chunk to bit 2 of each nibble, and twice the group's scale to bits 1 to 4.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, l, h, s, b, w0, w1, w2, w3;
        .reg .f32 f;
        shf.l.wrap.b32 t, $9, $9, $10;
        lop3.b32 t, t, 0x44444444, $8, 0xEA;
        prmt.b32 l, $14, $15, t;
        shr.b32 t, t, 16;
        prmt.b32 h, $14, $15, t;
        prmt.b32 w0, l, 0x64646464, 0x4140;
        prmt.b32 w1, l, 0x64646464, 0x4342;
        prmt.b32 w2, h, 0x64646464, 0x4140;
        prmt.b32 w3, h, 0x64646464, 0x4342;
        shf.l.wrap.b32 t, $11, $11, $12;
        lop3.b32 t, t, 0x1E, 1, 0xEA;
        cvt.rn.f32.u32 f, t;
        mul.rn.f32 f, f, $13;
        cvt.rn.f16x2.f32 s, f, f;
        mov.b32 b, 0xE480E480;
        add.rn.f16x2 w0, w0, b;
        add.rn.f16x2 w1, w1, b;
        add.rn.f16x2 w2, w2, b;
        add.rn.f16x2 w3, w3, b;
        mul.rn.f16x2 w0, w0, s;
        mul.rn.f16x2 w1, w1, s;
        mul.rn.f16x2 w2, w2, s;
        mul.rn.f16x2 w3, w3, s;
        mov.b32 {$0, $1}, w0;
        mov.b32 {$2, $3}, w1;
        mov.b32 {$4, $5}, w2;
        mov.b32 {$6, $7}, w3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,f,r,r",
        [magnitudes, signs, sign_turn, scales, scale_turn, d, lut[0], lut[1]],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _plain_weights(low, high, scale, least, MINIMUM: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """What `halves_of_bytes` computes, in float32, with the eight weights in three axes."""
    words = tl.expand_dims(tl.join(_in_tile(low, W, G), _in_tile(high, W, G)), -1)
    bytes = ((words >> (8 * tl.arange(0, 4))) & 255).to(tl.float32)
    scale = tl.expand_dims(tl.expand_dims(_in_tile(scale, W, G), -1), -1)
    if MINIMUM:
        values = bytes * scale - tl.expand_dims(tl.expand_dims(_in_tile(least, W, G), -1), -1)
    else:
        values = (bytes - 128.0) * scale
    if _BACKWARDS:
        return tl.reshape(values, [G, 2, W, 8, 4, 2, 2, 2])
    else:
        return tl.reshape(values, [4, 8, W, 2, G, 2, 2, 2])


@triton.jit
def _decode(
    FORMAT: tl.constexpr, words, grid, lut, start, gain, ROWS: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr
):
    """gain times the weights of a tile, [ROWS, BK], channels as in `fragments`; lut: bytes that are 128 too large."""
    W: tl.constexpr = ROWS // 16
    G: tl.constexpr = BK // 32
    MINIMUM: tl.constexpr = FORMAT == "q2_k" or FORMAT == "q4_k"
    u = start // 128
    j = _axis(G, _GROUP)
    k = _chunk_axis()
    if BK == 64:
        j = j + start // 64 % 2 * 2
    if FORMAT == "iq2_xxs_b":
        index = (words[0] >> (8 * k)) & 255
        words = (_grid_rows(grid, index, W, G), words[1], words[2], words[3])
    if ASM and (FORMAT == "iq2_xxs_b" or FORMAT == "iq2_xxs_a"):
        magnitudes = words[0] if FORMAT == "iq2_xxs_b" else (words[0] >> (2 * (k % 2))) & 0x33333333
        scale_turn = (33 - 16 * (u % 2) - 4 * j) & 31
        d = words[3].to(tl.float32) * (0.125 * gain)
        w = _iq2_halves(magnitudes, words[1], (34 - k) & 31, words[2], scale_turn, d, lut)
    else:
        low, high, scale, least = chunk_bytes(FORMAT, words, lut, u, j, k, gain, ASM)
        if ASM:
            w = halves_of_bytes(low, high, scale, least, MINIMUM)
    if ASM:
        even = tl.join(tl.join(w[0], w[4]), tl.join(w[2], w[6]))
        odd = tl.join(tl.join(w[1], w[5]), tl.join(w[3], w[7]))
        eight = tl.join(even, odd).to(tl.float16, bitcast=True)
    else:
        eight = _plain_weights(low, high, scale, least, MINIMUM, W, G)
    return _matrix_of(eight, W, G)


@triton.jit
def _biased(lut):
    out = ()
    for i in tl.static_range(len(lut)):
        out = out + (lut[i] ^ -2139062144,)
    return out


@triton.jit
def _product(
    FORMAT: tl.constexpr, p, x_at, table, gain,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gain times the products of a tile's rows with BM tokens: float32 [ROWS, BM]."""
    U: tl.constexpr = K // 128
    lut = _biased(load_table(FORMAT, table))
    grid = tl.load(table + tl.arange(0, 256)) if FORMAT == "iq2_xxs_b" else table
    sums = tl.zeros([ROWS, BM], tl.float32)
    ahead = _load(FORMAT, p, 0, U, BK)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.trans(tl.load(x_at + start))
        words = ahead
        # The next words are on their way while these are at work; the last turn loads its own again.
        ahead = _load(FORMAT, p, tl.multiple_of(tl.minimum(start + BK, K - BK), BK), U, BK)
        w = _decode(FORMAT, words, grid, lut, start, gain, ROWS, BK, ASM).to(x_at.dtype.element_ty)
        sums = tl.dot(w, a, sums, input_precision="ieee")
        if ASM:
            # Used here, the sums have to be there: else the next weights are decoded into registers that a product
            # which still runs reads from.
            sums = tl.inline_asm_elementwise("// settled", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _either(first, x, y):
    out = ()
    for i in tl.static_range(4):
        out = out + (tl.where(first, x[i], y[i]),)
    return out


@triton.jit
def _gate_up_kernel(
    x, x_stride, order, offsets, tiles, g0, g1, g2, g3, u0, u1, u2, u3, table, gain, clamp, out,
    FORMAT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, place, live, pair = tile_of(order, offsets, tiles, 0, E, E, EP, BM)
    if expert < 0:
        return
    W: tl.constexpr = BN // 8
    row0 = tl.program_id(0) * BN
    row = _in_tile(_axis(W, _SIXTEENS) * 8 + _axis(8, _EIGHT), W, 1).to(tl.int64) + (expert.to(tl.int64) * F + row0)
    first = _in_tile(_axis(2, _PAIR) == 0, W, 1)
    gate = advance(FORMAT, g0, g1, g2, g3, row, K // 128)
    p = _either(first, gate, advance(FORMAT, u0, u1, u2, u3, row, K // 128))
    x_at = x + (pair // TOP)[:, None] * x_stride + tl.arange(0, BK)[None, :]
    sums = _product(FORMAT, p, x_at, table, gain, K, 2 * BN, BM, BK, STAGES, ASM)
    g, v = tl.split(tl.permute(tl.reshape(sums, [W, 2, 8, BM]), 0, 2, 3, 1))
    g = tl.minimum(g / gain, clamp)
    h = g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(v / gain, -clamp), clamp)
    h = tl.trans(tl.reshape(h, [BN, BM])).to(out.dtype.element_ty)
    n = row0 + tl.arange(0, BN)
    n = n // 32 * 32 + n % 8 // 4 * 16 + n % 4 // 2 * 8 + n % 32 // 8 * 2 + n % 2  # as `fragments` numbers them
    tl.store(out + place[:, None] * F + n[None, :], h, mask=live[:, None])


@triton.jit
def _down_kernel(
    h, order, offsets, tiles, p0, p1, p2, p3, table, gain, weights, out, out_stride,
    FORMAT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, place, live, pair = tile_of(order, offsets, tiles, 0, E, E, EP, BM)
    if expert < 0:
        return
    W: tl.constexpr = BN // 16
    row0 = tl.program_id(0) * BN
    row = _axis(W, _SIXTEENS) * 16 + _axis(2, _PAIR) * 8 + _axis(8, _EIGHT)
    row = _in_tile(row, W, 1).to(tl.int64) + (expert.to(tl.int64) * N + row0)
    p = advance(FORMAT, p0, p1, p2, p3, row, K // 128)
    h_at = h + tl.where(live, place, 0)[:, None] * K + tl.arange(0, BK)[None, :]
    sums = _product(FORMAT, p, h_at, table, gain, K, BN, BM, BK, STAGES, ASM)
    y = tl.trans(sums) * (tl.load(weights + pair) / gain)[:, None]
    at = pair.to(tl.int64)[:, None] * out_stride + (row0 + tl.arange(0, BN))[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None])


# --- launchers --------------------------------------------------------------------------------------------------------


def tile_rows(pairs: int, experts: int) -> int:
    """Pairs of a tile, for `Groups`: an expert's pairs on average and what they spread by should fit into one."""
    return next((rows for most, rows in _TILES if pairs <= most * experts), 128)


def tile_lengths(top: int, experts: int) -> list[int]:
    """The least numbers of tokens with each of the tiles."""
    return [1, *(most * experts // top + 1 for most, _ in _TILES)]


def fragments(x: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """x [.., k] with its channels as the products here take them; the range of float16 is for the caller to care about.

    Of each 32, channel 8 q + 4 s + 2 e + i goes to 16 s + 8 e + 2 q + i.
    """
    lead = range(x.dim() - 1)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    groups = x.unflatten(-1, (-1, 4, 2, 2, 2))
    out.view(*x.shape[:-1], -1, 2, 2, 4, 2).copy_(groups.permute(*lead, -5, -3, -2, -4, -1))
    return out


def natural(x: Tensor) -> Tensor:
    """What `fragments` makes x of: [.., k] in the order of the channels."""
    lead = range(x.dim() - 1)
    found: Tensor = x.unflatten(-1, (-1, 2, 2, 4, 2)).permute(*lead, -5, -2, -4, -3, -1).reshape(x.shape)
    return found


def largest_weights(planes: Planes) -> Tensor:
    """No weight of the planes is larger: a float32 scalar on their device."""
    tensors = dict(planes.planes())
    if planes.FORMAT == "mxfp4":
        return torch.exp2(tensors["scale"].view(torch.uint8).amax().float() - 127).mul(6)
    scales = tensors["d"].view(torch.float16).abs()
    if planes.FORMAT in ("iq2_xxs_a", "iq2_xxs_b"):
        return scales.amax().float() * (31 * 43 / 8)
    both = scales.view(-1, 2).amax(0).float()
    d, least = both[0], both[1]
    return d * (15 * 3) + least * 15 if planes.FORMAT == "q2_k" else (d * 15 + least) * 63


def half_gains(matrices: Sequence[Planes]) -> list[float]:
    """For each the power of two that brings its largest weight to 1,024 to 2,048; 0 where a scale is no number."""
    if not matrices:
        return []
    largest = torch.stack([largest_weights(planes) for planes in matrices]).tolist()
    return [
        (2.0 ** math.floor(math.log2(_LARGEST / value)) if value else 1.0) if math.isfinite(value) else 0.0
        for value in largest
    ]


def _constants(planes: Planes, groups: Groups, rows: int, columns: int, tensor: Tensor) -> dict[str, Any]:
    """Constants and options of a product, whose tiles have `columns` rows of a matrix and of weights `rows`."""
    found: dict[str, Any] = {
        "FORMAT": planes.FORMAT,
        "E": groups.experts,
        "EP": triton.next_power_of_2(groups.experts),
        "BM": groups.tile_rows,
        "BN": columns,
        "BK": 64 if groups.tile_rows > 64 else 128,
        "STAGES": 3,
        "ASM": use_asm(tensor),
        "num_warps": 8 if rows >= 128 else max(1, rows // 16),
    }
    # Two programs on a multiprocessor: one decodes while the other multiplies.
    return found | ({"maxnreg": 128} if found["ASM"] else {})


def _check(planes: Planes, groups: Groups, x: Tensor, gain: float) -> None:
    if planes.experts != groups.experts or planes.FORMAT not in FORMATS:
        raise ValueError(f"expected {groups.experts} experts in one of {', '.join(FORMATS)}, got {planes.FORMAT}")
    known = (torch.float16,) if use_asm(x) else (torch.float16, torch.float32)
    if x.shape[1] != planes.k or x.dtype not in known or not gain > 0:
        raise ValueError(f"{planes.k} channels, a positive gain; got x {list(x.shape)} {x.dtype}, gain {gain}")


def _columns(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides n."""
    return min(n & -n, most)


def gate_up_fused(
    x: Tensor,
    chosen: Tensor,
    groups: Groups,
    gate: Planes,
    up: Planes,
    gain: float,
    clamp: float,
    out: Tensor,
) -> None:
    """swiglu of the gate and up projections of all pairs.

    Args:
        x: float16 [tokens, hidden] from `fragments`, rows contiguous; float32 in the interpreter.
        chosen: int32 [tokens, top], already in `groups`.
        gate, up: planes of one format with experts, [expert_hidden, hidden] each.
        gain: a power of two by which no weight of either leaves float16; see `half_gains`.
        out: as x, [tokens * top, expert_hidden], contiguous, its channels as in `fragments`; row i belongs to pair
            `groups.order[i]`.
    """
    _check(gate, groups, x, gain)
    if up.FORMAT != gate.FORMAT or (up.n, up.k, up.experts) != (gate.n, gate.k, gate.experts):
        raise ValueError(f"gate is {gate.FORMAT} {gate.n} x {gate.k}, up is {up.FORMAT} {up.n} x {up.k}")
    if out.shape != (chosen.numel(), gate.n) or gate.n % 32 or not out.is_contiguous():
        raise ValueError(f"{chosen.numel()} pairs of {gate.n} channels, a multiple of 32, into {list(out.shape)}")
    columns = _columns(gate.n, 64)
    *gate_pointers, table = pointers(gate)
    *up_pointers, _ = pointers(up)
    _gate_up_kernel[(gate.n // columns, triton.cdiv(chosen.numel(), groups.tile_rows) + groups.experts)](
        x, x.stride(0), groups.order, groups.offsets, groups.tiles, *gate_pointers, *up_pointers, table,
        gain, clamp, out, TOP=chosen.shape[1], F=gate.n, K=gate.k, **_constants(gate, groups, 2 * columns, columns, x),
    )  # fmt: skip


def down_fused(
    h: Tensor,
    chosen: Tensor,
    groups: Groups,
    planes: Planes,
    gain: float,
    weights: Tensor,
    out: Tensor,
) -> None:
    """weight * down projection of all pairs.

    Args:
        h: [tokens * top, expert_hidden] from `gate_up_fused`.
        planes: [hidden, expert_hidden] of each expert.
        gain: see `gate_up_fused`.
        weights: float32 [tokens, top], contiguous.
        out: float32 or 16 bits [tokens, top, hidden], contiguous: each pair in its own place.
    """
    _check(planes, groups, h, gain)
    if h.shape[0] != chosen.numel() or out.shape != (*chosen.shape, planes.n) or not out.is_contiguous():
        raise ValueError(f"h {list(h.shape)}, out {list(out.shape)}: expected {list(chosen.shape)} x {planes.n}")
    columns = _columns(planes.n, 128)
    *plane_pointers, table = pointers(planes)
    _down_kernel[(planes.n // columns, triton.cdiv(chosen.numel(), groups.tile_rows) + groups.experts)](
        h, groups.order, groups.offsets, groups.tiles, *plane_pointers, table, gain, weights, out, out.stride(1),
        N=planes.n, K=planes.k, **_constants(planes, groups, columns, columns, h),
    )  # fmt: skip
