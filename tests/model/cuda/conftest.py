"""Kernels run in Triton's interpreter where there is no GPU; it has to be chosen before triton is first imported."""

import os
from typing import Any

import pytest
import torch

from ds4 import ops

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run: the GPU, or the CPU through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


_WHOLES = ("test_forward", "test_engine", "test_quality", "test_expert_layout")
_AS_THEY_ARE = ("test_a_step_only_launches", "test_buffers_of_a_step_are_as_planned")
_REAL_EXPERTS = "test_the_first_token"


@pytest.fixture(autouse=True)
def large_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of a few rows as for one of many, so it gets few.

    Decoding planes and experts, which have tests of their own, are left to torch; experts but in one test.
    """
    name = request.node.nodeid
    if torch.cuda.is_available() or not any(whole in name for whole in _WHOLES) or any(n in name for n in _AS_THEY_ARE):
        return
    from functools import partial

    from ds4.model.cuda import forward, prefill
    from ds4.ops.kernels import experts, gemv, planes

    for product in ("gemv", "gemv_both", "gemv_grouped"):
        large = partial(getattr(gemv, product), tile=gemv.Tile(warps=16, steps=1, rows=64))
        monkeypatch.setattr(forward, product, large)
        if product == "gemv":
            monkeypatch.setattr(prefill, product, large)
    monkeypatch.setattr(prefill, "dequantise_q8", lambda p, out: out.copy_(planes.unpack(p)))

    def dequantise_experts(p: planes.Planes, out: torch.Tensor, first: int, groups: object) -> None:
        out.copy_(planes.unpack(p, first * p.n, out.shape[0] * p.n).view_as(out))

    monkeypatch.setattr(prefill, "dequantise_experts", dequantise_experts)
    monkeypatch.setattr(forward, "splits_for", lambda rows, heads: 2)
    if _REAL_EXPERTS not in name:
        monkeypatch.setattr(prefill, "gate_up_fused", gate_up_fused)
        monkeypatch.setattr(prefill, "down_fused", down_fused)
    if _REAL_EXPERTS in name:
        for part in ("gate_up", "down"):
            monkeypatch.setattr(forward, part, partial(getattr(experts, part), tile=experts.Tile(warps=4)))
    else:
        monkeypatch.setattr(forward, "gate_up", gate_up)
        monkeypatch.setattr(forward, "down", down)


def gate_up_fused(
    x: Any, chosen: Any, groups: Any, gate: Any, up: Any, scales: Any, clamp: float, out: torch.Tensor
) -> None:
    """`experts_fused.gate_up_fused` in torch."""
    from ds4.ops.kernels.experts_fused import fragments, natural, scales_of

    assert scales.gate_up == scales_of([(gate, up, gate)], [torch.ones(1)], 1.0)[0].gate_up
    rows, gates, ups = natural(x) / scales.x, weights_of(gate), weights_of(up)
    for e, place in places_of(groups):
        inputs = rows[groups.order[place].long() // chosen.shape[1]]
        out[place] = fragments(ops.swiglu(inputs @ torch.cat((gates[e], ups[e])).t(), clamp), out.dtype, scales.h)


def down_fused(h: Any, chosen: Any, groups: Any, p: Any, scales: Any, weights: Any, out: torch.Tensor) -> None:
    """`experts_fused.down_fused` in torch."""
    from ds4.ops.kernels.experts_fused import natural, scales_of

    assert scales.down == scales_of([(p, p, p)], [torch.ones(1)], 1.0)[0].down
    rows, matrices = natural(h) / scales.h, weights_of(p)
    for e, place in places_of(groups):
        pairs = groups.order[place].long()
        out.flatten(0, 1)[pairs] = (rows[place] @ matrices[e].t()) * weights.flatten()[pairs].unsqueeze(1)


def places_of(groups: Any) -> list[tuple[int, slice]]:
    """The experts that have pairs, and where these are in the order."""
    ends = groups.offsets.tolist()
    return [(e, slice(*ends[e : e + 2])) for e in range(groups.experts) if ends[e] < ends[e + 1]]


def weights_of(p: Any) -> torch.Tensor:
    """[experts, n, k]."""
    from ds4.ops.kernels import planes

    return planes.unpack(p).float().view(p.experts, p.n, p.k)


def gate_up(x: Any, chosen: torch.Tensor, gate: Any, up: Any, clamp: float, out: torch.Tensor) -> None:
    """`experts.gate_up` in torch."""
    values, gates, ups = x.dequantise(), weights_of(gate), weights_of(up)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert >= 0:
            row = values[pair // chosen.shape[1]]
            out[pair] = ops.swiglu(torch.cat((gates[expert] @ row, ups[expert] @ row)), clamp)


def down(h: Any, chosen: torch.Tensor, weights: torch.Tensor, p: Any, out: torch.Tensor, shared: Any) -> None:
    """`experts.down` in torch."""
    from ds4.ops.kernels import planes

    values, matrices, top = h.dequantise(), weights_of(p), chosen.shape[1]
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert >= 0:
            product = matrices[expert] @ values[pair]
            out[pair // top, pair % top] = weights[pair // top, pair % top] * product
    out[:, top] = ops.linear(shared[1].dequantise(), planes.unpack(shared[0]).float())
