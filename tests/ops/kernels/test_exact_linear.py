"""Products of float32 rows with quantised matrices, against float64; and that a row's are its own."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4.ops.kernels import planes as P
from ds4.ops.kernels.exact_linear import exact_experts, exact_linear
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, random_raw, run_twice
from tests.ops.kernels.test_experts import FORMS, choices, ids, make

BAR = 2e-6
# Rows and channels: six units are less than a whole tile, and the last rows are fewer than those of a program.
DENSE = [(1024, 4096), (256, 7168), (513, 768), (6, 256)] if ON_GPU else [(24, 256), (67, 768)]
ROWS = [1, 2, 5, 64] if ON_GPU else [1, 3]


def dense(type: T, n: int, k: int, device: str) -> P.Planes:
    planes = P.allocate(type, n, k, device)
    P.repack(random_raw(type, n, k, 1, device), planes)
    return planes


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), DENSE)
@pytest.mark.parametrize("type", [T.Q8_0, T.F16], ids=ids)
def test_dense(type, n, k, rows, device):
    planes = dense(type, n, k, device)
    # Rows stand in a larger buffer, as parts of a layer's projections do.
    x = randn(rows, k + 8, seed=2, device=device)[:, :k]
    buffer = torch.empty(rows + 3, n + 4, device=device)
    run_twice(lambda: exact_linear(planes, x, buffer[:rows, :n]), buffer)
    assert error(buffer[:rows, :n], x.double() @ P.unpack(planes).double().t()) < BAR
    assert buffer[:, n:].isnan().all()
    assert buffer[rows:].isnan().all()


@pytest.mark.parametrize(("groups", "group_rows"), [(2, 6), (8, 1024 if ON_GPU else 4)])
def test_groups(groups, group_rows, device):
    planes = dense(T.Q8_0, groups * group_rows, 256, device)
    x = randn(3, groups * 256, seed=3, device=device)
    out = torch.empty(3, groups * group_rows, device=device)
    run_twice(lambda: exact_linear(planes, x, out, groups), out)
    weight = P.unpack(planes).double().view(groups, group_rows, 256)
    expected = torch.einsum("rgk,gnk->rgn", x.double().view(3, groups, 256), weight).flatten(1)
    assert error(out, expected) < BAR


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(4096, 2048, 8, 6), (256, 256, 8, 2)] if ON_GPU else [(768, 12, 3, 2)], ids=str)
@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_experts(type, layout, shape, rows, device):
    k, n, experts, top = shape
    planes, weight = make(type, layout, n, k, experts, 1, device)
    chosen = choices(rows, top, experts, device)
    weights = torch.rand(rows, top, generator=torch.Generator().manual_seed(2)).to(device) + 0.1
    chosen[0, -1] = experts  # neither does that name one
    of = weight[chosen.clamp(0, experts - 1).long()]
    named = (chosen >= 0) & (chosen < experts)
    # The same input for all pairs of a row, without weights; and an input of each pair's own, with them.
    x, each = randn(rows, k, seed=3, device=device), randn(rows, top + 1, k, seed=4, device=device)[:, :top]
    for given, factor, inputs in ((x, None, x[:, None].expand(-1, top, -1)), (each, weights, each)):
        buffer = torch.empty(rows, top + 1, n, device=device)
        out = buffer[:, :top]
        run_twice(lambda given=given, factor=factor, out=out: exact_experts(planes, given, chosen, out, factor), buffer)
        expected = torch.einsum("rtk,rtnk->rtn", inputs.double(), of)
        if factor is not None:
            expected = expected * factor.double()[:, :, None]
        assert error(out[named], expected[named]) < BAR
        assert out[~named].isnan().all()
        assert buffer[:, top].isnan().all()


def test_a_row_does_not_depend_on_the_others(device):
    for n, k in [(4096, 4096), (1024, 1536), (96, 256)] if ON_GPU else [(8, 256)]:
        most = 64 if ON_GPU else 5
        x = randn(most, k, seed=5, device=device)
        for type in (T.Q8_0, T.F16):
            planes, all_rows = dense(type, n, k, device), torch.empty(most, n, device=device)
            exact_linear(planes, x, all_rows)
            for first, rows in ((0, 1), (1, 1), (1, 2), (1, 3), (most - 1, 1)):
                some = torch.empty(rows, n, device=device)
                exact_linear(planes, x[first : first + rows], some)
                assert torch.equal(some, all_rows[first : first + rows])


def test_refusals(device):
    planes, x, out = dense(T.Q8_0, 8, 256, device), randn(2, 256, seed=1, device=device), torch.empty(2, 8).to(device)
    with pytest.raises(ValueError, match=r"float32 with 256 channels, got torch.float16 \[2, 256\]"):
        exact_linear(planes, x.half(), out)
    with pytest.raises(ValueError, match=r"float32 with 512 channels, got torch.float32 \[2, 256\]"):
        exact_linear(planes, x, out, 2)
    with pytest.raises(ValueError, match=r"2 rows of 8, got torch.float32 \[2, 4\]"):
        exact_linear(planes, x, out[:, :4])
    chosen = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="planes of experts"):
        exact_experts(planes, x, chosen, out[:, None])
    experts, _ = make(T.Q2_K, "b", 8, 256, 2, 1, device)
    for others in (experts, P.allocate(T.Q8_0, 8, 256, device, experts=2)):
        with pytest.raises(ValueError, match=f"a single matrix in Q8_0 or F16, got {others.FORMAT}"):
            exact_linear(others, x, out)
    with pytest.raises(ValueError, match="contiguous int32 choices"):
        exact_experts(experts, x, chosen.long(), out[:, None])
    with pytest.raises(ValueError, match=r"weights \[2, 1\], got \[2\]"):
        exact_experts(experts, x, chosen, out[:, None], torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"float32 \[2, 256\] or \[2, 1, 256\], got torch.float32 \[1, 256\]"):
        exact_experts(experts, x[:1], chosen, out[:, None])
    with pytest.raises(ValueError, match=r"\[2, 1, 8\], got torch.float32 \[2, 8\]"):
        exact_experts(experts, x, chosen, out)
