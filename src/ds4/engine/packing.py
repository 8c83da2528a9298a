"""States as sections of bytes, for files and other processes.

A state from token `start` on is made of the compressed rows that were completed since, and of a checkpoint at its end.
Each plane of rows, each frontier and the logits are a section of their own. A state may be divided into segments, of
which each goes on where the one before ends; then all rows are needed, and only the last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds4.engine.engine import Engine, ModelRunner
from ds4.engine.session import Snapshot
from ds4.errors import Ds4Error
from ds4.gguf.shape import Shape
from ds4.model.cache import Checkpoint, ExportedState, RowFormat, key_format, kv_format

PACKING_VERSION = 1
"""Part of the fingerprint: another one as soon as the meaning of a section changes."""

LOGITS, WINDOW, ROWS, KEYS = 3, 4, 5, 6
SCRIPT_PADDING, SCRIPT_TOKENS = 32, 33
ROWS_FRONTIER, KEYS_FRONTIER, ROWS_PREVIOUS, KEYS_PREVIOUS = 7, 8, 9, 10
"""Kinds of sections, as in docs/kv-cache.md; 1 and 2 belong to the file."""

APPENDED = frozenset({ROWS, KEYS, SCRIPT_PADDING, SCRIPT_TOKENS})
"""Kinds of which a whole state has the sections of all its segments, one after the other."""

_ROW_KINDS = {"rows": ROWS, "keys": KEYS}
_FRONTIER_KINDS = {
    "rows": ROWS_FRONTIER,
    "keys": KEYS_FRONTIER,
    "rows.previous": ROWS_PREVIOUS,
    "keys.previous": KEYS_PREVIOUS,
}


class SectionKey(NamedTuple):
    """Which section: its kind, the layer, and the plane of a row format."""

    kind: int
    layer: int = 0
    plane: int = 0


class Part(NamedTuple):
    """A section to be written: what it is, its size in bytes, and what makes its bytes when they are needed."""

    key: SectionKey
    size: int
    read: Callable[[], memoryview]


class Segment(NamedTuple):
    """A section table of one segment: the tokens it goes on from, those at its end, and sizes in bytes by key."""

    start: int
    length: int
    sizes: Mapping[SectionKey, int]


class Target(NamedTuple):
    """Where the bytes of segments go: per segment a buffer for each section that is needed; then `finish`.

    `finish` gives what `Session.import_state` takes, once the buffers are filled.
    """

    buffers: list[dict[SectionKey, memoryview]]
    finish: Callable[[Sequence[int]], Any]


class StateCodec(Protocol):
    """States of one model as bytes and back.

    Attributes:
        fingerprint: 16 bytes; states can be exchanged where they are equal.
        quant_bits: bits of the routed experts' weights, 0 if unknown.
    """

    fingerprint: bytes
    quant_bits: int

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """The sections of a state from token `start` on."""
        ...

    def target(self, segments: Sequence[Segment]) -> Target:
        """Buffers for the state that segments make, from token 0 on. Raises Ds4Error if their sizes are not right."""
        ...


class ModelCodec:
    """The codec of a model on the CPU; see `StateCodec`.

    Raises:
        Ds4Error: the engine's states are not packed (`qat_sim` is off).
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        if not isinstance(runner, ModelRunner) or not runner.model.qat_sim:
            raise Ds4Error("only states of a model with its quantisation round trips (qat_sim) can be stored on disk")
        self.shape = engine.shape
        self.quant_bits = 0
        self.fingerprint = fingerprint(engine.shape, engine.identity, str(runner.model.index_selection))

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`."""
        return pack(self.shape, snapshot, start)

    def target(self, segments: Sequence[Segment]) -> Target:
        """See `StateCodec`."""
        return target(self.shape, segments)


def fingerprint(shape: Shape, identity: str, *options: str) -> bytes:
    """The layout fingerprint, 16 bytes: of the shape, the round trips, the weights, and what changes the values."""
    numbers = {key: value for key, value in asdict(shape).items() if key not in ("name", "context")}
    said = json.dumps([PACKING_VERSION, numbers, "qat_sim", identity, *options], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


def pack(shape: Shape, snapshot: Snapshot, start: int) -> Iterator[Part]:
    """The sections of a packed state from token `start` on; rows are gathered when a section is read."""
    checkpoint, rows, length = snapshot.checkpoint, snapshot.rows, len(snapshot.tokens)
    for key, (size, _, _) in _expected(shape, Segment(start, length, {}), checkpoint.logits is not None).items():
        yield Part(key, size, lambda key=key: _bytes(_tensor(shape, key, checkpoint, rows, start)))  # type: ignore[misc]


def _tensor(shape: Shape, key: SectionKey, checkpoint: Checkpoint, rows: Any, start: int) -> Tensor:
    kind, layer, plane = key
    if kind == LOGITS:
        assert checkpoint.logits is not None
        return checkpoint.logits
    if kind == WINDOW:
        return checkpoint.window[plane]
    for name, number in _ROW_KINDS.items():
        if kind == number:
            ratio = shape.ratios[layer]
            planes: tuple[Tensor, ...] = rows.read(layer, name, start // ratio, checkpoint.length // ratio)
            return planes[plane]
    name = next(name for name, number in _FRONTIER_KINDS.items() if number == kind)
    return checkpoint.frontier[layer, name]


_Spec = tuple[int, tuple[int, ...], torch.dtype]


def _expected(shape: Shape, segment: Segment, logits: bool) -> dict[SectionKey, _Spec]:
    """Every section of a segment in its order: bytes, shape and dtype."""
    start, n = segment.start, segment.length
    rows, keys = kv_format(shape, True), key_format(shape, True)
    live = min(n, shape.window - 1)
    found: dict[SectionKey, _Spec] = {}

    def add(key: SectionKey, size: tuple[int, ...], dtype: torch.dtype) -> None:
        count = 1
        for part in size:
            count *= part
        found[key] = count * dtype.itemsize, size, dtype

    def add_rows(kind: int, layer: int, how: RowFormat, count: int) -> None:
        for plane, (width, dtype) in enumerate(zip(how.widths, how.dtypes, strict=True)):
            add(SectionKey(kind, layer, plane), (count, width), dtype)

    if logits:
        add(SectionKey(LOGITS), (shape.vocab,), torch.float32)
    for plane, (width, dtype) in enumerate(zip(rows.widths, rows.dtypes, strict=True)):
        add(SectionKey(WINDOW, 0, plane), (shape.layers, live, width), dtype)
    for layer, ratio in enumerate(shape.ratios):
        if not ratio:
            continue
        overlap = shape.has_indexer(layer)
        count, pending = n // ratio - start // ratio, n % ratio
        kinds = {"rows": (shape.head_dim, rows)} | ({"keys": (shape.index_dim, keys)} if overlap else {})
        for name, (width, how) in kinds.items():
            add_rows(_ROW_KINDS[name], layer, how, count)
            wide = width * (2 if overlap else 1)
            add(SectionKey(_FRONTIER_KINDS[name], layer), (2, pending, wide), torch.float32)
            if overlap and n >= ratio:
                add(SectionKey(_FRONTIER_KINDS[name + ".previous"], layer), (2, ratio, width), torch.float32)
    return found


def target(shape: Shape, segments: Sequence[Segment]) -> Target:
    """Buffers for the packed state that segments make (see `StateCodec.target`). Raises Ds4Error."""
    end, position = segments[-1], 0
    tensors: dict[SectionKey, Tensor] = {}
    filled: dict[SectionKey, int] = {}
    buffers: list[dict[SectionKey, memoryview]] = []
    expected = [_expected(shape, segment, SectionKey(LOGITS) in segment.sizes) for segment in segments]
    for segment, wanted in zip(segments, expected, strict=True):
        if segment.start != position or segment.length < segment.start:
            raise Ds4Error(f"a segment starts at token {segment.start}, but the one before ends at {position}")
        position = segment.length
        if {key: spec[0] for key, spec in wanted.items()} != dict(segment.sizes):
            raise Ds4Error(f"the sections of the segment up to token {segment.length} do not have this model's sizes")
    for key, (_, size, dtype) in expected[-1].items():
        if key.kind in (ROWS, KEYS):
            size = (end.length // shape.ratios[key.layer], size[1])
        tensors[key] = torch.empty(size, dtype=dtype)
    for i, wanted in enumerate(expected):
        mine = {}
        for key, (nbytes, _, _) in wanted.items():
            is_row = key.kind in (ROWS, KEYS)
            if is_row or i == len(segments) - 1:
                offset = filled.get(key, 0)
                mine[key] = _bytes(tensors[key])[offset : offset + nbytes]
                filled[key] = offset + nbytes if is_row else 0
        buffers.append(mine)
    return Target(buffers, lambda tokens: _exported(shape, end.length, tensors))


def _exported(shape: Shape, length: int, tensors: Mapping[SectionKey, Tensor]) -> ExportedState:
    window = tuple(tensors[SectionKey(WINDOW, 0, plane)] for plane in range(len(kv_format(shape, True).widths)))
    frontier, rows = {}, {}
    for layer in range(shape.layers):
        for name, kind in _FRONTIER_KINDS.items():
            if (found := tensors.get(SectionKey(kind, layer))) is not None:
                frontier[layer, name] = found
        for name, kind in _ROW_KINDS.items():
            how = kv_format(shape, True) if name == "rows" else key_format(shape, True)
            if SectionKey(kind, layer) in tensors:
                rows[layer, name] = tuple(tensors[SectionKey(kind, layer, plane)] for plane in range(len(how.widths)))
    checkpoint = Checkpoint(length, window, frontier, tensors.get(SectionKey(LOGITS)))
    return ExportedState(0, checkpoint, rows, (shape, True))


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian as this machine writes them."""
    flat = tensor.contiguous().flatten()
    # numpy's arrays are buffers, which its types do not say before Python 3.12.
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")
