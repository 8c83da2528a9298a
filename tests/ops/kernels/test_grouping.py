"""Pairs sorted by expert against torch's stable sort, for few and for many pairs."""

from __future__ import annotations

import pytest
import torch

from ds4.ops.kernels.grouping import Groups, group
from tests.ops.kernels.kernel_checks import ON_GPU, run_twice

CASES = [(1, 6, 256), (3, 2, 8), (16, 6, 256), (64, 6, 384), (100, 6, 24), (90, 6, 8)]
if ON_GPU:
    CASES += [(128, 6, 256), (4096, 6, 256), (8192, 6, 384)]


def expected(chosen: torch.Tensor, experts: int, tile_rows: int) -> dict[str, torch.Tensor]:
    flat = chosen.flatten().long().cpu()
    valid = (flat >= 0) & (flat < experts)
    order = torch.argsort(torch.where(valid, flat, experts), stable=True)[: int(valid.sum())]
    counts = torch.bincount(flat[valid], minlength=experts)
    zero = torch.zeros(1, dtype=torch.int64)
    return {
        "order": order,
        "offsets": torch.cat((zero, counts.cumsum(0))),
        "used": counts.nonzero().flatten(),
        "tiles": torch.cat((zero, ((counts + tile_rows - 1) // tile_rows).cumsum(0))),
    }


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("tokens", "top", "experts"), CASES)
def test_group(tokens, top, experts, padding, device):
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top].to(torch.int32)
    if padding:
        chosen[tokens // 2 :: 3] = -1
        chosen[-1, 0] = experts
    chosen = chosen.to(device)
    groups = Groups.allocate(tokens * top, experts, device, tile_rows=16)
    run_twice(lambda: group(chosen, groups), groups.order, groups.offsets, groups.used, groups.tiles)
    want = expected(chosen, experts, 16)
    assert torch.equal(groups.offsets.cpu().long(), want["offsets"])
    assert torch.equal(groups.tiles.cpu().long(), want["tiles"])
    assert torch.equal(groups.order.cpu().long()[: len(want["order"])], want["order"])
    assert int(groups.used[experts]) == len(want["used"])
    assert torch.equal(groups.used.cpu().long()[: len(want["used"])], want["used"])


def test_no_expert_at_all(device):
    chosen = torch.full((2, 6), -1, dtype=torch.int32, device=device)
    groups = Groups.allocate(12, 8, device)
    group(chosen, groups)
    assert groups.offsets.tolist() == [0] * 9
    assert int(groups.used[8]) == 0


def test_one_expert_takes_all(device):
    chosen = torch.full((700, 1), 3, dtype=torch.int32, device=device)
    groups = Groups.allocate(700, 8, device, tile_rows=64)
    group(chosen, groups)
    assert groups.order.tolist() == list(range(700))
    assert groups.tiles.tolist() == [0, 0, 0, 0, 11, 11, 11, 11, 11]


def test_refusals(device):
    groups = Groups.allocate(12, 8, device)
    with pytest.raises(ValueError, match=r"int32 with 12 pairs, got torch\.int64"):
        group(torch.zeros(2, 6, dtype=torch.int64, device=device), groups)
    with pytest.raises(ValueError, match="with 12 pairs"):
        group(torch.zeros(3, 6, dtype=torch.int32, device=device), groups)
