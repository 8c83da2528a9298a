"""Cases of `ds4.ops.kernels.hyper`, `norm`, `router`, `embed` and `swiglu`: what stands between the products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds4 import ops
from ds4.ops.kernels.embed import embed
from ds4.ops.kernels.hyper import Constants, HyperWeights, Update, hc_collapse, hc_pre, partial_floats
from ds4.ops.kernels.norm import norm_rope_heads, rms_norm
from ds4.ops.kernels.quantize import Quantised
from ds4.ops.kernels.router import route_by_hash, route_by_score
from ds4.ops.kernels.swiglu import swiglu
from kernel_cases.harness import Bench, Case, error

EXACT_BAR = 2e-5
"""Float32 outputs."""
HALF_BAR = 5e-3
"""Outputs rounded to bf16."""


def _weights(bench: Bench, head: bool = False) -> HyperWeights:
    s, rows = bench.shape, 4 if head else 24
    fn = bench.randn(rows, 4 * s.hidden, scale=0.02).half()
    scale = 1 + 0.1 * bench.randn(1 if head else 3)
    return HyperWeights(fn, scale, bench.randn(rows), 1 + 0.1 * bench.randn(s.hidden))


def _double(w: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    return w.fn.double(), w.scale.double(), w.base.double()


def _post(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    y = y.double() if y.dim() == 2 else y.double().sum(1)
    return ops.hc_post(y, x.double(), c[:, 4:8].double(), c[:, 8:].double().view(-1, 4, 4))


def step(bench: Bench) -> Iterator[Case]:
    """The end of a sublayer and the start of the next: with seven parts at decode, one bf16 output at prefill."""
    s, constants = bench.shape, Constants()
    for rows in [*bench.rows, *bench.tokens]:
        few = rows in bench.rows
        w, x = _weights(bench), bench.randn(rows, 4, s.hidden)
        y = bench.randn(rows, 7, s.hidden) if few else bench.randn(rows, s.hidden, dtype=torch.bfloat16)
        before, after = bench.randn(rows, 24, scale=0.3), bench.empty(rows, 24)
        q = Quantised.allocate(rows, s.hidden, bench.device, lanes=True) if few else None
        normed = bench.empty(rows, s.hidden, dtype=torch.float32 if few else torch.bfloat16)
        scratch, target = bench.empty(partial_floats(rows, s.hidden)), bench.empty(rows, 4, s.hidden)
        update = Update(y, before, target)

        def check(x=x, w=w, update=update, after=after, normed=normed) -> float:
            streams = _post(x, update.y, update.coefficients)
            h, post, comb = ops.hc_pre(streams, *_double(w), constants.iterations, constants.hc_eps, constants.rms_eps)
            want = ops.rms_norm(h, w.norm.double(), constants.rms_eps)
            mixes = torch.cat((post, comb.flatten(1)), dim=1)
            found = max(error(update.target, streams), error(after[:, 4:], mixes))
            if normed.dtype == torch.bfloat16:
                return max(found, error(normed, want) * EXACT_BAR / HALF_BAR)
            return max(found, error(normed, want))

        def run(x=x, w=w, scratch=scratch, after=after, q=q, normed=normed, update=update) -> None:
            hc_pre(x, w, scratch, after, q, normed, update, constants)

        nbytes = 3 * 4 * x.numel() + y.numel() * y.element_size() + w.fn.numel() * 2 + normed.numel() * 4
        yield Case(f"rows {rows}", [run], nbytes, check, EXACT_BAR, [target, after, normed])


def collapse(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in bench.rows:
        w, x, normed = _weights(bench, head=True), bench.randn(rows, 4, s.hidden), bench.empty(rows, s.hidden)
        scratch = bench.empty(partial_floats(rows, s.hidden))

        def check(x=x, w=w, normed=normed) -> float:
            return error(normed, ops.rms_norm(ops.hc_collapse(x.double(), *_double(w), 1e-6, 1e-6), w.norm, 1e-6))

        def run(x=x, w=w, scratch=scratch, normed=normed) -> None:
            hc_collapse(x, w, scratch, normed=normed)

        yield Case(f"rows {rows}", [run], 4 * x.numel() + 2 * w.fn.numel(), check, EXACT_BAR, [normed])


def norm(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in [*bench.rows, *bench.tokens]:
        x, weight = bench.randn(rows, s.q_lora_rank), 1 + 0.1 * bench.randn(s.q_lora_rank)
        out = bench.empty(rows, s.q_lora_rank)

        def check(x=x, weight=weight, out=out) -> float:
            return error(out, ops.rms_norm(x.double(), weight.double(), 1e-6))

        def run(x=x, weight=weight, out=out) -> None:
            rms_norm(x, weight, 1e-6, out)

        yield Case(f"rows {rows}", [run], 8 * x.numel(), check, EXACT_BAR, [out])


def heads(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    rope = ops.Rope.plain(s.rope_dim, s.rope_base)
    for rows in [*bench.rows, *bench.tokens]:
        q, out = bench.randn(rows, s.heads * s.head_dim), bench.empty(rows, s.heads, s.head_dim, dtype=torch.bfloat16)
        cos, sin = (t.to(bench.device) for t in rope.at(torch.arange(rows) * 13))
        table = torch.stack((cos[:, ::2], sin[:, 1::2]), dim=1)

        def check(q=q, out=out, cos=cos, sin=sin) -> float:
            normed = ops.rms_norm(q.double().view(out.shape), None, 1e-6)
            return error(out, ops.apply_rope(normed, cos.double(), sin.double()))

        def run(q=q, out=out, table=table) -> None:
            norm_rope_heads(q, table, s.heads, 1e-6, out)

        yield Case(f"rows {rows}", [run], 6 * q.numel(), check, HALF_BAR, [out])


def router(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in [*bench.rows, *bench.tokens]:
        logits, bias = bench.randn(rows, s.experts, scale=3.0), bench.randn(s.experts, scale=0.1)
        chosen, weights = bench.empty(rows, s.experts_used, dtype=torch.int32), bench.empty(rows, s.experts_used)
        table = bench.empty(s.vocab, s.experts_used, dtype=torch.int32)
        ids = bench.empty(rows, dtype=torch.int32)
        if not bench.compile_only:
            table.copy_(torch.arange(s.vocab * s.experts_used, device=bench.device).view_as(table) * 7 % s.experts)
            ids.copy_(torch.arange(rows, device=bench.device) * 31 % s.vocab)
        unit = None if bench.compile_only else torch.eye(s.experts, dtype=torch.float64, device=bench.device)

        def check(logits=logits, bias=bias, chosen=chosen, weights=weights, unit=unit) -> float:
            want, w = ops.route_by_score(logits.double(), unit, bias.double(), s.experts_used, s.route_scale)
            # Scores within a rounding of one another may be chosen either way.
            same = (chosen.long() == want).all(1)
            return error(weights[same], w[same]) if float(same.double().mean()) > 0.99 else 1.0

        def check_hash(logits=logits, chosen=chosen, weights=weights, table=table, ids=ids, unit=unit) -> float:
            want, w = ops.route_by_hash(logits.double(), unit, table[ids.long()], s.route_scale)
            return error(weights, w) if torch.equal(chosen.long(), want) else 1.0

        def by_score(logits=logits, bias=bias, chosen=chosen, weights=weights) -> None:
            route_by_score(logits, bias, s.route_scale, chosen, weights)

        def by_hash(logits=logits, table=table, ids=ids, chosen=chosen, weights=weights) -> None:
            route_by_hash(logits, table, ids, s.route_scale, chosen, weights)

        yield Case(f"by score, rows {rows}", [by_score], 4 * logits.numel(), check, EXACT_BAR, [chosen, weights])
        yield Case(f"by hash, rows {rows}", [by_hash], 48 * rows, check_hash, EXACT_BAR, [chosen, weights])


def embedding(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    table = bench.randn(s.vocab, s.hidden, dtype=torch.float16)
    for rows in [*bench.rows, *bench.tokens]:
        ids, streams = bench.empty(rows, dtype=torch.int32), bench.empty(rows, s.hc_streams, s.hidden)
        if not bench.compile_only:
            ids.copy_(torch.arange(rows, device=bench.device) * 9973 % s.vocab)

        def check(ids=ids, streams=streams) -> float:
            return error(streams, ops.embed(table, ids.long(), s.hc_streams))

        def run(ids=ids, streams=streams) -> None:
            embed(table, ids, streams)

        yield Case(f"rows {rows}", [run], 4 * streams.numel() + 2 * rows * s.hidden, check, 0.0, [streams])


def shared(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in bench.tokens:
        x, out = (bench.randn(rows, n * s.expert_hidden, dtype=torch.bfloat16, scale=5.0) for n in (2, 1))

        def check(x=x, out=out) -> float:
            return error(out, ops.swiglu(x.double(), s.swiglu_clamp))

        def run(x=x, out=out) -> None:
            swiglu(x, s.swiglu_clamp, out)

        yield Case(f"rows {rows}", [run], 6 * out.numel(), check, HALF_BAR, [out])


CASES = {
    "hyper.step": step,
    "hyper.collapse": collapse,
    "norm.rows": norm,
    "norm.heads": heads,
    "router": router,
    "embed": embedding,
    "swiglu": shared,
}
