"""How a kernel reads one unit (128 weights) of each expert format: device functions that the expert kernels share.

A lane owns a unit. `load_unit` fetches its words, `decode_unit` turns them into 32 words of signed bytes in natural
order, `dot_unit` multiplies these with a unit of quantised activations in integers and applies the scales at the end.
All tensors are one-dimensional, one element a lane: any other tile makes the compiler move words between lanes. All
formats take four pointers, unused ones are ignored (see `planes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.ops.kernels.intrinsics import dp4a, high_half, lookup_bytes, low_half


@triton.jit
def load_four(p):
    """The words at p[i], p[i] + 1 .. p[i] + 3 as four tensors, by one load of 16 bytes a lane."""
    words = tl.load(p[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(words, [p.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _words(p, u, COUNT: tl.constexpr, U: tl.constexpr):
    """COUNT words of the units u, stored in fours, as a tuple."""
    words = ()
    for i in tl.static_range(COUNT // 4):
        words = words + load_four(p + (i * U + u) * 4)
    return words


@triton.jit
def load_unit(FORMAT: tl.constexpr, p0, p1, p2, p3, row, u, U: tl.constexpr):
    """All words of the units u of the rows row, as a flat tuple: codes first, then scales."""
    pair = row * (U // 2) + u // 2
    if FORMAT == "iq2_xxs_b":
        unit = _words(p0 + row * (4 * U), u, 4, U) + _words(p1 + row * (4 * U), u, 4, U)
        unit = unit + (tl.load(p2 + pair) >> (16 * (u % 2)), tl.load(p3 + pair))
    elif FORMAT == "iq2_xxs_a":
        unit = _words(p0 + row * (8 * U), u, 8, U) + _words(p1 + row * (4 * U), u, 4, U)
        unit = unit + (tl.load(p2 + pair) >> (16 * (u % 2)), tl.load(p3 + pair))
    elif FORMAT == "q2_k":
        scales = tl.load((p1 + (row * U + u) * 2)[:, None] + tl.arange(0, 2)[None, :])
        unit = _words(p0 + row * (8 * U), u, 8, U) + tl.split(scales) + (tl.load(p2 + pair),)
    elif FORMAT == "q4_k":
        unit = _words(p0 + row * (16 * U), u, 16, U) + (tl.load(p1 + row * U + u),)
        unit = unit + (tl.load(p2 + pair) >> (16 * (u % 2)), tl.load(p3 + pair))
    else:
        tl.static_assert(FORMAT == "mxfp4", "unknown format")
        unit = _words(p0 + row * (16 * U), u, 16, U) + (tl.load(p1 + row * U + u),)
    return unit


@triton.jit
def load_table(FORMAT: tl.constexpr, table):
    """The byte table of a format, for `decode_unit`."""
    if FORMAT == "iq2_xxs_b" or FORMAT == "iq2_xxs_a":
        return (tl.load(table + 256), tl.load(table + 257))
    elif FORMAT == "mxfp4":
        return (tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3))
    else:
        return (0, 0)


@triton.jit
def _iq2_group(unit, table, lut, J: tl.constexpr, LAYOUT_A: tl.constexpr, ASM: tl.constexpr):
    words = ()
    for k in tl.static_range(4):
        if LAYOUT_A:
            magnitudes = (unit[2 * J + k // 2] >> (2 * (k % 2))) & 0x33333333
            signs = unit[8 + J]
        else:
            magnitudes = tl.load(table + ((unit[J] >> (8 * k)) & 255))
            signs = unit[4 + J]
        selector = (((signs >> k) & 0x11111111) << 2) | magnitudes
        words = words + (
            lookup_bytes(lut[0], lut[1], selector, ASM),
            lookup_bytes(lut[0], lut[1], selector >> 16, ASM),
        )
    return words


@triton.jit
def _fp4_group(unit, lut, J: tl.constexpr, ASM: tl.constexpr):
    words = ()
    for i in tl.static_range(4):
        word = unit[4 * J + i]
        size = word & 0x77777777
        # Byte i of the positive values or of the negative ones.
        choice = ((word >> 1) & 0x44444444) | 0x32103210
        for half in tl.static_range(2):
            positive = lookup_bytes(lut[0], lut[1], size >> (16 * half), ASM)
            negative = lookup_bytes(lut[2], lut[3], size >> (16 * half), ASM)
            words = words + (lookup_bytes(positive, negative, choice >> (16 * half), ASM),)
    return words


@triton.jit
def decode_unit(FORMAT: tl.constexpr, unit, table, lut, ASM: tl.constexpr):
    """The 32 words of signed bytes of a unit, before any scale: weights 4 i to 4 i + 3 in word i."""
    words = ()
    for j in tl.static_range(4):
        if FORMAT == "iq2_xxs_b":
            words = words + _iq2_group(unit, table, lut, j, False, ASM)
        elif FORMAT == "iq2_xxs_a":
            words = words + _iq2_group(unit, table, lut, j, True, ASM)
        elif FORMAT == "q2_k":
            for i in tl.static_range(8):
                words = words + ((unit[i] >> (2 * j)) & 0x03030303,)
        elif FORMAT == "q4_k":
            for i in tl.static_range(8):
                words = words + ((unit[8 * (j // 2) + i] >> (4 * (j % 2))) & 0x0F0F0F0F,)
        else:
            words = words + _fp4_group(unit, lut, j, ASM)
    return words


@triton.jit
def exponent_scale(word, J: tl.constexpr):
    """Half of 2^(e - 127) for byte J of a word of exponents; the subnormal ones become 0."""
    e = (word >> (8 * J)) & 255
    return (tl.maximum(e - 1, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def q4_minimum(low, high, J: tl.constexpr):
    """The minimum of group J of a Q4_K unit, whose 16 upper bits are the lowest of `high`."""
    if J == 0:
        return (low >> 24) & 63
    elif J == 1:
        return high & 63
    elif J == 2:
        return (high >> 6) & 63
    else:
        return ((high >> 12) & 15) | (((low >> 30) & 3) << 4)


@triton.jit
def load_activations(x, sums, scales, u, live, U: tl.constexpr, SUMS: tl.constexpr):
    """Units u of one row of activations: 32 words, 4 words of sums if SUMS, then 4 scales, 0 where not live."""
    unit = _words(x, u, 32, U)
    if SUMS:
        unit = unit + load_four(sums + u * 4)
    s0, s1, s2, s3 = load_four(scales + u * 4)
    return unit + (tl.where(live, s0, 0.0), tl.where(live, s1, 0.0), tl.where(live, s2, 0.0), tl.where(live, s3, 0.0))


@triton.jit
def _dot_words(words, x, FIRST: tl.constexpr, COUNT: tl.constexpr, ASM: tl.constexpr):
    total = words[FIRST] & 0
    for i in tl.static_range(COUNT):
        total = dp4a(words[FIRST + i], x[FIRST + i], total, ASM)
    return total


@triton.jit
def dot_unit(FORMAT: tl.constexpr, unit, words, x, ASM: tl.constexpr):
    """float32, one a lane: the units' part of the dot products of weight rows with one row of activations.

    unit, words: from `load_unit` and `decode_unit`; x: from `load_activations` (with sums for Q2_K and Q4_K).
    """
    if FORMAT == "iq2_xxs_b" or FORMAT == "iq2_xxs_a":
        AT: tl.constexpr = 8 if FORMAT == "iq2_xxs_b" else 12
        total = x[32] * 0.0
        for j in tl.static_range(4):
            part = _dot_words(words, x, 8 * j, 8, ASM) * (2 * ((unit[AT] >> (4 * j)) & 15) + 1)
            total += part.to(tl.float32) * x[32 + j]
        result = total * (unit[AT + 1].to(tl.float32) * 0.125)
    elif FORMAT == "q2_k":
        total = x[36] * 0.0
        least = total
        for j in tl.static_range(4):
            of_group = words[0] & 0
            below = of_group
            for half in tl.static_range(2):
                scale = unit[8 + j // 2] >> (16 * (j % 2) + 8 * half)
                of_group += _dot_words(words, x, 8 * j + 4 * half, 4, ASM) * (scale & 15)
                part = (x[32 + j] << 16) >> 16 if half == 0 else x[32 + j] >> 16
                below += part * ((scale >> 4) & 15)
            total += of_group.to(tl.float32) * x[36 + j]
            least += below.to(tl.float32) * x[36 + j]
        d = unit[10]
        result = total * low_half(d) - least * high_half(d)
    elif FORMAT == "q4_k":
        total = x[36] * 0.0
        least = total
        for j in tl.static_range(4):
            of_group = _dot_words(words, x, 8 * j, 8, ASM) * ((unit[16] >> (6 * j)) & 63)
            part = ((x[32 + j] << 16) >> 16) + (x[32 + j] >> 16)
            total += of_group.to(tl.float32) * x[36 + j]
            least += (part * q4_minimum(unit[16], unit[17], j)).to(tl.float32) * x[36 + j]
        d = unit[18]
        result = total * low_half(d) - least * high_half(d)
    else:
        result = x[32] * 0.0
        for j in tl.static_range(4):
            result += _dot_words(words, x, 8 * j, 8, ASM).to(tl.float32) * (exponent_scale(unit[16], j) * x[32 + j])
    return result
