"""The KVC container: header, key text, payload, tool map (docs/kv-cache.md describes every byte).

Everything here works on bytes and says what is wrong with them; nothing is taken on trust. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Protocol

from ds4.errors import FileFormatError

MAGIC = b"KVC"
VERSION = 0x44
"""Our version byte; the C program's files have 1."""

PAYLOAD_ABI = 1
HEADER = struct.Struct("<3sBBBBBIIIB3sQQQ")
HEADER_BYTES = HEADER.size
assert HEADER_BYTES == 48

MAX_KEY_BYTES = 1 << 28
MAX_TOKENS = 1 << 24
MAX_TURNS = 400_000
MAX_BLOCK_BYTES = 512 << 20

_TOOL_MAP = b"KTM"
_TOOL_MAP_VERSION = 2


class Reason(IntEnum):
    """Why an entry was stored (header byte 5)."""

    UNKNOWN = 0
    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    AGENT_SYSTEM = 5
    AGENT_SESSION = 6


class Flags(IntFlag):
    """What else is in a file (header byte 6)."""

    NONE = 0
    TOOL_MAP = 1


@dataclass(frozen=True)
class Header:
    """The first 48 bytes of a file.

    Attributes:
        quant_bits: of the routed experts' weights; 0 if unknown.
        reason: why it was stored.
        flags: what follows the payload.
        model: 0 Flash, 1 Pro, 255 any other shape.
        tokens: tokens of the state.
        hits: how often it was loaded.
        context: context size of the writer, in tokens.
        created, used: Unix time in seconds.
        payload_bytes: size of the payload.
    """

    quant_bits: int
    reason: Reason
    flags: Flags
    model: int
    tokens: int
    hits: int
    context: int
    created: int
    used: int
    payload_bytes: int

    def pack(self) -> bytes:
        """The 48 bytes."""
        data = self._pack(b"\0\0\0")
        return self._pack(zlib.crc32(data).to_bytes(4, "little")[:3])

    def _pack(self, check: bytes) -> bytes:
        return HEADER.pack(
            MAGIC, VERSION, self.quant_bits, self.reason, self.flags, self.model, self.tokens, self.hits, self.context,
            PAYLOAD_ABI, check, self.created, self.used, self.payload_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read 48 bytes. Raises FileFormatError."""
        if len(data) < HEADER_BYTES:
            raise FileFormatError(f"the file has {len(data)} bytes; a header has {HEADER_BYTES}")
        (magic, version, quant, reason, flags, model, tokens, hits, context, abi, check, created, used, payload) = (
            HEADER.unpack(data[:HEADER_BYTES])
        )
        if magic != MAGIC:
            raise FileFormatError("it does not begin with KVC: no file of the key-value store")
        if version != VERSION or abi != PAYLOAD_ABI:
            raise FileFormatError(f"version {version}, payload {abi}; this program reads {VERSION} and {PAYLOAD_ABI}")
        zeroed = data[:21] + b"\0\0\0" + data[24:HEADER_BYTES]
        if zlib.crc32(zeroed).to_bytes(4, "little")[:3] != check:
            raise FileFormatError("the header's checksum is wrong: the file is damaged")
        if reason not in Reason.__members__.values() or flags & ~Flags.TOOL_MAP:
            raise FileFormatError(f"reason {reason} or flags {flags} are not known")
        if not 0 < tokens <= MAX_TOKENS:
            raise FileFormatError(f"{tokens} tokens, which no state has")
        return cls(quant, Reason(reason), Flags(flags), model, tokens, hits, context, created, used, payload)

    def hit(self, now: int) -> Header:
        """The header after one more use."""
        return replace(self, hits=min(self.hits + 1, 2**32 - 1), used=max(now, 0))

    def joined(self, payload_bytes: int, flags: Flags) -> Header:
        """The header of the same state in another file, without its uses."""
        return replace(self, payload_bytes=payload_bytes, flags=flags, hits=0)


def file_name(key: bytes) -> str:
    """The name of the entry of these key bytes."""
    return hashlib.sha1(key).hexdigest() + ".kv"


def is_file_name(name: str) -> bool:
    """Whether a name is one of an entry: 40 lower-case hex digits and `.kv`."""
    return len(name) == 43 and name.endswith(".kv") and all(char in "0123456789abcdef" for char in name[:40])


# ---- tool map --------------------------------------------------------------------------------------------------------


class CallLike(Protocol):
    """A tool call as the tool map keeps it."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


@dataclass(frozen=True)
class StoredCall:
    """A tool call: its id on the wire, its function's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolTurn:
    """The sampled block of one turn's calls, and these in their order."""

    block: str
    calls: tuple[StoredCall, ...]


def pack_tool_map(turns: Sequence[ToolTurn]) -> bytes:
    """The trailer that holds these turns; empty for none."""
    if not turns:
        return b""
    out = bytearray(_TOOL_MAP + bytes([_TOOL_MAP_VERSION]) + struct.pack("<I", len(turns)))
    for turn in turns:
        block = _text_bytes(turn.block)
        out += struct.pack("<II", len(block), len(turn.calls)) + block
        for call in turn.calls:
            for part in (call.id, call.name, call.arguments):
                data = _text_bytes(part)
                out += struct.pack("<I", len(data)) + data
    return bytes(out + struct.pack("<I", zlib.crc32(out)))


def unpack_tool_map(data: bytes) -> list[ToolTurn]:
    """Read a trailer. Raises FileFormatError if it is not exactly one."""
    reader = _Reader(data)
    if reader.take(4) != _TOOL_MAP + bytes([_TOOL_MAP_VERSION]):
        raise FileFormatError("the tool map does not begin with KTM and its version")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise FileFormatError("the tool map's checksum is wrong: the file is damaged")
    count = reader.number()
    if count > MAX_TURNS:
        raise FileFormatError(f"the tool map claims {count} turns")
    turns = []
    for _ in range(count):
        size, calls = reader.number(), reader.number()
        if size > MAX_BLOCK_BYTES or calls > MAX_TURNS:
            raise FileFormatError(f"the tool map claims a block of {size} bytes with {calls} calls")
        block = reader.text(size)
        turns.append(ToolTurn(block, tuple(StoredCall(*(reader.field() for _ in range(3))) for _ in range(calls))))
    if reader.left != 4:
        raise FileFormatError(f"{reader.left - 4} bytes too many behind the tool map")
    return turns


class _Reader:
    """Takes what follows from bytes, and never more than there is."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise FileFormatError("the tool map is cut off")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise FileFormatError("the tool map has bytes that are no text") from None

    def field(self) -> str:
        return self.text(self.number())


def _text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
