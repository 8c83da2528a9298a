"""Weights as planes of words that kernels read with wide aligned loads, instead of GGUF's blocks of 17 to 144 bytes.

A row of K weights is cut into units of 128, U = K / 128 of them, and a unit into four groups of 32. A lane of a warp
owns a unit. Codes of expert formats stand in **fours**: words 0 to 3 of every unit of the row, then words 4 to 7 of
every unit, and so on, [words of a unit / 4, U, 4], so that a lane fetches four words with one load and its neighbours
the next ones. The planes of Q8_0 keep the natural order.

| planes | codes (int32 words) | scales |
|---|---|---|
| `Q8Planes` | [n, K/4], four signed bytes a word | fp16 [n, K/32] |
| `Iq2bPlanes` | index [.., U, 4]: four grid rows of a group; signs [.., U, 4] | scale int32, d fp16 [.., K/256] |
| `Iq2aPlanes` | codes [.., 2, U, 4]: magnitudes, 2 bits each; signs [.., U, 4] | as `Iq2bPlanes` |
| `Q2KPlanes` | codes [.., 2, U, 4] | scale int32 [.., U, 2], d int32 [.., K/256] (d and dmin as two fp16) |
| `Q4KPlanes` | codes [.., 4, U, 4] | low int32 [.., U], high int32 [.., K/256], d as `Q2KPlanes` |
| `Mxfp4Planes` | codes [.., 4, U, 4] | scale int32 [.., U], four exponents |

Bits inside the words, for group j of a unit and weight i of the group:

* IQ2_XXS signs: bit 4 (i % 8) + i // 8 of word j is set where the weight is negative; the format's implied eighth sign
  is stored. Scale: four bits each, group 0 of the even unit lowest; the weight is d / 8 * (2 scale + 1) * magnitude.
* IQ2_XXS A codes: word 2j + i // 16, two bits at 4 (i % 8) + 2 (i // 8 % 2): magnitude 8, 25 or 43.
* Q2_K codes: byte i % 4 of word i // 4, two bits at 2 j. Scale: byte 2j + i // 16 of the two words: scale, minimum.
* Q4_K codes: byte i % 4 of word 8 (j // 2) + i // 4, four bits at 4 (j % 2). Low: four scales of 6 bits, minimum 0 in
  the 6 bits above, upper bits of minimum 3 in the last two. High: 16 bits a unit: minima 1 and 2, low bits of 3.
* MXFP4 codes: four bits at 4 (i % 8) of word 4j + i // 8. Scale: byte j is the exponent.

This file needs no triton: the memory plan uses it without a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

UNIT = 128
"""Weights that share a lane of a kernel, and activations of Q8_0 matrices that share a scale."""

Iq2Layout = Literal["a", "b"]
"""IQ2_XXS as magnitudes (a, 3.19 bits a weight, no table) or as grid rows (b, 2.19 bits)."""

# Raw bytes that are repacked at once: the temporaries are a few times as large.
_SLICE = 32 << 20
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Planes:
    """What all kinds of planes share.

    Attributes:
        n, k: rows and columns of one matrix.
        experts: how many matrices stand one behind the other, None for a single matrix without that axis.
    """

    n: int
    k: int
    experts: int | None
    FORMAT: ClassVar[str] = ""

    @property
    def units(self) -> int:
        """Units of 128 weights in a row."""
        return self.k // UNIT

    @property
    def rows(self) -> int:
        """Rows of all matrices."""
        return self.n * (self.experts or 1)

    def planes(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the planes; tables that all matrices share are not among them."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "table":
                yield field.name, value

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(t.numel() * t.element_size() for _, t in self.planes())


@dataclass(frozen=True)
class Q8Planes(Planes):
    """Q8_0: codes int32 [n, k/4], scales fp16 [n, k/32]."""

    codes: Tensor
    scales: Tensor
    FORMAT: ClassVar[str] = "q8_0"


@dataclass(frozen=True)
class F16Planes(Planes):
    """F16 as it is: weight fp16 [n, k]."""

    weight: Tensor
    FORMAT: ClassVar[str] = "f16"


@dataclass(frozen=True)
class Iq2bPlanes(Planes):
    """IQ2_XXS by grid rows: index, signs int32 [experts, n, U, 4]; scale int32, d fp16 [experts, n, k/256].

    `table`: int32 [258], for each grid row its eight magnitudes as codes of two bits in the nibbles of a word; then
    the bytes that a nibble of such a code and a sign stands for.
    """

    index: Tensor
    signs: Tensor
    scale: Tensor
    d: Tensor
    table: Tensor
    FORMAT: ClassVar[str] = "iq2_xxs_b"


@dataclass(frozen=True)
class Iq2aPlanes(Planes):
    """IQ2_XXS by magnitudes: codes int32 [experts, n, 2, U, 4]; the rest as `Iq2bPlanes`."""

    codes: Tensor
    signs: Tensor
    scale: Tensor
    d: Tensor
    table: Tensor
    FORMAT: ClassVar[str] = "iq2_xxs_a"


@dataclass(frozen=True)
class Q2KPlanes(Planes):
    """Q2_K: codes int32 [experts, n, 2, U, 4], scale int32 [experts, n, U, 2], d int32 [experts, n, k/256]."""

    codes: Tensor
    scale: Tensor
    d: Tensor
    FORMAT: ClassVar[str] = "q2_k"


@dataclass(frozen=True)
class Q4KPlanes(Planes):
    """Q4_K: codes int32 [experts, n, 4, U, 4], low int32 [experts, n, U], high, d int32 [experts, n, k/256]."""

    codes: Tensor
    low: Tensor
    high: Tensor
    d: Tensor
    FORMAT: ClassVar[str] = "q4_k"


@dataclass(frozen=True)
class Mxfp4Planes(Planes):
    """MXFP4: codes int32 [experts, n, 4, U, 4], scale int32 [experts, n, U]; `table` int32 [4]: the values' bytes."""

    codes: Tensor
    scale: Tensor
    table: Tensor
    FORMAT: ClassVar[str] = "mxfp4"


_FORMS: dict[tuple[GGMLQuantizationType, Iq2Layout | None], type[Planes]] = {
    (GGMLQuantizationType.Q8_0, None): Q8Planes,
    (GGMLQuantizationType.F16, None): F16Planes,
    (GGMLQuantizationType.IQ2_XXS, "a"): Iq2aPlanes,
    (GGMLQuantizationType.IQ2_XXS, "b"): Iq2bPlanes,
    (GGMLQuantizationType.Q2_K, None): Q2KPlanes,
    (GGMLQuantizationType.Q4_K, None): Q4KPlanes,
    (GGMLQuantizationType.MXFP4, None): Mxfp4Planes,
}

# Name -> dtype and shape behind [experts, n], for each kind of planes.
_PlaneShapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _form(type: GGMLQuantizationType, layout: Iq2Layout) -> type[Planes]:
    form = _FORMS.get((type, layout if type == GGMLQuantizationType.IQ2_XXS else None))
    if form is None:
        known = ", ".join(sorted({t.name for t, _ in _FORMS}))
        raise ValueError(f"no planes for {type.name}; known: {known}")
    return form


def _shapes(form: type[Planes], k: int) -> _PlaneShapes:
    i32, f16, u = torch.int32, torch.float16, k // UNIT
    pair = (k // 256,)
    shapes: dict[type[Planes], _PlaneShapes] = {
        Q8Planes: {"codes": (i32, (k // 4,)), "scales": (f16, (k // 32,))},
        F16Planes: {"weight": (f16, (k,))},
        Iq2bPlanes: {"index": (i32, (u, 4)), "signs": (i32, (u, 4)), "scale": (i32, pair), "d": (f16, pair)},
        Iq2aPlanes: {"codes": (i32, (2, u, 4)), "signs": (i32, (u, 4)), "scale": (i32, pair), "d": (f16, pair)},
        Q2KPlanes: {"codes": (i32, (2, u, 4)), "scale": (i32, (u, 2)), "d": (i32, pair)},
        Q4KPlanes: {"codes": (i32, (4, u, 4)), "low": (i32, (u,)), "high": (i32, pair), "d": (i32, pair)},
        Mxfp4Planes: {"codes": (i32, (4, u, 4)), "scale": (i32, (u,))},
    }
    return shapes[form]


def _check(form: type[Planes], k: int) -> None:
    whole = {Q8Planes: UNIT, F16Planes: 64, Mxfp4Planes: UNIT}.get(form, 256)
    if k % whole or k == 0:
        raise ValueError(f"{form.FORMAT}: a row of {k} weights does not fit; it must be a multiple of {whole}")


def planes_nbytes(type: GGMLQuantizationType, n: int, k: int, experts: int = 1, layout: Iq2Layout = "b") -> int:
    """Bytes of the planes of `experts` matrices [n, k], exactly what `allocate` takes.

    Raises:
        ValueError: no planes for this type, or a row length that does not fit.
    """
    form = _form(type, layout)
    _check(form, k)
    row = sum(dtype.itemsize * math.prod(shape) for dtype, shape in _shapes(form, k).values())
    return experts * n * row


def allocate(
    type: GGMLQuantizationType,
    n: int,
    k: int,
    device: torch.device | str,
    experts: int | None = None,
    layout: Iq2Layout = "b",
) -> Planes:
    """Planes without content for a matrix [n, k], or for `experts` of them.

    Matrices of one input that a kernel shall read as one are repacked into row ranges of the same planes.

    Raises:
        ValueError: no planes for this type, or a row length that does not fit.
    """
    form = _form(type, layout)
    _check(form, k)
    lead = (n,) if experts is None else (experts, n)
    tensors = {
        name: torch.empty((*lead, *shape), dtype=dtype, device=device)
        for name, (dtype, shape) in _shapes(form, k).items()
    }
    if form in (Iq2aPlanes, Iq2bPlanes):
        tensors["table"] = _iq2_table(torch.device(device))
    elif form is Mxfp4Planes:
        tensors["table"] = _mxfp4_table(torch.device(device))
    return form(n=n, k=k, experts=experts, **tensors)


def repack(raw: Tensor, planes: Planes, first_row: int = 0) -> None:
    """Fill rows of planes from GGUF blocks, on the device of both.

    Args:
        raw: uint8 [rows * bytes of a row], whole rows; row e * n + i of an expert tensor is row i of expert e.
        first_row: the row of `planes` where the first of them goes.

    Raises:
        ValueError: the bytes are no whole number of rows, or more than there is room for.
    """
    size = _row_bytes(planes)
    rows = raw.numel() // size
    if raw.dtype != torch.uint8 or raw.dim() != 1 or rows * size != raw.numel():
        raise ValueError(f"{planes.FORMAT}: expected uint8 in rows of {size} bytes, got {raw.dtype} {list(raw.shape)}")
    if first_row < 0 or first_row + rows > planes.rows:
        raise ValueError(f"{planes.FORMAT}: rows {first_row} to {first_row + rows} of {planes.rows}")
    step = max(1, _SLICE // size)
    for start in range(0, rows, step):
        part = raw[start * size : min(rows, start + step) * size]
        count = part.numel() // size
        blocks = part.view(count, -1, GGML_QUANT_SIZES[_TYPES[type(planes)]][1])
        target = {
            name: plane.view(planes.rows, *_shapes(type(planes), planes.k)[name][1])[first_row + start :][:count]
            for name, plane in planes.planes()
        }
        _REPACK[type(planes)](blocks, target)


def unpack(planes: Planes, first_row: int = 0, rows: int | None = None) -> Tensor:
    """The weights as float32 [rows, k], bit for bit what the block codecs make of the file's bytes."""
    rows = planes.rows - first_row if rows is None else rows
    source = {
        name: plane.view(planes.rows, *_shapes(type(planes), planes.k)[name][1])[first_row : first_row + rows]
        for name, plane in planes.planes()
    }
    if isinstance(planes, Iq2bPlanes):
        source["table"] = planes.table
    return _UNPACK[type(planes)](source).reshape(rows, planes.k)


_TYPES: dict[type[Planes], GGMLQuantizationType] = {form: kind for (kind, _), form in _FORMS.items()}


def _row_bytes(planes: Planes) -> int:
    values, size = GGML_QUANT_SIZES[_TYPES[type(planes)]]
    return int(planes.k // values * size)


# --- tables -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _iq2_table(device: torch.device) -> Tensor:
    """int32 [258]: magnitude i of a grid row as a code (0: 8, 1: 25, 2: 43) in nibble i; bytes of codes with a sign."""
    quants.IQ2_XXS.init_grid()
    grid = np.asarray(quants.IQ2_XXS.grid).reshape(256, 8)
    codes = torch.tensor(np.searchsorted(np.array([8, 25, 43]), grid), dtype=torch.int64)
    words = (codes << torch.arange(0, 32, 4)).sum(1)
    return torch.cat((_signed(words), _byte_words([8, 25, 43, 0, -8, -25, -43, 0]))).to(device)


@functools.lru_cache(maxsize=8)
def _mxfp4_table(device: torch.device) -> Tensor:
    """int32 [4]: the doubled values of E2M1, four bytes a word."""
    return _byte_words(list(_MXFP4_VALUES)).to(device)


def _byte_words(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8).view(torch.int32)


@functools.lru_cache(maxsize=8)
def _spread_signs(device: torch.device) -> Tensor:
    """int32 [128]: bit i of a sign code, its parity as bit 7, at bit 4 i."""
    code = torch.arange(128)
    bits = (code.unsqueeze(1) >> torch.arange(7)) & 1
    bits = torch.cat((bits, bits.sum(1, keepdim=True) & 1), dim=1)
    words = (bits << torch.arange(0, 32, 4)).sum(1)
    return _signed(words).to(device)


def _signed(words: Tensor) -> Tensor:
    """int64 words below 2^32 as int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


# --- GGUF blocks -> planes --------------------------------------------------------------------------------------------
# blocks: uint8 [rows, blocks of a row, bytes of a block]


def _part(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes start..end of every block as `dtype` [rows, blocks, items], copied to where they are aligned."""
    part = torch.empty((*blocks.shape[:2], end - start), dtype=torch.uint8, device=blocks.device)
    return part.copy_(blocks[:, :, start:end]).view(dtype)


def _fours(words: Tensor, each: int) -> Tensor:
    """Words in natural order, `each` per unit -> [rows, each / 4, U, 4]."""
    return words.reshape(words.shape[0], -1, each // 4, 4).transpose(1, 2)


def _repack_q8_0(blocks: Tensor, out: dict[str, Tensor]) -> None:
    out["codes"].copy_(_part(blocks, 2, 34, torch.int32).flatten(1))
    out["scales"].copy_(_part(blocks, 0, 2, torch.float16).flatten(1))


def _repack_f16(blocks: Tensor, out: dict[str, Tensor]) -> None:
    # Copied as integers: moving a float may quieten a NaN.
    out["weight"].view(torch.int16).copy_(_part(blocks, 0, 2, torch.int16).flatten(1))


def _iq2_common(blocks: Tensor, out: dict[str, Tensor]) -> Tensor:
    """Signs and scales of IQ2_XXS; returns the grid rows, int32 [rows, k/32], four bytes a word."""
    rows = blocks.shape[0]
    words = _part(blocks, 2, 66, torch.int32).view(rows, -1, 2)
    packed = words[:, :, 1].contiguous()
    spread = _spread_signs(blocks.device)
    signs = torch.zeros_like(packed)
    for k in range(4):
        code = ((packed >> (7 * k)) & 127).view(-1)
        signs |= torch.index_select(spread, 0, code).view_as(packed) << k
    out["signs"].copy_(signs.view_as(out["signs"]))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=blocks.device)
    scale = ((packed >> 28) & 15).view(rows, -1, 8) << shifts
    out["scale"].copy_(_or(scale))
    out["d"].view(torch.int16).copy_(_part(blocks, 0, 2, torch.int16).flatten(1))
    return words[:, :, 0]


def _or(words: Tensor) -> Tensor:
    """Bitwise or along the innermost axis."""
    total = words[..., 0].clone()
    for i in range(1, words.shape[-1]):
        total |= words[..., i]
    return total


def _repack_iq2b(blocks: Tensor, out: dict[str, Tensor]) -> None:
    out["index"].copy_(_iq2_common(blocks, out).reshape(out["index"].shape))


def _repack_iq2a(blocks: Tensor, out: dict[str, Tensor]) -> None:
    grid_rows = _iq2_common(blocks, out).contiguous()
    table = _iq2_table(blocks.device)
    parts = [torch.index_select(table, 0, ((grid_rows >> (8 * k)) & 255).view(-1)) for k in range(4)]
    words = torch.stack((parts[0] | parts[1] << 2, parts[2] | parts[3] << 2), dim=1)
    out["codes"].copy_(_fours(words.view(blocks.shape[0], -1), 8))


def _repack_q2_k(blocks: Tensor, out: dict[str, Tensor]) -> None:
    out["codes"].copy_(_fours(_part(blocks, 16, 80, torch.int32), 8))
    out["scale"].copy_(_part(blocks, 0, 16, torch.int32).view_as(out["scale"]))
    out["d"].copy_(_part(blocks, 80, 84, torch.int32).flatten(1))


def _repack_q4_k(blocks: Tensor, out: dict[str, Tensor]) -> None:
    out["codes"].copy_(_fours(_part(blocks, 16, 144, torch.int32), 16))
    out["d"].copy_(_part(blocks, 0, 4, torch.int32).flatten(1))
    # Scales and minima of the eight sub-blocks, 6 bits each, [rows, blocks, 2 units, 4].
    low, mid, high = (blocks[:, :, i : i + 4].int() for i in (4, 8, 12))
    scale = torch.stack((low & 63, (high & 15) | ((low >> 6) << 4)), dim=2)
    least = torch.stack((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=2)
    shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=blocks.device)
    words = _or(scale << shifts) | least[..., 0] << 24 | (least[..., 3] >> 4) << 30
    out["low"].copy_(words.flatten(1))
    halves = least[..., 1] | least[..., 2] << 6 | (least[..., 3] & 15) << 12
    out["high"].copy_(halves[..., 0] | halves[..., 1] << 16)


def _repack_mxfp4(blocks: Tensor, out: dict[str, Tensor]) -> None:
    rows = blocks.shape[0]
    # Byte i of a block holds values i and 16 + i; in the planes a word holds eight neighbours.
    low, high = blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4
    nibbles = torch.cat((low, high), dim=2).view(rows, -1, 4, 8).int()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=blocks.device)
    out["codes"].copy_(_fours(_or(nibbles << shifts), 16))
    exponents = blocks[:, :, 0].contiguous().view(torch.int32)
    out["scale"].copy_(exponents.view(rows, -1))


_REPACK = {
    Q8Planes: _repack_q8_0,
    F16Planes: _repack_f16,
    Iq2bPlanes: _repack_iq2b,
    Iq2aPlanes: _repack_iq2a,
    Q2KPlanes: _repack_q2_k,
    Q4KPlanes: _repack_q4_k,
    Mxfp4Planes: _repack_mxfp4,
}

# --- planes -> float32 ------------------------------------------------------------------------------------------------
# The order of the float operations is the block codecs', so that the results are equal to the bit.


def _natural(plane: Tensor) -> Tensor:
    """[rows, each / 4, U, 4] -> [rows, U, each]."""
    return plane.transpose(1, 2).flatten(2)


def _shifted(words: Tensor, step: int, count: int) -> Tensor:
    """Fields of `step` bits, `count` of them, in a new innermost axis (upper bits not masked)."""
    return words.unsqueeze(-1) >> torch.arange(0, step * count, step, dtype=torch.int32, device=words.device)


def _halves(d: Tensor) -> tuple[Tensor, Tensor]:
    """The two fp16 of each word of [rows, blocks] as float32 [rows, blocks, 1]."""
    pair = d.contiguous().view(torch.float16).view(*d.shape, 2).float()
    return pair[..., :1], pair[..., 1:]


def _unpack_q8_0(p: dict[str, Tensor]) -> Tensor:
    codes = p["codes"].contiguous().view(torch.int8).view(*p["scales"].shape, 32)
    return codes.float() * p["scales"].float().unsqueeze(-1)


def _unpack_f16(p: dict[str, Tensor]) -> Tensor:
    return p["weight"].float()


def _unpack_iq2(p: dict[str, Tensor], codes: Tensor) -> Tensor:
    """codes: int32 [rows, k/32, 4, 8], magnitude codes in natural order."""
    rows = codes.shape[0]
    values = torch.tensor([8, 25, 43, 0], dtype=torch.int32, device=codes.device)[codes.long()]
    signs = p["signs"].reshape(rows, -1, 1)
    bits = torch.arange(4, device=codes.device).view(4, 1) + 4 * torch.arange(8, device=codes.device)
    negative = (signs >> bits.view(1, 1, 32).int()) & 1
    values = values.view(rows, -1, 32) * (1 - 2 * negative)
    scale = (_shifted(p["scale"], 4, 8) & 15).float()
    d = (scale + 0.5) * p["d"].float().unsqueeze(-1) * 0.25
    return values.float() * d.view(rows, -1, 1)


def _unpack_iq2b(p: dict[str, Tensor]) -> Tensor:
    index = _shifted(p["index"].flatten(1), 8, 4) & 255
    return _unpack_iq2(p, _shifted(p["table"][index.long()], 4, 8) & 3)


def _unpack_iq2a(p: dict[str, Tensor]) -> Tensor:
    words = _natural(p["codes"]).reshape(p["d"].shape[0], -1, 2, 1)
    pairs = torch.cat((words, words >> 2), dim=3).flatten(2)  # [rows, k/32, 4]
    return _unpack_iq2(p, _shifted(pairs, 4, 8) & 3)


def _unpack_k(codes: Tensor, scale: Tensor, least: Tensor, d: Tensor) -> Tensor:
    """codes int8 [rows, blocks, sub-blocks, values], scale and least int32 [rows, blocks, sub-blocks]."""
    d, dmin = _halves(d)
    return codes.float() * (scale.float() * d).unsqueeze(-1) - (least.float() * dmin).unsqueeze(-1)


def _unpack_q2_k(p: dict[str, Tensor]) -> Tensor:
    rows, blocks = p["d"].shape
    words = _natural(p["codes"]).reshape(rows, -1, 1, 8)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=words.device).view(4, 1)
    codes = ((words >> shifts) & 0x03030303).contiguous().view(torch.int8).view(rows, blocks, 16, 16)
    scale = p["scale"].contiguous().view(torch.uint8).view(rows, blocks, 16).int()
    return _unpack_k(codes, scale & 15, scale >> 4, p["d"])


def _unpack_q4_k(p: dict[str, Tensor]) -> Tensor:
    rows, blocks = p["d"].shape
    words = _natural(p["codes"]).reshape(rows, -1, 1, 8)
    shifts = torch.tensor([0, 4], dtype=torch.int32, device=words.device).view(2, 1)
    codes = ((words >> shifts) & 0x0F0F0F0F).contiguous().view(torch.int8).view(rows, blocks, 8, 32)
    low = p["low"].view(rows, blocks, 2)
    high = _shifted(p["high"], 16, 2) & 0xFFFF
    scale = _shifted(low, 6, 4) & 63
    least = torch.stack(((low >> 24) & 63, high & 63, (high >> 6) & 63, (high >> 12) | ((low >> 30) & 3) << 4), dim=-1)
    return _unpack_k(codes, scale.reshape(rows, blocks, 8), least.reshape(rows, blocks, 8), p["d"])


def _unpack_mxfp4(p: dict[str, Tensor]) -> Tensor:
    rows = p["scale"].shape[0]
    words = _natural(p["codes"]).reshape(rows, -1, 4)
    codes = _shifted(words, 4, 8) & 15
    table = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=words.device)
    e = p["scale"].contiguous().view(torch.uint8).view(rows, -1, 1, 1).int()
    # Half of 2^(e - 127), for the doubled table; the two smallest are subnormal.
    bits = torch.where(e < 2, torch.full_like(e, 0x00200000) << e.clamp(max=1), (e - 1) << 23)
    return table[codes.long()] * bits.view(torch.float32)


_UNPACK = {
    Q8Planes: _unpack_q8_0,
    F16Planes: _unpack_f16,
    Iq2bPlanes: _unpack_iq2b,
    Iq2aPlanes: _unpack_iq2a,
    Q2KPlanes: _unpack_q2_k,
    Q4KPlanes: _unpack_q4_k,
    Mxfp4Planes: _unpack_mxfp4,
}
