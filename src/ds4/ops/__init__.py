"""The operations of the V4 graph, one file each.

Every public function has the same signature and meaning on every device; the tensors decide what runs. The torch code
is the reference.

Two rules hold for the CPU code and make chunking, batching, rewinding and restoring equal to the bit:

* a row of the result depends only on its own inputs, never on how many rows share the call (`linear` works in blocks of
  `ROW_BLOCK` rows, reductions run along the innermost axis or in a fixed tree, transcendental functions are built on
  `exp`, whose vector and scalar code agree);
* rows that are padded or masked take part with weight exactly zero.
"""

from ds4.ops.attention import Compressed, attention
from ds4.ops.compressor import pool_blocks
from ds4.ops.elementwise import sigmoid, silu, softplus, tree_sum
from ds4.ops.embedding import embed
from ds4.ops.experts import ExpertEnergy, ExpertSource, routed_experts, swiglu
from ds4.ops.hyper_connection import hc_collapse, hc_post, hc_pre
from ds4.ops.indexer import index_scores, select_rows
from ds4.ops.linear import ROW_BLOCK, grouped_linear, linear, pad_rows
from ds4.ops.norm import rms_norm
from ds4.ops.rope import Rope, apply_rope
from ds4.ops.round_trip import (
    fp4_round_trip,
    fp8_round_trip,
    hadamard,
    pack_key,
    pack_row,
    unpack_key,
    unpack_row,
)
from ds4.ops.router import route_by_hash, route_by_score

__all__ = [
    "ROW_BLOCK",
    "Compressed",
    "ExpertEnergy",
    "ExpertSource",
    "Rope",
    "apply_rope",
    "attention",
    "embed",
    "fp4_round_trip",
    "fp8_round_trip",
    "grouped_linear",
    "hadamard",
    "hc_collapse",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "pack_key",
    "pack_row",
    "pad_rows",
    "pool_blocks",
    "rms_norm",
    "route_by_hash",
    "route_by_score",
    "routed_experts",
    "select_rows",
    "sigmoid",
    "silu",
    "softplus",
    "swiglu",
    "tree_sum",
    "unpack_key",
    "unpack_row",
]
