"""The V4 graph in kernels: a decode step of up to 64 rows, and a short piece of one sequence.

Reads like `ds4.model.deepseek_v4`, fused: the end of a sublayer and the start of the next are one call, and what a
layer does between its projections and its attention is one launch. Longer pieces are in `ds4.model.cuda.prefill`.

A step works in buffers that never move, made once for each bucket, and neither allocates nor waits: `decode` can be
captured in a CUDA graph. What differs from step to step (token ids, positions, slots) is in `Buffers.inputs`, the
page tables are in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ds4 import ops
from ds4.errors import Ds4Error
from ds4.gguf.shape import Shape
from ds4.model.cuda.plan import BUCKETS, PAGE_ROWS
from ds4.model.cuda.pool import DeviceCache
from ds4.model.cuda.weights import DeviceLayer, DeviceWeights
from ds4.ops.kernels.attention import Parts, Rows, attention, prepare_queries, splits_for
from ds4.ops.kernels.compress import Compressor, store_chunk
from ds4.ops.kernels.embed import embed
from ds4.ops.kernels.experts import down, gate_up
from ds4.ops.kernels.experts_fused import Scales
from ds4.ops.kernels.gemv import gemv, gemv_both, gemv_grouped
from ds4.ops.kernels.hyper import COEFFICIENTS, Constants, Update, hc_collapse, hc_pre, partial_floats
from ds4.ops.kernels.indexer import index_queries, index_scores, select_rows, select_scratch
from ds4.ops.kernels.intrinsics import overlapping
from ds4.ops.kernels.quantize import Quantised, quantise, quantise_and_swiglu, rms_norm_quantise
from ds4.ops.kernels.router import route_by_hash, route_by_score
from ds4.ops.kernels.rows import KeyPlanes, RowPlanes, rope_tables, store_window
from ds4.ops.kernels.step import Queries, store_step

OVERLAP_ROWS = 4
"""Up to so many rows, a step's kernels are launched programmatically (see `intrinsics.overlapping`)."""
QUERY_TILE = 16
"""Consecutive tokens whose index queries share a read of the keys."""

MAX_ROWS = BUCKETS[-1]


@dataclass(frozen=True)
class LayerCache:
    """Where a layer's rows are.

    Attributes:
        ring: window rings [slots, ring].
        pages: kind -> planes; empty for layers without a compressor, as are `frontiers`.
        table: int32 [slots, pages], or None.
    """

    ring: RowPlanes
    pages: dict[str, RowPlanes | KeyPlanes]
    frontiers: dict[str, Tensor]
    table: Tensor | None

    def rows(self, ratio: int, chosen: Tensor | None) -> Rows | None:
        """The compressed rows for `attention`."""
        if self.table is None:
            return None
        pages = self.pages["rows"]
        assert isinstance(pages, RowPlanes)
        return Rows(pages, self.table, ratio, chosen)

    def keys(self) -> KeyPlanes:
        pages = self.pages["keys"]
        assert isinstance(pages, KeyPlanes)
        return pages


@dataclass(frozen=True)
class Turns:
    """What `rope_tables` needs: float32 [kinds, 32] and int32 [kinds].

    Kind 0 is for layers that only have a window, 1 for the others, then one for each ratio's compressed rows.
    """

    frequencies: Tensor
    back: Tensor
    of_ratio: dict[int, int]

    @classmethod
    def make(cls, s: Shape, device: torch.device) -> Turns:
        plain = ops.Rope.plain(s.rope_dim, s.rope_base)
        yarn = ops.Rope.yarn(
            s.rope_dim, s.compress_rope_base, s.yarn_factor, s.yarn_original_context, s.yarn_beta_fast, s.yarn_beta_slow
        )
        ratios = sorted(set(s.ratios) - {0})
        kinds = [plain.frequencies] + [yarn.frequencies] * (1 + len(ratios))
        back = torch.tensor([0, 0, *(r - 1 for r in ratios)], dtype=torch.int32)
        return cls(torch.stack(kinds).to(device), back.to(device), {r: 2 + i for i, r in enumerate(ratios)})

    @property
    def kinds(self) -> int:
        return self.back.shape[0]


class Buffers:
    """What every way of computing a step of `rows` rows works in.

    Attributes:
        ready_dtype: of queries that are made ready for the attention.
        x8, ffn_x8: the inputs of sublayers in bytes; None where a step is exact, and they are in `x` alone.
    """

    ready_dtype = torch.float16
    x8: Quantised | None = None
    ffn_x8: Quantised | None = None

    def __init__(self, model: DeviceModel, rows: int) -> None:
        s, device = model.shape, model.device
        self.rows, self.device = rows, device
        top, wide = s.experts_used, s.heads * s.head_dim
        self.indexed = s.sparse_ratio in s.ratios
        index_wide = s.index_heads * s.index_dim if self.indexed else 0
        side = max((layer.side.n for layer in model.weights.layers if layer.side is not None), default=0)
        self.inputs = torch.full((3, rows), -1, dtype=torch.int32, device=device)
        self.positions, self.slots, self.ids = self.inputs
        self.turns = self.take(model.turns.kinds, rows, 2, s.rope_dim // 2)
        self.streams = self.take(2, rows, s.hc_streams, s.hidden)
        self.coefficients = self.take(rows, COEFFICIENTS)
        self.partials = self.take(partial_floats(rows, s.hidden))
        self.x = self.take(rows, s.hidden)
        self.qkv = self.take(rows, s.q_lora_rank + s.head_dim)
        self.side = self.take(rows, max(side, 1))
        self.qr = self.take(rows, s.q_lora_rank)
        self.q = self.take(rows, wide + index_wide)
        self.index_x = self.take(rows, max(index_wide, 1))
        self.ready_q = self.take(rows, s.heads, s.head_dim, dtype=self.ready_dtype)
        if self.indexed:
            self.index_q = self.take(rows, s.index_heads, s.index_dim, dtype=torch.bfloat16)
            self.scores = model.scores[:rows]
            self.chosen_rows = torch.full((rows, s.index_top_k), -1, dtype=torch.int32, device=device)
            self.select_scratch = select_scratch(rows, self.scores.shape[1], s.index_top_k, device)
        self.low = self.take(rows, s.o_groups * s.o_lora_rank)
        self.y = self.take(rows, s.hidden)
        self.logits = self.take(rows, s.experts)
        self.chosen = torch.full((rows, top), -1, dtype=torch.int32, device=device)
        self.weights = self.take(rows, top)
        self.out = self.take(rows, top + 1, s.hidden)
        self.token_logits = self.take(rows, s.vocab)

    def take(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        # Zeros: places of padding rows are read without ever having been written.
        return torch.zeros(size, dtype=dtype, device=self.device)


class StepBuffers(Buffers):
    """All that a step works in whose matrices take bytes."""

    x8: Quantised
    ffn_x8: Quantised

    def __init__(self, model: DeviceModel, rows: int) -> None:
        super().__init__(model, rows)
        s, device, layers = model.shape, model.device, model.weights.layers
        top, wide = s.experts_used, s.heads * s.head_dim
        sums = any(layer.gate.FORMAT in ("q2_k", "q4_k") for layer in layers)
        down_sums = any(layer.down.FORMAT in ("q2_k", "q4_k") for layer in layers)
        self.ffn_x8 = Quantised.allocate(rows, s.hidden, device, words=True, lanes=True, sums=sums)
        self.x8 = Quantised(self.ffn_x8.scales, self.ffn_x8.words)
        self.qr8 = Quantised.allocate(rows, s.q_lora_rank, device)
        self.parts = Parts.allocate(rows, splits_for(rows, s.heads), s.heads, s.head_dim, device)
        self.heads8 = Quantised.allocate(rows, wide, device)
        self.low8 = Quantised.allocate(rows, s.o_groups * s.o_lora_rank, device)
        self.gate_up = self.take(rows, 2 * s.expert_hidden)
        self.h = self.take(rows * top, s.expert_hidden)
        self.h8 = Quantised.allocate(rows * top, s.expert_hidden, device, words=False, lanes=True, sums=down_sums)
        self.shared8 = Quantised.allocate(rows, s.expert_hidden, device)


class DeviceModel(ABC):
    """A model on one device: weights, cache, and what all ways of computing a step over both share."""

    def __init__(self, weights: DeviceWeights, cache: DeviceCache) -> None:
        s = weights.shape
        self.shape, self.weights, self.cache, self.device = s, weights, cache, weights.device
        if cache.shape != s or len(cache.layers) != s.layers:
            raise Ds4Error("the cache is one of another shape than the weights")
        self.turns = Turns.make(s, self.device)
        self.constants = Constants(s.rms_eps, s.hc_eps, s.sinkhorn_iterations)
        self.layer_caches = [_layer_cache(cache, layer) for layer in range(s.layers)]
        keys = 0
        if s.sparse_ratio in s.ratios:
            keys = max(1, -(-(cache.context // s.sparse_ratio) // PAGE_ROWS)) * PAGE_ROWS
        self.scores = torch.zeros((MAX_ROWS, max(keys, 1)), device=self.device)
        self._buffers: dict[int, Buffers] = {}

    @cached_property
    def expert_scales(self) -> list[Scales]:
        """See `DeviceWeights.expert_scales`; for pieces that are not exact."""
        return self.weights.expert_scales()

    @cached_property
    def attention_fits(self) -> list[bool]:
        """See `DeviceWeights.attention_fits`; for pieces that are not exact."""
        return self.weights.attention_fits()

    def buffers(self, rows: int) -> Buffers:
        """The buffers of the smallest bucket that takes so many rows."""
        bucket = next(b for b in BUCKETS if b >= rows)
        if bucket not in self._buffers:
            self._buffers[bucket] = self._allocate(bucket)
        return self._buffers[bucket]

    @abstractmethod
    def _allocate(self, rows: int) -> Buffers: ...

    @abstractmethod
    def decode(self, b: Buffers) -> None:
        """One token of each row's sequence; the rows' logits are in `b.token_logits` then."""

    def _layers(
        self,
        b: Buffers,
        attention: Callable[[int, DeviceLayer], None],
        experts: Callable[[DeviceLayer], None],
    ) -> None:
        """From the rows' tokens to the input of the vocabulary matrix, in `b.x8` or, exact, in `b.x`.

        Args:
            attention, experts: from the input of a layer's sublayer to its output, in `b.y` and in `b.out`.
        """
        w, exact = self.weights, b.x8 is None
        rope_tables(b.positions, self.turns.frequencies, self.turns.back, b.turns)
        old, new = b.streams
        embed(w.embedding, b.ids, old)
        update: Update | None = None
        for number, layer in enumerate(w.layers):
            x = b.x if exact or layer.side is not None else None
            hc_pre(old, layer.hc_attn, b.partials, b.coefficients, b.x8, x, update, self.constants, exact)
            if update is not None:
                old, new = new, old
            attention(number, layer)
            update = Update(b.y, b.coefficients, new)
            hc_pre(old, layer.hc_ffn, b.partials, b.coefficients, b.ffn_x8, b.x, update, self.constants, exact)
            old, new = new, old
            experts(layer)
            update = Update(b.out, b.coefficients, new)
        x = b.x if exact else None
        hc_collapse(old, w.hc_head, b.partials, b.x8, x, update, constants=self.constants, alone=exact)

    def _choose(self, number: int, b: Buffers, weight: Tensor, chunk: bool = False) -> Tensor:
        """The compressed rows of each row's token, by what is in `b.index_q` and the weights of its heads."""
        s, ratio, kv_cache = self.shape, self.shape.ratios[number], self.layer_caches[number]
        assert kv_cache.table is not None
        index_scores(
            b.index_q, weight, index_scale(s), b.positions, b.slots, kv_cache.table, kv_cache.keys(), ratio,
            s.index_top_k, b.scores, splits=self._score_splits(b.rows), queries=QUERY_TILE if chunk else 0,
        )  # fmt: skip
        select_rows(b.scores, b.positions, ratio, s.index_top_k, b.chosen_rows, b.select_scratch)
        return b.chosen_rows

    def _score_splits(self, rows: int) -> int:
        """Programs that share a row's keys: enough for the whole device, not more than there are tiles of keys."""
        return max(1, min(512 // rows, self.scores.shape[1] // 64))

    def _store_step(
        self,
        number: int,
        w: DeviceLayer,
        b: Buffers,
        kv: Tensor,
        q: Tensor,
        index_x: Tensor,
        compressors: dict[str, Compressor],
    ) -> None:
        s, ratio, kv_cache = self.shape, self.shape.ratios[number], self.layer_caches[number]
        store_step(
            b.positions, b.slots, s.rms_eps, kv, w.kv_norm, b.turns[1 if ratio else 0], kv_cache.ring, ratio,
            compressors.get("rows"), compressors.get("keys"), kv_cache.table,
            b.turns[self.turns.of_ratio[ratio]] if ratio else None,
            Queries(index_x, b.index_q) if s.has_indexer(number) else None, Queries(q, b.ready_q),
        )  # fmt: skip


class ByteModel(DeviceModel):
    """A model whose steps multiply activations in bytes; it has steps for short pieces of a sequence, too."""

    def __init__(self, weights: DeviceWeights, cache: DeviceCache) -> None:
        super().__init__(weights, cache)
        s, device = self.shape, self.device
        self._zeros = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._scratch_ring = RowPlanes.allocate(1, MAX_ROWS + s.window - 1, head_dim=s.head_dim, device=device)

    def _allocate(self, rows: int) -> Buffers:
        return StepBuffers(self, rows)

    def decode(self, b: Buffers) -> None:
        """See `DeviceModel.decode`."""
        with overlapping(b.rows <= OVERLAP_ROWS):
            self._step(b, chunk=False)

    def short_chunk(self, b: Buffers) -> None:
        """Consecutive tokens of one sequence, padding at the end; logits as for `decode`."""
        self._step(b, chunk=True)

    def _step(self, b: Buffers, chunk: bool) -> None:
        assert isinstance(b, StepBuffers)
        self._layers(b, partial(self._attention, b, chunk), partial(self._experts, b))
        gemv(self.weights.output, b.x8, b.token_logits)

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, b: StepBuffers, chunk: bool, number: int, w: DeviceLayer) -> None:
        s, ratio, kv_cache = self.shape, self.shape.ratios[number], self.layer_caches[number]
        wide, turn = s.heads * s.head_dim, b.turns[1 if ratio else 0]
        side = b.side[:, : w.side.n] if w.side is not None else b.side
        if w.side is None:
            gemv(w.q_a_kv, b.x8, b.qkv)
        else:
            gemv_both(w.q_a_kv, b.x8, b.qkv, w.side, b.x, side)
        qr, kv = b.qkv[:, : s.q_lora_rank], b.qkv[:, s.q_lora_rank :]
        rms_norm_quantise(qr, w.q_a_norm, s.rms_eps, b.qr8, b.qr if w.index_q is not None else None)
        q = b.q[:, : w.q_b.n]
        index_x = q[:, wide:]
        if w.index_q is None:
            gemv(w.q_b, b.qr8, q)
        else:
            index_x = b.index_x
            gemv_both(w.q_b, b.qr8, q, w.index_q, b.qr, index_x)
        compressors, weight = split_side(w, kv_cache, side)
        if chunk:
            ring = self._store_chunk(number, w, b, kv, q[:, :wide], index_x, compressors)
        else:
            self._store_step(number, w, b, kv, q[:, :wide], index_x, compressors)
            ring = kv_cache.ring
        chosen = None if weight is None else self._choose(number, b, weight, chunk)
        attention(
            b.ready_q.view(b.rows, wide), turn, s.rms_eps, w.sinks, b.positions, b.slots, ring,
            kv_cache.rows(ratio, chosen), None, b.parts, b.heads8,
            window_slots=self._zeros[: b.rows] if chunk else None, ready=True, window=s.window,
        )  # fmt: skip
        gemv_grouped(w.output_a, b.heads8, b.low, s.o_groups)
        quantise(b.low, b.low8)
        gemv(w.output_b, b.low8, b.y)

    def _store_chunk(
        self,
        number: int,
        w: DeviceLayer,
        b: StepBuffers,
        kv: Tensor,
        q: Tensor,
        index_x: Tensor,
        compressors: dict[str, Compressor],
    ) -> RowPlanes:
        """As `_store_step`; returns the ring that holds the rows' windows."""
        s, ratio, kv_cache = self.shape, self.shape.ratios[number], self.layer_caches[number]
        turn, ring = b.turns[1 if ratio else 0], self._scratch_ring
        store_window(kv, w.kv_norm, s.rms_eps, turn, b.positions, b.slots, kv_cache.ring, ring, s.window)
        for compressor in compressors.values():
            assert kv_cache.table is not None
            row_turn = b.turns[self.turns.of_ratio[ratio]]
            store_chunk(b.positions, b.slots, s.rms_eps, ratio, compressor, kv_cache.table, row_turn)
        if s.has_indexer(number):
            index_queries(index_x, turn, b.positions, b.index_q)
        prepare_queries(q, turn, s.rms_eps, b.positions, b.ready_q)
        return ring

    # -- mixture of experts ------------------------------------------------------------------------------------------

    def _experts(self, b: StepBuffers, w: DeviceLayer) -> None:
        s = self.shape
        gemv_both(w.shared_gate_up, b.x8, b.gate_up, w.router, b.x, b.logits)
        route(w, s, b.logits, b.ids, b.chosen, b.weights, b.positions)
        gate_up(b.ffn_x8, b.chosen, w.gate, w.up, s.swiglu_clamp, b.h)
        quantise_and_swiglu(b.h, b.h8, b.gate_up, s.swiglu_clamp, b.shared8)
        down(b.h8, b.chosen, b.weights, w.down, b.out, (w.shared_down, b.shared8))


# --- shared with long chunks ------------------------------------------------------------------------------------------


def _layer_cache(cache: DeviceCache, layer: int) -> LayerCache:
    pages: dict[str, RowPlanes | KeyPlanes] = {}
    for kind in cache.kinds(layer):
        planes = cache.page_planes(layer, kind)
        pages[kind] = RowPlanes(*planes) if kind == "rows" else KeyPlanes(*planes)
    frontiers = {kind: cache.frontier(layer, kind) for kind in cache.kinds(layer)}
    return LayerCache(RowPlanes(*cache.window_planes(layer)), pages, frontiers, cache.table(layer) if pages else None)


def index_scale(s: Shape) -> float:
    """What the indexer's weights are multiplied with."""
    return float(s.index_dim**-0.5 * s.index_heads**-0.5)


def split_side(w: DeviceLayer, kv_cache: LayerCache, side: Tensor) -> tuple[dict[str, Compressor], Tensor | None]:
    """The columns of `DeviceLayer.side`'s product: those of each compressor, and the indexer's weights."""
    compressors, start = {}, 0
    for kind, c in w.compressors.items():
        kz = side[:, start : start + 2 * c.width]
        compressors[kind] = Compressor(kz, c.ape, c.norm, kv_cache.frontiers[kind], kv_cache.pages[kind])
        start += 2 * c.width
    return compressors, side[:, start:] if "keys" in compressors else None


def route(
    w: DeviceLayer, s: Shape, logits: Tensor, ids: Tensor, chosen: Tensor, weights: Tensor, positions: Tensor
) -> None:
    """The experts of each row and their weights."""
    if w.expert_table is not None:
        route_by_hash(logits, w.expert_table, ids, s.route_scale, chosen, weights, positions)
    else:
        assert w.router_bias is not None
        route_by_score(logits, w.router_bias, s.route_scale, chosen, weights, positions)
