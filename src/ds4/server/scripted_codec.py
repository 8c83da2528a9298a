"""Scripted states as bytes, so that stores of states can be tested without a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ds4.engine import Snapshot
from ds4.engine.packing import SCRIPT_PADDING, SCRIPT_TOKENS, Part, SectionKey, Segment, Target, fingerprint
from ds4.errors import Ds4Error
from ds4.gguf.shape import Shape
from ds4.server.scripted import HeldTokens, ScriptedCheckpoint, ScriptedExport

_PADDING, _TOKENS = SectionKey(SCRIPT_PADDING), SectionKey(SCRIPT_TOKENS)


class ScriptedCodec:
    """See `ds4.engine.packing.StateCodec`."""

    quant_bits = 0

    def __init__(self, shape: Shape, kv_bytes: int) -> None:
        self._kv_bytes = kv_bytes
        self.fingerprint = fingerprint(shape, f"scripted {kv_bytes}")

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`: zeros of the size of the state, and the bytes of tokens that are in no vocabulary."""
        held: HeldTokens = snapshot.rows
        size = (len(held.tokens) - start) * self._kv_bytes
        yield Part(_PADDING, size, lambda: memoryview(bytes(size)))
        said = {id: base64.b64encode(held.extra[id]).decode() for id in set(held.tokens[start:]) & held.extra.keys()}
        data = (json.dumps(said) + "\n").encode()
        yield Part(_TOKENS, len(data), lambda: memoryview(data))

    def target(self, segments: Sequence[Segment]) -> Target:
        """See `StateCodec`."""
        position = 0
        buffers = []
        for segment in segments:
            size = (segment.length - segment.start) * self._kv_bytes
            if segment.start != position or set(segment.sizes) != {_PADDING, _TOKENS}:
                raise Ds4Error("the segments are none of a scripted state")
            if segment.sizes[_PADDING] != size:
                raise Ds4Error(f"a scripted state of {segment.sizes[_PADDING]} bytes instead of {size}")
            position = segment.length
            buffers.append({key: memoryview(bytearray(count)) for key, count in segment.sizes.items()})

        def finish(tokens: Sequence[int]) -> Any:
            extra: dict[int, bytes] = {}
            try:
                for some in buffers:
                    for id, piece in json.loads(bytes(some[_TOKENS])).items():
                        extra[int(id)] = base64.b64decode(piece, validate=True)
            except (ValueError, TypeError, AttributeError):
                raise Ds4Error("the tokens of a scripted state cannot be read") from None
            checkpoint = ScriptedCheckpoint(len(tokens), bytes(min(len(tokens), 128) * self._kv_bytes))
            return ScriptedExport(0, checkpoint, tuple(tokens), bytes(len(tokens) * self._kv_bytes), extra)

        return Target(buffers, finish)
