"""What may happen to a directory of states, its disk and its clock; and who may look into it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from ds4.engine import EngineConfig
from ds4.errors import Ds4Error
from ds4.kvstore.disk import INDEX_NAME, LOCK_NAME, Files
from ds4.kvstore.index import Index
from ds4.kvstore.reading import MAX_META_BYTES
from tests.engine.session_helpers import tokens
from tests.helpers import random_engine
from tests.kvstore.helpers import key_of, open_store, restore, save

ENGINE = random_engine(config=EngineConfig(prefill_chunk=64, checkpoint_interval=64))


# ---- what may happen to a directory and its disk ---------------------------------------------------------------------


def test_a_directory_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    store, session = open_store(tmp_path / "a", ENGINE), ENGINE.session()
    for n in (10, 20):
        session.sync(tokens(n))
        assert save(store, session)
        assert [entry.tokens for entry in store.entries()] == [n]
        shutil.rmtree(tmp_path / "a")
        store.refresh()
        assert store.lookup(key_of(tokens(30))) == []
    assert save(store, session)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    (tmp_path / "a" / LOCK_NAME).unlink()
    session.sync(tokens(30))
    assert save(store, session)


def test_a_directory_of_which_only_the_index_is_left_is_taken(tmp_path: Path) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    session.sync(tokens(10))
    assert save(store, session)
    store.close()
    for path in tmp_path.iterdir():
        if path.name != INDEX_NAME:
            path.unlink()
    assert open_store(tmp_path, ENGINE).entries() == []


def test_a_lock_that_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(Ds4Error, match="cannot be used: lock: "):
        open_store(tmp_path, ENGINE)
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(Ds4Error, match="it is no directory"):
        Files(tmp_path / "a")


def test_a_budget_that_other_files_take_leaves_no_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    session.sync(tokens(10))
    assert save(store, session)
    store.close()
    (tmp_path / "letter.txt").write_bytes(bytes(100_000))
    store = open_store(tmp_path, ENGINE, budget=50_000)
    assert store.entries() == []
    assert "other files in" in caplog.text
    assert save(store, session) is None
    assert (tmp_path / "letter.txt").exists()


def test_the_index_gets_smaller_again(tmp_path: Path) -> None:
    index = Index(tmp_path / INDEX_NAME)
    names = [f"{i:040x}.kv" for i in range(500)]
    index.update({name: (1, 1, {"what": "x" * 1000}) for name in names})
    full = (tmp_path / INDEX_NAME).stat().st_size
    index.update({}, names[1:])
    assert (tmp_path / INDEX_NAME).stat().st_size < full / 10
    assert list(index.load()) == names[:1]


def failing(patched: pytest.MonkeyPatch, name: str, error: int) -> None:
    """Let a call of the system fail."""

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    patched.setattr(os, name, fail)


@pytest.mark.parametrize(
    ("call", "error"), [("posix_fallocate", errno.ENOSPC), ("pwrite", errno.ENOSPC), ("fsync", errno.EIO)]
)
def test_a_full_disk_costs_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, error: int
) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    session.sync(tokens(10))
    first = save(store, session)
    assert first is not None
    session.sync(tokens(20))
    with monkeypatch.context() as patched:
        failing(patched, call, error)
        assert save(store, session) is None
    assert ("the disk is full" if error == errno.ENOSPC else os.strerror(error)) in caplog.text
    assert not list(tmp_path.glob("*.tmp.*"))
    assert restore(store, ENGINE, first).tokens == tokens(10)
    assert save(store, session) is not None


def test_a_disk_that_became_read_only_still_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    entries = []
    for n in (10, 20):
        session.sync(tokens(n))
        entries.append(save(store, session))
    first, second = entries
    assert first is not None
    assert second is not None
    path = tmp_path / second.name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    store.refresh()
    with monkeypatch.context() as patched:
        failing(patched, "unlink", errno.EROFS)
        patched.setattr(Files, "_locked", lambda self: os.unlink(LOCK_NAME))
        store.touch(first)
        assert "is not counted" in caplog.text
        assert restore(store, ENGINE, first).tokens == tokens(10)
        assert save(store, session) is None
        with pytest.raises(Ds4Error, match="checksum"):
            store.load(second)
        assert "cannot be deleted" in caplog.text
        assert store.lookup(key_of(tokens(30))) == [first], "a damaged one is not tried again and again"
        with pytest.raises(Ds4Error, match="cannot be used: Read-only file system"):
            open_store(tmp_path, ENGINE)


def test_a_clock_that_was_wrong_does_not_keep_entries(tmp_path: Path) -> None:
    clock = [4e9]
    store = open_store(tmp_path, ENGINE, budget=400_000, now=lambda: clock[0])
    session = ENGINE.session()
    session.sync(tokens(150, 0))
    future = save(store, session)
    assert future is not None
    store.touch(future)
    clock[0] = -5.0
    session.sync(tokens(150, 1))
    early = save(store, session)
    assert early is not None
    assert early.created == 0
    clock[0] = 2e9
    for seed in range(2, 9):
        session.sync(tokens(150, seed))
        entry = save(store, session)
        assert entry is not None
        store.touch(entry)
    assert store.get(future.name) is None
    assert store.get(early.name) is None


def test_notes_that_nobody_would_read_are_not_written(tmp_path: Path) -> None:
    store, session = open_store(tmp_path, ENGINE), ENGINE.session()
    session.sync(tokens(10))
    assert save(store, session, meta={"note": "x" * MAX_META_BYTES}) is None
    assert save(store, session) is not None


# ---- privacy ---------------------------------------------------------------------------------------------------------


def test_directory_and_files_are_the_owners_only(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = open_store(tmp_path / "a" / "b", ENGINE)
        session = ENGINE.session()
        session.sync(tokens(10))
        save(store, session)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    (tmp_path / "letter.txt").write_text("mine")
    for create in (True, False):
        with pytest.raises(Ds4Error, match="holds other files" if create else "no conversations are stored there"):
            Files(tmp_path, create)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_directory_that_was_opened_to_others_is_closed_again(tmp_path: Path) -> None:
    open_store(tmp_path / "a", ENGINE).close()
    (tmp_path / "a").chmod(0o777)
    open_store(tmp_path / "a", ENGINE)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["../x.kv", "/etc/passwd", "a" * 40 + ".kv/..", "A" * 40 + ".kv", "", "lock"])
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    files = Files(tmp_path)
    for act in (files.open, files.remove, lambda name: files.create(name, 1)):
        with pytest.raises(Ds4Error, match="no name of an entry"):
            act(name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", ENGINE)
    session = ENGINE.session()
    session.sync(tokens(10))
    entry = save(store, session)
    assert entry is not None
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "b" / entry.name).symlink_to(tmp_path / "a" / entry.name)
    assert open_store(tmp_path / "b", ENGINE).entries() == []
