"""The variants in float32 of kernels whose products are of 16 bits else: errors of float32, no larger."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.attention import Parts, prepare_queries
from ds4.ops.kernels.experts_prefill import down_grouped, gate_up_grouped
from tests.ops.kernels.kernel_checks import ON_GPU, error, run_twice
from tests.ops.kernels.test_attention import LAYERS, SHAPES, Case
from tests.ops.kernels.test_experts_prefill import CASES, random_case

BAR = 5e-6


@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("ratio", "top"), LAYERS)
def test_attention(heads, head_dim, ratio, top, device):
    start, count = (120, 5) if not ON_GPU else (3000, 300)
    positions = [*range(start, start + count), -1]
    case = Case(positions, heads, head_dim, ratio, top, device, ring=count + 128, shared=True)
    expected = case.expected()
    prepare_queries(case.q, case.turn, 1e-6, case.positions, case.q.view(count + 1, heads, head_dim))
    out = torch.empty(count + 1, heads, head_dim, device=device)
    zeros = torch.zeros_like(case.slots)
    run_twice(lambda: case.run(out, window_slots=zeros, ready=True, exact=True), out)
    case.compare(out, expected, BAR)
    with pytest.raises(ValueError, match=r"float16, not torch\.float32"):
        case.run(out, window_slots=zeros, ready=True)


def test_attention_in_parts(device):
    """Queries as the projection leaves them, and rows whose values float16 has no exponents for."""
    heads, head_dim = SHAPES[0]
    case = Case([5, -1, 600], heads, head_dim, 4, 32, device)
    case.ring.scales[..., :-1] -= 40
    case.window[..., :-64] *= 2.0**-40
    case.window[..., -64:] *= 2.0**-40
    case.ring.tail.mul_(2.0**-40)
    parts = Parts.allocate(3, 4, heads, head_dim, device)
    out = torch.empty(3, heads, head_dim, device=device)
    run_twice(lambda: case.run(out, parts, exact=True), out, parts.out, parts.stats)
    case.compare(out, case.expected(), BAR)


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_grouped_products(case, tile, device):
    hidden, inner, experts, top, tokens, _ = case
    case = (hidden, inner, experts, top, tokens, tile)
    chosen, groups, x, gate, up, down, weights = random_case(case, torch.float32, device)
    h = torch.empty(tokens * top, inner, device=device)
    parts = torch.empty(tokens, top, hidden, device=device)

    def run() -> None:
        gate_up_grouped(x, chosen, groups, gate, up, 0, 10.0, h)
        down_grouped(h, chosen, groups, down, weights, 0, parts)

    run_twice(run, h, parts)
    count = int(groups.offsets[-1])
    order = groups.order[:count].long()
    expert_of = chosen.flatten()[order].long()
    for e in expert_of.unique().tolist():
        at = (expert_of == e).nonzero().flatten()
        both = torch.cat((gate[e], up[e])).double()
        expected = ops.swiglu(x.double()[order[at] // top] @ both.t(), 10.0)
        assert error(h[at], expected) < BAR
        products = h.double()[at] @ down[e].double().t() * weights.double().flatten()[order[at], None]
        assert error(parts.view(-1, hidden)[order[at]], products) < BAR
