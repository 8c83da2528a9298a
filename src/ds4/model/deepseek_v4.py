"""The V4 graph.

Reads like its description: blocks of attention and mixture of experts between hyper-connections, in the description's
names and order. Everything that depends on the device is in `ds4.ops`, everything that lasts beyond a step in
`ds4.model.cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds4 import ops
from ds4.gguf.shape import Shape
from ds4.model.cache import KVCache, SequenceState
from ds4.model.weights import Compressor, HyperConnection, ModelWeights

IndexSelection = Literal["topk", "random", "all"]
"""How sparse layers choose their rows: by the indexer; or, to measure what the indexer is worth, at random or all."""


@dataclass(frozen=True)
class Slice:
    """The next tokens of one sequence: ids int64 [tokens]."""

    state: SequenceState
    ids: Tensor


@dataclass(frozen=True)
class Taps:
    """Functions that are shown intermediate values; they must not change them.

    Attributes:
        stream: (layer, streams [tokens, streams, hidden]) after each block.
        router: (layer, chosen experts [tokens, k], weights [tokens, k]).
        expert_input: (layer, x [tokens, hidden]), what the router and the experts of a layer see.
        expert_energy: (layer, sums over the tokens of this step), how large the inputs of each routed expert are. The
            one tap that works on a CUDA device too; its sums are on the model's device, and belong to the function.
    """

    stream: Callable[[int, Tensor], None] | None = None
    router: Callable[[int, Tensor, Tensor], None] | None = None
    expert_input: Callable[[int, Tensor], None] | None = None
    expert_energy: Callable[[int, ops.ExpertEnergy], None] | None = None


@dataclass(frozen=True)
class Edits:
    """Functions that change what a sublayer adds to the streams: (layer, y [tokens, hidden]) -> y."""

    attention: Callable[[int, Tensor], Tensor] | None = None
    ffn: Callable[[int, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Output:
    """What a step leaves.

    Attributes:
        hidden: the streams after the last layer that ran, float32 [tokens, streams, hidden].
        logits: float32 [wanted rows, vocab], or None if the head did not run.
    """

    hidden: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share. Rows are padded up to a whole number of row blocks."""

    slices: Sequence[Slice]
    spans: Sequence[slice]  # the rows of each slice
    tokens: int  # rows without padding
    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    first: Tensor  # int64 [tokens]: first row of each token's window, the slices' windows one behind the other
    missing: Tensor  # int64 [tokens]: rows of that window that lie before the start of the sequence
    plain_rope: tuple[Tensor, Tensor]
    yarn_rope: tuple[Tensor, Tensor]


class DeepseekV4:
    """A DeepSeek V4 model of any shape.

    Args:
        qat_sim: run the quantisation round trips that the model was trained with (V4 graph, Quantisation simulation).
        index_selection: see `IndexSelection`; "topk" is the model.
    """

    def __init__(self, weights: ModelWeights, qat_sim: bool, index_selection: IndexSelection = "topk") -> None:
        self.shape: Shape = weights.shape
        self.weights = weights
        self.qat_sim = qat_sim
        self.index_selection = index_selection
        layers = sorted(weights.layers)
        self.layers = range(layers[0], layers[-1] + 1)
        self.cache = KVCache(self.shape, qat_sim, self.layers)
        s = self.shape
        self._plain_rope = ops.Rope.plain(s.rope_dim, s.rope_base)
        self._yarn_rope = ops.Rope.yarn(
            s.rope_dim, s.compress_rope_base, s.yarn_factor, s.yarn_original_context, s.yarn_beta_fast, s.yarn_beta_slow
        )

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""
        return self.cache.new_state()

    @torch.no_grad()
    def forward(
        self,
        batch: Sequence[Slice],
        *,
        first_layer: int | None = None,
        last_layer: int | None = None,
        hidden: Tensor | None = None,
        wanted: Tensor | None = None,
        taps: Taps | None = None,
        edits: Edits | None = None,
    ) -> Output:
        """Run the next tokens of each sequence through layers first_layer .. last_layer (inclusive).

        The states take the new rows, but their length is only moved on by `SequenceState.advance`.

        Args:
            batch: one or more sequences, each once; their rows stand one behind the other.
            first_layer, last_layer: a slice of this model's layers, all by default.
            hidden: the streams before first_layer, float32 [tokens, streams, hidden]; needed unless it is layer 0.
            wanted: int64, the rows whose logits are wanted (all sequences' rows numbered through); None for none. Only
                after the model's last layer.
        """
        first = self.layers.start if first_layer is None else first_layer
        last = self.layers.stop - 1 if last_layer is None else last_layer
        step = self._step(batch)
        if hidden is None:
            x = ops.embed(self.weights.embedding, step.ids, self.shape.hc_streams)
        else:
            x = ops.pad_rows(hidden)
        for s in batch:
            s.state.prepare(s.ids.shape[0])
        for layer in range(first, last + 1):
            x = self._block(layer, x, step, taps or Taps(), edits or Edits())
            if taps and taps.stream:
                taps.stream(layer, x[: step.tokens])
        logits = None
        if wanted is not None:
            logits = self._head(x[wanted])
        return Output(x[: step.tokens], logits)

    def _step(self, batch: Sequence[Slice]) -> _Step:
        spans, first, positions, row = [], [], [], 0
        for i, s in enumerate(batch):
            n = s.ids.shape[0]
            spans.append(slice(row, row + n))
            positions.append(torch.arange(s.state.length, s.state.length + n))
            start = row + i * (self.shape.window - 1)  # each slice's rows come behind those before its first token
            first.append(torch.arange(start, start + n))
            row += n
        place = torch.cat(positions)
        padded = ops.pad_rows(place)
        return _Step(
            slices=batch,
            spans=spans,
            tokens=row,
            ids=ops.pad_rows(torch.cat([s.ids for s in batch])),
            positions=padded,
            first=torch.cat(first),
            missing=(self.shape.window - 1 - place).clamp(min=0),
            plain_rope=self._plain_rope.at(padded),
            yarn_rope=self._yarn_rope.at(padded),
        )

    # -- the block (Top level) ---------------------------------------------------------------------------------------

    def _block(self, layer: int, x: Tensor, step: _Step, taps: Taps, edits: Edits) -> Tensor:
        w, eps = self.weights.layers[layer], self.shape.rms_eps
        h, post, comb = self._hc_pre(x, w.hc_attn)
        y = self._attention(layer, ops.rms_norm(h, w.attn_norm, eps), step)
        x = ops.hc_post(edits.attention(layer, y) if edits.attention else y, x, post, comb)
        h, post, comb = self._hc_pre(x, w.hc_ffn)
        y = self._moe(layer, ops.rms_norm(h, w.ffn_norm, eps), step, taps)
        return ops.hc_post(edits.ffn(layer, y) if edits.ffn else y, x, post, comb)

    def _hc_pre(self, x: Tensor, w: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        return ops.hc_pre(x, w.fn, w.scale, w.base, s.sinkhorn_iterations, s.hc_eps, s.rms_eps)

    def _head(self, x: Tensor) -> Tensor:
        w, s = self.weights, self.shape
        h = ops.hc_collapse(x, w.hc_head.fn, w.hc_head.scale, w.hc_head.base, s.hc_eps, s.rms_eps)
        return w.output(ops.rms_norm(h, w.output_norm, s.rms_eps))

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, layer: int, x: Tensor, step: _Step) -> Tensor:
        w, s = self.weights.layers[layer], self.shape
        cos, sin = step.yarn_rope if s.ratios[layer] else step.plain_rope
        qr, kv = w.q_a_kv(x).split((s.q_lora_rank, s.head_dim), dim=1)
        qr = ops.rms_norm(qr, w.q_a_norm, s.rms_eps)
        q = ops.rms_norm(w.q_b(qr).view(-1, s.heads, s.head_dim), None, s.rms_eps)
        q = ops.apply_rope(q, cos, sin)
        kv = ops.apply_rope(ops.rms_norm(kv, w.kv_norm, s.rms_eps), cos, sin)
        window = self._windows(layer, kv, step)
        compressed = self._compressed(layer, x, qr, (cos, sin), step)
        out = torch.zeros_like(q)
        out[: step.tokens] = ops.attention(
            q[: step.tokens], window, step.first, step.missing, s.window, compressed, w.sinks
        )
        out = ops.apply_rope(out, cos, sin, inverse=True)
        return w.output_b(w.output_a(out.reshape(x.shape[0], s.o_groups, -1)).flatten(1))

    def _windows(self, layer: int, kv: Tensor, step: _Step) -> Tensor:
        """Store the raw rows of this step; all slices' windows one behind the other, float32 [rows, head_dim]."""
        packed = self.cache.row_format.pack(kv)
        seen = [
            part.state.window(layer, tuple(plane[span] for plane in packed))
            for part, span in zip(step.slices, step.spans, strict=True)
        ]
        return self.cache.row_format.unpack(*(torch.cat(planes) for planes in zip(*seen, strict=True)))

    # -- compressor and indexer ----------------------------------------------------------------------------------------

    def _compressed(
        self, layer: int, x: Tensor, qr: Tensor, rope: tuple[Tensor, Tensor], step: _Step
    ) -> ops.Compressed | None:
        """Store the compressed rows that this step completes, and choose those that its queries see, if any."""
        w, s = self.weights.layers[layer], self.shape
        if w.compressor is None:
            return None
        self._emit_rows(layer, "rows", w.compressor, x, step)
        if w.indexer is None:
            choices = [self._every_row(layer, part) for part in step.slices]
        else:
            self._emit_rows(layer, "keys", w.indexer.compressor, x, step)
            iq = ops.apply_rope(w.indexer.q_b(qr).view(-1, s.index_heads, s.index_dim), *rope)
            if self.qat_sim:
                iq = ops.fp4_round_trip(ops.hadamard(iq))
            weight = w.indexer.proj(x) * (s.index_dim**-0.5 * s.index_heads**-0.5)
            choices = [
                self._chosen_rows(layer, part, iq[span], weight[span])
                for part, span in zip(step.slices, step.spans, strict=True)
            ]
        return _join(choices)

    def _emit_rows(self, layer: int, kind: str, w: Compressor, x: Tensor, step: _Step) -> None:
        s, ratio = self.shape, self.shape.ratios[layer]
        k, z = w.kv_gate(x).chunk(2, dim=1)
        z = z + w.ape[step.positions % ratio]
        for part, span in zip(step.slices, step.spans, strict=True):
            blocks = part.state.complete_blocks(layer, kind, k[span], z[span])
            if blocks is None:
                continue
            pooled = ops.pool_blocks(blocks[0], blocks[1], ratio, s.has_indexer(layer), first=blocks[3])
            place = torch.arange(blocks[2], blocks[2] + pooled.shape[0]) * ratio
            pooled = ops.apply_rope(ops.rms_norm(pooled, w.norm, s.rms_eps), *self._yarn_rope.at(place))
            part.state.append(layer, kind, blocks[2], pooled)

    def _visible(self, layer: int, part: Slice) -> Tensor:
        """How many compressed rows each query may use: int64 [tokens]. The block that a token completes is included."""
        start, ratio = part.state.length, self.shape.ratios[layer]
        return torch.arange(start + 1, start + part.ids.shape[0] + 1) // ratio

    def _every_row(self, layer: int, part: Slice) -> ops.Compressed:
        visible = self._visible(layer, part)
        return ops.Compressed(part.state.rows(layer, "rows", torch.arange(int(visible[-1]))), visible)

    def _chosen_rows(self, layer: int, part: Slice, iq: Tensor, weight: Tensor) -> ops.Compressed:
        visible = self._visible(layer, part)
        k, count = self.shape.index_top_k, int(visible[-1])
        if count <= k or self.index_selection == "all":
            return self._every_row(layer, part)
        index = torch.arange(k)
        chosen = torch.where(index < visible.unsqueeze(1), index, -1)
        late = visible > k  # the queries that have a choice
        if self.index_selection == "random":
            scores = self._random_scores(layer, part, count)[late]
        else:
            keys = part.state.rows(layer, "keys", torch.arange(count))
            scores = ops.index_scores(iq[late], weight[late], keys)
        chosen[late] = ops.select_rows(scores, visible[late], k)
        used, place = torch.unique(chosen, return_inverse=True)
        free = 1 if used[0] < 0 else 0  # -1 sorts first
        return ops.Compressed(part.state.rows(layer, "rows", used[free:]), visible, place - free)

    def _random_scores(self, layer: int, part: Slice, count: int) -> Tensor:
        scores = []
        for i in range(part.ids.shape[0]):
            generator = torch.Generator().manual_seed((part.state.length + i) * 1009 + layer)
            scores.append(torch.rand(count, generator=generator))
        return torch.stack(scores)

    # -- mixture of experts ------------------------------------------------------------------------------------------

    def _moe(self, layer: int, x: Tensor, step: _Step, taps: Taps) -> Tensor:
        w, s = self.weights.layers[layer], self.shape
        tokens = step.tokens
        if w.expert_table is not None:
            chosen, weights = ops.route_by_hash(x, w.router, w.expert_table[step.ids], s.route_scale)
        else:
            assert w.router_bias is not None
            chosen, weights = ops.route_by_score(x, w.router, w.router_bias, s.experts_used, s.route_scale)
        if taps.expert_input:
            taps.expert_input(layer, x[:tokens])
        if taps.router:
            taps.router(layer, chosen[:tokens], weights[:tokens])
        y = w.shared_down(ops.swiglu(w.shared_gate_up(x), s.swiglu_clamp))
        energy = ops.ExpertEnergy.zeros(s.experts, s.hidden, s.expert_hidden) if taps.expert_energy else None
        y[:tokens] += ops.routed_experts(
            x[:tokens], chosen[:tokens], weights[:tokens], w.experts, s.swiglu_clamp, energy
        )
        if taps.expert_energy and energy:
            taps.expert_energy(layer, energy)
        return y


def _join(choices: list[ops.Compressed]) -> ops.Compressed | None:
    """The rows of several slices one behind the other, and their queries' choices into them, padded to one width."""
    if not any(c.rows.shape[0] for c in choices):
        return None
    if len(choices) == 1:
        return choices[0]
    width = max(c.slots for c in choices)
    joined, offset = [], 0
    for c in choices:
        chosen = c.as_chosen()
        moved = torch.where(chosen >= 0, chosen + offset, -1)
        joined.append(torch.nn.functional.pad(moved, (0, width - chosen.shape[1]), value=-1))
        offset += c.rows.shape[0]
    visible = torch.cat([c.visible for c in choices])
    return ops.Compressed(torch.cat([c.rows for c in choices]), visible, torch.cat(joined))
