"""Products straight from planes against float64 on the same inputs, for every format and size of tile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4 import ops
from ds4.ops.kernels import experts_fused
from ds4.ops.kernels import planes as P
from ds4.ops.kernels.experts_fused import (
    Scales,
    down_fused,
    fragments,
    gate_up_fused,
    largest_weight,
    natural,
    scales_of,
    tile_rows,
)
from ds4.ops.kernels.experts_prefill import sum_pairs
from ds4.ops.kernels.grouping import Groups, group
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, run_twice
from tests.ops.kernels.test_experts import FORMS, ids, make

DTYPE = torch.float16 if ON_GPU else torch.float32
# hidden, expert_hidden, top, rows of a tile, pairs of each expert: the parts of a tile that are multiplied alone, and
# one more; and none.
COUNTS = (16, 17, 32, 33, 64, 65, 128, 129, 1, 0)
CASES = [(256, 256, 3, 128, COUNTS), (512, 256, 2, 64, (33, 0, 65, 5))]
if ON_GPU:
    CASES = [
        (4096, 2048, 6, 128, COUNTS),
        (4096, 2048, 6, 64, COUNTS),
        (4096, 2048, 6, 128, (700, 150, 0, 90, 600)),
        (7168, 3072, 6, 128, COUNTS),
        (7168, 3072, 6, 64, (20, 70, 0, 3)),
        (1024, 256, 2, 64, (3, 0, 9)),
    ]


def choices(counts: tuple[int, ...], top: int, device: str) -> torch.Tensor:
    """So many pairs for each expert, in any order; places that are left have none."""
    pairs = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(counts)])
    tokens = -(-len(pairs) // top) + 1
    chosen = torch.full((tokens * top,), -1, dtype=torch.int32)
    places = torch.randperm(tokens * top, generator=torch.Generator().manual_seed(tokens))[: len(pairs)]
    chosen[places] = pairs
    return chosen.view(tokens, top).to(device)


def test_channels_come_back(device):
    x = randn(3, 5, 96, seed=1, device=device).half()
    placed = fragments(x)
    assert torch.equal(natural(placed), x)
    assert not torch.equal(placed, x)
    one = torch.zeros(64, device=device)
    one[32 + 8 * 3 + 4 + 2] = 1.0
    assert int(fragments(one).argmax()) == 32 + 16 + 8 + 2 * 3


@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, type, layout, device):
    hidden, inner, top, tile, counts = case
    experts, chosen = len(counts), choices(counts, top, device)
    tokens = chosen.shape[0]
    groups = Groups.allocate(tokens * top, experts, device, tile)
    group(chosen, groups)
    gate, gate_weight = make(type, layout, inner, hidden, experts, 1, device)
    up, up_weight = make(type, layout, inner, hidden, experts, 2, device)
    down, down_weight = make(type, layout, hidden, inner, experts, 3, device)
    (scales,) = scales_of([(gate, up, down)], [torch.full((hidden,), 1.5, device=device)], 10.0)
    x = randn(tokens, hidden, seed=4, device=device).to(DTYPE)
    weights = torch.rand(tokens, top, generator=torch.Generator().manual_seed(5)).to(device)
    h = torch.empty(tokens * top, inner, dtype=DTYPE, device=device)
    parts, y = torch.empty(tokens, top, hidden, device=device), torch.empty(tokens, hidden, device=device)

    def run() -> None:
        gate_up_fused(fragments(x, DTYPE, scales.x), chosen, groups, gate, up, scales, 10.0, h)
        down_fused(h, chosen, groups, down, scales, weights, parts)
        sum_pairs(parts, chosen, experts, y)

    run_twice(run, h, parts, y)
    count = int(groups.offsets[-1])
    assert torch.isnan(h[count:]).all()
    order, inputs = groups.order[:count].long(), x.double()
    expert_of = chosen.flatten()[order].long()
    hidden_of = natural(h)[:count].double() / scales.h
    assert scales.h == 512
    expected = torch.empty(count, inner, dtype=torch.float64, device=device)
    products = torch.empty(count, hidden, dtype=torch.float64, device=device)
    for e in range(experts):
        at = (expert_of == e).nonzero().flatten()
        both = torch.cat((gate_weight[e], up_weight[e]))
        expected[at] = ops.swiglu(inputs[order[at] // top] @ both.t(), 10.0)
        products[at] = hidden_of[at] @ down_weight[e].t()
    bar = 1e-3 if ON_GPU else 1e-5  # weights and what is between the products are rounded to float16
    assert error(hidden_of, expected) < bar
    products *= weights.double().flatten()[order].unsqueeze(1)
    assert error(parts.view(-1, hidden)[order], products) < bar
    total = torch.zeros(tokens, hidden, dtype=torch.float64, device=device).index_add(0, order // top, products)
    assert error(y, total) < bar


@pytest.mark.skipif(ON_GPU, reason="looks at calls within a kernel, which the interpreter makes")
def test_a_program_multiplies_no_more_columns_than_its_pairs_need(device, monkeypatch):
    seen = {"_gate_up_pairs": [], "_down_pairs": []}

    def record(name):
        real = getattr(experts_fused, name)
        places = [real.arg_names.index(argument) for argument in ("row0", "pairs", "BM")]

        def run(*args):
            seen[name].append(tuple(int(getattr(value, "value", value)) for value in (args[i] for i in places)))
            return real(*args)

        monkeypatch.setattr(experts_fused, name, run)

    for name in seen:
        record(name)
    chosen = choices(COUNTS, 2, device)
    tokens = chosen.shape[0]
    groups = Groups.allocate(2 * tokens, len(COUNTS), device, 128)
    group(chosen, groups)
    planes, _ = make(T.Q2_K, "b", 256, 256, len(COUNTS), 1, device)
    h, out = torch.empty(2 * tokens, 256), torch.empty(tokens, 2, 256)
    gate_up_fused(torch.zeros(tokens, 256), chosen, groups, planes, planes, Scales(), 10.0, h)
    down_fused(h, chosen, groups, planes, Scales(), torch.ones(tokens, 2), out)
    tiles = [(16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (128, 128), (1, 16), (1, 16)]
    for name, columns in (("_gate_up_pairs", 64), ("_down_pairs", 128)):
        assert sorted(seen[name]) == sorted((row, *tile) for tile in tiles for row in range(0, 256, columns))


@pytest.mark.parametrize("size", [2.0**6, 2.0**19])
@pytest.mark.parametrize(("type", "layout"), FORMS, ids=ids)
def test_weights_of_any_size_keep_their_bits(type, layout, size, device):
    """What float16 could not hold is scaled by a power of two, and the products by its inverse."""
    n, k, experts = (256, 1024, 2) if ON_GPU else (32, 256, 2)
    planes, weight = make(type, layout, n, k, experts, 1, device)
    scaled = scale_planes(planes, size)
    chosen = torch.tensor([[0], [1], [0]], dtype=torch.int32, device=device)
    groups = Groups.allocate(3, experts, device)
    group(chosen, groups)
    h = randn(3, k, seed=2, device=device).to(DTYPE)
    found = []
    for p in (planes, scaled):
        out = torch.empty(3, 1, n, device=device)
        (scales,) = scales_of([(p, p, p)], [torch.ones(k, device=device)], 10.0)
        assert 0.5 * 2048 < float(largest_weight(p)) * scales.down <= 2048
        down_fused(fragments(h, DTYPE, scales.h), chosen, groups, p, scales, torch.ones(3, 1, device=device), out)
        found.append(out)
    assert torch.isfinite(found[1]).all()
    assert error(found[1] / size, found[0]) < 1e-6
    assert float(largest_weight(planes)) >= float(weight.abs().max())


def scale_planes(planes: P.Planes, size: float) -> P.Planes:
    """The planes of weights that are `size` times as large, a power of two."""
    if isinstance(planes, P.Mxfp4Planes):
        exponents = planes.scale.view(torch.uint8).int() + int(torch.tensor(size).log2())
        return replace(planes, scale=exponents.to(torch.uint8).view(torch.int32).view(planes.scale.shape))
    assert isinstance(planes, P.Iq2aPlanes | P.Iq2bPlanes | P.Q2KPlanes | P.Q4KPlanes)
    d = planes.d.view(torch.float16).float() * size
    return replace(planes, d=d.half().view(planes.d.dtype).view(planes.d.shape))


def test_scales_of_nothing_and_of_no_number(device):
    planes, _ = make(T.Q2_K, "b", 16, 256, 2, 1, device)
    zeros, broken = scale_planes(planes, 0.0), scale_planes(planes, float("inf"))
    ones = torch.ones(256, device=device)
    assert scales_of([(zeros, broken, zeros)], [0 * ones], 10.0) == [Scales(1.0, 0.0, 512.0, 1.0)]
    # 2^12 is 64 norms of 64; half of that goes with what float16 holds.
    assert scales_of([(zeros, zeros, broken)], [256 * ones], 300.0) == [Scales(8.0, 1.0, 1.0, 0.0)]
    assert scales_of([(zeros, zeros, zeros)], [ones.log().log()], 10.0)[0].x == 0.0
    assert scales_of([], [], 10.0) == []


def test_no_weights_give_zeros(device):
    """Exponents of nothing, which a pruned matrix may have, are no large scale."""
    planes, _ = make(T.MXFP4, "b", 32, 256, 2, 1, device)
    assert isinstance(planes, P.Mxfp4Planes)
    chosen = torch.tensor([[0], [1], [0]], dtype=torch.int32, device=device)
    groups = Groups.allocate(3, 2, device)
    group(chosen, groups)
    for exponent in (0, 1, 2):
        small = replace(planes, scale=torch.full_like(planes.scale, exponent * 0x01010101))
        (scales,) = scales_of([(small, small, small)], [torch.ones(256, device=device)], 10.0)
        out = torch.empty(3, 1, 32, device=device)
        h = torch.ones(3, 256, dtype=DTYPE, device=device)
        down_fused(fragments(h, DTYPE, scales.h), chosen, groups, small, scales, torch.ones(3, 1, device=device), out)
        assert float(out.abs().max()) < 1e-30


def test_what_float16_does_not_hold_becomes_its_largest(device):
    """Without a clamp; float32, in the interpreter, holds it."""
    planes, weight = make(T.Q2_K, "b", 32, 256, 1, 1, device)
    chosen = torch.zeros(1, 1, dtype=torch.int32, device=device)
    groups = Groups.allocate(1, 1, device)
    group(chosen, groups)
    (scales,) = scales_of([(planes, planes, planes)], [torch.ones(256, device=device)], 1e6)
    x = (200 * weight[0][:1].sign()).to(DTYPE)
    out = torch.empty(1, 32, dtype=DTYPE, device=device)
    gate_up_fused(fragments(x, DTYPE), chosen, groups, planes, planes, replace(scales, x=1.0), 1e6, out)
    expected = ops.swiglu(x.double() @ torch.cat((weight[0], weight[0])).t(), 1e6)
    assert float(expected.abs().max()) > 1e5
    if ON_GPU:
        expected = expected.clamp(-65504, 65504)
    assert error(natural(out), expected) < 2e-3


def test_few_pairs_take_small_tiles():
    assert [tile_rows(tokens * 6, 256) for tokens in (65, 1365, 1366, 8192)] == [64, 64, 128, 128]


def test_refusals(device):
    planes, _ = make(T.Q2_K, "b", 32, 256, 4, 2, device)
    groups = Groups.allocate(4, 4, device)
    chosen = torch.zeros(2, 2, dtype=torch.int32, device=device)
    x = torch.empty(2, 256, dtype=DTYPE, device=device)
    out = torch.empty(4, 32, dtype=DTYPE, device=device)
    for wrong in (x[:, :128], x.double()):
        with pytest.raises(ValueError, match="256 channels"):
            gate_up_fused(wrong, chosen, groups, planes, planes, Scales(), 10.0, out)
    with pytest.raises(ValueError, match="a positive scale"):
        gate_up_fused(x, chosen, groups, planes, planes, Scales(gate_up=0.0), 10.0, out)
    with pytest.raises(ValueError, match="a multiple of 32"):
        gate_up_fused(x, chosen, groups, planes, planes, Scales(), 10.0, out[:3])
    other, _ = make(T.Q2_K, "b", 16, 256, 4, 2, device)
    with pytest.raises(ValueError, match="up is q2_k 16 x 256"):
        gate_up_fused(x, chosen, groups, planes, other, Scales(), 10.0, out)
    with pytest.raises(ValueError, match="tiles of 64 or 128 pairs, got 32"):
        gate_up_fused(x, chosen, Groups.allocate(4, 4, device, 32), planes, planes, Scales(), 10.0, out)
    with pytest.raises(ValueError, match="expected 5 experts"):
        gate_up_fused(x, chosen, Groups.allocate(4, 5, device), planes, planes, Scales(), 10.0, out)
    with pytest.raises(ValueError, match=r"expected \[2, 2\] x 32"):
        down_fused(
            x, chosen, groups, planes, Scales(), torch.ones(2, 2, device=device), torch.empty(2, 2, 16, device=device)
        )


def test_what_it_is_compiled_to() -> None:
    """In a process of its own, where triton compiles and does not interpret; needs no GPU.

    Decoded weights go from the registers of the thread that made them into the product, and no product still runs
    when the next weights are decoded: it would read them from the same registers. The compiler lets some run on.
    """
    code = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds4.ops.kernels.experts_fused import _down_kernel, _gate_up_kernel
TYPES = {"iq2_xxs_b": ["*i32", "*i32", "*i32", "*fp16"]}
for kernel, format, rows in (
    (_gate_up_kernel, "iq2_xxs_b", 128), (_gate_up_kernel, "iq2_xxs_b", 64), (_gate_up_kernel, "mxfp4", 128),
    (_down_kernel, "q2_k", 128), (_down_kernel, "q4_k", 64),
):
    gate = kernel is _gate_up_kernel
    constants = dict(FORMAT=format, E=256, EP=256, BM=rows, BN=64 if gate else 128, STAGES=2 if gate else 3, ASM=True)
    constants |= dict(TOP=6, F=2048, K=4096) if gate else dict(N=4096, K=2048)
    signature = {name: "*i32" for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    plain = dict(x="*fp16", h="*fp16", x_stride="i32", weights="*fp32", out_stride="i32")
    plain |= dict.fromkeys(("gain", "back", "clamp", "scale"), "fp32")
    signature |= {name: type for name, type in plain.items() if name in signature}
    signature["out"] = "*fp16" if gate else "*fp32"
    types = TYPES.get(format, ["*i32"] * 4)
    signature |= {f"{p}{i}": types[i] for p in "gup" for i in range(4) if f"{p}{i}" in signature}
    aligned = [i for i, name in enumerate(signature) if signature[name].startswith("*") or "stride" in name]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, maxnreg=128))
    ptx = compiled.asm["ptx"]
    turns = [
        ptx[label.end() : end]
        for label in re.finditer(r"^(\\$L__BB\\w+):", ptx, re.M)
        if (end := ptx.find("bra \\t" + label[1] + ";", label.end())) > 0 and "wgmma.mma" in ptx[label.end() : end]
    ]
    barriers = [str(turn.count("bar.sync")) for turn in turns]
    print(format, rows, ",".join(barriers), compiled.asm["ttgir"].replace("\\n", "\\x1f"))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    kernels = [line.split("\x1f") for line in result.stdout.splitlines()]
    assert len(kernels) == 5
    copied = 0
    for lines in kernels:
        products = [line for line in lines if "ttng.warp_group_dot " in line]
        waits = [line for line in lines if "ttng.warp_group_dot_wait" in line]
        assert products
        assert all(re.search(r"dot_op<\{opIdx = 0", line) for line in products)
        assert waits
        assert all("pendings = 0" in line for line in waits)
        into_shared = [line for line in lines if "ttg.local_alloc %" in line or "ttg.local_store" in line]
        assert not [line for line in into_shared if "xf16" in line], into_shared
        inputs = [line for line in lines if "async_copy_global_to_local" in line and "xf16" in line]
        assert all(re.search(r" mask %\S+ other %", line) for line in inputs)  # zeros, not what lies beyond the pairs
        copied += len(inputs)
        format, rows, barriers, _ = lines[0].split(" ", 3)
        # One for the inputs that have come, one for those that are no longer read; the table takes another.
        each = "3" if format == "iq2_xxs_b" else "2"
        assert barriers.split(",") == [each] * (4 if rows == "128" else 3)
    assert copied >= 3 * 5
