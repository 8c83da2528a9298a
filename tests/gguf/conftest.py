"""A model file as a list of parts, which a test may spoil before it is written.

The packing is written out here, apart from the code under test and from the `gguf` package's writer, since it has to
produce files that neither would write.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from tokenizers.pre_tokenizers import ByteLevel

from ds4.gguf.header import Header, TensorInfo
from ds4.gguf.shape import Shape, expected_tensors

SPECIALS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
]
BYTES = sorted(ByteLevel.alphabet())
NUMBERS = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}
NUMBERS |= {"i64": (11, "q"), "f64": (12, "d")}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pack(kind: str, value: Any) -> bytes:
    """Type number and value; kind is `u32`, `str`, `[f32]` and so on, or `raw` for bytes that are used as they are."""
    if kind == "raw":
        return bytes(value)
    if kind.startswith("["):
        item = kind[1:-1]
        number = 8 if item == "str" else NUMBERS[item][0]
        items = [text(v) if item == "str" else struct.pack("<" + NUMBERS[item][1], v) for v in value]
        return struct.pack("<IIQ", 9, number, len(value)) + b"".join(items)
    if kind == "str":
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<I" + NUMBERS[kind][1], NUMBERS[kind][0], value)


@dataclass
class Entry:
    type: int
    dims: tuple[int, ...]
    data: bytes = b""
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[T(self.type)]
        return math.prod(self.dims) // block * size


@dataclass
class Draft:
    """The parts of a file; tensors without data are holes, so that large files cost nothing."""

    keys: dict[str, tuple[str, Any]]
    tensors: dict[str, Entry]
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    more_keys: list[tuple[str, tuple[str, Any]]] = field(default_factory=list)
    more_tensors: list[tuple[str, Entry]] = field(default_factory=list)

    def set(self, key: str, kind: str, value: Any) -> None:
        self.keys[key] = (kind, value)

    def header(self) -> bytes:
        keys = [*self.keys.items(), *self.more_keys]
        tensors = [*self.tensors.items(), *self.more_tensors]
        parts = [self.magic, struct.pack("<IQQ", self.version, len(tensors), len(keys))]
        parts += [text(key) + pack(*value) for key, value in keys]
        end = 0
        for name, entry in tensors:
            offset = end if entry.offset is None else entry.offset
            parts.append(text(name) + struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims))
            parts.append(struct.pack("<IQ", entry.type, offset))
            if entry.offset is None:
                entry_end = end + entry.nbytes
                end = entry_end + -entry_end % self.alignment
        header = b"".join(parts)
        return header + bytes(-len(header) % self.alignment)

    def write(self, path: Path) -> Path:
        header = self.header()
        end = len(header)
        with path.open("wb") as file:
            file.write(header)
            for _, entry in [*self.tensors.items(), *self.more_tensors]:
                if entry.offset is None:
                    if entry.data:
                        file.seek(end)
                        file.write(entry.data)
                    end += entry.nbytes + -entry.nbytes % self.alignment
            file.truncate(end)
        return path

    def parsed(self) -> Header:
        """What reading the file would give, without writing it (for checks over every key and tensor)."""
        metadata = {key: value for key, (_, value) in self.keys.items()}
        tensors = {n: TensorInfo(n, T(e.type), e.dims, 0, e.nbytes) for n, e in self.tensors.items()}
        return Header(metadata, tensors, 0)


def vocabulary(size: int) -> list[str]:
    """The special tokens, the bytes, and words that a merge may make."""
    return [*SPECIALS, *BYTES, *(f"t{i}" for i in range(size - len(SPECIALS) - len(BYTES)))]


def model_keys(shape: Shape) -> dict[str, tuple[str, Any]]:
    """The table of metadata keys, written out a second time."""
    a = "deepseek4."
    return {
        "general.architecture": ("str", "deepseek4"),
        "general.name": ("str", "test"),
        a + "block_count": ("u32", shape.layers),
        a + "context_length": ("u32", 1048576),
        a + "embedding_length": ("u32", shape.hidden),
        a + "vocab_size": ("u32", shape.vocab),
        a + "attention.head_count": ("u32", shape.heads),
        a + "attention.head_count_kv": ("u32", 1),
        a + "attention.key_length": ("u32", shape.head_dim),
        a + "attention.value_length": ("u32", shape.head_dim),
        a + "attention.q_lora_rank": ("u32", shape.q_lora_rank),
        a + "attention.output_lora_rank": ("u32", shape.o_lora_rank),
        a + "attention.output_group_count": ("u32", shape.o_groups),
        a + "attention.sliding_window": ("u32", shape.window),
        a + "attention.indexer.head_count": ("u32", shape.index_heads),
        a + "attention.indexer.key_length": ("u32", shape.index_dim),
        a + "attention.indexer.top_k": ("u32", shape.index_top_k),
        a + "attention.compress_ratios": ("[i32]", [*shape.ratios, 0]),
        a + "attention.compress_rope_freq_base": ("f32", 160000.0),
        a + "attention.layer_norm_rms_epsilon": ("f32", 1e-6),
        a + "rope.dimension_count": ("u32", shape.rope_dim),
        a + "rope.freq_base": ("f32", 10000.0),
        a + "rope.scaling.type": ("str", "yarn"),
        a + "rope.scaling.factor": ("f32", 16.0),
        a + "rope.scaling.original_context_length": ("u64", 65536),
        a + "rope.scaling.yarn_beta_fast": ("f32", 32.0),
        a + "rope.scaling.yarn_beta_slow": ("f32", 1.0),
        a + "expert_count": ("u32", shape.experts),
        a + "expert_used_count": ("u32", shape.experts_used),
        a + "expert_shared_count": ("u32", 1),
        a + "expert_feed_forward_length": ("u32", shape.expert_hidden),
        a + "expert_weights_scale": ("f32", shape.route_scale),
        a + "expert_weights_norm": ("bool", True),
        a + "expert_group_count": ("u32", 0),
        a + "expert_group_used_count": ("u32", 0),
        a + "hash_layer_count": ("u32", shape.hash_layers),
        a + "swiglu_clamp_exp": ("[f32]", [10.0] * shape.layers),
        a + "hyper_connection.count": ("u32", 4),
        a + "hyper_connection.sinkhorn_iterations": ("u32", 20),
        a + "hyper_connection.epsilon": ("f32", 1e-6),
        a + "nextn_predict_layers": ("u32", 1),
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "joyai-llm"),
        "tokenizer.ggml.tokens": ("[str]", vocabulary(shape.vocab)),
        "tokenizer.ggml.token_type": ("[i32]", [1] * shape.vocab),
        "tokenizer.ggml.merges": ("[str]", ["t 1", "t 2"]),
        "tokenizer.ggml.bos_token_id": ("u32", 0),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
        "general.quantization_version": ("u32", 2),
    }


def model_tensors(shape: Shape, gate_up: T = T.IQ2_XXS, down: T = T.Q2_K) -> dict[str, Entry]:
    """All tensors of a shape as holes; experts in the given types, everything else in its first allowed one."""
    tensors: dict[str, Entry] = {}
    for name, spec in expected_tensors(shape).items():
        type = spec.types[0]
        if name.endswith(("gate_exps.weight", "up_exps.weight")):
            type = gate_up
        elif name.endswith("down_exps.weight"):
            type = down
        tensors[name] = Entry(type, spec.dims)
    return tensors


@pytest.fixture
def draft() -> Callable[..., Draft]:
    """Draft of a good file of a shape."""
    return lambda shape, **types: Draft(model_keys(shape), model_tensors(shape, **types))


@pytest.fixture
def entry() -> type[Entry]:
    return Entry
