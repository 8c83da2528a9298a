"""Writes ds4-tiny.gguf from a training run's weights.

    PYTHONPATH=src python tools/tiny/export.py --weights DIR [--out src/ds4/data/ds4-tiny.gguf] [--sharpen 1.0]

Types are those of the published Flash files: IQ2_XXS gate and up, Q2_K down, Q8_0 dense matrices and head, F16
embedding, router, hyper-connection, compressor and indexer matrices, F32 the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parent))

import model as m
import quantize
from tokenizers import Tokenizer
from weights import load, read_info

from ds4.engine.loading import tensors_from_transformers
from ds4.gguf.shape import expected_tensors
from ds4.gguf.writer import save

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parents[1] / "src" / "ds4" / "data" / "ds4-tiny.gguf"
LIMIT = 16_000_000
CONTROL, NORMAL = 3, 1


def tokenizer_keys(path: Path) -> dict[str, Any]:
    """The keys `tokenizer.ggml.*` of the file, from a tokenizer.json."""
    tokenizer = Tokenizer.from_file(str(path))
    body = json.loads(path.read_text("utf-8"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    special = {entry["content"] for entry in body["added_tokens"] if entry["special"]}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in body["model"]["merges"]]
    values = {
        "model": "gpt2",
        "pre": "joyai-llm",
        "tokens": tokens,
        "token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "merges": merges,
        "bos_token_id": vocab["<｜begin▁of▁sentence｜>"],
        "eos_token_id": vocab["<｜end▁of▁sentence｜>"],
        "padding_token_id": vocab["<｜▁pad▁｜>"],
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def file_tensors(model: Any, shape: Any) -> tuple[dict[str, torch.Tensor], dict[str, Type]]:
    """Every tensor as the file holds it, blocks as bytes, and the types."""
    source = tensors_from_transformers(model, shape)
    tensors, types = {}, {}
    for name, spec in expected_tensors(replace(shape, name="tiny")).items():  # a toy has the same types
        value = source[name].detach().cpu()
        kind = spec.types[0]
        if name.endswith("ffn_down_exps.weight"):
            kind = Type.Q2_K
        types[name] = kind
        if kind.name in quantize.CODECS:
            tensors[name] = torch.from_numpy(quantize.encode(value.float(), kind.name))
        else:
            tensors[name] = value if kind == Type.I32 else value.float()
    return tensors, types


def export(weights: Path, out: Path, sharpen: float = 1.0) -> int:
    """Write the file; returns its size in bytes. All logits are multiplied by `sharpen`, in the last norm's weight."""
    info = read_info(weights) or {}
    shape = m.toy_shape() if info.get("shape") == "custom" else m.tiny_shape()
    model = m.new_model(shape)
    load(model, weights)
    model.model.norm.weight.data *= sharpen
    tensors, types = file_tensors(model, shape)
    out.parent.mkdir(parents=True, exist_ok=True)
    extra = {
        "general.name": "ds4-tiny",
        "general.license": "mit",
        "general.quantization_version": 2,
        "deepseek4.nextn_predict_layers": 0,
    }
    save(out, shape, tensors, tokenizer=tokenizer_keys(HERE / "tokenizer.json"), metadata=extra, types=types)
    size = out.stat().st_size
    if size > LIMIT:
        raise SystemExit(f"{out}: {size} bytes, the limit is {LIMIT}")
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--sharpen", type=float, default=1.0, help="factor on all logits (1: as trained)")
    args = parser.parse_args()
    print(f"{args.out}: {export(args.weights, args.out, args.sharpen)} bytes")
