"""Instructions that Triton has no name for, each with a plain twin.

`ASM` chooses: the instruction on a GPU, plain arithmetic of the same result in the interpreter, which runs no inline
assembly. Launchers take it from `use_asm`.

The byte tables that `prmt` looks up come as values, loaded from memory by the kernel: the compiler would build
constants anew for every lookup, one more instruction each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def use_asm(tensor: Tensor) -> bool:
    """True where kernels on this tensor's device may use inline assembly."""
    return tensor.is_cuda and not triton.knobs.runtime.interpret


_overlapping = ContextVar("overlapping", default=False)


@contextlib.contextmanager
def overlapping(on: bool) -> Iterator[None]:
    """Kernels launched here may start while the one before still runs (programmatic dependent launch).

    Only for launches that all come through `overlap`, on one stream: each waits for all before it in `behind`.
    """
    token = _overlapping.set(on and not triton.knobs.runtime.interpret)
    try:
        yield
    finally:
        _overlapping.reset(token)


def overlap(early: bool = False) -> dict[str, Any]:
    """Arguments of a launch. early: so few programs that those of the next kernel find room beside them."""
    return {"PDL": 2 if early else 1, "launch_pdl": True} if _overlapping.get() else {}


@triton.jit
def behind(PDL: tl.constexpr):
    """What a kernel that is launched with `overlap` does first: wait for the results of those before it."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def dp4a(a, b, c, ASM: tl.constexpr):
    """c + sum of the four products of signed bytes of a and b; int32 [lanes]."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        shift = (24 - 8 * tl.arange(0, 4))[None, :]
        return c + tl.sum(((a[:, None] << shift) >> 24) * ((b[:, None] << shift) >> 24), axis=1)


@triton.jit
def lookup_bytes(low, high, selector, ASM: tl.constexpr):
    """Four bytes of the eight in `low` and `high`, named by the low four nibbles, each below 8, of selector [lanes]."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        i = tl.arange(0, 4)
        code = (tl.expand_dims(selector, -1) >> (4 * i)) & 7
        # `low` and `high` are single words or one a lane.
        low, high = selector * 0 + low, selector * 0 + high
        source = tl.where(code < 4, tl.expand_dims(low, -1), tl.expand_dims(high, -1))
        return tl.sum(((source >> (8 * (code & 3))) & 255) << (8 * i), axis=-1)


@triton.jit
def low_half(word):
    """The fp16 in the low half of a word, as float32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """The fp16 in the high half of a word, as float32."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded_product(a, b, ASM: tl.constexpr):
    """a * b, rounded by itself: a sum of two such products has one value.

    Of a plain one the compiler makes a fused multiply-add with either of the two, not the same in all of a tile.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1 / x of float32, within one unit in the last place: a single instruction. Denormals count as zero."""
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def asked_for(ASM: tl.constexpr):
    """True, but known to the compiler only behind a barrier, and so behind all loads before it in the source.

    What hangs on it waits for none of them, yet comes after them: left alone, the compiler moves loads down behind
    sums of what others bring, and their latencies add up. All threads of a program have to come here.
    """
    if ASM:
        true = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; bar.red.or.pred p, 0, p; selp.b32 $0, 1, 0, p; }",
            "=r,r", [1], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        return true != 0
    else:
        return True


@triton.jit
def prefetch(pointers, ASM: tl.constexpr):
    """Asks for the lines of memory at these pointers and waits for nothing: a later kernel finds them in the L2."""
    if ASM:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
