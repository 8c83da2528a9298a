"""The files that make a state: opened together, read with every check, and given to an engine."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from ds4.engine.packing import APPENDED, SectionKey, Sink, StateCodec
from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.container import ToolTurn
from ds4.kvstore.disk import Files, read_into
from ds4.kvstore.payload import check_crc, has_logits, token_digest
from ds4.kvstore.reading import Entry, OpenEntry, open_fd

_THREADS = min(8, os.cpu_count() or 1)
_ONE_THREAD_BYTES = 16 << 20
_SMALL_BYTES = 64 << 10
"""What is not worth a thread's time."""


@dataclass(frozen=True)
class StoredState:
    """What an entry says besides its rows: all tokens, the key, the writer's notes, its tool map; if it has logits."""

    entry: Entry
    tokens: list[int]
    key: bytes
    meta: dict[str, Any]
    turns: list[ToolTurn]
    logits: bool


class Chains:
    """Reads chains of entries: each but the first goes on from the one before, the last is the state.

    Args:
        condemn: told the name of a damaged file, its descriptor, and what is wrong with it.
    """

    def __init__(self, files: Files, condemn: Callable[[str, int, FileFormatError], None]) -> None:
        self._files, self._condemn = files, condemn
        self._readers = ThreadPoolExecutor(_THREADS, "ds4-read")  # starts its threads when they are needed

    def close(self) -> None:
        """End the threads that read."""
        self._readers.shutdown(wait=False)

    @contextlib.contextmanager
    def opened(self, entries: Sequence[Entry]) -> Iterator[list[OpenEntry]]:
        """The files that make a state, from its beginning, open: they stay readable though they are deleted meanwhile.

        Raises:
            Ds4Error: one is not there, or damaged.
        """
        with contextlib.ExitStack() as stack:
            found: list[OpenEntry] = []
            for part in entries:
                try:
                    fd = self._files.open(part.name)
                except OSError as error:
                    raise Ds4Error(f"{part.name} cannot be read: {error.strerror or error}") from None
                stack.callback(os.close, fd)
                with self._blaming(part.name, fd):
                    found.append(open_fd(fd, part.name))
                if found[-1].head.id.hex() != part.id:
                    raise Ds4Error(f"{part.name} was replaced meanwhile")
            yield found

    def stored(self, entry: Entry, chain: Sequence[OpenEntry]) -> StoredState:
        """All of a state but its rows. Raises Ds4Error if it is damaged."""
        found = []
        for part in chain:
            with self._blaming(part.name, part.fd):
                found.append(part.tokens())
        leaf = chain[-1]
        with self._blaming(leaf.name, leaf.fd):
            tokens = [id for ids in found for id in ids]
            if len(tokens) != leaf.head.tokens or token_digest(tokens) != leaf.head.token_digest:
                raise FileFormatError("the tokens are not those of the state")
            return StoredState(entry, tokens, leaf.key(), leaf.meta(), leaf.turns(), has_logits(leaf.head))

    def load(self, entry: Entry, chain: Sequence[OpenEntry], codec: StateCodec) -> tuple[StoredState, Any]:
        """A state, and what `Session.import_state` takes with its tokens.

        Every byte that is used is checked.

        Raises:
            Ds4Error: the state is damaged, or the engine has no room for it.
        """
        stored = self.stored(entry, chain)
        leaf = chain[-1]
        with self._blaming(leaf.name, leaf.fd):
            target = codec.target([part.head.segment for part in chain])
        try:
            sources = _sources(chain)
            self._fill_all(
                [([part for key in keys for part in sources[key]], sink) for keys, sink in target.sinks.items()]
            )
            with self._blaming(leaf.name, leaf.fd):
                return stored, target.finish(stored.tokens)
        except BaseException:
            target.abandon()
            raise

    def _fill_all(self, work: list[tuple[list[tuple[OpenEntry, int]], Sink]]) -> None:
        sizes = [sum(part.head.sections[i].size for part, i in sources) for sources, _ in work]
        alone, begun = sum(sizes) < _ONE_THREAD_BYTES, []
        try:
            for task, size in sorted(zip(work, sizes, strict=True), key=lambda item: -item[1]):
                if alone or size < _SMALL_BYTES:
                    self._fill(*task)
                else:
                    begun.append(self._readers.submit(self._fill, *task))
            for done in begun:
                done.result()
        except BaseException:
            for done in begun:
                done.cancel()
            raise
        finally:
            wait(begun)  # what they write to is not theirs afterwards

    def _fill(self, sources: list[tuple[OpenEntry, int]], sink: Sink) -> None:
        """Read sections one behind the other into buffers, and check them."""
        with contextlib.closing(sink()) as buffers:
            buffer = memoryview(b"")
            for part, i in sources:
                section, at, crc = part.head.sections[i], part.offsets[i], 0
                left = section.size
                with self._blaming(part.name, part.fd):
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
    def _blaming(self, name: str, fd: int) -> Iterator[None]:
        try:
            yield
        except FileFormatError as error:
            self._condemn(name, fd, error)
            raise Ds4Error(f"{name}: {error}") from None
        except OSError as error:
            raise Ds4Error(f"{name} cannot be read: {error.strerror or error}") from None


def _sources(chain: Sequence[OpenEntry]) -> dict[SectionKey, list[tuple[OpenEntry, int]]]:
    """The sections that make each of a whole state: their files, and their places in the tables of these."""
    found: dict[SectionKey, list[tuple[OpenEntry, int]]] = {}
    for part in chain:
        for i, section in enumerate(part.head.sections):
            if part is chain[-1] or section.key.kind in APPENDED:
                found.setdefault(section.key, []).append((part, i))
    return found
