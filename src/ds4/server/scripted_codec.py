"""Scripted states as bytes, so that stores of states can be tested without a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ds4.engine import Engine, Snapshot
from ds4.engine.packing import SCRIPT_PADDING, SCRIPT_TOKENS, Buffers, Part, SectionKey, Segment, Target, fingerprint
from ds4.errors import FileFormatError
from ds4.gguf.file import Identity
from ds4.gguf.shape import Shape
from ds4.server.scripted import HeldTokens, ScriptedCheckpoint, ScriptedExport

_PADDING, _TOKENS = SectionKey(SCRIPT_PADDING), SectionKey(SCRIPT_TOKENS)


class ScriptedCodec:
    """See `ds4.engine.packing.StateCodec`."""

    quant_bits = 0

    def __init__(self, shape: Shape, kv_bytes: int) -> None:
        self._kv_bytes = kv_bytes
        self.fingerprint = fingerprint(shape, Identity(f"scripted {kv_bytes}"))

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`: zeros of the size of the state, and the bytes of tokens that are in no vocabulary."""
        held: HeldTokens = snapshot.rows
        size = (len(held.tokens) - start) * self._kv_bytes
        yield Part.of(_PADDING, bytes(size))
        said = {id: base64.b64encode(held.extra[id]).decode() for id in set(held.tokens[start:]) & held.extra.keys()}
        data = (json.dumps(said) + "\n").encode()
        yield Part.of(_TOKENS, data)

    def of(self, engine: Engine) -> ScriptedCodec:
        """See `StateCodec`."""
        return self

    def target(self, segments: Sequence[Segment]) -> Target:
        """See `StateCodec`."""
        position = 0
        for segment in segments:
            size = (segment.length - segment.start) * self._kv_bytes
            if segment.start != position or set(segment.sizes) != {_PADDING, _TOKENS}:
                raise FileFormatError("the segments are none of a scripted state")
            if segment.sizes[_PADDING] != size:
                raise FileFormatError(f"a scripted state of {segment.sizes[_PADDING]} bytes instead of {size}")
            position = segment.length
        buffers = {
            key: memoryview(bytearray(sum(segment.sizes[key] for segment in segments))) for key in (_PADDING, _TOKENS)
        }

        def finish(tokens: Sequence[int]) -> Any:
            extra: dict[int, bytes] = {}
            try:
                for row in bytes(buffers[_TOKENS]).splitlines():
                    for id, piece in json.loads(row).items():
                        extra[int(id)] = base64.b64decode(piece, validate=True)
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise FileFormatError("the tokens of a scripted state cannot be read") from None
            checkpoint = ScriptedCheckpoint(len(tokens), bytes(min(len(tokens), 128) * self._kv_bytes))
            return ScriptedExport(0, checkpoint, tuple(tokens), bytes(len(tokens) * self._kv_bytes), extra)

        return Target({(key,): partial(_one, buffer) for key, buffer in buffers.items()}, finish)


def _one(buffer: memoryview) -> Buffers:
    yield buffer
