"""Rows that leave a device for files and come back, while sequences go on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds4.engine import Snapshot
from ds4.engine.packing import Receiver, fingerprint, pack, target
from ds4.errors import Ds4Error
from ds4.gguf.file import Identity
from ds4.kvstore.container import Reason
from ds4.kvstore.disk import Files
from ds4.kvstore.reading import Entry
from ds4.kvstore.store import NewState, Store
from ds4.model.cache import KVCache
from ds4.model.cuda.pool import DeviceCache, DeviceState, plane_specs
from ds4.model.cuda.transfer import Lanes
from tests.helpers import SMALL
from tests.model.cuda.test_pool import Pair, check_equal, device_cache

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SMALL_LANE = 3 * 64 * 64  # three pages of the widest plane
IDENTITY = Identity("test")


class Codec:
    """States of the shape SMALL, received by one cache or another."""

    quant_bits = 0
    fingerprint = fingerprint(SMALL, IDENTITY)

    def __init__(self, receive: Callable[[int], Receiver]) -> None:
        self._receive = receive

    def of(self, engine: Any) -> Codec:
        return self

    def parts(self, snapshot: Snapshot, start: int) -> Any:
        return pack(SMALL, snapshot, start)

    def target(self, segments: Any) -> Any:
        return target(SMALL, segments, self._receive)


def pair_of(device: str, **options: Any) -> Pair:
    cache = device_cache(device=device, **options)
    cache.lanes = Lanes(cache.device, 2, SMALL_LANE)
    return Pair(KVCache(SMALL, True).new_state(), cache.new_state())


def snapshot(state: Any, logits: torch.Tensor | None = None) -> Snapshot:
    return Snapshot(tuple(range(state.length)), state.checkpoint(logits), state.hold(state.length))


def bytes_of(held: Snapshot, start: int = 0) -> dict[Any, bytes]:
    """What would be written."""
    return {part.key: b"".join(bytes(piece) for piece in part.pieces()) for part in pack(SMALL, held, start)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "start"), [(1, 0), (3, 0), (4, 0), (255, 0), (257, 100), (1090, 0), (1090, 1089), (1500, 777)]
)
def test_both_write_the_same_bytes(device: str, tokens: int, start: int) -> None:
    pair = pair_of(device)
    pair.step(tokens, 1)
    here, there = snapshot(pair.here), snapshot(pair.there)
    assert bytes_of(here, start) == bytes_of(there, start)
    here.release()
    there.release()
    pair.check()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_held_stays_as_it_was(device: str) -> None:
    pair = pair_of(device)
    pair.step(333, 1)
    held = snapshot(pair.there)
    expected = bytes_of(held)
    kept = pair.there.checkpoint()
    pair.step(90, 2)
    pair.there.restore(kept)
    pair.here.restore(kept)
    pair.step(500, 3)
    assert bytes_of(held) == expected
    pair.there.release()
    again = pair.there.cache.new_state()
    again.prepare(2000)
    assert bytes_of(held) == expected
    again.release()
    held.release()
    held.release()
    assert all(pool.used_pages == 0 for pool in pair.there.cache.pools.values())


def store_of(path: Path, receive: Callable[[int], Receiver], **options: Any) -> Store:
    return Store(Files(path), Codec(receive), **options)


def save(store: Store, state: Any, parent: Entry | None = None) -> Entry | None:
    held, codec = snapshot(state, torch.zeros(SMALL.vocab)), store.codec
    assert codec is not None
    try:
        key = b"t" * state.length
        return store.put(NewState(key, held.tokens, partial(codec.parts, held), Reason.COLD, parent))
    finally:
        held.release()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[1], [3, 4], [64 * 4], [700, 701, 1500], [1024, 2048, 2100]])
def test_states_come_back_from_segments(
    device: str, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4.kvstore.chains._ONE_THREAD_BYTES", 0)
    pair, parent = pair_of(device), None
    store = store_of(tmp_path, pair.there.cache.receive)
    for n in lengths:
        pair.step(n - pair.here.length, n)
        parent = save(store, pair.there, parent)
        assert parent is not None
    _, exported = store.load(parent)
    other = pair.there.cache.new_state()
    other.prepare(500)
    other.advance(500)
    other.import_state(exported)
    again = Pair(pair.here.fork(), other)
    check_equal(pair.here.export(), other.export())
    again.here.floor = again.there.floor  # a state from a file has no past
    again.step(130, 5)
    again.check()
    # The CPU reads the same file.
    plain = KVCache(SMALL, True)
    _, exported = store_of(tmp_path, plain.receive).load(parent)
    back = plain.new_state()
    back.import_state(exported)
    check_equal(back.export(), pair.there.export())


@pytest.mark.parametrize("tokens", [0, 3, 256, 1500])
def test_small_planes_share_a_way(tokens: int) -> None:
    cache = pair_of("cpu").there.cache
    bundles = [planes for planes, _ in cache.receive(tokens).bundles()]
    planes = sorted(plane for bundle in bundles for plane in bundle)
    assert planes == sorted(
        (layer, kind, plane)
        for layer in cache.layers
        for kind in cache.kinds(layer)
        for plane in range(len(plane_specs(SMALL, kind)))
    )
    for bundle in bundles:
        assert len({(SMALL.ratios[layer], kind, plane) for layer, kind, plane in bundle}) == 1
    assert len(bundles) < len(planes)
    assert max(map(len, bundles)) > 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_that_fails_leaves_nothing(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.kvstore.chains._ONE_THREAD_BYTES", 0)
    pair = pair_of(device)
    pair.step(1500, 1)
    store = store_of(tmp_path, pair.there.cache.receive)
    entry = save(store, pair.there)
    assert entry is not None
    used = [pool.used_pages for pool in pair.there.cache.pools.values()]
    _, exported = store.load(entry)
    del exported  # nobody wants it
    path = tmp_path / entry.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    gc.disable()  # what is given back has to be at once: who needs a lane waits
    try:
        with pytest.raises(Ds4Error, match="checksum") as kept:
            store.load(entry)
        assert lanes_free(pair) == 2
    finally:
        gc.enable()
    del kept
    gc.collect()
    assert [pool.used_pages for pool in pair.there.cache.pools.values()] == used
    assert lanes_free(pair) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_that_fails_leaves_nothing(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(device)
    pair.step(1500, 1)
    store = store_of(tmp_path, pair.there.cache.receive)
    written, write = [], Files.write

    def fail(self: Files, fd: int, data: memoryview, at: int) -> None:
        written.append(len(data))
        if len(written) > 4:
            raise OSError(28, "No space left on device")
        write(self, fd, data, at)

    monkeypatch.setattr(Files, "write", fail)
    gc.disable()
    try:
        with contextlib.suppress(OSError, Ds4Error):
            save(store, pair.there)
        assert len(written) > 4
        assert lanes_free(pair) == 2
    finally:
        gc.enable()


def lanes_free(pair: Pair) -> int:
    return int(pair.there.cache.lanes._free.qsize())


def full(device: str = "cpu") -> tuple[DeviceCache, DeviceState]:
    """A cache with room for 10 pages of the ratio 4, of which a sequence has 6."""
    cache = device_cache(slots=3, device=device, limits={4: 10})
    state = cache.new_state()
    state.prepare(64 * 4 * 5 + 40)
    state.advance(64 * 4 * 5 + 40)
    return cache, state


@pytest.mark.parametrize("device", DEVICES)
def test_a_conversation_goes_before_a_file(device: str) -> None:
    cache, state = full(device)
    held = snapshot(state)
    state.release()
    other = cache.new_state()
    pieces = held.rows.pieces(1, "rows", 0, 0, 300)
    next(pieces)
    other.prepare(64 * 4 * 8)  # more than are free
    assert cache.pools[4].used_pages == 8
    with pytest.raises(Ds4Error, match="needed by another conversation"):
        bytes_of(held)
    held.release()
    other.release()
    assert cache.pools[4].used_pages == 0


def test_a_page_that_only_a_file_shares_needs_no_copy() -> None:
    cache, state = full()
    held = snapshot(state)
    other = cache.new_state()
    other.prepare(64 * 4 * 4)  # all that is free
    last = state._pages[4][-1]
    state.prepare(8)
    assert state._pages[4][-1] == last
    assert cache.held == []
    held.release()


def test_without_room_a_state_is_not_received_and_the_file_stays(tmp_path: Path) -> None:
    cache, state = full()
    store = store_of(tmp_path, cache.receive)
    entry = save(store, state)
    assert entry is not None
    with pytest.raises(Ds4Error, match="the KV pool is full"):
        store.load(entry)
    assert (tmp_path / entry.name).exists()
    assert cache.pools[4].used_pages == 6
    with pytest.raises(Ds4Error, match="does not fit"):
        cache.receive(5000)


def test_received_states_go_where_they_are() -> None:
    cache, state = full()
    received = cache.receive(100).exported(state.checkpoint())
    with pytest.raises(Ds4Error, match="another device"):
        device_cache().new_state().import_state(received)
    with pytest.raises(Ds4Error, match="in the memory of a device"):
        KVCache(SMALL, True).new_state().import_state(received)
