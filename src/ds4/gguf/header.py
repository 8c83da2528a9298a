"""The header of a GGUF v3 file: metadata and tensor directory, read strictly.

The format's numbers (types, block sizes, magic) come from the `gguf` package, its `GGUFReader` is not used: on a file
with the V4 vocabulary (129,280 tokens) it takes 4.7 s and 450 MB, since it keeps four arrays per string, and an array
that claims 2^40 elements makes it fill the memory. Here a length is believed only after it was compared with the rest
of the file, so memory is bounded by `MAX_HEADER` and `MAX_ELEMENTS` whatever the file says.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGMLQuantizationType, GGUFValueType

from ds4.errors import FileFormatError

MAX_HEADER = 64 << 20
"""Bytes. Ten times the header of a real file (6 MB, nearly all of it vocabulary)."""
MAX_ELEMENTS = 2_000_000
"""Array elements in the whole metadata; a real file has about 0.5 million."""
MAX_ENTRIES = 65_536
"""Keys, and tensors; the largest real file has 1,894 tensors."""

_MAX_NAME = 1024
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_ALIGNMENT = 1 << 20
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("<u1"),
}


def row_bytes(type: GGMLQuantizationType, n: int) -> int:
    """Bytes of a row of `n` values.

    Raises:
        ValueError: `n` is not a multiple of the type's block.
    """
    block, size = GGML_QUANT_SIZES[type]
    if n % block:
        raise ValueError(f"{n} values are not a multiple of {block}, the block of {type.name}")
    return int(n // block * size)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file.

    Attributes:
        dims: GGUF order, the contiguous one first.
        offset: of the first byte, from the start of the file.
        nbytes: size of the data.
    """

    name: str
    type: GGMLQuantizationType
    dims: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims in torch order, the contiguous one last."""
        return self.dims[::-1]

    @property
    def n_values(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class Header:
    """Metadata (plain Python values) and tensor directory of a file of `size` bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    size: int


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The whole file as a read-only uint8 array [bytes], mapped, not read.

    Raises:
        FileFormatError: no such file, not a regular file, empty, or not readable.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise FileFormatError(f"{path}: not a regular file; give the path of a GGUF file")
            if info.st_size == 0:
                raise FileFormatError(f"{path}: the file is empty, expected a GGUF file; download it again")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(f"{path}: cannot be opened: {reason}; check the path and your permissions") from error


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would block here until somebody writes into it.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_header(path: str | os.PathLike[str], data: npt.NDArray[np.uint8]) -> Header:
    """Metadata and tensor directory of the mapped file `data`; `path` is for messages.

    Raises:
        FileFormatError: not GGUF, another version or byte order, truncated, a claim that cannot be true, a duplicate
            name, or tensors that lie outside the file, off the alignment, or partly over each other.
    """
    reader = _Reader(os.fspath(path), data)
    tensor_count, key_count = reader.preamble()
    metadata = reader.read_metadata(key_count)
    return Header(metadata, reader.read_tensors(tensor_count, metadata), len(data))


class _Reader:
    """A position in the header; every read is checked against the end of the file first."""

    def __init__(self, path: str, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.size = len(data)
        self.data = memoryview(data.data)[: min(self.size, MAX_HEADER)]
        self.at = 0
        self.elements = 0

    def fail(self, text: str) -> NoReturn:
        raise FileFormatError(f"{self.path}: {text}")

    def need(self, count: int, what: str) -> int:
        """Position of the next `count` bytes, which are then passed."""
        start = self.at
        if count > len(self.data) - start:
            if start + count > self.size:
                self.fail(
                    f"the file ends inside {what} (needs {count} bytes at {start}, the file has {self.size}): "
                    "it is truncated or damaged; download it again"
                )
            self.fail(
                f"{what} reaches beyond the first {MAX_HEADER >> 20} MiB, no header is that long; the file is damaged"
            )
        self.at = start + count
        return start

    def number(self, format: str, what: str) -> int:
        start = self.need(struct.calcsize(format), what)
        return int(struct.unpack_from(format, self.data, start)[0])

    def preamble(self) -> tuple[int, int]:
        """Tensor and key counts, after magic and version were found right."""
        if bytes(self.data[:4]) not in (b"GGUF", b"FUGG"):
            found = bytes(self.data[:4])
            self.fail(f"not a GGUF file (starts with {found!r}, expected b'GGUF'); give the path of a .gguf file")
        self.at = 4
        version = self.number("<I", "the version")
        if bytes(self.data[:4]) == b"FUGG" or (version & 0xFFFF == 0 and version):
            self.fail("the file is big endian, expected little endian; get the little-endian file")
        if version != GGUF_VERSION:
            self.fail(f"GGUF version is {version}, expected {GGUF_VERSION}; convert the file again with current tools")
        counts = self.number("<Q", "the tensor count"), self.number("<Q", "the key count")
        for count, what, least in zip(counts, ("tensors", "keys"), (_MIN_TENSOR_BYTES, _MIN_KEY_BYTES), strict=True):
            if count > MAX_ENTRIES:
                self.fail(
                    f"the header claims {count} {what}, more than the {MAX_ENTRIES} that this program allows;"
                    " the file is damaged, download it again"
                )
            if count * least > self.size:
                self.fail(
                    f"the header claims {count} {what}, more than {self.size} bytes hold;"
                    " the file is truncated or damaged, download it again"
                )
        return counts

    def text(self, what: str, errors: str = "strict", limit: int = MAX_HEADER) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            self.fail(f"{what} claims {length} bytes, at most {limit} are possible; the file is damaged")
        start = self.need(length, what)
        try:
            return str(self.data[start : self.at], "utf-8", errors)
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8; the file is damaged, download it again")

    # -- metadata --------------------------------------------------------------------------------------------------

    def read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self.text(f"the name of key {index}", limit=_MAX_NAME)
            if key in metadata:
                self.fail(f"key {key!r} occurs twice; the file is damaged or was edited badly")
            metadata[key] = self.value(key, self.value_type(key), 0)
        return metadata

    def value_type(self, key: str) -> GGUFValueType:
        number = self.number("<I", f"the type of key {key!r}")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"key {key!r} has type number {number}, expected 0 to 12; the file is damaged")

    def value(self, key: str, type: GGUFValueType, depth: int) -> Any:
        if type == GGUFValueType.STRING:
            return self.text(f"the value of key {key!r}", _on_bad_utf8(key))
        if type == GGUFValueType.ARRAY:
            return self.array(key, depth)
        return self.scalars(key, type, 1)[0]

    def scalars(self, key: str, type: GGUFValueType, count: int) -> list[Any]:
        dtype = _SCALARS[type]
        start = self.need(count * dtype.itemsize, f"the value of key {key!r}")
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        if type != GGUFValueType.BOOL:
            return values
        if any(v > 1 for v in values):
            self.fail(f"key {key!r} is a truth value, expected byte 0 or 1, found {max(values)}; the file is damaged")
        return [v == 1 for v in values]

    def array(self, key: str, depth: int) -> list[Any]:
        if depth >= _MAX_NESTING:
            self.fail(f"key {key!r} nests arrays more than {_MAX_NESTING} deep; the file is damaged")
        type = self.value_type(key)
        count = self.number("<Q", f"the length of key {key!r}")
        self.elements += min(count, MAX_ELEMENTS + 1)
        if self.elements > MAX_ELEMENTS:
            self.fail(
                f"key {key!r} claims {count} array elements, more than the {MAX_ELEMENTS} that a header may have; "
                "the file is damaged, download it again"
            )
        if type == GGUFValueType.STRING:
            return self.strings(key, count)
        if type == GGUFValueType.ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.scalars(key, type, count)

    def strings(self, key: str, count: int) -> list[str]:
        # The vocabulary: a quarter of a million strings, so the checks of `need` and `text` are written out.
        data, at, end, errors = self.data, self.at, len(self.data), _on_bad_utf8(key)
        length_at = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for index in range(count):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= end else end + 1
            if at > end:
                self.need(end + 1 - self.at, f"element {index} of key {key!r}")
            try:
                values.append(str(data[start:at], "utf-8", errors))
            except UnicodeDecodeError:
                self.fail(f"element {index} of key {key!r} is not valid UTF-8; the file is damaged, download it again")
        self.at = at
        return values

    # -- tensors ---------------------------------------------------------------------------------------------------

    def read_tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = self.alignment(metadata)
        entries: dict[str, TensorInfo] = {}
        for index in range(count):
            info = self.tensor(index, alignment)
            if info.name in entries:
                self.fail(f"tensor {info.name!r} occurs twice; the file is damaged or was edited badly")
            entries[info.name] = info
        base = -(-self.at // alignment) * alignment
        tensors = {
            info.name: TensorInfo(info.name, info.type, info.dims, base + info.offset, info.nbytes)
            for info in entries.values()
        }
        self.check_places(tensors)
        return tensors

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        usable = isinstance(value, int) and not isinstance(value, bool) and 8 <= value <= _MAX_ALIGNMENT
        if not usable or value & (value - 1):
            self.fail(
                f"key 'general.alignment' is {shown(value)}, expected a power of two from 8 to {_MAX_ALIGNMENT}; "
                "the file is damaged"
            )
        return int(value)

    def tensor(self, index: int, alignment: int) -> TensorInfo:
        """The next entry; its offset still counts from the start of the data section."""
        name = self.text(f"the name of tensor {index}", limit=_MAX_NAME)
        n_dims = self.number("<I", f"the number of dims of tensor {name!r}")
        if not 1 <= n_dims <= _MAX_DIMS:
            self.fail(f"tensor {name!r} has {n_dims} dims, expected 1 to {_MAX_DIMS}; the file is damaged")
        dims = tuple(self.number("<Q", f"the dims of tensor {name!r}") for _ in range(n_dims))
        if 0 in dims:
            self.fail(f"tensor {name!r} has dims {dims}, expected none of them to be 0; the file is damaged")
        number = self.number("<I", f"the type of tensor {name!r}")
        try:
            type = GGMLQuantizationType(number)
        except ValueError:
            self.fail(
                f"tensor {name!r} has type number {number}, which this program does not know; "
                "the file is damaged or newer than the program"
            )
        try:
            nbytes = row_bytes(type, dims[0]) * math.prod(dims[1:])
        except ValueError as error:
            self.fail(f"tensor {name!r} has a bad row length: {error}; quantise it to another type")
        offset = self.number("<Q", f"the offset of tensor {name!r}")
        if offset % alignment:
            self.fail(f"tensor {name!r} has offset {offset}, expected a multiple of {alignment}; the file is damaged")
        return TensorInfo(name, type, dims, offset, nbytes)

    def check_places(self, tensors: dict[str, TensorInfo]) -> None:
        """Every tensor inside the file; two of them share either all of their bytes or none."""
        last: TensorInfo | None = None
        for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            end = info.offset + info.nbytes
            if end > self.size:
                self.fail(
                    f"tensor {info.name!r} ends at byte {end}, but the file has {self.size} bytes: "
                    "it is truncated or damaged; download it again"
                )
            if last is not None and info.offset < last.offset + last.nbytes:
                # Tensors may refer to the same data on purpose (layers that share their experts).
                if (info.offset, info.nbytes) != (last.offset, last.nbytes):
                    self.fail(
                        f"tensors {last.name!r} and {info.name!r} overlap at byte {info.offset}; the file is damaged"
                    )
            else:
                last = info


def _on_bad_utf8(key: str) -> str:
    # Only the vocabulary must be exact; a broken description is no reason to refuse a model.
    return "strict" if key.startswith("tokenizer.") else "replace"


def shown(value: Any) -> str:
    """A value from a file as messages quote it, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
