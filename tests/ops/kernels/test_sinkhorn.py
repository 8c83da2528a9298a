"""Sinkhorn's rounds inside `hc_pre`, on logits given exactly, against float64; and what they compile to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ds4.ops.hyper_connection import sinkhorn
from ds4.ops.kernels.hyper import Constants, HyperWeights, hc_pre, partial_floats
from tests.ops.kernels.kernel_checks import ON_GPU, error, poison, randn

BAR, EACH = (1e-5, 5e-4) if ON_GPU else (3e-7, 2e-5)  # the fast exponential rounds large logits more coarsely
HIDDEN = 128


def comb(logits: torch.Tensor, constants: Constants, device: str, rows: int = 1) -> torch.Tensor:
    """comb [rows, 4, 4] of rows that all have these logits [4, 4]: the matrix is zero, so that base is what is left."""
    base = torch.cat((torch.zeros(8), logits.flatten())).to(device)
    fn = torch.zeros(24, 4 * HIDDEN, dtype=torch.float16, device=device)
    w = HyperWeights(fn, torch.ones(3, device=device), base, torch.ones(HIDDEN, device=device))
    x = randn(rows, 4, HIDDEN, seed=1, device=device)
    coefficients = torch.empty(rows, 24, device=device)
    scratch = poison(torch.empty(partial_floats(rows, HIDDEN), device=device))
    hc_pre(x, w, scratch, coefficients, constants=constants)
    return coefficients[:, 8:].view(rows, 4, 4).cpu()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("size", [1, 10, 100])
def test_any_size_of_logits(size, eps, device):
    """The largest leave rows of one number and three of eps, and columns that no row wants."""
    for seed in range(4):
        logits = size * randn(4, 4, seed=seed)
        out = comb(logits, Constants(hc_eps=eps), device)[0]
        want = sinkhorn(logits[None].double(), 20, eps)[0]
        assert error(out, want) < BAR
        assert ((out.double() - want).abs() < EACH * want).all()  # the small ones too
        assert error(out.sum(0), want.sum(0)) < BAR


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds(rounds, device):
    logits = 2 * randn(4, 4, seed=5)
    want = sinkhorn(logits[None].double(), rounds, 1e-6)[0]
    assert error(comb(logits, Constants(iterations=rounds), device)[0], want) < BAR


def test_one_column_for_all_rows(device):
    logits = torch.zeros(4, 4)
    logits[:, 2] = 60
    want = sinkhorn(logits[None].double(), 20, 1e-6)[0]
    out = comb(logits, Constants(), device, rows=70)
    assert all(error(one, want) < BAR for one in out)


def test_rounds_stay_in_registers():
    """Compiled for a GPU, in a process that does not interpret; needs none. In the loop no lane waits for another."""
    code = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds4.ops.kernels.hyper import _finish_kernel as kernel
constants = dict(U=32, UB=32, SPLITS=128, SP=128, LR=1, ROUNDS=20, HEAD=False, INDEX=False, NORMED=True, CODES=True)
constants |= dict(WORDS=True, LANES=True, SUMS=False, ASM=True, PDL=0)
signature = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(constants, "constexpr")
signature |= dict(normed_row="i32", rows="i32", rms_eps="fp32", hc_eps="fp32")
signature |= dict.fromkeys(("words", "lanes", "sums"), "*i32")
source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
loops = [ptx[ptx.index(label + ":") : jump] for label, jump in
         ((m[1], m.start()) for m in re.finditer(r"bra[.a-z]*\\s+([$]\\w+);", ptx)) if ptx.index(label + ":") < jump]
print(len(loops), *(loop.count("fma.rn.f32") for loop in loops))
names = ("shfl", "bar", "shared", "local", "div")
print(*(name for name in names if re.search(rf"\\b{name}\\b", " ".join(loops))))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["1 32", ""], result.stdout
