"""Routed experts from planes against float64 on the same quantised activations, and against the unquantised ones."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4 import ops
from ds4.ops.kernels import planes as P
from ds4.ops.kernels.experts import Tile, down, down_sum, gate_up
from ds4.ops.kernels.quantize import Quantised, quantise
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, random_raw, run_twice

FORMS = [(T.IQ2_XXS, "b"), (T.IQ2_XXS, "a"), (T.Q2_K, "b"), (T.Q4_K, "b"), (T.MXFP4, "b")]
# Weights of a format's random blocks, as a multiple of their scales.
SPREAD = {T.IQ2_XXS: 55.0, T.Q2_K: 15.0, T.Q4_K: 286.0}
# hidden, expert_hidden, experts, top. Without a GPU: rows of six units, which leave two lanes of eight idle.
SHAPES = [(4096, 2048, 8, 6), (7168, 3072, 7, 6), (256, 256, 8, 2)] if ON_GPU else [(768, 16, 3, 2)]
ROWS = [1, 2, 16, 64] if ON_GPU else [3]
# The interpreter takes as long for a wide program as for a narrow one.
TILE = Tile() if ON_GPU else Tile(warps=4)


def ids(value: object) -> str:
    return value.name if isinstance(value, T) else str(value)


def make(type: T, layout: str, n: int, k: int, experts: int, seed: int, device: str) -> tuple[P.Planes, torch.Tensor]:
    """Planes and their weights as float64 [experts, n, k]; normal inputs give outputs of about 2, a few for MXFP4."""
    planes = P.allocate(type, n, k, device, experts=experts, layout=layout)
    size = 2 * k**-0.5 / SPREAD.get(type, 1.0)
    P.repack(random_raw(type, experts * n, k, seed, device, size=size), planes)
    return planes, P.unpack(planes).double().view(experts, n, k)


def choices(rows: int, top: int, experts: int, device: str) -> torch.Tensor:
    """Distinct experts for each row; the last row is padding where there are several."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :top].to(torch.int32)
    if rows > 2:
        chosen[-1] = -1
    return chosen.contiguous().to(device)


def activations(rows: int, k: int, seed: int, device: str) -> tuple[Quantised, torch.Tensor]:
    x = randn(rows, k, seed=seed, device=device)
    q = Quantised.allocate(rows, k, device, words=False, lanes=True, sums=True)
    quantise(x, q)
    return q, x


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_gate_up(type, layout, shape, rows, device):
    """Bytes move gate and up by 0.55 % each (`test_down` has the bar for one product), so their product by 0.8 %.

    That holds for gates of a natural size. Were they in the hundreds, the clamp would make a switch of each, and those
    of a percent, which fall on the other side, would be all of the error.
    """
    k, n, experts, top = shape
    gate, gate_weight = make(type, layout, n, k, experts, 1, device)
    up, up_weight = make(type, layout, n, k, experts, 2, device)
    q, x = activations(rows, k, 3, device)
    chosen = choices(rows, top, experts, device)
    out = torch.empty(rows * top, n, device=device)
    run_twice(lambda: gate_up(q, chosen, gate, up, 10.0, out, TILE), out)
    for values, bar in ((q.dequantise(), 1e-5), (x, bytes_bar(n))):
        expected = expected_hidden(values.double(), chosen, gate_weight, up_weight)
        written = (chosen.flatten() >= 0).nonzero().flatten()
        assert error(out[written], expected[written]) < bar


def bytes_bar(outputs: int) -> float:
    """Against activations that were not rounded; few outputs have no steady mean."""
    return 1e-2 if outputs > 256 else 1.5e-2


def expected_hidden(x: torch.Tensor, chosen: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, places in zip(x, chosen.tolist(), strict=True):
        for e in places:
            e = max(e, 0)
            rows.append(ops.swiglu(torch.cat((gate[e] @ row, up[e] @ row)).unsqueeze(0), 10.0)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["partials", "sum"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_down(type, layout, shape, rows, form, device):
    n, k, experts, top = shape if ON_GPU else (16, 768, 3, 2)
    planes, weight = make(type, layout, n, k, experts, 4, device)
    h, x = activations(rows * top, k, 5, device)
    chosen = choices(rows, top, experts, device)
    weights = torch.rand(rows, top, device=device) + 0.1
    real = (chosen[:, 0] >= 0).nonzero().flatten()
    if form == "sum":
        out = torch.empty(rows, n, device=device)
        run_twice(lambda: down_sum(h, chosen, weights, planes, out, TILE), out)
    else:
        # The partial sums stand in a buffer with one place more.
        buffer = torch.zeros(rows, top + 1, n, device=device)
        out = buffer[:, :top]
        run_twice(lambda: down(h, chosen, weights, planes, out, tile=TILE), out)
        assert buffer[:, top].abs().max() == 0
    for values, bar in ((h.dequantise(), 1e-5), (x, bytes_bar(n))):
        y = torch.stack([weight[max(e, 0)] @ v for v, e in zip(values.double(), chosen.flatten(), strict=True)])
        expected = weights.double().unsqueeze(-1) * y.view(rows, top, n)
        assert error(out[real], (expected.sum(1) if form == "sum" else expected)[real]) < bar


@pytest.mark.parametrize("rows", ROWS if ON_GPU else [1])
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else [(256, 16, 2, 1)], ids=str)
def test_layouts_of_iq2_xxs_give_the_same_bits(shape, rows, device):
    """So states do not depend on the layout, and those that one has computed are good for the other."""
    k, n, experts, top = shape
    chosen = choices(rows, top, experts, device)
    weights = torch.rand(rows, top, generator=torch.Generator().manual_seed(rows)).to(device)
    q, _ = activations(rows, k, 3, device)
    h, _ = activations(rows * top, k, 5, device)
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for layout, results in found.items():
        gate, up = (make(T.IQ2_XXS, layout, n, k, experts, seed, device)[0] for seed in (1, 2))
        for tile in (TILE, Tile(4, TILE.warps, loop=True)):
            results.append(torch.zeros(rows * top, n, device=device))
            gate_up(q, chosen, gate, up, 10.0, results[-1], tile)
            results.append(torch.zeros(rows, top, n, device=device))
            down(h, chosen, weights, up, results[-1], tile=tile)
        results.append(torch.zeros(rows, n, device=device))
        down_sum(h, chosen, weights, up, results[-1], TILE)
    for a, b in zip(found["a"], found["b"], strict=True):
        assert a.abs().max() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "tile", [Tile(1, 1), Tile(2, 1), Tile(3, 2), Tile(1, 4), Tile(1, 1, loop=True), Tile(4, 2, loop=True)], ids=str
)
def test_any_tile_gives_the_same(tile, device):
    planes, weight = make(T.Q2_K, "b", 32, 256, 3, 3, device)
    h, _ = activations(2, 256, 4, device)
    chosen = choices(1, 2, 3, device)
    weights = torch.rand(1, 2, device=device)
    out = torch.empty(1, 2, 32, device=device)
    run_twice(lambda: down(h, chosen, weights, planes, out, tile=tile), out)
    y = torch.stack([weight[e] @ v for v, e in zip(h.dequantise().double(), chosen.flatten(), strict=True)])
    assert error(out, weights.double().unsqueeze(-1) * y) < 1e-5


def test_a_loop_gives_the_same(device):
    """As steps that are unrolled; pairs without an expert are left out."""
    n, k, experts, top, rows = (2048, 4096, 8, 6, 16) if ON_GPU else (16, 256, 3, 2, 5)
    gate, _ = make(T.Q2_K, "b", n, k, experts, 1, device)
    up, _ = make(T.Q2_K, "b", n, k, experts, 2, device)
    x, _ = activations(rows, k, 4, device)
    h, _ = activations(rows * top, k, 5, device)
    chosen = choices(rows, top, experts, device)
    weights = torch.rand(rows, top, device=device) + 0.1
    results = []
    # None: what so many rows take by themselves.
    for tile in (Tile(4, 2), Tile(4, 2, loop=True), None):
        hidden, out = torch.zeros(rows * top, n, device=device), torch.zeros(rows, top, n, device=device)
        gate_up(x, chosen, gate, up, 10.0, hidden, tile)
        down(h, chosen, weights, up, out, tile=tile)
        results.append((hidden.view(rows, top, n), out))
    for one, *others in zip(*results, strict=True):
        assert not one[-1].any(), "the last row has no expert"
        assert one[:-1].abs().amax(-1).min() > 0
        for other in others:
            assert not other[-1].any()
            assert error(other, one.double()) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 8] if ON_GPU else [2, 5])
def test_shared_expert_in_the_same_launch(rows, device):
    """Its down projection goes into the last place; more rows than dp4a takes are a launch of their own."""
    n, k, shared_k, experts, top = (4096, 2048, 2048, 8, 6) if ON_GPU else (40, 256, 384, 2, 1)
    planes, weight = make(T.Q2_K, "b", n, k, experts, 4, device)
    shared = P.allocate(T.Q8_0, n, shared_k, device)
    P.repack(random_raw(T.Q8_0, n, shared_k, 5, device), shared)
    h, _ = activations(rows * top, k, 6, device)
    x = Quantised.allocate(rows, shared_k, device)
    quantise(randn(rows, shared_k, seed=7, device=device), x)
    chosen = torch.arange(rows * top, dtype=torch.int32, device=device).view(rows, top) % experts
    weights = torch.rand(rows, top, device=device) + 0.1
    out = torch.empty(rows, top + 1, n, device=device)
    run_twice(lambda: down(h, chosen, weights, planes, out, (shared, x), tile=TILE), out)
    y = torch.stack([weight[e] @ v for v, e in zip(h.dequantise().double(), chosen.flatten(), strict=True)])
    assert error(out[:, :top], weights.double().unsqueeze(-1) * y.view(rows, top, n)) < 1e-5
    assert error(out[:, top], x.dequantise().double() @ P.unpack(shared).double().t()) < 1e-5


def test_whole_experts_against_the_reference(device):
    """Gate to down with quantised activations in between, against `ops.routed_experts` in float32.

    Bytes enter twice. They move h by 0.8 % (`test_gate_up`), and the product behind it by another 0.9 %, as most of h
    is small beside the largest of its 32, whose steps it is rounded in. Together that is 1.2 %, of two rows of 256 up
    to 2 % by chance.
    """
    hidden, inner, experts, top, rows, seeds = 256, 256, 4, 2, 2, (1, 2, 3)
    if ON_GPU:
        hidden, inner, rows = 4096, 2048, 16
    gate, up, planes = (
        make(type, "b", n, k, experts, seed, device)
        for type, n, k, seed in zip(
            (T.IQ2_XXS, T.IQ2_XXS, T.Q2_K), (inner, inner, hidden), (hidden, hidden, inner), seeds, strict=True
        )
    )

    class Source:
        def gate_up(self, expert: int) -> torch.Tensor:
            return torch.cat((gate[1][expert], up[1][expert])).float()

        def down(self, expert: int) -> torch.Tensor:
            return planes[1][expert].float()

    q, x = activations(rows, hidden, 6, device)
    chosen = choices(rows, top, experts, device)
    chosen[chosen < 0] = 0
    weights = torch.rand(rows, top, generator=torch.Generator().manual_seed(7)).to(device)
    h_values, out = torch.empty(rows * top, inner, device=device), torch.empty(rows, top, hidden, device=device)
    h = Quantised.allocate(rows * top, inner, device, words=False, lanes=True, sums=True)
    wide = Tile() if ON_GPU else Tile(warps=16)
    gate_up(q, chosen, gate[0], up[0], 10.0, h_values, tile=wide)
    quantise(h_values, h)
    down(h, chosen, weights, planes[0], out, tile=wide)
    expected = ops.routed_experts(x, chosen.long(), weights, Source(), 10.0)
    assert error(out.sum(1), expected) < (1.3e-2 if ON_GPU else 2e-2)


def test_refusals(device):
    gate, _ = make(T.IQ2_XXS, "b", 8, 256, 2, 1, device)
    up, _ = make(T.IQ2_XXS, "a", 8, 256, 2, 1, device)
    q2, _ = make(T.Q2_K, "b", 8, 256, 2, 1, device)
    q, _ = activations(1, 256, 1, device)
    chosen, out = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.empty(1, 8, device=device)
    with pytest.raises(ValueError, match="gate is iq2_xxs_b 8 x 256, up is iq2_xxs_a"):
        gate_up(q, chosen, gate, up, 10.0, out)
    with pytest.raises(ValueError, match="q2_k needs activations with sums"):
        gate_up(Quantised(lanes=q.lanes, fine=q.fine), chosen, q2, q2, 10.0, out)
    with pytest.raises(ValueError, match="256 channels in the order of lanes, got 512"):
        gate_up(activations(1, 512, 1, device)[0], chosen, gate, gate, 10.0, out)
    with pytest.raises(ValueError, match=r"1 pairs into \[1, 1, 9\], expected 1 and \[1, 1, 8\]"):
        down(q, chosen, out, gate, torch.empty(1, 1, 9, device=device))
    with pytest.raises(ValueError, match="planes of experts"):
        gate_up(q, chosen, P.allocate(T.Q8_0, 8, 256, device), gate, 10.0, out)
