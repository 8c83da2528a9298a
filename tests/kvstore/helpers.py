"""Stores of small states for tests, and directories that break off where a test says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ds4
from ds4.engine.packing import ModelCodec
from ds4.kvstore.container import Reason
from ds4.kvstore.disk import Files
from ds4.kvstore.reading import Entry
from ds4.kvstore.store import NewState, Store


def key_of(tokens: Sequence[int]) -> bytes:
    """Key bytes for tests: one byte a token."""
    return bytes(tokens)


def save(
    store: Store, session: ds4.Session, parent: Entry | None = None, reason: Reason = Reason.CONTINUED, **options: Any
) -> Entry | None:
    """Store a session as it is."""
    snapshot = session.snapshot(options.pop("length", None))
    assert store.codec is not None
    codec = store.codec
    try:
        key = options.pop("key", None) or key_of(snapshot.tokens)
        parts = lambda start: codec.parts(snapshot, start)  # noqa: E731
        return store.put(NewState(key, snapshot.tokens, parts, reason, parent, **options))
    finally:
        snapshot.release()


def restore(store: Store, engine: ds4.Engine, entry: Entry) -> ds4.Session:
    """A new session that holds a stored state."""
    stored, exported = store.load(entry)
    session = engine.session()
    session.import_state(stored.tokens, exported)
    return session


def open_store(path: Path, engine: ds4.Engine | None = None, **options: Any) -> Store:
    """A store in a directory."""
    files = options.pop("files", None) or Files(path)
    return Store(files, None if engine is None else ModelCodec(engine), **options)


class Killed(BaseException):
    """The process ends here."""


class MortalFiles(Files):
    """A directory whose process is killed at the nth thing that it does to it; a write may be half done by then."""

    def __init__(self, path: Path, lives: int = 1 << 60) -> None:
        super().__init__(path)
        self.lives = lives
        self.done = 0

    def _live(self) -> None:
        self.done += 1
        if self.done > self.lives:
            raise Killed

    def create(self, name: str, size: int) -> tuple[int, str]:
        self._live()
        fd, temporary = super().create(name, size)
        try:
            self._live()
        except Killed:
            os.close(fd)
            raise
        return fd, temporary

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        try:
            self._live()
        except Killed:
            super().write(fd, memoryview(data)[: len(data) // 2], offset)
            raise
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._live()
        super().sync(fd)

    def commit(self, temporary: str, name: str) -> None:
        self._live()
        super().commit(temporary, name)
        self._live()

    def write_header(self, name: str, data: bytes) -> None:
        self._live()
        super().write_header(name, data)
        self._live()

    def remove(self, name: str) -> None:
        self._live()
        super().remove(name)
        self._live()

    def discard(self, temporary: str) -> None:
        # What a process that was killed does not do any more.
        if self.done <= self.lives:
            super().discard(temporary)
