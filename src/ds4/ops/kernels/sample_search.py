"""Device functions of `ds4.ops.kernels.sample`: bounds in the order by score, then id, found bit by bit.

Items are scores float32, masses int64 and ids int32, [n] each; items without mass do not count.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(float(2**44))
"""The mass of the best token."""


@triton.jit
def order_of(scores):
    """float32 -> int64 in the same order, both zeros alike."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def score_of(order):
    """The float32 that `order_of` made this of."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sum_from(scores, masses, n, key, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The mass, or with COUNT the number, of items with an order of at least `key`."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mass = tl.load(masses + at, mask=at < n, other=0)
        order = order_of(tl.load(scores + at, mask=at < n, other=0.0))
        value = mass
        if COUNT:
            value = (mass > 0).to(tl.int64)
        total += tl.where(order >= key, value, 0)
    return tl.sum(total, axis=0)


@triton.jit
def search(scores, masses, n, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order from which on the items reach `target` in sum; all of them have to reach it.

    Two bits a round: three bounds are tried while the items are read once.
    """
    low = tl.full((), -(2**31), tl.int64)
    step = tl.full((), 2**30, tl.int64)
    for _ in range(16):
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mass = tl.load(masses + at, mask=at < n, other=0)
            order = order_of(tl.load(scores + at, mask=at < n, other=0.0))
            value = mass
            if COUNT:
                value = (mass > 0).to(tl.int64)
            first += tl.where(order >= low + step, value, 0)
            second += tl.where(order >= low + 2 * step, value, 0)
            third += tl.where(order >= low + 3 * step, value, 0)
        reached = (tl.sum(first, axis=0) >= target).to(tl.int64)
        reached += (tl.sum(second, axis=0) >= target).to(tl.int64)
        reached += (tl.sum(third, axis=0) >= target).to(tl.int64)
        low += reached * step
        step = step >> 2
    return low


@triton.jit
def items_at(scores, masses, n, key, BLOCK: tl.constexpr):
    """Mass and number of the items above an order, and the mass of each item that has it."""
    above = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int64)
    each = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mass = tl.load(masses + at, mask=at < n, other=0)
        order = order_of(tl.load(scores + at, mask=at < n, other=0.0))
        above += tl.where(order > key, mass, 0)
        count += ((order > key) & (mass > 0)).to(tl.int64)
        each = tl.maximum(each, tl.where(order == key, mass, 0))
    return tl.sum(above, axis=0), tl.sum(count, axis=0), tl.max(each, axis=0)


@triton.jit
def _id_at(ids, at, n, FULL: tl.constexpr):
    """FULL: an item's place is its id."""
    id = at.to(tl.int64)
    if not FULL:
        id = tl.load(ids + at, mask=at < n, other=0).to(tl.int64)
    return id


@triton.jit
def _lowest_id(scores, masses, ids, n, key, V: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest id of the items of order `key`."""
    least = tl.full([BLOCK], V, tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mass = tl.load(masses + at, mask=at < n, other=0)
        order = order_of(tl.load(scores + at, mask=at < n, other=0.0))
        id = _id_at(ids, at, n, FULL)
        least = tl.minimum(least, tl.where((order == key) & (mass > 0), id, V))
    return tl.min(least, axis=0)


@triton.jit
def _first_id(
    scores, masses, ids, n, key, last, least, target,
    V: tl.constexpr, EQUAL: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    low = tl.full((), -1, tl.int64)
    high = tl.full((), max(V - 1, 1), tl.int64)  # 1: triton 3.6 cannot compile the search over nothing
    while high - low > 1:
        middle = (low + high) >> 1
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mass = tl.load(masses + at, mask=at < n, other=0)
            order = order_of(tl.load(scores + at, mask=at < n, other=0.0))
            id = _id_at(ids, at, n, FULL)
            if EQUAL:
                value = ((order == key) & (mass > 0)).to(tl.int64)
            else:
                value = tl.where(((order > key) | ((order == key) & (id <= last))) & (mass >= least), mass, 0)
            total += tl.where(id <= middle, value, 0)
        reached = tl.sum(total, axis=0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def nth_id(scores, masses, ids, n, key, nth, V: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The nth smallest id, counted from 1, of the items of order `key`; nearly always the first and only one."""
    found = tl.full((), 0, tl.int64)
    if nth == 1:
        found = _lowest_id(scores, masses, ids, n, key, V, FULL, BLOCK)
    else:
        found = _first_id(scores, masses, ids, n, key, key, key, nth, V, True, FULL, BLOCK)
    return found


@triton.jit
def first_id(
    scores, masses, ids, n, key, last, least, target, V: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest id up to which the masses reach `target` in sum.

    They are those of the items above `key` and of those at it with an id up to `last`, if they are at least `least`.
    """
    return _first_id(scores, masses, ids, n, key, last, least, target, V, False, FULL, BLOCK)
