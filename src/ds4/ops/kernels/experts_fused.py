"""Many rows at once, straight from quantised planes: weights are decoded to float16 between their load and the product.

A program multiplies a tile of one expert's rows with a tile of its tokens on the tensor cores, weights on the left:
that side of a product may come from registers, so a decoded weight never leaves the thread that made it. For that a
thread has to make the very weights that the tensor cores want from it. Of a tile of 16 rows and 16 channels they want
from lane l rows l / 4 and l / 4 + 8, channels 2 (l % 4), 2 (l % 4) + 1 and those 8 further. A chunk of eight
neighbouring channels, which is what decodes well, serves two such tiles if channels are numbered anew within groups of
32: `fragments` does that with the activations, once for all experts. Gate and up are the two rows of a thread.

Powers of two (`Scales`) bring weights, inputs and what is between the products to where float16 holds all of them; the
sums, in float32, are divided by them. In the interpreter, where `x` is float32, everything is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.expert_chunks import chunk_bytes, halves_of_bytes, iq2_halves, load_chunk
from ds4.ops.kernels.expert_formats import load_table
from ds4.ops.kernels.expert_programs import advance
from ds4.ops.kernels.expert_tiles import (
    EIGHT,
    GROUP,
    PAIR,
    SIXTEENS,
    axis,
    chunk_axis,
    grid_rows,
    in_tile,
    matrix_of,
    plain_weights,
)
from ds4.ops.kernels.experts import FORMATS, pointers
from ds4.ops.kernels.grouping import Groups, expert_tile, tile_pairs
from ds4.ops.kernels.intrinsics import use_asm
from ds4.ops.kernels.planes import Planes

TILES = (64, 128)
"""Pairs that a tile has room for. A program multiplies the least of 16, 32, 64 and 128 columns that hold its pairs."""

_FEW_PAIRS = 32
"""Pairs of an expert on average up to which tiles are the small ones, whose sums leave a program more registers."""

_LEAST = tl.constexpr(16)

_LARGEST_WEIGHT, _LARGEST = 2048.0, 65504.0
"""What weights and activations are scaled to at most: float16 still has all its bits 25 and 30 powers of two below."""


@triton.jit
def fragment_place(n):
    """Where `fragments` puts channel n."""
    return n // 32 * 32 + n % 8 // 4 * 16 + n % 4 // 2 * 8 + n % 32 // 8 * 2 + n % 2


@triton.jit
def _load(FORMAT: tl.constexpr, p, start, U: tl.constexpr, BK: tl.constexpr):
    """The words of a tile's channels from `start` on; p: four planes at its rows."""
    g = axis(BK // 32, GROUP)
    if BK == 128:
        return load_chunk(FORMAT, p[0], p[1], p[2], p[3], 0, start // 128, g // 2, g, chunk_axis(), U)
    else:
        half = start // 64 % 2
        return load_chunk(FORMAT, p[0], p[1], p[2], p[3], 0, start // 128, half, half * 2 + g, chunk_axis(), U)


@triton.jit
def _decode(
    FORMAT: tl.constexpr, words, grid, lut, start, gain, ROWS: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr
):
    """gain times the weights of a tile, [ROWS, BK], channels as in `fragments`; lut: bytes that are 128 too large."""
    W: tl.constexpr = ROWS // 16
    G: tl.constexpr = BK // 32
    MINIMUM: tl.constexpr = FORMAT == "q2_k" or FORMAT == "q4_k"
    u = start // 128
    j = axis(G, GROUP)
    k = chunk_axis()
    if BK == 64:
        j = j + start // 64 % 2 * 2
    if FORMAT == "iq2_xxs_b":
        index = (words[0] >> (8 * k)) & 255
        words = (grid_rows(grid, index, W, G), words[1], words[2], words[3])
    if ASM and (FORMAT == "iq2_xxs_b" or FORMAT == "iq2_xxs_a"):
        magnitudes = words[0] if FORMAT == "iq2_xxs_b" else (words[0] >> (2 * (k % 2))) & 0x33333333
        scale_turn = (33 - 16 * (u % 2) - 4 * j) & 31
        d = words[3].to(tl.float32) * (0.125 * gain)
        w = iq2_halves(magnitudes, words[1], (34 - k) & 31, words[2], scale_turn, d, lut)
    else:
        low, high, scale, least = chunk_bytes(FORMAT, words, lut, u, j, k, gain, ASM)
        if ASM:
            w = halves_of_bytes(low, high, scale, least, MINIMUM)
    if ASM:
        even = tl.join(tl.join(w[0], w[4]), tl.join(w[2], w[6]))
        odd = tl.join(tl.join(w[1], w[5]), tl.join(w[3], w[7]))
        eight = tl.join(even, odd).to(tl.float16, bitcast=True)
    else:
        eight = plain_weights(low, high, scale, least, MINIMUM, W, G)
    return matrix_of(eight, W, G)


@triton.jit
def _biased(lut):
    out = ()
    for i in tl.static_range(len(lut)):
        out = out + (lut[i] ^ -2139062144,)
    return out


@triton.jit
def _product(
    FORMAT: tl.constexpr, p, x_at, live, table, gain,
    K: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gain times the products of a tile's rows with BM pairs, 0 for places without one: float32 [ROWS, BM].

    x_at: [BM, 1], where the rows of the pairs begin.
    """
    U: tl.constexpr = K // 128
    BK: tl.constexpr = 64 if BM > 64 else 128  # beside their sums there are no registers for the weights of 128
    x_at += tl.arange(0, BK)[None, :]
    lut = _biased(load_table(FORMAT, table))
    grid = tl.load(table + tl.arange(0, 256)) if FORMAT == "iq2_xxs_b" else table
    sums = tl.zeros([ROWS, BM], tl.float32)
    ahead = _load(FORMAT, p, 0, U, BK)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.trans(tl.load(x_at + start, mask=live[:, None], other=0.0))
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
def _is_least(pairs, BM: tl.constexpr):
    """Whether BM, of it and its halves down to 16, is the least that holds the pairs."""
    return (pairs <= BM) & ((pairs > BM // 2) | (BM == _LEAST))


@triton.jit
def _either(first, x, y):
    out = ()
    for i in tl.static_range(4):
        out = out + (tl.where(first, x[i], y[i]),)
    return out


@triton.jit
def _gate_up_pairs(
    x, x_stride, order, begin, pairs, p, table, gain, back, clamp, scale, row0, out,
    FORMAT: tl.constexpr, TOP: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """swiglu of BN rows of gate and up for up to BM pairs of one expert; p: the planes at its rows."""
    place, live, pair = tile_pairs(order, begin, pairs, BM)
    x_at = x + (pair // TOP)[:, None] * x_stride
    sums = _product(FORMAT, p, x_at, live, table, gain, K, 2 * BN, BM, STAGES, ASM)
    g, v = tl.split(tl.permute(tl.reshape(sums, [BN // 8, 2, 8, BM]), 0, 2, 3, 1))
    g = tl.minimum(g * back, clamp)
    h = g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(v * back, -clamp), clamp) * scale
    if out.dtype.element_ty == tl.float16:
        h = tl.minimum(tl.maximum(h, -65504.0), 65504.0)
    h = tl.trans(tl.reshape(h, [BN, BM])).to(out.dtype.element_ty)
    n = fragment_place(row0 + tl.arange(0, BN))
    tl.store(out + place[:, None] * F + n[None, :], h, mask=live[:, None])


@triton.jit
def _gate_up_kernel(
    x, x_stride, order, offsets, tiles, g0, g1, g2, g3, u0, u1, u2, u3, table, gain, back, clamp, scale, out,
    FORMAT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, begin, pairs = expert_tile(offsets, tiles, 0, E, E, EP, BM)
    if expert < 0:
        return
    W: tl.constexpr = BN // 8
    row0 = tl.program_id(0) * BN
    row = in_tile(axis(W, SIXTEENS) * 8 + axis(8, EIGHT), W, 1).to(tl.int64) + (expert.to(tl.int64) * F + row0)
    first = in_tile(axis(2, PAIR) == 0, W, 1)
    gate = advance(FORMAT, g0, g1, g2, g3, row, K // 128)
    p = _either(first, gate, advance(FORMAT, u0, u1, u2, u3, row, K // 128))
    for i in tl.static_range(4):
        if BM >> i >= _LEAST:
            if _is_least(pairs, BM >> i):
                _gate_up_pairs(
                    x, x_stride, order, begin, pairs, p, table, gain, back, clamp, scale, row0, out,
                    FORMAT, TOP, F, K, BM >> i, BN, STAGES, ASM,
                )  # fmt: skip


@triton.jit
def _down_pairs(
    h, order, begin, pairs, p, table, gain, back, weights, row0, out, out_stride,
    FORMAT: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BN rows of down, weighted, for up to BM pairs of one expert; p: the planes at its rows."""
    place, live, pair = tile_pairs(order, begin, pairs, BM)
    h_at = h + place[:, None] * K
    sums = _product(FORMAT, p, h_at, live, table, gain, K, BN, BM, STAGES, ASM)
    y = tl.trans(sums) * (tl.load(weights + pair) * back)[:, None]
    at = pair.to(tl.int64)[:, None] * out_stride + (row0 + tl.arange(0, BN))[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _down_kernel(
    h, order, offsets, tiles, p0, p1, p2, p3, table, gain, back, weights, out, out_stride,
    FORMAT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert, begin, pairs = expert_tile(offsets, tiles, 0, E, E, EP, BM)
    if expert < 0:
        return
    W: tl.constexpr = BN // 16
    row0 = tl.program_id(0) * BN
    row = axis(W, SIXTEENS) * 16 + axis(2, PAIR) * 8 + axis(8, EIGHT)
    row = in_tile(row, W, 1).to(tl.int64) + (expert.to(tl.int64) * N + row0)
    p = advance(FORMAT, p0, p1, p2, p3, row, K // 128)
    for i in tl.static_range(4):
        if BM >> i >= _LEAST:
            if _is_least(pairs, BM >> i):
                _down_pairs(
                    h, order, begin, pairs, p, table, gain, back, weights, row0, out, out_stride,
                    FORMAT, K, BM >> i, BN, STAGES, ASM,
                )  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def tile_rows(pairs: int, experts: int) -> int:
    """The tiles for so many pairs, for `Groups.allocate`."""
    return TILES[0] if pairs <= _FEW_PAIRS * experts else TILES[1]


def fragments(x: Tensor, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    """scale * x [.., k] with its channels as the products here take them; prefill has `terms.split_terms` do it.

    Of each 32, channel 8 q + 4 s + 2 e + i goes to 16 s + 8 e + 2 q + i.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    groups = x.unflatten(-1, (-1, 4, 2, 2, 2)).permute(*range(x.dim() - 1), -5, -3, -2, -4, -1)
    torch.mul(groups, scale, out=out.view(*x.shape[:-1], -1, 2, 2, 4, 2))
    return out


def natural(x: Tensor) -> Tensor:
    """What `fragments` makes x of, unscaled: [.., k] in the order of the channels."""
    lead = range(x.dim() - 1)
    found: Tensor = x.unflatten(-1, (-1, 2, 2, 4, 2)).permute(*lead, -5, -2, -4, -3, -1).reshape(x.shape)
    return found


@dataclass(frozen=True)
class Scales:
    """Powers of two for the experts of a layer: of their inputs, of gate and up, of what these give, and of down."""

    x: float = 1.0
    gate_up: float = 1.0
    h: float = 1.0
    down: float = 1.0


def largest_weight(planes: Planes) -> Tensor:
    """No weight of the planes is larger: a float32 scalar on their device."""
    tensors = dict(planes.planes())
    if planes.FORMAT == "mxfp4":
        exponent = tensors["scale"].view(torch.uint8).amax().float()
        return torch.where(exponent > 1, torch.exp2(exponent - 127) * 6, 0.0)
    scales = tensors["d"].view(torch.float16).abs()
    if planes.FORMAT in ("iq2_xxs_a", "iq2_xxs_b"):
        return scales.amax().float() * (31 * 43 / 8)
    both = scales.view(-1, 2).amax(0).float()
    d, least = both[0], both[1]
    return d * (15 * 3) + least * 15 if planes.FORMAT == "q2_k" else (d * 15 + least) * 63


def scales_of(experts: Sequence[tuple[Planes, Planes, Planes]], norms: Sequence[Tensor], clamp: float) -> list[Scales]:
    """The scales of layers. A weight or norm that is no number, or none that float32 holds, gives a scale of 0.

    Args:
        experts: gate, up and down of each layer.
        norms: float32 [hidden], by which the inputs were multiplied after they had been normalised.
        clamp: of gate and of up. Its square bounds what is between the products, if float16 holds that; if not, values
            beyond float16 become its largest.
    """
    if not experts:
        return []
    # A normalised row has the root of its length as its norm, which a single channel may have all of.
    bounds = [norm.abs().amax() * math.sqrt(norm.numel()) for norm in norms]
    largest = torch.stack([largest_weight(planes) for layer in experts for planes in layer] + bounds).tolist()
    h = _power(_LARGEST, clamp * clamp) if clamp * clamp <= _LARGEST else 1.0
    found = []
    for i in range(len(experts)):
        gate, up, down = (_power(_LARGEST_WEIGHT, value) for value in largest[3 * i : 3 * i + 3])
        found.append(Scales(_power(_LARGEST, largest[3 * len(experts) + i]), min(gate, up), h, down))
    return found


def _power(most: float, value: float) -> float:
    """The largest power of two that takes value to at most `most`, within what float32 can be multiplied with."""
    if not math.isfinite(value):
        return 0.0
    return 2.0 ** min(100, max(-100, math.floor(math.log2(most / value)))) if value else 1.0


def _constants(planes: Planes, groups: Groups, rows: int, columns: int, tensor: Tensor) -> dict[str, Any]:
    """Constants and options of a product, whose tiles have `columns` rows of a matrix and of weights `rows`."""
    found: dict[str, Any] = {
        "FORMAT": planes.FORMAT,
        "E": groups.experts,
        "EP": triton.next_power_of_2(groups.experts),
        "BM": groups.tile_rows,
        "BN": columns,
        "ASM": use_asm(tensor),
        "num_warps": 8 if rows >= 128 else max(1, rows // 16),
    }
    if _on_hopper(tensor):
        found["maxnreg"] = 128  # two programs on a multiprocessor: one decodes while the other multiplies
    return found


def _on_hopper(tensor: Tensor) -> bool:
    """Whether a kernel is compiled for compute capability 9; without a device, it can be for nothing else."""
    if tensor.is_cuda:
        return torch.cuda.get_device_capability(tensor.device)[0] == 9
    return not triton.knobs.runtime.interpret


def _check(planes: Planes, groups: Groups, x: Tensor, scale: float) -> None:
    if planes.experts != groups.experts or planes.FORMAT not in FORMATS:
        raise ValueError(f"expected {groups.experts} experts in one of {', '.join(FORMATS)}, got {planes.FORMAT}")
    if groups.tile_rows not in TILES:
        raise ValueError(f"expected tiles of {' or '.join(map(str, TILES))} pairs, got {groups.tile_rows}")
    known = (torch.float16,) if use_asm(x) else (torch.float16, torch.float32)
    if x.shape[1] != planes.k or x.dtype not in known or not scale > 0:
        raise ValueError(f"{planes.k} channels, a positive scale; got x {list(x.shape)} {x.dtype}, scale {scale}")


def _columns(n: int, most: int) -> int:
    """The largest power of two up to `most` that divides n."""
    return min(n & -n, most)


def gate_up_fused(
    x: Tensor,
    chosen: Tensor,
    groups: Groups,
    gate: Planes,
    up: Planes,
    scales: Scales,
    clamp: float,
    out: Tensor,
) -> None:
    """swiglu of the gate and up projections of all pairs.

    Args:
        x: float16 [tokens, hidden] from `fragments`, times `scales.x`, rows contiguous; float32 in the interpreter.
        chosen: int32 [tokens, top], already in `groups`.
        gate, up: planes of one format with experts, [expert_hidden, hidden] each.
        out: as x, times `scales.h`, [tokens * top, expert_hidden], contiguous, its channels as in `fragments`; row i
            belongs to pair `groups.order[i]`.
    """
    _check(gate, groups, x, scales.gate_up)
    if up.FORMAT != gate.FORMAT or (up.n, up.k, up.experts) != (gate.n, gate.k, gate.experts):
        raise ValueError(f"gate is {gate.FORMAT} {gate.n} x {gate.k}, up is {up.FORMAT} {up.n} x {up.k}")
    if out.shape != (chosen.numel(), gate.n) or gate.n % 32 or not out.is_contiguous():
        raise ValueError(f"{chosen.numel()} pairs of {gate.n} channels, a multiple of 32, into {list(out.shape)}")
    columns = _columns(gate.n, 64)
    *gate_pointers, table = pointers(gate)
    *up_pointers, _ = pointers(up)
    _gate_up_kernel[(gate.n // columns, triton.cdiv(chosen.numel(), groups.tile_rows) + groups.experts)](
        x, x.stride(0), groups.order, groups.offsets, groups.tiles, *gate_pointers, *up_pointers, table,
        scales.gate_up, 1 / (scales.gate_up * scales.x), clamp, scales.h, out,
        # Two stages: words come through the L1, which has what is left of the shared memory.
        TOP=chosen.shape[1], F=gate.n, K=gate.k, STAGES=2, **_constants(gate, groups, 2 * columns, columns, x),
    )  # fmt: skip


def down_fused(
    h: Tensor,
    chosen: Tensor,
    groups: Groups,
    planes: Planes,
    scales: Scales,
    weights: Tensor,
    out: Tensor,
) -> None:
    """weight * down projection of all pairs.

    Args:
        h: [tokens * top, expert_hidden] from `gate_up_fused`.
        planes: [hidden, expert_hidden] of each expert.
        weights: float32 [tokens, top], contiguous.
        out: float32 or 16 bits [tokens, top, hidden], contiguous: each pair in its own place.
    """
    _check(planes, groups, h, scales.down)
    if h.shape[0] != chosen.numel() or out.shape != (*chosen.shape, planes.n) or not out.is_contiguous():
        raise ValueError(f"h {list(h.shape)}, out {list(out.shape)}: expected {list(chosen.shape)} x {planes.n}")
    columns = _columns(planes.n, 128)
    *plane_pointers, table = pointers(planes)
    _down_kernel[(planes.n // columns, triton.cdiv(chosen.numel(), groups.tile_rows) + groups.experts)](
        h, groups.order, groups.offsets, groups.tiles, *plane_pointers, table,
        scales.down, 1 / (scales.down * scales.h), weights, out, out.stride(1),
        N=planes.n, K=planes.k, STAGES=3, **_constants(planes, groups, columns, columns, h),
    )  # fmt: skip
