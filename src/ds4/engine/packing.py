"""States as sections of bytes, for files and other processes.

A state from token `start` on is made of the compressed rows that were completed since, and of a checkpoint at its end.
Each plane of rows, each frontier and the logits are a section of their own. A state may be divided into segments, of
which each goes on where the one before ends; then all rows are needed, and only the last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ds4.engine.engine import Engine
from ds4.engine.session import Snapshot
from ds4.errors import Ds4Error, FileFormatError
from ds4.gguf.file import Identity
from ds4.gguf.shape import Shape
from ds4.model.cache import Checkpoint, PlaneKey, RowFormat, key_format, kv_format

PACKING_VERSION = 1
"""Part of the fingerprint: another one as soon as the meaning of a section changes."""

LOGITS, WINDOW, ROWS, KEYS = 3, 4, 5, 6
SCRIPT_PADDING, SCRIPT_TOKENS = 32, 33
ROWS_FRONTIER, KEYS_FRONTIER, ROWS_PREVIOUS, KEYS_PREVIOUS = 7, 8, 9, 10
"""Kinds of sections, as in docs/kv-cache.md; 1 and 2 belong to the file."""

APPENDED = frozenset({ROWS, KEYS, SCRIPT_PADDING, SCRIPT_TOKENS})
"""Kinds of which a whole state has the sections of all its segments, one after the other."""

_ROW_NAMES = {ROWS: "rows", KEYS: "keys"}
_FRONTIER_NAMES = {
    ROWS_FRONTIER: "rows",
    KEYS_FRONTIER: "keys",
    ROWS_PREVIOUS: "rows.previous",
    KEYS_PREVIOUS: "keys.previous",
}
_ROW_KINDS = {name: kind for kind, name in _ROW_NAMES.items()}
_FRONTIER_KINDS = {name: kind for kind, name in _FRONTIER_NAMES.items()}


class SectionKey(NamedTuple):
    """Which section: its kind, the layer, and the plane of a row format."""

    kind: int
    layer: int = 0
    plane: int = 0


class Part(NamedTuple):
    """A section to be written: what it is, its size in bytes, and what makes its bytes when they are needed.

    They come in pieces, each of which is good until the next one is taken.
    """

    key: SectionKey
    size: int
    pieces: Callable[[], Generator[memoryview, None, None]]

    @classmethod
    def of(cls, key: SectionKey, data: bytes | memoryview) -> Part:
        """A section whose bytes are there."""
        return cls(key, len(data), partial(_once, data))


class Segment(NamedTuple):
    """A section table of one segment: the tokens it goes on from, those at its end, and sizes in bytes by key."""

    start: int
    length: int
    sizes: Mapping[SectionKey, int]


def _once(data: bytes | memoryview) -> Generator[memoryview, None, None]:
    yield memoryview(data)


Buffers = Generator[memoryview, None, None]
Tensors = Generator[Tensor, None, None]
Sink = Callable[[], Buffers]
"""Makes the buffers that bytes go to, one after the other; who asks for the next one has filled the last."""


class Target(NamedTuple):
    """Where the bytes of segments go.

    Attributes:
        sinks: for the sections that are needed, where their bytes go, those of several sections one behind the other.
            For a section of a kind in `APPENDED` that are the bytes of all segments, for others those of the last one.
        finish: gives what `Session.import_state` takes with the tokens, once all of that is done.
        abandon: gives back what is not going to be finished.
    """

    sinks: dict[tuple[SectionKey, ...], Sink]
    finish: Callable[[Sequence[int]], Any]
    abandon: Callable[[], None] = lambda: None


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
        """Buffers for the state that segments make, from token 0 on. Raises FileFormatError if their
        sizes are not right, Ds4Error if there is no room."""
        ...

    def of(self, engine: Engine) -> StateCodec:
        """The same for another engine over the same model, for whose sessions states are loaded from now on."""
        ...


class Receiver(Protocol):
    """The compressed rows of a state that comes from elsewhere (see `ds4.model.cache.ReceivedRows`)."""

    def bundles(self) -> Iterator[tuple[tuple[PlaneKey, ...], Callable[[], Tensors]]]:
        """Planes whose rows come one behind the other, and what makes the pieces that they go to; all planes in all.

        A piece is rows of one plane, [rows, width]; who asks for the next one has filled the last. Threads may fill
        different bundles.
        """
        ...

    def exported(self, checkpoint: Checkpoint) -> Any: ...

    def release(self) -> None: ...


@runtime_checkable
class PackedRunner(Protocol):
    """A runner whose states can be packed."""

    def prepare_packing(self) -> tuple[str, ...] | None:
        """Take the memory that packing needs; None: its states are not packed.

        Returns what the values of its states depend on besides shape and weights.
        """
        ...

    def receive(self, length: int) -> Receiver:
        """Where the rows of a state of so many tokens can come in."""
        ...


class ModelCodec:
    """The codec of a model; see `StateCodec`.

    Raises:
        Ds4Error: the engine's states are not packed (`qat_sim` is off).
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        options = runner.prepare_packing() if isinstance(runner, PackedRunner) else None
        if not isinstance(runner, PackedRunner) or options is None:
            raise Ds4Error("only states of a model with its quantisation round trips (qat_sim) can be stored on disk")
        self.shape, self._runner = engine.shape, runner
        self.quant_bits = engine.identity.expert_bits
        self.fingerprint = fingerprint(engine.shape, engine.identity, options)

    def of(self, engine: Engine) -> ModelCodec:
        """See `StateCodec`."""
        return ModelCodec(engine)

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`."""
        return pack(self.shape, snapshot, start)

    def target(self, segments: Sequence[Segment]) -> Target:
        """See `StateCodec`."""
        return target(self.shape, segments, self._runner.receive)


def fingerprint(shape: Shape, identity: Identity, options: Sequence[str] = (), steering: str | None = None) -> bytes:
    """The layout fingerprint, 16 bytes: of the shape, the round trips, the weights, and what else changes the values.

    Args:
        options: as `PackedRunner.prepare_packing`.
        steering: a hash of steering vectors and scales; None: none, as in this version.
    """
    said = {
        "packing": PACKING_VERSION,
        "shape": {key: value for key, value in asdict(shape).items() if key not in ("name", "context")},
        "round trips": "qat_sim",
        "weights": identity.weights,
        "expert bits": identity.expert_bits,
        "options": list(options),
        "steering": steering,
    }
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()


def pack(shape: Shape, snapshot: Snapshot, start: int) -> Iterator[Part]:
    """The sections of a packed state from token `start` on; rows are gathered when a section is read."""
    segment = Segment(start, len(snapshot.tokens), {})
    for key, (size, _, _) in _expected(shape, segment, snapshot.checkpoint.logits is not None).items():
        yield Part(key, size, partial(_pieces, shape, key, snapshot, start))


def _pieces(shape: Shape, key: SectionKey, snapshot: Snapshot, start: int) -> Buffers:
    checkpoint: Checkpoint = snapshot.checkpoint
    kind, layer, plane = key
    if kind in _ROW_NAMES:
        ratio = shape.ratios[layer]
        first, end = start // ratio, checkpoint.length // ratio
        with closing(snapshot.rows.pieces(layer, _ROW_NAMES[kind], plane, first, end)) as pieces:
            for piece in pieces:
                yield _bytes(piece)
    elif kind == LOGITS:
        assert checkpoint.logits is not None
        yield _bytes(checkpoint.logits)
    elif kind == WINDOW:
        yield _bytes(checkpoint.window[plane])
    else:
        yield _bytes(checkpoint.frontier[layer, _FRONTIER_NAMES[kind]])


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


def target(shape: Shape, segments: Sequence[Segment], receive: Callable[[int], Receiver]) -> Target:
    """Buffers for the packed state that segments make (see `StateCodec.target`). Raises FileFormatError."""
    position = 0
    for segment in segments:
        if segment.start != position or segment.length < segment.start:
            raise FileFormatError(f"a segment starts at token {segment.start}, but the one before ends at {position}")
        position = segment.length
        wanted = _expected(shape, segment, SectionKey(LOGITS) in segment.sizes)
        if {key: spec[0] for key, spec in wanted.items()} != dict(segment.sizes):
            raise FileFormatError(
                f"the sections of the segment up to token {segment.length} do not have this model's sizes"
            )
    rows = receive(position)
    tensors: dict[SectionKey, Tensor] = {}
    sinks: dict[tuple[SectionKey, ...], Sink] = {}
    for planes, pieces in rows.bundles():
        keys = tuple(SectionKey(_ROW_KINDS[kind], layer, plane) for layer, kind, plane in planes)
        sinks[keys] = partial(_row_buffers, pieces)
    for key, (_, size, dtype) in wanted.items():
        if key.kind not in _ROW_NAMES:
            tensors[key] = torch.empty(size, dtype=dtype)
            sinks[key,] = partial(_buffer, tensors[key])
    return Target(sinks, lambda tokens: rows.exported(_checkpoint(shape, position, tensors)), rows.release)


def _row_buffers(pieces: Callable[[], Tensors]) -> Buffers:
    # Explicitly: some Pythons close a generator without letting go of what it was in the middle of.
    with closing(pieces()) as tensors:
        for piece in tensors:
            yield _bytes(piece)


def _buffer(tensor: Tensor) -> Buffers:
    yield _bytes(tensor)


def _checkpoint(shape: Shape, length: int, tensors: Mapping[SectionKey, Tensor]) -> Checkpoint:
    window = tuple(tensors[SectionKey(WINDOW, 0, plane)] for plane in range(len(kv_format(shape, True).widths)))
    frontier = {(key.layer, _FRONTIER_NAMES[key.kind]): tensors[key] for key in tensors if key.kind in _FRONTIER_NAMES}
    return Checkpoint(length, window, frontier, tensors.get(SectionKey(LOGITS)))


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian as this machine writes them."""
    flat = tensor.contiguous().flatten()
    # numpy's arrays are buffers, which its types do not say before Python 3.12.
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")
