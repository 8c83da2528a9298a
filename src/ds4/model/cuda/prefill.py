"""A long piece of one sequence: dense matrices are decoded to 16 bits for products of torch, experts inside their own.

The same order of work as in `ds4.model.cuda.forward`. Scratch is taken where it is needed and comes from torch's
allocator again and again; nothing of a piece stays but the cache. In the interpreter, whose products of 16 bits are
wrong, matrices are float32; so they are in an exact piece, whose experts are decoded to a scratch, and where besides
nothing is rounded for the attention and the vocabulary either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds4 import ops
from ds4.model.cuda.forward import (
    MAX_ROWS,
    DeviceModel,
    index_scale,
    route,
    split_side,
)
from ds4.model.cuda.plan import PAGE_ROWS, SCORE_BYTES, SCORE_QUERIES, VOCABULARY_ROWS, piece_ring
from ds4.model.cuda.weights import DeviceLayer
from ds4.ops.kernels.attention import attention, prepare_queries
from ds4.ops.kernels.compress import store_chunk
from ds4.ops.kernels.embed import embed
from ds4.ops.kernels.expert_energy import expert_energy
from ds4.ops.kernels.experts_fused import down_fused, gate_up_fused, natural, tile_rows
from ds4.ops.kernels.experts_prefill import (
    dequantise_experts,
    dequantise_q8,
    down_grouped,
    gate_up_grouped,
)
from ds4.ops.kernels.gemv import gemv
from ds4.ops.kernels.grouping import Groups, group
from ds4.ops.kernels.hyper import COEFFICIENTS, Update, hc_collapse, hc_post, hc_pre, partial_floats
from ds4.ops.kernels.indexer import index_queries, index_scores, select_rows, select_scratch, select_sizes
from ds4.ops.kernels.norm import rms_norm
from ds4.ops.kernels.planes import F16Planes, Q8Planes
from ds4.ops.kernels.quantize import Quantised
from ds4.ops.kernels.rows import RowPlanes, rope_tables, store_window
from ds4.ops.kernels.swiglu import swiglu
from ds4.ops.kernels.terms import join_terms, split_terms

_MANY_PAIRS = 32
"""Pairs of an expert on average from which on an exact piece multiplies them in tiles of 128, not of 16."""


def prefill(
    model: DeviceModel,
    slot: int,
    start: int,
    ids: Tensor,
    wanted: Tensor | None = None,
    experts_at_once: int = 64,
    exact: bool = False,
    energy: Callable[[int, ops.ExpertEnergy], None] | None = None,
) -> Tensor | None:
    """Evaluate the next tokens of one sequence.

    Args:
        slot, start: of the sequence, and its length before.
        ids: int32 [tokens], on the device.
        wanted: int64 [n], rows whose logits are wanted, on the device.
        experts_at_once: experts whose matrices an exact piece decodes at once.
        exact: in float32 throughout; slow.
        energy: as `ds4.model.Taps.expert_energy`; the sums are float32, their counts int32.

    Returns:
        float32 [n, vocab] on the device, or None.
    """
    with _exact_products(model.device) if exact else contextlib.nullcontext():
        return _Chunk(model, slot, start, ids, experts_at_once, exact, energy).run(wanted)


@contextlib.contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Products of float32 are not those of tf32, whatever the process is set to."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if device.type != "cuda" or before in ("none", "ieee"):
        yield
        return
    # There are two interfaces to the setting, and PyTorch refuses to work when they differ. `allow_tf32` sets both.
    try:
        level = torch.get_float32_matmul_precision()
    except RuntimeError:  # they differ already: only the newer one was used
        level = ""
    settings.allow_tf32 = False
    try:
        yield
    finally:
        if level == "high":
            settings.allow_tf32 = True
        elif level:
            torch.set_float32_matmul_precision(level)
        settings.fp32_precision = before


def compile_selection(model: DeviceModel) -> None:
    """Compile the choice of compressed rows for all lengths of a sequence; see `select_sizes`."""
    s = model.shape
    if s.sparse_ratio not in s.ratios:
        return
    chosen = torch.empty((1, s.index_top_k), dtype=torch.int32, device=model.device)
    for keys in select_sizes(model.cache.context // s.sparse_ratio, s.index_top_k):
        padded = -(-keys // PAGE_ROWS) * PAGE_ROWS
        positions = torch.full((1,), keys * s.sparse_ratio - 1, dtype=torch.int32, device=model.device)
        scores = torch.zeros((1, padded), device=model.device)
        scratch = select_scratch(1, padded, s.index_top_k, model.device)
        select_rows(scores, positions, s.sparse_ratio, s.index_top_k, chosen, scratch)


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x @ weight^T, summed in float32; out in the dtype of x, or float32."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


@dataclass(frozen=True)
class _Input:
    """The normalised input of a sublayer in the forms that its products take.

    Attributes:
        x: float32 [tokens, hidden].
        half: x in 16 bits, in the interpreter a copy; where products are exact, x.
        terms: float16 [2, tokens, hidden], see `split_terms`; None where products with F16 matrices take x.
    """

    x: Tensor
    half: Tensor
    terms: Tensor | None

    def multiply_f16(self, planes: F16Planes, out: Tensor) -> None:
        """x @ weight^T with next to nothing lost."""
        if self.terms is None:
            torch.mm(self.x, planes.weight.float().t(), out=out)
            return
        rows, weight = self.terms.flatten(0, 1), planes.weight.t()
        if rows.is_cuda:
            sums = torch.mm(rows, weight, out_dtype=torch.float32)
        else:
            sums = torch.mm(rows.float(), weight.float())
        join_terms(sums.view(2, *out.shape), out)


class _Chunk:
    """What all layers of a piece share."""

    def __init__(
        self,
        model: DeviceModel,
        slot: int,
        start: int,
        ids: Tensor,
        experts_at_once: int,
        exact: bool,
        energy: Callable[[int, ops.ExpertEnergy], None] | None,
    ) -> None:
        s, t = model.shape, ids.shape[0]
        self.model, self.shape, self.tokens, self.ids = model, s, t, ids
        self.device = model.device
        self.end = start + t
        self.experts_at_once = min(experts_at_once, s.experts)
        self.exact, self.energy = exact, energy
        halved = self.device.type == "cuda" and not exact
        self.half = torch.bfloat16 if halved else torch.float32
        self.fine = torch.float16 if halved else torch.float32
        """For what is known to stay small: what experts and the attention's output projections work on."""
        self.positions = torch.arange(start, start + t, dtype=torch.int32, device=self.device)
        self.slots = torch.full((t,), slot, dtype=torch.int32, device=self.device)
        self.zeros = torch.zeros_like(self.slots)
        self.turns = self.take(model.turns.kinds, t, 2, s.rope_dim // 2)
        self.coefficients = self.take(t, COEFFICIENTS)
        self.partials = self.take(partial_floats(t, s.hidden))
        self.ring = RowPlanes.allocate(1, piece_ring(t, s.window), head_dim=s.head_dim, device=self.device)

    def take(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def take_half(self, *size: int) -> Tensor:
        return self.take(*size, dtype=self.half)

    def forms(self, x: Tensor, f16: bool = True, placed: Tensor | None = None, scale: float = 1.0) -> _Input:
        """x as products take it, those with F16 matrices too if asked; placed takes scale * x as `fragments` has it."""
        if self.exact:
            return _Input(x, x, None)
        half = self.take_half(*x.shape)
        terms = self.take(2, *x.shape, dtype=torch.float16) if f16 else None
        split_terms(x, half, terms, placed, scale)
        return _Input(x, half, terms)

    def dense(self, planes: Q8Planes, dtype: torch.dtype | None = None) -> Tensor:
        weight = self.take(planes.n, planes.k, dtype=dtype or self.half)
        dequantise_q8(planes, weight)
        return weight

    def run(self, wanted: Tensor | None) -> Tensor | None:
        model, s, w = self.model, self.shape, self.model.weights
        rope_tables(self.positions, model.turns.frequencies, model.turns.back, self.turns)
        old, new = self.take(2, self.tokens, s.hc_streams, s.hidden)
        embed(w.embedding, self.ids, old)
        x = self.take(self.tokens, s.hidden)
        update: Update | None = None
        for number, layer in enumerate(w.layers):
            hc_pre(old, layer.hc_attn, self.partials, self.coefficients, None, x, update, model.constants)
            if update is not None:
                old, new = new, old
            update = None  # nothing of a sublayer stays while the next one is at work
            update = Update(self._attention(number, layer, x), self.coefficients, new)
            hc_pre(old, layer.hc_ffn, self.partials, self.coefficients, None, x, update, model.constants)
            old, new = new, old
            update = None
            routed, shared = self._experts(number, layer, x)
            update = Update(routed, self.coefficients, new, shared)
            del routed, shared
        if wanted is None:
            return None
        assert update is not None
        hc_post(old, update)
        return self._head(new, wanted)

    def _head(self, streams: Tensor, wanted: Tensor) -> Tensor:
        model, s = self.model, self.shape
        logits = self.take(wanted.shape[0], s.vocab)
        if self.exact:
            self._exact_head(streams, wanted, logits)
            return logits
        for first in range(0, wanted.shape[0], MAX_ROWS):
            rows = wanted[first : first + MAX_ROWS]
            x8 = Quantised.allocate(rows.shape[0], s.hidden, self.device)
            partials = self.take(partial_floats(rows.shape[0], s.hidden))
            hc_collapse(streams, model.weights.hc_head, partials, x8, wanted=rows, constants=model.constants)
            gemv(model.weights.output, x8, logits[first : first + MAX_ROWS])
        return logits

    def _exact_head(self, streams: Tensor, wanted: Tensor, logits: Tensor) -> None:
        model, s, output = self.model, self.shape, self.model.weights.output
        x = self.take(wanted.shape[0], s.hidden)
        partials = self.take(partial_floats(wanted.shape[0], s.hidden))
        hc_collapse(streams, model.weights.hc_head, partials, None, x, wanted=wanted, constants=model.constants)
        for first in range(0, s.vocab, VOCABULARY_ROWS):
            part = slice(first, min(s.vocab, first + VOCABULARY_ROWS))
            rows = replace(output, n=part.stop - first, codes=output.codes[part], scales=output.scales[part])
            multiply(x, self.dense(rows), logits[:, part])

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, number: int, w: DeviceLayer, x: Tensor) -> Tensor:
        s, t, ratio, kv_cache = self.shape, self.tokens, self.shape.ratios[number], self.model.layer_caches[number]
        wide, turn, eps = s.heads * s.head_dim, self.turns[1 if ratio else 0], s.rms_eps
        qkv = self.take(t, s.q_lora_rank + s.head_dim)
        inputs = self.forms(x, f16=w.side is not None)
        multiply(inputs.half, self.dense(w.q_a_kv), qkv)
        kv = qkv[:, s.q_lora_rank :]
        store_window(kv, w.kv_norm, eps, turn, self.positions, self.slots, kv_cache.ring, self.ring, s.window)
        qr = self.take_half(t, s.q_lora_rank)
        rms_norm(qkv[:, : s.q_lora_rank], w.q_a_norm, eps, qr)
        weight = None
        if w.side is not None:
            assert kv_cache.table is not None
            side = self.take(t, w.side.n)
            inputs.multiply_f16(w.side, side)
            compressors, weight = split_side(w, kv_cache, side)
            row_turn = self.turns[self.model.turns.of_ratio[ratio]]
            for compressor in compressors.values():
                store_chunk(self.positions, self.slots, eps, ratio, compressor, kv_cache.table, row_turn)
        del inputs
        q_b = self.dense(w.q_b)
        q = self.take_half(t, wide)
        multiply(qr, q_b[:wide], q)
        chosen = None
        if weight is not None and self.end // ratio > s.index_top_k:
            index_b = q_b[wide:] if w.index_q is None else w.index_q.weight.to(self.half)
            index_x = self.take(t, s.index_heads * s.index_dim)
            multiply(qr, index_b, index_x)
            chosen = self._choose(number, index_x, weight)
        if self.exact:
            ready = q
        else:
            ready = q.view(torch.float16) if self.half == torch.bfloat16 else self.take(t, wide, dtype=torch.float16)
        prepare_queries(q, turn, eps, self.positions, ready.view(t, s.heads, s.head_dim))
        fine = self.fine if self.exact or self.model.attention_fits[number] else torch.float32
        out = self.take(t, s.heads, s.head_dim, dtype=fine)
        attention(
            ready, turn, eps, w.sinks, self.positions, self.slots, self.ring, kv_cache.rows(ratio, chosen), out,
            window_slots=self.zeros, ready=True, window=s.window, exact=self.exact,
        )  # fmt: skip
        del q, ready, q_b
        output_a = self.dense(w.output_a, fine).view(s.o_groups, s.o_lora_rank, -1)
        low, grouped = self.take(t, s.o_groups, s.o_lora_rank, dtype=fine), out.view(t, s.o_groups, -1)
        torch.bmm(grouped.transpose(0, 1), output_a.transpose(1, 2), out=low.transpose(0, 1))
        del output_a, out, grouped
        y = self.take(t, s.hidden)
        multiply(low.view(t, -1), self.dense(w.output_b, fine), y)
        return y

    def _choose(self, number: int, index_x: Tensor, weight: Tensor) -> Tensor:
        """The compressed rows of each token, as many tokens at a time as the scores have room for."""
        s, t, ratio, kv_cache = self.shape, self.tokens, self.shape.ratios[number], self.model.layer_caches[number]
        assert kv_cache.table is not None
        queries = self.take(t, s.index_heads, s.index_dim, dtype=torch.bfloat16)
        index_queries(index_x, self.turns[1], self.positions, queries)
        chosen = self.take(t, s.index_top_k, dtype=torch.int32)
        keys = -(-(self.end // ratio) // PAGE_ROWS) * PAGE_ROWS
        step = min(t, max(SCORE_QUERIES, SCORE_BYTES // (4 * keys) // SCORE_QUERIES * SCORE_QUERIES))
        scores = self.take(step, keys)
        scratch = select_scratch(step, keys, s.index_top_k, self.device)
        for first in range(0, t, step):
            part = slice(first, min(t, first + step))
            positions, n = self.positions[part], part.stop - first
            index_scores(
                queries[part], weight[part], index_scale(s), positions, self.slots[part], kv_cache.table,
                kv_cache.keys(), ratio, s.index_top_k, scores[:n], queries=SCORE_QUERIES,
            )  # fmt: skip
            some = None if scratch is None else (scratch[0][:n], scratch[1][:n])
            select_rows(scores[:n], positions, ratio, s.index_top_k, chosen[part], some)
        return chosen

    # -- mixture of experts ------------------------------------------------------------------------------------------

    def _experts(self, number: int, w: DeviceLayer, normed: Tensor) -> tuple[Tensor, Tensor]:
        """What the routed experts give, [tokens, top, hidden], and the shared one, [tokens, hidden]."""
        s, t, top = self.shape, self.tokens, self.shape.experts_used
        placed, scale = None, 1.0
        if not self.exact:
            placed = self.take(t, s.hidden, dtype=self.fine)
            scale = self.model.expert_scales[number].x
        inputs = self.forms(normed, placed=placed, scale=scale)
        logits = self.take(t, s.experts)
        inputs.multiply_f16(w.router, logits)
        chosen, weights = self.take(t, top, dtype=torch.int32), self.take(t, top)
        route(w, s, logits, self.ids, chosen, weights, self.positions)
        x, shared = inputs.half, self.take(t, s.hidden)
        both, hidden = self.take_half(t, 2 * s.expert_hidden), self.take_half(t, s.expert_hidden)
        multiply(x, self.dense(w.shared_gate_up), both)
        swiglu(both, s.swiglu_clamp, hidden)
        multiply(hidden, self.dense(w.shared_down), shared)
        del both, hidden, inputs
        if placed is None:
            groups, h, routed = self._decoded_experts(w, x, chosen, weights)
        else:
            groups, h, routed = self._fused_experts(number, w, placed, chosen, weights)
        if self.energy is not None:
            sums = ops.ExpertEnergy(
                self.take(s.experts, s.hidden), self.take(s.experts, s.expert_hidden), groups.offsets.diff()
            )
            expert_energy(x, h, weights, groups, sums.gate_up, sums.down)
            if not self.exact:
                sums = replace(sums, down=natural(sums.down) / self.model.expert_scales[number].h ** 2)
            self.energy(number, sums)
        return routed, shared

    def _fused_experts(
        self, number: int, w: DeviceLayer, placed: Tensor, chosen: Tensor, weights: Tensor
    ) -> tuple[Groups, Tensor, Tensor]:
        """The groups, what is between the products, and what the experts give.

        placed: the inputs, scaled and in the order of `fragments`; what is between the products is so, too.
        """
        s, (t, top), scales = self.shape, chosen.shape, self.model.expert_scales[number]
        groups = Groups.allocate(t * top, s.experts, self.device, tile_rows=tile_rows(t * top, s.experts))
        group(chosen, groups)
        h, routed = self.take(t * top, s.expert_hidden, dtype=placed.dtype), self.take(t, top, s.hidden)
        gate_up_fused(placed, chosen, groups, w.gate, w.up, scales, s.swiglu_clamp, h)
        down_fused(h, chosen, groups, w.down, scales, weights, routed)
        return groups, h, routed

    def _decoded_experts(
        self, w: DeviceLayer, x: Tensor, chosen: Tensor, weights: Tensor
    ) -> tuple[Groups, Tensor, Tensor]:
        """As `_fused_experts`, all in float32 and in the natural order."""
        s, (t, top) = self.shape, chosen.shape
        few = t * top < _MANY_PAIRS * s.experts
        groups = Groups.allocate(t * top, s.experts, self.device, tile_rows=16 if few else 128)
        group(chosen, groups)
        h, routed = self.take(t * top, s.expert_hidden), self.take(t, top, s.hidden)
        gates, ups = self.take(2, self.experts_at_once, s.expert_hidden, s.hidden)
        for first in range(0, s.experts, self.experts_at_once):
            count = min(self.experts_at_once, s.experts - first)
            dequantise_experts(w.gate, gates[:count], first, groups)
            dequantise_experts(w.up, ups[:count], first, groups)
            gate_up_grouped(x, chosen, groups, gates[:count], ups[:count], first, s.swiglu_clamp, h)
        downs = gates.view(self.experts_at_once, s.hidden, s.expert_hidden)
        for first in range(0, s.experts, self.experts_at_once):
            count = min(self.experts_at_once, s.experts - first)
            dequantise_experts(w.down, downs[:count], first, groups)
            down_grouped(h, chosen, groups, downs[:count], weights, first, routed)
        return groups, h, routed
