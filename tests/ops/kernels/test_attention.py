"""Attention over window and compressed rows against `ops.attention` on the same stored rows in float64."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.ops.kernels.attention import Parts, Rows, attention, prepare_queries, splits_for
from ds4.ops.kernels.quantize import Quantised
from ds4.ops.kernels.rows import RowPlanes
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice
from tests.ops.kernels.test_rows import YARN, table_of

SHAPES = [(64, 512), (128, 512), (8, 256)] if ON_GPU else [(8, 256), (20, 128)]
BAR = 2e-3


def random_rows(planes: RowPlanes, seed: int) -> torch.Tensor:
    """Fills planes [a, b, ...] with random rows; what they hold, float32 [a, b, head_dim]."""
    a, b = planes.codes.shape[:2]
    x = randn(a * b, planes.head_dim, seed=seed) * torch.exp(0.5 * randn(a * b, 1, seed=seed + 1))
    packed = ops.pack_row(x, 64)
    planes.codes.copy_(packed[0].view(a, b, -1))
    planes.tail.copy_(packed[1].view(a, b, -1))
    planes.scales[..., :-1].copy_(packed[2].view(a, b, -1))
    return ops.unpack_row(*packed).view(a, b, -1)


class Case:
    """Tokens at these positions, in sequences of their own or in one."""

    def __init__(
        self, positions: list[int], heads: int, head_dim: int, ratio: int, top: int, device: str, ring: int = 145,
        shared: bool = False,
    ) -> None:  # fmt: skip
        rows = len(positions)
        self.heads, self.head_dim, self.device = heads, head_dim, device
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int32) if shared else torch.arange(rows).flip(0).to(torch.int32)
        slots = int(self.slots.max()) + 1
        self.ring = RowPlanes.allocate(slots, ring, head_dim=head_dim, device=device)
        self.window = random_rows(self.ring, 1)
        self.q = randn(rows, heads * head_dim, seed=3, device=device)
        self.sink = randn(heads, seed=4, device=device)
        self.turn = table_of(self.positions, device)
        self.rows, self.seen = None, []
        self.slots = self.slots.to(device)
        if ratio:
            most = max(1, (max(positions) + 1) // ratio)
            pages = -(-most // 64)
            planes = RowPlanes.allocate(slots * pages, 64, head_dim=head_dim, device=device)
            order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(5)).view(slots, pages)
            stored = random_rows(planes, 6)[order].view(slots, pages * 64, head_dim)
            chosen = torch.full((rows, top), -1, dtype=torch.int32) if top else None
            for i, position in enumerate(positions):
                index = torch.arange(max(0, position + 1) // ratio)
                if chosen is not None and len(index) > top:
                    index = torch.randperm(len(index), generator=torch.Generator().manual_seed(i))[:top].sort().values
                if chosen is not None:
                    chosen[i, : len(index)] = index.to(torch.int32)
                self.seen.append(stored[int(self.slots[i]), index])
            self.rows = Rows(
                planes, order.to(torch.int32).to(device), ratio, None if chosen is None else chosen.to(device)
            )

    def expected(self) -> torch.Tensor:
        """float64 [rows, heads, head_dim]; rows of padding are zeros."""
        q = self.q.cpu().double().view(-1, self.heads, self.head_dim)
        q = ops.rms_norm(q, None, 1e-6)
        out = torch.zeros_like(q)
        for i, position in enumerate(self.positions.tolist()):
            if position < 0:
                continue
            cos, sin = (t.double() for t in YARN.at(torch.tensor([position])))
            one = ops.apply_rope(q[i : i + 1], cos, sin)
            place = torch.arange(position - 127, position + 1)
            window = self.window[int(self.slots[i]), place % self.ring.codes.shape[1]].double()
            compressed = None
            if self.rows and self.seen[i].shape[0]:
                n = self.seen[i].shape[0]
                compressed = ops.Compressed(self.seen[i].double(), torch.tensor([n]))
            missing = torch.tensor([max(0, 127 - position)])
            got = ops.attention(one, window, torch.tensor([0]), missing, 128, compressed, self.sink.cpu().double())
            out[i] = ops.apply_rope(got, cos, sin, inverse=True)[0]
        return out

    def run(self, out: torch.Tensor | None, parts: Parts | None = None, **options) -> None:
        attention(
            self.q, self.turn, 1e-6, self.sink, self.positions, self.slots, self.ring, self.rows, out, parts, **options
        )

    def compare(self, out: torch.Tensor, expected: torch.Tensor, bar: float = BAR) -> None:
        """Row by row; rows of padding are zeros."""
        for i, position in enumerate(self.positions.tolist()):
            if position < 0:
                assert not out[i].any()
            else:
                assert error(out[i].cpu(), expected[i]) < bar


LAYERS = [(0, 0), (4, 40), (16, 0)] if not ON_GPU else [(0, 0), (4, 512), (4, 1024), (128, 0)]


@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("ratio", "top"), LAYERS)
def test_decode(heads, head_dim, ratio, top, device):
    positions = [0, 70, -1, 333, 1000] if not ON_GPU else [0, 70, -1, 333, 100_000, 4000]
    case = Case(positions, heads, head_dim, ratio, top, device)
    expected = case.expected()
    for splits in (1, 4) if not ON_GPU else (1, 3, 8, 32):
        parts = Parts.allocate(len(positions), splits, heads, head_dim, device)
        out = torch.empty(len(positions), heads, head_dim, device=device)
        run_twice(lambda parts=parts, out=out: case.run(out, parts), out, parts.out, parts.stats)
        case.compare(out, expected)


@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("ratio", "top"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill(heads, head_dim, ratio, top, dtype, device):
    start, count = (120, 6) if not ON_GPU else (3000, 500)
    positions = [*range(start, start + count), -1]
    case = Case(positions, heads, head_dim, ratio, top, device, ring=count + 128, shared=True)
    case.q = case.q.to(dtype)
    out = torch.empty(count + 1, heads, head_dim, device=device, dtype=dtype)
    run_twice(lambda: case.run(out, window_slots=torch.zeros_like(case.slots)), out)
    case.compare(out, case.expected())


@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_prepared_queries(heads, head_dim, device):
    start, count = (120, 5) if not ON_GPU else (3000, 500)
    case = Case([*range(start, start + count), -1], heads, head_dim, *LAYERS[1], device, ring=count + 128, shared=True)
    ready = torch.empty(count + 1, heads, head_dim, dtype=torch.float16, device=device)
    run_twice(lambda: prepare_queries(case.q, case.turn, 1e-6, case.positions, ready), ready)
    assert torch.isnan(ready[-1]).all()
    expected = case.expected()
    case.q = ready.flatten(1)
    out = torch.empty(count + 1, heads, head_dim, device=device)
    run_twice(lambda: case.run(out, ready=True), out)
    case.compare(out, expected)


def test_output_as_bytes(device):
    heads, head_dim = SHAPES[0]
    case = Case([200, -1, 37], heads, head_dim, 4, 32, device)
    parts = Parts.allocate(3, 4, heads, head_dim, device)
    out = torch.empty(3, heads, head_dim, device=device)
    q = Quantised.allocate(3, heads * head_dim, device, words=True, lanes=True)
    case.run(None, parts, quantised=q)
    case.run(out, parts)
    assert error(q.dequantise(), out.flatten(1)) < 1e-2
    assert not q.codes()[1].any()


def test_large_sinks_and_extreme_logits(device):
    heads, head_dim = SHAPES[0]
    case = Case([5, 600], heads, head_dim, 4, 32, device)
    case.sink[0], case.sink[1] = 80.0, -80.0
    parts = Parts.allocate(2, 4, heads, head_dim, device)
    out = torch.empty(2, heads, head_dim, device=device)
    case.run(out, parts)
    expected = case.expected()
    assert error(out[:, 1:].cpu(), expected[:, 1:]) < BAR
    assert float(out[:, 0].abs().max()) < 1e-20


def test_splits() -> None:
    assert [splits_for(rows, 64) for rows in (1, 4, 16, 64)] == [32, 16, 4, 1]
    assert splits_for(1, 8) == 32
    assert splits_for(64, 128) == 1


def test_refusals(device):
    case = Case([5], 8, 128, 0, 0, device)
    with pytest.raises(ValueError, match="an output, and parts"):
        case.run(None)
    with pytest.raises(ValueError, match="prepared queries are float16"):
        case.run(torch.zeros(1, 8, 128, device=device), ready=True)
    case.q = case.q[:, :256]
    with pytest.raises(ValueError, match=r"queries of shape \[1, 256\] do not fit 1 rows of 8 heads of 128"):
        case.run(torch.zeros(1, 8, 128, device=device))
