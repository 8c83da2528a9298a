"""Stored checkpoint types to float32, and packed FP4 to the blocks of MXFP4 without loss.

FP8 is E4M3 with one scale per tile (128 x 128), FP4 is E2M1, two values a byte with the first one in the low nibble and
one E8M0 scale per 32 inputs (GGUF container, source dtypes). An E8M0 byte e means 2^(e - 127), 255 is not a number.
"""

from __future__ import annotations

import functools

import torch

FP4_GROUP = 32
"""Inputs that share one scale."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""safetensors' names of the types that are read."""

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
PACKED = ("I8", "U8")
"""Types that packed FP4 comes in."""
SCALES = ("F8_E8M0", "U8", "F32", "BF16")
"""Types that scales come in; U8 holds E8M0 bytes."""


def scales(stored: torch.Tensor) -> torch.Tensor:
    """float32, same shape: E8M0 or plain scales as numbers. An E8M0 of 255 gives NaN."""
    if stored.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        return stored.float()
    exponent = stored.view(torch.uint8).int()
    # 2^-127, the smallest, is subnormal: one bit below the exponent field.
    bits = torch.where(exponent == 0, torch.full_like(exponent, 0x00400000), exponent << 23)
    return torch.where(exponent == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def fp8(codes: torch.Tensor, stored_scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """float32 [rows, cols] of E4M3 codes and the scales [rows / tile, cols / tile, rounded up] of their tiles.

    `codes` begins at the first row of a tile.
    """
    values = codes.float()
    factors = scales(stored_scales).repeat_interleave(tile[1], dim=1)[:, : values.shape[1]]
    for row in range(factors.shape[0]):
        values[row * tile[0] : (row + 1) * tile[0]] *= factors[row]
    return values


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device) -> torch.Tensor:
    """float32 [256, 2]: the two values of a byte, low nibble first."""
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)])
    code = torch.arange(256)
    return torch.stack((values[code & 15], values[code >> 4]), dim=1).to(device)


def fp4(packed: torch.Tensor, stored_scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, cols] of packed codes [rows, cols / 2] and scales [rows, cols / 32]."""
    rows, width = packed.shape
    index = packed.contiguous().view(torch.uint8).flatten().int()
    values = torch.index_select(_pairs(packed.device), 0, index).view(rows, -1, FP4_GROUP)
    values *= scales(stored_scales).unsqueeze(2)
    return values.view(rows, 2 * width)


def mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 17 * cols / 32]: the same values as MXFP4 blocks, the scale byte and codes moved, none changed.

    In a block the low nibbles are its first 16 values, the high nibbles the other 16.
    """
    rows = packed.shape[0]
    codes = packed.contiguous().view(torch.uint8).view(rows, -1, 2, FP4_GROUP // 4)
    first, second = codes[:, :, 0], codes[:, :, 1]
    blocks = torch.empty((rows, codes.shape[1], 17), dtype=torch.uint8, device=packed.device)
    blocks[:, :, 0] = exponents.contiguous().view(torch.uint8)
    blocks[:, :, 1::2] = (first & 15) | (second << 4)
    blocks[:, :, 2::2] = (first >> 4) | (second & 0xF0)
    return blocks.view(rows, -1)
