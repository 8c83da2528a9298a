"""The weights of a model, named as the graph names them, from a mapped GGUF file or from tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds4 import ops
from ds4.errors import FileFormatError
from ds4.gguf import blocks
from ds4.gguf.file import ModelFile
from ds4.gguf.shape import Shape

RESIDENT_LIMIT = 1 << 30
"""Bytes of float32 weights up to which a model is dequantised once, at load; larger ones while they are used."""

_SLICE_VALUES = 1 << 23
"""Values that are dequantised at once from a mapped matrix."""


class Matrix(Protocol):
    """A weight matrix [out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [rows, in] -> float32 [rows, out]."""
        ...

    def dense(self) -> Tensor:
        """The matrix as float32 [out, in]."""
        ...


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix in memory: float32 [out, in]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)

    def dense(self) -> Tensor:
        return self.weight


@dataclass(frozen=True)
class JoinedMatrix:
    """Matrices over the same input as one: their rows one behind the other."""

    parts: tuple[Matrix, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])


def join(*parts: Matrix) -> Matrix:
    """One product instead of several: matrices in memory are put together, mapped ones stay where they are."""
    joined = JoinedMatrix(parts)
    return DenseMatrix(joined.dense()) if all(isinstance(part, DenseMatrix) for part in parts) else joined


class Scratch(threading.local):
    """Buffers that are used again and again: fresh memory of this size costs more than dequantising into it.

    Each thread has its own, so that a step that was given up and still runs disturbs nobody.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, rows: int, width: int) -> Tensor:
        """A float32 buffer [rows, width], overwritten by the next taking for the same use."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < rows * width:
            buffer = self._buffers[use] = torch.empty(rows * width)
        return buffer[: rows * width].view(rows, width)


@dataclass(frozen=True)
class MappedMatrix:
    """A quantised matrix in a mapped file, dequantised in slices of rows while it is used."""

    file: ModelFile
    name: str
    scratch: Scratch

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = self.file.tensors[self.name].shape
        out = x.new_empty((x.shape[0], rows))
        step = max(1, _SLICE_VALUES // width)
        for first in range(0, rows, step):
            end = min(rows, first + step)
            weight = self.scratch.take("slice", end - first, width)
            _dequantize_rows(self.file, self.name, first, end, weight)
            ops.linear(x, weight, out=out[:, first:end])
        return out

    def dense(self) -> Tensor:
        rows, width = self.file.tensors[self.name].shape
        return _dequantize_rows(self.file, self.name, 0, rows, torch.empty(rows, width))


class GroupedMatrix(Protocol):
    """A matrix for each group of channels."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [rows, groups, in] -> float32 [rows, groups, out]."""
        ...


@dataclass(frozen=True)
class DenseGroups:
    """Grouped matrices in memory: float32 [groups, out, in]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return ops.grouped_linear(x, self.weight)


@dataclass(frozen=True)
class MappedGroups:
    """Grouped matrices in a mapped file, [groups * out, in], dequantised group by group while they are used."""

    file: ModelFile
    name: str
    groups: int
    scratch: Scratch

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = self.file.tensors[self.name].shape
        size = rows // self.groups
        out = x.new_empty((x.shape[0], self.groups, size))
        for g in range(self.groups):
            weight = self.scratch.take("group", size, width)
            _dequantize_rows(self.file, self.name, g * size, (g + 1) * size, weight)
            ops.linear(x[:, g].contiguous(), weight, out=out[:, g])
        return out


@dataclass(frozen=True)
class DenseExperts:
    """One layer's routed experts in memory, float32.

    gate_up_weight: [experts, 2 * expert_hidden, hidden]; down_weight: [experts, hidden, expert_hidden].
    """

    gate_up_weight: Tensor
    down_weight: Tensor

    def gate_up(self, expert: int) -> Tensor:
        return self.gate_up_weight[expert]

    def down(self, expert: int) -> Tensor:
        return self.down_weight[expert]


@dataclass(frozen=True)
class MappedExperts:
    """One layer's routed experts in a mapped file; only those that are asked for are dequantised."""

    file: ModelFile
    layer: int
    scratch: Scratch

    def _into(self, out: Tensor, kind: str, expert: int) -> Tensor:
        rows = out.shape[0]
        name = f"blk.{self.layer}.ffn_{kind}_exps.weight"
        return _dequantize_rows(self.file, name, expert * rows, (expert + 1) * rows, out)

    def gate_up(self, expert: int) -> Tensor:
        _, rows, width = self.file.tensors[f"blk.{self.layer}.ffn_gate_exps.weight"].shape
        both = self.scratch.take("gate_up", 2 * rows, width)
        self._into(both[:rows], "gate", expert)
        self._into(both[rows:], "up", expert)
        return both

    def down(self, expert: int) -> Tensor:
        _, rows, width = self.file.tensors[f"blk.{self.layer}.ffn_down_exps.weight"].shape
        return self._into(self.scratch.take("down", rows, width), "down", expert)


def _dequantize_rows(file: ModelFile, name: str, first: int, end: int, out: Tensor) -> Tensor:
    """Rows first .. end - 1 of a tensor, its outer dimensions seen as one, into `out` float32 [rows, in]."""
    info = file.tensors[name]
    width = info.shape[-1]
    size = blocks.row_bytes(info.type, width)
    data = file.raw(name)[first * size : end * size]
    blocks.dequantize(data, info.type, (end - first) * width, out=out.view(-1))
    return out


class Source(Protocol):
    """Where tensors come from, by their GGUF names."""

    shape: Shape

    def vector(self, name: str) -> Tensor:
        """The whole tensor as float32 in its own shape."""
        ...

    def matrix(self, name: str) -> Matrix:
        """A matrix [out, in]."""
        ...

    def grouped(self, name: str) -> GroupedMatrix:
        """The matrices of the output groups, stored one behind the other."""
        ...

    def table(self, name: str) -> Tensor:
        """A table that is only indexed by row: any dtype, may be mapped."""
        ...

    def experts(self, layer: int) -> ops.ExpertSource:
        """The routed experts of a layer."""
        ...


class FileSource:
    """Tensors of a GGUF file. Small models are dequantised whole, large ones while they are used."""

    def __init__(self, file: ModelFile, progress: Callable[[int, int], None] | None = None) -> None:
        self.file = file
        self.shape = file.shape
        values = sum(int(torch.Size(t.shape).numel()) for t in file.tensors.values())
        self.resident = 4 * values <= RESIDENT_LIMIT
        self._scratch = Scratch()
        self._progress, self._done, self._total = progress, 0, sum(t.nbytes for t in file.tensors.values())

    def _count(self, name: str) -> None:
        self._done += self.file.tensors[name].nbytes
        if self._progress:
            self._progress(self._done, self._total)

    def vector(self, name: str) -> Tensor:
        info = self.file.tensors[name]
        values = int(torch.Size(info.shape).numel())
        self._count(name)
        return blocks.dequantize(self.file.raw(name), info.type, values).view(info.shape)

    def matrix(self, name: str) -> Matrix:
        if self.resident:
            return DenseMatrix(self.vector(name))
        self._count(name)
        return MappedMatrix(self.file, name, self._scratch)

    def grouped(self, name: str) -> GroupedMatrix:
        groups = self.shape.o_groups
        if self.resident:
            return DenseGroups(self.vector(name).view(groups, self.shape.o_lora_rank, -1))
        self._count(name)
        return MappedGroups(self.file, name, groups, self._scratch)

    def table(self, name: str) -> Tensor:
        info = self.file.tensors[name]
        dtype = {"F16": torch.float16, "F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32}.get(
            info.type.name
        )
        if dtype is None:
            return self.vector(name)
        self._count(name)
        return blocks.as_tensor(self.file.raw(name)).view(dtype).view(info.shape)

    def experts(self, layer: int) -> ops.ExpertSource:
        names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
        if self.resident:
            gate, up, down = (self.vector(name) for name in names)
            return DenseExperts(torch.cat((gate, up), dim=1), down)
        for name in names:
            self._count(name)
        return MappedExperts(self.file, layer, self._scratch)


class TensorSource:
    """Tensors in memory, under their GGUF names and in torch's order of dimensions ([out, in])."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._tensors = tensors

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise FileFormatError(f"tensor {name} is missing: the shape {self.shape.name!r} needs it")
        return self._tensors[name].detach()

    def vector(self, name: str) -> Tensor:
        return self._get(name).float().contiguous()

    def matrix(self, name: str) -> Matrix:
        return DenseMatrix(self.vector(name))

    def grouped(self, name: str) -> GroupedMatrix:
        return DenseGroups(self.vector(name).view(self.shape.o_groups, self.shape.o_lora_rank, -1))

    def table(self, name: str) -> Tensor:
        return self._get(name)

    def experts(self, layer: int) -> ops.ExpertSource:
        gate, up, down = (self.vector(f"blk.{layer}.ffn_{kind}_exps.weight") for kind in ("gate", "up", "down"))
        return DenseExperts(torch.cat((gate, up), dim=1), down)


@dataclass(frozen=True)
class HyperConnection:
    """The control of one hyper-connection: fn [coefficients, streams * hidden], scale, base, all float32."""

    fn: Tensor
    scale: Tensor
    base: Tensor

    @classmethod
    def load(cls, source: Source, prefix: str) -> HyperConnection:
        """Tensors `<prefix>_fn.weight`, `<prefix>_scale.weight` and `<prefix>_base.weight`."""
        return cls(
            source.matrix(f"{prefix}_fn.weight").dense(),
            source.vector(f"{prefix}_scale.weight"),
            source.vector(f"{prefix}_base.weight"),
        )


@dataclass(frozen=True)
class Compressor:
    """The projections of one compressor: values, then gates; `ape` is float32 [ratio, width]."""

    kv_gate: Matrix
    ape: Tensor
    norm: Tensor

    @classmethod
    def load(cls, source: Source, prefix: str) -> Compressor:
        """Tensors `<prefix>_kv.weight`, `<prefix>_gate.weight`, `<prefix>_ape.weight` and `<prefix>_norm.weight`."""
        return cls(
            join(source.matrix(f"{prefix}_kv.weight"), source.matrix(f"{prefix}_gate.weight")),
            source.vector(f"{prefix}_ape.weight"),
            source.vector(f"{prefix}_norm.weight"),
        )


@dataclass(frozen=True)
class Indexer:
    """What chooses the compressed rows of a sparse layer."""

    q_b: Matrix
    proj: Matrix
    compressor: Compressor


@dataclass(frozen=True)
class LayerWeights:
    """One block, in the order of the graph."""

    hc_attn: HyperConnection
    attn_norm: Tensor
    q_a_kv: Matrix
    q_a_norm: Tensor
    q_b: Matrix
    kv_norm: Tensor
    sinks: Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    output_a: GroupedMatrix
    output_b: Matrix
    hc_ffn: HyperConnection
    ffn_norm: Tensor
    router: Tensor
    router_bias: Tensor | None
    expert_table: Tensor | None
    experts: ops.ExpertSource
    shared_gate_up: Matrix
    shared_down: Matrix

    @classmethod
    def load(cls, source: Source, layer: int) -> LayerWeights:
        """The tensors `blk.<layer>.*`."""
        shape, prefix = source.shape, f"blk.{layer}."

        def matrix(name: str) -> Matrix:
            return source.matrix(f"{prefix}{name}.weight")

        def vector(name: str) -> Tensor:
            return source.vector(f"{prefix}{name}.weight")

        compressor = indexer = None
        if shape.ratios[layer]:
            compressor = Compressor.load(source, prefix + "attn_compressor")
        if shape.has_indexer(layer):
            indexer = Indexer(
                matrix("indexer.attn_q_b"),
                matrix("indexer.proj"),
                Compressor.load(source, prefix + "indexer_compressor"),
            )
        hashed = layer < shape.hash_layers
        return cls(
            hc_attn=HyperConnection.load(source, prefix + "hc_attn"),
            attn_norm=vector("attn_norm"),
            q_a_kv=join(matrix("attn_q_a"), matrix("attn_kv")),
            q_a_norm=vector("attn_q_a_norm"),
            q_b=matrix("attn_q_b"),
            kv_norm=vector("attn_kv_a_norm"),
            sinks=vector("attn_sinks"),
            compressor=compressor,
            indexer=indexer,
            output_a=source.grouped(f"{prefix}attn_output_a.weight"),
            output_b=matrix("attn_output_b"),
            hc_ffn=HyperConnection.load(source, prefix + "hc_ffn"),
            ffn_norm=vector("ffn_norm"),
            router=matrix("ffn_gate_inp").dense(),
            router_bias=None if hashed else source.vector(f"{prefix}exp_probs_b.bias"),
            expert_table=source.table(f"{prefix}ffn_gate_tid2eid.weight") if hashed else None,
            experts=source.experts(layer),
            shared_gate_up=join(matrix("ffn_gate_shexp"), matrix("ffn_up_shexp")),
            shared_down=matrix("ffn_down_shexp"),
        )


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model, or of a slice of its layers."""

    shape: Shape
    embedding: Tensor  # [vocab, hidden]
    layers: dict[int, LayerWeights]
    hc_head: HyperConnection
    output_norm: Tensor
    output: Matrix

    @classmethod
    def load(cls, source: Source, layers: range | None = None) -> ModelWeights:
        """Read every tensor of the shape; `layers` takes a slice."""
        chosen = layers or range(source.shape.layers)
        return cls(
            shape=source.shape,
            embedding=source.table("token_embd.weight"),
            layers={i: LayerWeights.load(source, i) for i in chosen},
            hc_head=HyperConnection.load(source, "output_hc"),
            output_norm=source.vector("output_norm.weight"),
            output=source.matrix("output.weight"),
        )
