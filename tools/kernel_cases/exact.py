"""Cases of `ds4.ops.kernels.exact_linear`: float32 rows times matrices as they are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gguf import GGMLQuantizationType as T

from ds4.ops.kernels.exact_linear import exact_experts, exact_linear
from kernel_cases.experts import draws, pairs_of, weight_bytes
from kernel_cases.harness import Bench, Case, error

BAR = 2e-6


def _dense(bench: Bench, type: T, n: int, k: int, groups: int = 1) -> Iterator[Case]:
    weights = [bench.planes(type, n, k)]
    weights += [bench.planes(type, n, k) for _ in range(bench.copies(weights[0].nbytes) - 1)]
    for rows in bench.rows:
        x, out = bench.randn(rows, groups * k), bench.empty(rows, n)

        def check(x=x, out=out, rows=rows) -> float:
            w = bench.weight(weights[0]).view(groups, n // groups, k)
            return error(out, torch.einsum("rgk,gnk->rgn", x.double().view(rows, groups, k), w).flatten(1))

        runs = [lambda w=w, x=x, out=out: exact_linear(w, x, out, groups) for w in weights]
        nbytes = weights[0].nbytes + 4 * rows * (groups * k + n)
        yield Case(f"{n}x{k} rows {rows}", runs, nbytes, check, BAR, [out])


def _experts(type: T) -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        planes = bench.planes(type, s.expert_hidden, s.hidden, s.experts)
        per_expert = planes.nbytes // s.experts
        for rows in bench.rows:
            x, out = bench.randn(rows, s.hidden), bench.empty(rows, s.experts_used, s.expert_hidden)
            drawn = draws(bench, rows, per_expert * s.experts_used * rows)

            def check(x=x, out=out, drawn=drawn) -> float:
                pairs = pairs_of(drawn[0])
                y = torch.stack([bench.weight(planes, e) @ x[pair // s.experts_used].double() for pair, e in pairs])
                return error(out.flatten(0, 1)[[pair for pair, _ in pairs]], y)

            runs = [lambda c=c, x=x, out=out: exact_experts(planes, x, c, out) for c in drawn]
            yield Case(f"rows {rows}", runs, weight_bytes(drawn, per_expert, bench), check, BAR, [out])

    return make


CASES = {
    "exact.q_b": lambda b: _dense(b, T.Q8_0, b.shape.heads * b.shape.head_dim, b.shape.q_lora_rank),
    "exact.output_a": lambda b: _dense(
        b, T.Q8_0, b.shape.o_groups * b.shape.o_lora_rank, b.shape.heads // b.shape.o_groups * b.shape.head_dim,
        b.shape.o_groups,
    ),
    "exact.router": lambda b: _dense(b, T.F16, b.shape.experts, b.shape.hidden),
    "exact.head": lambda b: _dense(b, T.Q8_0, b.shape.vocab, b.shape.hidden),
    "exact.gate_iq2b": _experts(T.IQ2_XXS),
    "exact.gate_q4k": _experts(T.Q4_K),
}  # fmt: skip
