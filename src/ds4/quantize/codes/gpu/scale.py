"""Powers of two and float16 scales of blocks, as in `cpu.scale`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(exponent):
    """2^exponent, for -126 .. 127, float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def times_power(value, exponent):
    """value 2^exponent, for exponents from -150 to 150: in two factors, since one can be out of range."""
    half = exponent // 2
    return value * power(half) * power(exponent - half)


@triton.jit
def block_exponent(largest):
    """e such that largest 2^-e is in [0.5, 1); largest a normal float32."""
    return (largest.to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def stored_scale(value, exponent):
    """The float16 nearest to value 2^exponent, not zero and not infinite."""
    return tl.minimum(tl.maximum(times_power(value, exponent), 2.0**-24), 65504.0).to(tl.float16)
