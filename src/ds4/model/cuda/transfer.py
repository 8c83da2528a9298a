"""Compressed rows on their way between the pages of a device and files, without holding up its steps.

Rows travel through lanes: a few MiB of pinned memory, as much on the device, and a stream of its own. On the way out
the pages of a snapshot are gathered on the lane's stream, behind the event of the snapshot, while steps go on on
theirs; on the way in what was read into pinned memory is copied and scattered into fresh pages. Memory is taken once,
as taking pinned memory halts a device. On the CPU the same is done with plain copies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds4.errors import Ds4Error
from ds4.model.cache import PAGE_ROWS, Checkpoint, ExportedState, PlaneKey

if TYPE_CHECKING:
    from ds4.model.cuda.pool import DeviceCache, PagePool

MOST_LANES = 8
LANES = min(MOST_LANES, os.cpu_count() or 1)
LANE_BYTES = 4 << 20


class Lane:
    """A way between pinned memory and a device.

    Attributes:
        host, device: its buffers, uint8 [size].
    """

    def __init__(self, device: torch.device, size: int, launching: threading.Lock) -> None:
        # Threads that all make short calls hand the interpreter to and fro, which takes longer than the calls.
        self._launching = launching
        on_card = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=on_card)
        self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if on_card else None

    @contextlib.contextmanager
    def _behind(self, event: Any) -> Iterator[None]:
        """Work of this thread goes to the lane's stream, behind an event, and is done at the end."""
        if self._stream is None:
            yield
            return
        with self._launching, torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield
        self._stream.synchronize()

    def fetch(self, strip: Tensor, pages: Sequence[int], event: Any) -> Tensor:
        """Gather pages of a strip, int64 [pages, width], into the pinned buffer: uint8 [bytes]."""
        size = len(pages) * strip.shape[1] * 8
        with self._behind(event):
            gathered = self.device[:size].view(torch.int64).view(len(pages), -1)
            torch.index_select(strip, 0, _index(pages, strip.device), out=gathered)
            self.host[:size].copy_(self.device[:size], non_blocking=True)
        return self.host[:size]

    def send(self, planes: Tensor, pages: Tensor, event: Any) -> None:
        """Scatter the pinned buffer into pages of a plane of some layers.

        Args:
            planes: uint8 [pages of the pool, layers, 64, bytes]; the buffer holds [layers, pages, 64, bytes].
            pages: int64, on the device.
        """
        _, layers, rows, width = planes.shape
        size = len(pages) * layers * rows * width
        with self._behind(event):
            self.device[:size].copy_(self.host[:size], non_blocking=True)
            fresh = self.device[:size].view(layers, len(pages), rows, width)
            planes.index_copy_(0, pages, fresh.transpose(0, 1))


def _index(pages: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64).to(device)


class Lanes:
    """The lanes of a device; who needs one waits until one is free.

    Attributes:
        size, nbytes: bytes of a buffer, and of those of all lanes, on the host as on the device.
    """

    def __init__(self, device: torch.device, count: int = LANES, size: int = LANE_BYTES) -> None:
        self.size, self.nbytes = size, count * size
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        launching = threading.Lock()
        for _ in range(count):
            self._free.put(Lane(device, size, launching))

    @contextlib.contextmanager
    def one(self) -> Iterator[Lane]:
        """A lane that nobody else uses meanwhile."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def pages(self, row_bytes: int) -> int:
        """Pages of such rows that go through a lane at once."""
        return self.size // (PAGE_ROWS * row_bytes)


def now(device: torch.device) -> Any:
    """An event behind all that this thread has launched; None on the CPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


class HeldPages:
    """The pages of a sequence as they were when `DeviceState.hold` was called, whatever becomes of it.

    `pieces` may be called from any thread: pages that more than one holds are not written to. All else is for the
    thread that steps. It takes the pages back (`revoke`) if they are all that it can go on with; then the rows that
    were not read yet are lost.
    """

    def __init__(self, cache: DeviceCache, pages: dict[int, list[int]]) -> None:
        self._cache, self._pages = cache, pages
        self._lock = threading.Lock()
        self._revoked = False
        self._taken = now(cache.device)

    def pieces(self, layer: int, kind: str, plane: int, first: int, end: int) -> Generator[Tensor, None, None]:
        """Rows first .. end - 1 of a plane, [rows, width] in pieces, each to be used before the next is taken.

        Raises:
            Ds4Error: the pages were taken back.
        """
        if first >= end:
            return
        cache, ratio = self._cache, self._cache.shape.ratios[layer]
        pool, lanes = cache.pools[ratio], cache.lanes
        spec, strip = pool.spec(layer, kind, plane), pool.strip(layer, kind, plane)
        most = lanes.pages(spec.nbytes)
        with lanes.one() as lane:
            for at in range(first // PAGE_ROWS, -(-end // PAGE_ROWS), most):
                with self._lock:
                    if self._revoked:
                        raise Ds4Error("the pages of the state were needed by another conversation")
                    pages = self._pages[ratio][at : min(at + most, -(-end // PAGE_ROWS))]
                    fetched = lane.fetch(strip, pages, self._taken)
                rows = fetched.view(spec.dtype).view(-1, spec.width)
                begin = at * PAGE_ROWS
                yield rows[max(first - begin, 0) : end - begin, : spec.used]

    def release(self) -> None:
        """Give the pages back; nothing can be read any more."""
        if self in self._cache.held:
            self._cache.held.remove(self)
            _release(self._cache.pools, self._pages)

    def revoke(self) -> None:
        """As `release`, while another thread may be reading."""
        with self._lock:
            self._revoked = True
            self.release()


def _release(pools: dict[int, PagePool], held: dict[int, list[int]]) -> None:
    for ratio, pages in held.items():
        pools[ratio].release(pages)
        pages.clear()


class ReceivedPages:
    """Fresh pages for the rows of a state that comes from elsewhere, as its bytes arrive.

    Made by the thread that steps. Other threads may fill different bundles.
    """

    def __init__(self, cache: DeviceCache, length: int) -> None:
        self.cache, self._length = cache, length
        self.held: dict[int, list[int]] = {ratio: [] for ratio in cache.pools}
        self._finalizer = weakref.finalize(self, _release, cache.pools, self.held)
        self._finalizer.atexit = False
        if length > cache.context:
            raise Ds4Error(f"a sequence of {length} tokens does not fit {cache.context}")
        for ratio, pages in self.held.items():
            for _ in range(-(-(length // ratio) // PAGE_ROWS)):
                pages.append(cache.pools[ratio].allocate())
        self._indices = {ratio: _index(pages, cache.device) for ratio, pages in self.held.items()}
        # Whoever had the pages before may still be at work in them.
        self._taken = now(cache.device)

    def bundles(self) -> Iterator[tuple[tuple[PlaneKey, ...], Callable[[], Generator[Tensor, None, None]]]]:
        """See `ds4.engine.packing.Receiver`: a bundle is one plane of as many layers as go through a lane at once.

        Each call for the device costs as much as some hundred KiB, and the planes of short states are small.
        """
        for ratio, pool in self.cache.pools.items():
            for kind, plane, spec in pool.plane_kinds():
                whole = len(self._indices[ratio]) * PAGE_ROWS * spec.used * spec.dtype.itemsize
                most = max(1, self.cache.lanes.size // whole) if whole else len(pool.layers)
                for first in range(0, len(pool.layers), most):
                    layers = pool.layers[first : first + most]
                    yield tuple((i, kind, plane) for i in layers), partial(self._pieces, ratio, layers, kind, plane)

    def _pieces(self, ratio: int, layers: Sequence[int], kind: str, plane: int) -> Generator[Tensor, None, None]:
        """Where the rows of a plane of some layers go; of several layers all of it goes through a lane at once."""
        pool, lanes, pages = self.cache.pools[ratio], self.cache.lanes, self._indices[ratio]
        spec, rows = pool.spec(layers[0], kind, plane), self._length // ratio
        used = spec.used * spec.dtype.itemsize
        target, most = pool.raw(layers, kind, plane)[..., :used], lanes.pages(used)
        with lanes.one() as lane:
            for at in range(0, len(pages), most):
                some = pages[at : at + most]
                count = min(rows - at * PAGE_ROWS, len(some) * PAGE_ROWS)
                host = lane.host[: len(layers) * len(some) * PAGE_ROWS * used].view(len(layers), -1)
                # What nobody reads must be no garbage: a weight of 0 does not help against what is no number.
                host[:, count * used :].zero_()
                for row in host:
                    yield row[: count * used].view(spec.dtype).view(count, spec.used)
                lane.send(target, some, self._taken)

    def exported(self, checkpoint: Checkpoint) -> ExportedPages:
        """The whole state, once all rows are there."""
        return ExportedPages(0, checkpoint, {}, (self.cache.shape, True), self)

    def release(self) -> None:
        """It is not going to be used; for the thread that steps."""
        self._finalizer()

    def take(self) -> dict[int, list[int]]:
        """The pages, which are the caller's from now on."""
        pages = {ratio: list(some) for ratio, some in self.held.items()}
        self._finalizer.detach()
        return pages


@dataclass(frozen=True)
class ExportedPages(ExportedState):
    """A state whose rows are in pages of a device already; it can be imported once, by a sequence of that device."""

    pages: ReceivedPages
