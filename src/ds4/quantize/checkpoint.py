"""A checkpoint folder as Hugging Face lays it out: config.json, shards of safetensors, an index of them.

Opening reads the shards' headers only. Data are read slice by slice into memory of their own: a shard may be larger
than that of the machine, and a disk that fails gives an error, where a mapping would end the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ds4.errors import Ds4Error
from ds4.quantize.decode import DTYPES

INDEX = "model.safetensors.index.json"
_MAX_JSON = 256 << 20
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint.

    Attributes:
        file: the shard that it lies in, `offset` bytes behind the start.
        dtype: safetensors' name of its type.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"{self.file}: tensor {self.name!r}"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: its configuration, and every tensor by name, data not read yet."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def shards(self) -> list[Path]:
        """Every file that holds a tensor, sorted."""
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def files(self) -> list[Path]:
        """Every file that is read."""
        return [*self.shards, *(self.folder / name for name in ("config.json", "tokenizer.json", INDEX))]


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        Ds4Error: no such folder, no config.json, no weights, a missing or damaged shard, or a tensor that the index
            promises and no shard has.
    """
    path = Path(folder)
    if not path.is_dir():
        raise Ds4Error(f"{path}: not a folder; give the folder of a checkpoint, with config.json and *.safetensors")
    config = read_json(path / "config.json")
    index = path / INDEX
    if index.exists():
        return Checkpoint(path, config, _indexed(path, index))
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise Ds4Error(f"{path}: no *.safetensors files; give the folder that holds the weights")
    tensors: dict[str, Stored] = {}
    for shard in shards:
        for name, stored in _header(shard).items():
            if name in tensors:
                raise Ds4Error(
                    f"{path}: tensor {name!r} is in {tensors[name].file.name} and in {shard.name}; take away the file "
                    f"that does not belong there, or give the folder a {INDEX}"
                )
            tensors[name] = stored
    return Checkpoint(path, config, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        Ds4Error: it cannot be read or is no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise Ds4Error(f"{path}: larger than {_MAX_JSON >> 20} MiB, this is not the file of a checkpoint")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Ds4Error(f"{path}: cannot be read: {error.strerror}; the checkpoint needs this file") from error
    except (ValueError, RecursionError) as error:
        raise Ds4Error(f"{path}: not valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise Ds4Error(f"{path}: expected a JSON object; {_AGAIN}")
    return value


def _indexed(folder: Path, index: Path) -> dict[str, Stored]:
    """Name -> tensor for every name of the index."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise Ds4Error(f"{index}: no 'weight_map' from names to files; {_AGAIN}")
    shards: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise Ds4Error(f"{index}: names the file {file!r}, expected one of this folder; {_AGAIN}")
        if not (folder / file).is_file():
            count = sum(1 for place in places.values() if place == file)
            raise Ds4Error(f"{folder / file}: missing, {INDEX} says it holds {count} tensors; {_AGAIN}")
        shards[file] = _header(folder / file)
    tensors = {}
    for name, file in places.items():
        if name not in shards[file]:
            raise Ds4Error(f"{folder / file}: has no tensor {name!r}, which {INDEX} says it holds; {_AGAIN}")
        tensors[name] = shards[file][name]
    return tensors


def _header(shard: Path) -> dict[str, Stored]:
    """Name -> tensor. That the header is whole, and the file as long as it says, is safetensors' check."""
    try:
        with safe_open(str(shard), framework="np"), shard.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(begin - 8))
    except SafetensorError as error:
        raise Ds4Error(f"{shard}: not a whole safetensors file ({error}); {_AGAIN}") from error
    except OSError as error:
        raise Ds4Error(f"{shard}: cannot be opened: {error.strerror or error}; check the file") from error
    entries.pop("__metadata__", None)
    return {
        name: Stored(name, shard, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def read(stored: Stored, *ranges: slice) -> torch.Tensor:
    """The part of a tensor that one slice per leading dim cuts out, as stored, in memory of its own.

    Args:
        ranges: all but the last one cut out a single index, so that the part is one piece of the file.

    Raises:
        Ds4Error: the shard is not what it was. OSError: it cannot be read (any more); that may pass.
    """
    dtype, sizes, first = DTYPES[stored.dtype], list(stored.shape), 0
    for dim, part in enumerate(ranges):
        start, stop, _ = part.indices(sizes[dim])
        if math.prod(sizes[:dim]) != 1:
            raise ValueError(f"{ranges} of {stored.name!r} {list(stored.shape)} lie in several places")
        first += start * math.prod(sizes[dim + 1 :])
        sizes[dim] = stop - start
    values = torch.empty(sizes, dtype=dtype)
    left, place = values.view(-1).view(torch.uint8).numpy().data, stored.offset + first * dtype.itemsize
    try:
        with stored.file.open("rb", buffering=0) as file:
            while left:
                count = os.preadv(file.fileno(), [left], place)
                if count == 0:
                    raise Ds4Error(f"{stored.where}: cannot be read, the file has become shorter; {_AGAIN}")
                left, place = left[count:], place + count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(stored.file)) from error
    return values
