"""Codes of quantised types: rows of weights to the blocks of a GGUF file, guided by the importance of their columns.

The codes of a block minimise sum w (x - x')^2 over its values x and what they decode to, x'. The weights are

    w = importance * sqrt(mean x^2 of the block + x^2)

where importance is that of the column: sum of the squares of the inputs that meet it, and 1 without one. The search is
described where it is done (`cpu.k_quants`, `cpu.iq2_xxs`); `gpu` does the same in Triton kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ds4.errors import Ds4Error
from ds4.gguf.blocks import as_tensor
from ds4.quantize.codes import q8_0, search

__all__ = ["decode", "encode", "importance_from_weights", "supports"]

_Q8_0 = GGMLQuantizationType.Q8_0
_Q2_K = GGMLQuantizationType.Q2_K
_Q4_K = GGMLQuantizationType.Q4_K
_IQ2_XXS = GGMLQuantizationType.IQ2_XXS
_KINDS = (_Q8_0, _Q2_K, _Q4_K, _IQ2_XXS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TORCH = {np.float32: torch.float32, np.float16: torch.float16}

# Values that are converted to float32 and checked at a time: they and their temporaries stay in the cache of a core;
# on a GPU they fill it.
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 25

# Of the mean importance of a tensor's columns: no column is worth nothing, so that its codes are not arbitrary.
_LEAST_IMPORTANCE = 1e-6

Values = torch.Tensor | npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def supports(kind: GGMLQuantizationType) -> bool:
    """Whether `encode` makes blocks of this type."""
    return kind in _KINDS


def encode(
    values: Values,
    kind: GGMLQuantizationType,
    importance: Values | None = None,
    *,
    device: str | torch.device = "cpu",
    threads: int = 1,
) -> Codes:
    """uint8 [rows, bytes of a row]: the blocks of `values`.

    The same values, importance and device give the same bytes, whatever the number of threads. On the CPU they do not
    depend on the machine either; a GPU may decide near ties otherwise. What no float16 scale reaches is clipped.

    Args:
        values: float32, bfloat16 or float16 [rows, cols], cols a multiple of the type's block (32 for Q8_0, else 256);
            finite.
        kind: Q8_0, Q2_K, Q4_K or IQ2_XXS.
        importance: [cols], finite, >= 0: sums of squares of the inputs of each column, in any unit. All zero counts as
            none. Q8_0 does not use it.
        device: where the work is done: cpu, or a CUDA device (needs triton).
        threads: of the CPU.

    Raises:
        Ds4Error: wrong shape, dtype or type; NaN or infinity among the values; importance negative or not finite; no
            such device; numba (CPU) or triton (GPU) not installed.
    """
    if kind not in _KINDS:
        raise Ds4Error(f"No quantiser for {kind.name}; there is one for {', '.join(k.name for k in _KINDS)}")
    tensor = _tensor(values, kind)
    rows, cols = tensor.shape
    weight = _importance(importance, cols)
    if threads < 1:
        raise Ds4Error(f"threads is {threads}, must be at least 1")
    target = _device(device)
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty((rows, cols // block * size), np.uint8)
    if out.size == 0:
        return out
    run = _on_cpu(kind, weight) if target.type == "cpu" else _on_gpu(kind, weight, target)
    step = max(1, (_CHUNK_CPU if target.type == "cpu" else _CHUNK_GPU) // cols)

    def work(start: int) -> None:
        part = tensor[start : start + step].to(target)
        if target.type == "cpu":
            part = part.float()
        _check_finite(part, start)
        out[start : start + step] = run(part)

    if threads == 1 or target.type != "cpu":
        for start in range(0, rows, step):
            work(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, range(0, rows, step)):
                pass
    return out


def decode(codes: Codes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """float32 [rows, cols] of uint8 [rows, bytes of a row], by the `gguf` package."""
    result: npt.NDArray[np.float32] = quants.dequantize(codes, kind)
    return result


def importance_from_weights(values: Values) -> npt.NDArray[np.float32]:
    """float32 [cols], the mean square of each column of [rows, cols]: importance where no activations were measured.

    Columns with large weights are read by inputs that matter, if training spread its effort well; a guess.
    """
    tensor = _tensor(values, None)
    total = torch.zeros(tensor.shape[1], dtype=torch.float64)
    step = max(1, _CHUNK_CPU // max(tensor.shape[1], 1))
    for start in range(0, len(tensor), step):
        part = tensor[start : start + step].cpu()
        _check_finite(part, start)
        total += part.double().square().sum(0)
    result: npt.NDArray[np.float32] = (total / max(len(tensor), 1)).float().numpy()
    return result


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise Ds4Error(f"{device!r} is no device; use cpu or cuda") from error
    if target.type not in ("cpu", "cuda"):
        raise Ds4Error(f"Cannot quantise on {target}; use cpu or cuda")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise Ds4Error("Cannot quantise on cuda: PyTorch finds no CUDA device; use cpu")
    return target


def _tensor(values: Values, kind: GGMLQuantizationType | None) -> torch.Tensor:
    """The values as a matrix of a known dtype, no copy."""
    if isinstance(values, np.ndarray):
        if values.dtype.type not in _TORCH:
            raise Ds4Error(f"Values have the dtype {values.dtype}; expected float32, bfloat16 or float16")
        if values.flags.writeable:
            tensor = torch.from_numpy(values)
        else:  # torch knows no memory that must not be written
            data = np.ascontiguousarray(values)
            tensor = as_tensor(data.reshape(-1).view(np.uint8)).view(_TORCH[data.dtype.type]).view(data.shape)
    else:
        tensor = values.detach()
    if tensor.dtype not in _DTYPES:
        raise Ds4Error(f"Values have the dtype {tensor.dtype}; expected float32, bfloat16 or float16")
    if tensor.dim() != 2:
        raise Ds4Error(f"Values have the shape {list(tensor.shape)}; expected [rows, cols]")
    block = GGML_QUANT_SIZES[kind][0] if kind is not None else 1
    if kind is not None and tensor.shape[1] % block:
        raise Ds4Error(f"Rows of {tensor.shape[1]} values cannot be stored as {kind.name}, whose blocks hold {block}")
    return tensor


def _importance(importance: Values | None, cols: int) -> npt.NDArray[np.float32]:
    """float32 [cols] with a mean of 1, none of them zero."""
    if importance is None:
        return np.ones(cols, np.float32)
    given = np.asarray(importance.cpu() if isinstance(importance, torch.Tensor) else importance, np.float64)
    if given.shape != (cols,):
        raise Ds4Error(f"Importance has the shape {list(given.shape)}; expected [{cols}], one for each column")
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(wrong):
        raise Ds4Error(f"Importance of column {wrong[0]} is {given[wrong[0]]}; it must be finite and not negative")
    mean = given.mean() if cols else 0.0
    if mean == 0:
        return np.ones(cols, np.float32)
    return np.maximum(given / mean, _LEAST_IMPORTANCE).astype(np.float32)


def _check_finite(part: torch.Tensor, start: int) -> None:
    """`part` holds the rows from `start` on."""
    if part.numel() and not torch.isfinite(part.abs().amax()):
        finite = torch.isfinite(part)
        row, col = (int(i) for i in (~finite).nonzero()[0])
        raise Ds4Error(f"Value [{start + row}, {col}] is {float(part[row, col])}; only finite values can be quantised")


def _on_cpu(kind: GGMLQuantizationType, importance: npt.NDArray[np.float32]) -> Callable[[torch.Tensor], Codes]:
    """A function from rows on the CPU to their blocks."""
    if kind == _Q8_0:
        return lambda part: q8_0.encode(part).numpy()
    block, size = GGML_QUANT_SIZES[kind]
    loops = _loops()

    def run(part: torch.Tensor) -> Codes:
        rows = part.contiguous().numpy()
        out = np.empty((len(rows), rows.shape[1] // block * size), np.uint8)
        if kind == _IQ2_XXS:
            loops.iq2_xxs.encode_rows(rows, importance, search.grid(), search.SCALES, search.ROUNDS_IQ2, out)
        elif kind == _Q2_K:
            loops.k_quants.encode_rows_q2(rows, importance, search.TRIALS, search.ROUNDS_K, out)
        else:
            loops.k_quants.encode_rows_q4(rows, importance, search.TRIALS, search.ROUNDS_K, out)
        return out

    return run


def _on_gpu(
    kind: GGMLQuantizationType, importance: npt.NDArray[np.float32], device: torch.device
) -> Callable[[torch.Tensor], Codes]:
    """A function from rows on the device to their blocks."""
    if kind == _Q8_0:
        return lambda part: q8_0.encode(part.float()).cpu().numpy()
    weight = torch.from_numpy(importance).to(device)
    gpu = _gpu()
    return lambda part: gpu.encode(part, kind, weight).cpu().numpy()


@cache
def _loops() -> ModuleType:
    try:
        for name in ("iq2_xxs", "k_quants"):
            importlib.import_module(f"ds4.quantize.codes.cpu.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise Ds4Error("Quantising on the CPU needs numba: pip install 'ds4[quantize]'") from error
    return importlib.import_module("ds4.quantize.codes.cpu")


@cache
def _gpu() -> ModuleType:
    try:
        return importlib.import_module("ds4.quantize.codes.gpu")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise Ds4Error("Quantising on a GPU needs triton, which comes with PyTorch for CUDA on Linux") from error
