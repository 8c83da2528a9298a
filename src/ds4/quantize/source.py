"""Where the values of each tensor of the new file come from in a checkpoint, and rows of them as float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from ds4.errors import Ds4Error
from ds4.quantize import decode
from ds4.quantize.checkpoint import Checkpoint, Stored, read
from ds4.quantize.names import places


@dataclass(frozen=True)
class Part:
    """One matrix (or vector) of the checkpoint that a tensor is made of, with its scales.

    Attributes:
        expert: index in the checkpoint's leading dim, for experts that are stored as one tensor; else None.
        first_row: the row of the stored matrix where this part begins (a half of fused gate and up).
    """

    weight: Stored
    scale: Stored | None = None
    expert: int | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Source:
    """The checkpoint's side of one tensor: equal parts, one per routed expert, or a single one.

    Attributes:
        rows, cols: of one part; a vector is one row.
        tile: rows and columns that share a scale of FP8 codes.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int
    cols: int
    tile: tuple[int, int]

    def is_fp4(self, number: int) -> bool:
        """A part is packed FP4, which has E8M0 scales; of some models only some experts are."""
        return self.parts[number].weight.dtype in decode.PACKED and self.parts[number].scale is not None

    def read(self, number: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Rows start..stop of a part as float32 [rows, cols] on `device`; `start` is a multiple of the tile's rows.

        Raises:
            Ds4Error: a value is not a finite number, or the shard is damaged. OSError: it cannot be read.
        """
        part = self.parts[number]
        weight, scale = self._cut(part, start, stop)
        weight = weight.to(device)
        if scale is None:
            values = weight.float()
        elif part.weight.dtype == "F8_E4M3":
            values = decode.fp8(weight, scale.to(device), self.tile)
        else:
            values = decode.fp4(weight, scale.to(device))
        self._check_finite(values, part)
        return values

    def read_mxfp4(self, number: int, start: int, stop: int) -> torch.Tensor:
        """The same rows of a packed FP4 part as MXFP4 blocks, uint8 [rows, 17 * cols / 32]."""
        part = self.parts[number]
        weight, scale = self._cut(part, start, stop)
        assert scale is not None
        self._check_finite(decode.scales(scale) * max(decode.FP4_VALUES), part)
        return decode.mxfp4(weight, scale)

    def read_integers(self) -> torch.Tensor:
        """An integer table whole, int64 [rows, cols]."""
        return read(self.parts[0].weight).to(torch.int64).view(self.rows, self.cols)

    def _cut(self, part: Part, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the weights, as stored, and the scales that belong to them."""
        width = self.cols // 2 if part.scale is not None and part.weight.dtype in decode.PACKED else self.cols
        if len(part.weight.shape) < 2 or _squeezed(part.weight.shape) == (self.cols,):
            return read(part.weight).reshape(self.rows, self.cols), None
        rows = slice(part.first_row + start, part.first_row + stop)
        if part.expert is not None:
            fused = read(part.weight, slice(part.expert, part.expert + 1), rows)
            return fused.reshape(stop - start, width), None
        weight = read(part.weight, rows)
        if part.scale is None:
            return weight, None
        if part.weight.dtype == "F8_E4M3":
            return weight, read(part.scale, slice(start // self.tile[0], -(-stop // self.tile[0])))
        return weight, read(part.scale, rows)

    def _check_finite(self, values: torch.Tensor, part: Part) -> None:
        low, high = torch.aminmax(values)  # a NaN anywhere makes both NaN
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            count = int((~torch.isfinite(values)).sum())
            raise Ds4Error(
                f"{part.weight.where}: {count} values are not finite numbers; the checkpoint is damaged, "
                "download it again"
            )


@dataclass
class _Slots:
    """What was found for one tensor of the file, by expert (None: it is no expert, or all of them in one)."""

    weights: dict[int | None, tuple[Stored, int | None]] = field(default_factory=dict)
    scales: dict[int | None, Stored] = field(default_factory=dict)


class Sources:
    """The tensors of a checkpoint sorted by the tensor of the file that they belong to.

    Args:
        skip: patterns of checkpoint names that are left out (`vision.*`).

    Raises:
        Ds4Error: a name that no rule knows, or two tensors for one place.
    """

    def __init__(self, checkpoint: Checkpoint, skip: Iterable[str] = ()) -> None:
        self._folder = checkpoint.folder
        self._slots: dict[str, _Slots] = {}
        self.tile = _tile(checkpoint)
        unknown = []
        patterns = (*skip, "*rotary_emb*")
        for name, stored in checkpoint.tensors.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            found = places(name)
            if not found:
                unknown.append(name)
            for place in found:
                slots = self._slots.setdefault(place.tensor, _Slots())
                taken = slots.scales if place.scale else slots.weights
                if place.expert in taken:
                    raise Ds4Error(f"{stored.where}: is there twice, under another name too; take one of them away")
                if place.scale:
                    slots.scales[place.expert] = stored
                else:
                    slots.weights[place.expert] = (stored, place.half)
        if unknown:
            raise Ds4Error(
                f"{checkpoint.folder}: {len(unknown)} tensors have no place in the V4 network, such as "
                f"{', '.join(repr(name) for name in sorted(unknown)[:3])}; give the checkpoint of a DeepSeek V4 model, "
                "or leave them out with --skip PATTERN"
            )

    @property
    def names(self) -> set[str]:
        """GGUF names of every tensor that something was found for."""
        return set(self._slots)

    def source(self, name: str, dims: tuple[int, ...]) -> Source:
        """The source of a tensor whose dims in the file are `dims` (innermost first).

        Raises:
            Ds4Error: it is missing or incomplete, or has a shape or type that does not fit.
        """
        slots = self._slots.get(name)
        if slots is None or not slots.weights:
            raise Ds4Error(
                f"{self._folder}: nothing for tensor {name!r} {list(reversed(dims))}; the checkpoint is incomplete, "
                "or is not of the model that its config.json describes"
            )
        experts = dims[2] if len(dims) == 3 else None
        cols, rows = dims[0], dims[1] if len(dims) > 1 else 1
        if experts is None:
            parts = [Part(slots.weights[None][0], slots.scales.get(None))]
        elif None in slots.weights:
            stored, half = slots.weights[None]
            shape = (experts, rows * (1 if half is None else 2), cols)
            if stored.shape != shape:
                raise Ds4Error(f"{stored.where}: has shape {list(stored.shape)}, expected {list(shape)}")
            if stored.dtype not in decode.FLOATS:
                raise Ds4Error(f"{stored.where}: type {stored.dtype} is not read for experts in one tensor")
            parts = [Part(stored, expert=e, first_row=(half or 0) * rows) for e in range(experts)]
        else:
            parts = [self._expert(name, slots, number) for number in range(experts)]
            extra = sorted(number for number in slots.weights if number is not None and number >= experts)
            if extra:
                raise Ds4Error(
                    f"{slots.weights[extra[0]][0].where}: is expert {extra[0]}, but config.json says {experts} experts"
                )
        source = Source(name, tuple(parts), rows, cols, self.tile)
        for part in parts:
            if part.expert is None:
                _check_matrix(part, source, vector=len(dims) == 1)
        return source

    def table(self, name: str, dims: tuple[int, ...]) -> Source:
        """The source of an integer table; raises `Ds4Error` as `source` does."""
        slots = self._slots.get(name)
        if slots is None or None not in slots.weights:
            raise Ds4Error(f"{self._folder}: nothing for tensor {name!r}; the checkpoint is incomplete")
        stored = slots.weights[None][0]
        if stored.shape != dims[::-1] or stored.dtype not in decode.INTEGERS:
            raise Ds4Error(
                f"{stored.where}: is {stored.dtype} {list(stored.shape)}, expected integers {list(dims[::-1])}"
            )
        return Source(name, (Part(stored),), dims[1], dims[0], self.tile)

    def _expert(self, name: str, slots: _Slots, number: int) -> Part:
        if number not in slots.weights:
            raise Ds4Error(
                f"{self._folder}: expert {number} of tensor {name!r} is missing; the checkpoint is incomplete"
            )
        return Part(slots.weights[number][0], slots.scales.get(number))


def _tile(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns that share one scale of FP8 codes."""
    quantised = checkpoint.config.get("quantization_config")
    size = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    if size is None:
        return 128, 128
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and 1 <= n <= 4096 for n in size):
        raise Ds4Error(
            f"{checkpoint.folder / 'config.json'}: weight_block_size is {size!r}, expected two whole numbers"
        )
    return size[0], size[1]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1) or (1,)


def _check_matrix(part: Part, source: Source, vector: bool) -> None:
    """Raise for a shape, a type or scales that do not fit."""
    weight, scale, (rows, cols) = part.weight, part.scale, (source.rows, source.cols)
    expected: tuple[int, ...] = (cols,) if vector else (rows, cols)
    if weight.dtype == "F8_E4M3" and not vector:
        tiles = (math.ceil(rows / source.tile[0]), math.ceil(cols / source.tile[1]))
        _check_scale(part, tiles, decode.SCALES)
    elif weight.dtype in decode.PACKED:
        if vector or cols % decode.FP4_GROUP:
            raise Ds4Error(
                f"{weight.where}: is packed FP4, which {'a vector' if vector else f'{cols} columns'} cannot be"
            )
        expected = (rows, cols // 2)
        _check_scale(part, (rows, cols // decode.FP4_GROUP), ("F8_E8M0", "U8"))
    elif weight.dtype not in decode.FLOATS:
        known = ", ".join((*decode.FLOATS, *(() if vector else ("F8_E4M3 and FP4 as I8",))))
        what = " for a vector" if vector else ""
        raise Ds4Error(f"{weight.where}: type {weight.dtype} is not read{what}; known are {known}")
    elif scale is not None:
        raise Ds4Error(f"{scale.where}: scales of {weight.name!r}, which is {weight.dtype} and needs none")
    shape = _squeezed(weight.shape) if vector else weight.shape
    if shape != (_squeezed(expected) if vector else expected):
        raise Ds4Error(
            f"{weight.where}: has shape {list(weight.shape)}, expected {list(expected)}; config.json is that of "
            "another model, or the file is damaged"
        )


def _check_scale(part: Part, shape: tuple[int, int], dtypes: tuple[str, ...]) -> None:
    weight, scale = part.weight, part.scale
    if scale is None:
        raise Ds4Error(f"{weight.where}: is {weight.dtype}, but its scales are missing; the checkpoint is incomplete")
    if scale.dtype not in dtypes:
        raise Ds4Error(f"{scale.where}: has type {scale.dtype}, expected scales as {' or '.join(dtypes)}")
    if scale.shape != shape:
        raise Ds4Error(
            f"{scale.where}: has shape {list(scale.shape)}, expected {list(shape)} for {weight.name!r} "
            f"{list(weight.shape)}"
        )
