"""SwiGLU with the clamp: between the shared expert's products at prefill, and all experts' in exact steps.

`quantize.swiglu_quantise` is the one before a product with int8 activations, `experts_prefill` has it in its product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_kernel(gate_up, stride, clamp, out, out_stride, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + f, mask=f < F, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, clamp)
    value = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -clamp), clamp)
    tl.store(out + row * out_stride + f, value.to(out.dtype.element_ty), mask=f < F)


def swiglu(gate_up: Tensor, clamp: float, out: Tensor) -> None:
    """`ops.swiglu`.

    Args:
        gate_up: any float dtype [rows, 2 * hidden], channels contiguous: the gate's channels, then up's.
        out: any float dtype [rows, hidden], channels contiguous.
    """
    rows, width = gate_up.shape
    if out.shape != (rows, width // 2) or gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"expected [{rows}, {width // 2}] for {list(gate_up.shape)}, got {list(out.shape)}")
    block = min(1024, triton.next_power_of_2(width // 2))
    _swiglu_kernel[(rows, triton.cdiv(width // 2, block))](
        gate_up, gate_up.stride(0), clamp, out, out.stride(0), F=width // 2, BLOCK=block, num_warps=4
    )
