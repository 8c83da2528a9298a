"""A new entry: what it is made of, and its bytes."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4.engine.packing import Part, SectionKey, StateCodec
from ds4.errors import Ds4Error
from ds4.kvstore.container import HEADER_BYTES, MAX_KEY_BYTES, Flags, Header, Reason, ToolTurn, pack_tool_map
from ds4.kvstore.disk import Files
from ds4.kvstore.payload import META, NO_PARENT, TOKENS, PayloadHead, Section, head_size, token_bytes, token_digest
from ds4.kvstore.reading import MAX_META_BYTES, MAX_TOOL_MAP_BYTES, Entry


@dataclass(frozen=True)
class NewState:
    """A state to be stored.

    Attributes:
        key: its key bytes.
        tokens: all of its tokens.
        parts: makes its sections from token `start` on.
        reason: why.
        parent: an entry that holds its first tokens, on which it is to build; None: it is to be whole.
        meta: what the writer wants to know of it later, as JSON; `ways` in it are further ways to the entry.
        turns: the calls whose sampled blocks stand in it.
        protected: names of entries that must not leave for it.
        incoming: key bytes of the request that makes room, if any: continued entries that it begins with weigh less.
    """

    key: bytes
    tokens: Sequence[int]
    parts: Callable[[int], Iterable[Part]]
    reason: Reason
    parent: Entry | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    turns: Sequence[ToolTurn] = ()
    protected: Collection[str] = ()
    incoming: bytes = b""


class NewFile:
    """How a new file is laid out; all sizes are known before the first byte is written."""

    def __init__(self, state: NewState, parent: Entry | None, codec: StateCodec) -> None:
        self.state, self.parent, self.codec = state, parent, codec
        self.start = 0 if parent is None else parent.tokens
        ids = token_bytes(state.tokens[self.start :])
        meta = json.dumps(state.meta).encode()
        self.parts = [
            Part.of(SectionKey(META), meta),
            Part.of(SectionKey(TOKENS), ids),
            *state.parts(self.start),
        ]
        self.tool_map = pack_tool_map(state.turns)
        if len(meta) > MAX_META_BYTES or len(self.tool_map) > MAX_TOOL_MAP_BYTES or len(state.key) > MAX_KEY_BYTES:
            sizes = f"{len(state.key)} bytes of text, {len(meta)} of notes, {len(self.tool_map)} of calls"
            raise Ds4Error(f"{sizes}: one of them is more than a file may have")
        self.front = HEADER_BYTES + 4 + len(state.key)
        self.payload = head_size(len(self.parts)) + sum(part.size for part in self.parts)
        self.size = self.front + self.payload + len(self.tool_map)

    def write(self, files: Files, fd: int, now: int, context: int, model: int) -> PayloadHead:
        """Write all of it; one piece of a section at a time is in memory."""
        at = self.front + head_size(len(self.parts))
        sections = []
        for part in self.parts:
            crc = size = 0
            with contextlib.closing(part.pieces()) as pieces:
                for piece in pieces:
                    files.write(fd, piece, at + size)
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
            if size != part.size:
                raise Ds4Error(f"section {part.key} has {size} bytes instead of {part.size}")
            sections.append(Section(part.key, size, crc))
            at += size
        if self.tool_map:
            files.write(fd, self.tool_map, at)
        tokens, parent = self.state.tokens, self.parent
        head = PayloadHead(
            self.codec.fingerprint,
            bytes(16) if parent is None else bytes.fromhex(parent.id),
            NO_PARENT if parent is None else bytes.fromhex(parent.name[:40]),
            self.start,
            len(tokens),
            token_digest(tokens),
            tuple(sections),
        )
        header = Header(
            self.codec.quant_bits, self.state.reason, Flags.TOOL_MAP if self.tool_map else Flags.NONE, model,
            len(tokens), 0, min(context, 2**32 - 1), now, now, head.payload_bytes,
        )  # fmt: skip
        key = self.state.key
        files.write(fd, header.pack() + len(key).to_bytes(4, "little") + key + head.pack(), 0)
        return head
