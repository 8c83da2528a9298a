"""The weights of a model as planes on one device, merged as the kernels read them.

Bytes come from a mapped file in bounded pieces, through two buffers in pinned memory where the device is a CUDA one,
and are repacked there; neither the host nor the card ever holds a second copy. Tensors that share their data in the
file, as those of synthetic files do, are loaded once.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from ds4.errors import Ds4Error
from ds4.gguf import blocks
from ds4.gguf.file import ModelFile
from ds4.gguf.header import row_bytes
from ds4.gguf.shape import Shape, expected_tensors
from ds4.model.cuda.support import check_model
from ds4.ops.kernels.experts_fused import Scales, scales_of
from ds4.ops.kernels.hyper import HyperWeights
from ds4.ops.kernels.planes import (
    F16Planes,
    Iq2aPlanes,
    Iq2bPlanes,
    Iq2Layout,
    Planes,
    Q8Planes,
    allocate,
    repack,
)

_F32, _F16, _BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
_Q8_0, _I32, _MXFP4 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.I32, GGMLQuantizationType.MXFP4

_LARGEST_HALF = 65504
_LARGEST_ROW = 57344  # of a value of a row, for `ds4.ops.kernels.attention`
_PIECE = 32 << 20
"""Bytes that are on their way at once."""
_PART = 4 << 20
"""Of these, what a thread reads at once."""
_THREADS = min(8, os.cpu_count() or 1)


class RawSource(Protocol):
    """Where the bytes of tensors come from, by their GGUF names."""

    shape: Shape

    def type(self, name: str) -> GGMLQuantizationType:
        """The type of its blocks."""
        ...

    def dims(self, name: str) -> tuple[int, ...]:
        """Its dimensions in torch's order."""
        ...

    def key(self, name: str) -> object:
        """Equal for tensors of the same data."""
        ...

    def raw(self, name: str) -> Tensor:
        """Its bytes, uint8 on the host; maybe mapped, never to be written to."""
        ...


class FileBytes:
    """The tensors of a model file."""

    def __init__(self, file: ModelFile) -> None:
        self.file, self.shape = file, file.shape

    def type(self, name: str) -> GGMLQuantizationType:
        return self.file.tensors[name].type

    def dims(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[name].shape

    def key(self, name: str) -> object:
        return self.file.tensors[name].offset

    def raw(self, name: str) -> Tensor:
        return blocks.as_tensor(self.file.raw(name))


class TensorBytes:
    """Tensors in memory, in torch's order of dimensions, stored as a file of a strict profile would.

    Matrices become Q8_0 or F16, whichever the profiles have, experts MXFP4. `decoded` gives what is left of them.
    """

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._types = {name: _stored_type(name) for name in expected_tensors(shape)}
        self._dims = {name: tuple(tensors[name].shape) for name in self._types}
        self._raw: dict[str, Tensor] = {}
        for name, kind in self._types.items():
            value = tensors[name].detach().cpu()
            if kind == _I32:
                self._raw[name] = value.to(torch.int32).contiguous().view(torch.uint8).flatten()
                continue
            data = quants.quantize(value.float().contiguous().numpy(), kind)
            self._raw[name] = torch.from_numpy(data.copy()).contiguous().view(torch.uint8).flatten()

    def type(self, name: str) -> GGMLQuantizationType:
        return self._types[name]

    def dims(self, name: str) -> tuple[int, ...]:
        return self._dims[name]

    def key(self, name: str) -> object:
        return name

    def raw(self, name: str) -> Tensor:
        return self._raw[name]

    def decoded(self) -> dict[str, Tensor]:
        """The values that the planes will hold, for `TensorSource`."""
        result = {}
        for name, kind in self._types.items():
            dims = self._dims[name]
            if kind == _I32:
                result[name] = self._raw[name].view(torch.int32).view(dims)
            else:
                count = int(torch.Size(dims).numel())
                result[name] = blocks.dequantize(self._raw[name], kind, count).view(dims)
        return result


_F16_PARTS = ("token_embd", "hc_", "compressor_kv", "compressor_gate", "compressor_ape", "indexer.proj", "ffn_gate_inp")


def _stored_type(name: str) -> GGMLQuantizationType:
    """As the strict profiles store a tensor of this name."""
    if "tid2eid" in name:
        return _I32
    if any(part in name for part in ("norm", "_scale.", "_base.", "sinks", "bias")):
        return _F32
    if "_exps." in name:
        return _MXFP4
    return _F16 if any(part in name for part in _F16_PARTS) else _Q8_0


# --- what the forward pass reads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompressorWeights:
    """What a compressor needs behind its projections: ape float32 [ratio, width], norm float32 [channels]."""

    ape: Tensor
    norm: Tensor

    @property
    def width(self) -> int:
        """Columns of its values; as many of its gates follow."""
        return self.ape.shape[1]


@dataclass(frozen=True)
class DeviceLayer:
    """One block.

    Attributes:
        q_a_kv: rows of q_a, then kv.
        side: F16 projections of the attention's input: of each compressor values and gates, then the indexer's weights;
            None for layers without a compressor.
        q_b: rows of q_b, then the index queries' if they are Q8_0 too.
        index_q: the index queries' projection if it is F16.
        router: [experts, hidden].
        gate_up: the shared expert's gate, then up.
        router_bias, expert_table: one of the two.
    """

    hc_attn: HyperWeights
    q_a_kv: Q8Planes
    side: F16Planes | None
    q_a_norm: Tensor
    kv_norm: Tensor
    q_b: Q8Planes
    index_q: F16Planes | None
    sinks: Tensor
    compressors: dict[str, CompressorWeights]
    output_a: Q8Planes
    output_b: Q8Planes
    hc_ffn: HyperWeights
    router: F16Planes
    router_bias: Tensor | None
    expert_table: Tensor | None
    gate: Planes
    up: Planes
    down: Planes
    shared_gate_up: Q8Planes
    shared_down: Q8Planes


@dataclass(frozen=True)
class DeviceWeights:
    """All weights of a model on `device`; embedding is [vocab, hidden] of any float type."""

    shape: Shape
    device: torch.device
    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    hc_head: HyperWeights
    output: Q8Planes

    @classmethod
    def load(
        cls,
        source: RawSource,
        device: torch.device | str,
        layout: Iq2Layout = "b",
        progress: Callable[[int, int], None] | None = None,
    ) -> DeviceWeights:
        """Read every tensor of the shape.

        Args:
            layout: of IQ2_XXS experts.
            progress: called with (bytes read, bytes in all).

        Raises:
            Ds4Error: the shape or a tensor's type is one that there are no kernels for.
        """
        shape = source.shape
        check_model(shape, source.type)
        loader = _Loader(source, torch.device(device), layout, progress)
        embedding = loader.table("token_embd.weight")
        layers = tuple(_layer(loader, shape, layer) for layer in range(shape.layers))
        head = loader.hyper("output_hc", "output_norm.weight")
        return cls(shape, torch.device(device), embedding, layers, head, loader.q8("output.weight"))

    @property
    def expert_layout(self) -> Iq2Layout | None:
        """The layout of IQ2_XXS experts; None where there are none."""
        kinds = {type(planes) for layer in self.layers for planes in (layer.gate, layer.up, layer.down)}
        return "a" if Iq2aPlanes in kinds else "b" if Iq2bPlanes in kinds else None

    def expert_scales(self) -> list[Scales]:
        """The powers of two of each layer by which float16 holds what its experts are made of and work on.

        Raises:
            Ds4Error: a weight is no number, or infinite.
        """
        experts = [(layer.gate, layer.up, layer.down) for layer in self.layers]
        found = scales_of(experts, [layer.hc_ffn.norm for layer in self.layers], self.shape.swiglu_clamp)
        for number, scales in enumerate(found):
            parts = ((scales.gate_up, "ffn_gate_exps or ffn_up_exps"), (scales.down, "ffn_down_exps"))
            for scale, name in (*parts, (scales.x, "ffn_norm")):
                if not scale:
                    raise Ds4Error(f"blk.{number}.{name}: a value is no number, or infinite; the file is damaged")
        return found

    def attention_fits(self) -> list[bool]:
        """Of each layer, whether float16 surely holds what the attention's output projections are made of and give.

        A row is as long as its norm makes it, at most sqrt(head_dim) times the norm's largest weight, and so is what a
        head gives; a product is no larger than both lengths multiplied.

        Raises:
            Ds4Error: a value is no number, or infinite, or rows may be too large for the attention's own products.
        """
        s, found = self.shape, []
        for layer in self.layers:
            norms = [layer.kv_norm, *(c.norm for kind, c in layer.compressors.items() if kind == "rows")]
            # FP8 may round up.
            longest = 1.1 * s.head_dim**0.5 * torch.cat(norms).abs().max()
            a, b = (planes.scales.float().abs() * 128 for planes in (layer.output_a, layer.output_b))
            product = longest * (s.heads / s.o_groups) ** 0.5 * (32 * a.square().sum(1)).sqrt().max()
            found.append(torch.stack((longest, a.max(), b.max(), product)))
        names = ("attn_kv_a_norm or attn_compressor_norm", "attn_output_a", "attn_output_b")
        fits = []
        for number, (*values, product) in enumerate(torch.stack(found).tolist()):
            for name, value in zip(names, values, strict=True):
                if not math.isfinite(value):
                    raise Ds4Error(f"blk.{number}.{name}: a value is no number, or infinite; the file is damaged")
            if values[0] >= _LARGEST_ROW:
                raise Ds4Error(
                    f"blk.{number}.{names[0]}: so large that float16 may not hold rows; use --quality (quality=True) or"
                    " --device cpu (device='cpu')"
                )
            fits.append(max(*values, product) < _LARGEST_HALF)
        return fits


def _layer(loader: _Loader, shape: Shape, layer: int) -> DeviceLayer:
    p = f"blk.{layer}."
    side, compressors = [], {}
    prefixes = {"rows": "attn_compressor", "keys": "indexer_compressor"}
    if not shape.has_indexer(layer):
        prefixes.pop("keys")
    if shape.ratios[layer]:
        for kind, prefix in prefixes.items():
            side += [f"{p}{prefix}_kv.weight", f"{p}{prefix}_gate.weight"]
            ape, norm = (loader.vector(f"{p}{prefix}_{part}.weight") for part in ("ape", "norm"))
            compressors[kind] = CompressorWeights(ape, norm)
    q_b, index_q = [f"{p}attn_q_b.weight"], None
    if shape.has_indexer(layer):
        side.append(f"{p}indexer.proj.weight")
        name = f"{p}indexer.attn_q_b.weight"
        if loader.source.type(name) == _Q8_0:
            q_b.append(name)
        else:
            index_q = loader.f16(name)
    hashed = layer < shape.hash_layers
    gate, up, down = (loader.experts(f"{p}ffn_{kind}_exps.weight") for kind in ("gate", "up", "down"))
    return DeviceLayer(
        hc_attn=loader.hyper(f"{p}hc_attn", f"{p}attn_norm.weight"),
        q_a_kv=loader.q8(f"{p}attn_q_a.weight", f"{p}attn_kv.weight"),
        side=loader.f16(*side) if side else None,
        q_a_norm=loader.vector(f"{p}attn_q_a_norm.weight"),
        kv_norm=loader.vector(f"{p}attn_kv_a_norm.weight"),
        q_b=loader.q8(*q_b),
        index_q=index_q,
        sinks=loader.vector(f"{p}attn_sinks.weight"),
        compressors=compressors,
        output_a=loader.q8(f"{p}attn_output_a.weight"),
        output_b=loader.q8(f"{p}attn_output_b.weight"),
        hc_ffn=loader.hyper(f"{p}hc_ffn", f"{p}ffn_norm.weight"),
        router=loader.f16(f"{p}ffn_gate_inp.weight"),
        router_bias=None if hashed else loader.vector(f"{p}exp_probs_b.bias"),
        expert_table=loader.table(f"{p}ffn_gate_tid2eid.weight") if hashed else None,
        gate=gate,
        up=up,
        down=down,
        shared_gate_up=loader.q8(f"{p}ffn_gate_shexp.weight", f"{p}ffn_up_shexp.weight"),
        shared_down=loader.q8(f"{p}ffn_down_shexp.weight"),
    )


# --- loading ----------------------------------------------------------------------------------------------------------


class _Fill(Protocol):
    """Takes whole rows of a tensor, from row `first` on."""

    def __call__(self, part: Tensor, /, first: int) -> object: ...


class _Loader:
    """Tensors of a source on a device, each data once."""

    def __init__(
        self,
        source: RawSource,
        device: torch.device,
        layout: Iq2Layout,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.device, self.layout = source, device, layout
        self._done: dict[object, Planes | Tensor] = {}
        self._progress, self._read = progress, 0
        self._total = sum(_nbytes(source, name) for name in expected_tensors(source.shape))
        self._stages = _Stages(device)

    def _count(self, nbytes: int) -> None:
        self._read += nbytes
        if self._progress:
            self._progress(self._read, self._total)

    def _pieces(self, name: str, rows: int, size: int, into: _Fill) -> None:
        """Hand over the bytes of a tensor on the device, whole rows at a time, with the first row's number."""
        raw, step = self.source.raw(name), max(1, _PIECE // size)
        for first in range(0, rows, step):
            piece = raw[first * size : min(rows, first + step) * size]
            self._stages.send(piece, functools.partial(into, first=first))
            self._count(piece.numel())

    def table(self, name: str) -> Tensor:
        """A tensor as stored, of a plain type."""
        dtype = {_F16: torch.float16, _F32: torch.float32, _BF16: torch.bfloat16, _I32: torch.int32}.get(
            self.source.type(name)
        )
        if dtype is None:
            return self.vector(name)
        dims = self.source.dims(name)
        out = torch.empty(dims, dtype=dtype, device=self.device)
        flat, size = out.view(-1).view(torch.uint8), dims[-1] * dtype.itemsize
        self._pieces(
            name, flat.numel() // size, size, lambda part, first: flat[first * size :][: part.numel()].copy_(part)
        )
        return out

    def vector(self, name: str) -> Tensor:
        """A tensor as float32; a small one."""
        dims = self.source.dims(name)
        raw = self.source.raw(name)
        self._count(raw.numel())
        return blocks.dequantize(raw, self.source.type(name), int(torch.Size(dims).numel())).view(dims).to(self.device)

    def hyper(self, prefix: str, norm: str) -> HyperWeights:
        return HyperWeights(
            self.f16(f"{prefix}_fn.weight").weight,
            self.vector(f"{prefix}_scale.weight"),
            self.vector(f"{prefix}_base.weight"),
            self.vector(norm),
        )

    def q8(self, *names: str) -> Q8Planes:
        planes = self._merged(_Q8_0, names)
        assert isinstance(planes, Q8Planes)
        return planes

    def f16(self, *names: str) -> F16Planes:
        planes = self._merged(_F16, names)
        assert isinstance(planes, F16Planes)
        return planes

    def _merged(self, wanted: GGMLQuantizationType, names: Sequence[str]) -> Planes:
        """Matrices of one input, their rows one behind the other; other types than the wanted one are converted."""
        key = (wanted, *(self.source.key(name) for name in names))
        if key in self._done:
            return self._again(key, names)
        dims = [self.source.dims(name) for name in names]
        k, n = dims[0][-1], sum(d[0] for d in dims)
        try:
            planes = allocate(wanted, n, k, self.device)
        except ValueError as error:
            raise Ds4Error(f"tensor {names[0]}: {error}; use --device cpu (device='cpu')") from error
        row = 0
        for name, (rows, _) in zip(names, dims, strict=True):
            kind = self.source.type(name)

            def fill(part: Tensor, first: int, start: int = row, kind: GGMLQuantizationType = kind) -> None:
                repack(part if kind == wanted else _convert(part, kind, wanted, k), planes, start + first)

            self._pieces(name, rows, row_bytes(kind, k), fill)
            row += rows
        self._done[key] = planes
        return planes

    def experts(self, name: str) -> Planes:
        """The matrices of all experts."""
        kind = self.source.type(name)
        key = (kind, self.source.key(name))
        if key in self._done:
            return self._again(key, [name])
        experts, n, k = self.source.dims(name)
        try:
            planes = allocate(kind, n, k, self.device, experts, self.layout)
        except ValueError as error:
            raise Ds4Error(f"tensor {name}: {error}; use --device cpu (device='cpu')") from error
        self._pieces(name, experts * n, row_bytes(kind, k), lambda part, first: repack(part, planes, first))
        self._done[key] = planes
        return planes

    def _again(self, key: object, names: Sequence[str]) -> Planes:
        for name in names:
            self._count(_nbytes(self.source, name))
        planes = self._done[key]
        assert isinstance(planes, Planes)
        return planes


def _nbytes(source: RawSource, name: str) -> int:
    *lead, k = source.dims(name)
    return int(torch.Size(lead).numel()) * int(row_bytes(source.type(name), k))


def _convert(raw: Tensor, kind: GGMLQuantizationType, wanted: GGMLQuantizationType, k: int) -> Tensor:
    """Rows of k weights in another type: to F16, or to Q8_0 with the scale that its largest magnitude asks for."""
    count = raw.numel() // row_bytes(kind, k) * k
    values = blocks.dequantize(raw, kind, count)
    if wanted == _F16:
        return values.half().view(torch.uint8)
    groups = values.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 127
    codes = torch.round(groups / scale.clamp(min=1e-30)).to(torch.int8)
    return torch.cat((scale.half().view(torch.uint8), codes.view(torch.uint8)), dim=1).flatten()


def copy_parts(source: Tensor, target: Tensor, threads: Executor) -> None:
    """Copy uint8 [n] to the start of `target`, both on the host: one thread is slow where a file is mapped."""
    parts = zip(source.split(_PART), target[: source.numel()].split(_PART), strict=True)
    list(threads.map(lambda part: part[1].copy_(part[0]), parts))


class _Stages:
    """Two buffers in pinned memory and two on the device: one is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._next = device, 0
        self._pairs: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        self._threads = ThreadPoolExecutor(_THREADS)

    def send(self, piece: Tensor, use: Callable[[Tensor], object]) -> None:
        """Hand over the piece on the device."""
        if self.device.type != "cuda":
            use(piece)
            return
        if piece.numel() > _PIECE:
            use(piece.to(self.device))
            return
        if not self._pairs:
            for _ in range(2):
                host = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
                there = torch.empty(_PIECE, dtype=torch.uint8, device=self.device)
                self._pairs.append((host, there, torch.cuda.Event()))
        host, there, free = self._pairs[self._next]
        self._next = 1 - self._next
        free.synchronize()  # whoever used the pair before is through
        copy_parts(piece, host, self._threads)
        there[: piece.numel()].copy_(host[: piece.numel()], non_blocking=True)
        use(there[: piece.numel()])
        free.record()
