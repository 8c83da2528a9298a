"""The bytes that decoding has to read, from the file's tensor table: what its speed is held against.

A step of n sessions reads every dense matrix once, of the routed experts those that some session chose, and of each
session the rows that its attention and its indexer look at. Nothing is counted that a step writes, nor activations,
which stay in caches. Types and sizes are the file's, however a device repacks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds4.gguf.file import TensorInfo
from ds4.gguf.shape import Shape

if TYPE_CHECKING:
    from ds4.engine import Engine

_ONE_ROW = ("token_embd.weight", "ffn_gate_tid2eid.weight")
"""Tables of which a token needs one row."""


@dataclass(frozen=True)
class Traffic:
    """The parts of a model's reads.

    Attributes:
        dense: bytes that a step reads whatever the number of its sessions.
        token: bytes of table rows that each session reads.
        experts: bytes of all routed experts of all layers.
        row_bytes, key_bytes: of a stored row and of an index key.
    """

    shape: Shape
    dense: int
    token: int
    experts: int
    row_bytes: int
    key_bytes: int

    @classmethod
    def of(cls, engine: Engine, tensors: Mapping[str, TensorInfo]) -> Traffic:
        """From a file's tensors, and the rows as the engine stores them."""
        dense = token = experts = 0
        for name, info in tensors.items():
            if name.endswith(_ONE_ROW):
                token += info.nbytes // engine.shape.vocab
            elif "_exps." in name:
                experts += info.nbytes
            else:
                dense += info.nbytes
        session = engine.session()
        exported = session.export()
        session.close()
        keys = next((planes for (_, kind), planes in exported.rows.items() if kind == "keys"), ())
        return cls(engine.shape, dense, token, experts, _width(exported.checkpoint.window), _width(keys))

    def experts_read(self, sessions: int) -> float:
        """Bytes of routed experts in a step, expected if each session chooses at random and by itself."""
        s = self.shape
        return self.experts * (1.0 - (1.0 - s.experts_used / s.experts) ** sessions)

    def kv_read(self, context: int) -> int:
        """Bytes of rows and keys that the next token of a session of `context` tokens reads."""
        s, total = self.shape, 0
        for ratio in s.ratios:
            rows = context // ratio if ratio else 0
            total += min(context, s.window) * self.row_bytes
            if ratio == s.sparse_ratio:
                total += rows * self.key_bytes + min(rows, s.index_top_k) * self.row_bytes
            else:
                total += rows * self.row_bytes
        return total

    def kv_per_token(self) -> float:
        """Bytes by which a long session's state grows with a token."""
        s = self.shape
        sparse = s.ratios.count(s.sparse_ratio)
        return sum(self.row_bytes / ratio for ratio in s.ratios if ratio) + self.key_bytes * sparse / s.sparse_ratio

    def step(self, context: int, sessions: int) -> float:
        """Bytes of a decode step."""
        return self.dense + self.experts_read(sessions) + sessions * (self.token + self.kv_read(context))

    def parts(self) -> dict[str, float]:
        """For the JSON: a token of one session, without rows."""
        return {"dense": self.dense + self.token, "experts": self.experts_read(1), "kv_per_token": self.kv_per_token()}


def _width(planes: Any) -> int:
    """Bytes of a row over its planes."""
    return sum(plane.shape[-1] * plane.element_size() for plane in planes)
