"""How far the quantisers search; the same for the CPU and the GPU. Chosen by `tools/quantize_bench.py`."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import quants

_STARTS = (0.0, 0.5, 1.0)
_EXTRA = (-0.9, -0.45, 0.0, 0.45, 0.9)

TRIALS: npt.NDArray[np.float32] = np.array(
    [(start + extra, start) for start in _STARTS for extra in _EXTRA], np.float32
)
"""Q2_K and Q4_K, [trials, 2]: into how many steps the width of a sub-block is divided, less the largest code, and how
many of them lie below code 0, where values are clipped. As many more are clipped at the top."""

ROUNDS_K = 4
"""Q2_K and Q4_K: improvements of a block's scales and codes in turn, at most."""

SCALES: npt.NDArray[np.float32] = (np.array([43 / 8, 3, 1.8, *np.geomspace(1.15, 0.2, 12)]) / 43).astype(np.float32)
"""IQ2_XXS: scales to try for 32 values, in units of the largest of them; 43 and 8 are the largest and the smallest
magnitude of the grid, and the first three are for values of nearly the same magnitude."""

ROUNDS_IQ2 = 3
"""IQ2_XXS: improvements of a block's scale and levels in turn, at most."""


@cache
def grid() -> npt.NDArray[np.float32]:
    """The points of the IQ2_XXS grid, float32 [8, 256]: magnitudes 8, 25 and 43."""
    quants.IQ2_XXS.init_grid()
    points = np.asarray(quants.IQ2_XXS.grid, np.float32).reshape(256, 8)
    return np.ascontiguousarray(points.T)
