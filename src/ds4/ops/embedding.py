"""Token embedding."""

from __future__ import annotations

from torch import Tensor


def embed(table: Tensor, ids: Tensor, streams: int) -> Tensor:
    """Rows of `table` for `ids`, as the equal first state of every stream (V4 graph, top level).

    table: any float [vocab, hidden] (may be a mapped file), ids: int64 [tokens] -> float32 [tokens, streams, hidden].
    """
    rows = table[ids].float()
    return rows.unsqueeze(1).expand(-1, streams, -1).contiguous()
