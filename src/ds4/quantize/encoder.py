"""Rows of float32 to the bytes of a file's type: plain floats here, blocks by `ds4.quantize.codes`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from ds4.errors import Ds4Error

Bytes = npt.NDArray[np.uint8]

_DTYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}

WEIGHTED = (Type.Q4_K, Type.Q2_K, Type.IQ2_XXS)
"""Types whose codes importance changes."""

# The largest float16 scale times the largest code: for values with a minimum on the side that has less, for IQ2_XXS the
# smallest magnitude, since few points of its grid have a larger one everywhere.
_LARGEST = {Type.Q8_0: 127 * 65504, Type.Q4_K: 63 * 65504, Type.Q2_K: 15 * 65504, Type.IQ2_XXS: 8 * 15.5 / 4 * 65504}


def encode_rows(values: torch.Tensor, type: Type, importance: npt.NDArray[np.float32] | None, name: str) -> Bytes:
    """uint8 [rows, bytes of a row] of finite float32 values [rows, cols].

    Args:
        importance: float32 [cols], weights of the columns' errors, for the types that can use it.
        name: how messages name the tensor.

    Raises:
        Ds4Error: values beyond the range of the type.
    """
    if type in _DTYPES:
        converted = values.to(_DTYPES[type])
        if not bool(torch.isfinite(converted).all()):
            raise Ds4Error(
                f"tensor {name!r} has values beyond the range of {type.name}; use --override with F32 or BF16"
            )
        return _bytes(converted)
    if type == Type.MXFP4:
        # Only for sources that are not FP4 themselves, which is rare; numpy's speed will do.
        return np.asarray(quants.quantize(values.cpu().numpy(), type))
    limit = _LARGEST[type]
    if max(-float(values.min()), float(values.max())) > limit:
        raise Ds4Error(f"tensor {name!r} has values beyond {limit:.3g}, the range of {type.name}; use another type")
    from ds4.quantize.codes import encode

    return np.asarray(encode(values, type, importance, device=str(values.device), threads=1))


def check_type(type: Type, device: torch.device) -> None:
    """Raise `Ds4Error` if this machine lacks what encoding the type on the device needs; compiles what has to be."""
    if type != Type.I32:
        encode_rows(torch.zeros((1, 256), device=device), type, None, "none")


def _bytes(values: torch.Tensor) -> Bytes:
    return np.asarray(values.cpu().contiguous().view(torch.uint8).numpy())


def encode_table(values: torch.Tensor, limit: int, name: str) -> Bytes:
    """uint8 [rows, 4 * cols] of an integer table as I32; its numbers must be from 0 to limit - 1."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        raise Ds4Error(f"tensor {name!r} holds expert numbers from {low} to {high}, expected 0 to {limit - 1}")
    return _bytes(values.to(torch.int32))
