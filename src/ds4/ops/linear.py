"""Matrix products whose rows do not depend on one another."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_BLOCK = 16
"""Rows that one matrix product takes. A BLAS picks its kernel by the size of the problem, and with it the order of the
sum; products of one fixed size give every row the same bits in any company. The price: one row costs as much as 16."""


def pad_rows(x: Tensor, multiple: int = ROW_BLOCK) -> Tensor:
    """x [rows, ...] with rows of zeros added up to a multiple; x itself where nothing is missing."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ weight^T: x float32 [rows, in], weight float32 [out, in] -> float32 [rows, out].

    Args:
        out: where to put the result, [rows, out]; may be a slice of columns of a larger tensor.
    """
    rows, width = x.shape
    if out is None:
        out = x.new_empty((rows, weight.shape[0]))
    if x.is_cuda:
        return torch.mm(x, weight.t(), out=out)
    if width % 4:
        # MKL's kernels for such widths sum a row in an order that depends on its place in the block.
        x, weight = (torch.nn.functional.pad(t, (0, -width % 4)) for t in (x, weight))
    columns = weight.t()
    whole = rows - rows % ROW_BLOCK
    for start in range(0, whole, ROW_BLOCK):
        block = torch.mm(x[start : start + ROW_BLOCK], columns)
        out[start : start + ROW_BLOCK] = block
    if whole < rows:
        out[whole:] = torch.mm(pad_rows(x[whole:]), columns)[: rows - whole]
    return out


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each group through its own matrix: x [rows, groups, in], weight [groups, out, in] -> [rows, groups, out]."""
    rows, groups, _ = x.shape
    out = x.new_empty((rows, groups, weight.shape[1]))
    for g in range(groups):
        linear(x[:, g].contiguous(), weight[g], out=out[:, g])
    return out
