"""Write a model file that `open_model` loads again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, GGUFWriter

from ds4.errors import Ds4Error
from ds4.files import replacing
from ds4.gguf.file import collect_problems
from ds4.gguf.header import row_bytes
from ds4.gguf.keys import ARCHITECTURE, PROFILE_KEY, QAT_SIM_KEY, SPARSE_RATIO_KEY, Value, metadata_of
from ds4.gguf.shape import BLOCK_TYPES, CUSTOM, PROFILES, Shape, TensorSpec, expected_tensors

_F32 = GGMLQuantizationType.F32
_F16 = GGMLQuantizationType.F16
_BF16 = GGMLQuantizationType.BF16
_I32 = GGMLQuantizationType.I32

_RESERVED = (
    f"{ARCHITECTURE}.",
    PROFILE_KEY,
    SPARSE_RATIO_KEY,
    QAT_SIM_KEY,
    "general.architecture",
    "general.alignment",
)

_TYPE_OF = {torch.float32: _F32, torch.float16: _F16, torch.bfloat16: _BF16, torch.float64: _F32}
_DTYPE_OF = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}


def save(
    path: str | os.PathLike[str],
    shape: Shape,
    tensors: Mapping[str, torch.Tensor],
    *,
    tokenizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    qat_sim: bool = True,
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> None:
    """Write a model file; nothing is left behind, and an existing file stays as it was, unless all went well.

    Args:
        shape: a shape named `custom` gives a file of that profile: every number is in the file, and tensors may be
            unquantised. A shape named like a strict profile must be that profile, and the file must keep its types.
        tensors: GGUF name -> tensor in torch order ([out, in], experts [expert, out, in]), exactly the names of
            `expected_tensors(shape)`. Floats are stored as they are (float64 as F32) unless `types` says otherwise;
            hash tables are integers. Blocks made elsewhere are uint8 [..., bytes of a row], their type in `types`.
        tokenizer: the keys `tokenizer.ggml.*` of a file or `Tokenizer`; a custom file can do without.
        metadata: further keys, such as `general.name`, or all those of another file: what follows from the shape and
            the layout of the new file is left out.
        qat_sim: recorded in the file: whether the model wants the quantisation round trips of training.

    Raises:
        Ds4Error: a tensor is missing, unknown, or of the wrong size or type, a value cannot be stored, or the path
            cannot be written or is something else than a file. A link stays, and what it points to is replaced.
    """
    custom = _is_custom(shape)
    plan = _plan(shape, tensors, types or {})
    values = metadata_of(shape, custom=custom)
    values[QAT_SIM_KEY] = Value(qat_sim, GGUFValueType.BOOL)
    for extra in (metadata or {}, tokenizer or {}):
        for key, value in extra.items():
            if not key.startswith(_RESERVED) and key not in values:
                values[key] = _value(key, value)
    with replacing(path) as temporary:
        _write(temporary, values, plan, tensors)
        problems = collect_problems(temporary)
        if problems:
            raise Ds4Error(f"{path}: not written, the file could not be loaded again: {problems[0]}")


def _is_custom(shape: Shape) -> bool:
    if shape.name == CUSTOM:
        return True
    if shape not in PROFILES:
        raise Ds4Error(
            f"shape {shape.name!r} is not one of the strict profiles; name it {CUSTOM!r}: then the file has its numbers"
        )
    return False


# --------------------------------------------------------------------------------------------------------------------
# Types and sizes


def _plan(
    shape: Shape, tensors: Mapping[str, torch.Tensor], types: Mapping[str, GGMLQuantizationType]
) -> dict[str, tuple[GGMLQuantizationType, TensorSpec]]:
    """Name -> type to store and what the file must hold, for every tensor, checked before anything is written."""
    specs = expected_tensors(shape)
    for name in specs:
        if name not in tensors:
            raise Ds4Error(
                f"tensor {name!r} is missing, expected dims {specs[name].dims}; give all tensors of the shape"
            )
    for name in (*tensors, *types):
        if name not in specs:
            raise Ds4Error(f"tensor {name!r} is not one of this shape; leave it out, or give the shape that has it")
    return {name: (_stored_type(name, tensors[name], spec, types.get(name)), spec) for name, spec in specs.items()}


def _stored_type(
    name: str, tensor: torch.Tensor, spec: TensorSpec, wanted: GGMLQuantizationType | None
) -> GGMLQuantizationType:
    if _I32 in spec.types:
        integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
        if not integer or wanted not in (None, _I32):
            raise Ds4Error(f"tensor {name!r} is {tensor.dtype}, expected integers, which are stored as I32")
        type = _I32
    elif tensor.dtype == torch.uint8:
        if wanted not in BLOCK_TYPES:
            raise Ds4Error(f"tensor {name!r} is uint8; say in `types` which block type its bytes are")
        type = wanted
    else:
        type = wanted if wanted is not None else _TYPE_OF.get(tensor.dtype)
        if type not in _DTYPE_OF or tensor.dtype not in _TYPE_OF:
            raise Ds4Error(
                f"tensor {name!r} is {tensor.dtype}, to be stored as {type.name if type is not None else 'nothing'}; "
                "floats are stored as F32, F16 or BF16, block types are given as bytes"
            )
    if type not in spec.types:
        raise Ds4Error(f"tensor {name!r} is to be {type.name}, expected {' or '.join(t.name for t in spec.types)}")
    shape = spec.dims[::-1]
    if tensor.dtype == torch.uint8 and type in BLOCK_TYPES:
        shape = (*shape[:-1], row_bytes(type, shape[-1]))
    if tuple(tensor.shape) != shape:
        raise Ds4Error(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    return type


def _stored(name: str, tensor: torch.Tensor, type: GGMLQuantizationType) -> npt.NDArray[Any]:
    """The tensor's data as the numpy array to write; BF16, which numpy lacks, as bytes."""
    tensor = tensor.detach().cpu()
    if type in BLOCK_TYPES:
        return _numpy(tensor)
    if type == _I32:
        if tensor.numel() and (int(tensor.min()) < -(2**31) or int(tensor.max()) >= 2**31):
            raise Ds4Error(f"tensor {name!r} holds numbers beyond 32 bits")
        return _numpy(tensor.to(torch.int32))
    converted = tensor.to(_DTYPE_OF[type])
    if converted.dtype != tensor.dtype and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise Ds4Error(f"tensor {name!r} holds values beyond the range of {type.name}; store it as F32 or BF16")
    return _numpy(converted.contiguous().view(torch.uint8) if type == _BF16 else converted)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return np.asarray(tensor.contiguous().numpy())


def _value(key: str, value: Any) -> Value:
    """A metadata value in the type that its Python type asks for."""
    if isinstance(value, list | tuple):
        if not value:
            raise Ds4Error(f"key {key!r} is an empty list, which the format's writer cannot store; leave it out")
        items = [_value(key, item) for item in value]
        if any(item.type == GGUFValueType.ARRAY for item in items):
            raise Ds4Error(f"key {key!r} holds lists of lists; give a flat list")
        kinds = {item.type for item in items}
        if len(kinds) > 1 and not kinds <= {GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.INT64}:
            raise Ds4Error(f"key {key!r} mixes kinds of values; give a list of one kind")
        return Value([item.value for item in items], GGUFValueType.ARRAY, _widest(kinds))
    if isinstance(value, bool):
        return Value(value, GGUFValueType.BOOL)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        low = GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
        return Value(value, low if -(2**31) <= value < 2**32 else GGUFValueType.INT64)
    if isinstance(value, float):
        return Value(value, GGUFValueType.FLOAT64)
    if isinstance(value, str):
        return Value(value, GGUFValueType.STRING)
    raise Ds4Error(f"key {key!r} is a {type(value).__name__}, expected a number, a string, true or false, or a list")


def _widest(kinds: set[GGUFValueType]) -> GGUFValueType:
    # Mixed whole numbers (some negative, some large) only fit together in 64 bits.
    return next(iter(kinds)) if len(kinds) == 1 else GGUFValueType.INT64


# --------------------------------------------------------------------------------------------------------------------
# The file


def _write(
    path: Path,
    values: Mapping[str, Value],
    plan: Mapping[str, tuple[GGMLQuantizationType, TensorSpec]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Tensors are converted one at a time while they are written: no second copy of the model in memory."""
    with _header_written(path, values, {name: (type, spec.dims) for name, (type, spec) in plan.items()}) as writer:
        for name, (type, _) in plan.items():
            writer.write_tensor_data(_stored(name, tensors[name], type))


@contextlib.contextmanager
def _header_written(
    path: Path, values: Mapping[str, Value], tensors: Mapping[str, tuple[GGMLQuantizationType, tuple[int, ...]]]
) -> Iterator[GGUFWriter]:
    """A writer that has written all before the tensor data; the file is complete and closed at the end."""
    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        for key, value in values.items():
            writer.add_key_value(key, value.value, value.type, value.items)
        for name, (type, dims) in tensors.items():
            shape = dims[::-1]
            byte_shape = (*shape[:-1], row_bytes(type, shape[-1]))
            nbytes = int(np.prod(byte_shape, dtype=np.int64))
            writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), nbytes, raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer
        writer.flush()
    finally:
        writer.close()


def header_bytes(
    values: Mapping[str, Value], tensors: Mapping[str, tuple[GGMLQuantizationType, tuple[int, ...]]]
) -> bytes:
    """All of a file that lies before the data of its tensors, padded to where they begin.

    The data follow in the order of `tensors` (name -> type and dims, innermost first), each padded to a multiple of
    `gguf.GGUF_DEFAULT_ALIGNMENT` bytes. The writer needs a file for that, in the folder for temporary ones.

    Raises:
        OSError: that folder has no room, for example.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        try:
            with _header_written(path, values, tensors):
                pass
            header: bytes = path.read_bytes()
        except OSError as error:  # of a write, which names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
    return header + bytes(-len(header) % GGUF_DEFAULT_ALIGNMENT)
