"""A directory of stored states, shared by any number of processes (docs/kv-cache.md).

No process owns the directory. Which files there are changes only under a lock; what is in a file never changes, but for
the uses counted in its header. A file appears by being renamed when all of it is on the disk, so that a crash at any
moment leaves whole entries and maybe a temporary file, which the next one removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ds4.engine.packing import APPENDED, SectionKey, Sink, StateCodec
from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.container import Reason, ToolTurn, file_name, is_file_name
from ds4.kvstore.disk import INDEX_NAME, Files, Found, read_into
from ds4.kvstore.index import Index
from ds4.kvstore.payload import check_crc, has_logits, token_digest
from ds4.kvstore.policy import Candidate, choose_victims
from ds4.kvstore.reading import Entry, OpenEntry, open_fd, opened
from ds4.kvstore.writing import NewFile, NewState

log = logging.getLogger("ds4.kvstore")

__all__ = ["NewState", "Store", "StoredState"]

MAX_CHAIN = 4096
_SETTLED_NS = 100_000_000
"""A directory that changed so lately may change again without another time stamp."""

_THREADS = min(8, os.cpu_count() or 1)
_ONE_THREAD_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredState:
    """What an entry says besides its rows: all tokens, the key, the writer's notes, its tool map; if it has logits."""

    entry: Entry
    tokens: list[int]
    key: bytes
    meta: dict[str, Any]
    turns: list[ToolTurn]
    logits: bool


class Store:
    """The entries of a directory. Thread-safe.

    Args:
        files: the directory.
        codec: whose states are looked up and loaded; None: entries can only be listed, verified and removed.
        budget: bytes that all files of the directory may have together; None: no limit.
        context: largest state that can be used, in tokens.
        model: number of the model in headers (0 Flash, 1 Pro, 255 other).
        now: the time, Unix seconds.
        evicted: told the entries that left to make room.

    Raises:
        Ds4Error: the directory cannot be used.
    """

    def __init__(
        self,
        files: Files,
        codec: StateCodec | None = None,
        budget: int | None = None,
        context: int = 1 << 28,
        model: int = 255,
        now: Callable[[], float] = time.time,
        evicted: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self.files, self.codec, self.budget = files, codec, budget
        self._context, self._model, self._now, self._evicted = context, model, now, evicted
        self._index = Index(files.path / INDEX_NAME)
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._broken: dict[str, Found] = {}
        self._seen = -1
        with files.lock():
            for name in files.remove_stale(files.scan()):
                log.info("removed %s: its writer ended before it was complete", name)
            self._rows = self._index.load()
            self._scan()
            self._rows = {}
            if budget is not None:
                self._make_room(0, (), b"")

    def close(self) -> None:
        """Forget the directory."""
        self.files.close()

    # -- what there is -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Notice what other processes did."""
        with self._lock:
            if self.files.changed() != self._seen:
                self._scan()

    def entries(self) -> list[Entry]:
        """All entries that can be read, whoever wrote them."""
        with self._lock:
            return list(self._entries.values())

    def broken(self) -> list[str]:
        """Names of files that cannot be read."""
        with self._lock:
            return sorted(self._broken)

    def get(self, name: str) -> Entry | None:
        """The entry of this name."""
        with self._lock:
            return self._entries.get(name)

    def total(self) -> int:
        """Bytes of all files in the directory."""
        return sum(file.size for file in self.files.scan())

    def usable(self, entry: Entry) -> bool:
        """Whether all that an entry builds on is there."""
        with self._lock:
            return self._chain(entry) is not None

    def lookup(self, key: bytes) -> list[Entry]:
        """The entries of this model whose keys `key` begins with, the longest first. Reads no file."""
        with self._lock:
            mine = [entry for entry in self._mine() if entry.key_bytes <= len(key)]
            names, running, at = {}, hashlib.sha1(), 0
            for length in sorted({entry.key_bytes for entry in mine}):
                running.update(memoryview(key)[at:length])
                at = length
                names[length] = running.copy().hexdigest() + ".kv"
            found = [entry for entry in mine if names[entry.key_bytes] == entry.name]
            found = [entry for entry in found if self._chain(entry) is not None]
        return sorted(found, key=lambda entry: (entry.key_bytes, entry.tokens), reverse=True)

    def way_lengths(self, which: str) -> set[int]:
        """The lengths that ways of one sort have."""
        with self._lock:
            return {length for entry in self._mine() for kind, length, _ in entry.ways if kind == which}

    def reach(self, which: str, hashes: dict[int, str]) -> list[Entry]:
        """The entries with a way of this sort whose hash is the one of its length; those with most tokens first."""
        with self._lock:
            found = [
                entry
                for entry in self._mine()
                if any(kind == which and hashes.get(length) == hash for kind, length, hash in entry.ways)
                and self._chain(entry) is not None
            ]
        return sorted(found, key=lambda entry: entry.tokens, reverse=True)

    def _mine(self) -> Iterator[Entry]:
        wanted = "" if self.codec is None else self.codec.fingerprint.hex()
        return (e for e in self._entries.values() if e.fingerprint == wanted and e.tokens < self._context)

    def _chain(self, entry: Entry) -> list[Entry] | None:
        """The entries that make a state, from its beginning; None if one is missing or is another one by now."""
        chain = [entry]
        while chain[-1].parent is not None:
            last = chain[-1]
            parent = self._entries.get(last.parent or "")
            if parent is None or (parent.id, parent.tokens) != (last.parent_id, last.start) or len(chain) > MAX_CHAIN:
                return None
            chain.append(parent)
        return chain[::-1] if chain[-1].start == 0 else None

    def _scan(self) -> list[Found]:
        """Look at the directory, and read what is not known yet."""
        with self._lock:
            stamp = self.files.changed()
            files = self.files.scan()
            present = {file.name: file for file in files if is_file_name(file.name)}
            gone = [name for name in self._entries if name not in present]
            for name in gone:
                del self._entries[name]
            self._broken = {name: old for name, old in self._broken.items() if present.get(name) == old}
            rows = {}
            for name, file in present.items():
                known = self._entries.get(name)
                if name in self._broken or (known and (known.size, known.mtime_ns) == file[1:]):
                    continue
                entry = self._of_index(file) or self._read(file)
                if entry is not None:
                    self._entries[name] = entry
                    if name not in self._rows:
                        rows[name] = (entry.size, entry.mtime_ns, entry.row())
                else:
                    self._entries.pop(name, None)
            self._index.update(rows, gone)
            self._seen = stamp if time.time_ns() - stamp > _SETTLED_NS else -1
            return files

    def _of_index(self, file: Found) -> Entry | None:
        size, mtime, row = self._rows.get(file.name, (0, 0, {}))
        if (size, mtime) == file[1:]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = Entry.of_row(row)
                if (entry.name, entry.size, entry.mtime_ns) == file:
                    return entry
        self._rows.pop(file.name, None)
        return None

    def _read(self, file: Found) -> Entry | None:
        try:
            with opened(self.files, file.name) as found:
                found.key()
                return found.entry()
        except FileNotFoundError:
            return None
        except (FileFormatError, OSError) as error:
            self._broken[file.name] = file
            log.warning("%s is ignored: %s", file.name, error)
            return None

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, entry: Entry) -> StoredState:
        """All of a state but its rows. Raises Ds4Error if it is not there or damaged."""
        with self.open_chain(entry) as chain:
            return self._stored(entry, chain)

    def turns(self, entry: Entry) -> list[ToolTurn]:
        """The tool map of an entry. Raises Ds4Error if it is not there or damaged."""
        try:
            with opened(self.files, entry.name) as found:
                return found.turns()
        except OSError as error:
            raise Ds4Error(f"{entry.name} cannot be read: {error.strerror or error}") from None

    def same_model(self, entry: Entry) -> bool:
        """Whether an entry is of the model that this store is for."""
        return self.codec is not None and entry.fingerprint == self.codec.fingerprint.hex()

    def _stored(self, entry: Entry, chain: Sequence[OpenEntry]) -> StoredState:
        found = []
        for part in chain:
            with self._blaming(part.name):
                found.append(part.tokens())
        leaf = chain[-1]
        with self._blaming(leaf.name):
            tokens = [id for ids in found for id in ids]
            if len(tokens) != leaf.head.tokens or token_digest(tokens) != leaf.head.token_digest:
                raise FileFormatError("the tokens are not those of the state")
            return StoredState(entry, tokens, leaf.key(), leaf.meta(), leaf.turns(), has_logits(leaf.head))

    def load(self, entry: Entry) -> tuple[StoredState, Any]:
        """A state, and what `Session.import_state` takes with its tokens.

        Every byte that is used is checked. A damaged file is deleted, with a line in the log that says why.

        Raises:
            Ds4Error: the state is not there any more, or damaged.
        """
        if not self.same_model(entry) or self.codec is None:
            raise Ds4Error(f"{entry.name} is a state of another model")
        with self.open_chain(entry) as chain:
            stored = self._stored(entry, chain)
            with self._blaming(entry.name):
                target = self.codec.target([part.head.segment for part in chain])
            try:
                self._fill_all([(_sources(chain, key), sink) for key, sink in target.sinks.items()])
                with self._blaming(entry.name):
                    return stored, target.finish(stored.tokens)
            except BaseException:
                target.abandon()
                raise

    def _fill_all(self, work: list[tuple[list[tuple[OpenEntry, int]], Sink]]) -> None:
        if sum(part.head.sections[i].size for sources, _ in work for part, i in sources) < _ONE_THREAD_BYTES:
            for task in work:
                self._fill(*task)
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(self._fill, *task) for task in work]:
                done.result()

    def _fill(self, sources: list[tuple[OpenEntry, int]], sink: Sink) -> None:
        """Read sections one behind the other into buffers, and check them."""
        with contextlib.closing(sink()) as buffers:
            buffer = memoryview(b"")
            for part, i in sources:
                section, at, crc = part.head.sections[i], part.offsets[i], 0
                left = section.size
                with self._blaming(part.name):
                    while left:
                        buffer = buffer or next(buffers)
                        piece, buffer = buffer[:left], buffer[left:]
                        if read_into(part.fd, piece, at) != len(piece):
                            raise FileFormatError("the file was cut off")
                        crc, at, left = zlib.crc32(piece, crc), at + len(piece), left - len(piece)
                    check_crc(section, crc)
            # Who fills the last one says so by asking for the next.
            unfilled = len(buffer) + sum(map(len, buffers))
            assert not unfilled

    @contextlib.contextmanager
    def open_chain(self, entry: Entry) -> Iterator[list[OpenEntry]]:
        """The files that make a state, from its beginning, open: they stay readable though they are deleted meanwhile.

        Raises:
            Ds4Error: one is not there, or damaged.
        """
        with contextlib.ExitStack() as stack:
            with self._lock:
                chain = self._chain(entry)
                if chain is None:
                    raise Ds4Error(f"{entry.name} cannot be used: what it builds on is not there")
            found: list[OpenEntry] = []
            for part in chain:
                try:
                    fd = self.files.open(part.name)
                except OSError as error:
                    raise Ds4Error(f"{part.name} cannot be read: {error.strerror or error}") from None
                stack.callback(os.close, fd)
                with self._blaming(part.name):
                    found.append(open_fd(fd, part.name))
                if found[-1].head.id.hex() != part.id:
                    raise Ds4Error(f"{part.name} was replaced meanwhile")
            yield found

    @contextlib.contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """A damaged file is no use to anybody: delete it."""
        try:
            yield
        except FileFormatError as error:
            log.warning("%s is deleted: %s", name, error)
            self.remove(name)
            raise Ds4Error(f"{name}: {error}") from None
        except OSError as error:
            raise Ds4Error(f"{name} cannot be read: {error.strerror or error}") from None

    def touch(self, entry: Entry) -> None:
        """Count a use of an entry. What goes wrong is only logged."""
        try:
            with self.files.lock(), opened(self.files, entry.name) as found:
                if found.head.id.hex() != entry.id:
                    return
                header = found.header.hit(int(self._now()))
                self.files.write_header(entry.name, header.pack())
                with self._lock:
                    if entry.name in self._entries:
                        known = replace(self._entries[entry.name], hits=header.hits, used=header.used)
                        self._entries[entry.name] = known
                        self._index.update({entry.name: (known.size, known.mtime_ns, known.row())})
        except (FileFormatError, OSError) as error:
            log.warning("the use of %s is not counted: %s", entry.name, error)

    def remove(self, name: str) -> None:
        """Delete an entry."""
        with self.files.lock():
            self._remove(name)

    def drop(self, entry: Entry) -> bool:
        """Delete an entry that nobody builds on and nobody has used; True if it was."""
        with self.files.lock():
            self._scan()
            with self._lock:
                known = self._entries.get(entry.name)
                built_on = any(e.parent == entry.name and e.parent_id == entry.id for e in self._entries.values())
            if known is None or known.id != entry.id or known.hits or built_on:
                return False
            self._remove(entry.name)
            return True

    def _remove(self, name: str) -> None:
        self.files.remove(name)
        with self._lock:
            self._entries.pop(name, None)
            self._broken.pop(name, None)
            self._index.update({}, [name])

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, state: NewState) -> Entry | None:
        """Store a state. What is there already is only marked as used; None: there is no room, or it went wrong.

        The entry builds on the given parent if that is still there. Failures are logged: a state that is not stored
        costs time later, and nothing else.
        """
        name = file_name(state.key)
        try:
            return self._put(name, state)
        except OSError as error:
            what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
            log.warning("%s is not stored: %s", name, what)
        except Ds4Error as error:
            log.warning("%s is not stored: %s", name, error)
        return None

    def _put(self, name: str, state: NewState) -> Entry | None:
        assert self.codec is not None
        with self.files.lock():
            self._scan()
            parent = self._parent(state)
            same = self._same(name)
            if same is None:
                plan = NewFile(state, parent, self.codec)
                protected = {*state.protected, *([] if parent is None else [e.name for e in self._chain(parent) or []])}
                if not self._make_room(plan.size, protected, state.incoming or state.key):
                    log.info("%s is not stored: %d bytes do not fit the budget", name, plan.size)
                    return None
                fd, temporary = self.files.create(name, plan.size)
        if same is not None:
            self.touch(same)
            return self.get(name)
        try:
            head = plan.write(self.files, fd, int(self._now()), self._context, self._model)
            self.files.sync(fd)
            with self.files.lock():
                self._scan()
                if parent is not None and self._parent(state) is None:
                    raise Ds4Error("what it builds on is gone")
                if (same := self._same(name)) is not None:
                    # Another process was faster, and others may build on its file already.
                    self.files.discard(temporary)
                    return same
                self.files.commit(temporary, name)
                with self._lock:
                    entry = open_fd(fd, name).entry()
                    assert entry.id == head.id.hex()
                    self._entries[name] = entry
                    self._index.update({name: (entry.size, entry.mtime_ns, entry.row())})
                return entry
        except Exception:
            self.files.discard(temporary)
            raise
        finally:
            os.close(fd)

    def adopt(
        self, name: str, size: int, pieces: Iterable[tuple[int, bytes]], check: Callable[[Files, str], Entry]
    ) -> Entry:
        """Take in a whole file from elsewhere, given as pieces with their offsets; `check` reads all of it.

        Raises:
            Ds4Error: it is there already, damaged, or does not fit the budget.
        """
        with self.files.lock():
            self._scan()
            if self.get(name) is not None:
                raise Ds4Error(f"{name} is here already")
            if not self._make_room(size, (), b""):
                raise Ds4Error(f"{size} bytes do not fit the budget")
            fd, temporary = self.files.create(name, size)
        try:
            for at, piece in pieces:
                self.files.write(fd, piece, at)
            self.files.sync(fd)
            with self.files.lock():
                self.files.commit(temporary, name)
                try:
                    entry = check(self.files, name)
                except BaseException:
                    self.files.remove(name)
                    raise
                with self._lock:
                    self._entries[name] = entry
                    self._index.update({name: (entry.size, entry.mtime_ns, entry.row())})
            return entry
        finally:
            self.files.discard(temporary)
            os.close(fd)

    def _same(self, name: str) -> Entry | None:
        """The usable entry of this model and name."""
        with self._lock:
            old = self._entries.get(name)
            if self.codec is None or old is None or old.fingerprint != self.codec.fingerprint.hex():
                return None
            return old if self._chain(old) is not None else None

    def _parent(self, state: NewState) -> Entry | None:
        """The parent of a new state, if it can be built on."""
        if state.parent is None or self.codec is None:
            return None
        with self._lock:
            parent = self._entries.get(state.parent.name)
            if parent is None or parent.id != state.parent.id or not self._chain(parent):
                return None
        right = parent.tokens < len(state.tokens) and parent.fingerprint == self.codec.fingerprint.hex()
        return parent if right and parent.digest == token_digest(state.tokens[: parent.tokens]).hex() else None

    def prune(self, budget: int) -> list[Entry]:
        """Let entries leave until all files have at most `budget` bytes; those that left. Broken ones leave first."""
        with self.files.lock():
            self._scan()
            before = self.entries()
            kept, self.budget = self.budget, budget
            try:
                if not self._make_room(0, (), b""):
                    log.warning("the files of the directory do not fit %d bytes", budget)
            finally:
                self.budget = kept
            return [entry for entry in before if self.get(entry.name) is None]

    def _make_room(self, size: int, protected: Collection[str], incoming: bytes) -> bool:
        """Let entries leave until `size` bytes fit. The lock is held. False: that is not possible."""
        if self.budget is None:
            return True
        files = self.files.scan()
        # The index grows a little with each entry.
        excess = sum(file.size for file in files) + size + (size // 100 + (64 << 10) if size else 0) - self.budget
        if excess <= 0:
            return True
        with self._lock:
            prefixes = {entry.name for entry in self.lookup(incoming)} if incoming else set()
            candidates = {
                entry.name: Candidate(
                    entry.name, entry.reason, entry.tokens - entry.start, entry.size, entry.hits, entry.used,
                    entry.parent,
                    superseded=entry.reason == Reason.CONTINUED and entry.name in prefixes,
                    usable=self._chain(entry) is not None,
                )
                for entry in self._entries.values()
            }  # fmt: skip
        for file in files:
            if file.name in self._broken:
                candidates[file.name] = Candidate(file.name, Reason.UNKNOWN, 0, file.size, 0, 0, usable=False)
        victims = choose_victims(candidates, excess, protected, self._now())
        if victims is None:
            return False
        for victim in victims:
            entry = self.get(victim.name)
            log.info("kv cache evicted reason=disk-cache-full key=%s tokens=%d", victim.name[:40], victim.tokens)
            self._remove(victim.name)
            if entry is not None:
                self._evicted(entry)
        return True


def _sources(chain: Sequence[OpenEntry], key: SectionKey) -> list[tuple[OpenEntry, int]]:
    """The sections that make one of a whole state: their files, and their places in the tables of these."""
    parts = chain if key.kind in APPENDED else chain[-1:]
    return [(part, i) for part in parts for i, section in enumerate(part.head.sections) if section.key == key]
