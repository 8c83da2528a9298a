"""Sums of squares of the experts' inputs against plain sums over all pairs, in float64."""

from __future__ import annotations

import pytest
import torch

from ds4.ops.kernels.expert_energy import expert_energy
from ds4.ops.kernels.grouping import Groups, group
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# hidden, expert_hidden, experts, top, tokens
CASES = [(256, 128, 5, 2, 83), (384, 96, 3, 3, 7)]
if ON_GPU:
    CASES += [(4096, 2048, 256, 6, 4096), (7168, 3072, 384, 6, 1000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_of_every_expert(case, dtype, device):
    hidden, inner, experts, top, tokens = case
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top].to(torch.int32)
    chosen = torch.where(chosen == experts - 1, -1, chosen)  # the last expert has no pairs, and some pairs no expert
    chosen[tokens // 2] = -1
    chosen = chosen.contiguous().to(device)
    groups = Groups.allocate(tokens * top, experts, device, tile_rows=16)
    group(chosen, groups)
    x = randn(tokens, hidden, seed=1, device=device).to(dtype)
    h = randn(tokens * top, inner, seed=2, device=device).to(dtype)
    weights = torch.rand(tokens, top, generator=generator).to(device)
    gate_up = torch.empty(experts, hidden, device=device)
    down = torch.empty(experts, inner, device=device)
    run_twice(lambda: expert_energy(x, h, weights, groups, gate_up, down), gate_up, down)

    place_of = {int(pair): place for place, pair in enumerate(groups.order[: int(groups.offsets[-1])])}
    expected_gate_up = torch.zeros(experts, hidden, dtype=torch.float64)
    expected_down = torch.zeros(experts, inner, dtype=torch.float64)
    xs, hs, ws = x.double().cpu(), h.double().cpu(), weights.double().cpu().flatten()
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert >= 0:
            expected_gate_up[expert] += xs[pair // top] ** 2
            expected_down[expert] += (hs[place_of[pair]] * ws[pair]) ** 2
    assert torch.equal(gate_up[experts - 1], torch.zeros_like(gate_up[0]))
    assert torch.equal(down[experts - 1], torch.zeros_like(down[0]))
    assert error(gate_up.cpu(), expected_gate_up) < 1e-6
    assert error(down.cpu(), expected_down) < 1e-6


def test_sizes_that_do_not_fit(device):
    groups = Groups.allocate(4, 3, device)
    x, h, weights = (
        torch.zeros(2, 8, device=device),
        torch.zeros(4, 8, device=device),
        torch.zeros(2, 2, device=device),
    )
    sums = torch.zeros(3, 8, device=device)
    for wrong in ((sums[:2], sums), (sums, sums[:, :4])):
        with pytest.raises(ValueError, match="do not fit"):
            expert_energy(x, h, weights, groups, *wrong)
    with pytest.raises(ValueError, match="do not fit"):
        expert_energy(x, h[:3], weights, groups, sums, sums)
