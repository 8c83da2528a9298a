"""Kernels run in Triton's interpreter where there is no GPU; it has to be chosen before triton is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run: the GPU, or the CPU through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def large_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of a few rows as for one of many, so it gets few.

    Decoding planes, which has tests of its own, is left to torch.
    """
    wholes = ("test_forward", "test_engine", "test_quality")
    if torch.cuda.is_available() or not any(name in request.node.nodeid for name in wholes):
        return
    from functools import partial

    from ds4.model.cuda import forward, prefill
    from ds4.ops.kernels import experts, gemv, planes

    for name in ("gemv", "gemv_both", "gemv_grouped", "gemv_f16"):
        large = partial(getattr(gemv, name), tile=gemv.Tile(warps=16, steps=1, rows=64))
        monkeypatch.setattr(forward, name, large)
        if name == "gemv":
            monkeypatch.setattr(prefill, name, large)
    monkeypatch.setattr(prefill, "dequantise_q8", lambda p, out: out.copy_(planes.unpack(p)))

    def dequantise_experts(p: planes.Planes, out: torch.Tensor, first: int, groups: object) -> None:
        out.copy_(planes.unpack(p, first * p.n, out.shape[0] * p.n).view_as(out))

    monkeypatch.setattr(prefill, "dequantise_experts", dequantise_experts)
    for name in ("gate_up", "down"):
        monkeypatch.setattr(forward, name, partial(getattr(experts, name), tile=experts.Tile(warps=4)))
