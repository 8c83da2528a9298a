"""A decode step's launch against its parts and against torch."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.attention import prepare_queries
from ds4.ops.kernels.indexer import index_queries
from ds4.ops.kernels.rows import RowPlanes
from ds4.ops.kernels.step import Queries, store_step
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn
from tests.ops.kernels.test_compress import HEAD_DIM, SLOTS, Layer
from tests.ops.kernels.test_rows import YARN, table_of


def test_decode_writes_the_window_and_both_compressors(device):
    ratio, head_dim = 4, HEAD_DIM
    rows, keys = Layer(ratio, True, False, device), Layer(ratio, True, True, device, seed=9)
    keys.tables = rows.tables
    ring = RowPlanes.allocate(SLOTS, 145, head_dim=head_dim, device=device)
    weight = 1 + 0.1 * randn(head_dim, seed=8, device=device)
    steps = 21 if not ON_GPU else 300
    # Row 0 is slot 2, row 1 padding, row 2 slot 0 and two tokens behind.
    kz = randn(steps, 3, 2 * rows.width, seed=3, device=device)
    key_kz = randn(steps, 3, 2 * keys.width, seed=4, device=device)
    kv = randn(steps, 3, head_dim, seed=5, device=device)
    slots = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    iq, q = randn(3, 20 * 128, seed=6, device=device), randn(3, 12 * head_dim, seed=7, device=device)
    fused, apart = (torch.zeros(3, 20, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    ready, other = (torch.zeros(3, 12, head_dim, dtype=torch.float16, device=device) for _ in range(2))
    for t in range(steps):
        positions = torch.tensor([t, -1, t - 2], dtype=torch.int32, device=device)
        store_step(
            positions, slots, 1e-6, kv[t], weight, table_of(positions, device), ring, ratio,
            rows.compressor(kz[t]), keys.compressor(key_kz[t]), rows.tables, table_of(positions, device, ratio - 1),
            Queries(iq, fused), Queries(q, ready),
        )  # fmt: skip
        index_queries(iq, table_of(positions, device), positions, apart)
        prepare_queries(q, table_of(positions, device), 1e-6, positions, other)
        assert torch.equal(fused[[0, 2]], apart[[0, 2]])
        assert torch.equal(ready, other)
    for row, slot, first in ((0, 2, 0), (2, 0, 2)):
        rows.check(slot, kz[first:, row])
        keys.check(slot, key_kz[first:, row])
        n = steps - first
        normed = ops.rms_norm(kv[first:, row].cpu(), weight.cpu(), 1e-6)
        expected = ops.unpack_row(*ops.pack_row(ops.apply_rope(normed, *YARN.at(torch.arange(n))), 64))
        place = torch.arange(max(0, n - 145), n)
        stored = [plane.cpu()[slot, place % 145] for plane in ring.planes()]
        got = ops.unpack_row(stored[0], stored[1], stored[2][:, :-1])
        assert error(got, expected[place]) < 2e-3
    assert torch.isnan(rows.frontier[1]).all()
    assert all(plane[1].view(torch.uint8).max() == 0 for plane in ring.planes())


def test_decode_of_a_plain_compressor_and_of_a_window_alone(device):
    ratio = 16 if not ON_GPU else 128
    layer = Layer(ratio, False, False, device)
    tokens = randn(2 * ratio + 3, 2 * layer.width, seed=3, device=device)
    kv, weight = randn(tokens.shape[0], HEAD_DIM, seed=1, device=device), torch.ones(HEAD_DIM, device=device)
    slots = torch.tensor([1], dtype=torch.int32, device=device)
    rings = [RowPlanes.allocate(2, 145, head_dim=HEAD_DIM, device=device) for _ in range(2)]
    for t in range(tokens.shape[0]):
        positions = torch.tensor([t], dtype=torch.int32, device=device)
        here, back = table_of(positions, device), table_of(positions, device, ratio - 1)
        one, compressor = kv[t : t + 1], layer.compressor(tokens[t : t + 1])
        store_step(positions, slots, 1e-6, one, weight, here, rings[0], ratio, compressor, None, layer.tables, back)
        store_step(positions, slots, 1e-6, one, weight, here, rings[1])
    layer.check(1, tokens)
    for a, b in zip(rings[0].planes(), rings[1].planes(), strict=True):
        assert torch.equal(a, b)
        assert b.view(torch.uint8).any()


def test_refusals(device):
    positions, x = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 128, device=device)
    ring = RowPlanes.allocate(1, 145, head_dim=128, device=device)
    layer = Layer(4, True, False, device)
    compressor = layer.compressor(torch.zeros(1, 2 * layer.width, device=device))
    for rows, keys in ((compressor, None), (None, compressor)):
        with pytest.raises(ValueError, match="both with page tables and angles"):
            store_step(positions, positions, 1e-6, x, x, x, ring, 4, rows, keys)
