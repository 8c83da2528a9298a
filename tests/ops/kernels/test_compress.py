"""The compressor against `SequenceState` and the torch operations: rows, keys and frontiers, chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.compress import Compressor, store_chunk
from ds4.ops.kernels.rows import KeyPlanes, RowPlanes
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn
from tests.ops.kernels.test_rows import YARN, table_of

HEAD_DIM = 512 if ON_GPU else 128
SLOTS, PAGES = 3, 8


class Layer:
    """A compressing layer with pages and frontiers, and what torch makes of the same projections."""

    def __init__(self, ratio: int, overlap: bool, key: bool, device: str, seed: int = 0) -> None:
        self.ratio, self.overlap, self.key, self.device = ratio, overlap, key, device
        self.hd = 128 if key else HEAD_DIM
        self.width = self.hd * (2 if overlap else 1)
        self.ape = randn(ratio, self.width, seed=seed + 1, device=device)
        self.norm = 1 + 0.1 * randn(self.hd, seed=seed + 2, device=device)
        ring = (2 if overlap else 1) * ratio + 16
        self.frontier = torch.full((SLOTS, 2, ring, self.width), float("nan"), device=device)
        if key:
            self.pages: RowPlanes | KeyPlanes = KeyPlanes.allocate(SLOTS * PAGES, 64, dim=128, device=device)
        else:
            self.pages = RowPlanes.allocate(SLOTS * PAGES, 64, head_dim=self.hd, device=device)
        order = torch.randperm(SLOTS * PAGES, generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(SLOTS, PAGES).to(torch.int32).to(device)

    def compressor(self, kz: torch.Tensor) -> Compressor:
        return Compressor(kz, self.ape, self.norm, self.frontier, self.pages)

    def rows(self, slot: int, count: int) -> torch.Tensor:
        """The stored rows of a sequence as float32."""
        n = torch.arange(count)
        pages = self.tables[slot].cpu()[n // 64].long()
        planes = [plane.cpu()[pages, n % 64] for plane in self.pages.planes()]
        if self.key:
            return ops.unpack_key(*planes)
        return ops.unpack_row(planes[0], planes[1], planes[2][:, :-1])

    def expected(self, kz: torch.Tensor) -> torch.Tensor:
        """All rows of a sequence whose tokens have these projections, by torch in float64 up to the rounding."""
        kz = kz.cpu().double()
        blocks = kz.shape[0] // self.ratio
        k, z = kz.chunk(2, dim=1)
        z = z + self.ape.cpu().double()[torch.arange(kz.shape[0]) % self.ratio]
        k, z = k[: blocks * self.ratio], z[: blocks * self.ratio]
        if self.overlap:
            nothing = torch.zeros(self.ratio, self.width, dtype=torch.float64)
            k, z = torch.cat((nothing, k)), torch.cat((nothing, z))
        pooled = ops.pool_blocks(k, z, self.ratio, self.overlap, first=True)
        pooled = ops.rms_norm(pooled, self.norm.cpu().double(), 1e-6).float()
        pooled = ops.apply_rope(pooled, *YARN.at(torch.arange(blocks) * self.ratio))
        if self.key:
            return ops.fp4_round_trip(ops.hadamard(pooled))
        return ops.unpack_row(*ops.pack_row(pooled, 64))

    def check(self, slot: int, kz: torch.Tensor) -> None:
        """Rows and frontier of a sequence that has seen exactly these tokens."""
        blocks = kz.shape[0] // self.ratio
        if blocks:
            # A value on the edge between two codes may fall on either side.
            assert error(self.rows(slot, blocks), self.expected(kz)) < (2e-2 if self.key else 2e-3)
        ring, n = self.frontier.shape[2], kz.shape[0]
        last = torch.arange(max(0, n - ring), n)
        k, z = kz.cpu()[last].chunk(2, dim=1)
        z = z + self.ape.cpu()[last % self.ratio]
        assert torch.equal(self.frontier[slot].cpu()[:, last % ring], torch.stack((k, z)))


KINDS = [(4, True, False), (4, True, True), (16 if not ON_GPU else 128, False, False)]


@pytest.mark.parametrize(("ratio", "overlap", "key"), KINDS)
@pytest.mark.parametrize("chunks", [(37, 1, 24), (7, 70), (64,)] + ([(150, 300, 1)] if ON_GPU else []))
def test_chunks(ratio, overlap, key, chunks, device):
    layer = Layer(ratio, overlap, key, device)
    tokens = randn(sum(chunks), 2 * layer.width, seed=3, device=device)
    done = 0
    for size in chunks:
        padding = 3
        wide = torch.full((size + padding, 2 * layer.width + 6), float("nan"), device=device)
        kz = wide[:, 4 : 4 + 2 * layer.width]
        kz[:size] = tokens[done : done + size]
        positions = torch.arange(done, done + size + padding, dtype=torch.int32, device=device)
        positions[size:] = -1
        slots = torch.full_like(positions, 1)
        turn = table_of(positions, device, ratio - 1)
        store_chunk(positions, slots, 1e-6, ratio, layer.compressor(kz), layer.tables, turn)
        done += size
        layer.check(1, tokens[:done])
    assert torch.isnan(layer.frontier[[0, 2]]).all()


def test_refusals(device):
    layer = Layer(4, True, False, device)
    with pytest.raises(ValueError, match="do not fit a compressor of width"):
        layer.compressor(torch.zeros(1, 64, device=device)).args()
