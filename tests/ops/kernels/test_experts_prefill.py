"""Decoded scratches equal the weights, grouped products equal the reference, slices of experts equal the whole."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4 import ops
from ds4.ops.kernels import planes as P
from ds4.ops.kernels.experts_prefill import (
    dequantise_experts,
    dequantise_q8,
    down_grouped,
    gate_up_grouped,
    sum_pairs,
)
from ds4.ops.kernels.grouping import Groups, group
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, random_raw, run_twice
from tests.ops.kernels.test_experts import FORMS, ids, make

# The interpreter gets bf16 products wrong, and CPUs have them without hardware.
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]
# hidden, expert_hidden, experts, top, tokens, rows of a tile
CASES = [(256, 128, 5, 2, 11, 16)]
if ON_GPU:
    CASES += [(4096, 2048, 24, 6, 600, 128), (4096, 2048, 64, 6, 300, 64), (7168, 3072, 12, 6, 500, 128)]


@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_dequantise_experts(type, layout, dtype, device):
    experts, n, k = (6, 2048, 4096) if ON_GPU else (4, 16, 768)
    planes, weight = make(type, layout, n, k, experts, 1, device)
    out = torch.empty(2, n, k, dtype=dtype, device=device)
    run_twice(lambda: dequantise_experts(planes, out, first=2), out)
    expected = weight[2:4]
    step = {torch.float32: 2e-7, torch.float16: 3e-4, torch.bfloat16: 2e-3}[dtype]
    assert error(out, expected) < step
    assert float(((out.double() - expected).abs() / expected.abs().amax()).max()) < 4 * step


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
def test_layouts_of_iq2_xxs_decode_to_the_same_bits(dtype, device):
    experts, n, k = (3, 2048, 4096) if ON_GPU else (1, 8, 256)
    found = {}
    for layout in ("a", "b"):
        planes, _ = make(T.IQ2_XXS, layout, n, k, experts, 1, device)
        found[layout] = torch.empty(experts, n, k, dtype=dtype, device=device)
        dequantise_experts(planes, found[layout])
    assert found["a"].abs().max() > 0
    assert torch.equal(found["a"], found["b"])


def test_dequantise_leaves_out_what_is_not_used(device):
    planes, weight = make(T.Q2_K, "b", 16, 256, 4, 2, device)
    groups = Groups.allocate(4, 4, device)
    group(torch.tensor([[0, 3], [3, 0]], dtype=torch.int32, device=device), groups)
    out = torch.full((4, 16, 256), 7.0, device=device)
    dequantise_experts(planes, out, groups=groups)
    for e in (0, 3):
        assert error(out[e], weight[e]) < 1e-6
    assert torch.equal(out[1:3], torch.full_like(out[1:3], 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
@pytest.mark.parametrize("k", [1536, 4096] if ON_GPU else [128, 768])
def test_dequantise_q8(k, dtype, device):
    n = 512 if ON_GPU else 12
    planes = P.allocate(T.Q8_0, n, k, device)
    P.repack(random_raw(T.Q8_0, n, k, 3, device), planes)
    out = torch.empty(n, k, dtype=dtype, device=device)
    run_twice(lambda: dequantise_q8(planes, out), out)
    assert torch.equal(out, P.unpack(planes).to(dtype))


def random_case(case, dtype, device):
    hidden, inner, experts, top, tokens, tile = case
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top].to(torch.int32)
    # Most tokens like the first experts, the last expert is not chosen, one token is padding.
    chosen = torch.where(chosen == experts - 1, 0, chosen)
    chosen[tokens // 2] = -1
    chosen = chosen.contiguous().to(device)
    groups = Groups.allocate(tokens * top, experts, device, tile_rows=tile)
    group(chosen, groups)
    x = randn(tokens, hidden, seed=1, device=device).to(dtype)
    gate, up = ((randn(experts, inner, hidden, seed=s, device=device) * hidden**-0.5).to(dtype) for s in (2, 3))
    down = (randn(experts, hidden, inner, seed=4, device=device) * inner**-0.5).to(dtype)
    weights = torch.rand(tokens, top, generator=generator).to(device)
    return chosen, groups, x, gate, up, down, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_grouped_products(case, dtype, device):
    """Experts in two slices, gate to sum, against the reference in float64 and its own intermediate steps."""
    hidden, inner, experts, top, tokens, _ = case
    chosen, groups, x, gate, up, down, weights = random_case(case, dtype, device)
    h = torch.empty(tokens * top, inner, dtype=dtype, device=device)
    parts = torch.empty(tokens, top, hidden, device=device)
    y = torch.empty(tokens, hidden, device=device)
    extra = randn(tokens, hidden, seed=9, device=device)
    half = experts // 2
    slices = [slice(0, half), slice(half, experts)]

    def run() -> None:
        for s in slices:
            gate_up_grouped(x, chosen, groups, gate[s], up[s], s.start, 10.0, h)
        for s in slices:
            down_grouped(h, chosen, groups, down[s], weights, s.start, parts)
        sum_pairs(parts, chosen, experts, y, extra)

    run_twice(run, h, parts, y)
    real = (chosen[:, 0] >= 0).nonzero().flatten()
    count = int(groups.offsets[-1])
    order = groups.order[:count].long()
    expert_of = chosen.flatten()[order].long()
    both = torch.cat((gate, up), dim=1).double()
    inputs = x.double()[order // top]
    expected = torch.empty(count, inner, dtype=torch.float64, device=device)
    for e in range(experts):
        at = (expert_of == e).nonzero().flatten()
        expected[at] = ops.swiglu(inputs[at] @ both[e].t(), 10.0)
    assert error(h[:count], expected) < (2e-3 if dtype == torch.bfloat16 else 5e-4)
    products = torch.empty(count, hidden, dtype=torch.float64, device=device)
    for e in range(experts):
        at = (expert_of == e).nonzero().flatten()
        products[at] = h[:count].double()[at] @ down[e].double().t()
    products *= weights.double().flatten()[order].unsqueeze(1)
    bar = 1e-4 if ON_GPU else 1e-5  # sums of tensor cores
    assert error(parts.view(-1, hidden)[order], products) < bar
    total = extra.double().index_add(0, order // top, products)
    assert error(y[real], total[real]) < bar


def test_sum_keeps_its_order(device):
    """One after the other in float32, and nothing from places without an expert."""
    parts = randn(3, 6, 256, seed=5, device=device) * torch.exp(8 * randn(3, 6, 1, seed=6, device=device))
    chosen = torch.zeros(3, 6, dtype=torch.int32, device=device)
    chosen[1, 2] = -1
    parts[1, 2] = float("nan")
    out = torch.empty(3, 256, device=device)
    run_twice(lambda: sum_pairs(parts, chosen, 8, out), out)
    expected = torch.zeros(3, 256, device=device)
    for i in range(6):
        expected += torch.where(chosen[:, i, None] >= 0, parts[:, i], 0.0)
    assert torch.equal(out, expected)


def test_refusals(device):
    planes, _ = make(T.Q2_K, "b", 16, 256, 4, 2, device)
    with pytest.raises(ValueError, match=r"experts from 3 into \[2, 16, 256\], there are 4"):
        dequantise_experts(planes, torch.empty(2, 16, 256, device=device), first=3)
    with pytest.raises(ValueError, match="a scratch of 2 x 16 x 256 values"):
        dequantise_experts(planes, torch.empty(2, 16, 128, device=device))
    groups = Groups.allocate(4, 4, device)
    chosen = torch.zeros(2, 2, dtype=torch.int32, device=device)
    x, w = torch.empty(2, 256, device=device), torch.empty(4, 16, 256, device=device)
    with pytest.raises(ValueError, match=r"x \[2, 256\], gate \[4, 16, 256\]"):
        gate_up_grouped(x, chosen, groups, w, w, 0, 10.0, torch.empty(3, 16, device=device))
    with pytest.raises(ValueError, match="do not fit"):
        down_grouped(x, chosen, groups, w, x, 0, torch.empty(2, 2, 16, device=device))
