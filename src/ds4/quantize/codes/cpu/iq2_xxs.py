"""IQ2_XXS: 8 magnitudes from a grid of 256 points, 7 + 1 signs of even parity, a 4-bit scale per 32, a float16 per 256.

For magnitudes g of a point p and a scale s, the weighted squared error of 8 values is, up to a constant,

    s (s A_p - B_p),   A_p = sum w g^2,   B_p = 2 sum w |x| g

so one pass over the grid gives the lines (A, B), and the best point for any scale is the lowest of 256 lines at s. An
odd number of minus signs cannot be stored: one sign has to be wrong, which for point p costs least at the smallest
w |x| g. This cost is part of B_p, so sign and point are chosen together and exactly.
"""

from __future__ import annotations

import numpy as np

from ds4.quantize.codes.cpu.scale import F, block_exponent, compiled, scale_bits, scale_value, store_half, weigh

BLOCK_BYTES = 66


@compiled
def _lines(w, x, odd, grid, A, B):
    """The lines of 8 values: w, x >= 0 [8], grid [8, 256], A, B [256]."""
    w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    v0, v1, v2, v3 = w0 * x[0], w1 * x[1], w2 * x[2], w3 * x[3]
    v4, v5, v6, v7 = w4 * x[4], w5 * x[5], w6 * x[6], w7 * x[7]
    flipped = F(2) if odd else F(0)
    for p in range(256):
        g0, g1, g2, g3 = grid[0, p], grid[1, p], grid[2, p], grid[3, p]
        g4, g5, g6, g7 = grid[4, p], grid[5, p], grid[6, p], grid[7, p]
        low = (w0 * (g0 * g0) + w1 * (g1 * g1)) + (w2 * (g2 * g2) + w3 * (g3 * g3))
        A[p] = low + ((w4 * (g4 * g4) + w5 * (g5 * g5)) + (w6 * (g6 * g6) + w7 * (g7 * g7)))
        b0, b1, b2, b3, b4, b5, b6, b7 = v0 * g0, v1 * g1, v2 * g2, v3 * g3, v4 * g4, v5 * g5, v6 * g6, v7 * g7
        least = min(min(min(b0, b1), min(b2, b3)), min(min(b4, b5), min(b6, b7)))
        B[p] = F(2) * ((((b0 + b1) + (b2 + b3)) + ((b4 + b5) + (b6 + b7))) - flipped * least)


@compiled
def _nearest(A, B, s):
    """The point p with the least s A_p - B_p, up to 2^-15 of it."""
    least = np.int32(0x7FFFFFFF)
    for p in range(256):
        bits = F(s * A[p] - B[p]).view(np.int32)
        # As integers that order like the floats, with the index in the lowest bits, the minimum needs no branch.
        key = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
        least = min((key & np.int32(-256)) | np.int32(p), least)
    return least & 255


@compiled
def _error(A, B, s):
    """Least error of 32 values at a scale, less that of zeros; A, B [4, 256]."""
    total = F(0)
    for k in range(4):
        p = _nearest(A[k], B[k], s)
        total += s * A[k, p] - B[k, p]
    return s * total


@compiled
def _step(level):
    """The scale of a level, in units of d."""
    return F((2 * level + 1) / 8)


@compiled
def _choose_levels(A, B, d, near, level):
    """Least error of a block at d; `level` becomes the best levels among `near` and their neighbours."""
    total = F(0)
    for g in range(8):
        low = F(np.inf)
        for k in range(max(near[g] - 1, 0), min(near[g] + 1, 15) + 1):
            error = _error(A[g], B[g], d * _step(k))
            if error < low:
                low = error
                level[g] = k
        total += low
    return total


@compiled
def _best_d(A, B, d, level):
    """The d that fits best to the points that are nearest at `d`: least squares."""
    numerator, denominator = F(0), F(0)
    for g in range(8):
        c = _step(level[g])
        for k in range(4):
            p = _nearest(A[g, k], B[g, k], d * c)
            numerator += c * B[g, k, p]
            denominator += c * c * A[g, k, p]
    return numerator / (F(2) * denominator) if numerator > F(0) else F(0)


@compiled
def _store(block, bits, level, d, values, w, x, grid, A, B):
    """Packs a block of 66 bytes."""
    store_half(block, 0, bits)
    for g in range(8):
        word = level[g] << 28
        for k in range(4):
            at = 32 * g + 8 * k
            p = _nearest(A[g, k], B[g, k], d * _step(level[g]))
            block[2 + 8 * g + k] = p
            signs, odd, weakest, least = 0, 0, 0, F(np.inf)
            for i in range(8):
                negative = 1 if values[at + i] < 0 else 0
                signs |= negative << i
                odd ^= negative
                cost = w[at + i] * x[at + i] * grid[i, p]
                if cost < least:
                    least = cost
                    weakest = i
            signs ^= odd << weakest
            word |= (signs & 127) << (7 * k)
        for i in range(4):
            block[6 + 8 * g + i] = (word >> (8 * i)) & 255


@compiled
def encode_rows(values, importance, grid, search, rounds, out):
    """Fills out uint8 [rows, cols / 256 * 66].

    Args:
        values: float32 [rows, cols], finite.
        importance: float32 [cols], > 0.
        grid: float32 [8, 256], the magnitudes of each point.
        search: float32, scales to try for 32 values, in units of the largest of them.
        rounds: how often d and the levels are improved in turn, at most.
    """
    A, B = np.empty((8, 4, 256), F), np.empty((8, 4, 256), F)
    x, w, scale = np.empty(256, F), np.empty(256, F), np.empty(8, F)
    near, level = np.empty(8, np.int64), np.empty(8, np.int64)
    for row in range(values.shape[0]):
        for number in range(values.shape[1] // 256):
            part = slice(256 * number, 256 * number + 256)
            source = values[row, part]
            block = out[row, BLOCK_BYTES * number : BLOCK_BYTES * (number + 1)]
            block[:] = 0
            exponent, largest = block_exponent(source)
            if largest == F(0):
                continue
            weigh(source, importance[part], exponent, x, w)
            top = F(0)
            for g in range(8):
                peak = F(0)
                for k in range(4):
                    at = 32 * g + 8 * k
                    odd = 0
                    for i in range(at, at + 8):
                        odd ^= 1 if x[i] < 0 else 0
                        x[i] = abs(x[i])
                        peak = max(peak, x[i])
                    _lines(w[at : at + 8], x[at : at + 8], odd, grid, A[g, k], B[g, k])
                low = F(0)
                scale[g] = F(0)
                for j in range(len(search)):
                    error = _error(A[g], B[g], peak * search[j])
                    if error < low:
                        low = error
                        scale[g] = peak * search[j]
                top = max(top, scale[g])
            bits, least = 0, F(0)  # zeros, unless something is better
            trial = scale_bits(top * F(8 / 31), exponent)
            for g in range(8):
                near[g] = int(min(max(F(4) * scale[g] / scale_value(trial, exponent), F(0)), F(15)))
            for _ in range(rounds):
                d = scale_value(trial, exponent)
                total = _choose_levels(A, B, d, near, level)
                if total >= least:
                    break
                bits, least = trial, total
                near[:] = level
                trial = scale_bits(_best_d(A, B, d, level), exponent)
            if bits:
                _store(block, bits, near, scale_value(bits, exponent), source, w, x, grid, A, B)
