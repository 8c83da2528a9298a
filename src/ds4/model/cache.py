"""The KV state of sequences.

A sequence of n tokens is made of
  * a ring of raw rows per layer (the window),
  * compressed rows per compressing layer, append only, in pages that forks share, and index keys beside them,
  * the frontier of each compressor: the projections of the tokens whose block is not complete yet, also a ring.
Cutting a sequence costs nothing for the rows. Window and frontier reach `FREE_TRUNCATION` tokens back; further back a
`Checkpoint` is needed, which holds the live part of both.

Rows are stored packed where the quantisation round trips are on (`qat_sim`), as float32 where they are off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ds4 import ops
from ds4.errors import Ds4Error
from ds4.gguf.shape import Shape

FREE_TRUNCATION = 16
"""Tokens that can be cut off a sequence without a checkpoint (stop strings, rejected drafts, recovery)."""

_SLACK = FREE_TRUNCATION + 1  # one more, so that the last kept token can be evaluated again for its logits
PAGE_ROWS = 64
_PIECE_ROWS = 16_384  # of a held plane that are gathered at once

Planes = tuple[Tensor, ...]
PlaneKey = tuple[int, str, int]
"""Which plane: its layer, its kind ("rows" or "keys"), its number."""


@dataclass(frozen=True)
class RowFormat:
    """How a row is stored: one plane per field, each [rows, width] of one dtype."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]
    pack: Callable[[Tensor], Planes]
    unpack: Callable[..., Tensor]

    def empty(self, *lead: int) -> Planes:
        """Planes of zeros, [*lead, width] each."""
        return tuple(torch.zeros((*lead, w), dtype=d) for w, d in zip(self.widths, self.dtypes, strict=True))

    @property
    def row_bytes(self) -> int:
        return sum(w * d.itemsize for w, d in zip(self.widths, self.dtypes, strict=True))


def _float_format(width: int) -> RowFormat:
    return RowFormat((torch.float32,), (width,), lambda x: (x,), lambda x: x)


def kv_format(shape: Shape, qat_sim: bool) -> RowFormat:
    """The format of window and compressed rows."""
    if not qat_sim:
        return _float_format(shape.head_dim)
    plain = shape.head_dim - shape.rope_dim
    return RowFormat(
        (torch.uint8, torch.bfloat16, torch.uint8),
        (plain, shape.rope_dim, plain // 64),
        lambda x: ops.pack_row(x, shape.rope_dim),
        ops.unpack_row,
    )


def key_format(shape: Shape, qat_sim: bool) -> RowFormat:
    """The format of index keys. What is packed is the Hadamard transform of the key."""
    if not qat_sim:
        return _float_format(shape.index_dim)
    return RowFormat(
        (torch.uint8, torch.uint8),
        (shape.index_dim // 2, shape.index_dim // 32),
        lambda x: ops.pack_key(ops.hadamard(x)),
        ops.unpack_key,
    )


def check_round_trips(shape: Shape) -> None:
    """Raise `Ds4Error` if the quantisation round trips are not defined for this shape."""
    problems = shape.round_trip_problems()
    if problems:
        raise Ds4Error(f"{problems[0]}; use qat_sim=False for this model")


class RowPool:
    """Pages of the compressed rows of all layers that share one ratio; `PAGE_ROWS` rows a page, shared by reference.

    A page number stands for the same rows in each of the layers, so one page table serves them all.
    """

    def __init__(self, layers: Sequence[int], formats: dict[str, RowFormat]) -> None:
        self.formats = formats
        self._planes = {(layer, kind): f.empty(0) for layer in layers for kind, f in formats.items()}
        self._references: list[int] = []
        self._free: list[int] = []

    def allocate(self) -> int:
        """A page of its own; the pool grows by half when it is full."""
        self.reserve(1)
        page = self._free.pop()
        self._references[page] = 1
        return page

    def reserve(self, pages: int) -> None:
        """Have so many free pages; the pool grows at once for all of them, as growing copies it."""
        if len(self._free) >= pages:
            return
        old = len(self._references)
        new = max(4, old // 2, pages - len(self._free))
        for key, planes in self._planes.items():
            more = self.formats[key[1]].empty(new * PAGE_ROWS)
            grown = (torch.cat(pair) for pair in zip(planes, more, strict=True)) if old else more
            self._planes[key] = tuple(grown)
        self._references += [0] * new
        self._free[:0] = range(old + new - 1, old - 1, -1)

    def share(self, pages: Sequence[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one holder less; a page without any is free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def own(self, page: int) -> int:
        """This page if nobody else holds it, else a copy of it in its place."""
        if self._references[page] == 1:
            return page
        copy = self.allocate()
        for planes in self._planes.values():
            for plane in planes:
                view = plane.view(-1, PAGE_ROWS, plane.shape[-1])
                view[copy] = view[page]
        self.release([page])
        return copy

    @property
    def used_pages(self) -> int:
        """Pages that somebody holds."""
        return len(self._references) - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(PAGE_ROWS * self.formats[kind].row_bytes for _, kind in self._planes)

    def planes(self, layer: int, kind: str) -> Planes:
        """The storage of one layer, [pages * PAGE_ROWS, width] each."""
        return self._planes[layer, kind]


@dataclass(frozen=True)
class Checkpoint:
    """The live part of window and frontiers at one position; with the rows before it, a whole state.

    Attributes:
        length: tokens evaluated.
        window: planes [layers, live rows, width], the rows of the last `window - 1` positions in order.
        frontier: (layer, kind) -> values and gates [2, live tokens, width] of the unfinished block, and for an
            overlapping compressor of the block before it (first half of the channels only), under kind + ".previous".
        logits: float32 [vocab] after the last token, if they were computed.
    """

    length: int
    window: Planes
    frontier: dict[tuple[int, str], Tensor]
    logits: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = [*self.window, *self.frontier.values()] + ([] if self.logits is None else [self.logits])
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class ExportedState:
    """A state in row ranges: what a store or another process needs to go on from `start`.

    rows: (layer, kind) -> planes of the rows start // ratio .. checkpoint.length // ratio - 1.
    """

    start: int
    checkpoint: Checkpoint
    rows: dict[tuple[int, str], Planes]
    layout: tuple[Shape, bool]  # whose state it is: the shape, and whether rows are packed


class HeldRows:
    """The compressed rows of a sequence as they were when `SequenceState.hold` was called, whatever becomes of it.

    `pieces` may be called from another thread than the one that steps the sequence: pages that more than one holds are
    never written to. `release` must be called by the thread that steps.
    """

    def __init__(self, pools: dict[int, RowPool], ratios: Sequence[int], pages: dict[int, list[int]]) -> None:
        self._pools, self._ratios, self._pages = pools, ratios, pages

    def pieces(self, layer: int, kind: str, plane: int, first: int, end: int) -> Generator[Tensor, None, None]:
        """Rows first .. end - 1 of a plane, [rows, width] in pieces, each to be used before the next is taken."""
        ratio = self._ratios[layer]
        table = torch.tensor(self._pages[ratio], dtype=torch.int64)
        for at in range(first, end, _PIECE_ROWS):
            index = torch.arange(at, min(at + _PIECE_ROWS, end))
            places = table[index // PAGE_ROWS] * PAGE_ROWS + index % PAGE_ROWS
            yield self._pools[ratio].planes(layer, kind)[plane][places]

    def release(self) -> None:
        """Give the pages back; nothing can be read any more."""
        _release_pages(self._pools, self._pages)


def _once(rows: Tensor) -> Generator[Tensor, None, None]:
    yield rows


class ReceivedRows:
    """The rows of a state that comes from elsewhere, as its bytes arrive."""

    def __init__(self, cache: KVCache, length: int) -> None:
        self._cache, self._length = cache, length
        self._rows: dict[tuple[int, str], Planes] = {}
        for layer in cache.layers or ():
            for kind in cache.frontier_kinds(layer):
                how = cache.row_format if kind == "rows" else cache.key_format
                self._rows[layer, kind] = how.empty(length // cache.shape.ratios[layer])

    def bundles(self) -> Iterator[tuple[tuple[PlaneKey, ...], Callable[[], Generator[Tensor, None, None]]]]:
        """See `ds4.engine.packing.Receiver`: here each plane is whole and by itself."""
        for (layer, kind), planes in self._rows.items():
            for plane, rows in enumerate(planes):
                yield ((layer, kind, plane),), partial(_once, rows)

    def exported(self, checkpoint: Checkpoint) -> ExportedState:
        """The whole state, once all rows are there."""
        return ExportedState(0, checkpoint, self._rows, (self._cache.shape, self._cache.qat_sim))

    def release(self) -> None:
        """It is not going to be used."""
        self._rows.clear()


@dataclass
class KVCache:
    """The pools and formats that the sequences of one model share; `layers` may be a slice of the model's."""

    shape: Shape
    qat_sim: bool
    layers: range | None = None
    pools: dict[int, RowPool] = field(init=False)

    def __post_init__(self) -> None:
        if self.qat_sim:
            check_round_trips(self.shape)
        layers = self.layers or range(self.shape.layers)
        self.layers = layers
        self.row_format = kv_format(self.shape, self.qat_sim)
        self.key_format = key_format(self.shape, self.qat_sim)
        self.pools = {}
        for ratio in sorted({self.shape.ratios[i] for i in layers} - {0}):
            formats = {"rows": self.row_format}
            if ratio == self.shape.sparse_ratio:
                formats["keys"] = self.key_format
            self.pools[ratio] = RowPool([i for i in layers if self.shape.ratios[i] == ratio], formats)

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""
        return SequenceState(self)

    def receive(self, length: int) -> ReceivedRows:
        """Where the rows of a state of so many tokens can come in."""
        return ReceivedRows(self, length)

    def frontier_kinds(self, layer: int) -> dict[str, int]:
        """The compressors of a layer: kind -> width of a row."""
        if not self.shape.ratios[layer]:
            return {}
        kinds = {"rows": self.shape.head_dim}
        if self.shape.has_indexer(layer):
            kinds["keys"] = self.shape.index_dim
        return kinds


def _release_pages(pools: dict[int, RowPool], held: dict[int, list[int]]) -> None:
    for ratio, pages in held.items():
        pools[ratio].release(pages)
        pages.clear()


class SequenceState:
    """The KV state of one sequence. Row and token numbers count from the start of the sequence."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.length = 0
        self.floor = 0  # shortest length that `truncate` can reach
        shape = cache.shape
        assert cache.layers is not None
        self._first_layer = cache.layers.start
        self._ring = shape.window - 1 + _SLACK
        self._window = cache.row_format.empty(len(cache.layers), self._ring)
        self._pages: dict[int, list[int]] = {ratio: [] for ratio in cache.pools}
        self._tables: dict[int, Tensor] = {}  # the same as tensors, made when they are needed
        self._slots: dict[tuple[int, int, int], Tensor] = {}  # ring slots of this step's token ranges
        self._frontier: dict[tuple[int, str], Tensor] = {}
        for layer in cache.layers:
            for kind, width in cache.frontier_kinds(layer).items():
                ratio, coff = shape.ratios[layer], 2 if shape.has_indexer(layer) else 1
                self._frontier[layer, kind] = torch.zeros(2, coff * ratio - 1 + _SLACK, coff * width)
        # Whoever forgets to release a state does not keep its pages for ever.
        weakref.finalize(self, _release_pages, cache.pools, self._pages).atexit = False

    # -- one step: prepare, then per layer window, complete_blocks and append, then advance ----------------------------

    def prepare(self, tokens: int) -> None:
        """Make room for the compressed rows of the next `tokens` tokens."""
        self._slots.clear()
        for ratio, pages in self._pages.items():
            pool = self.cache.pools[ratio]
            first, end = self.length // ratio, (self.length + tokens) // ratio
            if end > first and first // PAGE_ROWS < len(pages):
                pages[first // PAGE_ROWS] = pool.own(pages[first // PAGE_ROWS])
            pool.reserve(-(-end // PAGE_ROWS) - len(pages))
            while len(pages) * PAGE_ROWS < end:
                pages.append(pool.allocate())
        self._tables.clear()

    def _ring_slots(self, size: int, start: int, end: int) -> Tensor:
        """Slots of positions start .. end - 1 in a ring of `size`; the layers of a step ask for the same ones."""
        slots = self._slots.get((size, start, end))
        if slots is None:
            slots = self._slots[size, start, end] = torch.arange(start, end) % size
        return slots

    def window(self, layer: int, new: Planes) -> Planes:
        """Store the raw rows of the next tokens.

        new: packed rows [tokens, ...] -> the packed rows around those tokens, [window - 1 + tokens, ...]; where the
        sequence has fewer rows before the first new one, anything stands in their place.
        """
        n, ring = new[0].shape[0], self._ring
        kept = min(n, ring)
        prior = self._ring_slots(ring, self.length - self.cache.shape.window + 1, self.length)
        target = self._ring_slots(ring, self.length + n - kept, self.length + n)
        seen = []
        for plane, fresh in zip(self._window, new, strict=True):
            rows = plane[layer - self._first_layer]
            seen.append(torch.cat((rows[prior], fresh)))
            rows[target] = fresh[n - kept :]
        return tuple(seen)

    def complete_blocks(self, layer: int, kind: str, k: Tensor, z: Tensor) -> tuple[Tensor, Tensor, int, bool] | None:
        """Store the projections of the next tokens; return those of the blocks that they complete.

        k, z: float32 [tokens, width] -> the arguments of `ops.pool_blocks` (k, z, first) around the number of the first
        completed row, as (k, z, row, first), or None if no block is complete.
        """
        ring = self._frontier[layer, kind]
        ratio, overlap = self.cache.shape.ratios[layer], self.cache.shape.has_indexer(layer)
        slots = ring.shape[1]
        n, old = k.shape[0], self.length
        row, end = old // ratio, (old + n) // ratio
        result = None
        if end > row:
            start = (row - 1 if overlap else row) * ratio
            before = ring[:, self._ring_slots(slots, max(start, 0), old)]
            fresh = torch.stack((k, z))[:, : end * ratio - old]
            if start < 0:
                before = torch.cat((before.new_zeros(2, -start, k.shape[1]), before), dim=1)
            both = torch.cat((before, fresh), dim=1)
            result = both[0], both[1], row, start < 0
        kept = min(n, slots)
        target = self._ring_slots(slots, old + n - kept, old + n)
        ring[0, target] = k[n - kept :]
        ring[1, target] = z[n - kept :]
        return result

    def append(self, layer: int, kind: str, row: int, values: Tensor) -> None:
        """Store compressed rows (or index keys) `row` and following: float32 [rows, width]."""
        pool = self.cache.pools[self.cache.shape.ratios[layer]]
        self._write(layer, kind, row, pool.formats[kind].pack(values))

    def _write(self, layer: int, kind: str, row: int, packed: Planes) -> None:
        ratio = self.cache.shape.ratios[layer]
        count = packed[0].shape[0]
        places = self._places(ratio, torch.arange(row, row + count))
        # Pages that follow one another, as those of an imported state do, are written at once.
        first = int(places[0]) if count > PAGE_ROWS and bool((places[1:] - places[:-1] == 1).all()) else None
        for plane, fresh in zip(self.cache.pools[ratio].planes(layer, kind), packed, strict=True):
            if first is None:
                plane[places] = fresh
            else:
                plane[first : first + count] = fresh

    def rows(self, layer: int, kind: str, index: Tensor) -> Tensor:
        """Stored compressed rows (or index keys) by number: int64 [n] -> float32 [n, width]."""
        pool = self.cache.pools[self.cache.shape.ratios[layer]]
        return pool.formats[kind].unpack(*self._read(layer, kind, index))

    def _read(self, layer: int, kind: str, index: Tensor) -> Planes:
        ratio = self.cache.shape.ratios[layer]
        places = self._places(ratio, index)
        return tuple(plane[places] for plane in self.cache.pools[ratio].planes(layer, kind))

    def _places(self, ratio: int, rows: Tensor) -> Tensor:
        table = self._tables.get(ratio)
        if table is None:
            table = self._tables[ratio] = torch.tensor(self._pages[ratio], dtype=torch.int64)
        return table[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS

    def advance(self, tokens: int) -> None:
        """Count the tokens whose rows all layers have stored."""
        self.length += tokens

    def spoil(self) -> None:
        """A step broke off half way: the rings are not to be trusted, only a checkpoint can be gone back to."""
        self.floor = self.length + 1

    # -- history -------------------------------------------------------------------------------------------------------

    def can_truncate(self, length: int) -> bool:
        """True if `truncate(length)` needs no checkpoint, with the last kept token still to be evaluated again."""
        return self.floor <= length <= self.length and self.length - length <= _SLACK

    def truncate(self, length: int) -> None:
        """Cut the sequence to `length` tokens; `can_truncate(length)` must hold."""
        if not self.can_truncate(length):
            raise ValueError(f"cannot cut a sequence of {self.length} tokens to {length} without a checkpoint")
        # The rings end at the old length, however often the sequence is cut before they are written again.
        self.floor = max(self.floor, self.length - _SLACK)
        self._drop_rows(length)
        self.length = length

    def _drop_rows(self, length: int) -> None:
        for ratio, pages in self._pages.items():
            keep = -(-(length // ratio) // PAGE_ROWS)
            self.cache.pools[ratio].release(pages[keep:])
            del pages[keep:]
        self._tables.clear()

    def fork(self) -> SequenceState:
        """An equal state of its own; the pages of compressed rows are shared."""
        other = SequenceState(self.cache)
        other.length, other.floor = self.length, self.floor
        other._window = tuple(plane.clone() for plane in self._window)
        other._frontier = {key: ring.clone() for key, ring in self._frontier.items()}
        for ratio, pages in self._pages.items():
            self.cache.pools[ratio].share(pages)
            other._pages[ratio] += pages
        return other

    def checkpoint(self, logits: Tensor | None = None, length: int | None = None) -> Checkpoint:
        """What `restore` needs to come back to this length later, or to a shorter one that `can_truncate` reaches."""
        n = self.length if length is None else length
        if not self.can_truncate(n):
            raise ValueError(f"a sequence of {self.length} tokens has no state of {n} tokens any more")
        # What is indexed with a tensor is a copy.
        live = torch.arange(max(0, n - self.cache.shape.window + 1), n) % self._ring
        frontier = {}
        for (layer, kind), ring in self._frontier.items():
            ratio, slots = self.cache.shape.ratios[layer], ring.shape[1]
            begin = n // ratio * ratio
            frontier[layer, kind] = ring[:, torch.arange(begin, n) % slots]
            if self.cache.shape.has_indexer(layer) and begin:
                previous = torch.arange(begin - ratio, begin) % slots
                frontier[layer, kind + ".previous"] = ring[:, previous, : ring.shape[2] // 2]
        return Checkpoint(n, tuple(plane[:, live] for plane in self._window), frontier, logits)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of this sequence (or of one that shares its first `checkpoint.length` tokens)."""
        n = checkpoint.length
        self._drop_rows(n)
        live = torch.arange(max(0, n - self.cache.shape.window + 1), n) % self._ring
        for plane, kept in zip(self._window, checkpoint.window, strict=True):
            plane.zero_()  # masked rows have weight 0, which does not help against what is no number
            plane[:, live] = kept
        for (layer, kind), ring in self._frontier.items():
            ratio, slots = self.cache.shape.ratios[layer], ring.shape[1]
            begin = n // ratio * ratio
            ring[:, torch.arange(begin, n) % slots] = checkpoint.frontier[layer, kind]
            previous = checkpoint.frontier.get((layer, kind + ".previous"))
            if previous is not None:
                ring[:, torch.arange(begin - ratio, begin) % slots, : previous.shape[2]] = previous
        self.length = self.floor = n

    def reset(self) -> None:
        """Back to the empty sequence."""
        self._drop_rows(0)
        for plane in self._window:
            plane.zero_()
        self.length = self.floor = 0

    def release(self) -> None:
        """Give the pages back; the state must not be used again."""
        self.reset()

    # -- moving a state ----------------------------------------------------------------------------------------------

    def hold(self, length: int) -> HeldRows:
        """The rows of the first `length` tokens, to be read later; they stay until they are released."""
        held = {}
        for ratio, pages in self._pages.items():
            held[ratio] = pages[: -(-(length // ratio) // PAGE_ROWS)]
            self.cache.pools[ratio].share(held[ratio])
        return HeldRows(self.cache.pools, self.cache.shape.ratios, held)

    def export(self, start: int = 0) -> ExportedState:
        """The state as data: the rows of all blocks that end after `start`, and a checkpoint of the rest."""
        rows = {}
        for layer, kind in self._frontier:
            ratio = self.cache.shape.ratios[layer]
            index = torch.arange(start // ratio, self.length // ratio)
            rows[layer, kind] = self._read(layer, kind, index)
        return ExportedState(start, self.checkpoint(), rows, (self.cache.shape, self.cache.qat_sim))

    def import_state(self, exported: ExportedState) -> None:
        """Continue with an exported state. This sequence must hold the first `exported.start` tokens of it."""
        if exported.layout != (self.cache.shape, self.cache.qat_sim):
            raise Ds4Error("the state is one of another model, or of one with other round trips (qat_sim)")
        if exported.rows.keys() != self._frontier.keys():
            raise Ds4Error("the state's rows are not here, but in the memory of a device")
        if self.length < exported.start:
            raise ValueError(f"the rows start at token {exported.start}, but only {self.length} tokens are here")
        self._drop_rows(exported.start)
        self.length = exported.start
        self.prepare(exported.checkpoint.length - exported.start)
        for (layer, kind), packed in exported.rows.items():
            ratio = self.cache.shape.ratios[layer]
            self._write(layer, kind, exported.start // ratio, packed)
        self.length = exported.checkpoint.length
        self.restore(exported.checkpoint)

    @property
    def nbytes(self) -> int:
        """Bytes of this state, shared pages counted whole."""
        own = [*self._window, *self._frontier.values()]
        pages = sum(len(pages) * self.cache.pools[ratio].page_bytes for ratio, pages in self._pages.items())
        return pages + sum(t.numel() * t.element_size() for t in own)
