"""A model file, memory-mapped: what it says, where its tensors lie, and whether it can be used.

Nothing here needs torch, so that looking into a file of 81 GB takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES

from ds4.errors import Ds4Error, FileFormatError
from ds4.gguf.check import check
from ds4.gguf.header import Header, TensorInfo, map_file, read_header
from ds4.gguf.keys import QAT_SIM_KEY, TOKENIZER_PREFIX
from ds4.gguf.shape import Shape

__all__ = [
    "Identity",
    "Inspection",
    "ModelFile",
    "TensorInfo",
    "collect_problems",
    "embedded_model_path",
    "inspect_file",
    "open_model",
]

EMBEDDED_MODEL = "ds4-tiny.gguf"

_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""How many places of the weights count in a model's identity, and how many bytes at each."""


class Identity(NamedTuple):
    """What tells the states of a model from those of others of the same shape.

    Attributes:
        weights: a hash of them.
        expert_bits: of a routed expert's weight, rounded down: 2 for IQ2_XXS and Q2_K, 4 for Q4_K and MXFP4, and so
            on, the least if there are several; 0: not known.
    """

    weights: str
    expert_bits: int = 0


@dataclass(frozen=True)
class ModelFile:
    """A usable model file. The mapping is read-only and lives as long as an array from `raw` does.

    The file must not be shortened while it is open: the operating system then stops the program.

    Attributes:
        metadata: plain Python values (int, float, str, bool, list).
        tensors: name -> type, dims (innermost first), shape (torch order), offset and nbytes.
        shape: the profile, or what the keys of a custom file say.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shape: Shape
    data: npt.NDArray[np.uint8] = field(repr=False)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as stored, uint8 [nbytes], a read-only view of the mapped file.

        Raises:
            KeyError: no tensor of this name.
        """
        info = self.tensors[name]
        return self.data[info.offset : info.offset + info.nbytes]

    @property
    def qat_sim(self) -> bool:
        """Whether the model wants the quantisation round trips of training (files that do not say: yes)."""
        return bool(self.metadata.get(QAT_SIM_KEY, True))

    def identity(self) -> Identity:
        """What tells this model from others.

        The hash is of the header and of samples of the weights, so that it is quick: files that differ in a few weights
        only may have the same one.
        """
        first = min((info.offset for info in self.tensors.values()), default=self.data.size)
        size = self.data.size
        running = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
        running.update(self.data[:first].tobytes())
        for i in range(_SAMPLES):
            start = first + (size - first) * i // _SAMPLES
            running.update(self.data[start : start + _SAMPLE_BYTES].tobytes())
        sizes = [GGML_QUANT_SIZES[info.type] for name, info in self.tensors.items() if name.endswith("_exps.weight")]
        return Identity(running.hexdigest(), min((8 * size // values for values, size in sizes), default=0))

    @property
    def has_tokenizer(self) -> bool:
        """False for a custom file that was written without one."""
        return f"{TOKENIZER_PREFIX}tokens" in self.metadata


def embedded_model_path() -> Path:
    """The file of the small model that comes with the package. Raises `Ds4Error` if the installation lacks it."""
    path = Path(str(importlib.resources.files("ds4") / "data" / EMBEDDED_MODEL))
    if not path.is_file():
        raise Ds4Error(f"the embedded model is missing from this installation ({path}); give a model file")
    return path


def open_model(path: str | os.PathLike[str], qat_sim: bool | None = None) -> ModelFile:
    """Map a model file and check everything that can be known before the first token (start-up rejections).

    Args:
        qat_sim: whether it is to run with the quantisation round trips; None: as the file records.

    Raises:
        FileFormatError: the file cannot be used; the text names the key or tensor, what was found and what expected.
    """
    found = _examine(path, qat_sim)
    if found.problems or found.shape is None:
        more = len(found.problems) - 1
        rest = f" (and {more} more: `ds4 --inspect` lists them)" if more > 0 else ""
        raise FileFormatError(f"{path}: {found.problems[0]}{rest}")
    return ModelFile(Path(path), found.header.metadata, found.header.tensors, found.shape, found.data)


@dataclass(frozen=True)
class Inspection:
    """What could be learnt about a GGUF file, usable or not: `problems` is empty for a usable one."""

    header: Header
    shape: Shape | None
    problems: list[str]
    data: npt.NDArray[np.uint8] = field(repr=False)


def inspect_file(path: str | os.PathLike[str]) -> Inspection:
    """Everything known about a file whose header can be read.

    Raises:
        FileFormatError: the header itself cannot be read (not GGUF, truncated, damaged).
    """
    return _examine(path)


def collect_problems(path: str | os.PathLike[str]) -> list[str]:
    """All reasons for which `open_model` would refuse the file, without its path; empty for a usable file."""
    try:
        return _examine(path).problems
    except FileFormatError as error:
        return [str(error).removeprefix(f"{os.fspath(path)}: ")]


def _examine(path: str | os.PathLike[str], qat_sim: bool | None = None) -> Inspection:
    data = map_file(path)
    header = read_header(path, data)
    shape, problems = check(header, qat_sim)
    if shape is not None and not problems:
        problems = _hash_table_problems(header, shape, data)
    return Inspection(header, shape, problems, data)


def _hash_table_problems(header: Header, shape: Shape, data: npt.NDArray[np.uint8]) -> list[str]:
    """Expert numbers out of range would read foreign memory in the middle of a generation."""
    problems = []
    for layer in range(shape.hash_layers):
        info = header.tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
        ids = data[info.offset : info.offset + info.nbytes].view("<i4")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= shape.experts:
            problems.append(
                f"tensor {info.name!r} holds expert numbers from {low} to {high}, expected 0 to {shape.experts - 1}; "
                "the file is damaged, download it again"
            )
    return problems
