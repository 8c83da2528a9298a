"""Token embedding: rows of a float16 table into the equal first state of every stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.intrinsics import behind, overlap


@triton.jit
def _embed_kernel(
    table, ids, streams, vocab, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = 0
):
    behind(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)  # what a padding row holds may be anything
    values = tl.load(table + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    for s in tl.static_range(S):
        tl.store(streams + (row * S + s) * D + d, values, mask=d < D)


def embed(table: Tensor, ids: Tensor, streams: Tensor) -> None:
    """`ops.embed`.

    Args:
        table: any float dtype [vocab, hidden], contiguous.
        ids: int32 or int64 [rows]; one outside of the vocabulary, as padding has, takes the nearest row.
        streams: float32 [rows, streams, hidden], contiguous.
    """
    rows, count, hidden = streams.shape
    if table.shape[1] != hidden or ids.shape != (rows,) or not (table.is_contiguous() and streams.is_contiguous()):
        raise ValueError(f"table {list(table.shape)}, ids {list(ids.shape)}, streams {list(streams.shape)}")
    block = min(1024, triton.next_power_of_2(hidden))
    _embed_kernel[(rows, triton.cdiv(hidden, block))](
        table,
        ids,
        streams,
        table.shape[0],
        D=hidden,
        S=count,
        BLOCK=block,
        num_warps=4,
        **overlap(early=True),
    )
