"""A random model of the V4 architecture with the real special tokens, small enough to answer at once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

import ds4
from ds4.engine import loading
from ds4.gguf import file as gguf_file
from ds4.gguf import writer
from ds4.gguf.shape import expected_tensors

TOKENIZER = Path(__file__).parents[2] / "tools" / "tiny" / "tokenizer.json"


def tokenizer_metadata() -> dict[str, Any]:
    """The small tokenizer as the keys of a GGUF file."""
    data = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in data["added_tokens"]}
    by_id = {id: token for token, id in data["model"]["vocab"].items()} | special
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [by_id[id] for id in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if id in special else 1 for id in range(len(by_id))],
    }


def small_shape(vocab: int) -> ds4.Shape:
    """Two window layers, one sparse, one dense compressed; everything else as small as the round trips allow."""
    return ds4.Shape(
        name="custom", layers=4, hidden=32, heads=2, head_dim=80, rope_dim=16, q_lora_rank=16, o_groups=1,
        o_lora_rank=16, window=16, ratios=(0, 0, 4, 16), index_heads=2, index_dim=32, index_top_k=8, experts=4,
        experts_used=2, expert_hidden=32, route_scale=1.5, hash_layers=1, vocab=vocab, context=4096,
    )  # fmt: skip


def random_tensors(shape: ds4.Shape, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Seeded weights; norms are 1."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, spec in expected_tensors(shape).items():
        dims = spec.dims[::-1]
        if spec.types == (GGMLQuantizationType.I32,):
            tensors[name] = torch.randint(0, shape.experts, dims, generator=generator, dtype=torch.int32)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(dims)
        else:
            tensors[name] = torch.randn(dims, generator=generator) * scale
    return tensors


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model as a file."""
    metadata = tokenizer_metadata()
    shape = small_shape(len(metadata["tokenizer.ggml.tokens"]))
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    writer.save(path, shape, random_tensors(shape), tokenizer=metadata)
    return path


@pytest.fixture(scope="session")
def engine(model_file: Path) -> ds4.Engine:
    """The random model, loaded; tests make sessions of their own and leave its attributes alone."""
    return loading.load(model_file)


@pytest.fixture
def embedded(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The random model in the place of the one that comes with the package."""
    monkeypatch.setattr(gguf_file, "embedded_model_path", lambda: model_file)
    return model_file


@pytest.fixture(scope="session")
def tokenizer(engine: ds4.Engine) -> ds4.Tokenizer:
    """The small tokenizer."""
    return engine.tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread."""
    torch.set_num_threads(1)


class Screen(io.StringIO):
    """A terminal that remembers what was written to it."""

    def isatty(self) -> bool:
        return True
