"""Reading entries: what one is from its first kilobytes, and all of it with every check."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ds4.errors import FileFormatError
from ds4.kvstore.container import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    Flags,
    Header,
    Reason,
    ToolTurn,
    unpack_tool_map,
)
from ds4.kvstore.disk import Files, read_exactly
from ds4.kvstore.payload import (
    HEAD_BYTES,
    PayloadHead,
    check_crc,
    check_section,
    count_sections,
    head_size,
    read_tokens,
    unpack_head,
)

MAX_META_BYTES = 16 << 20
MAX_TOOL_MAP_BYTES = 1 << 30
_LOOKS = 4
_PIECE = 8 << 20

Way = tuple[str, int, str]
"""A further way to an entry: which bytes of a prompt, how many of them, and their hash in hex (see `Store.reach`)."""


@dataclass(frozen=True)
class Entry:
    """What is known of a file without reading its state.

    Attributes:
        name: of the file, the SHA-1 of the key bytes.
        size: bytes of the file.
        mtime_ns: when it was written.
        reason, model, quant_bits, tokens, hits, context, created, used: as in its header.
        key_bytes: length of its key.
        fingerprint, id, parent_id, digest: as in its payload, in hex.
        start, parent: the tokens of the entry it builds on, and its name; 0 and None: it is whole.
        tool_map: it has one.
        ways: further ways to it.
    """

    name: str
    size: int
    mtime_ns: int
    reason: Reason
    model: int
    quant_bits: int
    tokens: int
    hits: int
    context: int
    created: int
    used: int
    key_bytes: int
    fingerprint: str
    id: str
    parent_id: str
    digest: str
    start: int
    parent: str | None
    tool_map: bool
    ways: tuple[Way, ...] = ()

    def row(self) -> dict[str, Any]:
        """For the index."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Entry:
        """The inverse of `row`. Raises ValueError, TypeError or KeyError for anything else."""
        ways = tuple((str(which), int(size), str(hash)) for which, size, hash in row["ways"])
        entry = cls(**{**row, "ways": ways, "reason": Reason(row["reason"])})
        numbers = (entry.tokens, entry.hits, entry.start, entry.key_bytes, entry.used, entry.size, entry.created)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number is none")
        texts = (entry.name, entry.fingerprint, entry.id, entry.parent_id, entry.digest, entry.parent or "")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is none")
        return entry


@dataclass
class OpenEntry:
    """An entry that is open for reading, its heads checked; `opened` makes it."""

    name: str
    fd: int
    header: Header
    key_bytes: int
    head: PayloadHead
    size: int
    offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at = HEADER_BYTES + 4 + self.key_bytes + self.head.size
        for i, section in enumerate(self.head.sections):
            self.offsets[i] = at
            at += section.size
        self.end = at

    def key(self) -> bytes:
        """The key bytes. Raises FileFormatError if they are not those of the name."""
        key = read_exactly(self.fd, self.key_bytes, HEADER_BYTES + 4)
        if hashlib.sha1(key).hexdigest() != self.name[:40]:
            raise FileFormatError("the key's SHA-1 is not the file's name: the file is damaged or was renamed")
        return key

    def section(self, index: int) -> bytes:
        """A section of the table, checked. Raises FileFormatError."""
        section = self.head.sections[index]
        data = read_exactly(self.fd, section.size, self.offsets[index])
        check_section(section, data)
        return data

    def check(self, index: int) -> None:
        """That a section is intact, without keeping it. Raises FileFormatError."""
        section, crc = self.head.sections[index], 0
        for at in range(0, section.size, _PIECE):
            size = min(_PIECE, section.size - at)
            data = read_exactly(self.fd, size, self.offsets[index] + at)
            if len(data) != size:
                raise FileFormatError("the file was cut off")
            crc = zlib.crc32(data, crc)
        check_crc(section, crc)

    def meta(self) -> dict[str, Any]:
        """What the writer noted. Raises FileFormatError."""
        if self.head.sections[0].size > MAX_META_BYTES:
            raise FileFormatError(f"the description has {self.head.sections[0].size} bytes")
        try:
            value = json.loads(self.section(0))
        except (ValueError, RecursionError):
            raise FileFormatError("the description is no JSON") from None
        if not isinstance(value, dict):
            raise FileFormatError("the description is no JSON object")
        return value

    def tokens(self) -> list[int]:
        """The token ids from `head.start` on. Raises FileFormatError."""
        return read_tokens(self.section(1))

    def turns(self) -> list[ToolTurn]:
        """The tool map. Raises FileFormatError."""
        if not self.header.flags & Flags.TOOL_MAP:
            return []
        if self.size - self.end > MAX_TOOL_MAP_BYTES:
            raise FileFormatError(f"the tool map has {self.size - self.end} bytes")
        return unpack_tool_map(read_exactly(self.fd, self.size - self.end, self.end))

    def entry(self) -> Entry:
        """What is known of it. Raises FileFormatError."""
        head, header = self.head, self.header
        ways = []
        noted = self.meta().get("ways")
        for way in noted if isinstance(noted, list) else ():
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                which, length, hash = way
                ways.append((str(which), int(length), str(hash)))
        return Entry(
            self.name, self.size, os.fstat(self.fd).st_mtime_ns, header.reason, header.model, header.quant_bits,
            header.tokens, header.hits, header.context, header.created, header.used, self.key_bytes,
            head.fingerprint.hex(), head.id.hex(), head.parent_id.hex(), head.token_digest.hex(), head.start,
            head.parent, bool(header.flags & Flags.TOOL_MAP), tuple(ways),
        )  # fmt: skip


@contextlib.contextmanager
def opened(files: Files, name: str) -> Iterator[OpenEntry]:
    """Open an entry and check its heads. Raises FileFormatError or OSError."""
    fd = files.open(name)
    try:
        yield open_fd(fd, name)
    finally:
        os.close(fd)


def open_fd(fd: int, name: str) -> OpenEntry:
    """As `opened`, for a file that is open. Raises FileFormatError."""
    size = os.fstat(fd).st_size
    for look in range(_LOOKS):
        start = read_exactly(fd, HEADER_BYTES + 4, 0)
        try:
            header = Header.unpack(start)
            break
        except FileFormatError:
            # It may be half of one that another process is writing, which counts a use.
            if look == _LOOKS - 1:
                raise
    key_bytes = int.from_bytes(start[HEADER_BYTES:], "little")
    at = HEADER_BYTES + 4 + key_bytes
    if key_bytes > MAX_KEY_BYTES or at + HEAD_BYTES > size:
        raise FileFormatError(f"a key of {key_bytes} bytes in a file of {size}")
    count = count_sections(read_exactly(fd, HEAD_BYTES, at))
    head = unpack_head(read_exactly(fd, head_size(count), at))
    if header.tokens != head.tokens or header.payload_bytes != head.payload_bytes:
        raise FileFormatError("header and payload contradict each other")
    found = OpenEntry(name, fd, header, key_bytes, head, size)
    if size < found.end or (not header.flags & Flags.TOOL_MAP and size != found.end):
        raise FileFormatError(f"the file has {size} bytes, but its parts {found.end}")
    return found


def verify(files: Files, name: str) -> Entry:
    """Read all of an entry and check every byte. Raises FileFormatError or OSError."""
    with opened(files, name) as found:
        return verify_open(found)


def verify_open(found: OpenEntry) -> Entry:
    """As `verify`, for an entry that is open."""
    found.key()
    for i in range(len(found.head.sections)):
        found.check(i)
    found.meta()
    found.turns()
    return found.entry()
