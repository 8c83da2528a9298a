"""IQ2_XXS, as in `cpu.iq2_xxs`: the lines of 32 values are tiles [4, 256], made anew where they are needed."""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.quantize.codes.gpu.scale import block_exponent, stored_scale, times_power

_BYTES = tl.constexpr(66)


@triton.jit
def _value(values, importance, exponent, energy, at):
    """Values at `at`, scaled, with their weights."""
    x = times_power(tl.load(values + at).to(tl.float32), -exponent)
    return x, tl.load(importance + at) * tl.sqrt(energy + x * x)


@triton.jit
def _lines(values, importance, grid, exponent, energy, g):
    """A, B [4, 256] of the 32 values of group g."""
    p = tl.arange(0, 256)
    A = tl.zeros([4, 256], tl.float32)
    B = tl.zeros([4, 256], tl.float32)
    least = A + float("inf")
    odd = tl.zeros([4], tl.int32)
    for i in range(8):
        x, w = _value(values, importance, exponent, energy, 32 * g + 8 * tl.arange(0, 4) + i)
        magnitude = tl.load(grid + 256 * i + p)
        odd ^= (x < 0).to(tl.int32)
        b = (w * tl.abs(x))[:, None] * magnitude[None, :]
        A += w[:, None] * (magnitude * magnitude)[None, :]
        B += b
        least = tl.minimum(least, b)
    return A, 2.0 * (B - tl.where(odd == 1, 2.0, 0.0)[:, None] * least)


@triton.jit
def _error(A, B, s):
    """Least error of 32 values at a scale, less that of zeros."""
    return s * tl.sum(tl.min(s * A - B, axis=1), axis=0)


@triton.jit
def _nearest(A, B, s):
    """[4], the points with the least s A - B, up to 2^-15 of it."""
    bits = (s * A - B).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.min((key & -256) | tl.arange(0, 256)[None, :], axis=1) & 255


@triton.jit
def _step(level):
    """The scale of a level, in units of d."""
    return (2 * level + 1).to(tl.float32) * 0.125


@triton.jit
def _item(vector, g):
    """Element g of a vector of 8."""
    return tl.sum(tl.where(tl.arange(0, 8) == g, vector, 0), axis=0)


@triton.jit
def _store_group(values, importance, grid, out, A, B, exponent, energy, d, level, g):
    """The eight bytes of group g."""
    k = tl.arange(0, 4)
    p = _nearest(A, B, d * _step(level))
    tl.store(out + 2 + 8 * g + k, p.to(tl.uint8))
    signs = p * 0
    odd = p * 0
    weakest = p * 0
    least = p * 0 + float("inf")
    for i in tl.static_range(8):
        x, w = _value(values, importance, exponent, energy, 32 * g + 8 * k + i)
        negative = (x < 0).to(tl.int32)
        signs |= negative << i
        odd ^= negative
        cost = w * tl.abs(x) * tl.load(grid + 256 * i + p)
        weakest = tl.where(cost < least, i, weakest)
        least = tl.minimum(cost, least)
    signs ^= odd << weakest
    word = tl.sum((signs & 127) << (7 * k), axis=0) | (level << 28)
    tl.store(out + 6 + 8 * g + k, ((word >> (8 * k)) & 255).to(tl.uint8))


@triton.jit(do_not_specialize=["blocks"])  # one kernel for rows of any length
def iq2_xxs_kernel(values, importance, grid, scales, out, halves, blocks, SCALES: tl.constexpr, ROUNDS: tl.constexpr):
    """One block: values [rows * blocks, 256], importance [blocks * 256]; out uint8, `halves` the same as int16."""
    block = tl.program_id(0).to(tl.int64)
    values += block * 256
    importance += (block % blocks) * 256
    out += block * _BYTES
    halves += block * (_BYTES // 2)
    i = tl.arange(0, 256)
    eight = tl.arange(0, 8)
    x = tl.load(values + i).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    found = largest >= 2.0**-60
    if found:
        exponent = block_exponent(largest)
        x = times_power(x, -exponent)
        energy = tl.sum(x * x, axis=0) / 256
        best = tl.zeros([8], tl.float32)
        for g in range(8):
            A, B = _lines(values, importance, grid, exponent, energy, g)
            group = times_power(tl.load(values + 32 * g + tl.arange(0, 32)).to(tl.float32), -exponent)
            peak = tl.max(tl.abs(group), axis=0)
            low = 0.0
            scale = 0.0
            for j in range(SCALES):
                s = peak * tl.load(scales + j)
                error = _error(A, B, s)
                scale = tl.where(error < low, s, scale)
                low = tl.minimum(low, error)
            best = tl.where(eight == g, scale, best)
        next_d = tl.max(best, axis=0) * (8.0 / 31.0)
        chosen = stored_scale(next_d, exponent)
        d = times_power(chosen.to(tl.float32), -exponent)
        near = tl.minimum(tl.maximum(4.0 * best / d, 0.0), 15.0).to(tl.int32)
        least = 0.0
        found = False
        rounds = 0
        while rounds < ROUNDS:
            trial = stored_scale(next_d, exponent)  # anew, no second name for `chosen`: see `k_quants`
            d = times_power(trial.to(tl.float32), -exponent)
            total = 0.0
            numerator = 0.0
            denominator = 0.0
            level = near
            for g in range(8):
                A, B = _lines(values, importance, grid, exponent, energy, g)
                low = float("inf")
                middle = _item(near, g)
                chosen_level = middle
                for k in range(3):
                    candidate = tl.minimum(tl.maximum(middle + (k - 1), 0), 15)
                    error = _error(A, B, d * _step(candidate))
                    chosen_level = tl.where(error < low, candidate, chosen_level)
                    low = tl.minimum(low, error)
                level = tl.where(eight == g, chosen_level, level)
                total += low
                c = _step(chosen_level)
                here = _nearest(A, B, d * c)[:, None] == i[None, :]
                numerator += c * tl.sum(tl.sum(tl.where(here, B, 0.0), axis=0), axis=0)
                denominator += c * c * tl.sum(tl.sum(tl.where(here, A, 0.0), axis=0), axis=0)
            if total < least:
                found = True
                least = total
                chosen = trial
                near = level
                next_d = tl.maximum(numerator / (2.0 * denominator), 0.0)
                rounds += 1
            else:
                rounds = ROUNDS
        if found:
            d = times_power(chosen.to(tl.float32), -exponent)
            tl.store(halves, chosen.to(tl.int16, bitcast=True))
            for g in range(8):
                A, B = _lines(values, importance, grid, exponent, energy, g)
                _store_group(values, importance, grid, out, A, B, exponent, energy, d, _item(near, g), g)
    if not found:
        tl.store(out + i, (i * 0).to(tl.uint8), mask=i < _BYTES)
