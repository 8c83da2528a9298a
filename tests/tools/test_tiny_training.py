"""What trains ds4-tiny: the fast forward equals transformers', every parameter learns, Sinkhorn's gradient is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model as m
import numpy as np
import pytest
import torch
import train
from check import (
    against_transformers,
    flex_against_dense,
    no_parameter_without_gradient,
    randomise,
    sinkhorn_gradient,
)
from tiny_path import TINY


@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (sinkhorn_gradient, 1e-5),
        (against_transformers, 1e-4),
        (flex_against_dense, 1e-3),
        # The language model's loss alone leaves the indexer without one: its choice is not differentiable.
        (no_parameter_without_gradient, 0.0),
    ],
)
def test_the_training_forward(check: Callable[[], float], limit: float) -> None:
    assert TINY.is_dir()
    assert check() <= limit


ROWS, LENGTH, QUERIES = 2, 96, 16


def toy_run(out: Path) -> train.Run:
    """A run before its first step, of a model with two sparse layers."""
    values = {"plan": "smoke", "total": 0.0, "init": "", "out": str(out), "seed": 1, "device": "cpu"}
    run = train.Run(argparse.Namespace(**values, lr=0.02, qat=True))
    randomise(run.model, 1)
    return run


def toy_batch(vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        "ids": rng.integers(0, vocab, (ROWS, LENGTH)),
        "weight": rng.random((ROWS, LENGTH), np.float32),
        "group": rng.integers(0, 3, (ROWS, LENGTH)),
        "positions": rng.integers(LENGTH // 2, LENGTH, (ROWS, QUERIES)),
        "strength": rng.random((ROWS, QUERIES), np.float32),
    }


def indexer_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of every tensor of an indexer; zeros for one without."""
    found = {n: p for n, p in model.named_parameters() if "indexer" in n}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in found.items()}


def test_a_step_trains_every_indexer_by_the_sum_of_their_own_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = m.tiny_shape(
        name="custom", layers=2, ratios=(4, 4), hash_layers=2, vocab=64, hidden=64, heads=2, head_dim=128,
        q_lora_rank=32, o_lora_rank=32, index_heads=2, index_top_k=8, experts=2, expert_hidden=32, window=16,
    )  # fmt: skip
    monkeypatch.setattr(m, "toy_shape", lambda: shape)
    run, batch = toy_run(tmp_path), toy_batch(shape.vocab)
    seen: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(run.optimiser, "step", lambda scale: seen.append(indexer_gradients(run.model)))
    run.step(batch)
    (trained,) = seen
    assert len({name.split(".")[2] for name in trained}) == shape.layers

    t = {name: torch.from_numpy(value) for name, value in batch.items()}
    sample = (t["positions"], t["strength"])
    ce, _, kl, _, _ = run.forward.loss(t["ids"], torch.roll(t["ids"], -1, 1), sample, select=shape.index_top_k)
    ce.mean().backward(retain_graph=True)
    for name, gradient in indexer_gradients(run.model).items():
        assert not gradient.any(), name  # the choice of rows is not differentiable
    run.model.zero_grad()
    (kl[0] + kl[1]).backward()
    for name, gradient in indexer_gradients(run.model).items():
        assert gradient.any(), name
        torch.testing.assert_close(trained[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
