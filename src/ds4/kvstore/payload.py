"""The payload of an entry: a head with a table of sections, each with its checksum, then the sections.

The head alone says what a state is and on which other one it builds, so that thousands of entries can be indexed by
reading a few kilobytes of each.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ds4.engine.packing import LOGITS, SCRIPT_PADDING, SectionKey, Segment
from ds4.errors import FileFormatError

MAGIC = b"DS4S"
VERSION = 1
META, TOKENS = 1, 2
"""Kinds of the sections that every payload begins with: JSON of the server, and token ids."""

_HEAD = struct.Struct("<4sIII16s16s20sII4s16s")
_RECORD = struct.Struct("<BBHIQ")
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES == 96
MAX_SECTIONS = 16_384

NO_PARENT = bytes(20)
_PIECE = 8192


@dataclass(frozen=True)
class Section:
    """A row of the table: which section, its bytes, and their CRC-32."""

    key: SectionKey
    size: int
    crc: int


@dataclass(frozen=True)
class PayloadHead:
    """What stands before the sections.

    Attributes:
        fingerprint: 16 bytes, of the model and the layout (see `ds4.engine.packing.fingerprint`).
        parent_id: `id` of the state this one goes on from, 16 bytes; zeros: none.
        parent_key: SHA-1 of the parent's key bytes, its file's name; zeros: none.
        start: tokens of the parent; 0: none.
        tokens: tokens at the end.
        token_digest: hash of all tokens from 0 on, 16 bytes (see `token_digest`).
        sections: the table, in the order of the file.
    """

    fingerprint: bytes
    parent_id: bytes
    parent_key: bytes
    start: int
    tokens: int
    token_digest: bytes
    sections: tuple[Section, ...]

    @property
    def size(self) -> int:
        """Bytes of the head."""
        return head_size(len(self.sections))

    @property
    def payload_bytes(self) -> int:
        """Bytes of head and sections."""
        return self.size + sum(section.size for section in self.sections)

    @property
    def parent(self) -> str | None:
        """The parent's file name, or None."""
        return self.parent_key.hex() + ".kv" if self.start else None

    @property
    def id(self) -> bytes:
        """What identifies this state to others that build on it: a hash of the head, 16 bytes."""
        return hashlib.blake2b(self.pack(), digest_size=16).digest()

    @property
    def segment(self) -> Segment:
        """The sections that hold the state."""
        sizes = {section.key: section.size for section in self.sections if section.key.kind not in (META, TOKENS)}
        return Segment(self.start, self.tokens, sizes)

    def pack(self) -> bytes:
        """The bytes of the head."""
        head = _HEAD.pack(
            MAGIC, VERSION, len(self.sections), 0, self.fingerprint, self.parent_id, self.parent_key, self.start,
            self.tokens, bytes(4), self.token_digest,
        )  # fmt: skip
        table = b"".join(_RECORD.pack(s.key.kind, s.key.plane, s.key.layer, s.crc, s.size) for s in self.sections)
        return head + table + struct.pack("<I", zlib.crc32(head + table))


def has_logits(head: PayloadHead) -> bool:
    """Whether the state can go on without evaluating its last token again; scripted ones always can."""
    return any(section.key.kind in (LOGITS, SCRIPT_PADDING) for section in head.sections)


def head_size(sections: int) -> int:
    """Bytes of a head with so many sections."""
    return HEAD_BYTES + sections * _RECORD.size + 4


def count_sections(data: bytes) -> int:
    """How many sections a head says it has, from its first 96 bytes. Raises FileFormatError."""
    if len(data) < HEAD_BYTES:
        raise FileFormatError("the payload's head is cut off")
    magic, version, count, *_ = _HEAD.unpack(data[:HEAD_BYTES])
    if magic != MAGIC:
        raise FileFormatError("the payload does not begin with DS4S: the file is damaged")
    if version != VERSION:
        raise FileFormatError(f"payload of version {version}; this program reads {VERSION}")
    if not 2 <= count <= MAX_SECTIONS:
        raise FileFormatError(f"the payload claims {count} sections")
    return int(count)


def unpack_head(data: bytes) -> PayloadHead:
    """Read a head, all of its bytes. Raises FileFormatError."""
    count = count_sections(data)
    if len(data) != head_size(count):
        raise FileFormatError("the payload's head is cut off")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise FileFormatError("the checksum of the payload's head is wrong: the file is damaged")
    _, _, _, zero, fingerprint, parent_id, parent_key, start, tokens, zeros, digest = _HEAD.unpack(data[:HEAD_BYTES])
    sections = []
    for i in range(count):
        kind, plane, layer, crc, size = _RECORD.unpack_from(data, HEAD_BYTES + i * _RECORD.size)
        sections.append(Section(SectionKey(kind, layer, plane), size, crc))
    head = PayloadHead(fingerprint, parent_id, parent_key, start, tokens, digest, tuple(sections))
    if zero or any(zeros) or not start <= tokens or bool(start) != any(parent_key) or bool(start) != any(parent_id):
        raise FileFormatError("the payload's head contradicts itself")
    if len({section.key for section in sections}) != count:
        raise FileFormatError("the payload has a section twice")
    if [section.key for section in sections[:2]] != [SectionKey(META), SectionKey(TOKENS)]:
        raise FileFormatError("the payload does not begin with its description and its tokens")
    if sections[1].size != 4 * (tokens - start):
        raise FileFormatError(f"the payload has {sections[1].size} bytes of tokens for {tokens - start} tokens")
    return head


def check_section(section: Section, data: bytes | memoryview) -> None:
    """Raise FileFormatError if these are not the section's bytes."""
    if len(data) != section.size:
        raise FileFormatError("the file was cut off")
    check_crc(section, zlib.crc32(data))


def check_crc(section: Section, crc: int) -> None:
    """Raise FileFormatError if this is not the CRC-32 of the section's bytes."""
    if crc != section.crc:
        kind, layer, plane = section.key
        raise FileFormatError(f"the checksum of section {kind} (layer {layer}, plane {plane}) is wrong: it is damaged")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32, little-endian."""
    return array("I", tokens).tobytes()


def read_tokens(data: bytes | memoryview) -> list[int]:
    """The inverse of `token_bytes`."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def token_digest(tokens: Sequence[int]) -> bytes:
    """The hash of token ids, 16 bytes: BLAKE2b of them as u32."""
    running = hashlib.blake2b(digest_size=16)
    # In pieces, as no other thread runs while one is made.
    for start in range(0, len(tokens), _PIECE):
        running.update(token_bytes(tokens[start : start + _PIECE]))
    return running.digest()
