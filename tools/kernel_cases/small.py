"""Cases of `ds4.ops.kernels.quantize` and `ds4.ops.kernels.grouping`: small kernels, their time is what counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds4 import ops
from ds4.ops.kernels.grouping import Groups, group
from ds4.ops.kernels.quantize import (
    Quantised,
    quantise,
    quantise_and_swiglu,
    rms_norm_quantise,
    swiglu_quantise,
)
from kernel_cases.harness import Bench, Case, error

BAR = 1e-2
SWIGLU_BAR = 2e-2
"""Products have larger extremes, which the scale of 128 values has to reach."""


def _outputs(*quantised: Quantised) -> list[Tensor]:
    return [t for q in quantised for t in (q.scales, q.words, q.lanes, q.fine, q.sums) if t is not None]


def _case(name: str, run, nbytes: int, check, outputs: list[Tensor], bar: float = BAR) -> Case:
    return Case(name, [run], nbytes, check, bar, outputs)


def plain(bench: Bench) -> Iterator[Case]:
    """The heads' output (words) and the routed experts' hidden values (lanes and sums)."""
    s = bench.shape
    for rows in bench.rows:
        for name, count, k, lanes in (
            ("heads", rows, s.heads * s.head_dim, False),
            ("experts", rows * s.experts_used, s.expert_hidden, True),
        ):
            x = bench.randn(count, k)
            q = Quantised.allocate(count, k, bench.device, words=not lanes, lanes=lanes, sums=lanes)
            yield _case(
                f"{name} rows {rows}",
                lambda x=x, q=q: quantise(x, q),
                x.numel() * 5,
                lambda x=x, q=q: error(q.dequantise(), x),
                _outputs(q),
            )


def rms_norm(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in bench.rows:
        for k in (s.hidden, s.q_lora_rank):
            x, weight, normed = bench.randn(rows, k), 1 + 0.1 * bench.randn(k), bench.empty(rows, k)
            q = Quantised.allocate(rows, k, bench.device, lanes=True)

            def check(x=x, weight=weight, normed=normed, q=q) -> float:
                expected = ops.rms_norm(x.double(), weight.double(), s.rms_eps)
                codes = max(error(q.dequantise(lanes), expected) for lanes in (False, True))
                return max(100 * error(normed, expected), codes)

            yield _case(
                f"{k} rows {rows}",
                lambda x=x, weight=weight, normed=normed, q=q: rms_norm_quantise(x, weight, s.rms_eps, q, normed),
                x.numel() * 10,
                check,
                [*_outputs(q), normed],
            )


def swiglu(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in bench.rows:
        x = bench.randn(rows, 2 * s.expert_hidden)
        q = Quantised.allocate(rows, s.expert_hidden, bench.device)
        yield _case(
            f"rows {rows}",
            lambda x=x, q=q: swiglu_quantise(x, s.swiglu_clamp, q),
            x.numel() * 5,
            lambda x=x, q=q: error(q.dequantise(), ops.swiglu(x.double(), s.swiglu_clamp)),
            _outputs(q),
            SWIGLU_BAR,
        )


def both(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for rows in bench.rows:
        x, pairs = bench.randn(rows, 2 * s.expert_hidden), rows * s.experts_used
        h, q = bench.randn(pairs, s.expert_hidden), Quantised.allocate(rows, s.expert_hidden, bench.device)
        lanes = Quantised.allocate(pairs, s.expert_hidden, bench.device, words=False, lanes=True, sums=True)

        def check(x=x, h=h, q=q, lanes=lanes) -> float:
            return max(error(q.dequantise(), ops.swiglu(x.double(), s.swiglu_clamp)), error(lanes.dequantise(), h))

        yield _case(
            f"rows {rows}",
            lambda x=x, h=h, q=q, lanes=lanes: quantise_and_swiglu(h, lanes, x, s.swiglu_clamp, q),
            (x.numel() + h.numel()) * 5,
            check,
            _outputs(q, lanes),
            SWIGLU_BAR,
        )


def grouping(bench: Bench) -> Iterator[Case]:
    s = bench.shape
    for tokens in [*bench.rows, *bench.tokens]:
        chosen = bench.choices(tokens, s.experts_used, s.experts)
        groups = Groups.allocate(chosen.numel(), s.experts, bench.device)

        def check(chosen=chosen, groups=groups) -> float:
            order = torch.argsort(chosen.flatten().long(), stable=True)
            counts = torch.bincount(chosen.flatten().long(), minlength=s.experts).cumsum(0)
            same = torch.equal(groups.order.long(), order) and torch.equal(groups.offsets[1:].long(), counts)
            return 0.0 if same else 1.0

        outputs = [groups.order, groups.offsets, groups.used, groups.tiles]
        yield _case(
            f"{tokens} tokens",
            lambda chosen=chosen, groups=groups: group(chosen, groups),
            8 * chosen.numel(),
            check,
            outputs,
            0.0,
        )


CASES = {
    "quantize.plain": plain,
    "quantize.rms_norm": rms_norm,
    "quantize.swiglu": swiglu,
    "quantize.both": both,
    "grouping": grouping,
}
