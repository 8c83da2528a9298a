"""The indexer: queries bit for bit up to the order of a sum, scores, and the choice of rows exactly."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.indexer import FEW_BLOCKS, index_queries, index_scores, select_rows, select_scratch
from ds4.ops.kernels.rows import KeyPlanes
from tests.ops.kernels.kernel_checks import ON_GPU, error, poison, randn, run_twice
from tests.ops.kernels.test_rows import YARN, table_of


def natural(q: torch.Tensor) -> torch.Tensor:
    """Queries of the kernel with their channels in order."""
    return torch.stack(q.cpu().float().chunk(2, dim=-1), dim=-1).flatten(-2)


@pytest.mark.parametrize("heads", [8, 64])
def test_queries(heads, device):
    rows = 64 if ON_GPU else 3
    x = randn(rows, heads * 128 + 8, seed=1, device=device)[:, 8:]
    positions = torch.randint(0, 1 << 20, (rows,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    out = torch.empty(rows, heads, 128, dtype=torch.bfloat16, device=device)
    run_twice(lambda: index_queries(x, table_of(positions, device), positions.to(device), out), out)
    turned = ops.apply_rope(x.cpu().reshape(rows, heads, 128), *YARN.at(positions.long()))
    expected = ops.fp4_round_trip(ops.hadamard(turned))
    differing = (natural(out) != expected).float().mean()
    assert differing < 1e-3
    assert error(natural(out), expected) < 1e-2


class Case:
    """Rows of several sequences and their keys, in pages of any order."""

    def __init__(self, positions: list[int], heads: int, device: str, ratio: int = 4, shared: bool = False) -> None:
        rows = len(positions)
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        self.visible = (self.positions.long().cpu() + 1) // ratio
        self.most = max(1, int(self.visible.max()))
        pages = -(-self.most // 64)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device).flip(0).contiguous()
        if shared:
            self.slots.zero_()
        slots = int(self.slots.max()) + 1
        order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(3))
        self.tables = order.view(slots, pages).to(torch.int32).to(device)
        keys = randn(slots, pages * 64, 128, seed=4)
        codes, scales = ops.pack_key(keys)
        self.keys = ops.unpack_key(codes, scales)
        self.pages = KeyPlanes.allocate(slots * pages, 64, dim=128, device=device)
        for plane, packed in zip(self.pages.planes(), (codes, scales), strict=True):
            plane[order] = packed.view(slots * pages, 64, -1).to(device)
        q = ops.fp4_round_trip(randn(rows, heads, 128, seed=5))
        self.q = torch.cat((q[..., 0::2], q[..., 1::2]), dim=-1).bfloat16().to(device)
        self.weights = randn(rows, heads, seed=6, device=device)
        self.natural = q

    def expected(self, row: int) -> torch.Tensor:
        """Scores of all keys that a row sees."""
        keys = self.keys[int(self.slots[row]), : int(self.visible[row])]
        one = slice(row, row + 1)
        return ops.index_scores(self.natural[one], 0.1 * self.weights.cpu()[one], keys)[0]

    def check(self, scores: torch.Tensor, row: int, top: int) -> None:
        """A row's scores, and nothing else, are there if it has a choice."""
        n = int(self.visible[row])
        if n > top:
            assert error(scores[row, :n].cpu(), self.expected(row)) < 1e-5
            assert torch.isnan(scores[row, n:]).all()
        else:
            assert torch.isnan(scores[row]).all()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("splits", [1, 3])
def test_scores_at_decode(heads, splits, device):
    top = 32
    positions = [1003, -1, 127, 700, 131] if not ON_GPU else [1003, -1, 127, 60_000, 131] + [40_000] * 20
    case = Case(positions, heads, device)
    scores = torch.empty(len(positions), case.most, device=device)
    run_twice(
        lambda: index_scores(
            case.q, case.weights, 0.1, case.positions, case.slots, case.tables, case.pages, 4, top, scores, splits
        ),
        scores,
    )
    for row in range(len(positions)):
        case.check(scores, row, top)


@pytest.mark.parametrize(("start", "rows"), [(0, 150), (301, 20), (301, 21)] + ([(20_000, 4096)] if ON_GPU else []))
@pytest.mark.parametrize("queries", [8, 32])
def test_scores_at_prefill(start, rows, queries, device):
    top, heads = 32, 64 if ON_GPU else 8
    case = Case([*range(start, start + rows), -1, -1], heads, device, shared=True)
    scores = torch.empty(rows + 2, case.most, device=device)
    shared = (case.positions, case.slots, case.tables, case.pages, 4, top, scores)
    run_twice(lambda: index_scores(case.q, case.weights, 0.1, *shared, queries=queries), scores)
    for row in range(0, rows + 2, 1 + rows // 60):
        case.check(scores, row, top)


def awkward_scores(rows: int, most: int, device: str) -> torch.Tensor:
    """Scores of every sign and size, in which many are equal."""
    scores = randn(rows, most, seed=7) * torch.exp(3 * randn(rows, most, seed=8))
    scores[:, ::3] = (scores[:, ::3] * 2).round() / 2
    scores[:, ::5] = 0.0
    scores[:, 1::5] = -0.0
    scores[0] = 1.5
    if rows > 1:
        scores[1] = -scores[1].abs()
        scores[2] = torch.tensor([0.0, -0.0, -0.0]).repeat(most)[:most]  # the cut runs through zeros of both signs
        scores[2, ::97] = 1.0
    return scores.to(device)


SELECTIONS = [(30, 32, 64), (1000, 32, 1024), (900, 32, 256), (2100, 100, 512), (1400, 32, 128)]
if ON_GPU:
    SELECTIONS += [(8192, 512, 8192), (262_144, 512, 8192), (262_144, 1024, 8192), (20_000, 1024, 8192)]


@pytest.mark.parametrize(("most", "top", "block"), SELECTIONS)
def test_selection(most, top, block, device):
    few = 4 * FEW_BLOCKS * block
    positions = torch.tensor(
        [4 * most - 1, 4 * most - 1, 4 * most - 2, few - 1, few + 3, 4 * top + 4, 4 * top - 1, 17, -1]
    )
    positions = positions.clamp(max=4 * most - 1).to(torch.int32)
    rows = positions.shape[0]
    scores = awkward_scores(rows, most, device)
    out = torch.empty(rows, top, dtype=torch.int32, device=device)
    scratch = None
    if most > block:
        size = (rows, -(-most // block), top)
        scratch = tuple(poison(torch.empty(size, dtype=torch.int32, device=device)) for _ in range(2))
    run_twice(lambda: select_rows(scores, positions.to(device), 4, top, out, scratch, block), out)
    for i, n in enumerate(((positions.long() + 1) // 4).tolist()):
        if n <= top:
            assert out[i].tolist() == [*range(n), *[-1] * (top - n)]
        else:
            expected = ops.select_rows(scores[i : i + 1].cpu(), torch.tensor([n]), top)
            assert torch.equal(out[i].cpu().long(), expected[0])


def test_refusals(device):
    assert select_scratch(2, 8192, 512, device) is None
    scratch = select_scratch(2, 8193, 512, device)
    assert scratch is not None
    assert scratch[0].shape == (2, 2, 512)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    case = Case([40, 41, 42], 8, device, shared=True)
    shared = (case.positions, case.slots, case.tables, case.pages, 4, 4, torch.empty(3, case.most, device=device))
    with pytest.raises(ValueError, match="2 at a time, which does not divide 3"):
        index_scores(case.q, case.weights, 0.1, *shared, queries=3)
    with pytest.raises(ValueError, match="choosing 4 of 100 keys in blocks of 64 needs its own scratch"):
        select_rows(torch.zeros(1, 100, device=device), positions, 4, 4, positions, None, 64)
