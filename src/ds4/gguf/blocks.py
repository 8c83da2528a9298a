"""Block codecs: stored bytes -> float32, bit for bit what the `gguf` package's dequantiser gives (quant blocks).

Blocks run along the innermost dim, so any run of whole rows (an expert, a few rows of the embedding) can be converted
alone. Every codec works through the bytes in chunks, so that beside the result only a few MiB are held.

A NaN or infinite scale gives NaN or infinity for the values of its block, as in the `gguf` package; which NaN of the
many is not promised. Everything finite, subnormal scales and the sign of zero included, is bit-equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ds4.gguf.header import row_bytes

__all__ = ["CODEC_TYPES", "as_tensor", "dequantize", "row_bytes"]

# Values per chunk on the CPU: the float32 result of one and its temporaries stay in the cache.
_CHUNK = 1 << 18
# On a GPU a chunk has to fill the device; 64 MiB of float32.
_CHUNK_GPU = 1 << 24

_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class _Shared:
    """A numpy array's memory without the mark that it must not be written, which torch cannot express."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.owner = data
        interface: dict[str, Any] = dict(data.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def as_tensor(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The same memory as a uint8 tensor, no copy. Never write to it: a mapped file's pages are read-only."""
    return torch.from_numpy(np.asarray(_Shared(data)))


def dequantize(
    data: torch.Tensor | npt.NDArray[np.uint8],
    type: GGMLQuantizationType,
    n_values: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [n_values], the values of whole blocks, on the device of `data`.

    Args:
        data: uint8 [bytes]; exactly the blocks of `n_values` values.
        type: one of `CODEC_TYPES`.
        out: optional contiguous float32 buffer of `n_values` values in any shape, on the same device; it is filled and
            returned as [n_values].

    Raises:
        ValueError: no codec for the type, or sizes that do not fit.
    """
    codec = _CODECS.get(type)
    if codec is None:
        raise ValueError(f"no codec for {type.name}; known: {', '.join(t.name for t in CODEC_TYPES)}")
    source = as_tensor(data) if isinstance(data, np.ndarray) else data
    if source.dtype != torch.uint8 or source.dim() != 1 or source.numel() != row_bytes(type, n_values):
        raise ValueError(
            f"{n_values} values of {type.name} are uint8 [{row_bytes(type, n_values)}], "
            f"got {source.dtype} {list(source.shape)}"
        )
    if out is None:
        out = torch.empty(n_values, dtype=torch.float32, device=source.device)
    elif out.dtype != torch.float32 or out.numel() != n_values or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected contiguous float32 with {n_values} values")
    if n_values == 0:
        return out.view(-1)
    values, size = GGML_QUANT_SIZES[type]
    blocks, result = source.view(-1, size), out.view(-1, values)
    step = max(1, (_CHUNK if source.device.type == "cpu" else _CHUNK_GPU) // values)
    for start in range(0, blocks.shape[0], step):
        codec(blocks[start : start + step], result[start : start + step])
    return out.view(-1)


# Each codec fills `out` [blocks, values] from `blocks` [blocks, bytes]. Products and differences are separate steps:
# a fused multiply-add would round once where the reference rounds twice.


def _part(blocks: torch.Tensor, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes start..end of every block as `dtype` [blocks, items]; a copy where they are not aligned."""
    part, width = blocks[:, start:end], end - start
    if part.stride(0) != width or part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize:
        part = torch.empty((part.shape[0], width), dtype=torch.uint8, device=part.device).copy_(part)
    return part.view(dtype)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return _part(blocks, start, start + 2, torch.float16).float()


def _f32(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # Copied as integers: moving a float may quieten a NaN.
    out.view(torch.int32).copy_(_part(blocks, 0, 4, torch.int32))


def _f16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_part(blocks, 0, 2, torch.float16))


def _bf16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.bitwise_left_shift(_part(blocks, 0, 2, torch.int16).int(), 16, out=out.view(torch.int32))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    n = blocks.shape[0]
    scales = blocks[:, :16]
    d = (scales & 15).float().mul_(_half(blocks, 80))
    m = (scales >> 4).float().mul_(_half(blocks, 82))
    # Two halves of 128 values; the 2-bit code j of byte l is value 32 j + l of its half. Four bytes at a time.
    words = _part(blocks, 16, 80, torch.int32).view(n, 2, 1, 8)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=blocks.device).view(1, 1, 4, 1)
    codes = (words >> shifts).bitwise_and_(0x03030303).view(torch.int8)
    values = out.view(n, 16, 16)
    values.copy_(codes.view(n, 16, 16))
    values.mul_(d.view(n, 16, 1)).sub_(m.view(n, 16, 1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    n = blocks.shape[0]
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    least = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=1)
    d = scale.float().mul_(_half(blocks, 0))
    m = least.float().mul_(_half(blocks, 2))
    # Four runs of 32 bytes: low nibbles are 32 values, high nibbles the next 32.
    words = _part(blocks, 16, 144, torch.int32).view(n, 4, 1, 8)
    shifts = torch.tensor([0, 4], dtype=torch.int32, device=blocks.device).view(1, 1, 2, 1)
    codes = (words >> shifts).bitwise_and_(0x0F0F0F0F).view(torch.int8)
    values = out.view(n, 8, 32)
    values.copy_(codes.view(n, 8, 32))
    values.mul_(d.view(n, 8, 1)).sub_(m.view(n, 8, 1))


@functools.lru_cache(maxsize=8)
def _iq2_xxs_table(device: torch.device) -> torch.Tensor:
    """int64 [128 * 256]: eight signed magnitudes as bytes, for every sign code (high bits) and grid row (low bits)."""
    quants.IQ2_XXS.init_grid()
    grid = torch.tensor(np.asarray(quants.IQ2_XXS.grid).reshape(1, 256, 8), dtype=torch.int8)
    code = torch.arange(128)
    bits = torch.stack([(code >> i) & 1 for i in range(7)], dim=1)
    bits = torch.cat([bits, bits.sum(dim=1, keepdim=True) & 1], dim=1)  # the eighth sign makes their number even
    signs = (1 - 2 * bits).to(torch.int8).view(128, 1, 8)
    return (grid * signs).view(torch.int64).flatten().to(device)


def _iq2_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    n = blocks.shape[0]
    words = _part(blocks, 2, 66, torch.int32).view(n, 8, 2)
    rows = words[:, :, 0].contiguous().view(torch.uint8).view(n, 8, 4)
    packed = words[:, :, 1:]
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=blocks.device)
    index = (packed >> shifts).bitwise_and_(127).bitwise_left_shift_(8).bitwise_or_(rows)
    table = _iq2_xxs_table(blocks.device)
    codes = torch.index_select(table, 0, index.view(-1)).view(torch.int8)
    # The four scale bits lie on top of an unsigned word: mask what the arithmetic shift drags in.
    d = ((packed.view(n, 8) >> 28) & 15).float().add_(0.5).mul_(_half(blocks, 0)).mul_(0.25)
    values = out.view(n, 8, 32)
    values.copy_(codes.view(n, 8, 32))
    values.mul_(d.view(n, 8, 1))


@functools.lru_cache(maxsize=8)
def _mxfp4_table(device: torch.device) -> torch.Tensor:
    """int16 [256]: the two values of a byte, doubled; as bytes low nibble first."""
    values = torch.tensor(_MXFP4_VALUES, dtype=torch.int8)
    code = torch.arange(256)
    return torch.stack([values[code & 15], values[code >> 4]], dim=1).view(torch.int16).flatten().to(device)


def _mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    n = blocks.shape[0]
    # Half of 2^(e - 127), for the doubled table; the two smallest are subnormal.
    e = blocks[:, :1].int()
    bits = torch.where(e < 2, torch.full_like(e, 0x00200000) << e.clamp(max=1), (e - 1) << 23)
    pairs = torch.index_select(_mxfp4_table(blocks.device), 0, blocks[:, 1:].reshape(-1).int())
    codes = pairs.view(torch.int8).view(n, 16, 2)
    values = out.view(n, 2, 16)
    values.copy_(codes.transpose(1, 2))
    values.mul_(bits.view(torch.float32).view(n, 1, 1))


_CODECS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    GGMLQuantizationType.F32: _f32,
    GGMLQuantizationType.F16: _f16,
    GGMLQuantizationType.BF16: _bf16,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.IQ2_XXS: _iq2_xxs,
    GGMLQuantizationType.MXFP4: _mxfp4,
}

CODEC_TYPES: tuple[GGMLQuantizationType, ...] = tuple(_CODECS)
"""The types that `dequantize` knows."""
