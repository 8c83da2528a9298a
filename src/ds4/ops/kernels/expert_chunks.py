"""How prefill's kernels read expert formats: eight neighbouring weights, a chunk, for every element of a tile.

`load_chunk` fetches the words of chunks, `chunk_bytes` makes two words of bytes, a scale and a minimum of them, and
`halves_of_bytes` float16. Row, unit, group and chunk are tensors of any number of axes, or scalars, which broadcast, so
what they share is loaded once. All formats take four pointers, unused ones are ignored (see `planes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.ops.kernels.expert_formats import exponent_scale, q4_minimum
from ds4.ops.kernels.intrinsics import high_half, lookup_bytes, low_half


@triton.jit
def _pair_of_words(p):
    """The words at p and p + 1, in a last axis. Split where they are used: the compiler copies them twice otherwise."""
    return tl.load(tl.expand_dims(p, -1) + tl.arange(0, 2))


@triton.jit
def load_chunk(FORMAT: tl.constexpr, p0, p1, p2, p3, R, u, h, j, k, U: tl.constexpr):
    """The words of chunks k (0 to 3) of groups j (0 to 3, in the half h = j // 2) of units u of rows R, as a tuple."""
    pair = R * (U // 2) + u // 2
    if FORMAT == "q8_0":
        words = _pair_of_words(p0 + (R * (32 * U) + u * 32 + j * 8 + k * 2))
        return (words, tl.load(p1 + (R * (4 * U) + u * 4 + j)))
    elif FORMAT == "iq2_xxs_b":
        group = R * (4 * U) + u * 4 + j
        return (tl.load(p0 + group), tl.load(p1 + group), tl.load(p2 + pair), tl.load(p3 + pair))
    elif FORMAT == "iq2_xxs_a":
        codes = tl.load(p0 + (R * (8 * U) + (h * U + u) * 4 + 2 * (j % 2) + k // 2))
        return (codes, tl.load(p1 + (R * (4 * U) + u * 4 + j)), tl.load(p2 + pair), tl.load(p3 + pair))
    elif FORMAT == "q2_k":
        words = _pair_of_words(p0 + (R * (8 * U) + (k // 2 * U + u) * 4 + k % 2 * 2))
        return (words, tl.load(p1 + (R * (2 * U) + u * 2 + h)), tl.load(p2 + pair))
    elif FORMAT == "q4_k":
        words = _pair_of_words(p0 + (R * (16 * U) + ((2 * h + k // 2) * U + u) * 4 + k % 2 * 2))
        return (words, tl.load(p1 + (R * U + u)), tl.load(p2 + pair), tl.load(p3 + pair))
    else:
        tl.static_assert(FORMAT == "mxfp4", "unknown format")
        return (tl.load(p0 + (R * (16 * U) + (j * U + u) * 4 + k)), tl.load(p1 + (R * U + u)))


@triton.jit
def chunk_bytes(FORMAT: tl.constexpr, chunk, lut, u, j, k, gain, ASM: tl.constexpr):
    """Two words of bytes, gain times their scale, and gain times what is then taken off (float32; 0: nothing is).

    The bytes are as `lut` has them, which may be 128 too large; those of Q8_0 are signed. In place of the indices of
    IQ2_XXS rows the chunk has magnitudes.
    """
    if FORMAT == "q8_0":
        low, high = tl.split(chunk[0])
        return low, high, chunk[1].to(tl.float32) * gain, 0.0
    elif FORMAT == "iq2_xxs_b" or FORMAT == "iq2_xxs_a":
        magnitudes = chunk[0] if FORMAT == "iq2_xxs_b" else (chunk[0] >> (2 * (k % 2))) & 0x33333333
        selector = (((chunk[1] >> k) & 0x11111111) << 2) | magnitudes
        scale = ((chunk[2] >> (16 * (u % 2) + 4 * j)) & 15) * 2 | 1
        d = chunk[3].to(tl.float32) * (0.125 * gain)
        low = lookup_bytes(lut[0], lut[1], selector, ASM)
        return low, lookup_bytes(lut[0], lut[1], selector >> 16, ASM), d * scale.to(tl.float32), 0.0
    elif FORMAT == "q2_k":
        low, high = tl.split(chunk[0])
        packed = chunk[1] >> (16 * (j % 2) + 8 * (k // 2))
        scale = low_half(chunk[2]) * gain * (packed & 15).to(tl.float32)
        least = high_half(chunk[2]) * gain * ((packed >> 4) & 15).to(tl.float32)
        return (low >> (2 * j)) & 0x03030303, (high >> (2 * j)) & 0x03030303, scale, least
    elif FORMAT == "q4_k":
        low, high = tl.split(chunk[0])
        scales, d = chunk[1], chunk[3]
        upper = chunk[2] >> (16 * (u % 2))
        least = tl.where(j == 0, q4_minimum(scales, upper, 0), q4_minimum(scales, upper, 1))
        least = tl.where(j == 2, q4_minimum(scales, upper, 2), least)
        least = tl.where(j == 3, q4_minimum(scales, upper, 3), least)
        scale = low_half(d) * gain * ((scales >> (6 * j)) & 63).to(tl.float32)
        shift = 4 * (j % 2)
        return (
            (low >> shift) & 0x0F0F0F0F,
            (high >> shift) & 0x0F0F0F0F,
            scale,
            high_half(d) * gain * least.to(tl.float32),
        )
    else:
        tl.static_assert(FORMAT == "mxfp4", "unknown format")
        word = chunk[0]
        size = word & 0x77777777
        choice = ((word >> 1) & 0x44444444) | 0x32103210
        low = lookup_bytes(
            lookup_bytes(lut[0], lut[1], size, ASM), lookup_bytes(lut[2], lut[3], size, ASM), choice, ASM
        )
        high = lookup_bytes(
            lookup_bytes(lut[0], lut[1], size >> 16, ASM),
            lookup_bytes(lut[2], lut[3], size >> 16, ASM),
            choice >> 16,
            ASM,
        )
        return low, high, exponent_scale(chunk[1] >> (8 * j), 0) * gain, 0.0


@triton.jit
def chunk_values(FORMAT: tl.constexpr, p0, p1, p2, p3, table, lut, R, u, j, k, U: tl.constexpr, ASM: tl.constexpr):
    """The weights of chunks, as float32 with an axis of eight at the end. R, u, j and k are tensors of equal axes, or
    scalars; of IQ2_XXS, u, j and k have the axes of all."""
    words = load_chunk(FORMAT, p0, p1, p2, p3, R, u, j // 2, j, k, U)
    if FORMAT == "iq2_xxs_b":
        words = (tl.load(table + ((words[0] >> (8 * k)) & 255)), words[1], words[2], words[3])
    low, high, scale, least = chunk_bytes(FORMAT, words, lut, u, j, k, 1.0, ASM)
    both = tl.expand_dims(tl.join(low, high), -1) << (24 - 8 * tl.arange(0, 4))
    values = tl.reshape(both >> 24, low.shape + [8]).to(tl.float32) * tl.expand_dims(scale, -1)
    if FORMAT == "q2_k" or FORMAT == "q4_k":
        values = values - tl.expand_dims(least, -1)
    return values


def _halves(first: str, low: str, high: str, scale: str, excess: str, last: str) -> tl.constexpr:
    """Instructions that make eight float16 ($0 to $7) of two words of bytes.

    A byte b becomes 1024 + b by what stands beside it, and then, exactly, what it stands for.

    Args:
        first: what puts the bytes into `low` and `high`.
        scale: what puts a pair of scales into s, or whatever `last` takes.
        excess: a pair of -1024 less what the bytes are too large.
        last: operation and last operands that the pairs w0 to w3 go through at the end.
    """
    words = [f"w{i}" for i in range(4)]
    return tl.constexpr(
        "\n".join(
            [
                "{ .reg .b32 t, l, h, s, m, b, w0, w1, w2, w3; .reg .f32 f;",
                first,
                *(
                    f"prmt.b32 {w}, {b}, 0x64646464, {p};"
                    for w, b, p in zip(words, (low, low, high, high), _PLACES, strict=True)
                ),
                scale,
                f"mov.b32 b, {excess};",
                *(f"add.rn.f16x2 {w}, {w}, b;" for w in words),
                *(f"{last.replace('w', w)};" for w in words),
                *(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {w};" for i, w in enumerate(words)),
                "}",
            ]
        )
    )


_PLACES = ("0x4140", "0x4342") * 2
_SCALE = "cvt.rn.f16x2.f32 s, $10, $10;"
_OF_BYTES = _halves("", "$8", "$9", _SCALE, "0xE480E480", "mul.rn.f16x2 w, w, s")
_LESS_MINIMUM = _halves(
    "", "$8", "$9", _SCALE + "cvt.rn.f16x2.f32 m, $11, $11; neg.f16x2 m, m;", "0xE400E400", "fma.rn.f16x2 w, w, s, m"
)
_OF_IQ2 = _halves(
    "shf.l.wrap.b32 t, $9, $9, $10; lop3.b32 t, t, 0x44444444, $8, 0xEA;"
    "prmt.b32 l, $14, $15, t; shr.b32 t, t, 16; prmt.b32 h, $14, $15, t;",
    "l",
    "h",
    "shf.l.wrap.b32 t, $11, $11, $12; lop3.b32 t, t, 0x1E, 1, 0xEA;"
    "cvt.rn.f32.u32 f, t; mul.rn.f32 f, f, $13; cvt.rn.f16x2.f32 s, f, f;",
    "0xE480E480",
    "mul.rn.f16x2 w, w, s",
)
_BITS = tl.constexpr((tl.int16,) * 8)


@triton.jit
def halves_of_bytes(low, high, scale, least, MINIMUM: tl.constexpr):
    """Bytes * scale (- least) in float16: eight tensors of bits. Bytes are unsigned with MINIMUM, else 128 too large.

    Scale and minimum are rounded to float16, and so is the result.
    """
    if MINIMUM:
        return tl.inline_asm_elementwise(
            _LESS_MINIMUM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f,f", [low, high, scale, least], _BITS, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _OF_BYTES, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f", [low, high, scale], _BITS, is_pure=True, pack=1
        )


@triton.jit
def iq2_halves(magnitudes, signs, sign_turn, scales, scale_turn, d, lut):
    """`halves_of_bytes` from where IQ2_XXS begins: d * (2 scale + 1) * (magnitude with its sign).

    The rotations bring the signs of the chunk to bit 2 of each nibble, and twice the group's scale to bits 1 to 4.
    """
    return tl.inline_asm_elementwise(
        _OF_IQ2,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,f,r,r",
        [magnitudes, signs, sign_turn, scales, scale_turn, d, lut[0], lut[1]],
        _BITS,
        is_pure=True,
        pack=1,
    )
