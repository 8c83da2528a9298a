"""Cases of `ds4.ops.kernels.experts`: routed experts at decode, in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gguf import GGMLQuantizationType as T
from torch import Tensor

from ds4 import ops
from ds4.ops.kernels.experts import Tile, down, down_sum, gate_up
from ds4.ops.kernels.planes import Iq2Layout
from ds4.ops.kernels.quantize import Quantised
from kernel_cases.harness import Bench, Case, error, tiles

CHECKED = 12
"""Pairs that are compared: each takes its expert as float64."""

TILES = [Tile(steps=s, warps=w) for w in (1, 2, 4) for s in (1, 2, 4, 8)]
TILES += [Tile(steps=s, warps=w, loop=True) for s, w in ((2, 1), (4, 1), (8, 1), (16, 1), (16, 4))]


def draws(bench: Bench, rows: int, nbytes: int) -> list[Tensor]:
    """Choices of experts, enough of them to read other experts in each launch."""
    s = bench.shape
    count = max(bench.copies(nbytes), 8) if bench.on_gpu else 1
    return [bench.choices(rows, s.experts_used, s.experts) for _ in range(count)]


def weight_bytes(drawn: list[Tensor], per_expert: int, bench: Bench) -> int:
    """Bytes of weights that the pairs of a launch read."""
    return per_expert if bench.compile_only else per_expert * drawn[0].numel()


def pairs_of(chosen: Tensor) -> list[tuple[int, int]]:
    flat = chosen.flatten().tolist()
    step = max(1, len(flat) // CHECKED)
    return list(enumerate(flat))[::step]


def _gate_up(type: T, layout: Iq2Layout = "b") -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        gate, up = (bench.planes(type, s.expert_hidden, s.hidden, s.experts, layout) for _ in range(2))
        per_expert = (gate.nbytes + up.nbytes) // s.experts
        for rows in bench.rows:
            x = bench.activations(rows, s.hidden, words=False, lanes=True, sums=True)
            out = bench.empty(rows * s.experts_used, s.expert_hidden)
            drawn = draws(bench, rows, per_expert * s.experts_used * rows)

            def check(x=x, out=out, drawn=drawn) -> float:
                values, pairs = x.dequantise().double(), pairs_of(drawn[0])
                expected = []
                for pair, e in pairs:
                    both = torch.cat((bench.weight(gate, e), bench.weight(up, e)))
                    expected.append(ops.swiglu((both @ values[pair // s.experts_used]).unsqueeze(0), s.swiglu_clamp))
                assert bool(torch.isfinite(out).all())
                return error(out[[pair for pair, _ in pairs]], torch.cat(expected))

            nbytes = weight_bytes(drawn, per_expert, bench)
            for label, tile in tiles(bench, None, TILES):
                runs = [
                    lambda c=c, x=x, out=out, tile=tile: gate_up(x, c, gate, up, s.swiglu_clamp, out, tile)
                    for c in drawn
                ]
                yield Case(f"rows {rows} {label}", runs, nbytes, check, 1e-5, [out])

    return make


def _down(type: T, layout: Iq2Layout = "b", form: str = "partials") -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        planes = bench.planes(type, s.hidden, s.expert_hidden, s.experts, layout)
        shared = bench.planes(T.Q8_0, s.hidden, s.expert_hidden) if form == "shared" else None
        per_expert = planes.nbytes // s.experts
        for rows in bench.rows:
            h = bench.activations(rows * s.experts_used, s.expert_hidden, words=False, lanes=True, sums=True)
            shared_x = bench.activations(rows, s.expert_hidden)
            weights = bench.rand(rows, s.experts_used) + 0.1
            places = 1 if form == "sum" else s.experts_used + (form == "shared")
            out = bench.empty(rows, places, s.hidden)
            drawn = draws(bench, rows, per_expert * s.experts_used * rows)

            def check(h=h, shared_x=shared_x, weights=weights, out=out, drawn=drawn) -> float:
                assert bool(torch.isfinite(out).all())
                if form == "sum":
                    y = _products(bench, planes, h, weights, list(enumerate(drawn[0][0].tolist())))
                    return error(out[0, 0], y.sum(0))
                pairs = pairs_of(drawn[0])
                y = _products(bench, planes, h, weights, pairs)
                worst = error(out[:, : s.experts_used].flatten(0, 1)[[pair for pair, _ in pairs]], y)
                if shared is not None:
                    worst = max(worst, error(out[:, -1], shared_x.dequantise().double() @ bench.weight(shared).t()))
                return worst

            nbytes = weight_bytes(drawn, per_expert, bench) + (shared.nbytes if shared else 0)
            both = (shared, shared_x) if shared else None
            for label, tile in tiles(bench, Tile() if form == "sum" else None, TILES):
                if form == "sum":
                    runs = [
                        lambda c=c, h=h, weights=weights, out=out, tile=tile: down_sum(
                            h, c, weights, planes, out[:, 0], tile
                        )
                        for c in drawn
                    ]
                else:
                    runs = [
                        lambda c=c, h=h, weights=weights, out=out, both=both, tile=tile: down(
                            h, c, weights, planes, out, both, tile
                        )
                        for c in drawn
                    ]
                yield Case(f"rows {rows} {label}", runs, nbytes, check, 1e-5, [out])

    return make


def _products(bench: Bench, planes, h: Quantised, weights: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    values, w = h.dequantise().double(), weights.flatten().double()
    return torch.stack([w[pair] * (bench.weight(planes, e) @ values[pair]) for pair, e in pairs])


CASES = {
    "experts.gate_up_iq2b": _gate_up(T.IQ2_XXS, "b"),
    "experts.gate_up_iq2a": _gate_up(T.IQ2_XXS, "a"),
    "experts.gate_up_q4k": _gate_up(T.Q4_K),
    "experts.gate_up_mxfp4": _gate_up(T.MXFP4),
    "experts.gate_up_q2k": _gate_up(T.Q2_K),
    "experts.down_q2k": _down(T.Q2_K),
    "experts.down_q2k_with_shared": _down(T.Q2_K, form="shared"),
    "experts.down_q2k_sum": _down(T.Q2_K, form="sum"),
    "experts.down_q4k": _down(T.Q4_K),
    "experts.down_mxfp4": _down(T.MXFP4),
    "experts.down_iq2b": _down(T.IQ2_XXS, "b"),
}
