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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ds4.engine.packing import StateCodec
from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.chains import Chains, StoredState
from ds4.kvstore.container import Header, Reason, ToolTurn, file_name, is_file_name
from ds4.kvstore.disk import INDEX_NAME, LOCK_NAME, Files, Found
from ds4.kvstore.index import Index
from ds4.kvstore.payload import token_digest
from ds4.kvstore.policy import Candidate, choose_victims
from ds4.kvstore.reading import Entry, OpenEntry, open_fd, opened
from ds4.kvstore.writing import NewFile, NewState

log = logging.getLogger("ds4.kvstore")

__all__ = ["NewState", "Store", "StoredState"]

MAX_CHAIN = 512
"""Files that a state may be made of: all are open at once, and a process may often open 1,024 only."""

_SETTLED_NS = 100_000_000
"""A directory that changed so lately may change again without another time stamp."""


_ROW_BYTES = 2048
"""About what an entry takes in the index."""


class _ParentGoneError(Ds4Error):
    """What a new state was to build on left while it was written."""


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
        ignored: told the names of files that cannot be read, and why; logged if it is None.

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
        ignored: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.files, self.codec, self.budget = files, codec, budget
        self._context, self._model, self._now, self._evicted = context, model, now, evicted
        self._ignored = ignored or (lambda name, error: log.warning("%s is ignored: %s", name, error))
        self._index = Index(files.path / INDEX_NAME)
        self._chains = Chains(files, self._condemn)
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._broken: dict[str, Found] = {}
        self._seen = -1
        try:
            self._begin()
        except OSError as error:
            where = f"{error.filename}: " if error.filename == LOCK_NAME else ""
            raise Ds4Error(f"the directory {files.path} cannot be used: {where}{error.strerror or error}") from None

    def _begin(self) -> None:
        with self.files.lock():
            for name in self.files.remove_stale(self.files.scan()):
                log.info("removed %s: its writer ended before it was complete", name)
            self._rows = self._index.load()
            read, _ = self._scan()
            if read and self.budget is not None:
                self._make_room(_ROW_BYTES * len(read), (), b"")
                read = [entry for entry in read if self.get(entry.name) is not None]
            self._keep(read, self._rows.keys() - self._entries.keys())
            self._rows = {}
            if self.budget is not None and not self._make_room(0, (), b""):
                log.warning("other files in %s take more than the %d bytes for all", self.files.path, self.budget)

    def close(self) -> None:
        """Forget the directory."""
        self._chains.close()
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

    def _chain(self, entry: Entry, entries: Mapping[str, Entry] | None = None) -> list[Entry] | None:
        """The entries that make a state, from its beginning; None if one is missing or is another one by now.

        `entries`: where to look for them; None: those of now.
        """
        entries, chain = self._entries if entries is None else entries, [entry]
        while chain[-1].parent is not None:
            last = chain[-1]
            parent = entries.get(last.parent or "")
            if parent is None or (parent.id, parent.tokens) != (last.parent_id, last.start) or len(chain) >= MAX_CHAIN:
                return None
            chain.append(parent)
        return chain[::-1] if chain[-1].start == 0 else None

    def _scan(self) -> tuple[list[Entry], list[str]]:
        """Look at the directory, and read what is not known yet; what was read, and what is gone.

        The index is left as it is: whoever writes a file keeps it there, and steps of the engine may wait for this.
        """
        with self._lock:
            stamp = self.files.changed()
            present = {file.name: file for file in self.files.scan() if is_file_name(file.name)}
            gone = [name for name in self._entries if name not in present]
            for name in gone:
                del self._entries[name]
            self._broken = {name: old for name, old in self._broken.items() if present.get(name) == old}
            read = []
            for name, file in present.items():
                known = self._entries.get(name)
                if name in self._broken or (known and (known.size, known.mtime_ns) == file[1:]):
                    continue
                entry = self._of_index(file)
                if entry is None and (entry := self._read(file)) is not None:
                    read.append(entry)
                if entry is not None:
                    self._entries[name] = entry
                else:
                    self._entries.pop(name, None)
            self._seen = stamp if time.time_ns() - stamp > _SETTLED_NS else -1
            return read, gone

    def _of_index(self, file: Found) -> Entry | None:
        size, mtime, row = self._rows.get(file.name, (0, 0, {}))
        if (size, mtime) == file[1:]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = Entry.of_row(row)
                if (entry.name, entry.size, entry.mtime_ns) == file:
                    return entry
        return None

    def _keep(self, entries: Iterable[Entry], gone: Iterable[str] = ()) -> None:
        """Keep entries in the index, and forget others."""
        self._index.update({e.name: (e.size, e.mtime_ns, e.row()) for e in entries}, gone)

    def _read(self, file: Found) -> Entry | None:
        try:
            with opened(self.files, file.name) as found:
                found.key()
                return found.entry()
        except FileNotFoundError:
            return None
        except (FileFormatError, OSError) as error:
            self._broken[file.name] = file
            self._ignored(file.name, error)
            return None

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, entry: Entry) -> StoredState:
        """All of a state but its rows. Raises Ds4Error if it is not there or damaged."""
        with self.open_chain(entry) as chain:
            return self._chains.stored(entry, chain)

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

    def load(self, entry: Entry) -> tuple[StoredState, Any]:
        """A state, and what `Session.import_state` takes with its tokens.

        Every byte that is used is checked. A damaged file is deleted, with a line in the log that says why.

        Raises:
            Ds4Error: the state is not there any more, or damaged, or the engine has no room for it.
        """
        if not self.same_model(entry) or self.codec is None:
            raise Ds4Error(f"{entry.name} is a state of another model")
        with self.open_chain(entry) as chain:
            return self._chains.load(entry, chain, self.codec)

    @contextlib.contextmanager
    def open_chain(self, entry: Entry) -> Iterator[list[OpenEntry]]:
        """The files that make a state, from its beginning, open: they stay readable though they are deleted meanwhile.

        Raises:
            Ds4Error: one is not there, or damaged.
        """
        with self._lock:
            chain = self._chain(entry)
        if chain is None:
            raise Ds4Error(f"{entry.name} cannot be used: what it builds on is not there")
        with self._chains.opened(chain) as found:
            yield found

    def _condemn(self, name: str, fd: int, error: FileFormatError) -> None:
        """A damaged file is no use to anybody: delete it."""
        log.warning("%s is deleted: %s", name, error)
        try:
            with self.files.lock():
                if self.files.is_open(name, fd):
                    self._remove(name)
        except OSError as problem:
            log.warning("%s cannot be deleted: %s", name, problem)
            with self._lock:
                if (known := self._entries.pop(name, None)) is not None:
                    self._broken[name] = Found(name, known.size, known.mtime_ns)

    def touch(self, entry: Entry) -> None:
        """Count a use of an entry. What goes wrong is only logged."""
        try:
            with self.files.lock(), opened(self.files, entry.name) as found:
                if found.head.id.hex() == entry.id:
                    header = found.header.hit(self._seconds())
                    self.files.write_header(entry.name, header.pack())
                    if (known := self._used(entry.name, header)) is not None:
                        self._keep([known])
        except (Ds4Error, OSError) as error:
            log.warning("the use of %s is not counted: %s", entry.name, error)

    def _used(self, name: str, header: Header) -> Entry | None:
        """Note the uses of an entry; the entry, if that was news."""
        with self._lock:
            known = self._entries.get(name)
            if known is None or (known.hits, known.used) == (header.hits, header.used):
                return None
            self._entries[name] = replace(known, hits=header.hits, used=header.used)
            return self._entries[name]

    def _used_elsewhere(self, name: str) -> bool:
        """Whether another process has used an entry since it was looked at; then that is known now."""
        try:
            with opened(self.files, name) as found:
                return self._used(name, found.header) is not None
        except (Ds4Error, OSError):
            return False

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

    def _remove(self, *names: str) -> None:
        for name in names:
            self.files.remove(name)
            with self._lock:
                self._entries.pop(name, None)
                self._broken.pop(name, None)
        self._keep((), names)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, state: NewState) -> Entry | None:
        """Store a state. What is there already is only marked as used; None: there is no room, or it went wrong.

        The entry builds on the given parent if that is still there. Failures are logged: a state that is not stored
        costs time later, and nothing else.
        """
        name = file_name(state.key)
        try:
            try:
                return self._put(name, state)
            except _ParentGoneError:
                return self._put(name, replace(state, parent=None))
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
            head = plan.write(self.files, fd, self._seconds(), self._context, self._model)
            self.files.sync(fd)
            with self.files.lock():
                self._scan()
                if parent is not None and self._parent(state) is None:
                    raise _ParentGoneError("what it builds on left meanwhile")
                if (same := self._same(name)) is not None:
                    # Another process was faster, and others may build on its file already.
                    self.files.discard(temporary)
                    return same
                self.files.commit(temporary, name)
                entry = open_fd(fd, name).entry()
                assert entry.id == head.id.hex()
                with self._lock:
                    self._entries[name] = entry
                self._keep([entry])
                return entry
        except Exception:
            self.files.discard(temporary)
            raise
        finally:
            os.close(fd)

    def adopt(
        self, name: str, size: int, pieces: Iterable[tuple[int, bytes]], check: Callable[[int, str], Entry]
    ) -> Entry:
        """Take in a whole file from elsewhere, given as pieces with their offsets.

        `check` reads all of the copy, from a descriptor, before anybody else can see it.

        Raises:
            Ds4Error: it is there already, damaged, or does not fit the budget.
        """
        with self.files.lock():
            self._refuse_twice(name)
            if not self._make_room(size, (), b""):
                raise Ds4Error(f"{size} bytes do not fit the budget")
            fd, temporary = self.files.create(name, size)
        try:
            for at, piece in pieces:
                self.files.write(fd, piece, at)
            self.files.sync(fd)
            entry = check(fd, name)
            with self.files.lock():
                self._refuse_twice(name)
                self.files.commit(temporary, name)
                with self._lock:
                    self._entries[name] = entry
                self._keep([entry])
            return entry
        finally:
            self.files.discard(temporary)
            os.close(fd)

    def _refuse_twice(self, name: str) -> None:
        self._scan()
        if self.get(name) is not None:
            raise Ds4Error(f"{name} is here already")

    def _seconds(self) -> int:
        return max(int(self._now()), 0)

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
            if parent is None or parent.id != state.parent.id or not 0 < len(self._chain(parent) or ()) < MAX_CHAIN:
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
                self._make_room(0, (), b"")
            finally:
                self.budget = kept
            return [entry for entry in before if self.get(entry.name) is None]

    def _make_room(self, size: int, protected: Collection[str], incoming: bytes) -> bool:
        """Let entries leave until `size` bytes fit. The lock is held.

        False: that is not possible. Then all of them stay if a new file is to be made, and all leave that can if not.
        """
        if self.budget is None:
            return True
        files = self.files.scan()
        # The index grows a little with each entry.
        excess = sum(file.size for file in files) + size + (size // 100 + (64 << 10) if size else 0) - self.budget
        if excess <= 0:
            return True
        victims = self._victims(files, excess, protected, incoming, not size)
        while victims is not None and any(self._used_elsewhere(v.name) for v in victims):
            victims = self._victims(files, excess, protected, incoming, not size)
        if victims is None:
            return False
        leaving = [self.get(victim.name) for victim in victims]
        for victim in victims:
            log.info("kv cache evicted reason=disk-cache-full key=%s tokens=%d", victim.name[:40], victim.tokens)
        self._remove(*(victim.name for victim in victims))
        for entry in leaving:
            if entry is not None:
                self._evicted(entry)
        return sum(victim.size for victim in victims) >= excess

    def _victims(
        self, files: list[Found], excess: int, protected: Collection[str], incoming: bytes, all_the_same: bool
    ) -> list[Candidate] | None:
        prefixes = {entry.name for entry in self.lookup(incoming)} if incoming else set()
        with self._lock:  # for no longer: the engine may wait for it
            entries = dict(self._entries)
        candidates = {
            entry.name: Candidate(
                entry.name, entry.reason, entry.tokens - entry.start, entry.size, entry.hits, entry.used,
                entry.parent,
                superseded=entry.reason == Reason.CONTINUED and entry.name in prefixes,
                usable=self._chain(entry, entries) is not None,
            )
            for entry in entries.values()
        }  # fmt: skip
        for file in files:
            if file.name in self._broken:
                candidates[file.name] = Candidate(file.name, Reason.UNKNOWN, 0, file.size, 0, 0, usable=False)
        return choose_victims(candidates, excess, protected, self._now(), all_the_same)
