"""Random models for tests."""

from __future__ import annotations

from typing import Any

import torch

from ds4.gguf.shape import Shape, expected_tensors

SMALL = Shape(
    name="custom",
    layers=5, hidden=32, heads=4, head_dim=80, rope_dim=16, q_lora_rank=16, o_groups=2, o_lora_rank=8,
    window=16, ratios=(0, 4, 16, 4, 16), index_heads=4, index_dim=32, index_top_k=4,
    experts=6, experts_used=2, expert_hidden=16, route_scale=1.5, hash_layers=2, vocab=64, context=4096,
)  # fmt: skip
"""A shape with every kind of layer, whose windows and blocks are passed within a few dozen tokens."""


def random_tensors(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights of a shape under their GGUF names, scaled so that every part matters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    tensors = {}
    for name, spec in expected_tensors(shape).items():
        size = spec.dims[::-1]
        if "tid2eid" in name:
            order = torch.rand(size[0], shape.experts, generator=generator).argsort(1)
            tensors[name] = order[:, : size[1]].to(torch.int32)
        elif "norm" in name:
            tensors[name] = 1 + 0.1 * normal(*size)
        elif any(part in name for part in ("_base", "sinks", "_ape", "bias")):
            tensors[name] = 0.5 * normal(*size)
        elif "_scale" in name:
            tensors[name] = 0.5 + 0.1 * normal(*size)
        elif "token_embd" in name:
            tensors[name] = normal(*size)
        else:
            tensors[name] = normal(*size) * 1.5 / size[-1] ** 0.5
    return tensors


def random_engine(shape: Shape = SMALL, seed: int = 1, qat_sim: bool = True, **options: Any) -> Any:
    """An engine over `random_tensors`."""
    import ds4

    return ds4.from_tensors(shape, random_tensors(shape, seed), qat_sim=qat_sim, **options)
