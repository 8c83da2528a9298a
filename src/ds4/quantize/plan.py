"""All that is known about the new files before a weight is read: tensors, types, places, units of work.

A unit is a run of rows of one matrix, for an expert at most the whole expert. Units do not depend on the number of
jobs, so neither do the bytes of the file, nor what a journal of finished units says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFValueType
from gguf import GGMLQuantizationType as Type

from ds4.errors import Ds4Error
from ds4.gguf.header import row_bytes
from ds4.gguf.keys import Value
from ds4.gguf.shape import CUSTOM, Shape, TensorSpec, expected_tensors
from ds4.gguf.writer import header_bytes
from ds4.quantize import drafts
from ds4.quantize.checkpoint import Checkpoint
from ds4.quantize.metadata import model_keys, shape_of, tokenizer_keys
from ds4.quantize.names import DRAFT_PREFIX
from ds4.quantize.recipe import Recipe
from ds4.quantize.source import Source, Sources

UNIT_VALUES = 1 << 23
"""Values of a unit at most, unless one tile of rows has more; an expert of Flash is one unit."""

WORK_BYTES = 24
"""Bytes of memory per value of a unit at its peak, with every copy that reading and encoding make."""

# llama.cpp's numbers for what a file mostly is (general.file_type).
_FILE_TYPES = {"q2": 19, "q2-q4": 19, "q4": 15, "mxfp4": 38, "q8": 7}


@dataclass(frozen=True)
class Output:
    """One tensor of the new file; `offset` is from the start of the file."""

    name: str
    type: Type
    dims: tuple[int, ...]
    offset: int
    nbytes: int
    source: Source

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return row_bytes(self.type, self.dims[0])

    @property
    def n_values(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class Unit:
    """Rows start..stop of one part (routed expert) of a tensor."""

    output: Output
    part: int
    start: int
    stop: int

    @property
    def n_values(self) -> int:
        return (self.stop - self.start) * self.output.dims[0]

    @property
    def offset(self) -> int:
        """Where its bytes go in the file."""
        return self.output.offset + (self.part * self.output.source.rows + self.start) * self.output.row_bytes

    @property
    def nbytes(self) -> int:
        """How many bytes it has in the file."""
        return (self.stop - self.start) * self.output.row_bytes

    @property
    def work_bytes(self) -> int:
        """What it takes in memory while it is worked on, at most."""
        return WORK_BYTES * self.n_values


@dataclass(frozen=True)
class FilePlan:
    """One new file: everything before the data, its tensors in order, its size in bytes.

    Attributes:
        draft: it holds draft blocks, not a model.
    """

    path: Path
    header: bytes
    outputs: tuple[Output, ...]
    size: int
    shape: Shape
    draft: bool = False

    def units(self) -> Iterator[Unit]:
        """The whole work, in file order."""
        for output in self.outputs:
            source = output.source
            tile = source.tile[0]
            step = max(UNIT_VALUES // source.cols // tile, 1) * tile
            if output.type == Type.I32:
                step = source.rows
            for part in range(len(source.parts)):
                for start in range(0, source.rows, step):
                    yield Unit(output, part, start, min(start + step, source.rows))


def make_plans(
    checkpoint: Checkpoint,
    out: Path,
    recipe: Recipe,
    *,
    name: str | None = None,
    with_drafts: bool = True,
    skip: tuple[str, ...] = (),
    imatrix: tuple[str, int] | None = None,
) -> list[FilePlan]:
    """The model's file, and that of the drafts if the checkpoint has some.

    Args:
        name: general.name; None: that of the checkpoint's folder.
        skip: patterns of checkpoint names to leave out.
        imatrix: name and number of entries of the importance file, for the keys that record it.

    Raises:
        Ds4Error: the checkpoint is not whole, not V4, or the recipe does not fit it.
    """
    shape = shape_of(checkpoint)
    sources = Sources(checkpoint, skip)
    label = name or _utf8(checkpoint.folder.resolve().name)
    specs, types, shape = _model_types(shape, recipe)
    _refuse_leftovers(sources, specs, checkpoint)
    found = _found(specs, types, sources)  # before a list of as many tokens as config.json says is made
    recorded = _recorded(recipe, imatrix)
    keys = model_keys(checkpoint, shape, label) | recorded | tokenizer_keys(checkpoint, shape.vocab)
    plans = [_file(out, shape, keys, specs, types, found, draft=False)]
    kind = drafts.draft_kind(sources.names)
    if kind is not None and with_drafts:
        specs = drafts.draft_tensors(sources.names, shape, checkpoint.config)
        types = {name: recipe.type_of(name, spec, shape.layers) for name, spec in specs.items()}
        keys = (
            model_keys(checkpoint, shape, f"{label} {kind}")
            | recorded
            | drafts.draft_keys(kind, checkpoint, shape, specs)
        )
        beside = drafts.draft_path(out, kind)
        plans.append(_file(beside, shape, keys, specs, types, _found(specs, types, sources), draft=True))
    return plans


def _utf8(name: str) -> str:
    """The name of a file as a key can hold it: bytes that are no UTF-8 become question marks."""
    return name.encode("utf-8", "replace").decode()


def _model_types(shape: Shape, recipe: Recipe) -> tuple[dict[str, TensorSpec], dict[str, Type], Shape]:
    """Tensors, their types, and the shape: `custom` where a strict profile does not have one of the types."""
    specs = expected_tensors(shape)
    # The table of `custom` leaves the types open; those of the strict profiles are what is wanted there too.
    wanted = expected_tensors(replace(shape, name="flash"))
    types = {name: recipe.type_of(name, spec, shape.layers) for name, spec in wanted.items()}
    if all(types[name] in spec.types for name, spec in specs.items()):
        return specs, types, shape
    shape = replace(shape, name=CUSTOM)
    specs = expected_tensors(shape)
    for name, spec in specs.items():
        if types[name] not in spec.types:
            allowed = ", ".join(t.name for t in spec.types)
            raise Ds4Error(f"tensor {name!r} cannot be {types[name].name}; {allowed} can be run")
    return specs, types, shape


def _refuse_leftovers(sources: Sources, specs: Mapping[str, TensorSpec], checkpoint: Checkpoint) -> None:
    """A tensor for a place that the shape does not have is a sign that config.json is that of another model."""
    extra = sorted(n for n in sources.names if n not in specs and not n.startswith(DRAFT_PREFIX))
    if extra:
        raise Ds4Error(
            f"{checkpoint.folder}: holds {len(extra)} tensors that a model of this config.json does not have, such as "
            f"{extra[0]!r}; is config.json that of another model?"
        )


def _recorded(recipe: Recipe, imatrix: tuple[str, int] | None) -> dict[str, Value]:
    keys = {"general.file_type": Value(_FILE_TYPES[recipe.name], GGUFValueType.UINT32)}
    if imatrix is not None:
        keys["quantize.imatrix.file"] = Value(_utf8(imatrix[0]), GGUFValueType.STRING)
        keys["quantize.imatrix.entries_count"] = Value(imatrix[1], GGUFValueType.INT32)
    return keys


def _found(specs: Mapping[str, TensorSpec], types: Mapping[str, Type], sources: Sources) -> dict[str, Source]:
    """The source of every tensor; raises `Ds4Error` for the first that is missing or does not fit."""
    return {
        name: (sources.table if types[name] == Type.I32 else sources.source)(name, spec.dims)
        for name, spec in specs.items()
    }


def _file(
    path: Path,
    shape: Shape,
    keys: Mapping[str, Value],
    specs: Mapping[str, TensorSpec],
    types: Mapping[str, Type],
    found: Mapping[str, Source],
    draft: bool,
) -> FilePlan:
    header = header_bytes(keys, {name: (types[name], spec.dims) for name, spec in specs.items()})
    outputs, end = [], len(header)
    for name, spec in specs.items():
        nbytes = row_bytes(types[name], spec.dims[0]) * math.prod(spec.dims[1:])
        outputs.append(Output(name, types[name], spec.dims, end, nbytes, found[name]))
        end += -(-nbytes // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT
    return FilePlan(path, header, tuple(outputs), end, shape, draft)
