"""RMS norm, and the norm and rotation of heads."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.norm import norm_rope_heads, rms_norm
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice

ROWS = [1, 5, 64, 1000, 8192] if ON_GPU else [1, 5]
HEADS = [(64, 512), (128, 512), (8, 256), (64, 128)] if ON_GPU else [(6, 256), (3, 96)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [512, 1024, 1536, 7168, 4096, 100] if ON_GPU else [512, 100])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows, k, dtype, device):
    wide = (randn(rows, k + 64, seed=1) * 3).to(dtype).to(device)
    x, out = wide[:, 64:], torch.empty(rows, k, device=device)
    for weight in (None, (1 + 0.1 * randn(k, seed=2)).to(device)):
        run_twice(lambda w=weight: rms_norm(x, w, 1e-6, out), out)
        want = ops.rms_norm(x.double(), None if weight is None else weight.double(), 1e-6)
        assert error(out, want) < 2e-6


def test_rms_norm_in_place(device):
    x = randn(3, 256, seed=3, device=device)
    want = ops.rms_norm(x, None, 1e-6)
    rms_norm(x, None, 1e-6, x)
    assert error(x, want) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "d"), HEADS)
@pytest.mark.parametrize("rows", ROWS[:4])
def test_heads(rows, heads, d, dtype, device):
    rope, positions = ops.Rope.plain(64, 10_000.0), torch.arange(rows) * 37
    q = (randn(rows, heads * d + 128, seed=4) * 2).to(device)[:, 128:]
    out = torch.empty(rows, heads, d, dtype=dtype, device=device)
    cos, sin = rope.at(positions)
    table = torch.stack((cos[:, ::2], sin[:, 1::2]), dim=1).to(device)
    run_twice(lambda: norm_rope_heads(q, table, heads, 1e-6, out), out)
    normed = ops.rms_norm(q.double().view(rows, heads, d), None, 1e-6)
    cos, sin = (t.double().to(device) for t in (cos, sin))
    assert error(out, ops.apply_rope(normed, cos, sin)) < (5e-4 if dtype == torch.float16 else 2e-6)


def test_refusals(device):
    x, table = torch.zeros(2, 512, device=device), torch.zeros(2, 2, 32, device=device)
    with pytest.raises(ValueError, match="rows of contiguous channels"):
        rms_norm(x, None, 1e-6, torch.empty(2, 256, device=device))
    with pytest.raises(ValueError, match="2 heads of 256"):
        norm_rope_heads(x, table, 2, 1e-6, torch.empty(2, 512))
    with pytest.raises(ValueError, match="a table of 2 rows"):
        norm_rope_heads(x, table[:1], 2, 1e-6, torch.empty(2, 2, 256, device=device))
