"""Q2_K and Q4_K, as in `cpu.k_quants`: a sub-block is a row of the tile [sub-blocks, N]."""

from __future__ import annotations

import triton
import triton.language as tl

from ds4.quantize.codes.gpu.scale import block_exponent, stored_scale, times_power


@triton.jit
def _level(value, TOP: tl.constexpr):
    """The nearest of the integers 0 .. TOP, as float32."""
    rounded = (value + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(rounded, 0.0), TOP)


@triton.jit
def _sums(y, w, inverse, shift, TOP: tl.constexpr):
    """Of w q, w q^2 and w q y, where q = round((y + shift) inverse)."""
    q = _level((y + shift[:, None]) * inverse[:, None], TOP)
    a = w * q
    return tl.sum(a, axis=1), tl.sum(a * q, axis=1), tl.sum(a * y, axis=1)


@triton.jit
def _gain(s, m, q, qq, qy, one, wy):
    return s * (2.0 * (qy + m * q) - s * qq) - m * (2.0 * wy + m * one)


@triton.jit
def _divided(a, b):
    """a / b, and 0 unless b > 0."""
    return tl.where(b > 0, a / tl.where(b > 0, b, 1.0), 0.0)


@triton.jit
def _improve(y, w, inverse, shift, base, one, wy, s, m, best, TOP: tl.constexpr):
    """The s and m that are the least squares of these codes, with m >= base, where they are better."""
    q, qq, qy = _sums(y, w, inverse, shift, TOP)
    new_s = tl.maximum(_divided(one * qy - wy * q, one * qq - q * q), 0.0)
    new_m = (new_s * q - wy) / one
    new_s = tl.where(new_m < base, tl.maximum(_divided(qy + base * q, qq), 0.0), new_s)
    new_m = tl.maximum(new_m, base)
    gain = _gain(new_s, new_m, q, qq, qy, one, wy)
    better = gain > best
    return tl.where(better, new_s, s), tl.where(better, new_m, m), tl.where(better, gain, best)


@triton.jit
def _best_scales(sc, mn, q, qq, qy, base, one, wy, d, dmin):
    """d and dmin by least squares for given codes; not below zero."""
    uu = tl.sum(sc * sc * qq, axis=0)
    uv = tl.sum(sc * mn * q, axis=0)
    vv = tl.sum(mn * mn * one, axis=0)
    ux = tl.sum(sc * (qy + base * q), axis=0)
    vx = tl.sum(mn * (wy + base * one), axis=0)
    determinant = uu * vv - uv * uv
    both = determinant > 1e-6 * uu * vv
    alone = tl.where(uu > 0, _divided(ux + dmin * uv, uu), d)
    d = tl.where(both, _divided(ux * vv - uv * vx, determinant), alone)
    dmin = tl.where(both, _divided(uv * ux - uu * vx, determinant), dmin)
    return tl.maximum(d, 0.0), tl.maximum(dmin, 0.0)


@triton.jit
def _store_q2(out, codes, sc, mn):
    """Scales [16] and codes [16, 16] of a block of 84 bytes."""
    tl.store(out + tl.arange(0, 16), (sc | (mn << 4)).to(tl.uint8))
    shift = 2 * tl.arange(0, 4)[None, :, None]
    packed = tl.sum(tl.reshape(codes, [2, 4, 32]) << shift, axis=1)
    at = 32 * tl.arange(0, 2)[:, None] + tl.arange(0, 32)[None, :]
    tl.store(out + 16 + at, packed.to(tl.uint8))


@triton.jit
def _store_q4(out, codes, sc, mn):
    """Scales [8] and codes [8, 32] of a block of 144 bytes."""
    first = tl.arange(0, 2)[:, None] == 0
    scales, minima = tl.reshape(sc, [2, 4]), tl.reshape(mn, [2, 4])
    sc_low = tl.sum(tl.where(first, scales, (scales >> 4) << 6), axis=0)
    mn_low = tl.sum(tl.where(first, minima, (minima >> 4) << 6), axis=0)
    high = tl.sum(tl.where(first, 0, (scales & 15) | ((minima & 15) << 4)), axis=0)
    i = tl.arange(0, 4)
    tl.store(out + 4 + i, sc_low.to(tl.uint8))
    tl.store(out + 8 + i, mn_low.to(tl.uint8))
    tl.store(out + 12 + i, high.to(tl.uint8))
    shift = 4 * tl.arange(0, 2)[None, :, None]
    packed = tl.sum(tl.reshape(codes, [4, 2, 32]) << shift, axis=1)
    at = 32 * i[:, None] + tl.arange(0, 32)[None, :]
    tl.store(out + 16 + at, packed.to(tl.uint8))


@triton.jit(do_not_specialize=["blocks"])  # one kernel for rows of any length
def k_quant_kernel(
    values,
    importance,
    trials,
    out,
    halves,
    blocks,
    N: tl.constexpr,
    TOP: tl.constexpr,
    LIMIT: tl.constexpr,
    TRIALS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One block: values [rows * blocks, 256], importance [blocks * 256]; out uint8, `halves` the same as int16."""
    BYTES: tl.constexpr = 84 if N == 16 else 144
    SCALES_AT: tl.constexpr = 80 if N == 16 else 0
    block = tl.program_id(0).to(tl.int64)
    at = N * tl.arange(0, 256 // N)[:, None] + tl.arange(0, N)[None, :]
    x = tl.load(values + block * 256 + at).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    out += block * BYTES
    halves += (block * BYTES + SCALES_AT) // 2
    if largest < 2.0**-60:
        everywhere = tl.arange(0, 256)
        tl.store(out + everywhere, (everywhere * 0).to(tl.uint8), mask=everywhere < BYTES)
    else:
        exponent = block_exponent(largest)
        x = times_power(x, -exponent)
        energy = tl.sum(tl.sum(x * x, axis=1), axis=0) / 256
        w = tl.load(importance + (block % blocks) * 256 + at) * tl.sqrt(energy + x * x)
        base = tl.minimum(tl.min(x, axis=1), 0.0)
        width = tl.max(x, axis=1) - base
        y = x - base[:, None]
        one = tl.sum(w, axis=1)
        wy = tl.sum(w * y, axis=1)
        s = one * 0
        m = one * 0
        best = s - float("inf")
        for trial in range(TRIALS):
            steps = TOP + tl.load(trials + 2 * trial)
            shift = -tl.load(trials + 2 * trial + 1) * width / steps
            s, m, best = _improve(y, w, _divided(steps, width), shift, base, one, wy, s, m, best, TOP)
        m -= base
        next_d = tl.max(s, axis=0) / LIMIT
        next_dmin = tl.max(m, axis=0) / LIMIT
        d = stored_scale(next_d, exponent)
        dmin = stored_scale(next_dmin, exponent)
        sc = _level(tl.minimum(_divided(s, times_power(d.to(tl.float32), -exponent)), LIMIT), LIMIT)
        mn = _level(tl.minimum(_divided(m, times_power(dmin.to(tl.float32), -exponent)), LIMIT), LIMIT)
        total = -float("inf")
        rounds = 0
        while rounds < ROUNDS:
            # A second name for the d of before the loop would not do here: Triton takes a variable that a loop sets to
            # the very value that it had before for one that the loop does not change, and gives it back as it was.
            new_d = stored_scale(next_d, exponent)
            new_dmin = stored_scale(next_dmin, exponent)
            trial_d = times_power(new_d.to(tl.float32), -exponent)
            trial_dmin = times_power(new_dmin.to(tl.float32), -exponent)
            gains = one - float("inf")
            q = one * 0
            qq = one * 0
            qy = one * 0
            new_sc = sc
            new_mn = mn
            for trial in range(9):
                trial_sc = tl.minimum(tl.maximum(sc + (trial // 3 - 1), 0.0), LIMIT)
                trial_mn = tl.minimum(tl.maximum(mn + (trial % 3 - 1), 0.0), LIMIT)
                scale = trial_sc * trial_d
                shift = trial_mn * trial_dmin + base
                trial_q, trial_qq, trial_qy = _sums(y, w, _divided(1.0, scale), shift, TOP)
                gain = _gain(scale, shift, trial_q, trial_qq, trial_qy, one, wy)
                better = gain > gains
                gains = tl.where(better, gain, gains)
                q = tl.where(better, trial_q, q)
                qq = tl.where(better, trial_qq, qq)
                qy = tl.where(better, trial_qy, qy)
                new_sc = tl.where(better, trial_sc, new_sc)
                new_mn = tl.where(better, trial_mn, new_mn)
            gain = tl.sum(gains, axis=0)
            if gain > total:
                total = gain
                d = new_d
                dmin = new_dmin
                sc = new_sc
                mn = new_mn
                next_d, next_dmin = _best_scales(sc, mn, q, qq, qy, base, one, wy, trial_d, trial_dmin)
                rounds += 1
            else:
                rounds = ROUNDS
        scale = sc * times_power(d.to(tl.float32), -exponent)
        least = mn * times_power(dmin.to(tl.float32), -exponent)
        codes = _level((x + least[:, None]) * _divided(1.0, scale)[:, None], TOP).to(tl.int32)
        if N == 16:
            _store_q2(out, codes, sc.to(tl.int32), mn.to(tl.int32))
        else:
            _store_q4(out, codes, sc.to(tl.int32), mn.to(tl.int32))
        tl.store(halves, d.to(tl.int16, bitcast=True))
        tl.store(halves + 1, dmin.to(tl.int16, bitcast=True))
