"""Rows in 16-bit forms against plain torch, and products of terms against float64."""

from __future__ import annotations

import pytest
import torch

from ds4.ops.kernels.experts_fused import fragments
from ds4.ops.kernels.gemv_dot import COARSE, FINE
from ds4.ops.kernels.terms import join_terms, split_terms
from tests.ops.kernels.kernel_checks import ON_GPU, error, poison, randn

SIZES = [(5, 96), (40, 1024), (1, 32)] + ([(4096, 4096), (777, 7168)] if ON_GPU else [])
HALF = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter does not round to bfloat16 as a device does


def empty(*size: int, dtype: torch.dtype = torch.float32, device: str) -> torch.Tensor:
    return poison(torch.empty(*size, dtype=dtype, device=device))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_forms_at_once(size: tuple[int, int], device: str) -> None:
    x = randn(*size, seed=1, device=device) * torch.logspace(-4, 4, size[1], device=device)
    half, placed = empty(*size, dtype=HALF, device=device), empty(*size, dtype=torch.float16, device=device)
    terms = empty(2, *size, dtype=torch.float16, device=device)
    split_terms(x, half, terms, placed, 0.25)
    assert torch.equal(half, x.to(HALF))
    assert torch.equal(placed, fragments(x, torch.float16, 0.25))
    assert torch.equal(terms[0], (x * COARSE.value).half())
    back = (terms[0].double() + terms[1].double() / FINE.value) / COARSE.value
    assert float(((back - x).abs() / x.abs().clamp(min=1e-2)).max()) < 2.0**-21


def test_only_what_is_asked_for_is_written(device: str) -> None:
    x = randn(3, 64, seed=2, device=device)
    half, placed = empty(3, 64, dtype=HALF, device=device), empty(3, 64, dtype=torch.float32, device=device)
    split_terms(x, half=half)
    split_terms(x, placed=placed, scale=2.0)
    assert torch.equal(half, x.to(HALF))
    assert torch.equal(placed, fragments(x, torch.float32, 2.0))


def test_products_of_terms_are_those_of_float32(device: str) -> None:
    x, weight = randn(9, 256, seed=3, device=device) * 50, randn(48, 256, seed=4, device=device).half()
    terms, out = torch.empty(2, 9, 256, dtype=torch.float16, device=device), empty(9, 48, device=device)
    split_terms(x, terms=terms)
    sums = terms.float() @ weight.float().t()
    join_terms(sums, out)
    assert error(out, x.double() @ weight.double().t()) < 1e-6
    coarse = (terms[0].float() @ weight.float().t()) / COARSE.value
    assert error(coarse, x.double() @ weight.double().t()) > 1e-5  # the second term counts


def test_refusals(device: str) -> None:
    x = randn(4, 64, seed=5, device=device)
    for wrong in (x[:, :48], x.double(), x.t(), x.view(2, 2, 64)):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            split_terms(wrong, torch.empty(4, 64, device=device))
    columns = torch.empty(64, 4, device=device).t()
    for half in (torch.empty(4, 32, device=device), torch.empty(4, 64, dtype=torch.int32, device=device), columns):
        with pytest.raises(ValueError, match=r"^half .*: expected contiguous \[4, 64\]"):
            split_terms(x, half=half)
    with pytest.raises(ValueError, match=r"^terms .* torch.float32: expected contiguous \[2, 4, 64\]"):
        split_terms(x, terms=torch.empty(2, 4, 64, device=device))
    with pytest.raises(ValueError, match=r"^placed .*bfloat16"):
        split_terms(x, placed=torch.empty(4, 64, dtype=torch.bfloat16, device=device))
    for sums in (torch.empty(4, 64, device=device), torch.empty(2, 4, 64, dtype=torch.float16, device=device)):
        with pytest.raises(ValueError, match="twice as many"):
            join_terms(sums, x)
