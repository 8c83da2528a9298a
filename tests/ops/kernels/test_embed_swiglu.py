"""The token embedding and SwiGLU of the prefill path."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.embed import embed
from ds4.ops.kernels.swiglu import swiglu
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice

ROWS = [1, 64, 4096] if ON_GPU else [1, 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("hidden", [256, 4096, 7168] if ON_GPU else [256, 1100])
@pytest.mark.parametrize("rows", ROWS)
def test_embed(rows, hidden, dtype, device):
    table = randn(90, hidden, seed=1).half().to(device)
    ids = torch.randint(0, 90, (rows,), generator=torch.Generator().manual_seed(2), dtype=dtype).to(device)
    streams = torch.empty(rows, 4, hidden, device=device)
    run_twice(lambda: embed(table, ids, streams), streams)
    assert torch.equal(streams, ops.embed(table, ids.long(), 4))


def test_embed_of_padding(device):
    table, streams = randn(9, 64, seed=1).half().to(device), torch.empty(2, 4, 64, device=device)
    embed(table, torch.tensor([-1, 99], device=device), streams)
    assert torch.equal(streams[:, 2], table[[0, 8]].float())
    with pytest.raises(ValueError, match="streams"):
        embed(table, torch.zeros(3, device=device), streams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [256, 2048, 3072] if ON_GPU else [256, 1100])
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows, hidden, dtype, device):
    gate_up = (randn(rows, 2 * hidden, seed=3) * 8).to(dtype).to(device)
    out = torch.empty(rows, hidden, device=device)
    run_twice(lambda: swiglu(gate_up, 10.0, out), out)
    assert error(out, ops.swiglu(gate_up.double(), 10.0)) < 3e-6
    half = torch.empty(rows, hidden, dtype=torch.float16, device=device)
    swiglu(gate_up, 10.0, half)
    assert error(half, out) < 5e-4
    with pytest.raises(ValueError, match="expected"):
        swiglu(gate_up, 10.0, out[:, 1:])
