"""Q2_K and Q4_K: sub-blocks of values s q - m with codes q = 0 .. top, s = d sc >= 0, m = dmin mn >= 0.

| | values of a sub-block | q | sc, mn |
|---|---|---|---|
| Q2_K | 16 | 2 bits | 4 bits |
| Q4_K | 32 | 4 bits | 6 bits |

1. For each sub-block alone: round to equal steps of several widths and places, solve the weighted least squares for s
   and m, and keep the best.
2. d and dmin such that the largest s and m have the largest codes.
3. In turn: the best sc and mn of each sub-block at d and dmin, among neighbours, with codes q rounded anew; then d and
   dmin by least squares over all sub-blocks. As long as the error falls.

Sub-blocks stand side by side: arrays end with a dim of eight of them, `chunks` of which make a block. y is what a value
lies above the least of its sub-block (`base`, at most zero), so that sums of squares stay near the errors in size.
"""

from __future__ import annotations

import numpy as np

from ds4.quantize.codes.cpu.scale import F, block_exponent, compiled, scale_bits, scale_value, store_half, weigh

LANES = 8
Q2_K_BYTES = 84
Q4_K_BYTES = 144

# Adding and taking it away rounds a float32 below 2^22 to the nearest integer.
_ROUND = F(1.5 * 2**23)


@compiled
def _level(value, top):
    """The nearest of the integers 0 .. top, as float32."""
    q = (value + _ROUND) - _ROUND
    q = q if q > F(0) else F(0)
    return q if q < top else top


@compiled
def _sums(y, w, inverse, shift, top, sums):
    """sums [3, 8]: of w q, w q^2 and w q y, where q = round((y + shift) inverse)."""
    sums[:] = F(0)
    for i in range(0, y.shape[0], 4):
        for j in range(LANES):
            t, u = inverse[j], shift[j]
            y0, y1, y2, y3 = y[i, j], y[i + 1, j], y[i + 2, j], y[i + 3, j]
            q0, q1 = _level((y0 + u) * t, top), _level((y1 + u) * t, top)
            q2, q3 = _level((y2 + u) * t, top), _level((y3 + u) * t, top)
            a0, a1, a2, a3 = w[i, j] * q0, w[i + 1, j] * q1, w[i + 2, j] * q2, w[i + 3, j] * q3
            sums[0, j] += (a0 + a1) + (a2 + a3)
            sums[1, j] += (a0 * q0 + a1 * q1) + (a2 * q2 + a3 * q3)
            sums[2, j] += (a0 * y0 + a1 * y1) + (a2 * y2 + a3 * y3)


@compiled
def _gain(s, m, sums, j, one, wy):
    """How much less the weighted squared error of s q - m is than that of zeros; one = sum w, wy = sum w y."""
    q, qq, qy = sums[0, j], sums[1, j], sums[2, j]
    return s * (F(2) * (qy + m * q) - s * qq) - m * (F(2) * wy + m * one)


@compiled
def _improve(sums, base, one, wy, s, m, best):
    """Takes over the s and m [8] that are the least squares of `sums`, with m >= base, where they are better."""
    for j in range(LANES):
        q, qq, qy = sums[0, j], sums[1, j], sums[2, j]
        determinant = one[j] * qq - q * q
        new_s = max((one[j] * qy - wy[j] * q) / determinant, F(0)) if determinant > F(0) else F(0)
        new_m = (new_s * q - wy[j]) / one[j]
        if new_m < base[j]:
            new_m = base[j]
            new_s = max((qy + new_m * q) / qq, F(0)) if qq > F(0) else F(0)
        gain = _gain(new_s, new_m, sums, j, one[j], wy[j])
        if gain > best[j]:
            best[j] = gain
            s[j] = new_s
            m[j] = new_m


@compiled
def _fit(y, w, base, width, one, wy, trials, top, s, m):
    """Fills s and m [8], y ~ s q - m, for eight sub-blocks (`trials`: see `search`)."""
    sums, best = np.empty((3, LANES), F), np.full(LANES, F(-np.inf), F)
    inverse, shift = np.empty(LANES, F), np.zeros(LANES, F)
    for trial in range(len(trials)):
        steps = top + trials[trial, 0]
        for j in range(LANES):
            inverse[j] = steps / width[j] if width[j] > F(0) else F(0)
            shift[j] = -trials[trial, 1] * width[j] / steps
        _sums(y, w, inverse, shift, top, sums)
        _improve(sums, base, one, wy, s, m, best)


@compiled
def _gather(x, w, lane_y, lane_w, base, width, one, wy):
    """Sub-blocks of x and w [256] as columns of lane_y and lane_w [chunks, n, 8], and their sums [chunks, 8]."""
    chunks, n = lane_y.shape[0], lane_y.shape[1]
    for c in range(chunks):
        for j in range(LANES):
            at = (c * LANES + j) * n
            low, high = F(0), F(-np.inf)
            for i in range(at, at + n):
                low = min(x[i], low)
                high = max(x[i], high)
            total, moment = F(0), F(0)
            for i in range(n):
                lane_y[c, i, j] = x[at + i] - low
                lane_w[c, i, j] = w[at + i]
                total += w[at + i]
                moment += w[at + i] * (x[at + i] - low)
            base[c, j], width[c, j], one[c, j], wy[c, j] = low, high - low, total, moment


@compiled
def _nearest_code(value, unit, limit):
    """value / unit as a code 0 .. limit; the unit of values near the largest float32 may be zero."""
    return _level(min(value / unit, limit), limit) if unit > F(0) else F(0)


@compiled
def _choose(y, w, base, one, wy, d, dmin, top, limit, sc, mn, sums):
    """The best of the codes sc, mn [8] and their neighbours, put in their place; the gain of all; fills sums [3, 8]."""
    trial_sums, gains = np.empty((3, LANES), F), np.full(LANES, F(-np.inf), F)
    new_sc, new_mn = np.empty(LANES, F), np.empty(LANES, F)
    trial_sc, trial_mn = np.empty(LANES, F), np.empty(LANES, F)
    inverse, shift = np.empty(LANES, F), np.empty(LANES, F)
    for trial in range(9):
        for j in range(LANES):
            trial_sc[j] = min(max(sc[j] + F(trial // 3 - 1), F(0)), limit)
            trial_mn[j] = min(max(mn[j] + F(trial % 3 - 1), F(0)), limit)
            inverse[j] = F(1) / (trial_sc[j] * d) if trial_sc[j] * d > F(0) else F(0)
            shift[j] = trial_mn[j] * dmin + base[j]
        _sums(y, w, inverse, shift, top, trial_sums)
        for j in range(LANES):
            gain = _gain(trial_sc[j] * d, shift[j], trial_sums, j, one[j], wy[j])
            if gain > gains[j]:
                gains[j] = gain
                new_sc[j], new_mn[j] = trial_sc[j], trial_mn[j]
                for i in range(3):
                    sums[i, j] = trial_sums[i, j]
    total = F(0)
    for j in range(LANES):
        sc[j], mn[j] = new_sc[j], new_mn[j]
        total += gains[j]
    return total


@compiled
def _best_scales(sc, mn, sums, base, one, wy, d, dmin):
    """d and dmin by least squares for given codes, x ~ d u - dmin v with u = sc q, v = mn; not below zero."""
    uu, uv, vv, ux, vx = F(0), F(0), F(0), F(0), F(0)
    for c in range(sc.shape[0]):
        for j in range(LANES):
            u, v = sc[c, j], mn[c, j]
            uu += u * u * sums[c, 1, j]
            uv += u * v * sums[c, 0, j]
            vv += v * v * one[c, j]
            ux += u * (sums[c, 2, j] + base[c, j] * sums[c, 0, j])
            vx += v * (wy[c, j] + base[c, j] * one[c, j])
    determinant = uu * vv - uv * uv
    if determinant > F(1e-6) * uu * vv:
        d, dmin = (ux * vv - uv * vx) / determinant, (uv * ux - uu * vx) / determinant
    elif uu > F(0):
        d = (ux + dmin * uv) / uu
    return max(d, F(0)), max(dmin, F(0))


@compiled
def _encode_block(values, importance, exponent, n, top, limit, trials, rounds, codes, sub_sc, sub_mn):
    """Codes of a block: fills codes [256], sub_sc and sub_mn [256 / n], all uint8; the float16 bits of d and dmin.

    Args:
        values, importance: float32 [256]; exponent: from `block_exponent`, of a block that is not zero.
        n: values of a sub-block. top: largest code of a value, limit: of a scale; float32.
        trials: float32 [trials, 2], of step 1 (see `search`).
        rounds: how often step 3 is done at most.
    """
    chunks = 256 // (n * LANES)
    x, weight = np.empty(256, F), np.empty(256, F)
    y, w = np.empty((chunks, n, LANES), F), np.empty((chunks, n, LANES), F)
    base, width = np.empty((chunks, LANES), F), np.empty((chunks, LANES), F)
    one, wy = np.empty((chunks, LANES), F), np.empty((chunks, LANES), F)
    s, m = np.zeros((chunks, LANES), F), np.zeros((chunks, LANES), F)
    sc, mn, sums = np.empty((chunks, LANES), F), np.empty((chunks, LANES), F), np.empty((chunks, 3, LANES), F)
    weigh(values, importance, exponent, x, weight)
    _gather(x, weight, y, w, base, width, one, wy)
    for c in range(chunks):
        _fit(y[c], w[c], base[c], width[c], one[c], wy[c], trials, top, s[c], m[c])
    m -= base
    d_bits, dmin_bits = scale_bits(s.max() / limit, exponent), scale_bits(m.max() / limit, exponent)
    d, dmin = scale_value(d_bits, exponent), scale_value(dmin_bits, exponent)
    for c in range(chunks):
        for j in range(LANES):
            sc[c, j], mn[c, j] = _nearest_code(s[c, j], d, limit), _nearest_code(m[c, j], dmin, limit)
    best, best_d, best_dmin = F(-np.inf), d_bits, dmin_bits
    for _ in range(rounds):
        d, dmin = scale_value(d_bits, exponent), scale_value(dmin_bits, exponent)
        gain = F(0)
        for c in range(chunks):
            gain += _choose(y[c], w[c], base[c], one[c], wy[c], d, dmin, top, limit, sc[c], mn[c], sums[c])
        if gain <= best:
            break
        best, best_d, best_dmin = gain, d_bits, dmin_bits
        for b in range(256 // n):
            sub_sc[b], sub_mn[b] = int(sc[b // LANES, b % LANES]), int(mn[b // LANES, b % LANES])
        d, dmin = _best_scales(sc, mn, sums, base, one, wy, d, dmin)
        d_bits, dmin_bits = scale_bits(d, exponent), scale_bits(dmin, exponent)
    d, dmin = scale_value(best_d, exponent), scale_value(best_dmin, exponent)
    for b in range(256 // n):
        scale, least = F(sub_sc[b]) * d, F(sub_mn[b]) * dmin
        inverse = F(1) / scale if scale > F(0) else F(0)
        for i in range(b * n, (b + 1) * n):
            codes[i] = int(_level((x[i] + least) * inverse, top))
    return best_d, best_dmin


@compiled
def encode_rows_q2(values, importance, trials, rounds, out):
    """Fills out uint8 [rows, cols / 256 * 84] from float32 values [rows, cols] (see `_encode_block`)."""
    codes, sc, mn = np.empty(256, np.uint8), np.empty(16, np.uint8), np.empty(16, np.uint8)
    for row in range(values.shape[0]):
        for number in range(values.shape[1] // 256):
            part = slice(256 * number, 256 * number + 256)
            block = out[row, Q2_K_BYTES * number : Q2_K_BYTES * (number + 1)]
            exponent, largest = block_exponent(values[row, part])
            if largest == F(0):
                block[:] = 0
                continue
            d, dmin = _encode_block(
                values[row, part], importance[part], exponent, 16, F(3), F(15), trials, rounds, codes, sc, mn
            )
            for b in range(16):
                block[b] = sc[b] | mn[b] << 4
            for half in range(2):
                for i in range(32):
                    at = 128 * half + i
                    packed = codes[at] | codes[at + 32] << 2 | codes[at + 64] << 4 | codes[at + 96] << 6
                    block[16 + 32 * half + i] = packed
            store_half(block, 80, d)
            store_half(block, 82, dmin)


@compiled
def encode_rows_q4(values, importance, trials, rounds, out):
    """Fills out uint8 [rows, cols / 256 * 144] from float32 values [rows, cols] (see `_encode_block`)."""
    codes, sc, mn = np.empty(256, np.uint8), np.empty(8, np.uint8), np.empty(8, np.uint8)
    for row in range(values.shape[0]):
        for number in range(values.shape[1] // 256):
            part = slice(256 * number, 256 * number + 256)
            block = out[row, Q4_K_BYTES * number : Q4_K_BYTES * (number + 1)]
            exponent, largest = block_exponent(values[row, part])
            if largest == F(0):
                block[:] = 0
                continue
            d, dmin = _encode_block(
                values[row, part], importance[part], exponent, 32, F(15), F(63), trials, rounds, codes, sc, mn
            )
            store_half(block, 0, d)
            store_half(block, 2, dmin)
            for j in range(4):
                block[4 + j] = sc[j] | (sc[j + 4] >> 4) << 6
                block[8 + j] = mn[j] | (mn[j + 4] >> 4) << 6
                block[12 + j] = (sc[j + 4] & 15) | (mn[j + 4] & 15) << 4
            for run in range(4):
                for i in range(32):
                    block[16 + 32 * run + i] = codes[64 * run + i] | codes[64 * run + 32 + i] << 4
