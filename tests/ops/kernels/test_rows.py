"""Rows and keys in planes: bit for bit what the torch operations pack, and what the window takes."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.rows import (
    KeyPlanes,
    RowPlanes,
    pack_keys,
    pack_rows,
    rope_tables,
    store_window,
    unpack_keys,
    unpack_rows,
)
from tests.ops.kernels.kernel_checks import ON_GPU, error, poison, randn, run_twice

HEAD_DIMS = [256, 512]
YARN = ops.Rope.yarn(64, 160_000.0, 16.0, 65_536, 32.0, 1.0)
PLAIN = ops.Rope.plain(64, 10_000.0)


def spread(rows: int, channels: int, seed: int, device: str) -> torch.Tensor:
    """Values of very different sizes from row to row, some rows of zeros."""
    x = randn(rows, channels, seed=seed) * torch.exp(4 * randn(rows, 1, seed=seed + 1))
    x[rows // 2] = 0.0
    return x.to(device)


def ties(channels: int, device: str) -> torch.Tensor:
    """Halfway values of every magnitude of E4M3, small ones too, and the largest, in one block each."""
    codes = torch.arange(126, dtype=torch.uint8)
    low = codes.view(torch.float8_e4m3fn).float()
    high = (codes + 1).view(torch.float8_e4m3fn).float()
    middle = (low + high) / 2
    near = torch.cat((middle, torch.nextafter(middle, high), torch.nextafter(middle, low), -middle))
    blocks = near.split(63)
    x = torch.zeros(len(blocks), channels)
    for i, block in enumerate(blocks):
        x[i, : block.numel()] = block
        x[i, 63] = 448.0
    return x.to(device)


def empty_rows(rows: int, head_dim: int, device: str) -> RowPlanes:
    planes = RowPlanes.allocate(rows, head_dim=head_dim, device=device)
    for plane in planes.planes():
        poison(plane)
    return planes


def check_rows(planes: RowPlanes, x: torch.Tensor) -> None:
    """The planes of loose rows hold exactly `ops.pack_row(x)`."""
    codes, tail, scales = ops.pack_row(x, 64)
    assert torch.equal(planes.codes, codes)
    assert torch.equal(planes.tail.view(torch.int16), tail.view(torch.int16))
    assert torch.equal(planes.scales[:, :-1], scales)
    assert planes.scales[:, -1].max() == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_are_packed_bit_for_bit(head_dim, device):
    for x in (spread(24, head_dim, 1, device), ties(head_dim, device), 1e-5 * ties(head_dim, device)):
        planes = empty_rows(x.shape[0], head_dim, device)
        run_twice(lambda x=x, planes=planes: pack_rows(x, planes), *planes.planes())
        check_rows(planes, x)
        out = poison(torch.empty_like(x))
        unpack_rows(planes, out)
        expected = ops.unpack_row(planes.codes, planes.tail, planes.scales[:, :-1])
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_every_code_and_scale_is_read_exactly(device):
    planes = empty_rows(254, 256, device)
    codes = torch.arange(254 * 192).view(254, 192) * 7 % 256
    codes[(codes & 127) == 127] = 0  # not a number
    planes.codes.copy_(codes.to(torch.uint8))
    planes.tail.copy_(randn(254, 64, seed=1).bfloat16())
    planes.scales.copy_((1 + torch.arange(254 * 4).view(254, 4) % 245).to(torch.uint8))
    out = poison(torch.empty(254, 256, device=device))
    unpack_rows(planes, out)
    assert torch.equal(out, ops.unpack_row(planes.codes, planes.tail, planes.scales[:, :-1]))


def test_keys_are_packed_bit_for_bit(device):
    x = spread(24, 128, 3, device)
    x[0, :12] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -0.0, -5.0])
    x[0, 12:] = 0.0
    planes = KeyPlanes.allocate(24, dim=128, device=device)
    run_twice(lambda: pack_keys(x, planes, transform=False), *planes.planes())
    codes, scales = ops.pack_key(x)
    assert torch.equal(planes.codes, codes)
    assert torch.equal(planes.scales, scales)
    out = poison(torch.empty_like(x))
    unpack_keys(planes, out)
    assert torch.equal(out.view(torch.int32), ops.unpack_key(codes, scales).view(torch.int32))


def test_keys_after_the_transform(device):
    x = randn(16, 128, seed=5, device=device)
    planes = KeyPlanes.allocate(16, dim=128, device=device)
    run_twice(lambda: pack_keys(x, planes), *planes.planes())
    codes, _ = ops.pack_key(ops.hadamard(x.cpu()))
    # The order of a sum may tip a value that lies between two codes.
    assert (planes.codes.cpu() != codes).float().mean() < 2e-3


@pytest.mark.parametrize("span", [300, 1 << 20])
def test_rope_tables(span, device):
    positions = torch.randint(0, span, (9,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    positions[3] = -1
    back = torch.tensor([0, 0, 3, 127], dtype=torch.int32)
    frequencies = torch.stack([PLAIN.frequencies, *[YARN.frequencies] * 3])
    out = torch.empty(4, 9, 2, 32, device=device)
    run_twice(lambda: rope_tables(positions.to(device), frequencies.to(device), back.to(device), out), out)
    for kind, rope in enumerate((PLAIN, YARN, YARN, YARN)):
        cos, sin = rope.at((positions.long() - back[kind]).clamp(min=0))
        assert (out[kind, :, 0].cpu() - cos[:, ::2]).abs().max() < 1e-6
        assert (out[kind, :, 1].cpu() - sin[:, 1::2]).abs().max() < 1e-6


def table_of(positions: torch.Tensor, device: str, back: int = 0, rope: ops.Rope = YARN) -> torch.Tensor:
    """What `rope_tables` makes, by torch: float32 [rows, 2, 32]."""
    cos, sin = rope.at((positions.long().cpu() - back).clamp(min=0))
    return torch.stack((cos[:, ::2], sin[:, 1::2]), dim=1).contiguous().to(device)


def reference_rows(kv: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    normed = ops.rms_norm(kv.cpu(), weight.cpu(), 1e-6)
    return ops.apply_rope(normed, *YARN.at(positions.long().cpu().clamp(min=0)))


def unpacked(planes: RowPlanes) -> torch.Tensor:
    return ops.unpack_row(planes.codes.cpu(), planes.tail.cpu(), planes.scales.cpu()[..., :-1])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_window_rows_at_decode(head_dim, device):
    ring = RowPlanes.allocate(2, 5, 145, head_dim=head_dim, device=device)
    for plane in ring.planes():
        poison(plane)
    before = [plane.clone() for plane in ring.planes()]
    wide = randn(4, head_dim + 64, seed=7, device=device)
    kv, weight = wide[:, 32 : 32 + head_dim], 1 + 0.1 * randn(head_dim, seed=8, device=device)
    positions = torch.tensor([0, 144, -1, 1000], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    store_window(kv, weight, 1e-6, table_of(positions, device), positions, slots, ring.layer(1))
    expected = ops.unpack_row(*ops.pack_row(reference_rows(kv, weight, positions), 64))
    touched = torch.zeros(2, 5, 145, dtype=torch.bool)
    for row in (0, 1, 3):
        at = (1, int(slots[row]), int(positions[row]) % 145)
        assert error(unpacked(ring)[at], expected[row]) < 2e-3
        touched[at] = True
    for plane, old in zip(ring.planes(), before, strict=True):
        changed = (plane.cpu().view(torch.uint8) != old.cpu().view(torch.uint8)).any(-1)
        assert torch.equal(changed, touched)


@pytest.mark.parametrize(("start", "rows", "padding"), [(0, 20, 0), (130, 40, 3), (97, 150, 5), (300, 145, 0)])
def test_window_rows_at_prefill(start, rows, padding, device):
    head_dim, total = 128 if not ON_GPU else 512, rows + padding
    length = total + 130
    ring = RowPlanes.allocate(3, 145, head_dim=head_dim, device=device)
    scratch = RowPlanes.allocate(1, length, head_dim=head_dim, device=device)
    weight = 1 + 0.1 * randn(head_dim, seed=8, device=device)
    old = torch.arange(max(0, start - 145), start, dtype=torch.int32, device=device)
    old_kv = randn(max(1, len(old)), head_dim, seed=9, device=device)[: len(old)]
    two = torch.full((max(total, 145),), 2, dtype=torch.int32, device=device)
    if start:
        store_window(old_kv, weight, 1e-6, table_of(old, device), old, two, ring)
    kv = randn(total, head_dim, seed=7, device=device)
    positions = torch.arange(start, start + total, dtype=torch.int32, device=device)
    positions[rows:] = -1
    store_window(kv, weight, 1e-6, table_of(positions, device), positions, two, ring, scratch)
    every = torch.cat((reference_rows(old_kv, weight, old), reference_rows(kv, weight, positions)[:rows]))
    every = ops.unpack_row(*ops.pack_row(every, 64))
    place = torch.arange(start - len(old), start + rows)
    assert error(unpacked(ring)[2, place[-145:] % 145], every[-145:]) < 2e-3
    seen = place[-(rows + 127) :]
    assert error(unpacked(scratch)[0, seen % length], every[-len(seen) :]) < 2e-3
    assert all(plane[:2].view(torch.uint8).max() == 0 for plane in ring.planes())


def test_refusals(device):
    with pytest.raises(ValueError, match="not 80"):
        RowPlanes.allocate(1, head_dim=80, device=device)
    with pytest.raises(ValueError, match="not 32"):
        KeyPlanes.allocate(1, dim=32, device=device)
    planes = RowPlanes.allocate(1, 145, head_dim=128, device=device)
    positions = torch.zeros(40, dtype=torch.int32, device=device)
    x = torch.zeros(40, 128, device=device)
    with pytest.raises(ValueError, match="scratch ring of 145 rows is too short for 40 rows and a window of 128"):
        store_window(x, x[0], 1e-6, x, positions, positions, planes, planes)
