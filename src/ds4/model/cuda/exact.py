"""A decode step in which nothing is rounded: matrices take float32, as in an exact piece of `ds4.model.cuda.prefill`.

The same order of work as in `ds4.model.cuda.forward`, and as there everything is in buffers that never move. What a row
gives depends neither on the others nor on how many there are.
"""

from __future__ import annotations

from functools import partial

import torch

from ds4.model.cuda.forward import Buffers, DeviceModel, route, split_side
from ds4.model.cuda.plan import EXACT_SPLITS
from ds4.model.cuda.weights import DeviceLayer
from ds4.ops.kernels.attention import Parts, attention
from ds4.ops.kernels.exact_linear import exact_experts, exact_linear
from ds4.ops.kernels.quantize import rms_norm_quantise
from ds4.ops.kernels.swiglu import swiglu


class ExactBuffers(Buffers):
    """All that an exact step works in; the last of a row's places is the shared expert's."""

    ready_dtype = torch.float32

    def __init__(self, model: DeviceModel, rows: int) -> None:
        super().__init__(model, rows)
        s, places = model.shape, model.shape.experts_used + 1
        self.parts = Parts.allocate(rows, EXACT_SPLITS, s.heads, s.head_dim, model.device)
        self.heads = self.take(rows, s.heads, s.head_dim)
        self.gate_up = self.take(rows, places, 2 * s.expert_hidden)
        self.h = self.take(rows, places, s.expert_hidden)


class ExactModel(DeviceModel):
    """A model whose decode steps are exact; pieces of any length go through `ds4.model.cuda.prefill`."""

    def _allocate(self, rows: int) -> Buffers:
        return ExactBuffers(self, rows)

    def decode(self, b: Buffers) -> None:
        """See `DeviceModel.decode`."""
        assert isinstance(b, ExactBuffers)
        self._layers(b, partial(self._attention, b), partial(self._experts, b))
        exact_linear(self.weights.output, b.x, b.token_logits)

    def _attention(self, b: ExactBuffers, number: int, w: DeviceLayer) -> None:
        s, ratio, kv_cache = self.shape, self.shape.ratios[number], self.layer_caches[number]
        wide, turn = s.heads * s.head_dim, b.turns[1 if ratio else 0]
        exact_linear(w.q_a_kv, b.x, b.qkv)
        kv = b.qkv[:, s.q_lora_rank :]
        side = b.side if w.side is None else b.side[:, : w.side.n]
        if w.side is not None:
            exact_linear(w.side, b.x, side)
        rms_norm_quantise(b.qkv[:, : s.q_lora_rank], w.q_a_norm, s.rms_eps, None, b.qr)
        q = b.q[:, : w.q_b.n]
        exact_linear(w.q_b, b.qr, q)
        index_x = q[:, wide:]
        if w.index_q is not None:
            index_x = b.index_x
            exact_linear(w.index_q, b.qr, index_x)
        compressors, weight = split_side(w, kv_cache, side)
        self._store_step(number, w, b, kv, q[:, :wide], index_x, compressors)
        chosen = None if weight is None else self._choose(number, b, weight)
        attention(
            b.ready_q.view(b.rows, wide), turn, s.rms_eps, w.sinks, b.positions, b.slots, kv_cache.ring,
            kv_cache.rows(ratio, chosen), b.heads, b.parts, ready=True, window=s.window, exact=True,
        )  # fmt: skip
        exact_linear(w.output_a, b.heads.view(b.rows, wide), b.low, s.o_groups)
        exact_linear(w.output_b, b.low, b.y)

    def _experts(self, b: ExactBuffers, w: DeviceLayer) -> None:
        s, top = self.shape, self.shape.experts_used
        gate, up = b.gate_up[..., : s.expert_hidden], b.gate_up[..., s.expert_hidden :]
        exact_linear(w.router, b.x, b.logits)
        route(w, s, b.logits, b.ids, b.chosen, b.weights, b.positions)
        exact_experts(w.gate, b.x, b.chosen, gate[:, :top])
        exact_experts(w.up, b.x, b.chosen, up[:, :top])
        exact_linear(w.shared_gate_up, b.x, b.gate_up[:, top])
        swiglu(b.gate_up.flatten(0, 1), s.swiglu_clamp, b.h.flatten(0, 1))
        exact_experts(w.down, b.h[:, :top], b.chosen, b.out[:, :top], b.weights)
        exact_linear(w.shared_down, b.h[:, top], b.out[:, top])
