"""States in a directory: bit-equal when they come back, found by their text, never more than the budget, no crash."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds4.engine import EngineConfig
from ds4.engine.packing import ModelCodec, fingerprint
from ds4.errors import Ds4Error
from ds4.gguf.file import Identity
from ds4.kvstore.container import Reason, StoredCall, ToolTurn, file_name
from ds4.kvstore.disk import INDEX_NAME, Files, read_exactly
from ds4.kvstore.reading import Entry, verify
from ds4.kvstore.store import Store
from tests.engine.session_helpers import tokens
from tests.helpers import SMALL, random_engine
from tests.kvstore.helpers import Killed, MortalFiles, key_of, open_store, restore, save

ENGINE = random_engine(config=EngineConfig(prefill_chunk=64, checkpoint_interval=64))
LENGTHS = [1, 3, 4, 15, 16, 17, 31, 33, 127, 128, 129, 511, 512]


def test_a_restored_state_goes_on_bit_equal(tmp_path: Path) -> None:
    ids = tokens(600)
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    saved = {}
    for n in LENGTHS:
        session.sync(ids[:n])
        saved[n] = save(store, session)
    store.close()

    other = open_store(tmp_path, random_engine())
    for n, entry in saved.items():
        assert entry is not None
        again = restore(other, ENGINE, entry)
        assert again.tokens == ids[:n]
        live = ENGINE.session()
        live.sync(ids[:n])
        assert torch.equal(again.logits, live.logits)
        for step in ids[n : n + 20]:
            assert torch.equal(again.step(step), live.step(step))


@pytest.mark.parametrize("pending", range(16))
def test_every_remainder_of_the_frontiers(tmp_path: Path, pending: int) -> None:
    ids = tokens(100, seed=pending)
    session, live = ENGINE.session(), ENGINE.session()
    session.sync(ids[: 48 + pending])
    live.sync(ids)
    store = open_store(tmp_path, ENGINE)
    entry = save(store, session)
    assert entry is not None
    again = restore(store, ENGINE, entry)
    again.sync(ids)
    assert again.reused == 48 + pending
    assert torch.equal(again.logits, live.logits)


def test_segments_hold_only_what_is_new(tmp_path: Path) -> None:
    ids = tokens(1200, seed=2)
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    parent, entries = None, []
    for n in range(200, 1201, 200):
        session.sync(ids[:n])
        parent = save(store, session, parent)
        assert parent is not None
        entries.append(parent)
    assert [entry.start for entry in entries] == [0, 200, 400, 600, 800, 1000]
    assert [entry.parent for entry in entries[1:]] == [entry.name for entry in entries[:-1]]
    whole = open_store(tmp_path / "whole", ENGINE)
    last = save(whole, session)
    assert last is not None
    assert entries[-1].size < last.size / 2
    again = restore(store, ENGINE, entries[-1])
    assert torch.equal(again.logits, session.logits)
    assert torch.equal(again.step(5), session.step(5))


def test_a_chain_that_would_be_too_long_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.kvstore.store.MAX_CHAIN", 3)
    store, session, parent, starts = open_store(tmp_path, ENGINE), ENGINE.session(), None, []
    for n in range(20, 101, 20):
        session.sync(tokens(n))
        parent = save(store, session, parent)
        assert parent is not None
        assert store.usable(parent)
        starts.append(parent.start)
    assert starts == [0, 20, 40, 0, 80]


def test_a_state_whose_parent_leaves_while_it_is_written_is_written_whole(tmp_path: Path) -> None:
    class Files2(Files):
        """Somebody deletes the parent when the first byte is written."""

        def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
            if gone:
                (tmp_path / gone.pop()).unlink()
            super().write(fd, data, offset)

    gone: list[str] = []
    store, session = open_store(tmp_path, ENGINE, files=Files2(tmp_path)), ENGINE.session()
    session.sync(tokens(50))
    parent = save(store, session)
    assert parent is not None
    gone.append(parent.name)
    session.sync(tokens(90))
    entry = save(store, session, parent)
    assert entry is not None
    assert entry.start == 0
    assert torch.equal(restore(store, ENGINE, entry).logits, session.logits)
    assert not list(tmp_path.glob("*.tmp.*"))


def test_a_state_at_an_earlier_checkpoint_can_be_stored(tmp_path: Path) -> None:
    ids = tokens(300, seed=4)
    session, live = ENGINE.session(), ENGINE.session()
    session.sync(ids)
    store = open_store(tmp_path, ENGINE)
    entry = save(store, session, length=192)
    assert entry is not None
    again = restore(store, ENGINE, entry)
    again.sync(ids[:250])
    live.sync(ids[:250])
    assert again.reused == 192
    assert torch.equal(again.logits, live.logits)


def test_a_snapshot_stays_while_its_session_goes_on(tmp_path: Path) -> None:
    ids = tokens(300, seed=5)
    session = ENGINE.session()
    session.sync(ids[:101])
    snapshot = session.snapshot()
    expected = session.logits.clone()
    before = sum(pool.used_pages for pool in session.state.cache.pools.values())
    session.sync(ids)
    session.rewind(64)
    session.sync([*ids[:64], *tokens(300, seed=6)])
    codec = ModelCodec(ENGINE)
    parts = {part.key: b"".join(bytes(piece) for piece in part.pieces()) for part in codec.parts(snapshot, 0)}
    snapshot.release()
    session.close()
    other = ENGINE.session()
    other.sync(ids[:101])
    fresh = other.snapshot()
    assert parts == {part.key: b"".join(bytes(piece) for piece in part.pieces()) for part in codec.parts(fresh, 0)}
    fresh.release()
    assert torch.equal(other.logits, expected)
    other.close()
    assert sum(pool.used_pages for pool in session.state.cache.pools.values()) <= before


def test_the_longest_prefix_is_found_without_reading_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    session.sync(tokens(5))
    rng = random.Random(3)
    base = bytes(rng.randrange(256) for _ in range(400))
    for n in range(1, 200):
        assert save(store, session, key=base[:n] + b"x" * (n % 3))
    monkeypatch.setattr(os, "open", None)
    found = store.lookup(base)
    assert [entry.key_bytes for entry in found] == [n for n in range(198, 0, -1) if n % 3 == 0]
    assert store.lookup(b"nothing") == []
    assert store.lookup(b"") == []


def test_a_lost_or_damaged_index_is_made_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    for n in (10, 20, 30):
        session.sync(tokens(n))
        save(store, session)
    names = {entry.name for entry in store.entries()}
    for damage in (b"", b"no database", os.urandom(5000)):
        (tmp_path / INDEX_NAME).write_bytes(damage)
        assert {entry.name for entry in open_store(tmp_path, ENGINE).entries()} == names
    (tmp_path / INDEX_NAME).unlink()
    again = open_store(tmp_path, ENGINE)
    assert {entry.name for entry in again.entries()} == names
    assert len(again.lookup(key_of(tokens(40)))) == 3


def test_the_index_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ENGINE.session()
    session.sync(tokens(10))
    save(open_store(tmp_path, ENGINE), session)
    monkeypatch.setattr(Files, "open", None)
    assert len(open_store(tmp_path, ENGINE).entries()) == 1


def test_uses_are_counted_in_the_file(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE, now=lambda: 1000.0)
    session = ENGINE.session()
    session.sync(tokens(10))
    entry = save(store, session)
    assert entry is not None
    later = open_store(tmp_path, ENGINE, now=lambda: 2000.0)
    later.touch(entry)
    later.touch(entry)
    (tmp_path / INDEX_NAME).unlink()
    (known,) = open_store(tmp_path, ENGINE).entries()
    assert (known.hits, known.created, known.used) == (2, 1000, 2000)
    # The same state again is not written again.
    changed = (tmp_path / entry.name).stat()
    assert save(later, session) is not None
    assert (tmp_path / entry.name).stat().st_ino == changed.st_ino


def test_uses_that_other_processes_count_are_known_when_something_has_to_leave(tmp_path: Path) -> None:
    clock = itertools.count(1000)
    one, two = (open_store(tmp_path, ENGINE, budget=300_000, now=lambda: next(clock)) for _ in range(2))
    session, entries = ENGINE.session(), []
    for seed in range(2):
        session.sync(tokens(150, seed))
        entries.append(save(one, session))
    first, second = entries
    assert first is not None
    assert second is not None
    two.refresh()
    two.touch(first)
    for seed in range(2, 10):
        session.sync(tokens(150, seed))
        save(one, session)
    assert one.get(first.name) is not None
    assert one.get(second.name) is None


def test_a_file_that_took_the_place_of_a_damaged_one_stays(tmp_path: Path) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    session.sync(tokens(50))
    entry = save(store, session)
    assert entry is not None
    path = tmp_path / entry.name
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with store.open_chain(entry) as chain:
        path.unlink()
        path.write_bytes(good)
        with pytest.raises(Ds4Error, match="checksum"):
            store._chains.load(entry, chain, ModelCodec(ENGINE))
    assert path.read_bytes() == good
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(Ds4Error, match="checksum"):
        store.load(entry)
    assert not path.exists()


def test_a_header_that_is_being_written_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ENGINE.session()
    session.sync(tokens(10))
    entry = save(open_store(tmp_path, ENGINE), session)
    assert entry is not None
    looks = []

    def torn(fd: int, size: int, offset: int) -> bytes:
        data = read_exactly(fd, size, offset)
        if offset == 0:
            looks.append(size)
        return data[:14] + b"x" + data[15:] if offset == 0 and len(looks) < 3 else data

    monkeypatch.setattr("ds4.kvstore.reading.read_exactly", torn)
    (tmp_path / INDEX_NAME).unlink()
    store = open_store(tmp_path, ENGINE)
    assert [found.name for found in store.entries()] == [entry.name]
    assert len(looks) == 3


def test_states_of_other_models_are_not_taken(tmp_path: Path) -> None:
    session = ENGINE.session()
    session.sync(tokens(10))
    save(open_store(tmp_path, ENGINE), session)
    other = open_store(tmp_path, random_engine(seed=2))
    assert other.lookup(key_of(tokens(20))) == []
    (entry,) = other.entries()
    with pytest.raises(Ds4Error, match="another model"):
        other.load(entry)
    assert (tmp_path / entry.name).exists()


def test_all_that_changes_values_is_in_the_fingerprint() -> None:
    identity = Identity("a", 2)
    options: list[dict[str, Any]] = [
        {},
        {"identity": Identity("b", 2)},
        {"identity": Identity("a", 4)},
        {"shape": replace(SMALL, index_top_k=8)},
        {"options": ["all"]},
        {"steering": "a vector"},
    ]
    assert len({fingerprint(**{"shape": SMALL, "identity": identity, **some}) for some in options}) == len(options)
    longer = replace(SMALL, context=2 * SMALL.context, name="other")
    assert fingerprint(longer, identity) == fingerprint(SMALL, identity)


def test_only_packed_states_are_stored() -> None:
    with pytest.raises(Ds4Error, match="qat_sim"):
        ModelCodec(random_engine(qat_sim=False))


def test_the_tool_map_and_the_notes_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    session.sync(tokens(10))
    turns = [ToolTurn("block ｜DSML｜", (StoredCall("call_1", "f", "{}"), StoredCall("call_2", "g", '{"a": 1}')))]
    way = ["front", 7, "ab"]
    entry = save(store, session, turns=turns, meta={"note": [1, 2], "ways": [way, "nonsense", [1]]})
    assert entry is not None
    assert entry.tool_map
    assert entry.ways == (("front", 7, "ab"),)
    assert store.reach("front", {7: "ab"}) == [entry]
    assert store.reach("front", {7: "ac"}) == store.reach("other", {7: "ab"}) == []
    stored = store.read(entry)
    assert (stored.turns, stored.meta["note"], stored.tokens) == (turns, [1, 2], tokens(10))
    assert stored.key == key_of(tokens(10))


# ---- the budget ------------------------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    gone: list[Entry] = []
    files = Files(tmp_path)
    clock = iter(range(10_000))
    store = Store(files, ModelCodec(ENGINE), 400_000, now=lambda: float(next(clock)), evicted=gone.append)
    rng = random.Random(1)
    parents: list[Entry | None] = [None]
    session = ENGINE.session()
    most = 0
    for i in range(60):
        session.sync(tokens(rng.randrange(20, 300), seed=rng.randrange(8)))
        entry = save(store, session, rng.choice(parents[-3:]), reason=rng.choice(list(Reason)[1:5]))
        if entry is not None:
            parents.append(entry)
        most = max(most, store.total())
        assert store.total() <= 400_000, i
    assert gone
    assert most > 250_000
    for entry in store.entries():
        assert store.usable(entry), "nothing that others build on leaves before them"


def test_what_does_not_fit_is_not_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE, budget=100_000)
    session = ENGINE.session()
    session.sync(tokens(500))
    assert save(store, session) is None
    assert [path.name for path in tmp_path.iterdir() if ".kv" in path.name] == []


def test_protected_entries_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE, budget=300_000)
    session = ENGINE.session()
    session.sync(tokens(100))
    first = save(store, session)
    assert first is not None
    for seed in range(2, 12):
        session.sync(tokens(100, seed))
        save(store, session, protected=[first.name])
    assert store.get(first.name) is not None


def test_two_stores_share_a_directory(tmp_path: Path) -> None:
    one, two = (open_store(tmp_path, ENGINE, budget=400_000) for _ in range(2))
    session = ENGINE.session()
    for seed in range(20):
        session.sync(tokens(150, seed))
        entry = save((one, two)[seed % 2], session)
        assert entry is not None
        other = (two, one)[seed % 2]
        other.refresh()
        assert other.lookup(key_of(tokens(150, seed))) == [entry]
        assert one.total() <= 400_000


# ---- crashes ---------------------------------------------------------------------------------------------------------


def scenario(store: Store) -> None:
    """Saves, grows, uses and evicts."""
    session = ENGINE.session()
    last = None
    for n in (40, 70, 100):
        session.sync(tokens(n))
        last = save(store, session, last)
        if last is not None:
            store.touch(last)
    for seed in range(1, 5):
        session.sync(tokens(90, seed))
        save(store, session)


def test_a_crash_at_any_moment_loses_at_most_what_was_being_written(tmp_path: Path) -> None:
    whole = MortalFiles(tmp_path / "whole")
    scenario(Store(whole, ModelCodec(ENGINE), 250_000))
    assert whole.done > 150
    rng = random.Random(0)
    for moment in [*range(10), *sorted(rng.sample(range(10, whole.done), 20))]:
        path = tmp_path / str(moment)
        mortal = MortalFiles(path, moment)
        with pytest.raises(Killed):
            scenario(Store(mortal, ModelCodec(ENGINE), 250_000))
        left = {file.name for file in path.iterdir()}
        store = open_store(path, ENGINE, budget=250_000)
        assert store.total() <= 250_000
        assert not store.broken()
        assert not [file.name for file in path.iterdir() if ".tmp." in file.name]
        assert {entry.name for entry in store.entries()} == {name for name in left if name.endswith(".kv")}
        for entry in store.entries():
            verify(store.files, entry.name)
            again = restore(store, ENGINE, entry)
            assert torch.equal(again.logits, fresh(again.tokens))
        scenario(store)
        store.close()


FRESH: dict[tuple[int, ...], torch.Tensor] = {}


def fresh(ids: list[int]) -> torch.Tensor:
    """The logits of a new session."""
    if tuple(ids) not in FRESH:
        session = ENGINE.session()
        session.sync(ids)
        FRESH[tuple(ids)] = session.logits
    return FRESH[tuple(ids)]


def test_temporary_files_of_living_writers_stay(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with files.lock():
        fd, temporary = files.create(file_name(b"x"), 10)
    open_store(tmp_path, ENGINE)
    assert (tmp_path / temporary).exists()
    os.close(fd)
    open_store(tmp_path, ENGINE)
    assert not (tmp_path / temporary).exists()


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_files_never_give_a_wrong_state(tmp_path: Path) -> None:
    store = open_store(tmp_path, ENGINE)
    session = ENGINE.session()
    session.sync(tokens(20))
    first = save(store, session)
    session.sync(tokens(45))
    turns = [ToolTurn("block", (StoredCall("call_1", "f", "{}"),))]
    second = save(store, session, first, turns=turns)
    assert first is not None
    assert second is not None
    store.close()
    good = {name: (tmp_path / name).read_bytes() for name in (first.name, second.name)}
    expected = {20: fresh(tokens(20)), 45: fresh(tokens(45))}
    rng = random.Random(7)
    rejected = 0
    for i in range(300):
        path = tmp_path / str(i)
        path.mkdir(mode=0o700)
        victim = rng.choice(sorted(good))
        for name, data in good.items():
            (path / name).write_bytes(mutated(rng, data) if name == victim else data)
        hurt = open_store(path, ENGINE)
        found = hurt.lookup(key_of(tokens(60)))
        for entry in found:
            try:
                again = restore(hurt, ENGINE, entry)
            except Ds4Error:
                rejected += 1
                continue
            assert again.tokens == tokens(len(again.tokens))
            assert torch.equal(again.logits, expected[len(again.tokens)])
        rejected += len(hurt.broken())
        with pytest.raises(Ds4Error):
            verify(hurt.files, victim if (path / victim).exists() else "gone.kv")
        hurt.close()
    assert rejected >= 300


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A file with one thing wrong."""
    kind = rng.randrange(5)
    at = rng.randrange(len(data)) if rng.random() < 0.7 else rng.randrange(min(len(data), 400))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 50))
    out = bytearray(data)
    if kind == 2:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        other = rng.randrange(len(data))
        out[at], out[other] = out[other], out[at]
        if bytes(out) == data:
            out[at] ^= 255
    else:
        size = rng.randrange(1, 64)
        piece = bytes(byte ^ rng.randrange(1, 256) for byte in out[at : at + size])
        out[at : at + size] = piece
    return bytes(out)


def test_the_shape_of_the_tests_has_every_kind_of_layer() -> None:
    assert {0, 4, 16} == set(SMALL.ratios)
