"""Sinkhorn's rounds on 4 x 4 matrices that lanes hold in registers, one row of tokens each: sums need no shuffles.

Normalising rows and columns in turn only ever scales them, so the matrix k stays as it is and the scales change. With
a scale the reciprocal 1 / d of a denominator, c_ij = k_ij / (d_i D_j), and normalising the rows, which takes c_ij to
c_ij / (sum over j of c_ij + eps), comes to

    d_i <- (sum over j of k_ij / D_j) + eps d_i

and the same for the columns. The four 1 / D_j are made of one reciprocal, that of their product. Each k_ij is at least
eps, which keeps that product above about eps^3: with the model's 1e-6 far inside the range of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.ops.kernels.intrinsics import reciprocal


@triton.jit
def _columns(x):
    """x [rows, 4 * n] as four [rows, n]: every fourth column from 0 on, from 1 on, from 2 on, from 3 on."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    a, c = tl.split(tl.reshape(even, [x.shape[0], x.shape[1] // 4, 2]))
    b, d = tl.split(tl.reshape(odd, [x.shape[0], x.shape[1] // 4, 2]))
    return a, b, c, d


@triton.jit
def _numbers(x):
    """x [rows, 4] as four [rows]."""
    a, b, c, d = _columns(x)
    n: tl.constexpr = x.shape[0]
    return tl.reshape(a, [n]), tl.reshape(b, [n]), tl.reshape(c, [n]), tl.reshape(d, [n])


@triton.jit
def matrix(x):
    """x [rows, 16] as a tuple of four tuples of four [rows]: one matrix in a lane, row by row."""
    a, b, c, d = _columns(x)
    a, b, c, d = _numbers(a), _numbers(b), _numbers(c), _numbers(d)
    k = ()
    for i in tl.static_range(4):
        k = k + ((a[i], b[i], c[i], d[i]),)
    return k


@triton.jit
def _denominators(k, other, own, eps, ASM: tl.constexpr):
    """The next denominators of the rows of k, from those of its columns (`other`) and the last of its rows (`own`)."""
    p, q = other[0] * other[1], other[2] * other[3]
    r = reciprocal(p * q, ASM)
    # Nothing up to the last line waits for it.
    w = (other[1] * q, other[0] * q, other[3] * p, other[2] * p)
    out = ()
    for i in tl.static_range(4):
        total = k[i][0] * w[0]
        for j in tl.static_range(1, 4):
            total = tl.fma(k[i][j], w[j], total)
        out = out + (tl.fma(total, r, own[i] * eps),)
    return out


@triton.jit
def _times(row, r):
    return row[0] * r[0], row[1] * r[1], row[2] * r[2], row[3] * r[3]


@triton.jit
def _last(c, columns, eps, ASM: tl.constexpr):
    """c with its columns normalised. Their sums are of the very numbers that are divided: they come out right."""
    r = ()
    for j in tl.static_range(4):
        total = (c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + columns[j] * eps
        r = r + (reciprocal(total, ASM),)
    out = ()
    for i in tl.static_range(4):
        out = out + (_times(c[i], r),)
    return out


@triton.jit
def sinkhorn(k, eps, ROUNDS: tl.constexpr, ASM: tl.constexpr):
    """`ops.hyper_connection.sinkhorn` from its softmax plus `eps` on: k, and the result, as `matrix` gives them."""
    transposed = ()
    for j in tl.static_range(4):
        transposed = transposed + ((k[0][j], k[1][j], k[2][j], k[3][j]),)
    one = tl.full(k[0][0].shape, 1.0, tl.float32)
    rows = (one, one, one, one)
    columns = (one, one, one, one)
    for _ in range(ROUNDS - 1):
        columns = _denominators(transposed, rows, columns, eps, ASM)
        rows = _denominators(k, columns, rows, eps, ASM)
    c = ()
    for i in tl.static_range(4):
        r = reciprocal(rows[i], ASM)
        c = c + ((k[i][0] * r, k[i][1] * r, k[i][2] * r, k[i][3] * r),)
    return _last(c, columns, eps, ASM)
