"""One entry as one file for another machine, and back."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from ds4.engine.packing import APPENDED
from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.container import HEADER_BYTES, Flags, file_name, pack_tool_map
from ds4.kvstore.disk import read_exactly
from ds4.kvstore.payload import NO_PARENT, TOKENS, PayloadHead, Section, head_size
from ds4.kvstore.reading import Entry, OpenEntry, open_fd, verify_open
from ds4.kvstore.store import Store

_PIECE = 8 << 20


def export_entry(store: Store, entry: Entry, path: Path) -> int:
    """Write an entry, joined with all that it builds on, to a new file of mode 0600; its size in bytes.

    Raises:
        Ds4Error: a part is damaged or not there, or the file exists.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        out = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Ds4Error(f"{path} cannot be written: {error.strerror or error}") from None
    try:
        with store.open_chain(entry) as chain:
            size = _join(chain, out)
        os.rename(part, path)
        return size
    except BaseException as error:
        os.unlink(part)
        if isinstance(error, FileFormatError | OSError):
            raise Ds4Error(f"{entry.name} cannot be exported: {error}") from None
        raise
    finally:
        os.close(out)


def _join(chain: list[OpenEntry], out: int) -> int:
    leaf = chain[-1]
    key = leaf.key()
    at = HEADER_BYTES + 4 + len(key) + head_size(len(leaf.head.sections))
    sections = []
    for section in leaf.head.sections:
        joined = section.key.kind in APPENDED or section.key.kind == TOKENS
        crc = size = 0
        for part in chain if joined else [leaf]:
            index = next((i for i, s in enumerate(part.head.sections) if s.key == section.key), None)
            if index is None:
                raise FileFormatError(f"a section of kind {section.key.kind} is missing in what it builds on")
            data = part.section(index)
            _write(out, data, at + size)
            crc, size = zlib.crc32(data, crc), size + len(data)
        sections.append(Section(section.key, size, crc))
        at += size
    old = leaf.head
    digest, none = old.token_digest, bytes(16)
    head = PayloadHead(old.fingerprint, none, NO_PARENT, 0, old.tokens, digest, tuple(sections))
    tool_map = pack_tool_map(leaf.turns())
    _write(out, tool_map, at)
    header = leaf.header.joined(head.payload_bytes, Flags.TOOL_MAP if tool_map else Flags.NONE)
    _write(out, header.pack() + len(key).to_bytes(4, "little") + key + head.pack(), 0)
    os.fsync(out)
    return at + len(tool_map)


def import_entry(store: Store, path: Path) -> Entry:
    """Take a file that `export_entry` wrote into the store, after every byte of it was checked.

    Raises:
        Ds4Error: it is damaged or builds on other entries, it is there already, or the store's budget has no room.
    """
    with _exported(path) as (fd, found):
        size, pieces = found.size, _pieces(fd, found.size)
        return store.adopt(found.name, size, pieces, lambda fd, name: verify_open(open_fd(fd, name)))


def check_exported(path: Path) -> None:
    """That a file is what `export_entry` wrote; all of it is read.

    Raises:
        Ds4Error: it is not, or it cannot be read.
    """
    with _exported(path) as (_, found):
        verify_open(found)


@contextlib.contextmanager
def _exported(path: Path) -> Iterator[tuple[int, OpenEntry]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Ds4Error(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileFormatError("it is no file")
        found = open_fd(fd, "")
        if found.head.start:
            raise FileFormatError("it builds on other entries; export writes files that do not")
        found.name = file_name(read_exactly(fd, found.key_bytes, HEADER_BYTES + 4))
        yield fd, found
    except (FileFormatError, OSError) as error:
        raise Ds4Error(f"{path} cannot be imported: {error}") from None
    finally:
        os.close(fd)


def _pieces(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    for at in range(0, size, _PIECE):
        yield at, read_exactly(fd, min(_PIECE, size - at), at)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
