"""The KV state of sequences on one device, in memory that kernels reach through page tables and never moves.

What a sequence is made of, and what each operation means, is `ds4.model.cache.SequenceState`; states move between the
two through `export` and `import_state`. Here

  * a sequence has a **slot**: its place in the window rings [layers, slots, `WINDOW_RING`, ...] and in the frontier
    rings [layers, slots, 2, ring, width]. Kernels find it by a number in a device buffer;
  * compressed rows stand in **pages** of 64, one page for all layers of a ratio: a record with the planes of one layer
    behind those of another, so that sharing, copying and moving a page is one copy. A sequence's pages of a ratio are a
    row of a page table, int32 [slots, pages];
  * a pool is one allocation with all the pages that it may ever have: kernels need one address and one stride, captured
    graphs stay valid, and a sequence that was planned never finds the device's memory taken by something else.

Only packed rows (`qat_sim`) are held. The planes are those of `ds4.model.cache`, with the exponents of a row padded to
head_dim / 64 bytes. Plain torch on any device; nothing here waits for it but `checkpoint`, `export` and `import_state`,
which copy from and to the host.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds4.errors import Ds4Error
from ds4.gguf.shape import Shape
from ds4.model.cache import FREE_TRUNCATION, PAGE_ROWS, Checkpoint, ExportedState, Planes, check_round_trips
from ds4.model.cuda.transfer import ExportedPages, HeldPages, Lanes, ReceivedPages

_SLACK = FREE_TRUNCATION + 1
_BATCH = 64  # pages that are moved at once


@dataclass(frozen=True)
class PlaneSpec:
    """One plane of a kind of rows.

    Attributes:
        dtype, width: of a row of the plane.
        used: leading elements that hold something; the rest is padding.
    """

    dtype: torch.dtype
    width: int
    used: int

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


def plane_specs(shape: Shape, kind: str) -> tuple[PlaneSpec, ...]:
    """The planes of "rows" (window and compressed) or of "keys"."""
    if kind == "keys":
        return tuple(PlaneSpec(torch.uint8, n, n) for n in (shape.index_dim // 2, shape.index_dim // 32))
    plain = shape.head_dim - shape.rope_dim
    return (
        PlaneSpec(torch.uint8, plain, plain),
        PlaneSpec(torch.bfloat16, shape.rope_dim, shape.rope_dim),
        PlaneSpec(torch.uint8, plain // 64 + 1, plain // 64),
    )


class PagePool:
    """Pages of the compressed rows of all layers of one ratio.

    Args:
        layers: their numbers.
        kinds: the planes of each kind of rows that a layer has.
        pages: how many there are; their memory is taken here.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kinds: Mapping[str, tuple[PlaneSpec, ...]],
        device: torch.device | str,
        pages: int,
    ) -> None:
        self.device, self.layers = torch.device(device), tuple(layers)
        self._offsets: dict[tuple[int, str], tuple[tuple[int, PlaneSpec], ...]] = {}
        size = 0
        for layer in layers:
            for kind, specs in kinds.items():
                parts = []
                for spec in specs:
                    parts.append((size, spec))
                    size += PAGE_ROWS * spec.nbytes
                self._offsets[layer, kind] = tuple(parts)
        self.page_bytes = size
        """Bytes of one page over all layers."""
        self._records = torch.zeros((pages, size), dtype=torch.uint8, device=self.device)
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self.held: list[HeldPages] = []
        """What holds pages for a file, the oldest first; the cache's."""

    def allocate(self) -> int:
        """A page of its own. Raises Ds4Error if there is none left."""
        while not self._free and self._reclaim():
            pass
        if not self._free:
            raise Ds4Error(
                f"the KV pool is full: all {len(self._references)} pages of {PAGE_ROWS} rows are in use; "
                "release a session or start with room for more tokens"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

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
        while self._references[page] > 1 and not self._free and self._reclaim():
            pass
        if self._references[page] == 1:
            return page
        copy = self.allocate()
        self._records[copy] = self._records[page]
        self.release([page])
        return copy

    def _reclaim(self) -> bool:
        """Take back pages that are held for a file only: a conversation needs them; False if there are none."""
        if not self.held:
            return False
        self.held[0].revoke()
        return True

    @property
    def used_pages(self) -> int:
        """Pages that somebody holds."""
        return len(self._references) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self._records.numel()

    def planes(self, layer: int, kind: str) -> Planes:
        """The planes of one layer for kernels, [pages, 64, width] each; they share the pool's memory."""
        result = []
        for offset, spec in self._offsets[layer, kind]:
            size = spec.dtype.itemsize
            whole = self._records.flatten().view(spec.dtype)
            shape = (self._records.shape[0], PAGE_ROWS, spec.width)
            result.append(whole.as_strided(shape, (self.page_bytes // size, spec.width, 1), offset // size))
        return tuple(result)

    def spec(self, layer: int, kind: str, plane: int) -> PlaneSpec:
        """What a plane is."""
        return self._offsets[layer, kind][plane][1]

    def strip(self, layer: int, kind: str, plane: int) -> Tensor:
        """A plane as words, int64 [pages, words of 64 rows]; it shares the pool's memory."""
        offset, spec = self._offsets[layer, kind][plane]
        return self._records[:, offset : offset + PAGE_ROWS * spec.nbytes].view(torch.int64)

    def plane_kinds(self) -> Iterator[tuple[str, int, PlaneSpec]]:
        """The planes that each layer has: the kind of their rows, their number, and what they are."""
        for layer, kind in self._offsets:
            if layer == self.layers[0]:
                for plane, (_, spec) in enumerate(self._offsets[layer, kind]):
                    yield kind, plane, spec

    def raw(self, layers: Sequence[int], kind: str, plane: int) -> Tensor:
        """A plane of some layers that follow one another here, as bytes, uint8 [pages, layers, 64, bytes of a row].

        It shares the pool's memory.
        """
        offset, spec = self._offsets[layers[0], kind][plane]
        pages, between = self._records.shape[0], self.page_bytes // len(self.layers)
        strides = (self.page_bytes, between, spec.nbytes, 1)
        return self._records.as_strided((pages, len(layers), PAGE_ROWS, spec.nbytes), strides, offset)

    def read(self, pages: Sequence[int]) -> Tensor:
        """Records of pages, uint8 [pages, page_bytes] on the host."""
        return self._records[self._index(pages)].cpu()

    def write(self, pages: Sequence[int], records: Tensor) -> None:
        """Store records, uint8 [pages, page_bytes]."""
        self._records[self._index(pages)] = records.to(self.device)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self.device)

    def region(self, records: Tensor, layer: int, kind: str) -> list[tuple[Tensor, PlaneSpec]]:
        """The planes of one layer in records, uint8 [pages, 64, bytes] each, as views."""
        n = records.shape[0]
        return [
            (records[:, offset : offset + PAGE_ROWS * spec.nbytes].view(n, PAGE_ROWS, spec.nbytes), spec)
            for offset, spec in self._offsets[layer, kind]
        ]


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host, in pinned memory where they come from a CUDA device."""
    result = []
    for t in tensors:
        if t.is_cuda:
            copy = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            result.append(copy.copy_(t, non_blocking=True))
        else:
            result.append(t.clone())
    if any(t.is_cuda for t in tensors):
        # Not the whole device: other streams may be at work for a file.
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return result


class DeviceCache:
    """The KV memory of one model on one device.

    Args:
        slots: sequences that can exist at once.
        context: tokens that a sequence may have, which is what the page tables are made for.
        limits: ratio -> pages of its pool; all that the slots can fill where a ratio is missing.
        layers: a slice of the model's.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device | str,
        slots: int,
        context: int,
        limits: Mapping[int, int] | None = None,
        layers: range | None = None,
    ) -> None:
        check_round_trips(shape)
        self.shape, self.device, self.slots, self.context = shape, torch.device(device), slots, context
        self.layers = layers or range(shape.layers)
        self.window_ring = shape.window + _SLACK
        self.window = tuple(
            torch.zeros((len(self.layers), slots, self.window_ring, spec.width), dtype=spec.dtype, device=device)
            for spec in plane_specs(shape, "rows")
        )
        self.pools: dict[int, PagePool] = {}
        self.tables: dict[int, Tensor] = {}
        self._rings: dict[tuple[int, str], Tensor] = {}
        self._place: dict[int, int] = {}  # a layer's place among those of its ratio
        for ratio in sorted({shape.ratios[i] for i in self.layers} - {0}):
            layers_of = [i for i in self.layers if shape.ratios[i] == ratio]
            self._place.update((layer, i) for i, layer in enumerate(layers_of))
            kinds = {kind: plane_specs(shape, kind) for kind in self.kinds(layers_of[0])}
            pages = max(1, -(-(context // ratio) // PAGE_ROWS))
            self.pools[ratio] = PagePool(layers_of, kinds, device, (limits or {}).get(ratio, slots * pages))
            self.tables[ratio] = torch.zeros((slots, pages), dtype=torch.int32, device=device)
            coff = 2 if shape.has_indexer(layers_of[0]) else 1
            for kind, width in self.kinds(layers_of[0]).items():
                size = (len(layers_of), slots, 2, coff * ratio + FREE_TRUNCATION, coff * width)
                self._rings[ratio, kind] = torch.zeros(size, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self.held: list[HeldPages] = []
        for pool in self.pools.values():
            pool.held = self.held

    @functools.cached_property
    def lanes(self) -> Lanes:
        """What rows go through on their way to files and back; its memory is taken when it is first asked for."""
        return Lanes(self.device)

    def receive(self, length: int) -> ReceivedPages:
        """Pages that the rows of a state of so many tokens can come into. Raises Ds4Error if there are not enough."""
        return ReceivedPages(self, length)

    def kinds(self, layer: int) -> dict[str, int]:
        """The compressors of a layer: kind -> channels of a row."""
        if not self.shape.ratios[layer]:
            return {}
        kinds = {"rows": self.shape.head_dim}
        if self.shape.has_indexer(layer):
            kinds["keys"] = self.shape.index_dim
        return kinds

    def window_planes(self, layer: int) -> Planes:
        """The window rings of a layer, [slots, ring, width] each; position p of a sequence stands at p % ring."""
        return tuple(plane[layer - self.layers.start] for plane in self.window)

    def page_planes(self, layer: int, kind: str) -> Planes:
        """The pages of a layer's rows or keys; see `PagePool.planes`."""
        return self.pools[self.shape.ratios[layer]].planes(layer, kind)

    def frontier(self, layer: int, kind: str) -> Tensor:
        """The frontier rings of a compressor, float32 [slots, 2, ring, width]."""
        return self._rings[self.shape.ratios[layer], kind][self._place[layer]]

    def table(self, layer: int) -> Tensor:
        """The page tables of a layer's ratio, int32 [slots, pages]."""
        return self.tables[self.shape.ratios[layer]]

    def new_state(self) -> DeviceState:
        """The state of an empty sequence. Raises Ds4Error if no slot is free."""
        return DeviceState(self, self._take())

    def _take(self) -> int:
        if not self._free:
            raise Ds4Error(f"all {self.slots} sequences that this device has room for are in use; release one first")
        return self._free.pop()

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated: rings, tables and pages."""
        own = [*self.window, *self._rings.values(), *self.tables.values()]
        return sum(t.numel() * t.element_size() for t in own) + sum(p.nbytes for p in self.pools.values())


def _give_back(cache: DeviceCache, slot: int, held: dict[int, list[int]]) -> None:
    for ratio, pages in held.items():
        cache.pools[ratio].release(pages)
        pages.clear()
    cache._free.append(slot)


class DeviceState:
    """The KV state of one sequence; `slot` is its number for kernels. Made by `DeviceCache.new_state` and `fork`."""

    def __init__(self, cache: DeviceCache, slot: int) -> None:
        self.cache, self.slot = cache, slot
        self.length = 0
        self.floor = 0  # shortest length that `truncate` can reach
        self.version = 0  # another number after each change of the tokens
        self._pages: dict[int, list[int]] = {ratio: [] for ratio in cache.pools}
        self._finalizer = weakref.finalize(self, _give_back, cache, slot, self._pages)
        self._finalizer.atexit = False

    # -- one step: prepare, then the kernels, then advance -------------------------------------------------------------

    def prepare(self, tokens: int) -> None:
        """Make room for the compressed rows of the next `tokens` tokens, in pages of its own."""
        if self.length + tokens > self.cache.context:
            raise Ds4Error(f"a sequence of {self.length + tokens} tokens does not fit {self.cache.context}")
        for ratio, pages in self._pages.items():
            pool, changed = self.cache.pools[ratio], len(pages)
            first, end = self.length // ratio, (self.length + tokens) // ratio
            try:
                if end > first and first // PAGE_ROWS < len(pages):
                    at = first // PAGE_ROWS
                    page = pool.own(pages[at])
                    if page != pages[at]:
                        pages[at], changed = page, at
                while len(pages) * PAGE_ROWS < end:
                    pages.append(pool.allocate())
            finally:  # also of those that there was room for
                self._write_table(ratio, changed)

    def _write_table(self, ratio: int, start: int = 0) -> None:
        """Tell the device of the pages from `start` on."""
        pages = self._pages[ratio]
        if start < len(pages):
            row = self.cache.tables[ratio][self.slot]
            row[start : len(pages)] = torch.tensor(pages[start:], dtype=torch.int32).to(row.device)

    def advance(self, tokens: int) -> None:
        """Count the tokens whose rows all layers have stored."""
        self.length += tokens
        self.version += 1

    def begin_ahead(self) -> None:
        """The row behind the last one is written, though it may never count."""
        self.floor = max(self.floor, self.length + 1 - _SLACK)

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
        self.floor = max(self.floor, self.length - _SLACK)
        self._drop_rows(length)
        self.length = length
        self.version += 1

    def _drop_rows(self, length: int) -> None:
        for ratio, pages in self._pages.items():
            keep = -(-(length // ratio) // PAGE_ROWS)
            self.cache.pools[ratio].release(pages[keep:])
            del pages[keep:]

    def fork(self) -> DeviceState:
        """An equal state in a slot of its own; the pages of compressed rows are shared."""
        other = self.cache.new_state()
        other.length, other.floor = self.length, self.floor
        for ring in (*self.cache.window, *self.cache._rings.values()):
            ring[:, other.slot] = ring[:, self.slot]
        for ratio, pages in self._pages.items():
            self.cache.pools[ratio].share(pages)
            other._pages[ratio] += pages
            other._write_table(ratio)
        return other

    def _live(self, n: int) -> Tensor:
        """Places in the window ring of the rows that a sequence of n tokens still needs."""
        first = max(0, n - self.cache.shape.window + 1)
        return torch.arange(first, n, device=self.cache.device) % self.cache.window_ring

    def _frontiers(self, n: int) -> Iterator[tuple[list[tuple[int, str]], Tensor, Tensor]]:
        """What a sequence of n tokens needs of the frontier rings, of all layers of a ratio together: copies cost.

        Names in `Checkpoint.frontier`, the rings [layers, 2, ring, width], and the places in them.
        """
        cache = self.cache
        for (ratio, kind), rings in cache._rings.items():
            layers = [i for i in cache.layers if cache.shape.ratios[i] == ratio]
            ring, begin, size = rings[:, self.slot], n // ratio * ratio, rings.shape[3]
            yield [(i, kind) for i in layers], ring, torch.arange(begin, n, device=ring.device) % size
            if cache.shape.has_indexer(layers[0]) and begin:
                previous = torch.arange(begin - ratio, begin, device=ring.device) % size
                yield [(i, kind + ".previous") for i in layers], ring[..., : ring.shape[3] // 2], previous

    def _compressors(self) -> list[tuple[int, str]]:
        return [(layer, kind) for layer in self.cache.layers for kind in self.cache.kinds(layer)]

    def checkpoint(self, logits: Tensor | None = None, length: int | None = None) -> Checkpoint:
        """What `restore` needs to come back to this length later, or to a shorter one that `can_truncate` reaches.

        On the host, in pinned memory where the device is a CUDA one.
        """
        n, cache = self.length if length is None else length, self.cache
        if not self.can_truncate(n):
            raise ValueError(f"a sequence of {self.length} tokens has no state of {n} tokens any more")
        live, specs = self._live(n), plane_specs(cache.shape, "rows")
        window = [plane[:, self.slot, live, : s.used] for plane, s in zip(cache.window, specs, strict=True)]
        frontiers = [(names, ring[:, :, places]) for names, ring, places in self._frontiers(n)]
        rings = [ring for _, ring in frontiers]
        kept = _to_host([*window, *rings, *([] if logits is None else [logits])])
        found: dict[tuple[int, str], Tensor] = {}
        for (names, _), rows in zip(frontiers, kept[len(window) :], strict=False):
            found.update(zip(names, rows, strict=True))
        order = [(layer, kind + part) for layer, kind in self._compressors() for part in ("", ".previous")]
        frontier = {key: found[key] for key in order if key in found}
        return Checkpoint(n, tuple(kept[: len(window)]), frontier, None if logits is None else kept[-1])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of this sequence (or of one that shares its first `checkpoint.length` tokens)."""
        n, cache = checkpoint.length, self.cache
        self._drop_rows(n)
        live = self._live(n)
        for plane, kept in zip(cache.window, checkpoint.window, strict=True):
            plane[:, self.slot, live, : kept.shape[2]] = kept.to(cache.device)
        for names, ring, places in self._frontiers(n):
            ring[:, :, places] = torch.stack([checkpoint.frontier[name] for name in names]).to(cache.device)
        self.length = self.floor = n
        self.version += 1

    def reset(self) -> None:
        """Back to the empty sequence."""
        self._drop_rows(0)
        self.length = self.floor = 0
        self.version += 1

    def release(self) -> None:
        """Give pages and slot back; the state must not be used again."""
        self._finalizer()

    # -- moving a state ------------------------------------------------------------------------------------------------

    def _spans(self, ratio: int, row: int, end: int) -> list[tuple[list[int], Tensor, Tensor]]:
        """Rows row .. end - 1 in batches of pages: the pages, and of each row its page among them and its place."""
        spans, pages = [], self._pages[ratio]
        for first in range(row // PAGE_ROWS, -(-end // PAGE_ROWS), _BATCH):
            last = min(first + _BATCH, -(-end // PAGE_ROWS))
            index = torch.arange(max(row, first * PAGE_ROWS), min(end, last * PAGE_ROWS))
            spans.append((pages[first:last], index // PAGE_ROWS - first, index % PAGE_ROWS))
        return spans

    def hold(self, length: int) -> HeldPages:
        """The rows of the first `length` tokens, to be read later; they stay until they are released or revoked."""
        held = {}
        for ratio, pages in self._pages.items():
            held[ratio] = pages[: -(-(length // ratio) // PAGE_ROWS)]
            self.cache.pools[ratio].share(held[ratio])
        self.cache.held.append(HeldPages(self.cache, held))
        return self.cache.held[-1]

    def export(self, start: int = 0) -> ExportedState:
        """The state as data on the host: rows of all blocks that end after `start`, and a checkpoint of the rest."""
        cache, rows = self.cache, {}
        for ratio, pool in cache.pools.items():
            layers = [key for key in self._compressors() if cache.shape.ratios[key[0]] == ratio]
            parts: dict[tuple[int, str], list[Planes]] = {key: [] for key in layers}
            for pages, page, place in self._spans(ratio, start // ratio, self.length // ratio):
                records = pool.read(pages)
                for layer, kind in layers:
                    planes = [
                        view[page, place].view(spec.dtype)[:, : spec.used].clone()
                        for view, spec in pool.region(records, layer, kind)
                    ]
                    parts[layer, kind].append(tuple(planes))
            for key in layers:
                specs = plane_specs(cache.shape, key[1])
                empty = tuple(torch.zeros((0, spec.used), dtype=spec.dtype) for spec in specs)
                rows[key] = tuple(torch.cat(planes) for planes in zip(*(parts[key] or [empty]), strict=True))
        ordered = {key: rows[key] for key in self._compressors()}
        return ExportedState(start, self.checkpoint(), ordered, (cache.shape, True))

    def import_state(self, exported: ExportedState) -> None:
        """Continue with an exported state. This sequence must hold the first `exported.start` tokens of it."""
        cache, start, end = self.cache, exported.start, exported.checkpoint.length
        if exported.layout != (cache.shape, True):
            raise Ds4Error("the state is one of another model, or of one with other round trips (qat_sim)")
        if self.length < start:
            raise ValueError(f"the rows start at token {start}, but only {self.length} tokens are here")
        if isinstance(exported, ExportedPages):
            self._adopt(exported)
            return
        self._drop_rows(start)
        self.length = start
        self.prepare(end - start)
        for ratio, pool in cache.pools.items():
            done = 0
            for pages, page, place in self._spans(ratio, start // ratio, end // ratio):
                records = pool.read(pages)
                part = slice(done, done + page.shape[0])
                for (layer, kind), packed in exported.rows.items():
                    if cache.shape.ratios[layer] == ratio:
                        for (view, spec), plane in zip(pool.region(records, layer, kind), packed, strict=True):
                            fresh = plane[part].contiguous().view(torch.uint8)
                            view[page, place, : spec.used * spec.dtype.itemsize] = fresh
                pool.write(pages, records)
                done = part.stop
        self.length = end
        self.restore(exported.checkpoint)

    def _adopt(self, exported: ExportedPages) -> None:
        if exported.pages.cache is not self.cache:
            raise Ds4Error("the state came into the memory of another device")
        self._drop_rows(0)
        for ratio, pages in exported.pages.take().items():
            self._pages[ratio] += pages
            self._write_table(ratio)
        self.length = exported.checkpoint.length
        self.restore(exported.checkpoint)

    @property
    def nbytes(self) -> int:
        """Bytes of this state, shared pages counted whole."""
        rings = (*self.cache.window, *self.cache._rings.values())
        own = sum(ring.numel() * ring.element_size() // self.cache.slots for ring in rings)
        return own + sum(len(pages) * self.cache.pools[ratio].page_bytes for ratio, pages in self._pages.items())
