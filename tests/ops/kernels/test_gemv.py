"""Matrices times few rows against float64 on the same quantised activations, and against the unquantised ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4 import ops
from ds4.ops.kernels import planes as P
from ds4.ops.kernels.gemv import Tile, gemv, gemv_both, gemv_f16, gemv_grouped
from ds4.ops.kernels.quantize import Quantised, quantise
from tests.ops.kernels.kernel_checks import ON_GPU, error, randn, random_raw, run_twice

ROWS = [1, 2, 3, 4, 5, 16]
# Rows and columns of matrices, rows of activations: a row of one unit, rows that fill no tile, and full shapes.
CASES = [(n, k, rows) for n, k in ((24, 128), (21, 768)) for rows in ROWS]
if ON_GPU:
    FULL = [(1536, 4096), (32_768, 1024), (4096, 8192), (4096, 2048), (2048, 7168), (7168, 16_384), (6144, 1536)]
    CASES += [(n, k, rows) for n, k in FULL for rows in (1, 4, 8, 16, 32, 64)]

# Sums of tensor cores are a little coarser.
F16_BAR = 2e-5 if ON_GPU else 2e-6


def make(type: T, n: int, k: int, seed: int, device: str) -> tuple[P.Planes, torch.Tensor]:
    """Planes and their weights as float64 [n, k]."""
    planes = P.allocate(type, n, k, device)
    P.repack(random_raw(type, n, k, seed, device), planes)
    return planes, P.unpack(planes).double()


def activations(rows: int, k: int, device: str) -> tuple[Quantised, torch.Tensor]:
    x = randn(rows, k, seed=rows + k, device=device)
    q = Quantised.allocate(rows, k, device)
    quantise(x, q)
    return q, x


@pytest.mark.parametrize(("n", "k", "rows"), CASES)
def test_gemv(n, k, rows, device):
    planes, weight = make(T.Q8_0, n, k, 1, device)
    q, x = activations(rows, k, device)
    out = torch.empty(rows, n, device=device)
    run_twice(lambda: gemv(planes, q, out), out)
    assert error(out, q.dequantise().double() @ weight.t()) < 5e-6
    assert error(out, x.double() @ weight.t()) < 1e-2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gemv_grouped(groups, rows, device):
    size, k = (1024, 4096) if ON_GPU else (16, 256)
    planes, weight = make(T.Q8_0, groups * size, k, 2, device)
    q, x = activations(rows, groups * k, device)
    out = torch.empty(rows, groups * size, device=device)
    run_twice(lambda: gemv_grouped(planes, q, out, groups), out)
    for values, bar in ((q.dequantise(), 5e-6), (x, 1e-2)):
        expected = ops.grouped_linear(values.double().view(rows, groups, k), weight.view(groups, size, k))
        assert error(out, expected) < bar


@pytest.mark.parametrize(("n", "k", "rows"), CASES)
def test_gemv_f16(n, k, rows, device):
    """Float activations: exact up to the order of the sum, with values of very different size too."""
    planes, weight = make(T.F16, n, k, 3, device)
    x = randn(rows, k, seed=4, device=device) * torch.exp(3 * randn(1, k, seed=5, device=device))
    out = torch.empty(rows, n, device=device)
    run_twice(lambda: gemv_f16(planes, x, out), out)
    assert error(out, x.double() @ weight.t()) < F16_BAR


@pytest.mark.parametrize("size", [0.01, 1.0, 1e6])
@pytest.mark.parametrize("rows", [2, 5])
def test_gemv_f16_of_any_size(rows, size, device):
    """Also with rows that are far beyond what fp16 holds, or close to where it ends below."""
    planes, weight = make(T.F16, 40, 256, 11, device)
    x = randn(rows, 256, seed=12, device=device) * size
    out = torch.empty(rows, 40, device=device)
    run_twice(lambda: gemv_f16(planes, x, out), out)
    assert error(out, x.double() @ weight.t()) < F16_BAR


@pytest.mark.parametrize("rows", ROWS)
def test_gemv_both(rows, device):
    n, m, k = (1536, 2624, 4096) if ON_GPU else (24, 21, 256)
    planes, weight = make(T.Q8_0, n, k, 6, device)
    f16_planes, f16_weight = make(T.F16, m, k, 7, device)
    q, x = activations(rows, k, device)
    # Both results are columns of one buffer.
    buffer = torch.zeros(rows, n + m + 3, device=device)
    out, f16_out = buffer[:, :n], buffer[:, n : n + m]
    run_twice(lambda: gemv_both(planes, q, out, f16_planes, x, f16_out), out, f16_out)
    assert error(out, q.dequantise().double() @ weight.t()) < 5e-6
    assert error(f16_out, x.double() @ f16_weight.t()) < F16_BAR
    assert buffer[:, n + m :].abs().max() == 0


@pytest.mark.parametrize(
    "tile",
    [
        Tile(warps=1, steps=2),
        Tile(warps=2, rows=16, span=128, stages=2),
        Tile(8, 3),
        Tile(rows=16, span=256, f16_span=64, stages=3),
        Tile(warps=2, rows=64, span=512, f16_span=512),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [2, 9])
def test_other_tiles(tile, rows, device):
    planes, weight = make(T.Q8_0, 37, 512, 8, device)
    f16_planes, f16_weight = make(T.F16, 37, 512, 9, device)
    q, x = activations(rows, 512, device)
    out, f16_out = torch.empty(rows, 37, device=device), torch.empty(rows, 37, device=device)
    run_twice(lambda: gemv(planes, q, out, tile), out)
    run_twice(lambda: gemv_f16(f16_planes, x, f16_out, tile), f16_out)
    assert error(out, q.dequantise().double() @ weight.t()) < 5e-6
    assert error(f16_out, x.double() @ f16_weight.t()) < F16_BAR


def row_in_company(rows, place, seed, device):
    """What a certain row gives at a place among others that the seed decides."""
    planes, _ = make(T.Q8_0, 40, 1024, 10, device)
    f16_planes, _ = make(T.F16, 40, 1024, 10, device)
    x = randn(rows, 1024, seed=seed, device=device)
    x[place] = torch.linspace(-2, 3, 1024, device=device)
    q = Quantised.allocate(rows, 1024, device)
    quantise(x, q)
    out, f16_out = torch.empty(rows, 40, device=device), torch.empty(rows, 40, device=device)
    gemv_both(planes, q, out, f16_planes, x, f16_out)
    return out[place], f16_out[place]


# Also with other numbers of rows, as long as programs are cut in the same way for them.
@pytest.mark.parametrize(("first", "second"), [((4, 0), (4, 3)), ((16, 0), (16, 15)), ((16, 3), (9, 7))], ids=str)
def test_company_does_not_change_a_row(first, second, device):
    """A row's bits depend on its own activations alone."""
    one, other = row_in_company(*first, 1, device), row_in_company(*second, 2, device)
    assert torch.equal(one[0], other[0])
    if ON_GPU or first[0] <= 4:  # the interpreter's BLAS sums a row in an order that depends on its place
        assert torch.equal(one[1], other[1])


def test_sums_of_dots_are_the_same_in_all_of_a_tile():
    """In a process of its own, where triton compiles for a GPU; needs none.

    Where products of a sum may be fused with its additions, the compiler begins with another one at odd places of a
    step than at even ones. None may be left plain.
    """
    code = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ds4.ops.kernels.gemv_dot import dot_kernel
tile = dict(K=1024, GROUPS=1, GROUP_ROWS=1, Q8=True, F16=False, BN=16, BB=16, UNITS=2, STAGES=3, F_BN=16, F_PARTS=2)
constants = tile | dict(F_BK=64, F_STAGES=3, ASM=True, PDL=0)
signature = dict.fromkeys(dot_kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
signature |= dict(codes="*i8", scales="*fp16", x8="*i8", xs="*fp32", q8_out="*fp32")
signature |= dict(weight="*fp32", x="*fp32", f16_out="*fp32")
source = ASTSource(fn=dot_kernel, signature=signature, constexprs=constants)
print(compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=2)).asm["ptx"])
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "mma.sync" in result.stdout
    assert "mul.rn.f32" in result.stdout
    assert "mul.f32" not in result.stdout


def test_refusals(device):
    planes, _ = make(T.Q8_0, 8, 256, 1, device)
    f16_planes, _ = make(T.F16, 8, 512, 1, device)
    q, x = activations(1, 256, device)
    out = torch.empty(1, 8, device=device)
    with pytest.raises(ValueError, match="expected 512 channels in natural order, got 256"):
        gemv_grouped(planes, q, out, 2)
    with pytest.raises(ValueError, match=r"an output of 1 rows of 8, got \[1, 9\]"):
        gemv(planes, q, torch.empty(1, 9, device=device))
    with pytest.raises(ValueError, match=r"float32 with 512 channels, got torch.float32 \[1, 256\]"):
        gemv_f16(f16_planes, x, out)
    with pytest.raises(ValueError, match="1 rows of 256 and 1 rows of 512 differ"):
        gemv_both(planes, q, out, f16_planes, randn(1, 512, seed=1, device=device), torch.empty(1, 8, device=device))
