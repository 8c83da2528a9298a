"""Tiles of weights as a program of `experts_fused` decodes them: which thread makes which."""

from __future__ import annotations

import re

import triton
import triton.language as tl

# The axes of a tile of weights: a lane's place in four, in eight, sixteens of rows, the two rows of a thread, groups of
# channels. The compiler hands out lanes, then warps, then registers along them, in this order (Triton 3.6) or from the
# last one on (3.7), if it has no other reason; and a permutation of axes that a thread has to itself costs nothing. It
# does find a reason in neighbouring words of a lane: those come by one load. That chunks of neighbouring lanes are
# neighbours, too, it is not to know.
LANE, EIGHT, SIXTEENS, PAIR, GROUP = (tl.constexpr(i) for i in range(5))
_VERSION = re.match(r"(\d+)\.(\d+)", triton.__version__)
_BACKWARDS = tl.constexpr(_VERSION is None or (int(_VERSION[1]), int(_VERSION[2])) >= (3, 7))


@triton.jit
def axis(N: tl.constexpr, AXIS: tl.constexpr):
    """0 to N - 1 along an axis of a tile."""
    i = tl.arange(0, N)
    AT: tl.constexpr = 4 - AXIS if _BACKWARDS else AXIS
    if AT == 0:
        return i[:, None, None, None, None]
    elif AT == 1:
        return i[None, :, None, None, None]
    elif AT == 2:
        return i[None, None, :, None, None]
    elif AT == 3:
        return i[None, None, None, :, None]
    else:
        return i[None, None, None, None, :]


@triton.jit
def chunk_axis():
    """The lane's chunk of a group; a reshape hides that it counts."""
    if _BACKWARDS:
        return tl.reshape(tl.arange(0, 4), [1, 1, 1, 1, 4])
    else:
        return tl.reshape(tl.arange(0, 4), [4, 1, 1, 1, 1])


@triton.jit
def in_tile(x, W: tl.constexpr, G: tl.constexpr):
    """x broadcast to all axes of a tile."""
    if _BACKWARDS:
        return tl.broadcast_to(x, [G, 2, W, 8, 4])
    else:
        return tl.broadcast_to(x, [4, 8, W, 2, G])


@triton.jit
def grid_rows(grid, index, W: tl.constexpr, G: tl.constexpr):
    """grid[index], through shared memory: lanes that load from 32 places of a table each wait for all the others."""
    found = tl.gather(grid, tl.reshape(index, [64 * W * G]), 0)
    if _BACKWARDS:
        return tl.reshape(found, [G, 2, W, 8, 4])
    else:
        return tl.reshape(found, [4, 8, W, 2, G])


@triton.jit
def matrix_of(eight, W: tl.constexpr, G: tl.constexpr):
    """A tile with the eight weights of each chunk in three more axes as the left side of a product."""
    if _BACKWARDS:
        return tl.reshape(tl.permute(eight, 2, 1, 3, 0, 5, 6, 4, 7), [16 * W, 32 * G])
    else:
        return tl.reshape(tl.permute(eight, 2, 3, 1, 4, 5, 6, 0, 7), [16 * W, 32 * G])


@triton.jit
def plain_weights(low, high, scale, least, MINIMUM: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """What `halves_of_bytes` computes, in float32, with the eight weights in three axes."""
    words = tl.expand_dims(tl.join(in_tile(low, W, G), in_tile(high, W, G)), -1)
    bytes = ((words >> (8 * tl.arange(0, 4))) & 255).to(tl.float32)
    scale = tl.expand_dims(tl.expand_dims(in_tile(scale, W, G), -1), -1)
    if MINIMUM:
        values = bytes * scale - tl.expand_dims(tl.expand_dims(in_tile(least, W, G), -1), -1)
    else:
        values = (bytes - 128.0) * scale
    if _BACKWARDS:
        return tl.reshape(values, [G, 2, W, 8, 4, 2, 2, 2])
    else:
        return tl.reshape(values, [4, 8, W, 2, G, 2, 2, 2])
