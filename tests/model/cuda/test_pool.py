"""The device's KV memory against `SequenceState`: the same operations leave the same packed contents."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from ds4.errors import Ds4Error
from ds4.gguf.shape import FLASH, PRO, Shape
from ds4.model.cache import PAGE_ROWS, Checkpoint, ExportedState, KVCache, SequenceState
from ds4.model.cuda.pool import DeviceCache, DeviceState, PagePool, plane_specs
from tests.helpers import SMALL

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def device_cache(slots: int = 4, context: int = 4096, device: str = "cpu", **options: Any) -> DeviceCache:
    return DeviceCache(SMALL, device, slots, context, **options)


class Pair:
    """A state here and one there, which take the same rows."""

    def __init__(self, here: SequenceState, there: DeviceState) -> None:
        self.here, self.there = here, there

    def step(self, tokens: int, seed: int) -> None:
        """What a step of that many tokens stores in every layer."""
        generator = torch.Generator().manual_seed(seed)
        here, there, cache = self.here, self.there, self.there.cache
        here.prepare(tokens)
        there.prepare(tokens)
        start, end = here.length, here.length + tokens
        for layer in range(SMALL.layers):
            packed = here.cache.row_format.pack(torch.randn(tokens, SMALL.head_dim, generator=generator))
            here.window(layer, packed)
            kept = torch.arange(max(start, end - cache.window_ring), end)
            for ring, plane in zip(cache.window_planes(layer), packed, strict=True):
                ring[there.slot, kept % cache.window_ring, : plane.shape[1]] = plane[kept - start].to(ring.device)
            for kind, width in cache.kinds(layer).items():
                ratio = SMALL.ratios[layer]
                ring = cache.frontier(layer, kind)[there.slot]
                k, z = torch.randn(2, tokens, ring.shape[2], generator=generator)
                here.complete_blocks(layer, kind, k, z)
                kept = torch.arange(max(start, end - ring.shape[1]), end)
                ring[:, kept % ring.shape[1]] = torch.stack((k, z))[:, kept - start].to(ring.device)
                first, last = start // ratio, end // ratio
                if last > first:
                    rows = torch.randn(last - first, width, generator=generator)
                    here.append(layer, kind, first, rows)
                    self._append(layer, kind, first, here.cache.pools[ratio].formats[kind].pack(rows))
        here.advance(tokens)
        there.advance(tokens)

    def _append(self, layer: int, kind: str, row: int, packed: tuple[torch.Tensor, ...]) -> None:
        """Write as a kernel does: through the table on the device, one row after the other."""
        cache, ratio = self.there.cache, SMALL.ratios[layer]
        for i in range(packed[0].shape[0]):
            page = int(cache.tables[ratio][self.there.slot, (row + i) // PAGE_ROWS])
            record = cache.pools[ratio].read([page])
            for (view, _), plane in zip(cache.pools[ratio].region(record, layer, kind), packed, strict=True):
                fresh = plane[i].contiguous().view(torch.uint8)
                view[0, (row + i) % PAGE_ROWS, : fresh.shape[0]] = fresh
            cache.pools[ratio].write([page], record)

    def fork(self) -> Pair:
        return Pair(self.here.fork(), self.there.fork())

    def check(self) -> None:
        assert (self.here.length, self.here.floor) == (self.there.length, self.there.floor)
        for length in range(self.here.length + 1):
            assert self.here.can_truncate(length) == self.there.can_truncate(length)
        if self.here.can_truncate(self.here.length):
            check_equal(self.here.export(), self.there.export())


def check_equal(a: ExportedState, b: ExportedState) -> None:
    assert a.start == b.start
    assert a.layout == b.layout
    assert a.rows.keys() == b.rows.keys()
    check_checkpoints(a.checkpoint, b.checkpoint)
    for key in a.rows:
        for x, y in zip(a.rows[key], b.rows[key], strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def check_checkpoints(a: Checkpoint, b: Checkpoint) -> None:
    assert a.length == b.length
    assert a.frontier.keys() == b.frontier.keys()
    for x, y in zip([*a.window, *a.frontier.values()], [*b.window, *b.frontier.values()], strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert a.nbytes == b.nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_any_history_leaves_what_the_reference_has(seed: int, device: str) -> None:
    choose = random.Random(seed)
    here, there = KVCache(SMALL, True), device_cache(device=device)
    pairs = [Pair(here.new_state(), there.new_state())]
    kept: list[tuple[int, Checkpoint, Checkpoint]] = []  # of the first pair
    for turn in range(40):
        pair = choose.choice(pairs)
        what = choose.choice(["step", "step", "step", "token", "truncate", "fork", "checkpoint", "restore", "release"])
        if what == "step":
            pair.step(choose.randint(1, 90), turn)
        elif what == "token":
            pair.step(1, turn)
        elif what == "truncate":
            length = max(pair.here.floor, pair.here.length - choose.randint(0, 17))
            if pair.here.can_truncate(length):
                pair.here.truncate(length)
                pair.there.truncate(length)
                kept = [k for k in kept if pair is not pairs[0] or k[0] <= length]
        elif what == "fork" and len(pairs) < 4:
            pairs.append(pair.fork())
        elif what == "checkpoint" and pair is pairs[0] and pair.here.can_truncate(pair.here.length):
            a, b = pair.here.checkpoint(), pair.there.checkpoint()
            check_checkpoints(a, b)
            kept.append((a.length, a, b))
        elif what == "restore" and kept and pair is pairs[0]:
            n, a, b = choose.choice(kept)
            pair.here.restore(a)
            pair.there.restore(choose.choice([a, b]))
            kept = [k for k in kept if k[0] <= n]
        elif what == "release" and len(pairs) > 1 and pair is not pairs[0]:
            pair.here.release()
            pair.there.release()
            pairs.remove(pair)
        for other in pairs:
            other.check()
        for ratio, pool in there.pools.items():
            assert pool.used_pages == here.pools[ratio].used_pages
    for pair in pairs:
        pair.there.release()
    assert there.free_slots == 4
    assert all(pool.used_pages == 0 for pool in there.pools.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 77, 256])
def test_states_move_in_both_directions(start: int, device: str) -> None:
    here, there = KVCache(SMALL, True), device_cache(device=device)
    pair = Pair(here.new_state(), there.new_state())
    pair.step(300, 1)
    other = pair.fork()
    pair.step(1100, 2)
    exported = pair.here.export(start)
    check_equal(exported, pair.there.export(start))
    # Onto a state that shares the first tokens, from each side to the other.
    other.there.import_state(exported)
    other.here.import_state(pair.there.export(start))
    other.check()
    check_equal(other.here.export(), pair.there.export())
    pair.check()  # whose pages were shared
    if start == 0:
        fresh = Pair(here.new_state(), there.new_state())
        fresh.there.import_state(exported)
        fresh.here.import_state(exported)
        fresh.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_finds_every_page_from_one_address(device: str) -> None:
    pool = PagePool([0, 1], {"rows": plane_specs(SMALL, "rows")}, device, 20)
    pages = [pool.allocate() for _ in range(20)]
    assert sorted(pages) == list(range(20))
    with pytest.raises(Ds4Error, match="all 20 pages of 64 rows are in use"):
        pool.allocate()
    records = torch.randint(0, 256, (20, pool.page_bytes), dtype=torch.uint8)
    pool.write(pages, records)
    assert torch.equal(pool.read(pages), records)
    for layer in (0, 1):
        for plane, (codes, spec) in zip(pool.planes(layer, "rows"), pool.region(records, layer, "rows"), strict=True):
            assert plane.untyped_storage().data_ptr() == pool._records.data_ptr()
            assert plane.shape == (20, PAGE_ROWS, spec.width)
            assert torch.equal(plane[pages].contiguous().view(torch.uint8).cpu(), codes)
    pool.release(pages)
    assert pool.used_pages == 0
    assert pool.nbytes == 20 * pool.page_bytes


def test_limits_of_pool_slots_and_context() -> None:
    cache = device_cache(slots=2, context=2000, limits={4: 5, 16: 5})
    state = cache.new_state()
    state.prepare(5 * 64 * 4)
    with pytest.raises(Ds4Error, match="all 5 pages of 64 rows are in use"):
        state.prepare(5 * 64 * 4 + 4)
    with pytest.raises(Ds4Error, match="a sequence of 2001 tokens does not fit 2000"):
        state.prepare(2001)
    other = cache.new_state()
    with pytest.raises(Ds4Error, match="all 2 sequences that this device has room for are in use"):
        cache.new_state()
    state.release()
    other.prepare(5 * 64 * 4)
    assert cache.free_slots == 1
    del other
    gc.collect()
    assert cache.free_slots == 2
    assert cache.pools[4].used_pages == 0


def test_a_table_holds_the_pages_that_there_was_room_for() -> None:
    cache = device_cache(slots=1, context=4000, limits={4: 3})
    state = cache.new_state()
    with pytest.raises(Ds4Error):
        state.prepare(4000)
    state.prepare(3 * 64 * 4)
    assert cache.tables[4][0, :3].tolist() == state._pages[4]


def test_refusals_of_states() -> None:
    cache = device_cache()
    state = cache.new_state()
    state.prepare(100)
    state.advance(100)
    with pytest.raises(ValueError, match="cannot cut a sequence of 100 tokens to 82"):
        state.truncate(82)
    with pytest.raises(ValueError, match="no state of 30 tokens any more"):
        state.checkpoint(length=30)
    with pytest.raises(ValueError, match="start at token 100, but only 0 tokens are here"):
        cache.new_state().import_state(state.export(100))
    plain = KVCache(SMALL, False).new_state()
    with pytest.raises(Ds4Error, match="other round trips"):
        state.import_state(plain.export())
    state.spoil()
    assert not state.can_truncate(100)


@pytest.mark.parametrize(("shape", "expected"), [(FLASH, 3.6e9), (PRO, 5.2e9)])
def test_bytes_at_a_million_tokens(shape: Shape, expected: float) -> None:
    """3.43 GiB of Flash, and the byte that pads a row."""
    total = 0.0
    for ratio in {r for r in shape.ratios if r}:
        layers = [i for i, r in enumerate(shape.ratios) if r == ratio]
        kinds = {"rows": plane_specs(shape, "rows")}
        if ratio == shape.sparse_ratio:
            kinds["keys"] = plane_specs(shape, "keys")
        row = sum(spec.nbytes for specs in kinds.values() for spec in specs)
        total += row * len(layers) * (1 << 20) / ratio
    assert total == pytest.approx(expected, rel=0.03)
