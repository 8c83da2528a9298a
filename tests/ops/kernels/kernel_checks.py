"""What tests of kernels share: random blocks of every format, poisoned outputs, relative errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

ON_GPU = torch.cuda.is_available()

# Where the float16 scales of a block are. Those of minimums are larger: weights are zero on average, as in a model.
_SCALES = {
    T.Q8_0: {0: 1.0},
    T.Q2_K: {80: 1.0, 82: 1.5},
    T.Q4_K: {0: 1.0, 2: 7.5},
    T.IQ2_XXS: {0: 1.0},
}


def random_raw(type: T, rows: int, k: int, seed: int, device: str = "cpu", size: float = 0.02) -> torch.Tensor:
    """uint8 [rows * bytes of a row]: random codes, scales of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    values, width = GGML_QUANT_SIZES[type]
    count = rows * k // values
    if type == T.F16:
        return (torch.randn(count, generator=generator) * size).half().view(torch.uint8).to(device)
    raw = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
    for start, factor in _SCALES.get(type, {}).items():
        scale = (size * factor * (0.5 + torch.rand(count, 1, generator=generator))).half()
        raw[:, start : start + 2] = scale.view(torch.uint8).view(count, 2)
    if type == T.MXFP4:
        raw[:, 0] = torch.randint(118, 124, (count,), dtype=torch.uint8, generator=generator)
    return raw.flatten().to(device)


def randn(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with what no kernel should leave: NaN, or bytes 0x7f."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    tensor.view(torch.uint8).fill_(0x7F)
    return tensor


class Measured(float):
    """An error that notes itself and its bar when a test compares them: a line of JSON in $DS4_KERNEL_ERRORS."""

    def __lt__(self, bar: float) -> bool:
        if path := os.environ.get("DS4_KERNEL_ERRORS"):
            test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
            line = json.dumps({"test": test, "error": float(self), "bar": float(bar), "gpu": ON_GPU})
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        return float(self) < bar


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; NaN anywhere gives NaN."""
    a, b = out.double().flatten(), reference.double().flatten()
    return Measured(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def run_twice(run: Callable[[], object], *outputs: torch.Tensor) -> None:
    """Runs with poisoned outputs; on a GPU twice, and the second run has to give the bits of the first.

    The interpreter runs programs one after the other and has no way to differ.
    """
    results = []
    for _ in range(2 if ON_GPU else 1):
        for tensor in outputs:
            poison(tensor)
        run()
        results.append([bits(tensor) for tensor in outputs])
    for first, second in zip(*results[:1], *results[-1:], strict=True):
        assert np.array_equal(first, second), "two runs differ"


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
