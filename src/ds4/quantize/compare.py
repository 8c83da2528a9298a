"""The error of tensors of a finished file against the checkpoint they were made from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from ds4.errors import Ds4Error
from ds4.gguf.blocks import dequantize
from ds4.gguf.header import map_file, read_header, row_bytes
from ds4.quantize.convert import Settings
from ds4.quantize.plan import FilePlan, Output, Unit


@dataclass(frozen=True)
class Comparison:
    """Errors of one tensor, file minus checkpoint.

    Attributes:
        largest: largest absolute difference; `place` is its index in torch order ([expert,] row, column).
        rms: root of the mean squared difference.
        relative: `rms` divided by the root mean square of the checkpoint's values.
        weighted: the same with every square weighted, by the importance of its column, else by the square of the
            checkpoint's value.
        by_importance: which of the two.
    """

    name: str
    type: GGMLQuantizationType
    n_values: int
    largest: float
    place: tuple[int, ...]
    rms: float
    relative: float
    weighted: float
    by_importance: bool


class _Sums:
    """Running sums over the units of one tensor, float64."""

    def __init__(self) -> None:
        self.count, self.error, self.energy, self.weighted_error, self.weighted_energy = 0, 0.0, 0.0, 0.0, 0.0
        self.largest, self.place = -1.0, (0, 0, 0)

    def add(self, unit: Unit, found: torch.Tensor, expected: torch.Tensor, weights: torch.Tensor | None) -> None:
        difference = found.double() - expected.double()
        squares, energy = difference.square(), expected.double().square()
        weight = energy if weights is None else weights.double().expand_as(squares)
        self.count += squares.numel()
        self.error += float(squares.sum())
        self.energy += float(energy.sum())
        self.weighted_error += float((weight * squares).sum())
        self.weighted_energy += float((weight * energy).sum())
        flat = int(squares.argmax())
        largest = float(difference.flatten()[flat].abs())
        if largest > self.largest:
            row, col = divmod(flat, squares.shape[1])
            self.largest, self.place = largest, (unit.part, unit.start + row, col)


def compare(plans: list[FilePlan], pattern: str, settings: Settings) -> Iterator[Comparison]:
    """The error of every tensor whose GGUF name matches a pattern, from the files that the plans name.

    The files may have other types than the plans say: what is compared is what they hold.

    Raises:
        Ds4Error: no such tensor, a file that is missing or not of this checkpoint.
    """
    names = [output.name for plan in plans for output in plan.outputs]
    if not any(fnmatchcase(name, pattern) for name in names):
        raise Ds4Error(
            f"--compare-tensor {pattern!r}: no such tensor; they are named like {names[0]!r} or {names[-1]!r}"
        )
    for plan in plans:
        wanted = [output for output in plan.outputs if fnmatchcase(output.name, pattern)]
        if wanted:
            yield from _of_file(plan, wanted, settings)


def _of_file(plan: FilePlan, wanted: list[Output], settings: Settings) -> Iterator[Comparison]:
    data = map_file(plan.path)
    tensors = read_header(plan.path, data).tensors
    units = list(plan.units())
    for output in wanted:
        info = tensors.get(output.name)
        if info is None or info.dims != output.dims:
            what = "is missing" if info is None else f"has dims {info.dims}"
            raise Ds4Error(
                f"{plan.path}: tensor {output.name!r} {what}, expected {output.dims}; it is of another model"
            )
        raw = data[info.offset : info.offset + info.nbytes]
        sums, importance = _Sums(), settings.importance.get(output.name)
        for unit in (unit for unit in units if unit.output is output):
            expected, found = _pair(unit, raw, info.type, settings.device)
            # As it was measured: an expert that no token needed has no part in the weighted error.
            vector = None if importance is None else torch.tensor(importance[unit.part])
            sums.add(unit, found, expected, vector)
        yield _result(output, info.type, sums, importance is not None)


def _pair(
    unit: Unit, raw: npt.NDArray[np.uint8], type: GGMLQuantizationType, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, cols] of a unit, twice: from the checkpoint, from the file's bytes of the tensor."""
    source, cols = unit.output.source, unit.output.dims[0]
    size = row_bytes(type, cols)
    first = (unit.part * source.rows + unit.start) * size
    rows = unit.stop - unit.start
    part = raw[first : first + rows * size]
    if type == GGMLQuantizationType.I32:
        return source.read_integers().float(), torch.from_numpy(part.view("<i4").reshape(rows, cols).astype(np.float32))
    expected = source.read(unit.part, unit.start, unit.stop, device).cpu()
    return expected, dequantize(part, type, rows * cols).view(rows, cols)


def _result(output: Output, type: GGMLQuantizationType, sums: _Sums, by_importance: bool) -> Comparison:
    relative = math.sqrt(sums.error / sums.energy) if sums.energy else 0.0
    weighted = math.sqrt(sums.weighted_error / sums.weighted_energy) if sums.weighted_energy else 0.0
    place = sums.place[3 - len(output.dims) :]
    rms = math.sqrt(sums.error / sums.count)
    return Comparison(output.name, type, sums.count, sums.largest, place, rms, relative, weighted, by_importance)
