"""Activation importance on disk: the legacy `.dat` format of llama.cpp, with packed vectors of routed experts.

All numbers are little-endian. The format as llama.cpp and the C engine write and read it:

    int32 entries
    each: int32 length, name; int32 calls; int32 values; float32 [values], which count divided by calls (if above 0)
    then, since 2024: int32 chunks; int32 length, name of the dataset

The entry of a routed tensor holds one vector per expert, one behind the other, under the tensor's GGUF name: the mean
square of each input channel over the rows that the expert was given, 1 everywhere for an expert that was given none.
The format has no place for how many experts an entry has and how many rows each was given, so `save` puts that behind
the dataset's name, where the readers named above do not look:

    8 bytes "DS4COUNT"; uint32 entries; each, in the order above: uint32 experts, uint64 [experts]
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.files import replacing

MAX_FILE = 8 << 30
"""Bytes of a file that is read at all; that of Pro has 1.6 GB."""
MAX_ENTRIES = 1 << 20
MAX_NAME = 4096

_MAGIC = b"DS4COUNT"
_AGAIN = "make the file again (ds4 --imatrix-out), or download it again"


@dataclass
class Imatrix:
    """Importance of the inputs of tensors.

    Attributes:
        vectors: GGUF name -> float32 [experts, cols], not negative; one row for a tensor that is not packed, or whose
            number of experts is not known.
        counts: GGUF name -> int64 [experts], rows that each expert was given; empty for what a file does not tell.
        chunks: pieces of text that were evaluated; 0 if not known.
        dataset: the name of the text; empty if not known.
    """

    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    chunks: int = 0
    dataset: str = ""

    def rows(self, name: str, experts: int, cols: int) -> NDArray[np.float32]:
        """The vectors of a tensor of `experts` matrices with `cols` inputs: float32 [experts, cols].

        Raises:
            FileFormatError: there is no such entry, or it has another size.
        """
        if name not in self.vectors:
            raise FileFormatError(f"the importance matrix has no entry {name!r}: it was made with another model")
        vector = self.vectors[name]
        if vector.size != experts * cols or (vector.shape[0] > 1 and vector.shape != (experts, cols)):
            raise FileFormatError(
                f"entry {name!r} of the importance matrix has shape {list(vector.shape)}, expected {experts} experts of"
                f" {cols} inputs: it was made with another model"
            )
        return vector.reshape(experts, cols)

    def measured(self) -> dict[str, NDArray[np.float32]]:
        """The vectors, with zeros instead of ones for experts of which it is known that they were given no rows."""
        empty = {name: counts == 0 for name, counts in self.counts.items()}
        return {
            name: np.where(empty[name][:, None], np.float32(0), vector)
            if name in empty and empty[name].any()
            else vector
            for name, vector in self.vectors.items()
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; an existing one stays as it was unless all went well.

        Raises:
            Ds4Error: the path cannot be written. FileFormatError: `load` would refuse what is to be written.
        """
        for name, vector in self.vectors.items():
            _check_entry(name, vector, self.counts.get(name))
        dataset = self.dataset.encode("utf-8", "replace")[:MAX_NAME]
        with replacing(path) as new, new.open("wb") as file:
            file.write(struct.pack("<i", len(self.vectors)))
            for name, vector in self.vectors.items():
                key = name.encode("utf-8")
                file.write(struct.pack("<i", len(key)) + key + struct.pack("<ii", 1, vector.size))
                file.write(np.ascontiguousarray(vector, dtype="<f4").data)
            file.write(struct.pack("<ii", self.chunks, len(dataset)) + dataset)
            _write_counts(file, self.vectors, self.counts)
            file.flush()
            os.fsync(file.fileno())


def load(path: str | os.PathLike[str], experts: int | None = None) -> Imatrix:
    """Read a file. Takes no more memory than the file is large.

    Args:
        experts: of the model, for files that do not tell: those of other programs. Entries `*_exps.weight` are then
            split into so many rows; otherwise they come as one.

    Raises:
        FileFormatError: the file cannot be read, ends too early, or holds what no such file does: the text says where.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileFormatError(f"{path}: this is not a file; give the name of an importance matrix (.dat)")
            if status.st_size > MAX_FILE:
                raise FileFormatError(f"{path}: {status.st_size} bytes are too many for an importance matrix")
            return _Reader(str(path), file, status.st_size).read(experts)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileFormatError(f"{str(path)!r}: cannot be read: this is not the name of a file") from error


def packed(name: str) -> bool:
    """True if the tensor of this name holds the matrices of all routed experts."""
    return name.endswith("_exps.weight")


def _check_entry(name: str, vector: NDArray[np.float32], counts: NDArray[np.int64] | None) -> None:
    where = f"entry {name!r} of the importance matrix"
    if not 0 < len(name.encode("utf-8")) <= MAX_NAME:
        raise FileFormatError(f"{where}: the name must have 1 to {MAX_NAME} bytes")
    if vector.ndim != 2 or not 0 < vector.size < 2**31:
        raise FileFormatError(f"{where} has shape {list(vector.shape)}; [experts, cols] is needed")
    if not bool(np.isfinite(vector).all()) or bool((vector < 0).any()):
        raise FileFormatError(f"{where} holds values that are no means of squares: negative, infinite or NaN")
    if counts is not None and (counts.shape != vector.shape[:1] or bool((counts < 0).any())):
        raise FileFormatError(f"{where} has counts {list(counts.shape)}; one for each of {vector.shape[0]} is needed")


def _write_counts(
    file: BinaryIO, vectors: Mapping[str, NDArray[np.float32]], counts: Mapping[str, NDArray[np.int64]]
) -> None:
    """Behind the dataset's name; nothing if there are none. Without counts of its own an entry has experts 0."""
    if not counts:
        return
    file.write(_MAGIC + struct.pack("<I", len(vectors)))
    for name in vectors:
        own = counts.get(name)
        file.write(struct.pack("<I", 0 if own is None else len(own)))
        if own is not None:
            file.write(own.astype("<u8").tobytes())


class _Reader:
    """Reads a file from its start; every length is compared with what is left of the file before it is believed."""

    def __init__(self, path: str, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.left = path, file, size

    def read(self, experts: int | None) -> Imatrix:
        result = Imatrix()
        count = self.int32("the number of entries")
        if count == int.from_bytes(b"GGUF", "little"):
            raise FileFormatError(
                f"{self.path}: this is a GGUF file; the legacy format is needed (ds4 --imatrix-out, or llama-imatrix "
                "with --output-format dat)"
            )
        if not 0 < count <= MAX_ENTRIES:
            raise self.wrong(f"it says that it has {count} entries")
        for number in range(count):
            self.entry(number, result)
        if self.left:
            result.chunks = max(0, self.int32("the number of chunks"))
            length = self.int32("the length of the dataset's name")
            if length < 0:
                raise self.wrong(f"the dataset's name has {length} bytes")
            result.dataset = self.take(length, "the dataset's name").decode("utf-8", "replace")
        if self.left:
            self.counts(result)
        elif experts is not None:
            self.split(result, experts)
        return result

    def entry(self, number: int, result: Imatrix) -> None:
        length = self.int32(f"the length of the name of entry {number}")
        if not 0 < length <= MAX_NAME:
            raise self.wrong(f"the name of entry {number} has {length} bytes")
        raw = self.take(length, f"the name of entry {number}")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"the name of entry {number} is no text") from None
        if name in result.vectors:
            raise self.wrong(f"it has the entry {name!r} twice")
        calls, size = self.int32(f"the calls of {name!r}"), self.int32(f"the size of {name!r}")
        if size < 1 or calls < 0:
            raise self.wrong(f"entry {name!r} has {size} values of {calls} calls")
        data = self.take(4 * size, f"the values of {name!r}")
        values = np.frombuffer(data, dtype="<f4").astype(np.float32)
        if calls > 1:
            values /= np.float32(calls)
        if not bool(np.isfinite(values).all()) or bool((values < 0).any()):
            raise self.wrong(f"entry {name!r} holds values that are no means of squares: negative, infinite or NaN")
        result.vectors[name] = values.reshape(1, -1)

    def counts(self, result: Imatrix) -> None:
        if self.take(len(_MAGIC), "what stands behind the dataset's name") != _MAGIC:
            raise self.wrong("behind the dataset's name stands what is not known")
        if (count := self.uint32("the number of counts")) != len(result.vectors):
            raise self.wrong(f"it has counts for {count} of {len(result.vectors)} entries")
        for name, vector in result.vectors.items():
            experts = self.uint32(f"the experts of {name!r}")
            if not experts:
                continue
            if vector.size % experts:
                raise self.wrong(f"entry {name!r} has {vector.size} values of {experts} experts")
            own = np.frombuffer(self.take(8 * experts, f"the counts of {name!r}"), dtype="<u8")
            if bool((own >= 2**63).any()):
                raise self.wrong(f"entry {name!r} has impossible counts")
            result.vectors[name] = vector.reshape(experts, -1)
            result.counts[name] = own.astype(np.int64)
        if self.left:
            raise self.wrong(f"{self.left} bytes stand behind its end")

    def split(self, result: Imatrix, experts: int) -> None:
        for name, vector in result.vectors.items():
            if not packed(name):
                continue
            if vector.size % experts:
                raise FileFormatError(
                    f"{self.path}: entry {name!r} has {vector.size} values, which are not vectors of {experts} experts:"
                    " it was made with another model"
                )
            result.vectors[name] = vector.reshape(experts, -1)

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise self.wrong(f"it ends inside {what}")
        data = self.file.read(size)
        if len(data) != size:
            raise self.wrong(f"it ends inside {what}")
        self.left -= size
        return data

    def int32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little", signed=True)

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def wrong(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: not a usable importance matrix: {what}; {_AGAIN}")
