"""Float32 rows in the 16-bit forms that prefill's products take, all from one reading.

A float32 number is, all but its last two bits, the sum of two float16, scaled by COARSE and FINE of `gemv_dot`. That
way products with F16 matrices lose next to nothing, and run on the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.experts_fused import fragment_place
from ds4.ops.kernels.gemv_dot import COARSE, FINE

_BLOCK = 2048


@triton.jit
def _terms_kernel(
    x, half, terms, placed, scale, N,
    HALF: tl.constexpr, TERMS: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < N
    value = tl.load(x + at, mask=there, other=0.0)
    if HALF:
        tl.store(half + at, value.to(half.dtype.element_ty), mask=there)
    if TERMS:
        scaled = value * COARSE
        coarse = scaled.to(tl.float16)
        tl.store(terms + at, coarse, mask=there)
        tl.store(terms + N + at, ((scaled - coarse.to(tl.float32)) * FINE).to(tl.float16), mask=there)
    if PLACED:
        tl.store(placed + fragment_place(at), (value * scale).to(placed.dtype.element_ty), mask=there)


@triton.jit
def _join_kernel(sums, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < N
    coarse = tl.load(sums + at, mask=there, other=0.0)
    fine = tl.load(sums + N + at, mask=there, other=0.0)
    tl.store(out + at, (coarse + fine * (1 / FINE)) * (1 / COARSE), mask=there)


def split_terms(
    x: Tensor,
    half: Tensor | None = None,
    terms: Tensor | None = None,
    placed: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Write what is not None.

    Args:
        x: float32 [rows, k], contiguous, k a multiple of 32.
        half: 16 bits or float32 [rows, k], contiguous, takes x rounded.
        terms: float16 [2, rows, k], contiguous, takes the two terms: x = (terms[0] + terms[1] / FINE) / COARSE, as long
            as x is below 65,504 / COARSE.
        placed: float16 or float32 [rows, k], contiguous, takes scale * x in the order of `experts_fused.fragments`.
    """
    if x.dim() != 2 or x.dtype != torch.float32 or x.shape[1] % 32 or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)} {x.dtype}: expected contiguous float32, a multiple of 32 channels")
    halves = (torch.bfloat16, torch.float16, torch.float32)
    for name, tensor, shape, dtypes in (
        ("half", half, (*x.shape,), halves),
        ("terms", terms, (2, *x.shape), halves[1:2]),
        ("placed", placed, (*x.shape,), halves[1:]),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous()):
            raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype}: expected contiguous {list(shape)}")
    first, second, third = (x if t is None else t for t in (half, terms, placed))
    _terms_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x, first, second, third, scale, x.numel(),
        HALF=half is not None, TERMS=terms is not None, PLACED=placed is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def join_terms(sums: Tensor, out: Tensor) -> None:
    """The product of x out of those of its terms.

    Args:
        sums: float32 [2, rows, n], contiguous: products of `split_terms`' terms with a matrix.
        out: float32 [rows, n], contiguous.
    """
    both = (sums, out)
    if sums.shape != (2, *out.shape) or any(t.dtype != torch.float32 or not t.is_contiguous() for t in both):
        raise ValueError(f"sums {list(sums.shape)} for {list(out.shape)}: expected twice as many, contiguous float32")
    _join_kernel[(triton.cdiv(out.numel(), _BLOCK),)](sums, out, out.numel(), BLOCK=_BLOCK, num_warps=8)
