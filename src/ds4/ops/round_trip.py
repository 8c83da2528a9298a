"""The quantisation round trips that the model was trained with, and the packed form of what they leave.

Rows of the KV lose their plain channels to FP8 (E4M3, one power-of-two scale per 64 channels) and index keys all
channels to FP4 (E2M1, one scale per 32) after a Hadamard transform (V4 graph, Quantisation simulation). A packed row
holds exactly what was attended, so `unpack(pack(x))` is the round trip.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ds4.ops.linear import linear

FP8_BLOCK = 64
FP4_BLOCK = 32
_FP8_MAX = 448.0
_FP4_MAX = 6.0
_EXPONENT_BIAS = 127
# Halfway between neighbouring FP4 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6.
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _ceil_exponent(x: Tensor) -> Tensor:
    """ceil(log2(x)) + 127 for positive normal float32 x, from the bits: int32, the exponent field of the scale."""
    bits = x.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _scale(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as float32, for exponent fields 1 to 254."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def _fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [..., channels] and scale exponents uint8 [..., channels / 64]."""
    blocks = x.unflatten(-1, (-1, FP8_BLOCK))
    exponent = _ceil_exponent(blocks.abs().amax(-1).clamp(min=1e-4) / _FP8_MAX)
    scaled = (blocks / _scale(exponent).unsqueeze(-1)).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), exponent.to(torch.uint8)


def _from_fp8(codes: Tensor, exponent: Tensor) -> Tensor:
    blocks: Tensor = codes.to(torch.float32).unflatten(-1, (-1, FP8_BLOCK))
    return (blocks * _scale(exponent).unsqueeze(-1)).flatten(-2)


def fp8_round_trip(x: Tensor) -> Tensor:
    """x float32 [..., channels], channels a multiple of 64, rounded to E4M3 with one 2^e scale per 64 channels."""
    return _from_fp8(*_fp8(x))


def pack_row(x: Tensor, rope_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A KV row after rope, packed.

    x: float32 [rows, head_dim], (head_dim - rope_dim) a multiple of 64 -> codes uint8 [rows, head_dim - rope_dim]
    (E4M3), rotary tail bfloat16 [rows, rope_dim], scale exponents uint8 [rows, (head_dim - rope_dim) / 64] (E8M0).
    """
    codes, exponent = _fp8(x[..., :-rope_dim])
    return codes.view(torch.uint8), x[..., -rope_dim:].to(torch.bfloat16), exponent


def unpack_row(codes: Tensor, tail: Tensor, exponent: Tensor) -> Tensor:
    """The float32 row [rows, head_dim] of a packed one; exact."""
    return torch.cat((_from_fp8(codes.view(torch.float8_e4m3fn), exponent), tail.to(torch.float32)), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform over the innermost axis in natural order, scaled by n^-0.5; n a power of two."""
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, not {n} channels")
    scale: float = n**-0.5
    return linear(x.reshape(-1, n), _sylvester(n).to(x.device)).view(x.shape) * scale


@functools.cache
def _sylvester(n: int) -> Tensor:
    """The matrix of signs, float32 [n, n]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 0..15 [..., channels] and scale exponents uint8 [..., channels / 32]."""
    blocks = x.unflatten(-1, (-1, FP4_BLOCK))
    exponent = _ceil_exponent(blocks.abs().amax(-1).clamp(min=_FP4_MAX * 2.0**-126) / _FP4_MAX)
    scaled = blocks / _scale(exponent).unsqueeze(-1)
    # Nearest with ties to the even code: midpoints below an odd code go down, those below an even code go up.
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for i, midpoint in enumerate(_FP4_MIDPOINTS):
        code += (size > midpoint) if i % 2 == 0 else (size >= midpoint)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return code.flatten(-2), exponent.to(torch.uint8)


def _from_fp4(code: Tensor, exponent: Tensor) -> Tensor:
    table = torch.tensor(_FP4_VALUES, dtype=torch.float32, device=code.device)
    blocks: Tensor = table[code.to(torch.int64)].unflatten(-1, (-1, FP4_BLOCK))
    return (blocks * _scale(exponent).unsqueeze(-1)).flatten(-2)


def fp4_round_trip(x: Tensor) -> Tensor:
    """x float32 [..., channels], channels a multiple of 32, rounded to E2M1 with one 2^e scale per 32 channels."""
    return _from_fp4(*_fp4(x))


def pack_key(x: Tensor) -> tuple[Tensor, Tensor]:
    """An index key after the Hadamard transform, packed.

    x: float32 [rows, dim] -> codes uint8 [rows, dim / 2], two a byte, the even channel in the low half; scale exponents
    uint8 [rows, dim / 32].
    """
    code, exponent = _fp4(x)
    return code[..., 0::2] | (code[..., 1::2] << 4), exponent


def unpack_key(codes: Tensor, exponent: Tensor) -> Tensor:
    """The float32 key [rows, dim] of a packed one; exact."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return _from_fp4(code, exponent)
