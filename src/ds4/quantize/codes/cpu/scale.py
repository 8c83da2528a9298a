"""What the loops of all types share: how they are compiled, powers of two and float16 scales of blocks, weights.

The compiler's cache on disk sees changes of the file that a loop stands in, not of this one: after a change here,
delete the *.nbi files of __pycache__.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

F = np.float32

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(loop: _Loop) -> _Loop:
    """A loop as machine code that runs without the interpreter's lock; kept on disk where there is a place for it.

    Division by zero gives infinity or NaN, as in C: a check would keep the compiler from making vectors.
    """
    try:
        return cast(_Loop, njit(cache=True, nogil=True, error_model="numpy")(loop))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(_Loop, njit(nogil=True, error_model="numpy")(loop))


_NEGLIGIBLE = 2.0**-60
_LARGEST = 65504.0


@compiled
def block_exponent(values):
    """(e, largest): values [n] times 2^-e are below 1; largest is 0 if no float16 scale could tell them from zero."""
    largest = F(0)
    for i in range(len(values)):
        a = abs(values[i])
        largest = a if a > largest else largest
    if largest < _NEGLIGIBLE:
        return 0, F(0)
    return math.frexp(largest)[1], largest


@compiled
def half_bits(value):
    """The bits of the float16 nearest to a value >= 0, ties to even; too large values become the largest finite."""
    if value <= 0:
        return 0
    if value >= _LARGEST:
        return 0x7BFF
    exponent = max(math.frexp(value)[1], -13)  # below, numbers are subnormal and their spacing stays
    # Ten bits of fraction and, in the next bit, the leading one of a normal number: it carries into the exponent.
    return ((exponent + 13) << 10) + int(np.rint(math.ldexp(value, 11 - exponent)))


@compiled
def half_value(bits):
    """The value of a finite non-negative float16."""
    exponent, fraction = bits >> 10, bits & 1023
    return math.ldexp(fraction, -24) if exponent == 0 else math.ldexp(1024 + fraction, exponent - 25)


@compiled
def scale_bits(value, exponent):
    """The float16 bits of a scale > 0 of values that were multiplied by 2^-exponent; never zero, for 0 as well."""
    return max(half_bits(math.ldexp(value, exponent)), 1)


@compiled
def scale_value(bits, exponent):
    """What a stored scale is worth among values that were multiplied by 2^-exponent, float32."""
    return F(math.ldexp(half_value(bits), -exponent))


@compiled
def store_half(block, at, bits):
    """Writes two bytes, little endian."""
    block[at] = bits & 255
    block[at + 1] = bits >> 8


@compiled
def weigh(values, importance, exponent, x, w):
    """Fills x with the values times 2^-exponent and w with the weights of their squared errors (see `codes`)."""
    unit = F(math.ldexp(1.0, -exponent))
    energy = F(0)
    for i in range(len(values)):
        x[i] = values[i] * unit
        energy += x[i] * x[i]
    energy /= F(len(values))
    for i in range(len(values)):
        w[i] = importance[i] * np.sqrt(energy + x[i] * x[i])
