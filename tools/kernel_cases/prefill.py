"""Cases of `ds4.ops.kernels.experts_fused`, `experts_prefill` and `terms`: products of one layer, scratches, inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gguf import GGMLQuantizationType as T
from torch import Tensor

from ds4 import ops
from ds4.ops.kernels.experts_fused import Scales, down_fused, fragments, gate_up_fused, natural, scales_of, tile_rows
from ds4.ops.kernels.experts_prefill import (
    Tile,
    dequantise_experts,
    dequantise_q8,
    down_grouped,
    gate_up_grouped,
    sum_pairs,
)
from ds4.ops.kernels.gemv_dot import COARSE, FINE
from ds4.ops.kernels.grouping import Groups, group
from ds4.ops.kernels.planes import Iq2Layout, Planes
from ds4.ops.kernels.terms import split_terms
from kernel_cases.harness import Bench, Case, error, tiles

TILES = [
    Tile(columns=columns, depth=depth, warps=warps, stages=stages)
    for columns, depth, warps, stages in (
        (64, 64, 8, 3),
        (64, 64, 4, 4),
        (128, 32, 8, 4),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (256, 64, 8, 3),
    )
]
"""Two matrices at once spill from 256 columns on."""

SLICES = (64, 256)
"""Experts whose matrices are decoded at a time."""


def _dequantise(type: T, which: str, layout: Iq2Layout = "b") -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        n, k = (s.expert_hidden, s.hidden) if which == "gate" else (s.hidden, s.expert_hidden)
        planes = bench.planes(type, n, k, s.experts, layout)
        for count in sorted({min(count, s.experts) for count in SLICES}):
            out = bench.empty(count, n, k, dtype=bench.half)
            nbytes = planes.nbytes * count // s.experts + out.numel() * 2

            def check(out=out, count=count) -> float:
                return max(error(out[e], bench.weight(planes, e)) for e in (0, count - 1))

            yield Case(
                f"{count} x {n}x{k}", [lambda out=out: dequantise_experts(planes, out)], nbytes, check, 3e-3, [out]
            )

    return make


def dense(bench: Bench) -> Iterator[Case]:
    """The largest dense matrix."""
    s = bench.shape
    n, k = s.heads * s.head_dim, s.q_lora_rank
    size = n * k * 17 // 16 + 2 * n * k
    planes = [bench.planes(T.Q8_0, n, k) for _ in range(bench.copies(size))]
    out = bench.empty(n, k, dtype=bench.half)
    runs = [lambda p=p: dequantise_q8(p, out) for p in planes]
    yield Case(f"{n}x{k}", runs, size, lambda: error(out, bench.weight(planes[0])), 3e-3, [out])


def _routed(bench: Bench, tokens: int, tile: int) -> tuple[Tensor, Groups]:
    s = bench.shape
    chosen = bench.choices(tokens, s.experts_used, s.experts)
    groups = Groups.allocate(chosen.numel(), s.experts, bench.device, tile_rows=tile)
    if not bench.compile_only:
        group(chosen, groups)
    return chosen, groups


def _some(groups: Groups, experts: int) -> list[tuple[int, slice]]:
    """A few experts with their places in the order."""
    ends = groups.offsets.tolist()
    return [(e, slice(ends[e], ends[e + 1])) for e in (0, experts // 2, experts - 1) if ends[e + 1] > ends[e]]


def gate_up(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    weight = bench.randn(s.experts, s.expert_hidden, s.hidden, dtype=bench.half, scale=s.hidden**-0.5)
    for tokens in bench.tokens:
        for tile in (64, 128):
            chosen, groups = _routed(bench, tokens, tile)
            x = bench.randn(tokens, s.hidden, dtype=bench.half)
            out = bench.empty(chosen.numel(), s.expert_hidden, dtype=bench.half)
            up = weight if bench.compile_only else weight.flip(0)

            def check(groups=groups, x=x, out=out, up=up) -> float:
                got, expected = [], []
                for e, place in _some(groups, s.experts):
                    rows = x.double()[groups.order[place].long() // s.experts_used]
                    both = torch.cat((weight[e], up[e])).double()
                    expected.append(ops.swiglu(rows @ both.t(), s.swiglu_clamp))
                    got.append(out[place])
                return error(torch.cat(got), torch.cat(expected))

            flops = 4 * chosen.numel() * s.expert_hidden * s.hidden
            nbytes = 4 * weight.numel() + 2 * (x.numel() + out.numel())
            for label, cut in tiles(bench, Tile(), TILES):
                runs = [
                    lambda x=x, chosen=chosen, groups=groups, up=up, out=out, cut=cut: gate_up_grouped(
                        x, chosen, groups, weight, up, 0, s.swiglu_clamp, out, cut
                    )
                ]
                yield Case(f"{tokens} tokens, tiles of {tile} {label}", runs, nbytes, check, 5e-3, [out], flops)


def down(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    weight = bench.randn(s.experts, s.hidden, s.expert_hidden, dtype=bench.half, scale=s.expert_hidden**-0.5)
    for tokens in bench.tokens:
        for tile in (64, 128):
            chosen, groups = _routed(bench, tokens, tile)
            h = bench.randn(chosen.numel(), s.expert_hidden, dtype=bench.half)
            weights = bench.rand(tokens, s.experts_used) + 0.1
            for dtype in (torch.float32, bench.half):
                out = bench.empty(tokens, s.experts_used, s.hidden, dtype=dtype)

                def check(groups=groups, h=h, weights=weights, out=out) -> float:
                    got, expected = [], []
                    for e, place in _some(groups, s.experts):
                        pairs = groups.order[place].long()
                        y = h[place].double() @ weight[e].double().t()
                        expected.append(y * weights.double().flatten()[pairs].unsqueeze(1))
                        got.append(out.flatten(0, 1)[pairs])
                    return error(torch.cat(got), torch.cat(expected))

                flops = 2 * chosen.numel() * s.expert_hidden * s.hidden
                nbytes = 2 * (weight.numel() + h.numel()) + out.numel() * out.element_size()
                name = f"{tokens} tokens, tiles of {tile}, {str(dtype).removeprefix('torch.')}"
                for label, cut in tiles(bench, Tile(), TILES):
                    runs = [
                        lambda h=h, chosen=chosen, groups=groups, weights=weights, out=out, cut=cut: down_grouped(
                            h, chosen, groups, weight, weights, 0, out, cut
                        )
                    ]
                    yield Case(f"{name} {label}", runs, nbytes, check, 5e-3, [out], flops)


def _scales(bench: Bench, gate: Planes, up: Planes, down: Planes) -> Scales:
    """For inputs whose norm is that of a normalised row."""
    return scales_of([(gate, up, down)], [bench.empty(bench.shape.hidden).fill_(1.0)], bench.shape.swiglu_clamp)[0]


def _fused_gate_up(type: T, layout: Iq2Layout = "b") -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        gate, up = (bench.planes(type, s.expert_hidden, s.hidden, s.experts, layout) for _ in range(2))
        scales = Scales() if bench.compile_only else _scales(bench, gate, up, gate)
        for tokens in bench.tokens:
            chosen, groups = _routed(bench, tokens, tile_rows(tokens * s.experts_used, s.experts))
            x = bench.randn(tokens, s.hidden, dtype=torch.float16)
            placed = fragments(x, scale=scales.x)
            out = bench.empty(chosen.numel(), s.expert_hidden, dtype=torch.float16)

            def check(groups=groups, x=x, out=out) -> float:
                got, expected = [], []
                for e, place in _some(groups, s.experts):
                    rows = x.double()[groups.order[place].long() // s.experts_used]
                    both = torch.cat((bench.weight(gate, e), bench.weight(up, e))).double()
                    expected.append(ops.swiglu(rows @ both.t(), s.swiglu_clamp))
                    got.append(natural(out[place]) / scales.h)
                return error(torch.cat(got), torch.cat(expected))

            flops = 4 * chosen.numel() * s.expert_hidden * s.hidden
            nbytes = gate.nbytes + up.nbytes + 2 * (x.numel() + out.numel())
            runs = [
                lambda placed=placed, chosen=chosen, groups=groups, out=out: gate_up_fused(
                    placed, chosen, groups, gate, up, scales, s.swiglu_clamp, out
                )
            ]
            yield Case(f"{tokens} tokens", runs, nbytes, check, 2e-3, [out], flops)

    return make


def _fused_down(type: T) -> Callable[[Bench], Iterator[Case]]:
    def make(bench: Bench) -> Iterator[Case]:
        s = bench.shape
        planes = bench.planes(type, s.hidden, s.expert_hidden, s.experts)
        scales = Scales() if bench.compile_only else _scales(bench, planes, planes, planes)
        for tokens in bench.tokens:
            chosen, groups = _routed(bench, tokens, tile_rows(tokens * s.experts_used, s.experts))
            h = bench.randn(chosen.numel(), s.expert_hidden, dtype=torch.float16)
            weights = bench.rand(tokens, s.experts_used) + 0.1
            placed = fragments(h, scale=scales.h)
            out = bench.empty(tokens, s.experts_used, s.hidden)

            def check(groups=groups, h=h, weights=weights, out=out) -> float:
                got, expected = [], []
                for e, place in _some(groups, s.experts):
                    pairs = groups.order[place].long()
                    y = h[place].double() @ bench.weight(planes, e).double().t()
                    expected.append(y * weights.double().flatten()[pairs].unsqueeze(1))
                    got.append(out.flatten(0, 1)[pairs])
                return error(torch.cat(got), torch.cat(expected))

            flops = 2 * chosen.numel() * s.expert_hidden * s.hidden
            nbytes = planes.nbytes + 2 * h.numel() + 4 * out.numel()
            runs = [
                lambda placed=placed, chosen=chosen, groups=groups, weights=weights, out=out: down_fused(
                    placed, chosen, groups, planes, scales, weights, out
                )
            ]
            yield Case(f"{tokens} tokens", runs, nbytes, check, 2e-3, [out], flops)

    return make


def terms(bench: Bench) -> Iterator[Case]:
    """What a layer's experts and router take of its input."""
    s = bench.shape
    for tokens in bench.tokens:
        x = bench.randn(tokens, s.hidden)
        half, both = bench.empty(*x.shape, dtype=bench.half), bench.empty(2, *x.shape, dtype=torch.float16)
        placed = bench.empty(*x.shape, dtype=torch.float16)

        def check(x=x, half=half, both=both, placed=placed) -> float:
            back = (both[0].double() + both[1].double() / FINE.value) / COARSE.value
            return max(error(back, x.double()), error(half, x.to(bench.half)), error(natural(placed), x.half()))

        runs = [lambda x=x, half=half, both=both, placed=placed: split_terms(x, half, both, placed)]
        yield Case(f"{tokens} tokens", runs, 12 * x.numel(), check, 1e-6, [half, both, placed])


def sums(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for tokens in bench.tokens:
        parts = bench.randn(tokens, s.experts_used, s.hidden)
        extra, out = bench.randn(tokens, s.hidden), bench.empty(tokens, s.hidden)
        chosen = bench.choices(tokens, s.experts_used, s.experts)

        def check(parts=parts, extra=extra, out=out) -> float:
            return error(out, parts.double().sum(1) + extra.double())

        runs = [
            lambda parts=parts, chosen=chosen, out=out, extra=extra: sum_pairs(parts, chosen, s.experts, out, extra)
        ]
        yield Case(f"{tokens} tokens", runs, 4 * (parts.numel() + 2 * out.numel()), check, 1e-6, [out])


CASES = {
    "prefill.fused_gate_up_iq2b": _fused_gate_up(T.IQ2_XXS),
    "prefill.fused_gate_up_iq2a": _fused_gate_up(T.IQ2_XXS, "a"),
    "prefill.fused_gate_up_q4k": _fused_gate_up(T.Q4_K),
    "prefill.fused_gate_up_mxfp4": _fused_gate_up(T.MXFP4),
    "prefill.fused_down_q2k": _fused_down(T.Q2_K),
    "prefill.fused_down_q4k": _fused_down(T.Q4_K),
    "prefill.fused_down_mxfp4": _fused_down(T.MXFP4),
    "prefill.dequantise_iq2b": _dequantise(T.IQ2_XXS, "gate"),
    "prefill.dequantise_iq2a": _dequantise(T.IQ2_XXS, "gate", "a"),
    "prefill.dequantise_q2k": _dequantise(T.Q2_K, "down"),
    "prefill.dequantise_q4k": _dequantise(T.Q4_K, "down"),
    "prefill.dequantise_mxfp4": _dequantise(T.MXFP4, "down"),
    "prefill.dequantise_q8": dense,
    "prefill.gate_up": gate_up,
    "prefill.down": down,
    "prefill.terms": terms,
    "prefill.sum_pairs": sums,
}
