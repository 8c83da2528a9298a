"""The C quantisers of ggml by way of PyPI's pywhispercpp, which carries the library: what ours are compared with."""

from __future__ import annotations

import ctypes
import importlib.metadata
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


@cache
def _library() -> ctypes.CDLL:
    """libggml-base of the installed package.

    Raises:
        ImportError: pywhispercpp is not installed, or not built as expected.
    """
    try:
        distribution = importlib.metadata.distribution("pywhispercpp")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("the C quantisers need pywhispercpp (pip install 'ds4[test]')") from error
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
    bundled = [file for file in files if file.parent.name.endswith(".libs")]
    openmp = [file for file in bundled if file.name.startswith("libgomp")]
    base = [file for file in bundled if file.name.startswith("libggml-base")]
    if not base:
        raise ImportError("pywhispercpp is installed, but carries no libggml-base")
    for file in openmp:  # the loader does not find it by itself
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(base[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3
    library.ggml_quantize_chunk.argtypes += [ctypes.c_void_p]
    return library


def encode(
    values: npt.NDArray[np.float32], kind: GGMLQuantizationType, importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint8]:
    """uint8 [rows, bytes of a row] from float32 [rows, cols]; importance [cols], needed for IQ2_XXS."""
    values = np.ascontiguousarray(values, np.float32)
    rows, cols = values.shape
    block, size = GGML_QUANT_SIZES[kind]
    out = np.zeros((rows, cols // block * size), np.uint8)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
    elif kind == GGMLQuantizationType.IQ2_XXS:
        importance = np.ones(cols, np.float32)
    pointer = importance.ctypes.data if importance is not None else None
    written = _library().ggml_quantize_chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, cols, pointer)
    if written != out.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind.name}, expected {out.nbytes}")
    return out
