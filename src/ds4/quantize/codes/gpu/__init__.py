"""The quantisers as Triton kernels, one program (a warp) for each block of 256; import only where triton is installed.

The search is that of `cpu`, step by step. Sums are added in another order, so codes may differ where two are nearly
equally good.
"""

from __future__ import annotations

from functools import cache

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ds4.quantize.codes import search
from ds4.quantize.codes.gpu.iq2_xxs import iq2_xxs_kernel
from ds4.quantize.codes.gpu.k_quants import k_quant_kernel

_K_QUANTS = {GGMLQuantizationType.Q2_K: (16, 3, 15), GGMLQuantizationType.Q4_K: (32, 15, 63)}
"""Values of a sub-block, largest code of a value and of a scale."""


def encode(values: Tensor, kind: GGMLQuantizationType, importance: Tensor) -> Tensor:
    """uint8 [rows, bytes of a row] on the device of `values`.

    Args:
        values: float32, bfloat16 or float16 [rows, cols], finite, cols a multiple of 256.
        kind: Q2_K, Q4_K or IQ2_XXS.
        importance: float32 [cols], > 0, on the same device.
    """
    values = values.contiguous()
    rows, cols = values.shape
    block, size = GGML_QUANT_SIZES[kind]
    blocks = cols // block
    out = torch.empty(rows, blocks * size, dtype=torch.uint8, device=values.device)
    halves = out.view(torch.int16)
    grid = (rows * blocks,)
    with torch.cuda.device_of(values):  # kernels are launched on the current device of the thread
        if kind == GGMLQuantizationType.IQ2_XXS:
            points, scales = _iq2_tables(values.device)
            iq2_xxs_kernel[grid](
                values, importance, points, scales, out, halves, blocks,
                SCALES=len(scales), ROUNDS=search.ROUNDS_IQ2, num_warps=1,
            )  # fmt: skip
        else:
            n, top, limit = _K_QUANTS[kind]
            k_quant_kernel[grid](
                values, importance, _trials(values.device), out, halves, blocks,
                N=n, TOP=top, LIMIT=limit, TRIALS=len(search.TRIALS), ROUNDS=search.ROUNDS_K,
                num_warps=1,
            )  # fmt: skip
    return out


@cache
def _iq2_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(search.grid()).to(device), torch.from_numpy(search.SCALES).to(device)


@cache
def _trials(device: torch.device) -> Tensor:
    return torch.from_numpy(search.TRIALS).to(device)
