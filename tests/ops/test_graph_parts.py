"""Each part of the graph against a plain float64 implementation written here, from the description alone."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from ds4 import ops

F64 = torch.float64


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to float32 accuracy."""
    return bool(((a.to(F64) - b).norm() / b.norm()) < 2e-6)


# -- elementwise -------------------------------------------------------------------------------------------------


def test_elementwise_functions() -> None:
    x = torch.linspace(-30, 30, 1001)
    d = x.to(F64)
    assert close(ops.sigmoid(x), 1 / (1 + torch.exp(-d)))
    assert close(ops.silu(x), d / (1 + torch.exp(-d)))
    assert close(ops.softplus(x), torch.log1p(torch.exp(d)))
    assert torch.isfinite(ops.silu(torch.tensor([-200.0, 200.0]))).all()
    assert ops.softplus(torch.tensor([1e4])).item() == 1e4


@pytest.mark.parametrize("function", [ops.sigmoid, ops.silu, ops.softplus])
def test_elementwise_functions_do_not_depend_on_the_place_in_the_array(function) -> None:  # type: ignore[no-untyped-def]
    x = 3 * normal(1, 70_001)
    whole = function(x)
    for start, n in [(0, 1), (3, 7), (5, 16), (11, 33), (13, 1000), (1, 65_537)]:
        assert torch.equal(function(x[start : start + n].clone()), whole[start : start + n])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 12, 64, 100])
def test_tree_sum(n: int) -> None:
    x = normal(2, 5, n, 3)
    assert close(ops.tree_sum(x, 1), x.to(F64).sum(1))
    assert torch.equal(ops.tree_sum(x[2:3], 1)[0], ops.tree_sum(x, 1)[2])


# -- linear, norm ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_linear(rows: int) -> None:
    x, w = normal(1, rows, 48), normal(2, 20, 48)
    y = ops.linear(x, w)
    assert close(y, x.to(F64) @ w.to(F64).T)
    for i in range(rows):
        assert torch.equal(ops.linear(x[i : i + 1], w)[0], y[i])


@pytest.mark.parametrize("width", [30, 33, 34, 42, 50, 64])
def test_linear_rows_do_not_depend_on_their_place(width: int) -> None:
    """Also for the odd widths and few columns for which a BLAS has kernels of its own."""
    row, others = normal(1, 1, width), normal(2, 15, width)
    for columns in range(1, 13):
        w = normal(3, columns, width)
        results = [ops.linear(torch.cat((others[:i], row, others[i:])), w)[i] for i in range(16)]
        assert all(torch.equal(result, results[0]) for result in results)


def test_linear_rows_are_alone_with_two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, w = normal(1, 70, 256), normal(2, 1536, 256)
        y = ops.linear(x, w)
        assert torch.equal(torch.cat([ops.linear(part.contiguous(), w) for part in x.split([1, 20, 16, 33])]), y)
    finally:
        torch.set_num_threads(before)


def test_grouped_linear() -> None:
    x, w = normal(1, 9, 3, 10), normal(2, 3, 6, 10)
    expected = torch.stack([x[:, g].to(F64) @ w[g].to(F64).T for g in range(3)], dim=1)
    assert close(ops.grouped_linear(x, w), expected)


def test_rms_norm() -> None:
    x, w = normal(1, 5, 3, 32), normal(2, 32)
    d = x.to(F64)
    expected = d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-6)
    assert close(ops.rms_norm(x, None, 1e-6), expected)
    assert close(ops.rms_norm(x, w, 1e-6), expected * w.to(F64))


# -- rope --------------------------------------------------------------------------------------------------------


def rotate(vector: list[float], angles: list[float]) -> list[float]:
    plain = len(vector) - 2 * len(angles)
    out = vector[:plain]
    for i, angle in enumerate(angles):
        a, b = vector[plain + 2 * i], vector[plain + 2 * i + 1]
        out += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return out


def test_rope_turns_neighbouring_pairs_of_the_tail() -> None:
    x, positions = normal(1, 4, 2, 24), torch.tensor([0, 1, 5, 77])
    rope = ops.Rope.plain(16, 10_000.0)
    turned = ops.apply_rope(x, *rope.at(positions))
    for t, position in enumerate(positions.tolist()):
        angles = [position * 10_000.0 ** (-2 * i / 16) for i in range(8)]
        for h in range(2):
            expected = torch.tensor(rotate(x[t, h].tolist(), angles), dtype=F64)
            assert (turned[t, h] - expected).abs().max() < 1e-5
    assert (ops.apply_rope(turned, *rope.at(positions), inverse=True) - x).abs().max() < 1e-6


def test_yarn_takes_any_numbers_that_a_file_may_have() -> None:
    for base in (2.0**-126, math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0), 2.0**127):
        for fast, slow in ((2.0**-126, 2.0**127), (2.0**127, 2.0**-126), (32.0, 1.0)):
            for context in (1, 2**31 - 1):
                assert ops.Rope.yarn(256, base, 1.0, context, fast, slow).frequencies.shape == (128,)


def test_yarn_frequencies_of_the_real_model() -> None:
    f = ops.Rope.yarn(64, 160_000.0, 16.0, 65_536, 32.0, 1.0).frequencies.tolist()
    for i in range(32):
        base = 160_000.0 ** (-2 * i / 64)
        ramp = min(max((i - 15) / 10, 0.0), 1.0)
        assert f[i] == pytest.approx(base * (1 - ramp) + base / 16 * ramp, rel=1e-6)
    assert f[15] == pytest.approx(160_000.0 ** (-30 / 64), rel=1e-6)  # the last that is left alone
    assert f[25] == pytest.approx(160_000.0 ** (-50 / 64) / 16, rel=1e-6)  # the first that is stretched whole


# -- hyper-connections -------------------------------------------------------------------------------------------


def naive_hc_pre(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x.shape[0]
    f = x.reshape(-1)
    m = fn @ f / torch.sqrt((f * f).mean() + 1e-6)
    pre = [1 / (1 + math.exp(-(m[i] * scale[0] + base[i]))) + 1e-6 for i in range(s)]
    post = [2 / (1 + math.exp(-(m[s + i] * scale[1] + base[s + i]))) for i in range(s)]
    c = [[math.exp(m[2 * s + s * j + k] * scale[2] + base[2 * s + s * j + k]) for k in range(s)] for j in range(s)]
    c = [[value / sum(row) + 1e-6 for value in row] for row in c]

    def columns(c: list[list[float]]) -> list[list[float]]:
        sums = [sum(c[j][k] for j in range(s)) + 1e-6 for k in range(s)]
        return [[c[j][k] / sums[k] for k in range(s)] for j in range(s)]

    c = columns(c)
    for _ in range(19):
        c = columns([[value / (sum(row) + 1e-6) for value in row] for row in c])
    total = sum((pre[i] * x[i] for i in range(s)), torch.zeros_like(x[0]))
    return total, torch.tensor(post, dtype=F64), torch.tensor(c, dtype=F64)


def test_hyper_connections() -> None:
    x, fn, scale, base = normal(1, 5, 4, 12), normal(2, 24, 48), normal(3, 3), normal(4, 24)
    y = normal(5, 5, 12)
    got, post, comb = ops.hc_pre(x, fn, scale, base, 20, 1e-6, 1e-6)
    new = ops.hc_post(y, x, post, comb)
    for t in range(5):
        h, p, c = naive_hc_pre(x[t].to(F64), fn.to(F64), scale.to(F64), base.to(F64))
        assert close(got[t], h)
        assert close(post[t], p)
        assert close(comb[t], c)
        for k in range(4):  # the sum runs over the first index of comb
            expected = p[k] * y[t].to(F64) + sum(c[j, k] * x[t, j].to(F64) for j in range(4))
            assert close(new[t, k], expected)


def test_sinkhorn_is_nearly_doubly_stochastic() -> None:
    mild = torch.full((3,), 0.1)
    _, _, comb = ops.hc_pre(normal(1, 3, 4, 8), normal(2, 24, 32), mild, normal(3, 24), 20, 1e-6, 1e-6)
    assert (comb.sum(1) - 1).abs().max() < 1e-4
    assert (comb.sum(2) - 1).abs().max() < 1e-3


def test_collapse() -> None:
    x, fn, scale, base = normal(1, 3, 4, 8), normal(2, 4, 32), normal(3, 1), normal(4, 4)
    d = x.to(F64)
    flat = d.reshape(3, 32)
    m = flat @ fn.to(F64).T / torch.sqrt((flat * flat).mean(1, keepdim=True) + 1e-6)
    pre = 1 / (1 + torch.exp(-(m * scale.to(F64) + base.to(F64)))) + 1e-6
    assert close(ops.hc_collapse(x, fn, scale, base, 1e-6, 1e-6), (pre.unsqueeze(-1) * d).sum(1))


# -- compressor --------------------------------------------------------------------------------------------------


def test_plain_compressor_pools_each_channel_over_its_block() -> None:
    k, z = normal(1, 24, 5), normal(2, 24, 5)
    rows = ops.pool_blocks(k, z, 8, overlap=False, first=True)
    for n in range(3):
        block = slice(8 * n, 8 * n + 8)
        expected = (torch.softmax(z[block].to(F64), 0) * k[block].to(F64)).sum(0)
        assert close(rows[n], expected)


@pytest.mark.parametrize("first", [True, False])
def test_overlapping_compressor(first: bool) -> None:
    k, z = normal(1, 16, 6), normal(2, 16, 6)
    rows = ops.pool_blocks(k.clone(), z.clone(), 4, overlap=True, first=first)
    assert rows.shape == (3, 3)
    for n in range(3):
        values = k[4 * n + 4 : 4 * n + 8, 3:].to(F64)
        gates = z[4 * n + 4 : 4 * n + 8, 3:].to(F64)
        if n or not first:
            values = torch.cat((k[4 * n : 4 * n + 4, :3].to(F64), values))
            gates = torch.cat((z[4 * n : 4 * n + 4, :3].to(F64), gates))
        assert close(rows[n], (torch.softmax(gates, 0) * values).sum(0))


# -- indexer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 64, 150])
def test_index_scores(rows: int) -> None:
    q, w, keys = normal(1, 21, 4, 32), normal(2, 21, 4), normal(3, rows, 32)
    expected = torch.einsum("thn,th->tn", torch.relu(torch.einsum("thd,nd->thn", q.to(F64), keys.to(F64))), w.to(F64))
    got = ops.index_scores(q, w, keys)
    assert close(got, expected)
    assert torch.equal(ops.index_scores(q[5:6], w[5:6], keys)[0], got[5])
    assert torch.equal(ops.index_scores(q, w, keys[:2])[:, :2], got[:, :2])


def test_select_rows_takes_the_best_visible_ones_and_the_lowest_of_equals() -> None:
    scores = torch.tensor([[1.0, 0.0, 3.0, 0.0, 9.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0], [0, 0, 0, -1.0, 2.0, -3.0]])
    visible = torch.tensor([4, 6, 6])
    assert ops.select_rows(scores, visible, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 4]]
    assert ops.select_rows(torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([2]), 2).tolist() == [[0, 1]]


def test_select_rows_against_a_sort() -> None:
    scores = normal(1, 50, 200).mul(4).round()  # many ties
    visible = torch.randint(20, 201, (50,), generator=torch.Generator().manual_seed(2))
    got = ops.select_rows(scores, visible, 20)
    for t in range(50):
        order = sorted(range(int(visible[t])), key=lambda n: (-scores[t, n].item(), n))
        assert got[t].tolist() == sorted(order[:20])


# -- attention ---------------------------------------------------------------------------------------------------


def naive_attention(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    q, rows, sink = q.to(F64), rows.to(F64), sink.to(F64)
    out = []
    for h in range(q.shape[0]):
        e = torch.exp(rows @ q[h] * q.shape[1] ** -0.5)
        out.append((e.unsqueeze(1) * rows).sum(0) / (e.sum() + torch.exp(sink[h])))
    return torch.stack(out)


def test_attention() -> None:
    q, window, compressed, sink = normal(1, 7, 3, 16), normal(2, 20, 16), normal(3, 90, 16), normal(4, 3)
    first, missing = torch.tensor([0, 1, 2, 3, 9, 10, 14]), torch.tensor([3, 2, 1, 0, 5, 4, 0])
    visible = torch.tensor([0, 1, 5, 64, 65, 89, 90])
    chosen = torch.stack([torch.randperm(90, generator=torch.Generator().manual_seed(t))[:70] for t in range(7)])
    chosen[torch.rand(7, 70, generator=torch.Generator().manual_seed(9)) < 0.3] = -1
    some = ops.attention(q, window, first, missing, 6, ops.Compressed(compressed, visible, chosen), sink)
    prefix = ops.attention(q, window, first, missing, 6, ops.Compressed(compressed, visible), sink)
    alone = ops.attention(q, window, first, missing, 6, None, sink)
    for t in range(7):
        raw = [window[i] for i in range(int(first[t] + missing[t]), int(first[t]) + 6)]
        picked = [compressed[int(n)] for n in chosen[t] if n >= 0]
        before = list(compressed[: int(visible[t])])
        assert close(some[t], naive_attention(q[t], torch.stack(raw + picked), sink))
        assert close(prefix[t], naive_attention(q[t], torch.stack(raw + before), sink))
        assert close(alone[t], naive_attention(q[t], torch.stack(raw), sink))


def test_attention_does_not_depend_on_the_other_queries_or_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    q, window, rows, sink = normal(1, 7, 3, 16), normal(2, 13, 16), normal(3, 300, 16), normal(4, 3)
    first, missing, visible = torch.arange(7), torch.zeros(7, dtype=torch.int64), torch.arange(34, 41)

    def run(queries: Any, some: ops.Compressed) -> torch.Tensor:
        return ops.attention(q[queries], window, first[queries], missing[queries], 6, some, sink)

    every = ops.Compressed(rows[:40], visible)
    got = run(slice(0, 7), every)
    assert torch.equal(run(slice(0, 7), ops.Compressed(rows, visible)), got)
    assert torch.equal(run(slice(0, 7), ops.Compressed(rows, visible, every.as_chosen())), got)
    assert torch.equal(run(slice(3, 4), ops.Compressed(rows[:37], visible[3:4]))[0], got[3])
    apart = [5, 0, 3]  # not one behind the other: gathered instead of viewed
    assert torch.equal(run(apart, ops.Compressed(rows[:40], visible[apart])), got[apart])
    monkeypatch.setattr(sys.modules["ds4.ops.attention"], "_PASS_LIMIT", 2000)  # a few queries at a time
    assert torch.equal(run(slice(0, 7), every), got)


def test_a_large_sink_takes_the_attention() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    out = ops.attention(normal(1, 1, 1, 8), normal(2, 4, 8), zero, zero, 4, None, torch.tensor([90.0]))
    assert out.abs().max() < 1e-30


# -- router and experts ------------------------------------------------------------------------------------------


def test_router_chooses_with_the_bias_and_weighs_without_it() -> None:
    x, gate, bias = normal(1, 9, 16), normal(2, 10, 16), normal(3, 10)
    chosen, weights = ops.route_by_score(x, gate, bias, 3, 2.5)
    scores = torch.sqrt(torch.log1p(torch.exp(x.to(F64) @ gate.to(F64).T)))
    for t in range(9):
        best = sorted(range(10), key=lambda e: -(scores[t, e] + bias[e]).item())[:3]
        assert chosen[t].tolist() == best
        assert close(weights[t], scores[t, best] / scores[t, best].sum() * 2.5)


def test_router_ties_go_to_the_lowest_expert() -> None:
    chosen, weights = ops.route_by_score(torch.zeros(1, 4), torch.zeros(5, 4), torch.zeros(5), 3, 1.5)
    assert chosen.tolist() == [[0, 1, 2]]
    assert torch.allclose(weights, torch.full((1, 3), 0.5))


def test_hash_router_weighs_the_experts_of_the_table() -> None:
    x, gate = normal(1, 4, 16), normal(2, 10, 16)
    table = torch.tensor([[3, 1], [0, 9], [5, 5], [7, 2]], dtype=torch.int32)
    chosen, weights = ops.route_by_hash(x, gate, table, 1.5)
    scores = torch.sqrt(torch.log1p(torch.exp(x.to(F64) @ gate.to(F64).T)))
    assert chosen.tolist() == table.tolist()
    for t in range(4):
        picked = scores[t, table[t].long()]
        assert close(weights[t], picked / picked.sum() * 1.5)


class Matrices:
    """Two matrices per expert, which count how often they are asked for."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.matrices, self.asked = (gate_up, down), []  # type: ignore[var-annotated]

    def gate_up(self, expert: int) -> torch.Tensor:
        self.asked.append(expert)
        return self.matrices[0][expert]

    def down(self, expert: int) -> torch.Tensor:
        return self.matrices[1][expert]


def test_routed_experts() -> None:
    x, source = normal(1, 11, 8), Matrices(normal(2, 5, 12, 8), normal(3, 5, 8, 6))
    chosen = torch.randint(0, 4, (11, 2), generator=torch.Generator().manual_seed(4))
    weights = normal(5, 11, 2)
    got = ops.routed_experts(x, chosen, weights, source, clamp=1.0)
    gate_up, down = (m.to(F64) for m in source.matrices)
    for t in range(11):
        expected = torch.zeros(8, dtype=F64)
        for slot in range(2):
            e = int(chosen[t, slot])
            gate, up = (gate_up[e] @ x[t].to(F64)).split(6)
            gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)  # the gate is clamped from above only
            expected += weights[t, slot].to(F64) * (down[e] @ (gate / (1 + torch.exp(-gate)) * up))
        assert close(got[t], expected)
    assert source.asked == sorted(set(chosen.flatten().tolist()))  # only those that are used, once each
